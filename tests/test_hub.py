"""Collections by their Hub ids, in each layout, through the real client, from a Hub on loopback."""

import json
import os
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, TRAINERS, metrics, write_jsonl
from hub import serve

NANO = {"NanoArguAna": 20, "NanoMSMARCO": 12, "NanoNQ": 8}  # {split: queries}
NANO_ID = "sentence-transformers/NanoBEIR-en"
LIST = "no judgments of split 'dev'; available: "
# (Hub id, --split, {collection: queries} or the error)
CASES = [
    ("BeIR/scifact", None, {"scifact": 4}),
    ("BeIR/scifact", "train", {"scifact": 3}),
    ("BeIR/scifact", "dev", LIST + "train, test"),
    ("zeta-alpha-ai/NanoX", None, {"NanoX": 5}),
    ("zeta-alpha-ai/NanoX", "dev", LIST + "train"),
    (NANO_ID, None, NANO),
    (NANO_ID, "NanoMSMARCO", {"NanoMSMARCO": 12}),
    (NANO_ID, "dev", LIST + ", ".join(NANO)),
    ("mteb/scifact", None, {"scifact": 4}),
    ("mteb/scifact", "train", {"scifact": 3}),
    ("mteb/scifact", "dev", LIST + "train, test"),
    ("mteb/own-splits", None, {"test": 6}),
    ("mteb/own-splits", "dev", {"dev": 2}),
    ("nobody/nothing", None, "Dataset 'nobody/nothing' doesn't exist on the Hub or cannot be accessed."),
    ("nobody/texts", None, "neither a file corpus.jsonl nor configurations corpus and queries, but default; "
                           "nobody/texts:fr stands for fr-corpus and fr-queries"),
]  # fmt: skip


def write_readme(folder, configs):
    """Write a README.md that declares {configuration: {split: pattern}}."""
    found = []
    for config, splits in configs.items():
        files = [{"split": split, "path": path} for split, path in splits.items()]
        found.append({"config_name": config, "data_files": files})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(found)}\n---\n")


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def make_rows(queries, first=0):
    """Return rows of 30 documents, of queries and of judgments; the ids look like numbers with zeros in front."""
    documents = [{"_id": f"{i:04}", "title": f"title {i}", "text": f"text {i}"} for i in range(first, first + 30)]
    numbers = range(first, first + queries)
    judgments = [{"query-id": f"0{i:03}", "corpus-id": f"{i + 1:04}", "score": 2} for i in numbers]
    return documents, [{"_id": f"0{i:03}", "text": f"query {i}"} for i in numbers], judgments


