"""Launched by test_equalities.py: the gradient of one step under many settings, and the rows of the next batches.

accelerate launch tests/gradient_worker.py MODEL SOURCE OUTPUT
"""

import json
import sys
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

sys.path.insert(0, str(Path(__file__).parents[1]))
import train_bi_encoder as script

CASES = {
    "infonce": "--columns docstring code",
    "symmetric": '--columns docstring code --loss_args {"symmetric":true}',
    "negatives": "--columns docstring code wrong",
    "matryoshka": "--columns docstring code --matryoshka_dims 32 8",
    "CoSENTLoss": "--columns docstring code --label_column label --loss CoSENTLoss",
    "TripletLoss": "--columns docstring code wrong --loss TripletLoss",
}
MEAN_OVER_ROWS = "--columns docstring code --label_column label --loss CosineSimilarityLoss"

model_path, source, output = sys.argv[1:]
accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])


def open_rows(flags):
    """Args, model and loss of a case, and its endless batches of rows."""
    args = script.parse_args(["--model_name_or_path", model_path, "--train_data", source, "--eval_rows", "0", *flags])
    sources, weights, *_ = script.open_data(args, accelerator)
    model = script.load_model_from(args, None, False, accelerator)
    return args, model, script.row_batches(sources, weights, args, None)


def gradient(flags, budget, accumulation=1):
    """(gradient of one step of `accumulation` batches, loss of the last, its micro-batches on this process)."""
    args, model, rows = open_rows(flags)
    script.freeze_unused(model, accelerator)
    loss_fn = script.make_loss(args, model)
    prepared = accelerator.prepare(model).eval()  # no dropout: it differs from micro-batch to micro-batch
    batches = script.make_batches(rows, model, budget, args, accelerator)
    accelerator.gradient_accumulation_steps = accumulation
    for number in range(accumulation):
        batch = next(batches)
        sync = number == accumulation - 1
        loss = script.backward(prepared, batch, loss_fn, [0, 0, number], sync, args, accelerator)
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    return found, loss, len(batch.share.micro_batches)


gradients = {}
for name, flags in CASES.items():
    for budget in (128, 700, 10**6):
        for cache in ("false", "true"):
            setting = [*flags.split(), "--batch_size", "33", "--grad_cache", cache]
            gradients[f"{name} {budget} {cache}"] = gradient(setting, budget)
gradients["one batch of 64"] = gradient([*MEAN_OVER_ROWS.split(), "--batch_size", "64"], 700)
gradients["four batches of 16"] = gradient([*MEAN_OVER_ROWS.split(), "--batch_size", "16"], 700, accumulation=4)
torch.save(gradients, f"{output}.{accelerator.process_index}.pt")
_, _, rows = open_rows(["--columns", "docstring", "code"])
Path(f"{output}.{accelerator.process_index}.json").write_text(json.dumps([batch for batch, _ in islice(rows, 40)]))
