"""check_promises.py on trainers, templates, recipes, and on edits that break a promise; its runs are forked.

The edits are tests/mutations/promise_*.patch, which name the promises that they break.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import CHAOS, ROOT, mark_slow, write_jsonl
from forked import Forked
from test_recipes import APPLY, PAGES, SETUPS, TRAINER

import check_promises

PROMISES = ["two runs", "graphs", "killed", "passes", "two processes"]  # as their lines begin
PATCHES = {path.stem.removeprefix("promise_"): path for path in (ROOT / "tests/mutations").glob("promise_*.patch")}
FEW = ["draw_without_seed", "dropout_without_seed", "warmup_of_passes"]  # each promise once


class ForkedPopen(Forked):
    """What check_promises.py starts, forked; two processes in place of torch's launcher."""

    def __init__(self, command, stdout, stderr, env):
        words = command[1:]
        processes = 2 if words[0] == "-m" else 1
        words = words[len(check_promises.LAUNCHER) :] if processes == 2 else words
        self.log = Path(stdout.name)
        super().__init__(words[0], words[1:], processes, cwd=os.getcwd(), environment=env)

    def wait(self):
        status = super().wait()
        self.log.write_text(self.read("stdout") + self.read("stderr"))
        return status

    def kill(self):
        self.send(signal.SIGKILL)

    terminate = kill


@pytest.fixture
def check(monkeypatch, capsys, tmp_path):
    """check(script, *flags) returns (whether a promise is broken, {promise: verdict}, all that was printed)."""

    def run(script, *flags):
        folder = tmp_path / "check"
        folder.mkdir()
        monkeypatch.setattr(check_promises.subprocess, "Popen", ForkedPopen)
        is_broken = check_promises.main([str(word) for word in (script, *flags)], folder)
        printed = capsys.readouterr().out
        lines = re.findall(r"^(kept|BROKEN|not checked:) +(.+?):", printed, re.M)
        return is_broken, {name: next(v for v, line in lines if line.startswith(name)) for name in PROMISES}, printed

    return run


@pytest.fixture(scope="module")
def flags(tmp_path_factory, rows, bert):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_jsonl(path, [{name: text[:80] for name, text in row.items()} for row in rows[:100]])
    return ["--model_name_or_path", bert, "--train_data", path, "--columns", "docstring", "code", "--batch_size", 12,
            "--learning_rate", 1e-3]  # fmt: skip


SCRIPTS = [("train_bi_encoder", []), ("train_cross_encoder", ["--num_negatives", 2]), ("templates/bi_encoder", []),
           ("templates/cross_encoder", [])]  # fmt: skip
RECIPES = [name for name, page in PAGES.items() if f"+++ b/{TRAINER}" in page.read_text()]


@pytest.mark.parametrize("name, more", mark_slow(SCRIPTS, SCRIPTS[:1]))
def test_scripts_keep_all(check, flags, name, more):
    is_broken, verdicts, printed = check(ROOT / f"{name}.py", *flags, *more)
    assert not is_broken and verdicts == dict.fromkeys(PROMISES, "kept"), printed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["splade", "colbert"])
def test_a_sparse_and_a_multi_vector_model_keep_all(check, flags, request, kind):
    is_broken, verdicts, printed = check(ROOT / TRAINER, *flags, "--model_name_or_path", request.getfixturevalue(kind))
    assert not is_broken and verdicts == dict.fromkeys(PROMISES, "kept"), printed


@pytest.mark.skipif(not APPLY, reason="needs git or patch")
@pytest.mark.parametrize("name", mark_slow(RECIPES if CHAOS else ["queue"], []))
def test_recipes_keep_all(check, tmp_path, monkeypatch, rows, corpus, bert, name):
    """By the command of the page, in the folder of its data."""
    shutil.copy(ROOT / TRAINER, tmp_path)
    subprocess.run([*APPLY[0], PAGES[name]], cwd=tmp_path, check=True)
    for source, target in ((corpus, "pairs"), (bert, "model")):
        shutil.copytree(source, tmp_path / target)
    if SETUPS[name]:
        SETUPS[name](tmp_path, rows)
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^```sh\n(.+?)^```$", PAGES[name].read_text(), re.M | re.S)
    is_broken, verdicts, printed = check(*shlex.split(command.replace("\\\n", ""))[1:])
    assert not is_broken and verdicts == dict.fromkeys(PROMISES, "kept"), printed


@pytest.mark.skipif(not APPLY, reason="needs git or patch")
@pytest.mark.parametrize("name", mark_slow(sorted(PATCHES), FEW))
def test_edits_break_a_promise(check, flags, tmp_path, name):
    shutil.copy(ROOT / TRAINER, tmp_path)
    subprocess.run([*APPLY[0], PATCHES[name]], cwd=tmp_path, check=True)
    is_broken, verdicts, printed = check(tmp_path / TRAINER, *flags)
    (broken,) = re.findall("^Breaks: (.+)$", PATCHES[name].read_text(), re.M)
    assert is_broken and [name for name in PROMISES if verdicts[name] == "BROKEN"] == broken.split(", "), printed


