"""Processes that are killed, stopped and left alone: the run resumes as if nothing had happened.

A short form runs in `make test`; `make chaos` kills oftener. Each test says what it did, for its table.
"""

import json
import os
import random
import shutil
import signal
import time

import fsspec
import pytest
from conftest import CHAOS, ROOT, TRAINERS, launch, metrics
from forked import Forked

KILLS = CHAOS or 4  # of each trainer, and of the evaluator
STEPS = 24


@pytest.fixture(scope="module")
def settings(tmp_path_factory, rows, bert):
    """{trainer: {way of reading: flags}}: a mapped run, which draws negatives of lists, and a mixed stream with a
    shuffle window; dropout is on."""
    folder = tmp_path_factory.mktemp("data")
    files = [folder / "a.jsonl.gz", folder / "b.jsonl"]
    for number, file in enumerate(files):
        short = [{"docstring": row["docstring"][:100], "code": row["code"][:150]} for row in rows[number::2]]
        short = [{**row, "neg": [short[i - j]["code"][:60] for j in (1, 2, 3)]} for i, row in enumerate(short)]
        with fsspec.open(file, "wt", compression="infer") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in short)
    common = ["--model_name_or_path", bert, "--train_data", *files, "--max_steps", STEPS, "--logging_steps", 1,
              "--save_steps", 2, "--eval_steps", 8, "--micro_batch_tokens", 600, "--learning_rate", 1e-3]  # fmt: skip
    drawn = ["--columns", "docstring", "code", "neg", "--num_negatives", 2, "--grad_cache", "--length_window", 2]
    mixed = ["--mixing_weights", 0.4, 0.6, "--mix_by", "batch"]
    ways = {
        "mapped": [*common, *drawn],
        "streaming": [*common, "--columns", "docstring", "code", "--streaming", "--shuffle_buffer", 60, *mixed],
    }
    own = {
        "train_bi_encoder": ["--batch_size", 16, "--eval_rows", 40],
        "train_cross_encoder": ["--batch_size", 6, "--eval_rows", 6, "--num_negatives", 2],
    }
    return {name: {way: [*flags, *own[name]] for way, flags in ways.items()} for name in own}


def left(output):
    """Return what must be equal in the end: losses and measures of every step, the state of the data, the weights."""
    times = {"rows_per_second", "tokens_per_second", "data_wait_fraction"}
    lines = [{name: value for name, value in line.items() if name not in times} for line in metrics(output)]
    state = json.loads((output / f"checkpoints/step_{STEPS:08}/state.json").read_text())
    for source in state["data_state"]["sources"]:
        source.pop("stream")  # the position of a stream has several forms
    return lines, state["data_state"], (output / "model/model.safetensors").read_bytes()


def wait_for(process, moment, output, dice):
    """Wait for a moment to kill at, or the end."""
    began = time.monotonic()
    if moment == "any moment":
        until = began + dice.random() * 2.5
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        return
    parts = ".step_*.part" if moment == "a checkpoint being written" else ".step_*.part/SHA256SUMS"
    while process.poll() is None and not list(output.glob(f"checkpoints/{parts}")):
        pass
    time.sleep(dice.random() * 0.01)


def wait_for_step(process, output, step):
    log = output / "metrics.jsonl"
    while not log.exists() or not log.stat().st_size or metrics(output)[-1]["step"] < step:
        assert process.poll() is None, process.read("stderr")[-2000:]
        time.sleep(0.01)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("way", ["mapped", "streaming"])
