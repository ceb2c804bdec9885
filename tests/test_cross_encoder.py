"""The cross-encoder: losses, gradients, row formats, tokenization, measures, whole runs and bad input."""

import json
import math
from collections import ChainMap
from dataclasses import replace
from random import Random
from statistics import fmean as mean
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT, launch, merge_flags, write_rows
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder import losses

import train_cross_encoder as script

SCRIPT = ROOT / "train_cross_encoder.py"
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def parse(*flags):
    given = ["--train_data", "x.jsonl", "--columns", "q", "d", "--model_name_or_path", "a/model", *flags]
    return script.parse_args(merge_flags(given))


# ----------------------------------------------------------------------------------------------------------- losses

SIZES = [3, 1, 5, 2, 4]  # documents of each group
GROUPS = torch.arange(5).repeat_interleave(torch.tensor(SIZES))  # of each document
GRADES = torch.tensor([2, 0, 1, 1, 0, 0, 3, 1, 0, 1, 0, 0, 0, 1, 2], dtype=torch.float32)
LOGITS = torch.randn(15, generator=torch.Generator().manual_seed(1)) * 3


def loss_of(loss, logits, labels, sizes=SIZES, **loss_kwargs):
    """Return the loss selected by --loss and --loss_kwargs."""
    loss_kwargs = {"teacher_temperature": 1} | loss_kwargs if loss in script.TEACHER_LOSSES else loss_kwargs
    args = parse("--loss", loss, "--label_column", "y", "--loss_kwargs", json.dumps(loss_kwargs))
    made = script.make_loss(args, None)
    groups = torch.arange(len(sizes) + 1).repeat_interleave(torch.tensor([*sizes, 0]))
    columns = torch.cat([torch.arange(size) for size in sizes])
    padded = logits.new_zeros(len(sizes) + 1, max(sizes)), labels.new_full((len(sizes) + 1, max(sizes)), math.nan)
    scores, labels = (slots.index_put((groups, columns), part) for slots, part in zip(padded, (logits, labels)))
    total, terms = made(scores, script.Targets(labels, 0))
    return total / terms  # the last row of slots is empty


def by_group(*tensors):
    """Return the values of each tensor in each group, as lists of floats."""
    return [[tensor[group == GROUPS].tolist() for tensor in tensors] for group in range(len(SIZES))]


def softmax(scores):
    total = sum(math.exp(score) for score in scores)
    return [math.exp(score) / total for score in scores]


def sigmoid(score):
    return 1 / (1 + math.exp(-score))


def naive_bce(logits, labels, pos_weight=1):
    pairs = zip(logits.tolist(), labels.tolist())
    return mean([-(pos_weight * y * math.log(sigmoid(s)) + (1 - y) * math.log(1 - sigmoid(s))) for s, y in pairs])


def naive_mse(logits, labels):
    return mean([(score - label) ** 2 for score, label in zip(logits.tolist(), labels.tolist())])


def naive_listwise_ce(logits, labels):
    groups = by_group(logits, labels)
    return mean([mean([-math.log(p) for p, y in zip(softmax(s), ys) if y > 0]) for s, ys in groups])


def naive_ranknet(logits, labels, sigma=1):
    found = []
    for scores, grades in by_group(logits, labels):
        for i in range(len(scores)):
            for j in range(len(scores)):
                if grades[i] > grades[j]:
                    found.append(math.log2(1 + math.exp(sigma * (scores[j] - scores[i]))))
    return mean(found)


