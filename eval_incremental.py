"""Evaluate bi-encoders and rerankers on retrieval, over a corpus of any size, never encoding the same text twice.

    python eval_incremental.py                                         # runs/bi_encoder/model, on held-out demo pairs
    python eval_incremental.py --model_name_or_path BAAI/bge-base-en-v1.5 --beir scifact --output_dir runs/scifact
    python eval_incremental.py --query "read a gzip file"              # search instead; a second query takes seconds
    python eval_incremental.py --corpus docs.parquet --export_vectors vectors       # for an index or a vector database
    python eval_incremental.py --beir scifact --run bm25.run --cross_encoder runs/cross_encoder/model   # rerank
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml eval_incremental.py args.yaml

A collection is a corpus, queries and judgments (qrels), in the BEIR folder layout or each named on its own, or pairs:

    corpus.jsonl   {"_id": "4983", "title": "Microstructural ...", "text": "Alterations of ..."}
    queries.jsonl  {"_id": "1", "text": "0-dimensional biomaterials lack ..."}
    qrels/test.tsv query-id <tab> corpus-id <tab> score

The corpus passes by in chunks. Of each, the vectors that the cache holds are read, the missing texts are encoded and
stored, and every query keeps its best documents so far. Memory is bounded by the chunk, and by queries and judgments
(--pairs: all its texts); search is exact, and a run that was killed goes on where it stopped. A vector's key is the
text and a fingerprint of all that made the vector. A cross-encoder scores the best documents of each query, found by
the models or in a run file, and its scores are kept in the same way, by both texts.

--output_dir receives metrics.json, per_query.csv and report.png, and run.trec (several rankings: NAME/run.trec).
--export_vectors receives Parquet shards of (_id, vector) in corpus order, then _vectors.json, which says of what.

Left out on purpose: approximate search, asymmetric models (Router), similarities other than cosine and dot.
"""

import csv
import glob
import hashlib
import io
import json
import math
import os
import re
import shlex
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zlib
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import datasets
import diskcache
import evaluate
import fsspec
import ir_measures
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
import xxhash
import yaml
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import gather_object
from scipy.stats import bootstrap, permutation_test
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer
from tqdm.auto import tqdm
from transformers import AutoConfig, HfArgumentParser

# Shapes: Q queries, n documents of a chunk, D embedding dimensions, K results a query (--top_k), P processes.

DEMO = "data/python_code"


# same in train_bi_encoder.py, train_cross_encoder.py
class BadInput(ValueError):
    """Something the user can mend; shown as one line, without a traceback."""


# ------------------------------------------------------------------------------------------------------ options


# same in train_bi_encoder.py, train_cross_encoder.py
def flag(default, help):
    """One command-line option: its default and the line that --help prints."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class Args:
    # data
    model_name_or_path: list[str] = flag(
        [], "Hub ids or folders; several are compared; default: runs/bi_encoder/model, or --run alone"
    )
    run: str | None = flag(None, "a ranking in TREC format to evaluate or rerank: query Q0 document rank score tag")
    cross_encoder: str | None = flag(None, "Hub id or folder of a model that reranks what the models or --run found")
    rerank_k: int | None = flag(
        None, "documents of each query that --cross_encoder reranks, the others stay behind; default: 100, or --top_k"
    )
    beir: str | None = flag(None, "folder with corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv")
    split: str = flag("test", "the qrels of --beir to use")
    corpus: list[str] = flag([], "paths, globs, folders or URLs of the documents")
    queries: list[str] = flag([], "the same of the queries")
    qrels: str | None = flag(None, "judgments: TREC qrels, or query, document and score by tabs")
    corpus_columns: list[str] = flag(
        [], "id column (# for the row number), then texts, joined; default: _id title text"
    )
    query_columns: list[str] = flag([], "the same of the queries; default: _id text")
    pairs: list[str] = flag([], f"sources of (query, document) rows instead; default: {DEMO}/heldout")
    columns: list[str] = flag([], "the query and the document column of --pairs; default: the first two")
    keep_same_id: bool = flag(
        False, "rank a document for the query of the same id too; default: leave it out, as BEIR does (not in --pairs)"
    )
    streaming: bool = flag(False, "read the corpus as it stands instead of from an on-disk table made once")
    data_cache: str = flag("~/.cache/evenstep", "folder for the Arrow copies of mapped Parquet, JSON, CSV and text")
    # embeddings
    cache_dir: str = flag(
        "~/.cache/evenstep/embeddings", "folder of the embedding cache, a folder in it for each model"
    )
    cache_dtype: Literal["float32", "float16", "int8"] = flag("float16", "how vectors are stored, and searched")
    cache_size_limit: float = flag(0, "GB of a model's cache at most; the oldest vectors go first (0: no limit)")
    cache_info: bool = flag(False, "list what --cache_dir holds for each model, and end")
    cache_clear: str | None = flag(None, "remove what --cache_dir holds for this model (name or fingerprint), and end")
    cache_rebuild: str | None = flag(None, "index a model's vectors anew where cache.db is damaged, alone, and end")
    max_length: int | None = flag(None, "tokens that a text, or a pair, is cut to; default: the model's own")
    prompts: list[str] = flag([], "prefix of queries, then of documents; default: the model's own")
    truncate_dim: int | None = flag(None, "search with the first so many dimensions, for Matryoshka models")
    micro_batch_tokens: int | None = flag(
        None, "tokens a forward pass, with padding; default: 2,048 on a CPU, else 16,384; static models 2**20"
    )
    chunk_rows: int = flag(4096, "documents held at once; the most that a killed run encodes again")
    # search and metrics
    top_k: int = flag(100, "documents ranked for each query")
    metrics: list[str] = flag(["nDCG@10", "RR@10", "R@100", "AP"], "measures, by their names in ir_measures")
    bm25: bool = flag(False, "compare with BM25 (needs the package bm25s, and the corpus in memory)")
    query: list[str] = flag([], "print the best documents for these texts instead of evaluating")
    export_vectors: str | None = flag(
        None, "write the corpus as Parquet shards of _id and vector into this folder instead of evaluating"
    )
    judged: bool = flag(False, "write judged.trec beside run.trec: the scores of all judged documents, for mining")
    output_dir: str = flag("runs/eval", "folder for the results")


# same in train_bi_encoder.py, train_cross_encoder.py
def flags_of(given):
    """Command-line words for {flag: value}: lists in several words, objects as JSON, nothing for None and []."""
    words = []
    for name, value in given.items():
        if value not in (None, []):
            values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            words += [f"--{name}", *map(str, values)]
    return words


# same in train_bi_encoder.py, train_cross_encoder.py, prepare_corpus.py
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
    for name in ("max_length", "truncate_dim", "micro_batch_tokens", "chunk_rows", "top_k", "rerank_k"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be above 0")
    if not 0 <= args.cache_size_limit < math.inf:
        parser.error(f"--cache_size_limit {args.cache_size_limit}: must be 0 or more")
    if args.cache_clear and args.cache_rebuild:
        parser.error("--cache_clear, --cache_rebuild: name one of them")
    unjudged = bool(args.query) or args.export_vectors is not None  # wants the corpus only
    for name in args.metrics:
        try:
            measure = ir_measures.parse_measure(name)
            cutoff = measure.params.get("cutoff", 1)
            if not isinstance(cutoff, int) or cutoff < 1:
                raise ValueError("a cutoff is a whole number above 0")
            list(ir_measures.iter_calc([measure], {"query": {"a": 1}}, {"query": {"a": 1.0}}))
        except Exception as error:  # parsing, or whatever a provider raises that cannot compute it here
            reason = (str(error) or type(error).__name__).splitlines()[0]
            parser.error(f"--metrics {name}: {reason}; there are such as nDCG@10 RR@10 R@100 AP P@5 Success@1")
        if cutoff > args.top_k and not unjudged and (args.model_name_or_path or not args.run):
            parser.error(f"--metrics {name}: cut deeper than --top_k {args.top_k}; raise it")
    if sum(map(bool, (args.beir, args.corpus, args.pairs))) > 1:
        parser.error("--beir, --corpus, --pairs: name one of them")
    if (args.queries or args.qrels) and not args.corpus:
        parser.error("--queries, --qrels: belong to --corpus; name it too")
    if args.beir:
        args.corpus, args.queries = [f"{args.beir}/corpus.jsonl"], [f"{args.beir}/queries.jsonl"]
        args.qrels = f"{args.beir}/qrels/{args.split}.tsv"
    elif args.corpus and not unjudged and not (args.queries and args.qrels):
        parser.error("--corpus: evaluating wants --queries and --qrels too; searching wants --query")
    elif not args.corpus and not args.pairs:
        # an evaluation is of the held-out functions; a search is more fun over all of them
        args.pairs = [f"{DEMO}/heldout/*.parquet"] + [f"{DEMO}/train/*.parquet"] * unjudged
        if not Path(DEMO).is_dir() and not (args.cache_info or args.cache_clear or args.cache_rebuild):
            parser.error(f"no --beir, --corpus or --pairs, and no demo corpus in {DEMO}: make it with: "
                         "python prepare_corpus.py")  # fmt: skip
    if args.columns and len(args.columns) != 2:
        parser.error(f"--columns {' '.join(args.columns)}: name the query and the document column")
    for name in ("corpus_columns", "query_columns"):
        if len(getattr(args, name)) == 1:
            parser.error(f"--{name}: name the id column (# for the row number), then the text columns")
    if args.query and args.run:
        parser.error("--run: holds the queries that it answers; leave --query out")
    if not args.model_name_or_path and not args.run:
        args.model_name_or_path = ["runs/bi_encoder/model"]
    if args.rerank_k and args.rerank_k > args.top_k and args.model_name_or_path:
        parser.error(f"--rerank_k {args.rerank_k}: more than --top_k {args.top_k}; raise that too")
    args.rerank_k = args.rerank_k or (100 if args.run else min(100, args.top_k))
    others = args.query or args.run or args.cross_encoder or args.bm25 or args.judged
    if args.export_vectors is not None and (others or len(args.model_name_or_path) > 1):
        parser.error("--export_vectors: wants one --model_name_or_path; leave --query, --run, --cross_encoder, --bm25 "
                     "and --judged out")  # fmt: skip
    if args.judged and (args.query or not (args.model_name_or_path or args.cross_encoder)):
        parser.error("--judged: wants judgments, and --model_name_or_path or --cross_encoder to score what they judge")
    if any("\ud800" <= letter <= "\udfff" for text in args.query for letter in text):  # how Python takes other bytes
        parser.error("--query: not UTF-8")
    if args.query and len(args.model_name_or_path) > 1:
        parser.error("--query: searches with one --model_name_or_path")
    return args


# --------------------------------------------------------------------------------------------------------- data

SUFFIXES = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json", ".ndjson": "json",
            ".csv": "csv", ".tsv": "csv", ".txt": "text"}  # fmt: skip
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # of JSON Lines, CSV, TSV and text
READ_ROWS = 1000  # rows of a record batch, the unit of reading: some 100 kB to 1 MB of text
MOST_LINE = 2**26  # characters of a line; more is damage, or a small file made to fill the memory
MOST_TEXT = 2**30  # bytes of text in READ_ROWS rows; the same
TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


# same in train_bi_encoder.py, train_cross_encoder.py
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


# same in train_bi_encoder.py, train_cross_encoder.py
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


# same in train_bi_encoder.py, train_cross_encoder.py
def select_columns(there, wanted, file):
    """`wanted`, or all columns `there` when none are; BadInput for one that is not there."""
    for name in wanted:
        if name not in there:
            raise BadInput(f"{file}: no column {name!r}; the columns are: {', '.join(map(str, there))}")
    return wanted or list(there)


# same in train_bi_encoder.py, train_cross_encoder.py
def fits(cell, kind):
    """Whether a cell is what a column of the Arrow type `kind` holds: a text, or a list of texts."""
    if pa.types.is_list(kind):
        return isinstance(cell, list) and all(isinstance(text, str) for text in cell)
    return isinstance(cell, str)


# same in train_bi_encoder.py, train_cross_encoder.py
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


# same in train_bi_encoder.py, train_cross_encoder.py
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


# same in train_bi_encoder.py, train_cross_encoder.py
def validated(batch):
    """A RecordBatch after a look at its offsets, indices and UTF-8: damaged ones would point anywhere."""
    batch.validate(full=True)
    return batch


# same in train_bi_encoder.py, train_cross_encoder.py
def decoded(column, file):
    """A column without the dictionary in which it may hold each text once, however often it stands there."""
    if not pa.types.is_dictionary(column.type):
        return column
    if column.type.value_type in TEXTS:
        size = pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0
        if size > MOST_TEXT:
            raise BadInput(f"{file}: {len(column):,} of its rows hold {size:,} bytes of text; split their texts")
    return column.dictionary_decode()


# same in train_bi_encoder.py, train_cross_encoder.py
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


# same in train_bi_encoder.py, train_cross_encoder.py
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


def arrow_rows(path):
    """Number of rows of an Arrow file, stream or file format."""
    size, rows, schema = os.path.getsize(path), 0, None
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
                    return rows  # the mark was read; only a file format's footer comes after it
                if message.type == "schema":
                    schema = pa.ipc.read_schema(message)
                elif message.type == "record batch":
                    rows += pa.ipc.read_record_batch(message, schema).num_rows
                else:
                    raise BadInput(f"{path}: holds a {message.type}; convert it: python prepare_corpus.py {path} ...")
            position = source.tell()
    return rows


@dataclass
class Chunk:
    """Consecutive rows of a collection, as they are encoded."""

    first: int  # number of the first row, over all files
    ids: pa.Array  # (n,) strings
    texts: pa.Array  # (n,) strings, each behind the prompt; or structs of a query and a document
    hashes: np.ndarray  # (n, 2) uint64, of the texts


def text_hashes(texts):
    """(n, 2) uint64: the 128-bit BLAKE2b hashes of an Arrow array of n strings."""
    if not len(texts):
        return np.empty((0, 2), np.uint64)
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1].tolist()
    view = memoryview(data or b"")
    digests = [hashlib.blake2b(view[a:b], digest_size=16).digest() for a, b in zip(ends, ends[1:])]
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


class Table:
    """Rows (id, text) of some sources, read front to back, chunk by chunk."""

    def __init__(self, sources, columns, default, args):
        self.sources = [file for source in sources for file in list_files(source)]
        first = next((file for file in self.sources if next(read_batches(file), None)), None)
        if first is None:
            raise BadInput(f"{self.sources[0]}: holds no row; remove it")
        if not columns:
            columns = list(default)
            try:
                next(read_batches(first, default))
            except BadInput:  # a title is usual, not certain
                columns = [name for name in default if name != "title"]
        self.id, self.texts = columns[0], columns[1:]
        self.wanted = list(dict.fromkeys(name for name in columns if name != "#"))
        next(read_batches(first, self.wanted, self.id))  # a wrong column is said now
        self.files, self.rows, self.empty = self.sources, None, 0
        if not args.streaming:
            self.files = [arrow_copy(file, self.wanted, self.id, args.data_cache) for file in self.sources]
            try:
                self.rows = sum(map(arrow_rows, self.files))
            except (OSError, pa.ArrowException) as error:
                raise BadInput(f"{sources[0]}: not whole Arrow files ({error}); replace them") from None

    def chunks(self, rows, prompt=""):
        """Yield Chunks of `rows` rows, the last one of fewer."""
        first, held = 0, []
        for batch in chain(self.batches(prompt), [None]):
            held += [batch] * (batch is not None)
            while (have := sum(map(len, held))) >= rows or (batch is None and have):
                table = pa.Table.from_batches(held).combine_chunks()
                head = table.slice(0, rows)
                ids, texts = (pa.concat_arrays(column.chunks) for column in head.columns)
                yield Chunk(first, ids, texts, text_hashes(texts))
                first += len(head)
                held = table.slice(rows).to_batches()

    def _text(self, batch):
        """(n,) strings: the text columns of a RecordBatch, joined."""
        parts = [pc.fill_null(pc.cast(batch.column(name), pa.string()), "") for name in self.texts]
        return pc.utf8_trim_whitespace(pc.binary_join_element_wise(*parts, " "))

    def batches(self, prompt):
        """Yield RecordBatches of (id, prompt + text)."""
        row, self.empty = 0, 0
        for source, file in zip(self.sources, self.files):
            for number, batch in read_batches(file, self.wanted, self.id):
                try:
                    texts = self._text(batch)
                    if self.id == "#":
                        ids = pa.array(map(str, range(row, row + len(batch))))
                    else:
                        ids = pc.fill_null(pc.cast(batch.column(self.id), pa.string()), "")
                except pa.ArrowException as error:
                    raise BadInput(f"{source}, after row {number}: not text ({error}); convert the column") from None
                if (bad := pc.index(ids, "").as_py()) >= 0:
                    raise BadInput(f"{source}, row {number + bad}: no id in column {self.id!r}; mend the row")
                self.empty += pc.sum(pc.equal(texts, "")).as_py()
                row += len(batch)
                yield pa.record_batch([ids, pc.binary_join_element_wise(prompt, texts, "")], ["id", "text"])


def read_qrels(path):
    """{query id: {document id: relevance}} from TREC qrels (four fields) or BEIR's TSV (three, under a header)."""
    qrels = defaultdict(dict)
    try:
        with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as lines:
            for number, line in enumerate(lines, start=1):
                fields = line.rstrip("\r\n").split("\t") if "\t" in line else line.split()
                if len(fields) in (3, 4) and re.fullmatch(r"-?[0-9]{1,9}", fields[-1].strip()):
                    qrels[fields[0]][fields[-2]] = int(fields[-1])
                elif number > 1 and line.strip():
                    raise BadInput(
                        f"{path}, line {number}: not (query, document, score) nor TREC qrels; mend the line"
                    )
    except BadInput:
        raise
    except (OSError, EOFError, zlib.error, ValueError, ImportError) as error:
        raise BadInput(f"{path}: cannot be read ({error}); check --qrels") from None
    if not qrels:
        raise BadInput(f"{path}: holds no judgment; check --qrels")
    return dict(qrels)


