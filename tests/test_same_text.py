"""A query whose text is a document of another row, as of pairs that are listed in both directions, is neither its own
negative nor its own wrong answer; CSV rows that a line break has cut are refused."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sentence_transformers import CrossEncoder, SentenceTransformer

import train_bi_encoder as script
import train_cross_encoder

REQUIRED = "--model_name_or_path none --train_data none --columns a b"
TRAINERS = pytest.mark.parametrize("trainer", [script, train_cross_encoder], ids=["bi", "cross"])


@pytest.mark.parametrize("text, other", [
    ("Caf\u00e9 de la gare", "CAFE\u0301\u00a0DE la gare "), ("\u0390", "\u0390".upper()), ("\uac00", "\u1100\u1161"),
    ("zero width", "\ufeffzero wi\u200bdth"), ("hyphenated", "hyphen\u00adated"),
])  # fmt: skip
def test_texts_in_other_forms_are_equal(text, other):
    """Unicode's forms C and D, case and blanks at once, and characters that show nothing."""
    assert script.fold(text) == script.fold(other) and script.fold(text) != script.fold(text + "x")


def read_documents(trainer, rows, *flags):
    """Return the documents of each row, {column: value}."""
    given = [*REQUIRED.split()[:-3], "--columns", *rows[0], *flags]
    source = SimpleNamespace(args=trainer.resolve_source_args(trainer.parse_args(given)), name="x")
    numbers = [{trainer.SOURCE: 0, trainer.NUMBER: f"0 {number}"} for number in range(len(rows))]
    table = pa.Table.from_pylist([row | number for row, number in zip(rows, numbers)])
    return [row.documents for row in trainer.read_rows(table, [source], [None, None], 0)[0]]


@TRAINERS
def test_a_positive_of_a_row_is_not_its_negative(trainer):
    """From lists, whichever positive is drawn, and from columns; ids are compared as they are."""
    lists = {"q": "a", "pos": ["first", "se\u0301cond"], "neg": ["S\u00e9cond  ", "wrong"], "more": ["FIRST"]}
    found = read_documents(trainer, [lists] * 30) + read_documents(trainer, [lists] * 30, "--num_negatives", "1")
    assert {positive for positive, *_ in found} == {*lists["pos"]}
    assert all(negatives == ["wrong"] for _, *negatives in found)
    texts = [{"q": "a", "p": "first", "n": "First", "m": "wrong"}, {"q": "a", "p": "first", "n": "x", "m": "wrong"}]
    assert read_documents(trainer, texts, "--num_negatives", "1") == [["first", "wrong"], ["first", "x"]]
    ids = [{"q": "a", "p": ["D1", "d2"], "n": ["d1", "d2", "D1"]}] * 9
    assert all(negatives == ["d1"] for _, *negatives in read_documents(trainer, ids, "--corpus", "x"))


def test_texts_of_other_ids_may_be_equal():
    """To the positive's or the query's, of documents that are listed or drawn by a cross-encoder."""
    texts = {"1": "a caf\u00e9", "2": "A CAFE\u0301", "3": "b", "4": "Query  0"}
    flags = [*REQUIRED.split()[:-3], "--columns", *"qpn", "--corpus", "x", "--loss", "bce"]
    args = train_cross_encoder.parse_args(flags)
    lookup = SimpleNamespace(texts=lambda ids: list(map(texts.get, ids)))
    data = SimpleNamespace(sources=[SimpleNamespace(args=args, name="x")], lookups=[None, lookup])
    cells = {"q": ["query 0", "query 1", "query 2"], "p": ["1", "2", "4"], "n": [["2", "3", "4"], [], []]}
    numbers = {train_cross_encoder.SOURCE: [0] * 3, train_cross_encoder.NUMBER: ["0 0", "0 1", "0 2"]}
    rows, _ = train_cross_encoder.local_rows(pa.table(cells | numbers), [0, 1, 2], 0, data, args)
    assert rows[0].documents == ["a caf\u00e9", "b"] and rows[0].labels == [1, 0]
    assert sorted(rows[1].documents[1:]) == ["Query  0", "b"] and rows[1].labels == [1, 0, 0]
    graded = [train_cross_encoder.Row("q", ["a", "A ", "b"], [1.0, 0.0, 0.0])]
    (evaluator,) = train_cross_encoder.held_out_evaluators("held_out", graded, args, None).values()
    assert evaluator.samples[0]["negative"] == ["b"]


