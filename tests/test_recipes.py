"""Each page of docs/recipes applies to a copy of its script, runs with its own command, and does what it describes."""

import base64
import copy
import json
import math
import os
import random
import re
import runpy
import shlex
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections import defaultdict
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, islice, pairwise
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator
from conftest import ROOT, launch, metrics, read_run, write_jsonl
from safetensors.torch import load_file
from scipy.stats import spearmanr
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder, util
from sentence_transformers.multi_vector_encoder import losses as multi_vector_losses
from sentence_transformers.multi_vector_encoder import modules
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sparse_encoder import losses as sparse_losses
from test_best_model import lines
from transformers import AutoConfig, AutoTokenizer, BertForMaskedLM

import train_bi_encoder

PAGES = {path.stem: path for path in sorted((ROOT / "docs/recipes").glob("*.md")) if path.stem != "README"}
# Of runs in another layout, for which this is enough: rounding grows with each step, on some processors beyond 1e-4.
TWO_STEPS = ["--max_steps", 2]
APPLY = [words for words in (["git", "apply"], ["patch", "-p1", "-i"]) if shutil.which(words[0])]


@pytest.mark.skipif(not APPLY, reason="needs git or patch")
@pytest.mark.parametrize("name", PAGES)
def test_recipe(name, tmp_path, rows, corpus, bert, beir):
    """SETUPS may add files to the folder; CHECKS has the assertions of each page."""
    text = PAGES[name].read_text()
    title, count = re.match(r"# (.+): (\d+) lines\n", text).groups()
    blocks = dict(re.findall(r"^```(\w+)\n(.+?)^```$", text, re.M | re.S))
    program, command, *flags = shlex.split(blocks["sh"].replace("\\\n", ""))
    assert program == "python"
    script = command if (ROOT / command).exists() else "eval_incremental.py"  # else the page's own file
    shutil.copy(ROOT / script, tmp_path)
    if "diff" in blocks:
        assert re.findall(r"^--- a/(.+)$", blocks["diff"], re.M) == [script]
        lines = re.findall(r"^[+-](?!\+\+ |-- )", blocks["diff"], re.M)
        table, changed = f"`{script}`", tmp_path / script
        subprocess.run([*APPLY[0], PAGES[name]], cwd=tmp_path, check=True)
        (before, rest), (after, same) = (
            path.read_text().split("# ==== the path of a batch") for path in (ROOT / script, changed)
        )
        assert before != after and rest == same
    else:  # a file of its own
        lines = [line for line in blocks["python"].splitlines() if line]
        table, changed = f"a file for `{script}`", tmp_path / re.search(r"Save this as `(.+)`", text)[1]
        changed.write_text(blocks["python"])
    assert len(lines) == int(count)
    assert f"| [{title}]({name}.md) | {table} | {count} |" in PAGES[name].with_name("README.md").read_text()
    for words in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *words, "--config", ROOT / "pyproject.toml"]
        subprocess.run([*ruff, changed], check=True)
    for source, target in ((corpus, "pairs"), (bert, "model"), (beir, "beir")):
        shutil.copytree(source, tmp_path / target)

    def run(*more, **options):
        """Launch the command with `more` flags, which may override its own."""
        return launch(tmp_path / script, *flags, *more, cwd=tmp_path, **options)

    if SETUPS[name]:
        SETUPS[name](tmp_path, rows)
    if command == script:  # else the check runs it
        run()
    CHECKS[name](run, tmp_path, rows)


def logged(output, name="loss"):
    return [line[name] for line in metrics(output) if name in line]


def check_resume(run, folder, step=2, **processes):
    """Remove what was written after the checkpoint of `step`: --resume must give the same metrics and tensors."""
    output = folder / "runs/recipe"
    checkpoints = sorted((output / "checkpoints").iterdir())
    later = [output / "model", *(path for path in checkpoints if path.name > f"step_{step:08}")]
    assert 1 < len(later) <= len(checkpoints)

    def final_state():
        files = (path for folder in later for path in sorted(folder.rglob("*.safetensors")))
        return lines(output), [path.read_bytes() for path in files]

    before = final_state()
    for path in later:
        shutil.rmtree(path)
    run("--resume", **processes)
    assert final_state() == before


def open_data(folder, *sources):
    """Return (Args, Data) of the run, with other sources: full paths, and flags after them."""
    found = yaml.safe_load((folder / "runs/recipe/args.yaml").read_text())
    known = found.keys() & {option.name for option in fields(train_bi_encoder.Args)}
    (folder / "known.yaml").write_text(yaml.safe_dump({name: found[name] for name in known}))
    args = train_bi_encoder.parse_args(list(map(str, [folder / "known.yaml", "--train_data", *sources])))
    return args, train_bi_encoder.open_data(args)


def held_out(folder, source="pairs/*.parquet"):
    """Return [queries, positives] of the held-out rows."""
    _, data = open_data(folder, folder / source)
    ((_, rows),) = data.held_out
    return [[row.query for row in rows], [row.documents[0] for row in rows]]


def batches(folder, *sources):
    """Yield (queries, lists of documents, lists of labels) of each batch; sources: as in open_data."""
    args, data = open_data(folder, *sources)
    for table, _ in train_bi_encoder.row_batches(data.sources, data.weights, args):
        found, _ = train_bi_encoder.read_rows(table, data.sources, data.lookups, 0)
        yield [row.query for row in found], [row.documents for row in found], [row.labels for row in found]


def embed(model, queries, documents):
    """Return embeddings of queries and of the first document of each list."""
    return [model.encode(texts, convert_to_tensor=True) for texts in (queries, [texts[0] for texts in documents])]


def saved_weights(output, step):
    """Return {name: tensor} of a checkpoint, with the names of model/."""
    tensors = load_file(output / f"checkpoints/step_{step:08}/model.safetensors")
    return {name.removeprefix("0.model."): tensor for name, tensor in tensors.items()}


def first_step(run, folder):
    """Return {parameter: its change by the first step, at the full learning rate}."""
    run("--max_steps", 1, "--lr_scheduler_type", "constant", "--output_dir", "runs/first")
    before, after = (load_file(folder / name / "model.safetensors") for name in ("model", "runs/first/model"))
    return {name: after[name] - tensor for name, tensor in before.items()}


# ---- own_loss


def setup_own_loss(folder, rows):
    """Write rows that have texts in common, with zero to two negatives each."""
    docs, codes = ([row[name] for row in rows] for name in ("docstring", "code"))
    columns = [(docs[i % 11], codes[i % 7], codes[i % 5 : i % 5 + i % 3]) for i in range(99)]
    shutil.rmtree(folder / "pairs")
    (folder / "pairs").mkdir()
    table = pa.table([pa.array(column) for column in zip(*columns)], ["docstring", "code", "wrong"])
    pq.write_table(table, folder / "pairs/rows.parquet")


