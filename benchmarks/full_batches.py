"""The trainer's tokens a second against those of the same model on micro-batches without any padding, in turns.

    python benchmarks/full_batches.py MODEL_FOLDER SOURCE [--columns docstring code] [--steps 4] [--rounds 3]

The ceiling is a bare loop of forward and backward passes over texts of one length, as many as --micro_batch_tokens
hold, and an AdamW step for as many tokens as a batch of the trainer has: no reading, no tokenizer, no loss. The length
is the mean over the source's tokens, so that a token attends to as many others on both sides. Also
reports the fraction of its time that the trainer waits for data. Writes full_batches.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def ours(args, folder):
    """(tokens a second, padding, share of the time spent waiting for data) of train_bi_encoder.py."""
    command = [sys.executable, ROOT / "train_bi_encoder.py", "--model_name_or_path", args.model, "--train_data",
               args.source, "--columns", *args.columns, "--batch_size", args.batch_size, "--max_length",
               args.max_length, "--micro_batch_tokens", args.micro_batch_tokens, "--eval_rows", 0,
               "--logging_steps", 1, "--max_steps", args.steps + 1, "--save_steps", 0,
               "--output_dir", folder]  # fmt: skip
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()][1:]
    seconds = [args.batch_size / line["rows_per_second"] for line in lines]
    tokens = sum(line["tokens_per_second"] * s for line, s in zip(lines, seconds))
    waited = sum(line["data_wait_fraction"] * s for line, s in zip(lines, seconds))
    padding = statistics.mean(line["padding_fraction"] for line in lines)
    return tokens / sum(seconds), padding, waited / sum(seconds), tokens / len(lines)


def ceiling(args, tokens):
    """In a process of its own: tokens a second of the bare model, with an optimizer step every `tokens`."""
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(args.model, device="cpu").float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    shape = (args.micro_batch_tokens // args.length, args.length)
    passes, done = max(1, round(tokens / shape[0] / shape[1])), 0
    for step in range(args.steps + 1):
        if step == 1:  # the first has warmed up
            started = time.perf_counter()
        parts = []
        for _ in range(passes):
            ids = torch.randint(1000, 20_000, shape)
            parts.append(model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"])
        sum((part * part.detach()).sum() for part in parts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done += passes * shape[0] * shape[1] * (step > 0)
    print(done / (time.perf_counter() - started))


def mean_length(args):
    """Tokens of the text that a token of the source stands in, on average: sum of squares over sum of lengths."""
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    cells = pq.read_table(args.source, columns=args.columns).slice(0, 2000).to_pydict().values()
    texts = [text for column in cells for text in column]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lengths = [len(ids) for ids in tokenizer(texts, truncation=True, max_length=args.max_length)["input_ids"]]
    return round(sum(n * n for n in lengths) / sum(lengths))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("source")
    parser.add_argument("--columns", nargs="+", default=["docstring", "code"])
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--micro_batch_tokens", type=int, default=2048)
    parser.add_argument("--length", type=int, help="tokens of the texts of the bare loop; default: as above")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="full_batches.json")
    parser.add_argument("--ceiling", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ceiling:
        return ceiling(args, args.ceiling)
    os.environ["HF_HUB_OFFLINE"] = "1"
    args.length = args.length or mean_length(args)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds):
            rate, padding, waited, tokens = ours(args, f"{folder}/{turn}")
            command = [sys.executable, __file__, args.model, args.source, "--ceiling", tokens, "--steps", args.steps,
                       "--length", args.length, "--micro_batch_tokens", args.micro_batch_tokens]  # fmt: skip
            full = float(subprocess.run(list(map(str, command)), check=True, capture_output=True).stdout.split()[-1])
            runs.append([rate, full, padding, waited])
            print(f"round {turn + 1}: {rate:,.0f} of {full:,.0f} tokens/s", file=sys.stderr)
    rate, full, padding, waited = (statistics.median(column) for column in zip(*runs))
    ratio = statistics.median(run[0] / run[1] for run in runs)
    print(f"| tokens/s | bare model, texts of {args.length} | ratio | padding | waiting for data |")
    print(f"|---|---|---|---|---|\n| {rate:,.0f} | {full:,.0f} | {ratio:.1%} | {padding:.1%} | {waited:.2%} |")
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
