"""Collections as they lie on disks and on the Hub, read by evaluator and miner alike; and numbers of the evaluator
that would be wrong without a word."""

import gzip
import json
import re
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import write_jsonl

import check_overlap
import eval_incremental as script
import mine_negatives
import train_bi_encoder

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
DOCUMENTS = {"d0": "red apple", "d1": "blue car", "d2": "deep sea", "d3": "apple tree"}
QUERIES = {"q1": "apple", "q2": "sea"}
JUDGMENTS = [("q1", "d0"), ("q2", "d2")]


def write_tsv(path, judgments=JUDGMENTS, grade="1"):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{query}\t{document}\t{grade}\n" for query, document in judgments]
    path.write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))


def write_texts(folder, key="_id", text="text", documents=DOCUMENTS, queries=QUERIES):
    write_jsonl(folder / "corpus.jsonl", [{key: name, text: words} for name, words in documents.items()])
    write_jsonl(folder / "queries.jsonl", [{key: name, "text": words} for name, words in queries.items()])


def write_configurations(folder, tables, split):
    """Write {configuration: rows} as on the Hub."""
    lines = [f"- config_name: {name}\n  data_files:\n  - split: {split}\n    path: {name}/*\n" for name in tables]
    for name, rows in tables.items():
        (folder / name).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / name / "0.parquet")
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(lines)}---\n")


def tables(prefix="", key="_id", judged="qrels"):
    """Return the tables of a collection in the layout of the Hub."""
    return {
        f"{prefix}corpus": [{key: name, "title": "", "text": text} for name, text in DOCUMENTS.items()],
        f"{prefix}queries": [{key: name, "text": text} for name, text in QUERIES.items()],
        f"{prefix}{judged}": [{"query-id": q, "corpus-id": d, "score": 1} for q, d in JUDGMENTS],
    }


def layout_beir(folder):
    write_texts(folder)
    write_tsv(folder / "qrels/test.tsv")


def layout_grades_with_a_point(folder):
    write_texts(folder)
    write_tsv(folder / "qrels/test.tsv", grade="1.0")


def layout_mteb_jsonl(folder):
    write_texts(folder)
    rows = [{"query-id": query, "corpus-id": document, "score": 1.0} for query, document in JUDGMENTS]
    write_jsonl(folder / "qrels/test.jsonl", rows)


def layout_mteb_id(folder):
    write_configurations(folder, tables(key="id", judged="default"), "test")


def layout_nano_bm25(folder):
    found = tables()
    del found["qrels"]
    rows = [{"query-id": q, "positive-corpus-ids": [d], "bm25-ranked-ids": ["d1", "d0"]} for q, d in JUDGMENTS]
    write_configurations(folder, found | {"relevance": rows}, "test")


def layout_root_id(folder):
    write_texts(folder, key="id")
    write_tsv(folder / "qrels/test.tsv")


LAYOUTS = [layout_beir, layout_grades_with_a_point, layout_mteb_jsonl, layout_mteb_id, layout_nano_bm25]
LAYOUTS += [layout_root_id]


def mine(*flags):
    """Return the rows that the miner writes from a ranking of all documents."""
    lines = [f"{query} Q0 {name} 1 {-place} x\n" for query in QUERIES for place, name in enumerate(DOCUMENTS)]
    Path("all.trec").write_text("".join(lines))
    flags = ["--run", "all.trec", "--num_negatives", "1", "--format", "n-tuple", "--overwrite", *flags]
    mine_negatives.main(mine_negatives.parse_args(flags))
    return [json.loads(line) for line in Path("mined.jsonl").read_text().splitlines()]


MINED = [{"query": "apple", "positive": "red apple", "negative_1": "blue car"},
         {"query": "sea", "positive": "deep sea", "negative_1": "red apple"}]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_layouts_are_read_by_evaluator_and_miner(evaluate, layout):
    layout(Path("c"))
    got = evaluate("--beir", "c", "--metrics", "R@4")
    assert got["queries"] == 2 and got["metrics"]["R@4"]["mean"] == 1.0
    assert mine("--beir", "c", "--split", "test") == MINED


