"""report.py: what its page and tables show of one or several calls, and that a browser opens them without an error."""

import json
import random
import re
import shutil

import pandas as pd
import pytest
from conftest import ROOT, launch, read_run, write_jsonl

import eval_incremental as evaluator
import report as script

HOSTILE = "</script><script>document.title = 'hostile'</script><img src=x onerror=\"document.title = 'hostile'\">"


def write_collection(folder, queries=3):
    """Write documents d0 to d39, queries q0, q1, ..., of which query n has the relevant documents d(n % 30) and d39,
    and two rankings of 30 documents: the first one's are rotated by the query's number, the second one's reversed."""
    documents = [{"_id": f"d{n}", "text": f"text of document {n} " + "word " * 20} for n in range(40)]
    documents[0] |= {"_id": "<b>d0", "text": f"{HOSTILE} of a document " + "x" * 5000}
    names = [document["_id"] for document in documents]
    texts = {f"q{n}": f"what document {n} says" for n in range(queries)}
    texts["q1"] = f"{HOSTILE} in a query"
    write_jsonl(folder / "documents.jsonl", documents)
    write_jsonl(folder / "queries.jsonl", [{"_id": name, "text": text} for name, text in texts.items()])
    lines = [f"q{n}\t{name}\t1\n" for n in range(queries) for name in (names[n % 30], "d39")]
    (folder / "qrels.tsv").write_text("".join(lines))
    for name, step in (("rotated", 1), ("reversed", -1)):
        with open(folder / f"{name}.run", "w") as file:
            for query in range(queries):
                ranked = [names[(query + rank) % 30] for rank in range(30)][::step]
                file.writelines(f"q{query}\tQ0\t{name}\t0\t{-rank}\tx\n" for rank, name in enumerate(ranked))
    return ["--corpus", folder / "documents.jsonl", "--queries", folder / "queries.jsonl",
            "--qrels", folder / "qrels.tsv"]  # fmt: skip


def write_beir(folder):
    """Write the same as a BEIR folder."""
    (folder / "qrels").mkdir(parents=True)
    write_collection(folder)
    (folder / "documents.jsonl").rename(folder / "corpus.jsonl")
    (folder / "qrels.tsv").rename(folder / "qrels/test.tsv")


def page_data(*folders, rankings=()):
    """Make the page of result folders, and return what its script reads."""
    flags = ["--rankings", *rankings] if rankings else []
    script.main(script.parse_args([*map(str, folders), *flags]))
    page = (folders[0] / "report.html").read_text()
    assert not re.search(r"https?:|src=[\"']|href=|@import|url\(", page)  # one file
    assert "innerHTML" not in page  # a text is shown, never run
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(data)


def find_documents(data, query):
    """Return {document id: (rank in the first ranking, in the second, relevance)} of a query."""
    (documents,) = [part["documents"] for part in data["queries"] if part["_id"] == query]
    return {document["_id"]: (*document["ranks"], document["grade"]) for document in documents}


