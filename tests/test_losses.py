"""Parts of a step, each compared with a naive loop or a library: partition, micro-batches, losses, measures."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import ir_measures
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from conftest import TRAINERS, metrics, write_jsonl
from forked import merge_flags
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer import losses

import train_bi_encoder as script

# ------------------------------------------------------------------------------------- partition and micro-batches


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_partition_balances_count_and_length(processes):
    """And the gathered outputs, of which the last slots of some processes are empty, return to their order."""
    lengths = np.random.default_rng(0).pareto(1.5, 257).astype(int) + 1
    size = -(-257 // processes)
    dealt = []
    gathered = torch.full((processes * size, 2), -1)
    for process in range(processes):
        accelerator = SimpleNamespace(num_processes=processes, process_index=process)
        order, own = script.deal(lengths, accelerator)
        dealt.append(own)
        gathered[process * size :][: len(own)] = torch.from_numpy(own)[:, None]
    assert script.undo_deal(order, gathered, accelerator).tolist() == [[number, number] for number in range(257)]
    assert sorted(np.concatenate(dealt)) == list(range(257))
    assert max(map(len, dealt)) == size and min(map(len, dealt)) >= size - 1
    totals = [lengths[part].sum() for part in dealt]
    assert max(totals) - min(totals) <= lengths.max()


def test_micro_batches_respect_max_tokens_and_a_longer_text_is_alone():
    lengths = np.array([*np.random.default_rng(0).integers(0, 90, 200), 500, 0, 0])
    cuts = script.cut_micro_batches(lengths, 256)
    assert sorted(np.concatenate(cuts)) == list(range(203))
    assert cuts[0].tolist() == [200]  # 500 tokens, more than max_tokens
    assert all(len(cut) * lengths[cut].max() <= 256 for cut in cuts[1:])
    assert lengths[np.concatenate(cuts)].tolist() == sorted(lengths, reverse=True)
    assert script.cut_micro_batches(lengths[:0], 256) == []
    few = np.array([250] + [1] * 1000)  # a long text and many short ones never share a micro-batch
    assert all(len(cut) * few[cut].max() <= 256 for cut in script.cut_micro_batches(few, 256))
    assert len(script.cut_micro_batches(np.full(100, 10), 256)) <= 5  # not smaller than necessary


@pytest.mark.parametrize("max_tokens", [256, 2048, 16384])
def test_micro_batches_are_nearly_optimal(max_tokens):
    """Compared with dynamic programming over every possible cut: at most 0.5 % worse."""
    lengths = np.sort(np.random.default_rng(1).gamma(2, 30, 1500).astype(int).clip(3, 256))[::-1]
    cost_of_a_pass = 32 * (max_tokens / 2048) ** (5 / 3)
    best = np.append(np.full(len(lengths), np.inf), 0.0)
    for first in reversed(range(len(lengths))):
        ends = np.arange(first + 1, first + 1 + min(max_tokens // lengths[first], len(lengths) - first))
        best[first] = ((ends - first) * lengths[first] + cost_of_a_pass + best[ends]).min()
    cuts = script.cut_micro_batches(lengths, max_tokens)
    found = sum(len(cut) * lengths[cut].max() + cost_of_a_pass for cut in cuts)
    assert best[0] <= found < 1.005 * best[0]


@pytest.mark.parametrize("device, widths", [("cpu", [77, 72, 9, 1]), ("xpu", [77, 72, 16, 8])])
def test_padded_features_equal_those_of_the_tokenizer(bert, device, widths):
    """The same tensors; on an accelerator, widths are multiples of 8, up to the model's limit."""
    model = SentenceTransformer(str(bert), device="cpu")
    model.max_seq_length = 77
    model.tokenizer.backend_tokenizer.no_padding()
    model.tokenizer.backend_tokenizer.enable_truncation(77)
    texts = ["file " * count for count in (70, 7, 500, 0)]  # 72, 9, 77 and 2 tokens with [CLS] and [SEP]
    for max_tokens, count in ((10, 4), (10**6, 1)):
        places = [(0, 0), (0, 1), (1, 0), (2, 1)]
        args = script.Args(micro_batch_tokens=max_tokens)
        micro_batches = script.make_micro_batches(texts, places, model, args, torch.device(device))
        made = micro_batches.parts
        assert len(made) == count and micro_batches.tokens == 72 + 9 + 77 + 2
        assert micro_batches.padded == sum(f["input_ids"].numel() for f, _ in made)
        assert micro_batches.places.T.tolist() == [list(places[i]) for _, cut in made for i in cut]
        if count == 4:
            assert [f["input_ids"].shape[1] for f, _ in made] == [*widths[:3], max(widths[3], 2)]
        for features, cut in made:
            width = features["input_ids"].shape[1]
            model.tokenizer.backend_tokenizer.no_padding()
            expected = model.tokenizer([texts[i] for i in cut], padding="max_length", max_length=width,
                                     truncation=True, return_tensors="pt")  # fmt: skip
            model.tokenizer.backend_tokenizer.no_padding()
            model.tokenizer.backend_tokenizer.enable_truncation(77)
            if expected["attention_mask"].all():  # a mask that masks nothing is omitted
                del expected["attention_mask"]
            assert set(features) == set(expected)
            assert all(torch.equal(features[name], expected[name]) for name in features)


