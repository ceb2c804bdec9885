"""On one GPU in bfloat16: both trainers and the evaluator against sentence-transformers: rates, memory, waiting.

    python prepare_corpus.py
    python benchmarks/gpu.py 'data/python_code/train/*.parquet' [--peak_tflops 989]

For encoders of 22 and 110 million weights, created from a configuration: no download. Batches of 1,024
pairs: --grad_cache false with sdpa, larger micro-batches, flash attention where it is installed, torch.compile;
--grad_cache; the peer's plain loss (flash attention, torch.compile) and its cached loss in mini-batches by tokens.
Batches of 8,192 and 32,768: --grad_cache and the cached loss. Then cross-encoders on 1,024 pairs (--grad_cache false),
and encoding as the evaluator does. Every side reads the same rows, in a process of its own; rates exclude the first
three steps. FLOPs per token: 6 per weight, and 12 x layers x width x length for attention (Chowdhery et al. 2022,
appendix B), with half of --max_length as length; what --grad_cache and the cached loss compute twice is counted once.
A side takes at most --limit seconds; --device cpu --tiny tests the benchmark itself. Writes gpu.json after each side.
"""

import argparse
import glob
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIZES = {"22M": (384, 6), "110M": (768, 12)}  # width and layers of all-MiniLM-L6 and of BERT-base


def write_model(folder, source, columns, width, layers):
    """A BERT of random weights with a tokenizer made for the source, as a SentenceTransformer."""
    import pyarrow.parquet as pq
    import torch
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    rows = pq.read_table(sorted(glob.glob(source))[0], columns=columns)[:5000].to_pydict()
    texts = [text for cells in rows.values() for text in cells]
    wordpieces = BertWordPieceTokenizer()
    wordpieces.train_from_iterator(texts, vocab_size=30_522, show_progress=False)
    BertTokenizerFast(tokenizer_object=wordpieces._tokenizer, model_max_length=512).save_pretrained(f"{folder}/bert")
    torch.manual_seed(0)
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 12 if width > 64 else 2}
    BertModel(BertConfig(intermediate_size=4 * width, **shape)).save_pretrained(f"{folder}/bert")
    SentenceTransformer(f"{folder}/bert", device="cpu").save_pretrained(f"{folder}/model", create_model_card=False)
    CrossEncoder(f"{folder}/bert", num_labels=1, device="cpu").save_pretrained(f"{folder}/reranker")


