"""prepare_corpus.py: the demo corpus from generated files, its models, every input format, and bad input."""

import ast
import gzip
import json
import os
import random
import re
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
from forked import draw
from matplotlib.figure import Figure

try:
    from compression import zstd  # Python 3.14
except ImportError:
    from backports import zstd


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
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    separator = "\t" if ".tsv" in path.name else ","
    csv = "".join(separator.join(map(str, row)) + "\n" for row in [list(rows[0]), *(row.values() for row in rows)])
    match path.suffix if path.suffix not in (".gz", ".zst") else "":
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=30)
        case ".orc":
            pa.orc.write_table(pa.Table.from_pylist(rows), path)
        case ".arrow":
            table = pa.Table.from_pylist(rows)
            new = pa.ipc.new_file if "file" in path.name else pa.ipc.new_stream
            with new(str(path), table.schema) as writer:
                writer.write_table(table, 30)
        case _:
            data = (csv if "sv" in path.name else lines).encode()
            half = data.index(b"\n", len(data) // 2) + 1
            # Two members each, as from `cat a.gz b.gz`: a reader must not stop after the first.
            if path.suffix == ".gz":
                data = gzip.compress(data[:half]) + gzip.compress(data[half:])
            if path.suffix == ".zst":
                data = zstd.compress(data[:half]) + zstd.compress(data[half:])
            path.write_bytes(data)
    return path


def read(folder, format="arrow"):
    files = sorted(str(path) for path in folder.glob(f"*.{format}"))
    cache = str(folder.parent / "cache")
    return datasets.load_dataset(format, data_files=files, split="train", cache_dir=cache).to_list()


def convert(tmp_path, *argv, format="arrow"):
    """Convert to a new folder and return its rows."""
    out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
    run(*argv, "--output_dir", out, "--format", format)
    return read(out, format)


# ------------------------------------------------------------------------------------------------ the demo corpus


def test_docstrings_are_stripped_from_every_kind_of_function(tmp_path):
    def pairs(text):
        (tmp_path / "a.py").write_text(text)
        return prepare_corpus.docstring_pairs(tmp_path / "a.py")

    source = '''
class Box:
    """A box."""
    @property
    @cached("x")
    def width(self):
        """Return the   width
        of it.

        Not this paragraph."""
        text = """
at column 0"""
        return text  # é

    async def fetch(self): "Fetch the next é item."; return 1

def outer(items):
    "Count the given items."
    def inner():
        """Say something useful here."""
        return 2
    if items:
        return inner
    # the end
    return len(items)

def stub(self):
    """Return the answer of everything."""
    raise NotImplementedError

def pointer():
    """See the base class."""
    return 3

def bare():
    return 4
'''
    assert dict(pairs(source)) == {
        "Return the width of it.": '@property\n@cached("x")\ndef width(self):\n    text = """\nat column 0"""\n'
        "    return text  # é",
        "Count the given items.": "def outer(items):\n    def inner():\n        return 2\n    if items:\n"
        "        return inner\n    # the end\n    return len(items)",
        "Say something useful here.": "def inner():\n    return 2",
    }
    one_liner = 'async def fetch(self): "Fetch the next é item."; x = [\n    1]\n'
    assert pairs(one_liner) == [("Fetch the next é item.", "async def fetch(self): x = [\n    1]")]


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
    folder, report = build(tree, "a")
    assert not (tree / "imported").exists()
    assert report["files"] == 212  # of which two do not parse
    rows = {}
    for path in folder.rglob("*.parquet"):
        table = pq.read_table(path)
        assert table.column_names == ["docstring", "code"]
        rows[path.parent.name, path.name.split("-")[0]] = table.to_pylist()
    assert len(rows) == 4
    assert {(split, s): n for split, part in report["pairs"].items() for s, n in part.items()} == {
        key: len(part) for key, part in rows.items()}  # fmt: skip
    everything = [(split, row) for (split, _), part in rows.items() for row in part]
    # One unique pair per file, and each duplicate once, among the held-out pairs.
    assert len(everything) == 210 + 2
    assert sum(row["code"].startswith("def own") for _, row in everything) == 210
    assert [split for split, row in everything if row["docstring"].startswith("Say the Same")] == ["heldout"]
    assert [split for split, row in everything if "vendored" in row["code"]] == ["heldout"]
    assert 2 <= sum(split == "heldout" for split, _ in everything) - 2 <= 25
    order = [row["code"] for row in rows["train", "packages"]]
    assert order != sorted(order) and len(order) > 100


def test_demo_is_byte_identical_and_independent_of_other_files(tree):
    first, _ = build(tree, "a")
    second, _ = build(tree, "b")
    files = sorted(path.relative_to(first) for path in first.rglob("*.parquet"))
    assert len(files) == 4
    assert all((first / file).read_bytes() == (second / file).read_bytes() for file in files)
    # The split of a file does not depend on the others: removing one moves no pair to the other split.
    (tree / "roots/packages/package0/module0.py").unlink()
    third, _ = build(tree, "c")
    before, after = ([code for path in folder.glob("heldout/*") for code in pq.read_table(path)["code"].to_pylist()]
                     for folder in (first, third))  # fmt: skip
    assert {code for code in after if "own" in code} <= set(before)


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


# ------------------------------------------------------------------------------------------------- the conversion

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


TYPES = pa.int8(), pa.int64(), pa.float32(), pa.bool_(), pa.timestamp("ns", "UTC"), pa.decimal128(25, 3), pa.string()


@pytest.mark.parametrize("keep", [None, "[('score', '>', 0.5), ('text', 'not in', ['row 51', 'row 2000'])]"])
def test_orc_and_parquet_give_the_same_shards(tmp_path, keep):
    """The same types, rows and batches, nulls included; of the other files, one is empty and one lacks columns."""
    numbers = [None if i % 7 == 0 else i % 100 for i in range(4500)]
    columns = {str(kind): pa.array(numbers, pa.int64()).cast(kind) for kind in TYPES}
    columns["score"] = np.arange(4500) / 1000
    columns["text"] = [f"row {i}" if i % 9 else None for i in range(4500)]
    columns["nested"] = [{"a": [{"b": [f"é{i}", None]}] * (i % 3), "c": i} if i % 5 else None for i in range(4500)]
    columns["binary"] = [bytes([i % 256]) * (i % 5) for i in range(4500)]
    table = pa.table(columns)
    other = table.select(["text", "score", "nested"]).slice(0, 10)
    shards = []
    names = [*map(str, TYPES), "score", "text", "nested.a.b", "nested.c"]
    for suffix, write_table in (("orc", pa.orc.write_table), ("parquet", pq.write_table)):
        folder = tmp_path / suffix
        folder.mkdir()
        for i, part in enumerate((table, table.slice(0, 0), other)):
            write_table(part, folder / f"{i}.{suffix}")
        flags = ["--columns", *names, "--rows_per_shard", "1500"]
        run(folder, "--output_dir", folder / "out", *flags, *(["--filter", keep] if keep else []))
        readers = [pa.ipc.open_stream(str(path)) for path in sorted((folder / "out").iterdir())]
        shards.append([batch for reader in readers for batch in reader])
    orc, parquet = shards
    assert len(orc) == len(parquet) and all(a.equals(b, check_metadata=True) for a, b in zip(orc, parquet))
    date = str(TYPES[4])
    table = table.set_column(4, date, table[date].cast(pa.string()))
    for name, of_row in {
        "nested.a.b": lambda row: row and [part["b"] for part in row["a"]],
        "nested.c": lambda row: row and row["c"],
    }.items():
        table = table.append_column(name, [[of_row(row) for row in table["nested"].to_pylist()]])
    expected = pa.concat_tables([table, table.select(names[7:]).slice(0, 10)], promote_options="default").select(names)
    expected = expected.filter(prepare_corpus.pq.filters_to_expression(ast.literal_eval(keep))) if keep else expected
    assert pa.Table.from_batches(orc).equals(expected) and len(expected) > 3000


@pytest.mark.parametrize("write_table", [pa.orc.write_table, pq.write_table])
def test_a_file_is_not_read_ahead(tmp_path, write_table):
    """While the first rows of a file of 61 MB are in use, less than 25 MB are allocated."""
    texts = pa.array(["x" * 300] * 200_000)
    suffix = "orc" if write_table is pa.orc.write_table else "parquet"
    options = {} if suffix == "orc" else {"row_group_size": 20_000, "use_dictionary": False}
    write_table(pa.table({"a": texts}), tmp_path / f"a.{suffix}", compression="zstd", **options)
    del texts  # which are allocated, too
    before, tables = pa.total_allocated_bytes(), prepare_corpus.read_columns(str(tmp_path / f"a.{suffix}"))
    assert [next(tables)[0] for _ in range(2)] == [0, 1000]
    time.sleep(0.5)
    assert pa.total_allocated_bytes() - before < 25e6


@pytest.mark.parametrize("suffix", ["orc", "parquet"])
def test_folders_and_files_of_a_remote_file_system(tmp_path, suffix):
    memory = fsspec.filesystem("memory")
    for name, rows in ((f"day=1/b.{suffix}", ROWS[40:]), (f"a.{suffix}", ROWS[:40])):
        with memory.open(f"/{tmp_path.name}/{name}", "wb") as file:
            file.write(write(tmp_path / f"x.{suffix}", rows).read_bytes())
    memory.touch(f"/{tmp_path.name}/_SUCCESS")
    url = f"memory://{tmp_path.name}"
    rows = [row | {"day": "1" if number >= 40 else None} for number, row in enumerate(ROWS)]
    assert convert(tmp_path, url) == convert(tmp_path, f"{url}/**/*.{suffix}") == rows
    assert convert(tmp_path, f"{url}/a.{suffix}", "--filter", "[('score', '<', 0.1)]") == ROWS[:10]
    memory.touch(f"/{tmp_path.name}-empty/_SUCCESS")
    assert f"{url}-empty" in fail(f"{url}-empty", "--output_dir", tmp_path / "out")


@pytest.mark.parametrize("name", ["a.parquet", "a.orc", "stream.arrow", "a.csv", "a.jsonl.gz"])
def test_folders_key_value_become_columns(tmp_path, name):
    """Of texts as they are written, but for %20 and the like; null of the default name."""
    folders = ["lang=en/year=2023", "lang=en/year=2024", "lang=pt%20br/year=2023", "lang=__HIVE_DEFAULT_PARTITION__"]
    columns = [("en", "2023"), ("en", "2024"), ("pt br", "2023"), (None, None)]
    expected = []
    for number, (folder, (lang, year)) in enumerate(zip(folders, columns)):
        (tmp_path / "hive" / folder).mkdir(parents=True)
        write(tmp_path / "hive" / folder / name, [{"text": str(number)}])
        expected.append({"text": str(number), "lang": lang, "year": year})

    def by_text(rows):
        return sorted(rows, key=lambda row: row["text"])

    assert by_text(convert(tmp_path, tmp_path / "hive")) == expected
    some = convert(tmp_path, tmp_path / "hive", "--filter", "[('lang', '==', 'en'), ('year', '>', '2023')]")
    assert some == expected[1:2]
    some = convert(tmp_path, tmp_path / "hive", "--columns", "year", "--filter", "[('lang', '==', 'pt br')]")
    assert some == [{"year": "2023"}]
    # So do those of a source itself: a shell expands hive/lang=*/* before the script sees it.
    assert by_text(convert(tmp_path, *sorted((tmp_path / "hive").glob("lang=*/*=*")))) == expected[:3]


def test_folders_whose_numbers_begin_with_zeros(tmp_path):
    """They are names, as ids of other formats are."""
    for value in ("0012", "12"):
        (tmp_path / f"hive/docid={value}").mkdir(parents=True)
        write(tmp_path / f"hive/docid={value}/x.jsonl", [{"text": "x"}])
    rows = convert(tmp_path, tmp_path / "hive", "--columns", "docid", "text", "docid")  # twice is once
    assert rows == [{"docid": "0012", "text": "x"}, {"docid": "12", "text": "x"}]


def test_a_column_in_the_file_and_in_the_folder(tmp_path):
    """It has the folder's value."""
    (tmp_path / "hive/lang=7").mkdir(parents=True)
    for name in ("a.parquet", "b.jsonl"):
        source = write(tmp_path / "hive/lang=7" / name, [{"lang": 5, "text": "x"}])
        assert convert(tmp_path, source) == [{"lang": "7", "text": "x"}]


def test_batches_are_merged_after_filtering(tmp_path):
    source = write(tmp_path / "a.jsonl", [{"n": i, "text": "x"} for i in range(20_000)])
    assert len(convert(tmp_path, source, "--filter", "[('n', 'not in', [7])]")) == 19_999
    run(source, "--output_dir", tmp_path / "few", "--filter", f"[('n', 'in', {list(range(0, 20_000, 10))})]")
    with pa.ipc.open_stream(str(tmp_path / "few/data-00000.arrow")) as reader:
        assert [len(batch) for batch in reader] == [1000, 1000]


def test_sources_are_read_in_order_and_shards_are_memory_mapped(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "b.jsonl", ROWS[40:])
    write(folder / "a.jsonl", ROWS[:40])
    (folder / "README.md").write_text("not a table")
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS[:40]).save_to_disk(saved)
    datasets.load_from_disk(str(saved)).map(lambda row: row | {"n": 0})  # writes a cache into the folder
    several = [[folder], [folder / "*.jsonl"], [f"file://{folder}/[ab].jsonl"]]
    several += [[saved, write(tmp_path / "c.parquet", ROWS[40:])]]
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
    rows = convert(tmp_path, folder)
    assert sorted(row["name"] for row in rows) == expected
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "reads" in line]
    assert f"in[2]: reads {len(expected)} json ({', '.join(expected[:3])})" in line
    for why in ("hidden", "csv", "unknown format", "another split", "compressed copy"):
        names = sorted(name for name, other in FOLDER.items() if other == why)
        assert f"; leaves out {len(names)} {why} ({', '.join(names[:3])})" in line
    assert not re.search("README|infos|LICENSE", line)
    (tmp_path / "in").mkdir()
    for name in ("x[1].jsonl", "x1.jsonl"):
        write(tmp_path / "in" / name, [{"name": name}])
    assert convert(tmp_path, tmp_path / "in/x[1].jsonl") == [{"name": "x[1].jsonl"}]


