"""Bad input is refused with one line that names the source, row, column or flag; no earlier output is lost."""

import importlib
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict, fields, make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from conftest import ROOT, TRAINERS, launch, metrics, write_jsonl, write_rows
from forked import merge_flags
from safetensors.torch import load_file

import train_bi_encoder as script
import train_cross_encoder

SCRIPT = ROOT / "train_bi_encoder.py"
ROWS = [{"a": f"anchor {i} of the corpus", "b": f"positive {i} of the corpus", "score": i / 60} for i in range(60)]
COSENT = ["--loss", "CoSENTLoss"]  # reads labels
BASE = "files of --model_name_or_path"
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
def message_of(capsys):
    """Return a function that calls another, which must refuse its input, and returns the one line that says so."""

    def call(function, *given):
        with pytest.raises((script.UserError, SystemExit)) as error:
            function(*given)
        message = str(error.value)
        if message == "2":  # of argparse
            message = capsys.readouterr().err.splitlines()[-1].partition("error: ")[2]
        assert message and "\n" not in message
        return message

    return call


@pytest.fixture
def refusal(message_of):
    """Return a function that runs the script, which must refuse its input, and returns the one-line message."""
    return lambda flags, *changed: message_of(train, flags, *changed)


def replace_cells(rows, number, **cells):
    """Return the rows with new values in some cells of one row."""
    return [{**row, **cells} if i == number else row for i, row in enumerate(rows)]


def snapshot(folder):
    """Return {path: bytes} of the files of a folder, but for the lock of a run, which may go later than it ended."""
    return {
        path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file() and path.name != ".lock"
    }


def streaming(way):
    return ["--streaming"] * (way == "streamed")


both_ways = pytest.mark.parametrize("way", ["mapped", "streamed"])


def checkpoints():
    return sorted(os.listdir("out/checkpoints"))


def newest():
    """Return the step of the newest intact checkpoint."""
    return script.find_checkpoint(script.Args(output_dir="out", resume=True))[1]["progress"]["step"]


def weights(folder="out"):
    return sorted(path.read_bytes() for path in Path(folder, "model").rglob("*.safetensors"))


def test_one_error_line_and_exit_code(flags):
    jsonl("x.jsonl", replace_cells(ROWS, 30, b=""))
    result = launch(SCRIPT, *flags, "--train_data", "x.jsonl", cwd=os.getcwd(), check=False)
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in ("x.jsonl", "anchor 30", "'b'", "--on_bad_row skip")), line
    assert f'File "{SCRIPT}"' not in result.stderr  # no traceback from the script
    assert "step/s" not in result.stderr and "0/4" not in result.stderr  # no progress bar in a log file


@both_ways
@pytest.mark.parametrize("suffix", ["jsonl.gz", "csv", "parquet"])
def test_a_bad_row_of_the_first_step(flags, refusal, way, suffix):
    """It is named by its number and file; once it is mended, the same command trains."""
    flags = [*flags, "--train_data", f"x-*.{suffix}", "--batch_size", 52, "--max_steps", 1, *streaming(way)]
    for rows in replace_cells(ROWS, 50, b=None, score=math.nan), ROWS:
        write_rows(f"x-0.{suffix}", rows[:40])
        write_rows(f"x-1.{suffix}", rows[40:])
        if rows is not ROWS:
            said = f"{{'a': 'anchor 50 of the corpus', 'b': None}}, number 11 of {Path.cwd()}/x-1.{suffix}; fix it"
            assert f"'b' has no text in the row {said}" in refusal(flags)
            assert Path("out/args.yaml").exists()
    train(flags)
    assert metrics("out")[-1]["step"] == 1


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


FULL = [("checkpoints/step_00000004", ["--save_total_limit", 1], [2]), ("model", [], [2, 4])]


@pytest.mark.parametrize("what, more, kept", FULL, ids=["the only checkpoint", "model"])
def test_files_that_cannot_grow(flags, monkeypatch, what, more, kept):
    """RLIMIT_FSIZE imitates a full disk: from the second checkpoint or the model on, no file can exceed 40 kB."""
    real, calls = script.save_atomically, []

    def limited(folder):
        calls.append(str(folder))
        if len(calls) > len(kept):
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
        return real(folder)

    monkeypatch.setattr(script, "save_atomically", limited)
    try:
        with pytest.raises(script.UserError, match=f"out/{what}") as caught:
            train(flags, "--train_data", jsonl("x.jsonl"), *more)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "\n" not in str(caught.value)
    assert checkpoints() == [f"step_{step:08}" for step in kept] and newest() == kept[-1]


