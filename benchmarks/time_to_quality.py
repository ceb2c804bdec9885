"""Time to quality against SentenceTransformerTrainer: same rows, model, batch, steps and rates; seconds and nDCG@10.

    python benchmarks/time_to_quality.py MODEL_FOLDER mined.jsonl --beir BEIR_FOLDER \\
        --columns query positive negative_1 --learning_rate 5e-5 --num_train_epochs 1 --max_length 128 \\
        --peer '{"mini_batch_num_tokens": 2048}' --same_order --seeds 0 1 2 3 4 5 6 7
    python benchmarks/time_to_quality.py data/python_code/bi_encoder 'data/python_code/train/*.parquet' \\
        --pairs 'data/python_code/heldout/*.parquet' --batch_size 2048 --learning_rate 5e-3 --num_train_epochs 4

For each seed, both sides train in turns, in processes of their own; then eval_incremental.py measures both models.
Seconds are those of the whole command, imports and saving included. Prints a line for each seed, then the mean of the
differences and its interval over seeds. A seed whose result is in --folder is not run again.
--peer: options of the trainer's cached loss; without it, its plain loss
--same_order: the seed draws one order of the rows, in which both sides read them; without it, each draws its own
--eval_precision bf16: measure both models in bfloat16, in half the time
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

from scipy.stats import ttest_1samp

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
    order = {"batch_sampler": in_order} if args.same_order else {}
    settings = SentenceTransformerTrainingArguments(
        args.folder, max_steps=args.steps, per_device_train_batch_size=args.batch_size, use_cpu=True, report_to="none",
        learning_rate=args.learning_rate, warmup_ratio=0.1, weight_decay=0.01, save_strategy="no", seed=args.side,
        **order,
    )  # fmt: skip
    SentenceTransformerTrainer(model, settings, train_dataset=read_rows(args), loss=loss).train()
    model.save_pretrained(f"{args.folder}/model")


def in_order(dataset, batch_size, drop_last, **_):
    """Return the batches of a dataset in its own order, as a `batch_sampler` of the trainer."""
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from torch.utils.data import SequentialSampler

    return DefaultBatchSampler(SequentialSampler(dataset), batch_size=batch_size, drop_last=drop_last)


def read_rows(args):
    from datasets import load_dataset

    kind = "parquet" if args.source.endswith(".parquet") else "json"
    return load_dataset(kind, data_files=args.source, split="train").select_columns(args.columns)


def timed(*command, **environment):
    """Return the seconds of a command; environment: further variables."""
    start = time.perf_counter()
    command = [sys.executable, *map(str, command)]
    subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, **environment})
    return time.perf_counter() - start


def run_seed(args, seed, steps):
    """Train both sides and measure both models; return their seconds and nDCG@10, ours first."""
    folder = Path(args.folder, str(seed))
    source, ordered = args.source, []
    if args.same_order:
        source, ordered = folder / "rows.jsonl", ["--same_order"]
        read_rows(args).shuffle(seed=seed).to_json(source)
    common = ["--batch_size", args.batch_size, "--learning_rate", args.learning_rate]
    common += ["--max_length", args.max_length] if args.max_length else []
    own = ["--model_name_or_path", args.model, "--train_data", source, "--columns", *args.columns]
    own += ["--shuffle_buffer", 0] if args.same_order else []
    own += ["--max_steps", steps, "--eval_rows", 0, "--seed", seed, "--output_dir", folder / "evenstep"]
    seconds = [timed(ROOT / "train_bi_encoder.py", *common, *own)]
    options = ["--columns", *args.columns, "--peer", args.peer, "--side", seed, "--steps", steps, *ordered]
    seconds.append(timed(__file__, args.model, source, *common, *options, "--folder", folder / "trainer"))
    models = [folder / "trainer/model", folder / "evenstep/model"]
    test = ["--beir", args.beir] if args.beir else ["--pairs", args.pairs, "--columns", *args.columns[:2]]
    test += ["--max_length", args.max_length] if args.max_length else []
    test += ["--model_name_or_path", *models, "--cache_dir", folder / "cache", "--output_dir", folder / "eval"]
    timed(ROOT / "eval_incremental.py", *test, ACCELERATE_MIXED_PRECISION=args.eval_precision)
    results = json.loads((folder / "eval/metrics.json").read_text())["results"]
    peer, ours = (result["metrics"]["nDCG@10"] for result in results)
    return {"seed": seed, "seconds": seconds, "nDCG@10": [ours, peer]}


def print_table(found, steps):
    """Print a line for each seed, and the mean difference with its 95 % interval over seeds (Student's t)."""
    print("| seed | seconds, ours | trainer | times as fast | nDCG@10, ours | trainer | difference |")
    print("|---" * 7 + "|")
    for run in found:
        ours, peer = run["seconds"]
        cells = ["{mean:.4f} [{low:.4f}, {high:.4f}]".format(**measure) for measure in run["nDCG@10"]]
        print(f"| {run['seed']} | {ours:.0f} | {peer:.0f} | {peer / ours:.2f}x | {' | '.join(cells)} |", end="")
        print(" {difference:+.4f}, p = {p:.2f} |".format(**run["nDCG@10"][0]))
    print(f"{steps} steps; median {statistics.median(r['seconds'][1] / r['seconds'][0] for r in found):.2f}x")
    differences = [ours["mean"] - peer["mean"] for ours, peer in (run["nDCG@10"] for run in found)]
    if len(found) > 1:
        test = ttest_1samp(differences, 0)
        low, high = test.confidence_interval(0.95)
        mean = statistics.mean(differences)
        print(f"mean difference of {len(found)} seeds {mean:+.4f} [{low:+.4f}, {high:+.4f}], p = {test.pvalue:.2f}")


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
    parser.add_argument("--same_order", action="store_true")
    parser.add_argument("--eval_precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--folder", default="time_to_quality")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)  # the seed of a peer's process
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.side is not None:
        return train_peer(args)

    steps = math.ceil(args.num_train_epochs * len(read_rows(args)) / args.batch_size)
    found = []
    for seed in args.seeds:
        result = Path(args.folder, str(seed), "result.json")
        if not result.exists():
            run = run_seed(args, seed, steps)
            result.write_text(json.dumps(run))
        found.append(json.loads(result.read_text()))
    print_table(found, steps)


if __name__ == "__main__":
    main()
