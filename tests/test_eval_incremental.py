"""The evaluator: exact scores, every text encoded once, nothing lost when killed."""

import json
import random
import re
import shutil
import sqlite3
import subprocess
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import ROOT, count_cached, launch, mark_slow, read_run, write_beir, write_jsonl
from filelock import FileLock

import eval_incremental as script

SCRIPT = ROOT / "eval_incremental.py"


def score_all(bert, beir, prompts):
    """Return {query: {document: score}} by encoding everything with sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(bert), device="cpu")
    sides = []
    for name, prompt in zip(("queries", "corpus"), prompts):
        records = [json.loads(line) for line in (beir / f"{name}.jsonl").read_text().splitlines()]
        vectors = model.encode([prompt + r["text"].strip() for r in records], convert_to_tensor=True)
        sides.append(([r["_id"] for r in records], torch.nn.functional.normalize(vectors, dim=1)))
    (queries, a), (documents, b) = sides
    return {q: dict(zip(documents, line)) for q, line in zip(queries, (a @ b.T).tolist())}


def read_qrels(path):
    """Return {query: {document: relevance}} of judgments as the evaluator reads them."""
    found = {}
    judgments = script.read_qrels(str(path))
    for query, document, relevance in judgments.itertuples(index=False):
        found.setdefault(query, {})[document] = relevance
    return found


# ------------------------------------------------------------------------------------------------------ correctness


def test_equals_encoding_everything(evaluate, beir, bert, tmp_path):
    """Documents and scores; tests/test_trec_eval.py has the measures of a ranking, test_views.py other dimensions."""
    prompts = ("find: ", "code: ")
    evaluate("--beir", beir, "--cache_dtype", "float32", "--query_prompt", prompts[0], "--document_prompt", prompts[1])
    run = score_all(bert, beir, prompts)
    ranked = read_run(tmp_path / "out/run.trec")
    assert ranked.keys() == run.keys()
    for query, found in ranked.items():
        best = sorted(run[query].values(), reverse=True)[:100]
        assert list(found.values()) == pytest.approx(best, abs=2e-6)
        assert found == pytest.approx({document: run[query][document] for document in found}, abs=2e-6)


def best_documents(scores, ids, k):
    """Return {row: score} of the K best documents of each query by a loop, equal ones by descending ids; of an id the
    first of its best rows."""
    found = []
    for row_scores in scores.tolist():
        best = {}
        for row in sorted(range(len(ids)), key=lambda row: (-row_scores[row], row)):
            best.setdefault(ids[row], row)
        order = sorted(best, key=lambda id: (row_scores[best[id]], id), reverse=True)
        found.append({best[id]: row_scores[best[id]] for id in order[:k]})
    return found


def table_of(ids):
    """Return the documents of search(), of a whole corpus."""
    return [pa.table({"row": range(len(ids)), "id": pa.array(ids, script.TEXT)})]


class Gathered:
    """An accelerator of processes whose TopK are known."""

    def __init__(self, parts):
        self.num_processes = len(parts)
        self.parts = parts

    def gather(self, values):
        """Return those of all parts; values: lines of a tensor of the first one."""
        first = values.storage_offset() // values.shape[1]
        for name in ("scores", "rows", "ids"):
            if getattr(self.parts[0], name).untyped_storage().data_ptr() == values.untyped_storage().data_ptr():
                return torch.cat([getattr(part, name)[first : first + len(values)] for part in self.parts])


@pytest.mark.parametrize("distinct", [1000, 300, 60, 7])
@pytest.mark.parametrize("sizes", [[1000], [1, 2, 3, 494, 500], [100] * 10])
def test_top_k_equals_a_full_sort_and_ties_have_the_highest_ids(distinct, sizes, monkeypatch):
    """Of 1,000 rows that all are documents, and that are passages of fewer documents than rows; in one process, and
    dealt to two, which merge five queries at a time."""
    monkeypatch.setattr(script, "MERGED", 5)
    generator = torch.Generator().manual_seed(0)
    documents = torch.randint(-2, 3, (1000, 6), generator=generator).float()  # many equal scores
    queries = torch.randint(-2, 3, (17, 6), generator=generator).float()
    ids = [f"{row * 7919 % distinct}é" for row in range(1000)]  # 300: only in different chunks of 100
    hashes = script.hash_texts(pa.array(ids)).view(np.int64)
    one, *two = [script.TopK(queries, 50) for _ in range(3)]
    first = 0
    for number, size in enumerate(sizes):
        part = slice(first, first + size)
        for top in (one, two[number % 2]):
            top.add(documents[part], first, hashes[part], table_of(ids[: first + size]))
        first += size
    two[0].merge(Gathered(two), table_of(ids))
    expected = best_documents(queries @ documents.T, ids, 50)
    for top in (one, two[0]):
        found = [dict(zip(rows, scores)) for rows, scores in zip(top.rows.tolist(), top.scores.tolist())]
        assert [{row: score for row, score in line.items() if row >= 0} for line in found] == expected
        assert (top.scores.diff(dim=1) <= 0).all() or distinct < 50
        held = script.held_documents(table_of(ids), [top])["row"].to_pylist()
        assert held == sorted(set(top.rows[top.rows >= 0].tolist()))


def test_equal_vectors_have_equal_scores_at_any_position():
    """BLAS may round the last columns of a product differently."""
    generator = torch.Generator().manual_seed(0)
    for size in range(1, 70):
        top = script.TopK(torch.randn(3, 384, generator=generator), size)
        vectors = torch.randn(1, 384, generator=generator).repeat(size, 1)
        top.add(vectors, 0, np.arange(size), table_of([*map(str, range(size))]))
        assert (top.rows == torch.arange(size)).all() and (top.scores == top.scores[:, :1]).all(), size


def test_a_document_in_passages_is_one_document(evaluate, bert, tmp_path):
    """Of 120 rows of one id and one of another, a ranking of 100 documents has both, for every kind of ranking; each
    has the same warnings."""
    passages = [{"_id": "A", "text": f"red fish number {number}"} for number in range(120)]
    write_jsonl(tmp_path / "c.jsonl", [*passages, {"_id": "B", "text": "a blue fish and a green river"}])
    write_jsonl(tmp_path / "q.jsonl", [{"_id": "q", "text": "red fish"}])
    (tmp_path / "qrels.tsv").write_text("q\tB\t1\nq\tC\t1\nr\tB\t1\nr\tA\t1\n")
    flags = ["--corpus", tmp_path / "c.jsonl", "--queries", tmp_path / "q.jsonl", "--qrels", tmp_path / "qrels.tsv"]
    for ranking in evaluate(*flags, "--metrics", "R@100", "--top_k", 100, "--bm25")["models"]:
        assert set(read_run(tmp_path / "out" / ranking["folder"] / "run.trec")["q"]) == {"A", "B"}
    (entry,) = json.loads((tmp_path / "out/metrics.json").read_text())["collections"]
    lacking = ["1 judged queries have no text; left out", "1 found ids stand for several texts; the best score counts"]
    assert entry["warnings"] == [*lacking, "1 judged documents are not in the corpus; they count as not found"]


@pytest.mark.slow
def test_fewer_queries_than_processes(tmp_path, beir, bert):
    flags = ["--beir", beir, "--model_name_or_path", bert, "--cache_dir", tmp_path / "cache", "--query", "a file"]
    results = []
    for processes in (1, 3):
        shown = launch(ROOT / "eval_incremental.py", *flags, processes=processes).stdout
        results.append(re.findall(r"^ +[0-9.-]+ +d\d+  .*$", shown, re.M))
    assert results[0] == results[1] and len(results[0]) == 10


@pytest.mark.slow
def test_many_queries_have_the_normal_approximation(monkeypatch):
    """It is that of the draws, of one and of two collections."""
    rng = np.random.default_rng(0)
    for sizes in ([900], [900, 300]):
        samples = [rng.random(size) ** 2 for size in sizes]
        others = [values + 0.02 * (rng.random(len(values)) - 0.45) for values in samples]
        found = []
        for many in (20_000, 100):
            monkeypatch.setattr(script, "NORMAL_ABOVE", many)
            interval = script.bootstrap_interval(samples)
            found.append([*interval, script.paired_randomization_p(samples, others)])
        width = found[0][1] - found[0][0]
        assert found[1] != found[0] and np.abs(np.subtract(*found))[:2].max() < 0.05 * width
        assert found[1][2] == pytest.approx(found[0][2], abs=0.02) and 0.0001 < found[0][2] < 0.9


def test_measures_of_groups_of_queries(evaluate, beir, tmp_path, monkeypatch):
    """Queries are measured a few at a time, and have the values of all together; some have no ranking."""
    (tmp_path / "x.trec").write_text("".join(f"q{i} Q0 d{i + i % 3} 1 1.0 x\n" for i in range(0, 59, 7)))
    found = []
    for together in (2000, 4):
        monkeypatch.setattr(script, "QUERIES_TOGETHER", together)
        evaluate("--beir", beir, "--run", tmp_path / "x.trec")
        found.append((tmp_path / "out/per_query.csv").read_text())
    assert found[0] == found[1] and found[0].count("\n") == 61


def test_bootstrap_interval_and_randomization_test():
    rng = np.random.default_rng(0)
    values = rng.random(200)
    low, high = script.bootstrap_interval([values])
    half = 1.96 * values.std(ddof=1) / 200**0.5
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.005)
    p = script.paired_randomization_p
    assert p([values], [values]) == 1.0 and p([values + 0.05 * rng.random(200)], [values]) < 0.001
    few = np.array([0.0, 0.5, 1.0, 0.2])  # 2 of the 16 sign flips are as extreme, counted by hand
    assert p([few + 0.1], [few]) == pytest.approx(2 / 16)
    # Several collections count equally, whatever their numbers of queries.
    others = rng.random(50) / 2
    low, high = script.bootstrap_interval([values, others])
    half = 1.96 * (values.var(ddof=1) / 200 + others.var(ddof=1) / 50) ** 0.5 / 2
    mean = (values.mean() + others.mean()) / 2
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.005)
    assert p([few + 0.1, few], [few, few]) == pytest.approx(2 / 16)
    assert script.bootstrap_interval([np.ones(1)]) == (1.0, 1.0)


# -------------------------------------------------------------------------------------------------- incremental


def test_each_text_is_encoded_once(evaluate, beir, tmp_path, rows):
    """Scores and measures of a changed corpus are those of encoding everything, to 1e-6."""

    def run(folder, *flags, **more):
        return evaluate("--beir", folder, "--cache_dtype", "float32", *flags, **more)

    first = run(beir)
    assert first["texts"]["encoded"] == first["texts"]["total"] == 353
    again = run(beir, output="again")
    assert again["texts"]["encoded"] == 0 and again["metrics"] == first["metrics"]
    assert (tmp_path / "out/run.trec").read_bytes() == (tmp_path / "again/run.trec").read_bytes()
    streamed = run(beir, "--streaming", output="streamed")
    assert streamed["texts"]["encoded"] == 0 and streamed["metrics"] == first["metrics"]

    changed = shutil.copytree(beir, tmp_path / "changed")
    records = [json.loads(line) for line in (beir / "corpus.jsonl").read_text().splitlines()]
    for i in random.Random(0).sample(range(293), 52):
        records[i]["text"] += "  # changed"
    write_jsonl(changed / "corpus.jsonl", records)
    assert run(changed)["texts"]["encoded"] == 52
    records += [{"_id": f"new{i}", "text": f"def new_{i}(): return {i}"} for i in range(100)]
    write_jsonl(changed / "corpus.jsonl", records)
    assert run(changed)["texts"]["encoded"] == 100
    random.Random(1).shuffle(records)
    del records[::7]
    front = [{"_id": f"front{i}", "text": f"one more, number {i}"} for i in range(10)]
    write_jsonl(changed / "corpus.jsonl", [*front, *records])
    cached, fresh = run(changed), run(changed, "--cache_dir", tmp_path / "empty", output="fresh")
    assert (cached["texts"]["encoded"], fresh["texts"]["cached"]) == (10, 0)
    for name, values in fresh["metrics"].items():
        assert cached["metrics"][name]["mean"] == pytest.approx(values["mean"], abs=1e-6), name
    expected = read_run(tmp_path / "fresh/run.trec")
    for query, found in read_run(tmp_path / "out/run.trec").items():
        both = found.keys() & expected[query].keys()
        assert len(both) >= 99  # the last may differ in a tie
        assert [found[d] for d in both] == pytest.approx([expected[query][d] for d in both], abs=1e-6)
    # another corpus that shares 40 texts, each of which occurs twice
    shared = [{"_id": f"s{i}", "text": rows[i % 40]["code"]} for i in range(80)]
    write_jsonl(changed / "corpus.jsonl", [*shared, {"_id": "d0", "text": "unseen"}])
    assert run(changed, "--corpus_chunk_size", 7)["texts"]["encoded"] == 1


@pytest.mark.parametrize("dtype, tolerance", [("float32", 0), ("float16", 5e-4), ("int8", 5e-3)])
def test_cache_round_trip(tmp_path, dtype, tolerance):
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((300, 24)).astype(np.float32)
    vectors[7] = 0
    hashes, others = np.frombuffer(generator.bytes(16 * 600), "V16").reshape(2, 300)
    cache = script.EmbeddingCache(tmp_path / "c", 24, dtype)
    packed = cache.pack(vectors)
    for first, last in ((0, 100), (100, 101), (101, 300)):
        cache.store(hashes[first:last], packed[first:last])
    for order in (np.arange(300)[::-1], generator.permutation(300), np.arange(50, 250), np.r_[0:5, 3:9, 0:5]):
        rows, found = script.EmbeddingCache(tmp_path / "c", 24, dtype).lookup(hashes[order])
        assert found.all() and np.array_equal(rows, packed[order])
        assert np.abs(cache.unpack(rows).astype(np.float32) - vectors[order]).max() <= tolerance * 4
    unknown = np.arange(300) % 3 == 1
    requested = np.where(unknown, others, hashes)
    rows, found = cache.lookup(requested)
    assert np.array_equal(found, ~unknown) and np.array_equal(rows[found], packed[~unknown])


def test_a_full_cache_keeps_the_newest_texts(tmp_path):
    """Files, database and index keep within the limit."""

    def fill(count, limit):
        """Store `count` blocks of 100 texts, and return how many there are, of which each text must be found."""
        cache = script.EmbeddingCache(tmp_path / "c", 8, "float32", limit)
        stored = np.frombuffer(generator.bytes(16 * 100 * count), "V16").reshape(count, 100)
        for hashes in stored:
            cache.store(hashes, rows)
        held = len(cache.cache)
        assert all(cache.lookup(hashes[::-1])[1].all() for hashes in stored[-held:])
        cache.close()
        files = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
        blocks = len(list(tmp_path.rglob("*.val")))
        assert limit == 0 or (blocks == held and sum(files) <= limit * 1e9)
        return held

    generator = np.random.default_rng(0)
    rows = generator.integers(0, 255, (100, 32), np.uint8)
    assert 40 < fill(150, limit=0.0004) < 80
    fill(400, limit=0)
    assert list((tmp_path / "c/index").glob("*.npy"))
    assert 40 < fill(50, limit=0.0004) < 80


def test_a_cache_is_set_up_by_one_process_at_a_time(tmp_path):
    """SQLite's locks fail on some network disks."""
    folder = tmp_path / "c"
    script.EmbeddingCache(folder, 8, "float32").cache.close()
    with ThreadPoolExecutor(1) as pool, FileLock(folder / "open.lock"):
        second = pool.submit(script.EmbeddingCache, folder, 8, "float32")
        assert wait([second], timeout=0.2).not_done
    assert (second.result().folder / "cache.db").exists()


