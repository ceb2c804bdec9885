"""Evaluate bi-encoders and rerankers on retrieval, over corpora of any size, with a cache of all embeddings.

    python eval_incremental.py --model_name_or_path BAAI/bge-base-en-v1.5 runs/bge/model --beir scifact nfcorpus
    python eval_incremental.py --model_name_or_path runs/bge/model --beir scifact --query "vitamin D"       # search
    python eval_incremental.py --beir scifact --run bm25.run --cross_encoder runs/cross_encoder/model       # rerank
    python eval_incremental.py --annotate x.jsonl --columns query positive --cross_encoder MODEL --output y.jsonl
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml eval_incremental.py args.yaml

A collection is --pairs, or a corpus, queries and judgments (qrels), each by its own flag or in BEIR's layout:

    corpus.jsonl   {"_id": "4983", "title": "Microstructural ...", "text": "Alterations of ..."}
    queries.jsonl  {"_id": "1", "text": "0-dimensional biomaterials lack ..."}
    qrels/test.tsv query-id <tab> corpus-id <tab> score

The corpus is read in chunks: vectors are taken from the cache, or encoded and stored, and the best documents of each
query are updated. Memory is bounded by the chunk, the queries, the judgments and 12 bytes for each ranked document;
--pairs and --bm25 hold all texts. Search is exact; rerun the command to resume a killed run. Vectors are cached by
their text and a fingerprint of the model. A cross-encoder can rerank the best documents of each query; its scores are
cached in the same way, by query and document.

Output: metrics.json, texts for report.py, and for each ranking run.trec and per_query.csv.
Left out on purpose: approximate search, similarities other than cosine and dot product.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate>=1.12,<2", "backports.zstd>=1,<2; python_version < '3.14'", "datasets>=5.2,<6",
#   "diskcache>=5.6.3,<6", "evaluate>=0.4.6,<0.5", "filelock>=3.16,<5", "fsspec[http]>=2026.1", "ir_measures>=0.4,<1",
#   "numpy>=2.2,<3", "pandas>=3.1,<4", "pyarrow>=24,<27", "pyyaml>=6.0.1,<7", "scipy>=1.14,<2",
#   "sentence-transformers>=6.2,<7", "torch>=2.9,<3", "tqdm>=4.67,<5", "transformers>=5.18,<6", "xxhash>=3.5,<5"]
# ///

import copy
import csv
import ctypes
import gc
import glob
import hashlib
import inspect
import io
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain, islice, product
from pathlib import Path
from typing import Literal

import transformers

# Shapes: Q queries, n documents of a chunk, D embedding dimensions, K results of a query (--top_k), P processes.

# ---- options

ABOVE_ZERO = "rerank_k rerank_max_length max_length truncate_dim micro_batch_tokens corpus_chunk_size top_k"


def flag(default, help):
    """Return the dataclass field of a command-line option."""
    kind = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**kind, metadata={"help": help})


def collection_entry(text):
    """Return an entry of --beir: a path or, from JSON, {"path": path, flag of its own: value}."""
    return dict(json.loads(text)) if text.startswith("{") else text


@dataclass
class Args:
    # data
    beir: list[collection_entry] = flag(
        [],
        "folders or Hub ids of collections in the layout of BEIR, NanoBEIR or MTEB; or JSON of a path and flags of "
        'its own: {"path": "scifact", "split": "train", "query_prompt": "Find the proof: "}',
    )
    split: str = flag("test", "split of the judgments of --beir, or one collection of many")
    corpus: list[str] = flag([], "sources of the documents, instead of --beir: paths, globs, folders, URLs, Hub ids")
    queries: list[str] = flag([], "sources of the queries of --corpus")
    qrels: str | None = flag(None, "judgments of --corpus: TREC qrels, or query, document and grade")
    corpus_columns: list[str] = flag([], "id column (# for the row number), then text columns; none: _id title text")
    query_columns: list[str] = flag([], "the same for the queries; none: _id text")
    pairs: list[str] = flag([], "sources of (query, document) rows, instead of --beir and --corpus")
    columns: list[str] = flag([], "query and document column of --pairs; of --annotate, query and all documents")
    keep_same_id: bool = flag(False, "also rank the document with the query's own id, which BEIR excludes")
    streaming: bool = flag(False, "read the corpus front to back, without first converting it to a mapped table")
    # rankings
    model_name_or_path: list[str] = flag([], "bi-encoders to compare")
    run: list[str] = flag([], "rankings to evaluate or rerank, in TREC format: query Q0 document rank score tag")
    bm25: bool = flag(False, "also rank by BM25 (requires bm25s, and the corpus in memory)")
    fuse: Literal["rrf", "zscore"] | None = flag(
        None, "also fuse all rankings of the call: by reciprocal ranks (without a value), or by standardized scores"
    )
    cross_encoder: str | None = flag(
        None, "model that reranks the rankings of the bi-encoders, --run, --bm25 and --fuse"
    )
    rerank_k: int | None = flag(None, "documents to rerank per query, 100 if there are as many; the others rank below")
    rerank_max_length: int | None = flag(None, "tokens a pair is truncated to; None: the model's own")
    top_k: int | None = flag(
        None, "documents ranked for each query; None: 100, or what --metrics and --rerank_k require; of --query 10"
    )
    query: list[str] = flag([], "print the best documents for these texts instead of evaluating")
    annotate: list[str] = flag([], "sources of rows to write with scores of their documents instead of evaluating")
    trust_remote_code: bool = flag(False, "run the code that a model's folder or repository contains: SECURITY.md")
    # embeddings
    max_length: int | None = flag(None, "tokens a text is truncated to; None: the model's own")
    query_prompt: str | None = flag(None, "prefix of queries; None: the model's own")
    document_prompt: str | None = flag(None, "prefix of documents; None: the model's own")
    truncate_dim: int | None = flag(None, "search with only this many leading dimensions, for Matryoshka models")
    micro_batch_tokens: int | None = flag(None, "tokens of a forward pass; None: 4,096 on a CPU, else 32,768")
    dataloader_num_workers: int | None = flag(
        None, "processes that tokenize; 0: none; None: 0 (CPU), half of the cores of a process (GPU)"
    )
    corpus_chunk_size: int = flag(4096, "documents per chunk, at most; a killed run loses a chunk per process")
    cache_dir: str = flag("~/.cache/evenstep/embeddings", "folder of the embedding caches, one for each model")
    cache_dtype: Literal["float32", "float16", "int8"] = flag(
        "float32", "of stored vectors; the others reorder near ties"
    )
    cache_size_limit: float = flag(0, "GB per model's cache; beyond that the oldest vectors are removed; 0: no limit")
    cache_info: bool = flag(False, "list the models in --cache_dir, and exit")
    cache_clear: str | None = flag(None, "remove a model's caches (path, or first 6 characters of fingerprint)")
    # output
    metrics: list[str] = flag(
        ["nDCG@10", "RR@10", "R@100", "AP@100"],
        "of ir_measures (without a cutoff: of the 1,000 documents that are searched), or scripts of `evaluate`: my.py",
    )
    export_vectors: str | None = flag(None, "write the corpus vectors to this new folder as Parquet shards instead")
    output: str | None = flag(None, "new file of --annotate, .jsonl or .parquet, or of the hits of --query, .jsonl")
    output_dir: str | None = flag(
        None, "folder for the results; None: runs/eval/COLLECTION_RANKING_DIGEST, of these flags"
    )
    order: list[str] = field(default_factory=list, init=False)  # of --run, --model_name_or_path, --bm25, as written


def check_flags(args):
    """Raise UserError for flags that exclude or require each other."""
    tasks = [name for name in ("query", "export_vectors", "annotate") if getattr(args, name)]
    if len(tasks) > 1:
        raise UserError("--query, --export_vectors, --annotate: give only one of them")
    if tasks and (args.run or args.bm25 or args.fuse or len(args.model_name_or_path) > 1):
        raise UserError(f"--{tasks[0]} takes one --model_name_or_path, and none of --run, --bm25, --fuse")
    for name in args.metrics:
        measure_depth(name)  # fails if it is unknown
    if sum(map(bool, (args.beir, args.corpus, args.pairs, args.annotate))) > 1:
        raise UserError("--beir, --corpus, --pairs, --annotate: give only one of them")
    if args.annotate and (len(args.columns) < 2 or not args.output):
        raise UserError("--annotate requires --output, and --columns: of the query, then of its documents")
    if args.annotate and args.cross_encoder and args.model_name_or_path:
        raise UserError("--annotate takes a --cross_encoder or a --model_name_or_path")
    if not args.annotate and len(args.columns) not in (0, 2):
        raise UserError("--columns takes two names, of queries and documents")
    if args.output and not (args.annotate or args.query):
        raise UserError("--output is the file of --annotate or --query; results are written to --output_dir")
    if args.output and not args.output.endswith((".jsonl", ".parquet") if args.annotate else ".jsonl"):
        raise UserError(f"--output {args.output}: must end in .jsonl{' or .parquet' if args.annotate else ''}")
    if args.output and os.path.exists(args.output):
        raise UserError(f"--output {args.output}: it exists; choose another name")
    files = [bool(args.corpus), bool(args.queries), bool(args.qrels)]
    if any(files) and not (all(files) or (tasks and files == [True, False, False])):
        raise UserError("--corpus, --queries and --qrels belong together, except to --query and --export_vectors")
    if 1 in (len(args.corpus_columns), len(args.query_columns)):
        raise UserError("--corpus_columns and --query_columns take an id column and text columns")
    sources = args.beir or args.corpus or args.pairs or args.annotate
    rankers = args.model_name_or_path or args.run or args.bm25 or (args.annotate and args.cross_encoder)
    if not (sources and rankers or args.cache_info or args.cache_clear):
        raise UserError("requires --beir, --corpus, --pairs or --annotate, and a model, --run or --bm25")
    if args.annotate and args.cross_encoder and (args.max_length or args.query_prompt or args.document_prompt):
        raise UserError("--annotate with a --cross_encoder takes no prompt, and --rerank_max_length, not --max_length")
    if args.fuse and len(args.model_name_or_path) + len(args.run) + args.bm25 < 2:
        raise UserError("--fuse requires two rankings: of --model_name_or_path, --run or --bm25")


def resolve_args(args):
    """Return Args with the values of flags that are not given and depend on others."""
    resolved = copy.copy(args)
    resolved.rerank_k = args.rerank_k or 100
    resolved.top_k = args.top_k or (10 if args.query else 100)
    if not (args.query or args.export_vectors or args.annotate):
        resolved.top_k = max(resolved.top_k, args.rerank_k or 0, *map(measure_depth, args.metrics))
        resolved.output_dir = args.output_dir or default_output(resolved)
    return resolved


def is_script(metric):
    """Return whether a value of --metrics is a file or folder of `evaluate` instead of a measure of ir_measures."""
    return metric.endswith(".py") or os.path.isdir(metric)


def measure_depth(name):
    """Return the documents of a query that a measure requires, 1,000 if it has no cutoff, as trec_eval, and 0 of a
    script; raise UserError if ir_measures cannot compute it."""
    if is_script(name):
        return 0
    with user_errors(f"--metrics {name}", *BUGS):
        measure = ir_measures.parse_measure(name)
        cutoff = int(measure.params.get("cutoff", 1000))
        if cutoff < 1:  # crashes trec_eval
            raise UserError("the cutoff must be above 0")
        options = measure.SUPPORTED_PARAMS.items()
        missing = [option for option, info in options if info.required and option not in measure.params]
        if missing:
            raise UserError(f"requires {', '.join(missing)}; a cutoff is written as in P@10")
        qrels = {"1": {"1": 1, "2": 0}}  # gdeval requires numbers, Accuracy a document that is not relevant
        ir_measures.calc_aggregate([measure], qrels, {"1": {"1": 2, "2": 1}})  # raises what the measure lacks
    # With judged_only, the first judged documents count, which may be far below the cutoff.
    return max(cutoff, 1000) if measure.params.get("judged_only") else cutoff


def make_parser():
    """Return the parser of the flags of Args."""
    parser = transformers.HfArgumentParser(Args, description=__doc__.splitlines()[0], allow_abbrev=False)
    for action in parser._actions:  # --help prints each flag once, without its alias with dashes
        action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
        if action.dest == "fuse":  # needs no value
            action.nargs = "?"
            action.const = "rrf"
    parser.add_argument("file", nargs="?", help="YAML or JSON file of flags")
    return parser


OWN_FLAGS = ["split", "query_prompt", "document_prompt"]


def args_of_collection(entry, args):
    """Return the Args of a call on one entry of --beir alone: flags of its own replace those of the call."""
    own = {"path": entry} if isinstance(entry, str) else dict(entry)
    is_valid = "path" in own and own.keys() <= {"path", *OWN_FLAGS} and all(isinstance(own[name], str) for name in own)
    if not is_valid:
        raise UserError(f"--beir {json.dumps(entry)}: takes a path and, of its own, {', '.join(OWN_FLAGS)}, all texts")
    return replace(args, beir=[own.pop("path")], **own)


# ---- libraries

if __name__ == "__main__":  # --help and mistyped flags are answered now: what follows takes ten seconds to load
    make_parser().parse_args()
    if os.environ.get("RANK", "0") == "0":
        print("loading libraries", file=sys.stderr)

import datasets
import diskcache
import evaluate
import fsspec
import ir_measures
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
import xxhash
import yaml
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list, gather_object
from datasets.utils.file_utils import xopen
from filelock import FileLock
from pyarrow.dataset import ParquetFragmentScanOptions
from scipy.stats import bootstrap, norm, permutation_test
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Router, StaticEmbedding
from tqdm.auto import tqdm

# ---- main


def main(args):
    if args.cache_info or args.cache_clear:
        return manage_cache(args) if os.environ.get("RANK", "0") == "0" else None
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # else several processes on CPUs would not find one another
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=30))],
    )
    transformers.utils.logging.disable_progress_bar()  # of each small file that is loaded
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each load of a local file asks the Hub
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans for each shape anew: 4 times as slow on an H200
    args = resolve_args(args)
    if args.annotate:
        annotate(args, accelerator)
    elif args.export_vectors:
        export_vectors(args, accelerator)
    elif args.query:
        search_texts(args, accelerator)
    else:
        evaluate_rankings(args, accelerator)


def evaluate_rankings(args, accelerator):
    """Rank the documents of all collections, and write the results to --output_dir."""
    check_output(args)
    metric_cache = tempfile.TemporaryDirectory()
    metrics = {name: load_metric(name, metric_cache.name) for name in args.metrics}  # fail early
    collections = open_collections(args)
    rank(collections, args, accelerator)
    origin = provenance(accelerator)
    accelerator.end_training()  # so that no process waits for the report
    if not accelerator.is_main_process:
        return
    print_warnings(collections)
    not_written = f"--output_dir {args.output_dir}: results not written, but the vectors are cached"
    lock = FileLock(Path(args.output_dir, ".lock"), is_singleton=True)
    with user_errors(not_written):
        os.makedirs(args.output_dir, exist_ok=True)
        lock.acquire()
    check_output(args)  # another evaluation may have written its results meanwhile
    with user_errors(not_written):
        write_rankings(collections, args)
    for collection in collections:
        for ranking in collection.rankings:  # errors in scripts of the user's keep the traceback
            ranking.per_query, ranking.values = compute_metrics(ranking, collection, metrics)
    with user_errors(not_written):
        write_results(collections, origin, args)
    lock.release()


def search_texts(args, accelerator):
    """Print the best documents for the texts of --query, and write them to --output."""
    (collection,) = collections = open_collections(args)
    rank(collections, args, accelerator)
    if accelerator.is_main_process:
        print_warnings(collections)
        print_hits(collection, args)


def rank(collections, args, accelerator):
    """Append the rankings of all collections to their runs: those of run files, of bi-encoders, of BM25, their fusion,
    and then all of them reranked."""
    models = args.model_name_or_path
    names = short_names([*args.run, *models, "BM25", "fused"])  # of the paths; the last two are taken
    for flag_name in args.order:
        if flag_name == "run":
            for path, name in zip(args.run, names):
                if args.pairs:
                    check_ranked_pairs(path, collections[0])
                collections[0].rankings.append(read_run(path, name, collections[0]))
        elif flag_name == "bm25":
            for collection in collections:
                collection.rankings.append(bm25_run(collection, args, accelerator))
        else:
            for path, name in zip(models, names[len(args.run) :]):
                encoder = CachedEncoder(path, args, accelerator)
                for collection in collections:
                    collection.rankings.append(retrieve(encoder, name, collection, args, accelerator))
                encoder.close()  # before the next one is loaded
    if args.fuse:
        for collection in collections:
            collection.rankings.append(fuse(collection, args.fuse))
    if args.cross_encoder:
        scorer = CachedScorer(args.cross_encoder, args, accelerator)
        for collection in collections:
            first = collection.rankings
            collection.rankings = first + [rerank(ranking, scorer, collection, args, accelerator) for ranking in first]
        scorer.close()


def print_warnings(collections):
    """Print the warnings of collections and their rankings, each once."""
    for collection in collections:
        messages = chain(collection.warnings, *(ranking.metadata["warnings"] for ranking in collection.rankings))
        for message in dict.fromkeys(messages):
            print(f"warning: {collection.name}: {message}", file=sys.stderr)


# ---- the incremental pass


@dataclass
class Chunk:
    """Consecutive rows of a corpus, or other texts, as they are encoded."""

    role: str | None  # "query" or "document"; None: of the pairs of a cross-encoder
    texts: pa.Array  # (n,) large_string, without the prompt; of pairs lists of two
    hashes: np.ndarray | None  # (n,) V16, of prompts and texts; None if they are only read
    ids: pa.Array | list | None = None  # (n,) large_string of a corpus; of pairs to rerank (query id, document id)
    first: int = 0  # number of the first text in its corpus, from 0; the others have the next ones


@dataclass(eq=False)
class Lookup:
    """What the cache has of a Chunk of n texts, and what is to be computed."""

    chunk: Chunk
    rows: np.ndarray  # (n, bytes) uint8, the vectors as stored
    new: np.ndarray  # (m,) indices of the texts that are not in the cache
    sources: list  # (Lookup, number there) of each of these: this one's own texts, or those of an earlier one
    own: list  # indices of the texts to compute: distinct ones that no earlier Lookup computes
    outputs: list = field(default_factory=list)  # of micro-batches, each (q, D)
    order: list = field(default_factory=list)  # numbers of own texts, in the order of the outputs
    packed: np.ndarray | None = None  # (own texts, bytes), as stored


def cached_vectors(encoder, chunks):
    """Yield (Chunk, its (n, D) vectors as cached) of Chunks: in --cache_dtype, or float32 for int8. What is not in the
    cache is computed and stored, each text once, while worker processes prepare what follows, of later chunks, too."""
    lookups = deque()  # those whose vectors were not yielded
    requested = deque()  # (Lookup, numbers of its own texts) of each request
    in_flight = {}  # {hash: (Lookup, number)} of the texts that are being computed

    def requests():
        for chunk in chunks:
            lookup = look_up(encoder, chunk, in_flight)
            texts = chunk.texts.take(pa.array(lookup.own, pa.int64())).to_pylist()
            lookups.append(lookup)
            for numbers in encoder.groups(texts):
                requested.append((lookup, numbers))
                yield chunk.role, [texts[number] for number in numbers]

    for micro_batches in load_features(requests(), encoder):
        lookup, numbers = requested.popleft()
        encoder.compute(lookup, numbers, micro_batches)
        while lookups and len(lookups[0].order) == len(lookups[0].own):
            lookup = lookups.popleft()
            yield lookup.chunk, finish(encoder, lookup, in_flight)


def look_up(encoder, chunk, in_flight):
    """Return the Lookup of a Chunk, and enter its own texts into in_flight."""
    rows, found = encoder.cache.lookup(chunk.hashes)
    lookup = Lookup(chunk, rows, np.flatnonzero(~found), [], [])
    for index, text_hash in zip(lookup.new.tolist(), chunk.hashes[lookup.new].tolist()):
        if text_hash not in in_flight:
            in_flight[text_hash] = (lookup, len(lookup.own))
            lookup.own.append(index)
        lookup.sources.append(in_flight[text_hash])
    encoder.count(len(found), len(lookup.own))
    return lookup


def finish(encoder, lookup, in_flight):
    """Return the (n, D) vectors of a Lookup whose own texts are computed, and store these."""
    hashes = lookup.chunk.hashes
    if lookup.own:
        vectors = np.empty((len(lookup.own), encoder.cache.dimensions), np.float32)
        vectors[lookup.order] = torch.cat(lookup.outputs).cpu().numpy()
        lookup.outputs = []
        bad = np.flatnonzero(~np.isfinite(vectors).all(1))
        if len(bad):
            text = str(lookup.chunk.texts[lookup.own[bad[0]]].as_py())[:60]
            raise UserError(f"{encoder.path}: output for {text!r} is not finite; check the weights")
        lookup.packed = encoder.cache.pack(vectors)
    for index, (source, number) in zip(lookup.new.tolist(), lookup.sources):
        lookup.rows[index] = source.packed[number]
    stored = [index for index, (source, _) in zip(lookup.new.tolist(), lookup.sources) if source is lookup]
    if stored:
        encoder.cache.store(hashes[stored], lookup.rows[stored])
    for index in lookup.own:
        del in_flight[hashes[index].item()]
    return encoder.cache.unpack(lookup.rows)


def load_features(requests, encoder):
    """Yield the micro-batches of each request, in order, made ahead by --dataloader_num_workers processes. They start
    at the second request with texts: what is cached, or one query, needs none."""
    workers = encoder.args.dataloader_num_workers
    begun = False
    for request in requests:
        if begun and request[1]:
            break
        begun |= bool(request[1])
        yield encoder[request]
    else:
        return
    yield from torch.utils.data.DataLoader(
        encoder,
        sampler=chain([request], requests),
        batch_size=None,
        collate_fn=lambda micro_batches: micro_batches,
        num_workers=workers,
        prefetch_factor=1 if workers else None,
        worker_init_fn=start_worker,
        multiprocessing_context="fork" if workers else None,
    )


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


def search(encoder, queries, collection, depth, with_texts):
    """Score the documents of this process' chunks against all queries, (Q, D). Return a TopK of `depth`, a pa.Table
    (row, id, text) of the documents in it, and of some no longer in it, and the set of judged ids. Texts are null
    unless asked for."""
    corpus = collection.corpus
    top = TopK(queries, min(depth, corpus.rows or depth))
    judged_ids = pa.array(collection.qrels["doc_id"].unique(), pa.large_string())
    documents = []
    judged = set()
    for chunk, vectors in cached_vectors(encoder, prefetch(encoder.chunks(corpus))):
        ids = pd.util.hash_array(chunk.ids.to_numpy(zero_copy_only=False), categorize=False)
        ranked = top.add(encoder.for_search(vectors), chunk.first, ids.view(np.int64))
        texts = chunk.texts.take(ranked) if with_texts else pa.nulls(len(ranked), pa.large_string())
        found = {"row": pc.add(ranked, chunk.first), "id": chunk.ids.take(ranked), "text": texts}
        documents.append(pa.table(found))
        judged.update(chunk.ids.filter(pc.is_in(chunk.ids, judged_ids)).to_pylist())
    return top, documents, judged


MAX_SCORES = 2**23  # scores in a tile: 32 MB of float32, a few times


class TopK:
    """Keep the K best documents of each query; equal scores rank in the order of the corpus. Rows with one id are one
    document, with the score of its best row."""

    def __init__(self, queries, k):
        self.queries = queries  # (Q, D) float32
        shape = len(queries), k
        self.scores = torch.full(shape, -torch.inf, device=queries.device)  # (Q, K), descending
        self.rows = torch.full(shape, -1, device=queries.device)  # (Q, K) int64, -1: none yet
        self.ids = torch.zeros(1, dtype=torch.int64, device=queries.device)  # of each row; 0: of another process

    def add(self, documents, first, ids):
        """Score (n, D) documents, corpus rows `first` and following, with (n,) int64 hashes of their ids; calls must
        be in corpus order. Return the numbers of those that are among the best of a query, an Arrow array."""
        end = first + len(ids)
        if end > len(self.ids):
            self.ids = F.pad(self.ids, (0, end))
        self.ids[first:end] = torch.from_numpy(ids)
        rows_of_an_id = int(np.unique(ids, return_counts=True)[1].max())
        # The last columns of a product are summed in another order: pad, so that equal documents score equally.
        padded = F.pad(documents, (0, 0, 0, -len(documents) % 64))
        tile = max(1, MAX_SCORES // len(documents))
        ranked = torch.zeros(len(documents), dtype=torch.bool, device=documents.device)
        for begin in range(0, len(self.queries), tile):
            scores = self.queries[begin : begin + tile] @ padded.T
            self.add_tile(scores[:, : len(documents)], begin, first, rows_of_an_id)
            rows = self.rows[begin : begin + tile]
            ranked[rows[rows >= first] - first] = True
        return pa.array(ranked.nonzero()[:, 0].cpu().numpy())

    def add_tile(self, scores, begin, first, rows_of_an_id):
        """Add the (q, n) scores of q queries, from number `begin` on, for corpus rows `first` and following."""
        end = begin + len(scores)
        best = self.scores[begin:end]  # (q, K)
        k = best.shape[1] * rows_of_an_id  # so many rows are of K documents at least
        # Few documents exceed a query's K-th best; only they are sorted. An equal one ranks below, being later.
        passed = scores > best[:, -1:]
        if scores.shape[1] > k and passed.sum(1).max() > 2 * k:  # the first chunks
            passed &= scores >= scores.topk(k).values[:, -1:]  # ties with the K-th as well
        most = int(passed.sum(1).max())
        if most:
            scores = scores.masked_fill(~passed, -torch.inf)
            document = scores.topk(most, sorted=False).indices.sort(1).values  # (q, m), in corpus order
            scores = scores.gather(1, document)
            rows = torch.where(scores > -torch.inf, document + first, -1)
            rows = torch.cat([self.rows[begin:end], rows], 1)
            self.keep(begin, torch.cat([best, scores], 1), rows, self.ids[rows])

    def merge(self, accelerator):
        """Merge the K best of all processes, which have scored different rows, on every process."""

        def gather(values):
            values = accelerator.gather(values).view(accelerator.num_processes, *self.rows.shape)
            return values.transpose(0, 1).flatten(1)  # (Q, P K)

        if accelerator.num_processes > 1:
            scores, rows, ids = map(gather, (self.scores, self.rows, self.ids[self.rows]))
            order = rows.argsort(1)  # corpus order; the stable sort in keep() preserves it in ties
            self.keep(0, scores.gather(1, order), rows.gather(1, order), ids.gather(1, order))

    def keep(self, begin, scores, rows, ids):
        """Keep the K best of the (q, m) scores of q queries from `begin` on; rows, ids: (q, m) int64. Of the rows of
        an id the best one is kept."""
        order = scores.argsort(dim=1, descending=True, stable=True)
        scores = scores.gather(1, order)
        rows = rows.gather(1, order)
        ids, by_id = ids.gather(1, order).sort(dim=1, stable=True)  # the rows of a document, the best one first
        is_worse = F.pad(ids[:, 1:] == ids[:, :-1], (1, 0))
        is_worse = torch.zeros_like(is_worse).scatter(1, by_id, is_worse)
        scores, order = scores.masked_fill(is_worse, -torch.inf).sort(dim=1, descending=True, stable=True)
        rows = rows.masked_fill(is_worse, -1).gather(1, order)
        k = self.scores.shape[1]
        end = begin + len(scores)
        self.scores[begin:end] = scores[:, :k]
        self.rows[begin:end] = rows[:, :k]

    def repeated_ids(self):
        """Return the number of ids with several rows, of all processes, which must all call it."""
        ids = np.concatenate(gather_object([self.ids.cpu().numpy()]))
        return int((np.unique(ids[ids != 0], return_counts=True)[1] > 1).sum())

    def parts(self, known_rows):
        """Yield DataFrames (query, document, score) of consecutive queries. document: the place of the row among
        known_rows, sorted."""
        for first in range(0, len(self.rows), QUERIES_TOGETHER):
            rows = self.rows[first : first + QUERIES_TOGETHER]
            query, place = (rows >= 0).nonzero(as_tuple=True)
            document = np.searchsorted(known_rows, rows[query, place].cpu().numpy())
            score = self.scores[first + query, place].cpu().numpy()
            yield pd.DataFrame({"query": first + query.cpu().numpy(), "document": document, "score": score})


# ---- collections

PAIR = ["query_id", "doc_id"]  # columns that identify a row of a ranking or of judgments


class TextReader:
    """Read the ids and texts of sources in chunks, front to back."""

    def __init__(self, sources, columns, default, args):
        self.name = sources[0]
        self.size = args.corpus_chunk_size
        self.empty = 0  # texts in the last pass
        self.kept = None  # (rows,) bool; None: all rows
        with user_errors(self.name):
            files = list(chain.from_iterable(map(list_files, sources)))
            available = named_columns(next(open_files(files).iter(1)).column_names)
            columns = columns or usual_columns(default, available)
            by_position = dict(enumerate(available))  # as --pairs gives them
            self.id_column, *self.text_columns = [by_position.get(name, name) for name in columns]
            names = dict.fromkeys([self.id_column, *self.text_columns])
            dataset = open_files(files, args.streaming, ids=[self.id_column])
            self.dataset = dataset.select_columns([name for name in names if name != "#"])
        self.rows = None if args.streaming else len(self.dataset)

    def chunks(self, prefix=None, process=0, processes=1):
        """Yield every P-th Chunk, those of one process: text columns joined by spaces. prefix: of text_hashes(); None:
        texts are not hashed."""
        self.empty = 0
        size = self.size  # of one process always, so that the chunks of a growing corpus stay as they are stored
        if processes > 1 and self.rows:  # all processes get equally many chunks
            rounds = math.ceil(self.rows / (processes * size))
            size = math.ceil(self.rows / (processes * rounds))
        with user_errors(self.name):
            for number, table in islice(enumerate(self.dataset.iter(size)), process, None, processes):
                table.validate(full=True)  # a damaged Arrow file has offsets that lead anywhere
                first = number * size
                rows = np.arange(first, first + len(table))
                if self.kept is not None:
                    rows = rows[self.kept[rows]]
                    table = table.take(rows - first)
                if len(table) == 0:
                    continue
                texts = join_texts(table, self.text_columns).combine_chunks()
                self.empty += pc.sum(pc.equal(texts, "")).as_py()
                if self.id_column == "#":
                    ids = pa.array(rows).cast(pa.large_string())
                else:
                    ids = as_texts(table[self.id_column], self.id_column, ids=True).combine_chunks()
                missing = pc.index(pc.fill_null(ids, ""), "").as_py()
                if missing >= 0:
                    row = first + missing
                    raise UserError(f"row {row}, counted from 0, has no id in column {self.id_column!r}")
                hashes = None if prefix is None else text_hashes(texts, prefix)
                yield Chunk("document", texts, hashes, ids, first)

    def frame(self):
        """Return a DataFrame (id, text) of all rows."""
        chunks = list(self.chunks())
        ids = pa.chunked_array([chunk.ids for chunk in chunks], pa.large_string())
        texts = pa.chunked_array([chunk.texts for chunk in chunks], pa.large_string())
        return pd.DataFrame({"id": ids.to_pandas(), "text": texts.to_pandas()})


@dataclass
class Collection:
    name: str
    corpus: TextReader
    queries: dict  # {id: text}
    qrels: pd.DataFrame  # query_id, doc_id, relevance; empty in a search or an export
    args: Args  # of the call, with flags of the collection's own
    warnings: list
    omit_same_id: bool = False  # leave the document with the query's own id out of its ranking
    rankings: list = field(default_factory=list)  # all collections of a call have the same rankings, in the same order

    def same_id(self, frame):
        """Return a mask of the rows of a ranking or of judgments that are left out by omit_same_id."""
        return self.omit_same_id & (frame["query_id"] == frame["doc_id"])


def open_collections(args):
    """Return the Collections of --beir, or the one of --corpus or --pairs."""
    sources = []  # (name, files, args) of each collection
    for entry in args.beir:
        own = args_of_collection(entry, args)
        (path,) = own.beir
        with user_errors(f"--beir {path}"):
            sources += [(name, files, own) for name, files in collections_of(path, own.split).items()]
    if not args.beir:
        corpus = args.corpus or args.pairs
        sources = [(corpus[0], (corpus, args.queries, [args.qrels]), args)]
    names = short_names([*(name for name, _, _ in sources), "mean"])  # that of their mean is taken
    if len(sources) > 1 and (args.run or args.query or args.export_vectors):
        found = ", ".join(name for name, _, _ in sources)
        raise UserError(f"--run, --query, --export_vectors: take one collection, not {found} (--split)")
    return [open_collection(name, *files, own) for name, (_, files, own) in zip(names, sources)]


def open_collection(name, corpus, queries, qrels, args):
    """Return the Collection of sources of documents, queries and judgments, or of --pairs."""
    columns = args.corpus_columns
    if args.pairs:
        columns = ["#", args.columns[1] if args.columns else 1]
    reader = TextReader(corpus, columns, ("_id", "title", "text"), args)
    is_judged = not (args.query or args.export_vectors)
    if args.pairs and not args.export_vectors:  # of which each row has a vector
        collection = pair_collection(name, reader, args)
    elif is_judged:
        collection = judged_collection(name, reader, queries, qrels, args)
    if not is_judged:
        texts = {f"query {number}": text for number, text in enumerate(args.query, start=1)}
        no_judgments = pd.DataFrame(columns=[*PAIR, "relevance"])
        return Collection(name, reader, texts, no_judgments, args, [])
    if not collection.queries:
        raise UserError(f"{(queries or corpus)[0]}: has no judged query; check the ids or --columns")
    return collection


def pair_collection(name, corpus, args):
    """Return the Collection of --pairs, without those that lack a text. Equal queries are merged, and equal documents:
    the first one is kept."""
    column = args.columns[0] if args.columns else 0
    reader = TextReader(args.pairs, ["#", column], (), args)
    texts = pd.DataFrame({"query": reader.frame()["text"], "document": corpus.frame()["text"]})
    pairs = pair_ids(texts)
    corpus.kept = texts.index.isin(pairs.drop_duplicates("doc_id").index)
    queries = dict(zip(pairs["query_id"], pairs["query"]))
    qrels = pairs[PAIR].drop_duplicates().assign(relevance=1)
    counts = {
        "pairs lack a text; left out": len(texts) - len(pairs),
        "pairs have the query of an earlier one; their documents are those of one": len(pairs) - len(queries),
    }
    return Collection(name, corpus, queries, qrels, args, warnings_of(counts))


def pair_ids(pairs):
    """Return the pairs that have both texts, with their ids. pairs: DataFrame (query, document), by row number.

    query_id is the number of the distinct query, in order of appearance; doc_id is the first row of the document."""
    pairs = pairs[(pairs["query"] != "") & (pairs["document"] != "")]
    queries, _ = pd.factorize(pairs["query"])
    first_rows = pairs.index.to_series().groupby(pairs["document"]).transform("first")
    return pairs.assign(query_id=queries.astype(str), doc_id=first_rows.astype(str))


def judged_collection(name, corpus, queries, qrels, args):
    """Return the Collection of sources of documents, queries and judgments."""
    reader = TextReader(queries, args.query_columns, ("_id", "text"), args)
    table = reader.frame()
    grades = read_qrels(*qrels).drop_duplicates()
    judgments = grades.drop_duplicates(PAIR, keep="last")
    judged = table["id"].isin(judgments["query_id"])
    again = table["id"].duplicated()
    known = dict(table[judged & ~again].itertuples(index=False))
    unknown = sorted(set(judgments["query_id"]) - known.keys())
    # Row numbers are not shared ids: query 5 and document 5 may well be a question and its answer.
    omit_same_id = not args.keep_same_id and "#" not in (corpus.id_column, reader.id_column)
    relevant = judgments.loc[judgments["relevance"] > 0, "query_id"]
    counts = {
        "queries repeat an earlier id; left out": again.sum(),
        "queries are empty": reader.empty,
        "pairs are judged again, by another grade; the last one counts": len(grades) - len(judgments),
        f"judged queries are unknown, such as {', '.join(unknown[:3])}; left out": len(unknown),
        "judged queries have no relevant document; they count as 0": len(known.keys() - set(relevant)),
    }
    judgments = judgments[judgments["query_id"].isin(known)]
    return Collection(name, corpus, known, judgments, args, warnings_of(counts), omit_same_id)


def warnings_of(counts):
    """Return a warning for each nonzero count of {message: count}."""
    return [f"{count:,} {what}" for what, count in counts.items() if count]


def read_qrels(source, *others):
    """Return a DataFrame (query_id, doc_id, relevance) of a file of judgments, or of a source in the layouts of the
    Hub. Raise UserError if there are several files."""
    with user_errors(f"--qrels {source}", KeyError):
        file, *more = [source, *others] if os.path.exists(source) or others else list_files(source)
        if more:
            raise UserError(f"has {1 + len(more)} files: give one, with all judgments")
        if FORMATS.get(file_suffix(file)) in ("parquet", "arrow", "json"):
            table = open_files([file], streaming=False)[:]
            if "positive-corpus-ids" in table.column_names:  # lists, beside the ranking of BM25: NanoBEIR's first form
                rows = table.to_pandas().explode("positive-corpus-ids")
                table = pa.table({"query-id": rows["query-id"], "corpus-id": rows["positive-corpus-ids"]})
            ids = [as_texts(table[name], name, ids=True).to_numpy() for name in ("query-id", "corpus-id")]
            frame = pd.DataFrame({"query_id": ids[0], "doc_id": ids[1], "score": 1})
            names = {name.lower(): name for name in table.column_names}
            grades = [names[name] for name in GRADE_NAMES if name in names]
            if grades:
                frame["score"] = pd.to_numeric(table[grades[0]].to_pandas())
            elif len(names) > 2:  # those of NanoBEIR have no grades
                raise UserError(f"has no column of grades: name it score; the columns are {', '.join(names)}")
        else:  # read as text: ids may begin with zeros
            frame = pd.concat(trec_parts(file, "qrels"))
        if not (frame["score"] % 1 == 0).all():
            raise UserError("a grade is not a whole number")
        return frame.astype({"score": int}).rename(columns={"score": "relevance"})


UNSCORED = "unscored"  # tag of documents that are ranked below those that a reranker has scored
GRADE_NAMES = ("score", "relevance", "rel", "grade", "label")  # of the last column, in a header of judgments


def trec_parts(path, name):
    """Yield DataFrames (query_id, doc_id, score) of 2**19 lines of a TREC run (name "run") or TREC or BEIR judgments
    ("qrels"); of a run with `scored`, whether the system that ranked a document gave it that score."""
    with user_errors(f"--{name} {path}"):
        columns = {6: [0, 2, 4, 5]} if name == "run" else {3: [0, 1, 2], 4: [0, 2, 3]}
        falls = others = 0  # scores of a run, from one line of a query to the next
        with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
            by_tabs = file.readline().count("\t") + 1 in columns  # then ids may contain spaces
            file.seek(0)
            options = {"header": None, "dtype": str, "quoting": csv.QUOTE_NONE, "keep_default_na": False}
            for frame in pd.read_csv(file, sep="\t" if by_tabs else r"\s+", chunksize=2**19, **options):
                fields = frame.shape[1]
                if fields not in columns:
                    raise UserError(f"has {fields} fields per line, not {' or '.join(map(str, columns))}")
                names = ["query_id", "doc_id", "score", "tag"][: len(columns[fields])]
                frame = frame[columns[fields]].set_axis(names, axis=1)
                scores = pd.to_numeric(frame["score"], errors="coerce")
                bad = ~np.isfinite(scores)
                if name == "qrels" and 0 in bad and frame.loc[0, "score"].lower() in GRADE_NAMES:
                    bad[0] = False  # the header of BEIR, and of others
                if bad.any():
                    line = bad.idxmax()
                    raise UserError(f"line {line + 1} has no finite score: {' '.join(frame.loc[line, names[:3]])}")
                frame = frame.assign(score=scores)[np.isfinite(scores)]
                if name == "run":
                    steps = frame["score"].diff()[frame["query_id"] == frame["query_id"].shift()]
                    falls += (steps < 0).sum()
                    others += (steps >= 0).sum()
                    frame = frame.assign(scored=frame.pop("tag") != UNSCORED)
                yield frame
            if others and not falls:
                warn_once(f"--run {path}: no score falls, but the highest ranks first: are they distances?")


# ---- rankings


QUERIES_TOGETHER = 2000  # whose lines are in memory at a time
LINE = np.dtype([("query", np.uint32), ("document", np.uint32), ("score", np.float64), ("scored", bool)])


class RankingFile:
    """The ranked documents of each query, by a model or from a file, best first: lines of numbers in a mapped file
    without a name, which ends with the process; parts of it are in memory. Queries are numbered in the order of the
    collection."""

    def __init__(self, name, queries, documents=None):
        self.name = name
        self.queries = pa.array(queries, pa.large_string())  # ids by number
        self.documents = documents  # the same, an Arrow array
        self.lengths = np.zeros(len(self.queries), np.int64)  # lines of each query
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.metadata = {}  # its entry in metrics.json
        self.texts = None  # of the documents, an Arrow array, in a search
        self.per_query = None  # DataFrame, a column for each measure
        self.values = None  # {measure: value} of measures without values per query

    def add(self, part):
        """Append a DataFrame (query, document, score and maybe scored: whether its model gave the score)."""
        lines = np.empty(len(part), LINE)
        lines["scored"] = True
        for name in part.columns.intersection(LINE.names):
            lines[name] = part[name]
        with user_errors(f"a ranking, in {tempfile.gettempdir()} (TMPDIR is another folder for it)"):
            self.file.write(lines.tobytes())
            self.file.flush()
        self.lengths += np.bincount(lines["query"], minlength=len(self.lengths))

    def lines(self):
        """Return all lines, mapped."""
        return np.memmap(self.file, LINE, "r") if self.lengths.any() else np.empty(0, LINE)

    def parts(self, order=None):
        """Yield a DataFrame (query_id, doc_id, score, scored, and the numbers query and document) of each
        QUERIES_TOGETHER queries. order: of the lines by their queries; None: as they are."""
        lines = self.lines()
        ends = np.append(0, self.lengths.cumsum())
        for first in range(0, len(self.lengths), QUERIES_TOGETHER):
            last = min(first + QUERIES_TOGETHER, len(self.lengths))
            span = slice(ends[first], ends[last])
            yield self.with_ids(pd.DataFrame(lines[span] if order is None else lines[order[span]]))

    def with_ids(self, part):
        """Return a part with the columns query_id and doc_id."""
        queries = self.queries.take(pa.array(part["query"])).to_pandas()
        documents = self.documents.take(pa.array(part["document"])).to_pandas()
        return part.assign(query_id=queries.array, doc_id=documents.array)


def best_first(part):
    """Return lines of a ranking by query and descending score; ties as they are."""
    return part.sort_values("score", ascending=False, kind="stable").sort_values("query", kind="stable")


def by_trec_eval(part):
    """Return lines of a ranking by query and descending score; ties by document id, descending."""
    return part.sort_values(["query", "score", "doc_id"], ascending=[True, False, False])


def make_ranking(name, parts, documents, collection, metadata, counts, depth=2**31):
    """Return the RankingFile of parts, as its add() takes them: of consecutive queries, best first. They are cut at
    `depth`, without duplicates and (omit_same_id) documents that share the query's id. counts: {message: count}, the
    warnings."""
    ranking = RankingFile(name, collection.queries, documents)
    left_out = []
    for part in parts:
        named = ranking.with_ids(part)
        is_same = collection.same_id(named)
        left_out.append(named.loc[is_same, PAIR])
        part = part[~is_same].drop_duplicates(["query", "document"])
        ranking.add(part.groupby("query").head(depth))
    left_out = pd.concat(left_out)
    relevant = (left_out.merge(collection.qrels, on=PAIR)["relevance"] > 0).sum()
    counts = counts | {
        "queries share their id with a document, which is left out; --keep_same_id keeps it": len(left_out),
        "of these are judged relevant: if ids coincide by chance, set --keep_same_id": relevant,
    }
    ranking.metadata = metadata | {"same_id_left_out": len(left_out), "warnings": warnings_of(counts)}
    return ranking


def read_run(path, name, collection):
    """Return the ranking of a file, sorted by score; ties by document id, descending, as in trec_eval."""
    found = RankingFile(name, collection.queries)
    known = found.queries
    numbers = {}  # of documents, by id
    unknown = set()  # queries
    for part in trec_parts(path, "run"):
        part["query"] = pc.index_in(pa.array(part["query_id"], known.type), known).to_numpy(zero_copy_only=False)
        unknown.update(part.loc[part["query"].isna(), "query_id"])
        part = part[part["query"].notna()]
        codes, ids = pd.factorize(part["doc_id"])
        found.add(part.assign(document=np.array([numbers.setdefault(id, len(numbers)) for id in ids], int)[codes]))
    if not found.lengths.any():
        queries = f"such as {known[0].as_py()!r}; it has {min(unknown)!r}"
        raise UserError(f"--run {path}: contains none of the judged queries, {queries}")
    found.documents = pa.array(list(numbers), known.type)
    judged = pa.array(collection.qrels["doc_id"].unique(), known.type)
    foreign = 0 if pc.any(pc.is_in(found.documents, judged)).as_py() else found.lengths.sum()
    repeats = f"lines of {path} repeat a document; its best score counts"
    counts = Counter()
    counts[f"queries of {path} are not judged, or unknown; left out"] = len(unknown)
    counts[f"judged queries are not in {path}; they count as 0"] = (found.lengths == 0).sum()
    counts[f"lines of {path} have no judged document, such as {next(iter(numbers))!r}; check the ids"] = foreign

    def parts():
        order = np.argsort(found.lines()["query"], kind="stable")
        for part in map(by_trec_eval, found.parts(order)):
            counts[repeats] += part.duplicated(["query", "document"]).sum()
            yield part

    return make_ranking(name, parts(), found.documents, collection, {}, counts)


def check_ranked_pairs(path, collection):
    """Raise UserError if this script has ranked other pairs: their ids are numbers of rows, so those of other files or
    in another order would be taken for these."""
    for folder in list(Path(path).parents)[:2]:  # of the ranking, or of all rankings
        ranked = []
        with suppress(OSError, ValueError, TypeError, KeyError):  # not a folder of results
            record = json.loads((folder / "metrics.json").read_text())
            ranked = [part["judgments"] for part in record["collections"]]
        if ranked and judgments_digest(collection) not in ranked:
            raise UserError(f"--run {path}: ranks other pairs: give the files that were ranked, in their order")


def corpus_counts(repeated, missing, empty):
    """Return {message: count} of what is strange in the documents of a collection."""
    return {
        "ids belong to several documents; each counts once, with its best score": repeated,
        "judged documents are not in the corpus; they count as not found": missing,
        "documents are empty": empty,
    }


def retrieve(encoder, name, collection, args, accelerator):
    """Return the ranking of a bi-encoder over a collection, the same on every process (the reranker requires that)."""
    corpus = collection.corpus
    results = max(args.top_k, args.rerank_k) if args.query else args.top_k  # a search may rerank more than it prints
    texts = list(collection.queries.values())
    encoder.open_bar(f"{collection.name}, {name}", corpus.rows and corpus.rows + len(texts))
    encoder.set_prompts(collection.args)
    numbers = np.array_split(np.arange(len(texts)), accelerator.num_processes)[accelerator.process_index]
    own = [texts[number] for number in numbers]
    queries = encoder.for_search(np.concatenate(gather_object([encoder.encode(own, "query")])))  # (Q, D)
    depth = results + collection.omit_same_id
    top, documents, judged = search(encoder, queries, collection, depth, with_texts=bool(args.query))

    # ---- merge the results of all processes
    top.merge(accelerator)
    metadata = encoder.metadata()
    documents = pa.concat_tables(gather_object(documents)).sort_by("row").combine_chunks()
    judged = set().union(*gather_object([judged]))
    missing = set(collection.qrels["doc_id"]) - judged
    counts = corpus_counts(top.repeated_ids(), len(missing), sum(gather_object([corpus.empty])))
    counts["of the oldest blocks were removed, to keep --cache_size_limit"] = encoder.cache.removed
    row, ids, texts = [column.combine_chunks() for column in documents.columns]
    ranking = make_ranking(name, top.parts(row.to_numpy()), ids, collection, metadata, counts, results)
    ranking.texts = texts
    return ranking


def rerank(ranking, scorer, collection, args, accelerator):
    """Return the ranking with the first --rerank_k documents of each query sorted by a cross-encoder's scores.
    The other documents rank below them in their former order, so that deeper measures lose nothing."""
    requested = pd.concat(part.groupby("query").head(args.rerank_k) for part in ranking.parts())
    (model,) = short_names([scorer.path])
    name = f"{ranking.name}+{model}"
    scorer.open_bar(f"{collection.name}, {name}", len(requested))
    scored = score_pairs(scorer, requested, collection, args, accelerator)
    metadata = scorer.metadata()
    missing = {"documents to rerank are not in the corpus; they rank last": len(requested) - len(scored)}
    metadata |= {"same_id_left_out": ranking.metadata["same_id_left_out"], "warnings": warnings_of(missing)}
    scored_parts = dict(iter(scored.groupby(scored["query"] // QUERIES_TOGETHER)))
    reranked = RankingFile(name, collection.queries, ranking.documents)
    for number, part in enumerate(ranking.parts()):
        scores = scored_parts.get(number, scored[:0])
        part = part[["query", "document", "doc_id"]].merge(scores, "left", on=["query", "doc_id"])
        part = best_first(part)
        # Without a score (not reranked, or not in the corpus): one below the lowest, the next one lower, ...
        lowest = part.groupby("query")["score"].transform("min").fillna(0)
        part["scored"] = part["score"].notna()
        behind = part["score"].isna().groupby(part["query"]).cumsum()
        part["score"] = part["score"].fillna(lowest - behind)
        reranked.add(part)
    reranked.metadata = metadata
    reranked.texts = ranking.texts
    return reranked


def score_pairs(scorer, requested, collection, args, accelerator):
    """Return a DataFrame (query, doc_id, score) of the requested pairs whose document is in the corpus, on every
    process. If an id occurs twice, its best score counts."""
    candidates = candidate_pairs(requested, collection, accelerator)
    queries = list(collection.queries.values())

    def chunks():
        while part := list(islice(candidates, args.corpus_chunk_size)):
            pairs = [(queries[query], text) for query, _, text in part]
            yield scorer.chunk_of(pairs, ids=[(query, document) for query, document, _ in part])

    scored = []
    for chunk, scores in cached_vectors(scorer, chunks()):
        scored += [(*ids, score) for ids, score in zip(chunk.ids, scores[:, 0].tolist())]
    frame = pd.DataFrame(gather_object(scored), columns=["query", "doc_id", "score"])
    return frame.sort_values("score", ascending=False, kind="stable").drop_duplicates(["query", "doc_id"])


def candidate_pairs(requested, collection, accelerator):
    """Yield (number of the query, document id, text) of the requested pairs whose document is in this process'
    chunks."""
    queries_by_doc = requested.groupby("doc_id")["query"].agg(list)
    requested_ids = pa.array(queries_by_doc.index, pa.large_string())
    for chunk in collection.corpus.chunks(None, accelerator.process_index, accelerator.num_processes):
        for doc_id, text in requested_texts(chunk, requested_ids):
            for query in queries_by_doc[doc_id]:
                yield query, doc_id, text


def requested_texts(chunk, ids):
    """Yield (id, text) of the documents of a Chunk whose id is among `ids`, an Arrow array."""
    is_requested = pc.is_in(chunk.ids, ids)
    yield from zip(chunk.ids.filter(is_requested).to_pylist(), chunk.texts.filter(is_requested).to_pylist())


def bm25_run(collection, args, accelerator):
    """Return the ranking of BM25, which the main process ranks, on every process."""
    found = [search_bm25(collection, args) if accelerator.is_main_process else None]
    ((parts, documents, counts),) = broadcast_object_list(found)
    return make_ranking("BM25", parts, documents, collection, {}, counts, args.top_k)


def search_bm25(collection, args):
    """Return (parts of the ranking, as make_ranking() takes them; ids of the documents; {message: count}) of BM25
    (Robertson and Zaragoza 2009; bm25s' default, Lucene's variant), with the corpus in memory."""
    with user_errors("--bm25 requires the package bm25s, and words in the corpus"):
        import bm25s  # optional

        corpus = collection.corpus.frame()
        options = {"stopwords": "en", "return_ids": False, "show_progress": False}
        documents = bm25s.tokenize(corpus["text"].tolist(), **options)
        queries = bm25s.tokenize(list(collection.queries.values()), **options)
        index = bm25s.BM25()
        index.index(documents, show_progress=False)
    numbers, ids = pd.factorize(corpus["id"])
    rows_of_ids = np.bincount(numbers)
    documents = args.top_k + collection.omit_same_id
    depth = min(documents * rows_of_ids.max(), len(corpus))  # so many rows are of as many documents at least
    step = max(1, 2**22 // depth)
    parts = []
    for first in range(0, len(queries), step):
        rows, scores = index.retrieve(queries[first : first + step], k=depth, show_progress=False)  # (q, depth) each
        part = pd.DataFrame({"query": np.repeat(first + np.arange(len(rows)), depth)})
        part["document"] = numbers[rows.ravel()]
        part["score"] = scores.ravel()
        part = part[part["score"] > 0].drop_duplicates(["query", "document"])
        parts.append(part.groupby("query").head(documents))
    found = sum(part["query"].nunique() for part in parts)
    missing = len(set(collection.qrels["doc_id"]) - set(ids))
    counts = corpus_counts((rows_of_ids > 1).sum(), missing, collection.corpus.empty)
    without = "queries share no word with a document; BM25 knows words between spaces, but no stop words"
    counts[without] = len(collection.queries) - found
    return parts, pa.array(ids, pa.large_string()), counts


def fuse(collection, method):
    """Return the fusion of the rankings of a collection: a document's score is the sum over those that
    contain it of 1 / (60 + rank) (rrf: Cormack et al. 2009), or of how many standard deviations its score lies above
    the lowest of the query (zscore), 0 if its model has not scored it. The fusion is as deep as the deepest of them;
    equal sums stay in their order."""
    documents = pa.chunked_array([ranking.documents for ranking in collection.rankings]).unique()
    numbers = [pc.index_in(ranking.documents, documents).to_numpy() for ranking in collection.rankings]
    counts = Counter()

    def scores_of(ranking, part):
        if method == "rrf":
            return 1 / (61 + part.groupby("query").cumcount())
        scores = part["score"].where(part["scored"])
        by_query = scores.groupby(part["query"])
        deviation = by_query.transform("std", ddof=0)
        scores = (scores - by_query.transform("min")) / deviation.where(deviation > 0, 1)
        unscored = f"documents of {ranking.name} lie below those that were reranked; they count as its lowest score"
        counts[unscored] += scores.isna().sum()
        return scores.fillna(0)

    def parts():
        for group in zip(*(ranking.parts() for ranking in collection.rankings)):
            found = []
            for ranking, number, part in zip(collection.rankings, numbers, group):
                scores = scores_of(ranking, part)
                found.append(part[["query"]].assign(document=number[part["document"]], score=scores))
            part = pd.concat(found).groupby(["query", "document"], as_index=False, sort=False).sum()
            yield best_first(part)

    depth = max(ranking.lengths.max() for ranking in collection.rankings)
    return make_ranking("fused", parts(), documents, collection, {}, counts, depth)


# ---- rows with scores


def annotate(args, accelerator):
    """Write the rows of --annotate to --output with a column `scores`: one number for each document, in order."""
    if args.output.endswith(".parquet"):  # of one schema: checked now, not when the first source has been scored
        schemas = []
        for source in args.annotate:
            with user_errors(source):
                schemas.append(next(open_files(list_files(source)).iter(1)).schema)
        if others := [source for source, schema in zip(args.annotate, schemas) if schema != schemas[0]]:
            raise UserError(f"--annotate {others[0]}: other columns than {args.annotate[0]}: give --output FILE.jsonl")
    if args.cross_encoder:
        scorer = CachedScorer(args.cross_encoder, args, accelerator)
        temperature = 1
    else:
        scorer = CachedEncoder(args.model_name_or_path[0], args, accelerator)
        temperature = 0.05 if scorer.model.similarity_fn_name == "cosine" else 1  # cosines differ by little
    part = Path(f"{args.output}.part")
    parquet = None
    scorer.open_bar(scorer.path, None)
    part.unlink(missing_ok=True)  # of a killed call
    for table in scored_tables(scorer, args, accelerator):
        if accelerator.is_main_process:
            with user_errors(f"--output {args.output}"):
                if args.output.endswith(".parquet"):
                    parquet = parquet or pq.ParquetWriter(part, table.schema)
                    parquet.write_table(table)
                else:
                    append_lines(table, part)
    if not scorer.metadata()[scorer.unit]["total"]:
        raise UserError("--annotate: contains no row")
    if accelerator.is_main_process:
        with user_errors(f"--output {args.output}"):
            if parquet:
                parquet.close()
            part.rename(args.output)
        print(f"rows with scores are in {args.output}")
        flags = f"--columns {shlex.join(args.columns)} --label_column scores --loss kl --loss_kwargs"
        print(f"to distill: {flags} '{{\"teacher_temperature\": {temperature}}}'")


def scored_tables(scorer, args, accelerator):
    """Yield the tables of --annotate with their scores on all processes; each scores its share of them."""
    tables = read_documents(args)
    while part := list(islice(tables, accelerator.num_processes)):
        own_scores = []
        if accelerator.process_index < len(part):
            _, queries, documents, _ = part[accelerator.process_index]
            own_scores = scorer.score_pairs(queries, documents).tolist()
        for (table, _, _, offsets), scores in zip(part, gather_object([own_scores])):
            lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(scores, pa.float32()))
            yield table.append_column("scores", lists)


def read_documents(args):
    """Yield (table, queries, documents, offsets) of the rows of --annotate in chunks. Queries and documents are those
    of all pairs; the pairs of row i are offsets[i] to offsets[i + 1]."""
    size = max(1, args.corpus_chunk_size // (len(args.columns) - 1))
    for source in args.annotate:
        with user_errors(source, KeyError):
            for number, table in enumerate(open_files(list_files(source)).iter(size)):
                if "scores" in table.column_names:
                    advice = "mine with --format n-tuple or labeled-pair, or leave that column out"
                    raise UserError(f"has a column 'scores' already: {advice}")
                rows = datasets.Dataset(table.select([*dict.fromkeys(args.columns)]), fingerprint="")
                queries = []
                documents = []
                offsets = [0]
                for row, cells in enumerate(rows, start=number * size):
                    texts = []
                    for name in args.columns:
                        cell = cells[name]
                        found = cell if isinstance(cell, list) and texts else [cell]  # the query is one text
                        if not (found and all(isinstance(text, str) and text.strip() for text in found)):
                            raise UserError(f"row {row}, counted from 0, has no text in column {name!r}")
                        texts += found
                    queries += texts[:1] * (len(texts) - 1)
                    documents += texts[1:]
                    offsets.append(len(documents))
                yield table, queries, documents, offsets


def append_lines(table, path):
    """Append the rows of a table to a JSON Lines file."""
    with open(path, "a", encoding="utf-8") as file:
        for row in datasets.Dataset(table, fingerprint=""):  # without one, the whole table would be hashed
            print(json.dumps(row, ensure_ascii=False, default=str), file=file)  # str: of dates


# ---- vectors for other programs


def export_vectors(args, accelerator):
    """Write a Parquet shard of (_id, vector) for each chunk, and _vectors.json, which describes them; the underscore
    hides it from readers of Parquet folders. The folder has the name *.part until it is complete; a killed export
    starts again, with cached vectors."""
    folder = Path(f"{args.export_vectors}.part")
    (collection,) = open_collections(args)
    corpus = collection.corpus
    encoder = CachedEncoder(args.model_name_or_path[0], collection.args, accelerator)
    not_written = f"--export_vectors {args.export_vectors}: not written, choose a new folder"
    with user_errors(not_written):
        if os.path.exists(args.export_vectors):
            raise UserError("it exists")
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)  # of a killed export
            folder.mkdir(parents=True)
    accelerator.wait_for_everyone()
    encoder.open_bar(encoder.path, corpus.rows)
    for chunk, vectors in cached_vectors(encoder, prefetch(encoder.chunks(corpus))):
        vectors = encoder.for_search(vectors).cpu().numpy()
        flat = pa.FixedSizeListArray.from_arrays(vectors.reshape(-1), vectors.shape[1])
        table = pa.table({"_id": chunk.ids.cast(pa.string()), "vector": flat})
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}  # of no use for vectors
        with user_errors(not_written):
            pq.write_table(table, folder / f"vectors-{chunk.first:012}.parquet", **options)
    rows = encoder.metadata()["texts"]["total"]
    if accelerator.is_main_process:
        metadata = describe_vectors(encoder, corpus, args) | {"rows": rows}
        with user_errors(not_written):
            (folder / "_vectors.json").write_text(json.dumps(metadata, indent=1))
            folder.rename(args.export_vectors)
        print(f"vectors are in {args.export_vectors}")


def describe_vectors(encoder, corpus, args):
    """Return what another program must know to search the vectors of a corpus."""
    similarity = encoder.model.similarity_fn_name
    return {
        "model": encoder.path,
        "fingerprint": encoder.fingerprint,
        "query_prompt": encoder.prompts["query"],
        "document_prompt": encoder.prompts["document"],
        "max_length": encoder.max_length,
        "dimensions": encoder.dims or encoder.cache.dimensions,
        "similarity": similarity,
        "normalized": similarity == "cosine",
        "corpus": args.corpus or args.pairs or args.beir,
        "columns": [corpus.id_column, *corpus.text_columns],
        "command": shlex.join(sys.argv),
    }


# ---- measures


def load_metric(name, cache_dir):
    """Return a measure of ir_measures, or the metric of a script or folder of `evaluate`, which stores in cache_dir
    what is added. It must be local: an id of the Hub would run downloaded code."""
    if not is_script(name):
        return ir_measures.parse_measure(name)
    with user_errors(f"--metrics {name}"):
        if not os.path.exists(name):
            raise UserError("no such file or folder; metrics of the Hub are not loaded")
        # an absolute path is never taken for a name of the Hub
        metric = evaluate.load(os.path.abspath(name), module_type="metric", cache_dir=cache_dir)
        if "docid" not in str(metric.features):
            raise UserError("does not take rankings: its features must be those of the metric trec_eval")
        return metric


def compute_metrics(ranking, collection, metrics):
    """Return (DataFrame of a row for each query and a column for each measure; {measure: value} of measures without
    values per query). As in trec_eval, a document without judgment is not relevant, and equal scores rank by
    document id, descending."""
    scripts = {name: metric for name, metric in metrics.items() if isinstance(metric, evaluate.Metric)}
    measures = [metric for name, metric in metrics.items() if name not in scripts]
    results = run_scripts(ranking, collection, scripts) if scripts else {}
    measured = measure_ranking(ranking, collection, measures)
    columns = {}
    values = {}
    for name, metric in metrics.items():
        for key, result in results.get(name, {name: measured.get(metric)}).items():
            key = f"{metric.name}_{key}" if key in columns else key
            if isinstance(result, dict):
                columns[key] = [float(result.get(query, 0.0)) for query in collection.queries]
            elif isinstance(result, np.ndarray):
                columns[key] = result
            elif pd.api.types.is_number(result):  # not a name, as trec_eval returns
                values[key] = float(result)
    if not (columns or values):
        raise UserError("--metrics: the scripts return no number")
    table = pd.DataFrame(columns, pd.Index(collection.queries, name="query"))
    if not np.isfinite([*table.to_numpy().flat, *values.values()]).all():
        raise UserError("--metrics: a script returns a value that is not finite")
    return table, values


def ranked_parts(ranking):
    """Yield the parts of a ranking in the order of trec_eval, with the rank of each line."""
    for part in map(by_trec_eval, ranking.parts()):
        yield part.assign(rank=1 + part.groupby("query").cumcount())


def measure_ranking(ranking, collection, measures):
    """Return {measure of ir_measures: (Q,) values} of a ranking."""
    values = {measure: np.zeros(len(collection.queries)) for measure in measures}
    judged_query = pc.index_in(pa.array(collection.qrels["query_id"], pa.large_string()), ranking.queries).to_numpy()
    judged = collection.qrels.assign(query=judged_query)
    judged_parts = dict(iter(judged.groupby(judged_query // QUERIES_TOGETHER)))
    for number, part in enumerate(ranked_parts(ranking) if measures else ()):
        documents = {}  # {id: number}; some providers require numbers, as texts
        qrels = nested(judged_parts[number], "relevance", documents)
        # Providers break ties differently, and Compat takes documents with a score below 0 for unranked.
        run = nested(part.assign(inverse=1 / part["rank"]), "inverse", documents)
        with user_errors("--metrics", *BUGS):
            for value in ir_measures.iter_calc(measures, qrels, run):
                values[value.measure][int(value.query_id)] = value.value
    return values


def nested(frame, column, documents):
    """Return {number of the query: {number of the document: value of a column}}, numbers as texts; documents: {id:
    number}, to which those of the frame are added."""
    table = defaultdict(dict)
    for query, doc_id, value in zip(*(frame[name].tolist() for name in ("query", "doc_id", column))):
        table[str(query)][documents.setdefault(doc_id, str(len(documents)))] = value
    return table


def run_scripts(ranking, collection, scripts):
    """Return {name: what a metric script of `evaluate` returns}, which gets the layout of its metric trec_eval: all
    lines in memory."""
    names = {"query_id": "query", "doc_id": "docid", "relevance": "rel"}
    lines = pd.concat(ranked_parts(ranking))[[*PAIR, "rank", "score"]]
    prediction = lines.rename(columns=names).assign(q0="Q0", system="evenstep").to_dict("list")
    reference = collection.qrels.rename(columns=names).assign(q0="0").to_dict("list")
    results = {}
    for name, script in scripts.items():
        with user_errors(f"--metrics {name}: does not take these rankings", *BUGS):  # such as ids that are not numbers
            script.add_batch(predictions=[prediction], references=[reference])
        results[name] = script.compute()
    return results


NORMAL_ABOVE = 20_000  # queries; 10,000 resamples of a million would be 10^10 draws


def bootstrap_interval(samples):
    """Return (low, high), the 95 % percentile bootstrap interval (Efron and Tibshirani 1993) of the mean of the
    samples' means. A sample has the values of a collection's queries, which are resampled within it."""
    if sum(map(len, samples)) > NORMAL_ABOVE:
        mean = np.mean([sample.mean() for sample in samples])
        error = math.sqrt(sum(sample.var() / len(sample) for sample in samples)) / len(samples)
        return float(mean - 1.96 * error), float(mean + 1.96 * error)
    samples = [np.repeat(values, 1 + (len(values) == 1)) for values in samples]  # scipy requires two

    def statistic(*drawn, axis):
        return np.mean([values.mean(axis) for values in drawn], axis=0)

    batch = max(1, 2**22 // max(map(len, samples)))
    options = {"n_resamples": 9999, "method": "percentile", "vectorized": True}
    options["random_state"] = np.random.default_rng(0)  # `rng` is unknown before scipy 1.15
    low, high = bootstrap(samples, statistic, batch=batch, **options).confidence_interval
    return float(low), float(high)


def paired_randomization_p(samples, others):
    """Return the two-sided p-value of the paired randomization test (Smucker et al. 2007), of many queries normal."""
    differences = np.concatenate([(sample - other) / len(sample) for sample, other in zip(samples, others)])
    if len(differences) < 2 or not differences.any():
        return 1.0
    if len(differences) > NORMAL_ABOVE:
        return float(2 * norm.sf(abs(differences.sum()) / np.linalg.norm(differences)))
    batch = max(1, 2**22 // len(differences))
    options = {"permutation_type": "samples", "vectorized": True, "n_resamples": 9999}
    options["random_state"] = np.random.default_rng(0)
    return float(permutation_test((differences,), np.sum, batch=batch, **options).pvalue)  # by flipping signs


def summarize(collections):
    """Return {measure: statistics} for each ranking. Statistics: mean over the collections, low, high and, after the
    first ranking, difference from it and p; or only "value", for a measure without values per query."""
    summaries = []
    for rankings in zip(*(collection.rankings for collection in collections)):
        summary = {}
        for measure in rankings[0].per_query:
            samples = [ranking.per_query[measure].to_numpy() for ranking in rankings]
            mean = float(np.mean([sample.mean() for sample in samples]))
            low, high = bootstrap_interval(samples)
            summary[measure] = {"mean": mean, "low": low, "high": high}
            if summaries:
                others = [collection.rankings[0].per_query[measure].to_numpy() for collection in collections]
                p = paired_randomization_p(samples, others)
                summary[measure] |= {"difference": mean - summaries[0][measure]["mean"], "p": p}
        for measure in rankings[0].values:
            mean = np.mean([ranking.values[measure] for ranking in rankings])
            summary[measure] = {"value": float(mean)}
        summaries.append(summary)
    return summaries


# ---- report


def short_names(paths):
    """Return distinct short names of models, run files or collections: A for A/model, A/run.trec or A/*.x, after as
    many folders as distinguish it from the others; equal paths are numbered."""
    paths = [os.path.abspath(path) if os.path.exists(path) else path for path in paths]
    parts = [re.sub(r"/(model|run\.trec|\*[^/]*)?$", "", path).split("/") for path in paths]
    names = [part[-1] for part in parts]
    for depth in range(2, 1 + max(map(len, parts))):
        names = [name if names.count(name) == 1 else "_".join(part[-depth:]) for name, part in zip(names, parts)]
    numbered = enumerate(names, start=1)
    return [name if names.count(name) == 1 else f"{name}_{number}" for number, name in numbered]


def default_output(args):
    """Return the folder of the results of these flags, runs/eval/COLLECTION_RANKING_DIGEST."""
    paths = [entry if isinstance(entry, str) else entry["path"] for entry in args.beir]
    collection = (paths or args.corpus or args.pairs)[:1]
    ranking = [*args.model_name_or_path, *args.run, "BM25"][:1]
    digest = hashlib.sha256(repr(args).encode()).hexdigest()
    return f"runs/eval/{'_'.join([*short_names(collection), *short_names(ranking), digest[:6]])}"


def check_output(args):
    """Raise UserError if --output_dir contains the results of other flags."""
    with user_errors(f"--output_dir {args.output_dir}"), suppress(FileNotFoundError):
        then = json.loads(Path(args.output_dir, "metrics.json").read_text()).get("args", {})
        changed = [f"--{name} {then.get(name)}" for name, value in asdict(args).items() if then.get(name) != value]
        if changed:
            raise UserError(f"contains the results of {', '.join(changed)}: choose another folder")


PACKAGES = "accelerate datasets ir_measures numpy pytrec-eval-terrier scipy sentence-transformers torch transformers"


def provenance(accelerator):
    """Return what results depend on beside flags, models and data, for metrics.json."""
    device = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name()
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "packages": {name: version(name) for name in PACKAGES.split()},
        "device": device,
        "processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
    }


def write_rankings(collections, args):
    """Write run.trec of each ranking."""
    for collection in collections:
        for ranking in collection.rankings:
            path = Path(collection.name if len(collections) > 1 else "")
            if len(collection.rankings) > 1:
                path /= ranking.name
            ranking.metadata["folder"] = str(path)  # in --output_dir
            folder = Path(args.output_dir, path)
            folder.mkdir(parents=True, exist_ok=True)
            write_trec(folder / "run.trec", ranking)


def write_trec(path, ranking):
    """Write a ranking as a TREC run file; separated by tabs if an id contains a space."""
    ids = [pc.replace_substring_regex(ids, r"[\t\r\n]", "_") for ids in (ranking.queries, ranking.documents)]
    has_space = pc.any(pc.match_substring_regex(pa.chunked_array(ids), r"[ \f\v\pZ]")).as_py()
    tag = re.sub(r"\s", "_", ranking.name)
    with open(path, "w", encoding="utf-8") as file:
        for part in ranking.parts():
            queries = ids[0].take(pa.array(part["query"])).to_pylist()
            documents = ids[1].take(pa.array(part["document"])).to_pylist()
            ranks = (1 + part.groupby("query").cumcount()).tolist()
            scores = part["score"].tolist()
            for query, document, rank, score, scored in zip(queries, documents, ranks, scores, part["scored"]):
                words = [query, "Q0", document, str(rank), f"{score:.9g}", tag if scored else UNSCORED]
                file.write(("\t" if has_space else " ").join(words) + "\n")


def write_results(collections, origin, args):
    """Write per_query.csv of each ranking, the texts for report.py, and metrics.json; print the table. origin:
    provenance() of the rankings."""
    output = Path(args.output_dir)
    summaries = {}
    entries = []
    results = []
    for collection in collections:
        folder = collection.name if len(collections) > 1 else ""
        write_texts(collection, output / folder)
        entry = {"name": collection.name, "folder": folder, "queries": len(collection.queries)}
        entries.append(entry | {"judgments": judgments_digest(collection)})
        summaries[collection.name] = summarize([collection])
        for ranking, metrics in zip(collection.rankings, summaries[collection.name]):
            ranking.per_query.to_csv(output / ranking.metadata["folder"] / "per_query.csv")
            result = {"collection": collection.name, "name": ranking.name, "queries": len(ranking.per_query)}
            results.append(result | {"metrics": metrics} | ranking.metadata)
    names = [ranking.name for ranking in collections[0].rankings]
    record = {"args": asdict(args), "provenance": origin, "collections": entries, "results": results}
    if len(collections) > 1:
        summaries["mean"] = summarize(collections)
        record["means"] = dict(zip(names, summaries["mean"]))
    (output / "metrics.json.part").write_text(json.dumps(record, indent=1))
    os.replace(output / "metrics.json.part", output / "metrics.json")
    queries = sum(entry["queries"] for entry in entries)
    print_table(table_of(summaries, names))
    if queries > NORMAL_ABOVE:
        print(f"Above {NORMAL_ABOVE:,} queries, intervals and p-values are normal approximations.")
    print(f"{queries:,} queries; results are in {output}")
    print("tables, and a page to look into failures:", shlex.join(["python", "report.py", str(output)]))


def table_of(summaries, names):
    """Return a DataFrame of statistics: a row for each ranking, and a column for each measure or, for several
    collections, for each of them and their mean, of the first measure, whose name the columns' axis has."""
    rows = next(iter(summaries.values()))
    if len(summaries) == 1:
        return pd.DataFrame(rows, names)
    measure = next(iter(rows[0]))
    cells = pd.DataFrame(summaries, names)  # of statistics of all measures
    return cells.map(lambda cell: cell[measure]).rename_axis(columns=measure)


def table_lines(table):
    """Return a table of statistics as lists of texts: the header, and of each row the values, then the differences."""
    lines = [[table.columns.name or table.index.name or "", *table.columns]]
    for name, row in table.iterrows():
        values, differences = zip(*map(format_cell, row))
        lines.append([name, *values])
        if any(differences):
            lines.append(["", *differences])
    return lines


def format_cell(cell):
    """Return the value and the difference from the first ranking, as texts."""
    if "value" in cell:
        return f"{cell['value']:.4f} (no interval)", ""
    value = "{mean:.4f} [{low:.4f}, {high:.4f}]".format(**cell)
    return value, "{difference:+.4f}, p = {p:.4f}".format(**cell) if "p" in cell else ""


def print_table(table):
    """Print a table of statistics, turned if it is wider than the terminal."""
    for turned in (table, table.T):
        header, *lines = table_lines(turned)
        names, *columns = zip(*lines)
        shown = pd.DataFrame(dict(zip(header[1:], columns)), names).rename_axis(columns=header[0]).to_string()
        if shown.index("\n") <= shutil.get_terminal_size((120, 24)).columns:
            break
    print(f"\n{shown}")


SHOWN_QUERIES = 5000
SHOWN_DEPTH = 10  # documents of a ranking; relevant ones three times as many, so that any two rankings can be compared
SHOWN_CHARACTERS = 2000  # of a document


def write_texts(collection, folder):
    """Write what report.py shows beside the rankings: queries.jsonl, at most SHOWN_QUERIES with their judgments, and
    documents.jsonl, the first ones of their rankings and relevant ones. Queries are chosen by a hash of their ids, so
    that other calls choose the same. Read the corpus once more; memory is for the ids of these documents."""
    order = sorted(collection.queries, key=lambda query: xxhash.xxh3_64_digest(query.encode()))
    chosen = set(order[:SHOWN_QUERIES])
    judged = collection.qrels[collection.qrels["query_id"].isin(chosen)]
    judged = judged[~collection.same_id(judged)]
    grades = {query: {} for query in collection.queries if query in chosen}
    for query, doc_id, grade in judged[[*PAIR, "relevance"]].itertuples(index=False):
        grades[query][doc_id] = grade
    with open(folder / "queries.jsonl", "w", encoding="utf-8") as file:
        for query, judgments in grades.items():
            row = {"_id": query, "text": collection.queries[query], "judgments": judgments}
            print(json.dumps(row, ensure_ascii=False), file=file)
    best = judged[judged["relevance"] > 0].sort_values("relevance", ascending=False, kind="stable")
    ids = set(best.groupby("query_id").head(3 * SHOWN_DEPTH)["doc_id"])
    for ranking in collection.rankings:
        for part in ranking.parts():
            part = by_trec_eval(part[part["query_id"].isin(chosen)])
            ids.update(part.groupby("query").head(SHOWN_DEPTH)["doc_id"])
    requested = pa.array(ids, pa.large_string())
    with open(folder / "documents.jsonl", "w", encoding="utf-8") as file:
        for chunk in collection.corpus.chunks() if ids else ():
            for doc_id, text in requested_texts(chunk, requested):
                if doc_id in ids:  # the first document of an id counts
                    ids.remove(doc_id)
                    text = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} … (cut)"
                    print(json.dumps({"_id": doc_id, "text": text}, ensure_ascii=False), file=file)
            if not ids:
                break


def judgments_digest(collection):
    """Return a hash of queries and judgments, whatever their order; report.py compares rankings of equal ones."""
    judgments = collection.qrels[[*PAIR, "relevance"]].itertuples(index=False, name=None)
    digest = hashlib.sha256()
    rules = [] if collection.omit_same_id else ["documents may have the id of the query"]
    for row in chain(sorted(collection.queries.items()), sorted(judgments), rules):
        digest.update(f"{row}\n".encode())
    return digest.hexdigest()[:32]


def print_hits(collection, args):
    """Print the best --top_k documents of each query, with their scores, and write them to --output."""
    ranking = collection.rankings[-1]  # reranked, with --cross_encoder
    rows = []
    for query, part in chain.from_iterable(part.groupby("query_id", sort=False) for part in ranking.parts()):
        print(f"\n{collection.queries[query]}")
        hits = part[["document", "doc_id", "score"]].head(args.top_k).itertuples(index=False)
        for rank, (document, doc_id, score) in enumerate(hits, start=1):
            text = ranking.texts[document].as_py()
            print(f"  {score:6.3f}  {doc_id:>8}  {' '.join(text.split())}"[:120])
            hit = {"query": collection.queries[query], "rank": rank, "_id": doc_id, "score": score}
            rows.append(hit | {"text": text})
    if args.output:
        with user_errors(f"--output {args.output}"):
            pd.DataFrame(rows).to_json(args.output, orient="records", lines=True, force_ascii=False)


# ==== machinery: the cache, encoding, models; then what other scripts contain as well

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
    hash of these hashes: a chunk that was stored as one block takes one lookup. Texts of any other chunk are found one
    by one, by a TextIndex of all blocks."""

    def __init__(self, folder, model, dimensions, dtype, limit=0):
        self.folder = Path(folder)
        self.dimensions = dimensions
        self.dtype = dtype
        self.limit = limit * 1e9  # bytes; 0: none
        self.removed = 0  # blocks, because of the limit
        self.row_bytes = self.pack(np.zeros((1, dimensions), np.float32)).shape[1]
        self.verified = set()  # keys of blocks whose checksum was right
        self.recent_block = lru_cache(128)(self.numbered_block)  # stay mapped, with an open file each
        metadata = {"model": model, "dtype": dtype, "dimensions": dimensions, "bytes": self.row_bytes + 16}
        # Processes that start together set up the database in turns: on network disks, SQLite's own locks may fail.
        with self.errors(), FileLock(self.folder / "open.lock"):
            self.cache = diskcache.Cache(
                str(self.folder),
                disk=NoPickleDisk,
                disk_min_file_size=0,  # store every block as a file
                eviction_policy="none",  # the oldest are evicted below, with what belongs to them
                sqlite_mmap_size=0,  # a memory-mapped database would count as memory
                sqlite_cache_size=2**11,  # pages, 8 MB
            )
            ((oldest, newest),) = self.sql("SELECT coalesce(min(rowid), 1), coalesce(max(rowid), 0) FROM Cache")
            self.index = TextIndex(self.folder / "index", oldest)
            if newest < self.index.last:  # the database was lost and counts from 1 again: the index is of other blocks
                self.index.clear(oldest)
            (self.folder / "model.json").write_text(json.dumps(metadata))  # for --cache_info

    def close(self):
        self.recent_block.cache_clear()
        self.cache.close()

    def errors(self):
        advice = "free disk space, or choose another folder, or remove it"
        return user_errors(f"--cache_dir {self.folder} ({advice})", *BUGS)

    def sql(self, statement, *values):
        """Return the rows of a statement on diskcache's table. Its `_sql` is private, and used here alone: there is no
        public call for the number (rowid) of a block, nor for blocks in that order."""
        return self.cache._sql(statement, values).fetchall()

    def pack(self, vectors):
        """Return (n, D) float32 vectors in stored form, (n, bytes) uint8 rows."""
        if self.dtype == "int8":  # each vector scaled to its largest component
            largest = np.abs(vectors).max(1, keepdims=True)
            scale = np.maximum(largest, 1e-30) / 127
            stored = np.round(vectors / scale).astype(np.int8)
            return np.hstack([scale.view(np.uint8), stored.view(np.uint8)])
        with np.errstate(over="ignore"):
            stored = vectors.astype(self.dtype)
        if not np.isfinite(stored).all():
            raise UserError(f"--cache_dtype {self.dtype}: cannot hold an embedding of this model; use float32")
        return stored.view(np.uint8).reshape(len(vectors), -1)

    def unpack(self, rows):
        """Return the (n, D) vectors of (n, bytes) uint8 rows: float32 for int8, else in the stored dtype."""
        if self.dtype == "int8":
            scale = np.ascontiguousarray(rows[:, :4]).view(np.float32)
            return scale * rows[:, 4:].view(np.int8)
        return np.ascontiguousarray(rows).view(self.dtype)

    def read_block(self, key, verify=True):
        """Return ((n,) hashes, (n, bytes) rows) of a block, mapped; None if it is missing or damaged."""
        file = self.cache.get(key, read=True)
        if file is None:
            return None
        value = np.zeros(0, np.uint8)
        with file, suppress(ValueError):  # an empty file cannot be mapped
            value = np.memmap(file, mode="c").view(np.ndarray)
        n, rest = divmod(len(value) - 8, 16 + self.row_bytes)
        whole = n > 0 and rest == 0
        if whole and verify and key not in self.verified:
            whole = xxhash.xxh3_64_digest(value[:-8]) == value[-8:].tobytes()
        if whole:
            if verify:
                self.verified.add(key)
            return value[: 16 * n].view("V16"), value[16 * n : -8].reshape(n, -1)
        if len(value):
            tqdm.write(f"{self.folder}: a damaged block; its vectors are computed again", file=sys.stderr)
            self.cache.set(key, b"")
        return None

    def lookup(self, hashes):
        """Return ((n, bytes) uint8 rows, (n,) bool found) of the texts with these (n,) hashes."""
        with self.errors():
            whole = self.read_block(block_key(hashes))
            if whole and whole[0].tobytes() == hashes.tobytes():
                return whole[1], np.ones(len(hashes), bool)
            rows = np.zeros((len(hashes), self.row_bytes), np.uint8)
            found = np.zeros(len(hashes), bool)
            self.update_index()
            places = self.index.find(short_hashes(hashes))
            known = np.flatnonzero(places)
            numbers = places[known] // MAX_ROWS
            for number in np.unique(numbers).tolist():
                if block := self.recent_block(number):
                    texts = known[numbers == number]
                    in_block = (places[texts] % MAX_ROWS).clip(max=len(block[0]) - 1)
                    same = block[0][in_block] == hashes[texts]  # False if the index is damaged
                    rows[texts[same]] = block[1][in_block[same]]
                    found[texts[same]] = True
            return rows, found

    def numbered_block(self, number):
        """Return read_block() of the block with this number; None if it is missing or damaged."""
        for (key,) in self.sql("SELECT key FROM Cache WHERE rowid = ?", number):
            return self.read_block(key)

    def update_index(self):
        """Add the blocks stored since the last call, by any process, to the index."""
        for number, key in self.sql("SELECT rowid, key FROM Cache WHERE rowid > ? ORDER BY rowid", self.index.last):
            hashes, _ = self.read_block(key, verify=False) or (np.zeros(0, "V16"), None)
            self.index.add(number, short_hashes(hashes))

    def store(self, hashes, rows):
        """Store the (n, bytes) rows of n texts atomically: if the process is killed, all or none."""
        value = hashes.tobytes() + rows.tobytes()
        value += xxhash.xxh3_64_digest(value)
        key = block_key(hashes)
        with self.errors(), self.cache.transact(retry=True):
            again = key in self.cache
            self.cache.set(key, io.BytesIO(value), read=True)  # diskcache writes bytes line by line
            if again:  # it was damaged, or another process has just stored it: by a new number, every index reads it
                self.sql("UPDATE Cache SET rowid = 1 + (SELECT max(rowid) FROM Cache) WHERE key = ?", key)
            while self.limit and self.volume() > self.limit and len(self.cache) > 1:
                self.evict()

    def volume(self):
        """Return the bytes of the database and the blocks, and of an index of all blocks."""
        return self.cache.volume() * (1 + 16 / (16 + self.row_bytes))

    def evict(self):
        """Remove the oldest blocks down to 0.9 of the limit, and files that belong to no block: those of killed
        processes. Call it in a transaction: else it could remove the file of a block that is being stored."""
        excess = 1 - 0.9 * self.limit / self.volume()
        oldest = math.ceil(excess * (len(self.cache) - 1))
        self.sql("DELETE FROM Cache WHERE rowid IN (SELECT rowid FROM Cache ORDER BY rowid LIMIT ?)", oldest)
        kept = {file for (file,) in self.sql("SELECT filename FROM Cache")}
        for path in self.folder.glob("??/??/*.val"):
            file = str(path.relative_to(self.folder))
            if file not in kept:
                self.cache.disk.remove(file)
        ((first,),) = self.sql("SELECT min(rowid) FROM Cache")
        self.index.clear(first)
        self.recent_block.cache_clear()  # a mapped file would keep its space on the disk
        self.removed += oldest


def text_hashes(texts, prefix=b""):
    """Return (n,) V16, the 128-bit BLAKE2b hashes of a prefix and each of n texts, large_string."""
    texts = texts.cast(pa.large_binary()).to_numpy(zero_copy_only=False)  # of bytes
    digests = [hashlib.blake2b(prefix + text, digest_size=16).digest() for text in texts]
    return np.frombuffer(b"".join(digests), "V16")


def short_hashes(hashes):
    """Return (n,) uint64, the first half of (n,) V16 hashes."""
    return np.ascontiguousarray(hashes).view(np.uint64)[::2]


def block_key(hashes):
    """Return the key of the block of texts with these (n,) hashes."""
    return b"block" + hashlib.blake2b(hashes.tobytes(), digest_size=16).digest()


MAX_ROWS = np.uint64(2**32)  # of a block; the place of a text is the number of its block * MAX_ROWS + its row there
SPAN = 256  # blocks of a file of the index


class TextIndex:
    """Find the place of a text by its 64-bit hash, without memory for each text.

    A segment is a (2, n) uint64 array of hashes, in order, and places. Each SPAN of consecutive block numbers has one
    in a memory-mapped file, named by the number of the span; those of later blocks are in memory. A file depends only
    on its blocks: one that is lost, damaged or not written before a kill is made again from them."""

    def __init__(self, folder, oldest=1):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.load(oldest)

    def load(self, oldest):
        """Map the files from that of the oldest block on, up to the first that is missing or damaged."""
        self.saved = []  # segments in files
        self.recent = []  # segments in memory
        self.last = (oldest - 1) // SPAN * SPAN  # block
        with suppress(OSError, ValueError, EOFError):
            while True:
                self.saved.append(np.load(self.path(self.last), mmap_mode="r"))
                self.last += SPAN
        self.end = self.last + SPAN  # the last block of the span that is in memory

    def path(self, first):
        return self.folder / f"{first // SPAN:08}.npy"

    def add(self, block, hashes):
        """Add the texts of a block, by their (n,) uint64 hashes; blocks come in order."""
        while block > self.end:
            self.save()
        rows = np.arange(len(hashes), dtype=np.uint64)
        segment = merge([np.stack([hashes, np.uint64(block) * MAX_ROWS + rows])])
        while self.recent and self.recent[-1].shape[1] <= 2 * segment.shape[1]:
            segment = merge([self.recent.pop(), segment])
        self.recent.append(segment)
        self.last = block

    def save(self):
        """Move the segments of a complete span into its file."""
        path = self.path(self.end - SPAN)
        segment = merge([np.zeros((2, 1), np.uint64), *self.recent])  # an empty file could not be mapped
        with FileLock(self.folder / "save.lock"):
            with open(f"{path}.part", "wb") as file:
                np.save(file, segment)
            self.saved.append(np.load(f"{path}.part", mmap_mode="r"))  # before another process may remove it
            os.replace(f"{path}.part", path)
        self.recent = []
        self.end += SPAN

    def find(self, hashes):
        """Return (n,) places of (n,) hashes, the latest of each; 0: not found."""
        order = np.argsort(hashes)  # neighbours share pages
        ordered = hashes[order]
        places = np.zeros(len(hashes), np.uint64)
        for segment in self.saved + self.recent:
            if segment.shape[1]:
                columns = np.searchsorted(segment[0], ordered)
                columns = columns.clip(max=segment.shape[1] - 1)
                same = segment[0][columns] == ordered
                places[order[same]] = segment[1][columns[same]]
        return places

    def clear(self, oldest):
        """Remove all files; they are made again from the blocks, of which the first has the number `oldest`."""
        for path in self.folder.glob("*.npy"):
            path.unlink(missing_ok=True)
        self.load(oldest)


def merge(segments):
    """Return the merge of segments, given oldest first. Of equal hashes the latest comes first."""
    joined = np.concatenate(segments[::-1], axis=1)
    return joined[:, np.argsort(joined[0], kind="stable")]


def manage_cache(args):
    """List the caches of --cache_dir, or remove those of --cache_clear."""
    name = args.cache_clear
    rows = []
    for note in sorted(Path(args.cache_dir).expanduser().glob("*/model.json")):
        folder = note.parent
        metadata = {"model": "(damaged)", "dtype": "?", "dimensions": 0, "bytes": math.inf}
        with suppress(ValueError, TypeError):
            metadata |= json.loads(note.read_text())
        if name in (None, metadata["model"]) or (len(name) > 5 and folder.name.startswith(name)):
            vectors = size = 0
            for file in filter(Path.is_file, folder.rglob("*")):
                size += file.stat().st_size
                if file.suffix == ".val":
                    vectors += int(file.stat().st_size // metadata["bytes"])
            sizes = {"fingerprint": folder.name[:12], "vectors": vectors, "MB": round(size / 1e6, 1)}
            rows.append(sizes | metadata)
            if name:
                with user_errors(f"--cache_clear {name}"):
                    shutil.rmtree(folder)
    if name and not rows:
        raise UserError(f"--cache_clear {name}: no such model in {args.cache_dir}; see --cache_info")
    print(f"{len(rows)} caches in {args.cache_dir}" + " removed" * bool(name))
    print(pd.DataFrame(rows).drop(columns="bytes", errors="ignore").to_string(index=False))


# ---- encoding


class CachedEncoder:
    """Encode texts with a bi-encoder, each once: vectors are read from the cache, or computed and stored. Processes
    have different chunks; a text that two of them reach at the same time is encoded by both."""

    unit = "texts"
    verb = "encoded"
    output = "sentence_embedding"

    def __init__(self, path, args, accelerator):
        self.path = path
        self.accelerator = accelerator
        dimensions, dtype, length = self.load(args)  # of the cached vectors; tokens that texts are truncated to
        tokens = 4096 if accelerator.device.type == "cpu" else 32_768
        tokens = args.micro_batch_tokens or (2**20 if is_static(self.model) else tokens)
        workers = count_workers(args, accelerator)
        self.args = replace(args, micro_batch_tokens=tokens, dataloader_num_workers=workers)
        length = length or self.model.max_seq_length or math.inf
        self.max_length = length if length < 2**31 else None  # None: not truncated
        self.longest = 6 * length  # characters that count in groups(): more are truncated anyway
        self.reads_role = reads_role(self.model)
        self.fingerprint = model_fingerprint(self.model, accelerator.mixed_precision, dtype)
        self.model.to(accelerator.device)
        folder = Path(args.cache_dir).expanduser() / self.fingerprint
        self.cache = EmbeddingCache(folder, path, dimensions, dtype, args.cache_size_limit)
        self.meter = Counter()  # texts, and how many of them were computed
        self.bar = tqdm(disable=True)

    def load(self, args):
        self.model, self.dims = load_bi_encoder(self.path, args)
        self.set_prompts(args)
        try:
            check_last_token(self.model)
        except UserError as error:
            self.accelerator.print(f"warning: {self.path}: {error}")
        return self.model.get_embedding_dimension(), args.cache_dtype, args.max_length

    def set_prompts(self, args):
        """Use the prompts of a collection's flags, or else the model's own."""
        own = self.model.prompts  # always with "query" and "document", "" unless the model was saved with one
        of_documents = own["document"] or own.get("passage") or own.get("corpus") or ""
        self.prompts = {
            "query": own["query"] if args.query_prompt is None else args.query_prompt,
            "document": of_documents if args.document_prompt is None else args.document_prompt,
        }

    def close(self):
        """Close the cache, and free the memory of the model for the next one."""
        self.cache.close()
        self.model = None
        gc.collect()  # it is part of a cycle

    def encode(self, texts, role):
        """Return the (n, D) float32 vectors of a list of texts, as encode_query (role: "query") or encode_document
        ("document") of the model computes them with self.prompts: from the cache, or computed and stored."""
        size = self.args.corpus_chunk_size
        texts = pa.array(texts, pa.large_string())
        parts = (texts.slice(first, size) for first in range(0, len(texts), size))
        chunks = (Chunk(role, part, text_hashes(part, self.prefix(role))) for part in parts)
        vectors = np.empty((len(texts), self.cache.dimensions), np.float32)
        first = 0
        for _, part in cached_vectors(self, chunks):
            vectors[first : first + len(part)] = part
            first += len(part)
        return vectors[:, : self.dims]

    def chunks(self, corpus):
        """Yield the Chunks of this process."""
        return corpus.chunks(self.prefix("document"), self.accelerator.process_index, self.accelerator.num_processes)

    def prefix(self, role):
        """Return the bytes that are hashed before a text: what its vector depends on beside text and model."""
        prompt = self.prompts[role]
        return f"{role}\0{prompt}\0".encode() if self.reads_role else prompt.encode()

    def for_search(self, vectors):
        """Return (n, D) float32 vectors on the device whose dot product is the similarity."""
        vectors = torch.from_numpy(vectors).to(self.accelerator.device).float()[:, : self.dims]
        return F.normalize(vectors, dim=1) if self.model.similarity_fn_name == "cosine" else vectors

    def score_pairs(self, queries, documents):
        """Return the (n,) similarities of n pairs of texts."""
        vectors = []
        for role, texts in (("query", queries), ("document", documents)):
            codes, distinct = pd.factorize(np.array(texts, object))
            vectors.append(self.for_search(self.encode(distinct, role))[codes])  # (n, D)
        return (vectors[0] * vectors[1]).sum(1)

    def groups(self, texts):
        """Yield lists of indices of texts or pairs of similar length, about four micro-batches each; an empty one if
        there are no texts."""
        characters = [len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts]
        sizes = np.minimum(characters, self.longest) + 1
        order = np.argsort(-sizes, kind="stable")
        group_of = np.cumsum(sizes[order]) // (16 * self.args.micro_batch_tokens)
        for group in np.split(order, 1 + np.flatnonzero(np.diff(group_of))):
            yield group.tolist()

    def __getitem__(self, request):
        """Return the micro-batches of a request, (role, texts): what worker processes do. They have arrays of numpy,
        as tensors would take an open file each."""
        role, texts = request
        return list(tokenize(self.model, texts, self.args, self.accelerator, prompt=self.prompts[role], task=role))

    @torch.inference_mode()
    def compute(self, lookup, numbers, micro_batches):
        """Add to a Lookup the (q, D) float outputs of those of its own texts that have these numbers."""
        for places, features in micro_batches:
            lookup.outputs.append(self.forward(features, lookup.chunk.role))
            lookup.order += [numbers[place] for place in places]
            self.bar.update(len(places))

    def forward(self, features, role):
        """Return the (n, D) float outputs of a micro-batch."""
        device = self.accelerator.device
        for name, value in features.items():
            if isinstance(value, np.ndarray):
                tensor = torch.from_numpy(value)
                tensor = tensor.pin_memory() if device.type == "cuda" else tensor
                features[name] = tensor.to(device, non_blocking=True)
        with self.accelerator.autocast():  # gives flash attention its dtype
            return self.model(features, task=role)[self.output].float()

    # ---- the work done, and its progress bar

    def open_bar(self, title, rows):
        """Show a progress bar on the main process, and begin to count the seconds."""
        self.started = time.perf_counter()
        self.title = title
        rows = rows and math.ceil(rows / self.accelerator.num_processes)  # None: a stream
        disable = not self.accelerator.is_main_process
        self.bar = tqdm(total=rows, desc=title, unit=f" {self.unit}", delay=1, mininterval=1, disable=disable)

    def count(self, total, new):
        """Count texts, of which `new` will be computed."""
        self.meter.update(total=total, new=new)
        self.bar.update(total - new)

    def metadata(self):
        """Print the work since the last call, of all processes, and return it for metrics.json; every process must
        call it."""
        self.bar.close()
        meter = sum(gather_object([self.meter]), Counter())
        self.meter = Counter()
        length = f", of at most {self.max_length} tokens" if self.max_length else ""
        self.accelerator.print(f"{self.title}: {meter['new']:,} of {meter['total']:,} {self.unit} {self.verb}{length}")
        cached = meter["total"] - meter["new"]
        return {
            "fingerprint": self.fingerprint,
            "max_length": self.max_length,
            self.unit: {"total": meter["total"], self.verb: meter["new"], "cached": cached},
            "seconds": round(time.perf_counter() - self.started, 4),
        }


class CachedScorer(CachedEncoder):
    """Score (query, document) pairs with a cross-encoder, as vectors of one dimension. Scores are logits: in float32
    a sigmoid would make the highest ones equal."""

    unit = "pairs"
    verb = "scored"
    output = "scores"

    def load(self, args):
        self.model = load_cross_encoder(self.path, args)
        self.prompts = {None: self.model.prompts.get(self.model.default_prompt_name)}
        return 1, "float32", args.rerank_max_length

    def score_pairs(self, queries, documents):
        """Return the (n,) scores of n pairs of texts."""
        pairs = list(zip(queries, documents))
        if not pairs:
            return np.zeros(0, np.float32)
        ((_, vectors),) = cached_vectors(self, [self.chunk_of(pairs)])
        return vectors[:, 0]

    def chunk_of(self, pairs, ids=None):
        """Return the Chunk of a list of pairs of texts."""
        joined = pa.array(map("\0".join, pairs), pa.large_string())
        return Chunk(None, pa.array(pairs, pa.list_(pa.large_string())), text_hashes(joined), ids)


# ---- micro-batches


def prefetch(iterator, depth=2):
    """Yield from an iterator that runs in a background thread, `depth` items ahead; its errors are raised here."""
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(next, iterator, None) for _ in range(depth))
        while (item := ahead.popleft().result()) is not None:
            ahead.append(pool.submit(next, iterator, None))
            yield item