def test_equal_texts_have_equal_ids(bert):
    """In any column, with their prompts; the masks of InfoNCE depend on these ids."""
    model = SentenceTransformer(str(bert), device="cpu")
    table = pa.table({"a": ["x", "y", "x"], "b": ["y", "z", "z"], script.SOURCE: [0, 0, 0]})
    for prompts, ids in (([], [[0, 1, 0], [1, 2, 2]]), (["query: ", "text: "], [[0, 1, 0], [2, 3, 3]])):
        args = script.parse_args(["--train_data", "x", "--columns", "a", "b"])
        args.prompts = prompts
        args.micro_batch_tokens = 100
        rows, _ = script.read_rows(table, [], [None, None], args)
        batch = script.make_batch(rows, model, None, args, Accelerator(cpu=True))
        query, text = prompts or ["", ""]
        assert [row.query for row in rows] == [query + letter for letter in "xyx"]
        assert [row.documents for row in rows] == [[text + letter] for letter in "yzz"]
        hashes = batch.hashes[:3]
        assert (batch.hashes[3:] == -1).all() and (hashes >= 0).all()
        numbers = torch.tensor(ids).T
        equal = hashes.flatten()[:, None] == hashes.flatten()
        assert torch.equal(equal, numbers.flatten()[:, None] == numbers.flatten())


# ----------------------------------------------------------------------------------------------------------- losses


def embeddings(count, columns, dimensions=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(count, dimensions, generator=generator, dtype=torch.float64) for _ in range(columns)]


def loss_of(columns, ids, labels=None, rows=None, similarity="cosine", dims=(), loss="infonce", **loss_kwargs):
    """Return the loss selected by --loss, --loss_kwargs and --matryoshka_dims, of all rows unless `rows` are given."""
    args = script.parse_args(["--train_data", "x", "--label_column", "y", "--loss", loss])
    args.loss_kwargs, args.matryoshka_dims = loss_kwargs, list(dims)
    model = SimpleNamespace(similarity_fn_name=similarity, get_embedding_dimension=lambda: 8)
    rows = torch.arange(len(columns[0])) if rows is None else rows
    return script.make_loss(args, model)(columns, ids, labels, rows)


def with_duplicates(columns):
    ids = torch.arange(columns * 7).view(columns, 7)
    ids[0, 3] = ids[0, 1]  # an anchor twice
    ids[1, 5] = ids[1, 2]  # a positive twice
    ids[-1, 4] = ids[1, 6]  # with 4 columns, another row's positive as hard negative
    return ids


@pytest.mark.parametrize("columns", [2, 3])
def test_infonce_equals_that_of_sentence_transformers(columns):
    given = embeddings(9, columns)
    reference = losses.MultipleNegativesRankingLoss(None, scale=20.0).compute_loss_from_embeddings(given, None)
    found = loss_of(given, torch.arange(columns * 9).view(columns, 9))
    assert found.item() == pytest.approx(reference.item(), abs=1e-6)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("limit", [1, 20, 60])
