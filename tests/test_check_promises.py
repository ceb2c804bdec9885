"""check_promises.py on trainers, templates, recipes, and on edits that break a promise; its runs are forked."""

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
from conftest import CHAOS, ROOT, write_jsonl
from forked import Forked
from test_recipes import APPLY, PAGES, SETUPS, TRAINER

import check_promises

PROMISES = ["two runs", "passes", "graphs", "two processes", "killed"]  # as their lines begin
LOSS = "    return loss / count_rows(whole)\n"
ENCODE = '        return model(features, task=role)["sentence_embedding"].float()\n'
FOUND = ENCODE.replace("return", "found =")
SEED = "        torch.manual_seed(int(seeds.generate_state(1)[0]))  # dropout is the same in a second forward pass\n"
EDITS = {  # {kind: (old text, new text, promises that it breaks)}
    "a draw without a seed": (LOSS, LOSS.replace("\n", " * (1 + os.urandom(1)[0] / 1e8)\n"), ["two runs", "killed"]),
    "dropout without the batch's seed": (SEED, "", ["graphs", "killed"]),
    "a mean over a pass": (ENCODE, f"{FOUND}        return found - found.mean(0)\n", ["passes", "two processes"]),
    "another second pass": (ENCODE, f"{FOUND}        return found * (1 + torch.is_grad_enabled())\n", ["graphs"]),
    "a mean over own rows": (LOSS, "    return loss / (anchors[whole.own_rows] >= 0).sum()\n", ["two processes"]),
    "a global moving average": (
        LOSS,
        "    AVERAGE.append((AVERAGE or [1.0])[-1] * 0.9 + loss.detach() * 0.1)\n    return loss / AVERAGE[-1]\n\n\n"
        "AVERAGE = []\n",
        ["two processes", "killed"],
    ),
}  # fmt: skip


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


@pytest.mark.parametrize("name, more", SCRIPTS if CHAOS else SCRIPTS[:3])
def test_scripts_keep_all(check, flags, name, more):
    is_broken, verdicts, printed = check(ROOT / f"{name}.py", *flags, *more)
    assert not is_broken and verdicts == dict.fromkeys(PROMISES, "kept"), printed


@pytest.mark.skipif(not APPLY, reason="needs git or patch")
@pytest.mark.parametrize("name", RECIPES if CHAOS else ["queue"])
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


@pytest.mark.parametrize("kind", EDITS)
def test_edits_break_a_promise(check, flags, tmp_path, kind):
    old, new, broken = EDITS[kind]
    text = (ROOT / TRAINER).read_text()
    assert text.count(old) == 1
    (tmp_path / "edited.py").write_text(text.replace(old, new))
    is_broken, verdicts, printed = check(tmp_path / "edited.py", *flags)
    assert is_broken and [name for name in PROMISES if verdicts[name] == "BROKEN"] == broken, printed


STUB = """
import json, sys, time
from pathlib import Path
if "--help" in sys.argv:
    sys.exit(print("--dropout X --max_steps N --output_dir FOLDER"))
with open("words.jsonl", "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
THEN
folder = Path(next(word for word in sys.argv if word.startswith("--output_dir=")).partition("=")[2])
folder.mkdir()
(folder / "metrics.jsonl").write_text(json.dumps({"step": 5, "loss": 1.0, "grad_norm": globals().get("norm", 1.0)}))
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """stub(line) writes a script of a few lines, with flags of few promises, into the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check_promises, "LAUNCHER", [])
    (tmp_path / "check").mkdir()
    return lambda line: Path("stub.py").write_text(STUB.replace("THEN", line))


def test_flags_and_what_is_not_checked(stub, capsys):
    """Those of a file of flags, too; those that clash with a short run are left out. NaN is within no tolerance."""
    stub("norm = float('nan' if len(open('words.jsonl').readlines()) > 3 else 1)")
    given = {"seed": 7, "train_data": [{"path": "x"}], "metric_for_best_model": "x", "eval_beir": ["a"]}
    Path("run.yaml").write_text(yaml.safe_dump(given))
    more = ["--early_stopping_patience", "3", "--query_prompt=a: b", "--eval_beir", "a", "b", "--streaming"]
    assert check_promises.main(["stub.py", "run.yaml", *more, "--resume"], Path("check"))
    file, *words, _, dropout = json.loads(Path("words.jsonl").read_text().splitlines()[-1])
    assert words == ["--query_prompt=a: b", "--streaming", "--max_steps=5"] and dropout == "--dropout=0"
    assert json.loads(Path(file).read_text()) == {"seed": 7, "train_data": [{"path": "x"}]}
    expected = """kept    two runs give the same bytes: losses differ by 0, tolerance 0
not checked: graphs computed again: no --grad_cache=true
not checked: killed after two steps and resumed: no --resume=true
not checked: passes of a quarter of the tokens: no --micro_batch_tokens=512
BROKEN  two processes against one: losses differ by nan, tolerance 0.0001; as by a mean over the rows of a process
"""
    assert capsys.readouterr().out == expected


def test_a_script_that_fails(stub, capsys):
    """Its last lines are printed. The status is not that of a broken promise."""
    stub("{}['no such key']")
    with pytest.raises(SystemExit) as ended:
        check_promises.main(["stub.py", "--seed", "1"], Path("check"))
    assert ended.value.code == 2 and capsys.readouterr().err.endswith("KeyError: 'no such key'\n\n")


def test_interrupted(stub, tmp_path):
    """Ctrl-C ends it without a traceback, and leaves neither files nor processes."""
    stub("time.sleep(100)")
    words = [sys.executable, ROOT / "check_promises.py", "stub.py"]
    variables = os.environ | {"TMPDIR": str(tmp_path / "check")}
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=variables)
    while not Path("words.jsonl").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "... a first run\n" and not list(Path("check").iterdir())
    assert "stub.py" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
