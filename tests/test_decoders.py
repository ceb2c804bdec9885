"""Models whose last token counts (decoders that embed, yes/no rerankers), and adapters."""

import importlib
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate import Accelerator
from conftest import ROOT, TRAINERS, launch, metrics, train, weights, write_jsonl
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Pooling, StaticEmbedding
from test_fsdp2 import launch_sharded
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

import eval_incremental
import train_bi_encoder
import train_cross_encoder

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "intermediate_size": 64, "vocab_size": 300, "max_position_embeddings": 512}  # fmt: skip
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<answer>"
TEMPLATE = "<bos>Query: {query}\nDocument: {document}\nRelevant: "


def decoder_tokenizer(side="right", ending="<end>", padding="<pad>"):
    """Return a byte-level tokenizer that appends `ending`, which has "yes" and "no" as tokens."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<end>", "<bos>", "<emb>", "ye", "yes", "no"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, [("y", "e"), ("ye", "s"), ("n", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if ending:
        special = [(ending, vocabulary[ending])]
        tokenizer.add_special_tokens([ending])
        tokenizer.post_processor = TemplateProcessing(single=f"$A {ending}", special_tokens=special)
    options = {"eos_token": "<end>", "bos_token": "<bos>", "padding_side": side, "model_max_length": 64}
    if padding:
        options["pad_token"] = padding
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def make_decoder(folder, name="Qwen3Model", chat=None, scale=3, **options):
    """Write a tiny decoder with random weights, large enough for texts to have different embeddings."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    padding = 256 if options.get("padding", "<pad>") else None
    model = kind(kind.config_class(**SHAPE, pad_token_id=padding, eos_token_id=257, bos_token_id=258))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    model.save_pretrained(folder)
    tokenizer = decoder_tokenizer(**options)
    tokenizer.chat_template = chat
    tokenizer.save_pretrained(folder)
    return folder


