"""Mining from run files: rows equal those of the library; what is never a negative; training on the rows; errors."""

import csv
import gzip
import importlib
import re
import resource
import shlex
import shutil
from collections import Counter
from itertools import product

import numpy as np
import pytest
from conftest import ROOT, launch, mark_slow, metrics, quick_first, read_jsonl, write_beir, write_jsonl

import mine_negatives as script

NAMES = "queries.jsonl", "corpus.jsonl"
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def mine(tmp_path, *flags):
    """Return the rows that the script writes for flags."""
    flags = [*flags, "--output", tmp_path / "rows/mined.jsonl", "--overwrite"]
    script.main(script.parse_args(list(map(str, flags))))
    return read_jsonl(tmp_path / "rows/mined.jsonl")


def write_run(path, scores):
    """Write a run file of {(query, document): score}, in an order that does not depend on the scores."""
    path.write_text("".join(f"{q} Q0 {d} 1 {value:.9g} x\n" for (q, d), value in sorted(scores.items())))


@pytest.fixture(scope="module")
def embedded(tmp_path_factory, bert, beir):
    """Folder with scores.npy, (60, 293), of `beir` by SentenceTransformer."""
    from sentence_transformers import SentenceTransformer

    folder, model = tmp_path_factory.mktemp("embedded"), SentenceTransformer(str(bert), device="cpu")
    texts = [[row["text"].strip() for row in read_jsonl(beir / name)] for name in NAMES]
    queries, documents = (model.encode(part, normalize_embeddings=True) for part in texts)
    np.save(folder / "scores.npy", queries @ documents.T)
    return folder