def naive_lambdaloss(logits, labels, k=None, mu=10):
    found = []
    for scores, grades in by_group(logits, labels):
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        rank = {document: number for number, document in enumerate(order, 1)}
        ideal = sorted(grades, reverse=True)[: k or len(grades)]
        best = sum((2**label - 1) / math.log2(1 + number) for number, label in enumerate(ideal, 1))
        for i in rank:
            for j in rank:
                if grades[i] > grades[j] and min(rank[i], rank[j]) <= (k or len(rank)):
                    distance = abs(rank[i] - rank[j])
                    weight = mu * (1 / math.log2(1 + distance) - 1 / math.log2(2 + distance))
                    weight += abs(1 / math.log2(1 + rank[i]) - 1 / math.log2(1 + rank[j]))
                    weight *= (2 ** grades[i] - 2 ** grades[j]) / best
                    found.append(-weight * math.log2(sigmoid(scores[i] - scores[j])))
    return mean(found)


def naive_margin_mse(logits, labels, temperature=1, teacher_temperature=1):
    groups = by_group(logits / temperature, labels / teacher_temperature)
    return mean([((s[0] - s[i]) - (y[0] - y[i])) ** 2 for s, y in groups for i in range(1, len(s))])


def naive_kl(logits, labels, temperature=1, teacher_temperature=1):
    found = []
    for scores, teacher in by_group(logits / temperature, labels / teacher_temperature):
        pairs = zip(softmax(teacher), softmax(scores))
        found.append(temperature**2 * sum(p * math.log(p / q) for p, q in pairs))
    return mean(found)


