"""Sources and outputs in an object store: a local server that speaks S3 (skipped without moto and s3fs)."""

import os
import shutil

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import launch, lines_of

import eval_incremental
import mine_negatives
import prepare_corpus
import train_bi_encoder as script

from forked import ROOT  # isort: skip

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
both_ways = pytest.mark.parametrize("way", ["mapped", "streamed"])


@pytest.fixture(scope="module")
def bucket(rows, tmp_path_factory):
    """(file system, folder) of rows in three Parquet files, in s3://bucket/pairs as well."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    given = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
             "AWS_DEFAULT_REGION": "us-east-1", "HF_HUB_OFFLINE": "0"}  # fmt: skip
    before = {name: os.environ.get(name) for name in given}
    os.environ |= given
    patch = pytest.MonkeyPatch()
    patch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # else no file system but the local one is read
    import s3fs

    fs = s3fs.S3FileSystem()
    fs.mkdir("bucket")
    folder = tmp_path_factory.mktemp("s3")
    for number in range(3):
        pq.write_table(pa.Table.from_pylist(rows[40 * number : 40 * number + 40]), folder / f"{number}.parquet")
        fs.put(str(folder / f"{number}.parquet"), f"bucket/pairs/{number}.parquet")
    yield fs, folder
    patch.undo()
    server.stop()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def options(**flags):
    """Return the Args of a run on docstrings and code."""
    required = {"train_data": ["x"], "model_name_or_path": "x"}
    return script.Args(**required, columns=["docstring", "code"], **flags)


@both_ways
@pytest.mark.parametrize("name", ["*.parquet", "1.parquet"])
def test_sources_in_a_bucket(bucket, name, way):
    """A glob or a file gives the rows, and the fingerprint, of the files on disk."""
    _, folder = bucket
    args = options(streaming=way == "streamed", max_steps=1, shuffle_buffer=16)
    remote, expected = (script.Source(f"{place}/{name}", 0, args) for place in ("s3://bucket/pairs", folder))
    assert remote.take(100).equals(expected.take(100))
    assert script.data_fingerprint(remote.files) == script.data_fingerprint(expected.files)


@both_ways
def test_a_run_on_a_bucket_is_resumed(bucket, static, way):
    """Its metrics are those of a run that was not stopped, and of one on the files on disk."""
    _, folder = bucket
    flags = ["--model_name_or_path", static, "--columns", "docstring", "code", "--batch_size", 8, "--max_steps", 20,
             "--save_steps", 10, "--logging_steps", 1, "--eval_rows", 8, "--shuffle_buffer", 16]  # fmt: skip
    flags += ["--streaming"] * (way == "streamed")
    for name, source in (("remote", "s3://bucket/pairs/*.parquet"), ("local", f"{folder}/*.parquet")):
        launch(ROOT / "train_bi_encoder.py", *flags, "--train_data", source, "--output_dir", name, cwd=os.getcwd())
    whole = lines_of("remote")
    for path in ("remote/model", "remote/checkpoints/step_00000020"):
        shutil.rmtree(path)
    flags += ["--train_data", "s3://bucket/pairs/*.parquet", "--output_dir", "remote", "--resume"]
    launch(ROOT / "train_bi_encoder.py", *flags, cwd=os.getcwd())
    assert whole == lines_of("remote") == lines_of("local") and len(whole) == 21


# ---- without a server


REFUSED = [
    (eval_incremental, "--beir x --bm25 --output_dir s3://bucket/run"),
    (eval_incremental, "--corpus x --model_name_or_path y --export_vectors s3://bucket/vectors"),
    (eval_incremental, "--annotate x --columns a b --cross_encoder y --output s3://bucket/x.jsonl"),
    (mine_negatives, "--beir x --run y --output s3://bucket/mined.jsonl"),
    (prepare_corpus, "x.csv --length_report --model_name_or_path y --output_dir s3://bucket/report"),
]


def test_a_run_is_written_locally():
    with pytest.raises(script.UserError, match="^--output_dir s3://bucket/run: must be a local folder$"):
        script.lock_output("s3://bucket/run")
    assert not os.listdir()


@pytest.mark.parametrize("module, words", REFUSED, ids=lambda value: str(value).split()[-1])
def test_outputs_that_must_be_local(module, words, capsys):
    """Else they would be written to a local folder called `s3:`, without a word."""
    with pytest.raises(SystemExit, match="2"):
        module.parse_args(words.split())
    line = capsys.readouterr().err.splitlines()[-1]
    assert words.split()[-2] in line and "must be" in line and "local" in line and not os.listdir()
