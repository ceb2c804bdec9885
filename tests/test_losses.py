"""Parts of a step, each compared with a naive loop or a library: partition, micro-batches, losses, measures."""

import importlib
import json
import math
import re
from contextlib import nullcontext, suppress
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import ir_measures
import numpy as np
import pyarrow as pa
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from conftest import ROOT, TRAINERS, metrics, write_jsonl
from forked import merge_flags
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer import losses

import train_bi_encoder as script


def parse(*flags, model="x"):
    """Return Args of flags, with those that are required."""
    columns = [] if "--columns" in flags else ["--columns", "a", "b"]
    return script.parse_args(["--train_data", "x", *columns, "--model_name_or_path", model, *flags])


# ------------------------------------------------------------------------------------- partition and micro-batches


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_partition_balances_count_and_length(processes):
    """Each process reads its own rows of a batch; together they read each once."""
    lengths = np.random.default_rng(0).pareto(1.5, 257).astype(int) + 1
    size = -(-257 // processes)
    table = pa.table({"a": ["x" * length for length in lengths], "b": [f"{number}" for number in range(257)],
                      script.SOURCE: [0] * 257, script.LENGTH: lengths})  # fmt: skip
    args = parse("--columns", "a", "b", "--batch_size", "257")
    data = SimpleNamespace(sources=[SimpleNamespace(args=args)], lookups=[None, None])
    dealt = []
    for process in range(processes):
        accelerator = SimpleNamespace(num_processes=processes, process_index=process)
        rows, *_ = next(script.local_batches(iter([(table, None)]), 0, data, args, accelerator))
        dealt.append([int(row.documents[0]) for row in rows])
        assert dealt[-1] == sorted(dealt[-1])
    assert sorted(chain.from_iterable(dealt)) == list(range(257))
    assert max(map(len, dealt)) == size and min(map(len, dealt)) >= size - 1
    totals = [lengths[part].sum() for part in dealt]
    assert max(totals) - min(totals) <= lengths.max()


def test_micro_batches_respect_max_tokens_and_a_longer_text_is_alone():
    lengths = np.array([*np.random.default_rng(0).integers(0, 90, 200), 500, 0, 0])
    cuts = script.cut(lengths, 256, 4)
    assert sorted(chain.from_iterable(cuts)) == list(range(203))
    assert cuts[0] == [200]  # 500 tokens, more than max_tokens
    assert all(len(cut) * lengths[cut].max() <= 256 for cut in cuts[1:])
    assert lengths[list(chain.from_iterable(cuts))].tolist() == sorted(lengths, reverse=True)
    assert script.cut(lengths[:0], 256, 4) == []
    few = np.array([250] + [1] * 1000)  # a long text and many short ones never share a micro-batch
    assert all(len(cut) * few[cut].max() <= 256 for cut in script.cut(few, 256, 4))
    assert len(script.cut(np.full(100, 10), 256, 4)) <= 5  # not smaller than necessary


@pytest.mark.parametrize("max_tokens", [256, 2048, 16384])
@pytest.mark.parametrize("share", [8, 64])
def test_micro_batches_have_little_padding_and_are_few(max_tokens, share):
    """At most 1/share of `max_tokens` is padding, and there are no more than if each were filled."""
    lengths = np.random.default_rng(1).gamma(2, 30, 1500).astype(int).clip(3, 256)
    cuts = script.cut(lengths, max_tokens, max_tokens / share)
    for positions in cuts:
        assert len(positions) * lengths[positions[0]] - lengths[positions].sum() <= max_tokens / share
    filled = script.fill(lengths, max_tokens, max_tokens / share)
    assert len(cuts) == len(filled)
    for positions, following in zip(filled, filled[1:]):  # no two neighbours would fit into one
        joined = lengths[[*positions, *following[:1]]]
        padded = joined[0] * len(joined)
        assert padded > max_tokens or padded - joined.sum() > max_tokens / share


@pytest.mark.parametrize("factor", [1.1, 2.0, 3.5])
def test_micro_batches_are_equally_large(factor):
    """None is left with a few texts: a GPU takes as long to launch it as thousands of tokens."""
    lengths = np.random.default_rng(3).integers(10, 90, 2000)
    max_tokens = int(lengths.sum() / factor)
    sizes = [lengths[positions].sum() for positions in script.spread(lengths, max_tokens)]
    assert len(sizes) == math.ceil(lengths.sum() / max_tokens) and max(sizes) <= max_tokens
    assert min(sizes) > 0.99 * max(sizes)


def test_micro_batches_of_a_gpu_are_fewer_and_fuller():
    """There, launching a pass takes as long as thousands of tokens: up to an eighth of a micro-batch is padding."""
    lengths = np.random.default_rng(2).gamma(2, 20, 300).astype(int).clip(3, 200)
    mask = (np.arange(200) < lengths[:, None]).astype(int)
    features = {"input_ids": mask, "attention_mask": mask}
    of_cpu, of_gpu = (
        list(script.split_features(features, 4096, torch.device(name), needs_mask=True)) for name in ("cpu", "cuda")
    )
    assert sorted(chain.from_iterable(positions for positions, _ in of_gpu)) == list(range(300))
    assert len(of_gpu) < 0.75 * len(of_cpu), (len(of_gpu), len(of_cpu))
    for positions, part in of_gpu:
        size = part["input_ids"].size
        assert size <= 4096 and part["input_ids"].shape[1] % 8 == 0
        assert size - (-(-lengths[positions] // 8) * 8).sum() <= 4096 / 8


@pytest.mark.parametrize("longest", [90, 255, 500])
def test_micro_batches_of_concatenated_texts(longest):
    """Whatever the longest text, they have at most so many tokens, are nearly as few as possible, and of equal size;
    the longest texts come first."""
    lengths = np.array([longest, *np.random.default_rng(0).integers(1, 90, 200)])
    passes = script.spread(lengths, 256)
    sizes = [lengths[positions].sum() for positions in passes]
    assert sorted(chain.from_iterable(passes)) == list(range(201))
    assert passes[0][0] == 0 and all(np.all(np.diff(lengths[positions]) <= 0) for positions in passes)
    assert sizes[0] == longest > 256 or sizes[0] <= 256
    others = sizes[longest > 256 :]
    assert max(others) <= 256 and min(others) > 0.9 * max(others)
    assert len(passes) <= math.ceil(lengths.clip(max=256).sum() / 256) + 2


@pytest.mark.parametrize("device, widths", [("cpu", [77, 72, 9, 5, 2]), ("xpu", [77, 72, 16, 8, 8])])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_features_equal_those_of_the_tokenizer(bert, side, device, widths):
    """The same tensors; on an accelerator, widths are multiples of 8, up to the model's limit. A prompt is part of a
    text; texts of all roles share micro-batches."""
    model = SentenceTransformer(str(bert), device="cpu", prompts={"query": "write a ", "document": ""})
    model.max_seq_length = 77
    model.tokenizer.padding_side = side
    texts = ["file " * count for count in (70, 7, 500, 0)]  # 72, 9, 77 and 2 tokens with [CLS] and [SEP]
    accelerator = SimpleNamespace(device=torch.device(device))
    given = [("document", "", text) for text in texts] + [("query", "write a ", "line")]
    texts += ["write a line"]
    for max_tokens, count in ((10, 5), (10**6, 1)):
        args = script.Args(micro_batch_tokens=max_tokens)
        made = []
        for role, places, features in script.make_micro_batches(model, given, args, accelerator):
            made.append((role, places, script.convert_arrays(features)))
        assert [role for role, *_ in made] == ["text"] * count
        padded = sum(features["input_ids"].numel() for *_, features in made)
        assert script.token_counts(made) == (72 + 9 + 77 + 2 + 5, padded)
        assert sorted(chain.from_iterable(places for _, places, _ in made)) == list(range(5))
        if count == 5:
            assert [f["input_ids"].shape[1] for *_, f in made] == widths
        for _, places, features in made:
            width = features["input_ids"].shape[1]
            expected = model.tokenizer([texts[i] for i in places], padding="max_length", max_length=width,
                                     truncation=True, return_tensors="pt")  # fmt: skip
            if expected["attention_mask"].all():  # a mask that masks nothing is omitted
                del expected["attention_mask"]
            tensors = {name for name in features if torch.is_tensor(features[name])}
            assert tensors == set(expected)
            assert all(torch.equal(features[name], expected[name]) for name in tensors)


def test_equal_texts_have_equal_hashes(bert):
    """In any column, with their prompts; the masks of InfoNCE depend on them."""
    table = pa.table({"a": ["x", "y", "x"], "b": ["y", "z", "z"], script.SOURCE: [0, 0, 0]})
    accelerator = Accelerator(cpu=True)
    for query, text, numbers in (("", "", [[0, 1, 0], [1, 2, 2]]), ("query: ", "text: ", [[0, 1, 0], [2, 3, 3]])):
        flags = ["--query_prompt", query, "--document_prompt", text]
        args = parse("--columns", "a", "b", *flags, model=str(bert))
        model = script.load_model(args)
        args = script.resolve_args(args, model, accelerator)
        rows, _ = script.read_rows(table, [SimpleNamespace(args=args)], [None, None], 0)
        batch = script.batch_to_torch(script.make_batch(rows, 0, model, args, accelerator))
        hashes = batch.hashes[:3]
        assert (batch.hashes[3:] == -1).all() and (hashes >= 0).all()
        numbers = torch.tensor(numbers).T
        equal = hashes.flatten()[:, None] == hashes.flatten()
        assert torch.equal(equal, numbers.flatten()[:, None] == numbers.flatten())


# ----------------------------------------------------------------------------------------------------------- losses


def embeddings(count, columns, dimensions=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(count, dimensions, generator=generator, dtype=torch.float64) for _ in range(columns)]


def loss_of(embeddings, hashes, labels=None, similarity="cosine", dims=(), loss="infonce", **loss_kwargs):
    """Return the loss selected by --loss, --loss_kwargs and --matryoshka_dims, of all rows."""
    args = parse()
    args.label_column = ["y"]
    args.loss, args.loss_kwargs, args.matryoshka_dims = loss, loss_kwargs, list(dims)
    model = SimpleNamespace(similarity_fn_name=similarity, get_embedding_dimension=lambda: 8)
    model.truncate_embeddings = nullcontext
    labels = torch.full((len(embeddings[0]), 1), torch.nan) if labels is None else labels
    whole = script.WholeBatch(hashes, labels, torch.arange(len(embeddings[0])), 0)
    return script.make_loss(args, model)(embeddings, whole)


@pytest.mark.parametrize("columns", [2, 3])
def test_infonce_equals_that_of_sentence_transformers(columns):
    given = embeddings(9, columns)
    reference = losses.MultipleNegativesRankingLoss(None, scale=20.0).compute_loss_from_embeddings(given, None)
    found = loss_of(given, torch.arange(columns * 9).view(columns, 9))
    assert found.item() == pytest.approx(reference.item(), abs=1e-6)


def losses_of_the_library():
    """Return {class of --loss: (texts of a row that it reads, how it compares them, its labels)}: the table of
    docs/training.md."""
    page = (ROOT / "docs/training.md").read_text().partition("### Losses of sentence-transformers\n")[2]
    rows = [line.split("|")[1:-1] for line in page.partition("\n#")[0].splitlines() if line.startswith("| `")]
    return {name: tuple(map(str.strip, row[1:])) for row in rows for name in re.findall(r"\w+Loss", row[0])}


def test_the_page_lists_the_losses_of_the_library(bert):
    model = SentenceTransformer(str(bert), device="cpu")
    taken = set()
    for name in losses.__all__:
        with suppress(script.UserError):
            script.library_loss(parse("--loss", name), model)
            taken.add(name)
    listed = losses_of_the_library()
    assert listed.keys() == taken
    for name, (required, _) in script.REQUIRED.items():
        assert listed[name][2] == required.partition(" (")[0]


@pytest.mark.parametrize("name", losses_of_the_library())
def test_losses_of_the_library_are_its_own(bert, name):
    """On a cosine model, too: the library's own call has the same value. Embeddings of three times the length, and
    others of a text, change it if they do so by the page's table."""
    reads, compares, labels = losses_of_the_library()[name]
    count = {"the first two": 2, "three": 3, "all": 4}[reads]  # texts of a row
    given = embeddings(8, max(count, 3) if name in ("CoSENTLoss", "CosineSimilarityLoss") else count)
    values = {"none": None, "one a document": torch.randn(8, 3, dtype=torch.float64)}
    values = values.get(labels, torch.tensor([[0.0], [1.0]] * 4, dtype=torch.float64))
    args = parse("--loss", name, *["--label_column", "y"] * (values is not None))
    model = SentenceTransformer(str(bert), device="cpu")
    assert model.similarity_fn_name == "cosine"

    def loss(parts):
        given_labels = torch.full((8, 1), torch.nan) if values is None else values
        whole = script.WholeBatch(torch.arange(len(parts) * 8).view(-1, 8), given_labels, torch.arange(8), 0)
        return script.make_loss(args, model)(parts, whole).item()

    found = getattr(losses, name)(model).compute_loss_from_embeddings(
        given, values if count > 2 else values.squeeze(1)
    )
    expected = float(sum(found.values()) if isinstance(found, dict) else found)
    assert loss(given) == pytest.approx(expected, rel=1e-9)
    changed = loss([3 * part for part in given]) != pytest.approx(expected, rel=1e-5)
    assert changed == (compares in ("dot product", "Euclidean distance"))
    for column in range(len(given)):
        changed = loss([part.cumsum(1) if column == other else part for other, part in enumerate(given)])
        assert (changed != pytest.approx(expected, rel=1e-6)) == (column < count), column


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
    flags = ["--train_data", "x.jsonl", "--columns", *"abcd", "--label_column", "y", "--loss", loss,
             "--model_name_or_path", folder,
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


@pytest.mark.parametrize("loss", ["MultipleNegativesRankingLoss", "TripletLoss"])
def test_a_loss_of_the_library_that_reads_no_labels(loss, static):
    """Labels of 0 would be ignored: their pairs would be positives."""
    model = SentenceTransformer(str(static), device="cpu")
    with pytest.raises(script.UserError, match=f"^--label_column: --loss {loss} reads no labels: leave it out"):
        script.make_loss(parse("--loss", loss, "--label_column", "y"), model)


@pytest.mark.parametrize("kind", ["bert", "static"])
def test_held_out_measures_equal_those_of_libraries(kind, rows, request):
    """Compared with ir_measures and SciPy. Equal texts are one, and each positive of a query is relevant: in the
    static case, documents 7 and 40 and query 40 are the same text, and queries 3 and 4."""
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
        texts[4, 0], queries[4] = texts[3, 0], queries[3]
    scores = (queries @ documents.T).astype(float)
    run, qrels = {}, {}
    for (query, document), row in zip(texts, scores):
        qrels.setdefault(query, {})[document] = 1
        run[query] = dict(zip(texts[:, 1], row.tolist()))
    measures = {"ndcg@10": ir_measures.nDCG @ 10, "mrr@10": ir_measures.RR @ 10, "accuracy@1": ir_measures.P @ 1,
                "precision@10": ir_measures.P @ 10, "recall@10": ir_measures.R @ 10}  # fmt: skip
    found = ir_measures.calc_aggregate(measures.values(), qrels, run)

    labels = [len(text) % 9 / 9 for text in texts[:, 1]]
    args = parse("--query_prompt", "", "--document_prompt", "", model=folder)
    model = script.load_model(args)
    args = script.resolve_args(args, model, Accelerator(cpu=True))

    def evaluate(*more, labels=None):
        """Return the measures of the rows, with `more` documents each."""
        rows = [script.Row(query, [document, *more], [], {script.SOURCE: 0}) for query, document in texts]
        for row, label in zip(rows, labels or []):
            row.labels = [label]
        data = SimpleNamespace(held_out=[(SimpleNamespace(args=args), rows)])
        evaluators = script.open_evaluators(data, model, args)
        assert list(evaluators) == ["held_out_spearman_cosine" if labels else "held_out_cosine_ndcg@10"]
        return script.evaluate(model, evaluators, Accelerator(cpu=True))

    measured = evaluate()
    assert measured.pop("held_out_cosine_map@10") > 0
    expected = {f"held_out_cosine_{name}": found[measure] for name, measure in measures.items()}
    assert measured == pytest.approx(expected, abs=1e-9)
    pair = scores.diagonal(), labels
    expected = {
        "held_out_spearman_cosine": scipy.stats.spearmanr(*pair)[0],
        "held_out_pearson_cosine": scipy.stats.pearsonr(*pair)[0],
    }
    # nearly equal scores may swap ranks
    assert evaluate(labels=labels) == pytest.approx(expected, abs=3e-3)
    assert evaluate("a hard negative", labels=labels) == pytest.approx(expected, abs=3e-3)  # labels: of the first


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