SOURCES = ["missing.parquet", "missing-*.jsonl", "nothing_here", "s3://bucket/x.parquet", "./x.gz"]


@pytest.mark.parametrize("source", SOURCES)
def test_source_that_cannot_be_opened(flags, refusal, monkeypatch, source):
    """Nothing is left behind but the lock."""
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    Path("x.gz").touch()
    assert f"--train_data: {source}: " in refusal(flags, "--train_data", source, "--output_dir", "new/out")
    assert set(os.listdir("new/out")) <= {".lock"}  # which filelock 3 removes


@pytest.mark.parametrize("load", ["list_files", "nano_names", "load_model"])
def test_a_misspelt_folder_is_not_asked_for_on_the_hub(monkeypatch, load):
    """Of a source, a collection and a model alike; what may be a Hub id is still looked up."""
    os.mkdir("data")

    def ask(path, *_, **__):
        raise ConnectionError(f"asked for {path}")

    monkeypatch.setattr(script.datasets, "load_dataset_builder", ask)
    monkeypatch.setattr(script.datasets, "get_dataset_split_names", ask)
    monkeypatch.setattr(script.MultiVectorEncoder, "_get_model_type", lambda _, path, **__: ask(path))
    said = dict.fromkeys(["data/minned", "~/minned", "./minned", "runs/x/model"], "no such file or folder$")
    for source, line in (said | {name: f"asked for {name}" for name in ("minned", "org/minned")}).items():
        with pytest.raises((ConnectionError, script.UserError), match=line):
            getattr(script, load)(script.Args(model_name_or_path=source) if load == "load_model" else source)


@pytest.mark.parametrize("name", ["minned", "org/minned"])
def test_a_model_that_is_neither_here_nor_on_the_hub(name):
    absent = "no such file or folder, and not in the cache"
    for trainer in (script, train_cross_encoder):
        with pytest.raises(trainer.UserError) as error:
            trainer.load_model(trainer.Args(model_name_or_path=name))
        line = f"--model_name_or_path {name}: {absent}; the Hub is switched off (HF_HUB_OFFLINE)"
        assert str(error.value) == line
    error = OSError("We couldn't connect")
    error.__cause__ = type("ConnectError", (Exception,), {})("[Errno 111] Connection refused")  # of httpx
    assert script.reason_of(error) == f"{absent}, and the Hub cannot be reached: [Errno 111] Connection refused"


@pytest.mark.parametrize("suffix, way", [("parquet", "mapped"), ("arrow", "streamed"), ("jsonl.gz", "mapped"),
                                         ("jsonl.zst", "streamed")])  # fmt: skip
def test_truncated_file(flags, refusal, suffix, way):
    """A stream fails when it reaches the damage, here within the first shuffle window."""
    name, table = f"x.{suffix}", pa.Table.from_pylist(ROWS * 100)
    if suffix == "parquet":
        pq.write_table(table, name, row_group_size=500)
    elif suffix == "arrow":
        with pa.OSFile(name, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, 500)
    else:
        with fsspec.open(name, "wt", compression="infer") as file:
            file.writelines(json.dumps(row) + "\n" for row in ROWS * 100)
    data = Path(name).read_bytes()
    for share in (0.0, 0.3, 0.99):
        Path(name).write_bytes(data[: int(len(data) * share)])
        assert name in refusal(flags, "--train_data", name, *streaming(way))
        shutil.rmtree("out", ignore_errors=True)


@both_ways
def test_missing_column(flags, refusal, way):
    """Of the label, or of one source; of others, tests/test_contract.py. A source may have columns of its own."""
    given = [*flags, "--train_data", jsonl("x.jsonl"), *streaming(way)]
    message = refusal(given, "--label_column", "stars", *COSENT)
    assert "x.jsonl" in message and "['stars']" in message and "score" in message
    other = jsonl("y.jsonl", [{"a": "an anchor", "c": "a positive"}] * 20)
    assert "y.jsonl" in refusal(given, "--train_data", "x.jsonl", other)
    named = json.dumps({"path": other, "columns": ["a", "c"]})
    train(given, "--train_data", "x.jsonl", named, "--eval_rows", 4)


