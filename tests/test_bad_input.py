"""Bad input is refused with one line that names the source, row, column or flag; no earlier output is lost."""

import ast
import gzip
import importlib
import json
import math
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, make_dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
import zstandard
from conftest import ROOT, TRAINERS, launch, metrics, write_jsonl
from forked import merge_flags
from safetensors.torch import load_file, save_file

import train_bi_encoder as script

SCRIPT = ROOT / "train_bi_encoder.py"
ROWS = [{"a": f"anchor {i} of the corpus", "b": f"positive {i} of the corpus", "score": i / 60} for i in range(60)]
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture
def flags(static):
    """Flags of a run of four steps: two epochs of the 52 rows that are not held out. Tests add --train_data."""
    return run_flags(static)


def run_flags(model):
    return ["--model_name_or_path", model, "--columns", "a", "b", "--batch_size", 26, "--max_steps", 4,
            "--eval_rows", 8, "--save_steps", 2, "--logging_steps", 1, "--output_dir", "out"]  # fmt: skip


def jsonl(name, rows=ROWS):
    write_jsonl(Path(name), rows)
    return name


def train(flags, *changed):
    script.main(script.parse_args(merge_flags([*flags, *changed])))


@pytest.fixture
def refusal(capsys):
    """Return a function that runs the script, which must refuse its input, and returns the one-line message."""

    def run(flags, *changed):
        try:
            train(flags, *changed)
        except script.UserError as error:
            message = str(error)
        except SystemExit as error:
            assert error.code == 2
            message = capsys.readouterr().err.splitlines()[-1].partition("error: ")[2]
        else:
            pytest.fail("not refused")
        assert message and "\n" not in message
        return message

    return run


def replace_cells(rows, number, **cells):
    """Return the rows with new values in some cells of one row."""
    return [{**row, **cells} if i == number else row for i, row in enumerate(rows)]


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def streaming(way):
    return ["--streaming"] * (way == "streamed")


both_ways = pytest.mark.parametrize("way", ["mapped", "streamed"])


def checkpoints():
    return sorted(os.listdir("out/checkpoints"))


def newest():
    return script.newest_checkpoint(Path("out/checkpoints"))[1]["step"]


def weights(folder="out"):
    return sorted(path.read_bytes() for path in Path(folder, "model").rglob("*.safetensors"))


# ------------------------------------------------------------------------------------------------ from the shell


def assert_one_error_line(result, *words):
    assert result.returncode not in (0, None)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line
    assert f'File "{SCRIPT}"' not in result.stderr  # no traceback from the script


def test_one_error_line_and_exit_code(flags):
    jsonl("x.jsonl", replace_cells(ROWS, 30, b=""))
    result = launch(SCRIPT, *flags, "--train_data", "x.jsonl", cwd=os.getcwd(), check=False)
    assert_one_error_line(result, "x.jsonl", "anchor 30", "'b'", "--on_bad_row skip")


def test_batch_smaller_than_the_process_count(flags):
    """Two processes raise the error, but only one line is printed."""
    given = [*flags, "--train_data", jsonl("x.jsonl"), "--batch_size", 1]
    result = launch(SCRIPT, *given, processes=2, cwd=os.getcwd(), check=False)
    assert_one_error_line(result, "--batch_size 1", "2 processes")


def test_full_disk_during_a_checkpoint(flags, tmp_path, report):
    """A tmpfs with space for one checkpoint and half of the next."""
    flags = [*flags, "--train_data", jsonl("x.jsonl")]
    train(flags, "--max_steps", 2)
    size = sum(map(len, snapshot(tmp_path / "out/checkpoints").values()))
    shutil.rmtree("out")
    os.mkdir("out")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(size * 1.5)}", "tmpfs", "out"])
    if mounted.returncode:
        pytest.skip("no permission to mount a tmpfs")
    try:
        with pytest.raises(script.UserError, match="step_00000004.*No space left") as caught:
            train(flags)
        assert "\n" not in str(caught.value)
        assert checkpoints() == ["step_00000002"] and newest() == 2
        subprocess.run(["mount", "-o", "remount,size=100m", "out"], check=True)
        train(flags, "--resume")
        assert checkpoints() == ["step_00000002", "step_00000004"]
        report("a disk too full for the next checkpoint", 1, "one-line error; then resumed from the previous one")
    finally:
        subprocess.run(["umount", "--lazy", "out"], check=True)  # weights read from it may still be mapped


