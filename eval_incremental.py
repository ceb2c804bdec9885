"""Evaluate bi-encoders and rerankers on retrieval, over corpora of any size, without encoding any text twice.

    python eval_incremental.py                                         # runs/bi_encoder/model, on held-out demo pairs
    python eval_incremental.py --model_name_or_path BAAI/bge-base-en-v1.5 runs/bge/model --beir scifact nfcorpus
    python eval_incremental.py --query "read a gzip file"              # search instead; fast once the corpus is cached
    python eval_incremental.py --beir scifact --run bm25.run --cross_encoder runs/cross_encoder/model   # rerank
    python eval_incremental.py --corpus docs.parquet --export_vectors vectors       # for an index or a vector database
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml eval_incremental.py args.yaml

A collection is --pairs, or a corpus, queries and judgments (qrels), each by its own flag or in BEIR's layout:

    corpus.jsonl   {"_id": "4983", "title": "Microstructural ...", "text": "Alterations of ..."}
    queries.jsonl  {"_id": "1", "text": "0-dimensional biomaterials lack ..."}
    qrels/test.tsv query-id <tab> corpus-id <tab> score

The corpus is read in chunks: vectors are taken from the cache, or encoded and stored, and the best documents of each
query are updated. Memory is bounded by the chunk, the queries and the judgments; search is exact; rerun the command to
resume a killed run. Vectors are cached by their text and a fingerprint of the model. A cross-encoder can rerank the
best documents of each query; its scores are cached in the same way, by query and document.

Output: metrics.json, report.png, and for each ranking run.trec and per_query.csv.
Left out on purpose: approximate search, asymmetric models (Router), similarities other than cosine and dot product.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate>=1.15,<2", "datasets>=5.2,<6", "diskcache>=5.6.3,<6", "filelock>=4.2,<5",
#   "fsspec[http]>=2026.9", "ir_measures>=0.4.3,<1", "matplotlib>=3.11,<4", "numpy>=2.4,<3", "pandas>=2.2,<4",
#   "pyarrow>=26,<27", "pyyaml>=6.0,<7", "scipy>=1.17,<2", "sentence-transformers>=6.2,<7", "tokenizers>=0.23,<1",
#   "torch==2.13.0", "tqdm>=4.70,<5", "transformers>=5.23,<6", "xxhash>=4.1,<5", "zstandard>=0.25,<1"]
# ///

import csv
import hashlib
import io
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
import traceback
from bisect import bisect_right
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Literal

import datasets
import diskcache
import fsspec
import ir_measures
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
import transformers
import xxhash
import yaml
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import gather_object
from filelock import FileLock
from matplotlib.figure import Figure
from pyarrow.dataset import ParquetFragmentScanOptions
from scipy.stats import bootstrap, permutation_test
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer
from tqdm.auto import tqdm

# Shapes: Q queries, n documents of a chunk, D embedding dimensions, K results of a query (--top_k), P processes.

# ---- errors and options (same in train_bi_encoder.py)


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


# ---- options

DEMO = "data/python_code"  # where prepare_corpus.py writes the demo corpus
ABOVE_ZERO = "rerank_k rerank_max_length max_length truncate_dim micro_batch_tokens corpus_chunk_size top_k"


def flag(default, help):
    """Return the dataclass field of a command-line option."""
    kind = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**kind, metadata={"help": help})


@dataclass
class Args:
    # data
    beir: list[str] = flag([], "folders or Hub ids of collections in the layout of BEIR or NanoBEIR")
    split: str = flag("test", "judgments of --beir to use")
    corpus: list[str] = flag([], "sources of the documents, instead of --beir: paths, globs, folders, URLs, Hub ids")
    queries: list[str] = flag([], "sources of the queries of --corpus")
    qrels: str | None = flag(None, "judgments of --corpus: TREC qrels, or query, document and grade")
    corpus_columns: list[str] = flag([], "id column (# for the row number), then text columns; none: _id title text")
    query_columns: list[str] = flag([], "the same for the queries; none: _id text")
    pairs: list[str] = flag([], f"sources of (query, document) rows; without --beir and --corpus: {DEMO}/heldout")
    columns: list[str] = flag([], "query and document column of --pairs; none: the first two")
    keep_same_id: bool = flag(False, "also rank the document with the query's own id, which BEIR excludes")
    streaming: bool = flag(False, "read the corpus front to back, without first converting it to a mapped table")
    # rankings
    model_name_or_path: list[str] = flag([], "bi-encoders to compare; none: runs/bi_encoder/model unless --run is set")
    run: list[str] = flag([], "rankings to evaluate or rerank, in TREC format: query Q0 document rank score tag")
    bm25: bool = flag(False, "compare with BM25 (requires bm25s, and the corpus in memory)")
    cross_encoder: str | None = flag(None, "model that reranks the rankings of the bi-encoders and --run, not --bm25")
    rerank_k: int | None = flag(None, "documents to rerank per query; the others rank below them; None: at most 100")
    rerank_max_length: int | None = flag(None, "tokens a pair is truncated to; None: the model's own")
    top_k: int = flag(100, "documents ranked for each query")
    query: list[str] = flag([], "print the best documents for these texts instead of evaluating")
    # embeddings
    max_length: int | None = flag(None, "tokens a text is truncated to; None: the model's own")
    prompts: list[str] = flag([], "prefix of queries, then of documents (one value: of both); none: the model's own")
    truncate_dim: int | None = flag(None, "search with only this many leading dimensions, for Matryoshka models")
    micro_batch_tokens: int | None = flag(None, "tokens of a forward pass; None: 4,096 on a CPU, else 16,384")
    corpus_chunk_size: int = flag(4096, "documents per chunk, at most; a killed run re-encodes one per process")
    cache_dir: str = flag("~/.cache/evenstep/embeddings", "folder of the embedding caches, one for each model")
    cache_dtype: Literal["float32", "float16", "int8"] = flag("float16", "precision of stored vectors, and of search")
    cache_size_limit: float = flag(0, "GB per model's cache; beyond that the oldest vectors are removed; 0: no limit")
    cache_info: bool = flag(False, "list the models in --cache_dir, and exit")
    cache_clear: str | None = flag(None, "remove the cache of this model (name or fingerprint), and exit")
    # output
    metrics: list[str] = flag(["nDCG@10", "RR@10", "R@100", "AP"], "measures, by their names in ir_measures")
    judged: bool = flag(False, "also write judged.trec: scores of judged documents, for mine_negatives.py --judged")
    export_vectors: str | None = flag(None, "write the corpus vectors to this folder as Parquet shards instead")
    output_dir: str = flag("runs/eval", "folder for the results")


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
    check_flag_names(parser, argv)
    if argv and argv[0].endswith((".yaml", ".yml", ".json")):
        words = []
        with user_errors(f"{argv[0]}: not a file of flags"):
            for name, value in dict(yaml.safe_load(Path(argv[0]).read_text())).items():
                values = value if isinstance(value, list) else [value]
                words += [f"--{name}", *map(str, values)] if values not in ([], [None]) else []
        check_flag_names(parser, words)
        argv = words + argv[1:]
    with user_errors("flags"):
        (args,) = parser.parse_args_into_dataclasses(argv)
    check_credentials(parser, args)
    for name, value in asdict(args).items():
        low, relation = (1, "above 0") if name in ABOVE_ZERO.split() else (0, "0 or more")
        if isinstance(value, int | float) and not low <= value < math.inf:
            parser.error(f"--{name} {value}: must be finite, and {relation}")
    searching, exporting = bool(args.query), args.export_vectors is not None
    measures = {name.lower(): name for name in reversed(ir_measures.measures.registry)}  # nDCG, not NDCG
    for name in args.metrics:
        with user_errors(f"--metrics {name}"):
            kind, parameters = re.fullmatch(r"(\w*)(.*)", name).groups()
            if kind not in ir_measures.measures.registry:
                nearest = measures[get_close_matches(kind.lower(), measures, 1, cutoff=0)[0]]
                raise UserError(f"no such measure; the nearest is {nearest}{parameters}")
            measure = ir_measures.parse_measure(name)
            cutoff = int(measure.params.get("cutoff", 1))
            if cutoff < 1:  # crashes trec_eval
                raise UserError("the cutoff must be above 0")
            list(ir_measures.iter_calc([measure], {"query": {"a": 1}}, {"query": {"a": 1.0}}))  # is it computable?
        if cutoff > args.top_k and not (searching or exporting or (args.run and not args.model_name_or_path)):
            parser.error(f"--metrics {name}: deeper than --top_k {args.top_k}; raise --top_k")
    if sum(map(bool, (args.beir, args.corpus, args.pairs))) > 1:
        parser.error("--beir, --corpus, --pairs: give only one of them")
    if args.corpus and not (searching or exporting or (args.queries and args.qrels)):
        parser.error("--corpus: requires --queries and --qrels, or --query or --export_vectors")
    if (args.queries or args.qrels) and not args.corpus:
        parser.error("--queries, --qrels: require --corpus")
    if not (args.beir or args.corpus or args.pairs or args.cache_info or args.cache_clear):
        # Evaluate on the held-out functions only; search and export all of them.
        args.pairs = [f"{DEMO}/heldout/*.parquet"] + [f"{DEMO}/train/*.parquet"] * (searching or exporting)
        if not Path(DEMO).is_dir():
            parser.error(f"no --beir, --corpus or --pairs, and no demo corpus in {DEMO}: run python prepare_corpus.py")
    if len(args.columns) not in (0, 2) or 1 in (len(args.corpus_columns), len(args.query_columns)):
        parser.error("--columns takes two names; --corpus_columns and --query_columns take an id and text columns")
    if not args.model_name_or_path and not args.run:
        args.model_name_or_path = ["runs/bi_encoder/model"]
    if len(args.beir) > 1 and (args.run or searching or exporting):
        parser.error("--run, --query, --export_vectors: take one collection")
    if bool(args.run) + searching + exporting > 1:
        parser.error("--run, --query, --export_vectors: take one of them")
    if (searching or exporting) and (args.bm25 or args.judged or len(args.model_name_or_path) > 1):
        parser.error("--query, --export_vectors: take one --model_name_or_path, and neither --bm25 nor --judged")
    if (args.rerank_k or 0) > args.top_k and args.model_name_or_path:
        parser.error(f"--rerank_k {args.rerank_k}: more than --top_k {args.top_k}; raise --top_k, too")
    args.rerank_k = args.rerank_k or (100 if args.run else min(100, args.top_k))
    return args


# ---- file formats (same in train_bi_encoder.py)

FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json", ".ndjson": "json",
           ".csv": "csv", ".tsv": "csv", ".txt": "text"}  # fmt: skip
UNSUPPORTED = f"not one of {' '.join(FORMATS)}, with or without .gz or .zst; prepare_corpus.py converts .orc"

# ---- files (same in train_bi_encoder.py)


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


# ---- cells


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


# ---- collections

PAIR = ["query_id", "doc_id"]  # columns that identify a row of a ranking or of judgments


@dataclass
class Chunk:
    """Consecutive rows of a corpus, as they are encoded."""

    first: int  # row number of the first text, from 0
    ids: pa.Array  # (n,) large_string; None for queries and pairs
    texts: pa.Array  # (n,) large_string, prompt included; for a cross-encoder structs (query, document)
    hashes: np.ndarray  # (n,) V16, of the texts


def text_hashes(texts):
    """Return (n,) V16, the 128-bit BLAKE2b hashes of n texts, large_string."""
    texts = texts.cast(pa.large_binary()).to_numpy(zero_copy_only=False)  # of bytes
    return np.frombuffer(b"".join(hashlib.blake2b(text, digest_size=16).digest() for text in texts), "V16")


def even_size(size, rows, processes):
    """Return how many rows a chunk has, at most `size`: each process gets equally many chunks. For one process it is
    `size`, so that the chunks of a growing corpus stay as they are stored; for a stream (rows: None) as well."""
    if processes == 1 or not rows:
        return size
    rounds = math.ceil(rows / (processes * size))
    return math.ceil(rows / (processes * rounds))


class TextReader:
    """Read the ids and texts of sources in chunks, front to back."""

    def __init__(self, sources, columns, default, args):
        self.name, self.size, self.empty = sources[0], args.corpus_chunk_size, 0
        with user_errors(self.name):
            files = [file for source in sources for file in list_files(source)]
            available = next(open_files(files[:1]).iter(1)).column_names
            # A title is optional. --pairs gives columns by position, looked up below.
            columns = columns or [name for name in default if name in available or name != "title"]
            self.id_column, *self.text_columns = [dict(enumerate(available)).get(name, name) for name in columns]
            names = [name for name in dict.fromkeys([self.id_column, *self.text_columns]) if name != "#"]
            self.dataset = open_files(files, args.streaming).select_columns(names)
        self.rows = None if args.streaming else len(self.dataset)

    def chunks(self, prompt="", process=0, processes=1):
        """Yield every P-th Chunk, those of one process: the prompt, then the text columns joined by spaces."""
        self.empty = 0  # texts in this pass
        size = even_size(self.size, self.rows, processes)
        with user_errors(self.name):
            for number, table in islice(enumerate(self.dataset.iter(size)), process, None, processes):
                table.validate(full=True)  # a damaged Arrow file has offsets that lead anywhere
                first, columns = number * size, [as_texts(table[name], name) for name in self.text_columns]
                space, prefix, empty = (pa.scalar(text, pa.large_string()) for text in (" ", prompt, ""))
                texts = pc.binary_join_element_wise(*columns, space, null_handling="replace")  # null: an empty text
                texts = pc.utf8_trim_whitespace(texts)
                self.empty += pc.sum(pc.equal(texts, "")).as_py()
                texts = pc.binary_join_element_wise(prefix, texts, empty).combine_chunks()
                table = table.append_column("#", pa.array(range(first, first + len(table))))  # row numbers, as ids
                ids = as_texts(table[self.id_column], self.id_column, ids=True).combine_chunks()
                if (row := pc.index(pc.fill_null(ids, ""), "").as_py()) >= 0:
                    raise UserError(f"row {first + row}, counted from 0, has no id in column {self.id_column!r}")
                yield Chunk(first, ids, texts, text_hashes(texts))

    def frame(self):
        """Return a DataFrame (id, text) of all rows."""
        frames = [pd.DataFrame({"id": c.ids.to_numpy(False), "text": c.texts.to_numpy(False)}) for c in self.chunks()]
        return pd.concat(frames, ignore_index=True)


def read_trec(path, name):
    """Return a DataFrame (query_id, doc_id, score) of a TREC run (name "run") or TREC or BEIR judgments ("qrels")."""
    with user_errors(f"--{name} {path}"):
        with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
            separator = "\t" if "\t" in file.readline() else r"\s+"  # BEIR's ids may contain spaces
        options = {"header": None, "dtype": str, "quoting": csv.QUOTE_NONE, "keep_default_na": False}
        frame = pd.read_csv(path, sep=separator, encoding="utf-8-sig", **options)
        fields = {6: [0, 2, 4]} if name == "run" else {3: [0, 1, 2], 4: [0, 2, 3]}
        if frame.shape[1] not in fields:
            raise UserError(f"has {frame.shape[1]} fields per line, not {' or '.join(map(str, fields))}")
        frame = frame[fields[frame.shape[1]]].set_axis(["query_id", "doc_id", "score"], axis=1)
        bad = ~np.isfinite(scores := pd.to_numeric(frame["score"], errors="coerce"))
        bad[0] &= name == "run"  # BEIR's judgments have a header
        if bad.any():
            raise UserError(f"line {bad.idxmax() + 1} has no finite score: {' '.join(frame.loc[bad.idxmax()])}")
        return frame.assign(score=scores)[np.isfinite(scores)]


@dataclass
class Collection:
    name: str
    corpus: TextReader
    queries: dict  # {id: text}
    qrels: pd.DataFrame  # query_id, doc_id, relevance; empty in a search or an export
    warnings: list
    omit_same_id: bool = False  # leave the document with the query's own id out of its ranking

    def same_id(self, frame):
        """Return a mask of the rows of a ranking or of judgments that are left out by omit_same_id."""
        return self.omit_same_id & (frame["query_id"] == frame["doc_id"])


def beir_sources(name, split):
    """Return the sources of documents, queries and judgments of a folder or Hub id, in BEIR's or NanoBEIR's layout."""
    if os.path.exists(f"{name}/corpus.jsonl"):
        available = sorted(path.stem for path in Path(name, "qrels").glob("*.tsv"))
        if split not in available:
            raise UserError(f"--beir {name}: no judgments of --split {split}; available: {', '.join(available)}")
        return [f"{name}/corpus.jsonl"], [f"{name}/queries.jsonl"], f"{name}/qrels/{split}.tsv"
    with user_errors(f"--beir {name}"):
        check_exists(name)
        nano, sources = "qrels" in datasets.get_dataset_config_names(name), []
        qrels = (name, "qrels") if nano else (f"{name}-qrels", "")
        if os.path.isdir(name) and not os.path.isdir(qrels[0]):
            raise UserError(f"no corpus.jsonl, and no folder {qrels[0]}")
        for source, config in ((name, "corpus"), (name, "queries"), qrels):
            splits = list(datasets.load_dataset_builder(source, config or None).config.data_files)
            sources.append(f"{source}:{config}:{splits[0] if config else split}")  # configurations have one split
    return sources[:1], sources[1:2], sources[2]


def read_qrels(source):
    """Return a DataFrame (query_id, doc_id, relevance) of a file of judgments, or of a source in the Hub's layouts."""
    with user_errors(f"--qrels {source}"):
        file = source if os.path.exists(source) else list_files(source)[0]
        if FORMATS.get(file_suffix(file)) in ("parquet", "arrow", "json"):
            table = open_files([file], streaming=False)[:]
            frame = pd.DataFrame({new: as_texts(table[name], name, ids=True).to_numpy()
                                  for new, name in zip(PAIR, ("query-id", "corpus-id"))})  # fmt: skip
            frame["score"] = table["score"].to_numpy() if "score" in table.column_names else 1  # NanoBEIR has none
        else:  # read as text: ids may begin with zeros
            frame = read_trec(file, "qrels")
        if not (frame["score"] % 1 == 0).all():
            raise UserError("a grade is not a whole number")
    frame = frame.drop_duplicates(PAIR, keep="last").astype({"score": int})
    return frame.rename(columns={"score": "relevance"})


