"""What trainers refuse: the line that is printed, the command that it names, and a training on what that writes."""

import gzip
import json
import re
import shlex
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import train, write_jsonl

import prepare_corpus
import train_bi_encoder as script

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
PAIRS = [{"a": f"query {n}", "b": f"text {n}"} for n in range(8)]
LONG = [{"a": "x" * 60_000, "b": "text", "c": None}] * 180  # more than `datasets` reads at first: 10 MB


@dataclass
class Case:
    files: dict  # {name: rows, text, bytes or table}
    source: str  # of --train_data
    said: str  # what is printed begins with the source, and contains this
    command: str | None  # flags of prepare_corpus.py SOURCE --output_dir made; None: the next field replaces it
    instead: list = field(default_factory=list)  # sources that the line asks for, after `mend`
    mend: dict = field(default_factory=dict)  # files that the user writes, as the line asks for
    flags: str = ""  # of the training that is refused, beside --columns
    columns: str = "a b"
    then: str = ""  # columns of the training on what the command wrote, if they are others
    rows: list = field(default_factory=list)  # [query, documents, labels] of the last rows; none: those of PAIRS
    count: int = 8  # rows


def table(**columns):
    return pa.table(columns)


def texts(kind):
    return table(a=pa.array([row["a"] for row in PAIRS], kind), b=[row["b"] for row in PAIRS])


