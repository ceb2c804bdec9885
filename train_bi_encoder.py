"""Train a bi-encoder (texts -> embeddings) for retrieval, on a corpus of any size, on one process or many.

    python train_bi_encoder.py                                         # the demo corpus, two minutes on two CPU cores
    python train_bi_encoder.py --model_name_or_path BAAI/bge-base-en-v1.5 --train_data 'pairs/*.parquet' \
        --output_dir runs/bge --batch_size 1024 --grad_cache           # one GPU
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_bi_encoder.py args.yaml --resume

A row is an anchor, its positive, and as many hard negatives as there are further columns (perhaps a label too):

    {"question": "read a gzip file", "code": "def read(path): ...", "wrong": "def write(path): ..."}

The batch is the rows of one optimizer step over all processes, and it alone decides the gradient. Its texts are dealt
to the processes, cut into micro-batches of at most --micro_batch_tokens, encoded longest first and gathered, and the
loss of the whole batch is computed on every process. So the number of processes, the micro-batches and --grad_cache
change time and memory, not the gradient: without dropout (a static model, or --dropout 0) it is the same to 1e-5 for
any of them. Dropout masks depend on how texts are grouped, so with dropout only the batches are the same, and a run
resumes to the bit on the layout that it had.

--output_dir receives model/ (loads in sentence-transformers), checkpoints/, metrics.jsonl, args.yaml and training.png.

Left out on purpose: uploads to a hub, asymmetric models (Router), images, DeepSpeed.
"""

import copy
import csv
import glob
import hashlib
import inspect
import io
import json
import math
import os
import shlex
import shutil
import signal
import sqlite3
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType, LoggerType
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from scipy.stats import pearsonr, spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, StaticEmbedding
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm
from transformers import HfArgumentParser

# Shapes: B rows of a batch, C text columns, D embedding dimensions, N = C * B texts of a batch, column after column.

DEMO = "data/python_code"
TEACHER_LOSSES = ("margin_mse", "kl")


# same in train_cross_encoder.py, eval_incremental.py
class BadInput(ValueError):
    """Something the user can mend; shown as one line, without a traceback."""


# same in train_cross_encoder.py
class BadRow(BadInput):
    """A row whose content is bad: every process reads it, and raises this at the same step."""


# ------------------------------------------------------------------------------------------------------ options


# same in train_cross_encoder.py, eval_incremental.py
def flag(default, help):
    """One command-line option: its default and the line that --help prints."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class Args:
    # data
    train_data: list[str] = flag([], f"paths, globs, folders, URLs or Hub ids to train on; default: {DEMO}")
    eval_data: list[str] = flag(
        [], "sources of the held-out rows; default: the first rows of --train_data, not trained on"
    )
    eval_rows: int = flag(1000, "rows held out to evaluate on (0: no evaluation)")
    streaming: bool = flag(False, "read the sources front to back instead of at random from an on-disk table")
    columns: list[str] = flag([], "text columns: anchor, positive, negatives...; default: all but the label")
    num_negatives: int = flag(-1, "negative columns to use (-1: all there are)")
    corpus_table: list[str] = flag([], "sources of the documents by id; the columns then hold ids, not texts")
    queries_table: list[str] = flag([], "the same of the queries, for the first column")
    corpus_columns: list[str] = flag([], "id column of --corpus_table, then texts, joined; default: _id title text")
    query_columns: list[str] = flag([], "the same of --queries_table; default: _id text")
    label_column: str | None = flag(None, "column with a score, or a list of scores, for losses that want one")
    mixing_weights: list[float] = flag([], "share of each source; default: its rows (streams: equal shares)")
    mix_by: Literal["row", "batch"] = flag("row", "mix sources within a batch, or take each batch from one source")
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = flag(
        "all_exhausted", "an epoch ends when the first, or the last, of the mixed sources has been read once"
    )
    shuffle_buffer: int = flag(10_000, "rows held in memory to shuffle (0: keep the order of the files)")
    length_window: int = flag(1, "batches grouped by text length before they are cut (1: batches stay random)")
    on_bad_row: Literal["error", "skip"] = flag("error", "stop at an empty text or a bad label, or skip and count it")
    data_cache: str = flag("~/.cache/evenstep", "folder for the Arrow copies of mapped Parquet, JSON, CSV and text")
    # model
    model_name_or_path: str | None = flag(None, "Hub id or folder; default: a static embedding model from scratch")
    max_length: int | None = flag(None, "tokens a text is cut to; default: the model's own; from scratch 256")
    pooling: Literal["mean", "cls", "max", "lasttoken"] | None = flag(None, "replace the model's pooling")
    lora_rank: int = flag(0, "train adapters of this rank beside the frozen layers, by peft (0: train all)")
    attn_implementation: str | None = flag(None, "of transformers: sdpa, flash_attention_2, ...; default: its own")
    dropout: float | None = flag(None, "dropout probability everywhere in the model; default: the model's own")
    prompts: list[str] = flag([], "prefix of each column in turn; the last one serves the rest")
    # step
    batch_size: int | None = flag(None, "rows an optimizer step, over all processes; default: 64; from scratch 2048")
    micro_batch_tokens: int | None = flag(
        None, "tokens a forward pass, with padding; default: 2,048 on a CPU, else 16,384; static models 2**20"
    )
    gradient_accumulation_steps: int = flag(1, "batches a step, each with in-batch negatives of its own")
    grad_cache: bool = flag(False, "one more forward pass, to hold the activations of one micro-batch only")
    loss: str = flag(
        "infonce", "infonce; margin_mse or kl, to a teacher's scores; or a class of sentence-transformers (CoSENTLoss)"
    )
    loss_args: str = flag(
        "{}",
        'JSON: infonce {"temperature": 0.05, "symmetric": false}; margin_mse, kl {"temperature": 0.05, "infonce": 0}, '
        "the weight of infonce beside the teacher; a class's",
    )
    matryoshka_dims: list[int] = flag([], "also apply the loss to the first so many dimensions of each embedding")
    # schedule
    learning_rate: float | None = flag(None, "peak learning rate of AdamW; default: 2e-5; from scratch 0.005")
    weight_decay: float = flag(0.01, "weight decay of matrices; biases and norms have none")
    warmup_ratio: float = flag(0.1, "share of the steps over which the learning rate rises from 0")
    lr_schedule: Literal["linear", "cosine"] = flag("linear", "how the learning rate falls back to 0")
    max_grad_norm: float = flag(1.0, "clip the gradient to this norm (0: do not)")
    num_epochs: float | None = flag(None, "passes over the rows; default: 1; from scratch 4")
    rows_per_epoch: int = flag(0, "rows an epoch (0: all; else a fresh sample of so many each epoch)")
    max_steps: int = flag(0, "stop after so many optimizer steps (0: after --num_epochs)")
    seed: int = flag(0, "decides order, initialisation and dropout")
    # run
    output_dir: str = flag("runs/bi_encoder", "folder for everything the run writes")
    resume: bool = flag(False, "go on from the newest whole checkpoint in --output_dir")
    accept_changed_data: bool = flag(False, "resume although a source has changed: rows may repeat or be missing")
    eval_every: int = flag(0, "steps between evaluations (0: a tenth of the run)")
    save_every: int = flag(500, "steps between checkpoints (0: only at the end)")
    keep_checkpoints: int = flag(2, "checkpoints kept")
    log_every: int = flag(10, "steps between lines in metrics.jsonl")
    report_to: list[str] = flag([], "trackers of Accelerate: tensorboard, wandb, ...")


# same in train_cross_encoder.py, eval_incremental.py
def flags_of(given):
    """Command-line words for {flag: value}: lists in several words, objects as JSON, nothing for None and []."""
    words = []
    for name, value in given.items():
        if value not in (None, []):
            values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            words += [f"--{name}", *map(str, values)]
    return words


# same in train_cross_encoder.py, eval_incremental.py, prepare_corpus.py
def flags_given_twice(words):
    """Return the flags that stand more than once among the words of a command line: argparse keeps the last."""
    names = [word.partition("=")[0].replace("-", "_").strip("_") for word in words if word.startswith("--")]
    return [f"--{name}" for name, count in Counter(names).items() if count > 1]


def parse_args(argv):
    """Args from flags, or from a YAML or JSON file and flags that override it; ends the program on a usage error."""
    parser = HfArgumentParser(Args, description=__doc__.split("\n\n")[0], allow_abbrev=False)
    words = argv
    if argv and argv[0].endswith((".yaml", ".yml", ".json")):
        try:
            given = yaml.safe_load(Path(argv[0]).read_text())
            if unknown := set(given) - set(Args.__dataclass_fields__):
                parser.error(f"{argv[0]}: no such flag: {', '.join(map(str, unknown))}")
        except (OSError, yaml.YAMLError, TypeError, UnicodeError, RecursionError) as error:
            parser.error(f"{argv[0]}: not a file of flags ({' '.join(str(error).split())})")
        argv, words = flags_of(given) + argv[1:], argv[1:]
    if twice := flags_given_twice(words):
        parser.error(f"{', '.join(twice)}: given twice; give all its values to one")
    args, strange = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if strange:
        parser.error(f"no such flag: {' '.join(strange)}; --help lists them")
    defaults = {"batch_size": 64, "learning_rate": 2e-5, "num_epochs": 1.0}
    if not args.model_name_or_path:
        defaults = {"batch_size": 2048, "learning_rate": 0.005, "num_epochs": 4.0, "max_length": 256}
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    try:
        args.loss_args = json.loads(args.loss_args)
        if not isinstance(args.loss_args, dict):
            raise ValueError("an object such as {} is wanted")
    except ValueError as error:
        parser.error(f"--loss_args: {error}")
    if not args.train_data:
        args.train_data = [f"{DEMO}/train/{name}-*.parquet" for name in ("stdlib", "packages")]
        args.eval_data = args.eval_data or [f"{DEMO}/heldout/*.parquet"]
        if not Path(DEMO).is_dir():
            parser.error(f"no --train_data, and no demo corpus in {DEMO}: make it with: python prepare_corpus.py")
    if args.mixing_weights and (
        len(args.mixing_weights) != len(args.train_data) or not all(0 < w < math.inf for w in args.mixing_weights)
    ):
        parser.error(f"--mixing_weights: {len(args.train_data)} sources want as many numbers above 0")
    if args.loss in TEACHER_LOSSES and not args.label_column:
        parser.error(f"--loss {args.loss}: wants a teacher's scores; name their column by --label_column")
    for table, columns in (("corpus_table", "corpus_columns"), ("queries_table", "query_columns")):
        if getattr(args, columns) and not getattr(args, table):
            parser.error(f"--{columns}: belongs to --{table}; name it too")
        if len(getattr(args, columns)) == 1:
            parser.error(f"--{columns}: name the id column, then the text columns")
    above_zero = ("batch_size", "micro_batch_tokens", "gradient_accumulation_steps", "length_window", "max_length",
                  "keep_checkpoints", "log_every", "num_epochs", "learning_rate", "matryoshka_dims")  # fmt: skip
    for name, value in asdict(args).items():
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, int | float) or name == "num_negatives":
                continue
            if not 0 <= number < math.inf or (number == 0 and name in above_zero):
                parser.error(f"--{name} {number}: must be {'above 0' if name in above_zero else '0 or more'}")
    if (args.dropout or 0) >= 1:
        parser.error(f"--dropout {args.dropout}: must be below 1")
    if args.warmup_ratio > 1:
        parser.error(f"--warmup_ratio {args.warmup_ratio}: a share of the steps is at most 1")
    return args


# --------------------------------------------------------------------------------------------------------- data

SUFFIXES = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json", ".ndjson": "json",
            ".csv": "csv", ".tsv": "csv", ".txt": "text"}  # fmt: skip
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # of JSON Lines, CSV, TSV and text
READ_ROWS = 1000  # rows of a record batch, the unit of reading: some 100 kB to 1 MB of text
MOST_LINE = 2**26  # characters of a line; more is damage, or a small file made to fill the memory
MOST_TEXT = 2**30  # bytes of text in READ_ROWS rows; the same
TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
BLOCK = 100  # neighbouring rows of a mapped table that are read together; the shuffle window mixes many blocks


# same in train_cross_encoder.py, eval_incremental.py
def file_kind(file):
    """(format, compression or None) by the file's suffixes; BadInput for what cannot be read."""
    stem, suffix = os.path.splitext(file.lower())
    inner = os.path.splitext(stem)[1]
    if suffix in COMPRESSIONS and SUFFIXES.get(inner) in ("json", "csv", "text"):
        return SUFFIXES[inner], COMPRESSIONS[suffix]
    if suffix not in SUFFIXES:
        known = " ".join([*SUFFIXES, *(f".jsonl{c}" for c in COMPRESSIONS)])
        raise BadInput(f"{file}: unknown suffix; what can be read ends in one of {known}")
    return SUFFIXES[suffix], None