# ---- micro-batches (same in train_bi_encoder.py)

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


def convert_arrays(values, function=torch.from_numpy):
    """Return {name: value} with function(array) in place of each array of numpy."""
    return {name: function(value) if isinstance(value, np.ndarray) else value for name, value in values.items()}


# ---- models


def open_model(kind, path, args):
    """Return the model of a folder or Hub id, of a class of sentence-transformers, on the CPU. Raise UserError, with
    what to do, if it cannot be loaded."""
    check_exists(path)
    options = {"use_safetensors": True}  # never a pickle
    try:
        return kind(path, device="cpu", model_kwargs=options, trust_remote_code=args.trust_remote_code)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UserError("; ".join(filter(None, [reason_of(error), missing_files(path, str(error))]))) from error


def missing_files(path, reason):
    """Return what a folder lacks, of the files of a model that could not be loaded or of packages, and what to do;
    None if that is unknown."""
    if "safetensors" in reason:  # the option set above
        return "if it has pytorch_model.bin, convert that as 'Models without safetensors' in docs/evaluation.md shows"
    is_sentencepiece = any(Path(path).glob("*.model")) and not Path(path, "tokenizer.json").exists()
    if is_sentencepiece and not find_spec("sentencepiece"):
        return "its tokenizer requires: pip install sentencepiece protobuf"
    with suppress(OSError, ValueError):
        modules = json.loads(Path(path, "modules.json").read_text())
        for folder in (module["path"] for module in modules):
            is_empty = folder.endswith("_Normalize")  # and so not on the Hub
            if not (is_empty or Path(path, folder).exists()):
                return f"modules.json names the folder {folder}, which is missing: complete the download"


