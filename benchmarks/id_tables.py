"""Texts by id from a table on disk: memory of each process and lookups a second, against resolve_ids.

    python benchmarks/id_tables.py [--rows 5000000] [--lookups 200000] [--processes 2]

Generates a JSON Lines table of --rows passages. Two processes at a time open it and look up random ids: first with
our lookup, all ids of a process' rows of a batch together, then with `sentence_transformers.util.resolve_ids` over a
mapped `datasets.Dataset`, five ids at a time, as for a row of a query, a positive and negatives. Memory is the
increase of RssAnon, which excludes the pages of mapped files. Writes id_tables.json.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def anonymous_bytes():
    """RssAnon of this process."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


def measure(side, table, args):
    """In a process of its own: open, look up, print [seconds to open, lookups a second, anonymous MB added]."""
    dice = random.Random(args.seed)
    ids = [str(dice.randrange(args.rows) * 7) for _ in range(args.lookups)]
    fives = [ids[i : i + 5] for i in range(0, len(ids), 5)]
    if side == "evenstep":
        sys.path.insert(0, str(ROOT))
        import train_bi_encoder as script

        before, started = anonymous_bytes(), time.perf_counter()
        look_up = script.TextLookup([table], ["_id", "text"]).texts
        fives = [ids[i : i + args.at_once] for i in range(0, len(ids), args.at_once)]
    else:
        from datasets import load_dataset
        from sentence_transformers.util import resolve_ids

        before, started = anonymous_bytes(), time.perf_counter()
        cache = str(Path(table).parent / "datasets")
        data = load_dataset("json", data_files=table, split="train", cache_dir=cache)
        resolve = resolve_ids({"_id": (data, "_id", "text")})
        look_up = lambda five: resolve({"_id": five})  # noqa: E731
        look_up(fives[0])  # it makes its dict at the first use
    opened = time.perf_counter() - started
    started = time.perf_counter()
    for five in fives:
        look_up(five)
    rate = len(ids) / (time.perf_counter() - started)
    print(json.dumps([opened, rate, (anonymous_bytes() - before) / 1e6]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--lookups", type=int, default=200_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--at_once", type=int, default=10_000, help="ids that ours looks up together")
    parser.add_argument("--output", default="id_tables.json")
    parser.add_argument("--side", choices=["evenstep", "resolve_ids"], help=argparse.SUPPRESS)
    parser.add_argument("--table", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return measure(args.side, args.table, args)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        table = f"{folder}/passages.jsonl"
        with open(table, "w") as file:
            for i in range(args.rows):
                record = {"_id": str(i * 7), "text": f"passage {i} " + "of some fifty words " * 12}
                file.write(json.dumps(record) + "\n")
        for side in ("evenstep", "resolve_ids"):
            command = [sys.executable, __file__, "--side", side, "--table", table, "--rows", str(args.rows)]
            command += ["--lookups", str(args.lookups), "--at_once", str(args.at_once)]
            first = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # makes index and copies
            made = json.loads(first.stdout.splitlines()[-1])
            both = [subprocess.Popen([*command, "--seed", str(i)], stdout=subprocess.PIPE, text=True)
                    for i in range(args.processes)]  # fmt: skip
            found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in both]
            results[side] = {"first_open_seconds": made[0], "runs": found}
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "results": results}, indent=1))
    print("| side | first opening, s | later, s | lookups a second, each process | anonymous memory of each, MB |")
    print("|---|---|---|---|---|")
    for side, result in results.items():
        opened, rate, memory = (statistics.median(run[i] for run in result["runs"]) for i in range(3))
        print(f"| {side} | {result['first_open_seconds']:.1f} | {opened:.2f} | {rate:,.0f} | {memory:,.0f} |")


if __name__ == "__main__":
    main()
