"""Mine hard negatives: a ranking (TREC run file), judgments and a corpus in, training rows out.

    python mine_negatives.py --beir scifact --run bm25.run --range_max 50 --sampling_strategy random
    python mine_negatives.py --beir scifact --run minilm.run --judged minilm_judged.run --relative_margin 0.05
    python mine_negatives.py --corpus 'passages/*.parquet' --corpus_columns pid text --queries queries.tsv \
        --query_columns qid text --qrels qrels.txt.gz --run reranked.run.gz --allow_fewer --output groups.jsonl

A row is a query, one of its positives, its negatives from best to worst, and the scores of these documents:

    {"query": "read a gzip file", "positive": "def read(path): ...", "negative_1": "def write(path): ...",
     "scores": [0.71, 0.64]}

With --allow_fewer it holds lists of any length: "documents" (the positive first), "labels" (1, 0, ...) and "scores".
The rules are those of sentence_transformers.util.mine_hard_negatives; all documents of a run are candidates.
Left out on purpose: models (whatever writes a run file can rank), several runs, near duplicates.
"""

import hashlib
import os
import sys
import traceback
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

import datasets
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import transformers
from filelock import FileLock
from tqdm.auto import tqdm

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


@dataclass
class Args:
    run: str | None = flag(None, "ranking to take negatives from, by any system: query Q0 document rank score tag")
    judged: str | None = flag(None, "the same system's scores of judged documents, for positives that --run lacks")
    beir: str | None = flag(None, "folder with corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv")
    split: str = flag("train", "judgments of --beir to use")
    corpus: list[str] = flag([], "sources of the documents by id, instead of --beir")
    queries: list[str] = flag([], "sources of the queries by id, instead of --beir")
    qrels: str | None = flag(None, "judgments, instead of --beir: TREC qrels, or query, document and grade")
    corpus_columns: list[str] = flag(["_id", "title", "text"], "id column of --corpus, then text columns, joined")
    query_columns: list[str] = flag(["_id", "text"], "id column of --queries, then text columns, joined")
    keep_same_id: bool = flag(False, "allow the document with the query's own id, which BEIR leaves out")
    absolute_margin: float | None = flag(None, "negatives score at least so much below the query's lowest positive")
    relative_margin: float | None = flag(None, "the same as a share of that positive's score, such as 0.05")
    range_min: int = flag(0, "first rank to take negatives from, counted among the candidates that are left")
    range_max: int = flag(100, "rank to stop before")
    sampling_strategy: Literal["top", "random"] = flag("top", "take the best of these ranks, or random ones")
    num_negatives: int = flag(4, "negatives of a row")
    allow_fewer: bool = flag(False, "keep queries with fewer negatives, at least one; rows then hold lists")
    seed: int = flag(0, "determines the random ones")
    output: str = flag("mined.jsonl", "file to write")


def parse_args(argv):
    """Return Args from flags; exit on a wrong value."""
    parser = transformers.HfArgumentParser(Args, description=__doc__.splitlines()[0], allow_abbrev=False)
    for action in parser._actions:  # --help prints each flag once, without its alias with dashes
        action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
    flags = Counter(word.partition("=")[0].replace("-", "_") for word in argv if word.startswith("--"))
    if repeated := [name for name, times in flags.items() if times > 1]:
        parser.error(f"{' '.join(repeated).replace('__', '--')}: given twice; list all values after one flag")
    (args,) = parser.parse_args_into_dataclasses(argv)
    for name, value in asdict(args).items():
        if isinstance(value, int | float) and not (np.isfinite(value) and (value >= 0 or "margin" in name)):
            parser.error(f"--{name} {value}: must be finite, and 0 or more unless it is a margin")
    if not 1 <= args.num_negatives <= args.range_max - args.range_min:
        parser.error(f"--num_negatives {args.num_negatives}: must be 1 or more, at most --range_max less --range_min")
    named = [bool(args.corpus), bool(args.queries), bool(args.qrels)]
    if not args.run or named != [not args.beir] * 3:
        parser.error("requires --run, and either --beir or --corpus, --queries and --qrels")
    if args.beir:
        args.corpus, args.queries = [f"{args.beir}/corpus.jsonl"], [f"{args.beir}/queries.jsonl"]
        args.qrels = f"{args.beir}/qrels/{args.split}.tsv"
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


