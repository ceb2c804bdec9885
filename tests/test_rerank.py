"""Reranking: the order is that of the cross-encoder, each pair is scored once, and kills lose nothing."""

import json
import random
import re
import shutil
import statistics
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, count_cached, launch, read_jsonl, read_run, write_jsonl
from sentence_transformers import CrossEncoder

import eval_incremental as script
import train_cross_encoder

SCRIPT = ROOT / "eval_incremental.py"


@pytest.fixture(scope="session")
def run_file(tmp_path_factory, beir):
    """A run file of 20 documents for each of 59 judged queries, and 3 for an unjudged one; all its ranks are 1."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("run") / "first.trec"
    lines = []
    for query in [*range(59), "x"]:
        documents = [query, *rng.sample(range(60, 293), 19)] if query != "x" else range(3)
        lines += [f"q{query} Q0 d{d} 1 {rng.randint(0, 9) / 2} tag\n" for d in documents]
    path.write_text("".join(lines))
    return path


def texts_of(beir):
    """Return ({id: query}, {id: document}) of a BEIR folder."""
    files = beir / "queries.jsonl", beir / "corpus.jsonl"
    return tuple({row["_id"]: row["text"] for row in read_jsonl(file)} for file in files)


def test_order_equals_that_of_predict(evaluate, beir, reranker, tmp_path):
    flags = ["--beir", beir, "--cross_encoder", reranker, "--rerank_k", 12, "--top_k", 30, "--metrics", "RR", "P@5"]
    first, second = evaluate(*flags)["models"]
    assert second["pairs"] == {"total": 720, "scored": 720, "cached": 0}
    assert second["metrics"]["RR"]["mean"] != first["metrics"]["RR"]["mean"] and "p" in second["metrics"]["RR"]
    before = read_run(tmp_path / "out" / first["name"] / "run.trec")
    after = read_run(tmp_path / "out" / second["name"] / "run.trec")
    model = CrossEncoder(str(reranker), device="cpu", activation_fn=torch.nn.Identity())
    queries, documents = texts_of(beir)
    compared = 0
    for query, found in before.items():
        reranked = after[query]
        assert reranked.keys() == set(list(found)[:12])
        assert list(reranked.values()) == sorted(reranked.values(), reverse=True)
        if len(model.tokenizer(queries[query])["input_ids"]) < 60:  # predict() truncates longer queries, too
            compared += 1
            expected = model.predict([(queries[query], documents[d]) for d in reranked]).tolist()
            assert list(reranked.values()) == pytest.approx(expected, abs=1e-5)
    assert compared > 40


def test_a_run_file_in_any_order_and_in_parts(evaluate, beir, run_file, tmp_path, monkeypatch):
    """The measures, and the file that is written, are those of the file in order."""
    run = tmp_path / "first.trec"
    run.write_text(run_file.read_text())
    expected = evaluate("--beir", beir, "--run", run)
    written = (tmp_path / "out/run.trec").read_text()
    lines = run.read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    run.write_text("".join(lines))
    read_csv = script.pd.read_csv
    monkeypatch.setattr(script.pd, "read_csv", lambda *args, **options: read_csv(*args, **options | {"chunksize": 50}))
    found = evaluate("--beir", beir, "--run", run)
    assert found["metrics"] == expected["metrics"]
    assert (tmp_path / "out/run.trec").read_text() == written


def test_a_given_run_without_reranking(evaluate, beir, run_file, tmp_path, capsys):
    got = evaluate("--beir", beir, "--run", run_file, "--metrics", "RR", "R@1000")
    message = capsys.readouterr().err
    assert f"1 queries of {run_file} are unknown, or not judged; left out" in message
    assert f"1 judged queries have no line in {run_file}: they count 0" in message
    assert message.count("warning: ") == 2
    ranked = {q: sorted(found, key=lambda d: (found[d], d), reverse=True) for q, found in read_run(run_file).items()}
    places = [ranked[f"q{i}"].index(f"d{i}") for i in range(59)]
    assert got["metrics"]["RR"]["mean"] == pytest.approx(sum(1 / (place + 1) for place in places) / 60)
    assert got["metrics"]["R@1000"]["mean"] == pytest.approx(58.5 / 60)


def test_each_pair_is_scored_once(evaluate, beir, reranker, run_file, tmp_path):
    flags = "--beir", beir, "--run", run_file, "--cross_encoder", reranker
    first = evaluate(*flags)["models"][1]
    again = evaluate(*flags, output="again")["models"][1]
    assert first["pairs"]["scored"] == 59 * 20 and again["pairs"]["scored"] == 0
    assert again["metrics"] == first["metrics"]
    name = "first.trec+" + reranker.name + "(100)/run.trec"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    # a lower --rerank_k, a reordered corpus, a stream: all pairs are cached; only a changed document has new ones
    folder = tmp_path / "changed"
    shutil.copytree(beir, folder)
    records = read_jsonl(beir / "corpus.jsonl")
    write_jsonl(folder / "corpus.jsonl", records[::-1])
    flags = "--beir", folder, *flags[2:], "--streaming"
    few = evaluate(*flags, "--rerank_k", 7)["models"][1]["pairs"]
    assert few == {"total": 59 * 7, "scored": 0, "cached": 59 * 7}
    records[100]["text"] += "  # changed"
    write_jsonl(folder / "corpus.jsonl", records)
    ranked = [documents for query, documents in read_run(run_file).items() if query != "qx"]
    assert evaluate(*flags)["models"][1]["pairs"]["scored"] == sum("d100" in documents for documents in ranked)


def test_equal_texts_rank_by_id_and_an_id_may_occur_twice(evaluate, tmp_path, reranker, bert):
    write_jsonl(tmp_path / "c.jsonl", [{"_id": f"d{i}", "text": "the same"} for i in range(6)]
                + [{"_id": "d2", "text": "another text of the same id"}])  # fmt: skip
    write_jsonl(tmp_path / "q.jsonl", [{"_id": "q", "text": "one"}])
    (tmp_path / "qrels.tsv").write_text("q\td0\t1\n")
    flags = ["--corpus", tmp_path / "c.jsonl", "--queries", tmp_path / "q.jsonl", "--qrels", tmp_path / "qrels.tsv"]
    got = evaluate(*flags, "--cross_encoder", reranker)["models"][1]
    lines = (tmp_path / "out" / got["name"] / "run.trec").read_text().splitlines()
    found = [line.split()[2] for line in lines]
    assert [d for d in found if d != "d2"] == ["d5", "d4", "d3", "d1", "d0"] and found.count("d2") == 1


def flags_for(beir, run_file, reranker, folder):
    """Return the flags of a reranking with all of its files in `folder`."""
    return ["--run", run_file, "--cross_encoder", reranker, "--beir", beir, "--cache_dir", folder / "cache",
            "--output_dir", folder / "out", "--corpus_chunk_size", 97, "--micro_batch_tokens", 1024]  # fmt: skip


@pytest.mark.slow
def test_two_processes_give_the_ranking_of_one(tmp_path, beir, run_file, reranker):
    """The last digit of a score may depend on the other pairs of its micro-batch, and on the processor."""
    name = "out/first.trec+" + reranker.name + "(100)/run.trec"
    for processes in (1, 2):
        launch(SCRIPT, *flags_for(beir, run_file, reranker, tmp_path / str(processes)), processes=processes)
        assert count_cached(tmp_path / str(processes) / "cache", 4) == [59 * 20]  # each pair was stored once
    one, two = ([line.split() for line in (tmp_path / n / name).read_text().splitlines()] for n in "12")
    assert [line[:4] for line in one] == [line[:4] for line in two] and len(one) == 59 * 20
    assert [float(line[4]) for line in one] == pytest.approx([float(line[4]) for line in two], abs=1e-5)


@pytest.mark.parametrize("content, reason", [
    ("q0 Q0 d1 1 2.5 tag\nq0 Q0 d2 2 tag\n", "line 2 has no id, or no finite score: q0 | d2 | tag"),
    ("nobody Q0 d1 1 2 tag\nq0 Q0 d2 1 1 tag more\n", "Expected 6 fields in line 2, saw 7"),
    ("q0 d1 2\n", "line 1, 'q0 d1 2', is not one of: query Q0 document rank score tag"),
    ("# made by x\nq0 Q0 d1 1 2 x\n", "line 1, '# made by x', is not one of: query"), ("", "line 1, '', is not"),
    ("q0 Q0 d1 1 2 x\n# made by x\n", "line 2 has no id, or no finite score: # | by"),
    ("nobody Q0 d1 1 2 tag\n", "contains none of the judged queries, such as 'q0'"),
])  # fmt: skip
def test_bad_run_file(evaluate, beir, reranker, tmp_path, content, reason):
    path = tmp_path / "bad.trec"
    path.write_text(content)
    with pytest.raises(script.UserError) as error:
        evaluate("--beir", beir, "--run", path, "--cross_encoder", reranker)
    assert str(error.value).startswith(f"--run {path}") and reason in str(error.value) and "\n" not in str(error.value)


def test_unknown_documents_are_measured_and_have_no_score(evaluate, beir, reranker, tmp_path):
    """They are not in the reranked ranking, which is as deep as --rerank_k."""
    (tmp_path / "run.trec").write_text("q0 Q0 zz 1 3 tag\nq0 Q0 d0 2 2 tag\nq0 Q0 d1 3 1 tag\n")
    flags = "--beir", beir, "--run", tmp_path / "run.trec", "--metrics", "RR"
    assert evaluate(*flags)["metrics"]["RR"]["mean"] == pytest.approx(0.5 / 60)
    before, after = evaluate(*flags, "--cross_encoder", reranker, "--rerank_k", 2)["models"]
    assert before["metrics"]["RR"]["mean"] == pytest.approx(0.5 / 60)
    assert after["metrics"]["RR"]["mean"] == pytest.approx(1 / 60)
    assert list(read_run(tmp_path / "out" / after["name"] / "run.trec")["q0"]) == ["d0"]
    (entry,) = json.loads((tmp_path / "out/metrics.json").read_text())["collections"]
    missed = (
        f"59 judged queries have no line in {tmp_path / 'run.trec'}: they count 0, where trec_eval leaves them out"
    )
    assert entry["warnings"] == [missed, "1 ranked documents are not in the corpus"]


@pytest.mark.parametrize("which", ["bi-encoder", "several labels", "nowhere", "damaged"])
def test_models_that_cannot_rerank(evaluate, beir, bert, reranker, run_file, tmp_path, which):
    path = {"bi-encoder": bert}.get(which, tmp_path / "model")
    if which == "several labels":
        CrossEncoder(str(bert), device="cpu", num_labels=3).save_pretrained(str(path))
    elif which == "damaged":
        shutil.copytree(reranker, path)
        (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:2000])
    with pytest.raises(script.UserError) as error:
        evaluate("--beir", beir, "--cross_encoder", path)
    assert f"{path}: " in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists()  # before a text is encoded


def test_bm25_without_its_package(evaluate, beir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(script.UserError, match="^--bm25 requires the package bm25s: "):
        evaluate("--beir", beir, "--bm25")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("precision, dtype", [("bf16", torch.float32), ("no", torch.bfloat16)])
def test_scores_in_half_precision_are_distinct(
    evaluate, beir, reranker, run_file, tmp_path, monkeypatch, precision, dtype
):
    """Under autocast, or of weights in bf16, the last layer computes in float32, as in the trainer: most would tie."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    folder = tmp_path / "model"
    CrossEncoder(str(reranker), device="cpu", model_kwargs={"dtype": dtype}).save_pretrained(str(folder))
    found = evaluate("--beir", beir, "--run", run_file, "--cross_encoder", folder)["models"][1]
    ranked = read_run(tmp_path / "out" / found["name"] / "run.trec").values()
    assert sum(len(set(scores.values())) for scores in ranked) > 0.95 * 59 * 20
    flags = ["--train_data", "x", "--columns", "q", "d", "--model_name_or_path", str(folder)]
    model = train_cross_encoder.load_model(train_cross_encoder.parse_args(flags))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(model.preprocess([("a", "b")]))["scores"].dtype == torch.float32


