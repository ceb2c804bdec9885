"""Find texts of evaluation collections in training data, and write the rows that have none.

    python check_overlap.py --train_data a.parquet b.jsonl --columns query positive --beir scifact nfcorpus
    python check_overlap.py --train_data 'train/*.parquet' --columns query positive \
        --pairs test.csv --pair_columns query title --output clean.parquet

Texts are compared by their words: Unicode NFKC, without case, punctuation and invisible characters. A query or
document occurs in a row

    verbatim  a text of the row has the same words
    inside    a longer text of the row contains them as a whole
    ngrams    the texts of the row contain at least --min_share of its distinct n-grams of --ngram words

One of fewer than --ngram words must occur verbatim: many texts contain "what is it". --report has a line for each:

    {"source": "a.parquet", "row": 17, "collection": "scifact", "type": "query", "id": "42", "kind": "inside",
     "share": 1.0, "text": "Vitamin D builds bones.", "row_text": "Is it true that vitamin D builds bones?"}

Queries are those that --split judges; documents are searched for without their titles. Left out on purpose:
paraphrases, translations, texts of which a row has a smaller part, ids in place of texts.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["backports.zstd>=1,<2; python_version < '3.14'", "datasets>=5.2,<6",
#   "fsspec[http]>=2026.1", "numpy>=2.2,<3", "pandas>=3.1,<4", "pyarrow>=24,<27", "tqdm>=4.67,<5"]
# ///

import argparse
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
from datasets.utils.file_utils import xopen
from pyarrow.dataset import ParquetFragmentScanOptions
from tqdm.auto import tqdm

ROWS = 1000  # of training data at a time

# ---- options


def parse_args(argv):
    """Return the parsed flags; exit on a wrong value."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    option = parser.add_argument
    many = {"nargs": "+", "action": "extend", "default": []}
    option("--train_data", **many, required=True, help="sources of rows: files, globs, URLs or Hub ids")
    option("--columns", **many, required=True, help="columns of texts, or of lists of texts")
    option("--beir", **many, help="folders or Hub ids of collections in the layout of BEIR, NanoBEIR or MTEB")
    option("--split", default="test", help="judgments of --beir, whose queries are searched for")
    option("--pairs", **many, help="sources of (query, document) rows, as one more collection")
    option("--pair_columns", **many, help="query and document column of --pairs")
    option("--ngram", type=int, default=8, help="words of an n-gram")
    option("--min_share", type=float, default=0.8, help="fraction of a text's n-grams that a row must contain")
    option("--report", default="overlap.jsonl", help="file to write all findings to")
    option("--output", help="Parquet file to write the rows to that contain no query")
    option("--also_documents", action="store_true", help="leave rows that contain a document out of --output, too")
    option("--overwrite", action="store_true", help="replace existing files, when the new ones are complete")
    args = parser.parse_args(argv)
    if not (args.beir or args.pairs) or len(args.pair_columns) != 2 * bool(args.pairs):
        parser.error("requires --beir, or --pairs and two --pair_columns, of queries and documents")
    if args.ngram < 1 or not 0 < args.min_share <= 1:
        parser.error("--ngram must be 1 or more, and --min_share above 0 and at most 1")
    if args.output and len(args.train_data) > 1:
        parser.error("--output has the rows of one --train_data, which may be a glob: give others a call of their own")
    if "://" in f"{args.report} {args.output}" or not (args.output or ".parquet").endswith(".parquet"):
        parser.error("--report and --output must be local files, and --output end in .parquet")
    return args


# ---- main


