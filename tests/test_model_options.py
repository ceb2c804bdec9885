"""LoRA adapters, attention, dropout, pooling, prompts, truncation, templates and gradient checkpointing."""

import importlib
import json
import os
import re
import shutil
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import ROOT, TRAINERS, few_or_all, launch, quick_first, weights, write_jsonl
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW, Dense, Normalize, Pooling, WordEmbeddings
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer
from test_best_model import train
from test_decoders import TEMPLATE, losses, make_decoder, make_encoder, make_reranker
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification

import eval_incremental
import prepare_corpus
import train_bi_encoder
import train_cross_encoder


def source_of(corpus):
    """Return the files of a folder as a glob; a file as it is."""
    return f"{corpus}/*.parquet" if corpus.is_dir() else corpus


def load_by(name, folder, *flags):
    """Return the model that a trainer loads."""
    script = importlib.import_module(name)
    words = ["--train_data", "x", "--columns", "a", "b", "--model_name_or_path", str(folder), *flags]
    return script.load_model(script.parse_args(words))


def load(folder, *flags):
    return load_by("train_bi_encoder", folder, *flags)


def flags_for(name, corpus, model, output, *more):
    own = ["--num_negatives", 2] * (name == "train_cross_encoder")
    return ["--train_data", source_of(corpus), "--columns", "docstring", "code", "--model_name_or_path", model,
            "--max_steps", 6, "--batch_size", 16, *own, "--eval_rows", 0, "--logging_steps", 1,
            "--learning_rate", 0.01, "--max_length", 48, "--dropout", 0, "--output_dir", output, *more]  # fmt: skip


def test_dropout_is_set_in_modules_and_configs(bert):
    from transformers import ModernBertConfig, ModernBertModel

    model = SentenceTransformer(str(bert), device="cpu")
    train_bi_encoder.set_dropout(model, 0.25)
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}
    assert model[0].model.config.hidden_dropout_prob == 0.25
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = ModernBertModel(ModernBertConfig(vocab_size=60000, attention_dropout=0.1, mlp_dropout=0.1, **shape))
    train_bi_encoder.set_dropout(model, 0.25)
    assert model.layers[0].attn.attention_dropout == model.config.attention_dropout == 0.25
    assert model.layers[0].mlp.drop.p == 0.25
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 9, "rotary_dim": 4}
    for kind in ("GPT2", "GPTJ", "CodeGen"):
        config = getattr(transformers, f"{kind}Config")(**shape, attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)
        model = getattr(transformers, f"{kind}Model")(config)
        train_bi_encoder.set_dropout(model, 0.25)
        assert {model.config.attn_pdrop, model.config.resid_pdrop, model.config.embd_pdrop} == {0.25}


PROMPTS = ["--query_prompt", "q: ", "--document_prompt", "d: "]


def test_pooling_prompts_and_length(bert, static, tmp_path):
    """They are saved with the model; impossible values are refused."""
    load(bert, "--pooling", "cls", *PROMPTS, "--max_length", "20").save_pretrained(str(tmp_path))
    model = SentenceTransformer(str(tmp_path), device="cpu")
    assert model.max_seq_length == 20 and model[1].pooling_mode == "cls"
    assert model.prompts["query"] == "q: " and model.prompts["document"] == "d: "
    with torch.no_grad():
        tokens = model.encode(["a text"], output_value="token_embeddings")[0]
        assert torch.allclose(torch.tensor(model.encode("a text")), tokens[0], atol=1e-6)
    model.set_pooling_include_prompt(False)
    model.save_pretrained(str(tmp_path / "without"))
    assert not load(tmp_path / "without", "--pooling", "mean")[1].include_prompt
    model = SentenceTransformer(str(static), device="cpu")
    model[0].tokenizer.enable_truncation(9, direction="left")
    model.save_pretrained(str(tmp_path / "left"))
    assert load(tmp_path / "left", "--max_length", "3")[0].tokenizer.truncation["direction"] == "left"
    assert load(static, "--max_length", "3")[0].tokenizer.truncation["direction"] == "right"
    with pytest.raises(train_bi_encoder.UserError, match="--pooling: the model has no pooling"):
        load(static, "--pooling", "cls")
    transformer = SentenceTransformer(str(bert), device="cpu")[0]
    words(tmp_path / "dense", transformer, Pooling(32, ("cls", "mean")), Dense(64, 8))
    assert load(tmp_path / "dense").get_embedding_dimension() == 8
    with pytest.raises(train_bi_encoder.UserError, match="--pooling mean gives 32 numbers, modules behind it take 64"):
        load(tmp_path / "dense", "--pooling", "mean")
    words(tmp_path / "no_dense", transformer, Pooling(32, ("cls", "mean")), Normalize())
    assert load(tmp_path / "no_dense", "--pooling", "mean").get_embedding_dimension() == 32
    with pytest.raises(train_bi_encoder.UserError, match="positions for 512 tokens, not for 2000: lower --max_length"):
        load(bert, "--max_length", "2000")


