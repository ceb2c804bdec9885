"""Worker processes prepare batches, and leave no orphan, whatever ends. With any number of them a run has the same
bytes: tests/chaos/test_kills.py."""

import os
import re
import resource
import signal
import time

import psutil
import pytest
from conftest import ROOT, mark_slow, metrics, train
from forked import Forked


def flags_for(corpus, model, output, *more):
    return ["--train_data", f"{corpus}/*.parquet", "--columns", "docstring", "code", "--model_name_or_path", model,
            "--batch_size", 16, "--max_length", 48, "--max_steps", 4, "--eval_rows", 10, "--logging_steps", 1,
            "--micro_batch_tokens", 400, "--output_dir", output, *more]  # fmt: skip


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children_of(process):
    return [child for child in psutil.Process(process.processes[0].pid).children() if child.is_running()]


@pytest.fixture
def running(corpus, bert, tmp_path):
    """A run of many steps with two workers, once it trains."""
    flags = flags_for(corpus, bert, tmp_path / "out", "--max_steps", 3000, "--dataloader_num_workers", 2)
    process = Forked(ROOT / "train_bi_encoder.py", flags, 1, ROOT)
    wait_for(lambda: (tmp_path / "out/metrics.jsonl").exists() and len(metrics(tmp_path / "out")) > 3)
    yield process
    process.send(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("number", mark_slow([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_no_worker_outlives_the_run(running, number):
    workers = children_of(running)
    assert len(workers) == 2
    running.send(number)
    running.wait()
    psutil.wait_procs(workers, timeout=10)
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)


def test_a_killed_worker_is_named(running):
    os.kill(children_of(running)[0].pid, signal.SIGKILL)
    assert running.wait() == 1
    said = running.read("stderr")
    assert re.search(r"\nRuntimeError: DataLoader worker \(pid \d+\) is killed by signal: Killed", said)
    advice = "the same command with --resume continues from the newest checkpoint, if any"
    in_loss = "error: the loss failed" in said  # torch raises the error in whatever the main thread does
    assert in_loss or said.endswith(f"\n{advice}\n")


@pytest.mark.slow
def test_few_file_descriptors_suffice(corpus, bert, tmp_path):
    """Arrays cross by a pipe; tensors would need a descriptor each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, hard))
    try:
        train("train_bi_encoder", *flags_for(corpus, bert, tmp_path, "--batch_size", 64, "--max_steps", 8))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert metrics(tmp_path)[-1]["step"] == 8
