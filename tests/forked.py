"""Run scripts in processes forked from a server that has imported torch: each saves the seconds of that import.

The server is multiprocessing's forkserver. It starts before the first process and ends with the tests. Apart from the
imports, a forked process is like any other: its signals, files, sockets and exit status are real.
"""

import ctypes
import functools
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTEXT = multiprocessing.get_context("forkserver")


def merge_flags(flags):
    """Return the words of a command line; a repeated flag keeps only its last values, so that tests can override
    it."""
    parts = []  # [flag, value, ...] each
    for word in map(str, flags):
        if word.startswith("--") or not parts:
            parts.append([])
        parts[-1].append(word)
    kept = {part[0]: part for part in parts}
    return [word for part in kept.values() for word in part]


def run(script, flags, environment, cwd, output, network):
    """Do in the forked process what `python script flags` does; stdout and stderr are files in the folder `output`."""
    if network:  # as `ip netns exec network` does
        with open(f"/run/netns/{network}") as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    config = sys.modules["datasets"].config  # of the server, which has other variables
    config.HF_DATASETS_CACHE = Path(environment["HF_DATASETS_CACHE"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{output}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if environment.get("ATEN_CPU_CAPABILITY") == "default":
        import torch  # which reads it at its first operation, which must not be the server's

        assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    time.sleep = lambda seconds, sleep=time.sleep: sleep(1 if seconds == 5 else seconds)  # there is no launcher
    sys.argv[:] = [script, *flags]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


@functools.cache
def start_server():
    """Start the server, or use that of the process that has started this worker of pytest-xdist. PYTHONPATH is set for
    it alone: a script copied into an empty folder must not need it."""
    server = forkserver._forkserver
    if "FORKSERVER" in os.environ:
        server._forkserver_address, key = os.environ["FORKSERVER"].split()
        server._forkserver_authkey = bytes.fromhex(key)  # since Python 3.14
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the other process decides when it ends
        server.ensure_running = lambda: None
        return
    os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT}/tests"
    CONTEXT.set_forkserver_preload(["preload"])
    server.ensure_running()
    del os.environ["PYTHONPATH"]
    key = getattr(server, "_forkserver_authkey", b"-")
    os.environ["FORKSERVER"] = f"{server._forkserver_address} {key.hex()}"


def launcher_environment(*words):
    """Return the environment that `accelerate launch words` gives a script, computed by Accelerate's own functions."""
    from accelerate.commands import launch

    args = launch.launch_command_parser().parse_args([*map(str, words), "script"])
    return launch.prepare_multi_gpu_env(launch._validate_launch_command(args)[0])


class Forked:
    """A script on one or more processes, which find one another by torchrun's environment variables.

    environment: further variables; networks: [(namespace, address)] of hosts with one process each; per_rank: flags
    of each process. After `timeout` seconds, poll() and wait() kill all processes and raise TimeoutError.
    """

    def __init__(self, script, flags, processes=1, cwd=ROOT, timeout=240, environment=None, networks=(), per_rank=()):
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", **(environment or {})}
        start_server()
        if processes > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            environment |= {"MASTER_ADDR": networks[0][1] if networks else "127.0.0.1", "MASTER_PORT": port}
            environment |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": "1" if networks else str(processes)}
        self.output, self.deadline = tempfile.mkdtemp(), time.monotonic() + timeout
        self.processes = []
        for rank in range(processes):
            place = {"RANK": str(rank), "LOCAL_RANK": "0" if networks else str(rank)} if processes > 1 else {}
            network = networks[rank][0] if networks else None
            own = merge_flags([*flags, *(per_rank and per_rank[rank])])
            words = [str(script), own, environment | place, str(cwd), self.output, network]
            self.processes.append(CONTEXT.Process(target=run, args=words))
            self.processes[-1].start()

    def poll(self):
        """Return None while they run, then the exit status; if one fails, kill the others."""
        statuses = [process.exitcode for process in self.processes]
        if any(statuses):
            self.send(signal.SIGKILL)
        elif None in statuses:
            if time.monotonic() > self.deadline:
                self.send(signal.SIGKILL)
                raise TimeoutError(f"timed out; {self.read('stderr')[-4000:]}")
            return None
        for process in self.processes:
            process.join()
        return next(filter(None, statuses), 0)

    def wait(self):
        while (status := self.poll()) is None:
            time.sleep(0.01)
        return status

    def send(self, number, ranks=slice(None)):
        """Send a signal to those of `ranks` that still run."""
        for process in self.processes[ranks]:
            if process.exitcode is None:
                with suppress(ProcessLookupError):  # it has ended since
                    os.kill(process.pid, number)

    def read(self, name):
        """Return what all processes have written to `name`: "stdout" or "stderr"."""
        return Path(f"{self.output}/{name}").read_text()
