"""The script of docs/nightly.md runs for two nights: each trains on, encodes what is new, and compares."""

import json
import os
import re
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
from conftest import ROOT, metrics, write_jsonl

NIGHTS = ["2026-11-22", "2026-11-23"]


def test_nightly(tmp_path, rows, bert):
    (script,) = re.findall(r"^```sh\n(.+?)^```$", (ROOT / "docs/nightly.md").read_text(), re.M | re.S)
    script = script.replace("BAAI/bge-small-en-v1.5", "base").replace("100 *", "4 *")  # steps
    (tmp_path / "nightly.sh").write_text(script)
    shutil.copytree(bert, tmp_path / "base")
    for name in ("train_bi_encoder.py", "eval_incremental.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("pairs", "documents", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin/python").chmod(0o755)
    held_out = rows[:40]
    write_jsonl(tmp_path / "heldout.jsonl", held_out)
    write_jsonl(tmp_path / "queries.jsonl", [{"_id": f"q{n}", "text": r["docstring"]} for n, r in enumerate(held_out)])
    (tmp_path / "qrels.tsv").write_text("".join(f"q{n}\t0-{n}\t1\n" for n in range(40)))

    yesterday = []
    for night, today in enumerate(NIGHTS):
        new = rows[100 * night : 100 * (night + 1)]
        pq.write_table(pa.Table.from_pylist(new[40:]), tmp_path / f"pairs/{today}.parquet")
        documents = [{"_id": f"{night}-{n}", "title": "", "text": row["code"]} for n, row in enumerate(new)]
        pq.write_table(pa.Table.from_pylist(documents), tmp_path / f"documents/{today}.parquet")
        environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path)}
        done = subprocess.run(["sh", "-e", "nightly.sh", today, *yesterday], cwd=tmp_path, env=environment,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = metrics(tmp_path / "runs/nightly")
        assert lines[-1]["step"] == 4 * (night + 1) and lines[0]["step"] == 0
        results = json.loads((tmp_path / f"eval/{today}/metrics.json").read_text())["results"]
        encoded = {result["name"]: result["texts"]["encoded"] for result in results}
        assert list(encoded) == [*yesterday, today]
        distinct = {row["code"] for row in rows[: 100 * (night + 1)]} | {row["docstring"] for row in held_out}
        assert len(distinct) - 2 <= encoded[today] <= len(distinct)
        if yesterday:
            assert encoded[yesterday[0]] <= 100
            changed = [line.split(": ")[1] for line in done.stdout.splitlines() if line.startswith("changed after ")]
            assert "p = " in done.stdout and changed == ["--max_steps", "pairs/*.parquet"]
        yesterday = [today]
    weights = {(tmp_path / f"models/{today}/model.safetensors").read_bytes() for today in NIGHTS}
    assert len(weights) == 2
