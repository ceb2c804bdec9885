"""Train a cross-encoder ((query, document) -> score) to rerank or to compare texts, on one process or many.

    python train_cross_encoder.py --batch_size 32 --learning_rate 5e-4 --max_steps 200       # the demo, on a CPU
    python train_cross_encoder.py --model_name_or_path BAAI/bge-small-en-v1.5 --train_data 'pairs/*.parquet' \
        --output_dir runs/reranker --batch_size 256 --grad_cache                             # one GPU
    torchrun --nproc_per_node 2 train_cross_encoder.py args.yaml --resume           # two processes, on GPUs or CPUs
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_cross_encoder.py args.yaml --resume

A row is a query and its documents, in one of these shapes; --label_column names the column of labels or scores:

    {"query": "read a gzip file", "code": "def read(path): ...", "label": 1}
    {"query": "read a gzip file", "code": "def read(path): ...", "wrong": "def write(path): ..."}
    {"query": "read a gzip file", "documents": ["def read(path): ...", "def write(path): ..."], "labels": [1, 0]}
    {"query": "read a gzip file", "pos": ["def read(file): ..."], "neg": ["def write(path): ...", "def cut(x): ..."]}

Without labels the first document is the positive and the others are negatives; if there are no others,
--num_negatives negatives are drawn from the other rows of the batch. From lists of positives and negatives each epoch
draws one positive and --num_negatives negatives. The function read_row says what a row means: edit it, and with it
draw_negatives, for data of another form.

Above the line "machinery" is what an experiment changes: options, the run, the step, losses, rows, optimizer and
model, evaluation. What is below that line is the same in train_bi_encoder.py.

The gradient depends on the batch alone (--batch_size rows over all processes). Each process scores the pairs of its
rows, longest first, in micro-batches of at most --micro_batch_tokens; the losses of all rows are divided by the number
of terms over all processes. So the number of processes, --micro_batch_tokens and --grad_cache change time and memory,
but not the gradient (except with dropout, whose random masks depend on how pairs are grouped).

Output: model/ (loads in sentence-transformers), checkpoints/, metrics.jsonl, args.yaml and training.png.
Left out on purpose: uploads to the Hub, several labels per pair, rerankers of lists, DeepSpeed.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate>=1.15,<2", "datasets>=5.2,<6", "evaluate>=0.4.6,<0.5", "filelock>=4.2,<5",
#   "fsspec[http]>=2026.9", "matplotlib>=3.11,<4", "numpy>=2.4,<3", "pandas>=2.2,<4", "pyarrow>=26,<27",
#   "pyyaml>=6.0,<7", "safetensors>=0.8,<1", "scikit-learn>=1.9.1,<2", "sentence-transformers>=6.2,<7",
#   "tokenizers>=0.23,<1", "torch==2.13.0", "tqdm>=4.70,<5", "transformers>=5.23,<6", "zstandard>=0.25,<1"]
# ///

import copy
import hashlib
import inspect
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import time
import traceback
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Literal

import transformers

# Shapes: B rows (a query and its documents) of a batch on P processes, n = ceil(B / P) slots for rows on each; L
# documents of a row at most.

# ---- options

DEMO = "data/python_code"  # where prepare_corpus.py writes the demo corpus and its untrained models
TEACHER_LOSSES = ("margin_mse", "kl")
Loss = Literal["bce", "mse", "listwise_ce", "ranknet", "lambdaloss", "margin_mse", "kl"]


def flag(default, help, alone=None):
    """Return the dataclass field of a command-line option. `alone`: its value if it is given without one."""
    kind = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    metadata = {"help": help}
    if alone:
        metadata |= {"nargs": "?", "const": alone}
    return field(**kind, metadata=metadata)


@dataclass
class Args:
    # data
    train_data: list[str] = flag([], "paths, globs, folders, URLs, Hub ids, ID:config:split; none: the demo corpus")
    eval_data: list[str] = flag([], "sources of held-out rows; none: the first rows of --train_data")
    eval_rows: int | None = flag(None, "rows held out to evaluate on; None: 200, but at most a tenth of the rows")
    eval_beir: list[str] = flag([], "small collections to rerank as well: BEIR folders, or Hub ids (NanoBEIR)")
    eval_split: str = flag("test", "split of the judgments of --eval_beir")
    eval_run: list[str] = flag([], "the TREC run file to rerank for each --eval_beir; none: BM25")
    eval_rerank_k: int = flag(50, "documents to rerank for each query")
    streaming: bool = flag(False, "read the sources front to back instead of at random from a memory-mapped table")
    columns: list[str] = flag([], "query, then documents or lists of documents; none: all but the label")
    num_negatives: int | None = flag(
        None, "negatives of a row, drawn in each epoch from lists; None: all, or 4 of other rows if it has none"
    )
    corpus: list[str] = flag([], "sources of the documents by id; --columns then contain ids, not texts")
    queries: list[str] = flag([], "sources of the queries by id, for the first column")
    corpus_columns: list[str] = flag(["_id", "title", "text"], "id column of --corpus, then text columns, joined")
    query_columns: list[str] = flag(["_id", "text"], "id column of --queries, then text columns, joined")
    label_column: list[str] = flag([], "columns with a label, or a list of a label per document; several are joined")
    mixing_weights: list[float] = flag([], "weight of each source; none: its number of rows (streams: equal weights)")
    mix_by: Literal["row", "batch"] = flag("row", "mix sources within a batch, or take each batch from one source")
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = flag(
        "all_exhausted", "end a mixed epoch with its first or its last source"
    )
    shuffle_buffer: int = flag(10_000, "rows that are shuffled together; 0: keep the order of the files")
    length_window: int = flag(1, "batches that are drawn together, sorted by length and then cut; 1: not sorted")
    on_bad_row: Literal["error", "skip"] = flag("error", "stop at an empty text or a bad label, or skip and count it")
    # model
    model_name_or_path: str = flag(f"{DEMO}/cross_encoder", "Hub id or folder")
    max_length: int | None = flag(None, "tokens a pair is truncated to; None: the model's own")
    query_max_length: int | None = flag(
        None, "tokens of the query and a prompt before it, without special ones; None: all that fit"
    )
    template: str | None = flag(None, "text around {query} and {document}, special tokens included; None: the model's")
    dropout: float | None = flag(None, "dropout probability of the transformer; None: the model's own")
    lora_rank: int = flag(0, "train LoRA adapters of this rank instead of all weights; 0: train all weights")
    lora_alpha: int | None = flag(None, "adapters are scaled by this over the rank; None: twice the rank")
    lora_dropout: float = flag(0.0, "dropout probability of the adapters' inputs")
    lora_target_modules: list[str] = flag([], "layers that get adapters, such as q_proj; none: all linear ones")
    lora_adapter: str | None = flag(None, "folder of adapters to train on, such as model/adapter of an earlier run")
    attn_implementation: str | None = flag(None, "attention kernels: sdpa, flash_attention_2, ...; None: the default")
    prompts: list[str] = flag(
        [], "prefix of queries, or one per source; of a model with a chat template, its instruction; none: its own"
    )
    # step
    batch_size: int = flag(64, "rows of a batch, over all processes")
    micro_batch_tokens: int | None = flag(None, "tokens of a forward pass; None: 2,048 on a CPU, else 16,384")
    gradient_accumulation_steps: int = flag(1, "batches per optimizer step, each with its own drawn negatives")
    grad_cache: Literal["auto", "true", "false"] = flag(
        "auto",
        "hold the graph of one micro-batch at a time; auto: if a process has more tokens than 4 full ones (CPU: 16)",
        alone="true",
    )
    gradient_checkpointing: bool = flag(False, "recompute each layer's activations in backward; for long texts")
    loss: Loss | None = flag(None, "None: bce if a row has one label, else listwise_ce over the documents of a query")
    loss_kwargs: str = flag(
        "{}",
        "JSON; bce: pos_weight; ranknet: sigma; lambdaloss: sigma, k, mu; margin_mse, kl: temperature, "
        "teacher_temperature",
    )
    # schedule
    learning_rate: float = flag(2e-5, "peak learning rate")
    weight_decay: float = flag(0.01, "weight decay of matrices; biases and norms have none")
    warmup_ratio: float = flag(0.1, "fraction of the steps over which the learning rate rises from 0")
    lr_scheduler_type: str = flag("linear", "schedule of transformers.get_scheduler: linear, cosine, constant, ...")
    max_grad_norm: float = flag(1.0, "clip the gradient to this norm; 0: do not")
    num_train_epochs: float = flag(1.0, "passes over the rows")
    rows_per_epoch: int = flag(0, "rows of an epoch, a fresh sample each; 0: all")
    max_steps: int = flag(0, "stop after this many optimizer steps; 0: after --num_train_epochs")
    seed: int = flag(0, "seed of the row order, new weights and dropout")
    full_determinism: bool = flag(False, "use deterministic kernels, so that a resumed run on a GPU is bit-identical")
    # run
    output_dir: str = flag("runs/cross_encoder", "folder for everything the run writes")
    resume: bool = flag(False, "resume from the newest intact checkpoint in --output_dir, or start if there is none")
    accept_changed_data: bool = flag(False, "resume although sources have changed: rows may be repeated or missed")
    accept_changed_schedule: bool = flag(False, "resume although flags of the schedule have changed; the card says so")
    eval_steps: int = flag(0, "steps between evaluations; 0: a tenth of the run")
    metric_for_best_model: str | None = flag(None, "save the model that evaluates best by this measure; None: last")
    metrics: list[str] = flag([], "your own metrics, scripts of the library evaluate; their measures are reported too")
    early_stopping_patience: int = flag(0, "stop after this many evaluations without a new best; 0: never")
    save_steps: int = flag(500, "steps between checkpoints; 0: only at the end")
    save_total_limit: int = flag(2, "checkpoints kept")
    logging_steps: int = flag(10, "steps between lines of metrics.jsonl")
    report_to: list[str] = flag([], "trackers of Accelerate: tensorboard, wandb, ...")


# Flags that a resume may change: they change neither the data nor, but for rounding, what a step computes from it.
# A resume refuses a change of any other flag.
MAY_CHANGE = """output_dir on_bad_row attn_implementation micro_batch_tokens grad_cache gradient_checkpointing
full_determinism eval_steps metrics early_stopping_patience save_steps save_total_limit logging_steps report_to"""
# Flags that it may change by --accept_changed_schedule: no single command then gives the same model, and the model's
# card says so.
SCHEDULE = """learning_rate weight_decay warmup_ratio lr_scheduler_type max_grad_norm num_train_epochs rows_per_epoch
max_steps stopping_strategy"""
# Flags that must be above 0; numbers of all others may be 0.
ABOVE_ZERO = """batch_size micro_batch_tokens gradient_accumulation_steps length_window max_length save_total_limit
query_max_length logging_steps num_train_epochs learning_rate mixing_weights matryoshka_dims"""


def check_flags(args):
    """Fill in the demo corpus if no data is given; raise UserError for flags that exclude or require each other."""
    if not args.train_data:
        args.train_data = [f"{DEMO}/train/stdlib-*.parquet", f"{DEMO}/train/packages-*.parquet"]
        args.eval_data = args.eval_data or [f"{DEMO}/heldout/*.parquet"]
        if not Path(DEMO).is_dir():
            raise UserError(f"--train_data: not given, and no demo corpus in {DEMO}: run python prepare_corpus.py")
    if len(args.mixing_weights) not in (0, len(args.train_data)):
        raise UserError(f"--mixing_weights: give {len(args.train_data)} numbers, one for each source")
    if args.streaming and not (args.max_steps or args.rows_per_epoch):
        raise UserError("--streaming requires --max_steps or --rows_per_epoch: the length of a stream is unknown")
    if args.loss in TEACHER_LOSSES and not args.label_column:
        raise UserError(f"--loss {args.loss} requires teacher scores: set --label_column")
    if args.early_stopping_patience and not args.metric_for_best_model:
        raise UserError("--early_stopping_patience requires --metric_for_best_model, such as nDCG@10")
    if args.length_window > 1 and (args.queries or args.corpus):
        raise UserError("--length_window requires rows that contain texts, not ids")
    if args.eval_run and len(args.eval_run) != len(args.eval_beir):
        raise UserError("--eval_run requires one run file for each of --eval_beir")
    if args.template and not (args.template.count("{query}") == args.template.count("{document}") == 1):
        raise UserError("--template must contain {query} and {document} once each")
    if len(args.prompts) not in (0, 1, len(args.train_data)):
        raise UserError("--prompts takes one, or one for each source")
    set_lora_rank(args)
    for name, value in args.loss_kwargs.items():
        if not (isinstance(value, int | float) and 0 < value < math.inf):
            raise UserError(f"--loss_kwargs {name} {value}: must be a number above 0")


def make_parser():
    """Return the parser of the flags of Args."""
    usage = "%(prog)s [FILE.yaml] [FLAGS]"
    parser = transformers.HfArgumentParser(Args, description=__doc__.splitlines()[0], usage=usage, allow_abbrev=False)
    for action in parser._actions:  # --help prints each flag once, without its alias with dashes
        action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
    return parser


def check_flag_names(parser, argv):
    """Exit if a flag of the command line is unknown, and name the nearest one, or if it is given twice."""
    known, seen = parser._option_string_actions, set()
    for name in (word.partition("=")[0] for word in argv if word.startswith("--")):
        if name not in known:
            nearest = get_close_matches(name, known, 1) or ["--help"]
            parser.error(f"{name}: no such flag; did you mean {nearest[0]}?")
        if known[name] in seen:
            advice = "; list all values after one flag" * (known[name].nargs == "+")
            parser.error(f"{known[name].option_strings[0]}: given twice{advice}")
        seen.add(known[name])


# ---- libraries

if __name__ == "__main__":  # --help and mistyped flags are answered now: what follows takes ten seconds to load
    parser = make_parser()
    check_flag_names(parser, sys.argv[1:])
    parser.parse_known_args()
    if os.environ.get("RANK", "0") == "0":
        print("loading libraries", file=sys.stderr)

import datasets
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from evaluate import CombinedEvaluations, Metric, MetricInfo, combine
from evaluate import load as load_metric
from filelock import FileLock
from matplotlib.figure import Figure
from pyarrow.dataset import ParquetFragmentScanOptions
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.evaluation import BinaryClassificationEvaluator
from sklearn.metrics import average_precision_score
from tokenizers.processors import TemplateProcessing
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributions import Categorical
from tqdm.auto import tqdm

# ---- main


def main(args):
    # ---- set up
    accelerator = start(args)
    run = Run(args, accelerator)  # finds the checkpoint to resume from
    device = accelerator.device
    is_main = accelerator.is_main_process
    sharded = accelerator.distributed_type == DistributedType.FSDP
    accumulation = args.gradient_accumulation_steps

    # ---- data
    args.loss = args.loss or choose_loss(args)
    data = open_data(args)
    if args.loss in TEACHER_LOSSES:
        set_teacher_temperature(read_first_rows(data, args), args)
    run.check_changes(data)
    steps = args.max_steps or math.ceil(args.num_train_epochs * data.epoch_rows / (args.batch_size * accumulation))
    eval_steps = args.eval_steps or max(1, steps // 10)

    # ---- model, held-out rows, loss, optimizer and schedule
    loss_fn = make_loss(args)
    model = load_model(args, run.checkpoint)
    check_attention(model, accelerator)
    args.prompts = args.prompts or own_prompts(model)
    draw_candidates = partial(draw_negatives, replace(args, num_negatives=CANDIDATES - 1))
    held_out = read_held_out(data, args, accelerator, draw_candidates)
    eval_sets = open_eval_sets(held_out, model, args)
    run.collections = list(eval_sets)
    model_to_save = copy.deepcopy(model) if sharded and is_main else model  # FSDP will shard `model`
    model = model.to(device).train()
    args.micro_batch_tokens = args.micro_batch_tokens or (2048 if device.type == "cpu" else 16_384)
    check_predict(model, args, accelerator)
    features, _ = make_micro_batches([], model, args, device).parts[0]
    freeze_unused(model, score(model, features, accelerator))
    optimizer = make_optimizer(model, args)
    peak_rates = [group["lr"] for group in optimizer.param_groups]  # before get_scheduler changes them
    schedule = make_schedule(optimizer, steps, args)
    model, optimizer = accelerator.prepare(model, optimizer)

    # ---- resume, and evaluate before the first step
    run.begin(data, model, [optimizer], model_to_save, steps)  # a list: checkpoints hold the state of each
    to_batch = partial(make_batch, model=run.model, args=args, accelerator=accelerator)
    if run.step == 0 and args.loss in TEACHER_LOSSES:
        tables = row_batches(data.sources, data.weights, args)
        first = next(read_batches(tables, to_batch, data, args, accelerator))
        report_entropies(run.model, first, args, accelerator)
    if run.step == 0 and eval_sets:
        run.log(evaluate(model, eval_sets, args, accelerator))
    run.check_metric()

    # ---- train
    tables = row_batches(data.sources, data.weights, args, run.data_state)
    batches = prefetch(read_batches(tables, to_batch, data, args, accelerator, partial(draw_negatives, args)))
    bar = tqdm(total=steps, initial=run.step, disable=not is_main, unit="step", mininterval=1)
    while not run.finished:
        # one optimizer step
        started = time.perf_counter()
        for group, rate in zip(optimizer.param_groups, peak_rates):
            group["lr"] = rate * schedule(run.step)
        loss = 0.0
        step_batches = []
        for number in range(accumulation):
            batch = next(batches)
            step_batches.append(batch)
            sync = number == accumulation - 1
            seed = [args.seed, run.step, number]
            loss += forward_backward(model, batch, loss_fn, seed, sync, args, accelerator)
        loss /= accumulation  # as accelerator.backward does with the gradient
        norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        norm = norm.full_tensor() if sharded else norm
        run.check_step(loss, norm, step_batches)  # one collective; raises what any process has found wrong
        if run.stopping:  # not after the step: an evaluation may follow, and a cluster kills soon after SIGTERM
            break
        optimizer.step()
        optimizer.zero_grad()
        run.count_step(step_batches, time.perf_counter() - started)
        run.finished = run.step == steps
        bar.update()

        # metrics, evaluation, checkpoint
        record = {}
        evaluated = run.step % eval_steps == 0 or run.finished
        if evaluated:
            with run.clock("evaluation"):
                record = evaluate(model, eval_sets, args, accelerator)
        if run.step % args.logging_steps == 0 or run.finished:
            record |= run.training_record()
            bar.set_postfix_str("loss {loss:.4f}, {rows_per_second:,.0f} rows/s".format(**record), refresh=False)
        if record:
            run.log(record)
        if evaluated:
            run.find_best()  # sets run.best_step, and run.finished if patience has ended
        due = args.save_steps and run.step % args.save_steps == 0
        if run.finished or due or run.step == run.best_step:
            with run.clock("checkpoint"):
                run.save()

    # ---- save
    bar.close()
    batches.close()
    if not run.finished:
        run.save()
        accelerator.print(f"stopped after step {run.step:,} of {steps:,}: rerun with --resume to continue")
    elif is_main:
        if run.best_step:
            model_to_save = load_model(args, run.best_checkpoint())
        run.write_model(model_to_save, model_card(args, run, len(held_out)))
        plot_metrics(run.metrics, run.measures(), run.output / "training.png")
        if run.skipped + data.skipped:
            print(f"{run.skipped + data.skipped:,} bad rows skipped")
    interrupted = signal.SIGINT in run.signals and not run.finished
    del eval_sets  # and their temporary files
    del model, run  # delete DDP before its process group: else one exit in fifty deadlocks (torch 2.13)
    accelerator.free_memory()
    accelerator.end_training()
    if interrupted:
        raise KeyboardInterrupt


# ---- step


def score(model, features, accelerator):
    """Return (pairs,) float logits of one micro-batch."""
    features = transformers.BatchEncoding(features).to(accelerator.device, non_blocking=True).data
    with accelerator.autocast():  # gives flash attention its dtype; prepare() does not wrap FSDP2's forward
        return model(features)["scores"].float().squeeze(1)


def forward_backward(model, batch, loss_fn, seed, sync, args, accelerator):
    """Add the gradient of the batch's loss to the model's; return the part of the loss that is due to this process'
    rows. `seed`: integers that identify this batch. `sync`: reduce gradients over processes in the last backward
    pass."""
    parts, tokens = equalize_micro_batches(batch.micro_batches, accelerator)
    last = len(parts) - 1
    keep_graphs = keeps_graphs(tokens, args, accelerator.device)  # alike everywhere: DDP's first forward is collective
    batch.passes += args.gradient_checkpointing + (not keep_graphs and args.loss not in POINTWISE)

    def forward(number):  # (pairs,)
        seed_dropout(*seed, accelerator.process_index, number)  # the same in a second forward pass
        features, indices = parts[number]
        with accelerator.no_sync(model):
            return score(model, features, accelerator)[: len(indices)]

    def backward(number, value):
        # DDP reduces gradients over processes once, with those of the last micro-batch; FSDP2 in each backward pass.
        with accelerator.trigger_sync_in_backward(model) if sync and number == last else nullcontext():
            accelerator.backward(value)

    labels = batch.labels.to(accelerator.device, non_blocking=True)  # (n, L)
    slots = batch.micro_batches.slots(accelerator)
    sizes = [len(indices) for _, indices in parts]
    if args.loss in POINTWISE:
        return pointwise_backward(forward, backward, loss_fn, labels[slots].split(sizes), accelerator)

    # One autocast around all micro-batches: they share its half-precision copies of the weights, which graphs keep.
    with accelerator.autocast(), torch.set_grad_enabled(keep_graphs):
        outputs = [forward(number) for number in range(last + 1)]
    # The documents of a row lie in several micro-batches: first the gradient of all scores, a leaf, then one
    # micro-batch at a time.
    scores = torch.zeros_like(labels)  # (n, L)
    scores[slots] = torch.cat(outputs).detach()
    scores.requires_grad_()
    total, count = loss_fn(scores, labels)
    loss = total / accelerator.reduce(count).clamp(min=1)
    loss.backward()

    # Multiply by the number of processes: DDP averages over them, but each has the gradient of its own pairs only.
    gradients = (scores.grad[slots] * accelerator.num_processes).split(sizes)
    for number, gradient in enumerate(gradients):  # a micro-batch at a time, so that gradients add up in float32
        # If graphs are not kept, there is one at a time (Gao et al. 2021, section 3.2).
        output = outputs[number] if keep_graphs else forward(number)
        backward(number, (output * gradient).sum())
    return loss.detach()


def pointwise_backward(forward, backward, loss_fn, labels, accelerator):
    """Do as forward_backward does, for a loss in POINTWISE: backward after each micro-batch, so that there is
    one graph at a time and one forward pass; labels: (pairs,) of each micro-batch."""
    loss = torch.zeros((), device=accelerator.device)
    count = accelerator.reduce(sum(part.isfinite().sum() for part in labels)).clamp(min=1)
    for number, part in enumerate(labels):
        scores = forward(number)
        total, _ = loss_fn(scores[:, None], part[:, None])
        backward(number, total / count * accelerator.num_processes)
        loss += total.detach() / count
    return loss


@torch.no_grad()
def score_slots(model, micro_batches, shape, accelerator):
    """Return the (P n, L) logits of all processes, without gradients; shape: (n, L), the slots of each process."""
    parts, _ = equalize_micro_batches(micro_batches, accelerator)
    bar = tqdm(parts, "scoring", delay=2, leave=False, disable=not accelerator.is_main_process)
    with accelerator.autocast():
        outputs = [score(model, features, accelerator)[: len(indices)] for features, indices in bar]
    return gather_slots(outputs, micro_batches, shape, accelerator)


def report_entropies(model, batch, args, accelerator):
    """Print the mean entropies of model and teacher over the documents of a batch's rows."""
    labels = pad_columns(batch.labels, math.nan, accelerator)
    scores = score_slots(model, batch.micro_batches, labels.shape, accelerator)
    labels = accelerator.gather(labels)
    present = labels.isfinite().any(1)
    scores = scores[present] / args.loss_kwargs.get("temperature", 1.0)
    print_entropies(scores, labels[present] / args.loss_kwargs["teacher_temperature"], args, accelerator)