def test_page_has_the_first_documents_and_the_relevant_ones(evaluate, tmp_path):
    flags = write_collection(tmp_path)
    evaluate(*flags, "--run", tmp_path / "rotated.run", tmp_path / "reversed.run")
    data = page_data(tmp_path / "out")
    assert data["rankings"] == ["rotated.run", "reversed.run"] and data["measure"] == "nDCG@10"
    assert [query["_id"] for query in data["queries"]] == ["q0", "q1", "q2"]
    tables = [pd.read_csv(tmp_path / f"out/{name}/per_query.csv", index_col="query") for name in data["rankings"]]
    for query in data["queries"]:
        values = [table.loc[query["_id"], "nDCG@10"] for table in tables]
        assert query["values"] == pytest.approx(values) and query["relevant"] == 2
        assert query["change"] == pytest.approx(values[1] - values[0]) and query["change"] < 0
    runs = [read_run(tmp_path / f"out/{name}/run.trec") for name in data["rankings"]]
    for query in ("q0", "q1", "q2"):
        ranks = [{name: rank for rank, name in enumerate(run[query], start=1)} for run in runs]
        found = find_documents(data, query)
        expected = [*list(runs[0][query])[:10], *list(runs[1][query])[:10], "d39"]
        assert sorted(found) == sorted(expected)
        for name, (first, second, relevance) in found.items():
            assert (first, second) == (ranks[0].get(name), ranks[1].get(name))
            assert relevance == (1 if name in ("d39", expected[0]) else None)
    assert find_documents(data, "q0")["<b>d0"] == (1, 30, 1)  # moved
    assert find_documents(data, "q0")["d39"] == (None, None, 1)  # not retrieved
    texts = {document["_id"]: document["text"] for query in data["queries"] for document in query["documents"]}
    written = [json.loads(line) for line in (tmp_path / "out/documents.jsonl").read_text().splitlines()]
    assert {row["_id"]: row["text"] for row in written} == texts  # no other was kept
    assert len(texts["<b>d0"]) < 2010 < 5000


def test_ties_rank_as_they_are_measured(evaluate, tmp_path):
    """By document id, descending, though documents of equal scores are retrieved in the order of the corpus."""
    flags = write_collection(tmp_path, 2)
    documents = [{"_id": f"d{n}", "text": "the same text"} for n in range(5)]
    write_jsonl(tmp_path / "documents.jsonl", documents)
    (tmp_path / "qrels.tsv").write_text("q0\td0\t1\nq1\td3\t1\n")
    evaluate(*flags, "--metrics", "RR")
    data = page_data(tmp_path / "out")
    # of a single ranking, the lowest first
    assert [(query["_id"], query["values"]) for query in data["queries"]] == [("q0", [0.2]), ("q1", [0.5])]
    for query, expected in (("q0", (5, 1)), ("q1", (2, 1))):
        (relevant,) = [found for found in find_documents(data, query).values() if found[-1]]
        assert relevant == expected


def test_page_has_the_queries_that_differ_most(evaluate, tmp_path):
    flags = write_collection(tmp_path, 520)
    lines = (tmp_path / "rotated.run").read_text().splitlines()
    for name in ("rotated", "reversed"):
        shuffled = [re.sub(r"-?\d+(\tx)", rf"{random.Random(name + line).random()}\1", line) for line in lines]
        (tmp_path / f"{name}.run").write_text("\n".join(shuffled))
    evaluate(*flags, "--run", tmp_path / "rotated.run", tmp_path / "reversed.run", "--metrics", "AP")
    data = page_data(tmp_path / "out")
    tables = [pd.read_csv(tmp_path / f"out/{name}/per_query.csv", index_col="query") for name in data["rankings"]]
    change = tables[1]["AP"] - tables[0]["AP"]
    assert len(data["queries"]) == 500 and data["total"] == len(change) == 520
    shown = change[[query["_id"] for query in data["queries"]]]
    assert shown.abs().is_monotonic_decreasing and (shown > 0).sum() > 200 < (shown < 0).sum()
    assert shown.abs().min() >= change.drop(shown.index).abs().max()


