"""Several views of one encoding, by dimensions and precision of an index: each is the ranking of a loop over the same
vectors, its codes are those of sentence-transformers, and no text is encoded for it."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CHAOS, ROOT, count_cached, launch, read_jsonl, read_run
from sentence_transformers.util import quantize_embeddings
from sentence_transformers.util.quantization import _dequantize_embeddings
from test_eval_incremental import two_collections  # noqa: F401
from test_eval_models import open_encoder
from test_export_vectors import documents

import eval_incremental as script
import report

SIZES = (32, 12)  # 12: its bits fill no byte
ALL = ["--truncate_dim", *SIZES, "--precision", *script.BITS]
NAMES = [f"@{dims},{precision}" for dims in SIZES for precision in script.BITS]


def cached_vectors(model, folder, beir):
    """Return the vectors of queries and of documents that an evaluation has left in its cache."""
    encoder = open_encoder(script.CachedEncoder, model, folder)
    queries = [row["text"] for row in read_jsonl(beir / "queries.jsonl")]
    texts = [row["text"].strip() for row in documents(beir)]
    vectors = encoder.encode(queries, "query"), encoder.encode(texts, "document")
    assert encoder.meter["new"] == 0
    encoder.close()
    return vectors


def cut(vectors, dims, normalize=True):
    """Return the first dimensions, normalized as the evaluator does it: to the bit, as codes jump."""
    vectors = torch.from_numpy(vectors)[:, :dims]
    return (F.normalize(vectors, dim=1) if normalize else vectors).numpy()


def bits(vectors):
    return np.unpackbits(quantize_embeddings(vectors, "ubinary"), axis=1)[:, : vectors.shape[1]]


def expected_scores(vectors, dims, precision, calibration=8192, normalize=True):
    """Return the (Q, n) scores of all pairs, by a loop: cut, normalize, quantize, decode."""
    queries, texts = (cut(side, dims, normalize) for side in vectors)
    if precision == "binary":  # of d dimensions, d - 2 x Hamming distance
        return np.array([[dims - 2.0 * (query != text).sum() for text in bits(texts)] for query in bits(queries)])
    if precision == "int8":
        sample = texts[:calibration]
        ranges = np.stack([sample.min(0), sample.max(0)])
        texts = _dequantize_embeddings(quantize_embeddings(texts, "int8", ranges), "int8", ranges)
    if precision == "binary_rescored":
        texts = bits(texts) * 2.0 - 1
    return np.array([[sum(a * b for a, b in zip(query, text)) for text in texts] for query in queries.astype(float)])


def check_run(path, scores, tolerance=2e-6):
    """Compare a run file with the (Q, n) scores of all pairs."""
    run = read_run(path)
    assert len(run) == len(scores)
    for row, found in zip(scores, run.values()):
        assert list(found.values()) == pytest.approx(np.sort(row)[::-1][: len(found)], abs=tolerance)
        assert list(found.values()) == pytest.approx([row[int(doc[1:])] for doc in found], abs=tolerance)


def test_codes_are_those_of_sentence_transformers():
    """With values outside of the ranges, a dimension of one value, zeros, and a vector of zeros, which stays one."""
    vectors = np.random.default_rng(0).normal(size=(500, 20)).astype(np.float32)
    vectors[:, 3] = 0.25
    vectors[::7, 5] = 0
    ranges = np.stack([vectors[:60].min(0), vectors[:60].max(0)])
    codes = quantize_embeddings(vectors, "int8", ranges)
    found = script.as_indexed(torch.from_numpy(vectors), "int8", torch.from_numpy(ranges)).numpy()
    assert found == pytest.approx(_dequantize_embeddings(codes, "int8", ranges), abs=1e-6)
    assert len(np.unique(codes)) == 256 and not ((vectors >= ranges[0]) & (vectors <= ranges[1])).all()
    for precision in ("binary", "binary_rescored"):
        signs = script.as_indexed(torch.from_numpy(vectors), precision).numpy()
        assert (np.packbits(signs > 0, axis=1) == quantize_embeddings(vectors, "ubinary")).all()
        assert (np.abs(signs) == 1).all() and (signs[::7, 5] == -1).all()
    for precision in script.BITS:
        assert not script.as_indexed(torch.zeros(1, 20), precision, torch.from_numpy(ranges)).any()


def test_each_view_is_the_ranking_of_a_loop(evaluate, beir, bert, tmp_path, capsys):
    results = evaluate("--beir", beir, *ALL)["models"]
    vectors = cached_vectors(bert, tmp_path, beir)
    assert [result["name"] for result in results] == [f"st{name}" for name in NAMES]
    assert [result["bytes"] for result in results] == [128, 32, 4, 4, 48, 12, 2, 2]
    table = re.findall(r"^ *(st@\S+) +(\d+) +0\.\d{4} \[", capsys.readouterr().out, re.M)
    assert table == [(result["name"], str(result["bytes"])) for result in results]
    for result in results:
        scores = expected_scores(vectors, result["dimensions"], result["precision"])
        check_run(tmp_path / "out" / result["folder"] / "run.trec", scores)
        assert result["texts"] == {"total": 353, "encoded": 353, "cached": 0}
        assert ("p" in result["metrics"]["nDCG@10"]) == (result is not results[0])
    values = [result["metrics"]["nDCG@10"]["mean"] for result in results]
    assert len(set(values)) > 6 and results[5]["metrics"]["nDCG@10"]["difference"] == values[5] - values[0]
    # one of them alone, and the same from the cache
    runs = {result["name"]: (tmp_path / "out" / result["folder"] / "run.trec").read_text() for result in results}
    for precision in ("int8", "binary"):
        alone = evaluate("--beir", beir, "--truncate_dim", 12, 12, "--precision", precision, output=precision)
        same = runs[f"st@12,{precision}"].replace(f"st@12,{precision}", "st")
        assert (tmp_path / precision / "run.trec").read_text() == same
        assert alone["name"] == "st" and alone["bytes"] == {"int8": 12, "binary": 2}[precision]
        assert alone["texts"]["encoded"] == 0
    assert count_cached(tmp_path / "cache") == [353]


@pytest.mark.slow
def test_report_has_bytes_and_a_picture(evaluate, beir, tmp_path, capsys):
    evaluate("--beir", beir, *ALL, "--bm25")
    capsys.readouterr()
    report.main(report.parse_args([str(tmp_path / "out")]))
    assert "index.png" in capsys.readouterr().out and (tmp_path / "out/index.png").exists()
    rows = [line.split(" | ") for line in (tmp_path / "out/table.md").read_text().splitlines()]
    assert rows[0][1] == "bytes"
    named = {row[0].removeprefix("| "): row[1] for row in rows[2:] if "@" in row[0] or "BM25" in row[0]}
    assert named["st@32,int8"] == "32" and named["st@12,binary"] == "2" and named["BM25"] == ""
    report.main(report.parse_args([str(tmp_path / "out"), "--rankings", "BM25", "st@12,int8"]))
    assert "index.png" not in capsys.readouterr().out  # one size


@pytest.mark.slow
def test_of_equal_scores_the_highest_ids_are_ranked(evaluate, beir, bert, tmp_path):
    """As trec_eval orders, so that a deeper ranking begins with the shallower one, whatever the size of chunks and the
    order of the corpus: 8 bits have 9 scores for 293 documents. Two processes, streams: the next test."""
    flags = ["--truncate_dim", 8, "--precision", "binary", "--metrics", "RR@5"]
    evaluate("--beir", beir, *flags)
    scores = expected_scores(cached_vectors(bert, tmp_path, beir), 8, "binary")
    order = [sorted(range(293), key=lambda row: (line[row], f"d{row}"), reverse=True) for line in scores]
    turned = tmp_path / "turned"
    shutil.copytree(beir, turned)
    lines = (beir / "corpus.jsonl").read_text().splitlines(keepends=True)
    (turned / "corpus.jsonl").write_text("".join(lines[::-1]))
    calls = [(beir, 5, 64), (beir, 200, 4), (turned, 30, 293)]
    for number, (folder, depth, size) in enumerate(calls):
        evaluate("--beir", folder, *flags, "--top_k", depth, "--corpus_chunk_size", size, output=f"{number}")
        run = read_run(tmp_path / f"{number}/run.trec")
        assert [list(found) for found in run.values()] == [[f"d{row}" for row in line[:depth]] for line in order]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "int8"] if CHAOS else ["int8"])
def test_processes_streams_and_dtypes_of_the_cache(beir, bert, tmp_path, dtype):
    """One process, two, and three that stream have the same bytes, from a cache. No text is encoded twice."""
    common = ["--beir", beir, "--model_name_or_path", bert, *ALL, "--corpus_chunk_size", 50, "--cache_dtype", dtype]
    runs = []
    for name, processes, *flags in [("one", 1), ("two", 2), ("streamed", 3, "--streaming")]:
        folder = tmp_path / name
        flags += ["--cache_dir", tmp_path / "cache", "--output_dir", folder]
        launch(ROOT / "eval_incremental.py", *common, *flags, processes=processes)
        results = json.loads((folder / "metrics.json").read_text())["results"]
        assert {result["texts"]["encoded"] for result in results} == {353 if name == "one" else 0}
        assert {result["texts"]["total"] for result in results} == {353}
        runs.append({result["name"]: (folder / result["folder"] / "run.trec").read_text() for result in results})
    assert len(runs[0]) == 8 and runs[0] == runs[1] == runs[2]


@pytest.mark.slow
def test_ranges_are_of_the_first_documents(evaluate, beir, bert, tmp_path, monkeypatch):
    """Of as many, whatever the size of chunks; what lies outside is clipped."""
    evaluate("--beir", beir)
    vectors = cached_vectors(bert, tmp_path, beir)
    monkeypatch.setattr(script, "CALIBRATION", 70)
    scores = expected_scores(vectors, 32, "int8", calibration=70)
    assert np.abs(scores - expected_scores(vectors, 32, "int8")).max() > 1e-3
    runs = []
    for size, flags in ((64, ()), (33, ("--streaming",)), (1000, ())):
        result = evaluate("--beir", beir, "--precision", "int8", "--corpus_chunk_size", size, *flags, output="new")
        check_run(tmp_path / "new/run.trec", scores)
        runs.append((tmp_path / "new/run.trec").read_text())
        assert result["texts"]["total"] == 353
    assert runs[0] == runs[1] == runs[2]


def test_dot_products_and_a_model_that_is_cut(evaluate, beir, bert, tmp_path):
    """Lengths matter, and stay; without the flag, the model's own number of dimensions counts."""
    model = shutil.copytree(bert, tmp_path / "dot")
    config = model / "config_sentence_transformers.json"
    options = {"similarity_fn_name": "dot", "truncate_dim": 16}
    config.write_text(json.dumps({**json.loads(config.read_text()), **options}))
    results = evaluate("--beir", beir, "--model_name_or_path", model, "--precision", "float32", "int8")
    vectors = cached_vectors(model, tmp_path, beir)
    for result in results["models"]:
        assert result["dimensions"] == 16
        scores = expected_scores(vectors, 16, result["precision"], normalize=False)
        check_run(tmp_path / "out" / result["folder"] / "run.trec", scores, 1e-5 * np.abs(scores).max())