def test_files_are_synced_before_the_rename(flags, monkeypatch):
    """Every file and folder of a checkpoint or model has been synced, at its final size, when it is renamed."""
    synced, at_rename, fsync, rename = {}, {}, os.fsync, Path.rename

    def record_fsync(descriptor):
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size
        fsync(descriptor)

    def record_rename(part, target):
        sizes = {str(path): path.stat().st_size for path in [part.resolve(), *part.resolve().rglob("*")]}
        at_rename[target.name] = sizes, {path: synced.get(path) for path in sizes}
        return rename(part, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    train(flags, "--train_data", jsonl("x.jsonl"))
    assert list(at_rename) == ["step_00000002", "step_00000004", "model"]
    for sizes, sizes_when_synced in at_rename.values():
        assert sizes_when_synced == sizes and len(sizes) > 4


@pytest.mark.parametrize("what, more", [("checkpoint", ["--save_total_limit", 1]), ("model", [])],
                         ids=["the only checkpoint", "model"])  # fmt: skip
def test_files_that_cannot_grow(flags, monkeypatch, what, more):
    """RLIMIT_FSIZE imitates a full disk: from the second checkpoint or the model on, no file can exceed 40 kB."""
    real, calls = script.save_atomically, []

    def limited(folder):
        calls.append(str(folder))
        if len(calls) > (1 if what == "checkpoint" else 2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
        return real(folder)

    monkeypatch.setattr(script, "save_atomically", limited)
    try:
        with pytest.raises(script.UserError) as caught:
            train(flags, "--train_data", jsonl("x.jsonl"), *more)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert ("step_00000004" if what == "checkpoint" else "out/model") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert checkpoints() == (["step_00000002"] if what == "checkpoint" else ["step_00000002", "step_00000004"])
    assert newest() == (2 if what == "checkpoint" else 4)


# ------------------------------------------------------------------------------------------------------ sources


@pytest.mark.parametrize("source", ["missing.parquet", "missing-*.jsonl", "folder", "./folder/x", "nothing_here",
                                    "nosuch://bucket/x.parquet", "s3://bucket/x.parquet", "./x.xlsx", "./x",
                                    "./x.gz"])  # fmt: skip
def test_source_that_cannot_be_opened(flags, refusal, monkeypatch, source):
    """Nothing is left behind, not even an empty folder."""
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    os.mkdir("folder")
    for name in ("x.xlsx", "x", "x.gz"):
        Path(name).touch()
    assert f"--train_data {source}" in refusal(flags, "--train_data", source, "--output_dir", "new/out")
    assert not os.path.exists("new")


NOT_ON_DISK = ["data/minned", "data/minned/", "./minned", "/data/minned", "~/minned", "runs/x/model",
               "data/minned::train"]  # fmt: skip


@pytest.mark.parametrize("source", NOT_ON_DISK)
@pytest.mark.parametrize("name", TRAINERS)
def test_a_misspelt_folder_is_not_asked_for_on_the_hub(monkeypatch, name, source):
    """Of a source, a model and a collection alike; what may be a Hub id is still looked up."""
    os.mkdir("data")
    trainer = importlib.import_module(name)

    def ask(path, *_, **__):
        raise ConnectionError(f"asked for {path}")

    for function in ("load_dataset_builder", "get_dataset_config_names"):
        monkeypatch.setattr(trainer.datasets, function, ask)
    monkeypatch.setattr(trainer, "SentenceTransformer" if trainer is script else "CrossEncoder", ask)
    loaders = [trainer.list_files, lambda path: trainer.load_model(trainer.Args(model_name_or_path=path)),
               lambda path: trainer.open_beir(path, "test", ("", ""))]  # fmt: skip
    for load in loaders[: 1 if ":" in source else None]:
        with pytest.raises(trainer.UserError, match="no such file or folder$"):
            load(source)
        for unknown in ("minned", "org/minned"):
            with pytest.raises((ConnectionError, trainer.UserError), match=f"asked for {unknown}"):
                load(unknown)


@pytest.mark.parametrize("name", [*TRAINERS, "eval_incremental", "mine_negatives"])
def test_files_of_other_formats(name):
    """The message lists the formats, and what reads ORC, before the Hub is asked."""
    os.mkdir("folder")
    Path("folder/x.orc").touch()
    Path("x.xlsx").touch()
    for source in ("folder/x.orc", "folder/*.orc", "folder", "folder/", "s3://bucket/x.orc", "x.xlsx"):
        with pytest.raises(ValueError, match=r"^not one of .parquet .*; prepare_corpus.py converts .orc$"):
            importlib.import_module(name).list_files(source)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_model_that_is_not_downloaded(name):
    """Offline, the message gives a way that a user of the scripts has."""
    trainer = importlib.import_module(name)
    with pytest.raises(trainer.UserError, match="^--model_name_or_path org/minned: .*unset HF_HUB_OFFLINE"):
        trainer.load_model(trainer.Args(model_name_or_path="org/minned"))


def test_a_pattern_without_files(refusal, flags):
    assert "x-*.jsonl: no split 'train' with files; available: none" in refusal(flags, "--train_data", "x-*.jsonl")


@both_ways
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl.gz"])
def test_truncated_file(flags, refusal, suffix, way):
    name, table = f"x.{suffix}", pa.Table.from_pylist(ROWS * 100)
    if suffix == "parquet":
        pq.write_table(table, name, row_group_size=500)
    elif suffix == "arrow":
        with pa.OSFile(name, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, 500)
    else:
        with gzip.open(name, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in ROWS * 100)
    shutil.copy(name, "kept")
    for share in (0.0, 0.3, 0.99):
        os.truncate(name, int(os.path.getsize(name) * share))
        # a stream fails when it reaches the damage, here within the first shuffle window
        assert name in refusal(flags, "--train_data", name, *streaming(way))
        shutil.rmtree("out", ignore_errors=True)
        shutil.copy("kept", name)


@both_ways
def test_zst_cut_in_the_middle(flags, refusal, way):
    with zstandard.open("x.jsonl.zst", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS * 100)
    os.truncate("x.jsonl.zst", os.path.getsize("x.jsonl.zst") // 2)
    assert "x.jsonl.zst" in refusal(flags, "--train_data", "x.jsonl.zst", *streaming(way))


@both_ways
@pytest.mark.parametrize("line", ["{'a': 1}", '{"a": "x", "b": "y"', "\x00\x00"])
def test_malformed_json_line(flags, refusal, line, way):
    lines = [json.dumps(row) for row in ROWS]
    Path("x.jsonl").write_text("\n".join([*lines[:41], line, *lines[41:]]) + "\n")
    assert "x.jsonl" in refusal(flags, "--train_data", "x.jsonl", *streaming(way))


@both_ways
def test_malformed_csv_line(flags, refusal, way):
    """A row with more cells than the header is refused: an extra comma would shift its columns."""
    lines = ["a,b", *(f"{row['a']},{row['b']}" for row in ROWS), '"anchor, unquoted", and a comma, positive']
    Path("x.csv").write_text("\n".join(lines))
    assert "x.csv" in refusal(flags, "--train_data", "x.csv", *streaming(way))


def test_csv_without_names(flags, refusal):
    """Its first row would be lost, as the names of the columns."""
    Path("x.csv").write_text("read a gzip file,def read(path): return gzip.open(path).read()\n" * 9)
    flags = [*flags]
    if "--columns" in flags:
        del flags[flags.index("--columns") : flags.index("--columns") + 3]
    assert "column 'def read(path): return gzip.open(path).read()': if" in refusal(flags, "--train_data", "x.csv")


@both_ways
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "txt"])
def test_file_without_rows(flags, refusal, suffix, way):
    name = f"x.{suffix}"
    Path(name).touch()
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS[:0], pa.schema({"a": pa.string(), "b": pa.string()})), name)
    assert name in refusal(flags, "--train_data", name, *streaming(way))
    assert name in refusal(flags, "--train_data", jsonl("y.jsonl"), name, *streaming(way))