def by_library(bert, beir, **options):
    """Return the Dataset that sentence_transformers.util.mine_hard_negatives makes."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    queries, documents = ([row["text"].strip() for row in read_jsonl(beir / name)] for name in NAMES)
    pairs = [(i, i) for i in range(60)] + [(1, 7)]
    data = {"query": [queries[q] for q, _ in pairs], "positive": [documents[d] for _, d in pairs]}
    model = SentenceTransformer(str(bert), device="cpu")
    data = Dataset.from_dict(data)
    return mine_hard_negatives(data, model, corpus=documents, num_negatives=3, verbose=False, **options)


def mine_embedded(embedded, beir, tmp_path, options, *flags):
    """Return the rows of `embedded` that the script writes for the same options."""
    scores = np.load(embedded / "scores.npy")
    best = np.argsort(-scores, axis=1)[:, : options["range_max"] + 2]  # the number that the library retrieves
    pairs = {(q, d) for q in range(60) for d in best[q]} | {(i, i) for i in range(60)} | {(1, 7)}  # with all positives
    write_run(tmp_path / "x.run", {(f"q{q}", f"d{d}"): scores[q, d] for q, d in pairs})
    rules = [word for name, value in options.items() for word in (f"--{name}", value)]
    return mine(tmp_path, "--beir", beir, "--split", "test", "--run", tmp_path / "x.run", "--num_negatives", 3,
                *rules, *flags)  # fmt: skip


MARGINS = {"absolute_margin": -0.02}, {"relative_margin": -0.03, "range_min": 1, "range_max": 40}


@pytest.mark.parametrize("options", quick_first([*MARGINS, {}, {"range_min": 3, "range_max": 17}]))
def test_rows_equal_those_of_the_library(embedded, bert, beir, tmp_path, options):
    options = {"range_max": 100, **options}
    rows = mine_embedded(embedded, beir, tmp_path, options, "--format", "n-tuple-scores")
    found = by_library(bert, beir, output_format="n-tuple", output_scores=True, **options)
    names = [f"negative_{i}" for i in (1, 2, 3)]
    expected = {(row["query"], row["positive"]): ([row[name] for name in names], row["scores"]) for row in found}
    equal = 0
    assert {(row["query"], row["positive"]) for row in rows} == set(expected) and len(rows) == len(expected) > 20
    for row in rows:  # except for ties: the last digit of a score depends on how texts are batched
        negatives, scores = expected[row["query"], row["positive"]]
        assert row["scores"] == pytest.approx(scores, abs=2e-6)
        equal += [row[name] for name in names] == negatives
    assert equal > 0.9 * len(rows)


FORMS = list(product(["n-tuple", "labeled-pair", "labeled-list"], [(5, -0.01), (40, -0.03)]))


@pytest.mark.parametrize(
    "form, ranks", mark_slow(FORMS, [FORMS[0], FORMS[3]])
)  # queries have 0 to 3 negatives; 0 or 3
def test_formats_equal_those_of_the_library(embedded, bert, beir, tmp_path, form, ranks):
    """Rows, but for the names of their columns and for ties."""
    range_max, margin = ranks
    options = {"range_max": range_max, "absolute_margin": margin}
    rows = mine_embedded(embedded, beir, tmp_path, options, "--format", form)
    found = by_library(bert, beir, output_format=form, **options)
    # Where the script writes scores, too, the library writes them instead of labels.
    own = [[value for name, value in row.items() if name not in ("score", "scores")] for row in rows]
    own, expected = (Counter(map(str, part)) for part in (own, [list(row.values()) for row in found]))
    assert len(rows) == len(found) > 15 and (own & expected).total() > 0.9 * len(rows)
    assert max(own.values()) == 1  # each pair once, also those of the query with two positives
    if form == "labeled-list":
        assert {len(row["documents"]) for row in rows} == ({2, 3, 4} if range_max == 5 else {4})
    if form.startswith("labeled"):
        scored = by_library(bert, beir, output_format=form, output_scores=True, **options)
        name = scored.column_names[-1]
        own, expected = (sorted(np.hstack([row[name] for row in part])) for part in (rows, scored))
        assert own == pytest.approx(expected, abs=2e-6)
    else:
        assert not any("scores" in row for row in rows)


@pytest.fixture
def small(tmp_path):
    """Queries d0 to d4; documents d0 to d4, d5 to d9, which are the same with a space added, and e0 to e3. The
    positive of query dI is d((I + 1) % 5); every query ranks all documents, e3 first and d0 last."""
    texts = {f"d{i}": f"text number {i % 5}" + " " * (i > 4) for i in range(10)}
    texts |= {f"e{i}": f"another text {i}" for i in range(4)}
    documents = [{"_id": i, "title": "", "text": text} for i, text in texts.items()]
    judged = [row for i in range(5) for row in ((f"d{i}", f"d{(i + 1) % 5}", 1), (f"d{i}", "e0", 0))]
    write_beir(tmp_path / "s", documents, {f"d{i}": f"number {i}" for i in range(5)}, judged, "train")
    write_run(tmp_path / "s/x.run", {(f"d{i}", d): n + 1 for i in range(5) for n, d in enumerate(texts)})
    return tmp_path / "s"


def test_what_is_never_a_negative(small, tmp_path, capsys):
    """A positive, the query itself, and copies of these are excluded; no two negatives are equal."""
    flags = ["--beir", small, "--run", small / "x.run", "--format", "n-tuple-scores"]
    rows = mine(tmp_path, *flags, "--num_negatives", 7)
    for i, row in enumerate(rows):
        left = [f"text number {n}" for n in (4, 3, 2, 1, 0) if n not in (i, (i + 1) % 5)]
        assert [row[f"negative_{n}"] for n in range(1, 8)] == [f"another text {n}" for n in (3, 2, 1, 0)] + left
        assert row["scores"][1:5] == [14, 13, 12, 11] and row["positive"] == f"text number {(i + 1) % 5}"
    message = capsys.readouterr().out
    assert f"{10:12} {5:12}  the query itself, or equal to it" in message
    assert f"{5 + 5 + 15:12} {5:12}  positives, and equal to one or to a better candidate" in message
    assert "70 candidates" in message and "5 positives of 5 queries; 5 have a score" in message
    assert "5 rows of 5 queries are in" in message
    write_run(small / "ties.run", {("d0", f"e{i}"): 5 for i in range(4)})  # ties as in trec_eval: by id, descending
    (row,) = mine(tmp_path, "--beir", small, "--run", small / "ties.run")
    assert [row[f"negative_{n}"] for n in range(1, 5)] == [f"another text {n}" for n in (3, 2, 1, 0)]
    random = [*flags, "--num_negatives", 3, "--sampling_strategy", "random"]
    rows, again, other = mine(tmp_path, *random), mine(tmp_path, *random), mine(tmp_path, *random, "--seed", 1)
    assert rows == again != other and all(row["scores"][1:] == sorted(row["scores"][1:])[::-1] for row in rows)


def test_equal_queries_are_merged(small, tmp_path, capsys):
    """They share their positives, and the candidates of the first; a positive that has the id of one of them, or is
    not in the corpus, is left out."""
    write_jsonl(small / "queries.jsonl", [{"_id": f"d{i}", "text": "same query"} for i in range(2)])
    with open(small / "qrels/train.tsv", "a") as file:
        file.write("d0\tnowhere\t1\n")
    rows = mine(tmp_path, "--beir", small, "--run", small / "x.run", "--num_negatives", 6)
    assert [row["positive"] for row in rows] == ["text number 1", "text number 2"]
    message = capsys.readouterr().out  # of the run's 5 queries 3 have no text
    assert "2 positives of 1 queries" in message and "56 candidates" in message  # of 4 queries
    assert f"{3 * 14:12} {1:12}  of queries without a text" in message


def test_fewer_negatives(small, tmp_path, capsys):
    lines = (small / "x.run").read_text().splitlines()
    with gzip.open(small / "x.run.gz", "wt") as file:  # d0: one negative; d1: none; d2 is not ranked
        few = [line for line in lines if line.startswith(("d3", "d4", "d0 Q0 e0", "d0 Q0 d1 ", "d1 Q0 d2 "))]
        file.write("\n".join(few) + "\n\n")
    flags = ["--beir", small, "--run", small / "x.run.gz", "--num_negatives", 5]
    assert [row["query"] for row in mine(tmp_path, *flags)] == ["number 3", "number 4"]
    message = capsys.readouterr().out
    assert f"{0:12} {4:12}  of queries without" in message and f"{1:12} {2:12}  of queries with fewer than" in message
    first, *others = mine(tmp_path, *flags, "--format", "labeled-list")
    assert first["documents"] == ["text number 1", "another text 0"] and first["scores"] == [2, 11]
    assert [row["query"] for row in others] == ["number 3", "number 4"] and len(others[0]["documents"]) == 6
    rows = mine(tmp_path, *flags, "--format", "labeled-pair")  # with the positives of queries without negatives
    assert rows[0] == {"query": "number 0", "document": "text number 1", "label": 1}  # query 2 has no score
    assert [row["label"] for row in rows] == [1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]


PAIRS = [  # (query, document); ids: below
    ("fish oil", "fatty acids"), (" fish oil", "salmon recipes\t"), ("knee pain", "fatty acids "), ("knee pain", ""),
    ("", "an answer to nothing"), ("back, pain", "how to sit"), ("fish oil", "fatty acids"), (None, "how to sit"),
    ("knee pain", "physiotherapy"), ("  ", "bending"), ("tea", "salmon recipes"), ("tea", "green tea"),
    ("rain", "how to sit"), ("zebra", "stripes"), ("knee pain", "salmon recipes"),
]  # fmt: skip
QUERIES = {"0": "fish oil", "1": "knee pain", "2": "back, pain", "3": "tea", "4": "rain", "5": "zebra"}
DOCUMENTS = {"0": "fatty acids", "1": "salmon recipes", "5": "how to sit", "8": "physiotherapy", "11": "green tea",
             "13": "stripes"}  # fmt: skip
JUDGED = ["0 0", "0 1", "1 0", "2 5", "1 8", "3 1", "3 11", "4 5", "5 13", "1 1"]


@pytest.mark.parametrize("form", quick_first(["labeled-pair", "n-tuple-scores"]))
def test_pairs_have_the_ids_of_the_evaluator(tmp_path, evaluate, bert, form):
    """Rows mined from the pairs, by the evaluator's run of them, equal to the byte those mined from a collection with
    these ids, written by hand. A document that has the id of its query is not the query's own."""
    for name, part in (("a.csv", PAIRS[:6]), ("b.csv", PAIRS[6:])):
        with open(tmp_path / name, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["number", "query", "title"], *((5, *pair) for pair in part)])
    pairs = ["--pairs", tmp_path / "a.csv", tmp_path / "b.csv", "--columns", "query", "title"]
    evaluate(*pairs, "--model_name_or_path", bert, "--corpus_chunk_size", 4, output="runs")
    run = (tmp_path / "runs/run.trec").read_text().split()
    assert {*run[::6]} == {*map(script.text_id, QUERIES.values())} and len(run) == 6 * 6 * 6

    folder = tmp_path / "collection"
    written = DOCUMENTS | {"1": "salmon recipes\t"}  # the first of equal texts
    documents, queries = ({script.text_id(t): t for t in texts.values()} for texts in (written, QUERIES))
    judged = [(QUERIES[query], DOCUMENTS[document]) for query, document in map(str.split, JUDGED)]
    judged = [(script.text_id(query), script.text_id(document), 1) for query, document in judged]
    write_beir(folder, documents, queries, judged, "train")
    flags = ["--run", tmp_path / "runs/run.trec", "--num_negatives", 2, "--format", form]
    found = []
    for source in (pairs, ["--beir", folder]):
        mine(tmp_path, *source, *flags)
        found.append((tmp_path / "rows/mined.jsonl").read_bytes())
    assert found[0] == found[1] and found[0].count(b"\n") == {"n-tuple-scores": 10, "labeled-pair": 22}[form]
    with pytest.raises(script.UserError, match="--pairs .*a.csv .*b.csv: .*titel"):
        mine(tmp_path, *pairs[:-1], "titel", *flags)
    turned = ["--pairs", tmp_path / "b.csv", tmp_path / "a.csv", *pairs[3:]]
    rows = mine(tmp_path, *turned, *flags)  # the same rows, in another order
    assert sorted(map(str, rows)) == sorted(found[0].decode().splitlines()) or len(rows) == found[0].count(b"\n")


