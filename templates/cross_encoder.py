"""Train a cross-encoder with listwise cross-entropy or bce, on one process or several: a template to copy and change.

    python cross_encoder.py --train_data pairs.csv --columns question answer --output_dir runs/first
    accelerate launch --num_processes 2 cross_encoder.py --train_data 'a/*.parquet' b.jsonl --mixing_weights 0.7 0.3 \
        --columns query positive negative --streaming --output_dir runs/second [--resume]

To change: where rows come from -> open_source; what a row means -> read_row; a batch and its negatives -> read_batch;
the model -> load_model; pairs of texts -> make_micro_batches; weights and rates -> make_optimizer; loss ->
compute_loss; held-out measure -> evaluate; schedule and step -> main. `step`: steps done before, 0 in the first.
`extra`: a dict for state of your own, tensors and numbers that are equal on all processes; checkpoints hold it.

Each process reads all rows of a batch and scores every P-th pair, in micro-batches of at most --micro_batch_tokens.
Scores are summed over processes into one tensor, from which each computes the loss of the whole batch; each sends the
gradient of its own scores back through its micro-batches (Gao et al. 2021); gradients are summed. So without dropout,
processes and micro-batches change no gradient. No DDP wrapper: unused weights are no problem. --resume reads all rows
again. Left out: fp16, FSDP, labels other than 1 and 0.
"""

import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain, count
from math import ceil
from pathlib import Path
from random import Random
from typing import Literal

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import interleave_datasets, load_dataset
from sentence_transformers import CrossEncoder
from sentence_transformers.util import batch_to_device
from torch.nn.utils import clip_grad_norm_
from transformers import HfArgumentParser


@dataclass
class Args:
    train_data: list[str]  # sources: files or globs (FORMATS, also .gz), or Hub ids
    columns: list[str]  # query, positive, then equally many negatives for all rows, or none
    output_dir: str  # gets metrics.jsonl, checkpoint.pt and model/
    model_name_or_path: str = "cross-encoder/ms-marco-MiniLM-L6-v2"
    max_length: int | None = None  # tokens of a pair; None: the model's
    mixing_weights: list[float] | None = None  # of the sources, with the sum 1; None: they take turns
    streaming: bool = False  # read front to back, not at random from a mapped table
    shuffle_buffer: int = 10_000  # rows of a stream to shuffle together; 0: keep the order, of mapped rows too
    eval_rows: int = 1000  # held out from the beginning of the sources, before read_row leaves any out
    batch_size: int = 64  # rows over all processes
    micro_batch_tokens: int = 2048  # tokens of a forward pass, with padding
    max_graph_tokens: int = 32_768  # with more on a process, score twice, to keep one graph at a time (grad cache)
    loss: Literal["listwise_ce", "bce"] = "listwise_ce"
    num_negatives: int = 4  # documents of other rows to draw for each row, if --columns names no negatives
    learning_rate: float = 2e-5
    weight_decay: float = 0.01
    warmup_ratio: float = 0.1  # of the steps
    max_grad_norm: float = 1.0
    max_steps: int = 1000
    eval_steps: int = 100
    save_steps: int = 500
    seed: int = 0
    resume: bool = False


FORMATS = {"csv": "csv", "json": "json", "jsonl": "json", "parquet": "parquet"}


def open_source(path, args):
    """Return the rows of a source, a Dataset or, with --streaming, an IterableDataset (`from_generator` makes one)."""
    suffix = path.removesuffix(".gz").rpartition(".")[2]
    files = {"data_files": path} if suffix in FORMATS else {}
    rows = load_dataset(FORMATS.get(suffix, path), split="train", streaming=args.streaming, **files)
    return rows.select_columns(args.columns)


def read_rows(sources, args):
    """Yield rows without end, epoch after epoch: the same on all processes, and again in a resumed run."""
    options = {"buffer_size": args.shuffle_buffer} if args.streaming else {}
    for seed in count(args.seed):
        parts = sources
        if args.shuffle_buffer:
            parts = [part.shuffle(seed=seed, **options) for part in parts]
        mixed = parts[0]
        if len(parts) > 1:
            mixed = interleave_datasets(parts, args.mixing_weights, seed, stopping_strategy="all_exhausted")
        rows = iter(mixed)
        yield next(rows)  # an error if --eval_rows leaves no row
        yield from rows


def read_row(row, step, args):
    """Return [query, positive, negatives...], or None to leave the row out."""
    texts = [row[name] for name in args.columns]
    assert all(texts), row  # it has an empty text
    return texts


