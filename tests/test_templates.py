"""The templates: equal to the trainers on the same rows, killed and resumed, and alone in a folder."""

import importlib.util
import json
import shutil
import signal
import time
from itertools import product
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, launch, mark_slow, metrics, quick_first
from forked import Forked
from sentence_transformers import CrossEncoder, SentenceTransformer

STEPS = 6
KINDS = ["bi_encoder", "cross_encoder"]
EACH = quick_first(KINDS)  # of what both do alike
# At 1e-3, rounding grows in the cross-encoder, in its trainer as well.
RATES = {"bi_encoder": 1e-3, "cross_encoder": 2e-5}
MEASURES = {"bi_encoder": "held_out_cosine_ndcg@10", "cross_encoder": "held_out_ndcg@10"}
PROMPTS = {  # "passage" is another name of "document"
    "bi_encoder": {"prompts": {"query": "find: ", "passage": "a function: "}},
    "cross_encoder": {"prompts": {"find": "find: "}, "default_prompt_name": "find"},
}
FOUR = ["--columns", "docstring", "code", "wrong", "more"]
TWO_ENCODERS = """    encoders = [SentenceTransformer(args.model_name_or_path, device="cpu") for _ in range(2)]
    router = Router.for_query_document(*map(list, encoders))
    model = SentenceTransformer(modules=[router], device="cpu").float()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, rows, bert):
    """Folder with two models with prompts and without dropout, and rows of three texts in two files."""
    folder = tmp_path_factory.mktemp("templates")
    shutil.copytree(bert, folder / "bi_encoder")
    torch.manual_seed(0)
    model = CrossEncoder(str(bert), device="cpu", num_labels=1)
    with torch.no_grad():  # scores that differ, and gradients that neither cancel out nor magnify rounding
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)
    model.save_pretrained(str(folder / "cross_encoder"))
    for name in KINDS:
        config = json.loads((folder / name / "config.json").read_text())
        config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        (folder / name / "config.json").write_text(json.dumps(config))
        file = folder / name / "config_sentence_transformers.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | PROMPTS[name]))
    codes = [f"# {number}\n{row['code']}" for number, row in enumerate(rows)]  # distinct: ties rank differently
    columns = [row["docstring"] for row in rows], codes, codes[7:] + codes[:7], codes[9:] + codes[:9]
    triples = [dict(zip(FOUR[1:], texts)) for texts in zip(*columns)]
    # In a batch, and not among the first 60 rows, texts that differ in white space and case alone, and equal ones.
    triples[70]["code"] = triples[74]["code"].upper().replace(" ", "\n") + "\n"
    triples[71]["docstring"] = " " + triples[77]["docstring"].lower()
    triples[73]["code"] = triples[78]["code"]
    triples[77]["more"] = triples[71]["code"] + " "  # that of the same query: no negative of it
    pq.write_table(pa.Table.from_pylist(triples), folder / "a.parquet")
    (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in triples[::-1]))
    return folder


def load_template(kind):
    """Import a template."""
    spec = importlib.util.spec_from_file_location(kind, ROOT / f"templates/{kind}.py")
    template = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(template)
    return template


def flags(kind, folder, output, *more):
    return ["--model_name_or_path", folder / kind, "--train_data", folder / "a.parquet", "--columns", "docstring",
            "code", "wrong", "--shuffle_buffer", 0, "--eval_rows", 0, "--batch_size", 31, "--max_length", 48,
            "--micro_batch_tokens", 500, "--learning_rate", RATES[kind], "--max_steps", STEPS, "--output_dir", output,
            *more]  # fmt: skip


def assert_equal_runs(output, expected):
    """Compare losses and gradient norms: by the norms, each step has the gradient of the trainer's."""
    found, expected = ([line for line in metrics(path) if "loss" in line] for path in (output, expected))
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=1e-5)


def assert_equal_on_three_processes(script, kind, folder, output, *more):
    """Compare the metrics of three steps on 1 and 3 processes, whose outputs are in output/1 and output/3."""
    for processes in (1, 3):
        given = [output / str(processes), *more, "--max_steps", 3, "--warmup_ratio", 0]
        launch(script, *flags(kind, folder, *given), processes=processes)
    for line, expected in zip(metrics(output / "3"), metrics(output / "1"), strict=True):
        assert line == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """Return a function that runs a trainer on one process, once for each setting, and returns its folder."""
    done = {}

    def run(kind, *more):
        if (kind, more) not in done:
            output = tmp_path_factory.mktemp("trainer") / "out"
            launch(ROOT / f"train_{kind}.py", *flags(kind, folder, output, "--logging_steps", 1, *more))
            done[kind, more] = output
        return done[kind, more]

    return run


