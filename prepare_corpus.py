"""Make any files regular, as the other scripts read them; with no arguments, make the demo corpus and its models.

    python prepare_corpus.py      # the demo: data/python_code, from the source files of this Python installation
    python prepare_corpus.py logs --output_dir data/logs --columns query clicked.title
    python prepare_corpus.py s3://bucket/pairs --output_dir data/pairs --filter "[('score', '>', 0.5)]"
    python prepare_corpus.py --ir_dataset beir/scifact --output_dir data/scifact
    python prepare_corpus.py data/pairs --length_report --model_name_or_path BAAI/bge-small-en-v1.5

A row of the demo is {"docstring": "Return the first index of value.", "code": "def find(items, value): ..."}; `code`
never contains a docstring, so a match has to come from names and logic.
Output of the demo: {train,heldout}/{stdlib,packages}-*.parquet, corpus.json (files, pairs), and untrained models with
their own tokenizers: bi_encoder/ (static embeddings), cross_encoder/ (a small BERT). Whole files are held out; train
shares no docstring or code with them. Existing output is kept; --overwrite rebuilds it.
Output of a conversion: data-*.arrow or .parquet, with columns of texts, numbers and lists of them; lines say which
files were read, and what was changed. Of a folder, files of the most frequent format are read, at any depth. What a
file or row lacks is null. Of objects, each field becomes a column, A.B. JSON is read twice, first to find types that
fit every row: lists where texts stand beside lists, text where numbers and texts are mixed. Dates and columns of CSV
become texts, as they are written, but for lists of texts. Folders KEY=VALUE are columns; a lone surrogate of JSON
becomes U+FFFD. Rows are chosen by --filter, --drop_missing; --split_by writes train/ and heldout/.
Output of --ir_dataset: a BEIR folder and triples of ids. Left out: types set by hand, shuffling, remote outputs.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["backports.zstd>=1,<2; python_version < '3.14'", "datasets>=5.2,<6", "fsspec[http]>=2026.1",
#   "matplotlib>=3.9,<4", "numpy>=2.2,<3", "pandas>=3.1,<4", "pyarrow>=24,<27", "sentence-transformers>=6.2,<7",
#   "tokenizers>=0.23.1,<1", "torch>=2.9,<3", "tqdm>=4.67,<5", "transformers>=5.18,<6"]
# ///

import argparse
import ast
import csv
import gc
import glob
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
import sys
import sysconfig
import unicodedata
import warnings
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from itertools import chain, islice, product
from pathlib import Path
from urllib.parse import unquote

import datasets
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets.utils.file_utils import xopen
from fsspec.compression import compr
from fsspec.utils import infer_compression
from pyarrow.dataset import OrcFileFormat, ParquetFileFormat
from tqdm import tqdm

DEMO = "data/python_code"
BATCH_ROWS = 1000  # rows of a record batch and of a Parquet row group, as `datasets` itself writes them

# ---- options


def parse_args(argv):
    """Return the parsed flags; exit on a wrong value."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    option = parser.add_argument
    option("sources", nargs="*", metavar="SOURCE",
           help="Parquet, ORC, Arrow, JSON, CSV, text: path, glob, folder, URL, Hub id (default: demo)")  # fmt: skip
    option("--output_dir", metavar="DIR",
           help=f"new folder for the shards (default: {DEMO}; for reports: runs/lengths)")  # fmt: skip
    option("--overwrite", action="store_true", help="replace a non-empty --output_dir, when the new one is complete")
    option("--columns", nargs="+", action="extend", metavar="C", help="columns to keep, in this order (default: all)")
    option("--filter", metavar="F", help="rows to keep: \"[('lang', 'in', ['en', 'de'])]\"; of CSV, compare texts")
    option("--drop_missing", nargs="+", action="extend", default=[], metavar="C", help="leave out rows without these")
    option("--split_by", metavar="C", help="write train/ and heldout/, all rows of a value of this column on one side")
    option("--eval_share", type=float, default=0.1, metavar="X", help="share of the values of --split_by in heldout/")
    option("--encoding", default="utf-8-sig", metavar="E", help="of JSON, CSV, text: cp1252, ... (default: UTF-8)")
    option("--format", choices=["arrow", "parquet"], default="arrow", help="arrow: mapped as it is; parquet: smaller")
    option("--rows_per_shard", type=int, default=1_000_000, help="maximum rows per file")
    option("--ir_dataset", metavar="NAME", help="collection of ir_datasets to convert, such as beir/scifact")
    option("--length_report", action="store_true", help="write token counts of SOURCE; convert nothing")
    option("--model_name_or_path", metavar="M", help="Hub id or folder whose tokenizer --length_report uses")
    option("--max_length", type=int, metavar="N", help="tokens a text is truncated to (default: the tokenizer's own)")
    option("--sample", type=int, default=100_000, metavar="N", help="random rows that --length_report reads")
    args = parser.parse_args(argv)
    if min(args.rows_per_shard, args.sample, args.max_length or 1) < 1 or not 0 < args.eval_share < 1:
        parser.error("--rows_per_shard, --sample, --max_length and --eval_share must be above 0, the last below 1")
    rows_of_interest = args.filter or args.drop_missing or args.split_by
    if args.length_report and (not args.sources or not args.model_name_or_path or rows_of_interest):
        parser.error("--length_report requires SOURCE and --model_name_or_path, without flags that choose rows")
    if (args.ir_dataset and args.sources) or ((args.columns or rows_of_interest) and not args.sources):
        parser.error("--columns, --filter, --drop_missing, --split_by require SOURCE; --ir_dataset excludes SOURCE")
    if (args.ir_dataset or args.sources) and not (args.output_dir or args.length_report):
        parser.error("SOURCE and --ir_dataset require --output_dir")
    if "://" in (args.output_dir or ""):
        copy = f"aws s3 cp --recursive FOLDER {args.output_dir}"
        parser.error(f"--output_dir {args.output_dir}: must be a local folder; copy it when it is complete: {copy}")
    return args


# ---- main


