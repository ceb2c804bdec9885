"""What the project's user chose is there, and does something: packages, files and launch configurations."""

import importlib
import re
import sys
import tomllib

import pytest
import yaml
from accelerate.commands import launch
from conftest import ROOT, write_jsonl
from forked import merge_flags
from test_eval_metrics import ALL_FOUND

FILES = ["README.md", "requirements.txt", "train_bi_encoder.py", "train_cross_encoder.py", "eval_incremental.py"]
LIBRARIES = {"accelerate", "datasets", "transformers", "torch", "sentence-transformers"}
CALLED = {
    "train_bi_encoder": LIBRARIES,
    "train_cross_encoder": LIBRARIES,
    "eval_incremental": LIBRARIES | {"evaluate", "diskcache"},
}


def packages_called(script, flags):
    """Run a script; return the packages of which it calls functions or classes itself."""
    called = set()

    def record(frame, event, argument):
        if event == "call" and frame.f_back and frame.f_back.f_code.co_filename == script.__file__:
            called.add(frame.f_globals["__name__"].partition(".")[0].replace("_", "-"))

    sys.setprofile(record)
    try:
        script.main(script.parse_args(merge_flags(flags)))
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.parametrize("name", CALLED)
def test_packages_are_called_and_required(name, static, reranker, beir, tmp_path):
    """Those of the mission: each by the script that it is there for, in a run of it."""
    write_jsonl(tmp_path / "rows.jsonl", [{"q": f"query {i}", "d": f"document {i}"} for i in range(8)])
    (tmp_path / "all_found.py").write_text(ALL_FOUND)
    train = ["--train_data", tmp_path / "rows.jsonl", "--columns", "q", "d", "--batch_size", 8, "--max_steps", 1,
             "--eval_rows", 0, "--output_dir", tmp_path / "out", "--model_name_or_path"]  # fmt: skip
    flags = {
        "train_bi_encoder": [*train, static],
        "train_cross_encoder": [*train, reranker],
        "eval_incremental": ["--beir", beir, "--model_name_or_path", static, "--metrics", tmp_path / "all_found.py",
                             "--cache_dir", tmp_path / "cache", "--output_dir", tmp_path / "out"],
    }  # fmt: skip
    script = importlib.import_module(name)
    assert packages_called(script, flags[name]) >= CALLED[name]
    (header,) = re.findall(r"^# /// script\n((?:# .*\n)+?)# ///$", (ROOT / f"{name}.py").read_text(), re.M)
    stated = tomllib.loads(re.sub(r"^# ?", "", header, flags=re.M))["dependencies"]
    for required in (stated, (ROOT / "requirements.txt").read_text().splitlines()):
        assert CALLED[name] <= {re.match(r"[\w-]*", line)[0] for line in required}


def test_files_are_there():
    assert [name for name in FILES if not (ROOT / name).is_file()] == []
    assert len(list(ROOT.glob("accelerate_configs/*.yaml"))) >= 6 and len(list(ROOT.glob("tests/test_*.py"))) > 50


@pytest.mark.parametrize("path", sorted(ROOT.glob("accelerate_configs/*.yaml")), ids=lambda path: path.stem)
def test_launch_configurations(path):
    """Accelerate takes each, and what it says."""
    words = ["--config_file", str(path), "--main_process_ip=127.0.0.1", "--machine_rank=0", "train_bi_encoder.py"]
    args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    stated = yaml.safe_load(path.read_text())
    kind = stated.pop("distributed_type")
    assert (args.multi_gpu, args.use_fsdp) == (kind == "MULTI_GPU", kind == "FSDP")
    stated |= stated.pop("fsdp_config", {})
    assert {name: getattr(args, name) for name in stated} == stated