@pytest.mark.parametrize("extra", mark_slow([[], ["--streaming", "--corpus_chunk_size", 3]], [[]]))
def test_pairs_and_a_collection_of_them_give_the_same_numbers(evaluate, rows, tmp_path, extra):
    """Whether the pairs are read as they are or as a BEIR folder, and whatever the cache stores by default."""
    pairs = [{"q": row["docstring"], "d": row["code"]} for row in rows[:90]]
    pairs += [{"q": f"{row['q']} again", "d": row["d"]} for row in pairs[:40]]  # 130 pairs of 90 documents
    pairs += [{"q": pairs[0]["q"], "d": pairs[7]["d"]}, {"q": None, "d": "x"}, {"q": "y", "d": " "}]
    write_jsonl(tmp_path / "pairs.jsonl", pairs)
    queries, documents = (list(dict.fromkeys(pair[name].strip() for pair in pairs[:131])) for name in "qd")
    named = zip("qd", (queries, documents))
    queries, documents = ({text: f"{name}{n}" for n, text in enumerate(texts)} for name, texts in named)
    judged = [(queries[pair["q"].strip()], documents[pair["d"].strip()], 1) for pair in pairs[:131]]
    by_id = [{name: text for text, name in texts.items()} for texts in (documents, queries)]
    write_beir(tmp_path / "beir", *by_id, judged, "train")
    found = []
    for dtype in ([], ["--cache_dtype", "float32"]):
        found.append(evaluate("--pairs", tmp_path / "pairs.jsonl", "--columns", "q", "d", *extra, *dtype))
        found.append(evaluate("--beir", tmp_path / "beir", "--split", "train", *extra, *dtype))
    assert found[0]["metrics"] == found[1]["metrics"] == found[2]["metrics"] == found[3]["metrics"]
    distinct = len({pair["d"] for pair in pairs[:90]}) + len({pair["q"] for pair in pairs[:130]})
    assert all(result["texts"]["total"] == distinct for result in found)


