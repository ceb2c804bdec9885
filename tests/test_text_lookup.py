"""Rows of ids: their texts come from tables on disk, and nothing else changes."""

import datetime
import gzip
import json
import os
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, launch, metrics, write_jsonl
from forked import Forked, last_of

import train_bi_encoder
import train_cross_encoder


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch, tmp_path):
    """main leaves a SIGTERM handler behind, which later tests must not have."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def table(path, **more):
    """An IdTable of one file, its copies and index in the folder `cache`."""
    columns = more.pop("columns", [])
    return train_bi_encoder.IdTable("--corpus_table", [str(path)], columns, ["_id", "title", "text"], "cache")


def write(path, records):
    """Records as the suffix says."""
    if path.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=7)
    elif path.endswith(".tsv.gz"):
        with gzip.open(path, "wt") as file:
            print(*records[0], sep="\t", file=file)
            for record in records:
                print(*(f'"{cell}"' for cell in record.values()), sep="\t", file=file)
    else:
        write_jsonl(Path(path), records)
    return path


@pytest.fixture(scope="module")
def short(rows):
    """100 rows whose texts are one line each, cut short."""
    return [{name: " ".join(text.split())[:120].replace('"', "'") for name, text in row.items()} for row in rows[:100]]


def flags(bert, *more):
    return ["--model_name_or_path", bert, "--eval_rows", 20, "--batch_size", 16, "--max_steps", 6, "--log_every", 1,
            "--save_every", 3, "--micro_batch_tokens", 600, "--data_cache", "cache", *more]  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".tsv.gz"])
@pytest.mark.parametrize("script", [train_bi_encoder, train_cross_encoder])
def test_ids_train_as_their_texts_do(short, bert, tmp_path, script, suffix):
    """The same losses and weights to the last bit; in the cross-encoder documents are lists of ids."""
    documents = [
        {"_id": i + 7, "title": short[i]["docstring"][:9], "text": row["code"]} for i, row in enumerate(short)
    ]
    queries = [{"_id": f"q{i}", "text": row["docstring"]} for i, row in enumerate(short)]
    joined = [f"{d['title']} {d['text']}".strip() for d in documents]
    texts, ids = [], []
    for i in range(100):
        others = [(i + 1) % 100, (i + 5) % 100]
        texts.append({"query": short[i]["docstring"].strip(), "a": joined[i], "b": joined[others[0]]})
        ids.append({"query": f"q{i}", "a": i + 7, "b": others[0] + 7})
        if script is train_cross_encoder:
            texts[-1] = {"query": texts[-1]["query"], "documents": [texts[-1]["a"], joined[others[1]]]}
            ids[-1] = {"query": f"q{i}", "documents": [str(i + 7), str(others[1] + 7)]}
    tables = [
        "--corpus_table",
        write(f"corpus{suffix}", documents),
        "--queries_table",
        write("queries.jsonl", queries),
    ]
    for kind, rows, more in (("texts", texts, []), ("ids", ids, tables)):
        run = flags(bert, *more, "--train_data", write(f"{kind}.jsonl", rows), "--output_dir", tmp_path / kind)
        script.main(script.parse_args(last_of(run)))
    assert [line.get("loss") for line in metrics("ids")] == [line.get("loss") for line in metrics("texts")]
    weights = [Path(f"{kind}/model/model.safetensors").read_bytes() for kind in ("ids", "texts")]
    assert weights[0] == weights[1]
    assert "corpus" in Path("ids/model/README.md").read_text()


def test_two_processes_and_a_changed_table(short, bert, tmp_path):
    corpus = write("corpus.jsonl", [{"_id": str(i), "text": row["code"]} for i, row in enumerate(short)])
    data = write("rows.jsonl", [{"q": row["docstring"], "d": str(i)} for i, row in enumerate(short)])
    run = flags(bert, "--corpus_table", corpus, "--train_data", data, "--output_dir", tmp_path / "out")
    launch(ROOT / "train_bi_encoder.py", *run, cwd=tmp_path, processes=2)
    losses = [line.get("loss") for line in metrics("out")]
    run[run.index("--output_dir") + 1] = tmp_path / "one"
    launch(ROOT / "train_bi_encoder.py", *run, cwd=tmp_path)
    assert [line.get("loss") for line in metrics("one")][1] == pytest.approx(losses[1], rel=0.05)
    write("corpus.jsonl", [{"_id": str(i), "text": row["code"] + " changed"} for i, row in enumerate(short)])
    again = launch(ROOT / "train_bi_encoder.py", *run, "--resume", cwd=tmp_path, check=False)
    assert again.returncode == 1 and "the data of --corpus_table is not what it was" in again.stderr


def test_texts_by_id(tmp_path):
    write_jsonl(tmp_path / "c.jsonl", [{"_id": "a", "title": "T", "text": "x" * 9000}, {"_id": 2, "text": "ü\n2"}])
    with open("c.jsonl", "a") as file:
        file.write('\n{"_id": "last", "title": null, "text": "no line end"}')
    assert table("c.jsonl").texts(["2", "a", "last", "nobody"]) == {
        "a": "T " + "x" * 9000,
        "2": "ü\n2",
        "last": "no line end",
    }
    assert table("c.jsonl", columns=["_id", "title"]).texts(["a"]) == {"a": "T"}
    assert table("c.jsonl").rows == 3
    Path("bom.jsonl").write_bytes(b"\xef\xbb\xbf" + Path("c.jsonl").read_bytes().replace(b"\n", b"\r\n"))
    assert table("bom.jsonl").texts(["2", "a"]) == {"a": "T " + "x" * 9000, "2": "ü\n2"}
    before = table("c.jsonl")
    write_jsonl(tmp_path / "c.jsonl", [{"_id": "b", "text": "another"}])
    assert table("c.jsonl").texts(["b", "a"]) == {"b": "another"}  # the index is made again
    with pytest.raises(train_bi_encoder.BadInput, match="c.jsonl: changed while it was read"):
        before.texts(["a"])


def test_what_a_table_may_hold(tmp_path, monkeypatch):
    """Titles in some files only, numbers as titles, dates, a text that is none, an odd folder, a damaged index."""
    write_jsonl(tmp_path / "a.jsonl", [{"_id": "1", "text": "one"}])
    write_jsonl(
        tmp_path / "b.jsonl", [{"_id": "2", "title": 20, "text": "two"}, {"_id": "3", "title": ["x"], "text": "y"}]
    )
    write_jsonl(
        tmp_path / "c.jsonl",
        [{"_id": f"4{i}", "text": "four"} for i in range(1100)] + [{"_id": "5", "text": "a \ud83d b"}],
    )
    late = [
        {"_id": "1", "text": "one"},
        {"_id": "2", "title": "T", "text": "two"},
    ]  # the first row lacks what others have
    write("late.jsonl", late)
    Path("late.jsonl.gz").write_bytes(gzip.compress(Path("late.jsonl").read_bytes()))
    for name in ("late.jsonl", "late.jsonl.gz"):
        assert table(name).texts(["1", "2"]) == {"1": "one", "2": "T two"}
    found = table("[abc].jsonl")
    assert found.texts(["1", "2", "40"]) == {"1": "one", "2": "20 two", "40": "four"}
    for name, said in (("3", "b.jsonl: id '3': not text"), ("5", "c.jsonl: id '5': not text")):
        with pytest.raises(train_bi_encoder.BadInput, match=said):
            found.texts([name])
    write("d.parquet", [{"_id": "1", "text": datetime.date(2020, 1, 1)}])
    with pytest.raises(
        train_bi_encoder.BadInput, match="d.parquet: .* ids and texts are wanted in _id, text; convert it"
    ):
        table("d.parquet")
    odd = train_bi_encoder.IdTable("--corpus_table", ["a.jsonl"], [], ["_id", "text"], "a folder #1?%41")
    assert odd.texts(["1"]) == {"1": "one"}
    for path in Path("a folder #1?%41").glob("*.ids"):
        path.write_bytes(b"")
    with pytest.raises(train_bi_encoder.BadInput, match="remove .*[.]ids, it is damaged"):
        train_bi_encoder.IdTable("--corpus_table", ["a.jsonl"], [], ["_id", "text"], "a folder #1?%41")


def test_lists_of_whole_numbers_and_null_ids(short, tmp_path):
    corpus = write("corpus.jsonl", [{"_id": i, "text": row["code"]} for i, row in enumerate(short)])
    data = write("rows.jsonl", [{"q": "a query", "ds": [3, 4]}, {"q": "another", "ds": [5, None]}])
    args = train_cross_encoder.parse_args(["--train_data", data, "--corpus_table", corpus, "--data_cache", "cache",
                                           "--columns", "q", "ds"])  # fmt: skip
    check = train_cross_encoder.with_texts(train_cross_encoder.open_tables(args), train_cross_encoder.checked_group)
    ((_, batch),) = train_cross_encoder.read_batches(data, ["q", "ds"], ids=True)
    first, second = train_cross_encoder.rows_of(batch, data, 0, args)
    assert check(first, args)[0] == ["a query", short[3]["code"].strip(), short[4]["code"].strip()]
    with pytest.raises(train_cross_encoder.BadInput, match="rows.jsonl, row 1: an id is missing; mend the row"):
        check(second, args)


def test_an_older_checkpoint_lacks_the_newer_flags():
    args = train_bi_encoder.parse_args(["--train_data", "x", "--model_name_or_path", "x"])
    then = {name: value for name, value in vars(args).items() if "table" not in name and not name.endswith("_columns")}
    train_bi_encoder.check_resumed({"args": then, "data": []}, args, [])
    args.corpus_table = ["y"]
    with pytest.raises(train_bi_encoder.BadInput, match="--corpus_table was "):
        train_bi_encoder.check_resumed({"args": then, "data": []}, args, [])


@pytest.mark.parametrize("script", [train_bi_encoder, train_cross_encoder])
def test_columns_without_their_table(script, capsys):
    for flags, said in (
        (["--corpus_columns", "a", "b"], "--corpus_columns: belongs to --corpus_table; name it too"),
        (
            ["--queries_table", "x", "--query_columns", "a"],
            "--query_columns: name the id column, then the text columns",
        ),
    ):
        with pytest.raises(SystemExit):
            script.parse_args(["--train_data", "x", *flags])
        assert said in capsys.readouterr().err


def test_a_killed_builder_leaves_nothing_that_is_taken_for_whole(tmp_path):
    write_jsonl(tmp_path / "c.jsonl", [{"_id": str(i), "text": f"text {i}"} for i in range(200_000)])
    driver = tmp_path / "driver.py"
    driver.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train_bi_encoder as s\n"
        "s.IdTable('--corpus_table', ['c.jsonl'], [], ['_id', 'title', 'text'], 'cache')"
    )
    process = Forked(driver, [], cwd=tmp_path)
    while process.poll() is None and not list(Path("cache").glob("*.part")):
        time.sleep(0.001)
    time.sleep(0.1)
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not list(Path("cache").glob("*.ids"))
    # two at once: one builds, one waits for it
    both = [Forked(driver, [], cwd=tmp_path) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    (path,) = Path("cache").glob("*.ids")
    assert not list(Path("cache").glob("*.part"))
    assert table("c.jsonl").texts(["0", "199999"]) == {"0": "text 0", "199999": "text 199999"}
    assert os.stat(path).st_nlink == 1


@pytest.mark.parametrize(
    "records, said",
    [
        ([{"_id": name, "text": "x"} for name in "aba"], "c.jsonl: id 'a' stands twice"),
        ([{"name": "a", "text": "x"}], "c.jsonl: no column '_id'; the columns are: name, text"),
        ([{"_id": "a", "text": "x"}, {"_id": None, "text": "x"}],
         "c.jsonl, line 2: no row with an id (no text or whole number in column '_id'); mend it"),
        ([{"_id": "a", "text": "x"}] * 1500 + [{"_id": "\ud800x", "text": "x"}], "c.jsonl, line 1501: no row with"),
        ([{"_id": "a", "body": "x"}], "c.jsonl: no column 'text'"),
    ],
)  # fmt: skip
def test_bad_table(tmp_path, records, said):
    write_jsonl(tmp_path / "c.jsonl", records)
    with pytest.raises(train_bi_encoder.BadInput) as error:
        table("c.jsonl")
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.glob("cache/*.ids"))


@pytest.mark.parametrize("script", [train_bi_encoder, train_cross_encoder])
def test_unknown_id(short, bert, tmp_path, capsys, script):
    corpus = write("corpus.jsonl", [{"_id": str(i), "text": row["code"]} for i, row in enumerate(short[:98])])
    data = write("rows.jsonl", [{"q": row["docstring"], "d": str(i)} for i, row in enumerate(short)])
    run = [*flags(bert, "--corpus_table", corpus, "--train_data", data, "--num_epochs", 1), "--max_steps", 0]
    with pytest.raises(script.BadInput) as error:
        script.main(script.parse_args(last_of([*run, "--output_dir", "a"])))
    assert "rows.jsonl, row 9" in str(error.value) and "' is not in --corpus_table; mend the row" in str(error.value)
    script.main(script.parse_args(last_of([*run, "--output_dir", "b", "--on_bad_row", "skip"])))
    assert "bad rows skipped" in capsys.readouterr().out
    assert json.loads(Path("b/checkpoints/step_00000005/state.json").read_text())["position"]["skipped"] >= 2