def check_own_loss(run, folder, rows):
    """The loss of the first batch equals a loop over its pairs; three processes, two of which have an
    empty slot, have the losses of one."""
    queries, documents, _ = next(batches(folder, folder / "pairs/*.parquet"))
    texts = list(dict.fromkeys([*queries, *sum(documents, [])]))
    model = SentenceTransformer(str(folder / "model"), device="cpu")
    vectors = dict(zip(texts, model.encode(texts, normalize_embeddings=True)))
    total, positives = 0.0, 0
    for query, (own, *_) in zip(queries, documents):
        for other, candidates in zip(queries, documents):
            for i, text in enumerate(candidates):
                positive = text == own or (other == query and i == 0)
                logit = 20 * float(vectors[query] @ vectors[text]) - 10
                total -= math.log(1 / (1 + math.exp(-logit if positive else logit)))
                positives += positive
    assert len(queries) == 16 and positives > 32
    run("--output_dir", "runs/three", processes=3)
    one, three = logged(folder / "runs/recipe"), logged(folder / "runs/three")
    assert one[0] == pytest.approx(total / len(queries), rel=1e-5)
    assert len(one) == 4 and three == pytest.approx(one, rel=1e-5)


# ---- instructions


def setup_instructions(folder, rows):
    tasks = ["Find the function", "Find code for this"]
    write_jsonl(folder / "tasks.jsonl", [row | {"task": tasks[n % 2]} for n, row in enumerate(rows[:200])])


def check_instructions(run, folder, rows):
    """Rows whose queries contain the instruction already give the same losses to the script as it is."""
    written = []
    for n, row in enumerate(rows[:200]):
        task = ["Find the function", "Find code for this"][n % 2]
        written.append(row | {"docstring": f"Instruct: {task}\nQuery: {row['docstring']}"})
    write_jsonl(folder / "tasks.jsonl", written)
    flags = [folder / "runs/recipe/args.yaml", "--output_dir", "runs/plain"]
    launch(ROOT / "train_bi_encoder.py", *flags, cwd=folder)
    assert logged(folder / "runs/recipe") == logged(folder / "runs/plain") and len(logged(folder / "runs/plain")) == 4


# ---- optimizer


def check_optimizer(run, folder, rows):
    """Linear layers change by matrices with singular values near the learning rate times 0.2 sqrt(longer side), word
    embeddings by AdamW's first step: the learning rate times the sign of the gradient. A resume is bit-identical."""
    first = first_step(run, folder)
    two, four = (saved_weights(folder / "runs/recipe", step) for step in (2, 4))
    linear = [name for name, change in first.items() if ".layer." in name and change.ndim == 2]
    for name in linear:
        for change in (first[name], four[name] - two[name]):  # rates: 1e-3, and 2/3 + 1/3 of that
            values = torch.linalg.svdvals(change) / (1e-3 * 0.2 * math.sqrt(max(change.shape)))
            assert values.max() < 1.3 and values.median() > 0.6, name
    assert len(linear) == 12
    assert first["embeddings.word_embeddings.weight"].abs().max() == pytest.approx(1e-3, rel=1e-2)
    check_resume(run, folder)


# ---- learned_temperature


def check_learned_temperature(run, folder, rows):
    """First loss and gradient norm equal autograd's over the whole batch in one pass; two processes with --grad_cache
    begin alike; a resume is bit-identical; the scale is at most 100."""
    model = SentenceTransformer(str(folder / "model"), device="cpu").eval()
    log_scale = torch.tensor(math.log(1 / 0.07), requires_grad=True)
    queries, documents, _ = next(batches(folder, folder / "pairs/*.parquet"))
    features = map(model.preprocess, (queries, sum(documents, [])))
    anchors, positives = (F.normalize(model(part)["sentence_embedding"], dim=-1) for part in features)
    loss = F.cross_entropy(anchors @ positives.T * log_scale.exp(), torch.arange(len(anchors)))
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in [*model.parameters(), log_scale] if p.grad is not None]).norm()
    assert log_scale.grad.abs() > 0.01 * norm  # the norm depends on it
    one, two, most = (folder / "runs" / name for name in ("recipe", "two", "most"))
    run("--output_dir", two, *TWO_STEPS, "--grad_cache", "true", "--micro_batch_tokens", 300, processes=2)
    for output in (one, two):
        assert logged(output)[0] == pytest.approx(loss.item(), rel=1e-5)
        assert logged(output, "grad_norm")[0] == pytest.approx(norm.item(), rel=1e-5)
    assert logged(two) == pytest.approx(logged(one)[:2], rel=1e-4)
    assert logged(two, "temperature")[0] == pytest.approx(logged(one, "temperature")[0], rel=1e-5)
    assert logged(one, "temperature")[0] == pytest.approx(0.07 * math.exp(0.01 * log_scale.grad.sign()))
    check_resume(run, folder)
    run("--output_dir", most, "--learning_rate", 3, "--max_steps", 1, "--lr_scheduler_type", "constant")
    assert logged(most, "temperature") == pytest.approx([1 / 100])


# ---- layers


def setup_layers(folder, rows):
    """Give the model four layers instead of two."""
    model = SentenceTransformer(str(folder / "model"), device="cpu")
    layers = model[0].model.encoder.layer
    layers.extend([copy.deepcopy(layer) for layer in layers])
    model[0].model.config.num_hidden_layers = 4
    model.save_pretrained(str(folder / "model"), create_model_card=False)


def check_layers(run, folder, rows):
    """Embeddings and the first layer do not change; AdamW's first step changes the others by their learning rates."""
    changes = {}
    for name, change in first_step(run, folder).items():
        number = re.search(r"(embeddings|layer\.\d)", name)
        changes.setdefault(number and number[1], []).append(change.abs().max().item())
    assert list(map(max, changes.values())) == pytest.approx([0, 0, 0.25e-3, 0.5e-3, 1e-3, 0], rel=1e-2)
    assert logged(folder / "runs/recipe", "learning_rate")[0] == 1e-3
    # Adapters have the rates of their layers, and the embeddings have none.
    script = runpy.run_path(str(folder / "train_bi_encoder.py"))
    flags = [folder / "runs/recipe/args.yaml", "--model_name_or_path", folder / "model", "--lora_rank", 4]
    args = script["parse_args"](list(map(str, flags)))
    model = script["load_model"](args)
    rates = {
        id(p): group["peak"] for group in script["make_optimizer"](model, args).param_groups for p in group["params"]
    }
    names = {id(p): name for name, p in model.named_parameters()}
    found = {(re.search(r"layer\.\d|pooler", names[key])[0], rate) for key, rate in rates.items()}
    assert all("lora_" in names[key] for key in rates)
    assert found == {("layer.1", 0.25e-3), ("layer.2", 0.5e-3), ("layer.3", 1e-3), ("pooler", 1e-3)}


# ---- nested