def test_a_search_of_pairs_has_each_answer_once(evaluate, tmp_path, capsys):
    texts = ["the same", "the same", "", "other", "a third"]
    write_jsonl(tmp_path / "pairs.jsonl", [{"q": f"question {n}", "d": text} for n, text in enumerate(texts)])
    evaluate("--pairs", tmp_path / "pairs.jsonl", "--columns", "q", "d", "--query", "the same")
    hits = re.findall(r"^ +[0-9.-]+ +([0-9a-f]{16})  (.*)$", capsys.readouterr().out, re.M)
    assert sorted(text for _, text in hits) == ["a third", "other", "the same"]
    assert all(name == script.text_id(text) for name, text in hits)


def test_a_search_of_pairs_shows_other_cells(tmp_path, static):
    """Of the first row of an answer, in place of its id; and caches are in XDG_CACHE_HOME."""
    rows = [
        {"q": f"question {n}", "d": text, "page": f"p{n}", "n": n} for n, text in enumerate(["one", "two", "one", ""])
    ]
    write_jsonl(tmp_path / "a.jsonl", rows[:2])
    write_jsonl(tmp_path / "b.jsonl", rows[2:])
    flags = [
        "--pairs",
        tmp_path / "a.jsonl",
        tmp_path / "b.jsonl",
        "--model_name_or_path",
        static,
        "--columns",
        "q",
        "d",
    ]
    done = launch(
        SCRIPT,
        *flags,
        "page",
        "n",
        "q",
        "--query",
        "two",
        cwd=tmp_path,
        environment={"XDG_CACHE_HOME": f"{tmp_path}/xdg"},
    )
    hits = re.findall(r"^ +[0-9.-]+ +(p.*)$", done.stdout, re.M)
    assert hits == ["p1  1  question 1  two", "p0  0  question 0  one"]
    assert len(list((tmp_path / "xdg/evenstep/embeddings").glob("*/cache.db"))) == 1
    for more in (["--columns", "q", "d", "page"], ["--columns", "q", "--query", "x"]):
        with pytest.raises(SystemExit):
            script.parse_args([*map(str, [*flags[:5], *more])])


