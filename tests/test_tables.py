"""Tables are read as they are written, whatever their format, types and empty files; what cannot be is refused in one
line that names the source, and the columns."""

import http.server
import json
import os
import threading
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import write_jsonl

import check_overlap
import eval_incremental
import mine_negatives
import train_bi_encoder as script
import train_cross_encoder

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
both_kinds = pytest.mark.parametrize("streaming", [False, True], ids=["mapped", "streaming"])


def options(**changed):
    args = script.parse_args(["--train_data", "unused", "--model_name_or_path", "unused", "--columns", "a", "b"])
    for name, value in changed.items():
        setattr(args, name, value)
    return args


def rows_of(name, count, streaming, **changed):
    """Return the next `count` rows of a source, in the order of its files, as lists of cells."""
    source = script.Source(str(name), 0, options(streaming=streaming, shuffle_buffer=0, **changed))
    rows = script.to_python(source.take(count).drop_columns([script.SOURCE, script.NUMBER, script.LENGTH]))
    return [list(cells.values()) for cells in rows]


def write(name, text):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    with fsspec.open(name, "wt", compression="infer", newline="") as file:
        file.write(text)
    return name


# ---------------------------------------------------------------------------------------------------- CSV and TSV

WRITTEN = [
    "null",
    "NA",
    "None",
    "nan",
    "N/A",
    "0016",
    "9007199254740993",
    "1.0",
    "True",
    "1e5",
    "-",
    " x ",
    "'tis",
    "#n",
]


@both_kinds
@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "tsv", "tsv.zst"])
def test_cells_are_read_as_they_are_written(streaming, suffix):
    """Neither numbers nor the words that pandas takes for missing change; an empty cell is missing."""
    mark = "\t" if "tsv" in suffix else ","
    expected = [[word, f"text {number}"] for number, word in enumerate(WRITTEN)] + [[None, "last"]]
    lines = [f"a{mark}b", *(f"{first or ''}{mark}{second}" for first, second in expected)]
    assert rows_of(write(f"x.{suffix}", "\n".join(lines)), len(expected), streaming) == expected


@both_kinds
def test_quotes_of_a_tsv_are_text(streaming):
    """A quote that is never closed would swallow the lines that follow."""
    expected = [['"open', "x"], ["y", '"quoted"'], ['say "hi', 'z"'], ["'", '""'], ["last", '"']]
    file = write("x.tsv", "a\tb\n" + "".join("\t".join(row) + "\n" for row in expected))
    assert rows_of(file, 5, streaming) == expected


def test_ids_beside_an_empty_cell(tmp_path):
    """pandas would read a column of integers with an empty cell as floats, which differ above 2**53."""
    ids = [str(2**53 + number) for number in range(8)]
    write("rows.csv", "a,b\n" + "".join(f"q {name},{name}\n" for name in ids) + "q,\n")
    write("corpus.csv", "_id,text\n" + "".join(f"{name},text {name}\n" for name in [*ids, "0016"]))
    args = options(corpus=["corpus.csv"], corpus_columns=["_id", "text"], on_bad_row="skip", shuffle_buffer=0)
    source = script.Source("rows.csv", 0, args)
    lookup = script.TextLookup(["corpus.csv"], ["_id", "text"])
    found, skipped = script.read_rows(source.take(9), [source], [None, lookup], 0)
    assert [row.documents for row in found] == [[f"text {name}"] for name in ids] and skipped == 1
    assert lookup.texts(["0016", "16"]) == ["text 0016", None]


@both_kinds
def test_labels_of_a_csv_are_parsed(streaming):
    args = options(label_column=["label"], streaming=streaming, shuffle_buffer=0)
    labels = {"1": 1.0, " 0.5": 0.5, ".5": 0.5, "1e-3": 0.001, "-2": -2.0}
    source = script.Source(write("x.csv", "a,b,label\n" + "".join(f"q,d,{label}\n" for label in labels)), 0, args)
    found, _ = script.read_rows(source.take(len(labels)), [source], [None, None], 0)
    assert [row.labels for row in found] == [[value] for value in labels.values()]


def test_label_lists_of_a_csv_are_parsed():
    args = options(label_column=["label"])
    source = script.Source(write("x.csv", 'a,b,label\nq,d,"[1, 0.5]"\n'), 0, args)
    assert script.read_rows(source.take(1), [source], [None, None], 0)[0][0].labels == [1.0, 0.5]


@pytest.mark.parametrize("suffix, mark, place, streaming", [
    ("csv", ",", 1, False), ("csv", ",", 20_001, True), ("tsv", "\t", 2, True), ("tsv", "\t", 50, False),
])  # fmt: skip
def test_a_row_with_more_fields_than_the_header(streaming, place, suffix, mark):
    """It is refused with its line: its columns would shift."""
    rows = [["q", "d", "more"] if number == place else ["q", "d"] for number in range(1, max(place, 50) + 10)]
    file = write(f"x.{suffix}", "\n".join(mark.join(row) for row in [["a", "b"], *rows]))
    with pytest.raises(script.UserError, match=rf"^x.{suffix}: .*line {place + 1}\b"):
        rows_of(file, len(rows), streaming)


