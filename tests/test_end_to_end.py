"""Whole runs as a user starts them: outputs, loading the model, a script copied alone into an empty folder."""

import csv
import importlib
import json
import re
import shlex
import shutil

import pytest
import yaml
from conftest import EACH_TRAINER, RATES, ROOT, launch, metrics, train

import train_bi_encoder

SCRIPT = ROOT / "train_bi_encoder.py"
MEASURES = {f"held_out_cosine_{name}@10" for name in ("ndcg", "mrr", "map", "precision", "recall")}
MEASURES.add("held_out_cosine_accuracy@1")


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus, static):
    """Output folder of a run with tensorboard, started by Accelerate's launcher on two processes, of the script copied
    alone into an empty folder."""
    folder = tmp_path_factory.mktemp("run")
    script, output = shutil.copy(SCRIPT, folder), folder / "out"
    flags = ["--train_data", f"{corpus}/*.parquet", "--columns", "docstring", "code", "--model_name_or_path", static,
             "--batch_size", 64, "--num_train_epochs", 3, "--eval_rows", 100, "--logging_steps", 1,
             "--learning_rate", 0.01, "--report_to", "tensorboard", "--output_dir", output,
             "--query_prompt", "query: ", "--document_prompt", "code: "]  # fmt: skip
    launch(script, *flags, "--resume", processes=2, use_launcher=True, cwd=folder)
    return output


def test_outputs(run):
    names = {"model", "checkpoints", "metrics.jsonl", "args.yaml", "training.png"}
    assert names <= {path.name for path in run.iterdir()}
    lines = metrics(run)
    assert set(lines[0]) == {"step"} | MEASURES and lines[0]["step"] == 0
    expected = {"step", "loss", "learning_rate", "grad_norm", "padding_fraction"} | MEASURES
    assert set(lines[-1]) == expected | RATES and 0 <= lines[-1]["data_wait_fraction"] < 1
    assert lines[-1]["held_out_cosine_mrr@10"] > lines[0]["held_out_cosine_mrr@10"]
    assert (run / "training.png").read_bytes()[:4] == b"\x89PNG"


def test_card(run):
    """That of the library, with steps and script; the flags beside it repeat the run."""
    text, last = (run / "model/README.md").read_text(), metrics(run)[-1]
    assert "library_name: sentence-transformers" in text
    assert f"\nTrained for {last['step']} steps by `train_bi_encoder.py args.yaml`.\n" in text
    assert (run / "model/args.yaml").read_bytes() == (run / "args.yaml").read_bytes()
    again = train_bi_encoder.parse_args([str(run / "model/args.yaml")])
    given = yaml.safe_load((run / "args.yaml").read_text())
    assert given == {name: getattr(again, name) for name in given}
    assert again.query_prompt == "query: " and not again.resume


def test_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = EventAccumulator(str(run / "evenstep")).Reload()
    losses = [event.value for event in logged.Scalars("loss")]
    assert losses == pytest.approx([line["loss"] for line in metrics(run) if "loss" in line], rel=1e-6)


def test_help_prints_each_flag_once(capsys):
    with pytest.raises(SystemExit) as ended:
        train_bi_encoder.parse_args(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    printed = re.findall(r"^  (--\w[\w-]*)", text, re.M)
    assert printed == [f"--{name}" for name in train_bi_encoder.Args.__dataclass_fields__]
    assert not re.search(r"--\w+-\w", text.partition("options:")[2])


@pytest.mark.parametrize("name", EACH_TRAINER)
def test_at_most_ten_evaluations_and_the_first(corpus, bert, tmp_path, name):
    flags = ["--train_data", f"{corpus}/*.parquet", "--columns", "docstring", "code", "--model_name_or_path", bert,
             "--batch_size", 4, "--max_steps", 15, "--num_negatives", 2, "--eval_rows", 8, "--max_length", 32,
             "--save_steps", 0, "--output_dir", tmp_path]  # fmt: skip
    train(name, *flags)
    measure = "held_out_cosine_ndcg@10" if name == "train_bi_encoder" else "held_out_ndcg@10"
    assert [line["step"] for line in metrics(tmp_path) if measure in line] == [0, 2, 4, 6, 8, 10, 12, 14, 15]


@pytest.mark.slow
def test_start_here(tmp_path, rows, bert, monkeypatch, capsys):
    """The commands of "Start here" in docs/training.md lead from pairs.csv to two models that are compared."""
    page = (ROOT / "docs/training.md").read_text()
    (section,) = re.findall(r"^## Start here\n(.+?)^## ", page, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # holds the embedding cache
    shutil.copytree(bert, "sentence-transformers/all-MiniLM-L6-v2")
    with open("pairs.csv", "w", newline="") as file:
        csv.writer(file).writerows([["question", "answer"], *(row.values() for row in rows)])

    commands = "".join(re.findall(r"^```sh\n(.+?)^```$", section, re.M | re.S)).replace("\\\n", "")
    commands = commands.replace(" --relative_margin 0.05", "")  # a random model scores all answers alike
    for command in re.split(r"^(?=python )", commands, flags=re.M)[1:]:
        _, script, *words = shlex.split(command)
        if script == "-c":
            exec(words[0], {})
        else:
            module = importlib.import_module(script.removesuffix(".py"))
            module.main(module.parse_args(words))

    with open("test.csv", newline="") as test, open("train.csv", newline="") as rest:
        held_out, others = ({row["question"] for row in csv.DictReader(file)} for file in (test, rest))
    assert len(held_out) == 250 and not held_out & others
    assert held_out | others == {row["docstring"] for row in rows}
    assert (tmp_path / "runs/second/model/model.safetensors").exists()
    results = json.loads((tmp_path / "runs/second/test/metrics.json").read_text())["results"]
    assert len(results) == 2 and all(result["queries"] == 250 for result in results)
