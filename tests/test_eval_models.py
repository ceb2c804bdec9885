"""Each kind of model that sentence-transformers builds has the library's own vectors and scores in the evaluator,
computed or cached: tiny models with random weights."""

import gc
import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from conftest import count_cached
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from test_architectures import CASES, PROMPTS, router_after_pooling
from test_decoders import CHAT, TEMPLATE, load, make_decoder, make_encoder
from test_modular_rerankers import make_reranker

import eval_incremental as script


def chat_embedder(folder, bert):
    """A model that puts texts into a chat template, and the prompt into the system's message."""
    base = make_decoder(folder / "base", chat=CHAT, side="left")
    return list(SentenceTransformer(str(base), device="cpu"))


KINDS = {name: case for name, case in CASES.items() if "LoRA" not in name}  # a saved model has its adapters merged
KINDS["a chat template"] = (chat_embedder, PROMPTS)


def open_encoder(kind, model, folder, **flags):
    """Return a CachedEncoder or CachedScorer with a cache in `folder`."""
    flags = {"micro_batch_tokens": 300, "corpus_chunk_size": 16, "trust_remote_code": True} | flags
    return kind(str(model), script.Args(cache_dir=str(folder / "cache"), **flags), Accelerator(cpu=True))


def save(modules, folder, **options):
    """Save a model with larger weights, else all texts have nearly the same embedding."""
    model = SentenceTransformer(modules=modules, device="cpu", **options)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1)
    model.save_pretrained(str(folder), create_model_card=False)
    return SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)


@pytest.mark.parametrize("name", KINDS)
def test_vectors_equal_those_of_the_library(name, rows, bert, tmp_path):
    """The same texts as queries and as documents, of mixed lengths, computed and then cached."""
    build, flags = KINDS[name]
    torch.manual_seed(0)
    options = {"prompts": {"query": PROMPTS[1], "document": PROMPTS[3]}} if flags == PROMPTS else {}
    options |= {"truncate_dim": 16} if name == "truncate_dim" else {}
    model = save(build(tmp_path, bert), tmp_path / "model", **options)
    length = {"max_length": 100} if "--max_length" in flags else {}
    if length:
        model.max_seq_length = length["max_length"]
    texts = [text for row in rows[:20] for text in row.values()]
    expected = {"query": model.encode_query(texts), "document": model.encode_document(texts)}
    for again in (False, True):
        encoder = open_encoder(script.CachedEncoder, tmp_path / "model", tmp_path, **length)
        for role in ("query", "document"):
            found = encoder.encode(texts, role)
            scale = np.linalg.norm(expected[role], axis=1).mean()
            assert np.abs(found - expected[role]).max() < 1e-5 * scale
        differ = np.abs(expected["query"] - expected["document"]).max() > 1e-3
        assert encoder.meter["new"] == (not again) * len(texts) * (2 if differ or encoder.reads_role else 1)
        encoder.close()
    assert np.linalg.norm(found - found.mean(0), axis=1).mean() > 1e-3 * scale  # texts differ from one another