# ------------------------------------------------------------------------------------------------- columns and rows


@both_ways
def test_missing_column(flags, refusal, way):
    message = refusal(flags, "--train_data", jsonl("x.jsonl"), "--columns", "a", "c", *streaming(way))
    assert "x.jsonl" in message and "['c']" in message and "score" in message
    message = refusal(flags, "--train_data", "x.jsonl", "--label_column", "stars", *streaming(way))
    assert "x.jsonl" in message and "['stars']" in message
    other = jsonl("y.jsonl", [{"a": "an anchor", "c": "a positive"}])
    assert "y.jsonl" in refusal(flags, "--train_data", "x.jsonl", other, *streaming(way))


@pytest.mark.parametrize("row", [{"a": "text"}, {"score": 1.0}])
def test_too_few_columns(static, refusal, row):
    given = ["--model_name_or_path", static, "--train_data", jsonl("x.jsonl", [row] * 60), "--output_dir", "out"]
    assert "--columns" in refusal(given, "--label_column", "score")


@both_ways
@pytest.mark.parametrize("text", [None, "", "  \n"])
def test_bad_rows_are_refused_or_skipped_and_counted(flags, refusal, capsys, text, way):
    """Of the 52 rows that are not held out, 3 are bad: one batch of 49 rows reads them all."""
    rows = replace_cells(replace_cells(replace_cells(ROWS, 20, a=None), 33, b=text), 50, score=None)
    given = [*flags, "--train_data", jsonl("x.jsonl", rows), *streaming(way), "--label_column", "score"]
    given += ["--loss", "CoSENTLoss", "--batch_size", 49, "--max_steps", 1]
    message = refusal(given)
    assert "x.jsonl" in message and "--on_bad_row skip" in message
    assert any(word in message for word in ("'a' has no text", "'b' has no text", "'score'"))
    shutil.rmtree("out")
    train(given, "--on_bad_row", "skip")
    assert "3 bad rows skipped" in capsys.readouterr().out


@both_ways
@pytest.mark.parametrize("kind", ["texts", "stars", "empty"])
def test_a_wrong_column(flags, refusal, kind, way):
    """If most of the first rows are bad, the column is wrong, not the rows: nothing advises to skip them."""
    rows = [{**row, "label": ["bad", "good"][i % 2], "stars": None if i % 5 else 1.0, "b": row["b"]}
            for i, row in enumerate(ROWS)]  # fmt: skip
    rows = [{**row, "b": ""} for row in rows] if kind == "empty" else rows
    label = {"texts": "label", "stars": "stars", "empty": "score"}[kind]
    given = ["--train_data", jsonl("x.jsonl", rows), "--label_column", label, "--loss", "CoSENTLoss", *streaming(way)]
    message = refusal(flags, *given)
    column = "'b'" if kind == "empty" else f"'{label}'"
    count = 6 if kind == "stars" else 8
    assert message.startswith(f"x.jsonl: {column} has ") and f"in {count} of 8 rows, as in {{" in message
    assert "--columns" in message and "--label_column" in message and "skip" not in message


def test_only_bad_rows(flags, refusal):
    rows = [{**row, "b": ""} for row in ROWS]
    assert "x.jsonl" in refusal(flags, "--train_data", jsonl("x.jsonl", rows), "--on_bad_row", "skip")


@pytest.mark.parametrize("kind", ["texts", "structs"])
def test_negatives_are_not_drawn_from_bad_rows(kind):
    """A batch with bad rows equals the batch without them."""
    trainer = importlib.import_module("train_cross_encoder")
    args = trainer.Args(columns=["a", "b"], num_negatives=3, on_bad_row="skip")
    rows = [{**row, "b": {"title": "", "text": row["b"]} if kind == "structs" else row["b"]} for row in ROWS[:8]]
    bad = replace_cells(replace_cells(rows, 2, a=""), 5, b=None)

    def documents(rows, kept):
        table = pa.Table.from_pylist([{**row, "<source>": 0, "<number>": i} for i, row in enumerate(rows)])
        table = table.take(list(kept))
        found, skipped = trainer.read_rows(
            table, [], (None, None), args, lambda rows: trainer.draw_negatives(args, table, rows)
        )
        return [row.documents for row in found], skipped

    kept = [0, 1, 3, 4, 6, 7]
    assert documents(bad, range(8)) == (documents(bad, kept)[0], 2) and documents(rows, kept) == documents(bad, kept)
    assert all(len(row) == 4 and all(isinstance(text, str) for text in row) for row in documents(bad, kept)[0])


