"""Overlap of training data with collections: the same findings as a loop over sets; sources, outputs, errors."""

import json
import random
import re
import shutil
import unicodedata
from pathlib import Path

import conftest
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, launch, mark_slow, write_jsonl
from test_collections import DOCUMENTS, JUDGMENTS, QUERIES, layout_mteb_id, layout_mteb_jsonl, layout_nano_bm25

import check_overlap as script

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
LONG = "the quick brown fox jumps over the lazy dog while nobody in the house is looking at it"


def check(*flags):
    """Return the findings of the script for flags, by default in the column text."""
    columns = [] if "--columns" in flags else ["--columns", "text"]
    script.main(script.parse_args([*map(str, flags), *columns, "--overwrite"]))
    return [json.loads(line) for line in Path("overlap.jsonl").read_text().splitlines()]


def write_beir(name, queries, documents, judged=None):
    """Write a folder in BEIR's layout. queries, documents: {id: text, or (title, text)}."""
    rows = [(key, *((None, cell) if isinstance(cell, str) else cell)) for key, cell in documents.items()]
    rows = [{"_id": key, "title": title, "text": text} for key, title, text in rows]
    conftest.write_beir(Path(name), rows, queries, [(key, "d", 1) for key in judged or queries])


def check_texts(texts, *more):
    """Return the findings of rows of one text each in the folder c."""
    write_jsonl(Path("row.jsonl"), [{"text": text} for text in texts])
    return check("--train_data", "row.jsonl", "--beir", "c", *more)


def words_of(text):
    """Return the words of a text, character by character."""
    words = [""]
    visible = "".join(char for char in text if unicodedata.category(char) != "Cf")
    for char in unicodedata.normalize("NFKC", visible).casefold():
        if "\u3040" <= char <= "\u9fff":  # kana and Han
            words += [char, ""]
        elif unicodedata.category(char)[0] in "LMN":
            words[-1] += char
        else:
            words.append("")
    return [word for word in words if word]


def expected_findings(rows, texts, size, min_share):
    """Return {(row, type, id): (kind, share)} by comparing each row (a list of texts) with each text."""
    found = {}
    all_words = {key: words_of(text) for key, text in texts.items()}
    for number, cells in enumerate(rows):
        row_words = [words_of(cell) for cell in cells]
        row_grams = {tuple(part[i : i + size]) for part in row_words for i in range(len(part) - size + 1)}
        for key, words in all_words.items():
            grams = {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}
            share = len(grams & row_grams) / len(grams) if grams else 0
            length = len(words)
            inside = any(part[i : i + length] == words for part in row_words for i in range(len(part)))
            if words and words in row_words:
                found[number, *key] = ("verbatim", 1)
            elif length >= size and inside:
                found[number, *key] = ("inside", 1)
            elif length >= size and share >= min_share:
                found[number, *key] = ("ngrams", share)
    return found


def random_text(dice, length):
    """Return a text of up to `length` of few words, so that n-grams repeat, with case, punctuation and scripts."""
    words = ["red", "Red", "RED", "blue", "café", "café", "Straße", "STRASSE", "हिन्दी", "ｆｕｌｌ", "full", "東京",
             "x_y", "it's", "don’t"]  # fmt: skip
    marks = [" ", "  ", ", ", "\n", " - ", "\t", "… ", "\u00a0", "\u200b ", "\u200b"]
    return "".join(dice.choice(words) + dice.choice(marks) for _ in range(dice.randrange(length)))


