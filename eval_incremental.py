"""Evaluate bi-encoders and rerankers on retrieval, over corpora of any size, without encoding any text twice.

    python eval_incremental.py                                         # runs/bi_encoder/model, on held-out demo pairs
    python eval_incremental.py --model_name_or_path BAAI/bge-base-en-v1.5 runs/bge/model --beir scifact nfcorpus
    python eval_incremental.py --query "read a gzip file"              # search instead; a second query takes seconds
    python eval_incremental.py --beir scifact --run bm25.run --cross_encoder runs/cross_encoder/model   # rerank
    python eval_incremental.py --corpus docs.parquet --export_vectors vectors       # for an index or a vector database
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml eval_incremental.py args.yaml

A collection is a corpus, queries and judgments (qrels), in BEIR's layout or each given by its own flag, or pairs:

    corpus.jsonl   {"_id": "4983", "title": "Microstructural ...", "text": "Alterations of ..."}
    queries.jsonl  {"_id": "1", "text": "0-dimensional biomaterials lack ..."}
    qrels/test.tsv query-id <tab> corpus-id <tab> score

The corpus is read in chunks. The vectors of a chunk come from the cache, or else are encoded and stored; every query
keeps its best documents so far. Memory is bounded by the chunk, the queries and the judgments; search is exact; a run
that was killed resumes by the same command. The key of a vector is its text and a fingerprint of the model. A
cross-encoder reranks the best documents of each query; its scores are cached in the same way, by both texts.

Output: metrics.json, report.png, and for each ranking run.trec and per_query.csv.
Left out on purpose: approximate search, asymmetric models (Router), similarities other than cosine and dot product.
"""

import csv
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
import traceback
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import chain, islice
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
from matplotlib.figure import Figure
from scipy.stats import bootstrap, permutation_test
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer
from tqdm.auto import tqdm

# Shapes: Q queries, n documents of a chunk, D embedding dimensions, K results of a query (--top_k), P processes.

# ---- errors and options (same in train_bi_encoder.py)


class UserError(ValueError):
    """Something the user can fix; printed as one line, without a traceback."""


@contextmanager
def user_errors(name):
    """Turn whatever a library raises about the user's data or model into a UserError: `name`, then the root cause."""
    try:
        yield
    except Exception as error:
        cause = error
        while cause.__cause__ and not isinstance(cause, UserError):
            cause = cause.__cause__
        reason = "contains no row" if isinstance(cause, StopIteration) else str(cause).strip() or repr(cause)
        reason = reason.splitlines()[0][:500]
        if "cast" in reason.lower():  # `datasets` takes the type of a column from its first rows
            reason += "; prepare_corpus.py can rewrite rows of irregular types"
        raise UserError(reason if reason.startswith(name) else f"{name}: {reason}") from error


def flag(default, help):
    """Return the dataclass field of a command-line option."""
    kind = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**kind, metadata={"help": help})


# ---- options

DEMO = "data/python_code"  # where prepare_corpus.py writes the demo corpus
ABOVE_ZERO = "rerank_k rerank_max_length max_length truncate_dim micro_batch_tokens corpus_chunk_size top_k"


@dataclass
class Args:
    # data
    beir: list[str] = flag([], "folders or Hub ids of collections in the layout of BEIR or NanoBEIR")
    split: str = flag("test", "judgments of --beir to use")
    corpus: list[str] = flag([], "sources of the documents, instead of --beir: paths, globs, folders, URLs, Hub ids")
    queries: list[str] = flag([], "sources of the queries of --corpus")
    qrels: str | None = flag(None, "judgments of --corpus: TREC qrels, or query, document and grade")
    corpus_columns: list[str] = flag([], "id column (# for the row number), then text columns; none: _id title text")
    query_columns: list[str] = flag([], "the same of the queries; none: _id text")
    pairs: list[str] = flag([], f"sources of (query, document) rows instead; none of all: {DEMO}/heldout")
    columns: list[str] = flag([], "query and document column of --pairs; none: the first two")
    keep_same_id: bool = flag(False, "rank the document with the query's own id, too, which BEIR leaves out")
    streaming: bool = flag(False, "read the corpus front to back instead of from a memory-mapped table made once")
    # rankings
    model_name_or_path: list[str] = flag([], "bi-encoders to compare; none: runs/bi_encoder/model, or --run alone")
    run: list[str] = flag([], "rankings to evaluate or rerank, in TREC format: query Q0 document rank score tag")
    bm25: bool = flag(False, "compare with BM25 (requires bm25s, and the corpus in memory)")
    cross_encoder: str | None = flag(None, "model that reranks what the bi-encoders or --run found")
    rerank_k: int | None = flag(None, "documents of a query to rerank, the others stay behind; None: at most 100")
    rerank_max_length: int | None = flag(None, "tokens a pair is truncated to; None: the model's own")
    top_k: int = flag(100, "documents ranked for each query")
    query: list[str] = flag([], "print the best documents for these texts instead of evaluating")
    # embeddings
    max_length: int | None = flag(None, "tokens a text is truncated to; None: the model's own")
    prompts: list[str] = flag([], "prefix of queries, then of documents; none: the model's own")
    truncate_dim: int | None = flag(None, "search with the first so many dimensions, for Matryoshka models")
    micro_batch_tokens: int | None = flag(None, "tokens of a forward pass; None: 2,048 on a CPU, else 16,384")
    corpus_chunk_size: int = flag(2048, "documents held at once; the most that a killed run encodes again")
    cache_dir: str = flag("~/.cache/evenstep/embeddings", "folder of the embedding caches, one for each model")
    cache_dtype: Literal["float32", "float16", "int8"] = flag("float16", "how vectors are stored, and searched")
    cache_size_limit: float = flag(0, "GB of a model's cache, from which the oldest vectors go first; 0: no limit")
    cache_info: bool = flag(False, "list the models in --cache_dir, and exit")
    cache_clear: str | None = flag(None, "remove the cache of this model (name or fingerprint), and exit")
    # output
    metrics: list[str] = flag(["nDCG@10", "RR@10", "R@100", "AP"], "measures, by their names in ir_measures")
    judged: bool = flag(False, "write judged.trec beside run.trec: the scores of all judged documents, for mining")
    export_vectors: str | None = flag(
        None, "write the vectors of the corpus as Parquet shards into this folder instead"
    )
    output_dir: str = flag("runs/eval", "folder for the results")


def parse_args(argv):
    """Return Args from flags, or from a YAML or JSON file and flags that override it; exit on a wrong value."""
    parser = transformers.HfArgumentParser(Args, description=__doc__.splitlines()[0], allow_abbrev=False)
    for action in parser._actions:  # --help prints each flag once, without its alias with dashes
        action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
    flags = Counter(word.partition("=")[0].replace("-", "_") for word in argv if word.startswith("--"))
    if repeated := [name for name, times in flags.items() if times > 1]:
        parser.error(f"{' '.join(repeated).replace('__', '--')}: given twice; list all values after one flag")
    if argv and argv[0].endswith((".yaml", ".yml", ".json")):
        words = []
        with user_errors(f"{argv[0]}: not a file of flags"):
            for name, value in dict(yaml.safe_load(Path(argv[0]).read_text())).items():
                values = value if isinstance(value, list) else [value]
                words += [f"--{name}", *map(str, values)] if values not in ([], [None]) else []
        argv = words + argv[1:]
    with user_errors("flags"):
        (args,) = parser.parse_args_into_dataclasses(argv)
    for name, value in asdict(args).items():
        low, relation = (1, "above 0") if name in ABOVE_ZERO.split() else (0, "0 or more")
        if isinstance(value, int | float) and not low <= value < math.inf:
            parser.error(f"--{name} {value}: must be finite, and {relation}")
    searching, exporting = bool(args.query), args.export_vectors is not None
    for name in args.metrics:
        with user_errors(f"--metrics {name}"):
            measure = ir_measures.parse_measure(name)
            cutoff = int(measure.params.get("cutoff", 1))
            if cutoff < 1:  # which crashes trec_eval
                raise UserError("a cutoff is above 0")
            list(ir_measures.iter_calc([measure], {"query": {"a": 1}}, {"query": {"a": 1.0}}))  # is it computable?
        if cutoff > args.top_k and not (searching or exporting or args.run):
            parser.error(f"--metrics {name}: deeper than --top_k {args.top_k}: raise it")
    if sum(map(bool, (args.beir, args.corpus, args.pairs))) > 1:
        parser.error("--beir, --corpus, --pairs: give one of them")
    if args.corpus and not (searching or exporting or (args.queries and args.qrels)):
        parser.error("--corpus: requires --queries and --qrels, or --query or --export_vectors")
    if (args.queries or args.qrels) and not args.corpus:
        parser.error("--queries, --qrels: require --corpus")
    if not (args.beir or args.corpus or args.pairs or args.cache_info or args.cache_clear):
        # An evaluation is of the held-out functions; a search is more fun over all of them.
        args.pairs = [f"{DEMO}/heldout/*.parquet"] + [f"{DEMO}/train/*.parquet"] * (searching or exporting)
        if not Path(DEMO).is_dir():
            parser.error(f"no --beir, --corpus or --pairs, and no demo corpus in {DEMO}: run python prepare_corpus.py")
    if len(args.columns) not in (0, 2) or 1 in (len(args.corpus_columns), len(args.query_columns)):
        parser.error("--columns takes two names; --corpus_columns, --query_columns an id column and text columns")
    if not args.model_name_or_path and not args.run:
        args.model_name_or_path = ["runs/bi_encoder/model"]
    alone = "--run, --query, --export_vectors: take one"
    if len(args.beir) > 1 and (args.run or searching or exporting):
        parser.error(f"{alone} collection")
    if bool(args.run) + searching + exporting > 1:
        parser.error(f"{alone} of them")
    if (searching or exporting) and (args.bm25 or args.judged or len(args.model_name_or_path) > 1):
        parser.error("--query, --export_vectors: take one --model_name_or_path, without --bm25 and --judged")
    if (args.rerank_k or 0) > args.top_k and args.model_name_or_path:
        parser.error(f"--rerank_k {args.rerank_k}: more than --top_k {args.top_k}: raise that, too")
    args.rerank_k = args.rerank_k or (100 if args.run else min(100, args.top_k))
    return args


