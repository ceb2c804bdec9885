"""Train a bi-encoder (texts -> embeddings) for retrieval, on a corpus of any size, on one process or many.

    python train_bi_encoder.py --model_name_or_path BAAI/bge-base-en-v1.5 --train_data 'pairs/*.parquet' \
        --output_dir runs/bge --batch_size 1024 --grad_cache true                            # one GPU
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_bi_encoder.py args.yaml --resume

A row is an anchor, a positive, any number of hard negatives (a column for each) and optionally a label; or an anchor
with lists of positives and negatives, from which each epoch draws one positive and --num_negatives negatives:

    {"question": "read a gzip file", "code": "def read(path): ...", "wrong": "def write(path): ..."}
    {"query": "read a gzip file", "pos": ["def read(file): ..."], "neg": ["def write(path): ...", "def cut(x): ..."]}

The file has three parts. "experiment" is what one changes: options, the run, the step, losses, rows (open_source says
where they come from, read_row what they mean), optimizer, schedule, model, evaluation. "the path of a batch" is for
whoever doubts the promise below, "services" need not be read. The last two are the same in train_cross_encoder.py;
templates/bi_encoder.py is this script with all but the essential left out.

The gradient depends on the batch alone (--batch_size rows over all processes). Each process encodes its part of the
texts, longest first, in micro-batches of at most --micro_batch_tokens; the embeddings are gathered for one loss over
the whole batch. So the number of processes, --micro_batch_tokens and --grad_cache change time and memory, but not the
gradient (except with dropout, whose random masks depend on how texts are grouped).

Output: model/ (loads in sentence-transformers), checkpoints/, metrics.jsonl, args.yaml and training.png.
Left out on purpose: images, DeepSpeed, models from scratch. docs/recipes/ has tested changes.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate>=1.12,<2", "backports.zstd>=1,<2; python_version < '3.14'", "datasets>=5.2,<6",
#   "filelock>=3.16,<5", "fsspec[http]>=2026.1", "matplotlib>=3.9,<4", "numpy>=2.2,<3", "pandas>=3.1,<4",
#   "psutil>=5.9,<8", "pyarrow>=24,<27", "pyyaml>=6.0.1,<7", "safetensors>=0.8,<1", "sentence-transformers>=6.2,<7",
#   "tokenizers>=0.23.1,<1", "torch>=2.6,<3", "tqdm>=4.67,<5", "transformers>=5.18,<6", "xxhash>=3.5,<5"]
# ///

import copy
import csv
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from bisect import bisect_right
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Literal

import transformers

# Shapes: B rows of a batch on P processes, n = ceil(B / P) slots for rows on each; C texts of a row (anchor, then
# documents, the positive first); L labels of a row; D dimensions of an embedding.

# ==== experiment
#
# ---- options

TEACHER_LOSSES = ("margin_mse", "kl")
Schedule = Literal["linear", "cosine", "constant", "constant_with_warmup", "warmup_stable_decay"]


def flag(default, help, may_change=False, above_zero=False):
    """Return the dataclass field of a command-line option. may_change: a resume may, as it changes neither the data
    nor, but for rounding, what a step computes from it. above_zero: numbers must be; those of other flags may be 0."""
    kind = {"default_factory": default.copy} if isinstance(default, list | dict) else {"default": default}
    return field(**kind, metadata={"help": help, "may_change": may_change, "above_zero": above_zero})


def json_object(text):
    return dict(json.loads(text))


@dataclass
class Args:
    # data
    train_data: list[str] = flag([], "paths, globs, folders, URLs, Hub ids, ID:config:split")
    eval_data: list[str] = flag([], "sources of held-out rows; none: rows of --train_data, of streams the first")
    eval_rows: int | None = flag(None, "rows held out to evaluate on; None: 1,000, but at most a tenth of the rows")
    eval_beir: list[str] = flag([], "also evaluate on these: BEIR folders, or Hub ids in the layout of NanoBEIR")
    eval_split: str = flag("test", "split of the judgments of BEIR folders")
    streaming: bool = flag(False, "read the sources front to back instead of at random from a memory-mapped table")
    columns: list[str] = flag([], "columns of anchor, positive, negatives...: texts or lists; none: all but the label")
    num_negatives: int | None = flag(None, "negatives of a row: its first ones or, from lists, drawn ones; None: all")
    corpus: list[str] = flag([], "sources of the documents by id; --columns then contain ids, not texts")
    queries: list[str] = flag([], "sources of the queries by id, for the first column")
    corpus_columns: list[str] = flag(["_id", "title", "text"], "id column of --corpus, then text columns, joined")
    query_columns: list[str] = flag(["_id", "text"], "id column of --queries, then text columns, joined")
    label_column: list[str] = flag([], "columns with a score or a list of scores; several are joined row by row")
    mixing_weights: list[float] = flag([], "weight of each source; none: its rows (streams: equal)", above_zero=True)
    mix_by: Literal["row", "batch"] = flag("row", "mix sources within a batch, or take each batch from one source")
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = flag(
        "all_exhausted", "end a mixed epoch with its first or its last source"
    )
    shuffle_buffer: int = flag(10_000, "rows that are shuffled together; 0: keep the order of the files")
    length_window: int = flag(1, "batches drawn together and sorted by length; 1: not sorted", above_zero=True)
    on_bad_row: Literal["error", "skip"] = flag("error", "stop at a bad row, or skip and count it", may_change=True)
    # model
    model_name_or_path: str = flag("", "Hub id or folder")
    trust_remote_code: bool = flag(False, "run the code that a model's folder contains: SECURITY.md", may_change=True)
    max_length: int | None = flag(None, "tokens a text is truncated to; None: the model's own", above_zero=True)
    pooling: Literal["mean", "cls", "max", "lasttoken"] | None = flag(None, "replace the model's pooling")
    dropout: float | None = flag(None, "dropout probability of the transformer; None: the model's own")
    lora_rank: int = flag(0, "train LoRA adapters of this rank instead of all weights; 0: train all weights")
    lora_kwargs: json_object = flag({}, "JSON: further options of peft.LoraConfig, such as lora_alpha, target_modules")
    attn_implementation: str | None = flag(None, "attention: sdpa, flash_attention_2, ...", may_change=True)
    query_prompt: list[str] = flag([], "prefix of queries, or one for each source; none: the model's own")
    document_prompt: str | None = flag(None, "prefix of documents; None: the model's own")
    append_eos: bool = flag(False, "end each text in the tokenizer's end token, which decoders need and often lack")
    # step
    batch_size: int = flag(64, "rows of a batch, over all processes", above_zero=True)
    micro_batch_tokens: int | None = flag(
        None,
        "tokens per forward, but of static models; None: 2,048 (CPU), 16,384 (GPU)",
        may_change=True,
        above_zero=True,
    )
    gradient_accumulation_steps: int = flag(1, "batches of a step, each with its own negatives", above_zero=True)
    grad_cache: bool | None = flag(
        None,
        "run each micro-batch twice, to hold one graph at a time; None: if more than 4 (CPU: 16)",
        may_change=True,
    )
    gradient_checkpointing: bool = flag(False, "recompute activations in backward, for long texts", may_change=True)
    loss: str = flag("infonce", "infonce; margin_mse or kl, for teacher scores; or a class of sentence-transformers")
    loss_kwargs: json_object = flag(
        {},
        'JSON: {"temperature": 0.05}, for dot products 1; for infonce also symmetric, mask_margin; for kl, margin_mse '
        "also teacher_temperature, and infonce, the weight of an added InfoNCE loss",
    )
    matryoshka_dims: list[int] = flag([], "sum the loss over embeddings cut to these dimensions", above_zero=True)
    # schedule
    learning_rate: float = flag(2e-5, "peak learning rate", above_zero=True)
    weight_decay: float = flag(0.01, "weight decay of matrices; biases and norms have none")
    warmup_ratio: float = flag(0.1, "fraction of the steps over which the learning rate rises from 0")
    lr_scheduler_type: Schedule = flag(
        "linear", "transformers' schedule; constant has no warmup, warmup_stable_decay falls in the last tenth"
    )
    max_grad_norm: float = flag(1.0, "clip the gradient to this norm; 0: do not")
    num_train_epochs: float = flag(1.0, "passes over the rows", above_zero=True)
    rows_per_epoch: int = flag(0, "rows of an epoch, a fresh sample each; 0: all")
    max_steps: int = flag(0, "stop after this many optimizer steps; 0: after --num_train_epochs")
    seed: int = flag(0, "seed of the row order, new weights and dropout")
    full_determinism: bool = flag(False, "deterministic kernels: bit-identical resume on a GPU", may_change=True)
    # run
    output_dir: str = flag("runs/bi_encoder", "folder for everything the run writes", may_change=True)
    resume: bool = flag(False, "resume from the newest intact checkpoint, or start if none", may_change=True)
    accept_changes: bool = flag(False, "resume although flags or sources have changed", may_change=True)
    eval_steps: int = flag(0, "steps between evaluations; 0: a tenth of the run", may_change=True)
    metric_for_best_model: str | None = flag(None, "save the model that evaluates best by this measure; None: last")
    early_stopping_patience: int = flag(0, "evaluations without a new best to stop after; 0: never", may_change=True)
    save_steps: int = flag(500, "steps between checkpoints; 0: only at the end", may_change=True)
    save_total_limit: int = flag(2, "checkpoints kept", may_change=True, above_zero=True)
    logging_steps: int = flag(10, "steps between lines of metrics.jsonl", may_change=True, above_zero=True)
    report_to: list[str] = flag([], "trackers of Accelerate: tensorboard, wandb, ...", may_change=True)


def check_flags(args):
    """Raise UserError for flags that are missing, or that exclude or require each other."""
    if not (args.train_data and args.model_name_or_path):
        raise UserError("--train_data and --model_name_or_path are required")
    if len(args.mixing_weights) not in (0, len(args.train_data)):
        raise UserError(f"--mixing_weights: give {len(args.train_data)} numbers, one for each source")
    if args.streaming and not (args.max_steps or args.rows_per_epoch):
        raise UserError("--streaming requires --max_steps or --rows_per_epoch: the length of a stream is unknown")
    if args.loss == "infonce" and args.label_column:
        raise UserError(
            "--label_column: infonce reads no labels, the first document is the positive: leave it out, or set --loss "
            "kl, margin_mse or one of sentence-transformers that reads them, such as CoSENTLoss"
        )
    if args.loss in TEACHER_LOSSES and not args.label_column:
        raise UserError(f"--loss {args.loss} requires teacher scores: set --label_column")
    if args.loss in TEACHER_LOSSES and "teacher_temperature" not in args.loss_kwargs:
        raise UserError(
            f'--loss {args.loss}: --loss_kwargs must have "teacher_temperature": 1 for logits; for cosines and '
            "probabilities the same as temperature"
        )
    if args.early_stopping_patience and not args.metric_for_best_model:
        raise UserError("--early_stopping_patience requires --metric_for_best_model, such as held_out_cosine_ndcg@10")
    if len(args.query_prompt) not in (0, 1, len(args.train_data)):
        raise UserError("--query_prompt takes one, or one for each source")


class Parser(transformers.HfArgumentParser):
    def add_argument(self, *names, may_change=None, above_zero=None, **options):
        """Leave out the metadata of flag(), which argparse does not know, and aliases with dashes. A flag that may be
        true, false or None needs no value to be true, as one that may not be None."""
        if options.get("type") is transformers.hf_argparser.string_to_bool:
            options |= {"nargs": "?", "const": True}
        return super().add_argument(*[name for name in names if "-" not in name[2:]], **options)


def make_parser():
    """Return the parser of the flags of Args."""
    parser = Parser(Args, description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("file", nargs="?", help="YAML or JSON file of flags, such as args.yaml of a run")
    return parser


# ---- libraries

if __name__ == "__main__":  # --help and mistyped flags are answered now: what follows takes ten seconds to load
    make_parser().parse_args()

import datasets
import fsspec
import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from accelerate.utils.memory import should_reduce_batch_size
from datasets.data_files import DataFilesList, get_data_patterns
from datasets.formatting import PythonFormatter
from filelock import FileLock, Timeout
from matplotlib.figure import Figure
from pyarrow.dataset import ParquetFragmentScanOptions
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
    NanoBEIREvaluator,
)
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from sentence_transformers.util.distributed import distributed_evaluation
from tokenizers.processors import TemplateProcessing
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint as recompute
from tqdm.auto import tqdm
from transformers.utils.peft_utils import find_adapter_config_file
from xxhash import xxh3_64_intdigest

# ---- main


def main(args):
    # ---- set up
    given = args  # kept in args.yaml and checkpoints: a resume on another machine resolves the rest anew
    accelerator = start(args)
    device = accelerator.device
    is_main = accelerator.is_main_process
    sharded = accelerator.distributed_type == DistributedType.FSDP
    _lock = lock_output(args.output_dir, accelerator)  # held until the process ends
    checkpoint, saved = find_checkpoint(args, accelerator)
    model = load_model(args)
    args = resolve_args(args, model, accelerator)

    # ---- data
    data = open_data(args)
    check_changes(saved, given, data, accelerator)
    evaluators = open_evaluators(data, model, args)
    accumulation = args.gradient_accumulation_steps
    steps = args.max_steps or math.ceil(args.num_train_epochs * data.epoch_rows / (args.batch_size * accumulation))
    args = replace(args, max_steps=steps)  # of this run: for read_row and losses that depend on the step
    eval_steps = args.eval_steps or math.ceil(steps / 10)

    # ---- model, loss and optimizer
    model_to_save = copy.deepcopy(model) if sharded and is_main else model  # FSDP will shard `model`
    model = model.to(device).train()
    loss_fn = make_loss(args, model)
    optimizer = make_optimizer(model, args)
    if sharded:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:  # without DDP: reduce_gradients needs no wrapper
        optimizer = accelerator.prepare(optimizer)

    # ---- resume, and evaluate before the first step
    # State of your own, {name: tensor}, equal on all processes, not sharded: saved in checkpoints. A resume sets it.
    extra = {}
    optimizers = [optimizer.optimizer]  # checkpoints hold the state of each
    checkpoints = Checkpoints(given, accelerator, data.description, model, optimizers, model_to_save, extra)
    progress = checkpoints.restore(checkpoint, saved)
    log = Log(given, accelerator, progress.metrics, shown=list(evaluators))
    log.begin()
    announce(model, data, progress, steps, args, accelerator)
    signals = receive_signals()
    if progress.step == 0 and evaluators:
        log.write(0, evaluate(model, evaluators, accelerator))
    best_step, out_of_patience = log.find_best()
    finished = out_of_patience or progress.step >= steps

    # ---- train: row_batches draws the rows of all processes, local_batches prepares those of this one
    tables = row_batches(data.sources, data.weights, args, progress.data_state)
    batches = prefetch(local_batches(tables, progress.step * accumulation, model, data, args, accelerator))
    bar = tqdm(total=steps, initial=progress.step, disable=not is_main, unit="step", mininterval=1)
    meter = Meter()
    error = None
    while not finished:
        # one optimizer step
        started = time.perf_counter()
        factor = schedule(progress.step, steps, args)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        step_batches = [next(batches) for _ in range(accumulation)]
        losses_of_batches = [forward_backward(model, batch, args, accelerator, loss_fn) for batch in step_batches]
        loss = sum(losses_of_batches) / accumulation  # accelerator.backward divides by it, too
        reduce_gradients(model, accelerator)
        norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        norm = norm.full_tensor() if sharded else norm
        loss, norm, skipped, stopping, error = agree(loss, norm, step_batches, signals, progress.step, accelerator)
        if stopping:  # not after the step: an evaluation may follow, and a cluster kills soon after SIGTERM
            break
        optimizer.step()
        optimizer.zero_grad()
        progress.advance(loss, skipped, step_batches[-1].state)
        # Change `extra` here: not before, as a run that stops above saves it as it was.
        meter.add(args.batch_size * accumulation - skipped, step_batches, time.perf_counter() - started)
        finished = progress.step == steps
        bar.update()

        # metrics, evaluation, checkpoint
        record = {}
        evaluated = progress.step % eval_steps == 0 or finished
        if evaluated:
            record = evaluate(model, evaluators, accelerator)
        if progress.step % args.logging_steps == 0 or finished:
            record |= {"loss": progress.mean_loss(), "grad_norm": norm, "learning_rate": args.learning_rate * factor}
            record |= meter.read(accelerator)
            meter = Meter()
            bar.set_postfix_str("loss {loss:.4f}, {rows_per_second:,.0f} rows/s".format(**record), refresh=False)
        log.write(progress.step, record)
        if evaluated:
            best_step, out_of_patience = log.find_best()
            finished = finished or out_of_patience
        if not finished and (progress.step == best_step or (args.save_steps and progress.step % args.save_steps == 0)):
            checkpoints.save(progress, best_step)

    # ---- save
    bar.close()
    batches.close()
    checkpoints.save(progress, best_step)  # of the last step
    if not finished:
        if error:
            raise AgreedError(error)
        accelerator.print(f"stopped after step {progress.step:,} of {steps:,}: rerun with --resume to continue")
    elif is_main:
        step = best_step or progress.step
        write_model(checkpoints.model_of(step), log, step)
        plot_metrics(log.metrics, log.shown, Path(args.output_dir, "training.png"))
        if progress.skipped + data.skipped:
            print(f"{progress.skipped + data.skipped:,} bad rows skipped")
    accelerator.end_training()
    if signal.SIGINT in signals and not finished:
        raise KeyboardInterrupt


# ---- the step


def encode(model, role, features, accelerator):
    """Return (texts, D) float embeddings of a micro-batch; role: that of its texts, the name of their prompt."""
    features = transformers.BatchEncoding(features).to(accelerator.device, non_blocking=True).data
    with accelerator.autocast():  # gives flash attention its dtype
        return model(features, task=task_of(role))["sentence_embedding"].float()


def task_of(role):
    """Return what sentence-transformers calls the task of a text. "query_2": of queries of the second source."""
    return role.split("_")[0]


def forward_backward(model, batch, args, accelerator, loss_fn):
    """Add the gradient of this process' texts to that of the model; return this process' part of the loss. Summed over
    processes, they are the gradient and the loss of the whole batch."""
    micro_batches, tokens = equalize(batch, accelerator)
    keep_graphs = not args.grad_cache
    if args.grad_cache is None:
        keep_graphs = tokens <= args.micro_batch_tokens * (16 if accelerator.device.type == "cpu" else 4)

    def forward(number):  # (texts, D)
        seeds = np.random.SeedSequence([args.seed, batch.number, accelerator.process_index, number])
        torch.manual_seed(int(seeds.generate_state(1)[0]))  # dropout is the same in a second forward pass
        role, indices, features = micro_batches[number]
        return encode(model, role, features, accelerator)[: len(indices)]

    hashes = pad_columns(batch.hashes, -1, accelerator)  # (n, C)
    labels = pad_columns(batch.labels, math.nan, accelerator)  # (n, L)
    slots = tuple(batch.slots.to(accelerator.device, non_blocking=True))
    # One autocast around all micro-batches: they share its half-precision copies of the weights, which graphs keep.
    with accelerator.autocast(), torch.set_grad_enabled(keep_graphs):
        outputs = [forward(number) for number in range(len(micro_batches))]
    # The graph is cut here: the loss gives the gradient of the gathered embeddings, which is then passed on by hand.
    embeddings = gather(outputs, slots, hashes.shape, accelerator).requires_grad_()  # (P n, C, D)
    # The rows of this process among the gathered ones, (n,):
    mine = torch.arange(len(hashes), device=hashes.device) + accelerator.process_index * len(hashes)
    whole = WholeBatch(accelerator.gather(hashes).T, accelerator.gather(labels), mine, batch.step)
    loss = loss_fn(embeddings.unbind(1), whole)
    # As all gradients are, embeddings.grad is now divided by the accumulated batches, and scaled if fp16 is.
    accelerator.backward(loss)

    # embeddings.grad is the gradient, for all embeddings, of the losses of this process' rows. Sum it over processes,
    # and take the part of this process' texts.
    own = accelerator.reduce(embeddings.grad, "sum")[mine]  # (n, C, D)
    gradients = own[slots].split([len(indices) for _, indices, _ in micro_batches])  # (texts, D) of each micro-batch
    for number, gradient in enumerate(gradients):  # a micro-batch at a time, so that gradients add up in float32
        # If graphs are not kept, there is one at a time (Gao et al. 2021, section 3.2).
        output = outputs[number] if keep_graphs else forward(number)
        (output * gradient).sum().backward()
    return loss.detach()


def equalize(batch, accelerator):
    """Return (micro-batches of a Batch, their tokens with padding). Under FSDP, whose forward passes are collective,
    the last one is repeated, for no text, until all processes run equally many; the tokens are those of the most."""
    micro_batches = batch.micro_batches
    _, tokens = token_counts(micro_batches)
    if accelerator.distributed_type == DistributedType.FSDP:
        sizes = torch.tensor([[len(micro_batches), tokens]], device=accelerator.device)
        most, tokens = accelerator.gather(sizes).amax(0).tolist()
        role, _, features = micro_batches[-1]  # its output is discarded
        micro_batches = micro_batches + [(role, [], features)] * (most - len(micro_batches))
    return micro_batches, tokens


def gather(outputs, slots, shape, accelerator):
    """Return the (P n, C, D) embeddings of all processes, without their graphs, 0 where there is no text; outputs:
    (texts, D) of each micro-batch; slots: (rows, columns) of these texts; shape: (n, C)."""
    embeddings = outputs[0].new_zeros(*shape, *outputs[0].shape[1:])
    embeddings[slots] = torch.cat(outputs).detach()
    return accelerator.gather(embeddings)


def pad_columns(tensor, fill, accelerator):
    """Return a process' (n, C) tensor on the device, with as many columns as that of the process with most."""
    tensor = tensor.to(accelerator.device, non_blocking=True)
    if accelerator.num_processes == 1:  # else waits for the device to compare the shape with itself
        return tensor
    return accelerator.pad_across_processes(tensor, dim=1, pad_index=fill)


