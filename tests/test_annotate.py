"""--annotate: rows keep their order and get the scores of the library, each pair scored once, however often killed."""

import json
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, count_cached, launch, metrics, read_jsonl, train, write_jsonl
from filelock import FileLock
from forked import Forked, merge_flags
from test_eval_incremental import COUNTING_DRIVER

import eval_incremental as script
import prepare_corpus

SCRIPT = ROOT / "eval_incremental.py"
# Writes a byte to a log for each pair scored, so that the work of killed runs is known.
SCORING_DRIVER = COUNTING_DRIVER.replace("CachedEncoder", "CachedScorer")


@pytest.fixture(scope="module")
def data(tmp_path_factory, rows):
    """40 rows of a query, a positive, a list of one to three negatives and what else a file may contain."""
    path = tmp_path_factory.mktemp("annotate") / "rows.jsonl"
    made = []
    for number, row in enumerate(rows[:40]):
        negatives = [rows[(7 * number + shift) % 300]["code"][:200] for shift in range(50, 51 + number % 3)]
        query, positive = row["docstring"][:60], row["code"][:200]
        made.append({"id": number, "query": query, "positive": positive, "negatives": negatives, "meta": {"a": None}})
        made[-1]["note"] = None if number % 2 else "é"
    write_jsonl(path, made)
    return path


def flags_for(folder, source, *more, output="scored.jsonl"):
    flags = ["--annotate", source, "--columns", "query", "positive", "negatives", "--output", folder / output]
    return merge_flags([*flags, "--cache_dir", folder / "cache", "--corpus_chunk_size", 20, *more])


@pytest.fixture
def annotate(tmp_path, capsys):
    """Return a function that annotates in this process, in tmp_path, and returns what it prints."""

    def run(source, *more, output="scored.jsonl"):
        script.main(script.parse_args(flags_for(tmp_path, source, *more, output=output)))
        return capsys.readouterr().out

    return run


def pairs_of(rows):
    return [(row["query"], document) for row in rows for document in [row["positive"], *row["negatives"]]]


def flatten(rows):
    return [score for row in rows for score in row["scores"]]


def test_scores_are_those_of_predict(annotate, data, reranker, tmp_path):
    from sentence_transformers import CrossEncoder

    shown = annotate(data, "--cross_encoder", reranker)
    rows = read_jsonl(data)
    scored = read_jsonl(tmp_path / "scored.jsonl")
    assert [{**row, "scores": None} for row in rows] == [{**row, "scores": None} for row in scored]
    assert [len(row["scores"]) for row in scored] == [1 + len(row["negatives"]) for row in rows]
    model = CrossEncoder(str(reranker), device="cpu", activation_fn=torch.nn.Identity())
    pairs = pairs_of(rows)
    assert flatten(scored) == pytest.approx(model.predict(pairs).tolist(), abs=1e-5)
    assert len({round(score, 3) for score in flatten(scored)}) > 40
    distinct = len(set(pairs))
    assert f"{distinct} of {len(pairs)} pairs scored" in shown
    again = annotate(data, "--cross_encoder", reranker, output="again.jsonl")
    assert f"0 of {len(pairs)} pairs scored" in again
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "scored.jsonl").read_bytes()
    assert not list(tmp_path.glob("*.part"))


def test_formats_and_sources(annotate, data, reranker, tmp_path):
    """JSON Lines and Parquet; files, a glob; several sources follow each other."""
    annotate(data, "--cross_encoder", reranker)
    expected = read_jsonl(tmp_path / "scored.jsonl")
    (tmp_path / "parts").mkdir()
    for part in range(2):
        rows = pa.Table.from_pylist(read_jsonl(data)[20 * part : 20 * part + 20])
        pq.write_table(rows.drop_columns(["meta"]), tmp_path / f"parts/{part}.parquet")
    for name, source in (("glob", [tmp_path / "parts/*.parquet"]),
                         ("two", [tmp_path / "parts/0.parquet", tmp_path / "parts/1.parquet"])):  # fmt: skip
        shown = annotate(data, "--cross_encoder", reranker, "--annotate", *source, output=f"{name}.jsonl")
        assert ": 0 of " in "\n" + shown
        rows = [{**row, "meta": {"a": None}} for row in read_jsonl(tmp_path / f"{name}.jsonl")]
        assert rows == [{name: row[name] for name in rows[0]} for row in expected] == expected