def setup_nested(folder, rows):
    """Write rows in MS MARCO's form, and the same rows with columns of lists; every seventh has no positive."""
    nested, flat = [], []
    for number, row in enumerate(rows[:96]):
        texts = [rows[number + other]["code"] for other in range(4)]
        selected = [number % 7 > 0, number % 2, 0, 0]
        passages = {"is_selected": list(map(int, selected)), "passage_text": texts, "url": ["https://x.org"] * 4}
        nested.append({"query": row["docstring"], "query_type": "description", "passages": passages})
        groups = [[text for text, chosen in zip(texts, selected) if bool(chosen) == kind] for kind in (True, False)]
        flat.append({"query": row["docstring"], "pos": groups[0], "neg": groups[1]})
    write_jsonl(folder / "nested.jsonl", nested)
    write_jsonl(folder / "flat.jsonl", flat)


def check_nested(run, folder, rows):
    """Losses equal those of the unchanged script on columns of lists."""
    losses = logged(folder / "runs/recipe")
    command = yaml.safe_load((folder / "runs/recipe/args.yaml").read_text())
    flags = [word for name in ("batch_size", "num_negatives", "max_steps") for word in (f"--{name}", command[name])]
    flags += ["--eval_rows", 0, "--logging_steps", 1, "--on_bad_row", "skip", "--columns", "query", "pos", "neg"]
    data = ["--model_name_or_path", "model", "--train_data", "flat.jsonl", "--output_dir", "runs/flat"]
    launch(ROOT / "train_bi_encoder.py", *data, *flags, cwd=folder)
    assert losses == logged(folder / "runs/flat") and len(losses) == 6


# ---- margin


def check_margin(run, folder, rows):
    """Its value equals that of a search by sentence-transformers, and it can choose the model."""
    output = folder / "runs/recipe"
    name = "held_out_cosine_margin"
    found = logged(output, name)
    assert len(found) == 3
    texts = held_out(folder)
    model = SentenceTransformer(str(output / "model"), device="cpu")
    scores = util.cos_sim(*(model.encode(part, convert_to_tensor=True) for part in texts))
    best = (scores - 2 * torch.eye(len(scores))).topk(10).values
    found_first = scores.diagonal() > best[:, 9]  # among the first 10
    assert found[-1] == pytest.approx((scores.diagonal() - best[:, 0])[found_first].mean().item(), abs=1e-5)
    assert found[0] != found[-1]
    run("--output_dir", "runs/best", "--metric_for_best_model", name)
    assert (folder / "runs/best/model").exists()


# ---- hub


class Hub(BaseHTTPRequestHandler):
    """A fake Hub that accepts a folder of small files, and refuses request paths that end in `refused`."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Hub.received.append((self.path, body))
        url = "https://huggingface.co/somebody/recipe"
        answer = {"url": url, "commitUrl": f"{url}/commit/1", "commitOid": "1"}
        if "preupload" in self.path:
            files = json.loads(body)["files"]
            answer["files"] = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
        self.send_response(403 if self.path.endswith(Hub.refused) else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


ONLINE = """import os, runpy, huggingface_hub as hub
os.environ["HF_TOKEN"], hub.constants.HF_HUB_OFFLINE = "hf_token", False
hub.constants.ENDPOINT = hub.hf_api.api.endpoint = "http://127.0.0.1:{}"
runpy.run_path("changed.py", run_name="__main__")
"""


def setup_hub(folder, rows):
    """Start the server, and replace the script by one that runs it with the server as the Hub."""
    Hub.received, Hub.refused = [], "nothing"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.rename(folder / "train_bi_encoder.py", folder / "changed.py")
    (folder / "train_bi_encoder.py").write_text(ONLINE.format(server.server_port))


def check_hub(run, folder, rows):
    """model/ is uploaded; --resume repeats a failed upload; without permission, no step is taken."""

    def uploads():
        """Check that the last upload contains the files of model/; return the number of uploads."""
        commits = [body for path, body in Hub.received if path == "/api/models/somebody/recipe/commit/main"]
        sent = [line["value"] for line in map(json.loads, commits[-1].splitlines()) if line["key"] == "file"]
        model = folder / "runs/recipe/model"
        files = {f"{path.relative_to(model)}": path.read_bytes() for path in model.rglob("*") if path.is_file()}
        assert {file["path"]: base64.b64decode(file["content"]) for file in sent} == files
        return len(commits)

    assert uploads() == 1
    for refused, flags in (("/commit/main", ["--resume"]), ("/repos/create", ["--output_dir", "runs/refused"])):
        Hub.refused = refused
        assert "error: --hub_model_id somebody/recipe: " in run(*flags, check=False).stderr
    assert not (folder / "runs/refused/checkpoints").exists()
    Hub.refused = "nothing"
    run("--resume")
    assert uploads() == 3  # the second was refused
    assert all(json.loads(body)["visibility"] == "private" for path, body in Hub.received if "create" in path)


def distinct_code(rows):
    """Return the rows whose code is not that of an earlier row."""
    return list({row["code"]: row for row in rows[::-1]}.values())[::-1]


# ---- sql


def setup_sql(folder, rows):
    with closing(sqlite3.connect(folder / "pairs.sqlite")) as database:
        database.execute("CREATE TABLE pairs (id INTEGER PRIMARY KEY, docstring TEXT, code TEXT)")
        database.executemany("INSERT INTO pairs (docstring, code) VALUES (:docstring, :code)", rows)
        database.commit()


def check_sql(run, folder, rows):
    """The first loss equals that on a file of the same rows; a resume is exact, and refuses a changed database."""
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    model = SentenceTransformer(str(folder / "model"), device="cpu")
    queries, documents, _ = next(batches(folder, folder / "rows.parquet"))
    embeddings = embed(model, queries, documents)
    expected = losses.MultipleNegativesRankingLoss(model).compute_loss_from_embeddings(embeddings, None).item()
    assert logged(folder / "runs/recipe")[0] == pytest.approx(expected, rel=1e-5)
    shutil.rmtree(folder / "runs/recipe")
    stream = partial(run, "--streaming")
    stream(processes=2)
    assert len(set(logged(folder / "runs/recipe"))) == 4
    check_resume(stream, folder, processes=2)
    with closing(sqlite3.connect(folder / "pairs.sqlite")) as database:
        database.execute("UPDATE pairs SET code = upper(code) WHERE id = 300")  # as long as before
        database.commit()
    assert "--resume: pairs.sqlite: " in run("--streaming", "--resume", check=False).stderr


# ---- rankings


def setup_rankings(folder, rows):
    setup_splade(folder, rows)
    setup_colbert(folder, rows)


def check_rankings(run, folder, rows):
    """The run file of either kind has the best documents by the similarity of all pairs, over parts of the corpus; the
    evaluator takes it."""
    text = (folder / "rank.py").read_text()
    (folder / "rank.py").write_text(text.replace("2000", "50"))
    texts = {}
    for name in ("queries", "corpus"):
        lines = (folder / f"beir/{name}.jsonl").read_text().splitlines()
        texts[name] = {row["_id"]: row["text"].strip() for row in map(json.loads, lines)}
    queries, corpus = texts["queries"], texts["corpus"]
    for kind, name in ((SparseEncoder, "mlm"), (MultiVectorEncoder, "colbert")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                sys, "argv", ["rank.py", kind.__name__, *(str(folder / part) for part in (name, "beir", "x.run"))]
            )
            runpy.run_path(str(folder / "rank.py"))
        model = kind(str(folder / name), device="cpu")
        scores = model.similarity(
            model.encode_query(list(queries.values())), model.encode_document(list(corpus.values()))
        )
        found = read_run(folder / "x.run")
        assert list(found) == list(queries)
        for query, row in zip(found, scores):
            by_id = dict(zip(corpus, row.tolist()))
            assert list(found[query].values()) == pytest.approx(sorted(by_id.values(), reverse=True)[:100], rel=1e-4)
            assert all(value == pytest.approx(by_id[document], rel=1e-4) for document, value in found[query].items())
    flags = ["--beir", folder / "beir", "--run", folder / "x.run", "--output_dir", folder / "runs/eval"]
    launch(ROOT / "eval_incremental.py", *flags, cwd=folder)
    assert json.loads((folder / "runs/eval/metrics.json").read_text())["results"][0]["queries"] == 60


# ---- clusters, dev_set, passages


def run_page(name, folder, *words):
    """Run the file of a page in this process, in the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        patch.setenv("HOME", str(folder))  # where the evaluator keeps its cache
        patch.setattr(sys, "argv", [name, *words])
        runpy.run_path(name)


