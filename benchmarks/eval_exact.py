"""Check the evaluator on a real model and collection: exact, incremental, and the same results on two processes and
after twenty kills.

    python benchmarks/eval_exact.py MODEL_FOLDER BEIR_FOLDER [--kills 20]

Every step is a launch of eval_incremental.py of its own, on the CPU. Prints a line a step and writes eval_exact.json.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytrec_eval
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer

ROOT = Path(__file__).parents[1]
CHUNK = 512
# Runs the evaluator and counts each text that is encoded in a file, so that what a killed run did is known.
COUNTED = """
import os, sys
sys.path.insert(0, {root!r})
import eval_incremental as script
encode = script.encode
def counted(model, features, accelerator):
    vectors = encode(model, features, accelerator)
    with open({log!r}, "ab", buffering=0) as file:
        file.write(b"x" * len(vectors))
    return vectors
script.encode = counted
script.main(script.parse_args(sys.argv[1:]))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("beir")
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    log = work / "encoded"
    (work / "driver.py").write_text(COUNTED.format(root=str(ROOT), log=str(log)))
    results = {}

    def flags(beir, cache, output):
        return ["--model_name_or_path", args.model, "--beir", beir, "--cache_dir", work / cache,
                "--output_dir", work / output, "--corpus_chunk_size", CHUNK]  # fmt: skip

    def start(beir, cache, output, processes=1):
        config = ROOT / f"accelerate_configs/{'cpu' if processes == 1 else 'multi_cpu'}.yaml"
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", config]
        command += [f"--num_processes={processes}", work / "driver.py"]
        if processes == 1:  # without a launcher, so that a kill hits it
            command = [sys.executable, work / "driver.py"]
        command += flags(beir, cache, output)
        return subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def run(*rest, **more):
        log.unlink(missing_ok=True)
        process = start(*rest, **more)
        assert process.wait() == 0, rest
        (result,) = json.loads((work / rest[2] / "metrics.json").read_text())["results"]
        return result, log.stat().st_size if log.exists() else 0

    def say(name, value):
        results[name] = value
        print(f"{name}: {value}", flush=True)

    beir = Path(args.beir)
    first, encoded = run(beir, "cache", "first")
    say("texts", first["texts"])
    say("nDCG@10", first["metrics"]["nDCG@10"])
    say("texts per second", first["texts"]["encoded"] / first["seconds"])
    say("seconds", first["seconds"])

    # Plain: encode everything, multiply, and ask pytrec_eval
    model = SentenceTransformer(args.model, device="cpu")
    corpus = [json.loads(line) for line in (beir / "corpus.jsonl").read_text().splitlines()]
    qrels = {}
    for line in (beir / "qrels/test.tsv").read_text().splitlines()[1:]:
        query, document, grade = line.split("\t")
        qrels.setdefault(query, {})[document] = int(grade)
    queries = [json.loads(line) for line in (beir / "queries.jsonl").read_text().splitlines()]
    queries = [query for query in queries if query["_id"] in qrels]
    texts = [f"{d.get('title', '')} {d['text']}".strip() for d in corpus]
    a, b = (F.normalize(torch.from_numpy(model.encode(t)), dim=1) for t in ([q["text"] for q in queries], texts))
    top = (a @ b.T).topk(100)
    plain = {q["_id"]: {corpus[d]["_id"]: s for d, s in zip(ds, ss)}
             for q, ds, ss in zip(queries, top.indices.tolist(), top.values.tolist())}  # fmt: skip
    names = {"nDCG@10": "ndcg_cut_10", "R@100": "recall_100", "AP": "map"}
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, set(names.values()))
    for name, theirs in names.items():
        value = np.mean([v[theirs] for v in evaluator.evaluate(plain).values()])
        say(f"{name}, ours minus plain", first["metrics"][name]["mean"] - value)
    written = {}
    for line in (work / "first/run.trec").read_text().splitlines():
        query, _, document, _, score, _ = line.split()
        written.setdefault(query, {})[document] = float(score)
    each = evaluator.evaluate(written)
    worst = max(abs(first["metrics"][m]["mean"] - np.mean([v[t] for v in each.values()])) for m, t in names.items())
    say("largest difference from pytrec_eval on the written run.trec", worst)

    # Incremental
    again, encoded = run(beir, "cache", "again")
    same = (work / "first/run.trec").read_bytes() == (work / "again/run.trec").read_bytes()
    say("second run", {"encoded": encoded, "run.trec identical": same, "seconds": again["seconds"]})
    changed = work / "changed"
    shutil.copytree(beir, changed)
    os.chmod(changed, 0o755)
    (changed / "corpus.jsonl").unlink()

    def write(records):
        (changed / "corpus.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    for number in random.Random(0).sample(range(len(corpus)), 52):
        corpus[number] = corpus[number] | {"text": corpus[number]["text"] + " Changed."}
    write(corpus)
    say("after changing 52 documents", run(changed, "cache", "changed_out")[1])
    extra = [{"_id": f"new{i}", "title": "", "text": f"Abstract number {i} on protein {i * i}."} for i in range(100)]
    write(corpus + extra)
    say("after appending 100", run(changed, "cache", "changed_out")[1])
    front = [{"_id": f"front{i}", "title": "", "text": f"Inserted number {i}."} for i in range(10)]
    write(front + corpus + extra)
    say("after inserting 10 at the front", run(changed, "cache", "changed_out")[1])
    write([{**record, "_id": f"x{i}"} for i, record in enumerate(corpus[1000:1400])] + [{"_id": "y", "text": "new"}])
    say("another corpus of 401, 400 of them shared", run(changed, "cache", "changed_out")[1])

    # Two processes
    two, encoded = run(beir, "cache_of_two", "two", processes=2)
    same = (work / "first/run.trec").read_bytes() == (work / "two/run.trec").read_bytes()
    say("two processes", {"encoded by both": encoded, "run.trec identical": same,
                          "metrics identical": two["metrics"] == first["metrics"]})  # fmt: skip

    # Killed
    log.unlink(missing_ok=True)
    dice, total, kills = random.Random(0), first["texts"]["total"], 0
    for number in range(args.kills):
        done = log.stat().st_size if log.exists() else 0
        process = start(beir, "killed", "killed_out")
        wanted = done + dice.randint(1, 2 * total // args.kills)
        while process.poll() is None and (log.stat().st_size if log.exists() else 0) < wanted and done < total:
            time.sleep(0.005)
        if done >= total:  # nothing is left to encode: some moment of the cached pass
            time.sleep(dice.random() * 8)
        time.sleep(dice.random() * 0.3)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
        print(f"  kill {number + 1}: {log.stat().st_size:,} texts encoded so far", flush=True)
    process = start(beir, "killed", "killed_out")
    assert process.wait() == 0
    (last,) = json.loads((work / "killed_out/metrics.json").read_text())["results"]
    same = (work / "first/run.trec").read_bytes() == (work / "killed_out/run.trec").read_bytes()
    extra = log.stat().st_size - total
    say("killed", {"times": kills, "metrics identical": last["metrics"] == first["metrics"],
                   "run.trec identical": same, "texts encoded more than once": extra,
                   "at most (a chunk a kill)": kills * CHUNK})  # fmt: skip
    Path("eval_exact.json").write_text(json.dumps(results, indent=1))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
