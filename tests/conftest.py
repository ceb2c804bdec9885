"""Shared fixtures and helpers: a small corpus of real text, tiny models, and launches of the scripts."""

import ast
import gc
import importlib
import io
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import closing, contextmanager
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
from forked import ROOT, Forked, merge_flags, start_server

gc.disable()  # until all is imported: it takes a sixth of that time
# No requests to the Hub, few updates of progress bars, and one thread per process.
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_MININTERVAL": "60"}
os.environ["OMP_NUM_THREADS"] = "1"  # two test files run at a time, on few cores
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"  # gloo compares each collective of all ranks: name, shapes, dtypes
CACHE = tempfile.TemporaryDirectory(prefix="evenstep")  # for the Arrow tables of `datasets`; deleted at exit
os.environ["HF_DATASETS_CACHE"] = CACHE.name
os.environ["HF_MODULES_CACHE"] = f"{CACHE.name}/modules"  # for copies of remote code
os.environ.setdefault("STRICT_DEVICE", CACHE.name)  # the folder of the process that starts the others
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
sys.path.insert(0, str(ROOT))
TRAINERS = ["train_bi_encoder", "train_cross_encoder"]
# What two equal runs measure differently, in metrics.jsonl.
RATES = {"rows_per_second", "tokens_per_second", "data_wait_fraction", "peak_memory_gb"}
CHAOS = int(os.environ.get("CHAOS", 0))  # kills of each script in tests/chaos; 0: the short form


def mark_slow(cases, quick):
    """Return the cases of a test; those that are not in `quick` are marked slow: only `make test-all` runs them."""
    slow = [case if isinstance(case, tuple) else (case,) for case in cases if case not in quick]
    return [*quick, *(pytest.param(*case, marks=pytest.mark.slow) for case in slow)]


def quick_first(cases, quick=1):
    """Return the cases, of which all but the first `quick` are slow."""
    cases = list(cases)
    return mark_slow(cases, cases[:quick])


EACH_TRAINER = quick_first(TRAINERS)  # for what both do by the same functions


def few_or_all(few, *choices, quick=1):
    """Return the parameters of a test: every combination of `choices` under `make chaos`, else only `few`. All but the
    first `quick` are slow."""
    return mark_slow(product(*choices) if CHAOS else few, few[:quick])


def pytest_configure(config):
    """Start one server for all workers of pytest-xdist; import torch only where tests run."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        start_server()
    else:
        import shortcuts  # noqa: F401


def pytest_collection_modifyitems(config, items):
    """Deselect tests marked `chaos`, which take minutes, except under `make chaos`. Begin with the longest files: one
    that is begun last would run alone at the end."""
    out = [item for item in items if not CHAOS and item.get_closest_marker("chaos")]
    config.hook.pytest_deselected(items=out)
    kept = [item for item in items if item not in out]
    items[:] = sorted(kept, key=lambda item: item.path.stem not in ("test_strict_device", "test_recipes"))


def pytest_collection_finish():
    """Exclude the imported modules from later garbage collections, such as that at the end of each run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # with 700, collections take a tenth of the time
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    """Print the table of `make chaos`: what each test did, how often, and the result."""
    seen = [row for report in terminalreporter.stats.get("passed", []) for row in report.user_properties]
    if CHAOS and seen:
        terminalreporter.write_line("\n| test | times | result |\n|---|---|---|")
        counts = Counter()
        for test, (times, result) in seen:
            counts[test, result] += times
        for (test, result), times in sorted(counts.items()):
            terminalreporter.write_line(f"| {test} | {times:,} | {result} |")


def skip_without_bfloat16():
    """Skip a test where torch's attention of bfloat16 fails: it asks the machine, not this variable."""
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        pytest.skip("torch has no attention of bfloat16 with ATEN_CPU_CAPABILITY=default")


def weights(folder):
    """Return all weights of a saved model as one vector."""
    import torch
    from safetensors.torch import load_file

    return torch.cat([tensor.flatten() for _, tensor in sorted(load_file(folder / "model.safetensors").items())])


@pytest.fixture(autouse=True, scope="module")
def freeze():
    """Exclude also what was imported since from garbage collections: the evaluator ends each model with one."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def restore_signal_handlers():
    """A trainer's main() replaces these handlers."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def report(record_property):
    """report(test, times, result) adds a row to the table of `make chaos`."""
    return lambda test, times, result: record_property(test, (times, result))


def launch(script, *flags, processes=1, cwd=ROOT, check=True, use_launcher=False, **more):
    """Run a script on `processes` forked gloo processes, or by Accelerate's launcher if `use_launcher`; return the
    CompletedProcess. more: further arguments of Forked."""
    if use_launcher:
        config = ROOT / "accelerate_configs" / ("multi_cpu.yaml" if processes > 1 else "cpu.yaml")
        start = ["accelerate.commands.accelerate_cli", "launch", "--config_file", config, "--main_process_port=0"]
        command = [sys.executable, "-m", *start, f"--num_processes={processes}", script, *merge_flags(flags)]
        result = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=240)
    else:
        process = Forked(script, flags, processes, cwd, **more)
        result = subprocess.CompletedProcess(flags, process.wait())
        result.stdout, result.stderr = process.read("stdout"), process.read("stderr")
    assert not check or result.returncode == 0, result.stderr[-4000:]
    return result


