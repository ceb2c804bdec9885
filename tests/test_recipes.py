"""Each page of docs/recipes applies to a copy of its script, runs by its own command, and does what it describes."""

import json
import math
import re
import runpy
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections import defaultdict
from contextlib import closing
from dataclasses import fields, replace
from itertools import chain, islice, pairwise

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import ROOT, launch, metrics, read_jsonl, write_beir
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer, util
from sentence_transformers.sentence_transformer import losses

import train_bi_encoder

PAGES = {path.stem: path for path in sorted((ROOT / "docs/recipes").glob("*.md")) if path.stem != "README"}
TRAINER = "train_bi_encoder.py"
APPLY = [words for words in (["git", "apply"], ["patch", "-p1", "-i"]) if shutil.which(words[0])]


@pytest.mark.skipif(not APPLY, reason="needs git or patch")
@pytest.mark.parametrize("name", PAGES)
def test_recipe(name, tmp_path, rows, corpus, bert, beir):
    """SETUPS may add files to the folder; CHECKS has the assertions of each page."""
    text = PAGES[name].read_text()
    title, count = re.match(r"# (.+): (\d+) lines\n", text).groups()
    blocks = dict(reversed(re.findall(r"^```(\w+)\n(.+?)^```$", text, re.M | re.S)))  # the first of each kind
    program, command, *flags = shlex.split(blocks["sh"].replace("\\\n", ""))
    assert program == "python"
    if "diff" in blocks:
        assert re.findall(r"^--- a/(.+)$", blocks["diff"], re.M) == [command] == [TRAINER]
        lines = re.findall(r"^[+-](?!\+\+ |-- )", blocks["diff"], re.M)
        table, changed = f"`{TRAINER}`", tmp_path / TRAINER
        shutil.copy(ROOT / TRAINER, tmp_path)
        subprocess.run([*APPLY[0], PAGES[name]], cwd=tmp_path, check=True)
        parts = [path.read_text().split("# ==== the path of a batch") for path in (ROOT / TRAINER, changed)]
        assert parts[0][0] != parts[1][0] and parts[0][1] == parts[1][1]
    else:  # a file of its own
        lines = [line for line in blocks["python"].splitlines() if line]
        table, changed = "a file", tmp_path / re.search(r"Save this as `(.+)`", text)[1]
        changed.write_text(blocks["python"])
    assert len(lines) == int(count)
    assert f"| [{title}]({name}.md) | {table} | {count} |" in PAGES[name].with_name("README.md").read_text()
    for words in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *words, "--config", ROOT / "pyproject.toml"]
        subprocess.run([*ruff, changed], check=True)
    for source, target in ((corpus, "pairs"), (bert, "model"), (beir, "beir")):
        shutil.copytree(source, tmp_path / target)
    if SETUPS[name]:
        SETUPS[name](tmp_path, rows)
    if command != changed.name or "diff" in blocks:
        launch(changed if "diff" in blocks else ROOT / command, *flags, cwd=tmp_path)
    elif name != "mteb":  # whose test has tasks of its own
        run_file(command, tmp_path, *flags)
    CHECKS[name](tmp_path, rows)


def run_file(name, folder, *words):
    """Run the file of a page in this process, in the folder; return its globals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))  # where the evaluator keeps its cache
        patch.setattr(sys, "argv", [name, *words])
        return runpy.run_path(name)


def train(folder, *flags):
    """Train on the pairs by the unchanged script; return the output folder."""
    common = ["--model_name_or_path", "model", "--train_data", "pairs/*.parquet", "--columns", "docstring", "code"]
    common += ["--dropout", 0, "--batch_size", 16, "--eval_rows", 0, "--max_steps", 2, "--logging_steps", 1]
    launch(ROOT / TRAINER, *common, "--output_dir", "runs/recipe", *flags, cwd=folder)
    return folder / "runs/recipe"


def logged(folder, name="loss"):
    """Return the values of a metric of the page's run."""
    return [line[name] for line in metrics(folder / "runs/recipe") if name in line]


def open_data(folder, source):
    """Return (Args, Data) of the page's run, with its source by a full path."""
    found = yaml.safe_load((folder / "runs/recipe/args.yaml").read_text())
    known = found.keys() & {option.name for option in fields(train_bi_encoder.Args)}
    (folder / "known.yaml").write_text(yaml.safe_dump({name: found[name] for name in known}))
    args = train_bi_encoder.parse_args([str(folder / "known.yaml"), "--train_data", str(folder / source)])
    return args, train_bi_encoder.open_data(args)