def load_bi_encoder(path, args):
    """Return (SentenceTransformer on the CPU, dimensions to search with)."""
    with user_errors(f"--model_name_or_path {path}"):
        if os.path.isdir(f"{path}/model"):
            raise UserError(f"is the output of a training run; its model is {path}/model")
        model = open_model(SentenceTransformer, path, args)
        if "SequenceClassification" in str(getattr(model.config, "architectures", None)):
            raise UserError("is a cross-encoder: use --cross_encoder")
        if model.similarity_fn_name not in ("cosine", "dot"):
            raise UserError(f"similarity {model.similarity_fn_name} is not supported, only cosine and dot")
        prepare_tokenizer(model, args.max_length)
        dims = args.truncate_dim or model.truncate_dim
        model.truncate_dim = None  # the cache stores full vectors
        if (dims or 0) > model.get_embedding_dimension():
            raise UserError(f"--truncate_dim {dims}: the model has {model.get_embedding_dimension()} dimensions")
    own_memory(model)
    return model.eval(), dims


def load_cross_encoder(path, args):
    """Return a CrossEncoder on the CPU, which gives one score."""
    with user_errors(f"--cross_encoder {path}"):
        model = open_model(CrossEncoder, path, args)
        if len(model) == 1 and "SequenceClassification" not in str(model.config.architectures):
            raise UserError("has no head that scores pairs: train_cross_encoder.py trains one")
        if model.num_labels != 1:
            raise UserError(f"has {model.num_labels} labels: must be 1")
        try:
            prepare_tokenizer(model, args.rerank_max_length)
        except UserError as error:
            raise UserError(str(error).replace("--max_length", "--rerank_max_length")) from None
    own_memory(model)
    return model.eval()