# ---- file formats (same in train_bi_encoder.py)

FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json", ".ndjson": "json",
           ".csv": "csv", ".tsv": "csv", ".txt": "text"}  # fmt: skip

# ---- files (same in train_bi_encoder.py)


def file_suffix(file):
    """Return the key of FORMATS that a file name ends in, before .gz or .zst; None if there is none."""
    suffix = Path(file.lower().removesuffix(".gz").removesuffix(".zst")).suffix
    return suffix if suffix in FORMATS else None


def list_files(source):
    """Return the files of a path, glob, folder, URL, Hub id or ID:config:split, as `datasets` resolves them."""
    path, config, split = os.path.expanduser(source), None, "train"
    if os.path.exists(os.path.join(path, "state.json")):  # of Dataset.save_to_disk
        return sorted(map(str, Path(path).glob("*.arrow")))
    if suffix := file_suffix(path):  # decided by name: a missing file is not to be taken for a Hub id
        builder = datasets.load_dataset_builder(FORMATS[suffix], data_files=path)
    else:
        path, config, split = path.split(":") if path.count(":") == 2 else (path, config, split)
        builder = datasets.load_dataset_builder(path, name=config or None)
    files = builder.config.data_files
    if not files.get(split):
        raise UserError(f"no file of a split {split!r}; its splits: {', '.join(files) or 'none'}")
    if not file_suffix(files[split][0]):
        raise UserError(f"{files[split][0]}: not one of {' '.join(FORMATS)}, with or without .gz or .zst")
    return list(files[split])


def open_files(files, streaming=True):
    """Return a Dataset or IterableDataset that hands out pyarrow Tables."""
    suffix = file_suffix(files[0])
    # The record batches of a mapped table are kept in a list: make them few.
    kind, options = FORMATS[suffix], {"split": "train", "writer_batch_size": 20_000}
    options |= {"sep": "\t"} if suffix == ".tsv" else {}
    options |= {"batch_size": 1000} if kind == "parquet" else {}  # pyarrow reads ahead, and less in small batches
    if kind == "arrow" and not streaming:
        with suppress(OSError, pa.ArrowInvalid):  # a local Arrow stream is mapped where it is, everything else a copy
            parts = [datasets.Dataset.from_file(file) for file in files]
            return datasets.concatenate_datasets(parts).with_format("arrow")
    if kind in ("json", "csv"):  # a column of nulls at first would be typed null, and its first text fail
        first = datasets.load_dataset(kind, data_files=files[:1], streaming=True, **options).with_format("arrow")
        schema = next(first.iter(1)).schema
        if pa.null() in schema.types:
            fields = [field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in schema]
            options["features"] = datasets.Features.from_arrow_schema(pa.schema(fields))
    return datasets.load_dataset(kind, data_files=files, streaming=streaming, **options).with_format("arrow")


# ---- cells (same in train_bi_encoder.py)


def as_texts(column, name, ids=False):
    """Return a column of texts, or of `ids`, as large_string; null where there is none."""
    kind = column.type  # JSON is what `datasets` makes of a column of several types
    if pa.types.is_nested(kind) or isinstance(kind, pa.JsonType) or (pa.types.is_primitive(kind) and not ids):
        raise UserError(f"column {name!r} holds {kind}, not texts: set --label_column {name} or --columns, or rewrite "
                        "it by prepare_corpus.py")  # fmt: skip
    return column.cast(pa.large_string())


# ---- collections


@dataclass
class Chunk:
    """Consecutive rows of a corpus, as they are encoded."""

    first: int  # number of the first row
    ids: pa.Array  # (n,) large_string
    texts: pa.Array  # (n,) large_string with the prompt; or structs of a query and a document
    hashes: np.ndarray  # (n, 2) uint64, of the texts


def text_hashes(texts):
    """Return (n, 2) uint64, the 128-bit BLAKE2b hashes of n texts, large_string."""
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1].tolist()
    view = memoryview(data or b"")
    digests = [hashlib.blake2b(view[a:b], digest_size=16).digest() for a, b in zip(ends, ends[1:])]
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


class TextReader:
    """Ids and texts of some sources, front to back, in chunks."""

    def __init__(self, sources, columns, default, args):
        self.name, self.size, self.empty = sources[0], args.corpus_chunk_size, 0
        with user_errors(self.name):
            files = [file for source in sources for file in list_files(source)]
            available = next(open_files(files[:1]).iter(1)).column_names
            # A title is usual, not certain.
            columns = columns or [name for name in default if name in available or name != "title"]
            self.id_column, *self.text_columns = columns
            self.dataset = open_files(files, args.streaming)
            self.dataset = self.dataset.select_columns(list(dict.fromkeys(name for name in columns if name != "#")))
        self.rows = None if args.streaming else len(self.dataset)

    def chunks(self, prompt="", process=0, processes=1):
        """Yield the Chunks of one process: every P-th."""
        with user_errors(self.name):
            if self.rows is None:
                tables = enumerate(self.dataset.iter(self.size))
            else:
                numbers = range(process, math.ceil(self.rows / self.size), processes)
                tables = ((n, self.dataset[n * self.size : (n + 1) * self.size]) for n in numbers)
            for number, table in tables:
                if number % processes == process:
                    table.validate(full=True)  # a damaged Arrow file has offsets that lead anywhere
                    yield self.make_chunk(number * self.size, table.combine_chunks(), prompt)

    def make_chunk(self, first, table, prompt):
        """Return the Chunk of a Table as read: text columns joined, behind the prompt."""
        columns = [pc.fill_null(as_texts(table[name], name), "") for name in self.text_columns]
        texts = pc.utf8_trim_whitespace(pc.binary_join_element_wise(*columns, pa.scalar(" ", pa.large_string())))
        self.empty += pc.sum(pc.equal(texts, "")).as_py()
        texts = pc.binary_join_element_wise(pa.scalar(prompt, texts.type), texts, pa.scalar("", texts.type))
        if self.id_column == "#":
            ids = pa.array(np.arange(first, first + len(table))).cast(pa.large_string())
        else:
            ids = as_texts(table[self.id_column], self.id_column, ids=True).combine_chunks()
        if (row := pc.index(pc.fill_null(ids, ""), "").as_py()) >= 0:
            raise UserError(f"row {first + row}, counted from 0, has no id in column {self.id_column!r}")
        texts = texts.combine_chunks()
        return Chunk(first, ids, texts, text_hashes(texts))


def read_trec(path, name):
    """Return a DataFrame (query, document, score) of a run ("run") or of judgments ("qrels": of TREC, or of BEIR)."""
    with user_errors(f"--{name} {path}"):
        with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
            separator = "\t" if "\t" in file.readline() else r"\s+"  # ids of BEIR may contain spaces
        options = {"header": None, "dtype": str, "quoting": csv.QUOTE_NONE, "keep_default_na": False}
        frame = pd.read_csv(path, sep=separator, encoding="utf-8-sig", **options)
        columns = {3: (0, 1, 2), 4: (0, 2, 3)} if name == "qrels" else {6: (0, 2, 4)}
        if frame.shape[1] not in columns:
            raise UserError(f"lines of {frame.shape[1]} fields, not {' or '.join(map(str, columns))}")
        frame = frame.iloc[:, list(columns[frame.shape[1]])].set_axis(["query", "document", "score"], axis=1)
        scores = pd.to_numeric(frame["score"], errors="coerce")
        if name == "qrels" and len(frame) and np.isnan(scores[0]):  # the header of BEIR
            frame, scores = frame[1:], scores[1:]
        if (bad := ~np.isfinite(scores)).any():
            raise UserError(f"line {bad.idxmax() + 1} has no number: {' '.join(frame.loc[bad.idxmax()])}")
        if frame.empty:
            raise UserError("contains no line")
        return frame.assign(score=scores)


@dataclass
class Collection:
    name: str
    corpus: TextReader
    query_ids: list
    query_texts: list
    qrels: dict  # {query id: {document id: grade}}; empty in a search or an export
    warnings: list
    omit_same_id: bool = False  # leave the document with the query's own id out of its ranking


