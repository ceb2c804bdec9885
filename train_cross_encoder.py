"""Train a cross-encoder ((query, document) -> score) to rerank or to compare texts, on one process or many.

    python train_cross_encoder.py --model_name_or_path BAAI/bge-small-en-v1.5 --train_data 'pairs/*.parquet' \
        --output_dir runs/reranker --batch_size 256 --grad_cache true                        # one GPU
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_cross_encoder.py args.yaml --resume

A row is a query and its documents, in one of these shapes; --label_column names the column of labels or scores:

    {"query": "read a gzip file", "code": "def read(path): ...", "label": 1}
    {"query": "read a gzip file", "code": "def read(path): ...", "wrong": "def write(path): ..."}
    {"query": "read a gzip file", "documents": ["def read(path): ...", "def write(path): ..."], "labels": [1, 0]}
    {"query": "read a gzip file", "pos": ["def read(file): ..."], "neg": ["def write(path): ...", "def cut(x): ..."]}

Without labels the first document is the positive and the others are negatives; if there are no others,
--num_negatives negatives are drawn from the other rows of the batch. From lists of positives and negatives each epoch
draws one positive and --num_negatives negatives.

The file has three parts. "experiment" is what one changes: options, the run, the step, losses, rows (open_source says
where they come from, read_row what they mean), optimizer, schedule, model, evaluation. "the path of a batch" is for
whoever doubts the promise below, "services" need not be read. The last two are the same in train_bi_encoder.py;
templates/cross_encoder.py is this script with all but the essential left out. A batch passes through row_batches,
Source.take, local_batches, read_rows, read_row, load_batches, make_batch, tokenize, forward_backward, a loss,
reduce_gradients, sync_step and, in main, optimizer.step and Checkpoints.save.

The gradient depends on the batch alone (--batch_size rows over all processes). Each process scores the pairs of its
rows, longest first, in micro-batches of at most --micro_batch_tokens; the losses of all rows are divided by the number
of terms over all processes. So the number of processes, --micro_batch_tokens and --grad_cache change time and memory,
but not the gradient (except with dropout, whose random masks depend on how pairs are grouped).

Output: model/ (loads in sentence-transformers), checkpoints/, metrics.jsonl, args.yaml and training.png.
Left out on purpose: several labels of a pair, rerankers of lists, DeepSpeed. docs/recipes/ has tested changes.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate>=1.12,<2", "backports.zstd>=1,<2; python_version < '3.14'", "datasets>=5.2,<6",
#   "filelock>=3.16,<5", "fsspec[http]>=2026.1", "matplotlib>=3.9,<4", "numpy>=2.2,<3", "pandas>=3.1,<4",
#   "psutil>=5.9,<8", "pyarrow>=24,<27", "pyyaml>=6.0.1,<7", "safetensors>=0.8,<1", "sentence-transformers>=6.2,<7",
#   "tokenizers>=0.23.1,<1", "torch>=2.9,<3", "tqdm>=4.67,<5", "transformers>=5.18,<6"]
# ///

import argparse
import copy
import csv
import ctypes
import glob
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from functools import lru_cache, partial
from itertools import chain, compress
from pathlib import Path
from random import Random
from typing import Literal

import transformers

# Shapes: B rows of a batch on P processes, n = ceil(B / P) slots for rows on each; L documents of a row, and labels.

# ==== experiment
#
# ---- options

TEACHER_LOSSES = ("margin_mse", "kl")
Schedule = Literal["linear", "cosine", "constant", "constant_with_warmup", "warmup_stable_decay"]
Loss = Literal["bce", "mse", "listwise_ce", "ranknet", "lambdaloss", "margin_mse", "kl"]


def flag(default, help, may_change=False, above_zero=False):
    """Return the dataclass field of a command-line option. may_change: a resume may change it, as the data stays the
    same; what a step computes differs by rounding, or with dropout by other masks (--micro_batch_tokens: losses by up
    to 9 %). above_zero: numbers must be above 0; those of other flags may be 0."""
    kind = {"default_factory": default.copy} if isinstance(default, list | dict) else {"default": default}
    return field(**kind, metadata={"help": help, "may_change": may_change, "above_zero": above_zero})


def json_object(text):
    return dict(json.loads(text))


def source_entry(text):
    """Return an entry of --train_data or --eval_data: a path or, from JSON, {"path": path, flag of its own: value}."""
    return json_object(text) if text.startswith("{") else text


@dataclass
class Args:
    # data
    train_data: list[source_entry] = flag(
        [],
        "paths, globs, folders, URLs, Hub ids, ID:config:split; or JSON of a path, a weight and flags of its own: "
        '{"path": "nli.csv", "weight": 0.2, "columns": ["a", "b"], "loss": "CoSENTLoss"}',
    )
    eval_data: list[source_entry] = flag(
        [], "sources of held-out rows; none: rows of --train_data, of streams the first"
    )
    eval_rows: int | None = flag(
        None,
        "rows to evaluate on in all, as many of each source; None: 200, at most a tenth of a source of --train_data",
    )
    eval_beir: list[str] = flag([], "also rerank these: Hub ids in the layout of NanoBEIR")
    eval_rerank_k: int = flag(50, "documents to rerank for each query of --eval_beir", above_zero=True)
    streaming: bool = flag(False, "read the sources front to back instead of at random from a memory-mapped table")
    columns: list[str] = flag([], "columns of query, then documents: texts or lists; none: all but the label")
    num_negatives: int | None = flag(
        None, "negatives of a row: its first ones or, from lists, drawn ones; None: all, or 4 of other rows if none"
    )
    corpus: list[str] = flag([], "sources of the documents by id; --columns then contain ids, not texts")
    queries: list[str] = flag([], "sources of the queries by id, for the first column")
    corpus_columns: list[str] = flag(["_id", "title", "text"], "id column of --corpus, then text columns, joined")
    query_columns: list[str] = flag(["_id", "text"], "id column of --queries, then text columns, joined")
    label_column: list[str] = flag([], "columns with a label or a list of labels; several are joined row by row")
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
    max_length: int | None = flag(None, "tokens a pair is truncated to; None: the model's own", above_zero=True)
    template: str | None = flag(None, "text around {query} and {document}, special tokens included; None: the model's")
    dropout: float | None = flag(None, "dropout probability, which the model keeps; None: the model's own")
    lora_rank: int = flag(0, "train LoRA adapters of this rank instead of all weights; 0: train all weights")
    lora_kwargs: json_object = flag({}, "JSON: further options of peft.LoraConfig, such as lora_alpha, target_modules")
    attn_implementation: str | None = flag(None, "attention: sdpa, flash_attention_2, ...", may_change=True)
    query_prompt: str | None = flag(
        None, "prefix of queries, of a chat template: its instruction; None: the model's own"
    )
    # step
    batch_size: int = flag(64, "rows of a batch, over all processes", above_zero=True)
    micro_batch_tokens: int | None = flag(
        None, "tokens per forward; None: 2,048 (CPU), measured (GPU)", may_change=True, above_zero=True
    )
    gradient_accumulation_steps: int = flag(1, "batches of a step, each with its own drawn negatives", above_zero=True)
    grad_cache: bool | None = flag(
        None,
        "run each micro-batch twice, to hold one graph at a time; None: those for which memory is short",
        may_change=True,
    )
    gradient_checkpointing: bool = flag(False, "recompute activations in backward, for long texts", may_change=True)
    loss: Loss | None = flag(None, "None: bce if a row has one label, else listwise_ce over the documents of a query")
    loss_kwargs: json_object = flag(
        {},
        "JSON; bce: pos_weight; ranknet: sigma; lambdaloss: sigma, k, mu; margin_mse, kl: teacher_temperature, "
        "temperature",
    )
    dataloader_num_workers: int | None = flag(
        None,
        "processes that make batches; 0: none; None: 0 (CPU), half of the cores of a process (GPU)",
        may_change=True,
    )
    # schedule
    learning_rate: float = flag(2e-5, "peak learning rate", above_zero=True)
    weight_decay: float = flag(0.01, "weight decay of matrices; biases and norms have none")
    warmup_ratio: float = flag(0.1, "fraction of the steps over which the learning rate rises from 0")
    lr_scheduler_type: Schedule = flag(
        "linear", "transformers' schedule; constant has no warmup, warmup_stable_decay falls in the last tenth"
    )
    max_grad_norm: float = flag(1.0, "clip the gradient to this norm; 0: do not")
    num_train_epochs: float = flag(
        1.0, "epochs of all rows, or of --rows_per_epoch; may be a fraction", above_zero=True
    )
    rows_per_epoch: int = flag(0, "rows of an epoch, a fresh sample each; 0: all")
    max_steps: int = flag(0, "stop after this many optimizer steps; 0: after --num_train_epochs")
    seed: int = flag(0, "seed of the row order, new weights and dropout")
    full_determinism: bool = flag(False, "deterministic kernels: bit-identical resume on a GPU", may_change=True)
    # run
    output_dir: str = flag("runs/cross_encoder", "folder for everything the run writes", may_change=True)
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
    if args.loss in TEACHER_LOSSES and not args.label_column:
        raise UserError(f"--loss {args.loss} requires teacher scores: set --label_column")
    if args.loss in TEACHER_LOSSES and "teacher_temperature" not in args.loss_kwargs:
        raise UserError(
            f'--loss {args.loss}: --loss_kwargs must have "teacher_temperature": 1 for logits; for cosines and '
            "probabilities the temperature that the teacher was trained with, such as 0.05"
        )
    if args.early_stopping_patience and not args.metric_for_best_model:
        raise UserError("--early_stopping_patience requires --metric_for_best_model, such as held_out_ndcg@10")
    for name in ("warmup_ratio", "dropout"):
        if (getattr(args, name) or 0) > 1:
            raise UserError(f"--{name} {getattr(args, name)}: must be a fraction, from 0 to 1")
    if args.length_window > 1 and args.corpus:
        raise UserError("--length_window sorts rows by their own length, which with --corpus is that of ids")
    for name in ("pos_weight", "sigma", "k", "temperature", "teacher_temperature"):
        value = args.loss_kwargs.get(name)
        if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
            raise UserError(f'--loss_kwargs: "{name}" must be a number above 0, not {json.dumps(value)}')
    if args.template and not (args.template.count("{query}") == args.template.count("{document}") == 1):
        raise UserError("--template must contain {query} and {document} once each")


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


OWN_FLAGS = ["columns", "label_column", "num_negatives", "query_prompt", "loss", "loss_kwargs"]


def args_of_source(entry, args):
    """Return the Args of a run on one entry of --train_data or --eval_data alone: flags of its own replace those of
    the run. Raise UserError for those that no run would take."""
    own = {"path": entry} if isinstance(entry, str) else dict(entry)
    path = own.pop("path", None)
    weight = own.pop("weight", None)
    if not path or own.keys() - {*OWN_FLAGS}:
        raise UserError(f"{entry}: takes a path, and of its own a weight, {', '.join(OWN_FLAGS)}")
    args = replace(args, train_data=[path], eval_data=[], mixing_weights=[])  # of one source, also of --eval_data
    if own.get("loss"):  # the options and labels of the run belong to the run's loss
        args = replace(args, loss_kwargs={}, label_column=[])
    if isinstance(entry, dict):
        parser = Parser(Args, allow_abbrev=False)  # without a file of flags
        parser.error = raise_user_error
        with user_errors(path):
            args = parse_flags(parser, words_of({"mixing_weights": weight, **own}), args)
            check_flags(args)
    return args


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
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from accelerate.utils import DistributedType, DynamoBackend, broadcast_object_list, gather_object
from accelerate.utils.memory import should_reduce_batch_size
from datasets.formatting import PythonFormatter
from datasets.utils.file_utils import xopen
from filelock import FileLock, Timeout
from matplotlib.figure import Figure
from pyarrow.dataset import ParquetFragmentScanOptions
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.evaluation import (
    CrossEncoderCorrelationEvaluator,
    CrossEncoderNanoBEIREvaluator,
    CrossEncoderRerankingEvaluator,
)
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from sentence_transformers.util.distributed import distributed_evaluation
from tokenizers.processors import TemplateProcessing
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from tqdm.auto import tqdm
from transformers.utils.peft_utils import find_adapter_config_file

# ---- main


def main(args):
    # ---- set up
    accelerator = start(args)
    # `flags` are as given, for args.yaml and checkpoints; in `args` defaults are resolved, by each resume anew.
    flags = replace(args, gradient_accumulation_steps=accelerator.gradient_accumulation_steps)  # a launch may set it
    device = accelerator.device
    is_main = accelerator.is_main_process
    sharded = accelerator.distributed_type == DistributedType.FSDP
    _lock = lock_output(args.output_dir, accelerator)  # held until the process ends
    checkpoint, saved = find_checkpoint(args, accelerator)
    model = load_model(args)
    args = resolve_args(flags, model, accelerator)

    # ---- data
    data = open_data(args)
    fixed = unchanging(flags, model, data)  # what a resume must not change
    check_changes(saved, fixed, flags, accelerator)
    evaluators = open_evaluators(data, model, args)
    accumulation = args.gradient_accumulation_steps
    args = set_max_steps(data, args, accelerator)
    steps = args.max_steps
    eval_steps = args.eval_steps or math.ceil(steps / 10)

    # ---- model, loss and optimizer
    model_to_save = copy.deepcopy(model) if sharded and is_main else model  # FSDP will shard `model`
    model = model.to(device).train()
    model.activation_fn = choose_activation(data.sources)
    loss_fns = [make_loss(source.args) for source in data.sources]  # --mix_by row uses the first one only
    optimizer = make_optimizer(model, args)
    if sharded:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:  # no wrapper of DDP: reduce_gradients sums
        optimizer = accelerator.prepare(optimizer)

    # ---- resume, and evaluate before the first step
    # State of your own, {name: tensor}, equal on all processes, not sharded: saved in checkpoints. A resume sets it.
    extra = {}
    optimizers = [optimizer.optimizer]  # checkpoints hold the state of each
    checkpoints = Checkpoints(flags, accelerator, fixed, model, optimizers, model_to_save, extra)
    progress = checkpoints.restore(checkpoint, saved)
    args = fit_micro_batches(model, progress, args, accelerator)
    log = Log(flags, accelerator, progress.metrics, main_measures(evaluators))
    log.begin()
    announce(model, data, evaluators, progress, args, accelerator)
    signals = receive_signals()
    is_due = progress.step % eval_steps == 0 or progress.step == steps
    stopping = False  # by a signal or an error
    if evaluators and is_due and log.lacks_evaluation(progress.step):  # the first, or one that was interrupted
        record = until_signal(signals, evaluate, model, evaluators, accelerator)
        stopping = not record
        log.write(progress.step, record)
    best_step, out_of_patience = log.find_best()
    finished = not stopping and (out_of_patience or progress.step >= steps)

    # ---- train: row_batches draws the rows of all processes, of which local_batches keeps those of this one
    global_batches = row_batches(data.sources, data.weights, args, progress.data_state)
    local = local_batches(global_batches, progress.step * accumulation, data, args, accelerator)
    batches = load_batches(local, model, args, accelerator)
    is_quiet = not is_main or os.environ.get("TQDM_DISABLE") or None  # None: where stderr is no terminal
    bar = tqdm(total=steps, initial=progress.step, disable=is_quiet, unit="step")
    meter = Meter()
    error = None
    while not (finished or stopping):
        # one optimizer step
        started = time.perf_counter()
        factor = schedule(progress.step, steps, args)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        step_batches = [next(batches) for _ in range(accumulation)]
        local_losses = []  # of this process' part of each batch
        for batch in step_batches:
            source = data.sources[batch.source]
            local_losses.append(forward_backward(model, batch, source.args, accelerator, loss_fns[batch.source]))
        reduce_gradients(model, accelerator)
        norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        norm = norm.full_tensor() if sharded else norm
        losses, norm, skipped, stopping, error = sync_step(
            local_losses, norm, step_batches, signals, progress.step, accelerator
        )
        if stopping:  # before the step: an evaluation may follow it, and a cluster kills soon after SIGTERM
            break
        optimizer.step()
        optimizer.zero_grad()
        progress.advance(losses, skipped, step_batches)
        # Change `extra` here, not above: a run that stops there saves the step before.
        meter.add(args.batch_size * accumulation - skipped, step_batches, time.perf_counter() - started)
        finished = progress.step == steps
        bar.update()

        # metrics, evaluation, checkpoint
        record = {}
        is_due = progress.step % eval_steps == 0 or finished
        if evaluators and is_due:
            record = until_signal(signals, evaluate, model, evaluators, accelerator)
            stopping = not record
        if progress.step % args.logging_steps == 0 or finished:
            record |= progress.mean_losses(data.sources if args.mix_by == "batch" else [])
            record |= {"grad_norm": norm, "learning_rate": args.learning_rate * factor, **meter.read(accelerator)}
            meter = Meter()
            bar.set_postfix_str("loss {loss:.4f}, {rows_per_second:,.0f} rows/s".format(**record), refresh=False)
        log.write(progress.step, record)
        if is_due:
            best_step, out_of_patience = log.find_best()
            finished = not stopping and (finished or out_of_patience)
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
        accelerator.wait_for_everyone()  # once a process has ended with a status, a launcher ends the others
    elif is_main:
        step = best_step or progress.step
        write_model(checkpoints.load_weights_of(step), log, step)
        plot_metrics(log.metrics, log.main_measures, Path(args.output_dir, "training.png"))
        print_outcome(log.metrics, progress.skipped + data.skipped)
    accelerator.end_training()
    if not finished:
        raise SystemExit(128 + (signals or [signal.SIGTERM])[0])  # another process may have received it


# ---- the step


def score(model, features, accelerator):
    """Return (pairs,) float logits of a micro-batch."""
    features = transformers.BatchEncoding(features).to(accelerator.device, non_blocking=True).data
    with accelerator.autocast():  # gives flash attention its dtype
        return model(features)["scores"].float().squeeze(1)


def forward_backward(model, batch, args, accelerator, loss_fn):
    """Add the gradient of this process' pairs to that of the model; return this process' part of the loss. Summed over
    processes, they are the gradient and the loss of the whole batch."""
    micro_batches = repeat_for_fsdp(batch.micro_batches, accelerator)

    def forward(index):  # (pairs,)
        seeds = np.random.SeedSequence([args.seed, batch.index, accelerator.process_index, index])
        torch.manual_seed(int(seeds.generate_state(1)[0]))  # dropout is the same in a second forward pass
        _, indices, features = micro_batches[index]
        return score(model, features, accelerator)[: len(indices)]

    labels = batch.labels.to(accelerator.device, non_blocking=True)  # (n, L)
    slots = tuple(batch.slots.to(accelerator.device, non_blocking=True))
    sizes = [len(indices) for _, indices, _ in micro_batches]
    if args.loss in POINTWISE:
        return pointwise_backward(forward, labels[slots].split(sizes), batch.step, loss_fn, accelerator)
    outputs, kept = run_forward(forward, len(micro_batches), args, accelerator)
    # The graph is cut here, as the documents of a row lie in several micro-batches: the loss gives the gradient of the
    # scores, which is then passed on by hand.
    scores = torch.zeros_like(labels)  # (n, L)
    scores[slots] = torch.cat(outputs).detach()
    total, terms = loss_fn(scores.requires_grad_(), Targets(labels, batch.step))
    loss = total / accelerator.reduce(terms).clamp(min=1)
    accelerator.backward(loss)  # scaled, so that weights of a loss, if there are any, are trained like the model's

    gradients = scores.grad[slots].split(sizes)
    for index, gradient in enumerate(gradients):  # a micro-batch at a time, so that gradients add up in float32
        output = outputs[index] if index < kept else forward(index)
        outputs[index] = None  # its graph ends with its backward pass
        (output * gradient).sum().backward()
    return loss.detach()


def pointwise_backward(forward, labels, step, loss_fn, accelerator):
    """Do as forward_backward does, for a loss in POINTWISE: backward after each micro-batch, so that there is one
    graph at a time and one forward pass. labels: (pairs,) of each micro-batch."""
    terms = accelerator.reduce(sum(part.isfinite().sum() for part in labels)).clamp(min=1)
    loss = torch.zeros((), device=accelerator.device)
    for index, part in enumerate(labels):
        scores = forward(index)
        total, _ = loss_fn(scores[:, None], Targets(part[:, None], step))
        accelerator.backward(total / terms)
        loss += total.detach() / terms
    return loss


def run_forward(forward, count, args, accelerator):
    """Return (outputs of forward(0) to forward(count - 1), how many of them have a graph: the first ones)."""
    outputs = []
    kept = 0
    has_graph = True
    # Autocast keeps half-precision copies of the weights until its outermost block ends, so one block makes each once.
    # A copy made without a graph carries no gradient later, so passes with a graph come first.
    with accelerator.autocast():
        for index in range(count):
            has_graph = has_graph and may_keep_graph(index, args, accelerator)
            with torch.set_grad_enabled(has_graph):
                outputs.append(forward(index))
            kept += has_graph
    return outputs, kept


def may_keep_graph(index, args, accelerator):
    """Return whether to keep the graph of a micro-batch until its backward pass. If not, its forward pass is run again
    (Gao et al. 2021, section 3.2), which changes time and memory alone."""
    if args.grad_cache is not None:
        return not args.grad_cache
    memory = total_memory(accelerator.device)
    if memory is None or accelerator.distributed_type == DistributedType.FSDP:  # collective: the same on all processes
        return index < (16 if accelerator.device.type == "cpu" else 4)
    return torch.accelerator.memory_allocated() < 0.6 * memory


def total_memory(device):
    """Return the bytes of memory of a GPU, None where no limit is known."""
    if device.type not in ("cuda", "xpu"):
        return None
    return torch.get_device_module(device).get_device_properties(device).total_memory


def repeat_for_fsdp(micro_batches, accelerator):
    """Return micro-batches: under FSDP, whose passes are collective, with the last one repeated, for no text, until
    all processes run equally many."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return micro_batches
    most = int(accelerator.gather(torch.tensor([len(micro_batches)], device=accelerator.device)).max())
    role, _, features = micro_batches[-1]  # its output is discarded
    return micro_batches + [(role, [], features)] * (most - len(micro_batches))


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
        weights = list(compress(weights, accelerator.reduce(has_grad.int()).tolist()))
        for weight in weights:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        buckets = np.cumsum([weight.numel() for weight in weights]) // BUCKET  # that of each weight
        for bucket in np.unique(buckets):
            grads = [weights[number].grad for number in np.flatnonzero(buckets == bucket)]
            vector_to_parameters(accelerator.reduce(parameters_to_vector(grads)), grads)


