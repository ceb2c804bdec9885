"""From random states of the cache, by random settings, the evaluator ranks as with an empty cache on a CPU.

A dozen seeds; hundreds under `make chaos`. A failed one prints the command that repeats it.
"""

import json
import os
import shutil

import pytest
from conftest import CHAOS, ROOT, launch, mark_slow, read_run, start_worker

SEEDS = range(*map(int, os.environ.get("SEEDS", f"0:{CHAOS * 6 or 12}").split(":")))
VIEWS = {  # {name: (model, flags)}
    "float32": ("static", ""),
    "binary": ("static", "--truncate_dim 8 --precision binary --cache_dtype int8"),  # many ties
    "sparse": ("splade", ""),
    "multi-vector": ("colbert", ""),
}


@pytest.fixture(scope="module")
def ranked(tmp_path_factory, beir, static, splade, colbert):
    """Yield the folder of the rankings out/SEED and out/VIEW, and the worker. Texts of the corpus are repeated."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed: it compiles the simulated device")
    folder = tmp_path_factory.mktemp("states")
    for name, model in (("static", static), ("splade", splade), ("colbert", colbert)):
        shutil.copytree(model, folder / name)
    shutil.copytree(beir / "qrels", folder / "beir/qrels")
    (folder / "beir/queries.jsonl").write_text("".join((beir / "queries.jsonl").read_text().splitlines(True)[:20]))
    lines = [json.loads(line) for line in (beir / "corpus.jsonl").read_text().splitlines()[:96]]
    for first, distance in [(3, 2), (4, 14), (5, 60), *((place, 10) for place in range(20, 30))]:
        lines[first + distance]["text"] = lines[first]["text"]  # in the same, the next, a later chunk; a whole one
    (folder / "beir/corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for view, (model, more) in VIEWS.items():
        flags = f"--model_name_or_path {model} --beir beir --metrics nDCG@10 --top_k 50 --output_dir out/{view} {more}"
        launch(ROOT / "eval_incremental.py", *flags.split(), "--cache_dir", "cpu", cwd=folder)
    with start_worker(folder, "state_worker.py") as worker:
        yield folder, worker


@pytest.mark.parametrize("seed", mark_slow(SEEDS, SEEDS[::3][:2]))
def test_ranking_from_a_random_state(ranked, report, seed):
    folder, worker = ranked
    view = list(VIEWS)[seed % len(VIEWS)]
    print(seed, *VIEWS[view], file=worker.stdin, flush=True)
    result = json.loads(worker.stdout.readline() or "null")
    assert result, (folder / "log").read_text()[-4000:]
    print(f"again: SEEDS={seed}:{seed + 1} .venv/bin/python -m pytest {__file__}", *result["calls"], sep="\n")
    assert not result["errors"] and not result["reports"]
    found, expected = (read_run(folder / "out" / name / "run.trec") for name in (str(seed), view))
    assert found.keys() == expected.keys() and len(found) == 20
    if view == "binary":  # of exact scores, so that ids decide
        assert [[*scores.items()] for scores in found.values()] == [[*scores.items()] for scores in expected.values()]
    for query, scores in expected.items():
        last = min(scores.values())  # of which others may be equal
        for document in scores.keys() | found[query].keys():
            assert found[query].get(document, last) == pytest.approx(scores.get(document, last), rel=1e-5, abs=1e-5)
    report("random states of the cache, random settings: evaluator on the late device", 1, "ranks as a fresh run")