def read_rows(args, count):
    """The first rows of the source with only the columns that are trained on, repeated if they are too few."""
    from datasets import concatenate_datasets, load_dataset

    rows = load_dataset("parquet", data_files=args.source, split="train", cache_dir=f"{args.folder}/cache")
    rows = rows.select_columns(args.columns)
    return concatenate_datasets([rows] * -(-count // len(rows))).select(range(count))


def peak_memory():
    import torch

    return torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else 0


def run_ours(args):
    """In a process of its own: print (rows/s, tokens/s, padding, share of waiting for data, peak MB, loss)."""
    sys.path.insert(0, str(ROOT))
    script = importlib.import_module("train_cross_encoder" if args.side.startswith("cross") else "train_bi_encoder")
    flags = ["--model_name_or_path", args.model, "--train_data", args.source, "--columns", *args.columns,
             "--batch_size", args.batch_size, "--max_length", args.max_length, "--max_steps", args.steps,
             "--eval_rows", 0, "--logging_steps", 1, "--save_steps", 0, "--output_dir", args.folder,
             *args.flags]  # fmt: skip
    script.main(script.parse_args(list(map(str, flags))))
    lines = [json.loads(line) for line in Path(f"{args.folder}/metrics.jsonl").read_text().splitlines()][3:]
    seconds = [args.batch_size / line["rows_per_second"] for line in lines]
    tokens = sum(line["tokens_per_second"] * s for line, s in zip(lines, seconds))
    padding, waited = (
        sum(line[f"{name}_fraction"] for line in lines) / len(lines) for name in ("padding", "data_wait")
    )
    rate = args.batch_size * len(lines) / sum(seconds)
    print(json.dumps([rate, tokens / sum(seconds), padding, waited, peak_memory(), lines[-1]["loss"]]))


def run_peer(args):
    """The same of SentenceTransformerTrainer or CrossEncoderTrainer; tokens are counted without padding."""
    import torch
    from sentence_transformers import cross_encoder, sentence_transformer
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        ends = []

        def on_step_end(self, *_, **__):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    cross, rows = args.side.startswith("cross"), read_rows(args, args.batch_size * args.steps)
    options = {"attn_implementation": "flash_attention_2"} if "flash" in args.flags else {}
    if cross:
        package, prefix = cross_encoder, "CrossEncoder"
        model = cross_encoder.CrossEncoder(args.model, num_labels=1, model_kwargs=options)
        loss = cross_encoder.losses.BinaryCrossEntropyLoss(model)
        rows = rows.add_column("label", [i % 2 for i in range(len(rows))])
    else:
        package, prefix = sentence_transformer, "SentenceTransformer"
        model = sentence_transformer.SentenceTransformer(args.model, model_kwargs=options)
        loss = sentence_transformer.losses.MultipleNegativesRankingLoss(model)
        if "cached" in args.flags:
            loss = sentence_transformer.losses.CachedMultipleNegativesRankingLoss(model, mini_batch_num_tokens=16_384)
    model.max_seq_length = args.max_length
    settings = getattr(package, f"{prefix}TrainingArguments")(
        args.folder, max_steps=args.steps, per_device_train_batch_size=args.batch_size, bf16=True, report_to="none",
        learning_rate=2e-5, logging_steps=1, save_strategy="no", disable_tqdm=True, dataloader_num_workers=4,
        torch_compile="compile" in args.flags, use_cpu=args.device == "cpu",
    )  # fmt: skip
    clock = Clock()
    trainer = getattr(package, f"{prefix}Trainer")
    trainer = trainer(model, settings, train_dataset=rows, loss=loss, callbacks=[clock])
    trainer.train()
    cells, pairs = [list(rows[column]) for column in args.columns], {}
    if cross:
        cells, pairs = cells[:1], {"text_pair": cells[1]}
    lengths = (model.tokenizer(column, **pairs, truncation=True, max_length=args.max_length) for column in cells)
    tokens = sum(len(ids) for column in lengths for ids in column["input_ids"]) / len(rows)
    rate = (args.steps - 3) * args.batch_size / (clock.ends[-1] - clock.ends[2])
    seen = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(json.dumps([rate, rate * tokens, None, None, peak_memory(), seen[-1]]))


def run_encoding(args):
    """The same of encoding the second column: by the evaluator, cache included, or by SentenceTransformer.encode."""
    import torch

    texts = list(read_rows(args, args.batch_size * args.steps)[args.columns[1]])
    if args.side == "encode ours":
        sys.path.insert(0, str(ROOT))
        from accelerate import Accelerator

        import eval_incremental as script

        settings = script.Args(max_length=args.max_length, cache_dir=f"{args.folder}/cache_of_vectors")
        encoder = script.CachedEncoder(args.model, settings, Accelerator(cpu=args.device == "cpu"))
        model, size = encoder.model, settings.corpus_chunk_size

        def encode(part):
            encoder.encode(part, "document")
    else:
        from sentence_transformers import SentenceTransformer

        model, size = SentenceTransformer(args.model, model_kwargs={"dtype": torch.bfloat16}), len(texts)
        model.max_seq_length = args.max_length

        def encode(part):
            model.encode(part, batch_size=int(args.flags[0]), show_progress_bar=False)

    encode([text[::-1] for text in texts[:size]])  # warm, and not in the cache
    started = time.perf_counter()
    for first in range(0, len(texts), size):
        encode(texts[first : first + size])
    seconds = time.perf_counter() - started
    model.tokenizer.backend_tokenizer.no_padding()
    tokens = sum(map(len, model.tokenizer(texts, truncation=True, max_length=args.max_length)["input_ids"]))
    print(json.dumps([len(texts) / seconds, tokens / seconds, None, None, peak_memory(), None]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="Parquet file or glob")
    parser.add_argument("--columns", nargs="+", default=["docstring", "code"])
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1024, 8192, 32_768])
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--peak_tflops", type=float, default=989, help="of the GPU, dense bfloat16 (H100, H200: 989)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of 2 layers, to try the benchmark")
    parser.add_argument("--limit", type=int, default=100, help="seconds a side may take")
    parser.add_argument("--output", default="gpu.json")
    parser.add_argument("--batch_size", type=int, help=argparse.SUPPRESS)
    for name in ("side", "model", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run = run_encoding if "encode" in args.side else run_ours if "ours" in args.side else run_peer
        return run(args)

    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
    environment |= {"ACCELERATE_MIXED_PRECISION": "bf16"}
    compiled = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_USE_DYNAMIC": "true"}
    small, *large = args.batch_sizes
    keep = ["--grad_cache", "false"]
    sides = [  # name, script, rows of a batch, flags, environment
        ("evenstep, sdpa", "ours", small, [*keep, "--attn_implementation", "sdpa"], {}),
        ("evenstep, sdpa, micro-batches of 65,536", "ours", small, [*keep, "--micro_batch_tokens", 65_536], {}),
        ("evenstep, sdpa, --grad_cache", "ours", small, ["--grad_cache"], {}),
        ("evenstep, flash attention", "ours", small, [*keep, "--attn_implementation", "flash_attention_2"], {}),
        ("evenstep, sdpa, compiled", "ours", small, keep, compiled),
        ("trainer, plain loss", "peer", small, ["plain"], {}),
        ("trainer, plain loss, flash attention", "peer", small, ["plain", "flash"], {}),
        ("trainer, cached loss, 16,384 tokens", "peer", small, ["cached"], {}),
        ("trainer, plain loss, compiled", "peer", small, ["plain", "compile"], {}),
    ]
    for size in large:
        sides.append(("evenstep, --grad_cache", "ours", size, ["--grad_cache"], {}))
        sides.append(("trainer, cached loss, 16,384 tokens", "peer", size, ["cached"], {}))
    cross = [*keep, "--num_negatives", 1, "--loss", "listwise_ce"]
    sides += [
        ("evenstep, cross-encoder", "cross ours", small, cross, {}),
        ("trainer, cross-encoder", "cross peer", 2 * small, [], {}),  # as many pairs
        ("evaluator, encoding", "encode ours", small, [], {}),
        ("SentenceTransformer.encode, 32", "encode peer", small, [32], {}),
        ("SentenceTransformer.encode, 256", "encode peer", small, [256], {}),
    ]
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (width, layers) in {"tiny": (64, 2)}.items() if args.tiny else SIZES.items():
            write_model(f"{folder}/{name}", args.source, args.columns, width, layers)
            for number, (title, side, size, flags, more) in enumerate(sides):
                steps = args.steps if size == small else 5
                model = f"{folder}/{name}/{'reranker' if 'cross' in side else 'model'}"
                command = [sys.executable, __file__, args.source, "--side", side, "--model", model, "--folder",
                           f"{folder}/{name}/{number}", "--columns", *args.columns, "--batch_size", size,
                           "--max_length", args.max_length, "--steps", steps, "--device", args.device,
                           "--flags", *flags]  # fmt: skip
                try:
                    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=args.limit,
                                          env={**environment, **more})  # fmt: skip
                    figures = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else None
                    problem = "" if figures else (done.stderr.strip().splitlines() or ["?"])[-1][:150]
                except subprocess.TimeoutExpired:
                    figures, problem = None, f"more than {args.limit} s"
                line = {"model": name, "side": title, "batch_size": size, "figures": figures, "problem": problem}
                if figures:
                    weights = 12 * width**2 * layers  # without the embeddings, which are looked up
                    each = 6 * weights + 12 * layers * width * args.max_length / 2  # texts of half the length, say
                    line["mfu"] = figures[1] * each / (3 if "encode" in side else 1) / args.peak_tflops / 1e12
                table.append(line)
                print(line, file=sys.stderr)
                Path(args.output).write_text(json.dumps({"arguments": vars(args), "table": table}, indent=1))
    print(
        "| model | side | rows | rows/s | tokens/s | MFU | padding | waiting | peak MB | loss |\n" + "|---" * 10 + "|"
    )
    for line in table:
        shown = f"{line['problem']} | | | | | |"
        if line["figures"]:
            rate, tokens, padding, waited, memory, loss = line["figures"]
            share = ["" if value is None else f"{value:.1%}" for value in (line["mfu"], padding, waited)]
            shown = f"{rate:,.0f} | {tokens:,.0f} | {' | '.join(share)} | {memory:,.0f} | {loss or 0:.3f}"
        print(f"| {line['model']} | {line['side']} | {line['batch_size']:,} | {shown} |")


if __name__ == "__main__":
    main()
