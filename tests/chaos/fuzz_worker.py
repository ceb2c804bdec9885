"""Read COUNT mutated inputs of one KIND in the working directory; run by test_fuzz.py in a process of its own.

fuzz_worker.py KIND COUNT

Each must give what an independent reader of the same bytes gives, or a one-line error that names the file, within 20
seconds and 500 MB of memory. Prints {"read": count, "refused": count}.
Data files are not included: `datasets` reads them, and its authors test its readers.
"""

import hashlib
import json
import math
import random
import resource
import shutil
import signal
import struct
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))
import eval_incremental
import train_bi_encoder as script

BAD = (script.UserError, eval_incremental.UserError)


def mutate(data, rng):
    """Return the bytes with one to four changes: flipped, replaced, deleted, cut, doubled, inserted, a huge number."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at, size = rng.randrange(len(data) + 1), rng.choice([1, 2, 8, 40, 300])
        way = rng.randrange(7)
        if way == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif way == 1 and at < len(data):
            data[at] = rng.choice(b'\x00\xff"\n\r,\t{}[]:0-\\\x80\xc3')
        elif way == 2:
            del data[at : at + size]
        elif way == 3:
            del data[at:]
        elif way == 4:
            data[at:at] = data[max(0, at - size) : at]
        elif way == 5:
            data[at:at] = rng.randbytes(rng.choice([1, 4, 50]))
        else:
            number = rng.choice([2**31 - 1, 2**33, 2**40, -1, 2**63 - 1])
            data[at : at + 8] = struct.pack("<q", number)
    return bytes(data)


QRELS = "".join(f"q{n // 3} 0 d{n} {n % 3}\n" for n in range(60)).encode()
RUN = "".join(f"q{n // 3} Q0 d{n} {n % 3 + 1} {9 - n % 3}.5 tag\n" for n in range(60)).encode()


def fields_of(data):
    """Return the fields of each non-blank line, split at tabs if the first line has one, else at whitespace."""
    lines = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    split = (lambda line: line.split("\t")) if "\t" in lines[0] else str.split
    return [split(line) for line in lines if line.strip()]


def read_qrels(kind, data, rng, number):
    Path("x.qrels").write_bytes(data)
    found = {tuple(row[:2]): row[2] for row in eval_incremental.read_qrels("x.qrels").itertuples(index=False)}
    expected = {(query, document): int(float(grade)) for query, *_, document, grade in fields_of(data)}
    assert found == expected, "the judgments differ from those of the independent reader"


def read_run(kind, data, rng, number):
    Path("x.run").write_bytes(data)
    queries = {f"q{n}": "t" for n in range(20)}
    qrels = pd.DataFrame(columns=["query_id", "doc_id", "relevance"])
    run = eval_incremental.read_run("x.run", "x", eval_incremental.Collection("x", None, None, queries, qrels))
    ranking = pd.concat(run.parts())
    found = {(row.query_id, row.doc_id): row.score for row in ranking.itertuples(index=False)}
    expected = {}  # of a document that is repeated, the best score
    for query, _, document, _, score, *_ in fields_of(data):  # the tag may be missing
        if query in queries:
            expected[query, document] = max(float(score), expected.get((query, document), -math.inf))
    assert found == expected, "the ranking differs from that of the independent reader"
    assert len(ranking) == len(found), "a document is ranked twice"


def read_settings(kind, data, rng, number):
    Path("x.yaml").write_bytes(data)
    try:
        script.parse_args(["x.yaml"])
    except SystemExit as error:
        assert error.code == 2  # argparse has printed the reason
        raise script.UserError("x.yaml: refused by the parser") from None


SETTINGS = b"""train_data:
- pairs.jsonl
model_name_or_path: folder
columns: [a, b]
batch_size: 64
learning_rate: 2.0e-05
loss_kwargs:
  temperature: 0.05