@pytest.mark.parametrize("name", ["relevance", "Label"])
def test_grades_of_another_name(evaluate, name):
    """Without them, a grade of 0 would be relevant."""
    write_texts(Path("c"))
    judged = [*((*pair, 1) for pair in JUDGMENTS), ("q1", "d1", 0), ("q2", "d3", 0)]
    rows = [{"query-id": query, "corpus-id": document, name: grade} for query, document, grade in judged]
    write_jsonl(Path("c/qrels/test.jsonl"), rows)
    assert evaluate("--beir", "c", "--metrics", "R@4", "P@4")["metrics"]["P@4"]["mean"] == 0.25
    assert mine("--beir", "c", "--split", "test") == MINED


ORDERS = {
    "swapped.tsv": "corpus-id\tquery-id\tscore\n{d}\t{q}\t{g}\n",
    "names.tsv": "PID\tqid\trel\n{d}\t{q}\t{g}\n",
    "more.tsv": "date\tcorpus_id\tquery_id\tgrade\tnote\ntoday\t{d}\t{q}\t{g}\t\n",
    "spaces.txt": "docno topic relevance\n{d} {q} {g}\n",
    "trec.txt": "{q} 0 {d} {g}\n",
    "none.tsv": "{q}\t{d}\t{g}\n",
    "comma.csv": "query-id,corpus-id,score\n{q},{d},{g}\n",
    "zipped.csv.gz": "corpus-id,query-id,score\n{d},{q},{g}\n",
    "swapped.jsonl": '{{"corpus-id": "{d}", "score": {g}, "query-id": "{q}"}}\n',
}


@pytest.mark.parametrize("name", ORDERS)
def test_columns_of_judgments_go_by_their_names(evaluate, name):
    """Ids are numbers that queries and documents share: exchanged, they would measure 0."""
    numbers = {"d0": "02", "d1": "1", "d2": "01", "d3": "4"}, {"q1": "01", "q2": "2"}
    folder = Path("c")
    write_texts(folder, documents={numbers[0][d]: text for d, text in DOCUMENTS.items()},
                queries={numbers[1][q]: text for q, text in QUERIES.items()})  # fmt: skip
    *header, line = ORDERS[name].splitlines(keepends=True)
    judged = [*((*pair, 1) for pair in JUDGMENTS), ("q1", "d1", 0)]
    lines = [line.format(q=numbers[1][q], d=numbers[0][d], g=grade) for q, d, grade in judged]
    data = "".join([*header, *lines]).encode()
    Path(name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    for read in (script.read_qrels, mine_negatives.read_qrels):
        found = read(name).itertuples(index=False, name=None)
        assert sorted(found) == sorted((numbers[1][q], numbers[0][d], grade) for q, d, grade in judged)
    files = ["--corpus", folder / "corpus.jsonl", "--queries", folder / "queries.jsonl", "--qrels", name]
    got = evaluate(*files, "--metrics", "R@4")["metrics"]
    assert got["R@4"]["mean"] == 1


def write_judgments(name, judged, documents="corpus-id"):
    """Write (query, document) with grade 1 in the format of the suffix; None, no cell, or an empty one."""
    names = ["query-id", documents, "score"]
    rows = [[*pair, 1] for pair in judged]
    if name.endswith("jsonl"):
        write_jsonl(Path(name), [dict(zip(names, row)) for row in rows])
    elif name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist([dict(zip(names, row)) for row in rows]), name)
    else:
        separator = "," if name.endswith("csv") else "\t"
        lines = [separator.join("" if cell is None else str(cell) for cell in row) for row in [names, *rows]]
        Path(name).write_text("\n".join(lines) + "\n")
    return name


READERS = [script, mine_negatives, check_overlap]


