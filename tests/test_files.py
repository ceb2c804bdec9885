"""Files and ids in all scripts: what is regular is read as it was written, the rest refused in one line."""

import csv
import gzip
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest
from conftest import write_rows

import check_overlap
import eval_incremental
import mine_negatives
import prepare_corpus
import train_bi_encoder

SCRIPTS = {script.__name__: script for script in (train_bi_encoder, eval_incremental, mine_negatives, check_overlap)}
BIG = 15794028255413092000  # above 2**63
both_ways = pytest.mark.parametrize("streaming", [False, True])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, tmp_path):
    """`datasets` finds types of JSON anew in every 2,000 bytes, not in every 10 MB."""
    monkeypatch.chdir(tmp_path)
    for script in SCRIPTS.values():
        monkeypatch.setitem(script.FORMATS, ".jsonl", ("json", {"chunksize": 2000}))


def prepare(*words):
    """Run the command that refusals name; return the files that it writes."""
    shutil.rmtree("made", ignore_errors=True)
    prepare_corpus.print_once.cache_clear()
    prepare_corpus.main(prepare_corpus.parse_args([*words, "--output_dir", "made"]))
    return sorted(map(str, Path("made").glob("*")))


def read(files, streaming=False, columns=()):
    """Return [[id, text], ...] as the evaluator reads files, in order; by default of BEIR's columns."""
    args = eval_incremental.Args(streaming=streaming)
    return eval_incremental.open_texts(files, columns, eval_incremental.DOCUMENT_COLUMNS, args).frame().values.tolist()


def mine(files, columns=()):
    """Return [[id, text], ...] as the miner reads files."""
    return [[name, text] for name, text in mine_negatives.read_texts("corpus", files, list(columns)).items()]


def refusal(call, *given):
    """Return the one line of a refusal."""
    errors = [script.UserError for script in (*SCRIPTS.values(), prepare_corpus)]
    with pytest.raises(tuple(errors)) as error:
        call(*given)
    assert "\n" not in str(error.value)
    return str(error.value)


def source(file, streaming, *columns):
    """Return the Source of a trainer, in the order of the file."""
    words = ["--train_data", file, "--columns", *columns, "--model_name_or_path", "x", "--shuffle_buffer", "0"]
    args = train_bi_encoder.parse_args([*words, *["--streaming", "--max_steps", "1"] * streaming])
    return train_bi_encoder.Source(file, 0, args)


@both_ways
def test_a_column_named_number_sign(streaming):
    """It has the ids, as in the miner; # stands for row numbers where there is none (field: Pokemon.csv)."""
    rows = [{"#": f"{n}", "name": f"text {n}"} for n in range(1, 4)]
    file = write_rows("x.csv", rows)
    expected = [list(row.values()) for row in rows]
    assert read([file], streaming, ["#", "name"]) == mine([file], ["#", "name"]) == expected
    file = write_rows("y.csv", [{"name": "a"}, {"name": "b"}])
    assert read([file], streaming, ["#", "name"]) == [["0", "a"], ["1", "b"]]
    assert "no column ['#'], but ['name']" in refusal(mine, [file], ["#", "name"])
    assert "no column ['#'], but ['name']" in refusal(read, [file], streaming, ["name", "#"])


@both_ways
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv", "jsonl"])
def test_a_title_that_only_later_files_have(streaming, suffix):
    """It was left out without a word, in whatever order the files are named."""
    files = [write_rows(f"0.{suffix}", [{"_id": "1", "text": "a"}]),
             write_rows(f"1.{suffix}", [{"_id": "2", "title": "TITLE", "text": "b"}])]  # fmt: skip
    for given in (files, files[::-1]):
        for line in (refusal(read, given, streaming), refusal(mine, given)):
            assert "the same columns" in line and "prepare_corpus.py" in line
    made = prepare(*files)
    assert read(made, streaming) == mine(made) == [["1", "a"], ["2", "TITLE b"]]