def sync_step(losses, norm, batches, signals, step, accelerator):
    """Return (loss of each batch, gradient norm, skipped rows, whether to stop, what is wrong or None) of a step, the
    same on all processes, by one collective and one wait for the device."""
    error = next((batch.error for batch in batches if batch.error), None)
    counts = [len(signals), error is not None, sum(batch.skipped for batch in batches)]
    counts = [torch.full_like(losses[0], count) for count in counts]
    sums = accelerator.reduce(torch.stack([*counts, *losses]))
    received, failed, skipped, *losses, norm = torch.stack([*sums, norm]).tolist()  # the norm is the same everywhere
    if failed:
        error = next(filter(None, gather_object([error])))
    elif step == 0 and skipped and not any(losses):
        error = "every row of the first step is bad: choose other --columns or --label_column, or edit read_row"
    elif not all(map(math.isfinite, losses)) or not (math.isfinite(norm) or accelerator.scaler):
        error = f"step {step + 1}: loss {np.mean(losses)}, gradient norm {norm}: fix the data, or {LOWER_RATE}"
    return losses, norm, int(skipped), bool(received or error), error


# ---- losses
#
# A loss in LOSSES has the form
#
#     def my_loss(scores, targets, option=1.0):
#         return total, terms  # tensors: the sum of its terms, and their number
#
# scores: (n, L) of this process' rows, a row a query and its documents; 0 where there is no document. The loss of the
# batch is the sum of the totals over all processes, divided by the number of terms over all processes. Those in
# POINTWISE get the pairs of a micro-batch, (pairs, 1), at a time. Options are --loss_kwargs. A new loss is also a name
# in Loss and REQUIRED and, of a teacher's scores, in TEACHER_LOSSES.


@dataclass
class Targets:
    """What a loss compares scores with."""

    labels: torch.Tensor  # (n, L) float; NaN where there is no document
    step: int  # optimizer steps before this one, for options that depend on it


def bce(scores, targets, pos_weight=1.0):
    """Return the binary cross-entropy of each pair (Nogueira and Cho 2019, equation 1); `pos_weight`: weight of
    positives."""
    given = targets.labels.isfinite()
    labels = targets.labels.nan_to_num()
    weight = scores.new_full((), pos_weight)
    losses = F.binary_cross_entropy_with_logits(scores, labels, pos_weight=weight, reduction="none")
    return (losses * given).sum(), given.sum()


def mse(scores, targets):
    """Return the squared error of each pair, also of a teacher's logits (Ba and Caruana 2014, equation 1)."""
    errors = scores - targets.labels.nan_to_num()
    given = targets.labels.isfinite()
    return (errors.square() * given).sum(), given.sum()


def listwise_ce(scores, targets):
    """Return the cross-entropy of positives (labels above 0) against their row, mean over a row's positives: LCE (Gao
    et al. 2021, equation 2); with several, ListNet (Cao et al. 2007) with equal targets."""
    positive = targets.labels > 0
    log_probabilities = scores.masked_fill(targets.labels.isnan(), -1e9).log_softmax(1)
    losses = -log_probabilities.where(positive, 0.0)
    means = losses.sum(1) / positive.sum(1).clamp(min=1)  # 0 for an empty slot
    return means.sum(), positive.any(1).sum()


def ordering_loss(scores, labels, weights, kept, sigma):
    """Return the cross-entropy in bits of ordering two documents of a row with different labels. weights (n, L, L):
    factor of each two documents; kept: which of them to include."""
    ordered = (labels[:, :, None] > labels[:, None, :]) & kept
    differences = scores[:, :, None] - scores[:, None, :]
    bits = -F.logsigmoid(sigma * differences) / math.log(2)
    return (bits * weights).where(ordered, 0.0).sum(), ordered.sum()


def ranknet(scores, targets, sigma=1.0):
    """Return RankNet: the cross-entropy of the order of two documents (Burges et al. 2005, equation 3), in bits."""
    return ordering_loss(scores, targets.labels, weights=1.0, kept=True, sigma=sigma)


def lambdaloss(scores, targets, k=None, sigma=1.0, mu=10.0):
    """Return LambdaLoss with weights NDCG-Loss2++ (Wang et al. 2018, equations 13 to 17), truncated at k (18)."""
    given_scores = scores.detach().masked_fill(targets.labels.isnan(), -torch.inf)
    order = given_scores.argsort(dim=1, descending=True, stable=True)
    scores = scores.gather(1, order)
    labels = targets.labels.gather(1, order)
    ranks = torch.arange(1, scores.shape[1] + 1, device=scores.device)  # (L,)
    top = ranks <= (k or len(ranks))
    discounts = torch.log2(1.0 + ranks)
    gains = 2 ** labels.nan_to_num() - 1
    best_gains = gains.sort(1, descending=True)[0]
    ideal = (best_gains / discounts * top).sum(1, keepdim=True)
    gains = gains / ideal.clamp(min=1e-10)
    distance = (ranks[:, None] - ranks).abs().clamp(min=1)  # (L, L); 1 on the diagonal, to stay finite
    by_distance = 1 / torch.log2(1.0 + distance) - 1 / torch.log2(2.0 + distance)
    by_rank = (1 / discounts[:, None] - 1 / discounts).abs()
    by_gain = (gains[:, :, None] - gains[:, None, :]).abs()  # (n, L, L)
    weights = (mu * by_distance + by_rank) * by_gain
    return ordering_loss(scores, labels, weights, kept=top[:, None] | top, sigma=sigma)


def margin_mse(scores, targets, teacher_temperature, temperature=1.0):
    """Return the squared error of the margins of a row's first document over the others (Hofstätter et al. 2020,
    Margin-MSE)."""
    errors = scores / temperature - targets.labels.nan_to_num() / teacher_temperature
    errors = errors[:, :1] - errors[:, 1:]  # of the margins
    given = targets.labels[:, 1:].isfinite()
    return (errors.square() * given).sum(), given.sum()


def kl(scores, targets, teacher_temperature, temperature=1.0):
    """Return KL(teacher || model) of the softmax over a row's documents (Hinton et al. 2015, section 2; the factor
    T**2 keeps the size of the gradient)."""
    missing = targets.labels.isnan()
    student = (scores / temperature).masked_fill(missing, -1e9).log_softmax(1)
    teacher = (targets.labels / teacher_temperature).masked_fill(missing, -1e9).log_softmax(1)
    divergence = F.kl_div(student, teacher, reduction="none", log_target=True) * temperature**2
    return divergence.where(~missing, 0.0).sum(), (~missing).any(1).sum()


