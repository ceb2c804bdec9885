"""Run by test_fuzz.py in a process of its own: COUNT mutated inputs of one KIND, in the folder it stands in.

fuzz_worker.py KIND COUNT

Each must give what an independent reader of the same bytes gives, or one error of one line that names the file;
within 20 seconds, and without taking 500 MB. Prints {"read": how many were, "refused": how many} at the end.
Data files are not among the kinds: the readers of `datasets` are tested by their authors.
"""

import hashlib
import json
import random
import resource
import shutil
import signal
import struct
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))
import eval_incremental
import train_bi_encoder as script

BAD = (script.UserError, eval_incremental.UserError)


def mutate(data, dice):
    """The bytes with one to four changes: flipped, replaced, cut out, cut off, doubled, inserted, a huge number."""
    data = bytearray(data)
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        at, size = dice.randrange(len(data) + 1), dice.choice([1, 2, 8, 40, 300])
        way = dice.randrange(7)
        if way == 0 and at < len(data):
            data[at] ^= 1 << dice.randrange(8)
        elif way == 1 and at < len(data):
            data[at] = dice.choice(b'\x00\xff"\n\r,\t{}[]:0-\\\x80\xc3')
        elif way == 2:
            del data[at : at + size]
        elif way == 3:
            del data[at:]
        elif way == 4:
            data[at:at] = data[max(0, at - size) : at]
        elif way == 5:
            data[at:at] = dice.randbytes(dice.choice([1, 4, 50]))
        else:
            number = dice.choice([2**31 - 1, 2**33, 2**40, -1, 2**63 - 1])
            data[at : at + 8] = struct.pack("<q", number)
    return bytes(data)


JUDGED = "".join(f"q{n // 3} 0 d{n} {n % 3}\n" for n in range(60)).encode()
RANKED = "".join(f"q{n // 3} Q0 d{n} {n % 3 + 1} {9 - n % 3}.5 tag\n" for n in range(60)).encode()


def fields_of(data):
    """The fields of each line that has any, as read by whitespace or, with a tab in the first line, by tabs."""
    lines = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    split = (lambda line: line.split("\t")) if "\t" in lines[0] else str.split
    return [split(line) for line in lines if line.strip()]


def read_qrels(kind, data, dice, number):
    Path("x.qrels").write_bytes(data)
    found = {tuple(row[:2]): row[2] for row in eval_incremental.read_qrels("x.qrels").itertuples(index=False)}
    wanted = {(query, document): int(float(grade)) for query, *_, document, grade in fields_of(data)}
    assert found == wanted, "other judgments than the lines have"


def read_run(kind, data, dice, number):
    Path("x.run").write_bytes(data)
    queries, qrels = {f"q{n}": "t" for n in range(20)}, eval_incremental.pd.DataFrame(columns=["query_id", "doc_id"])
    run = eval_incremental.read_run("x.run", "x", eval_incremental.Collection("x", None, queries, qrels, []))
    known = [fields for fields in fields_of(data) if fields[0] in queries]
    assert len(run.ranking) == len(known), "a line of the ranking is lost"


def read_settings(kind, data, dice, number):
    Path("x.yaml").write_bytes(data)
    try:
        script.parse_args(["x.yaml"])
    except SystemExit as error:
        assert error.code == 2  # argparse has said why
        raise script.UserError("x.yaml: refused by the parser") from None


SETTINGS = b"""train_data:
- pairs.jsonl
columns: [a, b]
batch_size: 64
learning_rate: 2.0e-05
loss_kwargs:
  temperature: 0.05
resume: true
"""


def damage_cache(kind, data, dice, number):
    """Vectors of a cache in which one file was changed: those that are found are right."""
    hashes = np.arange(120, dtype=np.uint64).reshape(60, 2)
    vectors = np.random.default_rng(0).standard_normal((60, 8), np.float32)
    folder = Path(f"cache{number}")
    cache = eval_incremental.EmbeddingCache(folder, "m", 8, "float32")
    for first in range(0, 60, 20):
        cache.store(hashes[first : first + 20], cache.pack(vectors[first : first + 20]))
    cache.cache.close()
    file = dice.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    file.write_bytes(mutate(file.read_bytes(), dice) if number >= 0 else file.read_bytes())
    try:
        cache = eval_incremental.EmbeddingCache(folder, "m", 8, "float32")
        for _ in range(2):
            rows, found = cache.lookup(hashes)
            assert (cache.unpack(rows)[found] == vectors[found]).all(), f"{file}: a wrong vector"
            if not found.all():
                cache.store(hashes[~found], cache.pack(vectors[~found]))
        assert found.all(), f"{file}: what was stored again is not found"
        cache.cache.close()
    except BAD as error:
        assert f"cache{number}" in str(error)
        raise script.UserError(str(error).replace("\n", "|")) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def damage_checkpoint(kind, data, dice, number):
    """A damaged newest checkpoint is skipped for the one before, whatever was changed in it."""
    shutil.rmtree("checkpoints", ignore_errors=True)
    for step in (2, 4):
        folder = Path(f"checkpoints/step_{step:08}")
        folder.mkdir(parents=True)
        save_file({"w": torch.full((20,), float(step))}, folder / "model.safetensors")
        save_file({"0.exp_avg": torch.zeros(20)}, folder / "optimizer.safetensors")
        (folder / "state.json").write_text(json.dumps({"step": step, "data_state": None, "losses": []}))
        sums = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in sorted(folder.iterdir())]
        (folder / "SHA256SUMS").write_text("".join(sums))
    file = dice.choice(sorted(folder.iterdir()))
    before = file.read_bytes()
    file.write_bytes(mutate(before, dice) if number >= 0 else before)
    path, state = script.newest_checkpoint(Path("checkpoints"))
    if file.read_bytes() == before or file.name == "SHA256SUMS":
        assert state["step"] in (2, 4)  # a line of checksums may be damaged where it does not matter
    else:
        assert state["step"] == 2, f"{file} is damaged and was taken"
        raise script.UserError("checkpoints: skipped")


KINDS = {
    "qrels": (read_qrels, JUDGED),
    "run file": (read_run, RANKED),
    "YAML of flags": (read_settings, SETTINGS),
    "embedding cache": (damage_cache, b"-"),
    "checkpoint": (damage_checkpoint, b"-"),
}


def main(kind, count):
    check, data = KINDS[kind]
    seen = {"read": 0, "refused": 0}

    def too_long(*_):
        raise SystemExit(f"{kind} {number}: no end after 20 s")

    signal.signal(signal.SIGALRM, too_long)
    check(kind, data, random.Random(0), -1)  # as it is, it is read
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        dice = random.Random(f"{kind} {number}")
        mutated = mutate(data, dice)
        Path("last").write_text(f"{kind} {number}")  # for whoever looks after a crash
        signal.alarm(20)
        try:
            check(kind, mutated, dice, number)
            seen["read"] += 1
        except BAD as error:
            assert "\n" not in str(error), f"{kind} {number}: more than a line: {error}"
            names = ("x.qrels", "x.run", "x.yaml", "--", f"cache{number}", "cache/", "checkpoints")
            assert any(name in str(error) for name in names), f"{kind} {number}: names no file: {error}"
            seen["refused"] += 1
        except BaseException:
            print(f"{kind} {number}", file=sys.stderr)
            raise
        signal.alarm(0)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        assert grown < 500_000, f"{kind} {number}: took {grown / 1000:,.0f} MB"
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