def beir_sources(name, split):
    """Return the sources of documents, queries and judgments of a folder or Hub id, in BEIR's or NanoBEIR's layout."""
    if os.path.exists(f"{name}/corpus.jsonl"):
        available = sorted(path.stem for path in Path(name, "qrels").glob("*.tsv"))
        if split not in available:
            raise UserError(f"--beir {name}: no judgments of --split {split}; available: {', '.join(available)}")
        return [f"{name}/corpus.jsonl"], [f"{name}/queries.jsonl"], f"{name}/qrels/{split}.tsv"
    with user_errors(f"--beir {name}"):
        nano = "qrels" in datasets.get_dataset_config_names(name)
        sources = []
        for source, config in (
            (name, "corpus"),
            (name, "queries"),
            (name, "qrels") if nano else (f"{name}-qrels", ""),
        ):
            splits = list(datasets.load_dataset_builder(source, config or None).config.data_files)
            sources.append(f"{source}:{config}:{splits[0] if config else split}")  # the only one of a configuration
    return sources[:1], sources[1:2], sources[2]


def read_qrels(source):
    """Return {query id: {document id: grade}} of a file, or of a source in the layouts of the Hub."""
    if source.count(":") == 2 and "://" not in source:
        with user_errors(f"--beir {source}"):
            tables = open_files(list_files(source), streaming=False)[:]
            frame = pd.DataFrame({"query": as_texts(tables["query-id"], "query-id", ids=True),
                                  "document": as_texts(tables["corpus-id"], "corpus-id", ids=True)})  # fmt: skip
            frame["score"] = tables["score"] if "score" in tables.column_names else 1  # NanoBEIR has none
    else:
        frame = read_trec(source, "qrels")
    qrels = defaultdict(dict)
    for query, document, grade in zip(frame["query"], frame["document"], frame["score"].astype(int).tolist()):
        qrels[query][document] = grade
    return qrels


def open_collection(name, beir, args):
    """Return the Collection of a value of --beir, or of --corpus or --pairs."""
    searching = args.query or args.export_vectors is not None  # which need no judgments
    ad_hoc = [f"query {i}" for i in range(1, len(args.query) + 1)], args.query, {}, []
    if args.pairs:
        return open_pairs(name, args, ad_hoc if searching else None)
    documents, queries, qrels = beir_sources(beir, args.split) if beir else (args.corpus, args.queries, args.qrels)
    corpus = TextReader(documents, args.corpus_columns, ("_id", "title", "text"), args)
    if searching:
        return Collection(name, corpus, *ad_hoc)
    qrels, texts, counts = read_qrels(qrels), {}, Counter()
    reader = TextReader(queries, args.query_columns, ("_id", "text"), args)
    for chunk in reader.chunks():
        for query, text in zip(chunk.ids.to_pylist(), chunk.texts.to_pylist()):
            counts["queries with the id of an earlier one left out"] += query in texts
            counts["queries without judgments left out"] += query not in qrels
            if query in qrels:
                texts.setdefault(query, text)
    missing = sorted(qrels.keys() - texts)
    counts[f"judged queries are not among the queries, such as {', '.join(missing[:3])}; left out"] = len(missing)
    counts["queries are empty"] = reader.empty
    if not texts:
        raise UserError(f"{reader.name}: has none of the judged queries; check the ids")
    warnings = [f"{count:,} {what}" for what, count in counts.items() if count]
    # Row numbers identify nothing beyond their own table: the row of a query may well be that of its answer.
    omit_same_id = not args.keep_same_id and "#" not in (corpus.id_column, reader.id_column)
    qrels = {query: qrels[query] for query in texts}
    return Collection(name, corpus, list(texts), list(texts.values()), qrels, warnings, omit_same_id)


def open_pairs(name, args, ad_hoc):
    """Return the Collection of --pairs: equal queries are one, and a document equal to an answer is an answer."""
    columns = args.columns
    if not columns:
        with user_errors(f"--pairs {args.pairs[0]}"):
            columns = next(open_files(list_files(args.pairs[0])[:1]).iter(1)).column_names[:2]
    corpus = TextReader(args.pairs, ["#", columns[-1]], (), args)
    if ad_hoc:
        return Collection(name, corpus, *ad_hoc)
    readers = TextReader(args.pairs, ["#", columns[0]], (), args), corpus
    queries, documents = (
        [text for chunk in reader.chunks() for text in chunk.texts.to_pylist()] for reader in readers
    )
    rows, answers = defaultdict(list), defaultdict(set)
    for row, (query, document) in enumerate(zip(queries, documents)):
        rows[document].append(str(row))
        if query and document:
            answers[query].add(document)
    if not answers:
        raise UserError(f"--pairs {args.pairs[0]}: no pair has two texts; check --columns")
    empty = sum(not (query and document) for query, document in zip(queries, documents))
    warnings = [f"{empty:,} pairs lack a text; left out of the queries"] * (empty > 0)
    qrels = {str(i): {row: 1 for text in answers[q] for row in rows[text]} for i, q in enumerate(answers)}
    return Collection(name, corpus, list(qrels), list(answers), qrels, warnings)


# ---- the embedding cache


class NoPickleDisk(diskcache.Disk):
    """diskcache without its pickles, which run code from a hostile folder (CVE-2025-69872), within its own folder."""

    NAME = re.compile(r"[0-9a-f]{2}[/\\][0-9a-f]{2}[/\\][0-9a-f]{28}\.val")  # of a value's file, as diskcache makes it

    def get(self, key, raw):
        if not raw:
            raise UserError("a key is a pickle: remove the folder")
        return super().get(key, raw)

    def fetch(self, mode, filename, value, read):
        if mode == diskcache.core.MODE_PICKLE or (filename and not self.NAME.fullmatch(filename)):
            raise UserError("a value is a pickle, or outside of the folder: remove it")
        return super().fetch(mode, filename, value, read)

    def remove(self, file_path):
        if self.NAME.fullmatch(file_path):
            super().remove(file_path)


class EmbeddingCache:
    """Vectors on disk by the hash of their text, for one model.

    The texts that were encoded together are one value, a block: their hashes, their vectors, and a checksum. Its key
    is the hash of these hashes, so that an unchanged chunk is one lookup; an entry for each text has block and row."""

    def __init__(self, folder, model, dimensions, dtype, limit=0):
        self.folder, self.dimensions, self.dtype, self.damaged, self.full = Path(folder), dimensions, dtype, 0, False
        self.row_bytes = dimensions + 4 if dtype == "int8" else dimensions * np.dtype(dtype).itemsize
        metadata = {"model": model, "dtype": dtype, "dimensions": dimensions, "bytes": self.row_bytes + 16}
        with self.errors():
            self.cache = diskcache.Cache(
                str(self.folder),
                disk=NoPickleDisk,
                disk_min_file_size=25,  # blocks are files, the entries of texts are not
                eviction_policy="least-recently-stored" if limit else "none",
                size_limit=int(limit * 1e9) or 2**62,
                sqlite_mmap_size=0,  # a memory-mapped index would count as memory and grow with the corpus
            )
            (self.folder / "model.json").write_text(json.dumps(metadata))  # for --cache_info

    def errors(self):
        return user_errors(f"--cache_dir {self.folder} (free space, or remove it if it is damaged)")

    def pack(self, vectors):
        """Return (n, bytes) uint8 rows as they are stored, of (n, D) float32."""
        if self.dtype == "int8":  # each vector scaled to its largest component
            scale = np.maximum(np.abs(vectors).max(1, keepdims=True), 1e-30).astype(np.float32) / 127
            return np.hstack([scale.view(np.uint8), np.round(vectors / scale).astype(np.int8).view(np.uint8)])
        with np.errstate(over="ignore"):
            stored = vectors.astype(self.dtype)
        if not np.isfinite(stored).all():
            raise UserError(f"--cache_dtype {self.dtype}: cannot hold an embedding of this model; use float32")
        return stored.view(np.uint8).reshape(len(vectors), -1)

    def unpack(self, rows):
        """Return (n, D) vectors, float32 (of int8) or the stored dtype, of (n, bytes) uint8 rows."""
        if self.dtype == "int8":
            return np.ascontiguousarray(rows[:, :4]).view(np.float32) * rows[:, 4:].view(np.int8)
        return np.ascontiguousarray(rows).view(self.dtype)

    def read_block(self, block):
        """Return ((n, 2) hashes, (n, bytes) rows) of a block, or None if it is missing or damaged."""
        file = self.cache.get(b"block" + block, read=True)
        if file is None:
            return None
        with file:
            value = np.fromfile(file, np.uint8)
        n, rest = divmod(len(value) - 8, 16 + self.row_bytes)
        if rest or n < 0 or xxhash.xxh3_64_digest(value[:-8]) != value[-8:].tobytes():
            self.damaged += 1
            tqdm.write(f"{self.folder}: a damaged block; what it held is computed again", file=sys.stderr)
            self.cache.delete(b"block" + block)
            return None
        return value[: 16 * n].view(np.uint64).reshape(n, 2), value[16 * n : -8].reshape(n, -1)

    def lookup(self, hashes):
        """Return ((n, bytes) uint8 rows, (n,) bool found) of the texts with these (n, 2) uint64 hashes."""
        with self.errors():
            whole = self.read_block(block_of(hashes))
            if whole and np.array_equal(whole[0], hashes):
                return whole[1], np.ones(len(hashes), bool)
            rows, found = np.zeros((len(hashes), self.row_bytes), np.uint8), np.zeros(len(hashes), bool)
            places = defaultdict(list)  # {block: [(index in hashes, row in the block)]}
            for index, key in enumerate(hashes.view("V16").ravel().tolist()):
                entry = self.cache.get(key)
                if entry is not None:
                    places[entry[:16]].append((index, int.from_bytes(entry[16:], "little")))
            for block, pairs in places.items():
                if content := self.read_block(block):
                    indices, numbers = np.array(pairs).T
                    numbers = numbers.clip(max=len(content[0]) - 1)  # of a damaged entry
                    same = (content[0][numbers] == hashes[indices]).all(1)
                    rows[indices[same]], found[indices[same]] = content[1][numbers[same]], True
            return rows, found

    def store(self, hashes, rows):
        """Keep the (n, bytes) rows of n texts: all of them or, if the process is killed, none."""
        block, value = block_of(hashes), hashes.tobytes() + rows.tobytes()
        with self.errors(), self.cache.transact(retry=True):
            self.full |= self.cache.volume() + len(value) > self.cache.size_limit  # older vectors go
            self.cache.set(b"block" + block, value + xxhash.xxh3_64_digest(value))
            for row, key in enumerate(hashes.view("V16").ravel().tolist()):
                self.cache.set(key, block + row.to_bytes(4, "little"))