# ---- losses
#
# A loss takes the (n, L) scores and labels of this process' rows, a row a query and its documents; where there is no
# document, the score is 0 and the label NaN. It returns the sum of its terms and their number, tensors: the loss of
# the batch is the sum over all processes, divided by the number over all processes. Options are --loss_kwargs. A new
# loss is a function, and its name in Loss, LOSSES and REQUIRED (of a teacher's scores, in TEACHER_LOSSES). Those in
# POINTWISE get (pairs, 1) at a time. An option that depends on the step is a partial of loss_fn in main.


def bce(scores, labels, pos_weight=1.0):
    """Return the binary cross-entropy of each pair; `pos_weight`: weight of positives."""
    given = labels.isfinite()
    weight = torch.tensor(float(pos_weight)).to(scores.device, non_blocking=True)
    losses = F.binary_cross_entropy_with_logits(scores, labels.nan_to_num(), pos_weight=weight, reduction="none")
    return (losses * given).sum(), given.sum()


def mse(scores, labels):
    """Return the squared error of each pair."""
    given = labels.isfinite()
    return ((scores - labels.nan_to_num()).square() * given).sum(), given.sum()


def listwise_ce(scores, labels):
    """Return the cross-entropy of positives (labels above 0) against their row, mean over a row's positives: LCE (Gao
    et al. 2021, equation 2); with several, ListNet (Cao et al. 2007) with equal targets."""
    positive = labels > 0
    log_probabilities = scores.masked_fill(labels.isnan(), -1e9).log_softmax(1)
    losses = -log_probabilities.where(positive, 0.0)
    means = losses.sum(1) / positive.sum(1).clamp(min=1)  # 0 for an empty slot
    return means.sum(), positive.any(1).sum()


def ranknet(scores, labels, weights=1.0, kept=True, /, sigma=1.0):  # weights, kept: not of --loss_kwargs
    """Return the cross-entropy in bits of ordering two documents of a row with different labels (Burges et al. 2005,
    equation 3). weights (n, L, L): factor of each two documents; kept: which of them to include."""
    ordered = (labels[:, :, None] > labels[:, None, :]) & kept
    differences = scores[:, :, None] - scores[:, None, :]
    bits = -F.logsigmoid(sigma * differences) / math.log(2)
    return (bits * weights).where(ordered, 0.0).sum(), ordered.sum()


def lambdaloss(scores, labels, k=None, sigma=1.0, mu=10.0):
    """Return LambdaLoss with weights NDCG-Loss2++ (Wang et al. 2018, equations 13 to 17), truncated at k (18)."""
    given_scores = scores.detach().masked_fill(labels.isnan(), -torch.inf)
    order = given_scores.argsort(dim=1, descending=True, stable=True)
    scores = scores.gather(1, order)
    labels = labels.gather(1, order)
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
    return ranknet(scores, labels, weights, top[:, None] | top, sigma=sigma)


def margin_mse(scores, labels, temperature=1.0, teacher_temperature=1.0):
    """Return the squared error of margins to a row's first document (Hofstätter et al. 2020, Margin-MSE)."""
    errors = scores / temperature - labels.nan_to_num() / teacher_temperature
    given = labels[:, 1:].isfinite()
    errors = errors[:, :1] - errors[:, 1:]  # of the margins
    return (errors.square() * given).sum(), given.sum()


def kl(scores, labels, temperature=1.0, teacher_temperature=1.0):
    """Return KL(teacher || model) of the softmax over a row's documents (Hinton et al. 2015, section 2; the factor
    T**2 keeps the size of the gradient)."""
    missing = labels.isnan()
    student = (scores / temperature).masked_fill(missing, -1e9).log_softmax(1)
    teacher = (labels / teacher_temperature).masked_fill(missing, -1e9).log_softmax(1)
    divergence = F.kl_div(student, teacher, reduction="none", log_target=True) * temperature**2
    return divergence.where(~missing, 0.0).sum(), (~missing).any(1).sum()


POINTWISE = {"bce": bce, "mse": mse}  # each term depends on one document: none that compares documents
LOSSES = POINTWISE | {
    "listwise_ce": listwise_ce,
    "ranknet": ranknet,
    "lambdaloss": lambdaloss,
    "margin_mse": margin_mse,
    "kl": kl,
}


def set_teacher_temperature(rows, args):
    """Set teacher_temperature in args.loss_kwargs, if it is not given, by the range of the teacher's scores of `rows`:
    0.05 for probabilities and cosines (from -1 to 1), else the model's."""
    default = 0.05 if are_similarities(rows) else args.loss_kwargs.get("temperature", 1.0)
    args.loss_kwargs = {"teacher_temperature": default} | args.loss_kwargs


def choose_loss(args):
    """Return "bce" if the first row has one label, else "listwise_ce"."""
    if len(args.label_column) == 1:
        with user_errors(f"{args.train_data[0]}: --label_column {args.label_column[0]}"):
            files = list_files(args.train_data[0])
            rows = open_files(files[:1]).select_columns(args.label_column)
            label = next(rows.iter(1))[0][0]
        if not str(label).startswith("["):
            return "bce"
    return "listwise_ce"


def make_loss(args):
    """Return the loss function, with --loss_kwargs."""
    loss = partial(LOSSES[args.loss], **args.loss_kwargs)
    with user_errors(f"--loss_kwargs of {args.loss}"):
        inspect.signature(loss).bind("scores", "labels")
    return loss


# ---- rows
#
# For each batch read_batches takes this process' rows, calls read_row and draw_negatives, replaces ids by texts, and
# calls make_batch.

