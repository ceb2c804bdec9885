"""Memory and speed of training against the corpus' rows, mapped and streaming, and how fast a run resumes inside it.

    python benchmarks/memory.py [--small 100000] [--large 10000000] [--steps 300] [--rounds 3]

Generates two Parquet corpora of short rows and trains a small static model for as many steps on each, in turns; a
first run makes the Arrow copy, which is measured too. Peak memory is the kernel's ru_maxrss of the whole process;
tokens a second are those of all steps but the first ten. Medians over the rounds. Writes memory.json.
"""

import argparse
import json
import os
import shutil
import statistics
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


def train(source, flags, folder):
    """(peak resident MB by the kernel's accounting, tokens a second) of one run of the trainer."""
    shutil.rmtree(f"{folder}/run", ignore_errors=True)
    command = [sys.executable, ROOT / "train_bi_encoder.py", "--train_data", source, "--output_dir", f"{folder}/run",
               "--data_cache", f"{folder}/cache", "--batch_size", 256, "--save_every", 0, *flags]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"failed: {command}")
    lines = [json.loads(line) for line in Path(f"{folder}/run/metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return usage.ru_maxrss / 1000, statistics.harmonic_mean(rates[1:] or rates)


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
    parser.add_argument("--small", type=int, default=100_000)
    parser.add_argument("--large", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="memory.json")
    args = parser.parse_args()
    modes = {"mapped": [], "streaming": ["--streaming"]}
    runs = {mode: {"small": [], "large": []} for mode in ("mapped, first run", *modes)}
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in (("small", args.small), ("large", args.large)):
            generate(f"{folder}/{name}.parquet", rows)
        # the model is made from the small corpus once, so that only the data differs
        model = f"{folder}/model"
        train(f"{folder}/small.parquet", ["--max_steps", 1], folder)
        shutil.move(f"{folder}/run/model", model)
        shutil.rmtree(f"{folder}/cache")
        flags = ["--model_name_or_path", model, "--max_steps", args.steps, "--learning_rate", 0.005]
        for name in ("small", "large"):
            runs["mapped, first run"][name].append(train(f"{folder}/{name}.parquet", flags, folder))
        for _ in range(args.rounds):
            for mode, extra in modes.items():
                for name in ("small", "large"):
                    runs[mode][name].append(train(f"{folder}/{name}.parquet", [*flags, *extra], folder))
                    print(mode, name, *runs[mode][name][-1], file=sys.stderr)
        far = args.large - 2000
        seconds, opening = resume_seconds(f"{folder}/large.parquet", folder, far)
    print(f"| {args.steps} steps of 256 | MB, {args.small:,} rows | {args.large:,} rows | difference "
          "| tokens/s | tokens/s | ratio |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for mode, measured in runs.items():
        small, large = ([statistics.median(column) for column in zip(*measured[name])] for name in ("small", "large"))
        ratio = statistics.median(b[1] / a[1] for a, b in zip(measured["small"], measured["large"]))
        print(f"| {mode} | {small[0]:.0f} | {large[0]:.0f} | {large[0] - small[0]:+.0f} "
              f"| {small[1]:,.0f} | {large[1]:,.0f} | {ratio:.3f} |")  # fmt: skip
    print(f"\nfirst batch at row {far:,}: {seconds:.3f} s after the corpus was open, which took {opening:.2f} s")
    figures = {"runs": runs, "resume_seconds": seconds, "open_seconds": opening}
    Path(args.output).write_text(json.dumps({"arguments": vars(args), **figures}, indent=1))


if __name__ == "__main__":
    main()