def model_fingerprint(model, precision, dtype):
    """Return a hash of what determines the vector of a text: weights, configurations, tokenizers and what they make of
    some texts, code that is not of a library, precision, dtype."""
    parts = [precision, dtype, getattr(model, "similarity_fn_name", None), probe_features(model)]
    if has_chat_template(model) or (isinstance(model, CrossEncoder) and model.default_prompt_name):
        parts += [model.prompts.get(model.default_prompt_name), model.tokenizer.chat_template]
    modules = list(model.modules())[1:]  # all but the model itself
    parts += [configuration(module) for module in modules]
    tokenizers = {id(part): part for module in modules if (part := getattr(module, "tokenizer", None)) is not None}
    parts += [describe_tokenizer(tokenizer) for tokenizer in tokenizers.values()]
    foreign = {type(part) for part in (*modules, *tokenizers.values()) if not is_of_library(part)}
    parts += sorted(set(map(read_code, foreign)))
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        values = tensor.contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


def is_of_library(part):
    """Return whether the class of a module or tokenizer is defined in a library, not in a model's folder."""
    libraries = ("torch", "transformers", "sentence_transformers", "peft", "tokenizers")
    return type(part).__module__.partition(".")[0] in libraries


def configuration(module):
    """Return the options of a module, without where it was loaded from: a copy of a model has its vectors."""
    options = dict(module.get_config_dict()) if hasattr(module, "get_config_dict") else {}
    if hasattr(config := getattr(module, "config", None), "to_dict"):
        options |= config.to_dict()
    if not is_of_library(module):  # options may be attributes
        options |= {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)}
    for name in ("name_or_path", "_name_or_path", "transformers_version"):
        options.pop(name, None)
    return options


