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
CSV and JSON are read twice, first to find types that fit every row: text where numbers and texts are mixed.
Output of --ir_dataset: a BEIR folder and triples of ids. Left out: types set by hand, shuffling, remote outputs.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["datasets>=5.2,<6", "fsspec[http]>=2026.9", "matplotlib>=3.11,<4", "numpy>=2.4,<3",
#   "pandas>=2.2,<4", "pyarrow>=26,<27", "sentence-transformers>=6.2,<7", "tokenizers>=0.23,<1", "torch==2.13.0",
#   "tqdm>=4.70,<5", "transformers>=5.23,<6", "zstandard>=0.25,<1"]
# ///

import argparse
import ast
import functools
import gc
import hashlib
import json
import os
import random
import re
import shutil
import sys
import sysconfig
import warnings
from bisect import bisect_right
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from difflib import get_close_matches
from itertools import chain, islice, product
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets.data_files import DataFilesList, get_data_patterns
from datasets.utils.file_utils import xopen
from pyarrow.dataset import OrcFileFormat, ParquetFileFormat
from tqdm import tqdm

DEMO = "data/python_code"
BATCH_ROWS = 1000  # rows of a record batch and of a Parquet row group, as `datasets` itself writes them


# same in train_bi_encoder.py, train_cross_encoder.py
class UserError(ValueError):
    """Something the user can fix; printed as one line, without a traceback."""


# same in train_bi_encoder.py, train_cross_encoder.py
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


# same in train_bi_encoder.py, train_cross_encoder.py
def check_exists(name):
    """Raise UserError if `name` is not on disk and cannot be a Hub id: NAME or ORG/NAME, without a folder ORG here."""
    may_be_id = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) and not os.path.isdir(os.path.dirname(name))
    if not (may_be_id or "://" in name or os.path.exists(name)):
        raise UserError("no such file or folder")


# same in train_bi_encoder.py, train_cross_encoder.py
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


@contextmanager
def new_folder(folder):
    """Yield an empty folder that replaces `folder` at the end of the block; if the block raises, `folder` is kept."""
    part, old = folder.with_name(f".{folder.name}.part"), folder.with_name(f".{folder.name}.old")
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


# ----------------------------------------------------------------------------------------------------- the demo corpus

