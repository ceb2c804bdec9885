"""prepare_corpus.py: the demo corpus from generated files, its models, every input format, and bad input."""

import datetime
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
from conftest import mark_slow, write_rows
from forked import merge_flags
from matplotlib.figure import Figure
from shortcuts import draw

SCRIPT = Path(__file__).resolve().parents[1] / "prepare_corpus.py"
sys.path.insert(0, str(SCRIPT.parent))
import prepare_corpus  # noqa: E402

ROWS = [{"text": f"row {i}: é", "score": i / 100, "lang": ["en", "de", "fr"][i % 3]} for i in range(100)]


def run(*argv):
    prepare_corpus.main(prepare_corpus.parse_args([str(arg) for arg in argv]))


def fail(*argv):
    """Run the command line and return its error, which must be one line."""
    with pytest.raises(prepare_corpus.UserError) as error:
        run(*argv)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def write(path, rows=ROWS):
    """Write rows in the format of the suffixes of `path`; return the path."""
    return write_rows(path, rows)


def read(folder, format="arrow"):
    files = sorted(str(path) for path in folder.glob(f"*.{format}"))
    cache = str(folder.parent / "cache")
    return datasets.load_dataset(format, data_files=files, split="train", cache_dir=cache).to_list()


def convert(tmp_path, *argv, format="arrow"):
    """Convert to a new folder and return its rows."""
    out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
    run(*argv, "--output_dir", out, "--format", format)
    return read(out, format)


def test_docstrings_are_stripped_from_every_kind_of_function(tmp_path):
    source = '''
class Box:
    @cached("x")
    def width(self):
        """Return the   width
        of it.

        Not this paragraph."""
        text = """
at column 0"""
        return text  # é

def outer(items):
    "Count the given items."
    def inner():
        """Say something useful here."""
        return 2
    # the end
    return len(items)

def stub(self):
    """Return the answer of everything."""
    raise NotImplementedError

def pointer():
    """See the base class."""
    return 3

async def fetch(self): "Fetch the next é item."; x = [
    1]
'''
    (tmp_path / "a.py").write_text(source)
    assert prepare_corpus.docstring_pairs(tmp_path / "a.py") == [
        ("Return the width of it.",
         '@cached("x")\ndef width(self):\n    text = """\nat column 0"""\n    return text  # é'),
        ("Count the given items.", "def outer(items):\n    def inner():\n        return 2\n    # the end\n"
         "    return len(items)"),
        ("Say something useful here.", "def inner():\n    return 2"),
        ("Fetch the next é item.", "async def fetch(self): x = [\n    1]"),
    ]  # fmt: skip


@pytest.fixture
def tree(tmp_path):
    """Two source roots; each file has an import side effect, a unique function, a shared docstring and shared code."""
    words = ["alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta"]
    for source, files in (("stdlib", 60), ("packages", 150)):
        for i in range(files):
            word = " ".join(random.Random(f"{source}{i}").choices(words, k=12))
            path = tmp_path / "roots" / source / f"package{i % 7}" / f"module{i}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                f"open({str(tmp_path / 'imported')!r}, 'w')\n"
                f'def own{i}():\n    """Return {word}."""\n    return {i}, "{source}"\n'
                f'def shared{i}():\n    """Say the Same thing{"!" * (i % 3)}"""\n    return {i}\n'
                f'def copied():\n    """Do {word} again."""\n    return "vendored"\n'
            )
    (tmp_path / "roots/stdlib/broken.py").write_text("def broken(:\n")
    (tmp_path / "roots/stdlib/latin.py").write_bytes(b'def f():\n    """Return the caf\xe9."""\n    return 1\n')
    (tmp_path / "roots/packages/tests").mkdir()
    (tmp_path / "roots/packages/tests/test_it.py").write_text('def t():\n    """Test the thing."""\n    return 1\n')
    return tmp_path


def build(tree, name):
    roots = {source: [tree / "roots" / source] for source in ("stdlib", "packages")}
    return tree / name, prepare_corpus.build_demo(roots, tree / name)


def test_demo_splits_by_file_drops_duplicates_and_imports_nothing(tree):
    """Twice the same bytes; the split of a file does not depend on the others."""
    folder, report = build(tree, "a")
    assert not (tree / "imported").exists()
    assert report["files"] == 212  # of which two do not parse
    rows = {}
    for path in folder.rglob("*.parquet"):
        table = pq.read_table(path)
        assert table.column_names == ["docstring", "code"]
        rows[path.parent.name, path.name.split("-")[0]] = table.to_pylist()
    found = {(split, s): n for split, part in report["pairs"].items() for s, n in part.items()}
    assert len(rows) == 4 and found == {key: len(part) for key, part in rows.items()}
    everything = [(split, row) for (split, _), part in rows.items() for row in part]
    # One unique pair per file, and each duplicate once, among the held-out pairs.
    assert len(everything) == 210 + 2
    assert sum(row["code"].startswith("def own") for _, row in everything) == 210
    assert [split for split, row in everything if row["docstring"].startswith("Say the Same")] == ["heldout"]
    assert [split for split, row in everything if "vendored" in row["code"]] == ["heldout"]
    assert 2 <= sum(split == "heldout" for split, _ in everything) - 2 <= 25
    order = [row["code"] for row in rows["train", "packages"]]
    assert order != sorted(order) and len(order) > 100
    second, _ = build(tree, "b")
    for file in folder.rglob("*.parquet"):
        assert file.read_bytes() == (second / file.relative_to(folder)).read_bytes()
    (tree / "roots/packages/package0/module0.py").unlink()
    third, _ = build(tree, "c")
    after = [code for path in third.glob("heldout/*") for code in pq.read_table(path)["code"].to_pylist()]
    assert {code for code in after if "own" in code} <= {row["code"] for split, row in everything if split != "train"}