def test_positives_without_a_score(small, tmp_path, capsys):
    lines = (small / "x.run").read_text().splitlines(keepends=True)
    (small / "y.run").write_text("".join(line for line in lines if not line.startswith("d0 Q0 d1 ")))
    flags = ["--beir", small, "--run", small / "y.run", "--num_negatives", 2, "--format", "n-tuple-scores"]
    rows = mine(tmp_path, *flags)
    assert len(rows) == 5 and not any("scores" in row for row in rows)
    assert "5 positives of 5 queries; 4 have a score" in capsys.readouterr().out
    for margin in ("--absolute_margin", "--relative_margin"):
        rows = mine(tmp_path, *flags, margin, -20)
        assert len(rows) == 4 and all("scores" in row for row in rows)


TRAINERS = {  # form: the trainer it is meant for, and the flags that the script prints, or a part of them
    "n-tuple-scores": ("train_bi_encoder", "--columns query positive negative_1 negative_2"),
    "labeled-pair": ("train_cross_encoder", "--columns query document --label_column label"),
    "labeled-list": ("train_cross_encoder", "--columns query documents --label_column labels"),
    "lists": ("train_bi_encoder", "--columns query pos neg --num_negatives 2"),
}


@pytest.mark.parametrize("form", mark_slow(TRAINERS, ["labeled-pair", "lists"]))
def test_trainers_read_each_form(embedded, beir, bert, tmp_path, capsys, form):
    name, expected = TRAINERS[form]
    scores = np.load(embedded / "scores.npy")
    write_run(tmp_path / "x.run", {(f"q{q}", f"d{d}"): scores[q, d] for q in range(60) for d in range(293)})
    mine(tmp_path, "--beir", beir, "--split", "test", "--run", tmp_path / "x.run", "--num_negatives", 2,
         "--format", form)  # fmt: skip
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed == f"to train on them: {expected}"
    trainer = importlib.import_module(name)
    words = ["--model_name_or_path", bert, "--train_data", tmp_path / "rows/mined.jsonl", "--eval_rows", 8,
             "--batch_size", 16, "--max_steps", 2, "--output_dir", tmp_path / form]  # fmt: skip
    trainer.main(trainer.parse_args([*map(str, words), *shlex.split(expected)]))
    assert np.isfinite(metrics(tmp_path / form)[-1]["loss"])