@contextmanager
def start_worker(folder, name, *words):
    """Start a script of tests/ that answers lines of stdin; folder: where it works, and where `log` has its stderr."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": folder}
    command = [sys.executable, ROOT / "tests" / name, *words]
    with open(folder / "log", "w") as log, subprocess.Popen(command, stderr=log, **pipes) as worker:
        yield worker


def train(name, *flags):
    """Run a trainer in this process."""
    script = importlib.import_module(name)
    script.main(script.parse_args(merge_flags(flags)))


def unaligned(*tensors):
    """Return the number of tensors that do not start at a multiple of 64 bytes, as all that torch allocates do."""
    return sum(tensor.data_ptr() % 64 > 0 for tensor in tensors)


def read_jsonl(path):
    """Return the dicts of a JSON Lines file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def metrics(output_dir):
    """Return the records of a run's metrics.jsonl."""
    return read_jsonl(Path(output_dir) / "metrics.jsonl")


def lines_of(output_dir):
    """Return the same without what two equal runs measure differently."""
    return [{name: value for name, value in line.items() if name not in RATES} for line in metrics(output_dir)]


def read_run(path):
    """Return {query: {document: score}} of a run file, in its order."""
    found = {}
    for line in Path(path).read_text().splitlines():
        query, _, document, _, score, _ = line.split()
        found.setdefault(query, {})[document] = float(score)
    return found


