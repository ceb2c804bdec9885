"""Any table to sharded, memory-mappable files; with no arguments, a demo corpus of Python docstrings and functions.

    python prepare_corpus.py      # the demo: data/python_code, made from the Python that runs this
    python prepare_corpus.py logs/*.jsonl.zst --output_dir data/logs --columns query clicked
    python prepare_corpus.py s3://bucket/pairs --output_dir data/pairs --filter "score > 0.5 and lang in ['en', 'de']"
    python prepare_corpus.py --ir_dataset beir/scifact --output_dir data/scifact
    python prepare_corpus.py data/pairs --length_report --model_name_or_path BAAI/bge-small-en-v1.5

A row of the demo (`code` never holds a docstring, so a match has to come from names and logic):

    docstring  Return the first index of value, or -1 if it is absent.
    code       def find(items, value):\\n    for index, item in enumerate(items): ...

The demo writes {train,heldout}/{stdlib,packages}-00000-of-0000N.parquet and corpus.json (files, pairs). It holds out
files, not pairs; train has no docstring or code of a held-out file. Rows are shuffled: the first N are a fair sample.

Sources (Parquet, ORC, Arrow file or stream; CSV, TSV, JSON Lines, text, each also .gz or .zst; a path, glob, folder or
URL) become data-00000-of-0000N.arrow (or .parquet), which `datasets` maps. Memory stays that of a few record batches.

--ir_dataset writes a collection of the package ir_datasets in the BEIR layout, which eval_incremental.py reads, and
its training triples, which the trainers read. --length_report counts tokens and says what padding they cost.

Left out on purpose: types given by hand (CSV and JSON are read twice, first for types that hold every value; dates and
numbers like 007 stay text), shuffling (the trainers do), remote outputs.
"""

import argparse
import ast
import contextlib
import functools
import gc
import hashlib
import io
import json
import operator
import random
import re
import shutil
import sys
import sysconfig
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from tqdm import tqdm

BATCH_ROWS = 1000  # rows of a record batch and of a Parquet row group, as `datasets` itself writes them
BLOCK_BYTES = 4 << 20  # text parsed at once. pyarrow reads CSV 32 blocks ahead and refuses rows longer than a block

# ------------------------------------------------------------------------------------------------ the demo corpus

