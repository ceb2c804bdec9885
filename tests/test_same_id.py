"""A document with the id of the query is left out, as in BEIR: in search, BM25, run files and reranking."""

import numpy as np
import pytest
from conftest import read_run, write_jsonl
from test_eval_incremental import read_qrels

LEFT_OUT = "queries share their id with a document, which is left out"


def write_collection(folder, texts, judgments):
    """Write a BEIR folder in which every document is also a query; return it."""
    records = [{"_id": name, "text": text} for name, text in texts.items()]
    write_jsonl(folder / "corpus.jsonl", records)
    write_jsonl(folder / "queries.jsonl", records)
    (folder / "qrels").mkdir()
    lines = [f"{query}\t{document}\t{grade}\n" for query, document, grade in judgments]
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return folder


@pytest.fixture
def four(tmp_path, rows):
    """A collection of four documents, each relevant to its near duplicate."""
    texts = {}
    for name, row in (("a", 3), ("b", 40)):
        code = rows[row]["code"][:200]
        texts |= {f"{name}0": code, f"{name}1": f"def {code}"}
    return write_collection(tmp_path / "four", texts, [(n, n[0] + str(1 - int(n[1])), 1) for n in texts])


@pytest.fixture(scope="session")
def sixty(tmp_path_factory, rows):
    """A collection of 60 functions with up to four relevant documents each; every tenth is relevant to itself, too."""
    kept = list({row["code"]: row for row in rows}.values())[:60]
    rng = np.random.default_rng(0)
    judged = [(f"d{i}", f"d{i}", 1) for i in range(0, 60, 10)]
    for i in range(60):
        others = rng.choice(60, 4, replace=False).tolist()
        judged += [(f"d{i}", f"d{j}", int(rng.integers(1, 3))) for j in others if i != j]
    return write_collection(
        tmp_path_factory.mktemp("sixty"), {f"d{i}": row["code"] for i, row in enumerate(kept)}, judged
    )


@pytest.mark.parametrize("extra", [(), ("--streaming",), ("--top_k", 10, "--corpus_chunk_size", 1)])
def test_four_documents_that_are_the_queries(evaluate, four, tmp_path, capsys, extra):
    metrics = "--metrics", "nDCG@10", "RR@10"
    got = evaluate("--beir", four, *metrics, *extra)
    assert got["metrics"]["nDCG@10"]["mean"] == got["metrics"]["RR@10"]["mean"] == 1.0
    assert (
        got["same_id_left_out"] == 4
        and f"warning: four: 4 {LEFT_OUT}; --keep_same_id keeps it" in capsys.readouterr().err
    )
    for query, found in read_run(tmp_path / "out/run.trec").items():
        assert query not in found and len(found) == 3 and np.isfinite(list(found.values())).all()
    got = evaluate("--beir", four, *metrics, *extra, "--keep_same_id")
    assert got["metrics"]["nDCG@10"]["mean"] == pytest.approx(1 / np.log2(3))
    assert got["same_id_left_out"] == 0 and LEFT_OUT not in capsys.readouterr().err
    assert all(list(found)[0] == query for query, found in read_run(tmp_path / "out/run.trec").items())


def test_pytrec_eval_without_identical_ids_agrees(evaluate, sixty, tmp_path, capsys):
    """As BEIR's ignore_identical_ids: the document is removed from the ranking, but not from the judgments."""
    import pytrec_eval

    names = {"nDCG@10": "ndcg_cut_10", "RR": "recip_rank", "R@20": "recall_20", "AP": "map"}
    flags = "--beir", sixty, "--metrics", *names
    evaluate(*flags, "--keep_same_id", "--top_k", 41, output="all")
    run = read_run(tmp_path / "all/run.trec")
    assert all(found.pop(query) > 0.999 for query, found in run.items())
    qrels = read_qrels(sixty / "qrels/test.tsv")
    each = pytrec_eval.RelevanceEvaluator(qrels, set(names.values())).evaluate(run)
    got = evaluate(*flags, "--top_k", 40)
    for name, theirs in names.items():
        assert got["metrics"][name]["mean"] == pytest.approx(np.mean([v[theirs] for v in each.values()]), abs=1e-6)
    assert read_run(tmp_path / "out/run.trec") == run  # still 40 documents for each query
    assert "6 of these are judged relevant" in capsys.readouterr().err


