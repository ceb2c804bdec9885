"""LoRA adapters, the choice of attention, and the lengths that texts are padded to on a GPU."""

import json
import shutil

import pytest
import torch
from conftest import ROOT, launch, metrics
from safetensors.torch import load_file

import train_bi_encoder
import train_cross_encoder

SCRIPTS = ("train_bi_encoder", "train_cross_encoder")


@pytest.fixture(scope="module")
def steady(tmp_path_factory, bert):
    """The tiny model without dropout, which is another on each process."""
    folder = tmp_path_factory.mktemp("steady") / "st"
    shutil.copytree(bert, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def flags_for(name, corpus, model, output, *more):
    drawn = ["--num_negatives", 2] * (name == "train_cross_encoder")
    return ["--train_data", corpus, "--model_name_or_path", model, "--max_steps", 6, "--batch_size", 16, *drawn,
            "--eval_rows", 20, "--log_every", 1, "--learning_rate", 0.01, "--output_dir", output, *more]  # fmt: skip


def losses(output):
    return [line["loss"] for line in metrics(output) if "loss" in line]


@pytest.mark.parametrize("name", SCRIPTS)
def test_lora(name, corpus, steady, tmp_path):
    """Linear layers change by a matrix of the rank, and all else of the transformer not at all."""
    script = ROOT / f"{name}.py"
    launch(script, *flags_for(name, corpus, steady, tmp_path / "one", "--lora_rank", 3))
    launch(script, *flags_for(name, corpus, steady, tmp_path / "two", "--lora_rank", 3), processes=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)

    before = load_file(steady / "model.safetensors")
    after = load_file(tmp_path / "one/model/model.safetensors")
    after = {key.removeprefix("bert."): tensor for key, tensor in after.items()}
    adapted = 0
    for key, tensor in before.items():
        if key.startswith("pooler") and key not in after:
            continue
        change = after[key] - tensor
        if ".layer." in key and key.endswith("weight") and tensor.ndim == 2:
            values = torch.linalg.svdvals(change)
            assert values[0] > 1e-4 and values[3] < 1e-5 * values[0], key
            adapted += 1
        elif not key.startswith("pooler"):  # of a cross-encoder it is one more linear layer
            assert not change.any(), key
    assert adapted == 12  # query, key, value, output and two of the feed-forward part, in 2 layers

    if name == "train_cross_encoder":
        return
    # a run that stops in the middle goes on to the same bits (by functions that both scripts share)
    part = tmp_path / "part"
    launch(script, *flags_for(name, corpus, steady, part, "--lora_rank", 3, "--save_every", 3))
    shutil.rmtree(part / "checkpoints/step_00000006")
    launch(script, *flags_for(name, corpus, steady, part, "--lora_rank", 3, "--save_every", 3, "--resume"))
    whole = [(folder / "model/model.safetensors").read_bytes() for folder in (part, tmp_path / "one")]
    assert whole[0] == whole[1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_dropout_the_layout_changes_nothing(name, corpus, bert, tmp_path):
    """Losses of three layouts of the same batches agree with --dropout 0, and do not with the model's own 0.1."""
    found = {}
    for dropout in ([], ["--dropout", 0]):
        for tokens, processes in ((200, 1), (5000, 1), (200, 2)):
            output = tmp_path / f"{len(dropout)} {tokens} {processes}"
            flags = flags_for(name, corpus, bert, output, "--micro_batch_tokens", tokens, "--max_steps", 3, *dropout)
            launch(ROOT / f"{name}.py", *flags, processes=processes)
            found[bool(dropout), tokens, processes] = losses(output)
    wanted = found[True, 200, 1]
    assert found[True, 5000, 1] == pytest.approx(wanted, rel=1e-4) == found[True, 200, 2]
    assert found[False, 200, 1] != pytest.approx(found[False, 5000, 1], rel=1e-3)


def test_dropout_is_set_wherever_a_model_keeps_it(bert):
    from sentence_transformers import SentenceTransformer
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
    train_bi_encoder.set_dropout(torch.nn.Linear(2, 2), 0.0)
    with pytest.raises(train_bi_encoder.BadInput, match="--dropout 0.1: the model has no dropout"):
        train_bi_encoder.set_dropout(torch.nn.Linear(2, 2), 0.1)


def test_lora_of_a_model_without_layers(corpus, tmp_path):
    flags = ["--train_data", corpus, "--max_steps", 1, "--eval_rows", 0, "--output_dir", tmp_path / "run"]
    done = launch(ROOT / "train_bi_encoder.py", *flags, "--lora_rank", 3, check=False)
    assert done.returncode and "error: --lora_rank 3: a static embedding model has no layers" in done.stderr


def test_attention_changes_nothing_but_speed(corpus, steady, tmp_path):
    name = "train_bi_encoder"
    for kind in ("eager", "sdpa"):
        launch(ROOT / f"{name}.py", *flags_for(name, corpus, steady, tmp_path / kind, "--attn_implementation", kind))
    assert losses(tmp_path / "eager") == pytest.approx(losses(tmp_path / "sdpa"), rel=1e-4)
    wrong = flags_for(name, corpus, steady, tmp_path / "wrong", "--attn_implementation", "flash_attention_9")
    done = launch(ROOT / f"{name}.py", *wrong, check=False)
    assert done.returncode and "error: --model_name_or_path" in done.stderr and "flash_attention_9" in done.stderr


@pytest.mark.parametrize("script", [train_bi_encoder, train_cross_encoder])
def test_lengths_on_a_gpu_are_multiples_of_8_within_the_model(script):
    class Model:
        max_seq_length = 77

    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [script.padded_length(n, Model, gpu) for n in (1, 8, 9, 72, 73, 77)] == [8, 8, 16, 72, 77, 77]
    assert [script.padded_length(n, Model, cpu) for n in (1, 9, 77)] == [1, 9, 77]
