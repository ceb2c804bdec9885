"""Learning rates: those of transformers, and runs equal to those of sentence-transformers' trainer."""

import math

import pytest
import torch
import transformers
from conftest import metrics, train, weights, write_jsonl
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch.utils.data import SequentialSampler

import train_bi_encoder as script

NAMES = ["linear", "cosine", "constant", "constant_with_warmup", "warmup_stable_decay", "polynomial"]
RATE = 2e-5  # polynomial ends at a rate of 1e-7


def factors(name, steps, warmup_ratio, rate=RATE):
    """Return the factor of the rates at each step of a run."""
    args = script.Args(lr_scheduler_type=name, warmup_ratio=warmup_ratio, max_steps=steps, learning_rate=rate)
    schedule = script.make_schedule(args)
    return [schedule(step) for step in range(steps)]


@pytest.mark.parametrize("name", NAMES)
def test_schedules_are_those_of_transformers(name):
    for steps, warmup_ratio in ((20, 0.1), (13, 0.1), (16, 0.0), (100, 0.25), (10, 0.99), (2, 0.1)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
        warmup = min(math.ceil(warmup_ratio * steps), steps - 1)
        kwargs = {"num_decay_steps": math.ceil(steps / 10)} if name == "warmup_stable_decay" else None
        (factor,) = transformers.get_scheduler(name, optimizer, warmup, steps, kwargs).lr_lambdas
        expected = [factor(step) for step in range(steps)]
        assert factors(name, steps, warmup_ratio) == pytest.approx(expected, abs=1e-12)
    for warmup_ratio in (0.0, 0.1, 1.0):  # one step alone trains at the peak
        assert factors(name, 1, warmup_ratio) == [1.0]


def test_a_schedule_that_is_not_offered():
    """transformers lists those there are, and says what one lacks."""
    for name, line in (("sometimes", "please select one of \\['linear', 'cosine'"), ("cosine_with_min_lr", "min_lr")):
        with pytest.raises(script.UserError, match=f"^--lr_scheduler_type {name}: .*{line}"):
            factors(name, 10, 0.1)
    with pytest.raises(script.UserError, match="^--lr_scheduler_type polynomial: lr_end .* must be smaller"):
        factors("polynomial", 10, 0.1, rate=1e-7)


class InOrder(DefaultBatchSampler):
    """Batches of consecutive rows."""

    def __init__(self, dataset, **options):
        super().__init__(SequentialSampler(dataset), **options)


@pytest.mark.slow
def test_a_run_equals_that_of_sentence_transformers_trainer(bert, rows, tmp_path):
    """Rates, losses, gradient norms and final weights of 16 steps, on the same batches, without dropout. The texts are
    distinct: infonce masks equal texts, on purpose, and MultipleNegativesRankingLoss does not."""
    rows = [{**row, "code": f"{number} {row['code']}"} for number, row in enumerate(rows[:128])]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    train("train_bi_encoder", "--model_name_or_path", bert, "--train_data", tmp_path / "rows.jsonl", "--dropout", 0,
          "--columns", "docstring", "code", "--batch_size", 8, "--shuffle_buffer", 0, "--eval_rows", 0,
          "--learning_rate", 1e-3, "--weight_decay", 0.1, "--warmup_ratio", 0.2, "--lr_scheduler_type", "cosine",
          "--logging_steps", 1, "--output_dir", tmp_path / "out")  # fmt: skip
    model = SentenceTransformer(str(bert), device="cpu", config_kwargs={"hidden_dropout_prob": 0.0,
                                "attention_probs_dropout_prob": 0.0})  # fmt: skip
    args = SentenceTransformerTrainingArguments(
        str(tmp_path / "peer"), per_device_train_batch_size=8, batch_sampler=InOrder, num_train_epochs=1,
        learning_rate=1e-3, weight_decay=0.1, warmup_steps=0.2, lr_scheduler_type="cosine", max_grad_norm=1.0,
        use_cpu=True, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    peer = SentenceTransformerTrainer(model, args, Dataset.from_list(rows), loss=MultipleNegativesRankingLoss(model))
    peer.train()
    model.save_pretrained(str(tmp_path / "peer/model"))
    found = [line for line in metrics(tmp_path / "out") if "loss" in line]
    expected = [line for line in peer.state.log_history if "loss" in line]
    assert len(found) == len(expected) == 16
    for key, tolerance in (("learning_rate", 1e-9), ("loss", 5e-6), ("grad_norm", 2e-5)):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=tolerance), key
    # Norms, because AdamW moves a weight whose gradient is nearly 0 by a whole step, in the direction of rounding.
    difference = (weights(tmp_path / "out/model") - weights(tmp_path / "peer/model")).norm()
    moved = (weights(tmp_path / "peer/model") - weights(bert)).norm()
    assert difference < 1e-3 * moved, (difference, moved)