def test_a_similarity_that_is_not_computed(bert, tmp_path):
    SentenceTransformer(str(bert), device="cpu", similarity_fn_name="euclidean").save_pretrained(str(tmp_path))
    with pytest.raises(train_bi_encoder.UserError, match="similarity euclidean is not supported, only cosine and dot"):
        load(tmp_path)


def test_code_in_a_model_folder_is_refused_without_asking(bert, rows, tmp_path, monkeypatch):
    """transformers asks on a terminal whether to run it, unless it is told not to."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "n")
    folder = shutil.copytree(bert, tmp_path / "model")
    for file, code in (("config.json", {"AutoConfig": "new.New"}),
                       ("tokenizer_config.json", {"AutoTokenizer": ["new.New", None]})):  # fmt: skip
        settings = json.loads((bert / file).read_text()) | {"model_type": "unheard_of", "tokenizer_class": "New"}
        (folder / file).write_text(json.dumps(settings | {"auto_map": code}))
    (folder / "new.py").write_text("raise SystemExit('was run')")
    write_jsonl(tmp_path / "rows.jsonl", rows[:20])
    report = [str(tmp_path / "rows.jsonl"), "--length_report", "--model_name_or_path", str(folder)]
    loaders = {
        train_bi_encoder: lambda: load(folder),
        eval_incremental: lambda: eval_incremental.load_cross_encoder(str(folder), eval_incremental.Args()),
        prepare_corpus: lambda: prepare_corpus.main(prepare_corpus.parse_args(report)),
    }
    for script, loader in loaders.items():
        with pytest.raises(script.UserError, match="custom code") as error:
            loader()
        assert "\n" not in str(error.value) and not asked


@pytest.fixture
def halves(bert, reranker, tmp_path):
    """Folders of models in bfloat16: a bi-encoder, a reranker with a head, and one of several modules."""
    SentenceTransformer(str(bert), device="cpu").bfloat16().save_pretrained(str(tmp_path / "bi"))
    AutoModelForSequenceClassification.from_pretrained(reranker).bfloat16().save_pretrained(tmp_path / "head")
    transformers.AutoTokenizer.from_pretrained(reranker).save_pretrained(tmp_path / "head")
    make_reranker(tmp_path / "bi", tmp_path / "modular")
    return tmp_path


TRAINED = {  # beside adapters: (trainer, model, further options of peft, a weight that is trained)
    "biases": ("train_bi_encoder", "bi", {"bias": "all"}, "LayerNorm.bias"),
    "a module": ("train_bi_encoder", "bi", {"modules_to_save": ["word_embeddings"]}, "word_embeddings.weight"),
    "a head": ("train_cross_encoder", "head", {}, "classifier.weight"),
    "modules": ("train_cross_encoder", "modular", {}, "linear.weight"),
}
WAYS = [("no", 1), ("bf16", 2)]


@pytest.mark.parametrize("case, way", few_or_all([*zip(TRAINED, WAYS * 2)], TRAINED, WAYS))
def test_what_is_trained_beside_adapters_is_float32(case, way, corpus, halves, monkeypatch):
    """A rate below the spacing of bfloat16 changes all of it, with evaluations between the steps, and saved weights
    are float32. Frozen matrices remain as in the file, where a launch has autocast."""
    (name, model, options, trained), (precision, processes) = TRAINED[case], way
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    adapters = ["--lora_rank", 2, "--lora_kwargs", json.dumps(options)]
    loaded = load_by(name, halves / model, *map(str, adapters))
    assert {weight.dtype for weight in loaded.parameters() if weight.requires_grad} == {torch.float32}
    frozen = {weight.dtype for weight in loaded.parameters() if not weight.requires_grad and weight.ndim > 1}
    assert frozen == {torch.float32 if precision == "no" else torch.bfloat16}
    flags = flags_for(name, corpus, halves / model, halves / "out", "--learning_rate", 2e-5, *adapters)
    more = ["--max_steps", 2, "--eval_rows", 8, "--eval_steps", 1, "--warmup_ratio", 0]
    launch(ROOT / f"{name}.py", *flags, *more, processes=processes)
    before, after = load_weights(halves / model), load_weights(halves / "out/model")
    assert {tensor.dtype for tensor in after.values() if tensor.is_floating_point()} == {torch.float32}
    for key in before:
        if key.endswith(trained) and "embeddings.L" not in key:
            changed = (after[key] != before[key].float()).float().mean()
            assert changed > (0.1 if trained.startswith("word") else 0.9), key  # few words occur
        elif "word_embeddings" in key:
            assert torch.equal(after[key], before[key].float())


def load_weights(folder):
    """Return the weights of all modules of a saved model."""
    found = {}
    for path in folder.rglob("model.safetensors"):
        found |= {f"{path.parent.relative_to(folder)}/{name}": tensor for name, tensor in load_file(path).items()}
    return found


def test_saved_files_are_as_the_umask_says(corpus, bert, tmp_path):
    """safetensors lets the owner alone read what it writes."""
    before = os.umask(0o027)
    try:
        train("train_bi_encoder", *flags_for("train_bi_encoder", corpus, bert, tmp_path / "out", "--max_steps", 1))
    finally:
        os.umask(before)
    files = [path for part in ("model", "checkpoints") for path in (tmp_path / "out" / part).rglob("*.*")]
    files = [path for path in files if path.is_file()]
    assert len(files) > 8 and {oct(path.stat().st_mode & 0o777) for path in files} == {"0o640"}


def test_adapters_of_a_model_without_a_transformer(static):
    with pytest.raises(train_bi_encoder.UserError, match="^--lora_rank: the model has no transformer"):
        load(static, "--lora_rank", "2")


def load_to_evaluate(folder, **flags):
    """Return the bi-encoder that the evaluator loads."""
    return eval_incremental.load_bi_encoder(str(folder), eval_incremental.Args(**flags))


def words(folder, *modules):
    SentenceTransformer(modules=[*modules], device="cpu").save_pretrained(str(folder), create_model_card=False)


VOCABULARY = ["red", "pie"]
OTHER_KINDS = {
    "CrossEncoder": lambda base, folder: make_reranker(base, folder),
    "WordEmbeddings": lambda base, folder: words(
        folder, WordEmbeddings(WhitespaceTokenizer(VOCABULARY, stop_words=[]), torch.randn(2, 8)), Pooling(8)
    ),
    "BoW": lambda base, folder: words(folder, BoW(VOCABULARY)),
}


def open_to_evaluate(folder):
    eval_incremental.open_encoder(str(folder), eval_incremental.Args(), None)


@pytest.mark.parametrize("load_model", [load, open_to_evaluate])
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_models_of_other_kinds_are_refused_by_name(kind, load_model, bert, tmp_path):
    """sentence-transformers would pool what the transformer alone gives, or end in a traceback at the first text."""
    OTHER_KINDS[kind](bert, tmp_path / "model")
    with pytest.raises(ValueError, match=f"^--model_name_or_path {tmp_path}/model: .*{kind}") as error:
        load_model(tmp_path / "model")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("load_model", [load, load_to_evaluate])
def test_lengths_by_role(load_model, bert, tmp_path):
    """A length that is given holds for both roles, and is saved so; without it, the model's own hold."""
    folder = shutil.copytree(bert, tmp_path / "model")
    options = json.loads((folder / "sentence_bert_config.json").read_text())
    lengths = {"query_length": 6, "document_length": 12}
    (folder / "sentence_bert_config.json").write_text(json.dumps(options | lengths))
    for given, expected in ((None, [6, 12]), (4, [4, 4]), (64, [64, 64])):
        if load_model is load:
            model = load(folder, *(["--max_length", str(given)] if given else []))
        else:
            model = load_to_evaluate(folder, max_length=given)
        model.save_pretrained(str(tmp_path / str(given)))
        for found in (model, SentenceTransformer(str(tmp_path / str(given)), device="cpu")):
            read = [found.preprocess(["a b " * 99], task=role)["input_ids"] for role in ("query", "document")]
            assert [ids.shape[1] for ids in read] == expected, given
    with pytest.raises(train_bi_encoder.UserError, match="^6 tokens: no room for a text"):
        load(folder, "--query_prompt", "a b c d e f ")
    load(folder, "--document_prompt", "a b c d e f ")