NAIVE = [
    (naive_bce, {}), (naive_bce, {"pos_weight": 5}),
    (naive_mse, {}), (naive_listwise_ce, {}), (naive_ranknet, {}), (naive_ranknet, {"sigma": 0.5}),
    (naive_lambdaloss, {}), (naive_lambdaloss, {"k": 2, "mu": 3}), (naive_margin_mse, {}), (naive_kl, {}),
    (naive_kl, {"temperature": 2, "teacher_temperature": 2}),
    (naive_kl, {"temperature": 2, "teacher_temperature": 0.5}),
    (naive_margin_mse, {"temperature": 2, "teacher_temperature": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize("naive, loss_kwargs", NAIVE)
def test_losses_equal_naive_loops(naive, loss_kwargs):
    loss = naive.__name__.removeprefix("naive_")
    logits, labels = LOGITS.double().requires_grad_(), ((GRADES > 0) if loss == "bce" else GRADES).double()
    found = loss_of(loss, logits, labels, **loss_kwargs)
    assert found.item() == pytest.approx(naive(LOGITS.double(), labels, **loss_kwargs), rel=1e-6)
    found.backward()
    assert logits.grad.isfinite().all() and logits.grad.abs().sum() > 0


class GivenLogits(CrossEncoder):
    """A CrossEncoder whose logit for (query, "7") is logits[7]."""

    num_labels, device = 1, torch.device("cpu")

    def __init__(self, logits):
        torch.nn.Module.__init__(self)
        self.logits = logits

    def preprocess(self, pairs, **options):
        return {"indices": torch.tensor([int(document) for _, document in pairs])}

    def forward(self, features):
        return {"scores": self.logits[features["indices"]][:, None]}


def test_losses_equal_those_of_sentence_transformers():
    model, pairs, classes = GivenLogits(LOGITS), [[str(i) for i in range(15)]] * 2, (GRADES > 0).float()
    lists = [["query"] * 5, [[str(i) for i in range(15) if GROUPS[i] == group] for group in range(5)]]
    lists = lists, list(GRADES.split(SIZES))
    threes = [["query"] * 5, *([str(3 * group + i) for group in range(5)] for i in range(3))]  # groups of one size
    threes = threes, list(GRADES.view(5, 3))
    for found, expected in (
        (loss_of("bce", LOGITS, classes), losses.BinaryCrossEntropyLoss(model)(pairs, classes)),
        (loss_of("mse", LOGITS, GRADES), losses.MSELoss(model)(pairs, GRADES)),
        (loss_of("ranknet", LOGITS, GRADES), losses.RankNetLoss(model)(*lists)),
        (loss_of("lambdaloss", LOGITS, GRADES), losses.LambdaLoss(model)(*lists)),
        (loss_of("lambdaloss", LOGITS, GRADES, k=2), losses.LambdaLoss(model, k=2)(*lists)),
        (loss_of("margin_mse", LOGITS, GRADES, [3] * 5), losses.MarginMSELoss(model)(*threes)),
    ):
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)


# ------------------------------------------------------------------------------------------------------- equalities


@pytest.mark.parametrize("loss", ["bce", "mse", "listwise_ce", "ranknet", "lambdaloss", "margin_mse", "kl"])
def test_a_score_that_is_not_a_number_is_not_hidden(loss):
    """The run stops at such a loss."""
    logits = LOGITS.clone()
    logits[4] = math.nan
    assert loss_of(loss, logits, GRADES.clamp(max=1)).isnan()


@pytest.mark.parametrize("loss, labels", [("ranknet", [-3.4, -1.2, -7.9]), ("kl", [2.0, 3.0, 1.0])])
def test_held_out_labels_that_are_not_grades(loss, labels):
    """The highest is relevant: of fractions, if none is above 0, and of a teacher's scores."""
    kwargs = '{"teacher_temperature": 1}' if loss == "kl" else "{}"
    row = script.Row("q", ["a", "b", "c"], labels)
    args = parse("--loss", loss, "--label_column", "y", "--loss_kwargs", kwargs)
    (evaluator,) = script.held_out_evaluators("held_out", [row], args, None).values()
    assert evaluator.samples == [{"query": "q", "positive": ["b"], "negative": ["a", "c"]}]


def test_a_held_out_row_without_a_relevant_document_is_not_ranked():
    rows = [script.Row("q", ["a", "b"], [1.0, 0.0]), script.Row("r", ["c", "d"], [0.0, 0.0])]
    args = parse("--loss", "mse", "--label_column", "y")
    (evaluator,) = script.held_out_evaluators("held_out", rows, args, None).values()
    assert [sample["query"] for sample in evaluator.samples] == ["q"]


CASES = ["bce", "mse", "listwise_ce", "drawn", "lists", "ranknet", "lambdaloss", "margin_mse", "kl", "mixture"]


@pytest.fixture(scope="module")
def launched(tmp_path_factory, rows, bert):
    """Return {(processes, process): {setting: (gradient, loss, micro-batches, rows)}} for 1 and 2 processes."""
    folder = tmp_path_factory.mktemp("gradients")
    codes = [row["code"][:400] for row in rows]
    table = []
    for i, row in enumerate(rows[:200]):
        documents = [codes[i], *codes[i + 1 : i + 2 + i % 4]]  # 2 to 5
        labels = {"label": i % 3 // 2, "classes": [1] + [i % 2] * (len(documents) - 2) + [0],
                  "grades": [max(3 - number, 0) for number in range(len(documents))],
                  "scores": [math.sin(i + number) for number in range(len(documents))]}  # fmt: skip
        lists = {"documents": documents, "lists": codes[max(0, i - i % 5) : i]}
        table.append({**row, "code": codes[i], **lists, **labels})
    file, found = write_rows(folder / "rows.parquet", table), {}
    for processes in (1, 2):
        launch(ROOT / "tests/cross_gradient_worker.py", bert, file, folder / str(processes), processes=processes)
        for process in range(processes):
            found[processes, process] = torch.load(folder / f"{processes}.{process}.pt")
    return found


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_one_process_and_one_pass(launched, case):
    expected = launched[1, 0][case, 10**6, "false"]
    assert expected[0].norm() > 0.01
    for max_tokens, cache in ((300, "false"), (300, "true"), (10**6, "false")):
        for processes in (1, 2):
            pairs = [launched[processes, process][case, max_tokens, cache][3] for process in range(processes)]
            assert dict(ChainMap(*pairs)) == expected[3]  # including drawn negatives
            assert sum(map(len, pairs)) == len(expected[3]) == 7  # each row on one process
        for gradients in launched.values():
            gradient, loss, passes, _ = gradients[case, max_tokens, cache]
            assert passes > 2 or max_tokens > 300
            assert ((gradient - expected[0]).norm() / expected[0].norm()).item() < 1e-5
            assert loss == pytest.approx(expected[1], rel=1e-5)


def test_processes_ran_different_numbers_of_passes(launched):
    """Without this, the test above would prove little: only unequal numbers can desynchronize the collectives."""
    settings = [(case, 300, "false") for case in CASES]
    assert any(launched[2, 0][setting][2] != launched[2, 1][setting][2] for setting in settings)


def test_accumulated_batches_equal_one_batch_for_a_mean_over_pairs(launched):
    expected = launched[1, 0]["one batch of 64"][0]
    for gradients in launched.values():
        assert ((gradients["four batches of 16"][0] - expected).norm() / expected.norm()).item() < 1e-5


# --------------------------------------------------------------------------------------------------- row formats


def first_rows(rows, *flags, suffix="jsonl"):
    """Return (loss, [([query, document, ...], labels)]) of the rows, in their order, without bad ones."""
    file = write_rows(f"x.{suffix}", rows)
    args = parse("--train_data", file, "--shuffle_buffer", 0, "--eval_rows", 0, "--batch_size", len(rows), *flags)
    data = script.open_data(args)
    table, _ = next(script.row_batches(data.sources, data.weights, args))
    rows, _ = script.local_rows(table, np.arange(len(table)), 0, data, args)
    return data.sources[0].args.loss, [([row.query, *row.documents], row.labels) for row in rows]


@pytest.mark.parametrize("suffix, way", [("jsonl", []), ("parquet", ["--streaming", "--max_steps", 1])])
def test_row_formats(suffix, way):
    def read(rows, *flags):
        columns = [name for name in rows[0] if name not in "yz"]
        return first_rows(rows, "--columns", *columns, *flags, *way, suffix=suffix)

    assert read([{"q": "a", "d": "b", "y": 1}], "--label_column", "y") == ("bce", [(["a", "b"], [1])])
    assert read([{"q": "a", "d": "b"}]) == ("listwise_ce", [(["a", "b"], [1])])
    assert read([{"q": "a", "d": "b", "e": "c"}]) == ("listwise_ce", [(["a", "b", "c"], [1, 0])])
    assert read([{"q": "a", "d": "b", "e": ["c", "d"]}])[1] == [(["a", "b", "c", "d"], [1, 0, 0])]
    ragged = [{"q": "a", "d": ["b", "c", "d"], "y": [0, 1, 0]}, {"q": "e", "d": ["f", "g"], "y": [1, 0]}]
    expected = [(["a", "b", "c", "d"], [0, 1, 0]), (["e", "f", "g"], [1, 0])]
    assert read(ragged, "--label_column", "y") == ("listwise_ce", expected)
    columns = [{"q": "a", "d": "b", "e": "c", "y": 1, "z": 0}]
    assert read(columns, "--label_column", "y", "z") == ("listwise_ce", [(["a", "b", "c"], [1, 0])])
    as_text = [{"q": "a", "d": "b", "e": "c", "y": "[1, 0]"}]  # as in CSV
    assert read(as_text, "--label_column", "y") == ("listwise_ce", [(["a", "b", "c"], [1, 0])])
    teacher = ["--label_column", "y", "--loss", "margin_mse", "--loss_kwargs", '{"teacher_temperature": 1}']
    assert read([{"q": "a", "d": "b", "e": "c", "y": [3.0, 0.5]}], *teacher)[1] == [(["a", "b", "c"], [3, 0.5])]
    with pytest.raises(script.UserError, match="--num_negatives 0: without labels, a document has nothing to be comp"):
        read([{"q": "a", "d": "b", "e": "c"}], "--num_negatives", 0)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "tsv.gz"])
