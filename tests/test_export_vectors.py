"""--export_vectors: the vectors that search uses, in corpus order, in files that an index or a database reads."""

import json
import re
import shutil
import signal
import subprocess
import time
from operator import itemgetter

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, count_cached, launch, read_jsonl, read_run, write_jsonl
from filelock import FileLock
from forked import Forked, merge_flags
from sentence_transformers import SentenceTransformer
from test_eval_incremental import COUNTING_DRIVER, SCRIPT, small_disk

import eval_incremental as script

CHUNK = 37  # rows: the 293 documents make seven full shards and one of 34 rows


def flags_for(folder, model, *corpus):
    flags = ["--model_name_or_path", model, "--cache_dir", folder / "cache", "--export_vectors", folder / "vectors"]
    return merge_flags([*flags, "--corpus_chunk_size", CHUNK, "--micro_batch_tokens", 256, *corpus])


@pytest.fixture
def export(capsys):
    """Return a function that exports in this process, in `folder`, and returns the number of texts encoded."""

    def run(folder, model, *corpus):
        script.main(script.parse_args(flags_for(folder, model, *corpus)))
        return count_encoded(capsys.readouterr().out)

    return run


def count_encoded(shown):
    """Return the number of texts encoded, from the line that an export prints."""
    return int(re.search(r": (\d+) of \d+ texts encoded", shown)[1])


def bytes_of(folder):
    """Return {file: bytes} of an export."""
    return {path.name: path.read_bytes() for path in sorted((folder / "vectors").iterdir())}


def documents(beir):
    return read_jsonl(beir / "corpus.jsonl")


PROMPTS = ("--truncate_dim", "16", "--query_prompt", "find: ", "--document_prompt", "code: ")


@pytest.mark.parametrize("dtype, tolerance, extra", [("float32", 1e-6, ()), ("int8", 1e-2, ("--streaming",)),
                                                     ("float32", 1e-6, PROMPTS)])  # fmt: skip
def test_equals_sentence_transformers(export, tmp_path, beir, bert, dtype, tolerance, extra):

    assert export(tmp_path, bert, "--corpus", beir / "corpus.jsonl", "--cache_dtype", dtype, *extra) == 293
    prompt, dims = ("code: ", 16) if "--document_prompt" in extra else ("", 32)
    texts = [prompt + row["text"].strip() for row in documents(beir)]
    theirs = SentenceTransformer(str(bert), device="cpu", truncate_dim=dims).encode(texts, normalize_embeddings=True)
    table = pq.read_table(tmp_path / "vectors")  # _vectors.json is not read as data
    assert table.column_names == ["_id", "vector"] and str(table.schema.field("_id").type) == "string"
    assert str(table.schema.field("vector").type) == f"fixed_size_list<element: float>[{dims}]"
    assert table["_id"].to_pylist() == [f"d{i}" for i in range(293)]
    assert np.abs(np.array(table["vector"].to_pylist()) - theirs).max() < tolerance
    names = sorted(path.name for path in (tmp_path / "vectors").glob("*.parquet"))
    assert names == [f"vectors-{first:012}.parquet" for first in range(0, 293, CHUNK)]
    metadata = json.loads((tmp_path / "vectors/_vectors.json").read_text())
    assert (metadata["rows"], metadata["dimensions"], metadata["similarity"]) == (293, dims, "cosine")
    assert metadata["document_prompt"] == prompt and metadata["query_prompt"] == ("find: " if prompt else "")
    assert metadata["model"] == str(bert) and metadata["max_length"] == 128
    assert (tmp_path / "cache" / f"{bert.name}-{metadata['fingerprint']}" / "cache.db").exists()


def test_dot_products_are_not_normalized(export, tmp_path, beir, bert):

    shutil.copytree(bert, tmp_path / "dot")
    config = tmp_path / "dot/config_sentence_transformers.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "similarity_fn_name": "dot"}))
    export(tmp_path, tmp_path / "dot", "--beir", beir, "--cache_dtype", "float32")
    theirs = SentenceTransformer(str(bert), device="cpu").encode([row["text"].strip() for row in documents(beir)])
    vectors = np.array(pq.read_table(tmp_path / "vectors")["vector"].to_pylist())
    assert np.abs(vectors - theirs).max() < 1e-5 * np.abs(theirs).max()
    assert abs(np.linalg.norm(theirs, axis=1) - 1).min() > 0.1
    metadata = json.loads((tmp_path / "vectors/_vectors.json").read_text())
    assert metadata["similarity"] == "dot"