def main(args):
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are reported once, as a UserError
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each load of a local file asks the Hub
    if args.length_report:
        report_lengths(args, Path(args.output_dir or "runs/lengths"))
        return
    is_demo = not (args.sources or args.ir_dataset)
    output = Path(args.output_dir or DEMO).resolve()
    is_kept = is_demo and (output / "corpus.json").exists() and not args.overwrite
    if not is_kept:
        if any(Path(source).resolve().is_relative_to(output) for source in args.sources):
            raise UserError(f"--output_dir {output}: contains a SOURCE; choose another folder")
        if any(os.path.isdir(source) and output.is_relative_to(Path(source).resolve()) for source in args.sources):
            raise UserError(f"--output_dir {output}: in a SOURCE, which the next call would read, too; choose another")
        if output.exists() and any(output.iterdir()) and not args.overwrite:
            raise UserError(f"--output_dir {output}: is not empty; choose another folder, or set --overwrite")
        with new_folder(output) as part:
            if args.ir_dataset:
                with errors_of(f"--ir_dataset {args.ir_dataset}", KeyError):
                    save_collection(args.ir_dataset, part)
            elif args.sources:
                convert(args, part)
            else:
                paths = sysconfig.get_paths()
                roots = {"stdlib": [paths["stdlib"]], "packages": [paths["purelib"], paths["platlib"]]}
                print(build_demo(roots, part)["pairs"])
                save_models(part)
    print(f"output: {output}")
    if args.sources:
        held_out = f" --eval_data '{output}/heldout/*.{args.format}'" if args.split_by else ""
        train = output / "train" if args.split_by else output
        print(f"to train on it: --train_data '{train}/*.{args.format}'{held_out} --columns QUERY POSITIVE ...")


# ---- the demo corpus

HELDOUT_PERCENT = 5  # of files: a few thousand pairs, more than the 1,000 candidates of an evaluation
MAX_CODE_CHARS = 4000  # about 1,000 tokens, four times MODEL_MAX_LENGTH; longer code is mostly generated tables
# Test suites repeat the same assertion many times over, and their docstrings describe a bug number, not the code.
SKIPPED_FOLDERS = {"test", "tests", "testing", "_test", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def build_demo(roots, folder):
    """Write the demo corpus of `roots` ({source: [folder, ...]}) into `folder`; return the content of corpus.json."""
    files = list_python_files(roots)
    report = {"python": sys.version.split()[0], "files": len(files), "pairs": {}}
    rows = {key: [] for key in product(("train", "heldout"), roots)}
    seen = set()
    with ProcessPoolExecutor(initializer=gc.disable) as pool:  # syntax trees have no cycles to collect
        found = pool.map(docstring_pairs, [path for _, _, path in files], chunksize=16)
        found = tqdm(found, total=len(files), unit="file", desc="parsing")
        for (split, source, _), pairs in zip(files, found):
            for docstring, code in pairs:
                # Duplicates have the same words (in any case) in the docstring, or the same code but for white space.
                words = re.findall(r"\w+", docstring.lower())
                keys = {" ".join(words), "code " + "".join(code.split())}
                if seen.isdisjoint(keys):
                    rows[split, source].append({"docstring": docstring, "code": code})
                seen |= keys
    schema = pa.schema({"docstring": pa.string(), "code": pa.string()})
    for (split, source), part in rows.items():
        random.Random(0).shuffle(part)
        table = pa.Table.from_pylist(part, schema)
        write_shards([table], schema, folder / split, source, "parquet", rows_per_shard=20_000)
        report["pairs"].setdefault(split, {})[source] = len(part)
    (folder / "corpus.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def list_python_files(roots):
    """Return [(split, source, path)], held-out files first: of two equal pairs the first is kept."""
    files = []
    for source, folders in roots.items():
        for root in sorted({Path(folder).resolve() for folder in folders}):
            names = [path.relative_to(root) for path in root.rglob("*.py")]
            for name in sorted(names, key=Path.as_posix):
                if SKIPPED_FOLDERS.isdisjoint(name.parts):
                    # Only the path determines the split, so it is the same on every machine and after every upgrade.
                    digest = hashlib.blake2b(f"{source}/{name.as_posix()}".encode(), digest_size=8)
                    is_heldout = int(digest.hexdigest(), 16) % 100 < HELDOUT_PERCENT
                    files.append(("heldout" if is_heldout else "train", source, root / name))
    return sorted(files, key=lambda file: file[0] != "heldout")  # else in the order of `roots`


def docstring_pairs(path):
    """Return [(first docstring paragraph, source without any docstring)] of a file; [] if it does not parse."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        with warnings.catch_warnings(action="ignore"):  # of invalid escapes in other people's strings
            nodes = list(definitions(ast.parse(text).body))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    documented = [node for node in nodes if ast.get_docstring(node)]
    lines = text.encode().splitlines()  # bytes: ast counts columns in UTF-8 bytes and breaks lines where bytes do
    # Nested docstrings go too: a query found verbatim in the enclosing function would be a second right answer.
    for node in documented:
        blank_docstring(lines, node.body[0])
    pairs = [make_pair(node, lines) for node in documented]
    return list(filter(None, pairs))


def definitions(statements):
    """Yield every function and class among the statements, however nested."""
    for statement in statements:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement
        # Definitions occur in blocks only; ast.walk would visit every expression too, half of the run time.
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from definitions(getattr(statement, block, ()))


def blank_docstring(lines, node):
    """Remove the docstring `node` from `lines`; lines become empty instead of being deleted, so numbers stay valid."""
    first = node.lineno - 1
    last = node.end_lineno - 1
    before = lines[first][: node.col_offset]
    after = lines[last][node.end_col_offset :].lstrip(b"; \t")
    for number in range(first, last + 1):
        lines[number] = b""
    lines[first] = before + after


def is_stub(node):
    """Return whether a statement reveals nothing of what a function does: pass, a literal, NotImplementedError."""
    if isinstance(node, ast.Raise):
        return node.exc is not None and "NotImplemented" in ast.dump(node.exc)
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def make_pair(node, lines):
    """Return (first docstring paragraph, source) of a definition with a docstring; None if they make no good pair."""
    if isinstance(node, ast.ClassDef) or all(map(is_stub, node.body[1:])):
        return None
    paragraph = re.split(r"\n\s*\n|>>>", ast.get_docstring(node).strip())[0]  # doctests are code, not a query
    docstring = " ".join(paragraph.split()).encode("utf-8", "replace").decode()  # "\ud800" is legal in Python
    # A query needs at least three words, and must not merely refer to another docstring.
    words = re.findall(r"[^\W\d_]{2,}", docstring)
    pointer = r"(see|refer to|same as|inherit\w*( from)?|overrid\w*|implements?|alias (for|of))\b.{0,60}$"
    if len(words) < 3 or re.match(pointer, docstring, re.IGNORECASE):
        return None
    first = [*node.decorator_list, node][0].lineno
    source = [line.rstrip() for line in lines[first - 1 : node.end_lineno] if line.strip()]
    # Not textwrap.dedent: a multi-line string at column 0 would keep the whole method indented.
    indent = re.match(rb"\s*", source[0])[0]
    code = b"\n".join(line.removeprefix(indent) for line in source).decode(errors="replace")
    if len(source) < 2 or len(code) > MAX_CODE_CHARS:
        return None
    return docstring, code


# ---- the demo's untrained models

MODEL_MAX_LENGTH = 256  # tokens
STATIC_DIM = 1024  # 512 lowers MRR@10 on the demo corpus by 0.007


def save_models(folder):
    """Save untrained bi_encoder/ and cross_encoder/ for the demo corpus in `folder`."""
    tables = chain.from_iterable(read_columns(str(shard)) for shard in sorted(folder.glob("train/*.parquet")))
    texts = []
    for _, columns in islice(tables, 100):  # of up to 1,000 rows
        for column in columns.values():
            texts += column.to_pylist()
    save_bi_encoder(folder / "bi_encoder", texts)
    save_cross_encoder(folder / "cross_encoder", texts)


def save_bi_encoder(folder, texts):
    """Save a static embedding model (the mean of the embeddings of a text's tokens); train its tokenizer on `texts`.

    Initial vectors are random; their norms are proportional to inverse document frequency, so that rare tokens
    outweigh common ones even before training."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    # split identifiers into words (readGzipFile and read_gzip_file: read gzip file), and drop punctuation
    camel = Regex(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(camel, " "), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\p{L}\p{M}]+|\p{N}+"), "removed", invert=True)
    trainer = trainers.BpeTrainer(vocab_size=30_000, min_frequency=2, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.enable_truncation(MODEL_MAX_LENGTH)
    counts = np.zeros(tokenizer.get_vocab_size())  # (V,) texts that contain a token
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        counts[np.unique(encoding.ids)] += 1
    idf = torch.from_numpy(np.log((len(texts) + 1) / (counts + 1))).float()
    weights = torch.randn(len(counts), STATIC_DIM, generator=torch.Generator().manual_seed(0))
    weights *= (idf / idf.max() / STATIC_DIM**0.5)[:, None]  # (V, D)
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights), Normalize()])
    model.save_pretrained(str(folder), create_model_card=False)


def save_cross_encoder(folder, texts):
    """Save a BERT-Mini (4 layers of 256 dimensions: Turc et al. 2019) with random weights and its own tokenizer."""
    import torch
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    wordpieces = BertWordPieceTokenizer()
    # The trainer selects and numbers characters in random order, and merges depend on it: specify the alphabet.
    counts = Counter()
    for char, count in Counter(chain.from_iterable(texts)).items():
        normalized = wordpieces._tokenizer.normalizer.normalize_str(char).strip()
        counts.update(dict.fromkeys(normalized, count))
    alphabet = sorted(counts, key=lambda char: (-counts[char], char))[:1000]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"##{char}" for char in alphabet)]  # of 30,000 words
    wordpieces.train_from_iterator(texts, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    wordpieces = BertWordPieceTokenizer(wordpieces.get_vocab())  # only the five usual tokens stay special
    tokenizer = BertTokenizerFast(tokenizer_object=wordpieces._tokenizer, model_max_length=MODEL_MAX_LENGTH)
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=MODEL_MAX_LENGTH, num_labels=1, **shape)
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)