@pytest.mark.parametrize("judged", [("q2", None), (None, "d2"), ("", "d2"), ("q2", "")], ids=str)
@pytest.mark.parametrize("suffix", ["tsv", "txt", "csv", "jsonl", "parquet"])
def test_judgments_without_an_id_are_refused(suffix, judged):
    """In each format, and by each script; the row is named."""
    name = write_judgments(f"q.{suffix}", [*JUDGMENTS, judged])
    for reader in READERS:
        with pytest.raises(reader.UserError, match="^--qrels q.*: (column .*: row 2, .*|line 4) has no id"):
            reader.read_qrels(name)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_empty_list_of_documents(evaluate, suffix, capsys):
    """Its query has no relevant one, and counts; a null or an id that is none is refused."""
    write_texts(Path("c"))
    files = ["--corpus", "c/corpus.jsonl", "--queries", "c/queries.jsonl", "--qrels", f"q.{suffix}"]
    write_judgments(f"q.{suffix}", [("q1", ["d0", "d3"]), ("q2", [])], "positive-corpus-ids")
    for metrics in (["P@1", "nDCG@10"], ["R@4"]):
        got = evaluate(*files, "--metrics", *metrics)
        assert got["queries"] == 2 and got["metrics"][metrics[0]]["mean"] == 0.5
    assert "warning" not in capsys.readouterr().err
    assert {row["query"] for row in mine(*files)} == {"apple"}
    assert "judgments have" not in capsys.readouterr().out
    assert set(check_overlap.read_qrels(f"q.{suffix}")["query_id"]) == {"q1", "q2"}
    for bad in (None, ["d2", None], ["", "d2"], ["d\t2"]):
        write_judgments(f"q.{suffix}", [("q1", ["d0", "d3"]), ("q2", bad)], "positive-corpus-ids")
        for reader in READERS:
            with pytest.raises(reader.UserError, match="column 'positive-corpus-ids': row 1, counted from 0, has "):
                reader.read_qrels(f"q.{suffix}")


def test_ids_that_are_numbers_in_arrow_files(evaluate):
    """They are texts, as those of other files."""
    write_texts(Path("c"), documents=dict(zip("0123", DOCUMENTS.values())), queries=dict(zip("12", QUERIES.values())))
    table = pa.table({"query-id": [1, 2], "corpus-id": [0, 2], "score": [1, 1]})
    with pa.ipc.new_file("q.arrow", table.schema) as file:
        file.write_table(table)
    files = ["--corpus", "c/corpus.jsonl", "--queries", "c/queries.jsonl", "--qrels", "q.arrow"]
    assert evaluate(*files, "--metrics", "R@4")["metrics"]["R@4"]["mean"] == 1.0


FORMS = {  # of files that are not lines of a run, or no judgments: what is said
    "r.parquet": "is .parquet, not lines of: query Q0 document rank score tag",
    "r.json": "is .json, not lines of: query Q0 document rank score tag",
    "r.csv": "line 1, 'query,doc,score', is not one of: query Q0 document rank score tag",
    "q.json": "its columns must be query-id, corpus-id and score, not q0, q1, ",
    "mixed.txt": r"line 2 has no id, or no finite score: .*\(separated as in line 1, 'q1 0\\td0\\t1'\)",
    "empty.txt": "line 1, '', is not one of: query 0 document grade, maybe below a header",
    "header.tsv": "line 2, '', is not one of: query 0 document grade",
}


@pytest.mark.parametrize("name", FORMS)
def test_other_forms_of_runs_and_judgments(name):
    table = pa.table({"query": ["q1"], "doc": ["d0"], "score": [1.0]})
    pq.write_table(table, "r.parquet")
    table.to_pandas().to_csv("r.csv", index=False)
    Path("r.json").write_text(json.dumps({"q1": {"d0": 2.0}}))
    nested = {f"q{query}": {f"d{n}": n % 2 for n in range(2)} for query in range(300)}
    Path("q.json").write_text(json.dumps(nested, indent=1))
    Path("mixed.txt").write_text("q1 0\td0\t1\nq2 0 d2 1\n")
    Path("empty.txt").touch()
    Path("header.tsv").write_text("query-id\tcorpus-id\tscore\n")
    for reader in READERS[:2]:
        with pytest.raises(reader.UserError, match=f"^(--qrels {name}: )?{FORMS[name]}"):
            reader.read_qrels(name) if name[0] != "r" else next(reader.trec_parts(name, "run"))