HELDOUT_PERCENT = 5  # of files: a few thousand pairs, enough for 1,000 candidates and a look at the variance
MAX_CODE_CHARS = 4000  # some 1,000 tokens, four times what the trainers read; longer ones are mostly generated tables
# Test suites hold the same assertion many times over, and their docstrings describe a bug number, not the code.
SKIPPED_FOLDERS = {"test", "tests", "testing", "_test", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def definitions(statements):
    """Yields every function and class among the statements, however nested."""
    for statement in statements:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement
        # Definitions stand in blocks only; ast.walk would visit every expression too and take half of the run.
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from definitions(getattr(statement, block, ()))


def is_stub(node):
    """Returns whether a statement says nothing about what its function does: pass, a literal, NotImplementedError."""
    if isinstance(node, ast.Raise):
        return node.exc is not None and "NotImplemented" in ast.dump(node.exc)
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def docstring_pairs(path):
    """Returns [(first docstring paragraph, source without any docstring)] of a file, or None if it does not parse."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            nodes = list(definitions(ast.parse(text).body))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    lines = text.encode().splitlines()  # bytes: ast counts columns in UTF-8 bytes and breaks lines where bytes do
    documented = [node for node in nodes if ast.get_docstring(node)]
    for node in documented:
        # Nested docstrings go too: a query found verbatim in the enclosing function would be a second right answer.
        # Lines become None rather than being deleted, so that every line number stays true.
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
        # To be searched for it needs three words, and must not point to another docstring.
        pointer = r"(see|refer to|same as|inherit\w*( from)?|overrid\w*|implements?|alias (for|of))\b.{0,60}$"
        useful = len(re.findall(r"[^\W\d_]{2,}", docstring)) >= 3 and not re.match(pointer, docstring, re.IGNORECASE)
        if useful and len(source) >= 2 and len(code) <= MAX_CODE_CHARS:
            pairs.append((docstring, code))
    return pairs


def build_demo(roots, folder):
    """Writes the demo corpus of `roots` ({source: [folder, ...]}) into `folder`; returns what corpus.json says."""
    files = []  # (heldout?, source, path)
    for source, source_roots in roots.items():
        for root in sorted({Path(root).resolve() for root in source_roots}):
            inside = [path.relative_to(root) for path in root.rglob("*.py")]
            for name in sorted(name.as_posix() for name in inside if not SKIPPED_FOLDERS.intersection(name.parts)):
                # The path alone decides, so a file is on the same side on every machine and after every upgrade.
                digest = hashlib.blake2b(f"{source}/{name}".encode(), digest_size=8).digest()
                files.append((int.from_bytes(digest, "big") % 100 < HELDOUT_PERCENT, source, root / name))
    # Held-out files go first: of two equal pairs the held-out one stays. Within a split the order of `roots` decides.
    files.sort(key=lambda file: not file[0])
    report = {"python": sys.version.split()[0], "files": len(files), "not_parsed": 0, "duplicates": 0, "pairs": {}}
    rows = {(split, source): [] for split in ("train", "heldout") for source in roots}
    seen = set()
    with ProcessPoolExecutor(initializer=gc.disable) as pool:  # syntax trees have no cycles: scanning them is waste
        found = pool.map(docstring_pairs, [path for *_, path in files], chunksize=16)
        for (heldout, source, _), pairs in zip(files, tqdm(found, total=len(files), unit="file", desc="parsing")):
            report["not_parsed"] += pairs is None
            for docstring, code in pairs or []:
                # Equal but for case, punctuation and layout is equal: vendored copies differ in just that.
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
        write_shards([table], schema, folder / split, source, "parquet", rows_per_shard=20_000)
        report["pairs"].setdefault(split, {})[source] = len(pairs)
    (folder / "corpus.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


# ---------------------------------------------------------------------------------------------- reading any table

# A CSV column has the first type whose pattern all its values match, else it is text; so 007 and numbers with more
# digits than the type holds stay as they are. An empty value is null.
CSV_TYPES = {pa.null(): r"^$", pa.bool_(): r"^(true|false)$", pa.int64(): r"^-?(0|[1-9]\d{0,17})$"}
CSV_TYPES |= {pa.float64(): r"^-?(0|[1-9]\d{0,14})(\.\d+)?([eE][-+]?\d{1,2})?$"}


def kind_of(path):
    """Returns (kind of table or None, compression or None) by the suffixes of `path`."""
    # The binary formats compress inside, and reading them means seeking, which a compressed file does not allow.
    suffixes = r"(?:\.(parquet|orc|arrow)|\.(csv|tsv|jsonl?|txt)(\.gz|\.zst)?|)$"
    binary, text, compression = re.search(suffixes, path.lower()).groups()
    return binary or text, {".gz": "gzip", ".zst": "zstd"}.get(compression)


def find_files(sources):
    """Returns [(fsspec filesystem, path)], sorted within a glob or folder; raises ValueError for one without files."""
    files = []
    for source in sources:
        fs, root = fsspec.url_to_fs(source)
        if fs.isdir(root):  # which may hold a README, or the notes `datasets` leaves beside its shards
            notes = ("dataset_info.json", "state.json", "dataset_dict.json")
            paths = [path for path in fs.find(root) if kind_of(path)[0] and not path.endswith(notes)]
        else:  # a file before a glob: a name may hold brackets
            paths = [root] if fs.isfile(root) else [path for path in fs.glob(root) if fs.isfile(path)]
        if not paths:
            raise ValueError(f"{source}: no file found; give a file, a glob, a folder or an fsspec URL that has some")
        if unknown := [path for path in paths if not kind_of(path)[0]]:
            raise ValueError(
                f"{unknown[0]}: unknown suffix; parquet, orc, arrow; csv, tsv, json, jsonl, txt[.gz or .zst]"
            )
        files += [(fs, path) for path in sorted(paths)]
    return files


@contextlib.contextmanager
def blame(path):
    """Turns an error of a reader into a one-line ValueError which names the file."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise ValueError(f"{path}: truncated or corrupt: {str(error).splitlines()[0]}") from error


def json_batches(stream, path, schema):
    """Yields record batches of `schema`, or of the narrowest that holds all rows so far; errors name the line."""
    lines, number, widest = io.BufferedReader(stream), 0, schema or pa.schema([])

    def build(rows):
        nonlocal widest
        if schema is None:
            found = pa.schema(list(pa.infer_type([{}, *rows])))  # a row is a struct
            widest = pa.unify_schemas([widest, found], promote_options="permissive")
        return pa.RecordBatch.from_pylist(rows, widest)

    while block := lines.readlines(BLOCK_BYTES):
        rows = {}  # {line number: row}
        try:
            for line in block:
                number += 1
                if line.strip():
                    rows[number] = {**json.loads(line)}  # what is not an object fails here
            try:
                batch = build(list(rows.values()))
            except (ValueError, TypeError, OverflowError):
                for number in rows:  # again one by one, to know the line
                    build([rows[number]])
                raise
        except (ValueError, TypeError, OverflowError) as error:  # malformed, not UTF-8, or of another type than before
            raise ValueError(f"{path}: line {number}: {str(error).replace('line 1 column', 'column')}") from error
        yield batch


def inspect(fs, path):
    """Returns (schema, rows) of one file; all but Parquet and ORC are read to their end."""
    kind = kind_of(path)[0]
    if kind in ("parquet", "orc"):
        dataset = pads.dataset(path, format=kind, filesystem=fs)
        return dataset.schema.remove_metadata(), dataset.count_rows()
    schema, rows, fitting = pa.schema([]), 0, {}
    for batch in read_tables(fs, path):
        schema, rows = batch.schema.remove_metadata(), rows + batch.num_rows
        for name, column in zip(schema.names, batch) if kind in ("csv", "tsv") else ():
            for data_type in list(fitting.setdefault(name, [*CSV_TYPES])):
                if not pc.all(pc.match_substring_regex(column, CSV_TYPES[data_type]), min_count=0).as_py():
                    fitting[name].remove(data_type)
    if kind in ("csv", "tsv"):
        schema = pa.schema([(name, [*fitting[name], pa.string()][0]) for name in schema.names])
    return schema, rows


def read_tables(fs, path, schema=None, keep=None):
    """Yields the record batches of one file; `schema` and the filter `keep` spare what they can."""
    (kind, compression), names = kind_of(path), schema and schema.names
    if kind == "parquet":
        # pyarrow.dataset would do, but holds a row group whole: 1,400 MB where this held 155 MB (487 MB row group).
        # It still says which row groups the filter can match.
        (fragment,) = pads.dataset(path, format=kind, filesystem=fs).get_fragments()
        groups = [group.id for group in fragment.subset(keep).row_groups] if keep is not None else None
        with fs.open(path, "rb") as raw, pq.ParquetFile(raw, pre_buffer=False, buffer_size=1 << 20) as file:
            yield from file.iter_batches(BATCH_ROWS, row_groups=groups, columns=names, use_threads=False)
    elif kind == "orc":
        ahead = {"batch_readahead": 1, "fragment_readahead": 1, "use_threads": False}
        dataset = pads.dataset(path, format=kind, filesystem=fs)
        yield from dataset.to_batches(columns=names, filter=keep, batch_size=BATCH_ROWS, **ahead)
    elif kind == "arrow":
        with fs.open(path, "rb") as raw:
            is_file = raw.read(6) == b"ARROW1"  # else the stream format, which `datasets` writes
            raw.seek(0)
            reader = pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)
            yield from map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    else:
        # pyarrow decompresses: it reads all members of a concatenated file and raises on a truncated one, where
        # zstandard's reader ends in silence after the first frame.
        with pa.input_stream(fs.open(path, "rb"), compression=compression) as stream:
            if kind == "txt":
                lines = io.TextIOWrapper(stream, "utf-8-sig")
                while block := lines.readlines(BLOCK_BYTES):
                    yield pa.RecordBatch.from_pydict({"text": [line.rstrip("\r\n") for line in block]})
            elif kind in ("csv", "tsv"):
                read = pacsv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
                parse = pacsv.ParseOptions(delimiter="\t" if kind == "tsv" else ",", newlines_in_values=True)
                types = {field.name: field.type for field in schema or []}
                empty = {"strings_can_be_null": True, "null_values": [""]}
                values = pacsv.ConvertOptions(column_types=types, default_column_type=pa.string(), **empty)
                yield from pacsv.open_csv(stream, read, parse, values)
            else:
                yield from json_batches(stream, path, schema)


