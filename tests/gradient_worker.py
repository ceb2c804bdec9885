"""Compute the gradient of one step under many settings, and read 40 batches; launched by test_equalities.py.

accelerate launch tests/gradient_worker.py MODEL SOURCE OUTPUT
"""

import json
import sys
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).parents[1]))
import train_bi_encoder as script

TEACHER = "--columns docstring code wrong worse --label_column scores --loss"
CASES = {
    "infonce": "--columns docstring code",
    "symmetric": '--columns docstring code --loss_kwargs {"symmetric":true}',
    "negatives": "--columns docstring code wrong",
    "matryoshka": "--columns docstring code --matryoshka_dims 32 8",
    "lists": '--columns docstring code lists --num_negatives 2 --loss_kwargs {"mask_margin":0.001}',
    "margin_mse": f'{TEACHER} margin_mse --loss_kwargs {{"teacher_temperature":0.05}}',
    "kl": f'{TEACHER} kl --loss_kwargs {{"teacher_temperature":0.05,"infonce":0.5}}',
    "CoSENTLoss": "--columns docstring code --label_column label --loss CoSENTLoss",
    "TripletLoss": "--columns docstring code wrong --loss TripletLoss",
}
ALL_ROWS = ("negatives", "kl", "CoSENTLoss")  # tested with all rows of a process bad
MEAN_OVER_ROWS = "--columns docstring code --label_column label --loss CosineSimilarityLoss"

model_path, source, output = sys.argv[1:]
MIXTURE = [  # a batch of each is a step
    {"columns": ["docstring", "code", "wrong"]},
    {"columns": ["docstring", "code"], "label_column": ["label"], "loss": "CoSENTLoss", "query_prompt": "similar: "},
    {"columns": ["docstring", "code", "wrong", "worse"], "loss_kwargs": {"in_batch": False}},
]
accelerator = Accelerator(cpu=True)
script.BUCKET = 10_000  # gradients of this model are summed by many collectives, as those of a large one are


def open_rows(flags):
    """Return (Args, Data, endless iterator over the batches of rows) for flags."""
    common = ["--model_name_or_path", model_path, "--eval_rows", "0", "--query_prompt", "", "--document_prompt", ""]
    args = script.parse_args([*common, *(["--train_data", source] * ("--train_data" not in flags)), *flags])
    data = script.open_data(args)
    return args, data, script.row_batches(data.sources, data.weights, args)


def choose_rows(table, which, args):
    """Return the indices of two rows, or of all rows that the second of two processes reads."""
    if which == "two rows":
        return np.array([0, 13])
    return np.argsort(-table[script.LENGTH].to_numpy(), kind="stable")[1::2]


def make_bad(table, which, args):
    """Return a Table with no text in "code" of the chosen rows; their bytes, by which rows are dealt, are kept."""
    rows = choose_rows(table, which, args)
    values = [" " * len(text.encode()) if i in rows else text for i, text in enumerate(table["code"].to_pylist())]
    return table.set_column(table.column_names.index("code"), "code", pa.array(values))


def leave_out(table, which, args):
    """Return a Table without the chosen rows."""
    return table.take(np.setdiff1d(np.arange(len(table)), choose_rows(table, which, args)))


def mark_a_row(table, args):
    """Return a Table in which the longest row, which the first process reads, has a mark in "code"."""
    longest = table[script.LENGTH].to_numpy().argmax()
    values = [f"[MASK] {text}" if i == longest else text for i, text in enumerate(table["code"].to_pylist())]
    return table.set_column(table.column_names.index("code"), "code", pa.array(values))


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
    loss_fns = [script.make_loss(source.args, model) for source in data.sources]
    accelerator.gradient_accumulation_steps = args.gradient_accumulation_steps = accumulation
    for args.micro_batch_tokens, args.grad_cache in settings:
        model.zero_grad()
        local = script.local_batches(iter(tables), 0, data, args, accelerator)
        for rows, index, more in islice(local, accumulation):
            batch = replace(script.make_batch(rows, index, model, args, accelerator), **more)
            assert not batch.error, batch.error
            batch = script.batch_to_torch(batch)
            loss = script.forward_backward(model, batch, args, accelerator, loss_fns[batch.source])
        script.reduce_gradients(model, accelerator)
        skipped = accelerator.reduce(torch.tensor(batch.skipped)).item()
        yield gradient_of(model), accelerator.reduce(loss).item(), len(batch.micro_batches), skipped


def gradient_of(model):
    """Return the gradients that there are as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def without_gradient(model):
    """Return the names of the weights without a gradient, not even 0."""
    return [name for name, weight in model.named_parameters() if weight.grad is None]


def encode_marked(model, role, features, accelerator):
    """Return the embeddings of a micro-batch; those of texts with [MASK] pass `rare`, a second encoder that no
    other text uses. No text uses `head`."""
    found = encode(model, role, features, accelerator)
    marked = (features["input_ids"] == model.tokenizer.mask_token_id).any(1)
    return torch.where(marked[:, None], model[0].rare(found), found) if marked.any() else found


columns = ["--columns", "docstring", "code"]
model = script.load_model(open_rows(columns)[0]).eval()  # no dropout: its masks depend on the micro-batches
settings = [(max_tokens, cache) for max_tokens in (128, 10**6) for cache in (False, True)]
settings = settings[1:3] if accelerator.num_processes == 4 else settings  # each value once
gradients = {}
for name, flags in CASES.items():
    found = gradients_of([*flags.split(), "--batch_size", "21"], settings)
    gradients |= {(name, *setting): gradient for setting, gradient in zip(settings, found)}
    for which, change in product(("two rows", "all rows of a process"), (make_bad, leave_out)):
        if (change is leave_out and accelerator.num_processes > 1) or (which != "two rows" and name not in ALL_ROWS):
            continue
        skip = [*flags.split(), "--batch_size", "21", "--on_bad_row", "skip"]
        (gradient,) = gradients_of(skip, [(700, False)], change=partial(change, which=which))
        gradients[name, which, change.__name__] = gradient
mean = MEAN_OVER_ROWS.split()
(gradients["one batch of 64"],) = gradients_of([*mean, "--batch_size", "64"], [(700, False)])
(gradients["four batches of 16"],) = gradients_of([*mean, "--batch_size", "16"], [(700, False)], accumulation=4)
mixture = [json.dumps({"path": source, "weight": 1, **own}) for own in MIXTURE]
mixture = ["--train_data", *mixture, "--mix_by", "batch", "--batch_size", "21"]
for setting, gradient in zip(settings, gradients_of(mixture, settings, accumulation=3)):
    gradients["mixture", *setting] = gradient

# Weights that are used by some processes, by none, or not any more.
encode, script.encode = script.encode, encode_marked
torch.manual_seed(0)
model[0].rare, model[0].head = (torch.nn.Linear(32, 32) for _ in range(2))
for frozen in (False, True):
    model[0].model.encoder.layer[1].requires_grad_(not frozen)
    for cache in (False, True):
        (gradient,) = gradients_of([*columns, "--batch_size", "21"], [(700, cache)], change=mark_a_row)
        gradients["frozen" if frozen else "marked", cache] = (*gradient, without_gradient(model))
torch.save(gradients, f"{output}.{accelerator.process_index}.pt")
_, _, tables = open_rows(columns)
batches = [table.to_pylist() for table, _ in islice(tables, 40)]
Path(f"{output}.{accelerator.process_index}.json").write_text(json.dumps(batches))