def test_a_document_prompt_that_is_turned_off(bert, tmp_path):
    """Other names of it in the folder do not bring it back: in the evaluator, or in a second training."""
    for name in ("passage", "corpus"):
        prompts = {"query": "q: ", name: "d: "}
        SentenceTransformer(str(bert), device="cpu", prompts=prompts).save_pretrained(str(tmp_path / "model"))
        for flags, expected in (([], "d: "), (["--document_prompt", ""], ""), (["--document_prompt", "x: "], "x: ")):
            load(tmp_path / "model", *flags).save_pretrained(str(tmp_path / "trained"))
            assert load(tmp_path / "trained").prompts["document"] == expected
            encoder = SimpleNamespace(model=load_to_evaluate(tmp_path / "trained"))
            eval_incremental.CachedEncoder.set_prompts(encoder, eval_incremental.Args())
            assert encoder.prompts == {"query": "q: ", "document": expected}


def test_a_saved_length_beyond_the_positions(tmp_path):
    """The evaluator measures a model as it was saved; one that is trained would be saved with its positions alone."""
    folder = make_decoder(tmp_path / "model")
    SentenceTransformer(str(folder), device="cpu").save_pretrained(str(folder))
    options = json.loads((folder / "sentence_bert_config.json").read_text())
    (folder / "sentence_bert_config.json").write_text(json.dumps(options | {"max_seq_length": 600}))
    assert load_to_evaluate(folder).max_seq_length == 600
    with pytest.raises(train_bi_encoder.UserError, match="own length of 600 .* 512 positions: set --max_length"):
        load(folder)
    assert load(folder, "--max_length", "512").max_seq_length == 512
    (folder / "sentence_bert_config.json").write_text(json.dumps(options | {"max_seq_length": 10**30}))  # none
    assert load(folder).max_seq_length == load_to_evaluate(folder).max_seq_length == 512


