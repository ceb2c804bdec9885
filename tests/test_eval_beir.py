"""--eval_beir: the trainers' measures on small collections equal those of eval_incremental.py for the saved models."""

import importlib
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TRAINERS, launch, metrics, write_jsonl
from test_best_model import train

import train_cross_encoder

NAMES = ["nDCG@10", "RR@10", "Success@1"]  # the cross-encoder measures the first two
BI, CROSS = TRAINERS


def write_beir(folder, rows):
    """Write a BEIR folder of 60 functions, every other with a title, and 24 queries, one with the id of a document.
    The ids "NA" and "null" must be read as texts."""
    ids = [f"{i:04}" for i in range(59)] + ["NA"]
    titles = [row["docstring"][:20] * (i % 2) for i, row in enumerate(rows)]
    records = [{"_id": name, "title": title, "text": row["code"][:300]} for name, title, row in zip(ids, titles, rows)]
    write_jsonl(folder / "corpus.jsonl", records)
    queries = {f"{i:03}": row["docstring"][:200] for i, row in enumerate(rows[:22])}
    queries |= {"0005": rows[5]["code"][:300], "null": rows[59]["docstring"]}
    write_jsonl(folder / "queries.jsonl", [{"_id": name, "text": text} for name, text in queries.items()])
    qrels = [(f"{i:03}", ids[i + more], grade) for i in range(20) for more, grade in ((0, 2), (3 + i, 1), (30, 0))]
    qrels += [("020", "0030", 0), ("021", "0021", 1), ("0005", "0006", 1), ("021", "9999", 2), ("null", "NA", 1)]
    (folder / "qrels").mkdir()
    for split, kept in (("test", qrels), ("dev", qrels[::2])):
        lines = [f"{query}\t{document}\t{grade}\n" for query, document, grade in kept]
        (folder / f"qrels/{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))


@pytest.fixture(scope="module")
def collections(tmp_path_factory, rows):
    """[(BEIR folder, run file)]; in the second run, queries have fewer documents than are reranked. A document is
    listed twice for most queries."""
    folder, rng, found = tmp_path_factory.mktemp("beir"), random.Random(0), []
    for name, first, depth in (("one", 0, 15), ("two", 100, 5)):
        write_beir(folder / name, rows[first : first + 60])
        ids = [f"{i:04}" for i in range(59)] + ["NA"]
        lines = []
        for query in [*(f"{i:03}" for i in range(21)), "0005", "null", "unjudged"]:  # 021 has no line
            documents = ["0005"] * (query == "0005") + rng.sample([name for name in ids if name != "0005"], depth)
            right = f"0{query}"
            if len(query) == 3 and query.isdigit() and right not in documents:
                documents[int(query) % depth] = right
            documents += documents[int(query) % depth :][:1] if query.isdigit() else []  # counts once
            lines += [f"{query} Q0 {document} 1 {-place / 4} tag\n" for place, document in enumerate(documents)]
        rng.shuffle(lines)
        (folder / f"{name}.trec").write_text("".join(lines))
        found.append((folder / name, folder / f"{name}.trec"))
    return found


def flags_for(name, corpus, bert, reranker, output, *more):
    model, more = (bert, more) if name == BI else (reranker, ["--num_negatives", 2, *more])
    return ["--train_data", corpus, "--model_name_or_path", model, "--max_steps", 3, "--batch_size", 16,
            "--eval_steps", 3, "--learning_rate", 1e-3, "--max_length", 64, "--output_dir", output, *more]  # fmt: skip


def measured(line, prefix=""):
    return {name: line[prefix + name] for name in NAMES if prefix + name in line}


def means(result):
    return {name: value["mean"] for name, value in result["metrics"].items()}


def average(parts):
    return {name: np.mean([part[name] for part in parts]) for name in parts[0]}


def test_bi_encoder(evaluate, collections, corpus, bert, tmp_path):
    """The mean is over held-out rows and all collections; prompts are applied."""
    folders = [folder for folder, _ in collections]
    more = ["--eval_rows", 50, "--eval_beir", *folders, "--query_prompt", "find: "]
    more += ["--document_prompt", "code of a function: "]
    train(BI, *flags_for(BI, corpus, bert, None, tmp_path / "run", *more))
    line = metrics(tmp_path / "run")[-1]
    parts = [measured(line, f"{name} ") for name in ("held_out", "one", "two")]
    assert line["step"] == 3 and measured(line) == pytest.approx(average(parts)) and len(parts[0]) == 3
    flags = ["--model_name_or_path", tmp_path / "run/model", "--cache_dtype", "float32", "--metrics", *NAMES]
    found = evaluate("--beir", *folders, *flags)["models"]
    assert [means(result) for result in found] == [pytest.approx(part, abs=1e-6) for part in parts[1:]]
    assert 0 < found[0]["metrics"]["nDCG@10"]["mean"] != found[1]["metrics"]["nDCG@10"]["mean"]
    assert [result["same_id_left_out"] for result in found] == [1, 1]
    without_prompts = evaluate("--beir", *folders, *flags, "--prompts", "", output="without_prompts")["models"]
    assert [means(result) for result in without_prompts] != [pytest.approx(part, abs=1e-6) for part in parts[1:]]


def test_cross_encoder(evaluate, collections, corpus, reranker, tmp_path):
    """Run files provide the candidates; relevant documents that they lack count as not found."""
    folders, runs = zip(*collections)
    more = ["--eval_rows", 10, "--eval_beir", *folders, "--eval_run", *runs, "--eval_rerank_k", 12]
    train(CROSS, *flags_for(CROSS, corpus, None, reranker, tmp_path / "run", *more))
    line = metrics(tmp_path / "run")[-1]
    parts = [measured(line, f"{name} ") for name in ("held_out", "one", "two")]
    assert line["step"] == 3 and measured(line) == pytest.approx(average(parts)) and len(parts[0]) == 2
    for part, (folder, run) in zip(parts[1:], collections):
        flags = ["--run", run, "--cross_encoder", tmp_path / "run/model", "--rerank_k", 12, "--metrics", *NAMES]
        before, found = map(means, evaluate("--beir", folder, *flags)["models"])
        assert part == pytest.approx({name: found[name] for name in part}, abs=1e-6) and part["nDCG@10"] > 0.05
        assert part != pytest.approx({name: before[name] for name in part}, abs=1e-3)


@pytest.mark.parametrize("name", TRAINERS)
def test_keep_same_id(evaluate, collections, corpus, bert, reranker, tmp_path, name):
    """As in the evaluator: query 0005 also finds document 0005, which is judged relevant."""
    folder = tmp_path / "one"
    shutil.copytree(collections[0][0], folder)
    run = collections[0][1]
    with open(folder / "qrels/test.tsv", "a") as file:
        file.write("0005\t0005\t1\n")
    found = []
    for keep in ([], ["--keep_same_id"]):
        output = tmp_path / f"run{len(keep)}"
        more = ["--eval_rows", 0, "--eval_beir", folder, *keep]
        flags = ["--model_name_or_path", output / "model"]
        if name == CROSS:
            more += ["--eval_run", run, "--eval_rerank_k", 12]
            flags = ["--run", run, "--cross_encoder", output / "model", "--rerank_k", 12]
        train(name, *flags_for(name, corpus, bert, reranker, output, *more))
        flags += ["--beir", folder, "--metrics", *NAMES, "--cache_dtype", "float32", *keep]
        expected = evaluate(*flags)
        expected = means(expected["models"][1] if name == CROSS else expected)
        found.append(measured(metrics(output)[-1]))
        assert found[-1] == pytest.approx({key: expected[key] for key in found[-1]}, abs=1e-6)
    assert found[0] != found[1]


@pytest.mark.parametrize("name", TRAINERS)
def test_two_processes_without_held_out_rows(evaluate, collections, corpus, bert, reranker, tmp_path, name):
    """With one collection, only the mean is reported; the cross-encoder reranks the documents of BM25."""
    beir, model = ["--beir", collections[0][0], "--split", "dev"], tmp_path / "run/model"
    more = ["--eval_rows", 0, "--eval_beir", collections[0][0], "--eval_split", "dev"]
    more += ["--eval_rerank_k", 11, "--query_prompt", "return the value of: "] * (name == CROSS)  # not for BM25
    launch(ROOT / f"{name}.py", *flags_for(name, corpus, bert, reranker, tmp_path / "run", *more), processes=2)
    first, last = (line for line in metrics(tmp_path / "run") if "nDCG@10" in line)
    assert not any(name.startswith("one ") for name in last)
    flags = ["--model_name_or_path", model, "--cache_dtype", "float32"]
    if name == CROSS:
        evaluate(*beir, "--bm25")
        flags = ["--run", tmp_path / "out/BM25/run.trec", "--cross_encoder", model, "--rerank_k", 11]
    found = evaluate(*beir, *flags, "--metrics", *NAMES, output="again")
    found = means(found["models"][1] if name == CROSS else found)
    assert measured(last) == pytest.approx({name: found[name] for name in measured(last)}, abs=1e-6)
    assert measured(first) != measured(last)
    assert f"'RR@10': {last['RR@10']}" in (model / "README.md").read_text()


@pytest.mark.parametrize("name", TRAINERS)
def test_collections_of_the_same_name(name, collections, corpus, bert, reranker, tmp_path):
    """Their measures are kept apart, also from those of the held-out rows."""
    folders = [tmp_path / "a/held_out", tmp_path / "b/same", tmp_path / "c/same"]
    for folder in folders:
        folder.parent.mkdir()
        folder.symlink_to(collections[0][0])
    more = ["--eval_rows", 10, "--max_steps", 1, "--eval_beir", *folders]
    train(name, *flags_for(name, corpus, bert, reranker, tmp_path / "run", *more))
    found = [key for key in metrics(tmp_path / "run")[0] if key.endswith(" RR@10")]
    assert found == [f"{place} RR@10" for place in ["held_out", folders[0], "same", folders[2]]]


def test_run_files_that_do_not_fit(collections, corpus, reranker, tmp_path):
    (folder, _), other = collections[0], tmp_path / "other.trec"
    other.write_text("q7 Q0 d7 1 2.5 tag\n")
    for path in (other, tmp_path / "none.trec"):
        more = ["--eval_rows", 0, "--eval_beir", folder, "--eval_run", path]
        with pytest.raises(train_cross_encoder.UserError, match=f"--eval_run {path}: ") as error:
            train(CROSS, *flags_for(CROSS, corpus, None, reranker, tmp_path / path.stem, *more))
        assert "\n" not in str(error.value)
    more = ["--eval_beir", folder, collections[1][0], "--eval_run", collections[0][1]]
    with pytest.raises(
        train_cross_encoder.UserError, match="--eval_run requires one run file for each of .*one, .*two"
    ):
        train(CROSS, *flags_for(CROSS, corpus, None, reranker, tmp_path / "run", *more))
    more = ["--eval_run", collections[0][1]]
    with pytest.raises(
        train_cross_encoder.UserError, match="--eval_run requires one run file for each of --eval_beir"
    ):
        train(CROSS, *flags_for(CROSS, corpus, None, reranker, tmp_path / "alone", *more))


@pytest.mark.parametrize("name", TRAINERS)
def test_a_missing_collection(name, collections):
    script, (folder, _) = importlib.import_module(name), collections[0]
    for split, collection in (("train", folder), ("test", Path("nowhere/at/all"))):
        with pytest.raises(script.UserError) as error, script.user_errors(f"--eval_beir {collection}"):
            script.collections_of(str(collection), split)
        assert str(error.value).startswith(f"--eval_beir {collection}: ") and "\n" not in str(error.value)
