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
from conftest import ROOT, count_cached, mark_slow, skip_without_bfloat16, train
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Router, StaticEmbedding
from test_architectures import CASES, PROMPTS
from test_decoders import CHAT, TEMPLATE, load, make_decoder, make_encoder, make_reranker
from tokenizers import Tokenizer

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


QUICK = ["BERT, cls", "Qwen3, left", "static, prompts", "Router first", "remote code, LoRA", "a chat template"]
QUICK = [name for name in QUICK if name in KINDS]


@pytest.mark.parametrize("name", mark_slow(KINDS, QUICK))
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
            found = encoder.encode(texts, role)[:, : encoder.views[0][0]]
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


def score_pairs(scorer, pairs):
    ((_, scores),) = script.cached_vectors(scorer, [scorer.chunk_of(pairs, None)])
    return scores[:, 0]


@pytest.mark.parametrize("name", RERANKERS)
def test_scores_equal_those_of_predict(name, rows, bert, tmp_path):
    torch.manual_seed(0)
    RERANKERS[name](tmp_path, bert)
    pairs = [(row["docstring"], row["code"]) for row in rows[:20]] + [("one", "two"), (rows[0]["code"], "short")]
    model = CrossEncoder(str(tmp_path / "model"), device="cpu", activation_fn=torch.nn.Identity())
    expected = model.predict(pairs)
    for again in (False, True):
        scorer = open_encoder(script.CachedScorer, tmp_path / "model", tmp_path)
        assert np.abs(score_pairs(scorer, pairs) - expected).max() < 1e-5 * max(1, np.abs(expected).max())
        assert scorer.meter["new"] == (not again) * len(pairs)
        scorer.close()
    assert expected.std() > 1e-4


def edit_json(name, **values):
    """Return a function that sets values of a JSON file of a model's folder."""

    def edit(folder):
        options = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(options | values))

    return edit