@pytest.mark.parametrize("size, min_share", mark_slow([(2, 0.5), (3, 0.8), (4, 1.0), (5, 0.35)], [(5, 0.35)]))
def test_findings_equal_those_of_a_loop(size, min_share):
    """Of 1,500 rows, two batches, with lists and missing cells."""
    dice = random.Random(size)
    queries = {f"q{i}": random_text(dice, 8) for i in range(40)}
    documents = {f"d{i}": random_text(dice, 20) for i in range(60)}
    write_beir("small", queries, documents)
    texts = {("query", key): text for key, text in queries.items()}
    texts |= {("document", key): text for key, text in documents.items()}
    records = []
    for _ in range(1500):
        copied = dice.choice(list(texts.values()))
        a = dice.choice([random_text(dice, 12), copied, copied.upper(), f"red {copied} blue", None])
        half = len(copied) // 2
        records.append({"a": a, "b": dice.choice([[random_text(dice, 6), copied[half:], copied[:half]], [], [""]])})
    schema = pa.schema({"a": pa.string(), "b": pa.list_(pa.string())})
    pq.write_table(pa.Table.from_pylist(records, schema), "rows.parquet")
    rows = [[text for text in [record["a"], *record["b"]] if text is not None] for record in records]
    expected = expected_findings(rows, texts, size, min_share)
    flags = ["--beir", "small", "--ngram", size, "--min_share", min_share, "--columns", "a", "b"]
    findings = check("--train_data", "rows.parquet", *flags)
    found = {(line["row"], line["type"], line["id"]): (line["kind"], line["share"]) for line in findings}
    assert len(found) == len(findings) and found == expected
    kinds = [kind for kind, _ in found.values()]
    assert min(map(kinds.count, ("verbatim", "inside"))) > 100 and (min_share == 1 or kinds.count("ngrams") > 20)
    assert all(texts[line["type"], line["id"]] == line["text"] for line in findings)
    assert all(line["row_text"] in rows[line["row"]] for line in findings)


def find_copy(copy, text=LONG, **flags):
    """Return (kind, share) of a text in a row that is a copy; None if it is not found."""
    shutil.rmtree("c", ignore_errors=True)
    write_beir("c", {"q": text}, {"d": "another"})
    findings = check_texts([copy], *(word for name, value in flags.items() for word in (f"--{name}", value)))
    assert len(findings) <= 1
    return (findings[0]["kind"], round(findings[0]["share"], 3)) if findings else None


def test_planted_copies():
    words = LONG.split()
    assert find_copy(LONG) == find_copy(f"  “{LONG.upper()}!?”\n") == ("verbatim", 1)
    assert find_copy(f"Somebody said: {LONG}, and left.") == ("inside", 1)
    assert find_copy(" ".join(words[:-1])) == ("ngrams", 0.909)
    assert find_copy(" ".join(words[:-3])) is None  # 8 of 11 n-grams
    changed = " ".join("x" if i % 10 == 9 else word for i, word in enumerate(words))
    assert find_copy(changed) is None
    assert find_copy(changed, ngram=3, min_share=0.7) == ("ngrams", 0.812)
    assert find_copy(" ".join(reversed(words))) is None
    assert find_copy("What is it?", "what is it") == ("verbatim", 1)
    assert find_copy("what is it about", "what is it") is None  # shorter than an n-gram
    assert find_copy("what is it about", "what is it", ngram=3) == ("inside", 1)


def words(text):
    return script.split_words(pa.array([text], pa.large_string())).to_pylist()


def test_invisible_characters():
    """Of HTML, PDFs and emoji: within a word, beside it, between a letter and its accent."""
    text = LONG.replace("jumps", "jumpe\u0301s")
    invisible = "\u00ad\u200b\u200c\u200d\u2060\ufeff\u061c\u202a\u034f\ufe0f\u180e\u3164\U000e0001\U000e0101"
    for char in invisible:
        copy = text.replace("quick", f"qu{char}ick").replace("\u0301s", f"{char}\u0301s").replace("dog", f"dog {char}")
        assert words(copy) == words(text), ascii(char)
    copy = text.replace("quick", "\u00adqu\u00adick\u200b")
    assert find_copy(copy, text) == find_copy(text, copy) == ("verbatim", 1)


CAPITALS = {  # Turkish ones have a dot or none, Greek ones are decomposed
    "kırmızı ışık İstanbul’da en iyi": "KIRMIZI IŞIK İSTANBUL’DA EN İYİ",
    "Δεΐ τὸν ἄνδρα": "ΔΕΪ́ ΤῸΝ ἌΝΔΡΑ",
    "Straße ﬁnden™": "STRASSE FINDENTM",
}


