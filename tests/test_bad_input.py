"""Bad input gets one clear line, which names the file, row, column or flag; and nothing that was there is lost."""

import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
import zstandard
from conftest import ROOT, launch, metrics
from forked import last_of
from safetensors.torch import load_file, save_file

import train_bi_encoder as script

SCRIPT = ROOT / "train_bi_encoder.py"
ROWS = [{"a": f"anchor {i} of the corpus", "b": f"positive {i} of the corpus", "score": i / 60} for i in range(60)]


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch, tmp_path):
    """Runs write into out/; main leaves a SIGTERM handler behind, which later tests must not have."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def flags(bert):
    """Flags of a run of four steps, two passes over the 52 rows that are not held out; --train_data is missing."""
    return run_flags(bert)


def run_flags(model):
    return ["--model_name_or_path", model, "--columns", "a", "b", "--batch_size", 26, "--max_steps", 4,
            "--eval_rows", 8, "--save_every", 2, "--log_every", 1, "--data_cache", "cache",
            "--output_dir", "out"]  # fmt: skip


def jsonl(name, rows=ROWS):
    with open(name, "w") as file:
        file.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    return name


def train(*flags):
    script.main(script.parse_args(last_of(flags)))


@pytest.fixture
def refusal(capsys):
    """Function that runs the script and returns the one line it is refused with."""

    def run(*flags):
        try:
            train(*flags)
        except script.BadInput as error:
            message = str(error)
        except SystemExit as error:
            assert error.code == 2
            message = capsys.readouterr().err.splitlines()[-1].partition("error: ")[2]
        else:
            pytest.fail("accepted")
        assert message and "\n" not in message
        return message

    return run


def replaced(rows, number, **cells):
    """The rows with other cells in one of them."""
    return [{**row, **cells} if i == number else row for i, row in enumerate(rows)]


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def streamed(mapped_or_streamed):
    return ["--streaming"] if mapped_or_streamed == "streamed" else []


both_ways = pytest.mark.parametrize("way", ["mapped", "streamed"])


# ---------------------------------------------------------------------------------------------- as the shell sees it


def shell(flags, **options):
    command = [sys.executable, str(SCRIPT), *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def assert_one_error_line(result, *words):
    assert result.returncode not in (0, None)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line
    assert f'File "{SCRIPT}"' not in result.stderr  # a traceback of the script's; the launcher adds one of its own


def test_one_error_line_and_exit_code(flags):
    jsonl("x.jsonl", replaced(ROWS, 30, b=""))
    result = shell([*flags, "--train_data", "x.jsonl"])
    assert_one_error_line(result, "x.jsonl", "row 30", "'b'", "--on_bad_row skip")


def test_batch_smaller_than_the_process_count(flags):
    """On two processes: one line although both of them meet the error."""
    jsonl("x.jsonl")
    result = launch(SCRIPT, *flags, "--train_data", "x.jsonl", "--batch_size", 1, processes=2, check=False)
    assert_one_error_line(result, "--batch_size 1", "2 processes")


def checkpoints():
    return sorted(os.listdir("out/checkpoints"))


def test_full_disk_during_a_checkpoint(flags, tmp_path, say):
    """A tmpfs with room for one checkpoint and half of the next."""
    jsonl("x.jsonl")
    train(*flags, "--train_data", "x.jsonl", "--max_steps", 2)
    size = sum(map(len, snapshot(tmp_path / "out/checkpoints").values()))
    shutil.rmtree("out")
    os.mkdir("out")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(size * 1.5)}", "tmpfs", "out"])
    if mounted.returncode:
        pytest.skip("no right to mount a small file system")
    try:
        with pytest.raises(script.BadInput) as caught:
            train(*flags, "--train_data", "x.jsonl")
        assert "step_00000004" in str(caught.value) and "No space left" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert checkpoints() == ["step_00000002"]
        assert script.newest_checkpoint("out/checkpoints")[1]["step"] == 2
        subprocess.run(["mount", "-o", "remount,size=100m", "out"], check=True)
        train(*flags, "--train_data", "x.jsonl", "--resume")
        assert checkpoints() == ["step_00000002", "step_00000004"]
        say("a disk too full for the next checkpoint", 1, "one line; with room, resumed from the one before")
    finally:
        subprocess.run(["umount", "out"], check=True)


@pytest.mark.parametrize("what", ["checkpoint", "model"])
def test_files_that_cannot_grow(flags, monkeypatch, what):
    """RLIMIT_FSIZE stands for a full disk: no file may pass 40 kB from the second checkpoint, or the model, on."""
    jsonl("x.jsonl")
    real, calls = script.save_atomically, []

    def limited(folder, write):
        calls.append(str(folder))
        if len(calls) > (1 if what == "checkpoint" else 2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
        real(folder, write)

    monkeypatch.setattr(script, "save_atomically", limited)
    try:
        with pytest.raises(script.BadInput) as caught:
            train(*flags, "--train_data", "x.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert ("step_00000004" if what == "checkpoint" else "out/model") in str(caught.value)
    assert script.newest_checkpoint("out/checkpoints")[1]["step"] == (2 if what == "checkpoint" else 4)


# ------------------------------------------------------------------------------------------------------ the sources


@pytest.mark.parametrize("source", ["missing.parquet", "missing-*.jsonl", "folder", "./folder/x", "nothing_here"])
def test_source_that_matches_nothing(flags, refusal, source):
    os.mkdir("folder")
    assert source in refusal(*flags, "--train_data", source)
    assert not os.path.exists("out/args.yaml")


@pytest.mark.parametrize("source", ["nosuch://bucket/x.parquet", "s3://bucket/x.parquet"])
def test_url_of_an_unknown_or_uninstalled_file_system(flags, refusal, monkeypatch, source):
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    assert source.partition(":")[0] in refusal(*flags, "--train_data", source)


@pytest.mark.parametrize("name", ["x.xlsx", "x", "x.parquet.gz", "x.gz"])
def test_unknown_suffix(flags, refusal, name):
    open(name, "w").close()
    message = refusal(*flags, "--train_data", f"./{name}")
    assert name in message and "suffix" in message and ".parquet" in message


def test_folder_of_mixed_formats(flags, refusal):
    os.mkdir("folder")
    jsonl("folder/x.jsonl")
    pq.write_table(pa.Table.from_pylist(ROWS), "folder/x.parquet")
    assert "folder" in (message := refusal(*flags, "--train_data", "folder")) and "mixes formats" in message


@both_ways
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl.gz", "jsonl.zst"])
def test_truncated_file(flags, refusal, suffix, share, way):
    name, table = f"x.{suffix}", pa.Table.from_pylist(ROWS * 100)
    if suffix == "parquet":
        pq.write_table(table, name, row_group_size=500)
    elif suffix == "arrow":
        with pa.OSFile(name, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, 500)
    else:
        with (gzip.open if suffix.endswith("gz") else zstandard.open)(name, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in ROWS * 100)
    os.truncate(name, int(os.path.getsize(name) * share))
    # a stream meets the damage when it gets there: within the first window of shuffled rows
    message = refusal(*flags, "--train_data", name, *streamed(way))
    assert name in message


@both_ways
def test_corrupt_parquet(flags, refusal, way):
    pq.write_table(pa.Table.from_pylist(ROWS * 100), "x.parquet", use_dictionary=False)
    damaged = bytearray(Path("x.parquet").read_bytes())
    damaged[100:4000] = bytes(3900)
    with open("x.parquet", "wb") as file:
        file.write(damaged)
    assert "x.parquet" in refusal(*flags, "--train_data", "x.parquet", *streamed(way))


@both_ways
@pytest.mark.parametrize("line", ["{'a': 1}", '{"a": "x", "b": "y"', "[1, 2]", '"text"', "\x00\x00"])
def test_malformed_json_line(flags, refusal, line, way):
    jsonl("x.jsonl", [*ROWS[:41], line, *ROWS[41:]])
    message = refusal(*flags, "--train_data", "x.jsonl", *streamed(way))
    assert "x.jsonl" in message and "line 42" in message


@both_ways
def test_half_of_a_surrogate_pair(flags, refusal, way):
    """It is legal JSON, but no text."""
    jsonl("x.jsonl", replaced(ROWS, 41, a="half \ud800 a pair"))
    assert "x.jsonl" in refusal(*flags, "--train_data", "x.jsonl", *streamed(way))


@both_ways
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_bytes_that_are_not_utf8(flags, refusal, suffix, way):
    with open("x.jsonl", "wb") as file:
        file.writelines(json.dumps(row).encode().replace(b"anchor 41", b"anchor \xff") + b"\n" for row in ROWS)
    texts = pa.StringArray.from_buffers(60, *pa.array([b"\xff\xfe"] * 60).buffers()[1:])
    pq.write_table(pa.table({"a": texts, "b": [row["b"] for row in ROWS]}), "x.parquet")
    assert f"x.{suffix}" in refusal(*flags, "--train_data", f"x.{suffix}", *streamed(way))


@both_ways
@pytest.mark.parametrize("line", ['"anchor, unquoted", and a comma, positive', '"open quote, positive', "anchor only"])
def test_malformed_csv_line(flags, refusal, line, way):
    """A comma too many would shift the columns, so a row with more cells than the header is no row."""
    with open("x.csv", "w") as file:
        file.writelines(f"{text}\n" for text in ["a,b", *(f"{row['a']},{row['b']}" for row in ROWS), line])
    message = refusal(*flags, "--train_data", "x.csv", *streamed(way), "--shuffle_buffer", 100)
    assert "x.csv" in message


def test_csv_whose_first_row_has_a_cell_too_many(flags, refusal):
    with open("x.csv", "w") as file:
        file.writelines(["a,b\n", *["an anchor,a positive,and more\n"] * 60])
    assert "x.csv" in refusal("--train_data", "x.csv", "--output_dir", "out", "--data_cache", "cache")


@both_ways
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "txt"])
def test_file_without_rows(flags, refusal, suffix, way):
    name = f"x.{suffix}"
    open(name, "w").close()
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS[:0], pa.schema({"a": pa.string(), "b": pa.string()})), name)
    assert name in refusal(*flags, "--train_data", name, *streamed(way))
    if way == "mapped":  # a stream beside others cannot tell, until its turn
        assert name in refusal(*flags, "--train_data", jsonl("y.jsonl"), name)


# ------------------------------------------------------------------------------------------------- columns and rows


@both_ways
def test_missing_column(flags, refusal, way):
    message = refusal(*flags, "--train_data", jsonl("x.jsonl"), "--columns", "a", "c", *streamed(way))
    assert "x.jsonl" in message and "'c'" in message and "a, b, score" in message
    message = refusal(*flags, "--train_data", "x.jsonl", "--label_column", "stars", *streamed(way))
    assert "x.jsonl" in message and "'stars'" in message and "a, b, score" in message


@both_ways
def test_sources_whose_columns_differ(flags, refusal, way):
    other = jsonl("y.jsonl", [{"a": "an anchor", "c": "a positive"}])
    message = refusal(*flags, "--train_data", jsonl("x.jsonl"), other, *streamed(way))
    assert "y.jsonl" in message and "'b'" in message and "a, c" in message


@both_ways
def test_shards_whose_columns_differ(flags, refusal, way):
    """Within one source, and not in its first file: said before the first step, not when the file's turn comes."""
    for number in range(3):
        pq.write_table(pa.Table.from_pylist(ROWS if number < 2 else [{"a": "x", "c": "y"}]), f"{number}.parquet")
    message = refusal(*flags, "--train_data", "*.parquet", *streamed(way))
    assert "2.parquet" in message and "'b'" in message and "a, c" in message
    assert not os.path.exists("out/args.yaml")


