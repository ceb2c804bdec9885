"""Break the scripts in the ways that tests must see: python tests/mutations.py [NAME ...] applies one of
tests/mutations/*.patch at a time to a copy of the repository, runs the test after `Seen by:`, and prints a table.

Those with `Breaks:` break promises of check_promises.py: tests/test_check_promises.py applies them.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATCHES = {path.stem: path for path in sorted((ROOT / "tests/mutations").glob("*.patch"))}
FOUND = {name: re.search("^Seen by: (.+)$", path.read_text(), re.M) for name, path in PATCHES.items()}
TESTS = {name: found[1] for name, found in FOUND.items() if found}
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "data", "runs", "shared")


def apply(name, folder, *options):
    """Apply a patch in a folder; raise CalledProcessError if it does not apply."""
    subprocess.run(["git", "apply", *options, PATCHES[name]], cwd=folder, check=True)


def run(name, folder):
    """Return whether the test of a patch fails, and what pytest prints, in a new folder for the copy."""
    shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
    apply(name, folder)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", TESTS[name]]
    environment = {key: value for key, value in os.environ.items() if key != "FORKSERVER"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return bool(re.search(r"\d+ failed", done.stdout, re.M)), done.stdout


if __name__ == "__main__":
    print("| patch | test | red |\n|---|---|---|")
    for name in sys.argv[1:] or TESTS:
        with tempfile.TemporaryDirectory() as folder:
            is_red, _ = run(name, Path(folder, "copy"))
        print(f"| {name} | {TESTS[name]} | {'yes' if is_red else 'NO'} |", flush=True)