def main(args):
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each load of a local file asks the Hub
    paths = [args.report, *filter(None, [args.output])]
    for path in paths:
        if os.path.exists(path) and not args.overwrite:
            raise UserError(f"{path}: exists; choose another file, or set --overwrite")
        with user_errors(path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(f"{path}.part").touch()  # is written first, and replaces `path` at the end
    sources = [(name, open_train_data(name, args)) for name in args.train_data]
    parts = open_pairs(args)
    for name in args.beir:
        parts += open_beir(name, args)
    index = make_index(parts, args)

    num_rows = num_kept = 0
    rows_file = None
    with open(f"{args.report}.part", "w", encoding="utf-8") as report, tqdm(unit="row", delay=2) as bar:
        for source, first_row, table, texts, rows in iterate_rows(sources, args.columns):
            keep = np.ones(len(table), bool)
            for row, part, finding in find(texts, rows, parts, index, args):
                if part.type == "query" or args.also_documents:
                    keep[row] = False
                part.found_ids.add(finding["id"])
                part.found_rows.add((source, first_row + row))
                finding = {"source": source, "row": first_row + row} | finding
                report.write(json.dumps(finding, ensure_ascii=False) + "\n")
            if args.output:
                with user_errors(f"--output {args.output}: rows of {source}"):
                    rows_file = rows_file or pq.ParquetWriter(f"{args.output}.part", table.schema)
                    rows_file.write_table(table.filter(keep))
            num_rows += len(table)
            num_kept += keep.sum()
            bar.update(len(table))
    if rows_file:
        rows_file.close()
    for path in paths:
        os.replace(f"{path}.part", path)

    for part in parts:
        found = f"{len(part.found_ids):,} of {len(part.rows):,} texts in {len(part.found_rows):,} rows"
        print(f"{part.collection}, {part.type}: {found}")
    print(f"searched {num_rows:,} rows; the findings are in {args.report}")
    if args.output:
        print(f"{num_kept:,} rows are in {args.output}; {num_rows - num_kept:,} were left out")


# ---- training data


def open_train_data(name, args):
    """Return the stream of a value of --train_data: with --output of all columns, else of --columns."""
    with user_errors(f"--train_data {name}"):
        files = list_files(name)
        stream = open_files(files, columns=args.columns)
        row_texts(next(stream.iter(1)), args.columns)  # raises if they are not texts
        return open_files(files) if args.output else stream


def iterate_rows(sources, columns):
    """Yield (name of a source, number of the first row, table, its texts, the row of each) of ROWS rows at a time."""
    for name, stream in sources:
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
        column = table[name].combine_chunks()
        numbers = np.arange(len(column))
        if isinstance(column.type, LISTS):
            # not list_parent_indices, which counts the values that a null list may have; list_flatten does not
            numbers = np.repeat(numbers, pc.list_value_length(column).fill_null(0))
            column = pc.list_flatten(column)
        cells = as_texts(column, name)
        texts.append(cells.drop_null())
        rows.append(numbers[cells.is_valid()])
    return pa.concat_arrays(texts), np.concatenate(rows)


# ---- collections


@dataclass
class Part:
    """The queries or the documents of a collection, mapped from disk."""

    source: str  # flag and value
    collection: str
    type: str  # "query" or "document"
    dataset: datasets.Dataset
    columns: list[str]  # of the text and, if the id is not the number of the row, of the id
    rows: np.ndarray  # (n,) int: the rows of the dataset that are searched for
    found_ids: set = field(default_factory=set)
    found_rows: set = field(default_factory=set)  # (source, number of the row) of training data

    def read(self, numbers):
        """Return the ids and the texts, "" where there is none, of rows[numbers]."""
        rows = self.rows[numbers]
        with user_errors(self.source):
            table = self.dataset[rows]
            texts = as_texts(table[self.columns[0]], self.columns[0]).fill_null("")
            ids = [as_ids(table[name], name, rows) for name in self.columns[1:]]
        return ids[0] if ids else rows, texts


def open_beir(name, args):
    """Return the Parts of the collections of a value of --beir."""
    parts = []
    source = f"--beir {name}"
    with user_errors(source):
        for collection, (documents, queries, judgments) in collections_of(name, args.split).items():
            judged = pa.array(read_qrels(*judgments)["query_id"], pa.large_string())
            for kind, files in (("query", queries), ("document", documents)):
                id_column = "_id" if "_id" in open_files(files).column_names else "id"  # of BEIR, and of MTEB
                dataset = open_files(files, streaming=False, columns=["text", id_column], ids=[id_column])
                rows = np.arange(len(dataset))
                if kind == "query":
                    rows = rows[pc.is_in(as_ids(dataset[:][id_column], id_column, rows), judged)]
                if not len(rows):
                    raise UserError(f"--split {args.split} judges none of its queries")
                parts.append(Part(source, collection, kind, dataset, ["text", id_column], rows))
    return parts


def open_pairs(args):
    """Return the Parts of each source of --pairs: its queries and its documents, each once, with the number of its
    first row as its id."""
    parts = []
    for name in args.pairs:
        source = f"--pairs {name}"
        with user_errors(source):
            for kind, column in zip(["query", "document"], args.pair_columns):
                pairs = open_files(list_files(name), streaming=False, columns=[column])
                texts = as_texts(pairs[:][column], column)
                rows = np.flatnonzero(~texts.to_pandas().duplicated())
                parts.append(Part(source, name, kind, pairs, [column], rows))
    return parts


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


def hash_ngrams(words, size):
    """Return the 64-bit hashes of the n-grams of (n,) texts, and the number of the text of each, ascending.
    words: of split_words. A text of fewer than `size` words has one n-gram, filled up with empty words."""
    by_text = words.flatten().to_numpy(zero_copy_only=False)
    lengths = pc.list_value_length(words).to_numpy()
    padded = np.maximum(lengths, size)
    owners = np.repeat(np.arange(len(words)), padded)
    places = np.arange(len(owners)) - (np.cumsum(padded) - padded)[owners]  # of words in their texts
    hashes = np.zeros(len(owners), np.uint64)
    hashes[places < lengths[owners]] = np.where(by_text == "", 0, pd.util.hash_array(by_text))
    ngrams = np.zeros(len(owners), np.uint64)  # those that begin at each word
    for place in range(size):  # a polynomial modulo 2**64; its base is odd, so that no bit is lost
        ngrams = ngrams * 0x9E3779B97F4A7C15 + np.roll(hashes, -place)
    # An n-gram lies in one text. 0: a text without words, which is an empty one.
    is_valid = (places <= padded[owners] - size) & (ngrams != 0)
    return ngrams[is_valid], owners[is_valid]


def make_index(parts, args):
    """Return a DataFrame of n-grams, ascending, and their owners: numbers of texts, counted over all Parts."""
    counts = np.zeros(2**22, np.int64)  # n-grams so far, by the first bits of their hashes
    picked = []
    first = 0
    for part in parts:
        for start in tqdm(range(0, len(part.rows), 10_000), desc=f"indexing {part.collection}", delay=2):
            _, texts = part.read(slice(start, start + 10_000))
            ngrams, owners = hash_ngrams(split_words(texts), args.ngram)
            buckets = ngrams >> 42
            np.add.at(counts, buckets, 1)
            picked.append(pick_rarest(ngrams, first + start + owners, counts[buckets], args.min_share))
        first += len(part.rows)
    return pd.concat(picked).sort_values("ngram")


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
    """Yield (row, Part, finding) of (n,) texts of training data and their rows."""
    words = split_words(texts)
    numbers, candidates = find_candidates(words, rows, index, args.ngram)
    space = pa.scalar(" ", pa.large_string())
    forms = pc.binary_join(words, space).to_pylist()  # texts in normal form
    row_places = {row: np.flatnonzero(rows == row) for row in set(candidates.tolist())}  # of its texts
    first = 0
    for part in parts:
        start, stop = np.searchsorted(numbers, [first, first + len(part.rows)])
        ids, part_texts = part.read(numbers[start:stop] - first)
        part_forms = pc.binary_join(split_words(part_texts), space).to_pylist()
        for place, row in enumerate(candidates[start:stop].tolist()):
            row_forms = [forms[other] for other in row_places[row]]
            kind, share, row_place = compare(part_forms[place], row_forms, args)
            if kind:
                finding = {"collection": part.collection, "type": part.type, "id": str(ids[place]), "kind": kind}
                row_text = texts[row_places[row][row_place]].as_py()
                yield row, part, finding | {"share": share, "text": part_texts[place].as_py(), "row_text": row_text}
        first += len(part.rows)


def find_candidates(words, rows, index, size):
    """Return the pairs of a text of make_index() and a row that share an n-gram: its numbers, ascending, and the rows.
    words: of texts, by split_words; rows: (n,) int, the row of each."""
    ngrams, owners = hash_ngrams(words, size)
    order = np.argsort(ngrams)  # near ones are searched for one after the other: less memory is read
    ngrams = ngrams[order]
    first = index.ngram.searchsorted(ngrams)
    sizes = index.ngram.searchsorted(ngrams, "right") - first  # texts with the n-gram
    places = np.repeat(first - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
    pairs = np.unique(index.owner.to_numpy()[places] * ROWS + np.repeat(rows[owners[order]], sizes))
    return np.divmod(pairs, ROWS)


def compare(form, row_forms, args):
    """Return (kind or None, share, number of the row's text that has most of it) of a text in a row."""
    if form in row_forms:
        return "verbatim", 1.0, row_forms.index(form)
    for place, row_form in enumerate(row_forms):
        if f" {form} " in f" {row_form} ":
            return "inside", 1.0, place
    ngrams = ngram_set(form, args.ngram)
    common = [ngrams & ngram_set(row_form, args.ngram) for row_form in row_forms]
    share = len(frozenset().union(*common)) / max(1, len(ngrams))  # a shorter text has none
    kind = "ngrams" if share >= args.min_share else None
    return kind, share, np.argmax(list(map(len, common)))


@lru_cache(maxsize=1000)
def ngram_set(form, size):
    """Return the n-grams of words of a text in normal form; none if it is shorter."""
    words = form.split(" ")
    return frozenset(tuple(words[i : i + size]) for i in range(len(words) - size + 1))


# ---- errors


class UserError(ValueError):
    """Something the user can fix; printed as one line, without a traceback."""


# Errors of code, such as an edited function: they keep their traceback.
BUGS = (KeyError, IndexError, TypeError, AttributeError, NameError)
DIFFERS = "Couldn't cast|in schema"  # what is said of rows with other types, or columns
ABSENT = "no such file or folder, and not in the cache"
REASONS = {  # {pattern of "type: text" of an error: what is said of it}, the first that fits; of others their own text
    "offset overflow": "a window has more than 2 GB in one column: lower --shuffle_buffer or --length_window",
    f"{DIFFERS}|^Arrow|to Arrow Table|Value is too big": "{}; if rows differ, prepare_corpus.py rewrites them",
    "datasets dtype equivalent": "{}: rewrite it by prepare_corpus.py SOURCE --output_dir DIR",
    "^CastError:": "not all rows have the same columns: {}; prepare_corpus.py rewrites irregular rows",
    "^StopIteration:": "contains no row",
    "^KeyError:": "there is no {}",
    "^UnicodeDecodeError:": "not in UTF-8: save it in that encoding, as prepare_corpus.py --encoding does ({})",
    "^ParserWarning:": "line 2 has more fields than the header: check the separator, and quote texts with it",
    "^ParserError:": "{}: check the separator, and the quotes of the rows before",
    "^Timeout:": "another run is writing to it",
    "^LocalEntryNotFoundError:.*outgoing": f"{ABSENT}; the Hub is switched off (HF_HUB_OFFLINE)",
    "^Connect(Error|Timeout):": ABSENT + ", and the Hub cannot be reached: {}",
}


def reason_of(error):
    """Return the root cause of an error in one line."""
    while error.__cause__ and not isinstance(error, UserError):
        error = error.__cause__
    if isinstance(error, UserError):
        return str(error)
    reason = error.details() if isinstance(error, datasets.table.CastError) else str(error).strip() or repr(error)
    typed = f"{type(error).__name__}: {reason}"
    template = next((said for pattern, said in REASONS.items() if re.search(pattern, typed)), "{}")
    return template.format(" ".join(reason.split())[:500])


@contextmanager
def user_errors(name, *expected):
    """Turn what a library raises about data or model into a UserError: `name`, then why. expected: further types."""
    try:
        yield
    except Exception as error:
        expected += (pa.ArrowException,)  # such as ArrowTypeError, of rows that differ
        is_bug = isinstance(error, BUGS) and not isinstance(error, expected) and not re.search(DIFFERS, str(error))
        if is_bug:  # not the data's fault
            raise
        reason = reason_of(error)
        raise UserError(reason if reason.startswith(name) else f"{name}: {reason}") from error


# ---- files (same in train_bi_encoder.py)

REWRITE = "rewrite it by prepare_corpus.py SOURCE --output_dir DIR"
CSV = {"keep_default_na": False, "na_values": [""], "index_col": False}  # only an empty cell is missing
# By default pyarrow reads up to 1 GiB of a Parquet file ahead, and keeps what it has read.
PARQUET = {"batch_size": 1000, "fragment_scan_options": ParquetFragmentScanOptions(pre_buffer=False)}
FORMATS = {  # {suffix: (builder of `datasets`, its options)}
    ".parquet": ("parquet", PARQUET),
    ".arrow": ("arrow", {}),
    **dict.fromkeys([".jsonl", ".json", ".ndjson"], ("json", {})),
    ".csv": ("csv", CSV),
    ".tsv": ("csv", CSV | {"sep": "\t", "quoting": csv.QUOTE_NONE}),
    ".txt": ("text", {"encoding": "utf-8-sig"}),
}
TEXT_TYPES = (pa.string(), pa.large_string())
LISTS = pa.ListType | pa.LargeListType | pa.FixedSizeListType  # types of Arrow
# A list of texts in a cell of CSV, as JSON, Python or NumPy (without commas, and maybe cut by ...) writes it.
QUOTED = r"""(?:'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")"""
LIST_OF_TEXTS = re.compile(rf"\[\s*(?:(?:{QUOTED}|np\.str_\({QUOTED}\)|None|null|\.\.\.)[\s,]*)*+\]\s*", re.S)


def list_files(source):
    """Return the files of a file, glob, URL, ID[:config[:split]], or folder in the layout of the Hub."""
    path = os.path.expanduser(source)
    if os.path.isfile(path):  # whatever its characters
        return [os.path.abspath(path)]
    readme = Path(path, "README.md")
    if os.path.isdir(path) and not (readme.exists() and b"\nconfigs:" in readme.read_bytes()):
        raise UserError(f"name its files: '{source}/*.parquet' or data-*.arrow; prepare_corpus.py reads folders")
    if "://" in path or glob.has_magic(path) or file_suffix(path):
        return list(datasets.load_dataset_builder("text", data_files=path).config.data_files["train"])  # of any format
    parts = [path] if os.path.isdir(path) else path.split(":")
    name, config, split, *_ = [*parts, "", ""]
    check_exists(name)
    split = split or "train"
    files = datasets.load_dataset_builder(name, name=config or None).config.data_files
    if split not in files:
        raise UserError(f"no split {split!r} with files; available: {', '.join(map(str, files))}")
    return list(files[split])


def file_suffix(file):
    """Return the key of FORMATS that a file name ends in, before .gz or .zst and the query of a URL, or None."""
    name = file.partition("?")[0] if file.startswith(("http://", "https://")) else file
    suffix = Path(name.lower().removesuffix(".gz").removesuffix(".zst")).suffix
    return suffix if suffix in FORMATS else None


def open_files(files, streaming=True, columns=None, ids=()):
    """Return a Dataset or IterableDataset of files of one format, which yields pyarrow Tables of `columns` of texts,
    numbers, or lists of them; None: of all columns, of any type. ids: columns of which whole numbers are texts."""
    formats = [FORMATS.get(file_suffix(file)) for file in files]
    if not files or None in formats or formats.count(formats[0]) < len(formats):
        raise UserError(f"is not all of one format, of {' '.join(FORMATS)}: name those of one by a glob, or {REWRITE}")
    kind, options = formats[0]
    for file in files:
        check_content(file, kind)
    patterns = [file if file.startswith(("http://", "https://")) else glob.escape(file) for file in files]
    load = partial(datasets.load_dataset, kind, data_files=patterns, split="train", **options)
    headers = set()  # of formats whose columns `datasets` does not compare
    if kind == "csv":
        headers = {frozenset(check_csv(file, columns or (), **options)) for file in files}
    elif kind == "arrow" or (kind == "parquet" and not columns):
        parts = [load(data_files=file, streaming=True) for file in patterns]
        headers = {frozenset(part.column_names) for part in parts}
    if len(headers) > 1:
        raise UserError(f"not all files have the same columns: {REWRITE}")
    if kind == "arrow":
        datasets.concatenate_datasets(parts)  # raises ValueError where types differ
    features = read_features(load, kind, files, columns, ids)
    dataset = None
    if kind == "arrow" and not streaming:
        with suppress(OSError, pa.ArrowInvalid):  # a local Arrow stream is mapped in place, anything else copied
            dataset = datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in files])
    if dataset is None:
        options = {"features": features, "streaming": streaming}
        if kind == "parquet":
            options["columns"] = list(features)
        if kind == "json":  # else texts of later rows, beside a number, would be JSON, in quotes
            options["on_mixed_types"] = None
        if not streaming:  # else a table of other files with the same names and times may be in the cache
            options |= {"name": data_fingerprint(files), "writer_batch_size": 20_000}  # few record batches to list
        dataset = load(**options)
    return (dataset.select_columns(columns) if columns else dataset).with_format("arrow")


