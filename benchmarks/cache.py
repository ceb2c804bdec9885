"""The evaluator's embedding cache as it grows, and its search, against their peers.

    python benchmarks/cache.py                                                    # 500,000 vectors of 384 numbers
    python benchmarks/cache.py --texts 20000000 --dimensions 64 [--processes 4 --kills 5]
    python benchmarks/cache.py --texts 2000000 --limit 0.05 --search 0            # only the latest texts are kept

Random hashes and vectors in chunks of 4,096 are looked up and, as they are missing, stored, as the evaluator does to
a corpus that no cache holds; --processes share the chunks; one of them is killed --kills times, and started again with
its chunks. Prints a line for each tenth of the texts. Then vectors of --sample blocks are read: in the chunks they
were stored in, beside np.memmap of the same bytes, behind ten inserted texts, in random order, and 40,960 of random
blocks, the worst case. At last --search documents are searched for 300 queries, beside faiss.IndexFlatIP with as many
threads; both give the same results. In float16, medians of --rounds.
"""

import argparse
import multiprocessing
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parents[1]))
import eval_incremental as script

CHUNK = 4096


def open_cache(folder, args):
    return script.EmbeddingCache(folder / "c", args.dimensions, "float16", args.limit)


def chunk_hashes(number):
    return np.frombuffer(np.random.default_rng(number).bytes(16 * CHUNK), "V16")


def anonymous_memory():
    """Return the MB of anonymous memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1000


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


def fill_by_processes(folder, args):
    print("| texts | a second, of all processes | lookups/s of one | stores/s of one | bytes a text besides its "
          "vector | MB |\n|---:|---:|---:|---:|---:|---:|", flush=True)  # fmt: skip
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


def rounds_of(sides, rounds):
    """Return {name: median seconds} of the sides {name: function}, in turns: A B C, then C B A, and so on."""
    seconds = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            started = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def read(folder, args):
    """Read texts in four orders; all must be there, but for what the limit has removed."""
    cache = open_cache(folder, args)
    chunks = args.texts // CHUNK
    kept = min(chunks, len(cache.cache))
    numbers = random.Random(0).sample(range(chunks - kept, chunks), min(kept, args.sample))
    hashes = np.concatenate([chunk_hashes(number) for number in numbers])
    dice = np.random.default_rng(1)
    blocks = dice.integers(chunks - kept, chunks, 10 * CHUNK)
    rows = dice.integers(0, CHUNK, 10 * CHUNK)
    scattered = np.zeros(10 * CHUNK, "V16")
    for number in np.unique(blocks):
        scattered[blocks == number] = chunk_hashes(number)[rows[blocks == number]]
    orders = {"as stored": hashes, "ten in front": np.insert(hashes, 0, chunk_hashes(2**32)[:10])}
    orders |= {"at random": dice.permutation(hashes), "of random blocks": scattered}
    count = {}

    def in_order(name):
        parts = (cache.lookup(orders[name][first : first + CHUNK]) for first in range(0, len(orders[name]), CHUNK))
        count[name] = sum(found.sum() for vectors, found in parts if np.isfinite(cache.unpack(vectors)[:, 0]).all())

    def mapped():
        table = np.memmap(folder / "vectors", np.float16, "r", shape=(len(hashes), args.dimensions))
        for first in range(0, len(hashes), CHUNK):
            assert np.isfinite(np.array(table[first : first + CHUNK])[:, 0]).all()

    with open(folder / "vectors", "wb") as file:
        for first in range(0, len(hashes), CHUNK):
            file.write(cache.lookup(hashes[first : first + CHUNK])[0].tobytes())
    sides = {name: lambda name=name: in_order(name) for name in orders}
    for name, seconds in rounds_of(sides | {"np.memmap of the same bytes": mapped}, args.rounds).items():
        texts = len(orders.get(name, hashes))
        print(f"{texts:,} texts {name}: {count.get(name, texts):,} found, {texts / seconds:,.0f} a second")
    cache.close()


def search(args):
    """Search random documents in chunks, beside faiss."""
    import faiss
    import torch
    import torch.nn.functional as F

    generator = torch.Generator().manual_seed(0)
    documents = F.normalize(torch.randn(args.search, args.dimensions, generator=generator), dim=1)
    queries = F.normalize(torch.randn(300, args.dimensions, generator=generator), dim=1)
    faiss.omp_set_num_threads(torch.get_num_threads())
    ids = np.arange(args.search)
    table = [pa.table({"row": ids, "id": [*map(str, ids)]})]
    found = {}

    def ours():
        top = script.TopK(queries, 100)
        for first in range(0, args.search, CHUNK):
            top.add(documents[first : first + CHUNK], first, ids[first : first + CHUNK], table)
        found["ours"] = top.scores.numpy(), top.rows.numpy()

    index = faiss.IndexFlatIP(args.dimensions)
    index.add(documents.numpy())

    def theirs():
        found["theirs"] = index.search(queries.numpy(), 100)

    ours_seconds, seconds = rounds_of({"ours": ours, "faiss": theirs}, args.rounds).values()
    (scores, rows), (their_scores, their_rows) = found["ours"], found["theirs"]
    assert np.abs(scores - their_scores).max() < 1e-6
    print(f"{args.search:,} documents, 300 queries, top 100, {torch.get_num_threads()} threads: ours "
          f"{args.search / ours_seconds:,.0f} documents a second, {seconds / ours_seconds:.2f}x faiss.IndexFlatIP; "
          f"{(rows == their_rows).mean():.3%} of places hold the same document, the others one within 1e-6 of its "
          "score")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=500_000)
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--limit", type=float, default=0, help="GB, as --cache_size_limit")
    parser.add_argument("--sample", type=int, default=49, help="blocks to read")
    parser.add_argument("--search", type=int, default=200_000, help="documents; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        args.used_before = shutil.disk_usage(place).used
        fill_by_processes(Path(place), args)
        read(Path(place), args)
    if args.search:
        search(args)


if __name__ == "__main__":
    main()
