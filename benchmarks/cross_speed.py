"""Cross-encoder training speed against CrossEncoderTrainer: same rows, model, batch, loss and threads, in turns.

    python benchmarks/cross_speed.py MODEL_FOLDER SOURCE [--columns docstring code] [--rows 384] [--rounds 3]

Every side trains one epoch with binary cross-entropy on the same labelled pairs (half of them with the document of
another row) in a process of its own: ours, the trainer, and the trainer at its best, with the batch accumulated from
smaller ones, which pads less. Rates are pairs over the seconds of all steps but the first, medians over the rounds;
ratios are within a round. Writes cross_speed.json.
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
    """(pairs a second, mean loss, padding) of train_cross_encoder.py."""
    command = [sys.executable, ROOT / "train_cross_encoder.py", "--model_name_or_path", model, "--train_data", rows,
               "--label_column", "label", "--batch_size", args.batch_size, "--max_length", args.max_length,
               "--eval_rows", 0, "--logging_steps", 1, "--output_dir", folder, "--save_steps", 0,
               ]  # fmt: skip
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(args.batch_size / line["rows_per_second"] for line in lines[1:])
    rate = (len(lines) - 1) * args.batch_size / seconds
    return rate, statistics.mean(line["loss"] for line in lines), lines[-1]["padding_fraction"]


def peer(model, rows, args, folder, accumulate):
    """The same of CrossEncoderTrainer, each batch accumulated from so many."""
    command = [sys.executable, __file__, model, rows, "--peer", accumulate, "--batch_size", args.batch_size,
               "--max_length", args.max_length, "--output", folder]  # fmt: skip
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def train_peer(args):
    """In a process of its own: train one epoch and print [pairs a second, mean loss, padding]."""
    from datasets import load_dataset
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments, losses
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        ends = []

        def on_step_end(self, *_, **__):
            self.ends.append(time.perf_counter())

    model = CrossEncoder(args.model, device="cpu", num_labels=1)
    model.max_seq_length = args.max_length
    seen = {"tokens": 0, "padded": 0}

    def count(module, given):
        mask = given[0]["attention_mask"]
        seen["tokens"] += int(mask.sum())
        seen["padded"] += mask.numel()

    model.register_forward_pre_hook(count)
    settings = CrossEncoderTrainingArguments(
        args.output, num_train_epochs=1, per_device_train_batch_size=args.batch_size // args.peer, use_cpu=True,
        gradient_accumulation_steps=args.peer, report_to="none", learning_rate=2e-5, warmup_ratio=0.1,
        logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = load_dataset("parquet", data_files=args.source, split="train", cache_dir=args.output)
    clock, loss = Clock(), losses.BinaryCrossEntropyLoss(model)
    trainer = CrossEncoderTrainer(model, settings, train_dataset=rows, loss=loss, callbacks=[clock])
    trainer.train()
    losses_seen = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    rate = (len(clock.ends) - 1) * args.batch_size / (clock.ends[-1] - clock.ends[0])
    print(json.dumps([rate, statistics.mean(losses_seen), 1 - seen["tokens"] / max(seen["padded"], 1)]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("source")
    parser.add_argument("--columns", nargs=2, default=["docstring", "code"])
    parser.add_argument("--rows", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--accumulate", type=int, nargs="+", default=[8], help="batches of a step to try for the peer")
    parser.add_argument("--output", default="cross_speed.json")
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer is not None:
        return train_peer(args)

    import pyarrow as pa
    import pyarrow.parquet as pq

    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        rows = f"{folder}/rows.parquet"
        queries, documents = pq.read_table(args.source, columns=args.columns).slice(0, args.rows).to_pydict().values()
        labels = [float(i % 2) for i in range(len(queries))]
        documents = [documents[i] if label else documents[i - 2] for i, label in enumerate(labels)]
        pq.write_table(pa.table({"query": queries, "document": documents, "label": labels}), rows)
        sides = {"train_cross_encoder.py": lambda out: ours(args.model, rows, args, out)}
        for count in [1, *args.accumulate]:
            name = "CrossEncoderTrainer" + (f", {args.batch_size // count} x {count} accumulated" if count > 1 else "")
            sides[name] = lambda out, count=count: peer(args.model, rows, args, out, count)
        measured = {name: [] for name in sides}
        for turn in range(args.rounds):
            for number, (name, run) in enumerate(sides.items()):
                measured[name].append(run(f"{folder}/{turn}-{number}"))
                print(f"round {turn + 1}, {name}: {measured[name][-1][0]:.2f} pairs/s", file=sys.stderr)
    table, own = [], measured["train_cross_encoder.py"]
    print("| side | pairs/s | Evenstep, times as fast | mean loss | padding |\n|---|---|---|---|---|")
    for name, runs in measured.items():
        rate = statistics.median(run[0] for run in runs)
        faster = statistics.median(mine[0] / run[0] for mine, run in zip(own, runs))
        table.append({"side": name, "pairs_per_second": rate, "evenstep_is_faster_by": faster, "runs": runs})
        shown = "" if runs is own else f"{faster:.2f}x"
        print(f"| {name} | {rate:.2f} | {shown} | {runs[0][1]:.3f} | {runs[0][2]:.1%} |")
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "table": table}, indent=1))


if __name__ == "__main__":
    main()
