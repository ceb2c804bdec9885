"""The evaluator against its peers: encoding, the cached pass, and search, both sides in turns in one run.

    python benchmarks/eval_speed.py MODEL_FOLDER [--rounds 3] [--texts 600] [--vectors 500000]

Encodes code snippets of the demo corpus (python prepare_corpus.py) with the model in fp32, the cache empty each time,
against SentenceTransformer.encode at its default and at other batch sizes; reads 500,000 cached vectors of 384
dimensions against np.memmap of the same bytes; and searches 200,000 of them with 300 queries against faiss'
IndexFlatIP with as many threads. Checks that both sides give the same results. Writes eval_speed.json.
"""

import argparse
import glob
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import faiss
import numpy as np
import pyarrow.dataset as pads
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
import eval_incremental as script


def timed(work):
    """(seconds, result) of work()."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def rounds_of(sides, rounds):
    """{name: [seconds a round]} of the sides {name: work}, in turns: A B C, then C B A, and so on."""
    seconds = defaultdict(list)
    for turn in tqdm(range(rounds), "rounds"):
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(timed(sides[name])[0])
    return seconds


def table(title, unit, count, seconds):
    """Print and return {side: {rate, ratio}}; the ratio is ours to the side's, a median over the rounds."""
    ours, result = next(iter(seconds)), {}
    print(f"\n{title}")
    for name, values in seconds.items():
        ratio = statistics.median(theirs / own for theirs, own in zip(values, seconds[ours]))
        rate = count / statistics.median(values)
        result[name] = {f"{unit}_per_second": rate, "evenstep_faster_by": ratio}
        print(f"  {name:45} {rate:14,.1f} {unit}/s" + f"   {ratio:6.2f}x" * (name != ours))
    return result


def encoding(folder, texts, rounds, sizes):
    accelerator = Accelerator(cpu=True)
    peer = SentenceTransformer(folder, device="cpu")
    peer.max_seq_length = 256
    settings = script.Args(max_length=256, cache_dtype="float32", cache_dir=tempfile.mkdtemp())
    encoder, found = script.CachedEncoder(folder, settings, accelerator), {}

    def ours():
        """All that the evaluator does to a chunk: hash, look up, encode, pack, store."""
        with tempfile.TemporaryDirectory() as place:
            encoder.cache = script.EmbeddingCache(f"{place}/c", "m", encoder.cache.dimensions, "float32")
            found["ours"] = torch.from_numpy(encoder.encode(texts, "document"))

    def theirs(**options):
        found["theirs"] = peer.encode(texts, convert_to_tensor=True, **options)

    ours()  # warm both
    theirs()
    difference = (found["ours"] - found["theirs"]).abs().max().item()
    assert difference < 1e-5, difference
    sides = {"eval_incremental.py": ours, "SentenceTransformer.encode, default (32)": theirs}
    for size in sizes:
        sides[f"SentenceTransformer.encode, batch_size={size}"] = lambda size=size: theirs(batch_size=size)
    seconds = rounds_of(sides, rounds)
    title = f"Encoding {len(texts)} texts, fp32 (largest difference {difference:.1e})"
    return table(title, "texts", len(texts), seconds)