@both_ways
def test_columns_that_one_file_lacks(streaming):
    """Of Arrow streams they were null; check_overlap's streams of CSV ended in a traceback; --annotate and --output
    lost columns that only later files have."""
    for suffix in ("arrow", "csv"):
        write_rows(f"0.{suffix}", [{"a": "q", "b": "d"}]), write_rows(f"1.{suffix}", [{"a": "q"}])
        line = refusal(lambda: source(f"*.{suffix}", streaming, "a", "b").take(2))  # noqa: B023
        assert "the same columns" in line and "prepare_corpus.py" in line
        for files in (["0", "1"], ["1", "0"]):
            files = [f"{file}.{suffix}" for file in files]
            with pytest.raises(check_overlap.UserError, match="same columns"):
                check_overlap.open_files(files)
    write_rows("0.parquet", [{"a": "q"}]), write_rows("1.parquet", [{"a": "q", "b": "d"}])
    with pytest.raises(check_overlap.UserError, match="same columns"):
        check_overlap.open_files(["1.parquet", "0.parquet"])


@pytest.mark.parametrize("mark", ["\t", "\r", "\n"])
def test_ids_that_no_run_file_can_hold(mark):
    for name in (f"d{mark}", f"{mark}d", f"d{mark}x"):
        for suffix in ("jsonl", "parquet"):
            file = write_rows(f"x.{suffix}", [{"_id": "d0", "text": "a"}, {"_id": name, "text": "b"}])
            said = f"column '_id': row 1, counted from 0, has the id {name!r}: write another, without tabs"
            for call in (read, mine):
                assert said in refusal(call, [file])
        write_rows("q.jsonl", [{"query-id": "q", "corpus-id": name, "score": 1}])
        with pytest.raises(eval_incremental.UserError, match="column 'corpus-id': row 0, .* without tabs and line br"):
            eval_incremental.read_qrels("q.jsonl")
    rows = [{"_id": 'd 0, "x"', "text": "a\tb\nc"}]  # of texts they are nothing special, nor are blanks of ids
    assert read([write_rows("x.jsonl", rows)]) == mine(["x.jsonl"]) == [[*rows[0].values()]]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_texts_without_an_id_are_refused(suffix):
    file = write_rows(f"x.{suffix}", [{"_id": "d0", "text": "a"}, {"_id": None, "text": "b"}])
    for call in (read, mine):
        assert "column '_id': row 1, counted from 0, has no id" in refusal(call, [file])


LATER = {"dates": ["2020-01-02"], "times": ["2020-01-02T10:20:30"], "numbers": [BIG + 1, 7, BIG + 2]}
LATER["numbers of another length"] = [10**20]


@both_ways
@pytest.mark.parametrize("later", LATER.values(), ids=LATER)
def test_ids_are_what_was_written_in_later_rows_of_json(streaming, later):
    """pyarrow makes times and fractions of them; neighbours become equal (field: nlohmann/json#178, jq#1399)."""
    small = isinstance(later[0], int)
    rows = [{"_id": n if small else f"d{n}", "text": f"text {n} " + "x" * 100} for n in range(100)]
    rows += [{"_id": later[n % len(later)], "text": f"text {n} " + "x" * 100} for n in range(100, 200)]
    file = write_rows("x.jsonl", rows)
    for line in (refusal(read, [file], streaming), refusal(mine, [file])):
        assert re.search(r"row \d+, .* the id '[\d.]+[e+\d: -]+.*' *: write another, .* prepare_corpus.py", line), line
    assert read(prepare(file), streaming) == [[str(row["_id"]), row["text"]] for row in rows]
    write_rows("q.jsonl", [{"query-id": "q", "corpus-id": row["_id"], "score": 1} for row in rows])
    with pytest.raises(mine_negatives.UserError, match="has the id"):
        mine_negatives.read_qrels("q.jsonl")


@both_ways
@pytest.mark.parametrize("first", ["a text", None])
def test_objects_in_later_rows_of_json(first, streaming):
    """`datasets` made texts of them, '{"text":"x"}', which were trained on; in the first rows they were refused."""
    contents = {"x0.jsonl": first, "x1.jsonl": {"text": "x"}}
    files = [write_rows(name, [{"a": "q", "b": content}]) for name, content in contents.items()]
    said = "struct<text: string> to large_string; if rows differ, prepare_corpus.py rewrites them"
    line = refusal(lambda: source("x*.jsonl", streaming, "a", "b").take(2))
    assert line == f"x*.jsonl: Couldn't cast array of type {said}"
    assert said in refusal(read, files, streaming, ["a", "b"]) and said in refusal(mine, files, ["a", "b"])
    assert prepare(*files)