@pytest.mark.parametrize("text", CAPITALS)
def test_capitals(text):
    assert words(CAPITALS[text]) == words(text) != words(text.replace("n", "m").replace("ν", "μ"))


def test_texts_without_words_are_not_found():
    write_beir("c", {"q0": "?!", "q1": "good words", "q2": ""}, {"d0": "", "d1": ("", " "), "d2": ("Title.", "")})
    found = check_texts(["", " ", "...", "?!", None, "title", "good\nwords"])
    assert [(line["row"], line["id"], line["text"]) for line in found] == [(6, "q1", "good words")]


def test_documents_are_found_without_their_titles():
    write_beir("c", {"q": "none"}, {"d": ("A title that is rather long, of eleven words or even more", LONG)})
    assert [line["kind"] for line in check_texts([LONG, f"A title. {LONG}"])] == ["verbatim", "inside"]


def test_only_judged_queries_are_searched_for(capsys):
    """Those of the train split may well be in training data."""
    write_beir("c", {"q0": "first query", "q1": "second query"}, {"d": "nothing"}, judged=["q1"])
    assert [line["id"] for line in check_texts(["First query", "Second query", "second, query"])] == ["q1", "q1"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["c, query: 1 of 1 texts in 2 rows", "c, document: 0 of 1 texts in 0 rows"]
    Path("c/qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq9\td\t1\n")
    with pytest.raises(script.UserError, match="^--beir c: --split test judges none of its queries$"):
        check_texts(["x"])


@pytest.mark.parametrize("layout", [layout_mteb_jsonl, layout_mteb_id, layout_nano_bm25])
def test_layouts_of_collections(layout):
    layout(Path("x").absolute())
    judged = {query for query, _ in JUDGMENTS}
    write_jsonl(Path("a.jsonl"), [{"text": text.upper()} for text in (*QUERIES.values(), *DOCUMENTS.values())])
    found = [(line["type"], line["id"]) for line in check("--train_data", "a.jsonl", "--beir", Path("x").absolute())]
    expected = {("query", name) for name in judged} | {("document", name) for name in DOCUMENTS}
    assert set(found) == expected


def test_pairs_and_several_sources(capsys):
    """Sources of several formats; the columns of the pairs have other names, and each text counts once."""
    Path("test.csv").write_text("n,q,title\n1,how are you,fine thanks\n2,how are you,very well\n3,NA,007\n")
    write_jsonl(Path("a.jsonl"), [{"x": "?", "y": ["no", "How are you?"]}, {"x": "Fine, thanks", "y": []}])
    Path("b.csv").write_text("x,y\nwell,Very well\n007,na\n")
    flags = ["--train_data", "a.jsonl", "b.csv", "--pairs", "test.csv", "--pair_columns", "q", "title"]
    found = [(line["source"], line["row"], line["type"], line["id"]) for line in check(*flags, "--columns", "x", "y")]
    assert found == [("a.jsonl", 0, "query", "0"), ("a.jsonl", 1, "document", "0"), ("b.csv", 1, "query", "2"),
                     ("b.csv", 0, "document", "1"), ("b.csv", 1, "document", "2")]  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["test.csv, query: 2 of 2 texts in 2 rows", "test.csv, document: 3 of 3 texts in 3 rows"]
    assert [line["row"] for line in check(*flags, "--columns", "x")] == [1, 1]


def test_each_source_of_pairs_is_a_collection(capsys):
    """With the rows of its own; a glob is one source."""
    for name in ("a.csv", "b.csv", "in/0.csv", "in/1.csv"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("q,d\n" + "".join(f"{name} question {n},{name} answer {n}\n" for n in range(4)))
    write_jsonl(
        Path("train.jsonl"), [{"text": text} for text in ("b.csv question 1", "in/1.csv answer 2", "a.csv ask")]
    )
    found = check("--train_data", "train.jsonl", "--pairs", "a.csv", "b.csv", "in/*.csv", "--pair_columns", "q", "d")
    found = [(line["collection"], line["type"], line["id"], line["row"]) for line in found]
    assert found == [("b.csv", "query", "1", 0), ("in/*.csv", "document", "6", 1)]
    assert "b.csv, query: 1 of 4 texts in 1 rows\n" in capsys.readouterr().out


def test_output_has_the_rows_without_queries():
    write_beir("c", {"q": "a query"}, {"d": "a document"})
    rows = [{"n": i, "text": ["A query", "a document", "else"][i % 3], "labels": [i, 0.5]} for i in range(3000)]
    write_jsonl(Path("in/a.jsonl"), rows)
    write_jsonl(Path("in/b.jsonl"), rows)
    flags = ["--train_data", "in/*.jsonl", "--columns", "text", "--beir", "c", "--output", "clean.parquet"]
    check(*flags)
    kept = pq.read_table("clean.parquet").to_pylist()
    assert kept == 2 * [row for row in rows if row["n"] % 3]
    check(*flags, "--also_documents")
    assert pq.read_table("clean.parquet").to_pylist() == 2 * [row for row in rows if row["n"] % 3 == 2]
    assert sorted(path.name for path in Path().iterdir()) == ["c", "clean.parquet", "in", "overlap.jsonl"]


def test_errors_are_one_line():
    write_beir("c", {"q": "a query"}, {"d": "a document"})
    write_jsonl(Path("a.jsonl"), [{"text": "x", "n": 1, "s": {"a": "b"}}])
    for flags, message in {
        "--train_data . --beir c": "--train_data .: name its files: './*.parquet' or data-",
        "--train_data a.jsonl --beir c --columns z": "--train_data a.jsonl: has no column ['z'], but ['text', 'n',",
        "--train_data a.jsonl --beir c --columns n": "--train_data a.jsonl: column 'n' holds int64, not texts",
        "--train_data a.jsonl --beir c --columns s": "--train_data a.jsonl: column 's' has struct<a: string>, not tex",
        "--train_data a.jsonl --beir d": "--beir d: ",
        "--train_data a.jsonl --beir c --split dev": "--beir c: no judgments of split 'dev'; avail",
        "--train_data a.jsonl --pairs a.jsonl --pair_columns text n":
            "--pairs a.jsonl: column 'n' holds int64, not texts: rewrite it by prepare_corpus.py",
    }.items():  # fmt: skip
        with pytest.raises(script.UserError) as error:
            check(*flags.split())
        assert str(error.value).startswith(message) and "\n" not in str(error.value), error.value


@pytest.mark.parametrize("flags, message", [
    ("--train_data a --columns b", "requires --beir, or --pairs and two"),
    ("--train_data a --beir c", "the following arguments are required: --columns"),
    ("--train_data a --columns b --pairs c --pair_columns x", "--pairs and two --pair_columns"),
    ("--train_data a b --columns b --beir c --output x.parquet", "--output has the rows of one --train_data"),
    ("--train_data a --columns b --beir c --min_share 80", "--min_share above 0 and at most 1"),
    ("--train_data a --columns b --beir c --ngram 0", "--ngram must be 1 or more"),
    ("--train_data a --columns b --beir c --output x.jsonl", "--output end in .parquet"),
    ("--train_data a --columns b --beir c --report s3://x/y", "must be local files"),
])  # fmt: skip
def test_wrong_flags(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.parse_args(flags.split())
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_from_the_command_line(tmp_path, beir, corpus):
    """On the queries and documents of the fixtures, which are the rows themselves. No output is overwritten."""
    flags = ["--train_data", f"{corpus}/*.parquet", "--columns", "docstring", "code", "--beir", beir]
    flags += ["--output", "clean.parquet"]
    done = launch(ROOT / "check_overlap.py", *flags, cwd=tmp_path)
    queries, documents, *_ = done.stdout.splitlines()
    found, rows = re.search(r", query: (60 of 60) texts in (\d+) rows$", queries).groups()
    assert "document: 293 of 293 texts" in documents
    whole = sum(pq.read_metadata(path).num_rows for path in corpus.iterdir())
    assert int(rows) + pq.read_metadata("clean.parquet").num_rows == whole
    done = launch(ROOT / "check_overlap.py", *flags, cwd=tmp_path, check=False)
    line = "error: overlap.jsonl: exists; choose another file, or set --overwrite"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == line
