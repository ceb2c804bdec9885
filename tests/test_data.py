"""Reading, order, hold-out, mixing and resume of the data, each compared with a plain list of rows."""

import json
import os
import re
import time
from collections import Counter
from itertools import combinations, islice
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import quick_first, write_rows

import train_bi_encoder as script

both_kinds = pytest.mark.parametrize("streaming", [False, True], ids=["mapped", "streaming"])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, tmp_path):
    """Use blocks of 4 rows, so that a few hundred rows cross every boundary; run in an empty folder."""
    monkeypatch.setattr(script, "BLOCK", 4)
    monkeypatch.chdir(tmp_path)


def options(**changed):
    args = script.parse_args(["--train_data", "unused", "--model_name_or_path", "unused", "--columns", "a", "b"])
    if changed.get("label_column"):
        changed = {"loss": "CoSENTLoss"} | changed
    if changed.get("streaming"):
        changed = {"max_steps": 1} | changed
    for name, value in changed.items():
        setattr(args, name, value)
    return args


def open_source(streaming, name, number=0, **changed):
    return script.Source(str(name), number, options(streaming=streaming, **changed))


def open_data(**changed):
    args = options(**changed)
    return script.open_data(args), args


def table(count, first=0):
    """Return rows of texts that are difficult in text formats: quotes, tabs, line breaks, accents, leading spaces."""
    return [{"a": f'row {i}: "quoted", ça\nand\r\nmore', "b": f" positive {i}\ttab\u2028{'x' * (i % 17)}"}
            for i in range(first, first + count)]  # fmt: skip


def read(source, count):
    """Return (list of Row, number of bad rows) of the next `count` rows of a Source."""
    return script.read_rows(source.take(count), [source], [None, None], 0)


def texts(source, count):
    """Return [{"a": text, "b": text}] of the next `count` rows of a Source."""
    return [{"a": row.query, "b": row.documents[0]} for row in read(source, count)[0]]


def numbers(rows):
    """Return the row numbers that `table` wrote into the texts of a Table, or of a list of Row."""
    found = rows["a"].to_pylist() if isinstance(rows, pa.Table) else [row.query for row in rows]
    return [int(text.split(":")[0].removeprefix("row ")) for text in found]


def held_out(data):
    """Return the held-out rows of all sources of a Data."""
    return [row for _, rows in data.held_out for row in rows]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Glob of three Parquet shards of 101, 57 and 39 rows: 197 in all."""
    folder, first = tmp_path_factory.mktemp("shards"), 0
    for number, size in enumerate((101, 57, 39)):
        write_rows(folder / f"{number}.parquet", table(size, first))
        first += size
    return f"{folder}/*.parquet"


SUFFIXES = ["parquet", "stream.arrow", "file.arrow", "json", "jsonl.gz", "jsonl.zst", "ndjson", "csv", "csv.gz", "tsv",
            "tsv.zst"]  # fmt: skip


@both_kinds
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_gives_the_same_rows(streaming, suffix):
    rows = table(130)
    if suffix.startswith("tsv"):  # which cannot contain tabs and line breaks
        rows = [{name: " ".join(re.split("[\t\r\n]+", text)) for name, text in row.items()} for row in rows]
    source = open_source(streaming, write_rows(f"part.{suffix}", rows), shuffle_buffer=0)
    assert texts(source, 131) == rows + rows[:1]


CONFIGS = """---
configs:
- config_name: one
  data_files: x.jsonl
