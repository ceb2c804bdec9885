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
import glob
import hashlib
import json
import os
import re
import sys
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Literal

import datasets
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import transformers
from datasets.utils.file_utils import xopen
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
    positive_rank: int | None = flag(None, "leave out rows whose positive --run does not rank among its first N")
    sampling_strategy: Literal["top", "random"] = flag("top", "take the first or random candidates of these ranks")
    num_negatives: int = flag(4, "negatives of a query; n-tuples: exactly as many, other formats: at most")
    format: Literal["triplet", "n-tuple", "n-tuple-scores", "labeled-pair", "labeled-list", "lists"] = flag(
        "n-tuple-scores", "form of the rows, as output_format of mine_hard_negatives; lists: query, pos, neg"
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
    if args.positive_rank == 0:
        parser.error("--positive_rank 0: ranks begin at 1")
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

    # ---- texts, and positives with their scores: the first pass over --run
    queries, judged, documents = read_queries(args)
    document_ids = score_positives(judged, queries, args)
    if documents is None:
        documents = read_corpus(document_ids, judged, args)
    rows, texts = documents.find(judged.doc_id)
    judged = judged.assign(document=pair_keys(judged["query"], rows), text=texts)
    rows, texts = documents.find(judged.query_id)  # of the document with the query's own id
    own = judged.assign(document=pair_keys(judged["query"], rows), text=texts)[rows >= 0]
    if args.keep_same_id or args.pairs:  # ids of pairs are row numbers: query 5 may well be about document 5
        own = own[:0]
    is_own = judged.document.isin(own.document)
    judged = judged[(judged["query"] >= 0) & (judged.text >= 0) & ~is_own].drop_duplicates("document")
    num_queries = judged["query"].nunique()
    print(f"{len(judged):,} positives of {num_queries:,} queries; {judged.score.count():,} have a score")
    positives = judged
    if args.positive_rank:
        positives = judged[judged["rank"] <= args.positive_rank]
        left_out = len(judged) - len(positives)
        absent = np.isinf(judged["rank"]).sum()
        print(
            f"{left_out:,} of them are not among the first {args.positive_rank} of their query ({absent:,} are not in "
            "--run at all); rows left out"
        )
    best_first = positives.sort_values("score", ascending=False, kind="stable")
    positives = best_first.drop_duplicates(["query", "text"]).sort_index()  # of equal texts, one is a row

    # ---- negatives and rows: the second pass
    negatives = pick_negatives(positives, judged, own, queries, documents, args)
    if negatives.empty:
        causes = "the ids, --split, and that queries have --num_negatives candidates"
        raise UserError(f"--output {args.output}: not written: no row is left; check {causes}")
    # A labeled pair has one document: a positive without negatives is one, as in sentence-transformers.
    if args.format != "labeled-pair":
        positives = positives[positives["query"].isin(negatives["query"])]
    all_scored = positives.score.notna().all() and negatives.score.notna().all()
    rows = make_rows(positives, negatives, queries.distinct, documents.distinct, all_scored, args)
    count = write_rows(rows, args)
    print(f"{count:,} rows of {positives['query'].nunique():,} queries are in {args.output}")
    print("to train on them:", trainer_flags(args))
    if args.format == "n-tuple-scores" and all_scored:
        largest = max(positives.score.abs().max(), negatives.score.abs().max())
        temperature = 0.05 if largest <= 1 else 1  # of cosines and probabilities, else of logits
        kwargs = f'{{"teacher_temperature": {temperature}}}'
        flags = f"--label_column scores --loss kl --loss_kwargs '{kwargs}'"
        print(f"to distill the model that scored {args.run}, if it is a stronger one: {flags}")


# ---- ids and texts


class Texts:
    """Texts by id. Equal ones have one number, so that queries of equal text share their positives."""

    def __init__(self, texts):
        """texts: Series by id."""
        numbers, distinct = pd.factorize(texts)
        rows = pd.Series(numbers, texts.index).sort_index()  # a row sorts as its id does
        self.ids = pa.array(rows.index, pa.large_string())
        self.numbers = np.append(rows.to_numpy(), -1)  # of each row's text
        self.distinct = distinct.to_numpy(object)  # texts

    def find(self, ids):
        """Return the rows of (n,) ids and the numbers of their texts, (n,) int64; -1: none."""
        rows = pc.index_in(pa.array(ids, pa.large_string()), self.ids)
        rows = pc.fill_null(rows, -1).to_numpy().astype(np.int64)
        return rows, self.numbers[rows]


def pair_keys(queries, documents):
    """Return (n,) int64, equal for equal pairs of numbers of queries and of documents."""
    return queries * 2**32 + documents


def read_queries(args):
    """Return the Texts of all queries, a DataFrame (query_id, doc_id, query) of the positives, query: the number of
    their text, and the Texts of the documents of --pairs, or else None."""
    documents = None
    if args.pairs:
        rows = pair_ids(read_pair_texts(args)).drop_duplicates(PAIR)
        judged = rows[PAIR]
        texts = rows.drop_duplicates("query_id").set_index("query_id")["query"]
        document_texts = rows.drop_duplicates("doc_id").set_index("doc_id")["document"]
        check_ranked_texts("queries", texts, args)
        check_ranked_texts("documents", document_texts, args)
        documents = Texts(document_texts)
    else:
        _, sources, qrels = collection_files(args)
        judged = read_qrels(*qrels).drop_duplicates(PAIR, keep="last")
        judged = judged.loc[judged.relevance > 0, PAIR]
        texts = read_texts("queries", sources, args.query_columns)
    is_judged = texts.index.isin(judged.query_id)
    queries = Texts(pd.concat([texts[is_judged], texts[~is_judged]]))  # rows are in the order of judged queries
    _, numbers = queries.find(judged.query_id)
    merged = len(queries.ids) - len(queries.distinct)
    if merged:
        print(f"{merged:,} queries have the text of another one; they are one, with the positives of both")
    return queries, judged.assign(query=numbers), documents


def check_ranked_texts(name, texts, args):
    """Raise UserError if eval_incremental.py ranked other "queries" or "documents" than `texts`, a Series by id: ids
    of --pairs are numbers of rows, so those of other files, or in another order, would be taken for these."""
    folders = list(Path(args.run).parents)[:2]  # of the ranking, or of all rankings
    for path in [folder / f"{name}.jsonl" for folder in folders if (folder / "metrics.json").exists()]:
        with suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
            for row in map(json.loads, file):
                shown = row["text"].removesuffix(" … (cut)")  # as the evaluator ends a long document
                text = texts.get(row["_id"], "")
                if row["text"] != text and row["text"] != f"{text[: len(shown)]} … (cut)":
                    advice = "give the files and columns that it ranks, in their order"
                    found = f"its {path.name} has {row['text'][:60]!r} as {row['_id']}"
                    raise UserError(f"--pairs {args.pairs[0]}: not the rows of --run {args.run}: {found}; {advice}")


def collection_files(args):
    """Return the sources of the documents, of the queries and of the judgments."""
    if not args.beir:
        return args.corpus, args.queries, [args.qrels]
    with user_errors(f"--beir {args.beir}"):
        files, *more = collections_of(args.beir, args.split).values()
        if more:
            raise UserError("has several collections: choose one by --split")
    return files


def read_corpus(ranked, judged, args):
    """Return the Texts of the documents that are ranked, (n,) ids, or judged, or have the id of a query."""
    sources, _, _ = collection_files(args)
    ids = pa.chunked_array([ranked, *(pa.array(judged[name].unique(), pa.large_string()) for name in PAIR)])
    return Texts(read_texts("corpus", sources, args.corpus_columns, ids.unique()))


def read_pair_texts(args):
    """Return a DataFrame (query, document) of the texts of --pairs, by row number."""
    with user_errors(f"--pairs {args.pairs[0]}"):
        dataset = open_sources(args.pairs)
        columns = args.columns or named_columns(dataset.column_names)[:2]
        print(f"query: {columns[0]}, positive: {columns[1]}")
        table = dataset.select_columns(columns)[:]
        table.validate(full=True)
        query, document = [join_texts(table, [name]).to_pandas() for name in columns]
    print(f"{len(table):,} rows (query: {columns[0]}, document: {columns[1]})")
    return pd.DataFrame({"query": query, "document": document})


def read_texts(name, sources, columns, requested=None):
    """Return the texts of sources by id, a Series, of the requested ids, an Arrow array; None: of all.

    Raise UserError if documents repeat an id with another text; of queries the first one counts, with a warning."""
    parts = []
    with user_errors(f"--{name} {sources[0]}"):
        dataset = open_sources(sources, columns[:1] or ["_id", "id"])
        usual = ["_id", "title", "text"] if name == "corpus" else ["_id", "text"]
        columns = columns or usual_columns(usual, dataset.column_names)
        id_column, *text_columns = columns
        dataset = dataset.select_columns(columns)
        print(f"{len(dataset):,} rows of --{name} (id: {id_column}, text: {', '.join(text_columns)})")
        for table in tqdm(dataset.iter(100_000), desc=f"reading --{name}", delay=2):
            table.validate(full=True)  # a damaged Arrow file has offsets that lead anywhere
            keys = as_texts(table[id_column], id_column, ids=True)
            part = pa.table({"id": keys, "text": join_texts(table, text_columns)})
            parts.append(part if requested is None else part.filter(pc.is_in(keys, requested)))
        found = pa.concat_tables(parts).to_pandas()
        found = found[found.text != ""].drop_duplicates()
        again = found.id.duplicated()
        if again.any():
            repeated = f"{again.sum():,} rows repeat an id, such as {found.id[again].iloc[0]!r}"
            if name == "corpus":
                raise UserError(f"{repeated}, with another text: give each passage an id of its own, and rank those")
            print(f"warning: --{name} {sources[0]}: {repeated}; left out", file=sys.stderr)
    return found[~again].set_index("id").text


def open_sources(sources, ids=()):
    """Return a Dataset of the rows of sources, which must be of one format."""
    return open_files(list(chain.from_iterable(map(list_files, sources))), streaming=False, ids=ids)


def join_texts(table, columns):
    """Return the texts of columns of a table, joined by spaces, without surrounding spaces."""
    cells = [as_texts(table[name], name) for name in columns]
    space = pa.scalar(" ", pa.large_string())
    texts = pc.binary_join_element_wise(*cells, space, null_handling="replace")  # null: an empty text
    return pc.utf8_trim_whitespace(texts)


# ---- the run file


def read_parts(args, queries):
    """Yield DataFrames of consecutive lines of --run: query_id, doc_id, score, scored, row of the query and number of
    its text (-1: none). All lines of a query are in one part; raise UserError if they are not consecutive."""
    seen = np.zeros(len(queries.ids) + 1, bool)
    rest = []
    for part in tqdm(chain(trec_parts(args.run, "run"), [None]), desc="reading --run", unit=" part", delay=2):
        if part is None:  # the end
            whole = pd.concat(rest)
        else:
            is_last = part.query_id == part.query_id.iloc[-1]
            whole = pd.concat([*rest, part[~is_last]])
            if whole.empty:  # of one query so far
                rest.append(part)
                continue
            rest = [whole[whole.query_id == part.query_id.iloc[-1]], part[is_last]]
            whole = whole[whole.query_id != part.query_id.iloc[-1]]
        rows, numbers = queries.find(whole.query_id)
        again = seen[rows] & (rows >= 0)
        if again.any():
            name = whole.query_id[again].iloc[0]
            raise UserError(f"--run {args.run}: lines of query {name!r} are not together: sort it by its first column")
        seen[rows] = True
        yield whole.assign(row=rows, query=numbers)


def score_positives(judged, queries, args):
    """Add to `judged` the best score and the best rank, from 1, that --run gives each pair (NaN: none). Return the ids
    of all documents of --run, an Arrow array."""
    ids = pa.array(judged.doc_id.unique(), pa.large_string())
    numbers = pc.index_in(pa.array(judged.doc_id, pa.large_string()), ids).to_numpy()
    keys, place = np.unique(pair_keys(judged["query"], numbers), return_inverse=True)
    keys = np.append(keys, np.iinfo(np.int64).max)  # of no pair: searchsorted() returns a place in any case
    scores = np.full(len(keys), -np.inf)
    ranks = np.full(len(keys), np.inf)
    documents = ids[:0]
    for part in read_parts(args, queries):
        doc_ids = pa.array(part.doc_id, pa.large_string())
        documents = pa.chunked_array([documents, doc_ids]).unique()
        part = part.assign(document=pc.fill_null(pc.index_in(doc_ids, ids), -1).to_numpy())
        if not (args.keep_same_id or args.pairs):  # the query's own document is no candidate
            part = part[part.query_id != part.doc_id]
        part = part.assign(rank=part.groupby("query_id").score.rank("min", ascending=False))
        part = part[(part.document >= 0) & (part["query"] >= 0)]
        own_keys = pair_keys(part["query"], part.document.astype(np.int64)).to_numpy()
        places = np.searchsorted(keys, own_keys)
        is_judged = keys[places] == own_keys
        np.minimum.at(ranks, places[is_judged], part["rank"].to_numpy()[is_judged])
        is_judged &= part.scored.to_numpy()
        np.maximum.at(scores, places[is_judged], part.score.to_numpy()[is_judged])
    judged["score"] = np.where(np.isfinite(scores), scores, np.nan)[place]
    judged["rank"] = ranks[place]
    return documents


# ---- negatives


def pick_negatives(positives, judged, own, queries, documents, args):
    """Return a DataFrame (query, text, score) of the negatives of the queries of positives, best first; print how
    many lines of --run each rule removes. judged: all positives; own: documents that have the id of their query."""
    # With -inf for a positive without a score, no candidate of its query passes a margin.
    lowest = positives.score.fillna(-np.inf).groupby(positives["query"]).min()
    own_text = pair_keys(own["query"], own.text)
    judged_text = pair_keys(judged["query"], judged.text)
    ids_of_text = np.bincount(queries.numbers[:-1], minlength=1)
    counts = {}  # {rule: [lines removed, queries left]}
    total = 0
    several = []  # lines of queries that have several ids, which may stand anywhere
    chosen = []

    def pick(run):
        run = run.sort_values(["score", "row"], ascending=False)  # ties: as in trec_eval
        run = run.assign(lowest=run["query"].map(lowest), score=run.score.where(run.scored))
        run = remove(run, run.lowest.isna(), "of queries without a text, or without a positive that is kept", counts)
        run = remove(run, run.text < 0, "not in the corpus, or empty", counts)
        is_own = run.query_text.isin(own_text)
        run = remove(run, is_own, "the query's own document, or equal to it", counts)
        is_positive = run.query_document.isin(judged.document)
        run = remove(run, is_positive, "known positives", counts)
        is_copy = run.query_text.isin(judged_text)
        is_repeated = run.duplicated("query_text")
        run = remove(run, is_copy | is_repeated, "equal to a positive or a better candidate", counts)
        chosen.append(choose(run, counts, args)[["query", "text", "score"]])

    for part in read_parts(args, queries):
        total += len(part)
        rows, texts = documents.find(part.doc_id)
        query = part["query"].to_numpy()
        run = pd.DataFrame({"query": query, "row": rows, "text": texts, "score": part.score.to_numpy()})
        run = run.assign(scored=part.scored.to_numpy(), query_document=pair_keys(run["query"], rows))
        run["query_text"] = pair_keys(run["query"], texts)
        is_several = (query >= 0) & (ids_of_text[query] > 1)
        several.append(run[is_several])
        pick(run[~is_several])
    pick(pd.concat(several, ignore_index=True))
    print(f"{total:,} candidates in --run\n     removed queries left  rule")
    for rule, (removed, left) in counts.items():
        print(f"{removed:12,} {left:12,}  {rule}")
    return pd.concat(chosen)


def choose(run, counts, args):
    """Return the negatives among candidates, best first, by margins, ranks and --sampling_strategy."""
    if args.absolute_margin is not None:
        is_below = run.score + args.absolute_margin <= run.lowest
        rule = f"within {args.absolute_margin} of the lowest positive, or a score is missing"
        run = remove(run, ~is_below, rule, counts)
    if args.relative_margin is not None:
        highest = run.lowest - run.lowest.abs() * args.relative_margin
        is_below = run.score <= highest
        rule = f"within {args.relative_margin:.1%} of the lowest positive, or a score is missing"
        run = remove(run, ~is_below, rule, counts)
    ranks = run.groupby("query").cumcount()
    is_inside = ranks.between(args.range_min, args.range_max - 1)
    run = remove(run, ~is_inside, f"outside of ranks {args.range_min} to {args.range_max - 1}", counts)
    candidates = run
    if args.sampling_strategy == "random":
        candidates = run.sample(frac=1, random_state=args.seed)  # all, in random order
    chosen = candidates.groupby("query").head(args.num_negatives)
    run = remove(run, ~run.index.isin(chosen.index), "more than --num_negatives", counts)
    num_required = args.num_negatives if args.format.startswith("n-tuple") else 1
    num_found = run.groupby("query").text.transform("size")
    return remove(run, num_found < num_required, "of queries with fewer than --num_negatives", counts)


def remove(run, rows, rule, counts):
    """Return `run` without `rows`, a mask; count how many lines the rule removes, and how many queries are left."""
    run = run[~rows]
    removed, left = counts.get(rule, (0, 0))
    counts[rule] = removed + int(rows.sum()), left + run["query"].nunique()
    return run


# ---- output


def make_rows(positives, negatives, queries, texts, all_scored, args):
    """Yield the rows of --format, {column: value}; with scores, except for formats without, if `all_scored`."""
    if args.format == "labeled-pair":  # each positive and each negative of a query once
        pairs = pd.concat([positives.assign(label=1), negatives.assign(label=0)])
        pairs = pairs[["query", "text", "label", "score"]].sort_values("query", kind="stable")
        for query, text, label, score in pairs.itertuples(index=False):
            cells = {"query": queries[query], "document": texts[text], "label": label}
            yield cells | ({"score": score} if all_scored else {})
        return

    negatives = negatives.sort_values("query", kind="stable")
    if args.format == "lists":  # a row a query, in the order of their first positives
        positives = positives.groupby("query", sort=False).text.agg(list).reset_index().assign(score=np.nan)
    starts = np.searchsorted(negatives["query"], positives["query"], "left").tolist()
    ends = np.searchsorted(negatives["query"], positives["query"], "right").tolist()
    found_texts = negatives.text.to_numpy()
    found_scores = negatives.score.to_numpy()
    pairs = positives[["query", "text", "score"]].itertuples(index=False)
    for (number, text, score), start, end in zip(pairs, starts, ends):
        query = queries[number]
        found = texts[found_texts[start:end]].tolist()
        if args.format == "lists":
            yield {"query": query, "pos": texts[text].tolist(), "neg": found}
            continue
        positive = texts[text]
        scores = {"scores": [score, *found_scores[start:end].tolist()]} if all_scored else {}
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
        "lists": "--columns query pos neg --num_negatives 2",
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


# ---- cells, runs and pairs (same in eval_incremental.py)


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


def usual_columns(names, available):
    """Return the `names` of columns as a table has them: a title is optional, and MTEB's `id` stands for `_id`."""
    ids = {"_id": "id"} if "_id" not in available and "id" in available else {}
    return [ids.get(name, name) for name in names if name in available or name != "title"]


PAIR = ["query_id", "doc_id"]  # columns that identify a row of a ranking or of judgments


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
