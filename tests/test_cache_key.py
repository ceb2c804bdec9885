"""What a cache holds: the vectors of one model, however it was found; in small types as exact as they are said to be;
and what was encoded before a kill."""

import argparse
import dataclasses
import gc
import shutil
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import count_cached, write_jsonl
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from test_eval_models import open_encoder
from test_eval_workers import stored_bytes
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, PreTrainedTokenizerFast

import eval_incremental as script

# ------------------------------------------------------------------------------------------------ the fingerprint


@dataclasses.dataclass(slots=True)
class Options:
    dims: list


class Keep(torch.nn.Module):
    """A module that is of no library, with options of its own."""

    def __init__(self, options):
        super().__init__()
        if isinstance(options, torch.nn.Module):
            self.part = options
        elif torch.is_tensor(options):
            self.register_buffer("mask", options, persistent=False)
        else:
            self.options = options

    def forward(self, features):
        return features


class Unknown:
    """An object that is known by its kind alone, as it may hold anything, such as its own address."""


OPTIONS = {
    "a list": lambda n: [0, n],
    "a tuple in a list": lambda n: [(0, n)],
    "a dict of dicts": lambda n: {"keep": {"dims": [n]}},
    "a dict by tuples": lambda n: {(1, n): 1},
    "a set of texts": lambda n: {"x", f"y{n}"},
    "a namespace": lambda n: types.SimpleNamespace(dims=[n]),
    "a namespace of argparse": lambda n: argparse.Namespace(dims=[n]),
    "a dataclass": lambda n: Options([n]),
    "an array": lambda n: np.array([0, n]),
    "a slice": lambda n: slice(n),
    "a function": lambda n: torch.tanh if n == 1 else torch.sigmoid,
    "a buffer that is not saved": lambda n: torch.tensor([0, n]),
    "a part without weights": lambda n: torch.nn.LeakyReLU(n / 10),
}


def fingerprint_of(static, options):
    model = SentenceTransformer(modules=[*SentenceTransformer(str(static), device="cpu"), Keep(options)], device="cpu")
    return script.model_fingerprint(model, "no", "float32", None)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_module_of_its_own_are_in_the_fingerprint(name, static):
    first, again, other = (fingerprint_of(static, OPTIONS[name](number)) for number in (1, 1, 2))
    assert first == again != other


def test_objects_of_unknown_kinds_change_nothing(static):
    """Nor does an object that contains itself end in an error."""
    turned = []
    for _ in range(2):
        options = {"unknown": Unknown()}
        options["itself"] = options
        turned.append(fingerprint_of(static, options))
    assert turned[0] == turned[1]


def test_a_model_is_the_same_however_it_was_found(bert):
    """In a folder, by its Hub id, offline: what the library notes of that, also in options within options."""
    model = SentenceTransformer(str(bert), device="cpu")
    before = script.model_fingerprint(model, "no", "float32", None)
    found = {"name_or_path": "lab/bert", "vocab_file": "/hub/vocab.txt", "is_local": False, "local_files_only": False}
    model[0].tokenizer.init_kwargs |= found
    model[0].model.config.part = {"_name_or_path": "lab/bert", "size": 1}
    hub = script.model_fingerprint(model, "no", "float32", None)
    model[0].model.config.part = {"_name_or_path": "/models/bert", "size": 1}
    model[0].tokenizer.init_kwargs |= {"is_local": True, "local_files_only": True}
    assert script.model_fingerprint(model, "no", "float32", None) == hub
    del model[0].model.config.part
    assert script.model_fingerprint(model, "no", "float32", None) == before
    model[0].tokenizer.init_kwargs["do_lower_case"] = False
    assert script.model_fingerprint(model, "no", "float32", None) != before


def test_a_comparison_of_attention_implementations_is_one(bert, tmp_path):
    for attention in (None, "eager", None):
        encoder = open_encoder(script.CachedEncoder, bert, tmp_path, attn_implementation=attention)
        encoder.encode(["a red fish", "a green river"], "document")
        new = encoder.meter["new"]
        encoder.close()
    assert new == 0 and count_cached(tmp_path / "cache") == [2, 2]


def test_vectors_leave_memory_without_a_collection_of_garbage(bert, tmp_path, monkeypatch):
    """Python collects garbage rarely where much is in memory: nothing that a chunk leaves may refer to itself."""
    encoder = open_encoder(script.CachedEncoder, bert, tmp_path)
    look_up = script.look_up
    alive = weakref.WeakSet()
    monkeypatch.setattr(script, "look_up", lambda *given: [lookup := look_up(*given), alive.add(lookup)][0])
    gc.disable()
    try:
        encoder.encode([f"a red fish {number}" for number in range(40)], "document")
        assert not alive
    finally:
        gc.enable()
        encoder.close()