BUCKET = 2**23  # numbers of which gradients are summed at once, by one collective


def reduce_gradients(model, accelerator):
    """Sum the gradients of all micro-batches of a step over processes, once. All processes visit the same weights in
    the same order: one that has no gradient here, as no text of this process needs it, may have one elsewhere."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if accelerator.distributed_type == DistributedType.FSDP:  # each backward pass has taken the mean
        for grad in filter(torch.is_tensor, (weight.grad for weight in weights)):
            grad.mul_(accelerator.num_processes)
    elif accelerator.num_processes > 1:
        has_grad = torch.tensor([weight.grad is not None for weight in weights], device=accelerator.device)
        anywhere = accelerator.reduce(has_grad.int()).tolist()
        weights = [weight for weight, is_used in zip(weights, anywhere) if is_used]
        for weight in weights:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        buckets = np.cumsum([weight.numel() for weight in weights]) // BUCKET  # that of each weight
        for bucket in np.unique(buckets):
            grads = [weights[number].grad for number in np.flatnonzero(buckets == bucket)]
            vector_to_parameters(accelerator.reduce(parameters_to_vector(grads)), grads)


def agree(loss, norm, batches, signals, step, accelerator):
    """Return (loss, gradient norm, skipped rows, whether to stop, what is wrong or None) of a step, the same on all
    processes, by one collective and one wait for the device."""
    error = next((describe(batch.error) for batch in batches if batch.error), None)
    numbers = [len(signals), error is not None, sum(batch.skipped for batch in batches)]
    numbers = torch.stack([loss, *(torch.full_like(loss, number) for number in numbers)])
    loss, received, failed, skipped, norm = torch.stack([*accelerator.reduce(numbers), norm]).tolist()
    if failed:
        error = next(filter(None, gather_object([error])))
    elif step == 0 and skipped and loss == 0:
        error = "every row of the first step is bad: choose other --columns or --label_column, or edit read_row"
    elif not math.isfinite(loss) or not (math.isfinite(norm) or accelerator.scaler):
        error = f"step {step + 1}: loss {loss}, gradient norm {norm}: fix the data, or {LOWER_RATE}"
    return loss, norm, int(skipped), bool(received or error), error


# ---- losses
#
# A loss in LOSSES has the form
#
#     def my_loss(columns, whole, option=1.0):
#         losses = ...  # (n,): that of each row of `whole.mine`, 0 where whole.hashes[0][whole.mine] < 0
#         return losses.sum() / count_rows(whole)
#
# columns: C tensors (P n, D), the embeddings of the whole batch, from all processes: anchors, positives, negatives...,
# normalized if the similarity is cosine, 0 if missing. The sum over processes is then the mean over the batch. Options
# are --loss_kwargs; the default of `temperature` is 0.05 for cosines, 1 for dot products. With --matryoshka_dims it is
# called for each of them.

MAX_SCORES = 2**26  # in memory at once (256 MB); larger score matrices are computed in chunks, and again in backward


@dataclass
class WholeBatch:
    """The batch of all processes, as a loss gets it."""

    hashes: torch.Tensor  # (C, P n) int64, equal for equal texts; -1 if missing
    labels: torch.Tensor  # (P n, L) float; NaN if missing
    mine: torch.Tensor  # (n,) indices of this process' rows
    step: int  # optimizer steps before this one, for options that depend on it


def count_rows(whole):
    """Return the number of rows that are present, a tensor."""
    return (whole.hashes[0] >= 0).sum().clamp(min=1)


def softmax_loss(queries, documents, anchor_hashes, text_hashes, mine, temperature, margin):
    """Return the cross-entropy of document i, the target, for query i among all documents, summed over the queries
    `mine`. queries: (P n, D); documents: (M, D), of which the first P n are the targets; anchor_hashes: (M,) of
    each document's anchor, -1 for hard negatives; text_hashes: (M,) of its text, -1 if it is missing.

    False negatives are masked: documents with the anchor or the text of the target, and those whose similarity to the
    query exceeds the target's by more than `margin`, if it is given."""

    def chunk(targets):
        similar = queries[targets] @ documents.T  # (targets, M)
        masked = anchor_hashes[targets, None] == anchor_hashes
        masked |= text_hashes[targets, None] == text_hashes
        masked |= text_hashes < 0
        if margin is not None:
            similarity = similar.detach()
            masked |= similarity > similarity.gather(1, targets[:, None]) + margin
        masked.scatter_(1, targets[:, None], False)  # never the target
        scores = (similar * (1 / temperature)).masked_fill(masked, -torch.inf)
        losses = F.cross_entropy(scores, targets, reduction="none")
        return (losses * (anchor_hashes[targets] >= 0)).sum()

    chunks = mine.split(max(1, MAX_SCORES // len(documents)))
    if len(chunks) == 1:
        return chunk(mine)
    return sum(recompute(chunk, part, use_reentrant=False) for part in chunks)


def infonce(columns, whole, temperature=0.05, symmetric=False, mask_margin=None):
    """Return InfoNCE (van den Oord et al. 2018, equation 4) with in-batch and hard negatives.
    `symmetric`: average it with the loss of finding each positive's anchor (Radford et al. 2021, figure 3).
    `mask_margin`: mask documents that are more similar than the positive by this (Zhang et al. 2025, equation 2)."""
    anchors, positives, *_ = whole.hashes
    no_anchors = whole.hashes.new_full((whole.hashes[2:].numel(),), -1)  # of hard negatives
    options = {"mine": whole.mine, "temperature": temperature, "margin": mask_margin}
    document_anchors = torch.cat([anchors, no_anchors])
    document_texts = whole.hashes[1:].flatten()
    loss = softmax_loss(columns[0], torch.cat(columns[1:]), document_anchors, document_texts, **options)
    if symmetric:
        loss = (loss + softmax_loss(columns[1], columns[0], anchors, positives, **options)) / 2
    return loss / count_rows(whole)


def row_scores(columns, whole, temperature, teacher_temperature):
    """Return the similarities of this process' anchors to their rows' documents, and the teacher's labels of these,
    each divided by its temperature; (n, C - 1) each. A missing document has the label NaN."""
    anchors = columns[0][whole.mine]
    scores = torch.stack([(anchors * column[whole.mine]).sum(-1) for column in columns[1:]], 1)
    return scores / temperature, whole.labels[whole.mine] / teacher_temperature


def margin_mse(columns, whole, teacher_temperature, temperature=0.05):
    """Return the squared error of the margins of positives over negatives (Hofstätter et al. 2020, Margin-MSE)."""
    scores, labels = row_scores(columns, whole, temperature, teacher_temperature)
    errors = scores - labels.nan_to_num()
    errors = errors[:, :1] - errors[:, 1:]  # of the margins
    given = labels[:, 1:].isfinite()
    means = (errors.square() * given).sum(1) / given.sum(1).clamp(min=1)
    return means.sum() / count_rows(whole)


def kl(columns, whole, teacher_temperature, temperature=0.05):
    """Return KL(teacher || model) of the softmax over a row's documents (Lin et al. 2020)."""
    scores, labels = row_scores(columns, whole, temperature, teacher_temperature)
    student = scores.masked_fill(labels.isnan(), -1e9).log_softmax(1)
    teacher = labels.nan_to_num(-1e9).log_softmax(1)
    return F.kl_div(student, teacher, reduction="sum", log_target=True) / count_rows(whole)


LOSSES = {"infonce": infonce, "margin_mse": margin_mse, "kl": kl}


def library_loss(args, model):
    """Return a class of sentence-transformers as a loss(columns, whole): each process computes the loss of all rows
    that are present, and returns its share of it."""
    if not hasattr(getattr(losses, args.loss, None), "compute_loss_from_embeddings"):
        raise UserError(f"--loss {args.loss}: not one of {', '.join(LOSSES)}, nor a loss on embeddings of the library")
    if args.loss in ("MSELoss", "EmbedDistillLoss"):
        raise UserError(f"--loss {args.loss} requires embeddings as labels: see docs/recipes/teacher_embeddings.md")
    with user_errors("--loss_kwargs", TypeError):
        module = getattr(losses, args.loss)(model, **args.loss_kwargs)
    if any(not name.startswith("model.") for name, _ in module.named_parameters()):
        raise UserError(f"--loss {args.loss} has weights of its own, which would not be trained")

    def loss(columns, whole):
        present = (whole.hashes[0] >= 0).nonzero().squeeze(1)
        if len(present) == 0:
            return columns[0].sum() * 0
        labels = whole.labels[present].squeeze(1)  # (rows,) if each has one label
        if (whole.hashes[:, present] < 0).any() or (args.label_column and labels.isnan().any()):
            raise UserError(f"--loss {args.loss} requires equally many documents and labels in all rows")
        columns = [column[present] for column in columns]
        with user_errors(f"--loss {args.loss}", *BUGS):  # it can reject these columns or labels
            value = module.compute_loss_from_embeddings(columns, labels if args.label_column else None)
        value = sum(value.values()) if isinstance(value, dict) else value  # of the terms of a sum, by name
        return value * (whole.hashes[0][whole.mine] >= 0).sum() / len(present)

    return loss


def make_loss(args, model):
    """Return loss(columns, whole): one of LOSSES, or a class of sentence-transformers."""
    is_cosine = model.similarity_fn_name == "cosine"
    if args.matryoshka_dims:
        with model.truncate_embeddings(None):  # training has all dimensions, even if encode() returns fewer
            dimensions = model.get_embedding_dimension()
        if max(args.matryoshka_dims) > dimensions:
            raise UserError(f"--matryoshka_dims: the embeddings have only {dimensions} dimensions")
    kwargs = dict(args.loss_kwargs)
    weight = kwargs.pop("infonce", 0.0) if args.loss in TEACHER_LOSSES else 0.0
    if args.loss in LOSSES:
        if "temperature" in inspect.signature(LOSSES[args.loss]).parameters:
            kwargs = {"temperature": 0.05 if is_cosine else 1.0} | kwargs
        base = partial(LOSSES[args.loss], **kwargs)
        with user_errors("--loss_kwargs", TypeError):
            inspect.signature(base).bind("columns", "whole")
    else:
        base = library_loss(args, model)

    def loss(columns, whole):
        total = 0.0
        for size in args.matryoshka_dims or [None]:  # Kusupati et al. 2022, equation 1, with equal weights
            parts = [column[:, :size] for column in columns]
            if is_cosine and (args.matryoshka_dims or args.loss in LOSSES):  # classes normalize by themselves
                parts = [F.normalize(part, dim=-1) for part in parts]
            total += base(parts, whole)
            if weight:  # teachers do not score the documents of other rows
                total += weight * infonce(parts, whole, temperature=kwargs["temperature"])
        return total

    return loss


# ---- rows
#
# For each batch local_batches calls local_rows, which calls read_row for each row and replaces ids by texts; and then
# make_batch.


def find_files(name):
    """Return the files of a source; for rows from elsewhere, [name]. Their names, sizes and both ends tell a resume
    whether the source has changed."""
    return list_files(name)


def open_source(files, args):
    """Return the rows of files of a source, with the columns of --columns and --label_column: a Dataset or, with
    --streaming, an IterableDataset, that yields pyarrow Tables. The files are those of find_files; of a stream in
    another order in each epoch, and for held-out rows the first ones alone.

    For rows from elsewhere, such as IterableDataset.from_generator(f).with_format("arrow"), edit this and find_files,
    and set --columns and --streaming. Each call must give the same rows in the same order: a resume seeks a row, or
    loads the state_dict of a stream; it does not notice other rows of the same name."""
    names = dict.fromkeys([*args.columns, *args.label_column])
    return open_files(files, args.streaming).select_columns(list(names))


@dataclass
class Row:
    """What a row of data means."""

    query: str
    documents: list  # of str, the positive first
    labels: list  # of float
    cells: dict = field(default_factory=dict)  # the row as read, with SOURCE and NUMBER; set after read_row


def read_row(cells, step, args, random=None):
    """Return the Row that {column: value} means. Edit this function if your rows have another form.

    cells: those of --columns and --label_column, as Python objects; a list that is null is empty. Raise ValueError for
    a bad row: " in the row {...}" will follow its text. step: the optimizer steps before that of the row's batch, for
    whatever changes during a run; 0 for held-out rows. random is None unless a column holds lists; its draws are the
    same for a row on any number of processes, and others in each epoch."""
    query_column, *document_columns = args.columns
    query = read_text(cells[query_column], query_column, args.queries)
    groups = []
    for column in document_columns:
        values = cells[column] if isinstance(cells[column], list) else [cells[column]]
        groups.append([read_text(value, column, args.corpus) for value in values])
    if not groups[0]:
        raise ValueError(f"{document_columns[0]!r} has no text")
    labels = read_labels(cells, args)
    documents, labels = choose_documents(groups, labels, random, args)
    if args.loss in TEACHER_LOSSES and not 2 <= len(documents) == len(labels):
        raise ValueError(f"--loss {args.loss} requires a score for each of two or more documents: not the case")
    return Row(query, documents, labels)


def read_text(value, column, is_id=False):
    """Return a text, or an id as a text. Raise ValueError if there is none, and UserError, which --on_bad_row does not
    skip, if it is a value of another type: the column is wrong, not the row."""
    if is_id and isinstance(value, int | float):
        return str(value).removesuffix(".0")  # whole numbers are read as floats where some are missing
    if not isinstance(value, str | None):
        raise UserError(f"{column!r} holds {type(value).__name__}, not texts: choose other columns, or edit read_row")
    if value is None or not value.strip():
        raise ValueError(f"{column!r} has no text")
    return value


def read_labels(cells, args):
    """Return the labels of a row: those of all --label_column, each a number, a list of numbers, or JSON of them."""
    labels = []
    with suppress(ValueError, TypeError):
        for column in args.label_column:
            value = cells[column]
            if isinstance(value, str) and value.startswith("["):
                value = json.loads(value)
            labels += map(float, value if isinstance(value, list) else [value])
        if all(map(math.isfinite, labels)) and (labels or not args.label_column):
            return labels
    raise ValueError(f"{' '.join(args.label_column)!r} has missing, extra or non-finite numbers")


def choose_documents(groups, labels, random, args):
    """Return (documents, labels) of a row, the positive first; groups: the documents of each column. From lists, draw
    one positive and --num_negatives of the other documents."""
    documents = list(chain.from_iterable(groups))
    num_positives = len(groups[0]) if len(groups) > 1 else 1
    negatives = range(num_positives, len(documents))
    limit = len(negatives) if args.num_negatives is None else min(args.num_negatives, len(negatives))
    chosen = range(num_positives + limit)
    if random and (len(groups) > 1 or args.num_negatives is not None):
        chosen = [random.randrange(num_positives), *sorted(random.sample(negatives, limit))]
    if len(labels) == len(documents):
        labels = [labels[index] for index in chosen]
    elif labels and chosen != range(len(documents)):  # it is unknown which labels the chosen ones have
        raise ValueError(f"{' '.join(args.label_column)!r} has missing, extra or non-finite numbers")
    return [documents[index] for index in chosen], labels


def local_rows(table, local, step, data, args):
    """Return (rows, number of bad rows) of this process. table: all rows of a batch; local: the indices of its own.
    Edit it for a batch in which rows depend on each other."""
    return read_rows(table.take(local), data.sources, data.lookups, step, args)


@dataclass
class Batch:
    """This process' part of a batch: n slots for rows. Absent and bad rows leave slots empty."""

    rows: list  # of Row, at most n
    hashes: torch.Tensor  # (n, C) int64, equal for equal texts; -1 if missing
    labels: torch.Tensor  # (n, L) float; NaN if missing
    micro_batches: list  # (role, indices of texts, features)
    slots: torch.Tensor  # (2, texts): row and column of each text, in the order of the micro-batches
    number: int  # batches before this one
    step: int  # optimizer steps before that of this batch
    state: dict | None = None  # of row_batches, after this batch
    skipped: int = 0  # bad rows
    waited: float = 0.0  # seconds that training has waited for the batch
    error: Exception | None = None  # what ends the run; there are no rows then


def make_batch(rows, number, model, args, accelerator):
    """Return the Batch of this process' rows."""
    texts = []
    slots = []  # (slot, column) of each text
    hashes = []
    for slot, row in enumerate(rows):
        has_own_prompt = len(args.query_prompt) > 1 and row.cells[SOURCE] > 0
        role = f"query_{row.cells[SOURCE] + 1}" if has_own_prompt else "query"
        row_texts = [(role, row.query), *(("document", document) for document in row.documents)]
        prompted = [(model.prompts[role] + text).encode() for role, text in row_texts]
        hashes.append([xxh3_64_intdigest(text) >> 1 for text in prompted])  # 63 bits: not negative
        slots += [(slot, column) for column in range(len(row_texts))]
        texts += row_texts
    if not rows:  # forward passes and collectives must match those of other processes
        texts = [("query", "a text")]
        slots = [(0, 0)]
        hashes = [[-1, -1]]
    micro_batches = make_micro_batches(model, texts, args, accelerator)
    order = list(chain.from_iterable(indices for _, indices, _ in micro_batches))
    slots = pinned(torch.tensor(slots)[order].T.contiguous(), accelerator.device)
    size = math.ceil(args.batch_size / accelerator.num_processes)
    hashes = pinned(pad_lists(hashes, size, -1), accelerator.device)
    labels = pinned(pad_lists([row.labels for row in rows], size, np.nan, np.float32), accelerator.device)
    step = number // args.gradient_accumulation_steps
    return Batch(rows, hashes, labels, micro_batches, slots, number, step)


def make_micro_batches(model, texts, args, accelerator):
    """Return [(role, indices, features)] of this process' [(role, text)]; a micro-batch has texts of one role, "text"
    if a static model does not distinguish them."""
    micro_batches = []
    if is_static(model) and "task" not in model.get_model_kwargs():
        # One pass for all roles, which differ in prompts alone: each pass makes a gradient of the size of the model.
        texts = [("text", model.prompts[role] + text) for role, text in texts]
    for role in sorted({role for role, _ in texts}):
        chosen = [index for index, (other, _) in enumerate(texts) if other == role]
        options = {"prompt": model.prompts.get(role), "task": task_of(role)}
        texts_of_role = [texts[index][1] for index in chosen]
        for places, features in tokenize(model, texts_of_role, args, accelerator, **options):
            micro_batches.append((role, [chosen[place] for place in places], features))
    return micro_batches


# ---- optimizer and schedule


def make_optimizer(model, args):
    """Return AdamW; weight decay is for matrices only. Each group needs a "peak": main sets the rate of each step to
    peak * schedule(...)."""
    groups = []
    for is_matrix in (True, False):
        weights = [p for p in model.parameters() if p.requires_grad and (p.ndim > 1) == is_matrix]
        decay = args.weight_decay * is_matrix
        groups.append({"params": weights, "weight_decay": decay, "peak": args.learning_rate})
    return torch.optim.AdamW(groups, lr=args.learning_rate, fused=True)


def schedule(step, steps, args):
    """Return the factor of the learning rates at a step: that of transformers.get_scheduler, with a rate of 0 in the
    first step of a warmup; but a warmup has at most one step fewer than the run."""
    warmup = min(math.ceil(args.warmup_ratio * steps), steps - 1)
    if args.lr_scheduler_type == "constant":
        return 1.0
    if step < warmup:
        return step / warmup
    if args.lr_scheduler_type == "constant_with_warmup":
        return 1.0
    decay = math.ceil(steps / 10) if args.lr_scheduler_type == "warmup_stable_decay" else steps - warmup
    left = min(1.0, (steps - step) / decay)  # of the decay
    if args.lr_scheduler_type == "linear":
        return left
    return (1 - math.cos(math.pi * left)) / 2


# ---- model


def load_model(args):
    """Return the SentenceTransformer of the flags. A resume builds the same one, and then loads its weights. Two
    encoders are a Router of sentence-transformers: its folder as --model_name_or_path, or built here."""
    torch.manual_seed(args.seed)  # for adapters, and weights that the folder lacks
    options = {"use_safetensors": True}  # never a pickle
    if args.attn_implementation:  # None would replace the model's own
        options["attn_implementation"] = args.attn_implementation
    with user_errors(f"--model_name_or_path {args.model_name_or_path}"):
        check_exists(args.model_name_or_path)
        check_adapters(args.model_name_or_path)
        model = SentenceTransformer(
            args.model_name_or_path,
            device="cpu",
            model_kwargs=options,
            processor_kwargs={"chat_template": None},  # else a new embedder made of a chat model puts texts into it
            trust_remote_code=args.trust_remote_code,
        )
        if "SequenceClassification" in str(getattr(model.config, "architectures", None)):
            raise UserError("is a cross-encoder: use train_cross_encoder.py")
        if has_chat_template(model):
            raise UserError("puts texts into a chat template, which is not supported")
        if model.similarity_fn_name not in ("cosine", "dot"):
            raise UserError(f"similarity {model.similarity_fn_name} is not supported, only cosine and dot")
        set_up(model, args.max_length)
        if args.append_eos:
            for transformer in transformers_of(model, "--append_eos"):
                append_eos(transformer)
        if args.pooling:
            number = next((n for n, module in enumerate(model) if isinstance(module, Pooling)), None)
            if number is None:
                raise UserError("--pooling: the model has no pooling to replace")
            model[number] = Pooling(model[number].embedding_dimension, pooling_mode=args.pooling)
        check_last_token(model)
    for number, prompt in enumerate(args.query_prompt, 1):
        model.prompts["query" if number == 1 else f"query_{number}"] = prompt
    model.prompts.setdefault("query", "")
    passage = model.prompts.get("passage") or model.prompts.get("corpus") or ""  # other names of it
    own_prompt = model.prompts.get("document") or passage
    model.prompts["document"] = own_prompt if args.document_prompt is None else args.document_prompt
    return finish_model(model, args)


def append_eos(transformer):
    """Let the tokenizer end each text, a truncated one as well, in its end token, if it does not end in a special one.
    It is saved so with the model."""
    tokenizer = transformer.tokenizer
    if tokenizer.eos_token is None:
        raise UserError("--append_eos: the tokenizer has no end token")
    encoding = tokenizer.backend_tokenizer.encode("a text")
    special = encoding.special_tokens_mask
    if not special[-1]:
        before = encoding.tokens[: special.index(0)]  # such as <bos>
        added = [*before, tokenizer.eos_token]
        pairs = zip(added, tokenizer.convert_tokens_to_ids(added))
        template = TemplateProcessing(single=[*before, "$A", tokenizer.eos_token], special_tokens=list(pairs))
        tokenizer.backend_tokenizer.post_processor = template
    transformer.processor = as_fast_tokenizer(tokenizer)


def check_last_token(model):
    """Raise UserError if last-token pooling reads a word: transformers 5 ignores `add_eos_token` if tokenizer.json
    lacks it, and does not warn."""
    if any("lasttoken" in getattr(module, "pooling_mode", "") for module in model.modules()):
        encoding = model.tokenizer.backend_tokenizer.encode("a text")
        if not encoding.special_tokens_mask[-1]:
            raise UserError(f"pools the last token, but texts end in {encoding.tokens[-1]!r}: set --append_eos")


def is_static(model):
    """Return whether a model embeds texts by lookups alone; a Router may have a transformer beside them."""
    kinds = [type(module) for module in model.modules()]
    return StaticEmbedding in kinds and Transformer not in kinds


def resolve_args(args, model, accelerator):
    """Return Args with what is not given: the value of the first source, the model or the launch."""
    tokens = 2048 if accelerator.device.type == "cpu" else 16_384
    return replace(
        args,
        columns=args.columns or find_columns(args),
        micro_batch_tokens=args.micro_batch_tokens or (2**20 if is_static(model) else tokens),
        gradient_accumulation_steps=accelerator.gradient_accumulation_steps,  # a launch may set it
    )


# ---- evaluation: that of sentence-transformers, with its names of measures

EVAL_ROWS = 1000  # held out by default
EVAL_BATCH = 64  # texts
DEPTHS = {f"{name}_at_k": [10] for name in ("ndcg", "mrr", "map", "precision_recall")}
DEPTHS |= {"accuracy_at_k": [1], "batch_size": EVAL_BATCH, "write_csv": False}


def open_evaluators(data, model, args):
    """Return {its main measure: evaluator} of the held-out rows and of --eval_beir. A held-out query searches the
    positives of all rows for its own; if each row has one label, scores of its pair are correlated with that."""
    evaluators = {}
    rows = data.held_out
    cosine = model.similarity_fn_name  # or dot
    several = len(args.query_prompt) > 1  # as evaluators take one prompt, they are then part of the queries
    prompts = args.query_prompt if several else [""]
    queries = [prompts[min(row.cells[SOURCE], len(prompts) - 1)] + row.query for row in rows]
    documents = [row.documents[0] for row in rows]
    options = {"name": "held_out", "query_prompt": "" if several else None}  # None: the model's own
    if len(rows) > 1 and all(len(row.labels) == 1 for row in rows):
        labels = [row.labels[0] for row in rows]
        evaluators[f"held_out_spearman_{cosine}"] = PairEvaluator(queries, documents, labels, **options)
    elif rows:
        relevant = defaultdict(set)
        for query, document in zip(queries, documents):
            relevant[query].add(document)
        texts = [dict(zip(column, column)) for column in (queries, documents)]  # its own id: equal texts are one
        evaluators[f"held_out_{cosine}_ndcg@10"] = InformationRetrievalEvaluator(*texts, relevant, **options, **DEPTHS)
    for name in args.eval_beir:
        with user_errors(f"--eval_beir {name} (eval_incremental.py reads more layouts)", KeyError, TypeError):
            if os.path.isdir(name):
                evaluator = open_beir(name, args.eval_split)
            else:
                evaluator = NanoBEIREvaluator(nano_names(name), name, **DEPTHS)
            measure = f"{evaluator.name}_{cosine}_ndcg@10"
            if measure in evaluators:
                raise UserError("another collection has the same name")
            evaluators[measure] = evaluator
    return evaluators


class PairEvaluator(EmbeddingSimilarityEvaluator):
    """The library's, but for prompts: its own encodes both sides alike, without any."""

    def __init__(self, queries, documents, labels, name, query_prompt):
        super().__init__(queries, documents, labels, name=name, write_csv=False)
        self.query_prompt = query_prompt

    def embed_inputs(self, model, sentences):
        if sentences is self.sentences1:
            return model.encode_query(sentences, prompt=self.query_prompt, batch_size=EVAL_BATCH)
        return model.encode_document(sentences, batch_size=EVAL_BATCH)


def open_beir(folder, split):
    """Return the evaluator of a folder in the layout of BEIR, whose documents are relevant or not, without grades."""
    texts = []
    for name in ("queries", "corpus"):
        rows = to_python(open_files([f"{folder}/{name}.jsonl"], streaming=False)[:])
        texts.append({str(row["_id"]): f"{row.get('title') or ''} {row['text'] or ''}".strip() for row in rows})
    relevant = defaultdict(set)
    judgments = open_files([f"{folder}/qrels/{split}.tsv"], streaming=False)
    for row in to_python(judgments[:]):
        grade = float(row["score"])
        if grade not in (0, 1) or row["query-id"] in texts[1]:
            raise UserError("has grades, or documents with ids of queries: evaluate it after training")
        if grade and row["query-id"] in texts[0]:
            relevant[row["query-id"]].add(row["corpus-id"])
    if not relevant:
        raise UserError(f"no judgment of split {split!r} has a query of queries.jsonl")
    return InformationRetrievalEvaluator(*texts, relevant, name=Path(folder).name, **DEPTHS)


def nano_names(collection):
    """Return the names of the splits of a Hub id in the layout of NanoBEIR, as its evaluators take them."""
    check_exists(collection)
    splits = datasets.get_dataset_split_names(collection, "queries")
    return [split.removeprefix("Nano").lower() for split in splits]  # not always all thirteen


def evaluate(model, evaluators, accelerator):
    """Return {measure: value} of the evaluators, the same on all processes, which share the encoding."""
    sharded = accelerator.distributed_type == DistributedType.FSDP  # its forward passes are collective: all evaluate
    measures = {}
    # Training refuses tensors of inference mode, which a model may keep: rotary positions, or the buffers of FSDP.
    infer = partial(inspect.unwrap(type(model)._inference), model)  # without its own inference_mode
    model._inference = torch.inference_mode(False)(torch.no_grad()(infer))
    for evaluator in evaluators.values():
        with TOKENIZING, distributed_evaluation(model, not sharded) as is_mine, accelerator.autocast():
            if is_mine:
                measures |= evaluator(model)
    del model._inference
    model.train()
    measures = broadcast_object_list([measures])[0]
    return {name: float(value) for name, value in measures.items()}


# ==== the path of a batch: from here to the end identical in train_cross_encoder.py
#
# ---- all data of a run


@dataclass
class Data:
    """What a run trains and evaluates on."""

    sources: list  # of Source
    held_out: list  # of Row
    skipped: int  # bad rows among those held out
    lookups: list  # TextLookup of queries and of documents; None where rows contain texts
    weights: list  # share of each source
    epoch_rows: float  # mixed rows of an epoch
    description: list  # [name, rows, fingerprint] of each source and table of texts


def open_data(args):
    """Return the Data of the flags."""
    with user_errors("--train_data"):
        sources = [Source(name, number, args) for number, name in enumerate(args.train_data)]
    with user_errors("--eval_data"):
        eval_sources = [Source(name, number, args) for number, name in enumerate(args.eval_data)]
    lookups = []
    for names, columns in (args.queries, args.query_columns), (args.corpus, args.corpus_columns):
        with user_errors(" ".join(names)):
            lookups.append(TextLookup(names, columns) if names else None)
    description = [[source.name, len(source), data_fingerprint(source.files)] for source in (*sources, *eval_sources)]
    description += [[lookup.name, len(lookup.dataset), lookup.fingerprint] for lookup in filter(None, lookups)]

    eval_rows = args.eval_rows
    if eval_rows is None:
        unlimited = args.streaming or args.eval_data
        eval_rows = EVAL_ROWS if unlimited else min(EVAL_ROWS, sum(map(len, sources)) // 10)
    shares = list(map(len, eval_sources)) or args.mixing_weights or list(map(len, sources))
    eval_sources = eval_sources or sources
    held_out = []
    skipped = 0
    if eval_rows:
        counts = apportion([0] * len(shares), shares, eval_rows)
        tables = [source.hold_out(count) for source, count in zip(eval_sources, counts) if count]
        table = join_tables(tables, eval_sources)
        held_out, skipped = read_rows(table, eval_sources, lookups, 0, args)
    for source in sources:
        if not len(source):
            raise UserError(f"{source.name}: no row is left to train on after --eval_rows {eval_rows}")

    weights = args.mixing_weights or list(map(len, sources))  # without the rows held out
    ends = [len(source) * sum(weights) / weight for source, weight in zip(sources, weights)]  # of each, in mixed rows
    end = min(ends) if args.stopping_strategy == "first_exhausted" else max(ends)
    return Data(sources, held_out, skipped, lookups, weights, args.rows_per_epoch or end, description)


# ---- files

FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json", ".ndjson": "json",
           ".csv": "csv", ".tsv": "csv", ".txt": "text"}  # fmt: skip


UNSUPPORTED = f"not one of {' '.join(FORMATS)}, with or without .gz or .zst"


def file_suffix(file):
    """Return the key of FORMATS that a file name ends in, before .gz or .zst and the query of a URL; None if there is
    none."""
    name = file.partition("?")[0] if file.startswith("http") else file
    suffix = Path(name.lower().removesuffix(".gz").removesuffix(".zst")).suffix
    return suffix if suffix in FORMATS else None


def check_exists(name):
    """Raise UserError if `name` is not on disk and cannot be a Hub id: NAME or ORG/NAME, without a folder ORG here."""
    may_be_id = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) and not os.path.isdir(os.path.dirname(name))
    if not (may_be_id or "://" in name or os.path.exists(name)):
        raise UserError("no such file or folder")


def list_files(source):
    """Return the files of a path, glob, folder, URL, Hub id or ID:config:split, as `datasets` resolves them."""
    path = os.path.expanduser(source)
    config = None
    split = "train"
    if os.path.exists(os.path.join(path, "state.json")):  # of Dataset.save_to_disk; map() adds caches
        files = json.loads(Path(path, "state.json").read_text())["_data_files"]
        return [os.path.join(path, file["filename"]) for file in files]
    if suffix := file_suffix(path):  # decided by suffix, so that a missing file is not mistaken for a Hub id
        files = datasets.load_dataset_builder(FORMATS[suffix], data_files=path).config.data_files
    elif os.path.isfile(path):
        raise UserError(UNSUPPORTED)
    elif "://" in path and not path.startswith("hf:"):  # a folder of an object store
        by_split = get_data_patterns(path).items()
        files = {str(part): DataFilesList.from_patterns(patterns, path, [*FORMATS]) for part, patterns in by_split}
    else:
        if path.count(":") == 2:
            path, config, split = path.split(":")
        check_exists(path)
        files = datasets.load_dataset_builder(path, name=config or None).config.data_files
    if not files.get(split):
        available = ", ".join(str(part) for part in files if files[part]) or "none"
        raise UserError(f"no split {split!r} with files; available: {available}")
    if not file_suffix(files[split][0]):
        raise UserError(f"{files[split][0]}: {UNSUPPORTED}")
    return list(files[split])


def open_files(files, streaming=True):
    """Return a Dataset or IterableDataset of files of one format, which yields pyarrow Tables. The columns of CSV and
    TSV are texts, as written; only an empty cell is missing."""
    suffix = file_suffix(files[0])
    kind = FORMATS[suffix]
    options = {"split": "train", "writer_batch_size": 20_000}  # a mapped table lists its record batches: few, large
    if kind == "csv":
        files = [file for file in files if not os.path.isfile(file) or os.path.getsize(file)] or files
        options |= csv_options(suffix)
    if kind == "parquet":  # else pyarrow reads up to 1 GiB ahead, and keeps what it has read of a file
        options |= {"batch_size": 1000, "fragment_scan_options": ParquetFragmentScanOptions(pre_buffer=False)}
    load = partial(datasets.load_dataset, kind, data_files=files, **options)
    own = next(load(streaming=True).with_format("arrow").iter(1)).schema
    schema = pa.schema([(part.name, pa.string() if kind == "csv" else plain_type(part.type)) for part in own])
    if schema != own:
        load = partial(load, features=datasets.Features.from_arrow_schema(schema))
    elif kind == "arrow" and not streaming:
        with suppress(OSError, pa.ArrowInvalid):  # a local Arrow stream is mapped in place, anything else copied below
            parts = [datasets.Dataset.from_file(file) for file in files]
            return datasets.concatenate_datasets(parts).with_format("arrow")
    return load(streaming=streaming).with_format("arrow")


def csv_options(suffix):
    """Return the options by which `datasets` reads CSV or TSV as it is written: only an empty cell is missing, and TSV
    has no quotes."""
    warnings.simplefilter("error", pd.errors.ParserWarning)  # the first row has more fields than the header
    options = {"keep_default_na": False, "na_values": [""], "index_col": False}
    return options | ({"sep": "\t", "quoting": csv.QUOTE_NONE} if suffix == ".tsv" else {})


def plain_type(kind):
    """Return the Arrow type that a column is read as: text where the first rows are null, as what follows may be text;
    string and list where `take` or `datasets` cannot handle the type."""
    if is_list(kind):
        wrap = pa.large_list if pa.types.is_large_list(kind) else pa.list_
        return wrap(plain_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([part.with_type(plain_type(part.type)) for part in kind])
    return pa.string() if kind in (pa.null(), pa.string_view()) else kind


def data_fingerprint(files):
    """Return a hash of the names and sizes of files, and of both ends of the first and the last file."""
    digest = hashlib.sha256()
    for number, file in enumerate(files):
        fs, path = fsspec.core.url_to_fs(file)
        digest.update(f"{os.path.basename(path)} ".encode())
        with suppress(Exception):  # no file, or a web server that refuses the size of a file, or a part of it
            digest.update(f"{fs.size(path)} ".encode())
            if number in (0, len(files) - 1):
                digest.update(fs.head(path, 2**16))
                digest.update(fs.tail(path, 2**16))
    return digest.hexdigest()[:16]


# ---- rows, from Arrow to Python

SOURCE = "<source>"  # column added to rows: the number of their source
NUMBER = "<number>"  # column added to rows: the number of the row in its source, over all epochs


def is_list(kind):
    """Return whether an Arrow type is one of lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def count_bytes(column):
    """Return (rows,) bytes of text in each row of an Array, also in lists."""
    if is_list(column.type):
        rows = pc.list_parent_indices(column)
        return np.bincount(rows, count_bytes(pc.list_flatten(column)), minlength=len(column))
    if pa.types.is_struct(column.type):
        return sum(map(count_bytes, column.flatten()), np.zeros(len(column)))
    if column.type in (pa.string(), pa.large_string()):
        return pc.fill_null(pc.binary_length(column), 0).to_numpy()
    return np.zeros(len(column))


def row_lengths(table, args):
    """Return (rows,) bytes of text in --columns."""
    return sum(count_bytes(table[name].combine_chunks()) for name in dict.fromkeys(args.columns))


def to_python(table):
    """Return [{column: value}] of the rows of a Table; a list that is null is empty."""
    columns = PythonFormatter(datasets.Features.from_arrow_schema(table.schema)).format_batch(table)
    for name, values in columns.items():
        if is_list(table[name].type):
            columns[name] = [value or [] for value in values]
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def find_columns(args):
    """Return the columns of the first source but those of labels."""
    name = args.train_data[0]
    with user_errors(f"--train_data {name}"):
        first = next(open_files(find_files(name)).iter(1))
    columns = [column for column in first.column_names if column not in args.label_column]
    if len(columns) < 2:
        raise UserError(f"--columns: two or more are required, {name} has {columns}")
    return columns


# ---- a source, its windows, and where a resume continues

BLOCK = 100  # neighbouring rows of a mapped table that are read together; a shuffle window mixes many blocks


@dataclass
class Position:
    """Where a Source is: that of its next row."""

    taken: int = 0  # rows so far, over all epochs
    epoch: int = 0
    window: int = 0  # of the epoch
    used: int = 0  # rows of the window
    stream: dict | None = None  # state of a stream before the window


class Source:
    """The rows of a source, epoch after epoch, in windows that are shuffled as a whole: a pure function of the files,
    the seed and `number`."""

    def __init__(self, name, number, args):
        self.name = name
        self.number = number
        self.args = args
        self.window_rows = args.shuffle_buffer or 1000
        self.block_rows = min(BLOCK, self.window_rows)
        self.held_out = 0  # rows
        self.leading = 0  # files of a stream with the held-out rows; not permuted, so that skip() skips these rows
        with user_errors(name):
            self.files = find_files(name)
            self.dataset = None if args.streaming else open_source(self.files, args)
        self.seek(Position())

    def __len__(self):  # unknown for a stream: 1, so that streams are mixed equally by default
        return 1 if self.args.streaming else len(self.dataset)

    def hold_out(self, count):
        """Return a Table of at most `count` rows, and exclude them from training: those of split_rows or, of a stream,
        the first rows."""
        table = []
        with user_errors(self.name):
            if self.dataset:
                held_out, self.dataset = split_rows(self.dataset, min(count, len(self.dataset)))
                table = held_out[:]
            while self.args.streaming and len(table) < count and self.leading < len(self.files):
                self.leading += 1
                stream = open_source(self.files[: self.leading], self.args)
                table = next(stream.take(count).iter(count), [])
            if not len(table):
                raise UserError("contains no row")
        self.held_out = len(table)
        return self.add_numbers(table, 0)

    def seek(self, position):
        """Continue at a Position."""
        self.position = position
        self.table = []
        self.windows = self.read_windows()

    def take(self, count):
        """Return a Table of the next `count` rows."""
        position = self.position
        parts = []
        with user_errors(self.name):
            while count:
                if position.used >= len(self.table):
                    self.table = next(self.windows)
                part = self.table.slice(position.used, count)
                parts.append(self.add_numbers(part, position.taken))
                position.used += len(part)
                position.taken += len(part)
                count -= len(part)
        return pa.concat_tables(parts)

    def add_numbers(self, table, first):
        """Return a Table with the columns SOURCE and NUMBER, which identify a row of an epoch."""
        table = table.append_column(SOURCE, pa.array(np.full(len(table), self.number)))
        return table.append_column(NUMBER, pa.array(np.arange(first, first + len(table))))

    def read_windows(self):
        """Yield the windows of all epochs from `position` on, and update it with each."""
        position = self.position
        while True:
            has_rows = position.window > 0 or position.used > 0
            for table, stream in self.read_stream() if self.args.streaming else self.read_blocks():
                table.validate(full=True)  # offsets of a damaged Arrow file may be out of bounds
                if self.args.shuffle_buffer:
                    table = table.take(self.random(position.window).permutation(len(table)))
                position.stream = stream
                has_rows = True
                yield table.combine_chunks()
                position.window += 1
                position.used = 0
            if not has_rows:
                raise UserError("no row is left to train on after those that are held out: lower --eval_rows")
            position.epoch += 1
            position.window = 0
            position.used = 0
            position.stream = None

    def read_blocks(self):
        """Yield (Table, None) for each window of an epoch from `position` on: random blocks of neighbouring rows."""
        rows = len(self.dataset)
        blocks = np.arange(0, rows, self.block_rows)  # the first row of each
        if self.args.shuffle_buffer:
            self.random().shuffle(blocks[: rows // self.block_rows])  # but for the last one, if it is short
        num_blocks = self.window_rows // self.block_rows  # of a window
        for start in range(self.position.window * num_blocks, len(blocks), num_blocks):
            parts = []
            for first in blocks[start : start + num_blocks].tolist():
                # As dataset[first : first + size] does, without the 70 µs that formatting takes.
                parts.append(self.dataset.data.fast_slice(first, min(self.block_rows, rows - first)))
            yield pa.concat_tables(parts), None

    def read_stream(self):
        """Yield (Table, state of the stream before it) for each window of an epoch; a resume loads that state to read
        the window again. Only files are permuted: `datasets` does not resume its own shuffling exactly."""
        files = self.files[self.leading :]
        if self.args.shuffle_buffer:
            files = [files[index] for index in self.random().permutation(len(files))]
        stream = open_source(self.files[: self.leading] + files, self.args).skip(self.held_out)
        before = self.position.stream
        if before:
            stream.load_state_dict(before)
        before = before or stream.state_dict()  # ignores a loaded state until a row is read
        for table in stream.iter(self.window_rows):
            yield table, before
            before = stream.state_dict()

    def random(self, *keys):
        """Return the random generator of this source, its epoch and `keys`."""
        return np.random.default_rng([self.args.seed, self.number, self.position.epoch, *keys])


def split_rows(dataset, count):
    """Return (Dataset of `count` rows, Dataset of the others): the first are ten blocks of neighbours, spread evenly,
    as rows are often sorted."""
    taken, left = (np.linspace(0, rows, 11).astype(int) for rows in (count, len(dataset) - count))
    begins = taken + left
    middles = begins[:-1] + np.diff(taken)
    parts = []
    for firsts, ends in (begins[:-1], middles), (middles, begins[1:]):
        blocks = [dataset.select(range(first, end)) for first, end in zip(firsts, ends) if first < end]
        parts.append(datasets.concatenate_datasets(blocks or [dataset.select(range(0))]))
    return parts


# ---- mixing sources


def apportion(drawn, weights, count):
    """Return how many of the next `count` rows each source gives, to stay within a row of its share of all rows;
    drawn: rows of each source so far."""
    shares = np.array(weights) / sum(weights)
    missing = shares * (sum(drawn) + count) - drawn
    counts = np.maximum(missing.astype(int) - 1, 0)
    if counts.sum() > count:  # the weights have changed, by a resume: catch up over several calls
        counts[:] = 0
    for _ in range(count - counts.sum()):
        counts[np.argmax(missing - counts)] += 1
    return counts.tolist()


def join_tables(tables, sources):
    """Return the rows of the Tables of several sources as one; columns have the same types in all of them."""
    with user_errors(f"the columns of {', '.join(source.name for source in sources)} differ", TypeError):
        return pa.concat_tables(tables, promote_options="permissive").combine_chunks()


def row_batches(sources, weights, args, state=None):
    """Yield (Table of a batch's rows, state after it) without end: a pure function of sources, seed and batch size.
    Each batch has its own state (JSON), so prefetching loses no row: the position of each source before the length
    window, and "used", the batches taken from that window."""
    state = state or {"sources": [{} for _ in sources], "used": 0}
    for source, position in zip(sources, state["sources"]):
        source.seek(Position(**position))
    used = state["used"]
    size = args.batch_size * args.length_window  # rows of a length window
    unit = 1 if args.mix_by == "row" else size  # rows that one source gives at a time
    while True:
        positions = [asdict(source.position) for source in sources]
        drawn = [position["taken"] for position in positions]
        units = apportion([rows // unit for rows in drawn], weights, size // unit)
        tables = [source.take(count * unit) for source, count in zip(sources, units) if count]
        table = join_tables(tables, sources)
        order = np.arange(args.length_window)
        if args.length_window > 1:
            table = table.take(np.argsort(row_lengths(table, args), kind="stable"))
            np.random.default_rng([args.seed, *drawn]).shuffle(order)
        for number in range(used, len(order)):
            used = (number + 1) % len(order)
            if used == 0:  # the next batch begins a window
                positions = [asdict(source.position) for source in sources]
            rows = table.slice(order[number] * args.batch_size, args.batch_size)
            yield rows, {"sources": positions, "used": used}
        used = 0  # also where --length_window was lowered by a resume


# ---- from ids to texts


class TextLookup:
    """Texts by id from a memory-mapped table. Its index (sorted 64-bit hashes of the ids, and the row of each) is also
    a memory-mapped file, built once: 16 bytes per text on disk, none in memory."""

    def __init__(self, sources, columns):
        files = [file for source in sources for file in list_files(source)]
        self.name = sources[0]
        self.fingerprint = data_fingerprint(files)
        self.id_column, *self.text_columns = columns
        self.dataset = open_files(files, streaming=False).select_columns(columns)
        if isinstance(self.dataset.features[self.id_column], datasets.Json):
            raise UserError(f"{self.id_column!r} holds values of several types: make all of them texts")
        os.makedirs(datasets.config.HF_DATASETS_CACHE, exist_ok=True)
        path = f"{datasets.config.HF_DATASETS_CACHE}/evenstep-{self.fingerprint}-{self.id_column}.npy"
        with FileLock(f"{path}.lock"):  # one process builds the index, the others wait
            if not os.path.exists(path):
                np.save(f"{path}.part.npy", self.build_index())
                os.rename(f"{path}.part.npy", path)
        self.index = np.load(path, mmap_mode="r")

    def build_index(self):
        """Return (2, rows) uint64: sorted hashes, and the row of each."""
        hashes = np.concatenate([self.hashes(self.ids(table)) for table in self.dataset.iter(100_000)])
        order = np.argsort(hashes, kind="stable").astype(np.uint64)
        hashes = hashes[order]
        for first in np.flatnonzero(hashes[1:] == hashes[:-1]):
            rows = order[first : first + 2].tolist()
            pair = self.ids(self.dataset[rows]).tolist()
            raise UserError(f"ids {pair} are the same, or have the same 64-bit hash: change one")
        return np.stack([hashes, order])

    def texts(self, ids):
        """Return the text of each id of a list; None for an unknown id, or one without a text."""
        if not ids:
            return []
        with user_errors(f"{self.name}: {' '.join(self.text_columns)}"):
            places = np.searchsorted(self.index[0], self.hashes(np.array(ids, object)))
            rows = self.index[1, places.clip(max=len(self.dataset) - 1)]
            table = self.dataset[rows.tolist()].combine_chunks()  # else one chunk for each row
            texts = []
            for wanted, own, row in zip(ids, self.ids(table), to_python(table.select(self.text_columns))):
                text = " ".join(part or "" for part in row.values()).strip()
                texts.append(text if text and own == wanted else None)
            return texts

    def ids(self, table):
        """Return (rows,) object array of str."""
        table.validate(full=True)
        return np.asarray(table[self.id_column].cast(pa.large_string()), object)

    def hashes(self, ids):
        return pd.util.hash_array(ids, categorize=False)  # uint64, the same in every process


def resolve_ids(rows, lookups):
    """Replace the ids of rows by texts, None for an unknown id; lookups: of queries and of documents."""
    queries, documents = lookups
    if queries:
        for row, text in zip(rows, queries.texts([row.query for row in rows])):
            row.query = text
    if documents:
        texts = iter(documents.texts([name for row in rows for name in row.documents]))
        for row in rows:
            row.documents = [next(texts) for _ in row.documents]


# ---- this process' rows


def read_rows(table, sources, lookups, step, args):
    """Return (list of Row, number of bad rows) of a Table, with texts in place of ids; raise UserError for a bad row
    unless --on_bad_row is skip. sources: those that the column SOURCE counts; step: that of the rows' batch."""
    random = Random() if any(is_list(table[name].type) for name in args.columns) else None
    rows = []
    for cells in to_python(table):
        if random:  # seeding takes 5 µs
            random.seed(f"{args.seed} {cells[SOURCE]} {cells[NUMBER]}")
        try:
            rows.append(read_row(cells, step, args, random))
            rows[-1].cells = cells
        except ValueError as error:
            reject(error, cells, sources, args)
    resolve_ids(rows, lookups)
    known = []
    for row in rows:
        if row.query is None or None in row.documents:
            reject("no text has its id", row.cells, sources, args)
        else:
            known.append(row)
    return known, len(table) - len(known)


def reject(problem, cells, sources, args):
    """Raise UserError for a bad row, unless --on_bad_row is skip and nothing but the row is wrong."""
    source = sources[cells[SOURCE]].name
    if isinstance(problem, UserError):
        raise UserError(f"{source}: {problem}") from problem
    if args.on_bad_row == "error":
        shown = str({name: cells[name] for name in (*args.columns, *args.label_column)})[:200]
        raise UserError(f"{source}: {problem} in the row {shown}; fix it, edit read_row, or --on_bad_row skip")


def local_batches(tables, first, model, data, args, accelerator):
    """Yield this process' Batch of each (Table, state) without end; runs in a background thread. `first`: the number
    of the first one. Whatever fails becomes the `error` of a batch without rows, so that all processes stop before the
    same step, and save the one before."""
    number = first
    while True:
        try:
            table, state = next(tables)
            by_length = np.argsort(-row_lengths(table, args), kind="stable")
            local = np.sort(by_length[accelerator.process_index :: accelerator.num_processes])  # every P-th row
            rows, skipped = local_rows(table, local, number // args.gradient_accumulation_steps, data, args)
            batch = make_batch(rows, number, model, args, accelerator)
            batch.skipped = skipped
            batch.state = state
        except Exception as error:
            batch = make_batch([], number, model, args, accelerator)
            batch.error = error
        yield batch
        number += 1


# ---- micro-batches

TOKENIZING = threading.Lock()  # each call configures the tokenizer, which cannot be done while another uses it
CHUNK = 8192  # texts that are tokenized together: of similar length, as they are padded to the longest
AS_NUMPY = {"processing_kwargs": {"common": {"return_tensors": "np"}}}  # torch.tensor() of lists takes as long again
# Modules that do without a mask of ones, by where they are defined; others may read it, and get it.
WITHOUT_MASK = (
    "torch.",
    "transformers.",
    "peft.",
    "sentence_transformers.base.",
    "sentence_transformers.cross_encoder.",
    "sentence_transformers.sentence_transformer.model",
    "sentence_transformers.sentence_transformer.modules.pooling",
    "sentence_transformers.sentence_transformer.modules.static_embedding",
)


def tokenize(model, texts, args, accelerator, **options):
    """Yield (indices, features) of texts or pairs as sentence-transformers preprocesses them, cut into micro-batches
    of at most --micro_batch_tokens; options: of preprocess()."""
    device = accelerator.device
    if not has_chat_template(model):  # the library restores the end of a truncated one in torch's tensors only
        options |= AS_NUMPY
    needs_mask = any(not type(module).__module__.startswith(WITHOUT_MASK) for module in model.modules())
    characters = [len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts]
    order = np.argsort(characters)[::-1].tolist()
    for first in range(0, len(order), CHUNK):
        indices = order[first : first + CHUNK]
        with TOKENIZING:
            features = model.preprocess([texts[index] for index in indices], **options)
        features = {name: torch.as_tensor(v) if isinstance(v, np.ndarray) else v for name, v in features.items()}
        for places, part in split_features(features, args.micro_batch_tokens, device, needs_mask):
            yield [indices[place] for place in places], {name: pinned(part[name], device) for name in part}


def split_features(features, max_tokens, device, needs_mask):
    """Yield (places, features) of the texts at these places, the longest first, for each micro-batch."""
    if "offsets" in features:  # of a static model, whose tokens need no memory to speak of
        yield range(len(features["offsets"])), features
    elif "cu_seq_lens_q" in features:  # concatenated without padding, for flash attention
        bounds = features["cu_seq_lens_q"].tolist()
        for places in cut(np.diff(bounds), max_tokens, is_padded=False):
            yield places, take_flat(features, bounds, places)
    else:
        lengths = features["attention_mask"].sum(1).numpy()
        if device.type != "cpu":  # kernels are faster at multiples of 8
            lengths = np.minimum(-(-lengths // 8) * 8, features["attention_mask"].shape[1])
        for places in cut(lengths, max_tokens):
            yield places, take_padded(features, places, int(lengths[places[0]]), needs_mask)


def cut(lengths, max_tokens, is_padded=True):
    """Return lists of places, the longest text first, each of at most `max_tokens` with padding; a longer text is
    alone.

    Minimize the tokens with padding plus a cost for each forward pass: 1/64 of `max_tokens` up to 2,048 (12 to 35
    tokens measured on CPUs), 1/16 above (an estimate for GPUs, not measured). Cuts are tried where the length changes
    and after every 1/16 of `max_tokens`; trying all of them saves at most 0.3 % of the tokens and takes 30 times as
    long."""
    order = np.argsort(-lengths, kind="stable")
    sizes = np.maximum(lengths[order], 1)
    parts = []
    if not is_padded:
        left = 0
        for place, size in zip(order.tolist(), sizes.tolist()):
            if not parts or size > left:
                parts.append([])
                left = max_tokens
            parts[-1].append(place)
            left -= size
        return parts
    sixteenths = np.cumsum(sizes) * 16 // max_tokens
    begins = np.flatnonzero(np.diff(sizes, prepend=0) | np.diff(sixteenths, prepend=0))
    widths = sizes[begins].tolist()
    begins = [*begins.tolist(), len(order)]
    cost_of_a_pass = max_tokens / (64 if max_tokens <= 2048 else 16)
    best = {len(widths): (0.0, None)}  # {number of a begin: (lowest cost from it on, number of the next begin)}
    for first in reversed(range(len(widths))):
        limit = bisect_right(begins, begins[first] + max_tokens // widths[first])
        costs = []
        for end in range(first + 1, max(first + 2, limit)):
            tokens = (begins[end] - begins[first]) * widths[first]
            costs.append((cost_of_a_pass + tokens + best[end][0], end))
        best[first] = min(costs)
    first = 0
    while first < len(widths):
        end = best[first][1]
        parts.append(order[begins[first] : begins[end]].tolist())
        first = end
    return parts


def take_padded(features, places, width, needs_mask):
    """Return the features of some texts, without columns of padding beyond `width`, on whichever side it is."""
    mask = features["attention_mask"][places]
    columns = slice(width) if mask[:, 0].all() else slice(mask.shape[1] - width, None)
    part = dict(features)
    for name, value in features.items():
        if torch.is_tensor(value):  # (texts, tokens)
            part[name] = value[places, columns]
    if part["attention_mask"].all() and not needs_mask:  # else models wait for the device to see that all is 1
        del part["attention_mask"]
    return part


def take_flat(features, bounds, places):
    """Return the features of some texts that are concatenated; bounds: where texts begin, and the end of the last."""
    spans = [slice(bounds[place], bounds[place + 1]) for place in places]
    part = dict(features)
    for name, value in features.items():
        if torch.is_tensor(value) and value.shape[-1] == bounds[-1]:  # (1, tokens)
            part[name] = torch.cat([value[:, span] for span in spans], 1)
    lengths = torch.tensor([span.stop - span.start for span in spans])
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    part |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    part["seq_idx"] = torch.arange(len(spans), dtype=torch.int32).repeat_interleave(lengths)[None]
    return part


def token_counts(micro_batches):
    """Return (tokens without padding, tokens with padding) of micro-batches."""
    tokens = padded = 0
    for *_, features in micro_batches:
        size = features["input_ids"].numel()
        tokens += int(features["attention_mask"].sum()) if "attention_mask" in features else size
        padded += size
    return tokens, padded


def pinned(value, device):
    """Return a tensor in page-locked memory if `device` is a GPU, for asynchronous copies; else return the value."""
    return value.pin_memory() if device.type == "cuda" and torch.is_tensor(value) else value


def pad_lists(lists, size, fill, dtype=np.int64):
    """Return a (size, longest) tensor of lists, padded with `fill`, at least 1 wide."""
    padded = np.full((size, max([1, *map(len, lists)])), fill, dtype)
    for row, values in zip(padded, lists):
        row[: len(values)] = values
    return torch.from_numpy(padded)


def prefetch(batches, depth=2):
    """Yield from an iterator of Batch that runs in a background thread, `depth` ahead; its errors are raised here."""
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(next, batches) for _ in range(depth))
        while True:
            requested = time.perf_counter()
            batch = ahead.popleft().result()
            batch.waited = time.perf_counter() - requested
            ahead.append(pool.submit(next, batches))
            yield batch


# ==== services
#
# ---- errors


class UserError(ValueError):
    """Something the user can fix; printed as one line, without a traceback."""


class AgreedError(UserError):
    """What all processes raise together, after a collective; printed by the main process alone."""


def stop_together(error):
    """Raise AgreedError on all processes if any has an error, a text, not None: the first. Every process calls it."""
    error = next(filter(None, gather_object([error])), None)
    if error:
        raise AgreedError(error)


# Errors of code, such as an edited function: they keep their traceback.
BUGS = (KeyError, IndexError, TypeError, AttributeError, NameError)


HINTS = {  # what to do about errors of `datasets`
    "available configs": "choose one as ID:config:split",
    "Couldn't cast": "prepare_corpus.py rewrites rows of irregular types",
    "as a scalar of type": "prepare_corpus.py rewrites rows of irregular types",
    "the same columns": "prepare_corpus.py rewrites them, null where one is missing",
}


def reason_of(error):
    """Return the root cause of an error in one line, with what to do about it."""
    while error.__cause__ and not isinstance(error, UserError):
        error = error.__cause__
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, StopIteration):
        return "contains no row"
    if isinstance(error, KeyError):
        return f"there is no {error}"
    if isinstance(error, pd.errors.ParserWarning):
        return "line 2 has more fields than the header: check the separator, and quote texts that contain it"
    reason = str(error).strip() or repr(error)
    if isinstance(error, datasets.table.CastError):
        reason = f"not all rows have the same columns: {error.details()}"
    reason = " ".join(reason.split())[:500].replace("set 'local_files_only' to False", "unset HF_HUB_OFFLINE")
    return "; ".join([reason, *(hint for words, hint in HINTS.items() if words in reason)])


@contextmanager
def user_errors(name, *expected):
    """Turn whatever a library raises about the user's data or model into a UserError: `name`, then the root cause.
    expected: types of errors that are the user's here, although they are of code elsewhere."""
    try:
        yield
    except Exception as error:
        is_bug = isinstance(error, BUGS) and not isinstance(error, expected) and "Couldn't cast" not in str(error)
        if is_bug or should_reduce_batch_size(error):  # out of memory: not the data's fault, or the model's
            raise
        reason = reason_of(error)
        raise UserError(reason if reason.startswith(name) else f"{name}: {reason}") from error


def describe(error):
    """Return what is printed of an error of a batch: of a UserError its line, of others the traceback as well."""
    if isinstance(error, UserError):
        return str(error)
    return f"a batch could not be prepared\n{''.join(traceback.format_exception(error))}"


def print_error(error):
    """Print why a run ended: UserError and Ctrl-C in one line, others with a traceback. Return the exit status."""
    if isinstance(error, KeyboardInterrupt):  # at once: background threads may wait for data
        print("\ninterrupted: --resume continues from the newest checkpoint, if there is one", file=sys.stderr)
        return 130
    traceback.clear_frames(error.__traceback__)  # deletes main's progress bar, which ends its line
    is_main = os.environ.get("RANK", "0") == "0"
    if isinstance(error, AgreedError):
        if is_main:
            print(f"error: {error}", file=sys.stderr)
        PartialState().wait_for_everyone()  # once a process has ended, a launcher ends the others
    elif isinstance(error, UserError):
        if not is_main:  # of this process alone, or of each: a launcher then ends this one while it waits
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
        if should_reduce_batch_size(error):
            advice = "lower --micro_batch_tokens, or set --grad_cache true, then --gradient_checkpointing"
            print(f"out of memory: {advice}", file=sys.stderr)
    return 1


# ---- command line


def words_of(path):
    """Return the words of a command line that a YAML or JSON file of flags stands for."""
    words = []
    with user_errors(f"{path}: not a file of flags", TypeError):
        for name, value in dict(yaml.safe_load(Path(path).read_text())).items():
            values = value if isinstance(value, list) else [value]
            if name == "trust_remote_code":
                raise UserError("--trust_remote_code: only on the command line, as a file may have been downloaded")
            if values not in ([], [None]):  # else the default
                words.append(f"--{name}")
                words += [json.dumps(part) if isinstance(part, dict | bool) else str(part) for part in values]
    return words


SECRET = re.compile(r"://[^/@]*:[^/@]*@|://.*[?&][\w-]*(sig|signature|token|key|secret|password|credential)=", re.I)


def parse_args(argv):
    """Return Args from flags, or from a YAML or JSON file and flags that override it; exit on a wrong value."""
    parser = make_parser()
    names = [word.partition("=")[0] for word in argv]
    for name, option in parser._option_string_actions.items():
        if option.nargs == "+" and names.count(name) > 1:  # argparse would ignore the first list
            parser.error(f"{name}: given twice; list all values after one flag")
    if path := parser.parse_args(argv).file:
        argv = [path, *words_of(path), *(word for word in argv if word != path)]
    flags = vars(parser.parse_args(argv))
    del flags["file"]
    args = Args(**flags)
    for option in fields(args):
        values = flags[option.name]
        least = 1e-12 if option.metadata["above_zero"] else 0
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, str) and SECRET.search(value):
                parser.error(f"--{option.name}: a URL with a credential, which files would show; use ~/.netrc")
            if option.name == "output_dir" and "://" in value:
                parser.error(f"--output_dir {value}: must be a local folder; copy it elsewhere when the run has ended")
            if isinstance(value, int | float) and not least <= value < math.inf:
                relation = "above 0" if least else "0 or more"
                parser.error(f"--{option.name} {value}: must be finite, and {relation}")
    try:
        check_flags(args)
    except UserError as error:
        parser.error(str(error))
    return args


# ---- options of a model


def set_dropout(model, probability):
    """Set the dropout probability of Dropout modules and of all dropout numbers in modules and their configs."""
    count = 0
    for module in model.modules():
        for holder in filter(None, (module, vars(module).get("config"))):
            for name, value in list(vars(holder).items()):
                is_probability = "dropout" in name or (name == "p" and isinstance(holder, torch.nn.Dropout))
                if is_probability and type(value) in (int, float):
                    setattr(holder, name, probability)
                    count += 1
    if probability and not count:
        raise UserError(f"--dropout {probability}: the model has no dropout")


def transformers_of(model, flag_name):
    """Return the Transformer modules of a model, those of a Router too; raise UserError if there is none."""
    modules = [module for module in model.modules() if isinstance(module, Transformer)]
    if not modules:
        raise UserError(f"{flag_name} requires a transformer")
    return modules


def has_chat_template(model):
    """Return whether sentence-transformers puts texts or pairs into a chat template."""
    return any("message" in getattr(module, "modality_config", {}) for module in model.modules())


def finish_model(model, args, **lora_options):
    """Return the model with --dropout, --gradient_checkpointing and --lora_rank, in float32, in torch's own memory."""
    if args.gradient_checkpointing:
        for transformer in transformers_of(model, "--gradient_checkpointing"):
            with user_errors("--gradient_checkpointing: the model does not support it", AttributeError):
                transformer.model.gradient_checkpointing_enable({"use_reentrant": False})
    if args.dropout is not None:
        set_dropout(model, args.dropout)
    if args.lora_rank:
        add_lora(model, args, lora_options)
    else:
        model.float()  # with autocast, too, the weights updated are float32
    # Loaded tensors are views of a mapped file, at addresses that depend on its header; kernels choose their order of
    # summation by alignment, so the last bits would depend on the file. Copies do not.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def add_lora(model, args, options):
    """Freeze the model and add adapters to the linear layers of its transformers (Hu et al. 2021, section 4); options:
    of peft.LoraConfig, under --lora_kwargs."""
    targets = transformers_of(model, "--lora_rank")
    with user_errors("--lora_rank, --lora_kwargs (they require peft)", AttributeError, TypeError):
        from peft import LoraConfig, get_peft_model  # optional

        model.requires_grad_(False)  # other modules, too: the adapters contain all that is trained
        defaults = {"lora_alpha": 2 * args.lora_rank, "target_modules": "all-linear"}
        config = LoraConfig(r=args.lora_rank, **(defaults | options | args.lora_kwargs))
        for transformer in targets:
            transformer.model = get_peft_model(transformer.model, config)


def set_up(model, length):
    """Check weights and tokens of the modules of a model, and truncate to --max_length or the model's own length. Let
    the embeddings of all tokens be trained."""
    for module in model.modules():
        if isinstance(module, Transformer):
            check_weights(module.model)
            check_tokens(module.tokenizer, getattr(module.config, "vocab_size", math.inf))
            set_up_transformer(module, length)
        elif isinstance(module, StaticEmbedding):
            check_tokens(module.tokenizer, module.embedding.num_embeddings)
            if length:
                module.tokenizer.enable_truncation(length)


def set_up_transformer(transformer, length):
    """Set padding and the length of a Transformer module; raise UserError if that is beyond its positions."""
    tokenizer = transformer.tokenizer
    config = transformer.config
    if tokenizer.pad_token is None:  # of a decoder; what is padded is masked
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = tokenizer.pad_token_id  # where a classification head looks for the last token
    positions = getattr(config, "max_position_embeddings", None) or -1
    limit = positions if positions > 0 else 2**31  # XLNet has -1
    for name, module in transformer.named_modules():
        if isinstance(module, torch.nn.Embedding):
            if name.endswith("position_embeddings") and module.padding_idx is not None:
                limit -= module.padding_idx + 1  # RoBERTa's positions begin after it
            elif name.endswith(("position_embeddings", "wpe")) and tokenizer.padding_side == "left":
                raise UserError("pads on the left, which moves its positions: save it with padding_side right")
            module.padding_idx = None  # else an end token that is also padding would not be trained
    transformer.max_seq_length = length or min(transformer.max_seq_length or limit, 2**31)  # 10**30 if without a limit
    if transformer.max_seq_length > limit:
        raise UserError(f"has positions for {limit} tokens: set --max_length to that or less")


def check_adapters(name):
    """Raise UserError if a model is saved as adapters of peft: loaded, they are frozen, and would not be merged."""
    if find_adapter_config_file(name) or any(Path(name).glob("0_*/adapter_config.json")):
        raise UserError(
            "contains adapters of peft: merge the adapters first, PeftModel.from_pretrained(BASE_MODEL, ADAPTERS)"
            ".merge_and_unload().save_pretrained(NEW), and save the tokenizer there"
        )


def check_weights(transformer):
    """Raise UserError if weights are random, because the files have none of their name: but for those of a head, or of
    a pooler, which no embedding needs."""
    if type(transformer).from_pretrained.__func__ is not transformers.PreTrainedModel.from_pretrained.__func__:
        return  # remote code that loads by itself, without the mark of loaded weights
    body = transformer.base_model.named_parameters()  # without the head
    new = [name for name, weight in body if not hasattr(weight, "_is_hf_initialized") and "pool" not in name]
    if new:
        raise UserError(
            f"its files lack {len(new)} weights of {type(transformer).__name__}, such as {new[0]}, which would be "
            "random: they are of another kind of model, or it requires --trust_remote_code"
        )


def check_tokens(tokenizer, embeddings):
    """Raise UserError if a tokenizer has tokens without an embedding, except that of images, which no text has."""
    ids = tokenizer.get_vocab()
    ids.pop(getattr(tokenizer, "image_token", None), None)  # Gemma's
    tokens = max(ids.values()) + 1
    if tokens > embeddings:
        raise UserError(
            f"the tokenizer has {tokens} tokens, the model only {embeddings} embeddings: save it with "
            f"resize_token_embeddings({tokens}), or its own tokenizer"
        )


def as_fast_tokenizer(tokenizer):
    """Return a tokenizer as a PreTrainedTokenizerFast: other classes would replace its template when loaded."""
    names = ("model_input_names", "model_max_length", "padding_side", "truncation_side")
    options = {name: getattr(tokenizer, name) for name in names} | tokenizer.special_tokens_map
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **options)


# ---- checkpoints


@contextmanager
def save_atomically(folder):
    """Yield a temporary folder; at the end of the block, sync it to disk and rename it to `folder`."""
    part = folder.with_name(f".{folder.name}.part")
    with user_errors(f"{folder}: not written, earlier checkpoints are intact"):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            yield part
            for path in [*part.rglob("*"), part]:
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            shutil.rmtree(folder, ignore_errors=True)  # a damaged checkpoint, or an earlier model
            part.rename(folder)
        finally:  # do not leave a partial folder on a full disk
            shutil.rmtree(part, ignore_errors=True)


def checksums(folder):
    """Return the lines of SHA256SUMS, as `sha256sum` prints them, for all other files in a folder."""
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "SHA256SUMS"):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{digest}  {path.relative_to(folder)}\n")
    return "".join(lines)


def is_intact(path):
    """Return whether the files of a checkpoint match its checksums; report it if not."""
    with suppress(OSError, ValueError):
        if (path / "SHA256SUMS").read_text() == checksums(path):
            return True
    if path.exists():
        print(f"{path}: damaged", file=sys.stderr)
    return False


def lock_output(folder, accelerator):
    """Return a lock on --output_dir, which the main process holds until it ends, be it by SIGKILL. Raise AgreedError
    if another run holds it: each would write over the other's checkpoints."""
    lock = FileLock(Path(folder, ".lock"), is_singleton=True)  # a process may run main() again
    error = None
    if accelerator.is_main_process:
        try:
            os.makedirs(folder, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            error = f"--output_dir {folder}: another run is writing to it"
        except OSError as caught:
            error = f"--output_dir {folder}: {caught}"
    stop_together(error)
    return lock


def find_checkpoint(args, accelerator):
    """Return (folder, state) of the newest intact checkpoint, to resume from; (None, None) if there is none."""
    output = Path(args.output_dir)
    if (output / "args.yaml").exists() and not args.resume:
        raise UserError(f"--output_dir {output} contains a run: --resume it, or choose another folder")
    folders = sorted(output.glob("checkpoints/step_*"), reverse=True) if args.resume else []
    intact = next(filter(is_intact, folders), None) if accelerator.is_main_process else None
    folders, intact = broadcast_object_list([(folders, intact)])[0]  # as the main process sees them
    if not intact and folders:
        raise AgreedError(f"{output}/checkpoints: no checkpoint is intact; remove the folder to start anew")
    return intact, json.loads((intact / "state.json").read_text()) if intact else None


def flags_of_run(args):
    """Return {flag: value} without those of one launch, which a resume or a rerun must not inherit."""
    launch = ("resume", "accept_changes", "trust_remote_code")
    return {name: value for name, value in asdict(args).items() if name not in launch}


def unchanging(args, description):
    """Return {flag or source: value} of all that a resume must not change. description: that of Data."""
    options = [option.name for option in fields(args) if not option.metadata["may_change"]]
    return {f"--{name}": getattr(args, name) for name in options} | {name: shape for name, *shape in description}


def check_changes(saved, args, data, accelerator):
    """Raise UserError if flags or sources have changed since the checkpoint; with --accept_changes, print it."""
    if not saved:
        return
    changes = []
    for name, value in unchanging(args, data.description).items():
        before = saved["unchanging"].get(name)
        if before != value:
            changes.append(f"{name}: {before} -> {value}")
    if changes and not args.accept_changes:
        raise UserError(f"--resume: {'; '.join(changes)}: restore it, --accept_changes, or start a new --output_dir")
    for change in changes:
        accelerator.print(f"changed after step {saved['progress']['step']:,}: {change}")


@dataclass
class Progress:
    """How far a run is: what the state.json of a checkpoint contains besides the flags and the sources."""

    step: int = 0  # optimizer steps done
    data_state: dict | None = None  # of row_batches, after the last step
    skipped: int = 0  # bad rows
    losses: list = field(default_factory=list)  # of the steps since the last line of metrics.jsonl with a loss
    metrics: list = field(default_factory=list)  # the lines of metrics.jsonl
    scaler: dict | None = None  # state of the gradient scaler (fp16)

    def advance(self, loss, skipped, data_state):
        """Count an optimizer step."""
        self.step += 1
        self.losses.append(loss)
        self.skipped += skipped
        self.data_state = data_state

    def mean_loss(self):
        """Return the mean loss since the last call."""
        mean = sum(self.losses) / len(self.losses)
        self.losses = []
        return mean


LOWER_RATE = "lower --learning_rate, then --resume --accept_changes"


def full_copies(tensors, accelerator):
    """Return {name: tensor} with unsharded copies in the CPU's memory, on the main process; {} on all others. Under
    FSDP every process must call it."""
    copies = {}
    for name, tensor in tensors.items():
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else torch.as_tensor(tensor)
        if accelerator.is_main_process:
            copies[name] = tensor.detach().to("cpu", copy=True)
    return copies


def copy_like(weight, tensor):
    """Return a copy of a tensor, sharded like a weight of its shape. A loaded tensor is a view of a mapped file."""
    if isinstance(weight, DTensor) and tensor.shape == weight.shape:
        return distribute_tensor(tensor, weight.device_mesh, weight.placements)
    return tensor.clone()


@dataclass
class Checkpoints:
    """Saves and restores the state of a run: weights, state of the optimizers, `extra`, and the Progress."""

    args: Args
    accelerator: Accelerator
    description: list  # of Data
    model: torch.nn.Module  # which is trained
    optimizers: list
    model_to_save: torch.nn.Module  # `model`, or under FSDP a copy of it, on the main process
    extra: dict

    def path(self, step):
        return Path(self.args.output_dir, f"checkpoints/step_{step:08}")

    def weights(self):
        """Return {name: tensor} of the model's buffers and of the weights of an optimizer: what training changes."""
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers)
        trained = set(chain.from_iterable(group["params"] for group in groups))
        parameters = self.model.named_parameters(remove_duplicate=False)
        frozen = {name for name, weight in parameters if weight not in trained}  # such as those under adapters
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in frozen}

    def restore(self, path, saved):
        """Return the Progress of a checkpoint, and load its tensors; hyperparameters of optimizers are not restored
        but kept. Without a checkpoint, return the Progress of a new run."""
        if not saved:
            return Progress()
        loaded = load_file(path / "model.safetensors")
        weights = self.weights()
        if loaded.keys() != weights.keys():
            raise UserError(f"{path}: not of this model: {sorted(loaded.keys() ^ weights.keys())[:3]}")
        for name, weight in weights.items():
            weight.copy_(copy_like(weight, loaded[name]))
        self.restore_optimizers(load_file(path / "optimizer.safetensors"))
        for name, tensor in load_file(path / "extra.safetensors").items():
            self.extra[name] = tensor.clone().to(self.accelerator.device)
        progress = Progress(**saved["progress"])
        if self.accelerator.scaler and progress.scaler:  # else the checkpoint is not of fp16
            self.accelerator.scaler.load_state_dict(progress.scaler)
        return progress

    def restore_optimizers(self, tensors):
        """Load {"parameter.key": tensor} into the optimizers. A weight that had no gradient yet has no state."""
        weights = dict(self.model.named_parameters())
        for optimizer in self.optimizers:
            own = set(chain.from_iterable(group["params"] for group in optimizer.param_groups))
            for path, tensor in tensors.items():
                name, _, key = path.rpartition(".")
                weight = weights[name]
                if weight in own:
                    optimizer.state[weight][key] = copy_like(weight, tensor)
            optimizer.load_state_dict(optimizer.state_dict())  # moves each tensor to the device where it belongs

    def gather_tensors(self):
        """Return {file: {name: tensor}} of a checkpoint, as full_copies does."""
        states = {}
        for name, weight in self.model.named_parameters():
            for optimizer in self.optimizers:
                states |= {f"{name}.{key}": value for key, value in optimizer.state.get(weight, {}).items()}
        files = {"model": self.weights(), "optimizer": states, "extra": self.extra}
        return {name: full_copies(tensors, self.accelerator) for name, tensors in files.items()}

    def save(self, progress, best_step):
        """Write the checkpoint of a step unless there is one, then remove all but the newest --save_total_limit and
        that of `best_step`; every process must call it."""
        folder = self.path(progress.step)
        exists = broadcast_object_list([progress.step == 0 or is_intact(folder)])[0]
        if not exists:  # else a kill while it is replaced would lose it
            self.write(folder, progress)
        if self.accelerator.is_main_process:
            steps = sorted(folder.parent.glob("step_*"))
            kept = [path for path in steps if path <= folder]  # later ones are damaged: a resume did not use them
            kept = kept[-self.args.save_total_limit :] + [self.path(best_step)]
            for path in {*steps, *folder.parent.glob(".step_*")} - {*kept}:
                shutil.rmtree(path)
        self.accelerator.wait_for_everyone()

    def write(self, folder, progress):
        """Write a checkpoint: tensors, state as JSON, checksums."""
        files = self.gather_tensors()
        is_finite = all(weight.isfinite().all() for weight in files["model"].values())
        stop_together(None if is_finite else f"step {progress.step}: a weight is not finite: {LOWER_RATE}")
        if self.accelerator.is_main_process:
            progress.scaler = self.accelerator.scaler and self.accelerator.scaler.state_dict()
            state = {"progress": asdict(progress), "unchanging": unchanging(self.args, self.description)}
            with save_atomically(folder) as part:
                for name, tensors in files.items():
                    save_file(tensors, part / f"{name}.safetensors")
                (part / "state.json").write_text(json.dumps(state))
                (part / "SHA256SUMS").write_text(checksums(part))

    def model_of(self, step):
        """Return the model with the weights of a step's checkpoint; raise UserError if that is not intact."""
        if not is_intact(self.path(step)):
            raise UserError(f"{self.path(step)}: damaged or gone; model/ is not written")
        self.model_to_save.load_state_dict(load_file(self.path(step) / "model.safetensors"), strict=False)
        return self.model_to_save


# ---- a run


def start(args):
    """Return the Accelerator of the launch; raise UserError for launches that would train wrongly."""
    with user_errors("--report_to, or the launch"):
        accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),  # else processes on CPUs would not form one group
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            log_with=args.report_to or None,
            project_dir=args.output_dir,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=30))],
        )
    for name in args.report_to:
        if name not in ("all", *map(str, accelerator.log_with)):
            raise UserError(f"--report_to {name}: its package is not installed")
    kind = accelerator.distributed_type
    unsupported = kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM) or accelerator.parallelism_config
    if kind == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        offload = plugin.cpu_ram_efficient_loading or isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        unsupported = unsupported or plugin.fsdp_version != 2 or offload or accelerator.scaler
    if unsupported:
        raise UserError(f"unsupported launch, {kind.value}: use accelerate_configs/fsdp2.yaml (no offload, no fp16)")
    if accelerator.mixed_precision == "bf16":
        torch.set_float32_matmul_precision("high")  # TF32 for the loss, which is not autocast
    if args.full_determinism:
        transformers.enable_full_determinism(args.seed)
    transformers.utils.logging.disable_progress_bar()  # else one for each file loaded or saved
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else loading a local file contacts the Hub
    return accelerator