def test_a_folder_of_another_split(tmp_path):
    """It is refused; a pattern or a name says that it is meant."""
    for name in ("test-0.jsonl", "test-1.jsonl"):
        write(tmp_path / name, [{"name": name}])
    error = fail(tmp_path, "--output_dir", tmp_path / "out")
    assert error.endswith("no file to read; leaves out 2 another split (test-0.jsonl, test-1.jsonl)")
    assert len(convert(tmp_path, tmp_path / "test-*.jsonl")) == 2
    assert len(convert(tmp_path, tmp_path / "test-0.jsonl")) == 1


def test_links_in_a_folder(tmp_path):
    """Folders that links lead to are read, each once, also where they lead back."""
    for name in ("elsewhere/2.jsonl", "folder/1.jsonl"):
        (tmp_path / name).parent.mkdir()
        write(tmp_path / name, [{"name": name}])
    for name, target in {"folder/more": "elsewhere", "folder/again": "folder", "folder/z": "elsewhere"}.items():
        (tmp_path / name).symlink_to(tmp_path / target)
    (tmp_path / "link").symlink_to("folder")
    for source in ("folder", "link"):
        rows = convert(tmp_path, tmp_path / source)
        assert sorted(row["name"] for row in rows) == ["elsewhere/2.jsonl", "folder/1.jsonl"]


