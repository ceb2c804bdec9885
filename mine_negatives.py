"""Mine hard negatives: a ranking (TREC run file), judgments and a corpus in, training rows out.

    python mine_negatives.py --pairs clicks.csv --columns query title --run runs/clicks/run.trec --relative_margin 0.05
    python mine_negatives.py --beir scifact --run bm25.run --range_max 50 --sampling_strategy random
    python mine_negatives.py --corpus 'passages/*.parquet' --corpus_columns pid text --queries queries.tsv \
        --query_columns qid text --qrels qrels.txt.gz --run reranked.run.gz --format labeled-list --output groups.jsonl

A row is a query, one of its positives, its negatives by descending score, and the scores of all of these:

    {"query": "read a gzip file", "positive": "def read(path): ...", "negative_1": "def write(path): ...",
     "scores": [0.71, 0.64]}

--format chooses another form of these rows, which the function make_rows writes; the run ends with the flags by which
a trainer reads it. n-tuples have a fixed width: other forms also keep queries with fewer than --num_negatives.
The rules are those of sentence_transformers.util.mine_hard_negatives; all documents of a run are candidates. A run of
--pairs has the ids of eval_incremental.py --pairs, for the same files in the same order.
Left out on purpose: models (any system can write the run file), merging runs, detecting near duplicates.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["backports.zstd>=1,<2; python_version < '3.14'", "datasets>=5.2,<6", "fsspec[http]>=2026.1",
#   "numpy>=2.2,<3", "pandas>=3.1,<4", "pyarrow>=24,<27", "tqdm>=4.67,<5", "transformers>=5.18,<6"]
# ///

import csv
import json
import os
import re
import sys
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import datasets
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import transformers
from datasets.data_files import DataFilesList, get_data_patterns
from pyarrow.dataset import ParquetFragmentScanOptions
from tqdm.auto import tqdm

# ---- options


def flag(default, help):
    """Return the dataclass field of a command-line option."""
    kind = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**kind, metadata={"help": help})


@dataclass
class Args:
    run: str | None = flag(None, "run file of any system to take negatives from: query Q0 document rank score tag")
    pairs: list[str] = flag([], "sources of (query, document) rows, with the ids of eval_incremental.py --pairs")
    columns: list[str] = flag([], "query and document column of --pairs; none: the first two")
    beir: str | None = flag(None, "folder or Hub id of a collection in the layout of BEIR, NanoBEIR or MTEB")
    split: str = flag("train", "judgments of --beir to use")
    corpus: list[str] = flag([], "sources of the documents by id, instead of --beir or --pairs")
    queries: list[str] = flag([], "sources of the queries by id, instead of --beir")
    qrels: str | None = flag(None, "judgments, instead of --beir: TREC qrels, or query, document and grade")
    corpus_columns: list[str] = flag([], "id column, then text columns, joined by spaces; none: _id title text")
    query_columns: list[str] = flag([], "the same for the queries; none: _id text")
    keep_same_id: bool = flag(False, "also take the document with the query's own id, which BEIR excludes")
    absolute_margin: float | None = flag(None, "negatives score at least this much below the query's lowest positive")
    relative_margin: float | None = flag(None, "the same, as a fraction of that positive's score, such as 0.05")
    range_min: int = flag(0, "first rank (from 0) to take negatives from, among candidates that pass the rules above")
    range_max: int = flag(100, "end of the ranks, exclusive")
    sampling_strategy: Literal["top", "random"] = flag("top", "take the first or random candidates of these ranks")
    num_negatives: int = flag(4, "negatives of a query; n-tuples: exactly as many, other formats: at most")
    format: Literal["triplet", "n-tuple", "n-tuple-scores", "labeled-pair", "labeled-list"] = flag(
        "n-tuple-scores", "form of the rows, as output_format of mine_hard_negatives"
    )
    seed: int = flag(0, "seed of --sampling_strategy random")
    output: str = flag("mined.jsonl", "file to write")
    overwrite: bool = flag(False, "replace an existing --output, when the new one is complete")


def parse_args(argv):
    """Return Args from flags; exit on a wrong value."""
    parser = transformers.HfArgumentParser(Args, description=__doc__.splitlines()[0], allow_abbrev=False)
    for action in parser._actions:
        given = [word for word in argv if word.partition("=")[0] in action.option_strings]
        if action.nargs == "+" and len(given) > 1:  # argparse would ignore the first list
            parser.error(f"--{action.dest}: given twice; list all values after one flag")
        # --help prints each flag once, without its alias with dashes
        action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
    args = Args(**vars(parser.parse_args(argv)))
    for name, value in vars(args).items():
        if isinstance(value, int | float):
            valid = np.isfinite(value) and (value >= 0 or "margin" in name)
            if not valid:
                parser.error(f"--{name} {value}: must be finite and, except for a margin, 0 or more")
    if not 1 <= args.num_negatives <= args.range_max - args.range_min:
        parser.error(f"--num_negatives {args.num_negatives}: must be between 1 and --range_max - --range_min")
    if "://" in args.output:
        parser.error(f"--output {args.output}: must be a local file; copy it elsewhere afterwards")
    files = [args.corpus, args.queries, args.qrels]
    collections = [args.pairs, args.beir, any(files)]
    if not args.run or sum(map(bool, collections)) != 1 or any(files) != all(files):
        parser.error("requires --run, and one of --pairs, --beir, or --corpus, --queries and --qrels")
    if len(args.columns) not in (0, 2):
        parser.error("--columns: takes two names, of queries and documents")
    return args


# ---- main


def main(args):
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each load of a local file asks the Hub
    if os.path.exists(args.output) and not args.overwrite:
        raise UserError(f"--output {args.output}: exists; choose another file, or set --overwrite")

    pairs, queries, texts = read_pairs(args)
    own = pairs["own"]
    run = pairs.pop("run").sort_values(["score", "document"], ascending=False)  # ties: as in trec_eval

    # positives and their scores
    positives = pairs["positives"].drop_duplicates("query_document")
    has_query = positives.query_index >= 0
    has_text = positives.text_index >= 0
    is_own = positives.query_document.isin(own.query_document)
    positives = positives[has_query & has_text & ~is_own]
    scores = run.drop_duplicates("query_document").set_index("query_document").score
    positives = positives.assign(score=positives.query_document.map(scores))
    num_queries = positives.query_index.nunique()
    num_scores = positives.score.count()
    print(f"{len(positives):,} positives of {num_queries:,} queries; {num_scores:,} have a score")

    # negatives and rows
    negatives = pick_negatives(run, positives, own, args)
    if negatives.empty:
        causes = "the ids, --split, and that queries have --num_negatives candidates"
        raise UserError(f"--output {args.output}: not written: no row is left; check {causes}")
    # A labeled pair has one document: a positive without negatives is one, as in sentence-transformers.
    if args.format != "labeled-pair":
        positives = positives[positives.query_index.isin(negatives.query_index)]
    all_scored = positives.score.notna().all()
    rows = make_rows(positives, negatives, queries, texts, all_scored, args)
    count = write_rows(rows, args)
    print(f"{count:,} rows of {positives.query_index.nunique():,} queries are in {args.output}")
    print("to train on them:", trainer_flags(args))
    if args.format == "n-tuple-scores" and all_scored:
        largest = pd.concat([positives.score, negatives.score]).abs().max()
        temperature = 0.05 if largest <= 1 else 1  # of cosines and probabilities, else of logits
        kwargs = f'{{"teacher_temperature": {temperature}}}'
        flags = f"--label_column scores --loss kl --loss_kwargs '{kwargs}'"
        print(f"to distill the model that scored {args.run}, if it is a stronger one: {flags}")


# ---- ids and texts


def read_pairs(args):
    """Return {source: DataFrame of (query, document) pairs}, and the distinct texts of queries and of documents.

    Columns: source and score, as in read_ids, and int64 numbers: query_index and text_index, of the distinct texts
    (-1: missing or empty), so that queries of equal text share their positives; document, which sorts as its id does;
    query_document and query_text, equal for equal pairs of such numbers."""
    if args.pairs:
        rows = pair_ids(read_pair_texts(args)).drop_duplicates(["query_id", "doc_id"])
        pairs = read_ids(rows[["query_id", "doc_id"]].assign(relevance=1), args)
        queries = rows.drop_duplicates("query_id").set_index("query_id")["query"]
        documents = rows.drop_duplicates("doc_id").set_index("doc_id")["document"]
    else:
        files = args.corpus, args.queries, [args.qrels]
        if args.beir:
            with user_errors(f"--beir {args.beir}"):
                files, *more = collections_of(args.beir, args.split).values()
                if more:
                    raise UserError("has several collections: choose one by --split")
        corpus, queries, qrels = files
        pairs = read_ids(read_qrels(*qrels), args)
        queries = read_texts("queries", queries, args.query_columns, pairs.query_id)
        documents = read_texts("corpus", corpus, args.corpus_columns, pairs.doc_id)
    query_index, queries = number_texts(queries, pairs.query_id)
    text_index, texts = number_texts(documents, pairs.doc_id)
    document, _ = pd.factorize(pairs.doc_id, sort=True)
    high_bits = query_index * 2**32
    pairs = pairs[["source", "score"]].assign(
        query_index=query_index,
        text_index=text_index,
        document=document,
        query_document=high_bits + document,
        query_text=high_bits + text_index,
    )
    by_source = {name: pairs[pairs.source == name] for name in ("positives", "own", "run")}
    return by_source, queries, texts


def read_ids(qrels, args):
    """Return a DataFrame (source, query_id, doc_id, score) of three sources: positives (pairs judged above 0, without
    a score), run, and own (each query with the document of its own id, unless --keep_same_id)."""
    qrels = qrels.drop_duplicates(PAIR, keep="last")
    positives = qrels[qrels.relevance > 0].drop(columns="relevance")
    run = read_trec(args.run, "run")
    frames = [positives.assign(source="positives"), run.assign(source="run")]
    if not (args.keep_same_id or args.pairs):  # ids of pairs are row numbers: query 5 may well be about document 5
        frames.append(positives.assign(source="own", doc_id=positives.query_id))
    return pd.concat(frames, ignore_index=True)


def read_pair_texts(args):
    """Return a DataFrame (query, document) of the texts of --pairs, by row number."""
    with user_errors(f"--pairs {args.pairs[0]}"):
        dataset = open_sources(args.pairs)
        columns = args.columns or dataset.column_names[:2]
        table = dataset.select_columns(columns)[:]
        table.validate(full=True)
        query, document = [join_texts(table, [name]).to_pandas() for name in columns]
    return pd.DataFrame({"query": query, "document": document})


def read_texts(name, sources, columns, ids):
    """Return the texts of sources by id, a Series, of those of `ids` that have one.

    ids: (n,) Series of texts, in which an id may be repeated. Of rows with one id the first counts, with a warning."""
    requested = pa.array(ids.unique(), pa.large_string())
    parts = []
    with user_errors(f"--{name} {sources[0]}"):
        dataset = open_sources(sources)
        usual = ["_id", "title", "text"] if name == "corpus" else ["_id", "text"]
        columns = columns or usual_columns(usual, dataset.column_names)
        id_column, *text_columns = columns
        dataset = dataset.select_columns(columns)
        for table in tqdm(dataset.iter(100_000), desc=f"reading --{name}", delay=2):
            table.validate(full=True)  # a damaged Arrow file has offsets that lead anywhere
            keys = as_texts(table[id_column], id_column, ids=True)
            part = pa.table({"id": keys, "text": join_texts(table, text_columns)})
            parts.append(part.filter(pc.is_in(keys, requested)))
        found = pa.concat_tables(parts).to_pandas()
    found = found[found.text != ""]
    again = found.id.duplicated()
    if again.any():
        repeated = f"{again.sum():,} rows repeat an id, such as {found.id[again].iloc[0]!r}; left out"
        print(f"warning: --{name} {sources[0]}: {repeated}", file=sys.stderr)
    return found[~again].set_index("id").text


def open_sources(sources):
    """Return a Dataset of the rows of sources, which must be of one format."""
    return open_files(list(chain.from_iterable(map(list_files, sources))), streaming=False)


def join_texts(table, columns):
    """Return the texts of columns of a table, joined by spaces, without surrounding spaces."""
    cells = [as_texts(table[name], name) for name in columns]
    space = pa.scalar(" ", pa.large_string())
    texts = pc.binary_join_element_wise(*cells, space, null_handling="replace")  # null: an empty text
    return pc.utf8_trim_whitespace(texts)


def number_texts(texts, ids):
    """Return the number of each id's text ((n,) int, -1: none) and the distinct texts ((m,) object)."""
    numbers, distinct = pd.factorize(texts)
    numbers = pd.Series(numbers, texts.index).reindex(ids, fill_value=-1)
    return numbers.to_numpy(), distinct.to_numpy(object)


