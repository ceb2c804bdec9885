"""The evaluator on the simulated CUDA device: texts concatenated without padding, a chunk stored while the next one is
on the device, and worker processes give the rankings of a CPU."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, launch, read_run

pytestmark = [pytest.mark.skipif(not shutil.which("g++"), reason="needs g++"), pytest.mark.slow]
DRIVER = """
import json, sys
sys.path[:0] = [{tests!r}, {root!r}]
from strict_device import StrictDevice
import os
os.environ["ACCELERATE_MIXED_PRECISION"] = {mixed!r}
import eval_incremental as script

def say(*words):  # in one piece: a worker process says its passes on the same pipe
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

split = script.split_features
def recorded(features, *given):
    for positions, part in split(features, *given):
        shape = part["input_ids"].shape
        tokens = int(part["attention_mask"].sum())
        say("pass", len(positions), *shape, given[0], len(part["places"]), tokens, "token_type_ids" in part)
        yield positions, part
script.split_features = recorded
finish = script.finish
def finished(encoder, lookup, in_flight):
    say("finished", lookup.chunk.role, lookup.chunk.first, sum(len(own) for own, _ in lookup.outputs))
    return finish(encoder, lookup, in_flight)
script.finish = finished
forward = script.CachedEncoder.forward
def waiting(self, *given):
    before = sum(device.syncs.values())
    output = forward(self, *given)
    say("waited", self.unit, sum(device.syncs.values()) - before)
    return output
script.CachedEncoder.forward = waiting
compute = script.CachedEncoder.compute
def computed(self, lookup, indices, micro_batches):
    say("launched", lookup.chunk.role, lookup.chunk.first)
    return compute(self, lookup, indices, micro_batches)
script.CachedEncoder.compute = computed
device = StrictDevice(mixed={mixed!r})
script.try_concatenated = device.unreported(script.try_concatenated)
with device:
    script.main(script.parse_args(sys.argv[1:]))
say("reports", json.dumps(device.reports))
say("waits", json.dumps(device.syncs))
os._exit(0)
"""


def run_on_device(folder, mixed, *flags):
    """Return the lines that the driver prints of a run in a process of its own, which reports nothing."""
    path = folder / f"driver_{mixed}.py"
    path.write_text(DRIVER.format(tests=str(ROOT / "tests"), root=str(ROOT), mixed=mixed))
    done = subprocess.run([sys.executable, path, *map(str, flags)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "reports {}" in done.stdout and "not pinned" not in done.stdout, done.stdout[-4000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def ranked(tmp_path_factory, beir, bert, reranker):
    """The lines of a run in bf16, and the folder with its results and those of a CPU."""
    folder = tmp_path_factory.mktemp("ranked")
    for name, lines in (("corpus", 80), ("queries", 10)):
        kept = (beir / f"{name}.jsonl").read_text().splitlines(keepends=True)[:lines]
        (folder / f"{name}.jsonl").write_text("".join(kept))
    shutil.copytree(beir / "qrels", folder / "qrels")
    flags = ["--model_name_or_path", bert, "--beir", folder, "--corpus_chunk_size", 20, "--cross_encoder", reranker]
    flags += ["--rerank_k", 3, "--metrics", "RR@10", "--dataloader_num_workers", 1]
    own = {name: ["--cache_dir", folder / "cache" / name, "--output_dir", folder / name] for name in ("cpu", "bf16")}
    launch(ROOT / "eval_incremental.py", *flags, *own["cpu"])
    return run_on_device(folder, "bf16", *flags, *own["bf16"]), folder


def test_rankings_are_those_of_a_cpu(ranked, bert, reranker):
    """But for the rounding of bf16, of which this reranker makes much."""
    for name, tolerance in ((bert.name, 0.01), (f"{bert.name}+{reranker.name}(3)", 0.1)):
        found, expected = (read_run(ranked[1] / part / name / "run.trec") for part in ("bf16", "cpu"))
        assert found.keys() == expected.keys() and len(found) == 10
        for query, scores in expected.items():
            assert sorted(found[query].values()) == pytest.approx(sorted(scores.values()), abs=tolerance)


def test_texts_and_pairs_are_concatenated(ranked):
    """Each pass has the tokens of its texts alone, and does not wait for the device."""
    passes = [line for line in ranked[0] if line[:1] == ["pass"]]
    assert all(line[5] == line[6] and int(line[2]) * int(line[3]) > int(line[5]) for line in passes)
    assert {line[4] for line in passes} == {f"{2**15}"} and len(passes) == 7  # queries, four chunks; pairs
    waited = [line[1:] for line in ranked[0] if line[:1] == ["waited"]]
    assert waited == [["texts", "0"]] * 5 + [["pairs", "0"]] * 2


def test_a_chunk_is_stored_while_the_next_one_is_on_the_device(ranked):
    """All its passes were asked for before. Only the last chunk is waited for."""
    events = [line for line in ranked[0] if line[:1] in (["launched"], ["finished"]) and line[1] == "document"]
    order = ["launched 0", "launched 20", "finished 0", "launched 40", "finished 20", "launched 60", "finished 40"]
    assert [f"{line[0]} {line[2]}" for line in events] == [*order, "finished 60"]
