"""Loss and gradient norm of each step of a fixed run of each trainer equal those stored in trajectory.json.

Data, tokenizer and weights come from NumPy's generator, so that only the scripts and libraries can change a number.
`STORE=1 python -m pytest tests/test_trajectory.py` stores the numbers again.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import launch, metrics, write_jsonl

STORED = Path(__file__).with_name("trajectory.json")
FLAGS = ["--train_data", "rows.jsonl", "--columns", "query", "positive", "negative", "--model_name_or_path", "model",
         "--batch_size", 16, "--max_steps", 20, "--eval_rows", 0, "--logging_steps", 1, "--learning_rate", 0.003,
         "--micro_batch_tokens", 128, "--shuffle_buffer", 100, "--save_steps", 0]  # fmt: skip
RUNS = {"train_bi_encoder": ["--dropout", 0], "train_cross_encoder": ["--dropout", 0, "--num_negatives", 1]}


def make_inputs(folder):
    """Write rows.jsonl (queries share a third of their words with their positive) and model/, a BERT of 2 layers."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    random, words = np.random.default_rng(0), [f"word{number}" for number in range(200)]
    rows = []
    for _ in range(200):
        texts = [random.choice(words, random.integers(3, 30)).tolist() for _ in range(3)]
        texts[0] = texts[1][: max(1, len(texts[1]) // 3)] + texts[0][:3]
        rows.append(dict(zip(("query", "positive", "negative"), map(" ".join, texts))))
    write_jsonl(folder / "rows.jsonl", rows)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=64).save_pretrained(folder / "model")
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=205, max_position_embeddings=64, **shape))
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            values = random.normal(0, 0.1, parameter.shape) + (parameter.ndim == 1 and bool((parameter == 1).all()))
            parameter.copy_(torch.from_numpy(values))
    model.save_pretrained(folder / "model")


def trajectory(name, folder):
    """Return (2, 20) losses and gradient norms of a run."""
    make_inputs(folder)
    launch(Path(__file__).parents[1] / f"{name}.py", *FLAGS, *RUNS[name], "--output_dir", "run", cwd=folder)
    lines = [line for line in metrics(folder / "run") if "loss" in line]
    return np.array([[line[key] for line in lines] for key in ("loss", "grad_norm")])


@pytest.mark.parametrize("name", RUNS)
def test_trajectory_equals_the_stored_one(name, tmp_path):
    """Each step within 1e-3, because rounding differs between machines and its effect grows; the mean error within
    1e-4, which a slightly wrong term would exceed."""
    found, stored = trajectory(name, tmp_path), json.loads(STORED.read_text()) if STORED.exists() else {}
    if "STORE" in os.environ:
        STORED.write_text(json.dumps(stored | {name: found.round(7).tolist()}, indent=1) + "\n")
        stored = {name: found}
    errors = found / np.array(stored[name]) - 1
    assert found.shape == (2, 20) and abs(errors).max() < 1e-3, errors
    assert (abs(errors.mean(axis=1)) < 1e-4).all(), errors.mean(axis=1)
