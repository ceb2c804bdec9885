"""On a simulated accelerator, the scripts run, mix no devices, and give the results of the CPU."""

import contextlib
import functools
import gc
import importlib.util
import json
import shutil
from unittest.mock import ANY

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import ROOT, metrics, write_jsonl
from forked import merge_flags
from pretend_device import DEVICE, OnDevice, PretendDevice, on_cpu
from sentence_transformers import CrossEncoder

PAIRS = "--train_data rows.jsonl --columns docstring code"
TEACHER = "--train_data rows.jsonl --columns docstring code wrong --label_column scores"
LISTS = "--train_data rows.jsonl --columns docstring code wrong --label_column"
LOSSES = {
    "train_bi_encoder": {
        "infonce": PAIRS,
        "symmetric": f'{PAIRS} --loss_kwargs {{"symmetric":true}}',
        "negatives": "--train_data rows.jsonl --columns docstring code wrong",
        "matryoshka": f"{PAIRS} --matryoshka_dims 32 8",
        "margin_mse": f"{TEACHER} --loss margin_mse",
        "kl": f'{TEACHER} --loss kl --loss_kwargs {{"infonce":1}}',
        "CoSENTLoss": f"{PAIRS} --label_column label --loss CoSENTLoss",
    },
    "train_cross_encoder": {
        "bce": f"{PAIRS} --label_column label --loss bce",
        "mse": f"{PAIRS} --label_column label --loss mse",
        "listwise_ce": f"{PAIRS} --num_negatives 5",
        "ranknet": f"{LISTS} classes --loss ranknet",
        "lambdaloss": f"{LISTS} classes --loss lambdaloss",
        "margin_mse": f"{LISTS} scores --loss margin_mse",
        "kl": f"{LISTS} scores --loss kl",
    },
}
CASES = [(script, loss) for script, losses in LOSSES.items() for loss in losses]
LOADERS = ("load_model", "load_bi_encoder", "load_cross_encoder")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, rows, bert):
    """Folder with rows.jsonl (texts, labels and scores) and two models without dropout, bert/ and reranker/."""
    folder = tmp_path_factory.mktemp("device")
    rows = [{name: text[:100] for name, text in row.items()} for row in rows[:40]]
    write_jsonl(folder / "rows.jsonl", [
        {**row, "wrong": rows[i - 1]["code"], "label": i % 3 / 2, "scores": [i % 5 / 5, -i % 7 / 7], "classes": [1, 0]}
        for i, row in enumerate(rows)
    ])  # fmt: skip
    shutil.copytree(bert, folder / "bert")
    config = json.loads((bert / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "bert/config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = CrossEncoder(str(folder / "bert"), device="cpu", num_labels=1)
    with torch.no_grad():  # with fresh weights, scores hardly differ, and the gradient of a group cancels
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)
    model.save_pretrained(str(folder / "reranker"))
    return folder


@pytest.fixture(scope="module")
def scripts():
    """{name: module} of the scripts, without inference mode, which the simulated tensors do not support."""
    modules = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "inference_mode", torch.no_grad)
        for name in ("train_bi_encoder", "train_cross_encoder", "eval_incremental"):
            spec = importlib.util.spec_from_file_location(f"{name}_on_a_device", ROOT / f"{name}.py")
            with pytest.MonkeyPatch.context() as inner:
                modules[name] = importlib.util.module_from_spec(spec)
                inner.setitem(__import__("sys").modules, spec.name, modules[name])  # for dataclasses
                spec.loader.exec_module(modules[name])
    return modules