def test_full_determinism(corpus, bert, tmp_path, monkeypatch):
    """transformers is asked for deterministic kernels; on a CPU, nothing else changes."""
    name, requested = "train_bi_encoder", []
    monkeypatch.setattr(train_bi_encoder.transformers, "enable_full_determinism", requested.append)
    for more in ([], ["--full_determinism", "--seed", 3], ["--seed", 3]):
        train(name, *flags_for(name, corpus, bert, tmp_path / str(len(more)), "--max_steps", 2, *more))
    assert requested == [3] and losses(tmp_path / "3") == losses(tmp_path / "2") != losses(tmp_path / "0")
    load_by(name, bert, "--seed", str(2**32))
    for trainer, seed, more in product(TRAINERS, (2**32, 2**64), (["--full_determinism"], [])):
        if more or seed == 2**64:
            with pytest.raises(ValueError, match="^--seed is below"):
                load_by(trainer, bert, "--seed", str(seed), *more)


@pytest.mark.parametrize("name, output", quick_first(zip(TRAINERS, ["encode", "score"])))
def test_graphs_of_sixteen_passes_are_kept(name, output, corpus, bert, tmp_path, monkeypatch):
    """The others run again, each with its own graph; with --grad_cache true all of them."""
    script, seen = importlib.import_module(name), []
    real = getattr(script, output)
    monkeypatch.setattr(script, output, lambda *args: seen.append(torch.is_grad_enabled()) or real(*args))
    flags = flags_for(name, corpus, bert, tmp_path / "x", "--batch_size", 32, "--max_steps", 1, "--max_length", 100)
    for kept, more in ((16, []), (0, ["--grad_cache", "true"])):
        seen.clear()
        train(name, *flags, "--micro_batch_tokens", 128, "--output_dir", tmp_path / str(kept), *more)
        again = (len(seen) - kept) // 2
        assert again > 4 and seen == [True] * kept + [False] * again + [True] * again


def test_dropout_differs_from_step_to_step(rows, bert, tmp_path):
    """The same batch twice, with a negligible learning rate: only the masks can change the loss."""
    name, more = "train_bi_encoder", ["--max_steps", 2, "--shuffle_buffer", 0, "--learning_rate", 1e-12]
    write_jsonl(tmp_path / "x.jsonl", rows[:16])
    for dropout in (0.0, 0.1):
        flags = flags_for(name, tmp_path / "x.jsonl", bert, tmp_path / f"{dropout}", "--dropout", dropout)
        train(name, *flags, *more)
    one, two = losses(tmp_path / "0.0")
    assert one == pytest.approx(two, rel=1e-6)
    one, two = losses(tmp_path / "0.1")
    assert abs(one - two) > 1e-5


def test_a_parameter_group_keeps_its_own_learning_rate(corpus, bert, tmp_path, monkeypatch):
    """Half the rate for matrices, and none for biases and norms, also after a resume; the schedule multiplies both."""
    name, rates, adamw = "train_bi_encoder", [], torch.optim.AdamW

    def edited(groups, lr, fused):
        optimizer = adamw([{**groups[0], "peak": lr / 2}, {**groups[1], "peak": 0.0}], lr=lr, fused=fused)
        optimizer.register_step_pre_hook(lambda *_: rates.append([group["lr"] for group in optimizer.param_groups]))
        return optimizer

    monkeypatch.setattr(torch.optim, "AdamW", edited)
    flags = flags_for(name, corpus, bert, tmp_path, "--save_steps", 3, "--warmup_ratio", 0.5)
    train(name, *flags)
    for folder in ("checkpoints/step_00000006", "model"):
        shutil.rmtree(tmp_path / folder)
    train(name, *flags, "--resume")
    expected = [[0.005 * factor, 0.0] for factor in (1 / 3, 2 / 3, 1, 2 / 3, 1 / 3)]
    steps = [pair for pair in rates if pair != [0.0, 0.0]]  # the first, and torch's loading of an optimizer's state
    assert np.allclose(steps[:5], expected) and steps[5:] == steps[2:5]


