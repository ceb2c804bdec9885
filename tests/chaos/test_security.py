"""Checkpoints, corpora and model folders are read as data: no code in them is run, and nothing is downloaded."""

import importlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from conftest import CHAOS, ROOT, TRAINERS, few_or_all, write_jsonl
from safetensors.torch import load_file

SCRIPTS = [*TRAINERS, "eval_incremental"]


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def flags_of(script, model, data, folder):
    """Return the flags of a short run of a script, with all of its files in `folder`."""
    common = ["--output_dir", folder / "out", "--model_name_or_path", model]
    if script == "eval_incremental":
        common += ["--cache_dir", folder / "vectors"]
        return [*common, "--pairs", data, "--columns", "a", "b"]
    return [*common, "--train_data", data, "--columns", "a", "b", "--max_steps", 4, "--save_steps", 2,
            "--batch_size", 4, "--eval_rows", 4, *["--num_negatives", 1] * ("cross" in script)]  # fmt: skip


def run(name, flags):
    """Run a script in this process; return the line that refuses its input, or None."""
    script = importlib.import_module(name)
    try:
        script.main(script.parse_args(list(map(str, flags))))
    except script.UserError as error:
        assert "\n" not in str(error)
        return str(error)


@pytest.fixture
def data(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [{"a": f"question {n}", "b": f"answer of {n}"} for n in range(40)])
    return tmp_path / "rows.jsonl"


def test_unpickling_the_payload_creates_the_file(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_pickles_in_the_model_folder(tmp_path, bert, data, report, script):
    """Without safetensors, pickled weights are refused; beside them, pickles are ignored."""
    planted = pickle.dumps(Payload(tmp_path / "executed"))
    names = ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "rng_state.pth", "tokenizer.pkl", "model.pt")
    model = tmp_path / "model"
    shutil.copytree(bert, model)
    for name in names:
        (model / name).write_bytes(planted)
        (model / "1_Pooling" / name).write_bytes(planted)
    assert run(script, flags_of(script, model, data, tmp_path)) is None
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    for number in range(2):  # the payload, and pickled weights that would load
        refused = run(script, flags_of(script, model, data, tmp_path / str(number)))
        assert refused.startswith(f"--model_name_or_path {model}: "), refused
        torch.save(weights, model / "pytorch_model.bin")
    assert not (tmp_path / "executed").exists()
    report(f"pickles planted in a model folder, `{script}.py`", 2 * len(names), "none was loaded")


