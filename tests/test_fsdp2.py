"""FSDP2 on two CPU processes trains the same model as whole copies do, and resumes bit-identically."""

import functools
import importlib
import re
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin
from conftest import EACH_TRAINER, RATES, ROOT, TRAINERS, launch, metrics, skip_without_bfloat16, weights
from forked import launcher_environment
from safetensors.torch import load_file
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Router
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForSequenceClassification, AutoTokenizer

SETTINGS = {
    "train_bi_encoder": ("bert", ["--gradient_accumulation_steps", 2]),
    "train_cross_encoder": ("reranker", ["--grad_cache", "true", "--num_negatives", 2]),
}


def flags_of(corpus, model, *more):
    return ["--train_data", f"{corpus}/*.parquet", "--columns", "docstring", "code", "--model_name_or_path", model,
            *more]  # fmt: skip


def launch_sharded(folder, script, *flags, precision="no", worker=ROOT / "tests/fsdp2_worker.py", **variables):
    """Run a trainer with accelerate_configs/fsdp2.yaml on two CPU processes; return what it prints."""
    config = yaml.safe_load((ROOT / "accelerate_configs/fsdp2.yaml").read_text())
    config |= {"use_cpu": True, "num_processes": 2, "mixed_precision": precision, "main_process_port": 0}
    (folder / "fsdp2.yaml").write_text(yaml.safe_dump(config))
    environment = launcher_environment("--config_file", folder / "fsdp2.yaml") | variables
    return launch(worker, script, *flags, processes=2, environment=environment).stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus, request):
    """runs(trainer) returns (flags, folder of a run with whole copies and one under FSDP2, what that prints)."""

    @functools.cache
    def run(script):
        folder = tmp_path_factory.mktemp(script)
        model, more = SETTINGS[script]
        flags = flags_of(corpus, request.getfixturevalue(model), "--max_steps", 4, "--batch_size", 15, *more)
        flags += ["--eval_rows", 20, "--micro_batch_tokens", 400, "--learning_rate", 1e-4, "--logging_steps", 1]
        flags += ["--eval_steps", 2, "--save_steps", 2]
        launch(ROOT / f"{script}.py", *flags, "--output_dir", folder / "whole", processes=2)
        printed = launch_sharded(folder, script, *flags, "--output_dir", folder / "fsdp")
        return flags, folder, printed

    return run


@pytest.mark.parametrize("script", EACH_TRAINER)
def test_fsdp2_equals_whole_copies(runs, script):
    """With dropout, whose seeds do not depend on sharding. Loss and gradient of the first step are equal; later ones,
    weights and ranks are near, as rounding grows from step to step, on each make of CPU differently."""
    _, folder, printed = runs(script)
    seen = re.findall(r"(\d+) tensors were sharded, (\d+) of \d+ micro-batches", printed)
    assert len(seen) == 2 and all(int(sharded) > 100 for sharded, _ in seen)
    assert sum(int(repeated) for _, repeated in seen) > 0, "both processes always had equally many micro-batches"
    assert "copied, moved" in printed  # a copy made on the device would take the memory of a second model

    found, expected = weights(folder / "fsdp/model"), weights(folder / "whole/model")
    assert ((found - expected).norm() / expected.norm()).item() < 1e-4
    configs = [(folder / run / "model/config_sentence_transformers.json").read_text() for run in ("fsdp", "whole")]
    assert configs[0] == configs[1]  # prompts, similarity and the activation that main has set
    for name in set(metrics(folder / "whole")[-1]) - RATES:
        whole, fsdp = ([line[name] for line in metrics(folder / run) if name in line] for run in ("whole", "fsdp"))
        if name in ("loss", "grad_norm"):  # the norm detects a gradient of the wrong scale
            assert fsdp[0] == pytest.approx(whole[0], rel=1e-5)
        assert fsdp == pytest.approx(whole, rel=0.01, abs=0.05), name