def make_encoder(folder, name, bert):
    """Write a tiny encoder of a kind with the tokenizer of `bert`."""
    kind = getattr(transformers, name)
    shape = {"vocab_size": 1000, "pad_token_id": 0, "hidden_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 130}  # fmt: skip
    if name.startswith("T5"):
        shape = {"vocab_size": 1000, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    if name.startswith("Deberta"):
        shape |= {"pooler_hidden_size": 32}
    if name.startswith("XLNet"):
        shape = {"vocab_size": 1000, "d_model": 32, "d_inner": 64, "n_layer": 2, "n_head": 2}
    torch.manual_seed(0)
    kind(kind.config_class(**shape)).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(folder)
    return folder


def make_reranker(base, folder, pooling="mean", labels=1):
    """Save a reranker on the transformer of `base`: pooling, a hidden layer and a head with random weights."""
    transformer = SentenceTransformer(str(base), device="cpu")[0]
    torch.manual_seed(0)
    hidden = Dense(32, 32, activation_function=torch.nn.GELU())
    head = Dense(32, labels, activation_function=torch.nn.Identity(), module_output_name="scores")
    modules = [transformer, Pooling(32, pooling_mode=pooling), hidden, LayerNorm(32), head]
    CrossEncoder(modules=modules, device="cpu").save_pretrained(str(folder))
    return folder


def load(name, folder, *flags):
    """Return (script, args, model) of a trainer."""
    script = importlib.import_module(name)
    words = ["--train_data", "x", "--columns", "a", "b", "--model_name_or_path", str(folder)]
    args = script.parse_args([*words, "--micro_batch_tokens", "400", *flags])
    model = script.load_model(args)
    args = script.resolve_args(args, model, Accelerator(cpu=True))
    return script, args, model


@torch.no_grad()
def embed(model, texts, args, role="query"):
    """Return the embedding of each text, as in training."""
    found, accelerator = {}, Accelerator(cpu=True)
    given = [(role, model.prompts[role], text) for text in texts]
    made = train_bi_encoder.make_micro_batches(model, given, args, accelerator)
    for role, indices, features in made:
        features = train_bi_encoder.convert_arrays(features)
        found |= zip(indices, train_bi_encoder.encode(model, role, features, accelerator))
    assert len(made) > 1 or any(isinstance(module, StaticEmbedding) for module in model.modules())
    return torch.stack([found[index] for index in range(len(texts))])


@torch.no_grad()
def score_pairs(model, pairs, args):
    """Return the score of each pair, as in training."""
    accelerator, scores = Accelerator(cpu=True), torch.full((len(pairs),), torch.nan)
    given = [(model.prompts.get(model.default_prompt_name), pair) for pair in pairs]
    made = train_cross_encoder.make_micro_batches(model, given, args, accelerator)
    for _, indices, features in made:
        features = train_cross_encoder.convert_arrays(features)
        scores[indices] = train_cross_encoder.score(model, features, accelerator)
    assert len(made) > 1
    return scores.tolist()


TEXTS = ["a", *(f"a text of {n} words {'and more ' * n}" for n in range(12)), "a long text " * 50]


def check(name, folder, *flags, tolerance=1e-5):
    """Compare the outputs of micro-batches with those of the library."""
    _, args, model = load(name, folder, *flags)
    model.eval()
    if name == "train_bi_encoder":
        for role in ("query", "document"):
            encode = getattr(model, f"encode_{role}")
            expected = torch.stack([encode(text, convert_to_tensor=True) for text in TEXTS])
            found = embed(model, TEXTS, args, role)
            assert (found - expected.float()).norm() <= tolerance * expected.float().norm()
    else:
        pairs = list(zip(TEXTS, TEXTS[::-1]))
        expected = model.predict(pairs, activation_fn=torch.nn.Identity(), convert_to_tensor=True).tolist()
        assert score_pairs(model, pairs, args) == pytest.approx(expected, rel=tolerance, abs=tolerance)


def flags_of(corpus, model, output, *more):
    return ["--train_data", f"{corpus}/*.parquet", "--columns", "docstring", "code", "--model_name_or_path", model,
            "--max_steps", 6, "--batch_size", 16, "--eval_rows", 8, "--logging_steps", 1, "--eval_steps", 3,
            "--save_steps", 3, "--learning_rate", 1e-3, "--num_negatives", 2, "--micro_batch_tokens", 700,
            "--output_dir", output, *more]  # fmt: skip


def losses(output):
    return [line["loss"] for line in metrics(output) if "loss" in line]


def resume_from_step_3(name, output, flags):
    """Undo a run's second half, and let a resumed run repeat it."""
    shutil.rmtree(output / "checkpoints/step_00000006")
    shutil.rmtree(output / "model")
    train(name, *flags, "--resume")


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 9, 20, 64],
            "original_max_position_embeddings": 32}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("name, options", [
    ("Phi3Model", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    ("Gemma3TextModel", {"rope_parameters": {"full_attention": LONGROPE, "sliding_attention": DEFAULT}}),
])  # fmt: skip
def test_positions_that_depend_on_the_longest_text_of_a_pass(name, options, tmp_path):
    """Refused if a text may be longer than the original length; at that length, a text does not depend on others."""
    folder = make_decoder(tmp_path / "model", name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | options))
    message = r"longrope above 32 tokens depends on the other texts of a pass: set --max_length 32 "
    for trainer in TRAINERS:
        with pytest.raises(ValueError, match=f"^--model_name_or_path {folder}: {message}"):
            load(trainer, folder)
        check(trainer, folder, "--max_length", "32")
    with pytest.raises(ValueError, match=message):
        eval_incremental.load_bi_encoder(str(folder), eval_incremental.Args())
    CrossEncoder(str(folder), device="cpu", num_labels=1).save_pretrained(str(tmp_path / "reranker"))
    with pytest.raises(ValueError, match=f"^--cross_encoder .*{message}.*--rerank_max_length 32"):
        eval_incremental.load_cross_encoder(str(tmp_path / "reranker"), eval_incremental.Args())
    eval_incremental.load_cross_encoder(str(tmp_path / "reranker"), eval_incremental.Args(rerank_max_length=32))


@pytest.mark.parametrize("options, most", [
    ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 32}, 32),  # as remote code has it
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, 100),
    ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 32}}, 10**6),
    ({"rope_parameters": None}, 10**6),
])  # fmt: skip
def test_lengths_of_rotary_positions(options, most):
    config = SimpleNamespace(max_position_embeddings=100, **options)
    config.get_text_config = lambda: config
    module = SimpleNamespace(config=config, max_seq_length=most, query_length=None, document_length=8)
    train_bi_encoder.check_rope(module)
    if most < 10**6:
        module.document_length = most + 1
        with pytest.raises(ValueError, match=f"above {most} tokens"):
            train_bi_encoder.check_rope(module)


# ---- tokens