@both_ways
def test_resume_on_corrected_data(flags, refusal, way):
    """Refused without --accept_changed_data; with it, the run equals one on the corrected data from the start."""
    given = [*flags, "--shuffle_buffer", 60, "--batch_size", 16, "--max_steps", 16, "--save_steps", 0, *streaming(way)]
    bad, corrected = replace_cells(ROWS * 4, 200, b=""), replace_cells(ROWS * 4, 200, b="a corrected text")
    train(given, "--train_data", jsonl("x.jsonl", corrected), "--output_dir", "whole")
    assert "'b' has no text" in refusal(given, "--train_data", jsonl("x.jsonl", bad))
    assert 0 < newest() < 16
    jsonl("x.jsonl", corrected)
    message = refusal(given, "--train_data", "x.jsonl", "--resume")
    assert "x.jsonl has changed" in message and "--accept_changed_data" in message
    train(given, "--train_data", "x.jsonl", "--resume", "--accept_changed_data")
    assert [line.get("loss") for line in metrics("out")] == [line.get("loss") for line in metrics("whole")]
    assert weights() == weights("whole")


def test_a_run_that_ends_within_a_length_window(flags):
    train(flags, "--train_data", jsonl("x.jsonl"), "--length_window", 3, "--batch_size", 4, "--max_steps", 2)
    assert os.path.exists("out/training.png")


@pytest.mark.parametrize("kind", ["transformer", "static"])
def test_a_long_text_is_truncated(flags, bert, kind):
    """A text of 20,000 words, with micro-batches of 16 tokens."""
    jsonl("x.jsonl", replace_cells(ROWS, 33, b="word " * 20_000))
    model = ["--model_name_or_path", bert] if kind == "transformer" else []
    train(flags, *model, "--train_data", "x.jsonl", "--micro_batch_tokens", 16, "--max_length", 64, "--max_steps", 2)
    assert weights()


# ------------------------------------------------------------------------------------------------------------ flags


@pytest.mark.parametrize("weights", [["1"], ["1", "2", "3"], ["1", "-1"], ["1", "0"], ["1", "nan"], ["1", "inf"]])
def test_wrong_mixing_weights(flags, refusal, weights):
    jsonl("x.jsonl"), jsonl("y.jsonl")
    assert "--mixing_weights" in refusal(flags, "--train_data", "x.jsonl", "y.jsonl", "--mixing_weights", *weights)


def test_a_flag_given_twice(bert, capsys):
    """Refused in one line, whether spelled `--a b` or `--a=b`; a flag may still override a file of flags."""
    import eval_incremental
    import prepare_corpus
    import train_cross_encoder

    Path("flags.yaml").write_text(f"model_name_or_path: {bert}\ntrain_data: [x.jsonl]\nseed: 1\n")
    cases = {
        script.parse_args: "--train_data x.jsonl --seed 1 --train-data=y.jsonl",
        train_cross_encoder.parse_args: "flags.yaml --train_data x.jsonl --train_data y.jsonl",
        eval_incremental.parse_args: "--beir a --split test --beir b",
        prepare_corpus.parse_args: "x.jsonl --output_dir a --columns b --output_dir c",
    }
    for parse, words in cases.items():
        with pytest.raises(SystemExit, match="2"):
            parse(words.split())
        line = capsys.readouterr().err.splitlines()[-1]
        name = (
            "--output_dir" if parse is prepare_corpus.parse_args else "--beir" if "beir" in words else "--train_data"
        )
        assert f"error: {name}: given twice" in line
    for trainer in (script, train_cross_encoder):
        assert trainer.parse_args(["flags.yaml", "--seed", "2"]).seed == 2