# ---- negatives


def pick_negatives(run, positives, own, args):
    """Return the rows of `run` that are negatives, in its order: best first; print how many rows each rule removes.

    All have the columns of read_pairs. own: documents that have the id of their query."""
    print(f"{len(run):,} candidates in --run\n     removed queries left  rule")
    # With -inf for a positive without a score, no candidate of its query passes a margin.
    scores = positives.score.fillna(-np.inf)
    lowest = scores.groupby(positives.query_index).min()
    run = run.assign(lowest=run.query_index.map(lowest))
    run = remove(run, run.lowest.isna(), "of queries without a text, or without a positive")
    run = remove(run, run.text_index < 0, "not in the corpus, or empty")
    is_own = run.query_text.isin(own.query_text)
    run = remove(run, is_own, "the query's own document, or equal to it")
    is_positive = run.query_document.isin(positives.query_document)
    run = remove(run, is_positive, "known positives")
    is_copy = run.query_text.isin(positives.query_text)
    is_repeated = run.duplicated("query_text")
    run = remove(run, is_copy | is_repeated, "equal to a positive or a better candidate")

    if args.absolute_margin is not None:
        is_below = run.score + args.absolute_margin <= run.lowest
        rule = f"within {args.absolute_margin} of the lowest positive, or a positive has no score"
        run = remove(run, ~is_below, rule)
    if args.relative_margin is not None:
        highest = run.lowest - run.lowest.abs() * args.relative_margin
        is_below = run.score <= highest
        rule = f"within {args.relative_margin:.1%} of the lowest positive, or a positive has no score"
        run = remove(run, ~is_below, rule)

    ranks = run.groupby("query_index").cumcount()
    is_inside = ranks.between(args.range_min, args.range_max - 1)
    run = remove(run, ~is_inside, f"outside of ranks {args.range_min} to {args.range_max - 1}")
    candidates = run
    if args.sampling_strategy == "random":
        candidates = run.groupby("query_index").sample(frac=1, random_state=args.seed)  # all, in random order
    chosen = candidates.groupby("query_index").head(args.num_negatives)
    run = remove(run, ~run.index.isin(chosen.index), "more than --num_negatives")
    num_required = args.num_negatives if args.format.startswith("n-tuple") else 1
    num_found = run.groupby("query_index").text_index.transform("size")
    return remove(run, num_found < num_required, "of queries with fewer than --num_negatives")