def test_unknown_names_of_columns_are_refused():
    for name, text in (("q.csv", "doc,question,score\n1,1,1\n"), ("q.tsv", "x\ty\n1\t1\n")):
        Path(name).write_text(text)
        with pytest.raises(script.UserError, match="query-id,? corpus-id (and )?score"):
            script.read_qrels(name)


def test_judgments_without_a_column_of_grades(evaluate):
    """If they have further columns, one of these may be meant; of several names, the usual one counts."""
    write_texts(Path("c"))
    rows = [{"query-id": query, "corpus-id": document, "label": 0, "score": 1} for query, document in JUDGMENTS]
    write_jsonl(Path("c/qrels/test.jsonl"), rows)
    assert evaluate("--beir", "c", "--metrics", "R@4")["metrics"]["R@4"]["mean"] == 1.0
    rows = [{"query-id": query, "corpus-id": document, "rating": 1} for query, document in JUDGMENTS]
    write_jsonl(Path("c/qrels/test.jsonl"), rows)
    said = "its columns must be query-id, corpus-id and score, not query-id, corpus-id, rating"
    with pytest.raises(script.UserError, match=said):
        evaluate("--beir", "c", "--metrics", "R@4", output="other")
    with pytest.raises(mine_negatives.UserError, match=said):
        mine("--beir", "c", "--split", "test")


def test_two_files_of_one_split_are_refused(evaluate):
    """One would replace the other."""
    layout_beir(Path("c"))
    write_tsv(Path("c/qrels/test.v2.tsv"), JUDGMENTS[:1])
    write_tsv(Path("c/qrels/dev.tsv"), JUDGMENTS[:1])
    with pytest.raises(script.UserError, match="test.*: has 2 files: give one, with all judgments$"):
        evaluate("--beir", "c")
    with pytest.raises(mine_negatives.UserError, match="test.*: has 2 files: give one, with all judgments$"):
        mine("--beir", "c", "--split", "test")


def test_languages(evaluate):
    write_configurations(Path("c"), tables("fr-") | tables("de-"), "dev")
    assert evaluate("--beir", "c:fr", "--split", "dev", "--metrics", "R@4")["metrics"]["R@4"]["mean"] == 1.0
    assert mine("--beir", "c:de", "--split", "dev") == MINED
    with pytest.raises(script.UserError, match="^--beir c: .*but fr-corpus, .*; c:fr stands"):
        evaluate("--beir", "c", "--split", "dev")
    with pytest.raises(script.UserError, match="^--beir c:it: .* it-corpus and it-queries, but .*; c:fr stands"):
        evaluate("--beir", "c:it", "--split", "dev")


def test_a_collection_without_judgments(evaluate):
    found = tables()
    del found["qrels"]
    write_configurations(Path("c"), found, "train")
    for read, error in ((evaluate, script.UserError), (mine, mine_negatives.UserError)):
        with pytest.raises(error, match="^--beir c: .*c-qrels"):
            read("--beir", "c")