def test_columns_are_required(message_of):
    """Of the run, or of each source; so are a source and a model."""
    words = ["--model_name_or_path", "m", "--train_data", '{"path": "x.jsonl", "columns": ["a", "b"]}']
    assert script.parse_args(words).columns == []
    line = "y.jsonl: --columns is required: those of query, positive, negatives..., in this order"
    assert message_of(script.parse_args, [*words, "y.jsonl", "--columns", "a"]) == line
    for given in (words[:2], words[2:]):
        assert message_of(script.parse_args, given) == "--train_data and --model_name_or_path are required"


@pytest.mark.parametrize("text, way", [(None, "mapped"), ("  \n", "streamed")])
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


@pytest.mark.parametrize("kind, way", [("text", "mapped"), ("label", "streamed")])
def test_only_bad_rows(flags, refusal, kind, way):
    """The columns are wrong, not the rows: nothing advises to skip them."""
    rows = [{**row, "b": "", "label": "good"} for row in ROWS]
    given = ["--train_data", jsonl("x.jsonl", rows), "--on_bad_row", "skip", *streaming(way)]
    if kind == "label":
        given += ["--columns", "a", "a", "--label_column", "label", "--loss", "CoSENTLoss"]
    message = refusal(flags, *given)
    assert message.startswith("every row of the first step is bad: choose other --columns or --label_column")
    assert not os.path.exists("out/model")


@pytest.mark.parametrize("name", TRAINERS)
def test_a_first_batch_with_one_good_row(name, static, reranker, capsys):
    """It is not said to have none, and the run goes on."""
    rows = jsonl("x.jsonl", replace_cells([row | {"c": f"wrong {n}"} for n, row in enumerate(ROWS)], 1, a=""))
    flags = run_flags(static if name == "train_bi_encoder" else reranker)
    more = ["--train_data", rows, "--batch_size", 2, "--shuffle_buffer", 0, "--eval_rows", 0, "--on_bad_row", "skip"]
    columns = ["--columns", *"abc"[: 2 + (name == "train_cross_encoder")]]
    trainer = importlib.import_module(name)
    trainer.main(trainer.parse_args(merge_flags([*flags, *more, *columns])))
    assert "1 bad rows skipped" in capsys.readouterr().out
    assert metrics("out")[-1]["step"] == 4


@both_ways
def test_eval_data_with_other_columns(flags, refusal, way):
    """The line has the entry that works: of mined rows and of pairs, whatever the names."""
    mined = jsonl("mined.jsonl", [row | {"wrong": f"wrong {n}"} for n, row in enumerate(ROWS)])
    given = [*flags, "--train_data", mined, "--columns", "a", "b", "wrong", *streaming(way), "--eval_rows", 8]
    same, other = jsonl("same.jsonl", ROWS[:9]), jsonl("d.jsonl", [{"q": row["a"], "d": row["b"]} for row in ROWS])
    for name, columns in (same, ["a", "b"]), (other, ["q", "d"]):
        message = refusal(given, "--eval_data", name)
        entry = json.dumps({"path": name, "columns": ["a", "b"]})
        assert f"{name}: has no column [" in message
        assert f"]: an entry may have its own, '{entry}', or na" in message
        entry = entry.replace('["a", "b"]', json.dumps(columns))
        train(given, "--eval_data", entry, "--output_dir", name.partition(".")[0])
    if way == "mapped":
        assert ": an entry may have its own, '{" in refusal(given, "--train_data", mined, other)
        assert "its own" not in refusal(given, "--train_data", other)


def test_negatives_are_not_drawn_from_bad_rows():
    """A batch with bad rows equals the batch without them."""
    trainer = importlib.import_module("train_cross_encoder")
    args = trainer.Args(columns=["a", "b"], num_negatives=3, on_bad_row="skip")
    data = SimpleNamespace(sources=[SimpleNamespace(name="x", args=args)], lookups=(None, None))
    bad = replace_cells(replace_cells(ROWS[:8], 2, a=""), 5, b=None)

    def documents(kept):
        table = pa.Table.from_pylist([{**row, "<source>": 0, "<number>": i} for i, row in enumerate(bad)]).take(kept)
        found, skipped = trainer.local_rows(table, np.arange(len(table)), 0, data, args)
        return [row.documents for row in found], skipped

    found, skipped = documents([0, 1, 3, 4, 6, 7])
    assert documents(list(range(8))) == (found, 2) and skipped == 0
    assert all(len(row) == 4 and all(isinstance(text, str) for text in row) for row in found)


