"""Memory, seconds and disk space of the scripts by the size of what they read, each command in turns.

    python benchmarks/memory.py rows --sizes 100000 10000000 [--rounds 3]
    python benchmarks/memory.py documents --sizes 100000 10000000
    python benchmarks/memory.py queries --sizes 40000 --dimensions 1024 [--folder /tmp/mq] [--scripts ANOTHER_CHECKOUT]
    python benchmarks/memory.py queries --sizes 1000000 --documents 100000
    python benchmarks/memory.py convert --sizes 2000000
    python benchmarks/memory.py gathered --sizes 16 1024 --steps 1

rows: train_bi_encoder.py trains a small static model for --steps steps on Parquet files of so many short rows, mapped
(the first run makes the Arrow table) and as a stream; then the seconds to open a file, and from there to the first
batch after 98 % of its rows. documents: eval_incremental.py encodes so many short documents, and reads them from its
cache. queries: it ranks and measures so many queries by a model of --dimensions, reads a run file of them, and
mine_negatives.py mines from it; a run file of 1,000,000 x 100 has 3.8 GB. convert: prepare_corpus.py reads a table of
so many rows of 110 bytes, and a tenth of them by --filter. gathered: two processes train --steps steps on batches of
so many pairs of a query of 32 words and a document of 300, by tiny models: dense, sparse with 30,522 words, and
multi-vector with 128 numbers a token, whose embeddings all processes gather; RSS is that of the larger process. RSS is
the peak of the whole process, to its end, as /usr/bin/time -v prints it, with libraries and pages of mapped files;
"anonymous" is without them (RssAnon, seen every 20 ms). Medians over the rounds. Writes memory.json.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
TEXTS = pa.schema([("_id", pa.string()), ("text", pa.string())])
WORDS = np.array([f"word{number}" for number in range(5000)])


def write_parquet(path, count, schema, columns_of):
    """Write `count` rows, in row groups of 50,000; columns_of(numbers) returns their columns."""
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, count, 50_000):
            numbers = range(first, min(first + 50_000, count))
            writer.write_table(pa.table(columns_of(numbers), schema=schema))


def write_rows(path, count):
    """Write (question, answer) rows of 100 bytes."""

    def columns_of(numbers):
        questions = [f"how to compute item {n} of list {n * 7919 % count}" for n in numbers]
        return [questions, [f"def item_{n}(values): return values[{n * 104729 % count}]" for n in numbers]]

    write_parquet(path, count, pa.schema([("question", pa.string()), ("answer", pa.string())]), columns_of)


def write_model(folder, texts, dimensions):
    """Save a static model with a vocabulary of the texts."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=dimensions)], device="cpu")
    model.save_pretrained(str(folder))


def measure(args, *command):
    """Run a script; return its peaks and seconds."""
    anonymous = 0.0  # GB
    ended = 0
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *map(str, command)], stdout=args.said, stderr=args.said)
    while not ended:
        if seen := re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text()):
            anonymous = max(anonymous, int(seen[1]) / 1e6)
        time.sleep(0.02)
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
    process.returncode = os.waitstatus_to_exitcode(status)  # else Popen would wait for it
    if process.returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}: {Path(args.said.name).read_text()[-2000:]}")
    peaks = {"rss_gb": usage.ru_maxrss / 1e6, "anonymous_gb": anonymous}
    return peaks | {"seconds": time.perf_counter() - started}