@pytest.mark.parametrize("row", [{"a": "text"}, {"score": 1.0}, {}])
def test_too_few_columns(refusal, row):
    jsonl("x.jsonl", [row] * 60)
    message = refusal("--train_data", "x.jsonl", "--label_column", "score", "--output_dir", "out")
    assert "column" in message


@both_ways
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("text", [None, "", "  \n"])
def test_null_or_empty_text(flags, refusal, suffix, text, way):
    rows = replaced(ROWS, 33, b=text)
    jsonl("x.jsonl", rows) if suffix == "jsonl" else pq.write_table(pa.Table.from_pylist(rows), "x.parquet")
    message = refusal(*flags, "--train_data", f"x.{suffix}", *streamed(way), "--shuffle_buffer", 100)
    assert f"x.{suffix}, row 33:" in message and "'b'" in message and "--on_bad_row" in message


@both_ways
@pytest.mark.parametrize("text", [5, ["one", "two"], {"x": "y"}, True])
def test_cell_that_is_no_text(flags, refusal, text, way):
    """Whatever the format: a list of negatives must not be trained on as the letters of its JSON."""
    rows = [{"a": row["a"], "b": text} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), "x.parquet")
    jsonl("x.jsonl", rows)
    for name in ("x.parquet", "x.jsonl"):
        message = refusal(*flags, "--train_data", name, *streamed(way))
        assert name in message and "row" in message and "'b'" in message