def test_run_files_and_reranking(evaluate, four, reranker, tmp_path, capsys):
    """Two queries have a line with their own id, which for one of them is the only line."""
    lines = ["a0 Q0 a0 1 9 x", "a0 Q0 b0 2 8 x", "a0 Q0 a1 3 7 x", "a1 Q0 a1 1 5 x", "b0 Q0 b1 1 5 x"]
    (tmp_path / "x.run").write_text("\n".join(lines) + "\n")
    flags = "--beir", four, "--run", tmp_path / "x.run", "--metrics", "RR@10"
    got = evaluate(*flags)
    assert got["metrics"]["RR@10"]["mean"] == (1 / 2 + 0 + 1 + 0) / 4 and got["same_id_left_out"] == 2
    assert read_run(tmp_path / "out/run.trec") == {"a0": {"b0": 8, "a1": 7}, "b0": {"b1": 5}}
    message = capsys.readouterr().err
    assert f"2 {LEFT_OUT}" in message and "1 judged queries are not in" in message  # b1
    before, after = evaluate(*flags, "--cross_encoder", reranker)["models"]
    assert after["pairs"]["total"] == 3 and before["same_id_left_out"] == after["same_id_left_out"] == 2
    found = read_run(tmp_path / "out" / after["name"] / "run.trec")
    assert {query: set(documents) for query, documents in found.items()} == {"a0": {"b0", "a1"}, "b0": {"b1"}}
    kept = evaluate(*flags, "--cross_encoder", reranker, "--keep_same_id")["models"]
    assert kept[0]["metrics"]["RR@10"]["mean"] == (1 / 3 + 0 + 1 + 0) / 4
    assert kept[1]["pairs"] == {"total": 5, "scored": 2, "cached": 3}
    (tmp_path / "x.run").write_text(lines[0] + "\n")  # no other line: not reported as unknown ids
    assert evaluate(*flags)["metrics"]["RR@10"]["mean"] == 0


def test_search_bm25_and_reranking_leave_it_out(evaluate, four, reranker, tmp_path):
    for result in evaluate("--beir", four, "--cross_encoder", reranker, "--bm25")["models"]:
        run = read_run(tmp_path / "out" / result["name"] / "run.trec")
        assert result["same_id_left_out"] == 4 and not any(query in found for query, found in run.items())


def test_bm25_still_ranks_top_k(evaluate, tmp_path):
    texts = {f"d{i}": f"shared words {'more ' * i}" for i in range(6)}
    folder = write_collection(tmp_path / "six", texts, [(f"d{i}", f"d{5 - i}", 1) for i in range(6)])
    evaluate("--beir", folder, "--bm25", "--top_k", 3, "--metrics", "R@3")
    for query, found in read_run(tmp_path / "out/BM25/run.trec").items():
        assert len(found) == 3 and query not in found
    again = ["--run", tmp_path / "out/BM25/run.trec", "--bm25", "--top_k", 3, "--metrics", "R@3"]
    names = [result["name"] for result in evaluate("--beir", folder, *again, output="again")["models"]]
    assert names == ["out_BM25", "BM25"]


def test_row_numbers_are_not_ids(evaluate, tmp_path, rows):
    """In --pairs, and in tables with row numbers as ids, document i is relevant to query i and is not left out."""
    write_jsonl(tmp_path / "p.jsonl", [{"q": row["docstring"], "d": row["docstring"] + " x"} for row in rows[:20]])
    (tmp_path / "qrels.tsv").write_text("".join(f"{i}\t{i}\t1\n" for i in range(20)))
    table = ["--corpus", tmp_path / "p.jsonl", "--queries", tmp_path / "p.jsonl", "--corpus_columns", "#", "d",
             "--query_columns", "#", "q", "--qrels", tmp_path / "qrels.tsv"]  # fmt: skip
    for flags in (["--pairs", tmp_path / "p.jsonl"], table):
        got = evaluate(*flags, "--bm25")
        for result in got["models"]:
            assert result["same_id_left_out"] == 0 and result["metrics"]["R@100"]["mean"] > 0.9
        again = evaluate(*flags, "--bm25", "--keep_same_id", output="again")
        assert [result["metrics"] for result in again["models"]] == [result["metrics"] for result in got["models"]]


def test_ids_do_not_matter_to_an_ad_hoc_search(evaluate, tmp_path, capsys):
    write_jsonl(tmp_path / "c.jsonl", [{"_id": f"query{i}", "text": f"text {i}"} for i in range(3)]
                + [{"_id": "query 1", "text": "open a file"}])  # fmt: skip
    evaluate("--corpus", tmp_path / "c.jsonl", "--query", "open a file")
    assert "1.000   query 1  open a file" in capsys.readouterr().out
