"""Evaluation of a BEIR folder against InformationRetrievalEvaluator, whose measures must be equal, in turns.

    python benchmarks/eval_peer.py MODEL_FOLDER BEIR_FOLDER [--processes 2] [--rounds 3] [--limit 500]
    python benchmarks/eval_peer.py MODEL_FOLDER BEIR_FOLDER --model_type MultiVectorEncoder [or SparseEncoder]

The peer is the evaluator of the library for the type of the model. Seconds and peak memory of the whole command,
imports included. Every document of scifact has more than 64 tokens: at --max_length 64 all have one length, so that
no side can save padding. The second evaluation of ours finds its cache; the peer has no cache. With --processes 2
torchrun starts both sides, one thread a process; the peer shares its encoding by distributed_evaluation, as
SentenceTransformerTrainer does (sentence-transformers 6). Prints the seconds of ours for the corpus, and those of the
imports of both sides. --limit takes the first documents. Writes eval_peer.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEASURES = {"nDCG@10": "ndcg@10", "RR@10": "mrr@10", "R@100": "recall@100", "AP@100": "map@100"}  # {ours: the peer's}
PACKAGES = {"SentenceTransformer": ("sentence_transformer", ""), "SparseEncoder": ("sparse_encoder", "Sparse"),
            "MultiVectorEncoder": ("multi_vector_encoder", "MultiVector")}  # fmt: skip
PEER_IMPORTS = """
import sentence_transformers
from sentence_transformers.{}.evaluation import {}InformationRetrievalEvaluator as Evaluator
"""


def read_rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def evaluate_peer(args):
    """In one of its processes: print the measures of InformationRetrievalEvaluator as a line of JSON."""
    import importlib

    import sentence_transformers
    import torch.distributed as dist
    from sentence_transformers.util.distributed import distributed_evaluation

    if args.processes > 1:
        dist.init_process_group("gloo")
    relevant = {}
    for line in Path(f"{args.beir}/qrels/test.tsv").read_text().splitlines()[1:]:
        query, document, grade = line.split("\t")
        if int(grade) > 0:
            relevant.setdefault(query, set()).add(document)
    queries = {row["_id"]: row["text"] for row in read_rows(f"{args.beir}/queries.jsonl") if row["_id"] in relevant}
    corpus = {row["_id"]: f"{row.get('title') or ''} {row['text']}".strip()
              for row in read_rows(f"{args.beir}/corpus.jsonl")}  # fmt: skip
    package, prefix = PACKAGES[args.model_type]
    package = importlib.import_module(f"sentence_transformers.{package}.evaluation")
    model = getattr(sentence_transformers, args.model_type)(args.model, device="cpu")
    model.max_seq_length = args.max_length
    depths = {"ndcg_at_k": [10], "mrr_at_k": [10], "precision_recall_at_k": [100], "map_at_k": [100]}
    evaluator = getattr(package, f"{prefix}InformationRetrievalEvaluator")
    evaluator = evaluator(queries, corpus, relevant, batch_size=args.batch_size, **depths)
    with distributed_evaluation(model) as run_evaluator:  # other processes encode what the first one sends
        if run_evaluator:
            figures = evaluator(model)
            similarity = model.similarity_fn_name
            print(json.dumps({name: figures[f"{similarity}_{theirs}"] for name, theirs in MEASURES.items()}))
    if args.processes > 1:
        dist.destroy_process_group()


def first_documents(beir, limit, folder):
    """Write a BEIR folder of the first documents and their judgments; return its name."""
    rows = read_rows(f"{beir}/corpus.jsonl")[:limit]
    known = {row["_id"] for row in rows}
    header, *judgments = Path(f"{beir}/qrels/test.tsv").read_text().splitlines()
    judgments = [line for line in judgments if line.split("\t")[1] in known]
    Path(folder, "qrels").mkdir(parents=True)
    Path(folder, "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(folder, "queries.jsonl").write_bytes(Path(beir, "queries.jsonl").read_bytes())
    Path(folder, "qrels/test.tsv").write_text("\n".join([header, *judgments]) + "\n")
    return folder


def timed(environment, *command):
    """Return (seconds, peak memory of its processes in GB, standard output) of a command."""
    started = time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    return time.perf_counter() - started, usage.ru_maxrss * 1024 / 1e9, printed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=os.path.abspath)
    parser.add_argument("beir", type=os.path.abspath)
    parser.add_argument("--model_type", default="SentenceTransformer", choices=PACKAGES)
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=int, help="documents; none: all")
    parser.add_argument("--batch_size", type=int, default=32, help="of the peer")
    parser.add_argument("--output", default="eval_peer.json")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return evaluate_peer(args)
    environment, launcher = {**os.environ, "HF_HUB_OFFLINE": "1"}, [sys.executable]
    if args.processes > 1:
        environment["OMP_NUM_THREADS"] = "1"
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", args.processes]
    runs = {name: [] for name in ("ours", "again", "peer", "ours, imports", "peer, imports")}
    memory = {"ours": [], "again": [], "peer": []}
    corpus, differences = [], []
    with tempfile.TemporaryDirectory() as folder:
        beir = first_documents(args.beir, args.limit, f"{folder}/beir") if args.limit else args.beir
        for turn in range(args.rounds):
            out = f"{folder}/{turn}"
            ours = [*launcher, ROOT / "eval_incremental.py", "--model_name_or_path", args.model, "--beir", beir,
                    "--max_length", args.max_length, "--cache_dir", f"{out}/cache", "--cache_dtype", "float32",
                    "--output_dir", out, "--metrics", *MEASURES]  # fmt: skip
            theirs = [*launcher, Path(__file__).resolve(), args.model, beir, "--peer", "--processes", args.processes,
                      "--max_length", args.max_length, "--batch_size", args.batch_size, "--model_type",
                      args.model_type]  # fmt: skip
            printed = {}
            for name, command in (("ours", ours), ("peer", theirs), ("again", ours)):
                seconds, peak, printed[name] = timed(environment, *command)
                runs[name].append(seconds)
                memory[name].append(peak)
                if name == "ours":
                    found = json.loads(Path(f"{out}/metrics.json").read_text())["results"][0]
            statements = ("ours", "import eval_incremental"), ("peer", PEER_IMPORTS.format(*PACKAGES[args.model_type]))
            for name, statement in statements:
                runs[f"{name}, imports"].append(timed(environment, sys.executable, "-c", statement)[0])
            mine = {name: found["metrics"][name]["mean"] for name in MEASURES}
            peer = json.loads(printed["peer"].splitlines()[-1])
            differences.append(max(abs(mine[name] - peer[name]) for name in MEASURES))
            assert differences[-1] < 1e-3, (mine, peer)
            corpus.append(found["seconds"])
            print(f"round {turn + 1}:", {name: round(values[-1], 2) for name, values in runs.items()}, file=sys.stderr)
    print("| side | seconds, all rounds | median | Evenstep, times as fast | its imports | GB |")
    print("|---|---|---|---|---|---|")
    for name, side in (("ours", "ours"), ("again", "ours"), ("peer", "peer")):
        ratio = statistics.median(peer / own for peer, own in zip(runs["peer"], runs[name]))
        cells = [", ".join(f"{value:.1f}" for value in runs[name]), f"{statistics.median(runs[name]):.1f}",
                 "" if name == "peer" else f"{ratio:.2f}x",
                 f"{statistics.median(runs[f'{side}, imports']):.1f}",
                 f"{statistics.median(memory[name]):.2f}"]  # fmt: skip
        print(f"| {name} |", " | ".join(cells), "|")
    print(f"The corpus took ours {statistics.median(corpus):.2f} s;")
    print("measures:", ", ".join(f"{name} {value:.6f}" for name, value in mine.items()), end="; ")
    print(f"the peer's differ by {max(differences):.1e} at most")
    record = {"arguments": vars(args), "runs": runs, "memory": memory, "corpus": corpus, "measures": [mine, peer]}
    Path(args.output).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