def held_out(folder):
    """Return [queries, positives] of the held-out rows."""
    _, data = open_data(folder, "pairs/*.parquet")
    ((_, rows),) = data.held_out
    return [[row.query for row in rows], [row.documents[0] for row in rows]]


def batches(folder, source="pairs/*.parquet"):
    """Yield (queries, lists of documents, lists of labels) of each batch."""
    args, data = open_data(folder, source)
    for table, _ in train_bi_encoder.row_batches(data.sources, data.weights, args):
        found, _ = train_bi_encoder.read_rows(table, data.sources, data.lookups, 0)
        yield [row.query for row in found], [row.documents for row in found], [row.labels for row in found]


def load(path):
    """Return a SentenceTransformer without dropout."""
    return SentenceTransformer(str(path), device="cpu").eval()


def embed(model, queries, documents):
    """Return embeddings of queries and of the first document of each list."""
    return [model.encode(texts, convert_to_tensor=True) for texts in (queries, [texts[0] for texts in documents])]


def assert_first_step(folder, loss, parameters):
    """Check the first loss, and the gradient norm of the first step against autograd's."""
    loss.backward()
    norms = [parameter.grad.norm() for parameter in parameters if parameter.grad is not None]
    assert logged(folder)[0] == pytest.approx(loss.item(), rel=1e-5)
    assert logged(folder, "grad_norm")[0] == pytest.approx(torch.stack(norms).norm().item(), rel=1e-4)


def assert_reciprocal_ranks(found, scores):
    """Check an MRR@10 against `scores`, (Q, Q), of held-out rows; nearly equal scores may rank in any order."""
    own = scores.diagonal()[:, None]
    ranks = torch.stack([(scores > own - 1e-5).sum(1), (scores > own + 1e-5).sum(1) + 1]).double()
    low, high = (1 / ranks * (ranks <= 10)).mean(1).tolist()
    assert low - 1e-6 < found < high + 1e-6 < low + 0.05


def saved_weights(folder, step):
    """Return {name: tensor} of a checkpoint, with the names of model/; step 0: of the model before training."""
    if step == 0:
        return load_file(folder / "model/model.safetensors")
    tensors = load_file(folder / f"runs/recipe/checkpoints/step_{step:08}/model.safetensors")
    return {name.removeprefix("0.model."): tensor for name, tensor in tensors.items()}


def setup_own_loss(folder, rows):
    """Write rows that have texts in common, with zero to two negatives each."""
    docs, codes = ([row[name] for row in rows] for name in ("docstring", "code"))
    columns = [(docs[i % 11], codes[i % 7], codes[i % 5 : i % 5 + i % 3]) for i in range(99)]
    shutil.rmtree(folder / "pairs")
    (folder / "pairs").mkdir()
    table = pa.table([pa.array(column) for column in zip(*columns)], ["docstring", "code", "wrong"])
    pq.write_table(table, folder / "pairs/rows.parquet")


def check_own_loss(folder, rows):
    """The loss of the first batch equals a loop over its pairs."""
    queries, documents, _ = next(batches(folder))
    texts = list(dict.fromkeys([*queries, *sum(documents, [])]))
    vectors = dict(zip(texts, load(folder / "model").encode(texts, normalize_embeddings=True)))
    total, positives = 0.0, 0
    for query, (own, *_) in zip(queries, documents):
        for other, candidates in zip(queries, documents):
            for i, text in enumerate(candidates):
                positive = text == own or (other == query and i == 0)
                logit = 20 * float(vectors[query] @ vectors[text]) - 10
                total -= math.log(1 / (1 + math.exp(-logit if positive else logit)))
                positives += positive
    assert len(queries) == 16 and positives > 32
    assert logged(folder)[0] == pytest.approx(total / len(queries), rel=1e-5)


def check_learned_temperature(folder, rows):
    """The first step is autograd's over the batch, and changes the scale, which checkpoints have, not the model."""
    model = load(folder / "model")
    log_scale = torch.tensor(math.log(1 / 0.07), requires_grad=True)
    queries, documents, _ = next(batches(folder))
    features = map(model.preprocess, (queries, sum(documents, [])))
    anchors, positives = (F.normalize(model(part)["sentence_embedding"], dim=-1) for part in features)
    loss = F.cross_entropy(anchors @ positives.T * log_scale.exp(), torch.arange(len(anchors)))
    assert_first_step(folder, loss, [*model.parameters(), log_scale])
    assert log_scale.grad.abs() > 0.01 * logged(folder, "grad_norm")[0]  # the norm depends on it
    assert logged(folder, "temperature")[0] == pytest.approx(0.07 * math.exp(0.01 * log_scale.grad.sign()))
    saved = saved_weights(folder, 2)["log_scale"].item()
    assert logged(folder, "temperature")[1] == pytest.approx(math.exp(-saved))
    assert "log_scale" not in load_file(folder / "runs/recipe/model/model.safetensors")


