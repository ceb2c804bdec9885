"""Worker processes of the evaluator: the same vectors with any number, none for what is cached, none left behind."""

import pytest
from conftest import ROOT, launch, quick_first, write_jsonl

import eval_incremental as script

SCRIPT = ROOT / "eval_incremental.py"


def stored_bytes(folder):
    """Return the contents of all blocks of a cache, in order."""
    return sorted(path.read_bytes() for path in folder.rglob("*.val"))


@pytest.fixture
def repeating(tmp_path, rows):
    """A corpus of 120 rows in which texts occur again in the same and in the next chunks, and three queries."""
    texts = [row["code"] for row in rows[:60]]
    order = [*range(40), *range(10), *range(35, 60), *range(45)]
    write_jsonl(tmp_path / "c.jsonl", [{"_id": f"d{i}", "text": texts[number]} for i, number in enumerate(order)])
    write_jsonl(tmp_path / "q.jsonl", [{"_id": f"q{i}", "text": rows[i]["docstring"]} for i in range(3)])
    (tmp_path / "qrels.tsv").write_text("q0\td0\t1\nq1\td1\t1\nq2\td2\t1\n")
    return ["--corpus", tmp_path / "c.jsonl", "--queries", tmp_path / "q.jsonl", "--qrels", tmp_path / "qrels.tsv"]


@pytest.mark.parametrize("model", quick_first(["bert", "static", "reranker"]))
def test_any_number_of_workers_stores_the_same_bytes(model, repeating, rows, evaluate, bert, request, tmp_path):
    """A text that is being computed for an earlier chunk is not computed again."""
    path = request.getfixturevalue(model)
    flags = ["--model_name_or_path", path] if model != "reranker" else ["--cross_encoder", path, "--rerank_k", 100]
    found = []
    for workers in (0, 1, 4):
        options = ["--dataloader_num_workers", workers, "--micro_batch_tokens", 64, "--corpus_chunk_size", 16]
        cache = tmp_path / f"cache{workers}"
        got = evaluate(*repeating, *flags, *options, "--cache_dir", cache)
        got = got["models"][-1] if "models" in got else got
        work = got["texts"] if "texts" in got else got["pairs"]
        runs = [path.read_text() for path in sorted((tmp_path / "out").rglob("run.trec"))]
        found.append((work, runs, stored_bytes(cache)))
    assert found[0] == found[1] == found[2]
    if model != "reranker":
        distinct = {row["code"] for row in rows[:60]} | {row["docstring"] for row in rows[:3]}
        assert found[0][0] == {"total": 123, "encoded": len(distinct), "cached": 123 - len(distinct)}


def test_workers_start_once_and_not_for_what_is_cached_or_for_one_query(repeating, evaluate, tmp_path, monkeypatch):
    started = []
    make_pool = script.ProcessPoolExecutor

    def count(workers, *words, **options):
        started.append(workers)
        return make_pool(workers, *words, **options)

    monkeypatch.setattr(script, "ProcessPoolExecutor", count)
    evaluate(*repeating, "--dataloader_num_workers", 2)
    assert started == [2]  # for all chunks of the corpus; three queries are few
    evaluate(*repeating, "--dataloader_num_workers", 2)
    evaluate(*repeating[:2], "--query", "a file", "--dataloader_num_workers", 2)
    assert started == [2]


DRIVER = """
import os, signal, sys
sys.path.insert(0, {root!r})
import eval_incremental as script

def killed(self, *request, main=os.getpid()):
    if os.getpid() != main:
        os.kill(os.getpid(), signal.SIGKILL)
    return make(self, *request)

make = script.CachedEncoder.preprocess
script.CachedEncoder.preprocess = killed
with open({script!r}) as file:
    source = file.read()
exec(compile(source[source.rindex("if __name__"):], "end", "exec"), vars(script) | {{"__name__": "__main__"}})
"""


def test_a_killed_worker_is_one_line(repeating, bert, tmp_path):
    path = tmp_path / "driver.py"
    path.write_text(DRIVER.format(root=str(ROOT), script=str(SCRIPT)))
    flags = ["--model_name_or_path", bert, "--cache_dir", tmp_path / "cache", "--output_dir", tmp_path / "out"]
    flags += ["--corpus_chunk_size", 16, "--dataloader_num_workers", 1]
    result = launch(path, *repeating, *flags, check=False)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    line = "error: a worker process was killed, maybe for lack of memory: lower --dataloader_num_workers"
    assert line in result.stderr
