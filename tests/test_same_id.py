"""The query itself, a document with its id and a text that contains its text, is left out, unless it is judged
relevant: in search, BM25, run files, reranking and mining. Another document with its id is ranked."""

import json

import numpy as np
import pytest
from conftest import read_run, write_beir, write_jsonl
from test_eval_incremental import read_qrels

import eval_incremental as script
import mine_negatives


@pytest.fixture
def four(tmp_path, rows):
    """A collection of four documents, each relevant to its near duplicate."""
    texts = {}
    for name, row in (("a", 3), ("b", 40)):
        code = rows[row]["code"][:200]
        texts |= {f"{name}0": code, f"{name}1": f"def {code}"}
    return write_beir(tmp_path / "four", texts, texts, [(n, n[0] + str(1 - int(n[1])), 1) for n in texts])


@pytest.fixture(scope="session")
def sixty(tmp_path_factory, rows):
    """A collection of 60 functions with up to four relevant documents each; every tenth is relevant to itself, too."""
    kept = list({row["code"]: row for row in rows}.values())[:60]
    rng = np.random.default_rng(0)
    judged = [(f"d{i}", f"d{i}", 1) for i in range(0, 60, 10)]
    for i in range(60):
        others = rng.choice(60, 4, replace=False).tolist()
        judged += [(f"d{i}", f"d{j}", int(rng.integers(1, 3))) for j in others if i != j]
    texts = {f"d{i}": row["code"] for i, row in enumerate(kept)}
    return write_beir(tmp_path_factory.mktemp("sixty"), texts, texts, judged)


@pytest.mark.parametrize("extra", [(), ("--streaming",), ("--top_k", 10, "--corpus_chunk_size", 1)])
def test_four_documents_that_are_the_queries(evaluate, four, tmp_path, capsys, extra):
    """Whatever stands before the query's text, as a title, and however it is spaced and written."""
    metrics = "--metrics", "nDCG@10", "RR@10"
    documents = [json.loads(line) for line in (four / "corpus.jsonl").read_text().splitlines()]
    changed = [row | {"title": "A title", "text": row["text"].upper().replace(" ", "\n ")} for row in documents]
    write_jsonl(four / "corpus.jsonl", changed)
    got = evaluate("--beir", four, *metrics, *extra)
    assert got["metrics"]["nDCG@10"]["mean"] == got["metrics"]["RR@10"]["mean"] == 1.0
    assert "warning" not in capsys.readouterr().err
    for query, found in read_run(tmp_path / "out/run.trec").items():
        assert query not in found and len(found) == 3 and np.isfinite(list(found.values())).all()


def test_pytrec_eval_without_identical_ids_agrees(evaluate, sixty, tmp_path):
    """As BEIR's ignore_identical_ids, but where it is judged relevant: the document is removed from the ranking, not
    from the judgments."""
    import pytrec_eval

    names = {"nDCG@10": "ndcg_cut_10", "RR": "recip_rank", "R@20": "recall_20", "AP": "map"}
    flags = "--beir", sixty, "--metrics", *names
    records = [json.loads(line) for line in (sixty / "queries.jsonl").read_text().splitlines()]
    write_jsonl(tmp_path / "q.jsonl", [row | {"_id": f"q{row['_id']}"} for row in records])  # of other ids
    (tmp_path / "r.tsv").write_text("".join(f"q{row['_id']}\td0\t0\n" for row in records))
    files = ["--corpus", sixty / "corpus.jsonl", "--queries", tmp_path / "q.jsonl", "--qrels", tmp_path / "r.tsv"]
    evaluate(*files, "--metrics", *names, "--top_k", 41, output="all")
    run = {query[1:]: found for query, found in read_run(tmp_path / "all/run.trec").items()}
    for number, (query, found) in enumerate(run.items()):
        assert found[query] > 0.999
        if number % 10:  # every tenth is judged
            found.pop(query)
    qrels = read_qrels(sixty / "qrels/test.tsv")
    each = pytrec_eval.RelevanceEvaluator(qrels, set(names.values())).evaluate(run)
    got = evaluate(*flags, "--top_k", 40)
    for name, theirs in names.items():
        assert got["metrics"][name]["mean"] == pytest.approx(np.mean([v[theirs] for v in each.values()]), abs=1e-6)
    assert read_run(tmp_path / "out/run.trec") == run