@dataclass
class Collection:
    corpus: Table
    query_ids: list
    query_texts: list
    qrels: dict  # {query id: {document id: relevance}}; empty in a search or an export
    notes: list  # lines to say about the data
    omit_same_id: bool = False  # whether a document is left out for the query of the same id


def open_collection(args):
    """The Collection to evaluate on, or to search."""
    if args.pairs:
        columns = args.columns
        if not columns:
            file = list_files(args.pairs[0])[0]
            there = next(read_batches(file), (0, pa.record_batch({})))[1].schema.names
            if len(there) < 2:
                raise BadInput(f"{file}: has no two columns; a pair is a query and its document")
            columns = there[:2]
        corpus = Table(args.pairs, ["#", columns[1]], (), args)
        if args.query or args.export_vectors is not None:
            return Collection(corpus, [f"query {i}" for i in range(1, len(args.query) + 1)], args.query, {}, [])
        queries = Table(args.pairs, ["#", columns[0]], (), args)
        texts = [[t for chunk in table.chunks(args.chunk_rows) for t in chunk.texts.to_pylist()]
                 for table in (queries, corpus)]  # fmt: skip
        # equal queries are one query, and a document equal to an answer is an answer
        rows, answers = defaultdict(list), defaultdict(set)
        for row, (query, document) in enumerate(zip(*texts)):
            rows[document].append(str(row))
            if query and document:
                answers[query].add(document)
        if not answers:
            raise BadInput(f"{args.pairs[0]}: holds no pair of texts; check --columns")
        empty = sum(not (query and document) for query, document in zip(*texts))
        notes = [f"{empty:,} pairs lack a text; left out of the queries"] * (empty > 0)
        qrels = {str(i): {row: 1 for text in answers[q] for row in rows[text]} for i, q in enumerate(answers)}
        return Collection(corpus, list(qrels), list(answers), qrels, notes)
    corpus = Table(args.corpus, args.corpus_columns, ("_id", "title", "text"), args)
    if args.query or args.export_vectors is not None:
        return Collection(corpus, [f"query {i}" for i in range(1, len(args.query) + 1)], args.query, {}, [])
    qrels, notes = read_qrels(args.qrels), []
    table = Table(args.queries, args.query_columns, ("_id", "text"), args)
    texts = {}
    doubles = unjudged = 0
    for chunk in table.chunks(args.chunk_rows):
        for name, text in zip(chunk.ids.to_pylist(), chunk.texts.to_pylist()):
            doubles += name in texts
            unjudged += name not in qrels
            if name in qrels:
                texts.setdefault(name, text)
    unknown = len(qrels) - len(texts)
    for count, what in (
        (doubles, "queries with the id of an earlier one left out"),
        (unjudged, "queries without judgment left out"),
        (unknown, f"judged queries are not among --queries; left out: {', '.join(islice(qrels.keys() - texts, 3))}"),
        (table.empty, "queries are empty; encoded as the empty string"),
    ):
        notes += [f"{count:,} {what}"] * (count > 0)
    if not texts:
        raise BadInput(f"{args.qrels}: judges none of the queries in {', '.join(args.queries)}; check the ids")
    # row numbers identify nothing beyond their own table: the row of a query may well be that of its answer
    omit_same_id = not args.keep_same_id and "#" not in (corpus.id, table.id)
    qrels = {name: qrels[name] for name in texts}
    return Collection(corpus, list(texts), list(texts.values()), qrels, notes, omit_same_id)


