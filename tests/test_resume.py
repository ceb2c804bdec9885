"""Runs that are stopped and resumed; tests/chaos/test_kills.py has those that are killed."""

import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import time

import pytest
from conftest import ROOT, TRAINERS, few_or_all, launch, lines_of, metrics, train, unaligned, write_jsonl
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


def progress(output_dir, step):
    """Return the Progress in a checkpoint, as JSON."""
    return json.loads((output_dir / f"checkpoints/step_{step:08}/state.json").read_text())["progress"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory, rows, bert):
    """{way of reading: flags}: a mapped run, and a stream of mixed, shuffled sources."""
    folder = tmp_path_factory.mktemp("rows")
    for number in range(2):
        write_jsonl(folder / f"{number}.jsonl", rows[number::2])
    common = ["--model_name_or_path", bert, "--eval_rows", 50, "--batch_size", 32, "--max_length", 32,
              "--logging_steps", 1, "--eval_steps", 20, "--micro_batch_tokens", 600, "--learning_rate", 1e-3,
              "--columns", "docstring", "code", "--train_data", folder / "0.jsonl", folder / "1.jsonl"]  # fmt: skip
    stream = ["--streaming", "--shuffle_buffer", 60, "--mixing_weights", 0.4, 0.6, "--mix_by", "batch"]
    return {"mapped": [*common, "--length_window", 2], "streaming": [*common, *stream]}


TWO = [("train_bi_encoder", "streaming"), ("train_cross_encoder", "mapped")]


@pytest.mark.parametrize("name, way", few_or_all(TWO, TRAINERS, ["mapped", "streaming"]))
def test_resumed_on_another_process_count(settings, tmp_path, name, way):
    """The remaining batches are the same rows: without dropout, the same losses."""
    script, few = ROOT / f"{name}.py", ["--eval_rows", 10] * (name == "train_cross_encoder")  # each ranks 10 documents
    flags = [*settings[way], *few, "--max_steps", 9, "--save_steps", 4, "--save_total_limit", 3, "--dropout", 0]
    flags += ["--output_dir", tmp_path]
    train(name, *flags)
    data_state, before = progress(tmp_path, 9)["data_state"], losses(tmp_path)
    for step in (8, 9):
        shutil.rmtree(tmp_path / f"checkpoints/step_{step:08}")
    launch(script, *flags, "--resume", processes=2)
    after = losses(tmp_path)
    assert list(after) == list(before) == list(range(1, 10))
    assert list(after.values()) == pytest.approx(list(before.values()), rel=1e-3)
    again = progress(tmp_path, 9)["data_state"]
    for position in (*data_state["sources"].values(), *again["sources"].values()):
        position.pop("stream")  # a position in a stream has several forms
    assert again == data_state


