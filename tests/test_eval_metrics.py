"""Measures of the user's in the evaluator, and where results come from."""

import json
import re
import shutil
from importlib.metadata import version

import ir_measures
import pandas as pd
import pytest


@pytest.fixture
def all_found(monkeypatch):
    """Register AllFound, whether a ranking contains all relevant documents of a query, as the recipe does."""

    def measure(qrels, run):
        return float(set(qrels.loc[qrels["relevance"] > 0, "doc_id"]) <= set(run["doc_id"]))

    kind = type(ir_measures.define_byquery(measure, "AllFound"))
    monkeypatch.setitem(ir_measures.measures.registry, "AllFound", kind)


def test_a_measure_of_the_user(evaluate, all_found, beir, bert, tmp_path):
    """It has an interval, a paired test, a column and a mean over collections, with and without a cutoff."""
    other = tmp_path / "other"
    shutil.copytree(bert, other)
    config = json.loads((other / "1_Pooling/config.json").read_text())
    (other / "1_Pooling/config.json").write_text(json.dumps(config | {"pooling_mode": "cls"}))
    flags = ["--model_name_or_path", bert, other, "--metrics", "R@100", "AllFound@100", "AllFound", "R@100"]
    first, second = evaluate("--beir", beir, *flags)["models"]
    table = pd.read_csv(tmp_path / "out/st/per_query.csv", index_col="query")
    assert list(table) == list(first["metrics"]) == ["R@100", "AllFound@100", "AllFound"]
    assert (table["AllFound@100"] == (table["R@100"] == 1.0)).all() and 0 < table["AllFound@100"].mean() < 1
    assert (table["AllFound"] >= table["AllFound@100"]).all()  # of the first 1,000
    cell = first["metrics"]["AllFound@100"]
    assert cell["low"] < cell["mean"] == table["AllFound@100"].mean() < cell["high"]
    assert 0 < second["metrics"]["AllFound@100"]["p"] <= 1
    files = {"documents.jsonl", "metrics.json", "other", "queries.jsonl", "st"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    shutil.copytree(beir, tmp_path / "copy")
    evaluate("--beir", beir, tmp_path / "copy", "--metrics", "AllFound@100", output="two")
    record = json.loads((tmp_path / "two/metrics.json").read_text())
    one, two = (result["metrics"]["AllFound@100"]["mean"] for result in record["results"])
    assert one == two == record["means"]["st"]["AllFound@100"]["mean"] == cell["mean"]


def test_an_error_in_a_measure_loses_no_ranking(evaluate, beir, monkeypatch, tmp_path):
    def measure(qrels, run):
        return 1.0 if len(run) < 3 else 1 / 0  # not in the trial before the start

    kind = type(ir_measures.define_byquery(measure, "Mine"))
    monkeypatch.setitem(ir_measures.measures.registry, "Mine", kind)
    with pytest.raises(ZeroDivisionError):  # with its traceback
        evaluate("--beir", beir, "--metrics", "Mine")
    assert (tmp_path / "out/run.trec").exists()


def test_provenance(evaluate, beir, tmp_path):
    evaluate("--beir", beir)
    made = json.loads((tmp_path / "out/metrics.json").read_text())["provenance"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", made["time"])
    assert made["packages"]["torch"] == version("torch") and made["mixed_precision"] == "no"