@pytest.mark.parametrize("kind", ["texts", "lists", "ids", "lists of ids"])
def test_a_positive_of_another_row_is_not_a_negative(kind):
    """Of random batches of a cross-encoder, whatever its form or id, given or drawn, read by one process or by two;
    every other negative that is given stays. Of a list, also the positives that are not drawn."""
    random = np.random.default_rng(0)
    forms = [str.upper, lambda text: f" {text}", lambda text: text.replace(" ", "  "), str]
    distinct = [f"q {n}" for n in range(8)] + [f"d {n}" for n in range(12)]
    texts = {f"{text} {i}": form(text) for text in distinct for i, form in enumerate(forms)}
    has_ids = "ids" in kind
    lookup = SimpleNamespace(texts=lambda ids: list(map(texts.get, ids))) if has_ids else None
    flags = ["--corpus", "x", "--queries", "x"] * has_ids + ["--num_negatives", "3"]
    args = train_cross_encoder.parse_args([*REQUIRED.split()[:-3], "--columns", *"qpn", *flags])
    source = SimpleNamespace(args=train_cross_encoder.resolve_source_args(args), name="x")
    data = SimpleNamespace(sources=[source], lookups=[lookup, lookup])

    def choose(letter, count):
        keys = random.choice([key for key in texts if key[0] == letter], count).tolist()
        return keys if has_ids else list(map(texts.get, keys))

    def folded(keys):
        return [script.fold(texts[key] if has_ids else key) for key in keys]

    replaced = 0
    for number in range(40):
        sizes = [1 + ("lists" in kind) * random.integers(3) for _ in range(9)]
        columns = {"q": choose("q", 9), "p": [choose("d", size) for size in sizes],
                   "n": [choose("d", random.integers(4)) for _ in sizes]}  # fmt: skip
        numbers = {script.SOURCE: [0] * 9, script.NUMBER: [f"0 {number * 9 + row}" for row in range(9)]}
        table = pa.table(columns | numbers)
        parts = [[*range(9)], [0, 2, 4, 6, 8], [1, 3, 5, 7]]
        rows, *shares = [train_cross_encoder.local_rows(table, part, 0, data, args)[0] for part in parts]
        for part, share in zip(parts[1:], shares):
            assert [row.documents for row in share] == [rows[place].documents for place in part]
        known = {}
        for query, positives in zip(folded(columns["q"]), columns["p"]):
            known.setdefault(query, {query}).update(folded(positives))
        for row, query, given in zip(rows, folded(columns["q"]), columns["n"]):
            kept = [text for text in folded(given) if text not in known[query]]
            negatives = list(map(script.fold, row.documents[1:]))
            assert negatives == kept or not (kept or set(negatives) & known[query])
            assert row.labels == [1] + [0] * len(negatives)
            replaced += bool(given and negatives) and not kept
    assert replaced > 5