# ---- texts by id (same in train_bi_encoder.py)


class TextLookup:
    """Texts by id from a memory-mapped table. Its index (sorted 64-bit hashes of the ids, and the row of each) is a
    mapped file, too, made once: 16 bytes a text on disk, none in memory."""

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
        table = self.dataset[self.index[1, places].tolist()]
        columns = [pc.fill_null(as_texts(table[name], name), "") for name in self.text_columns]
        texts = pc.utf8_trim_whitespace(pc.binary_join_element_wise(*columns, pa.scalar(" ", pa.large_string())))
        return pc.if_else(pc.equal(self.ids(table), ids), texts, None)

    def ids(self, table):
        table.validate(full=True)
        return as_texts(table[self.id_column], self.id_column, ids=True)

    def hashes(self, ids):
        return pd.util.hash_array(ids.to_numpy(), categorize=False)  # uint64, the same in every process


def data_fingerprint(files):
    """Return a hash of the names and sizes of files, and of both ends of the first and the last."""
    digest = hashlib.sha256()
    for number, file in enumerate(files):
        fs, path = fsspec.core.url_to_fs(file)
        digest.update(f"{os.path.basename(path)} {fs.size(path)} ".encode())
        if number in (0, len(files) - 1):
            digest.update(fs.head(path, 2**16) + fs.tail(path, 2**16))
    return digest.hexdigest()[:16]


# ---- runs and judgments

LINES, TEXTS = 200_000, 10_000  # in memory at once
NUMBER = r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"  # neither nan nor inf
RUN = rf"^\s*(?P<query>\S+)\s+\S+\s+(?P<document>\S+)\s+\S+\s+(?P<value>{NUMBER})\s+\S+\s*$"
QRELS = rf"^\s*(?P<query>\S+)\s+(?:\S+\s+)?(?P<document>\S+)\s+(?P<value>{NUMBER})\s*$"  # of TREC, and of BEIR


def read_trec(path, name, pattern):
    """Return a Table (query, document, value) of the lines of a file, which must match the pattern or be empty."""
    parts, count = [], 0
    with user_errors(f"--{name} {path}"), fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
        reader = iter(tqdm(file, desc=f"reading --{name}", unit="line", unit_scale=True, delay=2))
        while lines := list(islice(reader, LINES)):
            fields = pc.extract_regex(pa.array(lines), pattern)
            for row in np.flatnonzero(pc.is_null(fields)).tolist():
                if lines[row].strip() and (count + row or pattern is RUN):  # BEIR's judgments have a header
                    form = "query Q0 document rank score tag" if pattern is RUN else "query [0] document grade"
                    raise UserError(f"line {count + row + 1:,} must be '{form}', not {lines[row].strip()[:80]!r}")
            parts.append(fields.drop_null())
            count += len(lines)
        table = pa.Table.from_struct_array(pa.chunked_array(parts))
        return table.set_column(2, "value", table["value"].cast(pa.float64()))


def read_run(path, name, numbers):
    """Return a DataFrame (query, document, value) of a run, the best of a query first. numbers: Series by query id."""
    run = read_trec(path, name, RUN)
    places = pc.index_in(run["query"], pa.array(numbers.index, pa.string()))
    unknown = run["query"].filter(pc.is_null(places)).unique()
    run = run.set_column(0, "query", pa.array(numbers).take(places)).filter(pc.is_valid(places))
    if not len(run):
        raise UserError(f"--{name} {path}: ranks documents for none of the judged queries; check the ids and --split")
    if len(unknown):
        print(f"{len(unknown):,} queries of --{name} are unknown, or have no positive; ignored")
    order = [("query", "ascending"), ("value", "descending"), ("document", "descending")]  # ties: as in trec_eval
    return run.sort_by(order).to_pandas()