def test_search(evaluate, beir, capsys, rows):
    evaluate("--beir", beir, "--query", rows[3]["code"], "something else")
    shown = capsys.readouterr().out
    hits = re.findall(r"^ +[0-9.-]+ +d\d+  .*$", shown, re.M)
    assert len(hits) == 20 and hits[0].split()[:2] == ["1.000", "d3"]
    evaluate("--beir", beir, "--query", "something else")
    assert capsys.readouterr().out.partition("\n")[2] in shown  # below what was encoded


def test_a_hit_of_a_repeated_id_has_the_text_that_was_found(evaluate, tmp_path, capsys):
    texts = [("a", "zeta"), ("b", "passage"), ("a", "passage :")]
    write_jsonl(tmp_path / "corpus.jsonl", [{"_id": name, "text": text} for name, text in texts])
    for query in ("zeta", "passage :"):
        evaluate("--corpus", tmp_path / "corpus.jsonl", "--query", query)
        assert re.search(rf"^ +1.000 +a  {query}$", capsys.readouterr().out, re.M)


@pytest.mark.slow
def test_results_have_a_folder_of_their_own(beir, bert, static, tmp_path, monkeypatch, capsys):
    """A call with other flags is not refused, the same call finds its folder again, and all print it."""
    monkeypatch.chdir(tmp_path)
    common = ["--beir", str(beir), "--cache_dir", "cache", "--model_name_or_path"]
    folders = []
    for more in ([], ["--max_length", "9"], [], [str(static), "--bm25"]):
        script.main(script.parse_args([*common, str(bert), *more]))
        (folder,) = re.findall(r" are in (runs/eval/\S+)\n", capsys.readouterr().out)
        assert re.fullmatch(rf"runs/eval/{beir.name}_{bert.name}_[0-9a-f]{{6}}", folder)
        assert (tmp_path / folder / "metrics.json").exists()
        folders.append(folder)
    assert folders[0] == folders[2] and len(set(folders)) == len(list((tmp_path / "runs/eval").iterdir())) == 3


# ---------------------------------------------------------------------------------------- several processes, kills


def flags_for(beir, bert, folder):
    """Return the flags of an evaluation with all of its files in `folder`."""
    return ["--model_name_or_path", bert, "--beir", beir, "--cache_dir", folder / "cache", "--corpus_chunk_size", 40,
            "--output_dir", folder / "out", "--micro_batch_tokens", 256, "--cache_dtype", "float16"]  # fmt: skip


