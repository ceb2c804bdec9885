"""A run whose launcher restarts it after a process was killed; without a launcher: test_kills.py."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT, launch, metrics

SCRIPT = ROOT / "train_bi_encoder.py"


def kill_a_worker(launcher, output):
    """Send SIGKILL to the second worker of torchrun once there is a checkpoint; return the lines of metrics.jsonl."""
    deadline = time.monotonic() + 240
    while not list(output.glob("checkpoints/step_*")):
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    _, worker = psutil.Process(launcher.pid).children()
    os.kill(worker.pid, signal.SIGKILL)
    return (output / "metrics.jsonl").read_text().splitlines()


@pytest.mark.chaos
def test_torchrun_restarts_from_the_newest_checkpoint(tmp_path, corpus, bert):
    output, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    flags = ["--model_name_or_path", bert, "--train_data", f"{corpus}/*.parquet", "--batch_size", 16,
             "--columns", "docstring", "code", "--max_length", 32, "--max_steps", 60, "--save_steps", 5,
             "--logging_steps", 1, "--eval_rows", 0]  # fmt: skip
    launch(SCRIPT, *flags, "--output_dir", undisturbed, processes=2)
    # With one store for all groups, new processes can read addresses of those that are gone, and hang.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=3"]
    command += [SCRIPT, *flags, "--output_dir", output, "--resume"]
    with open(tmp_path / "log", "w") as log:
        launcher = subprocess.Popen(list(map(str, command)), env=environment, stdout=log, stderr=log)
        try:
            before = kill_a_worker(launcher, output)
            status = launcher.wait(240)
        finally:
            launcher.terminate()  # ends its workers, too
            launcher.wait()
    assert status == 0, (tmp_path / "log").read_text()[-4000:]
    assert len(before) < len(metrics(output)) == len(metrics(undisturbed))
    assert (output / "metrics.jsonl").read_text().splitlines()[:5] == before[:5]  # with their speeds: not started anew
    found, expected = ((run / "model/model.safetensors").read_bytes() for run in (output, undisturbed))
    assert found == expected