def test_demo_keeps_what_exists_and_replaces_its_own_output_only(tree, monkeypatch):
    from sentence_transformers import CrossEncoder, SentenceTransformer

    roots = {"stdlib": tree / "roots/stdlib", "purelib": tree / "roots/packages", "platlib": tree / "roots/packages"}
    monkeypatch.setattr(prepare_corpus.sysconfig, "get_paths", lambda: {k: str(v) for k, v in roots.items()})
    monkeypatch.chdir(tree)
    run()
    demo = tree / "data/python_code"
    content = {path: path.read_bytes() for path in demo.rglob("*") if path.is_file()}
    assert sorted(p.name for p in demo.iterdir()) == ["bi_encoder", "corpus.json", "cross_encoder", "heldout", "train"]

    encoder = SentenceTransformer(str(demo / "bi_encoder"), device="cpu")
    vectors = encoder.encode(["returnSharedAlpha alpha", "return shared_alpha ALPHA", "beta"])
    assert vectors.shape == (3, 1024) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert encoder.tokenizer.normalizer.normalize_str("readGzipFile HTTPServer") == "read gzip file http server"
    assert np.allclose(vectors[0], vectors[1]) and not np.allclose(vectors[0], vectors[2], atol=0.1)
    scorer = CrossEncoder(str(demo / "cross_encoder"), num_labels=1, device="cpu")
    assert scorer.max_seq_length == 256 and len(scorer.predict([("a query", "a document"), ("a", "b " * 999)])) == 2
    assert not [path for path in demo.rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]

    (demo / "bi_encoder/model.safetensors").write_bytes(b"trained")  # what exists is kept
    run()
    changed = [path for path in content if path.read_bytes() != content[path]]
    assert changed == [demo / "bi_encoder/model.safetensors"]
    run("--overwrite")
    assert all(path.read_bytes() == data for path, data in content.items())
    assert [path.name for path in (tree / "data").iterdir()] == ["python_code"]
    (demo / "corpus.json").unlink()
    assert "--overwrite" in fail() and (demo / "train").is_dir()


NAMES = "a.parquet a.orc file.arrow stream.arrow a.csv a.csv.gz a.tsv a.tsv.zst a.json a.jsonl a.jsonl.gz a.jsonl.zst"


@pytest.mark.parametrize("name", NAMES.split())
def test_every_format_gives_the_same_rows_and_can_be_filtered(tmp_path, name):
    source = write(tmp_path / name)
    is_text = "sv" in name  # columns of CSV and TSV are
    assert convert(tmp_path, source) == [row | {"score": str(row["score"])} if is_text else row for row in ROWS]
    least = "'0.5'" if is_text else "0.5"
    keep = f"[('score', '>', {least}), ('lang', 'in', ['en', 'de']), ('text', '!=', 'row 51: é')]"
    got = convert(tmp_path, source, "--columns", "lang", "text", "--filter", keep, format="parquet")
    expected = [row for row in ROWS if row["score"] > 0.5 and row["lang"] != "fr" and row["text"] != "row 51: é"]
    assert got == [{"lang": row["lang"], "text": row["text"]} for row in expected] and len(got) > 30


@pytest.mark.parametrize("suffix", ["orc", "parquet"])
def test_a_file_is_not_read_ahead(tmp_path, suffix):
    """While the first rows of a file of 61 MB are in use, less than 25 MB are allocated."""
    table, file = pa.table({"a": ["x" * 300] * 200_000}), str(tmp_path / f"a.{suffix}")
    if suffix == "orc":
        pa.orc.write_table(table, file, compression="zstd")
    else:
        pq.write_table(table, file, compression="zstd", row_group_size=20_000, use_dictionary=False)
    del table  # which is allocated, too
    before, tables = pa.total_allocated_bytes(), prepare_corpus.read_columns(file)
    assert [next(tables)[0] for _ in range(2)] == [0, 1000]
    time.sleep(0.5)
    assert pa.total_allocated_bytes() - before < 25e6


@pytest.mark.parametrize("suffix", ["orc", "parquet"])
def test_folders_and_files_of_a_remote_file_system(tmp_path, suffix):
    memory = fsspec.filesystem("memory")
    for name, rows in ((f"day=1/b.{suffix}", ROWS[40:]), (f"a.{suffix}", ROWS[:40])):
        memory.pipe(f"/{tmp_path.name}/{name}", write(tmp_path / f"x.{suffix}", rows).read_bytes())
    memory.touch(f"/{tmp_path.name}/_SUCCESS")
    url = f"memory://{tmp_path.name}"
    rows = [row | {"day": "1" if number >= 40 else None} for number, row in enumerate(ROWS)]
    assert convert(tmp_path, url) == convert(tmp_path, f"{url}/**/*.{suffix}") == rows
    assert convert(tmp_path, f"{url}/a.{suffix}", "--filter", "[('score', '<', 0.1)]") == ROWS[:10]


@pytest.mark.parametrize("name", ["a.parquet", "a.orc", "stream.arrow", "a.csv", "a.jsonl.gz"])
def test_folders_key_value_become_columns(tmp_path, name):
    """As written, but for %20 and the like; null of the default name. The folder's value replaces a file's."""
    folders = ["lang=en/year=0023", "lang=en/year=24", "lang=pt%20br/year=0023", "lang=__HIVE_DEFAULT_PARTITION__"]
    columns = [("en", "0023"), ("en", "24"), ("pt br", "0023"), (None, None)]
    expected = []
    for number, (folder, (lang, year)) in enumerate(zip(folders, columns)):
        (tmp_path / "hive" / folder).mkdir(parents=True)
        write(tmp_path / "hive" / folder / name, [{"text": str(number), "lang": 5}])
        expected.append({"text": str(number), "lang": lang, "year": year})
    assert sorted(convert(tmp_path, tmp_path / "hive"), key=lambda row: row["text"]) == expected
    some = convert(tmp_path, tmp_path / "hive", "--filter", "[('lang', '==', 'en'), ('year', '>', '0023')]")
    assert some == expected[1:2]
    flags = ["--columns", "year", "year", "--filter", "[('lang', '==', 'pt br')]"]  # twice is once
    assert convert(tmp_path, tmp_path / "hive", *flags) == [{"year": "0023"}]
    # So do those of a source itself: a shell expands hive/lang=*/* before the script sees it.
    assert convert(tmp_path, tmp_path / "hive/lang=en/year=24") == expected[1:2]


@pytest.mark.parametrize("suffix", mark_slow(["jsonl", "parquet", "orc"], ["jsonl"]))
def test_rows_of_many_batches(tmp_path, suffix):
    """With nulls; after a filter, what is left of batches is merged."""
    rows = [{"n": i, "text": f"row {i}" if i % 9 else None} for i in range(20_000)]
    source = write(tmp_path / f"a.{suffix}", rows)
    assert convert(tmp_path, source, "--filter", "[('n', 'not in', [7])]") == rows[:7] + rows[8:]
    run(source, "--output_dir", tmp_path / "few", "--filter", f"[('n', 'in', {list(range(0, 20_000, 10))})]")
    with pa.ipc.open_stream(str(tmp_path / "few/data-00000.arrow")) as reader:
        assert [len(batch) for batch in reader] == [1000, 1000]


