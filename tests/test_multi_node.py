"""Two machines, each a network namespace with its own address, train the same model as one process.

They share a disk, as required: every process reads the data and the checkpoints, and rank 0 writes.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, launch, metrics, weights
from forked import Forked, launcher_environment

SCRIPT = ROOT / "train_bi_encoder.py"
STEPS = 12


def ip(*words):
    """Return what `ip` prints."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def send(hosts, number):
    """Send a signal to every process on the hosts, as Slurm does to every process of a job step."""
    for name, _ in hosts:
        for process in ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(process), number)


@pytest.fixture(scope="module")
def hosts():
    """[(namespace, address)] of two hosts that are connected to each other and to nothing else."""
    hosts = [(f"evenstep{os.getpid()}{end}", f"10.99.0.{number}") for number, end in enumerate("ab", 1)]
    made = []
    try:
        for name, _ in hosts:
            ip("netns", "add", name)
            made.append((name, None))
        ip("link", "add", "eth0", "netns", hosts[0][0], "type", "veth", "peer", "name", "eth0", "netns", hosts[1][0])
        for name, address in hosts:
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
        yield hosts
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot create two network namespaces: {getattr(error, 'stderr', error)}")
    finally:
        send(made, signal.SIGKILL)
        for name, _ in made:
            ip("netns", "delete", name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Working folder with the files of accelerate_configs/; its multi_node.yaml is set to CPUs and float32."""
    folder = tmp_path_factory.mktemp("shared")
    shutil.copytree(ROOT / "accelerate_configs", folder / "accelerate_configs")
    config = yaml.safe_load((ROOT / "accelerate_configs/multi_node.yaml").read_text())
    config |= {"use_cpu": True, "mixed_precision": "no"}
    (folder / "accelerate_configs/multi_node.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="module")
def flags(folder, corpus, bert):
    """Flags of a short run without dropout, whose masks depend on the process."""
    flags = ["--train_data", f"{corpus}/*.parquet", "--columns", "docstring", "code", "--model_name_or_path", bert,
             "--max_steps", STEPS, "--batch_size", 30, "--micro_batch_tokens", 600, "--eval_rows", 40,
             "--eval_steps", STEPS, "--logging_steps", 1, "--dropout", 0, "--learning_rate", 4e-5]  # fmt: skip
    return list(map(str, flags))


def fork_on(hosts, folder, flags, *outputs, words=()):
    """Run the script on both hosts, one process each, as the launcher would; return (exit status, stderr)."""
    words = words or ["--config_file", folder / "accelerate_configs/multi_node.yaml", "--num_processes=2"]
    environment = launcher_environment(*words, "--machine_rank=1", f"--main_process_ip={hosts[0][1]}")
    environment |= {"GLOO_SOCKET_IFNAME": "eth0"}
    per_rank = [["--output_dir", output] for output in outputs]
    process = Forked(SCRIPT, flags, 2, folder, environment=environment, networks=hosts, per_rank=per_rank)
    return process.wait(), process.read("stderr")


@pytest.fixture(scope="module")
def two_machines(hosts, folder, flags):
    """Output folder of a run on both hosts."""
    status, errors = fork_on(hosts, folder, flags, "two_machines", "two_machines")
    assert status == 0, errors[-4000:]
    return folder / "two_machines"


def test_two_machines_train_the_same_model_as_one_process(two_machines, folder, flags, bert):
    """Compares weights, losses and gradient norms: AdamW alone would hide a gradient of the wrong scale."""
    launch(SCRIPT, *flags, "--output_dir", "one_process", cwd=folder)
    found, expected = weights(two_machines / "model"), weights(folder / "one_process/model")
    change = (expected - weights(bert)).norm()
    assert change / expected.norm() > 1e-3
    assert ((found - expected).norm() / expected.norm()).item() < 1e-5
    assert ((found - expected).norm() / change).item() < 1e-3
    for name in ("loss", "grad_norm"):
        runs = folder / "one_process", two_machines
        one, two = ([line[name] for line in metrics(run) if name in line] for run in runs)
        assert len(one) == STEPS and two == pytest.approx(one, rel=1e-5)


FAKES = {
    "scontrol": "echo $1 >> scontrol.log; printf '10.99.0.1\\n10.99.0.2\\n'",
    "srun": """shift
SLURM_NODEID=0 ip netns exec {} "$@" & first=$!
SLURM_NODEID=1 ip netns exec {} "$@" & wait $! && wait $first""",
}


@pytest.mark.slow
def test_slurm_job_stopped_and_requeued_is_bit_identical(two_machines, hosts, folder, flags):
    """slurm.sh with fake srun and scontrol. Every process receives SIGTERM, as it does before the time limit.

    For the requeued job, a fake `accelerate` records its arguments, and the test runs them in forked processes.
    """
    (folder / "bin").mkdir()

    def write_fake(name, text):
        (folder / "bin" / name).write_text("#!/bin/bash\n" + text.format(*(name for name, _ in hosts)) + "\n")
        (folder / "bin" / name).chmod(0o755)

    for name, text in FAKES.items():
        write_fake(name, text)
    path = f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "GLOO_SOCKET_IFNAME": "eth0", "SLURM_JOB_NODELIST": "node[1-2]",
                   "SLURM_JOB_ID": "4711", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"}  # fmt: skip
    command = ["bash", "accelerate_configs/slurm.sh", str(SCRIPT), *flags, "--output_dir", "slurm"]
    output = folder / "slurm"
    with open(folder / "slurm.log", "w") as log:
        job = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + 240
        while job.poll() is None and time.monotonic() < deadline:
            if (output / "metrics.jsonl").exists() and (lines := metrics(output)) and lines[-1]["step"] >= 3:
                send(hosts, signal.SIGTERM)
                break
            time.sleep(0.01)
        job.wait(120)
    assert (folder / "scontrol.log").read_text().split() == ["show", "requeue"]
    (checkpoint,) = (output / "checkpoints").iterdir()
    assert 3 <= int(checkpoint.name[5:]) < STEPS and not (output / "model").exists()
    before = (output / "metrics.jsonl").read_text()
    write_fake("accelerate", """printf '%s\\n' "$@" > words$SLURM_NODEID""")
    subprocess.run(command, cwd=folder, env=environment, check=True)
    words = [(folder / f"words{number}").read_text().splitlines() for number in range(2)]
    changed = [pair for pair in zip(*words, strict=True) if len(set(pair)) > 1]
    at = words[0].index(str(SCRIPT))
    assert changed == [("0", "1")] and words[0][0] == "launch"
    assert words[0][at + 1 :][-3:] == ["--output_dir", "slurm", "--resume"]
    options = [folder / word if word.endswith("multi_node.yaml") else word for word in words[0][1:at]]
    status, errors = fork_on(hosts, folder, words[0][at + 1 :], words=options)
    assert status == 0, errors[-4000:]
    assert (output / "metrics.jsonl").read_text().startswith(before)  # with its speeds: resumed, not restarted
    found, expected = ((run / "model/model.safetensors").read_bytes() for run in (output, two_machines))
    assert found == expected