LOSSES = {loss.__name__: loss for loss in (bce, mse, listwise_ce, ranknet, lambdaloss, margin_mse, kl)}
POINTWISE = ("bce", "mse")  # each term depends on one document: none that compares documents


def choose_loss(args):
    """Return "bce" if the first row has one label, else "listwise_ce"."""
    if len(args.label_column) == 1:
        name = args.train_data[0]
        with user_errors(f"{name}: --label_column {args.label_column[0]}", KeyError):
            label = next(open_files(find_files(name)).iter(1))[args.label_column[0]][0]
        if not str(label).startswith("["):  # a list, or JSON of one
            return "bce"
    return "listwise_ce"


def make_loss(args):
    """Return loss(scores, targets): one of LOSSES, with --loss_kwargs."""
    loss = partial(LOSSES[args.loss], **args.loss_kwargs)
    with user_errors(f"--loss_kwargs of {args.loss}", TypeError):
        inspect.signature(loss).bind("scores", "targets")
    return loss


def choose_activation(sources):
    """Return what predict() applies to a logit: bce trains a probability, any other loss the logit itself."""
    losses = {source.args.loss for source in sources}
    if "bce" in losses and len(losses) > 1:
        raise UserError("--loss bce trains probabilities, other losses scores: give all sources bce, or none")
    return torch.nn.Sigmoid() if "bce" in losses else torch.nn.Identity()


# ---- rows
#
# For each batch, in each process: local_batches > local_rows > read_rows, which calls read_row for each row, and
# then resolve_ids; then draw_negatives. In a worker process: BatchMaker > make_batch.


def find_files(name):
    """Return the files of a source. Their names, sizes and both ends tell a resume whether the source has changed. If
    open_source reads rows from elsewhere, return [name]."""
    return list_files(name)


def open_source(files, args):
    """Return the rows of files of a source, with the columns of --columns and --label_column: a Dataset or, with
    --streaming, an IterableDataset, that yields pyarrow Tables. The files are those of find_files; of a stream in
    another order in each epoch, and for held-out rows the first ones alone.

    Edit this for other rows, by .select, .shuffle or .with_format(None).filter of the Dataset. For rows from
    elsewhere, such as IterableDataset.from_generator(f).with_format("arrow"), edit find_files, too, and set --columns
    and --streaming. Each call must give the same rows in the same order: a resume seeks a row of a Dataset, or
    loads the state_dict of a stream; it does not notice other rows of the same name."""
    names = dict.fromkeys([*args.columns, *args.label_column])
    ids = args.columns[:1] * bool(args.queries) + args.columns[1:] * bool(args.corpus)
    optional = args.columns[2:]
    return open_files(files, args.streaming, list(names), labels=args.label_column, optional=optional, ids=ids)


@dataclass
class Row:
    """What a row of data means."""

    query: str
    documents: list  # of str, the positive first; if they have labels, in any order
    labels: list  # of float
    cells: dict = field(default_factory=dict)  # the row as read, with SOURCE and NUMBER; set after read_row
    args: Args | None = None  # those of its source


NUM_NEGATIVES = 4  # drawn for a row that has none, unless --num_negatives is given
REQUIRED = {  # {loss: (what the labels of a row must be, check)}; others would give a wrong or NaN loss
    "bce": ("from 0 to 1 (or use mse)", lambda labels: min(labels) >= 0 and max(labels) <= 1),
    "mse": ("at least one", bool),
    "listwise_ce": ("at least one above 0 and one not above 0", lambda labels: min(labels) <= 0 < max(labels)),
    "ranknet": ("not all equal", lambda labels: min(labels) < max(labels)),
    "lambdaloss": ("from 0 to 100, not all equal", lambda labels: 0 <= min(labels) < max(labels) <= 100),
} | dict.fromkeys(TEACHER_LOSSES, ("two or more", lambda labels: len(labels) > 1))


def read_row(cells, step, args, random=None):
    """Return the Row that {column: value} means. Edit this function if your rows have another form.

    cells: those of --columns and --label_column, as Python objects; a list that is null is empty. Raise ValueError for
    a bad row: " in the row {...}" will follow its text. step: the optimizer steps before that of the row's batch, for
    whatever changes during a run; 0 for held-out rows. random is None unless a column holds lists; its draws are the
    same for a row on any number of processes, and others in each epoch."""
    query_column = args.columns[0]
    query = read_text(cells[query_column], query_column, args.queries)
    groups, labels = row_documents(cells, args)
    if not args.label_column:  # a positive is no negative
        groups = [groups[0], [text for text in chain.from_iterable(groups) if text not in groups[0]]]
    one_list = len(groups) == 1 and len(labels) == len(groups[0])
    if one_list and args.num_negatives is not None and args.loss not in TEACHER_LOSSES:
        # choose_documents keeps the first, and draws from the others: no negative is as relevant as the positive.
        top = max(labels)
        best = labels.index(top)
        order = [best, *(n for n, label in enumerate(labels) if n != best and (label < top or top <= 0))]
        groups[0] = [groups[0][n] for n in order]
        labels = [labels[n] for n in order]
    documents, labels = choose_documents(groups, labels, random, args)
    if not args.label_column:
        return Row(query, documents, [1.0] + [0.0] * (len(documents) - 1))
    required, is_valid = REQUIRED[args.loss]
    if len(labels) != len(documents) or not is_valid(labels):
        raise ValueError(f"--loss {args.loss} requires a label for each document, {required}: not the case")
    return Row(query, documents, labels)


def row_documents(cells, args):
    """Return (the documents of each column of --columns but the first, the labels of a row). A negative that is null
    or empty is left out, and its label, if each document has one."""
    groups = []
    given = []  # for each document, whether there is a text
    for column in args.columns[1:]:
        values = cells.get(column)
        values = values if isinstance(values, list) else [values]
        are_given = [not groups or not is_empty(value) for value in values]
        values = list(compress(values, are_given))
        groups.append([read_text(value, column, args.corpus) for value in values])
        given += are_given
    if not groups[0]:
        raise ValueError(f"{args.columns[1]!r} has no text")
    if len(groups) == 1 and len(groups[0]) > 1 and not args.label_column:
        advice = "give negatives a column of their own, which may be empty, or set --label_column"
        raise UserError(f"{args.columns[1]!r} holds lists, of which positives and negatives are not known: {advice}")
    labels = read_labels(cells, args)
    return groups, list(compress(labels, given)) if len(labels) == len(given) else labels


def is_empty(value):
    return value is None or (isinstance(value, str) and not value.strip())


def read_text(value, column, is_id=False):
    """Return a text, or an id as a text. Raise ValueError if there is none, and UserError, which --on_bad_row does not
    skip, if it is a value of another type: the column is wrong, not the row."""
    if is_id and isinstance(value, int | float):
        return str(value).removesuffix(".0")  # whole numbers are read as floats where some are missing
    if not isinstance(value, str | None):
        raise UserError(f"{column!r} holds {type(value).__name__}, not texts: choose other columns, or edit read_row")
    if is_empty(value):
        raise ValueError(f"{column!r} has no text")
    if value.startswith(('["', "['", '{"')):  # as `datasets` does where earlier rows have texts
        warn_once(f"column {column!r} has lists or objects that were written as texts: give all rows one type")
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
    num_positives = len(groups[0]) if len(groups) > 1 else 1  # a lone list with labels begins with its positive
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
    rows, skipped = read_rows(table.take(local), data.sources, data.lookups, step)
    draw_negatives(rows, to_python(table), step, data.sources, data.lookups)
    return rows, skipped


def draw_negatives(rows, cells_of_all, step, sources, lookups, limit=None):
    """Add negatives to each of `rows` that has one document and no label: documents of other rows of its source, but
    for those that any row has for the same query. cells_of_all: of all rows of the batch; step: that of it; limit: how
    many, if not --num_negatives."""
    lonely = [row for row in rows if len(row.documents) == 1 and not row.args.label_column]
    if not lonely:
        return
    listed = defaultdict(dict)  # {(source, query): its documents}, or their ids; dicts keep the order of the batch
    for cells in cells_of_all:
        with suppress(ValueError):  # a bad row
            row = read_all(cells, step, sources)
            listed[cells[SOURCE], row.query].update(dict.fromkeys(row.documents))
    pools = defaultdict(dict)
    for (source, _), documents in listed.items():
        pools[source].update(documents)
    drawn = []  # a Row of negatives for each of these
    for row in lonely:
        source = row.cells[SOURCE]
        known = listed[source, read_all(row.cells, step, sources).query]  # row.query may be the text of this id
        wanted = limit or (NUM_NEGATIVES if row.args.num_negatives is None else row.args.num_negatives)
        random = Random(f"{row.args.seed} {source} {row.cells[NUMBER]} negatives")
        pool = list(pools[source])
        negatives = random.sample(pool, min(len(pool), wanted + len(known)))  # spares: listed ones are dropped
        drawn.append(Row(row.query, [document for document in negatives if document not in known][:wanted], []))
    resolve_ids(drawn, [None, lookups[1]])
    for row, other in zip(lonely, drawn):
        row.documents += filter(None, other.documents)  # a negative without a text is the fault of its own row
        row.labels += [0.0] * (len(row.documents) - len(row.labels))
    if max(len(row.documents) for row in lonely) == 1:
        raise UserError("no other row has a negative to draw: raise --num_negatives, --batch_size or --eval_rows")


def read_all(cells, step, sources):
    """Return the Row of cells with all of its documents, none of them drawn."""
    return read_row(cells, step, replace(sources[cells[SOURCE]].args, num_negatives=None))


@dataclass
class Batch:
    """This process' part of a batch: n slots for rows, of which the last are empty where rows are absent or skipped.
    What is a tensor here is an array of numpy until batch_to_torch."""

    labels: torch.Tensor  # (n, L) float; NaN if missing
    micro_batches: list  # (prompt, indices of pairs, features)
    slots: torch.Tensor  # (2, pairs): row and column of each pair, in the order of the micro-batches
    index: int  # batches before this one
    step: int  # optimizer steps before that of this batch
    source: int = 0  # with --mix_by batch that of its rows
    state: dict | None = None  # of row_batches, after this batch
    skipped: int = 0  # bad rows
    error: str | None = None  # what ends the run; there are no rows then
    waited: float = 0.0  # seconds that training has waited for the batch

    def pin_memory(self):
        """Return the Batch in page-locked memory, for asynchronous copies to a GPU; called by DataLoader."""
        return batch_to_torch(self, lambda array: torch.from_numpy(array).pin_memory())


def make_batch(rows, index, model, args, accelerator):
    """Return the Batch of this process' rows, with arrays of numpy, as it may be made in another process."""
    pairs = []  # (prompt, (query, document))
    slots = []  # (slot, column) of each pair
    for slot, row in enumerate(rows):
        pairs += [(row.args.query_prompt, (row.query, document)) for document in row.documents]
        slots += [(slot, column) for column in range(len(row.documents))]
    if not rows:  # forward passes and collectives must match those of other processes
        pairs = [(args.query_prompt, ("a query", "a document"))]
        slots = [(0, 0)]
    micro_batches = make_micro_batches(model, pairs, args, accelerator)
    order = list(chain.from_iterable(indices for _, indices, _ in micro_batches))
    slots = np.ascontiguousarray(np.array(slots)[order].T)
    size = math.ceil(args.batch_size / accelerator.num_processes)
    labels = pad_lists([row.labels for row in rows], size, np.nan, np.float32)
    return Batch(labels, micro_batches, slots, index, index // args.gradient_accumulation_steps)


def make_micro_batches(model, pairs, args, accelerator):
    """Return [(prompt, indices, features)] of this process' [(prompt, (query, document))]; the pairs of a micro-batch
    have one prompt, None if there is none."""
    groups = defaultdict(list)
    for index, (prompt, _) in enumerate(pairs):
        groups[prompt].append(index)
    micro_batches = []
    for prompt, group in groups.items():
        chosen = [pairs[index][1] for index in group]
        for positions, features in tokenize(model, chosen, args, accelerator, prompt=prompt):
            micro_batches.append((prompt, [group[position] for position in positions], features))
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


def set_max_steps(data, args, accelerator):
    """Return Args with the optimizer steps of the run; set them in the Args of sources, too. Report if they are more
    than a tenth above --num_train_epochs, as the last batch is filled up with rows of the next epoch."""
    rows_of_step = args.batch_size * args.gradient_accumulation_steps
    steps = args.max_steps or math.ceil(args.num_train_epochs * data.epoch_rows / rows_of_step)
    epochs = steps * rows_of_step / data.epoch_rows
    if not args.max_steps and epochs > 1.1 * args.num_train_epochs:
        accelerator.print(f"{steps} full steps of {rows_of_step:,} rows are {epochs:.1f} epochs: lower --batch_size")
    for source in data.sources:  # for read_row and losses that depend on the step
        source.args = replace(source.args, max_steps=steps)
    return replace(args, max_steps=steps)


def schedule(step, steps, args):
    """Return the factor of the learning rates at a step: that of transformers.get_scheduler, with a rate of 0 in the
    first step of a warmup; but a warmup is always shorter than the run."""
    warmup = min(math.ceil(args.warmup_ratio * steps), steps - 1)
    if args.lr_scheduler_type == "constant":
        return 1.0
    if step < warmup:
        return step / warmup
    if args.lr_scheduler_type == "constant_with_warmup":
        return 1.0
    decay = math.ceil(steps / 10) if args.lr_scheduler_type == "warmup_stable_decay" else steps - warmup
    remaining = min(1.0, (steps - step) / decay)  # of the decay
    if args.lr_scheduler_type == "linear":
        return remaining
    return (1 - math.cos(math.pi * remaining)) / 2


# ---- model


def is_causal(model):
    """Return whether the score is that of a word such as "yes", a causal model's next token, and not of a head."""
    return isinstance(model[-1], LogitScore)


def load_model(args):
    """Return the CrossEncoder of the flags. A resume builds the same one, and then loads its weights."""
    torch.manual_seed(args.seed)  # for a new head, adapters, and weights that the folder lacks
    options = {"use_safetensors": True}  # never a pickle
    if args.attn_implementation:  # None would replace the model's own
        options["attn_implementation"] = args.attn_implementation
    with user_errors(f"--model_name_or_path {args.model_name_or_path}"):
        check_exists(args.model_name_or_path)
        check_adapters(args.model_name_or_path)
        model = CrossEncoder(
            args.model_name_or_path,
            device="cpu",
            model_kwargs=options,
            trust_remote_code=args.trust_remote_code,
        )
        if model.num_labels != 1:
            raise UserError(
                f"has {model.num_labels} scores of a pair, not 1: save it by AutoModelForSequenceClassification."
                "from_pretrained(MODEL, num_labels=1, ignore_mismatched_sizes=True), and its tokenizer"
            )
        if args.template:
            model[0].processor = set_template(model.tokenizer, args.template)
            model[0].modality_config.pop("message", None)  # a chat template
        prepare_tokenizer(model, args.max_length)
        check_template(model)
    if args.query_prompt is not None:
        model.prompts["query"] = args.query_prompt
        model.default_prompt_name = "query"
    if not has_chat_template(model):  # else check_template has found the texts
        check_length(model, [(model.prompts.get(model.default_prompt_name) or "", "a")])
    _, *head = model
    lora_options = {}
    if is_causal(model):
        lora_options = {"task_type": "CAUSAL_LM"}
    elif not head:  # peft trains all its weights, also of DistilBERT's pre_classifier
        lora_options = {"task_type": "SEQ_CLS", "exclude_modules": ".*(classifier|score)"}
    model = apply_training_flags(model, args, **lora_options)
    for module in head:
        module.requires_grad_(True)  # also with adapters
    return model


def check_template(model):
    """Raise UserError if the input of a causal model, or of one with a chat template, lacks the query or the document,
    or if that of a causal model does not end where the answer begins, but with the document or the end of its turn; or
    if a causal model's answers are not two words that it knows."""
    if not (is_causal(model) or has_chat_template(model)):
        return
    text = ""
    with suppress(ValueError):  # sentence-transformers found no such roles in the chat template
        features = model.preprocess([("zq", "qz")], prompt=model.prompts.get(model.default_prompt_name))
        text = model.tokenizer.decode(features["input_ids"][0])
    *_, between, end = ["", *re.split("zq|qz", text.rstrip())]
    end_token = model.tokenizer.eos_token or "<none>"
    is_asked = not between.startswith(end) and not end.endswith(end_token)
    if not ("zq" in text and "qz" in text and (is_asked or not is_causal(model))):
        problem = "its input must contain query and document, and end where an answer begins"
        raise UserError(f"{problem}: set --template of train_cross_encoder.py")
    if is_causal(model):
        yes = model[-1].true_token_id
        no = model[-1].false_token_id  # None: the score is the logit of yes alone
        unknown = {model.tokenizer.unk_token_id} - {None}
        if yes == no or unknown & {yes, no}:
            raise UserError(
                f"its score is the logit of token {yes} minus that of token {no}: they must be two words of its "
                'vocabulary, by default "yes" and "no"; save it with a LogitScore of words that it has'
            )


def set_template(tokenizer, template):
    """Return a tokenizer that puts pairs into a template, whose own tokens are never truncated. It is saved so with
    the model, for predict()."""
    pair = []
    tokens = []
    type_id = 0
    for number, text in enumerate(filter(None, re.split(r"({query}|{document})", template))):
        type_id = max(type_id, int(text == "{document}"))  # token types, if the model has them: 1 from {document} on
        name = {"{query}": "$A", "{document}": "$B"}.get(text, f"<{number}>")
        pair.append(f"{name}:{type_id}")
        if name.startswith("<"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            words = tokenizer.convert_ids_to_tokens(ids)
            tokens.append({"id": name, "ids": ids, "tokens": words})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair=pair, special_tokens=tokens)
    # Loaded as another class, it would be given the template of that class.
    names = ("model_input_names", "model_max_length", "padding_side", "truncation_side")
    options = {name: getattr(tokenizer, name) for name in names} | tokenizer.special_tokens_map
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **options)