def test_an_end_token_that_only_the_tokenizer_knows(tmp_path):
    """It is special, though neither bos, eos nor pad."""
    folder = make_decoder(tmp_path / "model", ending="<emb>")
    check("train_bi_encoder", folder, "--pooling", "lasttoken")


@pytest.mark.parametrize("padding, side", [(5, "right"), (None, "right"), (None, "left")])
def test_the_padding_token_is_that_of_the_tokenizer(padding, side, corpus, tmp_path):
    """Whatever config.json says: by it, a decoder with a head finds the last token of each pair."""
    options = {"padding": "<pad>" if padding else None, "side": side}
    folder = make_decoder(tmp_path / "model", "LlamaForSequenceClassification", **options)
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": padding, "id2label": {"0": "score"}}
    (folder / "config.json").write_text(json.dumps(config))
    transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, ignore_mismatched_sizes=True
    ).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] == padding
    train("train_cross_encoder", *flags_of(corpus, folder, tmp_path / "out", "--max_steps", 1))
    expected = 256 if padding else 257
    assert json.loads((tmp_path / "out/model/config.json").read_text())["pad_token_id"] == expected
    pairs = list(zip(TEXTS, TEXTS[::-1]))
    _, args, model = load("train_cross_encoder", folder)
    scorer = eval_incremental.load_cross_encoder(str(folder), eval_incremental.Args())
    for found in (model.eval(), scorer, CrossEncoder(str(tmp_path / "out/model"), device="cpu")):
        with torch.no_grad():
            alone = [found(found.preprocess([pair]))["scores"].item() for pair in pairs]
        assert score_pairs(found, pairs, args) == pytest.approx(alone, abs=1e-5)
    assert torch.tensor(alone).std() > 1e-3


def test_a_missing_end_token_is_refused(corpus, tmp_path):
    """The lines of docs/training.md save a tokenizer that ends each text, a truncated one as well, in it: the model
    trains, and is saved so."""
    model = make_decoder(tmp_path / "model", "LlamaModel", ending=None, padding=None)
    flags = flags_of(corpus, model, tmp_path / "out", "--pooling", "lasttoken")
    with pytest.raises(train_bi_encoder.UserError, match="texts end in 't': .*#a-tokenizer-without-an-end-token"):
        train("train_bi_encoder", *flags)
    page = (ROOT / "docs/training.md").read_text()
    lines = re.search(r"## A tokenizer without an end token\n.+?```python\n(.+?)```", page, re.S)[1]
    exec(lines.replace('"decoder/"', repr(str(model))), {})
    train("train_bi_encoder", *flags)
    saved = SentenceTransformer(str(tmp_path / "out/model"), device="cpu")
    for ids in saved.tokenizer(["a text", "a text of many words " * 50], truncation=True)["input_ids"]:
        assert ids[-1] == 257 and ids.count(257) == 1 and len(ids) <= 64
    check("train_bi_encoder", tmp_path / "out/model", "--pooling", "lasttoken")


def test_chat_templates_are_refused(corpus, tmp_path):
    """By the bi-encoder's trainer, of a model that was saved to put texts into one."""
    folder = make_decoder(tmp_path / "chat", chat=CHAT)
    SentenceTransformer(str(folder), device="cpu").save_pretrained(str(tmp_path / "model"))
    with pytest.raises(train_bi_encoder.UserError, match="chat template"):
        train("train_bi_encoder", *flags_of(corpus, tmp_path / "model", tmp_path / "refused"))


def test_a_chat_model_embeds_plain_texts(corpus, tmp_path):
    """sentence-transformers would put the texts of a new embedder into the chat template."""
    model = make_decoder(tmp_path / "model", chat=CHAT)
    assert "message" in SentenceTransformer(str(model), device="cpu")[0].modality_config
    flags = flags_of(corpus, model, tmp_path / "out", "--pooling", "lasttoken", "--max_steps", 1)
    train("train_bi_encoder", *flags)
    saved = SentenceTransformer(str(tmp_path / "out/model"), device="cpu")
    (ids,) = saved.preprocess(["ab"])["input_ids"].tolist()
    assert ids == [*saved.tokenizer.convert_tokens_to_ids(["a", "b"]), 257]


