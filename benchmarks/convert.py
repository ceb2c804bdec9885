"""Converting one table from ORC and from Parquet: peak memory, seconds, and whether the shards are the same bytes.

   python benchmarks/convert.py [--rows 2000000] [--rounds 3]

The table has two texts and a score, 110 bytes a row; the filter keeps a tenth of the rows. Memory is anonymous
(RssAnon, read every 10 ms); `start` is that of an interpreter that has imported prepare_corpus.py. Medians.
"""

import argparse
import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq

SCRIPT = Path(__file__).parents[1] / "prepare_corpus.py"


def generate(folder, rows):
    """Write the table to folder/table.orc (stripes of 64 MB) and table.parquet (row groups of 100,000)."""
    rng = np.random.default_rng(0)
    text = rng.bytes(rows // 2 + 100).hex()
    schema = pa.schema([("query", pa.string()), ("text", pa.string()), ("score", pa.float64())])
    with (pq.ParquetWriter(f"{folder}/table.parquet", schema) as parquet,
          pa.orc.ORCWriter(f"{folder}/table.orc", compression="snappy") as orc):  # fmt: skip
        for first in range(0, rows, 100_000):
            numbers = range(first, min(first + 100_000, rows))
            queries = [f"query {n} {text[n : n + 24]}" for n in numbers]
            texts = [f"text {n} {text[n + 24 : n + 72]}" for n in numbers]
            table = pa.table([queries, texts, rng.random(len(numbers))], schema=schema)
            parquet.write_table(table)
            orc.write(table)


def measure(command):
    """Return (peak anonymous MB, seconds) of a command."""
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max([peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))])
        time.sleep(0.01)
    if process.returncode:
        sys.exit(f"failed: {command}")
    return peak / 1000, time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    filters = {"all": [], "a tenth": ["--filter", "[('score', '>', 0.9)]"]}
    runs = {(kind, name): [] for kind in ("orc", "parquet") for name in filters}
    digests = {}
    with tempfile.TemporaryDirectory() as folder:
        generate(folder, args.rows)
        start, _ = measure([sys.executable, SCRIPT, "--help"])
        for _ in range(args.rounds):
            for kind, name in runs:
                flags = ["--output_dir", f"{folder}/out", "--overwrite", *filters[name]]
                runs[kind, name].append(measure([sys.executable, SCRIPT, f"{folder}/table.{kind}", *flags]))
                shards = b"".join(path.read_bytes() for path in sorted(Path(f"{folder}/out").iterdir()))
                digests.setdefault(name, set()).add(hashlib.sha256(shards).hexdigest())
    print(f"{args.rows:,} rows; start {start:.0f} MB\n| read from | rows kept | peak MB | seconds | same bytes |")
    print("|---|---|---|---|---|")
    for (kind, name), results in runs.items():
        peak, seconds = map(statistics.median, zip(*results))
        print(f"| {kind} | {name} | {peak:.0f} | {seconds:.1f} | {len(digests[name]) == 1} |")


if __name__ == "__main__":
    main()