def read_batch(rows, size, num_negatives, step, args):
    """Return B = `size` lists of query, positive and negatives: the row's, or else positives of other queries."""
    batch = []
    for row in rows:
        texts = read_row(row, step, args)
        if texts:
            batch.append(texts)
        if len(batch) == size:
            break
    listed = defaultdict(set)  # {query: its documents}
    for query, *documents in batch:
        listed[query].update(documents)
    pool = sorted(set().union(*listed.values()))
    random = Random(f"{args.seed} {step}")  # the same on all processes
    for texts in batch:
        if len(texts) == 2:
            known = listed[texts[0]]  # never a negative of this query
            drawn = random.sample(pool, num_negatives + len(known))  # an error if the batch is too small
            texts += [document for document in drawn if document not in known][:num_negatives]
    return batch


def load_model(args):
    torch.manual_seed(args.seed)  # for weights that the folder lacks: the same on every process
    model = CrossEncoder(args.model_name_or_path, num_labels=1, device="cpu").float()
    model.max_seq_length = args.max_length or model.max_seq_length
    model.activation_fn = torch.nn.Sigmoid() if args.loss == "bce" else torch.nn.Identity()  # of predict()
    return model


def make_optimizer(model, args):
    groups = []
    for is_matrix in (True, False):  # biases and norms have no weight decay
        weights = [weight for weight in model.parameters() if (weight.ndim > 1) == is_matrix]
        decay = args.weight_decay * is_matrix
        groups.append({"params": weights, "weight_decay": decay, "peak": args.learning_rate})
    return torch.optim.AdamW(groups, fused=True)


def score(model, features, accelerator):
    """Return (pairs,) logits of a micro-batch."""
    features = batch_to_device(dict(features), accelerator.device)
    with accelerator.autocast():
        scores = model(features)["scores"]
    return scores.float().squeeze(1)


def cut(lengths, max_tokens):
    """Return lists of places, the longest text first: at most max_tokens each, of which at most 1/32 is padding."""
    parts = []
    longest = padding = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        padding += longest - lengths[place]
        if not parts or longest * (len(parts[-1]) + 1) > max_tokens or padding > max_tokens / 32:
            parts.append([])
            longest = lengths[place]
            padding = 0
        parts[-1].append(place)
    return parts


def make_micro_batches(model, rows, args, accelerator):
    """Return [(indices, features)] of this process' part of the pairs of rows; indices: (pairs,) in all of them."""
    pairs = [(query, document) for query, *documents in rows for document in documents]
    by_length = sorted(range(len(pairs)), key=lambda index: len("".join(pairs[index])))  # equal work for all
    mine = by_length[accelerator.process_index :: accelerator.num_processes]
    encoded = mine or by_length[:1]  # a stand-in, whose score is not used: of no pair there are no features
    features = model.preprocess([pairs[index] for index in encoded])
    mask = features["attention_mask"]
    micro_batches = []
    for places in cut(mask.sum(1).tolist(), args.micro_batch_tokens):
        used = mask[places].any(0)  # columns that are not padding in all of these pairs
        part = dict(features)
        for name, value in features.items():
            if torch.is_tensor(value):
                part[name] = value[places][:, used]
        micro_batches.append((torch.tensor(mine).long()[places[: len(mine)]], part))
    return micro_batches


def gather(micro_batches, outputs, rows, accelerator):
    """Return the (B, L) scores of all processes, without their graphs."""
    scores = outputs[0].new_zeros(len(rows) * (len(rows[0]) - 1))
    for (indices, _), output in zip(micro_batches, outputs):
        scores[indices] = output[: len(indices)].detach()
    return accelerator.reduce(scores, "sum").view(len(rows), -1)


def compute_loss(scores, rows, step, extra, args):
    """Return the cross-entropy of each positive among its row's documents, or of all pairs; scores: (B, L)."""
    labels = torch.zeros_like(scores)
    labels[:, 0] = 1.0
    if args.loss == "bce":
        return F.binary_cross_entropy_with_logits(scores, labels)
    return F.cross_entropy(scores, labels)