# ------------------------------------------------------------------------------------------------- the conversion

OPERATORS = {ast.And: operator.and_, ast.Or: operator.or_, ast.Eq: operator.eq, ast.NotEq: operator.ne}
OPERATORS |= {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}


def parse_filter(text):
    """Returns (pyarrow expression, names it reads) of a filter in Python syntax; raises ValueError."""

    def build(node):  # an expression, or the plain value of a literal
        match node:
            case ast.Name():
                return pc.field(node.id)
            case ast.UnaryOp(op=ast.Not()):
                return ~build(node.operand)
            case ast.BoolOp():
                return functools.reduce(OPERATORS[type(node.op)], map(build, node.values))
            case ast.Compare():  # 0 < score < 1 is two comparisons
                terms = [build(term) for term in (node.left, *node.comparators)]
                return functools.reduce(operator.and_, map(compare, terms, node.ops, terms[1:]))
        return ast.literal_eval(node)

    def compare(left, op, right):
        match op, right:
            case (ast.In() | ast.NotIn(), list()):  # of a string, isin would take the letters
                return left.isin(right) if isinstance(op, ast.In) else ~left.isin(right)
            case (ast.Is() | ast.Eq(), None):  # in Arrow nothing equals null
                return left.is_null()
            case (ast.IsNot() | ast.NotEq(), None):
                return left.is_valid()
        return OPERATORS[type(op)](left, right)

    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return build(tree) & pc.scalar(True), [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    except (SyntaxError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"--filter {text!r}: only comparisons, in [...], is None, and, or, not are known") from error


def common_schema(files, columns, filter_columns):
    """Returns (schema of the columns wanted that holds every file; rows of each file); or raises ValueError."""
    schema, first, counts = None, None, []
    for fs, path in tqdm(files, desc="inspecting", unit="file"):
        with blame(path):
            found, rows = inspect(fs, path)
        counts.append(rows)
        if not found.names:
            continue  # an empty JSON Lines file, as job systems leave them
        names = list(dict.fromkeys([*(columns or found.names), *filter_columns]))
        if bad := [name for name in names if found.names.count(name) != 1]:
            raise ValueError(f"{path}: no column {bad[0]!r}, or several; there are {', '.join(found.names)}")
        # Dictionaries differ from file to file; the values are what the trainers read.
        types = [found.field(name).type for name in names]
        found = pa.schema([(n, t.value_type if pa.types.is_dictionary(t) else t) for n, t in zip(names, types)])
        schema, first = schema or found, first or path
        if odd := set(schema.names) ^ set(names):
            raise ValueError(f"{first} and {path}: only one has {', '.join(sorted(odd))}; choose with --columns")
        try:
            schema = pa.unify_schemas([schema, found], promote_options="permissive")
        except pa.ArrowTypeError as error:
            raise ValueError(f"{first} and {path}: {error}; convert them apart, or choose with --columns") from error
    if schema is None:
        raise ValueError(f"{files[0][1]}: no row in any of the {len(files)} files")
    return schema, counts


def convert(sources, folder, columns=None, filter_text=None, format="arrow", rows_per_shard=1_000_000):
    """Writes the rows of `sources` that pass the filter, in order; returns how many; raises ValueError."""
    keep, filter_columns = parse_filter(filter_text) if filter_text else (None, [])
    files = find_files(sources)
    schema, counts = common_schema(files, columns, filter_columns)
    output_schema = pa.schema([schema.field(name) for name in columns or schema.names])
    try:
        schema.empty_table().filter(keep) if keep is not None else None
    except (pa.ArrowException, TypeError) as error:
        raise ValueError(f"--filter {filter_text!r}: {str(error).splitlines()[0]}") from error

    def tables():
        held = output_schema.empty_table()  # a strict filter leaves crumbs, which are slow to map: they are joined
        with tqdm(total=sum(counts), unit="row", unit_scale=True, desc="converting") as bar:
            for i, (fs, path) in enumerate(files):
                with blame(path):
                    for batch in read_tables(fs, path, schema, keep):
                        bar.update(batch.num_rows)
                        table = pa.Table.from_batches([batch]).select(schema.names).cast(schema)
                        table = (table if keep is None else table.filter(keep)).select(output_schema.names)
                        held = pa.concat_tables([held, table])
                        if held.num_rows >= BATCH_ROWS or held.nbytes >= BLOCK_BYTES:
                            yield held.combine_chunks()
                            held = output_schema.empty_table()
                bar.update(sum(counts[: i + 1]) - bar.n)  # rows that the filter spared reading
        yield held.combine_chunks()

    rows = write_shards(tables(), output_schema, folder, "data", format, rows_per_shard)
    if not rows:
        raise ValueError(f"--filter {filter_text!r}: keeps none of the {sum(counts)} rows")
    return rows


def write_shards(tables, schema, folder, name, format, rows_per_shard):
    """Writes tables as folder/name-00000-of-0000N.format, at most `rows_per_shard` rows each; returns the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    shards, rows, writer = [], 0, None
    for table in tables:
        while table.num_rows:
            if rows % rows_per_shard == 0:
                if writer:
                    writer.close()
                shards.append(folder / f"{name}-{len(shards):05d}.{format}")
                # The stream format is what `datasets` maps; its batches are uncompressed, so text is never copied.
                writer = (pa.ipc.new_stream if format == "arrow" else pq.ParquetWriter)(str(shards[-1]), schema)
            part = table.slice(0, rows_per_shard - rows % rows_per_shard)
            writer.write_table(part, BATCH_ROWS)
            rows, table = rows + part.num_rows, table.slice(part.num_rows)
    if writer:
        writer.close()
    for i, shard in enumerate(shards):  # their number is known only now
        shard.rename(folder / f"{name}-{i:05d}-of-{len(shards):05d}.{format}")
    return rows


# ------------------------------------------------------------------------------------------------ a known collection


def save_collection(name, folder):
    """Writes what a dataset of ir_datasets has as corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv and triples.jsonl.

    A triple (docpairs) becomes the ids of a query, a positive and a negative: the trainers take their texts from
    --corpus_table and --queries_table. Returns {file: records}.
    """
    try:
        import ir_datasets
    except ImportError:
        raise ValueError("--ir_dataset: needs the package ir_datasets: pip install ir_datasets") from None
    try:
        dataset = ir_datasets.load(name)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"--ir_dataset {name}: {' '.join(map(str, error.args))}; ir-datasets.com lists them"
        ) from None
    known = ("train", "dev", "validation", "test")
    own = [part for part in name.split("/") if part in known]
    splits = {own[-1] if own else "test": dataset}  # of beir/scifact, the judgments are in beir/scifact/test
    for split in known:
        with contextlib.suppress(KeyError):
            splits[split] = ir_datasets.load(f"{name}/{split}")
    title = {"title", "text", "doc_id"} <= set(getattr(dataset.docs_cls(), "_fields", ())) if dataset.has_docs() else 0

    def document(doc):  # default_text() is the title and all bodies, as the package itself would index them
        return {
            "_id": doc.doc_id,
            "title": doc.title if title else "",
            "text": doc.text if title else doc.default_text(),
        }

    def query(one):
        return {"_id": one.query_id, "text": one.default_text()}

    def judged(one):
        return f"{one.query_id}\t{one.doc_id}\t{one.relevance}\n"

    def triple(one):
        return {"query": one.query_id, "positive": one.doc_id_a, "negative": one.doc_id_b}

    written, seen = {}, set()
    parts = [("docs", "corpus.jsonl", "", lambda doc: json.dumps(document(doc)) + "\n", dataset)]
    parts += [("queries", "queries.jsonl", "", lambda one: json.dumps(query(one)) + "\n", part)
              for part in (dataset, *splits.values())]  # fmt: skip
    parts += [("qrels", f"qrels/{split}.tsv", "query-id\tcorpus-id\tscore\n", judged, part)
              for split, part in splits.items()]  # fmt: skip
    parts += [("docpairs", "triples.jsonl", "", lambda one: json.dumps(triple(one)) + "\n", dataset)]
    for kind, file, head, line, part in parts:
        if getattr(part, f"has_{kind}")():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            with open(folder / file, "a", encoding="utf-8") as sink:
                if file not in written:
                    sink.write(head)
                written.setdefault(file, 0)
                for one in tqdm(getattr(part, f"{kind}_iter")(), desc=file, unit="", unit_scale=True):
                    if kind == "queries" and one.query_id in seen:
                        continue  # of the whole and of a split
                    seen.update([one.query_id] if kind == "queries" else [])
                    sink.write(line(one))
                    written[file] += 1
    if not written:
        raise ValueError(f"--ir_dataset {name}: has no documents, queries or judgments; name a dataset under it")
    return written


# ------------------------------------------------------------------------------------------------ the length report


# same in train_bi_encoder.py, train_cross_encoder.py, eval_incremental.py
def cut_micro_batches(lengths, budget):
    """Index lists, longest text first, each of at most `budget` tokens with padding; a longer text stands alone.

    Of all such cuts of the sorted texts the one with the fewest padded tokens, where a forward pass is taken to cost
    32 tokens of its own at a budget of 2,048, as on CPUs, where 12 to 35 were measured, and 1,024 at 16,384, where it
    is launched to a GPU. So short texts are not padded to long ones, nor encoded by twos and threes.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    sizes = np.array([max(lengths[i], 1) for i in order])
    cost_of_a_pass = 32 * (budget / 2048) ** (5 / 3)
    costs, begins = np.zeros(len(order) + 1), np.zeros(len(order) + 1, dtype=int)  # of the best cut of the first texts
    for end in range(1, len(order) + 1):
        firsts = np.arange(max(0, min(end - 1, end - budget // sizes[end - 1])), end)  # of the last micro-batch
        padded = (end - firsts) * sizes[firsts]
        padded = np.where((padded <= budget) | (firsts == end - 1), padded, np.inf)
        best = np.argmin(costs[firsts] + padded)
        costs[end], begins[end] = costs[firsts[best]] + padded[best] + cost_of_a_pass, firsts[best]
    cuts, end = [], len(order)
    while end:
        cuts.append(order[begins[end] : end])
        end = begins[end]
    return cuts[::-1]


def cut_greedily(lengths, budget):
    """Index lists, longest text first, each filled up to `budget` tokens with padding; a longer text stands alone."""
    order, cuts = sorted(range(len(lengths)), key=lambda i: -lengths[i]), []
    while order:
        count = max(1, budget // max(1, lengths[order[0]]))
        cuts.append(order[:count])
        order = order[count:]
    return cuts


def token_lengths(sources, columns, tokenize, sample):
    """({column: int array of the token lengths of its texts}, empty texts), of `sample` rows of the sources."""
    files = find_files(sources)
    schema, counts = common_schema(files, columns, [])
    kinds = {
        f.name: f.type.value_type if pa.types.is_list(f.type) else f.type for f in schema
    }  # texts, or lists of them
    names = [name for name, kind in kinds.items() if pa.types.is_string(kind) or pa.types.is_large_string(kind)]
    if not names:
        raise ValueError(f"{files[0][1]}: no column of text among {', '.join(schema.names)}; choose with --columns")
    total, first, empty = sum(counts), 0, 0
    wanted = np.sort(np.random.default_rng(0).choice(total, min(sample, total), replace=False, shuffle=False))
    lengths = {name: [] for name in names}
    with tqdm(total=len(wanted), unit="row", unit_scale=True, desc="counting tokens") as bar:
        for fs, path in files:
            with blame(path):
                for batch in read_tables(fs, path, schema):
                    begin, end = np.searchsorted(wanted, [first, first + batch.num_rows])
                    rows = batch.take(pa.array(wanted[begin:end] - first))
                    for name in names:
                        cells = rows.column(name).to_pylist()
                        cells = [text for cell in cells for text in (cell if isinstance(cell, list) else [cell])]
                        texts = [text for text in cells if text and text.strip()]
                        empty += len(cells) - len(texts)
                        lengths[name] += tokenize(texts) if texts else []
                    first += batch.num_rows
                    bar.update(len(rows))
    return {name: np.array(found) for name, found in lengths.items() if found}, empty


def padding_of(lengths, batches):
    """(share of padding, forward passes) of texts of these lengths in these batches of their indices."""
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    return 1 - int(lengths.sum()) / padded, len(batches)


def length_report(sources, folder, path, columns, max_length, sample):
    """lengths.json and lengths.png: token lengths by column, and the padding of some ways to batch them."""
    from transformers import AutoTokenizer  # seconds to import, and wanted here only

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"--model_name_or_path {path}: {reason}; check the path") from None
    longest = max_length or min(tokenizer.model_max_length, 2**20)

    if longest <= tokenizer.num_special_tokens_to_add():
        raise ValueError(f"--max_length {longest}: leaves no room beside the special tokens")

    def tokenize(texts):
        try:
            ids = tokenizer(texts, truncation=True, max_length=longest)["input_ids"]
        except Exception as error:  # tokenizers has no class of its own for them
            raise ValueError(f"--model_name_or_path {path}: its tokenizer fails: {error}") from None
        return [max(1, len(one)) for one in ids]

    by_column, empty = token_lengths(sources, columns, tokenize, sample)
    if not by_column:
        raise ValueError(f"{sources[0]}: holds no text; choose with --columns")
    lengths = np.concatenate(list(by_column.values()))
    order = np.random.default_rng(0).permutation(len(lengths))

    def windows(size, cut):
        """All texts in random order, in windows of `size` of them, each cut by itself."""
        for window in (order[i : i + size] for i in range(0, len(order), size)):
            yield from (window[batch] for batch in cut(lengths[window].tolist()))

    def sorted_by(count):
        def cut(window):
            longest_first = sorted(range(len(window)), key=lambda i: -window[i])
            return [longest_first[i : i + count] for i in range(0, len(window), count)]

        return cut

    ways = {"random batches of 32": [order[i : i + 32] for i in range(0, len(order), 32)],
            "windows of 320, sorted, batches of 32": windows(320, sorted_by(32))}  # fmt: skip
    budgets = [2048, 4096, 8192, 16_384, 32_768]
    for budget in tqdm(budgets, desc="cutting", delay=2):
        for size in (128, 1024, 10_000):
            ways[f"micro-batches of {budget:,} tokens, {size:,} texts a share"] = list(
                windows(size, lambda window: cut_micro_batches(window, budget))  # noqa: B023
            )
        if len(lengths) <= 10_000:  # slow, and there for comparison only
            ways[f"the same in one window, cut greedily ({budget:,})"] = cut_greedily(lengths.tolist(), budget)
    ways = {name: padding_of(lengths, list(batches)) for name, batches in ways.items()}
    share = {budget: ways[f"micro-batches of {budget:,} tokens, 1,024 texts a share"][0] for budget in budgets}
    advice = {
        # what the longest texts lose is rarely worth their quadratic attention
        "max_length": int(min(longest, -(-np.percentile(lengths, 99) // 8) * 8)),
        # larger micro-batches are fewer, until they pad more
        "micro_batch_tokens": max(budget for budget in budgets if share[budget] <= min(share.values()) + 0.02),
    }
    marks = (50, 90, 95, 99, 100)
    about = {
        "texts": len(lengths), "empty": empty, "max_length": longest, "tokens": int(lengths.sum()),
        "columns": {name: {"texts": len(found), "mean": float(found.mean()),
                           **{f"p{mark}": int(np.percentile(found, mark)) for mark in marks}}
                    for name, found in by_column.items()},
        "batches": {name: {"padding": padding, "passes": passes} for name, (padding, passes) in ways.items()},
        "advice": advice,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lengths.json").write_text(json.dumps(about, indent=1) + "\n")
    draw_lengths(by_column, ways, budgets, advice, folder / "lengths.png")
    for name, found in about["columns"].items():
        print(f"{name}: {found['texts']:,} texts, mean {found['mean']:.0f} tokens, " +
              ", ".join(f"{mark} % at most {found[f'p{mark}']:,}" for mark in marks))  # fmt: skip
    print(f"\n{'padding':>8} {'passes':>8}")
    for name, (padding, passes) in ways.items():
        print(f"{padding:8.1%} {passes:8,}  {name}")
    print(f"\n--max_length {advice['max_length']} --micro_batch_tokens {advice['micro_batch_tokens']}"
          f"   (on a CPU 2048 at most; lengths.json and lengths.png are in {folder})")  # fmt: skip


def draw_lengths(by_column, ways, budgets, advice, path):
    """lengths.png: how long the texts are, and what padding each way of batching costs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 4), layout="constrained")
    for name, found in by_column.items():
        axes[0].hist(found, bins=60, histtype="step", label=name, weights=np.full(len(found), 1 / len(found)))
    axes[0].axvline(advice["max_length"], color="0.5", linestyle=":", label=f"--max_length {advice['max_length']}")
    axes[0].set(xlabel="tokens", ylabel="share of texts")
    for size in (128, 1024, 10_000):
        shown = [ways[f"micro-batches of {budget:,} tokens, {size:,} texts a share"][0] for budget in budgets]
        axes[1].plot(budgets, shown, marker="o", label=f"{size:,} texts a share")
    for number, name in enumerate(("random batches of 32", "windows of 320, sorted, batches of 32")):
        axes[1].axhline(ways[name][0], color="0.5", linestyle=("--", ":")[number], label=name)
    axes[1].set(xlabel="--micro_batch_tokens", ylabel="padding", xscale="log", ylim=(0, None))
    axes[1].set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    for axis in axes:
        axis.legend()
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# same in train_bi_encoder.py, train_cross_encoder.py, eval_incremental.py
def flags_given_twice(words):
    """Return the flags that stand more than once among the words of a command line: argparse keeps the last."""
    names = [word.partition("=")[0].replace("-", "_").strip("_") for word in words if word.startswith("--")]
    return [f"--{name}" for name, count in Counter(names).items() if count > 1]


def main(argv=None):
    """Runs the command line; returns the exit code: 0, or 2 after one line on stderr."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    option = parser.add_argument
    option("sources", nargs="*", metavar="SOURCE", help="path, glob, folder or fsspec URL; none: the demo corpus")
    option("--output_dir", type=Path, help="new folder for the shards (demo: data/python_code)")
    option("--overwrite", action="store_true", help="replace an output_dir that holds something, once all is written")
    option("--columns", nargs="+", metavar="C", help="columns to keep, in this order (default: all)")
    option("--filter", metavar="EXPR", help="rows to keep, e.g. \"score > 0.5 and lang in ['en', 'de']\"")
    option("--format", choices=["arrow", "parquet"], default="arrow", help="arrow maps as it is; parquet is smaller")
    option("--rows_per_shard", type=int, default=1_000_000, help="most rows of one file")
    option(
        "--ir_dataset", metavar="NAME", help="a collection of the package ir_datasets instead, such as beir/scifact"
    )
    option("--length_report", action="store_true", help="count the tokens of SOURCE instead (default: runs/lengths)")
    option("--model_name_or_path", metavar="M", help="Hub id or folder whose tokenizer --length_report uses")
    option("--max_length", type=int, metavar="N", help="tokens a text is cut to (default: the tokenizer's own)")
    option("--sample", type=int, default=100_000, metavar="N", help="rows that --length_report counts, at random")
    if twice := flags_given_twice(sys.argv[1:] if argv is None else argv):
        parser.error(f"{', '.join(twice)}: given twice; give all its values to one")
    args = parser.parse_args(argv)
    output_dir = (args.output_dir or Path("data/python_code")).resolve()
    partial, old = (output_dir.with_name(f".{output_dir.name}.{state}") for state in ("partial", "old"))
    try:
        if args.length_report:
            if args.filter or args.ir_dataset:
                raise ValueError("--length_report: takes no --filter and no --ir_dataset")
            if not args.sources or not args.model_name_or_path or min(args.sample, args.max_length or 1) < 1:
                raise ValueError(
                    "--length_report: wants SOURCE, --model_name_or_path, --sample and --max_length above 0"
                )
            folder = args.output_dir or Path("runs/lengths")
            length_report(args.sources, folder, args.model_name_or_path, args.columns, args.max_length, args.sample)
            return 0
        if args.ir_dataset and (args.sources or not args.output_dir or args.columns or args.filter):
            raise ValueError("--ir_dataset: wants --output_dir, and no SOURCE, --columns or --filter")
        if (args.output_dir is None) if args.sources else (args.columns or args.filter):
            raise ValueError("to convert, name SOURCE and --output_dir; the demo takes no --columns and no --filter")
        if args.rows_per_shard < 1:
            raise ValueError(f"--rows_per_shard {args.rows_per_shard}: at least 1 is needed")
        own = (
            not args.sources and not args.ir_dataset and (output_dir / "corpus.json").exists()
        )  # the demo may replace what it made itself
        if output_dir.exists() and any(output_dir.iterdir()) and not (args.overwrite or own):
            raise ValueError(f"{output_dir}: exists and is not empty; choose another --output_dir, or --overwrite")
        for source in args.sources:
            if output_dir in [Path(source).resolve(), *Path(source).resolve().parents]:
                raise ValueError(f"{source}: lies in --output_dir, which would be replaced; choose another")
        shutil.rmtree(partial, ignore_errors=True)  # a killed run's
        partial.mkdir(parents=True)
        if args.ir_dataset:
            done = ", ".join(
                f"{count:,} in {name}" for name, count in save_collection(args.ir_dataset, partial).items()
            )
        elif args.sources:
            rows = convert(args.sources, partial, args.columns, args.filter, args.format, args.rows_per_shard)
            done = f"{rows:,} rows"
        else:
            paths = sysconfig.get_paths()
            roots = {"stdlib": [paths["stdlib"]], "packages": [paths["purelib"], paths["platlib"]]}
            done = build_demo(roots, partial)["pairs"]
        shutil.rmtree(old, ignore_errors=True)
        if output_dir.exists():
            output_dir.rename(old)
        partial.rename(output_dir)
        shutil.rmtree(old, ignore_errors=True)
        print(f"{done} -> {output_dir}")
    except (ValueError, OSError, ImportError) as error:  # ImportError: fsspec names the package a URL needs
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