def test_sources_are_read_in_order_and_shards_are_memory_mapped(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "b.jsonl", ROWS[40:])
    write(folder / "a.jsonl", ROWS[:40])
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS[:40]).save_to_disk(saved)
    datasets.load_from_disk(str(saved)).map(lambda row: row | {"n": 0})  # writes a cache into the folder
    several = [[folder / "*.jsonl"], [f"file://{folder}/[ab].jsonl"]]
    several.append([saved, write(tmp_path / "c.parquet", ROWS[40:])])
    for i, sources in enumerate(several):
        out = tmp_path / f"out{i}"
        run(*sources, "--output_dir", out, "--rows_per_shard", "30")
        shards = [f"data-{k:05d}.arrow" for k in range(4)]
        assert sorted(path.name for path in out.iterdir()) == shards
        mapped = [datasets.Dataset.from_file(str(out / shard)) for shard in shards]
        assert [len(shard) for shard in mapped] == [30, 30, 30, 10]
        assert mapped[0].cache_files == [{"filename": str(out / shards[0])}]
        assert [row for shard in mapped for row in shard] == ROWS


FOLDER = {
    "0.jsonl": "", "b/1.jsonl.gz": "", "2.NDJSON": "", "train/test.jsonl": "", "contest.jsonl": "", "x[1].jsonl": "",
    "part-train-0.jsonl": "", "b/latest.jsonl": "", "README.md": None, "dataset_infos.json": None,
    ".DS_Store": "hidden", "LICENSE.txt": None, ".old.jsonl": "hidden", "_log/0.json": "hidden",
    "2.csv": "csv", "1.jsonl.gz": "",
    "0.jsonl.bak": "unknown format", "1.jsonl.part": "unknown format", "test.jsonl": "another split",
    "b/x-TestSet.jsonl": "another split", "testdata.jsonl": "another split", "split=test/0.jsonl": "another split",
    "validation/0.jsonl": "another split", "0.jsonl.gz": "compressed copy",
    "data/dev-00000-of-00001.jsonl": "another split",
}  # fmt: skip


def test_files_of_a_folder(tmp_path, capsys):
    """A name is no pattern, and what is left out is printed: hidden files, backups, other splits, other formats."""
    folder = tmp_path / "in[2]"
    for name in FOLDER:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"name": name}).encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    expected = sorted(name for name, why in FOLDER.items() if why == "")
    assert sorted(row["name"] for row in convert(tmp_path, folder)) == expected
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "reads" in line]
    assert f"in[2]: reads {len(expected)} json ({', '.join(expected[:3])})" in line
    for why in set(FOLDER.values()) - {"", None}:
        names = sorted(name for name, other in FOLDER.items() if other == why)
        assert f"; leaves out {len(names)} {why} ({', '.join(names[:3])})" in line
    assert not re.search("README|infos|LICENSE", line)
    (tmp_path / "in").mkdir()
    for name in ("test-[0].jsonl", "test-0.jsonl"):
        write(tmp_path / "in" / name, [{"name": name}])
    error = fail(tmp_path / "in", "--output_dir", tmp_path / "x")
    assert error.endswith("no file to read; leaves out 2 another split (test-0.jsonl, test-[0].jsonl)")
    assert len(convert(tmp_path, tmp_path / "in/test-*.jsonl")) == 2  # a pattern or a name says that it is meant
    assert convert(tmp_path, tmp_path / "in/test-[0].jsonl") == [{"name": "test-[0].jsonl"}]


def test_links_in_a_folder(tmp_path, monkeypatch):
    """Folders that links lead to are read, each once; one that cannot be listed is not left out without a word."""
    for name in ("elsewhere/2.jsonl", "folder/1.jsonl"):
        (tmp_path / name).parent.mkdir()
        write(tmp_path / name, [{"name": name}])
    for name, target in {"more": "elsewhere", "again": "folder", "z": "elsewhere"}.items():
        (tmp_path / "folder" / name).symlink_to(tmp_path / target)
    rows = convert(tmp_path, tmp_path / "folder")
    assert sorted(row["name"] for row in rows) == ["elsewhere/2.jsonl", "folder/1.jsonl"]
    listdir = os.listdir

    def refuse(path):
        if str(path).endswith("more"):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    error = fail(tmp_path / "folder", "--output_dir", tmp_path / "out")
    assert re.search("folder: .*Permission denied: '.*folder/more'", error)


@pytest.mark.parametrize("name", ["table", "table/*/*.parquet", "table/lang=de/1.parquet"])
def test_a_table_of_delta_lake_is_refused(tmp_path, name):
    """Its log says which of the files are of the table; others have rows that were deleted."""
    (tmp_path / "table/lang=de").mkdir(parents=True)
    (tmp_path / "table/_delta_log").mkdir()
    write(tmp_path / "table/lang=de/1.parquet")
    (tmp_path / "table/_delta_log/00000000000000000000.json").write_text("{}")
    error = fail(tmp_path / name, "--output_dir", tmp_path / "out")
    assert "a table of Delta Lake" in error and "DeltaTable(FOLDER).to_pandas().to_parquet(FILE)" in error


def test_irregular_json_becomes_regular(tmp_path, capsys):
    """Columns that are null first, appear late or rarely, or change type: integer to float, number or date to text."""
    rows = [{"n": i, "day": "2024-01-01", "x": None, "mixed": i, "deep": {"a": 1}} for i in range(2500)]
    rows += [{"n": 0.5, "day": "unknown", "x": "late", "mixed": "é" * 20_000, "deep": {"b": ["c"]}, "new": [1]}]
    rows += [{"mixed": {"k": [1, "é"]}, "n": None}, {"mixed": True, "x": float("nan")}]  # NaN: null, not a text
    got = convert(tmp_path, write(tmp_path / "a.jsonl", rows))
    empty = {"day": None, "x": None, "new": None, "deep.a": None, "deep.b": None, "n": None}
    assert got[7] == empty | {"n": 7, "day": "2024-01-01", "mixed": "7", "deep.a": 1}
    assert got[2500] == empty | {"n": 0.5, "day": "unknown", "x": "late", "mixed": "é" * 20_000, "deep.b": ["c"],
                                 "new": [1]}  # fmt: skip
    assert got[2501:] == [{**empty, "mixed": '{"k": [1, "é"]}'}, {**empty, "mixed": "true"}]
    lines = capsys.readouterr().out.splitlines()
    assert "column n (int64, double): written as n (double)" in lines
    assert any(line.endswith(": written as deep.a (int64), deep.b (list<item: string>)") for line in lines)
    large = write(tmp_path / "large.jsonl", [{"a": 2**60 + 1}, {"a": 2**80}, {"a": "007"}])
    assert convert(tmp_path, large) == [{"a": str(2**60 + 1)}, {"a": str(2**80)}, {"a": "007"}]