@both_kinds
def test_every_row_has_more_fields_than_the_header(streaming):
    file = write("x.csv", "a,b\n" + "q,d,more\n" * 5)
    with pytest.raises(script.UserError, match="^x.csv: line 2 has more fields than the header: "):
        rows_of(file, 5, streaming)


@both_kinds
def test_rows_that_end_in_a_separator(streaming):
    assert rows_of(write("x.csv", "a,b\nq,d,\nr,e,\n"), 2, streaming) == [["q", "d"], ["r", "e"]]


@pytest.mark.parametrize("text", ["a;b\nq, 1;d\nr;e\n", "a\tb\nq\td\n", "a\nq\n"])
def test_one_column(text):
    """A table of one column, such as one with another separator, has nothing to train on without --columns."""
    write("x.csv", text)
    with pytest.raises(script.UserError, match="^(x.csv: .*more fields|--columns: two or more .* x.csv)"):
        script.find_columns(options(train_data=["x.csv"], columns=[]))


# -------------------------------------------------------------------------------------------------- empty files

ONE = '{"a": "q", "b": "d"}\n'
EMPTY = {
    "jsonl": ("", ONE),
    "csv": ("", "a,b\nq,d\n"),
    "header.csv": ("a,b\n", "a,b\nq,d\n"),
    "tsv": ("", "a\tb\nq\td\n"),
    "jsonl.gz": ("", ONE),
}


@pytest.mark.parametrize("empty, streaming", [(0, False), (0, True), (1, True), (2, False)])
@pytest.mark.parametrize("suffix", [*EMPTY, "parquet", "arrow"])
def test_an_empty_file_in_a_folder(streaming, suffix, empty):
    """Spark writes such files; wherever one stands, the rows of the others are read, and found without --columns."""
    Path("rows").mkdir()
    for number in range(3):
        file = f"rows/part-{number}.{suffix}"
        table = pa.table({"a": ["q"], "b": ["d"]}).slice(0, 0 if number == empty else 1)
        if suffix == "parquet":
            pq.write_table(table, file)
        elif suffix == "arrow":
            with pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
        else:
            write(file, EMPTY[suffix][number != empty])
    assert rows_of("rows", 5, streaming) == [["q", "d"]] * 5
    assert script.find_columns(options(train_data=["rows"], columns=[])) == ["a", "b"]


@both_kinds
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "header.csv"])
def test_only_empty_files(streaming, suffix):
    with pytest.raises(script.UserError, match=f"^x.{suffix}: (contains no row|No columns to parse from file)"):
        rows_of(write(f"x.{suffix}", EMPTY[suffix][0]), 1, streaming)


# ---------------------------------------------------------------------------------------------------- Arrow types

TEXTS = pa.array(["q 0", "q 1", "q 2", "q 3"])
LISTS = [["d 0", "e 0"], ["d 1", "e 1"], ["d 2", "e 2"], ["d 3", "e 3"]]
TYPES = {
    "string_view": (pa.string_view(), TEXTS.to_pylist()),
    "large_string": (pa.large_string(), TEXTS.to_pylist()),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), TEXTS.to_pylist()),
    "fixed_size_list": (pa.list_(pa.string(), 2), LISTS),
    "large_list": (pa.large_list(pa.string()), LISTS),
    "list of string_view": (pa.list_(pa.string_view()), LISTS),
    "fixed_size_list of string_view": (pa.list_(pa.string_view(), 2), LISTS),
}


@pytest.mark.parametrize(
    "suffix, streaming", [("parquet", False), ("parquet", True), ("stream.arrow", True), ("file.arrow", False)]
)
@pytest.mark.parametrize("kind", TYPES)
def test_types_of_texts_and_lists(streaming, suffix, kind):
    """Whatever Arrow type has them, texts and lists of texts are read, shuffled, measured and trained on alike."""
    data_type, values = TYPES[kind]
    table = pa.table({"a": TEXTS, "b": pa.array(values, data_type), "c": TEXTS})
    if suffix == "parquet":
        pq.write_table(table, "x.parquet")
    else:
        with (pa.ipc.new_file if "file" in suffix else pa.ipc.new_stream)(f"x.{suffix}", table.schema) as writer:
            writer.write_table(table)
    assert rows_of(f"x.{suffix}", 4, streaming) == [[f"q {i}", values[i]] for i in range(4)]
    args = options(streaming=streaming, shuffle_buffer=3, columns=["a", "b", "c"])
    source = script.Source(f"x.{suffix}", 0, args)
    table = source.take(8)
    assert table[script.LENGTH].to_pylist() == [6 + (6 if "list" in kind else 3)] * 8
    found, skipped = script.read_rows(table, [source], [None, None], 0)
    assert not skipped and all(row.documents[0][-1] == row.query[-1] for row in found)


def test_lists_of_a_fixed_size_are_one_column_of_positives():
    """Their second text would become a negative."""
    positives = pa.array(LISTS, pa.list_(pa.string(), 2))
    pq.write_table(pa.table({"a": TEXTS, "b": positives, "c": pa.array([["n"]] * 4)}), "x.parquet")
    args = options(columns=["a", "b", "c"], num_negatives=1)
    source = script.Source("x.parquet", 0, args)
    found, _ = script.read_rows(source.take(40), [source], [None, None], 0)
    assert {row.documents[1] for row in found} == {"n"} and {row.documents[0][0] for row in found} == {"d", "e"}