@pytest.mark.parametrize(
    "label", [None, "high", float("nan"), [0.5, None], {"x": 1}, pytest.param(10**400, id="huge")]
)
def test_label_that_is_not_a_finite_number(flags, refusal, label):
    jsonl("x.jsonl", replaced(ROWS, 33, score=label))
    loss = ["--label_column", "score", "--loss", "CoSENTLoss", "--shuffle_buffer", 100]
    message = refusal(*flags, "--train_data", "x.jsonl", *loss)
    assert "x.jsonl, row 33:" in message and "label" in message


@pytest.mark.parametrize("labels", [[0.5, [0.5]], [[0.5], [0.5, 1.0]]])
def test_labels_of_different_lengths(flags, refusal, labels):
    jsonl("x.jsonl", [{**row, "score": labels[i % 2]} for i, row in enumerate(ROWS)])
    loss = ["--label_column", "score", "--loss", "MarginMSELoss", "--eval_rows", 0]
    assert "x.jsonl" in refusal(*flags, "--train_data", "x.jsonl", *loss)


@both_ways
def test_bad_rows_are_skipped_and_counted(flags, capsys, way):
    """52 rows are left beside the eight held out; one pass over them is 52 rows with 3 bad ones among them."""
    rows = replaced(replaced(replaced(ROWS, 20, a=None), 33, b=""), 50, score="high")
    jsonl("x.jsonl", rows)
    train(*flags, "--train_data", "x.jsonl", *streamed(way), "--on_bad_row", "skip", "--label_column", "score",
          "--batch_size", 49, "--max_steps", 1)  # fmt: skip
    assert "3 bad rows skipped" in capsys.readouterr().out