NUM_NEGATIVES = 4  # drawn for a row that has none, unless --num_negatives is given
REQUIRED = {  # {loss: (what the labels of a row must be, check)}; others would give a wrong or NaN loss
    "bce": ("from 0 to 1 (or use mse)", lambda labels: min(labels) >= 0 and max(labels) <= 1),
    "mse": ("at least one", bool),
    "listwise_ce": ("at least one above 0 and one not above 0", lambda labels: min(labels) <= 0 < max(labels)),
    "ranknet": ("not all equal", lambda labels: min(labels) < max(labels)),
    "lambdaloss": ("from 0 to 100, not all equal", lambda labels: 0 <= min(labels) < max(labels) <= 100),
} | dict.fromkeys(TEACHER_LOSSES, ("two or more", lambda labels: len(labels) > 1))


@dataclass
class Row:
    """What a row of data means."""

    query: str
    documents: list  # of str, the positive first; if they have labels, a cross-encoder's may be in any order
    labels: list  # of float
    cells: dict = field(default_factory=dict)  # the row as read


def read_row(cells, random, args):
    """Return the Row that {column: value} means. Edit this function if your rows have another form.

    cells: those of --columns and --label_column, as Python objects; a list that is null is empty. Raise ValueError for
    a bad row: " in the row {...}" will follow its text. `random` is None unless a column holds lists; its draws are
    the same for a row on any number of processes, and others in each epoch."""
    query_column, *document_columns = args.columns
    query = read_text(cells[query_column], query_column, args, is_id=args.queries)
    groups = read_documents(cells, document_columns, args)
    labels = read_labels(cells, args)
    if args.loss == "margin_mse" and len(labels) == sum(map(len, groups)) - 1:  # margins of the first over the others
        labels = [0.0, *(-margin for margin in labels)]
    one_list = len(groups) == 1 and len(labels) == len(groups[0])
    if one_list and args.num_negatives is not None and args.loss not in TEACHER_LOSSES:
        best = labels.index(max(labels))  # choose_documents keeps the first, and draws from the others
        groups[0].insert(0, groups[0].pop(best))
        labels.insert(0, labels.pop(best))
    documents, labels = choose_documents(groups, labels, random, args)
    if not args.label_column:
        return Row(query, documents, [1.0] + [0.0] * (len(documents) - 1))
    required, is_valid = REQUIRED[args.loss]
    if len(labels) != len(documents) or not is_valid(labels):
        raise ValueError(f"--loss {args.loss} requires a label for each document, {required}: not the case")
    return Row(query, documents, labels)


def draw_negatives(args, table, rows):
    """Add up to --num_negatives documents of other rows, as negatives, to each of `rows` that has only one document;
    never one that another row has for the same query. table: all rows of the batch; rows: those of this process. Rows
    with labels stay as they are."""
    if args.label_column or all(len(row.documents) > 1 for row in rows):
        return
    count = NUM_NEGATIVES if args.num_negatives is None else args.num_negatives
    query_column, document_column = args.columns[:2]
    texts = {}
    listed = defaultdict(set)  # {query: its documents}
    for query, documents in zip(to_python(table[query_column]), to_python(table[document_column])):
        documents = documents if isinstance(documents, list) else [documents]
        try:
            query = read_text(query, query_column, args, is_id=args.queries)
            documents = [read_text(document, document_column, args, is_id=args.corpus) for document in documents]
        except ValueError:  # a bad row
            continue
        listed[query].update(documents)
        texts.update(dict.fromkeys(documents))
    pool = list(texts)
    for row in rows:
        if len(row.documents) == 1:  # draw more than needed, as listed ones are dropped
            random = Random(f"{args.seed} {row.cells[SOURCE]} {row.cells[NUMBER]} negatives")
            own = listed[row.query]
            drawn = random.sample(pool, min(len(pool), count + len(own)))
            drawn = [document for document in drawn if document not in own][:count]
            row.documents += drawn
            row.labels += [0.0] * len(drawn)
    if max(len(row.documents) for row in rows) == 1:
        raise UserError("no other row has a negative to draw: raise --num_negatives, --batch_size or --eval_rows")


def add_prompts(rows, model, args):
    """Prepend --prompts to queries: that of the row's source (the n-th of --eval_data has that of the n-th source), or
    the only one; not if a chat template has it."""
    if not args.prompts or has_chat_template(model):
        return
    for row in rows:
        row.query = args.prompts[min(row.cells[SOURCE], len(args.prompts) - 1)] + row.query


@dataclass
class Batch:
    """This process' part of a batch: n slots for rows. Absent and bad rows leave slots empty."""

    rows: list  # of Row, at most n
    labels: torch.Tensor  # (n, L) float; NaN if missing
    micro_batches: "MicroBatches"  # of the pairs
    state: dict | None = None  # of row_batches, after this batch
    skipped: int = 0  # bad rows
    waited: float = 0.0  # seconds that training has waited for the batch
    passes: int = 3  # of the model, for its FLOPs: a backward pass counts twice
    error: "UserError | None" = None  # what ends the run; there are no rows then


def make_batch(rows, model, args, accelerator):
    """Return the Batch of this process' rows."""
    add_prompts(rows, model, args)
    slots = math.ceil(args.batch_size / accelerator.num_processes)
    labels = pad_lists([row.labels for row in rows], slots, np.nan, np.float32)
    micro_batches = make_micro_batches(rows, model, args, accelerator.device)
    return Batch(rows, pinned(labels, accelerator.device), micro_batches)


def make_micro_batches(rows, model, args, device):
    """Return the MicroBatches of the pairs of rows."""
    pairs = []
    places = []
    for number, row in enumerate(rows):
        query = truncate_query(row.query, model, args)
        pairs += [(query, document) for document in row.documents]
        places += [(number, column) for column in range(len(row.documents))]
    if not pairs:  # a stand-in, in an empty slot: forward passes and collectives must match those of other processes
        pairs = [("a query", "a document")]
        places = [(0, 0)]
    encodings = tokenize_pairs(pairs, model)
    micro_batches = pad_micro_batches(encodings, places, model, args.micro_batch_tokens, device)
    if is_causal(model):
        for features, _ in micro_batches.parts:
            features["logits_to_keep"] = 1  # else the vocabulary's logits of all tokens are computed
    return micro_batches


@dataclass
class Tokens:
    """The tokens of a pair, with what is read of an Encoding of `tokenizers`."""

    ids: list

    def __len__(self):
        return len(self.ids)


def tokenize_pairs(pairs, model):
    """Return the encodings of (query, document) pairs, in the model's chat template if it has one."""
    if not has_chat_template(model):
        return model.tokenizer.backend_tokenizer.encode_batch_fast(pairs)
    prompt = model.prompts.get(model.default_prompt_name)
    encodings = []
    for first in range(0, len(pairs), 64):  # padded to the longest
        features = model.preprocess(pairs[first : first + 64], prompt=prompt)
        for ids, mask in zip(features["input_ids"], features["attention_mask"]):
            encodings.append(Tokens(ids[mask > 0].tolist()))
    return encodings


# ---- optimizer and schedule


def make_optimizer(model, args):
    """Return AdamW; weight decay is for matrices only."""
    groups = []
    for decay in (True, False):
        chosen = [p for p in model.parameters() if p.requires_grad and (p.ndim > 1) == decay]
        groups.append({"params": chosen, "weight_decay": decay * args.weight_decay})
    return torch.optim.AdamW(groups, lr=args.learning_rate, fused=True)


def make_schedule(optimizer, steps, args):
    """Return a function of the step: the factor of the learning rates. It has no state."""
    warmup = math.ceil(args.warmup_ratio * steps)
    with user_errors("--lr_scheduler_type"):
        factor = transformers.get_scheduler(args.lr_scheduler_type, optimizer, warmup, steps).lr_lambdas[0]
    return lambda step: factor(step + (step < warmup))  # the first step of a warmup is not at 0


# ---- model


def set_template(tokenizer, template):
    """Return a tokenizer that puts pairs into a template, whose own tokens are never truncated. It is saved with the
    model, for predict(), as a PreTrainedTokenizerFast: other classes would replace the template when loaded."""
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
    return as_fast_tokenizer(tokenizer)


def has_chat_template(model):
    """Return whether sentence-transformers puts pairs into a chat template."""
    return "message" in model[0].modality_config


def is_causal(model):
    """Return whether the score is that of a word such as "yes", a causal model's next token, and not of a head."""
    return isinstance(model[-1], LogitScore)


def load_model(args, checkpoint=None):
    """Return the CrossEncoder of the flags, with the weights of the checkpoint if one is given."""
    path = str(checkpoint) if checkpoint and not args.lora_rank else args.model_name_or_path
    options = {
        "use_safetensors": True,  # never a pickle
        "attn_implementation": args.attn_implementation,
    }
    torch.manual_seed(args.seed)  # for a new head, and adapters
    with user_errors(f"--model_name_or_path {path}"):
        check_exists(path)
        model = CrossEncoder(path, device="cpu", model_kwargs=options, trust_remote_code=False)
        if (found := (len(model) - is_causal(model), model.num_labels)) != (1, 1):
            raise UserError("has {} modules and {} labels: must be 1 and 1".format(*found))
        if has_chat_template(model) and not args.template and model[0].input_formatter.pair_roles_failure():
            raise UserError("its chat template is not for a query and a document: set --template")
        if has_chat_template(model) and len(args.prompts) > 1 and not args.template:
            raise UserError("has a chat template: --prompts takes one instruction")
        if args.template:
            model[0].processor = set_template(model.tokenizer, args.template)
            model[0].modality_config.pop("message", None)  # a chat template
        set_up_transformer(model, args.max_length, "max_length")
        if args.gradient_checkpointing:
            model[0].model.activation_checkpointing_enable({"use_reentrant": False})
    # predict() applies this: bce trains a probability, any other loss the logit itself.
    model.activation_fn = torch.nn.Sigmoid() if args.loss == "bce" else torch.nn.Identity()
    if args.dropout is not None:
        set_dropout(model, args.dropout)
    if args.prompts and args.prompts != own_prompts(model):
        model.prompts = model.prompts | {f"query_{n}": prompt for n, prompt in enumerate(args.prompts, 1)}
        model.default_prompt_name = "query_1"
    if args.lora_rank:
        task = "CAUSAL_LM" if is_causal(model) else "SEQ_CLS"  # peft trains the whole head
        add_lora(model, args, checkpoint, task)
    else:
        model.float()  # with autocast, too, the weights updated are float32
    own_memory(model)
    return model


def own_prompts(model):
    """Return a list of the prompt that predict() uses, "" if there is none."""
    return [model.prompts.get(model.default_prompt_name) or ""]


def check_predict(model, args, accelerator):
    """Raise UserError if the model's own `predict` has other scores of two pairs, one of them long, than training: it
    would be trained for other inputs than it gets later."""
    path = f"--model_name_or_path {args.model_name_or_path}"
    pairs = [("a query", text) for text in SAMPLE]
    with user_errors(path), accelerator.autocast():
        expected = model.predict(pairs, activation_fn=torch.nn.Identity(), convert_to_tensor=True)
    model.tokenizer.backend_tokenizer.no_padding()  # predict() has changed this
    rows = [Row(query, [text], [], {SOURCE: 0}) for query, text in pairs]
    add_prompts(rows, model, args)
    found = score_rows(model, rows, replace(args, query_max_length=None), accelerator)
    model.train()
    check_outputs(path, torch.tensor(found), expected, model, accelerator)


# ---- evaluation

HELD_OUT = "held_out"  # name of the held-out rows among the collections
EVAL_ROWS = 200  # held out by default
CANDIDATES = 50  # documents to rank for a held-out query if negatives are drawn: 200 rows make 10,000 pairs
RANKING = ["MRR@10", "nDCG@10"]  # higher is better, as --metric_for_best_model requires


def open_eval_sets(rows, model, args):
    """Return {name: EvalSet} of the held-out rows and of --eval_beir."""
    add_prompts(rows, model, args)
    eval_sets = {HELD_OUT: held_out_set(rows, args)} if rows else {}
    for name, run in zip_longest(args.eval_beir, args.eval_run):
        prompt = "" if has_chat_template(model) else args.prompts[0]
        with user_errors(f"--eval_beir {name}"):
            eval_set = open_beir(name, args.eval_split, ("", ""))
        eval_set.candidates = find_candidates(eval_set, run, args)  # by the queries without prompt
        eval_set.queries = {query: prompt + text for query, text in eval_set.queries.items()}
        short = Path(name).name
        eval_sets[name if short in eval_sets else short] = eval_set
    add_metrics(eval_sets, args)
    return eval_sets


def held_out_set(rows, args):
    """Return the EvalSet in which each held-out query ranks the documents of its row, by their labels. Of a
    teacher's scores, or if no label of any row is above 0, the highest is relevant."""
    pairs = all(len(row.documents) == 1 for row in rows)
    no_grades = args.loss in TEACHER_LOSSES or (not pairs and all(max(row.labels) <= 0 for row in rows))
    queries = {}
    documents = {}
    qrels = []
    for row in rows:
        query = f"{len(queries)}"
        queries[query] = row.query
        for document, label in zip(row.documents, row.labels):
            name = f"document {len(documents)}"
            documents[name] = document
            if no_grades:
                label = label == max(row.labels)
            qrels.append([query, "0", name, float(label)])
    qrels = pd.DataFrame(qrels, columns=["query", "q0", "docid", "rel"])
    return EvalSet(queries, documents, qrels, pairs, qrels[["query", "docid"]])


def rank_bm25(eval_set, count):
    """Return a DataFrame (query, docid, score) of the `count` best documents of each query by BM25 (Robertson and
    Zaragoza 2009; bm25s' default)."""
    with user_errors("--eval_beir without --eval_run requires the package bm25s, and words in the collection"):
        import bm25s  # optional

        ids = np.array(list(eval_set.documents), object)
        options = {"stopwords": "en", "return_ids": False, "show_progress": False}
        documents = bm25s.tokenize(list(eval_set.documents.values()), **options)
        queries = bm25s.tokenize(list(eval_set.queries.values()), **options)
        index = bm25s.BM25()
        index.index(documents, show_progress=False)
        depth = min(count, len(ids))
        found, scores = index.retrieve(queries, corpus=ids, k=depth, show_progress=False)
    queries = np.repeat(list(eval_set.queries), depth)
    ranked = pd.DataFrame({"query": queries, "docid": found.ravel(), "score": scores.ravel()})
    return ranked[ranked["score"] > 0]


