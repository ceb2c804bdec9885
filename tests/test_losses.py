"""Parts of a step, each compared with a naive loop or a library: partition, micro-batches, losses, measures."""

import inspect
import json
import re
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from conftest import ROOT, metrics, train, write_jsonl
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses

import train_bi_encoder as script


def parse(*flags, model="x"):
    """Return Args of flags, with those that are required."""
    columns = [] if "--columns" in flags else ["--columns", "a", "b"]
    return script.parse_args(["--train_data", "x", *columns, "--model_name_or_path", model, *flags])


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
    assert all(len(cut) * lengths[cut].max() - lengths[cut].sum() <= 4 for cut in cuts)  # padding
    assert lengths[list(chain.from_iterable(cuts))].tolist() == sorted(lengths, reverse=True)
    assert script.cut(lengths[:0], 256, 4) == []
    few = np.array([250] + [1] * 1000)  # a long text and many short ones never share a micro-batch
    assert all(len(cut) * few[cut].max() <= 256 for cut in script.cut(few, 256, 4))
    assert len(script.cut(np.full(100, 10), 256, 4)) <= 5  # not smaller than necessary


def test_micro_batches_of_a_gpu_are_fewer_and_fuller():
    """There, launching a pass takes as long as thousands of tokens: up to an eighth of a micro-batch is padding."""
    lengths = np.random.default_rng(2).gamma(2, 20, 300).astype(int).clip(3, 200)
    mask = (np.arange(200) < lengths[:, None]).astype(int)
    features = {"input_ids": mask, "attention_mask": mask}
    devices = torch.device("cpu"), torch.device("cuda")
    of_cpu, of_gpu = (list(script.split_features(features, 4096, device)) for device in devices)
    assert sorted(chain.from_iterable(positions for positions, _ in of_gpu)) == list(range(300))
    assert len(of_gpu) < 0.75 * len(of_cpu), (len(of_gpu), len(of_cpu))
    for positions, part in of_gpu:
        size = part["input_ids"].size
        assert size <= 4096 and part["input_ids"].shape[1] % 8 == 0
        assert size - (-(-lengths[positions] // 8) * 8).sum() <= 4096 / 8


@pytest.mark.parametrize("side", [-1, 1])
def test_a_text_without_a_token_moves_no_padding(side):
    """As an empty one of a tokenizer without special tokens; a pass has its texts' own tokens."""
    lengths = np.array([40, 30, 2, 0, 2, 0, 0, 0])
    mask = (np.arange(40) < lengths[:, None]).astype(int)[:, ::side]
    features = {"input_ids": mask * 7, "attention_mask": mask}
    for positions, part in script.split_features(features, 256, torch.device("cpu")):
        assert (part["attention_mask"].sum(1) == lengths[positions]).all()
        assert (part["input_ids"] == 7 * part["attention_mask"]).all()
        assert part["input_ids"].shape[1]  # a model requires a column
    empty = {name: array[3:4, :0] for name, array in features.items()}  # alone
    ((_, part),) = script.split_features(empty, 256, torch.device("cpu"))
    assert part["input_ids"].shape == (1, 1) and not part["attention_mask"].any()


def test_memory_is_measured_in_both_roles(static, monkeypatch):
    """Two encoders may differ: one of a static model takes none to speak of."""
    passed = []
    monkeypatch.setattr(script, "measure_micro_batch_tokens", lambda run, *_: run(2))
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda: 0)  # a CPU has no such number
    encode = script.encode
    monkeypatch.setattr(
        script, "encode", lambda model, role, *given: passed.append(role) or encode(model, role, *given)
    )
    args = parse("--query_prompt", "", "--document_prompt", "", model=str(static))
    model = script.load_model(args)
    script.fit_micro_batches(model, script.Progress(), replace(args, micro_batch_tokens=None), Accelerator(cpu=True))
    assert passed == ["query", "document"]


@pytest.mark.parametrize("longest", [90, 255, 500])
def test_micro_batches_of_concatenated_texts(longest):
    """Whatever the longest text, they have at most so many tokens, are nearly as few as possible, and of about equal
    size; padded again, before and after the layers, they have at most four times the limit. The longest come first."""
    lengths = np.array([longest, *np.random.default_rng(0).integers(1, 30, 200)])
    mask = (np.arange(longest) < lengths[:, None]).astype(int)
    features = {"input_ids": mask, "attention_mask": mask}
    made = list(script.split_features(features, 256, torch.device("cuda"), concatenated=True))
    passes = [positions for positions, _ in made]
    sizes = [lengths[positions].sum() for positions in passes]
    assert sorted(chain.from_iterable(passes)) == list(range(201))
    assert passes[0][0] == 0 and np.all(np.diff(lengths[list(chain.from_iterable(passes))]) <= 0)
    assert sizes[0] == longest > 256 or sizes[0] <= 256
    *others, last = sizes[longest > 256 :]
    assert max(others) <= 256 and min(others) > 0.75 * max(others) and last <= 256
    assert len(passes) <= 1.15 * lengths.clip(max=256).sum() / 256 + 1
    for positions, part in made:
        assert part["input_ids"].size <= 4 * max(256, longest)
        assert part["attention_mask"].sum(1).tolist() == lengths[positions].tolist()
        assert part["places"].tolist() == np.flatnonzero(part["attention_mask"]).tolist()


def test_a_long_text_and_many_short_ones_are_not_padded_beyond_four_times_the_limit():
    lengths = np.array([250] + [1] * 1000)
    passes = script.cut(lengths, 256, 3 * 256, concatenated=True)
    assert max(len(positions) * lengths[positions].max() for positions in passes) <= 4 * 256
    assert len(passes) == 5  # 1,001 tokens without the long one, of which its pass has few


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
        work = script.work_of([SimpleNamespace(micro_batches=made, waited=0)], 0, 0, args)
        assert work[-2:].tolist() == [72 + 9 + 77 + 2 + 5, padded]
        assert sorted(chain.from_iterable(places for _, places, _ in made)) == list(range(5))
        if count == 5:
            assert [f["input_ids"].shape[1] for *_, f in made] == widths
        for _, places, features in made:
            width = features["input_ids"].shape[1]
            expected = model.tokenizer([texts[i] for i in places], padding="max_length", max_length=width,
                                     truncation=True, return_tensors="pt")  # fmt: skip
            tensors = {name for name in features if torch.is_tensor(features[name])}
            assert tensors == set(expected)
            assert all(torch.equal(features[name], expected[name]) for name in tensors)


def test_equal_texts_have_equal_hashes(bert):
    """In any column, whatever their prompts; the masks of InfoNCE depend on them, that of the query itself, too."""
    table = pa.table({"a": ["x", "y", "x"], "b": ["y", "z", "z"], script.SOURCE: [0, 0, 0]})
    accelerator = Accelerator(cpu=True)
    for query, text in (("", ""), ("query: ", "text: ")):
        flags = ["--query_prompt", query, "--document_prompt", text]
        args = parse("--columns", "a", "b", *flags, model=str(bert))
        model = script.load_model(args)
        args = script.resolve_args(args, model, accelerator)
        rows, _ = script.read_rows(table, [SimpleNamespace(args=args)], [None, None], 0)
        batch = script.batch_to_torch(script.make_batch(rows, 0, model, args, accelerator))
        hashes = batch.hashes[:3]
        assert (batch.hashes[3:] == -1).all() and (hashes >= 0).all()
        numbers = torch.tensor([[0, 1, 0], [1, 2, 2]]).T
        equal = hashes.flatten()[:, None] == hashes.flatten()
        assert torch.equal(equal, numbers.flatten()[:, None] == numbers.flatten())


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

    labels = values if count > 2 else values.squeeze(1)
    found = getattr(losses, name)(model).compute_loss_from_embeddings(given, labels)
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


@pytest.mark.parametrize("loss", ["kl", "margin_mse"])
def test_a_model_distilled_into_itself_stays(loss, rows, static, in_an_empty_folder):
    """The loss of a model's own cosines with the same temperature is 0; of another temperature it is not. Without a
    temperature of the teacher, the loss is refused."""
    codes = [row["code"][:60] for row in rows[:10]]
    texts = [[row["docstring"][:60], *codes[i : i + 3]] for i, row in enumerate(rows[:8])]
    model = SentenceTransformer(str(static), device="cpu")
    scores = [model.similarity(model.encode(row[:1]), model.encode(row[1:]))[0] for row in texts]
    write_jsonl(Path("x.jsonl"), [dict(zip("abcdy", [*row, y.tolist()])) for row, y in zip(texts, scores)])
    flags = ["--train_data", "x.jsonl", "--columns", *"abcd", "--label_column", "y", "--loss", loss,
             "--model_name_or_path", static, "--eval_rows", 0, "--batch_size", 8, "--max_steps", 1]  # fmt: skip

    def loss_of_step(temperature):
        kwargs = json.dumps({"teacher_temperature": temperature})
        train("train_bi_encoder", *flags, "--loss_kwargs", kwargs, "--output_dir", f"{temperature}")
        return metrics(f"{temperature}")[0]["loss"]

    assert loss_of_step(0.05) < 1e-6 and loss_of_step(1) > 1e-3
    with pytest.raises(script.UserError, match="^--loss_kwargs .* missing a required argument: 'teacher_temperature'"):
        train("train_bi_encoder", *flags)


@pytest.mark.parametrize("loss", ["MultipleNegativesRankingLoss", "TripletLoss"])
def test_a_loss_of_the_library_that_reads_no_labels(loss, static, monkeypatch):
    """Labels of 0 would be ignored: their pairs would be positives. Python 3.13 indents no docstring."""
    method = getattr(losses, loss).compute_loss_from_embeddings
    monkeypatch.setattr(method, "__doc__", inspect.cleandoc(method.__doc__ or ""))
    model = SentenceTransformer(str(static), device="cpu")
    with pytest.raises(script.UserError, match=f"^--label_column: --loss {loss} reads no labels: leave it out"):
        script.make_loss(parse("--loss", loss, "--label_column", "y"), model)


def test_texts_of_equal_length_have_one_order(bert):
    """Dropout depends on it; NumPy's sort would order them by the instructions of the processor."""
    model = script.load_model(parse(model=str(bert)))
    args = parse("--micro_batch_tokens", "2048")
    texts = ["a b" if number % 3 else "a b c" for number in range(600)]
    found = [index for part, _ in script.tokenize(model, texts, args, Accelerator()) for index in part]
    assert found == sorted(range(600), key=lambda number: (-len(texts[number]), -number))


@pytest.mark.parametrize("more", [[], ["a hard negative"]])
def test_held_out_labels_are_of_pairs(static, more):
    """Beside a hard negative a label may be a margin: then queries search. tests/test_asked.py compares measures of
    pairs with those of the evaluator."""
    rows = [script.Row(f"q{i}", [f"d{i}", *more], [i / 4], {script.SOURCE: 0}) for i in range(5)]
    model = SentenceTransformer(str(static), device="cpu")
    args = script.resolve_args(parse(), model, Accelerator())
    data = SimpleNamespace(sources=[], held_out=[(SimpleNamespace(args=args, name="x"), rows)])
    evaluators = script.open_evaluators(data, model, args)
    ((evaluator, _),) = evaluators.values()
    assert list(evaluators) == ["held_out_cosine_ndcg@10" if more else "held_out_spearman_cosine"]
    if not more:
        assert (evaluator.sentences2, evaluator.scores) == ([f"d{i}" for i in range(5)], [i / 4 for i in range(5)])


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
