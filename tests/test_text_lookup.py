"""Rows of ids: texts are looked up in a memory-mapped table, by an index on disk, and train like rows of texts."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import CACHE, ROOT, TRAINERS, launch, metrics, quick_first, train, write_rows
from forked import Forked

import train_bi_encoder as script

COLUMNS = ["_id", "title", "text"]
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture(scope="module")
def short(rows):
    """100 rows with one-line texts of at most 120 characters."""
    return [{name: " ".join(text.split())[:120].replace('"', "'") for name, text in row.items()} for row in rows[:100]]


def parse(source, *flags):
    return script.parse_args(["--train_data", source, "--model_name_or_path", "unused", *flags])


def texts(path, ids, columns=("_id", "text")):
    """Return the texts of ids, None for an unknown one."""
    args = parse("x", "--columns", "row", "id", "--on_bad_row", "skip")
    table = {"row": [f"{i}" for i in range(len(ids))], "id": ids}
    table |= {script.SOURCE: [0] * len(ids), script.NUMBER: [0] * len(ids)}
    args.corpus = [str(path)]
    lookups = [None, script.TextLookup(args.corpus, list(columns))]
    source = SimpleNamespace(name="rows", args=args)
    rows, skipped = script.read_rows(pa.table(table), [source], lookups, 0)
    found = {int(row.query): row.documents[0] for row in rows}
    assert len(found) + skipped == len(ids)
    return [found.get(i) for i in range(len(ids))]


def flags(model, *more):
    return ["--model_name_or_path", model, "--eval_rows", 20, "--batch_size", 16, "--max_steps", 6,
            "--logging_steps", 1, "--save_steps", 3, "--micro_batch_tokens", 600, "--columns", "q", "d",
            *more]  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".tsv.gz"])
def test_texts_by_id(suffix):
    """On either side, ids may be texts or whole numbers; an unknown or missing id has no text."""
    records = [{"_id": i * 7, "title": f"T{i}" if i % 2 else "", "text": f"ü text {i}"} for i in range(200)]
    file = write_rows(f"c{suffix}", records)
    expected = [f"T{i} ü text {i}" if i % 2 else f"ü text {i}" for i in range(200)]
    assert texts(file, [str(i * 7) for i in range(200)], COLUMNS) == expected
    assert texts(file, [i * 7 for i in range(199, -1, -1)], COLUMNS) == expected[::-1]
    for unknown in (["nobody", "7", None, "007"], [1, 7, None, 10**12]):
        assert texts(file, unknown, COLUMNS) == [None, expected[1], None, None]
    assert texts(file, ["7"], ["_id", "title"]) == ["T1"]


def test_an_index_belongs_to_its_table():
    """The shard in the middle is written anew, with the same size and another order."""
    documents = [{"_id": str(row), "text": f"text {row}"} for row in range(10, 70)]
    ids = [document["_id"] for document in documents]
    for first in (0, 20, 40):
        write_rows(f"{first}.jsonl", documents[first : first + 20])
    written = []
    for _ in range(2):
        lookup = script.TextLookup(["*.jsonl"], ["_id", "text"])
        written.append(Path(lookup.index.filename).stat().st_mtime_ns)
        assert lookup.texts([*ids, "none"]) == [*(f"text {name}" for name in ids), None]
        write_rows("20.jsonl", documents[39:19:-1])
    lookup = script.TextLookup(["*.jsonl"], ["_id", "text"])
    assert written[0] < written[1] and Path(lookup.index.filename).stat().st_mtime_ns > written[1]
    again = script.TextLookup(["*.jsonl"], ["_id", "text"])
    assert again.index.filename == lookup.index.filename


def test_an_index_of_an_arrow_file_with_the_same_time():
    """Mapped as it is, it has the fingerprint of `datasets` that the file before it had."""
    for names in (["a", "b"], ["b", "a"]):
        rows = pa.table({"_id": names, "text": [f"text {name}" for name in names]})
        with pa.OSFile("x.arrow", "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
            writer.write_table(rows)
        os.utime("x.arrow", (1e9, 1e9))
        assert texts("x.arrow", ["a", "b", "none"]) == ["text a", "text b", None]


def test_two_id_columns_of_a_table_have_two_indexes():
    """The name of an index contains the id column."""
    write_rows("c.jsonl", [{"_id": "a", "url": "x", "text": "one"}, {"_id": "b", "url": "y", "text": "two"}])
    assert texts("c.jsonl", ["b"]) == ["two"] and texts("c.jsonl", ["x", "b"], ["url", "text"]) == ["one", None]


def test_ids_with_equal_hashes(monkeypatch):
    """Two of a table are refused; an unknown id with the hash of a known one has no text."""

    def hashes(lookup, ids):
        return np.array([int(str(name)[1:]) % 40 for name in ids], np.uint64)

    monkeypatch.setattr(script.TextLookup, "hashes", hashes)
    write_rows("c.jsonl", [{"_id": f"d{i}", "text": f"text {i}"} for i in range(40)])
    assert texts("c.jsonl", ["d3", "d43", "d0", "d79", "d39"]) == ["text 3", None, "text 0", None, "text 39"]
    write_rows("c.jsonl", [{"_id": f"d{i}", "text": f"text {i}"} for i in range(41)])
    with pytest.raises(script.UserError, match=r"ids \['d0', 'd40'\] are the same, or have the same 64-bit hash"):
        texts("c.jsonl", ["d3"])


@pytest.mark.parametrize("records, columns, hint", [
    ([{"_id": name, "text": f"{name} {i}"} for i, name in enumerate("abca")], ["_id", "text"],
     r"\(--corpus_columns\): ids \['a', 'a'\]"),
    ([{"name": "a", "text": "x"}], ["_id", "text"], r".*'_id'"),
    ([{"_id": "a", "text": "x"}], ["_id", "title", "text"], r"\(--corpus_columns\): .*'title'"),
    ([{"_id": "a", "text": "one"}, {"_id": 2, "text": "two"}], ["_id", "text"], r".*'_id' has"),
])  # fmt: skip
def test_bad_table(records, columns, hint):
    """Two rows of one id, columns that are not there, ids of texts and numbers, which would be JSON."""
    write_rows("c.jsonl", records), write_rows("rows.jsonl", [{"q": "x", "d": "a"}] * 20)
    args = parse("rows.jsonl", "--columns", "q", "d", "--corpus", "c.jsonl", "--corpus_columns", *columns)
    with pytest.raises(script.UserError, match=f"^c.jsonl {hint}") as error:
        script.open_data(args)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_killed_builder_leaves_no_index_and_two_at_once_build_one(tmp_path):
    count = 400_000
    pq.write_table(pa.table({"_id": range(count), "text": [f"text {i}" for i in range(count)]}), "c.parquet")
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train_bi_encoder as s\n"
    (tmp_path / "driver.py").write_text(program + "s.TextLookup(['c.parquet'], ['_id', 'text'])")
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    assert str(cache) == CACHE.name
    for rest in (*cache.glob("*.part"), *cache.glob("evenstep-*.lock")):  # of earlier tests
        rest.unlink()
    before = set(cache.glob("evenstep-*.npy"))
    process = Forked(tmp_path / "driver.py", [], cwd=tmp_path)
    while process.poll() is None and not list(cache.glob("evenstep-*.lock")):  # taken while the index is built
        time.sleep(0.001)
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and set(cache.glob("evenstep-*.npy")) == before
    both = [Forked(tmp_path / "driver.py", [], cwd=tmp_path) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0], both[0].read("stderr") + both[1].read("stderr")
    (path,) = set(cache.glob("evenstep-*.npy")) - before
    assert not list(cache.glob("*.part")) and path.stat().st_size < 16 * count + 1000
    assert texts("c.parquet", ["0", str(count - 1), str(count)]) == ["text 0", f"text {count - 1}", None]


@pytest.mark.parametrize("name, suffix", quick_first(zip(TRAINERS, [".tsv.gz", ".parquet"])))
def test_ids_train_as_their_texts_do(short, bert, tmp_path, name, suffix):
    """Losses and weights are bit-identical; the documents of the cross-encoder are lists of ids."""
    documents = [{"_id": i + 7, "title": row["docstring"][:9].strip(), "text": row["code"]}
                 for i, row in enumerate(short)]  # fmt: skip
    queries = [{"_id": f"q{i}", "text": row["docstring"]} for i, row in enumerate(short)]
    joined = [f"{d['title']} {d['text']}".strip() for d in documents]
    as_texts, as_ids = [], []
    for i in range(100):
        other = (i + 5) % 100
        as_texts.append({"query": short[i]["docstring"].strip(), "a": joined[i], "b": joined[other]})
        as_ids.append({"query": f"q{i}", "a": i + 7, "b": other + 7})
        if name == "train_cross_encoder":
            as_texts[-1] |= {"a": [joined[i]], "b": [joined[other]]}
            as_ids[-1] |= {"a": [str(i + 7)], "b": [str(other + 7)]}
    tables = ["--corpus", write_rows(f"corpus{suffix}", documents), "--queries", write_rows("queries.jsonl", queries)]
    for kind, rows, more in (("texts", as_texts, []), ("ids", as_ids, tables)):
        run = [*more, "--train_data", write_rows(f"{kind}.jsonl", rows), "--columns", "query", "a", "b"]
        train(name, *flags(bert, *run, "--output_dir", tmp_path / kind))
    assert [line.get("loss") for line in metrics("ids")] == [line.get("loss") for line in metrics("texts")]
    weights = [Path(f"{kind}/model/model.safetensors").read_bytes() for kind in ("ids", "texts")]
    assert weights[0] == weights[1]


def test_a_resume_with_a_changed_table(short, static, tmp_path):
    documents = [{"_id": str(i), "text": row["code"]} for i, row in enumerate(short)]
    corpus = write_rows("corpus.parquet", documents)
    data = write_rows("rows.jsonl", [{"q": row["docstring"], "d": str(i)} for i, row in enumerate(short)])
    run = flags(static, "--corpus", corpus, "--train_data", data, "--corpus_columns", "_id", "text")
    launch(ROOT / "train_bi_encoder.py", *run, "--max_steps", 3, "--output_dir", tmp_path, cwd=tmp_path, processes=2)
    write_rows("corpus.parquet", [{**row, "text": row["text"] + " changed"} for row in documents])
    again = [*run, "--max_steps", 3, "--output_dir", tmp_path, "--resume"]
    with pytest.raises(script.UserError, match=r"corpus.parquet: \["):
        train("train_bi_encoder", *again)
    train("train_bi_encoder", *again, "--accept_changes")