# ---- conversion


def convert(args, folder):
    """Write the chosen rows, in order, into `folder`, or its two sides by args.split_by; print number and types."""
    schema, read = open_tables(args)
    types = ", ".join(f"{field.name} ({field.type})" for field in schema)
    for side in ("train/", "heldout/") if args.split_by else ("",):
        parts = (choose_side(table, side, args).select(schema.names) for table in read())
        rows = write_shards(parts, schema, folder / side, "data", args.format, args.rows_per_shard)
        if not rows:
            condition = f" passes --filter {args.filter!r}" if args.filter else ""
            raise UserError(f"{args.sources[0]}: no row{condition}{f': set --eval_share for {side}' * bool(side)}")
        print(f"{side} {rows:,} rows of {types}".lstrip())
    if rows == 1 and any(isinstance(kind, LISTS) for kind in schema.types):
        print("one row, with lists: of JSON whose rows are in a list, write them first: jq -c '.NAME[]' FILE > NEW")


def fold(text):
    """Return what is the same of texts that differ in Unicode form, white space or case alone, which count as one."""
    text = text.replace("\u00ad", "").replace("\u200b", "").replace("\ufeff", "")  # as BERT's tokenizer does
    return unicodedata.normalize("NFC", " ".join(text.split()).casefold())


def choose_side(table, side, args):
    """Return the rows of a Table on a side of args.split_by, if there are sides. The hash of a value decides, so that
    it stays on its side when the table grows. Rows without one are trained on."""
    if not side:
        return table
    is_chosen = []
    column = table[args.split_by]
    if not pa.types.is_floating(column.type):  # of which Arrow writes 1e+10
        column = column.cast(pa.string())
    for value in column.to_pylist():
        text = re.sub(r"^(-?\d+)\.0$", r"\1", fold(str(value)))  # pandas makes whole numbers floats if one is missing
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()  # of equal texts the same
        is_heldout = value is not None and int.from_bytes(digest) < args.eval_share * 2**64
        is_chosen.append(is_heldout == (side == "heldout/"))
    return table.filter(pa.array(is_chosen, pa.bool_()))


FILTER = "a list of (column, operator, value), by = != < > <= >= in, not in; texts, as all of CSV, compare with texts"


def parse_filter(text):
    """Return the expression of pyarrow that --filter is, and the constants in it, columns and values, as texts."""
    try:
        keep = pq.filters_to_expression(ast.literal_eval(text))
        constants = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    except Exception as error:
        raise UserError(f"--filter {text!r}: is not {FILTER}") from error
    if None in constants:
        raise UserError(f"--filter {text!r}: None equals nothing: --drop_missing leaves out rows without a value")
    return keep, set(map(str, constants))


def without_missing(tables, names):
    """Yield tables without the rows that lack a value in one of some columns; print how many they were."""
    counts = Counter()
    for table in tables:
        for name in names:
            has_value = pa.array(map(is_given, table[name].to_pylist()), pa.bool_())
            counts[name] += len(table) - pc.sum(has_value, min_count=0).as_py()
            table = table.filter(has_value)
        yield table
    for name in names:
        print_once(f"column {name}: {counts[name]:,} rows without a value left out")


def is_given(cell):
    """Return whether a cell has a value: neither null, NaN, white space nor a list without one."""
    if isinstance(cell, list):
        return any(map(is_given, cell))
    return cell is not None and cell == cell and bool(str(cell).strip())