resume: true
"""


def damage_cache(kind, data, rng, number):
    """Damage one file of an embedding cache; the vectors still found must be correct."""
    hashes = np.arange(120, dtype=np.uint64).view("V16")
    vectors = np.random.default_rng(0).standard_normal((60, 8), np.float32)
    folder = Path(f"cache{number}")
    cache = eval_incremental.EmbeddingCache(folder, 8, "float32")
    for first in range(0, 60, 20):
        cache.store(hashes[first : first + 20], cache.pack(vectors[first : first + 20]))
    cache.cache.close()
    # diskcache names its files at random: by their suffix, the same number damages the index in every run
    file = rng.choice(sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.suffix))
    file.write_bytes(mutate(file.read_bytes(), rng) if number >= 0 else file.read_bytes())
    try:
        cache = eval_incremental.EmbeddingCache(folder, 8, "float32")
        for _ in range(2):
            rows, found = cache.lookup(hashes)
            assert (cache.unpack(rows)[found] == vectors[found]).all(), f"{file}: a wrong vector"
            if not found.all():
                cache.store(hashes[~found], cache.pack(vectors[~found]))
        assert found.all(), f"{file}: a vector stored again is not found"
        cache.cache.close()
    except BAD as error:
        assert f"cache{number}" in str(error)
        raise script.UserError(str(error).replace("\n", "|")) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def damage_checkpoint(kind, data, rng, number):
    """Damage one file of the newest checkpoint; it must be skipped, and the previous one used."""
    shutil.rmtree("checkpoints", ignore_errors=True)
    for step in (2, 4):
        folder = Path(f"checkpoints/step_{step:08}")
        folder.mkdir(parents=True)
        save_file({"w": torch.full((20,), float(step))}, folder / "model.safetensors")
        save_file({"w.exp_avg": torch.zeros(20)}, folder / "optimizer.safetensors")
        save_file({}, folder / "extra.safetensors")
        (folder / "state.json").write_text(json.dumps({"progress": {"step": step}, "unchanging": {}}))
        sums = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in sorted(folder.iterdir())]
        (folder / "SHA256SUMS").write_text("".join(sums))
    file = rng.choice(sorted(folder.iterdir()))
    before = file.read_bytes()
    file.write_bytes(mutate(before, rng) if number >= 0 else before)
    args = script.Args(output_dir=".", resume=True)
    path, state = script.find_checkpoint(args)
    if file.read_bytes() == before:
        assert state["progress"]["step"] == 4
    else:
        assert state["progress"]["step"] == 2, f"{file} is damaged, but its checkpoint was used"
        raise script.UserError("checkpoints: skipped")


KINDS = {
    "qrels": (read_qrels, QRELS),
    "run file": (read_run, RUN),
    "YAML of flags": (read_settings, SETTINGS),
    "embedding cache": (damage_cache, b"-"),
    "checkpoint": (damage_checkpoint, b"-"),
}


def main(kind, count):
    check, data = KINDS[kind]
    seen = {"read": 0, "refused": 0}

    def time_out(*_):
        raise SystemExit(f"{kind} {number}: still running after 20 s")

    signal.signal(signal.SIGALRM, time_out)
    check(kind, data, random.Random(0), -1)  # the original must be readable
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        rng = random.Random(f"{kind} {number}")
        mutated = mutate(data, rng)
        Path("last").write_text(f"{kind} {number}")  # to reproduce a crash
        signal.alarm(20)
        try:
            check(kind, mutated, rng, number)
            seen["read"] += 1
        except BAD as error:
            assert "\n" not in str(error), f"{kind} {number}: more than one line: {error}"
            names = ("x.qrels", "x.run", "x.yaml", "--", f"cache{number}", "cache/", "checkpoints")
            assert any(name in str(error) for name in names), f"{kind} {number}: names no file: {error}"
            seen["refused"] += 1
        except BaseException:
            print(f"{kind} {number}", file=sys.stderr)
            raise
        signal.alarm(0)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        assert grown < 500_000, f"{kind} {number}: used {grown / 1000:,.0f} MB"
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