def test_rankings_of_several_calls(evaluate, tmp_path, bert):
    """They are compared as those of one call are, whatever the order of queries and judgments; the chosen ones in the
    given order; equal names get their folder."""
    flags = write_collection(tmp_path)
    runs = [tmp_path / "rotated.run", tmp_path / "reversed.run"]
    metrics = ["--metrics", "RR@10", "nDCG@10"]
    evaluate(*flags, *metrics, "--run", *runs, "--model_name_or_path", bert)
    together = page_data(tmp_path / "out", rankings=["reversed.run", "rotated.run"])
    tables = [(tmp_path / "out/table.md").read_text()]
    more = ["--metrics", "AP", "nDCG@10", "RR@10", "--run", runs[0], "--model_name_or_path", bert]
    evaluate(*flags, *more, output="first")
    for name in ("queries.jsonl", "qrels.tsv"):
        lines = (tmp_path / name).read_text().splitlines(keepends=True)
        (tmp_path / name).write_text("".join(lines[::-1]))
    evaluate(*flags, *metrics, "--run", runs[1], "--model_name_or_path", bert, output="second")
    folders = [tmp_path / "second", tmp_path / "first"]
    apart = page_data(*folders, rankings=["reversed.run", "rotated.run"])
    tables.append((tmp_path / "second/table.md").read_text())
    assert tables[0] == tables[1]
    for data in (together, apart):
        data["queries"].sort(key=lambda query: query["_id"])
    assert together == apart
    assert page_data(*folders)["rankings"] == [f"{tmp_path}/second/{bert.name}", "reversed.run"]
    page_data(*folders, rankings=[f"{tmp_path}/first/{bert.name}"])
    message = "--rankings st: no such ranking; there are .*second/st, reversed.run, "
    with pytest.raises(script.UserError, match=message):
        page_data(*folders, rankings=["st"])


def test_errors(evaluate, tmp_path):
    flags = [*write_collection(tmp_path), "--run", tmp_path / "rotated.run"]
    evaluate(*flags)
    evaluate(*flags, "--metrics", "P@5", output="p5")
    with open(tmp_path / "qrels.tsv", "a") as file:
        file.write("q0\td5\t1\n")
    evaluate(*flags, output="other")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/metrics.json").write_text('{"results": []}')
    for folders, message in (
        (["other"], "other: not the corpus, queries and judgments of documents.jsonl in .*out$"),
        (["old"], "old: not the --output_dir of an evaluation by this edition: 'collections'"),
        (["missing"], "missing: not the --output_dir of an evaluation by this edition: .*No such file"),
        (["p5"], "no measure in common: evaluate them with the same --metrics"),
    ):
        with pytest.raises(script.UserError, match=message):
            page_data(tmp_path / "out", *(tmp_path / folder for folder in folders))
    done = launch(ROOT / "report.py", tmp_path / "out", tmp_path / "old", check=False)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {tmp_path}/old: not the --output_dir")
    done = launch(ROOT / "report.py", tmp_path / "out", "--output_dir", tmp_path / "new/page")
    assert "3 queries are in" in done.stdout and (tmp_path / "new/page/report.html").exists()


@pytest.mark.slow
def test_results_of_another_corpus_are_refused(evaluate, tmp_path, bert):
    """Rankings of the same queries and judgments compare only within one corpus, whatever has ranked it."""
    flags = write_collection(tmp_path)
    evaluate(*flags, "--model_name_or_path", bert)
    evaluate(*flags, "--bm25", output="words")
    page_data(tmp_path / "out", tmp_path / "words")
    documents = (tmp_path / "documents.jsonl").read_text().splitlines(keepends=True)
    for name, changed in (("fewer", documents[1:]), ("other", [documents[0].replace("text", "next"), *documents[1:]])):
        (tmp_path / "documents.jsonl").write_text("".join(changed))
        evaluate(*flags, "--bm25", output=name)
        with pytest.raises(script.UserError, match=f"{name}: not the corpus, .* of documents.jsonl in .*/out$"):
            page_data(tmp_path / "out", tmp_path / "words", tmp_path / name)
    (tmp_path / "documents.jsonl").write_text("".join(documents[::-1]))  # the same, in another order
    evaluate(*flags, "--bm25", output="turned")
    page_data(tmp_path / "out", tmp_path / "turned")


