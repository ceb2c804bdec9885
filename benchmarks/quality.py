"""What each part of training brings on a small BEIR collection: nDCG@10 on test, by seed, one part at a time.

    python benchmarks/quality.py MODEL_FOLDER BEIR_FOLDER [--seeds 0 1 2] [--only lists mask] [--folder quality]

Trains on nine tenths of the train queries. The others select the best checkpoint, once an epoch, by ranking the
documents judged for them and the ten best of each. Negatives have ranks 0 to 49 by the initial model and score at
least 5 % below the positive. Then trains a cross-encoder on the same rows to rerank the first documents of `mask`. If
the best evaluation is not the last, both models are measured. Finished steps are skipped, so that an interrupted
call can be repeated. Writes FOLDER/quality.json after each run.
"""

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
MASK = ["--loss_kwargs", '{"mask_margin": 0.1}']
VARIANTS = {  # name: (rows, flags)
    "in_batch": ("fixed", ["--num_negatives", 0]),
    "negative": ("fixed", ["--num_negatives", 1]),
    "lists": ("lists", ["--num_negatives", 1]),
    "two": ("lists", ["--num_negatives", 2]),
    "mask": ("lists", ["--num_negatives", 2, *MASK]),
    "symmetric": ("lists", ["--num_negatives", 2, "--loss_kwargs", '{"symmetric": true}']),
}
MEASURES = {"train_bi_encoder.py": "dev_cosine_ndcg@10", "train_cross_encoder.py": "dev_ndcg@10"}


