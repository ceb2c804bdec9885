"""What a second core brings: each script on one process of one thread on one core, and on two on two cores, in turns.

    python benchmarks/scaling.py MODEL_FOLDER SOURCE [--columns docstring code] [--steps 5] [--rounds 3]

The trainers do the same batches on both sides (rates over all steps but the first, losses beside them), the evaluator
encodes the same texts. The last row is the limit of the machine: bare forward and backward passes of the model, in one
process, and in two independent ones. Ratios are within a round, medians over the rounds. Writes
scaling.json.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def cores(count):
    """What keeps a command, its threads for reading and tokenizing included, on the first `count` cores."""
    return functools.partial(os.sched_setaffinity, 0, sorted(os.sched_getaffinity(0))[:count])


def launch(script, flags, processes):
    """Run a script on so many processes of one thread each, on as many cores."""
    config = ROOT / "accelerate_configs" / ("cpu.yaml" if processes == 1 else "multi_cpu.yaml")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", 0,
               "--config_file", config, "--num_processes", processes, ROOT / script, *flags]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = list(map(str, command))
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, preexec_fn=cores(processes))


def train(script, flags, processes, folder):
    """(rows a second, mean loss) of a trainer."""
    launch(script, [*flags, "--output_dir", folder], processes)
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()][1:]
    rate = len(lines) / sum(1 / line["rows_per_second"] for line in lines)
    return rate, statistics.mean(line["loss"] for line in lines)


def encode(flags, processes, folder):
    """(texts a second, nDCG@10) of the evaluator with an empty cache."""
    launch("eval_incremental.py", [*flags, "--cache_dir", f"{folder}/cache", "--output_dir", folder], processes)
    (seen,) = json.loads((Path(folder) / "metrics.json").read_text())["results"]
    return seen["texts"]["encoded"] / seen["seconds"], seen["metrics"]["nDCG@10"]["mean"]


def bare_loop(folder):
    """In a process of its own: print the texts a second of 15 s of bare passes over 2,048 tokens."""
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu").float().train()
    done, started = -1, 0.0
    while done < 0 or time.perf_counter() - started < 15:
        ids = torch.randint(1000, 20_000, (12, 170))
        model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"].sum().backward()
        done += 1
        started = started if done else time.perf_counter()  # the first pass has warmed up
    print(12 * done / (time.perf_counter() - started))


def bare(model, processes):
    """(texts a second, 0) of so many processes at once that share nothing."""
    command = [sys.executable, __file__, model, "", "--bare"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pinned = {"env": environment, "preexec_fn": cores(processes)}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, **pinned) for _ in range(processes)]
    return sum(float(process.communicate()[0]) for process in both), 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("source")
    parser.add_argument("--columns", nargs="+", default=["docstring", "code"])
    parser.add_argument("--texts", type=int, default=1000, help="pairs that the evaluator encodes")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="scaling.json")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        return bare_loop(args.model)

    import pyarrow.parquet as pq

    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        pairs = f"{folder}/pairs.parquet"
        pq.write_table(pq.read_table(args.source, columns=args.columns).slice(0, args.texts), pairs)
        common = ["--model_name_or_path", args.model, "--max_length", 256]
        steps = ["--train_data", args.source, "--columns", *args.columns, "--eval_rows", 0, "--save_steps", 0,
                 "--logging_steps", 1, "--max_steps", args.steps, *common]  # fmt: skip
        bi, cross = [*steps, "--batch_size", 64], [*steps, "--batch_size", 24, "--num_negatives", 1]
        texts = ["--pairs", pairs, "--columns", *args.columns, "--corpus_chunk_size", 32, *common]
        sides = {
            "train_bi_encoder.py, 64 pairs": lambda n, out: train("train_bi_encoder.py", bi, n, out),
            "train_cross_encoder.py, 24 x 2 pairs": lambda n, out: train("train_cross_encoder.py", cross, n, out),
            f"eval_incremental.py, {args.texts} pairs": lambda n, out: encode(texts, n, out),
            "bare passes, nothing shared": lambda n, out: bare(args.model, n),
        }
        runs = {name: [] for name in sides}
        for turn in range(args.rounds):
            for number, (name, run) in enumerate(sides.items()):
                runs[name].append([run(n, f"{folder}/{turn}-{number}-{n}") for n in (1, 2)])
                one, two = runs[name][-1]
                print(f"round {turn + 1}, {name}: {one[0]:.2f}, {two[0]:.2f} a second", file=sys.stderr)
    print("| script | a second, 1 process | 2 processes | ratio | loss, or nDCG@10 |\n|---|---|---|---|---|")
    for name, measured in runs.items():
        one, two = (statistics.median(pair[side][0] for pair in measured) for side in (0, 1))
        ratio = statistics.median(pair[1][0] / pair[0][0] for pair in measured)
        print(f"| {name} | {one:.2f} | {two:.2f} | {ratio:.2f} | {measured[0][0][1]:.5f}, {measured[0][1][1]:.5f} |")
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
