"""--metrics: the user's own metric scripts, on one and two processes, resumed, and refused."""

import importlib
import json
import os
import tempfile

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, TRAINERS, launch, metrics, train, write_jsonl

BI, CROSS = TRAINERS
RANKINGS = """
import datasets
import evaluate
TEXTS, NUMBERS = (datasets.Sequence(datasets.Value(kind)) for kind in ("string", "float64"))
RUN = {"query": TEXTS, "q0": TEXTS, "docid": TEXTS, "rank": NUMBERS, "score": NUMBERS, "system": TEXTS}
QRELS = {"query": TEXTS, "q0": TEXTS, "docid": TEXTS, "rel": NUMBERS}

class Found(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo("", "", datasets.Features(predictions=RUN, references=QRELS))

    def _compute(self, predictions, references):
        run, qrels = predictions[0], references[0]
        relevant = {(q, d) for q, d, rel in zip(qrels["query"], qrels["docid"], qrels["rel"]) if rel > 0}
        ranked = zip(run["query"], run["docid"], run["rank"])
        each = {q: float((q, d) in relevant) for q, d, rank in ranked if rank == 1}
        rate = sum(each.values()) / len(each)
        return {"runid": run["system"][0], "first": rate, "each first": each, "lines": len(run["rank"])}
"""
PAIRS = """
import datasets
import evaluate

class MeanError(evaluate.Metric):
    def _info(self):
        number = datasets.Value("float64")
        return evaluate.MetricInfo("", "", datasets.Features(predictions=number, references=number))

    def _compute(self, predictions, references):
        errors = [abs(score - label) for score, label in zip(predictions, references)]
        return {"precision": -sum(errors) / len(errors)}
"""
# Integers as query ids, as in evaluate's trec_eval: held-out rows have such.
INTEGERS = RANKINGS.replace("Found", "Integers")
INTEGERS = INTEGERS.replace('{"query": TEXTS', '{"query": datasets.Sequence(datasets.Value("int64"))')


@pytest.fixture
def scripts(tmp_path):
    """{name: path} of metric scripts; `folder` is a folder with one."""
    texts = {"found": RANKINGS, "error": PAIRS, "integers": INTEGERS.replace('"each first"', '"each integer"')}
    texts["integers"] = texts["integers"].replace('"first"', '"integer"').replace('"lines"', '"integers"')
    found = {}
    for name, text in texts.items():
        found[name] = tmp_path / f"{name}.py"
        found[name].write_text(text)
    (tmp_path / "folder").mkdir()
    found["folder"] = tmp_path / "folder"
    (tmp_path / "folder/folder.py").write_text(RANKINGS)
    return found


def flags_for(name, bert, rows, output, *more):
    """Return flags of a run of three steps; rows of the bi-encoder and the cross-encoder are pairs."""
    data = output.with_suffix(".jsonl")
    write_jsonl(data, [row | {"label": i % 2} for i, row in enumerate(rows[:60])])
    return ["--train_data", data, "--columns", "docstring", "code", "--model_name_or_path", bert, "--max_steps", 3,
            "--eval_steps", 1, "--logging_steps", 1, "--batch_size", 8, "--eval_rows", 20, "--max_length", 32,
            "--learning_rate", 1e-3, "--output_dir", output, *more]  # fmt: skip


LABELS = ["--label_column", "label"]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", TRAINERS)
def test_rankings(scripts, bert, rows, beir, tmp_path, name, processes):
    """A rate of the user's own equals accuracy@1; it is logged, printed, plotted, in the card, and selects the best
    model. A mapping of query ids is averaged, a text left out. No file of theirs
    is in --output_dir."""
    output = tmp_path / "run"
    own = [scripts["found"]]
    more = ["--eval_beir", beir]
    if name == CROSS:
        own.append(scripts["integers"])
        more = ["--num_negatives", 3]
    flags = ["--metrics", *own, *more, "--metric_for_best_model", "each first"]
    done = launch(ROOT / f"{name}.py", *flags_for(name, bert, rows, output, *flags), processes=processes)
    lines = metrics(output)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert line["first"] == pytest.approx(line["each first"]) and "runid" not in line
    if name == BI:
        for collection in ("held_out", beir.name):
            for line in lines:
                assert line[f"{collection} first"] == pytest.approx(line[f"{collection} accuracy@1"])
        assert lines[0]["held_out lines"] == 20 * 20 and lines[0][f"{beir.name} lines"] == 60 * 100
    else:
        assert all(line["first"] == line["integer"] == line["each integer"] for line in lines)
        assert len(lines[0]) == 1 + 2 + 3 + 3
    best = max(lines[1:], key=lambda line: line["each first"])
    card = (output / "model/README.md").read_text()
    assert f"Trained for {best['step']} steps" in card and f", first {best['first']:.4f}, " in card
    assert "held_out first" not in card and f"'first': {round(lines[0]['first'], 4)}" in done.stderr + done.stdout
    assert sorted(path.name for path in output.iterdir()) == [
        "args.yaml", "checkpoints", "metrics.jsonl", "model", "training.png"]  # fmt: skip


