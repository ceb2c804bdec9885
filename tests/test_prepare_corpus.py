"""prepare_corpus.py: the demo builder on a made-up tree, every input format, and every kind of bad input."""

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
import zstandard

SCRIPT = Path(__file__).resolve().parents[1] / "prepare_corpus.py"
sys.path.insert(0, str(SCRIPT.parent))
import prepare_corpus  # noqa: E402

ROWS = [{"text": f"row {i}: é", "score": i / 100, "lang": ["en", "de", "fr"][i % 3]} for i in range(100)]


def fail(capsys, *argv):
    """Runs the command line and returns its error, which must be exit code 2 and one line."""
    capsys.readouterr()
    assert prepare_corpus.main([str(arg) for arg in argv]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    return error[0]


def write(path, rows=ROWS):
    """Writes rows in the format that the suffixes of `path` say; returns the path."""
    table = pa.Table.from_pylist(rows)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    separator = "\t" if ".tsv" in path.name else ","
    csv = "".join(separator.join(map(str, row)) + "\n" for row in [list(rows[0]), *(row.values() for row in rows)])
    match path.suffix if path.suffix not in (".gz", ".zst") else "":
        case ".parquet":
            pq.write_table(table, path, row_group_size=30)
        case ".orc":
            pyarrow.orc.write_table(table, path)
        case ".arrow":
            new = pa.ipc.new_file if "file" in path.name else pa.ipc.new_stream
            with new(str(path), table.schema) as writer:
                writer.write_table(table, 30)
        case _:
            data = (csv if "sv" in path.name else lines).encode()
            half = data.index(b"\n", len(data) // 2) + 1
            # Two members each, as `cat a.gz b.gz` makes: a reader must not stop after the first.
            if path.suffix == ".gz":
                data = gzip.compress(data[:half]) + gzip.compress(data[half:])
            if path.suffix == ".zst":
                data = zstandard.compress(data[:half]) + zstandard.compress(data[half:])
            path.write_bytes(data)
    return path


def read(folder, format="arrow"):
    files = sorted(str(path) for path in folder.glob(f"*.{format}"))
    cache = str(folder.parent / "cache")
    return datasets.load_dataset(format, data_files=files, split="train", cache_dir=cache).to_list()


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
    expected = [("Fetch the next é item.", "async def fetch(self): x = [\n    1]")]
    assert pairs(one_liner) == expected


@pytest.fixture
def tree(tmp_path):
    """Two source roots; every file holds one function of its own, one that all share, and an import side effect."""
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
    assert report["files"] == 212 and report["not_parsed"] == 2
    rows = {}
    for path in folder.rglob("*.parquet"):
        table = pq.read_table(path)
        assert table.column_names == ["docstring", "code"]
        rows[path.parent.name, path.name.split("-")[0]] = table.to_pylist()
    assert len(rows) == 4
    assert report["pairs"] == {
        split: {s: len(rows[split, s]) for s in report["pairs"][split]} for split in report["pairs"]
    }
    everything = [(split, row) for (split, _), part in rows.items() for row in part]
    # One pair a file of its own, and each duplicate once, on the held-out side.
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
    # The split of a file is its own affair: a removed neighbour moves nothing across.
    (tree / "roots/packages/package0/module0.py").unlink()
    third, _ = build(tree, "c")
    own = [
        {row["code"] for p in folder.glob("heldout/*") for row in pq.read_table(p).to_pylist()}
        for folder in (first, third)
    ]
    assert {code for code in own[1] if "own" in code} <= {code for code in own[0] if "own" in code}


def test_demo_replaces_its_own_output_only(tree, monkeypatch, capsys):
    roots = {"stdlib": tree / "roots/stdlib", "purelib": tree / "roots/packages", "platlib": tree / "roots/packages"}
    monkeypatch.setattr(prepare_corpus.sysconfig, "get_paths", lambda: {k: str(v) for k, v in roots.items()})
    monkeypatch.chdir(tree)
    assert prepare_corpus.main([]) == 0
    assert prepare_corpus.main([]) == 0
    assert sorted(path.name for path in (tree / "data").iterdir()) == ["python_code"]
    (tree / "data/python_code/corpus.json").unlink()
    assert "--overwrite" in fail(capsys)
    assert "SOURCE" in fail(capsys, "--filter", "a > 1", "--output_dir", tree / "new")
    assert (tree / "data/python_code/train").is_dir()


# ------------------------------------------------------------------------------------------------- the conversion

NAMES = ["a.parquet", "a.orc", "file.arrow", "stream.arrow", "a.csv", "a.csv.gz", "a.tsv", "a.tsv.zst"]
NAMES += ["a.json", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "odd[1].json"]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_rows(tmp_path, name):
    source = write(tmp_path / name)
    assert prepare_corpus.main([str(source), "--output_dir", str(tmp_path / "out")]) == 0
    assert read(tmp_path / "out") == ROWS


@pytest.mark.parametrize("name", ["a.parquet", "a.orc", "file.arrow", "a.csv", "a.jsonl.zst"])
def test_filter_and_columns(tmp_path, name):
    source = write(tmp_path / name)
    keep = "0.5 < score and lang in ['en', 'de'] and not (text == 'row 51: é' or lang is None)"
    argv = [str(source), "--output_dir", str(tmp_path / "out"), "--columns", "lang", "text", "--filter", keep]
    assert prepare_corpus.main([*argv, "--format", "parquet"]) == 0
    expected = [row for row in ROWS if row["score"] > 0.5 and row["lang"] != "fr" and row["text"] != "row 51: é"]
    got = read(tmp_path / "out", "parquet")
    assert got == [{"lang": row["lang"], "text": row["text"]} for row in expected] and len(got) > 30


def test_filter_skips_row_groups_that_cannot_match(tmp_path):
    """The second row group is destroyed; its statistics, in the footer, say that no row there can match."""
    source = write(tmp_path / "a.parquet")
    meta = pq.read_metadata(source).row_group(1).column(0)
    start = meta.dictionary_page_offset or meta.data_page_offset
    data = bytearray(source.read_bytes())
    data[start : start + meta.total_compressed_size] = b"\xff" * meta.total_compressed_size
    source.write_bytes(data)
    assert prepare_corpus.main([str(source), "--output_dir", str(tmp_path / "all")]) == 2
    argv = [str(source), "--output_dir", str(tmp_path / "out"), "--filter", "score < 0.2"]
    assert prepare_corpus.main(argv) == 0
    assert read(tmp_path / "out") == ROWS[:20]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.1 <= score < 0.2", range(10, 20)),
        ("score != 0.5 and not score > 0.01", [0, 1]),
        ("lang not in ['en', 'de'] and score < 0.09", [2, 5, 8]),
        ("score >= 0.9 and lang is not None and lang != None", range(90, 100)),
        ("score > -1 and lang is None or score == 0.03", [3]),
    ],
)
def test_filter_expressions(text, expected):
    keep, names = prepare_corpus.parse_filter(text)
    got = pa.Table.from_pylist(ROWS).filter(keep).to_pylist()
    assert got == [ROWS[i] for i in expected] and set(names) <= set(ROWS[0])


