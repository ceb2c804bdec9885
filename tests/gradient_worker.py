"""Compute the gradient of one step under many settings, and read 40 batches; launched by test_equalities.py.

accelerate launch tests/gradient_worker.py MODEL SOURCE OUTPUT
"""

import json
import sys
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
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
ALL_ROWS = ("negatives", "kl", "CoSENTLoss")  # tested with all rows of a process bad
MEAN_OVER_ROWS = "--columns docstring code --label_column label --loss CosineSimilarityLoss"

model_path, source, output = sys.argv[1:]
accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])


def open_rows(flags):
    """Return (Args, Data, endless iterator over the batches of rows) for flags."""
    args = script.parse_args(["--model_name_or_path", model_path, "--train_data", source, "--eval_rows", "0", *flags])
    data = script.open_data(args)
    return args, data, script.row_batches(data.sources, data.weights, args)


def choose_rows(table, which, args):
    """Return the indices of two rows, or of all rows that the second of two processes reads."""
    if which == "two rows":
        return np.array([0, 13])
    _, own = script.deal(script.row_lengths(table, args), SimpleNamespace(num_processes=2, process_index=1))
    return own


def make_bad(table, which, args):
    """Return a Table with no text in "code" of the chosen rows; their bytes, by which rows are dealt, are kept."""
    rows = choose_rows(table, which, args)
    values = [" " * len(text.encode()) if i in rows else text for i, text in enumerate(table["code"].to_pylist())]
    return table.set_column(table.column_names.index("code"), "code", pa.array(values))


def leave_out(table, which, args):
    """Return a Table without the chosen rows."""
    return table.take(np.setdiff1d(np.arange(len(table)), choose_rows(table, which, args)))


def gradients_of(flags, settings, accumulation=1, change=None):
    """Yield (gradient of a step, loss of its last batch, micro-batches of that on this process, bad rows of that) for
    each setting.

    settings: [(micro_batch_tokens, grad_cache)]. The step accumulates the first `accumulation` batches. change(table,
    args=args) returns the rows to train on instead of a batch.
    """
    args, data, tables = open_rows(flags)
    tables = list(islice(tables, accumulation))
    if change:
        tables = [(change(table, args=args), state) for table, state in tables]
    loss_fn = script.make_loss(args, model)
    # Not cls pooling: its similarities differ by less than rounding errors, which would decide what is masked.
    guide = script.load_model(replace(args, pooling="max")).eval() if args.guide_model else None
    accelerator.gradient_accumulation_steps = accumulation
    for args.micro_batch_tokens, args.grad_cache in settings:
        model.zero_grad()
        make_batch = partial(script.make_batch, model=model, guide=guide, args=args, accelerator=accelerator)
        batches = script.read_batches(iter(tables), make_batch, data, args, accelerator)
        for number, batch in enumerate(islice(batches, accumulation)):
            sync = number == accumulation - 1
            loss = script.forward_backward(prepared, batch, loss_fn, [0, 0, number], sync, args, accelerator, guide)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        skipped = accelerator.reduce(torch.tensor(batch.skipped)).item()
        yield gradient, accelerator.reduce(loss).item(), len(batch.micro_batches.parts), skipped


columns = ["--columns", "docstring", "code"]
model = script.load_model(open_rows(columns)[0])
one_text = ["a text"], [(0, 0)], model, script.Args(micro_batch_tokens=100), accelerator.device
features, _ = script.make_micro_batches(*one_text).parts[0]
script.freeze_unused(model, script.encode(model, features, accelerator))
prepared = accelerator.prepare(model).eval()  # no dropout: its masks depend on the micro-batches
settings = [(max_tokens, cache) for max_tokens in (128, 700, 10**6) for cache in ("false", "true")]
gradients = {}
for name, flags in CASES.items():
    found = gradients_of([*flags.replace("GUIDE", model_path).split(), "--batch_size", "21"], settings)
    gradients |= {(name, *setting): gradient for setting, gradient in zip(settings, found)}
    for which, change in product(("two rows", "all rows of a process"), (make_bad, leave_out)):
        if (change is leave_out and accelerator.num_processes > 1) or (which != "two rows" and name not in ALL_ROWS):
            continue
        skip = [*flags.replace("GUIDE", model_path).split(), "--batch_size", "21", "--on_bad_row", "skip"]
        (gradient,) = gradients_of(skip, [(700, "false")], change=partial(change, which=which))
        gradients[name, which, change.__name__] = gradient
mean = MEAN_OVER_ROWS.split()
(gradients["one batch of 64"],) = gradients_of([*mean, "--batch_size", "64"], [(700, "false")])
(gradients["four batches of 16"],) = gradients_of([*mean, "--batch_size", "16"], [(700, "false")], accumulation=4)
torch.save(gradients, f"{output}.{accelerator.process_index}.pt")
_, _, tables = open_rows(columns)
batches = [table.to_pylist() for table, _ in islice(tables, 40)]
Path(f"{output}.{accelerator.process_index}.json").write_text(json.dumps(batches))