def check_clusters(run, folder, rows):
    """Each row is in one cluster, in which rows are closer to each other than all are; the trainer draws from them."""
    shutil.copy(ROOT / "train_bi_encoder.py", folder)
    run_page("cluster.py", folder, "model", "pairs/*.parquet", "code", "140", "clusters")
    parts = [pq.read_table(path).to_pylist() for path in sorted((folder / "clusters").glob("*.parquet"))]
    texts = [[row["code"] for row in part] for part in parts]
    assert sorted(chain.from_iterable(texts)) == sorted(row["code"] for row in rows) and len(parts) == len(rows) // 140
    model = SentenceTransformer(str(folder / "model"), device="cpu")
    vectors = [model.encode(part, normalize_embeddings=True) for part in texts]
    spread = np.mean([np.var(part, axis=0).sum() for part in vectors])
    assert spread < np.var(np.concatenate(vectors), axis=0).sum()
    flags = ["--model_name_or_path", "model", "--columns", "docstring", "code", "--batch_size", 16, "--eval_rows", 0]
    flags += ["--max_steps", 6, "--logging_steps", 6, "--output_dir", "runs/recipe"]
    launch(folder / "train_bi_encoder.py", "clusters/clusters.yaml", *flags, cwd=folder)
    assert sum(name.startswith("loss_cluster_") for name in metrics(folder / "runs/recipe")[-1]) >= 2


def check_dev_set(run, folder, rows):
    """The collection has all relevant documents, as many others as asked, and the queries; the trainer takes it."""
    run_page("sample_corpus.py", folder, "beir", "test", "100", "dev")
    corpus, queries = (
        [json.loads(line) for line in (folder / f"dev/{name}.jsonl").read_text().splitlines()]
        for name in ("corpus", "queries")
    )
    ids = {row["_id"] for row in corpus}
    assert len(ids) == len(corpus) == 160 and {f"d{number}" for number in range(60)} <= ids
    assert [row["_id"] for row in queries] == [f"q{number}" for number in range(60)]
    flags = ["--model_name_or_path", "model", "--train_data", "pairs/*.parquet", "--columns", "docstring", "code"]
    flags += ["--max_steps", 1, "--eval_rows", 0, "--eval_beir", "dev", "--output_dir", "runs/recipe"]
    shutil.copy(ROOT / "train_bi_encoder.py", folder)
    launch(folder / "train_bi_encoder.py", *flags, cwd=folder)
    assert any("ndcg@10" in name for name in metrics(folder / "runs/recipe")[0])


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_passages(run, folder, rows):
    """Passages overlap and are whole; a document ranks once, by its best passage, and by what stands at its end."""
    run_page("cut_passages.py", folder, "beir", "passages", "20", "5")
    texts = {row["_id"]: row["text"].split() for row in read_lines(folder / "beir/corpus.jsonl")}
    passages = defaultdict(list)
    for row in read_lines(folder / "passages/corpus.jsonl"):
        passages[row["_id"]].append(row["text"].split())
    assert passages.keys() == texts.keys() and max(map(len, passages.values())) > 3
    for document, parts in passages.items():
        assert parts[0] + list(chain.from_iterable(part[5:] for part in parts[1:])) == texts[document]
        assert all(one[-5:] == two[:5] for one, two in pairwise(parts)) and max(map(len, parts)) <= 20
    flags = ["--model_name_or_path", "model", "--max_length", 32, "--beir", "passages", "--top_k", 100]
    launch(folder / "eval_incremental.py", *flags, "--cache_dir", "cache", "--output_dir", "runs/eval", cwd=folder)
    found = [tuple(line.split()[:3:2]) for line in (folder / "runs/eval/run.trec").read_text().splitlines()]
    assert len(found) == len(set(found)) == 60 * 100


# ---- measure


def setup_measure(folder, rows):
    """Write a BEIR folder in which each query has two relevant documents, and one judged irrelevant."""
    folder, rows = folder / "multihop", distinct_code(rows)[:100]
    write_jsonl(folder / "corpus.jsonl", [{"_id": f"d{i}", "text": row["code"]} for i, row in enumerate(rows)])
    write_jsonl(folder / "queries.jsonl", [{"_id": f"q{i}", "text": r["docstring"]} for i, r in enumerate(rows[:40])])
    judged = "".join(f"q{i}\td{i}\t1\nq{i}\td{i + 1}\t2\nq{i}\td{i + 2}\t0\n" for i in range(40))
    (folder / "qrels").mkdir()
    (folder / "qrels/test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")


def check_measure(run, folder, rows):
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


# ---- mteb