def read_queries(args):
    """Return (texts of the queries, Series of their numbers by id, DataFrame of query and document of the positives).
    Queries of equal texts are one."""
    qrels = read_trec(args.qrels, "qrels", QRELS).to_pandas().drop_duplicates(["query", "document"], keep="last")
    qrels = qrels[qrels["value"] > 0]
    ids = pa.chunked_array([qrels["query"].unique()], pa.large_string())
    with user_errors(f"--queries {args.queries[0]}"):
        texts = TextLookup(args.queries, args.query_columns).texts(ids).to_pandas()
    numbers, texts = pd.factorize(texts.mask(texts == ""))
    numbers = pd.Series(numbers, ids.to_pandas())[numbers >= 0]
    if len(numbers) < len(ids):
        print(f"{len(ids) - len(numbers):,} judged queries are not in --queries, or empty; left out")
    if not len(numbers):
        raise UserError(f"--qrels {args.qrels}: judges no document relevant to a query of {args.queries[0]}")
    positives = qrels.assign(query=qrels["query"].map(numbers)).dropna().astype({"query": int})
    return texts, numbers, positives[["query", "document"]].drop_duplicates()


# ---- negatives


def pick_negatives(run, positives, own, args):
    """Return (rows of `run` that are negatives, {rule: candidates it removed}). Columns: query, value, document, text;
    integers, the last two never the same for two queries; -1: no text. own: documents with the ids of the queries."""
    removed = {}

    def remove(rule, rows):
        nonlocal run
        removed[rule], run = int(rows.sum()), run[~rows]

    lowest = positives["value"].fillna(-np.inf).groupby(positives["query"]).min()
    run = run.assign(lowest=run["query"].map(lowest))
    remove("not in the corpus, or empty", run["text"] < 0)
    remove("of queries without a positive in the corpus", run["lowest"].isna())
    if not args.keep_same_id:
        remove("the query's own document, or equal to it", run["text"].isin(own["text"]))
    remove("known positives", run["document"].isin(positives["document"]))
    remove("equal to a positive or a better candidate", run["text"].isin(positives["text"]) | run.duplicated("text"))
    if {args.absolute_margin, args.relative_margin} != {None}:
        remove("of queries with a positive that has no score", run["lowest"] == -np.inf)
    if (margin := args.absolute_margin) is not None:
        remove(f"within {margin} of the lowest positive", run["value"] + margin > run["lowest"])
    if (margin := args.relative_margin) is not None:
        limit = run["lowest"] - run["lowest"].abs() * margin
        remove(f"within {margin:.1%} of the lowest positive", run["value"] > limit)
    inside = run.groupby("query").cumcount().between(args.range_min, args.range_max - 1)
    remove(f"outside of the ranks {args.range_min} to {args.range_max}", ~inside)
    order = run.groupby("query").sample(frac=1, random_state=args.seed) if args.sampling_strategy == "random" else run
    remove("more than --num_negatives", ~run.index.isin(order.groupby("query").head(args.num_negatives).index))
    return run, removed