# same in train_cross_encoder.py, eval_incremental.py
def list_files(source):
    """The files of a source (path, glob, folder, URL or Hub id), sorted; BadInput when there are none."""
    try:
        fs, path = fsspec.core.url_to_fs(os.path.expanduser(source))
    except (ValueError, ImportError) as error:
        raise BadInput(f"{source}: {error}") from None
    if not source:
        raise BadInput("a source is empty; name a path, glob, folder, URL or Hub id")
    if glob.has_magic(path) and not fs.exists(path):
        found = fs.glob(path)
    elif fs.isdir(path):
        notes = ("dataset_info.json", "state.json", "dataset_dict.json")  # of Dataset.save_to_disk
        known = tuple({**SUFFIXES, **COMPRESSIONS})
        found = [name for name in fs.find(path) if name.lower().endswith(known) and not name.endswith(notes)]
    elif fs.exists(path):
        found = [path]
    elif "://" in source or source.count("/") > 1 or os.path.splitext(source)[1] or source[0] in "./~":
        found = []
    else:  # neither here nor shaped like a path: a Hub dataset, which names the files of its train split itself
        from datasets import load_dataset_builder  # a second to import, and wanted here only

        try:
            found = load_dataset_builder(source).config.data_files["train"]
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise BadInput(f"{source}: no such file or folder here, nor a dataset on the Hub ({reason})") from None
    if not found:
        raise BadInput(f"{source}: no file matches (in folder {os.getcwd()}); check the path")
    files = sorted(name if "://" in name else fs.unstrip_protocol(name).removeprefix("file://") for name in found)
    if len(kinds := {file_kind(name)[0]: name for name in files}) > 1:
        raise BadInput(f"{source}: mixes formats ({', '.join(kinds.values())}); name them as sources of their own")
    return files


# same in train_cross_encoder.py, eval_incremental.py
def select_columns(there, wanted, file):
    """`wanted`, or all columns `there` when none are; BadInput for one that is not there."""
    for name in wanted:
        if name not in there:
            raise BadInput(f"{file}: no column {name!r}; the columns are: {', '.join(map(str, there))}")
    return wanted or list(there)


# same in train_cross_encoder.py
def wanted_columns(args):
    """The columns to read, each once (SimCSE names a column twice)."""
    return list(dict.fromkeys(args.columns + [args.label_column] * bool(args.label_column)))


# same in train_cross_encoder.py
def holds_ids(args):
    """Whether columns of the rows hold ids, which may be whole numbers."""
    return bool(args.corpus_table or args.queries_table)


# same in train_cross_encoder.py, eval_incremental.py
def fits(cell, kind):
    """Whether a cell is what a column of the Arrow type `kind` holds: a text, or a list of texts."""
    if pa.types.is_list(kind):
        return isinstance(cell, list) and all(isinstance(text, str) for text in cell)
    return isinstance(cell, str)


# same in train_cross_encoder.py, eval_incremental.py
def text_batches(file, kind, lines, wanted, label, ids):
    """Yield RecordBatches of strings from JSON Lines, CSV, TSV or plain text; a JSON label stays its JSON text.

    A column of lists of strings is one where the first READ_ROWS records have a list. A whole number is no text,
    unless the columns hold `ids`.
    """

    def bounded():
        while line := lines.readline(MOST_LINE):
            if len(line) == MOST_LINE:
                raise BadInput(f"{file}: a line of more than {MOST_LINE:,} characters; split its text")
            yield line

    records = ((number, line, len(line)) for number, line in enumerate(bounded(), start=1))
    if kind == "csv":
        csv.field_size_limit(MOST_LINE)
        table = csv.DictReader(bounded(), delimiter="\t" if ".tsv" in file.lower() else ",", strict=True)
        records = ((table.line_num, record, sum(map(len, filter(None, record.values())))) for record in table)
    elif kind == "text":
        records = ((number, {"text": line.rstrip("\r\n")}, size) for number, line, size in records)
    schema, rows, held = None, [], 0  # held: characters of the rows
    for number, record, size in chain(records, [(None, None, 0)]):
        if rows and (record is None or len(rows) == READ_ROWS or held > MOST_LINE):
            if not schema:
                there = dict.fromkeys(chain.from_iterable(rows)) if wanted else rows[0]  # JSON may leave a null out
                kinds = {name: pa.string() for name in select_columns(there, wanted, file)}
                kinds |= {n: pa.list_(pa.string()) for n in kinds if any(isinstance(row.get(n), list) for row in rows)}
                schema = pa.schema(kinds.items())
            # a cell that is missing, or does not fit, is null, and hence a bad row
            cells = [[c if fits(c := row.get(f.name), f.type) else None for row in rows] for f in schema]
            yield pa.record_batch([pa.array(column, f.type) for column, f in zip(cells, schema)], schema)
            rows, held = [], 0
        if record is None:
            return
        held += size
        if kind == "json":
            if not record.strip():
                continue
            try:
                record = json.loads(record)
            except (ValueError, RecursionError) as error:
                raise BadInput(f"{file}, line {number}: not JSON ({error}); mend or remove the line") from None
            if not isinstance(record, dict):
                raise BadInput(f"{file}, line {number}: not a JSON object; one row a line is expected")
        if None in record:  # where csv puts them
            raise BadInput(f"{file}, line {number}: more cells than the header has; quote the cell with the separator")
        if record.get(label) is not None and not isinstance(record[label], str):
            record[label] = json.dumps(record[label])
        if kind == "json" and ids:
            for name, cell in record.items():
                if type(cell) is int:
                    record[name] = str(cell)
                elif isinstance(cell, list):
                    record[name] = [str(one) if type(one) is int else one for one in cell]
        rows.append(record)


