"""Train a bi-encoder with InfoNCE over whole batches, on one process or several: a template to copy and change.

    python bi_encoder.py --train_data pairs.csv --columns question answer --output_dir runs/first
    accelerate launch --num_processes 2 bi_encoder.py --train_data 'a/*.parquet' b.jsonl --mixing_weights 0.7 0.3 \
        --columns query positive negative --streaming --output_dir runs/second [--resume]

To change: where rows come from -> open_source; what a row means -> read_row; what a batch is -> read_batch; the model
and its prompts -> load_model; two encoders -> a ModuleDict by role from load_model, and model[role] in encode,
make_micro_batches and where it is saved; weights and rates -> make_optimizer; loss -> infonce; held-out measure ->
evaluate; schedule and step -> main. `step`: steps done before, 0 in the first. `extra`: a dict for state of your own,
tensors and numbers that are equal on all processes; checkpoints hold it.

Each process reads all rows of a batch and encodes every P-th text, in micro-batches of at most --micro_batch_tokens.
The embeddings are summed over processes into one tensor, from which each computes the loss of the whole batch; each
sends the gradient of its own embeddings back through its micro-batches (Gao et al. 2021); gradients are summed. So
without dropout, processes and micro-batches change no gradient. No DDP wrapper: unused weights or a second encoder are
no problem. --resume reads all rows again. Left out: fp16, FSDP, static models, similarities other than the cosine.
"""

import json
import os
import time
from dataclasses import dataclass
from itertools import chain, count
from math import ceil
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import interleave_datasets, load_dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import batch_to_device
from transformers import HfArgumentParser
from xxhash import xxh3_64_intdigest


@dataclass
class Args:
    train_data: list[str]  # sources: files or globs (FORMATS, also .gz), or Hub ids
    columns: list[str]  # query, positive, then any number of hard negatives
    output_dir: str  # gets metrics.jsonl, checkpoint.pt and model/
    model_name_or_path: str = "sentence-transformers/all-MiniLM-L6-v2"
    max_length: int | None = None  # tokens of a text; None: the model's
    mixing_weights: list[float] | None = None  # of the sources, with the sum 1; None: they take turns
    streaming: bool = False  # read front to back, not at random from a mapped table
    shuffle_buffer: int = 10_000  # rows of a stream to shuffle together; 0: keep the order, of mapped rows too
    eval_rows: int = 1000  # held out from the beginning of the sources, before read_row leaves any out
    batch_size: int = 64  # rows over all processes
    micro_batch_tokens: int = 2048  # tokens of a forward pass, with padding
    max_graph_tokens: int = 32_768  # with more on a process, encode twice, to keep one graph at a time (grad cache)
    temperature: float = 0.05
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
    """Return [query, positive, any number of hard negatives], or None to leave the row out."""
    texts = [row[name] for name in args.columns]
    assert all(texts), row  # it has an empty text
    return texts


def read_batch(rows, size, step, args):
    """Return lists of B = `size` queries, and of M documents: their positives, then all hard negatives."""
    queries = []
    positives = []
    negatives = []
    for row in rows:
        texts = read_row(row, step, args)
        if texts:
            queries.append(texts[0])
            positives.append(texts[1])
            negatives += texts[2:]
        if len(queries) == size:
            break
    return queries, positives + negatives


def load_model(args):
    torch.manual_seed(args.seed)  # for weights that the folder lacks: the same on every process
    model = SentenceTransformer(args.model_name_or_path, device="cpu").float()
    model.max_seq_length = args.max_length or model.max_seq_length
    return model  # with model.prompts["query"] and ["document"], which are saved with it


def make_optimizer(model, args):
    groups = []
    for is_matrix in (True, False):  # biases and norms have no weight decay
        weights = [weight for weight in model.parameters() if (weight.ndim > 1) == is_matrix]
        decay = args.weight_decay * is_matrix
        groups.append({"params": weights, "weight_decay": decay, "peak": args.learning_rate})
    return torch.optim.AdamW(groups, fused=True)


def encode(model, role, features, accelerator):
    """Return (texts, D) normalized embeddings of a micro-batch; role: "query" or "document"."""
    features = batch_to_device(dict(features), accelerator.device)
    with accelerator.autocast():
        embeddings = model(features)["sentence_embedding"]
    return F.normalize(embeddings.float())


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


def make_micro_batches(model, queries, documents, args, accelerator):
    """Return [(role, indices, features)] of this process' part of the texts; indices: (texts,) in all of them."""
    texts = queries + documents
    micro_batches = []
    for role in ("query", "document"):
        indices = [index for index in range(len(texts)) if (index < len(queries)) == (role == "query")]
        by_length = sorted(indices, key=lambda index: len(texts[index]))  # equal work for all
        mine = by_length[accelerator.process_index :: accelerator.num_processes]
        encoded = mine or by_length[:1]  # a stand-in, whose embedding is not used: of no text there are no features
        features = model.preprocess([texts[index] for index in encoded], prompt=model.prompts[role])
        mask = features["attention_mask"]
        for places in cut(mask.sum(1).tolist(), args.micro_batch_tokens):
            used = mask[places].any(0)  # columns that are not padding in all of these texts
            part = dict(features)
            for name, value in features.items():
                if torch.is_tensor(value):
                    part[name] = value[places][:, used]
            micro_batches.append((role, torch.tensor(mine).long()[places[: len(mine)]], part))
    return micro_batches


