"""Lists of documents: what is drawn from them, the formats of other projects, and whole runs."""

import importlib
import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from conftest import ROOT, TRAINERS, write_jsonl
from forked import merge_flags

FORMATS = ROOT / "tests/forms"
COLUMNS = ["--columns", "q", "pos", "neg"]
TEACHER = ["--loss_kwargs", '{"teacher_temperature":1}']
BOTH = pytest.mark.parametrize("name", TRAINERS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, in_an_empty_folder):
    """Use blocks of 4 rows, so that 40 rows make several windows."""
    for name in TRAINERS:
        monkeypatch.setattr(importlib.import_module(name), "BLOCK", 4)


def row(i, least=0):
    """Return a row of 1 to 3 positives and `least` to `least` + 4 negatives, with the scores of score()."""
    lists = {"pos": [f"positive {i} {j}" for j in range(1 + i % 3)],
             "neg": [f"negative {i} {j}" for j in range(least + i % 5)]}  # fmt: skip
    return {"q": f"query {i}", **lists, **{f"{key}_scores": list(map(score, value)) for key, value in lists.items()}}


def score(text):
    kind, i, j = text.split()
    return (int(i) + int(j) / 8) * (1 if kind == "positive" else -1)


ROWS, SCORED = [row(i) for i in range(40)], [row(i, least=1) for i in range(40)]


def open_data(name, rows, *flags):
    """Return (module, Args, Data) of a trainer on rows, or on the data of the flags if `rows` is None."""
    module, data = importlib.import_module(name), ["--train_data", "x.jsonl"] * (rows is not None)
    flags = [*flags, *TEACHER] if "kl" in flags or "margin_mse" in flags else flags
    if rows is not None:
        write_jsonl(Path("x.jsonl"), rows)
    common = ["--model_name_or_path", "x", "--eval_rows", 0, "--shuffle_buffer", 16]
    args = module.parse_args(merge_flags([*data, *common, *flags]))
    return module, args, module.open_data(args)


def read(module, table, data):
    """Return (the rows of a Table as dicts, number of bad rows)."""
    rows, skipped = module.read_rows(table, data.sources, data.lookups, 0)
    return [{"query": row.query, "documents": row.documents, "labels": row.labels} for row in rows], skipped


def epochs(count, *opened):
    """Return the rows, as dicts, of each of `count` epochs of a source."""
    module, args, data = open_data(*opened)
    (source,) = data.sources
    return [read(module, source.take(40 if args.streaming else len(source)), data)[0] for _ in range(count)]


def by_query(rows):
    return {row["query"]: row["documents"] for row in rows}


@pytest.mark.parametrize("name, limit", [*product(TRAINERS, [None, 2]), ("train_bi_encoder", 0)])
def test_one_positive_and_up_to_num_negatives_are_drawn(name, limit):
    """Each text of a row is equally likely; a row with fewer negatives keeps all of them."""
    found, counts = epochs(150, name, ROWS, *COLUMNS, *(["--num_negatives", limit] if limit is not None else [])), {}
    for row in (row for epoch in found for row in epoch):
        counts.setdefault(row["query"], Counter()).update(row["documents"])
        positive, *negatives = row["documents"]
        assert positive.startswith("positive") and len(set(negatives)) == len(negatives)
    for row in ROWS:
        drawn = min(len(row["neg"]), len(row["neg"]) if limit is None else limit)
        shares = dict.fromkeys(row["pos"], 1 / len(row["pos"]))
        shares |= {text: drawn / len(row["neg"]) for text in row["neg"] if drawn}
        assert set(counts[row["q"]]) == set(shares)
        assert all(abs(counts[row["q"]][text] / 150 - share) < 0.15 for text, share in shares.items())
        assert all(len(by_query(epoch)[row["q"]]) == 1 + drawn for epoch in found[:9])