def open_tables(args):
    """Return the schema of what is written, and a function that returns an iterator of tables with these columns."""
    files = []
    for source in args.sources:
        with errors_of(source):
            files += files_of(source)
            refuse_delta(files)
    keep, constants = parse_filter(args.filter) if args.filter else (None, set())
    tested = {*args.drop_missing, *[args.split_by] * bool(args.split_by)}
    types = common_types(files, args.encoding, args.columns and {*args.columns, *tested, *constants})
    fields = {}
    for name, kind in types.items():
        for part, values in flatten(name, pa.array([], kind)):
            if part in fields:
                raise UserError(f"two columns become {part!r}: rename one, or set --columns without them")
            fields[part] = values.type
    columns = list(dict.fromkeys(args.columns or fields))
    for name in (*columns, *tested):
        if name not in fields:
            flag = "--columns" if name in columns else "--drop_missing, --split_by"
            raise UserError(f"{flag} {name}: the columns are: {', '.join(fields)}")
    if args.split_by and isinstance(fields[args.split_by], LISTS):
        raise UserError(f"--split_by {args.split_by}: has lists, not one value a row")
    # only columns that are written or tested are read; the others may be of any type
    schema = pa.schema([part for part in fields.items() if part[0] in {*columns, *tested, *constants}])
    try:
        empty = schema.empty_table().filter(keep) if args.filter else schema.empty_table()
    except Exception as error:
        found = ", ".join(f"{name} ({str(kind)[:100]})" for name, kind in fields.items())[:300]
        raise UserError(f"--filter {args.filter!r}: does not fit {found}: {FILTER}, and lists with nothing") from error

    def read():
        return without_missing(read_tables(files, args.encoding, types, schema, keep), args.drop_missing)

    return empty.select(columns).schema, read


def is_of(name, columns):
    """Return whether a column of the files is one of `columns`, or has one of them as a field; None: of all."""
    return columns is None or any(column == name or column.startswith(f"{name}.") for column in columns)


def common_types(files, encoding, requested):
    """Return {column: the narrowest type that fits every row of the files}; JSON and CSV are read completely. Print
    what is written as another type, or null in some files.

    requested: the columns whose types matter (None: all), or fields of them; the types of the others are null."""
    types = {}
    found = defaultdict(dict)  # {column: {type: None}}
    num_files = Counter()  # by column
    for file in tqdm(files, desc="inspecting", unit="file"):
        names = set()
        for _, columns in read_columns(file, encoding):
            names.update(columns)
            for name, values in columns.items():
                types.setdefault(name, pa.null())
                if is_of(name, requested):
                    with errors_of(f"{file}: choose --columns without {name!r}"):
                        kind = type_of(values) if isinstance(values, list) else values.type
                        found[name][kind] = None
                        types[name] = common_type(types[name], regular_type(kind))
            is_typed = FORMATS[file_suffix(file)] in ("parquet", "orc", "arrow")
            if is_typed and not any(isinstance(columns[name], list) for name in columns if is_of(name, requested)):
                break  # the first table has the types of the file
        num_files.update(names)
    for name, kinds in found.items():
        parts = [f"{part} ({values.type})" for part, values in flatten(name, pa.array([], types[name]))]
        if [f"{name} ({kind})" for kind in kinds] != parts:
            print(f"column {name} ({', '.join(map(str, kinds))}): written as {', '.join(parts)}"[:500])
        if num_files[name] < len(files):
            print(f"column {name}: in {num_files[name]:,} of {len(files):,} files, null in the others")
    return types


NO_TYPE = (ValueError, TypeError, OverflowError)  # of values that no type fits: numbers and texts, say


def type_of(values):
    """Return the narrowest type that fits values of JSON: lists where one is a list, text if there is no other."""
    with suppress(*NO_TYPE):
        return pa.array(values).type
    if len(values) == 1 and not isinstance(values[0], list | dict):  # a large number
        return pa.string()
    kind = pa.null()
    for value in values:
        if isinstance(value, list):
            found = pa.list_(type_of(value))
        elif isinstance(value, dict):
            found = pa.struct([(name, type_of([cell])) for name, cell in value.items()])
        else:
            found = type_of([value])
        kind = common_type(kind, found)
    return kind


def common_type(first, second):
    """Return the narrowest type that fits the values of two: lists if one has lists, text if there is no other."""
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if isinstance(first, LISTS) or isinstance(second, LISTS):
        values = [kind.value_type if isinstance(kind, LISTS) else kind for kind in (first, second)]
        return pa.list_(common_type(*values))
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        types = {part.name: part.type for part in first}
        for part in second:
            types[part.name] = common_type(types.get(part.name, pa.null()), part.type)
        return pa.struct(types.items())
    numbers = [pa.int8() if kind == pa.bool_() else kind for kind in (first, second)]  # labels such as true and 0.5
    try:
        schemas = [pa.schema({"": kind}) for kind in numbers]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowTypeError:
        return pa.string()


def regular_type(kind):
    """Return the type that values of an Arrow type are written as, objects apart: text for dates and types of texts.
    Raise ValueError if there is none, as for maps."""
    if isinstance(kind, LISTS):
        return pa.list_(regular_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(part.name, regular_type(part.type)) for part in kind])
    if pa.types.is_dictionary(kind):
        return regular_type(kind.value_type)
    is_time = pa.types.is_temporal(kind) and not (pa.types.is_duration(kind) or pa.types.is_interval(kind))
    if kind in OTHER_TEXTS or is_time or pa.types.is_fixed_size_binary(kind):
        return pa.string()
    is_small = pa.types.is_decimal(kind) and kind.bit_width < 128  # which `datasets` does not read
    if is_small or not (is_plain(kind) or pa.types.is_null(kind)):
        raise ValueError(f"has {kind}, neither texts, numbers, objects nor lists of them")
    return kind


def read_tables(files, encoding, types, schema, keep):
    """Yield tables of the columns of a schema, of the rows that pass the expression `keep`. types: of common_types."""
    names = [name for name in types if is_of(name, schema.names)]
    for file in files:
        for num_rows, columns in read_columns(file, encoding, names):
            with errors_of(file):
                parts = {}
                for name, values in columns.items():
                    with errors_of(f"{file}: choose --columns without {name!r}"):
                        parts |= flatten(name, to_array(values, types[name]))
                arrays = []
                for field in schema:
                    array = parts.get(field.name)
                    arrays.append(pa.nulls(num_rows, field.type) if array is None else array.cast(field.type))
                table = pa.table(arrays, schema=schema)
            yield table if keep is None else table.filter(keep)


def to_array(values, kind):
    """Return the values of a column, a list or a ChunkedArray, as an Array with lists and objects where a type has."""
    if not isinstance(values, list):
        found = regular_type(values.type)
        if found == kind or not (pa.types.is_nested(found) or pa.types.is_nested(kind)):
            return values.combine_chunks()
        values = values.cast(found).to_pylist()
    with suppress(*NO_TYPE):
        array = pa.array(values)
        if array.type == kind:
            return array
    return pa.array([to_form(value, kind) for value in values], kind)


