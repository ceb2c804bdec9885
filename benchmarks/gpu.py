"""On one GPU in bfloat16: tokens a second, model FLOPs utilisation, peak memory, against SentenceTransformerTrainer.

    python prepare_corpus.py
    python benchmarks/gpu.py data/python_code/train/packages-00000-of-00003.parquet [--peak_tflops 989]

For encoders of 22 and 110 million weights, made from their configuration, so that no model is wanted: the trainer with
padded attention (sdpa), larger micro-batches, --grad_cache, flash attention where it is installed, and torch.compile,
then the peer's trainer with its plain loss (flash attention, torch.compile) and its cached loss. Every side trains the
same rows by batches of --batch_size in a process of its own; rates are those of the steps after the first three. A
weight costs a token 6 FLOPs, and attention 12 x layers x width x length (Chowdhery et al. 2022, appendix B), where the
length is half of --max_length; what --grad_cache and the cached loss compute twice is counted once. Some eight
minutes; --device cpu --tiny tries the benchmark itself. Writes gpu.json.
"""

import argparse
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
    from sentence_transformers import SentenceTransformer
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    texts = [text for cells in pq.read_table(source, columns=columns)[:5000].to_pydict().values() for text in cells]
    wordpieces = BertWordPieceTokenizer()
    wordpieces.train_from_iterator(texts, vocab_size=30_522, show_progress=False)
    BertTokenizerFast(tokenizer_object=wordpieces._tokenizer, model_max_length=512).save_pretrained(f"{folder}/bert")
    torch.manual_seed(0)
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 12 if width > 64 else 2}
    BertModel(BertConfig(intermediate_size=4 * width, **shape)).save_pretrained(f"{folder}/bert")
    SentenceTransformer(f"{folder}/bert", device="cpu").save_pretrained(f"{folder}/model", create_model_card=False)
    return f"{folder}/model"


def run_ours(args):
    """In a process of its own: print (rows a second, tokens a second, padding, peak memory in MB, loss)."""
    import torch

    sys.path.insert(0, str(ROOT))
    import train_bi_encoder as script

    flags = ["--model_name_or_path", args.model, "--train_data", args.source, "--columns", *args.columns,
             "--batch_size", args.batch_size, "--max_length", args.max_length, "--max_steps", args.steps,
             "--eval_rows", 0, "--logging_steps", 1, "--save_steps", 0, "--output_dir", args.folder,
             *args.flags]  # fmt: skip
    script.main(script.parse_args(list(map(str, flags))))
    lines = [json.loads(line) for line in Path(f"{args.folder}/metrics.jsonl").read_text().splitlines()][3:]
    seconds = [args.batch_size / line["rows_per_second"] for line in lines]
    tokens = sum(line["tokens_per_second"] * s for line, s in zip(lines, seconds))
    padding = sum(line["padding_fraction"] for line in lines) / len(lines)
    memory = torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else 0
    rate = args.batch_size * len(lines) / sum(seconds)
    print(json.dumps([rate, tokens / sum(seconds), padding, memory, lines[-1]["loss"]]))