def test_run_files_and_reranking(evaluate, four, reranker, tmp_path):
    """Two queries have a line with their own id, which for one of them is the only line."""
    lines = ["a0 Q0 a0 1 9 x", "a0 Q0 b0 2 8 x", "a0 Q0 a1 3 7 x", "a1 Q0 a1 1 5 x", "b0 Q0 b1 1 5 x"]
    (tmp_path / "x.run").write_text("\n".join(lines) + "\n")
    flags = "--beir", four, "--run", tmp_path / "x.run", "--metrics", "RR@10"
    got = evaluate(*flags)
    assert got["metrics"]["RR@10"]["mean"] == (1 / 2 + 0 + 1 + 0) / 4
    assert read_run(tmp_path / "out/run.trec") == {"a0": {"b0": 8, "a1": 7}, "b0": {"b1": 5}}
    after = evaluate(*flags, "--cross_encoder", reranker)["models"][1]
    assert after["pairs"]["total"] == 3
    found = read_run(tmp_path / "out" / after["name"] / "run.trec")
    assert {query: set(documents) for query, documents in found.items()} == {"a0": {"b0", "a1"}, "b0": {"b1"}}
    (tmp_path / "x.run").write_text(lines[0] + "\n")  # no other line: not reported as unknown ids
    assert evaluate(*flags)["metrics"]["RR@10"]["mean"] == 0


def test_bm25_still_ranks_top_k(evaluate, tmp_path):
    texts = {f"d{i}": f"shared words {'more ' * i}" for i in range(6)}
    folder = write_beir(tmp_path / "six", texts, texts, [(f"d{i}", f"d{5 - i}", 1) for i in range(6)])
    evaluate("--beir", folder, "--bm25", "--top_k", 3, "--metrics", "R@3")
    for query, found in read_run(tmp_path / "out/BM25/run.trec").items():
        assert len(found) == 3 and query not in found


def test_another_document_with_the_id_of_the_query_is_ranked(evaluate, tmp_path, rows):
    """Numbers that coincide, and an FAQ whose questions and answers share ids: by ids alone, it measures 0."""
    questions = {f"{n}": row["docstring"] for n, row in enumerate(rows[:20])}
    answers = {name: text[1:] + " answer" for name, text in questions.items()}
    for judged in ({n: n for n in range(20)}, {n: 19 - n for n in range(20)}):  # itself; another
        write_beir(tmp_path / "faq", answers, questions, [(*pair, 1) for pair in judged.items()])
        got = evaluate("--beir", tmp_path / "faq", "--bm25", "--metrics", "R@1", "R@20")["models"]
        for result in got:
            found = read_run(tmp_path / "out" / result["name"] / "run.trec")
            assert all(query in found[query] for query in found)
        assert got[0]["metrics"]["R@20"]["mean"] == 1
        runs = ["--run", tmp_path / "out/BM25/run.trec"]
        again = evaluate("--beir", tmp_path / "faq", *runs, "--metrics", "R@1", "R@20", output="again")
        assert again["metrics"]["R@20"]["mean"] == got[1]["metrics"]["R@20"]["mean"]


def test_questions_that_are_also_answers(evaluate, tmp_path):
    """Of pairs, ids are hashes of the texts, white space and case folded: the question itself is neither ranked nor
    mined, unless it is its own judged answer."""
    questions = ["how to cook rice", "how do I cook rice", "what is a cactus", "What is  a cactus? A plant"]
    pairs = [{"q": questions[n], "d": questions[n ^ 1]} for n in range(4)]
    pairs += [{"q": "HOW to cook\nrice ", "d": "cook it"}, {"q": "tea", "d": "tea"}]
    write_jsonl(tmp_path / "pairs.jsonl", pairs)
    flags = ["--pairs", tmp_path / "pairs.jsonl", "--columns", "q", "d"]
    got = evaluate(*flags, "--bm25", "--metrics", "R@10")["models"]
    assert got[0]["queries"] == 5 and got[0]["metrics"]["R@10"]["mean"] == 1
    tea = script.text_id("Tea")
    for result in got:
        found = read_run(tmp_path / "out" / result["name"] / "run.trec")
        assert all((query in documents) == (query == tea) for query, documents in found.items())
    (tmp_path / "x.run").write_text(  # of another system: all questions, the question itself first
        "".join(f"{script.text_id(q)} Q0 {script.text_id(d)} 1 {9 - n} x\n" for q in [*questions, "tea"]
                for n, d in enumerate([q, *questions, "tea"]))
    )  # fmt: skip
    rows = [*flags, "--run", tmp_path / "x.run", "--num_negatives", "2", "--format", "n-tuple", "--overwrite"]
    rows += ["--output", tmp_path / "mined.jsonl"]
    mine_negatives.main(mine_negatives.parse_args([str(word) for word in rows]))
    mined = [json.loads(line) for line in (tmp_path / "mined.jsonl").read_text().splitlines()]
    assert len(mined) == 6
    for row in mined:
        texts = [script.fold(row[name]) for name in ("query", "negative_1", "negative_2")]
        assert len(set(texts)) == 3


def test_ids_do_not_matter_to_an_ad_hoc_search(evaluate, tmp_path, capsys):
    write_jsonl(tmp_path / "c.jsonl", [{"_id": f"query{i}", "text": f"text {i}"} for i in range(3)]
                + [{"_id": "query 1", "text": "open a file"}])  # fmt: skip
    evaluate("--corpus", tmp_path / "c.jsonl", "--query", "open a file")
    assert "1.000   query 1  open a file" in capsys.readouterr().out
