"""--export_vectors: the vectors that search uses, in corpus order, in files that an index or a database reads."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from operator import itemgetter

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, launch, stored, write_jsonl
from forked import Forked, last_of
from test_eval_incremental import COUNTED, SCRIPT, read_run

import eval_incremental as script

CHUNK = 37  # rows: the 293 documents make seven whole shards and one of 34 rows


@pytest.fixture(scope="session")
def static(tmp_path_factory, rows):
    """Folder of a static embedding model of 24 dimensions, random weights."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import BertWordPieceTokenizer

    words = BertWordPieceTokenizer()
    words.train_from_iterator((row["code"] for row in rows), vocab_size=500, show_progress=False)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("static")
    model = SentenceTransformer(modules=[StaticEmbedding(words._tokenizer, embedding_dim=24)], device="cpu")
    model.save_pretrained(str(folder), create_model_card=False)
    return folder


def flags_for(place, model, *corpus):
    flags = ["--model_name_or_path", model, "--cache_dir", place / "cache", "--export_vectors", place / "vectors"]
    return last_of([*flags, "--corpus_chunk_size", CHUNK, "--micro_batch_tokens", 256, *corpus])


@pytest.fixture
def export(capsys):
    """Run the script in this process with all of its files in `place`; returns the number of texts encoded."""

    def run(place, model, *corpus):
        script.main(script.parse_args(flags_for(place, model, *corpus)))
        return encoded(capsys.readouterr().out)

    return run


def encoded(shown):
    """The number of texts encoded by the line that an export prints."""
    return int(re.search(r"^(\d+) of \d+ texts encoded", shown, re.M)[1])


def bytes_of(place):
    """{file: bytes} of an export; _vectors.json without its command, which names the folder."""
    found = {path.name: path.read_bytes() for path in sorted((place / "vectors").iterdir())}
    about = json.loads(found["_vectors.json"])
    about.pop("command")
    return found | {"_vectors.json": about}


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def documents(beir):
    return read_jsonl(beir / "corpus.jsonl")


# ------------------------------------------------------------------------------------------------------ correct


@pytest.mark.parametrize(
    "dtype, tolerance, extra",
    [
        ("float32", 1e-6, ()),
        ("float16", 1e-3, ()),
        ("int8", 1e-2, ("--streaming",)),
        ("float32", 1e-6, ("--truncate_dim", "16", "--prompts", "find: ", "code: ")),
    ],
)
def test_equals_sentence_transformers(export, tmp_path, beir, bert, dtype, tolerance, extra):
    from sentence_transformers import SentenceTransformer

    assert export(tmp_path, bert, "--corpus", beir / "corpus.jsonl", "--cache_dtype", dtype, *extra) == 293
    prompt, dims = ("code: ", 16) if "--prompts" in extra else ("", 32)
    texts = [prompt + row["text"].strip() for row in documents(beir)]
    theirs = SentenceTransformer(str(bert), device="cpu", truncate_dim=dims).encode(texts, normalize_embeddings=True)
    table = pq.read_table(tmp_path / "vectors")  # _vectors.json does not stand in the way
    assert table.column_names == ["_id", "vector"] and str(table.schema.field("_id").type) == "string"
    assert str(table.schema.field("vector").type) == f"fixed_size_list<element: float>[{dims}]"
    assert table["_id"].to_pylist() == [f"d{i}" for i in range(293)]
    assert np.abs(np.array(table["vector"].to_pylist()) - theirs).max() < tolerance
    names = sorted(path.name for path in (tmp_path / "vectors").glob("*.parquet"))
    assert names == [f"vectors-{first:012}.parquet" for first in range(0, 293, CHUNK)]
    about = json.loads((tmp_path / "vectors/_vectors.json").read_text())
    assert about["rows"] == 293 and about["dimensions"] == dims
    assert about["similarity"] == "cosine" and about["normalized"] is True and about["dtype"] == "float32"
    assert about["document_prompt"] == prompt and about["query_prompt"] == ("find: " if prompt else "")
    assert about["model"] == str(bert) and about["max_length"] == 128
    assert (tmp_path / "cache" / about["fingerprint"] / "model.json").exists()


