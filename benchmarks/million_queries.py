"""Mine from the run file of many queries: seconds and peak memory of mine_negatives.py beside its texts.

    python benchmarks/million_queries.py /tmp/mq --queries 50000
    python benchmarks/million_queries.py /tmp/mq --queries 1000000 --documents 100000

Queries, documents, judgments and a run file of --depth documents a query are random; a run file of 50,000 x 100 has
0.2 GB, of 1,000,000 x 100 3.8 GB. A folder that has them is used again. Peak memory is that of the process (VmHWM);
"at rest" is what it has when all texts are read, without a line of the run file.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
# Run the script, and print the peak of its memory.
MEASURE = """
import sys, runpy, re, os
os._exit, leave = lambda status: sys.exit(status), os._exit
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
    print("peak_gb", int(peak) / 1e6, flush=True)
    leave(end.code or 0)
"""


def write_collection(folder, queries, documents, depth):
    """Write a collection in BEIR's layout, and a run file in which each query's positive is somewhere."""
    generator = np.random.default_rng(0)
    words = np.array([f"word{number}" for number in range(5000)])
    (folder / "qrels").mkdir(parents=True)
    for name, count, length in (("corpus", documents, 60), ("queries", queries, 8)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for number in range(count):
                text = " ".join(words[generator.integers(0, len(words), length)])
                print(json.dumps({"_id": f"{name[0]}{number}", "text": f"{number} {text}"}), file=file)
    with open(folder / "run.part", "w") as run, open(folder / "qrels/train.tsv", "w") as judgments:
        print("query-id\tcorpus-id\tscore", file=judgments)
        scores = [f"{score:.9g}" for score in np.linspace(0.9, 0.3, depth)]
        for number in range(queries):
            first = int(generator.integers(0, documents))
            step = 1 + 2 * int(generator.integers(0, documents // (4 * depth)))
            found = [(first + rank * step) % documents for rank in range(depth)]
            run.writelines(f"q{number} Q0 c{d} {r} {s} x\n" for r, (d, s) in enumerate(zip(found, scores), start=1))
            print(f"q{number}\tc{found[int(generator.integers(0, depth))]}\t1", file=judgments)
    (folder / "run.part").rename(folder / "run.trec")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--queries", type=int, default=50_000)
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--script", default=ROOT / "mine_negatives.py", help="of another edition")
    args = parser.parse_args()
    folder = args.folder / f"{args.queries}x{args.depth}of{args.documents}"
    if not (folder / "run.trec").exists():
        write_collection(folder, args.queries, args.documents, args.depth)
    words = ["--beir", folder, "--run", folder / "run.trec", "--overwrite", "--output", folder / "mined.jsonl"]
    started = time.perf_counter()
    command = [sys.executable, "-c", f"import sys; sys.argv = sys.argv[1:]{MEASURE}", args.script, *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    print(done.stdout, done.stderr[-2000:] if done.returncode else "")
    print(f"{args.queries:,} queries x {args.depth} of {args.documents:,}: {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