@pytest.mark.parametrize("label, loss", [([1, 0], "listwise_ce"), (0.5, "bce"), (True, "bce")])
def test_the_first_label_that_is_there_decides_the_loss(suffix, label, loss):
    """Whatever the format, and where the first rows, or those of a whole file, have none."""
    for number, labels in enumerate([[None] * 5 + [label], [None] * 1500 + [label] * 9]):
        rows = [{"q": "a", "d": "b", "e": "c", "y": value} for value in labels]
        write_rows(f"{number}.{suffix}", rows)
        args = parse("--train_data", f"{number}.{suffix}", "--columns", *"qde", "--label_column", "y")
        assert script.choose_loss(args) == loss
    if suffix != "jsonl":  # in which a column of nulls is one of texts
        write_rows(f"00.{suffix}", [row | {"y": "" if "sv" in suffix else None} for row in rows])
        args = parse("--train_data", f"0*.{suffix}", "--columns", *"qde", "--label_column", "y")
        assert script.choose_loss(args) == loss


def read_pairs(pairs, *flags, first=0, **cells):
    """Return (rows as local_rows returns them, with negatives, of all of a batch); pairs: (query, document or
    documents); first: number of the first row; cells: further columns."""
    args = parse("--columns", "q", "d", "n", *flags)
    lists = [documents if isinstance(documents, list) else [documents] for _, documents in pairs]
    columns = {"q": [query for query, _ in pairs], "d": [documents[0] for documents in lists]}
    columns |= {"n": pa.array([documents[1:] for documents in lists], pa.list_(pa.string())), **cells}
    numbers = {script.SOURCE: [0] * len(pairs), script.NUMBER: range(first, first + len(pairs))}
    args = replace(args, loss=args.loss or "listwise_ce")
    data = SimpleNamespace(sources=[SimpleNamespace(args=args, name="x")], lookups=[None, None])
    rows, skipped = script.local_rows(pa.table(columns | numbers), np.arange(len(pairs)), 0, data, args)
    assert not skipped
    return rows