def setup_guide(folder, rows):
    """Write a guide: the model with other weights, which are large enough to tell texts apart."""
    model = load(folder / "model")
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(str(folder / "guide"), create_model_card=False)


def check_guide(folder, rows):
    """The first loss equals a loop that leaves out what the guide prefers to the positive, in both directions."""
    queries, documents, _ = next(batches(folder))
    texts = [text for (text,) in documents]
    scores, others = (util.cos_sim(*embed(load(folder / name), queries, documents)) for name in ("model", "guide"))

    def expected(scores, others, queries, texts):
        total, masked = 0.0, 0
        pairs = set(zip(queries, texts))
        for i, row in enumerate(scores / 0.05):
            left_out = [j != i and (queries[i], text) in pairs for j, text in enumerate(texts)]
            similar = [j != i and bool(others[i, j] > others[i, i]) for j in range(len(texts))]
            masked += sum(similar)
            kept = [j for j in range(len(texts)) if not (left_out[j] or similar[j])]
            total += row[kept].logsumexp(0) - row[i]
        assert 10 < masked < len(texts) ** 2 - 30
        return total.item() / len(texts)

    both = expected(scores, others, queries, texts), expected(scores.T, others.T, texts, queries)
    assert logged(folder)[0] == pytest.approx(np.mean(both), rel=1e-5)


def check_queue(folder, rows):
    """Losses equal a loop whose queue has the positives of earlier steps, embedded by the weights of their step."""
    model = load(folder / "model")
    queue = []  # (text, embedding)
    for step, ((queries, documents, _), loss) in enumerate(zip(islice(batches(folder), 4), logged(folder))):
        if step:
            model[0].model.load_state_dict(saved_weights(folder, step))
        anchors, positives = (F.normalize(vectors, dim=1) for vectors in embed(model, queries, documents))
        texts = [text for (text,) in documents]
        total = 0.0
        candidates = [*zip(texts, positives), *queue]
        for i, anchor in enumerate(anchors):
            known = [text for text, query in zip(texts, queries) if query == queries[i]]
            kept = [vector for text, vector in candidates if text not in known]
            scores = torch.stack([positives[i], *kept]) @ anchor / 0.05
            total += scores.logsumexp(0) - scores[0]
        assert loss == pytest.approx(total.item() / len(queries), rel=1e-4)
        queue = [*queue, *zip(texts, positives)][-32:]
    assert len(queue) == 32 and step == 3
    saved = load_file(folder / "runs/recipe/checkpoints/step_00000004/extra.safetensors")
    assert torch.allclose(saved["queue"], torch.stack([vector for _, vector in queue]), atol=1e-5)


def check_optimizer(folder, rows):
    """Linear layers change by matrices with singular values near the learning rate times 0.2 sqrt(longer side), word
    embeddings by AdamW's first step: the learning rate times the gradient's sign. Checkpoints have both states."""
    before, first, second = (saved_weights(folder, step) for step in range(3))
    linear = [name for name, weight in before.items() if ".layer." in name and weight.ndim == 2]
    for name in linear:
        for change in (first[name] - before[name], second[name] - first[name]):
            values = torch.linalg.svdvals(change) / (2e-3 * 0.2 * math.sqrt(max(change.shape)))
            assert values.max() < 1.3 and values.median() > 0.6, name
    words = "embeddings.word_embeddings.weight"
    assert len(linear) == 12 and (first[words] - before[words]).abs().max() == pytest.approx(2e-3, rel=1e-2)
    states = load_file(folder / "runs/recipe/checkpoints/step_00000002/optimizer.safetensors")
    with_momentum = {name for name in linear if f"0.model.{name}.momentum_buffer" in states}
    assert with_momentum == {*linear} and f"0.model.{words}.exp_avg" in states


def setup_sql(folder, rows):
    with closing(sqlite3.connect(folder / "pairs.sqlite")) as database:
        database.execute("CREATE TABLE pairs (id INTEGER PRIMARY KEY, docstring TEXT, code TEXT)")
        database.executemany("INSERT INTO pairs (docstring, code) VALUES (:docstring, :code)", rows)
        database.commit()