def resolve_args(args, model, accelerator):
    """Return Args in which the model or the launch fills in what is not given; fit_micro_batches does the rest."""
    tokens = 2048 if total_memory(accelerator.device) is None else None
    return replace(
        args,
        query_prompt=model.prompts.get(model.default_prompt_name),
        micro_batch_tokens=args.micro_batch_tokens or tokens,
        dataloader_num_workers=count_workers(args, accelerator),
    )


def resolve_source_args(args, first):
    """Return Args of a source with its columns: those given, those of `first`, the Args of the first source, or all of
    its own but labels; and with a loss."""
    args = replace(args, columns=args.columns or (first.columns if first else find_columns(args)))
    return replace(args, loss=args.loss or choose_loss(args))


def fit_micro_batches(model, progress, args, accelerator):
    """Return Args with a --micro_batch_tokens for the memory of a GPU, if none is given: that of the checkpoint, as
    dropout depends on how texts are grouped, or else measured."""
    if args.micro_batch_tokens:
        return args

    def run():
        text = " ".join(["text"] * MEASURED_TOKENS)
        (_, features), *_ = tokenize(
            model,
            [(text, text)] * 8,
            replace(args, micro_batch_tokens=MEASURED_TOKENS),
            accelerator,
            prompt=args.query_prompt,
        )
        score(model, convert_arrays(features), accelerator).sum().backward()
        return features["input_ids"].size

    tokens = progress.micro_batch_tokens or measure_micro_batch_tokens(run, model, accelerator)
    progress.micro_batch_tokens = tokens
    return replace(args, micro_batch_tokens=tokens)


# ---- evaluation: that of sentence-transformers, with its names of measures

EVAL_ROWS = 200  # held out by default
CANDIDATES = 50  # documents to rank for a held-out query if negatives are drawn: 200 rows make 10,000 pairs
EVAL_OPTIONS = {"batch_size": 64, "write_csv": False}


def open_evaluators(data, model, args):
    """Return {main measure: (evaluator, {name: prompt})} of the held-out rows of each source and of --eval_beir. An
    evaluator of your own is a function of the model, called on the main process (under FSDP on all), that returns
    {measure: number}, its main measure among them."""
    evaluators = {}
    sources = [source for source, _ in data.held_out]
    for source, rows in data.held_out:
        name = f"held_out_{source.label}" if len(sources) > 1 else "held_out"
        cells = [row.cells for row in rows]
        draw_negatives(rows, cells, 0, {source.number: source for source in sources}, data.lookups, CANDIDATES - 1)
        prompts = {} if source.args.query_prompt is None else {"query": source.args.query_prompt}
        found = held_out_evaluators(name, rows, source.args, prompt_name=next(iter(prompts), None))
        evaluators |= {measure: (evaluator, prompts) for measure, evaluator in found.items()}
    for name in args.eval_beir:
        with user_errors(f"--eval_beir {name} (eval_incremental.py reads more layouts)", KeyError, TypeError):
            if Path(name, "queries.jsonl").exists():
                raise UserError("is a BEIR folder: rerank it after training, or list documents in --eval_data")
            options = {"always_rerank_positives": False, "rerank_k": args.eval_rerank_k, **EVAL_OPTIONS}
            evaluator = CrossEncoderNanoBEIREvaluator(nano_names(name), name, **options)
            measure = f"{evaluator.name}_ndcg@10"
            if measure in evaluators:
                raise UserError("another collection has the same name")
            evaluators[measure] = evaluator, {}
    return evaluators


def held_out_evaluators(name, rows, args, prompt_name):
    """Return {main measure: evaluator} of held-out rows of a source: a query ranks the documents of its row; if each
    row has one document, scores of its pair are correlated with its label. {} if there is nothing to rank."""
    options = {"name": name, "prompt_name": prompt_name, **EVAL_OPTIONS}
    if len(rows) > 1 and all(len(row.documents) == 1 for row in rows):
        pairs = [(row.query, row.documents[0]) for row in rows]
        labels = [row.labels[0] for row in rows]
        return {f"{name}_spearman": CrossEncoderCorrelationEvaluator(pairs, labels, **options)}
    samples = held_out_samples(rows, args)
    return {f"{name}_ndcg@10": CrossEncoderRerankingEvaluator(samples, **options)} if samples else {}


def held_out_samples(rows, args):
    """Return the query, the positives and the negatives of each row that has both. If labels are not grades, as those
    of a teacher, the highest of a row is positive."""
    labels = [*chain.from_iterable(row.labels for row in rows)]
    graded = args.loss not in TEACHER_LOSSES and max(labels, default=0) > 0 and all(map(float.is_integer, labels))
    samples = []
    for row in rows:
        least = 1 if graded else max(row.labels)
        positives = [document for document, label in zip(row.documents, row.labels) if label >= least]
        negatives = [document for document in row.documents if document not in positives]
        if positives and negatives:
            samples.append({"query": row.query, "positive": positives, "negative": negatives})
    return samples


def main_measures(evaluators):
    """Return the measures to print and to plot; of more than four sources their mean alone."""
    held_out = [name for name in evaluators if name.startswith("held_out_")]
    others = [name for name in evaluators if name not in held_out]
    mean = ["held_out_mean"] if len(held_out) > 1 else []
    return (held_out if len(held_out) <= 4 else []) + mean + others


def nano_names(collection):
    """Return the names of the splits of a Hub id in the layout of NanoBEIR, as its evaluators take them."""
    check_exists(collection)
    splits = datasets.get_dataset_split_names(collection, "queries")
    return [split.removeprefix("Nano").lower() for split in splits]  # not always all thirteen


def evaluate(model, evaluators, accelerator):
    """Return {measure: value} of the evaluators, the same on all processes, which share the encoding."""
    sharded = accelerator.distributed_type == DistributedType.FSDP  # its forward passes are collective: all evaluate
    measures = {}
    prompts_of_model = dict(model.prompts)
    # Training refuses tensors of inference mode, which a model may keep: rotary positions, or the buffers of FSDP.
    infer = partial(inspect.unwrap(type(model)._inference), model)  # without its own inference_mode
    model._inference = torch.inference_mode(False)(torch.no_grad()(infer))
    for evaluator, prompts in evaluators.values():
        model.prompts |= prompts
        with distributed_evaluation(model, not sharded) as is_mine, accelerator.autocast():
            if is_mine:
                measures |= evaluator(model)
    del model._inference
    model.prompts = prompts_of_model
    model.train()
    measures = {name: float(value) for name, value in broadcast_object_list([measures])[0].items()}
    held_out = [measures[name] for name in evaluators if name.startswith("held_out_")]
    return measures | ({"held_out_mean": float(np.mean(held_out))} if len(held_out) > 1 else {})


# ==== the path of a batch: from here to the end identical in train_bi_encoder.py
#
# ---- all data of a run


@dataclass
class Data:
    """What a run trains and evaluates on."""

    sources: list  # of Source
    held_out: list  # (Source, list of Row) of each source with held-out rows
    skipped: int  # bad rows among those held out
    lookups: list  # TextLookup of queries and of documents; None where rows contain texts
    weights: list  # of each source in the mixture, in any unit
    epoch_rows: float  # mixed rows of an epoch
    description: list  # [name, rows, fingerprint] of each source and table of texts; of --eval_beir those of its files


def open_data(args):
    """Return the Data of the flags."""
    sources = open_entries("--train_data", args.train_data, args)
    eval_sources = open_entries("--eval_data", args.eval_data, args, sources[0].args)
    losses = [(source.args.loss, source.args.loss_kwargs) for source in sources]
    if args.mix_by == "row" and any(loss != losses[0] for loss in losses):
        raise UserError("--train_data: sources with different losses require --mix_by batch")
    lookups = []
    tables = ("query", args.queries, args.query_columns), ("corpus", args.corpus, args.corpus_columns)
    for option, names, columns in tables:
        with user_errors(f"{' '.join(names)} (--{option}_columns {' '.join(columns)})"):
            lookups.append(TextLookup(names, columns) if names else None)
    description = [[source.name, len(source), data_fingerprint(source.files)] for source in (*sources, *eval_sources)]
    description += [[lookup.name, len(lookup.dataset), lookup.fingerprint] for lookup in filter(None, lookups)]
    for folder in filter(os.path.isdir, args.eval_beir):
        files = sorted(file for file in walk(folder, set()) if file_suffix(file))
        description.append([folder, *(data_fingerprint([file]) for file in files)])
    held_out, skipped = hold_out_rows(eval_sources or sources, lookups, args)
    for source in sources:
        if not len(source):
            raise UserError(f"{source.name}: no row is left to train on after --eval_rows {args.eval_rows}")
    weights = source_weights(sources, args)
    ends = [len(source) * sum(weights) / weight for source, weight in zip(sources, weights)]  # of each, in mixed rows
    end = min(ends) if args.stopping_strategy == "first_exhausted" else max(ends)
    return Data(sources, held_out, skipped, lookups, weights, args.rows_per_epoch or end, description)


def open_entries(option, entries, args, first=None):
    """Return the Sources of entries of --train_data or --eval_data. first: the Args of the first source of all, whose
    columns are those of sources without their own."""
    sources = []
    with user_errors(option):
        for number, entry in enumerate(entries):
            sources.append(Source(entry, number, args, first))
            first = first or sources[0].args
        check_negatives(sources)
    if len({source.label for source in sources}) < len(sources):
        for source in sources:
            source.label += f"-{source.number}"
    return sources


def check_negatives(sources):
    """Raise UserError for a column of negatives that no source has. A row of a source that lacks it has fewer."""
    missing = set(chain.from_iterable(source.args.columns[2:] for source in sources))
    for source in sources if missing else []:
        rows = source.dataset or open_source(source.files, source.args)
        missing -= set(rows.column_names or next(iter(rows.iter(1))).column_names)
    if missing:
        raise UserError(f"no source has the column {', '.join(sorted(missing))}")


def short_name(name):
    """Return what metrics call a source: the last part of its name that is not all suffix and wildcards."""
    for part in reversed(name.split("/")):
        if label := re.sub(r"\W+", "-", part.split(".")[0]).strip("-_"):
            return label
    return "source"


def source_weights(sources, args):
    """Return the share of each source: its own weight, that of --mixing_weights, or its rows."""
    own = list(chain.from_iterable(source.args.mixing_weights for source in sources))
    if own and (args.mixing_weights or len(own) < len(sources)):
        raise UserError("--train_data: give a weight to each source or to none, and leave out --mixing_weights")
    return own or args.mixing_weights or list(map(len, sources))


def hold_out_rows(sources, lookups, args):
    """Return ([(Source, list of Row)], number of bad rows): rows to evaluate on, as many of each source; by default at
    most a tenth of one that is trained on."""
    share = math.ceil((EVAL_ROWS if args.eval_rows is None else args.eval_rows) / len(sources))
    is_tenth = args.eval_rows is None and not args.eval_data and not args.streaming
    held_out = []
    skipped = 0
    for source in sources:
        count = min(share, len(source) // 10) if is_tenth else share
        if count:
            rows, bad = read_rows(source.hold_out(count), sources, lookups, 0)
            skipped += bad
            if rows:
                held_out.append((source, rows))
    return held_out, skipped


def trained_queries(data):
    """Return the set of queries of held-out rows that are also in mapped rows that are trained on."""
    queries = []
    for source, rows in data.held_out:
        queries += [str(row.cells[source.args.columns[0]]) for row in rows]
    queries = pa.array(queries, pa.string())
    found = set()
    for source in data.sources:
        if source.dataset:
            column = source.args.columns[0]
            for table in source.dataset.select_columns([column]).iter(100_000):
                texts = table[column].cast(pa.string())
                found |= {*texts.filter(pc.is_in(texts, value_set=queries)).to_pylist()}
    return found


# ---- files

FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json", ".ndjson": "json",
           ".csv": "csv", ".tsv": "csv", ".txt": "text"}  # fmt: skip