def test_drawn_negatives():
    pairs = [(f"query {i // 2}", f"document {i % 17}") for i in range(40)]

    def draw(epoch, *flags):  # default: 4
        return read_pairs(pairs, *flags, first=40 * epoch)

    def documents_of(rows):
        return [row.documents for row in rows]

    found = draw(0)
    assert documents_of(found) == documents_of(draw(0)) != documents_of(draw(1))
    everything = {f"document {i}" for i in range(17)}
    for i, (row, all_drawn) in enumerate(zip(found, draw(0, "--num_negatives", 99))):
        positive, *negatives = row.documents
        assert positive == f"document {i % 17}" and row.labels == [1, 0, 0, 0, 0]
        same_query = {positive, f"document {(i ^ 1) % 17}"}
        assert len(set(negatives)) == 4 and not same_query & set(negatives)
        assert set(all_drawn.documents[1:]) == everything - same_query
    assert {document for row in found for document in row.documents[1:]} == everything


def test_negatives_are_drawn_only_for_rows_without_negatives():
    rows = read_pairs([("a", ["b", "c"]), ("d", ["e"]), ("f", ["g"])])
    assert rows[0].documents == ["b", "c"]
    assert [sorted(row.documents[1:]) for row in rows[1:]] == [["b", "c", "g"], ["b", "c", "e"]]
    assert [row.labels for row in rows] == [[1, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    for pairs in ([("a", "b"), ("a", "c")], [("a", "b"), ("d", "b")]):
        rows = read_pairs(pairs, "--label_column", "y", "--loss", "bce", y=[1, 0])
        assert [row.documents for row in rows] == [[document] for _, document in pairs]
        assert [row.labels for row in read_pairs(pairs)] == [[1], [1]]  # no other row has one to draw


def test_drawn_negatives_differ_in_more_than_white_space_or_case():
    """From the positives of the query, which may itself be written in two ways, and from one another."""
    pairs = [("a query", "read it"), ("A  query", "write it"), ("b", "Read\nit "), ("c", "cut it"), ("d", "CUT it")]
    first, second, third, *_ = read_pairs(pairs, "--num_negatives", 9)
    assert first.documents[:1] == ["read it"] and second.documents[:1] == ["write it"]
    for row in (first, second):
        assert [text.lower() for text in row.documents[1:]] == ["cut it"]
    assert sorted(text.lower() for text in third.documents[1:]) == ["cut it", "write it"]


@pytest.mark.parametrize("labels, is_refused", [([0, 1, 0], True), ([2, 1, 0], False), ([1, 1, 0], True)])
def test_a_lone_list_that_is_drawn_from_begins_with_its_positive(labels, is_refused):
    """Else the document of the highest label might not be among those that are drawn."""
    row = {"q": "a", "d": ["x", "y", "z"], "y": labels}
    args = parse("--label_column", "y", "--loss", "ranknet", "--num_negatives", "1")
    if is_refused:
        message = "^with --num_negatives, a list must begin with its only document of the highest"
        with pytest.raises(ValueError, match=message):
            script.read_row(row, 0, args, Random(0))
    else:
        drawn = [script.read_row(row, 0, args, Random(number)) for number in range(20)]
        assert {row.documents[0] for row in drawn} == {"x"} and {len(row.documents) for row in drawn} == {2}


def test_negatives_drawn_from_ids_are_texts():
    """Never a document of the same query, by its id, and never one that the corpus lacks."""
    corpus = write_rows("corpus.jsonl", [{"_id": i, "text": f"text {i}"} for i in range(12)])
    rows = [{"q": f"query {i // 2}", "d": i} for i in range(14)]  # two documents are missing
    args = parse("--train_data", write_rows("x.jsonl", rows), "--corpus", corpus, "--corpus_columns", "_id", "text",
                 "--columns", "q", "d", "--eval_rows", 0, "--num_negatives", 99, "--on_bad_row", "skip")  # fmt: skip
    data = script.open_data(args)
    found, skipped = script.local_rows(data.sources[0].take(14), np.arange(14), 0, data, args)
    assert len(found) == 12 and skipped == 2
    for row in found:
        number = int(row.documents[0].split()[1])
        same_query = {f"text {number}", f"text {number ^ 1}"}
        assert row.query == f"query {number // 2}"
        assert {*row.documents[1:]} == {f"text {i}" for i in range(12)} - same_query
        assert row.labels == [1.0] + [0.0] * 10


def test_ids_in_lists():
    """A null one is left out with its label; an unknown id, or an empty list, is a bad row."""
    corpus = write_rows("corpus.jsonl", [{"_id": i, "text": f"text {i}"} for i in range(20)])

    def read(name, lists, *flags):
        labels = [[1, 0, 0][: len(ids)] for ids in lists]
        data = write_rows(name, [{"q": f"query {i}", "ds": ids, "y": labels[i]} for i, ids in enumerate(lists)])
        args = parse("--train_data", data, "--corpus", corpus, "--corpus_columns", "_id", "text", "--columns", "q",
                     "ds", "--label_column", "y", "--loss", "bce", "--eval_rows", 0, "--shuffle_buffer", 0,
                     *flags)  # fmt: skip
        data = script.open_data(args)
        return script.read_rows(data.sources[0].take(len(lists)), data.sources, data.lookups, 0)

    lists = [["3", "4"], ["5", None], ["7", "8", "9"], ["5", "20"], [], ["0"]]
    rows, skipped = read("all.jsonl", lists, "--on_bad_row", "skip")
    expected = [["text 3", "text 4"], ["text 5"], ["text 7", "text 8", "text 9"], ["text 0"]]
    assert [row.documents for row in rows] == expected and skipped == 2
    for bad, problem in ((3, "an id is unknown, or has no text"), (4, "'ds' has no text")):
        with pytest.raises(script.UserError, match=f"{problem} in the row .*query 1.*_row skip"):
            read(f"{bad}.jsonl", [lists[0], lists[bad]])


# --------------------------------------------------------------------------------------------------------- measures


def ndcg(scores, labels):
    """Return nDCG@10 of a ranking in which documents with a label above 0 are relevant."""
    relevant = (np.array(labels) > 0)[np.argsort(-scores, kind="stable")]
    gains = [1 / math.log2(1 + rank) for rank in range(1, 11)]
    return sum(gain for gain, found in zip(gains, relevant) if found) / sum(gains[: relevant.sum()])


@pytest.mark.parametrize("kind", ["drawn", "lists", "scores"])
def test_held_out_measures_equal_those_of_predict(rows, reranker, kind):
    """Without labels, each query ranks its document among 50, drawn from the held-out documents."""
    labels, codes = ["--label_column", "y"], [row["code"][:80] for row in rows]
    flags, cells = {
        "drawn": ([], lambda i: {}),
        "lists": (labels, lambda i: {"d": codes[i : i + 2 + i % 3], "y": [int(j == i % 2) for j in range(2 + i % 3)]}),
        "scores": ([*labels, "--loss", "mse"], lambda i: {"y": i % 7 / 7}),
    }[kind]
    texts = [{"q": row["docstring"][:60], "d": codes[i]} | cells(i) for i, row in enumerate(rows[:60])]
    accelerator = Accelerator(cpu=True)
    given = parse("--train_data", write_rows("x.parquet", texts), "--model_name_or_path", reranker, "--eval_rows", 52,
                  *flags)  # fmt: skip
    model = script.load_model(given).train()
    args = script.resolve_args(given, model, accelerator)
    model.activation_fn = torch.nn.Identity()  # as main does but for bce
    data = script.open_data(args)
    evaluators = script.open_evaluators(data, model, args)
    ((_, held_out),) = data.held_out
    found = script.evaluate(model, evaluators, accelerator)
    assert model.training
    library = CrossEncoder(str(reranker), device="cpu", activation_fn=torch.nn.Identity(), max_length=128)
    scores = [library.predict([(row.query, text) for text in row.documents]).astype(float) for row in held_out]
    if kind == "drawn":
        assert all(len(set(row.documents)) == 50 for row in held_out)
        documents = {document for row in held_out for document in row.documents}
        assert documents == {row.documents[0] for row in held_out} and len(held_out) == 52
    if kind == "scores":
        pair = pd.DataFrame({"scores": np.concatenate(scores), "labels": [row.labels[0] for row in held_out]})
        expected = {f"held_out_{name}": pair.corr(name).iloc[0, 1] for name in ("spearman", "pearson")}
        assert list(evaluators) == ["held_out_spearman"]
        assert found == pytest.approx(expected, abs=5e-3)  # near-ties may swap ranks
    else:
        expected = mean(ndcg(part, row.labels) for part, row in zip(scores, held_out))
        assert list(evaluators) == ["held_out_ndcg@10"]
        assert found["held_out_ndcg@10"] == pytest.approx(expected, abs=1e-5)


# ------------------------------------------------------------------------------------------------------- whole runs


# -------------------------------------------------------------------------------------------------------- bad input

GOOD = [{"q": f"query {i}", "d": [f"document {i}", "another"], "y": [1, 0]} for i in range(30)]
POINTS = [{"q": f"query {i}", "d": f"document {i}", "y": i % 2} for i in range(30)]


def refusal(rows, *flags):
    """Return the one-line message of the UserError."""
    with pytest.raises(script.UserError) as error:
        first_rows(rows, *flags)
    assert "\n" not in str(error.value)
    return str(error.value)


NOT_FINITE = "--label_column has missing, extra or non-finite numbers"
BAD_GROUPS = [
    ({"y": [0, 0]}, "", "a label for each document, at least one above 0 and one not above 0"),
    ({"y": [1, 1]}, "", "at least one above 0 and one not above 0"),
    ({"y": [1, 1]}, "--loss lambdaloss", "from 0 to 100, not all equal"),
    ({"y": [0, 0]}, "--loss ranknet", "--loss ranknet requires a label for each document, not all equal"),
    ({"y": [1, -1]}, "--loss lambdaloss", "from 0 to 100"),
    ({"y": [1, 0, 0]}, "", "a label for each document"),
    ({"y": []}, "", NOT_FINITE),
    ({"y": None}, "", "in the row"),
    ({"y": [None, 0]}, "", NOT_FINITE),
    ({"y": [math.inf, 0]}, "--loss mse", NOT_FINITE),
    ({"d": [], "y": []}, "", "'d' has no text"),
    ({"d": ["one"], "y": [1]}, '--loss kl --loss_kwargs {"teacher_temperature":1}', "for each document, two or more"),
]
BAD_POINTS = [
    ({"d": " \t"}, "", "'d' has no text"),
    ({"y": 5}, "", "--loss bce requires a label for each document, from 0 to 1 (or use mse)"),
]


@pytest.mark.parametrize("good, cells, flags, phrase", [*((GOOD, *bad) for bad in BAD_GROUPS),
                                                        *((POINTS, *bad) for bad in BAD_POINTS)])  # fmt: skip
def test_bad_rows(good, cells, flags, phrase):
    """The message names the row, and --on_bad_row skip leaves out only that row."""
    rows = [*good[:7], {**good[7], **cells}, *good[8:]]
    flags = ["--label_column", "y", *flags.split()]
    message = refusal(rows, *flags)
    assert all(word in message for word in ("x.jsonl: ", "query 7", phrase, "--on_bad_row skip")), message
    _, found = first_rows(rows, *flags, "--on_bad_row", "skip")
    assert [texts[0] for texts, _ in found] == [f"query {i}" for i in range(30) if i != 7]


def test_a_label_column_that_is_not_there():
    assert "--label_column z" in refusal(POINTS, "--label_column", "z")


@pytest.mark.parametrize(
    "flags, words",
    [("--loss kl", "--loss kl --label_column"), ("--warmup_ratio 2", "--warmup_ratio"),
     ("--loss hinge", "--loss hinge"), ("--num_negatives -2", "--num_negatives"),
     ('--loss_kwargs {"pos_weight":"5"}', '"pos_weight" number'), ('--loss_kwargs {"sigma":NaN}', '"sigma" number')],
)  # fmt: skip
def test_bad_flags(flags, words, capsys):
    with pytest.raises((script.UserError, SystemExit)) as error:  # of argparse
        parse(*flags.split())
    line = f"{error.value} {capsys.readouterr().err}"
    assert all(word in line for word in words.split()), line


def test_unknown_loss_kwargs():
    with pytest.raises(script.UserError, match="--loss_kwargs .*: .*'k'"):
        script.make_loss(parse("--loss", "listwise_ce", "--loss_kwargs", '{"k": 3}'), None)
    with pytest.raises(script.UserError, match="--loss_kwargs .*: .*'teacher_temperature'"):
        script.make_loss(parse("--loss", "kl", "--label_column", "y"), None)


# ------------------------------------------------------------------------------------------------------------ model


def test_refused_models(bert, tmp_path):
    CrossEncoder(str(bert), device="cpu", num_labels=3).save_pretrained(str(tmp_path / "three"))
    for name, hint in (("three", "three: .*3 scores"), ("none", "--model_name_or_path .*none")):
        with pytest.raises(script.UserError, match=hint) as error:
            script.load_model(parse("--model_name_or_path", tmp_path / name))
        assert "\n" not in str(error.value)


def test_a_new_head_depends_only_on_the_seed(bert):
    def head(seed):
        return script.load_model(parse("--model_name_or_path", bert, "--seed", seed)).model.classifier.weight

    assert torch.equal(head(1), head(1)) and not torch.equal(head(1), head(2))