def check_content(file, kind):
    """Raise UserError if a file on disk is a pointer of git-LFS or, of text, in UTF-16 or UTF-32."""
    head = text = b""
    with suppress(OSError), open(file, "rb") as source:  # else it is not on disk
        head = source.read(64)
        with suppress(Exception), fsspec.open(file, "rb", compression="infer") as source:
            text = source.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"{file}: is a pointer of git-LFS, not the file: git lfs pull")
    if kind in ("csv", "json", "text") and (b"\0" in text or text.startswith((b"\xff\xfe", b"\xfe\xff"))):
        order = {b"\xff": "", b"\xfe": "", b"\0": "-be"}.get(text[:1], "-le")  # none with a mark
        encoding = ("utf-32" if b"\0\0\0" in text else "utf-16") + order
        raise UserError(f"{file}: is in {encoding.upper()}: {REWRITE} --encoding {encoding}")


def check_csv(file, columns, sep=",", quoting=csv.QUOTE_MINIMAL, **_):
    """Return the header of a CSV file; raise UserError for missing fields, a quote that joins rows, lists of texts."""
    csv.field_size_limit(2**31 - 1)
    with fsspec.open(file, "rt", compression="infer", encoding="utf-8-sig", errors="replace", newline="") as lines:
        bar = tqdm(lines, f"checking {file}", delay=2, disable=os.environ.get("RANK", "0") != "0")
        reader = csv.reader(bar, delimiter=sep, quoting=quoting, strict=True)
        try:
            header = next(reader, [])
            places = [header.index(name) for name in columns if name in header]
            for row in filter(None, reader):
                if len(row) < len(header):
                    raise csv.Error(f"lacks fields (if they are empty, {REWRITE})")
                for place in places:
                    if row[place].startswith("[") and LIST_OF_TEXTS.fullmatch(row[place]):
                        advice = f"{REWRITE}, which makes it a list (or if it is one text, write JSON Lines)"
                        raise UserError(f"line {reader.line_num}: {header[place]!r} has a list of texts: {advice}")
        except csv.Error as error:
            raise UserError(f"{file}: line {reader.line_num}: {error}: double the quotes, here or above") from error
    return header