@pytest.fixture
def run(scripts, folder, monkeypatch, tmp_path):
    """run(script, flags, on_device) calls main() and returns (gradients of the steps, PretendDevice or None)."""
    monkeypatch.chdir(folder)

    def whole_run(name, flags, on_device, saves=True, scaler=None):
        script, gradients = scripts[name], []
        device = PretendDevice() if on_device else None

        class Accelerator(accelerate.Accelerator):
            """An Accelerator on the simulated device that records the gradient of each step."""

            @property
            def device(self):
                return DEVICE if on_device else super().device

            def __init__(self, **options):
                super().__init__(**options)
                self.scaler = scaler

            def clip_grad_norm_(self, parameters, *args):
                parameters = list(parameters)
                found = [on_cpu(p.grad).flatten() for p in parameters if p.grad is not None]
                with device.paused() if device else contextlib.nullcontext():
                    gradients.append(torch.cat(found).clone())
                return super().clip_grad_norm_(parameters, *args)

        AcceleratorState._reset_state(reset_partial_state=True)
        with pytest.MonkeyPatch.context() as patch, device or contextlib.nullcontext():
            patch.setattr(script, "Accelerator", Accelerator)
            adamw = torch.optim.AdamW
            patch.setattr(torch.optim, "AdamW", lambda *args, **options: adamw(*args, **options | {"fused": False}))
            for loader in filter(functools.partial(hasattr, script), LOADERS):
                patch.setattr(script, loader, while_paused(device, getattr(script, loader)))
            # Pad to multiples of 8 on the CPU too, because padding changes the last bits of a sum.
            pad = script.pad_micro_batches
            patch.setattr(script, "pad_micro_batches", lambda encodings, *args: pad(encodings, *args[:2], DEVICE))
            patch.setattr(script, "plot_metrics", lambda *_: None, raising=False)
            patch.setattr(gc, "collect", lambda *_: 0)  # 0.3 s at the end of each run
            if not saves:
                patch.setattr(script, "save_checkpoint", lambda *_: None)
                patch.setattr(script, "save_atomically", lambda _: contextlib.nullcontext(tmp_path), raising=False)
            script.main(script.parse_args(merge_flags(flags)))
        return gradients, device

    yield whole_run
    AcceleratorState._reset_state(reset_partial_state=True)


def while_paused(device, function):
    """Return the function, called while the device is paused."""

    @functools.wraps(function)
    def called(*args):
        with device.paused() if device else contextlib.nullcontext():
            return function(*args)

    return called


def flags_for(script, loss, output, *flags, steps=1, eval_rows=0):
    """Return the flags of a short run with several micro-batches per step."""
    model = "bert" if script == "train_bi_encoder" else "reranker"
    common = f"--batch_size 6 --max_length 64 --micro_batch_tokens 400 --logging_steps 1 --max_steps {steps}"
    common += f" --eval_rows {eval_rows} --learning_rate 1e-4 --output_dir {output} --model_name_or_path {model}"
    return [*LOSSES[script][loss].split(), *common.split(), *flags]


def losses(output):
    return [line["loss"] for line in metrics(output) if "loss" in line]


@pytest.mark.parametrize("script, loss", CASES)
def test_training_equals_that_on_the_cpu(run, folder, tmp_path, script, loss):
    eager = ["--attn_implementation", "eager"]  # the sdpa kernels of two devices round differently
    expected, _ = run(script, flags_for(script, loss, tmp_path / "cpu", *eager), False, saves=False)
    for flags in ([], ["--grad_cache"]):
        output = tmp_path / f"device{len(flags)}"
        found, device = run(script, flags_for(script, loss, output, *eager, *flags), True, saves=False)
        assert device.operations > 500 and len(found) == len(expected) == 1 and expected[0].norm() > 1e-4
        assert ((found[0] - expected[0]).norm() / expected[0].norm()).item() < 1e-5
        assert losses(output) == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5)


@pytest.mark.parametrize("script", LOSSES)
def test_evaluates_saves_and_resumes(run, tmp_path, script):
    """Measures equal those of the CPU; a resumed run has the losses of one that was not stopped."""
    loss = next(iter(LOSSES[script]))
    for name, on_device in (("cpu", False), ("device", True)):
        run(script, flags_for(script, loss, tmp_path / name, "--save_steps", "2", steps=4, eval_rows=12), on_device)
    assert losses(tmp_path / "device") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-4)
    for found, expected in zip(metrics(tmp_path / "device"), metrics(tmp_path / "cpu")):
        names = set(expected) - {"rows_per_second", "tokens_per_second", "padding_fraction", "data_wait_fraction"}
        assert {name: found[name] for name in names} == pytest.approx({n: expected[n] for n in names}, rel=1e-3)
    trained = losses(tmp_path / "device")
    shutil.rmtree(tmp_path / "device/checkpoints/step_00000004")
    flags = flags_for(script, loss, tmp_path / "device", "--save_steps", "2", "--resume", steps=4, eval_rows=12)
    run(script, flags, True)
    assert losses(tmp_path / "device") == trained


