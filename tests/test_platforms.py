"""The scripts run without modules of Unix and classes of older Pythons, and ask a device for what it can say."""

import ast
import json
import locale
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import ROOT, launch, write_jsonl

import eval_incremental
import train_bi_encoder
import train_cross_encoder

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
    work = train_bi_encoder.np.array([2, 1, 0, 8, 10])
    assert train_bi_encoder.speeds(work, accelerator)["peak_memory_gb"] == 3
    accelerator.device = SimpleNamespace(type="xpu")
    monkeypatch.setattr(train_bi_encoder, "total_memory", lambda _: 2**30)
    with pytest.raises(RuntimeError, match="Allocator"):
        train_bi_encoder.speeds(work, accelerator)


@pytest.fixture
def ascii_locale():
    """A locale whose files are not UTF-8, as in many containers and under cron."""
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    yield
    locale.setlocale(locale.LC_CTYPE, before)


def test_files_are_utf_8_in_every_locale(ascii_locale, static, tmp_path, monkeypatch):
    """Flags in YAML and JSON, and what a run writes: args.yaml, and the card, which names its sources."""
    monkeypatch.chdir(tmp_path)
    with open("locale.txt", "w") as file:
        assert file.encoding.upper() not in ("UTF-8", "UTF8")
    prompt = "Frage für ñ: "
    write_jsonl(tmp_path / "größe.jsonl", [{"Frage": f"query {i}", "d": f"document {i}"} for i in range(8)])
    flags = {"query_prompt": prompt, "model_name_or_path": str(static), "train_data": ["größe.jsonl"],
             "columns": ["Frage", "d"], "batch_size": 8, "max_steps": 1, "eval_rows": 0}  # fmt: skip
    of_evaluator = {"query_prompt": prompt, "model_name_or_path": [str(static)], "beir": ["größe"]}
    for name in ("yaml", "json"):
        for kind, content in (("train", flags), ("eval", of_evaluator)):
            text = (
                json.dumps(content, ensure_ascii=False) if name == "json" else yaml.dump(content, allow_unicode=True)
            )
            Path(f"{kind}.{name}").write_bytes(b"\xef\xbb\xbf" * (kind == "eval") + text.encode())
        assert eval_incremental.parse_args([f"eval.{name}"]).query_prompt == prompt
        for script in (train_bi_encoder, train_cross_encoder):
            assert script.parse_args([f"train.{name}"]).train_data == ["größe.jsonl"]
    train_bi_encoder.main(train_bi_encoder.parse_args(["train.yaml", "--output_dir", "out"]))
    assert train_bi_encoder.parse_args(["out/args.yaml"]).query_prompt == prompt
    assert "größe.jsonl" in Path("out/model/README.md").read_bytes().decode()