def without_grades(rows):
    return [{name: row[name] for name in ("query-id", "corpus-id")} for row in rows]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Return the endpoint of a Hub with one repository of each layout."""
    root = tmp_path_factory.mktemp("hub")
    documents, queries, judgments = make_rows(7)

    folder = root / "BeIR/scifact"
    write_parquet(folder / "corpus/0.parquet", documents)
    write_parquet(folder / "queries/0.parquet", queries)
    write_readme(folder, {"corpus": {"corpus": "corpus/*"}, "queries": {"queries": "queries/*"}})
    folder = root / "BeIR/scifact-qrels"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    for split, rows in (("train", judgments[:3]), ("test", judgments[3:])):
        lines = ["\t".join(map(str, row.values())) for row in rows]
        (folder / f"{split}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]))

    folder = root / "mteb/scifact"
    write_jsonl(folder / "corpus.jsonl", documents)
    write_jsonl(folder / "queries.jsonl", queries)
    write_jsonl(folder / "qrels/train.jsonl", judgments[:3])
    write_jsonl(folder / "qrels/test.jsonl", judgments[3:])
    splits = {split: f"qrels/{split}.jsonl" for split in ("train", "test")}
    configs = {"corpus": {"corpus": "corpus.jsonl"}, "queries": {"queries": "queries.jsonl"}}
    write_readme(folder, {"default": splits} | configs)

    # each split has its own documents and queries
    collections = {"zeta-alpha-ai/NanoX": {"train": 5}, NANO_ID: NANO, "mteb/own-splits": {"dev": 2, "test": 6}}
    for name, splits in collections.items():
        for number, (split, count) in enumerate(splits.items()):
            documents, queries, judgments = make_rows(count, 100 * number)
            parts = {"corpus": documents, "queries": queries, "qrels": without_grades(judgments)}
            if splits is NANO:
                ranked = [row["_id"] for row in documents[::-1]]
                parts["bm25"] = [{"query-id": row["_id"], "corpus-ids": ranked} for row in queries]
            for config, rows in parts.items():
                write_parquet(root / name / config / f"{split}-0.parquet", rows)
        write_readme(root / name, {config: {split: f"{config}/{split}-*" for split in splits} for config in parts})

    write_jsonl(root / "nobody/texts/data.jsonl", documents)
    (root / "nobody/texts/README.md").write_text("")
    return serve(root)


def run_online(hub, tmp_path, *command):
    """Run a Python command with the Hub; return its output."""
    environment = os.environ | {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    # `datasets` also asks a host datasets-server.127.0.0.1: through this proxy, not a name server, which may be slow
    environment |= {"http_proxy": hub, "no_proxy": "127.0.0.1"}
    environment.pop("HF_DATASETS_CACHE", None)
    command = [sys.executable, *map(str, command)]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def ran(hub, rows, reranker, tmp_path_factory):
    """Return the folder and the lines of hub_worker.py, which reads all cases, then trains."""
    folder = tmp_path_factory.mktemp("ran")
    write_jsonl(folder / "rows.jsonl", rows[:40])
    flags = ["--train_data", "rows.jsonl", "--columns", "docstring", "code", "--model_name_or_path", reranker,
             "--eval_beir", NANO_ID, "--eval_rows", 0, "--max_steps", 1, "--batch_size", 4, "--num_negatives", 1,
             "--max_length", 32, "--output_dir", "out"]  # fmt: skip
    cases = json.dumps([case[:2] for case in CASES])
    return folder, run_online(hub, folder, ROOT / "tests/hub_worker.py", cases, *flags).splitlines()


@pytest.mark.slow
def test_collections_of_each_layout(ran):
    """Ids stay texts, and no split is chosen silently. The trainers read the layout of NanoBEIR, and name the script
    that reads others."""
    for (name, split, expected), line in zip(CASES, ran[1]):
        found, *of_trainers = json.loads(line)
        for trainer, prefix, suffix, answer in zip(TRAINERS, ("cosine_", ""), ("", "_R50"), of_trainers):
            if "NanoBEIR" not in name:
                start = f"--eval_beir {name} (leave it out, and after training python eval_incremental.py --"
                assert answer.startswith(start) and "\n" not in answer, (name, trainer, answer)
                continue
            ((measure, parts),) = answer.items()
            assert measure == f"NanoBEIR{suffix}_mean_{prefix}ndcg@10"
            assert {key.removesuffix(suffix): len(queries) for key, queries in parts.items()} == NANO
            for queries in parts.values():
                for text, texts in queries.items():
                    relevant = [f"text {int(text.split()[-1]) + 1}"]
                    if trainer == TRAINERS[0]:
                        assert texts == relevant
                    else:
                        assert texts[0] == relevant and len(texts[1]) == 30 and relevant[0] in texts[1]
        if isinstance(expected, str):
            assert found == expected, (name, split)
            continue
        assert {key: len(judgments) for key, (_, judgments, _) in found.items()} == expected, (name, split)
        for documents, judgments, (document, query) in found.values():
            first = int(document.split()[-1])
            assert documents == 30 and document == f"title {first} text {first}" and query.startswith("query ")
            for query, judged in judgments.items():
                grade = 2 if "scifact" in name else 1
                assert judged == {f"{int(query) + 1:04}": grade}


@pytest.mark.slow
def test_a_run_that_is_evaluated_on_the_hub(ran):
    """Each collection has its measures, and the mean is that of the library's evaluator, which is printed."""
    printed, mean = "\n".join(ran[1][len(CASES) :]), "NanoBEIR_R50_mean_ndcg@10"
    for line in metrics(ran[0] / "out"):
        values = [line[f"{collection}_R50_ndcg@10"] for collection in NANO]
        assert line[mean] == pytest.approx(sum(values) / 3) and max(values) > 0
        assert re.search(rf"step {line['step']}: .*'{mean}': {round(line[mean], 4)}}}", printed)
