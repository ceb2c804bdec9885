"""--eval_beir: the trainers' measures on small collections equal those of eval_incremental.py for the saved models,
and those of a naive loop over predict()."""

import importlib
import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TRAINERS, launch, metrics, write_jsonl
from sentence_transformers import CrossEncoder
from test_best_model import train

import train_bi_encoder
import train_cross_encoder

BI, CROSS = TRAINERS
NAMES = {"nDCG@10": "ndcg@10", "RR@10": "mrr@10", "Success@1": "accuracy@1", "R@10": "recall@10"}


def write_beir(folder, rows):
    """Write a BEIR folder of 60 functions, every other with a title, and 24 queries. The ids "NA" and "null" must be
    read as texts; a judged document is not in the corpus, and a query not among the queries."""
    ids = [f"{i:04}" for i in range(59)] + ["NA"]
    titles = [row["docstring"][:20] * (i % 2) for i, row in enumerate(rows)]
    records = [{"_id": name, "title": title, "text": row["code"][:300]} for name, title, row in zip(ids, titles, rows)]
    write_jsonl(folder / "corpus.jsonl", records)
    queries = {f"{i:03}": row["docstring"][:200] for i, row in enumerate(rows[:22])}
    queries |= {"005": rows[5]["code"][:300], "null": rows[59]["docstring"]}
    write_jsonl(folder / "queries.jsonl", [{"_id": name, "text": text} for name, text in queries.items()])
    qrels = [(f"{i:03}", ids[i + more], grade) for i in range(20) for more, grade in ((0, 1), (3 + i, 1), (30, 0))]
    qrels += [("020", "0030", 1), ("021", "0021", 1), ("021", "9999", 1), ("null", "NA", 1), ("none", "0001", 1)]
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
        for query in [*(f"{i:03}" for i in range(21)), "null", "unjudged"]:  # 021 has no line
            documents = rng.sample(ids, depth)
            right = f"0{query}"
            if query.isdigit() and right not in documents:
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


def measured(line, prefix):
    """Return {name in eval_incremental.py: value} of a record of metrics.jsonl."""
    return {name: line[prefix + measure] for name, measure in NAMES.items() if prefix + measure in line}


def means(result):
    return {name: value["mean"] for name, value in result["metrics"].items()}


def read_beir(folder, split):
    """Return ({query: text}, {document: text}, {query: relevant documents}) of a BEIR folder."""
    texts = []
    for name in ("queries", "corpus"):
        records = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
        texts.append({row["_id"]: f"{row.get('title', '')} {row['text']}".strip() for row in records})
    relevant = {}
    for line in (folder / f"qrels/{split}.tsv").read_text().splitlines()[1:]:
        query, document, grade = line.split("\t")
        if grade != "0" and query in texts[0]:
            relevant.setdefault(query, set()).add(document)
    return *texts, relevant


def rerank(folder, split, candidates, model, prompt=""):
    """Return {name: mean} of reranking {query: documents} by predict(), of a naive loop. nDCG@10 is that of the
    library, whose ideal has the relevant documents among the candidates; RR@10 does not depend on that."""
    queries, documents, relevant = read_beir(folder, split)
    predict = CrossEncoder(str(model), device="cpu", activation_fn=torch.nn.Identity()).predict
    found = {"nDCG@10": [], "RR@10": []}
    for query, positives in relevant.items():
        names = candidates.get(query, [])
        scores = predict([(queries[query], documents[name]) for name in names], prompt=prompt) if names else []
        ranked = [names[place] in positives for place in np.argsort(-np.array(scores), kind="stable")]
        gain = sum(hit / math.log2(2 + rank) for rank, hit in enumerate(ranked[:10]))
        ideal = sum(1 / math.log2(2 + rank) for rank in range(min(10, sum(ranked))))
        found["nDCG@10"].append(gain / ideal if ideal else 0.0)
        found["RR@10"].append(next((1 / (1 + rank) for rank, hit in enumerate(ranked[:10]) if hit), 0.0))
    return {name: float(np.mean(values)) for name, values in found.items()}


def read_candidates(run, depth):
    """Return {query: its `depth` best documents} of a run file, of which each counts once."""
    found = {}
    for line in run.read_text().splitlines():
        query, _, document, _, score, _ = line.split()
        found.setdefault(query, {})
        found[query][document] = max(float(score), found[query].get(document, -math.inf))
    return {query: sorted(scores, key=scores.get, reverse=True)[:depth] for query, scores in found.items()}


