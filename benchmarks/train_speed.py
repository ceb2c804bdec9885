"""Training speed against SentenceTransformerTrainer: same rows, model, batch, loss, precision and threads, in turns.

    python benchmarks/train_speed.py MODEL_FOLDER SOURCE [--columns docstring code] [--rows 256] [--rounds 2]
        [--mixed_precision bf16]

Every side trains one epoch over the same rows in a process of its own: ours, the trainer with its plain loss, the
trainer with its cached loss, in mini-batches of so many texts or tokens. Rates are rows over the seconds of all
steps but the first, medians over the rounds; ratios are within a round. The mean loss is printed to show that all
do the same work. Writes train_speed.json.
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


def ours(model, rows, args, folder):
    """(rows a second, mean loss) of train_bi_encoder.py."""
    command = [sys.executable, ROOT / "train_bi_encoder.py", "--model_name_or_path", model, "--train_data", rows,
               "--batch_size", args.batch_size, "--max_length", args.max_length, "--eval_rows", 0,
               "--logging_steps", 1, "--output_dir", folder, "--save_steps", 0]  # fmt: skip
    environment = {**os.environ, "ACCELERATE_MIXED_PRECISION": args.mixed_precision}  # as `accelerate launch` does
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr, env=environment)
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(args.batch_size / line["rows_per_second"] for line in lines[1:])
    return (len(lines) - 1) * args.batch_size / seconds, statistics.mean(line["loss"] for line in lines)


def peer(model, rows, args, folder, options):
    """(rows a second, mean loss) of SentenceTransformerTrainer, with its cached loss if that has options."""
    command = [sys.executable, __file__, model, rows, "--peer", json.dumps(options), "--output", folder,
               "--batch_size", args.batch_size, "--max_length", args.max_length,
               "--mixed_precision", args.mixed_precision]  # fmt: skip
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def train_peer(args):
    """In a process of its own: train one epoch and print [rows a second, mean loss]."""
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
            self.ends.append(time.perf_counter())

    model = SentenceTransformer(args.model, device="cpu")
    model.max_seq_length = args.max_length
    loss = losses.MultipleNegativesRankingLoss(model)
    if options := json.loads(args.peer):
        loss = losses.CachedMultipleNegativesRankingLoss(model, **options)
    settings = SentenceTransformerTrainingArguments(
        args.output, num_train_epochs=1, per_device_train_batch_size=args.batch_size, use_cpu=True, report_to="none",
        learning_rate=2e-5, warmup_ratio=0.1, logging_steps=1, save_strategy="no", disable_tqdm=True,
        bf16=args.mixed_precision == "bf16",
    )  # fmt: skip
    rows = load_dataset("parquet", data_files=args.source, split="train", cache_dir=args.output)
    clock = Clock()
    trainer = SentenceTransformerTrainer(model, settings, train_dataset=rows, loss=loss, callbacks=[clock])
    trainer.train()
    losses_seen = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    rate = (len(clock.ends) - 1) * args.batch_size / (clock.ends[-1] - clock.ends[0])
    print(json.dumps([rate, statistics.mean(losses_seen)]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("source")
    parser.add_argument("--columns", nargs="+", default=["docstring", "code"])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument(
        "--cached", type=int, nargs="*", default=[8], help="mini-batch sizes of the cached loss to try"
    )
    parser.add_argument("--cached_tokens", type=int, nargs="*", default=[1024, 2048, 4096], help="the same, in tokens")
    parser.add_argument("--mixed_precision", default="no", choices=["no", "bf16"], help="of all sides")
    parser.add_argument("--output", default="train_speed.json")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer is not None:
        return train_peer(args)

    import pyarrow.parquet as pq

    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        rows = f"{folder}/rows.parquet"
        pq.write_table(pq.read_table(args.source, columns=args.columns).slice(0, args.rows), rows)
        sides = {"evenstep": lambda out: ours(args.model, rows, args, out)}
        sides["trainer, plain loss"] = lambda out: peer(args.model, rows, args, out, {})
        cached = [{"mini_batch_size": size} for size in args.cached]
        for options in cached + [{"mini_batch_num_tokens": tokens} for tokens in args.cached_tokens]:
            name = f"trainer, cached loss, {json.dumps(options)}"
            sides[name] = lambda out, options=options: peer(args.model, rows, args, out, options)
        measured = {name: [] for name in sides}
        for turn in range(args.rounds):
            for number, (name, run) in enumerate(sides.items()):
                measured[name].append(run(f"{folder}/{turn}-{number}"))
                print(f"round {turn + 1}, {name}: {measured[name][-1][0]:.2f} rows/s", file=sys.stderr)
    table = []
    for name, runs in measured.items():
        ratios = [mine[0] / run[0] for mine, run in zip(measured["evenstep"], runs)]
        rate = statistics.median(rate for rate, _ in runs)
        faster = statistics.median(ratios)
        table.append({"side": name, "rows_per_second": rate, "evenstep_is_faster_by": faster, "mean_loss": runs[0][1]})
        table[-1]["runs"] = runs
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "table": table}, indent=1))
    print("| side | rows/s | Evenstep, times as fast | mean loss |\n|---|---|---|---|")
    for line in table:
        faster = "" if line["side"] == "evenstep" else f"{line['evenstep_is_faster_by']:.2f}x"
        print(f"| {line['side']} | {line['rows_per_second']:.2f} | {faster} | {line['mean_loss']:.3f} |")


if __name__ == "__main__":
    main()