# Longer than a model's limit, it is cut on one side; upper case, accents, scripts and spaces show what is normalized.
PROBE = (
    "Straße, ÀÉÎ, iPhone HIV-1: Ελληνικά, Русский, العربية, हिन्दी, 東京で寿司を食べる 🙂\tdef f(x_1):\n\n  x = 3.14"
)


def probe_features(model):
    """Return the features of some texts, or pairs, as lists: of each alone, so without padding, and of one longer than
    the model's limit."""
    limits = [getattr(module, "max_seq_length", None) for module in model.modules()]  # of a Router there are several
    static = [module.tokenizer.truncation for module in model.modules() if isinstance(module, StaticEmbedding)]
    limits += [truncation["max_length"] for truncation in static if truncation]
    words = PROBE.split()
    numbers = map(str, range(max([limit for limit in limits if limit and limit < 2**18], default=0)))
    long = " ".join([*words, *numbers, *words[::-1]])
    prompt = None if has_chat_template(model) else "a Prompt: "
    inputs = product(("query", "document"), (PROBE, long))
    if isinstance(model, CrossEncoder):
        inputs = [(None, pair) for pair in ((PROBE, long), (long, PROBE))]
    found = []
    for role, text in inputs:
        features = model.preprocess([text], prompt=prompt, task=role)
        found.append([(name, value.tolist() if torch.is_tensor(value) else value) for name, value in features.items()])
    return found


