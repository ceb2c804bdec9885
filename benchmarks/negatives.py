"""Hard negatives against sentence_transformers.util.mine_hard_negatives: the same rows, and what they cost.

    python benchmarks/negatives.py MODEL_FOLDER BEIR_FOLDER [--split train] [--num_negatives 4]

Mines the training queries by both, with the same ranks and margins, three ways. Ours is an evaluation that writes its
run and the judged documents' scores, then mine_negatives.py; texts are encoded in the first call only.
Rows are compared by query and positive: equal if the negatives are the same texts, tied if those that differ have
scores within 1e-5 of the library's. Writes negatives.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
WAYS = {
    "ranks 0 to 100": ([0, 100], {}),
    "ranks 5 to 50, margin 0.1": ([5, 50], {"absolute_margin": 0.1}),
    "ranks 0 to 50, relative margin 0.05": ([0, 50], {"relative_margin": 0.05}),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("beir")
    parser.add_argument("--split", default="train")
    parser.add_argument("--num_negatives", type=int, default=4)
    parser.add_argument("--output", default="negatives.json")
    args = parser.parse_args()
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    def read(name):
        return [json.loads(line) for line in Path(args.beir, name).read_text().splitlines()]

    queries = {r["_id"]: r["text"].strip() for r in read("queries.jsonl")}
    documents = {r["_id"]: f"{r.get('title', '')} {r['text']}".strip() for r in read("corpus.jsonl")}
    judged = [line.split("\t") for line in Path(args.beir, f"qrels/{args.split}.tsv").read_text().splitlines()[1:]]
    pairs = [(queries[q], documents[d]) for q, d, grade in judged if int(grade) > 0]
    data = Dataset.from_dict({"query": [q for q, _ in pairs], "positive": [d for _, d in pairs]})
    model = SentenceTransformer(args.model, device="cpu")
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (ranks, margins)) in enumerate(WAYS.items()):
            output = Path(folder, str(number))
            data_flags = ["--beir", args.beir, "--split", args.split]
            rank = ["eval_incremental.py", *data_flags, "--model_name_or_path", args.model, "--top_k", ranks[1] + 20,
                    "--metrics", "nDCG@10", "--judged", "--cache_dir", f"{folder}/cache", "--output_dir", output,
                    "--cache_dtype", "float32"]  # fmt: skip
            mine = ["mine_negatives.py", *data_flags, "--run", f"{output}/run.trec", "--judged",
                    f"{output}/judged.trec", "--range_min", ranks[0], "--range_max", ranks[1], "--num_negatives",
                    args.num_negatives, "--output", f"{output}/rows.jsonl"]  # fmt: skip
            mine += [word for name, value in margins.items() for word in (f"--{name}", value)]
            started = time.perf_counter()
            for script, *flags in (rank, mine):
                subprocess.run([sys.executable, ROOT / script, *map(str, flags)], check=True)
            seconds = time.perf_counter() - started
            encoded = json.loads(Path(output, "metrics.json").read_text())["results"][0]["texts"]["encoded"]
            rows = {
                (row["query"], row["positive"]): row
                for row in map(json.loads, Path(output, "rows.jsonl").read_text().splitlines())
            }
            started = time.perf_counter()
            found = mine_hard_negatives(
                data, model, corpus=list(documents.values()), output_format="n-tuple", output_scores=True,
                num_negatives=args.num_negatives, range_min=ranks[0], range_max=ranks[1], verbose=False,
                cache_folder=f"{folder}/library", **margins,
            )  # fmt: skip
            line = {"way": name, "rows": len(rows), "library_rows": len(found), "equal": 0, "tied": 0, "differ": 0}
            for row in found:
                mine = rows.get((row["query"], row["positive"]))
                names = [f"negative_{i}" for i in range(1, args.num_negatives + 1)]
                if mine and [mine[n] for n in names] == [row[n] for n in names]:
                    line["equal"] += 1
                elif mine and max(abs(a - b) for a, b in zip(mine["scores"], row["scores"])) < 1e-5:
                    line["tied"] += 1
                else:
                    line["differ"] += 1
            table.append({**line, "encoded": encoded, "seconds": seconds,
                          "library_seconds": time.perf_counter() - started})  # fmt: skip
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "table": table}, indent=1))
    print(
        "| rules | rows, ours | the library's | equal | tied | differ | texts encoded |\n|---|---|---|---|---|---|---|"
    )
    for line in table:
        print(f"| {line['way']} | {line['rows']} | {line['library_rows']} | {line['equal']} | {line['tied']} | "
              f"{line['differ']} | {line['encoded']:,} |")  # fmt: skip


if __name__ == "__main__":
    main()
