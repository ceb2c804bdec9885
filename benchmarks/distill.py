"""Distillation of three kinds of teacher scores: held-out MRR@10 with the teacher's default temperature and with 1.

    python benchmarks/distill.py MODEL_FOLDER [--only kl] [--steps 24] [--reranker_steps 60] [--folder distill]

The teacher is MODEL_FOLDER, all-MiniLM-L6-v2: its cosines of docstrings and functions of the standard library, the
same as logits (20 times the cosine) and as probabilities (the sigmoid of the logit less the mean logit). The student
of train_bi_encoder.py is the same model with noise added to its weights; that of train_cross_encoder.py its first two
layers, trained to rerank. Held out are 60 docstrings: the bi-encoder searches their functions, the cross-encoder ranks
the right one among the nine others that the teacher ranks best. Finished runs are skipped, so that an interrupted call
can be repeated. Writes FOLDER/distill.json.
"""

import argparse
import ast
import importlib
import json
import math
import os
import random
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = ["argparse", "asyncio", "collections", "difflib", "email", "logging", "pathlib", "tarfile", "turtle",
           "zipfile"]  # fmt: skip
HELD_OUT = 60
NOISE = 0.3  # standard deviations of each weight matrix
SCRIPTS = ["train_bi_encoder", "train_cross_encoder"]
TEMPERATURES = {"1": {"teacher_temperature": 1}, "default": {}}


def read_pairs():
    """Return (docstring, function without it) of documented functions, in an order of their own."""
    pairs = {}
    for name in MODULES:
        tree = ast.parse(Path(importlib.import_module(name).__file__).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                node.body = node.body[1:] or [ast.Pass()]
                pairs.setdefault(" ".join(text.split("\n\n")[0].split()), ast.unparse(node)[:1500])
    pairs = sorted(pairs.items())
    random.Random(0).shuffle(pairs)
    return pairs


def write_jsonl(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def prepare(model_folder, folder):
    """Write the rows of each teacher, the held-out rows and both students; return the teacher's own MRR@10 of both
    tasks."""
    import torch
    from sentence_transformers import CrossEncoder, SentenceTransformer

    pairs, teacher, draw = read_pairs(), SentenceTransformer(model_folder, device="cpu"), random.Random(1)
    teacher.max_seq_length = 64
    queries, documents = (teacher.encode(column, normalize_embeddings=True) for column in zip(*pairs))
    cosines = queries @ documents.T

    def row(i, others, scores):
        return {"query": pairs[i][0], "documents": [pairs[j][1] for j in (i, *others)], "scores": scores}

    def nearest(i, among):
        return [j for j in sorted(among, key=lambda j: -cosines[i, j]) if j != i]

    held_out, train = range(HELD_OUT), range(HELD_OUT, len(pairs))
    hard = {i: nearest(i, held_out)[:9] for i in held_out}
    write_jsonl(folder / "held_out.jsonl", (row(i, hard[i], [1.0] + [0.0] * 9) for i in held_out))
    negatives = {i: [draw.choice(nearest(i, train)[:20]), *draw.sample(train, 2)] for i in train}
    logits = {i: [20 * float(cosines[i, j]) for j in (i, *negatives[i])] for i in train}
    mean = statistics.mean(score for scores in logits.values() for score in scores)
    kinds = {
        "probabilities": lambda logit: 1 / (1 + math.exp(mean - logit)),
        "cosines": lambda logit: logit / 20,
        "logits": lambda logit: logit,
    }
    write_jsonl(folder / "labels.jsonl", (row(i, negatives[i], [1.0, 0.0, 0.0, 0.0]) for i in train))
    for kind, of in kinds.items():
        write_jsonl(folder / f"{kind}.jsonl", [row(i, negatives[i], list(map(of, logits[i]))) for i in train])

    if not (folder / "train_bi_encoder").exists():
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in teacher.parameters():
                if parameter.ndim > 1:
                    parameter += torch.randn_like(parameter) * parameter.std() * NOISE
        teacher.save_pretrained(str(folder / "train_bi_encoder"), create_model_card=False)
        torch.manual_seed(0)
        reranker = CrossEncoder(model_folder, device="cpu", num_labels=1)
        reranker.model.bert.encoder.layer = reranker.model.bert.encoder.layer[:2]
        reranker.config.num_hidden_layers = 2
        reranker.save_pretrained(str(folder / "cut"))
    ranks = {
        "train_bi_encoder": [1 + sum(cosines[i, j] > cosines[i, i] for j in held_out) for i in held_out],
        "train_cross_encoder": [1 + sum(cosines[i, j] > cosines[i, i] for j in hard[i]) for i in held_out],
    }
    return {name: statistics.mean(1 / rank if rank <= 10 else 0 for rank in found) for name, found in ranks.items()}


def train(name, folder, run, model, rows, steps, rate, *flags):
    """Train, unless it was done before; return [MRR@10 before, after]."""
    output = folder / "runs" / run
    if not (output / "model").exists():
        flags = ["--model_name_or_path", model, "--train_data", folder / f"{rows}.jsonl", "--eval_data",
                 folder / "held_out.jsonl", "--columns", "query", "documents", "--label_column", "scores",
                 "--eval_rows", HELD_OUT, "--max_length", 32, "--batch_size", 8, "--max_steps", steps,
                 "--eval_steps", steps, "--learning_rate", rate, "--save_steps", 20, "--output_dir", output,
                 "--resume", *flags]  # fmt: skip
        script = importlib.import_module(name)
        script.main(script.parse_args(list(map(str, flags))))
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record["MRR@10"] for record in records if "MRR@10" in record]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--scripts", nargs="+", default=SCRIPTS, choices=SCRIPTS)
    parser.add_argument("--only", nargs="+", default=["kl", "margin_mse"], choices=["kl", "margin_mse"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--reranker_steps", type=int, default=60, help="steps that make the cross-encoder's student")
    parser.add_argument("--learning_rate", type=float, default=3e-5)
    parser.add_argument("--folder", type=Path, default=Path("distill"))
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_MININTERVAL": "30"}
    sys.path.insert(0, str(ROOT))
    folder, table = args.folder.resolve(), []
    teacher = prepare(args.model, folder)
    for name in args.scripts:
        model = folder / name
        if name == "train_cross_encoder":
            flags = ["--loss", "listwise_ce", "--lr_scheduler_type", "constant"]
            train(name, folder, "reranker", folder / "cut", "labels", args.reranker_steps, 2e-4, *flags)
            model = folder / "runs/reranker/model"
        for kind in ("probabilities", "cosines", "logits"):
            for loss in args.only:
                line = {"script": name, "teacher": kind, "loss": loss, "of the teacher": teacher[name]}
                for temperature, options in TEMPERATURES.items():
                    flags = ["--loss", loss, "--loss_kwargs", json.dumps(options)]
                    run = f"{name}.{kind}.{loss}.{temperature}"
                    line["before"], line[temperature] = train(name, folder, run, model, kind, args.steps,
                                                              args.learning_rate, *flags)  # fmt: skip
                table.append(line)
                (folder / "distill.json").write_text(json.dumps(table, indent=1))
                print(line, flush=True)
    print("| script | teacher | loss | MRR@10 of the teacher | before | after, temperature 1 | after, default |")
    print("|---|---|---|---|---|---|---|")
    for line in table:
        found = [value if isinstance(value, str) else f"{value:.3f}" for value in line.values()]
        print(f"| {' | '.join(found)} |")


if __name__ == "__main__":
    main()