def test_resume_on_corrected_data(flags, refusal):
    """Refused without --accept_changes; with it, the run equals one on the corrected data from the start."""
    given = [*flags, "--shuffle_buffer", 60, "--batch_size", 16, "--max_steps", 16, "--save_steps", 0, "--streaming"]
    bad, corrected = replace_cells(ROWS * 4, 200, b=""), replace_cells(ROWS * 4, 200, b="a corrected text")
    train(given, "--train_data", jsonl("x.jsonl", corrected), "--output_dir", "whole")
    assert "'b' has no text" in refusal(given, "--train_data", jsonl("x.jsonl", bad))
    assert 0 < newest() < 16
    jsonl("x.jsonl", corrected)
    message = refusal(given, "--train_data", "x.jsonl", "--resume")
    assert message.startswith("--resume: x.jsonl: [") and "--accept_changes" in message
    train(given, "--train_data", "x.jsonl", "--resume", "--accept_changes")
    assert [line.get("loss") for line in metrics("out")] == [line.get("loss") for line in metrics("whole")]
    assert weights() == weights("whole")


def test_a_flag_given_twice(message_of):
    """A list is refused, as half of it would be ignored; of a scalar, the last value counts. Both override a file."""
    Path("flags.yaml").write_text("model_name_or_path: x\ntrain_data: [x.jsonl, y.jsonl]\nseed: 1\nresume: true\n")
    more = "--columns a b --model_name_or_path x"
    for name, flag, words in (("train_bi_encoder", "--train_data", f"--train_data x --train_data y {more}"),
                              ("train_bi_encoder", "--train_data", f"flags.yaml --train_data=x --train_data=y {more}"),
                              ("eval_incremental", "--beir", "--beir a --split test --beir b")):  # fmt: skip
        line = message_of(importlib.import_module(name).parse_args, words.split())
        assert line == f"{flag}: given twice; list all values after one flag"
    words = "flags.yaml --seed 2 --train_data z.jsonl --seed=3 --resume false --columns a b"
    args = script.parse_args(words.split())
    assert (args.seed, args.train_data, args.resume, args.model_name_or_path) == (3, ["z.jsonl"], False, "x")


@pytest.mark.parametrize("name, word, status, expected", [
    ("train_bi_encoder", "--outputdir", 2, "unrecognized arguments: --outputdir"),
    ("eval_incremental", "--help", 0, "--output_dir"),
])  # fmt: skip
def test_help_and_mistyped_flags_load_no_library(name, word, status, expected):
    command = [sys.executable, "-X", "importtime", ROOT / f"{name}.py", word]
    done = subprocess.run(command, capture_output=True, text=True)
    loaded = set(re.findall(r"^import time:.*\| +(\w+)$", done.stderr, re.M))
    assert done.returncode == status and expected in done.stdout + done.stderr
    assert "transformers" in loaded and not loaded & {"torch", "datasets", "sentence_transformers"}


CREDENTIALS = ["https://bucket.s3.amazonaws.com/x.parquet?X-Amz-Credential=AKIA&X-Amz-Signature=0fe1",
               "https://account.blob.core.windows.net/container/x.parquet?sv=2024&sig=0fe1",
               "https://host/get?access_token=0fe1&file=rows.jsonl", "https://host/rows.jsonl?token=0fe1",
               "https://user:0fe1@host/rows.jsonl", "s3://AKIA:0fe1@bucket/rows.jsonl"]  # fmt: skip
PUBLIC = ["https://host/get?file=rows.jsonl", "s3://bucket/rows-?.jsonl", "hf://datasets/o/n@main/x.parquet",
          "abfs://container@account.dfs.core.windows.net/x.parquet", "a/user:x@y/*.jsonl"]  # fmt: skip


@pytest.mark.parametrize("name", ["train_bi_encoder", "eval_incremental"])
def test_credentials_in_a_url(name, message_of):
    """Refused by the scripts that write their flags down; the message does not repeat them."""
    script = importlib.import_module(name)
    words = {"train_bi_encoder": "--model_name_or_path x --columns a b --train_data",
             "eval_incremental": "--model_name_or_path x --queries q --qrels r --corpus"}  # fmt: skip
    *more, flag = words[name].split()
    for source in CREDENTIALS:
        Path("args.yaml").write_text(yaml.safe_dump({flag[2:]: ["a.jsonl", source]}))
        for words in ([flag, "a.jsonl", source], ["args.yaml"]):
            line = message_of(script.parse_args, [*words, *more])
            assert line.startswith(f"{flag}: a URL with a credential") and "0fe1" not in line and "~/.netrc" in line
    script.parse_args([flag, *PUBLIC, *more])


