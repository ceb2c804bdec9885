"""Does torch.compile pay for micro-batches of many shapes? Eager and compiled forward and backward passes, in turns.

    python benchmarks/compile.py MODEL_FOLDER [--batches 40] [--rounds 3] [--kinds eager dynamic static]

Micro-batches are those of train_bi_encoder.py: cut from texts of random lengths (log-normal, median 60 tokens), padded
to multiples of --multiple tokens; rows are as many as fit. "static" compiles each shape anew, "dynamic" once for all
shapes. Prints tokens a second after the first pass over all shapes, the seconds of that first pass, and the number of
different shapes. What compiling costs is paid back after `first / (1 / eager - 1 / compiled)` tokens, if ever.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

sys.path.insert(0, str(Path(__file__).parents[1]))
from train_bi_encoder import cut


def make_batches(args):
    """Return the features of micro-batches."""
    random = np.random.default_rng(0)
    found = []
    while len(found) < args.batches:
        lengths = np.clip(random.lognormal(np.log(60), 0.7, 128).astype(int), 4, 256)
        lengths = -(-lengths // args.multiple) * args.multiple
        for indices in cut(lengths, args.batch_tokens):
            shape = (len(indices), int(lengths[indices].max()))
            ids = torch.from_numpy(random.integers(1000, 20_000, shape))
            mask = torch.from_numpy((np.arange(shape[1]) < lengths[indices][:, None]).astype(np.int64))
            found.append({"input_ids": ids, "attention_mask": mask})
    return found[: args.batches]


def run(model, batches):
    """Return the seconds of a forward and a backward pass of each micro-batch."""
    started = time.perf_counter()
    for features in batches:
        model(dict(features))["sentence_embedding"].square().sum().backward()
        model.zero_grad()
    return time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch_tokens", type=int, default=2048)
    parser.add_argument("--multiple", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", default=["eager", "dynamic", "static"])
    args = parser.parse_args()
    batches = make_batches(args)
    tokens = sum(int(features["attention_mask"].sum()) for features in batches)
    shapes = {tuple(features["input_ids"].shape) for features in batches}
    print(f"{len(batches)} micro-batches of {len(shapes)} shapes, {tokens:,} tokens")
    torch._dynamo.config.cache_size_limit = 10_000
    models, first = {}, {}
    kinds = {"eager": None, "dynamic": {"dynamic": True}, "static": {"dynamic": False}}
    for name in args.kinds:
        options = kinds[name]
        models[name] = SentenceTransformer(args.model, device="cpu").train()
        if options:
            models[name].compile(**options)  # the transformer alone would not do: its forward is called directly
        first[name] = run(models[name], batches)
        print(f"{name}: first pass {first[name]:.1f} s", flush=True)
    rates = {name: [] for name in models}
    for _ in range(args.rounds):
        for name, model in models.items():
            rates[name].append(tokens / run(model, batches))
    for name, values in rates.items():
        ratios = [value / eager for value, eager in zip(values, rates["eager"])]
        print(f"{name}: {statistics.median(values):,.0f} tokens/s, {statistics.median(ratios):.2f}x of eager")


if __name__ == "__main__":
    main()