def test_dot_products_are_not_normalized(export, tmp_path, beir, bert):
    from sentence_transformers import SentenceTransformer

    shutil.copytree(bert, tmp_path / "dot")
    config = tmp_path / "dot/config_sentence_transformers.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "similarity_fn_name": "dot"}))
    export(tmp_path, tmp_path / "dot", "--beir", beir, "--cache_dtype", "float32")
    theirs = SentenceTransformer(str(bert), device="cpu").encode([row["text"].strip() for row in documents(beir)])
    vectors = np.array(pq.read_table(tmp_path / "vectors")["vector"].to_pylist())
    assert np.abs(vectors - theirs).max() < 1e-5 * np.abs(theirs).max()
    assert abs(np.linalg.norm(theirs, axis=1) - 1).min() > 0.1
    about = json.loads((tmp_path / "vectors/_vectors.json").read_text())
    assert about["similarity"] == "dot" and about["normalized"] is False


def test_a_faiss_index_finds_what_the_evaluator_finds(evaluate, beir, bert, tmp_path):
    """The README's example, beside run.trec of an evaluation, whose cache the export reads."""
    faiss = pytest.importorskip("faiss", reason="needs the package faiss-cpu")
    import datasets
    from sentence_transformers import SentenceTransformer

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
    asked = model.encode([queries[name] for name in run], normalize_embeddings=True)
    compared = 0
    for found, values, rows in zip(run.values(), *index.search(asked, 101)):
        assert list(found.values()) == pytest.approx(values[:100].tolist(), abs=2e-6)
        clear = np.diff(values, prepend=2)  # (101,); ranks that rounding cannot swap
        for rank in np.flatnonzero((clear[:-1] < -4e-6) & (clear[1:] < -4e-6)):
            assert vectors[int(rows[rank])]["_id"] == list(found)[rank]
            compared += 1
    assert compared > 4000  # of 6,000


def test_pairs_and_a_static_model(export, tmp_path, corpus, static):
    """Nothing but texts is wanted: the ids of pairs are the numbers of their rows."""
    assert export(tmp_path, static, "--pairs", corpus, "--columns", "docstring", "code") > 250
    table = pq.read_table(tmp_path / "vectors")
    assert table["_id"].to_pylist() == [str(i) for i in range(len(table))]
    about = json.loads((tmp_path / "vectors/_vectors.json").read_text())
    assert about["columns"] == ["#", "code"] and about["max_length"] is None and about["rows"] == len(table)


# -------------------------------------------------------------------------------------------------- incremental


def test_two_processes_give_the_bytes_of_one(tmp_path, beir, bert):
    for processes in (1, 2):
        done = launch(SCRIPT, *flags_for(tmp_path / str(processes), bert, "--beir", beir), processes=processes)
        assert encoded(done.stdout) == 293
        command = json.loads((tmp_path / f"{processes}/vectors/_vectors.json").read_text())["command"]
        assert f"eval_incremental.py --model_name_or_path {bert}" in command and "--export_vectors" in command
    assert bytes_of(tmp_path / "1") == bytes_of(tmp_path / "2")
    done = launch(SCRIPT, *flags_for(tmp_path / "1", bert, "--beir", beir), processes=2)
    assert encoded(done.stdout) == 0 and bytes_of(tmp_path / "1") == bytes_of(tmp_path / "2")


# A shard stays some time under the name of its part, so that a kill finds it there.
SLOW = """
import os, time
rename = os.rename
os.rename = lambda *paths: (time.sleep(0.2), rename(*paths))
"""


def test_killed_in_the_middle(tmp_path, beir, bert):
    """Once while texts are encoded, once before a shard has its name; the next export starts from the cache."""
    log, driver, vectors = tmp_path / "log", tmp_path / "driver.py", tmp_path / "killed/vectors"
    driver.write_text(SLOW + COUNTED.format(root=str(ROOT), log=str(log), pause=0.05))
    for place in ("undisturbed", "killed"):
        flags = flags_for(tmp_path / place, bert, "--beir", beir)
        if place == "undisturbed":
            launch(driver, *flags)
            assert log.stat().st_size == 293
            log.unlink()
    for wanted, moment in ((90, "vectors-*.parquet"), (200, "*.part")):  # texts encoded in all, and a file there
        process = Forked(driver, flags)
        while (log.stat().st_size if log.exists() else 0) < wanted or not list(vectors.glob(moment)):
            assert process.poll() is None
            time.sleep(0.01)
        process.send(signal.SIGKILL)
        process.wait()
        assert not (vectors / "_vectors.json").exists()
    assert list(vectors.glob(moment))
    (held,) = stored(tmp_path / "killed/cache")
    log.unlink()
    done = launch(driver, *flags)
    assert held > 3 * CHUNK and encoded(done.stdout) == log.stat().st_size == 293 - held
    assert bytes_of(tmp_path / "killed") == bytes_of(tmp_path / "undisturbed")