def remove(run, rows, rule):
    """Return `run` without `rows`, a mask; print how many rows the rule removes, and the number of queries left."""
    run = run[~rows]
    print(f"{rows.sum():12,} {run.query_index.nunique():12,}  {rule}")
    return run


# ---- output


def make_rows(positives, negatives, queries, texts, all_scored, args):
    """Yield the rows of --format, {column: value}; with scores, except for formats without, if `all_scored`."""
    if args.format == "labeled-pair":  # each positive and each negative of a query once
        pairs = pd.concat([positives.assign(label=1), negatives.assign(label=0)])
        for pair in pairs.sort_values("query_index", kind="stable").itertuples():
            cells = {"query": queries[pair.query_index], "document": texts[pair.text_index], "label": pair.label}
            yield cells | ({"score": pair.score} if all_scored else {})
        return

    lists = negatives.groupby("query_index").agg(texts=("text_index", list), scores=("score", list))
    for row in positives.merge(lists, on="query_index").itertuples():
        query = queries[row.query_index]
        positive = texts[row.text_index]
        found = texts[row.texts].tolist()
        scores = {"scores": [row.score, *row.scores]} if all_scored else {}
        if args.format == "triplet":
            for negative in found:
                yield {"query": query, "positive": positive, "negative": negative}
        elif args.format == "labeled-list":
            labels = [1] + [0] * len(found)
            yield {"query": query, "documents": [positive, *found], "labels": labels} | scores
        else:
            cells = {"query": query, "positive": positive}
            cells |= {f"negative_{number}": negative for number, negative in enumerate(found, 1)}
            yield cells | (scores if args.format == "n-tuple-scores" else {})


