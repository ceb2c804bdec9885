"""Time to quality against SentenceTransformerTrainer: same rows, model, batch, steps and rates; seconds and nDCG@10.

    python benchmarks/time_to_quality.py MODEL_FOLDER mined.jsonl --beir BEIR_FOLDER \\
        --columns query positive negative_1 --learning_rate 5e-5 --num_train_epochs 1 --max_length 128 \\
        --peer '{"mini_batch_num_tokens": 2048}'
    python benchmarks/time_to_quality.py data/python_code/bi_encoder 'data/python_code/train/*.parquet' \\
        --pairs 'data/python_code/heldout/*.parquet' --batch_size 2048 --learning_rate 5e-3 --num_train_epochs 4

For each seed, both sides train in turns, in processes of their own; then eval_incremental.py measures both models.
Seconds are those of the whole command, imports and saving included. --peer: options of the trainer's cached loss;
without it, its plain loss. Writes time_to_quality.json.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def train_peer(args):
    """In a process of its own: train as sentence-transformers' documentation does."""
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses

    model = SentenceTransformer(args.model, device="cpu")
    if args.max_length:
        model.max_seq_length = args.max_length
    loss = losses.MultipleNegativesRankingLoss(model)
    if args.peer:
        loss = losses.CachedMultipleNegativesRankingLoss(model, **json.loads(args.peer))
    settings = SentenceTransformerTrainingArguments(
        args.folder, max_steps=args.steps, per_device_train_batch_size=args.batch_size, use_cpu=True, report_to="none",
        learning_rate=args.learning_rate, warmup_ratio=0.1, weight_decay=0.01, save_strategy="no", seed=args.side,
    )  # fmt: skip
    SentenceTransformerTrainer(model, settings, train_dataset=read_rows(args), loss=loss).train()
    model.save_pretrained(f"{args.folder}/model")


def read_rows(args):
    from datasets import load_dataset

    kind = "parquet" if args.source.endswith(".parquet") else "json"
    return load_dataset(kind, data_files=args.source, split="train").select_columns(args.columns)


def timed(*command):
    """Return the seconds of a command."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *map(str, command)], check=True, stdout=sys.stderr)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("source")
    parser.add_argument("--columns", nargs="+", default=["docstring", "code"])
    parser.add_argument("--beir")
    parser.add_argument("--pairs")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--num_train_epochs", type=float, default=1)
    parser.add_argument("--max_length", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--peer", default="")
    parser.add_argument("--folder", default="time_to_quality")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)  # the seed of a peer's process
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.side is not None:
        return train_peer(args)

    steps = math.ceil(args.num_train_epochs * len(read_rows(args)) / args.batch_size)
    common = ["--batch_size", args.batch_size, "--learning_rate", args.learning_rate]
    common += ["--max_length", args.max_length] if args.max_length else []
    test = ["--beir", args.beir] if args.beir else ["--pairs", args.pairs]
    test += ["--max_length", args.max_length] if args.max_length else []
    found = []
    for seed in args.seeds:
        folder = Path(args.folder, str(seed))
        own = ["--model_name_or_path", args.model, "--train_data", args.source, "--columns", *args.columns]
        own += ["--max_steps", steps, "--eval_rows", 0, "--seed", seed, "--output_dir", folder / "evenstep"]
        seconds = [timed(ROOT / "train_bi_encoder.py", *common, *own)]
        options = ["--columns", *args.columns, "--peer", args.peer, "--side", seed, "--steps", steps]
        seconds.append(timed(__file__, args.model, args.source, *common, *options, "--folder", folder / "trainer"))
        models = [folder / "trainer/model", folder / "evenstep/model"]
        where = ["--cache_dir", folder / "cache", "--output_dir", folder / "eval"]
        timed(ROOT / "eval_incremental.py", "--model_name_or_path", *models, *test, *where)
        results = json.loads((folder / "eval/metrics.json").read_text())["results"]
        peer, ours = (result["metrics"]["nDCG@10"] for result in results)
        found.append({"seed": seed, "seconds": seconds, "nDCG@10": [ours, peer]})
        Path(args.folder, "time_to_quality.json").write_text(json.dumps({"arguments": vars(args), "runs": found}))
    print("| seed | seconds, ours | trainer | times as fast | nDCG@10, ours | trainer | difference |")
    print("|---" * 7 + "|")
    for run in found:
        (ours, peer), cells = (
            run["seconds"],
            ["{mean:.4f} [{low:.4f}, {high:.4f}]".format(**m) for m in run["nDCG@10"]],
        )
        print(f"| {run['seed']} | {ours:.0f} | {peer:.0f} | {peer / ours:.2f}x | {' | '.join(cells)} |", end="")
        print(" {difference:+.4f}, p = {p:.2f} |".format(**run["nDCG@10"][0]))
    print(f"{steps} steps; median {statistics.median(r['seconds'][1] / r['seconds'][0] for r in found):.2f}x")


if __name__ == "__main__":
    main()
