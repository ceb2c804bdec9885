"""Hard negatives: the rows of mine_hard_negatives, read by both trainers, nothing encoded twice; distillation."""

import json
import signal

import numpy as np
import pytest
import torch
from conftest import ROOT, launch, write_jsonl
from forked import last_of

import eval_incremental as script


@pytest.fixture(autouse=True)
def signals(monkeypatch, tmp_path):
    """The trainers' main leaves a SIGTERM handler behind, which later tests must not have."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def mine(evaluate, tmp_path):
    """Run --negatives_out on flags; returns (rows, metrics.json)."""

    def run(*flags, output="out"):
        got = evaluate("--negatives_out", tmp_path / f"{output}.jsonl", *flags, output=output)
        return [json.loads(line) for line in (tmp_path / f"{output}.jsonl").read_text().splitlines()], got

    return run


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_library(bert, beir, cross_encoder=None, **options):
    """[(query, positive, negatives, scores)] by sentence_transformers.util.mine_hard_negatives."""
    from datasets import Dataset
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    queries = {r["_id"]: r["text"].strip() for r in records(beir / "queries.jsonl")}
    documents = {r["_id"]: r["text"].strip() for r in records(beir / "corpus.jsonl")}
    judged = [line.split("\t") for line in (beir / "qrels/test.tsv").read_text().splitlines()[1:]]
    pairs = [(queries[q], documents[d]) for q, d, grade in judged if int(grade) > 0]
    data = Dataset.from_dict({"query": [q for q, _ in pairs], "positive": [d for _, d in pairs]})
    if cross_encoder:
        cross_encoder = CrossEncoder(str(cross_encoder), device="cpu", activation_fn=torch.nn.Identity())
    model = SentenceTransformer(str(bert), device="cpu")
    found = mine_hard_negatives(
        data, model, corpus=list(documents.values()), output_format="n-tuple", output_scores=True, verbose=False,
        cross_encoder=cross_encoder, **options,
    )  # fmt: skip
    columns = [name for name in found.column_names if name.startswith("negative")]
    return [(row["query"], row["positive"], [row[name] for name in columns], row["scores"]) for row in found]


@pytest.mark.parametrize(
    "flags, options",
    [
        ([], {}),
        (["--negative_ranks", 3, 17], {"range_min": 3, "range_max": 17}),
        (["--negative_margin", -0.02], {"absolute_margin": -0.02}),
        (["--negative_relative_margin", -0.03, "--negative_ranks", 1, 40],
         {"relative_margin": -0.03, "range_min": 1, "range_max": 40}),
    ],
)  # fmt: skip
def test_rows_are_those_of_the_library(mine, bert, beir, flags, options):
    rows, about = mine("--beir", beir, "--num_negatives", 3, "--cache_dtype", "float32", *flags)
    wanted = by_library(bert, beir, num_negatives=3, **{"range_max": 100, **options})
    assert len(rows) == len(wanted) == about["negatives"]["rows"] > 20
    wanted, equal = {(query, positive): (negatives, scores) for query, positive, negatives, scores in wanted}, 0
    for row in rows:
        negatives, scores = wanted[row["query"], row["positive"]]
        assert row["scores"] == pytest.approx(scores, abs=2e-6)
        mined = [row[f"negative_{i}"] for i in (1, 2, 3)]
        for place, (one, other) in enumerate(zip(mined, negatives), start=1):
            # up to ties: scores that differ in the last digit only, by how the texts were batched
            near = [text for text, value in zip(negatives, scores[1:]) if abs(value - scores[place]) < 2e-6]
            assert one == other or one in near or scores[place] - scores[-1] < 2e-6, (row["query"], place)
        equal += mined == negatives
    assert equal > 0.9 * len(rows)


def test_rows_are_those_of_the_library_with_a_cross_encoder(mine, bert, beir, reranker, tmp_path):
    short = tmp_path / "short"
    write_jsonl(short / "corpus.jsonl", [{**r, "text": r["text"][:200]} for r in records(beir / "corpus.jsonl")])
    write_jsonl(short / "queries.jsonl", [{**r, "text": r["text"][:60]} for r in records(beir / "queries.jsonl")])
    (short / "qrels").mkdir()
    (short / "qrels/test.tsv").write_text((beir / "qrels/test.tsv").read_text())
    flags = "--beir", short, "--cross_encoder", reranker, "--num_negatives", 2, "--negative_ranks", 0, 20
    rows, about = mine(*flags, "--negative_margin", 0.0, "--cache_dtype", "float32")
    wanted = by_library(bert, short, reranker, num_negatives=2, range_max=20, absolute_margin=0.0)
    assert {(row["query"], row["positive"]): row["scores"] for row in rows} == {
        (query, positive): pytest.approx(scores, abs=1e-5) for query, positive, _, scores in wanted
    }
    assert about["rescored"]["pairs"]["scored"] > 60 * 20
    again = mine(*flags, "--negative_margin", 0.0, "--cache_dtype", "float32", output="again")
    assert again[0] == rows and again[1]["texts"]["encoded"] == again[1]["rescored"]["pairs"]["scored"] == 0


def test_nothing_is_encoded_twice_and_the_rules_are_counted(mine, beir, capsys):
    flags = "--beir", beir, "--num_negatives", 3, "--negative_margin", 0.005, "--negative_ranks", 2, 12
    rows, first = mine(*flags)
    said = capsys.readouterr().out
    again, second = mine(*flags, output="again")
    assert again == rows and first["texts"]["encoded"] == 353 and second["texts"]["encoded"] == 0
    counts = first["negatives"]
    kept = sum(counts["candidates"] for counts in [counts]) - sum(counts["removed"].values())
    assert counts["candidates"] == 60 * 14 and kept >= 3 * counts["rows"]
    assert counts["rows"] + counts["rows_left_out"] == 61 and counts["rows_left_out"] > 0
    for part in ("positives, and texts equal", "within 0.005 of the lowest positive", "outside of the ranks 2 to 12",
                 f"{counts['rows_left_out']} rows left out: fewer than --num_negatives 3"):  # fmt: skip
        assert part in said


def test_no_positive_and_no_equal_text_is_a_negative(mine, tmp_path, rows):
    """Documents 0 to 9 are answers, 10 to 19 their copies; queries of --pairs, too."""
    texts = [row["code"] for row in rows[:30]]
    documents = [{"_id": str(i), "text": texts[i % 10 if i < 20 else i]} for i in range(30)]
    write_jsonl(tmp_path / "c.jsonl", documents)
    write_jsonl(tmp_path / "q.jsonl", [{"_id": f"q{i}", "text": rows[i]["docstring"]} for i in range(10)])
    (tmp_path / "qrels.tsv").write_text("".join(f"q{i}\t{i}\t1\nq{i}\t{29 - i}\t2\n" for i in range(10)))
    flags = ["--corpus", tmp_path / "c.jsonl", "--queries", tmp_path / "q.jsonl", "--qrels", tmp_path / "qrels.tsv"]
    found, _ = mine(*flags, "--num_negatives", 8, "--negative_sampling", "random", "--negative_ranks", 0, 18)
    assert len(found) == 20
    for row in found:
        number = [r["docstring"] for r in rows[:10]].index(row["query"])
        negatives = [row[f"negative_{i}"] for i in range(1, 9)]
        assert len(set(negatives)) == 8 and not {texts[number], texts[29 - number]} & set(negatives)
        assert row["scores"][1:] == sorted(row["scores"][1:], reverse=True)
    again, _ = mine(*flags, "--num_negatives", 8, "--negative_sampling", "random", "--negative_ranks", 0, 18)
    other, _ = mine(
        *flags, "--num_negatives", 8, "--negative_sampling", "random", "--negative_ranks", 0, 18, "--seed", 1
    )
    assert again == found != other


def test_bad_input(evaluate, beir, tmp_path, capsys):
    empty = tmp_path / "empty.tsv"
    empty.write_text("query-id\tcorpus-id\tscore\n")
    collection = ["--corpus", beir / "corpus.jsonl", "--queries", beir / "queries.jsonl", "--qrels"]
    with pytest.raises(script.BadInput, match="holds no judgment"):
        evaluate(*collection, empty, "--negatives_out", tmp_path / "n.jsonl")
    empty.write_text("q0\td0\t0\n")
    with pytest.raises(script.BadInput, match="no query has a relevant document in the corpus"):
        evaluate(*collection, empty, "--negatives_out", tmp_path / "n.jsonl")
    assert not (tmp_path / "n.jsonl").exists()
    for flags, said in (
        (["--query", "x"], "--negatives_out: wants one --model_name_or_path and a mapped corpus"),
        (["--streaming"], "--negatives_out: wants one"),
        (["--seed", "-1"], "--seed -1: must be 0 or more"),
        (["--negative_margin", "nan"], "--negative_margin nan: must be a number"),
        (["--negatives_out", "."], "--negatives_out '.': name a file that ends in .jsonl"),
        (["--negatives_out", "n.jsonl.gz"], "--negatives_out 'n.jsonl.gz': name a file that ends in .jsonl"),
        (["--bm25"], "--negatives_out: wants one --model_name_or_path"),
        (["--negative_ranks", "5"], "--negative_ranks 5: a first rank and a later one"),
        (
            ["--negative_ranks", "5", "7"],
            "--negative_ranks 5 7: a first rank and a later one, --num_negatives or more",
        ),
    ):
        with pytest.raises(SystemExit):
            script.parse_args(last_of(["--beir", "b", "--negatives_out", "n.jsonl", *flags]))
        assert said in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- both trainers


def test_both_trainers_read_the_rows(mine, beir, bert, tmp_path):
    import train_bi_encoder
    import train_cross_encoder

    mine("--beir", beir, "--num_negatives", 2, output="mined")
    for trainer, more in (
        (train_bi_encoder, ["--num_negatives", 2]),
        (train_bi_encoder, ["--label_column", "scores", "--loss", "margin_mse"]),
        (train_bi_encoder, ["--label_column", "scores", "--loss", "kl"]),
        (train_cross_encoder, ["--num_negatives", 2]),
        (train_cross_encoder, ["--label_column", "scores", "--loss", "kl"]),
    ):
        folder = tmp_path / f"{trainer.__name__}_{'_'.join(map(str, more))}"
        flags = ["--model_name_or_path", bert, "--train_data", tmp_path / "mined.jsonl",
                 "--eval_rows", 8, "--batch_size", 16, "--max_steps", 2, "--output_dir", folder, *more]  # fmt: skip
        trainer.main(trainer.parse_args(list(map(str, flags))))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert np.isfinite(lines[-1]["loss"]) and "MRR@10" in lines[0]


def test_two_processes_mine_the_same_rows(bert, tmp_path, rows):
    """Several positives a query, in chunks of other processes; a hundred queries of --pairs."""
    pairs = [{"a": rows[i % 100]["docstring"], "b": rows[i]["code"]} for i in range(290)]
    write_jsonl(tmp_path / "pairs.jsonl", pairs)
    for processes in (1, 2):
        flags = ["--model_name_or_path", bert, "--pairs", tmp_path / "pairs.jsonl", "--chunk_rows", 32,
                 "--negatives_out", tmp_path / f"{processes}.jsonl", "--num_negatives", 3, "--negative_ranks", 0, 30,
                 "--negative_sampling", "random", "--cache_dir", tmp_path / f"cache{processes}",
                 "--data_cache", tmp_path / "data", "--output_dir", tmp_path / "out"]  # fmt: skip
        launch(ROOT / "eval_incremental.py", *flags, processes=processes)
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes()
    assert len((tmp_path / "1.jsonl").read_text().splitlines()) >= 290  # a document equal to an answer is one, too


def test_equal_queries_empty_texts_and_doubled_ids(mine, evaluate, tmp_path):
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    documents = [
        {"_id": f"d{i}", "text": f"{a} and {b}"} for i, (a, b) in enumerate(zip(words, words[1:] + words[:1]))
    ]
    documents[7]["text"] = " "
    write_jsonl(tmp_path / "c.jsonl", documents)
    queries = [{"_id": f"q{i}", "text": "same question" if i < 2 else f"number {words[i]}"} for i in range(8)]
    write_jsonl(tmp_path / "q.jsonl", queries)
    (tmp_path / "qrels.tsv").write_text("".join(f"q{i}\td{i}\t1\n" for i in range(8)) + "q5\tnowhere\t1\n")
    flags = ["--corpus", tmp_path / "c.jsonl", "--queries", tmp_path / "q.jsonl", "--qrels", tmp_path / "qrels.tsv"]
    flags += ["--num_negatives", 7, "--negative_ranks", 0, 9, "--top_k", 2]
    found, about = mine(*flags)
    assert [row["positive"] for row in found[:2]] == ["one and two", "two and three"]
    for row in found[:2]:
        assert not {"one and two", "two and three"} & {row[f"negative_{i}"] for i in range(1, 8)}
    assert len(found) == 7 and all(text for row in found for text in row.values())  # q7 lacks a positive
    assert about["negatives"]["removed"]["of queries that are empty or have no positive in the corpus"] > 0
    write_jsonl(tmp_path / "c.jsonl", [*documents, {"_id": "d3", "text": "another text"}])
    with pytest.raises(script.BadInput, match="c.jsonl: id 'd3' stands twice; make the ids differ"):
        mine(*flags)
    with pytest.raises(script.BadInput, match="q.jsonl: is one of the sources; name another file"):
        evaluate(*flags, "--negatives_out", tmp_path / "q.jsonl")
    assert len((tmp_path / "q.jsonl").read_text().splitlines()) == 8