def check_mteb(run, folder, rows):
    """A second evaluation encodes nothing; scores and vectors are those of sentence-transformers, with its prompts; a
    changed model in the same folder is encoded anew."""
    mteb = pytest.importorskip("mteb")
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    def read_lines(name):
        records = map(json.loads, (folder / "beir" / name).read_text().splitlines())
        return datasets.Dataset.from_list([{"id": record.pop("_id"), **record} for record in records])

    class Functions(AbsTaskRetrieval):
        metadata = mteb.TaskMetadata(
            name="Functions",
            description="",
            type="Retrieval",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
            dataset={"path": "a/b", "revision": "1"},
        )

        def load_data(self, **options):
            corpus = read_lines("corpus.jsonl").map(lambda row: {"title": "A title of " + row["id"]})
            part = {"corpus": corpus, "queries": read_lines("queries.jsonl"), "top_ranked": None}
            part["relevant_docs"] = {f"q{number}": {f"d{number}": 1} for number in range(60)}
            self.dataset = {"default": {"test": part}}
            self.data_loaded = True

    path = folder / "model"
    scores = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))  # --cache_dir
        patch.setattr(mteb, "get_tasks", lambda tasks: [Functions() for name in tasks])
        patch.setattr(sys, "argv", ["mteb_cached.py", str(path), "Functions"])
        for expected in ((353, 353), (0, 353), (353, 353)):
            own = SentenceTransformer(str(path), device="cpu", prompts={"query": "find: ", "document": ""})
            if expected[0]:  # at first, and again after the second evaluation
                with torch.no_grad():
                    own[0].auto_model.embeddings.word_embeddings.weight.mul_(1 + 4 * len(scores)).add_(1)
                own.save_pretrained(str(path))
            found = runpy.run_path("mteb_cached.py", run_name="__main__")
            model = found["model"]
            meter = found["encoder"].meter
            assert (meter["new"], meter["total"]) == expected
            results = [found["result"], mteb.evaluate(own, Functions(), cache=None)]
            values = [result.task_results[0].scores["test"][0] for result in results]
            for name in ("ndcg_at_10", "map_at_100", "mrr_at_10", "recall_at_100"):
                assert values[0][name] == pytest.approx(values[1][name], abs=1e-6)
            scores.append(values[0]["ndcg_at_10"])
            texts = read_lines("queries.jsonl")["text"][:5]
            for name in ("encode", "encode_query", "encode_document"):
                assert getattr(model, name)(texts) == pytest.approx(getattr(own, name)(texts), abs=1e-6)
    assert scores[0] == scores[1] != scores[2]


# ---- similarity


def check_similarity(run, folder, rows):
    """The first loss equals that of sentence-transformers with Euclidean similarity; the saved model's similarity
    gives the last evaluation, the correlations with labels, and the scores of margin_mse and kl."""
    model = SentenceTransformer(str(folder / "model"), device="cpu")
    queries, documents, _ = next(batches(folder, folder / "pairs/*.parquet"))
    embeddings = embed(model, queries, documents)
    loss = losses.MultipleNegativesRankingLoss(model, scale=1, similarity_fct=util.euclidean_sim)
    expected = loss.compute_loss_from_embeddings(embeddings, None).item()
    assert logged(folder / "runs/recipe")[0] == pytest.approx(expected, rel=1e-5)

    model = SentenceTransformer(str(folder / "runs/recipe/model"), device="cpu")
    texts = held_out(folder)
    queries, documents = embed(model, texts[0], [[text] for text in texts[1]])
    assert model.similarity_fn_name == "euclidean" and queries.norm(dim=1).max() > 1.1
    assert_reciprocal_ranks(folder, model.similarity(queries, documents), "euclidean")

    changed = runpy.run_path(folder / "train_bi_encoder.py")
    similarities = model.similarity_pairwise(queries, documents)
    whole = changed["WholeBatch"](None, torch.zeros(40, 2), torch.tensor([3, 5]), 0)
    scores, _ = changed["row_scores"]([queries, documents, queries], whole, 0.5, 1.0)
    assert torch.allclose(scores, torch.stack([similarities[[3, 5]] / 0.5, torch.zeros(2)], 1), atol=1e-5)
    flags = [folder / "runs/recipe/args.yaml", "--model_name_or_path", folder / "runs/recipe/model"]
    flags += ["--columns", "docstring", "code"]
    args = changed["parse_args"](list(map(str, flags)))
    model, accelerator = changed["load_model"](args), Accelerator(cpu=True)
    args = changed["resolve_args"](args, model, accelerator)
    labelled = [changed["Row"](query, [text], [float(i)]) for i, (query, text) in enumerate(zip(*texts))]
    data = SimpleNamespace(held_out=[(SimpleNamespace(args=args), labelled)])
    evaluators = changed["open_evaluators"](data, model, args)
    found = changed["evaluate"](model, evaluators, accelerator)["held_out_spearman_euclidean"]
    assert found == pytest.approx(spearmanr(similarities, range(40)).statistic, abs=1e-3)


def assert_reciprocal_ranks(folder, scores, similarity="cosine"):
    """Check the last MRR@10 against `scores`, (Q, Q), of held-out rows; nearly equal scores may rank in any order."""
    own = scores.diagonal()[:, None]
    ranks = torch.stack([(scores > own - 1e-5).sum(1), (scores > own + 1e-5).sum(1) + 1]).double()
    low, high = (1 / ranks * (ranks <= 10)).mean(1).tolist()
    found = logged(folder / "runs/recipe", f"held_out_{similarity}_mrr@10")[-1]
    assert low - 1e-6 < found < high + 1e-6 < low + 0.05


# ---- images


def setup_images(folder, rows):
    """Write a CLIP model with random weights and characters as tokens, and single-color images with captions."""
    from PIL import Image
    from tokenizers import pre_tokenizers
    from transformers import CLIPConfig, CLIPModel, CLIPProcessor, CLIPTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    draw = random.Random(0)
    captions = [{"caption": row["docstring"], "image": f"images/{i}.png"} for i, row in enumerate(rows[:100])]
    write_jsonl(folder / "captions.jsonl", captions)
    (folder / "images").mkdir()
    for row in captions:
        Image.new("RGB", (20, 30), tuple(draw.randrange(256) for _ in range(3))).save(folder / row["image"])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    tokenizer = CLIPTokenizer({word: number for number, word in enumerate(words)}, [], model_max_length=32)
    size = {"height": 16, "width": 16}
    CLIPProcessor(CLIPImageProcessorPil(size=size, crop_size=size), tokenizer).save_pretrained(folder / "clip")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": len(words), "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1} | shape
    vision = {"image_size": 16, "patch_size": 8} | shape
    torch.manual_seed(0)
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    CLIPModel(config).save_pretrained(folder / "clip")