def report_same_id(about, names, collection):
    """Add to `about` how many queries have their own document left out, and the notes; names: ids of these queries."""
    about["same_id_left_out"] = len(names)
    relevant = sum(collection.qrels[name].get(name, 0) > 0 for name in names)
    for count, what in (
        (len(names), "queries share their id with a document, which is left out of their results; --keep_same_id "
                     "keeps it"),
        (relevant, "of these documents are judged relevant to the query of the same id; if ids coincide by chance, "
                   "set --keep_same_id"),
    ):  # fmt: skip
        about["notes"] += [f"{count:,} {what}"] * (count > 0)


@dataclass
class Run:
    """Ranked documents of each query, by a model or from a file."""

    name: str
    documents: list  # Q lists of document ids, best first
    scores: list  # Q lists of floats
    texts: dict  # {document id: text}, in a search
    about: dict  # what metrics.json says of it
    judged: list | None = None  # Q dicts {document id: score} of the judged documents, with --judged


def read_run(args, collection):
    """The Run of --run, in the order of its scores (equal ones by document id, last first, as in trec_eval)."""
    path, found, others, lines_of = args.run, {name: {} for name in collection.query_ids}, set(), {}
    same = set()  # queries whose own document is left out
    try:
        with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as lines:
            for number, line in enumerate(lines, start=1):
                if not (fields := line.split()):
                    continue
                try:
                    query, _, document, _, score, _ = fields
                    if not math.isfinite(score := float(score)):
                        raise ValueError
                except ValueError:
                    raise BadInput(
                        f"{path}, line {number}: not 'query Q0 document rank score tag', with a number for score; "
                        "mend the line"
                    ) from None
                if query not in found:
                    others.add(query)
                elif collection.omit_same_id and document == query:
                    same.add(query)
                elif document in found[query]:
                    raise BadInput(f"{path}, line {number}: document {document!r} stands twice for query {query!r}; "
                                   "remove a line")  # fmt: skip
                else:
                    found[query][document] = score
                    lines_of.setdefault(document, number)
    except BadInput:
        raise
    except (OSError, EOFError, zlib.error, ValueError, ImportError) as error:
        raise BadInput(f"{path}: cannot be read ({error}); check --run") from None
    if not lines_of and not same:
        some = f", such as {min(others)!r}" if others else ""
        raise BadInput(f"{path}: ranks documents for none of the judged queries{some}; check the ids")
    wanted = pa.array(lines_of, pa.string())
    for batch in collection.corpus.batches(""):
        for name in batch["id"].filter(pc.is_in(batch["id"], wanted)).to_pylist():
            lines_of.pop(name, None)
    notes = []
    for count, what in (
        (len(others), f"queries of {path} are not judged, or unknown; left out"),
        (sum(not found[name] for name in found.keys() - same), f"judged queries are not in {path}; they count as 0"),
        (len(lines_of), f"documents of {path} are not in the corpus"),
    ):
        notes += [f"{count:,} {what}"] * (count > 0)
    if lines_of and args.cross_encoder:
        name, number = next(iter(lines_of.items()))
        raise BadInput(f"{path}, line {number}: document {name!r} is not in the corpus, nor are "
                       f"{len(lines_of) - 1:,} others; without their texts they cannot be reranked")  # fmt: skip
    ranked = [sorted(documents.items(), key=lambda item: item[::-1], reverse=True) for documents in found.values()]
    names, scores = ([[item[part] for item in documents] for documents in ranked] for part in (0, 1))
    about = {"seconds": {}, "notes": notes}
    report_same_id(about, same, collection)
    return Run(path, names, scores, {}, about)


# same in train_bi_encoder.py, train_cross_encoder.py
def prefetch(iterator, depth=2):
    """Run an iterator in a background thread, `depth` items ahead; its errors surface here."""
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(next, iterator, None) for _ in range(depth))
        while (item := ahead.popleft().result()) is not None:
            ahead.append(pool.submit(next, iterator, None))
            yield item


# ---------------------------------------------------------------------------------------------- the embedding cache


class BytesDisk(diskcache.Disk):
    """diskcache without its pickles, which run code from a hostile folder (CVE-2025-69872), within its own folder."""

    NAME = re.compile(r"[0-9a-f]{2}[/\\][0-9a-f]{2}[/\\][0-9a-f]{28}\.val")  # of a value's file, as diskcache makes it

    def get(self, key, raw):
        if not raw:
            raise sqlite3.DatabaseError("a key is a pickle")
        return super().get(key, raw)

    def fetch(self, mode, filename, value, read):
        if mode == diskcache.core.MODE_PICKLE or (filename and not self.NAME.fullmatch(filename)):
            raise sqlite3.DatabaseError("a value is a pickle, or lies outside the folder")
        return super().fetch(mode, filename, value, read)

    def remove(self, file_path):
        if self.NAME.fullmatch(file_path):
            super().remove(file_path)


def row_bytes(dimensions, dtype):
    """Bytes on disk of a text's hash and vector; an int8 vector has a float32 scale."""
    return 16 + (dimensions + 4 if dtype == "int8" else dimensions * np.dtype(dtype).itemsize)


class EmbeddingCache:
    """Vectors on disk by the hash of their text, for one model.

    The texts that were encoded together lie in one value, a block: (n, 2) uint64 hashes, then n rows of vector bytes,
    then a checksum; an entry a text says which block and row. Texts that come again in the same order, the usual case,
    are found by the ends of a run and read a block at a time; the hashes in the block prove each one of them.
    """

    def __init__(self, folder, name, dimensions, dtype, limit, rebuilding=False):
        self.folder, self.dimensions, self.dtype, self.damaged, self.full = Path(folder), dimensions, dtype, 0, False
        self.width = row_bytes(dimensions, dtype)
        self.last = (None, None)  # the block read last: (id, (hashes, rows))
        about = {"evenstep_cache": 1, "model": name, "dtype": dtype, "dimensions": dimensions, "row_bytes": self.width}
        with self._errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            note = self.folder / "model.json"
            if next(self.folder.iterdir(), None) and not note.exists() and not (self.folder / "cache.db").exists():
                raise BadInput(f"{folder}: not an embedding cache; name another --cache_dir")
            if (self.folder / "rebuilding").exists() and not rebuilding:
                raise BadInput(f"{folder}: its rebuilding was stopped; go on: --cache_rebuild {self.folder.name}")
            known = None
            with suppress(FileNotFoundError, ValueError, TypeError, RecursionError):
                known = dict(json.loads(note.read_text()), model=name)
            if known != about:  # new, or damaged: what may lie here is known from the fingerprint, the folder's name
                part = self.folder.with_suffix(f".{os.getpid()}.part")
                part.write_text(json.dumps(about))
                os.replace(part, note)
            self.cache = diskcache.Cache(
                str(self.folder),
                disk=BytesDisk,
                disk_min_file_size=25,  # blocks are files, the entries of texts are not
                eviction_policy="least-recently-stored" if limit else "none",
                size_limit=int(limit * 1e9) or 2**62,
                sqlite_mmap_size=0,  # a memory-mapped index would count as memory and grow with the corpus
            )

    @contextmanager
    def _errors(self):
        try:
            yield
        except (OSError, sqlite3.Error, diskcache.Timeout, ValueError, TypeError) as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(
                f"--cache_dir {self.folder}: {error or type(error).__name__}; what was stored is kept; make room or "
                f"allow writing, name another folder, or mend a damaged one (--cache_rebuild {self.folder.name})"
            ) from None

    def pack(self, vectors):
        """(n, bytes) uint8 rows as they are stored, of (n, D) float32."""
        if self.dtype == "int8":  # each vector scaled to its largest component
            scale = np.maximum(np.abs(vectors).max(1, keepdims=True), 1e-30).astype(np.float32) / 127
            whole = np.round(vectors / scale).astype(np.int8)
            return np.hstack([scale.view(np.uint8), whole.view(np.uint8)])
        with np.errstate(over="ignore"):
            stored = vectors.astype(self.dtype)
        if not np.isfinite(stored).all():
            raise BadInput(f"--cache_dtype {self.dtype}: cannot hold an embedding of this model; use float32")
        return stored.view(np.uint8).reshape(len(vectors), -1)

    def unpack(self, rows):
        """(n, D) float32 (int8) or the stored dtype, of (n, bytes) uint8 rows."""
        if self.dtype == "int8":
            return np.ascontiguousarray(rows[:, :4]).view(np.float32) * rows[:, 4:].view(np.int8)
        return np.ascontiguousarray(rows).view(self.dtype)

    def _place(self, digests, i):
        """(block id, row, rows of the block) where the text with the i-th 16-byte digest lies, or None."""
        entry = self.cache.get(digests[16 * i : 16 * i + 16])
        if not isinstance(entry, bytes) or len(entry) != 24:
            return None
        return entry[:16], int.from_bytes(entry[16:20], "little"), int.from_bytes(entry[20:], "little")

    def unwrap(self, file):
        """((n, 2) hashes, (n, bytes) rows) of a block, given its file or path, or None where it is damaged."""
        value = np.fromfile(file, np.uint8)
        n = len(value) // self.width
        if not n or len(value) % self.width != 8 or xxhash.xxh3_64_digest(value[:-8]) != value[-8:].tobytes():
            return None
        return value[: 16 * n].view(np.uint64).reshape(n, 2), value[16 * n : -8].reshape(n, -1)

    def _block(self, block):
        """((n, 2) hashes, (n, bytes) rows) of the block with this id, or None where it is gone or damaged."""
        if self.last[0] != block:
            content, file = None, self.cache.get(b"block" + block, read=True)
            if isinstance(file, io.BufferedReader):
                with file:
                    content = self.unwrap(file)
            if file is not None and content is None:
                self.damaged += 1
                tqdm.write(f"{self.folder}: a damaged block; what it held is computed again", file=sys.stderr)
                self.cache.delete(b"block" + block)
            self.last = (block, content)
        return self.last[1]

    def _runs(self, digests):
        """[(block, row, i, n)]: texts i to i + n probably lie in a block from a row on, going by both ends."""
        runs, at, count = [], 0, len(digests) // 16
        while at < count:
            if (here := self._place(digests, at)) is None:
                at += 1
                continue
            block, row, size = here

            def fits(n):
                return self._place(digests, at + n - 1) == (block, row + n - 1, size)  # noqa: B023

            n = min(size - row, count - at)
            if n > 1 and not fits(n):
                n = n // 2 if fits(2) else 1  # texts in disorder are given up at once
                while n > 1 and not fits(n):
                    n //= 2
            runs.append((block, row, at, n := max(n, 1)))
            at += n
        return runs

    def lookup(self, hashes):
        """((n, bytes) uint8 rows, (n,) bool found) of the texts with these (n, 2) uint64 hashes."""
        count, digests = len(hashes), hashes.tobytes()
        rows, found = None, np.zeros(count, bool)
        with self._errors():
            runs = self._runs(digests)
            while runs:
                astray = []
                for block, row, at, n in sorted(runs):  # a block at a time
                    same = np.zeros(n, bool)
                    if content := self._block(block):
                        same = (content[0][row : row + n] == hashes[at : at + n]).all(1)
                        if n == count and len(same) == n and same.all():  # the usual case, without a copy
                            return content[1][row : row + n], same
                        rows = np.zeros((count, self.width - 16), np.uint8) if rows is None else rows
                        rows[at : at + len(same)][same] = content[1][row : row + n][same]
                        found[at : at + len(same)] |= same
                    # within a run whose ends fit a text may have been changed; each is then looked for alone
                    astray += [at + i for i in range(n) if n > 1 and not (i < len(same) and same[i])]
                runs = [(*there[:2], i, 1) for i in astray if (there := self._place(digests, i))]
        return np.zeros((count, self.width - 16), np.uint8) if rows is None else rows, found

    def store(self, hashes, rows):
        """Keep the (n, bytes) rows of n texts, all of them or, if the process is killed, none."""
        digests, n = hashes.tobytes(), len(hashes)
        block = hashlib.blake2b(digests, digest_size=16).digest()
        body = digests + rows.tobytes()
        self.last = (None, None)
        with self._errors(), self.cache.transact(retry=True):
            self.full |= self.cache.volume() + len(body) > self.cache.size_limit  # older vectors go
            self.cache.set(b"block" + block, body + xxhash.xxh3_64_digest(body))
            for i in range(n):
                entry = block + i.to_bytes(4, "little") + n.to_bytes(4, "little")
                self.cache.set(digests[16 * i : 16 * i + 16], entry)