def forward_backward(model, rows, step, extra, args, accelerator):
    """Set the gradient of the batch's loss in the weights, and return the loss: the same on all processes."""
    micro_batches = make_micro_batches(model, rows, args, accelerator)
    keep_graphs = sum(part["input_ids"].numel() for *_, part in micro_batches) <= args.max_graph_tokens

    def forward(number):  # with the same dropout in a second pass and in a resumed run
        torch.manual_seed(hash((args.seed, step, accelerator.process_index, number)))
        _, features = micro_batches[number]
        return score(model, features, accelerator)

    with torch.set_grad_enabled(keep_graphs):
        outputs = [forward(number) for number in range(len(micro_batches))]
    scores = gather(micro_batches, outputs, rows, accelerator).requires_grad_()
    loss = compute_loss(scores, rows, step, extra, args)
    loss.backward()
    for number, (indices, _) in enumerate(micro_batches):
        output = outputs[number] if keep_graphs else forward(number)
        output[: len(indices)].backward(scores.grad.flatten()[indices])
    for weight in model.parameters():
        if weight.requires_grad:
            if weight.grad is None:  # no pair of this process needs it: others may have a gradient
                weight.grad = torch.zeros_like(weight)
            weight.grad = accelerator.reduce(weight.grad, "sum")
    return loss.item()


@torch.no_grad()
def evaluate(model, rows, args, accelerator):
    """Return {measure: mean over held-out rows} of the positive among the documents of its row; ties count against."""
    model.eval()
    micro_batches = make_micro_batches(model, rows, args, accelerator)
    outputs = [score(model, features, accelerator) for _, features in micro_batches]
    scores = gather(micro_batches, outputs, rows, accelerator)
    model.train()
    ranks = (scores >= scores[:, :1]).sum(1)
    return {"RR@10": torch.where(ranks <= 10, 1 / ranks, 0.0).mean().item()}


def main(args):
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())  # else processes on CPUs form no group
    assert accelerator.mixed_precision != "fp16"  # it requires a gradient scaler; bf16 does not
    metrics = Path(args.output_dir, "metrics.jsonl")
    checkpoint = Path(args.output_dir, "checkpoint.pt")
    steps = args.max_steps
    warmup = min(ceil(args.warmup_ratio * steps), steps - 1)
    sources = [open_source(path, args) for path in args.train_data]
    share = args.eval_rows // len(sources)
    first_rows = chain.from_iterable(source.take(share) for source in sources)
    held_out = read_batch(first_rows, args.eval_rows, num_negatives=9, step=0, args=args)
    rows = read_rows([source.skip(share) for source in sources], args)
    model = load_model(args).to(accelerator.device).train()
    optimizer = make_optimizer(model, args)
    start = {"step": 0, "extra": {}, "metrics_bytes": 0}
    if args.resume and checkpoint.exists():
        start = torch.load(checkpoint, map_location=accelerator.device.type, weights_only=True)
        assert start["args"] == vars(args), start["args"]  # the flags have changed
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(start["optimizer"])
    extra = start["extra"]
    if accelerator.is_main_process:
        metrics.parent.mkdir(parents=True, exist_ok=args.resume)
        metrics.touch()
        os.truncate(metrics, start["metrics_bytes"])

    def log(record):
        if accelerator.is_main_process:
            print(record)
            with open(metrics, "a") as file:
                print(json.dumps(record), file=file)

    if args.eval_rows and not start["step"]:
        log({"step": 0} | evaluate(model, held_out, args, accelerator))
    for step in range(steps):
        started = time.perf_counter()
        batch = read_batch(rows, args.batch_size, args.num_negatives, step, args)
        if step < start["step"]:  # trained on before the checkpoint
            continue
        factor = step / warmup if step < warmup else (steps - step) / (steps - warmup)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        loss = forward_backward(model, batch, step, extra, args, accelerator)
        norm = clip_grad_norm_(model.parameters(), args.max_grad_norm, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        record = {"step": done, "loss": loss, "grad_norm": norm.item()}
        record["rows_per_second"] = args.batch_size / (time.perf_counter() - started)
        if args.eval_rows and (done == steps or done % args.eval_steps == 0):
            record |= evaluate(model, held_out, args, accelerator)
        log(record)
        if accelerator.is_main_process and done % args.save_steps == 0:
            saved = {"step": done, "extra": extra, "metrics_bytes": metrics.stat().st_size}
            saved |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            saved["args"] = vars(args) | {"resume": True}
            torch.save(saved, f"{checkpoint}.part")
            os.replace(f"{checkpoint}.part", checkpoint)  # a kill leaves the old one or the new one
    if accelerator.is_main_process:
        model.save_pretrained(f"{args.output_dir}/model", create_model_card=False)
    accelerator.end_training()


if __name__ == "__main__":
    main(*HfArgumentParser(Args).parse_args_into_dataclasses())