def announce(model, data, progress, steps, args, accelerator):
    """Print what is trained, on what, and how far it is."""
    rows = "a stream of rows" if args.streaming else f"{sum(map(len, data.sources)):,} rows"
    roles = ["query", *(["document"] if args.label_column else ["positive", "negative"])]
    roles += roles[-1:] * len(args.columns)
    columns = ", ".join(f"{role}: {name}" for role, name in zip(roles, args.columns))
    parameters = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    accelerator.print(
        f"{parameters:,} parameters, {rows} ({columns}), {len(data.held_out):,} held out\n"
        f"step {progress.step:,} of {steps:,}: {args.gradient_accumulation_steps} x {args.batch_size:,} rows on "
        f"{accelerator.num_processes} x {accelerator.device}, in micro-batches of {args.micro_batch_tokens:,} tokens"
    )


def receive_signals():
    """Return a list to which SIGTERM and SIGINT are added when they arrive. Another Ctrl-C ends the run at once."""
    received = []

    def receive(number, _):
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGTERM, receive)
    signal.signal(signal.SIGINT, receive)
    return received


@dataclass
class Meter:
    """What this process has done since the last line of metrics.jsonl with a loss."""

    seconds: float = 0.0  # of optimizer steps
    waited: float = 0.0  # of these, for data
    rows: int = 0  # of all processes
    tokens: int = 0  # without padding
    padded: int = 0  # with padding

    def add(self, rows, batches, seconds):
        """Count an optimizer step of this process' batches."""
        self.rows += rows
        self.seconds += seconds
        for batch in batches:
            tokens, padded = token_counts(batch.micro_batches)
            self.waited += batch.waited
            self.tokens += tokens
            self.padded += padded

    def read(self, accelerator):
        """Return speeds and memory of all processes."""
        if accelerator.device.type == "cpu":
            peak = psutil.Process().memory_info().rss  # now: not every system counts the peak
        else:
            peak = torch.accelerator.max_memory_allocated()
        counts = accelerator.gather(torch.tensor([[self.tokens, self.padded, peak]], device=accelerator.device))
        tokens, padded, _ = counts.sum(0).tolist()
        return {
            "rows_per_second": self.rows / self.seconds,
            "tokens_per_second": tokens / self.seconds,
            "padding_fraction": 1 - tokens / padded,
            "data_wait_fraction": self.waited / self.seconds,
            "peak_memory_gb": counts[:, 2].max().item() / 1e9,
        }