UNSUPPORTED = f"not one of {' '.join(FORMATS)}, with or without .gz or .zst"
NOT_ROWS = re.compile(r"(readme|licen[cs]e)(\.md|\.txt)?|(config|dataset_infos?|dataset_dict)\.json", re.I)
# A word that names a split, as test, testdata, dev_set and the first one of TestSet do.
SPLIT = re.compile(r"(?<![a-z])(train|valid|val|dev|test|eval)(?:ing|idation|uation)?(?:data|set|file)?s?(?![a-z])")


def file_suffix(file):
    """Return the key of FORMATS that a file name ends in, before .gz or .zst and the query of a URL; None if there is
    none."""
    name = file.partition("?")[0] if file.startswith(("http://", "https://")) else file
    suffix = Path(name.lower().removesuffix(".gz").removesuffix(".zst")).suffix
    return suffix if suffix in FORMATS else None


def check_exists(name):
    """Raise UserError if `name` is not on disk and cannot be a Hub id: NAME or ORG/NAME, without a folder ORG here."""
    may_be_id = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) and not os.path.isdir(os.path.dirname(name))
    if not (may_be_id or "://" in name or os.path.exists(name)):
        raise UserError("no such file or folder")


@lru_cache
def warn_once(line):
    """Print a warning on the main process, however often it is given."""
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {line}", file=sys.stderr)


def list_files(source):
    """Return the files of a path, folder, glob, URL, Hub id or ID:config:split. What is on disk comes first, by its
    name, whatever its characters; choose_files says which files of a folder are read."""
    path = os.path.expanduser(source)
    folder = os.path.join(path, "")
    if os.path.isfile(path):
        if not file_suffix(path):
            raise UserError(UNSUPPORTED)
        return [path]
    readme = Path(folder, "README.md")
    has_configs = readme.exists() and "\nconfigs:" in readme.read_text(errors="replace")  # the Hub's layout
    if os.path.isdir(path) and not has_configs:
        return choose_files(source, walk(path, set()), folder)
    if matches := list(filter(os.path.isfile, glob.glob(path, recursive=True))):
        constant = os.path.dirname(re.split(r"[*?[]", path)[0])
        return choose_files(source, matches, os.path.join(constant, ""), is_pattern=True)
    if file_suffix(path):
        if "://" not in path:  # a missing file is not looked for on the Hub
            raise UserError("no such file")
        return list(datasets.load_dataset_builder("text", data_files=path).config.data_files["train"])  # of any format
    if "://" in path and not path.startswith("hf:"):  # a folder of an object store
        fs, root = fsspec.core.url_to_fs(path)
        return choose_files(source, map(fs.unstrip_protocol, fs.find(root)), f"{fs.unstrip_protocol(root)}/")
    return files_of_split(path)


def files_of_split(name):
    """Return the files of ID:config:split or, of a Hub id or a folder in its layout, those of the split train."""
    config = None
    split = "train"
    if not os.path.isdir(name) and name.count(":") == 2:
        name, config, split = name.split(":")
    check_exists(name)
    files = datasets.load_dataset_builder(name, name=config or None).config.data_files
    if not files.get(split):
        raise UserError(f"no split {split!r} with files; available: {', '.join(map(str, files)) or 'none'}")
    if not file_suffix(files[split][0]):
        raise UserError(f"{files[split][0]}: {UNSUPPORTED}")
    return list(files[split])


def walk(folder, seen):
    """Yield the files below a folder, also where links lead, but not the caches that map() adds to a folder of
    Dataset.save_to_disk; seen: the folders so far, none of which is read again."""
    real = os.path.realpath(folder)
    names = [] if real in seen else os.listdir(folder)
    if {"state.json", "dataset_info.json"} <= {*names}:
        state = json.loads(Path(folder, "state.json").read_text())
        names = [file["filename"] for file in state["_data_files"]]
    for name in names:
        seen.add(real)
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            yield from walk(path, seen)
        else:
            yield path


def is_other_split(name):
    """Return whether a path within a folder names another split than train, as test/x.parquet, split=dev/x.parquet or
    TestSet.csv; the first of its parts that names a split decides."""
    for part in name.split("/"):
        if splits := SPLIT.findall(re.sub("([a-z])([A-Z])", r"\1 \2", part).lower()):
            return "train" not in splits
    return False


def choose_files(source, files, root, is_pattern=False):
    """Return those of the files below `root` that are read: of the most frequent format, neither hidden nor compressed
    copies and, unless they match a pattern, not of another split than train. Print which are not, and why."""
    found = defaultdict(list)  # {format, or why a file is not read: names}
    names = {file.removeprefix(root) for file in files}
    for name in sorted(names):
        is_hidden = name.startswith((".", "_")) or "/." in name or "/_" in name
        kind = FORMATS.get(file_suffix(name), "unknown format")
        if NOT_ROWS.fullmatch(os.path.basename(name)) or (is_hidden and kind not in FORMATS.values()):
            continue
        if name.startswith("_delta_log/"):
            raise UserError("a table of Delta Lake, with rows that it no longer has: export it as Parquet, read that")
        if is_hidden:
            kind = "hidden"
        elif name.endswith((".gz", ".zst")) and name.rpartition(".")[0] in names:
            kind = "compressed copy"
        elif is_other_split(name) and not is_pattern:
            kind = "another split"
        found[kind].append(name)
    formats = [kind for kind in found if kind in FORMATS.values()]
    chosen = max(formats, key=lambda kind: len(found[kind]), default=None)
    others = [f"{len(found[kind]):,} {kind} ({', '.join(found[kind][:3])})" for kind in found if kind != chosen]
    if not chosen:
        raise UserError("; ".join(["no file to read", *others]))
    if others:
        warn_once(f"{source}: files that are not read: {'; '.join(others)}")
    return [root + name for name in found[chosen]]


def exact(file):
    """Return the pattern that `datasets` resolves to this file alone."""
    if file.startswith(("http://", "https://")):  # a "?" begins a query there
        return file
    return glob.escape(file if "://" in file else os.path.abspath(file))


def open_files(files, streaming=True, columns=None, labels=(), optional=(), ids=()):
    """Return a Dataset or IterableDataset of files of one format, which yields pyarrow Tables of `columns`; None: of
    all that `datasets` can hold. Cells of CSV and TSV are texts, as written. labels: columns of which whole numbers
    and decimals are read as floats, as others may follow; ids: columns of which whole numbers are read as texts;
    optional: columns that the files may lack."""
    suffix = file_suffix(files[0])
    kind = FORMATS[suffix]
    formats = {(FORMATS[file_suffix(file)], file_suffix(file) == ".tsv") for file in files}
    if len(formats) > 1:
        raise UserError("has files of several formats: write all of them in one")
    folders = {os.path.dirname(file) for file in files}
    if len(folders) > 1 and any("=" in name for name in folders):
        warn_once(f"{files[0]}: folders KEY=VALUE are not read as columns; prepare_corpus.py does so")
    options = {"split": "train", "writer_batch_size": 20_000}  # a mapped table lists its record batches: few, large
    if kind == "csv":
        files = [file for file in files if not os.path.isfile(file) or os.path.getsize(file)] or files
        options |= csv_options(suffix)
    if kind == "text":
        options["encoding"] = "utf-8-sig"
    if kind == "parquet":  # else pyarrow reads up to 1 GiB ahead, and keeps what it has read of a file
        options |= {"batch_size": 1000, "fragment_scan_options": ParquetFragmentScanOptions(pre_buffer=False)}
    load = partial(datasets.load_dataset, kind, data_files=list(map(exact, files)), **options)
    if kind == "parquet":
        inferred = parquet_schema(files[0], columns)
        load = partial(load, columns=inferred.names)
    else:
        inferred = next(load(streaming=True).with_format("arrow").iter(1)).schema
    schema = plain_schema(inferred, kind, columns or [], labels, ids)
    if len(files) > 1 and kind in ("parquet", "csv") and (not columns or {*optional} - {*schema.names}):
        check_other_files(files, columns, optional)
    dataset = None
    if schema != inferred or kind == "parquet":
        load = partial(load, features=datasets.Features.from_arrow_schema(schema))
    elif kind == "arrow" and not streaming:
        with suppress(OSError, pa.ArrowInvalid):  # a local Arrow stream is mapped in place, anything else copied below
            dataset = datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in files])
    if not (dataset or streaming):  # else a table of other files with the same names and times may be in the cache
        load = partial(load, name=data_fingerprint(files))
    dataset = (dataset or load(streaming=streaming)).with_format("arrow")
    if columns:
        present = dataset.column_names or schema.names
        dataset = dataset.select_columns([name for name in columns if name in present or name not in optional])
    return dataset


def check_other_files(files, columns, optional):
    """Raise UserError if another file of Parquet or CSV has a column of `optional` that the first, whose columns are
    those of all, has not. Without `columns`, warn of any such column."""
    with ThreadPoolExecutor() as pool:  # files may be remote
        first, *others = pool.map(column_names, files)
    for file, names in zip(files[1:], others):
        for name in [name for name in named_columns(names) if name not in first]:
            found = f"{file} has the column {name!r}, {files[0]} has not"
            if name in optional:
                raise UserError(f"{found}: give each kind a source of its own, or the column to all")
            if not columns:
                return warn_once(f"{found}: it is not read")


def column_names(file):
    """Return the names of the columns of a file of Parquet, CSV or TSV."""
    suffix = file_suffix(file)
    if suffix == ".parquet":
        return parquet_schema(file, None).names
    with fsspec.open(file, "rt", encoding="utf-8-sig", compression="infer") as source:
        return [*pd.read_csv(source, nrows=0, **csv_options(suffix))]


def parquet_schema(file, columns):
    """Return the schema of `columns` of a Parquet file; None, or one that is missing: of all that `datasets` holds."""
    with xopen(file, "rb") as source:
        schema = pq.read_schema(source)
    kept = {}
    for part in schema:
        with suppress(ValueError):  # of a map, a list view and others
            datasets.Features.from_arrow_schema(pa.schema([part]))
            kept[part.name] = part
    if columns and kept.keys() >= set(columns):
        kept = {name: kept[name] for name in columns}
    return datasets.Features.from_arrow_schema(pa.schema(kept.values(), schema.metadata)).arrow_schema


def csv_options(suffix):
    """Return the options by which `datasets` reads CSV or TSV as it is written: only an empty cell is missing, and TSV
    has no quotes."""
    warnings.simplefilter("error", pd.errors.ParserWarning)  # the first row has more fields than the header
    options = {"keep_default_na": False, "na_values": [""], "index_col": False}
    return options | ({"sep": "\t", "quoting": csv.QUOTE_NONE} if suffix == ".tsv" else {})


def plain_schema(inferred, kind, columns, labels, ids):
    """Return the schema that files of a format are read as; `inferred`: that of their first rows."""
    schema = []
    for part in inferred:
        value = part.type
        while is_list(value):
            value = value.value_type
        if kind == "json" and pa.types.is_temporal(value) and part.name in columns:
            problem = "texts like 2020-01-01, which would become other texts: rewrite the file by prepare_corpus.py"
            raise UserError(f"column {part.name!r} has {problem}")
        as_float = part.name in labels and kind != "arrow"  # of which a file is mapped as it is
        as_text = part.name in ids and kind != "arrow"
        schema.append((part.name, pa.string() if kind == "csv" else plain_type(part.type, as_float, as_text)))
    return pa.schema(schema)


def plain_type(kind, as_float=False, as_text=False):
    """Return the Arrow type that a column is read as: text where the first rows are null; string and list where `take`
    or `datasets` cannot handle the type; as_float: float64 instead of integers, decimals and booleans; as_text: string
    instead of integers."""
    if is_list(kind):
        wrap = pa.large_list if pa.types.is_large_list(kind) else pa.list_
        return wrap(plain_type(kind.value_type, as_float, as_text))
    if pa.types.is_struct(kind):
        return pa.struct([part.with_type(plain_type(part.type)) for part in kind])
    if as_text and pa.types.is_integer(kind):
        return pa.string()
    if as_float and (pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_boolean(kind)):
        return pa.float64()
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
                digest.update(fs.head(path, 2**16) + fs.tail(path, 2**16))
    return digest.hexdigest()[:16]


# ---- rows, from Arrow to Python

SOURCE = "<source>"  # column added to rows: the number of their source
NUMBER = "<number>"  # column added to rows: the number of the row in its source, over all epochs
LENGTH = "<length>"  # column added to rows: bytes of their texts


def is_list(kind):
    """Return whether an Arrow type is one of lists."""
    return isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def count_bytes(column):
    """Return (rows,) bytes of text in each row of an Array, also in lists."""
    if is_list(column.type):
        # Not by list_parent_indices, which counts the values that a null list may have; list_flatten does not.
        rows = np.repeat(np.arange(len(column)), pc.fill_null(pc.list_value_length(column), 0))
        return np.bincount(rows, count_bytes(pc.list_flatten(column)), minlength=len(column))
    if pa.types.is_struct(column.type):
        return sum(map(count_bytes, column.flatten()), np.zeros(len(column)))
    if column.type in (pa.string(), pa.large_string()):
        return pc.fill_null(pc.binary_length(column), 0).to_numpy()
    return np.zeros(len(column))


def to_python(table):
    """Return [{column: value}] of the rows of a Table; a list that is null is empty."""
    columns = PythonFormatter(datasets.Features.from_arrow_schema(table.schema)).format_batch(table)
    for name, values in columns.items():
        if is_list(table[name].type):
            columns[name] = [value or [] for value in values]
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def named_columns(names):
    """Return the names of columns but those that pandas gives to an index, which are no default."""
    return [name for name in names if not re.fullmatch(r"Unnamed: \d+|__index_level_\d+__", name)]