def test_chunks_of_scores_change_neither_loss_nor_gradient(monkeypatch, symmetric, limit):
    results = []
    for most in (script.MAX_SCORES, limit):
        monkeypatch.setattr(script, "MAX_SCORES", most)
        given = [column.requires_grad_() for column in embeddings(7, 3)]
        loss = loss_of(given, with_duplicates(3), symmetric=symmetric)
        loss.backward()
        results.append([loss.detach(), *(column.grad for column in given)])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("own, theirs", [("margin_mse", losses.MarginMSELoss), ("kl", losses.DistillKLDivLoss)])
def test_teacher_losses_equal_those_of_sentence_transformers(bert, own, theirs, similarity):
    columns, labels = embeddings(7, 4), torch.randn(7, 3, dtype=torch.float64) * 3
    given = [F.normalize(c, dim=-1) if similarity == "cosine" else c for c in columns]
    expected = theirs(SentenceTransformer(str(bert), device="cpu")).compute_loss_from_embeddings(given, labels)
    ids = torch.arange(4 * 7).view(4, 7)
    found = loss_of(columns, ids, labels, similarity=similarity, loss=own, temperature=1.0)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


PROBABILITIES, COSINES, LOGITS = [[0.9, 0.0], [1.0, 0.2]], [[1.0000001, -0.2], [0.3]], [[9.0, -11.0], [0.5, 0.1]]
DEFAULTS = [  # (scores, --loss_kwargs, default of the bi-encoder, of the cross-encoder)
    (PROBABILITIES, {}, 0.05, 0.05), (COSINES, {}, 0.05, 0.05), (LOGITS, {}, 1.0, 1.0),
    (COSINES, {"temperature": 0.5}, 0.5, 0.05), (LOGITS, {"temperature": 2}, 1.0, 2),
    (COSINES, {"teacher_temperature": 3}, 3, 3), (LOGITS, {"teacher_temperature": 3}, 3, 3),
]  # fmt: skip
STUDENTS = {"train_bi_encoder": "static", "train_cross_encoder": "reranker"}


@pytest.mark.parametrize("name", TRAINERS)
def test_default_temperature_of_a_teacher(name):
    for scores, loss_kwargs, *expected in DEFAULTS:
        args = SimpleNamespace(loss_kwargs=loss_kwargs)
        rows = [SimpleNamespace(labels=labels) for labels in scores]
        importlib.import_module(name).set_teacher_temperature(rows, args)
        assert args.loss_kwargs == loss_kwargs | {"teacher_temperature": expected[TRAINERS.index(name)]}


@pytest.mark.parametrize("loss", ["kl", "margin_mse"])
@pytest.mark.parametrize("name", TRAINERS)
def test_a_model_distilled_into_itself_stays(name, loss, rows, request, in_an_empty_folder, capsys):
    """By default the loss of a model's own cosines, or of its logits / 20, is 0. With the temperature 1 it is not,
    and a warning says so. A resume by the flags of the start, without the default, is not refused."""
    folder, trainer = str(request.getfixturevalue(STUDENTS[name])), importlib.import_module(name)
    codes = [row["code"][:60] for row in rows[:10]]
    texts = [[row["docstring"][:60], *codes[i : i + 3]] for i, row in enumerate(rows[:8])]
    if name == "train_bi_encoder":
        model = SentenceTransformer(folder, device="cpu")
        scores = [model.similarity(model.encode(row[:1]), model.encode(row[1:]))[0] for row in texts]
    else:
        model = CrossEncoder(folder, device="cpu", activation_fn=torch.nn.Identity(), max_length=128)
        scores = [model.predict([(row[0], text) for text in row[1:]]) / 20 for row in texts]
    write_jsonl(Path("x.jsonl"), [dict(zip("abcdy", [*row, y.tolist()])) for row, y in zip(texts, scores)])
    flags = ["--train_data", "x.jsonl", "--label_column", "y", "--loss", loss, "--model_name_or_path", folder,
             "--eval_rows", 0, "--batch_size", 8, "--max_steps", 1, "--dropout", 0]  # fmt: skip

    def run(*more):
        """Return (loss of the step, match of the printed entropies, whether a warning was printed)."""
        trainer.main(trainer.parse_args(merge_flags([*flags, *more])))
        output = capsys.readouterr().out
        entropies = re.search(r"teacher (\d.\d+), model (\d.\d+), equal scores (\d.\d+)", output)
        return metrics(more[1])[0]["loss"], entropies, "lower teacher_temperature" in output

    error, entropies, warned = run("--output_dir", "default")
    assert error < 1e-6 and entropies[1] == entropies[2] < entropies[3] == "1.099" and not warned
    run("--output_dir", "default", "--resume")
    error, entropies, warned = run("--output_dir", "one", "--loss_kwargs", '{"teacher_temperature": 1}')
    assert error > 1e-3 and entropies[1] > entropies[2] and warned


