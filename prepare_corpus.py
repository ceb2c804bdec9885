"""Convert any table to sharded, memory-mappable files; with no arguments, make the demo corpus and its models.

    python prepare_corpus.py      # the demo: data/python_code, from the source files of this Python installation
    python prepare_corpus.py logs/*.jsonl.zst --output_dir data/logs --columns query clicked
    python prepare_corpus.py s3://bucket/pairs --output_dir data/pairs --filter "[('score', '>', 0.5)]"
    python prepare_corpus.py --ir_dataset beir/scifact --output_dir data/scifact
    python prepare_corpus.py data/pairs --length_report --model_name_or_path BAAI/bge-small-en-v1.5

A row of the demo is {"docstring": "Return the first index of value.", "code": "def find(items, value): ..."}; `code`
never contains a docstring, so a match has to come from names and logic.
Output of the demo: {train,heldout}/{stdlib,packages}-*.parquet, corpus.json (files, pairs), and untrained models with
their own tokenizers: bi_encoder/ (static embeddings), cross_encoder/ (a small BERT). Whole files are held out; train
shares no docstring or code with them. Existing output is kept; --overwrite rebuilds it.
Output of a conversion: data-*.arrow or .parquet, which `datasets` maps. Columns missing in a file or row are null.
JSON is read twice, first to find types that fit every row: text where numbers and texts are mixed. Columns of CSV and
TSV are texts, as they are written. Folders KEY=VALUE of a path are columns; a lone surrogate of JSON becomes U+FFFD.
--output_dir may be a URL of fsspec, such as s3://bucket/pairs: what is written to a temporary folder is copied there.
Output of --ir_dataset: a BEIR folder and triples of ids. Left out: types set by hand, shuffling.
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
import tempfile
import warnings
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from itertools import chain, islice, product
from pathlib import Path

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
from pyarrow.dataset import HivePartitioning, OrcFileFormat, ParquetFileFormat, get_partition_keys
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
           help=f"new folder or URL for the shards (default: {DEMO}; for reports: runs/lengths)")  # fmt: skip
    option("--overwrite", action="store_true", help="replace a non-empty --output_dir, when the new one is complete")
    option("--columns", nargs="+", action="extend", metavar="C", help="columns to keep, in this order (default: all)")
    option(
        "--filter",
        metavar="F",
        help="rows to keep, a pyarrow filter: \"[('lang', 'in', ['en', 'de'])]\"; of CSV, compare texts",
    )
    option("--format", choices=["arrow", "parquet"], default="arrow", help="arrow: mapped as it is; parquet: smaller")
    option("--rows_per_shard", type=int, default=1_000_000, help="maximum rows per file")
    option("--ir_dataset", metavar="NAME", help="collection of ir_datasets to convert, such as beir/scifact")
    option("--length_report", action="store_true", help="write token counts of SOURCE; convert nothing")
    option("--model_name_or_path", metavar="M", help="Hub id or folder whose tokenizer --length_report uses")
    option("--max_length", type=int, metavar="N", help="tokens a text is truncated to (default: the tokenizer's own)")
    option("--sample", type=int, default=100_000, metavar="N", help="random rows that --length_report reads")
    args = parser.parse_args(argv)
    if min(args.rows_per_shard, args.sample, args.max_length or 1) < 1:
        parser.error("--rows_per_shard, --sample and --max_length must be above 0")
    if args.length_report and (not args.sources or not args.model_name_or_path or args.filter):
        parser.error("--length_report requires SOURCE and --model_name_or_path, without --filter")
    if (args.ir_dataset and args.sources) or ((args.columns or args.filter) and not args.sources):
        parser.error("--columns and --filter require SOURCE; --ir_dataset excludes SOURCE")
    if (args.ir_dataset or args.sources) and not (args.output_dir or args.length_report):
        parser.error("SOURCE and --ir_dataset require --output_dir")
    if "://" in (args.output_dir or "") and (args.length_report or not (args.sources or args.ir_dataset)):
        parser.error("--output_dir: must be a local folder for --length_report and the demo")
    return args


# ---- main


def main(args):
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are reported once, as a UserError
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each load of a local file asks the Hub
    if args.length_report:
        report_lengths(args, Path(args.output_dir or "runs/lengths"))
        return
    if "://" in (args.output_dir or ""):
        write_remote_output(args)
        return
    is_demo = not (args.sources or args.ir_dataset)
    output = Path(args.output_dir or DEMO).resolve()
    is_kept = is_demo and (output / "corpus.json").exists() and not args.overwrite
    if not is_kept:
        if any(Path(source).resolve().is_relative_to(output) for source in args.sources):
            raise UserError(f"--output_dir {output}: contains a SOURCE; choose another folder")
        if output.exists() and any(output.iterdir()) and not args.overwrite:
            raise UserError(f"--output_dir {output}: is not empty; choose another folder, or set --overwrite")
        with new_folder(output) as part:
            write_output(part, args)
    print(f"output: {output}")


def write_remote_output(args):
    """Write a collection or converted sources to a temporary folder, and copy it to the URL --output_dir."""
    with user_errors(f"--output_dir {args.output_dir}"):
        fs, path = fsspec.core.url_to_fs(args.output_dir)
        exists = bool(fs.exists(path) and fs.find(path))
    if exists and not args.overwrite:
        raise UserError(f"--output_dir {args.output_dir}: is not empty; choose another, or set --overwrite")
    with tempfile.TemporaryDirectory() as folder:
        write_output(Path(folder), args)
        with user_errors(f"--output_dir {args.output_dir}"):
            if exists:
                fs.rm(path, recursive=True)
            fs.put(f"{folder}/", f"{path}/", recursive=True)
    print(f"output: {args.output_dir}")


def write_output(folder, args):
    """Write a collection, converted sources, or the demo corpus into an empty folder."""
    if args.ir_dataset:
        with user_errors(f"--ir_dataset {args.ir_dataset}", KeyError):
            save_collection(args.ir_dataset, folder)
    elif args.sources:
        convert(args, folder)
    else:
        paths = sysconfig.get_paths()
        roots = {"stdlib": [paths["stdlib"]], "packages": [paths["purelib"], paths["platlib"]]}
        print(build_demo(roots, folder)["pairs"])
        save_models(folder)


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
    for columns in islice(tables, 100):  # of up to 1,000 rows
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
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    wordpieces.train_from_iterator(
        texts,
        vocab_size=30_000,
        initial_alphabet=alphabet,
        special_tokens=special + [f"##{char}" for char in alphabet],
        show_progress=False,
    )
    wordpieces = BertWordPieceTokenizer(wordpieces.get_vocab())  # only the five usual tokens stay special
    tokenizer = BertTokenizerFast(tokenizer_object=wordpieces._tokenizer, model_max_length=MODEL_MAX_LENGTH)
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=MODEL_MAX_LENGTH,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        num_labels=1,
    )
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)


# ---- conversion


def convert(args, folder):
    """Write the rows of args.sources that pass args.filter into `folder`, in order; print their number and types."""
    schema, tables = open_tables(args)
    rows = write_shards(tables, schema, folder, "data", args.format, args.rows_per_shard)
    if not rows:
        condition = f" passes --filter {args.filter!r}" if args.filter else ""
        raise UserError(f"{args.sources[0]}: no row{condition}")
    types = ", ".join(f"{field.name}: {field.type}" for field in schema)
    print(f"{rows:,} rows of {types}")


def open_tables(args):
    """Return the schema of the rows of args.sources that pass args.filter, and an iterator of tables of them."""
    files = []
    for source in args.sources:
        with user_errors(source):
            files += list_files(source)
    keep = None
    tested = set()
    if args.filter:
        with user_errors(f"--filter {args.filter!r}"):
            keep = pq.filters_to_expression(ast.literal_eval(args.filter))
            nodes = ast.walk(ast.parse(args.filter))
            tested = {node.value for node in nodes if isinstance(node, ast.Constant)}  # columns, and values
    partitioning = hive_partitioning(files)
    schema = common_schema(files, partitioning, args.columns and {*args.columns, *tested})
    columns = list(dict.fromkeys(args.columns or schema.names))
    for name in columns:
        if name not in schema.names:
            raise UserError(f"--columns {name}: the columns are: {', '.join(schema.names)}")
    # only columns that are written or in the filter are read; the others may be of any type
    schema = pa.schema([field for field in schema if field.name in {*columns, *tested}])
    empty = schema.empty_table()
    if args.filter:
        with user_errors(f"--filter {args.filter!r}", *BUGS):
            empty.filter(keep)  # raises if it does not fit the columns
    return empty.select(columns).schema, read_tables(files, partitioning, schema, keep, columns)


def hive_partitioning(files):
    """Return the partitioning that reads columns from the names KEY=VALUE of the files' folders: int32 where all
    values of a key are whole numbers without zeros before them, else text."""
    values = defaultdict(set)
    for file in files:
        for key, value in re.findall(r"([^/=]+)=([^/]*)/", Path(file).as_posix()):
            values[key].add(value)
    types = {}
    for key, texts in values.items():
        types[key] = pa.string()
        with suppress(pa.ArrowInvalid):
            numbers = pa.array(sorted(texts - {HIVE_NULL})).cast(pa.int32())
            if {*map(str, numbers.to_pylist())} | {HIVE_NULL} == texts | {HIVE_NULL}:  # without zeros before them
                types[key] = pa.int32()
    return HivePartitioning(pa.schema(types))


def common_schema(files, partitioning, columns):
    """Return the narrowest schema that fits every row of the files; JSON files are read completely.

    columns: the names of those whose types matter (None: all); those of the others are any."""
    types = {}
    for file in tqdm(files, desc="inspecting", unit="file"):
        for found in read_columns(file):
            for name, values in found.items():
                known = types.setdefault(name, pa.null())
                if columns is None or name in columns:
                    with user_errors(f"{file}: choose --columns without {name!r}"):
                        types[name] = common_type(known, values)
            if FORMATS[file_suffix(file)] != "json":
                break  # the first table has the types of the file
    text = pa.string()  # the most likely type of later values
    types = {name: text if pa.types.is_null(kind) else kind for name, kind in types.items()}
    return pa.schema(types | dict(zip(partitioning.schema.names, partitioning.schema.types)))


def common_type(data_type, values):
    """Return the narrowest type that fits a type and values (a list or an array): text if there is no other.

    Raise ValueError if `datasets` has no such type, as of maps."""
    if not isinstance(values, list):  # without dictionaries
        values = datasets.Features.from_arrow_schema(pa.schema({"": values.type})).arrow_schema.empty_table()[0]
    try:
        found = pa.array(values).type if isinstance(values, list) else values.type
        schemas = [pa.schema({"": data_type}), pa.schema({"": found})]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (ValueError, TypeError, OverflowError):  # numbers and texts, say
        return pa.string()


def read_tables(files, partitioning, schema, keep, columns):
    """Yield tables of `columns`, typed as in `schema`, of the rows of files that pass the expression `keep`."""
    for file in files:
        for values in read_columns(file, partitioning, schema, keep):
            with user_errors(file):
                arrays = [to_array(values[field.name], field.type) for field in schema]
                table = pa.table(arrays, schema=schema)
            if keep is not None:
                table = table.filter(keep)
            yield table.select(columns)


def to_array(values, data_type):
    """Return the values of a column as an array of `data_type`; in a text column, other values become JSON."""
    if not isinstance(values, list):
        return values.cast(data_type)
    if pa.types.is_string(data_type):
        values = [cell if isinstance(cell, str | None) else json.dumps(cell, ensure_ascii=False) for cell in values]
    return pa.array(values, data_type)


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
        while len(rest) >= 10 * BATCH_ROWS:
            yield rest.slice(0, 10 * BATCH_ROWS).combine_chunks()
            rest = rest.slice(10 * BATCH_ROWS)
    yield rest.combine_chunks()


# ---- files of any format

FORMATS = {".parquet": "parquet", ".orc": "orc", ".arrow": "arrow", ".jsonl": "json", ".json": "json",
           ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text"}  # fmt: skip
COLUMNAR = {"parquet": ParquetFileFormat(pre_buffer=False), "orc": OrcFileFormat()}  # pre_buffer: up to 1 GiB ahead
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
SURROGATES = re.compile("[\ud800-\udfff]")


def read_columns(file, partitioning=None, schema=None, keep=None):
    """Yield {column: values} for 1,000 rows of a file at a time; Arrow arrays, or lists where the format has no types.

    schema: columns to read (default: all), to which `partitioning` adds those of the folders' names; keep: an
    expression, by which a Parquet or ORC file is filtered. The first of a file with types is empty."""
    kind = FORMATS[file_suffix(file)]
    folders = partitioning.parse(Path(file).as_posix()) if partitioning else None
    keys = get_partition_keys(folders) if partitioning else {}
    with user_errors(file), xopen(file, "rb") as source:
        if kind in ("parquet", "orc", "arrow"):
            parts = read_columnar(source, kind, folders, schema, keep)
        else:
            parts = read_lines(source, file, kind)
        for num_rows, columns in parts:
            columns |= {name: [value] * num_rows for name, value in keys.items()}
            names = schema.names if schema else columns
            yield {name: columns.get(name, [None] * num_rows) for name in names}


def read_columnar(source, kind, folders, schema, keep):
    """Yield the number of rows, at most 1,000, and {column: ChunkedArray} of a Parquet, ORC or Arrow file; first none.

    schema: columns to read, cast to its types (default: all, as they are); folders: an expression of constant columns;
    only rows that pass `keep` are read. An Arrow file is read as it is."""
    if kind == "arrow":
        own, batches = open_arrow(source)
    else:
        fragment = COLUMNAR[kind].make_fragment(source, partition_expression=folders)
        own = fragment.physical_schema
        # threads would decode an ORC file as fast as they can, and hold what is not yet written
        options = {"batch_size": BATCH_ROWS, "batch_readahead": 0, "fragment_readahead": 0, "use_threads": False}
        batches = fragment.to_batches(schema or own, filter=keep, **options)
    for table in chain([own.empty_table()], (pa.Table.from_batches([batch]) for batch in batches)):
        table.validate(full=True)  # invalid offsets or texts of a damaged file
        yield len(table), dict(zip(table.column_names, table.columns))


def open_arrow(source):
    """Return the schema and an iterator of the record batches of an Arrow file or stream, of at most 1,000 rows."""
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    parts = (pa.Table.from_batches([batch]).to_batches(BATCH_ROWS) for batch in batches)
    return reader.schema, chain.from_iterable(parts)


def read_lines(source, file, kind):
    """Yield the number of rows, at most 1,000, and {column: list} of a file of JSON, CSV, TSV or text."""
    compression = infer_compression(file.partition("?")[0])
    lines = io.TextIOWrapper(compr[compression](source, mode="rb"), "utf-8-sig", newline="")
    if kind == "json":
        rows = json_rows(lines, file)
    elif kind == "csv":
        rows = csv_rows(lines, is_tsv=file_suffix(file) == ".tsv")
    else:
        rows = ({"text": line.rstrip("\r\n")} for line in lines)
    while part := list(islice(rows, BATCH_ROWS)):
        columns = {}
        for name in dict.fromkeys(chain(*part)):
            columns[name] = [row.get(name) for row in part]
        yield len(part), columns


def json_rows(lines, file):
    """Yield the objects of JSON Lines, or of one array, as dicts; of an array of texts, {"text": text}.

    A lone surrogate, which no text file can hold, becomes U+FFFD; a warning has their number."""
    lines = filter(str.strip, lines)
    first = next(lines, "[]")
    is_array = first.lstrip().startswith("[")
    num_replaced = 0
    for text in ["".join([first, *lines])] if is_array else chain([first], lines):
        try:
            found = json.loads(text)
            if "\\ud" in text.lower():  # only an escape can be half of a surrogate pair
                clean, count = SURROGATES.subn("\ufffd", json.dumps(found, ensure_ascii=False))
                found = json.loads(clean) if count else found
                num_replaced += count
            rows = found if is_array else [found]
            yield from ({"text": row} if is_array and isinstance(row, str) else {**row} for row in rows)
        except (ValueError, TypeError):
            raise ValueError(f"not a JSON object: {text[:80]}") from None
    if num_replaced:
        warn_once(f"{file}: lone surrogates, halves of a character, written as U+FFFD: {num_replaced:,}")


def csv_rows(lines, is_tsv):
    """Yield the rows of CSV, or of TSV, which has no quotes, as {column: text}; None of an empty cell."""
    csv.field_size_limit(2**31 - 1)  # characters of a cell
    options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if is_tsv else {"strict": True}
    reader = csv.reader(lines, **options)
    rows = (row for row in reader if len(row) > 1 or "".join(row).strip())  # no empty lines
    try:
        names = header_names(next(rows, []))
        for row in rows:
            if len(row) > len(names) + (row[-1] == ""):  # rows may end in a separator
                advice = "check the separator, and quote texts that contain it"
                raise ValueError(f"line {reader.line_num} has more fields than the header: {advice}")
            row += [""] * (len(names) - len(row))
            yield {name: cell or None for name, cell in zip(names, row)}
    except csv.Error as error:
        advice = 'double the quotes within a quoted text; where they are \\", see CSV in docs/training.md'
        raise ValueError(f"line {reader.line_num}: {error}: {advice}") from None


def header_names(cells):
    """Return the column names that pandas, and so the trainers, make of a header: "Unnamed: 0" of an empty cell."""
    header = io.StringIO()
    csv.writer(header).writerow(cells)
    return list(pd.read_csv(io.StringIO(header.getvalue()), index_col=False).columns) if cells else []


def texts_of(column):
    """Return a list of the texts in a column of texts or lists of texts; [] for any other column."""
    if is_list(column.type):
        column = pc.list_flatten(column)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.to_pylist()
    return []


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
        files["triples.jsonl"] = (
            {"query": row.query_id, "positive": row.doc_id_a, "negative": row.doc_id_b}
            for row in dataset.docpairs_iter()
        )
    if not files:
        raise ValueError("contains no documents, queries or judgments; specify one of its subsets")
    for file, lines in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        with open(folder / file, "w", encoding="utf-8") as sink:
            for line in tqdm(lines, desc=file, unit_scale=True):
                sink.write(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False))
                sink.write("\n")


def document_rows(dataset):
    """Yield the rows of corpus.jsonl. Without a title and a text, default_text() is what the package would index."""
    has_title = {"title", "text"} <= set(dataset.docs_cls()._fields)
    for document in dataset.docs_iter():
        if has_title:
            yield {"_id": document.doc_id, "title": document.title, "text": document.text}
        else:
            yield {"_id": document.doc_id, "title": "", "text": document.default_text()}


# ---- the length report

BUDGETS = (2048, 4096, 8192, 16_384, 32_768)  # --micro_batch_tokens to compare
PART_SIZES = (128, 1024, 10_000)  # texts of a batch on one process


def report_lengths(args, folder):
    """Write lengths.json and lengths.png: token lengths by column, and the padding of several ways to batch them."""
    rows = sample_rows(args)
    with user_errors(f"--model_name_or_path {args.model_name_or_path}"):
        lengths, max_length = count_tokens(rows, args)
    if not lengths:
        raise UserError(f"{args.sources[0]}: contains no text; set --columns")
    texts = np.concatenate(list(lengths.values()))  # their lengths
    texts = np.random.default_rng(0).permutation(texts)
    costs = batching_costs(texts)
    columns = {name: pd.Series(values).describe([0.5, 0.9, 0.95, 0.99]) for name, values in lengths.items()}
    columns = pd.DataFrame(columns).T

    # Suggest truncating the longest 1 %, and the largest micro-batches within 2 points of the least padding.
    longest = math.ceil(np.percentile(texts, 99) / 8) * 8
    longest = min(max_length, longest)
    padding = costs.padding.to_numpy()[2:].reshape(len(PART_SIZES), len(BUDGETS))
    usual = padding[1]  # that of 1,024 texts
    budget = max(budget for budget, share in zip(BUDGETS, usual) if share <= usual.min() + 0.02)

    report = {
        "texts": len(texts),
        "tokens": int(texts.sum()),
        "max_length": max_length,
        "advice": {"max_length": longest, "micro_batch_tokens": budget},
        "columns": columns.to_dict("index"),
        "batches": costs.to_dict("index"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lengths.json").write_text(json.dumps(report, indent=1) + "\n")
    plot_lengths(lengths, longest, costs, padding, folder / "lengths.png")
    print(columns.fillna(0).round().astype(int).to_string(), end="\n\n")
    print(costs.to_string(formatters={"padding": "{:.1%}".format, "passes": "{:,.0f}".format}) + "\n")
    print(f"try --max_length {longest} and, on a GPU, --micro_batch_tokens {budget}; see {folder}/lengths.png")


def sample_rows(args):
    """Return a Table of args.sample random rows of the sources, in random order."""
    schema, tables = open_tables(args)
    sample = schema.append(pa.field("", pa.float64())).empty_table()  # a random key for each row
    random_keys = np.random.default_rng(0)
    for table in tables:
        sample = pa.concat_tables([sample, table.append_column("", pa.array(random_keys.random(len(table))))])
        if len(sample) >= 2 * args.sample:
            sample = lowest_keys(sample, args.sample)
    return lowest_keys(sample, args.sample).select(schema.names)


def lowest_keys(table, size):
    """Return the rows of a Table that have the lowest keys, in their column ""."""
    return table.take(pc.select_k_unstable(table, size, [("", "ascending")]))


def count_tokens(rows, args):
    """Return {column: [tokens of each of its texts]}, and the number of tokens that texts are truncated to."""
    from transformers import AutoTokenizer

    check_exists(args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, trust_remote_code=False)
    max_length = args.max_length or min(tokenizer.model_max_length, 2**20)
    lengths = defaultdict(list)
    batches = rows.combine_chunks().to_batches(BATCH_ROWS)
    for table in tqdm(batches, desc="counting tokens", unit=" x 1,000 rows"):
        for name in table.schema.names:
            texts = [text for text in texts_of(table[name]) if text and text.strip()]
            if texts:
                ids = tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
                lengths[name] += [max(1, len(one)) for one in ids]
    return lengths, max_length


def batching_costs(texts):
    """Return a DataFrame (padding, passes) of several ways to batch texts, given their lengths: see cost_of."""
    costs = {"random batches of 32": cost_of(split_evenly(texts, 32))}
    batches = []
    for window in split_evenly(texts, 320):
        batches += split_evenly(np.sort(window), 32)
    costs["windows of 320, sorted, batches of 32"] = cost_of(batches)
    for size, budget in product(PART_SIZES, BUDGETS):
        batches = []
        for part in split_evenly(texts, size):
            batches += [part[places] for places in cut(part, budget, budget / 64)]
        costs[f"micro-batches of {budget:,} tokens, {size:,} texts a process"] = cost_of(batches)
    return pd.DataFrame(costs, index=["padding", "passes"]).T


def split_evenly(texts, size):
    """Return arrays of `size` texts each, the last perhaps of fewer."""
    return np.split(texts, range(size, len(texts), size))


def cost_of(batches):
    """Return the share of padding in batches, arrays of the lengths of texts, and the number of batches."""
    tokens = sum(map(np.sum, batches))
    padded = sum(len(batch) * batch.max() for batch in batches)
    return 1 - tokens / padded, len(batches)


def plot_lengths(lengths, longest, costs, padding, path):
    """Plot histograms of the token lengths by column, and the padding of batches by token budget.

    padding: (sizes, budgets) of micro-batches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, values in lengths.items():
        weights = np.full(len(values), 1 / len(values))
        left.hist(values, bins=60, histtype="step", label=name, weights=weights)
    left.axvline(longest, color="0.5", linestyle=":", label=f"--max_length {longest}")
    left.set(xlabel="tokens", ylabel="share of texts")
    left.legend()
    right.plot(BUDGETS, padding.T, marker="o", label=[f"{size:,} texts a process" for size in PART_SIZES])
    for name, style in zip(costs.index, ("--", ":")):  # the two with batches of 32
        right.axhline(costs.padding[name], color="0.5", linestyle=style, label=name)
    right.set(xlabel="--micro_batch_tokens", ylabel="padding", xscale="log", ylim=(0, None))
    right.set_xticks(BUDGETS, [f"{budget:,}" for budget in BUDGETS])
    right.legend()
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


def is_list(kind):
    """Return whether an Arrow type is one of lists."""
    return isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


# ---- micro-batches (same in train_bi_encoder.py)


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