def open_collection(name, beir, args):
    """Return the Collection of one --beir value, or of --corpus or --pairs. For pairs, equal queries are merged, and
    every document equal to a query's answer is relevant to it."""
    sources = beir_sources(beir, args.split) if beir else (args.corpus or args.pairs, args.queries, args.qrels)
    first, second = args.columns or (0, 1)
    columns, default = (["#", second], ()) if args.pairs else (args.corpus_columns, ("_id", "title", "text"))
    corpus = TextReader(sources[0], columns, default, args)
    if args.query or args.export_vectors is not None:  # no judgments needed
        queries = {f"query {number}": text for number, text in enumerate(args.query, start=1)}
        return Collection(name, corpus, queries, pd.DataFrame(columns=[*PAIR, "relevance"]), [])
    if args.pairs:
        pairs = TextReader(args.pairs, ["#", first], (), args).frame().assign(answer=corpus.frame()["text"])
        whole = pairs[(pairs["text"] != "") & (pairs["answer"] != "")]
        numbers, queries = pd.factorize(whole["text"])
        qrels = whole[["answer"]].assign(query_id=numbers.astype(str), relevance=1).drop_duplicates()
        qrels = qrels.merge(pairs.rename(columns={"id": "doc_id"}), on="answer")[[*PAIR, "relevance"]]
        queries, omit_same_id = dict(zip(map(str, range(len(queries))), queries)), False
        counts = {"pairs lack a text; not used as queries": len(pairs) - len(whole)}
    else:
        qrels, reader = read_qrels(sources[2]), TextReader(sources[1], args.query_columns, ("_id", "text"), args)
        table = reader.frame()
        judged, again = table["id"].isin(qrels["query_id"]), table["id"].duplicated()
        queries = dict(table[judged & ~again].itertuples(index=False))
        missing = sorted(set(qrels["query_id"]) - queries.keys())
        qrels = qrels[qrels["query_id"].isin(queries)]
        # Row numbers are not shared ids: query 5 and document 5 may well be a question and its answer.
        omit_same_id = not args.keep_same_id and "#" not in (corpus.id_column, reader.id_column)
        counts = {"queries repeat an earlier id; left out": again.sum(),
                  "queries without judgments left out": (~judged).sum(), "queries are empty": reader.empty,
                  f"judged queries are unknown, such as {', '.join(missing[:3])}; left out": len(missing)}  # fmt: skip
    if not queries:
        raise UserError(f"{(sources[1] or sources[0])[0]}: has no judged query; check the ids or --columns")
    return Collection(name, corpus, queries, qrels, warnings_of(counts), omit_same_id)