@both_ways
@pytest.mark.parametrize("values", [[1, 2, 3], [True, False, True], ["a", "b", "c"]])
def test_values_below_a_null_list_of_arrow(values, streaming):
    """They went to the row before, as `datasets` casts lists: documents by number, or labels true and false. Files of
    different types are refused, streamed as mapped: of a label 0.5 true would be made."""
    is_null = pa.array([False, True, False])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), pa.array(values), mask=is_null)

    def write_stream(name, lists):
        table = pa.table({"a": ["q"] * len(lists), "b": lists})
        with ipc.new_stream(name, table.schema) as file:
            file.write_table(table)

    write_stream("0.arrow", lists)
    for script in SCRIPTS.values():
        (table,) = script.open_files(["0.arrow"], streaming, ["a", "b"], ids=["b"]).iter(3)
        assert table["b"].to_pylist() == [values[:1], None, values[2:]]
    write_stream("1.arrow", pa.array([[0.5]]))
    assert "can't be aligned" in refusal(lambda: source("*.arrow", streaming, "a", "b").take(4))


def test_the_whole_csv_file_is_checked():
    """Beyond the first 10,000 lines a quote made one text of 500 rows (field: turicreate#1692); a quoted header after
    a byte order mark was refused (field: crewAI#7467)."""
    lines = [f"question {n},answer {n}\n" for n in range(12_000)]
    lines[11_000] = '"' + lines[11_000]
    lines[11_500] = lines[11_500].replace("\n", '"\n')
    Path("x.csv").write_text("".join(["question,answer\n", *lines]))
    for script in SCRIPTS.values():
        with pytest.raises(script.UserError, match=r"x.csv: line 11502: lacks fields .if they are empty"):
            script.open_files(["x.csv"])
    lines[11_500] = "no answer\n"
    lines[11_000] = 'question,"a\nb"\n'
    for suffix, separator in (("csv", ","), ("tsv", "\t")):
        Path(f"x.{suffix}").write_text("".join(["question,answer\n", *lines]).replace(",", separator))
        assert ": lacks fields" in refusal(source, f"x.{suffix}", False, "question", "answer")
    with open("bom.csv", "w", encoding="utf-8-sig", newline="") as file:
        cells = [["question, in words", "answer"], ["q", 'a "text"\nof lines']]
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(cells)
    table = source("bom.csv", False, "question, in words", "answer").take(1)
    assert table["answer"].to_pylist() == ['a "text"\nof lines']


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("suffix", ["csv", "tsv.gz", "jsonl", "json"])
def test_text_in_utf_16(suffix, encoding):
    """Of Excel and PowerShell: refused by all scripts, with the command that works, also where no mark begins it."""
    rows = [{"a": f"é {n}", "b": f"\u4e2d {n}"} for n in range(5)]
    plain = Path(write_rows(f"plain.{suffix.removesuffix('.gz')}", rows)).read_text()
    if suffix == "json":
        plain = str(rows).replace("'", '"')
    data = plain.encode(encoding)
    file = f"x.{suffix}"
    Path(file).write_bytes(gzip.compress(data) if file.endswith(".gz") else data)
    command = f"prepare_corpus.py SOURCE --output_dir DIR --encoding {encoding}"
    for script in SCRIPTS.values():
        with pytest.raises(script.UserError, match=f"{file}: is in {encoding.upper()}: rewrite it by {command}$"):
            script.open_files([file], False, ["a", "b"])
    assert refusal(prepare, file).endswith(command)
    assert ipc.open_stream(*prepare(file, "--encoding", encoding)).read_all().to_pylist() == rows


