"""What the CPU does for a batch before a GPU sees it: µs a row, by part, for several batch sizes and process counts.

    python benchmarks/pipeline.py MODEL_FOLDER [--batch_size 1024 8192 32768] [--processes 1 8 64] [--script FILE]

Generates a Parquet corpus of pairs of about 64 tokens a text, and makes batches as train_bi_encoder.py does for the
first of --processes: reads, checks, numbers equal texts and partitions all rows; tokenizes its own and cuts them into
tensors, micro-batches of 16,384 tokens. Times are CPU seconds, which other work on the machine does not change: of all
cores for tokenizing (in Rust), of the thread that prepares batches for the rest. Medians over the batches.
--script: another version of train_bi_encoder.py. Writes pipeline.json.
"""

import argparse
import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
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


class TimedTokenizer:
    """A tokenizer of the tokenizers library that adds up the seconds of its calls, of all threads and of this one."""

    def __init__(self, tokenizer):
        self.tokenizer, self.seconds, self.waited = tokenizer, 0.0, 0.0

    def encode_batch_fast(self, texts):
        started, thread = time.process_time(), time.thread_time()
        encodings = self.tokenizer.encode_batch_fast(texts)
        self.seconds += time.process_time() - started
        self.waited += time.thread_time() - thread
        return encodings


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
    results, make_micro_batches, seconds = [], script.make_micro_batches, {"own": 0.0}

    def timed(*given):
        started = time.thread_time()
        found = make_micro_batches(*given)
        seconds["own"] += time.thread_time() - started
        return found

    script.make_micro_batches = timed
    with tempfile.TemporaryDirectory() as folder:
        generate(f"{folder}/rows.parquet", args.rows)
        flags = ["--train_data", f"{folder}/rows.parquet", "--eval_rows", "0", "--max_length", "128"]
        flags += ["--model_name_or_path", args.model]
        model = script.load_model(script.parse_args(flags))
        tokenizer = TimedTokenizer(model.tokenizer.backend_tokenizer)
        type(model.tokenizer).backend_tokenizer = property(lambda _: tokenizer)
        print("| pairs a batch | processes | whole batch, µs a row | own texts, µs a text | tokenizing, µs a text | "
              "texts/s a process | rows/s of all |\n|---|---|---|---|---|---|---|")  # fmt: skip
        for size in args.batch_size:
            for processes in args.processes:
                options = script.parse_args([*flags, "--batch_size", str(size)])
                data = script.open_data(options, script.clean_pairs)
                rows = script.row_batches(data.sources, data.weights, options)
                # As on a GPU: padded to multiples of 8. No such device is needed, since nothing is moved to it.
                rank = SimpleNamespace(num_processes=processes, process_index=0, device=torch.device("xpu"))
                batches, found = script.make_batches(rows, model, 16_384, options, rank), []
                next(batches)
                for _ in range(args.batches):
                    tokenizer.seconds = tokenizer.waited = seconds["own"] = 0.0
                    started = time.thread_time()
                    next(batches)
                    total, texts = time.thread_time() - started, 2 * size / processes
                    whole, own = (total - seconds["own"]) / size, (seconds["own"] - tokenizer.waited) / texts
                    found.append((whole * 1e6, own * 1e6, tokenizer.seconds / texts * 1e6))
                whole, own, apart = map(statistics.median, zip(*found))
                thread = whole * size + own * texts  # µs of this thread for a batch
                result = {"batch_size": size, "processes": processes, "whole_batch_us_a_row": whole,
                          "own_us_a_text": own, "tokenizing_us_a_text": apart,
                          "texts_per_second": texts / thread * 1e6,
                          "rows_per_second_of_all": size / thread * 1e6}  # fmt: skip
                results.append(result)
                print(f"| {size:,} | {processes} | {whole:.2f} | {own:.1f} | {apart:.1f} "
                      f"| {result['texts_per_second']:,.0f} | {result['rows_per_second_of_all']:,.0f} |")  # fmt: skip
    Path(args.output).write_text(json.dumps({"script": str(args.script), "results": results}, indent=1))


if __name__ == "__main__":
    main()