def to_form(value, kind):
    """Return a Python value in the form of a type: alone in a list where others are lists, as JSON where others are
    texts."""
    if value is None:
        return None
    if isinstance(kind, LISTS):
        return [to_form(part, kind.value_type) for part in (value if isinstance(value, list) else [value])]
    if pa.types.is_struct(kind):
        return {part.name: to_form(value.get(part.name), part.type) for part in kind}
    if pa.types.is_string(kind) and not isinstance(value, str):
        has_json = isinstance(value, bool | int | float | list | dict)
        return json.dumps(value, ensure_ascii=False, default=str) if has_json else str(value)
    return int(value) if isinstance(value, bool) and not pa.types.is_boolean(kind) else value


def flatten(name, column):
    """Yield (name, Array) of an Array of a column: itself, with a type of regular_type or, of objects, each field, and
    of lists of objects, lists of each."""
    kind = column.type
    if pa.types.is_struct(kind):
        for part, values in zip(kind, column.flatten()):
            yield from flatten(f"{name}.{part.name}", values)
    elif isinstance(kind, LISTS):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        ends = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
        for part, values in flatten(name, pc.list_flatten(column)):  # without values that a null list may have
            yield part, pa.ListArray.from_arrays(ends, values, mask=column.is_null())
    else:
        kind = regular_type(kind)
        yield name, column.cast(pa.string() if pa.types.is_null(kind) else kind)


def write_shards(tables, schema, folder, name, format, rows_per_shard):
    """Write tables as folder/name-00000.format, ..., at most `rows_per_shard` rows each; return the row count."""
    folder.mkdir(parents=True, exist_ok=True)
    # `datasets` maps Arrow streams; their batches are uncompressed, so that text is not copied.
    new_writer = pa.ipc.new_stream if format == "arrow" else pq.ParquetWriter
    rows = 0
    with ExitStack() as stack:
        for table in tqdm(rebatch(tables, schema), desc=f"writing {name}", unit=" x 10,000 rows", delay=1):
            while table.num_rows:
                shard_rows = rows % rows_per_shard
                if shard_rows == 0:
                    stack.close()  # closes the previous shard
                    shard = folder / f"{name}-{rows // rows_per_shard:05d}.{format}"
                    writer = stack.enter_context(new_writer(str(shard), schema))
                part = table.slice(0, rows_per_shard - shard_rows)
                writer.write_table(part, BATCH_ROWS)
                rows += part.num_rows
                table = table.slice(part.num_rows)
    return rows


def rebatch(tables, schema):
    """Yield the rows of tables in contiguous tables of 10,000: a filter may leave few in each, and many small record
    batches are slow to map."""
    rest = schema.empty_table()
    for table in filter(len, tables):
        rest = pa.concat_tables([rest, table])
        while len(rest) >= 10 * BATCH_ROWS or rest.nbytes > 2**30:  # a column of 2**31 bytes cannot be combined
            yield rest.slice(0, 10 * BATCH_ROWS).combine_chunks()
            rest = rest.slice(10 * BATCH_ROWS)
    yield rest.combine_chunks()


# ---- files of any format