def describe_tokenizer(tokenizer):
    """Return what a tokenizer does, but for lengths and sides, which probe_features() tests: calls change them."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "to_str"):
        return json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    return getattr(tokenizer, "get_vocab", dict)()  # of one in Python


def read_code(kind):
    """Return the names and contents of all files of code in the folder, and in folders in it, that a class is from."""
    with suppress(TypeError, OSError):  # compiled
        file = Path(inspect.getfile(kind))
        files = file.parent.rglob("*.py") if "." in kind.__module__ else [file]  # no package: maybe all of Python's
        return tuple((str(path.relative_to(file.parent)), path.read_bytes()) for path in sorted(files))
    return ()


def own_memory(model):
    """Copy all parameters and buffers. Loaded ones are views of a mapped file, at addresses that depend on its header;
    kernels choose their order of summation by alignment, so the last bits would depend on the file."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def reads_role(model):
    """Return whether the vector of a text depends on its role, or on where its prompt ends, and not only on prompt and
    text joined: in a Router, in pooling without the prompt, with lengths of each role, maybe in a module of others."""
    for module in model:
        is_known = type(module).__module__.startswith("sentence_transformers.") and not isinstance(module, Router)
        config = module.get_config_dict() if is_known else {"include_prompt": False}
        if config.get("query_length") or config.get("document_length") or not config.get("include_prompt", True):
            return True
    return has_chat_template(model)