def test_bad_rows_among_the_held_out_ones_are_counted(flags, capsys):
    train(*flags, "--train_data", jsonl("x.jsonl", replaced(ROWS, 2, a="")), "--on_bad_row", "skip")
    assert "1 bad rows skipped" in capsys.readouterr().out


def test_nothing_but_bad_rows(flags, refusal):
    rows = [{**row, "b": ""} for row in ROWS]
    assert "x.jsonl" in refusal(*flags, "--train_data", jsonl("x.jsonl", rows), "--on_bad_row", "skip")


@pytest.mark.parametrize("model", ["transformer", "static"])
def test_long_row_is_cut_and_trains(flags, model):
    """Of 20,000 words, with micro-batches of 16 tokens."""
    jsonl("x.jsonl", replaced(ROWS, 33, b="word " * 20_000))
    given = [*flags, "--train_data", "x.jsonl", "--micro_batch_tokens", 16, "--max_length", 64]
    train(*(given if model == "transformer" else given[2:]), "--max_steps", 2)
    assert os.path.exists("out/model/model.safetensors") or os.path.exists("out/model/0_StaticEmbedding")


# ------------------------------------------------------------------------------------------------------------ flags


@pytest.mark.parametrize("weights", [["1"], ["1", "2", "3"], ["1", "-1"], ["1", "0"], ["1", "nan"], ["1", "inf"]])
def test_mixing_weights_of_the_wrong_count_or_sign(flags, refusal, weights):
    jsonl("x.jsonl"), jsonl("y.jsonl")
    message = refusal(*flags, "--train_data", "x.jsonl", "y.jsonl", "--mixing_weights", *weights)
    assert "--mixing_weights" in message and "2 sources" in message