CSV = "a,b\n" + "".join(f"{row['a']},{row['b']}\n" for row in PAIRS)
LABELLED = "--label_column s --loss CoSENTLoss"
THREE = [row | {"c": f"wrong {number}"} for number, row in enumerate(PAIRS)]
LAST = [["query 7", ["text 7", "wrong 7"], []]]
REGULAR = "prepare_corpus.py rewrites (irregular rows|them)$"
PLAIN = "texts, numbers or lists of them: rewrite it by prepare_corpus.py SOURCE --output_dir DIR$"
CASES = {
    "a folder": Case({"in/0.jsonl": PAIRS[:4], "in/1.jsonl": PAIRS[4:]}, "in",
        "name its files: 'in/..parquet' or data-..arrow; prepare_corpus.py reads folders", ""),
    "folders KEY=VALUE": Case({f"in/s={label}/0.jsonl": PAIRS[4 * label : 4 * label + 4] for label in (0, 1)}, "in",
        "name its files: .*; prepare_corpus.py reads folders", "", flags=LABELLED,
        rows=[["query 7", ["text 7"], [1]]]),
    "files of several formats": Case({"in/0.jsonl": PAIRS, "in/1.csv": CSV}, "in/*",
        "is not all of one format, of .parquet .*: name those of one by a glob", None,
        ["in/*.jsonl", "in/*.csv"], count=16),
    "another format": Case({"x.orc": table(**{n: [row[n] for row in PAIRS] for n in "ab"})}, "x.orc",
        "is not all of one format, .*, or rewrite it by prepare_corpus.py", ""),
    "objects": Case({"x.jsonl": [{"a": {"text": row["a"]}, "b": {"id": 1, "text": row["b"]}} for row in PAIRS]},
        "x.jsonl", f"column 'a' has struct<text: string>, not {PLAIN}", "", then="a.text b.text"),
    "objects, by fields": Case({"x.jsonl": [{"a": {"text": row["a"]}, "b": row["b"]} for row in PAIRS]}, "x.jsonl",
        r"has no column \['a.text'\], but \['a', 'b'\]: name those .*, or rewrite it by prepare_corpus.py SOURCE",
        "--columns a.text b",
        columns="a.text b"),
    "lists of objects": Case({"x.jsonl": [{"a": row["a"], "b": row["b"], "c": [{"t": row["c"]}]} for row in THREE]},
        "x.jsonl", f"column 'c' has list<item: struct<t: string>>, not {PLAIN}", "", columns="a b c", then="a b c.t",
        rows=LAST),
    "dates in Parquet": Case({"x.parquet": table(a=[row["a"] for row in PAIRS], b=pa.array([0] * 8, pa.date32()))},
        "x.parquet", rf"column 'b' has date32\[day\], not {PLAIN}", "", rows=[["query 7", ["1970-01-01"], []]]),
    "texts like dates": Case({"x.jsonl": [row | {"b": "2020-01-01T10:00:00Z"} for row in PAIRS]}, "x.jsonl",
        rf"column 'b' has timestamp\[s\], not {PLAIN}", "", rows=[["query 7", ["2020-01-01T10:00:00Z"], []]]),
    "texts beside lists": Case(
        {"x.jsonl": [row | {"c": [row["c"], "d"] if n % 2 else row["c"]} for n, row in enumerate(THREE)]}, "x.jsonl",
        f"column 'c' has extension<arrow.json>, not {PLAIN}", "", columns="a b c",
        rows=[["query 7", ["text 7", "wrong 7", "d"], []]]),
    "texts, then lists": Case({"0.jsonl": THREE[:4], "1.jsonl": [row | {"c": [row["c"]]} for row in THREE[4:]]},
        "*.jsonl", f"Couldn't cast array of type list.* to large_string.*{REGULAR}", "", columns="a b c", rows=LAST),
    "true, then fractions": Case({"x.jsonl": [row | {"s": n / 7 if n else False} for n, row in enumerate(PAIRS)]},
        "x.jsonl", f"column 's' has extension<arrow.json>, not {PLAIN}", "", flags=LABELLED,
        rows=[["query 7", ["text 7"], [1]]]),
    "whole numbers, then fractions": Case(
        {"0.jsonl": [row | {"s": 0} for row in PAIRS], "1.jsonl": [row | {"s": 0.5} for row in PAIRS]}, "*.jsonl",
        f".*Float value 0.5.* was truncated .*{REGULAR}", "", flags=LABELLED, rows=[["query 7", ["text 7"], [0.5]]],
        count=16),
    "decimals of other digits": Case(
        {f"{s}.parquet": table(a=["query 7"], b=["text 7"], s=[Decimal(s)]) for s in ("0.5", "16.47135")},
        "*.parquet", f"Rescaling Decimal value would cause data loss.*{REGULAR}", "", flags=LABELLED,
        rows=[["query 7", ["text 7"], [16.47135]]], count=2),
    "numbers, then texts": Case(
        {"0.jsonl": [row | {"b": 7} for row in PAIRS], "1.jsonl": [row | {"b": "007"} for row in PAIRS]}, "*.jsonl",
        "'b' holds int, not texts: .* rewrite it by prepare_corpus.py", "", rows=[["query 7", ["007"], []]],
        count=16),
    "a column of a later JSON file": Case({"0.jsonl": PAIRS, "1.jsonl": THREE}, "*.jsonl",
        r"not all rows have the same columns: there are 1 new columns \(\{'c'\}\); " f"{REGULAR}", "", then="a b c",
        rows=LAST, count=16),
    "null throughout the first chunk": Case({"x.jsonl": LONG + [row | {"c": [row["c"]]} for row in THREE]}, "x.jsonl",
        f"Couldn't cast array of type list.* to large_string.*{REGULAR}", "", columns="a b c", rows=LAST, count=188),
    "a column that only later files have": Case({"0.csv": CSV, "1.csv": "a,b,c\nquery 7,text 7,wrong 7\n"}, "*.csv",
        "not all files have the same columns: rewrite it by prepare_corpus.py SOURCE", "", columns="a b c", rows=LAST,
        count=9),
    "a column that later CSV lacks": Case({"0.csv": "a,b,c\nq,t,w\n", "1.csv": CSV}, "*.csv",
        "not all files have the same columns: rewrite it by prepare_corpus.py SOURCE", "", columns="a b c", count=9),
    "CSV without a header": Case({"x.csv": CSV[4:]}, "x.csv",
        r"has no column \['a', 'b'\], but \['query 0', 'text 0'\]: name those .*sed -i '1i NAME,NAME' FILE", None,
        ["x.csv"], {"x.csv": CSV}),
    "a quote that opens one line and closes another": Case(
        {"x.csv": CSV + '"query,text\nquery,text"\n'}, "x.csv",
        ".*x.csv: line 11: lacks fields .if they are empty, rewrite", None, ["x.csv"], {"x.csv": CSV}),
    "a column that later Arrow lacks": Case(
        {"0.arrow": table(a=["q"], b=["t"], c=["w"]), "1.arrow": texts(pa.string())}, "*.arrow",
        "not all files have the same columns: rewrite it by prepare_corpus.py SOURCE", "", columns="a b c", count=9),
    "texts beside a number in later rows": Case({"x.jsonl": LONG + [{"a": "q", "b": 7, "c": "t"}]}, "x.jsonl",
        f".*Column\\(/b\\) changed from .*{REGULAR}", "", count=181, rows=[["q", ["7"], []]]),
    "a column that later Parquet lacks": Case(
        {"0.parquet": table(a=["q"], b=["t"], c=["w"]), "1.parquet": texts(pa.string())}, "*.parquet",
        f"No match for .*\\(c\\).*.*{REGULAR}", "", columns="a b c", count=9),
    "other types in later Parquet": Case({"0.parquet": table(a=["q"], b=[["t"]]), "1.parquet": texts(pa.string())},
        "*.parquet", f"Couldn't cast .* to List.*.*{REGULAR}", "", count=9),
    "half of a character": Case({"x.jsonl": '{"a": "cut \\ud83d", "b": "text"}\n' * 8}, "x.jsonl",
        f".*The surrogate pair in string is invalid.*.*{REGULAR}", "", rows=[["cut \ufffd", ["text"], []]]),
    "CSV that is not UTF-8": Case({"x.csv": CSV.replace("7", "é").encode("cp1252")}, "x.csv",
        "not in UTF-8: save it in that encoding, as prepare_corpus.py --encoding does", "--encoding cp1252",
        rows=[["query é", ["text é"], []]]),
    "JSON that is not UTF-8": Case({"x.jsonl": '{"a": "é", "b": "text"}\n'.encode("cp1252") * 8}, "x.jsonl",
        f".*Invalid UTF8 sequence .*.*{REGULAR}", "--encoding cp1252", rows=[["é", ["text"], []]]),
    "CSV with more fields than the header": Case({"x.csv": CSV + "query, the last,text\n"}, "x.csv",
        ".*in line 10, saw 3: check the separator, and the quotes of the rows before", None, ["x.csv"],
        {"x.csv": CSV + '"query, the last",text\n'}, count=9, rows=[["query, the last", ["text"], []]]),
    "CSV with more fields from line 2": Case({"x.csv": CSV.replace(",text", ",the,text")}, "x.csv",
        "line 2 has more fields than the header: check the separator, and quote", None, ["x.csv"], {"x.csv": CSV}),
    "CSV with fewer fields than the header": Case({"x.csv": CSV.replace("a,b", "a,b,c")}, "x.csv",
        ".*x.csv: line 2: lacks fields .if they are empty, rewrite it by prepare_corpus.py", "",
        columns="a b"),
    "quotes that do not match": Case({"x.csv": 'a,b\n"say "hi", he said",text\n' + CSV[4:]}, "x.csv",
        ".*x.csv: line 2: ',' expected after '\"': double the quotes", None, ["x.csv"],
        {"x.csv": 'a,b\n"say ""hi"", he said",text\n' + CSV[4:]}, count=9),
    "a quote that is not closed": Case({"x.csv.gz": gzip.compress((CSV + 'query,"text\n').encode())}, "x.csv.gz",
        ".*x.csv.gz: line 10: unexpected end of data: double the quotes", None, ["x.csv"],
        {"x.csv": CSV + 'query 7,"""text"\n'}, count=9, rows=[["query 7", ['"text'], []]]),
    "lists in CSV": Case(
        {"x.csv": "a,b,c\n" + "".join(f"query {n},['text {n}'],['wrong {n}' 'd']\n" for n in range(8))}, "x.csv",
        "line 2: .b. has a list of texts: rewrite it by prepare_corpus.py SOURCE --output_dir D", "", columns="a b c",
        rows=[["query 7", ["text 7", "wrong 7", "d"], []]]),
    "broken JSON": Case({"x.jsonl": '{"a": "q", "b": "t"}\n{"a": "q"\n'}, "x.jsonl",
        f".*Missing a comma .*.*{REGULAR}", None, ["x.jsonl"], {"x.jsonl": PAIRS}),
}  # fmt: skip
REFUSED = {  # by prepare_corpus.py, too, with the line of the file
    "quotes that do not match": "x.csv: line 2: ',' expected after '\"': double the quotes within a quoted text",
    "a quote that is not closed": "x.csv.gz: line 10: unexpected end of data: double the quotes within a quoted text",
    "CSV with more fields than the header": "x.csv: line 10 has more fields than the header: check the separator",
    "CSV with more fields from line 2": "x.csv: line 2 has more fields than the header: check the separator",
    "broken JSON": 'x.jsonl: not JSON Lines, nor an array of objects: {"a": "q"',
    "CSV that is not UTF-8": "x.csv: not in UTF-8: set --encoding, such as cp1252",
    "JSON that is not UTF-8": "x.jsonl: not in UTF-8: set --encoding, such as cp1252",
}