def test_a_corpus_without_titles_and_with_repeated_ids(small, tmp_path):
    """A row that is there twice is one; passages of one id are refused, as their scores could be of any of them."""
    folder = tmp_path / "copy"
    shutil.copytree(small, folder)
    records = read_jsonl(small / "corpus.jsonl")
    common = ["--beir", folder, "--run", small / "x.run"]
    titled = [record | {"title": "a title"} for record in records]
    untitled = [{key: record[key] for key in ("_id", "text")} for record in records]
    repeated = [*untitled, untitled[0]]
    rows = []
    for documents in (records, untitled, repeated, titled):
        write_jsonl(folder / "corpus.jsonl", documents)
        rows.append(mine(tmp_path, *common))
    assert rows[0] == rows[1] == rows[2] and rows[3][0]["positive"] == f"a title {rows[0][0]['positive']}"
    write_jsonl(folder / "corpus.jsonl", [*untitled, untitled[0] | {"text": "another passage"}])
    message = f"corpus.jsonl: 1 rows repeat an id, such as '{records[0]['_id']}', with another text: give each passage"
    with pytest.raises(script.UserError, match=message):
        mine(tmp_path, *common)


@pytest.fixture
def ranked(tmp_path):
    """Flags of 100 queries of at most 70 texts, each with one or two positives, and of a run, in random order, that
    ranks these and 2 to 12 of 80 documents for each; 20 documents have equal texts, but no positive has."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "ranked"
    queries = {f"q{n}": f"query {rng.integers(70)}" for n in range(100)}
    positives = [rng.choice(range(10, 70), rng.integers(1, 3), replace=False) for _ in range(100)]
    judged = [(f"q{n}", f"d{d}", 1) for n in range(100) for d in positives[n]]
    write_beir(folder, {f"d{n}": f"document {n % 70}" for n in range(80)}, queries, judged, "train")
    lines = []
    for query in rng.permutation(100):
        for document in {*positives[query], *rng.choice(80, rng.integers(2, 13), replace=False)}:
            lines.append(f"q{query} Q0 d{document} 0 {rng.integers(20)} x\n")
    (folder / "x.run").write_text("".join(lines))
    return ["--beir", folder, "--run", folder / "x.run"]


@pytest.mark.parametrize("form, lines", quick_first([("lists", 100), ("labeled-list", 7), ("labeled-pair", 30)]))
def test_rows_do_not_depend_on_the_parts_of_a_run_file(ranked, tmp_path, monkeypatch, capsys, form, lines):
    """Nor do the counts of what each rule removes; some parts are a few lines of one query."""
    flags = [*ranked, "--format", form, "--absolute_margin", 1, "--num_negatives", 2, "--range_max", 4]
    rows = mine(tmp_path, *flags)
    printed = capsys.readouterr().out
    read_csv = script.pd.read_csv
    parts = {"chunksize": lines}
    monkeypatch.setattr(script.pd, "read_csv", lambda *args, **options: read_csv(*args, **options | parts))
    assert mine(tmp_path, *flags) == rows and len(rows) > 20
    assert capsys.readouterr().out == printed


def test_lines_of_a_query_must_be_together(ranked, tmp_path, monkeypatch):
    lines = ranked[-1].read_text().splitlines(keepends=True)
    ranked[-1].write_text("".join([*lines[1:], lines[0]]))
    mine(tmp_path, *ranked, "--num_negatives", 1)  # in one part, in whatever order they are
    read_csv = script.pd.read_csv
    monkeypatch.setattr(script.pd, "read_csv", lambda *args, **options: read_csv(*args, **options | {"chunksize": 50}))
    with pytest.raises(script.UserError, match="--run .*x.run: lines of query 'q[0-9]+' are not together: sort it"):
        mine(tmp_path, *ranked, "--num_negatives", 1)


def test_positive_rank(ranked, tmp_path, capsys):
    """Rows are those without the option whose positive is among the first of its query; other positives are no
    negatives, and have no part in margins."""
    best = {}  # {(query, document): rank}
    texts = {row["_id"]: row["text"] for row in read_jsonl(ranked[1] / "queries.jsonl")}
    found = {}
    for line in ranked[-1].read_text().splitlines():
        query, _, document, _, score, _ = line.split()
        found.setdefault(query, {})[document] = float(score)
    for query, scores in found.items():
        order = sorted(scores, key=lambda document: (np.float32(scores[document]), document), reverse=True)
        for rank, document in enumerate(order, start=1):
            key = texts[query], f"document {int(document[1:]) % 70}"
            best[key] = min(rank, best.get(key, 99))
    flags = [*ranked, "--format", "labeled-list", "--num_negatives", 20]
    every = mine(tmp_path, *flags)
    near = mine(tmp_path, *flags, "--positive_rank", 3)
    expected = [row for row in every if best.get((row["query"], row["documents"][0]), 99) <= 3]
    assert [row["documents"] for row in near] == [row["documents"] for row in expected] and 10 < len(near) < len(every)
    assert f"\n{len(every) - len(near)} of them are not among the first 3 of their query" in capsys.readouterr().out
    lowest = mine(tmp_path, *flags, "--positive_rank", 3, "--absolute_margin", 1)
    assert len(lowest) > len(mine(tmp_path, *flags, "--absolute_margin", 1)) // 3
    for row in lowest:
        assert max(row["scores"][1:]) < row["scores"][0]


def test_the_query_itself_has_no_rank_and_equal_positives_are_one(tmp_path):
    """Runs of other systems have the query itself, mostly as the first. Other documents with its id are candidates."""
    texts = {"q1": "A\tQuery of one's own", "d1": "alpha", "d2": "beta", "d3": "alpha", "d8": "gamma"}
    write_beir(tmp_path / "c", texts, {"q1": "query"}, [("q1", "d1", 1), ("q1", "d3", 1)], "train")
    ranks = {"q1": 0.9, "d3": 0.8, "d1": 0.7, "d2": 0.6, "d8": 0.5}
    (tmp_path / "x.run").write_text("".join(f"q1 Q0 {name} 1 {score} x\n" for name, score in ranks.items()))
    flags = ["--beir", tmp_path / "c", "--run", tmp_path / "x.run", "--num_negatives", 1]
    rows = mine(tmp_path, *flags, "--positive_rank", 1, "--format", "labeled-pair")
    assert [(row["document"], row["label"], row["score"]) for row in rows] == [("alpha", 1, 0.8), ("beta", 0, 0.6)]
    (row,) = mine(tmp_path, *flags, "--format", "lists")
    assert row["pos"] == ["alpha"] and row["neg"] == ["beta"]
    write_jsonl(tmp_path / "c/corpus.jsonl", [{"_id": name, "text": text[:6]} for name, text in texts.items()])
    (row,) = mine(tmp_path, *flags, "--positive_rank", 1)  # ids alone decide about ranks
    assert row["negative_1"] == "A\tQuer"


def test_lists_have_all_positives_and_negatives_of_a_query(ranked, tmp_path):
    lists = mine(tmp_path, *ranked, "--format", "lists", "--num_negatives", 5)
    groups = {}
    for row in mine(tmp_path, *ranked, "--format", "labeled-list", "--num_negatives", 5):
        positive, *negatives = row["documents"]
        group = groups.setdefault(row["query"], {"query": row["query"], "pos": [], "neg": negatives})
        group["pos"].append(positive)
    assert lists == list(groups.values()) and max(len(row["pos"]) for row in lists) > 2


def test_errors(small, tmp_path, capsys, monkeypatch):
    common = ["--beir", small, "--run", small / "x.run"]
    mine(tmp_path, *common)
    before = (tmp_path / "rows/mined.jsonl").read_bytes()
    for name, text in (("words", "d0 Q0 e1 1 high x\n"), ("short", "d0 Q0 e1 1 2.5 x\nd0 e1 2.5\n"),
                       ("others", "x Q0 e1 1 2 x\n"),
                       ("bad.tsv", "query document grade\nd0 d1 1\nd0 d1\n")):  # fmt: skip
        (tmp_path / name).write_text(text)
    corpus = ["--run", small / "x.run", "--queries", small / "queries.jsonl", "--corpus", small / "corpus.jsonl"]
    for flags, message in (
        (["--beir", small, "--run", "words"], "--run words: line 1 has no id, or no finite score: d0 . e1 . high"),
        (["--beir", small, "--run", "short"], "--run short: line 2 has no id, or no finite score"),
        (["--beir", small, "--run", "others"], "mined.jsonl: not written: no row is left"),
        (["--beir", small, "--run", "missing.run"], "--run missing.run: .*No such file"),
        ([*corpus, "--qrels", "bad.tsv"], "--qrels bad.tsv: line 3 has no id, or no finite score"),
        ([*common, "--absolute_margin", 50], "mined.jsonl: not written: no row is left; check .*--num_negatives"),
        ([*common, "--corpus_columns", "id", "text"], "corpus.jsonl: .*id"),
    ):
        with pytest.raises(script.UserError, match=message) as error:
            mine(tmp_path, *flags)
        assert "\n" not in str(error.value)
    for flags, message in (
        (["--output", small / "corpus.jsonl"], "corpus.jsonl: exists; choose another file, or set --overwrite"),
        (["--output", small / "corpus.jsonl/x.jsonl"], "--output .*corpus.jsonl/x.jsonl: .*Not a directory"),
        (["--output", tmp_path / "new/x.jsonl", "--absolute_margin", 50], "x.jsonl: not written: no row is left"),
    ):
        with pytest.raises(script.UserError, match=message):
            script.main(script.parse_args(list(map(str, common + flags))))
    assert not (tmp_path / "new").exists()
    for flags, message in (
        (["--pairs", "x.csv"], "the following arguments are required: --run"),
        ([*common, "--pairs", "x.csv"], "requires one of --pairs, --beir, or"),
        (corpus, "requires one of --pairs, --beir, or"),
        (["--run", "x", "--pairs", "x.csv", "--columns", "query"], "--pairs requires --columns: those of query and"),
        ([*common, "--seed", "-1"], "--seed -1: must be finite and, except for a margin, 0 or more"),
        ([*common, "--range_max", "3"], "--num_negatives 4: must be between 1 and --range_max"),
    ):
        with pytest.raises(SystemExit):
            script.parse_args(list(map(str, flags)))
        assert message in capsys.readouterr().err
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))  # bytes of a file: imitates a full disk
    try:
        with pytest.raises(script.UserError, match="--output .*mined.jsonl: .*File too large"):
            mine(tmp_path, *common, "--num_negatives", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "rows/mined.jsonl").read_bytes() == before and len(list((tmp_path / "rows").iterdir())) == 1


def test_command_line(small, tmp_path):
    flags = ["--beir", small, "--run", small / "x.run"]
    done = launch(ROOT / "mine_negatives.py", *flags, cwd=tmp_path)
    assert "5 rows of 5 queries are in mined.jsonl" in done.stdout
    done = launch(ROOT / "mine_negatives.py", *flags, "--run", "y.run", "--overwrite", cwd=tmp_path, check=False)
    assert done.returncode == 1 and re.search("^error: --run y.run: .*No such file", done.stderr, re.M)