@both_ways
@pytest.mark.parametrize("count", [60, 1000])
def test_eval_rows_of_the_whole_corpus(flags, refusal, count, way):
    message = refusal(*flags, "--train_data", jsonl("x.jsonl"), "--eval_rows", count, *streamed(way))
    assert "x.jsonl" in message and "--eval_rows" in message


def test_stream_without_a_length(flags, refusal):
    message = refusal(*flags, "--train_data", jsonl("x.jsonl"), "--streaming", "--max_steps", 0)
    assert "--max_steps" in message and "--rows_per_epoch" in message


WRONG_FLAGS = """\
--batch_size 0
--batch_size -1
--max_length 0
--learning_rate 0
--learning_rate -1
--learning_rate nan
--weight_decay -1
--warmup_ratio -0.1
--warmup_ratio 1.5
--num_epochs inf
--num_epochs nan
--num_epochs 0
--eval_rows -1
--keep_checkpoints 0
--loss_args {
--loss_args [1]
--loss_args {"temperature":0}
--loss_args {"temperature":"warm"}
--loss_args {"tau":1}
--loss NoSuchLoss
--loss CoSENTLoss
--loss TripletLoss
--matryoshka_dims 1000
--matryoshka_dims 0
--report_to nosuchtracker
--model_name_or_path ./missing
--max_length 2000
--mix_by column
--train_dta x.jsonl"""


@pytest.mark.parametrize("wrong", WRONG_FLAGS.splitlines())
def test_wrong_flag(flags, refusal, wrong):
    """A value no run can mean is neither replaced by the default in silence, nor a traceback."""
    jsonl("x.jsonl", replaced(ROWS, 5, a="word " * 3000))
    passes = ["--max_steps", 0] if "epochs" in wrong else []
    message = refusal(*flags, *passes, "--train_data", "x.jsonl", *wrong.split(" "))
    assert wrong.split()[0] in message or (wrong.startswith("--loss") and "loss" in message)
    assert not os.path.exists("out/model")


def test_pooling_of_a_model_that_has_none(flags, refusal):
    jsonl("x.jsonl")
    assert "--pooling" in refusal(*flags[2:], "--train_data", "x.jsonl", "--pooling", "cls")


def test_damaged_weights_of_the_model(flags, refusal, bert, tmp_path):
    shutil.copytree(bert, tmp_path / "damaged")
    weights = tmp_path / "damaged/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    jsonl("x.jsonl")
    message = refusal(*flags, "--train_data", "x.jsonl", "--model_name_or_path", tmp_path / "damaged")
    assert f"--model_name_or_path {tmp_path / 'damaged'}: " in message


def test_one_labelled_row_to_evaluate_on(flags, refusal):
    """There is no correlation of one pair; the run either says so or does without, but does not fail halfway."""
    label = ["--label_column", "score", "--loss", "CoSENTLoss", "--eval_rows", 1]
    try:
        train(*flags, "--train_data", jsonl("x.jsonl"), *label)
    except script.BadInput as error:
        assert "--eval_rows" in str(error)


@pytest.mark.parametrize("text", ["nosuchflag: 1", "mix_by: column", "on_bad_row: ignore", "seed: 2.5", "- a: b",
                                  "seed: many", "{", "train_data: x.jsonl"])  # fmt: skip
def test_settings_file(flags, refusal, text):
    """A value is checked like that of a flag. One source is one source, whether in a list or not."""
    jsonl("x.jsonl")
    with open("args.yaml", "w") as file:
        file.write(text + "\n")
    if "x.jsonl" in text:
        return train("args.yaml", *flags)
    message = refusal("args.yaml", *flags, "--train_data", "x.jsonl")
    assert text.partition(":")[0] in message or "args.yaml" in message


def test_no_demo_corpus(refusal):
    assert "python prepare_corpus.py" in refusal()