CASES = {"infonce": {}, "symmetric": {"symmetric": True}, "matryoshka": {"dims": [8, 3]}, "dot": {"similarity": "dot"},
         "margin_mse": {"loss": "margin_mse"}, "kl": {"loss": "kl", "infonce": 0.5}}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parts_of_the_rows_add_up_to_the_loss_of_the_batch(case):
    """Each process computes the loss of its part of the rows."""
    given = embeddings(7, 3), with_duplicates(3), torch.arange(14.0).view(7, 2)
    parts = [loss_of(*given, torch.arange(first, 7, 3), **CASES[case]) for first in range(3)]
    assert sum(parts).item() == pytest.approx(loss_of(*given, **CASES[case]).item(), rel=1e-12)


@pytest.mark.parametrize("kind", ["bert", "static"])
def test_held_out_measures_equal_those_of_libraries(kind, rows, request, monkeypatch):
    """Compared with ir_measures and SciPy. Of equal scores, the earlier row ranks first: in the static case, documents
    7 and 40 and query 40 are the same text. The script scores 7 queries at a time."""
    folder = str(request.getfixturevalue(kind))
    model = SentenceTransformer(folder, device="cpu")
    texts = np.array([[row["docstring"], row["code"]] for row in rows[:150]], object)
    queries, documents = (model.encode(column.tolist(), normalize_embeddings=True) for column in texts.T)
    scores = queries @ documents.T
    clear = np.abs(scores - scores.diagonal()[:, None]) + np.eye(150) > 1e-5  # else ranks depend on rounding
    kept = np.flatnonzero(clear.all(1))[:60]
    texts, queries, documents = texts[kept], queries[kept], documents[kept]
    if kind == "static":
        texts[40], queries[40], documents[40] = texts[7, 1], documents[7], documents[7]
    scores = queries @ documents.T
    scores[:, 40] = scores[:, 7] if kind == "static" else scores[:, 40]
    ranked = np.argsort(-scores, kind="stable").tolist()
    run = {str(i): {str(j): -float(rank) for rank, j in enumerate(row)} for i, row in enumerate(ranked)}
    measures = {"MRR@10": ir_measures.RR @ 10, "nDCG@10": ir_measures.nDCG @ 10, "accuracy@1": ir_measures.P @ 1}
    found = ir_measures.calc_aggregate(measures.values(), {name: {name: 1} for name in run}, run)

    monkeypatch.setattr(script, "MAX_SCORES", 7 * 60)
    labels = [len(text) % 9 / 9 for text in texts[:, 1]]
    args = script.parse_args(["--train_data", "x", "--model_name_or_path", folder])
    args.micro_batch_tokens = 600
    model = script.load_model(args)

    def evaluate(*more, labels=None):
        """Return the measures of the rows, with `more` documents each."""
        rows = [script.Row(query, [document, *more], []) for query, document in texts]
        for row, label in zip(rows, labels or []):
            row.labels = [label]
        held_out = script.open_eval_sets(rows, args)
        return script.evaluate(model, held_out, args, Accelerator(cpu=True))

    expected = {name: found[measure] for name, measure in measures.items()}
    assert evaluate() == pytest.approx(expected, abs=1e-9)
    pair = scores.diagonal(), labels
    expected = {"Spearman": scipy.stats.spearmanr(*pair)[0], "Pearson": scipy.stats.pearsonr(*pair)[0]}
    # nearly equal scores may swap ranks
    assert evaluate(labels=labels) == pytest.approx(expected, abs=3e-3)
    assert evaluate("a hard negative", labels=labels) == pytest.approx(expected, abs=3e-3)  # labels: of the first


