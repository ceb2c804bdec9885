"""Compute the gradient of one step of every loss under many settings; launched by test_cross_encoder.py.

accelerate launch tests/cross_gradient_worker.py MODEL SOURCE OUTPUT
"""

import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).parents[1]))
import train_cross_encoder as script

LISTS = "--columns docstring documents --label_column"
CASES = {
    "bce": f"{LISTS} classes --loss bce",
    "mse": f"{LISTS} scores --loss mse",
    "listwise_ce": f"{LISTS} classes --loss listwise_ce",
    "drawn": "",
    "lists": "--columns docstring code lists --num_negatives 2",
    "ranknet": f"{LISTS} grades --loss ranknet",
    "lambdaloss": f'{LISTS} grades --loss lambdaloss --loss_kwargs {{"k":3}}',
    "margin_mse": f'{LISTS} scores --loss margin_mse --loss_kwargs {{"teacher_temperature":1}}',
    "kl": f'{LISTS} scores --loss kl --loss_kwargs {{"teacher_temperature":0.5}}',
}
MIXTURE = [  # a batch of each is a step
    {"columns": ["docstring", "code"], "num_negatives": 2},
    {"columns": ["docstring", "documents"], "label_column": ["grades"], "loss": "ranknet", "query_prompt": "rank: "},
    {"columns": ["docstring", "documents"], "label_column": ["scores"], "loss": "mse"},
]
MEAN_OVER_ROWS = "--label_column label --loss bce"

model_path, source, output = sys.argv[1:]
accelerator = Accelerator(cpu=True)


def parse(*flags):
    data = ["--train_data", source] * ("--train_data" not in flags)
    data += ["--columns", "docstring", "code"] * ("--columns" not in flags)
    return script.parse_args(["--model_name_or_path", model_path, *data, "--eval_rows", "0", *flags])


def pairs_of(rows):
    """Return {query: (documents, labels)} of this process' rows."""
    return {row.query: (row.documents, row.labels) for row in rows}


def gradients_of(flags, settings, accumulation=1):
    """Yield (gradient of a step, loss of its last batch, micro-batches on this process, rows) for each setting.

    The step accumulates the first `accumulation` batches.
    """
    accelerator.gradient_accumulation_steps = accumulation
    args = script.resolve_args(parse(*flags), model, accelerator)
    data = script.open_data(args)
    loss_fns = [script.make_loss(source.args, model) for source in data.sources]
    tables = list(islice(script.row_batches(data.sources, data.weights, args), accumulation))
    for max_tokens, cache in settings:
        args = replace(args, micro_batch_tokens=max_tokens, grad_cache=cache == "true")
        model.zero_grad()
        local = script.local_batches(iter(tables), 0, data, args, accelerator)
        for rows, index, more in islice(local, accumulation):
            batch = replace(script.make_batch(rows, index, model, args, accelerator), **more)
            assert not batch.error, batch.error
            batch = script.batch_to_torch(batch)
            source_args = replace(data.sources[batch.source].args, grad_cache=args.grad_cache)
            loss = script.forward_backward(model, batch, source_args, accelerator, loss_fns[batch.source])
        script.reduce_gradients(model, accelerator)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        yield gradient, accelerator.reduce(loss).item(), len(batch.micro_batches), pairs_of(rows)


model = script.load_model(parse()).eval()  # no dropout: its masks depend on the micro-batches
with torch.no_grad():  # with fresh weights, scores hardly differ, and the gradient of a group cancels to 0.0005
    for parameter in model.parameters():
        parameter.mul_(10 if parameter.ndim > 1 else 1)
settings = [(300, "false"), (300, "true"), (10**6, "false")]  # (micro_batch_tokens, grad_cache)
gradients = {}
for name, flags in CASES.items():
    found = gradients_of([*flags.split(), "--batch_size", "7"], settings)
    gradients |= {(name, *setting): gradient for setting, gradient in zip(settings, found)}
mixture = [json.dumps({"path": source, "weight": 1, **own}) for own in MIXTURE]
mixture = ["--train_data", *mixture, "--mix_by", "batch", "--batch_size", "7"]
for setting, gradient in zip(settings, gradients_of(mixture, settings, accumulation=3)):
    gradients["mixture", *setting] = gradient
mean = MEAN_OVER_ROWS.split()
(gradients["one batch of 64"],) = gradients_of([*mean, "--batch_size", "64"], [(2000, "false")])
(gradients["four batches of 16"],) = gradients_of([*mean, "--batch_size", "16"], [(2000, "false")], accumulation=4)
torch.save(gradients, f"{output}.{accelerator.process_index}.pt")