def check_sql(folder, rows):
    """The loss and a stream are those of a file of the same rows; a resume would refuse a changed database."""
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    model = load(folder / "model")
    queries, documents, _ = next(batches(folder, "rows.parquet"))
    embeddings = embed(model, queries, documents)
    expected = losses.MultipleNegativesRankingLoss(model).compute_loss_from_embeddings(embeddings, None).item()
    assert logged(folder)[0] == pytest.approx(expected, rel=1e-5)
    changed = runpy.run_path(folder / TRAINER)
    path = str(folder / "pairs.sqlite")
    stream = changed["open_source"]([path], replace(open_data(folder, "rows.parquet")[0], streaming=True))
    assert next(stream.iter(3)).select(["docstring", "code"]).to_pylist() == rows[:3]
    before = changed["data_fingerprint"](changed["find_files"](path))
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE pairs SET code = upper(code) WHERE id = 300")  # as long as before
        database.commit()
    assert changed["data_fingerprint"]([path]) != before


def setup_teacher_embeddings(folder, rows):
    """Write rows with random vectors of the model's 32 dimensions for both texts."""
    vectors = np.random.default_rng(0).normal(size=(len(rows), 2, 32)).tolist()
    rows = [row | {"of_docstring": a, "of_code": b} for row, (a, b) in zip(rows, vectors)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "taught.parquet")


def check_teacher_embeddings(folder, rows):
    """The first step is that of MSELoss in one pass, with a vector for each text; one vector is that of both texts."""
    queries, documents, labels = next(batches(folder, "taught.parquet"))
    labels = torch.tensor(labels)  # (16, 2 * 32)
    model = load(folder / "model")
    columns = [model.preprocess(texts) for texts in (queries, sum(documents, []))]
    assert_first_step(folder, losses.MSELoss(model)(columns, labels.view(16, 2, 32)), model.parameters())
    changed = runpy.run_path(str(folder / TRAINER))
    args = changed["Args"](loss="MSELoss", label_column=["of_docstring"])
    whole = changed["WholeBatch"](torch.arange(32).view(2, 16), labels[:, :32], torch.arange(16), 0)
    embeddings = embed(model, queries, documents)
    expected = torch.stack([(part - labels[:, :32]).square().mean() for part in embeddings]).mean()
    assert changed["make_loss"](args, model)(embeddings, whole).item() == pytest.approx(expected.item(), rel=1e-5)


def check_ema(folder, rows):
    """The saved model is the average of the weights up to the best step, which gives the evaluation of that step."""
    name = "held_out_cosine_mrr@10"
    scores = logged(folder, name)
    best = 1 + scores[1:].index(max(scores[1:]))
    average = saved_weights(folder, 0)
    for step in range(1, best + 1):
        weights = saved_weights(folder, step)
        average = {name: 0.99 * tensor + 0.01 * weights[name] for name, tensor in average.items()}
    saved = load_file(folder / "runs/recipe/model/model.safetensors")
    assert all(torch.allclose(saved[name], tensor, atol=1e-6) for name, tensor in average.items())
    trained = saved_weights(folder, 3)
    assert max((saved[name] - tensor).abs().max() for name, tensor in trained.items()) > 1e-3
    model = load(folder / "runs/recipe/model")
    assert_reciprocal_ranks(scores[best], util.cos_sim(*(model.encode(texts) for texts in held_out(folder))))


def setup_two_encoders(folder, rows):
    """Write another encoder, with as many dimensions, one layer less, and a prompt of documents."""
    prompts = {"query": "unused: ", "document": "code: "}
    model = SentenceTransformer(str(folder / "model"), device="cpu", prompts=prompts)
    del model[0].model.encoder.layer[1:]
    model[0].model.config.num_hidden_layers = 1
    for parameter in model.parameters():
        parameter.data *= 1.5
    model.save_pretrained(str(folder / "other"), create_model_card=False)