def test_again_and_after_a_change(export, tmp_path, beir, bert):
    """What has not changed is read from the cache, and the shards are those of this corpus alone."""
    folder, vectors = tmp_path / "beir", tmp_path / "vectors"
    shutil.copytree(beir, folder)
    assert export(tmp_path, bert, "--beir", folder) == 293
    first = bytes_of(tmp_path)
    assert export(tmp_path, bert, "--beir", folder) == 0 and bytes_of(tmp_path) == first
    rows = documents(folder)
    rows[0]["text"] += "  # changed"
    rows[CHUNK]["_id"] = "another id"
    write_jsonl(folder / "corpus.jsonl", rows[: 6 * CHUNK])  # and shorter by two shards
    assert export(tmp_path, bert, "--beir", folder) == 1
    table = pq.read_table(vectors)
    assert table["_id"].to_pylist() == [row["_id"] for row in rows[: 6 * CHUNK]]
    assert export(tmp_path, bert, "--beir", folder, "--corpus_chunk_size", 50) == 0  # the later flag counts
    assert pq.read_table(vectors).equals(table)
    write_jsonl(folder / "corpus.jsonl", [*({**row, "text": "x"} for row in rows[:100]), {"_id": "", "text": "y"}])
    with pytest.raises(script.UserError, match="no id in column"):
        export(tmp_path, bert, "--beir", folder)
    assert not (vectors / "_vectors.json").exists()  # not whole


# ---------------------------------------------------------------------------------------------------- bad input


def test_foreign_folder(export, tmp_path, beir, bert):
    export(tmp_path, bert, "--corpus", beir / "corpus.jsonl")
    before = bytes_of(tmp_path)
    shutil.copy(beir / "corpus.jsonl", tmp_path / "other.jsonl")
    for flags, what in (
        (["--corpus", tmp_path / "other.jsonl"], "another corpus"),
        (["--beir", beir, "--prompts", "", "code: "], "another document_prompt"),
        (["--beir", beir, "--truncate_dim", "16"], "another dimensions"),
        (["--beir", beir, "--max_length", "20"], "another fingerprint"),
        (["--beir", beir, "--corpus_columns", "_id", "text"], "another columns"),
    ):
        line = f"^--export_vectors {tmp_path}/vectors: .* empty folder: it contains an export of .*{what}"
        with pytest.raises(script.UserError, match=line):
            export(tmp_path, bert, *flags)
        assert bytes_of(tmp_path) == before
    (tmp_path / "vectors/own.parquet").write_text("mine")
    before = bytes_of(tmp_path)
    with pytest.raises(script.UserError, match="own.parquet does not belong to an export"):
        export(tmp_path, bert, "--corpus", beir / "corpus.jsonl")
    assert bytes_of(tmp_path) == before


@pytest.mark.parametrize(
    "flags", [["--model_name_or_path", "a", "b"], ["--query", "x"], ["--run", "r"], ["--bm25"], ["--judged"]]
)
def test_usage(flags, capsys):
    with pytest.raises(SystemExit):
        script.parse_args(["--corpus", "c.jsonl", "--export_vectors", "v", "--queries", "q", "--qrels", "r", *flags])
    assert "--query, --export_vectors: take one " in capsys.readouterr().err


def test_a_file_is_no_folder(evaluate, beir, tmp_path):
    (tmp_path / "file").write_text("x")
    for name in ("file", "file/x"):
        with pytest.raises(script.UserError, match=f"^--export_vectors {tmp_path}/{name}: .*folder[^\n]*$"):
            evaluate("--beir", beir, "--export_vectors", tmp_path / name)


@pytest.mark.skipif(shutil.which("mount") is None or os.geteuid() != 0, reason="needs root to mount a small disk")
@pytest.mark.parametrize("how", ["full", "read-only"])
def test_full_or_read_only_disk(evaluate, beir, tmp_path, say, how):
    disk = tmp_path / "vectors"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=30k", "none", disk], capture_output=True).returncode:
        pytest.skip("this machine does not let a test mount a disk")
    flags = ["--beir", beir, "--export_vectors", disk]
    try:
        if how == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(script.UserError, match=f"^--export_vectors {disk}: .*folder[^\n]*$"):
            evaluate(*flags)
        assert not (disk / "_vectors.json").exists()
        if how == "full":
            subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
            evaluate(*flags)
            assert len(pq.read_table(disk)) == 293
        say("a full or read-only disk under an export", 1, "one line; with room, it goes on behind the whole shards")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