def test_a_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    """Its files are not left out without a word."""
    (tmp_path / "in/more").mkdir(parents=True)
    write(tmp_path / "in/1.jsonl")
    listdir = os.listdir

    def refuse(path):
        if str(path).endswith("more"):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert re.search("in: .*Permission denied: '.*in/more'", fail(tmp_path / "in", "--output_dir", tmp_path / "out"))


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
    rows += [{"mixed": {"k": [1, "é"]}, "n": None}, {"mixed": True}]
    got = convert(tmp_path, write(tmp_path / "a.jsonl", rows))
    empty = {"day": None, "x": None, "new": None, "deep.a": None, "deep.b": None, "n": None}
    assert got[7] == empty | {"n": 7, "day": "2024-01-01", "mixed": "7", "deep.a": 1}
    assert got[2500] == empty | {"n": 0.5, "day": "unknown", "x": "late", "mixed": "é" * 20_000, "deep.b": ["c"],
                                 "new": [1]}  # fmt: skip
    assert got[2501:] == [{**empty, "mixed": '{"k": [1, "é"]}'}, {**empty, "mixed": "true"}]
    lines = capsys.readouterr().out.splitlines()
    assert "column n (int64, double): written as n (double)" in lines
    assert any(line.endswith(": written as deep.a (int64), deep.b (list<item: string>)") for line in lines)
    assert convert(tmp_path, write(tmp_path / "b.jsonl", [{"x": None}, {"x": None}])) == [{"x": None}] * 2
    large = write(tmp_path / "large.jsonl", [{"a": 2**60 + 1}, {"a": 2**80}, {"a": "007"}])
    assert convert(tmp_path, large) == [{"a": str(2**60 + 1)}, {"a": str(2**80)}, {"a": "007"}]
    two = [write(tmp_path / "c.jsonl", [{"a": 1}]), write(tmp_path / "d.parquet", [{"a": "x", "b": 2}])]
    assert convert(tmp_path, *two) == [{"a": "1", "b": None}, {"a": "x", "b": 2}]
    assert "column b: in 1 of 2 files, null in the others" in capsys.readouterr().out


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
    assert convert(tmp_path, source, "--columns", "p.t", "q.text") == [
        {"p.t": row["p.t"], "q.text": row["q.text"]} for row in FLAT
    ]
    assert convert(tmp_path, source, "--columns", "q.n", "--filter", "[('q.text', '=', 'a')]") == [{"q.n": [1]}]
    error = fail(source, "--output_dir", tmp_path / "x", "--columns", "q")
    assert error == "--columns q: the columns are: q.text, q.n, p"