# ---- models (same in train_bi_encoder.py)


def is_static(model):
    """Return whether a model embeds texts by lookups alone; a Router may have a transformer beside them."""
    kinds = [type(module) for module in model.modules()]
    return StaticEmbedding in kinds and Transformer not in kinds


def check_last_token(model):
    """Raise UserError if last-token pooling reads a word: transformers 5 ignores `add_eos_token` if tokenizer.json
    lacks it, and does not warn."""
    if any("lasttoken" in getattr(module, "pooling_mode", "") for module in model.modules()):
        encoding = model.tokenizer.backend_tokenizer.encode("a text")
        if not encoding.special_tokens_mask[-1]:
            raise UserError(
                f"pools the last token, but texts end in {encoding.tokens[-1]!r}: save a tokenizer that adds a "
                "special token, as in docs/training.md#a-tokenizer-without-an-end-token"
            )


def has_chat_template(model):
    """Return whether sentence-transformers puts texts or pairs into a chat template."""
    return any("message" in getattr(module, "modality_config", {}) for module in model.modules())


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


# ---- texts


def usual_columns(names, available):
    """Return the `names` of columns as a table has them: a title is optional, and MTEB's `id` stands for `_id`."""
    ids = {"_id": "id"} if "_id" not in available and "id" in available else {}
    return [ids.get(name, name) for name in names if name in available or name != "title"]


