"""Evaluate and mine for many queries: seconds and peak memory of eval_incremental.py and mine_negatives.py.

    python benchmarks/million_queries.py /tmp/mq --queries 50000
    python benchmarks/million_queries.py /tmp/mq --queries 1000000 --documents 100000

Queries, documents, judgments and a run file of --depth documents a query are random; a run file of 50,000 x 100 has
0.2 GB, of 1,000,000 x 100 3.8 GB. A folder that has them is used again. Three commands: the evaluator ranks by a
static model of 64 dimensions, the evaluator measures the run file, the miner mines from it. RSS is the peak of the
process (VmHWM), pages of mapped files included; RssAnon, without them, is seen every 20 ms.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = Path(__file__).parents[1]
WORDS = np.array([f"word{number}" for number in range(5000)])


def write_collection(folder, queries, documents, depth):
    """Write a collection in BEIR's layout, and a run file in which each query's positive is somewhere."""
    generator = np.random.default_rng(0)
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, count, length in (("corpus", documents, 60), ("queries", queries, 8)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for number in range(count):
                text = " ".join(WORDS[generator.integers(0, len(WORDS), length)])
                print(json.dumps({"_id": f"{name[0]}{number}", "text": f"{number} {text}"}), file=file)
    with open(folder / "run.part", "w") as run, open(folder / "qrels/test.tsv", "w") as judgments:
        print("query-id\tcorpus-id\tscore", file=judgments)
        scores = [f"{score:.9g}" for score in np.linspace(0.9, 0.3, depth)]
        for number in range(queries):
            first = int(generator.integers(0, documents))
            step = 1 + 2 * int(generator.integers(0, documents // (4 * depth)))
            found = [(first + rank * step) % documents for rank in range(depth)]
            run.writelines(f"q{number} Q0 c{d} {r} {s} x\n" for r, (d, s) in enumerate(zip(found, scores), start=1))
            print(f"q{number}\tc{found[int(generator.integers(0, depth))]}\t1", file=judgments)
    (folder / "run.part").rename(folder / "run.trec")


def write_model(folder):
    """Write a static model of these words."""
    numbers = {word: number for number, word in enumerate(["[UNK]", *WORDS.tolist()])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=64)], device="cpu").save(str(folder))


def measure(name, script, *words):
    """Run a script; print its seconds and its peak memory."""
    started = time.perf_counter()
    rss = anonymous = 0
    process = subprocess.Popen([sys.executable, str(script), *map(str, words)])
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            rss, now = (int(re.search(rf"{key}:\s+(\d+)", status)[1]) / 1e6 for key in ("VmHWM", "RssAnon"))
            anonymous = max(anonymous, now)
        except (OSError, TypeError):  # it has just ended
            pass
        time.sleep(0.02)
    if process.returncode:
        sys.exit(f"{name}: failed")
    seconds = time.perf_counter() - started
    print(f"{name}: {seconds:.0f} s, peak RSS {rss:.2f} GB, RssAnon {anonymous:.2f} GB", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--queries", type=int, default=50_000)
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--scripts", type=Path, default=ROOT, help="folder of the scripts, such as another edition's")
    parser.add_argument("--only", nargs="+", default=["model", "run", "mine"], help="of these three commands")
    args = parser.parse_args()
    folder = args.folder / f"{args.queries}x{args.depth}of{args.documents}"
    if not (folder / "run.trec").exists():
        write_collection(folder, args.queries, args.documents, args.depth)
    write_model(folder / "model")
    evaluator = args.scripts / "eval_incremental.py"
    common = ["--beir", folder, "--cache_dir", folder / "cache"]
    run = ["--beir", folder, "--split", "test", "--run", folder / "run.trec"]
    commands = {
        "model": [evaluator, *common, "--model_name_or_path", folder / "model", "--output_dir", folder / "by_model"],
        "run": [evaluator, *run, "--output_dir", folder / "by_run"],
        "mine": [args.scripts / "mine_negatives.py", *run, "--overwrite", "--output", folder / "mined.jsonl"],
    }
    print(f"{args.queries:,} queries x {args.depth} of {args.documents:,} documents")
    for name in args.only:
        measure(name, *commands[name])


if __name__ == "__main__":
    main()