def block_of(hashes):
    """Return the 16-byte id of the block of texts with these (n, 2) hashes."""
    return hashlib.blake2b(hashes.tobytes(), digest_size=16).digest()


def manage_cache(args):
    """List the caches of --cache_dir, or remove those of --cache_clear."""
    print(f"{'fingerprint':13} {'dtype':8} {'dims':>5} {'vectors':>12} {'MB':>10}  model ({args.cache_dir})")
    name, cleared = args.cache_clear, 0
    for note in sorted(Path(args.cache_dir).expanduser().glob("*/model.json")):
        metadata = {"model": "(damaged)", "dtype": "?", "dimensions": 0, "bytes": 1e30}
        with suppress(ValueError):
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
        raise UserError(f"--cache_clear {name}: no such model in {args.cache_dir}; --cache_info lists them")


# ---- micro-batches (same in train_bi_encoder.py)


def cut_micro_batches(lengths, max_tokens):
    """Return index lists, longest text first, each of at most `max_tokens` with padding; a longer text stands alone.

    Of all such cuts that with the fewest padded tokens, where a forward pass counts as 32 tokens at 2,048 max_tokens
    (12 to 35 measured on CPUs), and as 1,024 at 16,384 (GPUs)."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    sizes = np.array([max(lengths[i], 1) for i in order])
    cost_of_a_pass = 32 * (max_tokens / 2048) ** (5 / 3)
    costs, begins = np.zeros(len(order) + 1), np.zeros(len(order) + 1, dtype=int)  # of the best cut of the first texts
    for end in range(1, len(order) + 1):
        firsts = np.arange(max(0, min(end - 1, end - max_tokens // sizes[end - 1])), end)  # of the last micro-batch
        padded = (end - firsts) * sizes[firsts]
        padded = np.where((padded <= max_tokens) | (firsts == end - 1), padded, np.inf)
        best = np.argmin(costs[firsts] + padded)
        costs[end], begins[end] = costs[firsts[best]] + padded[best] + cost_of_a_pass, firsts[best]
    cuts, end = [], len(order)
    while end:
        cuts.append(order[begins[end] : end])
        end = begins[end]
    return cuts[::-1]


# ---- padding (same in train_bi_encoder.py)


def pad_micro_batches(encodings, model, max_tokens, device):
    """Return (micro-batches, tokens, tokens with padding) of tokenized texts or pairs; a micro-batch is (features,
    indices in `encodings`)."""
    tokenizer, flat, micro_batches = model.tokenizer, {}, []
    lengths = np.array([len(encoding) for encoding in encodings], np.int64)
    starts, widths, total = torch.from_numpy(np.cumsum(lengths) - lengths), lengths, int(lengths.sum())
    if device.type != "cpu":  # fast kernels require multiples of 8
        widths = np.maximum(lengths, np.minimum(-(-lengths // 8) * 8, model.max_seq_length))
    fills = {"input_ids": ("ids", tokenizer.pad_token_id), "token_type_ids": ("type_ids", tokenizer.pad_token_type_id)}
    for name in fills.keys() & set(tokenizer.model_input_names):  # (total,), text after text
        tokens = chain.from_iterable(getattr(encoding, fills[name][0]) for encoding in encodings)
        flat[name] = torch.from_numpy(np.fromiter(tokens, np.int64, total))
    for cut in cut_micro_batches(widths.tolist(), max_tokens):
        columns = torch.arange(int(widths[cut[0]]))
        mask = columns < torch.from_numpy(lengths[cut])[:, None]  # (n, width)
        places = (starts[cut, None] + columns).clamp_(max=total - 1)  # (n, width), in the flat arrays
        features = {name: tokens[places].masked_fill_(~mask, fills[name][1]) for name, tokens in flat.items()}
        features["attention_mask"] = mask.long()
        if device.type == "cuda":
            features = {name: tensor.pin_memory() for name, tensor in features.items()}
        micro_batches.append((features, cut))
    return micro_batches, total, sum(features["attention_mask"].numel() for features, _ in micro_batches)


def prefetch(iterator, depth=2):
    """Run an iterator in a background thread, `depth` items ahead; its errors surface here."""
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(next, iterator, None) for _ in range(depth))
        while (item := ahead.popleft().result()) is not None:
            ahead.append(pool.submit(next, iterator, None))
            yield item


# ---- texts (same in train_bi_encoder.py)


def make_micro_batches(texts, model, max_tokens, device):
    """Return (micro-batches, tokens, tokens with padding) of texts; a micro-batch is (features, indices in texts)."""
    if not isinstance(model.tokenizer, Tokenizer):
        encodings = model.tokenizer.backend_tokenizer.encode_batch_fast(texts)
        return pad_micro_batches(encodings, model, max_tokens, device)
    # A static embedding model: texts are concatenated, without padding.
    encodings = model.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ids = [torch.tensor(encoding.ids, dtype=torch.long) for encoding in encodings]
    lengths, micro_batches = torch.tensor([len(text) for text in ids]), []
    total = int(lengths.sum())
    for cut in cut_micro_batches([math.ceil(total / len(ids))] * len(ids), max_tokens):
        offsets = lengths[cut].cumsum(0) - lengths[cut]
        micro_batches.append(({"input_ids": torch.cat([ids[i] for i in cut]), "offsets": offsets}, cut))
    return micro_batches, total, total


# ---- forward passes (same in train_bi_encoder.py and ...)


def encode(model, features, accelerator):
    """Return (n, D) float embeddings of one micro-batch."""
    features = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in features.items()}
    return model(features)["sentence_embedding"].float()


def score(model, features, accelerator):
    """Return (n, 1) float logits of one micro-batch."""
    features = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in features.items()}
    return model(features)["scores"].float()


# ---- models


def load_bi_encoder(path, args):
    """Return (SentenceTransformer on the CPU, dimensions to search with, prompts of queries and of documents)."""
    with user_errors(f"--model_name_or_path {path}"):
        model = SentenceTransformer(path, device="cpu", model_kwargs={"use_safetensors": True})  # never a pickle
        if "SequenceClassification" in str(getattr(model.config, "architectures", None)):
            raise UserError("a cross-encoder: use --cross_encoder")
        if model.similarity_fn_name not in ("cosine", "dot"):
            raise UserError(f"its similarity is {model.similarity_fn_name}, neither cosine nor dot")
        if isinstance(model.tokenizer, Tokenizer):  # a static embedding model
            if args.max_length:
                model.tokenizer.enable_truncation(args.max_length)
        else:
            set_max_length(model, args.max_length, "max_length")
        dims, model.truncate_dim = args.truncate_dim or model.truncate_dim, None  # the cache keeps whole vectors
        if (dims or 0) > model.get_embedding_dimension():
            raise UserError(f"--truncate_dim {dims}: it has {model.get_embedding_dimension()} dimensions")
        sides = ("query",), ("document", "passage", "corpus")
        own = [next((model.prompts[name] for name in names if model.prompts.get(name)), "") for names in sides]
        prompts = [args.prompts[0], args.prompts[-1]] if args.prompts else own
        if any(prompts) and any(isinstance(module, Pooling) and not module.include_prompt for module in model):
            raise UserError("leaves its prompt out of the pooling, which is not supported: pass --prompts ''")
    return model.eval(), dims, prompts


def load_cross_encoder(path, args):
    """Return a CrossEncoder on the CPU, which gives a pair one score."""
    with user_errors(f"--cross_encoder {path}"):
        config = transformers.AutoConfig.from_pretrained(path)
        if "SequenceClassification" not in str(config.architectures):
            raise UserError("not a cross-encoder: train_cross_encoder.py trains one")
        model = CrossEncoder(path, device="cpu", model_kwargs={"use_safetensors": True})
        if (found := (len(model), model.num_labels, model.default_prompt_name)) != (1, 1, None):
            raise UserError("{} modules, {} labels and default prompt {}, not 1, 1 and None".format(*found))
        set_max_length(model, args.rerank_max_length, "rerank_max_length")
    return model.eval()


def set_max_length(model, length, name):
    """Truncate texts, and of a pair the longer text first, as sentence-transformers does."""
    limit = getattr(model.config, "max_position_embeddings", None) or math.inf
    model.max_seq_length = length or model.max_seq_length
    if model.max_seq_length > limit:
        raise UserError(f"--{name} {model.max_seq_length}: the model has positions for {limit} tokens")
    model.tokenizer.backend_tokenizer.no_padding()  # here, not at each call: two threads use the tokenizer
    model.tokenizer.backend_tokenizer.enable_truncation(model.max_seq_length)


def model_fingerprint(model, precision, dtype):
    """Return a hash of all that makes a vector of a text: weights, tokenizer, modules, length, precision, dtype."""
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
    """Vectors of texts by a bi-encoder: from the cache, or else encoded and stored. Each process has its own chunks;
    a text that two of them encounter at the same time is encoded by both."""

    unit, verb = "texts", "encoded"

    def __init__(self, path, args, accelerator):
        self.path, self.accelerator, self.meter, self.bar = path, accelerator, Counter(), tqdm(disable=True)
        with self.clock("load"):
            shape = self.load(args)  # (dimensions, dtype) of the cached vectors
            self.fingerprint = model_fingerprint(self.model, accelerator.mixed_precision, shape[1])
            self.model.to(accelerator.device)
        self.longest = 6 * (self.model.max_seq_length or math.inf)  # characters, of which few texts need more
        default = 2048 if accelerator.device.type == "cpu" else 16_384
        default = 2**20 if isinstance(self.model.tokenizer, Tokenizer) else default
        self.max_tokens = args.micro_batch_tokens or default
        folder = Path(args.cache_dir).expanduser() / self.fingerprint
        self.cache = EmbeddingCache(folder, path, *shape, args.cache_size_limit)

    def load(self, args):
        self.model, self.dims, self.prompts = load_bi_encoder(self.path, args)
        return self.model.get_embedding_dimension(), args.cache_dtype

    @contextmanager
    def clock(self, stage):
        """Add the time spent within to that of a stage."""
        started = time.perf_counter()
        yield
        self.meter[f"{stage} seconds"] += time.perf_counter() - started

    def timed(self, iterator, stage):
        """Yield the items, adding the time spent to wait for them to that of a stage."""
        while True:
            with self.clock(stage):
                item = next(iterator, None)
            if item is None:
                return
            yield item

    def open_bar(self, name, rows):
        """Show the progress of this process; in a log a line every ten seconds."""
        options = {} if sys.stderr.isatty() else {"mininterval": 10, "ncols": 80}
        self.bar = Bar(total=rows, unit=f" {self.unit}", desc=name, delay=1, **options,
                       disable=not self.accelerator.is_main_process)  # fmt: skip

    def sizes(self, texts):
        return pc.utf8_length(texts).to_numpy()

    def micro_batches(self, texts):
        return make_micro_batches(texts.to_pylist(), self.model, self.max_tokens, self.accelerator.device)

    def forward(self, features):
        return encode(self.model, features, self.accelerator)

    def __call__(self, chunk):
        """Return (n, D) vectors of a chunk, as cached: float32 or --cache_dtype."""
        with self.clock("lookup"):
            rows, found = self.cache.lookup(chunk.hashes)
        new = np.flatnonzero(~found)
        codes, digests = pd.factorize(np.array(chunk.hashes[new].view("V16").ravel().tolist() + [None], object)[:-1])
        self.meter.update(total=len(found), new=len(digests))
        self.bar.update(len(found) - len(new))
        if len(new):
            texts = chunk.texts.take(new[np.unique(codes, return_index=True)[1]])  # each once, in order
            with self.clock(self.verb):
                vectors = self.compute(texts)
            with self.clock("store"):
                packed = self.cache.pack(vectors)[codes]
                self.cache.store(chunk.hashes[new], packed)
            rows[new] = packed
        return torch.from_numpy(self.cache.unpack(rows))

    @torch.inference_mode()
    def compute(self, texts):
        """Return (n, D) float32 vectors of texts, tokenized in the background by groups of similar length."""
        sizes = np.minimum(self.sizes(texts), self.longest) + 1
        order = np.argsort(-sizes, kind="stable")
        ends = np.flatnonzero(np.diff(np.cumsum(sizes[order]) // (16 * self.max_tokens)))  # some four micro-batches
        groups, outputs, indices = np.split(order, ends + 1), [], []
        ready = (self.micro_batches(texts.take(group)) for group in groups)
        for (micro_batches, tokens, padded), group in zip(prefetch(ready), groups):
            for features, cut in micro_batches:
                with self.accelerator.autocast():
                    outputs.append(self.forward(features))
                indices.append(group[cut])
            self.meter.update(tokens=tokens, padded=padded)
            self.bar.update(len(group))
        vectors = np.empty((len(texts), self.cache.dimensions), np.float32)
        vectors[np.concatenate(indices)] = torch.cat(outputs).cpu().numpy()
        if len(bad := np.flatnonzero(~np.isfinite(vectors).all(1))):
            raise UserError(f"{self.path}: output for {str(texts[bad[0]])[:60]!r} is not finite; check its weights")
        return vectors

    def for_search(self, vectors):
        """Return (n, D) float32 vectors whose dot product is the similarity."""
        vectors = vectors.to(self.accelerator.device).float()[:, : self.dims]
        return F.normalize(vectors, dim=1) if self.model.similarity_fn_name == "cosine" else vectors

    def encode_queries(self, texts, size):
        """Return (Q, D) vectors of all queries for the search, on every process."""
        texts = pa.array([self.prompts[0] + text for text in texts], pa.large_string())
        queries = torch.zeros(len(texts), self.cache.dimensions, device=self.accelerator.device)
        for number, first in enumerate(range(0, len(texts), size)):
            if number % self.accelerator.num_processes == self.accelerator.process_index:
                part = pa.concat_arrays([texts.slice(first, size)])
                queries[first : first + size] = self(Chunk(first, None, part, text_hashes(part))).to(queries)
        return self.for_search(self.accelerator.reduce(queries))

    def metadata(self):
        """Return what metrics.json says of the work done since the last call; called by every process."""
        self.bar.close()
        meter = sum(gather_object([self.meter]), Counter())
        self.meter = Counter()
        seconds = {name.removesuffix(" seconds"): value for name, value in meter.items() if name.endswith(" seconds")}
        total, new, padded = meter["total"], meter["new"], meter["padded"]
        return {
            "fingerprint": self.fingerprint,
            self.unit: {"total": total, self.verb: new, "cached": total - new},
            "padding_fraction": 1 - meter["tokens"] / padded if padded else 0.0,
            "seconds": {name: round(value / self.accelerator.num_processes, 4) for name, value in seconds.items()},
        }


class CachedScorer(CachedEncoder):
    """Scores of (query, document) pairs by a cross-encoder, as vectors of one dimension: logits, without the sigmoid
    that would make the highest equal."""

    unit, verb = "pairs", "scored"

    def load(self, args):
        self.model = load_cross_encoder(self.path, args)
        return 1, "float32"

    def sizes(self, pairs):
        return sum(pc.utf8_length(part).to_numpy() for part in pairs.flatten())

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

MAX_SCORES = 2**24  # of a tile of scores: 64 MB


class TopK:
    """The best K documents of each query so far; equal scores rank by the order of the corpus."""

    def __init__(self, queries, k):
        self.queries = queries  # (Q, D) float32
        self.scores = torch.full((len(queries), k), -torch.inf, device=queries.device)  # (Q, K), falling
        self.rows = torch.full((len(queries), k), -1, device=queries.device)  # (Q, K) int64, -1: none yet

    def add(self, documents, first, omitted=()):
        """Score (n, D) documents, the first of which is row `first`, later than equal scores of earlier calls.
        omitted: (query, index of a document) pairs that are not to be ranked."""
        omitted = torch.tensor(omitted, device=documents.device, dtype=torch.long).view(-1, 2)
        # The last columns of a product are summed in another order: pad, so that equal documents score equally.
        padded = F.pad(documents, (0, 0, 0, -len(documents) % 64))
        tile = max(1, MAX_SCORES // len(documents))
        for begin in range(0, len(self.queries), tile):
            best, rows = self.scores[begin : begin + tile], self.rows[begin : begin + tile]  # (q, K)
            scores = (self.queries[begin : begin + tile] @ padded.T)[:, : len(documents)]  # (q, n)
            query, document = omitted[(omitted[:, 0] >= begin) & (omitted[:, 0] < begin + len(best))].T
            scores[query - begin, document] = -torch.inf
            # Few documents pass a query's K-th best; only they are sorted. An equal score comes too late.
            passed, k = scores > best[:, -1:], best.shape[1]
            if len(documents) > k and passed.sum(1).max() > 2 * k:  # the first chunks
                passed &= scores >= scores.topk(k).values[:, -1:]  # with all that equal the K-th
            query, document = torch.nonzero(passed, as_tuple=True)
            if len(query):
                counts = torch.bincount(query, minlength=len(best))
                slot = torch.arange(len(query), device=query.device) - (counts.cumsum(0) - counts)[query]
                more = best.new_full((len(best), int(counts.max())), -torch.inf)  # (q, m)
                from_rows = rows.new_full(more.shape, -1)
                more[query, slot], from_rows[query, slot] = scores[query, document], document + first
                self.keep(begin, torch.cat([best, more], 1), torch.cat([rows, from_rows], 1))

    def merge(self, accelerator):
        """Make these the best over all processes, each of which has seen other documents."""
        shape = (accelerator.num_processes, *self.rows.shape)
        scores, rows = (accelerator.gather(t).view(shape).transpose(0, 1).flatten(1) for t in (self.scores, self.rows))
        order = rows.argsort(1)  # corpus order first, for a stable sort to keep among equal scores
        self.keep(0, scores.gather(1, order), rows.gather(1, order))

    def keep(self, begin, scores, rows):
        """Keep the K best of the scores (q, m) of queries `begin` and on."""
        order = scores.argsort(dim=1, descending=True, stable=True)[:, : self.scores.shape[1]]
        self.scores[begin : begin + len(scores)] = scores.gather(1, order)
        self.rows[begin : begin + len(scores)] = rows.gather(1, order)


@dataclass
class Run:
    """The ranked documents of each query, by a model or from a file."""

    name: str
    documents: list  # Q lists of document ids, best first
    scores: list  # Q lists of floats
    metadata: dict  # what metrics.json says of it
    judged: list | None = None  # Q dicts {document id: score} of the judged documents, with --judged
    texts: dict = field(default_factory=dict)  # {document id: text}, in a search


def report_same_id(metadata, names, collection):
    """Add how many queries (`names`: their ids) have their own document left out, and the warnings, to metadata."""
    metadata["same_id_left_out"] = len(names)
    relevant = sum(collection.qrels[name].get(name, 0) > 0 for name in names)
    own = "queries share their id with a document, which is left out of their results; --keep_same_id keeps it"
    judged = "of these documents are judged relevant; if ids coincide by chance, set --keep_same_id"
    metadata["warnings"] += [f"{len(names):,} {own}"] * (len(names) > 0) + [f"{relevant:,} {judged}"] * (relevant > 0)


def read_run(path, name, collection):
    """Return the Run of a file in the order of its scores, equal ones by document id, last first, as in trec_eval."""
    frame = read_trec(path, "run")
    if len(twice := frame[frame.duplicated(["query", "document"])]):
        query, document, _ = twice.iloc[0]
        raise UserError(f"--run {path}: document {document!r} occurs twice for query {query!r}")
    judged = frame["query"].isin(collection.query_ids)
    if not judged.any():
        raise UserError(f"--run {path}: ranks documents for none of the judged queries, such as "
                        f"{collection.query_ids[0]!r}; it has {frame['query'].iloc[0]!r}")  # fmt: skip
    others, frame = frame.loc[~judged, "query"].nunique(), frame[judged]
    same = frame["query"] == frame["document"] if collection.omit_same_id else np.zeros(len(frame), bool)
    own, frame = frame.loc[same, "query"], frame[~same].sort_values(["score", "document"], ascending=False)
    found = frame.groupby("query").agg(list)
    empty = len(collection.query_ids) - len(set(found.index) | set(own))
    warnings = [f"{others:,} queries of {path} are not judged, or unknown; left out"] * (others > 0)
    warnings += [f"{empty:,} judged queries are not in {path}; they count as 0"] * (empty > 0)
    metadata = {"seconds": {}, "warnings": warnings}
    report_same_id(metadata, list(own), collection)
    ranked = {query: lists for query, *lists in found.itertuples()}
    documents, scores = zip(*(ranked.get(query, ([], [])) for query in collection.query_ids))
    return Run(name, list(documents), list(scores), metadata)


def retrieve(encoder, name, collection, args, accelerator):
    """Return the Run of a bi-encoder over a collection, complete on the main process."""
    queries = encoder.encode_queries(collection.query_texts, args.corpus_chunk_size)
    top = TopK(queries, min(args.top_k, collection.corpus.rows or args.top_k))
    numbers = {name: query for query, name in enumerate(collection.query_ids) if collection.omit_same_id}
    queries_by_doc = defaultdict(list)  # the queries that a document is judged for
    for query, documents in enumerate(judged_ids(collection)):
        for document in documents:
            queries_by_doc[document].append(query)
    query_ids, judged = (pa.array(names, pa.large_string()) for names in (numbers, queries_by_doc))
    found, same_id = Counter(), set()  # how often each judged document occurs; queries with a document of their id
    kept, judged_scores = {}, [{} for _ in collection.query_ids]  # {row: (id, text)} of the best documents so far

    # The chunks of this process
    process = accelerator.process_index, accelerator.num_processes
    encoder.open_bar(f"{name} {collection.name}", collection.corpus.rows)
    for chunk in encoder.timed(prefetch(collection.corpus.chunks(encoder.prompts[1], *process)), "read"):
        vectors = encoder(chunk)
        with encoder.clock("search"):
            vectors = encoder.for_search(vectors)
            omitted = [(numbers[chunk.ids[row].as_py()], row) for row in rows_of(chunk.ids, query_ids)]
            same_id.update(query for query, _ in omitted)
            top.add(vectors, chunk.first, omitted)
            rows = top.rows[top.rows >= chunk.first].unique().cpu().numpy() - chunk.first
            texts = chunk.texts.take(rows).to_pylist() if args.query else [""] * len(rows)
            kept.update(zip((rows + chunk.first).tolist(), zip(chunk.ids.take(rows).to_pylist(), texts)))
            if len(kept) > 4 * top.rows.numel():  # most are no longer among the best
                kept = {row: kept[row] for row in top.rows.unique().tolist() if row >= 0}
            for row in rows_of(chunk.ids, judged):
                document = chunk.ids[row].as_py()
                found[document] += 1
                if args.judged:
                    values = (queries[queries_by_doc[document]] @ vectors[row]).tolist()
                    for query, value in zip(queries_by_doc[document], values):
                        judged_scores[query][document] = max(value, judged_scores[query].get(document, value))

    # The best over all processes, by their ids
    with encoder.clock("search"):
        top.merge(accelerator)
    metadata = encoder.metadata()
    parts = gather_object([(kept, found, same_id, judged_scores, collection.corpus.empty)])
    kept = {row: item for part in parts for row, item in part[0].items()}
    found, empty = sum((part[1] for part in parts), Counter()), sum(part[4] for part in parts)
    judged_scores = merge_scores([part[3] for part in parts]) if args.judged else None
    documents, scores, repeated = [], [], {name for name, count in found.items() if count > 1}
    for rows, values in zip(top.rows.tolist(), top.scores.tolist()):
        best = {}
        for row, value in zip(rows, values):
            if row >= 0 and best.setdefault(kept[row][0], value) is not value:
                repeated.add(kept[row][0])
        documents.append(list(best))
        scores.append(list(best.values()))
    missing = len(queries_by_doc) - len(found)
    counts = {"ids occur at several documents; each counts once, with its best score": len(repeated),
              "judged documents are not in the corpus; they count as not found": missing,
              "documents are empty; encoded as the empty string": empty}  # fmt: skip
    metadata["warnings"] = [f"{count:,} {what}" for what, count in counts.items() if count]
    metadata["warnings"] += ["--cache_size_limit is reached: what does not fit is computed again"] * encoder.cache.full
    report_same_id(
        metadata, [collection.query_ids[query] for query in set().union(*(p[2] for p in parts))], collection
    )
    texts = {document: text[len(encoder.prompts[1]) :] for document, text in kept.values()} if args.query else {}
    return Run(name, documents, scores, metadata, judged_scores, texts)


def judged_ids(collection):
    """Return Q lists of the ids of the judged documents, but the query's own where that is left out."""
    omitted = collection.query_ids if collection.omit_same_id else [None] * len(collection.query_ids)
    judged = (collection.qrels.get(query, ()) for query in collection.query_ids)
    return [[document for document in known if document != own] for known, own in zip(judged, omitted)]


