"""Memory, time and disk space of the evaluator by corpus size: encoding, reading a full cache, and mining.

    python benchmarks/eval_memory.py [--documents 50000 1000000]

Generates Parquet corpora of short documents and 200 queries, makes a small static model, and evaluates it on each.
Peak memory is the highest RssAnon of the process, seen every 20 ms: pages of mapped files are not counted. Writes
eval_memory.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[1]


def text(number, count):
    return f"def item_{number}(values): return values[{number * 104729 % count}] + {number * 7919 % 1009}"


def generate(folder, count):
    """Parquet of `count` documents in row groups of 50,000, and queries and judgments of 200 of them."""
    folder.mkdir()
    schema = pa.schema([("_id", pa.string()), ("text", pa.string())])
    with pq.ParquetWriter(folder / "corpus.parquet", schema) as writer:
        for first in range(0, count, 50_000):
            numbers = range(first, min(first + 50_000, count))
            columns = [[f"d{n}" for n in numbers], [text(n, count) for n in numbers]]
            writer.write_table(pa.table(columns, schema=schema))
    chosen = range(0, count, count // 200)
    lines = [json.dumps({"_id": f"q{n}", "text": f"item {n}"}) + "\n" for n in chosen]
    (folder / "queries.jsonl").write_text("".join(lines))
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\td{n}\t1\n" for n in chosen))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--documents", type=int, nargs="+", default=[50_000, 1_000_000])
    parser.add_argument("--output", default="eval_memory.json")
    args = parser.parse_args()
    runs = {}
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["[UNK]"], show_progress=False)
        tokenizer.train_from_iterator((text(n, 10_000) for n in range(10_000)), trainer)
        SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=256)], device="cpu").save_pretrained(
            str(work / "model")
        )
        for count in args.documents:
            folder = work / str(count)
            generate(folder, count)
            for name, flags in {
                "streaming, encoding": ["--streaming"],
                "streaming, cached": ["--streaming"],
                "mapped, cached, with the Arrow table made": [],
                "mapped, cached": [],
            }.items():
                command = [sys.executable, ROOT / "eval_incremental.py", "--model_name_or_path", work / "model"]
                command += ["--corpus", folder / "corpus.parquet", "--queries", folder / "queries.jsonl"]
                command += ["--qrels", folder / "qrels.tsv", "--cache_dir", folder / "cache"]
                command += ["--output_dir", folder / "out", *flags]
                started = time.perf_counter()
                environment = os.environ | {"HF_DATASETS_CACHE": str(folder / "datasets"), "HF_HUB_OFFLINE": "1"}
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
                process = subprocess.Popen(list(map(str, command)), **quiet)
                peak = 0
                while process.poll() is None:
                    with suppress(OSError, IndexError):
                        status = Path(f"/proc/{process.pid}/status").read_text()
                        peak = max(peak, int(status.split("RssAnon:")[1].split()[0]))
                    time.sleep(0.02)
                seconds = time.perf_counter() - started
                assert process.returncode == 0, command
                (seen,) = json.loads((folder / "out/metrics.json").read_text())["results"]
                shutil.rmtree(folder / "out")
                cache = sum(file.stat().st_size for file in folder.glob("cache/**/*") if file.is_file())
                run = {"documents": count, "peak_mb": peak * 1024 / 1e6, "encoded": seen["texts"]["encoded"],
                       "seconds": seconds, "corpus": seen["seconds"], "cache_mb": cache / 1e6}  # fmt: skip
                runs.setdefault(name, []).append(run)
                print(f"{count:,} documents, {name}: {run}", file=sys.stderr)
            shutil.rmtree(folder)
    print("| | documents | encoded | peak MB | difference | seconds | of these the corpus | cache, MB |")
    print("|---|---|---|---|---|---|---|---|")
    for name, measured in runs.items():
        for run in measured:
            print(f"| {name} | {run['documents']:,} | {run['encoded']:,} | {run['peak_mb']:,.0f} "
                  f"| {run['peak_mb'] - measured[0]['peak_mb']:+,.0f} | {run['seconds']:.1f} | {run['corpus']:.1f} "
                  f"| {run['cache_mb']:,.0f} |")  # fmt: skip
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