@pytest.mark.slow
@pytest.mark.parametrize("script", TRAINERS)
def test_fsdp2_concatenates_inside(script, tmp_path, corpus, request):
    """The wrapper of a sharded body gives the losses and norms of padded whole copies."""
    model, more = SETTINGS[script]
    flags = flags_of(corpus, request.getfixturevalue(model), "--max_steps", 2, "--batch_size", 15, *more)
    flags += ["--eval_rows", 0, "--dropout", 0, "--micro_batch_tokens", 400, "--logging_steps", 1]
    launch(ROOT / f"{script}.py", *flags, "--output_dir", tmp_path / "whole", processes=2)
    launch_sharded(tmp_path, script, *flags, "--output_dir", tmp_path / "fsdp", CONCATENATED="1")
    whole, fsdp = (metrics(tmp_path / run) for run in ("whole", "fsdp"))
    for line, expected in zip(fsdp, whole, strict=True):
        assert [line["loss"], line["grad_norm"]] == pytest.approx([expected["loss"], expected["grad_norm"]], rel=1e-4)
        assert line["padding_fraction"] == 0 < expected["padding_fraction"]


def test_fsdp2_resumes_bit_identically(runs, tmp_path):
    """Both scripts do by the same functions."""
    flags, folder, _ = runs("train_bi_encoder")
    shutil.copytree(folder / "fsdp", tmp_path / "out", ignore=shutil.ignore_patterns("step_00000004", "model"))
    printed = launch_sharded(tmp_path, "train_bi_encoder", *flags, "--output_dir", tmp_path / "out", "--resume")
    assert "step 2 of 4" in printed and torch.equal(weights(tmp_path / "out/model"), weights(folder / "fsdp/model"))


@pytest.mark.slow
def test_fsdp2_in_bf16(runs, tmp_path):
    """Losses are near those of float32 but not equal; training and evaluation run under autocast; saved
    weights are float32."""
    skip_without_bfloat16()
    flags, folder, _ = runs("train_bi_encoder")
    printed = launch_sharded(tmp_path, "train_bi_encoder", *flags, "--output_dir", tmp_path / "out", precision="bf16")
    norms = re.findall(r"(\d+) of (\d+) LayerNorms", printed)
    assert len(norms) == 2 and all(under == all_of_them != "0" for under, all_of_them in norms)
    found, expected = ([line["loss"] for line in metrics(run) if "loss" in line]
                       for run in (tmp_path / "out", folder / "fsdp"))  # fmt: skip
    assert found == pytest.approx(expected, rel=0.02) and found != expected
    saved = load_file(tmp_path / "out/model/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_fsdp2_with_adapters_and_a_head_in_bfloat16(precision, corpus, reranker, tmp_path):
    """FSDP2 requires one dtype of all that is trained."""
    skip_without_bfloat16()
    AutoModelForSequenceClassification.from_pretrained(reranker).bfloat16().save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(reranker).save_pretrained(tmp_path / "model")
    flags = flags_of(corpus, tmp_path / "model", "--num_negatives", 2, "--max_steps", 2, "--batch_size", 8)
    flags += ["--eval_rows", 8, "--eval_steps", 1, "--lora_rank", 2, "--output_dir", tmp_path / "out"]
    launch_sharded(tmp_path, "train_cross_encoder", *flags, precision=precision)
    saved = load_file(tmp_path / "out/model/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_moments_of_a_shard_are_counted(monkeypatch):
    """A device holds those of its part of the weights."""
    script = importlib.import_module("train_bi_encoder")
    monkeypatch.setattr(dist.distributed_c10d, "get_debug_level", lambda: dist.DebugLevel.OFF)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2**18), mesh, [Shard(0)]))  # 1 MiB here, 2 in all
        weight.grad = weight.detach().clone()
        peaks = iter([0, 4])
        monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: None)
        monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: next(peaks))
        monkeypatch.setattr(script, "total_memory", lambda _: 2 * 2**20 + 4 * 4096)  # moments, four graphs
        model = torch.nn.ParameterList([weight])
        accelerator = SimpleNamespace(device=torch.device("cpu"), gather=lambda fitting: fitting)
        run = lambda count: (count, 0, 0)  # noqa: E731
        assert script.measure_micro_batch_tokens(run, model, 2**15, script.Args(), accelerator) == 4096
    finally:
        dist.destroy_process_group()


