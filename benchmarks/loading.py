"""Shuffled reading, and resuming it, against the library datasets: rows a second, seconds to go on, rows lost.

    python benchmarks/loading.py [--rows 1000000] [--buffer 10000] [--rounds 3]

Generates a Parquet corpus of short rows. Every side opens it in a process of its own, reads --rows / 2 shuffled rows
(the rate is that of the second half of them), notes where it stands, opens the corpus again and goes on from there to
the end of the epoch. Medians over the rounds. Writes loading.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


def ours(source, args, folder):
    """open(state) -> iterator of (row, state after it) of train_bi_encoder.py."""
    import train_bi_encoder as script

    flags = ["--train_data", source, "--data_cache", f"{folder}/ours", "--columns", "question", "answer",
             "--shuffle_buffer", args.buffer]  # fmt: skip
    options = script.parse_args(list(map(str, flags)))
    kind = script.StreamSource if "stream" in args.side else script.MappedSource

    def start(state=None):
        rows = kind(0, [source], options).rows(state)
        return ((row[0][0], after) for row, after in rows)

    return start


def peer(source, args, folder):
    """The same of datasets: mapped and shuffled by an index of all rows, or a stream through a buffer."""
    from datasets import load_dataset

    def start(state=None):
        data = load_dataset(
            "parquet", data_files=source, split="train", cache_dir=f"{folder}/peer", streaming="stream" in args.side
        )
        if "stream" in args.side:
            data = data.shuffle(seed=0, buffer_size=args.buffer)
            if state:
                data.load_state_dict(state)
            return ((row["question"], data) for row in data)  # its state is asked for when it is wanted
        data = data.shuffle(seed=0)
        first = state or 0
        rows = data.select(range(first, len(data))) if first else data
        return ((row["question"], first + i) for i, row in enumerate(rows, start=1))

    return start


def measure(args, folder):
    """In a process of its own: print [rows a second, seconds to the next row, rows lost, rows read twice]."""
    start = (ours if "evenstep" in args.side else peer)(args.source, args, folder)
    list(islice(start(), 10))  # the copies that both make are not what is measured
    rows, half = start(), args.rows // 2
    seen = Counter(row for row, _ in islice(rows, half // 2))
    began = time.perf_counter()
    *most, (last, state) = islice(rows, half - half // 2)
    rate = (half - half // 2) / (time.perf_counter() - began)
    seen.update(row for row, _ in most)
    seen[last] += 1
    if hasattr(state, "state_dict"):
        state = state.state_dict()
    state = json.loads(json.dumps(state)) if "evenstep" in args.side else state
    began = time.perf_counter()
    rest = start(state)
    seen[next(rest)[0]] += 1
    seconds = time.perf_counter() - began
    seen.update(row for row, _ in islice(rest, args.rows - half - 1))
    print(json.dumps([rate, seconds, args.rows - len(seen), sum(count - 1 for count in seen.values())]))


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
        return measure(args, Path(args.source).parent)
    from memory import generate

    sides = ("evenstep, mapped", "datasets, mapped", "evenstep, stream", "datasets, stream")
    runs = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        generate(f"{folder}/rows.parquet", args.rows)
        for turn in range(args.rounds):
            for side in sides:
                command = [sys.executable, __file__, "--side", side, "--source", f"{folder}/rows.parquet",
                           "--rows", args.rows, "--buffer", args.buffer]  # fmt: skip
                done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
                runs[side].append(json.loads(done.stdout.splitlines()[-1]))
                print(f"round {turn + 1}, {side}: {runs[side][-1]}", file=sys.stderr)
    print("| side | rows/s | seconds to go on in the middle | rows lost | rows read twice |\n|---|---|---|---|---|")
    for side, measured in runs.items():
        rate, seconds, lost, twice = (statistics.median(column) for column in zip(*measured))
        print(f"| {side} | {rate:,.0f} | {seconds:.2f} | {lost:,.0f} | {twice:,.0f} |")
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
