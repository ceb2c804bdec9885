"""The evaluator's measures of a run file are those that trec_eval expects of its own test; see trec_eval/README.md."""

import csv

import pytest
from conftest import ROOT, write_jsonl

FILES = ROOT / "tests/trec_eval"
NAMES = {"AP": "map", "RR": "recip_rank", "Rprec": "Rprec", "Bpref": "bpref", "infAP": "infAP", "nDCG": "ndcg"}
NAMES |= {f"{ours}@{k}": f"{theirs}_{k}" for k in (5, 10, 20, 100)
          for ours, theirs in (("P", "P"), ("R", "recall"), ("nDCG", "ndcg_cut"))}  # fmt: skip
NAMES |= {"Success@5": "success_5", "Success@10": "success_10", "AP@5": "map_cut_5", "AP@100": "map_cut_100"}


def test_measures_are_those_of_trec_eval(evaluate, tmp_path):
    """Of each query: per_query.csv of --run."""
    texts = {"corpus": [f"d{number:03}" for number in range(600)], "queries": ["302", "303"]}
    for name, ids in texts.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [{"_id": name, "text": "a text"} for name in ids])
    evaluate("--corpus", tmp_path / "corpus.jsonl", "--queries", tmp_path / "queries.jsonl", "--qrels",
             FILES / "qrels.trec", "--run", FILES / "run.trec", "--metrics", *NAMES)  # fmt: skip
    with open(tmp_path / "out/per_query.csv") as file:
        found = {row["query"]: row for row in csv.DictReader(file)}
    lines = [line.split() for line in (FILES / "expected.txt").read_text().splitlines()]
    expected = {(theirs, query): float(value) for theirs, query, value in lines}
    assert len(expected) == 2 * len(NAMES) == 44
    for ours, theirs in NAMES.items():
        for query in texts["queries"]:
            assert float(found[query][ours]) == pytest.approx(expected[theirs, query], abs=1e-4), (ours, query)
