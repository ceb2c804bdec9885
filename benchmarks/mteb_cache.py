"""Embedding caches in mteb when a model has changed: docs/recipes/mteb.md against mteb's CachedEmbeddingWrapper.

    pip install --no-deps --target MTEB_FOLDER mteb==2.26.24 polars==2.1.0 polars-runtime-32==2.1.0
    PYTHONPATH=MTEB_FOLDER python benchmarks/mteb_cache.py MODEL_FOLDER BEIR_FOLDER

A copy of the model is evaluated on 300 test queries and 300 documents, cut to 200 characters: by sentence-transformers
without a cache, and twice by each cache. Then noise is added to its matrices in the same folder, as training would
change them, and each side evaluates it again. Seconds are with loading the model. Writes mteb_cache.json.
"""

import argparse
import csv
import json
import re
import runpy
import shutil
import sys
import tempfile
import time
from pathlib import Path

try:
    import mteb
except ModuleNotFoundError:
    sys.exit(__doc__)
import torch
from datasets import Dataset
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.models.cache_wrappers import CachedEmbeddingWrapper
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

ROOT = Path(__file__).parents[1]
SIZE, CHARACTERS = 300, 200


def read_collection(folder):
    """Return (documents, queries, {query: {document: grade}}): the relevant documents first, SIZE of each."""
    judgments = {}
    with open(folder / "qrels/test.tsv", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            judgments.setdefault(row["query-id"], {})[row["corpus-id"]] = int(row["score"])
    judgments = dict(list(judgments.items())[:SIZE])
    relevant = {document for judged in judgments.values() for document in judged}
    parts = []
    for name, wanted in (("corpus", relevant), ("queries", set(judgments))):
        records = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
        records = sorted(records, key=lambda record: record["_id"] not in wanted)[:SIZE]
        parts.append(
            [
                {"id": record["_id"], "title": record.get("title", ""), "text": record["text"][:CHARACTERS]}
                for record in records
            ]
        )
    return *parts, judgments


class Collection(AbsTaskRetrieval):
    metadata = mteb.TaskMetadata(
        name="Collection", description="", type="Retrieval", category="t2t", modalities=["text"], eval_splits=["test"],
        eval_langs=["eng-Latn"], main_score="ndcg_at_10", dataset={"path": "a/b", "revision": "1"},
    )  # fmt: skip

    def load_data(self, **options):
        documents, queries, judgments = read_collection(Collection.folder)
        part = {"corpus": Dataset.from_list(documents), "queries": Dataset.from_list(queries), "top_ranked": None}
        self.dataset = {"default": {"test": part | {"relevant_docs": judgments}}}
        self.data_loaded = True


def count_texts(model):
    """Return a list to which the number of texts of each later call of model.encode is added."""
    counts = []
    encode = model.encode

    def counted(inputs, *args, **options):
        counts.append(len(inputs))
        return encode(inputs, *args, **options)

    model.encode = counted
    return counts


def of_library(path, folder):
    model = SentenceTransformer(str(path))
    counts = count_texts(model)
    return mteb.evaluate(model, Collection(), cache=None), counts


def of_page(path, folder):
    """Run the script of docs/recipes/mteb.md."""
    (code,) = re.findall(r"^```python\n(.+?)^```$", (ROOT / "docs/recipes/mteb.md").read_text(), re.M | re.S)
    code = code.replace("Args()", f"Args(cache_dir={str(folder / 'ours')!r})")
    (folder / "mteb_cached.py").write_text(code)
    sys.argv[1:] = [str(path), "Collection"]
    ran = runpy.run_path(str(folder / "mteb_cached.py"))
    return ran["result"], [ran["encoder"].meter["new"]]


def of_wrapper(path, folder):
    model = SentenceTransformer(str(path))
    counts = count_texts(model)
    wrapper = CachedEmbeddingWrapper(SentenceTransformerEncoderWrapper(model), folder / "theirs")
    return mteb.evaluate(wrapper, Collection(), cache=None), counts


def add_noise(path):
    """Add noise to the matrices of the model in a folder."""
    torch.manual_seed(0)
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim > 1 and weight.is_floating_point():
            weights[name] = weight + 0.3 * weight.std() * torch.randn_like(weight)
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("beir", type=Path)
    args = parser.parse_args()
    Collection.folder = args.beir
    mteb.get_tasks = lambda tasks: [Collection()]
    sys.path.insert(0, str(ROOT))
    steps = [("sentence-transformers", of_library), ("the page", of_page), ("the page, again", of_page),
             ("CachedEmbeddingWrapper", of_wrapper), ("CachedEmbeddingWrapper, again", of_wrapper), ("change", None),
             ("changed: sentence-transformers", of_library), ("changed: the page", of_page),
             ("changed: CachedEmbeddingWrapper", of_wrapper)]  # fmt: skip
    table = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        shutil.copytree(args.model, path)
        for step, evaluate in steps:
            if step == "change":
                add_noise(path)
                continue
            start = time.perf_counter()
            result, counts = evaluate(path, Path(folder))
            seconds = time.perf_counter() - start
            measure = result.task_results[0].scores["test"][0]["ndcg_at_10"]
            table.append([step, sum(counts), round(seconds, 1), round(measure, 5)])
    print("| | texts encoded | seconds | nDCG@10 |\n|---|---|---|---|")
    for row in table:
        print("|", " | ".join(map(str, row)), "|")
    Path("mteb_cache.json").write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