TEXT, LIST = [{"b": "ab"}, {"b": None}], [{"b": ["d", "e"]}, {"b": []}]


@pytest.mark.parametrize("names", [["0.jsonl", "1.jsonl"], ["0.parquet", "1.parquet"], ["0.jsonl", "1.arrow"]])
@pytest.mark.parametrize("parts", [[TEXT, LIST], [LIST, TEXT], [TEXT + LIST, LIST]])
def test_texts_beside_lists_of_texts_become_lists(tmp_path, names, parts):
    """In one file or in several; not lists of characters."""
    sources = []
    for name, rows in zip(names, parts):
        is_mixed = rows == TEXT + LIST
        sources.append(write(tmp_path / (name.replace("parquet", "jsonl") if is_mixed else name), rows))
    expected = [[row["b"]] if isinstance(row["b"], str) else row["b"] for rows in parts for row in rows]
    assert [row["b"] for row in convert(tmp_path, *sources)] == expected


def test_a_list_beside_objects_and_numbers(tmp_path):
    rows = [{"a": {"t": "x"}, "s": 1}, {"a": [{"t": "y"}, {"u": 1}], "s": [0.5, True]}, {"a": None, "s": False}]
    expected = [{"a.t": ["x"], "a.u": [None], "s": [1.0]}, {"a.t": ["y", None], "a.u": [None, 1], "s": [0.5, 1.0]},
                {"a.t": None, "a.u": None, "s": [0.0]}]  # fmt: skip
    assert convert(tmp_path, write(tmp_path / "a.jsonl", rows)) == expected


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_labels_that_begin_with_booleans_or_whole_numbers(tmp_path, suffix):
    """They are numbers throughout, in one file and in several."""
    labels = [[True], [1], [0.25]]
    sources = [write(tmp_path / f"{n}.{suffix}", [{"s": label} for label in part]) for n, part in enumerate(labels)]
    assert [row["s"] for row in convert(tmp_path, *sources)] == [1, 1, 0.25]
    mixed = write(tmp_path / "mixed.jsonl", [{"s": label} for label in (False, 3, None, 0.5)])
    assert [row["s"] for row in convert(tmp_path, mixed)] == [0, 3, None, 0.5]