@pytest.mark.slow
def test_a_faiss_index_finds_what_the_evaluator_finds(evaluate, beir, bert, tmp_path):
    """The example of docs/evaluation.md, compared with the run.trec of an evaluation whose cache the export uses."""
    faiss = pytest.importorskip("faiss", reason="needs the package faiss-cpu")
    import datasets

    flags = ["--beir", beir, "--cache_dtype", "float32"]
    evaluate(*flags)
    evaluate(*flags, "--export_vectors", tmp_path / "vectors", output="exported")
    vectors = datasets.load_dataset(str(tmp_path / "vectors"), split="train", cache_dir=str(tmp_path / "hf"))
    assert vectors.column_names == ["_id", "vector"] and len(vectors) == 293
    index = faiss.IndexFlatIP(32)
    for batch in vectors.with_format("numpy").iter(100):
        index.add(batch["vector"])
    run = read_run(tmp_path / "out/run.trec")
    queries = dict(map(itemgetter("_id", "text"), read_jsonl(beir / "queries.jsonl")))
    model = SentenceTransformer(str(bert), device="cpu")
    requested = model.encode([queries[name] for name in run], normalize_embeddings=True)
    compared = 0
    for found, values, rows in zip(run.values(), *index.search(requested, 101)):
        assert list(found.values()) == pytest.approx(values[:100].tolist(), abs=2e-6)
        clear = np.diff(values, prepend=2)  # (101,); ranks that rounding cannot swap
        for rank in np.flatnonzero((clear[:-1] < -4e-6) & (clear[1:] < -4e-6)):
            assert vectors[int(rows[rank])]["_id"] == list(found)[rank]
            compared += 1
    assert compared > 4000  # of 6,000


def test_pairs_and_a_static_model(export, tmp_path, corpus, static):
    """Pairs have no ids: the id of a document is a hash of its text."""
    assert export(tmp_path, static, "--pairs", f"{corpus}/*.parquet", "--columns", "docstring", "code") > 250
    table = pq.read_table(tmp_path / "vectors")
    texts = pq.read_table(corpus)["code"].to_pylist()
    assert set(table["_id"].to_pylist()) == set(map(script.text_id, texts))
    metadata = json.loads((tmp_path / "vectors/_vectors.json").read_text())
    assert metadata["max_length"] is None and metadata["rows"] == len(table)


def test_ids_that_repeat_are_counted(tmp_path, static, capsys):
    """A store that is filled with them has one vector of an id, or refuses the others."""
    texts = [("A", "one"), ("B", "two"), ("A", "three"), ("E", ""), ("A", "four")]
    write_jsonl(tmp_path / "c.jsonl", [{"_id": name, "text": text} for name, text in texts])
    flags = flags_for(tmp_path, static, "--corpus", tmp_path / "c.jsonl", "--corpus_chunk_size", 2)
    script.main(script.parse_args(list(map(str, flags))))
    said = capsys.readouterr().err
    assert "c.jsonl: 2 rows repeat an id" in said


@pytest.mark.slow
def test_two_processes_give_the_bytes_of_one(tmp_path, beir, bert):
    for processes in (1, 2):
        done = launch(SCRIPT, *flags_for(tmp_path / str(processes), bert, "--beir", beir), processes=processes)
        assert count_encoded(done.stdout) == 293
    assert bytes_of(tmp_path / "1") == bytes_of(tmp_path / "2")
    shutil.move(tmp_path / "1/vectors", tmp_path / "before")
    done = launch(SCRIPT, *flags_for(tmp_path / "1", bert, "--beir", beir), processes=2)
    assert count_encoded(done.stdout) == 0 and bytes_of(tmp_path / "1") == bytes_of(tmp_path / "2")


# Delays the rename of the folder, so that a kill can find a complete export under its temporary name.
SLOW_RENAME = """
import time
from pathlib import Path
rename = Path.rename
Path.rename = lambda *paths: (time.sleep(0.2), rename(*paths))
"""


