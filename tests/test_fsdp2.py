"""FSDP2 on two CPU processes trains the same model as whole copies do, and resumes bit-identically."""

import importlib
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin
from conftest import RATES, ROOT, TRAINERS, launch, metrics, weights
from forked import launcher_environment
from safetensors.torch import load_file

SETTINGS = {
    "train_bi_encoder": ("bert", ["--gradient_accumulation_steps", 2]),
    "train_cross_encoder": ("reranker", ["--grad_cache", "true", "--num_negatives", 2]),
}


def launch_sharded(folder, script, *flags, precision="no"):
    """Run a trainer with accelerate_configs/fsdp2.yaml on two CPU processes; return what it prints."""
    config = yaml.safe_load((ROOT / "accelerate_configs/fsdp2.yaml").read_text())
    config |= {"use_cpu": True, "num_processes": 2, "mixed_precision": precision, "main_process_port": 0}
    (folder / "fsdp2.yaml").write_text(yaml.safe_dump(config))
    environment = launcher_environment("--config_file", folder / "fsdp2.yaml")
    return launch(ROOT / "tests/fsdp2_worker.py", script, *flags, processes=2, environment=environment).stdout


@pytest.mark.parametrize("script", TRAINERS)
def test_fsdp2_equals_whole_copies_and_resumes_bit_identically(tmp_path, corpus, script, request):
    """With dropout, whose seeds do not depend on sharding."""
    model, others = SETTINGS[script]
    model = request.getfixturevalue(model)
    flags = ["--train_data", corpus, "--model_name_or_path", model, "--max_steps", 6, "--batch_size", 15,
             "--eval_rows", 21, "--micro_batch_tokens", 400, "--learning_rate", 1e-4, "--logging_steps", 1,
             "--eval_steps", 3, "--save_steps", 3, *others]  # fmt: skip
    whole, fsdp, resumed = tmp_path / "whole", tmp_path / "fsdp", tmp_path / "resumed"
    launch(ROOT / f"{script}.py", *flags, "--output_dir", whole, processes=2)
    printed = launch_sharded(tmp_path, script, *flags, "--output_dir", fsdp)
    seen = re.findall(r"(\d+) tensors were sharded, (\d+) of \d+ micro-batches", printed)
    assert len(seen) == 2 and all(int(sharded) > 100 for sharded, _ in seen)
    assert sum(int(repeated) for _, repeated in seen) > 0, "both processes always had equally many micro-batches"
    assert "copied, moved" in printed  # a copy made on the device would take the memory of a second model

    found, expected = weights(fsdp / "model"), weights(whole / "model")
    assert ((found - expected).norm() / expected.norm()).item() < 1e-5
    for name in set(metrics(whole)[-1]) - RATES:
        one, two = ([line[name] for line in metrics(run) if name in line] for run in (whole, fsdp))
        assert two == pytest.approx(one, rel=1e-4), name  # grad_norm detects a gradient of the wrong scale

    if script == "train_cross_encoder":
        return  # both scripts resume by the same functions
    shutil.copytree(fsdp, resumed, ignore=shutil.ignore_patterns("step_00000006", "model"))
    assert "step 3 of 6" in launch_sharded(tmp_path, script, *flags, "--output_dir", resumed, "--resume")
    assert torch.equal(weights(resumed / "model"), found)


@pytest.mark.parametrize("script", ["train_bi_encoder"])
def test_fsdp2_in_bf16(tmp_path, corpus, script, request):
    """Losses are near those of float32 but not equal; training and evaluation run under autocast; saved
    weights are float32."""
    model = request.getfixturevalue(SETTINGS[script][0])
    flags = ["--train_data", corpus, "--model_name_or_path", model, "--max_steps", 2, "--batch_size", 15]
    flags += ["--dropout", 0, "--eval_rows", 4, "--logging_steps", 1, "--eval_steps", 2]
    for precision in ("no", "bf16"):
        printed = launch_sharded(tmp_path, script, *flags, "--output_dir", tmp_path / precision, precision=precision)
    for under, norms in re.findall(r"(\d+) of (\d+) LayerNorms", printed):
        assert under == norms != "0"
    expected, found = (
        [line["loss"] for line in metrics(tmp_path / precision) if "loss" in line] for precision in ("no", "bf16")
    )
    assert found == pytest.approx(expected, rel=0.02) and found != expected
    saved = load_file(tmp_path / "bf16/model/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


FSDP2 = {"fsdp_version": 2, "cpu_ram_efficient_loading": False}


@pytest.fixture
def start(monkeypatch):
    """Return a function that starts a trainer's run under an Accelerator of a kind."""

    def start(script, kind, options, scaler, mixed_precision="no", backend=DynamoBackend.NO):
        script, plugin = importlib.import_module(script), options and FullyShardedDataParallelPlugin(**options)
        compiled = SimpleNamespace(backend=backend)
        accelerator = SimpleNamespace(
            distributed_type=kind, state=SimpleNamespace(fsdp_plugin=plugin, dynamo_plugin=compiled), scaler=scaler,
            parallelism_config=None, num_processes=2, mixed_precision=mixed_precision,
        )  # fmt: skip
        monkeypatch.setattr(script, "Accelerator", lambda **_: accelerator)
        return script.UserError, lambda: script.start(script.Args(output_dir="x"))

    return start


@pytest.mark.parametrize("script", ["train_bi_encoder"])
@pytest.mark.parametrize(
    "kind, options, scaler",
    [
        (DistributedType.DEEPSPEED, None, None),
        (DistributedType.FSDP, {"fsdp_version": 1, "cpu_ram_efficient_loading": False}, None),
        (DistributedType.FSDP, {**FSDP2, "cpu_ram_efficient_loading": True}, None),
        (DistributedType.FSDP, {**FSDP2, "cpu_offload": True}, None),
        (DistributedType.FSDP, FSDP2, "a scaler"),
    ],
)
def test_other_shardings_are_refused(start, script, kind, options, scaler):
    error, run = start(script, kind, options, scaler)
    with pytest.raises(error, match="unsupported launch"):
        run()


def test_what_a_launch_asks_for_in_vain_is_refused(start):
    for options, refused in (
        ({"backend": DynamoBackend.INDUCTOR}, "--dynamo_backend"),
        ({"mixed_precision": "fp8"}, "fp8"),
    ):
        error, run = start("train_bi_encoder", DistributedType.NO, None, None, **options)
        with pytest.raises(error, match=refused):
            run()


@pytest.mark.parametrize("script", ["train_bi_encoder"])
def test_fsdp2_and_whole_copies_are_not_refused(start, script):
    for kind in (DistributedType.FSDP, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.NO):
        _, run = start(script, kind, FSDP2, None)
        run()