@pytest.mark.slow
def test_collections_and_a_reranker(evaluate, two_collections, reranker, tmp_path):  # noqa: F811
    """The mean of two, and each view reranked: a pair that several of them have is scored once."""
    flags = ["--precision", "float32", "binary", "--cross_encoder", reranker, "--rerank_k", 5]
    results = evaluate("--beir", *two_collections, *flags, "--metrics", "RR@10")["models"]
    record = json.loads((tmp_path / "out/metrics.json").read_text())
    first = ["st@32,float32", "st@32,binary"]
    names = [*first, *(f"{name}+{reranker.name}(5)" for name in first)]
    assert list(record["means"]) == names and [result["name"] for result in results] == names * 2
    pairs = [result["pairs"] for result in results if "pairs" in result]
    assert sum(part["scored"] for part in pairs) < sum(part["total"] for part in pairs)


USAGE = {
    ("--fuse", "rrf", "--bm25", "--precision", "int8", "binary"): "--fuse takes one --truncate_dim",
    ("--query", "x", "--truncate_dim", "16", "8"): "one model, size, precision",
    ("--export_vectors", "x", "--precision", "int8"): "--export_vectors writes float32",
    ("--precision", "int4"): "--precision takes float32, int8, binary, binary_rescored",
    ("--truncate_dim", "0", "16"): "--truncate_dim 0: must be finite, above 0",
}


@pytest.mark.parametrize("flags", USAGE, ids=str)
def test_usage(flags, beir, bert, capsys):
    with pytest.raises(SystemExit):
        script.parse_args(["--model_name_or_path", str(bert), "--beir", str(beir), *flags])
    assert USAGE[flags] in capsys.readouterr().err