def test_bi_encoder(evaluate, collections, corpus, bert, tmp_path):
    """Prompts are applied."""
    folders = [folder for folder, _ in collections]
    more = ["--eval_rows", 50, "--eval_beir", *folders, "--query_prompt", "find: "]
    more += ["--document_prompt", "code of a function: "]
    train(BI, *flags_for(BI, corpus, bert, None, tmp_path / "run", *more))
    line = metrics(tmp_path / "run")[-1]
    parts = [measured(line, f"{name}_cosine_") for name in ("held_out", "one", "two")]
    assert line["step"] == 3 and all(part.keys() == NAMES.keys() for part in parts)
    flags = ["--model_name_or_path", tmp_path / "run/model", "--cache_dtype", "float32", "--metrics", *NAMES]
    found = evaluate("--beir", *folders, *flags)["models"]
    assert [means(result) for result in found] == [pytest.approx(part, abs=1e-6) for part in parts[1:]]
    assert 0 < found[0]["metrics"]["nDCG@10"]["mean"] != found[1]["metrics"]["nDCG@10"]["mean"]
    without_prompts = evaluate(
        "--beir", *folders, *flags, "--query_prompt", "", "--document_prompt", "", output="without_prompts"
    )["models"]
    assert [means(result) for result in without_prompts] != [pytest.approx(part, abs=1e-6) for part in parts[1:]]


def test_a_cross_encoder_refuses_a_folder(collections, corpus, reranker, tmp_path):
    """It reranks collections in the layout of NanoBEIR, which list candidates: tests/test_hub.py."""
    folder, _ = collections[0]
    flags = flags_for(CROSS, corpus, None, reranker, tmp_path / "run", "--eval_beir", folder)
    with pytest.raises(
        train_cross_encoder.UserError, match=f"^--eval_beir {folder} .*: is a BEIR folder: rerank it after"
    ):
        train(CROSS, *flags)


@pytest.mark.parametrize("name", [BI])
def test_two_processes_without_held_out_rows(evaluate, collections, corpus, bert, reranker, tmp_path, name):
    """The cross-encoder reranks the documents of BM25."""
    folder, model = collections[0][0], tmp_path / "run/model"
    more = ["--eval_rows", 0, "--eval_beir", folder, "--eval_split", "dev"]
    prompt = "return the value of: "  # not for BM25
    more += ["--eval_rerank_k", 11, "--query_prompt", prompt] * (name == CROSS)
    launch(ROOT / f"{name}.py", *flags_for(name, corpus, bert, reranker, tmp_path / "run", *more), processes=2)
    prefix = "one_cosine_" if name == BI else "one_"
    first, last = (line for line in metrics(tmp_path / "run") if f"{prefix}ndcg@10" in line)
    assert not any(name.startswith("held_out") for name in last)
    beir = ["--beir", folder, "--split", "dev", "--metrics", *NAMES]
    if name == BI:
        expected = means(evaluate(*beir, "--model_name_or_path", model, "--cache_dtype", "float32"))
    else:
        evaluate(*beir, "--bm25")
        expected = rerank(folder, "dev", read_candidates(tmp_path / "out/BM25/run.trec", 11), model, prompt)
    assert measured(last, prefix) == pytest.approx(expected, abs=1e-6)
    assert measured(first, prefix) != measured(last, prefix)


@pytest.mark.parametrize("name", [BI])
def test_collections_of_the_same_name(name, collections, corpus, bert, reranker, tmp_path):
    """Refused, as their measures would be one; also one that has the name of the held-out rows."""
    folders = [tmp_path / "a/held_out", tmp_path / "b/same", tmp_path / "c/same"]
    for folder in folders:
        folder.parent.mkdir()
        folder.symlink_to(collections[0][0])
    script = importlib.import_module(name)
    for number, (more, refused) in enumerate(((folders[:1], folders[0]), (folders[1:], folders[2]))):
        flags = flags_for(
            name, corpus, bert, reranker, tmp_path / f"{number}", "--eval_rows", 10, "--eval_beir", *more
        )
        with pytest.raises(
            script.UserError, match=f"^--eval_beir {refused} .*: another collection has the same name$"
        ):
            train(name, *flags)