def write_rows(rows, negatives, queries, ids, lookup, args):
    """Write --output: a line for each of `rows`, the positives."""
    path, scored = Path(args.output), rows["value"].notna().all()
    part = path.with_name(f".{path.name}.part")
    columns = ["positive", *(f"negative_{i + 1}" for i in range(args.num_negatives))]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "w", encoding="utf-8") as file:
            for start in tqdm(range(0, len(rows), 1000), desc="writing", unit_scale=1000, unit="row", delay=2):
                block = rows[start : start + 1000].reset_index(names="row")
                cells = pd.concat([block, block[["row", "query"]].merge(negatives, on="query")])  # positives first
                cells["text"] = lookup.texts(ids.take(pa.array(cells["document"] % len(ids)))).to_numpy(False)
                lists = cells.groupby("row")[["text", "value"]].agg(list)
                table = pd.DataFrame({"query": queries[block["query"]]})
                if args.allow_fewer:
                    table["documents"] = lists["text"].array
                    table["labels"] = [[1] + [0] * (len(texts) - 1) for texts in lists["text"]]
                else:
                    table[columns] = lists["text"].tolist()
                if scored:
                    table["scores"] = lists["value"].array
                table.to_json(file, orient="records", lines=True, force_ascii=False, double_precision=15)
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"--output {path}: {error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def main(args):
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each load of a local file asks the Hub
    with user_errors("--corpus, --queries"):
        sources = [file for source in args.corpus + args.queries for file in list_files(source)]
    sources += [args.run, args.judged or args.run, args.qrels]
    if Path(args.output).resolve() in map(Path.resolve, map(Path, sources)):
        raise UserError(f"--output {args.output}: is one of the sources; name another file")
    queries, numbers, positives = read_queries(args)
    run = read_run(args.run, "run", numbers)
    judged = read_run(args.judged, "judged", numbers) if args.judged else run[:0]
    own = pd.DataFrame({"query": numbers.array, "document": numbers.index})
    if not args.keep_same_id:
        positives = positives.merge(own, "left", indicator="same").query("same == 'left_only'")

    # documents and texts as integers, which differ between queries
    frames = [run, judged, positives, own]
    codes, ids = pd.factorize(pd.concat([frame["document"] for frame in frames]))
    ids = pa.chunked_array([ids], pa.large_string())
    with user_errors(f"--corpus {args.corpus[0]}"):
        lookup = TextLookup(args.corpus, args.corpus_columns)
        hashes = np.zeros(len(ids), np.uint64)  # of the texts; 0: the text is unknown, or empty
        for start in tqdm(range(0, len(ids), TEXTS), desc="comparing texts", unit_scale=TEXTS, delay=2):
            texts = lookup.texts(ids[start : start + TEXTS]).to_pandas().fillna("").to_numpy(object)
            hashes[start : start + TEXTS] = np.where(texts == "", 0, pd.util.hash_array(texts, categorize=False))
    texts = np.where(hashes == 0, -1, pd.factorize(hashes)[0])
    for i, code in enumerate(np.split(codes, np.cumsum([len(frame) for frame in frames[:-1]]))):
        first = frames[i]["query"] * len(ids)
        frames[i] = frames[i].assign(document=first + code, text=np.where(texts[code] < 0, -1, first + texts[code]))
    run, judged, positives, own = frames
    scores = pd.concat([run, judged]).drop_duplicates("document").set_index("document")["value"]
    positives = positives.assign(value=positives["document"].map(scores))
    if missing := (positives["text"] < 0).sum():
        print(f"{missing:,} positives are not in the corpus, or empty; left out")
        positives = positives[positives["text"] >= 0]

    negatives, removed = pick_negatives(run, positives, own, args)
    print(f"{len(run):,} candidates of {run['query'].nunique():,} queries; removed:")
    for rule, count in removed.items():
        print(f"{count:12,}  {rule}")
    left, counts = set(range(len(queries))), negatives["query"].value_counts()
    unscored = positives["query"][positives["value"].isna()]
    for reason, kept in {
        "not in --run": run["query"],
        "no positive in the corpus": positives["query"],
        "a positive has no score, so no margin applies; give it by --judged":
            left - set(unscored if {args.absolute_margin, args.relative_margin} != {None} else []),
        f"fewer than --num_negatives {args.num_negatives} candidates are left; widen the ranks, or --allow_fewer":
            counts.index[counts >= (1 if args.allow_fewer else args.num_negatives)],
    }.items():  # fmt: skip
        if count := len(left) - len(left := left & set(kept)):
            print(f"{count:,} queries left out: {reason}")
    rows = positives[positives["query"].isin(left)]
    if rows.empty:
        raise UserError(f"--output {args.output}: not written, since every query is left out")
    if unscored := rows["value"].isna().sum():
        print(f"no scores: those of {unscored:,} of {len(rows):,} positives are not in --run; give them by --judged")
    write_rows(rows, negatives, queries, ids, lookup, args)
    print(f"{len(rows):,} rows of {len(left):,} queries are in {args.output}")


if __name__ == "__main__":
    try:
        main(parse_args(sys.argv[1:]))
    except UserError as error:
        traceback.clear_frames(error.__traceback__)  # ends the line of a progress bar
        sys.exit(f"error: {error}")