@pytest.mark.slow
def test_two_processes_give_the_bytes_of_one(tmp_path, beir, bert):
    for processes in (1, 2):
        place = tmp_path / str(processes)
        launch(SCRIPT, *flags_for(beir, bert, place), processes=processes)
        record = json.loads((place / "out/metrics.json").read_text())
        (result,) = record["results"]
        assert result["texts"] == {"total": 353, "encoded": 353, "cached": 0}
        assert record["provenance"]["processes"] == processes
        assert count_cached(place / "cache", 68) == [353]
    for name in ("run.trec", "per_query.csv"):
        assert (tmp_path / "1/out" / name).read_bytes() == (tmp_path / "2/out" / name).read_bytes()
    again = launch(SCRIPT, *flags_for(beir, bert, tmp_path / "1"), processes=2)  # on the cache of one
    assert "0 of 353 texts encoded, of at most 128 tokens" in again.stdout


# Writes a byte to a log for each text encoded, so that the work of killed runs is known.
COUNTING_DRIVER = """
import os, sys, time
sys.path.insert(0, {root!r})
import eval_incremental as script
forward = script.CachedEncoder.forward
def counted(*args):
    vectors = forward(*args)
    with open({log!r}, "ab", buffering=0) as file:
        file.write(b"x" * len(vectors))
    time.sleep({pause})
    return vectors
script.CachedEncoder.forward = counted
script.main(script.parse_args(sys.argv[1:]))
"""


# ---------------------------------------------------------------------------------------------------- bad input


def test_inconsistent_ids_are_reported(evaluate, beir, bert, tmp_path, capsys):
    """Once, for two models."""
    folder = shutil.copytree(beir, tmp_path / "beir")
    other = shutil.copytree(bert, tmp_path / "other")
    more = {
        "corpus.jsonl": '{"_id": "d0", "text": "the same id"}\n{"_id": "e", "text": " "}\n'
        '{"_id": "17", "title": null, "text": "no title"}\n',
        "queries.jsonl": '{"_id": "unjudged", "text": "nobody knows"}\n',
        "qrels/test.tsv": "nobody\td1\t1\nq3\tnowhere\t1\nq4\t17\t1\n",
    }
    for name, lines in more.items():
        (folder / name).write_text((folder / name).read_text() + lines)
    got, _ = evaluate("--beir", folder, "--top_k", 1000, "--model_name_or_path", bert, other)["models"]
    message = capsys.readouterr().err
    for line in ("1 judged documents are not in the corpus", "1 documents are empty"):
        assert message.count(line) == 1, (line, message)
    assert got["queries"] == 60 and got["texts"]["total"] == 60 + 296
    assert len(read_run(tmp_path / "out/st/run.trec")["q0"]) == 295  # an id occurs once


@pytest.mark.slow
def test_reported_length(evaluate, beir, static, bert):
    """A static model reads all of a text."""
    flags = ["--beir", beir, "--model_name_or_path"]
    assert [evaluate(*flags, model)["max_length"] for model in (static, bert)] == [None, 128]
    assert [evaluate(*flags, model, "--max_length", 20)["max_length"] for model in (static, bert)] == [20, 20]


ERRORS = {
    "--beir run/none": "--beir run/none: no such file or folder",  # not a Hub id: the folder `run` exists
    "--corpus run/none --query x": "run/none: ",
    "--beir {beir} --split dev": "--beir {beir}: no judgments of split 'dev'; available: test",
    "--beir {beir} --truncate_dim 64": "--truncate_dim 64: {bert} has 32 dimensions",
    "--beir {beir} --max_length 9999": "has positions for 512 tokens, not for 9999",
    "--beir {beir} --corpus_columns _id body": "{beir}/corpus.jsonl: ",
    "--beir {beir} --model_name_or_path /nowhere": "/nowhere: no such file or folder",
    "--beir {beir} --model_name_or_path minned": "minned: no such file or folder, and not in the cache; the Hub is",
    "--beir {beir} --model_name_or_path {damaged}": "--model_name_or_path {damaged}: ",
    "--beir {beir} --model_name_or_path {reranker}": "{reranker}: is a CrossEncoder, not one of Sentence",
    "--beir {beir} --cache_dir {file}": "--cache_dir {file}",
    "--beir {beir} --output_dir {file}/x": "--output_dir {file}/x: ",
}


