"""Mutated inputs: each gives the right result or one clear line; see fuzz_worker.py."""

import functools
import gzip
import io
import json
import resource
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import CHAOS, ROOT, launch

COUNT = CHAOS * 4 or 25
KINDS = ["json lines", "json lines, gzip", "json lines, zstd", "CSV", "TSV", "text, zstd", "Parquet", "Arrow stream",
         "Arrow file", "qrels", "run file", "YAML of flags", "embedding cache", "checkpoint"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_mutated(tmp_path, say, kind):
    done = launch(ROOT / "tests/chaos/fuzz_worker.py", kind, COUNT, cwd=tmp_path)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["refused"] > 0 and sum(seen.values()) == COUNT
    happened = f"{seen['read']:,} read as another reader does, {seen['refused']:,} refused in one line"
    if kind in ("embedding cache", "checkpoint"):
        happened = f"never a wrong value; {seen['refused']:,} times it was said"
    say(f"mutated: {kind}", COUNT, happened)


def claim(what):
    """(name, bytes) of a small file that claims ten gigabytes, or a depth that no parser has."""
    if what == "a line":
        return "x.jsonl.zst", pa.Codec("zstd").compress(b"a" * 10**8, asbytes=True) * 100
    if what == "a cell":
        return "x.csv.gz", gzip.compress(b'a,b\nx,"') + gzip.compress(b"a" * 10**8) * 100
    if what == "a dictionary":
        texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), ["x" * 10**7])
        pq.write_table(pa.table({"a": texts, "b": ["y"] * 1000}), sink := io.BytesIO(), compression="zstd")
        return "x.parquet", sink.getvalue()
    return "x.jsonl", b'{"a": "x", "b": ' + b"[" * 100_000 + b"}\n"


ALL = [(what, way) for what in ("a line", "a cell", "a dictionary", "brackets") for way in ("mapped", "streaming")]


@pytest.mark.parametrize("what, way", ALL if CHAOS else [ALL[1], ALL[4]])
def test_claims(tmp_path, say, bert, what, way):
    """Refused in one line by a process that may not have ten gigabytes."""
    name, data = claim(what)
    (tmp_path / name).write_bytes(data)
    flags = ["--model_name_or_path", str(bert), "--train_data", str(tmp_path / name), "--columns", "a", "b",
             "--output_dir", str(tmp_path / "out"), "--data_cache", str(tmp_path / "cache"),
             *["--streaming"] * (way == "streaming")]  # fmt: skip
    command = [sys.executable, ROOT / "train_bi_encoder.py", *flags]
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_AS, (9 * 2**30, 9 * 2**30))
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, preexec_fn=limit)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith(f"error: {tmp_path / name}"), last
    say(f"{what} of 10 GB, or without end, in a file of {len(data):,} bytes", 1, "refused in one line")
