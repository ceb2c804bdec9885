"""Read collections of a Hub, then train a cross-encoder: `hub_worker.py '[[ID, split or null], ...]' FLAGS` prints a
JSON list for each, with what the evaluator and both trainers find, or the message of the error. The evaluator finds
{collection: [documents, {query: {document: grade}}, texts of the first document and query]}, a trainer {main measure:
{collection: {text of a query: texts of its relevant documents}}}; of the cross-encoder, [these, texts to rerank]."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

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


def of_trainer(script, name, _):
    flags = ["--train_data", "none", "--columns", "a", "b", "--model_name_or_path", "none", "--eval_beir", name]
    model = SimpleNamespace(similarity_fn_name="cosine", model_type="SentenceTransformer")
    data = SimpleNamespace(sources=[], held_out=[])
    found = {}
    for measure, (evaluator, _) in script.open_evaluators(data, model, script.parse_args(flags)).items():
        found[measure] = {part.name: relevant_texts(part) for part in evaluator.evaluators}
    return found


def relevant_texts(evaluator):
    """Return what of_trainer finds in an evaluator of sentence-transformers."""
    if hasattr(evaluator, "samples"):
        return {sample["query"]: [sample["positive"], sample["documents"]] for sample in evaluator.samples}
    documents = dict(zip(evaluator.corpus_ids, evaluator.corpus))
    queries = zip(evaluator.queries_ids, evaluator.queries)
    return {text: [documents[document] for document in evaluator.relevant_docs[name]] for name, text in queries}


for name, split in json.loads(sys.argv[1]):
    answers = []
    for read in (of_evaluator, partial(of_trainer, train_bi_encoder), partial(of_trainer, train_cross_encoder)):
        try:
            answers.append(read(name, split))
        except Exception as error:
            answers.append(str(error).removeprefix(f"--beir {name}: "))
    print(json.dumps(answers))
train_cross_encoder.main(train_cross_encoder.parse_args(sys.argv[2:]))