@pytest.mark.parametrize("name", TRAINERS)
def test_killed_at_random_moments(settings, tmp_path, say, name, way, processes):
    flags, script, dice = settings[name][way], ROOT / f"{name}.py", random.Random(f"{name} {way} {processes}")
    launch(script, *flags, "--output_dir", tmp_path / "whole", processes=processes)
    moments = ["any moment", "a checkpoint being written", "a checkpoint about to get its name"]
    kills, writing, ends, wanted = 0, 0, 0, -(-KILLS // 4)
    output = tmp_path / "killed"
    while kills < wanted or output.exists():
        log, kept = output / "metrics.jsonl", []
        if list(output.glob("checkpoints/step_*")):
            kept = log.read_text().splitlines()[:2]  # of steps 0 and 1: with its speed, which no two runs share
        process = Forked(script, [*flags, "--output_dir", output, "--resume"], processes)
        if kills < wanted:
            wait_for(process, moments[(kills + processes + len(way)) % 3], output, dice)
            running = process.poll() is None
            process.send(signal.SIGKILL)
            if process.wait() == -signal.SIGKILL and running:
                kills += 1
                writing += bool(list(output.glob("checkpoints/.step_*")))
                continue
        assert process.wait() == 0, process.read("stderr")[-2000:]
        assert log.read_text().splitlines()[: len(kept)] == kept  # and did not just begin again
        assert left(output) == left(tmp_path / "whole")
        assert len(list(output.glob("checkpoints/*"))) == 2 and not list(output.glob("checkpoints/.*"))
        shutil.rmtree(output)
        ends += 1
    launched = "1 process" if processes == 1 else "2 processes"
    happened = f"{ends} runs reached their end, all bit-identical to the undisturbed one; {writing} while writing"
    say(f"SIGKILL of `{name}.py`, {way}, {launched}", kills, happened)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", TRAINERS)
def test_one_of_two_dies(settings, tmp_path, say, name, rank):
    """No launcher stands by: the other must end by itself."""
    way = ["mapped", "streaming"][rank]
    flags, script, seconds = settings[name][way], ROOT / f"{name}.py", []
    launch(script, *flags, "--output_dir", tmp_path / "whole", processes=2)
    output = tmp_path / "killed"
    for steps in (3, 9) if CHAOS else (3,):
        process = Forked(script, [*flags, "--output_dir", output, "--resume"], 2)
        wait_for_step(process, output, steps)
        os.kill(process.processes[rank].pid, signal.SIGKILL)
        killed = time.monotonic()
        other = process.processes[1 - rank]
        other.join(60)
        assert other.exitcode == 1, "it hangs"
        seconds.append(time.monotonic() - killed)
        process.wait()
    launch(script, *flags, "--output_dir", output, "--resume", processes=2)
    assert left(output) == left(tmp_path / "whole")
    happened = f"the other ended within {max(seconds):.1f} s; resumed bit-identically"
    say(f"SIGKILL of process {rank} of two of `{name}.py`, {way}", len(seconds), happened)


def test_stopped_and_continued(settings, tmp_path, say):
    """SIGSTOP to one of two, then SIGCONT: the other waits."""
    script, flags = ROOT / "train_bi_encoder.py", settings["train_bi_encoder"]["streaming"]
    launch(script, *flags, "--output_dir", tmp_path / "whole", processes=2)
    output = tmp_path / "stopped"
    process = Forked(script, [*flags, "--output_dir", output], 2)
    for rank, steps in ((0, 3), (1, 8), (0, 13)):
        wait_for_step(process, output, steps)
        os.kill(process.processes[rank].pid, signal.SIGSTOP)
        time.sleep(2)
        assert metrics(output)[-1]["step"] < STEPS
        os.kill(process.processes[rank].pid, signal.SIGCONT)
    assert process.wait() == 0 and left(output) == left(tmp_path / "whole")
    say("SIGSTOP of one of two trainers for 2 s, then SIGCONT", 3, "bit-identical to the undisturbed run")


# ------------------------------------------------------------------------------------------------- the evaluator

EVALUATOR = ROOT / "eval_incremental.py"


def evaluator_flags(beir, bert, folder, output="out"):
    places = {"--cache_dir": "cache", "--output_dir": output}
    places = [part for flag, name in places.items() for part in (flag, folder / name)]
    return [
        "--model_name_or_path",
        bert,
        "--beir",
        beir,
        *places,
        "--corpus_chunk_size",
        16,
        "--micro_batch_tokens",
        256,
    ]


def results(folder):
    return (folder / "run.trec").read_bytes(), [
        result["metrics"] for result in json.loads((folder / "metrics.json").read_text())["results"]
    ]


@pytest.mark.parametrize("processes", [1, 2])
def test_evaluator_killed_at_random_moments(tmp_path, say, beir, bert, processes):
    whole, dice, kills, ends = tmp_path / "whole", random.Random(processes), 0, 0
    launch(EVALUATOR, *evaluator_flags(beir, bert, whole), processes=processes)
    number = 0
    while kills < -(-KILLS // 2):
        folder = tmp_path / str(number)
        process = Forked(EVALUATOR, evaluator_flags(beir, bert, folder), processes)
        time.sleep(0.2 + dice.random() * 2)
        running = process.poll() is None
        process.send(signal.SIGKILL)
        if process.wait() == -signal.SIGKILL and running:
            kills += 1
            continue
        assert process.wait() == 0, process.read("stderr")[-2000:]
        assert results(folder / "out") == results(whole / "out")
        number, ends = number + 1, ends + 1
    launch(EVALUATOR, *evaluator_flags(beir, bert, folder), processes=processes)
    assert results(folder / "out") == results(whole / "out")
    launched = "1 process" if processes == 1 else "2 processes"
    say(f"SIGKILL of `eval_incremental.py`, {launched}", kills, f"the same run and measures, all {ends + 1} times")


def test_two_evaluators_on_one_cache(tmp_path, say, beir, bert):
    launch(EVALUATOR, *evaluator_flags(beir, bert, tmp_path / "whole"))
    times = max(1, KILLS // 10)
    for number in range(times):
        folder = tmp_path / str(number)
        both = [Forked(EVALUATOR, evaluator_flags(beir, bert, folder, f"out{i}")) for i in range(2)]
        for i, process in enumerate(both):
            assert process.wait() == 0, process.read("stderr")[-2000:]
            assert results(folder / f"out{i}") == results(tmp_path / "whole/out")
    say("two evaluators at once on one cache", times, "the same run and measures for both")


def test_one_of_two_evaluators_dies(tmp_path, say, beir, bert):
    launch(EVALUATOR, *evaluator_flags(beir, bert, tmp_path / "whole"), processes=2)
    seconds, dice = [], random.Random(0)
    for rank in (0, 1) * max(1, KILLS // 12):
        folder = tmp_path / f"{len(seconds)}"
        process = Forked(EVALUATOR, evaluator_flags(beir, bert, folder), 2)
        while process.poll() is None and not list(folder.glob("cache/*/**/*.val")):
            time.sleep(0.001)
        time.sleep(dice.random() * 0.1)
        os.kill(process.processes[rank].pid, signal.SIGKILL)
        killed, other = time.monotonic(), process.processes[1 - rank]
        other.join(60)
        seconds.append(time.monotonic() - killed)
        assert other.exitcode == 1, "it hangs"
        last = process.read("stderr").strip().splitlines()[-1]
        assert "Connection closed by peer" in last or "Connection reset by peer" in last, last  # of gloo
        process.wait()
        launch(EVALUATOR, *evaluator_flags(beir, bert, folder), processes=2)
        assert results(folder / "out") == results(tmp_path / "whole/out")
    happened = f"the other ended within {max(seconds):.1f} s; the same measures after"
    say("SIGKILL of one of two processes of `eval_incremental.py`", len(seconds), happened)
