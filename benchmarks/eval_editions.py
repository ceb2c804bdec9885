"""Evaluator and miner of this checkout against those of another one, in turns.

    git worktree add ../fifth 63c1b93
    python benchmarks/eval_editions.py ../fifth waiting MODEL_FOLDER
    python benchmarks/eval_editions.py ../fifth numbers MODEL_FOLDER --beir SCIFACT VASWANI
    python benchmarks/eval_editions.py ../fifth numbers MODEL_FOLDER --pairs 'data/python_code/*/*.parquet'
    python benchmarks/eval_editions.py ../fifth memory MODEL_FOLDER --beir SCIFACT

waiting: a first evaluation of --texts texts of about 64 tokens on a device that takes --pass_ms for a pass of 32,768
tokens, one after the other, while the host goes on until it asks for what they computed. The tokenizer is real. Prints
the share of the time between the first and the last lookup in which no pass runs, with each number of workers.

numbers: measures, rankings and per-query values of each collection, of --pairs those of 50,000 queries, and the rows
mined from its ranking by `mine_negatives.py`: equal to the byte, or the largest difference.

memory: peak memory and seconds of evaluating five copies of the model, and the model alone.
"""

import argparse
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).parents[1]
os.environ["HF_HUB_OFFLINE"] = "1"


def write_texts(folder, count):
    """Write a BEIR folder of `count` texts of 10 to 50 words, and ten queries."""
    generator = np.random.default_rng(0)
    words = np.array(re.findall("[a-z]+", (ROOT / "README.md").read_text()))
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", count), ("queries", 10)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for number in range(rows):
                text = " ".join(words[generator.integers(0, len(words), generator.integers(10, 50))])
                print(json.dumps({"_id": f"{name[0]}{number}", "text": f"{number} {text}"}), file=file)
    lines = [f"q{number}\tc{number}\t1" for number in range(10)]
    (folder / "qrels/test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")


def run_waiting(checkout, pass_ms, flags):
    """In a process of its own: evaluate with a forward pass that only waits, and print the share without a pass."""
    import torch

    spec = importlib.util.spec_from_file_location("eval_incremental", f"{checkout}/eval_incremental.py")
    script = sys.modules["eval_incremental"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    gpu = torch.device("cuda")
    passes = []  # (begin, end) of each on the device
    ends = {}  # {id of a Lookup: end of its last pass}
    spans = []
    retrieve = script.retrieve
    finish = script.finish
    compute = script.CachedEncoder.compute
    # A GPU computes a chunk while the one before is stored.
    source = inspect.getsource(script.cached_vectors).replace('encoder.accelerator.device.type == "cuda"', "True")
    exec(compile(source, "cached_vectors", "exec"), vars(script))

    def forward(self, features, role):
        begin = max([time.perf_counter(), *(end for _, end in passes[-1:])])
        passes.append((begin, begin + pass_ms / 1000))
        return torch.ones(len(features["input_ids"]), self.model.get_embedding_dimension())

    def timed_compute(self, lookup, *given):
        compute(self, lookup, *given)
        if passes:
            ends[id(lookup)] = passes[-1][1]

    def waiting_finish(encoder, lookup, *given):
        time.sleep(max(0, ends.pop(id(lookup), 0) - time.perf_counter()))
        return finish(encoder, lookup, *given)

    def timed_retrieve(*args):
        started = time.perf_counter()
        ranking = retrieve(*args)
        spans.append((started, time.perf_counter()))
        return ranking

    split_features = script.split_features  # cuts as on a GPU
    script.split_features = lambda features, tokens, _, *more: split_features(features, tokens, gpu, *more)
    script.CachedEncoder.forward = forward
    script.CachedEncoder.compute = timed_compute
    script.finish = waiting_finish
    script.retrieve = timed_retrieve
    script.main(script.parse_args(flags))
    begin, end = spans[0]
    working = sum(done - started for started, done in passes)
    figures = {"passes": len(passes), "seconds": end - begin, "waiting": 1 - working / (end - begin)}
    figures |= {"before the first": passes[0][0] - begin, "after the last": end - passes[-1][1]}
    waits = [later[0] - earlier[1] for earlier, later in zip(passes, passes[1:])]
    figures |= {"waits in each quarter": [round(sum(part), 2) for part in np.array_split(waits, 4)]}
    print(json.dumps(figures))


def compare_waiting(args, folder):
    write_texts(folder / "beir", args.texts)
    for edition, checkout, workers in [("other", args.other, None), *(("this", ROOT, n) for n in args.workers)]:
        flags = ["--model_name_or_path", args.model, "--beir", folder / "beir", "--cache_dir", folder / "cache"]
        flags += ["--output_dir", folder / "out", "--micro_batch_tokens", 32_768, "--metrics", "nDCG@10"]
        flags += [] if workers is None else ["--dataloader_num_workers", workers]
        command = [sys.executable, __file__, args.other, "waiting", args.model, "--side", checkout]
        command += ["--pass_ms", args.pass_ms, "--flags", json.dumps(list(map(str, flags)))]
        done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True)
        print(edition, "" if workers is None else f"{workers} workers", done.stdout.splitlines()[-1], flush=True)
        shutil.rmtree(folder / "cache")
        shutil.rmtree(folder / "out")


def run(checkout, script, *flags):
    """Run a script of a checkout; return (seconds, peak GB of the process alone, what it printed)."""
    started = time.perf_counter()
    command = [sys.executable, f"{checkout}/{script}", *map(str, flags)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max([peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))])
        time.sleep(0.05)
    output = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{command}: exit {process.returncode}\n{output}")
    return time.perf_counter() - started, peak * 1024 / 1e9, output