def rows_of(ids, requested):
    """Return the rows of an Arrow array of ids that are among the requested ones, another Arrow array."""
    return np.flatnonzero(pc.is_in(ids, requested).to_numpy(zero_copy_only=False)).tolist()


def rerank(run, scorer, collection, args, accelerator):
    """Return the Run with the first --rerank_k documents of each query in the order of a cross-encoder's scores.
    The documents after them stay behind, in their order, so that deeper measures lose nothing."""
    judged = judged_ids(collection) if args.judged else [[]] * len(run.documents)
    queries_by_doc = defaultdict(list)
    for query, (documents, others) in enumerate(zip(run.documents, judged)):
        for document in dict.fromkeys([*documents[: args.rerank_k], *others]):
            queries_by_doc[document].append(query)
    scorer.open_bar(f"{run.name} {scorer.path}", sum(map(len, queries_by_doc.values())))
    scores = [{} for _ in run.documents]
    pairs = prefetch(candidate_pairs(queries_by_doc, collection, accelerator))
    while part := list(islice(pairs, args.corpus_chunk_size)):
        queries, names, documents, hashes = zip(*part)
        columns = [[collection.query_texts[query] for query in queries], documents]
        columns = [pa.array(column, pa.large_string()) for column in columns]
        structs = pa.StructArray.from_arrays(columns, ["query", "document"])
        chunk = Chunk(0, None, structs, np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 2))
        for query, name, value in zip(queries, names, scorer(chunk)[:, 0].tolist()):
            scores[query][name] = max(value, scores[query].get(name, value))  # an id may occur twice
    metadata = scorer.metadata()
    scores = merge_scores(gather_object([scores]))
    documents, values = [], []
    for known, before in zip(scores, run.documents):
        order = sorted((name for name in before[: args.rerank_k] if name in known), key=known.get, reverse=True)
        behind = [name for name in before if name not in order]
        documents.append(order + behind)
        lowest = known[order[-1]] if order else 0.0
        values.append([known[name] for name in order] + [lowest - place for place in range(1, len(behind) + 1)])
    missing = len(queries_by_doc) - len(set().union(*scores))
    metadata["warnings"] = [f"{missing:,} documents to rerank are not in the corpus; they stay behind"] * (missing > 0)
    metadata["same_id_left_out"] = run.metadata["same_id_left_out"]
    judged = [{name: known[name] for name in names if name in known} for names, known in zip(judged, scores)]
    name = f"{run.name}+{short_names([scorer.path])[0]}"
    return Run(name, documents, values, metadata, judged if args.judged else None, run.texts)