def test_the_models_own_prompts_are_the_default(corpus, bert, tmp_path):
    """Training with the stored prompts equals naming them; empty ones switch them off."""
    model = SentenceTransformer(str(bert), device="cpu", prompts={"query": "find: ", "document": "code: "})
    model.save_pretrained(str(tmp_path / "model"))
    found = {}
    named = ["--query_prompt", "find: ", "--document_prompt", "code: "]
    none = ["--query_prompt", "", "--document_prompt", ""]
    for name, more in {"own": [], "named": named, "none": none}.items():
        flags = flags_of(corpus, tmp_path / "model", tmp_path / name, *more, "--dropout", 0, "--max_steps", 2)
        train("train_bi_encoder", *flags)
        found[name] = losses(tmp_path / name)
    assert found["own"] == found["named"] != found["none"]
    saved = SentenceTransformer(str(tmp_path / "own/model"), device="cpu")
    assert saved.prompts["query"] == "find: " and saved.prompts["document"] == "code: "


def test_other_prompts_of_the_model_are_kept(corpus, bert, tmp_path):
    """A default prompt of another name, too; that of passages becomes that of documents, as it was trained so."""
    prompts = {"query": "find: ", "passage": "code: ", "general": "text: "}
    model = SentenceTransformer(str(bert), device="cpu", prompts=prompts, default_prompt_name="general")
    model.save_pretrained(str(tmp_path / "model"))
    flags = ["--metric_for_best_model", "held_out_cosine_ndcg@10", "--max_steps", 2, "--eval_steps", 1]
    train("train_bi_encoder", *flags_of(corpus, tmp_path / "model", tmp_path / "out"), *flags)
    saved = SentenceTransformer(str(tmp_path / "out/model"), device="cpu")
    assert saved.prompts == prompts | {"document": "code: "} and saved.default_prompt_name == "general"


def test_the_prompt_of_a_reranker_is_kept(corpus, reranker, tmp_path):
    """Also by the model of the best step, which is loaded anew."""
    model = CrossEncoder(str(reranker), device="cpu", prompts={"own": "find: "}, default_prompt_name="own")
    model.save_pretrained(str(tmp_path / "model"))
    flags = ["--metric_for_best_model", "held_out_ndcg@10", "--max_steps", 2, "--eval_steps", 1]
    train("train_cross_encoder", *flags_of(corpus, tmp_path / "model", tmp_path / "out"), *flags)
    saved = CrossEncoder(str(tmp_path / "out/model"), device="cpu")
    assert (saved.prompts, saved.default_prompt_name) == (model.prompts, model.default_prompt_name)


def test_held_out_rows_have_the_prompts_of_their_sources(rows, reranker, tmp_path, monkeypatch):
    script, seen = train_cross_encoder, {}
    predict = script.CrossEncoder.predict

    def record(model, pairs, *rest, **options):
        seen.setdefault(model.prompts[options["prompt_name"]], set()).update(query for query, _ in pairs)
        return predict(model, pairs, *rest, **options)

    monkeypatch.setattr(script.CrossEncoder, "predict", record)
    sources = []
    for name, part in (("a", rows[:60]), ("b", rows[60:120])):
        write_jsonl(tmp_path / f"{name}.jsonl", part)
        sources.append(json.dumps({"path": str(tmp_path / f"{name}.jsonl"), "query_prompt": f"{name}: "}))
    flags = flags_of("x", reranker, tmp_path / "out", "--max_steps", 1)
    flags[1:2] = sources
    train("train_cross_encoder", *flags)
    assert {prompt: len(queries) for prompt, queries in seen.items()} == {"a: ": 4, "b: ": 4}
    assert seen["a: "] < {row["docstring"] for row in rows[:60]}
    assert seen["b: "] < {row["docstring"] for row in rows[60:]}
    assert "held_out_mean" in metrics(tmp_path / "out")[-1]


def test_no_evaluator_has_the_prompt_of_the_one_before(reranker):
    """A collection of --eval_beir was measured with the last prompt that a source has of its own."""
    seen = []

    def evaluator(model):
        seen.append(dict(model.prompts))
        return {"measure": 1.0}

    model = CrossEncoder(str(reranker), device="cpu", prompts={"query": "own: ", "other": "o: "})
    prompts = {"a": {"query": "a: ", "more": "m: "}, "b": {"other": "b: "}, "c": {}}
    evaluators = {name: (evaluator, own) for name, own in prompts.items()}
    train_cross_encoder.evaluate(model, evaluators, Accelerator(cpu=True))
    own = {"query": "own: ", "other": "o: "}
    assert seen == [own | {"query": "a: ", "more": "m: "}, own | {"other": "b: "}, own] and model.prompts == own


