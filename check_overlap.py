"""Find texts of evaluation collections in training data, and write the rows that have none.

    python check_overlap.py --train_data a.parquet b.jsonl --columns query positive --beir scifact nfcorpus
    python check_overlap.py --train_data 'train/*.parquet' --pairs test.csv --pair_columns query title \
        --output clean.parquet

Texts are compared by their words: Unicode NFKC, without case, punctuation and invisible characters. A query or
document occurs in a row

    verbatim  a text of the row has the same words
    inside    a longer text of the row contains them as a whole
    ngrams    the texts of the row contain at least --min_share of its distinct n-grams of --ngram words

One of fewer than --ngram words must occur verbatim: many texts contain "what is it". --report has a line for each:

    {"source": "a.parquet", "row": 17, "collection": "scifact", "type": "query", "id": "42", "kind": "inside",
     "share": 1.0, "text": "Vitamin D builds bones.", "row_text": "Is it true that vitamin D builds bones?"}

Queries are those that --split judges. Documents are searched for without their titles, unless they have nothing else.
Left out on purpose: paraphrases, translations, texts of which a row has a smaller part, ids in place of texts.
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
import unicodedata
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path

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

ROWS = 1000  # of training data at a time

# ---- options


def flag(default, help):
    """Return the dataclass field of a command-line option."""
    kind = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**kind, metadata={"help": help})


@dataclass
class Args:
    train_data: list[str] = flag([], "sources of rows: files, globs, folders, URLs or Hub ids, as in the trainers")
    columns: list[str] = flag([], "columns of texts, or of lists of texts; none: all of these")
    beir: list[str] = flag([], "folders or Hub ids of collections in the layout of BEIR, NanoBEIR or MTEB")
    split: str = flag("test", "judgments of --beir, whose queries are searched for")
    pairs: list[str] = flag([], "sources of (query, document) rows, as one more collection")
    pair_columns: list[str] = flag([], "query and document column of --pairs; none: the first two")
    ngram: int = flag(8, "words of an n-gram")
    min_share: float = flag(0.8, "fraction of a text's n-grams that a row contains, if the text occurs in it")
    report: str = flag("overlap.jsonl", "file to write all findings to")
    output: str | None = flag(None, "Parquet file to write the rows to that contain no query")
    also_documents: bool = flag(False, "leave rows that contain a document out of --output, too")
    overwrite: bool = flag(False, "replace existing files, when the new ones are complete")


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
    if not args.train_data or not (args.beir or args.pairs):
        parser.error("requires --train_data, and --beir or --pairs")
    if len(args.pair_columns) not in (0, 2):
        parser.error("--pair_columns: takes two names, of queries and documents")
    if args.ngram < 1 or not 0 < args.min_share <= 1:
        parser.error("--ngram must be 1 or more, and --min_share above 0 and at most 1")
    if "://" in f"{args.report} {args.output}" or not (args.output or ".parquet").endswith(".parquet"):
        parser.error("--report and --output must be local files, and --output end in .parquet")
    return args


# ---- main


def main(args):
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each load of a local file asks the Hub
    for path in filter(None, [args.report, args.output]):
        if os.path.exists(path) and not args.overwrite:
            raise UserError(f"{path}: exists; choose another file, or set --overwrite")
        with user_errors(path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(f"{path}.part").touch()  # is written first, and replaces `path` at the end
    sources = [open_train_data(name, args) for name in args.train_data]
    if args.output:  # of one schema: checked now, not when the first source is searched
        names = [next(stream.iter(1)).column_names for _, stream, _ in sources]
        if others := [source[0] for source, columns in zip(sources, names) if columns != names[0]]:
            advice = "give each a call and an --output of its own"
            raise UserError(f"--train_data {others[0]}: other columns than {sources[0][0]}: {advice}")
    parts = open_pairs(args)
    for name in args.beir:
        parts += open_beir(name, args)
    index = make_index(parts, args)

    num_rows = 0
    num_kept = 0
    rows_file = None
    with open(f"{args.report}.part", "w", encoding="utf-8") as report, tqdm(unit="row", delay=2) as bar:
        for source, first_row, table, texts, rows in iterate_rows(sources):
            keep = np.ones(len(table), bool)
            for row, finding in find(texts, rows, parts, index, args):
                if finding["type"] == "query" or args.also_documents:
                    keep[row] = False
                finding = {"source": source, "row": first_row + row} | finding
                report.write(json.dumps(finding, ensure_ascii=False) + "\n")
            if args.output:
                with user_errors(f"--output {args.output}: rows of {source}"):
                    rows_file = rows_file or pq.ParquetWriter(f"{args.output}.part", table.schema)
                    rows_file.write_table(table.filter(keep).cast(rows_file.schema))
            num_rows += len(table)
            num_kept += keep.sum()
            bar.update(len(table))
    os.replace(f"{args.report}.part", args.report)
    if rows_file:
        rows_file.close()
        os.replace(f"{args.output}.part", args.output)

    print_counts(parts)
    print(f"searched {num_rows:,} rows; the findings are in {args.report}")
    if args.output:
        print(f"{num_kept:,} rows are in {args.output}; {num_rows - num_kept:,} were left out")


def print_counts(parts):
    """Print a line for each collection. parts: the queries and the documents of each, in turns."""
    lines = []
    for queries, documents in zip(parts[::2], parts[1::2]):
        line = [queries.collection]
        for part in (queries, documents):
            line += [len(part.rows), part.is_found.sum(), part.num_rows]
        lines.append(line)
    columns = ["collection", "queries", "found", "in rows", "documents", "found", "in rows"]
    table = pd.DataFrame(lines, columns=columns)
    print(table.to_string(index=False, formatters=[str] + ["{:,}".format] * 6))


# ---- training data


def open_train_data(name, args):
    """Return (name, stream, columns of texts) of a value of --train_data, of which the first row was read."""
    with user_errors(f"--train_data {name}"):
        stream = open_files(list_files(name))
        first = next(stream.iter(1))
        texts = [part.name for part in first.schema if holds_texts(part.type)]
        columns = args.columns or named_columns(texts)
        if not columns or not set(columns) <= set(first.column_names):
            raise UserError(f"choose --columns that hold texts; available: {', '.join(first.column_names)}")
        row_texts(first, columns)
        if others := [column for column in first.column_names if column not in columns]:
            warn_once(f"--train_data {name}: searches {', '.join(columns)}, not {', '.join(others)}")
        if not args.output:
            stream = stream.select_columns(columns)
        return name, stream, columns


def holds_texts(kind):
    """Return whether an Arrow type is one of texts, or of lists of texts."""
    value = kind.value_type if is_list(kind) else kind
    return pa.types.is_string(value) or pa.types.is_large_string(value)


def iterate_rows(sources):
    """Yield (name of a source, number of the first row, table, its texts, the row of each) of ROWS rows at a time."""
    for name, stream, columns in sources:
        first_row = 0
        with user_errors(f"--train_data {name}"):
            for table in stream.iter(ROWS):
                table.validate(full=True)  # a damaged Arrow file has offsets that lead anywhere
                yield name, first_row, table, *row_texts(table, columns)
                first_row += len(table)


def row_texts(table, columns):
    """Return the texts of columns of a table, (n,) large_string, and the row of each, (n,) int."""
    texts = []
    rows = []
    for name in columns:
        column = pa.concat_arrays(table[name].chunks)
        numbers = pa.array(range(len(column)))
        if is_list(column.type):
            # not list_parent_indices, which counts the values that a null list may have; list_flatten does not
            numbers = pa.array(np.repeat(numbers, pc.fill_null(pc.list_value_length(column), 0)))
            column = pc.list_flatten(column)
        cells = as_texts(column, name)
        texts.append(cells.drop_null())
        rows.append(numbers.filter(cells.is_valid()))
    return pa.concat_arrays(texts), np.concatenate(rows)


# ---- collections


@dataclass
class Part:
    """The queries or the documents of a collection, mapped from disk."""

    source: str  # flag and value
    collection: str
    type: str  # "query" or "document"
    dataset: datasets.Dataset
    id_column: str | None  # None: the id is the number of the row
    text_columns: list[str]  # the text is the last one that is not empty
    rows: np.ndarray  # (n,) int: the rows of the dataset that are searched for
    num_rows: int = 0  # rows of training data in which one of them occurs

    def __post_init__(self):
        self.is_found = np.zeros(len(self.rows), bool)

    def read(self, numbers):
        """Return the ids and the texts, "" where there is none, of rows[numbers]."""
        ids = self.rows[numbers]
        texts = pa.array([""] * len(ids), pa.large_string())
        with user_errors(self.source):
            table = self.dataset[ids]
            for name in self.text_columns:
                cells = as_texts(table[name], name).fill_null("")
                texts = pc.if_else(pc.equal(pc.utf8_trim_whitespace(cells), ""), texts, cells)
            if self.id_column:
                ids = as_texts(table[self.id_column], self.id_column, ids=True)
        return ids, texts


def open_beir(name, args):
    """Return the Parts of the collections of a value of --beir."""
    parts = []
    source = f"--beir {name}"
    with user_errors(source):
        for collection, files in collections_of(name, args.split).items():
            documents, queries, judgments = (open_files(part, streaming=False) for part in files)
            id_column, *texts = usual_columns(["_id", "text"], queries.column_names)
            judged = read_column(judgments, "query-id").combine_chunks()
            rows = np.flatnonzero(pc.is_in(read_column(queries, id_column), judged))
            if not len(rows):
                raise UserError(f"--split {args.split} judges none of its queries")
            parts.append(Part(source, collection, "query", queries, id_column, texts, rows))
            id_column, *texts = usual_columns(["_id", "title", "text"], documents.column_names)
            rows = np.arange(len(documents))
            parts.append(Part(source, collection, "document", documents, id_column, texts, rows))
    return parts


def open_pairs(args):
    """Return the Parts of --pairs: each query and each document once, with the number of its first row as its id."""
    parts = []
    if args.pairs:
        source = f"--pairs {args.pairs[0]}"
        with user_errors(source):
            pairs = open_files(list(chain.from_iterable(map(list_files, args.pairs))), streaming=False)
            columns = args.pair_columns or named_columns(pairs.column_names)[:2]
            if len(columns) < 2:
                raise UserError(f"choose two --pair_columns; available: {', '.join(pairs.column_names)}")
            for kind, column in zip(["query", "document"], columns):
                rows = np.flatnonzero(~read_column(pairs, column).to_pandas().duplicated())
                parts.append(Part(source, args.pairs[0], kind, pairs, None, [column], rows))
    return parts


def read_column(dataset, name):
    """Return a column of ids or texts of a mapped Dataset."""
    return as_texts(dataset.select_columns([name])[:][name], name, ids=True)


# ---- words and n-grams

# Characters that are not displayed, such as a soft hyphen: Unicode's Default_Ignorable_Code_Point, and all of format.
INVISIBLE = (
    r"[\p{Cf}\x{34F}\x{115F}\x{1160}\x{17B4}\x{17B5}\x{180B}-\x{180F}\x{3164}\x{FE00}-\x{FE0F}\x{FFA0}"
    r"\x{E0000}-\x{E0FFF}]"
)
# In Turkish, the capital of i is İ, which folds to i and a dot, and I is that of ı.
DOTS = r"i\x{307}|ı"
# Words end at spaces, and at all but letters, marks and numbers. In scripts without spaces, each character is a word.
NO_WORD = r"[^\pL\pM\pN ]+"
UNSPACED = r"([\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}])"
nfkc = partial(unicodedata.normalize, "NFKC")


def split_words(texts):
    """Return the words of each of (n,) texts, a ListArray; of a text without words, one empty word."""
    visible = pc.replace_substring_regex(texts, INVISIBLE, "").to_pylist()
    folded = [nfkc(nfkc(text).casefold()) for text in visible]  # NFKC_Casefold of the Unicode standard
    spaced = pa.array(folded, pa.large_string())
    for pattern, replacement in ((DOTS, "i"), (UNSPACED, r" \1 "), (NO_WORD, " ")):
        spaced = pc.replace_substring_regex(spaced, pattern, replacement)
    return pc.ascii_split_whitespace(pc.ascii_trim_whitespace(spaced))


def join_words(words):
    """Return texts in normal form, their words separated by single spaces, a list."""
    return pc.binary_join(words, pa.scalar(" ", pa.large_string())).to_pylist()


def hash_ngrams(words, size):
    """Return the 64-bit hashes of the n-grams of (n,) texts, and the number of the text of each, ascending.

    words: of split_words. A text of fewer than `size` words has one n-gram, filled up with empty words."""
    distinct = words.flatten().dictionary_encode()
    by_word = np.fromiter(map(hash, distinct.dictionary.to_pylist()), np.int64).view(np.uint64)
    lengths = pc.list_value_length(words).to_numpy()
    padded = np.maximum(lengths, size)
    owners = np.repeat(np.arange(len(words)), padded)
    places = np.arange(len(owners)) - (np.cumsum(padded) - padded)[owners]  # of words in their texts
    hashes = np.zeros(len(owners), np.uint64)
    hashes[places < lengths[owners]] = by_word[distinct.indices]
    count = max(0, len(hashes) - size + 1)
    ngrams = np.zeros(count, np.uint64)
    for place in range(size):  # a polynomial modulo 2**64; its base is odd, so that no bit is lost
        ngrams = ngrams * np.uint64(0x9E3779B97F4A7C15) + hashes[place : place + count]
    # An n-gram lies in one text. 0: a text without words, as hash("") is 0.
    is_valid = (owners[:count] == owners[size - 1 :]) & (ngrams != 0)
    return ngrams[is_valid], owners[:count][is_valid]


@dataclass
class Index:
    """Hashes of n-grams of the texts of all Parts, which are numbered in order."""

    hashes: np.ndarray  # (m,) uint64, ascending
    numbers: np.ndarray  # (m,) int: the text of each
    filter: np.ndarray  # (2**bits,) bool: whether a hash begins with these bits
    shift: np.uint64  # 64 - bits


def make_index(parts, args):
    """Return the Index of the texts of all Parts."""
    counts = np.zeros(2**22, np.int64)  # n-grams so far, by the first bits of their hashes
    picked = []
    first = 0
    for part in parts:
        for start in tqdm(range(0, len(part.rows), 10_000), desc=f"indexing {part.collection}", delay=2):
            _, texts = part.read(slice(start, start + 10_000))
            ngrams, owners = hash_ngrams(split_words(texts), args.ngram)
            buckets = (ngrams >> np.uint64(42)).astype(np.int64)
            counts += np.bincount(buckets, minlength=len(counts))
            picked.append(pick_rarest(ngrams, first + start + owners, counts[buckets], args.min_share))
        first += len(part.rows)
    picked = pd.concat(picked).sort_values("ngram")
    hashes = picked.ngram.to_numpy()
    bits = max(16, (16 * len(hashes)).bit_length())  # so that at most 1 of 16 other n-grams passes the filter
    index = Index(hashes, picked.owner.to_numpy(), np.zeros(2**bits, bool), np.uint64(64 - bits))
    index.filter[hashes >> index.shift] = True
    return index


def pick_rarest(ngrams, owners, counts, min_share):
    """Return a DataFrame (ngram, owner) of the rarest distinct n-grams of each text, and so many of them that no row
    contains `min_share` of all without one of these. counts: how often each occurs."""
    found = pd.DataFrame({"ngram": ngrams, "owner": owners, "count": counts}).drop_duplicates(["owner", "ngram"])
    found = found.sort_values(["owner", "count"])
    groups = found.groupby("owner").ngram
    sizes = groups.transform("size")
    num_dispensable = sizes - np.floor(min_share * sizes)
    return found[groups.cumcount() <= num_dispensable].drop(columns="count")


# ---- search


def find(texts, rows, parts, index, args):
    """Yield (row, finding) of (n,) texts of training data and their rows; count the findings in `parts`."""
    words = split_words(texts)
    numbers, candidates = find_candidates(words, rows, index, args.ngram)
    if not len(numbers):
        return
    forms = join_words(words)
    row_places = {row: np.flatnonzero(rows == row) for row in set(candidates.tolist())}  # of its texts
    first = 0
    for part in parts:
        start, stop = np.searchsorted(numbers, [first, first + len(part.rows)])
        own_numbers = numbers[start:stop] - first
        ids, own_texts = part.read(own_numbers)
        own_forms = join_words(split_words(own_texts))
        found_rows = set()
        for place, row in enumerate(candidates[start:stop].tolist()):
            row_forms = [forms[other] for other in row_places[row]]
            found = compare(own_forms[place], row_forms, args)
            if found:
                kind, share, row_place = found
                found_rows.add(row)
                part.is_found[own_numbers[place]] = True
                finding = {"collection": part.collection, "type": part.type, "id": str(ids[place]), "kind": kind}
                row_text = texts[row_places[row][row_place]].as_py()
                yield row, finding | {"share": share, "text": own_texts[place].as_py(), "row_text": row_text}
        part.num_rows += len(found_rows)
        first += len(part.rows)


def find_candidates(words, rows, index, size):
    """Return the pairs of a text of the Index and a row that share an n-gram: its numbers, ascending, and the rows.

    words: of texts, by split_words; rows: (n,) int, the row of each."""
    ngrams, owners = hash_ngrams(words, size)
    passes = index.filter[ngrams >> index.shift]
    ngrams = ngrams[passes]
    rows = rows[owners[passes]]
    first = np.searchsorted(index.hashes, ngrams, side="left")
    sizes = np.searchsorted(index.hashes, ngrams, side="right") - first  # of the ranges of equal hashes
    places = np.repeat(first - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
    pairs = np.unique(index.numbers[places] * ROWS + np.repeat(rows, sizes))
    return np.divmod(pairs, ROWS)


def compare(form, row_forms, args):
    """Return (kind, share, place) of a text in the texts of a row, None if it does not occur; place: of the row's text
    that contains it, or most of its n-grams. All are in normal form, of join_words."""
    if form in row_forms:
        return "verbatim", 1.0, row_forms.index(form)
    for place, row_form in enumerate(row_forms):
        if f" {form} " in f" {row_form} ":
            return "inside", 1.0, place
    ngrams = ngram_set(form, args.ngram)
    common = [ngrams & ngram_set(row_form, args.ngram) for row_form in row_forms]
    share = len(frozenset().union(*common)) / max(1, len(ngrams))  # a shorter text has none
    if share < args.min_share:
        return None
    return "ngrams", share, np.argmax(list(map(len, common)))


@lru_cache(maxsize=1000)
def ngram_set(form, size):
    """Return the n-grams of words of a text in normal form; none if it is shorter."""
    words = form.split(" ")
    return frozenset(tuple(words[i : i + size]) for i in range(len(words) - size + 1))


# ---- errors and files (same in mine_negatives.py)


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


# ---- columns and collections (same in mine_negatives.py)


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
