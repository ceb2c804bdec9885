"""The cross-encoder: losses, equalities, data shapes, resume, whole runs and bad input."""

import json
import math
import re
import shutil
import signal
import subprocess
import sys
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT, launch, metrics
from forked import Forked, last_of
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder import losses
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_resume import signal_when

import train_cross_encoder as script

SCRIPT = ROOT / "train_cross_encoder.py"


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch, tmp_path):
    """main leaves a SIGTERM handler behind, which later tests must not have."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def parse(*flags):
    return script.parse_args(last_of(["--train_data", "x.jsonl", "--data_cache", "cache", *flags]))


def jsonl(name, rows):
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return name


# --------------------------------------------------------------------------------------------------------- losses

SIZES = [3, 1, 5, 2, 4]  # documents of each group
GROUPS = torch.tensor([group for group, size in enumerate(SIZES) for _ in range(size)])
GRADES = torch.tensor([2, 0, 1, 1, 0, 0, 3, 1, 0, 1, 0, 0, 0, 1, 2], dtype=torch.float32)
LOGITS = torch.randn(15, generator=torch.Generator().manual_seed(1)) * 3


def by_group(*tensors):
    """For each group, a list of floats of each tensor."""
    return [[tensor[group == GROUPS].tolist() for tensor in tensors] for group in range(len(SIZES))]


def softmax(scores):
    total = sum(math.exp(score) for score in scores)
    return [math.exp(score) / total for score in scores]


def mean(values):
    return sum(values) / len(values)


def sigmoid(score):
    return 1 / (1 + math.exp(-score))


def naive_bce(logits, labels):
    pairs = zip(logits.tolist(), labels.tolist())
    return mean([-(y * math.log(sigmoid(s)) + (1 - y) * math.log(1 - sigmoid(s))) for s, y in pairs])


def naive_mse(logits, labels):
    return mean([(score - label) ** 2 for score, label in zip(logits.tolist(), labels.tolist())])


def naive_softmax(logits, labels):
    groups = by_group(logits, labels)
    return mean([mean([-math.log(p) for p, y in zip(softmax(s), ys) if y > 0] or [0]) for s, ys in groups])


def naive_ranknet(logits, labels):
    found = []
    for scores, known in by_group(logits, labels):
        for i in range(len(scores)):
            for j in range(len(scores)):
                if known[i] > known[j]:
                    found.append(math.log2(1 + math.exp(scores[j] - scores[i])))
    return mean(found)


def naive_lambda(logits, labels, k=None):
    found = []
    for scores, known in by_group(logits, labels):
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        rank = {document: place + 1 for place, document in enumerate(order)}
        ideal = sorted(known, reverse=True)[: k or len(known)]
        best = sum((2**label - 1) / math.log2(place + 2) for place, label in enumerate(ideal))
        for i in rank:
            for j in rank:
                if known[i] > known[j] and min(rank[i], rank[j]) <= (k or len(rank)):
                    apart = abs(rank[i] - rank[j])
                    weight = 10 * (1 / math.log2(1 + apart) - 1 / math.log2(2 + apart))
                    weight += abs(1 / math.log2(1 + rank[i]) - 1 / math.log2(1 + rank[j]))
                    weight *= (2 ** known[i] - 2 ** known[j]) / best
                    found.append(-weight * math.log2(sigmoid(scores[i] - scores[j])))
    return mean(found)


def naive_margin_mse(logits, labels):
    groups = by_group(logits, labels)
    return mean([((s[0] - s[i]) - (y[0] - y[i])) ** 2 for s, y in groups for i in range(1, len(s))])


def naive_kl(logits, labels, temperature=1):
    found = []
    for scores, known in by_group(logits / temperature, labels / temperature):
        pairs = zip(softmax(known), softmax(scores))
        found.append(temperature**2 * sum(teacher * math.log(teacher / student) for teacher, student in pairs))
    return mean(found)


@pytest.mark.parametrize(
    ("name", "naive", "options"),
    [
        ("bce", naive_bce, {}),
        ("mse", naive_mse, {}),
        ("softmax", naive_softmax, {}),
        ("ranknet", naive_ranknet, {}),
        ("lambda", naive_lambda, {}),
        ("lambda", naive_lambda, {"k": 2}),
        ("margin_mse", naive_margin_mse, {}),
        ("kl", naive_kl, {}),
        ("kl", naive_kl, {"temperature": 2}),
    ],
)
def test_loss_against_a_plain_loop(name, naive, options):
    labels = (GRADES > 0).float() if name == "bce" else GRADES
    loss = script.make_pair_loss(parse("--loss", name, "--label_column", "y", "--loss_args", json.dumps(options)))
    logits = LOGITS.double().requires_grad_()
    found = loss(logits, labels.double(), GROUPS)
    assert found.item() == pytest.approx(naive(LOGITS.double(), labels.double(), **options), rel=1e-6)
    found.backward()
    assert logits.grad.isfinite().all() and logits.grad.abs().sum() > 0


class Given(CrossEncoder):
    """A CrossEncoder whose logit for (query, "7") is the seventh of the given ones."""

    num_labels, device = 1, torch.device("cpu")

    def __init__(self, logits):
        torch.nn.Module.__init__(self)
        self.logits = logits

    def preprocess(self, pairs, **options):
        return {"places": torch.tensor([int(document) for _, document in pairs])}

    def forward(self, features):
        return {"scores": self.logits[features["places"]][:, None]}


@pytest.mark.parametrize("name", ["bce", "mse", "ranknet", "lambda", "lambda@2", "margin_mse"])
def test_loss_against_sentence_transformers(name):
    model, columns = Given(LOGITS), [[f"{number}" for number in range(15)]] * 2
    classes, groups = (GRADES > 0).float(), GROUPS
    documents = [[str(i) for i in range(15) if GROUPS[i] == group] for group in range(len(SIZES))]
    listwise = [["query"] * len(SIZES), documents], list(GRADES.split(SIZES))
    if name == "bce":
        found, wanted = script.bce(LOGITS, classes, GROUPS), losses.BinaryCrossEntropyLoss(model)(columns, classes)
    elif name == "mse":
        found, wanted = script.mse(LOGITS, GRADES, GROUPS), losses.MSELoss(model)(columns, GRADES)
    elif name == "ranknet":
        found, wanted = script.ranknet(LOGITS, GRADES, GROUPS), losses.RankNetLoss(model)(*listwise)
    elif name == "margin_mse":  # the library wants groups of one size
        groups = torch.arange(5).repeat_interleave(3)
        columns = [["query"] * 5, *([f"{3 * group + place}" for group in range(5)] for place in range(3))]
        found = script.margin_mse(LOGITS, GRADES, groups)
        wanted = losses.MarginMSELoss(model)(columns, list(GRADES.view(5, 3)))
    else:
        k = 2 if "@" in name else None
        found = script.lambda_loss(LOGITS, GRADES, GROUPS, k=k)
        wanted = losses.LambdaLoss(model, k=k)(*listwise)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


# ----------------------------------------------------------------------------------------------------- equalities

LOSSES = ["bce", "mse", "softmax", "drawn", "ranknet", "lambda", "margin_mse", "kl"]


@pytest.fixture(scope="module")
def launched(tmp_path_factory, rows, bert):
    """{(processes, process): {setting: (gradient, loss, passes, pairs)}} for 1 and 2 processes."""
    folder = tmp_path_factory.mktemp("gradients")
    codes = [row["code"][:400] for row in rows]
    table = []
    for i, row in enumerate(rows[:200]):
        documents = [codes[i], *codes[i + 1 : i + 2 + i % 4]]  # 2 to 5 of them
        places = range(len(documents))
        labels = {"label": i % 3 // 2, "classes": [1] + [i % 2] * (len(documents) - 2) + [0],
                  "grades": [max(3 - place, 0) for place in places],
                  "scores": [math.sin(i + place) for place in places]}  # fmt: skip
        table.append({**row, "code": codes[i], "documents": documents, **labels})
    pq.write_table(pa.Table.from_pylist(table), folder / "rows.parquet")
    found = {}
    for processes in (1, 2):
        output = folder / str(processes)
        launch(ROOT / "tests/cross_gradient_worker.py", bert, folder / "rows.parquet", output, processes=processes)
        for process in range(processes):
            found[processes, process] = torch.load(folder / f"{processes}.{process}.pt")
    return found


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_is_that_of_one_process_and_one_pass(launched, loss):
    wanted = launched[1, 0][f"{loss} 1000000 false"]
    assert wanted[0].norm() > 0.01
    for gradients in launched.values():
        for budget in (300, 10**6):
            for cache in ("false", "true"):
                gradient, value, passes, pairs = gradients[f"{loss} {budget} {cache}"]
                assert pairs == wanted[3]  # the drawn ones too
                assert passes > 2 or budget > 300
                assert ((gradient - wanted[0]).norm() / wanted[0].norm()).item() < 1e-5
                assert value == pytest.approx(wanted[1], rel=1e-5)


def test_accumulated_batches_are_one_batch_for_bce(launched):
    wanted = launched[1, 0]["one batch of 64"][0]
    for gradients in launched.values():
        assert ((gradients["four batches of 16"][0] - wanted).norm() / wanted.norm()).item() < 1e-5


# ---------------------------------------------------------------------------------------------------- data shapes


def first_rows(rows, *flags, suffix="jsonl"):
    """([query, document, ...], labels) of the first batch, without shuffling, drawing nothing."""
    jsonl("x.jsonl", rows) if suffix == "jsonl" else pq.write_table(pa.Table.from_pylist(rows), f"x.{suffix}")
    flags = ["--train_data", f"x.{suffix}", "--shuffle_buffer", 0, "--eval_rows", 0, "--batch_size", len(rows), *flags]
    args = parse(*flags)
    args.loss = args.loss or script.default_loss(args)
    sources, weights, *_ = script.open_data(args, Accelerator(cpu=True), script.checked_group)
    found, position = next(script.row_batches(sources, weights, args, None, script.checked_group))
    return args.loss, [(texts, labels) for texts, labels, *_ in found]


@pytest.mark.parametrize("way", [[], ["--streaming", "--max_steps", 1]])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_shapes(suffix, way):
    def read(rows, *flags):
        return first_rows(rows, *flags, *way, suffix=suffix)

    assert read([{"q": "a", "d": "b", "y": 1}], "--label_column", "y") == ("bce", [(["a", "b"], [1])])
    assert read([{"q": "a", "d": "b"}]) == ("softmax", [(["a", "b"], None)])
    assert read([{"q": "a", "d": "b", "e": "c"}]) == ("softmax", [(["a", "b", "c"], [1, 0])])
    ragged = [{"q": "a", "d": ["b", "c", "d"], "y": [0, 1, 0]}, {"q": "e", "d": ["f", "g"], "y": [1, 0]}]
    wanted = [(["a", "b", "c", "d"], [0, 1, 0]), (["e", "f", "g"], [1, 0])]
    assert read(ragged, "--label_column", "y") == ("softmax", wanted)
    teacher = ["--label_column", "y", "--loss", "margin_mse"]
    assert read([{"q": "a", "d": "b", "e": "c", "y": 2.5}], *teacher)[1] == [(["a", "b", "c"], [0, -2.5])]
    assert read([{"q": "a", "d": "b", "e": "c", "y": [3.0, 0.5]}], *teacher)[1] == [(["a", "b", "c"], [3, 0.5])]
    assert read([{"q": "a", "d": "b", "e": "c"}], "--num_negatives", 0)[1] == [(["a", "b"], None)]


def test_drawn_negatives():
    rows = [([f"query {i // 2}", f"document {i % 17}"], None, "file", i) for i in range(40)]
    found = script.draw_negatives(rows, 4, [1, 2])
    assert found == script.draw_negatives(rows, 4, [1, 2]) != script.draw_negatives(rows, 4, [1, 3])
    for (query, _, *negatives), labels, *_ in found:
        known = {row[0][1] for row in rows if row[0][0] == query}
        assert len(set(negatives)) == 4 and labels == [1, 0, 0, 0, 0] and not known & set(negatives)
    assert {text for row in found for text in row[0][2:]} == {f"document {i}" for i in range(17)}
    given = [(["a", "b", "c"], [1.0, 0.0], "file", 0)]
    assert script.draw_negatives(given, 4, 0) == given
    with pytest.raises(script.BadInput, match="no other row"):
        script.draw_negatives(rows[:2], 4, 0)


def test_a_long_document_is_cut_and_the_query_kept(bert):
    model = CrossEncoder(str(bert), device="cpu", num_labels=1)
    model.max_seq_length = 32
    query, document = "read the file " * 5, "write a line of text " * 50
    whole = model.tokenizer(query)["input_ids"]
    pairs = [(query, "a"), (query, document), (document, "a line"), (query, document)]
    with pytest.warns(UserWarning, match="train with a higher --max_length"):
        found = script.tokenize_pairs(pairs, model)
    for i in (0, 1, 3):
        assert found["input_ids"][i][: len(whole)] == whole
        assert found["input_ids"][i] == script.tokenize_pairs(pairs[i : i + 1], model)["input_ids"][0]
    assert [len(ids) for ids in found["input_ids"][1:]] == [32, 32, 32]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        script.__warningregistry__.clear()
        for _ in range(3):
            script.tokenize_pairs([(query, document)], model)
    assert [str(one.message) for one in said] == [
        "a pair is longer than the 32 tokens of the model; its document is cut, its query kept whole"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.tokenize_pairs([(query, "a")], model)


# ------------------------------------------------------------------------------------------------------- measures


def test_measures_against_plain_definitions():
    random = np.random.default_rng(0)
    scores, labels = random.integers(0, 8, 60) / 8, random.integers(0, 2, 60).astype(float)
    found = script.BinaryMetric(keep_in_memory=True).compute(scores=scores, labels=labels)
    cuts = [scores >= cut for cut in [*sorted(set(scores), reverse=True), 2]]
    assert found["accuracy"] == pytest.approx(max(np.mean(cut == labels) for cut in cuts))
    hits = [(cut * labels).sum() for cut in cuts]
    assert found["F1"] == pytest.approx(max(2 * h / (cut.sum() + labels.sum()) for h, cut in zip(hits, cuts)))
    steps = zip([0, *hits], hits, cuts)
    wanted = sum((h - before) / labels.sum() * h / cut.sum() for before, h, cut in steps if cut.any())
    assert found["average precision"] == pytest.approx(wanted)
    found = script.CorrelationMetric(keep_in_memory=True).compute(scores=scores, labels=scores**3)
    assert found["Spearman"] == pytest.approx(1)
    assert found["Pearson"] == pytest.approx(np.corrcoef(scores, scores**3)[0, 1])
    import ir_measures

    groups = [(random.permutation(12) / 12, random.integers(0, 3, 12)) for _ in range(20)]
    qrels = {str(q): {f"{d:02}": int(y) for d, y in enumerate(ys)} for q, (_, ys) in enumerate(groups)}
    run = {str(q): {f"{d:02}": s for d, s in enumerate(ss)} for q, (ss, _) in enumerate(groups)}
    wanted = ir_measures.calc_aggregate([ir_measures.RR @ 10, ir_measures.nDCG @ 10], qrels, run)
    metric = script.GroupMetric(keep_in_memory=True)
    metric.add_batch(scores=[s.tolist() for s, _ in groups], labels=[y.tolist() for _, y in groups])
    assert list(metric.compute().values()) == pytest.approx(
        [wanted[ir_measures.RR @ 10], wanted[ir_measures.nDCG @ 10]]
    )
    equal = script.GroupMetric(keep_in_memory=True).compute(scores=[[1.0, 1.0]], labels=[[1.0, 0.0]])
    assert equal["MRR@10"] == 0.5  # a model that tells nothing apart is not flattered


# ----------------------------------------------------------------------------------------------------- whole runs

STEPS = 20


@pytest.fixture(scope="module")
def settings(tmp_path_factory, rows, bert):
    """Flags of a mapped run on one process, and of an interleaved stream with a shuffle buffer on two."""
    folder = tmp_path_factory.mktemp("data")
    short = [{"docstring": row["docstring"][:100], "code": row["code"][:150]} for row in rows]
    files = [jsonl(folder / f"{part}.jsonl", short[part::2]) for part in range(2)]
    common = ["--model_name_or_path", bert, "--eval_rows", 6, "--batch_size", 6, "--max_steps", STEPS,
              "--log_every", 1, "--save_every", 3, "--eval_every", 10, "--micro_batch_tokens", 600,
              "--learning_rate", 1e-3, "--num_negatives", 2, "--train_data", *files]  # fmt: skip
    stream = ["--streaming", "--shuffle_buffer", 60, "--mixing_weights", 0.4, 0.6, "--mix_by", "batch"]
    return {"mapped": (1, [*common, "--grad_cache", "--length_window", 2]), "stream": (2, [*common, *stream])}


def test_sigterm_finishes_the_step_and_exits_cleanly(settings, tmp_path):
    for name, (processes, flags) in settings.items():
        output = tmp_path / name
        flags = [*flags, "--output_dir", output, "--eval_every", 100]
        process = Forked(SCRIPT, [*flags, "--save_every", 0], processes)
        assert signal_when(process, output, 4, signal.SIGTERM) == 0
        last = metrics(output)[-1]["step"]
        assert 4 <= last < STEPS
        assert [folder.name for folder in (output / "checkpoints").iterdir()] == [f"step_{last:08}"]
        assert not (output / "model").exists()
        launch(SCRIPT, *flags, "--resume", processes=processes)
        assert metrics(output)[-1]["step"] == STEPS and (output / "model").exists()


def test_from_scratch_copied_alone_into_an_empty_folder(tmp_path, rows):
    """What it leaves behind, and that the saved model gives the trained scores."""
    shutil.copy(SCRIPT, tmp_path)
    jsonl("x.jsonl", [{**row, "code": row["code"][:200], "label": i % 2} for i, row in enumerate(rows[:80])])
    flags = ["--train_data", "x.jsonl", "--label_column", "label", "--max_steps", "2", "--batch_size", "8",
             "--eval_rows", "16", "--log_every", "1", "--max_length", "64", "--data_cache", "cache",
             "--report_to", "tensorboard"]  # fmt: skip
    command = [sys.executable, "-I", "train_cross_encoder.py", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs/cross_encoder"
    assert {"model", "checkpoints", "metrics.jsonl", "args.yaml", "training.png"} <= {p.name for p in run.iterdir()}
    lines = metrics(run)
    assert {"accuracy", "F1", "average precision"} <= set(lines[0]) and lines[0]["step"] == 0
    assert {"loss", "padding_fraction", "tokens_per_second", "F1"} <= set(lines[-1])
    logged = EventAccumulator(str(run / "evenstep")).Reload()
    assert [event.value for event in logged.Scalars("loss")] == pytest.approx(
        [line["loss"] for line in lines if "loss" in line], rel=1e-6
    )
    card = (run / "model/README.md").read_text()
    assert "python train_cross_encoder.py" in card and f"{lines[-1]['F1']:.4f}" in card
    pairs = [(rows[0]["docstring"], rows[0]["code"]), ("a", "b")]
    args = parse(*flags)
    args.model_name_or_path, args.loss = str(run / "from_scratch"), "bce"
    trained = script.load_cross_encoder(args, None, False, Accelerator(cpu=True)).eval()
    newest, _ = script.newest_checkpoint(run / "checkpoints")
    script.load_model(trained, str(newest / "model.safetensors"))
    share = script.make_pair_share(pairs, trained, 10**6, Accelerator(cpu=True))
    parts = [script.score(trained, features, Accelerator(cpu=True)) for features, _ in share.micro_batches]
    wanted = script.gather_texts(parts, share, Accelerator(cpu=True)).sigmoid().view(-1)
    found = CrossEncoder(str(run / "model"), device="cpu").predict(pairs)
    assert torch.allclose(torch.tensor(found), wanted, atol=1e-6)


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    design = """
        train_data streaming columns label_column mixing_weights mix_by stopping_strategy eval_rows
        shuffle_buffer length_window on_bad_row model_name_or_path max_length dropout batch_size
        micro_batch_tokens gradient_accumulation_steps grad_cache loss loss_args num_negatives
        learning_rate weight_decay warmup_ratio max_grad_norm num_epochs rows_per_epoch max_steps seed
        output_dir resume accept_changed_data eval_every save_every keep_checkpoints log_every report_to
    """
    for flag in design.split():
        assert re.search(rf"--{flag}\b", shown), flag


# ------------------------------------------------------------------------------------------------------ bad input

GOOD = [{"q": f"query {i}", "d": [f"document {i}", "another"], "y": [1, 0]} for i in range(30)]
POINTS = [{"q": f"query {i}", "d": f"document {i}", "y": i % 2} for i in range(30)]


def refusal(rows, *flags):
    """The one line of BadInput."""
    with pytest.raises(script.BadInput) as caught:
        first_rows(rows, "--label_column", "y", *flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("cells", "flags", "words"),
    [
        ({"y": [0, 0]}, [], ["no positive", "[0.0, 0.0]"]),
        ({"y": [1, 1]}, [], ["no negative"]),
        ({"y": [1, 1]}, ["--loss", "lambda"], ["no positive or no negative"]),
        ({"y": [1, -1]}, ["--loss", "lambda"], ["--loss lambda", "0 to 100"]),
        ({"y": [1, 0, 0]}, [], ["2 documents", "3 labels"]),
        ({"y": 1}, [], ["2 documents", "1 labels"]),
        ({"y": []}, [], ["2 documents", "0 labels"]),
        ({"d": [], "y": []}, [], ["no document"]),
        ({"d": ["one"], "y": [1]}, ["--loss", "kl"], ["one only"]),
        ({"d": ["one", ""]}, [], ["'d'", "empty"]),
        ({"d": ["one", 3]}, [], ["'d'", "None"]),
        ({"d": "a text"}, [], ["'d'", "None"]),
        ({"y": ["a", 0]}, [], ["not a number"]),
    ],
)
def test_bad_groups(cells, flags, words):
    rows = [*GOOD[:7], {**GOOD[7], **cells}, *GOOD[8:]]
    message = refusal(rows, *flags)
    assert all(word in message for word in ["x.jsonl", "row 7", "--on_bad_row skip", *words]), message
    _, found = first_rows(rows, "--label_column", "y", "--on_bad_row", "skip", "--batch_size", 29, *flags)
    assert [texts[0] for texts, _ in found] == [row["q"] for row in rows if row["q"] != "query 7"]


def test_label_outside_the_range_of_bce():
    message = refusal([*POINTS[:4], {**POINTS[4], "y": 5}])
    assert all(word in message for word in ["row 4", "0 to 1", "divide", "5 or more", "--loss mse"]), message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--loss", "kl"], ["--loss kl", "--label_column"]),
        (["--loss_args", '{"k": 0}'], ["--loss_args", "above 0"]),
        (["--loss", "hinge"], ["--loss", "hinge"]),
    ],
)
def test_bad_flags(flags, words, capsys):
    with pytest.raises(SystemExit):
        parse(*flags)
    line = capsys.readouterr().err.splitlines()[-1]
    assert all(word in line for word in words), line


def test_unknown_loss_args():
    with pytest.raises(script.BadInput, match="softmax has no k; it has none"):
        script.make_pair_loss(parse("--loss", "softmax", "--loss_args", '{"k": 3}'))


def test_a_model_with_several_labels(tmp_path, bert):
    CrossEncoder(str(bert), device="cpu", num_labels=3).save_pretrained(str(tmp_path / "three"))
    with pytest.raises(script.BadInput, match="3 labels"):
        args = parse("--model_name_or_path", tmp_path / "three")
        script.load_cross_encoder(args, None, False, Accelerator(cpu=True))


def test_a_new_head_is_a_function_of_the_seed(bert):
    def head(seed):
        args = parse("--model_name_or_path", bert, "--seed", seed)
        return script.load_cross_encoder(args, None, False, Accelerator(cpu=True)).model.classifier.weight

    assert torch.equal(head(1), head(1)) and not torch.equal(head(1), head(2))