@pytest.mark.parametrize("suffix", ["csv", "jsonl.gz", "parquet", "arrow", "txt"])
def test_pointers_of_git_lfs(suffix):
    file = f"x.{suffix}"
    Path(file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "ab" * 32 + "\nsize 123\n")
    for script in SCRIPTS.values():
        with pytest.raises(script.UserError, match=f"{file}: is a pointer of git-LFS, not the file: git lfs pull$"):
            script.open_files([file], True, ["a"])
    assert refusal(prepare, file) == f"{file}: is a pointer of git-LFS, not the file: git lfs pull"


LIST_CELLS = {"json": '["a, \\"b\\"", "c"]', "python": "['a, \"b\"', 'c']", "numpy": "['a, \"b\"'\n 'c']",
              "strings of numpy": "[np.str_('a, \"b\"'), np.str_('c')]"}  # fmt: skip
BRACKETS = [
    "[1] as cited",
    "[a, b]",
    '["a", 1]',
    "['a' is a letter]",
    "[[MASK]]",
    "[1, 0]",
    "['a'",
    "a ['b']",
    '["\\"]',
]


@pytest.mark.parametrize("suffix, name", [*(("csv", name) for name in LIST_CELLS), ("tsv", "json")])
def test_lists_of_texts_in_csv(suffix, name, capsys):
    """Refused by all scripts, as each was one text; prepare_corpus.py reads them. A text that begins with a bracket
    is a text."""
    file = f"x.{suffix}"
    options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None} if suffix == "tsv" else {}

    def write(rows):
        with open(file, "w", newline="") as lines:
            csv.writer(lines, **options).writerows([["q", "d", "n"], *rows])
        return file

    write([["question", text, f"[{text}"] for text in BRACKETS])
    for script in SCRIPTS.values():
        assert script.open_files([file], False, ["d"])[:]["d"].to_pylist() == BRACKETS
    (made,) = prepare(file)
    assert ipc.open_stream(made).read_all()["d"].to_pylist() == BRACKETS and "that are" not in capsys.readouterr().out
    write([["question", "a text", ""], ["question", LIST_CELLS[name], "[]"]])
    overlap = check_overlap.parse_args(["--train_data", file, "--columns", "d", "--beir", "x"])
    args = eval_incremental.Args(annotate=[file], columns=["q", "d"])
    calls = [lambda: source(file, False, "q", "d"), lambda: mine_negatives.read_pairs([file], "qd"),
             lambda: eval_incremental.read_pairs([file], "qd"), lambda: check_overlap.open_train_data(file, overlap),
             lambda: next(eval_incremental.read_documents(args))]  # fmt: skip
    said = rf"{file}: line \d: 'd' has a list of texts: rewrite it by prepare_corpus.py SOURCE --output_dir DIR"
    assert all(re.search(said, refusal(call)) for call in calls)
    (made,) = prepare(file)
    rows = ipc.open_stream(made).read_all().to_pylist()
    assert [row["d"] for row in rows] == [["a text"], ['a, "b"', "c"]] and [row["n"] for row in rows] == [None, []]
    assert "column d: cells that are lists of texts, read as lists\n" in capsys.readouterr().out
    write([["question", "['a' 'b' ... 'y' 'z']", ""]])
    assert re.search(said, refusal(calls[0])) and "a list that NumPy has cut" in refusal(prepare, file)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet", "arrow"])
def test_a_missing_column_is_said_with_those_there_are(suffix):
    """Of all scripts and formats: the likeliest first error. Then the command that adds a header to CSV works."""
    rows = [{"first": f"a {n}", "second": f"b {n}"} for n in range(3)]
    file = write_rows(f"x.{suffix}", rows)
    for columns, missing in ((["q", "d"], "['q', 'd']"), (["first", "d"], "['d']")):
        said = f"{file}: has no column {missing}, but ['first', 'second']: name those"
        for script in SCRIPTS.values():
            for streaming in (False, True):
                with pytest.raises(script.UserError) as error, script.user_errors(file):
                    script.open_files([file], streaming, columns)
                assert str(error.value).startswith(said)
    args = eval_incremental.Args(annotate=[file], columns=["first", "d"])
    with pytest.raises(eval_incremental.UserError, match=rf"x.{suffix}: .*\['d'\].*: \['first', 'second'\]"):
        next(eval_incremental.read_documents(args))
    if suffix == "csv":
        Path(file).write_text("What is it?,It is this.\nWhy?,For that.\n")
        line = refusal(source, file, False, "q", "d")
        command = re.search("sed -i '.*' FILE", line)[0].replace("NAME,NAME", "q,d").replace("FILE", file)
        subprocess.run(command, shell=True, check=True)
        assert source(file, False, "q", "d").take(2)["d"].to_pylist() == ["It is this.", "For that."]