@pytest.mark.parametrize("name", [BI])
@pytest.mark.parametrize("line", ["001\t0030\t2\n", "0005\t0006\t1\n"])
def test_collections_that_only_the_evaluator_measures(line, name, collections, tmp_path):
    """With grades, or with a query that has the id of a document, which BEIR leaves out: refused in one line."""
    folder = shutil.copytree(collections[0][0], tmp_path / "one")
    with open(folder / "queries.jsonl", "a") as file:
        file.write('{"_id": "0005", "text": "a query"}\n')
    with open(folder / "qrels/test.tsv", "a") as file:
        file.write(line)
    script = importlib.import_module(name)
    with pytest.raises(script.UserError) as error, script.user_errors(f"--eval_beir {folder}", KeyError):
        script.open_beir(str(folder), *(["test"] if name == BI else [collections[0][1], script.Args()]))
    assert "has grades, or documents with ids of queries: evaluate it after training" in str(error.value)


def test_a_resume_on_other_judgments_is_refused(collections, corpus, bert, tmp_path):
    """Its measures would not compare with those before, and choose another best checkpoint."""
    shutil.copytree(collections[0][0], tmp_path / "x")
    script = train_bi_encoder
    flags = flags_for(BI, corpus, bert, None, tmp_path / "out", "--eval_beir", tmp_path / "x", "--eval_rows", 0)
    script.main(script.parse_args(list(map(str, flags))))
    path = tmp_path / "x/qrels/test.tsv"
    path.write_text(path.read_text().replace("\t1\n", "\t0\n", 1))
    with pytest.raises(script.UserError, match=f"^--resume: {tmp_path}/x: "):
        script.main(script.parse_args([*map(str, flags), "--resume"]))


def test_ids_of_collections_are_texts(collections, tmp_path, capsys):
    """Whole numbers in JSON are the ids that judgments write; dates are refused, and documents that lack are said."""
    folder = shutil.copytree(collections[0][0], tmp_path / "numbers")
    write_jsonl(folder / "corpus.jsonl", [{"_id": number, "text": f"text {number}"} for number in (16, 17)])
    write_jsonl(folder / "queries.jsonl", [{"_id": 1, "text": "a query"}, {"_id": 2, "text": "another"}])
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n1\t16\t1\n2\t0017\t1\n")
    evaluator = train_bi_encoder.open_beir(str(folder), "test")
    assert evaluator.relevant_docs == {"1": {"16"}, "2": {"0017"}} and evaluator.corpus_ids == ["16", "17"]
    said = "numbers: 1 relevant documents, such as '0017', are not in corpus.jsonl"
    assert said in capsys.readouterr().err
    write_jsonl(folder / "corpus.jsonl", [{"_id": "2020-01-01", "text": "a text"}])
    with pytest.raises(train_bi_encoder.UserError, match="column '_id' has texts like 2020-01-01"):
        train_bi_encoder.open_beir(str(folder), "test")


@pytest.mark.parametrize("name", [BI])
def test_judgments_of_other_queries(name, collections, tmp_path):
    """Of none of these would the measures be defined."""
    folder = shutil.copytree(collections[0][0], tmp_path / "one")
    (folder / "qrels/dev.tsv").write_text("query-id\tcorpus-id\tscore\nother\tx\t1\n")
    script = importlib.import_module(name)
    with pytest.raises(script.UserError, match="no judgment of split 'dev' has a query of queries.jsonl"):
        script.open_beir(str(folder), *(["dev"] if name == BI else [None, script.Args(eval_split="dev")]))


@pytest.mark.parametrize("name", [BI])
def test_a_missing_collection(name, collections, corpus, bert, reranker, tmp_path):
    script, (folder, run) = importlib.import_module(name), collections[0]
    for split, collection in (("train", folder), ("test", Path("nowhere/at/all"))):
        more = ["--eval_beir", collection, "--eval_split", split, *["--eval_run", run] * (collection == folder)]
        more = more[: 4 if name == BI else None]
        with pytest.raises(script.UserError) as error:
            train(name, *flags_for(name, corpus, bert, reranker, tmp_path / split, *more))
        assert str(error.value).startswith(f"--eval_beir {collection} ") and "\n" not in str(error.value)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_names_of_measures_tell_the_similarity(similarity, evaluate, collections, corpus, bert, tmp_path):
    config = shutil.copytree(bert, tmp_path / "model") / "config_sentence_transformers.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"similarity_fn_name": similarity}))
    more = ["--eval_rows", 20, "--eval_beir", collections[0][0], "--max_steps", 1]
    train(BI, *flags_for(BI, corpus, tmp_path / "model", None, tmp_path / "run", *more))
    shown = [f"{name}_{similarity}_ndcg@10" for name in ("held_out", "one")]
    assert set(shown) < metrics(tmp_path / "run")[0].keys()
    assert train_bi_encoder.SentenceTransformer(str(tmp_path / "run/model")).similarity_fn_name == similarity