def test_columns_of_several_types_and_dates(annotate, reranker, tmp_path):
    """Neither what a text column mixes nor other columns are changed; a column may be given twice."""
    rows = [{"q": "one", "d": "a text", "any": 1, "when": "2026-01-02 03:04:05", "half": 0.1},
            {"q": "two", "d": ["a text", "another"], "any": {"b": [1, "x"]}, "when": None, "half": 1e-17}]  # fmt: skip
    write_jsonl(tmp_path / "x.jsonl", rows)
    annotate(tmp_path / "x.jsonl", "--cross_encoder", reranker, "--columns", "q", "d", "q")
    scored = read_jsonl(tmp_path / "scored.jsonl")
    assert [len(row.pop("scores")) for row in scored] == [2, 3] and scored == rows


def test_cells_that_json_has_not(annotate, reranker, tmp_path, monkeypatch, capsys):
    """A number that is none is null, also in a list or struct; bytes are refused, and the advice works."""
    monkeypatch.chdir(tmp_path)
    infinite = [float("nan"), float("inf"), 0.1]
    table = pa.table({"q": ["NaN", "one", "two"], "d": ["a", "b", "c"], "old": infinite,
                      "more": [{"a": [number]} for number in infinite]})  # fmt: skip
    for column in (pa.array([b"ab", b"\xff", None]), pa.array([[b"ab"], [], None]), pa.array([{"bytes": b"ab"}] * 3)):
        pq.write_table(table.append_column("raw", column), "x.parquet")
        with pytest.raises(script.UserError, match="^x.parquet: column 'raw' has bytes, which JSON has not") as error:
            annotate("x.parquet", "--cross_encoder", reranker, "--columns", "q", "d")
    assert not (tmp_path / "scored.jsonl").exists()
    words = str(error.value).partition("prepare_corpus.py ")[2].replace("DIR", "made").split()
    prepare_corpus.main(prepare_corpus.parse_args(words))
    capsys.readouterr()
    annotate("made/*.arrow", "--cross_encoder", reranker, "--columns", "q", "d", output="mended.jsonl")
    assert [row["old"] for row in read_jsonl("mended.jsonl")] == [None, None, 0.1]
    pq.write_table(table, "x.parquet")
    shown = annotate("x.parquet", "--cross_encoder", reranker, "--columns", "q", "d", "q")
    assert " of 3 score their first document highest, 2 would by chance" in shown
    lines = Path("scored.jsonl").read_text().splitlines()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [(row["q"], row["old"], row["more"]) for row in lines] == [
        ("NaN", None, {"a": [None]}), ("one", None, {"a": [None]}), ("two", 0.1, {"a": [0.1]})]  # fmt: skip


@pytest.mark.slow
def test_two_processes_write_the_file_of_one(tmp_path, data, reranker):
    for processes in (1, 2):
        flags = flags_for(tmp_path / str(processes), data, "--cross_encoder", reranker)
        (tmp_path / str(processes)).mkdir()
        done = launch(SCRIPT, *flags, processes=processes)
        assert done.stdout.count("to distill: ") == 1
    one, two = (read_jsonl(tmp_path / f"{processes}/scored.jsonl") for processes in (1, 2))
    assert flatten(one) == pytest.approx(flatten(two), abs=1e-6)
    assert [row | {"scores": None} for row in one] == [row | {"scores": None} for row in two]


def test_a_second_call_is_refused(tmp_path, data, reranker):
    """While the first writes the same file, and if it has written it meanwhile."""
    flags = flags_for(tmp_path, data, "--cross_encoder", reranker)
    with FileLock(tmp_path / "scored.jsonl.lock"):
        done = launch(SCRIPT, *flags, check=False)
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: --output {tmp_path}/scored.jsonl: ") and "another run is writing" in error
    launch(SCRIPT, *flags)
    assert [path.name for path in sorted(tmp_path.glob("scored*"))] == ["scored.jsonl"]
    args = script.parse_args(flags_for(tmp_path, data, "--cross_encoder", reranker, output="new.jsonl"))
    (tmp_path / "new.jsonl").touch()
    with pytest.raises(script.UserError, match="another call has made it"):
        script.main(args)


