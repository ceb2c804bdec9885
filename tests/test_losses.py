"""Parts of a step, each compared with a naive loop or a library: partition, micro-batches, losses, measures."""

import importlib
import json
from contextlib import nullcontext
from itertools import chain
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


def parse(*flags, model="x"):
    """Return Args of flags, with those that are required."""
    return script.parse_args(["--train_data", "x", "--model_name_or_path", model, *flags])


# ------------------------------------------------------------------------------------- partition and micro-batches


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_partition_balances_count_and_length(processes, monkeypatch):
    """Each process reads its own rows of a batch; together they read each once."""
    lengths = np.random.default_rng(0).pareto(1.5, 257).astype(int) + 1
    size = -(-257 // processes)
    table = pa.table({"a": ["x" * length for length in lengths], "b": [f"{number}" for number in range(257)],
                      script.SOURCE: [0] * 257})  # fmt: skip
    monkeypatch.setattr(script, "row_lengths", lambda *_: lengths)
    monkeypatch.setattr(script, "make_batch", lambda rows, *_: SimpleNamespace(rows=rows))
    args = parse("--columns", "a", "b", "--batch_size", "257")
    data = SimpleNamespace(sources=[], lookups=[None, None])
    dealt = []
    for process in range(processes):
        accelerator = SimpleNamespace(num_processes=processes, process_index=process)
        batch = next(script.local_batches(iter([(table, None)]), 0, None, data, args, accelerator))
        dealt.append([int(row.documents[0]) for row in batch.rows])
        assert dealt[-1] == sorted(dealt[-1])
    assert sorted(chain.from_iterable(dealt)) == list(range(257))
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
    cost_of_a_pass = max_tokens / (64 if max_tokens <= 2048 else 16)
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


def test_equal_texts_have_equal_hashes(bert):
    """In any column, with their prompts; the masks of InfoNCE depend on them."""
    model = SentenceTransformer(str(bert), device="cpu")
    table = pa.table({"a": ["x", "y", "x"], "b": ["y", "z", "z"], script.SOURCE: [0, 0, 0]})
    for query, text, numbers in (("", "", [[0, 1, 0], [1, 2, 2]]), ("query: ", "text: ", [[0, 1, 0], [2, 3, 3]])):
        args = parse("--columns", "a", "b", "--query_prompt", query, "--document_prompt", text)
        args.micro_batch_tokens = 100
        rows, _ = script.read_rows(table, [], [None, None], 0, args)
        batch = script.make_batch(rows, 0, model, args, Accelerator(cpu=True))
        assert [row.query for row in rows] == [query + letter for letter in "xyx"]
        assert [row.documents for row in rows] == [[text + letter] for letter in "yzz"]
        hashes = batch.hashes[:3]
        assert (batch.hashes[3:] == -1).all() and (hashes >= 0).all()
        numbers = torch.tensor(numbers).T
        equal = hashes.flatten()[:, None] == hashes.flatten()
        assert torch.equal(equal, numbers.flatten()[:, None] == numbers.flatten())


# ----------------------------------------------------------------------------------------------------------- losses


def embeddings(count, columns, dimensions=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(count, dimensions, generator=generator, dtype=torch.float64) for _ in range(columns)]


def loss_of(columns, hashes, labels=None, mine=None, similarity="cosine", dims=(), loss="infonce", **loss_kwargs):
    """Return the loss selected by --loss, --loss_kwargs and --matryoshka_dims, of all rows unless `mine` are given."""
    args = parse("--label_column", "y")
    args.loss, args.loss_kwargs, args.matryoshka_dims = loss, loss_kwargs, list(dims)
    model = SimpleNamespace(similarity_fn_name=similarity, get_embedding_dimension=lambda: 8)
    model.truncate_embeddings = nullcontext
    mine = torch.arange(len(columns[0])) if mine is None else mine
    labels = torch.full((len(columns[0]), 1), torch.nan) if labels is None else labels
    return script.make_loss(args, model)(columns, script.WholeBatch(hashes, labels, mine, 0))


@pytest.mark.parametrize("columns", [2, 3])
def test_infonce_equals_that_of_sentence_transformers(columns):
    given = embeddings(9, columns)
    reference = losses.MultipleNegativesRankingLoss(None, scale=20.0).compute_loss_from_embeddings(given, None)
    found = loss_of(given, torch.arange(columns * 9).view(columns, 9))
    assert found.item() == pytest.approx(reference.item(), abs=1e-6)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("own, theirs", [("margin_mse", losses.MarginMSELoss), ("kl", losses.DistillKLDivLoss)])
def test_teacher_losses_equal_those_of_sentence_transformers(bert, own, theirs, similarity):
    columns, labels = embeddings(7, 4), torch.randn(7, 3, dtype=torch.float64) * 3
    given = [F.normalize(c, dim=-1) if similarity == "cosine" else c for c in columns]
    expected = theirs(SentenceTransformer(str(bert), device="cpu")).compute_loss_from_embeddings(given, labels)
    hashes = torch.arange(4 * 7).view(4, 7)
    temperatures = {"temperature": 1.0, "teacher_temperature": 1.0}
    found = loss_of(columns, hashes, labels, similarity=similarity, loss=own, **temperatures)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


STUDENTS = {"train_bi_encoder": "static", "train_cross_encoder": "reranker"}


@pytest.mark.parametrize("loss", ["kl", "margin_mse"])
@pytest.mark.parametrize("name", TRAINERS)
def test_a_model_distilled_into_itself_stays(name, loss, rows, request, in_an_empty_folder, capsys):
    """The loss of a model's own cosines with the same temperature, or of its logits, is 0; of other temperatures it is
    not. Without a temperature of the teacher, the flags are refused, with advice for both."""
    folder, trainer = str(request.getfixturevalue(STUDENTS[name])), importlib.import_module(name)
    codes = [row["code"][:60] for row in rows[:10]]
    texts = [[row["docstring"][:60], *codes[i : i + 3]] for i, row in enumerate(rows[:8])]
    if name == "train_bi_encoder":
        model = SentenceTransformer(folder, device="cpu")
        scores = [model.similarity(model.encode(row[:1]), model.encode(row[1:]))[0] for row in texts]
    else:
        model = CrossEncoder(folder, device="cpu", activation_fn=torch.nn.Identity(), max_length=128)
        scores = [model.predict([(row[0], text) for text in row[1:]]) for row in texts]
    write_jsonl(Path("x.jsonl"), [dict(zip("abcdy", [*row, y.tolist()])) for row, y in zip(texts, scores)])
    flags = ["--train_data", "x.jsonl", "--label_column", "y", "--loss", loss, "--model_name_or_path", folder,
             "--eval_rows", 0, "--batch_size", 8, "--max_steps", 1, "--dropout", 0]  # fmt: skip

    def loss_of_step(teacher_temperature):
        output = f"{teacher_temperature}"
        kwargs = json.dumps({"teacher_temperature": teacher_temperature})
        trainer.main(trainer.parse_args(merge_flags([*flags, "--loss_kwargs", kwargs, "--output_dir", output])))
        return metrics(output)[0]["loss"]

    same, other = (0.05, 1) if name == "train_bi_encoder" else (1, 20)
    assert loss_of_step(same) < 1e-6 and loss_of_step(other) > 1e-3
    with pytest.raises(SystemExit):
        trainer.parse_args(merge_flags(flags))
    error = capsys.readouterr().err
    assert '--loss_kwargs must have "teacher_temperature": 1 for logits; for cosines' in error


@pytest.mark.parametrize("kind", ["bert", "static"])
def test_held_out_measures_equal_those_of_libraries(kind, rows, request):
    """Compared with ir_measures and SciPy. Of equal scores, the earlier row ranks first: in the static case, documents
    7 and 40 and query 40 are the same text."""
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
    measures = {"RR@10": ir_measures.RR @ 10, "nDCG@10": ir_measures.nDCG @ 10, "Success@1": ir_measures.P @ 1}
    found = ir_measures.calc_aggregate(measures.values(), {name: {name: 1} for name in run}, run)

    labels = [len(text) % 9 / 9 for text in texts[:, 1]]
    args = parse("--query_prompt", "", "--document_prompt", "", model=folder)
    args.micro_batch_tokens = 600
    model = script.load_model(args)

    def evaluate(*more, labels=None):
        """Return the measures of the rows, with `more` documents each."""
        rows = [script.Row(query, [document, *more], [], {script.SOURCE: 0}) for query, document in texts]
        for row, label in zip(rows, labels or []):
            row.labels = [label]
        return script.evaluate_model(model, script.open_eval_sets(rows, args), args, Accelerator(cpu=True))

    expected = {name: found[measure] for name, measure in measures.items()}
    assert evaluate() == pytest.approx(expected, abs=1e-9)
    pair = scores.diagonal(), labels
    expected = {"Spearman": scipy.stats.spearmanr(*pair)[0], "Pearson": scipy.stats.pearsonr(*pair)[0]}
    # nearly equal scores may swap ranks
    assert evaluate(labels=labels) == pytest.approx(expected, abs=3e-3)
    assert evaluate("a hard negative", labels=labels) == pytest.approx(expected, abs=3e-3)  # labels: of the first


def test_search_leaves_out_the_querys_own_id():
    """The 40 best documents are those of the whole ranking without it; measures equal those of ir_measures."""
    queries, documents = (torch.randn(count, 8, dtype=torch.float64) for count in (5, 60))
    names = [f"d{i}" for i in range(60)]
    qrels = {"query_id": names[:5], "doc_id": names[20:25], "relevance": [1, 2, 0, 3, 1]}
    eval_set = script.EvalSet(dict.fromkeys(names[:5]), dict.fromkeys(names), pd.DataFrame(qrels))
    args = parse()
    run = {name: {other: score for other, score in zip(names, row) if other != name}
           for name, row in zip(names, (queries @ documents.T).tolist())}  # fmt: skip
    found = script.search(queries, documents, eval_set, args, 40)
    for query in names[:5]:
        ranked = sorted(run[query], key=run[query].get, reverse=True)
        own = found[found["query_id"] == query]
        assert own["doc_id"].tolist() == ranked[:40]
        assert own["score"].tolist() == pytest.approx([run[query][name] for name in own["doc_id"]])
    measures = {"RR@10": ir_measures.RR @ 10, "nDCG@10": ir_measures.nDCG @ 10, "Success@1": ir_measures.P @ 1}
    expected = ir_measures.calc_aggregate(measures.values(), eval_set.qrels, run)
    measured = script.measure_ranking(script.search(queries, documents, eval_set, args), eval_set.qrels)
    assert measured == pytest.approx({name: expected[measure] for name, measure in measures.items()})
    args.keep_same_id = True
    found = script.search(documents[:5], documents, eval_set, args, 40)
    assert set(found.groupby("query_id").size()) == {40} and (found["query_id"] == found["doc_id"]).sum() == 5


def test_other_losses_refuse_rows_with_fewer_labels():
    labels = torch.rand(7, 2, dtype=torch.float64)
    labels[4, 1] = torch.nan  # missing
    with pytest.raises(script.UserError, match="^--loss CoSENTLoss requires equally many documents and labels in"):
        loss_of(embeddings(7, 2), torch.arange(14).view(2, 7), labels, loss="CoSENTLoss")


def test_matryoshka_is_the_sum_over_truncated_embeddings():
    """The full embedding is included only if its size is given; a larger size is refused."""
    hashes, given = torch.arange(14).view(2, 7), embeddings(7, 2)
    parts = [loss_of([column[:, :size] for column in given], hashes) for size in (8, 3)]
    assert loss_of(given, hashes, dims=[8, 3]).item() == pytest.approx(sum(parts).item(), abs=1e-9)
    parts = [loss_of([column[:, :size] for column in given], hashes, similarity="dot") for size in (8, 3)]
    assert loss_of(given, hashes, similarity="dot", dims=[8, 3]).item() == pytest.approx(sum(parts).item(), abs=1e-9)
    with pytest.raises(script.UserError, match="--matryoshka_dims"):
        loss_of(given, hashes, dims=[9])


@pytest.mark.parametrize("similarity, temperature", [("cosine", 0.05), ("dot", 1.0)])
@pytest.mark.parametrize("loss, more", [("infonce", {}), ("kl", {"teacher_temperature": 1})])
def test_default_temperature(loss, more, similarity, temperature):
    """Dot products are logits."""
    given = embeddings(7, 3), torch.arange(21).view(3, 7), torch.arange(14.0).view(7, 2)
    found = loss_of(*given, similarity=similarity, loss=loss, **more)
    assert found == loss_of(*given, similarity=similarity, loss=loss, temperature=temperature, **more)
    assert found != loss_of(*given, similarity=similarity, loss=loss, temperature=0.5, **more)


@pytest.mark.parametrize("name", ["MSELoss", "EmbedDistillLoss"])
def test_losses_whose_labels_are_embeddings_are_refused(name, bert):
    """They would take the vectors of the first rows for those of all anchors and all positives."""
    args = parse("--loss", name, "--label_column", "vectors", model=str(bert))
    with pytest.raises(script.UserError, match="requires embeddings as labels: see docs/recipes"):
        script.make_loss(args, script.load_model(args))