def find_columns(args):
    """Return the columns of a source but those of labels."""
    name = args.train_data[0]
    with user_errors(name):
        first = next(open_files(find_files(name)).iter(1))
    columns = [column for column in named_columns(first.column_names) if column not in args.label_column]
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

    def __init__(self, entry, number, args, first=None):
        self.args = args = resolve_source_args(args_of_source(entry, args), first)
        self.name = args.train_data[0]
        self.label = short_name(self.name)  # in metrics
        self.number = number
        self.window_rows = args.shuffle_buffer or 1000
        self.block_rows = min(BLOCK, self.window_rows)
        self.held_out = 0  # rows
        self.leading = 0  # files of a stream with the held-out rows; not permuted, so that skip() skips these rows
        with user_errors(self.name):
            self.files = find_files(self.name)
            self.dataset = None if args.streaming else open_source(self.files, args).with_format("arrow")
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
        """Return a Table with the columns SOURCE and NUMBER, which identify a row of training, and LENGTH."""
        columns = set(self.args.columns) & set(table.column_names)
        lengths = sum(count_bytes(table[name].combine_chunks()) for name in columns)
        table = table.append_column(LENGTH, [lengths])
        table = table.append_column(SOURCE, [np.full(len(table), self.number)])
        return table.append_column(NUMBER, [np.arange(first, first + len(table))])

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
            if self.args.streaming and position.epoch == 0 and position.taken < 9 * self.held_out:
                warn_once(f"{self.name}: {self.held_out:,} of {self.held_out + position.taken:,} rows are held out")
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
            firsts = blocks[start : start + num_blocks].tolist()
            parts = [self.dataset[first : first + self.block_rows] for first in firsts]
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
    taken, remaining = (np.linspace(0, rows, 11).astype(int) for rows in (count, len(dataset) - count))
    begins = taken + remaining
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
    counts = np.maximum(missing.astype(int) - 1, 0)  # one less: the loop gives the rest to whichever lacks most
    if counts.sum() > count:  # the weights have changed, by a resume: catch up over several calls
        counts[:] = 0
    for _ in range(count - counts.sum()):
        counts[np.argmax(missing - counts)] += 1
    return counts.tolist()