def cached_models(cache_dir):
    """[(folder, its model.json, vectors held, bytes on disk)] of the caches in a folder."""
    found = []
    for note in sorted(Path(cache_dir).expanduser().glob("*/model.json")):
        sizes = {path: path.stat().st_size for path in note.parent.rglob("*") if path.is_file()}
        try:
            about = json.loads(note.read_text())
            sound = about["row_bytes"] == row_bytes(about["dimensions"], about["dtype"]) and about["dimensions"] > 0
            if not sound or "model" not in about:
                raise ValueError("damaged")
            held = sum(size // about["row_bytes"] for path, size in sizes.items() if path.suffix == ".val")
        except (ValueError, OSError, TypeError, KeyError, RecursionError):
            about, held = {"model": "(damaged)", "dtype": "?", "dimensions": 0}, 0
        found.append((note.parent, about, held, sum(sizes.values())))
    return found


def rebuild_cache(folder, about):
    """Store a cache's blocks again in a new index, by the hashes that each holds; returns the vectors kept.

    A block goes when its vectors lie in another one. What is damaged stays where it is, and is said.
    """
    if not about["dimensions"]:
        raise BadInput(f"{folder}/model.json: damaged; evaluating with the model writes it again")
    blocks = [path for path in folder.rglob("*.val") if BytesDisk.NAME.fullmatch(str(path.relative_to(folder)))]
    blocks.sort(key=lambda path: path.stat().st_mtime)  # --cache_size_limit lets the oldest go first
    (folder / "rebuilding").touch()  # until it is done, also by another call
    for path in folder.glob("cache.db*"):
        path.unlink()
    cache = EmbeddingCache(folder, about["model"], about["dimensions"], about["dtype"], 0, rebuilding=True)
    kept = damaged = 0
    for path in tqdm(blocks, "rebuilding", unit=" blocks", delay=2):
        try:
            content = cache.unwrap(path)
        except OSError:  # a bad sector
            content = None
        if content:
            cache.store(*content)
            kept += len(content[0])
            path.unlink()
        damaged += not content
    cache.cache.close()
    (folder / "rebuilding").unlink()
    if damaged:
        print(f"{folder}: {damaged:,} damaged files of vectors are left there", file=sys.stderr)
    return kept


def manage_cache(args):
    """--cache_info, --cache_clear and --cache_rebuild."""
    models = cached_models(args.cache_dir)
    if name := args.cache_clear or args.cache_rebuild:
        chosen = [m for m in models if name == m[1]["model"] or (len(name) > 5 and m[0].name.startswith(name))]
        if not chosen:
            raise BadInput(f"--cache_dir {args.cache_dir}: holds no model {name}; --cache_info lists them")
        for folder, about, texts, size in chosen:
            what = f"{texts:,} vectors, {size / 1e6:,.1f} MB, of {about['model']} ({folder.name[:12]})"
            try:
                if args.cache_clear:
                    shutil.rmtree(folder)
                    print(f"removed {what}")
                else:
                    print(f"kept {rebuild_cache(folder, about):,} of {what}")
            except OSError as error:
                raise BadInput(f"{folder}: {error}; mend that, and call it again") from None
        return
    print(f"{'fingerprint':13} {'dtype':8} {'dims':>5} {'vectors':>12} {'MB':>10}  model ({args.cache_dir})")
    for folder, about, texts, size in models:
        shape = f"{about['dtype']:8} {about['dimensions']:5}"
        print(f"{folder.name[:12]:13} {shape} {texts:12,} {size / 1e6:10,.1f}  {about['model']}")


# ---------------------------------------------------------------------------------------------------- the model


# same in train_bi_encoder.py, train_cross_encoder.py
def weight_options(path):
    """Options that let transformers read no pickle; ValueError where weights lie outside of the model's folder."""
    for index in Path(path).rglob("*.safetensors.index.json"):
        for name in json.loads(index.read_text())["weight_map"].values():
            if os.path.isabs(name) or os.path.normpath(name).startswith(".."):
                raise ValueError(f"{index} names a file outside of the folder, {name}")
    return {"use_safetensors": True}


def load_model(path, args):
    """(SentenceTransformer on the CPU, dimensions to search with, prompt of queries, prompt of documents)."""
    try:
        model = SentenceTransformer(path, device="cpu", model_kwargs=weight_options(path))
    except Exception as error:  # whatever a damaged file makes the libraries raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(f"--model_name_or_path {path}: {reason}; check the path, or restore the folder") from None
    if model.similarity_fn_name not in ("cosine", "dot"):
        raise BadInput(f"{path}: its similarity is {model.similarity_fn_name}; cosine and dot can be searched")
    if args.max_length:
        most = getattr(model.config, "max_position_embeddings", None) or args.max_length
        if args.max_length > most:
            raise BadInput(f"--max_length {args.max_length}: the model has positions for {most} tokens")
        if isinstance(model.tokenizer, Tokenizer):  # a static embedding model
            model.tokenizer.enable_truncation(args.max_length)
        else:
            model.max_seq_length = args.max_length
    dims, model.truncate_dim = args.truncate_dim or model.truncate_dim, None  # the cache keeps whole vectors
    if (args.truncate_dim or 0) > model.get_embedding_dimension():
        raise BadInput(f"--truncate_dim {args.truncate_dim}: {path} has {model.get_embedding_dimension()} dimensions")
    own = [next((model.prompts[name] for name in names if model.prompts.get(name)), "")
           for names in (("query",), ("document", "passage", "corpus"))]  # fmt: skip
    prompts = [args.prompts[0], args.prompts[-1]] if args.prompts else own
    if any(prompts) and any(isinstance(module, Pooling) and not module.include_prompt for module in model):
        raise BadInput(f"{path}: leaves its prompt out of the pooling, which is not supported; use --prompts ''")
    return model.eval(), dims, *prompts


def load_reranker(path, args):
    """The CrossEncoder of a Hub id or folder, on the CPU."""
    try:
        heads = str(AutoConfig.from_pretrained(path).architectures)
        model = CrossEncoder(path, device="cpu", model_kwargs=weight_options(path))
    except Exception as error:  # whatever a damaged file makes the libraries raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(f"--cross_encoder {path}: {reason}; check the path, or restore the folder") from None
    if "SequenceClassification" not in heads or len(model) > 1 or model.config.num_labels != 1:
        raise BadInput(f"--cross_encoder {path}: not a transformer that gives a pair one score; "
                       "train_cross_encoder.py makes one")  # fmt: skip
    if model.default_prompt_name:
        raise BadInput(
            f"--cross_encoder {path}: puts a prompt before its texts, which is not supported; save it without"
        )
    if args.max_length:
        most = getattr(model.config, "max_position_embeddings", None) or args.max_length
        if args.max_length > most:
            raise BadInput(f"--max_length {args.max_length}: --cross_encoder has positions for {most} tokens")
        model.max_seq_length = args.max_length
    return model.eval()


def fingerprint_of(model, precision, dtype):
    """Hex hash of all that makes a vector of a text: weights, tokenizer, modules, max length, autocast and dtype."""
    config = model.config.to_dict() if model.config else {}
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    tokenizer = model.tokenizer
    if not isinstance(tokenizer, Tokenizer) and tokenizer.is_fast:
        tokenizer = tokenizer.backend_tokenizer
    words = json.loads(tokenizer.to_str()) if isinstance(tokenizer, Tokenizer) else tokenizer.get_vocab()
    length = model.max_seq_length
    if isinstance(model.tokenizer, Tokenizer):
        length = (words["truncation"] or {}).get("max_length")
    else:
        # truncation and padding are what the last call asked for
        words = {name: part for name, part in words.items() if name not in ("truncation", "padding")}
        length = (length, model.tokenizer.truncation_side, model.tokenizer.padding_side)
    modules = [(type(module).__name__, module.get_config_dict()) for module in model]
    similarity = getattr(model, "similarity_fn_name", None)  # a cross-encoder has none
    parts = [modules, config, words, length, precision, dtype, similarity]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


# same in train_bi_encoder.py, train_cross_encoder.py
def deal(lengths, processes):
    """Index lists, one a process, even in count and in length: longest first, in snake order (0 1 1 0 0 1 ...)."""
    shares = [[] for _ in range(processes)]
    for place, text in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        turn, process = divmod(place, processes)
        shares[process if turn % 2 == 0 else processes - 1 - process].append(text)
    return shares


# same in prepare_corpus.py, train_bi_encoder.py, train_cross_encoder.py
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


# same in train_bi_encoder.py, train_cross_encoder.py
def padded_length(length, model, device):
    """Tokens that a text of `length` is padded to at least: on a GPU a multiple of 8, as its fast kernels want."""
    return length if device.type == "cpu" else max(length, min(-(-length // 8) * 8, model.max_seq_length))


# same in train_bi_encoder.py
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


# same in train_bi_encoder.py
def encode(model, features, accelerator):
    """(n, D) float embeddings of one micro-batch."""
    features = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in features.items()}
    return model(features)["sentence_embedding"].float()


TOKENIZING = threading.Lock()  # how to truncate is a state of the tokenizer, which two threads use


# same in train_cross_encoder.py
def tokenize_pairs(pairs, model):
    """{name: a list of ints a pair}; the document is cut to fit, and the query only where it leaves no room."""
    queries, documents = map(list, zip(*pairs))
    options = {"max_length": model.max_seq_length}
    try:
        encodings = model.tokenizer(queries, documents, truncation="only_second", **options)
    except Exception:  # of tokenizers, which has no class of its own for it
        if len(pairs) == 1:
            room = f"a query leaves no room for its document in the {model.max_seq_length} tokens of the model"
            warnings.warn(f"{room} and is cut too; train with a higher --max_length", stacklevel=1)
            return dict(model.tokenizer(queries, documents, truncation="longest_first", **options))
        halves = [tokenize_pairs(half, model) for half in (pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :])]
        return {name: halves[0][name] + halves[1][name] for name in halves[0]}
    if any(encoding.overflowing for encoding in encodings.encodings or []):
        cut = f"a pair is longer than the {model.max_seq_length} tokens of the model"
        warnings.warn(f"{cut}; its document is cut, its query kept whole", stacklevel=1)
    return dict(encodings)


# same in train_cross_encoder.py
def make_pair_micro_batches(pairs, model, budget, device):
    """(micro-batches, tokens, tokens with padding) of `pairs`, tokenized, cut and padded, longest first.

    A micro-batch is (features, places in `pairs`).
    """
    with TOKENIZING:
        encodings = tokenize_pairs(pairs, model)
    lengths = [padded_length(len(ids), model, device) for ids in encodings["input_ids"]]
    micro_batches, padded = [], 0
    for cut in cut_micro_batches(lengths, budget):
        picked = {name: [values[i] for i in cut] for name, values in encodings.items()}
        features = dict(model.tokenizer.pad(picked, "max_length", lengths[cut[0]], return_tensors="pt"))
        padded += features["input_ids"].numel()
        if device.type == "cuda":
            features = {name: tensor.pin_memory() for name, tensor in features.items()}
        micro_batches.append((features, cut))
    return micro_batches, sum(map(len, encodings["input_ids"])), padded


# same in train_cross_encoder.py
def score(model, features, accelerator):
    """(n, 1) float logits of one micro-batch."""
    features = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in features.items()}
    return model(features)["scores"].float()


class Embedder:
    """Vectors of chunks of texts: from the cache, or encoded by all processes together and then stored."""

    unit, stage, done = "texts", "encode", "encoded"

    def __init__(self, model, cache, budget, accelerator, seconds):
        self.model, self.cache, self.budget, self.accelerator = model, cache, budget, accelerator
        self.seconds, self.counts, self.bar = seconds, Counter(total=0, encoded=0), tqdm(disable=True)
        self.longest = 6 * (model.max_seq_length or math.inf)  # characters, of which few texts need more to be cut

    def size(self, text):
        """About how long a text is, before it is tokenized."""
        return min(len(text), self.longest)

    def micro_batches(self, texts):
        return make_micro_batches(texts, self.model, self.budget, self.accelerator.device)

    def forward(self, features):
        """(n, D) vectors of one micro-batch."""
        return encode(self.model, features, self.accelerator)

    def __call__(self, chunks, own):
        """(n, D) vectors of chunks[own] (None where `own` is None).

        A collective call: `chunks` is the same on all processes, each looks up its own one, and chunk i is stored by
        process i. What is encoded together, hence every vector to its last bit, does not depend on the processes.
        """
        if own is not None:
            with clock(self.seconds, "lookup"):
                rows, found = self.cache.lookup(chunks[own].hashes)
        known = self._agree(chunks, found if own is not None else None)
        seen, new = {}, [[] for _ in chunks]  # {hash: number among the new texts}; new rows of each chunk
        for chunk, flags, fresh in zip(chunks, known, new):
            for row in np.flatnonzero(~flags):
                if (digest := chunk.hashes[row].tobytes()) not in seen:
                    seen[digest] = len(seen)
                    fresh.append(row)
        texts = sum(len(chunk.texts) for chunk in chunks)
        self.counts["total"] += texts
        self.counts["encoded"] += len(seen)
        self.bar.set_postfix_str(f"{1 - self.counts['encoded'] / self.counts['total']:.0%} cached", refresh=False)
        self.bar.update(texts - len(seen))
        if seen:
            with clock(self.seconds, self.stage):
                vectors = self._encode(chunks, new)  # (texts, D) float32
            with clock(self.seconds, "store"):
                packed = self.cache.pack(vectors)
                first = 0
                for process, (chunk, fresh) in enumerate(zip(chunks, new)):
                    if fresh and process == self.accelerator.process_index:
                        self.cache.store(chunk.hashes[fresh], packed[first : first + len(fresh)])
                    first += len(fresh)
                if own is not None:
                    for row in np.flatnonzero(~found):
                        rows[row] = packed[seen[chunks[own].hashes[row].tobytes()]]
            self.accelerator.wait_for_everyone()  # the next lookup, on any process, sees what was stored
        return None if own is None else torch.from_numpy(self.cache.unpack(rows))

    def _agree(self, chunks, found):
        """For each chunk, (n,) bool: which rows are in the cache, according to the process that looked."""
        width = max(len(chunk.texts) for chunk in chunks)
        flags = torch.ones(1, width, dtype=torch.uint8, device=self.accelerator.device)
        if found is not None:
            flags[0, : len(found)] = torch.from_numpy(found)
        flags = self.accelerator.gather(flags).cpu().numpy().astype(bool)  # (P, width)
        if len(chunks) == 1:
            flags = flags.all(0, keepdims=True)  # all processes may have looked up the one chunk
        return [flags[i, : len(chunk.texts)] for i, chunk in enumerate(chunks)]

    @torch.inference_mode()
    def _encode(self, chunks, new):
        """(texts, D) float32 vectors of the new rows of the chunks, in order, the same on every process."""
        texts = [
            text
            for chunk, rows in zip(chunks, new)
            for text in chunk.texts.take(pa.array(rows, pa.int64())).to_pylist()
        ]
        groups, first = [], 0  # of texts alike in length, some four micro-batches of them, dealt as a whole
        for rows in new:
            size = math.inf
            for i in sorted(range(first, first + len(rows)), key=lambda i: -self.size(texts[i])):
                if size > 16 * self.budget or len(groups[-1]) == 4096:  # characters; texts
                    groups.append([])
                    size = 0
                groups[-1].append(i)
                size += self.size(texts[i]) + 1
            first += len(rows)
        accelerator = self.accelerator
        shares = deal([sum(self.size(texts[i]) for i in group) for group in groups], accelerator.num_processes)
        order = [[i for group in share for i in groups[group]] for share in shares]  # texts of each process
        local = torch.zeros(max(map(len, order)), self.cache.dimensions, device=accelerator.device)
        mine = [groups[group] for group in shares[accelerator.process_index]]
        ready = (self.micro_batches([texts[i] for i in group]) for group in mine)
        first = 0
        for group, (micro_batches, tokens, padded) in zip(mine, prefetch(ready)):
            for features, places in micro_batches:
                with accelerator.autocast():
                    local[first + torch.tensor(places, device=local.device)] = self.forward(features)
            first += len(group)
            self.bar.update(len(texts) * len(group) / max(1, sum(map(len, mine))))  # the others are about as far
            self.counts["tokens"] += tokens
            self.counts["padded"] += padded
        gathered = accelerator.gather(local).cpu().numpy()  # (P * width, D)
        vectors = np.empty((len(texts), self.cache.dimensions), np.float32)
        for process, places in enumerate(order):
            vectors[places] = gathered[process * len(local) :][: len(places)]
        if not np.isfinite(vectors).all():
            bad = int(np.flatnonzero(~np.isfinite(vectors).all(1))[0])
            raise BadInput(
                f"the model's output for {str(texts[bad])[:60]!r} is not finite; check its weights and precision"
            )
        return vectors

    def about(self, fingerprint):
        """What metrics.json says of the work done; a collective call."""
        sums = [self.counts["tokens"], self.counts["padded"], self.cache.damaged]
        full = ["--cache_size_limit is reached: what does not fit is computed again each time"]
        tokens, padded, damaged = self.accelerator.reduce(torch.tensor(sums, device=self.accelerator.device)).tolist()
        total, new = self.counts["total"], self.counts["encoded"]
        return {
            "fingerprint": fingerprint,
            "cache": str(self.cache.folder),
            self.unit: {"total": total, self.done: new, "cached": total - new, "damaged_blocks": damaged},
            "padding_fraction": 1 - tokens / padded if padded else 0.0,
            "seconds": {stage: round(value, 4) for stage, value in self.seconds.items()},
            "per_second": {
                self.done: new / self.seconds[self.stage] if new else 0.0,
                "looked_up": total / self.seconds["lookup"] if total else 0.0,
            },
            "notes": full * self.cache.full,
        }


class PairScorer(Embedder):
    """The same for (query, document) pairs, whose scores are vectors of one dimension."""

    unit, stage, done = "pairs", "score", "scored"

    def size(self, pair):
        return min(len(pair["query"]) + len(pair["document"]), self.longest)

    def micro_batches(self, pairs):
        pairs = [(pair["query"], pair["document"]) for pair in pairs]
        return make_pair_micro_batches(pairs, self.model, self.budget, self.accelerator.device)

    def forward(self, features):
        return score(self.model, features, self.accelerator)


@contextmanager
def clock(seconds, stage):
    """Add the time spent within to seconds[stage]."""
    started = time.perf_counter()
    yield
    seconds[stage] += time.perf_counter() - started


# ------------------------------------------------------------------------------------------------------- search

# A tile of scores at most: 2**24 floats are 64 MB.
MAX_SCORES = 2**24


class TopK:
    """The best K documents of each query so far; equal scores rank by the order of the corpus."""

    def __init__(self, queries, k):
        self.queries = queries  # (Q, D) float32
        self.scores = torch.full((len(queries), k), -torch.inf, device=queries.device)  # (Q, K), falling
        self.rows = torch.full((len(queries), k), -1, device=queries.device)  # (Q, K) int64, -1: none yet

    def add(self, documents, first, omitted=()):
        """Score (n, D) documents, rows `first` and on; they come after all that were added before.

        omitted: (query number, row) pairs of these documents that are not to be ranked
        """
        omit_queries, omit_rows = torch.tensor(list(omitted), device=documents.device).view(-1, 2).long().T
        # The last columns of a product are summed in another order, and equal documents would score unequally there.
        padded = F.pad(documents, (0, 0, 0, -len(documents) % 64))
        tile = max(1, MAX_SCORES // len(documents))
        for begin in range(0, len(self.queries), tile):
            best, rows = self.scores[begin : begin + tile], self.rows[begin : begin + tile]  # (q, K)
            scores = (self.queries[begin : begin + tile] @ padded.T)[:, : len(documents)]  # (q, n)
            if omitted:
                inside = (omit_queries >= begin) & (omit_queries < begin + tile)
                scores[omit_queries[inside] - begin, omit_rows[inside] - first] = -torch.inf
            # Few documents get past a query's K-th best; only they are sorted. An equal score comes too late.
            passed = scores > best[:, -1:]
            k = best.shape[1]
            if len(documents) > k and passed.sum(1).max() > 2 * k:  # the first chunks
                passed &= scores >= scores.topk(k).values[:, -1:]  # with all that equal the K-th
            query, document = torch.nonzero(passed, as_tuple=True)
            if not len(query):
                continue
            counts = torch.bincount(query, minlength=len(best))
            slot = torch.arange(len(query), device=query.device) - (counts.cumsum(0) - counts)[query]
            more = best.new_full((len(best), int(counts.max())), -torch.inf)  # (q, m)
            from_rows = rows.new_full(more.shape, -1)
            more[query, slot] = scores[query, document]
            from_rows[query, slot] = document + first
            self._keep(begin, torch.cat([best, more], 1), torch.cat([rows, from_rows], 1))

    def merge(self, accelerator):
        """Make these the best over all processes, each of which has seen other documents."""
        shape = (accelerator.num_processes, *self.rows.shape)
        scores, rows = (accelerator.gather(t).view(shape).transpose(0, 1).flatten(1) for t in (self.scores, self.rows))
        order = rows.argsort(1)  # corpus order first, for a stable sort to keep among equal scores
        self._keep(0, scores.gather(1, order), rows.gather(1, order))

    def _keep(self, begin, scores, rows):
        order = scores.argsort(dim=1, descending=True, stable=True)[:, : self.scores.shape[1]]
        self.scores[begin : begin + len(scores)] = scores.gather(1, order)
        self.rows[begin : begin + len(scores)] = rows.gather(1, order)


# same in train_bi_encoder.py, train_cross_encoder.py
@cache
def day_long_group():
    """Return a gloo group of all processes, with a timeout of a day, for work that one process does for the others.

    Such as the Arrow copy of a large corpus. The collectives of a step keep the 30 minutes of the default group.
    """
    return torch.distributed.new_group(backend="gloo", timeout=timedelta(days=1))


# same in train_bi_encoder.py, train_cross_encoder.py
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


def load_embedder(path, args, accelerator):
    """(Embedder, function that makes its vectors those to search with, fingerprint, both prompts as in load_model)."""
    seconds = defaultdict(float)
    with clock(seconds, "load"):
        model, dims, *prompts = load_model(path, args)
        fingerprint = fingerprint_of(model, accelerator.mixed_precision, args.cache_dtype)
        model.to(accelerator.device)
    folder = Path(args.cache_dir).expanduser() / fingerprint[:32]
    shape = (model.get_embedding_dimension(), args.cache_dtype, args.cache_size_limit)
    cache = main_first(accelerator, lambda: EmbeddingCache(folder, path, *shape))
    static = isinstance(model.tokenizer, Tokenizer)
    budget = args.micro_batch_tokens or (2**20 if static else 2048 if accelerator.device.type == "cpu" else 16_384)

    def for_search(vectors):
        vectors = vectors.to(accelerator.device).float()[:, :dims]
        return F.normalize(vectors, dim=1) if model.similarity_fn_name == "cosine" else vectors

    return Embedder(model, cache, budget, accelerator, seconds), for_search, fingerprint, *prompts


def open_bar(embed, path, rows):
    """Show how far an Embedder is in a corpus of so many rows, or in a stream (None)."""
    show = "{l_bar}{bar}| {n:,.0f}/{total:,.0f} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
    embed.bar = tqdm(total=rows, unit=" texts", desc=short_names([path])[0], delay=1,
                     bar_format=show if rows else None, disable=not embed.accelerator.is_main_process)  # fmt: skip


def retrieve(path, collection, args, accelerator):
    """The Run of a model over a collection, complete on the main process."""
    embed, for_search, fingerprint, query_prompt, prompt = load_embedder(path, args, accelerator)
    seconds = embed.seconds

    # Queries, all of them on every process
    texts = pa.array([query_prompt + text for text in collection.query_texts], pa.string())
    parts = (texts.slice(i, args.chunk_rows) for i in range(0, len(texts), args.chunk_rows))
    chunks = [Chunk(0, part, part, text_hashes(part)) for part in parts]
    queries = torch.cat([for_search(embed([chunk], 0)) for chunk in chunks])  # (Q, D)
    relevant = defaultdict(list)  # {document id: numbers of the queries that it is judged for}, with --judged
    for query, names in enumerate(judged_ids(collection) if args.judged else ()):
        for name in names:
            relevant[name].append(query)
    relevant_ids = pa.array(relevant, pa.string())
    numbers = {name: query for query, name in enumerate(collection.query_ids) if collection.omit_same_id}
    query_ids, same_id = pa.array(numbers, pa.string()), set()  # numbers of queries with an own document
    top = TopK(queries, min(args.top_k, collection.corpus.rows or args.top_k))

    # Documents, a chunk for each process at a time
    judged = pa.array(sorted({name for known in collection.qrels.values() for name in known}), pa.string())
    found, doubles = set(), set()  # judged documents that are there; ids that are there twice
    kept, scored = {}, {}  # {row: (id, text)} of the best; {(query, id): score} of the judged
    reader = prefetch(collection.corpus.chunks(args.chunk_rows, prompt))
    open_bar(embed, path, collection.corpus.rows)
    documents = 0
    while True:
        with clock(seconds, "read"):
            chunks = list(islice(reader, accelerator.num_processes))
        if not chunks:
            break
        own = accelerator.process_index if accelerator.process_index < len(chunks) else None
        vectors = embed(chunks, own)
        with clock(seconds, "search"):
            omitted = []  # of each chunk, the (query number, row) pairs of equal ids
            for chunk in chunks:
                same = places_in(chunk.ids, query_ids) if numbers else ()
                omitted.append([(numbers[chunk.ids[row].as_py()], row + chunk.first) for row in same])
                same_id.update(query for query, _ in omitted[-1])
            if own is not None:
                chunk = chunks[own]
                vectors = for_search(vectors)
                top.add(vectors, chunk.first, omitted[own])
                rows = torch.unique(top.rows[top.rows >= chunk.first]) - chunk.first
                picked = pa.array(rows.cpu().numpy())
                ids = chunk.ids.take(picked).to_pylist()
                texts = chunk.texts.take(picked).to_pylist() if args.query else [""] * len(ids)
                kept |= {row + chunk.first: (i, t[len(prompt) :]) for row, i, t in zip(picked.tolist(), ids, texts)}
                for row in places_in(chunk.ids, relevant_ids) if relevant else ():
                    name = chunk.ids[row].as_py()
                    for query, value in zip(relevant[name], (queries[relevant[name]] @ vectors[row]).tolist()):
                        scored[query, name] = max(value, scored.get((query, name), value))
                if len(kept) > 4 * top.rows.numel():  # most are no longer among the best
                    kept = {row: kept[row] for row in torch.unique(top.rows).tolist() if row >= 0}
            for chunk in chunks:
                there = chunk.ids.filter(pc.is_in(chunk.ids, judged)).to_pylist()
                doubles.update(found.intersection(there), (i for i, n in Counter(there).items() if n > 1))
                found.update(there)
        documents += sum(len(chunk.texts) for chunk in chunks)
    embed.bar.close()
    embed.cache.cache.close()
    if not documents:
        raise BadInput(f"{collection.corpus.files[0]}: no document; check --corpus")
    with clock(seconds, "search"):
        top.merge(accelerator)
    kept = dict(item for part in gather_object([kept]) for item in part.items())
    scored = sorted(item for part in gather_object([scored]) for item in part.items())

    # Names of the documents; an id that stands twice keeps its best score
    names, scores = [], []
    for rows, values in zip(top.rows.tolist(), top.scores.tolist()):
        best = {}
        for row, value in zip(rows, values):
            if row >= 0 and best.setdefault(kept[row][0], value) is not value:
                doubles.add(kept[row][0])
        names.append(list(best))
        scores.append(list(best.values()))
    about = embed.about(fingerprint)
    about["texts"] |= {"documents": documents, "queries": len(names)}
    about["per_second"]["searched"] = documents / seconds["search"]
    for count, what in (
        (args.top_k - documents, f"fewer documents than the {args.top_k} to be ranked; all of them are"),
        (len(doubles), "ids stand at several documents, going by the judged and the best; each counts once, with its "
                       "best score"),
        (len(judged) - len(found), "judged documents are not in the corpus; they count as not found"),
        (collection.corpus.empty, "documents are empty; encoded as the empty string"),
    ):  # fmt: skip
        about["notes"] += [f"{count:,} {what}"] * (count > 0)
    report_same_id(about, [collection.query_ids[query] for query in same_id], collection)
    texts = dict(kept.values()) if args.query else {}
    run = Run(path, names, scores, texts, about)
    if args.judged:
        run.judged = [{} for _ in names]
        for (query, name), value in scored:  # of an id that stands twice the best score is the last
            run.judged[query][name] = value
    return run


def judged_ids(collection):
    """Q lists of the ids of the documents that are judged for a query, but its own where that is left out."""
    return [[document for document in collection.qrels[name] if not (collection.omit_same_id and document == name)]
            for name in collection.query_ids]  # fmt: skip


def places_in(ids, wanted):
    """Places in an Arrow array of ids of those that are among the wanted ones, another Arrow array."""
    return np.flatnonzero(pc.is_in(ids, wanted).to_numpy(zero_copy_only=False)).tolist()


def candidate_pairs(asked, collection, args):
    """Yield (query number, document id, document, hash of both texts), in corpus order.

    asked: {document id: the numbers of the queries that it is to be scored for}
    """
    queries = text_hashes(pa.array(collection.query_texts, pa.string()))  # (Q, 2)
    wanted = pa.array(asked, pa.string())
    for batch in prefetch(collection.corpus.batches("")):
        names, texts = (column.take(pa.array(places_in(batch["id"], wanted), pa.int64())) for column in batch.columns)
        for name, text, document in zip(names.to_pylist(), texts.to_pylist(), text_hashes(texts)):
            for query in asked[name]:
                both = queries[query].tobytes() + document.tobytes()
                yield query, name, text, hashlib.blake2b(both, digest_size=16).digest()


def score_pairs(wanted, name, collection, args, accelerator):
    """(Q dicts {document id: score by --cross_encoder}, about) of Q lists of document ids.

    A score is the model's logit, without the sigmoid that would make the highest equal.
    """
    seconds = defaultdict(float)
    with clock(seconds, "load"):
        model = load_reranker(args.cross_encoder, args)
        fingerprint = fingerprint_of(model, accelerator.mixed_precision, "logit")
        model.to(accelerator.device)
    folder = Path(args.cache_dir).expanduser() / fingerprint[:32]
    shape = (1, "float32", args.cache_size_limit)
    cache = main_first(accelerator, lambda: EmbeddingCache(folder, args.cross_encoder, *shape))
    budget = args.micro_batch_tokens or (2048 if accelerator.device.type == "cpu" else 16_384)
    embed = PairScorer(model, cache, budget, accelerator, seconds)
    asked = defaultdict(list)
    for query, documents in enumerate(wanted):
        for document in documents:
            asked[document].append(query)
    embed.bar = tqdm(total=sum(map(len, asked.values())), unit=" pairs", desc=name, delay=1,
                     disable=not accelerator.is_main_process)  # fmt: skip
    found = [{} for _ in wanted]
    pairs = candidate_pairs(asked, collection, args)
    while part := list(islice(pairs, args.chunk_rows)):
        queries, ids, texts, hashes = zip(*part)
        columns = pa.array([collection.query_texts[query] for query in queries]), pa.array(texts)
        structs = pa.StructArray.from_arrays(columns, ["query", "document"])
        chunk = Chunk(0, None, structs, np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 2))
        for query, document, value in zip(queries, ids, embed([chunk], 0)[:, 0].tolist()):
            found[query][document] = max(value, found[query].get(document, value))  # an id may stand twice
    embed.bar.close()
    cache.cache.close()
    return found, embed.about(fingerprint)


def rerank(run, collection, args, accelerator):
    """The Run with the first --rerank_k documents of each query in the order of their scores by --cross_encoder.

    The documents after them stay behind, in their order, so that measures deeper than that lose nothing.
    """
    name = "+".join(chain(short_names([run.name]), short_names([args.cross_encoder])))
    first = [documents[: args.rerank_k] for documents in run.documents]
    judged = judged_ids(collection) if args.judged else [[] for _ in first]
    wanted = [list(dict.fromkeys(chain(*both))) for both in zip(first, judged)]
    found, about = score_pairs(wanted, name, collection, args, accelerator)
    documents, scores = [], []
    for known, before in zip(found, run.documents):
        order = sorted(before[: args.rerank_k], key=known.get, reverse=True)
        behind = before[args.rerank_k :]
        documents.append(order + behind)
        values = [known[document] for document in order]
        scores.append(values + [values[-1] - place for place in range(1, len(behind) + 1)])
    about["same_id_left_out"] = run.about["same_id_left_out"]
    judged = [{name: known[name] for name in names if name in known} for names, known in zip(judged, found)]
    return Run(name, documents, scores, run.texts, about, judged if args.judged else None)


def bm25_run(collection, args):
    """The Run of BM25 (Robertson and Zaragoza 2009; bm25s' default, Lucene's variant), its corpus in memory."""
    try:
        import bm25s
    except ImportError:
        raise BadInput("--bm25: needs the package bm25s: pip install bm25s") from None
    seconds = defaultdict(float)
    with clock(seconds, "index"):
        chunks = list(collection.corpus.chunks(args.chunk_rows))
        ids = [name for chunk in chunks for name in chunk.ids.to_pylist()]
        texts = [text for chunk in chunks for text in chunk.texts.to_pylist()]
        words, queries = (
            bm25s.tokenize(part, stopwords="en", return_ids=False, show_progress=False)
            for part in (texts, collection.query_texts)
        )
        if not any(words):
            raise BadInput("--bm25: the corpus holds no word; leave it out")
        index = bm25s.BM25()
        index.index(words, show_progress=False)
    hits = [{} for _ in queries]
    with clock(seconds, "search"):
        names = set(collection.query_ids) if collection.omit_same_id else ()
        same = Counter(name for name in ids if name in names)
        depth = min(args.top_k + max(same.values(), default=0), len(ids))  # room for a query's own documents
        rows, scores = index.retrieve(queries, k=depth, show_progress=False)
        for query, hit, *found in zip(collection.query_ids, hits, rows.tolist(), scores.tolist()):
            others = (pair for pair in zip(*found) if not (query in same and ids[pair[0]] == query))
            for row, score in islice(others, args.top_k):
                if score > 0:
                    hit.setdefault(ids[row], score)  # an id that stands twice keeps its best score
    about = {"seconds": {stage: round(value, 4) for stage, value in seconds.items()}, "notes": []}
    report_same_id(about, same, collection)
    return Run("BM25", [list(hit) for hit in hits], [list(hit.values()) for hit in hits], {}, about)


# ------------------------------------------------------------------------------------------------- vectors to a file

EXPORTED = re.compile(r"vectors-\d{12}\.parquet|_vectors\.json|\..*")  # names in an export's folder, or hidden


@contextmanager
def whole_file(path):
    """A binary file to write, that gets its name when all of it is on disk."""
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as sink:
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(part, path)
    except OSError as error:
        raise BadInput(f"--export_vectors {path.parent}: {error}; make room, then the same command goes on, or name "
                       "another folder") from None  # fmt: skip
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def shard_note(file):
    """What a shard says in its footer that it was made of; None where it is not there, or not whole."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return json.loads(pq.read_metadata(file).metadata[b"evenstep"])


def open_export(folder, about):
    """Make a folder for the export that `about` describes; BadInput where it holds something else."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(file.name for file in folder.iterdir())
        for name in names:
            if not EXPORTED.fullmatch(name):
                raise BadInput(f"--export_vectors {folder}: holds {name}, which is no export's; name an empty folder")
        held = next(filter(None, (shard_note(folder / name) for name in names)), about)
        if other := [name for name in about if held.get(name) != about[name]]:
            raise BadInput(f"--export_vectors {folder}: holds an export of another {', another '.join(other)}; name "
                           "another folder, or remove this one")  # fmt: skip
        (folder / "_vectors.json").unlink(missing_ok=True)  # until the shards are those of this corpus
    except OSError as error:
        raise BadInput(f"--export_vectors {folder}: {error}; name a folder that can be written") from None


def export_vectors(corpus, args, accelerator):
    """--export_vectors: a Parquet shard of (_id, vector) for each chunk, and _vectors.json when all are there.

    The underscore hides that file from what reads a folder of Parquet. A shard that is there for the same chunk stays.
    """
    path, folder = args.model_name_or_path[0], Path(args.export_vectors)
    embed, for_search, fingerprint, query_prompt, prompt = load_embedder(path, args, accelerator)
    dimensions = for_search(torch.zeros(1, embed.cache.dimensions)).shape[1]
    sources = [source if "://" in source else os.path.abspath(source) for source in args.corpus or args.pairs]
    about = {"fingerprint": fingerprint, "dimensions": dimensions, "document_prompt": prompt, "corpus": sources,
             "columns": [corpus.id, *corpus.texts]}  # fmt: skip
    main_first(accelerator, lambda: open_export(folder, about))
    open_bar(embed, path, corpus.rows)
    rows = shards = kept = 0
    reader = prefetch(corpus.chunks(args.chunk_rows, prompt))
    while chunks := list(islice(reader, accelerator.num_processes)):
        todo = []  # the same on every process: shards are written only after all have met in embed()
        for chunk in chunks:
            digest = hashlib.blake2b(chunk.hashes.tobytes() + text_hashes(chunk.ids).tobytes(), digest_size=16)
            file, note = folder / f"vectors-{chunk.first:012}.parquet", {**about, "chunk": digest.hexdigest()}
            if shard_note(file) != note:
                todo.append((chunk, file, note))
            else:
                embed.bar.update(len(chunk.ids))
            rows, shards = rows + len(chunk.ids), shards + 1
        kept += len(chunks) - len(todo)
        own = accelerator.process_index if accelerator.process_index < len(todo) else None
        vectors = embed([chunk for chunk, _, _ in todo], own) if todo else None
        if own is not None:
            chunk, file, note = todo[own]
            values = pa.array(for_search(vectors).cpu().numpy().reshape(-1))  # (n * D,) float32
            table = pa.table([chunk.ids, pa.FixedSizeListArray.from_arrays(values, dimensions)], ["_id", "vector"])
            with whole_file(file) as sink:  # floats of vectors neither repeat nor shrink
                pq.write_table(table.replace_schema_metadata({"evenstep": json.dumps(note)}), sink,
                               compression="none", use_dictionary=False, write_statistics=False)  # fmt: skip
    embed.bar.close()
    embed.cache.cache.close()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        similarity, length = embed.model.similarity_fn_name, args.max_length or embed.model.max_seq_length
        about |= {"model": path, "query_prompt": query_prompt, "max_length": None if length == math.inf else length,
                  "similarity": similarity, "normalized": similarity == "cosine", "dtype": "float32", "rows": rows,
                  "shards": shards, "command": shlex.join(sys.argv)}  # fmt: skip
        with whole_file(folder / "_vectors.json") as sink:
            for file in folder.glob("vectors-*"):  # of a longer corpus, or of chunks of other sizes
                if (first := int(file.name[8:20])) >= rows or first % args.chunk_rows:
                    file.unlink()
            sink.write(json.dumps(about, indent=1).encode())
        if corpus.empty:
            print(f"note: {corpus.empty:,} documents are empty; encoded as the empty string", file=sys.stderr)
        print(f"{embed.counts['encoded']:,} of {rows:,} texts encoded, {kept:,} of {shards:,} shards kept; vectors of "
              f"{dimensions} dimensions are in {folder}")  # fmt: skip
    accelerator.wait_for_everyone()


# ------------------------------------------------------------------------------------------------------ metrics


class RetrievalMetric(evaluate.Metric):
    """Measures of ranked documents, by ir_measures (which asks trec_eval, through pytrec_eval).

    add_batch(query_id=[...], document_ids=[[...]], scores=[[...]]), then compute(qrels={query id: {document id: int}},
    measures=["nDCG@10", ...]) -> {measure: {query id: value}}. As in trec_eval a document without judgment is not
    relevant, and equal scores rank by document id, last first.
    """

    def _info(self):
        return evaluate.MetricInfo(
            description="Retrieval measures by ir_measures.",
            citation="MacAvaney et al. 2022, Streamlining Evaluation with ir-measures",
            inputs_description="Ranked document ids and scores of each query.",
            features=datasets.Features(
                {
                    "query_id": datasets.Value("string"),
                    "document_ids": datasets.Sequence(datasets.Value("string")),
                    "scores": datasets.Sequence(datasets.Value("float64")),
                }
            ),
        )

    def _compute(self, query_id, document_ids, scores, qrels, measures):
        # Some providers of ir_measures rank equal scores otherwise than trec_eval; ranks for scores leave no ties.
        run = {
            name: {d: -float(rank) for rank, (_, d) in enumerate(sorted(zip(values, found), reverse=True))}
            for name, found, values in zip(query_id, document_ids, scores)
        }
        parsed = {name: ir_measures.parse_measure(name) for name in measures}  # two names may mean one measure
        values = {measure: {} for measure in parsed.values()}
        for value in ir_measures.iter_calc(list(values), {name: qrels[name] for name in run}, run):
            values[value.measure][value.query_id] = value.value
        return {name: values[measure] for name, measure in parsed.items()}


def measure(run, collection, args):
    """{measure: (Q,) values} of a Run, queries in the collection's order."""
    with tempfile.TemporaryDirectory() as folder:
        metric = RetrievalMetric(cache_dir=folder, keep_in_memory=True)
        for begin in range(0, len(collection.query_ids), 1000):
            part = slice(begin, begin + 1000)
            metric.add_batch(
                query_id=collection.query_ids[part], document_ids=run.documents[part], scores=run.scores[part]
            )
        values = metric.compute(qrels=collection.qrels, measures=args.metrics)
    return {name: np.array([values[name].get(i, 0.0) for i in collection.query_ids]) for name in args.metrics}


def interval(values):
    """(low, high): 95 % bootstrap interval of the mean over queries (Efron and Tibshirani 1993, percentile)."""
    if len(values) < 2 or np.ptp(values) == 0:
        return float(values.mean()), float(values.mean())
    batch = max(1, 2**22 // len(values))
    found = bootstrap((values,), np.mean, n_resamples=9999, batch=batch, method="percentile", rng=0)
    return tuple(map(float, found.confidence_interval))


def paired_p(values, others):
    """Two-sided p of the paired randomization test on the difference of the means (Smucker et al. 2007)."""
    if len(values) < 2 or np.array_equal(values, others):
        return 1.0
    test = permutation_test(
        (values, others),
        lambda a, b, axis: (a - b).mean(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=9999,
        batch=max(1, 2**22 // len(values)),
        rng=0,
    )
    return float(test.pvalue)


# ------------------------------------------------------------------------------------------------------- report


def short_names(paths):
    """A short name of each model for tables and folders, all different; RUN for RUN/model."""
    parts = [path.rstrip("/").removesuffix("/model").split("/") for path in paths]
    names = [part[-1] for part in parts]
    if len(set(names)) < len(names):
        names = ["_".join(part[-2:]) for part in parts]
    return [name if names.count(name) == 1 else f"{name}_{i + 1}" for i, name in enumerate(names)]


def write_run(path, name, collection, documents, scores):
    """Q lists of document ids and of their scores, best first, as a TREC run file."""
    with open(path, "w") as file:
        for query, *ranked in zip(collection.query_ids, documents, scores):
            for rank, (document, score) in enumerate(zip(*ranked), start=1):
                fields = (query, "Q0", document, str(rank), f"{score:.9g}", name)
                file.write(" ".join(re.sub(r"\s", "_", field) for field in fields) + "\n")


def write_results(runs, names, values, collection, args):
    """metrics.json, per_query.csv, the runs and report.png in --output_dir; prints the table."""
    output, results = Path(args.output_dir), []
    for run, name, mine in zip(runs, names, values):
        metrics = {}
        for m in args.metrics:
            low, high = interval(mine[m])
            metrics[m] = {"mean": float(mine[m].mean()), "low": low, "high": high}
            if run is not runs[0]:
                metrics[m] |= {
                    "difference": float((mine[m] - values[0][m]).mean()),
                    "p": paired_p(mine[m], values[0][m]),
                }
        results.append({"name": name, "model": run.name, "metrics": metrics, **run.about,
                        "notes": collection.notes + run.about["notes"]})  # fmt: skip
    try:
        for run, name in zip(runs, names):
            folder = output if len(runs) == 1 else output / name
            folder.mkdir(parents=True, exist_ok=True)
            write_run(folder / "run.trec", name, collection, run.documents, run.scores)
            if run.judged is not None:
                ranked = [sorted(known.items(), key=lambda item: -item[1]) for known in run.judged]
                columns = [[[pair[part] for pair in pairs] for pairs in ranked] for part in (0, 1)]
                write_run(folder / "judged.trec", name, collection, *columns)
        with open(output / "per_query.csv", "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["query", *([] if len(runs) == 1 else ["model"]), *args.metrics])
            for name, mine in zip(names, values):
                for i, query in enumerate(collection.query_ids):
                    table.writerow(
                        [query, *([] if len(runs) == 1 else [name]), *(float(mine[m][i]) for m in args.metrics)]
                    )
        (output / "metrics.json").write_text(
            json.dumps(results[0] if len(runs) == 1 else {"models": results}, indent=1)
        )
        draw_report(runs, names, values, collection, args, output / "report.png")
    except OSError as error:
        raise BadInput(f"--output_dir {output}: {error}; make room or name another; no vector is lost") from None
    print_table(results, args)
    print(f"{len(collection.query_ids):,} queries; metrics.json, per_query.csv and report.png are in {output}")


def print_table(results, args):
    """Means with their 95 % intervals, and p of the difference from the first model."""
    width = max(len(result["name"]) for result in results)
    print(f"\n{'':{width}}" + "".join(f"  {m:>24}" for m in args.metrics))
    for result in results:
        cells = []
        for m in args.metrics:
            cell = result["metrics"][m]
            cells.append(f"{cell['mean']:.4f} [{cell['low']:.4f}, {cell['high']:.4f}]")
        print(f"{result['name']:{width}}" + "".join(f"  {cell:>24}" for cell in cells))
        if "p" in result["metrics"][args.metrics[0]]:
            cells = [f"{c['difference']:+.4f}, p = {c['p']:.4f}" for c in map(result["metrics"].get, args.metrics)]
            print(f"{'':{width}}" + "".join(f"  {cell:>24}" for cell in cells))
    for result in results:
        for unit, done in (("texts", "encoded"), ("pairs", "scored")):
            if counts := result.get(unit):
                stages = ", ".join(f"{name} {value:.1f}" for name, value in result["seconds"].items() if value >= 0.05)
                print(f"{result['name']}: {counts[done]:,} of {counts['total']:,} {unit} {done}; seconds: {stages}")


def draw_report(runs, names, values, collection, args, path):
    """report.png: recall by depth, the first measure over the queries, where texts and time went."""
    import matplotlib  # half a second to import, at the end of a run

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def stack(axis, place, parts):
        """One horizontal bar made of the parts {name: size}."""
        left = 0.0
        for number, (name, size) in enumerate(parts.items()):
            axis.barh(place, size, 0.6, left, color=f"C{number}", label=None if place else name)
            left += size

    figure, axes = pyplot.subplots(1, 4, figsize=(17, 3.8), layout="constrained")
    colors = [f"C{i % 10}" for i in range(len(runs))]
    depth = max(len(documents) for run in runs for documents in [*run.documents, range(args.top_k)])
    depths = np.arange(1, depth + 1)
    for run, name, color in zip(runs, names, colors):
        recalls = []
        for query, documents in zip(collection.query_ids, run.documents):
            relevant = {d for d, grade in collection.qrels[query].items() if grade > 0}
            if relevant:
                hits = np.zeros(depth)
                hits[: len(documents)] = [d in relevant for d in documents]
                recalls.append(hits.cumsum() / len(relevant))
        axes[0].plot(depths, np.mean(recalls or [depths * 0.0], axis=0), label=name, color=color)
    axes[0].set(xscale="log", xlabel="k", ylabel="recall@k", ylim=(0, 1))
    axes[0].legend()
    m = args.metrics[0]
    axes[1].hist([mine[m] for mine in values], bins=10, range=(0, 1), label=names, color=colors)
    axes[1].set(xlabel=m, ylabel="queries")
    stages = ("load", "read", "lookup", "encode", "score", "store", "index", "search")
    for place, run in enumerate(runs):
        counts = run.about.get("texts", run.about.get("pairs", {}))
        stack(axes[2], place, {stage: counts.get(stage, 0) for stage in ("cached", "encoded", "scored")})
        stack(axes[3], place, {stage: run.about["seconds"].get(stage, 0.0) for stage in stages})
    axes[2].set(xlabel="texts, or pairs of a cross-encoder")
    axes[3].set(xlabel="seconds")
    for axis in axes[2:]:
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(-0.6, len(names) + 0.4)  # room for the legend
        axis.legend(*axis.get_legend_handles_labels(), fontsize="small", ncols=4, loc="upper center")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def print_hits(run, collection):
    """The best ten documents of each query, with their scores."""
    columns = shutil.get_terminal_size((120, 24)).columns
    for query, documents, scores in zip(collection.query_texts, run.documents, run.scores):
        print(f"\n{query}")
        for name, score in list(zip(documents, scores))[:10]:
            text = " ".join(run.texts[name].split())
            print(f"  {score:6.3f}  {name:>8}  {text}"[: max(columns, 60)])


def main(args):
    if args.cache_info or args.cache_clear or args.cache_rebuild:
        return manage_cache(args) if int(os.environ.get("RANK", 0)) == 0 else None  # of accelerate launch
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # else several processes on CPUs would not find one another
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=30))],
    )
    datasets.disable_progress_bars()
    collection = main_first(accelerator, lambda: open_collection(args))  # it makes the Arrow copies
    if args.export_vectors is not None:
        export_vectors(collection.corpus, args, accelerator)
        return accelerator.end_training()
    runs = [read_run(args, collection)] if args.run else []
    runs += [retrieve(path, collection, args, accelerator) for path in args.model_name_or_path]
    if args.cross_encoder:
        runs += [rerank(run, collection, args, accelerator) for run in runs]
    if accelerator.is_main_process:
        for note in dict.fromkeys(chain(collection.notes, *(run.about["notes"] for run in runs))):
            print(f"note: {note}", file=sys.stderr)
        if args.query:
            print_hits(runs[-1], collection)
        else:
            runs += [bm25_run(collection, args)] if args.bm25 else []
            values = [measure(run, collection, args) for run in runs]
            write_results(runs, short_names([run.name for run in runs]), values, collection, args)
    if accelerator.num_processes > 1:
        torch.distributed.barrier(day_long_group())  # BM25 and the report may take the main process long
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
        sys.exit(f"error: another process of this run is gone ({reason}); start the same command again")