def classifier(folder, bert):
    path = make_encoder(folder / "base", "BertModel", bert)
    model = CrossEncoder(str(path), device="cpu", num_labels=1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    model.save_pretrained(str(folder / "model"))


def last_token(side):
    def build(folder, bert):
        path = make_decoder(folder / "model", "LlamaForSequenceClassification", side=side)
        config = json.loads((path / "config.json").read_text()) | {"id2label": {"0": "score"}}
        (path / "config.json").write_text(json.dumps(config))
        torch.manual_seed(0)
        model = transformers.LlamaForSequenceClassification(transformers.AutoConfig.from_pretrained(path))
        model.save_pretrained(path)

    return build


def yes_no(*flags):
    def build(folder, bert):
        chat = None if "--template" in flags else CHAT
        path = make_decoder(folder / "base", "Qwen3ForCausalLM", ending=None, chat=chat)
        load("train_cross_encoder", path, *flags)[2].save_pretrained(str(folder / "model"))

    return build


RERANKERS = {
    "BERT": classifier,
    "several modules": lambda folder, bert: make_reranker(bert, folder / "model"),
    "Llama, left": last_token("left"),
    "Llama, right": last_token("right"),
    "yes or no, a template": yes_no("--template", TEMPLATE, "--query_prompt", "Judge. "),
    "yes or no, a chat template": yes_no("--query_prompt", "Judge."),
}


@pytest.mark.parametrize("name", RERANKERS)
def test_scores_equal_those_of_predict(name, rows, bert, tmp_path):
    torch.manual_seed(0)
    RERANKERS[name](tmp_path, bert)
    pairs = [(row["docstring"], row["code"]) for row in rows[:20]] + [("one", "two"), (rows[0]["code"], "short")]
    model = CrossEncoder(str(tmp_path / "model"), device="cpu", activation_fn=torch.nn.Identity())
    expected = model.predict(pairs)
    for again in (False, True):
        scorer = open_encoder(script.CachedScorer, tmp_path / "model", tmp_path)
        assert np.abs(scorer.score_pairs(*zip(*pairs)) - expected).max() < 1e-5 * max(1, np.abs(expected).max())
        assert scorer.meter["new"] == (not again) * len(pairs)
        scorer.close()
    assert expected.std() > 1e-4


def test_a_ranking_by_a_router(evaluate, beir, bert, tmp_path):
    """Scores of a whole evaluation; before the fifth edition they were off by 1.33, silently."""
    model = save(router_after_pooling(tmp_path, bert), tmp_path / "model", similarity_fn_name="dot")
    evaluate("--beir", beir, "--model_name_or_path", tmp_path / "model")
    texts = []
    for name in ("queries", "corpus"):
        records = map(json.loads, (beir / f"{name}.jsonl").read_text().splitlines())
        texts.append({record["_id"]: record["text"].strip() for record in records})
    scores = model.encode_query(list(texts[0].values())) @ model.encode_document(list(texts[1].values())).T
    number = {name: row for part in texts for row, name in enumerate(part)}
    for line in (tmp_path / "out/run.trec").read_text().splitlines():
        query, _, document, _, score, _ = line.split()
        assert float(score) == pytest.approx(scores[number[query], number[document]], rel=1e-5, abs=1e-5)


def test_changed_code_of_a_module_has_a_cache_of_its_own(rows, bert, tmp_path):
    build, _ = CASES["remote code"]
    save(build(tmp_path, bert), tmp_path / "model").save_pretrained(str(tmp_path / "model"))
    texts = [row["docstring"] for row in rows[:5]]
    found = []
    for scale in ("lengths / 100", "lengths / 50"):
        code = tmp_path / "model/reader.py"
        code.write_text(code.read_text().replace("lengths / 100", scale))
        encoder = open_encoder(script.CachedEncoder, tmp_path / "model", tmp_path)
        found.append(encoder.encode(texts, "query"))
    assert count_cached(tmp_path / "cache") == [5, 5] and np.abs(found[0] - found[1]).max() > 1e-3


def test_one_model_is_in_memory_at_a_time(evaluate, beir, bert, static, reranker, tmp_path, monkeypatch):
    """Bi-encoders and the cross-encoder; each is counted while it is used."""
    seen = []
    compute = script.CachedEncoder.compute

    def count(self, texts, role):
        gc.collect()
        models = [part for part in gc.get_objects() if isinstance(part, SentenceTransformer | CrossEncoder)]
        seen.append((self.unit, len([model for model in models if model is not self.model and id(model) not in old])))
        return compute(self, texts, role)

    gc.collect()
    old = {id(part) for part in gc.get_objects() if isinstance(part, SentenceTransformer | CrossEncoder)}
    monkeypatch.setattr(script.CachedEncoder, "compute", count)
    shutil.copytree(bert, tmp_path / "cls")
    Pooling(32, pooling_mode="cls").save(str(tmp_path / "cls/1_Pooling"))
    models = [bert, tmp_path / "cls", static]
    evaluate("--beir", beir, "--model_name_or_path", *models, "--cross_encoder", reranker, "--rerank_k", 2)
    assert {unit for unit, _ in seen} == {"texts", "pairs"} and {others for _, others in seen} == {0}
