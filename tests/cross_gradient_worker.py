"""Launched by test_cross_encoder.py: the gradient of one step of every loss under many settings.

accelerate launch tests/cross_gradient_worker.py MODEL SOURCE OUTPUT
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

sys.path.insert(0, str(Path(__file__).parents[1]))
import train_cross_encoder as script

LISTS = "--columns docstring documents --label_column"
CASES = {
    "bce": f"{LISTS} classes --loss bce",
    "mse": f"{LISTS} scores --loss mse",
    "softmax": f"{LISTS} classes --loss softmax",
    "drawn": "--columns docstring code",
    "ranknet": f"{LISTS} grades --loss ranknet",
    "lambda": f'{LISTS} grades --loss lambda --loss_args {{"k":3}}',
    "margin_mse": f"{LISTS} scores --loss margin_mse",
    "kl": f"{LISTS} scores --loss kl",
}

model_path, source, output = sys.argv[1:]
accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])


def parse(flags):
    return script.parse_args(["--model_name_or_path", model_path, "--train_data", source, "--eval_rows", "0", *flags])


model = script.load_cross_encoder(parse([]), None, False, accelerator)
with torch.no_grad():  # freshly initialised, documents hardly differ, and the gradient of a group cancels to 0.0005
    for parameter in model.parameters():
        parameter.mul_(5 if parameter.ndim > 1 else 1)
script.freeze_unscored(model, accelerator)
prepared = accelerator.prepare(model).eval()  # no dropout: it differs from micro-batch to micro-batch


def gradient(flags, budget, accumulation=1):
    """(gradient of one step of `accumulation` batches, loss of the last, its micro-batches, its pairs)."""
    args = parse(flags)
    args.loss = args.loss or script.default_loss(args)
    sources, weights, *_ = script.open_data(args, accelerator, script.checked_group)
    rows = script.row_batches(sources, weights, args, None, script.checked_group)
    loss_fn = script.make_pair_loss(args)
    batches = script.make_pair_batches(rows, model, budget, args, accelerator)
    accelerator.gradient_accumulation_steps = accumulation
    model.zero_grad()
    for number in range(accumulation):
        batch = next(batches)
        sync = number == accumulation - 1
        loss = script.backward_pairs(prepared, batch, loss_fn, [0, 0, number], sync, args, accelerator)
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    return found, loss, len(batch.share.micro_batches), script.row_pairs(batch.rows)


gradients = {}
for name, flags in CASES.items():
    for budget in (300, 10**6):
        for cache in ("false", "true"):
            setting = [*flags.split(), "--batch_size", "7", "--grad_cache", cache]
            gradients[f"{name} {budget} {cache}"] = gradient(setting, budget)
point = ["--columns", "docstring", "code", "--label_column", "label", "--loss", "bce"]
gradients["one batch of 64"] = gradient([*point, "--batch_size", "64"], 2000)
gradients["four batches of 16"] = gradient([*point, "--batch_size", "16"], 2000, accumulation=4)
torch.save(gradients, f"{output}.{accelerator.process_index}.pt")