FORMATS = {".parquet": "parquet", ".orc": "orc", ".arrow": "arrow", ".jsonl": "json", ".json": "json",
           ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text"}  # fmt: skip
COLUMNAR = {"parquet": ParquetFileFormat(pre_buffer=False), "orc": OrcFileFormat()}  # pre_buffer: up to 1 GiB ahead
TEXT_TYPES = (pa.string(), pa.large_string())
LISTS = pa.ListType | pa.LargeListType | pa.FixedSizeListType  # types of Arrow
# A list of texts in a cell of CSV, as JSON, Python or NumPy (without commas, and maybe cut by ...) writes it.
QUOTED = r"""(?:'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")"""
LIST_OF_TEXTS = re.compile(rf"\[\s*(?:(?:{QUOTED}|np\.str_\({QUOTED}\)|None|null|\.\.\.)[\s,]*)*+\]\s*", re.S)
OTHER_TEXTS = (pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
SURROGATES = re.compile("[\ud800-\udfff]")
CONSTANTS = {"NaN": None, "Infinity": math.inf, "-Infinity": -math.inf}  # NaN: missing, in texts, too


def read_columns(file, encoding="utf-8-sig", names=None):
    """Yield (number of rows, {column: values}) of at most 1,000 rows of a file at a time: ChunkedArrays, or lists if
    the format has no types. Columns of the folders KEY=VALUE of its path are texts.

    encoding: of a file without types. names: columns to read (default: all). The first of a file with types is
    empty."""
    kind = FORMATS[file_suffix(file)]
    keys = {}
    for key, value in re.findall(r"([^/=]+)=([^/]*)/", Path(file).as_posix()):
        keys[key] = None if value == HIVE_NULL else unquote(value)
    with errors_of(file), xopen(file, "rb") as source:
        check_content(file, kind if encoding == "utf-8-sig" else None)
        if kind in ("parquet", "orc", "arrow"):
            parts = read_columnar(source, kind, names)
        else:
            parts = read_untyped(source, file, kind, encoding)
        for num_rows, columns in parts:
            for name in keys.keys() & columns.keys():
                print_once(f"column {name}: as in the folders' names, which replace those of the files")
            columns |= {key: pa.chunked_array([[value] * num_rows], pa.string()) for key, value in keys.items()}
            yield num_rows, {name: columns[name] for name in names or columns if name in columns}


def read_columnar(source, kind, names):
    """Yield the number of rows, at most 1,000, and {column: ChunkedArray} of a Parquet, ORC or Arrow file; first none.

    names: columns to read (default: all); an Arrow file is read as it is."""
    if kind == "arrow":
        schema, batches = open_arrow(source)
    else:
        fragment = COLUMNAR[kind].make_fragment(source)
        schema = fragment.physical_schema
        if names is not None:
            schema = pa.schema([part for part in schema if part.name in names])
        # threads would decode an ORC file as fast as they can, and hold what is not yet written
        options = {"batch_size": BATCH_ROWS, "batch_readahead": 0, "fragment_readahead": 0, "use_threads": False}
        batches = fragment.to_batches(schema, **options)
    empty = pa.table([pa.nulls(0, part.type) for part in schema], schema=schema)  # empty_table() lacks some types
    for table in chain([empty], (pa.Table.from_batches([batch]) for batch in batches)):
        table.validate(full=True)  # invalid offsets or texts of a damaged file
        if len({*table.column_names}) < table.num_columns:
            raise ValueError(f"two columns have one name, of {', '.join(table.column_names)}: rename one")
        yield len(table), {name: known_values(table[name], name) for name in table.column_names}


def known_values(column, name):
    """Return a ChunkedArray, or a list, as of JSON, if its type has no text or number: durations, UUIDs, maps, ..."""
    with suppress(ValueError):
        regular_type(column.type)
        return column
    as_text = {"default": lambda value: value.decode() if isinstance(value, bytes) else str(value)}
    values = json.loads(json.dumps(column.to_pylist(), **as_text))
    if values:
        print_once(f"column {name} ({str(column.type)[:100]}): read as JSON, text where that has no type")
    return values


def open_arrow(source):
    """Return the schema and an iterator of the record batches of an Arrow file or stream, of at most 1,000 rows."""
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    parts = (pa.Table.from_batches([batch]).to_batches(BATCH_ROWS) for batch in batches)
    return reader.schema, chain.from_iterable(parts)


def read_untyped(source, file, kind, encoding):
    """Yield the number of rows, at most 1,000, and {column: list} of a file of JSON, CSV, TSV or text."""
    compression = infer_compression(file.partition("?")[0])
    lines = io.TextIOWrapper(compr[compression](source, mode="rb"), encoding, newline="")
    if kind == "json":
        rows = json_rows(lines, file)
    elif kind == "csv":
        rows = csv_rows(lines, file)
    else:
        rows = ({"text": line.rstrip("\r\n")} for line in lines)
    while part := list(islice(rows, BATCH_ROWS)):
        columns = {}
        for name in dict.fromkeys(chain(*part)):
            columns[name] = [row.get(name) for row in part]
        yield len(part), columns


def json_rows(lines, file):
    """Yield the objects of JSON Lines, or of one array, as dicts, its texts as {"text": text}; or rows_of_object().

    A lone surrogate, which no text file can hold, becomes U+FFFD; a warning has their number."""
    lines = filter(str.strip, lines)
    first = next(lines, "[]")
    second = next(lines, "")
    is_array = first.lstrip().startswith("[")
    is_object = file_suffix(file) == ".json" and not (is_array or (second and first.rstrip().endswith("}")))
    num_replaced = 0
    lines = filter(None, chain([first, second], lines))
    for text in ["".join(lines)] if is_array or is_object else lines:
        try:
            found = json.loads(text, object_pairs_hook=unique_keys, parse_constant=CONSTANTS.get)
            if "\\ud" in text.lower():  # only an escape can be half of a surrogate pair
                clean, count = SURROGATES.subn("\ufffd", json.dumps(found, ensure_ascii=False))
                found = json.loads(clean) if count else found
                num_replaced += count
            rows = found if is_array else [found]
            if is_object:
                rows = rows_of_object(found, file)
            yield from ({"text": row} if is_array and isinstance(row, str) else {**row} for row in rows)
        except (ValueError, TypeError):
            raise ValueError(f"not JSON Lines, nor an array of objects: {text[:80]}") from None
    if num_replaced:
        print_once(f"{file}: lone surrogates, halves of a character, written as U+FFFD: {num_replaced:,}")


def rows_of_object(found, file):
    """Return the rows of a JSON object: of the one list of objects in it, or of its columns, which are lists or, as of
    pandas' to_json(), objects {"0": value, "1": value, ...}; else it is a row. Print which."""
    lists = [name for name, cell in found.items() if isinstance(cell, list) and cell and isinstance(cell[0], dict)]
    columns = []
    first = next(iter(found.values()), None)
    for cell in found.values():
        is_frame = isinstance(cell, dict) and all(map(str.isdigit, cell)) and list(cell) == list(first)
        columns.append(list(cell.values()) if is_frame else cell)
    rows = [found]
    is_table = all(isinstance(column, list) for column in columns) and len(set(map(len, columns))) == 1
    if is_table and (len(found) > 1 or not lists):
        rows = [dict(zip(found, cells)) for cells in zip(*columns)]
        print_once(f"{file}: one object, of columns: reads {len(rows):,} rows")
    elif len(lists) == 1:
        rows = found[lists[0]]
        others = ", ".join(name for name in found if name not in lists) or "anything else"
        print_once(f"{file}: one object: reads the {len(rows):,} objects of its list {lists[0]!r}, not {others}")
    return rows


def unique_keys(pairs):
    """Return the dict of the pairs of a JSON object; raise LookupError if it has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        again = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise LookupError(f"a row has the key {again!r} twice: rename one, or keep the last by jq -c . FILE > NEW")
    return found


def csv_rows(lines, file):
    """Yield the rows of CSV, or of TSV, which has no quotes, as {column: text}; None of an empty cell. Print how many
    lack fields."""
    csv.field_size_limit(2**31 - 1)  # characters of a cell
    is_tsv = file_suffix(file) == ".tsv"
    options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if is_tsv else {"strict": True}
    reader = csv.reader(lines, **options)
    rows = (row for row in reader if len(row) > 1 or "".join(row).strip())  # no empty lines
    try:
        names = header_names(next(rows, []))
        num_short = 0
        for row in rows:
            if len(row) > len(names) + (row[-1] == ""):  # rows may end in a separator
                more = f"line {reader.line_num} has more fields than the header"
                raise ValueError(f"{more}: check the separator, and quote texts that contain it")
            num_short += len(row) < len(names)
            row += [""] * (len(names) - len(row))
            yield {name: cell_value(cell, name) for name, cell in zip(names, row)}
        if num_short:
            print_once(f"{file}: rows with fewer fields than the header, null in the others: {num_short:,}")
    except csv.Error as error:
        advice = 'double the quotes within a quoted text; where they are \\", see CSV in docs/training.md'
        raise ValueError(f"line {reader.line_num}: {error}: {advice}") from None


def cell_value(cell, name):
    """Return the value of a cell of CSV: a text, None if it is empty, or a list of texts."""
    if not (cell.startswith("[") and LIST_OF_TEXTS.fullmatch(cell)):
        return cell or None
    print_once(f"column {name}: cells that are lists of texts, read as lists")
    with suppress(ValueError):
        return json.loads(cell)
    items = re.findall(rf"{QUOTED}|None|null|\.\.\.", cell)
    if "..." in items:
        raise ValueError(f"column {name} has a list that NumPy has cut: write it again by json.dumps: {cell[:60]}")
    return [ast.literal_eval(item) if item[0] in "'\"" else None for item in items]


def header_names(cells):
    """Return the column names that pandas, and so the trainers, make of a header: "Unnamed: 0" of an empty cell."""
    header = io.StringIO()
    csv.writer(header).writerow(cells)
    return list(pd.read_csv(io.StringIO(header.getvalue()), index_col=False).columns) if cells else []


def texts_of(column):
    """Return a list of the texts in a column of texts or lists of texts; [] for any other column."""
    while isinstance(column.type, LISTS):
        column = pc.list_flatten(column)
    return column.to_pylist() if pa.types.is_string(column.type) else []


# ---- collections

SPLITS = ("train", "dev", "validation", "test")


def save_collection(name, folder):
    """Write a dataset of ir_datasets as corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv and triples.jsonl.

    A triple has the ids of a query, a positive and a negative; trainers look up texts by --corpus and --queries."""
    import ir_datasets

    dataset = ir_datasets.load(name)
    named = [word for word in name.split("/") if word in SPLITS]  # beir/scifact/train
    splits = {named[-1] if named else "test": dataset}
    for split in SPLITS:  # the judgments of beir/scifact are in beir/scifact/test
        with suppress(KeyError):
            splits[split] = ir_datasets.load(f"{name}/{split}")
    files = {}  # {name: iterator of lines, or of rows that become lines of JSON}
    if dataset.has_docs():
        files["corpus.jsonl"] = document_rows(dataset)
    queries = {}
    for part in [dataset, *splits.values()]:
        if part.has_queries():
            queries |= {query.query_id: query.default_text() for query in part.queries_iter()}
    if queries:
        files["queries.jsonl"] = ({"_id": key, "text": text} for key, text in queries.items())
    for split, part in splits.items():
        if part.has_qrels():
            lines = (f"{row.query_id}\t{row.doc_id}\t{row.relevance}" for row in part.qrels_iter())
            files[f"qrels/{split}.tsv"] = chain(["query-id\tcorpus-id\tscore"], lines)
    if dataset.has_docpairs():
        triples = dataset.docpairs_iter()
        keys = {"query": "query_id", "positive": "doc_id_a", "negative": "doc_id_b"}
        files["triples.jsonl"] = ({key: getattr(row, name) for key, name in keys.items()} for row in triples)
    if not files:
        raise ValueError("contains no documents, queries or judgments; specify one of its subsets")
    for file, lines in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        with open(folder / file, "w", encoding="utf-8") as sink:
            for line in tqdm(lines, desc=file, unit_scale=True):
                print(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False), file=sink)


def document_rows(dataset):
    """Yield the rows of corpus.jsonl. Without a title and a text, default_text() is what the package would index."""
    has_title = {"title", "text"} <= set(dataset.docs_cls()._fields)
    for document in dataset.docs_iter():
        title, text = (document.title, document.text) if has_title else ("", document.default_text())
        yield {"_id": document.doc_id, "title": title, "text": text}


# ---- the length report


def report_lengths(args, folder):
    """Write lengths.json and lengths.png, the token lengths of each column, and print a --max_length for them."""
    rows = sample_rows(args)
    with errors_of(f"--model_name_or_path {args.model_name_or_path}"):
        lengths, limit = count_tokens(rows, args)
    if not lengths:
        raise UserError(f"{args.sources[0]}: contains no text; set --columns")
    texts = np.concatenate(list(lengths.values()))  # their lengths
    columns = {name: pd.Series(values).describe([0.5, 0.9, 0.95, 0.99]) for name, values in lengths.items()}
    columns = pd.DataFrame(columns).T
    longest = math.ceil(np.percentile(texts, 99) / 8) * 8  # truncates the longest 1 %
    beyond = (texts > limit).mean()
    report = {"texts": len(texts), "tokens": int(texts.sum()), "limit": limit, "share_beyond_limit": beyond}
    report |= {"advice": {"max_length": min(longest, limit)}, "columns": columns.to_dict("index")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lengths.json").write_text(json.dumps(report, indent=1) + "\n")
    plot_lengths(lengths, min(longest, limit), folder / "lengths.png")
    print(columns.fillna(0).round().astype(int).to_string(), end="\n\n")
    print(f"99 % of the texts have at most {longest} tokens; {beyond:.1%} exceed the limit of {limit}")
    print(f"try --max_length {min(longest, limit)}{', that limit' * (longest > limit)}; see {folder}/lengths.png")


def sample_rows(args):
    """Return a Table of args.sample random rows of the sources, in random order."""
    schema, read = open_tables(args)
    sample = schema.append(pa.field("", pa.float64())).empty_table()  # a random key for each row
    random_keys = np.random.default_rng(0)
    for table in (table.select(schema.names) for table in read()):
        sample = pa.concat_tables([sample, table.append_column("", pa.array(random_keys.random(len(table))))])
        if len(sample) >= 2 * args.sample:
            sample = lowest_keys(sample, args.sample)
    return lowest_keys(sample, args.sample).select(schema.names)


def lowest_keys(table, size):
    """Return the rows of a Table that have the lowest keys, in their column ""."""
    return table.take(pc.select_k_unstable(table, size, [("", "ascending")]))


def count_tokens(rows, args):
    """Return {column: [tokens of each text, not truncated]}, and --max_length, or the lowest in the model's files."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    check_exists(args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, trust_remote_code=False)
    limits = [tokenizer.model_max_length, 2**20]
    for name, key in ("sentence_bert_config.json", "max_seq_length"), ("config.json", "max_position_embeddings"):
        with suppress(OSError):  # not all models have it
            config = Path(cached_file(args.model_name_or_path, name)).read_text(encoding="utf-8")
            found = json.loads(config).get(key) or 0
            limits += [found] * (found > 0)  # XLNet has -1
    tokenizer.model_max_length = 2**40  # else it warns
    lengths = defaultdict(list)
    batches = rows.combine_chunks().to_batches(BATCH_ROWS)
    for table in tqdm(batches, desc="counting tokens", unit=" x 1,000 rows"):
        for name in table.schema.names:
            texts = [text for text in texts_of(table[name]) if text and text.strip()]
            if texts:
                ids = tokenizer(texts, truncation=False)["input_ids"]
                lengths[name] += [max(1, len(one)) for one in ids]
    return lengths, args.max_length or min(limits)


def plot_lengths(lengths, longest, path):
    """Plot the share of the texts of each column that have at most so many tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in lengths.items():
        axes.ecdf(values, label=name)
    axes.axvline(longest, color="0.5", linestyle=":", label=f"--max_length {longest}")
    axes.set(xlabel="tokens", ylabel="share of texts with at most so many")
    axes.legend()
    figure.savefig(path, dpi=110)


# ---- output folders


@contextmanager
def new_folder(folder):
    """Yield an empty folder that replaces `folder` at the end of the block; if the block raises, `folder` is kept."""
    part = folder.with_name(f".{folder.name}.part")
    old = folder.with_name(f".{folder.name}.old")
    created = [parent for parent in folder.parents if not parent.exists()]
    shutil.rmtree(part, ignore_errors=True)  # left by a killed run
    try:
        part.mkdir(parents=True)
        yield part
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{folder}: not written ({error})") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        with suppress(OSError):  # not empty
            for parent in created:
                parent.rmdir()


# ---- errors


class UserError(ValueError):
    """Something the user can fix; printed as one line, without a traceback."""


# Errors of code, such as an edited function: they keep their traceback.
BUGS = (KeyError, IndexError, TypeError, AttributeError, NameError)


def cause_of(error):
    """Return the root cause of an error in one line, with what to do about it."""
    while error.__cause__ and not isinstance(error, UserError):
        error = error.__cause__
    if isinstance(error, KeyError):
        return f"there is no {error}"
    if isinstance(error, UnicodeDecodeError):
        return f"not in UTF-8: set --encoding, such as cp1252 ({error})"
    return " ".join((str(error).strip() or repr(error)).split())[:500]


@contextmanager
def errors_of(name, *expected):
    """Turn whatever a library raises about the user's data into a UserError: `name`, then the root cause.
    expected: types of errors that are the user's here, although they are of code elsewhere."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (*BUGS, MemoryError)) and not isinstance(error, expected):
            raise
        reason = cause_of(error)
        raise UserError(reason if reason.startswith(name) else f"{name}: {reason}") from error


# ---- files of a source

REWRITE = "rewrite it by prepare_corpus.py SOURCE --output_dir DIR"
UNSUPPORTED = f"not one of {' '.join(FORMATS)}, with or without .gz or .zst"
NOT_ROWS = re.compile(r"(readme|licen[cs]e)(\.md|\.txt)?|(config|dataset_infos?|dataset_dict)\.json", re.I)
# A word that names a split, as test, testdata, dev_set and the first one of TestSet do.
SPLIT = re.compile(r"(?<![a-z])(train|valid|val|dev|test|eval)(?:ing|idation|uation)?(?:data|set|file)?s?(?![a-z])")


def file_suffix(file):
    """Return the key of FORMATS that a file name ends in, before .gz or .zst and the query of a URL, or None."""
    name = file.partition("?")[0] if file.startswith(("http://", "https://")) else file
    suffix = Path(name.lower().removesuffix(".gz").removesuffix(".zst")).suffix
    return suffix if suffix in FORMATS else None


def check_exists(name):
    """Raise UserError if `name` is not on disk and cannot be a Hub id: NAME or ORG/NAME, without a folder ORG here."""
    may_be_id = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) and not os.path.isdir(os.path.dirname(name))
    if not (may_be_id or "://" in name or os.path.exists(name)):
        raise UserError("no such file or folder")
    if os.path.isdir(f"{name}/checkpoints"):
        raise UserError(f"is the folder of a run: use {name}/model")


@lru_cache
def print_once(line):
    """Print a line, however often it is given."""
    print(line)


def files_of(source):
    """Return the files of a path, folder, glob, URL, Hub id or ID:config:split. What is on disk comes first, by its
    name, whatever its characters; choose_files says which files of a folder are read."""
    path = os.path.expanduser(source)
    folder = os.path.join(path, "")
    if os.path.isfile(path):
        if not file_suffix(path):
            raise UserError(UNSUPPORTED)
        return [path]
    readme = Path(folder, "README.md")
    has_configs = readme.exists() and b"\nconfigs:" in readme.read_bytes()  # the Hub's layout
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


def files_of_split(source):
    """Return the files of ID[:config[:split]] of the Hub, or of a folder in its layout; by default of split train."""
    name, *parts = [source] if os.path.isdir(source) else source.split(":")
    config = parts[0] if parts else None
    split = parts[1] if len(parts) > 1 else "train"
    check_exists(name)
    files = datasets.load_dataset_builder(name, name=config or None).config.data_files
    if split not in files:
        raise UserError(f"no split {split!r} with files; available: {', '.join(map(str, files)) or 'none'}")
    if not file_suffix(files[split][0]):
        raise UserError(f"{files[split][0]}: {UNSUPPORTED}")
    return list(files[split])


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


def refuse_delta(files):
    """Raise UserError if files are those of a table of Delta Lake, perhaps in folders KEY=VALUE."""
    for folder in {os.path.dirname(file) for file in files if not file.startswith("http")}:
        while "=" in os.path.basename(folder):
            folder = os.path.dirname(folder)
        fs, path = fsspec.core.url_to_fs(folder)
        if fs.isdir(f"{path}/_delta_log"):
            advice = "write it by DeltaTable(FOLDER).to_pandas().to_parquet(FILE), of the package deltalake"
            raise UserError(f"a table of Delta Lake, of which a log says what is deleted: {advice}")


def walk(folder, seen):
    """Yield the files below a folder, also where links lead, but not the caches that map() adds to a folder of
    Dataset.save_to_disk; seen: the folders so far, none of which is read again."""
    real = os.path.realpath(folder)
    names = [] if real in seen else os.listdir(folder)
    if {"state.json", "dataset_info.json"} <= {*names}:
        state = json.loads(Path(folder, "state.json").read_text(encoding="utf-8"))
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
    copies and, unless they match a pattern, not of another split than train. Print which they are, and the others."""
    found = defaultdict(list)  # {format, or why a file is not read: names}
    names = {file.removeprefix(root) for file in files}
    for name in sorted(names):
        is_hidden = name.startswith((".", "_")) or "/." in name or "/_" in name
        kind = FORMATS.get(file_suffix(name), "unknown format")
        if NOT_ROWS.fullmatch(os.path.basename(name)):
            continue
        if is_hidden:
            kind = "hidden"
        elif name.endswith((".gz", ".zst")) and name.rpartition(".")[0] in names:
            kind = "compressed copy"
        elif is_other_split(name) and not is_pattern:
            kind = "another split"
        found[kind].append(name)
    formats = [kind for kind in found if kind in FORMATS.values()]
    chosen = max(formats, key=lambda kind: len(found[kind]), default=None)
    counts = {kind: f"{len(found[kind]):,} {kind} ({', '.join(found[kind][:3])})" for kind in found}
    others = "".join(f"; leaves out {count}" for kind, count in counts.items() if kind != chosen)
    if not chosen:
        raise UserError(f"no file to read{others}")
    print(f"{source}: reads {counts[chosen]}{others}")
    return [root + name for name in found[chosen]]


def is_plain(kind):
    """Return whether an Arrow type is one of texts or numbers, or of lists of them."""
    if isinstance(kind, LISTS):
        return is_plain(kind.value_type)
    is_number = pa.types.is_primitive(kind) or pa.types.is_decimal(kind)
    return kind in TEXT_TYPES or (is_number and not pa.types.is_temporal(kind))


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