def cached(count, rounds):
    dimensions, chunk = 384, 4096
    dice = np.random.default_rng(0)
    hashes = np.frombuffer(dice.bytes(16 * count), "V16")
    with tempfile.TemporaryDirectory() as place:
        cache = script.EmbeddingCache(f"{place}/c", "m", dimensions, "float16")
        with open(f"{place}/vectors", "wb") as file:
            for first in tqdm(range(0, count, chunk), "storing"):
                vectors = dice.standard_normal((len(hashes[first : first + chunk]), dimensions), np.float32)
                cache.store(hashes[first : first + chunk], packed := cache.pack(vectors))
                file.write(packed.tobytes())
        order = dice.permutation(count)
        sums = {}

        def ours():
            total = 0
            for first in range(0, count, chunk):
                rows, found = cache.lookup(hashes[first : first + chunk])
                assert found.all()
                total += int(cache.unpack(rows)[:, 0].view(np.uint16).sum())
            sums["ours"] = total

        def mapped():
            total = 0
            table = np.memmap(f"{place}/vectors", np.float16, "r", shape=(count, dimensions))
            for first in range(0, count, chunk):
                total += int(np.array(table[first : first + chunk])[:, 0].view(np.uint16).sum())
            sums["mapped"] = total

        def inserted():
            """Ten new texts in front: the blocks are not those that were stored."""
            more = np.concatenate([np.frombuffer(dice.bytes(160), "V16"), hashes[: 20 * chunk]])
            for first in range(0, len(more), chunk):
                assert cache.lookup(more[first : first + chunk])[1].sum() >= len(more[first : first + chunk]) - 10

        def shuffled():
            for first in range(0, 5 * chunk, chunk):
                assert cache.lookup(hashes[order[first : first + chunk]])[1].all()

        seconds = rounds_of({"eval_incremental.py": ours, "np.memmap of the same bytes": mapped}, rounds)
        assert sums["ours"] == sums["mapped"]
        result = table(f"Reading {count:,} cached vectors of {dimensions} x float16", "vectors", count, seconds)
        apart = 5 * chunk / statistics.median(timed(shuffled)[0] for _ in range(rounds))
        changed = 20 * chunk / statistics.median(timed(inserted)[0] for _ in range(rounds))
        print(f"  {'eval_incremental.py, ten texts in front':45} {changed:14,.1f} vectors/s")
        print(f"  {'eval_incremental.py, texts in random order':45} {apart:14,.1f} vectors/s")
    return {**result, "changed_vectors_per_second": changed, "random_order_vectors_per_second": apart}


def search(rounds):
    count, queries, k, dimensions, chunk = 200_000, 300, 100, 384, 4096
    generator = torch.Generator().manual_seed(0)
    documents = F.normalize(torch.randn(count, dimensions, generator=generator), dim=1)
    asked = F.normalize(torch.randn(queries, dimensions, generator=generator), dim=1)
    faiss.omp_set_num_threads(torch.get_num_threads())
    ids = np.arange(1, count + 1)
    found = {}

    def ours():
        top = script.TopK(asked, k)
        for first in range(0, count, chunk):
            top.add(documents[first : first + chunk], first, ids[first : first + chunk])
        found["ours"] = top.scores.numpy(), top.rows.numpy()

    index = faiss.IndexFlatIP(dimensions)
    index.add(documents.numpy())

    def theirs():
        found["theirs"] = index.search(asked.numpy(), k)

    seconds = rounds_of({"eval_incremental.py": ours, "faiss.IndexFlatIP": theirs}, rounds)
    (scores, rows), (their_scores, their_rows) = found["ours"], found["theirs"]
    assert np.abs(scores - their_scores).max() < 1e-6
    same = (rows == their_rows).mean()
    work = f"{count:,} documents, {queries} queries, top {k}, {torch.get_num_threads()} threads"
    title = f"Searching {work}; {same:.3%} of places hold the same document, the others one within 1e-6 of its score"
    return table(title, "documents", count, seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="folder of a SentenceTransformer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=600)
    parser.add_argument("--vectors", type=int, default=500_000)
    parser.add_argument("--batch_sizes", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--corpus", default="data/python_code/heldout/*.parquet")
    args = parser.parse_args()
    code = pads.dataset(sorted(glob.glob(args.corpus))).to_table(columns=["code"])["code"].to_pylist()
    code = random.Random(0).sample(code, args.texts)
    results = {
        "search": search(args.rounds),
        "cached": cached(args.vectors, args.rounds),
        "encoding": encoding(args.model, code, args.rounds, args.batch_sizes),
    }
    Path("eval_speed.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