def test_known_positives_of_held_out_and_of_labelled_rows(reranker, monkeypatch):
    """Held-out rows rank no positive of another one as wrong; labels of a row count, for it and for others."""
    args = train_cross_encoder.parse_args([*REQUIRED.split()[:-3], "--columns", *"qpn", "--loss", "bce"])
    labelled = replace(args, label_column=["s"])
    sources = [SimpleNamespace(args=part, name="x", index=n, label="x") for n, part in enumerate((args, labelled))]
    cells = [
        {"q": "a", "p": "one", "n": "two", "s": None},
        {"q": "A ", "p": "TWO", "n": "three", "s": None},
        {"q": "a", "p": "one", "n": "three", "s": [0, 1]},
        {"q": "b", "p": "one", "n": "four", "s": None},
        {"q": "b", "p": "four", "n": None, "s": [0]},  # judged wrong: no positive
    ]
    numbers = [{script.SOURCE: int(bool(row["s"])), script.NUMBER: f"0 {n}"} for n, row in enumerate(cells)]
    table = pa.Table.from_pylist([row | number for row, number in zip(cells, numbers)])  # fmt: skip
    data = SimpleNamespace(sources=sources, lookups=[None, None])
    rows, _ = train_cross_encoder.local_rows(table, [0, 1, 2, 3, 4], 0, data, args)
    assert [row.documents[0] for row in rows] == ["one", "TWO", "one", "one", "four"]
    assert [set(row.documents[1:]) for row in rows] == [{"four"}, {"four"}, {"three"}, {"four"}, set()]
    assert rows[2].labels == [0, 1]
    ranked = train_cross_encoder.read_rows(table.take([0, 1, 3]), sources, [None, None], 0)[0]
    evaluation = train_cross_encoder.evaluation
    monkeypatch.setattr(evaluation, "CrossEncoderRerankingEvaluator", lambda samples, **_: samples)
    data = SimpleNamespace(sources=sources, held_out=[(sources[0], ranked)], lookups=[None, None])
    model = CrossEncoder(str(reranker), device="cpu")
    ((samples, _),) = train_cross_encoder.open_evaluators(data, model, args).values()
    assert [sample["negative"] for sample in samples] == [["four"], ["three"], ["four"]]


def test_a_query_is_not_its_own_negative():
    """By a plain loop; the second row is the first one turned round."""
    torch.manual_seed(0)
    first, second, *others = F.normalize(torch.randn(4, 8), dim=1)
    queries, documents = torch.stack([first, second, others[0]]), torch.stack([second, first, others[1]])
    hashes = torch.tensor([[1, 2, 3], [2, 1, 4]])
    whole = script.WholeBatch(hashes, torch.zeros(3, 0), torch.arange(3), 0)
    expected = 0
    for row, kept in enumerate([[0, 2], [1, 2], [2, 0, 1]]):  # its positive first
        expected -= (queries[row] @ documents[kept].T / 0.05).log_softmax(0)[0] / 3
    assert script.infonce((queries, documents), whole, temperature=0.05).item() == pytest.approx(expected.item())


def test_a_query_is_not_drawn_as_its_negative():
    args = train_cross_encoder.parse_args([*REQUIRED.split(), "--num_negatives", "3"])
    cells = {"a": ["a", "b", "c"], "b": ["b", "A ", "d"], script.SOURCE: [0, 0, 0], script.NUMBER: [0, 1, 2]}
    sources = [SimpleNamespace(args=args, name="x")]
    table = pa.table(cells)
    rows, _ = train_cross_encoder.read_rows(table, sources, [None, None], 0)
    train_cross_encoder.draw_negatives(rows, table.to_pylist(), 0, sources, [None, None])
    assert [sorted(row.documents) for row in rows] == [["b", "d"], ["A ", "d"], ["A ", "b", "d"]]


def test_a_query_is_not_its_own_wrong_answer(bert, rows):
    """Of held-out rows in both directions, the measure is that of a loop that leaves the query out."""
    texts = [(row["docstring"], row["code"][:80]) for row in rows[:15]]
    held_out = [SimpleNamespace(query=a, documents=[b], labels=[]) for pair in texts for a, b in (pair, pair[::-1])]
    model = SentenceTransformer(str(bert), device="cpu")
    name, evaluator = script.held_out_evaluator("held_out", held_out, None, model)
    distinct = list(dict.fromkeys(row.query for row in held_out))
    vectors = model.encode(distinct, convert_to_tensor=True, normalize_embeddings=True)
    found = 0
    for row in held_out:
        scores = vectors[distinct.index(row.query)] @ vectors.T
        scores[distinct.index(row.query)] = -2
        found += scores.argmax().item() == distinct.index(row.documents[0])
    measures = evaluator(model)
    assert measures[name.replace("ndcg@10", "accuracy@1")] == pytest.approx(found / len(held_out))
    assert measures[name] > found / len(held_out) > 0


def held_out_search(rows):
    """Return (name of the measure, evaluator) of held-out (query, document)."""
    rows = [SimpleNamespace(query=query, documents=[document], labels=[]) for query, document in rows]
    model = SimpleNamespace(similarity_fn_name="cosine", model_type="SentenceTransformer")
    return script.held_out_evaluator("held_out", rows, None, model)


