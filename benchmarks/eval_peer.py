"""Evaluation of a BEIR folder against InformationRetrievalEvaluator, whose measures must be equal, in turns.

    python benchmarks/eval_peer.py MODEL_FOLDER BEIR_FOLDER [--processes 2] [--rounds 3] [--limit 500]

Seconds of the whole command, imports included. Every document of scifact has more than 64 tokens: at --max_length 64
all have one length, so that no side can save padding. The second evaluation of ours finds its cache; the peer has no
cache. With --processes 2 torchrun starts both sides, one thread a process; the peer shares its encoding by
distributed_evaluation, as SentenceTransformerTrainer does (sentence-transformers 6). Prints the seconds of ours
for the corpus, and those of the imports of both sides. --limit takes the first documents. Writes eval_peer.json.
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
PEER_IMPORTS = """
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
"""


def read_rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def evaluate_peer(args):
    """In one of its processes: print the measures of InformationRetrievalEvaluator as a line of JSON."""
    import torch.distributed as dist
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
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
    model = SentenceTransformer(args.model, device="cpu")
    model.max_seq_length = args.max_length
    depths = {"ndcg_at_k": [10], "mrr_at_k": [10], "precision_recall_at_k": [100], "map_at_k": [100]}
    evaluator = InformationRetrievalEvaluator(queries, corpus, relevant, batch_size=args.batch_size, **depths)
    with distributed_evaluation(model) as run_evaluator:  # other processes encode what the first one sends
        if run_evaluator:
            figures = evaluator(model)
            print(json.dumps({name: figures[f"cosine_{theirs}"] for name, theirs in MEASURES.items()}))
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
    """Return (seconds, standard output) of a command."""
    started = time.perf_counter()
    command = list(map(str, command))
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    return time.perf_counter() - started, done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=os.path.abspath)
    parser.add_argument("beir", type=os.path.abspath)
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
    corpus, differences = [], []
    with tempfile.TemporaryDirectory() as folder:
        beir = first_documents(args.beir, args.limit, f"{folder}/beir") if args.limit else args.beir
        for turn in range(args.rounds):
            out = f"{folder}/{turn}"
            ours = [*launcher, ROOT / "eval_incremental.py", "--model_name_or_path", args.model, "--beir", beir,
                    "--max_length", args.max_length, "--cache_dir", f"{out}/cache", "--cache_dtype", "float32",
                    "--output_dir", out, "--metrics", *MEASURES]  # fmt: skip
            theirs = [*launcher, Path(__file__).resolve(), args.model, beir, "--peer", "--processes", args.processes,
                      "--max_length", args.max_length, "--batch_size", args.batch_size]  # fmt: skip
            runs["ours"].append(timed(environment, *ours)[0])
            found = json.loads(Path(f"{out}/metrics.json").read_text())["results"][0]
            seconds, printed = timed(environment, *theirs)
            runs["peer"].append(seconds)
            runs["again"].append(timed(environment, *ours)[0])
            for name, statement in (("ours", "import eval_incremental"), ("peer", PEER_IMPORTS)):
                runs[f"{name}, imports"].append(timed(environment, sys.executable, "-c", statement)[0])
            mine, peer = {name: found["metrics"][name]["mean"] for name in MEASURES}, json.loads(printed)
            differences.append(max(abs(mine[name] - peer[name]) for name in MEASURES))
            assert differences[-1] < 1e-3, (mine, peer)
            corpus.append(found["seconds"])
            print(f"round {turn + 1}:", {name: round(values[-1], 2) for name, values in runs.items()}, file=sys.stderr)
    print("| side | seconds, all rounds | median | Evenstep, times as fast | its imports |\n|---|---|---|---|---|")
    for name, side in (("ours", "ours"), ("again", "ours"), ("peer", "peer")):
        ratio = statistics.median(peer / own for peer, own in zip(runs["peer"], runs[name]))
        cells = [", ".join(f"{value:.1f}" for value in runs[name]), f"{statistics.median(runs[name]):.1f}",
                 "" if name == "peer" else f"{ratio:.2f}x",
                 f"{statistics.median(runs[f'{side}, imports']):.1f}"]  # fmt: skip
        print(f"| {name} |", " | ".join(cells), "|")
    print(f"The corpus took ours {statistics.median(corpus):.2f} s;")
    print("measures:", ", ".join(f"{name} {value:.6f}" for name, value in mine.items()), end="; ")
    print(f"the peer's differ by {max(differences):.1e} at most")
    record = {"arguments": vars(args), "runs": runs, "corpus": corpus, "measures": [mine, peer]}
    Path(args.output).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
