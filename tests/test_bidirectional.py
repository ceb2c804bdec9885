"""Decoders whose attention is not causal: which architectures honour it, and the code of docs/decoders.md."""

import json
import re
import subprocess
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate import Accelerator
from conftest import ROOT, mark_slow, train
from sentence_transformers import SentenceTransformer
from test_decoders import SHAPE, check, decoder_tokenizer, make_decoder

import eval_incremental
import train_bi_encoder
import train_cross_encoder

PAGE = (ROOT / "docs/decoders.md").read_text()
SHAPE = SHAPE | {"pad_token_id": 256, "eos_token_id": 257, "bos_token_id": 258, "num_local_experts": 2,
                 "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}  # fmt: skip
WINDOW = {"sliding_window": 8}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
LFM2 = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "block_ff_dim": 64}
KINDS = {  # {name in the page: options}, for the configuration of that name
    "Mistral": WINDOW, "Ministral": WINDOW, "Gemma 2": WINDOW, "Gemma 3": WINDOW, "Gemma 4": WINDOW, "OLMo 3": WINDOW,
    "Cohere 2": WINDOW, "GPT-OSS": WINDOW, "LFM2": LFM2, "Qwen3-Next": HYBRID, "Qwen3.5": HYBRID,
    "Falcon": {"alibi": False}, "ModernBERT-decoder": {"cls_token_id": 258, "sep_token_id": 257},
    "GPT-Neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
}  # fmt: skip
TYPES = {"Gemma 3": "gemma3_text", "Gemma 4": "gemma4_text", "Qwen3.5": "qwen3_5_text", "GPT-NeoX": "gpt_neox",
         "ModernBERT-decoder": "modernbert-decoder", "GPT-2": "gpt2", "Phi-3": "phi3", "GLM-4": "glm4"}  # fmt: skip


def rows_of_the_page():
    """Return [(architecture, by sdpa, by eager, on a GPU)] of its table."""
    found = []
    for line in re.findall(r"^\| ([A-Z].+) \|$", PAGE, re.M):
        names, *cells = line.split(" | ")
        found += [(name, *cells) for name in re.sub(r" \(.*\)", "", names).split(", ")]
    return found


def make(folder, name):
    """Write a tiny decoder of a kind, in whose configuration attention is not causal."""
    kind = TYPES.get(name, name.lower().replace(" ", "").replace("-", "_"))
    shape = {key: value for key, value in SHAPE.items() if (name, key) != ("Falcon", "head_dim")}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **shape | KINDS.get(name, {}))
    config.is_causal = False
    model = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        [weight.mul_(3) for weight in model.parameters() if weight.ndim > 1]
    model.save_pretrained(folder)
    decoder_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def sees_the_last(model, padded):
    """Return whether the first token of a text sees its last one, in a pass with padding or without."""
    ids = torch.arange(10, 22).repeat(2, 1)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 10:] = 0
    other = ids.clone()
    other[0, mask[0].sum() - 1] = 99
    first, second = (model(input_ids=part, attention_mask=mask).last_hidden_state[0, 0] for part in (ids, other))
    return not torch.allclose(first, second)


def outcome(folder, attention):
    """Return what the page says of an architecture by an attention."""
    try:
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation=attention).eval()
    except ValueError:
        return "absent"
    try:
        seen = [sees_the_last(model, padded) for padded in (False, True)]
    except TypeError:
        return "fails"
    return {(True, True): "yes", (False, False): "no", (False, True): "only beside padding"}[tuple(seen)]


QUICK = [row for row in rows_of_the_page() if row[0] in ("Qwen3", "Llama", "Nemotron", "Falcon", "Gemma 3")]


@pytest.mark.parametrize("name, sdpa, eager, gpu", mark_slow(rows_of_the_page(), QUICK))
def test_the_table(name, sdpa, eager, gpu, tmp_path):
    """What stays causal is refused by trainers and evaluator, but not tried by a kernel that no CPU has."""
    config = SimpleNamespace(is_causal=False, _attn_implementation="flash_attention_2")
    config.get_text_config = lambda: config
    train_bi_encoder.check_attention(SimpleNamespace(config=config))
    folder = make(tmp_path / "model", name)
    assert outcome(folder, "eager") == eager
    assert sdpa == "absent" or outcome(folder, "sdpa") == sdpa  # transformers 5.18 had Gemma 2's
    if gpu.startswith("refused"):
        for script in (train_bi_encoder, train_cross_encoder, eval_incremental):
            with pytest.raises(script.UserError, match="ignores is_causal: false .* docs/decoders.md"):
                load(script, folder)
        if "but for" not in gpu:
            return
        assert load(train_bi_encoder, folder, "--attn_implementation", "eager").config.is_causal is False
    else:
        (module,) = train_bi_encoder.transformers_of(load(train_bi_encoder, folder))
        found = train_bi_encoder.try_concatenated(module, False, Accelerator(cpu=True))
        assert (gpu == "concatenated") == (found == ""), found


def load(script, folder, *more):
    """Return the model that a script loads."""
    if script is eval_incremental:
        return script.load_bi_encoder(str(folder), script.Args())
    words = ["--train_data", "x.csv", "--columns", "a", "b", "--model_name_or_path", str(folder), *more]
    return script.load_model(script.parse_args(words))


@pytest.mark.parametrize("name", mark_slow(["Qwen3ForCausalLM", "LlamaForCausalLM"], ["LlamaForCausalLM"]))
@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
def test_the_page(name, pooling, corpus, tmp_path, monkeypatch):
    """Its lines and its command make an embedder of a causal model; the saved one has the vectors of training, and its
    first token sees the last one."""
    make_decoder(tmp_path / "base", name, ending=None, padding=None)
    monkeypatch.chdir(tmp_path)
    code, command = re.findall(r"```(?:python|sh)\n(.+?)```", PAGE, re.S)
    exec(code.replace("Qwen/Qwen3-0.6B-Base", "base"), {})
    if pooling == "lasttoken":
        page = (ROOT / "docs/training.md").read_text()
        exec(re.search(r"## A tokenizer without an end token\n.+?```python\n(.+?)```", page, re.S)[1], {})
    words = subprocess.check_output(["bash", "-c", "printf '%s\\0' " + command], text=True).split("\0")[:-1]
    words = words[words.index("train_bi_encoder.py") + 1 :]
    more = ["--pooling", pooling, "--max_steps", 2, "--batch_size", 8, "--eval_rows", 8, "--max_length", 60]
    more += ["--train_data", f"{corpus}/*.parquet", "--columns", "docstring", "code", "--micro_batch_tokens", 700]
    train("train_bi_encoder", *words, *more)
    saved = tmp_path / "runs/decoder/model"
    assert json.loads((saved / "config.json").read_text())["is_causal"] is False
    check("train_bi_encoder", saved)
    model = SentenceTransformer(str(saved), device="cpu")
    assert model.prompts["query"] == "Instruct: Given a question, find its answer\nQuery: "
    for texts in (["a text", "a test"], ["a text", "a test", "a longer one"]):  # without padding, with it
        first, second, *_ = model.encode(texts, output_value="token_embeddings")
        assert (first[0] - second[0]).norm() > 1e-3 * first[0].norm()