def gather(micro_batches, outputs, size, accelerator):
    """Return the (size, D) embeddings of the texts of all processes, without their graphs."""
    embeddings = outputs[0].new_zeros(size, outputs[0].shape[1])
    for (_, indices, _), output in zip(micro_batches, outputs):
        embeddings[indices] = output[: len(indices)].detach()
    return accelerator.reduce(embeddings, "sum")


def infonce(embeddings, queries, documents, step, extra, args):
    """Return InfoNCE of (B + M, D) embeddings; masked: texts equal to the positive, and positives of equal queries."""
    size = len(queries)
    hashes = [xxh3_64_intdigest(text.encode()) >> 1 for text in queries + documents]  # 63 bits
    hashes = torch.tensor(hashes, device=embeddings.device)
    query_hashes, document_hashes = hashes.split([size, len(documents)])
    masked = document_hashes[:size, None] == document_hashes  # (B, M)
    masked[:, :size] |= query_hashes[:, None] == query_hashes
    masked.fill_diagonal_(False)
    scores = embeddings[:size] @ embeddings[size:].T / args.temperature
    targets = torch.arange(size, device=scores.device)
    return F.cross_entropy(scores.masked_fill(masked, -torch.inf), targets)


def forward_backward(model, queries, documents, step, extra, args, accelerator):
    """Set the gradient of the batch's loss in the weights, and return the loss: the same on all processes."""
    micro_batches = make_micro_batches(model, queries, documents, args, accelerator)
    keep_graphs = sum(part["input_ids"].numel() for *_, part in micro_batches) <= args.max_graph_tokens

    def forward(number):  # with the same dropout in a second pass and in a resumed run
        torch.manual_seed(hash((args.seed, step, accelerator.process_index, number)))
        role, _, features = micro_batches[number]
        return encode(model, role, features, accelerator)

    with torch.set_grad_enabled(keep_graphs):
        outputs = [forward(number) for number in range(len(micro_batches))]
    embeddings = gather(micro_batches, outputs, len(queries + documents), accelerator).requires_grad_()
    loss = infonce(embeddings, queries, documents, step, extra, args)
    loss.backward()
    for number, (_, indices, _) in enumerate(micro_batches):
        output = outputs[number] if keep_graphs else forward(number)
        output[: len(indices)].backward(embeddings.grad[indices])
    for weight in model.parameters():
        if weight.requires_grad:
            if weight.grad is None:  # no text of this process needs it: others may have a gradient
                weight.grad = torch.zeros_like(weight)
            weight.grad = accelerator.reduce(weight.grad, "sum")
    return loss.item()


@torch.no_grad()
def evaluate(model, queries, documents, args, accelerator):
    """Return {measure: mean} of held-out queries, each of which searches the positives of all; ties count against."""
    model.eval()
    size = len(queries)
    micro_batches = make_micro_batches(model, queries, documents[:size], args, accelerator)
    outputs = [encode(model, role, features, accelerator) for role, _, features in micro_batches]
    embeddings = gather(micro_batches, outputs, 2 * size, accelerator)
    model.train()
    scores = embeddings[:size] @ embeddings[size:].T
    ranks = (scores >= scores.diagonal()[:, None]).sum(1)
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
    held_out = read_batch(first_rows, args.eval_rows, 0, args)
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
        log({"step": 0} | evaluate(model, *held_out, args, accelerator))
    for step in range(steps):
        started = time.perf_counter()
        batch = read_batch(rows, args.batch_size, step, args)
        if step < start["step"]:  # trained on before the checkpoint
            continue
        factor = step / warmup if step < warmup else (steps - step) / (steps - warmup)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        loss = forward_backward(model, *batch, step, extra, args, accelerator)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        record = {"step": done, "loss": loss, "grad_norm": norm.item()}
        seconds = time.perf_counter() - started
        record["rows_per_second"] = args.batch_size / seconds
        if args.eval_rows and (done == steps or done % args.eval_steps == 0):
            record |= evaluate(model, *held_out, args, accelerator)
        log(record)
        if accelerator.is_main_process and done % args.save_steps == 0:
            saved = {"step": done, "extra": extra, "metrics_bytes": metrics.stat().st_size}
            saved["args"] = vars(args) | {"resume": True}
            saved["model"] = model.state_dict()
            saved["optimizer"] = optimizer.state_dict()
            torch.save(saved, f"{checkpoint}.part")
            os.replace(f"{checkpoint}.part", checkpoint)  # a kill leaves the old one or the new one
    if accelerator.is_main_process:
        model.save_pretrained(f"{args.output_dir}/model", create_model_card=False)
    accelerator.end_training()


if __name__ == "__main__":
    main(*HfArgumentParser(Args).parse_args_into_dataclasses())
