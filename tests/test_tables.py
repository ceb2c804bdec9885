"""Tables are read as they are written, whatever their format. What is refused: tests/test_contract.py."""

import http.server
import json
import os
import threading
from dataclasses import replace
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
def test_rows_that_end_in_a_separator(streaming):
    assert rows_of(write("x.csv", "a,b\nq,d,\nr,e,\n"), 2, streaming) == [["q", "d"], ["r", "e"]]


# -------------------------------------------------------------------------------------------------- empty files

ONE = '{"a": "q", "b": "d"}\n'
EMPTY = {"jsonl": "", "csv": "", "header.csv": "a,b\n"}


@both_kinds
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "header.csv"])
def test_only_empty_files(streaming, suffix):
    with pytest.raises(script.UserError, match=f"^x.{suffix}: (contains no row|No columns to parse from file)"):
        rows_of(write(f"x.{suffix}", EMPTY[suffix]), 1, streaming)


# ---------------------------------------------------------------------------------------------------- Arrow types

TEXTS = pa.array(["q 0", "q 1", "q 2", "q 3"])
LISTS = [["d 0", "e 0"], ["d 1", "e 1"], ["d 2", "e 2"], ["d 3", "e 3"]]
TYPES = {
    "large_string": (pa.large_string(), TEXTS.to_pylist()),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), TEXTS.to_pylist()),
    "fixed_size_list": (pa.list_(pa.string(), 2), LISTS),
    "large_list": (pa.large_list(pa.string()), LISTS),
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
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_list_that_is_empty_throughout_a_file(streaming, order):
    """`datasets` would type it as a list of nulls, and fail at the first text."""
    for name in order:
        write_jsonl(Path(f"{order.index(name)}.jsonl"), [{"a": "q", "b": ["d"] if name == "a" else []}] * 3)
    expected = [["q", ["d"] if name == "a" else []] for name in order for _ in range(3)]
    assert rows_of("*.jsonl", 6, streaming) == expected


# -------------------------------------------------------------------------------------------- what does not fit


@both_kinds
def test_sources_of_different_types(streaming):
    """One line names the sources and the column."""
    write_jsonl(Path("text.jsonl"), [{"a": "q", "b": "d"}] * 20)
    write_jsonl(Path("list.jsonl"), [{"a": "q", "b": ["d"]}] * 20)
    args = options(train_data=["text.jsonl", "list.jsonl"], streaming=streaming, eval_rows=0)
    data = script.open_data(args)
    with pytest.raises(
        script.UserError, match=r"^the columns of text.jsonl, list.jsonl differ: .*Field b has incompatible types"
    ):
        next(script.row_batches(data.sources, data.weights, args))
    data = script.open_data(replace(args, eval_rows=4, mix_by="batch"))  # alone, each is read as it is
    assert [rows[0].documents for _, rows in data.held_out] == [["d"], ["d"]]
    batches = script.row_batches(data.sources, data.weights, replace(args, mix_by="batch"))
    assert {str(next(batches)[0]["b"].type) for _ in range(2)} == {"string", "list<item: string>"}


def test_several_configurations():
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("pair", "triplet"))
    write("repo/README.md", f"---\nconfigs:\n{configs}---\n")
    for name in ("pair", "triplet"):
        write(f"repo/{name}.jsonl", json.dumps({"a": name, "b": "d"}))
    with pytest.raises(script.UserError, match=r"^repo: .*\['pair', 'triplet'\]"):
        rows_of("repo", 1, False)
    assert rows_of("repo:triplet:train", 1, False) == [["triplet", "d"]]


# ----------------------------------------------------------------------------------------------- what a source is


@both_kinds
@pytest.mark.parametrize("name", ["pairs[1].jsonl", "run[2]/x.jsonl", "a*b?.jsonl", "run:1/x.jsonl", "__x/y.jsonl"])
def test_what_is_on_disk_is_no_pattern(streaming, name):
    """Neither a pattern nor an id with a split: a file is read by its name."""
    for other in ("pairs1.jsonl", "run2/x.jsonl", "aab1.jsonl"):  # what the names match as patterns
        write(other, '{"a": "another", "b": "file"}\n')
    write(name, ONE)
    assert rows_of(name, 1, streaming) == [["q", "d"]]


# -------------------------------------------------------------------------------- columns that nobody asked for


@both_kinds
def test_a_column_of_a_type_that_datasets_cannot_hold(streaming):
    """A map, as Spark writes it, beside the columns matters only if it is asked for."""
    kind = pa.map_(pa.string(), pa.string())
    rows = pa.table({"m": pa.array([[("x", "y")]] * 3, kind), "b": pa.array(["d"] * 3), "a": ["q"] * 3})
    pq.write_table(rows, "x.parquet")
    assert rows_of("x.parquet", 3, streaming) == [["q", "d"]] * 3
    with pytest.raises(script.UserError, match="^x.parquet: .*map<string, string"):
        rows_of("x.parquet", 3, streaming, columns=["a", "m"])


def test_only_the_columns_asked_for_are_converted():
    pq.write_table(pa.table({"a": ["q"], "b": ["d"], "c": ["e"]}), "x.parquet")
    dataset = script.open_files(["x.parquet"], streaming=False, columns=["a", "b"])
    assert dataset.data.column_names == ["a", "b"]


# ------------------------------------------------------------------------------------ types that a reader guesses


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


def test_a_byte_order_mark_is_no_text():
    Path("x.txt").write_text("first\nsecond\n", encoding="utf-8-sig")
    for module in (script, eval_incremental, mine_negatives, check_overlap):
        for streaming in (False, True):
            (table,) = module.open_files(["x.txt"], streaming).iter(2)
            assert table["text"].to_pylist() == ["first", "second"]


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
    (chunk,) = eval_incremental.open_texts(args.corpus, ["_id", "text"], "corpus", args).chunks()
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


def test_ids_that_look_like_dates():
    write_jsonl(Path("x.jsonl"), [{"_id": "2020-01-01", "text": "d"}])
    with pytest.raises(script.UserError, match="^column '_id' has timestamp.*, not texts.* prepare_corpus.py$"):
        script.TextLookup(["x.jsonl"], ["_id", "text"])


NULL_LISTS = {
    "fixed": pa.array([["d", "ef"], None, ["g", "h"]], pa.list_(pa.string(), 2)),
    "list": pa.array([["d", "ef"], None, ["g", "h"]]),
    "large": pa.LargeListArray.from_arrays(
        pa.array([0, 2, 4, 6], pa.int64()),
        pa.array(["d", "ef", "hidden", "", "g", "h"]),
        mask=pa.array([False, True, False]),
    ),
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


@both_kinds
def test_values_below_a_null_list_are_of_no_row(streaming):
    """`datasets` gave those of large lists to the next row, where it cast them to lists."""
    table = pa.table({"a": ["q"] * 3, "b": NULL_LISTS["large"]})
    with pa.ipc.new_stream("x.arrow", table.schema) as writer:
        writer.write_table(table)
    assert rows_of("x.arrow", 3, streaming) == [["q", ["d", "ef"]], ["q", None], ["q", ["g", "h"]]]


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
