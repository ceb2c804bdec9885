"""A query whose text is a document of another row, as of pairs that are listed in both directions, is neither its own
negative nor its own wrong answer; CSV rows that a line break has cut are refused."""

from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sentence_transformers import SentenceTransformer

import train_bi_encoder as script
import train_cross_encoder

REQUIRED = "--model_name_or_path none --train_data none --columns a b"


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
    with pytest.raises(script.UserError, match=r"x.csv: line 3 lacks fields: quote line breaks, or rewrite it by "):
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