@both_kinds
@pytest.mark.parametrize("order, empty", [("ab", []), ("ba", []), ("ab", None)])
def test_a_list_that_is_empty_throughout_a_file(streaming, order, empty):
    """`datasets` would type it as a list of nulls, and fail at the first text."""
    for name in order:
        write_jsonl(Path(f"{order.index(name)}.jsonl"), [{"a": "q", "b": ["d"] if name == "a" else empty}] * 3)
    expected = [["q", ["d"] if name == "a" else []] for name in order for _ in range(3)]
    assert rows_of("*.jsonl", 6, streaming) == expected


@both_kinds
def test_a_null_within_structs_of_a_list(streaming):
    rows = [{"a": "q", "b": [{"title": title, "text": "d"}]} for title in (None, "a title")]
    write_jsonl(Path("0.jsonl"), rows[:1])
    write_jsonl(Path("1.jsonl"), rows[1:])
    assert rows_of("*.jsonl", 2, streaming) == [list(row.values()) for row in rows]


# -------------------------------------------------------------------------------------------- what does not fit


@both_kinds
def test_sources_of_different_types(streaming):
    """One line names the sources and the column."""
    write_jsonl(Path("text.jsonl"), [{"a": "q", "b": "d"}] * 20)
    write_jsonl(Path("list.jsonl"), [{"a": "q", "b": ["d"]}] * 20)
    args = options(train_data=["text.jsonl", "list.jsonl"], streaming=streaming, max_steps=1, eval_rows=0)
    data = script.open_data(args)
    with pytest.raises(
        script.UserError, match=r"^the columns of text.jsonl, list.jsonl differ: .*Field b has incompatible types"
    ):
        next(script.row_batches(data.sources, data.weights, args))
    data = script.open_data(replace(args, eval_rows=4, mix_by="batch"))  # alone, each is read as it is
    assert [rows[0].documents for _, rows in data.held_out] == [["d"], ["d"]]
    batches = script.row_batches(data.sources, data.weights, replace(args, mix_by="batch"))
    assert {str(next(batches)[0]["b"].type) for _ in range(2)} == {"string", "list<item: string>"}


@both_kinds
def test_files_with_different_columns(streaming):
    """One line names the columns, and what rewrites them."""
    write_jsonl(Path("0.jsonl"), [{"a": "q", "b": "d"}])
    write_jsonl(Path("1.jsonl"), [{"a": "q", "b": "d", "prompt": "x"}])
    with pytest.raises(script.UserError, match=r"^\*.jsonl: .*1 new columns.*'prompt'.*prepare_corpus.py[^;]*$"):
        rows_of("*.jsonl", 2, streaming)


@both_kinds
def test_files_with_different_types(streaming):
    write_jsonl(Path("0.jsonl"), [{"a": "q", "b": "d"}])
    write_jsonl(Path("1.jsonl"), [{"a": "q", "b": ["d"]}])
    with pytest.raises(script.UserError, match=r"^\*.jsonl: .*Couldn't cast.*list.*string.*prepare_corpus.py"):
        rows_of("*.jsonl", 2, streaming)
    write_jsonl(Path("x.jsonl"), [{"a": "x" * 60_000, "b": 1}] * 200 + [{"a": "q", "b": "d"}])
    with pytest.raises(script.UserError, match=r"^x.jsonl: .*scalar of type int64; prepare_corpus.py"):
        rows_of("x.jsonl", 201, streaming)


def test_several_configurations():
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("pair", "triplet"))
    write("repo/README.md", f"---\nconfigs:\n{configs}---\n")
    for name in ("pair", "triplet"):
        write(f"repo/{name}.jsonl", json.dumps({"a": name, "b": "d"}))
    with pytest.raises(script.UserError, match=r"^repo: .*\['pair', 'triplet'\]"):
        rows_of("repo", 1, False)
    assert rows_of("repo:triplet:train", 1, False) == [["triplet", "d"]]


# ----------------------------------------------------------------------------------------------- what a source is


def warnings_of(capsys):
    """Return the warnings printed since the last call; each is printed once in a process."""
    script.warn_once.cache_clear()
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]


@both_kinds
@pytest.mark.parametrize(
    "name", ["pairs[1].jsonl", "run[2]/x.jsonl", "a*b?.jsonl", "2024-01-05T12:30:05", "run:1/x.jsonl", "__x/y.jsonl"]
)
def test_what_is_on_disk_is_no_pattern(streaming, name):
    """Neither a pattern nor an id with a split: a file or folder is read by its name, alone or in a folder."""
    for other in ("pairs1.jsonl", "run2/x.jsonl", "aab1.jsonl"):  # what the names match as patterns
        write(f"in/{other}", '{"a": "another", "b": "file"}\n')
    write(f"in/{name}/x.jsonl" if "." not in name else f"in/{name}", ONE)
    os.chdir("in")
    assert rows_of(name, 1, streaming) == [["q", "d"]]
    if not name.startswith("_"):
        os.chdir("..")
        assert sorted(rows_of("in", 4, streaming)) == [["another", "file"]] * 3 + [["q", "d"]]


