"""Memory and speed of training by corpus size, mapped and streaming, and the time to resume in mid-corpus.

    python benchmarks/memory.py [--rows 100000 10000000] [--steps 300] [--rounds 3]

Generates Parquet corpora of short rows and trains a small static model for as many steps on each, in turns; a first
run makes the Arrow table that the others map, and is measured too. Memory is that of the main process, which reads,
and anonymous (RssAnon, read every 20 ms): the system can drop the pages of a mapped file. Tokens a second are those of
all steps but the first ten. Medians over the rounds; each corpus is compared with the first. Writes memory.json.
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
sys.path.insert(0, str(ROOT))


def generate(path, count):
    """Write a Parquet file of `count` (question, answer) rows, 100 bytes each, in row groups of 50,000."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("question", pa.string()), ("answer", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, count, 50_000):
            numbers = range(first, min(first + 50_000, count))
            questions = [f"how to compute item {n} of list {n * 7919 % count}" for n in numbers]
            answers = [f"def item_{n}(values): return values[{n * 104729 % count}]" for n in numbers]
            writer.write_table(pa.table([questions, answers], schema=schema))


def make_model(folder):
    """Save a static embedding model of 2,000 tokens and 64 dimensions."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [f"how to compute item {n} of list {n * 7919}: def item(values): return values" for n in range(2000)]
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=64)], device="cpu").save_pretrained(folder)


def train(source, flags, folder):
    """Return (peak anonymous MB, tokens a second, seconds in all) of one run of the trainer."""
    output = tempfile.mkdtemp(dir=folder)
    command = [sys.executable, ROOT / "train_bi_encoder.py", "--train_data", source, "--output_dir", output,
               "--model_name_or_path", f"{folder}/model", "--batch_size", 256, "--save_steps", 0, *flags]  # fmt: skip
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max([peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))])
        time.sleep(0.02)
    if process.returncode:
        sys.exit(f"failed: {command}")
    lines = [json.loads(line) for line in Path(f"{output}/metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return peak / 1024, statistics.harmonic_mean(rates[1:] or rates), time.perf_counter() - started


def resume_seconds(source, row):
    """Return the seconds from an open corpus to the first batch at `row`, and from nothing to the open corpus."""
    import train_bi_encoder as script

    flags = ["--model_name_or_path", "none", "--train_data", source, "--batch_size", "256", "--eval_rows", "1000"]
    args = script.parse_args(flags)
    started = time.perf_counter()
    data = script.open_data(args)
    opened = time.perf_counter()
    position = {"taken": row, "window": row // args.shuffle_buffer, "used": 1}
    next(script.row_batches(data.sources, data.weights, args, {"sources": [position], "used": 0}))
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
        os.environ |= {"HF_DATASETS_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
        make_model(f"{folder}/model")
        flags = ["--max_steps", args.steps, "--learning_rate", 0.005]
        for rows in args.rows:
            generate(f"{folder}/{rows}.parquet", rows)
            runs["mapped, first run"][rows].append(train(f"{folder}/{rows}.parquet", flags, folder))
        for _ in range(args.rounds):
            for mode, extra in modes.items():
                for rows in args.rows:
                    runs[mode][rows].append(train(f"{folder}/{rows}.parquet", [*flags, *extra], folder))
                    print(mode, rows, *runs[mode][rows][-1], file=sys.stderr)
        for rows in args.rows:
            first, opening = resume_seconds(f"{folder}/{rows}.parquet", rows - rows // 50)
            files[rows] = {"resume_seconds": first, "open_seconds": opening}
    print(f"| {args.steps} steps of 256 | rows | peak anonymous MB | difference | tokens/s | ratio | seconds |")
    print("|---|---|---|---|---|---|---|")
    for mode, measured in runs.items():
        base = None
        for rows, values in measured.items():
            memory, rate, seconds = (statistics.median(column) for column in zip(*values))
            base = base or (memory, values)
            ratio = statistics.median(b[1] / a[1] for a, b in zip(base[1], values))
            print(f"| {mode} | {rows:,} | {memory:.0f} | {memory - base[0]:+.0f} | {rate:,.0f} | {ratio:.3f} "
                  f"| {seconds:.1f} |")  # fmt: skip
    print("\n| rows | opened in, s | first batch after 98 % of the rows, s |\n|---|---|---|")
    for rows, seen in files.items():
        print(f"| {rows:,} | {seen['open_seconds']:.3f} | {seen['resume_seconds']:.3f} |")
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "runs": runs, "files": files}, indent=1))


if __name__ == "__main__":
    main()