def compare_numbers(args, folder):
    for name in [*args.beir, *(["pairs"] if args.pairs else [])]:
        found = {}
        source = ["--beir", name]
        for edition, checkout in (("other", args.other), ("this", ROOT)):
            out = folder / edition / Path(name).name
            if name == "pairs":
                source = ["--corpus", folder / "corpus.parquet", "--queries", folder / "queries.parquet"]
                source += ["--qrels", folder / "qrels.tsv"]
                write_pairs(args.pairs, folder, args.queries)
            flags = ["--model_name_or_path", args.model, *source, "--output_dir", out]
            flags += ["--cache_dir", folder / f"{edition}-cache"]
            seconds, peak, output = run(checkout, "eval_incremental.py", *flags)
            encoded = [line for line in output.splitlines() if "encoded" in line]
            output = run(checkout, "eval_incremental.py", *flags)[2]
            again = [line for line in output.splitlines() if "encoded" in line]
            trec = sorted(out.rglob("*.trec"))[0]
            mined = out / "mined.jsonl"
            miner = ["--run", trec, *source, "--output", mined, "--num_negatives", 5]
            miner += [] if name == "pairs" else ["--split", "test"]
            mining = run(checkout, "mine_negatives.py", *miner)
            found[edition] = trec, next(iter(out.rglob("*per_query.csv"))), mined
            print(f"{name}, {edition}: {seconds:.1f} s, {peak:.2f} GB, {encoded}, again {again}; mined in "
                  f"{mining[0]:.1f} s, {mining[1]:.2f} GB")  # fmt: skip
        for one, two in zip(*found.values()):
            print(f"  {one.name}: {difference(one, two)}", flush=True)


def write_pairs(pattern, folder, queries):
    """Write the demo's functions as a corpus, and the first docstrings of them as queries."""
    if (folder / "qrels.tsv").exists():
        return
    from glob import glob

    frame = pd.concat(map(pd.read_parquet, sorted(glob(pattern))), ignore_index=True)[["docstring", "code"]]
    frame = frame.drop_duplicates("code").drop_duplicates("docstring")[:queries].reset_index(drop=True)
    frame["_id"] = [f"d{number}" for number in range(len(frame))]
    frame.rename(columns={"code": "text"})[["_id", "text"]].to_parquet(folder / "corpus.parquet")
    asked = pd.DataFrame({"_id": frame["_id"].str.replace("d", "q"), "text": frame["docstring"]})
    asked.to_parquet(folder / "queries.parquet")
    judged = pd.DataFrame({"query-id": asked["_id"], "corpus-id": frame["_id"], "score": 1})
    judged.to_csv(folder / "qrels.tsv", sep="\t", index=False)


def difference(one, two):
    """Describe how two files differ: a run file (tabs are spaces), a table of values, or rows of texts."""
    if one.read_bytes().replace(b"\t", b" ") == two.read_bytes().replace(b"\t", b" "):
        return f"equal bytes, {one.read_bytes().count(10):,} lines"
    if one.suffix == ".trec":
        names = ["query", "q0", "document", "rank", "score", "run"]
        frames = [pd.read_csv(path, sep=r"\s+", names=names, header=None) for path in (one, two)]
        same = (frames[0]["document"].to_numpy() == frames[1]["document"].to_numpy()).mean()
        scores = np.abs(frames[0]["score"].to_numpy() - frames[1]["score"].to_numpy()).max()
        return f"{same:.6f} of {len(frames[0]):,} documents at the same rank, scores differ by at most {scores:.2g}"
    if one.suffix == ".csv":
        frames = [pd.read_csv(path).select_dtypes("number") for path in (one, two)]
        return f"values differ by at most {(frames[0] - frames[1]).abs().max().max():.2g}"
    lines = [path.read_text().splitlines() for path in (one, two)]
    return f"{sum(a == b for a, b in zip(*lines)):,} of {len(lines[0]):,} and {len(lines[1]):,} rows are equal"


def compare_memory(args, folder):
    models = []
    for number in range(5):
        models.append(shutil.copytree(args.model, folder / f"model{number}"))
    for count in (1, 5):
        for edition, checkout in (("other", args.other), ("this", ROOT)):
            flags = ["--model_name_or_path", *models[:count], "--beir", args.beir[0], "--max_length", 64]
            flags += ["--output_dir", folder / f"{edition}{count}", "--cache_dir", folder / f"cache-{edition}{count}"]
            seconds, peak, _ = run(checkout, "eval_incremental.py", *flags)
            print(f"{count} models, {edition}: {peak:.2f} GB, {seconds:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=os.path.abspath, help="folder of another checkout")
    parser.add_argument("kind", choices=["waiting", "numbers", "memory"])
    parser.add_argument("model", help="folder of a sentence-transformers model")
    parser.add_argument("--beir", nargs="+", default=[], help="BEIR folders")
    parser.add_argument("--pairs", help="glob of Parquet files of the demo")
    parser.add_argument("--queries", type=int, default=50_000, help="and as many documents, of --pairs")
    parser.add_argument("--texts", type=int, default=40_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pass_ms", type=float, default=60)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--flags", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run_waiting(args.side, args.pass_ms, args.flags)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare = {"waiting": compare_waiting, "numbers": compare_numbers, "memory": compare_memory}[args.kind]
        compare(args, Path(folder))


if __name__ == "__main__":
    main()