# same in train_cross_encoder.py, eval_incremental.py
def rows_at_once(raw, metadata, group, wanted):
    """Rows of a Parquet row group to read at a time: READ_ROWS, or fewer where a dictionary repeats long texts."""
    chunks = [metadata.row_group(group).column(number) for number in range(metadata.num_columns)]
    large = [chunk.path_in_schema for chunk in chunks if chunk.total_uncompressed_size * READ_ROWS > MOST_TEXT]
    schema, longest = metadata.schema.to_arrow_schema(), 1
    texts = [n for n, type in zip(schema.names, schema.types) if n in wanted and n in large and type in TEXTS]
    file = pq.ParquetFile(raw, metadata=metadata, buffer_size=2**20, read_dictionary=texts)
    for batch in islice(file.iter_batches(1, [group], texts, use_threads=False), 1 if texts else 0):
        for column in batch.columns:
            if pa.types.is_dictionary(column.type):
                longest = max(longest, pc.max(pc.binary_length(column.dictionary)).as_py() or 0)
    return max(1, min(READ_ROWS, MOST_TEXT // 4 // longest))


# same in train_cross_encoder.py, eval_incremental.py
def validated(batch):
    """A RecordBatch after a look at its offsets, indices and UTF-8: damaged ones would point anywhere."""
    batch.validate(full=True)
    return batch


# same in train_cross_encoder.py, eval_incremental.py
def decoded(column, file):
    """A column without the dictionary in which it may hold each text once, however often it stands there."""
    if not pa.types.is_dictionary(column.type):
        return column
    if column.type.value_type in TEXTS:
        size = pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0
        if size > MOST_TEXT:
            raise BadInput(f"{file}: {len(column):,} of its rows hold {size:,} bytes of text; split their texts")
    return column.dictionary_decode()


# same in train_cross_encoder.py, eval_incremental.py
def read_batches(file, wanted=(), label=None, start=0, ids=False):
    """Yield (number of the first row, RecordBatch of at most READ_ROWS rows) of one file, from row `start` on.

    Memory is bounded by a record batch (Parquet: a row group) whatever the file's size. BadInput names the file, and
    the line where there is one.
    """
    kind, compression = file_kind(file)
    row = 0
    try:
        with fsspec.open(file, "rb") as raw:
            if kind == "parquet":
                table = pq.ParquetFile(raw, buffer_size=2**20)
                wanted = select_columns(table.schema_arrow.names, wanted, file)
                ends = np.cumsum([0] + [table.metadata.row_group(g).num_rows for g in range(table.num_row_groups)])
                group = int(np.searchsorted(ends, start, side="right")) - 1  # earlier row groups are not even read
                row = int(ends[group])
                # one row group at a time: a reader of many opens them all, and its memory grows with their number
                readers = (
                    table.iter_batches(rows_at_once(raw, table.metadata, g, wanted), [g], wanted, use_threads=False)
                    for g in range(group, table.num_row_groups)
                )
                batches = map(validated, chain.from_iterable(readers))
            elif kind == "arrow":
                is_stream = raw.read(6) != b"ARROW1"  # the format that `datasets` writes; else Arrow's file format
                raw.seek(0)
                table = pa.ipc.open_stream(raw) if is_stream else pa.ipc.open_file(raw)
                wanted = select_columns(table.schema.names, wanted, file)
                large = table if is_stream else map(table.get_batch, range(table.num_record_batches))
                large = (validated(batch.select(wanted)) for batch in large)
                batches = (batch.slice(i, READ_ROWS) for batch in large for i in range(0, len(batch), READ_ROWS))
            else:
                # pyarrow decompresses: it notices a truncated file, where Python's zstandard just ends
                stream = pa.input_stream(raw, compression=compression)
                lines = io.TextIOWrapper(stream, "utf-8-sig", newline="")
                batches = text_batches(file, kind, lines, wanted, label, ids)
            first, held = row, 0  # bytes of the rows since `first`, some READ_ROWS
            for batch in batches:
                batch = pa.record_batch([decoded(column, file) for column in batch.columns], batch.schema.names)
                held += batch.nbytes
                if held > MOST_TEXT and row > first:  # one batch is what the file holds, columns nobody wants among it
                    raise BadInput(
                        f"{file}: rows {first} to {row + len(batch)} hold {held:,} bytes; split their texts"
                    )
                if row + len(batch) > start:
                    skip = max(start - row, 0)
                    yield row + skip, batch.slice(skip)
                row += len(batch)
                if row - first >= READ_ROWS:
                    first, held = row, 0
    except (OSError, EOFError, pa.ArrowException, UnicodeError, csv.Error) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(f"{file}: cannot be read after row {row} ({reason}); replace the file") from None


# same in train_cross_encoder.py
def rows_of(batch, file, number, args):
    """Yield (texts, label, file, row number) for the rows of a RecordBatch that starts at row `number` of `file`."""
    cells = {name: batch.column(name).to_pylist() for name in wanted_columns(args)}
    labels = cells[args.label_column] if args.label_column else [None] * len(batch)
    for offset, (*texts, label) in enumerate(zip(*(cells[name] for name in args.columns), labels)):
        yield texts, label, file, number + offset


# same in train_cross_encoder.py
def checked(row, args):
    """The row with its label as a number or list of numbers; for a bad row BadInput, or None where it is skipped."""
    texts, label, file, number = row
    problem = None
    names = args.columns + args.columns[-1:] * (len(texts) - len(args.columns))  # a list of texts has one name
    for name, text in zip(names, texts):
        if not isinstance(text, str) or not text.strip():
            problem = f"column {name!r} is {'empty' if text == '' else repr(text)[:40]}, not a text"
    if args.label_column and not problem:
        try:
            value = json.loads(label) if isinstance(label, str) else label
            value = [float(v) for v in value] if isinstance(value, list) else float(value)
            problem = None if np.isfinite(value).all() else f"the label {label!r} is not finite"
            label = value
        except (ValueError, TypeError, OverflowError, RecursionError):
            problem = f"the label {str(label)[:40]!r} is not a number"
    if problem and args.on_bad_row == "error":
        raise BadRow(f"{file}, row {number}: {problem}; mend the row or pass --on_bad_row skip")
    return None if problem else (texts, label, file, number)


def checked_scores(row, args):
    """The row as in `checked`, with a teacher's score for each of its documents, which are two or more."""
    if not (row := checked(row, args)):
        return None
    texts, scores, file, number = row
    found = len(scores) if isinstance(scores, list) else 1
    if found == len(texts) - 1 > 1:
        return row
    if args.on_bad_row == "skip":
        return None
    raise BadRow(
        f"{file}, row {number}: {found} scores for {len(texts) - 1} documents; --loss {args.loss} wants two documents "
        "or more, and a score for each; mend the row, choose with --columns, or pass --on_bad_row skip"
    )


# same in train_cross_encoder.py, eval_incremental.py
def arrow_copy(file, wanted, label, folder, ids=False):
    """Path of `file` as Arrow on this machine: the file itself, or a copy made once in `folder`, atomically."""
    fs, path = fsspec.core.url_to_fs(file)
    if file_kind(file)[0] == "arrow" and "file" in fs.protocol:
        return path
    key = hashlib.sha256(json.dumps([fs.ukey(path), sorted(wanted), label, ids]).encode()).hexdigest()[:32]
    copy = Path(folder).expanduser() / f"{key}.arrow"
    if not copy.exists():
        part = copy.with_suffix(f".{os.getpid()}.part")
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with pa.OSFile(str(part), "wb") as sink, tqdm(unit=" rows", desc=f"mapping {file}", delay=2) as bar:
                writer = None
                for _, batch in read_batches(file, wanted, label, ids=ids):
                    writer = writer or pa.ipc.new_stream(sink, batch.schema)
                    writer.write_batch(batch)
                    bar.update(len(batch))
                (writer or pa.ipc.new_stream(sink, pa.schema([(name, pa.string()) for name in wanted]))).close()
            os.replace(part, copy)
        except OSError as error:
            raise BadInput(f"--data_cache {folder}: {error}; make room, or name another folder") from None
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
    return str(copy)


# same in train_cross_encoder.py, eval_incremental.py
def arrow_index(path):
    """(schema, [(byte offset, rows) of each record batch]) of an Arrow file, stream or file format."""
    size, offsets, schema = os.path.getsize(path), [], None
    with open(path, "rb") as raw:
        position = 8 if raw.read(6) == b"ARROW1" else 0  # the file format is the stream format behind eight bytes
    while position < size:
        # The map is renewed, for it keeps the pages it touched resident: 60 kB around each record batch's header.
        with pa.memory_map(path) as source:
            source.seek(position)
            for _ in range(200):
                position = source.tell()
                try:
                    message = pa.ipc.read_message(source)
                except EOFError:
                    if size - position < 8:
                        raise pa.ArrowInvalid("truncated: the end-of-stream mark is missing") from None
                    return schema, offsets  # the mark was read; only a file format's footer comes after it
                if message.type == "schema":
                    schema = pa.ipc.read_schema(message)
                elif message.type == "record batch":
                    offsets.append((position, pa.ipc.read_record_batch(message, schema).num_rows))
                else:
                    raise BadInput(f"{path}: holds a {message.type}; convert it: python prepare_corpus.py {path} ...")
            position = source.tell()
    return schema, offsets


# same in train_cross_encoder.py, eval_incremental.py
def read_rows(path, offset, schema, first, count):
    """Rows `first` to `first + count` of the record batch at a byte `offset` of an Arrow file; BadInput if damaged."""
    try:
        with pa.OSFile(path) as source:
            source.seek(offset)
            return validated(pa.ipc.read_record_batch(pa.ipc.read_message(source), schema).slice(first, count))
    except (OSError, EOFError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise BadInput(f"{path}: damaged at byte {offset} ({reason}); replace the file, or remove a copy") from None


# same in train_cross_encoder.py
class MappedSource:
    """Arrow tables on disk, read at random; row `position` of the endless sequence of shuffled passes over them is a
    pure function of (seed, position), so to resume is to seek: windows of random blocks, each window shuffled whole.

    Record batches are read by their offset, not through a memory map: a map keeps every page it touched resident
    (opening 5,000,000 rows with `datasets`: 320 MB), while the pages that were read stay the system's to drop.
    """

    def __init__(self, index, files, args):
        self.index, self.args, self.files, self.held = index, args, files, 0
        wanted = wanted_columns(args)
        self.tables, places, rows = [], [], [0]
        for number, file in enumerate(files):
            path = arrow_copy(file, wanted, args.label_column, args.data_cache, holds_ids(args))
            try:
                schema, offsets = arrow_index(path)
                select_columns(schema.names, wanted, file)
            except (pa.ArrowException, OSError, TypeError, AttributeError) as error:
                raise BadInput(f"{file}: not an Arrow file ({error}); replace it") from None
            self.tables.append((path, schema))
            places += [(number, offset) for offset, _ in offsets]
            rows += [count for _, count in offsets]
        self.places = np.array(places, dtype=np.int64).reshape(-1, 2)  # (record batches, 2): file, byte offset
        self.first = np.cumsum(rows)  # (record batches + 1,): number of the first row, over all files
        self.first_of_file = [int(self.first[np.searchsorted(self.places[:, 0], n)]) for n in range(len(files))]

    def __len__(self):
        return int(self.first[-1]) - self.held

    def read(self, start, stop):
        """Rows `start` to `stop` (or the end), numbered over all files."""
        rows, at = [], int(np.searchsorted(self.first, start, side="right")) - 1
        while start < min(stop, self.first[-1]):
            file, offset = self.places[at]
            path, schema = self.tables[file]
            batch = read_rows(path, offset, schema, start - self.first[at], stop - start)
            rows += rows_of(batch, self.files[file], int(start) - self.first_of_file[file], self.args)
            start, at = start + len(batch), at + 1
        return rows

    def hold_out(self, count):
        """The first `count` rows, which `rows` then leaves out."""
        self.held = min(count, len(self))
        return self.read(0, self.held)

    def rows(self, position):
        """Yield (row, position after it) for ever, from position 0 or one that was yielded."""
        size, window = len(self), self.args.shuffle_buffer or READ_ROWS
        block = min(BLOCK, window)
        window -= window % block
        position = position or 0
        while True:
            turn, offset = divmod(position, size)  # which pass over the data, and the row in it
            seed = [self.args.seed, self.index, turn]
            blocks = np.arange(-(-size // block))
            if self.args.shuffle_buffer:
                np.random.default_rng(seed).shuffle(blocks[: size // block])  # a short last block stays the last
            while offset < size:
                number = offset // window
                starts = blocks[number * window // block : (number + 1) * window // block] * block
                rows = [row for s in starts for row in self.read(self.held + s, self.held + min(s + block, size))]
                order = np.arange(len(rows))
                if self.args.shuffle_buffer:
                    np.random.default_rng([*seed, number]).shuffle(order)
                for place in order[offset - number * window :]:
                    position += 1
                    yield rows[place], position
                offset = number * window + len(rows)


# same in train_cross_encoder.py
class StreamSource:
    """Files read front to back, in a new order each pass and shuffled window by window. A position names where the
    window begins and how many of its rows are used, so a resume reads that window again and loses nothing."""

    def __init__(self, index, files, args):
        self.index, self.args, self.files = index, args, files
        self.held = [0] * len(files)
        # Reads up to the first row: a wrong column is said now, not an hour into the run.
        self.empty = not any(next(read_batches(file, wanted_columns(args)), None) for file in files)

    def __len__(self):
        return 0 if self.empty else 1  # unknown; streams are mixed in equal shares unless weights are given

    def read(self, order, shard, row):
        """Yield (place in `order`, row) of the files in `order`, from row `row` of file `order[shard]` on."""
        for place in range(shard, len(order)):
            file = self.files[order[place]]
            start = max(row if place == shard else 0, self.held[order[place]])
            wanted, ids = wanted_columns(self.args), holds_ids(self.args)
            for number, batch in read_batches(file, wanted, self.args.label_column, start, ids):
                for values in rows_of(batch, file, number, self.args):
                    yield place, values

    def hold_out(self, count):
        """The first `count` rows, which `rows` then leaves out."""
        rows = list(islice(self.read(range(len(self.files)), 0, 0), count))
        for place, row in rows:
            self.held[place] = row[3] + 1
        return [row for _, row in rows]

    def rows(self, position):
        """Yield (row, position after it) for ever, from None or a position that was yielded."""
        at = position or {"pass": 0, "window": 0, "shard": 0, "row": 0, "used": 0}
        while True:
            seed = [self.args.seed, self.index, at["pass"]]
            order = np.arange(len(self.files))
            if self.args.shuffle_buffer:
                np.random.default_rng(seed).shuffle(order)
            reader = self.read(order, at["shard"], at["row"])
            while window := list(islice(reader, self.args.shuffle_buffer or READ_ROWS)):
                at = {**at, "shard": int(window[0][0]), "row": window[0][1][3]}
                places = np.arange(len(window))
                if self.args.shuffle_buffer:
                    np.random.default_rng([*seed, at["window"]]).shuffle(places)
                for used in range(at["used"], len(window)):
                    yield window[places[used]][1], {**at, "used": used + 1}
                at = {**at, "window": at["window"] + 1, "used": 0}
            if at["window"] == 0:
                raise BadInput(f"{self.files[0]}: no row is left to train on; lower --eval_rows")
            at = {"pass": at["pass"] + 1, "window": 0, "shard": 0, "row": 0, "used": 0}


# same in train_cross_encoder.py
def due(picks, weights):
    """The source to take the next row from, so that each has its share to within a row at every moment.

    No dice are thrown, so there is no state but the picks: the quota method (Balinski and Young 1975).
    """
    quota = [weight * (sum(picks) + 1) / sum(weights) for weight in weights]
    short = [source for source in range(len(weights)) if picks[source] < quota[source]]
    return min(short, key=lambda source: (picks[source] + 1) / weights[source])


# same in train_cross_encoder.py
def hold_out(sources, weights, count):
    """The first `count` rows of the interleaved sources, taken out of them."""
    picks = [0] * len(sources)
    for _ in range(count):
        picks[due(picks, weights)] += 1
    return [row for source, number in zip(sources, picks) for row in source.hold_out(number)]


# same in train_cross_encoder.py
def row_batches(sources, weights, args, position, check=checked):
    """Yield (rows of one batch, position after it) for ever: a pure function of sources, weights, seed and batch size.

    A position is JSON: how often each source was picked, where each stands, and how many batches of a length window
    are used. It travels with its batch, so what was read ahead is never lost and never repeated.
    """
    at = position or {"picks": [0] * len(sources), "sources": [None] * len(sources), "cut": 0, "skipped": 0}
    readers = [source.rows(place) for source, place in zip(sources, at["sources"])]
    wanted = args.batch_size * args.length_window
    while True:
        picks, places, skipped, rows = list(at["picks"]), list(at["sources"]), at["skipped"], []
        if args.mix_by == "batch":
            source = due(picks, weights)
            picks[source] += 1
        while len(rows) < wanted:
            if args.mix_by == "row":
                source = due(picks, weights)
                picks[source] += 1
            row, places[source] = next(readers[source])
            if good := check(row, args):
                rows.append(good)
            else:
                skipped += 1
                if skipped - at["skipped"] > 100_000 + wanted:
                    raise BadInput(f"{row[2]}: 100,000 bad rows in a batch; check --columns and --label_column")
        after = {"picks": picks, "sources": places, "cut": 0, "skipped": skipped}
        order = np.arange(args.length_window)
        if args.length_window > 1:
            rows.sort(key=lambda row: sum(map(len, row[0])))
            np.random.default_rng([args.seed, *at["picks"]]).shuffle(order)
        for used in range(at["cut"], args.length_window):
            first = order[used] * args.batch_size
            last = used + 1 == args.length_window
            yield rows[first : first + args.batch_size], after if last else {**at, "cut": used + 1}
        at = after


# same in train_cross_encoder.py
class IdTable:
    """Texts by id, from sources on disk; no process holds the texts, nor a dict of the ids.

    A row is read by seeking its line in a JSON Lines file: the source's own, or a copy of it made once. Where the line
    of an id begins is in a database made once for all processes of a machine: SQLite's B-tree, O(log n), in some MB.
    """

    def __init__(self, flag, sources, columns, default, folder):
        self.flag, self.sources = flag, [file for source in sources for file in list_files(source)]
        self.columns, self.files = columns or default, []
        for file in self.sources:
            there = self.columns
            try:
                next(read_batches(file, there), None)
            except BadInput:  # a title is usual, not certain; another wrong column is said now
                there = [name for name in there if columns or name != "title"]
                next(read_batches(file, there), None)
            self.files.append(json_lines(file, there, folder))
        key = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in self.files]
        key = hashlib.sha256(json.dumps([key, self.columns[0]]).encode()).hexdigest()[:32]
        path = Path(folder).expanduser() / f"{key}.ids"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                with FileLock(f"{path}.lock"):  # of several processes one builds, the others wait
                    if not path.exists():
                        self._build(path)
            self.lines = [os.open(file, os.O_RDONLY) for file in self.files]
            self.places = sqlite3.connect(f"{path.resolve().as_uri()}?immutable=1", uri=True, check_same_thread=False)
            self.rows, self.content = self.places.execute("SELECT rows, content FROM about").fetchone()
        except (OSError, TypeError, sqlite3.Error) as error:
            damaged = f"; remove {path}, it is damaged" if path.exists() else ""
            raise BadInput(
                f"--data_cache {folder}: {error}{damaged or '; make room, or name another folder'}"
            ) from None

    def _build(self, path):
        part = path.with_suffix(".part")  # of a process that was killed, perhaps
        part.unlink(missing_ok=True)
        with closing(sqlite3.connect(part, isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode = OFF")  # the file gets its name when it is whole
            database.execute("PRAGMA synchronous = OFF")
            database.execute("CREATE TABLE places (place INTEGER PRIMARY KEY, id TEXT NOT NULL)")
            database.execute("CREATE TABLE about (rows INTEGER, content TEXT)")
            database.execute("BEGIN")
            content = hashlib.sha256()
            bar = tqdm(self._ids(content), f"indexing {self.sources[0]}", unit=" rows", delay=2)
            database.executemany("INSERT INTO places VALUES (?, ?)", bar)
            try:
                database.execute("CREATE UNIQUE INDEX by_id ON places (id)")  # sorts on disk
            except sqlite3.IntegrityError:
                twice = "SELECT id, max(place) FROM places GROUP BY id HAVING count(*) > 1 LIMIT 1"
                name, place = database.execute(twice).fetchone()
                raise BadInput(
                    f"{self.sources[place >> 44]}: id {name!r} stands twice in {self.flag}; ids must differ"
                ) from None
            database.execute("INSERT INTO about VALUES (?, ?)", (bar.n, content.hexdigest()[:16]))
            database.execute("COMMIT")
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)

    def _ids(self, content):
        """Yield (place, id) of each row; a place is the number of the file times 2**44, and the byte in it."""
        for number, (source, file) in enumerate(zip(self.sources, self.files)):
            place = number << 44
            with open(file, "rb") as lines:
                for count, line in enumerate(lines, start=1):
                    content.update(line)
                    if line.strip():
                        try:
                            name = json.loads(line).get(self.columns[0])
                            if type(name) not in (str, int):
                                raise ValueError(f"no text or whole number in column {self.columns[0]!r}")
                            name = str(name)
                            name.encode()
                        except (ValueError, AttributeError) as error:
                            raise BadInput(f"{source}, line {count}: no row with an id ({error}); mend it") from None
                        yield place, name
                    place += len(line)

    def texts(self, ids):
        """{id: text} of those of the ids that are there."""
        found = {}
        marks = ",".join("?" * len(ids))
        for name, place in self.places.execute(f"SELECT id, place FROM places WHERE id IN ({marks})", ids):
            file, at = self.lines[place >> 44], place & (2**44 - 1)
            size = 1024  # some passages; most of the time goes into copying what is read
            while b"\n" not in (line := os.pread(file, size, at)) and len(line) == size:
                size *= 4
            try:
                record = json.loads(line.partition(b"\n")[0].decode("utf-8-sig"))
                if str(record[self.columns[0]]) != name:
                    raise ValueError("it has another id")
            except (ValueError, KeyError, TypeError) as error:
                source = self.sources[place >> 44]
                raise BadInput(f"{source}: changed while it was read (id {name!r}: {error}); start again") from None
            try:
                cells = [record.get(column) for column in self.columns[1:]]
                found[name] = " ".join(str(cell) if type(cell) is int else cell or "" for cell in cells).strip()
                found[name].encode()
            except (TypeError, UnicodeError) as error:
                raise BadInput(f"{self.sources[place >> 44]}: id {name!r}: not text ({error}); mend the row") from None
        return found


# same in train_cross_encoder.py
def json_lines(file, columns, folder):
    """Path of `file` as JSON Lines on this machine: the file itself, or a copy made once in `folder`, atomically."""
    fs, path = fsspec.core.url_to_fs(file)
    if file_kind(file) == ("json", None) and "file" in fs.protocol:
        return path
    key = hashlib.sha256(json.dumps([fs.ukey(path), columns]).encode()).hexdigest()[:32]
    copy = Path(folder).expanduser() / f"{key}.jsonl"
    if not copy.exists():
        part = copy.with_suffix(f".{os.getpid()}.part")
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with open(part, "w") as sink, tqdm(unit=" rows", desc=f"mapping {file}", delay=2) as bar:
                for _, batch in read_batches(file, list(dict.fromkeys(columns)), columns[0]):
                    sink.writelines(json.dumps(row) + "\n" for row in batch.to_pylist())
                    bar.update(len(batch))
            os.replace(part, copy)
        except TypeError as error:
            raise BadInput(f"{file}: {error}: ids and texts are wanted in {', '.join(columns)}; convert it") from None
        except OSError as error:
            raise BadInput(f"--data_cache {folder}: {error}; make room, or name another folder") from None
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
    return str(copy)


# same in train_cross_encoder.py
def open_tables(args):
    """The IdTables of the first column and of the others; None for texts that stand in the rows themselves."""
    given = (
        ("--queries_table", args.queries_table, args.query_columns, ["_id", "text"]),
        ("--corpus_table", args.corpus_table, args.corpus_columns, ["_id", "title", "text"]),
    )
    return [IdTable(*names, args.data_cache) if names[1] else None for names in given]


# same in train_cross_encoder.py
def with_texts(tables, check):
    """`check`, of rows whose ids are replaced by their texts first; an unknown id makes a bad row."""

    def look_up(row, args):
        cells, label, file, number = row
        texts = [cells[:1], cells[1:]]
        for side, table in enumerate(tables):
            if table:
                flat = [name for cell in texts[side] for name in (cell if isinstance(cell, list) else [cell])]
                found = table.texts(list(map(str, flat)))
                for name in flat:
                    if str(name) not in found:
                        if args.on_bad_row == "skip":
                            return None
                        problem = f"id {name!r} is not in {table.flag}" if name is not None else "an id is missing"
                        raise BadRow(f"{file}, row {number}: {problem}; mend the row or pass --on_bad_row skip")
                texts[side] = [
                    [found[str(name)] for name in cell] if isinstance(cell, list) else found[str(cell)]
                    for cell in texts[side]
                ]
        return check((texts[0] + texts[1], label, file, number), args)

    return look_up if any(tables) else check


# ---------------------------------------------------------------------------------------- shares and micro-batches


# same in train_cross_encoder.py, eval_incremental.py
def deal(lengths, processes):
    """Index lists, one a process, even in count and in length: longest first, in snake order (0 1 1 0 0 1 ...)."""
    shares = [[] for _ in range(processes)]
    for place, text in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        turn, process = divmod(place, processes)
        shares[process if turn % 2 == 0 else processes - 1 - process].append(text)
    return shares


# same in prepare_corpus.py, train_cross_encoder.py, eval_incremental.py
def cut_micro_batches(lengths, budget):
    """Index lists, longest text first, each of at most `budget` tokens with padding; a longer text stands alone.

    Of all such cuts of the sorted texts the one with the fewest padded tokens, where a forward pass is taken to cost
    32 tokens of its own at a budget of 2,048, as on CPUs, where 12 to 35 were measured, and 1,024 at 16,384, where it
    is launched to a GPU. So short texts are not padded to long ones, nor encoded by twos and threes.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    sizes = np.array([max(lengths[i], 1) for i in order])
    cost_of_a_pass = 32 * (budget / 2048) ** (5 / 3)
    costs, begins = np.zeros(len(order) + 1), np.zeros(len(order) + 1, dtype=int)  # of the best cut of the first texts
    for end in range(1, len(order) + 1):
        firsts = np.arange(max(0, min(end - 1, end - budget // sizes[end - 1])), end)  # of the last micro-batch
        padded = (end - firsts) * sizes[firsts]
        padded = np.where((padded <= budget) | (firsts == end - 1), padded, np.inf)
        best = np.argmin(costs[firsts] + padded)
        costs[end], begins[end] = costs[firsts[best]] + padded[best] + cost_of_a_pass, firsts[best]
    cuts, end = [], len(order)
    while end:
        cuts.append(order[begins[end] : end])
        end = begins[end]
    return cuts[::-1]


# same in train_cross_encoder.py, eval_incremental.py
def padded_length(length, model, device):
    """Tokens that a text of `length` is padded to at least: on a GPU a multiple of 8, as its fast kernels want."""
    return length if device.type == "cpu" else max(length, min(-(-length // 8) * 8, model.max_seq_length))


# same in eval_incremental.py
def make_micro_batches(texts, model, budget, device):
    """(micro-batches, tokens, tokens with padding) of `texts`, tokenized, cut and padded, longest first.

    A micro-batch is (features, places in `texts`).
    """
    tokenizer = model.tokenizer
    if isinstance(tokenizer, Tokenizer):  # a static embedding model: texts lie end to end, there is no padding
        ids = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
        lengths = [math.ceil(sum(map(len, ids)) / len(ids))] * len(ids)
    else:
        encodings = tokenizer(texts, truncation=True, max_length=model.max_seq_length)
        ids = encodings["input_ids"]
        lengths = [padded_length(len(i), model, device) for i in ids]
    micro_batches, padded = [], 0
    for cut in cut_micro_batches(lengths, budget):
        if isinstance(tokenizer, Tokenizer):
            offsets = np.cumsum([0] + [len(ids[i]) for i in cut[:-1]])
            flat = np.fromiter((token for i in cut for token in ids[i]), np.int64)
            features = {"input_ids": torch.from_numpy(flat), "offsets": torch.from_numpy(offsets)}
        else:
            picked = {name: [values[i] for i in cut] for name, values in encodings.items()}
            features = dict(tokenizer.pad(picked, "max_length", lengths[cut[0]], return_tensors="pt"))
        padded += features["input_ids"].numel()
        if device.type == "cuda":
            features = {name: tensor.pin_memory() for name, tensor in features.items()}
        micro_batches.append((features, cut))
    return micro_batches, sum(map(len, ids)), padded


# same in train_cross_encoder.py
@dataclass
class Share:
    """What one process encodes of N texts, and where the texts of all processes lie once gathered."""

    mine: list  # indices of this process' texts
    width: int  # texts of the largest share; the others are padded to it to be gathered
    slots: torch.Tensor  # (N,) row of each text among the gathered (processes * width) rows
    micro_batches: list  # (features, places in `mine`), longest first
    tokens: int  # of this share
    padded: int  # the same with padding


def make_share(texts, model, budget, accelerator):
    """This process' Share of `texts` (the same list on every process), tokenized, cut and padded."""
    shares = deal([len(text) for text in texts], accelerator.num_processes)
    width = max(map(len, shares))
    slots = torch.empty(len(texts), dtype=torch.long)
    for process, share in enumerate(shares):
        slots[share] = torch.arange(len(share)) + process * width
    mine = shares[accelerator.process_index]
    texts = [texts[i] for i in mine]
    return Share(mine, width, slots, *make_micro_batches(texts, model, budget, accelerator.device))


# same in eval_incremental.py
def encode(model, features, accelerator):
    """(n, D) float embeddings of one micro-batch."""
    features = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in features.items()}
    return model(features)["sentence_embedding"].float()


# same in train_cross_encoder.py
def even_out(share, accelerator):
    """Under FSDP, whose forward passes are collectives, every process runs as many: the last again, for no text."""
    if accelerator.distributed_type == DistributedType.FSDP:
        passes = accelerator.gather(torch.tensor([len(share.micro_batches)], device=accelerator.device))
        features, _ = share.micro_batches[-1]  # the shortest texts
        share.micro_batches += [(features, [])] * (int(passes.max()) - len(share.micro_batches))
    return share


# same in train_cross_encoder.py
def gather_texts(parts, share, accelerator):
    """(N, D) detached outputs for all texts, in their order, from the (n, D) parts of this process."""
    places = torch.tensor([place for _, cut in share.micro_batches for place in cut], device=parts[0].device)
    local = parts[0].new_zeros(share.width, parts[0].shape[1])
    local[places] = torch.cat(parts).detach()
    return accelerator.gather(local)[share.slots.to(local.device)]


# --------------------------------------------------------------------------------------------- the model and its loss


STATIC_DIM = 1024  # of a model from scratch; on the demo corpus 512 cost 0.007 of MRR@10


def static_modules(texts, args):
    """[StaticEmbedding, Normalize], the mean of the embeddings of a text's words, with a tokenizer made for `texts`.

    Vectors begin at random with the length of their inverse document frequency, so that even untrained the rare words
    of a text outweigh the common ones.
    """
    texts = list(texts)
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    # identifiers fall into their words (readGzipFile, read_gzip_file: read gzip file), and punctuation falls away
    camel = Regex(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(camel, " "), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\p{L}\p{M}]+|\p{N}+"), "removed", invert=True)
    trainer = trainers.BpeTrainer(vocab_size=30_000, min_frequency=2, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.enable_truncation(args.max_length)
    found = np.zeros(tokenizer.get_vocab_size())  # (V,) texts that hold a token
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        found[np.unique(encoding.ids)] += 1
    idf = torch.from_numpy(np.log((len(texts) + 1) / (found + 1))).float()
    generator = torch.Generator().manual_seed(args.seed)
    weights = torch.randn(len(found), STATIC_DIM, generator=generator)
    weights *= (idf / idf.max() / STATIC_DIM**0.5)[:, None]  # (V, D)
    return [StaticEmbedding(tokenizer, embedding_weights=weights), Normalize()]


# same in train_cross_encoder.py
def add_lora(model, args, task=None):
    """Freeze the transformer, with --lora_rank adapters beside its linear layers to train (Hu et al. 2021, section 4).

    The update is scaled by 2, whatever the rank. `task` names what else is trained, for peft.
    """
    try:
        from peft import LoraConfig, get_peft_model  # optional
    except ImportError:
        raise BadInput("--lora_rank: wants peft; pip install peft") from None
    if not hasattr(model[0], "model"):
        raise BadInput(f"--lora_rank {args.lora_rank}: a static embedding model has no layers to adapt; leave it out")
    torch.manual_seed(args.seed)  # the same adapters on every process
    rank = args.lora_rank
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type=task)
    model[0].model = get_peft_model(model[0].model, config)


# same in train_cross_encoder.py, eval_incremental.py
def weight_options(path):
    """Options that let transformers read no pickle; ValueError where weights lie outside of the model's folder."""
    for index in Path(path).rglob("*.safetensors.index.json"):
        for name in json.loads(index.read_text())["weight_map"].values():
            if os.path.isabs(name) or os.path.normpath(name).startswith(".."):
                raise ValueError(f"{index} names a file outside of the folder, {name}")
    return {"use_safetensors": True}


# same in train_cross_encoder.py
def set_dropout(model, probability):
    """Set the dropout probability of a model: of its Dropout modules, and where modules and configs keep a number.

    BERT's attention reads it from a Dropout module, ModernBERT's and Qwen's from a number of their own. BadInput where
    the model has no dropout and one above 0 is asked for.
    """
    found = 0
    for module in model.modules():
        holders = [module, *[value for name, value in vars(module).items() if name == "config" and value]]
        for holder in holders:
            for name, value in vars(holder).items():
                if "dropout" in name and isinstance(value, int | float):
                    setattr(holder, name, probability)
                    found += 1
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = probability
            found += 1
    if probability and not found:
        raise BadInput(f"--dropout {probability}: the model has no dropout to set; leave it out")


def load_model_from(args, texts, fresh, accelerator):
    """The SentenceTransformer to train: from a Hub id or folder, or a static embedding model made for the `texts`."""
    path = args.model_name_or_path
    if not path:
        path = str(Path(args.output_dir) / "from_scratch")
        if accelerator.is_main_process and fresh:
            model = SentenceTransformer(modules=static_modules(texts, args), device="cpu")
            save_atomically(path, lambda part: model.save_pretrained(str(part), create_model_card=False))
        accelerator.wait_for_everyone()
    try:
        options = weight_options(path)
        if args.attn_implementation:
            options["attn_implementation"] = args.attn_implementation
        model = SentenceTransformer(path, device="cpu", model_kwargs=options)
    except Exception as error:  # whatever a damaged file makes the libraries raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(f"--model_name_or_path {path}: {reason}; check the path, or restore the folder") from None
    if args.max_length and args.model_name_or_path:
        most = getattr(model.config, "max_position_embeddings", None) or args.max_length
        if args.max_length > most:
            raise BadInput(f"--max_length {args.max_length}: the model has positions for {most} tokens")
        model.max_seq_length = args.max_length
    if args.pooling:
        places = [place for place, module in enumerate(model) if isinstance(module, Pooling)]
        if not places:
            raise BadInput(f"--pooling {args.pooling}: the model has no pooling to replace; leave the flag out")
        model[places[0]] = Pooling(model[places[0]].embedding_dimension, pooling_mode=args.pooling)
    if args.prompts:
        model.prompts = {"query": args.prompts[0], "document": args.prompts[-1]}
    if args.dropout is not None:
        set_dropout(model, args.dropout)
    if args.lora_rank:
        add_lora(model, args)
    else:
        model.float()  # autocast, if any, wants float32 weights to update
    return model


# A chunk of scores at most: 2**26 floats are 256 MB. Larger score matrices are made, used and made again by chunks.
MAX_SCORES = 2**26


def softmax_loss(queries, documents, query_keys, document_keys, scale):
    """Mean over queries of -log softmax of its own document (the i-th for query i) among all that may be negatives.

    queries (B, D), documents (M, D) with M >= B; keys are (anchor ids, text ids), int64 of the same lengths, -1 for a
    document without an anchor. A document with the anchor or the text of another row is no negative for that row.
    """
    targets = torch.arange(len(queries), device=queries.device)

    def chunk(rows, queries, documents):
        scores = queries[rows] @ documents.T * scale  # (rows, M)
        same = (query_keys[0][rows, None] == document_keys[0]) | (query_keys[1][rows, None] == document_keys[1])
        same[torch.arange(len(scores), device=scores.device), targets[rows]] = False
        return F.cross_entropy(scores.masked_fill(same, -torch.inf), targets[rows], reduction="sum")

    rows = max(1, MAX_SCORES // len(documents))
    if rows >= len(queries):
        return chunk(slice(None), queries, documents) / len(queries)
    slices = [slice(first, first + rows) for first in range(0, len(queries), rows)]
    return sum(checkpoint(chunk, s, queries, documents, use_reentrant=False) for s in slices) / len(queries)


def infonce(columns, ids, temperature=0.05, symmetric=False, similarity="cosine"):
    """InfoNCE (van den Oord et al. 2018, equation 4) with in-batch and hard negatives.

    columns: list of (B, D), anchors, positives, negatives...; ids: (C, B) int64, equal where texts are equal.
    `symmetric` averages in the loss of finding the anchor of each positive (Radford et al. 2021, figure 3).
    """
    if similarity == "cosine":
        columns = [F.normalize(column, dim=-1) for column in columns]
    anchors, documents = columns[0], torch.cat(columns[1:])  # (B, D), (M, D)
    anchor_ids = torch.cat([ids[0], ids.new_full((ids[2:].numel(),), -1)])
    loss = softmax_loss(anchors, documents, (ids[0], ids[1]), (anchor_ids, ids[1:].flatten()), 1 / temperature)
    if symmetric:
        back = softmax_loss(columns[1], anchors, (ids[0], ids[1]), (ids[0], ids[1]), 1 / temperature)
        loss = (loss + back) / 2
    return loss


def row_scores(columns, temperature, similarity):
    """(B, C - 1) similarity of each anchor to its own documents, over the temperature: cosines alone are no logits."""
    if similarity == "cosine":
        columns = [F.normalize(column, dim=-1) for column in columns]
    return torch.stack([(columns[0] * column).sum(-1) for column in columns[1:]], 1) / temperature


def teacher_margin_mse(columns, labels, temperature=0.05, similarity="cosine"):
    """Mean squared error of the margins between positive and negatives (Hofstaetter et al. 2020, Margin-MSE).

    columns: list of (B, D), anchors, positives, negatives...; labels: (B, C - 1) scores by the teacher.
    """
    scores = row_scores(columns, temperature, similarity)
    return F.mse_loss(scores[:, :1] - scores[:, 1:], labels[:, :1] - labels[:, 1:])


def teacher_kl(columns, labels, temperature=0.05, similarity="cosine"):
    """KL divergence of the softmax over a row's documents from the teacher's (Lin et al. 2020)."""
    scores = row_scores(columns, temperature, similarity)
    return F.kl_div(scores.log_softmax(1), labels.log_softmax(1), reduction="batchmean", log_target=True)


def make_loss(args, model):
    """Loss (columns, ids, labels) -> scalar on the embeddings of the whole batch."""
    own = {"infonce": infonce, "margin_mse": teacher_margin_mse, "kl": teacher_kl}
    if args.loss in own:
        loss = own[args.loss]
        options = {"similarity": "dot" if model.similarity_fn_name == "dot" else "cosine"}
        if options["similarity"] == "dot" and args.loss in TEACHER_LOSSES:
            options["temperature"] = 1.0
        options |= args.loss_args
        known = [name for name in inspect.signature(loss).parameters if name not in ("columns", "ids", "labels")]
        known += ["infonce"] * (args.loss in TEACHER_LOSSES)
        if unknown := set(options) - set(known):
            raise BadInput(f"--loss_args: {args.loss} has no {', '.join(unknown)}; it has {', '.join(known)}")
        weight = options.pop("infonce", 0)  # a teacher says nothing of the documents of other rows
        if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise BadInput(f"--loss_args: the weight of infonce {weight!r} is no number of 0 or more")
        temperature = options.get("temperature", 1)
        if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
            raise BadInput(f"--loss_args: the temperature {temperature!r} is no number above 0")
        if options["similarity"] not in ("cosine", "dot"):
            raise BadInput(f"--loss_args: the similarity {options['similarity']!r} is neither cosine nor dot")

        def base(columns, ids, labels):
            value = loss(columns, labels if args.loss in TEACHER_LOSSES else ids, **options)
            return value + weight * infonce(columns, ids, **options) if weight else value
    else:
        kind = getattr(losses, args.loss, None)
        if not hasattr(kind, "compute_loss_from_embeddings"):
            names = [n for n in dir(losses) if hasattr(getattr(losses, n), "compute_loss_from_embeddings")]
            raise BadInput(f"--loss {args.loss}: no such loss on embeddings; there are {', '.join([*own, *names])}")
        try:
            module = kind(model, **args.loss_args)
        except (TypeError, ValueError) as error:
            raise BadInput(f"--loss_args: {error}") from None
        if any(not name.startswith("model.") for name, _ in module.named_parameters()):
            raise BadInput(f"--loss {args.loss}: has weights of its own, which would not be trained; choose another")

        def base(columns, ids, labels):
            return module.compute_loss_from_embeddings(columns, labels)

    def matryoshka(columns, ids, labels):  # Kusupati et al. 2022, equation 1, with equal weights
        return sum(base([F.normalize(c[:, :d], dim=-1) for c in columns], ids, labels) for d in args.matryoshka_dims)

    return matryoshka if args.matryoshka_dims else base


TRIED_ROWS = 64  # enough to see that a loss takes such rows; the scores of a whole batch may be gigabytes


def try_loss(loss_fn, batch, model, args):
    """BadInput when the loss does not take such a batch; found out before the first step."""
    dimensions = model.get_embedding_dimension()
    if max(args.matryoshka_dims, default=0) > dimensions:
        raise BadInput(f"--matryoshka_dims {max(args.matryoshka_dims)}: the embeddings have {dimensions} dimensions")
    ids = batch.ids[:, :TRIED_ROWS]
    columns = torch.randn(*ids.shape, dimensions).unbind()
    labels = None if batch.labels is None else batch.labels[:TRIED_ROWS]
    try:
        loss_fn(list(columns), ids, labels)
    except Exception as error:  # whatever a loss of the library raises
        raise BadInput(f"--loss {args.loss} does not take these columns, labels or --loss_args: {error}") from None


@dataclass
class Batch:
    rows: list  # B of (texts, label, file, row number)
    position: dict  # where the data stands after this batch
    ids: torch.Tensor  # (C, B) equal where texts are equal
    labels: torch.Tensor | None  # (B,) or (B, scores)
    share: Share


def make_batches(rows_and_positions, model, budget, args, accelerator):
    """Yield each batch with this process' share of it; meant to run in a background thread."""
    for rows, position in rows_and_positions:
        texts = column_texts(rows, args.prompts, len(args.columns))
        known = {}
        ids = torch.tensor([known.setdefault(text, len(known)) for text in texts]).view(-1, len(rows))
        labels = None
        if args.label_column:
            try:
                labels = torch.tensor([row[1] for row in rows])
            except (ValueError, TypeError):
                file, number = rows[0][2:]
                raise BadInput(
                    f"{file}, near row {number}: labels of different lengths in a batch; mend them"
                ) from None
        yield Batch(rows, position, ids, labels, make_share(texts, model, budget, accelerator))


def column_texts(rows, prompts, columns):
    """Texts of the first `columns` columns with their prompts, column after column."""
    prompts = [prompts[min(column, len(prompts) - 1)] if prompts else "" for column in range(columns)]
    return [prompt + row[0][column] for column, prompt in enumerate(prompts) for row in rows]


# same in train_cross_encoder.py, eval_incremental.py
def prefetch(iterator, depth=2):
    """Run an iterator in a background thread, `depth` items ahead; its errors surface here."""
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(next, iterator, None) for _ in range(depth))
        while (item := ahead.popleft().result()) is not None:
            ahead.append(pool.submit(next, iterator, None))
            yield item


# ---------------------------------------------------------------------------------------------------- evaluation


MEASURES = ("MRR@10", "nDCG@10", "accuracy@1", "Spearman", "Pearson")


@torch.no_grad()
def evaluate(model, rows, budget, args, accelerator):
    """{metric: value} of the held-out rows, the same on every process.

    Each anchor searches the positives of all rows, its own being relevant. With a label a row it is instead the
    correlation of the pairs' cosine similarity with the labels.
    """
    model = accelerator.unwrap_model(model)
    model.eval()
    share = even_out(make_share(column_texts(rows, args.prompts, 2), model, budget, accelerator), accelerator)
    bar = tqdm(share.micro_batches, "evaluating", leave=False, delay=2, disable=not accelerator.is_main_process)
    parts = [encode(model, features, accelerator)[: len(cut)] for features, cut in bar]
    model.train()
    queries, documents = gather_texts(parts, share, accelerator).view(2, len(rows), -1)  # (rows, D) each
    if model.similarity_fn_name != "dot":
        queries, documents = F.normalize(queries, dim=-1), F.normalize(documents, dim=-1)
    if args.label_column and not isinstance(rows[0][1], list):
        scores, labels = (queries * documents).sum(-1).tolist(), [row[1] for row in rows]
        return {"Spearman": float(spearmanr(scores, labels)[0]), "Pearson": float(pearsonr(scores, labels)[0])}
    ranks = []
    for first in range(0, len(rows), chunk := max(1, MAX_SCORES // len(rows))):
        scores = queries[first : first + chunk] @ documents.T  # (chunk, rows)
        own = torch.arange(first, first + len(scores), device=scores.device)[:, None]
        mine = scores.gather(1, own)
        earlier = torch.arange(len(rows), device=scores.device) < own  # a tie goes to the row that comes first
        beaten = (scores < mine) | ((scores == mine) & ~earlier)  # false where a score is NaN
        ranks.append(1 + (~beaten).sum(1))
    ranks = torch.cat(ranks).cpu().double()
    found = ranks <= 10
    return {
        "MRR@10": (found / ranks).mean().item(),
        "nDCG@10": (found / torch.log2(1 + ranks)).mean().item(),
        "accuracy@1": (ranks == 1).double().mean().item(),
    }


# ------------------------------------------------------------------------------------------- files a run leaves behind


# same in train_cross_encoder.py
def save_atomically(folder, write):
    """Fill `folder` by write(part), synced to disk before it gets its name; what stood there is replaced last."""
    folder = Path(folder)
    part, old = folder.with_name(f".{folder.name}.part"), folder.with_name(f".{folder.name}.old")
    for stale in (part, old):
        shutil.rmtree(stale, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        write(part)
        for path in [*part.rglob("*"), part]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise BadInput(f"{folder}: not written ({error}); make room; what was saved before is whole") from None
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


# same in train_cross_encoder.py
def sha256(path):
    """Hex digest of a file, read piece by piece: a checkpoint may be larger than memory has room for twice."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# same in train_cross_encoder.py
def whole(tensor):
    """A tensor, or the whole of one of which each process holds a part, on the CPU: every process must ask for it."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


# same in train_cross_encoder.py
def moments_of(optimizer):
    """{"0.exp_avg": whole tensor, ...} of AdamW; every process must ask for them."""
    return {f"{i}.{k}": whole(v) for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()}


# same in train_cross_encoder.py
def prune_checkpoints(newest, keep):
    """Remove the checkpoints up to `newest` but the last `keep`, and what killed runs left half written."""
    steps = [path for path in sorted(newest.parent.glob("step_*")) if path <= newest]
    for path in [*steps[:-keep], *newest.parent.glob(".step_*")]:
        shutil.rmtree(path)


# same in train_cross_encoder.py
def save_checkpoint(folder, model, moments, state, keep):
    """Write `folder` (weights, moments, state as JSON, checksums), then remove all others but the newest `keep`."""

    def write(part):
        save_model(model, str(part / "model.safetensors"))
        save_file(moments, str(part / "optimizer.safetensors"))
        (part / "state.json").write_text(json.dumps(state))
        sums = [f"{sha256(file)}  {file.name}\n" for file in sorted(part.iterdir())]
        (part / "SHA256SUMS").write_text("".join(sums))

    save_atomically(folder, write)
    for path in folder.parent.glob("step_*"):
        if path > folder:  # damaged: a resume passed it over
            shutil.rmtree(path)
    prune_checkpoints(folder, keep)


# same in train_cross_encoder.py
def newest_checkpoint(folder):
    """(folder, state) of the newest whole checkpoint, or (None, None); a damaged one is named and passed over."""
    found = sorted(Path(folder).glob("step_*"), reverse=True)
    for path in found:
        try:
            sums = dict(line.split("  ")[::-1] for line in (path / "SHA256SUMS").read_text().splitlines())
            for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
                digest = sums.get(name)
                if sha256(path / name) != digest:
                    raise OSError(f"{name} is damaged")
            return path, json.loads((path / "state.json").read_text())
        except (OSError, ValueError) as error:
            print(f"{path}: passed over ({error})", file=sys.stderr)
    if found:
        raise BadInput(f"{folder}: no checkpoint is whole; remove the folder to start from the beginning")
    return None, None


# same in train_cross_encoder.py
def load_moments(path, optimizer):
    """Put a checkpoint's AdamW moments in place."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {}
    for name, tensor in load_file(str(path / "optimizer.safetensors")).items():
        number, key = name.split(".")
        owner = parameters[int(number)]
        if isinstance(owner, DTensor) and tensor.ndim:  # of the moments too each process holds a part
            tensor = distribute_tensor(tensor.to(owner.device), owner.device_mesh, owner.placements)
        moments.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})


# What a resumed run may not change: it would be another experiment under the same name.
FIXED = """train_data eval_data eval_rows streaming columns num_negatives label_column mixing_weights mix_by
corpus_table queries_table corpus_columns query_columns
shuffle_buffer length_window on_bad_row model_name_or_path dropout lora_rank max_length pooling prompts batch_size
gradient_accumulation_steps loss loss_args matryoshka_dims seed"""


# same in train_cross_encoder.py
def check_resumed(saved, args, data):
    """BadInput that lists every flag, and every source, that is not as it was when the checkpoint was written."""
    then, now = saved["args"], asdict(args)
    then = asdict(Args()) | then  # an older checkpoint lacks the newer flags
    fixed = [name for name in FIXED.split() if (name, now[name]) != ("on_bad_row", "skip")]  # skip may follow error
    changed = [f"--{name} was {then[name]}, is {now[name]}" for name in fixed if then[name] != now[name]]
    advice = "restore it, or start a new --output_dir"
    if not args.accept_changed_data:
        files = [now[0] for then, now in zip(saved["data"], data) if then != now]
        changed += [f"the data of {name} is not what it was" for name in files]
        advice += "; --accept_changed_data resumes on changed data" * bool(files)
    if changed:
        raise BadInput(f"--resume: {'; '.join(changed)}; {advice}")


# same in train_cross_encoder.py
def read_metrics(path, step):
    """The records of metrics.jsonl up to `step`; what a killed run wrote after its last checkpoint is left out."""
    records = []
    with open(path) as lines:
        for line in lines:
            with suppress(ValueError):  # a torn last line
                records.append(json.loads(line))
    return [record for record in records if record["step"] <= step]


# same in train_cross_encoder.py
def draw(metrics, path):
    """Plot loss, learning rate and evaluation metrics over the steps."""
    import matplotlib  # half a second to import, at the end of a run

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    evaluated = [name for name in MEASURES if any(name in line for line in metrics)]
    for axis, names in zip(axes, (["loss"], evaluated, ["tokens_per_second"])):
        for name in names:
            points = [(line["step"], line[name]) for line in metrics if name in line]
            axis.plot(*zip(*points), marker="o" if name in evaluated else None, markersize=3, label=name)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if names:
            axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def model_card(args, steps, metrics, data):
    """README.md of the saved model: what it is, how it was trained, what was measured."""
    front = {"library_name": "sentence-transformers", "pipeline_tag": "sentence-similarity",
             "tags": ["sentence-transformers", "feature-extraction", "dense"]}  # fmt: skip
    if args.model_name_or_path:
        front["base_model"] = args.model_name_or_path
    defaults = {name: entry.default for name, entry in Args.__dataclass_fields__.items()} | {"loss_args": {}}
    given = flags_of({name: value for name, value in asdict(args).items() if value != defaults[name]})
    return f"""---
{yaml.safe_dump(front).strip()}
---
# {Path(args.output_dir).name}

A bi-encoder from {args.model_name_or_path or "a static embedding model, from scratch"}, trained for {steps:,} steps of
{args.batch_size * args.gradient_accumulation_steps:,} rows, of:

{chr(10).join(f"- {name}" + f" ({rows:,} rows)" * (not args.streaming) for name, rows, _ in data)}

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/of/this/folder")
scores = model.similarity(model.encode_query(["a query"]), model.encode_document(["a document"]))
```

Held-out rows: {args.eval_rows:,} (from {", ".join(args.eval_data) or "the training sources, not trained on"}).

| measure | value |
|---|---|
{chr(10).join(f"| {name} | {value:.4f} |" for name, value in metrics.items()) or "| not evaluated | |"}

    {shlex.join(["python", "train_bi_encoder.py", *given])}
"""


# ------------------------------------------------------------------------------------------------------ training


# same in train_cross_encoder.py
def schedule(step, steps, args):
    """Learning rate of `step` (from 0) of `steps`: linear warmup, then linear or cosine decay to 0."""
    warmup = math.ceil(args.warmup_ratio * steps)
    if step < warmup:
        return args.learning_rate * (step + 1) / warmup
    left = (steps - step) / max(steps - warmup, 1)
    return args.learning_rate * (left if args.lr_schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)


def freeze_unused(model, accelerator):
    """Freeze what gets no gradient, such as BERT's pooler under mean pooling; returns how many tensors.

    DDP would wait for their gradients for ever, and reduce none of the others, without a word.
    """
    features = make_share(["a text"] * accelerator.num_processes, model, 1, accelerator).micro_batches[0][0]
    with accelerator.autocast():
        encode(model, features, accelerator).sum().backward()
    unused = [(name, parameter) for name, parameter in model.named_parameters() if parameter.grad is None]
    for _, parameter in unused:
        parameter.requires_grad_(False)
    model.zero_grad()
    return len(unused)


def backward(model, batch, loss_fn, seed, sync, args, accelerator):
    """Add the gradient of the whole batch's loss to the model's; returns the loss, equal on every process.

    `seed` is a list of ints: dropout is a function of it, the process and the micro-batch, hence the same in a second
    forward pass and after a resume. `sync` reduces the gradients over the processes in the last backward pass.
    """
    share = even_out(batch.share, accelerator)

    def embed(number):
        torch.manual_seed(int(np.random.SeedSequence([*seed, accelerator.process_index, number]).generate_state(1)[0]))
        reduce = sync and number == len(share.micro_batches) - 1
        with nullcontext() if reduce else accelerator.no_sync(model):
            features, cut = share.micro_batches[number]
            return encode(model, features, accelerator)[: len(cut)]  # (n, D)

    with torch.set_grad_enabled(not args.grad_cache):
        parts = [embed(number) for number in range(len(share.micro_batches))]
    # Gathered, they are a leaf: the loss of the whole batch needs no graph through collectives or other processes.
    embeddings = gather_texts(parts, share, accelerator).requires_grad_()  # (N, D)
    labels = None if batch.labels is None else batch.labels.to(embeddings.device)
    columns = embeddings.view(*batch.ids.shape, -1).unbind()  # C of (B, D)
    loss = loss_fn(list(columns), batch.ids.to(embeddings.device), labels)
    loss.backward()
    # DDP averages over the processes; this loss is a whole one, of which each process holds the part of its own texts.
    wanted = embeddings.grad[share.mine] * accelerator.num_processes  # (n, D)
    pairs = [(number, wanted[cut]) for number, (_, cut) in enumerate(share.micro_batches)]
    if args.grad_cache:  # Gao et al. 2021, section 3.2: one graph at a time
        for number, gradient in pairs:
            accelerator.backward((embed(number) * gradient).sum())
    else:
        accelerator.backward(sum((parts[number] * gradient).sum() for number, gradient in pairs))
    return loss.item()


# same in train_cross_encoder.py
def fingerprint(files):
    """Hash of the files' names and sizes, and of both ends of the first and the last."""
    digest = hashlib.sha256()
    for file in files:
        fs, path = fsspec.core.url_to_fs(file)
        digest.update(f"{os.path.basename(path)} {fs.size(path)} ".encode())
    for file in (files[0], files[-1]):
        with fsspec.open(file, "rb") as raw:
            digest.update(raw.read(2**16))
            raw.seek(max(0, raw.seek(0, os.SEEK_END) - 2**16))
            digest.update(raw.read())
    return digest.hexdigest()[:16]


# same in train_cross_encoder.py
def broken_step(step, loss, norm, batch, output):
    """What to say of a step whose loss or gradient is not finite; the rows of its batch go to a file."""
    rows = [{"file": file, "row": number, "texts": texts} for texts, _, file, number in batch.rows]
    (output / "broken_batch.json").write_text(json.dumps(rows, indent=1))
    return (
        f"step {step + 1}: loss {loss}, gradient norm {norm}; the rows of the batch, from {rows[0]['file']} row "
        f"{rows[0]['row']} on, are in {output}/broken_batch.json; mend them or lower --learning_rate; the checkpoints "
        "before are whole"
    )


# same in train_cross_encoder.py, eval_incremental.py
@cache
def day_long_group():
    """Return a gloo group of all processes, with a timeout of a day, for work that one process does for the others.

    Such as the Arrow copy of a large corpus. The collectives of a step keep the 30 minutes of the default group.
    """
    return torch.distributed.new_group(backend="gloo", timeout=timedelta(days=1))


# same in train_cross_encoder.py, eval_incremental.py
def main_first(accelerator, work):
    """The result of work(), done by each machine's main process before the others; its BadInput reaches them all."""
    group = day_long_group() if accelerator.num_processes > 1 else None  # by all processes, before any of them waits
    if group and not accelerator.is_local_main_process:
        torch.distributed.barrier(group)
    try:
        return work()
    finally:  # after an error too: else the others would wait
        if group and accelerator.is_local_main_process:
            torch.distributed.barrier(group)


# same in train_cross_encoder.py
def check_launch(accelerator):
    """BadInput for what Accelerate can launch and the step here was not made for: some of it would train wrongly."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise BadInput(
            f"{kind.value}: its engine steps at every backward pass, of which a batch may have several; "
            "launch with accelerate_configs/fsdp2.yaml or multi_gpu.yaml"
        )
    if kind == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        offload = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        others = [plugin.cpu_ram_efficient_loading, offload, accelerator.scaler, accelerator.parallelism_config]
        if plugin.fsdp_version != 2 or any(others):
            raise BadInput(
                "FSDP: only version 2, with fsdp_cpu_ram_efficient_loading and fsdp_offload_params false, no fp16 and "
                "no parallelism_config, was tested; launch with accelerate_configs/fsdp2.yaml"
            )


# same in train_cross_encoder.py
def open_data(args, accelerator, check=checked):
    """(sources, weights, held-out rows, bad ones among them, rows an epoch, fingerprints, check); sets args.columns.

    The check that is returned also replaces the ids of a row by their texts, where there are tables of them.
    """
    files = [list_files(source) for source in args.train_data]
    held_files = [list_files(source) for source in args.eval_data]
    if not args.columns:
        there = next(read_batches(files[0][0]), (0, None))[1]
        if there is None:
            raise BadInput(f"{files[0][0]}: holds no row; remove it")
        args.columns = [name for name in there.schema.names if name != args.label_column]
    if args.num_negatives >= 0:
        args.columns = args.columns[: 2 + args.num_negatives]
    if len(args.columns) < 2:
        raise BadInput(f"--columns: two or more texts are wanted, there is {args.columns}; SimCSE names one twice")
    kind = StreamSource if args.streaming else MappedSource

    def opened():  # the first process makes the Arrow copies, the others find them
        return [[kind(index, names, args) for index, names in enumerate(part)] for part in (files, held_files)]

    sources, held_sources = main_first(accelerator, opened)
    tables = main_first(accelerator, lambda: open_tables(args))
    check = with_texts(tables, check)
    for name, source in zip(args.train_data + args.eval_data, sources + held_sources):
        if len(source) == 0:
            raise BadInput(f"{name}: holds no row; leave it out")
    weights = args.mixing_weights or [len(source) for source in sources]
    held = hold_out(held_sources or sources, [len(s) for s in held_sources] or weights, args.eval_rows)
    good = [row for row in (check(row, args) for row in held) if row]
    skipped, held = len(held) - len(good), good
    sizes = [len(source) for source in sources]
    if not all(sizes):
        name = args.train_data[sizes.index(0)]
        raise BadInput(f"{name}: no row is left beside --eval_rows {args.eval_rows}; lower it, or name --eval_data")
    if args.streaming and not args.max_steps and not args.rows_per_epoch:
        raise BadInput("--streaming: a stream does not say how long it is; give --max_steps or --rows_per_epoch")
    weights = args.mixing_weights or sizes
    ends = [size * sum(weights) / weight for size, weight in zip(sizes, weights)]  # rows of the mix that exhaust each
    rows = args.rows_per_epoch or (min if args.stopping_strategy == "first_exhausted" else max)(ends)
    data = [[name, size, fingerprint(names)] for name, size, names in zip(args.train_data, sizes, files)]
    data += [[table.flag, table.rows, table.content] for table in tables if table]
    return sources, weights, held, skipped, rows, data, check


def main(args):
    if unknown := set(args.report_to) - {str(tracker) for tracker in LoggerType}:
        raise BadInput(f"--report_to {', '.join(unknown)}: the trackers are {', '.join(map(str, LoggerType))}")
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # else several processes on CPUs would not find one another
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=args.report_to or None,
        project_dir=args.output_dir,
        kwargs_handlers=[
            # Processes run different numbers of forward passes; a broadcast of buffers in each would never match up.
            DistributedDataParallelKwargs(broadcast_buffers=False),
            InitProcessGroupKwargs(timeout=timedelta(minutes=30)),
        ],
    )
    check_launch(accelerator)
    args.gradient_accumulation_steps = accelerator.gradient_accumulation_steps  # the launch config may have set it
    accumulation = args.gradient_accumulation_steps
    output, is_main = Path(args.output_dir), accelerator.is_main_process
    if args.label_column and args.eval_rows == 1:
        raise BadInput("--eval_rows 1: a correlation with labels wants two rows or more")
    for name in ("batch_size", "eval_rows"):
        if 0 < getattr(args, name) < accelerator.num_processes:
            raise BadInput(f"--{name} {getattr(args, name)}: raise it to the {accelerator.num_processes} processes")
    checkpoint_path, saved = newest_checkpoint(output / "checkpoints") if args.resume else (None, None)
    if (output / "args.yaml").exists() and not args.resume:
        raise BadInput(f"--output_dir {output} holds a run: go on with it by --resume, or name another folder")
    found = torch.tensor([saved["step"] if saved else -1], device=accelerator.device)
    if len(set(accelerator.gather(found).tolist())) > 1:
        raise BadInput(f"--resume: not every process finds the same checkpoint in {output}; it wants a shared disk")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--output_dir {output}: {error}; name a folder that can be written") from None

    # Data, model, optimizer
    sources, weights, held, held_skipped, epoch_rows, data, check = open_data(
        args, accelerator, checked_scores if args.loss in TEACHER_LOSSES else checked
    )
    if saved:
        check_resumed(saved, args, data)
    steps = args.max_steps or math.ceil(args.num_epochs * epoch_rows / (args.batch_size * accumulation))
    sample = islice(
        row_batches(sources, weights, args, None, check), math.ceil(min(epoch_rows, 100_000) / args.batch_size)
    )
    sample = (text for rows, _ in sample for row in rows for text in row[0])
    model = load_model_from(args, sample, not saved, accelerator).to(accelerator.device)
    static = isinstance(model.tokenizer, Tokenizer)
    budget = args.micro_batch_tokens or (2**20 if static else 2048 if accelerator.device.type == "cpu" else 16_384)
    loss_fn = make_loss(args, model)
    first = row_batches(sources, weights, args, None, check)
    try_loss(loss_fn, next(make_batches(first, model, budget, args, accelerator)), model, args)
    model.train()
    frozen = freeze_unused(model, accelerator)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1], "weight_decay": args.weight_decay},
              {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=args.learning_rate, fused=True)
    count = sum(parameter.numel() for parameter in trained)
    del trained, groups  # whole parameters, of which FSDP keeps parts
    if saved:
        load_model(model, str(checkpoint_path / "model.safetensors"))
    sharded = accelerator.distributed_type == DistributedType.FSDP
    plain = copy.deepcopy(model).cpu() if sharded else model  # the whole weights, to be saved
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # broadcast_buffers is to get another name
        model, optimizer = accelerator.prepare(model, optimizer)
    bare = accelerator.unwrap_model(model)

    # Where to begin
    step, position, window, metrics = 0, None, [], []
    if saved:
        load_moments(checkpoint_path, optimizer.optimizer)
        step, position, window = saved["step"], saved["position"], saved["losses"]
        if accelerator.scaler and saved.get("scaler"):
            accelerator.scaler.load_state_dict(saved["scaler"])
        metrics = read_metrics(output / "metrics.jsonl", step)
        accelerator.print(f"resuming from {checkpoint_path}: step {step:,} of {steps:,}")
    elif args.resume:
        accelerator.print(f"no checkpoint in {output / 'checkpoints'}: starting from the beginning")
    if is_main:
        (output / "args.yaml").write_text(yaml.safe_dump(asdict(args), sort_keys=False))
        (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    if args.report_to:
        accelerator.init_trackers("evenstep", {k: str(v) for k, v in asdict(args).items()})
    asked_to_stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_stop.set())
    accelerator.print(
        f"{count:,} parameters trained, {frozen} tensors without gradient frozen; "
        f"{steps:,} steps of {accumulation} x {args.batch_size:,} rows on {accelerator.num_processes} x "
        f"{accelerator.device.type}, micro-batches of {budget:,} tokens; {len(held):,} rows held out"
    )

    def log(record):
        """Append one step's record to metrics.jsonl and the trackers."""
        metrics.append({"step": step, **record})
        accelerator.log(record, step=step)
        if is_main:
            with open(output / "metrics.jsonl", "a") as file:
                file.write(json.dumps(metrics[-1]) + "\n")

    def save():
        for parameter, part in zip(plain.parameters(), bare.parameters()) if sharded else ():
            parameter.data.copy_(whole(part))
        moments = moments_of(optimizer.optimizer)
        if not all(parameter.isfinite().all() for parameter in plain.parameters()):
            raise BadInput(
                f"step {step}: a weight is not finite; lower --learning_rate; the checkpoints before are whole"
            )
        state = {"step": step, "position": position, "losses": window, "args": asdict(args), "data": data}
        if accelerator.scaler:  # of fp16
            state["scaler"] = accelerator.scaler.state_dict()
        if is_main:
            save_checkpoint(output / f"checkpoints/step_{step:08}", plain, moments, state, args.keep_checkpoints)
        accelerator.wait_for_everyone()

    def next_batch():
        try:
            return next(batches)
        except BadRow:  # the steps before it are kept, for a resume
            if step:
                save()
            raise

    eval_every = args.eval_every or max(1, steps // 10)
    if held and step == 0:
        log(evaluate(model, held, budget, args, accelerator))
        accelerator.print(
            "before training: " + "  ".join(f"{k} {v:.4f}" for k, v in metrics[-1].items() if k != "step")
        )
    rows = row_batches(sources, weights, args, position, check)
    batches = prefetch(make_batches(rows, bare, budget, args, accelerator))
    is_terminal = sys.stderr.isatty()  # in a log file the bar is drawn each ten seconds
    bar = tqdm(total=steps, initial=step, disable=not is_main, unit="step", mininterval=0.1 if is_terminal else 10)
    seconds, waited, rows_done, tokens, padded = 0.0, 0.0, 0, 0, 0
    stopping = False
    model.train()
    while step < steps and not stopping:
        # ---------------------------------------------------------------- one optimizer step
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = schedule(step, steps, args)
        losses_of_step = []
        for number in range(accumulation):
            asked = time.perf_counter()
            batch = next_batch()
            waited += time.perf_counter() - asked
            sync = number == accumulation - 1
            seed = [args.seed, step, number]
            losses_of_step.append(backward(model, batch, loss_fn, seed, sync, args, accelerator))
            rows_done += len(batch.rows)
            tokens += batch.share.tokens
            padded += batch.share.padded
        norm = whole(accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)).item()
        loss = sum(losses_of_step) / accumulation
        if not math.isfinite(loss) or not (math.isfinite(norm) or accelerator.scaler):
            raise BadInput(broken_step(step, loss, norm, batch, output))
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - started
        # -----------------------------------------------------------------------------------
        step, position = step + 1, batch.position
        window.append(loss)
        bar.update()
        record = {}
        if step % args.log_every == 0 or step == steps:
            mine = torch.tensor([tokens, padded], device=accelerator.device)
            tokens, padded = accelerator.reduce(mine).tolist()
            record = {"loss": sum(window) / len(window), "learning_rate": optimizer.param_groups[0]["lr"],
                      "grad_norm": norm, "rows_per_second": rows_done / seconds,
                      "tokens_per_second": tokens / seconds, "padding_fraction": 1 - tokens / padded,
                      "data_wait_fraction": waited / seconds}  # fmt: skip
            bar.set_postfix_str(
                f"loss {record['loss']:.4f}, {record['rows_per_second']:,.0f} rows/s, "
                f"{record['tokens_per_second']:,.0f} tokens/s, padding {record['padding_fraction']:.1%}",
                refresh=is_terminal,
            )
            window, seconds, waited, rows_done, tokens, padded = [], 0.0, 0.0, 0, 0, 0
        if held and (step % eval_every == 0 or step == steps):
            scores = evaluate(model, held, budget, args, accelerator)
            tqdm.write(f"step {step:,}: " + "  ".join(f"{k} {v:.4f}" for k, v in scores.items())) if is_main else None
            record |= scores
        if record:
            log(record)
        if asked_to_stop.is_set():
            accelerator.set_trigger()
        stopping = accelerator.check_trigger()  # on any process, hence on all
        if stopping or step == steps or (args.save_every and step % args.save_every == 0):
            save()

    bar.close()
    if stopping and step < steps:
        accelerator.print(f"stopped after step {step:,} of {steps:,}; the same command with --resume goes on")
    elif is_main:
        scores = next((line for line in reversed(metrics) if set(line) & set(MEASURES)), {})
        card = model_card(args, steps, {name: scores[name] for name in MEASURES if name in scores}, data)

        if args.lora_rank:
            plain[0].model = plain[0].model.merge_and_unload()  # a model like any other: it loads without peft

        def write(part):
            plain.save_pretrained(str(part), create_model_card=False)
            (part / "README.md").write_text(card)

        save_atomically(output / "model", write)
        prune_checkpoints(output / f"checkpoints/step_{step:08}", args.keep_checkpoints)  # a kill may have left more
        draw(metrics, output / "training.png")
        skipped = position["skipped"] + held_skipped
        print(f"{skipped:,} bad rows skipped; " * (skipped > 0) + f"the model is in {output / 'model'}")
    batches.close()
    # DDP would drop the last reference to the process group while holding the GIL, which the group's own thread may
    # wait for: a deadlock at the very end (torch 2.13, one run in fifty). So DDP goes before the group does.
    del model
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main(parse_args(sys.argv[1:]))
    except BadInput as error:
        traceback.clear_frames(error.__traceback__)  # ends the line of a progress bar
        # Every process meets the same error; the first one says it, and the others only where that one has not.
        time.sleep(5 if int(os.environ.get("RANK", 0)) else 0)
        sys.exit(f"error: {error}")
    except RuntimeError as error:  # gloo and NCCL have no error of their own for it
        if "gloo" not in str(error) and not isinstance(error, torch.distributed.DistError):
            raise
        traceback.clear_frames(error.__traceback__)
        reason = str(error).partition("\n")[0]
        sys.exit(f"error: another process of this run is gone ({reason}); start the same command again, with --resume")