def warnings_of(counts):
    """Return a warning for each nonzero count of {message: count}."""
    return [f"{count:,} {what}" for what, count in counts.items() if count]


# ---- the embedding cache


class NoPickleDisk(diskcache.Disk):
    """Refuse pickles, which could run code from a hostile folder (CVE-2025-69872), and files outside of the folder."""

    NAME = re.compile(r"[0-9a-f]{2}[/\\][0-9a-f]{2}[/\\][0-9a-f]{28}\.val")  # relative path of a value's file

    def get(self, key, raw):
        if not raw:
            raise UserError("a key is a pickle: remove the folder")
        return super().get(key, raw)

    def fetch(self, mode, filename, value, read):
        if mode == diskcache.core.MODE_PICKLE or (filename and not self.NAME.fullmatch(filename)):
            raise UserError("a value is a pickle or lies outside of the folder: remove this cache")
        return super().fetch(mode, filename, value, read)

    def remove(self, file_path):
        if self.NAME.fullmatch(file_path):
            super().remove(file_path)


class EmbeddingCache:
    """Store the vectors of one model on disk, by the hash of their text.

    Texts encoded together form a block, one value of diskcache: their hashes, vectors and a checksum. Its key is the
    hash of these hashes, so that an unchanged chunk takes one lookup. A table in the same database maps each text to
    its block and row; as values of diskcache, these entries would take five times as long to store."""

    def __init__(self, folder, model, dimensions, dtype, limit=0):
        self.folder, self.dimensions, self.dtype = Path(folder), dimensions, dtype
        self.limit = limit * 1e9  # bytes; 0: none
        self.removed = 0  # blocks, because of the limit
        self.row_bytes = dimensions + 4 if dtype == "int8" else dimensions * np.dtype(dtype).itemsize
        metadata = {"model": model, "dtype": dtype, "dimensions": dimensions, "bytes": self.row_bytes + 16}
        # Processes that start together set up the database in turns: on network disks, SQLite's own locks may fail.
        with self.errors(), FileLock(self.folder / "open.lock"):
            self.cache = diskcache.Cache(
                str(self.folder),
                disk=NoPickleDisk,
                disk_min_file_size=0,  # store every block as a file
                eviction_policy="none",  # diskcache would count the texts of removed blocks forever; see evict()
                sqlite_mmap_size=0,  # a memory-mapped index would count as memory and grow with the corpus
                sqlite_cache_size=2**11,  # pages, 8 MB
            )
            self.cache._sql_retry("CREATE TABLE IF NOT EXISTS texts (hash BLOB PRIMARY KEY, block, row) WITHOUT ROWID")
            (self.folder / "model.json").write_text(json.dumps(metadata))  # for --cache_info

    def errors(self):
        return user_errors(f"--cache_dir {self.folder} (free disk space, or remove the folder if it is damaged)")

    def pack(self, vectors):
        """Return (n, D) float32 vectors in stored form, (n, bytes) uint8 rows."""
        if self.dtype == "int8":  # each vector scaled to its largest component
            scale = np.maximum(np.abs(vectors).max(1, keepdims=True), 1e-30).astype(np.float32) / 127
            return np.hstack([scale.view(np.uint8), np.round(vectors / scale).astype(np.int8).view(np.uint8)])
        with np.errstate(over="ignore"):
            stored = vectors.astype(self.dtype)
        if not np.isfinite(stored).all():
            raise UserError(f"--cache_dtype {self.dtype}: cannot hold an embedding of this model; use float32")
        return stored.view(np.uint8).reshape(len(vectors), -1)

    def unpack(self, rows):
        """Return the (n, D) vectors of (n, bytes) uint8 rows: float32 for int8, else in the stored dtype."""
        if self.dtype == "int8":
            return np.ascontiguousarray(rows[:, :4]).view(np.float32) * rows[:, 4:].view(np.int8)
        return np.ascontiguousarray(rows).view(self.dtype)

    def read_block(self, block):
        """Return ((n,) hashes, (n, bytes) rows) of a block, or None if it is missing or damaged."""
        file = self.cache.get(b"block" + block, read=True)
        if file is None:
            return None
        value = np.zeros(0, np.uint8)
        with file, suppress(ValueError):  # an empty file cannot be mapped
            value = np.memmap(file, mode="c").view(np.ndarray)  # saves a copy, compared with reading it
        n, rest = divmod(len(value) - 8, 16 + self.row_bytes)
        if rest or n < 0 or xxhash.xxh3_64_digest(value[:-8]) != value[-8:].tobytes():
            tqdm.write(f"{self.folder}: a damaged block; its vectors are computed again", file=sys.stderr)
            self.cache.delete(b"block" + block)
            return None
        return value[: 16 * n].view("V16"), value[16 * n : -8].reshape(n, -1)

    def lookup(self, hashes):
        """Return ((n, bytes) uint8 rows, (n,) bool found) of the texts with these (n,) hashes."""
        with self.errors():
            whole = self.read_block(block_of(hashes))
            if whole and whole[0].tobytes() == hashes.tobytes():
                return whole[1], np.ones(len(hashes), bool)
            rows, found = np.zeros((len(hashes), self.row_bytes), np.uint8), np.zeros(len(hashes), bool)
            keys, entries = hashes.tolist(), []  # keys: bytes
            for first in range(0, len(keys), 10_000):
                part = keys[first : first + 10_000]
                entries += self.cache._sql(f"SELECT * FROM texts WHERE hash IN ({','.join('?' * len(part))})", part)
            entries = pd.DataFrame(entries, columns=["hash", "block", "row"])
            entries = pd.DataFrame({"hash": keys, "index": range(len(keys))}).merge(entries, on="hash")
            for block, part in entries.groupby("block", sort=False):
                if content := self.read_block(block):
                    index, row = part["index"].to_numpy(), part["row"].to_numpy(int).clip(0, len(content[0]) - 1)
                    same = content[0][row] == hashes[index]  # False if an entry is damaged
                    rows[index[same]], found[index[same]] = content[1][row[same]], True
            return rows, found

    def store(self, hashes, rows):
        """Store the (n, bytes) rows of n texts atomically: if the process is killed, all or none."""
        block, value = block_of(hashes), hashes.tobytes() + rows.tobytes()
        with self.errors(), self.cache.transact(retry=True):
            file = io.BytesIO(value + xxhash.xxh3_64_digest(value))  # diskcache writes bytes line by line
            self.cache.set(b"block" + block, file, read=True)
            entries = sorted(zip(hashes.tolist(), repeat(block), range(len(hashes))))  # neighbours share pages
            self.cache._con.executemany("INSERT OR REPLACE INTO texts VALUES (?, ?, ?)", entries)
            while self.limit and self.volume() > self.limit and len(self.cache) > 1:
                self.evict()

    def volume(self):
        """Return the bytes of the blocks and of the database, without its free pages."""
        ((free,),) = self.cache._sql("PRAGMA freelist_count")
        return self.cache.volume() - free * self.cache._page_size

    def evict(self):
        """Remove the oldest blocks down to 0.9 of the limit, and the entries and files that belong to no block, those
        of killed processes included. In a transaction: no other process is about to add a block to its file."""
        sql = self.cache._sql
        excess = 1 - 0.9 * self.limit / self.volume()
        oldest = math.ceil(excess * (len(self.cache) - 1))  # entries shrink in proportion
        sql("DELETE FROM Cache WHERE rowid IN (SELECT rowid FROM Cache ORDER BY rowid LIMIT ?)", (oldest,))
        sql("DELETE FROM texts WHERE block NOT IN (SELECT substr(key, 6) FROM Cache)")  # a key: b"block", then the id
        kept = {file for (file,) in sql("SELECT filename FROM Cache")}
        for path in self.folder.glob("??/??/*.val"):
            if (file := str(path.relative_to(self.folder))) not in kept:
                self.cache.disk.remove(file)
        self.removed += oldest


