"""Whole runs as a user starts them: what they leave behind, what loads, what runs alone in an empty folder."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, launch, metrics

SCRIPT = ROOT / "train_bi_encoder.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    """Output folder of a run from scratch on one process, with tensorboard."""
    output = tmp_path_factory.mktemp("run") / "out"
    flags = ["--train_data", corpus, "--batch_size", 64, "--num_epochs", 3, "--eval_rows", 100, "--log_every", 2,
             "--report_to", "tensorboard", "--output_dir", output, "--prompts", "query: ", "code: "]  # fmt: skip
    launch(SCRIPT, *flags, really=True)
    return output


def test_outputs(run):
    names = {"model", "checkpoints", "metrics.jsonl", "args.yaml", "training.png"}
    assert names <= {path.name for path in run.iterdir()}
    lines = metrics(run)
    assert {"MRR@10", "nDCG@10", "accuracy@1"} <= set(lines[0]) and lines[0]["step"] == 0
    wanted = {"loss", "learning_rate", "rows_per_second", "tokens_per_second", "padding_fraction", "MRR@10"}
    assert wanted <= set(lines[-1]) and 0 <= lines[-1]["data_wait_fraction"] < 1
    assert lines[-1]["MRR@10"] > lines[0]["MRR@10"]
    assert (run / "training.png").read_bytes()[:4] == b"\x89PNG"
    card = (run / "model/README.md").read_text()
    assert "library_name: sentence-transformers" in card and f"{lines[-1]['MRR@10']:.4f}" in card
    assert "python train_bi_encoder.py" in card and "--batch_size 64" in card


def test_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = EventAccumulator(str(run / "evenstep")).Reload()
    losses = [event.value for event in logged.Scalars("loss")]
    assert losses == pytest.approx([line["loss"] for line in metrics(run) if "loss" in line], rel=1e-6)


def test_saved_model_gives_the_same_embeddings_in_a_fresh_process(run):
    from safetensors.torch import load_file
    from sentence_transformers import SentenceTransformer

    import train_bi_encoder as script

    code = "import sys; from sentence_transformers import SentenceTransformer as S; m = S(sys.argv[1], device='cpu');"
    code += "print(m.encode_query(['how to read a file']).tolist())"
    fresh = subprocess.run([sys.executable, "-c", code, run / "model"], capture_output=True, text=True, check=True)
    trained = SentenceTransformer(str(run / "from_scratch"), device="cpu")
    newest, _ = script.newest_checkpoint(run / "checkpoints")
    trained.load_state_dict(load_file(newest / "model.safetensors"))
    wanted = trained.encode("query: how to read a file")  # the prompt of queries came along
    assert torch.allclose(torch.tensor(json.loads(fresh.stdout)[0]), torch.tensor(wanted), atol=1e-6)


def test_args_yaml_runs_again_to_the_same_weights(run, tmp_path):
    launch(SCRIPT, run / "args.yaml", "--output_dir", tmp_path / "again")
    weights = [(folder / "model/model.safetensors").read_bytes() for folder in (run, tmp_path / "again")]
    assert weights[0] == weights[1]


def test_copied_alone_into_an_empty_folder(tmp_path, corpus):
    shutil.copy(SCRIPT, tmp_path)
    shutil.copytree(corpus, tmp_path / "pairs")
    flags = ["--train_data", "pairs", "--max_steps", "2", "--batch_size", "32", "--eval_rows", "20"]
    command = [sys.executable, "-I", "train_bi_encoder.py", *flags]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "runs/bi_encoder/model/model.safetensors").exists()


def test_without_arguments_or_demo_corpus_one_line_says_what_to_do(tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    done = subprocess.run([sys.executable, "train_bi_encoder.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "python prepare_corpus.py" in done.stderr.splitlines()[-1]


def test_two_processes_train_the_same_model(tmp_path, corpus, bert):
    """Without dropout, which is another on each process. AdamW divides by small numbers, hence not 1e-5."""
    steady = tmp_path / "steady"
    shutil.copytree(bert, steady)
    config = json.loads((steady / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (steady / "config.json").write_text(json.dumps(config))
    flags = ["--train_data", corpus, "--model_name_or_path", steady, "--max_steps", 6, "--batch_size", 30,
             "--log_every", 1, "--eval_rows", 40, "--matryoshka_dims", 32, 16,
             "--gradient_accumulation_steps", 2]  # fmt: skip
    for processes in (1, 2):
        launch(SCRIPT, *flags, "--output_dir", tmp_path / str(processes), processes=processes, really=True)
    first, second = ([line["loss"] for line in metrics(tmp_path / n) if "loss" in line] for n in "12")
    assert len(first) == 6 and second == pytest.approx(first, rel=1e-4)


def test_help_names_every_flag():
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True)
    design = """
        train_data streaming columns label_column mixing_weights mix_by stopping_strategy eval_rows
        shuffle_buffer length_window on_bad_row model_name_or_path max_length pooling dropout prompts batch_size
        micro_batch_tokens gradient_accumulation_steps grad_cache loss loss_args matryoshka_dims num_negatives
        learning_rate weight_decay warmup_ratio max_grad_norm num_epochs rows_per_epoch max_steps seed
        output_dir resume accept_changed_data eval_every save_every keep_checkpoints log_every report_to
    """
    for flag in design.split():
        assert re.search(rf"--{flag}\b", done.stdout), flag


def test_readme_commands_are_real():
    """The flags that the README names exist, and the files it launches are there."""
    import eval_incremental
    import train_bi_encoder
    import train_cross_encoder

    text = (ROOT / "README.md").read_text()
    fields = {
        m.__name__: set(m.Args.__dataclass_fields__) for m in (eval_incremental, train_bi_encoder, train_cross_encoder)
    }
    fields["prepare_corpus"] = set(re.findall(r'option\(\s*"--(\w+)"', (ROOT / "prepare_corpus.py").read_text()))
    for flag in set(re.findall(r"--([a-z_0-9]+)", text)) - {"config_file", "help"}:
        assert any(flag in known for known in fields.values()), flag
    commands = re.findall(r"^(?:python|accelerate launch).*?(\w+)\.py\b(.*)$", re.sub(r"\\\n *", "", text), re.M)
    assert len(commands) >= 5
    for name, rest in commands:
        for flag in re.findall(r"--([a-z_0-9]+)", rest):
            assert name not in fields or flag in fields[name], (name, flag)
    for path in re.findall(r"accelerate_configs/\w+\.yaml|\b\w+\.py\b|tests/\w+\.py", text):
        assert (ROOT / path).exists() or (ROOT / "benchmarks" / path).exists(), path
    assert os.access(ROOT / ".ci/run", os.X_OK)