def measure_rows(args, folder, count):
    """Yield (name, figures) of trainings on `count` rows."""
    write_rows(folder / "rows.parquet", count)
    texts = (f"how to compute item {n} of list {n * 7919}: def item(values): return values" for n in range(2000))
    write_model(folder / "model", texts, 64)
    flags = ["--train_data", folder / "rows.parquet", "--columns", "question", "answer", "--batch_size", 256]
    flags += ["--model_name_or_path", folder / "model", "--save_steps", 0]
    for turn in range(args.rounds + 1):
        for name, more in (("mapped", []), ("stream", ["--streaming"])):
            if turn == 0:
                if more:
                    continue  # it makes no table
                name = "mapped, first run"
            output = folder / f"{name}{turn}"
            training = [*flags, *more, "--max_steps", args.steps, "--learning_rate", 0.005, "--output_dir", output]
            found = measure(args, args.scripts / "train_bi_encoder.py", *training)
            lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
            rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
            yield name, found | {"tokens_per_second": statistics.harmonic_mean(rates[1:] or rates)}
    yield "resume after 98 %", resume_seconds([*flags, "--output_dir", folder / "none"], count - count // 50)


def resume_seconds(flags, row):
    """Return the seconds from nothing to an open corpus, and from there to the first batch at `row`."""
    import train_bi_encoder as script

    args = script.parse_args(list(map(str, flags)))
    started = time.perf_counter()
    data = script.open_data(args)
    opened = time.perf_counter()
    position = {"taken": row, "window": row // args.shuffle_buffer, "used": 1}
    key = f"{data.sources[0].name} 0"
    state = {"sources": {key: position}, "mixture": [[key], None, None, None]}
    next(script.row_batches(data.sources, data.weights, args, state))
    return {"open_seconds": opened - started, "first_batch_seconds": time.perf_counter() - opened}


def measure_documents(args, folder, count):
    """Yield (name, figures) of evaluations on `count` documents and 200 queries of them."""

    def text(number):
        return f"def item_{number}(values): return values[{number * 104729 % count}] + {number * 7919 % 1009}"

    def columns_of(numbers):
        return [[f"d{n}" for n in numbers], [text(n) for n in numbers]]

    write_parquet(folder / "corpus.parquet", count, TEXTS, columns_of)
    chosen = range(0, count, max(1, count // 200))
    queries = [json.dumps({"_id": f"q{n}", "text": f"item {n}"}) + "\n" for n in chosen]
    (folder / "queries.jsonl").write_text("".join(queries))
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\td{n}\t1\n" for n in chosen))
    write_model(folder / "model", map(text, range(10_000)), 256)
    flags = ["--model_name_or_path", folder / "model", "--corpus", folder / "corpus.parquet", "--queries",
             folder / "queries.jsonl", "--qrels", folder / "qrels.tsv", "--cache_dir", folder / "cache"]  # fmt: skip
    names = ["stream, encoding", "stream, cached", "mapped, cached, with the Arrow table made", "mapped, cached"]
    for number, name in enumerate(names):
        more = ["--output_dir", folder / f"out{number}", *["--streaming"] * ("stream" in name)]
        found = measure(args, args.scripts / "eval_incremental.py", *flags, *more)
        seen = json.loads((folder / f"out{number}/metrics.json").read_text())["results"][0]
        cache = sum(file.stat().st_size for file in folder.glob("cache/**/*") if file.is_file())
        yield name, found | {"corpus_seconds": seen["seconds"], "cache_gb": cache / 1e9}


def write_collection(folder, queries, documents, depth):
    """Write a BEIR folder of random texts, and a run file in which each query's positive is somewhere."""
    generator = np.random.default_rng(0)
    (folder / "qrels").mkdir(exist_ok=True)
    for name, count, length in (("corpus", documents, 60), ("queries", queries, 8)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for number in range(count):
                text = " ".join(WORDS[generator.integers(0, len(WORDS), length)])
                print(json.dumps({"_id": f"{name[0]}{number}", "text": f"{number} {text}"}), file=file)
    with open(folder / "run.part", "w") as run, open(folder / "qrels/test.tsv", "w") as judgments:
        print("query-id\tcorpus-id\tscore", file=judgments)
        scores = [f"{score:.9g}" for score in np.linspace(0.9, 0.3, depth)]
        for number in range(queries):
            first = int(generator.integers(0, documents))
            step = 1 + 2 * int(generator.integers(0, documents // (4 * depth)))
            found = [(first + rank * step) % documents for rank in range(depth)]
            run.writelines(f"q{number} Q0 c{d} {r} {s} x\n" for r, (d, s) in enumerate(zip(found, scores), start=1))
            print(f"q{number}\tc{found[int(generator.integers(0, depth))]}\t1", file=judgments)
    (folder / "run.part").rename(folder / "run.trec")


def measure_queries(args, folder, count):
    """Yield (name, figures) of the evaluator and the miner, for `count` queries x --depth documents."""
    if not (folder / "run.trec").exists():
        write_collection(folder, count, args.documents or count, args.depth)
        write_model(folder / "model", WORDS, args.dimensions)
    evaluator = args.scripts / "eval_incremental.py"
    by_model = ["--beir", folder, "--cache_dir", folder / "cache", "--model_name_or_path", folder / "model"]
    yield "evaluator, by a model", measure(args, evaluator, *by_model, "--output_dir", folder / "by_model")
    run = ["--beir", folder, "--split", "test", "--run", folder / "run.trec"]
    yield "evaluator --run", measure(args, evaluator, *run, "--output_dir", folder / "by_run")
    mined = ["--overwrite", "--output", folder / "mined.jsonl"]
    yield "miner --run", measure(args, args.scripts / "mine_negatives.py", *run, *mined)


def measure_convert(args, folder, count):
    """Yield (name, figures) of prepare_corpus.py from ORC (stripes of 64 MB) and Parquet (row groups of 100,000)."""
    dice = np.random.default_rng(0)
    text = dice.bytes(count // 2 + 100).hex()
    schema = pa.schema([("query", pa.string()), ("text", pa.string()), ("score", pa.float64())])
    with (pq.ParquetWriter(folder / "table.parquet", schema) as parquet,
          pa.orc.ORCWriter(str(folder / "table.orc"), compression="snappy") as orc):  # fmt: skip
        for first in range(0, count, 100_000):
            numbers = range(first, min(first + 100_000, count))
            queries = [f"query {n} {text[n : n + 24]}" for n in numbers]
            texts = [f"text {n} {text[n + 24 : n + 72]}" for n in numbers]
            table = pa.table([queries, texts, dice.random(len(numbers))], schema=schema)
            parquet.write_table(table)
            orc.write(table)
    script = args.scripts / "prepare_corpus.py"
    yield "--help", measure(args, script, "--help")
    filters = {"all": [], "a tenth": ["--filter", "[('score', '>', 0.9)]"]}
    for kind in ("orc", "parquet"):
        for name, more in filters.items():
            words = [folder / f"table.{kind}", "--output_dir", folder / "out", "--overwrite", *more]
            yield f"{kind}, {name}", measure(args, script, *words)


def measure_gathered(args, folder, batch_size):
    """Yield (name, figures) of trainings on two processes, by the type of the model."""
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

    words = [f"word{number}" for number in range(30_517)]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=300).save_pretrained(folder / "model")
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(vocab_size=30_522, **shape)).save_pretrained(folder / "model")
    generator = np.random.default_rng(0)

    def columns_of(numbers):
        return [[words_of(generator.integers(0, 30_517, size)) for _ in numbers] for size in (32, 300)]

    def words_of(numbers):
        return " ".join(f"word{number}" for number in numbers)

    write_parquet(folder / "rows.parquet", args.steps * batch_size, TEXTS, columns_of)
    for kind in ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder"):
        flags = ["--model_name_or_path", folder / "model", "--model_type", kind, "--columns", *TEXTS.names]
        flags += ["--train_data", folder / "rows.parquet", "--batch_size", batch_size, "--max_steps", args.steps]
        flags += ["--eval_rows", 0, "--save_steps", 0, "--output_dir", folder / kind]
        command = [sys.executable, args.scripts / "train_bi_encoder.py", *flags]
        started = time.perf_counter()
        processes = []
        for rank in range(2):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": 29577}
            environment = os.environ | {name: str(value) for name, value in place.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1"}
            environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
            said = {"stdout": args.said, "stderr": args.said}
            processes.append(subprocess.Popen(list(map(str, command)), env=environment, **said))
        ended = [os.wait4(process.pid, 0) for process in processes]
        if any(status for _, status, _ in ended):
            sys.exit(Path(args.said.name).read_text()[-2000:])
        peak = max(usage.ru_maxrss for *_, usage in ended) / 1e6
        yield kind, {"rss_gb": peak, "seconds": time.perf_counter() - started}


def main():
    measures = {"rows": measure_rows, "documents": measure_documents, "queries": measure_queries,
                "convert": measure_convert, "gathered": measure_gathered}  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=measures)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=300, help="of a training")
    parser.add_argument("--rounds", type=int, default=1, help="of trainings")
    parser.add_argument("--documents", type=int, help="of --sizes queries; none: as many")
    parser.add_argument("--depth", type=int, default=100, help="documents a query in the run file")
    parser.add_argument("--dimensions", type=int, default=64, help="of the model that ranks for queries")
    parser.add_argument("--scripts", type=Path, default=ROOT, help="folder of the scripts, such as another checkout")
    parser.add_argument("--folder", type=Path, help="for the files; those of queries are used again; none: temporary")
    parser.add_argument("--output", default="memory.json")
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as place, open(f"{place}/said", "w") as args.said:
        os.environ |= {"HF_DATASETS_CACHE": f"{place}/cache", "HF_HUB_OFFLINE": "1"}
        for count in args.sizes:
            sizes = [count, args.documents or count, args.depth, args.dimensions]
            folder = Path(args.folder or place, "-".join(map(str, [args.kind, *sizes])))
            folder.mkdir(parents=True, exist_ok=True)
            for name, found in measures[args.kind](args, folder, count):
                results.setdefault(f"{count:,}: {name}", []).append(found)
                print(f"{count:,}: {name}: {found}", file=sys.stderr, flush=True)
    for name, runs in results.items():
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(f"| {name} | {' | '.join(f'{key} {value:,.3f}' for key, value in medians.items())} |")
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "results": results}, indent=1, default=str))


if __name__ == "__main__":
    main()