@pytest.mark.parametrize("script", LOSSES)
def test_the_scale_of_fp16_is_resumed(run, tmp_path, script):
    """A scaler restarted at its initial scale would skip steps, or lose small gradients, after each resume."""
    flags = flags_for(script, next(iter(LOSSES[script])), tmp_path, "--save_steps", "1", steps=4)
    states = []
    for resumed in ([], ["--resume"]):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        run(script, [*flags, *resumed], False, scaler=scaler)
        states.append(json.loads((tmp_path / "checkpoints/step_00000004/state.json").read_text())["scaler"])
        shutil.rmtree(tmp_path / "checkpoints/step_00000004")
    assert states[0] == states[1] == {**states[0], "scale": 2.0**10, "_growth_tracker": 0}


STEEP = {"train_bi_encoder": ["infonce"], "train_cross_encoder": ["ranknet", '--loss_kwargs={"sigma":1000}']}


@pytest.mark.parametrize("script", STEEP)
def test_steps_that_fp16_skips_are_counted(run, tmp_path, script):
    """The initial scale makes the first gradient overflow."""
    (loss, *more), scaler = STEEP[script], torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    run(script, flags_for(script, loss, tmp_path, *more, steps=4), False, scaler=scaler)
    skipped = [line["skipped_steps"] for line in metrics(tmp_path)]
    assert skipped[0] == 1 and set(skipped) <= {0, 1}


@pytest.mark.parametrize("max_length, expected", [(64, 2), (4, 1)])  # with 4 tokens all texts are equally long
@pytest.mark.parametrize("script", LOSSES)
def test_number_of_waits_per_step(run, tmp_path, script, max_length, expected):
    """While the host waits, the device runs idle. A step has one wait for loss, norm and SIGTERM, and one in each
    forward pass with padding: transformers checks whether the mask masks anything."""
    loss = {"train_bi_encoder": "infonce", "train_cross_encoder": "listwise_ce"}[script]
    few = ("--micro_batch_tokens", "100000", "--max_length", str(max_length), "--logging_steps", "100")
    waits = []
    for steps in (1, 5):
        _, device = run(
            script,
            flags_for(script, loss, tmp_path / str(steps), *few, "--save_steps", "0", steps=steps),
            True,
            saves=False,
        )
        waits.append(sum(device.syncs.values()))
    assert (waits[1] - waits[0]) / 4 == expected


def test_evaluator_ranks_as_on_the_cpu(run, beir, tmp_path):
    """Search and reranking give the scores of the CPU, without the cache and from it."""
    found = {}
    for name, on_device in (("cpu", False), ("device", True), ("cached", True)):
        flags = (
            f"--model_name_or_path bert --cross_encoder reranker --rerank_k 5 --beir {beir} --corpus_chunk_size 128 "
        )
        flags += f"--max_length 32 --top_k 10 --metrics nDCG@10 --cache_dtype float32 --output_dir {tmp_path / name} "
        flags += f"--cache_dir {tmp_path / ('cpu' if name == 'cpu' else 'device')}_cache"
        _, device = run("eval_incremental", flags.split(), on_device)
        lines = [path.read_text().splitlines() for path in sorted((tmp_path / name).rglob("run.trec"))]
        found[name] = [[float(line.split()[4]) for line in run] for run in lines]
        assert len(found[name]) == 2 and len(found[name][0]) == 600
    assert device.operations > 20
    for name in ("device", "cached"):
        for scores, expected in zip(found[name], found["cpu"]):
            assert scores == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_simulated_device_refuses_what_cuda_refuses():
    with PretendDevice() as device:
        on, off = torch.tensor([1.0, 2.0], device=DEVICE), torch.tensor([3.0, 4.0])
        assert isinstance(on, OnDevice) and on.device.type == "meta"
        for mixed in (lambda: on + off, lambda: torch.cat([on, off]), lambda: off[on.long()], lambda: on @ off):
            with pytest.raises(RuntimeError, match="mixed devices"):
                mixed()
        assert list(map(str.split, device.syncs)) == [[ANY, "blocking", "copy", "to", "the", "device"]]
        device.syncs.clear()
        assert (on * 2 + 1).tolist() == [3.0, 5.0] and on[[1]].sum().item() == 2.0
        assert on.to("cpu").add(off).tolist() == [4.0, 6.0]
    kinds = [where.split()[1] for where in device.syncs]
    assert sorted(kinds) == ["_local_scalar_dense.default", "_to_copy.default", "index", "tolist"]