@BOTH
def test_negatives_of_several_columns(name):
    """Of columns of texts, the first are used; from columns of lists, texts are drawn with their scores."""
    scored = ["--columns", "q", "pos", "neg", "more", "--num_negatives", 1, "--loss", "kl", "--label_column", "scores"]
    texts = [{"q": f"query {i}", "pos": "a", "neg": "b", "more": "c", "scores": [3, 2, 1]} for i in range(4)]
    read = sum(epochs(3, name, texts, *scored), [])
    assert len(read) == 12 and all((row["documents"], row["labels"]) == (["a", "b"], [3, 2]) for row in read)
    lists = [{"q": f"query {i}", "pos": ["a"], "neg": ["b"], "more": ["c", "d"], "scores": [4, 3, 2, 1]}
             for i in range(4)]  # fmt: skip
    drawn = {(*row["documents"], *row["labels"]) for epoch in epochs(9, name, lists, *scored) for row in epoch}
    assert drawn == {("a", "b", 4, 3), ("a", "c", 4, 2), ("a", "d", 4, 1)}


@BOTH
def test_fewer_labels_than_documents_are_refused_before_any_is_left_out(name):
    """Margins of three documents are as many as the scores of the two that --num_negatives keeps."""
    texts = [{"q": f"query {i}", "a": "positive", "b": "near", "c": "far", "y": [2, 5]} for i in range(4)]
    lists = [{"q": row["q"], "list": ["positive", "near", "far"], "y": [2, 5]} for row in texts]
    for rows, columns, loss in ((texts, "qabc", "margin_mse"), (lists, ["q", "list"], "kl")):
        flags = ["--columns", *columns, "--num_negatives", 1, "--label_column", "y", "--loss", loss]
        module, args, data = open_data(name, rows, *flags)
        with pytest.raises(module.UserError, match="--label_column has missing, extra or non-finite numbers"):
            read(module, data.sources[0].take(4), data)


@BOTH
def test_rows_of_ids_are_not_sorted_by_length(name):
    """Of a bi-encoder they were: by the length of their ids."""
    module = importlib.import_module(name)
    flags = ["--corpus", "x.jsonl", "--corpus_columns", "_id", "text", "--length_window", "2"]
    with pytest.raises(module.UserError, match="--length_window sorts rows by their own length, which with --corpus"):
        open_data(name, ROWS, *COLUMNS, *flags)