def test_a_flag_given_twice(bert, capsys):
    """Refused in one line by every script, whichever way it is spelled; a file of flags may be overridden."""
    import eval_incremental
    import prepare_corpus
    import train_cross_encoder

    Path("flags.yaml").write_text(f"model_name_or_path: {bert}\ntrain_data: [x.jsonl]\nseed: 1\n")
    cases = {
        script.parse_args: "--train_data x.jsonl --seed 1 --train-data=y.jsonl",
        train_cross_encoder.parse_args: "flags.yaml --train_data x.jsonl --train_data y.jsonl",
        eval_incremental.parse_args: "--beir a --split test --beir b",
        prepare_corpus.main: "x.jsonl --output_dir a --columns b --output_dir c",
    }
    for parse, words in cases.items():
        with pytest.raises(SystemExit, match="2"):
            parse(words.split())
        line = capsys.readouterr().err.splitlines()[-1]
        name = "--output_dir" if parse is prepare_corpus.main else "--beir" if "beir" in words else "--train_data"
        assert f"error: {name}: given twice" in line
    for trainer in (script, train_cross_encoder):
        assert trainer.parse_args(["flags.yaml", "--seed", "2"]).seed == 2


# ------------------------------------------------------------------------------------------------ runs already there


@pytest.fixture(scope="module")
def run_once(bert, tmp_path_factory):
    """Folder of a finished run, with checkpoints of steps 2 and 4."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("run"))
        torch.set_num_threads(1)
        train(*run_flags(bert), "--train_data", jsonl("x.jsonl"))
        assert checkpoints() == ["step_00000002", "step_00000004"]
        shutil.copytree("out", "as_finished")
    return folder


@pytest.fixture
def finished(run_once, flags, monkeypatch):
    """Flags of a run that stands in out/ as it finished."""
    monkeypatch.chdir(run_once)
    shutil.rmtree("out")
    shutil.rmtree("again", ignore_errors=True)
    shutil.copytree("as_finished", "out")
    return [*flags, "--train_data", "x.jsonl"]


def test_output_dir_that_holds_a_run(finished, refusal):
    before = snapshot("out")
    message = refusal(*finished)
    assert "--output_dir out" in message and "--resume" in message
    assert snapshot("out") == before


def test_output_dir_that_is_a_file(flags, refusal):
    open("out", "w").close()
    assert "--output_dir out" in refusal(*flags, "--train_data", jsonl("x.jsonl"))


CHANGED = ["--seed 1", "--batch_size 9", "--columns b a", "--max_length 64", "--eval_rows 7", "--shuffle_buffer 5",
     "--loss_args {\"symmetric\":true}", "--pooling cls", "--length_window 2", "--streaming", "--prompts query:",
     "--gradient_accumulation_steps 2", "--matryoshka_dims 8", "--dropout 0.2", "--train_data y.jsonl"]  # fmt: skip


@pytest.mark.parametrize("changed", CHANGED)
def test_resume_with_changed_flags(finished, refusal, changed):
    jsonl("y.jsonl")
    before = snapshot("out")
    message = refusal(*finished, "--resume", *changed.split(" "))
    assert "--resume" in message and f"{changed.split()[0]} was" in message
    assert snapshot("out") == before


def test_resume_with_a_changed_model(finished, refusal):
    shutil.copytree(finished[1], "other")
    before = snapshot("out")
    assert "--model_name_or_path was" in refusal(*finished, "--resume", "--model_name_or_path", "other")
    assert snapshot("out") == before


@both_ways
def test_resume_on_mended_data(flags, refusal, tmp_path, way):
    """Refused, naming the flag that accepts it; accepted, it trains what a run on the mended data trains."""
    flags = [*flags, "--shuffle_buffer", 0, *streamed(way)]
    bad, mended = replaced(ROWS, 50, b=""), replaced(ROWS, 50, b="a mended text")
    train(*flags, "--train_data", jsonl("x.jsonl", mended), "--output_dir", "whole")
    with pytest.raises(script.BadInput, match="row 50: .* mend the row"):
        train(*flags, "--train_data", jsonl("x.jsonl", bad))
    assert checkpoints() == ["step_00000001"]
    jsonl("x.jsonl", mended)
    message = refusal(*flags, "--train_data", "x.jsonl", "--resume")
    assert "the data of x.jsonl is not what it was" in message and "--accept_changed_data" in message
    train(*flags, "--train_data", "x.jsonl", "--resume", "--accept_changed_data")
    assert [line.get("loss") for line in metrics("out")] == [line.get("loss") for line in metrics("whole")]


@both_ways
@pytest.mark.parametrize("change", ["rows added", "rows removed", "rows replaced"])
def test_resume_with_changed_data(flags, refusal, tmp_path, change, way):
    flags = [*flags, "--train_data", jsonl("x.jsonl"), *streamed(way)]
    train(*flags, "--max_steps", 2)
    before = snapshot(tmp_path / "out")
    others = [{"a": f"other {i}", "b": f"text {i}"} for i in range(60)]
    jsonl("x.jsonl", {"rows added": ROWS + others, "rows removed": ROWS[:40], "rows replaced": others}[change])
    assert "x.jsonl" in refusal(*flags, "--resume")
    assert snapshot(tmp_path / "out") == before


def damage(path):
    path = Path(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["flipped", "truncated", "missing", "checksums emptied"])
def test_damaged_checkpoint_is_named_and_passed_over(finished, capfd, file, how):
    newest = Path("out/checkpoints/step_00000004")
    if how == "missing":
        (newest / file).unlink()
    else:
        os.truncate(newest / file, 10) if how == "truncated" else damage(newest / file)
    if how == "checksums emptied":
        os.truncate(newest / "SHA256SUMS", 0)
    _, state = script.newest_checkpoint("out/checkpoints")
    assert state["step"] == 2
    assert "step_00000004: passed over" in capfd.readouterr().err


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_checkpoint_does_not_push_out_whole_ones(finished, keep):
    """The damaged one has the highest number; the step between is what a run killed after it must find."""
    damage("out/checkpoints/step_00000004/model.safetensors")
    train(*finished, "--resume", "--max_steps", 3, "--keep_checkpoints", keep)
    assert script.newest_checkpoint("out/checkpoints")[1]["step"] == 3


def test_resumed_past_a_damaged_checkpoint_it_reaches_the_same_weights(finished):
    whole = Path("out/model/model.safetensors").read_bytes()
    damage("out/checkpoints/step_00000004/model.safetensors")
    train(*finished, "--resume")
    assert Path("out/model/model.safetensors").read_bytes() == whole
    assert script.newest_checkpoint("out/checkpoints")[1]["step"] == 4


def test_columns_nobody_wants_may_be_large(tmp_path, monkeypatch):
    """As images are: the limit is of texts that are kept, not of what one look at the columns costs."""
    monkeypatch.setattr(script, "MOST_TEXT", 2**15)
    rows = [{"a": "x", "b": "y", "image": {"bytes": os.urandom(1000)}} for _ in range(100)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert next(script.read_batches(str(tmp_path / "x.parquet")))[1].schema.names == ["a", "b", "image"]
    assert sum(len(batch) for _, batch in script.read_batches(str(tmp_path / "x.parquet"), ["a", "b"])) == 100


def test_a_label_of_brackets_without_end():
    args = script.parse_args(["--train_data", "x", "--columns", "a", "b", "--label_column", "label"])
    with pytest.raises(script.BadInput, match=r"^f, row 7: the label '\[{40}' is not a number; [^\n]{,80}$"):
        script.checked((["x", "y"], "[" * 100_000, "f", 7), args)


def test_a_loss_is_tried_on_few_rows():
    """On a whole batch, a loss that compares all rows would take gigabytes before the first step."""
    seen = []
    model, args = SimpleNamespace(get_embedding_dimension=lambda: 8), SimpleNamespace(matryoshka_dims=[], loss="x")
    batch = script.Batch([], {}, torch.zeros(2, 3000, dtype=torch.long), torch.zeros(3000), None)
    script.try_loss(lambda columns, ids, labels: seen.extend([*columns, *ids, labels]), batch, model, args)
    assert [len(tensor) for tensor in seen] == [64] * 5


def test_what_a_killed_run_left_is_removed(finished):
    """Killed between its last checkpoint and the removal of the oldest, or while it wrote one."""
    before = sorted(Path("out/checkpoints").iterdir())
    for name in ("step_00000001", ".step_00000003.part"):
        shutil.copytree(before[-1], Path("out/checkpoints") / name)
    train(*finished, "--resume")
    assert sorted(Path("out/checkpoints").iterdir()) == before and len(before) == 2
    (before[-1] / "state.json").rename("state.json")  # damaged, and no step is trained: it may yet be mended
    train(*finished, "--resume", "--max_steps", 2)
    assert sorted(Path("out/checkpoints").iterdir()) == before


def test_only_damaged_checkpoints_lose_nothing(finished, refusal):
    """With nothing whole to go on from, --resume must not begin again over what may yet be mended."""
    for path in Path("out/checkpoints").iterdir():
        damage(path / "model.safetensors")
    before = snapshot("out")
    assert "checkpoints" in refusal(*finished, "--resume")
    assert snapshot("out") == before


def test_model_from_scratch_is_that_of_this_run(flags, refusal):
    """A first try that failed leaves no tokenizer behind for a second one with other data."""
    scratch = flags[2:]
    refusal(*scratch, "--train_data", jsonl("x.jsonl"), "--loss", "NoSuchLoss")
    other = jsonl("y.jsonl", [{"a": f"zebra giraffe {i}", "b": f"crocodile hippopotamus {i}"} for i in range(60)])
    train(*scratch, "--train_data", other)
    from sentence_transformers import SentenceTransformer

    assert "zebra" in SentenceTransformer("out/model", device="cpu").tokenizer.get_vocab()


# --------------------------------------------------------------------------------------------------------------- NaN


def assert_names_the_batch(message):
    assert "nan" in message and "x.jsonl" in message and "broken_batch.json" in message
    with open("out/broken_batch.json") as file:
        rows = json.load(file)
    assert len(rows) == 26
    assert all(row["file"].endswith("x.jsonl") and row["texts"][0] == ROWS[row["row"]]["a"] for row in rows)


def test_loss_that_turns_nan_keeps_the_last_good_checkpoint(flags, refusal, monkeypatch):
    """The loss of the third step is NaN; the first call tries the loss out."""
    real, calls = script.infonce, []

    def infonce(columns, ids, similarity):
        calls.append(1)
        return real(columns, ids, similarity=similarity) * (float("nan") if len(calls) == 4 else 1)

    monkeypatch.setattr(script, "infonce", infonce)
    message = refusal(*flags, "--train_data", jsonl("x.jsonl"))
    assert_names_the_batch(message)
    assert "step 3" in message
    assert script.newest_checkpoint("out/checkpoints")[1]["step"] == 2
    assert not os.path.exists("out/model")


def test_weights_that_overflow_never_reach_a_checkpoint(flags, refusal):
    """A learning rate of 1e38 leaves a finite loss and weights that are infinite a step later."""
    rate = ["--learning_rate", 1e38, "--weight_decay", 1e3, "--warmup_ratio", 0, "--save_every", 1]
    message = refusal(*flags, "--train_data", jsonl("x.jsonl"), *rate, "--max_steps", 20)
    assert "--learning_rate" in message
    checkpoint, _ = script.newest_checkpoint("out/checkpoints")
    if checkpoint:
        assert all(torch.isfinite(tensor).all() for tensor in load_file(checkpoint / "model.safetensors").values())


def test_model_with_a_nan_weight(flags, refusal, tmp_path, capsys):
    """It is refused at the first step at the latest, and its evaluation before is not a perfect score."""
    shutil.copytree(flags[1], tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    weights["embeddings.LayerNorm.weight"][0] = float("nan")
    save_file(weights, tmp_path / "model/model.safetensors", {"format": "pt"})
    message = refusal(*flags, "--train_data", jsonl("x.jsonl"), "--model_name_or_path", "model")
    assert "nan" in message
    assert "MRR@10 1.0000" not in capsys.readouterr().out
    assert not os.path.exists("out/model")


def test_settings_of_a_run_run_again(finished):
    """args.yaml is all that a run needs."""
    whole = Path("out/model/model.safetensors").read_bytes()
    given = yaml.safe_load(Path("out/args.yaml").read_text())
    assert given["train_data"] == ["x.jsonl"]
    train("out/args.yaml", "--output_dir", "again")
    assert Path("again/model/model.safetensors").read_bytes() == whole