CASES = [(KINDS[0], []), (KINDS[1], FOUR), (KINDS[1], [*FOUR, "--loss", "bce"])]
WAYS = [(1, 10**6), (2, 0)]  # the first is also that of test_streamed_with_held_out_rows


@pytest.mark.parametrize("case, way", mark_slow(product(CASES, WAYS), list(zip(CASES, WAYS))))
def test_losses_and_norms_equal_the_trainers(folder, trained, tmp_path, case, way):
    """On 1 and 2 processes, which do not divide the batch; with and without gradient cache; also of rows of which one
    has fewer negatives, as a given one is a known positive."""
    (kind, loss), (processes, max_tokens) = case, way
    more = [*loss, "--max_graph_tokens", max_tokens]
    launch(ROOT / f"templates/{kind}.py", *flags(kind, folder, tmp_path / "out", *more), processes=processes)
    assert_equal_runs(tmp_path / "out", trained(kind, *loss))
    if "bce" in loss:  # the saved model predicts probabilities
        model = CrossEncoder(str(tmp_path / "out/model"), device="cpu")
        assert isinstance(model.activation_fn, torch.nn.Sigmoid)


@pytest.mark.parametrize("kind", EACH)
def test_streamed_with_held_out_rows(folder, trained, tmp_path, kind):
    """On 2 processes. The first rows are held out, and measured as by the trainer; the others are trained on."""
    more = ["--streaming", "--eval_rows", 60, "--eval_steps", STEPS]
    launch(ROOT / f"templates/{kind}.py", *flags(kind, folder, tmp_path / "out", *more), processes=2)
    outputs = tmp_path / "out", trained(kind, *more)
    assert_equal_runs(*outputs)
    name = MEASURES[kind]
    found, expected = ([line[name] for line in metrics(path) if name in line] for path in outputs)
    assert found == pytest.approx(expected, abs=1e-6) and len(found) == 2


@pytest.mark.parametrize("kind, way, processes", quick_first([(KINDS[1], [], 1), (KINDS[0], ["--streaming"], 2)]))
def test_killed_and_resumed(folder, bert, reranker, tmp_path, kind, way, processes):
    """Two shuffled sources, drawn negatives, dropout: the same bits, and each step once in metrics.jsonl. A mapped
    source that has grown, of which other rows would be held out and drawn, is refused."""
    grown = shutil.copy(folder / "b.jsonl", tmp_path)
    common = flags(kind, folder, tmp_path / "out", *way, "--train_data", folder / "a.parquet", grown)
    common += ["--columns", "docstring", "code", "--mixing_weights", 0.3, 0.7, "--shuffle_buffer", 50]
    common += ["--save_steps", 4, "--max_steps", 12, "--eval_rows", 20, "--eval_steps", 7, "--batch_size", 12]
    common += ["--model_name_or_path", bert if kind == "bi_encoder" else reranker]
    script, whole = ROOT / f"templates/{kind}.py", tmp_path / "whole"
    launch(script, *common, "--output_dir", whole, processes=processes)
    process = Forked(script, common, processes)
    while process.poll() is None and not (tmp_path / "out/checkpoint.pt").exists():
        time.sleep(0.001)
    while process.poll() is None and metrics(tmp_path / "out")[-1]["step"] < 6:
        time.sleep(0.001)
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "out/model").exists()
    launch(script, *common, "--resume", processes=processes)
    assert metrics(tmp_path / "out") == metrics(whole) and len(metrics(whole)) == 13
    one, two = ((path / "model/model.safetensors").read_bytes() for path in (tmp_path / "out", whole))
    assert one == two
    if not way:
        with open(grown, "a") as file:
            file.write((folder / "b.jsonl").read_text())
        done = launch(script, *common, "--resume", processes=processes, check=False)
        assert done.returncode == 1 and done.stderr.strip().endswith("AssertionError")


@pytest.mark.parametrize("kind", quick_first(KINDS[::-1]))
def test_processes_without_a_text(folder, tmp_path, kind):
    """A batch of one row has no query, or no pair, for some of three processes; nor have held-out rows."""
    script = ROOT / f"templates/{kind}.py"
    assert_equal_on_three_processes(script, kind, folder, tmp_path, "--batch_size", 1, "--eval_rows", 1)


