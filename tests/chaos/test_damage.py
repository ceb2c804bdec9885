"""Files damaged before and during a run: damage is reported, and damaged data is never used."""

import importlib
import json
import os
import random
import shutil
import signal
import time

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import CHAOS, ROOT, TRAINERS, few_or_all, launch, metrics, train
from forked import Forked

import eval_incremental


def damage(path, how):
    """Flip a bit of the first, middle or last byte of a file, cut it in half, empty it, or remove it."""
    data = bytearray(path.read_bytes())
    if how == "removed":
        path.unlink()
    elif how in ("cut", "emptied"):
        os.truncate(path, len(data) // 2 if how == "cut" else 0)
    else:
        data[{"first byte": 0, "middle byte": len(data) // 2, "last byte": -1}[how]] ^= 1
        path.write_bytes(data)


NAMES = TRAINERS if CHAOS else TRAINERS[:1]  # both have the same functions for checkpoints
WAYS = ["first byte", "middle byte", "last byte", "cut", "emptied", "removed"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, rows, bert):
    """{trainer: (flags, output folder of a finished run of 8 steps with a checkpoint every 2)}."""
    folder = tmp_path_factory.mktemp("runs")
    short = [{"docstring": row["docstring"][:100], "code": row["code"][:150]} for row in rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    found = {}
    for name in NAMES:
        flags = ["--model_name_or_path", bert, "--train_data", folder / "rows.jsonl", "--columns", "docstring", "code",
                 "--max_steps", 8, "--save_steps", 2, "--eval_rows", 6, "--batch_size", 6, "--logging_steps", 1,
                 *["--num_negatives", 2] * ("cross" in name)]  # fmt: skip
        train(name, *flags, "--output_dir", folder / name)
        found[name] = flags, folder / name
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_file_of_a_checkpoint(runs, tmp_path, report, capfd, name):
    """Damage is detected before training; resumed from the previous checkpoint, the run gives the same weights."""
    flags, run = runs[name]
    newest = run / "checkpoints/step_00000008"
    files = sorted(str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file())
    assert files == ["SHA256SUMS", *(f"{part}.safetensors" for part in ("extra", "model", "optimizer")), "state.json"]
    script = importlib.import_module(name)
    times = resumed = 0
    for file in files:
        for how in WAYS:
            output = tmp_path / f"{file.replace('/', ' ')} {how}"
            shutil.copytree(run, output)
            damage(output / "checkpoints/step_00000008" / file, how)
            args = script.Args(output_dir=str(output), resume=True)
            path, state = script.find_checkpoint(args)
            assert state["progress"]["step"] == 6 and path.name == "step_00000006"
            assert "step_00000008: damaged" in capfd.readouterr().err
            times += 1
            if CHAOS or (how == "middle byte" and file.endswith(("safetensors", "state.json"))):
                train(name, *flags, "--output_dir", output, "--resume")
                weights = [folder / "model/model.safetensors" for folder in (output, run)]
                assert weights[0].read_bytes() == weights[1].read_bytes()
                resumed += 1
            shutil.rmtree(output)
    report(
        f"damaged file of a checkpoint of `{name}.py`",
        times,
        f"each reported and skipped; {resumed} resumed bit-identically",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, way", few_or_all([("train_bi_encoder", "streaming")], TRAINERS, ["mapped", "streaming"])
)
def test_a_source_that_is_cut_while_it_is_read(rows, bert, tmp_path, report, name, way):
    """The checkpoints are intact: after restoring the file, the run resumes to the same weights."""
    file = tmp_path / "rows.arrow"
    short = [{"docstring": row["docstring"][:100], "code": row["code"][:150]} for row in rows] * 4
    with pa.ipc.new_stream(str(file), pa.Table.from_pylist(short[:1]).schema) as writer:
        writer.write_table(pa.Table.from_pylist(short), max_chunksize=50)
    flags = ["--model_name_or_path", bert, "--train_data", file, "--columns", "docstring", "code", "--max_steps", 40,
             "--save_steps", 4, "--eval_rows", 0, "--batch_size", 6, "--logging_steps", 1, "--shuffle_buffer", 100,
             *["--num_negatives", 2] * ("cross" in name), *["--streaming"] * (way == "streaming")]  # fmt: skip
    train(name, *flags, "--output_dir", tmp_path / "whole")
    shutil.copy(file, tmp_path / "kept")
    process = Forked(ROOT / f"{name}.py", [*flags, "--output_dir", tmp_path / "out"])
    log = tmp_path / "out/metrics.jsonl"
    while not log.exists() or not log.stat().st_size or metrics(tmp_path / "out")[-1]["step"] < 5:
        assert process.poll() is None, process.read("stderr")[-2000:]
        time.sleep(0.01)
    os.truncate(file, 20_000)
    status = process.wait()
    last = ["", *process.read("stderr").strip().splitlines()][-1]
    if way == "mapped":  # reading a lost page of a mapped file raises SIGBUS
        assert status in (1, -signal.SIGBUS)
    else:
        assert status == 1 and last.startswith(f"error: {file}"), last
    shutil.copy2(tmp_path / "kept", file)
    launch(ROOT / f"{name}.py", *flags, "--output_dir", tmp_path / "out", "--resume")
    weights = [tmp_path / folder / "model/model.safetensors" for folder in ("whole", "out")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    report(f"source cut while `{name}.py` reads it, {way}", 1, "stopped; after restoring it, resumed bit-identically")


DAMAGES = ["bits of any files", "bits of values", "values cut", "values removed"]  # a value: vectors of a chunk


def test_damaged_files_of_an_embedding_cache(evaluate, beir, tmp_path, report, capsys):
    """The measures stay the same: texts are encoded again and stored, or an error names the folder to remove."""
    whole = evaluate("--beir", beir, output="whole")
    shutil.copytree(tmp_path / "cache", tmp_path / "kept")
    files = sorted(path.relative_to(tmp_path / "kept") for path in (tmp_path / "kept").rglob("*") if path.is_file())
    files = [file for file in files if file.name != "open.lock"]  # empty
    values = [file for file in files if file.suffix == ".val"]
    rng, times, again, cleared = random.Random(0), CHAOS * 3 or 6, 0, 0
    for number in range(times):
        how = DAMAGES[max(0, number % 6 - 2)]  # half of the times, any files
        shutil.rmtree(tmp_path / "cache")
        shutil.copytree(tmp_path / "kept", tmp_path / "cache")
        for file in rng.sample(values if "values" in how else files, rng.choice([1, 1, 3])):
            path = tmp_path / "cache" / file
            if how == "values removed":
                path.unlink()
                continue
            data = bytearray(path.read_bytes())
            for _ in range(0 if how == "values cut" else rng.choice([1, 8])):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data[: len(data) // 2] if how == "values cut" else data)
        capsys.readouterr()
        try:
            seen = evaluate("--beir", beir, output=f"out{number}")
        except eval_incremental.UserError as error:
            (folder,) = (tmp_path / "cache").iterdir()
            assert str(folder) in str(error) and "\n" not in str(error)
            shutil.rmtree(folder)
            seen = evaluate("--beir", beir, output=f"out{number}")
            cleared += 1
        assert seen["metrics"] == whole["metrics"]
        again += seen["texts"]["encoded"] > 0
        if "values" in how:
            assert ("a damaged block" in capsys.readouterr().err) == (how != "values removed")
            assert 0 < seen["texts"]["encoded"] < 353
            assert evaluate("--beir", beir)["texts"]["encoded"] == 0
    result = f"the same measures; texts encoded again {again} times, the folder removed {cleared} times"
    report("damaged files of an embedding cache", times, result)


@pytest.mark.chaos
@pytest.mark.parametrize("name", TRAINERS)
def test_ten_thousand_steps(rows, bert, tmp_path, report, name):
    """Memory, open files and threads do not grow, old checkpoints are removed, and logs are small."""
    pairs = [{"a": row["docstring"][:40], "b": row["code"][:40]} for row in rows]
    pq.write_table(pa.Table.from_pylist(pairs), tmp_path / "rows.parquet")
    flags = ["--model_name_or_path", bert, "--train_data", tmp_path / "rows.parquet", "--columns", "a", "b",
             "--max_steps", 10_000, "--save_steps", 500, "--save_total_limit", 3, "--eval_rows", 8,
             "--eval_steps", 500, "--batch_size", 4, "--max_length", 16, "--logging_steps", 10, "--output_dir",
             tmp_path / "out", *["--num_negatives", 1] * ("cross" in name)]  # fmt: skip
    process, log, seen = Forked(ROOT / f"{name}.py", flags, timeout=1500), tmp_path / "out/metrics.jsonl", []
    watched = psutil.Process(process.processes[0].pid)
    while process.poll() is None:
        step = metrics(tmp_path / "out")[-1]["step"] if log.exists() and log.stat().st_size else 0
        if 1000 <= step < 9900:  # the plot at the end imports a library
            seen.append([watched.memory_info().rss / 1e6, watched.num_fds(), watched.num_threads()])
        time.sleep(0.5)
    assert process.wait() == 0, process.read("stderr")[-2000:]
    first, last = ([sorted(column)[len(part) // 2] for column in zip(*part)] for part in (seen[:20], seen[-20:]))
    assert last[0] - first[0] < 20 and last[1:] == first[1:], (first, last)
    names = sorted(path.name for path in (tmp_path / "out/checkpoints").iterdir())
    assert names == ["step_00009000", "step_00009500", "step_00010000"]
    assert len(metrics(tmp_path / "out")) == 1001 and len(process.read("stderr")) < 100_000
    result = f"{first[0]:.0f} and {last[0]:.0f} MB, {last[1]} files and {last[2]} threads at both ends; 3 checkpoints"
    report(f"10,000 steps of `{name}.py`", 1, result)


def test_read_only_output(runs, tmp_path, report):
    """A folder that cannot be written to is refused before training."""
    flags, _ = runs["train_bi_encoder"]
    done = launch(ROOT / "train_bi_encoder.py", *flags, "--output_dir", "/proc/nothing", check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("error: --output_dir /proc/nothing"), last
    report("a folder that cannot be written to", 1, "one-line error before training")