@pytest.mark.slow
def test_the_prompt_of_a_model_is_part_of_its_pairs(evaluate, beir, reranker, run_file, tmp_path):
    """Scores are those of predict(), which prepends it to queries; other prompts have other cached scores."""
    queries, documents = texts_of(beir)
    for prompt in ("find: ", "what is "):
        model = CrossEncoder(str(reranker), device="cpu", prompts={"q": prompt}, default_prompt_name="q")
        model.save_pretrained(str(tmp_path / "model"))
        evaluate("--beir", beir, "--run", run_file, "--cross_encoder", tmp_path / "model", "--rerank_k", 5)
        (path,) = (tmp_path / "out").glob("*+*/run.trec")
        found = read_run(path)["q3"]
        scores = model.predict([(queries["q3"], documents[d]) for d in found], activation_fn=torch.nn.Identity())
        assert list(found.values()) == pytest.approx(scores.tolist(), abs=1e-5)


@pytest.mark.slow
def test_bm25_alone_requires_no_model(beir, reranker, tmp_path):
    """It is a ranking like any other: the first, and reranked; its documents are the same on all processes."""
    flags = ["--beir", beir, "--bm25", "--rerank_k", 5, "--cache_dir", tmp_path / "cache"]
    launch(SCRIPT, *flags, "--output_dir", tmp_path / "alone", cwd=tmp_path)
    launch(SCRIPT, *flags, "--output_dir", tmp_path / "again", "--cross_encoder", reranker, processes=2)
    (alone,) = json.loads((tmp_path / "alone/metrics.json").read_text())["results"]
    first, second = json.loads((tmp_path / "again/metrics.json").read_text())["results"]
    assert (alone["name"], second["name"]) == ("BM25", f"BM25+{reranker.name}(5)")
    assert alone["metrics"] == first["metrics"] and alone["metrics"]["nDCG@10"]["mean"] > 0.5
    before, after = (read_run(tmp_path / path) for path in ("alone/run.trec", f"again/{second['name']}/run.trec"))
    assert second["pairs"]["total"] == sum(min(5, len(found)) for found in before.values())
    for query, found in before.items():
        assert set(list(found)[:5]) == after[query].keys()