def test_gradient_checkpointing(corpus, bert, tmp_path):
    """Layers run again in the backward pass, with the same dropout, so that the losses are the same."""
    name, passes = "train_bi_encoder", []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: passes.append(module.training) if type(module).__name__ == "BertSelfAttention" else None
    )
    with hook:
        for number, more in enumerate(([], ["--grad_cache", "true", "--lora_rank", 2])):
            found = []
            for how in ([], ["--gradient_checkpointing"]):
                flags = flags_for(name, corpus, bert, tmp_path / f"{number}{len(how)}", "--dropout", 0.1, *more, *how)
                passes.clear()
                train(name, *flags, "--max_steps", 2, "--micro_batch_tokens", 600)
                found.append((sum(passes), losses(tmp_path / f"{number}{len(how)}")))
            (few, expected), (many, again) = found
            assert again == pytest.approx(expected, rel=1e-6) and len(again) == 2
            # Less than twice with --grad_cache: of its two passes only one has a graph.
            assert many > 1.4 * few if "--grad_cache" in more else many > 1.9 * few


def test_prompts_of_sources(rows, bert, tmp_path):
    """Held-out rows have those of their source; those of the run are saved with the model."""
    for number in range(2):
        write_jsonl(tmp_path / f"{number}.jsonl", rows[number:80:2])
    second = json.dumps({"path": str(tmp_path / "1.jsonl"), "query_prompt": "two: "})
    flags = ["--train_data", str(tmp_path / "0.jsonl"), second, "--eval_rows", "10", "--model_name_or_path", str(bert)]
    flags += ["--query_prompt", "one: ", "--document_prompt", "code: ", "--columns", "docstring", "code"]
    args, accelerator = train_bi_encoder.parse_args(flags), Accelerator(cpu=True)
    model = train_bi_encoder.load_model(args)
    args = train_bi_encoder.resolve_args(args, model, accelerator)
    data = train_bi_encoder.open_data(args)
    texts = {row["docstring"]: row["code"] for row in rows[:80]}
    evaluators = train_bi_encoder.open_evaluators(data, model, args)
    assert list(evaluators) == ["held_out_0_cosine_ndcg@10", "held_out_1_cosine_ndcg@10"]
    for prompt, (evaluator, prompts) in zip(("one: ", "two: "), evaluators.values()):
        assert prompts == {"query": prompt, "document": "code: "}
        assert len(evaluator.queries) == 5
        for query in evaluator.queries:
            assert evaluator.relevant_docs[train_bi_encoder.fold(query)] == {train_bi_encoder.fold(texts[query])}
    assert model.prompts["query"] == "one: " and model.prompts["document"] == "code: "


def load_reranker(folder, *flags):
    """Return (CrossEncoder of the flags, Args)."""
    words = ["--train_data", "x", "--columns", "a", "b", "--model_name_or_path", str(folder), *flags]
    args = train_cross_encoder.parse_args(words)
    return train_cross_encoder.load_model(args).eval(), args


def pair_features(model, pairs):
    """Return [(token ids, token types)] of pairs, as in training."""
    found = {}
    args, given = train_cross_encoder.Args(micro_batch_tokens=400), [(None, pair) for pair in pairs]
    for _, cut, features in train_cross_encoder.make_micro_batches(model, given, args, Accelerator(cpu=True)):
        mask = features.get("attention_mask", np.ones_like(features["input_ids"])).astype(bool)
        for i, number in enumerate(cut):
            parts = (features[part][i][mask[i]].tolist() for part in ("input_ids", "token_type_ids"))
            found[int(number)] = tuple(parts)
    return [found[i] for i in range(len(pairs))]


def test_template(rows, bert):
    """A template like the model's own format changes nothing; the fixed parts of a template are never truncated."""
    pairs = [(row["docstring"], row["code"]) for row in rows[:40]] + [("a", "b"), ("read " * 90, "a file")]
    own, _ = load_reranker(bert, "--max_length", "40")
    same, _ = load_reranker(bert, "--max_length", "40", "--template", "[CLS]{query}[SEP]{document}[SEP]")
    assert pair_features(same, pairs) == pair_features(own, pairs)
    parts = "[CLS] find the code: ", "[SEP]", " is it a function?[SEP]"
    template = "{query}".join(parts[:2]) + "{document}" + parts[2]
    model, _ = load_reranker(bert, "--max_length", "40", "--template", template)
    tokenizer, long = transformers.AutoTokenizer.from_pretrained(bert), 0
    first, middle, last = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts)
    for pair, (ids, types) in zip(pairs, pair_features(model, pairs)):
        query, document = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in pair)
        room, half = 40 - len(first + middle + last), (40 - len(first + middle + last)) // 2
        long += len(query + document) > room
        assert ids[: len(first)] == first and ids[-len(last) :] == last
        assert len(ids) == min(40, len(first + query + middle + document + last))
        begin = len(first)
        end = begin + next(n for n in range(len(ids)) if ids[begin + n : begin + n + len(middle)] == middle)
        kept = ids[begin:end], ids[end + len(middle) : -len(last)]
        assert kept == (query[: len(kept[0])], document[: len(kept[1])])
        assert len(kept[0]) >= min(half, len(query)) and len(kept[1]) >= min(half, len(document))
        assert types == [0] * (end + len(middle)) + [1] * (len(kept[1]) + len(last))
    assert long > 20