def test_killed_and_continued(tmp_path, data, reranker):
    """The scores of a killed call are in the cache; its rows begin again, with the same bytes at the end."""
    log, driver = tmp_path / "log", tmp_path / "driver.py"
    (tmp_path / "killed").mkdir()
    (tmp_path / "whole").mkdir()
    launch(SCRIPT, *flags_for(tmp_path / "whole", data, "--cross_encoder", reranker))
    flags = flags_for(tmp_path / "killed", data, "--cross_encoder", reranker)
    driver.write_text(SCORING_DRIVER.format(root=str(ROOT), log=str(log), pause=0.05))
    process = Forked(driver, flags)
    while (log.stat().st_size if log.exists() else 0) < 60:
        assert process.poll() is None
        time.sleep(0.01)
    process.send(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed/scored.jsonl").exists() and (tmp_path / "killed/scored.jsonl.part").exists()
    (cached,) = count_cached(tmp_path / "killed/cache", 4)
    driver.write_text(SCORING_DRIVER.format(root=str(ROOT), log=str(log), pause=0))
    done = launch(driver, *flags)
    distinct = len(set(pairs_of(read_jsonl(data))))
    assert cached >= 30 and f": {distinct - cached} of " in done.stdout
    assert (tmp_path / "killed/scored.jsonl").read_bytes() == (tmp_path / "whole/scored.jsonl").read_bytes()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query": ""}, "row 33, counted from 0, has no text in column 'query'"),
        ({"query": ["a", "b"]}, "row 33, counted from 0, has no text in column 'query'"),
        ({"positive": None}, "row 33, counted from 0, has no text in column 'positive'"),
        ({"negatives": []}, "row 33, counted from 0, has no text in column 'negatives'"),
        ({"negatives": ["x", " "]}, "row 33, counted from 0, has no text in column 'negatives'"),
        ({"scores": [1.0]}, "has a column 'scores' already: leave it out, or mine without --format"),
    ],
)
def test_bad_rows(annotate, data, reranker, tmp_path, change, message):
    rows = read_jsonl(data)
    rows[33] |= change
    write_jsonl(tmp_path / "bad.jsonl", rows)
    with pytest.raises(script.UserError, match=f"^{tmp_path}/bad.jsonl: {message}$"):
        annotate(tmp_path / "bad.jsonl", "--cross_encoder", reranker)
    assert not (tmp_path / "scored.jsonl").exists()


@pytest.mark.parametrize("name", ["empty.csv", "empty.parquet"])
def test_a_source_without_rows(annotate, reranker, tmp_path, name):
    (tmp_path / "empty.csv").write_text("query,positive,negatives\n")
    pq.write_table(pa.table({"query": [], "positive": [], "negatives": []}), tmp_path / "empty.parquet")
    with pytest.raises(script.UserError, match="contains no row"):
        annotate(tmp_path / name, "--cross_encoder", reranker)


def test_usage(data, tmp_path, capsys):
    (tmp_path / "old.jsonl").write_text("x")
    model = ["--cross_encoder", "m"]
    for more, message in (
        ([*model, "--output", tmp_path / "old.jsonl"], "old.jsonl: it exists"),
        ([*model, "--columns", "query"], "--annotate requires --cross_encoder, --output NEW.jsonl, and --columns"),
        ([*model, "--output", "new.parquet"], "--output NEW.jsonl"),
        ([*model, "--beir", "b"], "--beir, --corpus, --pairs, --annotate: give only one of them"),
        ([*model, "--model_name_or_path", "b"], "--annotate takes no bi-encoder"),
        ([*model, "--max_length", 8], "but --cross_encoder and --rerank_max_length"),
        ([*model, "--bm25"], "--annotate: take none of --run, --bm25"),
        ([], "requires --cross_encoder"),
    ):
        with pytest.raises(SystemExit):
            script.parse_args(flags_for(tmp_path, data, *more))
        assert message in capsys.readouterr().err
    assert (tmp_path / "old.jsonl").read_text() == "x"


def test_a_trainer_reads_the_rows(annotate, data, reranker, bert, tmp_path):
    """By the flags that the last line says."""
    rows = [{**row, "negatives": row["negatives"][0]} for row in read_jsonl(data)]
    write_jsonl(tmp_path / "x.jsonl", rows)
    shown = annotate(tmp_path / "x.jsonl", "--cross_encoder", reranker)
    advice = shown.splitlines()[-1].removeprefix("to distill: ")
    assert advice.startswith("--columns query positive negatives --label_column scores --loss kl --loss_kwargs '{")
    flags, options = advice.split(" --loss_kwargs ")
    flags = [*flags.split(), "--loss_kwargs", options.strip("'"), "--eval_rows", 0, "--batch_size", 8]
    flags += ["--max_steps", 1, "--train_data", tmp_path / "scored.jsonl", "--model_name_or_path", bert]
    flags += ["--output_dir", tmp_path / "o"]
    train("train_bi_encoder", *flags)
    assert metrics(tmp_path / "o")[-1]["loss"] > 0
