"""Rerankers of several modules (Transformer, Pooling, Dense, ...), as sentence-transformers builds them: one score a
pair, equal to that of `predict`."""

import pandas as pd
import pytest
import torch
from conftest import metrics, read_run, train, weights
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Pooling


def make_reranker(base, folder, pooling="mean", labels=1):
    """Save a reranker on the transformer of `base`: pooling, a hidden layer and a head with random weights."""
    transformer = SentenceTransformer(str(base), device="cpu")[0]
    torch.manual_seed(0)
    hidden = Dense(32, 32, activation_function=torch.nn.GELU())
    head = Dense(32, labels, activation_function=torch.nn.Identity(), module_output_name="scores")
    modules = [transformer, Pooling(32, pooling_mode=pooling), hidden, LayerNorm(32), head]
    CrossEncoder(modules=modules, device="cpu").save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def modular(tmp_path_factory, bert):
    return make_reranker(bert, tmp_path_factory.mktemp("modular"))


def predict(folder, pairs):
    return CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Identity()).predict(pairs).tolist()


def flags_of(corpus, model, output, *more):
    return ["--train_data", f"{corpus}/*.parquet", "--columns", "docstring", "code", "--model_name_or_path", model,
            "--max_steps", 6, "--batch_size", 16, "--eval_rows", 8, "--logging_steps", 1, "--learning_rate", 1e-3,
            "--num_negatives", 2, "--micro_batch_tokens", 700, "--output_dir", output, *more]  # fmt: skip


def test_trains_and_reranks(modular, corpus, beir, evaluate, tmp_path):
    """The loss falls; the saved model has all modules, and the evaluator's scores are those of its `predict`."""
    train("train_cross_encoder", *flags_of(corpus, modular, tmp_path / "one", "--dropout", 0))
    found = [line["loss"] for line in metrics(tmp_path / "one") if "loss" in line]
    assert len(found) == 6 and found[-1] < found[0]
    model = tmp_path / "one/model"
    kinds = [[type(module) for module in CrossEncoder(str(path), device="cpu")] for path in (model, modular)]
    assert kinds[0] == kinds[1] and not torch.equal(weights(modular), weights(model))

    documents = pd.read_json(beir / "corpus.jsonl", lines=True, dtype=str).set_index("_id")["text"]
    queries = pd.read_json(beir / "queries.jsonl", lines=True, dtype=str).set_index("_id")["text"]
    ranking = [f"q3 Q0 d{number} {number + 1} {9 - number} tag\n" for number in range(9)]
    (tmp_path / "run.trec").write_text("".join(ranking))
    evaluate("--beir", beir, "--cross_encoder", model, "--rerank_k", 5, "--run", tmp_path / "run.trec")
    (path,) = (tmp_path / "out").glob("**/*one*/run.trec")
    ranked = read_run(path)["q3"]
    expected = predict(model, [(queries["q3"], documents[document]) for document in ranked])
    assert list(ranked.values()) == pytest.approx(expected, abs=1e-5) and len(ranked) == 5


def test_adapters(modular, corpus, tmp_path):
    """They are merged into the saved transformer, whose embeddings stay frozen."""
    train("train_cross_encoder", *flags_of(corpus, modular, tmp_path / "out", "--lora_rank", 4, "--max_steps", 2))
    found, expected = (CrossEncoder(str(path), device="cpu") for path in (tmp_path / "out/model", modular))
    changed = {name for name, weight in found.state_dict().items() if not weight.equal(expected.state_dict()[name])}
    assert any("attention" in name for name in changed) and not any("embeddings" in name for name in changed)