def test_wrong_templates():
    message = "--template must contain {query} and {document} once each"
    with pytest.raises(train_cross_encoder.UserError, match=message):
        load_reranker("x", "--template", "{query} {document} {query}")


def test_gradients_of_micro_batches_add_up_in_float32(corpus, bert, tmp_path, monkeypatch, request):
    """Also in bf16, where their graphs share one copy of each weight; with --grad_cache, each pass has its own."""
    script, gradients = train_bi_encoder, []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)  # for later tests in this process
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    forward_backward = script.forward_backward

    def recorded(model, batch, *args):
        loss = forward_backward(model, batch, *args)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert len(batch.micro_batches) > 4
        return loss

    monkeypatch.setattr(script, "forward_backward", recorded)
    request.addfinalizer(lambda: AcceleratorState._reset_state(reset_partial_state=True))
    for cache in ("false", "true"):
        AcceleratorState._reset_state(reset_partial_state=True)
        more = ["--max_steps", 1, "--micro_batch_tokens", 200, "--grad_cache", cache]
        train("train_bi_encoder", *flags_for("train_bi_encoder", corpus, bert, tmp_path / cache, *more))
    assert ((gradients[1] - gradients[0]).norm() / gradients[0].norm()).item() < 1e-6


def test_positions_of_roberta(bert, tmp_path):
    """They begin after the id of the padding: with 130 embeddings and id 1, a text has at most 128 tokens."""
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.RobertaConfig(vocab_size=1000, pad_token_id=1, max_position_embeddings=130, **shape)
    shutil.copytree(bert, tmp_path / "model")
    transformers.RobertaModel(config).save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", "--max_length", "128")
    tokens = model.tokenizer("word " * 1000, truncation=True, return_tensors="pt")
    assert tokens["input_ids"].shape == (1, 128)
    model.transformers_model(**tokens)
    with pytest.raises(train_bi_encoder.UserError, match="positions for 128 tokens, not for 129: lower --max_length"):
        load(tmp_path / "model", "--max_length", "129")


@pytest.mark.parametrize("kind, limit", [("RobertaModel", 129), ("MPNetModel", 128)])
def test_a_tokenizer_without_a_limit(kind, limit, bert, tmp_path):
    """Texts are truncated to the positions, of which those of these models begin after the padding's."""
    folder = make_encoder(tmp_path / "model", kind, bert)
    edit = json.loads((folder / "tokenizer_config.json").read_text()) | {"model_max_length": 10**30}
    (folder / "tokenizer_config.json").write_text(json.dumps(edit))
    for model in (load(folder), load_to_evaluate(folder)):
        assert model.max_seq_length == limit and model.encode("a " * 999).shape == (32,)
    with pytest.raises(eval_incremental.UserError, match=f"for {limit} tokens, not for 130: lower"):
        load_to_evaluate(folder, max_length=130)


class Own(torch.nn.Module):
    """A module of one's own."""

    def forward(self, features):
        return features


def test_a_module_of_ones_own_gets_the_attention_mask(bert):
    """Also where nothing is padded."""
    args, texts = train_bi_encoder.Args(micro_batch_tokens=100), [("document", "", "a text")]
    model = load(bert)
    model.append(Own())
    ((_, _, features),) = train_bi_encoder.make_micro_batches(model, texts, args, Accelerator(cpu=True))
    assert features["attention_mask"].all()


