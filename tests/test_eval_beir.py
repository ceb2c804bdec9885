"""--eval_beir: the trainers' measures on small collections equal those of eval_incremental.py for the saved models."""

import shutil
from pathlib import Path

import pytest
from conftest import launch, metrics, train, write_beir, write_jsonl

import train_bi_encoder as script

NAMES = {"nDCG@10": "ndcg@10", "RR@10": "mrr@10", "Success@1": "accuracy@1", "R@10": "recall@10"}


def write_functions(folder, rows):
    """Write a BEIR folder of 60 functions, every other with a title, and 24 queries. The ids "NA" and "null" must be
    read as texts; a judged document is not in the corpus, and a query not among the queries."""
    ids = [f"{i:04}" for i in range(59)] + ["NA"]
    titles = [row["docstring"][:20] * (i % 2) for i, row in enumerate(rows)]
    records = [{"_id": name, "title": title, "text": row["code"][:300]} for name, title, row in zip(ids, titles, rows)]
    queries = {f"{i:03}": row["docstring"][:200] for i, row in enumerate(rows[:22])}
    queries |= {"005": rows[5]["code"][:300], "null": rows[59]["docstring"]}
    qrels = [(f"{i:03}", ids[i + more], grade) for i in range(20) for more, grade in ((0, 1), (3 + i, 1), (30, 0))]
    qrels += [("020", "0030", 1), ("021", "0021", 1), ("021", "9999", 1), ("null", "NA", 1), ("none", "0001", 1)]
    for split, kept in (("test", qrels), ("dev", qrels[::2])):
        write_beir(folder, records, queries, kept, split)


@pytest.fixture(scope="module")
def collections(tmp_path_factory, rows):
    """Two BEIR folders, one and two."""
    folder = tmp_path_factory.mktemp("beir")
    for name, first in (("one", 0), ("two", 100)):
        write_functions(folder / name, rows[first : first + 60])
    return folder / "one", folder / "two"


def flags_for(corpus, model, output, *more):
    return ["--train_data", f"{corpus}/*.parquet", "--columns", "docstring", "code", "--model_name_or_path", model,
            "--max_steps", 3, "--batch_size", 16, "--eval_steps", 3, "--learning_rate", 1e-3, "--max_length", 64,
            "--output_dir", output, *more]  # fmt: skip


def measured(line, prefix):
    """Return {name in eval_incremental.py: value} of a record of metrics.jsonl."""
    return {name: line[prefix + measure] for name, measure in NAMES.items() if prefix + measure in line}


def means(result):
    return {name: value["mean"] for name, value in result["metrics"].items()}


def test_measures_equal_those_of_the_evaluator(evaluate, collections, corpus, bert, tmp_path):
    """Prompts are applied; the trainer's processes share the encoding."""
    more = ["--eval_rows", 0, "--eval_beir", *collections, "--query_prompt", "find: "]
    more += ["--document_prompt", "code of a function: "]
    run = flags_for(corpus, bert, tmp_path / "run", *more)
    launch(Path(script.__file__), *run, processes=2)
    first, *_, line = metrics(tmp_path / "run")
    assert line["step"] == 3 and not any(name.startswith("held_out") for name in line)
    parts = [measured(line, f"{name}_cosine_") for name in ("one", "two")]
    assert all(part.keys() == NAMES.keys() for part in parts) and measured(first, "one_cosine_") != parts[0]
    flags = ["--model_name_or_path", tmp_path / "run/model", "--cache_dtype", "float32", "--metrics", *NAMES]
    flags += ["--beir", *collections]
    found = evaluate(*flags)["models"]
    assert [means(result) for result in found] == [pytest.approx(part, abs=1e-6) for part in parts]
    assert 0 < found[0]["metrics"]["nDCG@10"]["mean"] != found[1]["metrics"]["nDCG@10"]["mean"]
    without = evaluate(*flags, "--query_prompt", "", "--document_prompt", "", output="without_prompts")["models"]
    assert [means(result) for result in without] != [pytest.approx(part, abs=1e-6) for part in parts]


def test_collections_of_the_same_name(collections, corpus, bert, tmp_path):
    """Refused, as their measures would be one; also one that has the name of the held-out rows."""
    folders = [tmp_path / "a/held_out", tmp_path / "b/same", tmp_path / "c/same"]
    for folder in folders:
        folder.parent.mkdir()
        folder.symlink_to(collections[0])
    for number, (more, refused) in enumerate(((folders[:1], folders[0]), (folders[1:], folders[2]))):
        flags = flags_for(corpus, bert, tmp_path / f"{number}", "--eval_rows", 10, "--eval_beir", *more)
        expected = f"^--eval_beir {refused} .*: another collection has the same name$"
        with pytest.raises(script.UserError, match=expected):
            train("train_bi_encoder", *flags)


@pytest.mark.parametrize("line", ["001\t0030\t2\n", "0005\t0006\t1\n"])
def test_collections_that_only_the_evaluator_measures(line, collections, tmp_path):
    """With grades, or with a query that has the id of a document, which BEIR leaves out: refused in one line."""
    folder = shutil.copytree(collections[0], tmp_path / "one")
    with open(folder / "queries.jsonl", "a") as file:
        file.write('{"_id": "0005", "text": "a query"}\n')
    with open(folder / "qrels/test.tsv", "a") as file:
        file.write(line)
    with pytest.raises(script.UserError, match="^has grades, or documents with ids of queries$"):
        script.read_beir(str(folder), "test")


def test_ids_of_collections_are_texts(collections, tmp_path):
    """Whole numbers in JSON are the ids that judgments write; of other queries no measure would be defined."""
    folder = shutil.copytree(collections[0], tmp_path / "numbers")
    write_jsonl(folder / "corpus.jsonl", [{"_id": i, "title": "", "text": f"text {i}"} for i in (16, 17)])
    write_jsonl(folder / "queries.jsonl", [{"_id": 1, "text": "a query"}, {"_id": 2, "text": "another"}])
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n1\t16\t1\n2\t0017\t1\n")
    _, documents, relevant = script.read_beir(str(folder), "test")
    assert relevant == {"1": {"16"}, "2": {"0017"}} and list(documents) == ["16", "17"]
    (folder / "qrels/dev.tsv").write_text("query-id\tcorpus-id\tscore\nother\tx\t1\n")
    with pytest.raises(script.UserError, match="no judgment of split 'dev' has a query of queries.jsonl"):
        script.read_beir(str(folder), "dev")


def test_a_missing_collection(collections, corpus, bert, tmp_path):
    for split, collection in (("train", collections[0]), ("test", Path("nowhere/at/all"))):
        more = ["--eval_beir", collection, "--eval_split", split]
        with pytest.raises(script.UserError) as error:
            train("train_bi_encoder", *flags_for(corpus, bert, tmp_path / split, *more))
        assert str(error.value).startswith(f"--eval_beir {collection} ") and "\n" not in str(error.value)