def check_two_encoders(folder, rows):
    """The trainer's first step is autograd's over both encoders; the saved model gives the last evaluation."""
    output = train(folder, "--model_name_or_path", "both", "--eval_rows", 40, "--learning_rate", 1e-3)
    queries, documents, _ = next(batches(folder))
    encoders = [load(folder / name) for name in ("model", "other")]
    texts = queries, ["code: " + text for text in sum(documents, [])]
    found = [encoder(encoder.preprocess(part))["sentence_embedding"] for encoder, part in zip(encoders, texts)]
    anchors, positives = (F.normalize(part, dim=1) for part in found)
    loss = F.cross_entropy(anchors @ positives.T / 0.05, torch.arange(len(anchors)))
    assert_first_step(folder, loss, chain.from_iterable(encoder.parameters() for encoder in encoders))
    model = load(output / "model")
    queries, documents = held_out(folder)
    scores = util.cos_sim(model.encode_query(queries), model.encode_document(documents))
    assert_reciprocal_ranks(logged(folder, "held_out_cosine_mrr@10")[-1], scores)


def check_clusters(folder, rows):
    """Each row is in one cluster, in which rows are closer to each other than all are; the trainer draws from them."""
    parts = [pq.read_table(path).to_pylist() for path in sorted((folder / "clusters").glob("*.parquet"))]
    texts = [[row["code"] for row in part] for part in parts]
    assert sorted(chain.from_iterable(texts)) == sorted(row["code"] for row in rows) and len(parts) == len(rows) // 140
    vectors = [load(folder / "model").encode(part, normalize_embeddings=True) for part in texts]
    spread = np.mean([np.var(part, axis=0).sum() for part in vectors])
    assert spread < 0.9 * np.var(np.concatenate(vectors), axis=0).sum()
    flags = yaml.safe_load((folder / "clusters/clusters.yaml").read_text())
    train(folder, "--train_data", *flags["train_data"], "--mix_by", flags["mix_by"])
    assert any(name.startswith("loss_cluster_") for name in metrics(folder / "runs/recipe")[0])


def check_dev_set(folder, rows):
    """The collection has all relevant documents, as many others as asked, and the queries; the trainer takes it."""
    corpus, queries = (read_jsonl(folder / f"dev/{name}.jsonl") for name in ("corpus", "queries"))
    ids = {row["_id"] for row in corpus}
    assert len(ids) == len(corpus) == 160 and {f"d{number}" for number in range(60)} <= ids
    assert [row["_id"] for row in queries] == [f"q{number}" for number in range(60)]
    _, documents, relevant = train_bi_encoder.read_beir(str(folder / "dev"), "test")
    assert len(documents) == 160 and relevant["q1"] == {"d1", "d7"}
    assert relevant["q2"] == {"d2"}  # d9 is judged irrelevant


def check_passages(folder, rows):
    """Passages overlap and are whole. That a document ranks once: tests/test_eval_incremental.py."""
    texts = {row["_id"]: row["text"].split() for row in read_jsonl(folder / "beir/corpus.jsonl")}
    passages = defaultdict(list)
    for row in read_jsonl(folder / "passages/corpus.jsonl"):
        passages[row["_id"]].append(row["text"].split())
    assert passages.keys() == texts.keys() and max(map(len, passages.values())) > 3
    for document, parts in passages.items():
        assert parts[0] + list(chain.from_iterable(part[20:] for part in parts[1:])) == texts[document]
        assert all(one[-20:] == two[:20] for one, two in pairwise(parts)) and max(map(len, parts)) <= 60


def setup_measure(folder, rows):
    """Write a BEIR folder in which each query has two relevant documents, and one judged irrelevant."""
    rows = list({row["code"]: row for row in rows}.values())[:100]
    documents = {f"d{i}": row["code"] for i, row in enumerate(rows)}
    queries = {f"q{i}": row["docstring"] for i, row in enumerate(rows[:40])}
    judged = [(f"q{i}", f"d{i + more}", grade) for i in range(40) for more, grade in enumerate((1, 2, 0))]
    write_beir(folder / "multihop", documents, queries, judged)


def check_measure(folder, rows):
    """Its values equal those of a loop over the lines of run.trec, and their mean has an interval."""
    output, found = folder / "runs/eval", {f"q{i}": set() for i in range(40)}
    for line in (output / "run.trec").read_text().splitlines():
        query, _, document, rank, _, _ = line.split()
        if int(rank) <= 50:
            found[query].add(document)
    expected = {query: {f"d{i}", f"d{i + 1}"} <= found[query] for i, query in enumerate(found)}
    table = [line.split(",") for line in (output / "per_query.csv").read_text().splitlines()]
    assert table[0] == ["query", "AllFound@50", "Success@50"]
    assert {query: float(value) for query, value, _ in table[1:]} == expected
    value = json.loads((output / "metrics.json").read_text())["results"][0]["metrics"]["AllFound@50"]
    assert value["mean"] == pytest.approx(np.mean(list(expected.values())))
    assert 0 < value["low"] < value["mean"] < value["high"] < 1
    blocks = re.findall(r"^```(\w+)\n(.+?)^```$", PAGES["measure"].read_text(), re.M | re.S)[2:]  # of the other way
    (_, program), (_, command) = blocks
    _, name, *flags = command.split()
    (folder / name).write_text(program)
    run_file(name, folder, *flags, "--output_dir", "runs/function")
    other = json.loads((folder / "runs/function/metrics.json").read_text())["results"][0]["metrics"]["AllFound@50"]
    assert other == value