# ---- yes/no rerankers


@pytest.fixture(scope="module")
def yes_no(tmp_path_factory):
    """Folders of tiny causal models: without and with a chat template."""
    folders = {}
    for name, chat in (("plain", None), ("chat", CHAT)):
        folders[name] = make_decoder(tmp_path_factory.mktemp(name), "Qwen3ForCausalLM", ending=None, chat=chat)
    return folders


@pytest.mark.parametrize("kind, flags", [
    ("plain", ["--template", TEMPLATE, "--query_prompt", "Judge. "]), ("chat", []),
    ("chat", ["--query_prompt", "Judge."]), ("chat", ["--template", TEMPLATE]),
])  # fmt: skip
def test_yes_no_scores_equal_those_of_the_library(kind, flags, yes_no, rows, tmp_path):
    """Also of truncated pairs and after saving; only the last token's logits are computed."""
    check("train_cross_encoder", yes_no[kind], *flags)
    _, args, model = load("train_cross_encoder", yes_no[kind], *flags)
    shapes = []
    model[0].register_forward_hook(lambda _, given, output: shapes.append(output["causal_logits"].shape[1]))
    pairs = [(row["docstring"][:40], row["code"][:50]) for row in rows[:20]]
    pairs.append(("a long one", rows[0]["code"]))
    found = score_pairs(model.eval(), pairs, args)
    assert len(shapes) > 3 and set(shapes) == {1}
    model.save_pretrained(str(tmp_path))
    saved = CrossEncoder(str(tmp_path), device="cpu", activation_fn=torch.nn.Identity())
    assert ("message" in saved[0].modality_config) == (kind == "chat" and "--template" not in flags)
    expected = saved.predict(pairs)
    assert found == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5) and expected.std() > 0.1
    if "--query_prompt" in flags:
        assert found != pytest.approx(saved.predict(pairs, prompt="").tolist())


# ---- adapters


@pytest.mark.slow
def test_options_of_adapters(corpus, tmp_path):
    """Those of peft by their names; a wrong one is refused. A resume is bit-identical, with dropout of adapters."""
    name = "train_cross_encoder"
    base = make_decoder(tmp_path / "base", "Qwen3ForCausalLM", chat=CHAT)
    options = {"lora_alpha": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
    flags = flags_of(corpus, base, tmp_path / "one", "--lora_rank", 4, "--lora_kwargs", json.dumps(options))
    train(name, *flags)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "one/model"))
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert changed == {key for key in after if "q_proj.weight" in key or "v_proj.weight" in key} != set()
    expected = weights(tmp_path / "one/model")
    resume_from_step_3(name, tmp_path / "one", flags)
    assert torch.equal(weights(tmp_path / "one/model"), expected)
    _, _, model = load(name, base, "--lora_rank", "4", "--lora_kwargs", json.dumps(options))
    config = model[0].model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 4, 0.1)
    script = importlib.import_module(name)
    for options, cause in (('{"lora_alhpa": 4}', "alhpa"), ('{"target_modules": ["q"]}', "Target modules")):
        with pytest.raises(script.UserError, match=f"--lora_kwargs .*{cause}"):
            load(name, base, "--lora_rank", "4", "--lora_kwargs", options)


@pytest.mark.slow
def test_modules_behind_a_transformer_are_trained_beside_adapters(corpus, bert, tmp_path):
    """A Dense layer, which may be new, is trained as it is, and is in checkpoints."""
    model = SentenceTransformer(str(bert), device="cpu")
    model.append(Dense(32, 16))
    model.save_pretrained(str(tmp_path / "base"))
    flags = flags_of(corpus, tmp_path / "base", tmp_path / "out", "--lora_rank", 4)
    train("train_bi_encoder", *flags)
    before, after = (load_file(tmp_path / f"{name}/2_Dense/model.safetensors") for name in ("base", "out/model"))
    assert not any(torch.equal(before[name], after[name]) for name in before)
    expected = losses(tmp_path / "out")
    resume_from_step_3("train_bi_encoder", tmp_path / "out", flags)
    assert losses(tmp_path / "out") == expected
    again = load_file(tmp_path / "out/model/2_Dense/model.safetensors")
    assert all(torch.equal(again[name], after[name]) for name in after)