@pytest.mark.parametrize("load_model", [load, load_to_evaluate])
@pytest.mark.parametrize("kind", ["bert", "static"])
def test_tokens_without_embeddings(kind, load_model, request, tmp_path):
    """Added to the tokenizer, but not to the model: refused, as the first text that has one would end the run."""
    folder = shutil.copytree(request.getfixturevalue(kind), tmp_path / "model")
    load_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["<new>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    expected = f"{folder}: the tokenizer has 1001 tokens.* 1000 embeddings.*resize_token_embeddings"
    with pytest.raises(ValueError, match=expected):
        load_model(folder)


def test_a_token_of_images_needs_no_embedding(bert, tmp_path):
    """Gemma's tokenizer has one, which no text contains, although its models of texts have no embedding of it."""
    folder = shutil.copytree(bert, tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens={"image_token": "<image>"})
    tokenizer.save_pretrained(folder)
    assert len(tokenizer) == 1001 and load(folder).tokenizer.image_token == "<image>"


@pytest.mark.parametrize("name, pattern", [
    ("train_bi_encoder", "^"), ("train_cross_encoder", r"^encoder\.layer\.1\."), ("eval_incremental", "^embeddings"),
])  # fmt: skip
def test_weights_that_do_not_fit(pattern, name, bert, tmp_path):
    """Those of another kind of model, in all layers, one or the embeddings, would be random: refused."""
    folder = shutil.copytree(bert, tmp_path / "model")
    path = folder / "model.safetensors"
    save_file({re.sub(pattern, "trunk.", name): tensor for name, tensor in load_file(path).items()}, path)
    script = importlib.import_module(name)
    with pytest.raises(script.UserError, match=r"model: .* weights, such as (\w+\.)*(weight|bias)"):
        if name == "eval_incremental":
            script.load_bi_encoder(str(folder), script.Args())
        else:
            load_by(name, folder)


REMOTE = """
import safetensors.torch
import transformers

class New(transformers.BertModel):
    @classmethod
    def from_pretrained(cls, path, config, **options):
        model = cls(config)
        model.load_state_dict(safetensors.torch.load_file(f"{path}/model.safetensors"))
        return model
"""


def test_remote_code_that_loads_weights_by_itself(bert, tmp_path):
    """It does not mark those that it has loaded, and is trusted."""
    folder = shutil.copytree(bert, tmp_path / "own_loader")
    (folder / "new.py").write_text(REMOTE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "new.New"}}))
    model = load(folder, "--trust_remote_code")
    assert type(model[0].model).__name__ == "New"
    saved = load_file(folder / "model.safetensors")["pooler.dense.weight"]
    assert torch.equal(model[0].model.pooler.dense.weight, saved)


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM", "ModernBertModel",
                                  "T5ForConditionalGeneration", "T5EncoderModel"])  # fmt: skip
def test_a_head_and_a_pooler_may_be_new(kind, bert, tmp_path):
    """Published models often lack the pooler that no embedding needs, and no pretrained model has a reranker's head. A
    reranker made of an encoder alone would have a random decoder."""
    folder = tmp_path / "model"
    make_encoder(folder, kind, bert)
    load(folder)
    if kind == "T5EncoderModel":
        with pytest.raises(train_cross_encoder.UserError, match="such as transformer.decoder"):
            load_reranker(folder)
    else:
        load_reranker(folder)


@pytest.mark.parametrize("kind, tied", [("Qwen3Model", False), ("Qwen3ForCausalLM", True)])
def test_a_decoder_may_have_a_new_head(kind, tied, tmp_path):
    """Also where the weights of the last layer are those of the embeddings."""
    folder = make_decoder(tmp_path / "model", kind)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    load(folder)
    load_reranker(folder, "--template", TEMPLATE)
    if not tied:  # but not the layer whose logits of words are scores
        base = make_decoder(tmp_path / "words", "Qwen3ForCausalLM")
        kept = load_file(base / "model.safetensors")
        kept.pop("lm_head.weight")
        save_file(kept, base / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(train_cross_encoder.UserError, match="lack 1 weights, such as lm_head.weight"):
            load_reranker(base, "--template", TEMPLATE)


@pytest.mark.parametrize("kind", ["XLNetModel", "T5EncoderModel"])
def test_no_limit_of_positions(kind, bert, tmp_path):
    """XLNet's is -1, T5 has none. The tokenizer's limit counts, or --max_length; without any, texts are not cut."""
    folder = make_encoder(tmp_path / "model", kind, bert)
    for own, given, expected in ((128, [], 128), (10**30, ["--max_length", "9"], 9), (10**30, [], 1002)):
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"model_max_length": own}))
        ids = load(folder, *given)[0].preprocess(["a " * 1000])["input_ids"]
        assert ids.shape[1] == expected, (own, given)


def test_gradient_checkpointing_without_support(bert, tmp_path):
    folder = make_encoder(tmp_path / "model", "MPNetModel", bert)
    load(folder)
    message = "^--gradient_checkpointing: the model does not support it: ."
    with pytest.raises(train_bi_encoder.UserError, match=message):
        load(folder, "--gradient_checkpointing")