@dataclass
class Log:
    """metrics.jsonl, args.yaml and the trackers."""

    args: Args
    accelerator: Accelerator
    metrics: list  # the lines of metrics.jsonl
    shown: list  # names of measures to print and plot

    def begin(self):
        """Write args.yaml and the lines so far, and open the trackers."""
        output = Path(self.args.output_dir)
        if self.accelerator.is_main_process:
            with user_errors(f"--output_dir {output}"):
                lines = [json.dumps(line) + "\n" for line in self.metrics]
                (output / "metrics.jsonl").write_text("".join(lines))
                (output / "args.yaml").write_text(yaml.safe_dump(flags_of_run(self.args), sort_keys=False))
        flags = {name: str(value) for name, value in asdict(self.args).items()}
        logged = self.metrics[-1]["step"] if self.metrics else -1
        options = {"tensorboard": {"purge_step": logged + 1}}  # a resume logs later steps again
        self.accelerator.init_trackers("evenstep", flags, options)

    def write(self, step, record):
        """Append the record of a step, unless it is empty, to metrics.jsonl and the trackers."""
        if not record:
            return
        self.metrics.append({"step": step, **record})
        self.accelerator.log(record, step=step)
        if self.accelerator.is_main_process:
            with open(Path(self.args.output_dir, "metrics.jsonl"), "a") as file:
                file.write(json.dumps(self.metrics[-1]) + "\n")
            measured = {name: round(record[name], 4) for name in self.shown if name in record}
            if measured:
                tqdm.write(f"step {step:,}: {measured}")

    def find_best(self):
        """Return (step of the best evaluation by --metric_for_best_model, of which more is better; whether patience
        has ended), without the evaluation before the first step; step 0 if there is none. The measures of the main
        process decide."""
        name = self.args.metric_for_best_model
        if name is None:
            return 0, False
        if not self.metrics or name not in self.metrics[0]:
            choices = ", ".join([*self.metrics[0]][1:]) if self.metrics else "none, as there is nothing to evaluate on"
            raise UserError(f"--metric_for_best_model {name} is not measured by evaluations: choose one of {choices}")
        if math.isnan(self.metrics[0][name]):
            raise UserError(f"--metric_for_best_model {name} is not a number: all labels, or all scores, are equal")
        values = {record["step"]: record[name] for record in self.metrics[1:] if name in record}
        best = max(values, key=lambda step: np.nan_to_num(values[step], nan=-math.inf), default=0)
        later = sum(step > best for step in values)
        return broadcast_object_list([(best, 0 < self.args.early_stopping_patience <= later)])[0]