def write(name, content):
    """Write rows, a text, bytes or a table to a file."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
        write_jsonl(Path(name), content)
    elif isinstance(content, pa.Table) and name.endswith(".orc"):
        pytest.importorskip("pyarrow.orc").write_table(content, name)
    elif isinstance(content, pa.Table) and name.endswith(".arrow"):
        with pa.ipc.new_stream(name, content.schema) as file:
            file.write_table(content)
    elif isinstance(content, pa.Table):
        pq.write_table(content, name)
    else:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())


def prepare(*words):
    prepare_corpus.main(prepare_corpus.parse_args(list(words)))


def read(args):
    """Return [query, documents, labels] of each row of the sources, in order."""
    found = []
    for number, source in enumerate(args.train_data):
        source = script.Source(source, number, args)
        rows, _ = script.read_rows(source.take(len(source)), [None] * number + [source], [None, None], 0)
        found += [[row.query, row.documents, row.labels] for row in rows]
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused_can_be_trained_on(name, static, capsys):
    """By the command that is printed, or by what its words complete."""
    case = CASES[name]
    for file, content in case.files.items():
        write(file, content)
    common = ["--model_name_or_path", static, "--max_steps", "1", "--batch_size", "2", "--eval_rows", "0",
              "--shuffle_buffer", "0", "--save_steps", "0", *case.flags.split()]  # fmt: skip
    for way in ("mapped", "streaming"):
        words = ["--train_data", case.source, "--columns", *case.columns.split(), *common, "--output_dir", way]
        said = f"^(--train_data: )?{re.escape(case.source)}: {case.said}"
        with pytest.raises(script.UserError, match=said) as error:
            train("train_bi_encoder", *words, *["--streaming"] * (way == "streaming"))
        assert "\n" not in str(error.value)
    if name in REFUSED:
        with pytest.raises(prepare_corpus.UserError) as error:
            prepare(case.source, "--output_dir", "made")
        assert REFUSED[name] in str(error.value)
    sources = case.instead
    for file, content in case.mend.items():
        write(file, content)
    if case.command is not None:
        prepare(case.source, "--output_dir", "made", *case.command.split())
        last = capsys.readouterr().out.splitlines()[-1]
        sources = [shlex.split(last.partition("--train_data ")[2])[0]]  # which prepare_corpus.py prints
    words = ["--train_data", *sources, "--columns", *(case.then or case.columns).split(), *common]
    found = read(script.parse_args(list(map(str, words))))
    expected = case.rows or [[row["a"], [row["b"]], []] for row in PAIRS]
    assert len(found) == case.count and found[-len(expected) :] == expected
    train("train_bi_encoder", *words, "--output_dir", "run")
    counts = [line for line in capsys.readouterr().out.splitlines() if " rows of 1 file(s)" in line]
    assert len(counts) == len(sources) or "0.jsonl" in str(case.files)
    assert json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 1


UUIDS = pa.array([bytes(15) + bytes([n]) for n in range(8)], pa.binary(16))
SECONDS = [timedelta(seconds=n + 90) for n in range(8)]
KINDS = {  # {type: (column, the last text that is written; None: that of a field b)}
    "JSON": (pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array(['{"a": 1}'] * 8)), '{"a": 1}'),
    "fixed-size binary": (pa.array([b"text %d" % n for n in range(8)], pa.binary(6)), "text 7"),
    "UUID": (pa.ExtensionArray.from_storage(pa.uuid(), UUIDS), "00000000-0000-0000-0000-000000000007"),
    "duration": (pa.array(SECONDS), "0:01:37"),
    "durations": (pa.array([[second] for second in SECONDS]), "0:01:37"),
    "list view": (pa.array([["a text"]] * 8, pa.list_view(pa.string())), "a text"),
    "time": (pa.array([0] * 8, pa.time32("ms")), "00:00:00.000"),
    "opaque": (pa.ExtensionArray.from_storage(pa.opaque(pa.string(), "x", "y"), pa.array(["a text"] * 8)), "a text"),
    "run-end encoded": (pa.RunEndEncodedArray.from_arrays([3, 8], ["first", "a text"]), "a text"),
    "decimal32": (pa.array([Decimal("1.5")] * 8, pa.decimal32(5, 2)), "1.50"),
    "struct of UUID": (pa.StructArray.from_arrays([pa.ExtensionArray.from_storage(pa.uuid(), UUIDS)], ["b"]), None),
}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_type_that_is_sent_to_prepare_corpus(kind, suffix, static, capsys):
    """Is written there as what a trainer reads; what is read in another form is said."""
    column, expected = KINDS[kind]
    try:
        write(f"x.{suffix}", table(a=[row["a"] for row in PAIRS], b=column))
    except pa.ArrowNotImplementedError:
        pytest.skip("Parquet has no such type")
    words = ["--columns", "a", "b", "--model_name_or_path", str(static), "--shuffle_buffer", "0", "--eval_rows", "0"]
    for more in ([], ["--streaming", "--max_steps", "1"]):
        with pytest.raises(
            script.UserError, match="rewrite it by prepare_corpus.py SOURCE --output_dir DIR$"
        ) as error:
            script.open_data(script.parse_args(["--train_data", f"x.{suffix}", *words, *more])).sources[0].take(1)
        assert len(str(error.value)) < 300 and "\n" not in str(error.value)
    prepare(f"x.{suffix}", "--output_dir", "made")
    assert "column b (" in capsys.readouterr().out
    words[2] = "b" if expected else "b.b"
    args = script.parse_args(["--train_data", "made/*.arrow", *words])
    assert read(args)[-1] == ["query 7", [expected or KINDS["UUID"][1]], []]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("number", [0, 37])
def test_a_text_that_is_not_utf_8(number, streaming):
    """Among held-out rows, or among queries that are compared with those: a line, too."""
    texts = ["é" if row == number else "e" for row in range(40)]
    write("x.jsonl", "".join(f'{{"a": "{text}", "b": "text"}}\n' for text in texts).encode("cp1252"))
    words = "--train_data x.jsonl --columns a b --model_name_or_path x --eval_rows 4 --max_steps 1"
    said = "^x.jsonl: (not in UTF-8: .* as prepare_corpus.py|.*Invalid UTF8 .*prep)"
    with pytest.raises(script.UserError, match=said):
        data = script.open_data(script.parse_args([*words.split(), *["--streaming"] * streaming]))
        script.trained_queries(data)
        data.sources[0].take(36)
