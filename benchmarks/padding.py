"""Padding of token-budget micro-batches against infinibatch's BucketedReadaheadBatchIterator: same rows, same window.

    python benchmarks/padding.py TEXT_FILE MODEL_FOLDER [--budget 16384] [--window 10000] [--repeat 100000]

Both sides see the same token lengths (non-empty lines, at most 512 tokens), the lines as they are in one window, then
repeated to 100,000 in windows. infinibatch cuts greedily: once with the same budget, and once with the budget that
gives it as many forward passes as ours take, so that neither side buys padding with passes. Writes padding.json.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import train_bi_encoder as script


def padding(batches):
    """(share of padding, passes, largest pass in tokens) of lists of lengths."""
    sizes = [len(batch) * max(batch) for batch in batches]
    return 1 - sum(map(sum, batches)) / sum(sizes), len(sizes), max(sizes)


def ours(lengths, window, budget):
    """Lists of lengths that are encoded together, window by window."""
    found = []
    for part in (np.array(lengths[i : i + window]) for i in range(0, len(lengths), window)):
        found += [part[places].tolist() for places in script.cut(part, budget)]
    return found


def infinibatch(lengths, window, budget):
    from infinibatch.iterators import BucketedReadaheadBatchIterator, NativeCheckpointableIterator

    return list(
        BucketedReadaheadBatchIterator(
            NativeCheckpointableIterator(lengths), read_ahead=window, key=lambda length: length,
            batch_size=lambda longest: max(1, budget // longest), shuffle=True, seed=0,
        )
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("model")
    parser.add_argument("--budget", type=int, default=16_384)
    parser.add_argument("--window", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=100_000)
    parser.add_argument("--output", default="padding.json")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lines = [line for line in Path(args.file).read_text().splitlines() if line.strip()]
    lengths = [len(ids) for ids in tokenizer(lines, truncation=True, max_length=512)["input_ids"]]
    order = np.random.default_rng(0).permutation(args.repeat)
    repeated = [lengths[i % len(lengths)] for i in order]
    table = []
    for name, rows, window in (
        (f"{len(lengths):,} lines, one window", lengths, len(lengths)),
        (f"repeated to {args.repeat:,}, windows of {args.window:,}", repeated, args.window),
    ):
        mine = padding(ours(rows, window, args.budget))
        table.append((name, f"Evenstep, budget {args.budget:,}", *mine))
        table.append((name, f"infinibatch, budget {args.budget:,}", *padding(infinibatch(rows, window, args.budget))))
        low, high = (
            args.budget // 8,
            args.budget * 2,
        )  # passes fall as the budget grows: the smallest that needs no more
        while low < high:
            middle = (low + high) // 2
            if padding(infinibatch(rows, window, middle))[1] > mine[1]:
                low = middle + 1
            else:
                high = middle
        table.append((name, f"infinibatch, budget {low:,}", *padding(infinibatch(rows, window, low))))
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "table": table}, indent=1))
    print("| rows | side | padding | passes | largest pass, tokens |\n|---|---|---|---|---|")
    for name, side, share, passes, largest in table:
        print(f"| {name} | {side} | {share:.2%} | {passes:,} | {largest:,} |")


if __name__ == "__main__":
    main()