PASSAGES = [
    {"q": {"text": "a", "n": [1]}, "p": [{"t": "x", "u": {"v": 1}}, {"t": None, "u": None}]},
    {"q": None, "p": []},
    {"q": {"text": None, "n": None}, "p": None},
    {"q": {"text": "b", "n": []}, "p": [None, {"t": "y", "u": {"v": 2}}]},
]
FLAT = [
    {"q.text": "a", "q.n": [1], "p.t": ["x", None], "p.u.v": [1, None]},
    {"q.text": None, "q.n": None, "p.t": [], "p.u.v": []},
    {"q.text": None, "q.n": None, "p.t": None, "p.u.v": None},
    {"q.text": "b", "q.n": [], "p.t": [None, "y"], "p.u.v": [None, 2]},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.orc", "file.arrow"])
def test_objects_become_a_column_a_field(tmp_path, name):
    """Those of lists lists of each field; --columns and --filter name fields."""
    source = write(tmp_path / name, PASSAGES)
    assert convert(tmp_path, source) == FLAT
    expected = [{"p.t": row["p.t"], "q.text": row["q.text"]} for row in FLAT]
    assert convert(tmp_path, source, "--columns", "p.t", "q.text") == expected
    assert convert(tmp_path, source, "--columns", "q.n", "--filter", "[('q.text', '=', 'a')]") == [{"q.n": [1]}]
    error = fail(source, "--output_dir", tmp_path / "x", "--columns", "q")
    assert error == "--columns q: the columns are: q.text, q.n, p"


def test_a_list_beside_objects_and_numbers(tmp_path):
    rows = [{"a": {"t": "x"}, "s": 1}, {"a": [{"t": "y"}, {"u": 1}], "s": [0.5, True]}, {"a": None, "s": False}]
    expected = [{"a.t": ["x"], "a.u": [None], "s": [1.0]}, {"a.t": ["y", None], "a.u": [None, 1], "s": [0.5, 1.0]},
                {"a.t": None, "a.u": None, "s": [0.0]}]  # fmt: skip
    assert convert(tmp_path, write(tmp_path / "a.jsonl", rows)) == expected


KINDS = {
    "view": pa.array(["a", None], pa.string_view()),
    "dictionary": pa.array(["a", None]).dictionary_encode(),
    "binary": pa.array([b"a", None]),
    "date": pa.array([0, None], pa.date32()),
    "time": pa.array([0, None], pa.timestamp("ms")),
    "views": pa.array([["a", None], None], pa.list_(pa.string_view())),
    "fixed": pa.array([["a", "b"], None], pa.list_(pa.string(), 2)),
    "larges": pa.array([["a"], None], pa.large_list(pa.large_string())),
}
if int(pa.__version__.split(".")[0]) < 26:  # does not read a null of fixed size from Parquet
    KINDS.pop("fixed")


def test_other_types_of_texts_and_lists(tmp_path, capsys):
    """Each is written as text or a list of texts, which the other scripts read; a line says so."""
    pq.write_table(pa.table(KINDS), tmp_path / "x.parquet")
    first = {"date": "1970-01-01", "time": "1970-01-01 00:00:00.000", "views": ["a", None], "fixed": ["a", "b"],
             "larges": ["a"]}  # fmt: skip
    run(tmp_path / "x.parquet", "--output_dir", tmp_path / "out", "--format", "parquet")
    (file,) = (tmp_path / "out").iterdir()
    written = pq.read_table(file)
    assert {str(kind).replace("element", "item") for kind in written.schema.types} == {"string", "list<item: string>"}
    assert written.to_pylist() == [{kind: first.get(kind, "a") for kind in KINDS}, dict.fromkeys(KINDS)]
    out = capsys.readouterr().out
    assert "column date (date32[day]): written as date (string)\n" in out and "column view (string_view): " in out


def test_texts_that_look_like_dates_stay_texts(tmp_path):
    """pyarrow's JSON reader would make timestamps of them: "2020-01-01 00:00:00"."""
    days = ["2020-01-01", "2020-01-01 10:00:00", "2020-01-01T10:00:00Z", "2020-01-01T10:00:00.123456"]
    rows = [{"_id": day, "answers": [day], "nested": {"day": day, "all": [{"day": day}]}} for day in days]
    source = write(tmp_path / "a.jsonl", rows)
    expected = [{"_id": day, "answers": [day], "nested.day": day, "nested.all.day": [day]} for day in days]
    assert convert(tmp_path, source) == convert(tmp_path, source, format="parquet") == expected


def test_dates_and_bytes_in_objects_of_files_that_differ(tmp_path):
    """Of the file whose type is not that of all they were written in quotes, as JSON."""
    cells = {"day": datetime.date(2020, 1, 1), "at": datetime.datetime(2020, 1, 1, 10), "raw": b"text", "word": "a"}
    for number, more in enumerate([{}, {"more": "b"}]):
        columns = {"n": [cells | more], "all": [[cells | more]]}
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet")
    first, second = convert(tmp_path, tmp_path / "*.parquet")
    expected = {"day": "2020-01-01", "at": "2020-01-01 10:00:00.000000", "raw": "text", "word": "a"}
    for row in (first, second):
        assert {name: row[f"n.{name}"] for name in expected} == expected
        assert {name: row[f"all.{name}"] for name in expected} == {name: [text] for name, text in expected.items()}


def test_lone_surrogates_are_replaced(tmp_path, capsys):
    """In texts, lists and names; pairs, and backslashes before "ud", stay. Each is counted once, though read twice."""
    lines = [r'{"q": "fine \\ud83d \ud83d\ude00", "a": ["x"]}', r'{"q": "cut \uD83D", "a": ["\ude00 \ud83d"]}',
             r'{"q": {"\udfff": 1}, "a": null}']  # fmt: skip
    expected = [{"q": r"fine \ud83d 😀", "a": ["x"]}, {"q": "cut \ufffd", "a": ["\ufffd \ufffd"]},
                {"q": '{"\ufffd": 1}', "a": None}]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
    for name in ("a.jsonl", "b.json"):
        assert convert(tmp_path, tmp_path / name) == expected
        lines = [line for line in capsys.readouterr().out.splitlines() if ": lone surrogates" in line]
        assert len(lines) == 1 and f"{name}: lone surrogates" in lines[0] and lines[0].endswith(": 4")


def test_json_arrays(tmp_path):
    """As the trainers read them: objects over one or many lines, or texts."""
    objects = [json.dumps(ROWS), json.dumps(ROWS, indent=1), "\ufeff \n" + json.dumps(ROWS)]
    texts = [{"text": "a"}, {"text": "[b"}]
    for number, (text, rows) in enumerate([*((text, ROWS) for text in objects), ('["a", "[b"]', texts)]):
        (tmp_path / f"{number}.json").write_text(text)
        assert convert(tmp_path, tmp_path / f"{number}.json") == rows


def test_one_object_of_json(tmp_path, capsys):
    """Of a .json file: the rows of its only list of objects, or of its columns, as a line says. Else it is a row."""
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    frame = {name: {str(number): cell for number, cell in enumerate(cells)} for name, cells in columns.items()}
    data = {"version": 1, "data": ROWS, "tags": ["x"]}
    said = ["one object: reads the 100 objects of its list 'data', not version, tags"]
    said += ["one object, of columns: reads 100 rows"]
    for number, (found, line) in enumerate([(data, said[0]), (frame, said[1]), (columns, said[1])]):
        for indent in (None, 1):
            name = f"{number}{indent}.json"
            (tmp_path / name).write_text(json.dumps(found, indent=indent))
            assert convert(tmp_path, tmp_path / name) == ROWS and f"{name}: {line}\n" in capsys.readouterr().out
    row = {"q": {"text": "a"}, "p": {"text": "b"}, "more": [{"t": "x"}]}
    for name, found in (("a.json", row | {"even": [{"t": "y"}]}), ("b.jsonl", row)):
        write(tmp_path / name, [found])
        assert convert(tmp_path, tmp_path / name)[0]["q.text"] == "a"
        assert "one row, with lists: of JSON whose rows are in a list, write them first: jq" in capsys.readouterr().out
    write(tmp_path / "two.json", [data, data])  # lines
    assert len(convert(tmp_path, tmp_path / "two.json")) == 2


MISSING = [("a", "b", 1), ("c", None, 2), ("d", " \t", 3), ("e", "N/A", float("nan")), ("f", "g", None)]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_rows_without_a_value(tmp_path, suffix, capsys):
    """--drop_missing says how many it leaves out; in --filter, `not in` keeps them, and `!=` does not. The page."""
    rows = [dict(zip(("q", "a", "s"), row)) for row in MISSING]
    rows = [row | {"s": "" if row["q"] == "e" else row["s"]} for row in rows] if suffix == "csv" else rows
    source = write(tmp_path / f"x.{suffix}", rows)

    def kept(*flags):
        prepare_corpus.print_once.cache_clear()
        return "".join(row["q"] for row in convert(tmp_path, source, "--columns", "q", *flags))

    assert kept("--drop_missing", "a") == "aef"
    assert "column a: 2 rows without a value left out\n" in capsys.readouterr().out
    assert (
        kept("--drop_missing", "a", "s") == "a"
        and kept("--drop_missing", "a", "--filter", "[('q', '>', 'a')]") == "ef"
    )
    assert (
        kept("--filter", "[('a', 'not in', ['N/A'])]") == "acdf" and kept("--filter", "[('a', '!=', 'N/A')]") == "adf"
    )
    assert kept("--filter", "[('a', 'in', ['N/A', 'b'])]") == "ae" and kept("--filter", "[('a', '>', 'a')]") == "af"
    for none in ("[('a', '!=', None)]", "[('a', 'not in', ['N/A', None])]"):
        assert "--drop_missing leaves out rows without" in fail(
            source, "--output_dir", tmp_path / "x", "--filter", none
        )
    assert fail(source, "--output_dir", tmp_path / "x", "--drop_missing", "b").startswith(
        "--drop_missing, --split_by b: "
    )


def test_rows_without_a_text_in_lists(tmp_path):
    lists = [["a"], [], None, [None, " "], ["", "b"]]
    source = write(tmp_path / "x.jsonl", [{"n": n, "d": texts} for n, texts in enumerate(lists)])
    assert [row["n"] for row in convert(tmp_path, source, "--drop_missing", "d")] == [0, 4]


def test_all_rows_of_a_value_are_on_one_side(tmp_path, capsys):
    """Which stays the same when the table grows, and if it has other columns; rows without a value are trained on."""

    def split(count, *flags):
        rows = [{"site": f"site {n % 90}" if n % 7 else None, "text": f"text {n}", "n": n} for n in range(count)]
        out = tmp_path / f"{count}{len(flags)}"
        run(
            write(tmp_path / "x.parquet", rows), "--output_dir", out, "--split_by", "site", "--eval_share", 0.2, *flags
        )
        sides = [{row["n"]: row for row in read(out / side)} for side in ("train", "heldout")]
        assert sides[0].keys() | sides[1].keys() == set(range(count)) and not sides[0].keys() & sides[1].keys()
        return out, *sides

    out, train, held_out = split(1000)
    lines = capsys.readouterr().out.splitlines()
    said = [f"{name}/ {len(side):,} rows of " for name, side in (("train", train), ("heldout", held_out))]
    assert all(any(line.startswith(start) for line in lines) for start in said)
    assert lines[-1].startswith(
        f"to train on it: --train_data '{out}/train/*.arrow' --eval_data '{out}/heldout/*.arrow' --"
    )
    sites = [{row["site"] for row in side.values()} for side in (train, held_out)]
    assert not sites[0] & sites[1] and None in sites[0] and 9 < len(sites[1]) < 27
    _, _, more = split(1500, "--columns", "text", "n")
    assert {n for n in more if n < 1000} == set(held_out) and "site" not in next(iter(more.values()))
    chosen = []
    for name, numbers in {"x.parquet": [], "y.parquet": [None, 1.5], "z.csv": ["", 1.5]}.items():  # floats in the last
        numbers = [1_700_000_000_000 + n if not numbers else float(1_700_000_000_000 + n) for n in range(99)] + numbers
        source = write(tmp_path / name, [{"at": number, "text": "a"} for number in numbers])
        run(source, "--output_dir", tmp_path / f"by_{name}", "--split_by", "at", "--eval_share", 0.2)
        chosen.append({float(row["at"]) for row in read(tmp_path / f"by_{name}/heldout")} - {1.5})
    assert chosen[0] == chosen[1] == chosen[2] and 5 < len(chosen[0]) < 40
    source = write(tmp_path / "y.jsonl", [{"a": ["x"], "b": 1}] * 3)
    assert (
        fail(source, "--output_dir", tmp_path / "x", "--split_by", "a")
        == "--split_by a: has lists, not one value a row"
    )
    assert "no row: set --eval_share for " in fail(source, "--output_dir", tmp_path / "x", "--split_by", "b")


def test_columns_that_are_not_asked_for_may_be_of_any_type(tmp_path):
    unused = {"map": pa.array([[("k", "v")], None], pa.map_(pa.string(), pa.string())),
              "view": pa.array([["x"], None], pa.list_view(pa.string()))}  # fmt: skip
    table = pa.table({"q": ["a", "b"], "a": pa.array(["x", "y"]).dictionary_encode()} | unused)
    source = tmp_path / "x.arrow"
    with pa.ipc.new_file(str(source), table.schema) as writer:
        writer.write_table(table)
    assert convert(tmp_path, source, "--columns", "q", "a") == [{"q": "a", "a": "x"}, {"q": "b", "a": "y"}]
    assert convert(tmp_path, source, "--columns", "a", "--filter", "[('q', '!=', 'a')]") == [{"a": "y"}]
    assert convert(tmp_path, source, "--columns", *unused)[0] == {"map": [["k", "v"]], "view": ["x"]}


def test_columns_that_begin_late_in_json(tmp_path):
    """Whose types are those of all rows, also where only such columns are asked for."""
    early = [{"neg": "t", "passage": {"text": "u"}}]
    late = [{"q": "x"}] * 1000 + [{"neg": ["v", "w"], "passage": {"text": "y", "title": "z"}}]
    write_rows(tmp_path / "in/a.jsonl", early)
    write_rows(tmp_path / "in/b.jsonl", late)
    assert convert(tmp_path, tmp_path / "in", "--columns", "neg")[::1001] == [{"neg": ["t"]}, {"neg": ["v", "w"]}]
    got = convert(tmp_path, tmp_path / "in", "--columns", "passage.title")
    assert [row for row in got if row["passage.title"]] == [{"passage.title": "z"}]


def test_values_of_csv_are_kept_as_written(tmp_path):
    lines = [f"{i},2024-01-01,7,007,12345678901234567890,true,{i},,NA,," for i in range(1500)]
    lines += ['0.5,"un\nknown",7b,"say ""hi"", he",5" disk,"C:\\dir\\",,,None,,late']
    (tmp_path / "a.csv").write_text("n,day,x,code,long,flag,gap,none,word,void,last\n" + "\n".join(lines) + "\n")
    got = convert(tmp_path, tmp_path / "a.csv")
    same = {"code": "007", "long": "12345678901234567890", "flag": "true", "none": None, "void": None, "word": "NA"}
    assert got[0] == {"n": "0", "day": "2024-01-01", "x": "7", "gap": "0", "last": None, **same}
    last = ["0.5", "un\nknown", "7b", 'say "hi", he', '5" disk', "C:\\dir\\", None, None, "None", None, "late"]
    assert list(got[1500].values()) == last


def test_tsv_is_text(tmp_path):
    """Quotes are characters, empty files are passed over, and a query of a URL is no suffix."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/0.tsv").write_text("")
    words = ["NA", "0016", "9007199254740993", '"open', "'x", ""]
    (tmp_path / "in/1.tsv").write_text("\n".join(["a\tb", *(f"{word}\t1" for word in words)]))
    assert convert(tmp_path, tmp_path / "in") == [{"a": word or None, "b": "1"} for word in words]
    assert prepare_corpus.file_suffix("https://host/x.tsv.gz?download=true") == ".tsv"


def test_headers_and_lengths_of_csv_rows(tmp_path):
    """Names of pandas; missing last fields, trailing separators, empty lines, line ends, a text above 128 KiB."""
    long = "é" * 200_000
    (tmp_path / "a.csv").write_bytes(f'\ufeff,a,a\r\n0,x\r\n\r\n1,y,"{long}",\r\n  \r\n2,,z'.encode())
    expected = [("0", "x", None), ("1", "y", long), ("2", None, "z")]
    assert [tuple(row.values()) for row in convert(tmp_path, tmp_path / "a.csv")] == expected
    assert list(convert(tmp_path, tmp_path / "a.csv")[0]) == ["Unnamed: 0", "a", "a.1"]


def test_exit_of_a_run(tmp_path):
    """Of the script copied alone into a folder: the output is complete, and the status is that of the run."""
    write(tmp_path / "a.jsonl")
    (tmp_path / "prepare_corpus.py").write_bytes(SCRIPT.read_bytes())
    command, options = [sys.executable, "prepare_corpus.py"], {"cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([*command, "a.jsonl", "--output_dir", "out"], **options)
    assert done.returncode == 0 and "terminate" not in done.stderr
    line = f"to train on it: --train_data '{tmp_path}/out/*.arrow' --columns QUERY POSITIVE ...\n"
    assert done.stdout.endswith(f"out\n{line}")
    done = subprocess.run([*command, "none.csv", "--output_dir", "x"], **options)
    assert done.returncode == 1 and done.stderr.startswith("error: none.csv: ") and done.stderr.count("\n") == 1


def test_bad_sources_are_refused_in_one_line_and_lose_nothing(tmp_path, monkeypatch):
    """Other refusals, and the lines of files that they name: tests/test_contract.py."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("kept")
    good = write(tmp_path / "good.jsonl")
    for name in ("p.parquet", "o.orc", "j.jsonl.gz", "f_file.arrow", "s.arrow"):
        data = write(tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) * 3 // 4])
        assert name in fail(good, tmp_path / name, "--output_dir", out, "--overwrite")
    invalid = write(tmp_path / "a.orc").read_bytes().replace("row 51: é".encode(), b"row 51: \xff\xff")
    texts = {"invalid.orc": (invalid, "Invalid UTF8"), "array.json": (b"[1, 2]\n", "nor an array of objects: [1, 2]"),
             "none.json": (b"[]", "no row"), "empty.jsonl": (b"", "no row"), "only_header.csv": (b"a,b\n", "no row"),
             "a.xlsx": (b"", ""), "a.parquet.gz": (b"", "")}  # fmt: skip
    for name, (content, expected) in texts.items():
        (tmp_path / name).write_bytes(content)
        error = fail(tmp_path / name, "--output_dir", out, "--overwrite")
        assert name in error and expected in error, error
    monkeypatch.chdir(tmp_path)
    for source in ("absent.jsonl", "absent*.jsonl", "absent/folder", "nosuch://bucket/a.csv"):
        assert source in fail(source, "--output_dir", "new/out") and not Path("new").exists()
    (tmp_path / "data").mkdir()  # so data/absent is no Hub id
    assert fail("data/absent", "--output_dir", out, "--overwrite") == "data/absent: no such file or folder"
    assert "unknown encoding: none" in fail(good, "--encoding", "none", "--output_dir", out, "--overwrite")
    assert "--overwrite" in fail(good, "--output_dir", out)
    assert "contains a SOURCE" in fail(write(out / "in.jsonl"), "--output_dir", out, "--overwrite")
    (out / "in.jsonl").unlink()
    assert [path.name for path in out.iterdir()] == ["precious"] and not list(tmp_path.glob(".out*"))
    run(good, "--output_dir", out, "--overwrite")
    assert [path.name for path in out.iterdir()] == ["data-00000.arrow"]


def test_bad_columns_and_filters(tmp_path):
    good, out = write(tmp_path / "good.jsonl"), tmp_path / "out"
    assert "the columns are: text, score, lang" in fail(good, "--output_dir", out, "--columns", "title")
    lists = write(tmp_path / "lists.jsonl", [{"text": ["a", "b"], "lang": "en"}])
    for source, text in [
        (good, "score > 1"),
        (good, "__import__('os').getcwd()"),
        (good, "[('score', '~', 1)]"),
        (good, "[('title', '>', 1)]"),
        (good, "[('lang', '>', 1)]"),
        (good, "[('score', '>', 7)]"),
        (lists, "[('text', '!=', 'a')]"),
        (good, "~pc.field('lang').is_null()"),
        (good, "[('a', 1)]"),
    ]:
        message = fail(source, "--output_dir", out, "--filter", text)
        assert f"--filter {text!r}" in message and not re.search("kernel|malformed|ast[.]|Traceback|FieldRef", message)
        assert "7" in text or "a list of (column, operator, value), by = != < >" in message
    assert not out.exists()


WRONG_FLAGS = {
    "a.csv": "require --output_dir",
    "a.csv --output_dir x --rows_per_shard 0": "must be above 0",
    "--filter []": "require SOURCE",
    "--split_by a": "require SOURCE",
    "a.csv --output_dir x --split_by a --eval_share 1": "must be above 0, the last below 1",
    "a.csv --length_report --model_name_or_path x --drop_missing a": "without flags that choose rows",
    "a.csv --ir_dataset beir/scifact": "excludes",
    "a.csv --length_report": "--length_report requires",
    "a.csv --output_dir s3://b/x": "must be a local folder; copy it when it is complete: aws s3 cp --recursive F",
}


@pytest.mark.parametrize("flags", WRONG_FLAGS)
def test_wrong_flags(flags, capsys):
    with pytest.raises(SystemExit):
        prepare_corpus.parse_args(flags.split())
    assert WRONG_FLAGS[flags] in capsys.readouterr().err.splitlines()[-1]


def test_a_killed_conversion_leaves_no_output_folder(tmp_path):
    """Killed while it writes shards, then run again."""
    write(tmp_path / "a.jsonl", ROWS * 500)
    command = [sys.executable, SCRIPT, "a.jsonl", "--output_dir", "out", "--rows_per_shard", "100"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob(".out.part/data-00003*")):
        pass
    process.kill()
    process.wait()
    assert list(tmp_path.glob(".out.part/*")) and not (tmp_path / "out").exists()
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[0]))
    run(tmp_path / "a.jsonl", "--output_dir", tmp_path / "out")
    assert read(tmp_path / "out") == ROWS[:1] and not list(tmp_path.glob(".out*"))


