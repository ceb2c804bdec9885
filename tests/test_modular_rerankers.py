"""Rerankers of several modules (Transformer, Pooling, Dense, ...), as sentence-transformers builds them: one score a
pair, equal to that of `predict`."""

import pandas as pd
import pytest
import torch
from conftest import ROOT, launch, read_run, train, weights
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Pooling
from test_decoders import flags_of, losses, make_run, resume_from_step_3


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


def test_trains_resumes_and_reranks(modular, corpus, beir, evaluate, tmp_path):
    """The loss falls, also on two processes; a resume to the bit; the saved model has all modules, and the evaluator's
    scores are those of its `predict`."""
    script = ROOT / "train_cross_encoder.py"
    flags = flags_of(corpus, modular, tmp_path / "one", "--dropout", 0)
    launch(script, *flags)
    found = losses(tmp_path / "one")
    assert len(found) == 6 and found[-1] < found[0]
    launch(script, *flags, "--output_dir", tmp_path / "two", processes=2)
    assert losses(tmp_path / "two") == pytest.approx(found, rel=1e-4)
    model = tmp_path / "one/model"
    expected = weights(model)
    resume_from_step_3(script, tmp_path / "one", flags)
    assert torch.equal(weights(model), expected) and not torch.equal(weights(modular), expected)
    kinds = [[type(module) for module in CrossEncoder(str(path), device="cpu")] for path in (model, modular)]
    assert kinds[0] == kinds[1]

    evaluate("--beir", beir, "--cross_encoder", model, "--rerank_k", 5, "--run", make_run(beir, tmp_path))
    (path,) = (tmp_path / "out").glob("**/*one*/run.trec")
    documents = pd.read_json(beir / "corpus.jsonl", lines=True, dtype=str).set_index("_id")["text"]
    queries = pd.read_json(beir / "queries.jsonl", lines=True, dtype=str).set_index("_id")["text"]
    ranked = read_run(path)["q3"]
    expected = predict(model, [(queries["q3"], documents[document]) for document in ranked])
    assert list(ranked.values()) == pytest.approx(expected, abs=1e-5) and len(ranked) == 5


def test_adapters(modular, corpus, tmp_path):
    """They are merged into the saved transformer, whose embeddings stay frozen."""
    train("train_cross_encoder", *flags_of(corpus, modular, tmp_path / "out", "--lora_rank", 4, "--max_steps", 2))
    found, expected = (CrossEncoder(str(path), device="cpu") for path in (tmp_path / "out/model", modular))
    changed = {name for name, weight in found.state_dict().items() if not weight.equal(expected.state_dict()[name])}
    assert any("attention" in name for name in changed) and not any("embeddings" in name for name in changed)