def test_globs_folders_and_urls_in_sorted_order_and_shards_map(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "b.jsonl", ROWS[40:])
    write(folder / "a.parquet", ROWS[:40])
    (folder / "README.md").write_text("not a table")
    (folder / "state.json").write_text('{"_fingerprint": "written by datasets"}')
    for i, source in enumerate([folder, folder / "[ab].*", f"file://{folder}"]):
        out = tmp_path / f"out{i}"
        assert prepare_corpus.main([str(source), "--output_dir", str(out), "--rows_per_shard", "30"]) == 0
        shards = [f"data-{k:05d}-of-00004.arrow" for k in range(4)]
        assert sorted(path.name for path in out.iterdir()) == shards
        mapped = [datasets.Dataset.from_file(str(out / shard)) for shard in shards]
        assert [len(shard) for shard in mapped] == [30, 30, 30, 10]
        assert mapped[0].cache_files == [{"filename": str(out / shards[0])}]
        assert [row for shard in mapped for row in shard] == ROWS


def test_types_are_those_that_hold_every_row_and_long_rows_pass(tmp_path, monkeypatch):
    """In the first block n is whole, day a date, x always null; a later line is longer than ten blocks."""
    monkeypatch.setattr(prepare_corpus, "BLOCK_BYTES", 1000)
    rows = [{"n": i, "day": "2024-01-01", "x": None} for i in range(50)]
    rows += [{"n": 0.5, "day": "unknown", "x": "late"}, {"n": 1, "day": "é" * 10_000, "x": None}]
    source = write(tmp_path / "a.jsonl", rows)
    assert prepare_corpus.main([str(source), "--output_dir", str(tmp_path / "json")]) == 0
    assert read(tmp_path / "json") == rows
    lines = [f"{i},2024-01-01,7,007,12345678901234567890,true,{i},," for i in range(100)]
    lines += ['0.5,"un\nknown",7b,008,1,false,,,']
    (tmp_path / "a.csv").write_text("n,day,x,code,long,flag,gap,none,void\n" + "\n".join(lines) + "\n")
    assert prepare_corpus.main([str(tmp_path / "a.csv"), "--output_dir", str(tmp_path / "csv")]) == 0
    got = read(tmp_path / "csv")
    same = {"code": "007", "long": "12345678901234567890", "flag": True, "none": None, "void": None}
    assert got[0] == {"n": 0.0, "day": "2024-01-01", "x": "7", "gap": 0, **same}
    same = {"code": "008", "long": "1", "flag": False, "none": None, "void": None}
    assert got[100] == {"n": 0.5, "day": "un\nknown", "x": "7b", "gap": None, **same}


