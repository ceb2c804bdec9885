"""Memory and speed of training against the corpus' rows, mapped and streaming, and how fast a run resumes inside it.

    python benchmarks/memory.py [--rows 100000 10000000] [--steps 300] [--rounds 3]

Generates Parquet corpora of short rows and trains a small static model for as many steps on each, in turns; a first
run makes the Arrow copy, which is measured too. Peak memory is the kernel's ru_maxrss of the whole process; tokens a
second are those of all steps but the first ten. Medians over the rounds; what is said of the last corpus is held
against the first. Writes memory.json.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


def generate(path, count):
    """Parquet of `count` (question, answer) rows, 100 bytes each, in row groups of 50,000."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("question", pa.string()), ("answer", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, count, 50_000):
            numbers = range(first, min(first + 50_000, count))
            questions = [f"how to compute item {n} of list {n * 7919 % count}" for n in numbers]
            answers = [f"def item_{n}(values): return values[{n * 104729 % count}]" for n in numbers]
            writer.write_table(pa.table([questions, answers], schema=schema))


def train(source, flags, folder):
    """(peak resident MB by the kernel's accounting, tokens a second, seconds in all) of one run of the trainer."""
    started = time.perf_counter()
    shutil.rmtree(f"{folder}/run", ignore_errors=True)
    command = [sys.executable, ROOT / "train_bi_encoder.py", "--train_data", source, "--output_dir", f"{folder}/run",
               "--data_cache", f"{folder}/cache", "--batch_size", 256, "--save_every", 0, *flags]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"failed: {command}")
    lines = [json.loads(line) for line in Path(f"{folder}/run/metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return usage.ru_maxrss / 1000, statistics.harmonic_mean(rates[1:] or rates), time.perf_counter() - started


def resume_seconds(source, folder, row):
    """Seconds from an open corpus to the first batch at `row`, and from nothing to the open corpus."""
    from accelerate import Accelerator

    import train_bi_encoder as script

    flags = ["--train_data", source, "--data_cache", f"{folder}/cache", "--batch_size", "256", "--eval_rows", "1000"]
    args = script.parse_args(flags)
    started = time.perf_counter()
    sources, weights, *_ = script.open_data(args, Accelerator(cpu=True))
    opened = time.perf_counter()
    at = {"picks": [row], "sources": [row], "cut": 0, "skipped": 0}
    next(script.row_batches(sources, weights, args, at))
    return time.perf_counter() - opened, opened - started


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 10_000_000])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="memory.json")
    args = parser.parse_args()
    modes = {"mapped": [], "streaming": ["--streaming"]}
    runs = {mode: {rows: [] for rows in args.rows} for mode in ("mapped, first run", *modes)}
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        for rows in args.rows:
            generate(f"{folder}/{rows}.parquet", rows)
        # the model is made from the first corpus once, so that only the data differs
        model = f"{folder}/model"
        train(f"{folder}/{args.rows[0]}.parquet", ["--max_steps", 1], folder)
        shutil.move(f"{folder}/run/model", model)
        shutil.rmtree(f"{folder}/cache")
        flags = ["--model_name_or_path", model, "--max_steps", args.steps, "--learning_rate", 0.005]
        for rows in args.rows:
            before = sum(copy.stat().st_size for copy in Path(folder).glob("cache/*.arrow"))
            runs["mapped, first run"][rows].append(train(f"{folder}/{rows}.parquet", flags, folder))
            after = sum(copy.stat().st_size for copy in Path(folder).glob("cache/*.arrow"))
            files[rows] = {"parquet_bytes": os.path.getsize(f"{folder}/{rows}.parquet"), "copy_bytes": after - before}
        for _ in range(args.rounds):
            for mode, extra in modes.items():
                for rows in args.rows:
                    runs[mode][rows].append(train(f"{folder}/{rows}.parquet", [*flags, *extra], folder))
                    print(mode, rows, *runs[mode][rows][-1], file=sys.stderr)
        for rows in args.rows:
            first, opening = resume_seconds(f"{folder}/{rows}.parquet", folder, rows - rows // 50)
            files[rows] |= {"resume_seconds": first, "open_seconds": opening}
    print(f"| {args.steps} steps of 256 | rows | peak MB | difference | tokens/s | ratio | seconds |")
    print("|---|---|---|---|---|---|---|")
    for mode, measured in runs.items():
        base = None
        for rows, values in measured.items():
            memory, rate, seconds = (statistics.median(column) for column in zip(*values))
            base = base or (memory, values)
            ratio = statistics.median(b[1] / a[1] for a, b in zip(base[1], values))
            print(f"| {mode} | {rows:,} | {memory:.0f} | {memory - base[0]:+.0f} | {rate:,.0f} | {ratio:.3f} "
                  f"| {seconds:.1f} |")  # fmt: skip
    print("\n| rows | Parquet, MB | Arrow copy, MB | opened in, s | first batch after 98 % of the rows, s |")
    print("|---|---|---|---|---|")
    for rows, seen in files.items():
        print(f"| {rows:,} | {seen['parquet_bytes'] / 1e6:,.0f} | {seen['copy_bytes'] / 1e6:,.0f} "
              f"| {seen['open_seconds']:.3f} | {seen['resume_seconds']:.3f} |")  # fmt: skip
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "runs": runs, "files": files}, indent=1))


if __name__ == "__main__":
    main()
