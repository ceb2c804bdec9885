"""Check that a trainer or a template, edited or not, keeps its promises on your data: short runs, a line for each.

    python check_promises.py my_trainer.py --model_name_or_path MODEL --train_data train.csv --columns question answer

Give the flags or the YAML file of your training: a run takes five of its steps, without evaluation, in a temporary
folder. Where texts are grouped otherwise, losses and gradient norms of two steps are compared, without dropout, as
rounding grows later; else those of all, with dropout, and the bytes of the weights. Two processes run on two GPUs, or
they and one on CPUs. The precision is that of ACCELERATE_MIXED_PRECISION. Exit status: 1: broken; 2: a run fails.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate>=1.12,<2", "datasets>=5.2,<6", "matplotlib>=3.9,<4", "psutil>=5.9,<8",
#   "pyyaml>=6.0.1,<7", "sentence-transformers>=6.2,<7", "torch>=2.9,<3", "transformers>=5.18,<6", "xxhash>=3.5,<5"]
# ///

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml

SHORT = "--max_steps=5 --save_steps=2 --save_total_limit=1 --logging_steps=1 --eval_steps=5 --eval_rows=0"
CLASHING = {"output_dir", "resume", "accept_changes", "eval_data", "eval_beir", "metric_for_best_model", "report_to",
            "early_stopping_patience", "micro_batch_tokens", "grad_cache", "max_graph_tokens"}  # fmt: skip
WITHOUT_DROPOUT = """import runpy, torch  # runs a script that has no --dropout
torch.nn.Module.training = property(lambda module: False, lambda module, mode: None)
runpy.run_path({!r}, run_name="__main__")"""
TOLERANCE = {"no": 1e-4, "fp16": 1e-2, "bf16": 5e-2}[os.environ.get("ACCELERATE_MIXED_PRECISION", "no")]  # relative
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def run(command, log, variables, is_enough=lambda: False):
    """Run Python with a command; kill it by SIGKILL once is_enough(). Return what it printed if it ended before."""
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen([sys.executable, *command], stdout=file, stderr=file, env=os.environ | variables)
    try:
        while process.poll() is None and not is_enough():
            time.sleep(0.002)
    finally:
        status = process.poll()
        (process.terminate if command[0] == "-m" else process.kill)()  # a launcher ends its processes, too
        process.wait()
    if status:
        print(f"python {' '.join(command)}: status {status}\n{log.read_text()[-3000:]}", file=sys.stderr)
        raise SystemExit(2)
    return None if status is None else log.read_text()


def main(words, folder):
    """Print a line for each promise; return whether one is broken. words: script and flags; folder: an empty one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", help="then its flags")
    parser.add_argument(*(f"--{name}" for name in CLASHING), dest="clashing", nargs="*", help=argparse.SUPPRESS)
    args, words = parser.parse_known_args([word.replace(" ", "\0") for word in words])
    words = [word.replace("\0", " ") for word in words]  # else "--flag=a b" is no flag for argparse
    output = folder / "run"
    log = folder / "log"
    listed = run([args.script, "--help"], log, {}).split()
    if words and not words[0].startswith("--"):  # a YAML or JSON file
        flags = yaml.safe_load(Path(words[0]).read_text(encoding="utf-8"))
        words[0] = str(folder / "flags.json")
        Path(words[0]).write_bytes(json.dumps({name: flags[name] for name in flags.keys() - CLASHING}).encode())
    exact = ["--full_determinism=true"] * torch.accelerator.is_available()
    short = [*SHORT.split(), "--micro_batch_tokens=2048", *exact, f"--output_dir={output}"]
    command = [args.script, *words, *(word for word in short if word.partition("=")[0] in listed)]
    broken = []

    def check(promise, edit, more, expected=None, tolerance=0.0, launcher=(), variables=None):
        """Run the script with more flags; return losses and weights; print whether they are as expected."""
        print(f"... {promise}", file=sys.stderr)
        missing = [f"no {word}" for word in more if word.partition("=")[0] not in listed]
        if "--resume=true" in more and not missing:
            ended = run(command, log, {}, lambda: [*output.glob("*/step_*"), *output.glob("*.pt")])
            missing = ["no checkpoint before its end"] * (ended is not None)
        if missing:
            return print(f"not checked: {promise}: {missing[0]}", flush=True)
        run([*launcher, *command, *more], log, variables or {})
        lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        measured = [line[name] for line in lines for name in ("loss", "grad_norm") if name in line]
        found = measured, [path.read_bytes() for path in sorted(output.rglob("*.safetensors"))]
        shutil.rmtree(output)
        if expected:
            pairs = zip(measured[: 4 if tolerance else None], expected[0])  # of two steps, or of all
            off = torch.tensor([abs(a - b) / max(abs(b), 0.1) for a, b in pairs]).max()  # NaN if one is
            is_kept = found == expected or off < tolerance
            how = f"{promise}: losses differ by {off:.1g}, tolerance {tolerance:g}"
            print(f"kept    {how}" if is_kept else f"BROKEN  {how}; as by {edit}", flush=True)
            broken.append(not is_kept)
        return found

    first = check("a first run", "", [])
    check("two runs give the same bytes", "a draw without the batch's seed", exact, first)
    again = ["--max_graph_tokens=0" if "--max_graph_tokens" in listed else "--grad_cache=true"]
    check("graphs computed again", "another draw, or state that a forward pass changes", again, first, TOLERANCE)
    check("killed after two steps and resumed", "state that no checkpoint has", ["--resume=true", *exact], first)
    command += ["--dropout=0"] * ("--dropout" in listed)
    if "--dropout" not in listed:
        (folder / "script.py").write_text(WITHOUT_DROPOUT.format(args.script))
        command[0] = str(folder / "script.py")
    first = check("a first run without dropout", "", [])
    check("passes of a quarter of the tokens", "a mean over a pass", ["--micro_batch_tokens=512"], first, TOLERANCE)
    on = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"} if torch.accelerator.device_count() == 1 else {}
    one = check("one process on a CPU", "", [], variables=on) if on else first
    check("two processes against one", "a mean over the rows of a process", [], one, TOLERANCE, LAUNCHER, on)
    return any(broken)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    with tempfile.TemporaryDirectory(prefix="check_promises-") as temporary:
        sys.exit(main(sys.argv[1:], Path(temporary)))
