"""Whether a ranking that is written and read again by --run has the same values, also by trec_eval's code.

    python benchmarks/files_round.py data/python_code/bi_encoder data/python_code/cross_encoder \
        --beir SCIFACT VASWANI --pairs 'data/python_code/heldout/*.parquet' --columns docstring code

Rankings of a bi-encoder, BM25 and their fusions, and each of them reranked in float32 and in bfloat16. Prints for each
its lines, how many of them tie with another one of their query, how many queries have another order when the run file
is read again, and how many values of a query and a measure differ then, and by pytrec_eval on the run file.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
os.environ["HF_HUB_OFFLINE"] = "1"
MEASURES = {"nDCG@10": "ndcg_cut_10", "RR": "recip_rank", "R@100": "recall_100", "AP@100": "map_cut_100"}


def evaluate(*flags):
    command = [sys.executable, ROOT / "eval_incremental.py", *flags]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def read_values(folder):
    """Return {(query, measure): value as text} of the per_query.csv of a ranking."""
    with open(folder / "per_query.csv", encoding="utf-8", newline="") as file:
        return {(row["query"], name): row[name] for row in csv.DictReader(file) for name in MEASURES}


def read_scores(path):
    """Return {query: {document: score}} of a run file."""
    scores = defaultdict(dict)
    with open(path, encoding="utf-8") as file:
        for line in file:
            query, _, document, _, score, _ = line.rstrip("\n").split("\t")
            scores[query][document] = float(score)
    return scores


def trec_eval(scores, judgments):
    """Return {(query, measure): value} of trec_eval's code; as the evaluator, 0 of a query without a line."""
    import pytrec_eval

    found = pytrec_eval.RelevanceEvaluator(judgments, {"ndcg_cut", "recip_rank", "recall", "map_cut"}).evaluate(scores)
    return {(query, name): found.get(query, {}).get(MEASURES[name], 0.0) for query in judgments for name in MEASURES}


def compare(flags, output, call=evaluate):
    """Yield a row for each ranking of a call of the evaluator: what this script prints. flags: of the collection and
    the rankings; call: runs the evaluator with flags."""
    collection = flags[: next(place for place, flag in enumerate(flags) if flag in ("--model_name_or_path", "--run"))]
    options = ["--metrics", *MEASURES, "--cache_dir", output / "cache"]
    call(*flags, *options, "--output_dir", output / "first")
    first = json.loads((output / "first/metrics.json").read_text())["results"]
    folders = [output / "first" / result["folder"] for result in first]
    again = [*collection, "--run", *(folder / "run.trec" for folder in folders), *options]
    call(*again, "--output_dir", output / "again")
    second = json.loads((output / "again/metrics.json").read_text())["results"]
    with open(output / "first/queries.jsonl", encoding="utf-8") as file:
        judgments = {row["_id"]: row["judgments"] for row in map(json.loads, file)}
    for result, folder, copied in zip(first, folders, second):
        values = read_values(folder)
        reread = read_values(output / "again" / copied["folder"])
        scores = read_scores(folder / "run.trec")
        again = read_scores(output / "again" / copied["folder"] / "run.trec")
        counts = [Counter(found.values()) for found in scores.values()]
        expected = trec_eval(scores, judgments)
        yield {
            "ranking": result["name"],
            "lines": sum(map(len, scores.values())),
            "ties": sum(count for found in counts for count in found.values() if count > 1),
            "values": len(values),
            "queries ordered otherwise": sum(list(again[query]) != list(found) for query, found in scores.items()),
            "differ read again": sum(values[key] != reread[key] for key in values),
            "differ in trec_eval": sum(float(values[key]) != expected[key] for key in expected),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a sentence-transformers model")
    parser.add_argument("cross_encoder", help="folder of a cross-encoder")
    parser.add_argument("--beir", nargs="+", default=[], help="BEIR folders")
    parser.add_argument("--pairs", help="file or glob of pairs")
    parser.add_argument("--columns", nargs=2, help="of --pairs")
    parser.add_argument("--rerank_k", type=int, default=10)
    args = parser.parse_args()
    collections = [["--beir", path] for path in args.beir]
    collections += [["--pairs", args.pairs, "--columns", *args.columns]] if args.pairs else []
    with tempfile.TemporaryDirectory() as folder:
        from sentence_transformers import CrossEncoder

        half = Path(folder, "bfloat16")
        CrossEncoder(args.cross_encoder, device="cpu").bfloat16().save_pretrained(str(half))
        for number, collection in enumerate(collections):
            for fuse, reranker in (("rrf", args.cross_encoder), ("zscore", half)):
                flags = [*collection, "--model_name_or_path", args.model, "--bm25", "--fuse", fuse]
                flags += ["--cross_encoder", reranker, "--rerank_k", args.rerank_k, "--rerank_max_length", 64]
                for row in compare(flags, Path(folder, f"{number}{fuse}")):
                    print(f"{collection[1]} {fuse}", *(f"{name} {value}" for name, value in row.items()), sep="; ")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