def find_candidates(eval_set, run, args):
    """Return a DataFrame (query, docid) of the first documents of each judged query in the TREC run file, or by BM25
    if `run` is None."""
    if run is None:
        ranked = rank_bm25(eval_set, args.eval_rerank_k + 1)
    else:
        with user_errors(f"--eval_run {run}"):
            ranked = pd.read_csv(
                run,
                sep=r"\s+",
                header=None,
                usecols=[0, 2, 4],  # query, document, score
                dtype={0: str, 2: str},
                quoting=3,
                keep_default_na=False,
            )
            ranked = ranked.set_axis(["query", "docid", "score"], axis=1)
            ranked = ranked.sort_values("score", ascending=False, kind="stable")
    ranked = ranked[["query", "docid"]].drop_duplicates()
    ranked = ranked[ranked["query"].isin(eval_set.queries) & ranked["docid"].isin(eval_set.documents)]
    ranked = ranked[ranked["query"] != ranked["docid"]]  # as in BEIR
    if ranked.empty:
        raise UserError(f"--eval_run {run or '(none: BM25)'}: no document of the collection for any judged query")
    return ranked.groupby("query").head(args.eval_rerank_k)


def score_rows(model, rows, args, accelerator):
    """Return (rows,) scores of rows of one document each, on every process; each process scores its part of them."""
    order, own = deal([len(row.documents[0]) for row in rows], accelerator)
    own_rows = [rows[index] for index in own]
    local = make_micro_batches(own_rows, model, args, accelerator.device)
    slots = math.ceil(len(rows) / accelerator.num_processes)
    scores = score_slots(model, local, (slots, 1), accelerator)[:, 0]
    return undo_deal(order, scores, accelerator).tolist()


def rank_candidates(scores, eval_set):
    """Return the run of the candidates, by their scores. Of equal scores the worse document ranks first."""
    ranked = eval_set.candidates.assign(score=scores).merge(eval_set.qrels, "left", ["query", "docid"])
    ranked = ranked.fillna({"rel": 0}).sort_values(["score", "rel"], ascending=[False, True])
    return to_trec(ranked[["query", "docid", "score"]])


def evaluate(model, eval_sets, args, accelerator):
    """Return {measure: mean over held-out rows and collections}, and the value of each if there are several; the same
    on every process. Rows of several documents are evaluated as rankings, rows of one document by classification if
    all labels are 0 or 1, else by correlation."""
    model = accelerator.unwrap_model(model).eval()
    found = {}
    for name, eval_set in eval_sets.items():
        rows = []
        for query, document in eval_set.candidates.values:
            rows.append(Row(eval_set.queries[query], [eval_set.documents[document]], []))
        scores = score_rows(model, rows, args, accelerator)
        if eval_set.scored:
            predictions = scores
            references = eval_set.qrels["rel"].tolist()
        else:
            predictions = [rank_candidates(scores, eval_set)]
            references = [eval_set.qrels.to_dict("list")]
        eval_set.metric.add_batch(predictions=predictions, references=references)
        found[name] = eval_set.metric.compute()
    model.train()
    return average(found, eval_sets)


def correlate(scores, labels):
    """Return {measure: correlation} of scores and labels, (pairs,) each."""
    frame = pd.DataFrame({"score": scores, "label": labels})
    return {name: float(frame.corr(name.lower()).iloc[0, 1]) for name in ("Spearman", "Pearson")}


def pair_measures(scores, labels):
    """Return measures of classification if all labels are 0 or 1, else correlations; scores, labels: (pairs,)."""
    if not set(labels) <= {0, 1}:
        return correlate(scores, labels)
    accuracy, _ = BinaryClassificationEvaluator.find_best_acc_and_threshold(scores, labels, True)
    f1, *_ = BinaryClassificationEvaluator.find_best_f1_and_threshold(scores, labels, True)
    precision = float(average_precision_score(labels, scores))
    return {"accuracy": float(accuracy), "F1": float(f1), "average precision": precision}


def model_card(args, run, held_out):
    """Return the README.md of the saved model: what it is, how it was trained, what was measured."""
    return f"""---
{{library_name: sentence-transformers, pipeline_tag: text-ranking, base_model: {args.model_name_or_path}}}
---
{run.describe(held_out)}

    model = sentence_transformers.CrossEncoder("path/of/this/folder")
    scores = model.predict([("a query", "a document")])
"""


# ==== machinery: from here to the end identical in train_bi_encoder.py


class UserError(ValueError):
    """Something the user can fix; printed as one line, without a traceback."""


def is_out_of_memory(error):
    """Return whether torch could not allocate memory on a device, or of the CPU."""
    return isinstance(error, RuntimeError) and ("out of memory" in str(error) or "DefaultCPUAllocator" in str(error))