def test_search_leaves_out_the_querys_own_id():
    """The 40 best documents are those of the whole ranking without it; measures equal those of ir_measures."""
    queries, documents = torch.randn(5, 8), torch.randn(60, 8)
    names = [f"d{i}" for i in range(60)]
    qrels = pd.DataFrame({"query": names[:5], "q0": "0", "docid": names[20:25], "rel": [1, 2, 0, 3, 1]})
    eval_set = script.EvalSet(dict.fromkeys(names[:5]), dict.fromkeys(names), qrels)
    run = {name: {other: score for other, score in zip(names, row) if other != name}
           for name, row in zip(names, (queries @ documents.T).tolist())}  # fmt: skip
    found = pd.DataFrame(script.search(queries, documents, eval_set, 40))
    for query in names[:5]:
        ranked = sorted(run[query], key=run[query].get, reverse=True)
        own = found[found["query"] == query]
        assert own["docid"].tolist()[:40] == ranked[:40] and own["rank"].tolist()[:40] == [*range(1, 41)]
        assert own["score"].tolist() == pytest.approx([run[query][name] for name in own["docid"]])
    script.add_metrics({"one": eval_set}, script.parse_args(["--train_data", "x"]))
    run = script.search(queries, documents, eval_set, 60)
    measured = eval_set.metric.compute(predictions=[run], references=[qrels.to_dict("list")])
    measures = {"MRR@10": ir_measures.RR @ 10, "nDCG@10": ir_measures.nDCG @ 10, "accuracy@1": ir_measures.P @ 1}
    qrels = qrels.rename(columns={"query": "query_id", "docid": "doc_id", "rel": "relevance"})
    run = pd.DataFrame(run).rename(columns={"query": "query_id", "docid": "doc_id"})
    found = ir_measures.calc_aggregate(measures.values(), qrels, run)
    assert measured == pytest.approx({name: found[measure] for name, measure in measures.items()})


def test_other_losses_refuse_rows_with_fewer_labels():
    labels = torch.rand(7, 2, dtype=torch.float64)
    labels[4, 1] = torch.nan  # missing
    with pytest.raises(script.UserError, match="^--loss CoSENTLoss requires equally many labels in all rows of 'y'$"):
        loss_of(embeddings(7, 2), torch.arange(14).view(2, 7), labels, loss="CoSENTLoss")


def test_matryoshka_is_the_sum_over_truncated_embeddings():
    """The full embedding is included only if its size is given; a larger size is refused."""
    ids, given = torch.arange(14).view(2, 7), embeddings(7, 2)
    parts = [loss_of([column[:, :size] for column in given], ids) for size in (8, 3)]
    assert loss_of(given, ids, dims=[8, 3]).item() == pytest.approx(sum(parts).item(), abs=1e-9)
    parts = [loss_of([column[:, :size] for column in given], ids, similarity="dot") for size in (8, 3)]
    assert loss_of(given, ids, similarity="dot", dims=[8, 3]).item() == pytest.approx(sum(parts).item(), abs=1e-9)
    with pytest.raises(script.UserError, match="--matryoshka_dims"):
        loss_of(given, ids, dims=[9])


@pytest.mark.parametrize("similarity, temperature", [("cosine", 0.05), ("dot", 1.0)])
@pytest.mark.parametrize("loss", ["infonce", "kl"])
def test_default_temperature(loss, similarity, temperature):
    """Dot products are logits."""
    given = embeddings(7, 3), torch.arange(21).view(3, 7), torch.arange(14.0).view(7, 2)
    found = loss_of(*given, similarity=similarity, loss=loss)
    assert found == loss_of(*given, similarity=similarity, loss=loss, temperature=temperature)
    assert found != loss_of(*given, similarity=similarity, loss=loss, temperature=0.5)


@pytest.mark.parametrize("name", ["MSELoss", "EmbedDistillLoss"])
def test_losses_whose_labels_are_embeddings_are_refused(name, bert):
    """They would take the vectors of the first rows for those of all anchors and all positives."""
    flags = ["--train_data", "x", "--model_name_or_path", str(bert), "--loss", name, "--label_column", "vectors"]
    args = script.parse_args(flags)
    with pytest.raises(script.UserError, match="requires embeddings as labels: see docs/recipes"):
        script.make_loss(args, script.load_model(args))