STUB = """
import json, os, sys, time
from pathlib import Path
if "--help" in sys.argv:
    sys.exit(print("--dropout, --drop-out X --max_steps, --max-steps N --output_dir DIR [--micro_batch_tokens N]"))
with open("words.jsonl", "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
folder = Path(next(word for word in sys.argv if word.startswith("--output_dir=")).partition("=")[2])
is_small = "--micro_batch_tokens=512" in sys.argv
rank = int(os.environ.get("RANK", 0))
loss, rate, steps, logged = 1.0, 0.1, 5, [1, 2, 3, 4, 5]
THEN
import torch
from safetensors.torch import save_file
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=rate)
for _ in range(steps):
    weight.grad = torch.ones(3)
    optimizer.step()
if rank == 0:
    folder.mkdir()
    save_file({"weight": weight.detach()}, folder / "model.safetensors")
    lines = [{"step": step, "loss": loss if step == 2 else 1.0, "grad_norm": 1.0} for step in logged]
    (folder / "metrics.jsonl").write_text("\\n".join(map(json.dumps, lines)))
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """stub(line) writes a script of a few lines, with flags of few promises, into the working directory."""
    monkeypatch.chdir(tmp_path)
    return lambda line: Path("stub.py").write_text(STUB.replace("THEN", line))


def test_flags_of_a_run(stub, check):
    """Those of a file of flags, too; those that clash with a short run are left out."""
    stub("")
    given = {"seed": 7, "train_data": [{"path": "x"}], "metric_for_best_model": "x", "eval_beir": ["a"]}
    Path("run.yaml").write_text(yaml.safe_dump(given))
    more = ["--early_stopping_patience", "3", "--query_prompt=a: b", "--eval_beir", "a", "b", "--streaming"]
    is_broken, verdicts, printed = check("stub.py", "run.yaml", *more, "--resume")
    file, *words, _, dropout = json.loads(Path("words.jsonl").read_text().splitlines()[-1])
    assert words == ["--query_prompt=a: b", "--streaming", "--max_steps=5", "--micro_batch_tokens=2048"]
    assert dropout == "--dropout=0" and not is_broken
    assert json.loads(Path(file).read_text()) == {"seed": 7, "train_data": [{"path": "x"}]}
    assert (
        printed
        == """kept    two runs give the same bytes: losses differ by 0, saved weights are equal
not checked: graphs computed again: no --grad_cache=true
not checked: killed after two steps and resumed: no --resume=true
kept    passes of a quarter of the tokens: losses, gradient, update differ by 0, 0, 0; tolerances (0.0001, 0.001, 0.1)
kept    two processes against one: losses, gradient, update differ by 0, 0, 0; tolerances (0.0001, 0.001, 0.1)
"""
    )


@pytest.mark.parametrize(
    "line, promise, verdict, reason",
    [
        ("loss = float('inf')", "passes", "kept", "losses, gradient, update differ by 0, 0, 0"),
        ("loss = float('nan')", "passes", "BROKEN", "loss of step 2: nan beside nan"),
        ("loss = float('inf' if is_small else 'nan')", "passes", "BROKEN", "loss of step 2: inf beside nan"),
        (
            "logged = [1] if is_small else logged",
            "passes",
            "BROKEN",
            "only one of both runs logs the grad_norm of step 2",
        ),
        ("logged = []", "passes", "kept", "losses, gradient, update differ by 0, 0, 0"),
        ("rate *= 2 if is_small else 1", "passes", "BROKEN", "losses, gradient, update differ by 0, 0, 1"),
        ("rate = 0", "two runs", "not checked:", "three steps of an optimizer of torch change no weight"),
        ("steps = 3", "two runs", "not checked:", "three steps of an optimizer of torch change no weight"),
        ("rate += 1e-7 * rank", "two processes", "BROKEN", "after three steps the weights of both processes are not"),
        ("steps *= rank == 0", "two processes", "BROKEN", "after three steps the weights of both processes are not"),
    ],
)
def test_what_is_compared_is_said(stub, check, line, promise, verdict, reason):
    """Equal infinities are equal, NaN is equal to nothing; steps that one run does not log; updates, weights."""
    stub(line)
    is_broken, verdicts, printed = check("stub.py")
    assert verdicts[promise] == verdict and is_broken == ("BROKEN" in printed), printed
    assert re.search(f"^{verdict} +{promise}[^:]+: {reason}", printed, re.M), printed


def test_a_script_that_fails(stub, check, capsys):
    """Its last lines are printed. The status is not that of a broken promise."""
    stub("{}['no such key']")
    with pytest.raises(SystemExit) as ended:
        check("stub.py", "--seed", "1")
    assert ended.value.code == 2 and "KeyError: 'no such key'" in capsys.readouterr().err


@pytest.mark.slow
def test_interrupted(stub, tmp_path):
    """Ctrl-C ends it without a traceback, and leaves neither files nor processes."""
    stub("time.sleep(100)")
    Path("check").mkdir()
    words = [sys.executable, ROOT / "check_promises.py", "stub.py"]
    variables = os.environ | {"TMPDIR": str(tmp_path / "check")}
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=variables)
    while not Path("words.jsonl").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "... a first run\n" and not list(Path("check").iterdir())
    assert "stub.py" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