@pytest.mark.parametrize("script", SCRIPTS)
def test_code_in_the_model_folder(tmp_path, bert, data, report, script, monkeypatch):
    """trust_remote_code is off: classes in the folder are not imported, whichever file names them. As a module of a
    bi-encoder, one is refused; else the library's own class is loaded."""
    code = f"from pathlib import Path\nPath({str(tmp_path / 'executed')!r}).touch()\nclass Evil: pass\n"
    for number, file in enumerate(("modules.json", "config.json", "tokenizer_config.json")):
        model = tmp_path / f"model{number}"
        shutil.copytree(bert, model)
        (model / "evil.py").write_text(code)
        metadata = json.loads((model / file).read_text())
        if file == "modules.json":
            metadata[0]["type"] = "evil.Evil"
        else:
            kinds = ("AutoConfig", "AutoModel", "AutoModelForSequenceClassification")
            metadata["auto_map"] = dict.fromkeys(kinds, "evil.Evil")
            if file == "tokenizer_config.json":
                metadata["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
        (model / file).write_text(json.dumps(metadata))
        monkeypatch.chdir(tmp_path)
        line = run(script, flags_of(script, model, data, tmp_path / str(number)))
        refused = file == "modules.json" and script != "train_cross_encoder"  # which reads it as a transformer
        assert bool(line) == refused, line
        assert not refused or re.match(f"--model_name_or_path {model}: .*evil.Evil", line)
        assert not (tmp_path / "executed").exists(), file
    report(f"code named by a model folder, `{script}.py`", 3, "none was run")


@pytest.mark.parametrize("script", SCRIPTS if CHAOS else SCRIPTS[::2])
def test_code_of_a_model_that_is_trusted(tmp_path, bert, reranker, data, report, script):
    """A model with code of its own is refused without --trust_remote_code, which no file of flags sets and no resume
    inherits. With it, the model trains, resumes and evaluates."""
    model = tmp_path / "model"
    shutil.copytree(reranker if script == "train_cross_encoder" else bert, model)
    config = json.loads((model / "config.json").read_text())
    kinds = {"AutoModel": "Model", "AutoModelForSequenceClassification": "ForSequenceClassification"}
    config["model_type"] = "own"
    config["auto_map"] = {"AutoConfig": "own.Config"} | {auto: f"own.Own{kind}" for auto, kind in kinds.items()}
    (model / "config.json").write_text(json.dumps(config))
    code = "import transformers as t\nclass Config(t.BertConfig):\n    model_type = 'own'\n"
    for kind in kinds.values():
        code += f"class Own{kind}(t.Bert{kind}):\n    config_class = Config\n"
    (model / "own.py").write_text(code)
    flags = list(map(str, flags_of(script, model, data, tmp_path)))
    refused = run(script, flags)
    assert re.match(f"--model_name_or_path {model}: .*custom code", refused), refused
    (tmp_path / "flags.yaml").write_text("trust_remote_code: true\n")
    assert "--trust_remote_code: only on the command line" in run(script, [tmp_path / "flags.yaml", *flags])
    assert run(script, [*flags, "--trust_remote_code"]) is None
    if script != "eval_incremental":
        assert "trust_remote_code" not in (tmp_path / "out/args.yaml").read_text()
        shutil.rmtree(tmp_path / "out/checkpoints/step_00000004")
        resume = [*flags, "--resume"]
        assert run(script, resume)
        assert run(script, [*resume, "--trust_remote_code"]) is None
        assert (tmp_path / "out/model/own.py").exists()
    report(f"code of a model that is trusted, `{script}.py`", 1, "run only with the flag, given on the command line")


@pytest.mark.parametrize("script", ["train_bi_encoder", "eval_incremental"])  # `bert` is a bi-encoder
def test_a_module_outside_of_the_model_folder(tmp_path, bert, data, report, script):
    model = tmp_path / "model"
    shutil.copytree(bert, model)
    shutil.move(model / "1_Pooling", tmp_path)
    metadata = json.loads((model / "modules.json").read_text())
    metadata[1]["path"] = "../1_Pooling"
    (model / "modules.json").write_text(json.dumps(metadata))
    refused = run(script, flags_of(script, model, data, tmp_path))
    assert refused.startswith(f"--model_name_or_path {model}: "), refused
    report("a path in a model's folder that leads out of it", 1, "one-line error")


@pytest.mark.parametrize("script", TRAINERS if CHAOS else TRAINERS[:1])
def test_pickles_in_a_checkpoint(tmp_path, bert, data, report, script, capfd):
    """In place of its files, with matching checksums, and beside them."""
    flags = flags_of(script, bert, data, tmp_path)
    assert run(script, flags) is None
    planted = pickle.dumps(Payload(tmp_path / "executed"))
    newest = tmp_path / "out/checkpoints/step_00000004"
    sums = (newest / "SHA256SUMS").read_text()
    for file in ("model.safetensors", "optimizer.safetensors", "extra.safetensors", "state.json"):
        kept = (newest / file).read_bytes()
        (newest / file).write_bytes(planted)
        (newest / "SHA256SUMS").write_text(sums.replace(*(sha256(part).hexdigest() for part in (kept, planted))))
        # An error of the library that reads the file, not of the checksums.
        with pytest.raises(Exception, match="'utf-8'" if file == "state.json" else "Error while deserializing"):
            run(script, [*flags, "--resume"])
        (newest / file).write_bytes(kept)
    (newest / "SHA256SUMS").write_text(sums)
    for name in ("optimizer.pt", "scheduler.pt", "random_states_0.pkl", "pytorch_model.bin"):
        (newest / name).write_bytes(planted)
    assert run(script, [*flags, "--resume"]) is None  # skips it: the checksums differ
    assert "step_00000004: damaged" in capfd.readouterr().err
    assert not (tmp_path / "executed").exists()
    report(f"pickles planted in checkpoints, `{script}.py`", 7, "none was loaded")


SUFFIXES = [".parquet", ".arrow", ".jsonl", ".csv", ".txt", ".jsonl.gz", ".jsonl.zst"]
FEW = [*(("train_bi_encoder", suffix) for suffix in SUFFIXES), ("eval_incremental", ".parquet")]


@pytest.mark.parametrize("name, suffix", few_or_all(FEW, SCRIPTS, SUFFIXES))
def test_a_pickle_as_a_corpus(tmp_path, bert, report, name, suffix):
    """Mapped and streaming, it is refused in one line that names it, as any file is that lacks its suffix' format."""
    script, file = importlib.import_module(name), tmp_path / f"rows{suffix}"
    file.write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
    for way in ([], ["--streaming"]):
        with pytest.raises(script.UserError, match=re.escape(f"{file}: ")) as error:
            script.main(script.parse_args([*map(str, flags_of(name, bert, file, tmp_path)), *way]))
        assert "\n" not in str(error.value)
    assert not (tmp_path / "executed").exists()
    report(f"a pickle as a corpus, `{name}.py`, seven formats", 2, "one-line error")


ALL = """
import importlib, json, sys
sys.path.insert(0, ".")
for name, flags in json.loads(sys.argv[1]).items():
    script = importlib.import_module(name)
    script.main(script.parse_args(flags))
"""


@pytest.mark.slow
def test_without_a_network(tmp_path, bert, data, report):
    """All scripts in one process, copied into an empty folder, without the variables that keep libraries offline; as
    root, in a network namespace without interfaces."""
    flags = {script: list(map(str, flags_of(script, bert, data, tmp_path / script))) for script in SCRIPTS}
    for script in SCRIPTS:
        shutil.copy(ROOT / f"{script}.py", tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_DATASETS_CACHE": str(tmp_path / "datasets"), "HOME": str(tmp_path)}
    watch = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=connect", "-o", str(tmp_path / "calls")]
    watch *= bool(shutil.which("strace"))
    alone = ["unshare", "--net"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        alone = []
    command = [*alone, *watch, sys.executable, "-I", "-c", ALL, json.dumps(flags)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    calls = (tmp_path / "calls").read_text() if watch else ""
    assert "AF_INET" not in calls, calls
    how = "no connection was tried" if watch else "it ran"
    report("no network, the trainers and the evaluator", 1, how)