def check_mteb(folder, rows):
    """Scores and vectors are the library's; a second evaluation encodes nothing, that of a changed model all."""
    mteb = pytest.importorskip("mteb")
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    def read_records(name):
        records = read_jsonl(folder / "beir" / name)
        return datasets.Dataset.from_list([{"id": record.pop("_id"), **record} for record in records])

    class Functions(AbsTaskRetrieval):
        metadata = mteb.TaskMetadata(
            name="Functions", description="", type="Retrieval", category="t2t", modalities=["text"],
            eval_splits=["test"], eval_langs=["eng-Latn"], main_score="ndcg_at_10",
            dataset={"path": "a/b", "revision": "1"},
        )  # fmt: skip

        def load_data(self, **options):
            corpus = read_records("corpus.jsonl").map(lambda row: {"title": "A title of " + row["id"]})
            part = {"corpus": corpus, "queries": read_records("queries.jsonl"), "top_ranked": None}
            part["relevant_docs"] = {f"q{number}": {f"d{number}": 1} for number in range(60)}
            self.dataset = {"default": {"test": part}}
            self.data_loaded = True

    path, scores = folder / "model", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mteb, "get_tasks", lambda tasks: [Functions() for name in tasks])
        for expected in ((353, 353), (0, 353), (353, 353)):
            own = SentenceTransformer(str(path), device="cpu", prompts={"query": "find: ", "document": ""})
            if expected[0]:  # at first, and again after the second evaluation
                with torch.no_grad():
                    own[0].auto_model.embeddings.word_embeddings.weight.mul_(1 + 4 * len(scores)).add_(1)
                own.save_pretrained(str(path))
            found = run_file("mteb_cached.py", folder, str(path), "Functions")
            meter = found["encoder"].meter
            assert (meter["new"], meter["total"]) == expected
            results = [found["result"], mteb.evaluate(own, Functions(), cache=None)]
            values = [result.task_results[0].scores["test"][0] for result in results]
            for name in ("ndcg_at_10", "map_at_100", "mrr_at_10", "recall_at_100"):
                assert values[0][name] == pytest.approx(values[1][name], abs=1e-6)
            scores.append(values[0]["ndcg_at_10"])
            texts = read_records("queries.jsonl")["text"][:5]
            for name in ("encode", "encode_query", "encode_document"):
                assert getattr(found["model"], name)(texts) == pytest.approx(getattr(own, name)(texts), abs=1e-6)
    assert scores[0] == scores[1] != scores[2]


FLAGS = re.findall(r"^\|.+\| `(--loss .+)` \|$", (ROOT / "docs/recipes/README.md").read_text(), re.M)


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_of_a_loss(flags, bert):
    """Over two processes, the loss of the flags is that of the library over all rows, which they change."""
    required = ["--model_name_or_path", "x", "--train_data", "x", "--columns", "a", "b"]
    args = train_bi_encoder.parse_args([*required, *shlex.split(flags)])
    model = SentenceTransformer(str(bert), device="cpu")
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randn(6, 8, generator=generator) for _ in range(3)]  # anchors, positives and a hard negative
    whole = train_bi_encoder.WholeBatch(torch.arange(18).view(3, 6), torch.zeros(6, 1), torch.arange(4), 0)
    parts = [whole, replace(whole, own_rows=torch.arange(4, 6))]
    found = sum(train_bi_encoder.make_loss(args, model)(columns, part) for part in parts)
    kinds = [getattr(losses, args.loss)(model, **kwargs) for kwargs in (args.loss_kwargs, {})]
    expected, plain = (kind.compute_loss_from_embeddings(columns, None) for kind in kinds)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6) and abs(expected - plain) > 0.01


SETUPS, CHECKS = ({name: globals().get(f"{kind}_{name}") for name in PAGES} for kind in ("setup", "check"))