def read_features(load, kind, files, columns, ids):
    """Return the Features of the first rows of all files, by name; of Parquet and CSV of `columns` alone, if any."""
    warnings.simplefilter("error", pd.errors.ParserWarning)  # the first row of CSV has more fields than the header
    if kind == "parquet":
        with xopen(min(files), "rb") as file:
            schema = pq.read_schema(file)
    else:
        by_name = load(streaming=True, data_files=sorted(load.keywords["data_files"]))
        schema = next(by_name.with_format("arrow").iter(1)).schema
    if missing := [name for name in columns or () if name not in schema.names]:
        advice = f"name those (CSV has commas and a header: sed -i '1i NAME,NAME' FILE), or {REWRITE}"
        raise UserError(f"has no column {missing}, but {str(schema.names)[:300]}: {advice}")
    if kind in ("parquet", "csv") and columns:
        schema = pa.schema([part for part in schema if part.name in columns], schema.metadata)
    types = {}
    text = pa.large_string() if kind == "json" else pa.string()  # of which `datasets` would make JSON of later objects
    for part in datasets.Features.from_arrow_schema(schema).arrow_schema:
        is_own = kind == "arrow" and is_plain(part.type)  # `datasets` casts values below a null list to the row before
        own = part.type if is_own else plain_type(part.type, part.name in ids)
        types[part.name] = text if kind == "csv" or own == pa.string() else own
        if part.name in (columns or []) and not is_plain(types[part.name]):
            found = str(part.type)[:100]  # of a dictionary of columns, a field for each row
            raise UserError(f"column {part.name!r} has {found}, not texts, numbers or lists of them: {REWRITE}")
    return datasets.Features.from_arrow_schema(pa.schema(types))


