"""Compute the gradient of one step of every loss under many settings; launched by test_cross_encoder.py.

accelerate launch tests/cross_gradient_worker.py MODEL SOURCE OUTPUT
"""

import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

sys.path.insert(0, str(Path(__file__).parents[1]))
import train_cross_encoder as script

LISTS = "--columns docstring documents --label_column"
CASES = {
    "bce": f"{LISTS} classes --loss bce",
    "mse": f"{LISTS} scores --loss mse",
    "listwise_ce": f"{LISTS} classes --loss listwise_ce",
    "drawn": "--columns docstring code",
    "lists": "--columns docstring code lists --num_negatives 2",
    "ranknet": f"{LISTS} grades --loss ranknet",
    "lambdaloss": f'{LISTS} grades --loss lambdaloss --loss_kwargs {{"k":3}}',
    "margin_mse": f"{LISTS} scores --loss margin_mse",
    "kl": f"{LISTS} scores --loss kl",
}
MEAN_OVER_ROWS = "--columns docstring code --label_column label --loss bce"

model_path, source, output = sys.argv[1:]
accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])


def parse(*flags):
    return script.parse_args(["--model_name_or_path", model_path, "--train_data", source, "--eval_rows", "0", *flags])


def pairs_of(batch):
    """Return {query: (documents, labels)} of this process' rows."""
    return {row.query: (row.documents, row.labels) for row in batch.rows}


def gradients_of(flags, settings, accumulation=1):
    """Yield (gradient of a step, loss of its last batch, micro-batches on this process, rows) for each setting.

    settings: [(micro_batch_tokens, grad_cache)]. The step accumulates the first `accumulation` batches.
    """
    args = parse(*flags)
    args.loss = args.loss or script.choose_loss(args)
    loss_fn = script.make_loss(args)
    data = script.open_data(args)
    tables = list(islice(script.row_batches(data.sources, data.weights, args), accumulation))
    accelerator.gradient_accumulation_steps = accumulation
    for args.micro_batch_tokens, args.grad_cache in settings:
        model.zero_grad()
        make_batch = partial(script.make_batch, model=model, args=args, accelerator=accelerator)
        draw = partial(script.draw_negatives, args)
        batches = script.read_batches(iter(tables), make_batch, data, args, accelerator, draw)
        for number, batch in enumerate(islice(batches, accumulation)):
            sync = number == accumulation - 1
            loss = script.forward_backward(prepared, batch, loss_fn, [0, 0, number], sync, args, accelerator)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        yield gradient, accelerator.reduce(loss).item(), len(batch.micro_batches.parts), pairs_of(batch)


model = script.load_model(parse())
with torch.no_grad():  # with fresh weights, scores hardly differ, and the gradient of a group cancels to 0.0005
    for parameter in model.parameters():
        parameter.mul_(10 if parameter.ndim > 1 else 1)
features, _ = script.make_micro_batches([], model, parse("--micro_batch_tokens", "100"), accelerator.device).parts[0]
script.freeze_unused(model, script.score(model, features, accelerator))
prepared = accelerator.prepare(model).eval()  # no dropout: its masks depend on the micro-batches
settings = [(max_tokens, cache) for max_tokens in (300, 700, 10**6) for cache in ("false", "true")]
gradients = {}
for name, flags in CASES.items():
    found = gradients_of([*flags.split(), "--batch_size", "7"], settings)
    gradients |= {(name, *setting): gradient for setting, gradient in zip(settings, found)}
mean = MEAN_OVER_ROWS.split()
(gradients["one batch of 64"],) = gradients_of([*mean, "--batch_size", "64"], [(2000, "false")])
(gradients["four batches of 16"],) = gradients_of([*mean, "--batch_size", "16"], [(2000, "false")], accumulation=4)
torch.save(gradients, f"{output}.{accelerator.process_index}.pt")