@pytest.mark.slow
def test_a_second_call_is_refused(tmp_path, beir, bert):
    """While the first writes the same folder."""
    with FileLock(tmp_path / "vectors.lock"):
        done = launch(SCRIPT, *flags_for(tmp_path, bert, "--beir", beir), check=False)
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (
        error.startswith(f"error: --export_vectors {tmp_path}/vectors: ") and "another run is writing to it" in error
    )


def test_killed_in_the_middle(tmp_path, beir, bert):
    """Killed while encoding, and before the folder is renamed; the next one takes what was encoded from the cache."""
    log, driver, vectors = tmp_path / "log", tmp_path / "driver.py", tmp_path / "killed/vectors.part"
    done = launch(SCRIPT, *flags_for(tmp_path / "undisturbed", bert, "--beir", beir))
    assert count_encoded(done.stdout) == 293
    flags = flags_for(tmp_path / "killed", bert, "--beir", beir)
    driver.write_text(SLOW_RENAME + COUNTING_DRIVER.format(root=str(ROOT), log=str(log), pause=0.02))
    for expected, moment in ((90, "vectors-*.parquet"), (200, "_vectors.json")):  # texts encoded, a file that exists
        process = Forked(driver, flags)
        while (log.stat().st_size if log.exists() else 0) < expected or not list(vectors.glob(moment)):
            assert process.poll() is None
            time.sleep(0.01)
        process.send(signal.SIGKILL)
        process.wait()
        assert list(vectors.glob(moment)) and not (tmp_path / "killed/vectors").exists()
    (cached,) = count_cached(tmp_path / "killed/cache")
    log.unlink()
    driver.write_text(COUNTING_DRIVER.format(root=str(ROOT), log=str(log), pause=0))
    (vectors / f"vectors-{999:012}.parquet").write_text("of another corpus")
    done = launch(driver, *flags)
    assert cached == 293 and count_encoded(done.stdout) == 0 and not log.exists() and not vectors.exists()
    assert bytes_of(tmp_path / "killed") == bytes_of(tmp_path / "undisturbed")


def test_again_and_after_a_change(export, tmp_path, beir, bert, capsys):
    """Unchanged texts are read from the cache; an export that exists is refused, and unchanged."""
    folder, vectors = tmp_path / "beir", tmp_path / "vectors"
    shutil.copytree(beir, folder)
    assert export(tmp_path, bert, "--beir", folder) == 293
    first = bytes_of(tmp_path)
    with pytest.raises(SystemExit):
        export(tmp_path, bert, "--beir", folder)
    assert f"error: --export_vectors {vectors}: it exists; choose another name" in capsys.readouterr().err
    assert bytes_of(tmp_path) == first
    shutil.rmtree(vectors)
    rows = documents(folder)
    rows[0]["text"] += "  # changed"
    rows[CHUNK]["_id"] = "another id"
    write_jsonl(folder / "corpus.jsonl", rows[: 6 * CHUNK])  # and shorter by two shards
    assert export(tmp_path, bert, "--beir", folder) == 1
    table = pq.read_table(vectors)
    assert table["_id"].to_pylist() == [row["_id"] for row in rows[: 6 * CHUNK]]
    shutil.rmtree(vectors)
    write_jsonl(folder / "corpus.jsonl", [*({**row, "text": "x"} for row in rows[:100]), {"_id": "", "text": "y"}])
    with pytest.raises(script.UserError, match="column '_id': row 100, counted from 0, has no id"):
        export(tmp_path, bert, "--beir", folder)
    assert not vectors.exists()


def test_a_file_instead_of_the_folder(evaluate, beir, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(script.UserError, match=f"^--export_vectors {tmp_path}/file/x: .*folder[^\n]*$"):
        evaluate("--beir", beir, "--export_vectors", tmp_path / "file/x")


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_full_or_read_only_disk(evaluate, beir, tmp_path, report, how):
    vectors = tmp_path / "disk/vectors"
    flags = ["--beir", beir, "--export_vectors", vectors]
    with small_disk(tmp_path / "disk", "30k", how):
        with pytest.raises(script.UserError, match=f"^--export_vectors {vectors}: .*folder[^\n]*$"):
            evaluate(*flags)
        assert not vectors.exists()
        if how == "full":
            subprocess.run(["mount", "-o", "remount,size=100m", tmp_path / "disk"], check=True)
            evaluate(*flags)
            assert len(pq.read_table(vectors)) == 293
        report("a full or read-only disk under an export", 1, "one-line error; the next run uses what was stored")
