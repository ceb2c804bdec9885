"""Mutated inputs: each gives the right result or one clear line; see fuzz_worker.py."""

import json

import pytest
from conftest import CHAOS, ROOT, launch

COUNT = CHAOS * 4 or 25
KINDS = ["qrels", "run file", "YAML of flags", "embedding cache", "checkpoint"]


@pytest.mark.parametrize("kind", KINDS)
def test_mutated(tmp_path, say, kind):
    done = launch(ROOT / "tests/chaos/fuzz_worker.py", kind, COUNT, cwd=tmp_path)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["refused"] > 0 and sum(seen.values()) == COUNT
    happened = f"{seen['read']:,} read as another reader does, {seen['refused']:,} refused in one line"
    if kind in ("embedding cache", "checkpoint"):
        happened = f"never a wrong value; {seen['refused']:,} times it was reported"
    say(f"mutated: {kind}", COUNT, happened)
