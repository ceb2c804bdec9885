"""Held-out rows: of a mapped source, blocks spread over it. That all others are trained on, and of streams:
tests/test_data.py; of several sources: tests/test_mixtures.py."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import train_bi_encoder as script
import train_cross_encoder

ROWS = 20_000


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A Parquet file of sorted rows, as a log by date."""
    path = tmp_path_factory.mktemp("sorted") / "rows.parquet"
    texts = [f"text {number}" for number in range(ROWS)]
    pq.write_table(pa.table({"query": texts, "document": texts}), path)
    return path


def numbers(table):
    """Return the row numbers in a Table, of its texts."""
    return np.array([int(text.split()[1]) for text in table["query"].to_pylist()])


@pytest.mark.parametrize("size", [11, 15, ROWS])
@pytest.mark.parametrize("count", [1, 7, 10, 14, 1003, ROWS])
def test_blocks_are_spread_evenly(table, size, count):
    dataset = script.open_files([str(table)], streaming=False).select(range(size))
    count = min(count, size)
    parts = script.split_rows(dataset, count)
    rows, others = (numbers(part[:]) if len(part) else np.zeros(0, int) for part in parts)
    assert sorted([*rows, *others]) == list(range(size)) and len(rows) == count
    assert (np.diff(rows) > 0).all() and (np.diff(others) > 0).all()
    assert parts[1]._indices is None  # slices of the mapped table, not a list of rows
    if count >= 10:
        tenths = np.histogram(rows, bins=10, range=(0, size))[0]
        assert tenths.max() - tenths.min() <= 2


@pytest.mark.parametrize("rows, expected", [(15, 1), (5000, 500), (30_000, 1000)])
def test_at_most_a_tenth_of_a_source_is_held_out(tmp_path, rows, expected):
    """By default; as many of each of two sources as --eval_rows says, which may be all of them."""
    texts = [f"text {number}" for number in range(rows)]
    pq.write_table(pa.table({"query": texts, "document": texts}), tmp_path / "rows.parquet")
    flags = ["--model_name_or_path", "none", "--columns", "query", "document", "--train_data"]
    flags.append(str(tmp_path / "rows.parquet"))
    ((_, held_out),) = script.open_data(script.parse_args(flags)).held_out
    assert len(held_out) == expected
    with pytest.raises(script.UserError, match="rows.parquet: no row is left to train on after --eval_rows 90000"):
        script.open_data(script.parse_args([*flags, "--eval_rows", "90000"]))


STREAM = ["--streaming", "--max_steps", "1"]
ONE = ["--train_data", "[b].parquet"]
TWO = ["--train_data", "[b].parquet", "x.parquet"]
OWN = ["--train_data", '{"path": "[b].parquet", "query_prompt": "find: "}']
X = ["--train_data", "x.parquet"]
RESUMES = {  # {what a resume changes: (flags, rows of files; then those of the resume, whether it is refused)}
    "a grown table": ([], {"b": 1000}, [], {"b": 1100}, True),
    "a grown table, --eval_rows": (["--eval_rows", "50"], {"b": 1000}, ["--eval_rows", "50"], {"b": 1100}, True),
    "a new file": ([], {"b": 1000}, [], {"b": 1000, "c": 90}, True),
    "more held-out rows": (["--eval_rows", "50"], {"b": 1000}, ["--eval_rows", "60"], {"b": 1000}, True),
    "none, then some": (["--eval_rows", "0"], {"b": 1000}, [], {"b": 1000}, True),
    "two sources": ([*ONE, "--eval_rows", "50"], {"b": 1000}, [*TWO, "--eval_rows", "50"], {"b": 1000}, True),
    "a stream with another first file": (STREAM, {"b": 2000}, STREAM, {"a": 2000, "b": 2000}, True),
    "a stream, then a table": ([*STREAM, "--eval_rows", "9"], {"b": 99}, ["--eval_rows", "9"], {"b": 99}, True),
    "a stream with a new last file": (STREAM, {"b": 2000}, STREAM, {"b": 2000, "c": 9}, False),
    "held-out rows of their own": ([], {"b": 1000}, ["--eval_data", "x.parquet"], {"b": 1100}, False),
    "no held-out rows": ([], {"b": 1000}, ["--eval_rows", "0"], {"b": 1100}, False),
    "two sources, a tenth of each": (ONE, {"b": 1000}, TWO, {"b": 1000}, False),
    "a mended row": ([], {"b": 1000}, [], {"b": 1000}, False),
    "another name of a source": (ONE, {"b": 1000}, ["--train_data", "[bc].parquet"], {"b": 1000, "c": 90}, True),
    "a source leaves": (TWO, {"b": 1000}, ONE, {"b": 1000}, False),
    "another order of a table": ([], {"b": 1000}, [], {"b": -1000}, True),
    "another order of a stream": (STREAM, {"b": 2000}, STREAM, {"b": -2000}, True),
    "another name of a file": (ONE, {"b": 1000}, ["--train_data", "b.parquet"], {"b": 1000}, False),
    "flags of its own": (ONE, {"b": 1000}, OWN, {"b": 1000}, False),
    "flags of its own, another order": (OWN, {"b": 1000}, ONE, {"b": -1000}, True),
    "sources change places": (TWO, {"b": 1000}, [TWO[0], *TWO[:0:-1]], {"b": 1000}, False),
    "two sources of one path": ([*OWN, "[b].parquet"], {"b": 1000}, [*OWN, "[b].parquet"], {"b": -1000}, True),
}
AGAIN = {  # {what the third of three runs changes: (flags of the second, flags and rows of the third, is refused)}
    "a source comes back": (X, TWO, 1000, False),
    "a source comes back, grown": (X, TWO, 1100, True),
    "a source comes back, in another order": (X, TWO, -1000, True),
    "a source comes back by another name": (X, ["--train_data", "[bc].parquet", "x.parquet"], 1000, False),
    "a source comes back in a glob of more": (X, ["--train_data", "[bx].parquet", "x.parquet"], 1000, True),
    "trained on by another name meanwhile": (["--train_data", "[bx].parquet", "--eval_rows", "0"], ONE, 1000, True),
    "trained on meanwhile": ([*TWO, "--eval_rows", "0"], TWO, 1000, True),
}