def trainer_flags(args):
    """Return the flags by which a trainer reads rows of --format: labelled ones are for the cross-encoder."""
    numbers = range(1, args.num_negatives + 1)
    n_tuple = " ".join(["--columns query positive", *(f"negative_{number}" for number in numbers)])
    flags = {
        "triplet": "--columns query positive negative",
        "labeled-pair": "--columns query document --label_column label",
        "labeled-list": "--columns query documents --label_column labels",
    }
    return flags.get(args.format, n_tuple)


def write_rows(rows, args):
    """Write each of `rows` as a JSON line and return their number. An existing file is replaced at the end."""
    path = Path(args.output)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # of this process: another may write to `path` as well
    count = 0
    with user_errors(f"--output {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(part, "w", encoding="utf-8") as file:
                for cells in tqdm(rows, desc="writing", unit="row", delay=2):
                    file.write(json.dumps(cells, ensure_ascii=False) + "\n")
                    count += 1
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return count


# ---- errors and files (same in eval_incremental.py)


class UserError(ValueError):
    """Something the user can fix; printed as one line, without a traceback."""


def is_out_of_memory(error):
    """Return whether torch could not allocate memory on a device, or of the CPU."""
    return isinstance(error, RuntimeError) and ("out of memory" in str(error) or "DefaultCPUAllocator" in str(error))


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
def user_errors(name):
    """Turn whatever a library raises about the user's data or model into a UserError: `name`, then the root cause."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):  # not the data's fault, or the model's
            raise
        reason = reason_of(error)
        raise UserError(reason if reason.startswith(name) else f"{name}: {reason}") from error


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


def is_list(kind):
    """Return whether an Arrow type is one of lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


# ---- cells, runs and pairs (same in eval_incremental.py)


def as_texts(column, name, ids=False):
    """Return a column of texts, or of `ids`, as large_string; null where there is none."""
    kind = column.type
    advice = None
    if isinstance(kind, pa.JsonType):  # what `datasets` makes of a column of several types
        advice = "rewrite it by prepare_corpus.py"
    elif pa.types.is_nested(kind):
        advice = "write its texts as a column of their own; Dataset.flatten() of `datasets` does so for structs"
    elif pa.types.is_primitive(kind) and not ids:
        advice = f"choose other columns or, to train on it, set --label_column {name}"
    if advice:
        raise UserError(f"column {name!r} holds {str(kind)[:100]}, not texts: {advice}")
    return column.cast(pa.large_string())


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
        files = filter(file_suffix, map(str, sorted(Path(name, "qrels").glob("*"))))
        judgments = {Path(file).name.partition(".")[0]: [file] for file in files}
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


def usual_columns(names, available):
    """Return the `names` of columns as a table has them: a title is optional, and MTEB's `id` stands for `_id`."""
    ids = {"_id": "id"} if "_id" not in available and "id" in available else {}
    return [ids.get(name, name) for name in names if name in available or name != "title"]


PAIR = ["query_id", "doc_id"]  # columns that identify a row of a ranking or of judgments


def read_qrels(source, *others):
    """Return a DataFrame (query_id, doc_id, relevance) of a file of judgments, or of a source in the layouts of the
    Hub. Raise UserError if there are several files."""
    with user_errors(f"--qrels {source}"):
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
            if "score" in table.column_names:  # not in NanoBEIR
                frame["score"] = pd.to_numeric(table["score"].to_pandas())
        else:  # read as text: ids may begin with zeros
            frame = read_trec(file, "qrels")
        if not (frame["score"] % 1 == 0).all():
            raise UserError("a grade is not a whole number")
        return frame.astype({"score": int}).rename(columns={"score": "relevance"})


def read_trec(path, name):
    """Return a DataFrame (query_id, doc_id, score) of a TREC run (name "run") or TREC or BEIR judgments ("qrels")."""
    with user_errors(f"--{name} {path}"):
        columns = {6: [0, 2, 4]} if name == "run" else {3: [0, 1, 2], 4: [0, 2, 3]}
        with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
            by_tabs = file.readline().count("\t") + 1 in columns  # then ids may contain spaces
        options = {"header": None, "dtype": str, "quoting": csv.QUOTE_NONE, "keep_default_na": False}
        frame = pd.read_csv(path, sep="\t" if by_tabs else r"\s+", encoding="utf-8-sig", **options)
        fields = frame.shape[1]
        if fields not in columns:
            raise UserError(f"has {fields} fields per line, not {' or '.join(map(str, columns))}")
        frame = frame[columns[fields]].set_axis(["query_id", "doc_id", "score"], axis=1)
        scores = pd.to_numeric(frame["score"], errors="coerce")
        bad = ~np.isfinite(scores)
        if name == "qrels":
            bad[0] = False  # BEIR's judgments have a header
        if bad.any():
            line = bad.idxmax()
            raise UserError(f"line {line + 1} has no finite score: {' '.join(frame.loc[line])}")
        return frame.assign(score=scores)[np.isfinite(scores)]


def pair_ids(pairs):
    """Return the pairs that have both texts, with their ids. pairs: DataFrame (query, document), by row number.

    query_id is the number of the distinct query, in order of appearance; doc_id is the first row of the document."""
    pairs = pairs[(pairs["query"] != "") & (pairs["document"] != "")]
    queries, _ = pd.factorize(pairs["query"])
    first_rows = pairs.index.to_series().groupby(pairs["document"]).transform("first")
    return pairs.assign(query_id=queries.astype(str), doc_id=first_rows.astype(str))


# ---- command line


def exit_now(status):
    """End the process: pyarrow threads that still read ahead can hang or abort a normal exit (apache/arrow 45214)."""
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    status = 0
    try:
        main(parse_args(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    exit_now(status)