# --------------------------------------------------------------------------------------------------- bad input


def test_bad_sources_are_one_line_and_lose_nothing(tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("kept")
    good = write(tmp_path / "good.jsonl")
    whole = {
        name: write(tmp_path / name).read_bytes()
        for name in ("p.parquet", "j.jsonl.gz", "z.jsonl.zst", "f_file.arrow", "o.orc")
    }
    for name, data in whole.items():
        (tmp_path / name).write_bytes(data[: len(data) * 3 // 4])
        error = fail(capsys, tmp_path / name, "--output_dir", out, "--overwrite")
        assert name in error and "truncated or corrupt" in error, error
    texts = {
        "syntax.jsonl": ('{"a": 1}\n\n{"a": 2\n{"a": 3}\n', "line 3"),
        "array.json": ("[1, 2]\n", "line 1"),
        "type.jsonl": ('{"a": 1}\n\n{"a": "x"}\n', "line 3"),
        "ragged.csv": ("a,b\n1,2\n3\n", "Row #3"),
        "latin.jsonl": (b'{"a": 1}\n\n{"a": "caf\xe9"}\n', "line 3"),
        "whole.jsonl": ('{"a": 0.5}\n{"a": 1152921504606846977}\n', "line 2"),
        "huge.jsonl": ('{"a": 1}\n{"a": 1180591620717411303424}\n', "line 2"),
        "mixed.jsonl": ('{"a": {"b": 1}}\n{"a": [1]}\n', "line 2"),
        "latin.csv": (b"a,b\n1,2\n1,caf\xe9\n", "Row #3"),
        "twice.csv": ("a,a\n1,2\n", "'a', or several; there are a, a"),
        "empty.jsonl": ("", "no row"),
        "a.xlsx": ("", "unknown suffix"),
        "a.parquet.gz": ("", "unknown suffix"),
    }
    for name, (text, expected) in texts.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        error = fail(capsys, tmp_path / name, "--output_dir", out, "--overwrite")
        assert name in error and expected in error, error
    for source in ("absent.jsonl", "absent*.jsonl"):
        assert source in fail(capsys, tmp_path / source, "--output_dir", out, "--overwrite")
    assert "nosuch" in fail(capsys, "nosuch://bucket/a", "--output_dir", out, "--overwrite")
    assert "--overwrite" in fail(capsys, good, "--output_dir", out)
    assert "--output_dir" in fail(capsys, good)
    assert "lies in --output_dir" in fail(capsys, write(out / "in.jsonl"), "--output_dir", out, "--overwrite")
    (out / "in.jsonl").unlink()
    assert [path.name for path in out.iterdir()] == ["precious"] and not list(tmp_path.glob(".out*"))
    assert prepare_corpus.main([str(good), "--output_dir", str(out), "--overwrite"]) == 0
    assert [path.name for path in out.iterdir()] == ["data-00000-of-00001.arrow"]


def test_a_malformed_line_far_into_a_file_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prepare_corpus, "BLOCK_BYTES", 100)
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' * 1000 + "{'a': 1}\n" + '{"a": 1}\n' * 1000)
    assert "line 1001" in fail(capsys, tmp_path / "a.jsonl", "--output_dir", tmp_path / "out")
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n' * 1000 + '{"a": "x"}\n')
    error = fail(capsys, tmp_path / "b.jsonl", "--output_dir", tmp_path / "out")
    assert "b.jsonl: line 1001: " in error and "int64 vs string" in error


def test_bad_columns_filters_and_mixtures(tmp_path, capsys):
    good, out = write(tmp_path / "good.jsonl"), tmp_path / "out"
    assert "no column 'title', or several; there are text, score, lang" in fail(
        capsys, good, "--output_dir", out, "--columns", "title"
    )
    unknown = [
        "score >",
        "score > 1 and __import__('os').getcwd()",
        "lang in 'en'",
        "open('x') == 1",
        "1 < 2",
        "lang is 1",
    ]
    for text in unknown:
        assert "--filter" in fail(capsys, good, "--output_dir", out, "--filter", text)
    for text, expected in [
        ("title > 1", "no column 'title', or several; there are text"),
        ("lang > 1", "--filter"),
        ("lang", "--filter"),
        ("score > 7", "keeps none of the 100 rows"),
    ]:
        assert expected in fail(capsys, good, "--output_dir", out, "--filter", text)
    other = write(tmp_path / "other.parquet", [{"text": "a", "score": 1.0, "label": 1}])
    error = fail(capsys, good, other, "--output_dir", out)
    assert "good.jsonl" in error and "other.parquet" in error and "label, lang" in error
    typed = write(tmp_path / "typed.parquet", [{"text": 1, "score": 1, "lang": None}])
    error = fail(capsys, good, typed, "--output_dir", out)
    assert "good.jsonl" in error and "typed.parquet" in error and "text" in error
    assert not out.exists()
    # What can be reconciled without loss is: whole and decimal numbers, null and text.
    argv = [str(good), str(typed), "--output_dir", str(out), "--columns", "score", "lang"]
    assert prepare_corpus.main(argv) == 0
    assert read(out)[-1] == {"score": 1.0, "lang": None} and len(read(out)) == 101


def test_as_a_command_copied_alone(tmp_path):
    (tmp_path / "prepare_corpus.py").write_bytes(SCRIPT.read_bytes())
    command = [sys.executable, "prepare_corpus.py", "absent.parquet", "--output_dir", "out"]
    run = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.startswith("error: absent.parquet: ") and run.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------- collections and their lengths


def test_ir_dataset_gives_what_the_other_scripts_read(tmp_path, monkeypatch, capsys):
    """A dataset of local files, registered under a name as the package's own are; with triples and a title."""
    import ir_datasets
    from ir_datasets.datasets.base import Dataset
    from ir_datasets.formats import GenericDocPair

    (tmp_path / "docs.tsv").write_text("".join(f"d{i}\tdocument {i} about things\n" for i in range(9)))
    (tmp_path / "queries.tsv").write_text("q1\tfirst query\nq2\tsecond query\n")
    (tmp_path / "qrels").write_text("q1 0 d3 1\nq2 0 d4 2\nq2 0 d5 0\n")
    plain = ir_datasets.create_dataset(
        docs_tsv=str(tmp_path / "docs.tsv"),
        queries_tsv=str(tmp_path / "queries.tsv"),
        qrels_trec=str(tmp_path / "qrels"),
    )

    class Triples:
        def docpairs_iter(self):
            return iter([GenericDocPair("q1", "d3", "d1"), GenericDocPair("q2", "d4", "d2")])

    monkeypatch.setitem(ir_datasets.registry._registered, "local/plain/dev", Dataset(plain, Triples()))
    monkeypatch.setattr(Dataset, "has_docpairs", lambda self: True, raising=False)
    folder = tmp_path / "out"
    assert prepare_corpus.main(["--ir_dataset", "local/plain/dev", "--output_dir", str(folder)]) == 0
    assert "9 in corpus.jsonl, 2 in queries.jsonl, 3 in qrels/dev.tsv, 2 in triples.jsonl" in capsys.readouterr().out
    documents = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    assert documents[3] == {"_id": "d3", "title": "", "text": "document 3 about things"}
    assert (folder / "qrels/dev.tsv").read_text().splitlines()[2] == "q2\td4\t2"

    import eval_incremental
    import train_bi_encoder

    assert eval_incremental.read_qrels(str(folder / "qrels/dev.tsv")) == {"q1": {"d3": 1}, "q2": {"d4": 2, "d5": 0}}
    flags = ["--train_data", str(folder / "triples.jsonl"), "--corpus_table", str(folder / "corpus.jsonl"),
             "--queries_table", str(folder / "queries.jsonl"), "--data_cache", str(tmp_path / "cache")]  # fmt: skip
    args = train_bi_encoder.parse_args(flags)
    check = train_bi_encoder.with_texts(train_bi_encoder.open_tables(args), train_bi_encoder.checked)
    texts, *_ = check((["q1", "d3", "d1"], None, "triples.jsonl", 0), args)
    assert texts == ["first query", "document 3 about things", "document 1 about things"]


def test_ir_dataset_that_is_not_there(tmp_path, capsys):
    for flags, said in (
        (["--ir_dataset", "nobody/nothing", "--output_dir", tmp_path / "x"], "--ir_dataset nobody/nothing: "),
        (["--ir_dataset", "beir/scifact"], "--ir_dataset: wants --output_dir"),
    ):
        assert prepare_corpus.main(list(map(str, flags))) == 2
        said_now = capsys.readouterr().err
        assert said in said_now and said_now.count("\n") == 1 and not (tmp_path / "x").exists()


def test_length_report(tmp_path, bert, rows, capsys):
    from transformers import AutoTokenizer

    pq.write_table(
        pa.Table.from_pylist([{**row, "number": i} for i, row in enumerate(rows)]), tmp_path / "rows.parquet"
    )
    flags = ["--length_report", "--model_name_or_path", bert, "--output_dir", tmp_path / "out", "--max_length", 100]
    assert prepare_corpus.main([str(tmp_path / "rows.parquet"), *map(str, flags)]) == 0
    about = json.loads((tmp_path / "out/lengths.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(bert)
    lengths = {name: [min(100, len(tokenizer(row[name])["input_ids"])) for row in rows] for name in rows[0]}
    assert set(about["columns"]) == {"docstring", "code"} and about["texts"] == 2 * len(rows)
    assert about["tokens"] == sum(map(sum, lengths.values()))
    assert about["columns"]["code"]["p100"] == max(lengths["code"])
    flat = sorted(lengths["docstring"] + lengths["code"], reverse=True)
    batches = prepare_corpus.cut_greedily(flat, 2048)
    greedy = about["batches"]["the same in one window, cut greedily (2,048)"]
    assert greedy["passes"] == len(batches)
    assert greedy["padding"] == pytest.approx(1 - sum(flat) / sum(len(b) * flat[b[0]] for b in batches))
    ways = about["batches"]
    order = ["micro-batches of 2,048 tokens, 10,000 texts a share", "windows of 320, sorted, batches of 32"]
    assert ways[order[0]]["padding"] < ways[order[1]]["padding"] < ways["random batches of 32"]["padding"]
    assert (tmp_path / "out/lengths.png").read_bytes()[:4] == b"\x89PNG"
    assert f"--micro_batch_tokens {about['advice']['micro_batch_tokens']}" in capsys.readouterr().out
    lists = [{"q": row["docstring"], "documents": [row["code"], row["docstring"]]} for row in rows[:40]]
    pq.write_table(pa.Table.from_pylist(lists), tmp_path / "lists.parquet")
    assert prepare_corpus.main([str(tmp_path / "lists.parquet"), *map(str, flags)]) == 0
    assert json.loads((tmp_path / "out/lengths.json").read_text())["columns"]["documents"]["texts"] == 80
    assert prepare_corpus.main([str(tmp_path / "rows.parquet"), *map(str, flags), "--sample", "50"]) == 0
    assert json.loads((tmp_path / "out/lengths.json").read_text())["texts"] == 100


def test_length_report_on_bad_input(tmp_path, bert, capsys):
    pq.write_table(pa.table({"number": [1, 2]}), tmp_path / "numbers.parquet")
    (tmp_path / "blank.txt").write_text("\n \n")
    model = ["--length_report", "--model_name_or_path", str(bert)]
    for flags, said in (
        ([str(tmp_path / "numbers.parquet"), *model], "no column of text among number"),
        ([str(tmp_path / "blank.txt"), *model], "blank.txt: holds no text"),
        ([str(tmp_path / "blank.txt"), *model, "--filter", "a < 1"], "--length_report: takes no --filter"),
        ([str(tmp_path / "blank.txt"), *model, "--max_length", "2"], "--max_length 2: leaves no room"),
        ([str(tmp_path / "blank.txt"), "--length_report"], "--length_report: wants SOURCE, --model_name_or_path"),
        ([str(tmp_path / "blank.txt"), "--length_report", "--model_name_or_path", "/nowhere"], "/nowhere: "),
    ):
        assert prepare_corpus.main([*flags, "--output_dir", str(tmp_path / "out")]) == 2
        said_now = capsys.readouterr().err
        assert said in said_now and "Traceback" not in said_now and not (tmp_path / "out").exists()
