"""Tables are read as they are written, whatever their format. What is refused: tests/test_contract.py."""

import http.server
import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import mark_slow, write_jsonl

import check_overlap
import eval_incremental
import mine_negatives
import train_bi_encoder as script

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
both_kinds = pytest.mark.parametrize("streaming", [False, True], ids=["mapped", "streaming"])


def options(**changed):
    words = "--train_data unused --model_name_or_path unused --columns a b --max_steps 1 --loss CoSENTLoss"
    args = script.parse_args(words.split())
    for name, value in changed.items():
        setattr(args, name, value)
    return args


def rows_of(name, count, streaming, **changed):
    """Return the next `count` rows of a source, in the order of its files, as lists of cells."""
    source = script.Source(str(name), 0, options(streaming=streaming, shuffle_buffer=0, **changed))
    table = source.take(count).drop_columns([script.SOURCE, script.NUMBER, script.LENGTH])
    return [list(cells.values()) for cells in table.to_pylist()]


def write_values(suffix, name, values, **row):
    """Write a file of rows for each list of values of a column: 0.suffix, ..."""
    for number, part in enumerate(values):
        rows = [{name: value, **row} for value in part]
        if suffix == "jsonl":
            write_jsonl(Path(f"{number}.jsonl"), rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), f"{number}.{suffix}")


def write(name, text):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    with fsspec.open(name, "wt", compression="infer", newline="") as file:
        file.write(text)
    return name


WRITTEN = ["null", "NA", "None", "nan", "N/A", "0016", "9007199254740993", "1.0", "True", "1e5", "-", " x ", "'tis",
           "#n"]  # fmt: skip


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


@pytest.mark.parametrize("place, streaming", [(2, True), (50, False), (20_001, True)])
def test_a_row_with_more_fields_than_the_header(streaming, place):
    """It is refused with its line: its columns would shift. Of CSV: tests/test_contract.py."""
    rows = [["q", "d", "more"] if number == place else ["q", "d"] for number in range(1, max(place, 50) + 10)]
    file = write("x.tsv", "\n".join("\t".join(row) for row in [["a", "b"], *rows]))
    with pytest.raises(script.UserError, match=rf"^x.tsv: .*line {place + 1}\b"):
        rows_of(file, len(rows), streaming)


@both_kinds
def test_rows_that_end_in_a_separator(streaming):
    assert rows_of(write("x.csv", "a,b\nq,d,\nr,e,\n"), 2, streaming) == [["q", "d"], ["r", "e"]]


ONE = '{"a": "q", "b": "d"}\n'


@both_kinds
@pytest.mark.parametrize("name, text", [("x.jsonl", ""), ("x.csv", ""), ("header.csv", "a,b\n")])
def test_only_empty_files(streaming, name, text):
    with pytest.raises(script.UserError, match=f"^{name}: (contains no row|No columns to parse from file)"):
        rows_of(write(name, text), 1, streaming)


TEXTS = pa.array(["q 0", "q 1", "q 2", "q 3"])
LISTS = [["d 0", "e 0"], ["d 1", "e 1"], ["d 2", "e 2"], ["d 3", "e 3"]]
TYPES = {
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), TEXTS.to_pylist()),
    "fixed_size_list": (pa.list_(pa.string(), 2), LISTS),
    "large_list": (pa.large_list(pa.string()), LISTS),
}


@both_kinds
@pytest.mark.parametrize("suffix", ["parquet", "stream.arrow", "file.arrow"])
@pytest.mark.parametrize("kind", TYPES)
def test_types_of_texts_and_lists(streaming, suffix, kind):
    """They are read, shuffled, measured and trained on alike; the second text of a list is no negative."""
    data_type, values = TYPES[kind]
    table = pa.table({"a": TEXTS, "b": pa.array(values, data_type), "c": [["n"]] * 4})
    if suffix == "parquet":
        pq.write_table(table, "x.parquet")
    else:
        with (pa.ipc.new_file if "file" in suffix else pa.ipc.new_stream)(f"x.{suffix}", table.schema) as writer:
            writer.write_table(table)
    assert rows_of(f"x.{suffix}", 4, streaming) == [[f"q {i}", values[i]] for i in range(4)]
    args = options(streaming=streaming, shuffle_buffer=3, columns=["a", "b", "c"])
    source = script.Source(f"x.{suffix}", 0, args)
    table = source.take(8)
    assert table[script.LENGTH].to_pylist() == [4 + (6 if "list" in kind else 3)] * 8
    found, skipped = script.read_rows(table, [source], [None, None], 0)
    assert not skipped and all(row.documents[0][-1] == row.query[-1] for row in found)
    assert all(row.documents[1:] == ["n"] for row in found)


@both_kinds
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_list_that_is_empty_throughout_a_file(streaming, order):
    """`datasets` would type it as a list of nulls, and fail at the first text."""
    for name in order:
        write_jsonl(Path(f"{order.index(name)}.jsonl"), [{"a": "q", "b": ["d"] if name == "a" else []}] * 3)
    expected = [["q", ["d"] if name == "a" else []] for name in order for _ in range(3)]
    assert rows_of("*.jsonl", 6, streaming) == expected