def check_images(run, folder, rows):
    """First loss and gradient norm equal those of transformers.CLIPModel; the saved model gives the last evaluation;
    two processes with --grad_cache resume to the same loss and gradient norm."""
    output, model = folder / "runs/recipe", SentenceTransformer(str(folder / "clip"), device="cpu")
    captions, images, _ = next(batches(folder, folder / "captions.jsonl"))
    features = model.preprocess(captions) | model.preprocess([str(folder / image) for (image,) in images])
    inputs = {name: features[name] for name in ("input_ids", "attention_mask", "pixel_values")}
    model[0].model.logit_scale.data.fill_(np.log(20))
    loss = model[0].model(**inputs, return_loss=True).loss
    loss.backward()
    norms = [part.grad.norm() for name, part in model.named_parameters() if not name.endswith("logit_scale")]
    assert logged(output)[0] == pytest.approx(loss.item(), rel=1e-5)
    assert logged(output, "grad_norm")[0] == pytest.approx(torch.stack(norms).norm().item(), rel=1e-5)

    model = SentenceTransformer(str(output / "model"), device="cpu")
    captions, images = held_out(folder, "captions.jsonl")
    images = [[str(folder / image)] for image in images]
    assert_reciprocal_ranks(folder, model.similarity(*embed(model, captions, images)))

    before = metrics(output)[-1]
    shutil.rmtree(output / "checkpoints/step_00000002")
    run("--resume", "--grad_cache", "true", "--micro_batch_tokens", 64, processes=2)
    for name in ("step", "loss", "grad_norm"):
        assert metrics(output)[-1][name] == pytest.approx(before[name], rel=1e-4)


# ---- splade


def setup_splade(folder, rows):
    """Write a masked language model with random weights that are large enough to rank texts."""
    config, tokenizer = (kind.from_pretrained(folder / "model") for kind in (AutoConfig, AutoTokenizer))
    config.initializer_range = 0.1
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(folder / "mlm")
    tokenizer.save_pretrained(folder / "mlm")


def check_splade(run, folder, rows):
    """First loss and gradient norm equal those of SpladeLoss in one pass; two processes with --grad_cache begin
    alike. SparseEncoder gives the last evaluation, a lower loss, and sparser embeddings."""
    queries, documents, _ = next(batches(folder, folder / "pairs/*.parquet"))
    weights = {"document_regularizer_weight": 0.02, "query_regularizer_weight": 0.01}

    def splade(path):
        """Return the model of a folder, the parts of its loss of the first batch, and its number of active entries."""
        model = SparseEncoder(str(path), device="cpu")
        active = model.encode(queries).to_dense().count_nonzero()
        train_bi_encoder.set_dropout(model.train(), 0)
        loss = sparse_losses.SpladeLoss(model, sparse_losses.SparseMultipleNegativesRankingLoss(model), **weights)
        return model, loss([model.preprocess(texts) for texts in (queries, sum(documents, []))]), active

    model, before, active = splade(folder / "mlm")
    loss = sum(before.values())
    assert before["document_regularizer_loss"] > 0.1 * loss
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    output, one, two = (folder / "runs" / name for name in ("recipe", "one", "two"))
    kwargs = {"query_flops": 0.01, "document_flops": 0.02}  # with all their weight at once
    run("--max_steps", 1, "--output_dir", one, "--loss_kwargs", json.dumps(kwargs))
    assert logged(one) == pytest.approx([loss.item()], rel=1e-5)
    assert logged(one, "grad_norm") == pytest.approx([norm.item()], rel=1e-4)

    run("--output_dir", two, *TWO_STEPS, "--grad_cache", "true", "--micro_batch_tokens", 300, processes=2)
    for name in ("loss", "grad_norm"):
        assert logged(two, name) == pytest.approx(logged(output, name)[:2], rel=1e-4)
    trained, parts, active_after = splade(output / "model")
    assert all(parts[name] < 0.8 * value for name, value in before.items()) and active_after < active
    texts = held_out(folder)
    assert_reciprocal_ranks(folder, trained.similarity(*map(trained.encode, texts)) / 100, "dot")  # of scores near 100


# ---- colbert


def setup_colbert(folder, rows):
    torch.manual_seed(0)  # for the projection
    MultiVectorEncoder(str(folder / "model"), device="cpu").save_pretrained(str(folder / "colbert"))


def check_colbert(run, folder, rows):
    """First loss and gradient norm equal those of sentence-transformers in one pass; two processes with --grad_cache
    begin alike. The saved model has a lower loss, and gives the last evaluation and the scores of margin_mse and
    kl. A model that reads queries and documents differently is trained so; one with query expansion is refused."""
    queries, documents, _ = next(batches(folder, folder / "pairs/*.parquet"))

    def colbert(path):
        """Return the model of a folder, and its loss of the first batch."""
        model = MultiVectorEncoder(str(path), device="cpu").eval()
        loss = multi_vector_losses.MultiVectorMultipleNegativesRankingLoss(model)
        return model, loss([model.preprocess(texts) for texts in (queries, sum(documents, []))])

    model, loss = colbert(folder / "colbert")
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    output, two = folder / "runs/recipe", folder / "runs/two"
    assert logged(output)[0] == pytest.approx(loss.item(), rel=1e-5)
    assert logged(output, "grad_norm")[0] == pytest.approx(norm.item(), rel=1e-4)
    run("--output_dir", two, *TWO_STEPS, "--grad_cache", "true", "--micro_batch_tokens", 300, processes=2)
    for name in ("loss", "grad_norm"):
        assert logged(two, name) == pytest.approx(logged(output, name)[:2], rel=1e-4)

    trained, lower = colbert(output / "model")
    assert lower < 0.8 * loss
    texts = held_out(folder)
    embeddings = trained.encode_query(texts[0]), trained.encode_document(texts[1])
    assert_reciprocal_ranks(folder, trained.similarity(*embeddings) / 10, "maxsim")  # of scores near 10
    changed = runpy.run_path(folder / "train_bi_encoder.py")
    opposite = [-query.abs() for query in embeddings[0]], [text.abs() for text in embeddings[1]]  # padding would win
    columns = [torch.nn.utils.rnn.pad_sequence(column, batch_first=True) for column in opposite]
    whole = changed["WholeBatch"](torch.arange(80).view(2, 40), torch.zeros(40, 1), torch.arange(40), 0)
    found = changed["infonce"](columns, whole, temperature=0.5)
    expected = F.cross_entropy(trained.similarity(*opposite) / 0.5, torch.arange(40))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    whole = replace(whole, own_rows=torch.tensor([3, 5]))
    scores, _ = changed["row_scores"](columns, whole, 0.5, 1.0)
    assert torch.allclose(scores[:, 0], trained.similarity_pairwise(*opposite)[[3, 5]] / 0.5, atol=1e-4)
    # Losses of teachers are evaluated by ranking the documents of a row.
    scored = [changed["Row"](texts[0][i], [texts[1][i], texts[1][i - 1]], [1.0, 0.0]) for i in range(40)]
    _, evaluator = changed["held_out_evaluator"]("rows", scored, changed["Args"](loss="kl"), trained)
    scores = trained.similarity(*embeddings)
    first = [scores[i, i] > scores[i, i - 1] for i in range(40)]
    assert evaluator(trained)["rows_mrr@10"] == pytest.approx(np.mean([1 if best else 0.5 for best in first]))
    assert 0 < sum(first) < 40
    # Words that are skipped in documents, and a length of queries, count as in the library.
    model[2] = modules.MultiVectorMask(skiplist_words=["."])
    model[0].query_length = 8
    model.save_pretrained(str(folder / "other"))
    model = MultiVectorEncoder(str(folder / "other"), device="cpu")
    parts = model.encode_query(queries), model.encode_document(sum(documents, []))
    assert max(map(len, parts[0])) == 8 and sum(map(len, parts[1])) < sum(map(len, trained.encode_document(texts[1])))
    expected = F.cross_entropy(model.similarity(*parts), torch.arange(len(queries))).item()
    run("--model_name_or_path", "other", "--output_dir", "runs/other", "--max_steps", 1)
    assert logged(folder / "runs/other") == pytest.approx([expected], rel=1e-5)
    model[0].query_length = None
    model[0].query_expansion = {"strategy": "fixed", "length": 16}
    model.save_pretrained(str(folder / "expanded"))
    failed = run("--model_name_or_path", "expanded", "--output_dir", "runs/expanded", check=False)
    assert "without query expansion" in failed.stderr