def row_batches(sources, weights, args, state=None):
    """Yield (Table of a batch's rows, state after it) without end: a pure function of sources, seed and batch size.
    Each batch has its own state (JSON), so prefetching loses no row: the position of each source before the length
    window, and "used", the batches taken from that window. A resume with other sources or weights mixes by them from
    then on: "since" has the rows of each source until then."""
    names = [source.name for source in sources]
    keys = [f"{name} {names[:index].count(name)}" for index, name in enumerate(names)]  # distinct
    mixture = {"keys": keys, "weights": weights, "since": [0] * len(sources)}
    state = mixture | (state or {"sources": [{} for _ in sources], "used": 0})
    positions = dict(zip(state["keys"], state["sources"]))
    for source, key in zip(sources, keys):
        source.seek(Position(**positions.get(key, {})))
    is_same = (state["keys"], state["weights"]) == (keys, weights)
    mixture["since"] = state["since"] if is_same else [source.position.taken for source in sources]
    used = state["used"]
    size = args.batch_size * args.length_window  # rows of a length window
    rows_per_turn = 1 if args.mix_by == "row" else size  # by batch: one source fills a length window
    while True:
        positions = [asdict(source.position) for source in sources]
        drawn = [position["taken"] for position in positions]
        mixed = [(rows - before) // rows_per_turn for rows, before in zip(drawn, mixture["since"])]
        turns = apportion(mixed, weights, size // rows_per_turn)
        tables = [source.take(count * rows_per_turn) for source, count in zip(sources, turns) if count]
        with user_errors(f"the columns of {', '.join(source.name for source in sources)} differ", TypeError):
            table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
        order = np.arange(args.length_window)
        if args.length_window > 1:
            table = table.take(np.argsort(table[LENGTH], kind="stable"))
            np.random.default_rng([args.seed, *drawn]).shuffle(order)
        for number in range(used, len(order)):
            used = (number + 1) % len(order)
            if used == 0:  # the next batch begins a window
                positions = [asdict(source.position) for source in sources]
            rows = table.slice(order[number] * args.batch_size, args.batch_size)
            yield rows, mixture | {"sources": positions, "used": used}
        used = 0  # also where --length_window was lowered by a resume


# ---- from ids to texts


class TextLookup:
    """Texts by id from a memory-mapped table. Its index (sorted 64-bit hashes of the ids, and the row of each) is also
    a memory-mapped file, built once: 16 bytes per text on disk, none in memory."""

    def __init__(self, sources, columns):
        files = [*chain.from_iterable(map(list_files, sources))]
        self.name = sources[0]
        self.fingerprint = data_fingerprint(files)
        self.id_column, *self.text_columns = columns
        self.dataset = open_files(files, streaming=False, columns=columns, ids=columns[:1])
        if isinstance(self.dataset.features[self.id_column], datasets.Json):
            raise UserError(f"{self.id_column!r} holds values of several types: make all of them texts")
        self.index = self.open_index()

    def open_index(self):
        """Return the index of the table, memory-mapped."""
        # The fingerprint of `datasets` changes with the names and times of the files, and with the column of ids.
        name = f"evenstep-{self.fingerprint}-{self.dataset._fingerprint}.npy"
        path = os.path.join(datasets.config.HF_DATASETS_CACHE, name)
        with FileLock(f"{path}.lock"):  # one process builds the index, the others wait
            if not os.path.exists(path):
                np.save(f"{path}.part.npy", self.build_index())
                os.replace(f"{path}.part.npy", path)
        return np.load(path, mmap_mode="r")

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
            positions = np.searchsorted(self.index[0], self.hashes(np.array(ids, object)))
            rows = self.index[1, positions.clip(max=len(self.dataset) - 1)]
            table = self.dataset[rows.tolist()].combine_chunks()  # else one chunk for each row
            is_found = self.ids(table) == np.array(ids, object)
            texts = []
            for known, row in zip(is_found, to_python(table.select(self.text_columns))):
                text = " ".join(part or "" for part in row.values()).strip()
                texts.append(text if text and known else None)
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
        texts = iter(documents.texts([*chain.from_iterable(row.documents for row in rows)]))
        for row in rows:
            row.documents = [next(texts) for _ in row.documents]


# ---- this process' rows


def read_rows(table, sources, lookups, step):
    """Return (list of Row, number of bad rows) of a Table, with texts in place of ids; step: that of the batch."""
    lists = {part.name for part in table.schema if is_list(part.type) or isinstance(part.type, pa.JsonType)}
    rows = []
    for cells in to_python(table):
        args = sources[cells[SOURCE]].args
        random = None
        if lists.intersection(args.columns):  # seeding takes 5 µs
            random = Random(f"{args.seed} {cells[SOURCE]} {cells[NUMBER]}")
        try:
            rows.append(replace(read_row(cells, step, args, random), cells=cells, args=args))
        except ValueError as error:
            reject(error, cells, sources)
    resolve_ids(rows, lookups)
    complete_rows = []
    for row in rows:
        if None in (row.query, *row.documents):
            reject("no text has its id", row.cells, sources)
        else:
            complete_rows.append(row)
    return complete_rows, len(table) - len(complete_rows)


def reject(problem, cells, sources):
    """Raise UserError for a bad row. Return if it is to be skipped: by --on_bad_row, and if the row alone is wrong."""
    source = sources[cells[SOURCE]]
    if isinstance(problem, UserError):
        raise UserError(f"{source.name}: {problem}") from problem
    if source.args.on_bad_row == "error":
        names = [*source.args.columns, *source.args.label_column]
        shown = str({name: cells.get(name) for name in names})[:200]
        raise UserError(f"{source.name}: {problem} in the row {shown}; fix it, edit read_row, or --on_bad_row skip")


def local_batches(global_batches, first, data, args, accelerator):
    """Yield (this process' rows, number of the batch, further fields of its Batch) of each (Table, state) without end,
    from number `first` on. Whatever fails becomes the error of a batch without rows: all processes stop together."""
    index = first
    while True:
        try:
            table, state = next(global_batches)
            by_length = np.argsort(-table[LENGTH].to_numpy(), kind="stable")
            local = np.sort(by_length[accelerator.process_index :: accelerator.num_processes])  # every P-th by length
            rows, skipped = local_rows(table, local, index // args.gradient_accumulation_steps, data, args)
            source = table[SOURCE][0].as_py() if args.mix_by == "batch" else 0
            yield rows, index, {"source": source, "state": state, "skipped": skipped}
        except Exception as error:
            yield [], index, {"error": describe(error)}
        index += 1


# ---- worker processes


class BatchMaker(torch.utils.data.Dataset):
    """What worker processes do: the Batch of each item of local_batches."""

    def __init__(self, *options):
        self.options = options  # model, args, accelerator

    def __getitem__(self, item):
        rows, index, more = item
        try:
            batch = make_batch(rows, index, *self.options)
        except Exception as error:
            batch = make_batch([], index, *self.options)
            more["error"] = describe(error)
        return replace(batch, **more)


def load_batches(local, model, args, accelerator):
    """Yield the Batches of what local_batches yields, made ahead by --dataloader_num_workers processes."""
    workers = args.dataloader_num_workers
    loader = torch.utils.data.DataLoader(
        BatchMaker(model, args, accelerator),
        sampler=read_ahead(local),  # its "indices" are the rows: read in this process, tokenized in workers
        batch_size=None,
        num_workers=workers,
        prefetch_factor=1 if workers else None,
        worker_init_fn=start_worker,
        multiprocessing_context="fork" if workers else None,
        pin_memory=accelerator.device.type == "cuda",
    )
    batches = iter(loader)
    while True:
        requested = time.perf_counter()
        batch = batch_to_torch(next(batches))
        batch.waited = time.perf_counter() - requested
        yield batch


def read_ahead(local, depth=2):
    """Yield from an iterator that runs in a background thread, `depth` ahead."""
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(next, local) for _ in range(depth))
        while True:
            yield ahead.popleft().result()
            ahead.append(pool.submit(next, local))


def start_worker(_):
    """Let a worker process end with its parent, however that ends, and leave signals to it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: when the thread that forked it ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def count_workers(args, accelerator):
    """Return --dataloader_num_workers, or its default: on a GPU half of the cores of a process, at most 8; none on a
    CPU, all of whose cores tokenize and then train."""
    if args.dataloader_num_workers is not None:
        return args.dataloader_num_workers
    if sys.platform != "linux" or accelerator.device.type == "cpu":  # only Linux has a fork that is safe
        return 0
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(8, cores // 2))


# ---- micro-batches

MEASURED_TOKENS = 1024  # of the passes that measure memory
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
        features = model.preprocess([texts[index] for index in indices], **options)
        features = {name: value.numpy() if torch.is_tensor(value) else value for name, value in features.items()}
        for positions, part in split_features(features, args.micro_batch_tokens, device, needs_mask):
            yield [indices[position] for position in positions], part


def measure_micro_batch_tokens(run, model, accelerator):
    """Return a --micro_batch_tokens for this GPU, the same on all processes: a power of two, such that four such
    graphs fit beside weights, gradients and the moments of AdamW. run(): passes forward and backward; returns
    their tokens."""
    run()  # makes gradients, and what libraries allocate once
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    tokens = run()
    bytes_per_token = (torch.accelerator.max_memory_allocated() - before) / tokens
    moments = 2 * sum(weight.grad.nbytes for weight in model.parameters() if weight.grad is not None)
    model.zero_grad()
    room = (total_memory(accelerator.device) - before - moments) / 4
    fitting = torch.tensor(room / max(bytes_per_token, 1.0), device=accelerator.device)
    fitting = accelerator.gather(fitting.clamp(512, 32_768)).min().item()  # larger passes pad more
    return 2 ** int(math.log2(fitting))


def split_features(features, max_tokens, device, needs_mask):
    """Yield (positions, features) of the texts at these positions, the longest first, for each micro-batch."""
    if "offsets" in features:  # of a static model, whose tokens need no memory to speak of
        yield range(len(features["offsets"])), features
    elif "cu_seq_lens_q" in features:  # concatenated without padding, for flash attention
        bounds = features["cu_seq_lens_q"].tolist()
        for positions in cut(np.diff(bounds), max_tokens, None):
            yield positions, take_flat(features, bounds, positions)
    else:
        lengths = features["attention_mask"].sum(1)
        max_padding = max_tokens / 64
        if device.type != "cpu":
            # Kernels are faster at multiples of 8; to launch those of a pass takes as long as thousands of tokens.
            lengths = np.minimum(-(-lengths // 8) * 8, features["attention_mask"].shape[1])
            max_padding = max_tokens / 8
        for positions in cut(lengths, max_tokens, max_padding):
            yield positions, take_padded(features, positions, int(lengths[positions[0]]), needs_mask)


def cut(lengths, max_tokens, max_padding):
    """Return lists of positions, the longest text first: each of at most max_tokens; a longer text is alone.
    max_padding: of these tokens; None: texts are concatenated, without padding."""
    parts = []
    longest = tokens = 0
    order = np.argsort(-lengths, kind="stable")
    for position, length in zip(order.tolist(), lengths[order].tolist()):
        tokens += length
        padded = longest * (len(parts[-1]) + 1) if parts and max_padding is not None else tokens
        if not parts or padded > max_tokens or padded - tokens > (max_padding or 0):
            parts.append([])
            longest = tokens = length
        parts[-1].append(position)
    return parts


def take_padded(features, positions, width, needs_mask):
    """Return the features of some texts, without columns of padding beyond `width`, on whichever side it is."""
    mask = features["attention_mask"][positions]
    columns = slice(width) if mask[:, 0].all() else slice(mask.shape[1] - width, None)
    part = convert_arrays(features, lambda array: array[positions, columns])  # (texts, tokens)
    if part["attention_mask"].all() and not needs_mask:  # else models wait for the device to see that all is 1
        del part["attention_mask"]
    return part


def take_flat(features, bounds, positions):
    """Return the features of some texts that are concatenated; bounds: where texts begin, and the end of the last."""
    spans = [slice(bounds[position], bounds[position + 1]) for position in positions]
    lengths = np.diff(bounds)[positions]
    part = dict(features)
    for name, value in features.items():
        if isinstance(value, np.ndarray) and value.shape[-1] == bounds[-1]:  # (1, tokens)
            part[name] = np.concatenate([value[:, span] for span in spans], 1)
    ends = np.append(0, lengths.cumsum()).astype(np.int32)
    longest = int(lengths.max())
    part |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    part["seq_idx"] = np.repeat(np.arange(len(spans), dtype=np.int32), lengths)[None]
    return part


def token_counts(micro_batches):
    """Return (tokens without padding, tokens with padding) of micro-batches."""
    tokens = padded = 0
    for *_, features in micro_batches:
        size = features["input_ids"].numel()
        tokens += int(features["attention_mask"].sum()) if "attention_mask" in features else size
        padded += size
    return tokens, padded


def convert_arrays(values, function=torch.from_numpy):
    """Return {name: value} with function(array) in place of each array of numpy."""
    return {name: function(value) if isinstance(value, np.ndarray) else value for name, value in values.items()}


def batch_to_torch(batch, function=torch.from_numpy):
    """Return a Batch, as worker processes send it, with function(array) in place of each array of numpy."""
    micro_batches = [(*head, convert_arrays(features, function)) for *head, features in batch.micro_batches]
    return replace(batch, **convert_arrays(vars(batch) | {"micro_batches": micro_batches}, function))


def pad_lists(lists, size, fill, dtype=np.int64):
    """Return a (size, longest) array of lists, padded with `fill`, at least 1 wide."""
    padded = np.full((size, max([1, *map(len, lists)])), fill, dtype)
    for row, values in zip(padded, lists):
        row[: len(values)] = values
    return padded


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
    if isinstance(error, UnicodeDecodeError):
        return f"not in UTF-8: save it in that encoding ({error})"
    if isinstance(error, pd.errors.ParserWarning):
        return "line 2 has more fields than the header: check the separator, and quote texts that contain it"
    reason = str(error).strip() or repr(error)
    is_irregular = isinstance(error, pa.ArrowInvalid) or "Couldn't cast" in reason
    if isinstance(error, datasets.table.CastError):
        reason = f"not all rows have the same columns: {error.details()}"
    reason = " ".join(reason.split())[:500]
    return reason + "; prepare_corpus.py rewrites irregular rows" * is_irregular


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
    if isinstance(error, AgreedError):
        if PartialState().is_main_process:
            print(f"error: {error}", file=sys.stderr)
        PartialState().wait_for_everyone()  # once a process has ended, a launcher ends the others
    elif isinstance(error, UserError):
        if os.environ.get("RANK", "0") != "0":  # if each has one, a launcher ends this process while it waits
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        print(f"error: {error}", file=sys.stderr)
    elif "DataLoader worker" in str(error) and "killed" in str(error):
        advice = "memory may be short: lower --dataloader_num_workers or --batch_size, then --resume"
        print(f"error: {error.args[0].strip()} {advice}", file=sys.stderr)
    else:
        traceback.print_exception(error)
        if should_reduce_batch_size(error):
            advice = "lower --micro_batch_tokens, or set --grad_cache true, then --gradient_checkpointing"
            print(f"out of memory: {advice}", file=sys.stderr)
        else:
            print("the same command with --resume continues from the newest checkpoint, if any", file=sys.stderr)
    return 1


class Console:
    """stdout or stderr, which may be closed, lose its reader or lack a letter: none of that ends a run."""

    def __init__(self, stream):
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115
        self.stream.reconfigure(errors="replace")

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self):
        with suppress(OSError):
            self.stream.flush()


# ---- command line


class FlagLoader(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error: else the last one would be taken."""

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{twice[0]} is given twice")
        return super().construct_mapping(node, deep)


def read_flags(path):
    """Return {flag: value} of a YAML or JSON file."""
    with user_errors(f"{path}: not a file of flags", TypeError):
        flags = dict(yaml.load(Path(path).read_text(), FlagLoader))
        if "trust_remote_code" in flags:
            raise UserError("--trust_remote_code: only on the command line, as a file may have been downloaded")
        if flags.pop("append_eos", False):  # of an earlier edition
            raise UserError("append_eos has left: docs/training.md#a-tokenizer-without-an-end-token")
        return flags


def words_of(flags):
    """Return the words of a command line that {flag: value} stands for."""
    words = []
    for name, value in flags.items():
        values = value if isinstance(value, list) else [value]
        if values not in ([], [None]):  # not given
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
        argv = [path, *words_of(read_flags(path)), *(word for word in argv if word != path)]
    args = parse_flags(parser, argv)
    try:
        check_flags(args)
        for entry in (*args.train_data, *args.eval_data):
            args_of_source(entry, args)
    except UserError as error:
        parser.error(str(error))
    folder = Path(path or "").parent
    is_elsewhere = (folder / "checkpoints").is_dir() and folder.resolve() != Path(args.output_dir).resolve()
    if path and args.resume and is_elsewhere and "--output_dir" not in names:
        parser.error(f"{path} lies in another folder than its --output_dir {args.output_dir}: give --output_dir")
    return args


def parse_flags(parser, words, args=None):
    """Return Args from the words of a command line; args: those to use where there is no word."""
    flags = vars(parser.parse_args(words, args and argparse.Namespace(**vars(args))))
    flags.pop("file", None)
    for option in fields(Args):
        values = flags[option.name]
        least = 1e-12 if option.metadata["above_zero"] else 0
        if values in ("true", "false", "None", "null"):  # of YAML, whose `no` is false
            parser.error(f'--{option.name} {values}: not a text: give "" for an empty one, or leave the flag out')
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, str) and SECRET.search(value):
                parser.error(f"--{option.name}: a URL with a credential, which files would show; use ~/.netrc")
            if option.name == "output_dir" and "://" in value:
                parser.error(f"--output_dir {value}: must be a local folder; copy it elsewhere when the run has ended")
            if isinstance(value, int | float) and not least <= value < math.inf:
                relation = "above 0" if least else "0 or more"
                parser.error(f"--{option.name} {value}: must be finite, and {relation}")
    return Args(**flags)


def raise_user_error(message):
    raise UserError(message)


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


def apply_training_flags(model, args, **lora_options):
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


def prepare_tokenizer(model, length):
    """Check weights and tokens of the modules of a model, and truncate to --max_length or the model's own length. Let
    the embeddings of all tokens be trained."""
    for module in model.modules():
        if isinstance(module, Transformer):
            check_weights(module.model)
            check_tokens(module.tokenizer, getattr(module.config, "vocab_size", math.inf))
            set_length(module, length)
        elif isinstance(module, StaticEmbedding):
            check_tokens(module.tokenizer, module.embedding.num_embeddings)
            if length:
                truncation = module.tokenizer.truncation or {"direction": "right"}
                module.tokenizer.enable_truncation(length, direction=truncation["direction"])
    if length and not any(isinstance(module, (Transformer, StaticEmbedding)) for module in model.modules()):
        model.max_seq_length = length  # of a first module that is not of the library
        if model.preprocess(["a " * 2 * length])["input_ids"].shape[-1] > length:
            raise UserError(f"--max_length {length}: {type(model[0]).__name__} does not truncate to max_seq_length")


def set_length(transformer, length):
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
            is_position = name.endswith("position_embeddings")
            if is_position:
                limit = min(limit, module.num_embeddings)  # CANINE may have fewer
            if is_position and module.padding_idx is not None:
                limit -= module.padding_idx + 1  # RoBERTa's positions begin after it
            elif name.endswith(("position_embeddings", "wpe")) and tokenizer.padding_side == "left":
                raise UserError("pads on the left, which moves its positions: save it with padding_side right")
            module.padding_idx = None  # else an end token that is also padding would not be trained
    transformer.max_seq_length = length or min(transformer.max_seq_length or limit, 2**31)  # 10**30 if without a limit
    if transformer.max_seq_length > limit:
        raise UserError(f"has positions for {limit} tokens: set --max_length to that or less")


def check_length(model, inputs):
    """Raise UserError if a transformer truncates texts to special tokens and a prompt; inputs: (prompt,) or, of pairs,
    (prompt, a short document)."""
    for module in model.modules():
        if isinstance(module, Transformer):
            used = max(len(module.tokenizer(*texts)["input_ids"]) for texts in inputs)
            if module.max_seq_length <= used:
                length = module.max_seq_length
                raise UserError(
                    f"{length} tokens: no room for a text beside prompt and special tokens: raise --max_length"
                )


def check_adapters(name):
    """Raise UserError if a model is saved as adapters of peft: loaded, they are frozen, and would not be merged."""
    if find_adapter_config_file(name) or any(Path(name).glob("0_*/adapter_config.json")):
        raise UserError(
            "contains adapters of peft: merge the adapters first, PeftModel.from_pretrained(BASE_MODEL, ADAPTERS)"
            ".merge_and_unload().save_pretrained(NEW), and save the tokenizer there"
        )


def check_weights(transformer):
    """Raise UserError if weights are random, as files have none of their name; a head or a pooler may be."""
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


# ---- checkpoints


def sync(path):
    """Wait until a file, or a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows syncs what can be written to
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
                if path.is_dir():
                    with suppress(OSError):  # Windows and some network file systems cannot sync a folder
                        sync(path)
                else:
                    with suppress(OSError):  # safetensors writes files for their owner alone: follow the umask
                        path.chmod(part.stat().st_mode & 0o666)
                    sync(path)
            shutil.rmtree(folder, ignore_errors=True)  # a damaged checkpoint, or an earlier model
            part.rename(folder)
        finally:  # do not leave a partial folder on a full disk
            shutil.rmtree(part, ignore_errors=True)


def checksums(folder):
    """Return the lines of SHA256SUMS, as `sha256sum` prints them, for all other files in a folder."""
    lines = []
    for path in sorted({*folder.iterdir()} - {folder / "SHA256SUMS"}):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{digest}  {path.name}\n")
    return "".join(lines)


def is_intact(path):
    """Return whether the files of a checkpoint match its checksums; report it if not. Raise UserError if this user may
    not read them: they need not be damaged."""
    try:
        if (path / "SHA256SUMS").read_text() == checksums(path):
            return True
    except PermissionError as error:
        raise UserError(str(error)) from error
    except (OSError, ValueError):
        pass
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


def checkpoint_path(args, step):
    """Return the folder of the checkpoint of a step."""
    return Path(args.output_dir, f"checkpoints/step_{step:08}")


def list_checkpoints(args):
    """Return {step: folder} of a run, in order; without what somebody else has put beside them."""
    paths = sorted(Path(args.output_dir, "checkpoints").glob("step_" + 8 * "[0-9]"))
    return {int(path.name.removeprefix("step_")): path for path in paths if path.is_dir()}


def find_checkpoint(args, accelerator):
    """Return (folder, state) of the newest intact checkpoint, to resume from; (None, None) if there is none."""
    output = Path(args.output_dir)
    if (output / "args.yaml").exists() and not args.resume:
        raise UserError(f"--output_dir {output} contains a run: --resume it, or choose another folder")
    folders = list(reversed(list_checkpoints(args).values())) if args.resume else []
    intact = None
    error = None
    if accelerator.is_main_process:
        try:
            intact = next(filter(is_intact, folders), None)
        except UserError as caught:
            error = str(caught)
    stop_together(error)
    folders, intact = broadcast_object_list([(folders, intact)])[0]  # as the main process sees them
    if not intact and folders:
        raise AgreedError(f"{output}/checkpoints: no checkpoint is intact; remove the folder to start anew")
    return intact, json.loads((intact / "state.json").read_text()) if intact else None


def flags_of_run(flags):
    """Return {flag: value} without those of one launch, which a resume or a rerun must not inherit."""
    launch = ("resume", "accept_changes", "trust_remote_code")
    return {name: value for name, value in asdict(flags).items() if name not in launch}


def base_fingerprint(model, flags):
    """Return a hash of what a checkpoint takes from the base model: its configurations, tokenizer and code, with
    --lora_rank its weights as well. Of a Hub id it is the commit."""
    kinds = (".json", ".txt", ".model", ".py", ".jinja", *[".safetensors"] * bool(flags.lora_rank))
    base = Path(flags.model_name_or_path)
    if not base.is_dir():
        return getattr(model.config, "_commit_hash", None)
    files = sorted(str(path) for path in base.rglob("*") if path.suffix in kinds)
    return hashlib.sha256("".join(data_fingerprint([file]) for file in files).encode()).hexdigest()[:16]


def unchanging(flags, model, data):
    """Return {flag or source: value} of all that a resume must not change."""
    options = [option.name for option in fields(flags) if not option.metadata["may_change"]]
    values = {f"--{name}": getattr(flags, name) for name in options}
    values |= {name: shape for name, *shape in data.description}
    return values | {"files of --model_name_or_path": base_fingerprint(model, flags)}


def check_changes(saved, fixed, flags, accelerator):
    """Raise UserError if what is `fixed` has changed since the checkpoint; with --accept_changes, print it. What an
    older checkpoint lacks has not changed; a flag has if it is given now."""
    if not saved:
        return
    defaults = {f"--{name}": value for name, value in asdict(Args()).items()}
    before = fixed | defaults | saved["unchanging"]
    changed = [name for name, value in fixed.items() if before[name] != value]
    changes = [f"{name}: {before[name]} -> {fixed[name]}" for name in changed]
    if changes and not flags.accept_changes:
        raise UserError(f"--resume: {'; '.join(changes)}: restore it, --accept_changes, or start a new --output_dir")
    for change in changes:
        accelerator.print(f"changed after step {saved['progress']['step']:,}: {change}")
    paths = {entry if isinstance(entry, str) else entry["path"] for entry in flags.train_data}
    if not flags.eval_data and {"--train_data", "--eval_data", "--eval_rows", *paths} & {*changed}:
        accelerator.print("other rows may be held out now, also some that were trained on: --eval_data prevents it")


@dataclass
class Progress:
    """How far a run is: what the state.json of a checkpoint contains besides the flags and the sources."""

    step: int = 0  # optimizer steps done
    data_state: dict | None = None  # of row_batches, after the last step
    skipped: int = 0  # bad rows
    losses: list = field(default_factory=list)  # [source, loss] of batches since the last line of metrics.jsonl
    metrics: list = field(default_factory=list)  # the lines of metrics.jsonl
    scaler: dict | None = None  # state of the gradient scaler (fp16)
    micro_batch_tokens: int | None = None  # if measured on a GPU

    def advance(self, losses, skipped, batches):
        """Count an optimizer step."""
        self.step += 1
        self.losses += [[batch.source, loss] for batch, loss in zip(batches, losses)]
        self.skipped += skipped
        self.data_state = batches[-1].state

    def mean_losses(self, sources):
        """Return {"loss": mean since the last call}, and that of the batches of each of several sources."""
        groups = {"loss": [loss for _, loss in self.losses]}
        if len(sources) > 1:
            for number, loss in self.losses:
                groups.setdefault(f"loss_{sources[number].label}", []).append(loss)
        self.losses = []
        return {name: sum(losses) / len(losses) for name, losses in groups.items()}


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

    flags: Args
    accelerator: Accelerator
    fixed: dict  # what a resume must not change
    model: torch.nn.Module  # which is trained
    optimizers: list
    model_to_save: torch.nn.Module  # `model`, or under FSDP a copy of it, on the main process
    extra: dict

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
        folder = checkpoint_path(self.flags, progress.step)
        exists = broadcast_object_list([progress.step == 0 or is_intact(folder)])[0]
        if not exists:  # else a kill while it is replaced would lose it
            self.write(folder, progress)
        if self.accelerator.is_main_process:
            found = list_checkpoints(self.flags)
            intact = [step for step in found if step <= progress.step]  # a resume did not use later ones
            kept = [*intact[-self.flags.save_total_limit :], best_step]
            old = [path for step, path in found.items() if step not in kept]
            for path in (*old, *folder.parent.glob(".step_*.part")):
                try:
                    shutil.rmtree(path)
                except OSError as error:  # such as that of a file that a reader has open on a network disk
                    warn_once(f"{path}: not removed: {error}")
        self.accelerator.wait_for_everyone()

    def write(self, folder, progress):
        """Write a checkpoint: tensors, state as JSON, checksums."""
        files = self.gather_tensors()
        is_finite = all(weight.isfinite().all() for weight in files["model"].values())
        stop_together(None if is_finite else f"step {progress.step}: a weight is not finite: {LOWER_RATE}")
        if self.accelerator.is_main_process:
            progress.scaler = self.accelerator.scaler and self.accelerator.scaler.state_dict()
            state = {"progress": asdict(progress), "unchanging": self.fixed}
            with save_atomically(folder) as part:
                for name, tensors in files.items():
                    save_file(tensors, part / f"{name}.safetensors")
                (part / "state.json").write_text(json.dumps(state))
                (part / "SHA256SUMS").write_text(checksums(part))

    def load_weights_of(self, step):
        """Return the model with the weights of a step's checkpoint; raise UserError if that is not intact."""
        path = checkpoint_path(self.flags, step)
        if not is_intact(path):
            raise UserError(f"{path}: damaged; model/ is not written: remove that folder, and --resume takes another")
        self.model_to_save.load_state_dict(load_file(path / "model.safetensors"), strict=False)
        return self.model_to_save


# ---- a run


def check_surroundings():
    """Raise UserError for variables that an earlier launch has left, and if `datasets` has no folder to write to.
    Print what a launch on several processes waits for."""
    if (count := os.environ.get("WORLD_SIZE", "1")) != "1":
        if "MASTER_ADDR" not in os.environ:
            raise UserError("WORLD_SIZE is set, MASTER_ADDR is not: unset RANK and WORLD_SIZE, or start by a launcher")
        if os.environ.get("LOCAL_RANK", "0") == "0":
            address = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT')}"
            print(f"waiting for {count} processes at {address} (WORLD_SIZE, MASTER_ADDR)", file=sys.stderr)
    folder = os.path.expanduser(datasets.config.HF_DATASETS_CACHE)
    if folder.startswith("~"):
        raise UserError("there is no home folder: set HF_HOME to a folder that can be written to")
    with user_errors(f"the cache of datasets, {folder}: set HF_HOME or HF_DATASETS_CACHE to a folder to write to"):
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def start(args):
    """Return the Accelerator of the launch; raise UserError for launches that would train wrongly."""
    check_surroundings()
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
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise UserError("--dynamo_backend compiles nothing here: accelerate_configs/README.md#what-a-launch-asks-for")
    if unsupported or accelerator.mixed_precision == "fp8":
        launch = f"{kind.value}, precision {accelerator.mixed_precision}"
        raise UserError(f"unsupported launch ({launch}): accelerate_configs/README.md#what-a-launch-asks-for")
    if accelerator.mixed_precision == "bf16":
        torch.set_float32_matmul_precision("high")  # TF32 for the loss, which is not autocast
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans for each shape anew: 4 times as slow on an H200
    if args.full_determinism:
        transformers.enable_full_determinism(args.seed)
    transformers.utils.logging.disable_progress_bar()  # else one for each file loaded or saved
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else loading a local file contacts the Hub
    return accelerator


def announce(model, data, evaluators, progress, args, accelerator):
    """Print what is trained, on what, what is measured, and how far the run is."""
    if not accelerator.is_main_process:
        return
    parameters = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    print(f"{parameters:,} parameters")
    for source, weight in zip(data.sources, data.weights):
        columns = source.args.columns
        roles = ["query", "positive", *["negative"] * len(columns)]
        if source.args.label_column:
            roles = ["query", *["document"] * len(columns)]
        described = ", ".join(map(": ".join, zip(roles, columns)))
        rows = "a stream of rows" if args.streaming else f"{len(source):,} rows"
        mixed = "a batch" if args.mix_by == "row" else "all batches"
        share = f", {weight / sum(data.weights):.0%} of {mixed}" if len(data.sources) > 1 else ""
        print(f"{source.name}: {rows} ({described}){share}{differences(source.args, args)}")
    for source, rows in data.held_out:
        total = "" if args.streaming else f" of {len(rows) + len(source):,}"
        own = "" if source in data.sources else differences(source.args, args)
        print(f"held out: {len(rows):,}{total} rows of {source.name}{own}")
    for measure, (evaluator, _) in evaluators.items():
        if ranked := ranked_documents(evaluator):
            print(f"{measure}: {ranked[0]:,.0f} documents a query, in random order {ranked[1]:.3f}")
    if known := trained_queries(data):
        such = f"{len(known):,} held-out queries, such as {min(known)[:60]!r}, are also in rows that are trained on"
        print(f"{such}: hold out other rows, of all sources, by --eval_data")
    print(
        f"{args.output_dir}: step {progress.step:,} of {args.max_steps:,}, {args.gradient_accumulation_steps} x "
        f"{args.batch_size:,} rows on {accelerator.num_processes} x {accelerator.device}, in micro-batches of "
        f"{args.micro_batch_tokens:,} tokens"
    )


def differences(source_args, args):
    """Return the flags of a source, its columns apart, that are not those of the run, as a text."""
    flags = {name: getattr(source_args, name) for name in OWN_FLAGS if name != "columns"}
    differing = {name: value for name, value in flags.items() if value != getattr(args, name)}
    return f", {json.dumps(differing, ensure_ascii=False)}" if differing else ""


def ranked_documents(evaluator):
    """Return (documents that a query ranks, nDCG@10 of them in random order), means over the queries of an evaluator;
    None if it ranks nothing, or loads it later."""
    if hasattr(evaluator, "samples"):
        positives = [len(sample["positive"]) for sample in evaluator.samples]
        negatives = [len(sample["negative"]) for sample in evaluator.samples]
        documents = np.add(positives, negatives)
    elif hasattr(evaluator, "corpus"):
        positives = [len(evaluator.relevant_docs[query]) for query in evaluator.queries_ids]
        documents = np.full(len(positives), len(evaluator.corpus))
    else:
        return None
    gains = np.cumsum(1 / np.log2(np.arange(2, 12)))  # of the first 1 to 10 ranks, if all are relevant
    ideal = gains[np.minimum(positives, 10) - 1]
    expected = gains[np.minimum(documents, 10) - 1] * positives / documents
    return documents.mean(), (expected / ideal).mean()


# Of a user, of a scheduler or launcher, of a terminal that closes, of Slurm. Not all systems have them all.
STOPPING = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")]


def receive_signals():
    """Return a list to which STOPPING signals are added when they arrive, except ignored ones, as under nohup. Another
    Ctrl-C ends the run at once."""
    received = []

    def receive(number, _):
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in STOPPING:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, receive)
    return received