@both_kinds
def test_sources_of_different_types(streaming):
    """One line names the sources and the column."""
    write_jsonl(Path("text.jsonl"), [{"a": "q", "b": "d"}] * 20)
    write_jsonl(Path("list.jsonl"), [{"a": "q", "b": ["d"]}] * 20)
    args = options(train_data=["text.jsonl", "list.jsonl"], streaming=streaming, eval_rows=0)
    data = script.open_data(args)
    said = r"^the columns of text.jsonl, list.jsonl differ: .*Field b has incompatible types"
    with pytest.raises(script.UserError, match=said):
        next(script.row_batches(data.sources, data.weights, args))
    data = script.open_data(replace(args, eval_rows=4, mix_by="batch"))  # alone, each is read as it is
    assert [rows[0].documents for _, rows in data.held_out] == [["d"], ["d"]]
    batches = script.row_batches(data.sources, data.weights, replace(args, mix_by="batch"))
    assert {str(next(batches)[0]["b"].type) for _ in range(2)} == {"large_string", "list<item: string>"}


@both_kinds
@pytest.mark.parametrize("name", ["pairs[1].jsonl", "run[2]/x.jsonl", "a*b?.jsonl", "run:1/x.jsonl", "__x/y.jsonl"])
def test_what_is_on_disk_is_no_pattern(streaming, name):
    """Neither a pattern nor an id with a split: a file is read by its name."""
    for other in ("pairs1.jsonl", "run2/x.jsonl", "aab1.jsonl"):  # what the names match as patterns
        write(other, '{"a": "another", "b": "file"}\n')
    write(name, ONE)
    assert rows_of(name, 1, streaming) == [["q", "d"]]


@both_kinds
def test_a_column_of_a_type_that_datasets_cannot_hold(streaming):
    """A map, as Spark writes it, beside the columns matters only if it is asked for."""
    kind = pa.map_(pa.string(), pa.string())
    rows = pa.table({"m": pa.array([[("x", "y")]] * 3, kind), "b": pa.array(["d"] * 3), "a": ["q"] * 3})
    pq.write_table(rows, "x.parquet")
    assert rows_of("x.parquet", 3, streaming) == [["q", "d"]] * 3
    with pytest.raises(script.UserError, match="^x.parquet: .*map<string, string"):
        rows_of("x.parquet", 3, streaming, columns=["a", "m"])


@both_kinds
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_labels_that_begin_with_booleans(streaming, suffix):
    write_values(suffix, "s", [[True] * 3, [0.25] * 3], a="q", b="d")
    source = script.Source(f"*.{suffix}", 0, options(label_column=["s"], streaming=streaming, shuffle_buffer=0))
    found, _ = script.read_rows(source.take(6), [source], [None, None], 0)
    assert [row.labels for row in found] == [[1.0]] * 3 + [[0.25]] * 3


@both_kinds
def test_a_byte_order_mark_is_no_text(streaming):
    Path("x.txt").write_text("first\nsecond\n", encoding="utf-8-sig")
    (table,) = script.open_files(["x.txt"], streaming).iter(2)
    assert table["text"].to_pylist() == ["first", "second"]


def test_a_list_alone_says_nothing_of_its_texts():
    """Its second positive would be trained as a negative. A list of one text is clear."""
    write_jsonl(Path("x.jsonl"), [{"a": "q", "b": ["d", "e"], "c": ["f"], "none": []}] * 20)

    def documents(*columns):
        words = ["--train_data", "x.jsonl", "--model_name_or_path", "x", "--eval_rows", "0", "--columns", *columns]
        data = script.open_data(script.parse_args(words))
        rows, _ = script.read_rows(data.sources[0].take(20), data.sources, data.lookups, 0)
        return {tuple(row.documents) for row in rows}

    with pytest.raises(script.UserError, match="'b' holds lists, of which positives and negatives are not known"):
        documents("a", "b")
    assert documents("a", "b", "none") == {("d",), ("e",)} and documents("a", "c") == {("f",)}


def test_a_table_of_the_same_name_and_time():
    """As after `cp -p` or `rsync -t`: what `datasets` has made of the old file is not read."""
    for suffix in ("jsonl", "csv"):
        for text in ("old", "new"):
            write(f"x.{suffix}", f'{{"a": "{text}", "b": "d"}}\n' if suffix == "jsonl" else f"a,b\n{text},d\n")
            os.utime(f"x.{suffix}", (1e9, 1e9))
            assert rows_of(f"x.{suffix}", 1, False) == [[text, "d"]]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_ids_that_begin_with_zeros_in_another_file(suffix):
    """Whole numbers of the first file do not make numbers of them."""
    write_values(suffix, "_id", [[1, 2], ["007", "7"]], text="a text")
    assert script.TextLookup([f"*.{suffix}"], ["_id", "text"]).texts(["1", "007", "07"]) == ["a text", "a text", None]
    args = eval_incremental.Args(corpus=[f"*.{suffix}"], model_name_or_path=["x"])
    (chunk,) = eval_incremental.open_texts(args.corpus, ["_id", "text"], "corpus", args).chunks()
    texts = mine_negatives.read_texts("corpus", [f"*.{suffix}"], [])
    assert chunk.ids.to_pylist() == texts.index.tolist() == ["1", "2", "007", "7"]


