"""Runs that are stopped and resumed; tests/chaos/test_kills.py has those that are killed."""

import json
import random
import shutil
import signal
import time

import pytest
from conftest import ROOT, TRAINERS, few_or_all, launch, metrics, write_jsonl
from forked import Forked

STEPS = 400  # of a run that is stopped before its end


def signal_when(process, output_dir, steps, number, ranks=slice(None)):
    """Send `number` to the processes of `ranks` once metrics.jsonl has reached `steps`; return the exit status."""
    while process.poll() is None:
        lines = metrics(output_dir) if (output_dir / "metrics.jsonl").exists() else []
        if lines and lines[-1]["step"] >= steps:
            time.sleep(random.random() * 0.05)  # a step takes 0.05 to 0.1 s
            process.send(number, ranks)
            break
        time.sleep(0.01)
    return process.wait()


def losses(output_dir):
    return {line["step"]: line["loss"] for line in metrics(output_dir) if "loss" in line}


def state(output_dir, step):
    return json.loads((output_dir / f"checkpoints/step_{step:08}/state.json").read_text())


@pytest.fixture(scope="module")
def settings(tmp_path_factory, rows, bert):
    """{way of reading: flags}: a mapped run, and a stream of mixed, shuffled sources."""
    folder = tmp_path_factory.mktemp("rows")
    for number in range(2):
        write_jsonl(folder / f"{number}.jsonl", rows[number::2])
    common = ["--model_name_or_path", bert, "--eval_rows", 50, "--batch_size", 32, "--max_length", 32,
              "--logging_steps", 1, "--eval_steps", 20, "--micro_batch_tokens", 600, "--learning_rate", 1e-3,
              "--train_data", folder / "0.jsonl", folder / "1.jsonl"]  # fmt: skip
    stream = ["--streaming", "--shuffle_buffer", 60, "--mixing_weights", 0.4, 0.6, "--mix_by", "batch"]
    return {"mapped": [*common, "--length_window", 2], "streaming": [*common, *stream]}


TWO = [("train_bi_encoder", "streaming"), ("train_cross_encoder", "mapped")]


@pytest.mark.parametrize("name, way", few_or_all(TWO, TRAINERS, ["mapped", "streaming"]))
def test_resumed_on_another_process_count(settings, tmp_path, name, way):
    """The remaining batches are the same rows: without dropout, the same losses."""
    script, few = ROOT / f"{name}.py", ["--eval_rows", 10] * (name == "train_cross_encoder")  # each ranks 10 documents
    flags = [*settings[way], *few, "--max_steps", 9, "--save_steps", 4, "--save_total_limit", 3, "--dropout", 0]
    flags += ["--output_dir", tmp_path]
    launch(script, *flags, processes=1)
    data_state, before = state(tmp_path, 9)["data_state"], losses(tmp_path)
    for step in (8, 9):
        shutil.rmtree(tmp_path / f"checkpoints/step_{step:08}")
    launch(script, *flags, "--resume", processes=2)
    after = losses(tmp_path)
    assert list(after) == list(before) == list(range(1, 10))
    assert list(after.values()) == pytest.approx(list(before.values()), rel=1e-3)
    for one, two in zip(data_state["sources"], state(tmp_path, 9)["data_state"]["sources"]):
        assert one | {"stream": None} == two | {"stream": None}  # a position in a stream has several forms


@pytest.mark.parametrize("name, processes", [("train_bi_encoder", 2), ("train_cross_encoder", 1)])
def test_resumed_past_a_bad_row_by_skipping_it(rows, bert, tmp_path, name, processes):
    """The steps before the bad row are kept; the later ones are bit-identical to a run that skips from the start."""
    rows = [{**row, "code": ""} if i == 333 else row for i, row in enumerate(rows)]
    write_jsonl(tmp_path / "x.jsonl", rows)
    flags = ["--model_name_or_path", bert, "--train_data", tmp_path / "x.jsonl", "--eval_rows", 0, "--batch_size", 16,
             "--max_steps", len(rows) // 32, "--shuffle_buffer", 100, "--logging_steps", 1, "--save_steps", 0,
             "--max_length", 32, "--gradient_accumulation_steps", 2]  # fmt: skip
    script, out, whole = ROOT / f"{name}.py", tmp_path / "out", tmp_path / "whole"
    launch(script, *flags, "--output_dir", whole, "--on_bad_row", "skip", processes=processes)
    done = launch(script, *flags, "--output_dir", out, processes=processes, check=False)
    assert done.returncode and "'code' has no text in the row" in done.stderr and "--on_bad_row skip" in done.stderr
    (kept,) = (out / "checkpoints").iterdir()
    assert 2 <= int(kept.name.removeprefix("step_")) == metrics(out)[-1]["step"] < len(rows) // 32 - 1
    launch(script, *flags, "--output_dir", out, "--on_bad_row", "skip", "--resume", processes=processes)
    lines = [[(line["step"], line.get("loss")) for line in metrics(folder)] for folder in (out, whole)]
    assert lines[0] == lines[1]  # each step once
    last = f"checkpoints/step_{len(rows) // 32:08}"
    states = [json.loads((folder / last / "state.json").read_text()) for folder in (out, whole)]
    assert states[0]["data_state"] == states[1]["data_state"]
    assert states[0]["data_state"]["sources"][0]["skipped"] > 0
    assert (out / last / "model.safetensors").read_bytes() == (whole / last / "model.safetensors").read_bytes()


@pytest.mark.parametrize("way, processes, ranks", [("mapped", 1, slice(None)), ("streaming", 2, slice(1, 2))],
                         ids=["one", "second of two"])  # fmt: skip
@pytest.mark.parametrize("name", TRAINERS)
def test_sigterm_finishes_the_step_and_exits_cleanly(settings, tmp_path, name, way, processes, ranks):
    """All processes stop after the same step, whichever of them receives the signal; the run can be resumed."""
    script, output = ROOT / f"{name}.py", tmp_path / "out"
    flags = [*settings[way], "--eval_rows", 10, "--eval_steps", 1000, "--batch_size", 8, "--save_steps", 0]
    flags += ["--output_dir", output]
    process = Forked(script, [*flags, "--max_steps", STEPS], processes, timeout=120)
    assert signal_when(process, output, 3, signal.SIGTERM, ranks) == 0
    last = metrics(output)[-1]["step"]
    assert 3 <= last < STEPS
    assert [folder.name for folder in (output / "checkpoints").iterdir()] == [f"step_{last:08}"]
    assert not (output / "model").exists() and "--resume" in process.read("stdout")
    launch(script, *flags, "--max_steps", last + 2, "--resume", processes=processes)
    assert metrics(output)[-1]["step"] == last + 2 and (output / "model").exists()