# ---- teacher_embeddings


def setup_teacher_embeddings(folder, rows):
    """Write rows with random vectors of the model's 32 dimensions for both texts."""
    vectors = np.random.default_rng(0).normal(size=(len(rows), 2, 32)).tolist()
    rows = [row | {"of_docstring": a, "of_code": b} for row, (a, b) in zip(rows, vectors)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "taught.parquet")


def check_teacher_embeddings(run, folder, rows):
    """First loss and gradient norm equal those of MSELoss in one pass, with a vector for each text and with one for
    both; two processes with --grad_cache begin alike; the loss falls."""
    output, two = folder / "runs/recipe", folder / "runs/two"
    queries, documents, labels = next(batches(folder, folder / "taught.parquet"))
    labels = torch.tensor(labels)  # (16, 2 * 32)

    def mse(path, labels):
        model = SentenceTransformer(str(path), device="cpu").eval()
        loss = losses.MSELoss(model)([model.preprocess(texts) for texts in (queries, sum(documents, []))], labels)
        loss.backward()
        norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
        return loss.item(), torch.stack(norms).norm().item()

    def first(output):
        return logged(output)[0], logged(output, "grad_norm")[0]

    run("--output_dir", two, *TWO_STEPS, "--grad_cache", "true", "--micro_batch_tokens", 300, processes=2)
    assert first(output) == pytest.approx(mse(folder / "model", labels.view(16, 2, 32)), rel=1e-5)
    for name in ("loss", "grad_norm"):
        assert logged(two, name) == pytest.approx(logged(output, name)[:2], rel=1e-4)
    assert mse(output / "model", labels.view(16, 2, 32))[0] < 0.99 * logged(output)[0]
    one = folder / "runs/one"
    run("--output_dir", one, "--label_column", "of_docstring", "--max_steps", 1)
    assert first(one) == pytest.approx(mse(folder / "model", labels[:, :32]), rel=1e-5)


# ---- ema


def check_ema(run, folder, rows):
    """The saved model is the average of the initial and the checkpoints' weights, and gives the last evaluation; a
    resume is bit-identical; with --metric_for_best_model, the saved model is the average at the best step."""
    output, best = folder / "runs/recipe", folder / "runs/best"
    steps = [saved_weights(output, step) for step in range(1, 5)]
    averages = [load_file(folder / "model/model.safetensors")]
    for weights in steps:
        averages.append({name: 0.99 * averages[-1][name] + 0.01 * weights[name] for name in weights})

    def assert_saved(output, average):
        saved = load_file(output / "model/model.safetensors")
        assert all(torch.allclose(saved[name], tensor, atol=1e-6) for name, tensor in average.items())

    assert_saved(output, averages[-1])
    assert max((averages[-1][name] - tensor).abs().max() for name, tensor in steps[-1].items()) > 1e-3
    model = SentenceTransformer(str(output / "model"), device="cpu")
    texts = held_out(folder)
    assert_reciprocal_ranks(folder, model.similarity(*embed(model, texts[0], [[text] for text in texts[1]])))
    name = "held_out_cosine_mrr@10"
    run("--output_dir", best, "--metric_for_best_model", name, "--eval_steps", 1)
    scores = logged(best, name)[1:]
    assert_saved(best, averages[1 + scores.index(max(scores))])
    check_resume(run, folder)


# ---- guide


def setup_guide(folder, rows):
    """Write a guide: the model with a seed of its own, and weights that are large enough to tell texts apart."""
    model = SentenceTransformer(str(folder / "model"), device="cpu")
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(str(folder / "guide"), create_model_card=False)


def check_guide(run, folder, rows):
    """The first loss equals a loop that leaves out what the guide prefers to the positive, also with `symmetric`; two
    processes begin with the same losses."""
    queries, documents, _ = next(batches(folder, folder / "pairs/*.parquet"))
    model, guide = (SentenceTransformer(str(folder / name), device="cpu") for name in ("model", "guide"))
    texts = [text for (text,) in documents]
    scores, others = (util.cos_sim(*embed(encoder, queries, documents)) for encoder in (model, guide))

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

    one, two, both = (folder / "runs" / name for name in ("recipe", "two", "both"))
    forward, backward = expected(scores, others, queries, texts), expected(scores.T, others.T, texts, queries)
    assert logged(one)[0] == pytest.approx(forward, rel=1e-5)
    run("--output_dir", both, "--max_steps", 1, "--loss_kwargs", '{"symmetric": true}')
    assert logged(both) == pytest.approx([(forward + backward) / 2], rel=1e-5)
    run("--output_dir", two, *TWO_STEPS, "--grad_cache", "true", "--micro_batch_tokens", 300, processes=2)
    assert logged(two) == pytest.approx(logged(one)[:2], rel=1e-4)


# ---- queue


def check_queue(run, folder, rows):
    """Losses equal a loop over the batches, whose queue has the positives of earlier steps, embedded by the weights of
    their step; three processes, one with an empty slot, train the same; a resume is bit-identical."""
    output, three = folder / "runs/recipe", folder / "runs/three"
    model = SentenceTransformer(str(folder / "model"), device="cpu")
    queue = []  # (text, embedding)
    steps = islice(batches(folder, folder / "pairs/*.parquet"), 4)
    for step, ((queries, documents, _), loss) in enumerate(zip(steps, logged(output))):
        if step:
            weights = load_file(output / f"checkpoints/step_{step:08}/model.safetensors")
            model.load_state_dict(weights)
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
    run("--output_dir", three, "--grad_cache", "true", "--micro_batch_tokens", 300, processes=3)
    assert logged(three) == pytest.approx(logged(output), rel=1e-4)
    check_resume(run, folder)


# ---- two_encoders


