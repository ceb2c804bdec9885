"""Peak memory of training against the corpus' rows, mapped and streaming, and how fast a run resumes far inside it.

    python benchmarks/memory.py [--small 50000] [--large 5000000] [--steps 300]

Generates two Parquet corpora of short rows and trains a small static model for as many steps on each; a first run
makes the Arrow copy, which is measured too. Peak memory is the kernel's ru_maxrss of the whole process. Writes
memory.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
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


def peak(source, flags, folder):
    """Peak resident MB of one run of the trainer, by the kernel's accounting of the finished process."""
    shutil.rmtree(f"{folder}/run", ignore_errors=True)
    command = [sys.executable, ROOT / "train_bi_encoder.py", "--train_data", source, "--output_dir", f"{folder}/run",
               "--data_cache", f"{folder}/cache", "--batch_size", 256, "--save_every", 0, *flags]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"failed: {command}")
    return usage.ru_maxrss / 1000


def resume_seconds(source, folder, row):
    """Seconds from an open corpus to the first batch at `row`, and from nothing to the open corpus."""
    import time

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
    parser.add_argument("--small", type=int, default=50_000)
    parser.add_argument("--large", type=int, default=5_000_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", default="memory.json")
    args = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in (("small", args.small), ("large", args.large)):
            generate(f"{folder}/{name}.parquet", rows)
        # the model is made from the small corpus once, so that only the data differs
        model = f"{folder}/model"
        peak(f"{folder}/small.parquet", ["--max_steps", 1], folder)
        shutil.move(f"{folder}/run/model", model)
        shutil.rmtree(f"{folder}/cache")
        flags = ["--model_name_or_path", model, "--max_steps", args.steps, "--learning_rate", 0.005]
        for mode, extra in (("mapped, first run", []), ("mapped", []), ("streaming", ["--streaming"])):
            for name in ("small", "large"):
                figures[f"{mode}, {name}"] = peak(f"{folder}/{name}.parquet", [*flags, *extra], folder)
        far = args.large - 2000
        seconds, opening = resume_seconds(f"{folder}/large.parquet", folder, far)
    print(f"| {args.steps} steps of 256 | {args.small:,} rows | {args.large:,} rows | difference |\n|---|---|---|---|")
    for mode in ("mapped, first run", "mapped", "streaming"):
        small, large = figures[f"{mode}, small"], figures[f"{mode}, large"]
        print(f"| {mode} | {small:.0f} MB | {large:.0f} MB | {large - small:+.0f} MB |")
    print(f"\nfirst batch at row {far:,}: {seconds:.3f} s after the corpus was open, which took {opening:.2f} s")
    figures |= {"resume_seconds": seconds, "open_seconds": opening}
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "MB": figures}, indent=1))


if __name__ == "__main__":
    main()
