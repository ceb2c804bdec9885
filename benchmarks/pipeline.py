"""What the CPU does for a batch before a GPU sees it: µs a row, by part, for several batch sizes and process counts.

    python benchmarks/pipeline.py MODEL_FOLDER [--batch_size 1024 8192 32768] [--processes 1 8 64] [--script FILE]

Generates a Parquet corpus of pairs of about 64 tokens a text, and makes batches as train_bi_encoder.py does for the
first of --processes: reads all rows and measures their lengths; turns its own rows into Python; tokenizes them and
cuts them into tensors, micro-batches of 16,384 tokens. Times are CPU seconds of the thread that prepares batches, on
which tokenizing (in Rust) runs, too; a run has all cores for it. Medians over the batches.
--script: another version of train_bi_encoder.py. Writes pipeline.json.
"""

import argparse
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import torch

ROOT = Path(__file__).parents[1]


def generate(path, rows):
    """Pairs of texts of 10 to 50 words of a README, some 64 tokens."""
    dice, words = random.Random(0), (ROOT / "README.md").read_text().split()
    texts = (" ".join(dice.choices(words, k=dice.randint(10, 50))) for _ in range(2 * rows))
    columns = {name: [f"{number} {next(texts)}" for number in range(rows)] for name in ("question", "answer")}
    pq.write_table(pa.table(columns), path, row_group_size=20_000)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a SentenceTransformer")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batch_size", type=int, nargs="+", default=[1024, 8192, 32_768])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--script", default=ROOT / "train_bi_encoder.py")
    parser.add_argument("--output", default="pipeline.json")
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location("script", args.script)
    script = sys.modules["script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    results, seconds = [], Counter()

    def timed(function, part):
        """Return the function, whose CPU seconds of this thread are added to seconds[part]."""

        def call(*given):
            started = time.thread_time()
            found = function(*given)
            seconds[part] += time.thread_time() - started
            return found

        return call

    script.read_rows = timed(script.read_rows, "rows")
    script.make_batch = timed(script.make_batch, "texts")
    with tempfile.TemporaryDirectory() as folder:
        generate(f"{folder}/rows.parquet", args.rows)
        flags = ["--train_data", f"{folder}/rows.parquet", "--eval_rows", "0", "--max_length", "128"]
        flags += ["--model_name_or_path", args.model]
        model = script.load_model(script.parse_args(flags))
        print(
            "| pairs a batch | processes | all rows, µs a row | own rows, µs a row | own texts, µs a text | "
            "texts/s a process | rows/s a process | rows/s of all |\n" + "|---" * 8 + "|"
        )
        for size in args.batch_size:
            for processes in args.processes:
                options = script.parse_args([*flags, "--batch_size", str(size), "--micro_batch_tokens", "16384"])
                options.columns = script.find_columns(options)
                options.query_prompt = [""]
                options.document_prompt = ""
                data = script.open_data(options)
                tables = script.row_batches(data.sources, data.weights, options)
                # As on a GPU: padded to multiples of 8. No such device is needed, since nothing is moved to it.
                rank = SimpleNamespace(num_processes=processes, process_index=0, device=torch.device("xpu"))
                batches, found = script.local_batches(tables, 0, model, data, options, rank), []
                next(batches)
                for _ in range(args.batches):
                    seconds.clear()
                    started = time.thread_time()
                    rows = len(next(batches).rows)
                    total = time.thread_time() - started
                    parts = (total - seconds["rows"] - seconds["texts"]) / size, seconds["rows"] / rows
                    found.append([*parts, seconds["texts"] / rows / 2, rows / total])
                *parts, rate = map(statistics.median, zip(*found))
                names = ("all_rows_us_a_row", "own_rows_us_a_row", "own_texts_us_a_text")
                result = {"batch_size": size, "processes": processes, "rows_per_second": rate}
                result |= {name: value * 1e6 for name, value in zip(names, parts)}
                results.append(result)
                whole, own, texts = (result[name] for name in names)
                print(f"| {size:,} | {processes} | {whole:.2f} | {own:.1f} | {texts:.1f} | {2 * rate:,.0f} "
                      f"| {rate:,.0f} | {rate * processes:,.0f} |")  # fmt: skip
    Path(args.output).write_text(json.dumps({"script": str(args.script), "results": results}, indent=1))


if __name__ == "__main__":
    main()