def test_two_encoders_are_refused(bert, splade, colbert):
    """Their passes, sorted by role, would differ over processes, and gradients of one be added to the other's."""
    script = importlib.import_module("train_bi_encoder")
    parts = (SentenceTransformer(str(bert), device="cpu") for _ in range(2))
    model = SentenceTransformer(modules=[Router.for_query_document(*map(list, parts))], device="cpu")
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP)
    for other in (model, SparseEncoder(str(splade), device="cpu"), MultiVectorEncoder(str(colbert), device="cpu")):
        with pytest.raises(script.UserError, match="FSDP: unsupported for sparse and multi-vector models, and those"):
            script.resolve_args(script.Args(), other, accelerator)


def test_the_batch_of_a_bad_row_has_its_source(monkeypatch):
    """Whose loss says which passes are collective: with those of source 0, this process and the others would wait."""
    script = importlib.import_module("train_cross_encoder")
    table = script.pa.table({script.SOURCE: [1, 1], script.LENGTH: [9, 9]})
    accelerator = SimpleNamespace(process_index=0, num_processes=2)
    args = script.Args(mix_by="batch")
    local = script.local_batches(iter([(table, {}), (table, {})]), 0, None, args, accelerator)
    monkeypatch.setattr(script, "local_rows", lambda *_: (["a row"], 0))
    rows, index, more = next(local)
    monkeypatch.setattr(script, "local_rows", lambda *_: 1 / 0)
    batch = script.Batch(None, [], None, index, 0)
    monkeypatch.setattr(script, "make_batch", lambda rows, *_: rows and 1 / 0 or batch)
    items = [(rows, index, more), next(local)]  # of a row that cannot be tokenized, or read
    for made in map(script.BatchMaker().__getitem__, items):
        assert made.source == 1 and "ZeroDivisionError" in made.error


FSDP2 = {"fsdp_version": 2, "cpu_ram_efficient_loading": False}


@pytest.mark.parametrize("kind, options, more", [
    (DistributedType.DEEPSPEED, None, {}),
    (DistributedType.FSDP, {**FSDP2, "fsdp_version": 1}, {}),
    (DistributedType.FSDP, {**FSDP2, "cpu_ram_efficient_loading": True}, {}),
    (DistributedType.FSDP, {**FSDP2, "cpu_offload": True}, {}),
    (DistributedType.FSDP, {**FSDP2, "activation_checkpointing": True}, {}),
    (DistributedType.FSDP, FSDP2, {"scaler": "of fp16"}),
    (DistributedType.NO, None, {"backend": DynamoBackend.INDUCTOR}),
    (DistributedType.NO, None, {"mixed_precision": "fp8"}),
    *((kind, FSDP2, None) for kind in (DistributedType.FSDP, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)),
])  # fmt: skip
def test_launches_that_would_train_wrongly_are_refused(monkeypatch, kind, options, more):
    """Those with None are not. accelerate_configs/README.md says what a launch may ask for."""
    script = importlib.import_module("train_bi_encoder")
    given = {"scaler": None, "mixed_precision": "no", "backend": DynamoBackend.NO} | (more or {})
    plugin = options and FullyShardedDataParallelPlugin(**options)
    state = SimpleNamespace(fsdp_plugin=plugin, dynamo_plugin=SimpleNamespace(backend=given.pop("backend")))
    given |= {"parallelism_config": None, "num_processes": 2, "log_with": []}
    accelerator = SimpleNamespace(distributed_type=kind, state=state, **given)
    monkeypatch.setattr(script, "Accelerator", lambda **_: accelerator)
    with nullcontext() if more is None else pytest.raises(script.UserError, match="unsupported launch.*README.md#"):
        assert script.start(script.Args(output_dir="x")) is accelerator
    page = (script.Path(script.__file__).parent / "accelerate_configs/README.md").read_text()
    assert "\n## What a launch asks for\n" in page
