"""Evaluate from random states of the cache, by random settings, on the late device; run by test_random_states.py.

The working directory has beir/ and models. For each line of stdin, a seed, a model and more flags of the last call, it
prints a line of JSON: "calls", [(flags, kind of device, processes)], their "errors" and "reports". The last one's
ranking is in out/SEED.
"""

import json
import os
import random
import sys
from itertools import chain
from pathlib import Path
from unittest import mock

import strict_device  # before torch
import strict_worker
import torch
import torch._dynamo  # noqa: F401 (it inspects torch's functions, hence before they are replaced)

import eval_incremental as script

script.FEW = 0  # workers start for any number of texts


def run(flags, kind):
    """Run the evaluator in this process; kind: of the device, "cpu" or one of StrictDevice."""
    device = strict_device.StrictDevice(kind="cuda" if kind == "cpu" else kind)
    error = None
    try:
        no_device = mock.patch.object(torch.accelerator, "is_available", lambda: False)
        with no_device if kind == "cpu" else device:
            script.main(script.parse_args(flags.split()))
    except Exception as raised:
        error = repr(raised)
    return {"error": error, "reports": device.reports}


def draw_call(rng, model, size, flags):
    size = rng.choice([size, size, size, 7])
    flags = f"--model_name_or_path {model} --cache_dtype float32 {flags} --corpus_chunk_size {size} "
    flags += f"--micro_batch_tokens {rng.choice([16, 32, 64])} "
    flags += f"--dataloader_num_workers {rng.choice([0, 1, 2, 3])} {rng.choice(['', '--streaming'])}"
    kind = rng.choice(["cuda", "cuda", "cuda", "xpu", "cpu"])
    if kind == "xpu" and model != "static":
        flags += " --attn_implementation eager"  # its fused kernels are not simulated
    return flags, kind, rng.choice([1, 1, 1, 2])


def evaluate(seed, model, more):
    """Search parts of the corpus, chunks or lines, which are cached then, and rank all of it."""
    rng = random.Random(seed)
    lines = Path("beir/corpus.jsonl").read_text().splitlines(keepends=True)
    size = rng.choice([5, 10, 20, 33])
    calls = []
    for number in range(rng.choice([0, 1, 1, 2])):
        step = rng.choice([size, size, 1])
        chunks = [lines[first : first + step] for first in range(0, len(lines), step)]
        kept = [chunk for chunk in chunks if rng.random() < 0.5] or chunks[:1]
        if rng.random() < 0.3:
            for chunk in kept:
                rng.shuffle(chunk)
        part = Path(f"part_{seed}_{number}.jsonl")
        part.write_text("".join(chain.from_iterable(kept)))
        calls.append(draw_call(rng, model, size, f"--cache_dir cache/{seed} --corpus {part} --query file"))
    flags = f"--cache_dir cache/{seed} --beir beir --metrics nDCG@10 --top_k 50 --output_dir out/{seed} {more}"
    calls.append(draw_call(rng, model, size, flags))
    found = [strict_worker.fork(run, flags, kind, processes=processes) for flags, kind, processes in calls]
    kept = {name: [part[name] for part in found if part[name]] for name in ("error", "reports")}
    return {"calls": calls, "errors": kept["error"], "reports": kept["reports"]}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the calls print
    for line in sys.stdin:
        seed, model, *more = line.split()
        print(json.dumps(evaluate(int(seed), model, " ".join(more))), file=answers, flush=True)
