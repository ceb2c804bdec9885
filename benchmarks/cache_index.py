"""How to find a text among the blocks of the embedding cache: rates and sizes of three indexes as they grow.

    python benchmarks/cache_index.py [--texts 20000000]

Random hashes come in blocks of 4,096. For each block: look up 4,096 hashes, of which the index holds a quarter, then
add the block, as the evaluator does with a corpus that is partly new. Three indexes, each in a process of its own:

- table: one SQLite table of (hash, block, row);
- 16 tables: the same, in a file for each value of the first four bits of the hash;
- segments: eval_incremental.py's TextIndex, sorted segments of 256 blocks in memory-mapped files.

Prints for each tenth of the texts: texts a second of lookups and of adding, bytes a text on disk, and the largest
anonymous memory of the process so far.
"""

import argparse
import multiprocessing
import re
import shutil
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import eval_incremental as script

BLOCK = 4096


class Tables:
    """Tables of SQLite, by the first bits of the hash; committed once a block, as diskcache does."""

    def __init__(self, folder, count):
        self.files = []
        for number in range(count):
            file = sqlite3.connect(folder / f"{number}.db", isolation_level=None)
            file.execute("PRAGMA journal_mode = WAL")
            file.execute("PRAGMA synchronous = NORMAL")
            file.execute(f"PRAGMA cache_size = {2**11 // count}")
            file.execute("CREATE TABLE texts (hash BLOB PRIMARY KEY, block, row) WITHOUT ROWID")
            self.files.append(file)

    def split(self, hashes):
        file_of = hashes.view(np.uint8)[::16].astype(int) * len(self.files) // 256
        for number, file in enumerate(self.files):
            yield file, np.flatnonzero(file_of == number)

    def find(self, hashes):
        count = 0
        for file, rows in self.split(hashes):
            words = hashes[rows].tolist()
            marks = ",".join("?" * len(words))
            count += len(file.execute(f"SELECT * FROM texts WHERE hash IN ({marks})", words).fetchall())
        return count

    def add(self, number, hashes):
        for file, rows in self.split(hashes):
            entries = sorted(zip(hashes[rows].tolist(), [number] * len(rows), rows.tolist()))
            file.execute("BEGIN")
            file.executemany("INSERT OR REPLACE INTO texts VALUES (?, ?, ?)", entries)
            file.execute("COMMIT")


class Segments:
    def __init__(self, folder):
        self.index = script.TextIndex(folder / "index")

    def find(self, hashes):
        return np.count_nonzero(self.index.find(script.short_hashes(hashes)))

    def add(self, number, hashes):
        self.index.add(number, script.short_hashes(hashes))


INDEXES = {
    "table": lambda folder: Tables(folder, 1),
    "16 tables": lambda folder: Tables(folder, 16),
    "segments": Segments,
}


def anonymous_memory():
    """Return the MB of anonymous memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024


def run(name, texts):
    """Print the line of each tenth of the texts."""
    folder = Path(tempfile.mkdtemp())
    index = INDEXES[name](folder)
    dice = np.random.default_rng(0)
    kept = np.frombuffer(dice.bytes(16 * BLOCK), "V16")
    blocks = texts // BLOCK
    seconds = {"find": 0.0, "add": 0.0}
    most = 0
    for number in range(1, blocks + 1):
        hashes = np.frombuffer(dice.bytes(16 * BLOCK), "V16")
        asked = hashes.copy()
        asked[::4] = kept[::4]
        started = time.perf_counter()
        found = index.find(asked)
        asked_for = time.perf_counter()
        index.add(number, hashes)
        seconds["find"] += asked_for - started
        seconds["add"] += time.perf_counter() - asked_for
        assert found == (BLOCK // 4 if number > 1 else 0), (number, found)
        if dice.random() < 0.1 or number == 1:
            kept = hashes
        most = max(most, anonymous_memory()) if number % 50 == 0 else most
        if number % (blocks // 10) == 0:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            tenth = blocks // 10 * BLOCK
            print(f"| {name} | {number * BLOCK:,} | {tenth / seconds['find']:,.0f} | {tenth / seconds['add']:,.0f} "
                  f"| {size / number / BLOCK:.1f} | {most:,.0f} |", flush=True)  # fmt: skip
            seconds = {"find": 0.0, "add": 0.0}
    shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--texts", type=int, default=20_000_000)
    parser.add_argument("--only", choices=INDEXES, nargs="+", default=list(INDEXES))
    args = parser.parse_args()
    print("| index | texts | lookups/s | added/s | bytes a text | MB |\n|---|---:|---:|---:|---:|---:|")
    for name in args.only:
        process = multiprocessing.get_context("spawn").Process(target=run, args=(name, args.texts))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