def run(log, script, *flags, precision="no"):
    """Run a script of the project, its output going to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        subprocess.run([sys.executable, ROOT / script, *map(str, flags)], stdout=file, stderr=file, check=True,
                       env={**os.environ, "ACCELERATE_MIXED_PRECISION": precision})  # fmt: skip


def write_jsonl(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def prepare(args, folder):
    """Mine negatives, and write lists.jsonl, fixed.jsonl (the first negative of each list) and dev/, a collection."""
    if (folder / "fixed.jsonl").exists():
        return
    options = ["--beir", args.beir, "--cache_dir", folder / "cache", "--model_name_or_path", args.model]
    ranked = ["--split", "train", "--top_k", 200, "--max_length", args.eval_length]
    run(folder / "logs/rank.log", "eval_incremental.py", *options, *ranked, "--output_dir", folder / "train")
    rules = ["--range_max", 50, "--relative_margin", 0.05, "--sampling_strategy", "random", "--num_negatives", 20]
    runs = ["--run", folder / "train/run.trec"]
    mined = ["--format", "labeled-list", "--output", folder / "mined.jsonl", "--overwrite"]
    run(folder / "logs/mine.log", "mine_negatives.py", "--beir", args.beir, *runs, *rules, *mined)

    queries, documents = (
        {record["_id"]: record for record in map(json.loads, Path(args.beir, name).read_text().splitlines())}
        for name in ("queries.jsonl", "corpus.jsonl")
    )
    judged, ranked = defaultdict(list), defaultdict(list)
    with open(Path(args.beir, "qrels/train.tsv")) as file:
        for row in csv.DictReader(file, delimiter="\t"):
            judged[row["query-id"]].append(row)
    for line in (folder / "train/run.trec").read_text().splitlines():
        query, _, document, *_ = line.split()
        ranked[query].append(document)
    names = sorted(judged)
    random.Random(0).shuffle(names)
    names = names[: len(names) // 10]
    held_out = {queries[name]["text"] for name in names}
    kept = {row["corpus-id"] for name in names for row in judged[name]} | {d for n in names for d in ranked[n][:10]}
    write_jsonl(folder / "dev/corpus.jsonl", (documents[name] for name in sorted(kept)))
    write_jsonl(folder / "dev/queries.jsonl", (queries[name] for name in names))
    (folder / "dev/qrels").mkdir(exist_ok=True)
    lines = ("\t".join(row.values()) for name in names for row in judged[name])
    (folder / "dev/qrels/test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")
    rows = map(json.loads, (folder / "mined.jsonl").read_text().splitlines())
    rows = [row for row in rows if row["query"] not in held_out]
    write_jsonl(folder / "lists.jsonl", rows)
    write_jsonl(folder / "fixed.jsonl", ({**row, "documents": row["documents"][:2]} for row in rows))


def evaluate(args, folder, model, name, *more):
    """Return (nDCG@10, its interval) of a model on test; its vectors are not kept."""
    output = folder / "runs" / name / "test"
    if not (output / "metrics.json").exists():
        options = ["--beir", args.beir, "--max_length", args.eval_length, "--model_name_or_path", model]
        run(folder / f"logs/{name}.test.log", "eval_incremental.py", *options, *more, "--output_dir", output)
    found = json.loads((output / "metrics.json").read_text())["results"][-1]["metrics"]["nDCG@10"]
    return found["mean"], found["low"], found["high"]


def train(args, folder, script, name, seed, rows, *flags):
    """Train, unless it was done before; return the folders of the best model and, if that is another one, the last."""
    output = folder / "runs" / name
    flags = [args.model if flag == "MODEL" else flag for flag in flags]
    common = ["--model_name_or_path", args.model, "--train_data", folder / f"{rows}.jsonl", "--max_length", 128,
              "--columns", "query", "documents", "--learning_rate", 5e-5, "--eval_rows", 0, "--seed", seed,
              "--eval_beir", folder / "dev", "--metric_for_best_model", MEASURES[script],
              "--output_dir", output, "--resume"]  # fmt: skip
    if not (output / "model").exists():
        run(folder / f"logs/{name}.log", script, *common, *flags, precision=args.mixed_precision)
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    measure = MEASURES[script]
    measured = {record["step"]: record[measure] for record in records if record["step"] and measure in record}
    last = output / f"checkpoints/step_{max(measured):08}"
    return [output / "model", *([last] if measured[max(measured)] < max(measured.values()) else [])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("beir")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[*VARIANTS, "reranked"], choices=[*VARIANTS, "reranked"])
    parser.add_argument("--eval_length", type=int, default=256)
    parser.add_argument("--rerank_k", type=int, default=20, help="documents of a query that the cross-encoder reranks")
    parser.add_argument("--folder", type=Path, default=Path("quality"))
    parser.add_argument("--mixed_precision", default="no", choices=["no", "bf16"], help="of training")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder, found = args.folder.resolve(), {}
    args.model, args.beir = map(os.path.abspath, (args.model, args.beir))
    prepare(args, folder)
    cache = ["--cache_dir", folder / "cache"]
    found["as it is"] = [evaluate(args, folder, args.model, "base", *cache)]
    epoch = len((folder / "lists.jsonl").read_text().splitlines()) / 64
    for name in args.only:
        for seed in args.seeds:
            if name == "reranked":
                flags = ["--batch_size", 32, "--num_negatives", 7, "--num_train_epochs", 3]
                flags += ["--eval_steps", int(2 * epoch), "--eval_rerank_k", args.rerank_k]
                teacher, *_ = train(args, folder, "train_cross_encoder.py", f"reranker.{seed}", seed, "lists", *flags)
                more = ["--cross_encoder", teacher, "--rerank_k", args.rerank_k]
                models = [folder / f"runs/mask.{seed}/model"]
            else:
                rows, flags = VARIANTS[name]
                flags = ["--batch_size", 64, "--num_train_epochs", 4, "--eval_steps", int(epoch), *flags]
                models, more = train(args, folder, "train_bi_encoder.py", f"{name}.{seed}", seed, rows, *flags), []
            for label, model in zip((name, f"{name}, last evaluation"), models):
                result = evaluate(args, folder, model, f"{label}.{seed}", *more)
                found.setdefault(label, []).append(result)
                (folder / "quality.json").write_text(json.dumps(found, indent=1))
    print("| trained with | nDCG@10 by seed | mean |\n|---|---|---|")
    for name, results in found.items():
        cells = ", ".join("{:.3f} [{:.3f}, {:.3f}]".format(*result) for result in results)
        print(f"| {name} | {cells} | {statistics.mean(mean for mean, *_ in results):.3f} |")


if __name__ == "__main__":
    main()