WRONG_FLAGS = ["--batch_size 0", "--learning_rate nan", "--num_train_epochs inf", "--eval_rows 60", "--loss_kwargs {",
               '--loss_kwargs {"tau":1}', '--loss_kwargs {"temperature":0}', '--loss_kwargs {"temperature":"0.05"}',
               '--loss_kwargs {"symmetric":true,"in_batch":false}', "--warmup_ratio 100",
               "--loss NoSuchLoss", "--loss CoSENTLoss", "--loss TripletLoss",
               "--loss margin_mse", "--loss kl --label_column score", "--mix_by column",
               "--matryoshka_dims 1000", "--report_to nosuchtracker", "--report_to comet_ml",  # not installed
               "--model_name_or_path ./missing",
               "--mixing_weights 1 2 3", "--mixing_weights nan", "--streaming --max_steps 0", "--label_column score",
               "--train_dta x.jsonl"]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_FLAGS)
def test_wrong_flag(flags, refusal, wrong):
    """An invalid value is refused in one line; it neither falls back to the default nor prints a traceback."""
    words = wrong.split(" ")
    epochs = ["--max_steps", 0] if "epochs" in wrong else []
    message = refusal(flags, "--train_data", jsonl("x.jsonl"), *epochs, *words)
    name = {"--loss": " ".join(words[:2]), '--loss_kwargs {"tau":1}': "--loss_kwargs .*tau"}
    assert re.search(rf"{name.get(wrong, name.get(words[0], words[0]))}\b", message), message
    assert not os.path.exists("out/model")


def test_damaged_weights_of_the_model(flags, refusal, bert, tmp_path):
    shutil.copytree(bert, tmp_path / "damaged")
    os.truncate(tmp_path / "damaged/model.safetensors", 1000)
    message = refusal(flags, "--train_data", jsonl("x.jsonl"), "--model_name_or_path", tmp_path / "damaged")
    assert f"--model_name_or_path {tmp_path / 'damaged'}: " in message


def test_one_labelled_row_to_evaluate_on(flags):
    """The correlation of one pair is undefined: it is not reported, and the run trains."""
    train(flags, "--train_data", jsonl("x.jsonl"), "--label_column", "score", "--eval_rows", 1, *COSENT)
    lines = metrics("out")
    assert not any("held_out_spearman_cosine" in line for line in lines)
    assert lines[-1]["step"] == 4 and math.isfinite(lines[-1]["loss"])


WRONG_FILES = ["nosuchflag: 1", "mix_by: column", "seed: 2.5", "- a: b", "seed: [1, 2]", "mixing_weights: [1, x]",
               "resume: maybe", "loss_kwargs: [1]", "batch_size: 0", "{", "", "file: x.yaml", "query_prompt: no",
               "query_prompt: None", "query_columns: [_id, no]", "columns: [no, b]", "eval_data: [no]",
               "train_data: [{path: x.jsonl, columns: [a, no]}]"]  # fmt: skip


@pytest.mark.parametrize("text", WRONG_FILES)
def test_wrong_file_of_flags(text, message_of):
    """Its values are checked like flags, in one line that names the file or the flag: also `no`, false in YAML."""
    Path("args.yaml").write_text(text + "\n")
    columns = [] if "columns: [" in text else ["--columns", "a", "b"]
    sources = [] if text.startswith("train_data") else ["--train_data", "x.jsonl"]
    message = message_of(script.parse_args, ["args.yaml", *sources, "--model_name_or_path", "x", *columns])
    expected = {"seed: [1, 2]": "unrecognized arguments: 2", WRONG_FILES[-1]: "x.jsonl: --columns false: "}
    assert message.startswith("args.yaml: ") or expected.get(text, f"--{text.partition(':')[0]}") in message


