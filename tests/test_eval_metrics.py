"""Measures of the user's in the evaluator, and where results come from."""

import json
import re
import shutil
from importlib.metadata import version

import ir_measures
import pandas as pd
import pytest
from conftest import read_run

import eval_incremental as script
import report

ALL_FOUND = """
import datasets
import evaluate
import pandas as pd

TEXT, NUMBER = datasets.Sequence(datasets.Value("string")), datasets.Sequence(datasets.Value("float64"))


class AllFound(evaluate.Metric):
    def _info(self):
        run = {"query": TEXT, "q0": TEXT, "docid": TEXT, "rank": NUMBER, "score": NUMBER, "system": TEXT}
        qrels = {"query": TEXT, "q0": TEXT, "docid": TEXT, "rel": NUMBER}
        features = datasets.Features({"predictions": run, "references": qrels})
        return evaluate.MetricInfo(description="all relevant ones are found", citation="", features=features)

    def _compute(self, predictions, references):
        run, qrels = pd.DataFrame(predictions[0]), pd.DataFrame(references[0])
        found = qrels[qrels["rel"] > 0].merge(run, "left", ["query", "docid"]).groupby("query")["score"]
        all_found = (found.count() == found.size()).astype(float)
        return {"AllFound": all_found.to_dict(), "documents": run["docid"].nunique(), "runid": "x"}
"""


@pytest.fixture
def metric(tmp_path):
    """Return a function that writes ALL_FOUND, with some text replaced, to a file, and returns that."""

    def write(old="", new="", name="all_found.py"):
        assert old in ALL_FOUND
        (tmp_path / name).write_text(ALL_FOUND.replace(old, new) if old else ALL_FOUND)
        return tmp_path / name

    return write


@pytest.mark.slow
def test_a_script_of_the_user(evaluate, metric, beir, static, tmp_path, capsys):
    """Values of queries have intervals, tests and a column, a number is shown as it is; the mean of two collections;
    the script sees the first --top_k documents, whatever other measures ask for; report.py shows both."""
    shutil.copytree(beir, tmp_path / "copy")
    flags = ["--beir", beir, tmp_path / "copy", "--model_name_or_path", static, "--top_k", 50]
    evaluate(*flags, "--truncate_dim", 32, 4, "--metrics", "nDCG@10", metric(), "AP", "R@50", "nDCG@10")
    assert "(no interval)" not in capsys.readouterr().out  # several collections: the first measure alone
    record = json.loads((tmp_path / "out/metrics.json").read_text())
    first, second, *_ = record["results"]
    table = pd.read_csv(tmp_path / "out" / first["folder"] / "per_query.csv", index_col="query")
    assert list(table) == ["nDCG@10", "AllFound", "AP", "R@50"]
    assert list(first["metrics"]) == ["nDCG@10", "AllFound", "documents", "AP", "R@50"]
    assert (table["AllFound"] == (table["R@50"] == 1)).all() and 0 < table["AllFound"].mean() < 1
    cell = first["metrics"]["AllFound"]
    assert cell["low"] < cell["mean"] == table["AllFound"].mean() < cell["high"]
    assert 0 < second["metrics"]["AllFound"]["p"] <= 1
    ranked = read_run(tmp_path / "out" / first["folder"] / "run.trec").values()
    best = {document for found in ranked for document in list(found)[:50]}
    mean = record["means"][first["name"]]
    assert first["metrics"]["documents"] == {"value": len(best)} == mean["documents"]
    assert mean["AllFound"]["mean"] == cell["mean"]
    report.main(report.parse_args([str(tmp_path / "out")]))
    evaluate(*flags[:2], *flags[3:], "--metrics", metric(), output="one")
    assert f"{len(best)}.0000 (no interval)" in capsys.readouterr().out
    report.main(report.parse_args([str(tmp_path / "one")]))
    assert f"{len(best)}.0000&nbsp;(no&nbsp;interval)" in (tmp_path / "one/report.html").read_text()


INTEGERS = ('TEXT, "q0": TEXT, "docid"', 'datasets.Sequence(datasets.Value("int64")), "q0": TEXT, "docid"')