def until_signal(signals, evaluate, model, evaluators, accelerator):
    """Return the measures of evaluate(); {} if it was left at a forward pass after a signal, as a launcher kills 30
    seconds later."""
    sharded = accelerator.distributed_type == DistributedType.FSDP  # passes are collective, else each has its share

    def check(*_):
        received = torch.tensor([len(signals)], device=accelerator.device)
        if (accelerator.gather(received) if sharded else received).any():
            raise InterruptedError

    hook = model[0].register_forward_pre_hook(check)
    try:
        return evaluate(model, evaluators, accelerator)
    except Exception:  # of any process: sentence-transformers raises one on all
        if not any(gather_object([len(signals)])):
            raise
        return {}
    finally:
        hook.remove()


@contextmanager
def restored_signals():
    """Give a notebook, or another program that calls main(), its signal handlers back."""
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


main = restored_signals()(main)


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

    flags: Args
    accelerator: Accelerator
    metrics: list  # the lines of metrics.jsonl
    main_measures: list  # to print and plot

    def begin(self):
        """Open the trackers, and write args.yaml and the lines so far."""
        values = {name: str(value) for name, value in asdict(self.flags).items()}
        next_step = self.metrics[-1]["step"] + 1 if self.metrics else 0
        options = {"tensorboard": {"purge_step": next_step}}  # a resume logs later steps again
        with user_errors(f"--report_to {' '.join(self.flags.report_to)}"):
            self.accelerator.init_trackers("evenstep", values, options)
        output = Path(self.flags.output_dir)
        if self.accelerator.is_main_process:
            with user_errors(f"--output_dir {output}"):
                self.write_lines(is_new=False)
                (output / "args.yaml").write_text(yaml.safe_dump(flags_of_run(self.flags), sort_keys=False))

    def write(self, step, record):
        """Add the record of a step, unless it is empty, to its line of metrics.jsonl and to the trackers."""
        if not record:
            return
        is_new = not self.metrics or self.metrics[-1]["step"] != step
        if is_new:
            self.metrics.append({"step": step})
        self.metrics[-1] |= record
        self.accelerator.log(record, step=step)
        if self.accelerator.is_main_process:
            self.write_lines(is_new)
            measured = {name: round(record[name], 4) for name in self.main_measures if name in record}
            if measured:
                tqdm.write(f"step {step:,}: {measured}")

    def write_lines(self, is_new):
        """Append the last line to metrics.jsonl; write all if it is not new. No error ends the training."""
        path = Path(self.flags.output_dir, "metrics.jsonl")
        size = 0
        try:
            with open(path, "a" if is_new else "w") as file:
                size = file.tell()
                file.writelines(json.dumps(line) + "\n" for line in self.metrics[-1 if is_new else 0 :])
        except OSError as error:
            warn_once(f"--output_dir {self.flags.output_dir}: metrics.jsonl lacks lines: {error}")
            with suppress(OSError):  # without half a line
                os.truncate(path, size)

    def lacks_evaluation(self, step):
        """Return whether the evaluation of a step has not been made, or was not when its checkpoint was written."""
        measured = [line["step"] for line in self.metrics if line.keys() & {*self.main_measures}]
        return step not in measured

    def find_best(self):
        """Return (step whose checkpoint is there and evaluates highest by --metric_for_best_model, 0 if none; whether
        patience has ended). The evaluation before the first step does not count. The main process decides."""
        name = self.flags.metric_for_best_model
        if name is None or (self.main_measures and not self.metrics):  # the first evaluation was interrupted
            return 0, False
        if not self.metrics or name not in self.metrics[0]:
            choices = ", ".join([*self.metrics[0]][1:]) if self.metrics else "none, as there is nothing to evaluate on"
            raise UserError(f"--metric_for_best_model {name} is not measured by evaluations: choose one of {choices}")
        if math.isnan(self.metrics[0][name]):
            raise UserError(f"--metric_for_best_model {name} is not a number: all labels, or all scores, are equal")
        values = {record["step"]: record[name] for record in self.metrics[1:] if name in record}
        ranked = sorted(values, key=lambda step: -np.nan_to_num(values[step], nan=-math.inf))
        there = {self.metrics[-1]["step"], *list_checkpoints(self.flags)}  # the last one's follows
        best = next(filter(there.__contains__, ranked), 0)
        if ranked and best != ranked[0] and self.accelerator.is_main_process:
            gone = checkpoint_path(self.flags, ranked[0])
            warn_once(f"{gone}, the best by {name}, is gone: model/ will be of the best of the others")
        later = sum(step > best for step in values)
        return broadcast_object_list([(best, 0 < self.flags.early_stopping_patience <= later)])[0]


def write_model(model, log, step):
    """Write model/, with args.yaml and the card of sentence-transformers."""
    output = Path(log.flags.output_dir)
    with save_atomically(output / "model") as part:
        if log.flags.lora_rank:
            for transformer in transformers_of(model, "--lora_rank"):
                transformer.model = transformer.model.merge_and_unload()  # loads without peft
        model._model_card_text = None  # that of the model before training
        model.model_card_data.eval_results_dict.clear()  # of the last evaluation, which may not be that of `step`
        model.model_card_data.training_logs.clear()
        model.model_card_data.local_files_only = os.path.isdir(log.flags.model_name_or_path)  # else it asks the Hub
        with log.accelerator.autocast():  # the card embeds examples, which flash attention refuses in float32
            model.save_pretrained(str(part))
        shutil.copy(output / "args.yaml", part)
        with open(part / "README.md", "a") as card:
            card.write(f"\nTrained for {step:,} steps by `{Path(sys.argv[0]).name} args.yaml`.\n")
    print(f"the model of step {step:,} is in {output / 'model'}")


def plot_metrics(metrics, main_measures, path):
    """Plot loss, measures of evaluations, speed and memory over the steps."""
    names = ["loss", *main_measures, "tokens_per_second", "peak_memory_gb"]
    frame = pd.DataFrame(metrics).set_index("step").filter(names)
    frame = frame.interpolate("index", limit_area="inside")  # lines from one evaluation to the next
    figure = Figure(figsize=(4 * len(frame.columns), 3.6), layout="constrained")
    frame.plot(ax=figure.subplots(1, len(frame.columns)), subplots=True, grid=True)
    figure.savefig(path, dpi=110)


def print_outcome(metrics, skipped):
    """Print the number of bad rows, and which loss, of each source with --mix_by batch, has hardly fallen, as that of
    a model that has learned nothing."""
    names = {name for name in chain.from_iterable(metrics) if re.match("loss(_|$)", name)}
    for name in sorted(names - {"loss"} or names):
        losses = [line[name] for line in metrics if name in line]
        if len(losses) > 1 and losses[-1] > 0.99 * losses[0] > 0:
            print(f"{name} has hardly fallen, from {losses[0]:.4f} to {losses[-1]:.4f}: has the model learned?")
    if skipped:
        print(f"{skipped:,} bad rows skipped")


if __name__ == "__main__":
    sys.stdout = Console(sys.stdout)
    sys.stderr = Console(sys.stderr)
    status = 0
    try:
        main(parse_args(sys.argv[1:]))
    except SystemExit as error:  # of argparse, or of a run that was stopped
        status = error.code
    except (Exception, KeyboardInterrupt) as error:
        status = print_error(error)
    sys.stdout.flush()
    os._exit(status)  # pyarrow threads that still read ahead can hang or abort a normal exit (apache/arrow 45214)