def test_file_of_flags_and_flags_that_override_it():
    """In YAML or JSON; one source need not be a list, and --loss_kwargs may be a mapping, or JSON."""
    Path("args.yaml").write_text(
        "train_data: x.jsonl\nmodel_name_or_path: m\nseed: 3\nlearning_rate: 2e-5\nmax_length: null\n"
        'loss_kwargs: {symmetric: true}\nquery_prompt: "find:\\nquery: "\nlogging_steps: null\ngrad_cache: true\n'
        "num_negatives: 3\nmixing_weights: 2\nlora_rank: 4\nlora_kwargs: '{\"lora_alpha\": 8}'\nstreaming: false\n"
    )
    args = script.parse_args(["args.yaml", "--seed", "4", "--columns", "a", "b"])
    assert (args.train_data, args.seed, args.columns, args.num_negatives) == (["x.jsonl"], 4, ["a", "b"], 3)
    assert (args.learning_rate, args.loss_kwargs, args.query_prompt) == (2e-5, {"symmetric": True}, "find:\nquery: ")
    assert (args.max_length, args.grad_cache, args.streaming, args.mixing_weights) == (None, True, False, [2.0])
    assert args.lora_kwargs == {"lora_alpha": 8} and args.logging_steps == 10  # null is the default
    Path("args.json").write_text('{"train_data": ["x", "y"], "streaming": true, "max_steps": 3}')
    args = script.parse_args(["args.json", "--columns", "a", "b", "--model_name_or_path", "m"])
    assert (args.train_data, args.streaming, args.max_steps) == (["x", "y"], True, 3)


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
    shutil.copytree("as_finished", "out")
    return [*flags, "--train_data", "x.jsonl"]


def test_output_dir_that_contains_a_run(finished, refusal):
    before = snapshot("out")
    message = refusal(finished)
    assert "--output_dir out" in message and "--resume" in message
    assert snapshot("out") == before


@pytest.mark.parametrize("name", TRAINERS)
def test_what_a_resume_may_change(name, monkeypatch, capsys):
    """Flags with may_change, and no other unless the user accepts it, such as one that an experiment adds."""
    trainer = importlib.import_module(name)
    added = [("layer_decay", float, trainer.flag(1.0, "help"))]
    monkeypatch.setattr(trainer, "Args", make_dataclass("Args", added, bases=(trainer.Args,)))
    args, data, alone = trainer.Args(), SimpleNamespace(description={"x": [9, "hash"]}), SimpleNamespace(print=print)
    whole = trainer.unchanging(args, SimpleNamespace(config=None), data)
    may_change = {option.name for option in fields(args) if option.metadata["may_change"]}
    assert {"micro_batch_tokens", "output_dir", "resume", "accept_changes", "save_steps"} <= may_change
    assert whole.keys() == {f"--{flag}" for flag in asdict(args).keys() - may_change} | {"x", BASE}
    trainer.check_changes({"unchanging": whole, "progress": {"step": 3}}, whole, args, alone)
    older = {name: value for name, value in whole.items() if name not in ("--layer_decay", BASE)}  # lacks new flags
    trainer.check_changes({"unchanging": older, "progress": {"step": 3}}, whole, args, alone)
    assert "--layer_decay" in whole and capsys.readouterr().out == ""
    for name, value in whole.items():
        saved = {"unchanging": whole | {name: "another"}, "progress": {"step": 3, "metrics": []}}
        with pytest.raises(trainer.UserError, match="^--resume: .*--accept_changes") as error:
            trainer.check_changes(saved, whole, args, alone)
        assert f"{name}: another -> {value}" in str(error.value)
        trainer.check_changes(saved, whole, replace(args, accept_changes=True), alone)
        assert capsys.readouterr().out.splitlines()[0] == f"changed after step 3: {name}: another -> {value}"


def test_a_resume_with_a_changed_schedule(finished, capsys):
    """Refused unless the user accepts it (above); then the output lists what changed and when."""
    more = ["--learning_rate", 1e-4, "--resume", "--accept_changes"]
    train(finished, *more, "--max_steps", 5)
    train(finished, *more, "--max_steps", 6, "--logging_steps", 2)
    lines = ["changed after step 4: --learning_rate: 2e-05 -> 0.0001", "changed after step 4: --max_steps: 4 -> 5",
             "changed after step 5: --max_steps: 5 -> 6"]  # fmt: skip
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed ")] == lines
    assert metrics("out")[-1]["learning_rate"] == pytest.approx(1e-4 / 5)  # the last of 6 steps, one of warmup
    flags = Path("out/args.yaml").read_text()
    assert "resume" not in flags and "accept" not in flags  # a later run must not inherit them
    assert Path("out/model/args.yaml").read_text() == flags
    assert "learning_rate: 0.0001\n" in flags and "max_steps: 6\n" in flags


def test_resume_with_changed_eval_data(flags, refusal):
    given = [*flags, "--train_data", jsonl("x.jsonl"), "--eval_data", jsonl("held.jsonl", ROWS[:20])]
    train(given, "--max_steps", 2)
    before = snapshot("out")
    jsonl("held.jsonl", ROWS[20:50])
    assert refusal(given, "--resume", "--max_steps", 2).startswith("--resume: --eval_data held.jsonl: [")
    assert snapshot("out") == before