@pytest.mark.parametrize("flags", ERRORS)
def test_one_line_errors(evaluate, beir, bert, reranker, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    shutil.copytree(bert, tmp_path / "damaged")
    weights = tmp_path / "damaged/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (tmp_path / "run/model").mkdir(parents=True)
    names = {
        "beir": beir,
        "bert": bert,
        "reranker": reranker,
        **{name: tmp_path / name for name in ("file", "damaged", "run")},
    }
    with pytest.raises(script.UserError) as error:
        evaluate(*flags.format(**names).split())
    assert ERRORS[flags].format(**names) in str(error.value) and "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "file", "run"]  # no empty folder


USAGE = {
    "--beir x --metrics nDGC@10": "--metrics nDGC@10: unknown to ir_measures",
    "--beir x --metrics map@100": "unknown to ir_measures, which has nDCG@10, RR@10 (MRR), AP (MAP)",
    "--beir x --metrics trec_eval": "--metrics trec_eval: unknown to ir_measures",  # a name of the Hub: not loaded
    "--corpus c --queries q --qrels r --export_vectors v --model_name_or_path a b": "--export_vectors",
    "--corpus c --queries q --qrels r --export_vectors v --run r": "--export_vectors",
    "--beir b --fuse rrf --model_name_or_path m": "--fuse requires two rankings",
    "--beir b --fuse rrf --run r": "--fuse requires two rankings",
    "--beir b --rerank_k 0": "--rerank_k 0: must be finite, above 0",
    "--beir b --run r --query q": "--annotate: take none of --run, --bm25, --fuse",
    "--top_k 0": "--top_k 0: must be finite, above 0",
    "--corpus c.jsonl --queries q.jsonl": "--corpus, --queries and --qrels belong together",
    "--corpus c.jsonl --beir b": "--beir, --corpus, --pairs, --annotate: give only one of them",
    "--columns a --pairs p.jsonl": "--pairs requires --columns",
    "flags.yaml": "--query_prompt false: give",
}


@pytest.mark.parametrize("flags", USAGE)
def test_usage(flags, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flags.yaml").write_text("query_prompt: no\nbeir: [x]\nmodel_name_or_path: [y]\n")
    with pytest.raises((SystemExit, script.UserError)) as error:
        script.parse_args(flags.split())
    assert USAGE[flags] in capsys.readouterr().err + str(error.value)


def test_rankings_are_as_deep_as_required():
    def depth_of(flags):
        return script.ranking_depth(script.parse_args(flags))

    flags = ["--beir", "x", "--model_name_or_path", "m", "--top_k", "50"]
    assert depth_of([*flags, "--metrics", "AP@30"]) == 50
    assert depth_of([*flags, "--metrics", "AP"]) == 1000  # as trec_eval ranks
    assert depth_of([*flags, "--rerank_k", "200", "--cross_encoder", "c"]) == 200
    assert depth_of([*flags, "--metrics", "P@10", "--cross_encoder", "c"]) == 100
    assert depth_of([*flags[2:], "--corpus", "c", "--query", "q"]) == 50
    assert depth_of([*flags[2:4], "--corpus", "c", "--query", "q"]) == 10
    assert depth_of(flags[:4]) == 100


def test_malformed_qrels(tmp_path):
    path = tmp_path / "q.tsv"
    for score in ("good", "\u00b2", "", "inf"):
        path.write_text(f"query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t{score}\n")
        with pytest.raises(
            script.UserError, match="--qrels [^ ]*q.tsv: line 3 has no id, or no finite score: q2 . d2"
        ):
            script.read_qrels(str(path))
    path.write_text("q1 0 d1 high\nq2 0 d2 1\n")  # no header
    with pytest.raises(
        script.UserError, match="q.tsv: line 1 has no id, or no finite score: q1 . d1 . high .*, query-id corpus-id"
    ):
        script.read_qrels(str(path))
    path.write_text("q1\td1\t1\nq2\td2\t0.5\n")
    with pytest.raises(script.UserError, match="--qrels [^ ]*q.tsv: a grade is not a whole number"):
        script.read_qrels(str(path))
    path.write_text("q1 0 d1 2\nq1 0 d2 -1\n\n")  # the format of TREC
    assert read_qrels(path) == {"q1": {"d1": 2, "d2": -1}}
    for bad in ("foo://q", tmp_path):
        with pytest.raises(script.UserError, match=f"--qrels {bad}: "):
            script.read_qrels(str(bad))


def test_compressed_rankings(evaluate, beir, tmp_path):
    """By what fsspec reads; zstandard, which pandas requires, is not installed."""
    text = "\ufeffq1 Q0 d1 1 2.0 x\nq1 Q0 d7 2 1.0 x\n"
    with fsspec.open(str(tmp_path / "x.trec.zst"), "wt", compression="infer", encoding="utf-8") as file:
        file.write(text)
    got = evaluate("--beir", beir, "--run", tmp_path / "x.trec.zst", "--metrics", "R@10")
    assert got["metrics"]["R@10"]["mean"] == pytest.approx(1 / 60)


def test_measures_agree_on_ties(evaluate, beir, tmp_path):
    """The providers of ir_measures break ties differently; all must use the order of trec_eval, d5 before d3. Two
    names of one measure are both reported."""
    names = ["RR@10", "MRR@10", "RR", "nDCG@10", "Success@1", "P@1"]
    (tmp_path / "x.run").write_text("q5 Q0 d3 1 1.0 x\nq5 Q0 d5 2 1.0 x\nq5 Q0 d9 3 0.5 x\n")
    got = evaluate("--beir", beir, "--run", tmp_path / "x.run", "--metrics", *names)["metrics"]
    assert {name: cell["mean"] for name, cell in got.items()} == dict.fromkeys(names, pytest.approx(1 / 60))


def test_titles_missing_ids_and_columns(evaluate, beir, tmp_path):
    """Titles are read although the first row has none; a row without an id is refused."""
    folder = shutil.copytree(beir, tmp_path / "beir")
    records = [json.loads(line) for line in (beir / "corpus.jsonl").read_text().splitlines()]
    first = {"_id": "x", "text": "first"}
    write_jsonl(folder / "corpus.jsonl", [first, *({**r, "title": f"about {r['_id']}"} for r in records)])
    assert evaluate("--beir", folder)["texts"]["encoded"] == 293 + 1 + 60
    for bad in ({"_id": None, "text": "y"}, {"text": "y"}, {"_id": "", "text": "y"}):
        write_jsonl(folder / "corpus.jsonl", [first, bad])
        with pytest.raises(script.UserError, match="corpus.jsonl: column '_id': row 1, counted from 0, has no id"):
            evaluate("--beir", folder)
    write_jsonl(folder / "corpus.jsonl", [{"_id": "a", "text": ["not", "text"]}])
    with pytest.raises(script.UserError, match="corpus.jsonl: column 'text' holds list"):
        evaluate("--beir", folder)


def test_an_error_on_two_processes_is_printed_once(tmp_path, bert):
    flags = ["--model_name_or_path", bert, "--beir", tmp_path / "nowhere", "--cache_dir", tmp_path / "c"]
    done = launch(SCRIPT, *flags, processes=2, check=False)
    assert done.returncode and done.stderr.count("error: --beir") == 1 and "[rank1]" not in done.stderr, done.stderr


def test_a_bug_in_edited_code_keeps_its_traceback(evaluate, beir, monkeypatch):
    """An error of the data is one line; a TypeError of a function that reads it is not of the data."""
    monkeypatch.setattr(script, "join_texts", lambda table, columns: table + 1)
    with pytest.raises(TypeError):
        evaluate("--beir", beir)


def test_nan_embedding(evaluate, beir, bert, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(bert, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    next(weights[name] for name in weights if name.endswith("word_embeddings.weight"))[100:] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(script.UserError, match="output for .* is not finite"):
        evaluate("--beir", beir, "--model_name_or_path", broken)
    assert count_cached(tmp_path / "cache") == [0]


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_vectors_whose_products_are_beyond_float32(evaluate, beir, static, tmp_path, similarity):
    """Of a cosine model their lengths are; a hundredth of them is ranked."""
    from sentence_transformers import SentenceTransformer

    for scale, folder in ((1e17, "large"), (1e19, "larger")):
        model = SentenceTransformer(str(static), device="cpu", similarity_fn_name=similarity)
        model[0].embedding.weight.data *= scale
        model.save_pretrained(str(tmp_path / folder))
    evaluate("--beir", beir, "--model_name_or_path", tmp_path / "large")
    assert np.isfinite([*read_run(tmp_path / "out/run.trec")["q1"].values()]).all()
    with pytest.raises(script.UserError, match=f"{tmp_path}/larger: output for .* its dot product with itself is not"):
        evaluate("--beir", beir, "--model_name_or_path", tmp_path / "larger")


def test_damaged_cache_database(evaluate, beir, tmp_path):
    first = evaluate("--beir", beir)
    (folder,) = (tmp_path / "cache").iterdir()
    database = folder / "cache.db"
    assert not list(folder.glob("cache.db-*"))  # the evaluator has closed it
    database.write_bytes(b"not a database" * 1000)
    with pytest.raises(script.UserError, match=f"--cache_dir {folder} .*or remove it"):
        evaluate("--beir", beir)
    shutil.rmtree(folder)
    assert evaluate("--beir", beir)["metrics"] == first["metrics"]


def test_no_pickle_is_loaded(evaluate, beir, tmp_path, report):
    """Each cached value is replaced by a pickle that would create a file, then by a path outside of the cache."""
    import pickle

    class Payload:
        def __reduce__(self):
            return (Path(tmp_path / "executed").touch, ())

    evaluate("--beir", beir)
    (folder,) = (tmp_path / "cache").iterdir()
    with sqlite3.connect(folder / "cache.db") as database:
        database.execute("UPDATE Cache SET mode = 4, value = ?, filename = NULL", (pickle.dumps(Payload()),))
    with pytest.raises(script.UserError, match="a value is a pickle"):
        evaluate("--beir", beir)
    with sqlite3.connect(folder / "cache.db") as database:
        database.execute("UPDATE Cache SET mode = 2, value = NULL, filename = '../../../etc/hostname'")
    with pytest.raises(script.UserError, match="outside of the folder"):
        evaluate("--beir", beir)
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(Payload()))
    assert (tmp_path / "executed").exists()  # loading it would have created the file
    report("pickles, and paths to files outside, in every value of an embedding cache", 2, "one-line error")


@pytest.mark.slow
def test_a_folder_of_the_cache_has_the_name_of_the_model(evaluate, beir, tmp_path, bert):
    """A copy under another name uses it, as it does where the folder was renamed; another type has its own."""
    whole = evaluate("--beir", beir)
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.name == f"{bert.name}-{whole['fingerprint']}"
    copied = shutil.copytree(bert, tmp_path / "my model [v2]")
    assert evaluate("--beir", beir, "--model_name_or_path", copied)["texts"]["encoded"] == 0
    folder.rename(folder.with_name(f"renamed-{whole['fingerprint']}"))
    assert evaluate("--beir", beir)["texts"]["encoded"] == 0
    evaluate("--beir", beir, "--model_name_or_path", copied, "--cache_dtype", "int8")
    first, second = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "cache").iterdir())
    assert (first, second) == ("my_model__v2_", "renamed")


def test_a_limit_of_the_cache(evaluate, beir):
    """50 kB are enough for some of the texts: the oldest are removed, and the metrics stay the same."""
    limited, again = (evaluate("--beir", beir, "--cache_size_limit", 0.00005) for _ in range(2))
    assert again["metrics"] == limited["metrics"] and again["texts"]["encoded"] > 0


@contextmanager
def small_disk(folder, size, how):
    """Mount a disk, which is read-only if `how` says so, or skip the test; unmount it in the end."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount a tmpfs")
    try:
        if how == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_full_or_read_only_disk(evaluate, beir, tmp_path, bert, report, how):
    disk = tmp_path / "cache"
    message = f"--cache_dir {disk}/.* .free disk space, or choose another folder, or remove it.: "
    with small_disk(disk, "300k", how):
        with pytest.raises(script.UserError, match=message):
            evaluate("--beir", beir, "--corpus_chunk_size", 8)
        if how == "full":  # with free space, the next run uses what was stored
            subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
            assert 0 < evaluate("--beir", beir, "--corpus_chunk_size", 8)["texts"]["encoded"] < 353
        report("a full or read-only disk under a cache", 1, "one-line error; the next run uses what was stored")


# ------------------------------------------------------------------------------------------- several collections


@pytest.fixture
def two_collections(beir, tmp_path):
    """Two collections: all of `beir`, and 100 of its documents with 30 queries."""
    small = tmp_path / "small"
    (small / "qrels").mkdir(parents=True)
    for name, count in (("corpus.jsonl", 100), ("queries.jsonl", 30), ("qrels/test.tsv", 31)):
        (small / name).write_text("".join((beir / name).read_text().splitlines(keepends=True)[:count]))
    return [beir, small]


def test_several_collections_and_models(evaluate, two_collections, bert, static, tmp_path, capsys, monkeypatch):
    """Each collection is measured as if alone, and counts equally in the mean; no text is encoded twice."""
    monkeypatch.setenv("COLUMNS", "150")
    other = shutil.copytree(static, tmp_path / "runs/other/model")
    results = evaluate("--beir", *two_collections, "--model_name_or_path", bert, other, "--bm25")["models"]
    shown = capsys.readouterr().out
    names = [(result["collection"], result["name"]) for result in results]
    assert names == [(c.name, n) for c in two_collections for n in ("st", "other", "BM25")]
    assert results[3]["texts"] == {"total": 130, "encoded": 0, "cached": 130}  # cached from the larger collection
    assert re.search(rf"^nDCG@10 +{two_collections[0].name} +small", shown, re.M)
    assert re.search(r"^st +0.*\nother +0.*\n +[-+]0.*\nBM25 +0", shown, re.M)
    assert "p = " in shown
    whole = json.loads((tmp_path / "out/metrics.json").read_text())
    for number, (name, mean) in enumerate(whole["means"].items()):
        parts = [result["metrics"]["AP@100"]["mean"] for result in results if result["name"] == name]
        mean = mean["AP@100"]
        assert mean["mean"] == pytest.approx(np.mean(parts)) and mean["low"] < mean["high"]
        assert ("p" in mean) == (number > 0)
    alone = evaluate("--beir", two_collections[1], "--model_name_or_path", other, output="alone")
    assert alone["metrics"]["AP@100"]["mean"] == results[4]["metrics"]["AP@100"]["mean"]
    for file in ("run.trec", "per_query.csv"):
        assert (tmp_path / "out/small/other" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes()
    rows = (tmp_path / "out/small/queries.jsonl").read_text().splitlines()
    assert len(rows) == results[3]["queries"] and (tmp_path / "out/small/documents.jsonl").exists()


def test_names_of_collections(evaluate, two_collections, tmp_path, capsys, monkeypatch):
    """A path that ends in a slash, or that leads upwards, has the name of its folder; "mean" is that of the mean."""
    for folder, path in zip(two_collections, ("one", "mean")):
        shutil.copytree(folder, tmp_path / f"data/{path}")
    monkeypatch.chdir(tmp_path / "data/one")
    results = evaluate("--beir", "..//one/", "../mean")["models"]
    assert [result["collection"] for result in results] == ["one", "data_mean"]
    assert sorted(path.parent.name for path in (tmp_path / "out").rglob("run.trec")) == ["data_mean", "one"]
    assert re.search(r"^one .*\n^data_mean .*\nmean ", capsys.readouterr().out, re.M)


def test_a_collection_has_flags_of_its_own(evaluate, beir, bert, tmp_path):
    """Its ranking is that of a call with these flags; no document is encoded again."""
    few = "".join((beir / "qrels/test.tsv").read_text().splitlines(keepends=True)[:11])
    (beir / "qrels/few.tsv").write_text(few)
    own = {"path": str(beir), "query_prompt": "find: ", "split": "few"}
    plain, prompted = evaluate("--beir", beir, json.dumps(own))["models"]
    assert (plain["queries"], prompted["queries"]) == (60, 10) and prompted["texts"]["encoded"] == 10
    evaluate("--beir", beir, "--query_prompt", "find: ", "--split", "few", output="alone")
    (tmp_path / "few.yaml").write_text(json.dumps({"beir": [own], "model_name_or_path": [str(bert)]}))
    evaluate(tmp_path / "few.yaml", output="file")
    expected = (tmp_path / "alone/run.trec").read_bytes()
    assert (tmp_path / "file/run.trec").read_bytes() == expected
    assert (tmp_path / "out" / prompted["folder"] / "run.trec").read_bytes() == expected
    evaluate("--beir", beir, "--split", "few", output="plain")
    assert (tmp_path / "plain/run.trec").read_bytes() != expected


@pytest.mark.parametrize("entry", [{"split": "dev"}, {"path": "x", "top_k": "3"}])
def test_flags_that_a_collection_does_not_take(entry, capsys):
    with pytest.raises(SystemExit):
        script.parse_args(["--bm25", "--beir", "y", json.dumps(entry)])
    line = "takes a path and, of its own, split, query_prompt, document_prompt, all texts"
    assert f"--beir {json.dumps(entry)}: {line}" in capsys.readouterr().err


def test_a_search_takes_one_collection(evaluate, two_collections):
    for flags in (["--run", two_collections[0] / "corpus.jsonl"], ["--query", "q"], ["--export_vectors", "v"]):
        with pytest.raises(script.UserError, match=r"--export_vectors: take one collection \(--split\), not 2"):
            evaluate("--beir", *two_collections, *flags)