# -------------------------------------------------------------------------------------------------- small types


@pytest.mark.parametrize("scale", [1e-20, 1e-7, 1, 1e6])
@pytest.mark.parametrize("dtype, tolerance", [("float16", 5e-4), ("int8", 1e-2)])
def test_no_vector_is_too_small_or_too_large_for_a_type(tmp_path, dtype, tolerance, scale):
    vectors = np.random.default_rng(0).standard_normal((100, 64)).astype(np.float32) * np.float32(scale)
    cache = script.EmbeddingCache(tmp_path, 64, dtype)
    stored = cache.unpack(cache.pack(vectors))
    cache.check_rounding(stored, None)
    assert stored.dtype == np.float32
    errors = np.linalg.norm(stored - vectors, axis=1) / np.linalg.norm(vectors, axis=1)
    assert errors.max() < tolerance


def with_a_large_dimension(static, folder, large):
    """Save a static model whose first dimension is so many mean weights larger; return its folder."""
    model = SentenceTransformer(str(static), device="cpu")
    weights = model[0].embedding.weight.data.clone()
    weights[:, 0] += large * weights.abs().mean()
    parts = [StaticEmbedding(model[0].tokenizer, embedding_weights=weights.numpy())]
    SentenceTransformer(modules=parts, similarity_fn_name="cosine").save_pretrained(str(folder / "model"))
    return folder / "model"


@pytest.mark.parametrize("dtype, large, is_refused", [("int8", 3, False), ("int8", 100, True), ("float16", 100, False),
                                                      ("float16", 1e6, True), ("float32", 1e6, False)])  # fmt: skip
def test_a_dimension_that_dominates_is_refused_where_rounding_shows(evaluate, beir, static, tmp_path, dtype, large,
                                                                    is_refused):  # fmt: skip
    model = with_a_large_dimension(static, tmp_path, large)
    flags = ["--beir", beir, "--model_name_or_path", model, "--cache_dtype", dtype]
    if not is_refused:
        assert evaluate(*flags)["texts"]["encoded"] == 353
        return
    with pytest.raises(script.UserError, match=f"{tmp_path}/model: --cache_dtype {dtype}: too coarse, .* more bits$"):
        evaluate(*flags)


WAYS = {
    "few queries, small parts": ["--beir", "beir", "--micro_batch_tokens", 64],
    "chunks of 20": ["--beir", "beir", "--corpus_chunk_size", 20],
    "three versions of a text": ["--corpus", "alike.jsonl", "--query", "a red fish", "a red fish!"],
    "two texts": ["--corpus", "one.jsonl", "--query", "a blue fish"],
    "export of one text": ["--corpus", "one.jsonl", "--export_vectors", "vectors"],
}


