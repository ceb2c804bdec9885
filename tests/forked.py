"""Real processes without the seconds that each would take to import torch: they are forked from one that has done so.

The server is multiprocessing's; it is started before the first of them and ends with the tests. What a process does
from its first line to its last, its signals, files, sockets and exit status are those of any other.
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
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTEXT = multiprocessing.get_context("forkserver")


def last_of(flags):
    """The words of a command line with each flag once, as given last: a test changes flags of a fixture's."""
    parts = []  # a flag and its values each
    for word in map(str, flags):
        if word.startswith("--") or not parts:
            parts.append([])
        parts[-1].append(word)
    kept = {part[0]: part for part in parts}
    return [word for part in kept.values() for word in part]


def run(script, flags, environment, cwd, output, network):
    """In the forked process: what `python script flags` does, its output going to two files of the folder `output`."""
    if network:  # as `ip netns exec network` does
        with open(f"/run/netns/{network}") as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{output}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv[:] = [script, *flags]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


@functools.cache
def start_server():
    """Once, with the scripts on its path only: what runs in an empty folder must not find them there."""
    os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT}/tests"
    CONTEXT.set_forkserver_preload(["preload"])
    forkserver.ensure_running()
    del os.environ["PYTHONPATH"]


def launcher_environment(*words):
    """Return the environment that `accelerate launch words` gives a script, by accelerate's own functions."""
    from accelerate.commands import launch

    args = launch.launch_command_parser().parse_args([*map(str, words), "script"])
    return launch.prepare_multi_gpu_env(launch._validate_launch_command(args)[0])


class Forked:
    """A script on so many processes of one thread each, that find one another as those of torchrun do.

    environment: more of it; networks: [(namespace, address)] of hosts with a process each; own: more flags of each.
    One that has not ended after `timeout` seconds is killed, and is a TimeoutError for whoever waits or polls.
    """

    def __init__(self, script, flags, processes=1, cwd=ROOT, timeout=240, environment=None, networks=(), own=()):
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
            words = [
                str(script),
                last_of([*flags, *(own and own[rank])]),
                environment | place,
                str(cwd),
                self.output,
                network,
            ]
            self.processes.append(CONTEXT.Process(target=run, args=words))
            self.processes[-1].start()

    def poll(self):
        """None while they run, then the exit status; where one has failed the others are killed."""
        statuses = [process.exitcode for process in self.processes]
        if any(statuses):
            self.send(signal.SIGKILL)
        elif None in statuses:
            if time.monotonic() > self.deadline:
                self.send(signal.SIGKILL)
                raise TimeoutError(f"no end in time; {self.read('stderr')[-4000:]}")
            return None
        for process in self.processes:
            process.join()
        return next(filter(None, statuses), 0)

    def wait(self):
        while (status := self.poll()) is None:
            time.sleep(0.01)
        return status

    def send(self, number, ranks=slice(None)):
        """A signal to each that still runs, or to those of `ranks`."""
        for process in self.processes[ranks]:
            if process.exitcode is None:
                os.kill(process.pid, number)

    def read(self, name):
        """What they have written to "stdout" or "stderr"."""
        return Path(f"{self.output}/{name}").read_text()
