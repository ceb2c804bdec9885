"""Read collections of a Hub: `hub_worker.py '[[ID, split or null], ...]'` prints a JSON list for each, with what the
evaluator and both trainers find: {collection: [documents, {query: {document: grade}}, texts of the first document and
query]}, or the message of the error."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import eval_incremental
import train_bi_encoder
import train_cross_encoder

eval_incremental.datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False


def nested(judgments):
    """Return {query: {document: grade}} of rows of these."""
    found = {}
    for query, document, grade in judgments:
        found.setdefault(query, {})[document] = int(grade)
    return found


def of_evaluator(name, split):
    flags = ["--beir", name, "--model_name_or_path", "none"] + (["--split", split] if split else [])
    found = {}
    for collection in eval_incremental.open_collections(eval_incremental.parse_args(flags)):
        judgments = nested(collection.qrels.itertuples(index=False))
        documents = collection.corpus.frame()["text"]
        first_texts = [documents[0], next(iter(collection.queries.values()))]
        found[collection.name] = [len(documents), judgments, first_texts]
    return found


def of_trainer(script, name, split):
    flags = ["--train_data", "none", "--model_name_or_path", "none", "--eval_beir", name] + (
        ["--eval_split", split] if split else []
    )
    args = script.parse_args(flags)
    found = {}
    for collection, eval_set in script.read_collections(args, "", "").items():
        judgments = nested(eval_set.qrels.itertuples(index=False))
        first_texts = [next(iter(texts.values())) for texts in (eval_set.documents, eval_set.queries)]
        found[Path(collection).name] = [len(eval_set.documents), judgments, first_texts]
    return found


for name, split in json.loads(sys.argv[1]):
    answers = []
    for read, *script in ((of_evaluator,), (of_trainer, train_bi_encoder), (of_trainer, train_cross_encoder)):
        try:
            answers.append(read(*script, name, split))
        except Exception as error:
            answers.append(str(error).removeprefix(f"--beir {name}: ").removeprefix(f"--eval_beir {name}: "))
    print(json.dumps(answers))