def write_jsonl(path, records):
    """Write dicts to a JSON Lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_rows(path, rows):
    """Write rows in the format of the suffixes, in groups of 37 rows if it has groups; return the path.

    A compressed file has two members, as from `cat a.gz b.gz`: a reader that stops after the first would lose rows."""
    import csv

    import fsspec
    import pyarrow as pa
    import pyarrow.orc
    import pyarrow.parquet as pq

    name = Path(path).name
    if ".parquet" in name:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=37)
    elif ".orc" in name:
        pa.orc.write_table(pa.Table.from_pylist(rows), path)
    elif ".arrow" in name:
        table = pa.Table.from_pylist(rows)
        with (pa.ipc.new_file if "file" in name else pa.ipc.new_stream)(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=37)
    else:
        file = io.StringIO(newline="")
        if "json" in name:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        elif ".txt" in name:
            file.writelines(row["text"] + "\n" for row in rows)
        else:
            options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None} if ".tsv" in name else {}
            writer = csv.DictWriter(file, rows[0].keys(), **options)
            writer.writeheader()
            writer.writerows(rows)
        data = file.getvalue().encode()
        for mode, part in (("wb", data[: len(data) // 2]), ("ab", data[len(data) // 2 :])):
            with fsspec.open(str(path), mode, compression="infer") as member:
                member.write(part)
    return path


def write_beir(folder, documents, queries, judgments, split="test"):
    """Write a BEIR folder of {id: text}, or of records, and of (query, document, grade); return it."""
    for name, texts in (("corpus", documents), ("queries", queries)):
        records = texts if isinstance(texts, list) else [{"_id": key, "text": text} for key, text in texts.items()]
        write_jsonl(folder / f"{name}.jsonl", records)
    (folder / "qrels").mkdir(exist_ok=True)
    lines = ["\t".join(map(str, row)) + "\n" for row in [("query-id", "corpus-id", "score"), *judgments]]
    (folder / f"qrels/{split}.tsv").write_text("".join(lines))
    return folder


@pytest.fixture(scope="session")
def rows():
    """Up to 600 (docstring, code) pairs of varied length, from functions of the standard library."""
    names = "argparse asyncio collections difflib email logging pathlib tarfile turtle zipfile"
    pairs = {}
    for name in names.split():  # not imported: turtle requires tkinter, a package of its own in Debian and Ubuntu
        for node in ast.walk(ast.parse(Path(find_spec(name).origin).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                node.body = node.body[1:] or [ast.Pass()]
                pairs.setdefault(" ".join(text.split("\n\n")[0].split()), ast.unparse(node)[:1500])
    assert len(pairs) > 300
    pairs = list(pairs.items())
    return [{"docstring": a, "code": b} for a, b in pairs[:600]]


@pytest.fixture(scope="session")
def bert(tmp_path_factory, rows):
    """Folder of a tiny SentenceTransformer with dropout: BERT of 2 layers and 32 dimensions, mean pooling.

    The vocabulary is all characters and the most frequent words, because tokenizers' trainer, which counts in hash
    tables, numbers the tokens differently each time."""
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    texts = [text.lower() for row in rows for text in row.values()]
    words = Counter(word for text in texts for word in re.findall(r"[^\W_]+|\S", text))
    characters = sorted(set("".join(words)))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *("##" + c for c in characters)]
    vocabulary += [word for word, _ in words.most_common(1000) if len(word) > 1]
    vocabulary = vocabulary[:1000]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=128).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(vocabulary), **shape)).save_pretrained(folder)
    model = SentenceTransformer(str(folder), device="cpu")
    model.save_pretrained(str(folder / "st"), create_model_card=False)
    return folder / "st"


@pytest.fixture(scope="session")
def static(tmp_path_factory, bert):
    """Folder of a static embedding model with 32 dimensions and random weights."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    module = StaticEmbedding(AutoTokenizer.from_pretrained(bert), embedding_dim=32)
    folder = tmp_path_factory.mktemp("static")
    SentenceTransformer(modules=[module], device="cpu").save_pretrained(str(folder), create_model_card=False)
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, rows):
    """Folder with the rows in four Parquet shards."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("corpus")
    for shard in range(4):
        pq.write_table(pa.Table.from_pylist(rows[shard::4]), folder / f"part-{shard}.parquet", row_group_size=50)
    return folder


@pytest.fixture(scope="session")
def beir(tmp_path_factory, rows):
    """BEIR folder of 293 functions, searched by 60 docstrings; q1 has two relevant documents, q2 an irrelevant one."""
    folder = tmp_path_factory.mktemp("beir")
    kept = list({row["code"]: row for row in rows}.values())[:293]
    documents = [{"_id": f"d{i}", "title": "", "text": row["code"]} for i, row in enumerate(kept)]
    queries = {f"q{i}": row["docstring"] for i, row in enumerate(kept[:60])}
    qrels = [(f"q{i}", f"d{i}", 1) for i in range(60)]
    return write_beir(folder, documents, queries, [*qrels, ("q1", "d7", 2), ("q2", "d9", 0)])


@pytest.fixture
def evaluate(tmp_path, bert, capsys):
    """Return a function that runs the evaluator in this process, in tmp_path, and returns its results."""

    import eval_incremental as script

    def run(*flags, output="out"):
        common = [] if {"--model_name_or_path", "--run"} & set(flags) else ["--model_name_or_path", bert]
        common += ["--cache_dir", tmp_path / "cache", "--output_dir", tmp_path / output, "--corpus_chunk_size", 64]
        shutil.rmtree(tmp_path / output, ignore_errors=True)
        script.main(script.parse_args(merge_flags([*common, *flags])))
        path = tmp_path / output / "metrics.json"
        if path.exists():
            results = json.loads(path.read_text())["results"]
            return results[0] if len(results) == 1 else {"models": results}

    return run


def count_cached(cache_dir, vector_bytes=128):
    """Return the number of vectors in each embedding cache of a folder; vector_bytes: of 32 numbers."""
    found = []
    for database in sorted(Path(cache_dir).glob("*/cache.db")):
        with closing(sqlite3.connect(database)) as connection:  # files may be left by a kill
            sizes = [size for (size,) in connection.execute("SELECT size FROM Cache")]
        found.append(sum(size // (16 + vector_bytes) for size in sizes))  # with the hash of its text
    return found


@pytest.fixture(scope="session")
def reranker(tmp_path_factory, bert):
    """Folder of a tiny CrossEncoder with random weights, scaled up so that the scores of pairs differ."""
    import torch
    from sentence_transformers import CrossEncoder

    folder = tmp_path_factory.mktemp("reranker")
    torch.manual_seed(0)
    model = CrossEncoder(str(bert), device="cpu", num_labels=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(30 if "pooler" in name or "classifier" in name else 3)
    model.save_pretrained(str(folder))
    return folder


def make_splade(base, folder):
    """Write a SparseEncoder, a masked language model with random weights, of the configuration and tokenizer of base.
    Weights are large, so that embeddings differ; half of the words are 0 in an embedding."""
    import torch
    from sentence_transformers import SparseEncoder
    from transformers import AutoConfig, AutoTokenizer, BertForMaskedLM

    config = AutoConfig.from_pretrained(base, initializer_range=0.1)
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    SparseEncoder(str(folder), device="cpu").save_pretrained(str(folder), create_model_card=False)
    return folder


def make_colbert(base, folder, similarity=None, **options):
    """Write a MultiVectorEncoder with a random projection to 128 dimensions, which skips full stops of documents.
    options: of its transformer, such as query_expansion."""
    import torch
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    torch.manual_seed(0)
    model = MultiVectorEncoder(str(base), device="cpu", similarity_fn_name=similarity)
    model[2] = MultiVectorMask(skiplist_words=["."])
    for name, value in options.items():
        setattr(model[0], name, value)
    model.save_pretrained(str(folder), create_model_card=False)
    return folder


@pytest.fixture(scope="session")
def splade(tmp_path_factory, bert):
    return make_splade(bert, tmp_path_factory.mktemp("splade"))


@pytest.fixture(scope="session")
def colbert(tmp_path_factory, bert):
    expansion = {"strategy": "fixed", "length": 12}
    return make_colbert(bert, tmp_path_factory.mktemp("colbert"), query_expansion=expansion)
