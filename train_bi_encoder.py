"""Train a bi-encoder (texts -> embeddings) for retrieval, on a corpus of any size, on one process or many.

    python train_bi_encoder.py --batch_size 2048 --learning_rate 5e-3 --num_train_epochs 4   # the demo, on a CPU
    python train_bi_encoder.py --model_name_or_path BAAI/bge-base-en-v1.5 --train_data 'pairs/*.parquet' \
        --output_dir runs/bge --batch_size 1024 --grad_cache                                 # one GPU
    torchrun --nproc_per_node 2 train_bi_encoder.py args.yaml --resume           # two processes, on GPUs or CPUs
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_bi_encoder.py args.yaml --resume

A row is an anchor, a positive, any number of hard negatives (a column for each) and optionally a label; or an anchor
with lists of positives and negatives, from which each epoch draws one positive and --num_negatives negatives:

    {"question": "read a gzip file", "code": "def read(path): ...", "wrong": "def write(path): ..."}
    {"query": "read a gzip file", "pos": ["def read(file): ..."], "neg": ["def write(path): ...", "def cut(x): ..."]}

The gradient depends on the batch alone (--batch_size rows over all processes). Each process encodes its part of the
texts, longest first, in micro-batches of at most --micro_batch_tokens; the embeddings are gathered for one loss over
the whole batch. So the number of processes, --micro_batch_tokens and --grad_cache change time and memory, but not the
gradient (except with dropout, whose random masks depend on how texts are grouped).

Output: model/ (loads in sentence-transformers), checkpoints/, metrics.jsonl, args.yaml and training.png.
Left out on purpose: uploads to the Hub, asymmetric models (Router), images, DeepSpeed, models from scratch.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate>=1.15,<2", "datasets>=5.2,<6", "filelock>=4.2,<5", "fsspec[http]>=2026.9",
#   "ir_measures>=0.4.3,<1", "matplotlib>=3.11,<4", "numpy>=2.4,<3", "pandas>=2.2,<4", "pyarrow>=26,<27",
#   "pyyaml>=6.0,<7", "safetensors>=0.8,<1", "sentence-transformers>=6.2,<7", "tokenizers>=0.23,<1", "torch==2.13.0",
#   "tqdm>=4.70,<5", "transformers>=5.23,<6", "zstandard>=0.25,<1"]
# ///

import copy
import hashlib
import inspect
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
import traceback
from bisect import bisect_right
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import datasets
import fsspec
import ir_measures
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
import transformers
import yaml
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from filelock import FileLock
from matplotlib.figure import Figure
from pyarrow.dataset import ParquetFragmentScanOptions
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses, modules
from tokenizers import Tokenizer
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint as recompute
from tqdm.auto import tqdm

# Shapes: B rows of a batch, C columns (anchor, documents), D embedding dimensions, N texts of a batch, anchors first.

# ---- errors and options (same in train_cross_encoder.py)


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


def flag(default, help):
    """Return the dataclass field of a command-line option."""
    kind = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**kind, metadata={"help": help})


def check_flags(parser, argv):
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
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        words += [f"--{name}", *map(str, values)] if values not in ([], [None]) else []
    return words


# ---- options

DEMO = "data/python_code"  # where prepare_corpus.py writes the demo corpus and its untrained models
TEACHER_LOSSES = ("margin_mse", "kl")
ABOVE_ZERO = """batch_size micro_batch_tokens gradient_accumulation_steps length_window max_length save_total_limit
query_max_length logging_steps num_train_epochs learning_rate mixing_weights matryoshka_dims"""


@dataclass
class Args:
    # data
    train_data: list[str] = flag([], "paths, globs, folders, URLs, Hub ids, ID:config:split; none: the demo corpus")
    eval_data: list[str] = flag([], "sources of held-out rows; none: the first rows of --train_data")
    eval_rows: int | None = flag(None, "rows held out to evaluate on; None: 1,000, but at most a tenth of the rows")
    eval_beir: list[str] = flag([], "small collections to evaluate on as well: BEIR folders, or Hub ids (NanoBEIR)")
    eval_split: str = flag("test", "split of the judgments of --eval_beir")
    streaming: bool = flag(False, "read the sources front to back instead of at random from a memory-mapped table")
    columns: list[str] = flag([], "columns of anchor, positive, negatives...: texts or lists; none: all but the label")
    num_negatives: int | None = flag(None, "negatives of a row: columns to use, or texts drawn from lists; None: all")
    corpus: list[str] = flag([], "sources of the documents by id; --columns then contain ids, not texts")
    queries: list[str] = flag([], "sources of the queries by id, for the first column")
    corpus_columns: list[str] = flag(["_id", "title", "text"], "id column of --corpus, then text columns, joined")
    query_columns: list[str] = flag(["_id", "text"], "id column of --queries, then text columns, joined")
    label_column: list[str] = flag([], "columns with a score or a list of scores; several are joined row by row")
    mixing_weights: list[float] = flag([], "weight of each source; none: its number of rows (streams: equal weights)")
    mix_by: Literal["row", "batch"] = flag("row", "mix sources within a batch, or take each batch from one source")
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = flag("all_exhausted", "when a mixed epoch ends")
    shuffle_buffer: int = flag(10_000, "rows that are shuffled together; 0: keep the order of the files")
    length_window: int = flag(1, "batches whose rows are sorted by length and then cut into batches; 1: not sorted")
    on_bad_row: Literal["error", "skip"] = flag("error", "stop at an empty text or a bad label, or skip and count it")
    # model
    model_name_or_path: str = flag(f"{DEMO}/bi_encoder", "Hub id or folder")
    max_length: int | None = flag(None, "tokens a text is truncated to; None: the model's own")
    query_max_length: int | None = flag(None, "tokens of a query, without special ones; None: --max_length")
    pooling: Literal["mean", "cls", "max", "lasttoken"] | None = flag(None, "replace the model's pooling")
    dropout: float | None = flag(None, "dropout probability of the transformer; None: the model's own")
    lora_rank: int = flag(0, "train LoRA adapters of this rank instead of all weights; 0: train all weights")
    attn_implementation: str | None = flag(None, "attention kernels: sdpa, flash_attention_2, ...; None: the default")
    prompts: list[str] = flag([], "prefix of queries (or one per source), then prefix of documents; or one for both")
    # step
    batch_size: int = flag(64, "rows of a batch, over all processes")
    micro_batch_tokens: int | None = flag(None, "tokens per forward; None: 2,048 (CPU), 16,384 (GPU), 2**20 (static)")
    gradient_accumulation_steps: int = flag(1, "batches per optimizer step, each with its own in-batch negatives")
    grad_cache: bool = flag(False, "run each forward pass twice, to hold the activations of one micro-batch only")
    gradient_checkpointing: bool = flag(False, "recompute each layer's activations in backward; for long texts")
    loss: str = flag("infonce", "infonce; margin_mse or kl, for teacher scores; or a class of sentence-transformers")
    loss_kwargs: str = flag("{}", 'JSON: {"temperature": 0.05}; kl, margin_mse: teacher_temperature, infonce: weight')
    guide_model: str | None = flag(None, "Hub id or folder of a model that detects false negatives for infonce")
    matryoshka_dims: list[int] = flag([], "sum the loss over embeddings cut to each of these numbers of dimensions")
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
    output_dir: str = flag("runs/bi_encoder", "folder for everything the run writes")
    resume: bool = flag(False, "resume from the newest intact checkpoint in --output_dir, or start if there is none")
    accept_changed_data: bool = flag(False, "resume although sources have changed: rows may be repeated or missed")
    accept_changed_schedule: bool = flag(False, "resume although flags of the schedule have changed; the card says so")
    eval_steps: int = flag(0, "steps between evaluations; 0: a tenth of the run")
    metric_for_best_model: str | None = flag(None, "save the model that evaluates best by this measure; None: last")
    early_stopping_patience: int = flag(0, "stop after this many evaluations without a new best; 0: never")
    save_steps: int = flag(500, "steps between checkpoints; 0: only at the end")
    save_total_limit: int = flag(2, "checkpoints kept")
    logging_steps: int = flag(10, "steps between lines of metrics.jsonl")
    report_to: list[str] = flag([], "trackers of Accelerate: tensorboard, wandb, ...")


# same in train_bi_encoder.py, train_cross_encoder.py, eval_incremental.py
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
    parser = transformers.HfArgumentParser(Args, description=__doc__.splitlines()[0], allow_abbrev=False)
    for action in parser._actions:  # --help prints each flag once, without its alias with dashes
        action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
    check_flags(parser, argv)
    if argv and argv[0].endswith((".yaml", ".yml", ".json")):
        with user_errors(f"{argv[0]}: not a file of flags"):
            words = as_words(dict(yaml.safe_load(Path(argv[0]).read_text())))
        check_flags(parser, words)
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
    if not args.train_data:
        args.train_data = [f"{DEMO}/train/stdlib-*.parquet", f"{DEMO}/train/packages-*.parquet"]
        args.eval_data = args.eval_data or [f"{DEMO}/heldout/*.parquet"]
        if not Path(DEMO).is_dir():
            parser.error(f"--train_data: not given, and no demo corpus in {DEMO}: run python prepare_corpus.py")
    if len(args.mixing_weights) not in (0, len(args.train_data)):
        parser.error(f"--mixing_weights: give {len(args.train_data)} numbers, one for each source")
    if args.streaming and not (args.max_steps or args.rows_per_epoch):
        parser.error("--streaming requires --max_steps or --rows_per_epoch: the length of a stream is unknown")
    if args.loss in TEACHER_LOSSES and not args.label_column:
        parser.error(f"--loss {args.loss} requires teacher scores: set --label_column")
    if args.early_stopping_patience and not args.metric_for_best_model:
        parser.error("--early_stopping_patience requires --metric_for_best_model, such as nDCG@10")
    if args.guide_model and args.loss != "infonce":
        parser.error(f"--guide_model requires --loss infonce, not {args.loss}")
    if len(args.prompts) not in (0, 1, 2, len(args.train_data) + 1):
        parser.error("--prompts takes one, or two (queries, documents), or one for each source and one for documents")
    return args


# ---- data (same in train_cross_encoder.py)

FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json", ".ndjson": "json",
           ".csv": "csv", ".tsv": "csv", ".txt": "text"}  # fmt: skip
UNSUPPORTED = f"not one of {' '.join(FORMATS)}, with or without .gz or .zst; prepare_corpus.py converts .orc"
BLOCK = 100  # neighbouring rows of a mapped table that are read together; a shuffle window mixes many blocks


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
    if os.path.exists(os.path.join(path, "state.json")):  # of Dataset.save_to_disk
        return sorted(map(str, Path(path).glob("*.arrow")))
    if suffix := file_suffix(path):  # decided by suffix, so that a missing file is not mistaken for a Hub id
        builder = datasets.load_dataset_builder(FORMATS[suffix], data_files=path)
    elif path.endswith(".orc") or os.path.isfile(path) or any(Path(path).glob("*.orc")):
        raise UserError(UNSUPPORTED)
    else:
        path, config, split = path.split(":") if path.count(":") == 2 else (path, config, split)
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


class Source:
    """The rows of a source, epoch after epoch, in windows that are shuffled as a whole: a pure function of the files,
    the seed and `number`. `state` (JSON) is the position after the last row taken. clean: as in open_data."""

    def __init__(self, name, number, clean, args):
        self.name, self.number, self.clean, self.args = name, number, clean, args
        self.columns = list(dict.fromkeys([*args.columns, *args.label_column]))
        self.window, self.held_out, self.files = args.shuffle_buffer or 1000, 0, list_files(name)
        self.leading = 0  # files of a stream with the held-out rows; not permuted, so that skip() skips these rows
        self.dataset = None if args.streaming else self.open(self.files)
        self.seek(None)

    def __len__(self):  # unknown for a stream: 1, so that streams are mixed equally by default
        return 1 if self.args.streaming else len(self.dataset) - self.held_out

    def open(self, files):
        return open_files(files, self.args.streaming).select_columns(self.columns)

    def hold_out(self, count):
        """Return clean() of the first `count` rows, and exclude them from training."""
        table = [] if self.args.streaming else self.dataset[:count]
        while self.args.streaming and len(table) < count and self.leading < len(self.files):
            self.leading += 1
            table = pa.concat_tables(self.open(self.files[: self.leading]).take(count).iter(count))
        self.held_out = len(table)
        return self.clean(table, self.name, self.number, self.random())

    def seek(self, state):
        """Continue after `state`, or from the beginning if it is None."""
        self.state = dict(state or {"epoch": 0, "window": 0, "used": 0, "skipped": 0, "stream": None})
        self.table, self.windows = [], self.read_windows()

    def take(self, count):
        """Return a Table of the next `count` valid rows."""
        parts = []
        while count:
            if self.state["used"] >= len(self.table):
                with user_errors(self.name):
                    self.table = next(self.windows)
            parts.append(self.table.slice(self.state["used"], count))
            self.state["used"] += len(parts[-1])
            count -= len(parts[-1])
        return pa.concat_tables(parts)

    def read_windows(self):
        """Yield the windows of all epochs, starting at `state`, and update `state` with each."""
        while True:
            found = self.state["window"] or self.state["used"]
            for table, stream in self.read_stream() if self.args.streaming else self.read_blocks():
                table, bad = self.clean(table, self.name, self.number, self.random(self.state["window"], 1))
                if self.args.shuffle_buffer:
                    table = table.take(self.random(self.state["window"]).permutation(len(table)))
                if not self.state["used"]:  # else its bad rows were counted before the resume
                    self.state["skipped"] += bad
                self.state["stream"], found = stream, found or len(table)
                yield table
                self.state.update(window=self.state["window"] + 1, used=0)
            if not found:
                raise UserError(f"no valid row is left to train on after --eval_rows {self.args.eval_rows}")
            self.state.update(epoch=self.state["epoch"] + 1, window=0, used=0, stream=None)

    def read_blocks(self):
        """Yield (Table, None) for each window of an epoch from `state` on: random blocks of neighbouring rows."""
        block = min(BLOCK, self.window)
        blocks, count = np.arange(math.ceil(len(self) / block)), self.window // block
        if self.args.shuffle_buffer:
            self.random().shuffle(blocks[: len(self) // block])  # a short last block stays last
        for first in range(self.state["window"] * count, len(blocks), count):
            starts = (self.held_out + blocks[first : first + count] * block).tolist()
            # As dataset[start : start + block] does, without the 70 µs that formatting takes.
            yield pa.concat_tables([self.dataset.data.fast_slice(start, block) for start in starts]), None

    def read_stream(self):
        """Yield (Table, state of the stream before it) for each window of an epoch; a resume loads that state to read
        the window again. Only files are permuted: `datasets` does not resume its own shuffling exactly."""
        files = self.files[self.leading :]
        if self.args.shuffle_buffer:
            files = [files[i] for i in self.random().permutation(len(files))]
        stream = self.open(self.files[: self.leading] + files).skip(self.held_out)
        if self.state["stream"]:
            stream.load_state_dict(self.state["stream"])
        before = self.state["stream"] or stream.state_dict()  # does not reflect a loaded state before the first row
        for table in stream.iter(self.window):
            yield table, before
            before = stream.state_dict()

    def random(self, *keys):
        """Return the random generator of this source, its epoch and `keys`."""
        return np.random.default_rng([self.args.seed, self.number, self.state["epoch"], *keys])


def as_texts(column, name, ids=False):
    """Return a column of texts, or of `ids`, as large_string; null where there is none."""
    kind, advice = column.type, None
    if isinstance(kind, pa.JsonType):  # what `datasets` makes of a column of several types
        advice = "rewrite it by prepare_corpus.py"
    elif pa.types.is_nested(kind):
        advice = "write its texts as a column of their own; Dataset.flatten() of `datasets` does so for structs"
    elif pa.types.is_primitive(kind) and not ids:
        advice = f"choose other columns or, to train on it, set --label_column {name}"
    if advice:
        raise UserError(f"column {name!r} holds {str(kind)[:100]}, not texts: {advice}")
    return column.cast(pa.large_string())


def join_texts(columns):
    """Return the texts of {name: column of texts}, joined row by row."""
    columns = [pc.fill_null(as_texts(column, name), "") for name, column in columns.items()]
    return pc.utf8_trim_whitespace(pc.binary_join_element_wise(*columns, pa.scalar(" ", pa.large_string())))


def flatten(columns, read):
    """Flatten columns of values, or of lists of values, into (values, row of each, column number of each), sorted by
    row; read(values, column number) casts the values of each column to one common type."""
    values, rows = [], []
    for number, column in enumerate(columns):
        part, row = column.combine_chunks(), np.arange(len(column))
        if pa.types.is_nested(part.type) and not pa.types.is_struct(part.type):
            part, row = pc.list_flatten(part), pc.list_parent_indices(part).to_numpy()
        values, rows = [*values, read(part, number)], [*rows, row]
    numbers, rows = np.repeat(np.arange(len(rows)), list(map(len, rows))), np.concatenate(rows)
    order = np.argsort(rows, kind="stable")
    return pa.concat_arrays(values).take(order), rows[order], numbers[order]


def parse_labels(column):
    """Return a column of numbers or lists of numbers; texts are parsed as JSON."""

    def parse(text):
        with suppress(ValueError, TypeError):
            return np.asarray(json.loads(text), float).tolist()

    is_text = column.type in (pa.string(), pa.large_string()) or isinstance(column.type, pa.JsonType)
    return pa.chunked_array([[parse(text) for text in column.to_pylist()]]) if is_text else column


def read_groups(table, lookups, args, random):
    """Return ({column: values}, problems as in drop_bad_rows) for a Table as read. Columns: "query", large_string;
    "documents", lists of large_string, the positive first; "length", bytes; with --label_column, "labels", lists of
    float64. From columns of lists, `random` draws one positive and --num_negatives of the other documents."""
    table.validate(full=True)  # offsets of a damaged Arrow file may be out of bounds
    (anchor, *names), n, limit = args.columns, len(table), args.num_negatives
    lists = any(pa.types.is_nested(table[name].type) for name in names)
    names = names if lists or limit is None else names[: 1 + limit]

    def read(texts, number):
        if not pa.types.is_struct(texts.type):
            return as_texts(texts, names[number], ids=bool(lookups[1]))
        available = [field.name for field in texts.type]
        fields = {name: texts.field(name) for name in args.corpus_columns[1:] if name in available}
        if not fields:
            flags = f"--corpus_columns {args.corpus_columns[0]} {' '.join(available)}"
            raise UserError(f"column {names[number]!r} holds structs: to read its fields, set {flags}")
        return join_texts(fields)

    documents, rows, numbers = flatten([table[name] for name in names], read)
    kept, counts = np.arange(len(rows)), np.bincount(rows, minlength=n)
    places = kept - (counts.cumsum() - counts)[rows]  # position of each document in its row
    negative, sampled = (numbers if names[1:] else places) > 0, lists and (names[1:] or limit is not None)
    if sampled:
        rank = pd.Series(random.random(len(rows))).groupby([rows, negative]).rank()  # random order within its group
        kept = np.flatnonzero(rank <= np.where(negative, len(rows) if limit is None else limit, 1))
    offsets = np.append(0, np.bincount(rows[kept], minlength=n).cumsum())

    texts, lengths, problems = [], 0, {}
    queries = as_texts(table[anchor].combine_chunks(), anchor, ids=bool(lookups[0]))
    documents = documents.take(kept) if sampled else documents
    parts = (queries, np.arange(n), np.arange(n)), (documents, rows[kept], rows[~negative])
    for (part, owners, required), lookup, name in zip(parts, lookups, (repr(anchor), " or ".join(map(repr, names)))):
        part = lookup.texts(part) if lookup else part
        blank = pc.fill_null(pc.or_(pc.equal(pc.binary_length(part), 0), pc.utf8_is_space(part)), True)
        bad = np.isin(np.arange(n), owners[blank.to_numpy(False)]) | ~np.isin(np.arange(n), required)
        problems[f"no text has the id in {name}" if lookup else f"{name} has no text"] = pa.array(bad)
        lengths += np.bincount(owners, pc.fill_null(pc.binary_length(part), 0), n)
        texts.append(part)
    columns = {"query": texts[0], "documents": pa.ListArray.from_arrays(offsets, texts[1]), "length": lengths}
    if args.label_column:
        with user_errors(f"--label_column {' '.join(args.label_column)}"):
            labels = [parse_labels(table[name]) for name in args.label_column]
            labels, owners, _ = flatten(labels, lambda values, _: values.cast(pa.float64()).fill_null(math.nan))
        finite, sizes = pc.is_finite(labels).to_numpy(False), np.bincount(owners, minlength=n)
        bad = np.isin(np.arange(n), owners[~finite]) | (sizes == 0)
        if sampled:  # draw the labels of the documents drawn
            bad, places = bad | (sizes != counts), places + (sizes.cumsum() - sizes)[rows]
            labels = pa.concat_arrays([labels, pa.array([math.nan])]).take(places[kept].clip(max=len(labels)))
        problems[f"{' '.join(args.label_column)!r} has missing, extra or non-finite numbers"] = pa.array(bad)
        columns["labels"] = pa.ListArray.from_arrays(offsets if sampled else np.append(0, sizes.cumsum()), labels)
    return columns, problems


def drop_bad_rows(table, problems, original, source, args):
    """Return (Table of the rows without a problem, number of the others); raise UserError for the first of the others
    unless --on_bad_row is skip. problems: {description: (n,) bool}, null: True. `original`: the rows as read. If most
    rows have the same problem, the column is wrong: to skip them would leave little or nothing."""
    where = np.stack([pc.fill_null(rows, True).to_numpy(False) for rows in problems.values()])  # (problems, n)
    bad = where.any(0)
    if args.on_bad_row == "error" and bad.any():
        row = int(bad.argmax())
        number = where[:, row].argmax()
        problem, values = list(problems)[number], str(original.slice(row, 1).to_pylist()[0])[:200]
        count, rows = where[number].sum(), len(original)
        if count > max(1, rows / 2):
            raise UserError(f"{source}: {problem} in {count} of {rows} rows, as in {values}; convert this column to "
                            "texts (numbers for a label), or choose others: --columns, --label_column")  # fmt: skip
        raise UserError(f"{source}: {problem} in the row {values}; fix the row, or pass --on_bad_row skip")
    return table.filter(pa.array(~bad)) if bad.any() else table, int(bad.sum())


def draw_sources(drawn, weights, count):
    """Return the source of each of the next `count` rows, and add them to `drawn`, the rows drawn of each source: the
    only state. The quota method (Balinski and Young 1975) always keeps every source within a row of its share."""
    if len(weights) == 1:
        drawn[0] += count
        return [0] * count
    choices, total = [], sum(weights)
    for row in range(sum(drawn) + 1, sum(drawn) + count + 1):
        below = [source for source, weight in enumerate(weights) if drawn[source] < weight * row / total]
        choices.append(min(below, key=lambda source: (drawn[source] + 1) / weights[source]))
        drawn[choices[-1]] += 1
    return choices


def row_batches(sources, weights, args, state=None):
    """Yield (Table of a batch, state after it) without end: a pure function of sources, seed and batch size.
    Each batch has its own state (JSON), so prefetching loses no row. "cut": batches taken from the length window."""
    state = state or {"drawn": [0] * len(sources), "sources": [None] * len(sources), "cut": 0}
    for source, saved in zip(sources, state["sources"]):
        source.seek(saved)
    state = {**state, "sources": [dict(source.state) for source in sources]}
    count = args.batch_size * args.length_window
    while True:
        drawn, order = list(state["drawn"]), np.arange(args.length_window)
        choices = draw_sources(drawn, weights, count if args.mix_by == "row" else 1)
        choices *= count // len(choices)
        tables = [sources[number].take(rows) for number, rows in enumerate(np.bincount(choices)) if rows]
        table = pa.concat_tables(tables).combine_chunks()
        if len(tables) > 1:  # from the order of `tables` to that of `choices`
            table = table.take(np.argsort(np.argsort(choices, kind="stable")))
        if args.length_window > 1:
            table = table.take(np.argsort(table["length"], kind="stable"))
            np.random.default_rng([args.seed, *state["drawn"]]).shuffle(order)
        after = {"drawn": drawn, "sources": [dict(source.state) for source in sources], "cut": 0}
        for cut in range(state["cut"] + 1, args.length_window + 1):
            rows = table.slice(order[cut - 1] * args.batch_size, args.batch_size)
            yield rows, {**state, "cut": cut} if cut < args.length_window else after
        state = after


class TextLookup:
    """Texts by id from a memory-mapped table. Its index (sorted 64-bit hashes of the ids, and the row of each) is also
    a memory-mapped file, built once: 16 bytes per text on disk, none in memory."""

    def __init__(self, sources, columns):
        files = [file for source in sources for file in list_files(source)]
        self.name, self.fingerprint = sources[0], data_fingerprint(files)
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
            pair = self.ids(self.dataset[order[first : first + 2].tolist()]).to_pylist()
            raise UserError(f"ids {pair} are the same, or have the same 64-bit hash: change one")
        return np.stack([hashes, order])

    def texts(self, ids):
        """Return the texts of a column of ids, large_string; null for an unknown id."""
        places = np.searchsorted(self.index[0], self.hashes(ids)).clip(max=len(self.dataset) - 1)
        table = self.dataset[self.index[1, places].tolist()].combine_chunks()  # else one chunk for each row
        texts = join_texts({name: table[name] for name in self.text_columns})
        return pc.if_else(pc.equal(self.ids(table), ids), texts, None).combine_chunks()

    def ids(self, table):
        table.validate(full=True)
        return as_texts(table[self.id_column], self.id_column, ids=True)

    def hashes(self, ids):
        return pd.util.hash_array(np.asarray(ids), categorize=False)  # uint64, the same in every process


def data_fingerprint(files):
    """Return a hash of the names and sizes of files, and of both ends of the first and the last file."""
    digest = hashlib.sha256()
    for number, file in enumerate(files):
        fs, path = fsspec.core.url_to_fs(file)
        digest.update(f"{os.path.basename(path)} {fs.size(path)} ".encode())
        if number in (0, len(files) - 1):
            digest.update(fs.head(path, 2**16) + fs.tail(path, 2**16))
    return digest.hexdigest()[:16]


@dataclass
class Data:
    """What a run trains and evaluates on."""

    sources: list  # of Source
    weights: list  # share of each source
    epoch_rows: float  # mixed rows of an epoch
    eval_rows: pa.Table | None
    skipped: int  # bad rows among those held out
    description: list  # [name, rows, fingerprint] of each source and table of texts


def open_data(args, clean):
    """Return the Data of the flags; set args.columns and args.eval_rows if they are not given. clean(table, name of
    the source, its number, random, lookups, args) returns (Table of the valid rows, number of the others); lookups:
    the TextLookups of queries and of documents, None where rows contain texts."""
    if not args.columns:
        with user_errors(f"--train_data {args.train_data[0]}"):
            first = next(open_files(list_files(args.train_data[0])[:1]).iter(1))
        args.columns = [name for name in first.column_names if name not in args.label_column]
    if len(args.columns) < 2:
        raise UserError(f"--columns: two or more are required, found {args.columns}")
    lookups, sources, eval_sources = [], [], []
    for tables, columns in ((args.queries, args.query_columns), (args.corpus, args.corpus_columns)):
        with user_errors(" ".join(tables)):
            lookups.append(TextLookup(tables, columns) if tables else None)
    clean = partial(clean, lookups=lookups, args=args)
    for opened, use, names in ((sources, "train", args.train_data), (eval_sources, "eval", args.eval_data)):
        for number, name in enumerate(names):
            with user_errors(f"--{use}_data {name}"):
                opened.append(Source(name, number, clean, args))
    description = [[source.name, len(source), data_fingerprint(source.files)] for source in [*sources, *eval_sources]]
    description += [[lookup.name, len(lookup.dataset), lookup.fingerprint] for lookup in lookups if lookup]
    if args.eval_rows is None:
        bounded = not args.streaming and not args.eval_data
        args.eval_rows = min(EVAL_ROWS, sum(map(len, sources)) // 10) if bounded else EVAL_ROWS
    held_out, drawn = [], [0] * len(eval_sources or sources)
    draw_sources(drawn, list(map(len, eval_sources)) or args.mixing_weights or list(map(len, sources)), args.eval_rows)
    for source, count in zip(eval_sources or sources, drawn):
        with user_errors(source.name):
            held_out += [source.hold_out(count)] if count else []
    for source in sources:
        if not len(source):
            raise UserError(f"{source.name}: no row is left to train on after --eval_rows {args.eval_rows}")
    eval_rows = pa.concat_tables(table for table, _ in held_out).combine_chunks() if held_out else None
    weights = args.mixing_weights or list(map(len, sources))
    ends = [len(source) * sum(weights) / weight for source, weight in zip(sources, weights)]  # of each, in mixed rows
    epoch_rows = args.rows_per_epoch or (min if args.stopping_strategy == "first_exhausted" else max)(ends)
    return Data(sources, weights, epoch_rows, eval_rows, sum(bad for _, bad in held_out), description)


# ---- micro-batches (same in train_cross_encoder.py)


def cut_micro_batches(lengths, max_tokens):
    """Return index arrays, longest text first, each of at most `max_tokens` with padding; a longer text is alone.

    Minimize the tokens with padding plus a cost for each forward pass: 32 tokens if `max_tokens` is 2,048 (12 to 35
    measured on CPUs), 1,024 if it is 16,384 (GPUs). Cuts are tried where the length changes and after every 1/16 of
    `max_tokens`; trying all of them saves at most 0.3 % of the tokens and takes 30 times as long."""
    order = np.argsort(-lengths, kind="stable")
    sizes = np.maximum(lengths[order], 1)
    places = np.flatnonzero(np.diff(sizes, prepend=0) | np.diff(np.cumsum(sizes) * 16 // max_tokens, prepend=0))
    begins, widths = [*places.tolist(), len(order)], sizes[places].tolist()
    cost_of_a_pass = 32 * (max_tokens / 2048) ** (5 / 3)
    best = {len(places): (0.0, None)}  # {place: (lowest cost of the texts from it on, end of their first array)}
    for first in reversed(range(len(places))):
        ends = range(first + 1, max(first + 2, bisect_right(begins, begins[first] + max_tokens // widths[first])))
        costs = (cost_of_a_pass + (begins[end] - begins[first]) * widths[first] + best[end][0] for end in ends)
        best[first] = min(zip(costs, ends))
    cuts, end = [], 0
    while end < len(places):
        first, end = end, best[end][1]
        cuts.append(order[begins[first] : begins[end]])
    return cuts


@dataclass
class LocalBatch:
    """The n of N texts or pairs that this process encodes, and where each of the N is in the gathered outputs."""

    micro_batches: list  # (features, indices among the n), longest first
    tokens: int  # of the n, without padding
    padded: int  # tokens with padding
    order: torch.Tensor  # (n,) indices among the n, in the order of the micro-batches
    indices: torch.Tensor  # (n,) indices among the N of the same texts, in the same order
    gather_index: torch.Tensor  # (N,) row of each text in the (P * ceil(N / P), D) outputs of P processes


def make_local_batch(texts, queries, model, max_tokens, args, accelerator):
    """Return this process's LocalBatch of N texts or pairs (`texts`: one array, or two), dealt longest first in snake
    order (0 1 1 0 0 1 ...) to balance number and length. `queries`: number of queries, first in the first array."""
    lengths = sum(pc.binary_length(part).to_numpy() for part in texts)
    processes, order = accelerator.num_processes, np.argsort(-lengths, kind="stable")
    turn, owner = np.divmod(np.arange(len(order)), processes)
    owner = np.where(turn % 2 == 0, owner, processes - 1 - owner)
    local, gather_index = order[owner == accelerator.process_index], np.empty(len(order), np.int64)
    gather_index[order] = owner * -(-len(order) // processes) + turn
    local_texts = [part.take(local).to_pylist() for part in texts]
    if args.query_max_length:  # truncate the text where its last allowed token ends
        tokenizer = getattr(model.tokenizer, "backend_tokenizer", model.tokenizer)
        for i in np.flatnonzero(local < queries):
            ends = tokenizer.encode(local_texts[0][i], add_special_tokens=False).offsets[: args.query_max_length]
            local_texts[0][i] = local_texts[0][i][: ends[-1][1] if ends else 0]
    found = make_micro_batches(*local_texts, model, max_tokens, accelerator.device)
    order = np.concatenate([cut for _, cut in found[0]])
    indices = (pinned(torch.from_numpy(part), accelerator.device) for part in (order, local[order], gather_index))
    return LocalBatch(*found, *indices)


def pinned(value, device):
    """Return a tensor in page-locked memory if `device` is a GPU, for asynchronous copies; else return the value."""
    return value.pin_memory() if device.type == "cuda" and torch.is_tensor(value) else value


def pad_micro_batches(encodings, model, max_tokens, device):
    """Return (micro-batches, tokens, tokens with padding) of tokenized texts or pairs; a micro-batch is (features,
    indices in `encodings`). If the model supports it (flash attention), texts are concatenated without padding."""
    tokenizer, flat, micro_batches, padded = model.tokenizer, {}, [], 0
    lengths = np.array([len(encoding) for encoding in encodings], np.int64)
    starts, widths, total = torch.from_numpy(np.cumsum(lengths) - lengths), lengths, int(lengths.sum())
    if device.type != "cpu":  # fast kernels require multiples of 8
        widths = np.maximum(lengths, np.minimum(-(-lengths // 8) * 8, model.max_seq_length))
    fills = {"input_ids": ("ids", tokenizer.pad_token_id), "token_type_ids": ("type_ids", tokenizer.pad_token_type_id)}
    for name in fills.keys() & set(tokenizer.model_input_names):  # (total,), text after text
        tokens = chain.from_iterable(getattr(encoding, fills[name][0]) for encoding in encodings)
        flat[name] = torch.from_numpy(np.fromiter(tokens, np.int64, total))
    for cut in cut_micro_batches(widths, max_tokens):
        columns = torch.arange(int(widths[cut[0]]))
        mask = columns < torch.from_numpy(lengths[cut])[:, None]  # (n, width)
        places = (starts[cut, None] + columns).clamp_(max=total - 1)  # (n, width), in the flat arrays
        if model[0].can_flatten_inputs:  # the form of transformers.DataCollatorWithFlattening
            positions = (columns + model[0]._flatten_position_offset).expand_as(mask)
            features = {"input_ids": flat["input_ids"][places[mask]][None], "position_ids": positions[mask][None]}
            ends, width = F.pad(mask.sum(1).cumsum(0), (1, 0)).int(), len(columns)
            features |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": width, "max_length_k": width}
            features["seq_idx"] = mask.nonzero()[:, 0].int()[None]  # else mean pooling waits for the device
        else:
            features = {name: tokens[places].masked_fill_(~mask, fills[name][1]) for name, tokens in flat.items()}
            if not mask.all():  # else transformers synchronizes the device to see that nothing is masked
                features["attention_mask"] = mask.long()
        padded += features["input_ids"].numel()
        micro_batches.append(({name: pinned(value, device) for name, value in features.items()}, cut))
    return micro_batches, total, padded


def prefetch(iterator, depth=2):
    """Yield from an iterator that runs in a background thread, `depth` items ahead; its errors are raised here."""
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(next, iterator, None) for _ in range(depth))
        while (item := ahead.popleft().result()) is not None:
            ahead.append(pool.submit(next, iterator, None))
            yield item


def equalize_micro_batches(local, accelerator):
    """Repeat the last micro-batch under FSDP, whose forwards are collective, until all ranks run equally many."""
    if accelerator.distributed_type == DistributedType.FSDP:
        count = max(gather_object([len(local.micro_batches)]))
        features, _ = local.micro_batches[-1]  # the shortest texts; the output is discarded
        local.micro_batches += [(features, ())] * (count - len(local.micro_batches))


def gather_outputs(parts, local, accelerator):
    """Return (N, D) detached outputs of all texts, in the batch's order; `parts`: (n, D) outputs of micro-batches."""
    order, gather_index = (t.to(accelerator.device, non_blocking=True) for t in (local.order, local.gather_index))
    padded = parts[0].new_zeros(-(-len(gather_index) // accelerator.num_processes), parts[0].shape[1])
    padded[order] = torch.cat(parts).detach()
    return accelerator.gather(padded)[gather_index]


# ---- model (same in train_cross_encoder.py)


def set_dropout(model, probability):
    """Set the dropout probability of Dropout modules and of all dropout numbers in modules and their configs."""
    found = 0
    for module in model.modules():
        for values in (vars(holder) for holder in (module, vars(module).get("config")) if holder is not None):
            names = [name for name, value in values.items() if "dropout" in name and type(value) in (int, float)]
            names += ["p"] * isinstance(module, torch.nn.Dropout)
            values.update(dict.fromkeys(names, probability))
            found += len(names)
    if probability and not found:
        raise UserError(f"--dropout {probability}: the model has no dropout")


def add_lora(model, rank, checkpoint, task=None):
    """Freeze the transformer and add adapters to its linear layers (Hu et al. 2021, section 4; alpha is 2 * rank), new
    or from a checkpoint. `task`: peft's task type, which decides what other layers are trained."""
    with user_errors("--lora_rank requires a transformer, and peft (pip install peft)"):
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict  # optional

        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type=task)
        model[0].model = get_peft_model(model[0].model, config)
    if checkpoint:
        set_peft_model_state_dict(model[0].model, load_file(checkpoint / "adapter_model.safetensors"))


def own_memory(model):
    """Copy all parameters and buffers. Loaded ones are views of a mapped file, at addresses that depend on its header;
    kernels choose their order of summation by alignment, so the last bits would depend on the file."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def check_attention(model, accelerator):
    """Raise UserError for flash attention in a run that computes in float32."""
    kernels = str(getattr(model.config, "_attn_implementation", None))
    if "flash" in kernels and accelerator.mixed_precision == "no":
        raise UserError(f"{kernels} requires half precision: accelerate launch --mixed_precision bf16")


def freeze_unused(model, output):
    """Freeze the parameters on which an `output` of the model does not depend, such as BERT's pooler under mean
    pooling. DDP waits for every parameter's gradient: if one has none, no gradient is reduced, without an error."""
    output.sum().backward()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
    model.zero_grad()


# ---- from rows to batches


def clean_pairs(table, source, number, random, lookups, args):
    """Return (Table of the valid rows, number of the others) for a Table as read from `source`; the columns are
    those of read_groups, with prompts."""
    columns, problems = read_groups(table, lookups, args, random)
    documents = columns["documents"]
    if args.prompts:
        query_prompt = args.prompts[min(number, max(0, len(args.prompts) - 2))]
        columns["query"] = pc.utf8_replace_slice(columns["query"], 0, 0, query_prompt)  # prepends it
        texts = pc.utf8_replace_slice(documents.values, 0, 0, args.prompts[-1])
        columns["documents"] = pa.ListArray.from_arrays(documents.offsets, texts)
    if args.label_column:
        labels, sizes = pc.list_value_length(columns["labels"]), pc.list_value_length(documents)
        if args.loss in TEACHER_LOSSES:
            problem = f"--loss {args.loss} requires a score for each of two or more documents; violated"
            problems[problem] = pc.or_(pc.not_equal(labels, sizes), pc.less(sizes, 2))
        else:
            problem = f"{' '.join(args.label_column)!r} has fewer than the {pc.max(labels)} labels of other rows"
            problems[problem] = pc.not_equal(labels, pc.max(labels))
    return drop_bad_rows(pa.table(columns), problems, table, source, args)


def make_micro_batches(texts, model, max_tokens, device):
    """Return (micro-batches, tokens, tokens with padding) of texts; a micro-batch is (features, indices in texts)."""
    if not isinstance(model.tokenizer, Tokenizer):
        encodings = model.tokenizer.backend_tokenizer.encode_batch_fast(texts)
        return pad_micro_batches(encodings, model, max_tokens, device)
    # A static embedding model: texts are concatenated, without padding.
    encodings = model.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ends = np.append(0, np.cumsum([len(encoding) for encoding in encodings]))
    tokens = chain.from_iterable(encoding.ids for encoding in encodings)
    flat, ends = torch.from_numpy(np.fromiter(tokens, np.int64, ends[-1])), torch.from_numpy(ends)
    size, micro_batches = max(1, max_tokens * len(texts) // max(1, len(flat))), []  # texts per micro-batch
    for cut in np.split(np.arange(len(texts)), range(size, len(texts), size)):
        first, last = ends[cut[0]], ends[cut[-1] + 1]
        features = {"input_ids": flat[first:last], "offsets": ends[cut] - first}
        micro_batches.append(({name: pinned(tensor, device) for name, tensor in features.items()}, cut))
    return micro_batches, len(flat), len(flat)


@dataclass
class Batch:
    """The rows of one loss, the same on every process, and the part of their texts that this process encodes."""

    rows: pa.Table
    state: dict  # of row_batches, after this batch
    places: torch.Tensor  # (C, B) int64, index of each anchor and document among the N texts; 0 if missing
    ids: torch.Tensor  # (C, B) int64, equal for equal texts; -1 if missing
    labels: torch.Tensor | None  # (B,), or (B, labels of a row) padded with NaN
    local: LocalBatch
    guide: LocalBatch | None  # the same texts for the guide


def pad_lists(values, sizes, fill):
    """Return an (n, longest) array of the values of n lists of these `sizes`, padded with `fill`."""
    mask = np.arange(sizes.max()) < sizes[:, None]
    padded = np.full(mask.shape, fill, values.dtype)
    padded[mask] = values
    return padded


def make_batches(rows_and_states, model, max_tokens, args, accelerator, guide=None):
    """Yield each Batch with this process's part of it tokenized; runs in a background thread."""
    for rows, state in rows_and_states:
        queries, documents, labels = rows["query"].combine_chunks(), rows["documents"].combine_chunks(), None
        texts, count = pa.concat_arrays([queries, documents.flatten()]), len(rows)  # (N,)
        places = pad_lists(np.arange(count, len(texts)), pc.list_value_length(documents).to_numpy(), -1)
        places = np.vstack([np.arange(count), places.T])  # (C, B)
        if places.min() < 0 and args.loss not in LOSSES:
            raise UserError(f"--loss {args.loss} requires equally many documents in all rows: lower --num_negatives")
        ids = np.where(places < 0, -1, texts.dictionary_encode().indices.to_numpy().astype(np.int64)[places])
        if args.label_column:
            labels = rows["labels"].combine_chunks()
            labels = pad_lists(labels.flatten().to_numpy(), pc.list_value_length(labels).to_numpy(), np.nan)
            labels = torch.from_numpy(labels).squeeze(1).float()  # (B,) if each row has one label
        tensors = (torch.from_numpy(places.clip(0)), torch.from_numpy(ids), labels)
        places, ids, labels = (pinned(part, accelerator.device) for part in tensors)
        parts = [encoder and make_local_batch([texts], count, encoder, max_tokens, args, accelerator)
                 for encoder in (model, guide)]  # fmt: skip
        yield Batch(rows, state, places, ids, labels, *parts)


# ---- model and loss


def load_model(args, checkpoint=None):
    """Return the SentenceTransformer of the flags, with the weights of the checkpoint if one is given."""
    path = str(checkpoint) if checkpoint and not args.lora_rank else args.model_name_or_path
    options = {"use_safetensors": True, "attn_implementation": args.attn_implementation}  # never a pickle
    torch.manual_seed(args.seed)  # for adapters, and weights that the folder lacks
    with user_errors(f"--model_name_or_path {path}"):
        check_exists(path)
        model = SentenceTransformer(path, device="cpu", model_kwargs=options, trust_remote_code=False)
        if "SequenceClassification" in str(getattr(model.config, "architectures", None)):
            raise UserError("is a cross-encoder: use train_cross_encoder.py")
        if model.similarity_fn_name not in ("cosine", "dot"):
            raise UserError(f"similarity {model.similarity_fn_name} is not supported, only cosine and dot")
        if isinstance(model.tokenizer, Tokenizer):
            if args.max_length:
                model.tokenizer.enable_truncation(args.max_length)
        else:
            limit = getattr(model.config, "max_position_embeddings", None) or math.inf
            model.max_seq_length = args.max_length or model.max_seq_length
            if model.max_seq_length > limit:
                raise UserError(f"--max_length {model.max_seq_length}: the model has positions for {limit} tokens")
            model.tokenizer.backend_tokenizer.no_padding()  # once, as two threads use the tokenizer and its settings
            model.tokenizer.backend_tokenizer.enable_truncation(model.max_seq_length)
            if args.gradient_checkpointing:
                model[0].model.activation_checkpointing_enable({"use_reentrant": False})
    if args.pooling:
        with user_errors(f"--pooling {args.pooling}: the model has no pooling to replace"):
            index = [isinstance(module, modules.Pooling) for module in model].index(True)
        model[index] = modules.Pooling(model[index].embedding_dimension, pooling_mode=args.pooling)
    if args.prompts:
        model.prompts = {"query": args.prompts[0], "document": args.prompts[-1]}
    if args.dropout is not None:
        set_dropout(model, args.dropout)
    if args.lora_rank:
        add_lora(model, args.lora_rank, checkpoint)
    else:
        model.float()  # with autocast, too, the weights updated are float32
    own_memory(model)
    return model


MAX_SCORES = 2**26  # in memory at once (256 MB); larger score matrices are computed in chunks, and again in backward


def softmax_loss(queries, documents, query_keys, document_keys, scale, rows, margin=None, guide=None):
    """Return the cross-entropy of document i for query i among all documents, summed over the queries `rows`.

    queries (B, D), documents (M, D); keys: (anchor ids, text ids) of each, int64. False negatives are masked:
    documents with the query's anchor, or with the text of its target, document i. The anchor id of hard negatives is
    -1, as is the text id of missing documents, which are masked as well. `margin`: mask documents whose similarity
    to the query exceeds the target's by more than this. `guide`: embeddings (queries, documents) to measure it by."""

    def chunk(targets, queries, documents):
        scores = queries[targets] @ documents.T * scale  # (targets, M)
        masked = query_keys[0][targets, None] == document_keys[0]
        masked |= (query_keys[1][targets, None] == document_keys[1]) | (document_keys[1] < 0)
        if margin is not None:
            similar = guide[0][targets] @ guide[1].T if guide else scores.detach() / scale
            masked |= similar > similar.gather(1, targets[:, None]) + margin
        masked.scatter_(1, targets[:, None], False)  # never the target
        return F.cross_entropy(scores.masked_fill(masked, -torch.inf), targets, reduction="sum")

    chunks = rows.split(max(1, MAX_SCORES // len(documents)))
    if len(chunks) == 1:
        return chunk(rows, queries, documents)
    return sum(recompute(chunk, part, queries, documents, use_reentrant=False) for part in chunks)


# A loss in LOSSES takes the embeddings of the whole batch, gathered from all processes, and returns the sum of the
# losses of `rows`, (n,) indices of this process, divided by B; the sum over processes is the mean over the batch.
# columns: C tensors (B, D): anchors, positives, negatives..., normalized if the similarity is cosine; ids: (C, B),
# equal for equal texts, -1 if missing; labels: (B,), (B, C - 1) or None; guide: the columns as embedded by
# --guide_model, or None. Further arguments are --loss_kwargs.


def infonce(columns, ids, labels, rows, guide=None, temperature=0.05, symmetric=False, mask_margin=None):
    """Return InfoNCE (van den Oord et al. 2018, equation 4) with in-batch and hard negatives.
    `symmetric`: average it with the loss of finding each positive's anchor (Radford et al. 2021, figure 3).
    `mask_margin`: mask documents whose similarity exceeds the positive's by more than this (Zhang et al. 2025,
    equation 2); a guide, if any, measures the similarity, and the default is then 0 (Solatorio 2024, section 3)."""
    anchors, documents = columns[0], torch.cat(columns[1:])  # (B, D), (M, D)
    anchor_ids = torch.cat([ids[0], ids.new_full((ids[2:].numel(),), -1)])
    keys, margin = (ids[0], ids[1]), 0.0 if guide and mask_margin is None else mask_margin
    options = {"scale": 1 / temperature, "rows": rows, "margin": margin}
    guides, document_keys = guide and (guide[0], torch.cat(guide[1:])), (anchor_ids, ids[1:].flatten())
    loss = softmax_loss(anchors, documents, keys, document_keys, guide=guides, **options)
    if symmetric:
        guides = guide and (guide[1], guide[0])
        loss = (loss + softmax_loss(columns[1], anchors, keys, keys, guide=guides, **options)) / 2
    return loss / len(anchors)


def row_scores(columns, labels, rows, temperature, teacher_temperature):
    """Return the similarities of the n anchors `rows` to their own documents, and the teacher's labels of these, each
    divided by its temperature; (n, C - 1) each. A missing document has the label NaN."""
    scores = torch.stack([(columns[0][rows] * column[rows]).sum(-1) for column in columns[1:]], 1)
    return scores / temperature, labels[rows] / teacher_temperature


def margin_mse(columns, ids, labels, rows, guide=None, temperature=0.05, teacher_temperature=1.0):
    """Return the squared error of the margins of positives over negatives (Hofstätter et al. 2020, Margin-MSE)."""
    scores, labels = row_scores(columns, labels, rows, temperature, teacher_temperature)
    given = labels[:, 1:].isfinite()
    error = (scores[:, :1] - scores[:, 1:]) - (labels[:, :1] - labels[:, 1:].nan_to_num())
    return ((error.square() * given).sum(1) / given.sum(1)).sum() / len(columns[0])


def kl(columns, ids, labels, rows, guide=None, temperature=0.05, teacher_temperature=1.0):
    """Return KL(teacher || model) of the softmax over a row's documents (Lin et al. 2020)."""
    scores, labels = row_scores(columns, labels, rows, temperature, teacher_temperature)
    student, teacher = (part.masked_fill(labels.isnan(), -1e9).log_softmax(1) for part in (scores, labels))
    return F.kl_div(student, teacher, reduction="sum", log_target=True) / len(columns[0])


LOSSES = {"infonce": infonce, "margin_mse": margin_mse, "kl": kl}


def set_teacher_temperature(labels, args):
    """Set teacher_temperature in args.loss_kwargs, if it is not given, by the range of the teacher's scores `labels`:
    the model's temperature for probabilities and cosines (from -1 to 1), else 1."""
    similar = pc.max(pc.abs(pc.list_flatten(labels))).as_py() < 1.001  # a cosine may be rounded to above 1
    default = args.loss_kwargs.get("temperature", 0.05) if similar else 1.0
    args.loss_kwargs = {"teacher_temperature": default} | args.loss_kwargs


def make_loss(args, model):
    """Return loss(columns, ids, labels, rows, guide) -> scalar: one of LOSSES, or a class of sentence-transformers."""
    options, dot, weight = dict(args.loss_kwargs), model.similarity_fn_name == "dot", 0.0
    if args.loss in TEACHER_LOSSES:
        weight = options.pop("infonce", 0.0)  # teachers do not score the documents of other rows
        options = {"temperature": 1.0 if dot else 0.05} | options
    if args.loss in LOSSES:
        with user_errors(f"--loss {args.loss}"):
            inspect.signature(LOSSES[args.loss]).bind(None, None, None, None, **options)

        def base(columns, *rest):
            columns = columns if dot else [F.normalize(column, dim=-1) for column in columns]
            loss = LOSSES[args.loss](columns, *rest, **options)
            return loss + weight * infonce(columns, *rest, temperature=options["temperature"]) if weight else loss
    else:
        names = [name for name in dir(losses) if hasattr(getattr(losses, name), "compute_loss_from_embeddings")]
        if args.loss not in names:
            raise UserError(f"--loss {args.loss}: unknown; available: {', '.join([*LOSSES, *names])}")
        with user_errors("--loss_kwargs"):
            module = getattr(losses, args.loss)(model, **options)
        if any(not name.startswith("model.") for name, _ in module.named_parameters()):
            raise UserError(f"--loss {args.loss} has weights of its own, which would not be trained")

        def base(columns, ids, labels, rows, guide=None):  # each process computes the whole loss, returns its share
            with user_errors(f"--loss {args.loss}"):  # it can reject these columns or labels
                return module.compute_loss_from_embeddings(columns, labels) * len(rows) / ids.shape[1]

    def matryoshka(columns, *rest):  # Kusupati et al. 2022, equation 1, with equal weights
        parts = [[F.normalize(column[:, :size], dim=-1) for column in columns] for size in args.matryoshka_dims]
        return sum(base(part, *rest) for part in parts)

    if max(args.matryoshka_dims, default=0) > model.get_embedding_dimension():
        raise UserError(f"--matryoshka_dims: the embeddings have only {model.get_embedding_dimension()} dimensions")
    return matryoshka if args.matryoshka_dims else base


# ---- step


def encode(model, features, accelerator):
    """Return (n, D) float embeddings of one micro-batch."""
    features = transformers.BatchEncoding(features).to(accelerator.device, non_blocking=True).data
    with accelerator.autocast():  # gives flash attention its dtype; prepare() does not wrap FSDP2's forward
        return model(features)["sentence_embedding"].float()


@torch.no_grad()
def encode_all(model, local, accelerator):
    """Return (N, D) embeddings of all texts without gradients, normalized if the model's similarity is cosine."""
    equalize_micro_batches(local, accelerator)
    with accelerator.autocast():
        parts = [encode(model, features, accelerator)[: len(cut)] for features, cut in local.micro_batches]
    embeddings = gather_outputs(parts, local, accelerator)
    return embeddings if model.similarity_fn_name == "dot" else F.normalize(embeddings, dim=-1)


def print_entropies(scores, teacher, args, accelerator):
    """Print the mean entropies of the softmax of `scores` and `teacher` over a row's documents: (n, L) each, divided
    by their temperatures, `teacher` NaN where there is no document. Warn if the teacher's is near that of equal scores
    but the model's is not: the loss would fall while the model's scores become equal."""
    parts = (scores, teacher, torch.zeros_like(teacher))
    parts = (part.masked_fill(teacher.isnan(), -torch.inf) for part in parts)
    model, teacher, equal = (Categorical(logits=part).entropy().mean().item() for part in parts)
    accelerator.print(f"teacher_temperature {args.loss_kwargs['teacher_temperature']}; mean entropy over a row's "
                      f"documents: teacher {teacher:.3f}, model {model:.3f}, equal scores {equal:.3f}")  # fmt: skip
    if equal - teacher < 0.1 * (equal - model):
        accelerator.print("warning: the teacher's scores hardly differ beside the model's, which would become equal: "
                          "lower teacher_temperature in --loss_kwargs")  # fmt: skip


def report_entropies(model, batch, args, accelerator):
    """Print the mean entropies of model and teacher over the documents of a batch's rows."""
    device = accelerator.device
    columns, options = encode_all(model, batch.local, accelerator)[batch.places.to(device)], args.loss_kwargs
    temperature = options.get("temperature", 1.0 if model.similarity_fn_name == "dot" else 0.05)
    rows, labels = torch.arange(len(batch.rows), device=device), batch.labels.to(device)
    print_entropies(*row_scores(columns, labels, rows, temperature, options["teacher_temperature"]), args, accelerator)


def forward_backward(model, batch, loss_fn, seed, sync, args, accelerator, guide=None):
    """Add the gradient of the batch's loss to the model's; return this process's part of the loss (the parts add up).
    `seed`: integers that identify this batch. `sync`: reduce gradients over processes in the last backward pass."""
    local, device, processes = batch.local, accelerator.device, accelerator.num_processes
    equalize_micro_batches(local, accelerator)
    last = len(local.micro_batches) - 1

    def embed(number):  # (n, D)
        # Repeat the same dropout in a second forward pass, and after a resume.
        torch.manual_seed(int(np.random.SeedSequence([*seed, accelerator.process_index, number]).generate_state(1)[0]))
        features, cut = local.micro_batches[number]
        with accelerator.no_sync(model):
            return encode(model, features, accelerator)[: len(cut)]

    def backward(number, value):
        # Reduce gradients over processes once, with those of the last micro-batch.
        with accelerator.trigger_sync_in_backward(model) if sync and number == last else nullcontext():
            accelerator.backward(value)

    # One autocast around all: each makes its own half-precision copies of the weights, which its graph keeps.
    with accelerator.autocast(), torch.set_grad_enabled(not args.grad_cache):
        parts = [embed(number) for number in range(last + 1)]
    # The gathered outputs are a leaf: the loss of the whole batch needs no gradient through collectives.
    embeddings = gather_outputs(parts, local, accelerator).requires_grad_()  # (N, D)
    tensors = (batch.places, batch.ids, batch.labels)
    places, ids, labels = (None if t is None else t.to(device, non_blocking=True) for t in tensors)
    columns = list(embeddings[places])  # C of (B, D)
    rows = torch.arange(accelerator.process_index, batch.ids.shape[1], processes, device=device)
    guides = list(encode_all(guide, batch.guide, accelerator)[places]) if guide else None
    loss = loss_fn(columns, ids, labels, rows, guides)  # the part of these rows
    loss.backward()
    # Multiply by the number of processes: DDP averages over them, but each has the gradient of its own texts only.
    gradient = accelerator.reduce(embeddings.grad)[local.indices.to(device, non_blocking=True)] * processes
    gradients = gradient.split([len(cut) for _, cut in local.micro_batches])  # (n, D) each
    for number, gradient in enumerate(gradients):  # a micro-batch at a time, so that gradients add up in float32
        # With --grad_cache there is also one graph at a time (Gao et al. 2021, section 3.2).
        part = embed(number) if args.grad_cache else parts[number]
        backward(number, (part * gradient).sum())
    return loss.detach()


# ---- collections to evaluate on (same in train_cross_encoder.py)

HELD_OUT = "held_out"  # name of the held-out rows among the collections


@dataclass
class EvalSet:
    """Queries, documents and judgments of a collection, in memory."""

    queries: dict  # {id: text}
    documents: dict  # {id: text}
    qrels: pd.DataFrame  # query_id, doc_id, relevance


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
        texts.append(dict(zip(frame["_id"], prompt + (frame["title"] + " " + frame["text"]).str.strip())))
    if judgments[0].endswith(".tsv"):  # read ids as texts: they may begin with zeros
        qrels = pd.read_csv(judgments[0], sep="\t", dtype=str, quoting=3, keep_default_na=False)
    else:
        qrels = open_files(judgments, streaming=False)[:].to_pandas().astype(str)
    qrels = qrels.rename(columns={"query-id": "query_id", "corpus-id": "doc_id"})
    qrels = qrels.drop_duplicates(["query_id", "doc_id"], keep="last")
    qrels = qrels[qrels["query_id"].isin(texts[1])]
    if qrels.empty:
        raise UserError(f"no judgment of split {split!r} has a query of {files[1][0]}")
    qrels = qrels.assign(relevance=qrels["score"].astype(int) if "score" in qrels else 1)  # NanoBEIR has no grades
    queries = {query: texts[1][query] for query in qrels["query_id"].unique()}
    return EvalSet(queries, texts[0], qrels)


# ---- evaluation

EVAL_ROWS = 1000  # held out by default
RANKING = {"MRR@10": ir_measures.RR @ 10, "nDCG@10": ir_measures.nDCG @ 10, "accuracy@1": ir_measures.Success @ 1}
MEASURES = (*RANKING, "Spearman", "Pearson")


def held_out_set(rows, scored):
    """Return the EvalSet in which each held-out query searches the positives of all held-out rows for its own; the
    relevance of a positive is 1, or the row's label, a float, if rows are `scored`."""
    queries = {f"query {number}": text for number, text in enumerate(rows["query"].to_pylist())}
    documents = {f"{number}": texts[0] for number, texts in enumerate(rows["documents"].to_pylist())}
    relevance = pc.list_flatten(rows["labels"]) if scored else 1
    qrels = pd.DataFrame({"query_id": queries.keys(), "doc_id": documents.keys(), "relevance": relevance})
    return EvalSet(queries, documents, qrels)


def search(queries, documents, eval_set):
    """Return {measure: value} of searching all documents, (M, D), with all queries, (Q, D). A document with the
    query's own id is left out, as in BEIR; of equal scores the earlier document ranks first."""
    ids = np.array(list(eval_set.queries)), np.array(list(eval_set.documents))
    scores = (part @ documents.T for part in queries.split(max(1, MAX_SCORES // len(documents))))
    depth = 1 + max(measure.params.get("cutoff", len(documents)) for measure in RANKING.values())
    best = torch.cat([part.argsort(dim=1, descending=True, stable=True)[:, :depth] for part in scores]).cpu().numpy()
    run = pd.DataFrame({"query_id": ids[0].repeat(best.shape[1]), "doc_id": ids[1][best.ravel()]})
    run = run[run["query_id"] != run["doc_id"]]
    found = ir_measures.calc_aggregate(RANKING.values(), eval_set.qrels, run.assign(score=-np.arange(len(run))))
    return {name: found[measure] for name, measure in RANKING.items()}


def evaluate(model, eval_sets, max_tokens, args, accelerator):
    """Return {measure: mean over held-out rows and --eval_beir}, and the value of each if there are several; the same
    on every process. If held-out rows have one label each, they are measured by correlation with the similarities."""
    model, found = accelerator.unwrap_model(model).eval(), {}
    for name, eval_set in eval_sets.items():
        texts, count = [*eval_set.queries.values(), *eval_set.documents.values()], len(eval_set.queries)
        local = make_local_batch([pa.array(texts, pa.large_string())], count, model, max_tokens, args, accelerator)
        queries, documents = encode_all(model, local, accelerator).split([count, len(texts) - count])
        labels = eval_set.qrels["relevance"]
        if labels.dtype == float:  # those of held-out rows
            frame = pd.DataFrame({"score": (queries * documents).sum(-1).cpu(), "label": labels})
            found[name] = {kind: float(frame.corr(kind.lower()).iloc[0, 1]) for kind in ("Spearman", "Pearson")}
        else:
            found[name] = search(queries, documents, eval_set)
    model.train()
    each = {f"{name} {measure}": value for name, values in found.items() for measure, value in values.items()}
    return pd.DataFrame(found).mean(axis=1).to_dict() | (each if len(found) > 1 else {})


# ---- checkpoints and outputs (same in train_cross_encoder.py)


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


def load_optimizer(path, model, optimizer):
    """Restore an optimizer's tensors, sharded like their parameters; hyperparameters are not restored but kept."""
    found, loaded = dcp.get_optimizer_state_dict(model, optimizer), load_file(path / "optimizer.safetensors")
    tensors = {name: tensor.clone() for name, tensor in loaded.items()}  # as in own_memory
    if tensors:  # plain SGD has none
        state = {name: {key: tensors[f"{name}.{key}"] for key in keys} for name, keys in found["state"].items()}
        options = dcp.StateDictOptions(full_state_dict=True)
        dcp.set_optimizer_state_dict(model, optimizer, found | {"state": state}, options=options)


@dataclass
class Progress:
    """What a resume restores besides weights and optimizer state."""

    step: int = 0
    data_state: dict | None = None  # of row_batches
    losses: list = field(default_factory=list)  # of the steps since the last line of metrics.jsonl
    metrics: list = field(default_factory=list)  # the lines of metrics.jsonl
    scaler: dict | None = None  # state of the gradient scaler (fp16)
    changes: list = field(default_factory=list)  # of flags and sources by resumes: [step, name, old, new]
    finished: bool = False


def checksums(folder):
    """Return the lines of SHA256SUMS, as `sha256sum` prints them, for all other files in a folder."""
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "SHA256SUMS"):
        with open(path, "rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.relative_to(folder)}\n")
    return "".join(lines)


def save_checkpoint(folder, model, tensors, state, keep, best):
    """Write `folder` (model, optimizer's tensors, state as JSON, checksums), then remove all checkpoints but the
    newest `keep` and that of step `best`."""
    if is_intact(folder):  # the run has stopped where it saved, or resumed; a kill while it is replaced would lose it
        return
    with save_atomically(folder) as part:
        model.save_pretrained(str(part), create_model_card=False)
        save_file(tensors, part / "optimizer.safetensors")
        (part / "state.json").write_text(json.dumps(state))
        (part / "SHA256SUMS").write_text(checksums(part))
    steps = sorted(folder.parent.glob("step_*"))
    kept = [path for path in steps if path <= folder][-keep:]  # later ones are damaged: a resume did not use them
    for path in {*steps, *folder.parent.glob(".step_*")} - {*kept, folder.with_name(f"step_{best:08}")}:
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
    best = max(values, key=lambda step: -math.inf if math.isnan(values[step]) else values[step], default=0)
    return best, sum(step > best for step in values)


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


def check_resume(saved, args, data):
    """Return what has changed since the checkpoint, [step, name, old, new] of each flag and source; raise UserError if
    it may not change."""
    changes, refused = [], []
    then = asdict(Args()) | saved["args"]  # a flag may be newer than the checkpoint
    for name, value in flags_of_run(args).items():
        if value == then[name]:
            continue
        changes.append([saved["step"], f"--{name}", then[name], value])
        if name in SCHEDULE.split():
            reason = f"--{name} {value} (was {then[name]}; --accept_changed_schedule allows it)"
            refused += [reason] * (not args.accept_changed_schedule)
        elif name not in MAY_CHANGE.split():
            refused.append(f"--{name} {value} (was {then[name]})")
    for old, new in zip(saved["data"], data.description):
        if old != new:
            changes.append([saved["step"], new[0], old[1:], new[1:]])
            refused += [f"{new[0]} has changed (--accept_changed_data allows it)"] * (not args.accept_changed_data)
    if refused:
        raise UserError(f"--resume: {'; '.join(refused)}; restore it, or start a new --output_dir")
    return changes


def describe_change(step, name, old, new):
    """Return a line of the model card, for people, of what check_resume returns."""
    return f"after step {step:,}: {name} {old} -> {new}"


def plot_metrics(metrics, path):
    """Plot loss, evaluation measures and speed over the steps."""
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    frame = pd.DataFrame(metrics).set_index("step")
    for axis, names in zip(figure.subplots(1, 3), (["loss"], MEASURES, ["tokens_per_second"])):
        for name in frame.columns.intersection(names, sort=False):
            frame[name].dropna().plot(ax=axis, marker=".", grid=True, legend=True)
    figure.savefig(path, dpi=110)


def check_launch(accelerator):
    """Raise UserError for launch configurations that are not supported: some would train wrongly."""
    kind = accelerator.distributed_type
    unsupported = kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM) or accelerator.parallelism_config
    if kind == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        offload = plugin.cpu_ram_efficient_loading or isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        unsupported = unsupported or plugin.fsdp_version != 2 or offload or accelerator.scaler
    if unsupported:
        raise UserError(f"unsupported launch, {kind.value}: use accelerate_configs/fsdp2.yaml (no offload, no fp16)")


# ---- training

# Flags that a resume may change: they change neither the data nor, but for rounding, what a step computes from it.
MAY_CHANGE = """output_dir on_bad_row attn_implementation micro_batch_tokens grad_cache gradient_checkpointing
full_determinism eval_steps early_stopping_patience save_steps save_total_limit logging_steps report_to"""
# Flags that it may change by --accept_changed_schedule: no single command then gives the same model.
SCHEDULE = """learning_rate weight_decay warmup_ratio lr_scheduler_type max_grad_norm num_train_epochs rows_per_epoch
max_steps stopping_strategy"""
LOWER_RATE = "lower --learning_rate, then --resume --accept_changed_schedule"


def model_card(args, steps, progress, data, flags):
    """Return the README.md of the saved model: what it is, how it was trained, what was measured. `steps`: those of
    the model; flags: {flag: value} of the run."""
    records = [record for record in progress.metrics if record["step"] <= steps]
    last = {name: record[name] for record in records for name in MEASURES if name in record}
    measured = ", ".join(f"{name} {value:.4f}" for name, value in last.items())
    defaults = asdict(Args()) | {"loss_kwargs": {}}
    words = as_words({name: value for name, value in flags.items() if value != defaults[name]})
    changes = ["\nWhat resumes changed:\n\n"] * bool(progress.changes)
    changes += [f"- {describe_change(*change)}\n" for change in progress.changes]
    return f"""---
{{library_name: sentence-transformers, pipeline_tag: sentence-similarity, base_model: {args.model_name_or_path}}}
---
Trained for {steps:,} steps of {args.batch_size * args.gradient_accumulation_steps:,} rows, by the command below.
On {", ".join([f"{len(data.eval_rows or [])} held-out rows", *args.eval_beir])}: {measured or "not evaluated"}

    model = sentence_transformers.SentenceTransformer("path/of/this/folder")
    scores = model.similarity(model.encode_query(["a query"]), model.encode_document(["a document"]))

    {shlex.join(["python", sys.argv[0], *words])}
{"".join(changes)}"""


def main(args):
    # ---- set up
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
    check_launch(accelerator)
    if accelerator.mixed_precision == "bf16":
        torch.set_float32_matmul_precision("high")  # TF32 for the loss, which is not autocast
    if args.full_determinism:
        transformers.enable_full_determinism(args.seed)
    transformers.utils.logging.disable_progress_bar()  # else one for each file loaded or saved
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else loading a local file contacts the Hub
    accumulation = args.gradient_accumulation_steps = accelerator.gradient_accumulation_steps  # a launch may set it
    device, is_main, processes = accelerator.device, accelerator.is_main_process, accelerator.num_processes
    output = Path(args.output_dir)
    existing = next(path for path in [output, *output.absolute().parents] if path.exists())
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK):
        raise UserError(f"--output_dir {output}: {existing} is not a folder that can be written to")
    if (output / "args.yaml").exists() and not args.resume:
        raise UserError(f"--output_dir {output} contains a run: --resume it, or choose another folder")
    found = newest_checkpoint(output / "checkpoints") if args.resume and is_main else (None, None)
    checkpoint, saved = broadcast_object_list([found])[0]
    if checkpoint and not saved:
        raise UserError(f"{output}/checkpoints: no checkpoint is intact; remove the folder to start anew")
    if not all(gather_object([not checkpoint or (output / "checkpoints" / checkpoint.name).exists()])):
        raise UserError(f"--resume: some process cannot find {checkpoint}: it must be on a shared disk")

    # ---- data
    data = open_data(args, clean_pairs)
    held_out = len(data.eval_rows or [])
    if args.batch_size < processes or 0 < held_out < processes:
        raise UserError(f"--batch_size {args.batch_size}, --eval_rows {held_out}: too few for {processes} processes")
    if args.loss in TEACHER_LOSSES:
        first_rows, _ = next(row_batches(data.sources, data.weights, args))  # the same after a resume
        set_teacher_temperature(first_rows["labels"], args)
    changes = check_resume(saved, args, data) if saved else []
    steps = args.max_steps or math.ceil(args.num_train_epochs * data.epoch_rows / (args.batch_size * accumulation))
    eval_steps = args.eval_steps or max(1, steps // 10)
    eval_sets, prompts = {}, args.prompts or [""]
    if held_out:
        scored = args.label_column and pc.max(pc.list_value_length(data.eval_rows["labels"])).as_py() == 1
        eval_sets[HELD_OUT] = held_out_set(data.eval_rows, scored)
    for name in args.eval_beir:
        with user_errors(f"--eval_beir {name}"):
            eval_set, short = open_beir(name, args.eval_split, (prompts[-1], prompts[0])), Path(name).name
        eval_sets[name if short in eval_sets else short] = eval_set

    # ---- model, loss and optimizer
    model = load_model(args, checkpoint)
    check_attention(model, accelerator)
    sharded = accelerator.distributed_type == DistributedType.FSDP
    model_to_save = copy.deepcopy(model) if sharded and is_main else model  # on the CPU; FSDP will shard `model`
    model = model.to(device)
    default = 2**20 if isinstance(model.tokenizer, Tokenizer) else 2048 if device.type == "cpu" else 16_384
    max_tokens = args.micro_batch_tokens or default
    loss_fn, guide = make_loss(args, model), None
    if args.guide_model:
        overrides = {"model_name_or_path": args.guide_model, "pooling": None, "dropout": None, "lora_rank": 0}
        guide = load_model(replace(args, **overrides)).to(device).eval()
    model.train()
    features, _ = make_micro_batches(["a text"], model, max_tokens, device)[0][0]
    freeze_unused(model, encode(model, features, accelerator))
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.requires_grad and (p.ndim > 1) == decay],
          "weight_decay": decay * args.weight_decay} for decay in (True, False)],
        lr=args.learning_rate, fused=True)  # fmt: skip
    warmup = math.ceil(args.warmup_ratio * steps)
    with user_errors("--lr_scheduler_type"):  # lr_lambdas[0]: step -> factor
        schedule = transformers.get_scheduler(args.lr_scheduler_type, optimizer, warmup, steps).lr_lambdas[0]
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    model, optimizer = accelerator.prepare(model, optimizer)
    unwrapped = accelerator.unwrap_model(model)

    # ---- resume
    progress = Progress()
    if saved:
        with user_errors(f"{checkpoint}: not of this model and optimizer"):
            load_optimizer(checkpoint, unwrapped, optimizer.optimizer)
        progress = Progress(**{name: saved[name] for name in asdict(progress) if name in saved})
        if accelerator.scaler and progress.scaler:  # else the checkpoint is not of fp16: begin at the initial scale
            accelerator.scaler.load_state_dict(progress.scaler)
    best, since_best = best_evaluation(progress.metrics, args.metric_for_best_model)
    flags, was_finished = flags_of_run(args), progress.finished
    progress.finished = progress.step >= steps or 0 < args.early_stopping_patience <= since_best
    if was_finished and progress.finished:  # the flags given now compute no step
        flags |= saved["args"]
        accelerator.print(f"the run is finished, after step {progress.step:,}: no step is left")
    else:
        progress.changes += changes
        for change in changes:
            accelerator.print(describe_change(*change))
    with user_errors(f"--output_dir {output}"):
        output.mkdir(parents=True, exist_ok=True)  # not before all checks: a refused run leaves no folder
    if is_main:
        (output / "args.yaml").write_text(yaml.safe_dump(flags, sort_keys=False))
        (output / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in progress.metrics))
    accelerator.init_trackers("evenstep", {name: str(value) for name, value in asdict(args).items()})
    signals = []  # received

    def stop(number, _):
        """Let the loop stop. After Ctrl-C, another Ctrl-C ends the run at once."""
        signals.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    rows = "streamed" if args.streaming else f"{sum(map(len, data.sources)):,}"
    accelerator.print(f"{rows} rows of {', '.join(args.columns)}; {held_out:,} held out; {parameters:,} parameters")
    accelerator.print(f"step {progress.step:,} of {steps:,}: {accumulation} x {args.batch_size:,} rows on "
                      f"{processes} x {device}")  # fmt: skip

    def log(record):
        """Append the record of a step to metrics.jsonl and the trackers."""
        progress.metrics.append({"step": progress.step, **record})
        accelerator.log(record, step=progress.step)
        if is_main:
            with open(output / "metrics.jsonl", "a") as file:
                file.write(json.dumps(progress.metrics[-1]) + "\n")
            if measures := {name: round(value, 4) for name, value in record.items() if name in MEASURES}:
                tqdm.write(f"step {progress.step:,}: {measures}")

    def save():
        """Write a checkpoint; under FSDP every process must call it."""
        options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)  # unsharded, on the main process only
        weights, states = dcp.get_state_dict(unwrapped, optimizer.optimizer, options=options)
        if is_main:
            if not all(weight.isfinite().all() for weight in weights.values()):
                raise UserError(f"step {progress.step}: a weight is not finite: {LOWER_RATE}")
            if sharded:
                model_to_save.load_state_dict(weights)
            states = states["state"].items()  # of the optimizer, by parameter
            tensors = {f"{name}.{key}": tensor for name, state in states for key, tensor in state.items()}
            progress.scaler = accelerator.scaler and accelerator.scaler.state_dict()
            state = asdict(progress) | {"args": flags, "data": data.description}
            folder = output / f"checkpoints/step_{progress.step:08}"
            save_checkpoint(folder, model_to_save, tensors, state, args.save_total_limit, best)

    # ---- train
    if progress.step == 0 and args.loss in TEACHER_LOSSES:
        batch = next(make_batches([(first_rows, None)], unwrapped, max_tokens, args, accelerator))
        report_entropies(unwrapped, batch, args, accelerator)
    if progress.step == 0 and eval_sets:
        log(evaluate(model, eval_sets, max_tokens, args, accelerator))
    measured = [name for line in progress.metrics if not line["step"] for name in line if name != "step"]
    if args.metric_for_best_model not in [None, *measured]:
        raise UserError(f"--metric_for_best_model {args.metric_for_best_model} is not measured by evaluations: choose "
                        f"one of {', '.join(measured) or 'none, as there is nothing to evaluate on'}")  # fmt: skip
    rows = row_batches(data.sources, data.weights, args, progress.data_state)
    batches = prefetch(make_batches(rows, unwrapped, max_tokens, args, accelerator, guide))
    bar = tqdm(total=steps, initial=progress.step, disable=not is_main, unit="step", mininterval=1)
    meter = Counter()  # sums of this process since its start or the last line of metrics.jsonl
    while not progress.finished:
        # one optimizer step
        started, loss = time.perf_counter(), 0.0
        tables = []  # rows of this step
        for group in optimizer.param_groups:  # so that the first step of a warmup is not at 0
            group["lr"] = group["initial_lr"] * schedule(progress.step + (progress.step < warmup))
        for number in range(accumulation):
            requested = time.perf_counter()
            try:
                batch = next(batches)
            except UserError:  # save the steps already done
                save() if is_main and not sharded and progress.step else None
                raise
            meter["waited"] += time.perf_counter() - requested
            tables.append(batch.rows)
            sync, seed = number == accumulation - 1, [args.seed, progress.step, number]
            loss = loss + forward_backward(model, batch, loss_fn, seed, sync, args, accelerator, guide) / accumulation
            meter.update(rows=len(batch.rows), tokens=batch.local.tokens, padded=batch.local.padded)
        norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        norm = norm.full_tensor() if sharded else norm
        # One collective, and one wait for the device.
        sums = accelerator.reduce(torch.stack([loss, torch.full_like(loss, len(signals))]))
        loss, stopping, norm = torch.stack([*sums, norm]).tolist()  # stopping: a signal on any process, hence on all
        if stopping:  # before the step, as an evaluation may follow it: who sends SIGTERM may not wait for that
            break
        if not math.isfinite(loss) or not (math.isfinite(norm) or accelerator.scaler):
            read = pa.concat_tables(tables).to_pylist()
            (output / "nonfinite_batch.json").write_text(json.dumps(read, indent=1))
            raise UserError(f"step {progress.step + 1}: loss {loss}, gradient norm {norm}: fix the rows (they are in "
                            f"{output}/nonfinite_batch.json) or {LOWER_RATE}")  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
        meter["skipped"] += not math.isfinite(norm)  # by the scaler, inside of fused AdamW
        meter["seconds"] += time.perf_counter() - started
        progress.step, progress.data_state = progress.step + 1, batch.state
        progress.losses.append(loss)
        bar.update()

        # metrics, evaluation, checkpoint
        record, progress.finished = {}, progress.step == steps
        if progress.step % args.logging_steps == 0 or progress.finished:
            seconds, sums = meter["seconds"], torch.tensor([meter["tokens"], meter["padded"]], device=device)
            tokens, padded = accelerator.reduce(sums).tolist()
            record = {"loss": sum(progress.losses) / len(progress.losses), "grad_norm": norm,
                      "learning_rate": optimizer.param_groups[0]["lr"], "rows_per_second": meter["rows"] / seconds,
                      "tokens_per_second": tokens / seconds, "padding_fraction": 1 - tokens / padded,
                      "data_wait_fraction": meter["waited"] / seconds}  # fmt: skip
            record |= {"skipped_steps": meter["skipped"]} if accelerator.scaler else {}  # by fp16's scaler
            bar.set_postfix_str("loss {loss:.4f}, {rows_per_second:,.0f} rows/s".format(**record), refresh=False)
            meter, progress.losses = Counter(), []
        evaluated = progress.step % eval_steps == 0 or progress.finished
        if evaluated:
            record |= evaluate(model, eval_sets, max_tokens, args, accelerator)
        if record:
            log(record)
        if evaluated:  # measures can differ in their last bits between processes: the main process decides
            decision = [best_evaluation(progress.metrics, args.metric_for_best_model)]
            best, since_best = broadcast_object_list(decision)[0]
            progress.finished |= 0 < args.early_stopping_patience <= since_best
        due = args.save_steps and progress.step % args.save_steps == 0
        if progress.finished or due or progress.step == best:
            save()
            accelerator.wait_for_everyone()

    # ---- save
    if progress.step and not progress.finished:
        save()
    bar.close()
    batches.close()
    if not progress.finished:
        accelerator.print(f"stopped after step {progress.step:,} of {steps:,}: rerun with --resume to continue")
    elif is_main:
        if best:
            path = output / f"checkpoints/step_{best:08}"
            if not is_intact(path):
                raise UserError(f"{path}: the best checkpoint is damaged or gone; model/ is not written")
            model_to_save = load_model(args, path)
        if args.lora_rank:
            model_to_save[0].model = model_to_save[0].model.merge_and_unload()  # loads without peft
        with save_atomically(output / "model") as part:
            model_to_save.save_pretrained(str(part), create_model_card=False)
            (part / "README.md").write_text(model_card(args, best or progress.step, progress, data, flags))
        plot_metrics(progress.metrics, output / "training.png")
        skipped = data.skipped + sum(source["skipped"] for source in progress.data_state["sources"])
        print(f"{skipped:,} bad rows skipped; " * (skipped > 0) + f"the model is in {output / 'model'}")
    del model  # delete DDP before its process group: else one exit in fifty deadlocks (torch 2.13)
    accelerator.free_memory()
    accelerator.end_training()
    if signal.SIGINT in signals and not progress.finished:
        raise KeyboardInterrupt


if __name__ == "__main__":
    status = 0
    try:
        main(parse_args(sys.argv[1:]))
    except (Exception, KeyboardInterrupt) as error:
        memory = "lower --micro_batch_tokens, or set --grad_cache, then --gradient_checkpointing"
        status = print_error(error, "--resume continues from the newest checkpoint, if there is one", memory)
    sys.stdout.flush()
    os._exit(status)  # pyarrow threads that still read ahead can hang or abort a normal exit (apache/arrow 45214)