def plain_type(kind, is_id):
    """Return the Arrow type to read a column as: "007" may follow the id 7, a text null, and a label of 0.5 true."""
    if isinstance(kind, LISTS):  # a large one as it is: `datasets` would give values below a null list to the next row
        wrap = pa.large_list if pa.types.is_large_list(kind) else pa.list_
        return wrap(plain_type(kind.value_type, is_id))
    if is_id and pa.types.is_integer(kind):
        return pa.string()
    return {pa.null(): pa.string(), pa.bool_(): pa.float64()}.get(kind, kind)


def is_plain(kind):
    """Return whether an Arrow type is one of texts or numbers, or of lists of them."""
    if isinstance(kind, LISTS):
        return is_plain(kind.value_type)
    is_number = pa.types.is_primitive(kind) or pa.types.is_decimal(kind)
    return kind in TEXT_TYPES or (is_number and not pa.types.is_temporal(kind))


def data_fingerprint(files):
    """Return a hash of the names and sizes of files, and of both ends of the first and the last file."""
    digest = hashlib.sha256()
    for file in files:
        fs, path = fsspec.core.url_to_fs(file)
        digest.update(f"{os.path.basename(path)} ".encode())
        with suppress(Exception):  # no file, or a web server that refuses the size of a file, or a part of it
            digest.update(f"{fs.size(path)} ".encode())
            if file in (files[0], files[-1]):
                digest.update(fs.head(path, 2**16) + fs.tail(path, 2**16))
    return digest.hexdigest()[:16]


