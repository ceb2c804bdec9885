"""The scripts run without modules of Unix and classes of older Pythons, and ask a device for what it can say."""

import ast
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, launch

import eval_incremental
import train_bi_encoder as script

# tests/preload.py has imported the libraries, but not those of Unix that only a script would import.
DRIVER = """
import importlib, sys
sys.path.insert(0, {root!r})
names = ["train_bi_encoder", "train_cross_encoder", "eval_incremental", "report", "mine_negatives",
         "check_overlap", "prepare_corpus"]
sys.modules |= dict.fromkeys(["resource", "fcntl", "grp", "pwd", "termios"])  # to import them raises ImportError
for name in names:
    sys.modules.pop(name, None)
    importlib.import_module(name)
    print(name)
"""


def test_scripts_import_without_modules_of_unix(tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(root=str(ROOT)))
    assert len(launch(driver).stdout.splitlines()) == 7


def test_measures_are_parsed_without_what_python_3_14_removed(monkeypatch):
    for name in ("Num", "Str", "NameConstant"):
        monkeypatch.delattr(ast, name, raising=False)
    names = ["nDCG@10", "RR", "P(rel=2)@5", "nDCG(dcg='exp-log2')@20", "AP(judged_only=True)@3"]
    assert [eval_incremental.measure_depth(name) for name in names] == [10, 1000, 5, 20, 1000]
    with pytest.raises(eval_incremental.UserError, match="^--metrics P@x: "):
        eval_incremental.measure_depth("P@x")


def test_a_device_that_counts_no_memory_is_not_asked_for_its_peak(monkeypatch):
    """Such as an Apple GPU of older versions of torch."""

    def fail():
        raise RuntimeError("Allocator for mps is not a DeviceAllocator.")

    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", fail)
    accelerator = SimpleNamespace(device=torch.device("meta"), gather=lambda _: torch.tensor([[8, 10, 3 * 10**9]]))
    work = script.np.array([2, 1, 0, 8, 10])
    assert script.speeds(work, accelerator)["peak_memory_gb"] == 3
    accelerator.device = SimpleNamespace(type="xpu")
    monkeypatch.setattr(script, "total_memory", lambda _: 2**30)
    with pytest.raises(RuntimeError, match="Allocator"):
        script.speeds(work, accelerator)