def candidate_pairs(queries_by_doc, collection, accelerator):
    """Yield (query number, document id, document, hash of both texts) of the chunks of this process."""
    queries = text_hashes(pa.array(collection.query_texts, pa.large_string()))  # (Q, 2)
    requested = pa.array(queries_by_doc, pa.large_string())
    for chunk in collection.corpus.chunks("", accelerator.process_index, accelerator.num_processes):
        for row in rows_of(chunk.ids, requested):
            name, text = chunk.ids[row].as_py(), chunk.texts[row].as_py()
            for query in queries_by_doc[name]:
                both = queries[query].tobytes() + chunk.hashes[row].tobytes()
                yield query, name, text, hashlib.blake2b(both, digest_size=16).digest()


def merge_scores(parts):
    """Return Q dicts {document id: score}, the best of those of all processes: an id may occur twice."""
    merged = [{} for _ in parts[0]]
    for query, known in chain.from_iterable(map(enumerate, parts)):
        for name, value in known.items():
            merged[query][name] = max(value, merged[query].get(name, value))
    return merged


def bm25_run(collection, args):
    """Return the Run of BM25 (Robertson and Zaragoza 2009; bm25s' default, Lucene's variant), its corpus in memory."""
    started = time.perf_counter()
    chunks = list(collection.corpus.chunks())
    ids = pa.concat_arrays([chunk.ids for chunk in chunks]).to_pylist()
    texts = pa.concat_arrays([chunk.texts for chunk in chunks]).to_pylist()
    with user_errors("--bm25 requires the package bm25s, and words in the corpus"):
        import bm25s  # optional

        options = {"stopwords": "en", "return_ids": False, "show_progress": False}
        words, queries = (bm25s.tokenize(part, **options) for part in (texts, collection.query_texts))
        index = bm25s.BM25()
        index.index(words, show_progress=False)
    names = set(collection.query_ids) if collection.omit_same_id else set()
    same = Counter(name for name in ids if name in names)
    depth = min(args.top_k + max(same.values(), default=0), len(ids))  # room for a query's own documents
    rows, scores = index.retrieve(queries, k=depth, show_progress=False)
    hits = [{} for _ in queries]
    for query, hit, *found in zip(collection.query_ids, hits, rows.tolist(), scores.tolist()):
        for row, value in zip(*found):
            if value > 0 and len(hit) < args.top_k and not (ids[row] == query and query in names):
                hit.setdefault(ids[row], value)  # an id that occurs twice keeps its best score
    metadata = {"seconds": {"search": round(time.perf_counter() - started, 4)}, "warnings": []}
    report_same_id(metadata, list(same), collection)
    return Run("BM25", [list(hit) for hit in hits], [list(hit.values()) for hit in hits], metadata)