def test_a_list_that_is_drawn_from_keeps_its_first():
    """Of a teacher's scores, too, which may be higher for a negative. tests/test_cross_encoder.py: of other labels."""
    flags = ["--columns", "q", "list", "--num_negatives", 1, "--label_column", "y", "--loss", "kl"]
    graded = [{"q": f"query {i}", "list": ["c", "a", "b", "d"], "y": [1, 0, i // 3, 0]} for i in range(4)]
    read = [row for epoch in epochs(9, "train_cross_encoder", graded, *flags) for row in epoch]
    assert len(read) == 36 and {row["documents"][0] for row in read} == {"c"}
    assert {row["documents"][1] for row in read} == {*"abd"}


def test_draws_depend_only_on_seed_and_epoch():
    name = "train_bi_encoder"  # read_rows makes the generator of a row, the same in both

    def draw(*flags):
        return epochs(2, name, ROWS, *COLUMNS, "--num_negatives", 2, *flags)

    first = draw()
    assert first == draw() and by_query(first[0]) != by_query(first[1])
    assert by_query(first[0]) != by_query(draw("--seed", 1)[0])
    mapped = draw("--shuffle_buffer", 0)
    data = ["x.jsonl", *COLUMNS, "--num_negatives", 2, "--shuffle_buffer", 0, "--streaming", "--max_steps", 1]
    assert mapped == epochs(2, name, None, "--train_data", *data)


@BOTH
@pytest.mark.parametrize("limit", [[], ["--num_negatives", 2]])
def test_scores_are_those_of_the_drawn_texts(name, limit):
    flags = ["--loss", "kl", *limit, "--label_column"]
    for epoch in epochs(5, name, SCORED, *COLUMNS, *flags, "pos_scores", "neg_scores"):
        assert all(row["labels"] == list(map(score, row["documents"])) for row in epoch)
    lists = [{"q": row["q"], "documents": row["pos"][:1] + row["neg"]} for row in SCORED]
    lists = [{**row, "scores": list(map(score, row["documents"]))} for row in lists]
    found = epochs(60, name, lists, "--columns", "q", "documents", *flags, "scores")
    given = by_query([{"query": row["q"], **row} for row in lists])
    for epoch in found:
        assert all(row["labels"] == list(map(score, row["documents"])) for row in epoch)
        for query, documents in by_query(epoch).items():
            assert documents[0] == given[query][0] and set(documents) <= set(given[query])
            assert len(documents) == (min(3, len(given[query])) if limit else len(given[query]))
    drawn = {text for epoch in found for documents in by_query(epoch).values() for text in documents}
    assert drawn == {text for documents in given.values() for text in documents}


@BOTH
@pytest.mark.parametrize("first", ["", " ", None])
def test_a_negative_never_becomes_the_positive(name, first):
    """Where the first text of a list, which is its positive, is empty."""
    rows = [{"q": f"query {i}", "list": ["a", "b", ""] if i else [first, "b", "c"], "y": [3, 2, 1]} for i in range(4)]
    flags = ["--columns", "q", "list", "--loss", "margin_mse", "--label_column", "y", "--on_bad_row", "skip"]
    module, args, data = open_data(name, rows, *flags)
    found, skipped = read(module, data.sources[0].take(4), data)
    assert skipped == 1 and all((row["documents"], row["labels"]) == (["a", "b"], [3, 2]) for row in found)
    args.on_bad_row = data.sources[0].args.on_bad_row = "error"
    with pytest.raises(module.UserError, match="x.jsonl: 'list' has no text in the row .*query 0"):
        read(module, data.sources[0].take(4), data)


BAD = [({"neg_scores": [1.0]}, "non-finite numbers"), ({"pos_scores": [], "neg_scores": []}, "non-finite numbers"),
       ({"pos_scores": [1.0], "neg_scores": [1.0] * 6}, "non-finite numbers"),
       ({"neg_scores": [1.0, None, 1.0, 1.0, 1.0]}, "non-finite numbers"), ({"pos": []}, "'pos' has no text"),
       ({"pos": None}, "'pos' has no text"), ({"pos": ["a", " "]}, "'pos' has no text")]  # fmt: skip


@pytest.mark.parametrize("name, place", list(zip(TRAINERS, [4, 8])))
@pytest.mark.parametrize("cells, reason", BAD)
def test_bad_rows(name, cells, reason, place):
    """A bad row of 2 positives and 5 negatives, among other rows or alone in the last of three windows."""
    flags = [*COLUMNS, "--loss", "kl", "--label_column", "pos_scores", "neg_scores", "--shuffle_buffer", 4]
    rows = [*SCORED[:4], *SCORED[5:9]]
    rows.insert(place, SCORED[4] | cells)
    module, args, data = open_data(name, rows, *flags, "--on_bad_row", "skip")
    for _ in range(2):
        found, skipped = read(module, data.sources[0].take(9), data)
        assert set(by_query(found)) == {row["q"] for row in rows} - {"query 4"} and skipped == 1
        assert all(row["labels"] == list(map(score, row["documents"])) for row in found)
    module, args, data = open_data(name, rows, *flags)
    with pytest.raises(module.UserError, match=f"x.jsonl: .*{reason} in the row .*query 4.*--on_bad_row skip"):
        read(module, data.sources[0].take(9), data)


FLAGS = {
    "flagembedding": f"--train_data {FORMATS}/flagembedding.jsonl --columns query pos neg",
    "tevatron_ids": f"--train_data {FORMATS}/tevatron_ids.jsonl --corpus {FORMATS}/tevatron_corpus.jsonl "
    "--columns query_text positive_document_ids negative_document_ids --corpus_columns docid document_text",
}


@BOTH
def test_each_format_gives_the_same_rows(name):
    """With the same draws, also from lists of ids; title and text are joined."""
    found = [epochs(3, name, None, *flags.split(), "--num_negatives", 2) for flags in FLAGS.values()]
    assert found[0] == found[1]
    for line in map(json.loads, (FORMATS / "flagembedding.jsonl").read_text().splitlines()):
        for epoch in map(by_query, found[0]):
            positive, *negatives = epoch[line["query"]]
            assert positive in line["pos"] and set(negatives) <= set(line["neg"])
            assert len(negatives) == min(2, len(line["neg"]))
