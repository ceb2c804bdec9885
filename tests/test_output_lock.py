"""Two processes that write to one output folder at once: each result is that of one of them, and whole."""

import json
import signal
import time

import pytest
from conftest import ROOT, TRAINERS, launch, quick_first, read_run
from forked import Forked

STEPS = 200


def flags_of(corpus, model):
    return ["--train_data", f"{corpus}/*.parquet", "--columns", "docstring", "code", "--model_name_or_path", model,
            "--batch_size", 8, "--eval_rows", 0, "--max_length", 32, "--num_negatives", 2]  # fmt: skip


def wait_for_checkpoint(process, output):
    while not list(output.glob("checkpoints/step_*")):
        assert process.poll() is None, process.read("stderr")[-2000:]
        time.sleep(0.01)


@pytest.mark.parametrize("name, processes", quick_first(zip(TRAINERS, [1, 2])))
def test_a_second_run_in_one_folder_is_refused(corpus, bert, tmp_path, name, processes):
    """With --resume and without, on one process and two, until the first has ended, here by SIGKILL."""
    script, output = ROOT / f"{name}.py", tmp_path / "out"
    flags = [*flags_of(corpus, bert), "--save_steps", 2, "--max_steps", STEPS, "--output_dir", output]
    first = Forked(script, flags, processes)
    wait_for_checkpoint(first, output)
    for number, more in (processes, ["--resume"]), (3 - processes, []):
        second = launch(script, *flags, *more, processes=number, check=False)
        errors = [line for line in second.stderr.splitlines() if line.startswith("error: ")]
        assert second.returncode == 1 and errors == [f"error: --output_dir {output}: another run is writing to it"]
        assert "Traceback" not in second.stderr
    assert first.poll() is None
    first.send(signal.SIGKILL)
    first.wait()
    more = ["--resume", "--accept_changes", "--max_steps", int(max(output.glob("checkpoints/step_*")).name[5:]) + 12]
    launch(script, *flags, *more, processes=processes)
    assert (output / "model").exists()


@pytest.mark.slow
def test_two_runs_that_start_together(corpus, bert, tmp_path):
    """In a folder that neither has made yet."""
    flags = [*flags_of(corpus, bert), "--save_steps", 1, "--max_steps", 30, "--output_dir", tmp_path / "new/out"]
    runs = [Forked(ROOT / "train_bi_encoder.py", flags) for _ in range(2)]
    assert sorted(run.wait() for run in runs) == [0, 1]
    (error,) = [run.read("stderr") for run in runs if run.poll()]
    assert f"error: --output_dir {tmp_path}/new/out: another run is writing to it" in error


@pytest.mark.slow
def test_two_evaluations_in_one_folder(beir, bert, static, tmp_path):
    """The folder has the results of one of two models; the other evaluation ends in an error, its vectors cached."""
    output, runs = tmp_path / "out", []
    for model in (bert, static):
        flags = ["--model_name_or_path", model, "--beir", beir, "--cache_dir", tmp_path / "cache"]
        flags += ["--output_dir", output]
        runs.append(Forked(ROOT / "eval_incremental.py", flags))
    statuses = [run.wait() for run in runs]
    assert sorted(statuses) == [0, 1]
    won = [bert, static][statuses.index(0)]
    assert json.loads((output / "metrics.json").read_text())["args"]["model_name_or_path"] == [str(won)]
    alone = ["--model_name_or_path", won, "--beir", beir, "--cache_dir", tmp_path / "cache"]
    launch(ROOT / "eval_incremental.py", *alone, "--output_dir", tmp_path / "alone")
    assert read_run(output / "run.trec") == read_run(tmp_path / "alone/run.trec")
    assert f"--output_dir {output}: contains the results of" in runs[statuses.index(1)].read("stderr")