@pytest.mark.slow
def test_resumed_past_a_bad_row_by_skipping_it(rows, bert, tmp_path):
    """The steps before the bad row are kept; the later ones are bit-identical to a run that skips from the start."""
    rows = [{**row, "code": ""} if i == 333 else row for i, row in enumerate(rows)]
    write_jsonl(tmp_path / "x.jsonl", rows)
    flags = ["--model_name_or_path", bert, "--train_data", tmp_path / "x.jsonl", "--eval_rows", 0, "--batch_size", 16,
             "--columns", "docstring", "code", "--max_steps", len(rows) // 32, "--shuffle_buffer", 100,
             "--logging_steps", 1, "--save_steps", 0, "--max_length", 32,
             "--gradient_accumulation_steps", 2]  # fmt: skip
    out, whole = tmp_path / "out", tmp_path / "whole"
    train("train_bi_encoder", *flags, "--output_dir", whole, "--on_bad_row", "skip")
    with pytest.raises(ValueError, match="'code' has no text in the row .*--on_bad_row skip"):
        train("train_bi_encoder", *flags, "--output_dir", out)
    (kept,) = (out / "checkpoints").iterdir()
    assert 2 <= int(kept.name.removeprefix("step_")) == metrics(out)[-1]["step"] < len(rows) // 32 - 1
    train("train_bi_encoder", *flags, "--output_dir", out, "--on_bad_row", "skip", "--resume")
    assert trajectory(out) == trajectory(whole)
    states = [progress(folder, len(rows) // 32) for folder in (out, whole)]
    assert states[0]["data_state"] == states[1]["data_state"]
    assert states[0]["skipped"] == states[1]["skipped"] == 1


@pytest.mark.parametrize("name, way, processes, ranks", [
    ("train_bi_encoder", "streaming", 2, slice(1, 2)), ("train_cross_encoder", "mapped", 1, slice(None)),
], ids=["second of two", "one"])  # fmt: skip
def test_sigterm_saves_and_ends_with_143(settings, tmp_path, name, way, processes, ranks):
    """All processes stop after the same step, whichever of them receives the signal; the run can be resumed."""
    script, output = ROOT / f"{name}.py", tmp_path / "out"
    flags = [*settings[way], "--eval_rows", 10, "--eval_steps", 1000, "--batch_size", 8, "--save_steps", 0]
    flags += ["--output_dir", output]
    process = Forked(script, [*flags, "--max_steps", STEPS], processes, timeout=120)
    assert signal_when(process, output, 3, signal.SIGTERM, ranks) == 143
    last = metrics(output)[-1]["step"]
    assert 3 <= last < STEPS
    assert [folder.name for folder in (output / "checkpoints").iterdir()] == [f"step_{last:08}"]
    assert not (output / "model").exists() and "--resume" in process.read("stdout")
    more = ["--max_steps", last + 2, "--accept_changes"]
    launch(script, *flags, *more, "--resume", processes=processes)
    assert metrics(output)[-1]["step"] == last + 2 and (output / "model").exists()


def run_with_signals(flags, monkeypatch, function=None, call=0, numbers=()):
    """Run a trainer in this process, and send it signals in that call of a function; return how often it evaluated."""
    script, calls = importlib.import_module("train_bi_encoder"), {"evaluate": 0, "forward_backward": 0}

    def count(name):
        real = getattr(script, name)

        def counted(*given):
            calls[name] += 1
            if name == function and calls[name] == call:
                for number in numbers:
                    signal.raise_signal(number)
            return real(*given)

        return counted

    with monkeypatch.context() as patch:
        for name in calls:
            patch.setattr(script, name, count(name))
        try:
            train("train_bi_encoder", *flags)
        except SystemExit as error:
            assert error.code == 128 + numbers[0]
        except KeyboardInterrupt as error:
            assert len(numbers) == 2 and script.print_error(error) == 130
    return calls["evaluate"]


def trajectory(output):
    return lines_of(output), (output / "model/model.safetensors").read_bytes()


def test_a_signal_waits_for_no_evaluation_but_the_one_that_runs(settings, tmp_path, monkeypatch, capsys):
    """After SIGTERM or one Ctrl-C in a step, the checkpoint of the step before is written, without the evaluation that
    is due, which the resumed run makes; in an evaluation, after that. Both equal an undisturbed run. A second Ctrl-C
    ends the run at once. None prints a traceback."""
    flags = [*settings["mapped"], "--eval_rows", 10, "--max_steps", 6, "--eval_steps", 3, "--batch_size", 8]
    assert run_with_signals([*flags, "--output_dir", tmp_path / "whole"], monkeypatch) == 3
    step, evaluation = ("forward_backward", 3), ("evaluate", 2)
    for (function, call), numbers, evaluations, done in (
        (step, [signal.SIGINT, signal.SIGINT], 1, 0),
        (step, [signal.SIGINT], 1, 2),
        (step, [signal.SIGTERM], 1, 2),
        (evaluation, [signal.SIGTERM], 2, 3),
    ):
        output = tmp_path / f"{function} {numbers}"
        given = [*flags, "--output_dir", output]
        assert run_with_signals(given, monkeypatch, function, call, numbers) == evaluations
        found = capsys.readouterr()
        assert "Traceback" not in found.err and ("interrupted: --resume" in found.err) == (done == 0)
        kept = sorted(path.name for path in output.glob("checkpoints/*"))
        assert kept == [f"step_0000000{done}"] * (done > 0)
        assert (f"stopped after step {done} of 6" in found.out) == (done > 0)
        if numbers == [signal.SIGTERM]:
            assert run_with_signals([*given, "--resume"], monkeypatch) == 3 - evaluations
            assert trajectory(output) == trajectory(tmp_path / "whole")


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1"])
def test_other_signals_stop_a_run_unless_they_are_ignored(settings, tmp_path, monkeypatch, name):
    """Of a terminal that closes, except under nohup, and of Slurm."""
    number, before = getattr(signal, name), signal.getsignal(signal.SIGTERM)
    flags = [*settings["mapped"], "--eval_rows", 0, "--max_steps", 3, "--batch_size", 8, "--output_dir"]
    run_with_signals([*flags, tmp_path / "out"], monkeypatch, "forward_backward", 2, [number])
    assert [path.name for path in (tmp_path / "out/checkpoints").iterdir()] == ["step_00000001"]
    assert signal.getsignal(number) == signal.SIG_DFL and signal.getsignal(signal.SIGTERM) == before  # given back
    monkeypatch.setattr(signal, "raise_signal", lambda number: os.kill(os.getpid(), number))
    signal.signal(number, signal.SIG_IGN)
    try:
        run_with_signals([*flags, tmp_path / "ignored"], monkeypatch, "forward_backward", 2, [number])
        assert (tmp_path / "ignored/model").exists() and signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, signal.SIG_DFL)


def move_tensors(checkpoint, spaces):
    """Append so many spaces to the headers of {file name: spaces}: their tensors are mapped at other addresses."""
    sums = (checkpoint / "SHA256SUMS").read_text()
    for name, count in spaces.items():
        data = (checkpoint / name).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        moved = (end - 8 + count).to_bytes(8, "little") + data[8:end] + b" " * count + data[end:]
        (checkpoint / name).write_bytes(moved)
        sums = sums.replace(*(hashlib.sha256(part).hexdigest() for part in (data, moved)))
    (checkpoint / "SHA256SUMS").write_text(sums)


@pytest.mark.parametrize("name, way, moves", [("train_bi_encoder", "mapped", [4, 20]),
                                              ("train_cross_encoder", "streaming", [12])])  # fmt: skip
def test_resumed_from_tensors_at_other_addresses(settings, tmp_path, monkeypatch, name, way, moves):
    """Kernels choose their order of summation by alignment: all that is loaded must lie where torch allocates it."""
    Checkpoints, restored = importlib.import_module(name).Checkpoints, []
    restore = Checkpoints.restore
    monkeypatch.setattr(Checkpoints, "restore", lambda self, *given: restored.append(self) or restore(self, *given))
    flags = [*settings[way], "--eval_rows", 0, "--batch_size", 8, "--max_length", 48, "--max_steps", 4,
             "--save_steps", 2]  # fmt: skip
    train(name, *flags, "--output_dir", tmp_path / "whole")
    for spaces in moves:
        output = tmp_path / str(spaces)
        shutil.copytree(tmp_path / "whole", output)
        shutil.rmtree(output / "checkpoints/step_00000004")
        files = {"model.safetensors": spaces, "optimizer.safetensors": 24 - spaces}
        move_tensors(output / "checkpoints/step_00000002", files)
        train(name, *flags, "--output_dir", output, "--resume")
        assert losses(output) == losses(tmp_path / "whole")
        last = "checkpoints/step_00000004/{}.safetensors"
        for file in ("model", "optimizer"):
            contents = [(folder / last.format(file)).read_bytes() for folder in (output, tmp_path / "whole")]
            assert contents[0] == contents[1]
    tensors = [tensor for run in restored for tensor in (*run.model.parameters(), *run.model.buffers())]
    states = [state for run in restored for optimizer in run.optimizers for state in optimizer.state.values()]
    tensors += [tensor for state in states for tensor in state.values()]
    assert len(restored) == 1 + len(moves) and len(states) > 30 * len(restored) and len(tensors) > 200
    assert unaligned(*tensors) == 0


def test_adapters_and_the_weights_below_are_aligned(bert):
    script = importlib.import_module("train_bi_encoder")
    args = script.parse_args(f"--train_data x --columns a b --model_name_or_path {bert} --lora_rank 2".split())
    model = script.load_model(args)
    tensors = [*model.parameters(), *model.buffers()]
    assert len(tensors) > 50 and unaligned(*tensors) == 0