def run_of(trainer, flags, rows, text="good"):
    """Return the Args of a run, and what its checkpoints say that a resume must not change. rows: {file: how many,
    below 0 in reverse}; text: ends the last one, which is not held out."""
    for name, count in (rows | {"x": 1000}).items():
        texts = [f"{name} {number}" for number in range(abs(count))]
        texts[-1] += text
        texts = texts[::-1] if count < 0 else texts
        pq.write_table(pa.table({"query": texts, "document": texts}), f"{name}.parquet")
    source = [] if "--train_data" in flags else ["--train_data", "[abc].parquet"]
    required = ["--model_name_or_path", "none", "--columns", "query", "document", "--accept_changes"]
    args = trainer.parse_args([*required, *source, *flags])
    return args, trainer.unchanging(args, SimpleNamespace(config=None), trainer.open_data(args))


def resume(trainer, saved, args, found, is_refused):
    """Call check_changes, which must refuse it or not."""
    saved = {"unchanging": saved, "progress": {"step": 3, "losses": [[1, 0.5]], "metrics": []}}
    changes = []
    if is_refused:
        expected = "^--resume: .*held-out rows of .*set --eval_data, or --eval_rows 0, and --accept_changes$"
        for accepts in (True, False):
            with pytest.raises(trainer.UserError, match=expected):
                trainer.check_changes(saved, found, replace(args, accept_changes=accepts), None)
    else:
        trainer.check_changes(saved, found, args, SimpleNamespace(print=changes.append))
        assert changes and saved["progress"]["losses"] == []  # of a source that may have left the list


@pytest.mark.parametrize("before, rows, after, grown, is_refused", RESUMES.values(), ids=RESUMES)
def test_no_row_that_was_trained_on_is_held_out(before, rows, after, grown, is_refused, tmp_path, monkeypatch):
    """By a resume, not even with --accept_changes."""
    monkeypatch.chdir(tmp_path)
    _, saved = run_of(script, before, rows, "bad")
    resume(script, saved, *run_of(script, after, grown), is_refused)


@pytest.mark.parametrize("second, third, rows, is_refused", AGAIN.values(), ids=AGAIN)
def test_a_source_that_was_away(second, third, rows, is_refused, tmp_path, monkeypatch):
    """It is known by what it has held out. Those of the eighth edition do not say: no mixtures."""
    monkeypatch.chdir(tmp_path)
    _, saved = run_of(train_cross_encoder, ONE if third == ONE else TWO, {"b": 1000}, "bad")
    args, found = run_of(train_cross_encoder, second, {"b": 1000})
    resume(train_cross_encoder, saved, args, found, False)
    saved = found
    args, found = run_of(train_cross_encoder, third, {"b": rows})
    resume(train_cross_encoder, saved, args, dict(found), is_refused)
    eighth = {name: value for name, value in saved.items() if not name.startswith(script.HELD_OUT)}
    eighth |= {"held-out rows of [b].parquet": [50, 1000]}
    if third == ONE:
        resume(train_cross_encoder, eighth, args, found, False)
    else:
        with pytest.raises(train_cross_encoder.UserError, match="mixtures of editions before the ninth"):
            resume(train_cross_encoder, eighth, args, found, False)