def test_resume_with_a_changed_collection(flags, refusal, beir):
    shutil.copytree(beir, "beir")
    judged = Path("beir/qrels/test.tsv").read_text().splitlines(keepends=True)
    Path("beir/qrels/test.tsv").write_text("".join(line for line in judged if not line.endswith("\t2\n")))
    given = [*flags, "--train_data", jsonl("x.jsonl"), "--eval_beir", "beir", "--eval_rows", 0, "--max_steps", 2]
    train(given)
    lines = Path("beir/queries.jsonl").read_text().splitlines(keepends=True)
    Path("beir/queries.jsonl").write_text("".join([lines[1], lines[0], *lines[2:]]))
    assert refusal(given, "--resume").startswith("--resume: --eval_beir beir: [")


def test_types_that_differ_in_later_files(flags, refusal):
    """Also in a column that is not asked for: the line names what rewrites the files."""
    Path("0.json").write_text(json.dumps([ROWS[0] | {"flag": 1}]))
    Path("1.json").write_text(json.dumps([ROWS[1] | {"flag": [True]}, ROWS[2] | {"flag": [1, 2]}]))
    message = refusal(flags, "--train_data", "?.json", "--streaming", "--batch_size", 2, "--eval_rows", 0)
    assert "bool" in message and message.endswith("; if rows differ, prepare_corpus.py rewrites them")