@both_kinds
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_ids_of_rows_that_begin_with_zeros_in_another_file(streaming, suffix):
    """Also in lists: whole numbers of the first file do not make numbers of them."""
    ids = {"queries": ["q"], "corpus": ["d"]}
    write_values(suffix, "b", [[7], ["007"]], a="q")
    assert rows_of(f"*.{suffix}", 2, streaming, **ids) == [["q", "7"], ["q", "007"]]
    assert rows_of(f"*.{suffix}", 1, streaming, queries=["q"]) == [["q", 7]]
    write_values(suffix, "b", [[[7]], [["007"]]], a="q")
    assert rows_of(f"*.{suffix}", 2, streaming, **ids) == [["q", ["7"]], ["q", ["007"]]]


def test_ids_that_look_like_dates():
    write_jsonl(Path("x.jsonl"), [{"_id": "2020-01-01", "text": "d"}])
    message = "^column '_id' has timestamp.*, not texts.* prepare_corpus.py SOURCE --output_dir DIR$"
    with pytest.raises(script.UserError, match=message):
        script.TextLookup(["x.jsonl"], ["_id", "text"])


NULL_LISTS = {
    "fixed": pa.array([["d", "ef"], None, ["g", "h"]], pa.list_(pa.string(), 2)),
    "large": pa.LargeListArray.from_arrays(pa.array([0, 2, 4, 6], pa.int64()),
                                           pa.array(["d", "ef", "hidden", "", "g", "h"]),
                                           mask=pa.array([False, True, False])),
    "nested": pa.array([[["d"], ["ef"]], None, [["g"], None, ["h"]]]),
}  # fmt: skip


@pytest.mark.parametrize("kind", NULL_LISTS)
def test_the_length_of_null_lists(kind):
    """Arrow allows values below a null list: they are no texts of the row."""
    table = pa.table({"a": ["q"] * 3, "b": NULL_LISTS[kind]})
    source = SimpleNamespace(args=options(), index=0, position=script.Position())
    assert script.Source.add_numbers(source, table, 0)[script.LENGTH].to_pylist() == [4, 1, 3]
    if kind != "nested":
        texts, rows = check_overlap.row_texts(table, ["b"])
        assert texts.to_pylist() == ["d", "ef", "g", "h"] and rows.tolist() == [0, 0, 2, 2]


@both_kinds
def test_values_below_a_null_list_are_of_no_row(streaming):
    """`datasets` gave those of large lists to the next row, where it cast them to lists."""
    table = pa.table({"a": ["q"] * 3, "b": NULL_LISTS["large"]})
    with pa.ipc.new_stream("x.arrow", table.schema) as writer:
        writer.write_table(table)
    assert rows_of("x.arrow", 3, streaming) == [["q", ["d", "ef"]], ["q", None], ["q", ["g", "h"]]]


@pytest.fixture
def url():
    """URL of a server of the current folder, by Handler."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=os.getcwd()))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


class Handler(http.server.SimpleHTTPRequestHandler):
    """Refuses the size of files whose name begins with x, and parts of them."""

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        if self.path.startswith("/x"):
            self.send_error(403)
        else:
            super().do_HEAD()

    def do_GET(self):
        if self.path.startswith("/x") and "Range" in self.headers:
            self.send_error(503)
        else:
            super().do_GET()


def test_the_suffix_of_a_url():
    assert script.file_suffix("https://host/x.parquet?download=true") == ".parquet"
    assert script.file_suffix("http://host/x.JSONL.GZ?a=b.csv") == ".jsonl"
    assert script.file_suffix("https://host/rows?file=x.jsonl") is None
    assert script.file_suffix("rows-?.parquet") == script.file_suffix("s3://bucket/rows-?.parquet") == ".parquet"


@both_kinds
@pytest.mark.parametrize("suffix", mark_slow(["parquet", "jsonl.gz", "tsv"], ["jsonl.gz"]))
def test_a_url_with_a_query(streaming, url, suffix, monkeypatch):
    """It has the rows and the fingerprint of the local file, which needs no parts of it."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    if suffix == "parquet":
        pq.write_table(pa.table({"a": ["q"], "b": ["d"]}), f"y.{suffix}")
    else:
        write(f"y.{suffix}", ONE if "json" in suffix else "a\tb\nq\td\n")
    assert rows_of(f"{url}/y.{suffix}?download=true", 2, streaming) == [["q", "d"]] * 2
    assert script.data_fingerprint([f"{url}/y.{suffix}"]) == script.data_fingerprint([f"y.{suffix}"])
    write("x.jsonl", ONE)
    assert len(script.data_fingerprint([f"{url}/x.jsonl"])) == 16
