"""The metric trec_eval of the library evaluate as a metric script, beside the built-in measures of the same ranking.

    git clone https://github.com/huggingface/evaluate && pip install trectools
    python benchmarks/trec_eval_metric.py MODEL_FOLDER BEIR_FOLDER evaluate/metrics/trec_eval

Runs eval_incremental.py with both, prints their values, and fails if two differ by 1e-4. Numbers of queries must be
integers, as in scifact: the metric requires them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Ours by ir_measures: theirs by trectools. Its Rprec is another one: the mean over queries that have a hit.
SAME = {"AP": "map", "RR": "recip_rank", "P@5": "P@5", "P@10": "P@10", "P@100": "P@100",
        "nDCG@5": "NDCG@5", "nDCG@10": "NDCG@10", "nDCG@100": "NDCG@100"}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("beir")
    parser.add_argument("metric", help="folder of the metric trec_eval, or its script")
    parser.add_argument("--cache_dir", default="~/.cache/evenstep/embeddings")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as output:
        command = [
            sys.executable,
            ROOT / "eval_incremental.py",
            "--model_name_or_path",
            args.model,
            "--beir",
            args.beir,
        ]
        command += ["--cache_dir", args.cache_dir, "--output_dir", output, "--metrics", *SAME, args.metric]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (result,) = json.loads(Path(output, "metrics.json").read_text())["results"]
    found = result["metrics"]
    print("| measure | Evenstep | trec_eval of evaluate | difference |\n|---|---:|---:|---:|")
    for ours, theirs in SAME.items():
        difference = found[ours]["mean"] - found[theirs if theirs != ours else f"trec_eval_{ours}"]["value"]
        print(f"| {ours} | {found[ours]['mean']:.6f} | {found[ours]['mean'] - difference:.6f} | {difference:.1e} |")
        assert abs(difference) < 1e-4, ours


if __name__ == "__main__":
    main()