def test_ir_dataset_gives_what_the_other_scripts_read(tmp_path, monkeypatch):
    """A dataset of local files with triples, registered by name like those of the package."""
    import ir_datasets
    from ir_datasets.datasets.base import Dataset
    from ir_datasets.formats import GenericDocPair

    (tmp_path / "docs.tsv").write_text("".join(f"d{i}\tdocument {i} about things\n" for i in range(9)))
    (tmp_path / "queries.tsv").write_text("q1\tfirst query\nq2\tsecond query\n")
    (tmp_path / "qrels").write_text("q1 0 d3 1\nq2 0 d4 2\nq2 0 d5 0\n")
    files = {"docs_tsv": "docs.tsv", "queries_tsv": "queries.tsv", "qrels_trec": "qrels"}
    plain = ir_datasets.create_dataset(**{kind: str(tmp_path / name) for kind, name in files.items()})

    class Triples:
        def docpairs_iter(self):
            return iter([GenericDocPair("q1", "d3", "d1"), GenericDocPair("q2", "d4", "d2")])

    monkeypatch.setitem(ir_datasets.registry._registered, "local/plain/dev", Dataset(plain, Triples()))
    monkeypatch.setattr(Dataset, "has_docpairs", lambda self: True, raising=False)
    folder = tmp_path / "out"
    run("--ir_dataset", "local/plain/dev", "--output_dir", folder)
    texts = [(folder / f"{name}.jsonl").read_text() for name in ("corpus", "queries", "triples")]
    corpus, queries, triples = ([json.loads(line) for line in text.splitlines()] for text in texts)
    assert len(corpus) == 9 and corpus[3] == {"_id": "d3", "title": "", "text": "document 3 about things"}
    assert queries == [{"_id": "q1", "text": "first query"}, {"_id": "q2", "text": "second query"}]
    assert triples[0] == {"query": "q1", "positive": "d3", "negative": "d1"} and len(triples) == 2
    judgments = ["query-id\tcorpus-id\tscore", "q1\td3\t1", "q2\td4\t2", "q2\td5\t0"]
    assert (folder / "qrels/dev.tsv").read_text().splitlines() == judgments
    assert "--ir_dataset nobody/nothing: " in fail("--ir_dataset", "nobody/nothing", "--output_dir", tmp_path / "x")


