"""Run the scripts on the simulated device, each in a process forked from this one, which has imported torch.

Each line of stdin is a job in JSON, or the name of one of PROGRAMS, which is answered by a line of stdout: its result.
A job has "script" and "flags", and may have: "device": False, to run on the CPU; "mixed", "flash", "memory" and
"kind", for StrictDevice; "processes"; "scale", the initial one of fp16; "removed", a folder to remove first. A result
is that of process 0: "error"; "metrics", the lines of metrics.jsonl; "syncs" and "reports" of StrictDevice, the latter
of all processes; "waits" until the gradient of each step; "outputs", the number of forward passes in training;
"changed", how many of --grad_cache gave another output in the second pass. The gradient of the first step is in
gradient.npy in --output_dir. A "script" in templates/ has only "error", "metrics", "syncs" and "reports".
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from unittest import mock

import strict_device  # before torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import accelerate
import late_programs
import numpy as np
import preload  # noqa: F401
import torch
import torch._dynamo  # noqa: F401 (it inspects torch's functions, hence before they are replaced)
from strict_device import StrictDevice, on_cpu
from transformers import HfArgumentParser


def recorder(job, output, device, result):
    """Return a subclass of Accelerator that records waits and the first gradient, and scales as the job says."""

    class Accelerator(accelerate.Accelerator):
        def __init__(self, **options):
            super().__init__(**options)
            if "scale" in job:  # after an overflow 2**8; doubled after every two steps without one
                factors = {"backoff_factor": 2.0**8 / job["scale"], "growth_interval": 2}
                self.scaler = torch.amp.GradScaler("cuda", init_scale=job["scale"], **factors)

        def clip_grad_norm_(self, parameters, *args):
            parameters = list(parameters)
            if self.is_main_process and not result["waits"]:
                gradients = [on_cpu(p.grad.detach()).flatten() for p in parameters if p.grad is not None]
                np.save(output / "gradient.npy", torch.cat(gradients).numpy())
            result["waits"].append(sum(device.syncs.values()))
            return super().clip_grad_norm_(parameters, *args)

    return Accelerator


def run(job):
    """Run a job in this process and return its result."""
    script, mixed = sys.modules[job["script"]], job.get("mixed", "no")
    name = "score" if job["script"] == "train_cross_encoder" else "encode"
    forward, outputs = getattr(script, name, None), []  # None: of the evaluator
    output = Path(job["flags"][job["flags"].index("--output_dir") + 1])
    if "removed" in job:
        shutil.rmtree(output / job["removed"])
    os.environ["ACCELERATE_MIXED_PRECISION"] = mixed  # as `accelerate launch` does
    options = {name: job[name] for name in ("memory", "kind") if name in job}
    device, result = StrictDevice(job.get("flash", False), mixed, **options), {"error": None, "waits": []}

    def recorded(model, *given):
        found = forward(model, *given)
        if model.training:
            outputs.append(on_cpu(found.detach()).clone())
        return found

    cpu = mock.patch.object(torch.accelerator, "is_available", lambda: False)
    try:
        with (
            mock.patch.object(script, "try_concatenated", device.unreported(script.try_concatenated)),
            mock.patch.object(script, "Accelerator", recorder(job, output, device, result)),
            mock.patch.object(script, name, recorded, create=True),
            device if job.get("device", True) else cpu,
        ):
            script.main(script.parse_args(job["flags"]))
    except Exception as error:
        result["error"] = str(error)
        traceback.print_exc()
    lines = (output / "metrics.jsonl").read_text().splitlines() if (output / "metrics.jsonl").exists() else []
    result |= {"metrics": list(map(json.loads, lines)), "syncs": device.syncs, "reports": device.reports}
    if "--grad_cache" in job["flags"]:  # in one step
        pairs = zip(outputs[: len(outputs) // 2], outputs[len(outputs) // 2 :])
        result["changed"] = sum(not torch.equal(*pair) for pair in pairs)
    return result | {"outputs": len(outputs)}


def run_template(job):
    """Run a template in this process and return its result."""
    name = Path(job["script"]).name
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{job['script']}.py")
    script = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (args,) = HfArgumentParser(script.Args).parse_args_into_dataclasses(job["flags"])
    mixed = job.get("mixed", "no")
    os.environ["ACCELERATE_MIXED_PRECISION"] = mixed
    cpu = mock.patch.object(torch.accelerator, "is_available", lambda: False)
    device = StrictDevice(mixed=mixed)
    result = {"error": None, "metrics": [], "syncs": device.syncs, "reports": device.reports}
    try:
        with device if job.get("device", True) else cpu:
            script.main(args)
        result["metrics"] = list(map(json.loads, Path(args.output_dir, "metrics.jsonl").read_text().splitlines()))
    except Exception as error:
        result["error"] = str(error)
        traceback.print_exc()
    return result


def refusals():
    """Return the messages by which the device refuses what CUDA refuses, and the waits that it counts otherwise."""
    refused, device = [], StrictDevice(flash=True)
    with device:
        on, off = torch.tensor([1.0, 2.0], device=strict_device.DEVICE), torch.tensor([3.0, 4.0])
        assert on.device == strict_device.DEVICE and isinstance(on, strict_device.OnDevice)
        for attempt in (
            lambda: on + off,
            lambda: torch.cat([on, off]),
            lambda: off[on.long()],
            lambda: on @ off,
            lambda: on.pin_memory(),
            lambda: on.expand(3, 2).add_(1),
            lambda: device.flash_func(*[on.view(1, 1, 1, 2)] * 3),
        ):
            try:
                attempt()
                refused.append("not refused")
            except RuntimeError as error:
                refused.append(str(error))
        device.syncs.clear()
        assert (on * 2 + 1).tolist() == [3.0, 5.0] and on[[1]].sum().item() == 2.0
        assert on.to("cpu").add(off).tolist() == [4.0, 6.0]
    return {"refused": refused, "syncs": device.syncs}


def fork(function, *args, processes=1):
    """Call a function in forked processes; return what it returns in process 0, with the "reports" of all."""
    folder = Path(tempfile.mkdtemp())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for rank in range(processes):
        if os.fork():
            continue
        signal.alarm(120)
        if processes > 1:  # each the only one of its machine, because there is one simulated device
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes)}
        (folder / str(rank)).write_text(json.dumps(function(*args)))
        os._exit(0)
    for _ in range(processes):
        os.wait()
    if len(os.listdir(folder)) < processes:
        return {"error": "ended without a result", "reports": {}}
    first, *others = [json.loads((folder / str(rank)).read_text()) for rank in range(processes)]
    for other in others:
        first["reports"] |= other["reports"]
    return first


PROGRAMS = {"simulated device": refusals, "late device": late_programs.run}

if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the jobs print
    for job in map(json.loads, sys.stdin):
        if isinstance(job, str):
            result = fork(PROGRAMS[job])
        else:
            function = run_template if job["script"].startswith("templates/") else run
            result = fork(function, job, processes=job.get("processes", 1))
        print(json.dumps(result), file=answers, flush=True)