@contextmanager
def user_errors(name):
    """Turn whatever a library raises about the user's data or model into a UserError: `name`, then the root cause."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):  # not the data's fault, or the model's
            raise
        cause = error
        while cause.__cause__ and not isinstance(cause, UserError):
            cause = cause.__cause__
        reason = "contains no row" if isinstance(cause, StopIteration) else str(cause).strip() or repr(cause)
        reason = reason.splitlines()[0][:500].replace("set 'local_files_only' to False", "unset HF_HUB_OFFLINE")
        if "Couldn't cast" in reason:  # `datasets` takes the type of a column from its first rows
            reason += "; prepare_corpus.py can rewrite rows of irregular types"
        raise UserError(reason if reason.startswith(name) else f"{name}: {reason}") from error


def print_error(error, again, memory):
    """Print why a run ended, and return its exit status: a UserError and Ctrl-C in one line, any other error with its
    traceback. again: how to continue after Ctrl-C; memory: what to do if it ran out of memory."""
    if isinstance(error, KeyboardInterrupt):  # at once: background threads may wait for data
        print(f"\ninterrupted: {again}", file=sys.stderr)
        return 130
    traceback.clear_frames(error.__traceback__)  # deletes main's progress bar, which ends its line
    if isinstance(error, UserError):
        # Every process raises the same error. Rank 0 reports it; the others do so only if they still run 5 s later.
        time.sleep(5 if int(os.environ.get("RANK", 0)) else 0)
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
        if is_out_of_memory(error):
            print(f"out of memory: {memory}", file=sys.stderr)
    return 1


def as_words(flags):
    """Return the words of a command line that sets {flag: value}."""
    words = []
    for name, value in flags.items():
        if isinstance(value, dict | bool):
            value = json.dumps(value)
        values = value if isinstance(value, list) else [value]
        if values not in ([], [None]):
            words += [f"--{name}", *map(str, values)]
    return words


def check_credentials(parser, args):
    """Exit if a URL of the flags contains a password, token or signature: the flags are written to files."""
    secret = re.compile(r"://[^/@]*:[^/]*@|://.*[?&][\w-]*(sig|signature|token|key|secret|password|credential)=", re.I)
    for name, values in asdict(args).items():
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, str) and secret.search(value):
                parser.error(
                    f"--{name}: a URL with a credential, which files would show; use the environment or ~/.netrc"
                )


def parse_args(argv):
    """Return Args from flags, or from a YAML or JSON file and flags that override it; exit on a wrong value."""
    parser = make_parser()
    check_flag_names(parser, argv)
    if argv and argv[0].endswith((".yaml", ".yml", ".json")):
        with user_errors(f"{argv[0]}: not a file of flags"):
            words = as_words(dict(yaml.safe_load(Path(argv[0]).read_text())))
        check_flag_names(parser, words)
        argv = words + argv[1:]
    with user_errors("flags"):
        (args,) = parser.parse_args_into_dataclasses(argv)
    with user_errors("--loss_kwargs: not a JSON object"):
        args.loss_kwargs = dict(json.loads(args.loss_kwargs))
    check_credentials(parser, args)
    for name, value in asdict(args).items():
        low, relation = (1e-12, "above 0") if name in ABOVE_ZERO.split() else (0, "0 or more")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not low <= number < math.inf:
                parser.error(f"--{name} {number}: must be finite, and {relation}")
    try:
        check_flags(args)
    except UserError as error:
        parser.error(str(error))
    return args


# ---- files

FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json", ".ndjson": "json",
           ".csv": "csv", ".tsv": "csv", ".txt": "text"}  # fmt: skip


UNSUPPORTED = f"not one of {' '.join(FORMATS)}, with or without .gz or .zst; prepare_corpus.py converts .orc"


def file_suffix(file):
    """Return the key of FORMATS that a file name ends in, before .gz or .zst; None if there is none."""
    suffix = Path(file.lower().removesuffix(".gz").removesuffix(".zst")).suffix
    return suffix if suffix in FORMATS else None


def check_exists(name):
    """Raise UserError if `name` is not on disk and cannot be a Hub id: NAME or ORG/NAME, without a folder ORG here."""
    may_be_id = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) and not os.path.isdir(os.path.dirname(name))
    if not (may_be_id or "://" in name or os.path.exists(name)):
        raise UserError("no such file or folder")


def list_files(source):
    """Return the files of a path, glob, folder, URL, Hub id or ID:config:split, as `datasets` resolves them."""
    path, config, split = os.path.expanduser(source), None, "train"
    if os.path.exists(os.path.join(path, "state.json")):  # of Dataset.save_to_disk; map() adds caches
        files = json.loads(Path(path, "state.json").read_text())["_data_files"]
        return [os.path.join(path, file["filename"]) for file in files]
    if suffix := file_suffix(path):  # decided by suffix, so that a missing file is not mistaken for a Hub id
        builder = datasets.load_dataset_builder(FORMATS[suffix], data_files=path)
    elif path.endswith(".orc") or os.path.isfile(path) or any(Path(path).glob("*.orc")):
        raise UserError(UNSUPPORTED)
    else:
        if path.count(":") == 2:
            path, config, split = path.split(":")
        check_exists(path)
        builder = datasets.load_dataset_builder(path, name=config or None)
    files = builder.config.data_files
    if not files.get(split):
        found = [str(name) for name in files if files[name]]
        raise UserError(f"no split {split!r} with files; available: {', '.join(found) or 'none'}")
    if not file_suffix(files[split][0]):
        raise UserError(f"{files[split][0]}: {UNSUPPORTED}")
    return list(files[split])


def open_files(files, streaming=True):
    """Return a Dataset or IterableDataset that yields pyarrow Tables."""
    suffix = file_suffix(files[0])
    # A mapped table keeps a list of its record batches: write few, large ones.
    kind, options = FORMATS[suffix], {"split": "train", "writer_batch_size": 20_000}
    options |= {"sep": "\t"} if suffix == ".tsv" else {}
    if kind == "parquet":  # else pyarrow reads up to 1 GiB ahead, and keeps what it has read of a file
        options |= {"batch_size": 1000, "fragment_scan_options": ParquetFragmentScanOptions(pre_buffer=False)}
    if kind == "arrow" and not streaming:
        with suppress(OSError, pa.ArrowInvalid):  # a local Arrow stream is mapped in place, anything else copied below
            parts = [datasets.Dataset.from_file(file) for file in files]
            return datasets.concatenate_datasets(parts).with_format("arrow")
    if kind in ("json", "csv"):  # a column that begins with nulls would be typed null and reject texts
        first = datasets.load_dataset(kind, data_files=files[:1], streaming=True, **options).with_format("arrow")
        schema = next(first.iter(1)).schema
        if pa.null() in schema.types:
            fields = [field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in schema]
            options["features"] = datasets.Features.from_arrow_schema(pa.schema(fields))
    return datasets.load_dataset(kind, data_files=files, streaming=streaming, **options).with_format("arrow")


def data_fingerprint(files):
    """Return a hash of the names and sizes of files, and of both ends of the first and the last file."""
    digest = hashlib.sha256()
    for number, file in enumerate(files):
        fs, path = fsspec.core.url_to_fs(file)
        name = os.path.basename(path)
        digest.update(f"{name} {fs.size(path)} ".encode())
        if number in (0, len(files) - 1):
            with suppress(ValueError, TypeError):  # a web server that sends whole files only
                digest.update(fs.head(path, 2**16))
                digest.update(fs.tail(path, 2**16))
    return digest.hexdigest()[:16]


# ---- rows, from Arrow to Python

SOURCE = "<source>"  # column added to rows: the number of their source
NUMBER = "<number>"  # column added to rows: the number of the row in its source, over all epochs


def is_list(column):
    return pa.types.is_nested(column.type) and not pa.types.is_struct(column.type)


def count_bytes(column):
    """Return (rows,) bytes of text in each row of an Array, also in lists and structs."""
    if is_list(column):
        rows = pc.list_parent_indices(column)
        return np.bincount(rows, count_bytes(pc.list_flatten(column)), minlength=len(column))
    if pa.types.is_struct(column.type):
        return sum(count_bytes(part) for part in column.flatten())
    if column.type in (pa.string(), pa.large_string()):
        return pc.fill_null(pc.binary_length(column), 0).to_numpy()
    return np.zeros(len(column))


def row_lengths(table, args):
    """Return (rows,) bytes of text in --columns."""
    return sum(count_bytes(table[name].combine_chunks()) for name in dict.fromkeys(args.columns))


def deal(lengths, accelerator):
    """Return (indices by length, longest first; those of this process). Each process takes every P-th, so the lengths
    of two processes add up to the same but for the longest item."""
    order = np.argsort(-np.array(lengths), kind="stable")
    return order, order[accelerator.process_index :: accelerator.num_processes]


def undo_deal(order, gathered, accelerator):
    """Return the outputs of dealt items in their original order; gathered: (P n, ...), n slots of each process."""
    by_length = gathered.unflatten(0, (accelerator.num_processes, -1)).transpose(0, 1).flatten(0, 1)
    return by_length[np.argsort(order)]


def parse_json(values):
    return [value and json.loads(value) for value in values]


def to_python(column):
    """Return the values of a column, or of the JSON that `datasets` makes of values of several types, also in lists; a
    list that is null is empty."""
    values = column.to_pylist()
    if isinstance(column.type, pa.JsonType):
        return parse_json(values)
    if is_list(column):
        parse = parse_json if isinstance(column.type.field(0).type, pa.JsonType) else list
        return [parse(value or ()) for value in values]
    return values


def read_text(value, column, args, is_id=False):
    """Return a text, an id as a text, or the fields of a struct, joined; raise ValueError if there is no text, and
    UserError, which --on_bad_row does not skip, if it is a value of another type: the column is wrong, not the row."""
    if isinstance(value, dict):
        names = [name for name in args.corpus_columns[1:] if name in value]
        if not names:
            flags = f"--corpus_columns {args.corpus_columns[0]} {' '.join(value)}"
            raise UserError(f"column {column!r} holds structs: to read its fields, set {flags}")
        for name in names:
            check_text(value[name], name)
        value = " ".join(value[name] or "" for name in names).strip()
    if is_id and isinstance(value, (int, float)):
        return str(value).removesuffix(".0")  # whole numbers are read as floats where some are missing
    check_text(value, column)
    if value is None or not value.strip():
        raise ValueError(f"{column!r} has no text")
    return value


def check_text(value, column):
    """Raise UserError if a value is neither a text nor missing."""
    if value is None or isinstance(value, str):
        return
    advice = f"choose other columns, rewrite it by prepare_corpus.py or, to train on it, set --label_column {column}"
    if isinstance(value, (dict, list)):
        advice = "write its texts as a column of their own; Dataset.flatten() of `datasets` does so for structs"
    raise UserError(f"column {column!r} holds {type(value).__name__}, not texts: {advice}")


def read_documents(cells, columns, args):
    """Return a list of texts, or of ids, for each of `columns`, whose cells are texts or lists of texts."""
    groups = []
    for column in columns:
        values = cells[column] if isinstance(cells[column], list) else [cells[column]]
        groups.append([read_text(value, column, args, is_id=args.corpus) for value in values])
    if not groups[0]:
        raise ValueError(f"{columns[0]!r} has no text")
    return groups


def read_labels(cells, args):
    """Return the labels of a row: those of all --label_column, each a number, a list of numbers, or JSON of them."""
    labels = []
    with suppress(ValueError, TypeError):
        for column in args.label_column:
            value = cells[column]
            value = json.loads(value) if isinstance(value, str) else value
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
    if random is None or (len(groups) == 1 and args.num_negatives is None):
        kept = num_positives + limit
        if len(labels) == len(documents):
            labels = labels[:kept]
        return documents[:kept], labels
    if len(labels) not in (0, len(documents)):
        raise ValueError(f"{' '.join(args.label_column)!r} has missing, extra or non-finite numbers")
    chosen = [random.randrange(num_positives), *sorted(random.sample(negatives, limit))]
    return [documents[index] for index in chosen], [labels[index] for index in chosen if labels]


def read_rows(table, sources, lookups, args, add_documents=None):
    """Return (list of Row, number of bad rows) of a Table, with texts in place of ids; raise UserError for a bad row
    unless --on_bad_row is skip. sources: those that the column SOURCE counts; add_documents(rows) may add documents of
    other rows, with labels, before ids are looked up."""
    columns = {name: to_python(table[name]) for name in table.column_names}
    may_be_lists = (is_list(table[name]) or isinstance(table[name].type, pa.JsonType) for name in args.columns)
    random = Random() if any(may_be_lists) else None
    rows = []
    bad = []  # (cells, what is wrong)
    for values in zip(*columns.values()):
        cells = dict(zip(columns, values))
        if random:  # seeding takes 5 µs
            random.seed(f"{args.seed} {cells[SOURCE]} {cells[NUMBER]}")
        try:
            rows.append(read_row(cells, random, args))
            rows[-1].cells = cells
        except UserError as error:  # not of this row alone
            raise UserError(f"{sources[cells[SOURCE]].name}: {error}") from error
        except ValueError as error:
            bad.append((cells, error))
    counts = [len(row.documents) for row in rows]
    if add_documents:
        add_documents(rows)
    resolve_ids(rows, lookups)
    known = []
    for row, count in zip(rows, counts):
        if row.query is None:
            bad.append((row.cells, f"no text has the id in {args.columns[0]!r}"))
        elif None in row.documents[:count]:
            bad.append((row.cells, f"no text has the id in {' or '.join(map(repr, args.columns[1:]))}"))
        else:
            known.append(row)
            while None in row.documents:  # added from another row: that one is bad, not this one
                place = row.documents.index(None)
                del row.documents[place], row.labels[place]
    if bad and args.on_bad_row == "error":
        raise bad_row_error(bad, columns[SOURCE], sources, args)
    return known, len(bad)


def bad_row_error(bad, numbers, sources, args):
    """Return the UserError of the first bad row; bad: (cells, what is wrong) of each; numbers: that of the source of
    each row read. If most rows of its source have the same problem, the column is wrong: to skip them is no help."""
    cells, problem = bad[0]
    source = sources[cells[SOURCE]].name
    shown = str({name: cells[name] for name in (*args.columns, *args.label_column)})[:200]
    alike = [(other[SOURCE], str(text)) for other, text in bad].count((cells[SOURCE], str(problem)))
    num_rows = numbers.count(cells[SOURCE])
    if alike > max(1, num_rows / 2):
        advice = "convert this column to texts (numbers for a label), or choose others: --columns, --label_column"
        if str(problem).startswith("--loss"):
            advice = "choose another --loss or --label_column, or leave such rows out: prepare_corpus.py --filter"
        return UserError(f"{source}: {problem} in {alike} of {num_rows} rows, as in {shown}; {advice}")
    return UserError(f"{source}: {problem} in the row {shown}; fix the row, or pass --on_bad_row skip")


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


def read_batches(tables, make_batch, data, args, accelerator, add_documents=None):
    """Yield this process' Batch of each (Table, state) without end; runs in a background thread. An error of the data
    becomes the `error` of a batch without rows, so that all processes can stop at the same step."""
    state = error = None
    while True:
        skipped = 0
        try:
            if error is None:
                table, state = next(tables)
                _, own = deal(row_lengths(table, args), accelerator)
                hook = add_documents and partial(add_documents, table)
                rows, skipped = read_rows(table.take(np.sort(own)), data.sources, data.lookups, args, hook)
                batch = make_batch(rows)
        except UserError as caught:
            error = caught
        if error:
            batch = make_batch([])
        batch.state = state
        batch.skipped = skipped
        batch.error = error
        yield batch


# ---- sources and the order of their rows

BLOCK = 100  # neighbouring rows of a mapped table that are read together; a shuffle window mixes many blocks
START = {"taken": 0, "epoch": 0, "window": 0, "used": 0, "stream": None}  # position of a Source


class Source:
    """The rows of a source, epoch after epoch, in windows that are shuffled as a whole: a pure function of the files,
    the seed and `number`. `position` (JSON) is that of the next row: rows taken in all, epoch, window, rows used of
    the window, and the state of a stream before the window."""

    def __init__(self, name, number, args):
        self.name = name
        self.number = number
        self.args = args
        self.files = list_files(name)
        self.window = args.shuffle_buffer or 1000  # rows
        self.block = min(BLOCK, self.window)
        self.held_out = 0
        self.leading = 0  # files of a stream with the held-out rows; not permuted, so that skip() skips these rows
        self.dataset = None if args.streaming else self.open(self.files)
        self.seek(None)

    def __len__(self):  # unknown for a stream: 1, so that streams are mixed equally by default
        return 1 if self.args.streaming else len(self.dataset) - self.held_out

    def open(self, files):
        names = dict.fromkeys([*self.args.columns, *self.args.label_column])
        return open_files(files, self.args.streaming).select_columns(list(names))

    def hold_out(self, count):
        """Return a Table of the first `count` rows, and exclude them from training."""
        table = [] if self.args.streaming else self.dataset[:count]
        while self.args.streaming and len(table) < count and self.leading < len(self.files):
            self.leading += 1
            stream = self.open(self.files[: self.leading])
            table = pa.concat_tables(stream.take(count).iter(count))
        self.held_out = len(table)
        return self.add_numbers(table, 0)

    def seek(self, position):
        """Continue at a position, or from the beginning if it is None."""
        self.position = dict(position or START)
        self.table = []
        self.windows = self.read_windows()

    def take(self, count):
        """Return a Table of the next `count` rows."""
        position = self.position
        parts = []
        with user_errors(self.name):
            while count:
                if position["used"] >= len(self.table):
                    self.table = next(self.windows)
                part = self.table.slice(position["used"], count)
                parts.append(self.add_numbers(part, position["taken"]))
                position["used"] += len(part)
                position["taken"] += len(part)
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
            found = position["window"] or position["used"]
            for table, stream in self.read_stream() if self.args.streaming else self.read_blocks():
                table.validate(full=True)  # offsets of a damaged Arrow file may be out of bounds
                if self.args.shuffle_buffer:
                    table = table.take(self.random(position["window"]).permutation(len(table)))
                position["stream"] = stream
                found = True
                yield table.combine_chunks()
                position.update(window=position["window"] + 1, used=0)
            if not found:
                raise UserError(f"no row is left to train on after --eval_rows {self.args.eval_rows}")
            position.update(epoch=position["epoch"] + 1, window=0, used=0, stream=None)

    def read_blocks(self):
        """Yield (Table, None) for each window of an epoch from `position` on: random blocks of neighbouring rows."""
        blocks = np.arange(math.ceil(len(self) / self.block))
        count = self.window // self.block
        if self.args.shuffle_buffer:
            self.random().shuffle(blocks[: len(self) // self.block])  # a short last block stays last
        for first in range(self.position["window"] * count, len(blocks), count):
            starts = (self.held_out + blocks[first : first + count] * self.block).tolist()
            # As dataset[start : start + block] does, without the 70 µs that formatting takes.
            yield pa.concat_tables([self.dataset.data.fast_slice(start, self.block) for start in starts]), None

    def read_stream(self):
        """Yield (Table, state of the stream before it) for each window of an epoch; a resume loads that state to read
        the window again. Only files are permuted: `datasets` does not resume its own shuffling exactly."""
        files = self.files[self.leading :]
        if self.args.shuffle_buffer:
            files = [files[index] for index in self.random().permutation(len(files))]
        stream = self.open(self.files[: self.leading] + files).skip(self.held_out)
        before = self.position["stream"]
        if before:
            stream.load_state_dict(before)
        before = before or stream.state_dict()  # does not reflect a loaded state before the first row
        for table in stream.iter(self.window):
            yield table, before
            before = stream.state_dict()

    def random(self, *keys):
        """Return the random generator of this source, its epoch and `keys`."""
        return np.random.default_rng([self.args.seed, self.number, self.position["epoch"], *keys])


def apportion(drawn, weights, count):
    """Return how many of the next `count` rows each source gives, so that it stays within a row of its share of all
    rows; drawn: rows of each source so far."""
    shares = np.array(weights) / sum(weights)
    missing = shares * (sum(drawn) + count) - drawn
    counts = np.maximum(missing.astype(int) - 1, 0)
    if counts.sum() > count:  # the weights have changed, by a resume: catch up over several calls
        counts[:] = 0
    for _ in range(count - counts.sum()):
        counts[np.argmax(missing - counts)] += 1
    return counts.tolist()


def row_batches(sources, weights, args, state=None):
    """Yield (Table of a batch's rows, state after it) without end: a pure function of sources, seed and batch size.
    Each batch has its own state (JSON), so prefetching loses no row: the position of each source before the length
    window, and "cut", the batches taken from that window."""
    state = state or {"sources": [None] * len(sources), "cut": 0}
    for source, position in zip(sources, state["sources"]):
        source.seek(position)
    cut = state["cut"]
    window = args.batch_size * args.length_window
    unit = 1 if args.mix_by == "row" else window  # rows that are taken together from a source
    while True:
        before = [dict(source.position) for source in sources]
        drawn = [position["taken"] for position in before]
        counts = apportion([rows // unit for rows in drawn], weights, window // unit)
        tables = [source.take(count * unit) for source, count in zip(sources, counts) if count]
        with user_errors("columns of different sources have different types"):
            table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
        order = np.arange(args.length_window)
        if args.length_window > 1:
            table = table.take(np.argsort(row_lengths(table, args), kind="stable"))
            np.random.default_rng([args.seed, *drawn]).shuffle(order)
        for number in range(cut, len(order)):
            rows = table.slice(order[number] * args.batch_size, args.batch_size)
            done = number + 1 == len(order)
            positions = [dict(source.position) for source in sources] if done else before
            yield rows, {"sources": positions, "cut": 0 if done else number + 1}
        cut = 0


class TextLookup:
    """Texts by id from a memory-mapped table. Its index (sorted 64-bit hashes of the ids, and the row of each) is also
    a memory-mapped file, built once: 16 bytes per text on disk, none in memory."""

    def __init__(self, sources, columns):
        files = [file for source in sources for file in list_files(source)]
        self.name = sources[0]
        self.fingerprint = data_fingerprint(files)
        self.id_column, *self.text_columns = columns
        self.dataset = open_files(files, streaming=False).select_columns(columns)
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
        with user_errors(self.name):
            places = np.searchsorted(self.index[0], self.hashes(np.array(ids, object)))
            rows = self.index[1, places.clip(max=len(self.dataset) - 1)]
            table = self.dataset[rows.tolist()].combine_chunks()  # else one chunk for each row
            columns = [to_python(table[name]) for name in self.text_columns]
            texts = []
            for wanted, found, *parts in zip(ids, self.ids(table), *columns):
                for name, part in zip(self.text_columns, parts):
                    check_text(part, name)
                text = " ".join(part or "" for part in parts).strip()
                texts.append(text if text and found == wanted else None)
            return texts

    def ids(self, table):
        """Return (rows,) object array of str."""
        table.validate(full=True)
        column = table[self.id_column]
        if isinstance(column.type, pa.JsonType):
            raise UserError(
                f"column {self.id_column!r} holds values of several types: rewrite it by prepare_corpus.py"
            )
        return np.asarray(column.cast(pa.large_string()), object)

    def hashes(self, ids):
        return pd.util.hash_array(ids, categorize=False)  # uint64, the same in every process


@dataclass
class Data:
    """What a run trains and evaluates on."""

    sources: list  # of Source
    eval_sources: list  # of Source: those of the held-out rows
    held_out: list  # Table of each that has some
    lookups: list  # TextLookup of queries and of documents; None where rows contain texts
    weights: list  # share of each source
    epoch_rows: float  # mixed rows of an epoch
    description: list  # [name, rows, fingerprint] of each source and table of texts
    skipped: int = 0  # bad rows among those held out


def open_lookup(sources, columns):
    """Return the TextLookup of --queries or --corpus, None if it is not given."""
    with user_errors(" ".join(sources)):
        return TextLookup(sources, columns) if sources else None


def open_sources(names, use, args):
    """Return the list of Source of --train_data or --eval_data."""
    sources = []
    for number, name in enumerate(names):
        with user_errors(f"--{use}_data {name}"):
            sources.append(Source(name, number, args))
    return sources


def open_data(args):
    """Return the Data of the flags; set args.columns and args.eval_rows if they are not given."""
    if not args.columns:
        with user_errors(f"--train_data {args.train_data[0]}"):
            files = list_files(args.train_data[0])
            first = next(open_files(files[:1]).iter(1))
            for name in first.column_names:
                if len(name) > 40:  # the first row of a CSV file without a line of names
                    raise UserError(f"column {name!r}: if this is a row, insert a line of names; else list --columns")
        args.columns = [name for name in first.column_names if name not in args.label_column]
    if len(args.columns) < 2:
        raise UserError(f"--columns: two or more are required, found {args.columns}")
    lookups = [open_lookup(args.queries, args.query_columns), open_lookup(args.corpus, args.corpus_columns)]
    sources = open_sources(args.train_data, "train", args)
    eval_sources = open_sources(args.eval_data, "eval", args)
    description = []
    for source in (*sources, *eval_sources):
        description.append([source.name, len(source), data_fingerprint(source.files)])
    for lookup in filter(None, lookups):
        description.append([lookup.name, len(lookup.dataset), lookup.fingerprint])

    if args.eval_rows is None:
        args.eval_rows = EVAL_ROWS
        if not args.streaming and not args.eval_data:
            args.eval_rows = min(EVAL_ROWS, sum(map(len, sources)) // 10)
    weights = args.mixing_weights or list(map(len, sources))
    shares = list(map(len, eval_sources)) or weights
    counts = apportion([0] * len(shares), shares, args.eval_rows)
    held_out = []
    for source, count in zip(eval_sources or sources, counts):
        if count:
            with user_errors(source.name):
                held_out.append(source.hold_out(count))
    for source in sources:
        if not len(source):
            raise UserError(f"{source.name}: no row is left to train on after --eval_rows {args.eval_rows}")

    if not args.mixing_weights:
        weights = list(map(len, sources))  # without the rows held out
    ends = [len(source) * sum(weights) / weight for source, weight in zip(sources, weights)]  # of each, in mixed rows
    end = min(ends) if args.stopping_strategy == "first_exhausted" else max(ends)
    return Data(sources, eval_sources or sources, held_out, lookups, weights, args.rows_per_epoch or end, description)


def read_first_rows(data, args):
    """Return the list of Row of the first batch, of all processes: the same after a resume."""
    table, _ = next(row_batches(data.sources, data.weights, args))
    return read_rows(table, data.sources, data.lookups, args)[0]


def are_similarities(rows):
    """Return whether the teacher's scores of rows are probabilities or cosines, from -1 to 1."""
    largest = max((abs(label) for row in rows for label in row.labels), default=0)
    return largest < 1.001  # a cosine may be rounded to above 1


def print_entropies(scores, teacher, args, accelerator):
    """Print the mean entropies of the softmax of `scores` and `teacher` over a row's documents: (n, L) each, divided
    by their temperatures, `teacher` NaN where there is no document. Warn if the teacher's is near that of equal scores
    but the model's is not: the loss would fall while the model's scores become equal."""
    missing = teacher.isnan()
    parts = (scores, teacher, torch.zeros_like(teacher))
    parts = (Categorical(logits=part.masked_fill(missing, -torch.inf)) for part in parts)
    model, teacher, equal = (part.entropy().mean().item() for part in parts)
    accelerator.print(
        f"teacher_temperature {args.loss_kwargs['teacher_temperature']}; mean entropy over a row's "
        f"documents: teacher {teacher:.3f}, model {model:.3f}, equal scores {equal:.3f}"
    )
    if equal - teacher < 0.1 * (equal - model):
        accelerator.print(
            "warning: the teacher's scores hardly differ beside the model's, which would become equal: "
            "lower teacher_temperature in --loss_kwargs"
        )


def read_held_out(data, args, accelerator, add_documents=None):
    """Return the list of Row that are held out; `add_documents`: as in read_batches."""
    if not data.held_out:
        return []
    table = pa.concat_tables(data.held_out, promote_options="permissive")
    add_documents = add_documents and partial(add_documents, table)
    rows, data.skipped = read_rows(table, data.eval_sources, data.lookups, args, add_documents)
    if 0 < len(rows) < accelerator.num_processes:
        raise UserError(f"--eval_rows {len(rows)}: too few for {accelerator.num_processes} processes")
    return rows


# ---- micro-batches


def truncate_query(text, model, args):
    """Return a query cut where the last token ends that --query_max_length allows."""
    if not args.query_max_length:
        return text
    tokenizer = getattr(model.tokenizer, "backend_tokenizer", model.tokenizer)
    ends = tokenizer.encode(text, add_special_tokens=False).offsets[: args.query_max_length]
    return text[: ends[-1][1]] if ends else ""


def cut_micro_batches(lengths, max_tokens):
    """Return index arrays, longest text first, each of at most `max_tokens` with padding; a longer text is alone.

    Minimize the tokens with padding plus a cost for each forward pass: 32 tokens if `max_tokens` is 2,048 (12 to 35
    measured on CPUs), 1,024 if it is 16,384 (GPUs). Cuts are tried where the length changes and after every 1/16 of
    `max_tokens`; trying all of them saves at most 0.3 % of the tokens and takes 30 times as long."""
    order = np.argsort(-lengths, kind="stable")
    sizes = np.maximum(lengths[order], 1)
    sixteenths = np.cumsum(sizes) * 16 // max_tokens
    begins = np.flatnonzero(np.diff(sizes, prepend=0) | np.diff(sixteenths, prepend=0))
    widths = sizes[begins].tolist()
    begins = [*begins.tolist(), len(order)]
    cost_of_a_pass = 32 * (max_tokens / 2048) ** (5 / 3)
    best = {len(widths): (0.0, None)}  # {number of a begin: (lowest cost from it on, number of the next begin)}
    for first in reversed(range(len(widths))):
        limit = bisect_right(begins, begins[first] + max_tokens // widths[first])
        costs = []
        for end in range(first + 1, max(first + 2, limit)):
            tokens = (begins[end] - begins[first]) * widths[first]
            costs.append((cost_of_a_pass + tokens + best[end][0], end))
        best[first] = min(costs)
    cuts = []
    first = 0
    while first < len(widths):
        end = best[first][1]
        cuts.append(order[begins[first] : begins[end]])
        first = end
    return cuts


@dataclass
class MicroBatches:
    """The texts or pairs that this process encodes."""

    parts: list  # (features, indices of their texts)
    places: torch.Tensor  # (2, texts) row and column of each in the (n, C) slots, in the order of the parts
    tokens: int  # without padding
    padded: int  # with padding
    squares: int  # sum of the squared lengths, for the FLOPs of attention

    def slots(self, accelerator):
        """Return (rows, columns), to index a tensor of slots, (n, C, ...)."""
        return tuple(self.places.to(accelerator.device, non_blocking=True))


def collect(parts, places, lengths, device):
    """Return the MicroBatches of [(features, indices)]; places: (row, column) of each text, lengths: its tokens."""
    padded = sum(features["input_ids"].numel() for features, _ in parts)
    order = np.concatenate([indices for _, indices in parts])
    places = torch.tensor(places)[order].T.contiguous()
    for features, _ in parts:
        features.update({name: pinned(value, device) for name, value in features.items()})
    return MicroBatches(parts, pinned(places, device), int(lengths.sum()), padded, int((lengths**2).sum()))


def pinned(value, device):
    """Return a tensor in page-locked memory if `device` is a GPU, for asynchronous copies; else return the value."""
    return value.pin_memory() if device.type == "cuda" and torch.is_tensor(value) else value


def pad_lists(lists, size, fill, dtype=np.int64, width=1, side="right"):
    """Return a (size, longest) tensor of lists, padded with `fill` on a side, at least `width` wide."""
    width = max([width, *map(len, lists)])
    padded = np.full((size, width), fill, dtype)
    for row, values in zip(padded, lists):
        start = width - len(values) if side == "left" else 0
        row[start : start + len(values)] = values
    return torch.from_numpy(padded)


def pad_micro_batches(encodings, places, model, max_tokens, device):
    """Return the MicroBatches of tokenized texts or pairs, longest first; places: (row, column) of each."""
    lengths = np.array([len(encoding) for encoding in encodings])
    widths = lengths
    if device.type != "cpu":  # fast kernels require multiples of 8
        widths = np.maximum(lengths, np.minimum(-(-lengths // 8) * 8, model.max_seq_length))
    parts = []
    for indices in cut_micro_batches(widths, max_tokens):
        chosen = [encodings[index] for index in indices]
        if model[0].can_flatten_inputs:
            features = flatten_texts(chosen, model[0])
        else:
            features = pad_texts(chosen, int(widths[indices[0]]), model.tokenizer)
        parts.append((features, indices))
    return collect(parts, places, lengths, device)


def pad_texts(encodings, width, tokenizer):
    """Return the features of tokenized texts or pairs, (texts, width) each."""
    pad = partial(pad_lists, size=len(encodings), width=width, side=tokenizer.padding_side)
    features = {"input_ids": pad([encoding.ids for encoding in encodings], fill=tokenizer.pad_token_id)}
    if "token_type_ids" in tokenizer.model_input_names:
        types = [encoding.type_ids for encoding in encodings]
        features["token_type_ids"] = pad(types, fill=tokenizer.pad_token_type_id)
    if min(map(len, encodings)) < width:  # else transformers waits for the device to see that nothing is masked
        features["attention_mask"] = pad([[1] * len(encoding) for encoding in encodings], fill=0)
    return features


def flatten_texts(encodings, transformer):
    """Return the features of tokenized texts, concatenated without padding for flash attention."""
    features = transformer.data_collator([{"input_ids": encoding.ids} for encoding in encodings])
    features["position_ids"] += transformer._flatten_position_offset  # RoBERTa counts from 2
    del features["labels"]
    return features


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


def equalize_micro_batches(micro_batches, accelerator):
    """Return (parts of the MicroBatches, the most tokens of a process, with padding). Under FSDP, whose forwards are
    collective, the last part is repeated, for no text, until all ranks run equally many."""
    parts = micro_batches.parts
    if accelerator.num_processes == 1:
        return parts, micro_batches.padded
    sizes = torch.tensor([[len(parts), micro_batches.padded]], device=accelerator.device)
    most, tokens = accelerator.gather(sizes).amax(0).tolist()
    if accelerator.distributed_type == DistributedType.FSDP:
        features, _ = parts[-1]  # the shortest texts; the output is discarded
        parts = parts + [(features, ())] * (most - len(parts))
    return parts, tokens


def gather_slots(outputs, micro_batches, shape, accelerator):
    """Return (P n, C, ...) detached outputs of all processes; `outputs`: (texts, ...) of each part; shape:
    (n, C), the slots of each process. Slots without a text are 0."""
    slots = outputs[0].new_zeros(*shape, *outputs[0].shape[1:])
    slots[micro_batches.slots(accelerator)] = torch.cat(outputs).detach()
    return accelerator.gather(slots)


def pad_columns(tensor, fill, accelerator):
    """Return a process' (n, C) tensor on the device, with as many columns as that of the process with most."""
    tensor = tensor.to(accelerator.device, non_blocking=True)
    if accelerator.num_processes == 1:
        return tensor
    return accelerator.pad_across_processes(tensor, dim=1, pad_index=fill)


def seed_dropout(*numbers):
    """Seed dropout by integers: the same in a second forward pass, and after a resume."""
    torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


def keeps_graphs(tokens, args, device):
    """Return whether the graphs of this many tokens are kept until the loss (--grad_cache)."""
    if args.grad_cache == "auto":
        kept = 16 if device.type == "cpu" else 4  # full micro-batches
        return tokens <= args.micro_batch_tokens * kept
    return args.grad_cache == "false"


# ---- model


SAMPLE = ["a text", "a longer text, which a model for short texts truncates " * 30]


def check_outputs(path, found, expected, model, accelerator):
    """Raise UserError if a model's outputs of the texts SAMPLE, (2, ...), differ from sentence-transformers' own."""
    found = found.detach().float()
    expected = expected.float().to(found.device)
    difference = (found - expected).norm() / (1 + expected.norm())
    exact = accelerator.mixed_precision == "no" and next(model.parameters()).dtype == torch.float32
    if difference > (1e-3 if exact else 0.05):
        raise UserError(
            f"{path}: sentence-transformers' outputs differ from those of this script by {difference:.2g}: the model "
            "reads more than the tokens of texts, such as the length of prompts, or padding on the left"
        )


def set_lora_rank(args):
    """Set --lora_rank to that of --lora_adapter."""
    if not args.lora_adapter:
        return
    with user_errors(f"--lora_adapter {args.lora_adapter}: not a folder of adapters"):
        rank = json.loads(Path(args.lora_adapter, "adapter_config.json").read_text())["r"]
    if args.lora_rank not in (0, rank) or args.lora_alpha or args.lora_dropout or args.lora_target_modules:
        raise UserError("--lora_adapter: its rank, alpha, dropout and layers are kept: leave out the flags for them")
    args.lora_rank = rank


def set_dropout(model, probability):
    """Set the dropout probability of Dropout modules and of all dropout numbers in modules and their configs."""
    found = 0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = probability
            found += 1
        for holder in (module, vars(module).get("config")):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if "dropout" in name and type(value) in (int, float):
                    setattr(holder, name, probability)
                    found += 1
    if probability and not found:
        raise UserError(f"--dropout {probability}: the model has no dropout")


def add_lora(model, args, checkpoint, task=None):
    """Freeze the transformer and add adapters to its linear layers (Hu et al. 2021, section 4), new ones or those of
    --lora_adapter or a checkpoint. `task`: peft's task type, which decides what other layers are trained."""
    with user_errors("--lora_rank and other flags of adapters (they require a transformer, and pip install peft)"):
        from peft import LoraConfig, PeftModel, get_peft_model  # optional

        model.requires_grad_(False)  # other modules, too: the adapters contain all that is trained
        if folder := checkpoint or args.lora_adapter:
            options = {"is_trainable": True, "torch_device": "cpu"}
            model[0].model = PeftModel.from_pretrained(model[0].model, folder, **options)
            return
        config = LoraConfig(
            r=args.lora_rank,
            lora_alpha=args.lora_alpha or 2 * args.lora_rank,
            lora_dropout=args.lora_dropout,
            target_modules=args.lora_target_modules or "all-linear",
            task_type=task,
        )
        model[0].model = get_peft_model(model[0].model, config)


def freeze_unused(model, output):
    """Freeze the parameters on which an `output` of the model does not depend, such as BERT's pooler under mean
    pooling. DDP waits for every parameter's gradient: if one has none, no gradient is reduced, without an error."""
    output.sum().backward()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
    model.zero_grad()


def check_attention(model, accelerator):
    """Raise UserError for flash attention in a run that computes in float32."""
    kernels = str(getattr(model.config, "_attn_implementation", None))
    if "flash" in kernels and accelerator.mixed_precision == "no":
        raise UserError(f"{kernels} requires half precision: accelerate launch --mixed_precision bf16")


def own_memory(model):
    """Copy all parameters and buffers. Loaded ones are views of a mapped file, at addresses that depend on its header;
    kernels choose their order of summation by alignment, so the last bits would depend on the file."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def set_up_transformer(model, length, flag_name):
    """Let the tokenizer truncate texts to `length` tokens or the model's limit, in pairs the longer text first, as
    predict() does, and add no padding: once, not at each call, as two threads use it. Let the embeddings of all tokens
    be trained. Raise UserError for quantized weights."""
    if getattr(model.config, "quantization_config", None):
        raise UserError("its weights are quantized, which no test covers: use the model that they were made of")
    tokenizer = model.tokenizer
    if tokenizer.pad_token is None:  # of a decoder; what is padded is masked
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise UserError("its tokenizer has neither a padding token nor an end token")
    if getattr(model.config, "pad_token_id", 0) is None:
        model.config.pad_token_id = tokenizer.pad_token_id  # where a classification head looks for the last token
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # else an end token that is also padding would not be trained
    limit = getattr(model.config, "max_position_embeddings", None) or math.inf
    model.max_seq_length = length or model.max_seq_length
    if model.max_seq_length > 2**31:
        raise UserError(f"has no limit of its own: set --{flag_name}")
    if model.max_seq_length > limit:
        raise UserError(f"--{flag_name} {model.max_seq_length}: the model has positions for {limit} tokens")
    tokenizer.backend_tokenizer.enable_truncation(model.max_seq_length)
    tokenizer.backend_tokenizer.no_padding()


def as_fast_tokenizer(tokenizer):
    """Return a tokenizer as a PreTrainedTokenizerFast: other classes would replace its template when loaded."""
    names = ("model_input_names", "model_max_length", "padding_side", "truncation_side")
    options = {name: getattr(tokenizer, name) for name in names} | tokenizer.special_tokens_map
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **options)


# ---- collections to evaluate on


@dataclass
class EvalSet:
    """Queries, documents and judgments of a collection, in memory."""

    queries: dict  # {id: text}
    documents: dict  # {id: text}
    qrels: pd.DataFrame  # query, q0, docid, rel: the layout of trec_eval
    scored: bool = False  # rel is a label of the pair, not a grade
    candidates: pd.DataFrame = None  # query, docid: the pairs that a cross-encoder scores
    metric: CombinedEvaluations = None  # set by add_metrics


def open_beir(name, split, prompts):
    """Return the EvalSet of a folder or Hub id in the layout of BEIR or NanoBEIR.
    prompts: (prefix of documents, prefix of queries)."""
    sources = [f"{name}/corpus.jsonl", f"{name}/queries.jsonl", f"{name}/qrels/{split}.tsv"]
    if not os.path.exists(sources[0]):
        check_exists(name)
        sources = [f"{name}:corpus:corpus", f"{name}:queries:queries", f"{name}-qrels::{split}"]
        if "qrels" in datasets.get_dataset_config_names(name):  # NanoBEIR
            sources = [f"{name}:{config}:train" for config in ("corpus", "queries", "qrels")]
    *files, judgments = map(list_files, sources)
    texts = []
    for part, prompt in zip(files, prompts):
        frame = open_files(part, streaming=False)[:].to_pandas()
        frame = frame.reindex(columns=["_id", "title", "text"], fill_value="").fillna("").astype(str)
        joined = (frame["title"] + " " + frame["text"]).str.strip()
        texts.append(dict(zip(frame["_id"], prompt + joined)))
    if judgments[0].endswith(".tsv"):  # read ids as texts: they may begin with zeros
        qrels = pd.read_csv(judgments[0], sep="\t", dtype=str, quoting=3, keep_default_na=False)
    else:
        qrels = open_files(judgments, streaming=False)[:].to_pandas().astype(str)
    qrels = qrels.rename(columns={"query-id": "query", "corpus-id": "docid"})
    qrels = qrels.drop_duplicates(["query", "docid"], keep="last")
    qrels = qrels[qrels["query"].isin(texts[1])]
    if qrels.empty:
        raise UserError(f"no judgment of split {split!r} has a query of {files[1][0]}")
    qrels = qrels.assign(q0="0", rel=qrels["score"].astype(int) if "score" in qrels else 1)  # NanoBEIR has no grades
    queries = {query: texts[1][query] for query in qrels["query"].unique()}
    return EvalSet(queries, texts[0], qrels[["query", "q0", "docid", "rel"]])


class BuiltIn(Metric):
    """The built-in measures, of rankings in the layout of evaluate's metric trec_eval, or of scores and labels."""

    def _info(self):
        return MetricInfo("", "", datasets.Features(predictions=datasets.Json(), references=datasets.Json()))

    def _compute(self, predictions, references):
        if not isinstance(predictions[0], dict):
            return pair_measures(predictions, references)
        judged = pd.DataFrame(references[0]).sort_values("rel", ascending=False)
        judged["rel"] = judged["rel"].clip(0)  # the gain; a document is relevant if it is above 0
        run = pd.DataFrame(predictions[0]).merge(judged, "left", ["query", "docid"])
        run = run[run["rank"] <= 10]
        ideal = judged.groupby("query").head(10)
        reciprocal = ((run["rel"] > 0) / run["rank"]).groupby(run["query"]).max()
        values = {"MRR@10": reciprocal, "nDCG@10": dcg(run) / dcg(ideal), "accuracy@1": reciprocal // 1}
        means = pd.DataFrame(values).fillna(0).mean()  # a query without documents or relevant ones counts as 0
        return means[RANKING].to_dict()


def dcg(ranked):
    """Return {query: DCG}; ranked: DataFrame of query and rel, best first."""
    ranks = 1 + ranked.groupby("query").cumcount()
    return (ranked["rel"] / np.log2(1 + ranks)).groupby(ranked["query"]).sum()


def to_trec(ranked):
    """Return {column: list} in the layout of trec_eval; ranked: DataFrame of query, docid and score, best first."""
    ranks = 1 + ranked.groupby("query").cumcount()
    return ranked.assign(q0="Q0", rank=ranks, system="evenstep").to_dict("list")


def add_metrics(eval_sets, args):
    """Give each EvalSet its metric: the built-in measures, and those of --metrics for data of its layout."""
    files = TemporaryDirectory()  # each process has its own: none waits for another's locks
    own = []
    for path in args.metrics:
        with user_errors(f"--metrics {path}"):
            # An absolute path is never taken for a name of the Hub, whose code would be downloaded and run.
            own.append(load_metric(os.path.abspath(path), cache_dir=files.name))
    for eval_set in eval_sets.values():
        chosen = [metric for metric in own if ("docid" in str(metric.features)) != eval_set.scored]
        eval_set.metric = combine([BuiltIn(cache_dir=files.name), *chosen])
        eval_set.metric.files = files  # deleted with it
    for path, metric in zip(args.metrics, own):
        if not any(metric in eval_set.metric.evaluation_modules for eval_set in eval_sets.values()):
            raise UserError(f"--metrics {path}: no held-out data is of its kind, rankings or pairs of score and label")


def average(found, eval_sets):
    """Return {measure: mean over collections}, and the value of each if there are several, as the main process has
    computed them. found: {collection: {measure: number, {query id: number} or a text, which is left out}}."""
    numbers = {}
    for name, values in found.items():
        numbers[name] = {}
        for measure, value in values.items():
            if isinstance(value, dict):  # a query without a value counts as 0
                value = sum(value.values()) / len(eval_sets[name].queries)
            if not isinstance(value, str):
                # combine() adds a prefix to names that several metrics have
                numbers[name][measure.removeprefix("built_in_")] = value
    means = pd.DataFrame(numbers).mean(axis=1).to_dict()
    for name, values in numbers.items() if len(numbers) > 1 else ():
        means |= {f"{name} {measure}": value for measure, value in values.items()}
    return broadcast_object_list([means])[0]


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


def load_optimizers(path, model, optimizers):
    """Restore the tensors of optimizers, sharded like their parameters; hyperparameters are not restored but kept."""
    found = dcp.get_optimizer_state_dict(model, optimizers)
    tensors = load_file(path / "optimizer.safetensors")
    if tensors:  # plain SGD has none
        for name, state in found["state"].items():
            found["state"][name] = {key: tensors[f"{name}.{key}"].clone() for key in state}  # as in own_memory
        options = dcp.StateDictOptions(full_state_dict=True)
        dcp.set_optimizer_state_dict(model, optimizers, found, options=options)


def checksums(folder):
    """Return the lines of SHA256SUMS, as `sha256sum` prints them, for all other files in a folder."""
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "SHA256SUMS"):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{digest}  {path.relative_to(folder)}\n")
    return "".join(lines)


def save_checkpoint(folder, model, tensors, state, keep, best):
    """Write `folder` (model, optimizer's tensors, state as JSON, checksums), then remove all checkpoints but the
    newest `keep` and that of step `best`."""
    if is_intact(folder):  # saved already; a kill while it is replaced would lose it
        return
    with save_atomically(folder) as part:
        model.save_pretrained(str(part), create_model_card=False)
        save_file(tensors, part / "optimizer.safetensors")
        (part / "state.json").write_text(json.dumps(state))
        (part / "SHA256SUMS").write_text(checksums(part))
    steps = sorted(folder.parent.glob("step_*"))
    kept = [path for path in steps if path <= folder][-keep:]  # later ones are damaged: a resume did not use them
    kept.append(folder.with_name(f"step_{best:08}"))
    partial_ones = folder.parent.glob(".step_*")
    for path in {*steps, *partial_ones} - {*kept}:
        shutil.rmtree(path)


def is_intact(path):
    """Return whether the files of a checkpoint match its checksums."""
    with suppress(OSError, ValueError):
        return (path / "SHA256SUMS").read_text() == checksums(path)
    return False


def best_evaluation(metrics, name):
    """Return (step of the best evaluation by the measure `name`, of which more is better; number of evaluations after
    it), without the evaluation before the first step; (0, 0) if there is none."""
    values = {record["step"]: record[name] for record in metrics if record["step"] and name in record}
    values = pd.Series(values, dtype=float).fillna(-math.inf)
    best = int(values.idxmax()) if len(values) else 0
    return best, int((values.index > best).sum())


def newest_checkpoint(folder):
    """Return (folder, state) of the newest intact checkpoint, (newest folder, None) if none is intact, or (None, None)
    if there is no checkpoint; report and skip damaged ones."""
    found = sorted(folder.glob("step_*"), reverse=True)
    for path in found:
        with suppress(ValueError):  # the text of a file that was edited, checksum included
            if is_intact(path):
                return path, json.loads((path / "state.json").read_text())
        print(f"{path}: skipped, it is damaged", file=sys.stderr)
    return next(iter(found), None), None


def flags_of_run(args):
    """Return {flag: value} without those of one launch, which a resume or a rerun must not inherit."""
    launch = ("resume", "accept_changed_data", "accept_changed_schedule")
    return {name: value for name, value in asdict(args).items() if name not in launch}


def find_changes(saved, args, sources):
    """Return what has changed since the checkpoint, [step, name, old, new] of each flag and source; raise UserError if
    it may not change."""
    changes = []
    refused = []
    then = asdict(Args()) | saved["args"]  # a flag may be newer than the checkpoint
    for name, value in flags_of_run(args).items():
        if value == then[name]:
            continue
        changes.append([saved["step"], f"--{name}", then[name], value])
        if name in SCHEDULE.split():
            if not args.accept_changed_schedule:
                refused.append(f"--{name} {value} (was {then[name]}; --accept_changed_schedule allows it)")
        elif name not in MAY_CHANGE.split():
            refused.append(f"--{name} {value} (was {then[name]})")
    for old, new in zip(saved["data"], sources):
        if old != new:
            changes.append([saved["step"], new[0], old[1:], new[1:]])
            if not args.accept_changed_data:
                refused.append(f"{new[0]} has changed (--accept_changed_data allows it)")
    if refused:
        raise UserError(f"--resume: {'; '.join(refused)}; restore it, or start a new --output_dir")
    return changes


def describe_change(step, name, old, new):
    """Return a line of the model card, for people, of what find_changes returns."""
    return f"after step {step:,}: {name} {old} -> {new}"


# ---- a run

LOWER_RATE = "lower --learning_rate, then --resume --accept_changed_schedule"
# What lines of metrics.jsonl contain besides measures of evaluations.
TRAINING = """step loss grad_norm learning_rate rows_per_second tokens_per_second padding_fraction data_wait_fraction
skipped_steps flops_per_second mfu peak_memory_gb evaluation_seconds checkpoint_seconds"""


# {pattern of a GPU's name: its dense TFLOPS by precision}, of the makers' data sheets; without sparsity, and without
# TF32, which float32 runs do not use. The figure of an H100 is that of SXM.
PEAK_TFLOPS = {
    r"A100": {"bf16": 312, "fp16": 312, "no": 19.5},
    r"H100 80GB HBM3": {"bf16": 989, "fp16": 989, "no": 67},
    r"H200": {"bf16": 989, "fp16": 989, "no": 67},
    r"L4$": {"bf16": 121, "fp16": 121, "no": 30.3},
    r"RTX 4090$": {"bf16": 165, "fp16": 165, "no": 82.6},
    r"T4$": {"fp16": 65, "no": 8.1},
}


def find_peak(device, precision):
    """Return the peak FLOPs per second of a device, None if it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for pattern, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b{pattern}", name) and precision in tflops:
            return tflops[precision] * 1e12
    return None


class FlopCounter:
    """The floating-point operations of a transformer's training step: 6 N T of its N weights and T tokens (Kaplan et
    al. 2020, section 2.1), and 12 L H Q S**2 of attention in L layers of H heads of Q dimensions, for each text of S
    tokens (Chowdhery et al. 2022, appendix B). Padding is not counted, and neither are embeddings. Recomputed forward
    passes are; with adapters, gradients of frozen weights are not."""

    def __init__(self, model):
        transformer = model.transformers_model
        if transformer is None:  # a static embedding model: only lookups
            self.weights = self.trained = self.attention = 0
            return
        config = transformer.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 1)
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.attention = config.num_hidden_layers * heads * size  # L H Q
        self.weights = transformer.num_parameters(exclude_embeddings=True)  # N
        self.trained = transformer.num_parameters(exclude_embeddings=True, only_trainable=True)

    def __call__(self, micro_batches, passes):
        """Return the FLOPs of a step; passes: 3 (a backward pass counts twice), and 1 for each recomputation."""
        dense = 2 * micro_batches.tokens * (self.weights * (passes - 1) + self.trained)
        return dense + 4 * micro_batches.squares * self.attention * passes


def peak_memory(device):
    """Return the bytes that this process has used at most: of the GPU or, on a CPU, in all."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kB on Linux
    with suppress(RuntimeError):  # of an allocator that does not count, as that of MPS
        return torch.accelerator.max_memory_allocated(device)
    return 0


def start(args):
    """Return the Accelerator of the launch; raise UserError for launches that would train wrongly."""
    # DDP would broadcast buffers in each forward pass, but processes run different numbers of them.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False)
    with user_errors("--report_to, or the launch"):
        accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),  # else processes on CPUs would not form one group
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            log_with=args.report_to or None,
            project_dir=args.output_dir,
            kwargs_handlers=[ddp, InitProcessGroupKwargs(timeout=timedelta(minutes=30))],
        )
    check_launch(accelerator, args)
    if accelerator.mixed_precision == "bf16":
        torch.set_float32_matmul_precision("high")  # TF32 for the loss, which is not autocast
    if args.full_determinism:
        transformers.enable_full_determinism(args.seed)
    transformers.utils.logging.disable_progress_bar()  # else one for each file loaded or saved
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else loading a local file contacts the Hub
    args.gradient_accumulation_steps = accelerator.gradient_accumulation_steps  # a launch may set it
    return accelerator


def check_launch(accelerator, args):
    """Raise UserError for launch configurations that are not supported: some would train wrongly."""
    kind = accelerator.distributed_type
    unsupported = kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM) or accelerator.parallelism_config
    if kind == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        offload = plugin.cpu_ram_efficient_loading or isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        unsupported = unsupported or plugin.fsdp_version != 2 or offload or accelerator.scaler
    if unsupported:
        raise UserError(f"unsupported launch, {kind.value}: use accelerate_configs/fsdp2.yaml (no offload, no fp16)")
    if args.batch_size < accelerator.num_processes:
        raise UserError(f"--batch_size {args.batch_size}: too few rows for {accelerator.num_processes} processes")


class Run:
    """The progress of a run, and what it writes: metrics.jsonl, trackers and checkpoints."""

    # What the state.json of a checkpoint contains, besides the flags and the sources.
    SAVED = ("step", "data_state", "losses", "metrics", "skipped", "scaler", "changes", "finished")

    def __init__(self, args, accelerator):
        self.args = args
        self.accelerator = accelerator
        self.output = Path(args.output_dir)
        self.step = 0  # optimizer steps done
        self.data_state = None  # of row_batches, after the last step
        self.losses = []  # of the steps since the last line of metrics.jsonl
        self.metrics = []  # the lines of metrics.jsonl
        self.skipped = 0  # bad rows
        self.collections = []  # names of what is evaluated on
        self.scaler = None  # state of the gradient scaler (fp16)
        self.changes = []  # of flags and sources by resumes: [step, name, old, new]
        self.finished = False
        self.meter = Counter()  # sums of this process since the last line of metrics.jsonl
        self.signals = []  # received: SIGTERM, SIGINT
        self.find_checkpoint()

    def find_checkpoint(self):
        """Set `checkpoint`, the folder to resume from, and `saved`, its state; None if there is none."""
        if (self.output / "args.yaml").exists() and not self.args.resume:
            raise UserError(f"--output_dir {self.output} contains a run: --resume it, or choose another folder")
        found = None, None
        if self.args.resume and self.accelerator.is_main_process:
            found = newest_checkpoint(self.output / "checkpoints")
        self.checkpoint, self.saved = broadcast_object_list([found])[0]
        if self.checkpoint and not self.saved:
            raise UserError(f"{self.output}/checkpoints: no checkpoint is intact; remove the folder to start anew")
        path = self.checkpoint and self.output / "checkpoints" / self.checkpoint.name
        if not all(gather_object([not path or path.exists()])):
            raise UserError(f"--resume: some process cannot find {self.checkpoint}: it must be on a shared disk")

    def check_changes(self, data):
        """Find what has changed since the checkpoint; raise UserError if it may not change."""
        self.sources = data.description
        self.flags = flags_of_run(self.args)
        if self.saved and not set(self.SAVED) <= set(self.saved):
            raise UserError(f"{self.checkpoint}: of another version of this script: start a new --output_dir")
        self.new_changes = find_changes(self.saved, self.args, self.sources) if self.saved else []

    def begin(self, data, model, optimizers, model_to_save, steps):
        """Restore what the checkpoint contains, if there is one, write args.yaml and metrics.jsonl, print what is
        trained on, and let signals stop the run. `steps`: those of the run."""
        self.model = self.accelerator.unwrap_model(model)
        self.count_flops = FlopCounter(self.model)
        self.optimizers = [optimizer.optimizer for optimizer in optimizers]
        self.model_to_save = model_to_save
        if self.saved:
            with user_errors(f"{self.checkpoint}: not of this model and optimizer"):
                load_optimizers(self.checkpoint, self.model, self.optimizers)
            vars(self).update({name: self.saved[name] for name in self.SAVED})
            if self.accelerator.scaler and self.scaler:  # else the checkpoint is not of fp16
                self.accelerator.scaler.load_state_dict(self.scaler)
        was_finished = self.finished
        self.finished = self.step >= steps
        self.find_best()
        if was_finished and self.finished:  # no step is left under the flags given now: keep those of the run
            self.flags |= self.saved["args"]
            self.accelerator.print(f"the run is finished, after step {self.step:,}: no step is left")
        else:
            self.changes += self.new_changes
            for change in self.new_changes:
                self.accelerator.print(describe_change(*change))
        with user_errors(f"--output_dir {self.output}"):
            self.output.mkdir(parents=True, exist_ok=True)  # after all checks: a refused run leaves no folder
            if self.accelerator.is_main_process:
                lines = [json.dumps(line) + "\n" for line in self.metrics]
                (self.output / "metrics.jsonl").write_text("".join(lines))
                (self.output / "args.yaml").write_text(yaml.safe_dump(self.flags, sort_keys=False))
        config = {name: str(value) for name, value in asdict(self.args).items()}
        self.accelerator.init_trackers("evenstep", config)
        self.announce(data, steps)
        signal.signal(signal.SIGTERM, self.receive)
        signal.signal(signal.SIGINT, self.receive)

    def announce(self, data, steps):
        """Print what is trained, on what, and how far it is."""
        args = self.args
        rows = "streamed" if args.streaming else f"{sum(map(len, data.sources)):,}"
        held_out = sum(map(len, data.held_out)) - data.skipped
        parameters = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        devices = f"{self.accelerator.num_processes} x {self.accelerator.device}"
        self.accelerator.print(
            f"{rows} rows of {', '.join(args.columns)}; {held_out:,} held out; {parameters:,} parameters"
        )
        self.accelerator.print(
            f"step {self.step:,} of {steps:,}: {args.gradient_accumulation_steps} x "
            f"{args.batch_size:,} rows on {devices}, in micro-batches of {args.micro_batch_tokens:,} tokens"
        )

    def receive(self, number, _):
        """Let the loop stop after this signal. After Ctrl-C, another Ctrl-C ends the run at once."""
        self.signals.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def check_step(self, loss, norm, batches):
        """Agree on a step among all processes, by one collective and one wait for the device. Set `stopping` if any
        has received a signal. If any has an error, or the loss is not finite, save the steps already done, and raise
        UserError on all."""
        error = next((str(batch.error) for batch in batches if batch.error), None)
        counts = [len(self.signals), error is not None, sum(batch.skipped for batch in batches)]
        counts = [torch.full_like(loss, count) for count in counts]
        sums = self.accelerator.reduce(torch.stack([loss, *counts]))
        self.loss, stopping, failed, skipped, self.norm = torch.stack([*sums, norm]).tolist()
        self.stopping = stopping > 0
        self.skipped_now = int(skipped)
        if failed:
            error = next(filter(None, gather_object([error])))
        elif self.step == 0 and skipped == self.args.batch_size * len(batches):
            sources = ", ".join(self.args.train_data)
            error = f"{sources}: every row of the first step is bad; choose other --columns or --label_column"
        elif not math.isfinite(self.loss) or not (math.isfinite(self.norm) or self.accelerator.scaler):
            path = self.output / "nonfinite_batch.json"
            rows = gather_object([row.cells for batch in batches for row in batch.rows])
            if self.accelerator.is_main_process:
                path.write_text(json.dumps(rows, indent=1, default=str))
            error = (
                f"step {self.step + 1}: loss {self.loss}, gradient norm {self.norm}: fix the rows (they are in "
                f"{path}) or {LOWER_RATE}"
            )
        if error:
            self.save()
            raise UserError(error)

    def count_step(self, batches, seconds):
        """Count an optimizer step of this process' batches, which took `seconds`."""
        self.step += 1
        self.data_state = batches[-1].state
        self.losses.append(self.loss)
        self.skipped += self.skipped_now
        self.meter["seconds"] += seconds
        self.meter["skipped_steps"] += not math.isfinite(self.norm)  # by the scaler, inside of fused AdamW
        self.meter["rows"] += self.args.batch_size * len(batches) - self.skipped_now
        for batch in batches:
            self.meter["waited"] += batch.waited
            self.meter.update(tokens=batch.micro_batches.tokens, padded=batch.micro_batches.padded)
            self.meter["flops"] += self.count_flops(batch.micro_batches, batch.passes)

    @contextmanager
    def clock(self, name):
        """Add the seconds that the block takes to the next line of metrics.jsonl."""
        started = time.perf_counter()
        yield
        self.meter[f"{name}_seconds"] += time.perf_counter() - started

    def training_record(self):
        """Return the record of the steps since the last one."""
        meter = self.meter
        device = self.accelerator.device
        counts = [meter["tokens"], meter["padded"], meter["flops"] // 10**6, peak_memory(device)]
        counts = self.accelerator.gather(torch.tensor([counts], device=device))  # (P, 4)
        tokens, padded, megaflops, _ = counts.sum(0).tolist()
        seconds = meter["seconds"]
        record = {
            "loss": sum(self.losses) / len(self.losses),
            "grad_norm": self.norm,
            "learning_rate": self.optimizers[0].param_groups[0]["lr"],
            "rows_per_second": meter["rows"] / seconds,
            "tokens_per_second": tokens / seconds,
            "padding_fraction": 1 - tokens / padded,
            "data_wait_fraction": meter["waited"] / seconds,
            "flops_per_second": megaflops * 1e6 / seconds,
            "peak_memory_gb": counts[:, 3].max().item() / 1e9,
        }
        if peak := find_peak(device, self.accelerator.mixed_precision):
            record["mfu"] = record["flops_per_second"] / (peak * len(counts))
        record |= {name: value for name, value in meter.items() if name.endswith("_seconds")}
        if self.accelerator.scaler:  # of fp16
            record["skipped_steps"] = meter["skipped_steps"]
        self.losses = []
        self.meter = Counter()
        return record

    def log(self, record):
        """Append the record of a step to metrics.jsonl and the trackers."""
        self.metrics.append({"step": self.step, **record})
        self.accelerator.log(record, step=self.step)
        if self.accelerator.is_main_process:
            with open(self.output / "metrics.jsonl", "a") as file:
                file.write(json.dumps(self.metrics[-1]) + "\n")
            measures = {name: round(record[name], 4) for name in self.measures() if name in record}
            if measures:
                tqdm.write(f"step {self.step:,}: {measures}")

    def measures(self):
        """Return the names of what evaluations measure, without those of single collections."""
        prefixes = tuple(f"{name} " for name in self.collections)
        names = dict.fromkeys(chain.from_iterable(self.metrics))
        return [name for name in names if name not in TRAINING.split() and not name.startswith(prefixes)]

    def find_best(self):
        """Set `best_step`, that of the best evaluation, and `finished` if patience has ended. The main process
        decides, should an edited evaluate() differ between processes."""
        found = best_evaluation(self.metrics, self.args.metric_for_best_model)
        self.best_step, since_best = broadcast_object_list([found])[0]
        self.finished = self.finished or 0 < self.args.early_stopping_patience <= since_best

    def best_checkpoint(self):
        """Return the folder of the best evaluation's checkpoint; raise UserError if it is not intact."""
        path = self.output / f"checkpoints/step_{self.best_step:08}"
        if not is_intact(path):
            raise UserError(f"{path}: the best checkpoint is damaged or gone; model/ is not written")
        return path

    def check_metric(self):
        """Raise UserError if the evaluations do not measure --metric_for_best_model."""
        measured = [name for line in self.metrics if not line["step"] for name in line if name != "step"]
        name = self.args.metric_for_best_model
        if name not in [None, *measured]:
            choices = ", ".join(measured) or "none, as there is nothing to evaluate on"
            raise UserError(f"--metric_for_best_model {name} is not measured by evaluations: choose one of {choices}")

    def save(self):
        """Write a checkpoint; every process must call it."""
        if self.step == 0:
            return
        options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)  # unsharded, on the main process only
        weights, states = dcp.get_state_dict(self.model, self.optimizers, options=options)
        if self.accelerator.is_main_process:
            if not all(weight.isfinite().all() for weight in weights.values()):
                raise UserError(f"step {self.step}: a weight is not finite: {LOWER_RATE}")
            if self.model_to_save is not self.model:  # FSDP
                self.model_to_save.load_state_dict(weights)
            tensors = {}
            for name, state in states["state"].items():  # of the optimizer, by parameter
                tensors |= {f"{name}.{key}": tensor for key, tensor in state.items()}
            self.scaler = self.accelerator.scaler and self.accelerator.scaler.state_dict()
            state = {name: getattr(self, name) for name in self.SAVED} | {"args": self.flags, "data": self.sources}
            folder = self.output / f"checkpoints/step_{self.step:08}"
            save_checkpoint(folder, self.model_to_save, tensors, state, self.args.save_total_limit, self.best_step)
        self.accelerator.wait_for_everyone()

    def write_model(self, model, card):
        """Write model/, and print where it is; card: the text of its README.md."""
        with save_atomically(self.output / "model") as part:
            if self.args.lora_rank:
                model[0].model.save_pretrained(str(part / "adapter"))  # --lora_adapter trains it on
                model[0].model = model[0].model.merge_and_unload()  # loads without peft
            model.save_pretrained(str(part), create_model_card=False)
            (part / "README.md").write_text(card)
        print(f"the model is in {self.output / 'model'}")

    def describe(self, held_out):
        """Return what the card of the model says of the run; held_out: number of held-out rows."""
        args = self.args
        steps = self.best_step or self.step
        last = {}
        for line in self.metrics:
            if line["step"] <= steps:
                last |= line
        measured = ", ".join(f"{name} {last[name]:.4f}" for name in self.measures() if name in last)
        defaults = asdict(Args()) | {"loss_kwargs": {}}
        words = as_words({name: value for name, value in self.flags.items() if value != defaults[name]})
        rows = args.batch_size * args.gradient_accumulation_steps
        on = ", ".join([f"{held_out} held-out rows", *args.eval_beir])
        lines = [f"Trained for {steps:,} steps of {rows:,} rows, by the command below."]
        lines += [f"On {on}: {measured or 'not evaluated'}"]
        lines += ["", f"    {shlex.join(['python', sys.argv[0], *words])}"]
        if self.changes:
            lines += ["", "What resumes changed:", "", *(f"- {describe_change(*change)}" for change in self.changes)]
        return "\n".join(lines)


def plot_metrics(metrics, measures, path):
    """Plot loss, measures of evaluations, speed and memory over the steps."""
    names = ["loss", *measures, "tokens_per_second", "peak_memory_gb"]
    frame = pd.DataFrame(metrics).set_index("step").filter(names)
    frame = frame.interpolate("index", limit_area="inside")  # lines from one evaluation to the next
    figure = Figure(figsize=(4 * len(frame.columns), 3.6), layout="constrained")
    frame.plot(ax=figure.subplots(1, len(frame.columns)), subplots=True, grid=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    status = 0
    try:
        main(parse_args(sys.argv[1:]))
    except (Exception, KeyboardInterrupt) as error:
        memory = "lower --micro_batch_tokens, or set --grad_cache, then --gradient_checkpointing"
        status = print_error(error, "--resume continues from the newest checkpoint, if there is one", memory)
    sys.stdout.flush()
    os._exit(status)  # pyarrow threads that still read ahead can hang or abort a normal exit (apache/arrow 45214)
