"""On one GPU in bfloat16: both trainers and the evaluator against sentence-transformers: rates, memory, waiting.

    python prepare_corpus.py
    python benchmarks/gpu.py 'data/python_code/train/*.parquet' [--peak_tflops 989] [--only workers] [--models 22M]

For encoders of 22 and 110 million weights, created from a configuration: no download. The defaults, which measure the
size of micro-batches and keep graphs while memory lasts, also in the memory of smaller GPUs (--gigabytes). Then with
all graphs kept, 1,024 pairs of the smaller model and 256 of the larger: sdpa, larger micro-batches, flash attention
where it is installed, and a copy of the trainer that compiles its transformer; beside the peer's plain loss, with
flash attention and compiled. --grad_cache true, and the peer's cached loss in mini-batches by tokens, also of 8,192
and 32,768 pairs. Then 0, 1, 4 and 8 workers at 64 tokens and at --max_length: "idle" is what they lack of the tokens a
second of a run whose batches are ready. Last, cross-encoders, and encoding as the evaluator does.

Every side reads the same rows, in a process of its own; rates exclude the first steps. FLOPs per token: 6 per weight,
and 12 x layers x width x length for attention (Chowdhery et al. 2022, appendix B), with half of --max_length as
length; what is computed twice is counted once. A side takes at most --limit seconds, a compiled one three times as
many; --device cpu --tiny tests the benchmark itself. Writes gpu.json after each side.
"""

import argparse
import glob
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIZES = {"22M": (384, 6), "110M": (768, 12), "tiny": (64, 2)}  # width and layers of all-MiniLM-L6, of BERT-base
KEPT_ROWS = {"22M": 1024, "110M": 256}  # of a batch all graphs of which fit on 80 GB


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


