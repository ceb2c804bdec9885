"""Metric scripts of the user's in the evaluator, and where results come from."""

import json
import re
import shutil
from importlib.metadata import version

import pandas as pd
import pytest
from conftest import read_run

import eval_incremental as script

# What the page on evaluation shows: a value for each query, and one for all of them.
ALL_FOUND = '''
import datasets
import evaluate
import pandas as pd
TEXT, NUMBER = datasets.Sequence(datasets.Value("string")), datasets.Sequence(datasets.Value("float64"))
class AllFound(evaluate.Metric):
    """Whether a ranking contains all relevant documents of a query (as HotpotQA requires)."""
    def _info(self):
        run = {"query": TEXT, "q0": TEXT, "docid": TEXT, "rank": NUMBER, "score": NUMBER, "system": TEXT}
        qrels = {"query": TEXT, "q0": TEXT, "docid": TEXT, "rel": NUMBER}
        features = datasets.Features({"predictions": run, "references": qrels})
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=features)
    def _compute(self, predictions, references):
        run, qrels = pd.DataFrame(predictions[0]), pd.DataFrame(references[0])
        found = qrels[qrels["rel"] > 0].merge(run, "left", ["query", "docid"]).groupby("query")["score"]
        all_found = (found.count() == found.size()).astype(float)
        return {"AllFound": all_found.to_dict(), "documents": run["docid"].nunique()}
'''


@pytest.fixture
def metric(tmp_path):
    path = tmp_path / "all_found.py"
    path.write_text(ALL_FOUND)
    return path


def test_a_script_with_the_name_of_a_measure(evaluate, beir, tmp_path):
    """In either order, both are reported."""
    path = tmp_path / "own.py"
    path.write_text(ALL_FOUND.replace('"AllFound":', '"P@10":'))
    for metrics, again in ([path, "P@10"], "P@10_P@10"), (["P@10", path], "own_P@10"):
        found = evaluate("--beir", beir, "--metrics", *metrics, output=again)
        assert {"P@10", again} <= found["metrics"].keys()


def test_a_script_of_the_user(evaluate, beir, metric, bert, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(bert, other)
    config = json.loads((other / "1_Pooling/config.json").read_text())
    (other / "1_Pooling/config.json").write_text(json.dumps(config | {"pooling_mode": "cls"}))
    flags = ["--beir", beir, "--model_name_or_path", bert, other, "--metrics", "R@100", "AP@100", metric]
    first, second = evaluate(*flags)["models"]
    table = pd.read_csv(tmp_path / "out/st/per_query.csv", index_col="query")
    assert list(table) == ["R@100", "AP@100", "AllFound"]
    recalled = table["R@100"] == 1.0
    assert (table["AllFound"] == recalled).all() and 0 < recalled.mean() < 1
    cell = first["metrics"]["AllFound"]
    assert cell["low"] < cell["mean"] == table["AllFound"].mean() < cell["high"]
    assert 0 < second["metrics"]["AllFound"]["p"] <= 1
    ranked = {document for found in read_run(tmp_path / "out/st/run.trec").values() for document in found}
    assert first["metrics"]["documents"] == {"value": len(ranked)}
    shown = capsys.readouterr().out
    assert f"{len(ranked)}.0000 (no interval)" in shown and "AllFound" in shown
    files = {"documents.jsonl", "metrics.json", "other", "queries.jsonl", "st"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    evaluate("--beir", beir, "--metrics", metric, output="alone")  # no measure of ir_measures
    found = evaluate("--beir", beir, "--metrics", "AP@100", "R@100", "AP@100")["metrics"]
    assert list(found) == ["AP@100", "R@100"]
    metric.write_text(ALL_FOUND.replace('"documents"', '"AP@100"'))  # a name that a built-in measure has
    found = evaluate("--beir", beir, "--metrics", "AP@100", metric)["metrics"]
    assert list(found) == ["AP@100", "AllFound", "all_found_AP@100"] and found["AP@100"] == first["metrics"]["AP@100"]


def test_two_collections(evaluate, beir, metric, tmp_path):
    shutil.copytree(beir, tmp_path / "copy")
    evaluate("--beir", beir, tmp_path / "copy", "--metrics", metric, "AP")
    record = json.loads((tmp_path / "out/metrics.json").read_text())
    first, second = (result["metrics"] for result in record["results"])
    assert first == second
    assert record["means"]["st"]["documents"] == first["documents"]
    assert record["means"]["st"]["AllFound"]["mean"] == first["AllFound"]["mean"]


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "none.py: Couldn't find a metric script"),
        ("x = (", "own.py: "),
        ("import no_such_package_xyz", "own.py: To be able to use own, you need to install"),
    ],
)
def test_scripts_that_cannot_be_used(evaluate, beir, tmp_path, content, message):
    """They are refused before a text is encoded."""
    path = tmp_path / ("own.py" if content else "none.py")
    if content:
        path.write_text(content)
    with pytest.raises(script.UserError, match=f"--metrics {tmp_path}/{message}"):
        evaluate("--beir", beir, "--metrics", path)
    assert not (tmp_path / "cache").exists()


def test_a_value_that_is_not_finite_is_refused(evaluate, beir, metric):
    """JSON has no such number: the page would be empty."""
    metric.write_text(ALL_FOUND.replace("all_found.to_dict()", "(all_found / 0 * 0).to_dict()"))
    with pytest.raises(script.UserError, match="--metrics: a script returns a value that is not finite"):
        evaluate("--beir", beir, "--metrics", metric)


def test_an_error_in_a_script_loses_no_ranking(evaluate, beir, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(ALL_FOUND.replace("        run, qrels", "        {}['gone']\n        run, qrels"))
    with pytest.raises(KeyError, match="gone"):  # with its traceback
        evaluate("--beir", beir, "--metrics", path)
    assert (tmp_path / "out/run.trec").exists()


def test_provenance(evaluate, beir, tmp_path):
    evaluate("--beir", beir)
    made = json.loads((tmp_path / "out/metrics.json").read_text())["provenance"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", made["time"])
    assert made["packages"]["torch"] == version("torch") and made["mixed_precision"] == "no"