FOLDER = {
    "0.jsonl": "", "b/1.jsonl.gz": "", "2.NDJSON": "", "train/test.jsonl": "", "contest.jsonl": "", "values.jsonl": "",
    "part-train-0.jsonl": "", "b/latest.jsonl": "", "README.md": None, "dataset_infos.json": None, ".DS_Store": None,
    ".old.jsonl": "hidden", "_log/0.json": "hidden", "2.csv": "csv", "0.jsonl.bak": "unknown format",
    "1.jsonl.part": "unknown format", "test.jsonl": "another split", "b/x-TestSet.jsonl": "another split",
    "testdata.jsonl": "another split", "split=test/0.jsonl": "another split", "validation/0.jsonl": "another split",
    "data/dev-00000-of-00001.jsonl": "another split",
}  # fmt: skip


@both_kinds
def test_the_files_of_a_folder(streaming, capsys, monkeypatch):
    """Those that are not read are named, by the main process; README.md and the like are not."""
    for name in FOLDER:
        write(f"folder/{name}", json.dumps({"a": name, "b": "d"}))
    expected = sorted(name for name, why in FOLDER.items() if why == "")
    rows = rows_of("folder", len(expected) + 1, streaming)
    assert sorted(row[0] for row in rows[:-1]) == expected and rows[-1] == rows[0]
    (line,) = warnings_of(capsys)
    for why in ("hidden", "csv", "unknown format", "another split"):
        names = sorted(name for name, other in FOLDER.items() if other == why)
        assert f"{len(names)} {why} ({', '.join(names[:3])})" in line
    assert "README" not in line and "infos" not in line and "DS_Store" not in line
    script.list_files("folder")
    script.list_files("folder")
    assert len(warnings_of(capsys)) == 1
    monkeypatch.setenv("RANK", "1")
    script.list_files("folder")
    assert warnings_of(capsys) == []


@both_kinds
def test_a_file_and_its_compressed_copy(streaming, capsys):
    for name in ("1.jsonl", "1.jsonl.gz", "2.jsonl.gz"):
        write(f"folder/{name}", json.dumps({"a": name, "b": "d"}))
    assert [row[0] for row in rows_of("folder", 3, streaming)] == ["1.jsonl", "2.jsonl.gz", "1.jsonl"]
    assert "1 compressed copy (1.jsonl.gz)" in warnings_of(capsys)[0]


def test_texts_about_a_folder_are_no_rows(capsys):
    for name in ("README.txt", "LICENSE.txt", "license", "Readme.md", "1.txt"):
        write(f"folder/{name}", "a line\n")
    assert script.list_files("folder") == ["folder/1.txt"] and warnings_of(capsys) == []


def test_a_table_of_delta_lake_is_refused():
    """Its log says which of the files are of the table; others have rows that were deleted."""
    write("table/1.parquet", ""), write("table/_delta_log/00000000000000000000.json", "{}")
    with pytest.raises(script.UserError, match="^a table of Delta Lake, .*: export it as Parquet"):
        script.list_files("table")


@both_kinds
def test_links_in_a_folder(streaming):
    """Folders that links lead to are read, each once, also where they lead back."""
    write("elsewhere/2.jsonl", '{"a": "linked", "b": "d"}\n')
    write("folder/1.jsonl", ONE)
    os.symlink("../elsewhere", "folder/more")
    os.symlink("../folder", "folder/again")
    os.symlink("../elsewhere", "folder/twice")
    os.symlink("folder", "link")
    for name in ("folder", "link"):
        assert rows_of(name, 3, streaming) == [["q", "d"], ["linked", "d"], ["q", "d"]]


def test_a_folder_of_another_split(capsys):
    """It is refused; a pattern or a name says that it is meant."""
    for name in ("test-0.jsonl", "test-1.jsonl"):
        write(f"folder/{name}", ONE)
    with pytest.raises(script.UserError, match=r"^no file to read; 2 another split \(test-0.jsonl, test-1.jsonl\)$"):
        script.list_files("folder")
    assert len(script.list_files("folder/test-*.jsonl")) == 2 and script.list_files("folder/test-0.jsonl")
    assert warnings_of(capsys) == []


def test_a_folder_that_cannot_be_listed(monkeypatch):
    """Its files are not left out without a word."""
    write("folder/1.jsonl", ONE), write("folder/more/2.jsonl", ONE)
    listdir = os.listdir

    def refuse(path):
        if path.endswith("more"):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(script.UserError, match="^folder: .*Permission denied: 'folder/more'"):
        rows_of("folder", 1, False)


def test_the_files_of_a_remote_folder(capsys):
    """The same rules as on disk."""
    store = fsspec.filesystem("memory")
    for name in ("0.jsonl", "b/1[2].jsonl", "0.jsonl.bak", "testdata.jsonl", "_SUCCESS"):
        store.pipe(f"/bucket/rows/{name}", ONE.encode())
    files = script.list_files("memory://bucket/rows")
    assert [file.removeprefix("memory:///bucket/rows/") for file in files] == ["0.jsonl", "b/1[2].jsonl"]
    assert "1 unknown format (0.jsonl.bak)" in warnings_of(capsys)[0]
    store.rm("/bucket", recursive=True)