def read_rows(args, wanted):
    """The first rows of the source with only the columns that are trained on, repeated if they are too few."""
    from datasets import concatenate_datasets, load_dataset

    rows = load_dataset("parquet", data_files=args.source, split="train", cache_dir=f"{args.folder}/cache")
    rows = rows.select_columns(args.columns)
    return concatenate_datasets([rows] * -(-wanted // len(rows))).select(range(wanted))


def peak_memory():
    import torch

    return torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else 0


COMPILED = """
    for transformer in transformers_of(model, "torch.compile"):  # its forward is called without __call__
        transformer.model.forward = torch.compile(transformer.model.forward, dynamic=True)
"""


def load_script(args):
    """Return the trainer of a side as a module; "compiled" is a copy with a line of accelerate_configs/README.md."""
    name = "train_cross_encoder" if args.side.startswith("cross") else "train_bi_encoder"
    if "compiled" not in args.side:
        sys.path.insert(0, str(ROOT))
        return importlib.import_module(name)
    source = (ROOT / f"{name}.py").read_text()
    line = "    model = model.to(device).train()\n"
    assert source.count(line) == 1, "the copy that compiles: edit gpu.py as the trainer was edited"
    Path(args.folder).mkdir(parents=True)
    Path(args.folder, "compiled.py").write_text(source.replace(line, line + COMPILED.lstrip("\n")))
    sys.path.insert(0, args.folder)
    return importlib.import_module("compiled")


def keep_ready(load_batches):
    """Return load_batches() of which the first three batches are repeated for ever: they are ready, and no worker is
    busy."""

    def ready_batches(*options):
        made = load_batches(*options)
        first = list(islice(made, 3))
        made.close()
        for index in count():
            yield replace(first[index % 3], index=index, step=index, waited=0.0)

    return ready_batches


def limit_memory(script, limit):
    """Let the trainer see, and get, so many bytes of the GPU."""
    import torch

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        script.total_memory = lambda device: limit


def run_ours(args):
    """In a process of its own: print (rows/s, tokens/s, padding, share of waiting for data, peak MB, loss)."""
    script = load_script(args)
    if "ready" in args.side:
        script.load_batches = keep_ready(script.load_batches)
    if limit := re.search(r"(\d+) GB", args.side):
        limit_memory(script, int(limit[1]) * 1e9)
    flags = ["--model_name_or_path", args.model, "--train_data", args.source, "--columns", *args.columns,
             "--batch_size", args.batch_size, "--max_length", args.max_length, "--max_steps", args.steps,
             "--eval_rows", 0, "--logging_steps", 1, "--save_steps", 0, "--output_dir", f"{args.folder}/run",
             *args.flags]  # fmt: skip
    script.main(script.parse_args(list(map(str, flags))))
    lines = [json.loads(line) for line in Path(f"{args.folder}/run/metrics.jsonl").read_text().splitlines()]
    lines = lines[args.steps // 5 :]  # workers have prepared the first batches while the model was loaded
    seconds = [args.batch_size / line["rows_per_second"] for line in lines]
    tokens = sum(line["tokens_per_second"] * s for line, s in zip(lines, seconds))
    waited = sum(line["data_wait_fraction"] * s for line, s in zip(lines, seconds)) / sum(seconds)
    padding = sum(line["padding_fraction"] for line in lines) / len(lines)
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


def list_sides(args, kept_rows):
    """Return (title, side, rows of a batch, tokens of a text, steps, flags) of each side."""
    small, *large = args.batch_sizes
    length = args.max_length
    steps = args.steps
    keep = ["--grad_cache", "false", "--micro_batch_tokens", 16_384]
    sdpa = [*keep, "--attn_implementation", "sdpa"]
    flash = [*keep, "--attn_implementation", "flash_attention_2"]
    cached = "trainer, cached loss, 16,384 tokens"
    cross = ["--grad_cache", "false", "--num_negatives", 1, "--loss", "listwise_ce"]
    sides = [
        ("evenstep, defaults", "ours", small, length, steps, []),
        ("evenstep, all graphs kept", "ours", kept_rows, length, steps, sdpa),
        (
            "evenstep, the same, 65,536 tokens",
            "ours",
            kept_rows,
            length,
            steps,
            [*sdpa, "--micro_batch_tokens", 65_536],
        ),
        ("evenstep, the same, flash attention", "ours", kept_rows, length, steps, flash),
        ("evenstep, the same, compiled", "ours compiled", kept_rows, length, steps, sdpa),
        ("trainer, plain loss", "peer", kept_rows, length, steps, ["plain"]),
        ("trainer, plain loss, flash attention", "peer", kept_rows, length, steps, ["plain", "flash"]),
        ("trainer, the same, compiled", "peer", kept_rows, length, steps, ["plain", "compile"]),
        ("evenstep, --grad_cache true", "ours", small, length, steps, ["--grad_cache", "true"]),
        (cached, "peer", small, length, steps, ["cached"]),
    ]
    for gigabytes in args.gigabytes:
        sides.append((f"evenstep, defaults, {gigabytes} GB", f"ours {gigabytes} GB", small, length, 5, []))
    for size in large:
        sides.append(("evenstep, defaults", "ours", size, length, 5, []))
        sides.append((cached, "peer", size, length, 5, ["cached"]))
    for tokens in (64, length):
        sides.append((f"workers: {tokens} tokens, batches ready", "ours ready", small, tokens, args.worker_steps, []))
        for workers in args.workers:
            title = f"workers: {tokens} tokens, {workers}"
            flags = ["--dataloader_num_workers", workers]
            sides.append((title, "ours", small, tokens, args.worker_steps, flags))
    return sides + [
        ("evenstep, cross-encoder", "cross ours", kept_rows, length, steps, cross),
        ("trainer, cross-encoder", "cross peer", 2 * kept_rows, length, steps, []),  # as many pairs
        ("evaluator, encoding", "encode ours", small, length, steps, []),
        ("SentenceTransformer.encode, 32", "encode peer", small, length, steps, [32]),
        ("SentenceTransformer.encode, 256", "encode peer", small, length, steps, [256]),
    ]


def run_side(args, name, folder, side):
    """Run a side in a process of its own; return its line of the table."""
    title, kind, rows, length, steps, flags = side
    model = Path(folder).parent / ("reranker" if "cross" in kind else "model")
    command = [sys.executable, __file__, args.source, "--side", kind, "--model", model, "--folder", folder,
               "--columns", *args.columns, "--batch_size", rows, "--max_length", length, "--steps", steps,
               "--device", args.device, "--flags", *flags]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "ACCELERATE_MIXED_PRECISION": "bf16"}
    line = {"model": name, "side": title, "batch_size": rows, "max_length": length}
    limit = args.limit * (3 if "compiled" in title else 1)
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=limit, env=environment)
    except subprocess.TimeoutExpired:
        return line | {"problem": f"more than {limit} s"}
    if done.returncode:
        return line | {"problem": (done.stderr.strip().splitlines() or ["?"])[-1][:150]}
    micro = re.search(r"micro-batches of ([\d,]+) tokens", done.stdout)
    line["micro_batch_tokens"] = micro and micro[1]
    line["figures"] = json.loads(done.stdout.splitlines()[-1])
    width, layers = SIZES[name]
    weights = 12 * width**2 * layers  # without the embeddings, which are looked up
    each = 6 * weights + 12 * layers * width * length / 2  # texts of half the length, say
    line["mfu"] = line["figures"][1] * each / (3 if "encode" in kind else 1) / args.peak_tflops / 1e12
    return line


def print_table(table):
    titles = ["model", "side", "rows", "micro-batch", "rows/s", "tokens/s", "MFU", "padding", "waiting", "idle"]
    titles += ["peak MB", "loss"]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    ready = {}  # tokens a second of batches that are ready
    for line in table:
        start = f"| {line['model']} | {line['side']} | {line['batch_size']:,}"
        if "figures" not in line:
            print(f"{start} | {line['problem']} |{' |' * (len(titles) - 4)}")
            continue
        rate, tokens, padding, waited, memory, loss = line["figures"]
        key = line["model"], line["max_length"]
        if "batches ready" in line["side"]:
            ready[key] = tokens
        idle = 1 - tokens / ready[key] if line["side"].startswith("workers") and key in ready else None
        share = ["" if value is None else f"{value:.1%}" for value in (line["mfu"], padding, waited, idle)]
        print(f"{start} | {line['micro_batch_tokens'] or ''} | {rate:,.0f} | {tokens:,.0f} | {' | '.join(share)} "
              f"| {memory:,.0f} | {loss or 0:.3f} |")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="Parquet file or glob")
    parser.add_argument("--columns", nargs="+", default=["docstring", "code"])
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1024, 8192, 32_768])
    parser.add_argument("--kept_rows", type=int, help="of a batch with all graphs kept; default: by model")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 4, 8])
    parser.add_argument("--gigabytes", type=int, nargs="*", default=[16, 24, 40], help="memory of smaller GPUs")
    parser.add_argument("--models", nargs="+", default=["22M", "110M"], choices=SIZES)
    parser.add_argument("--only", nargs="+", default=[""], help="run only sides whose title contains one of these")
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--worker_steps", type=int, default=100, help="steps of the sides that compare workers")
    parser.add_argument("--peak_tflops", type=float, default=989, help="of the GPU, dense bfloat16 (H100, H200: 989)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of 2 layers, to try the benchmark")
    parser.add_argument("--limit", type=int, default=120, help="seconds a side may take")
    parser.add_argument("--output", default="gpu.json")
    parser.add_argument("--batch_size", type=int, help=argparse.SUPPRESS)
    for name in ("side", "model", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run = run_encoding if "encode" in args.side else run_ours if "ours" in args.side else run_peer
        return run(args)

    table = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ["tiny"] if args.tiny else args.models:
            write_model(f"{folder}/{name}", args.source, args.columns, *SIZES[name])
            sides = list_sides(args, args.kept_rows or KEPT_ROWS.get(name, args.batch_sizes[0]))
            for number, side in enumerate(sides):
                if "flash" in side[0] and not importlib.util.find_spec("flash_attn"):
                    continue
                if any(words in side[0] for words in args.only):
                    table.append(run_side(args, name, f"{folder}/{name}/{number}", side))
                    print(table[-1], file=sys.stderr)
                    Path(args.output).write_text(json.dumps({"arguments": vars(args), "table": table}, indent=1))
    print_table(table)


if __name__ == "__main__":
    main()