def test_twins_are_one_document_of_a_held_out_search(bert, rows):
    """With twins that differ in case, blanks and form alone, of queries and of answers, measures stay the same."""
    texts = [(row["docstring"], f"caf\u00e9 {number} {row['code'][:80]}") for number, row in enumerate(rows[:40])]
    twins = [(f"{a} ", b.upper().replace("\u00c9", "E\u0301").replace(" ", "\n")) for a, b in texts]
    model = SentenceTransformer(str(bert), device="cpu")
    measures = []
    for pairs in (texts, twins + texts, [*texts, *((f"please: {a}", b) for a, b in twins)]):
        name, evaluator = held_out_search(pairs)
        assert len(evaluator.corpus) == 40
        measures.append(evaluator(model))
    assert measures[0] == measures[1] and 0 < measures[0][name] < 1


def test_ten_documents_are_ranked_beside_the_query_itself():
    """Its answer is the eleventh document of the search, and the tenth of its ranking."""
    vectors = {text: torch.tensor([math.cos(angle), math.sin(angle)]) for text, angle in
               [("query", 0), *((f"d{number}", number / 20) for number in range(1, 11)), ("far", 2)]}  # fmt: skip
    pairs = [("query", "d10"), ("far", "query"), *((f"d{n}", f"d{n}") for n in range(1, 10))]
    name, evaluator = held_out_search(pairs)
    evaluator.embed_inputs = lambda _, texts, **options: torch.stack([vectors[text] for text in texts])
    evaluator.queries, evaluator.queries_ids = ["query"], ["query"]
    evaluator.store_metrics_in_model_card_data = lambda *_: None
    measures = evaluator(SimpleNamespace(similarity_fn_name="cosine", similarity=lambda a, b: a @ b.T))
    assert measures[name] == pytest.approx(1 / math.log2(11))


def test_similarities_are_not_rounded_by_autocast(bert, monkeypatch):
    """In bf16 a tenth of the documents of a search would tie; the passes are autocast."""
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator, "autocast", lambda: torch.autocast("cpu", torch.bfloat16))
    model = SentenceTransformer(str(bert), device="cpu")
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))

    def evaluator(model):
        model.encode("a text")
        return {"is_autocast": torch.is_autocast_enabled("cpu")}

    assert script.evaluate(model, {"is_autocast": (evaluator, {})}, accelerator) == {"is_autocast": 0}
    assert seen == [True]


def test_rows_of_csv_that_are_cut_are_refused(tmp_path):
    """By a lone carriage return, which to_csv does not quote before Python 3.11.9: the rest would be a row of its own,
    whose negative came first."""
    (tmp_path / "x.csv").write_bytes(b'q,pos,neg\na,"b, c",d\nread a file,open(\rreturn text,return None,none\n')
    with pytest.raises(script.UserError, match=r"x.csv: line 3: lacks fields .if they are empty, rewrite it by "):
        script.open_files([str(tmp_path / "x.csv")])


def test_a_small_source_has_negatives():
    """Of one row in a batch that is mixed by rows: they are of the other sources; and none is listed for its query."""
    pairs = [("q0", "d0"), ("q1", "d1"), ("q2", "d2"), ("q3", "d3"), ("q4", "d4"), ("q5", "d5"), ("q0", "d1")]
    queries, documents = map(list, zip(*pairs))
    numbers = {train_cross_encoder.SOURCE: [0] * 6 + [1], train_cross_encoder.NUMBER: list(range(7))}
    table = pa.table({"q": queries, "d": documents} | numbers)
    args = train_cross_encoder.parse_args(["--model_name_or_path", "x", "--train_data", "x", "--columns", "q", "d"])
    sources = [SimpleNamespace(args=train_cross_encoder.resolve_source_args(args)) for _ in range(2)]
    rows, _ = train_cross_encoder.read_rows(table, sources, [None, None], 0)
    train_cross_encoder.draw_negatives(rows, table.to_pylist(), 0, sources, [None, None])
    for row in (rows[0], rows[6]):
        assert len(row.documents) == 5 and not {"d0", "d1"} & set(row.documents[1:])
