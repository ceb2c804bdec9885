"""What is printed is what was measured: a measure does not depend on what else is printed, nor on whether a ranking
was written and read again; judgments are those of the file; what cannot be ranked is left out and counted."""

import importlib.util
import json
import random
import re

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import CHAOS, ROOT, launch, mark_slow, read_run, skip_without_bfloat16, write_beir, write_jsonl

import eval_incremental as script
import mine_negatives
import report


def fail(*given):
    raise OSError("the disk is full")


SPEC = importlib.util.spec_from_file_location("files_round", ROOT / "benchmarks/files_round.py")
files_round = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(files_round)


@pytest.fixture
def twins(tmp_path, rows):
    """A collection in which each document stands three times, under ids whose order is neither theirs nor that of
    numbers, and one of them is relevant."""
    kept = list({row["code"]: row for row in rows}.values())[:60]
    documents = {f"d{place * 37 % 180}": kept[place % 60]["code"][:300] for place in range(180)}
    table = pd.Series(documents)
    ids = table.index.to_series().groupby(table.to_numpy()).agg(list)
    queries = {f"q{number}": row["docstring"] for number, row in enumerate(kept[:25])}
    judgments = [(f"q{i}", random.Random(i).choice(ids[kept[i]["code"][:300]]), 1 + i % 2) for i in range(25)]
    return write_beir(tmp_path / "twins", documents, queries, judgments)


# ------------------------------------------------------------------------------------------------ files round


WAYS = [("zscore", torch.bfloat16), ("rrf", torch.float32)]


@pytest.mark.slow
@pytest.mark.parametrize("fuse, dtype", WAYS if CHAOS else WAYS[:1])
def test_a_ranking_that_is_written_and_read_again_measures_the_same(
    twins, static, bert, reranker, tmp_path, evaluate, fuse, dtype
):
    """And so does trec_eval's code on run.trec, to the last digit, where a third of all scores are equal or more."""
    pytest.importorskip("bm25s")
    skip_without_bfloat16()
    from sentence_transformers import CrossEncoder

    CrossEncoder(str(reranker), device="cpu").to(dtype).save_pretrained(str(tmp_path / "reranker"))
    flags = ["--beir", twins, "--model_name_or_path", static, bert, "--bm25", "--fuse", fuse]
    flags += ["--cross_encoder", tmp_path / "reranker", "--rerank_k", 20]
    found = list(files_round.compare(flags, tmp_path, lambda *given: evaluate(*given)))
    assert [row["values"] for row in found] == [100] * 8
    assert sum(row["ties"] for row in found) > sum(row["lines"] for row in found) / 3
    compared = ("queries ordered otherwise", "differ read again", "differ in trec_eval")
    assert {row["ranking"]: [row[name] for name in compared if row[name]] for row in found if
            any(row[name] for name in compared)} == {}  # fmt: skip


