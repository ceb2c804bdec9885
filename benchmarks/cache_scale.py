"""How the embedding cache grows to 20,000,000 texts: rates, disk, memory; with several processes, kills and a limit.

    python benchmarks/cache_scale.py                                  # one process
    python benchmarks/cache_scale.py --processes 4 --kills 5          # four at once; SIGKILL, and started again
    python benchmarks/cache_scale.py --texts 2000000 --limit 0.05     # only the latest texts are kept

Random hashes and vectors in chunks of 4,096 are looked up and, as they are missing, stored, as the evaluator does to
a corpus that no cache holds; --processes share the chunks. A process that was killed is started again with its chunks,
of which it stores those that are missing. Prints a line for each tenth of the texts. At the end 200,000 of the texts,
of 49 blocks, are looked up: in the chunks they were stored in, behind ten inserted ones, and in random order; then
40,960 texts of random blocks, the worst case.
"""

import argparse
import multiprocessing
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import eval_incremental as script

CHUNK = 4096


def open_cache(folder, args):
    return script.EmbeddingCache(folder / "c", "m", args.dimensions, "float16", args.limit)


def chunk_hashes(number):
    return np.frombuffer(np.random.default_rng(number).bytes(16 * CHUNK), "V16")


def anonymous_memory():
    """Return the MB of anonymous memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024


def fill(folder, args, process):
    """Look up and store the chunks of one process; the first prints the lines."""
    cache = open_cache(folder, args)
    chunks = args.texts // CHUNK
    vectors = np.random.default_rng(0).standard_normal((CHUNK, args.dimensions), np.float32)
    packed = cache.pack(vectors)
    tenth = max(1, chunks // 10)
    begun = time.perf_counter()
    lookup = 0.0
    store = 0.0
    for number in range(process, chunks, args.processes):
        hashes = chunk_hashes(number)
        started = time.perf_counter()
        _, found = cache.lookup(hashes)
        looked_up = time.perf_counter()
        if not found.all():
            cache.store(hashes, packed)
        lookup += looked_up - started
        store += time.perf_counter() - looked_up
        if process == 0 and number // tenth < (number + args.processes) // tenth:
            held = len(cache.cache) * CHUNK
            used = shutil.disk_usage(folder).used - args.used_before
            texts = tenth * CHUNK // args.processes
            whole = tenth * CHUNK / (time.perf_counter() - begun)
            print(f"| {number * CHUNK:,} | {whole:,.0f} | {texts / lookup:,.0f} | {texts / store:,.0f} "
                  f"| {used / held - packed.shape[1]:.1f} | {anonymous_memory():,.0f} |", flush=True)  # fmt: skip
            begun = time.perf_counter()
            lookup = store = 0.0
    cache.close()


def start(folder, args, process):
    started = multiprocessing.get_context("spawn").Process(target=fill, args=(folder, args, process))
    started.start()
    return started


def check(folder, args):
    """Look up texts in three orders; all must be there, but for what the limit has removed."""
    cache = open_cache(folder, args)
    chunks = args.texts // CHUNK
    kept = min(chunks, len(cache.cache))
    numbers = random.Random(0).sample(range(chunks - kept, chunks), min(kept, 49))
    hashes = np.concatenate([chunk_hashes(number) for number in numbers])
    inserted = np.insert(hashes, 0, chunk_hashes(2**32)[:10])
    shuffled = hashes[np.random.default_rng(0).permutation(len(hashes))]
    dice = np.random.default_rng(1)
    blocks = dice.integers(chunks - kept, chunks, 10 * CHUNK)
    rows = dice.integers(0, CHUNK, 10 * CHUNK)
    scattered = np.zeros(10 * CHUNK, "V16")
    for number in np.unique(blocks):
        of_block = blocks == number
        scattered[of_block] = chunk_hashes(number)[rows[of_block]]
    orders = {"as stored": hashes, "ten in front": inserted, "at random": shuffled, "of random blocks": scattered}
    for name, order in orders.items():
        started = time.perf_counter()
        count = sum(cache.lookup(order[first : first + CHUNK])[1].sum() for first in range(0, len(order), CHUNK))
        rate = len(order) / (time.perf_counter() - started)
        print(f"{len(order):,} texts {name}: {count:,} found, {rate:,.0f} a second")
    cache.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--texts", type=int, default=20_000_000)
    parser.add_argument("--dimensions", type=int, default=64)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--limit", type=float, default=0, help="GB, as --cache_size_limit")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        args.used_before = shutil.disk_usage(folder).used
        print("| texts | a second, of all processes | lookups/s of one | stores/s of one | bytes a text besides its "
              "vector | MB |\n|---:|---:|---:|---:|---:|---:|")  # fmt: skip
        processes = [start(folder, args, number) for number in range(args.processes)]
        for _ in range(args.kills):
            time.sleep(random.Random().uniform(10, 20))  # imports take some of it
            number = random.Random().randrange(1, args.processes)
            processes[number].kill()
            processes[number].join()
            processes[number] = start(folder, args, number)
            print(f"process {number} killed", flush=True)
        for process in processes:
            process.join()
            assert process.exitcode == 0
        check(folder, args)


if __name__ == "__main__":
    main()