@pytest.mark.slow
def test_adapters_under_fsdp2(corpus, tmp_path):
    base = make_decoder(tmp_path / "base", "Qwen3Model", chat=CHAT)
    flags = flags_of(corpus, base, tmp_path / "ddp", "--lora_rank", 4)
    launch(ROOT / "train_bi_encoder.py", *flags, processes=2)
    sharded = [tmp_path / "fsdp" if flag == tmp_path / "ddp" else flag for flag in flags]
    launch_sharded(tmp_path, "train_bi_encoder", *sharded)
    found, expected = weights(tmp_path / "fsdp/model"), weights(tmp_path / "ddp/model")
    assert (found - expected).norm() < 1e-5 * expected.norm()


ANY_ROLE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>\n{% endfor %}"
ONE_TURN = "<user>{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
REFUSING = "{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
USER_ONLY = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}<answer>"


@pytest.mark.parametrize("chat, flags, is_refused", [
    (None, [], True),  # how to sortdef sort(x)
    (None, ["--template", "Query: {query} Document: {document}"], True),
    (ANY_ROLE, [], True),
    (ANY_ROLE, ["--template", TEMPLATE], False),
    (ANY_ROLE + "<assistant>", [], False),
    (ONE_TURN + "<end>", [], True),
    (ONE_TURN + "<end><assistant>", [], False),
    (USER_ONLY, [], True),
    (REFUSING, [], True),
])  # fmt: skip
def test_a_yes_no_reranker_must_be_asked(chat, flags, is_refused, tmp_path):
    """The input of a causal model contains query and document and ends where the answer begins, or it is refused; what
    --template has made is accepted without it."""
    folder = make_decoder(tmp_path / "base", "Qwen3ForCausalLM", ending=None, chat=chat)
    if is_refused:
        with pytest.raises(train_cross_encoder.UserError, match="base: its input must contain query and"):
            load("train_cross_encoder", folder, *flags)
    else:
        load("train_cross_encoder", folder, *flags)[2].save_pretrained(str(tmp_path / "saved"))
        load("train_cross_encoder", tmp_path / "saved")


@pytest.mark.parametrize("missing", [("no",), ("yes", "no")])
def test_a_yes_no_reranker_must_know_both_words(missing, yes_no, tmp_path):
    """A word that it lacks would be <unk>; with both, all scores would be 0."""
    folder = shutil.copytree(yes_no["chat"], tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"] |= {"merges": [], "unk_token": "<bos>"}
    vocabulary = tokenizer["model"]["vocab"]
    for word in missing:
        vocabulary[word.upper()] = vocabulary.pop(word)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "<bos>"}))
    yes, no = (258 if word in missing else number for word, number in (("yes", 261), ("no", 262)))
    with pytest.raises(train_cross_encoder.UserError, match=f"model: .* token {yes} minus that of token {no}: "):
        load("train_cross_encoder", folder)


@pytest.mark.parametrize("ids, is_refused", [((261, 261), True), ((261, None), False)])
def test_the_words_of_a_saved_reranker(ids, is_refused, yes_no, tmp_path):
    model = CrossEncoder(str(yes_no["chat"]), device="cpu")
    model[1] = LogitScore(*ids)
    model.save_pretrained(str(tmp_path))
    if is_refused:
        with pytest.raises(train_cross_encoder.UserError, match="token 261 minus that of token 261: .* two words"):
            load("train_cross_encoder", tmp_path)
    else:
        check("train_cross_encoder", tmp_path)


@pytest.mark.parametrize("name", TRAINERS)
def test_weights_below_adapters_are_those_of_the_checkpoint(name, tmp_path):
    """They are in no checkpoint: a change in the middle of a file, or of a module's folder, is noticed by a resume."""
    script = importlib.import_module(name)
    (tmp_path / "2_Dense").mkdir()
    files = tmp_path / "model.safetensors", tmp_path / "2_Dense/model.safetensors"
    required = ["--train_data", "x", "--columns", "a", "b", "--model_name_or_path", str(tmp_path)]

    def fixed(changed, *flags):
        for file in files:
            file.write_bytes(bytes(100_000) + bytes([file == changed]) + bytes(100_000))
        return script.unchanging(script.parse_args([*required, *flags]), None, SimpleNamespace(description={}))

    for changed in files:
        assert fixed(None, "--lora_rank", "4") != fixed(changed, "--lora_rank", "4")
        assert fixed(None) == fixed(changed)  # which the checkpoint has