def test_what_is_not_read_is_named_once(evaluate, capsys):
    """Columns of texts, such as instructions, without which two queries may be the same."""
    layout_beir(Path("root"))
    rows = [{"_id": name, "text": text, "instruction": "x", "number": 1} for name, text in QUERIES.items()]
    write_jsonl(Path("root/queries.jsonl"), rows)
    for read in (lambda: evaluate("--beir", "root"), lambda: mine("--beir", "root", "--split", "test")):
        read()
        said = "root/queries.jsonl: not read: instruction (--corpus_columns, --query_columns)\n"
        assert capsys.readouterr().err.count(said) == 1
    evaluate("--beir", "root", "--query_columns", "_id", "text", "instruction")
    assert "instruction" not in capsys.readouterr().err
    more = {name: [{"query-id": "q0", name: "x"}] for name in ("instruction", "top_ranked")}
    write_configurations(Path("c"), tables() | more, "test")
    for read in (lambda: evaluate("--beir", "c"), lambda: mine("--beir", "c", "--split", "test")):
        read()
        assert "c: not read: instruction, top_ranked, which MTEB uses" in capsys.readouterr().err


def test_texts_are_read_as_they_are_written(evaluate, tmp_path):
    """With the white space that a tokenizer may see, as in training; title and text are joined as BEIR does."""
    pairs = [{"q": f" find {n}\n", "d": f"    def f_{n}():\n"} for n in range(3)] + [{"q": "a", "d": " \n"}]
    write_jsonl(Path("p.jsonl"), pairs)
    evaluate("--pairs", "p.jsonl", "--columns", "q", "d")
    run = Path(tmp_path / "out/run.trec").read_text()
    Path("p.run").write_text(run)
    rows = mine("--pairs", "p.jsonl", "--columns", "q", "d", "--run", "p.run")
    assert [[row["query"], row["positive"]] for row in rows] == [[row["q"], row["d"]] for row in pairs[:3]]
    args = script.parse_args(["--model_name_or_path", "x", "--pairs", "p.jsonl", "--columns", "q", "d"])
    reader, queries, _, lacking = script.judged_pairs("p", args)
    assert [*reader.frame()["text"]] == [row["d"] for row in pairs[:3]]
    assert lacking == ["1 rows of --pairs lack a text; left out"]
    assert [*queries.values()] == [row["q"] for row in pairs[:3]]
    write_texts(Path("c"), queries={"q0": " b\n"})
    documents = [{"_id": "d0", "title": "", "text": " a\n"}, {"_id": "d1", "title": " t", "text": " \n"}]
    write_jsonl(Path("c/corpus.jsonl"), documents)
    write_tsv(Path("c/qrels/test.tsv"), [("q0", "d0")])
    assert train_bi_encoder.read_beir("c", "test")[:2] == ({"q0": " b\n"}, {"d0": "a", "d1": "t"})
    lookup = train_bi_encoder.TextLookup(["c/corpus.jsonl"], ["_id", "text"])
    assert lookup.texts(["d0", "d1", "d2"]) == [" a\n", None, None]
    table = pa.table({"title": [" a", ""], "text": ["b ", " c"]})
    assert script.join_texts(table, ["title", "text"]).to_pylist() == ["a b", "c"]


def test_ids_with_spaces_survive_a_run_file(evaluate, tmp_path):
    """Also leading ones, and beside ids that differ in white space alone."""
    documents = {"d 0": "red apple", "d_0": "blue car", " d 0": "deep sea"}
    write_texts(Path("c"), documents=documents, queries={"q 1": "red apple", "q_1": "deep sea"})
    write_tsv(Path("c/qrels/test.tsv"), [("q 1", "d 0"), ("q_1", " d 0")])
    first = evaluate("--beir", "c", "--metrics", "RR", "R@1", output="first")
    again = evaluate("--beir", "c", "--run", tmp_path / "first/run.trec", "--metrics", "RR", "R@1")
    assert again["metrics"] == first["metrics"] and first["metrics"]["R@1"]["mean"] == 1.0


@pytest.mark.parametrize("separator", [" ", "\t", "  "])
def test_run_files_of_others(evaluate, separator):
    layout_beir(Path("c"))
    lines = [separator.join([query, "Q0", document, "1", "2.5", "tag"]) for query, document in JUDGMENTS]
    Path("run.trec").write_text("\n".join(lines))
    assert evaluate("--beir", "c", "--run", "run.trec", "--metrics", "R@1")["metrics"]["R@1"]["mean"] == 1.0


