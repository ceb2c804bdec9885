"""Sparse and multi-vector models in the evaluator: rankings are those of a loop over the library's own encode and
similarity, from the cache as computed, on two processes, after a kill, and in one table with dense models."""

import json
import math
import re
import shutil
import signal

import numpy as np
import pyarrow.parquet as pq
import pytest
import sentence_transformers
import torch
from conftest import ROOT, launch, make_colbert, mark_slow, read_jsonl, read_run, train, write_jsonl
from forked import Forked
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SparseStaticEmbedding
from test_kinds import write_pylate, write_stanford
from transformers import AutoTokenizer, BertConfig, BertModel, ModernBertConfig, ModernBertModel

import eval_incremental as script
import mine_negatives
import report


def sparse(folder, bert, splade, **options):
    model = SparseEncoder(str(splade), device="cpu", **options)
    model.save_pretrained(str(folder), create_model_card=False)
    return folder


def inference_free(folder, bert, splade):
    """Queries are weights of their words."""
    tokenizer = AutoTokenizer.from_pretrained(bert)
    torch.manual_seed(0)
    static = SparseStaticEmbedding(tokenizer=tokenizer, weight=torch.rand(len(tokenizer)) + 0.5)
    router = Router.for_query_document([static], list(SparseEncoder(str(splade), device="cpu")))
    SparseEncoder(modules=[router], device="cpu", similarity_fn_name="dot").save_pretrained(str(folder))
    return folder


def autoencoder(folder, bert, splade, **options):
    transformer, pooling = SentenceTransformer(str(bert), device="cpu")
    torch.manual_seed(0)
    modules = [transformer, pooling, SparseAutoEncoder(input_dim=32, hidden_dim=128, k=8)]
    assert isinstance(pooling, Pooling)
    model = SparseEncoder(modules=modules, device="cpu", **options)
    model.save_pretrained(str(folder), create_model_card=False)
    return folder


def expanded(strategy, **options):
    expansion = {"strategy": strategy, "length": 12, **options}
    return lambda folder, bert, splade: make_colbert(bert, folder, query_expansion=expansion)


def pooled(folder, bert, splade):
    """Half of the vectors of a document, compared by the mean of MaxSim."""
    model = MultiVectorEncoder(str(make_colbert(bert, folder, "meanmaxsim")), device="cpu")
    model.append(HierarchicalTokenPooling(pool_factor=2))
    model.save_pretrained(str(folder))
    return folder