- config_name: two
  data_files:
  - {split: train, path: y/*.parquet}
  - {split: dev, path: z.csv}
---
"""


@both_kinds
def test_globs_saved_folders_and_configurations(streaming, tmp_path):
    """The files of a folder are named by the user, as those of save_to_disk; what the Hub's layout lists is read."""
    for name, rows in {"folder/0.jsonl": table(20), "folder/1.jsonl": table(20, 20), "folder/2.jsonl": table(20, 40),
                       "configs/x.jsonl": table(5), "configs/z.csv": table(9), "configs/y/0.parquet": table(7),
                       "configs/y/1.parquet": table(7, 7)}.items():  # fmt: skip
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(name, rows)
    Path("configs/README.md").write_text(CONFIGS)
    datasets.Dataset.from_list(table(90)).save_to_disk("saved")
    datasets.load_from_disk("saved").map(lambda row: {"a": row["b"]}).shuffle(seed=0)
    assert len(list(Path("saved").glob("cache-*.arrow"))) == 2
    rows = {"train": datasets.Dataset.from_list(table(70)), "test": datasets.Dataset.from_list(table(20))}
    datasets.DatasetDict(rows).save_to_disk("splits")
    for name, count in {
        "./folder/*.jsonl": 60, f"{tmp_path}/folder/[12].jsonl": -20, "saved/data-*.arrow": 90,
        "splits/test/data-*.arrow": 20,
        "./configs:one:train": 5, "configs:two:train": 14, f"{tmp_path}/configs:two:dev": 9,
    }.items():  # fmt: skip
        expected = table(40, 20) if count < 0 else table(count)
        assert texts(open_source(streaming, name, shuffle_buffer=0), len(expected)) == expected, name
    wrong = {"configs:two:test": "'test'.*train, dev", "configs:three:train": "configs:three.*one.*two",
             "configs": r"^configs: .*\['one', 'two'\]", "splits": "name its files",
             "saved": r"name its files: .* or data-\*\.arrow"}  # fmt: skip
    for name, hint in wrong.items():
        with pytest.raises(script.UserError, match=hint):
            open_source(streaming, name)


@both_kinds
@pytest.mark.parametrize("suffix", ["txt", "txt.gz", "txt.zst"])
def test_text_lines_with_the_column_named_twice(streaming, suffix):
    lines = [{"text": f"line {i}, é"} for i in range(70)]
    source = open_source(streaming, write_rows(f"lines.{suffix}", lines), shuffle_buffer=0, columns=["text", "text"])
    assert texts(source, 70) == [{"a": line["text"], "b": line["text"]} for line in lines]


@both_kinds
@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_labels(streaming, suffix):
    """A label is a number, true or false, or a list of these; a list in a CSV file is JSON, or as Python prints it."""
    for label in (lambda i: i / 8, lambda i: [i / 8, 1.0], lambda i: bool(i % 2), lambda i: (bool(i % 2), False)):
        rows = [{"score": label(i), **row} for i, row in enumerate(table(60))]
        if suffix == "csv":
            cells = [label(i) if i % 3 else json.dumps(label(i)) for i in range(60)]  # True and true
            rows = [{**row, "score": [*cell] if isinstance(cell, tuple) else cell} for row, cell in zip(rows, cells)]
        file = write_rows(f"{type(label(0)).__name__}.{suffix}", rows)
        source = open_source(streaming, file, shuffle_buffer=0, label_column=["score"])
        found, _ = read(source, 60)
        assert [row.labels for row in found] == [np.atleast_1d(label(i)).tolist() for i in range(60)]
        assert [{"a": row.query, "b": row.documents[0]} for row in found] == table(60)


def test_hub_ids(monkeypatch):
    """ID, and ID:config:split, where config may be empty."""
    files = {split: [f"hf://datasets/o/n@abc/{split}.parquet"] for split in ("train", "dev")}
    builder = mock.Mock(return_value=SimpleNamespace(config=SimpleNamespace(data_files=files)))
    monkeypatch.setattr(script.datasets, "load_dataset_builder", builder)
    for source, split in {"o/n": "train", "o/n:cfg:dev": "dev", "o/n::dev": "dev"}.items():
        assert script.list_files(source) == files[split]
    assert [call.kwargs["name"] for call in builder.call_args_list] == [None, "cfg", None]


@both_kinds
def test_a_column_that_is_null_in_the_first_chunk(streaming):
    """`datasets` would type it as null and fail at its first text, which here follows 12 MB of rows."""
    rows = [{"note": None, "a": f"row {i}: " + "x" * 60_000, "b": "y"} for i in range(200)]
    rows += [{"note": "a note", "a": f"row {i}: z", "b": "y"} for i in range(200, 220)]
    file = write_rows("x.jsonl", rows)
    assert numbers(open_source(streaming, file, shuffle_buffer=0).take(220)) == list(range(220))
    skipping = {"columns": ["a", "note"], "on_bad_row": "skip", "shuffle_buffer": 0}
    found, skipped = read(open_source(streaming, file, **skipping), 220)
    assert [row.cells["a"] for row in found] == [f"row {i}: z" for i in range(200, 220)] and skipped == 200


VALUES = {  # {what a column holds: (its values, what is said)}
    "texts and numbers": (["a text", 3], "has extension<arrow.json>, not texts, numbers or lists of them"),
    "objects": ([{"x": "y"}], "has struct<x: string>, not texts, numbers or lists of them"),
    "numbers": ([5], "holds int, not texts: choose other columns"),
    "nested lists": ([[["one", "two"]]], "holds list, not texts: choose other columns"),
}


@both_kinds
@pytest.mark.parametrize("kind", VALUES)
def test_a_column_without_texts(streaming, kind):
    """Refused, also under --on_bad_row skip, as the column is wrong, not the row; never converted to text."""
    values, line = VALUES[kind]
    file = write_rows("x.jsonl", [{"a": f"row {i}: ", "b": value} for i, value in enumerate(values)])
    with pytest.raises(script.UserError, match=f"^x.jsonl: .*'b' {re.escape(line)}.* rewrite it by prepare_corpus.py"):
        read(open_source(streaming, file, on_bad_row="skip"), 1)


STRINGS = {  # {kind: Arrow types of the texts of two Parquet files}
    "large": (pa.string(), pa.large_string()),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), pa.large_string()),
    "lists": (pa.list_(pa.string()), pa.large_list(pa.large_string())),
}


@pytest.mark.parametrize("kind", STRINGS)
def test_files_of_several_string_types(kind):
    """Read as from one table, also where a batch has rows of two windows, or of two epochs."""
    expected = table(60)
    for number, string in enumerate(STRINGS[kind]):
        rows = expected[30 * number : 30 * number + 30]
        texts = [[row["b"]] if kind == "lists" else row["b"] for row in rows]
        first = pa.string() if kind == "lists" else string
        columns = [pa.array([row["a"] for row in rows], first), pa.array(texts, string)]
        pq.write_table(pa.table(columns, ["a", "b"]), f"{number}.parquet")
    for streaming in (False, True):
        for buffer in (10_000, 20, 0):
            source = open_source(streaming, "*.parquet", shuffle_buffer=buffer, columns=["a", "b", "b"])
            batches = [source.take(8) for _ in range(30)]
            found = [row for batch in batches for row in batch.to_pylist()]
            found = [{"a": row["a"], "b": row["b"][0] if kind == "lists" else row["b"]} for row in found]
            for first in range(0, 240, 60):  # an epoch
                epoch = found[first : first + 60]
                assert (sorted(epoch, key=expected.index) if buffer else epoch) == expected


def test_quotes_within_texts_of_csv():
    """Only a quote that does not match is refused; quotes within a text are none."""
    rows = table(8) + [{"a": 'row 8: x "y" z', "b": '5" wide'}]
    assert texts(open_source(True, write_rows("x.csv", rows), shuffle_buffer=0), 9) == rows


@both_kinds
def test_labels_that_are_not_finite_numbers(streaming):
    for number, labels in enumerate([[0.5, None, float("nan"), 1.0], [[0.5, 1.0], [0.5, None], [], [1.0, 0.5]],
                                     ["0.5", "1_3", None, "1.0"], ["[1, 1]", "[1_3, 1]", "[1, None]", "[true]"],
                                     ["True", "yes", "", " false"]]):  # fmt: skip
        rows = [{**row, "score": label} for row, label in zip(table(4), labels)]
        file, skip = write_rows(f"{number}.jsonl", rows), {"on_bad_row": "skip", "shuffle_buffer": 0}
        found, skipped = read(open_source(streaming, file, label_column=["score"], **skip), 4)
        assert numbers(found) == [0, 3] and skipped == 2, labels
        message = f"{number}.jsonl: --label_column has miss.* in the row .*row 1: .*skip"
        with pytest.raises(script.UserError, match=message):
            read(open_source(streaming, file, label_column=["score"], shuffle_buffer=0), 4)


@both_kinds
@pytest.mark.parametrize("buffer", [0, 1, 60, 197, 10_000])
def test_each_epoch_contains_every_row_once_in_a_new_order(shards, streaming, buffer):
    """Without a buffer, in the order of the files."""
    order = numbers(open_source(streaming, shards, shuffle_buffer=buffer).take(3 * 197))
    epochs = [order[i : i + 197] for i in range(0, len(order), 197)]
    assert all((sorted(epoch) if buffer else epoch) == list(range(197)) for epoch in epochs)
    if buffer > streaming:  # with a buffer of one row, a stream shuffles only its shards
        assert all(one != other for one, other in combinations([list(range(197)), *epochs], 2))


@both_kinds
def test_the_order_depends_on_the_seed_and_the_source_number(shards, streaming):
    def order(number, **changed):
        return numbers(open_source(streaming, shards, number, shuffle_buffer=60, **changed).take(197))

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != order(0, seed=1)


def test_rows_of_a_mapped_batch_are_far_apart(monkeypatch):
    monkeypatch.setattr(script, "BLOCK", 100)
    file = write_rows("large.parquet", table(10_000, 1000))
    order = numbers(open_source(False, file, shuffle_buffer=2000).take(10_000))
    for first in range(0, 9_984, 64):
        batch = sorted(order[first : first + 64])
        assert batch[-1] - batch[0] > 3_000
        assert len({row // 100 for row in batch}) >= 10  # of the 20 blocks of a window
        assert np.median(np.diff(batch)) > 3  # neighbours in the file are rarely in one batch


EDITS = {
    "filter": (lambda rows: rows.with_format(None).filter(lambda row: len(row["b"]) % 2), None),
    "sort": (lambda rows: rows.sort("b", reverse=True), range(200)),
    "select": (lambda rows: rows.select(range(3, 200, 5)), range(3, 200, 5)),
    "no format": (lambda rows: rows.select(range(27)).with_format(None), range(27)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_the_rows_of_an_edited_source(edit, monkeypatch):
    """After .filter, .sort or .select exactly the remaining rows are trained on, or held out, also after a resume."""
    write_rows("x.parquet", table(200))
    change, kept = EDITS[edit]
    real = script.open_source
    monkeypatch.setattr(script, "open_source", lambda files, args: change(real(files, args)))
    expected = numbers(script.open_source(script.list_files("x.parquet"), options()).with_format("arrow")[:])
    size = len(expected)
    assert sorted(expected) == list(kept) if kept else 0 < size < 200
    assert numbers(open_source(False, "x.parquet", shuffle_buffer=0).take(size)) == expected
    source = open_source(False, "x.parquet", shuffle_buffer=20)
    held_out = numbers(source.hold_out(5))
    epochs = [numbers(source.take(size - 5)) for _ in range(2)]
    assert all(sorted([*held_out, *epoch]) == sorted(expected) for epoch in epochs) and epochs[0] != epochs[1]

    def open_batches(state):
        source = open_source(False, "x.parquet", shuffle_buffer=20, batch_size=4)
        source.hold_out(5)
        return script.row_batches([source], [1], source.args, state)

    assert_resumes(open_batches, 40, (1, 6, 17))


@both_kinds
@pytest.mark.parametrize("held_out", [1, 101, 120])
def test_held_out_rows_are_never_trained_on(shards, streaming, held_out):
    """As many as the first file has, fewer or more. Of a stream, the first ones of its first file are held out."""
    source = open_source(streaming, shards, shuffle_buffer=60)
    kept = numbers(source.hold_out(held_out))
    count = min(held_out, 101) if streaming else held_out
    assert len(kept) == count and (not streaming or kept == list(range(count)))
    assert streaming or count == 1 or max(kept) > 150  # spread over the files
    for epoch in np.array_split(numbers(source.take(3 * (197 - count))), 3):
        assert sorted([*kept, *epoch]) == list(range(197))


def test_all_rows_of_eval_data_are_held_out_by_default(shards):
    """At most 1,000. Of training rows: tests/test_held_out.py."""
    data, _ = open_data(train_data=[shards], eval_data=[write_rows("other.jsonl", table(100, 1000))])
    assert numbers(held_out(data)) == list(range(1000, 1100)) and len(data.sources[0]) == 197
    assert open_data(train_data=[shards], eval_rows=0)[0].held_out == []


@both_kinds
def test_all_rows_held_out(streaming):
    with pytest.raises(script.UserError, match=r"x.parquet: .*--eval_rows"):
        data, args = open_data(train_data=[write_rows("x.parquet", table(57))], eval_rows=57, streaming=streaming)
        next(batches_of(data, args))


def test_bad_rows_among_the_held_out_ones():
    rows = [{**row, "b": "" if i in (2, 23) else row["b"]} for i, row in enumerate(table(60))]
    data, args = open_data(train_data=[write_rows("x.jsonl", rows)], eval_rows=8, on_bad_row="skip")
    assert len(held_out(data)) == 7 and data.skipped == 1
    with pytest.raises(script.UserError, match="x.jsonl: 'b' has no text in the row .*row 23: "):
        open_data(train_data=["x.jsonl"], eval_rows=8)


def batches_of(data, args, state=None):
    return script.row_batches(data.sources, data.weights, args, state)


def assert_resumes(open_batches, count, cuts):
    """Resume from the state, as JSON, after each of `cuts` batches: the next ten batches must follow, and again after
    the fifth of these. Return all batches of the run that was not resumed."""
    whole = list(islice(open_batches(None), count))
    for done in cuts:
        state = whole[done - 1][1]
        for skipped in (0, 5):
            found = list(islice(open_batches(json.loads(json.dumps(state))), 10))
            expected = whole[done + skipped : done + skipped + 10]
            assert [r.to_pylist() for r, _ in found[: len(expected)]] == [r.to_pylist() for r, _ in expected]
            for (_, state), (_, other) in zip(found, expected):
                assert state["used"] == other["used"]
                for name, position in state["sources"].items():  # a position in a stream has several forms
                    assert {**position, "stream": None} == {**other["sources"][name], "stream": None}
            state = found[4][1]
    return whole


ONE = [(False, 60, 30), (True, 60, 30), (False, 0, 0), (True, 20, 0), (True, 10_000, 110)]
MIXED = [(False, "row", 3), (True, "batch", 3), (False, "batch", 1), (True, "row", 1)]


@pytest.mark.parametrize("streaming, buffer, held_out", quick_first(ONE, 2))
def test_resume_of_one_source(shards, streaming, buffer, held_out):
    """At states within and between windows, shards and epochs; held-out rows stay excluded."""

    def open_batches(state):
        source = open_source(streaming, shards, shuffle_buffer=buffer, batch_size=5)
        if held_out:
            source.hold_out(held_out)
        return script.row_batches([source], [1], source.args, state)

    epoch = (197 - held_out) // 5
    cuts = {1, 2, 4, 5, epoch - 1, epoch, epoch + 1, *range(7, epoch, 12)}
    assert_resumes(open_batches, 2 * epoch + 20, cuts)


@pytest.mark.parametrize("streaming, mix_by, length_window", quick_first(MIXED, 2))
def test_resume_of_mixed_sources(streaming, mix_by, length_window):
    """Several epochs of two sources; one has two files."""
    rows = table(150)
    Path("x").mkdir()
    write_rows("x/0.jsonl", rows[:80]), write_rows("x/1.jsonl", rows[80:]), write_rows("y.jsonl.gz", table(90, 1000))
    changed = {"mix_by": mix_by, "length_window": length_window, "shuffle_buffer": 40}

    def open_batches(state):
        named = enumerate(("x/*.jsonl", "y.jsonl.gz"))
        sources = [open_source(streaming, name, i, batch_size=8, **changed) for i, name in named]
        return script.row_batches(sources, [2, 1], sources[0].args, state)

    whole = assert_resumes(open_batches, 90, (1, 2, 5, 17, 45, 85))
    assert all(len(rows) == 8 for rows, _ in whole)
    origins = [{number >= 1000 for number in numbers(rows)} for rows, _ in whole]
    if mix_by == "batch":
        assert all(len(origin) == 1 for origin in origins) and origins.count({True}) == 30
    else:
        counts = Counter(number >= 1000 for rows, _ in whole for number in numbers(rows))
        assert counts == {False: 480, True: 240}


def test_a_resume_with_a_shorter_length_window():
    """--accept_changes allows it: the rows of the window that was open are drawn again, in shorter windows."""
    file = write_rows("rows.jsonl", table(150))

    def batches(length_window, state=None, size=8):
        source = open_source(False, file, batch_size=size, shuffle_buffer=40, length_window=length_window)
        return script.row_batches([source], [1], source.args, state)

    *_, (_, state) = islice(batches(6), 4)
    _, begun = next(batches(3, json.loads(json.dumps(state)), 16))  # of as many rows, of which 4 batches are taken
    assert begun["used"] == 1 and begun["sources"]["rows.jsonl 0"]["taken"] == 0
    states = [state for _, state in islice(batches(2, json.loads(json.dumps(state))), 3)]
    assert [state["used"] for state in states] == [1, 0, 1]
    assert [state["sources"]["rows.jsonl 0"]["taken"] for state in states] == [0, 16, 16]


@pytest.mark.parametrize("weights, rows", list(zip([[1], [0.3, 0.7], [5, 3, 2], [10, 1, 1, 1, 1, 1]], [7, 64, 1, 7])))
def test_each_source_is_always_within_a_row_of_its_share(weights, rows):
    """After each batch of `rows` rows."""
    drawn = [0] * len(weights)
    for total in range(1, 300):
        counts = script.apportion(drawn, weights, rows)
        assert min(counts) >= 0 and sum(counts) == rows
        drawn = [count + more for count, more in zip(drawn, counts)]
        for count, weight in zip(drawn, weights):
            assert abs(count - total * rows * weight / sum(weights)) < 1 + 1e-9, (total, drawn)


def test_a_resume_that_mixes_in_another_way_loses_no_row():
    """--accept_changes allows it: from batches of one source to mixed ones."""
    files = [write_rows(f"{number}.jsonl", table(100, 100 * number)) for number in range(4)]

    def open_batches(mix_by, state=None):
        data, args = open_data(train_data=files, eval_rows=0, batch_size=16, shuffle_buffer=0, mix_by=mix_by)
        return data, batches_of(data, args, state)

    *_, (_, state) = islice(open_batches("batch")[1], 2)
    data, batches = open_batches("row", json.loads(json.dumps(state)))
    found = [number for rows, _ in islice(batches, 6) for number in numbers(rows)]
    assert sum(source.position.taken for source in data.sources) == 2 * 16 + len(found)


def test_length_window_groups_rows_by_length_and_loses_none():
    """The same rows as without it, in batches of more equal lengths, and the longest batch is not always the first."""
    rows = [{"a": f"row {i}: " + "word " * (i * 7919 % 97), "b": "positive"} for i in range(240)]
    file = write_rows("lengths.jsonl", rows)

    def batches(window):
        source = open_source(False, file, length_window=window, batch_size=8, shuffle_buffer=40)
        return [rows for rows, _ in islice(script.row_batches([source], [1], source.args), 30)]

    plain, grouped = batches(1), batches(10)
    assert sorted(number for batch in grouped for number in numbers(batch)) == list(range(240))
    lengths = [np.array([batch[script.LENGTH].to_numpy() for batch in found]) for found in (plain, grouped)]  # (30, 8)
    assert np.ptp(lengths[1], axis=1).mean() < 0.3 * np.ptp(lengths[0], axis=1).mean()
    assert len(set(lengths[1].max(1).reshape(3, 10).argmax(1))) > 1


def test_rows_per_epoch_is_a_fresh_sample_each_epoch(shards):
    data, args = open_data(train_data=[shards], rows_per_epoch=96, batch_size=32, eval_rows=5, shuffle_buffer=60)
    assert (data.epoch_rows, len(held_out(data))) == (96, 5)
    batches = [set(numbers(rows)) for rows, _ in islice(batches_of(data, args), 6)]
    epochs = [set.union(*batches[:3]), set.union(*batches[3:])]
    assert list(map(len, epochs)) == [96, 96] and not epochs[0] & epochs[1]


@pytest.mark.parametrize("strategy, rows", [("first_exhausted", 394), ("all_exhausted", 400)])
def test_rows_of_an_epoch_of_mixed_sources(shards, strategy, rows):
    """With equal shares of 197 and 200 rows, 394 mixed rows exhaust the first source, 400 both."""
    other = write_rows("other.jsonl", table(200, 1000))
    given = {"mixing_weights": [1, 1], "stopping_strategy": strategy, "eval_rows": 0}
    data, args = open_data(train_data=[shards, other], batch_size=rows, **given)
    assert data.epoch_rows == rows
    found = Counter(numbers(next(batches_of(data, args))[0]))
    full = set(range(197)) if strategy == "first_exhausted" else {*range(197), *range(1000, 1200)}
    assert full <= set(found)


@pytest.mark.parametrize("streaming, shares", [(False, [20, 10]), (True, [15, 15])])
def test_shares_without_weights(streaming, shares):
    """In proportion to the numbers of rows; equal for streams, whose lengths are unknown."""
    sources = [write_rows("x.jsonl", table(200)), write_rows("y.jsonl", table(100, 1000))]
    data, args = open_data(train_data=sources, batch_size=30, eval_rows=0, streaming=streaming, max_steps=1)
    batch = numbers(next(batches_of(data, args))[0])
    assert [sum(number < 1000 for number in batch), sum(number >= 1000 for number in batch)] == shares


@both_kinds
def test_an_arrow_file_with_wrong_offsets(streaming):
    """A reader that does not validate them would access memory at random and crash."""
    write_rows("x.arrow", table(60))
    data, offsets = Path("x.arrow").read_bytes(), np.cumsum([0] + [len(row["a"].encode()) for row in table(60)][:36])
    place = data.index(offsets[1:9].astype(np.int32).tobytes())
    Path("x.arrow").write_bytes(data[:place] + b"\x7f" * 8 + data[place + 8 :])
    with pytest.raises(script.UserError, match="x.arrow: .*[Oo]ffset"):
        open_source(streaming, "x.arrow").take(60)


@pytest.mark.slow
def test_a_large_parquet_file_is_streamed_in_constant_memory(tmp_path):
    """By default, pyarrow reads a file ahead, and keeps in memory what it has read."""
    blocks, schema = np.random.default_rng(0).bytes(250_000), pa.schema([("text", pa.string())])
    with pq.ParquetWriter(tmp_path / "x.parquet", schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, 400_000, 20_000):
            texts = [f"{row} {blocks[row % 249_000 :][:250].hex()}" for row in range(first, first + 20_000)]
            writer.write_table(pa.table([texts], schema=schema))
    assert os.path.getsize(tmp_path / "x.parquet") > 200e6
    before, allocated = pa.total_allocated_bytes(), []
    for number, _ in enumerate(script.open_files([str(tmp_path / "x.parquet")]).iter(5000)):
        time.sleep(0.3 * (number == 0))
        allocated.append(pa.total_allocated_bytes() - before)
    assert len(allocated) == 80 and max(allocated) < 120e6  # about 70 MB measured