@pytest.mark.parametrize("kind", [pa.string(), pa.list_(pa.string())])
def test_a_window_of_more_than_2_gb(kind):
    """Its chunks, which are one in memory here, cannot be combined to texts of 32-bit offsets (field: ray#29492)."""
    text = "x" * 2**25
    chunk = pa.array([text if kind == pa.string() else [text]], kind)
    table = pa.table({"a": ["q"] * 70, "b": pa.chunked_array([chunk] * 70)})
    data = source(write_rows("x.jsonl", [{"a": "q", "b": "d"}]), False, "a", "b")
    data.read_windows = lambda: iter([(table, None)])
    data.args.shuffle_buffer = 70
    said = "x.jsonl: a window has more than 2 GB in one column: lower --shuffle_buffer or --length_window"
    assert refusal(data.take, 70) == said


TWICE = {
    "a key": ("x.jsonl", '{"a": "right", "a": "a note"}\n', "x.jsonl: a row has the key 'a' twice: rename one, or "),
    "a key of an object": ("x.jsonl", '{"c": "d"}\n{"c": {"b": 1, "b": 2}}\n', "x.jsonl: a row has the key 'b' twice"),
    "a key in an array": ("x.json", '[{"a": "x"}, {"a": "y", "a": "z"}]', "x.json: a row has the key 'a' twice"),
    "a dotted name": ("x.jsonl", '{"a.b": "flat", "a": {"b": "nested"}, "c": "d"}\n', "two columns become 'a.b': ren"),
    "a dotted field": ("x.jsonl", '{"a": {"b.c": "flat", "b": {"c": "d"}}}\n', "two columns become 'a.b.c': rename"),
}


@pytest.mark.parametrize("name, text, said", TWICE.values(), ids=TWICE)
def test_of_two_values_for_one_place_none_is_chosen(name, text, said):
    Path(name).write_text(text)
    assert refusal(prepare, name).startswith(said)
    if name == "x.jsonl" and "twice" in said:
        if not shutil.which("jq"):
            pytest.skip("the command that is named requires jq")
        subprocess.run("jq -c . x.jsonl > y.jsonl", shell=True, check=True)
        (last,) = ipc.open_stream(*prepare("y.jsonl")).read_all().to_pylist()[-1:]
        assert [*last.values()] in (["a note"], ['{"b": 2}'])
    if '"c": "d"}\n' in text and "two" in said:
        assert ipc.open_stream(*prepare(name, "--columns", "c")).read_all().to_pylist() == [{"c": "d"}]


def test_columns_of_arrow_with_one_name_and_of_folders(capsys):
    """What is written of two is said; of CSV that lacks fields, how many are null."""
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], ["a", "a"])
    with ipc.new_stream("x.arrow", table.schema) as file:
        file.write_table(table)
    assert refusal(prepare, "x.arrow") == "x.arrow: two columns have one name, of a, a: rename one"
    assert "'Field \"a\" exists 2 times in schema'" in refusal(source, "x.arrow", False, "a", "a")
    Path("in/lang=de").mkdir(parents=True)
    prepare(write_rows("in/lang=de/x.jsonl", [{"lang": "en", "a": "x"}]))
    assert "column lang: as in the folders' names, which replace those of the files" in capsys.readouterr().out
    Path("short.csv").write_text("a,b\n1,2\n3\n4\n")
    prepare("short.csv")
    said = "short.csv: rows with fewer fields than the header, null in the others: 2"
    assert capsys.readouterr().out.splitlines().count(said) == 1
