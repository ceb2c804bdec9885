"""This checkout against another checkout of the project, in turns: speed, and whether it computes the same.

    git worktree add ../sixth 5a70ed2
    python benchmarks/editions.py ../sixth MODEL_FOLDER --kind speed [--rounds 5] [--processes 2]
    python benchmarks/editions.py ../sixth MODEL_FOLDER --kind same --max_steps 20 [--processes 2]

Requires the demo corpus (prepare_corpus.py), of which it takes rows that share no text with another row: editions
differ in what they mask of equal texts. Each run is a launch of its own, without dropout and at a constant rate, so
that losses and gradient norms can be compared: the largest relative difference is printed. A rate is rows over the
seconds of all steps but the first; a ratio is of two runs that followed each other, of which the median is printed.
Memory is the peak of the main process. Writes editions.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[1]
ROWS = "data/python_code/train/packages-*.parquet"
STATIC = "--model_name_or_path data/python_code/bi_encoder --batch_size 2048 --learning_rate 5e-3"
LARGE = "--model_name_or_path MODEL --dropout 0 --batch_size"  # as many rows and tokens as measure speed
SMALL = "--model_name_or_path MODEL --dropout 0 --max_length 32 --micro_batch_tokens 512 --batch_size"
SPEED = {  # {name: (script, flags, steps)}
    "demo, static": ("train_bi_encoder.py", STATIC, 25),
    "bi-encoder, 64 tokens": ("train_bi_encoder.py", f"{LARGE} 64 --max_length 64", 5),
    "bi-encoder": ("train_bi_encoder.py", f"{LARGE} 64 --max_length 256", 5),
    "cross-encoder": ("train_cross_encoder.py", f"{LARGE} 16 --max_length 256", 5),
}
MIXTURE = [  # of three tasks, with losses, columns and prompts of their own
    '{"path":"FOLDER/rows.parquet","weight":0.5}',
    '{"path":"FOLDER/scored.parquet","label_column":["score"],"loss":"LOSS","query_prompt":"alike:","weight":0.3}',
    '{"path":"FOLDER/triplets.parquet","columns":["docstring","code","wrong"],"weight":0.2}',
]
MIXED = f"--mix_by batch --train_data {' '.join(MIXTURE)}"
SAME = {
    "demo, static": ("train_bi_encoder.py", STATIC, 20),
    "graphs kept": ("train_bi_encoder.py", f"{SMALL} 32 --grad_cache false", 20),
    "gradient cache": ("train_bi_encoder.py", f"{SMALL} 32 --grad_cache true", 20),
    "streaming": ("train_bi_encoder.py", f"{SMALL} 32 --streaming", 20),
    "symmetric, matryoshka": (
        "train_bi_encoder.py",
        f'{SMALL} 32 --loss_kwargs {{"symmetric":true}} --matryoshka_dims 384 64',
        20,
    ),
    "accumulated, sorted": (
        "train_bi_encoder.py",
        f"{SMALL} 16 --gradient_accumulation_steps 2 --length_window 4",
        20,
    ),
    "library's loss": ("train_bi_encoder.py", f"{SMALL} 32 --loss MultipleNegativesRankingLoss", 20),
    "checkpointing": ("train_bi_encoder.py", f"{SMALL} 16 --gradient_checkpointing", 20),
    "cross-encoder": ("train_cross_encoder.py", f"{SMALL} 8 --num_negatives 3", 20),
    "cross-encoder, cached": ("train_cross_encoder.py", f"{SMALL} 8 --num_negatives 3 --grad_cache true", 20),
    "cross-encoder, bce": ("train_cross_encoder.py", f"{SMALL} 8 --num_negatives 1 --loss bce", 20),
    "mixture": ("train_bi_encoder.py", f"{SMALL} 16 {MIXED.replace('LOSS', 'CoSENTLoss')}", 20),
    "cross-encoder, mixture": ("train_cross_encoder.py", f"{SMALL} 8 {MIXED.replace('LOSS', 'mse')}", 20),
}


def write_rows(folder):
    """Write the rows of the demo's first files of packages, without those of which another row has a text; the same
    with scores; and with the code of the row before as a negative."""
    rows = pd.concat([pd.read_parquet(file) for file in sorted(ROOT.glob(ROWS))])
    for column in ("docstring", "code"):
        folded = rows[column].str.split().str.join(" ").str.casefold()  # the seventh edition takes these as equal
        rows = rows[~folded.duplicated(keep=False)]
    rows = rows[["docstring", "code"]].reset_index(drop=True)
    rows.to_parquet(f"{folder}/rows.parquet")
    rows.assign(score=rows.index % 6).to_parquet(f"{folder}/scored.parquet")
    rows.assign(wrong=rows["code"].shift(fill_value="pass")).to_parquet(f"{folder}/triplets.parquet")


def train(folder, script, flags, processes):
    """Return (rows a second, peak memory in GB, losses and gradient norms) of a run."""
    with tempfile.TemporaryDirectory() as output:
        more = ["--eval_rows", "0", "--logging_steps", "1", "--save_steps", "0", "--output_dir", output]
        more += ["--lr_scheduler_type", "constant", "--columns", "docstring", "code"]
        launcher = [sys.executable]
        if processes > 1:
            config = ["--config_file", ROOT / "accelerate_configs/multi_cpu.yaml", "--num_processes", str(processes)]
            launcher += ["-m", "accelerate.commands.launch", *config, "--main_process_port", "0"]
        command = [*launcher, Path(folder).resolve() / script, *flags, *more]
        with open(Path(output, "said"), "w") as said:
            process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)
            _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"{' '.join(map(str, command))}: status {status}\n{Path(output, 'said').read_text()[-2000:]}")
        lines = [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    seconds = [1 / line["rows_per_second"] for line in lines[1:]]  # of a row; all steps have as many
    numbers = [line[name] for name in ("loss", "grad_norm") for line in lines]
    return len(seconds) / sum(seconds), usage.ru_maxrss / 1e6, numbers


def compare(name, args, folder):
    """Run both sides of a case in turns; print its line, and return its results. folder: of write_rows."""
    script, flags, steps = (SPEED if args.kind == "speed" else SAME)[name]
    flags = flags.replace("MODEL", str(Path(args.model).resolve())).replace("FOLDER", folder).split()
    flags += ["--max_steps", str(args.max_steps or steps)]
    if "--train_data" not in flags:
        flags += ["--train_data", f"{folder}/rows.parquet"]
    rates = []
    for number in range(args.rounds):
        order = (args.other, ROOT) if number % 2 == 0 else (ROOT, args.other)
        found = {folder: train(folder, script, flags, args.processes) for folder in order}
        rates.append((found[args.other][0], found[ROOT][0]))
    pairs = zip(found[args.other][2], found[ROOT][2], strict=True)
    difference = max(abs(one - two) / abs(one) for one, two in pairs)
    other, this = (statistics.median(column) for column in zip(*rates))
    ratio = statistics.median(two / one for one, two in rates)
    memory = f"{found[args.other][1]:.2f} | {found[ROOT][1]:.2f}"
    print(f"| {name} | {other:,.4g} | {this:,.4g} | {ratio:.3f} | {memory} | {difference:.1e} |", flush=True)
    return {"rates": rates, "ratio": ratio, "difference": difference}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", help="folder of another checkout")
    parser.add_argument("model", help="folder of a sentence-transformers model")
    parser.add_argument("--kind", choices=["speed", "same"], default="speed", help="large steps, or many settings")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--max_steps", type=int, help="of each run; default: 25 of the static model, 5 or 20 of others"
    )
    parser.add_argument("--only", nargs="+", help="cases to run")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    results = {}
    print("| case | rows/s, other | rows/s, this | this / other | GB, other | GB, this | difference |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_rows(folder)
        for name in args.only or (SPEED if args.kind == "speed" else SAME):
            results[name] = compare(name, args, folder)
    Path("editions.json").write_text(json.dumps({"arguments": vars(args), "results": results}, indent=1))


if __name__ == "__main__":
    main()