HELDOUT_PERCENT = 5  # of files: a few thousand pairs, more than the 1,000 candidates of an evaluation
MAX_CODE_CHARS = 4000  # about 1,000 tokens, four times MODEL_MAX_LENGTH; longer code is mostly generated tables
# Test suites repeat the same assertion many times over, and their docstrings describe a bug number, not the code.
SKIPPED_FOLDERS = {"test", "tests", "testing", "_test", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def definitions(statements):
    """Yield every function and class among the statements, however nested."""
    for statement in statements:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement
        # Definitions occur in blocks only; ast.walk would visit every expression too, half of the run time.
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from definitions(getattr(statement, block, ()))


def is_stub(node):
    """Return whether a statement reveals nothing of what a function does: pass, a literal, NotImplementedError."""
    if isinstance(node, ast.Raise):
        return node.exc is not None and "NotImplemented" in ast.dump(node.exc)
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def docstring_pairs(path):
    """Return [(first docstring paragraph, source without any docstring)] of a file, or None if it does not parse."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        with warnings.catch_warnings(action="ignore"):  # of invalid escapes in other people's strings
            nodes = list(definitions(ast.parse(text).body))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    lines = text.encode().splitlines()  # bytes: ast counts columns in UTF-8 bytes and breaks lines where bytes do
    documented = [node for node in nodes if ast.get_docstring(node)]
    for node in documented:
        # Nested docstrings go too: a query found verbatim in the enclosing function would be a second right answer.
        # Lines become None rather than being deleted, so that line numbers stay valid.
        span = node.body[0]
        first, last = span.lineno - 1, span.end_lineno - 1
        rest = lines[first][: span.col_offset] + lines[last][span.end_col_offset :].lstrip(b"; \t")
        lines[first : last + 1] = [rest if rest.strip() else None] + [None] * (last - first)
    pairs = []
    for node in documented:
        if isinstance(node, ast.ClassDef) or all(is_stub(statement) for statement in node.body[1:]):
            continue
        start = min([node.lineno] + [decorator.lineno for decorator in node.decorator_list]) - 1
        source = [line for line in lines[start : node.end_lineno] if line and line.strip()]
        # Not textwrap.dedent: a multi-line string at column 0 would keep the whole method indented.
        indent = source[0][: len(source[0]) - len(source[0].lstrip())]
        code = b"\n".join(line.removeprefix(indent).rstrip() for line in source).decode(errors="replace")
        paragraph = re.split(r"\n\s*\n|>>>", ast.get_docstring(node).strip())[0]  # doctests are code, not a query
        docstring = " ".join(paragraph.split()).encode("utf-8", "replace").decode()  # "\ud800" is legal in Python
        # A query needs at least three words, and must not merely refer to another docstring.
        pointer = r"(see|refer to|same as|inherit\w*( from)?|overrid\w*|implements?|alias (for|of))\b.{0,60}$"
        useful = len(re.findall(r"[^\W\d_]{2,}", docstring)) >= 3 and not re.match(pointer, docstring, re.IGNORECASE)
        if useful and len(source) >= 2 and len(code) <= MAX_CODE_CHARS:
            pairs.append((docstring, code))
    return pairs


def build_demo(roots, folder):
    """Write the demo corpus of `roots` ({source: [folder, ...]}) into `folder`; return the content of corpus.json."""
    files = []  # (is held out, source, path)
    for source, source_roots in roots.items():
        for root in sorted({Path(root).resolve() for root in source_roots}):
            inside = [path.relative_to(root) for path in root.rglob("*.py")]
            for name in sorted(name.as_posix() for name in inside if not SKIPPED_FOLDERS.intersection(name.parts)):
                # Only the path determines the split, so it is the same on every machine and after every upgrade.
                digest = hashlib.blake2b(f"{source}/{name}".encode(), digest_size=8).digest()
                files.append((int.from_bytes(digest, "big") % 100 < HELDOUT_PERCENT, source, root / name))
    # Held-out files come first: of two equal pairs the held-out one is kept; within a split, the first of `roots`.
    files.sort(key=lambda file: not file[0])
    report = {"python": sys.version.split()[0], "files": len(files), "not_parsed": 0, "duplicates": 0, "pairs": {}}
    rows, seen = {(split, source): [] for split in ("train", "heldout") for source in roots}, set()
    with ProcessPoolExecutor(initializer=gc.disable) as pool:  # syntax trees have no cycles to collect
        found = pool.map(docstring_pairs, [path for *_, path in files], chunksize=16)
        for (heldout, source, _), pairs in zip(files, tqdm(found, total=len(files), unit="file", desc="parsing")):
            report["not_parsed"] += pairs is None
            for docstring, code in pairs or []:
                # Duplicates have the same words (in any case) in the docstring, or the same code but for white space.
                keys = {" ".join(re.findall(r"\w+", docstring.lower())), "code " + "".join(code.split())}
                if seen.isdisjoint(keys):
                    rows["heldout" if heldout else "train", source].append((docstring, code))
                else:
                    report["duplicates"] += 1
                seen |= keys
    schema = pa.schema([("docstring", pa.string()), ("code", pa.string())])
    for (split, source), pairs in rows.items():
        random.Random(0).shuffle(pairs)
        table = pa.table([[docstring for docstring, _ in pairs], [code for _, code in pairs]], schema=schema)
        write_shards(iter([table]), schema, folder / split, source, "parquet", rows_per_shard=20_000)
        report["pairs"].setdefault(split, {})[source] = len(pairs)
    (folder / "corpus.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


MODEL_MAX_LENGTH = 256  # tokens
STATIC_DIM = 1024  # 512 lowers MRR@10 on the demo corpus by 0.007


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

    wordpieces, special = BertWordPieceTokenizer(), ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    # The trainer selects and numbers characters in random order, and merges depend on it: specify the alphabet.
    counts = Counter()
    for char, count in Counter(chain.from_iterable(texts)).items():
        counts |= {c: counts[c] + count for c in wordpieces._tokenizer.normalizer.normalize_str(char).strip()}
    alphabet = sorted(counts, key=lambda c: (-counts[c], c))[:1000]
    fixed = {"initial_alphabet": alphabet, "special_tokens": special + [f"##{char}" for char in alphabet]}
    wordpieces.train_from_iterator(texts, vocab_size=30_000, show_progress=False, **fixed)
    wordpieces = BertWordPieceTokenizer(wordpieces.get_vocab())  # only the five usual tokens stay special
    tokenizer = BertTokenizerFast(tokenizer_object=wordpieces._tokenizer, model_max_length=MODEL_MAX_LENGTH)
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    shape |= {"vocab_size": len(tokenizer), "max_position_embeddings": MODEL_MAX_LENGTH, "num_labels": 1}
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**shape)).save_pretrained(folder)


def save_models(folder):
    """Save untrained bi_encoder/ and cross_encoder/ for the shards in `folder`, unless they exist."""
    savers = {folder / "bi_encoder": save_bi_encoder, folder / "cross_encoder": save_cross_encoder}
    if not (missing := [path for path in savers if not path.exists()]):
        return
    shards = sorted([*folder.glob("train/*.parquet"), *folder.glob("data-*")])
    tables = islice(chain.from_iterable(read_columns(str(shard)) for shard in shards), 100)  # of up to 1,000 rows
    texts = [text for columns in tables for column in columns.values() for text in texts_of(column) if text]
    if not texts:
        raise UserError(f"{folder}: contains no text to make a model for")
    for path in tqdm(missing, desc="making models", unit="model"):
        with new_folder(path) as part:
            savers[path](part, texts)


# --------------------------------------------------------------------------------------- reading and converting tables

FORMATS = {"parquet": "parquet", "orc": "orc", "arrow": "arrow", "jsonl": "json", "json": "json", "ndjson": "json",
           "csv": "csv", "tsv": "csv", "txt": "text"}  # fmt: skip
COLUMNAR = {"parquet": ParquetFileFormat(pre_buffer=False), "orc": OrcFileFormat()}  # pre_buffer: up to 1 GiB ahead
SUFFIX = re.compile(rf"\.({'|'.join(FORMATS)})(\.(gz|zst|bz2|xz))?$", re.IGNORECASE)
# CSV cells that may become numbers or booleans; all others stay text, such as 007 and ids too long for a number.
CSV_VALUE = re.compile(r"true|false|-?(0|[1-9]\d{0,14})(\.\d+)?([eE][-+]?\d{1,2})?")


def format_of(file):
    """Return (format, options) for `datasets` by the suffix of a file."""
    if not (suffix := SUFFIX.search(file)):
        raise UserError(f"{file}: unknown suffix; supported: {', '.join(FORMATS)}; text formats also with .gz or .zst")
    return FORMATS[suffix[1].lower()], {"sep": "\t"} if suffix[1].lower() == "tsv" else {}


def files_of(source):
    """Return the files of a path, glob, folder, URL or Hub id (of its split train), as `datasets` sorts them."""
    if (Path(source) / "state.json").exists():  # of Dataset.save_to_disk, which also writes JSON files
        source = f"{source}/*.arrow"
    is_file = SUFFIX.search(source) or any(char in source for char in "*?[")  # else a folder or a Hub id
    is_url = "://" in source and not source.startswith("hf://")
    with user_errors(source):
        if is_file:
            builder = datasets.load_dataset_builder("text", data_files=source)  # lists files of any format
        elif is_url or any(Path(source).rglob("*.orc")):  # folders that `datasets` does not list
            suffixes = [f".{suffix}" for suffix in FORMATS]
            return list(DataFilesList.from_patterns(get_data_patterns(source)["train"], source, suffixes))
        else:
            check_exists(source)
            builder = datasets.load_dataset_builder(source)
        return [str(file) for file in builder.config.data_files["train"]]


def json_rows(lines):
    """Yield the object of each non-empty line; raise ValueError if it is not a JSON object."""
    for line in filter(str.strip, lines):
        try:
            yield {**json.loads(line)}
        except (ValueError, TypeError):
            raise ValueError(f"not a JSON object: {line[:80]}") from None


def read_columnar(file, kind, schema, keep):
    """Yield tables of at most 1,000 rows of a Parquet or ORC file; the first is empty, and has the file's types.

    schema: columns to read, cast to its types (default: all, as they are); only rows that pass `keep` are read."""
    with xopen(file, "rb") as source:
        fragment = COLUMNAR[kind].make_fragment(source)
        types = datasets.Features.from_arrow_schema(fragment.physical_schema).arrow_schema  # without dictionaries
        yield types.empty_table()
        # threads would decode an ORC file as fast as they can, and hold what is not yet written
        options = {"batch_size": BATCH_ROWS, "batch_readahead": 0, "fragment_readahead": 0, "use_threads": False}
        for batch in fragment.to_batches(schema or types, filter=keep, **options):
            yield pa.Table.from_batches([batch])


def read_columns(file, schema=None, keep=None):
    """Yield {column: values} for 1,000 rows of a file at a time; lists for JSON, else Arrow arrays (text for CSV)."""
    kind, options = format_of(file)
    load = functools.partial(datasets.load_dataset, data_files=file, split="train", streaming=True)
    with user_errors(file):
        if kind == "csv":
            options |= {"keep_default_na": False, "na_values": [""]}  # None, NA and nan are texts
            header = next(iter(load(kind, **options)), {})
            options["features"] = datasets.Features(dict.fromkeys(header, datasets.Value("string"))) or None
        elif kind in ("json", "text"):
            options = {"encoding": "utf-8-sig"}
        if kind in COLUMNAR:
            tables = read_columnar(file, kind, schema, keep)
        else:
            stream = load("text" if kind == "json" else kind, **options).with_format("arrow")
            first = [stream.features.arrow_schema.empty_table()] if kind == "arrow" else []  # types
            tables = chain(first, stream.iter(batch_size=BATCH_ROWS))
        for table in tables:
            table.validate(full=True)  # invalid offsets or texts of a damaged file
            columns = dict(zip(table.column_names, table.columns))
            if kind == "json":
                table = list(json_rows(table["text"].to_pylist()))
                columns = {name: [row.get(name) for row in table] for name in dict.fromkeys(chain(*table))}
            yield {name: columns.get(name, pa.nulls(len(table))) for name in (schema.names if schema else columns)}


def common_schema(files):
    """Return the narrowest schema that fits every row of the files; CSV and JSON files are read completely."""
    types = {}
    for file in tqdm(files, desc="inspecting", unit="file"):
        kind, _ = format_of(file)
        for columns in read_columns(file):
            for name, values in columns.items():
                if kind == "csv":
                    values = [json.loads(v) if v and CSV_VALUE.fullmatch(v) else v for v in values.to_pylist()]
                try:
                    found = pa.array(values).type if isinstance(values, list) else values.type
                    pair = [pa.schema([("", types.get(name, pa.null()))]), pa.schema([("", found)])]
                    types[name] = pa.unify_schemas(pair, promote_options="permissive").field(0).type
                except (ValueError, TypeError, OverflowError):  # numbers and texts, say
                    types[name] = pa.string()
            if kind in ("parquet", "orc", "arrow"):
                break
    # A column of nulls only becomes text, the most likely type of later values.
    return pa.schema([(name, pa.string() if pa.types.is_null(kind) else kind) for name, kind in types.items()])


def to_array(values, data_type):
    """Return the values of a column as an array of `data_type`; in a text column, other values become JSON."""
    if isinstance(values, list) and pa.types.is_string(data_type):
        values = [v if v is None or isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
    return pa.array(values, data_type) if isinstance(values, list) else values.cast(data_type)


def texts_of(column):
    """Return a list of the texts in a column of texts or lists of texts; [] for any other column."""
    column = pc.list_flatten(column) if pa.types.is_list(column.type) else column
    return column.to_pylist() if pa.types.is_string(column.type) or pa.types.is_large_string(column.type) else []


def convert(args, folder):
    """Write the rows of args.sources that pass args.filter into `folder`, in order; return (rows, schema)."""
    files = list(chain.from_iterable(map(files_of, args.sources)))
    schema = common_schema(files)
    if missing := [name for name in args.columns or [] if name not in schema.names]:
        raise UserError(f"--columns {missing[0]}: the columns are: {', '.join(schema.names)}")
    # read only columns that are written, or whose name occurs in the filter; the others may be of any type
    names = [name for name in schema.names if name in (args.columns or schema.names) or name in (args.filter or "")]
    schema = pa.schema([schema.field(name) for name in names])
    with user_errors(f"--filter {args.filter!r}"):
        keep = pq.filters_to_expression(ast.literal_eval(args.filter)) if args.filter else None
        schema.empty_table().filter(pc.scalar(True) if keep is None else keep)
    output_schema = pa.schema([schema.field(name) for name in args.columns or schema.names])

    def tables():
        for file in files:
            for columns in read_columns(file, schema, keep):
                with user_errors(file):
                    table = pa.table([to_array(columns[field.name], field.type) for field in schema], schema=schema)
                yield (table if keep is None else table.filter(keep)).select(output_schema.names)

    rows = write_shards(tables(), output_schema, folder, "data", args.format, args.rows_per_shard)
    if not rows:
        raise UserError(f"{args.sources[0]}: no row" + (f" passes --filter {args.filter!r}" if args.filter else ""))
    return rows, output_schema


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


def write_shards(tables, schema, folder, name, format, rows_per_shard):
    """Write tables as folder/name-00000-of-0000N.format, at most `rows_per_shard` rows each; return the row count."""
    folder.mkdir(parents=True, exist_ok=True)
    shards, rows = [], 0
    with ExitStack() as stack:
        for table in tqdm(rebatch(tables, schema), desc=f"writing {name}", unit=" x 10,000 rows", delay=1):
            while table.num_rows:
                if rows % rows_per_shard == 0:
                    stack.close()  # closes the previous shard
                    shards.append(folder / f"{name}-{len(shards):05d}.{format}")
                    # `datasets` maps Arrow streams; their batches are uncompressed, so that text is not copied.
                    new_writer = pa.ipc.new_stream if format == "arrow" else pq.ParquetWriter
                    writer = stack.enter_context(new_writer(str(shards[-1]), schema))
                part = table.slice(0, rows_per_shard - rows % rows_per_shard)
                writer.write_table(part, BATCH_ROWS)
                rows, table = rows + part.num_rows, table.slice(part.num_rows)
    for i, shard in enumerate(shards):  # their number is known only now
        shard.rename(folder / f"{name}-{i:05d}-of-{len(shards):05d}.{format}")
    return rows


def save_collection(name, folder):
    """Write a dataset of ir_datasets as corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv and triples.jsonl.

    A triple has the ids of a query, a positive and a negative; trainers look up texts by --corpus and --queries."""
    import ir_datasets

    dataset, known, files = ir_datasets.load(name), ("train", "dev", "validation", "test"), {}
    splits = {next((part for part in name.split("/")[::-1] if part in known), "test"): dataset}
    for split in known:  # the judgments of beir/scifact are in beir/scifact/test
        with suppress(KeyError):
            splits[split] = ir_datasets.load(f"{name}/{split}")
    if dataset.has_docs():
        # default_text() is the title and all bodies, as the package itself would index them
        has_title = {"title", "text"} <= set(getattr(dataset.docs_cls(), "_fields", ()))
        files["corpus.jsonl"] = ({"_id": doc.doc_id, "title": doc.title if has_title else "",
                                  "text": doc.text if has_title else doc.default_text()}
                                 for doc in dataset.docs_iter())  # fmt: skip
    parts = [part for part in (dataset, *splits.values()) if part.has_queries()]
    if queries := {query.query_id: query.default_text() for part in parts for query in part.queries_iter()}:
        files["queries.jsonl"] = ({"_id": key, "text": text} for key, text in queries.items())
    for split, part in splits.items():
        if part.has_qrels():
            lines = (f"{row.query_id}\t{row.doc_id}\t{row.relevance}" for row in part.qrels_iter())
            files[f"qrels/{split}.tsv"] = chain(["query-id\tcorpus-id\tscore"], lines)
    if dataset.has_docpairs():
        files["triples.jsonl"] = ({"query": row.query_id, "positive": row.doc_id_a, "negative": row.doc_id_b}
                                  for row in dataset.docpairs_iter())  # fmt: skip
    if not files:
        raise ValueError("contains no documents, queries or judgments; specify one of its subsets")
    for file, rows in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        with open(folder / file, "w", encoding="utf-8") as sink:
            for row in tqdm(rows, desc=file, unit_scale=True):
                sink.write((row if isinstance(row, str) else json.dumps(row)) + "\n")


# --------------------------------------------------------------------------------------------------- the length report

BUDGETS = (2048, 4096, 8192, 16_384, 32_768)  # --micro_batch_tokens to compare
PART_SIZES = (128, 1024, 10_000)  # texts of a batch on one process


# same in train_bi_encoder.py, train_cross_encoder.py
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


def length_report(args, folder):
    """Write lengths.json and lengths.png: token lengths by column, and the padding of several ways to batch them."""
    from matplotlib.figure import Figure
    from transformers import AutoTokenizer

    with user_errors(" ".join(args.sources)):
        listed = [(format_of(files[0]), files) for files in map(files_of, args.sources)]
        if orc := [files[0] for (kind, _), files in listed if kind == "orc"]:
            raise UserError(f"{orc[0]}: convert it first, without --length_report")
        rows = [datasets.load_dataset(kind, data_files=files, split="train", **o) for (kind, o), files in listed]
        rows = datasets.concatenate_datasets(rows)
        rows = rows.select_columns(args.columns or rows.column_names)
    sample = np.sort(np.random.default_rng(0).choice(len(rows), min(args.sample, len(rows)), replace=False))
    lengths = {}
    with user_errors(f"--model_name_or_path {args.model_name_or_path}"):
        check_exists(args.model_name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, trust_remote_code=False)
        limit = args.max_length or min(tokenizer.model_max_length, 2**20)
        tables = rows.select(sample).with_format("arrow").iter(batch_size=BATCH_ROWS)
        for table in tqdm(tables, desc="counting tokens", unit=" x 1,000 rows"):
            for name in table.column_names:
                if texts := [text for text in texts_of(table[name]) if text and text.strip()]:
                    ids = tokenizer(texts, truncation=True, max_length=limit)["input_ids"]
                    lengths.setdefault(name, []).extend(max(1, len(one)) for one in ids)
    if not lengths:
        raise UserError(f"{args.sources[0]}: contains no text; set --columns")
    texts = np.random.default_rng(0).permutation(np.concatenate(list(lengths.values())))  # their lengths

    ways = {"random batches of 32": np.split(texts, range(32, len(texts), 32))}
    windows = map(np.sort, np.split(texts, range(320, len(texts), 320)))
    ways["windows of 320, sorted, batches of 32"] = [b for w in windows for b in np.split(w, range(32, len(w), 32))]
    for size, budget in product(PART_SIZES, BUDGETS):
        parts = np.split(texts, range(size, len(texts), size))
        way = f"micro-batches of {budget:,} tokens, {size:,} texts a process"
        ways[way] = [part[cut] for part in parts for cut in cut_micro_batches(part, budget)]
    costs = {way: (1 - texts.sum() / sum(len(b) * b.max() for b in ways[way]), len(ways[way])) for way in ways}
    costs = pd.DataFrame(costs, index=["padding", "passes"]).T
    padding = costs.padding.to_numpy()[2:].reshape(len(PART_SIZES), len(BUDGETS))
    # Suggest truncating the longest 1 %, and the largest micro-batches within 2 points of the least padding.
    longest = int(min(limit, -(-np.percentile(texts, 99) // 8) * 8))
    budget = BUDGETS[np.flatnonzero(padding[1] <= padding[1].min() + 0.02)[-1]]
    columns = pd.DataFrame({k: pd.Series(v).describe([0.5, 0.9, 0.95, 0.99]) for k, v in lengths.items()}).T
    report = {"texts": len(texts), "tokens": int(texts.sum()), "max_length": limit,
              "advice": {"max_length": longest, "micro_batch_tokens": budget},
              "columns": columns.to_dict("index"), "batches": costs.to_dict("index")}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lengths.json").write_text(json.dumps(report, indent=1) + "\n")
    print(columns.fillna(0).round().astype(int).to_string(), end="\n\n")
    print(costs.to_string(formatters={"padding": "{:.1%}".format, "passes": "{:,.0f}".format}) + "\n")
    print(f"try --max_length {longest} and, on a GPU, --micro_batch_tokens {budget}; see {folder}/lengths.png")
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for name, values in lengths.items():
        axes[0].hist(values, bins=60, histtype="step", label=name, weights=np.full(len(values), 1 / len(values)))
    axes[0].axvline(longest, color="0.5", linestyle=":", label=f"--max_length {longest}")
    axes[0].set(xlabel="tokens", ylabel="share of texts")
    axes[1].plot(BUDGETS, padding.T, marker="o", label=[f"{size:,} texts a process" for size in PART_SIZES])
    for name, style in zip(costs.index, ("--", ":")):  # the two with batches of 32
        axes[1].axhline(costs.padding[name], color="0.5", linestyle=style, label=name)
    axes[1].set(xlabel="--micro_batch_tokens", ylabel="padding", xscale="log", ylim=(0, None))
    axes[1].set_xticks(BUDGETS, [f"{budget:,}" for budget in BUDGETS])
    for axis in axes:
        axis.legend()
    figure.savefig(folder / "lengths.png", dpi=110)


def parse_args(argv):
    """Return the parsed flags; exit on a wrong value."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    option = parser.add_argument
    option("sources", nargs="*", metavar="SOURCE",
           help="Parquet, ORC, Arrow, JSON, CSV, text: path, glob, folder, URL, Hub id (default: demo)")  # fmt: skip
    option("--output_dir", type=Path, help=f"new folder for the shards (default: {DEMO}; for reports: runs/lengths)")
    option("--overwrite", action="store_true", help="replace a non-empty --output_dir, when the new one is complete")
    option("--columns", nargs="+", metavar="C", help="columns to keep, in this order (default: all)")
    option("--filter", metavar="F", help="rows to keep, a pyarrow filter: \"[('lang', 'in', ['en', 'de'])]\"")
    option("--format", choices=["arrow", "parquet"], default="arrow", help="arrow: mapped as it is; parquet: smaller")
    option("--rows_per_shard", type=int, default=1_000_000, help="maximum rows per file")
    option("--make_models", action="store_true", help="also save untrained models with tokenizers trained on SOURCE")
    option("--ir_dataset", metavar="NAME", help="collection of ir_datasets to convert, such as beir/scifact")
    option("--length_report", action="store_true", help="write token counts of SOURCE; convert nothing")
    option("--model_name_or_path", metavar="M", help="Hub id or folder whose tokenizer --length_report uses")
    option("--max_length", type=int, metavar="N", help="tokens a text is truncated to (default: the tokenizer's own)")
    option("--sample", type=int, default=100_000, metavar="N", help="random rows that --length_report reads")
    check_flag_names(parser, argv)
    args = parser.parse_args(argv)
    if min(args.rows_per_shard, args.sample, args.max_length or 1) < 1:
        parser.error("--rows_per_shard, --sample and --max_length must be above 0")
    if args.length_report and (not args.sources or not args.model_name_or_path or args.filter):
        parser.error("--length_report requires SOURCE and --model_name_or_path, without --filter")
    if (args.ir_dataset and args.sources) or ((args.columns or args.filter) and not args.sources):
        parser.error("--columns and --filter require SOURCE; --ir_dataset excludes SOURCE")
    if (args.ir_dataset or args.sources) and not (args.output_dir or args.length_report):
        parser.error("SOURCE and --ir_dataset require --output_dir")
    return args


def main(args):
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are reported once, as a UserError
    if args.length_report:
        return length_report(args, args.output_dir or Path("runs/lengths"))
    output, is_demo = (args.output_dir or Path(DEMO)).resolve(), not args.sources and not args.ir_dataset
    if any(output in [Path(source).resolve(), *Path(source).resolve().parents] for source in args.sources):
        raise UserError(f"--output_dir {output}: contains a SOURCE, which would be replaced; choose another folder")
    if args.overwrite or not (is_demo and (output / "corpus.json").exists()):
        if output.exists() and any(output.iterdir()) and not args.overwrite:
            raise UserError(f"--output_dir {output}: is not empty; choose another folder, or set --overwrite")
        with new_folder(output) as part:
            if args.ir_dataset:
                with user_errors(f"--ir_dataset {args.ir_dataset}"):
                    save_collection(args.ir_dataset, part)
            elif args.sources:
                rows, schema = convert(args, part)
                print(f"{rows:,} rows of {', '.join(f'{field.name}: {field.type}' for field in schema)}")
            else:
                paths = sysconfig.get_paths()
                roots = {"stdlib": [paths["stdlib"]], "packages": [paths["purelib"], paths["platlib"]]}
                print(build_demo(roots, part)["pairs"])
    if is_demo or args.make_models:
        save_models(output)
    print(f"output: {output}")


if __name__ == "__main__":
    try:
        main(parse_args(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