def damage(path):
    path = Path(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def model_file(checkpoint):
    """Return the path of a checkpoint's weights."""
    return Path(checkpoint, "model.safetensors")


def test_a_damaged_checkpoint_does_not_replace_an_intact_one(finished):
    """Step 3, saved after resuming from step 2, is kept although the damaged checkpoint is of step 4."""
    damage(model_file("out/checkpoints/step_00000004"))
    train(finished, "--resume", "--max_steps", 3, "--accept_changes", "--save_total_limit", 1)
    assert newest() == 3


@pytest.mark.parametrize("steps", [4, 5])
def test_what_is_beside_checkpoints(finished, capsys, steps):
    """An old checkpoint that was about to be removed, and one that was being written, are removed, also if the run had
    finished. What others put there is neither resumed from, nor removed, nor counted."""
    own, others = ["step_00000001", ".step_00000003.part"], ["step_00000004_keep", "step_9", "step_00000099.tar"]
    for name in (*own, *others[:2]):
        shutil.copytree("out/checkpoints/step_00000004", f"out/checkpoints/{name}")
    Path("out/checkpoints", others[2]).touch()
    Path("out/checkpoints/step_00000004/.DS_Store").touch()
    train(finished, "--resume", "--max_steps", steps, "--accept_changes")
    kept = ["step_00000002", "step_00000004"] if steps == 4 else ["step_00000004", "step_00000005"]
    assert checkpoints() == sorted([*kept, *others]) and "damaged" not in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--lora_rank", 2]])
def test_files_that_the_client_of_the_hub_rewrites(flags, bert, tmp_path, more):
    """`hf download` writes a time into .cache/ of the model's folder, before each start."""
    script = importlib.import_module("train_bi_encoder")
    record = tmp_path / "model/.cache/huggingface/download/config.json.metadata"
    shutil.copytree(bert, tmp_path / "model")
    record.parent.mkdir(parents=True)
    found = []
    for time in (1, 22):
        record.write_text(f"{time}")
        words = map(str, [*flags, "--train_data", jsonl("x.jsonl"), "--model_name_or_path", tmp_path / "model", *more])
        args = script.parse_args([*words])
        found.append(script.unchanging(args, script.load_model(args), SimpleNamespace(description={})))
    assert found[0] == found[1] and len(found[0]["files of --model_name_or_path"]) > 5


def test_resume_is_refused_if_no_checkpoint_is_intact(finished, refusal):
    """The run must not start anew and overwrite checkpoints that might be repaired."""
    for path in Path("out/checkpoints").iterdir():
        damage(model_file(path))
    before = snapshot("out")
    assert "checkpoints" in refusal(finished, "--resume")
    assert snapshot("out") == before


def test_base_model_that_has_changed(flags, refusal, static):
    """Its weights, tokenizer or configuration. Its card may."""
    folder = shutil.copytree(static, "base")
    run = [*flags, "--train_data", jsonl("x.jsonl"), "--eval_rows", 0, "--max_steps", 1]
    run += ["--model_name_or_path", folder, "--resume"]
    train(run)
    (Path(folder) / "README.md").write_text("another card")
    train(run)
    for name in ("model.safetensors", "tokenizer.json"):
        file = next(Path(folder).rglob(name))
        data = file.read_bytes()
        file.write_bytes(data[:-4] + b"abcd" if name == "model.safetensors" else data + b" ")
        assert refusal(run).startswith(f"--resume: {BASE}: ")
        file.write_bytes(data)
    train(run)


def test_a_checkpoint_of_another_user(finished, refusal, monkeypatch):
    """It cannot be read, and is not damaged: nobody is advised to remove it."""

    def refuse(folder):
        raise PermissionError(13, "Permission denied", f"{folder}/model.safetensors")

    monkeypatch.setattr(script, "checksums", refuse)
    message = refusal(finished, "--resume")
    assert message == "[Errno 13] Permission denied: 'out/checkpoints/step_00000004/model.safetensors'"


@pytest.mark.parametrize("function", ["open", "fsync"])
def test_file_systems_that_cannot_sync_a_folder(flags, monkeypatch, function):
    """Some network disks, and Windows. A file that cannot be synced is an error."""
    real = getattr(os, function)

    def refuse(target, *more):
        is_folder = os.path.isdir(f"/proc/self/fd/{target}" if isinstance(target, int) else target)
        if is_folder:
            raise OSError(22, "Invalid argument")
        return real(target, *more)

    monkeypatch.setattr(os, function, refuse)
    train(flags, "--train_data", jsonl("x.jsonl"), "--max_steps", 1)
    assert checkpoints() == ["step_00000001"] and Path("out/model").exists()


def test_accumulation_of_the_launch(flags, refusal, monkeypatch):
    """What is trained with is in args.yaml, and a resume without it is refused."""
    given = [*flags, "--train_data", jsonl("x.jsonl"), "--max_steps", 1, "--eval_rows", 0]
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
        train(given)
    saved = yaml.safe_load(Path("out/args.yaml").read_text())
    assert saved["gradient_accumulation_steps"] == 2 and saved["micro_batch_tokens"] is None
    assert refusal(given, "--resume").startswith("--resume: --gradient_accumulation_steps: 2 -> 1: ")


def test_a_tracker_without_a_login(flags, refusal, monkeypatch):
    def refuse(*_):
        raise RuntimeError("No API key configured.\nUse `wandb login` to log in")

    monkeypatch.setattr(script.Accelerator, "init_trackers", refuse)
    given = [*flags, "--train_data", jsonl("x.jsonl")]
    assert refusal(given).endswith(": No API key configured. Use `wandb login` to log in")
    assert not os.path.exists("out/args.yaml")  # it does not contain a run


def test_loss_that_turns_nan_keeps_the_last_good_checkpoint(flags, refusal, monkeypatch):
    """The loss of the third step is NaN."""
    real, calls = script.forward_backward, []

    def forward_backward(*given):
        calls.append(1)
        return real(*given) * (float("nan") if len(calls) == 3 else 1)

    monkeypatch.setattr(script, "forward_backward", forward_backward)
    message = refusal(flags, "--train_data", jsonl("x.jsonl"))
    assert message.startswith("step 3: loss nan, gradient norm ")
    assert newest() == 2 and not os.path.exists("out/model")


@pytest.mark.parametrize("reason", ["raise torch.OutOfMemoryError('CUDA out of memory.')", "torch.empty(2**50)"])
def test_out_of_memory_keeps_its_traceback_and_names_flags(flags, capsys, monkeypatch, reason):
    """Of a GPU or of the machine; also within user_errors, as where a library computes a loss."""
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda *_, **__: exec(reason))
    with pytest.raises(RuntimeError, match="memory") as error:
        train(flags, "--train_data", jsonl("x.jsonl"))
    capsys.readouterr()
    assert script.print_error(error.value) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and lines[-1].startswith("out of memory: lower --micro_batch_tokens")
    with pytest.raises(RuntimeError, match="memory"), script.user_errors("x.jsonl"):
        exec(reason)


def test_pickled_weights_of_a_reranker_are_refused(reranker, tmp_path):
    """By the library's line. Those of other models, in all scripts: tests/chaos/test_security.py."""
    import eval_incremental

    shutil.copytree(reranker, tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    torch.save(load_file(weights), tmp_path / "model/pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ValueError, match="no file named model.safetensors found") as error:
        eval_incremental.load_cross_encoder(str(tmp_path / "model"), eval_incremental.Args())
    assert "\n" not in str(error.value)
