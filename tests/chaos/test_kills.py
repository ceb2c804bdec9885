"""Processes that are killed, stopped, or lose a peer: the resumed run equals an undisturbed one.

`make test` runs a short form; `make chaos` kills more often, and prints a table of the results.
"""

import functools
import json
import math
import os
import random
import shutil
import signal
import time
from itertools import product

import fsspec
import pytest
from conftest import CHAOS, RATES, ROOT, TRAINERS, launch, mark_slow, metrics
from forked import Forked
from test_eval_incremental import COUNTING_DRIVER

KILLS = CHAOS or 4  # of each trainer, and of the evaluator
STEPS = 16 if CHAOS else 8
WORKERS = (1, 4, 0)  # that make batches, from one start to the next; undisturbed: 0
WAYS = ["mapped", "streaming"]
KERNELS = {"best": {}, "default": {"ATEN_CPU_CAPABILITY": "default"}}  # of the processor, or without AVX
ALL = list(product(TRAINERS, WAYS, [1, 2], KERNELS))
QUICK = [("train_bi_encoder", "streaming", 2, "best"), ("train_cross_encoder", "mapped", 1, "default")]
PAIRWISE = [("train_bi_encoder", "mapped", 1, "default"), ("train_cross_encoder", "mapped", 2, "best"),
            ("train_cross_encoder", "streaming", 1, "default")]  # fmt: skip
DYING = list(product(TRAINERS, WAYS, [0, 1]))


@pytest.fixture(scope="module")
def settings(tmp_path_factory, rows, bert):
    """{trainer: {way of reading: flags}}: mapped, with negatives drawn from lists; streaming, from mixed sources."""
    folder = tmp_path_factory.mktemp("data")
    files = [folder / "a.jsonl.gz", folder / "b.jsonl"]
    for number, file in enumerate(files):
        short = [{"docstring": row["docstring"][:100], "code": row["code"][:150]} for row in rows[number::2]]
        short = [{**row, "neg": [short[i - j]["code"][:60] for j in (1, 2, 3)]} for i, row in enumerate(short)]
        with fsspec.open(file, "wt", compression="infer") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in short)
    common = ["--model_name_or_path", bert, "--train_data", *files, "--max_steps", STEPS, "--logging_steps", 1,
              "--save_steps", 2, "--eval_steps", 6, "--micro_batch_tokens", 600, "--learning_rate", 1e-3]  # fmt: skip
    drawn = ["--columns", "docstring", "code", "neg", "--num_negatives", 2, "--grad_cache", "true",
             "--length_window", 2]  # fmt: skip
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, settings):
    """undisturbed(trainer, way of reading, processes, kernels) returns the output folder of an undisturbed run."""

    @functools.cache
    def run(name, way, processes, kernels="best"):
        output, flags = tmp_path_factory.mktemp("undisturbed") / "out", settings[name][way]
        launch(ROOT / f"{name}.py", *flags, "--output_dir", output, processes=processes, environment=KERNELS[kernels])
        return output

    return run


def final_state(output):
    """Return what a resumed run must reproduce: losses and measures of every step, data state and weights."""
    lines = [{name: value for name, value in line.items() if name not in RATES} for line in metrics(output)]
    state = json.loads((output / f"checkpoints/step_{STEPS:08}/state.json").read_text())["progress"]
    for position in state["data_state"]["sources"].values():
        position.pop("stream")  # a position in a stream has several forms
    return lines, state["data_state"], (output / "model/model.safetensors").read_bytes()


def wait_for(process, moment, output, rng):
    """Wait for the moment of a kill, or for the end of the run."""
    began = time.monotonic()
    if moment == "any moment":
        until = began + rng.random() * 2.5
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        return
    newest = max((int(path.name[5:]) for path in output.glob("checkpoints/step_*")), default=0)
    part = f"checkpoints/.step_{newest + rng.choice([4, 6]):08}.part"  # not the next: one must exist to resume from
    part += "" if moment == "a checkpoint being written" else "/SHA256SUMS"
    while process.poll() is None and not (output / part).exists():
        time.sleep(0.001)
    time.sleep(rng.random() * 0.01)


def wait_for_step(process, output, step):
    log = output / "metrics.jsonl"
    while not log.exists() or not log.stat().st_size or metrics(output)[-1]["step"] < step:
        assert process.poll() is None, process.read("stderr")[-2000:]
        time.sleep(0.01)