def test_an_error_of_bm25_on_two_processes(tmp_path):
    write_jsonl(tmp_path / "p.jsonl", [{"q": "a", "d": "?"}])
    flags = ["--pairs", tmp_path / "p.jsonl", "--columns", "q", "d", "--bm25"]
    result = launch(SCRIPT, *flags, processes=2, cwd=tmp_path, check=False)
    lines = [line for line in result.stderr.splitlines() if "rror" in line]
    assert result.returncode == 1 and lines[0] == "error: --bm25: p.jsonl: no document has a word"


def test_fusion_equals_a_loop(evaluate, beir, bert, reranker, run_file, tmp_path):
    """Of three rankings, of which one has other depths and queries; and then it is reranked as they are."""
    pytest.importorskip("bm25s")
    flags = ["--beir", beir, "--run", run_file, "--model_name_or_path", bert, "--bm25", "--fuse", "rrf", "--top_k", 30]
    results = evaluate(*flags, "--metrics", "RR@10", "R@30", "--cross_encoder", reranker, "--rerank_k", 10)["models"]
    names = [bert.name, "first.trec", "BM25", "fused"]
    assert [result["name"] for result in results] == names + [f"{name}+{reranker.name}(10)" for name in names]
    assert {"mean", "low", "high", "difference", "p"} == set(results[3]["metrics"]["RR@10"])
    runs = {name: read_run(tmp_path / "out" / name / "run.trec") for name in names}
    compared = 0
    for query, found in runs["fused"].items():
        scores = {}
        for name in names[:3]:
            for rank, document in enumerate(runs[name].get(query, []), start=1):
                scores[document] = scores.get(document, 0) + 1 / (60 + rank)
        # Ties are those of float32, and rank by id.
        assert list(found) == sorted(scores, key=lambda name: (np.float32(scores[name]), name), reverse=True)[:30]
        assert found == pytest.approx({document: scores[document] for document in found}, rel=1e-7)
        compared += len(found)
    assert len(runs["fused"]) == 60 and compared == 60 * 30
    reranked = read_run(tmp_path / "out" / f"fused+{reranker.name}(10)" / "run.trec")
    assert all(reranked[query].keys() == set(list(found)[:10]) for query, found in runs["fused"].items())


