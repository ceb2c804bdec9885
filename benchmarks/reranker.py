"""The published reranker recipe (GooAQ's, binary cross-entropy) beside CrossEncoderTrainer: same rows, steps, model.

    python benchmarks/reranker.py MODEL_FOLDER BEIR_FOLDER RUN_FILE [--steps 40] [--num_negatives 5] [--rerank_k 50]

mine_negatives.py turns the first stage's RUN_FILE into labelled pairs, as training_gooaq_bce.py of
sentence-transformers does (--absolute_margin 0 adds its margin): batch 64, learning rate
2e-5, warmup 0.1, bce with pos_weight 5. Each side trains one epoch on the same STEPS x 64 of them in a process of its
own; both models then rerank the first documents of the same ranking. A collection without train judgments is split:
every other query (by id) is trained on, the others are tested. Seconds are those of all steps, without loading.
Finished parts are skipped, so that an interrupted call can be repeated. Writes FOLDER/reranker.json.
"""

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(log, command):
    """Run a command, its output going to a file."""
    with open(log, "w") as file:
        subprocess.run([sys.executable, *map(str, command)], stdout=file, stderr=file, check=True)


def split_queries(source, folder):
    """Write a collection with judgments to train on and to test on: links to the texts, and other qrels."""
    (folder / "qrels").mkdir(parents=True)
    for name in ("corpus.jsonl", "queries.jsonl"):
        (folder / name).symlink_to((source / name).resolve())
    with open(source / "qrels/test.tsv") as file:
        header, *rows = csv.reader(file, delimiter="\t")
    names = sorted({row[0] for row in rows})
    for split, chosen in (("train", set(names[::2])), ("test", set(names[1::2]))):
        lines = ["\t".join(row) for row in [header, *(row for row in rows if row[0] in chosen)]]
        (folder / f"qrels/{split}.tsv").write_text("\n".join(lines) + "\n")


def mine(args, beir, folder):
    """Write rows.jsonl: as many labelled pairs as both sides train on, in random order."""
    flags = ["--beir", beir, "--run", args.run, "--format", "labeled-pair", "--num_negatives", args.num_negatives]
    flags += ["--keep_same_id"] * args.keep_same_id
    flags += [] if args.absolute_margin is None else ["--absolute_margin", args.absolute_margin]
    command = [ROOT / "mine_negatives.py", *flags, "--output", folder / "mined.jsonl", "--overwrite"]
    run(folder / "mine.log", command)
    lines = (folder / "mined.jsonl").read_text().splitlines(keepends=True)
    count = args.steps * args.batch_size
    if len(lines) < count:
        raise SystemExit(f"error: {len(lines)} mined pairs are too few for --steps {args.steps}: see --num_negatives")
    random.Random(args.seed).shuffle(lines)
    (folder / "rows.jsonl").write_text("".join(lines[:count]))


def ours(args, folder):
    """Return (seconds, last losses) of train_cross_encoder.py."""
    output = folder / "ours"
    command = [ROOT / "train_cross_encoder.py", "--model_name_or_path", args.model, "--train_data",
               folder / "rows.jsonl", "--columns", "query", "document", "--label_column", "label", "--loss", "bce",
               "--loss_kwargs", json.dumps({"pos_weight": args.pos_weight}), "--batch_size", args.batch_size,
               "--learning_rate", 2e-5, "--warmup_ratio", 0.1, "--weight_decay", 0, "--max_length", args.max_length,
               "--seed", args.seed, "--eval_rows", 0, "--logging_steps", 1, "--save_steps", 0,
               "--output_dir", output]  # fmt: skip
    if not (output / "model").exists():
        run(folder / "ours.log", command)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return sum(args.batch_size / line["rows_per_second"] for line in lines), [line["loss"] for line in lines]


def peer(args, folder):
    """Return the same of CrossEncoderTrainer."""
    if not (folder / "peer.json").exists():
        run(folder / "peer.log", [__file__, args.model, args.beir, args.run, "--peer", *as_flags(args)])
    return json.loads((folder / "peer.json").read_text())


def as_flags(args):
    """Return the flags of this call that the peer's process needs."""
    names = ["folder", "batch_size", "max_length", "pos_weight", "seed"]
    return [word for name in names for word in (f"--{name}", getattr(args, name))]