@pytest.mark.parametrize("name", TRAINERS)
def test_pairs(scripts, bert, rows, tmp_path, name):
    """Scores and labels of pairs. A resume may add a metric, and plots it; a
    name that ends another measure's does not hide it."""
    script, output = importlib.import_module(name), tmp_path / "run"
    loss = ["--loss", "CoSENTLoss"] if name == BI else []
    flags = flags_for(name, bert, rows, output, *LABELS, *loss, "--save_steps", 1)
    plotted = []
    with pytest.MonkeyPatch.context() as patch:
        plot = script.plot_metrics
        patch.setattr(script, "plot_metrics", lambda *given: plotted.append(given[1]) or plot(*given))
        train(name, *flags, "--max_steps", 2)
        args = [*flags, "--resume", "--accept_changed_schedule", "--metrics", scripts["error"]]
        train(name, *args)
    lines = metrics(output)
    assert ["precision" in line for line in lines] == [False, False, False, True]
    built_in = ["Spearman", "Pearson"] if name == BI else ["accuracy", "F1", "average precision"]
    assert plotted == [built_in, [*built_in, "precision"]]
    args = script.parse_args(list(map(str, [output / "args.yaml"])))
    data, accelerator = script.open_data(args), script.start(args)
    rows = script.read_held_out(data, args, accelerator)
    labels = np.array([row.labels[0] for row in rows])
    model = script.load_model(args, output / "checkpoints/step_00000003")
    if name == BI:
        queries, documents = (model.encode(list(texts), normalize_embeddings=True) for texts in
                              zip(*((row.query, row.documents[0]) for row in rows)))  # fmt: skip
        scores = (queries * documents).sum(1)
    else:
        args.micro_batch_tokens = 1000
        scores = script.score_rows(model.eval(), rows, args, accelerator)
    expected = -pd.Series(scores - labels).abs().mean()
    assert lines[-1]["precision"] == pytest.approx(expected, abs=1e-5)


def test_a_folder(scripts, bert, rows, tmp_path):
    """A folder with a script of its name; a resume of the finished run plots and reports its measures again."""
    output = tmp_path / "run"
    flags = flags_for(BI, bert, rows, output, "--metrics", scripts["folder"])
    train(BI, *flags)
    card = (output / "model/README.md").read_text()
    train(BI, *flags, "--resume")
    assert ", first 0." in card and (output / "model/README.md").read_text() == card


BROKEN = {"missing.py": None, "accuracy": None, "org/name": None, "empty": "a folder", "text": "not a .py",
          "syntax.py": "class (", "none.py": "x = 1", "import.py": "import nothing_of_this_name"}  # fmt: skip


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("metric", BROKEN)
def test_refused(bert, rows, tmp_path, monkeypatch, name, metric):
    """In one line that names the flag and the script, before anything is written; nothing is looked up on the Hub."""
    if BROKEN[metric] == "a folder":
        (tmp_path / metric).mkdir()
    elif BROKEN[metric]:
        (tmp_path / metric).write_text(BROKEN[metric])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evaluate.loading.HubEvaluationModuleFactory", lambda *_, **__: pytest.fail("asks the Hub"))
    script = importlib.import_module(name)
    with pytest.raises(script.UserError, match=rf"^--metrics {metric}: \S.*$") as error:
        train(name, *flags_for(name, bert, rows, tmp_path / "run", "--metrics", metric))
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_metric_that_raises(scripts, bert, rows, tmp_path):
    """The traceback, which users of code of their own need, names the script; all processes end."""
    path = tmp_path / "wrong_metric.py"
    path.write_text(RANKINGS.replace("run, qrels =", "1 / 0\n        run, qrels ="))
    flags = flags_for(BI, bert, rows, tmp_path / "run", "--metrics", path)
    done = launch(ROOT / f"{BI}.py", *flags, processes=2, check=False, timeout=60)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    assert "wrong_metric.py" in done.stderr


def test_equal_names_are_told_apart(bert, rows, tmp_path):
    """A measure of the user's with the name of a built-in one is prefixed by the name of its metric."""
    path = tmp_path / "again.py"
    path.write_text(RANKINGS.replace('"first"', '"MRR@10"').replace("Found", "Again"))
    train(BI, *flags_for(BI, bert, rows, tmp_path / "run", "--metrics", path))
    first = metrics(tmp_path / "run")[0]
    assert {"MRR@10", "again_MRR@10", "nDCG@10"} <= set(first) and "built_in_MRR@10" not in first


def test_a_metric_without_data_of_its_kind(scripts, bert, rows, tmp_path):
    """Held-out rows of the bi-encoder are rankings, not pairs."""
    script = importlib.import_module(BI)
    with pytest.raises(script.UserError, match="error.py: no held-out data is of its kind"):
        train(BI, *flags_for(BI, bert, rows, tmp_path / "run", "--metrics", scripts["error"]))


def test_temporary_files_are_deleted(scripts, bert, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    seen = []
    script = importlib.import_module(BI)
    with pytest.MonkeyPatch.context() as patch:
        average = script.average
        patch.setattr(script, "average", lambda *given: seen.append(os.listdir(tmp_path / "tmp")) or average(*given))
        train(BI, *flags_for(BI, bert, rows, tmp_path / "run", "--metrics", scripts["found"]))
    assert len(seen) == 4 and all(len(names) == 1 for names in seen) and not os.listdir(tmp_path / "tmp")
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])["step"] == 0
