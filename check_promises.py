"""Check that a trainer or a template, edited or not, keeps its promises on your data: short runs, a line for each.

    python check_promises.py my_trainer.py --model_name_or_path MODEL --train_data train.csv --columns question answer

Give the flags or the YAML file of your training: a run takes five of its steps in a temporary folder. With dropout,
losses and saved weights are compared to the bit; without it, where texts are grouped otherwise, losses, the first
gradient and the update by three steps of a warmup, and the weights of two processes. Status 1: broken; 2: a run fails.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate>=1.12,<2", "datasets>=5.2,<6", "matplotlib>=3.9,<4", "psutil>=5.9,<8",
#   "pyyaml>=6.0.1,<7", "sentence-transformers>=6.2,<7", "torch>=2.9,<3", "transformers>=5.18,<6", "xxhash>=3.5,<5"]
# ///

import argparse
import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from torch.optim.optimizer import register_optimizer_step_pre_hook

SHORT = ["--max_steps=5", "--save_steps=2", "--logging_steps=1", "--eval_steps=5", "--eval_rows=0", "--warmup_ratio=0"]
CLASHING = {"output_dir", "resume", "accept_changes", "eval_data", "eval_beir", "metric_for_best_model", "report_to",
            "early_stopping_patience", "micro_batch_tokens", "grad_cache", "max_graph_tokens"}  # fmt: skip
TOLERANCES = {"no": (1e-4, 1e-3, 0.1), "fp16": (1e-2, 5e-2, 0.3), "bf16": (5e-2, 0.3, 0.6)}  # relative
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def watch(folder, dropout, script, *flags):
    """Do what `python script flags` does; write what three steps change to a file of this process, at the fourth."""
    watched = {}  # {optimizer: its watch_steps()}
    done = {"digest": "", "changes": torch.zeros(2, 1)}  # of the weights; the first gradient and the update
    path = f"{folder}/{os.environ.get('RANK', 0)}.pt"
    torch.save(done, path)

    def flat(tensors):
        return torch.cat([tensor.detach().flatten().float().cpu() for tensor in tensors])

    def watch_steps(optimizer):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradient = flat(weight * 0 if weight.grad is None else weight.grad for weight in weights)
        before = flat(weights)
        yield from [None] * 3  # until the fourth step
        changes = torch.stack([gradient.nan_to_num(0, 0, 0), flat(weights) - before])  # fp16 may look for its scale
        done["changes"] = torch.cat([done["changes"], changes], 1)
        done["digest"] += hashlib.sha256(flat(weights).numpy()).hexdigest()
        torch.save(done, path)

    register_optimizer_step_pre_hook(lambda by, *_: next(watched.setdefault(by, watch_steps(by)), None))
    if dropout == "no dropout":  # whether or not the script has the flag
        attend = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = lambda *tensors, dropout_p=0, **options: attend(*tensors, **options)
        F.dropout = lambda values, *_, **__: values
    sys.argv[:] = [script, *flags]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


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


def compare(found, expected, tolerances):
    """Return (verdict, reason) on a run that should do what another does: within tolerances, or else to the bit."""
    logged, saved, processes = found
    right_logged, right_saved, (right_process,) = expected
    if others := logged.keys() ^ right_logged.keys():
        return "BROKEN", "only one of both runs logs the {1} of step {0}".format(*min(others))
    losses = 0.0
    for (step, name), right in right_logged.items():
        value = logged[step, name]
        off = 0.0 if value == right else abs(value - right) / max(abs(right), 0.1)
        if not off < torch.inf:
            return "BROKEN", f"{name} of step {step}: {value} beside {right}"
        losses = max(losses, off if step <= 2 or not tolerances else 0.0)
    changes = right_process["changes"]
    if not changes[1].any():
        return "not checked:", "three steps of an optimizer of torch change no weight"
    if processes[0]["digest"] != processes[-1]["digest"]:
        return "BROKEN", "after three steps the weights of both processes are not equal"
    if tolerances:
        sizes = changes.norm(dim=1).maximum(torch.tensor([0.1, 0.0]))  # a smaller gradient may be rounding alone
        gradient, update = (processes[0]["changes"] - changes).norm(dim=1) / sizes
        is_kept = all(off < limit for off, limit in zip((losses, gradient, update), tolerances))
        how = f"losses, gradient, update differ by {losses:.1g}, {gradient:.1g}, {update:.1g}; tolerances {tolerances}"
    else:
        is_kept = losses == 0 and saved == right_saved
        how = f"losses differ by {losses:.1g}, saved weights are {'equal' if saved == right_saved else 'not equal'}"
    return "kept" if is_kept else "BROKEN", how


def main(words, folder):
    """Print a line for each promise; return whether one is broken. words: script and flags; folder: an empty one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", help="then its flags")
    parser.add_argument(*(f"--{name}" for name in CLASHING), dest="clashing", nargs="*", help=argparse.SUPPRESS)
    args, words = parser.parse_known_args([word.replace(" ", "\0") for word in words])
    words = [word.replace("\0", " ") for word in words]  # else "--flag=a b" is no flag for argparse
    output = folder / "run"
    listed = re.findall(r"--\w+", run([args.script, "--help"], folder / "log", {}))  # from Python 3.13 on with commas
    if words and not words[0].startswith("--"):  # a YAML or JSON file
        flags = yaml.safe_load(Path(words[0]).read_text(encoding="utf-8"))
        words[0] = str(folder / "flags.json")
        Path(words[0]).write_bytes(json.dumps({name: flags[name] for name in flags.keys() - CLASHING}).encode())
    exact = ["--full_determinism=true"] * torch.accelerator.is_available()
    command = [__file__, "--watch", str(folder), "dropout", args.script, *words]
    short = [*SHORT, *exact, "--micro_batch_tokens=2048", f"--output_dir={output}"]
    command += [word for word in short if word.partition("=")[0] in listed]
    verdicts = []

    def check(promise, edit, more, expected=None, tolerances=None, launcher=(), variables=None):
        """Run the script with more flags; return what it does, and print whether that is as expected."""
        print(f"... {promise}", file=sys.stderr)
        shutil.rmtree(output, ignore_errors=True)
        missing = [f"no {word}" for word in more if word.partition("=")[0] not in listed]
        if "--resume=true" in more and not missing:
            ended = run(command, folder / "log", {}, lambda: [*output.glob("*/step_*"), *output.glob("*.pt")])
            missing = ["no checkpoint before its end"] * (ended is not None)
        if missing:
            return print(f"not checked: {promise}: {missing[0]}", flush=True)
        run([*launcher, *command, *more], folder / "log", variables or {})
        lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        logged = {(line["step"], key): line[key] for line in lines for key in ("loss", "grad_norm") if key in line}
        saved = {path.relative_to(output): path.read_bytes() for path in output.rglob("*.safetensors")}
        found = logged, saved, [torch.load(folder / f"{rank}.pt") for rank in range(2 if launcher else 1)]
        if expected:
            verdict, reason = compare(found, expected, tolerances)
            if "--resume=true" in more and found[2][0]["digest"]:  # made at a fourth step; after two there are three
                verdict, reason = "BROKEN", "the resumed run began anew"
            verdicts.append(verdict)
            print(f"{verdict:7} {promise}: {reason}" + f"; as by {edit}" * (verdict == "BROKEN"), flush=True)
        return found

    limits = TOLERANCES[os.environ.get("ACCELERATE_MIXED_PRECISION", "no")]
    first = check("a first run", "", [])
    check("two runs give the same bytes", "a draw without the batch's seed", exact, first)
    again = ["--max_graph_tokens=0" if "--max_graph_tokens" in listed else "--grad_cache=true"]
    check("graphs computed again", "another draw, or state that a forward pass changes", again, first, limits)
    check("killed after two steps and resumed", "state that no checkpoint has", ["--resume=true", *exact], first)
    command[3] = "no dropout"
    command += [word for word in ("--dropout=0", "--warmup_ratio=1") if word.partition("=")[0] in listed]
    one = check("one process without dropout", "", [])
    check("passes of a quarter of the tokens", "a mean, a schedule by pass", ["--micro_batch_tokens=512"], one, limits)
    on = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"} if torch.accelerator.device_count() == 1 else {}
    one = check("one process on a CPU", "", [], variables=on) if on else one
    check("two processes against one", "a mean, a rate, a schedule by process", [], one, limits, LAUNCHER, on)
    return "BROKEN" in verdicts


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        sys.exit(watch(*sys.argv[2:]))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    with tempfile.TemporaryDirectory(prefix="check_promises-") as temporary:
        sys.exit(main(sys.argv[1:], Path(temporary)))
