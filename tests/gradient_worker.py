"""Compute the gradient of one step under many settings, and read 40 batches; launched by test_equalities.py.

accelerate launch tests/gradient_worker.py MODEL SOURCE OUTPUT
"""

import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

sys.path.insert(0, str(Path(__file__).parents[1]))
import train_bi_encoder as script

TEACHER = "--columns docstring code wrong worse --label_column scores --loss"
CASES = {
    "infonce": "--columns docstring code",
    "symmetric": '--columns docstring code --loss_kwargs {"symmetric":true}',
    "negatives": "--columns docstring code wrong",
    "matryoshka": "--columns docstring code --matryoshka_dims 32 8",
    "lists": '--columns docstring code lists --num_negatives 2 --loss_kwargs {"mask_margin":0.001}',
    "guide": "--columns docstring code --guide_model GUIDE",
    "margin_mse": f"{TEACHER} margin_mse",
    "kl": f'{TEACHER} kl --loss_kwargs {{"infonce":0.5}}',
    "CoSENTLoss": "--columns docstring code --label_column label --loss CoSENTLoss",
    "TripletLoss": "--columns docstring code wrong --loss TripletLoss",
}
MEAN_OVER_ROWS = "--columns docstring code --label_column label --loss CosineSimilarityLoss"

model_path, source, output = sys.argv[1:]
accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])


def open_rows(flags):
    """Return (Args, endless iterator over the batches of rows) for flags."""
    args = script.parse_args(["--model_name_or_path", model_path, "--train_data", source, "--eval_rows", "0", *flags])
    data = script.open_data(args, script.clean_pairs)
    return args, script.row_batches(data.sources, data.weights, args)


def gradients_of(flags, settings, accumulation=1):
    """Yield (gradient of a step, loss of its last batch, micro-batches of that on this process) for each setting.

    settings: [(max_tokens, grad_cache)]. The step accumulates the first `accumulation` batches.
    """
    args, rows = open_rows(flags)
    loss_fn, rows = script.make_loss(args, model), list(islice(rows, accumulation))
    # Not cls pooling: its similarities differ by less than rounding errors, which would decide what is masked.
    guide = script.load_model(replace(args, pooling="max")).eval() if args.guide_model else None
    accelerator.gradient_accumulation_steps = accumulation
    for max_tokens, args.grad_cache in settings:
        model.zero_grad()
        for number, batch in enumerate(script.make_batches(rows, model, max_tokens, args, accelerator, guide)):
            sync = number == accumulation - 1
            loss = script.forward_backward(prepared, batch, loss_fn, [0, 0, number], sync, args, accelerator, guide)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        yield gradient, accelerator.reduce(loss).item(), len(batch.local.micro_batches)


columns = ["--columns", "docstring", "code"]
model = script.load_model(open_rows(columns)[0])
features, _ = script.make_micro_batches(["a text"], model, 100, accelerator.device)[0][0]
script.freeze_unused(model, script.encode(model, features, accelerator))
prepared = accelerator.prepare(model).eval()  # no dropout: its masks depend on the micro-batches
settings = [(max_tokens, cache) for max_tokens in (128, 700, 10**6) for cache in (False, True)]
gradients = {}
for name, flags in CASES.items():
    found = gradients_of([*flags.replace("GUIDE", model_path).split(), "--batch_size", "21"], settings)
    gradients |= {(name, *setting): gradient for setting, gradient in zip(settings, found)}
mean = MEAN_OVER_ROWS.split()
(gradients["one batch of 64"],) = gradients_of([*mean, "--batch_size", "64"], [(700, False)])
(gradients["four batches of 16"],) = gradients_of([*mean, "--batch_size", "16"], [(700, False)], accumulation=4)
torch.save(gradients, f"{output}.{accelerator.process_index}.pt")
_, rows = open_rows(columns)
batches = [batch.to_pylist() for batch, _ in islice(rows, 40)]
Path(f"{output}.{accelerator.process_index}.json").write_text(json.dumps(batches))
