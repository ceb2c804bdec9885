"""The script of docs/nightly.md runs for two nights: each trains on, encodes what is new, and compares."""

import json
import os
import re
import shutil
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, launch, metrics, write_jsonl

NIGHTS = ["2026-11-22", "2026-11-23"]
PYTHON = """#!/bin/sh
printf '%s\\n' "$@" > request
read status < answer
exit $status
"""


def run_night(folder, *days, stopped=False):
    """Run nightly.sh; return what it prints. Forked processes run what it gives to `python`, which comes by a pipe.
    stopped: the training is ended by SIGTERM."""
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)}
    command = ["sh", "-c", 'sh -e nightly.sh "$@"; echo $? > request', "sh", *days]
    printed = errors = ""
    with subprocess.Popen(command, cwd=folder, env=environment):
        while (words := (folder / "request").read_text().splitlines())[0].endswith(".py"):
            script, *flags = words
            if stopped:
                (folder / "answer").write_text("143\n")
                continue
            done = launch(folder / script, *flags, cwd=folder, check=False, environment={"HOME": str(folder)})
            printed += done.stdout
            errors += done.stderr
            (folder / "answer").write_text(f"{done.returncode}\n")
    assert words == ["143" if stopped else "0"], errors
    return printed


@pytest.mark.slow
def test_nightly(tmp_path, rows, bert):
    (script,) = re.findall(r"^```sh\n(.+?)^```$", (ROOT / "docs/nightly.md").read_text(), re.M | re.S)
    script = script.replace("BAAI/bge-small-en-v1.5", "base").replace("100 *", "4 *")  # steps
    (tmp_path / "nightly.sh").write_text(script)
    shutil.copytree(bert, tmp_path / "base")
    for name in ("train_bi_encoder.py", "eval_incremental.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("pairs", "documents", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin/python").write_text(PYTHON)
    (tmp_path / "bin/python").chmod(0o755)
    for name in ("request", "answer"):
        os.mkfifo(tmp_path / name)
    rows = [{"question": row["docstring"], "answer": row["code"]} for row in rows[:200]]
    held_out = rows[:40]
    write_jsonl(tmp_path / "heldout.jsonl", held_out)
    write_jsonl(tmp_path / "queries.jsonl", [{"_id": f"q{n}", "text": r["question"]} for n, r in enumerate(held_out)])
    (tmp_path / "qrels.tsv").write_text("".join(f"q{n}\t0-{n}\t1\n" for n in range(40)))

    yesterday = []
    for night, today in enumerate(NIGHTS):
        new = rows[100 * night : 100 * (night + 1)]
        pq.write_table(pa.Table.from_pylist(new[40:]), tmp_path / f"pairs/{today}.parquet")
        documents = [{"_id": f"{night}-{n}", "title": "", "text": row["answer"]} for n, row in enumerate(new)]
        pq.write_table(pa.Table.from_pylist(documents), tmp_path / f"documents/{today}.parquet")
        printed = run_night(tmp_path, today, *yesterday)
        lines = metrics(tmp_path / "runs/nightly")
        assert lines[-1]["step"] == 4 * (night + 1) and lines[0]["step"] == 0
        results = json.loads((tmp_path / f"eval/{today}/metrics.json").read_text())["results"]
        encoded = {result["name"]: result["texts"]["encoded"] for result in results}
        assert list(encoded) == [*yesterday, today]
        distinct = {row["answer"] for row in rows[: 100 * (night + 1)]} | {row["question"] for row in held_out}
        assert len(distinct) - 2 <= encoded[today] <= len(distinct)
        if yesterday:
            assert encoded[yesterday[0]] <= 100
            changed = [line.split(": ")[1] for line in printed.splitlines() if line.startswith("changed after ")]
            assert "p = " in printed and changed == ["--max_steps", "pairs/*.parquet"]
        yesterday = [today]
    run_night(tmp_path, "2026-11-24", *yesterday, stopped=True)  # publishes nothing
    assert sorted(os.listdir(tmp_path / "models")) == NIGHTS == sorted(os.listdir(tmp_path / "eval"))
    weights = {(tmp_path / f"models/{today}/model.safetensors").read_bytes() for today in NIGHTS}
    assert len(weights) == 2
