"""Whole runs as a user starts them: outputs, loading the model, a script copied alone into an empty folder."""

import json
import math
import re
import shlex
import shutil

import pytest
import torch
import yaml
from conftest import RATES, ROOT, launch, metrics
from sentence_transformers import SentenceTransformer

import train_bi_encoder

SCRIPT = ROOT / "train_bi_encoder.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus, static):
    """Output folder of a run with tensorboard, started by Accelerate's launcher on two processes, of the script copied
    alone into an empty folder."""
    folder = tmp_path_factory.mktemp("run")
    script, output = shutil.copy(SCRIPT, folder), folder / "out"
    flags = ["--train_data", corpus, "--model_name_or_path", static, "--batch_size", 64, "--num_train_epochs", 3,
             "--eval_rows", 100, "--logging_steps", 1, "--learning_rate", 0.01, "--report_to", "tensorboard",
             "--output_dir", output, "--prompts", "query: ", "code: "]  # fmt: skip
    launch(script, *flags, "--resume", processes=2, use_launcher=True, cwd=folder)
    return output


def test_outputs(run):
    names = {"model", "checkpoints", "metrics.jsonl", "args.yaml", "training.png"}
    assert names <= {path.name for path in run.iterdir()}
    lines = metrics(run)
    assert {"MRR@10", "nDCG@10", "accuracy@1"} <= set(lines[0]) and lines[0]["step"] == 0
    expected = {"step", "loss", "learning_rate", "grad_norm", "padding_fraction", "MRR@10", "nDCG@10", "accuracy@1"}
    optional = {"checkpoint_seconds"}  # of a checkpoint since the last line
    assert set(lines[-1]) - optional == (expected | RATES) - optional and 0 <= lines[-1]["data_wait_fraction"] < 1
    assert lines[-1]["MRR@10"] > lines[0]["MRR@10"]
    assert (run / "training.png").read_bytes()[:4] == b"\x89PNG"


def test_schedule(run):
    """The learning rate warms up over a tenth of the steps, starting above 0, and then decays linearly."""
    rates = [line["learning_rate"] for line in metrics(run) if "learning_rate" in line]
    steps, warmup = len(rates), math.ceil(len(rates) / 10)
    expected = [(step + 1) / warmup if step < warmup else (steps - step) / (steps - warmup) for step in range(steps)]
    assert rates == pytest.approx([0.01 * share for share in expected])


def test_card(run):
    """It reports steps, held-out rows, measures and the command."""
    text, last = (run / "model/README.md").read_text(), metrics(run)[-1]
    card = " ".join(text.split())
    assert "library_name: sentence-transformers" in card and f"{last['MRR@10']:.4f}" in card
    assert "100 held-out rows" in card and f"{last['step']:,} steps of 64 rows" in card
    (command,) = re.findall(r"^ +python (.*train_bi_encoder\.py .*)$", text, re.M)
    again = train_bi_encoder.parse_args(shlex.split(command)[1:])
    assert train_bi_encoder.flags_of_run(again) == yaml.safe_load((run / "args.yaml").read_text())
    assert "--resume" not in command and "--prompts 'query: ' 'code: '" in command and "--batch_size" not in command


def test_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = EventAccumulator(str(run / "evenstep")).Reload()
    losses = [event.value for event in logged.Scalars("loss")]
    assert losses == pytest.approx([line["loss"] for line in metrics(run) if "loss" in line], rel=1e-6)


def test_model_and_checkpoint_load_in_sentence_transformers(run, tmp_path):
    """In another process, the saved model applies its prompts; the newest checkpoint gives the same embeddings."""
    code = "import sys; from sentence_transformers import SentenceTransformer as S; m = S(sys.argv[1], device='cpu')\n"
    (tmp_path / "load.py").write_text(code + "print(m.encode_query(['how to read a file']).tolist())")
    other = launch(tmp_path / "load.py", run / "model")
    newest = max((run / "checkpoints").iterdir())
    expected = SentenceTransformer(str(newest), device="cpu").encode("query: how to read a file")
    assert torch.allclose(torch.tensor(json.loads(other.stdout)[0]), torch.tensor(expected), atol=1e-6)


def test_copied_alone_into_an_empty_folder(tmp_path, corpus, static):
    shutil.copy(SCRIPT, tmp_path)
    shutil.copytree(corpus, tmp_path / "pairs")
    flags = ["--train_data", "pairs", "--model_name_or_path", static, "--max_steps", "2", "--eval_rows", "20"]
    launch(tmp_path / "train_bi_encoder.py", *flags, cwd=tmp_path)
    assert list((tmp_path / "runs/bi_encoder/model").rglob("model.safetensors"))
    done = launch(tmp_path / "train_bi_encoder.py", cwd=tmp_path, check=False)
    assert done.returncode and "python prepare_corpus.py" in done.stderr.splitlines()[-1]


def test_help_prints_each_flag_once(capsys):
    import train_bi_encoder as script

    with pytest.raises(SystemExit) as ended:
        script.parse_args(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    printed = re.findall(r"^  (--\w[\w-]*)", text, re.M)
    assert printed == [f"--{name}" for name in script.Args.__dataclass_fields__]
    assert not re.search(r"--\w+-\w", text.partition("options:")[2])
