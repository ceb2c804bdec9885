"""check_overlap.py on generated training data: rows a second, CPU seconds, peak memory, planted copies by kind.

    python benchmarks/overlap.py BEIR_FOLDER [--rows 1000000] [--words 100] [--shared 0]

A row has a query of 10 words and a positive of the others, drawn at random from the words of the folder's corpus, but
for --shared of the rows, whose positive is a document of it. The script runs twice, with and without --output. Then a
copy of each query and each document is planted in rows of their own, one for each of the ways below, and the table
shows how many of them are found, and as what kind. Writes overlap.json.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[1]


def change(text, step):
    """Return a text of which every `step`-th word is another."""
    words = text.split()
    return " ".join("changed" if i % step == step - 1 else word for i, word in enumerate(words))


WAYS = {
    "as it is": lambda text: text,
    "other case and punctuation": lambda text: f"“{re.sub('[.,]', ' – ', text.upper())}”!",
    "inside a longer text": lambda text: f"It was asked before: {text} Nobody knew.",
    "every 50th word changed": lambda text: change(text, 50),
    "every 10th word changed": lambda text: change(text, 10),
    "words in reverse": lambda text: " ".join(reversed(text.split())),
}


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def judged_queries(folder):
    """Return the texts of the queries that qrels/test.tsv judges."""
    judged = {line.split("\t")[0] for line in Path(folder, "qrels/test.tsv").read_text().splitlines()}
    return [row["text"] for row in read(f"{folder}/queries.jsonl") if row["_id"] in judged]


def generate(path, documents, args):
    """Write args.rows rows to a Parquet file."""
    words = np.array(" ".join(documents).split(), object)
    dice = np.random.default_rng(0)
    schema = pa.schema({"query": pa.string(), "positive": pa.string()})
    with pq.ParquetWriter(path, schema) as file:
        for start in range(0, args.rows, 10_000):
            count = min(10_000, args.rows - start)
            drawn = words[dice.integers(0, len(words), (count, args.words))]
            queries = [" ".join(row[:10]) for row in drawn]
            positives = [" ".join(row[10:]) for row in drawn]
            for row in np.flatnonzero(dice.random(count) < args.shared):
                positives[row] = documents[dice.integers(len(documents))]
            file.write_table(pa.table([queries, positives], schema=schema))


def run(folder, *flags):
    """Run the script; return (seconds, CPU seconds, peak memory in GB, what it printed)."""
    command = [sys.executable, ROOT / "check_overlap.py", *flags, "--report", f"{folder}/found.jsonl", "--overwrite"]
    started = time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, cwd=folder)
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        sys.exit(f"failed: {' '.join(map(str, command))}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20, printed


def plant(folder, beir, texts, name):
    """Print how many of the texts are found, by way and kind; `name`: the type that they are searched as."""
    for way, copy in WAYS.items():
        copies = [copy(text) for text in texts]
        pq.write_table(pa.table({"text": copies}), f"{folder}/planted.parquet")
        run(folder, "--train_data", "planted.parquet", "--columns", "text", "--beir", beir)
        found = {}
        for line in read(f"{folder}/found.jsonl"):
            if line["type"] == name and line["text"].strip() == texts[line["row"]].strip():
                found.setdefault(line["row"], line["kind"])
        kinds = Counter(found.values())
        counts = " | ".join(f"{kinds[kind]:,}" for kind in ("verbatim", "inside", "ngrams"))
        print(f"| {name} | {way} | {len(texts):,} | {counts} | {len(texts) - len(found):,} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("beir")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--words", type=int, default=100)
    parser.add_argument("--shared", type=float, default=0.0)
    args = parser.parse_args()
    beir = Path(args.beir).resolve()
    documents = [row["text"] for row in read(beir / "corpus.jsonl")]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        generate(f"{folder}/one.parquet", documents, argparse.Namespace(rows=1, words=args.words, shared=0))
        generate(f"{folder}/rows.parquet", documents, args)
        common = ["--columns", "query", "positive", "--beir", beir]
        run(folder, "--train_data", "one.parquet", *common)  # the copies of the collection that `datasets` maps
        start, start_cpu, start_memory, _ = run(folder, "--train_data", "one.parquet", *common)
        print(f"start and index of the collection: {start:.1f} s, {start_cpu:.1f} CPU-s, {start_memory:.2f} GB")
        print("| | s | CPU-s | rows/s | rows/CPU-s | GB |\n|---|---|---|---|---|---|")
        for name, flags in (("report", []), ("report and --output", ["--output", "clean.parquet"])):
            seconds, cpu, memory, printed = run(folder, "--train_data", "rows.parquet", *common, *flags)
            rates = f"{args.rows / (seconds - start):,.0f} | {args.rows / (cpu - start_cpu):,.0f}"
            print(f"| {name} | {seconds:.1f} | {cpu:.1f} | {rates} | {memory:.2f} |", flush=True)
        print(printed)
        print("| type | planted | copies | verbatim | inside | ngrams | not found |\n|---|---|---|---|---|---|---|")
        plant(folder, beir, judged_queries(beir), "query")
        plant(folder, beir, documents, "document")


if __name__ == "__main__":
    main()