@pytest.mark.parametrize("way", WAYS)
def test_every_vector_is_checked(evaluate, beir, static, tmp_path, monkeypatch, way):
    """However few there are, before any is stored; also those that an earlier edition has stored unchecked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beir").symlink_to(beir)
    write_jsonl(tmp_path / "one.jsonl", [{"_id": "a", "text": "a red fish"}])
    write_jsonl(tmp_path / "alike.jsonl", [{"_id": f"a{n}", "text": f"a red fish, version {n}"} for n in range(3)])
    flags = [*WAYS[way], "--cache_dtype", "int8", "--model_name_or_path"]
    model = with_a_large_dimension(static, tmp_path, 100)
    for earlier in (False, True):
        if earlier:
            with monkeypatch.context() as patch:
                patch.setattr(script.EmbeddingCache, "check_rounding", lambda *given: None)
                evaluate(*flags, model)
            shutil.rmtree("vectors", ignore_errors=True)
        with pytest.raises(script.UserError, match="--cache_dtype int8: too coarse"):
            evaluate(*flags, model)
        assert sum(count_cached("cache", 36)) == 0 or earlier
        assert not [*Path(".").glob("vectors*/*.parquet")]
    evaluate(*flags, static)


def test_vectors_that_are_seen_one_at_a_time_are_judged_as_many(tmp_path):
    """Those of long texts differ less than those that were seen before."""
    random = np.random.default_rng(0)
    short, long = (np.hstack([np.full((64, 1), 5), random.normal(0, width, (64, 64))]) for width in (0.3, 0.06))
    cache = script.EmbeddingCache(tmp_path, 65, "int8")

    def check(vectors):
        cache.check_rounding(cache.unpack(cache.pack(vectors.astype(np.float32))), None)

    check(short)
    with pytest.raises(script.UserError, match="too coarse"):
        for vector in long:
            check(vector[None])


# ------------------------------------------------------------------------------------- texts without a token


def without_special_tokens(folder, kind, side):
    """Save a small model whose tokenizer adds no special tokens."""
    words = {"<pad>": 0, "<unk>": 1, **{f"w{number}": number + 2 for number in range(60)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"bert": BertConfig, "llama": LlamaConfig}[kind](vocab_size=62, max_position_embeddings=256, **shape)
    {"bert": BertModel, "llama": LlamaModel}[kind](config).save_pretrained(folder)
    options = {"pad_token": "<pad>", "padding_side": side, "model_max_length": 128}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(folder)
    SentenceTransformer(modules=[Transformer(str(folder)), Pooling(32, "mean")]).save_pretrained(str(folder / "st"))
    return folder / "st"


@pytest.mark.parametrize("kind, side", [("bert", "right"), ("llama", "left"), ("llama", "right")])
def test_an_empty_text_beside_long_ones_and_alone(kind, side, tmp_path):
    path = without_special_tokens(tmp_path / "model", kind, side)
    long = " ".join(f"w{number % 60}" for number in range(100))
    texts = ["", long, "w1 w2", "  ", long[:200], "w5"]
    expected = SentenceTransformer(str(path), device="cpu").encode_document(texts)
    encoder = open_encoder(script.CachedEncoder, path, tmp_path, micro_batch_tokens=128)
    assert encoder.encode(texts, "document") == pytest.approx(expected, abs=1e-5)
    assert not encoder.encode(["\t", "\n"], "document").any()  # alone
    assert encoder.meter["new"] == 8


# ----------------------------------------------------------------------------------------------- a stopped evaluation


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stopped_evaluation_loses_a_group_of_texts_at_most(workers, rows, bert, tmp_path, monkeypatch):
    """On a CPU, of a chunk that was not complete; what was stored of it gives way to the whole chunk."""
    texts = list({row["code"] for row in rows[:120]})
    flags = {"micro_batch_tokens": 128, "corpus_chunk_size": 100, "dataloader_num_workers": workers}
    computed = []
    compute = script.CachedEncoder.compute

    def stopped(self, lookup, indices, micro_batches):
        if sum(computed) > 50:
            raise KeyboardInterrupt
        computed.append(len(indices))
        compute(self, lookup, indices, micro_batches)

    monkeypatch.setattr(script.CachedEncoder, "compute", stopped)
    encoder = open_encoder(script.CachedEncoder, bert, tmp_path, **flags)
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(texts, "document")
    encoder.close()
    assert count_cached(tmp_path / "cache") == [sum(computed)] and 50 < sum(computed) < 100
    monkeypatch.setattr(script.CachedEncoder, "compute", compute)
    for folder, new in ((tmp_path, len(texts) - sum(computed)), (tmp_path / "whole", len(texts))):
        encoder = open_encoder(script.CachedEncoder, bert, folder, **flags)
        encoder.encode(texts, "document")
        assert encoder.meter["new"] == new
        encoder.close()
    assert count_cached(tmp_path / "whole/cache") == count_cached(tmp_path / "cache") == [len(texts)]
    assert len(stored_bytes(tmp_path / "whole")) == 2  # blocks, one of each chunk


class LateDevice:
    """Stands for a device that is no CUDA and reads what it is given later."""

    type = "mps"


def test_only_cuda_is_given_arrays_that_it_reads_later(bert, tmp_path, monkeypatch):
    """An array may be gone when another device reads it: what it is given, it has read when the call returns."""
    encoder = open_encoder(script.CachedEncoder, bert, tmp_path)
    seen = []
    to = torch.Tensor.to

    def recorded(self, device, *given, **options):
        if not isinstance(device, LateDevice):
            return to(self, device, *given, **options)
        seen.append(options.get("non_blocking", False))
        return self

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    monkeypatch.setattr(Accelerator, "device", property(lambda _: LateDevice()))
    encoder.forward({"input_ids": np.array([[2, 7, 3]]), "attention_mask": np.array([[1, 1, 1]])}, "document")
    assert seen == [False, False]