@pytest.mark.slow
def test_two_encoders(folder, tmp_path):
    """The change that the docstring of the bi-encoder names, on 1 and 3 processes, of which some encode no query. Both
    encoders are trained, each for its role, and saved as one model."""
    text = (ROOT / "templates/bi_encoder.py").read_text()
    line = '    model = SentenceTransformer(args.model_name_or_path, device="cpu").float()\n'
    assert text.count(line) == 1 and "Router.for_query_document" in text
    text = text.replace("\n\n\n", "\nfrom sentence_transformers.base.modules import Router\n\n\n", 1)
    (tmp_path / "mine.py").write_text(text.replace(line, TWO_ENCODERS))
    more = ["--batch_size", 2, "--eval_rows", 9]
    assert_equal_on_three_processes(tmp_path / "mine.py", "bi_encoder", folder, tmp_path, *more)
    new, old = (SentenceTransformer(str(path), device="cpu") for path in (tmp_path / "3/model", folder / "bi_encoder"))
    encoders = new.encode_query, new.encode_document, old.encode_query
    found = torch.stack([encode(["a text"], prompt="", convert_to_tensor=True)[0] for encode in encoders])
    assert (torch.cdist(found, found) + torch.eye(3) > 1e-3).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_fewer_rows_than_are_held_out(folder, rows, tmp_path, kind):
    """By default a tenth of it is held out; of a stream, whose length is unknown, an assertion says what to lower."""
    pq.write_table(pa.Table.from_pylist(rows[:40]), tmp_path / "small.parquet")
    template = load_template(kind)
    args = template.Args([str(tmp_path / "small.parquet")], ["docstring", "code"], str(tmp_path / "out"),
                         str(folder / kind), max_length=16, batch_size=36, max_steps=1)  # fmt: skip
    with mock.patch.object(template, "make_evaluators", wraps=template.make_evaluators) as make_evaluators:
        template.main(args)
    assert len(make_evaluators.call_args.args[0]) == 4 and MEASURES[kind] in metrics(tmp_path / "out")[-1]
    args.streaming, args.output_dir = True, str(tmp_path / "streamed")
    with pytest.raises(AssertionError, match="--eval_rows leaves no row to train on"):
        template.main(args)


def test_no_document_of_an_equal_query_is_a_negative():
    """Drawn or given. As in the trainer, texts that differ in white space or case are one."""
    template = load_template("cross_encoder")
    texts = [("a query", "one"), ("A  query", "two"), ("another", "THREE"), ("more", "three "), ("last", "four")]
    args = template.Args([], ["query", "document"], "out")
    for step in range(20):
        rows = ({"query": query, "document": document} for query, document in texts)
        batch = template.read_batch(rows, 5, 2, step, {}, args)
        drawn = [{template.fold(text) for text in negatives} for _, _, *negatives in batch.texts]
        assert drawn[0] == drawn[1] == {"three", "four"} and all(len(negatives) == 2 for negatives in drawn)
        assert "three" not in drawn[2] | drawn[3]
    rows = ({"query": query, "document": document} for query, document in texts[2:])
    assert [len(row) for row in template.read_batch(rows, 5, 9, 0, {}, args).texts] == [3, 3, 3]  # of two texts
    given = [("a query", "one", "TWO ", "three"), ("A  query", "two", "four", "one"), ("b", "two", "a", "one")]
    args.columns = ["query", "document", "n1", "n2"]
    batch = template.read_batch((dict(zip(args.columns, texts)) for texts in given), 3, 9, 0, {}, args)
    assert batch.texts == [["a query", "one", "three"], ["A  query", "two", "four"], ["b", "two", "a", "one"]]
    assert batch.labels.nan_to_num(-1).tolist() == [[1, 0, -1], [1, 0, -1], [1, 0, 0]]


@pytest.mark.parametrize("use_launcher", quick_first([False, True]))
def test_alone_in_an_empty_folder(folder, tmp_path, use_launcher):
    """Also by Accelerate's launcher; the saved model loads in sentence-transformers, and has changed."""
    shutil.copy(ROOT / "templates/bi_encoder.py", tmp_path / "mine.py")
    more = ["--columns", "docstring", "code", "--max_steps", 1, "--eval_rows", 30]
    launch(tmp_path / "mine.py", *flags("bi_encoder", folder, "out", *more), cwd=tmp_path, use_launcher=use_launcher)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py", "out"]
    folders = tmp_path / "out/model", folder / "bi_encoder"
    new, old = (SentenceTransformer(str(path), device="cpu") for path in folders)
    assert new.prompts == {"query": "find: ", "passage": "a function: ", "document": "a function: "}
    new, old = (model.encode_query(["a text"], convert_to_tensor=True) for model in (new, old))
    assert new.isfinite().all() and (new - old).abs().max() > 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_size_and_imports(kind):
    """At most 300 lines; nothing of this project is imported."""
    text = (ROOT / f"templates/{kind}.py").read_text()
    assert len(text.splitlines()) <= 300
    assert not any(path.stem in text.replace(kind, "") for path in ROOT.glob("*.py"))


def test_equal_texts_are_one_in_the_search_of_held_out_rows():
    evaluators = load_template("bi_encoder").make_evaluators([("a b", "caf\u00e9"), ("A  b", "CAFE\u0301 ")])
    (evaluator,) = evaluators.values()
    assert len(evaluator.queries) == len(evaluator.corpus) == 1