def check_exists(name):
    """Raise UserError if `name` is not on disk and cannot be a Hub id: NAME or ORG/NAME, without a folder ORG here."""
    may_be_id = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) and not os.path.isdir(os.path.dirname(name))
    if not (may_be_id or "://" in name or os.path.exists(name)):
        raise UserError("no such file or folder")
    if os.path.isdir(f"{name}/checkpoints"):
        raise UserError(f"is the folder of a run: use {name}/model")


# ---- judgments and collections (same in eval_incremental.py)

PAIR = ["query_id", "doc_id"]  # columns that identify a row of a ranking or of judgments
JUDGMENT_NAMES = [  # of the columns of query, document and grade, in small letters and without what separates words
    ("queryid", "qid", "query", "topicid", "topic"),
    ("corpusid", "documentid", "docid", "docno", "document", "doc", "passageid", "pid", "positivecorpusids"),
    ("relevance", "rel", "grade", "score", "label"),  # a score beside them may be that of a system
]


def as_texts(column, name):
    """Return a column of texts as large_string; null where there is none."""
    if column.type not in TEXT_TYPES:
        raise UserError(f"column {name!r} holds {str(column.type)[:100]}, not texts: {REWRITE}")
    return column.cast(pa.large_string())


def as_ids(column, name, rows):
    """Return a column of ids as large_string. Raise UserError if no run file can have one; rows: their numbers."""
    texts = column.cast(pa.large_string()) if pa.types.is_integer(column.type) else as_texts(column, name)
    ids = pc.fill_null(texts, "")
    # The last two are what pyarrow makes of later rows of JSON, of dates and of numbers from 2**63 on.
    refused = r"^$|[\t\r\n]|^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|^\d[.\d]*e\+\d+$"
    place = pc.index(pc.match_substring_regex(ids, refused), True).as_py()
    if place >= 0:
        found = ids[place].as_py()
        advice = f"write another, without tabs and line breaks; of dates and numbers in JSON, {REWRITE}"
        has = f"has the id {found!r}: {advice}" if found else "has no id"
        raise UserError(f"column {name!r}: row {rows[place]}, counted from 0, {has}")
    return ids