def run_peer(args):
    """The same of SentenceTransformerTrainer; its tokens are counted by its own tokenizer, without padding."""
    import torch
    from datasets import load_dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        ends = []

        def on_step_end(self, *_, **__):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    options = {"attn_implementation": "flash_attention_2"} if "flash" in args.flags else {}
    model = SentenceTransformer(args.model, model_kwargs=options)
    model.max_seq_length = args.max_length
    loss = losses.MultipleNegativesRankingLoss(model)
    if "cached" in args.flags:
        loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=128)
    rows = load_dataset("parquet", data_files=args.source, split="train", cache_dir=f"{args.folder}/cache")
    rows = rows.select_columns(args.columns).select(range(args.batch_size * args.steps))
    settings = SentenceTransformerTrainingArguments(
        args.folder, max_steps=args.steps, per_device_train_batch_size=args.batch_size, bf16=True, report_to="none",
        learning_rate=2e-5, logging_steps=1, save_strategy="no", disable_tqdm=True, dataloader_num_workers=4,
        torch_compile="compile" in args.flags, use_cpu=args.device == "cpu",
    )  # fmt: skip
    clock = Clock()
    trainer = SentenceTransformerTrainer(model, settings, train_dataset=rows, loss=loss, callbacks=[clock])
    trainer.train()
    cells = [text for column in args.columns for text in rows[column]]
    lengths = map(len, model.tokenizer(cells, truncation=True, max_length=args.max_length)["input_ids"])
    rate = (args.steps - 3) * args.batch_size / (clock.ends[-1] - clock.ends[2])
    memory = torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else 0
    seen = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(json.dumps([rate, rate * sum(lengths) / len(rows), None, memory, seen[-1]]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--columns", nargs="+", default=["docstring", "code"])
    parser.add_argument("--batch_size", type=int, default=1024)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--peak_tflops", type=float, default=989, help="of the GPU, dense bfloat16 (H100, H200: 989)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of 2 layers, to try the benchmark")
    parser.add_argument("--limit", type=int, default=100, help="seconds a side may take")
    parser.add_argument("--output", default="gpu.json")
    for name in ("side", "model", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return run_ours(args) if args.side == "ours" else run_peer(args)

    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
    environment |= {"ACCELERATE_MIXED_PRECISION": "bf16"}
    compiled = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_USE_DYNAMIC": "true"}
    sides = [  # name, script, flags, environment
        ("evenstep, sdpa", "ours", ["--attn_implementation", "sdpa"], {}),
        ("evenstep, sdpa, micro-batches of 65,536", "ours", ["--micro_batch_tokens", 65_536], {}),
        ("evenstep, sdpa, --grad_cache", "ours", ["--grad_cache"], {}),
        ("evenstep, flash attention", "ours", ["--attn_implementation", "flash_attention_2"], {}),
        ("evenstep, sdpa, compiled", "ours", [], compiled),
        ("trainer, plain loss", "peer", ["plain"], {}),
        ("trainer, plain loss, flash attention", "peer", ["plain", "flash"], {}),
        ("trainer, cached loss of 128", "peer", ["cached"], {}),
        ("trainer, plain loss, compiled", "peer", ["plain", "compile"], {}),
    ]
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for size, (width, layers) in {"tiny": (64, 2)}.items() if args.tiny else SIZES.items():
            model = write_model(f"{folder}/{size}", args.source, args.columns, width, layers)
            for number, (name, side, flags, more) in enumerate(sides):
                command = [sys.executable, __file__, args.source, "--side", side, "--model", model, "--folder",
                           f"{folder}/{size}/{number}", "--columns", *args.columns, "--batch_size", args.batch_size,
                           "--max_length", args.max_length, "--steps", args.steps, "--device", args.device,
                           "--flags", *flags]  # fmt: skip
                try:
                    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=args.limit,
                                          env={**environment, **more})  # fmt: skip
                    figures = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else None
                    problem = "" if figures else (done.stderr.strip().splitlines() or ["?"])[-1][:150]
                except subprocess.TimeoutExpired:
                    figures, problem = None, f"more than {args.limit} s"
                table.append({"model": size, "side": name, "figures": figures, "problem": problem})
                if figures:
                    weights = 12 * width**2 * layers  # without the embeddings, which are looked up
                    each = 6 * weights + 12 * layers * width * args.max_length / 2  # texts of half the length, say
                    table[-1]["mfu"] = figures[1] * each / args.peak_tflops / 1e12
                print(table[-1], file=sys.stderr)
                Path(args.output).write_text(json.dumps({"arguments": vars(args), "table": table}, indent=1))
    print("| model | side | rows/s | tokens/s | MFU | padding | peak MB | loss |\n|---|---|---|---|---|---|---|---|")
    for line in table:
        if line["figures"]:
            rate, tokens, padding, memory, loss = line["figures"]
            padded = "" if padding is None else f"{padding:.1%}"
            shown = f"{rate:,.0f} | {tokens:,.0f} | {line['mfu']:.1%} | {padded} | {memory:,.0f} | {loss:.3f}"
        else:
            shown = f"{line['problem']} | | | | |"
        print(f"| {line['model']} | {line['side']} | {shown} |")


if __name__ == "__main__":
    main()