def as_texts(column, name, ids=False):
    """Return a column of texts, or of `ids`, as large_string; null where there is none."""
    kind = column.type
    advice = None
    if isinstance(kind, pa.JsonType) or pa.types.is_temporal(kind):  # of several types, or of texts like dates
        advice = "rewrite it by prepare_corpus.py"
    elif pa.types.is_nested(kind):
        advice = "write its texts as a column of their own; Dataset.flatten() of `datasets` does so for structs"
    elif ids and pa.types.is_floating(kind) and (pc.max(pc.abs(column)).as_py() or 0) >= 2**53:
        advice = "large whole numbers, rounded: rewrite it by prepare_corpus.py"
    elif pa.types.is_primitive(kind) and not ids:
        advice = f"choose other columns or, to train on it, set --label_column {name}"
    if advice:
        raise UserError(f"column {name!r} holds {str(kind)[:100]}, not texts: {advice}")
    texts = column.cast(pa.large_string())
    if pc.any(pc.match_substring_regex(texts, r"""^(\["|\['|\{")""")).as_py():  # as `datasets` does after texts
        warn_once(f"column {name!r} has lists or objects that were written as texts: give all rows one type")
    return texts


def join_texts(table, columns):
    """Return the texts of columns of a table, joined by spaces, without surrounding spaces."""
    cells = [as_texts(table[name], name) for name in columns]
    space = pa.scalar(" ", pa.large_string())
    texts = pc.binary_join_element_wise(*cells, space, null_handling="replace")  # null: an empty text
    return pc.utf8_trim_whitespace(texts)


# ---- errors and flags


class UserError(ValueError):
    """Something the user can fix; printed as one line, without a traceback."""


def is_out_of_memory(error):
    """Return whether torch could not allocate memory on a device, or of the CPU."""
    return isinstance(error, RuntimeError) and ("out of memory" in str(error) or "DefaultCPUAllocator" in str(error))


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
        if is_bug or is_out_of_memory(error):  # not the data's fault, or the model's
            raise
        reason = reason_of(error)
        raise UserError(reason if reason.startswith(name) else f"{name}: {reason}") from error


def print_error(error, again, memory):
    """Print why a run ended, and return its exit status: a UserError and Ctrl-C in one line, any other error with its
    traceback. again: how to continue after Ctrl-C; memory: what to do if it ran out of memory."""
    if isinstance(error, KeyboardInterrupt):  # at once: background threads may wait for data
        print(f"\ninterrupted: {again}", file=sys.stderr)
        return 130
    traceback.clear_frames(error.__traceback__)  # deletes main's progress bar, which ends its line
    if isinstance(error, UserError):
        if os.environ.get("RANK", "0") != "0":  # if all processes fail, a launcher ends this one while it waits
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
        if is_out_of_memory(error):
            print(f"out of memory: {memory}", file=sys.stderr)
    return 1


# ---- files (same in train_bi_encoder.py)

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


def named_columns(names):
    """Return the names of columns but those that pandas gives to an index, which are no default."""
    return [name for name in names if not re.fullmatch(r"Unnamed: \d+|__index_level_\d+__", name)]


def is_list(kind):
    """Return whether an Arrow type is one of lists."""
    return isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


# ---- collections: their files


def find_splits(name):
    """Return {split: files} of the documents, of the queries and of the judgments of a folder or Hub id in the layout
    of BEIR, NanoBEIR or MTEB. NAME:fr has the configurations fr-corpus, fr-queries and fr-qrels."""
    source = name
    prefix = ""
    if not os.path.isdir(name) and ":" in name:
        source, _, language = name.rpartition(":")
        prefix = f"{language}-"
    if os.path.exists(f"{name}/corpus.jsonl"):
        configs = os.listdir(name)
        judgments = defaultdict(list)  # {split: files}
        for file in filter(file_suffix, map(str, sorted(Path(name, "qrels").glob("*")))):
            judgments[Path(file).name.partition(".")[0]].append(file)
        splits = [{"all": [f"{name}/corpus.jsonl"]}, {"all": [f"{name}/queries.jsonl"]}, judgments]
    else:
        check_exists(source)
        configs = datasets.get_dataset_config_names(source)
        if not {f"{prefix}corpus", f"{prefix}queries"} <= set(configs):
            languages = [config.removesuffix("-corpus") for config in configs if config.endswith("-corpus")]
            if languages:
                raise UserError(f"give one of its languages, as {source}:{languages[0]}: {', '.join(languages)}")
            raise UserError("neither a file corpus.jsonl nor configurations corpus and queries")
        judged = [config for config in ("qrels", "default", "relevance") if f"{prefix}{config}" in configs]
        parts = [(source, f"{prefix}{config}") for config in ("corpus", "queries", *judged[:1])]
        if not judged:  # those of BEIR lie in a repository of their own
            parts.append((f"{source}-qrels", None))
        splits = []
        for part in parts:
            files = datasets.load_dataset_builder(*part).config.data_files
            splits.append({str(split): list(files[split]) for split in files if files[split]})
    candidates = any(config.startswith(f"{prefix}top_ranked") for config in configs)
    if candidates and os.environ.get("RANK", "0") == "0":
        print(f"warning: {name}: all documents are ranked, not only those of top_ranked", file=sys.stderr)
    return splits


def collections_of(name, split):
    """Return {collection: (files of documents, of queries, of judgments)} of a source of find_splits. split: of the
    judgments. If each split is a collection, as in sentence-transformers/NanoBEIR-en, it chooses one of them; "test"
    stands for all, unless one has that name."""
    documents, queries, judgments = find_splits(name)
    chosen = [split]
    if split == "test" and split not in judgments and documents.keys() == judgments.keys():
        chosen = list(judgments)
    collections = {}
    for part in chosen:
        if part not in judgments:
            raise UserError(f"no judgments of split {part!r}; available: {', '.join(judgments) or 'none'}")
        files = []
        for splits in (documents, queries):
            wanted = part if len(splits) > 1 else next(iter(splits))  # a single one serves all judgments
            if wanted not in splits:
                raise UserError(f"no documents or queries of split {wanted!r}; available: {', '.join(splits)}")
            files.append(splits[wanted])
        collections[f"{name}/{part}" if len(documents) > 1 else name] = (*files, judgments[part])
    return collections


# ---- the command line


class FlagLoader(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error: else the last one would be taken."""

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{twice[0]} is given twice")
        return super().construct_mapping(node, deep)


def read_flags_file(path):
    """Return {flag: value} of a YAML or JSON file."""
    with user_errors(f"{path}: not a file of flags", TypeError):
        flags = dict(yaml.load(Path(path).read_text(), FlagLoader))
        if "trust_remote_code" in flags:
            raise UserError("--trust_remote_code: only on the command line, as a file may have been downloaded")
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
        argv = [path, *words_of(read_flags_file(path)), *(word for word in argv if word != path)]
    flags = vars(parser.parse_args(argv))
    del flags["file"]
    args = Args(**flags)
    names = [word.partition("=")[0].replace("-", "_") for word in argv]
    rankers = [name for name in ("run", "model_name_or_path", "bm25") if flags[name]]
    args.order = sorted(rankers, key=lambda name: names.index(f"__{name}"))
    try:
        collections = [args_of_collection(entry, args).beir[0] for entry in args.beir]
        for name, given in (flags | {"beir": collections}).items():
            for value in given if isinstance(given, list) else [given]:
                check_value(name, value)
        check_flags(args)
    except UserError as error:
        parser.error(str(error))
    return args


def check_value(name, value):
    """Raise UserError for a value that a flag cannot have."""
    least = 1 if name in ABOVE_ZERO.split() else 0
    if value in ("true", "false", "None", "null"):  # of YAML, whose `no` is false
        raise UserError(f'--{name} {value}: not a text: give "" for an empty one, or leave the flag out')
    if isinstance(value, str) and SECRET.search(value):
        raise UserError(f"--{name}: a URL with a credential, which files would show; use ~/.netrc")
    if name in ("output_dir", "output", "export_vectors", "cache_dir") and "://" in (value or ""):
        raise UserError(f"--{name} {value}: must be local; copy it elsewhere when the command has ended")
    if isinstance(value, int | float) and not least <= value < math.inf:
        raise UserError(f"--{name} {value}: must be finite, and {'above 0' if least else '0 or more'}")


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


def exit_now(status):
    """End the process: pyarrow threads that still read ahead can hang or abort a normal exit (apache/arrow 45214)."""
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.stdout = Console(sys.stdout)
    sys.stderr = Console(sys.stderr)
    status = 0
    try:
        main(parse_args(sys.argv[1:]))
    except (Exception, KeyboardInterrupt) as error:
        if "DataLoader worker" in str(error):
            error = UserError("a worker process was killed, maybe for lack of memory: lower --dataloader_num_workers")
        again = "the same command continues; the vectors encoded so far are cached"
        status = print_error(error, again, "lower --micro_batch_tokens")
    exit_now(status)