def block_of(hashes):
    """Return the 16-byte id of the block of texts with these (n,) hashes."""
    return hashlib.blake2b(hashes.tobytes(), digest_size=16).digest()


def manage_cache(args):
    """List the caches of --cache_dir, or remove those of --cache_clear."""
    print(f"{'fingerprint':13} {'dtype':8} {'dims':>5} {'vectors':>12} {'MB':>10}  model ({args.cache_dir})")
    name, cleared = args.cache_clear, 0
    for note in sorted(Path(args.cache_dir).expanduser().glob("*/model.json")):
        metadata = {"model": "(damaged)", "dtype": "?", "dimensions": 0, "bytes": 1e30}
        with suppress(ValueError, TypeError):
            metadata |= json.loads(note.read_text())
        sizes = {path: path.stat().st_size for path in note.parent.rglob("*") if path.is_file()}
        vectors = sum(int(size // metadata["bytes"]) for path, size in sizes.items() if path.suffix == ".val")
        if not name or name == metadata["model"] or (len(name) > 5 and note.parent.name.startswith(name)):
            print(f"{note.parent.name[:12]:13} {metadata['dtype']:8} {metadata['dimensions']:5} {vectors:12,} "
                  f"{sum(sizes.values()) / 1e6:10,.1f}  {metadata['model']}" + " (removed)" * bool(name))  # fmt: skip
            if name:
                with user_errors(f"--cache_clear {name}"):
                    shutil.rmtree(note.parent)
                cleared += 1
    if name and not cleared:
        raise UserError(f"--cache_clear {name}: no such model in {args.cache_dir}; see --cache_info")


# ---- micro-batches (same in train_bi_encoder.py)


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


# ---- padding


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


# ---- texts


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


# ---- embeddings


def encode(model, features, accelerator):
    """Return (n, D) float embeddings of one micro-batch."""
    features = transformers.BatchEncoding(features).to(accelerator.device, non_blocking=True).data
    with accelerator.autocast():  # gives flash attention its dtype; prepare() does not wrap FSDP2's forward
        return model(features)["sentence_embedding"].float()


# ---- scores


def score(model, features, accelerator):
    """Return (n, 1) float logits of one micro-batch."""
    features = transformers.BatchEncoding(features).to(accelerator.device, non_blocking=True).data
    with accelerator.autocast():  # gives flash attention its dtype; prepare() does not wrap FSDP2's forward
        return model(features)["scores"].float()


# ---- models


def load_bi_encoder(path, args):
    """Return (SentenceTransformer on the CPU, dimensions to search with, prompts of queries and of documents)."""
    with user_errors(f"--model_name_or_path {path}"):
        if os.path.isdir(f"{path}/model"):
            raise UserError(f"is the output of a training run; its model is {path}/model")
        options = {"use_safetensors": True}  # never a pickle
        check_exists(path)
        model = SentenceTransformer(path, device="cpu", model_kwargs=options, trust_remote_code=False)
        if "SequenceClassification" in str(getattr(model.config, "architectures", None)):
            raise UserError("is a cross-encoder: use --cross_encoder")
        if model.similarity_fn_name not in ("cosine", "dot"):
            raise UserError(f"similarity {model.similarity_fn_name} is not supported, only cosine and dot")
        if not isinstance(model.tokenizer, Tokenizer):
            set_max_length(model, args.max_length, "max_length")
        elif args.max_length:  # a static embedding model
            model.tokenizer.enable_truncation(args.max_length)
        dims, model.truncate_dim = args.truncate_dim or model.truncate_dim, None  # the cache stores full vectors
        if (dims or 0) > model.get_embedding_dimension():
            raise UserError(f"--truncate_dim {dims}: the model has {model.get_embedding_dimension()} dimensions")
        sides = ("query",), ("document", "passage", "corpus")
        own = [next((model.prompts[name] for name in names if model.prompts.get(name)), "") for names in sides]
        prompts = [args.prompts[0], args.prompts[-1]] if args.prompts else own
        if any(prompts) and any(isinstance(module, Pooling) and not module.include_prompt for module in model):
            raise UserError("excludes prompts from pooling, which is not supported: pass --prompts ''")
    own_memory(model)
    return model.eval(), dims, prompts


def load_cross_encoder(path, args):
    """Return a CrossEncoder on the CPU; it must have one label, one module and no default prompt."""
    with user_errors(f"--cross_encoder {path}"):
        check_exists(path)
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        if "SequenceClassification" not in str(config.architectures):
            raise UserError("not a cross-encoder: train_cross_encoder.py trains one")
        options = {"use_safetensors": True}  # never a pickle
        model = CrossEncoder(path, device="cpu", model_kwargs=options, trust_remote_code=False)
        if (found := (len(model), model.num_labels, model.default_prompt_name)) != (1, 1, None):
            raise UserError("{} modules, {} labels and default prompt {}, not 1, 1 and None".format(*found))
        set_max_length(model, args.rerank_max_length, "rerank_max_length")
    own_memory(model)
    return model.eval()


def own_memory(model):
    """Copy all parameters and buffers. Loaded ones are views of a mapped file, at addresses that depend on its header;
    kernels choose their order of summation by alignment, so the last bits would depend on the file."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def set_max_length(model, length, name):
    """Truncate texts to `length` tokens or the model's limit; in pairs the longer text first, as CrossEncoder does."""
    limit = getattr(model.config, "max_position_embeddings", None) or math.inf
    model.max_seq_length = length or model.max_seq_length
    if model.max_seq_length > limit:
        raise UserError(f"--{name} {model.max_seq_length}: the model has positions for {limit} tokens")
    model.tokenizer.backend_tokenizer.no_padding()  # here, not at each call: two threads use the tokenizer
    model.tokenizer.backend_tokenizer.enable_truncation(model.max_seq_length)


# same in train_bi_encoder.py
def check_attention(model, accelerator):
    """Raise UserError for flash attention in a run that computes in float32."""
    kernels = str(getattr(model.config, "_attn_implementation", None))
    if "flash" in kernels and accelerator.mixed_precision == "no":
        raise UserError(f"{kernels} requires half precision: accelerate launch --mixed_precision bf16")


def model_fingerprint(model, precision, dtype):
    """Return a hash of what determines the vector of a text: weights, tokenizer, modules, length, precision, dtype."""
    config = model.config.to_dict() if model.config else {}
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    tokenizer = model.tokenizer if isinstance(model.tokenizer, Tokenizer) else model.tokenizer.backend_tokenizer
    modules = [(type(module).__name__, module.get_config_dict()) for module in model]
    similarity = getattr(model, "similarity_fn_name", None)  # a cross-encoder has none
    parts = ["second edition", modules, config, tokenizer.to_str(), model.max_seq_length, precision, dtype, similarity]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


class CachedEncoder:
    """Encode texts with a bi-encoder, each once: vectors are read from the cache, or computed and stored. Processes
    have different chunks; a text that two of them reach at the same time is encoded by both."""

    unit, verb = "texts", "encoded"

    def __init__(self, path, args, accelerator):
        self.path, self.accelerator, self.meter, self.bar = path, accelerator, Counter(), tqdm(disable=True)
        self.process, self.processes = accelerator.process_index, accelerator.num_processes
        with self.clock("load"):
            *shape, length = self.load(args)  # dimensions and dtype of the cached vectors, --max_length
            check_attention(self.model, accelerator)
            self.fingerprint = model_fingerprint(self.model, accelerator.mixed_precision, shape[1])
            self.model.to(accelerator.device)
        length = length or self.model.max_seq_length or math.inf
        self.max_length = None if length == math.inf else length  # tokens; None: not truncated
        self.longest = 6 * length  # characters: `length` tokens, or nearly
        default = 4096 if accelerator.device.type == "cpu" else 16_384
        default = 2**20 if isinstance(self.model.tokenizer, Tokenizer) else default
        self.max_tokens = args.micro_batch_tokens or default
        folder = Path(args.cache_dir).expanduser() / self.fingerprint
        self.cache = EmbeddingCache(folder, path, *shape, args.cache_size_limit)

    def load(self, args):
        self.model, self.dims, self.prompts = load_bi_encoder(self.path, args)
        return self.model.get_embedding_dimension(), args.cache_dtype, args.max_length

    @contextmanager
    def clock(self, stage):
        """Add the seconds that the block takes to those of a stage."""
        started = time.perf_counter()
        yield
        self.meter[f"{stage} seconds"] += time.perf_counter() - started

    def read(self, corpus):
        """Yield this process' Chunks of a corpus, read in the background."""
        chunks = prefetch(corpus.chunks(self.prompts[1], self.process, self.processes))
        while True:
            with self.clock("read"):
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk

    def open_bar(self, name, rows):
        """Show a progress bar on the main process; in a log, print a line every ten seconds."""
        options = {} if sys.stderr.isatty() else {"mininterval": 10, "ncols": 80}
        rows = rows and math.ceil(rows / self.processes)  # None: a stream
        self.bar = Bar(total=rows, unit=f" {self.unit}", desc=name, delay=1, **options,
                       disable=not self.accelerator.is_main_process)  # fmt: skip

    def micro_batches(self, texts):
        return make_micro_batches(texts.to_pylist(), self.model, self.max_tokens, self.accelerator.device)

    def forward(self, features):
        return encode(self.model, features, self.accelerator)

    def __call__(self, chunk):
        """Return the (n, D) vectors of a chunk as cached: in --cache_dtype, or float32 for int8."""
        with self.clock("lookup"):
            rows, found = self.cache.lookup(chunk.hashes)
        new = np.flatnonzero(~found)
        codes, digests = pd.factorize(chunk.hashes[new].astype(object))
        self.meter.update(total=len(found), new=len(digests))
        self.bar.update(len(found) - len(new))
        if len(new):
            texts = chunk.texts.take(new[np.unique(codes, return_index=True)[1]])  # distinct texts, in order
            with self.clock(self.verb.removesuffix("d")):
                vectors = self.compute(texts)
            with self.clock("store"):
                packed = self.cache.pack(vectors)[codes]
                self.cache.store(chunk.hashes[new], packed)
            rows[new] = packed
        return torch.from_numpy(self.cache.unpack(rows))

    @torch.inference_mode()
    def compute(self, texts):
        """Return (n, D) float32 vectors of texts, tokenized in the background by groups of similar length."""
        columns = texts.flatten() if pa.types.is_struct(texts.type) else [texts]  # of pairs, or texts
        sizes = np.minimum(sum(pc.utf8_length(column).to_numpy() for column in columns), self.longest) + 1
        order = np.argsort(-sizes, kind="stable")
        ends = np.flatnonzero(np.diff(np.cumsum(sizes[order]) // (16 * self.max_tokens)))  # a group: 4 micro-batches
        groups, outputs, indices = np.split(order, ends + 1), [], []
        ready = (self.micro_batches(texts.take(group)) for group in groups)
        for (micro_batches, tokens, padded), group in zip(prefetch(ready), groups):
            for features, cut in micro_batches:
                outputs.append(self.forward(features))
                indices.append(group[cut])
            self.meter.update(tokens=tokens, padded=padded)
            self.bar.update(len(group))
        vectors = np.empty((len(texts), self.cache.dimensions), np.float32)
        vectors[np.concatenate(indices)] = torch.cat(outputs).cpu().numpy()
        if len(bad := np.flatnonzero(~np.isfinite(vectors).all(1))):
            raise UserError(f"{self.path}: output for {str(texts[bad[0]])[:60]!r} is not finite; check the weights")
        return vectors

    def for_search(self, vectors):
        """Return (n, D) float32 vectors whose dot product is the similarity."""
        vectors = vectors.to(self.accelerator.device).float()[:, : self.dims]
        return F.normalize(vectors, dim=1) if self.model.similarity_fn_name == "cosine" else vectors

    def encode_queries(self, texts, size):
        """Return (Q, D) vectors of all queries for the search, on every process."""
        texts = pa.array([self.prompts[0] + text for text in texts], pa.large_string())
        queries = torch.zeros(len(texts), self.cache.dimensions, device=self.accelerator.device)
        size = even_size(size, len(texts), self.processes)
        for first in range(self.process * size, len(texts), self.processes * size):
            part = texts.slice(first, size)
            queries[first : first + size] = self(Chunk(first, None, part, text_hashes(part))).to(queries)
        return self.for_search(self.accelerator.reduce(queries))

    def metadata(self):
        """Return the work since the last call, of all processes, for metrics.json; every process must call it."""
        self.bar.close()
        meter = sum(gather_object([self.meter]), Counter())
        self.meter = Counter()
        seconds = {name.removesuffix(" seconds"): value for name, value in meter.items() if name.endswith(" seconds")}
        total, new, padded = meter["total"], meter["new"], meter["padded"]
        return {
            "fingerprint": self.fingerprint,
            "max_length": self.max_length,
            self.unit: {"total": total, self.verb: new, "cached": total - new},
            "padding_fraction": 1 - meter["tokens"] / padded if padded else 0.0,
            "seconds": {name: round(value / self.processes, 4) for name, value in seconds.items()},
        }


class CachedScorer(CachedEncoder):
    """Score (query, document) pairs with a cross-encoder, as vectors of one dimension. Scores are logits: in float32
    a sigmoid would make the highest ones equal."""

    unit, verb = "pairs", "scored"

    def load(self, args):
        self.model = load_cross_encoder(self.path, args)
        return 1, "float32", args.rerank_max_length

    def micro_batches(self, pairs):
        pairs = list(zip(*(part.to_pylist() for part in pairs.flatten())))
        encodings = self.model.tokenizer.backend_tokenizer.encode_batch_fast(pairs)
        return pad_micro_batches(encodings, self.model, self.max_tokens, self.accelerator.device)

    def forward(self, features):
        return score(self.model, features, self.accelerator)


class Bar(tqdm):
    """tqdm that prints lines into a log instead of overwriting one."""

    @staticmethod
    def status_printer(file):
        return tqdm.status_printer(file) if file.isatty() else lambda line: print(line.strip(), file=file, flush=True)


# ---- search

MAX_SCORES = 2**24  # scores in a tile: 64 MB of float32


class TopK:
    """Keep the K best documents of each query; equal scores rank in the order of the corpus."""

    def __init__(self, queries, k):
        self.queries = queries  # (Q, D) float32
        self.scores = torch.full((len(queries), k), -torch.inf, device=queries.device)  # (Q, K), descending
        self.rows = torch.full((len(queries), k), -1, device=queries.device)  # (Q, K) int64, -1: none yet

    def add(self, documents, first):
        """Score (n, D) documents, corpus rows `first` and following; calls must be in corpus order."""
        # The last columns of a product are summed in another order: pad, so that equal documents score equally.
        padded = F.pad(documents, (0, 0, 0, -len(documents) % 64))
        tile = max(1, MAX_SCORES // len(documents))
        for begin in range(0, len(self.queries), tile):
            best, rows = self.scores[begin : begin + tile], self.rows[begin : begin + tile]  # (q, K)
            scores = (self.queries[begin : begin + tile] @ padded.T)[:, : len(documents)]  # (q, n)
            # Few documents exceed a query's K-th best; only they are sorted. An equal one ranks below, being later.
            passed, k = scores > best[:, -1:], best.shape[1]
            if len(documents) > k and passed.sum(1).max() > 2 * k:  # the first chunks
                passed &= scores >= scores.topk(k).values[:, -1:]  # and ties with the K-th
            query, document = torch.nonzero(passed, as_tuple=True)
            if len(query):
                counts = torch.bincount(query, minlength=len(best))
                slot = torch.arange(len(query), device=query.device) - (counts.cumsum(0) - counts)[query]
                more = best.new_full((len(best), int(counts.max())), -torch.inf)  # (q, m)
                from_rows = rows.new_full(more.shape, -1)
                more[query, slot], from_rows[query, slot] = scores[query, document], document + first
                self.keep(begin, torch.cat([best, more], 1), torch.cat([rows, from_rows], 1))

    def merge(self, accelerator):
        """Merge the K best of all processes, which have scored different documents, on every process."""
        shape = (accelerator.num_processes, *self.rows.shape)
        scores, rows = (accelerator.gather(t).view(shape).transpose(0, 1).flatten(1) for t in (self.scores, self.rows))
        order = rows.argsort(1)  # corpus order; the stable sort in keep() preserves it in ties
        self.keep(0, scores.gather(1, order), rows.gather(1, order))

    def keep(self, begin, scores, rows):
        """Keep the K best of the (q, m) scores of q queries from `begin` on; rows: (q, m) int64."""
        order = scores.argsort(dim=1, descending=True, stable=True)[:, : self.scores.shape[1]]
        self.scores[begin : begin + len(scores)] = scores.gather(1, order)
        self.rows[begin : begin + len(scores)] = rows.gather(1, order)


@dataclass
class Run:
    """The ranked documents of each query, by a model or from a file."""

    name: str
    ranking: pd.DataFrame  # query_id, doc_id, score; per query, best first
    metadata: dict  # its entry in metrics.json
    judged: pd.DataFrame | None = None  # the same for all judged documents (--judged)
    texts: dict = field(default_factory=dict)  # {document id: text}, in a search


def make_run(name, ranking, collection, metadata, counts, depth=None, judged=None, texts=()):
    """Return the Run of a ranking, cut at `depth`, without duplicates and (omit_same_id) documents that share the
    query's id. counts: {message: count}, the warnings."""
    own = ranking[collection.same_id(ranking)]
    relevant = own.merge(collection.qrels, on=PAIR)["relevance"].gt(0).sum() if len(own) else 0
    counts |= {"queries share their id with a document, which is left out; --keep_same_id keeps it": len(own),
               "of these are judged relevant: if ids coincide by chance, set --keep_same_id": relevant}  # fmt: skip
    metadata |= {"same_id_left_out": len(own), "warnings": warnings_of(counts)}
    ranking = ranking.drop(own.index).drop_duplicates(PAIR).groupby("query_id", sort=False)
    return Run(name, ranking.head(depth or 2**31), metadata, judged, dict(texts))


def read_run(path, name, collection):
    """Return the Run of a file, sorted by score; ties by document id, descending, as in trec_eval."""
    ranking, queries = read_trec(path, "run").sort_values(["score", "doc_id"], ascending=False), collection.queries
    known = ranking["query_id"].isin(queries)
    if not known.any():
        example = f"{next(iter(queries))!r}; its first is {ranking['query_id'].iloc[0]!r}"
        raise UserError(f"--run {path}: contains none of the judged queries, such as {example}")
    counts = {f"queries of {path} are not judged, or unknown; left out": ranking.loc[~known, "query_id"].nunique(),
              f"judged queries are not in {path}; they count as 0": len(queries.keys() - set(ranking["query_id"])),
              f"lines of {path} repeat a document; its best score counts": ranking.duplicated(PAIR).sum()}  # fmt: skip
    return make_run(name, ranking[known], collection, {"seconds": {}}, counts)


def retrieve(encoder, name, collection, args, accelerator):
    """Return the Run of a bi-encoder over a collection, the same on every process (the reranker requires that)."""
    ids, corpus = np.array(list(collection.queries), object), collection.corpus
    queries = encoder.encode_queries(list(collection.queries.values()), args.corpus_chunk_size)  # (Q, D)
    depth = args.top_k + collection.omit_same_id
    top = TopK(queries, min(depth, corpus.rows or depth))
    judged = collection.qrels[~collection.same_id(collection.qrels)]
    judged = judged.assign(query=pd.Index(ids).get_indexer(judged["query_id"]))
    judged_ids = pa.array(judged["doc_id"].unique(), pa.large_string())
    # {row: (id, text)} of the best documents so far; scores of the judged ones
    kept, scores = {}, [judged[:0][PAIR].assign(score=0.0)]

    # The chunks of this process
    encoder.open_bar(f"{name} {collection.name}", corpus.rows)
    for chunk in encoder.read(corpus):
        vectors = encoder(chunk)
        with encoder.clock("search"):
            vectors = encoder.for_search(vectors)
            top.add(vectors, chunk.first)
            rows = top.rows[top.rows >= chunk.first].unique().cpu().numpy() - chunk.first
            texts = chunk.texts.take(rows).to_pylist() if args.query else [""] * len(rows)
            kept.update(zip((rows + chunk.first).tolist(), zip(chunk.ids.take(rows).to_pylist(), texts)))
            if len(kept) > 4 * top.rows.numel():  # most are no longer among the best
                kept = {row: kept[row] for row in top.rows.unique().tolist() if row >= 0}
            rows = np.flatnonzero(pc.is_in(chunk.ids, judged_ids).to_numpy(False))
            found = pd.DataFrame({"doc_id": chunk.ids.take(rows).to_numpy(False), "row": rows}).merge(judged)
            if len(found):
                numbers = torch.tensor(found[["query", "row"]].values.T.tolist(), device=vectors.device)
                products = queries[numbers[0]] * vectors[numbers[1]]  # (pairs, D)
                scores.append(found[PAIR].assign(score=products.sum(1).tolist()))

    # Merge the results of all processes; replace rows by ids
    with encoder.clock("search"):
        top.merge(accelerator)
    metadata, parts = encoder.metadata(), gather_object([(kept, scores, corpus.empty)])
    kept, scores = dict(chain(*(part[0].items() for part in parts))), list(chain(*(part[1] for part in parts)))
    if not kept:
        raise UserError(f"{corpus.name}: contains no document")
    ranking = pd.DataFrame({"query_id": ids.repeat(top.rows.shape[1]), "row": top.rows.flatten().tolist(),
                            "score": top.scores.flatten().tolist()})  # fmt: skip
    ranking = ranking[ranking["row"] >= 0]
    ranking["doc_id"] = [kept[row][0] for row in ranking.pop("row")]
    scores = pd.concat(scores)
    repeated = pd.concat([frame.loc[frame.duplicated(PAIR), "doc_id"] for frame in (ranking, scores)]).nunique()
    missing = len(judged_ids) - scores["doc_id"].nunique()
    counts = {"ids belong to several documents; each counts once, with its best score": repeated,
              "judged documents are not in the corpus; they count as not found": missing,
              "documents are empty; encoded as the empty string": sum(part[2] for part in parts),
              "of the oldest blocks were removed, to keep --cache_size_limit": encoder.cache.removed}  # fmt: skip
    scores = scores.sort_values("score", ascending=False, kind="stable").drop_duplicates(PAIR)
    texts = {name: text[len(encoder.prompts[1]) :] for name, text in kept.values()} if args.query else {}
    return make_run(name, ranking, collection, metadata, counts, args.top_k, scores if args.judged else None, texts)


def rerank(run, scorer, collection, args, accelerator):
    """Return the Run with the first --rerank_k documents of each query sorted by a cross-encoder's scores.
    The other documents rank below them in their former order, so that deeper measures lose nothing."""
    first = run.ranking.groupby("query_id").head(args.rerank_k)
    judged = collection.qrels[~collection.same_id(collection.qrels)] if args.judged else run.ranking[:0]
    requested = pd.concat([first, judged])[PAIR].drop_duplicates()
    scorer.open_bar(f"{run.name} {scorer.path}", len(requested))
    candidates, scores = candidate_pairs(requested, collection, accelerator), []
    while part := list(islice(candidates, args.corpus_chunk_size)):
        queries, documents, texts = zip(*part)
        texts = [pa.array(column, pa.large_string()) for column in ([collection.queries[q] for q in queries], texts)]
        hashes = text_hashes(pc.binary_join_element_wise(*texts, pa.scalar("\0", pa.large_string())))
        chunk = Chunk(0, None, pa.StructArray.from_arrays(texts, ["query", "document"]), hashes)
        scores += zip(queries, documents, scorer(chunk)[:, 0].tolist())
    metadata = scorer.metadata()
    scores = pd.DataFrame(chain(*gather_object([scores])), columns=[*PAIR, "score"])
    scores = scores.sort_values("score", ascending=False, kind="stable").drop_duplicates(PAIR)  # an id may occur twice
    ranking = run.ranking[PAIR].merge(first[PAIR].merge(scores), "left")  # NaN: not reranked, or not in the corpus
    ranking = ranking.sort_values("score", ascending=False, kind="stable")
    behind, lowest = ranking["score"].isna(), ranking.groupby("query_id")["score"].transform("min").fillna(0)
    ranking["score"] = ranking["score"].fillna(lowest - behind.groupby(ranking["query_id"]).cumsum())
    missing = {"documents to rerank are not in the corpus; they rank last": len(requested) - len(scores)}
    metadata |= {"same_id_left_out": run.metadata["same_id_left_out"], "warnings": warnings_of(missing)}
    judged = scores.merge(judged[PAIR]) if args.judged else None
    return Run(f"{run.name}+{short_names([scorer.path])[0]}", ranking, metadata, judged, run.texts)


def candidate_pairs(requested, collection, accelerator):
    """Yield (query id, document id, text) of the requested pairs whose document is in this process' chunks."""
    queries = requested.groupby("doc_id")["query_id"].agg(list)
    ids = pa.array(queries.index, pa.large_string())
    for chunk in collection.corpus.chunks("", accelerator.process_index, accelerator.num_processes):
        found = pc.is_in(chunk.ids, ids)
        for name, text in zip(chunk.ids.filter(found).to_pylist(), chunk.texts.filter(found).to_pylist()):
            yield from ((query, name, text) for query in queries[name])


def bm25_run(collection, args):
    """Return the Run of BM25 (Robertson and Zaragoza 2009; bm25s' default, Lucene's variant), its corpus in memory."""
    started = time.perf_counter()
    with user_errors("--bm25 requires the package bm25s, and words in the corpus"):
        import bm25s  # optional

        ids, corpus = collection.corpus.frame().to_numpy().T
        texts = corpus.tolist(), list(collection.queries.values())
        words = [bm25s.tokenize(part, stopwords="en", return_ids=False, show_progress=False) for part in texts]
        index = bm25s.BM25()
        index.index(words[0], show_progress=False)
        depth = min(args.top_k + collection.omit_same_id, len(ids))
        rows, scores = index.retrieve(words[1], k=depth, show_progress=False)  # (Q, depth) each
    ranking = pd.DataFrame({"query_id": np.repeat(list(collection.queries), depth), "doc_id": ids[rows.ravel()],
                            "score": scores.ravel()})  # fmt: skip
    metadata = {"seconds": {"search": round(time.perf_counter() - started, 4)}}
    return make_run("BM25", ranking[ranking["score"] > 0], collection, metadata, {}, args.top_k)


# ---- vectors for other programs


def export_vectors(encoder, collection, args, accelerator):
    """Write a Parquet shard of (_id, vector) for each chunk, and at the end _vectors.json, which describes them. The
    underscore hides it from readers of Parquet folders. A killed export starts again, with cached vectors."""
    folder, corpus, similarity = Path(args.export_vectors), collection.corpus, encoder.model.similarity_fn_name
    metadata = {"model": encoder.path, "fingerprint": encoder.fingerprint, "query_prompt": encoder.prompts[0],
                "document_prompt": encoder.prompts[1], "max_length": encoder.max_length,
                "dimensions": encoder.dims or encoder.cache.dimensions, "dtype": "float32", "similarity": similarity,
                "normalized": similarity == "cosine", "corpus": args.corpus or args.pairs or args.beir,
                "columns": [corpus.id_column, *corpus.text_columns]}  # fmt: skip
    with user_errors(f"--export_vectors {folder}: not written, choose an empty folder"):
        folder.mkdir(parents=True, exist_ok=True)
        paths = sorted(folder.iterdir()) if accelerator.is_main_process else []
        for path in paths:  # all, before the first is removed
            if not re.fullmatch(r"vectors-\d{12}\.parquet(\.part)?|_vectors\.json", path.name):
                raise UserError(f"{path.name} does not belong to an export")
        for path in paths:
            before = json.loads(path.read_text()) if path.suffix == ".json" else metadata
            if other := [name for name in metadata if before.get(name) != metadata[name]]:
                raise UserError(f"it contains an export of another {', another '.join(other)}")
            path.unlink()
        accelerator.wait_for_everyone()
        encoder.open_bar(encoder.path, corpus.rows)
        for chunk in encoder.read(corpus):
            vectors = encoder.for_search(encoder(chunk)).cpu().numpy()
            columns = {"_id": chunk.ids.cast(pa.string())}
            columns["vector"] = pa.FixedSizeListArray.from_arrays(vectors.reshape(-1), vectors.shape[1])
            shard = folder / f"vectors-{chunk.first:012}.parquet"
            options = {"compression": "none", "use_dictionary": False, "write_statistics": False}  # incompressible
            pq.write_table(pa.table(columns), f"{shard}.part", **options)
            os.rename(f"{shard}.part", shard)
        texts = encoder.metadata()["texts"]
        if accelerator.is_main_process:
            metadata |= {"rows": texts["total"], "command": shlex.join(sys.argv)}
            (folder / "_vectors.json").write_text(json.dumps(metadata, indent=1))
            print(f"{texts['encoded']:,} of {texts['total']:,} texts encoded; their vectors are in {folder}")


# ---- measures


def compute_metrics(ranking, collection, measures):
    """Return a DataFrame of the measures, a row for each query, by ir_measures. As in trec_eval, a document without
    judgment is not relevant, and equal scores rank by document id, descending."""
    # Some providers of ir_measures break ties unlike trec_eval: replace scores by ranks, which have no ties.
    ranking = ranking.sort_values(["score", "doc_id"], ascending=False)
    ranking["score"] = -ranking.groupby("query_id").cumcount().astype(float)
    parsed = {name: ir_measures.parse_measure(name) for name in measures}  # two names may mean one measure
    found = ir_measures.iter_calc(list(dict.fromkeys(parsed.values())), collection.qrels, ranking)
    values = {(value.measure, value.query_id): value.value for value in found}
    columns = {name: [values.get((parsed[name], query), 0.0) for query in collection.queries] for name in measures}
    return pd.DataFrame(columns, pd.Index(collection.queries, name="query"))


def bootstrap_interval(samples):
    """Return (low, high), the 95 % bootstrap interval (Efron and Tibshirani 1993, percentile) of the mean over samples
    (collections) of their means over queries; queries are resampled within a sample."""
    samples = [np.repeat(values, 2) if len(values) == 1 else values for values in samples]  # scipy requires two
    options = {"n_resamples": 9999, "method": "percentile", "vectorized": True, "rng": 0}
    found = bootstrap(samples, lambda *drawn, axis: np.mean([values.mean(axis) for values in drawn], axis=0),
                      batch=max(1, 2**22 // max(map(len, samples))), **options)  # fmt: skip
    return tuple(map(float, found.confidence_interval))


def paired_randomization_p(samples, others):
    """Return the two-sided p-value of the paired randomization test on the mean difference (Smucker et al. 2007)."""
    differences = np.concatenate([(a - b) / len(a) for a, b in zip(samples, others)])
    if len(differences) < 2 or not differences.any():
        return 1.0
    options = {"permutation_type": "samples", "vectorized": True, "n_resamples": 9999, "rng": 0}
    batch = max(1, 2**22 // len(differences))
    return float(permutation_test((differences,), np.sum, batch=batch, **options).pvalue)  # by flipping signs


def summarize(tables, measures):
    """Return {measure: {mean, low, high, difference, p}} over the collections for each ranking; difference and p are
    relative to the first ranking. tables: one list per collection, of compute_metrics() for each ranking."""
    found = []
    for number, rankings in enumerate(zip(*tables)):
        found.append({})
        for name in measures:
            samples, others = ([table[name].to_numpy() for table in part] for part in (rankings, next(zip(*tables))))
            low, high = bootstrap_interval(samples)
            mean, other = (float(np.mean([values.mean() for values in part])) for part in (samples, others))
            found[-1][name] = {"mean": mean, "low": low, "high": high}
            if number:
                found[-1][name] |= {"difference": mean - other, "p": paired_randomization_p(samples, others)}
    return found


# ---- report


def short_names(paths):
    """Return distinct short names of models, run files or collections: A for A/model, A/run.trec or A/*.x."""
    parts = [re.sub(r"/(model|run\.trec|\*[^/]*)?$", "", path).split("/") for path in paths]
    names = [part[-1] for part in parts]
    if len(set(names)) < len(names):
        names = ["_".join(part[-2:]) for part in parts]
    return [name if names.count(name) == 1 else f"{name}_{i + 1}" for i, name in enumerate(names)]


def write_trec(path, name, ranking):
    """Write a ranking as a TREC run file; white space in ids becomes an underscore."""
    with open(path, "w") as file:
        for query, part in ranking.groupby("query_id", sort=False):
            for rank, (document, score) in enumerate(zip(part["doc_id"], part["score"]), start=1):
                fields = query, "Q0", document, str(rank), f"{score:.9g}", name
                file.write(" ".join(re.sub(r"\s", "_", field) for field in fields) + "\n")


OUTPUT_ARGS = """beir split corpus queries qrels pairs columns keep_same_id model_name_or_path run bm25 cross_encoder
max_length rerank_max_length prompts truncate_dim"""  # flags that must not change within one --output_dir


def check_output(args):
    """Raise UserError if --output_dir contains results for other values of OUTPUT_ARGS, or cannot be written to. It is
    created with the results: a refused run leaves no empty folder."""
    output = Path(args.output_dir).absolute()
    with user_errors(f"--output_dir {args.output_dir}"), suppress(FileNotFoundError):
        existing = next(folder for folder in (output, *output.parents) if folder.exists())
        if not (existing.is_dir() and os.access(existing, os.W_OK)):
            raise UserError(f"{existing} is no folder that can be written to")
        then, now = json.loads((output / "metrics.json").read_text()).get("args", {}), asdict(args)
        if other := [f"--{name} {then.get(name)}" for name in OUTPUT_ARGS.split() if then.get(name) != now[name]]:
            raise UserError(f"contains the results of {', '.join(other)}: choose another folder")


def write_results(collections, runs, args):
    """Write metrics.json, report.png and the files of each ranking into --output_dir, and print the table.
    runs: for each collection a list of Runs, with the same names in each."""
    output, names, first = Path(args.output_dir), [run.name for run in runs[0]], args.metrics[0]
    tables = [[compute_metrics(run.ranking, collection, args.metrics) for run in found]
              for collection, found in zip(collections, runs)]  # fmt: skip
    summaries, results = {}, []
    for collection, found, columns in zip(collections, runs, tables):
        summaries[collection.name] = summarize([columns], args.metrics)
        for run, table, metrics in zip(found, columns, summaries[collection.name]):
            about = {"collection": collection.name, "name": run.name, "queries": len(table), "metrics": metrics}
            results.append(about | run.metadata)
            folder = output.joinpath(*[collection.name] * (len(runs) > 1), *[run.name] * (len(found) > 1))
            folder.mkdir(parents=True, exist_ok=True)
            table.to_csv(folder / "per_query.csv")
            write_trec(folder / "run.trec", run.name, run.ranking)
            if run.judged is not None:
                write_trec(folder / "judged.trec", run.name, run.judged)
    record = {"args": asdict(args), "results": results}
    if len(runs) > 1:
        summaries["mean"] = summarize(tables, args.metrics)
        record["means"] = dict(zip(names, summaries["mean"]))
    (output / "metrics.json").write_text(json.dumps(record, indent=1))
    plot_report(collections, runs, summaries, args, output / "report.png")

    # A row per ranking; a column per collection and their mean or, for one collection, per measure.
    cells = summaries[collections[0].name]  # [{column: statistics}]
    if len(runs) > 1:
        cells = [{column: table[i][first] for column, table in summaries.items()} for i in range(len(names))]
    width = max(map(len, [*names, first]))
    rows = [(first if len(runs) > 1 else "", cells[0])]
    for number, (name, row) in enumerate(zip(names, cells)):
        rows.append((name, ["{mean:.4f} [{low:.4f}, {high:.4f}]".format(**cell) for cell in row.values()]))
        if number:
            rows.append(("", ["{difference:+.4f}, p = {p:.4f}".format(**cell) for cell in row.values()]))
    print("", *(f"{title:{width}}" + "".join(f"  {cell:>24}" for cell in row) for title, row in rows), sep="\n")
    for result in results:
        stages = [f"{stage} {value:.1f}" for stage, value in result["seconds"].items() if value >= 0.05]
        seconds = f"; seconds: {', '.join(stages)}" if stages else ""
        for unit, verb in (("texts", "encoded"), ("pairs", "scored")):
            if counts := result.get(unit):
                work = f"{counts[verb]:,} of {counts['total']:,} {unit} {verb}"
                work += f", of at most {result['max_length']} tokens" if result["max_length"] else ""
                print(f"{result['collection']}, {result['name']}: {work}{seconds}")
    print(f"{sum(len(c.queries) for c in collections):,} queries; metrics.json and report.png are in {output}")


def plot_report(collections, runs, summaries, args, path):
    """Plot the first measure with its intervals, recall by depth, and seconds by stage."""
    names, first = [run.name for run in runs[0]], args.metrics[0]
    figure = Figure(figsize=(15, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    cells = [[[row[first][end] for end in ("low", "mean", "high")] for row in table] for table in summaries.values()]
    lows, means, highs = np.array(cells).T  # (rankings, collections) each
    errors = np.stack([means - lows, highs - means], 1)  # (rankings, 2, collections)
    pd.DataFrame(means.T, list(summaries), names).plot.bar(ax=axes[0], yerr=errors, rot=0, ylabel=first, ylim=(0, 1))
    for name, found in zip(names, zip(*runs)):
        recalls = []  # a (top_k,) array per collection
        for collection, run in zip(collections, found):
            relevant = collection.qrels[collection.qrels["relevance"] > 0]
            hits = run.ranking.assign(rank=run.ranking.groupby("query_id").cumcount()).merge(relevant, on=PAIR)
            share = 1 / relevant["query_id"].value_counts()
            hits = np.bincount(hits["rank"], hits["query_id"].map(share), minlength=args.top_k)
            recalls.append(hits.cumsum()[: args.top_k] / len(share))
        axes[1].plot(range(1, args.top_k + 1), np.mean(recalls, 0), label=name)
    axes[1].set(xscale="log", xlabel="k", ylabel="recall@k", ylim=(0, 1))
    axes[1].legend()
    seconds = [pd.DataFrame([run.metadata["seconds"] for run in found]).sum() for found in zip(*runs)]
    seconds = pd.DataFrame(seconds, names).fillna(0)
    if seconds.size:  # none if all runs are files
        seconds.plot.barh(ax=axes[2], stacked=True, xlabel="seconds")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def print_hits(run, collection):
    """Print the best ten documents of each query, with their scores."""
    width = max(60, shutil.get_terminal_size((120, 24)).columns)
    for query, part in run.ranking.groupby("query_id", sort=False):
        print(f"\n{collection.queries[query]}")
        for name, score in zip(part["doc_id"][:10], part["score"]):
            print(f"  {score:6.3f}  {name:>8}  {' '.join(run.texts[name].split())}"[:width])


def main(args):
    if args.cache_info or args.cache_clear:
        return manage_cache(args) if int(os.environ.get("RANK", 0)) == 0 else None
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # else several processes on CPUs would not find one another
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=30))],
    )
    transformers.utils.logging.disable_progress_bar()  # of each small file that is loaded
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each load of a local file asks the Hub
    if not args.query and args.export_vectors is None:
        check_output(args)
    sources = args.beir or [(args.corpus or args.pairs)[0]]
    collections = [open_collection(*pair, args) for pair in zip(short_names(sources), args.beir or [None])]

    # ---- rankings of each collection: of run files, then of bi-encoders, then all of them reranked
    paths = args.run + args.model_name_or_path
    names, runs = dict(zip(paths, short_names(paths))), [[] for _ in collections]
    for path in args.run:
        runs[0].append(read_run(path, names[path], collections[0]))
    for path in args.model_name_or_path:
        encoder = CachedEncoder(path, args, accelerator)
        if args.export_vectors is not None:
            return export_vectors(encoder, collections[0], args, accelerator)
        for collection, found in zip(collections, runs):
            found.append(retrieve(encoder, names[path], collection, args, accelerator))
        encoder.cache.cache.close()
    if args.cross_encoder:
        scorer = CachedScorer(args.cross_encoder, args, accelerator)
        for collection, found in zip(collections, runs):
            found += [rerank(run, scorer, collection, args, accelerator) for run in found]
        scorer.cache.cache.close()

    # ---- results
    main_process = accelerator.is_main_process
    accelerator.end_training()  # so that no process waits for BM25 and the report
    if not main_process:
        return
    for collection, found in zip(collections, runs):
        if args.bm25:
            found.append(bm25_run(collection, args))
        for warning in dict.fromkeys(chain(collection.warnings, *(run.metadata["warnings"] for run in found))):
            print(f"warning: {collection.name}: {warning}", file=sys.stderr)
    if args.query:
        print_hits(runs[0][-1], collections[0])
    else:
        with user_errors(f"--output_dir {args.output_dir}: results not written, but the vectors are cached"):
            write_results(collections, runs, args)


if __name__ == "__main__":
    status = 0
    try:
        main(parse_args(sys.argv[1:]))
    except (Exception, KeyboardInterrupt) as error:
        again = "the same command continues; the vectors encoded so far are cached"
        status = print_error(error, again, "lower --micro_batch_tokens")
    sys.stdout.flush()
    os._exit(status)  # pyarrow threads that still read ahead can hang or abort a normal exit (apache/arrow 45214)