# ---- vectors for other programs


def export_vectors(encoder, collection, args, accelerator):
    """Write a Parquet shard of (_id, vector) for each chunk, and at the end _vectors.json, which describes them. The
    underscore hides it from what reads a folder of Parquet. An export that was killed starts again, from the cache."""
    folder, corpus, model = Path(args.export_vectors), collection.corpus, encoder.model
    length, similarity = args.max_length or model.max_seq_length, model.similarity_fn_name
    metadata = {"model": encoder.path, "fingerprint": encoder.fingerprint, "query_prompt": encoder.prompts[0],
                "document_prompt": encoder.prompts[1], "max_length": None if length == math.inf else length,
                "dimensions": encoder.dims or encoder.cache.dimensions, "dtype": "float32", "similarity": similarity,
                "normalized": similarity == "cosine", "corpus": args.corpus or args.pairs or args.beir,
                "columns": [corpus.id_column, *corpus.text_columns]}  # fmt: skip
    with user_errors(f"--export_vectors {folder}: not written, choose an empty folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir()) if accelerator.is_main_process else ():
            if not re.fullmatch(r"vectors-\d{12}\.parquet(\.part)?|_vectors\.json", path.name):
                raise UserError(f"{path.name} is of no export")
            before = json.loads(path.read_text()) if path.suffix == ".json" else metadata
            if other := [name for name in metadata if before.get(name) != metadata[name]]:
                raise UserError(f"it contains an export of another {', another '.join(other)}")
            path.unlink()
        accelerator.wait_for_everyone()
        encoder.open_bar(encoder.path, corpus.rows)
        rows, process = 0, (accelerator.process_index, accelerator.num_processes)
        for chunk in encoder.timed(prefetch(corpus.chunks(encoder.prompts[1], *process)), "read"):
            vectors = encoder.for_search(encoder(chunk)).cpu().numpy()
            columns = {"_id": chunk.ids.cast(pa.string())}
            columns["vector"] = pa.FixedSizeListArray.from_arrays(vectors.reshape(-1), vectors.shape[1])
            shard = folder / f"vectors-{chunk.first:012}.parquet"
            options = {
                "compression": "none",
                "use_dictionary": False,
                "write_statistics": False,
            }  # floats do not shrink
            pq.write_table(pa.table(columns), f"{shard}.part", **options)
            os.rename(f"{shard}.part", shard)
            rows += len(chunk.ids)
        work, rows = encoder.metadata(), sum(gather_object([rows]))
        if accelerator.is_main_process:
            metadata |= {"rows": rows, "command": shlex.join(sys.argv)}
            (folder / "_vectors.json").write_text(json.dumps(metadata, indent=1))
            print(f"{work['texts']['encoded']:,} of {rows:,} texts encoded; their vectors are in {folder}")


# ---- measures


def compute_metrics(run, collection, measures):
    """Return {measure: (Q,) values} of a Run, by ir_measures. As in trec_eval, a document without judgment is not
    relevant, and equal scores rank by document id, last first."""
    # Some providers of ir_measures rank equal scores otherwise than trec_eval; ranks for scores leave no ties.
    ranks = {query: {document: -float(rank) for rank, (_, document) in enumerate(sorted(zip(*found), reverse=True))}
             for query, *found in zip(collection.query_ids, run.scores, run.documents)}  # fmt: skip
    parsed = {name: ir_measures.parse_measure(name) for name in measures}  # two names may mean one measure
    values = defaultdict(dict)
    for value in ir_measures.iter_calc(list(dict.fromkeys(parsed.values())), collection.qrels, ranks):
        values[value.measure][value.query_id] = value.value
    return {name: np.array([values[measure].get(query, 0.0) for query in ranks]) for name, measure in parsed.items()}


def bootstrap_interval(samples):
    """Return (low, high), the 95 % bootstrap interval of the mean over samples (collections) of their means over
    queries, which are drawn within samples (Efron and Tibshirani 1993, percentile)."""
    if all(len(values) < 2 or np.ptp(values) == 0 for values in samples):
        return (float(np.mean([values.mean() for values in samples])),) * 2

    def mean(*drawn, axis):
        return np.mean([values.mean(axis) for values in drawn], axis=0)

    samples = [np.repeat(values, 2) if len(values) == 1 else values for values in samples]
    batch = max(1, 2**22 // max(map(len, samples)))
    found = bootstrap(samples, mean, n_resamples=9999, batch=batch, method="percentile", vectorized=True, rng=0)
    return tuple(map(float, found.confidence_interval))


def paired_randomization_p(samples, others):
    """Return the two-sided p of the paired randomization test on the difference of the means (Smucker et al. 2007)."""
    differences = np.concatenate([(a - b) / len(a) for a, b in zip(samples, others)])
    if len(differences) < 2 or not differences.any():
        return 1.0
    test = permutation_test((differences, np.zeros_like(differences)), lambda a, b, axis: (a - b).sum(axis),
                            permutation_type="samples", vectorized=True, n_resamples=9999,
                            batch=max(1, 2**22 // len(differences)), rng=0)  # fmt: skip
    return float(test.pvalue)


def summarize(values, args):
    """Return for each ranking {measure: {mean, low, high, difference and p}} over some collections; difference and p
    are to the first ranking. values: for each collection and ranking {measure: (Q,)}."""
    table, first = [], [rankings[0] for rankings in values]
    for number in range(len(values[0])):
        table.append({})
        for name in args.metrics:
            samples, others = ([v[name] for v in part] for part in ([rankings[number] for rankings in values], first))
            mean, baseline = (float(np.mean([sample.mean() for sample in part])) for part in (samples, others))
            low, high = bootstrap_interval(samples)
            table[-1][name] = {"mean": mean, "low": low, "high": high}
            if number:
                table[-1][name] |= {"difference": mean - baseline, "p": paired_randomization_p(samples, others)}
    return table


# ---- report


def short_names(paths):
    """Return a short name of each model, run file or collection, all different: RUN for RUN/model and RUN/run.trec."""
    parts = [re.sub(r"/(model|run\.trec)?$", "", path).split("/") for path in paths]
    names = [part[-1] for part in parts]
    if len(set(names)) < len(names):
        names = ["_".join(part[-2:]) for part in parts]
    return [name if names.count(name) == 1 else f"{name}_{i + 1}" for i, name in enumerate(names)]


def write_trec(path, name, query_ids, rankings):
    """Write Q lists of (document id, score), best first, as a TREC run file."""
    with open(path, "w") as file:
        for query, ranked in zip(query_ids, rankings):
            for rank, (document, value) in enumerate(ranked, start=1):
                fields = query, "Q0", document, str(rank), f"{value:.9g}", name
                file.write(" ".join(re.sub(r"\s", "_", field) for field in fields) + "\n")


def evaluation_of(args):
    """Return what tells evaluations in the same --output_dir apart."""
    names = """beir split corpus queries qrels pairs columns keep_same_id model_name_or_path run bm25 cross_encoder
    max_length rerank_max_length prompts truncate_dim"""
    return {name: getattr(args, name) for name in names.split()}


def check_output(args):
    """Raise UserError if --output_dir has the results of another evaluation, or cannot be written."""
    with user_errors(f"--output_dir {args.output_dir}"):
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            before = json.loads(Path(args.output_dir, "metrics.json").read_text())["evaluation"]
            if other := [
                f"--{name} {before[name]}" for name, value in evaluation_of(args).items() if before[name] != value
            ]:
                raise UserError(f"contains the results of {', '.join(other)}: choose another folder")


def write_results(collections, runs, args):
    """Write metrics.json, report.png and the files of each ranking into --output_dir, and print the table.
    runs: for each collection the Runs to compare, which have the same names."""
    output, names, results = Path(args.output_dir), [run.name for run in runs[0]], []
    values = [[compute_metrics(run, collection, args.metrics) for run in found]
              for collection, found in zip(collections, runs)]  # fmt: skip
    tables = {collection.name: summarize([found], args) for collection, found in zip(collections, values)}
    for collection, found, columns in zip(collections, runs, values):
        for number, (run, column) in enumerate(zip(found, columns)):
            results.append({"collection": collection.name, "name": run.name, "queries": len(collection.query_ids),
                            "metrics": tables[collection.name][number], **run.metadata})  # fmt: skip
            folder = output.joinpath(*[collection.name] * (len(runs) > 1), *[run.name] * (len(found) > 1))
            folder.mkdir(parents=True, exist_ok=True)
            write_trec(folder / "run.trec", run.name, collection.query_ids, map(zip, run.documents, run.scores))
            if run.judged is not None:
                ranked = (sorted(known.items(), key=lambda item: -item[1]) for known in run.judged)
                write_trec(folder / "judged.trec", run.name, collection.query_ids, ranked)
            pd.DataFrame({"query": collection.query_ids, **column}).to_csv(folder / "per_query.csv", index=False)
    record = {"evaluation": evaluation_of(args), "results": results}
    if len(collections) > 1:
        tables["mean"] = summarize(values, args)
        record["means"] = dict(zip(names, tables["mean"]))
    (output / "metrics.json").write_text(json.dumps(record, indent=1))
    plot_report(collections, runs, tables, args, output / "report.png")

    first = args.metrics[0]
    columns = {name: [row[first] for row in table] for name, table in tables.items()}
    if len(collections) == 1:
        columns = {name: [row[name] for row in tables[collections[0].name]] for name in args.metrics}
    width = max(map(len, [*names, first]))
    print(f"\n{first * (len(runs) > 1):{width}}" + "".join(f"  {name:>24}" for name in columns))
    for number, name in enumerate(names):
        cells = [column[number] for column in columns.values()]
        means = ["{mean:.4f} [{low:.4f}, {high:.4f}]".format(**cell) for cell in cells]
        print(f"{name:{width}}" + "".join(f"  {cell:>24}" for cell in means))
        if number:
            means = ["{difference:+.4f}, p = {p:.4f}".format(**cell) for cell in cells]
            print(" " * width + "".join(f"  {cell:>24}" for cell in means))
    for result in results:
        for unit, verb in (("texts", "encoded"), ("pairs", "scored")):
            if counts := result.get(unit):
                stages = ", ".join(f"{name} {value:.1f}" for name, value in result["seconds"].items() if value >= 0.05)
                title = f"{result['collection']}, {result['name']}"
                print(f"{title}: {counts[verb]:,} of {counts['total']:,} {unit} {verb}; seconds: {stages}")
    print(f"{sum(len(c.query_ids) for c in collections):,} queries; metrics.json and report.png are in {output}")


def plot_report(collections, runs, tables, args, path):
    """Plot the first measure with its intervals, recall by depth, where the vectors came from, and the seconds."""
    names, figure = [run.name for run in runs[0]], Figure(figsize=(18, 4), layout="constrained")
    axes, rows = figure.subplots(1, 4), range(len(names))
    cells = pd.DataFrame({name: [row[args.metrics[0]] for row in table] for name, table in tables.items()}, names).T
    means, lows, highs = (cells.map(lambda cell: cell[part]) for part in ("mean", "low", "high"))  # noqa: B023
    errors = np.stack([(means - lows).T, (highs - means).T], 1)  # (rankings, 2, collections)
    means.plot.bar(ax=axes[0], yerr=errors, rot=0, ylabel=args.metrics[0], ylim=(0, 1))
    depth = max(len(documents) for found in runs for run in found for documents in run.documents)
    for number in rows:
        recalls = []
        for collection, found in zip(collections, runs):
            for query, documents in zip(collection.query_ids, found[number].documents):
                relevant = {document for document, grade in collection.qrels[query].items() if grade > 0}
                hits = np.zeros(depth)
                hits[: len(documents)] = [document in relevant for document in documents]
                recalls += [hits.cumsum() / len(relevant)] if relevant else []
        axes[1].plot(range(1, depth + 1), np.mean(recalls, 0) if recalls else np.zeros(depth), label=names[number])
    axes[1].set(xscale="log", xlabel="k", ylabel="recall@k", ylim=(0, 1))
    axes[1].legend()
    for axis, part, label in (
        (axes[2], "counts", "texts, or pairs of a cross-encoder"),
        (axes[3], "seconds", "seconds"),
    ):
        sums = []
        for number in rows:
            total = Counter()
            for metadata in (found[number].metadata for found in runs):
                counts = metadata.get("texts") or metadata.get("pairs") or {}
                total.update(
                    {k: v for k, v in counts.items() if k != "total"} if part == "counts" else metadata["seconds"]
                )
            sums.append(total)
        if any(sums):
            pd.DataFrame(sums, names).fillna(0).plot.barh(ax=axis, stacked=True, xlabel=label)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def print_hits(run, collection):
    """Print the best ten documents of each query, with their scores."""
    width = max(60, shutil.get_terminal_size((120, 24)).columns)
    for query, documents, scores in zip(collection.query_texts, run.documents, run.scores):
        print(f"\n{query}")
        for name, value in list(zip(documents, scores))[:10]:
            print(f"  {value:6.3f}  {name:>8}  {' '.join(run.texts[name].split())}"[:width])


def main(args):
    if args.cache_info or args.cache_clear:
        return manage_cache(args) if int(os.environ.get("RANK", 0)) == 0 else None
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # else several processes on CPUs would not find one another
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=30))],
    )
    transformers.utils.logging.disable_progress_bar()  # of each small file that is loaded
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each load of a local file asks the Hub
    evaluating = not args.query and args.export_vectors is None
    if evaluating:
        check_output(args)
    sources = args.beir or [(args.corpus or args.pairs)[0]]
    collections = [open_collection(*pair, args) for pair in zip(short_names(sources), args.beir or [None])]

    # ---- rankings: for each collection those of the runs and the bi-encoders, then the same reranked
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
    accelerator.end_training()  # BM25 and the report may take the main process long
    if not main_process:
        return
    if args.bm25:
        for collection, found in zip(collections, runs):
            found.append(bm25_run(collection, args))
    for collection, found in zip(collections, runs):
        for warning in dict.fromkeys(chain(collection.warnings, *(run.metadata["warnings"] for run in found))):
            print(f"warning: {collection.name}: {warning}", file=sys.stderr)
    if args.query:
        print_hits(runs[0][-1], collections[0])
    else:
        with user_errors(f"--output_dir {args.output_dir}: not written, the vectors are cached"):
            write_results(collections, runs, args)


if __name__ == "__main__":
    status = 0
    try:
        main(parse_args(sys.argv[1:]))
    except UserError as error:
        traceback.clear_frames(error.__traceback__)  # ends the line of a progress bar
        # Every process meets the same error; the first one reports it, and the others only if that one has not.
        time.sleep(5 if int(os.environ.get("RANK", 0)) else 0)
        print(f"error: {error}", file=sys.stderr)
        status = 1
    sys.stdout.flush()
    os._exit(status)  # pyarrow threads that still read ahead can hang or abort a normal exit (apache/arrow 45214)