def train_peer(args):
    """In a process of its own: train one epoch, save the model, and write peer.json."""
    import torch
    from datasets import load_dataset
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments, losses
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            self.end = time.perf_counter()

    torch.manual_seed(args.seed)  # of the new head, as in train_cross_encoder.py
    model = CrossEncoder(args.model, device="cpu", num_labels=1)
    model.max_seq_length = args.max_length
    settings = CrossEncoderTrainingArguments(
        str(args.folder / "peer"), num_train_epochs=1, per_device_train_batch_size=args.batch_size, use_cpu=True,
        learning_rate=2e-5, warmup_ratio=0.1, seed=args.seed, report_to="none", logging_steps=1, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    rows = load_dataset("json", data_files=str(args.folder / "rows.jsonl"), split="train")
    rows = rows.select_columns(["query", "document", "label"])
    clock = Clock()
    loss = losses.BinaryCrossEntropyLoss(model, pos_weight=torch.tensor(args.pos_weight))
    trainer = CrossEncoderTrainer(model, settings, train_dataset=rows, loss=loss, callbacks=[clock])
    trainer.train()
    model.save_pretrained(str(args.folder / "peer/model"))
    seen = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    (args.folder / "peer.json").write_text(json.dumps([clock.end - clock.start, seen]))


def evaluate(args, beir, folder, output, *flags):
    """Return the entries of metrics.json of an evaluation on the test queries."""
    common = ["--beir", beir, "--cache_dir", folder / "cache", "--metrics", "nDCG@10", "--output_dir", output]
    command = [ROOT / "eval_incremental.py", *common, *["--keep_same_id"] * args.keep_same_id, *flags]
    run(folder / f"{output.name}.log", command)
    return json.loads((output / "metrics.json").read_text())["results"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("beir", type=Path)
    parser.add_argument("run", help="TREC run file of the first stage, for queries to train on and to test")
    parser.add_argument(
        "--absolute_margin", type=float, help="of mine_negatives.py, which ranks positives by RUN_FILE"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--num_negatives", type=int, default=5, help="of a query; raise it if queries have many positives"
    )
    parser.add_argument("--pos_weight", type=float, default=5.0)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--rerank_k", type=int, default=50)
    parser.add_argument("--keep_same_id", action="store_true", help="ids of queries and documents coincide by chance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("reranker"))
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder = folder = args.folder.resolve()
    if args.peer:
        return train_peer(args)

    os.environ["HF_HUB_OFFLINE"] = "1"
    folder.mkdir(parents=True, exist_ok=True)
    beir = args.beir
    if not (beir / "qrels/train.tsv").exists():
        beir = folder / "beir"
        if not beir.exists():
            split_queries(args.beir, beir)
    if not (folder / "rows.jsonl").exists():
        mine(args, beir, folder)
    trained = {"ours": ours(args, folder), "peer": peer(args, folder)}
    rankings = [args.run]
    for name in trained:
        flags = ["--run", args.run, "--cross_encoder", folder / name / "model", "--rerank_k", args.rerank_k]
        *_, found = evaluate(args, beir, folder, folder / f"test_{name}", *flags)
        rankings.append(folder / f"test_{name}" / found["folder"] / "run.trec")
    measured = [
        entry["metrics"]["nDCG@10"] for entry in evaluate(args, beir, folder, folder / "test", "--run", *rankings)
    ]
    both = evaluate(args, beir, folder, folder / "between", "--run", *rankings[:0:-1])[-1]["metrics"]["nDCG@10"]
    sides = ["first stage", "train_cross_encoder.py", "CrossEncoderTrainer"]
    print("| ranked by | nDCG@10 | against the first stage | seconds of training | loss, last ten steps |")
    print("|---|---|---|---|---|")
    for side, found, (seconds, losses) in zip(sides, measured, [(None, None), *trained.values()]):
        cells = ["{mean:.4f} [{low:.4f}, {high:.4f}]".format(**found), "", "", ""]
        if seconds:
            loss = statistics.mean(losses[-10:])
            cells[1:] = ["{difference:+.4f}, p = {p:.4f}".format(**found), f"{seconds:.1f}", f"{loss:.4f}"]
        print(f"| {side} | {' | '.join(cells)} |")
    print("ours against the peer: {difference:+.4f}, p = {p:.4f}".format(**both))
    record = {"arguments": {name: str(value) for name, value in vars(args).items()}, "measured": measured}
    record |= {"trained": trained, "ours_against_peer": both}
    (folder / "reranker.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
