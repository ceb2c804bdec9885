"""What --cache_size_limit leaves of a stream of texts: blocks held, hit rate, size on disk, seconds of each stage.

    python benchmarks/cache_limit.py [--texts 2000000] [--limit 0.05] [--dimensions 384] [--recent 40000]

Random hashes and vectors in chunks of 4,096 are looked up and, as they are missing, stored, as the evaluator does to
a corpus that no cache holds. At the end the most recent texts are looked up again. Without a limit (--limit 0) it
measures the rates of lookups and stores. Prints a line of figures, and a line every 250,000 texts.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import eval_incremental as script

CHUNK = 4096


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--texts", type=int, default=2_000_000)
    parser.add_argument("--limit", type=float, default=0.05, help="GB, as --cache_size_limit")
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--recent", type=int, default=40_000, help="texts looked up again at the end")
    args = parser.parse_args()
    dice = np.random.default_rng(0)
    chunks = [np.frombuffer(dice.bytes(16 * CHUNK), "V16") for _ in range(args.texts // CHUNK)]
    seconds = {"lookup of missing": 0.0, "store": 0.0}
    with tempfile.TemporaryDirectory() as place:
        cache = script.EmbeddingCache(f"{place}/c", "m", args.dimensions, "float16", args.limit)
        packed = cache.pack(dice.standard_normal((CHUNK, args.dimensions), np.float32))

        def show(texts):
            ((entries,),) = cache.cache._sql("SELECT count(*) FROM texts")
            sizes = [path.stat().st_size for path in Path(place).rglob("*") if path.is_file()]
            print(f"{texts:,} texts: {len(cache.cache):,} blocks, {entries:,} entries, {sum(sizes) / 1e6:.1f} MB")

        for number, hashes in enumerate(chunks):
            started = time.perf_counter()
            _, found = cache.lookup(hashes)
            seconds["lookup of missing"] += time.perf_counter() - started
            started = time.perf_counter()
            cache.store(hashes, packed)
            seconds["store"] += time.perf_counter() - started
            assert not found.any()
            if (number + 1) * CHUNK // 250_000 > number * CHUNK // 250_000:
                show((number + 1) * CHUNK)
        recent = np.concatenate(chunks[-max(1, args.recent // CHUNK) :])
        for name, order in {"in order": np.arange(len(recent)), "at random": dice.permutation(len(recent))}.items():
            started, hits = time.perf_counter(), 0
            for first in range(0, len(recent), CHUNK):
                hits += cache.lookup(recent[order[first : first + CHUNK]])[1].sum()
            rate = len(recent) / (time.perf_counter() - started)
            print(f"the last {len(recent):,} texts {name}: {hits / len(recent):.1%} found, {rate:,.0f} a second")
        cache.cache.close()
        show(len(chunks) * CHUNK)
    for name, value in seconds.items():
        print(f"{name}: {value:.1f} s, {len(chunks) * CHUNK / value:,.0f} texts a second")


if __name__ == "__main__":
    main()