def edit_text(name, old, new):
    """Return a function that replaces a text in a file of a model's folder, where it must occur."""

    def edit(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return edit


def change_a_weight(folder):
    weights = load_file(folder / "model.safetensors")
    weights[min(weights)].view(-1)[0] += 0.1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


HELPED = """
import torch
from torch import nn
from .helper import scale


class Options:
    def __init__(self, factor):
        self.factor = factor


class Reader(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, features):
        features["sentence_embedding"] = scale(features["sentence_embedding"]) * self.factor
        return features

    @classmethod
    def load(cls, folder):
        with open(folder + "/factor.txt") as file:
            return cls(float(file.read()))
"""


def helped(folder):
    """Append to a model a module of its own, whose code is in two files, and whose option is in a third."""
    (folder / "reader.py").write_text(HELPED)
    (folder / "helper.py").write_text("def scale(x):\n    return x\n")
    (folder / "2_Reader").mkdir()
    (folder / "2_Reader/factor.txt").write_text("1.0")
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_Reader", "type": "reader.Reader"})
    (folder / "modules.json").write_text(json.dumps(modules))


def helped_by_an_object(folder):
    """The same, with the option of the module in an object in a list in a dict."""
    helped(folder)
    keeps = "super().__init__()\n        self."
    edit_text("reader.py", f"{keeps}factor = factor", f"{keeps}all = {{1: [Options(factor)]}}")(folder)
    edit_text("reader.py", "* self.factor", "* self.all[1][0].factor")(folder)


FIRST = """
from torch import nn
from transformers import AutoModel, AutoTokenizer


class First(nn.Module):
    def __init__(self, path):
        super().__init__()
        self.auto_model = AutoModel.from_pretrained(path)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.max_seq_length = 64

    def tokenize(self, texts, padding=True, **options):
        length = self.max_seq_length
        return self.tokenizer(list(texts), padding=padding, truncation=True, max_length=length, return_tensors="pt")

    def forward(self, features):
        features["token_embeddings"] = self.auto_model(**features).last_hidden_state
        return features

    @classmethod
    def load(cls, folder):
        return cls(folder)
"""


def own_first(folder):
    """Replace the first module of a model by one of its own, as jina-embeddings-v3 has it."""
    (folder / "first.py").write_text(FIRST)
    edit_text("modules.json", "sentence_transformers.base.modules.transformer.Transformer", "first.First")(folder)


def static_parts(folder):
    """Return the modules of a static model with the tokenizer of a model, which truncates to 200 tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(200)
    return [StaticEmbedding(tokenizer, embedding_dim=32)]


def become_static(folder):
    model = SentenceTransformer(modules=static_parts(folder))
    shutil.rmtree(folder)
    model.save_pretrained(str(folder))


def become_router(folder):
    """Route queries to a static model, documents to the model."""
    parts = list(SentenceTransformer(str(folder), device="cpu"))
    static = static_parts(folder)
    static += [Dense(32, parts[-1].embedding_dimension)]
    model = SentenceTransformer(modules=[Router.for_query_document(static, parts)])
    shutil.rmtree(folder)
    model.save_pretrained(str(folder))


def edit_truncation(folder):
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    described["truncation"]["max_length"] = 150
    path.write_text(json.dumps(described))


def edit_length_below(folder):
    (path,) = folder.glob("*/sentence_bert_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_seq_length": 24}))


def plain(folder):
    """Keep a model as it is."""


PROMPTED = edit_json("config_sentence_transformers.json", prompts={"query": "ask: ", "document": ""})
LEFT = edit_json("tokenizer_config.json", truncation_side="left")
CASED = edit_json("tokenizer_config.json", do_lower_case=False)
ALL, NONE, QUERIES = (True, True), (False, False), (True, False)  # are encoded again: queries, documents
CHANGES = {  # {what was changed: (the model before, the change, encoded again)}; docs/evaluation.md has this table
    "nothing: a copy in another folder": (plain, plain, NONE),
    "one weight": (plain, change_a_weight, ALL),
    "precision of the weights": (plain, edit_json("config.json", dtype="bfloat16"), ALL),
    "pooling": (plain, edit_json("1_Pooling/config.json", pooling_mode="cls"), ALL),
    "length": (plain, edit_json("sentence_bert_config.json", max_seq_length=24), ALL),
    "side on which texts are truncated": (plain, LEFT, ALL),
    "case": (plain, CASED, ALL),
    "accents": (plain, edit_json("tokenizer_config.json", strip_accents=False), ALL),
    "one word of the vocabulary": (plain, edit_text("tokenizer.json", '"return"', '"rEturn"'), ALL),
    "prompt of queries": (plain, PROMPTED, QUERIES),
    "card, and the version that saved it": (plain, edit_json("config.json", transformers_version="5.0.0"), NONE),
    "code of a module": (helped, edit_text("reader.py", "return features", "return features  # changed"), ALL),
    "code that this code imports": (helped, edit_text("helper.py", "return x", "return x ** 3"), ALL),
    "an option that a module of its own keeps": (helped, lambda m: (m / "2_Reader/factor.txt").write_text("2"), ALL),
    "an option in a list, a dict or an object of its own": (
        helped_by_an_object, lambda m: (m / "2_Reader/factor.txt").write_text("2"), ALL),
    "a first module of its own: case": (own_first, CASED, ALL),
    "a first module of its own: side": (own_first, LEFT, ALL),
    "a first module of its own: length": (own_first, edit_text("first.py", "= 64", "= 24"), ALL),
    "a static model: length": (become_static, edit_truncation, ALL),
    "a Router of a static model and another: length of the other": (become_router, edit_length_below, ALL),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_vectors_has_a_cache_of_its_own(name, rows, bert, tmp_path):
    before, change, expected = CHANGES[name]
    if name == "precision of the weights":
        skip_without_bfloat16()
    shutil.copytree(bert, tmp_path / "first")
    before(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "changed")
    change(tmp_path / "changed")
    texts = [f"{rows[0]['code']} É {number}" for number in range(3)]
    again = []
    for model in ("first", "changed"):
        encoder = open_encoder(script.CachedEncoder, tmp_path / model, tmp_path)
        for role in ("query", "document"):
            encoder.meter.clear()
            encoder.encode([f"{role}: {text}" for text in texts], role)
            again.append(encoder.meter["new"] > 0)
        encoder.close()
    assert again == [True, True, *expected]


def test_the_table_of_the_page_is_that_of_the_test():
    page = (ROOT / "docs/evaluation.md").read_text()
    words = {ALL: "yes", NONE: "no", QUERIES: "the queries alone"}
    for name, (*_, expected) in CHANGES.items():
        assert f"| {name} | {words[expected]} |" in page


def test_a_length_of_a_first_module_of_its_own_is_refused(rows, bert, tmp_path):
    """It may ignore --max_length; its own length holds."""
    shutil.copytree(bert, tmp_path / "model")
    own_first(tmp_path / "model")
    texts = [row["code"] for row in rows[:5]]
    encoder = open_encoder(script.CachedEncoder, tmp_path / "model", tmp_path)
    model = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    assert encoder.encode(texts, "document") == pytest.approx(model.encode_document(texts), abs=1e-5)
    with pytest.raises(script.UserError, match="truncates by itself: leave the length out"):
        open_encoder(script.CachedEncoder, tmp_path / "model", tmp_path, max_length=8)


def test_a_length_of_a_static_model(corpus, rows, static, tmp_path):
    """A base that is measured at the length at which another was trained reads the same tokens."""
    flags = ["--train_data", f"{corpus}/*.parquet", "--columns", "docstring", "code", "--model_name_or_path", static,
             "--max_steps", 2, "--learning_rate", 1e-30, "--max_length", 8, "--output_dir", tmp_path]  # fmt: skip
    train("train_bi_encoder", *flags)
    texts = [row["code"] for row in rows[:20]]
    found = []
    for model, length in ((static, 8), (tmp_path / "model", None), (static, None)):
        encoder = open_encoder(script.CachedEncoder, model, tmp_path, max_length=length)
        found.append(encoder.encode(texts, "document"))
        encoder.close()
    assert np.abs(found[0] - found[1]).max() < 1e-6 < 1e-2 < np.abs(found[0] - found[2]).max()


def test_a_tokenizer_in_python(rows, tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=400, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    transformers.BertModel(config).save_pretrained(tmp_path / "model")
    transformers.ByT5Tokenizer(model_max_length=128).save_pretrained(tmp_path / "model")
    text = rows[0]["code"][:100]
    expected = SentenceTransformer(str(tmp_path / "model"), device="cpu").encode_document(text)
    for length in (None, None, 20):
        encoder = open_encoder(script.CachedEncoder, tmp_path / "model", tmp_path, max_length=length)
        (found,) = encoder.encode([text], "document")
        assert length or np.abs(found - expected).max() < 1e-5
        encoder.close()
    assert count_cached(tmp_path / "cache") == [1, 1]


def test_one_model_is_in_memory_at_a_time(evaluate, beir, bert, static, reranker, tmp_path, monkeypatch):
    """Bi-encoders and the cross-encoder; each is counted while it is used."""
    seen = []
    compute = script.CachedEncoder.compute

    def count(self, *options):
        gc.collect()
        models = [part for part in gc.get_objects() if isinstance(part, SentenceTransformer | CrossEncoder)]
        seen.append((self.unit, len([model for model in models if model is not self.model])))
        return compute(self, *options)

    gc.collect()
    gc.freeze()  # what there is now is not among get_objects()
    monkeypatch.setattr(script.CachedEncoder, "compute", count)
    shutil.copytree(bert, tmp_path / "cls")
    Pooling(32, pooling_mode="cls").save(str(tmp_path / "cls/1_Pooling"))
    models = [bert, tmp_path / "cls", static]
    evaluate("--beir", beir, "--model_name_or_path", *models, "--cross_encoder", reranker, "--rerank_k", 2,
             "--corpus_chunk_size", 150)  # fmt: skip
    assert {unit for unit, _ in seen} == {"texts", "pairs"} and {others for _, others in seen} == {0}
