"""Mutated inputs: each gives the right result or a one-line error; see fuzz_worker.py."""

import json

import pytest
from conftest import CHAOS, ROOT, launch

COUNT = CHAOS * 4 or 25
KINDS = ["qrels", "run file", "YAML of flags", "embedding cache", "checkpoint"]


@pytest.mark.parametrize("kind", KINDS)
def test_mutated(tmp_path, report, kind):
    done = launch(ROOT / "tests/chaos/fuzz_worker.py", kind, COUNT, cwd=tmp_path)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["refused"] > 0 and sum(seen.values()) == COUNT
    result = f"{seen['read']:,} read as another reader does, {seen['refused']:,} refused in one line"
    if kind in ("embedding cache", "checkpoint"):
        result = f"never a wrong value; {seen['refused']:,} times it was reported"
    report(f"mutated: {kind}", COUNT, result)