def write_model(model, log, step):
    """Write model/, with args.yaml, the card of sentence-transformers, and in that the measures up to `step`."""
    output = Path(log.args.output_dir)
    measured = {}
    for line in log.metrics:
        if line["step"] <= step:
            measured |= {name: line[name] for name in log.shown if name in line}
    with save_atomically(output / "model") as part:
        if log.args.lora_rank:
            for transformer in transformers_of(model, "--lora_rank"):
                transformer.model = transformer.model.merge_and_unload()  # loads without peft
        model._model_card_text = None  # that of the model before training
        model.model_card_data.eval_results_dict.clear()  # of the last evaluation, which may not be that of `step`
        model.model_card_data.training_logs.clear()
        model.model_card_data.local_files_only = os.path.isdir(log.args.model_name_or_path)  # else it asks the Hub
        with log.accelerator.autocast():  # the card embeds examples, which flash attention refuses in float32
            model.save_pretrained(str(part))
        shutil.copy(output / "args.yaml", part)
        with open(part / "README.md", "a") as card:
            card.write(f"\nTrained for {step:,} steps by `{Path(sys.argv[0]).name} args.yaml`: {measured}\n")
    print(f"the model is in {output / 'model'}")


def plot_metrics(metrics, shown, path):
    """Plot loss, measures of evaluations, speed and memory over the steps."""
    names = ["loss", *shown, "tokens_per_second", "peak_memory_gb"]
    frame = pd.DataFrame(metrics).set_index("step").filter(names)
    frame = frame.interpolate("index", limit_area="inside")  # lines from one evaluation to the next
    figure = Figure(figsize=(4 * len(frame.columns), 3.6), layout="constrained")
    frame.plot(ax=figure.subplots(1, len(frame.columns)), subplots=True, grid=True)
    figure.savefig(path, dpi=110)


def exit_now(status):
    """End the process: pyarrow threads that still read ahead can hang or abort a normal exit (apache/arrow 45214)."""
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    try:
        main(parse_args(sys.argv[1:]))
        status = 0
    except (Exception, KeyboardInterrupt) as error:
        status = print_error(error)
    exit_now(status)
