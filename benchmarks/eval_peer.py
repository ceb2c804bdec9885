"""Evaluation of a BEIR folder against InformationRetrievalEvaluator: with an empty, then a full cache, in turns.

    python benchmarks/eval_peer.py MODEL_FOLDER BEIR_FOLDER [--max_length 256] [--rounds 2]

Seconds of the whole command, imports included; each side searches the corpus for all queries of the test split. The
second evaluation of ours finds its cache; the peer has none. Writes eval_peer.json.
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


def evaluate_peer(args):
    """In a process of its own: print nDCG@10 of InformationRetrievalEvaluator."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    def read(name):
        records = map(json.loads, Path(f"{args.beir}/{name}.jsonl").read_text().splitlines())
        return {r["_id"]: f"{r.get('title') or ''} {r['text']}".strip() for r in records}

    relevant = {}
    for line in Path(f"{args.beir}/qrels/test.tsv").read_text().splitlines()[1:]:
        query, document, grade = line.split("\t")
        if int(grade) > 0:
            relevant.setdefault(query, set()).add(document)
    queries = {name: text for name, text in read("queries").items() if name in relevant}
    model = SentenceTransformer(args.model, device="cpu")
    model.max_seq_length = args.max_length
    evaluator = InformationRetrievalEvaluator(queries, read("corpus"), relevant, batch_size=args.peer)
    figures = evaluator(model)
    print(next(value for name, value in figures.items() if name.endswith("ndcg@10")))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("beir")
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32, help="of the peer")
    parser.add_argument("--output", default="eval_peer.json")
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return evaluate_peer(args)
    os.environ["HF_HUB_OFFLINE"] = "1"
    runs = []
    with tempfile.TemporaryDirectory() as folder:

        def timed(*command):
            started = time.perf_counter()
            done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
            return time.perf_counter() - started, done.stdout

        for turn in range(args.rounds):
            out = f"{folder}/{turn}"
            ours = [sys.executable, ROOT / "eval_incremental.py", "--model_name_or_path", args.model, "--beir",
                    args.beir, "--max_length", args.max_length, "--cache_dir", f"{out}/cache",
                    "--output_dir", out, "--cache_dtype", "float32"]  # fmt: skip
            first, _ = timed(*ours)
            again, _ = timed(*ours)
            mine = json.loads(Path(f"{out}/metrics.json").read_text())["results"][0]["metrics"]["nDCG@10"]["mean"]
            peer, printed = timed(sys.executable, __file__, args.model, args.beir, "--peer", args.batch_size,
                                  "--max_length", args.max_length)  # fmt: skip
            runs.append([first, again, peer, mine, float(printed.split()[-1])])
            print(f"round {turn + 1}: {runs[-1]}", file=sys.stderr)
    first, again, peer, mine, theirs = (statistics.median(column) for column in zip(*runs))
    print("| side | seconds | Evenstep is faster by | nDCG@10 |\n|---|---|---|---|")
    print(f"| eval_incremental.py | {first:.1f} | | {mine:.6f} |\n| the same again | {again:.1f} | | {mine:.6f} |")
    ratios = [statistics.median(run[2] / run[side] for run in runs) for side in (0, 1)]
    print(f"| InformationRetrievalEvaluator | {peer:.1f} | {ratios[0]:.2f}x, again {ratios[1]:.1f}x | {theirs:.6f} |")
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