@pytest.mark.parametrize(
    "old, new",
    [
        ("all_found.to_dict()", "all_found"),
        ("all_found.to_dict()", "all_found[all_found > 0].to_dict()"),  # of the others 0
        INTEGERS,  # as trec_eval has them
    ],
)
def test_forms_of_values(evaluate, metric, beir, static, tmp_path, old, new):
    """Each is of its query, whose ids are texts, or numbers: 9 is before 10, which text is not."""
    kept = beir
    if (old, new) == INTEGERS:
        kept = shutil.copytree(beir, tmp_path / "numbers")
        for name in ("queries.jsonl", "qrels/test.tsv"):
            (kept / name).write_text(re.sub(r'(^|")q(\d)', r"\1\2", (kept / name).read_text(), flags=re.M))
    path = metric(old, new, "forms.py")
    evaluate("--beir", kept, "--model_name_or_path", static, "--metrics", metric(), path, "R@100")
    table = pd.read_csv(tmp_path / "out/per_query.csv", index_col="query")
    assert list(table) == ["AllFound", "forms_AllFound", "R@100"] and 0 < table["AllFound"].mean() < 1
    assert (table["AllFound"] == table["forms_AllFound"]).all() and (table["AllFound"] == (table["R@100"] == 1)).all()


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            "import evaluate\n",
            "import evaluate\nimport no_such_package_xyz\n",
            "no evaluate.Metric is loaded: To be able to use own, you need",
        ),
        ("class AllFound", "x = (\nclass AllFound", ".* '\\(' was never closed"),
        ("evaluate.Metric)", "list)", "no evaluate.Metric is loaded: .*NoneType"),
        (*INTEGERS, "its features do not take these ids and numbers: .*'q0'"),
        ("all_found.to_dict()", "(all_found / 0 * 0).to_dict()", "AllFound has a value that is not finite"),
        ("all_found.to_dict()", "[1.0, 0.0, 1.0, 1.0, 1.0]", "cannot convert dictionary update sequence"),
        ("all_found.to_dict()", "{'q9': 1}", "AllFound has a value of 'q9', which is no query"),
        ("return {", "return 1 or {", "'int' object has no attribute 'items'"),
    ],
)
def test_scripts_that_cannot_be_used(evaluate, beir, metric, tmp_path, old, new, message):
    """They are refused before a text is encoded; --metrics takes no names of the Hub."""
    with pytest.raises(script.UserError, match=f"^--metrics {tmp_path}/own.py: {message}"):
        evaluate("--beir", beir, "--metrics", metric(old, new, "own.py"))
    with pytest.raises(script.UserError, match="^--metrics none.py: no .*: Couldn't find a metric script"):
        evaluate("--beir", beir, "--metrics", "none.py")
    assert not (tmp_path / "cache").exists() and not (tmp_path / "out").exists()


def test_errors_of_a_script_keep_their_traceback(evaluate, beir, static, metric, tmp_path):
    flags = ["--beir", beir, "--model_name_or_path", static, "--metrics"]
    raises = metric("        run, qrels", "        raise ValueError('mine')\n        run, qrels")
    with pytest.raises(ValueError, match="^mine$") as error:
        evaluate(*flags, raises)
    assert error.traceback[-1].name == "_compute" and not isinstance(error.value, script.UserError)
    late = "        if len(run) > 99:\n            {}['gone']\n        found = qrels"  # not in the trial at the start
    with pytest.raises(KeyError, match="gone"):
        evaluate(*flags, metric("        found = qrels", late))
    assert (tmp_path / "out/run.trec").exists() and not (tmp_path / "out/metrics.json").exists()


@pytest.fixture
def all_found(monkeypatch):
    """Register AllFound, whether a ranking contains all relevant documents of a query, as the recipe does."""

    def measure(qrels, run):
        return float(set(qrels.loc[qrels["relevance"] > 0, "doc_id"]) <= set(run["doc_id"]))

    kind = type(ir_measures.define_byquery(measure, "AllFound"))
    monkeypatch.setitem(ir_measures.measures.registry, "AllFound", kind)


def test_a_measure_of_the_user(evaluate, all_found, beir, static, tmp_path):
    """It has an interval, a paired test, a column and a mean over collections, with and without a cutoff."""
    flags = ["--model_name_or_path", static, "--metrics", "R@100", "AllFound@100", "AllFound", "R@100"]
    first, second = evaluate("--beir", beir, *flags, "--truncate_dim", 32, 4)["models"]
    table = pd.read_csv(tmp_path / "out" / first["folder"] / "per_query.csv", index_col="query")
    assert list(table) == list(first["metrics"]) == ["R@100", "AllFound@100", "AllFound"]
    assert (table["AllFound@100"] == (table["R@100"] == 1.0)).all() and 0 < table["AllFound@100"].mean() < 1
    assert (table["AllFound"] >= table["AllFound@100"]).all()  # of the first 1,000
    cell = first["metrics"]["AllFound@100"]
    assert cell["low"] < cell["mean"] == table["AllFound@100"].mean() < cell["high"]
    assert 0 < second["metrics"]["AllFound@100"]["p"] <= 1
    files = {".lock", "documents.jsonl", "metrics.json", "queries.jsonl", first["folder"], second["folder"]}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    shutil.copytree(beir, tmp_path / "copy")
    evaluate("--beir", beir, tmp_path / "copy", *flags[:2], "--metrics", "AllFound@100", output="two")
    record = json.loads((tmp_path / "two/metrics.json").read_text())
    one, two = (result["metrics"]["AllFound@100"]["mean"] for result in record["results"])
    assert one == two == record["means"][static.name]["AllFound@100"]["mean"] == cell["mean"]


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