def read_qrels(*sources):
    """Return a DataFrame (query_id, doc_id, relevance) of a file of judgments, the only one of the sources."""
    with user_errors(f"--qrels {sources[0]}"):
        file, *more = chain.from_iterable(map(list_files, sources))
        if more:
            raise UserError(f"has {1 + len(more)} files: give one, with all judgments")
        if file_suffix(file) in (None, ".tsv", ".txt"):  # with or without a header
            frame = pd.concat(trec_parts(file, "qrels"))
        else:
            frame = table_of_judgments(file)
        if not ((frame["score"] % 1 == 0) & (frame["score"].abs() <= 1e6)).all():  # trec_eval counts up to the highest
            raise UserError("a grade is not a whole number, or above a million")
        return frame.astype({"score": int}).rename(columns={"score": "relevance"})


def judgment_columns(names):
    """Return the names of the columns of query, document and grade among those of a table; without grades, all are
    relevant, as in NanoBEIR, whose first form has lists of them. None: unknown, as a first line that is no header."""
    plain = {re.sub(r"[\W_]", "", name.lower()): name for name in names}  # query1 is an id
    query, document, grade = [plain.get(next(filter(plain.get, known), None)) for known in JUDGMENT_NAMES]
    may_lack_grades = len(names) == 2 or "positivecorpusids" in plain
    return [query, document, grade][: 2 + bool(grade)] if query and document and (grade or may_lack_grades) else None


def table_of_judgments(file):
    """Return a DataFrame (query_id, doc_id, score) of a file with columns; an empty list is a row without doc_id."""
    features = open_files([file]).features
    names = judgment_columns(list(features))
    if not names:
        raise UserError(f"its columns must be query-id, corpus-id and score, not {', '.join(features)[:300]}")
    table = open_files([file], streaming=False, columns=names, ids=names[:2])[:]
    table.validate(full=True)
    frame = table.to_pandas().set_axis([*PAIR, "score"][: len(names)], axis=1)
    frame["query_id"] = as_ids(table[names[0]], names[0], frame.index).to_pandas()
    frame["score"] = pd.to_numeric(frame["score"]) if names[2:] else 1
    is_empty = frame["doc_id"].map(np.size) == 0  # of a null it is 1
    listed = frame[~is_empty].explode("doc_id")
    listed["doc_id"] = as_ids(pa.array(listed["doc_id"]), names[1], listed.index).to_pandas().array
    return pd.concat([listed, frame[is_empty].assign(doc_id=None, score=0)])