def test_matryoshka_dims_of_a_model_that_truncates_its_embeddings(corpus, bert, tmp_path):
    """Training has all 32 dimensions, of which the model was saved to use 16. It is saved so again."""
    model = SentenceTransformer(str(bert), device="cpu", truncate_dim=16)
    model.save_pretrained(str(tmp_path / "model"))
    flags = flags_for("train_bi_encoder", corpus, tmp_path / "model", tmp_path / "out", "--max_steps", 2)
    train("train_bi_encoder", *flags, "--matryoshka_dims", 32, 8)
    saved = SentenceTransformer(str(tmp_path / "out/model"), device="cpu")
    assert saved.truncate_dim == 16 and saved.encode("a text").shape == (16,)
    with pytest.raises(train_bi_encoder.UserError, match="--matryoshka_dims: the embeddings have only 32 dimensions"):
        train("train_bi_encoder", *flags, "--matryoshka_dims", 33, "--output_dir", tmp_path / "more")


@pytest.mark.parametrize("name, where", list(zip(TRAINERS, ["config.json", "sentence_bert_config.json"])))
def test_the_models_own_attention_is_the_default(name, where, bert, reranker, tmp_path):
    folder = shutil.copytree(bert if name == "train_bi_encoder" else reranker, tmp_path / "model")
    config = json.loads((folder / where).read_text())
    own = {"attn_implementation": "eager"}
    (folder / where).write_text(json.dumps(config | (own if where == "config.json" else {"model_kwargs": own})))
    for flags, expected in (([], "eager"), (["--attn_implementation", "sdpa"], "sdpa")):
        assert load_by(name, folder, *flags).config._attn_implementation == expected
    with pytest.raises(ValueError, match="^--model_name_or_path .*flash_attention_9"):
        load_by(name, folder, "--attn_implementation", "flash_attention_9")


def test_a_folder_of_adapters(bert, tmp_path):
    """Refused, as they would not be trained, or not be merged at the end."""
    folder = tmp_path / "model"
    base = transformers.AutoModel.from_pretrained(bert)
    get_peft_model(base, LoraConfig(target_modules=["query"], init_lora_weights=False)).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(folder)
    for flags in ([], ["--lora_rank", "2"]):
        with pytest.raises(ValueError, match=f"^--model_name_or_path {folder}: .* merge the adapters first, "):
            load(folder, *flags)


NEW = [
    ("BertForMaskedLM", {"bert.pooler.dense", "classifier"}),  # whose files have no pooler
    ("DistilBertForMaskedLM", {"pre_classifier", "classifier"}),
    ("DebertaV2Model", {"pooler.dense", "classifier"}),
    ("ModernBertModel", {"head.dense", "head.norm", "classifier"}),
    ("XLNetModel", {"sequence_summary.summary", "logits_proj"}),
]


@pytest.mark.parametrize("kind, new", quick_first(NEW))
def test_what_is_new_is_trained_beside_adapters(kind, new, corpus, bert, tmp_path):
    """Heads and poolers that the files lack, whatever their names, are trained as they are; matrices of layers change
    by matrices of the given rank, and nothing else. Checkpoints have all of it: a resume with another seed, by which
    other heads are drawn, saves the same bytes."""
    folder = make_encoder(tmp_path / "model", kind, bert)
    flags = flags_for("train_cross_encoder", corpus, folder, tmp_path / "out", "--lora_rank", 2, "--max_steps", 2)
    before, _ = load_reranker(folder)
    train("train_cross_encoder", *flags)
    after = CrossEncoder(str(tmp_path / "out/model"), device="cpu").state_dict()
    changed = {name: after[name] - tensor for name, tensor in before.state_dict().items()}
    changed = {name.removeprefix("0.model."): change for name, change in changed.items() if change.any()}
    assert {name.rpartition(".")[0] for name in changed} >= new
    layers = {name: change for name, change in changed.items() if name.rpartition(".")[0] not in new}
    ranks = {int(torch.linalg.matrix_rank(change, atol=1e-5)) for change in layers.values()}
    assert ranks == {2} and len(layers) >= 4 and all(".layer" in name for name in layers)
    saved = weights(tmp_path / "out/model")
    shutil.rmtree(tmp_path / "out/model")
    train("train_cross_encoder", *flags, "--resume", "--accept_changes", "--seed", 5)
    assert torch.equal(weights(tmp_path / "out/model"), saved)


def test_a_head_that_is_unknown_gets_no_adapters(reranker, monkeypatch):
    monkeypatch.setattr(transformers.BertForSequenceClassification, "base_model_prefix", "body")
    with pytest.raises(train_cross_encoder.UserError, match="^--lora_rank, .*: its base_model_prefix names no part"):
        load_reranker(reranker, "--lora_rank", "2")


def test_padding_on_the_left_with_absolute_positions(bert, tmp_path):
    """Padding would move a text's positions: its embedding would depend on the texts beside it."""
    folder = shutil.copytree(bert, tmp_path / "left")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"padding_side": "left"}))
    message = "left: pads on the left, .*: save it with padding_side right"
    with pytest.raises(train_bi_encoder.UserError, match=message):
        load(folder)
