"""Equal texts tie, whichever process encodes them and wherever they stand; a value is the same whatever else is
measured."""

import numpy as np
import pytest
import torch
from conftest import launch, quick_first, read_run, write_beir

import eval_incremental as script

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def test_a_text_has_the_vector_that_was_stored_first(tmp_path):
    """Another process has encoded it meanwhile, in another micro-batch."""
    one, two = (script.EmbeddingCache(tmp_path, 4, "float32") for _ in range(2))
    hashes = np.arange(24, dtype=np.uint64).view("V16")  # of 12 texts
    vectors = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    assert not two.lookup(hashes)[1].any()
    first, _ = one.store(hashes[:8], one.pack(vectors[:8]))
    _, rows = two.store(hashes[4:], two.pack(vectors[4:] + np.float32(1e-6)))
    assert (two.unpack(rows)[:4] == vectors[4:8]).all() and (two.unpack(rows)[4:] != vectors[8:]).all()
    # A block that replaces its parts, and has the key of one that is there, is found by who knew the older ones.
    assert one.lookup(hashes)[1].all()
    part, _ = two.store(hashes[:2], two.pack(vectors[:2]))
    two.store(hashes[:8], two.pack(vectors[:8]), [part])
    two.store(hashes[2:5], two.pack(vectors[2:5]))
    for cache in (one, script.EmbeddingCache(tmp_path, 4, "float32")):
        rows, found = cache.lookup(hashes[[3, 0, 9]])
        assert found.all() and (cache.unpack(rows)[:2] == vectors[[3, 0]]).all()


SIZES = [(384, 300, 4096), (1024, 300, 4096), (1024, 2000, 1000)]


@pytest.mark.parametrize("dims, queries, chunk", quick_first(SIZES))
def test_equal_vectors_tie_in_a_last_chunk_that_is_short(dims, queries, chunk):
    generator = torch.Generator().manual_seed(0)
    documents = torch.randn(chunk + 60, dims, generator=generator)
    documents[chunk:] = documents[:60]
    top = script.TopK(torch.randn(queries, dims, generator=generator), len(documents))
    ids = np.arange(len(documents))
    for first in (0, chunk):  # all are kept: no id decides
        top.add(documents[first : first + chunk], first, ids[first : first + chunk], [])
    scores = torch.empty(queries, len(documents)).scatter_(1, top.rows, top.scores)
    assert (scores[:, :60] == scores[:, chunk:]).all()


@pytest.mark.slow
def test_two_processes_rank_equal_texts_as_one(bert, tmp_path):
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 60))) for _ in range(60)]
    rows = [{"_id": f"{number % 7}-{number}", "text": texts[number * 11 % 60]} for number in range(180)]
    queries = {f"q{i}": text[:30] for i, text in enumerate(texts)}
    write_beir(tmp_path / "beir", rows, queries, [(f"q{i}", rows[i]["_id"], 1) for i in range(60)])
    text_of = {row["_id"]: row["text"] for row in rows}
    for processes in (1, 2):
        flags = ["--beir", tmp_path / "beir", "--model_name_or_path", bert, "--corpus_chunk_size", 45, "--top_k", 180]
        flags += ["--micro_batch_tokens", 256, "--cache_dir", tmp_path / f"cache{processes}"]
        launch("eval_incremental.py", *flags, "--output_dir", tmp_path / f"{processes}", processes=processes)
        for scores in read_run(tmp_path / f"{processes}/run.trec").values():
            by_text = {}
            for document, score in scores.items():
                assert by_text.setdefault(text_of[document], score) == score


def test_a_value_does_not_depend_on_other_measures(evaluate, beir, bert, tmp_path, monkeypatch):
    pytest.importorskip("bm25s")
    monkeypatch.setattr(script, "UNCUT", 20)
    torch.set_float32_matmul_precision("high")  # as a launch may
    flags = ["--beir", beir, "--model_name_or_path", bert, "--top_k", 10]
    alone = evaluate(*flags, "--metrics", "AP", "nDCG(judged_only=True)@5", output="alone")["metrics"]
    beside = evaluate(*flags, "--metrics", "AP", "R@200", "nDCG(judged_only=True)@5", output="beside")["metrics"]
    assert alone["AP"] == beside["AP"] and torch.get_float32_matmul_precision() == "highest"
    assert alone["nDCG(judged_only=True)@5"] == beside["nDCG(judged_only=True)@5"]


def test_a_reranked_ranking_has_a_name_of_its_own(evaluate, beir, bert, reranker, tmp_path):
    evaluate("--beir", beir, "--model_name_or_path", bert, output="first")
    copy = tmp_path / f"first+{reranker.name}(5)"
    copy.mkdir()
    (copy / "run.trec").write_text((tmp_path / "first/run.trec").read_text())
    runs = ["--run", tmp_path / "first/run.trec", copy / "run.trec"]
    with pytest.raises(script.UserError, match="gets this name; rename the file"):
        evaluate("--beir", beir, *runs, "--cross_encoder", reranker, "--rerank_k", 5)
