"""Shuffled reading, and resuming it, against the library datasets: rows a second, seconds to resume, rows lost.

    python benchmarks/loading.py [--rows 1000000] [--buffer 10000] [--rounds 3]

Generates a Parquet corpus of short rows. Each side opens it in a process of its own, reads --rows / 2 shuffled rows in
batches of 1,000 (the rate is that of the second half of them), saves its state, opens the corpus again and reads from
there to the end of the epoch. Medians over the rounds. Writes loading.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
BATCH = 1000
sys.path.insert(0, str(ROOT))


def ours(source, args):
    """Return open(state) -> iterator of (column of a batch, state after it) of train_bi_encoder.py."""
    import train_bi_encoder as script

    flags = ["--model_name_or_path", "none", "--train_data", source, "--columns", "question", "answer",
             "--shuffle_buffer", args.buffer, "--batch_size", BATCH, "--max_steps", 1,
             *["--streaming"] * ("stream" in args.side)]  # fmt: skip
    options = script.parse_args(list(map(str, flags)))

    def start(state=None):
        batches = script.row_batches([script.Source(source, 0, options)], [1], options, state)
        return ((table["question"], after) for table, after in batches)

    return start


def peer(source, args):
    """Return the same of datasets: mapped and shuffled by an index of all rows, or a stream through a buffer."""
    from datasets import load_dataset

    def start(state=None):
        data = load_dataset("parquet", data_files=source, split="train", streaming="stream" in args.side)
        data = data.with_format("arrow")
        if "stream" in args.side:
            data = data.shuffle(seed=0, buffer_size=args.buffer)
            if state:
                data.load_state_dict(state)
            return ((rows["question"], data) for rows in data.iter(BATCH))
        data = data.shuffle(seed=0)
        first = state or 0
        rows = (data.select(range(first, len(data))) if first else data).iter(BATCH)
        return ((table["question"], first + (i + 1) * BATCH) for i, table in enumerate(rows))

    return start


def measure(args):
    """Print [rows a second, seconds to the next batch, rows lost, rows read twice]; in a process of its own."""
    start = (ours if "evenstep" in args.side else peer)(args.source, args)
    next(start())  # the Arrow table that both map is not what is measured
    rows, half, seen = start(), args.rows // 2 // BATCH, []
    seen += [next(rows)[0] for _ in range(half // 2)]
    began = time.perf_counter()
    for _ in range(half - half // 2):
        column, state = next(rows)
        seen.append(column)
    rate = (half - half // 2) * BATCH / (time.perf_counter() - began)
    state = state.state_dict() if hasattr(state, "state_dict") else json.loads(json.dumps(state))
    began = time.perf_counter()
    rest = start(state)
    seen.append(next(rest)[0])
    seconds = time.perf_counter() - began
    for column, _ in rest:
        if sum(map(len, seen)) >= args.rows:
            break
        seen.append(column)
    counts = Counter(text for column in seen for text in column.to_pylist())
    print(json.dumps([rate, seconds, args.rows - len(counts), counts.total() - len(counts)]), flush=True)
    os._exit(0)  # pyarrow threads that still read ahead can abort a normal exit


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--buffer", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="loading.json")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return measure(args)
    from memory import write_rows

    sides = ("evenstep, mapped", "datasets, mapped", "evenstep, stream", "datasets, stream")
    runs = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        write_rows(f"{folder}/rows.parquet", args.rows)
        for turn in range(args.rounds):
            for side in sides:
                command = [sys.executable, __file__, "--side", side, "--source", f"{folder}/rows.parquet",
                           "--rows", args.rows, "--buffer", args.buffer]  # fmt: skip
                done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
                runs[side].append(json.loads(done.stdout.splitlines()[-1]))
                print(f"round {turn + 1}, {side}: {runs[side][-1]}", file=sys.stderr)
    print("| side | rows/s | seconds to resume in the middle | rows lost | rows read twice |\n|---|---|---|---|---|")
    for side, measured in runs.items():
        rate, seconds, lost, twice = (statistics.median(column) for column in zip(*measured))
        print(f"| {side} | {rate:,.0f} | {seconds:.2f} | {lost:,.0f} | {twice:,.0f} |")
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