def setup_two_encoders(folder, rows):
    """Write another encoder, with as many dimensions, one layer less, and a prompt of documents."""
    model = SentenceTransformer(
        str(folder / "model"), device="cpu", prompts={"query": "unused: ", "document": "code: "}
    )
    del model[0].model.encoder.layer[1:]
    model[0].model.config.num_hidden_layers = 1
    for parameter in model.parameters():
        parameter.data *= 1.5
    model.save_pretrained(str(folder / "other"), create_model_card=False)


def check_two_encoders(run, folder, rows):
    """First loss and gradient norm equal autograd's in one pass; three processes, of which some have a query and no
    document, begin alike; the saved model gives the last evaluation."""
    queries, documents, _ = next(batches(folder, folder / "pairs/*.parquet"))
    encoders = [SentenceTransformer(str(folder / name), device="cpu").eval() for name in ("model", "other")]
    texts = queries, ["code: " + text for text in sum(documents, [])]
    found = [encoder(encoder.preprocess(part))["sentence_embedding"] for encoder, part in zip(encoders, texts)]
    anchors, positives = (F.normalize(part, dim=1) for part in found)
    loss = F.cross_entropy(anchors @ positives.T / 0.05, torch.arange(len(anchors)))
    loss.backward()
    norms = [p.grad.norm() for encoder in encoders for p in encoder.parameters() if p.grad is not None]
    output, three = folder / "runs/recipe", folder / "runs/three"
    assert logged(output)[0] == pytest.approx(loss.item(), rel=1e-5)
    assert logged(output, "grad_norm")[0] == pytest.approx(torch.stack(norms).norm().item(), rel=1e-4)
    run("--output_dir", three, *TWO_STEPS, "--grad_cache", "true", "--micro_batch_tokens", 300, processes=3)
    for name in ("loss", "grad_norm"):
        assert logged(three, name) == pytest.approx(logged(output, name)[:2], rel=1e-4)
    model = SentenceTransformer(str(output / "model"), device="cpu")
    texts = held_out(folder)
    embeddings = [encode(part, convert_to_tensor=True) for encode, part in
                  zip((model.encode_query, model.encode_document), texts)]  # fmt: skip
    assert_reciprocal_ranks(folder, util.cos_sim(*embeddings))


# ---- attention_pooling


def check_attention_pooling(run, folder, rows):
    """The first step changes the new weights by 100 times the learning rate, others by that; the saved model loads
    and gives the last evaluation."""
    output = folder / "runs/recipe"
    run("--output_dir", "runs/first", "--max_steps", 1, "--lr_scheduler_type", "constant", "--weight_decay", 0)
    first = load_file(folder / "runs/first/checkpoints/step_00000001/model.safetensors")
    before = load_file(folder / "model/model.safetensors")
    words = "embeddings.word_embeddings.weight"
    assert (first[f"0.model.{words}"] - before[words]).abs().max() == pytest.approx(1e-4, rel=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        changed = runpy.run_path(folder / "train_bi_encoder.py")
        args = changed["parse_args"]([str(output / "args.yaml"), "--model_name_or_path", str(folder / "model")])
        new = changed["load_model"](args)[1].linear.weight.detach()
        model = SentenceTransformer(str(output / "model"), device="cpu", trust_remote_code=True)
    assert (first["1.linear.weight"] - new).abs().max() == pytest.approx(1e-2, rel=1e-2)
    texts = held_out(folder)
    assert_reciprocal_ranks(folder, model.similarity(*embed(model, texts[0], [[text] for text in texts[1]])))


# ---- curriculum


def setup_curriculum(folder, rows):
    codes = [row["code"] for row in distinct_code(rows)]
    lists = [{"query": row["docstring"], "pos": [row["code"]], "neg": codes[i : i + 6]}
             for i, row in enumerate(distinct_code(rows)[6:202])]  # fmt: skip
    write_jsonl(folder / "lists.jsonl", lists)


def check_curriculum(run, folder, rows):
    """The losses of the first and of a late batch equal loops with the negatives and temperature of their steps; a
    resume, which prepares rows ahead anew, is bit-identical."""
    output = folder / "runs/recipe"
    changed = runpy.run_path(folder / "train_bi_encoder.py")
    args = changed["parse_args"]([str(output / "args.yaml"), "--train_data", str(folder / "lists.jsonl")])
    data = changed["open_data"](args)
    tables = changed["row_batches"](data.sources, data.weights, args)
    model = SentenceTransformer(str(folder / "model"), device="cpu")
    lists = map(json.loads, (folder / "lists.jsonl").read_text().splitlines())
    negatives = {row["query"]: row["neg"] for row in lists}
    for step, (table, _) in enumerate(islice(tables, 8)):
        if step not in (0, 2, 6):
            continue
        if step:
            model.load_state_dict(load_file(output / f"checkpoints/step_{step:08}/model.safetensors"))
        found, _ = changed["read_rows"](table, data.sources, data.lookups, step)
        easiest = {0: 4, 2: 2, 6: 0}[step]
        assert all(set(row.documents[1:]) <= set(negatives[row.query][easiest:]) for row in found)
        assert all(len(row.documents) == 3 for row in found)
        loss = losses.MultipleNegativesRankingLoss(model, scale=1 / {0: 0.1, 2: 0.075, 6: 0.05}[step])
        columns = zip(*([row.query, *row.documents] for row in found))
        columns = [model.encode(list(column), convert_to_tensor=True) for column in columns]
        documents = [text for row in found for text in row.documents]
        expected = loss.compute_loss_from_embeddings(columns, None).item()
        repeated = len(documents) - len(set(documents))
        assert logged(output)[step] == pytest.approx(expected, rel=0.1 if repeated else 1e-4)
    check_resume(run, folder, step=4)


# ---- flags of the library's losses

FLAGS = re.findall(r"^\|.+\| `(--loss .+)` \|$", (ROOT / "docs/recipes/README.md").read_text(), re.M)


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_of_a_loss(flags, bert):
    """Over two processes, the loss of the flags is that of the library over all rows, which they change."""
    args = train_bi_encoder.parse_args(["--model_name_or_path", "x", "--train_data", "x", *shlex.split(flags)])
    model = SentenceTransformer(str(bert), device="cpu")
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randn(6, 8, generator=generator) for _ in range(3)]  # anchors, positives and a hard negative
    whole = train_bi_encoder.WholeBatch(torch.arange(18).view(3, 6), torch.zeros(6, 1), torch.arange(4), 0)
    parts = [whole, replace(whole, own_rows=torch.arange(4, 6))]
    found = sum(train_bi_encoder.make_loss(args, model)(columns, part) for part in parts)
    kind = getattr(losses, args.loss)
    expected, plain = (
        kind(model, **kwargs).compute_loss_from_embeddings(columns, None) for kwargs in (args.loss_kwargs, {})
    )
    assert found.item() == pytest.approx(expected.item(), rel=1e-6) and abs(expected - plain) > 0.01


SETUPS, CHECKS = ({name: globals().get(f"{kind}_{name}") for name in PAGES} for kind in ("setup", "check"))
