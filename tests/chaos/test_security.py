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
from conftest import CHAOS, ROOT, TRAINERS, launch, write_jsonl
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
    launch(ROOT / f"{script}.py", *flags_of(script, model, data, tmp_path))
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    for number in range(2):  # the payload, and pickled weights that would load
        done = launch(ROOT / f"{script}.py", *flags_of(script, model, data, tmp_path / str(number)), check=False)
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 1 and last.startswith(f"error: --model_name_or_path {model}: "), last
        torch.save(weights, model / "pytorch_model.bin")
    assert not (tmp_path / "executed").exists()
    report(f"pickles planted in a model folder, `{script}.py`", 2 * len(names), "none was loaded")


@pytest.mark.parametrize("script", SCRIPTS)
def test_code_in_the_model_folder(tmp_path, bert, data, report, script):
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
        flags = flags_of(script, model, data, tmp_path / str(number))
        done = launch(ROOT / f"{script}.py", *flags, check=False, cwd=tmp_path)
        refused = file == "modules.json" and script != "train_cross_encoder"  # which reads it as a transformer
        assert done.returncode == int(refused), done.stderr[-2000:]
        assert not refused or re.search(f"^error: --model_name_or_path {model}: .*evil.Evil", done.stderr, re.M)
        assert not (tmp_path / "executed").exists(), file
    report(f"code named by a model folder, `{script}.py`", 3, "none was run")


@pytest.mark.parametrize("script", SCRIPTS)
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
    refused = launch(ROOT / f"{script}.py", *flags, check=False)
    last = refused.stderr.strip().splitlines()[-1]
    assert refused.returncode == 1 and re.match(f"error: --model_name_or_path {model}: .*custom code", last), last
    (tmp_path / "flags.yaml").write_text("trust_remote_code: true\n")
    refused = launch(ROOT / f"{script}.py", tmp_path / "flags.yaml", *flags, check=False)
    assert refused.returncode == 1 and "--trust_remote_code: only on the command line" in refused.stderr
    launch(ROOT / f"{script}.py", *flags, "--trust_remote_code")
    if script != "eval_incremental":
        assert "trust_remote_code" not in (tmp_path / "out/args.yaml").read_text()
        shutil.rmtree(tmp_path / "out/checkpoints/step_00000004")
        resume = [*flags, "--resume"]
        assert launch(ROOT / f"{script}.py", *resume, check=False).returncode == 1
        launch(ROOT / f"{script}.py", *resume, "--trust_remote_code")
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
    done = launch(ROOT / f"{script}.py", *flags_of(script, model, data, tmp_path), check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith(f"error: --model_name_or_path {model}: "), last
    report("a path in a model's folder that leads out of it", 1, "one-line error")


@pytest.mark.parametrize("script", TRAINERS)
def test_pickles_in_a_checkpoint(tmp_path, bert, data, report, script):
    """In place of its files, with matching checksums, and beside them."""
    flags = flags_of(script, bert, data, tmp_path)
    launch(ROOT / f"{script}.py", *flags)
    planted = pickle.dumps(Payload(tmp_path / "executed"))
    newest = tmp_path / "out/checkpoints/step_00000004"
    sums = (newest / "SHA256SUMS").read_text()
    for file in ("model.safetensors", "optimizer.safetensors", "extra.safetensors", "state.json"):
        kept = (newest / file).read_bytes()
        (newest / file).write_bytes(planted)
        (newest / "SHA256SUMS").write_text(sums.replace(*(sha256(part).hexdigest() for part in (kept, planted))))
        done = launch(ROOT / f"{script}.py", *flags, "--resume", check=False)
        last = done.stderr.strip().splitlines()[-1]  # of the library that reads the file, not of the checksums
        reason = "UnicodeDecodeError: 'utf-8'" if file == "state.json" else "Error while deserializing"
        assert done.returncode == 1 and reason in last, last
        (newest / file).write_bytes(kept)
    (newest / "SHA256SUMS").write_text(sums)
    for name in ("optimizer.pt", "scheduler.pt", "random_states_0.pkl", "pytorch_model.bin"):
        (newest / name).write_bytes(planted)
    done = launch(ROOT / f"{script}.py", *flags, "--resume")  # skips it: the checksums differ
    assert "step_00000004: damaged" in done.stderr
    assert not (tmp_path / "executed").exists()
    report(f"pickles planted in checkpoints, `{script}.py`", 7, "none was loaded")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".jsonl", ".csv", ".txt", ".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("name", SCRIPTS)
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


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root for a network namespace")
@pytest.mark.parametrize("script", SCRIPTS if CHAOS else SCRIPTS[::2])
def test_without_a_network(tmp_path, bert, data, report, script):
    """In a network namespace without interfaces, and without the variables that keep libraries offline."""
    flags = list(map(str, flags_of(script, bert, data, tmp_path)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment["HF_DATASETS_CACHE"] = str(tmp_path / "datasets")
    watch = ["strace", "-f", "-qq", "-e", "trace=connect", "-o", str(tmp_path / "calls")] * bool(
        shutil.which("strace")
    )
    command = ["unshare", "--net", *watch, sys.executable, str(ROOT / f"{script}.py"), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    if "unshare failed" in done.stderr:
        pytest.skip("no permission to create a network namespace")
    assert done.returncode == 0, done.stderr[-2000:]
    calls = (tmp_path / "calls").read_text() if watch else ""
    assert "AF_INET" not in calls, calls
    how = "no connection was tried" if watch else "it ran"
    report(f"no network, `{script}.py`", 1, how)