def test_folders_of_partitions(capsys):
    for language in ("de", "en"):
        write(f"hive/lang={language}/0.jsonl", ONE)
    assert rows_of("hive", 2, False) == [["q", "d"]] * 2
    (line,) = warnings_of(capsys)
    assert line.endswith("folders KEY=VALUE are not read as columns; prepare_corpus.py does so")
    rows_of("hive/lang=de", 1, False)
    assert warnings_of(capsys) == []


# -------------------------------------------------------------------------------- columns that nobody asked for


@both_kinds
def test_a_column_of_a_type_that_datasets_cannot_hold(streaming, capsys):
    """A map, as Spark writes it, beside the columns matters only if it is asked for."""
    kind = pa.map_(pa.string(), pa.string())
    rows = pa.table({"m": pa.array([[("x", "y")]] * 3, kind), "b": pa.array(["d"] * 3), "a": ["q"] * 3})
    pq.write_table(rows, "x.parquet")
    assert rows_of("x.parquet", 3, streaming) == [["q", "d"]] * 3
    assert warnings_of(capsys) == []
    assert script.find_columns(options(train_data=["x.parquet"], columns=[])) == ["b", "a"]
    with pytest.raises(script.UserError, match=r"^x.parquet: .*\['m'\] not in the dataset. .*\['b', 'a'\]"):
        rows_of("x.parquet", 3, streaming, columns=["a", "m"])


def test_only_the_columns_asked_for_are_converted():
    pq.write_table(pa.table({"a": ["q"], "b": ["d"], "c": ["e"]}), "x.parquet")
    dataset = script.open_files(["x.parquet"], streaming=False, columns=["a", "b"])
    assert dataset.data.column_names == ["a", "b"]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_the_index_of_pandas_is_no_default_column(suffix):
    if suffix == "csv":
        write("x.csv", ",a,b\n0,q,d\n1,q,d\n")
    else:
        pq.write_table(pa.table({"a": ["q"], "b": ["d"], "__index_level_0__": [0]}), "x.parquet")
    assert script.find_columns(options(train_data=[f"x.{suffix}"], columns=[])) == ["a", "b"]
    assert script.named_columns(["Unnamed: 0.1x", "unnamed", "a"]) == ["Unnamed: 0.1x", "unnamed", "a"]


# ------------------------------------------------------------------------------------ types that a reader guesses


@both_kinds
@pytest.mark.parametrize("late", [[0.5] * 4, [[0.5, 1]] * 4, "chunk"], ids=["number", "list", "chunk"])
def test_labels_that_begin_with_whole_numbers(streaming, late):
    """In another file, or after the first chunk of some 10 MB, the first fraction follows."""
    whole = 1 if late == "chunk" or late[0] == 0.5 else [1, 0]
    first = [{"a": "q", "b": "d", "s": whole}] * 4
    if late == "chunk":
        late = [0.5] * 4
        first = [{"a": "x" * 60_000, "b": "d", "s": whole}] * 200
    write_jsonl(Path("0.jsonl"), first)
    write_jsonl(Path("1.jsonl"), [{"a": "q", "b": "d", "s": label} for label in late])
    if len(first) > 4:
        Path("0.jsonl").write_text(Path("0.jsonl").read_text() + Path("1.jsonl").read_text())
        Path("1.jsonl").unlink()
    args = options(label_column=["s"], streaming=streaming, shuffle_buffer=0)
    source = script.Source("*.jsonl", 0, args)
    found, _ = script.read_rows(source.take(len(first) + 4), [source], [None, None], 0)
    labels = [row.labels if isinstance(whole, list) else row.labels[0] for row in found]
    assert labels == [whole] * len(first) + late


@both_kinds
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_labels_that_begin_with_booleans(streaming, suffix):
    for number, label in enumerate((True, 0.25)):
        rows = [{"a": "q", "b": "d", "s": label}] * 3
        if suffix == "jsonl":
            write_jsonl(Path(f"{number}.jsonl"), rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), f"{number}.parquet")
    source = script.Source(f"*.{suffix}", 0, options(label_column=["s"], streaming=streaming, shuffle_buffer=0))
    found, _ = script.read_rows(source.take(6), [source], [None, None], 0)
    assert [row.labels for row in found] == [[1.0]] * 3 + [[0.25]] * 3


@both_kinds
def test_labels_that_are_decimals_of_several_precisions(streaming):
    """As in dataset-viewer#3173."""
    for number, label in enumerate((Decimal("0.5"), Decimal("16.47135"))):
        pq.write_table(pa.table({"a": ["q"] * 3, "b": ["d"] * 3, "s": [label] * 3}), f"{number}.parquet")
    source = script.Source("*.parquet", 0, options(label_column=["s"], streaming=streaming, shuffle_buffer=0))
    found, _ = script.read_rows(source.take(6), [source], [None, None], 0)
    assert [row.labels for row in found] == [[0.5]] * 3 + [[pytest.approx(16.47135)]] * 3