@pytest.mark.slow
def test_fusion_by_standardized_scores(evaluate, beir, bert, run_file, tmp_path):
    """A document counts in each ranking by 1 and its distance from the last one, in standard deviations, so that what
    was found counts more than what was not."""
    lines = [f"q{query} Q0 d{query + n} 1 7 x\n" for query in range(60) for n in (1, 2)]
    (tmp_path / "flat.run").write_text("".join(lines))
    flags = ["--beir", beir, "--run", run_file, tmp_path / "flat.run", "--model_name_or_path", bert]
    evaluate(*flags, "--fuse", "zscore")
    names = ["first.trec", "flat.run", bert.name]
    runs = {name: read_run(tmp_path / "out" / name / "run.trec") for name in [*names, "fused"]}
    for query, found in runs["fused"].items():
        expected = {}
        for name in names:
            scores = runs[name].get(query, {})
            deviation = statistics.pstdev(scores.values()) if len(scores) > 1 else 0
            for document, score in scores.items():
                distance = 1 + ((score - min(scores.values())) / deviation if deviation else 0)
                expected[document] = expected.get(document, 0) + distance
        best = sorted(expected.values(), reverse=True)[:100]  # as deep as the deepest
        assert list(found.values()) == pytest.approx(best, rel=1e-5, abs=1e-6)
        assert found == pytest.approx({document: expected[document] for document in found}, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("method", ["rrf", "zscore"])
def test_a_single_hit_counts_more_than_what_was_not_found(method, evaluate, beir, tmp_path):
    """Of one ranking, whose scores have no deviation, and beyond the depth of the other one."""
    lines = [f"q0 Q0 d{n} {n} {9 - n} x\n" for n in (1, 2, 3)]
    (tmp_path / "dense.run").write_text("".join(lines))
    (tmp_path / "word.run").write_text("q0 Q0 d9 1 3.3 x\n")
    runs = [tmp_path / "dense.run", tmp_path / "word.run"]
    evaluate("--beir", beir, "--run", *runs, "--fuse", method, "--metrics", "RR@10")
    found = read_run(tmp_path / "out/fused/run.trec")["q0"]
    # Equal ones rank by id: zscore has 1 for both d9 and the last of the dense ones, rrf for d9 and the first.
    assert list(found)[2 if method == "zscore" else 0] == "d9" and len(found) == 4
    assert all(score > 0 for score in found.values())
    with open(runs[1], "a") as file:
        file.write("q0 Q0 d3 2 3.3 x\n")  # found by both, though the lowest of both
    evaluate("--beir", beir, "--run", *runs, "--fuse", method, "--metrics", "RR@10", output="both")
    found = list(read_run(tmp_path / "both/fused/run.trec")["q0"])
    assert found.index("d3") < found.index("d9") and (method == "zscore" or found[0] == "d3")


@pytest.mark.slow
def test_length_of_pairs(evaluate, beir, run_file, reranker):
    flags = "--beir", beir, "--run", run_file, "--cross_encoder", reranker, "--rerank_k", 3
    short = ["--rerank_max_length", 20]
    whole, same, short = (evaluate(*flags, *more)["models"][1] for more in ([], ["--max_length", 20], short))
    assert whole["fingerprint"] == same["fingerprint"] != short["fingerprint"] and short["pairs"]["scored"] == 59 * 3
    with pytest.raises(script.UserError, match="has positions for 512 tokens, not for 9999"):
        evaluate(*flags, "--rerank_max_length", 9999)


def test_a_hit_has_the_passage_and_the_score_of_one_text(evaluate, rows, reranker, tmp_path, capsys):
    """Of passages of one id, the reranker's best one, whichever the bi-encoder has found; and there are no more hits
    than were scored."""
    texts = {f"d{n}": [row["code"][:80] for row in rows[3 * n : 3 * n + 3]] for n in range(6)}
    passages = [{"_id": name, "text": text} for name, part in texts.items() for text in part]
    write_jsonl(tmp_path / "c.jsonl", passages)
    flags = ["--corpus", tmp_path / "c.jsonl", "--query", "open a file", "--cross_encoder", reranker]
    evaluate(*flags, "--rerank_k", 4, "--top_k", 6)
    hits = re.findall(r"^ +([0-9.-]+) +(d\d+)  (.*)$", capsys.readouterr().out, re.M)
    scores = [float(score) for score, _, _ in hits]
    assert len(scores) == 4 and scores == sorted(scores, reverse=True)
    model = CrossEncoder(str(reranker), device="cpu", activation_fn=torch.nn.Identity())
    for score, name, shown in hits:
        values = model.predict([("open a file", text.strip()) for text in texts[name]])
        assert " ".join(texts[name][values.argmax()].split()).startswith(shown.strip())
        assert float(score) == pytest.approx(values.max(), abs=1e-3)