def test_length_report(tmp_path, bert, rows, capsys, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setattr(Figure, "savefig", draw)
    source = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{**row, "number": i} for i, row in enumerate(rows)]), source)
    flags = ["--model_name_or_path", bert, "--output_dir", tmp_path / "out", "--max_length", 100, "--length_report"]

    def report(*argv):
        run(argv[0], *merge_flags([*flags, *argv[1:]]))
        return json.loads((tmp_path / "out/lengths.json").read_text())

    metadata, tokenizer = report(source), AutoTokenizer.from_pretrained(bert)
    lengths = {name: [len(tokenizer(row[name])["input_ids"]) for row in rows] for name in rows[0]}
    assert set(metadata["columns"]) == {"docstring", "code"} and metadata["texts"] == 2 * len(rows)
    assert metadata["tokens"] == sum(map(sum, lengths.values()))
    assert metadata["columns"]["code"]["max"] == max(lengths["code"])
    assert metadata["columns"]["docstring"]["95%"] == pytest.approx(np.percentile(lengths["docstring"], 95))
    flat = np.sort(lengths["docstring"] + lengths["code"])  # not truncated
    assert metadata["limit"] == metadata["advice"]["max_length"] == 100 and flat[-1] > 500
    assert metadata["share_beyond_limit"] == pytest.approx(np.mean(flat > 100)) and np.mean(flat > 100) > 0.1
    assert (tmp_path / "out/lengths.png").read_bytes()[:4] == b"\x89PNG"
    captured = capsys.readouterr()
    assert (
        f"; {np.mean(flat > 100):.1%} exceed the limit of 100\ntry --max_length 100, that limit; see " in captured.out
    )
    longest = report(source, "--max_length", "512")["advice"]["max_length"]  # which truncates at most 1 %
    assert np.mean(flat <= longest) >= 0.99 > np.mean(flat <= longest - 8)
    out = capsys.readouterr().out
    assert f"99 % of the texts have at most {longest} tokens; " in out and f"try --max_length {longest}; see " in out
    model = shutil.copytree(bert, tmp_path / "model")
    own = ["--model_name_or_path", model, "--output_dir", tmp_path / "own"]
    for file, key, limit in (
        ("config.json", "max_position_embeddings", 99),
        ("sentence_bert_config.json", "max_seq_length", 77),
    ):
        (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | {key: limit}))
        run(source, "--length_report", *own)
        assert json.loads((tmp_path / "own/lengths.json").read_text())["limit"] == limit
    # Not of the first rows alone, which are the shortest; of any format, and of lists with nulls.
    growing = write(tmp_path / "growing.orc", [{"text": "word " * (number // 50)} for number in range(2500)])
    everything, sample = (report(growing, "--sample", size)["columns"]["text"] for size in ("2500", "500"))
    assert 470 <= sample["count"] <= 500 and sample["mean"] == pytest.approx(everything["mean"], rel=0.1)
    table = pa.table({"pair": pa.array([["a", "b"], ["c", ""], None], pa.list_(pa.string(), 2))})
    with pa.ipc.new_stream(tmp_path / "masked.arrow", table.schema) as writer:
        writer.write_table(table)
    assert report(tmp_path / "masked.arrow")["columns"]["pair"]["count"] == 3
    assert list(report(source, "--columns", "code")["columns"]) == ["code"]


def test_length_report_on_bad_input(tmp_path, bert):
    numbers = write(tmp_path / "numbers.parquet", [{"number": 1}])
    for model, expected in ((bert, "numbers.parquet: contains no text"),
                            ("/nowhere", "--model_name_or_path /nowhere: no such file or folder")):  # fmt: skip
        flags = [numbers, "--length_report", "--model_name_or_path", model, "--output_dir", tmp_path / "out"]
        assert expected in fail(*flags) and not (tmp_path / "out").exists()


def test_equal_questions_are_on_one_side(tmp_path):
    """Those that differ in case and white space alone count as one, as in the other scripts."""
    rows = [{"q": f"{text} {n}"} for n in range(30) for text in ("what is", "What  IS")]
    write_rows(tmp_path / "a.jsonl", rows)
    run(tmp_path / "a.jsonl", "--split_by", "q", "--eval_share", 0.3, "--output_dir", tmp_path / "out")
    sides = [{row["q"].split()[-1] for row in read(tmp_path / f"out/{side}")} for side in ("train", "heldout")]
    assert sides[0].isdisjoint(sides[1]) and all(sides)


def test_an_output_in_a_source_is_refused(tmp_path):
    write_rows(tmp_path / "in/a.jsonl", [{"q": "x"}])
    assert "in a SOURCE, which the next call would read" in fail(tmp_path / "in", "--output_dir", tmp_path / "in/out")


def test_values_without_a_type_become_texts(tmp_path):
    """Bytes and decimals without quotes."""
    table = pa.table({"a": pa.array([[("k", b"hello")]], pa.map_(pa.string(), pa.binary()))})
    pq.write_table(table, tmp_path / "map.parquet")
    assert convert(tmp_path, tmp_path / "map.parquet") == [{"a": [["k", "hello"]]}]


@pytest.mark.parametrize("found, expected", [
    ({"q": ["a", "b"], "d": [{"text": "x"}, {"text": "y"}]}, [{"q": "a", "d.text": "x"}, {"q": "b", "d.text": "y"}]),
    ({"n": 1, "d": [{"text": "x"}, {"text": "y"}]}, [{"text": "x"}, {"text": "y"}]),
    ({"q": {"0": "a", "1": "b"}, "d": {"0": "x", "1": "y"}}, [{"q": "a", "d": "x"}, {"q": "b", "d": "y"}]),
    ({"q": {"0": "a", "1": "b"}, "d": {"1": "y", "0": "x"}}, [{"q.0": "a", "q.1": "b", "d.1": "y", "d.0": "x"}]),
])  # fmt: skip
def test_columns_of_one_object(tmp_path, found, expected):
    (tmp_path / "a.json").write_text(json.dumps(found))
    assert convert(tmp_path, tmp_path / "a.json") == expected