@both_kinds
@pytest.mark.parametrize("later", ["['d', 'e']", ["d", "e"], {"title": "d"}])
def test_lists_and_objects_that_became_texts(streaming, later, capsys):
    """As pandas writes them to CSV, and `datasets` reads them from JSON where earlier rows have texts."""
    write_jsonl(Path("0.jsonl"), [{"_id": "0", "a": "q", "b": "[sic]"}])
    write_jsonl(Path("1.jsonl"), [{"_id": "1", "a": "q", "b": later}, {"_id": "2", "a": "q", "b": "d"}])
    source = script.Source("*.jsonl", 0, options(streaming=streaming, shuffle_buffer=0))
    args = eval_incremental.Args(corpus=["*.jsonl"], model_name_or_path=["x"], streaming=streaming)
    said = "warning: column 'b' has lists or objects that were written as texts: give all rows one type"
    for module in (script, eval_incremental):
        module.warn_once.cache_clear()
        if module is script:
            rows, _ = script.read_rows(source.take(3), [source], [None, None], 0)
            texts = [row.documents[0] for row in rows]
        else:
            chunks = eval_incremental.TextReader(args.corpus, ["_id", "b"], (), args).chunks()
            texts = [text for chunk in chunks for text in chunk.texts.to_pylist()]
        as_read = texts[1:] if isinstance(later, str) else [json.loads(text) for text in texts[1:]]  # also of "d"
        assert texts[0] == "[sic]" and as_read == [later, "d"]
        assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")] == [said]


def test_a_byte_order_mark_is_no_text():
    Path("x.txt").write_text("first\nsecond\n", encoding="utf-8-sig")
    for module in (script, eval_incremental, mine_negatives, check_overlap):
        for streaming in (False, True):
            (table,) = module.open_files(["x.txt"], streaming).iter(2)
            assert table["text"].to_pylist() == ["first", "second"]


def test_files_of_several_formats_are_no_table():
    """That of the first would be taken for all: lines of JSON for texts, and tabs for text."""
    write("1.txt", "a document\n"), write_jsonl(Path("2.jsonl"), [{"text": "d"}])
    write("folder/a.csv", "a,b\nq,d\n"), write("folder/b.tsv", "a\tb\nq\td\n")
    args = eval_incremental.Args(corpus=["1.txt", "2.jsonl"], model_name_or_path=["x"])
    with pytest.raises(eval_incremental.UserError, match="^1.txt: has files of several formats"):
        eval_incremental.TextReader(args.corpus, ["#", "text"], (), args)
    with pytest.raises(script.UserError, match="^folder: has files of several formats: write all of them in one"):
        rows_of("folder", 2, False)
    write_jsonl(Path("3.json"), [{"text": "e"}])
    (table,) = script.open_files(["2.jsonl", "3.json"], streaming=False).iter(2)
    assert table["text"].to_pylist() == ["d", "e"]


@pytest.mark.parametrize("module", [script, train_cross_encoder], ids=["bi", "cross"])
def test_a_list_alone_says_nothing_of_its_texts(module):
    """Its second positive would be trained as a negative. A list of one text, or with labels, is clear."""
    write_jsonl(Path("x.jsonl"), [{"a": "q", "b": ["d", "e"], "none": [], "y": [1, 0]}] * 20)
    write_jsonl(Path("y.jsonl"), [{"a": "q", "b": ["d"]}] * 20)

    def documents(name, *flags):
        loss = ["--loss", "bce"] if module is train_cross_encoder and "--label_column" in flags else []
        words = ["--train_data", name, "--model_name_or_path", "x", "--eval_rows", "0", *loss, *flags]
        data = module.open_data(module.parse_args(words))
        rows, _ = module.read_rows(data.sources[0].take(20), data.sources, data.lookups, 0)
        return {tuple(row.documents) for row in rows}

    with pytest.raises(module.UserError, match="'b' holds lists, of which positives and negatives are not known"):
        documents("x.jsonl", "--columns", "a", "b")
    assert documents("x.jsonl", "--columns", "a", "b", "none") == {("d",), ("e",)}
    assert documents("y.jsonl", "--columns", "a", "b") == {("d",)}
    if module is train_cross_encoder:
        assert documents("x.jsonl", "--columns", "a", "b", "--label_column", "y") == {("d", "e")}


def test_a_column_of_lists_and_texts_is_drawn_from():
    """`datasets` gives it a type of its own, of any value."""
    rows = [{"a": "q", "b": "d" if n % 2 else ["d", "e"], "c": ["n", "o"] if n % 2 else "n"} for n in range(40)]
    write_jsonl(Path("x.jsonl"), rows)
    source = script.Source("x.jsonl", 0, options(columns=["a", "b", "c"], num_negatives=1, shuffle_buffer=0))
    found, _ = script.read_rows(source.take(40), [source], [None, None], 0)
    assert {tuple(row.documents) for row in found[::2]} == {("d", "n"), ("e", "n")}
    assert {tuple(row.documents) for row in found[1::2]} == {("d", "n"), ("d", "o")}