@pytest.mark.slow
def test_collections_are_matched_by_name(evaluate, tmp_path):
    """Two versions of a corpus with the same queries and judgments, in one order and in the other."""
    write_beir(tmp_path / "V1")
    write_beir(tmp_path / "V2")
    documents = (tmp_path / "V2/corpus.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "V2/corpus.jsonl").write_text("".join(documents[3:]))
    evaluate("--beir", tmp_path / "V1", tmp_path / "V2", "--bm25", output="monday")
    evaluate("--beir", tmp_path / "V2", tmp_path / "V1", "--bm25", output="today")
    calls = script.read_calls([tmp_path / "monday", tmp_path / "today"])
    rankings = script.read_rankings(calls, [])
    for number in range(3):
        rows = [row["nDCG@10"] for row in script.compare_rankings(rankings, number)]
        assert rows[0]["mean"] == rows[2]["mean"] and rows[1]["mean"] == rows[3]["mean"] and rows[2]["difference"] == 0
    evaluate("--beir", tmp_path / "V1", "--bm25", output="one")
    with pytest.raises(script.UserError, match="one: not the corpus, queries and judgments of V2 in"):
        script.read_calls([tmp_path / "monday", tmp_path / "one"])


def test_the_page_shows_all_passages_of_an_id(evaluate, tmp_path):
    """One that explains nothing may be the first."""
    texts = [("A", "Minutes of a meeting."), ("A", "Mix flour, water and yeast."), ("B", "A third text.")]
    write_jsonl(tmp_path / "c.jsonl", [{"_id": name, "text": text} for name, text in texts])
    write_jsonl(tmp_path / "q.jsonl", [{"_id": "q", "text": "flour and yeast"}])
    (tmp_path / "r.txt").write_text("q 0 A 1\n")
    evaluate("--bm25", "--corpus", tmp_path / "c.jsonl", "--queries", tmp_path / "q.jsonl", "--qrels",
             tmp_path / "r.txt")  # fmt: skip
    (query,) = page_data(tmp_path / "out")["queries"]
    (text,) = [hit["text"] for hit in query["documents"] if hit["_id"] == "A"]
    assert text == "Minutes of a meeting.\n\nMix flour, water and yeast."


def test_no_report_of_earlier_results_stays(evaluate, tmp_path):
    """The same command again, after a run file has changed; a call that fails then leaves no results, either."""
    flags = [*write_collection(tmp_path), "--run", tmp_path / "rotated.run", "--output_dir", tmp_path / "again"]
    evaluator.main(evaluator.parse_args(list(map(str, flags))))
    page_data(tmp_path / "again")
    assert {"table.md", "table.tex", "report.html"} <= {path.name for path in (tmp_path / "again").iterdir()}
    evaluator.main(evaluator.parse_args(list(map(str, flags))))
    assert not {"table.md", "table.tex", "report.html"} & {path.name for path in (tmp_path / "again").iterdir()}


def test_bytes_are_those_of_vectors(evaluate, tmp_path, capsys):
    """Rankings of files alone have none."""
    flags = [*write_collection(tmp_path), "--metrics", "RR@10"]
    runs = [tmp_path / f"{name}.run" for name in ("rotated", "reversed", "third")]
    shutil.copy(runs[0], runs[2])
    evaluate(*flags, "--run", *runs)
    script.main(script.parse_args([str(tmp_path / "out")]))
    assert re.findall("^ +bytes .*", capsys.readouterr().out, re.M) == []


def test_several_sources_have_one_name(evaluate, static, tmp_path, capsys):
    for name in "abc":
        write_jsonl(
            tmp_path / f"{name}.jsonl", [{"q": f"{name} {n}", "d": f"{n} of {name}" if n else ""} for n in range(3)]
        )
    paths = [tmp_path / f"{name}.jsonl" for name in "abc"]
    flags = ["--pairs", *paths, "--columns", "q", "d", "--metrics", "RR@10", "--model_name_or_path", static]
    assert evaluate(*flags)["collection"] == "a.jsonl and 2 more"
    shown = capsys.readouterr()
    assert "a.jsonl and 2 more" in shown.out and "warning: a.jsonl and 2 more: 3 rows of --pairs lack" in shown.err
    script.main(script.parse_args([str(tmp_path / "out")]))
    assert "<title>a.jsonl and 2 more</title>" in (tmp_path / "out/report.html").read_text()
    assert evaluate(*flags[:2], *flags[4:], output="one")["collection"] == "a.jsonl"
    (tmp_path / "b.jsonl").write_text("{\n")
    with pytest.raises(evaluator.UserError, match="^--pairs .*a.jsonl .*b.jsonl .*c.jsonl: "):
        evaluate(*flags)


def test_tables(evaluate, tmp_path, capsys, monkeypatch):
    """A row for each measure, in parts if the terminal is narrow."""
    flags = write_collection(tmp_path)
    (tmp_path / "rotated.run").rename(tmp_path / "a_b.run")
    flags += ["--run", tmp_path / "a_b.run", tmp_path / "reversed.run"]
    monkeypatch.setenv("COLUMNS", "115")
    evaluate(*flags)
    wide = capsys.readouterr().out
    assert re.search(r"^ +a_b.run +reversed.run\nnDCG@10 +0.\d{4} \[", wide, re.M)
    monkeypatch.setenv("COLUMNS", "45")
    evaluate(*flags)
    narrow = capsys.readouterr().out
    assert re.search(r"^ +a_b.run +\\\nnDCG@10 +0.\d{4} \[", narrow, re.M)
    page_data(tmp_path / "out")
    values = sorted(re.findall(r"[\[+-]*\d\.\d{4}", wide))
    for text in (narrow, *((tmp_path / "out" / name).read_text() for name in ("table.md", "table.tex"))):
        assert sorted(re.findall(r"[\[+-]*\d\.\d{4}", text)) == values and len(values) == 4 * (3 + 5)
    lines = (tmp_path / "out/table.md").read_text().splitlines()
    assert lines[:2] == ["|  | nDCG@10 | RR@10 | R@100 | AP@100 |", "| --- | ---: | ---: | ---: | ---: |"]
    assert "a\\_b.run & " in (tmp_path / "out/table.tex").read_text()


def test_a_row_for_each_collection(evaluate, tmp_path, capsys, monkeypatch):
    """13 collections fit a terminal and a page."""
    for number in range(13):
        write_beir(tmp_path / f"collection{number:02}")
    monkeypatch.setenv("COLUMNS", "90")
    folders = sorted(tmp_path.glob("collection*"))
    evaluate("--beir", *folders, "--bm25")
    shown = capsys.readouterr().out
    assert re.search(r"^nDCG@10 +st +BM25\ncollection00 +0.\d{4} \[", shown, re.M) and "\nmean  " in shown
    assert max(map(len, shown[shown.index("nDCG@10") : shown.index("\nmean")].splitlines())) <= 90
    data = page_data(tmp_path / "out")
    for name, start in (("table.md", r"\| "), ("table.tex", "")):
        rows = re.findall(rf"^{start}(collection\d\d|mean) ", (tmp_path / "out" / name).read_text(), re.M)
        assert rows == [*(folder.name for folder in folders), "mean"]
    assert len(data["collections"]) == 13 and {query["collection"] for query in data["queries"]} == set(range(13))
    assert "<title>13 collections</title>" in (tmp_path / "out/report.html").read_text()


def test_names_in_latex_are_escaped(tmp_path):
    """All that LaTeX reads otherwise, and what its line break would take for an option."""
    table = [["", "RR@10"], ["a^b~c\\d", "1"], ["é|ü$x&y_50%#{1}", "2"], ["[x]", "3"], ["*x", "[4]"]]
    script.write_tables(table, tmp_path)
    assert (tmp_path / "table.tex").read_text().splitlines()[2:-2] == [
        r" & RR@10 \\",
        r"\midrule",
        r"a\textasciicircum{}b\textasciitilde{}c\textbackslash{}d & 1 \\",
        r"é\textbar{}ü\$x\&y\_50\%\#\{1\} & 2 \\",
        r"{[}x] & 3 \\",
        r"{*}x & [4] \\",
    ]