@pytest.mark.parametrize("name", ["train_bi_encoder", "train_cross_encoder", "eval_incremental"])
def test_help_and_mistyped_flags_load_no_library(name):
    for words, status, expected in (("--help", 0, "--output_dir"), ("--outputdir x", 2, "did you mean --output_dir")):
        command = [sys.executable, "-X", "importtime", ROOT / f"{name}.py", *words.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        loaded = set(re.findall(r"^import time:.*\| +(\w+)$", done.stderr, re.M))
        assert done.returncode == status and expected in done.stdout + done.stderr
        assert "transformers" in loaded and not loaded & {"torch", "datasets", "sentence_transformers"}


def test_the_nearest_flag_is_named(capsys):
    cases = {
        "train_bi_encoder": "--train_data x --colums a b; --columns", "train_cross_encoder": "--colums=a; --columns",
        "eval_incremental": "--beir x --metrcs AP; --metrics", "mine_negatives": "--range-mx 3; --range-max",
        "prepare_corpus": "x.csv --colums a; --columns",
    }  # fmt: skip
    for name, words in cases.items():
        words, nearest = words.split("; ")
        with pytest.raises(SystemExit, match="2"):
            importlib.import_module(name).parse_args(words.split())
        wrong = re.search(r"--\S*(colum|met|mx)\w*", words)[0]
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.endswith(f"error: {wrong}: no such flag; did you mean {nearest}?")
    with pytest.raises(SystemExit, match="2"):
        script.parse_args(["--train_data", "x", "--seed", "1", "--seed", "2"])
    assert capsys.readouterr().err.endswith("error: --seed: given twice\n")


CREDENTIALS = """\
https://bucket.s3.amazonaws.com/x.parquet?X-Amz-Credential=AKIA&X-Amz-Signature=0fe1
https://account.blob.core.windows.net/container/x.parquet?sv=2024&sig=0fe1
https://host/rows.jsonl?token=0fe1
https://host/get?access_token=0fe1&file=rows.jsonl
https://user:0fe1@host/rows.jsonl
s3://AKIA:0fe1@bucket/rows.jsonl"""
PUBLIC = ["https://host/get?file=rows.jsonl", "s3://bucket/rows-?.jsonl", "hf://datasets/o/n@main/x.parquet",
          "abfs://container@account.dfs.core.windows.net/x.parquet", "a/user:x@y/*.jsonl"]  # fmt: skip


@pytest.mark.parametrize("name", [*TRAINERS, "eval_incremental"])
def test_credentials_in_a_url(name, capsys):
    """Refused by the scripts that write their flags down; the message does not repeat them."""
    script = importlib.import_module(name)
    flag = "--corpus" if name == "eval_incremental" else "--train_data"
    more = ["--queries", "q", "--qrels", "r"] if name == "eval_incremental" else []
    for source in CREDENTIALS.splitlines():
        Path("args.yaml").write_text(yaml.safe_dump({flag[2:]: ["a.jsonl", source]}))
        for words in ([flag, "a.jsonl", source], ["args.yaml"]):
            with pytest.raises(SystemExit, match="2"):
                script.parse_args([*words, *more])
            line = capsys.readouterr().err.splitlines()[-1]
            assert f"error: {flag}: a URL with a credential" in line and "0fe1" not in line and "environment" in line
    script.parse_args([flag, *PUBLIC, *more])


WRONG_FLAGS = """\
--batch_size 0
--batch_size -1
--max_length 0
--learning_rate 0
--learning_rate nan
--weight_decay -1
--warmup_ratio -0.1
--dropout -1
--num_train_epochs inf
--num_train_epochs 0
--eval_rows -1
--eval_rows 60
--save_total_limit 0
--lr_scheduler_type sometimes
--loss_kwargs {
--loss_kwargs [1]
--loss_kwargs {"tau":1}
--loss NoSuchLoss
--loss CoSENTLoss
--loss TripletLoss
--loss margin_mse
--loss kl --label_column score
--matryoshka_dims 1000
--matryoshka_dims 0
--report_to nosuchtracker
--model_name_or_path ./missing
--mix_by column
--streaming --max_steps 0
--train_dta x.jsonl
--seed 1 --seed 2"""


@pytest.mark.parametrize("wrong", WRONG_FLAGS.splitlines())
def test_wrong_flag(flags, refusal, monkeypatch, wrong):
    """An invalid value is refused in one line; it neither falls back to the default nor prints a traceback."""
    words = wrong.split(" ")
    if wrong.count("--seed") == 2:
        monkeypatch.setitem(globals(), "merge_flags", lambda flags: list(map(str, flags)))
    epochs = ["--max_steps", 0] if "epochs" in wrong else []
    message = refusal(flags, "--train_data", jsonl("x.jsonl"), *epochs, *words)
    name = {"--loss": " ".join(words[:2]), '--loss_kwargs {"tau":1}': "--loss_kwargs of infonce: .*tau"}
    assert re.search(rf"{name.get(wrong, name.get(words[0], words[0]))}\b", message), message
    assert not os.path.exists("out/model")


def test_damaged_weights_of_the_model(flags, refusal, bert, tmp_path):
    shutil.copytree(bert, tmp_path / "damaged")
    os.truncate(tmp_path / "damaged/model.safetensors", 1000)
    message = refusal(flags, "--train_data", jsonl("x.jsonl"), "--model_name_or_path", tmp_path / "damaged")
    assert f"--model_name_or_path {tmp_path / 'damaged'}: " in message


def test_one_labelled_row_to_evaluate_on(flags):
    """The correlation of one pair is undefined: it is reported as NaN, and the run trains."""
    label = ["--label_column", "score", "--loss", "CoSENTLoss", "--eval_rows", 1]
    train(flags, "--train_data", jsonl("x.jsonl"), *label)
    lines = metrics("out")
    assert math.isnan(lines[0]["Spearman"]) and math.isnan(lines[-1]["Pearson"])
    assert lines[-1]["step"] == 4 and math.isfinite(lines[-1]["loss"]) and weights()


@pytest.mark.parametrize("text", ["nosuchflag: 1", "mix_by: column", "on_bad_row: ignore", "seed: 2.5", "- a: b",
                                  "seed: many", "{"])  # fmt: skip
def test_wrong_file_of_flags(flags, refusal, monkeypatch, text):
    """Values in the file are checked like those of flags."""
    Path("args.yaml").write_text(text + "\n")
    monkeypatch.setitem(globals(), "merge_flags", lambda flags: ["args.yaml", *map(str, flags)])
    message = refusal(flags, "--train_data", jsonl("x.jsonl"))
    assert text.partition(":")[0] in message or "args.yaml" in message


def test_file_of_flags_and_flags_that_override_it():
    """In YAML or JSON; one source need not be a list, and --loss_kwargs may be a mapping."""
    Path("args.yaml").write_text(
        "train_data: x.jsonl\nbatch_size: 8\nseed: 3\nmix_by: batch\nlearning_rate: 2e-5\n"
        "loss_kwargs: {symmetric: true}\nprompts: ['query: ', '']\nmax_length: null\ngrad_cache: true\n"
        "num_negatives: 3\n"
    )
    args = script.parse_args(["args.yaml", "--seed", "4", "--columns", "a", "b"])
    assert (args.train_data, args.batch_size, args.seed, args.mix_by) == (["x.jsonl"], 8, 4, "batch")
    assert (args.learning_rate, args.loss_kwargs, args.prompts) == (2e-5, {"symmetric": True}, ["query: ", ""])
    assert (args.max_length, args.grad_cache, args.num_negatives, args.columns) == (None, "true", 3, ["a", "b"])
    Path("args.json").write_text(json.dumps({"train_data": ["x", "y"], "streaming": True, "max_steps": 3}))
    assert script.parse_args(["args.json"]).train_data == ["x", "y"]


def test_no_demo_corpus(refusal):
    assert "python prepare_corpus.py" in refusal([])


# ------------------------------------------------------------------------------------------------ existing runs


@pytest.fixture(scope="module")
def finished_run(static, tmp_path_factory):
    """Folder of a finished run, with checkpoints of steps 2 and 4."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("run"))
        train(run_flags(static), "--train_data", jsonl("x.jsonl"))
        assert checkpoints() == ["step_00000002", "step_00000004"]
        shutil.copytree("out", "as_finished")
    return folder


@pytest.fixture
def finished(finished_run, flags, monkeypatch):
    """Flags of the finished run; out/ is a fresh copy of its output."""
    monkeypatch.chdir(finished_run)
    shutil.rmtree("out")
    shutil.rmtree("again", ignore_errors=True)
    shutil.copytree("as_finished", "out")
    return [*flags, "--train_data", "x.jsonl"]


def test_output_dir_that_contains_a_run(finished, refusal):
    before = snapshot("out")
    message = refusal(finished)
    assert "--output_dir out" in message and "--resume" in message
    assert snapshot("out") == before


def test_output_dir_that_is_a_file(flags, refusal):
    Path("out").touch()
    assert "--output_dir out" in refusal(flags, "--train_data", jsonl("x.jsonl"))


CHANGED = ["--seed 1", "--batch_size 9", "--columns b a", "--max_length 64", "--eval_rows 7", "--shuffle_buffer 5",
     '--loss_kwargs {"symmetric":true}', "--dropout 0.1", "--length_window 2", "--streaming", "--prompts query:",
     "--gradient_accumulation_steps 2", "--matryoshka_dims 8", "--train_data y.jsonl", "--eval_data y.jsonl",
     "--model_name_or_path other"]  # fmt: skip


@pytest.mark.parametrize("changed", CHANGED)
def test_resume_with_changed_flags(finished, refusal, changed):
    jsonl("y.jsonl")
    shutil.copytree(finished[1], "other", dirs_exist_ok=True)
    before = snapshot("out")
    message = refusal(finished, "--resume", *changed.split(" "))
    assert message.startswith("--resume: ") and f"{changed.split()[0]} " in message and "(was " in message
    assert snapshot("out") == before


@pytest.mark.parametrize("name", TRAINERS)
def test_what_a_resume_may_change(name, monkeypatch):
    """Flags of MAY_CHANGE, those of SCHEDULE if the user accepts it, and no other, such as one that a user adds."""
    trainer = importlib.import_module(name)
    added = [("layer_decay", float, trainer.flag(1.0, "help"))]
    monkeypatch.setattr(trainer, "Args", make_dataclass("Args", added, bases=(trainer.Args,)))
    args, default = trainer.Args(accept_changed_schedule=True), trainer.Args()
    schedule, may_change = trainer.SCHEDULE.split(), trainer.MAY_CHANGE.split()
    for flag, value in asdict(default).items():
        saved = {"args": asdict(default) | {flag: "another"}, "data": [], "step": 3}
        if flag in schedule + may_change:
            assert trainer.find_changes(saved, args, []) == [[3, f"--{flag}", "another", value]]
        elif flag in ("resume", "accept_changed_data", "accept_changed_schedule"):
            assert trainer.find_changes(saved, default, []) == []
        else:
            with pytest.raises(trainer.UserError, match=rf"^--resume: --{flag} [^;]*\(was another\); restore"):
                trainer.find_changes(saved, args, [])
        if flag in schedule:
            with pytest.raises(trainer.UserError, match=rf"--{flag} .*was another; --accept_changed_schedule allows"):
                trainer.find_changes(saved, default, [])
    assert set(schedule + may_change) < set(asdict(args))


def card_and_flags(folder):
    return Path(folder, "model/README.md").read_text(), Path(folder, "args.yaml").read_text()


def test_a_resume_with_a_changed_schedule(finished, refusal, capsys):
    """Refused unless the user accepts it; then the checkpoint, the card and the output list what changed and when."""
    before = snapshot("out")
    for changed in (["--learning_rate", 1e-4], ["--max_steps", 5], ["--max_steps", 0], ["--warmup_ratio", 0.2]):
        assert f"{changed[0]} {changed[1]} (was " in refusal(finished, "--resume", *changed)
    assert snapshot("out") == before
    more = ["--learning_rate", 1e-4, "--resume", "--accept_changed_schedule"]
    train(finished, *more, "--max_steps", 5)
    train(finished, *more, "--max_steps", 6, "--logging_steps", 2)
    lines = ["after step 4: --learning_rate 2e-05 -> 0.0001", "after step 4: --max_steps 4 -> 5",
             "after step 5: --max_steps 5 -> 6", "after step 5: --logging_steps 1 -> 2"]  # fmt: skip
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("after ")] == lines
    state = script.newest_checkpoint(Path("out/checkpoints"))[1]
    assert state["changes"] == [[4, "--learning_rate", 2e-5, 1e-4], [4, "--max_steps", 4, 5],
                                [5, "--max_steps", 5, 6], [5, "--logging_steps", 1, 2]]  # fmt: skip
    assert metrics("out")[-1]["learning_rate"] == pytest.approx(1e-4 / 5)  # the last of 6 steps, one of warmup
    card, flags = card_and_flags("out")
    assert [line[2:] for line in card.splitlines() if line.startswith("- ")] == lines
    assert "resume" not in flags and "accept" not in flags  # a later run must not inherit them
    (command,) = [line for line in card.splitlines() if " --learning_rate 0.0001 " in line]
    assert script.flags_of_run(script.parse_args(shlex.split(command)[2:])) == yaml.safe_load(flags)


def test_a_finished_run_says_so(finished, capsys):
    """No step is taken with the flags given now: args.yaml and the card keep those of the run."""
    before = card_and_flags("out"), metrics("out"), weights()
    train(finished, "--resume", "--logging_steps", 3, "--learning_rate", 1e-4, "--accept_changed_schedule")
    assert (card_and_flags("out"), metrics("out"), weights()) == before
    assert re.search("(?s)the run is finished, after step 4: .*the model is in out/model$", capsys.readouterr().out)


def test_resume_with_changed_eval_data(flags, refusal):
    given = [*flags, "--train_data", jsonl("x.jsonl"), "--eval_data", jsonl("held.jsonl", ROWS[:20])]
    train(given, "--max_steps", 2)
    jsonl("held.jsonl", ROWS[20:50])
    assert "held.jsonl has changed" in refusal(given, "--resume")


@both_ways
@pytest.mark.parametrize("change", ["rows added", "rows replaced"])
def test_resume_with_changed_data(flags, refusal, tmp_path, change, way):
    flags = [*flags, "--train_data", jsonl("x.jsonl"), *streaming(way)]
    train(flags, "--max_steps", 2)
    before = snapshot(tmp_path / "out")
    others = [{"a": f"other {i}", "b": f"text {i}"} for i in range(60)]
    jsonl("x.jsonl", {"rows added": ROWS + others, "rows replaced": others}[change])
    flags.append("--accept_changed_schedule")
    message = refusal(flags, "--resume")
    assert "x.jsonl has changed" in message and "--accept_changed_data" in message
    assert snapshot(tmp_path / "out") == before
    train(flags, "--resume", "--accept_changed_data")
    assert newest() == 4
    (change,) = script.newest_checkpoint(Path("out/checkpoints"))[1]["changes"][1:]  # after --max_steps
    assert change[:2] == [2, "x.jsonl"] and change[2] != change[3]


def damage(path):
    path = Path(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def model_file(checkpoint):
    """Return the path of a checkpoint's weights."""
    (path,) = [path for path in Path(checkpoint).rglob("*.safetensors") if path.name != "optimizer.safetensors"]
    return path


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_checkpoint_does_not_replace_an_intact_one(finished, keep):
    """Step 3, saved after resuming from step 2, is kept although the damaged checkpoint is of step 4."""
    damage(model_file("out/checkpoints/step_00000004"))
    train(finished, "--resume", "--max_steps", 3, "--accept_changed_schedule", "--save_total_limit", keep)
    assert newest() == 3


def test_resume_past_a_damaged_checkpoint_gives_the_same_weights(finished):
    whole = weights()
    damage(model_file("out/checkpoints/step_00000004"))
    train(finished, "--resume")
    assert weights() == whole and newest() == 4


def test_leftovers_of_a_killed_run_are_removed(finished):
    """An old checkpoint that was about to be removed, and one that was being written."""
    before = sorted(Path("out/checkpoints").iterdir())
    for name in ("step_00000001", ".step_00000003.part"):
        shutil.copytree(before[-1], Path("out/checkpoints") / name)
    train(finished, "--resume", "--max_steps", 5, "--accept_changed_schedule")
    assert checkpoints() == ["step_00000004", "step_00000005"]


@pytest.mark.parametrize("text", [b'{"step": 4, "note": "caf\xe9"}', b'{"step": 4', b""])
def test_a_state_that_is_not_json_is_a_damaged_checkpoint(finished, capsys, text):
    """Although its checksum is right, as that of a file that was edited and signed again."""
    path = Path("out/checkpoints/step_00000004")
    (path / "state.json").write_bytes(text)
    (path / "SHA256SUMS").write_text(script.checksums(path))
    assert script.newest_checkpoint(path.parent)[1]["step"] == 2
    assert "step_00000004: skipped, it is damaged" in capsys.readouterr().err


def test_resume_is_refused_if_no_checkpoint_is_intact(finished, refusal):
    """The run must not start anew and overwrite checkpoints that might be repaired."""
    for path in Path("out/checkpoints").iterdir():
        damage(model_file(path))
    before = snapshot("out")
    assert "checkpoints" in refusal(finished, "--resume")
    assert snapshot("out") == before


def test_args_yaml_reproduces_the_run(finished, monkeypatch):
    """Its flags alone give the same weights."""
    given = yaml.safe_load(Path("out/args.yaml").read_text())
    assert given["train_data"] == ["x.jsonl"]
    script.main(script.parse_args(["out/args.yaml", "--output_dir", "again"]))
    assert weights("again") == weights()


# --------------------------------------------------------------------------------------------------------------- NaN


def test_loss_that_turns_nan_keeps_the_last_good_checkpoint(flags, refusal, monkeypatch):
    """The loss of the third step is NaN."""
    real, calls = script.forward_backward, []

    def forward_backward(*given):
        calls.append(1)
        return real(*given) * (float("nan") if len(calls) == 3 else 1)

    monkeypatch.setattr(script, "forward_backward", forward_backward)
    message = refusal(flags, "--train_data", jsonl("x.jsonl"))
    assert "nan" in message and "step 3" in message and "nonfinite_batch.json" in message
    rows = json.loads(Path("out/nonfinite_batch.json").read_text())
    assert len(rows) == 26 and all(any(row["a"] == other["a"] for other in ROWS) for row in rows)
    assert newest() == 2 and not os.path.exists("out/model")


@pytest.mark.parametrize("name", TRAINERS)
def test_all_accumulated_batches_of_a_step_that_turns_nan_are_written(flags, name, reranker, monkeypatch):
    trainer = importlib.import_module(name)
    monkeypatch.setattr(trainer, "forward_backward", lambda *_: torch.tensor(math.nan))
    more = ["--train_data", jsonl("x.jsonl"), "--gradient_accumulation_steps", 4, "--batch_size", 13]
    more += ["--model_name_or_path", reranker] if trainer is not script else []
    with pytest.raises(trainer.UserError, match="nonfinite_batch.json"):
        trainer.main(trainer.parse_args(merge_flags([*flags, *more])))
    written = [row["a"] for row in json.loads(Path("out/nonfinite_batch.json").read_text())]
    assert sorted(written) == sorted(row["a"] for row in ROWS[8:])  # 4 x 13 rows


def test_weights_that_overflow_never_reach_a_checkpoint(flags, bert, refusal):
    """At a learning rate of 1e38, resumed from a good checkpoint, weights overflow while the loss is still finite."""
    given = [*flags, "--model_name_or_path", bert, "--train_data", jsonl("x.jsonl"), "--warmup_ratio", 0]
    train(given, "--max_steps", 1)
    rate = ["--learning_rate", 1e38, "--weight_decay", 1e3, "--save_steps", 1, "--max_steps", 20]
    rate.append("--accept_changed_schedule")
    assert refusal(given, *rate, "--resume").startswith("step 2: a weight is not finite: lower --learning_rate")
    checkpoint, state = script.newest_checkpoint(Path("out/checkpoints"))
    assert state["step"] == 1
    assert all(torch.isfinite(tensor).all() for tensor in load_file(model_file(checkpoint)).values())


def test_model_with_a_nan_weight(flags, bert, refusal, tmp_path, capsys):
    """Refused at the first step; in the evaluation before it, no document scores above another."""
    shutil.copytree(bert, tmp_path / "model")
    tensors = load_file(tmp_path / "model/model.safetensors")
    tensors["embeddings.LayerNorm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "model/model.safetensors", {"format": "pt"})
    assert "nan" in refusal(flags, "--train_data", jsonl("x.jsonl"), "--model_name_or_path", "model")
    measures = ast.literal_eval(re.search(r"^step 0: (.*)", capsys.readouterr().out, re.M)[1])
    assert measures["MRR@10"] == pytest.approx(sum(1 / rank for rank in range(1, 9)) / 8, abs=1e-4)  # corpus order
    assert not os.path.exists("out/model")


# ------------------------------------------------------------------------------------------- errors that are not data


def test_a_bug_in_ones_own_loss_keeps_its_traceback(flags, monkeypatch, capsys):
    def own(*_):
        return np.zeros(3) + np.zeros(4)

    monkeypatch.setitem(script.LOSSES, "own", own)
    with pytest.raises(ValueError, match="could not be broadcast") as error:
        train(flags, "--train_data", jsonl("x.jsonl"), "--loss", "own")
    assert not isinstance(error.value, script.UserError) and script.print_error(error.value, "", "") == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed and "return np.zeros(3) + np.zeros(4)" in printed


@pytest.mark.parametrize("reason, advised", [("could not be broadcast", False), ("Couldn't cast array of type", True)])
def test_what_prepare_corpus_can_mend(reason, advised):
    with pytest.raises(script.UserError, match="^x.jsonl: ") as error, script.user_errors("x.jsonl"):
        raise TypeError(reason)
    assert ("prepare_corpus.py" in str(error.value)) == advised


OUT_OF_MEMORY = """
import runpy, sys, torch
def cross_entropy(*_, **more):
    {0}
torch.nn.functional.cross_entropy = cross_entropy
runpy.run_path({1!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    "reason", ["torch.empty(2**50)", "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')"]
)
def test_out_of_memory_keeps_its_traceback_and_names_flags(flags, reason):
    """Also within user_errors, where a checkpoint is moved to the device and where a library computes a loss."""
    with pytest.raises(RuntimeError, match="memory"), script.user_errors("x.jsonl"):
        exec(reason)
    Path("driver.py").write_text(OUT_OF_MEMORY.format(reason, str(SCRIPT)))
    done = launch(Path("driver.py").resolve(), *flags, "--train_data", jsonl("x.jsonl"), cwd=".", check=False)
    assert done.returncode == 1 and "in cross_entropy" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("out of memory: lower --micro_batch_tokens, or set --grad_cache")