def write_table(name, rows):
    """Write {column: cells} in the format of a name."""
    suffix = name.split(".")[1]
    table = pa.table(rows)
    if suffix == "parquet":
        pq.write_table(table, name)
    elif suffix == "arrow":
        with pa.OSFile(name, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    else:
        table.to_pandas().to_csv(name, index=False, sep="," if suffix == "csv" else "\t")


TWO, THREE = {"a": ["q"], "b": ["d"]}, {"a": ["q"], "b": ["d"], "c": ["n"]}


@both_kinds
@pytest.mark.parametrize("suffix", ["parquet", "csv", "tsv", "csv.gz"])
def test_a_column_that_only_a_later_file_has(streaming, suffix, capsys):
    """The schema of the first is that of all: negatives would be dropped without a word, as titles of a corpus."""
    for number, rows in enumerate((TWO, THREE)):
        write_table(f"{number}.{suffix}", rows)
    with pytest.raises(script.UserError, match=f"1.{suffix} has the column 'c', .*0.{suffix} has not: give each kind"):
        rows_of(f"*.{suffix}", 2, streaming, columns=["a", "b", "c"])
    assert rows_of(f"*.{suffix}", 2, streaming, columns=["a", "b"]) == [["q", "d"]] * 2
    assert warnings_of(capsys) == []
    for module in (script, eval_incremental, mine_negatives, check_overlap):
        module.warn_once.cache_clear()
        module.open_files(module.list_files(f"*.{suffix}"), streaming)
        (line,) = warnings_of(capsys)
        assert f"1.{suffix} has the column 'c', " in line and line.endswith(f"0.{suffix} has not: it is not read")


def test_a_column_that_only_a_later_arrow_file_has():
    """Mapped as it is: in the rows of the others it is null. A stream of such files is refused by `datasets`."""
    for number, rows in enumerate((TWO, THREE, TWO)):
        write_table(f"{number}.arrow", rows)
    rows = [["q", "d", None], ["q", "d", "n"], ["q", "d", None]]
    assert rows_of("*.arrow", 3, False, columns=["a", "b", "c"]) == rows
    with pytest.raises(script.UserError, match=r"1 new columns \(\{'c'\}\)"):
        rows_of("*.arrow", 3, True, columns=["a", "b", "c"])


def test_a_table_of_the_same_name_and_time():
    """As after `cp -p` or `rsync -t`: what `datasets` has made of the old file is not read."""
    for suffix in ("jsonl", "csv"):
        for text in ("old", "new"):
            write(f"x.{suffix}", f'{{"a": "{text}", "b": "d"}}\n' if suffix == "jsonl" else f"a,b\n{text},d\n")
            os.utime(f"x.{suffix}", (1e9, 1e9))
            assert rows_of(f"x.{suffix}", 1, False) == [[text, "d"]]
            for module in (eval_incremental, mine_negatives, check_overlap):
                assert module.open_files([f"x.{suffix}"], streaming=False)[:]["a"].to_pylist() == [text]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_ids_that_begin_with_zeros_in_another_file(suffix):
    """Whole numbers of the first file do not make numbers of them."""
    for number, ids in enumerate(([1, 2], ["007", "7"])):
        rows = [{"_id": value, "text": f"text {value}"} for value in ids]
        if suffix == "jsonl":
            write_jsonl(Path(f"{number}.jsonl"), rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), f"{number}.parquet")
    lookup = script.TextLookup([f"*.{suffix}"], ["_id", "text"])
    assert lookup.texts(["1", "007", "7"]) == ["text 1", "text 007", "text 7"]
    args = eval_incremental.Args(corpus=[f"*.{suffix}"], model_name_or_path=["x"])
    (chunk,) = eval_incremental.TextReader(args.corpus, [], ("_id", "text"), args).chunks()
    assert chunk.ids.to_pylist() == ["1", "2", "007", "7"]
    texts = mine_negatives.read_texts("corpus", [f"*.{suffix}"], [])
    assert texts.index.tolist() == ["1", "2", "007", "7"]


@both_kinds
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_ids_of_rows_that_begin_with_zeros_in_another_file(streaming, suffix):
    """Also in lists: whole numbers of the first file do not make numbers of them."""
    for number, value in enumerate((7, "007")):
        rows = [{"a": value, "b": value, "c": [value]}]
        if suffix == "jsonl":
            write_jsonl(Path(f"{number}.jsonl"), rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), f"{number}.parquet")
    ids = {"queries": ["q"], "corpus": ["d"], "columns": ["a", "b", "c"]}
    assert rows_of(f"*.{suffix}", 2, streaming, **ids) == [["7", "7", ["7"]], ["007", "007", ["007"]]]
    assert rows_of(f"*.{suffix}", 1, streaming, **ids | {"corpus": [], "columns": ["a", "b"]}) == [["7", 7]]


def test_ids_that_are_read_as_rounded_numbers():
    write_jsonl(Path("x.jsonl"), [{"_id": 12345678901234567890, "text": "d"}])
    for module in (eval_incremental, mine_negatives, check_overlap):
        (table,) = module.open_files(["x.jsonl"]).iter(1)
        with pytest.raises(
            module.UserError, match="^column '_id' holds double, .*large whole numbers, rounded: rewrite"
        ):
            module.as_texts(table["_id"], "_id", ids=True)


@both_kinds
@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_texts_in_another_encoding(streaming, encoding):
    Path("x.csv").write_text("a,b\né,d\n", encoding=encoding)
    with pytest.raises(script.UserError, match="^x.csv: not in UTF-8: save it in that encoding .*can't decode byte"):
        rows_of("x.csv", 1, streaming)