KINDS = {
    "view": pa.array(["a", None], pa.string_view()),
    "large": pa.array(["a", None], pa.large_string()),
    "dictionary": pa.array(["a", None]).dictionary_encode(),
    "binary": pa.array([b"a", None]),
    "date": pa.array([0, None], pa.date32()),
    "time": pa.array([0, None], pa.timestamp("ms")),
    "views": pa.array([["a", None], None], pa.list_(pa.string_view())),
    "fixed": pa.array([["a", "b"], None], pa.list_(pa.string(), 2)),
    "larges": pa.array([["a"], None], pa.large_list(pa.large_string())),
    "dictionaries": pa.ListArray.from_arrays([0, None, 1], pa.array(["a"]).dictionary_encode()),
}


@pytest.mark.parametrize("name", ["x.parquet", "stream.arrow"])
def test_other_types_of_texts_and_lists(tmp_path, name, capsys):
    """Each is written as text or a list of texts, which the other scripts read; a line says so."""
    table = pa.table(KINDS)
    if name.endswith("parquet"):
        pq.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_stream(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
    first = {"date": "1970-01-01", "time": "1970-01-01 00:00:00.000", "views": ["a", None], "fixed": ["a", "b"],
             "larges": ["a"], "dictionaries": ["a"]}  # fmt: skip
    run(tmp_path / name, "--output_dir", tmp_path / "out", "--format", "parquet")
    (file,) = (tmp_path / "out").iterdir()
    written = pq.read_table(file)
    assert {str(kind).replace("element", "item") for kind in written.schema.types} == {"string", "list<item: string>"}
    assert written.to_pylist() == [{kind: first.get(kind, "a") for kind in KINDS}, dict.fromkeys(KINDS)]
    out = capsys.readouterr().out
    assert "column date (date32[day]): written as date (string)\n" in out and "column view (string_view): " in out


def test_texts_in_another_encoding(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\né,d\n", encoding="cp1252")
    error = fail(tmp_path / "a.csv", "--output_dir", tmp_path / "x")
    assert "a.csv: not in UTF-8: set --encoding, such as cp1252 (" in error
    assert convert(tmp_path, tmp_path / "a.csv", "--encoding", "cp1252") == [{"a": "é", "b": "d"}]
    assert "unknown encoding: none" in fail(tmp_path / "a.csv", "--encoding", "none", "--output_dir", tmp_path / "x")


def test_texts_that_look_like_dates_stay_texts(tmp_path):
    """pyarrow's JSON reader would make timestamps of them: "2020-01-01 00:00:00"."""
    days = ["2020-01-01", "2020-01-01 10:00:00", "2020-01-01T10:00:00Z", "2020-01-01T10:00:00.123456"]
    rows = [{"_id": day, "answers": [day], "nested": {"day": day, "all": [{"day": day}]}} for day in days]
    source = write(tmp_path / "a.jsonl", rows)
    expected = [{"_id": day, "answers": [day], "nested.day": day, "nested.all.day": [day]} for day in days]
    assert convert(tmp_path, source) == convert(tmp_path, source, format="parquet") == expected


def test_lone_surrogates_are_replaced(tmp_path, capsys):
    """Half of a pair that was cut, in texts, lists and names; pairs, and backslashes before "ud", stay. They are
    counted once, though JSON is read twice."""
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
    for number, text in enumerate((json.dumps(ROWS), json.dumps(ROWS, indent=1), "\ufeff \n" + json.dumps(ROWS))):
        (tmp_path / f"{number}.json").write_text(text)
        assert convert(tmp_path, tmp_path / f"{number}.json") == ROWS
    (tmp_path / "texts.json").write_text('["a", "[b"]')
    assert convert(tmp_path, tmp_path / "texts.json") == [{"text": "a"}, {"text": "[b"}]
    (tmp_path / "none.json").write_text("[]")
    assert "no row" in fail(tmp_path / "none.json", "--output_dir", tmp_path / "x")


UNUSED = {
    "map": pa.array([[("k", "v")], None], pa.map_(pa.string(), pa.string())),
    "nested": pa.array([{"m": [("k", "v")]}, None], pa.struct([("m", pa.map_(pa.string(), pa.string()))])),
    "view": pa.array([["x"], None], pa.list_view(pa.string())),
    "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), ["x"]),
}


@pytest.mark.parametrize("name, kinds", [("x.parquet", ["map", "nested"]), ("stream.arrow", list(UNUSED)),
                                         ("file.arrow", list(UNUSED)), ("x.orc", ["map"])])  # fmt: skip
def test_columns_that_are_not_asked_for_may_be_of_any_type(tmp_path, name, kinds):
    table = pa.table({"q": ["a", "b"], "a": pa.array(["x", "y"]).dictionary_encode()} | {k: UNUSED[k] for k in kinds})
    if name.endswith("parquet"):
        pq.write_table(table, tmp_path / name)
    elif name.endswith("orc"):
        pa.orc.write_table(table.set_column(1, "a", table["a"].cast(pa.string())), tmp_path / name)
    else:
        with (pa.ipc.new_file if "file" in name else pa.ipc.new_stream)(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
    rows = [{"q": "a", "a": "x"}, {"q": "b", "a": "y"}]
    assert convert(tmp_path, tmp_path / name, "--columns", "q", "a") == rows
    assert convert(tmp_path, tmp_path / name, "--columns", "a", "--filter", "[('q', '!=', 'a')]") == [{"a": "y"}]
    error = fail(tmp_path / name, "--output_dir", tmp_path / "x")
    assert f"{name}: choose --columns without {kinds[0]!r}: " in error


def test_values_of_csv_are_kept_as_written(tmp_path):
    lines = [f"{i},2024-01-01,7,007,12345678901234567890,true,{i},,NA," for i in range(1500)]
    lines += ['0.5,"un\nknown",7b,008,1,false,,,None,']
    (tmp_path / "a.csv").write_text("n,day,x,code,long,flag,gap,none,word,void\n" + "\n".join(lines) + "\n")
    got = convert(tmp_path, tmp_path / "a.csv")
    same = {"code": "007", "long": "12345678901234567890", "flag": "true", "none": None, "void": None, "word": "NA"}
    assert got[0] == {"n": "0", "day": "2024-01-01", "x": "7", "gap": "0", **same}
    same = {"code": "008", "long": "1", "flag": "false", "none": None, "void": None, "word": "None"}
    assert got[1500] == {"n": "0.5", "day": "un\nknown", "x": "7b", "gap": None, **same}


@pytest.mark.parametrize("suffix, mark", [("csv", ","), ("tsv", "\t")])
def test_csv_and_tsv_are_text(tmp_path, suffix, mark):
    """Quotes of a TSV are characters, empty files are passed over, and a query of a URL is no suffix."""
    (tmp_path / "in").mkdir()
    (tmp_path / f"in/0.{suffix}").write_text("")
    words = ["NA", "0016", "9007199254740993", '"open' if suffix == "tsv" else "open", "'x", ""]
    (tmp_path / f"in/1.{suffix}").write_text("\n".join(["a" + mark + "b", *(f"{word}{mark}1" for word in words)]))
    assert convert(tmp_path, tmp_path / "in") == [{"a": word or None, "b": "1"} for word in words]
    assert prepare_corpus.file_suffix(f"https://host/x.{suffix}.gz?download=true") == f".{suffix}"
    (tmp_path / f"wide.{suffix}").write_text(f"a{mark}b\n1{mark}2{mark}3\n")
    assert "line 2 has more fields than the header" in fail(
        tmp_path / f"wide.{suffix}", "--output_dir", tmp_path / "x"
    )


@pytest.mark.parametrize("text", [r'"say \"hi\", he said",d', '"say "hi"",d', '"C:\\dir" ,d', '"never closed,d\nq,d'])
def test_quotes_within_a_quoted_text(tmp_path, text):
    """They would end it, or begin another: texts would change without a word. The error has the line."""
    (tmp_path / "a.csv").write_text('a,b\n"two\nlines",d\n' + text + "\n")
    error = fail(tmp_path / "a.csv", "--output_dir", tmp_path / "x")
    assert re.search(r"a.csv: line [45]: .*double the quotes within a quoted text", error)


def test_quotes_that_csv_allows(tmp_path):
    (tmp_path / "a.csv").write_text('a,b\n"say ""hi"", he said","C:\\dir\\"\n5" disk,\\"x\\"\n')
    expected = [{"a": 'say "hi", he said', "b": "C:\\dir\\"}, {"a": '5" disk', "b": '\\"x\\"'}]
    assert convert(tmp_path, tmp_path / "a.csv") == expected


def test_headers_and_lengths_of_csv_rows(tmp_path):
    """Names that pandas, and so the trainers, give; missing last fields, trailing separators, empty lines, any line
    ends, a text of more than 128 KiB."""
    long = "é" * 200_000
    (tmp_path / "a.csv").write_bytes(f'\ufeff,a,a\r\n0,x\r\n\r\n1,y,"{long}",\r\n  \r\n2,,z'.encode())
    expected = [("0", "x", None), ("1", "y", long), ("2", None, "z")]
    assert [tuple(row.values()) for row in convert(tmp_path, tmp_path / "a.csv")] == expected
    assert list(convert(tmp_path, tmp_path / "a.csv")[0]) == ["Unnamed: 0", "a", "a.1"]
    (tmp_path / "only_header.csv").write_text("a,b\n")
    assert "no row" in fail(tmp_path / "only_header.csv", "--output_dir", tmp_path / "x")


def test_exit_of_a_run(tmp_path):
    """Of the script copied alone into a folder. Threads that still read ahead do not abort it; the output is complete,
    and the status is that of the run."""
    write(tmp_path / "a.jsonl")
    (tmp_path / "prepare_corpus.py").write_bytes(SCRIPT.read_bytes())
    command, options = [sys.executable, "prepare_corpus.py"], {"cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([*command, "a.jsonl", "--output_dir", "out"], **options)
    assert done.returncode == 0 and "terminate" not in done.stderr
    assert done.stdout.endswith(
        f"out\nto train on it: --train_data '{tmp_path}/out/*.arrow' --columns QUERY POSITIVE ...\n"
    )
    done = subprocess.run([*command, "none.csv", "--output_dir", "x"], **options)
    assert done.returncode == 1 and done.stderr.startswith("error: none.csv: ") and done.stderr.count("\n") == 1
    assert "os._exit" in SCRIPT.read_text()


# --------------------------------------------------------------------------------------------------- bad input


def test_bad_sources_are_refused_in_one_line_and_lose_nothing(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("kept")
    good = write(tmp_path / "good.jsonl")
    for name in ("p.parquet", "o.orc", "j.jsonl.gz", "f_file.arrow", "s.arrow", "c.csv.gz"):
        data = write(tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) * 3 // 4])
        assert name in fail(good, tmp_path / name, "--output_dir", out, "--overwrite")
    invalid = write(tmp_path / "a.orc").read_bytes().replace("row 51: é".encode(), b"row 51: \xff\xff")
    texts = {
        "invalid.orc": (invalid, "Invalid UTF8"),
        "syntax.jsonl": ('{"a": 1}\n\n{"a": 2\n{"a": 3}\n', 'not a JSON object: {"a": 2'),
        "array.json": ("[1, 2]\n", "not a JSON object: [1, 2]"),
        "ragged.csv": ("a,b\n1,2\n3,4,5\n", "line 3"),
        "latin.jsonl": (b'{"a": 1}\n\n{"a": "caf\xe9"}\n', "utf-8"),
        "latin.csv": (b"a,b\n1,2\n1,caf\xe9\n", "utf-8"),
        "empty.jsonl": ("", "no row"),
        "empty.orc": ("", "too small"),
        "a.xlsx": ("", ""),
        "a.parquet.gz": ("", ""),
    }
    for name, (text, expected) in texts.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        error = fail(tmp_path / name, "--output_dir", out, "--overwrite")
        assert name in error and expected in error, error
    for source in (
        *(tmp_path / name for name in ("absent.jsonl", "absent*.jsonl", "absent", "absent/folder")),
        "nosuch://bucket/a.csv",
    ):
        assert str(source) in fail(source, "--output_dir", out, "--overwrite")
        assert str(source) in fail(source, "--output_dir", tmp_path / "new/out") and not (tmp_path / "new").exists()
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)  # where data/ is a folder, and so data/absent is no Hub id
    assert fail("data/absent", "--output_dir", out, "--overwrite") == "data/absent: no such file or folder"
    assert "--overwrite" in fail(good, "--output_dir", out)
    assert "contains a SOURCE" in fail(write(out / "in.jsonl"), "--output_dir", out, "--overwrite")
    (out / "in.jsonl").unlink()
    assert [path.name for path in out.iterdir()] == ["precious"] and not list(tmp_path.glob(".out*"))
    run(good, "--output_dir", out, "--overwrite")
    assert [path.name for path in out.iterdir()] == ["data-00000.arrow"]


def test_bad_columns_filters_and_types(tmp_path):
    good, out = write(tmp_path / "good.jsonl"), tmp_path / "out"
    assert "the columns are: text, score, lang" in fail(good, "--output_dir", out, "--columns", "title")
    for text in ("score > 1", "__import__('os').getcwd()", "[('score', '~', 1)]", "[('title', '>', 1)]",
                 "[('lang', '>', 1)]", "[('score', '>', 7)]"):  # fmt: skip
        assert f"--filter {text!r}" in fail(good, "--output_dir", out, "--filter", text)
    typed = write(tmp_path / "typed.parquet", [{"text": [1], "score": 1, "lang": None}])
    assert not out.exists()
    # Types that can be reconciled without loss, here null and text, are.
    assert convert(tmp_path, good, typed, "--columns", "lang")[99:] == [{"lang": ROWS[99]["lang"]}, {"lang": None}]


def test_wrong_flags(capsys):
    for flags, expected in (
        ("a.csv", "require --output_dir"),
        ("a.csv --output_dir x --colums a", "unrecognized arguments: --colums"),
        ("a.csv --output_dir x --rows_per_shard 0", "must be above 0"),
        ("--filter []", "require SOURCE"),
        ("--ir_dataset beir/scifact", "require --output_dir"),
        ("a.csv --ir_dataset beir/scifact", "excludes"),
        ("a.csv --length_report", "--length_report requires"),
        (
            "a.csv --output_dir s3://b/x",
            "must be a local folder; copy it when it is complete: aws s3 cp --recursive F",
        ),
    ):
        with pytest.raises(SystemExit):
            prepare_corpus.parse_args(flags.split())
        assert expected in capsys.readouterr().err.splitlines()[-1]
    args = prepare_corpus.parse_args(["a.csv", "--output_dir", "x", "--columns", "a", "b", "--columns", "c"])
    assert args.columns == ["a", "b", "c"]


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


# ------------------------------------------------------------------------------------- collections and their lengths


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
    corpus, queries, triples = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("corpus", "queries", "triples")
    )
    assert len(corpus) == 9 and corpus[3] == {"_id": "d3", "title": "", "text": "document 3 about things"}
    assert queries == [{"_id": "q1", "text": "first query"}, {"_id": "q2", "text": "second query"}]
    assert triples[0] == {"query": "q1", "positive": "d3", "negative": "d1"} and len(triples) == 2
    judgments = "query-id\tcorpus-id\tscore\nq1\td3\t1\nq2\td4\t2\nq2\td5\t0\n"
    assert (folder / "qrels/dev.tsv").read_text() == judgments
    assert "--ir_dataset nobody/nothing: " in fail("--ir_dataset", "nobody/nothing", "--output_dir", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_length_report(tmp_path, bert, rows, capsys, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setattr(Figure, "savefig", draw)
    source = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{**row, "number": i} for i, row in enumerate(rows)]), source)
    flags = ["--length_report", "--model_name_or_path", bert, "--output_dir", tmp_path / "out", "--max_length", 100]

    def report(*argv):
        run(*argv, *flags)
        return json.loads((tmp_path / "out/lengths.json").read_text())

    metadata = report(source)
    tokenizer = AutoTokenizer.from_pretrained(bert)
    lengths = {name: [min(100, len(tokenizer(row[name])["input_ids"])) for row in rows] for name in rows[0]}
    assert set(metadata["columns"]) == {"docstring", "code"} and metadata["texts"] == 2 * len(rows)
    assert metadata["tokens"] == sum(map(sum, lengths.values()))
    assert metadata["columns"]["code"]["max"] == max(lengths["code"])
    assert metadata["columns"]["docstring"]["95%"] == pytest.approx(np.percentile(lengths["docstring"], 95))
    flat = np.sort(lengths["docstring"] + lengths["code"])
    longest = metadata["advice"]["max_length"]  # a multiple of 8 that truncates at most the longest 1 %
    assert np.mean(flat <= longest) >= 0.99 > np.mean(flat <= longest - 8)
    assert (tmp_path / "out/lengths.png").read_bytes()[:4] == b"\x89PNG"
    assert f"try --max_length {longest}; see " in capsys.readouterr().out
    lists = [{"q": row["docstring"], "documents": [row["code"], row["docstring"], ""]} for row in rows[:40]]
    assert report(write(tmp_path / "lists.parquet", lists))["columns"]["documents"]["count"] == 80
    assert report(source, "--sample", "50")["texts"] == 100
    # Not of the first rows alone, which are the shortest; of any format, of dates, and of lists with nulls.
    growing = write(tmp_path / "growing.orc", [{"text": "word " * (number // 50)} for number in range(2500)])
    everything = report(growing)["columns"]["text"]
    sample = report(growing, "--sample", "500")["columns"]["text"]
    assert 470 <= sample["count"] <= 500 and sample["mean"] == pytest.approx(everything["mean"], rel=0.1)
    dates = write(tmp_path / "dates.jsonl", [{"day": "2020-01-01", "unit": "x"}] * 9)
    assert report(dates)["columns"]["day"]["count"] == 9
    masked = pa.array([["a", "b"], None], pa.list_(pa.string(), 2))
    table = pa.table({"pair": masked})
    with pa.ipc.new_stream(tmp_path / "masked.arrow", table.schema) as writer:
        writer.write_table(table)
    assert report(tmp_path / "masked.arrow")["columns"]["pair"]["count"] == 2
    assert list(report(source, "--columns", "code")["columns"]) == ["code"]


def test_length_report_on_bad_input(tmp_path, bert):
    numbers = write(tmp_path / "numbers.parquet", [{"number": 1}])
    model = ["--length_report", "--model_name_or_path"]
    for flags, expected in (([numbers, *model, bert], "numbers.parquet: contains no text"),
                            ([numbers, *model, bert, "--columns", "title"], "title"),
                            ([numbers, *model, "/nowhere"], "--model_name_or_path /nowhere: no such file or folder"),
                            ([tmp_path / "absent.jsonl", *model, bert], "absent.jsonl: ")):  # fmt: skip
        assert expected in fail(*flags, "--output_dir", tmp_path / "out") and not (tmp_path / "out").exists()