def pylate(folder, bert, splade):
    tokenizer = AutoTokenizer.from_pretrained(bert)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    tokens = {"pad_token_id": 0, "cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3}
    torch.manual_seed(0)
    write_pylate(folder, ModernBertModel(ModernBertConfig(vocab_size=len(tokenizer), **shape, **tokens)), tokenizer)
    return folder


def stanford(folder, bert, splade):
    torch.manual_seed(0)
    write_stanford(folder, BertModel(BertConfig.from_pretrained(bert)), AutoTokenizer.from_pretrained(bert))
    return folder


def given(folder, bert, splade):
    return splade


FORMS = {"sparse": given, "inference-free": inference_free, "tokens": expanded("fixed"), "pylate": pylate}
MORE_FORMS = {
    "max_active_dims": lambda *given: sparse(*given, max_active_dims=20),
    "cosine": lambda *given: sparse(*given, similarity_fn_name="cosine"),
    "autoencoder": autoencoder,
    "autoencoder, more dimensions": lambda *given: autoencoder(*given, max_active_dims=16),
    "not expanded": lambda folder, bert, splade: make_colbert(bert, folder, query_length=8),
    "attended": expanded("fixed", attend=True),
    "at least": expanded("min"),
    "pooled": pooled,
    "stanford": stanford,
}
CASES = mark_slow(MORE_FORMS.items(), FORMS.items())


@pytest.fixture(scope="module")
def collection(tmp_path_factory, beir):
    """Folder of 130 documents, 10 of which have the text of another one, and 20 queries."""
    folder = tmp_path_factory.mktemp("collection")
    documents = read_jsonl(beir / "corpus.jsonl")[:120]
    copies = [{**document, "_id": f"copy {document['_id']}"} for document in documents[::12]]
    write_jsonl(folder / "corpus.jsonl", documents + copies)
    write_jsonl(folder / "queries.jsonl", read_jsonl(beir / "queries.jsonl")[:20])
    (folder / "qrels").mkdir()
    judged = "".join(f"q{i}\td{i}\t1\n" for i in range(20))
    (folder / "qrels/test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    return folder


def read_ranking(path):
    """Return {query: {document: score}} of a run file; ids may contain blanks."""
    found = {}
    for line in path.read_text().splitlines():
        query, _, document, _, score, _ = line.split("\t")
        found.setdefault(query, {})[document] = float(score)
    return found


def library_scores(path, collection):
    """Return {query: {document: score}} by the library's encode and similarity, without those that share nothing."""
    config = json.loads((path / "config_sentence_transformers.json").read_text()) if path.name != "stanford" else {}
    kind = config.get("model_type", "MultiVectorEncoder").replace("ColBERT", "MultiVectorEncoder")
    model = getattr(sentence_transformers, kind)(str(path), device="cpu")
    queries, documents = (read_jsonl(collection / f"{name}.jsonl") for name in ("queries", "corpus"))
    scores = model.similarity(
        model.encode_query([query["text"] for query in queries]),
        model.encode_document([document["text"] for document in documents]),
    )
    return {
        query["_id"]: {row["_id"]: score for row, score in zip(documents, line) if score or kind != "SparseEncoder"}
        for query, line in zip(queries, scores.tolist())
    }


@pytest.mark.parametrize("name, build", CASES)
def test_rankings_are_those_of_the_library(name, build, evaluate, collection, bert, splade, tmp_path):
    """Also in small chunks; equal texts have equal scores; a second call encodes nothing and writes the same bytes."""
    path = build(tmp_path / name, bert, splade)
    flags = ["--model_name_or_path", path, "--beir", collection, "--metrics", "nDCG@10", "--top_k", 50]
    found = evaluate(*flags)
    assert found["texts"] == {"total": 150, "encoded": 140, "cached": 10} and found["bytes"] > 60
    ranked = (tmp_path / "out/run.trec").read_bytes()
    run = read_ranking(tmp_path / "out/run.trec")
    expected = library_scores(path, collection)
    assert len(run) == 20
    for query, lines in run.items():
        best = sorted(expected[query].values(), reverse=True)[:50]
        assert list(lines.values()) == pytest.approx(best, rel=1e-5, abs=1e-5)
        assert list(lines.values()) == pytest.approx([expected[query][key] for key in lines], rel=1e-5, abs=1e-5)
        copies = [(lines[key], lines.get(f"copy {key}")) for key in lines if f"copy {key}" in lines]
        assert all(one == two for one, two in copies)
    assert evaluate(*flags)["texts"] == {"total": 150, "encoded": 0, "cached": 150}
    assert (tmp_path / "out/run.trec").read_bytes() == ranked


@pytest.mark.parametrize("name", mark_slow(["splade", "colbert"], ["colbert"]))
def test_two_processes_streams_and_a_changed_text(name, collection, tmp_path, request):
    """Two processes rank as one does, also from a stream; where one text changes, it alone is encoded."""
    path = request.getfixturevalue(name)
    beir = shutil.copytree(collection, tmp_path / "beir")
    flags = ["--model_name_or_path", path, "--beir", beir, "--corpus_chunk_size", 40, "--output_dir"]
    calls = {"one": [], "two": ["--streaming"]}
    for number, (output, more) in enumerate(calls.items(), start=1):
        more += ["--cache_dir", tmp_path / f"cache {output}"]
        launch(ROOT / "eval_incremental.py", *flags, tmp_path / output, *more, processes=number)
    one, two = (read_ranking(tmp_path / output / "run.trec") for output in calls)
    assert one.keys() == two.keys()
    for query in one:
        assert two[query] == pytest.approx(one[query], rel=1e-5)
    documents = read_jsonl(beir / "corpus.jsonl")
    documents[50]["text"] = "another text"
    write_jsonl(beir / "corpus.jsonl", documents)
    launch(ROOT / "eval_incremental.py", *flags, tmp_path / "changed", *calls["one"])
    result = json.loads((tmp_path / "changed/metrics.json").read_text())["results"][0]
    assert result["texts"] == {"total": 150, "encoded": 1, "cached": 149}


@pytest.mark.parametrize("name", mark_slow(["splade", "colbert"], ["colbert"]))
def test_killed_and_damaged(name, evaluate, collection, tmp_path, request, capsys):
    """A call that is killed leaves what it has encoded; a damaged block is computed again."""
    path = request.getfixturevalue(name)
    flags = ["--model_name_or_path", path, "--beir", collection, "--corpus_chunk_size", 20]
    flags += ["--micro_batch_tokens", 128]
    evaluate(*flags, "--cache_dir", tmp_path / "undisturbed")
    expected = (tmp_path / "out/run.trec").read_bytes()
    again = [*flags, "--cache_dir", tmp_path / "killed", "--output_dir", tmp_path / "killed out"]
    process = Forked(ROOT / "eval_incremental.py", again)
    while len(list((tmp_path / "killed").glob("*/*/*/*.val"))) < 3:
        assert process.poll() is None
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    found = evaluate(*flags, "--cache_dir", tmp_path / "killed")
    assert 0 < found["texts"]["encoded"] < 140
    assert (tmp_path / "out/run.trec").read_bytes() == expected
    block = max((tmp_path / "killed").glob("*/*/*/*.val"), key=lambda file: file.stat().st_size)
    for data in (block.read_bytes()[:-1] + b"x", block.read_bytes()[:-9], b"short"):
        block.write_bytes(data)
        capsys.readouterr()
        assert evaluate(*flags, "--cache_dir", tmp_path / "killed")["texts"]["encoded"] > 0
        assert "a damaged block; its vectors are computed again" in capsys.readouterr().err
        assert (tmp_path / "out/run.trec").read_bytes() == expected
        block = max((tmp_path / "killed").glob("*/*/*/*.val"), key=lambda file: file.stat().st_size)


@pytest.mark.slow
def test_coarse_types_of_tokens(evaluate, collection, colbert, tmp_path):
    sizes = {}
    runs = {}
    for dtype, tolerance in (("float32", 1e-6), ("float16", 1e-3), ("int8", 3e-2)):
        found = evaluate("--model_name_or_path", colbert, "--beir", collection, "--cache_dtype", dtype)
        sizes[dtype] = found["bytes"]
        runs[dtype] = read_ranking(tmp_path / "out/run.trec")
        common = []
        for query, expected in runs["float32"].items():
            found = runs[dtype][query]
            common += [(expected[key], found[key]) for key in found.keys() & expected.keys()]
        assert all(two == pytest.approx(one, rel=tolerance) for one, two in common)
    tokens = sizes["float32"] / (4 * 128)
    assert sizes["int8"] == pytest.approx(tokens * (4 + 128), abs=1)


@pytest.mark.slow
def test_all_kinds_in_one_table(evaluate, collection, bert, splade, colbert, reranker, tmp_path, capsys):
    """Two collections, three kinds of models, BM25, their fusion, reranked; also from the cache."""
    other = shutil.copytree(collection, tmp_path / "other")
    write_jsonl(other / "queries.jsonl", read_jsonl(collection / "queries.jsonl")[::-1][:12])
    documents = [{**row, "text": row["text"][:60]} for row in read_jsonl(collection / "corpus.jsonl")]
    write_jsonl(other / "corpus.jsonl", documents)
    flags = ["--beir", collection, other, "--model_name_or_path", bert, splade, colbert, "--bm25", "--fuse", "rrf"]
    flags += ["--cross_encoder", reranker, "--rerank_k", 3]
    found = evaluate(*flags)["models"]
    printed = capsys.readouterr().out
    sizes = {row["name"]: row["bytes"] for row in found if "bytes" in row}
    assert len(found) == 2 * 2 * 5 and len(set(sizes.values())) == 3
    assert "mean" in printed
    name = colbert.name
    mean = math.ceil(np.mean([row["bytes"] for row in found if row["name"] == name]))
    assert re.search(rf"^{name} +{mean} ", printed, re.M) and mean != sizes[name]
    report.main(report.parse_args([str(tmp_path / "out")]))
    assert f"| {name} | {mean} |" in (tmp_path / "out/table.md").read_text()
    before = [file.read_bytes() for file in sorted((tmp_path / "out").rglob("run.trec"))]
    again = evaluate(*flags)["models"]
    assert [file.read_bytes() for file in sorted((tmp_path / "out").rglob("run.trec"))] == before
    assert sum(row["texts"]["encoded"] for row in again if "texts" in row) == 0


def test_search_and_export(evaluate, collection, splade, colbert, tmp_path, capsys):
    """--query prints documents; --export_vectors writes lists, of which MaxSim and products are the scores."""
    texts = [row["text"] for row in read_jsonl(collection / "corpus.jsonl")]
    for path, kind in ((splade, SparseEncoder), (colbert, MultiVectorEncoder)):
        evaluate("--model_name_or_path", path, "--beir", collection, "--query", "parse a date", "--top_k", 3)
        assert len(re.findall(r"^ +[\d.-]+ +(copy )?d\d+ ", capsys.readouterr().out, re.M)) == 3
        folder = tmp_path / f"vectors {kind.__name__}"
        evaluate("--model_name_or_path", path, "--beir", collection, "--export_vectors", folder)
        table = pq.read_table(folder)
        assert table["_id"].to_pylist() == [row["_id"] for row in read_jsonl(collection / "corpus.jsonl")]
        expected = kind(str(path), device="cpu").encode_document(texts)
        if kind is SparseEncoder:
            found = np.zeros((len(texts), expected.shape[1]), np.float32)
            for row, indices, values in zip(found, table["indices"].to_pylist(), table["values"].to_pylist()):
                row[indices] = values
            assert np.allclose(found, expected.to_dense().numpy(), atol=1e-5)
        else:
            for vectors, tokens in zip(table["vectors"].to_pylist(), expected):
                assert np.allclose(vectors, tokens.numpy(), atol=1e-5)


@pytest.mark.slow
def test_mined_from_tokens(evaluate, rows, colbert, bert, tmp_path):
    """Rows mined from the ranking of a multi-vector model train a dense one."""
    write_jsonl(tmp_path / "rows.jsonl", rows[:60])
    pairs = ["--pairs", tmp_path / "rows.jsonl", "--columns", "docstring", "code"]
    evaluate("--model_name_or_path", colbert, *pairs)
    flags = [*pairs, "--run", tmp_path / "out/run.trec", "--num_negatives", 2, "--output", tmp_path / "mined.jsonl"]
    mine_negatives.main(mine_negatives.parse_args([str(flag) for flag in flags]))
    mined = read_jsonl(tmp_path / "mined.jsonl")
    run = read_run(tmp_path / "out/run.trec")
    assert len(mined) > 50 and run
    columns = ["query", "positive", "negative_1", "negative_2"]
    flags = ["--model_name_or_path", bert, "--train_data", tmp_path / "mined.jsonl", "--columns", *columns]
    train("train_bi_encoder", *flags, "--max_steps", 2, "--output_dir", tmp_path / "run")
    assert (tmp_path / "run/model").is_dir()


@pytest.mark.parametrize("name, flags, message", [
    ("splade", "--truncate_dim 16", "is a SparseEncoder: --truncate_dim and --precision are for models of one vector"),
    ("colbert", "--precision int8", "is a MultiVectorEncoder: --truncate_dim and --precision are for models of one"),
    ("splade", "--cache_dtype int8", "is a SparseEncoder, cached in float32"),
])  # fmt: skip
def test_what_is_refused(name, flags, message, evaluate, collection, request):
    with pytest.raises(script.UserError, match=re.escape(message)):
        evaluate("--model_name_or_path", request.getfixturevalue(name), "--beir", collection, *flags.split())


def test_a_folder_without_modules(evaluate, collection, splade, tmp_path, capsys):
    """It is a dense model for the library, also where it was trained as SPLADE: a line says so."""
    plain = shutil.copytree(splade, tmp_path / "plain", ignore=shutil.ignore_patterns("modules.json", "config_sent*"))
    evaluate("--model_name_or_path", plain, "--beir", collection)
    assert f"{plain} has no modules.json: it is read as a dense model" in capsys.readouterr().out
    evaluate("--model_name_or_path", splade, "--beir", collection)
    assert "no modules.json" not in capsys.readouterr().out
