"""Training speed of the templates against the trainers, in turns: same model, rows, batches and losses.

    python benchmarks/templates.py MODEL_FOLDER PAIRS [--rounds 3] [--processes 1 2] [--steps 4]

PAIRS is a Parquet file with the columns docstring and code, such as one of the demo's corpus, read in its order. Texts
have at most 256 tokens; a batch has 64 pairs, of the cross-encoder 16 rows of 5 documents. A rate is rows over the
seconds of all steps but the first; ratios are of two runs that followed each other, of which the median is printed.
That the losses are equal is a test (tests/test_templates.py). Writes templates.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = {"bi_encoder": "--batch_size 64", "cross_encoder": "--batch_size 16 --num_negatives 4"}


def train(script, flags, processes):
    """Return the rows a second of a run."""
    launcher = [sys.executable]
    if processes > 1:
        config = ["--config_file", ROOT / "accelerate_configs/multi_cpu.yaml", "--num_processes", str(processes)]
        launcher += ["-m", "accelerate.commands.launch", *config, "--main_process_port", "0"]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launcher, script, *flags, "--output_dir", f"{folder}/out"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = [json.loads(line) for line in Path(folder, "out/metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    seconds = [1 / line["rows_per_second"] for line in lines[1:]]  # of a row; all steps have as many
    return len(seconds) / sum(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a sentence-transformers model")
    parser.add_argument("pairs", help="Parquet file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    results = {}
    print("| template | processes | rows/s, trainer | rows/s, template | ratio |")
    print("|---|---|---|---|---|", flush=True)
    for kind, own in KINDS.items():
        common = f"--model_name_or_path {Path(args.model).resolve()} --train_data {Path(args.pairs).resolve()} {own}"
        common += f" --columns docstring code --max_length 256 --max_steps {args.steps} --shuffle_buffer 0"
        flags = {
            ROOT / f"train_{kind}.py": f"{common} --eval_rows 0 --logging_steps 1 --save_steps 0".split(),
            ROOT / f"templates/{kind}.py": f"{common} --eval_rows 0 --eval_steps 1000".split(),
        }
        for processes in args.processes:
            rates = []
            for number in range(args.rounds):
                order = list(flags) if number % 2 == 0 else list(reversed(flags))
                found = {script: train(script, flags[script], processes) for script in order}
                rates.append([found[script] for script in flags])
            trainer, template = (statistics.median(column) for column in zip(*rates))
            ratio = statistics.median(two / one for one, two in rates)
            results[f"{kind}, {processes}"] = {"rates": rates, "ratio": ratio}
            print(f"| {kind} | {processes} | {trainer:.2f} | {template:.2f} | {ratio:.3f} |", flush=True)
    Path("templates.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