def trec_parts(path, name):
    """Yield DataFrames (query_id, doc_id, score; of a run rank, as text) of 2**19 lines of a TREC "run" or "qrels"."""
    columns = {6: [0, 2, 4, 3]} if name == "run" else {3: [0, 1, 2], 4: [0, 2, 3]}
    form = "query Q0 document rank score tag"
    if name == "qrels":
        form = "query 0 document grade, maybe below a header, query-id corpus-id score"
    if file_suffix(path) not in (None, ".tsv", ".txt", ".csv"):
        raise UserError(f"is {file_suffix(path)}, not lines of: {form}")
    options = {"header": None, "dtype": str, "quoting": csv.QUOTE_NONE, "keep_default_na": False, "chunksize": 2**19}
    with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
        lines = [file.readline().rstrip("\r\n") for _ in range(2)]
        header = lines[0].split("\t" if "\t" in lines[0] else None)
        named = judgment_columns(header) if name == "qrels" else None
        if named:
            columns = {len(header): [header.index(part) for part in named]}
        number = 1 + bool(named)  # of the first line below the header, whose separators are those of all
        first = lines[number - 1]
        tab = "\t" if first.count("\t") + 1 in columns else None  # then ids may contain spaces
        places = columns.get(len(first.split(tab)))
        if not places:
            raise UserError(f"line {number}, {first[:100]!r}, is not one of: {form}")
        file.seek(0)
        for frame in pd.read_csv(file, sep=tab or r"\s+", skiprows=number - 1, **options):
            frame = frame[places].set_axis([*PAIR, "score", "rank"][: len(places)], axis=1)
            scores = pd.to_numeric(frame.get("score", pd.Series(1, frame.index)), errors="coerce")
            is_good = frame[PAIR].ne("").all(axis=1) & (scores.abs() <= np.finfo(np.float32).max)  # of trec_eval
            if not is_good.all():
                row = (~is_good).idxmax()
                found = f"{' | '.join(frame.loc[row])} (separated as in line {number}, {first[:100]!r})"
                raise UserError(f"line {number + row} has no id, or no finite score: {found}; lines are: {form}")
            yield frame.assign(score=scores)


def find_splits(name):
    """Return {split: files} of documents, of queries, of judgments; NAME:fr has configurations fr-corpus and so on."""
    if os.path.exists(f"{name}/corpus.jsonl"):
        judgments = defaultdict(list)  # {split: files}
        for file in filter(file_suffix, map(str, sorted(Path(name, "qrels").glob("*")))):
            judgments[Path(file).name.partition(".")[0]].append(file)
        return [{"all": [f"{name}/corpus.jsonl"]}, {"all": [f"{name}/queries.jsonl"]}, judgments]
    source, _, language = (name, "", "") if os.path.isdir(name) else name.partition(":")
    prefix = language and f"{language}-"
    check_exists(source)
    configs = datasets.get_dataset_config_names(source)
    if not {f"{prefix}corpus", f"{prefix}queries"} <= set(configs):
        found = f"but {', '.join(configs)}; {source}:fr stands for fr-corpus and fr-queries"
        raise UserError(f"neither a file corpus.jsonl nor configurations {prefix}corpus and {prefix}queries, {found}")
    unread = [config for config in configs if config in (f"{prefix}instruction", f"{prefix}top_ranked")]
    if unread and os.environ.get("RANK", "0") == "0":
        print(f"{name}: not read: {', '.join(unread)}, which MTEB uses", file=sys.stderr)
    judged = [config for config in ("qrels", "default", "relevance") if f"{prefix}{config}" in configs]
    parts = [(source, f"{prefix}{config}") for config in ("corpus", "queries", *judged[:1])]
    if not judged:  # those of BEIR lie in a repository of their own
        parts.append((f"{source}-qrels", None))
    splits = []
    for part in parts:
        files = datasets.load_dataset_builder(*part).config.data_files
        splits.append({str(split): list(files[split]) for split in files if files[split]})
    return splits


def collections_of(name, split):
    """Return {collection: (files of documents, of queries, of judgments)} of a source of find_splits. split: of the
    judgments; if each is a collection, as in NanoBEIR, one of them, and "test" all, unless one has that name."""
    documents, queries, judgments = find_splits(name)
    chosen = [split]
    if split == "test" and split not in judgments and documents.keys() == judgments.keys():
        chosen = list(judgments)
    collections = {}
    for part in chosen:
        if part not in judgments:
            raise UserError(f"no judgments of split {part!r}; available: {', '.join(judgments) or 'none'}")
        # A single split of documents, or of queries, serves all judgments.
        files = [[*splits.values()][0] if len(splits) == 1 else splits.get(part) for splits in (documents, queries)]
        if None in files:
            raise UserError(f"no documents or queries of split {part!r}; available: {', '.join(documents)}")
        collections[f"{name}/{part}" if len(documents) > 1 else name] = (*files, judgments[part])
    return collections


# ---- command line


if __name__ == "__main__":
    status = 0
    try:
        main(parse_args(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    sys.stdout.flush()
    os._exit(status)  # pyarrow threads that still read ahead can hang or abort a normal exit (apache/arrow 45214)