@both_kinds
@pytest.mark.parametrize("value", ["2020-01-01", "2020-01-01T00:00:00", ["2020-01-01"]])
def test_texts_that_look_like_dates(streaming, value):
    """`datasets` would change them; where they are not asked for, nothing is said."""
    write_jsonl(Path("x.jsonl"), [{"a": "q", "b": value, "c": "d"}] * 3)
    with pytest.raises(script.UserError, match="^x.jsonl: column 'b' has texts like 2020.* by prepare_corpus.py$"):
        rows_of("x.jsonl", 3, streaming)
    assert rows_of("x.jsonl", 1, streaming, columns=["a", "c"]) == [["q", "d"]]


def test_ids_that_look_like_dates():
    write_jsonl(Path("x.jsonl"), [{"_id": "2020-01-01", "text": "d"}])
    with pytest.raises(script.UserError, match="^column '_id' has texts like 2020-01-01, .* prepare_corpus.py$"):
        script.TextLookup(["x.jsonl"], ["_id", "text"])
    for module in (eval_incremental, mine_negatives, check_overlap):
        (table,) = module.open_files(["x.jsonl"]).iter(1)
        with pytest.raises(module.UserError, match="^column '_id' holds timestamp.*: rewrite it by prepare_corpus.py"):
            module.as_texts(table["_id"], "_id", ids=True)


NULL_LISTS = {
    "fixed": pa.array([["d", "ef"], None, ["g", "h"]], pa.list_(pa.string(), 2)),
    "list": pa.array([["d", "ef"], None, ["g", "h"]]),
    "masked": pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 6], pa.int32()),
        pa.array(["d", "ef", "hidden", "", "g", "h"]),
        mask=pa.array([False, True, False]),
    ),
    "nested": pa.array([[["d"], ["ef"]], None, [["g"], None, ["h"]]]),
}


@pytest.mark.parametrize("kind", NULL_LISTS)
def test_the_length_of_null_lists(kind):
    """Arrow allows values below a null list: they are no texts of the row."""
    table = pa.table({"a": ["q"] * 3, "b": NULL_LISTS[kind]})
    source = SimpleNamespace(args=options(), number=0)
    assert script.Source.add_numbers(source, table, 0)[script.LENGTH].to_pylist() == [4, 1, 3]
    if kind != "nested":
        texts, rows = check_overlap.row_texts(table, ["b"])
        assert texts.to_pylist() == ["d", "ef", "g", "h"] and rows.tolist() == [0, 0, 2, 2]


# ------------------------------------------------------------------------------------------------- other machines


@pytest.fixture
def serve():
    """Return a function that serves the current folder by HTTP, by a handler, and returns the server's URL."""
    servers = []

    def start(handler):
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=os.getcwd())))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class NoParts(Quiet):
    """Refuses the size of a file, and parts of it."""

    def do_HEAD(self):
        self.send_error(403)

    def do_GET(self):
        if "Range" in self.headers:
            self.send_error(503)
        else:
            super().do_GET()


def test_the_suffix_of_a_url():
    assert script.file_suffix("https://host/x.parquet?download=true") == ".parquet"
    assert script.file_suffix("http://host/x.JSONL.GZ?a=b.csv") == ".jsonl"
    assert script.file_suffix("https://host/rows?file=x.jsonl") is None
    assert script.file_suffix("rows-?.parquet") == script.file_suffix("s3://bucket/rows-?.parquet") == ".parquet"


@both_kinds
@pytest.mark.parametrize("suffix", ["parquet", "jsonl.gz", "tsv"])
def test_a_url_with_a_query(streaming, serve, suffix, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    if suffix == "parquet":
        pq.write_table(pa.table({"a": ["q"], "b": ["d"]}), "x.parquet")
    else:
        write(f"x.{suffix}", ONE if "json" in suffix else "a\tb\nq\td\n")
    url = f"{serve(Quiet)}/x.{suffix}?download=true"
    assert rows_of(url, 2, streaming) == [["q", "d"]] * 2
    assert script.data_fingerprint([url])


def test_a_server_that_refuses_parts_of_a_file(serve, monkeypatch):
    """The fingerprint of a source does not need them."""
    write("x.jsonl", ONE)
    url = f"{serve(NoParts)}/x.jsonl"
    assert len(script.data_fingerprint([url])) == 16 and script.data_fingerprint([url]) != script.data_fingerprint([])


@both_kinds
@pytest.mark.parametrize("place", [0, 15], ids=["between frames", "within a frame"])
def test_a_zst_file_that_is_cut(streaming, place):
    """One cut between two frames is a whole, shorter file; one cut within a frame is refused."""
    lines = [f'{{"a": "q {number}", "b": "{np.random.default_rng(number).bytes(99).hex()}"}}\n' for number in range(9)]
    frames = []
    for line in lines:
        write("line.jsonl.zst", line)
        frames.append(Path("line.jsonl.zst").read_bytes())
    Path("x.jsonl.zst").write_bytes(b"".join(frames[:5]) + frames[5][:place])
    if place:
        with pytest.raises(script.UserError, match="^x.jsonl.zst: .*[Cc]ompressed file ended"):
            rows_of("x.jsonl.zst", 6, streaming)
    else:
        assert rows_of("x.jsonl.zst", 5, streaming)[-1][0] == "q 4"