def write_run(path, scores):
    """Write a run file of {query: {document: score, as a text}}."""
    lines = [f"{q} Q0 {d} 1 {score} x" for q, found in scores.items() for d, score in found.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


LONG = {
    "milliseconds": {f"d{number}": f"{1459742490000 - number}" for number in range(6)},
    "double precision": {f"d{number}": repr(0.7 - number * 1e-10) for number in range(6)},
    "distances": {f"d{number}": f"-{number / 7}" for number in range(6)},
    "small": {f"d{number}": f"{6 - number}e-41" for number in range(6)},
}


@pytest.mark.parametrize("name", LONG)
def test_scores_that_a_file_holds_longer_than_trec_eval_does(evaluate, tmp_path, name):
    folder = write_beir(tmp_path / "c", dict.fromkeys(LONG[name], "a text"), {"q": "a word"}, [("q", "d1", 1)])
    write_run(tmp_path / "x.run", {"q": LONG[name]})
    flags = ["--beir", folder, "--run", tmp_path / "x.run"]
    (row,) = files_round.compare(flags, tmp_path, lambda *given: evaluate(*given))
    given = {"q": {document: float(score) for document, score in LONG[name].items()}}
    expected = files_round.trec_eval(given, {"q": {"d1": 1}})  # of the file as it was given
    found = files_round.read_values(tmp_path / "first")
    assert row["differ read again"] == row["differ in trec_eval"] == 0
    assert {key: float(value) for key, value in found.items()} == expected


def test_scores_beyond_float32_are_refused(evaluate, tmp_path):
    folder = write_beir(tmp_path / "c", {"d": "a text"}, {"q": "a word"}, [("q", "d", 1)])
    with pytest.raises(script.UserError, match="line 1 has no id, or no finite score"):
        evaluate("--beir", folder, "--run", write_run(tmp_path / "x.run", {"q": {"d": "1e39"}}))


def test_sums_of_fusion_do_not_depend_on_their_order():
    """Of the 1,331 triples of ranks up to 11, a ninth have two sums in float64, one in float32."""
    sums = {}
    for ranks in np.ndindex(11, 11, 11):
        sums.setdefault(tuple(sorted(ranks)), set()).add(sum(1 / (61 + rank) for rank in ranks))
    assert sum(len(found) > 1 for found in sums.values()) > 10
    assert all(len(set(map(np.float32, found))) == 1 for found in sums.values())


# ------------------------------------------------------------------------------------------------ measures


def test_a_measure_does_not_depend_on_the_others(evaluate, beir, tmp_path):
    """Which ir_measures computes in an order of its own, by the hashes of names: twelve chances of one half."""
    forms = ("nDCG@{0}", "nDCG(gains={{1:1,2:10}})@{0}")
    names = [name.format(cutoff) for cutoff in range(1, 13) for name in forms]
    found = evaluate("--beir", beir, "--metrics", *names, "P(judged_only=True)@5")["metrics"]
    plain = evaluate("--beir", beir, "--metrics", *names[::2], output="plain")["metrics"]
    gained = evaluate("--beir", beir, "--metrics", *names[1::2], output="gained")["metrics"]
    assert all(found[name] == cell for name, cell in (plain | gained).items())


@pytest.mark.parametrize("fuse", ["rrf", "zscore"] if CHAOS else ["rrf"])
def test_a_ranking_does_not_depend_on_the_measures(evaluate, twins, static, reranker, tmp_path, fuse):
    """Neither a fusion, nor what is reranked, nor which of equal scores at the last rank is found."""
    pytest.importorskip("bm25s")
    flags = ["--beir", twins, "--model_name_or_path", static, "--bm25", "--fuse", fuse, "--top_k", 7]
    flags += ["--cross_encoder", reranker, "--rerank_k", 5]
    for name, more in (("few", []), ("many", ["AP", "R@100"])):
        evaluate(*flags, "--metrics", "R@7", "nDCG@5", *more, output=name)
    for path in (tmp_path / "few").glob("*/per_query.csv"):
        few, many = (pd.read_csv(tmp_path / name / path.parent.name / "per_query.csv") for name in ("few", "many"))
        assert (few == many[list(few)]).all().all(), path.parent.name
    assert len(read_run(tmp_path / "many" / static.name / "run.trec")["q0"]) == 180


@pytest.mark.parametrize("name", ["Accuracy", "Accuracy@10", "NumRel", "NumRet", "NumRet(rel=3)", "NumQ"])
def test_measures_whose_mean_is_another(name):
    with pytest.raises(script.UserError, match=f"^--metrics {re.escape(name)}: has another mean than over all"):
        script.measure_depth(name)


@pytest.mark.parametrize("grades", [{"d1": -2}, {"d1": -2, "d2": -5}, {"d9": -3}, {"d1": -1}])
def test_grades_below_zero_end_no_process(tmp_path, grades):
    """Of a query that has no others, trec_eval's code writes outside of its memory."""
    judged = [("q1", "d1", 1), ("q1", "d2", -2), *(("q2", *row) for row in grades.items())]
    folder = write_beir(tmp_path / "c", {"d1": "one", "d2": "two"}, {"q1": "one", "q2": "two"}, judged)
    write_run(tmp_path / "x.run", {query: {"d1": 2, "d2": 1} for query in ("q1", "q2")})
    measures = ["Bpref", "nDCG@10", "AP", "RR", "infAP", "Rprec", "SetF", "Judged@2", "ERR@5"]
    flags = ["--beir", folder, "--run", tmp_path / "x.run", "--metrics", *measures, "--output_dir", tmp_path / "out"]
    launch(ROOT / "eval_incremental.py", *flags, cwd=tmp_path)
    table = pd.read_csv(tmp_path / "out/per_query.csv", index_col="query")
    assert table.loc["q1", "nDCG@10"] == 1 and (table.loc["q2"].drop("Judged@2") == 0).all()


# ------------------------------------------------------------------------------------------------ judgments


@pytest.mark.parametrize("suffix, sep", [("tsv", "\t"), ("csv", ","), ("txt", " ")])
@pytest.mark.parametrize("grade", ["relevance", "rel", "Grade"])
def test_the_grade_is_the_column_of_that_name(tmp_path, suffix, sep, grade):
    """A score beside it is that of a system."""
    path = tmp_path / f"q.{suffix}"
    rows = [("query_id", "score", "doc_id", grade), ("q1", "17", "d1", "0"), ("q1", "9", "d2", "2")]
    path.write_text("\n".join(sep.join(row) for row in rows) + "\n")
    assert script.read_qrels(path).to_numpy().tolist() == [["q1", "d1", 0], ["q1", "d2", 2]]


@pytest.mark.parametrize("line", ["query1\tdoc1", "topic-1 pid-9", "Query-7\tdoc-12"])
def test_a_line_of_ids_is_no_header(tmp_path, line):
    path = tmp_path / "qrels.tsv"
    path.write_text(f"{line}\n{line}0\n")
    with pytest.raises(script.UserError, match="line 1, .*, is not one of: query 0 document grade"):
        script.read_qrels(path)
    path.write_text("Query_ID\tDoc-ID\nquery1\tdoc1\n")
    assert script.read_qrels(path).to_numpy().tolist() == [["query1", "doc1", 1]]


def test_a_grade_that_trec_eval_cannot_hold(tmp_path):
    (tmp_path / "q.tsv").write_text("q\td\t3000000000\n")
    with pytest.raises(script.UserError, match="a grade is not a whole number, or above a million"):
        script.read_qrels(tmp_path / "q.tsv")


@pytest.mark.parametrize("measure", ["ERR@10", "nDCG(dcg='exp-log2')@10"])
def test_a_grade_that_a_measure_cannot_hold(evaluate, static, tmp_path, measure):
    """gdeval.pl knows grades up to 4. It is said before a text is encoded, and nothing is left that refuses a call."""
    judged = [("q", "d", 5), ("q", "e", 1), ("p", "e", 4)]
    folders = [write_beir(tmp_path / name, {"d": "a text", "e": "another"}, {"q": "a word", "p": "text"}, rows)
               for name, rows in (("low", judged[1:]), ("high", judged))]  # fmt: skip
    flags = ["--beir", *folders, "--model_name_or_path", static, "--metrics"]
    message = f"^--metrics {re.escape(measure)}: takes grades up to 4, those of high go to 5$"
    with pytest.raises(script.UserError, match=message):
        evaluate(*flags, "RR@10", measure)
    assert not (tmp_path / "out").exists() and not (tmp_path / "cache").exists()
    evaluate(*flags, "RR@10")
    found = evaluate("--beir", folders[0], *flags[3:], measure, output="new")["metrics"][measure]["mean"]
    assert 0 < found <= 1


def test_a_failed_call_leaves_nothing_that_refuses_the_next(evaluate, beir, static, tmp_path, monkeypatch):
    flags = ["--beir", beir, "--model_name_or_path", static, "--metrics"]
    with monkeypatch.context() as patch, pytest.raises(script.UserError, match="the disk is full"):
        patch.setattr(script, "bootstrap_interval", fail)
        evaluate(*flags, "P@5")
    assert (tmp_path / "out/run.trec").exists()
    script.check_output(script.Args(output_dir=str(tmp_path / "out"), metrics=["RR@10"]))


def mine(folder, run, tmp_path, *flags):
    """Return the rows that the miner writes."""
    flags = ["--beir", folder, "--split", "test", "--run", run, "--output", tmp_path / "mined.jsonl", *flags]
    mine_negatives.main(mine_negatives.parse_args([*map(str, flags), "--num_negatives", "1", "--overwrite"]))
    return [json.loads(line) for line in (tmp_path / "mined.jsonl").read_text().splitlines()]


DOCUMENTS = {"d1": "red apples", "d2": "green pears", "d3": "blue plums"}


def test_of_conflicting_grades_the_highest_counts(evaluate, tmp_path, capsys):
    """As of TREC's diversity tasks, which judge each subtopic; in either order."""
    judged = [("q1", "d1", 1), ("q1", "d1", 0), ("q2", "d2", 0), ("q2", "d2", 2), ("q2", "d2", 2), ("q3", "d3", 1)]
    queries = {"q1": "apples", "q2": "pears", "q3": "plums"}
    folder = write_beir(tmp_path / "c", DOCUMENTS, queries, judged)
    run = write_run(tmp_path / "x.run", {f"q{n}": {f"d{n}": 2, f"d{n % 3 + 1}": 1} for n in (1, 2, 3)})
    assert evaluate("--beir", folder, "--run", run, "--metrics", "nDCG@10")["metrics"]["nDCG@10"]["mean"] == 1
    line = "2 judgments have another grade for the same document; the highest counts"
    assert line in capsys.readouterr().err
    assert len(mine(folder, run, tmp_path)) == 3
    assert line in capsys.readouterr().out


def test_the_miner_ranks_what_float32_cannot_tell_apart_by_id(tmp_path):
    folder = write_beir(tmp_path / "c", DOCUMENTS, {"q1": "apples"}, [("q1", "d1", 1)])
    run = write_run(tmp_path / "x.run", {"q1": {"d1": 0.9, "d2": 0.7 + 1e-10, "d3": 0.7}})
    assert [row["negative_1"] for row in mine(folder, run, tmp_path)] == [DOCUMENTS["d3"]]


def test_one_rank_of_a_document_in_all_scripts(evaluate, tmp_path):
    """By score, then id, descending; a document whose line is repeated counts once. In lines of any order."""
    documents = {f"d{number:02}": f"text {number}" for number in range(40)}
    queries = {"q1": "one", "q2": "two", "q3": "three"}
    judged = [("q1", "d07", 1), ("q2", "d07", 1), ("q3", "d00", 1)]
    folder = write_beir(tmp_path / "c", documents, queries, judged)
    lines = [f"q1 Q0 {name} 1 1.0 x\n" for name in documents]  # all tie
    lines += [f"q2 Q0 {name} 1 {score} x\n" for score, name in enumerate(reversed(documents))]
    lines += [f"q2 Q0 d03 1 {score} x\n" for score in (3, 3, 50)]  # repeated, the best line last
    lines += [f"q3 Q0 d{number % 20:02} 1 {-number} x\n" for number in range(1, 80)]
    (tmp_path / "x.run").write_text("".join(lines))
    evaluate("--beir", folder, "--run", tmp_path / "x.run", "--metrics", "RR@100")
    ranks = {key: 1 + list(found).index(document) for (key, document, _), found in
             zip(judged, read_run(tmp_path / "out/run.trec").values())}  # fmt: skip
    assert ranks == {"q1": 33, "q2": 8, "q3": 20}
    shown = report.read_ranks(tmp_path / "out/run.trec", [{"_id": query} for query in queries])
    assert {query: shown[query][document] for query, document, _ in judged} == ranks
    for least, kept in (8, ["q2"]), (19, ["q2"]), (20, ["q2", "q3"]), (32, ["q2", "q3"]), (33, ["q1", "q2", "q3"]):
        rows = mine(folder, tmp_path / "x.run", tmp_path, "--positive_rank", least)
        assert {row["query"] for row in rows} == {queries[query] for query in kept}
    with pytest.raises(mine_negatives.UserError, match="no row is left"):
        mine(folder, tmp_path / "x.run", tmp_path, "--positive_rank", 7)


@pytest.mark.parametrize("ranks", ["distances", "similarities", "constant", "words"])
def test_ranks_that_contradict_the_scores(evaluate, tmp_path, capsys, ranks):
    """Scores count, as in trec_eval; a line asks whether they are distances."""
    documents = {f"d{number}": f"text {number}" for number in range(6)}
    folder = write_beir(tmp_path / "c", documents, {"q": "one", "p": "two"}, [("q", "d0", 1), ("p", "d1", 1)])
    written = {"constant": "7", "words": "first"}
    lines = [f"{query} Q0 d{n} {written.get(ranks, n + 1)} {n / 7 if ranks == 'distances' else 1 - n / 7} x\n"
             for query in "qp" for n in range(6)]  # fmt: skip
    (tmp_path / "x.run").write_text("".join(lines))
    got = evaluate("--beir", folder, "--run", tmp_path / "x.run", "--metrics", "RR@10")
    assert got["metrics"]["RR@10"]["mean"] == pytest.approx((1 / 6 + 1 / 5) / 2 if ranks == "distances" else 3 / 4)
    line = "x.run fall with rising scores, which count: are these distances?"
    assert (line in capsys.readouterr().err) == (ranks == "distances")
    mine(folder, tmp_path / "x.run", tmp_path)
    assert capsys.readouterr().out.count(line) == (ranks == "distances")


# ------------------------------------------------------------------------------------------------ left out


def test_what_stands_for_nothing_or_for_two(evaluate, tmp_path, capsys):
    queries = [("q1", "apples"), ("q2", ""), ("q3", "  \u3000"), ("q4", "pears"), ("q4", "plums"), ("q5", "plums")]
    queries = [{"_id": key, "text": text} for key, text in [*queries, ("q5", "plums")]] + [{"_id": "q6", "text": None}]
    judged = [(f"q{number}", f"d{(number - 1) % 3 + 1}", 1) for number in range(1, 8)]
    documents = [{"_id": key, "text": text} for key, text in DOCUMENTS.items()] + [{"_id": "d2", "text": "a melon"}]
    folder = write_beir(tmp_path / "c", documents, queries, judged)
    run = write_run(tmp_path / "x.run", {f"q{n}": {"d1": 3, "d2": 2, "d3": 1} for n in (1, 4, 5)})
    evaluate("--beir", folder, "--run", run, "--metrics", "nDCG@10")
    assert pd.read_csv(tmp_path / "out/per_query.csv")["query"].tolist() == ["q1", "q5"]
    warned = capsys.readouterr().err
    for line in ("4 judged queries have no text; left out", "1 ids of judged queries stand for two texts; left out",
                 "1 found ids stand for several texts; the best score counts"):  # fmt: skip
        assert f"warning: c: {line}\n" in warned
    write_jsonl(folder / "corpus.jsonl", documents[:-1])
    assert {row["query"] for row in mine(folder, run, tmp_path)} == {"apples", "plums"}
    assert "1 ids of --queries stand for two texts; left out" in capsys.readouterr().out
    write_jsonl(folder / "queries.jsonl", queries[3:5])
    message = "has no judged query; check the .*; 6 judged .*; 1 ids of .*; left out"
    with pytest.raises(script.UserError, match=message):
        evaluate("--beir", folder, "--run", run)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_zero_vectors_find_nothing_and_are_not_found(evaluate, tmp_path, static, capsys, similarity):
    """Texts of unknown words alone, by a static model, would tie with all others."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(static), device="cpu", similarity_fn_name=similarity)
    model[0].embedding.weight.data[model[0].tokenizer.token_to_id("[UNK]")] = 0
    model.save_pretrained(str(tmp_path / "zeroed"))
    queries = {"q1": "apples", "q2": "\u6d77\u6d0b"}
    documents = DOCUMENTS | {"d4": "\u6d77\u6d0b", "d0": ""}
    folder = write_beir(tmp_path / "c", documents, queries, [("q1", "d1", 1), ("q2", "d4", 1)])
    flags = ["--model_name_or_path", tmp_path / "zeroed", "--beir", folder]
    got = evaluate(*flags, "--metrics", "nDCG@10")
    assert got["similarity"] == similarity
    run = read_run(tmp_path / "out/run.trec")
    assert {query: set(found) for query, found in run.items()} == {"q1": {"d1", "d2", "d3"}}
    printed = capsys.readouterr()
    assert f"c, zeroed by {similarity}: 6 of 7 texts encoded" in printed.out
    assert "1 queries have a zero vector of zeroed, which finds nothing" in printed.err
    assert "2 documents have a zero vector of zeroed; not ranked" in printed.err
    evaluate(*flags, "--query", "\u6d77\u6d0b")
    assert "1 queries have a zero vector" in capsys.readouterr().err


def test_a_similarity_that_is_null_is_cosine(evaluate, beir, static, tmp_path):
    import shutil

    shutil.copytree(static, tmp_path / "null")
    path = tmp_path / "null/config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"similarity_fn_name": None}))
    assert evaluate("--beir", beir, "--model_name_or_path", tmp_path / "null")["similarity"] == "cosine"


# ------------------------------------------------------------------------------------------------ texts and ids


WORDS = {
    "Hindi": ("\u0939\u093f\u0928\u094d\u0926\u0940", "\u0939\u093f\u0930\u0928"),
    "Bengali": ("\u09ac\u09be\u0982\u09b2\u09be", "\u09ac\u09be\u0982\u0995"),
    "Telugu": ("\u0c24\u0c46\u0c32\u0c41\u0c17\u0c41", "\u0c24\u0c46\u0c30"),
    "joined": ("\u0c95\u0ccd\u200c\u0cb7", "\u0c95\u0ccd\u0cb7\u0cbe"),
    "accents": ("re\u0301sume\u0301", "re\u0301gime"),
    "variants": ("\u845b\U000e0100\u57ce", "\u845b\U000e0101\u5ddd"),
    "a letter": ("C", "D"),
    "a syllable": ("\ubb3c", "\ucc28"),
    "a character": ("\u8336", "\u4e66"),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_of_bm25_have_their_vowel_signs(tmp_path, name):
    """A document without the whole word has none of its pieces; an accent may be a sign of its own, or not."""
    pytest.importorskip("bm25s")
    word, other = WORDS[name]
    documents = {"d1": f"x {other} y", "d2": f"x {word.replace('e' + chr(0x301), chr(0xE9))} y", "d3": "water"}
    folder = write_beir(tmp_path / "c", documents, {"q": word}, [("q", "d2", 1)])
    script.main(script.parse_args(["--beir", str(folder), "--bm25", "--output_dir", str(tmp_path / "out")]))
    assert list(read_run(tmp_path / "out/run.trec")["q"]) == ["d2"]


@pytest.mark.parametrize("other", mark_slow(["--bm25", "--cross_encoder"], ["--bm25"]))
def test_a_line_says_what_max_length_does_not_cut(evaluate, beir, static, reranker, tmp_path, other):
    pytest.importorskip("bm25s")
    flags = ["--beir", beir, "--model_name_or_path", static, other, *[reranker] * (other == "--cross_encoder")]
    found = []
    for more in ([], ["--max_length", 8]):
        evaluate(*flags, *more)
        (entry,) = json.loads((tmp_path / "out/metrics.json").read_text())["collections"]
        found.append([line for line in entry["warnings"] if "--max_length 8 is for bi-encoders" in line])
    assert [len(lines) for lines in found] == [0, 1]


def test_pairs_are_hashed_apart(tmp_path, reranker):
    """Texts may contain what separates them."""
    rows = [{"query": "a\0b", "positive": "c"}, {"query": "a", "positive": "b\0c"}, {"query": "1", "positive": "1\0d"}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    flags = ["--annotate", tmp_path / "rows.jsonl", "--columns", "query", "positive", "--cross_encoder", reranker]
    flags += ["--output", tmp_path / "out.jsonl", "--cache_dir", tmp_path / "cache"]
    script.main(script.parse_args(list(map(str, flags))))
    found = [json.loads(line)["scores"][0] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    from sentence_transformers import CrossEncoder

    expected = CrossEncoder(str(reranker), device="cpu").predict(
        [(row["query"], row["positive"]) for row in rows], activation_fn=torch.nn.Identity()
    )
    assert found == pytest.approx(expected.tolist(), abs=1e-5) and len(set(found)) == 3