# ------------------------------------------------------------------------------------------------ measures, BM25

# What ir_measures computes from grades and a ranking, without packages that it does not require.
COMPUTED = ["AP", "AP@10", "Bpref", "Compat", "Compat(p=0.8)", "ERR@10", "IPrec@0.1",
            "Judged@10", "P(rel=2)@5", "R@10", "RR", "Rprec", "SetF", "SetP",
            "Success@10", "infAP", "nDCG", "nDCG@10", "nDCG(dcg='exp-log2')@10"]  # fmt: skip


def test_every_measure_of_the_library(evaluate):
    """Whatever the ids look like; values are those of the library for ids that are numbers."""
    import ir_measures

    numbers = [str(number) for number in range(1, 13)]
    for name, prefix in (("words", "id "), ("numbers", "")):
        texts = {f"{prefix}{number}": f"text {int(number) % 5} of {number}" for number in numbers}
        write_texts(Path(name), documents=texts, queries={f"{prefix}{n}": f"text {n}" for n in numbers[:3]})
        pairs = [(f"{prefix}{query}", f"{prefix}{document}") for query in numbers[:3] for document in numbers[3::2]]
        write_tsv(Path(f"{name}/qrels/test.tsv"), pairs)
    words = evaluate("--beir", "words", "--metrics", *COMPUTED, output="out/words")["metrics"]
    same = evaluate("--beir", "numbers", "--metrics", *COMPUTED, output="out/numbers")["metrics"]
    assert {name: cell["mean"] for name, cell in words.items()} == {name: cell["mean"] for name, cell in same.items()}
    qrels = [ir_measures.Qrel(query, document, 1) for query in numbers[:3] for document in numbers[3::2]]
    run = pd.concat(script.trec_parts("out/numbers/run.trec", "run"))
    run["score"] = 1 / (1 + run.groupby("query_id").cumcount())  # above 0, as Compat requires
    for name in COMPUTED:
        found = ir_measures.iter_calc([ir_measures.parse_measure(name)], pd.DataFrame(qrels), run)
        assert same[name]["mean"] == pytest.approx(sum(value.value for value in found) / 3), name


@pytest.mark.parametrize("name", ["ERR", "RBP", "alpha_nDCG@10", "P", "BPM@10", "nothing", "nDCG@0", "Rprec@10"])
def test_measures_that_cannot_be_computed(name):
    with pytest.raises(script.UserError, match=f"^--metrics {re.escape(name)}: .") as error:
        script.measure_depth(name)
    assert "object at" not in str(error.value)  # of the library's assertions


def test_bm25_finds_nothing_for_a_query(capsys):
    pytest.importorskip("bm25s")
    documents = DOCUMENTS | {"d4": "海の深いところ"}
    write_texts(Path("c"), documents=documents, queries=QUERIES | {"q3": "海", "q4": "the of"})
    write_tsv(Path("c/qrels/test.tsv"), [*JUDGMENTS, ("q3", "d4"), ("q4", "d1")])
    script.main(script.parse_args(["--beir", "c", "--bm25", "--output_dir", "out"]))
    assert "warning: c: 2 queries share no word with a document" in capsys.readouterr().err


def test_a_limit_holds_for_what_is_cached_already(rows):
    """Also where nothing is added: it is a way to free a disk."""
    cache = script.EmbeddingCache("cache", 64, "float32")
    for first in range(0, 160, 16):
        texts = pa.array([f"{number}" for number in range(first, first + 16)], pa.large_string())
        cache.store(script.text_hashes(texts), cache.pack(script.np.ones((16, 64), script.np.float32)))
    before = cache.volume()
    cache.close()
    limit = before * 0.6 / 1e9
    cache = script.EmbeddingCache("cache", 64, "float32", limit)
    assert 0 < cache.volume() <= limit * 1e9 < before and 0 < len(cache.cache) < 10
    cache.close()
