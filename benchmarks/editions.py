"""Training speed of this checkout against another checkout of the project, in turns: same flags, rows and models.

    git worktree add ../other 194b52d
    python benchmarks/editions.py ../other MODEL_FOLDER [--rounds 5] [--processes 2]

Requires the demo corpus (prepare_corpus.py). Trains the demo's static model, MODEL_FOLDER as a bi-encoder and
MODEL_FOLDER as a cross-encoder, each in a process of its own. A rate is rows over the seconds of all steps but the
first; a ratio is of two runs that followed each other, of which the median is printed. Without dropout, and at a
constant rate, so losses and gradient norms can be compared: the largest relative difference is printed too. Memory is
the peak of a process (one process only). Writes editions.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = "--train_data data/python_code/train/packages-*.parquet --columns docstring code"  # one source: the same rows
CASES = {  # {name: (script, flags)}
    "demo, static": ("train_bi_encoder.py", "STATIC --batch_size 2048 --learning_rate 5e-3"),
    "bi-encoder, 64 tokens": ("train_bi_encoder.py", "MODEL --batch_size 64 --max_length 64 --dropout 0"),
    "bi-encoder": ("train_bi_encoder.py", "MODEL --batch_size 64 --max_length 256 --dropout 0"),
    "cross-encoder": ("train_cross_encoder.py", "MODEL --batch_size 16 --max_length 256 --dropout 0"),
}


def train(folder, script, flags, processes):
    """Return (rows a second, peak memory in GB, losses and gradient norms) of a run."""
    with tempfile.TemporaryDirectory() as output:
        more = ["--eval_rows", "0", "--logging_steps", "1", "--save_steps", "0", "--output_dir", output]
        more += ["--lr_scheduler_type", "constant", "--warmup_ratio", "0"]  # the warmup of 626a684 began at 1 / W
        launcher = [sys.executable]
        if processes > 1:
            config = ["--config_file", ROOT / "accelerate_configs/multi_cpu.yaml", "--num_processes", str(processes)]
            launcher += ["-m", "accelerate.commands.launch", *config, "--main_process_port", "0"]
        command = [*launcher, Path(folder).resolve() / script, *ROWS.split(), *flags, *more]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"{command}: status {status}")
        lines = [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    seconds = [1 / line["rows_per_second"] for line in lines[1:]]  # of a row; all steps have as many
    numbers = [line[name] for name in ("loss", "grad_norm") for line in lines]
    return len(seconds) / sum(seconds), usage.ru_maxrss / 1e6, numbers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", help="folder of another checkout")
    parser.add_argument("model", help="folder of a sentence-transformers model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--max_steps", type=int, help="of each run; default: 25 of the static model, 5 of others")
    parser.add_argument("--only", nargs="+", default=list(CASES), help="cases to run")
    args = parser.parse_args()
    results = {}
    print("| case | rows/s, other | rows/s, this | this / other | GB, other | GB, this | difference |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in args.only:
        script, flags = CASES[name]
        flags = flags.replace("STATIC", "--model_name_or_path data/python_code/bi_encoder")
        steps = args.max_steps or (25 if "STATIC" in CASES[name][1] else 5)
        flags = flags.replace("MODEL", f"--model_name_or_path {Path(args.model).resolve()}").split()
        flags += ["--max_steps", str(steps)]
        rates = []
        for number in range(args.rounds):
            order = (args.other, ROOT) if number % 2 == 0 else (ROOT, args.other)
            found = {folder: train(folder, script, flags, args.processes) for folder in order}
            rates.append((found[args.other][0], found[ROOT][0]))
        pairs = zip(found[args.other][2], found[ROOT][2])
        memory = f"{found[args.other][1]:.2f} | {found[ROOT][1]:.2f}"
        difference = max(abs(one - two) / one for one, two in pairs)
        other, this = (statistics.median(column) for column in zip(*rates))
        ratio = statistics.median(two / one for one, two in rates)
        results[name] = {"rates": rates, "ratio": ratio, "difference": difference}
        print(f"| {name} | {other:,.0f} | {this:,.0f} | {ratio:.3f} | {memory} | {difference:.1e} |", flush=True)
    Path("editions.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
