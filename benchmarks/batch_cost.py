"""What a batch costs before it is tokenized: reading, checks, ids of equal texts, dealing to processes; µs a row.

    python benchmarks/batch_cost.py [--rows 500000] [--batch_size 8192 32768] [--processes 8] [--batches 10]

Generates a Parquet corpus of (question, answer) rows of 100 bytes, reads shuffled batches as train_bi_encoder.py does,
and takes the part of one of --processes, up to the Python strings of its texts. Medians over the batches. Writes
batch_cost.json.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--batch_size", type=int, nargs="+", default=[8192, 32_768])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--output", default="batch_cost.json")
    args = parser.parse_args()

    from memory import generate

    import train_bi_encoder as script

    script.make_micro_batches = lambda texts, *_: ([], len(texts), 0)  # tokenizing is not what is measured
    rank = SimpleNamespace(num_processes=args.processes, process_index=0, device=SimpleNamespace(type="cpu"))
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        generate(f"{folder}/rows.parquet", args.rows)
        for size in args.batch_size:
            flags = ["--train_data", f"{folder}/rows.parquet", "--batch_size", str(size), "--eval_rows", "0"]
            options = script.parse_args(flags)
            data = script.open_data(options, script.clean_pairs)
            rows = script.row_batches(data.sources, data.weights, options)
            batches = script.make_batches(rows, None, 2048, options, rank)
            next(batches)
            seconds = []
            for _ in range(args.batches):
                started = time.perf_counter()
                next(batches)
                seconds.append(time.perf_counter() - started)
            results[size] = statistics.median(seconds) / size * 1e6
    print(f"| pairs a batch | µs a row, on each of {args.processes} processes |\n|---|---|")
    for size, cost in results.items():
        print(f"| {size:,} | {cost:.2f} |")
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "microseconds_a_row": results}, indent=1))


if __name__ == "__main__":
    main()