@pytest.mark.parametrize("name, way, processes, kernels", mark_slow(ALL if CHAOS else PAIRWISE, QUICK))
def test_killed_at_random_moments(undisturbed, settings, tmp_path, report, name, way, processes, kernels):
    flags, script, rng = settings[name][way], ROOT / f"{name}.py", random.Random(f"{name} {way} {processes}")
    moments = ["any moment", "a checkpoint being written", "a checkpoint about to be renamed"]
    kills, writing, ends, enough = 0, 0, 0, -(-KILLS // (8 if CHAOS else 2))
    output = tmp_path / "killed"
    while kills < enough or output.exists():
        log, kept = output / "metrics.jsonl", []
        if list(output.glob("checkpoints/step_*")):
            kept = log.read_text().splitlines()[:2]  # of steps 0 and 1, with the speed, which differs from run to run
        more = ["--output_dir", output, "--resume", "--dataloader_num_workers", WORKERS[(kills + ends) % 3]]
        process = Forked(script, [*flags, *more], processes, environment=KERNELS[kernels])
        if kills < enough:
            wait_for(process, moments[(kills + processes + len(way)) % 3], output, rng)
            running = process.poll() is None
            process.send(signal.SIGKILL)
            if process.wait() == -signal.SIGKILL and running:
                kills += 1
                writing += bool(list(output.glob("checkpoints/.step_*")))
                continue
        assert process.wait() == 0, process.read("stderr")[-2000:]
        assert log.read_text().splitlines()[: len(kept)] == kept  # resumed, not restarted
        assert final_state(output) == final_state(undisturbed(name, way, processes, kernels))
        assert len(list(output.glob("checkpoints/*"))) == 2 and not list(output.glob("checkpoints/.*"))
        shutil.rmtree(output)
        ends += 1
    launched = "1 process" if processes == 1 else "2 processes"
    result = f"{ends} runs reached their end, each bit-identical; {writing} kills during a checkpoint"
    launched += ", ATEN_CPU_CAPABILITY=default" * (kernels == "default")
    report(f"SIGKILL of `{name}.py`, {way}, {launched}", kills, result)


SELECTIONS = {
    "filter": ".with_format(None).filter(lambda row: len(row['code']) % 2)",
    "shuffle": ".shuffle(seed=3)",
    "sort": ".sort('code')",
    "select": ".select(range(3, 80, 2))",
}


@pytest.mark.parametrize("edit", mark_slow(SELECTIONS if CHAOS else ["filter"], []))
def test_killed_with_an_edited_source(settings, tmp_path, report, edit):
    script = tmp_path / "edited.py"
    text = (ROOT / "train_bi_encoder.py").read_text()
    end = "    return open_files(files, args.streaming, list(names), ids=ids)\n"
    assert text.count(end) == 1
    script.write_text(text.replace(end, end[:-1] + SELECTIONS[edit] + "\n"))
    flags = settings["train_bi_encoder"]["mapped"]
    launch(script, *flags, "--output_dir", tmp_path / "undisturbed")
    output = tmp_path / "killed"
    for step in (3, 6):
        process = Forked(script, [*flags, "--output_dir", output, "--resume"])
        wait_for_step(process, output, step)
        process.send(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    launch(script, *flags, "--output_dir", output, "--resume")
    assert final_state(output) == final_state(tmp_path / "undisturbed")
    report(f"SIGKILL of an edited `train_bi_encoder.py`, .{edit} of its rows", 2, "bit-identical")


@pytest.mark.parametrize("name, way, rank", mark_slow(DYING if CHAOS else [], [("train_bi_encoder", "streaming", 0)]))
def test_one_of_two_dies(undisturbed, settings, tmp_path, report, name, way, rank):
    """Without a launcher, the other process must end by itself."""
    flags, script, seconds = settings[name][way], ROOT / f"{name}.py", []
    output = tmp_path / "killed"
    for steps in (3, 9) if CHAOS else (3,):
        process = Forked(script, [*flags, "--output_dir", output, "--resume"], 2)
        wait_for_step(process, output, steps)
        os.kill(process.processes[rank].pid, signal.SIGKILL)
        killed = time.monotonic()
        other = process.processes[1 - rank]
        other.join(60)
        assert other.exitcode == 1, "the other process hangs"
        seconds.append(time.monotonic() - killed)
        process.wait()
    launch(script, *flags, "--output_dir", output, "--resume", processes=2)
    assert final_state(output) == final_state(undisturbed(name, way, 2))
    result = f"the other ended within {max(seconds):.1f} s; resumed bit-identically"
    report(f"SIGKILL of process {rank} of two of `{name}.py`, {way}", len(seconds), result)


@pytest.mark.chaos
def test_stopped_and_continued(undisturbed, settings, tmp_path, report):
    """One of two processes is stopped by SIGSTOP, and continued by SIGCONT; the other waits."""
    script, flags = ROOT / "train_bi_encoder.py", settings["train_bi_encoder"]["streaming"]
    output = tmp_path / "stopped"
    process = Forked(script, [*flags, "--output_dir", output], 2)
    for rank, steps in ((0, 3), (1, 8)):
        wait_for_step(process, output, steps)
        os.kill(process.processes[rank].pid, signal.SIGSTOP)
        time.sleep(2)
        assert metrics(output)[-1]["step"] < STEPS
        os.kill(process.processes[rank].pid, signal.SIGCONT)
    assert process.wait() == 0 and final_state(output) == final_state(undisturbed("train_bi_encoder", "streaming", 2))
    report("SIGSTOP of one of two trainers for 2 s, then SIGCONT", 2, "bit-identical")


# ------------------------------------------------------------------------------------------------- the evaluator

EVALUATOR = ROOT / "eval_incremental.py"


def evaluator_flags(beir, bert, folder, output="out"):
    return ["--model_name_or_path", bert, "--beir", beir, "--cache_dir", folder / "cache", "--output_dir",
            folder / output, "--corpus_chunk_size", 16, "--micro_batch_tokens", 256]  # fmt: skip


def results(folder):
    return (folder / "run.trec").read_bytes(), [
        result["metrics"] for result in json.loads((folder / "metrics.json").read_text())["results"]
    ]


@pytest.fixture(scope="module")
def expected(tmp_path_factory, beir, bert):
    """expected(processes) returns the results of an undisturbed evaluation."""

    @functools.cache
    def run(processes):
        folder = tmp_path_factory.mktemp("expected")
        launch(EVALUATOR, *evaluator_flags(beir, bert, folder), processes=processes)
        return results(folder / "out")

    return run


@pytest.mark.parametrize("processes", [1, 2] if CHAOS else [2])
def test_evaluator_killed_at_random_moments(expected, tmp_path, report, beir, bert, processes):
    """Killed at any moment, or while texts are encoded: a process loses the texts of at most one chunk."""
    log, driver, rng = tmp_path / "log", tmp_path / "driver.py", random.Random(processes)
    driver.write_text(COUNTING_DRIVER.format(root=str(ROOT), log=str(log), pause=0.02))
    kills, lost, ends, enough = 0, 0, 0, -(-KILLS // 2)
    log.touch()
    while kills < enough or lost:
        folder = tmp_path / str(ends)
        more = ["--dataloader_num_workers", WORKERS[(kills + ends) % 3]]
        process = Forked(driver, [*evaluator_flags(beir, bert, folder), *more], processes)
        if kills < enough:
            texts = log.stat().st_size + rng.randint(80, 200) if kills % 2 else math.inf  # after several chunks
            until = math.inf if kills % 2 else time.monotonic() + 0.1 + rng.random() * 1.5
            while process.poll() is None and time.monotonic() < until and log.stat().st_size < texts:
                time.sleep(0.01)
            running = process.poll() is None
            process.send(signal.SIGKILL)
            if process.wait() == -signal.SIGKILL and running:
                kills, lost = kills + 1, lost + 16 * processes  # --corpus_chunk_size
                continue
        assert process.wait() == 0, process.read("stderr")[-2000:]
        assert results(folder / "out") == expected(processes)
        assert 353 <= log.stat().st_size <= 353 + lost
        os.truncate(log, 0)
        lost, ends = 0, ends + 1
    launched = "1 process" if processes == 1 else "2 processes"
    report(f"SIGKILL of `eval_incremental.py`, {launched}", kills, f"the same run and measures, all {ends} times")


@pytest.mark.slow
def test_two_evaluators_on_one_cache(expected, tmp_path, report, beir, bert):
    times = max(1, KILLS // 10)
    for number in range(times):
        folder = tmp_path / str(number)
        both = [Forked(EVALUATOR, evaluator_flags(beir, bert, folder, f"out{i}")) for i in range(2)]
        for i, process in enumerate(both):
            assert process.wait() == 0, process.read("stderr")[-2000:]
            assert results(folder / f"out{i}") == expected(1)
    report("two evaluators at once on one cache", times, "the same run and measures for both")


def test_one_of_two_evaluators_dies(expected, tmp_path, report, beir, bert):
    seconds, rng = [], random.Random(0)
    for rank in (0, 1) * (KILLS // 12) or (1,):
        folder = tmp_path / f"{len(seconds)}"
        process = Forked(EVALUATOR, evaluator_flags(beir, bert, folder), 2)
        while process.poll() is None and not list(folder.glob("cache/*/**/*.val")):
            time.sleep(0.001)
        time.sleep(rng.random() * 0.1)
        os.kill(process.processes[rank].pid, signal.SIGKILL)
        killed, other = time.monotonic(), process.processes[1 - rank]
        other.join(60)
        seconds.append(time.monotonic() - killed)
        assert other.exitcode == 1, "the other process hangs"
        last = process.read("stderr").strip().splitlines()[-1]
        said = ("Connection closed by peer", "Connection reset by peer", "failed to pass monitoredBarrier")  # by gloo
        assert any(message in last for message in said), last
        process.wait()
        launch(EVALUATOR, *evaluator_flags(beir, bert, folder), processes=2)
        assert results(folder / "out") == expected(2)
    result = f"the other ended within {max(seconds):.1f} s; the same measures after"
    report("SIGKILL of one of two processes of `eval_incremental.py`", len(seconds), result)
