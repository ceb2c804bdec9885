"""On a simulated GPU, the scripts run, do nothing that CUDA or flash attention refuses, and give the CPU's results."""

import json
import shutil
from itertools import product

import numpy as np
import pandas as pd
import pytest
from conftest import EACH_TRAINER, RATES, TRAINERS, make_colbert, make_splade, mark_slow, start_worker, write_jsonl
from forked import merge_flags
from late_programs import PROGRAMS
from test_decoders import CHAT, make_decoder, make_reranker

PAIRS = "--columns docstring code"
TEACHER = "--columns docstring code wrong --label_column scores"
TEMPERATURE = '--loss_kwargs {"teacher_temperature":0.05}'
LISTS = "--columns docstring code wrong --label_column"
LOSSES = {
    "train_bi_encoder": {
        "infonce": PAIRS,
        "matryoshka": '--columns docstring code wrong --matryoshka_dims 32 8 --loss_kwargs {"symmetric":true}',
        "margin_mse": f"{TEACHER} --loss margin_mse {TEMPERATURE}",
        "kl": f'{TEACHER} --loss kl --loss_kwargs {{"teacher_temperature":0.05,"infonce":1}}',
        "CoSENTLoss": f"{PAIRS} --label_column label --loss CoSENTLoss",
        "sparse": "--columns docstring code wrong --model_name_or_path splade",
        "multi-vector": "--columns docstring code wrong --model_name_or_path colbert",
    },
    "train_cross_encoder": {
        "listwise_ce": f"{PAIRS} --num_negatives 5",
        "bce": f"{PAIRS} --label_column label --loss bce",
        "mse": f"{PAIRS} --label_column label --loss mse",
        "ranknet": f"{LISTS} classes --loss ranknet",
        "lambdaloss": f"{LISTS} classes --loss lambdaloss",
        "margin_mse": f"{LISTS} scores --loss margin_mse {TEMPERATURE}",
        "kl": f"{LISTS} scores --loss kl {TEMPERATURE}",
    },
}
CASES = [(script, loss) for script, losses in LOSSES.items() for loss in losses]
FEW = "--save_steps 0 --eval_rows 0"
LONG = "--max_steps 3 --save_steps 2 --eval_rows 4 --eval_steps 3"
LAST = {"removed": "checkpoints/step_00000003"}
FLASH = {"mixed": "bf16", "flash": True}
FP16 = {"mixed": "fp16", "scale": 2.0**127}
WAITING = f"{FEW} --max_steps 3 --logging_steps 100"
WINDOW = "--model_name_or_path window --eval_rows 0 --save_steps 2"
MOBILE = "--model_name_or_path mobile --max_steps 2 --eval_rows 0 --save_steps 1"
# {name: (flags, options of the job)} for each trainer but those of ONE; "NAME, resumed" resumes NAME.
RUNS = {
    "long, cpu": (LONG, {"device": False}),
    "long": (LONG, {}),
    "long, resumed": (f"{LONG} --resume", LAST),
    "long, resumed in fp16": (f"{LONG} --resume", LAST | {"mixed": "fp16"}),
    "fp16": (LONG, FP16),
    "fp16, resumed": (f"{LONG} --resume", LAST | FP16),
    "flash": (f"{LONG} --attn_implementation flash_attention_2", FLASH),
    "flash in float32": (f"{FEW} --attn_implementation flash_attention_2", {"flash": True}),
    "bf16, 2 processes": (LONG, {"mixed": "bf16", "processes": 2}),
    "grad_cache": (f"{FEW} --grad_cache true", {}),
    "sparse in bf16": (f"{LONG} --model_name_or_path splade", {"mixed": "bf16"}),
    "multi-vector in bf16": (f"{LONG} --model_name_or_path colbert --micro_batch_tokens 300", {"mixed": "bf16"}),
    "dropout": (f"{FEW} --grad_cache true --micro_batch_tokens 200 --dropout 0.5 --lora_rank 2", {"mixed": "bf16"}),
    "waits": (f"{WAITING} --micro_batch_tokens 100000 --attn_implementation sdpa", {"mixed": "bf16"}),
    "waits, concatenated": (f"{WAITING} --micro_batch_tokens 100000", {"mixed": "bf16"}),
    "waits, flash": (f"{WAITING} --attn_implementation flash_attention_2", FLASH),
    "deterministic": (f"{FEW} --full_determinism true", {"mixed": "bf16"}),
    "mobile": (MOBILE, {"mixed": "bf16"}),
    "mobile, padded": (f"{MOBILE} --attn_implementation sdpa", {"mixed": "bf16"}),
    "mobile, resumed": (f"{MOBILE} --resume", {"mixed": "bf16", "removed": "checkpoints/step_00000002"}),
    "window": (f"{WINDOW} --max_length 20 --max_steps 2", {"mixed": "bf16"}),
    "window, resumed": (f"{WINDOW} --max_steps 3 --resume --accept_changes", {"mixed": "bf16"}),
}
# Of the bi-encoder alone: both trainers resume, scale losses, and try a model, by the same functions.
ONE = {"long, resumed", "long, resumed in fp16", "fp16", "fp16, resumed", "mobile, resumed"}
ONE |= {"sparse in bf16", "multi-vector in bf16"}
ONE |= {"window", "window, resumed"}
RAN = [(script, name) for script in TRAINERS for name in RUNS if script == "train_bi_encoder" or name not in ONE]
LIMIT = 6_000_000  # bytes, of which one graph of all texts of a batch takes more
WIDE = "--model_name_or_path wide --batch_size 120 --max_steps 2"
MEMORY_RUNS = {  # {name: (--micro_batch_tokens, bytes, more flags)}
    "memory, measured": (None, LIMIT, ""),
    "memory, 16384 tokens": ("16384", LIMIT, ""),
    "memory, no limit": ("512", 80 * 2**30, ""),
    "memory, measured with a large vocabulary": (None, 68_000_000, WIDE),
    "memory, measured of a frozen encoder": (None, 68_000_000, "--model_name_or_path frozen"),
}
TEMPLATES = {"bert": "templates/bi_encoder", "reranker": "templates/cross_encoder"}
TEMPLATE_RUNS = {"cpu": {"device": False}, "device": {}, "bf16": {"mixed": "bf16", "processes": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, rows, bert, beir):
    """Folder with rows.jsonl (texts, labels and scores), a small collection, and models without dropout: bert/,
    reranker/, flash/, and rerankers of several modules: modular/, chat/."""
    import torch
    import transformers
    from sentence_transformers import CrossEncoder, SparseEncoder
    from sentence_transformers.base.modules import Router
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

    if not shutil.which("g++"):
        pytest.skip("g++ is not installed: it compiles the simulated device")
    if torch.version.cuda:
        pytest.skip("torch's CUDA build has a CUDA device of its own: the simulated one needs the CPU build")
    folder = tmp_path_factory.mktemp("device")
    rows = [{name: text[:100] for name, text in row.items()} for row in rows[:40]]
    write_jsonl(folder / "rows.jsonl", [
        {**row, "wrong": rows[i - 1]["code"], "label": i % 3 / 2, "scores": [i % 5 / 5, -i % 7 / 7], "classes": [1, 0]}
        for i, row in enumerate(rows)
    ])  # fmt: skip
    shutil.copytree(bert, folder / "bert")
    config = json.loads((bert / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "bert/config.json").write_text(json.dumps(config))
    shutil.copytree(folder / "bert", folder / "flash")
    (folder / "flash/config.json").write_text(json.dumps(config | {"attn_implementation": "flash_attention_2"}))
    torch.manual_seed(0)
    model = CrossEncoder(str(folder / "bert"), device="cpu", num_labels=1)
    with torch.no_grad():  # with fresh weights, scores hardly differ, and the gradient of a group cancels
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)
    model.save_pretrained(str(folder / "reranker"))
    make_splade(folder / "bert", folder / "splade")
    sparse = SparseEncoder(str(folder / "splade"), device="cpu")
    static = SparseStaticEmbedding(sparse.tokenizer, weight=torch.rand(len(sparse.tokenizer)), frozen=True)
    router = Router.for_query_document(query_modules=[static], document_modules=list(sparse))
    SparseEncoder(modules=[router], device="cpu", similarity_fn_name="dot").save_pretrained(str(folder / "frozen"))
    make_colbert(folder / "bert", folder / "colbert", query_expansion={"strategy": "fixed", "length": 12})
    shutil.copytree(folder / "bert", folder / "wide")
    wide = transformers.AutoModel.from_pretrained(folder / "bert")
    wide.resize_token_embeddings(100_000)
    wide.save_pretrained(folder / "wide")
    (folder / "beir/qrels").mkdir(parents=True)
    for name, count in (("corpus", 48), ("queries", 20)):
        lines = (beir / f"{name}.jsonl").read_text().splitlines(keepends=True)[:count]
        (folder / f"beir/{name}.jsonl").write_text("".join(lines))
    judged = "".join(f"q{i}\td{i}\t1\n" for i in range(20))
    (folder / "beir/qrels/test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    narrow = {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32, "num_attention_heads": 2}
    kind = transformers.MobileBertForSequenceClassification
    narrow |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_labels": 1}
    kind(transformers.MobileBertConfig(vocab_size=1000, **narrow)).save_pretrained(folder / "mobile")
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(folder / "mobile")
    window = make_decoder(folder / "window", "MistralModel") / "config.json"
    window.write_text(json.dumps(json.loads(window.read_text()) | {"sliding_window": 24, "is_causal": False}))
    make_reranker(folder / "bert", folder / "modular")
    shutil.copytree(folder / "modular", folder / "modular_flash")
    (folder / "modular_flash/config.json").write_text((folder / "flash/config.json").read_text())
    make_reranker(make_decoder(folder / "decoder", chat=CHAT, ending=None), folder / "chat", "lasttoken")
    return folder


def make_job(script, loss, name, flags="", **options):
    """Return the job of a short run with several micro-batches per step; "NAME, resumed" resumes NAME."""
    model = "bert" if script == "train_bi_encoder" else "reranker"
    common = f"--train_data rows.jsonl --model_name_or_path {model} --batch_size 6 --max_length 64 --max_steps 1 "
    common += f"--micro_batch_tokens 800 --logging_steps 1 --learning_rate 1e-4 {LOSSES[script][loss]} "
    name = name.partition(", resumed")[0].replace(" ", "_")
    flags = merge_flags(f"{common} --output_dir {script}/{loss}/{name} {flags}".split())
    return {"script": script, "flags": flags, **options}


REPORTED = {  # evaluations in float32; check_attention; a device that is no CUDA; the passes that measure memory
    "templates/": "float32 Linear outside autocast",
    "train_bi_encoder window": "float32 Linear outside autocast",
    "eval_incremental xpu": "not pinned",
    "train_bi_encoder memory, measured": "not pinned",
}


class Ran(dict):
    """{"script loss name": result}; a job runs when it is first asked for, after the one that it resumes.

    No run uses what has not arrived, or what another stream still uses; all that is copied ahead is pinned."""

    def __init__(self, jobs, worker, log):
        self.jobs, self.worker, self.log = jobs, worker, log

    def __missing__(self, name):
        resumed, *more = name.split(", resumed")
        if more:
            self[resumed]
        print(json.dumps(self.jobs.get(name, name)), file=self.worker.stdin, flush=True)
        result = self[name] = json.loads(self.worker.stdout.readline() or "null")
        assert result, self.log.read_text()[-4000:]
        if name in self.jobs:
            places = [*result["reports"], *(place for place in result.get("syncs", []) if "not pinned" in place)]
            accepted = [kind for start, kind in REPORTED.items() if name.startswith(start)]
            assert not [place for place in places if not any(kind in place for kind in accepted)], name
        return result


@pytest.fixture(scope="module")
def ran(folder):
    """Return the Ran of all runs; those of the evaluator have no loss."""
    jobs = {}
    for script, loss in CASES:
        for name, on_device in (("cpu", False), ("device", True)):
            job = make_job(script, loss, name, f"{FEW} --grad_cache false", device=on_device)
            jobs[f"{script} {loss} {name}"] = job
    for script, name in RAN:
        flags, options = RUNS[name]
        jobs[f"{script} {name}"] = make_job(script, next(iter(LOSSES[script])), name, flags, **options)
    for name, kind in (("cpu", ""), ("device", "cuda"), ("cached", "cuda"), ("xpu", "xpu")):
        flags = "--model_name_or_path bert splade colbert --cross_encoder reranker --rerank_k 5 --beir beir "
        flags += "--max_length 32 "
        flags += "--corpus_chunk_size 32 --top_k 10 --metrics nDCG@10 --cache_dtype float32 "
        flags += f"--output_dir evaluated/{name} --cache_dir {kind}_cache --micro_batch_tokens 200 "  # several groups
        flags += "--attn_implementation eager" * (kind == "xpu")  # the fused kernels of others are not simulated
        job = {"script": "eval_incremental", "flags": flags.split(), "device": bool(kind), "kind": kind or "cuda"}
        jobs[f"eval_incremental {name}"] = job
    flags = "--model_name_or_path bert --beir beir --export_vectors vectors --output_dir exporting --cache_dir cache"
    jobs["eval_incremental export"] = {"script": "eval_incremental", "flags": flags.split()}
    for model, (kind, options) in product(("modular", "chat"), (("sdpa", {}), ("flash_attention_2", FLASH))):
        flags = f"{WAITING} --model_name_or_path {model} --micro_batch_tokens 100000 --attn_implementation {kind}"
        job = make_job("train_cross_encoder", "listwise_ce", f"{model}, {kind}", flags, **options)
        jobs[f"train_cross_encoder {model}, {kind}"] = job
    flags = "--model_name_or_path bert --cross_encoder modular_flash --rerank_k 5 --beir beir --metrics nDCG@10 "
    flags += "--cache_dir modular_cache --output_dir evaluated/modular"
    jobs["eval_incremental modular"] = {"script": "eval_incremental", "flags": flags.split(), **FLASH}
    flags = "--model_name_or_path flash --beir beir --cache_dir cache --output_dir evaluated/flash"
    job = {"script": "eval_incremental", "flags": flags.split(), "flash": True}
    jobs["eval_incremental flash in float32"] = job
    for model, (name, options) in product(TEMPLATES, TEMPLATE_RUNS.items()):
        flags = f"--train_data rows.jsonl --model_name_or_path {model} --columns docstring code wrong --batch_size 6 "
        flags += "--max_length 64 --micro_batch_tokens 400 --max_graph_tokens 0 --max_steps 3 --save_steps 3 "
        flags += f"--eval_rows 8 --output_dir templates/{model}/{name}"
        jobs[f"{TEMPLATES[model]} {name}"] = {"script": TEMPLATES[model], "flags": flags.split(), **options}
    for name, (tokens, memory, flags) in MEMORY_RUNS.items():
        job = make_job("train_bi_encoder", "infonce", name, f"{FEW} --batch_size 40 {flags}", memory=memory)
        first = job["flags"].index("--micro_batch_tokens")
        job["flags"][first : first + 2] = ["--micro_batch_tokens", tokens] * (tokens is not None)
        jobs[f"train_bi_encoder {name}"] = job
    with start_worker(folder, "strict_worker.py") as worker:
        yield Ran(jobs, worker, folder / "log")


def losses(result):
    assert not result["error"], result["error"]
    return [line["loss"] for line in result["metrics"] if "loss" in line]


def norms(result):
    return [line["grad_norm"] for line in result["metrics"] if "loss" in line]


def assert_same_gradient(folder, script, loss, names):
    """Compare the gradients of two runs, to a relative error of 1e-4: on the device, texts are padded otherwise."""
    found, expected = (np.load(folder / script / loss / name / "gradient.npy") for name in names)
    assert np.linalg.norm(expected) > 1e-4
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-4


QUICK = [("train_bi_encoder", "infonce"), ("train_bi_encoder", "multi-vector"), ("train_cross_encoder", "listwise_ce")]


@pytest.mark.parametrize("script, loss", mark_slow(CASES, QUICK))
def test_training_equals_that_on_the_cpu(ran, folder, script, loss):
    assert losses(ran[f"{script} {loss} device"]) == pytest.approx(losses(ran[f"{script} {loss} cpu"]), rel=1e-5)
    assert_same_gradient(folder, script, loss, ["device", "cpu"])


@pytest.mark.parametrize("script", EACH_TRAINER)
def test_grad_cache_equals_one_pass(ran, folder, script):
    loss = next(iter(LOSSES[script]))
    assert ran[f"{script} grad_cache"]["outputs"] == 2 * ran[f"{script} {loss} device"]["outputs"] >= 4
    assert_same_gradient(folder, script, loss, ["grad_cache", "device"])


@pytest.mark.parametrize("script", EACH_TRAINER)
def test_both_passes_of_grad_cache_draw_the_same_dropout(ran, script):
    """Also of adapters in bf16: the first pass has no gradients, so kernels could be chosen otherwise."""
    result = ran[f"{script} dropout"]
    assert losses(result) and result["changed"] == 0 and result["outputs"] >= 4
    assert losses(result) != pytest.approx(losses(ran[f"{script} grad_cache"]), rel=1e-3)


@pytest.mark.parametrize("script", EACH_TRAINER)
def test_evaluates_saves_and_resumes(ran, script):
    """Measures equal those of the CPU; a resumed run has the losses of one that was not stopped."""
    expected, found = (ran[f"{script} {name}"] for name in ("long, cpu", "long"))
    assert losses(found) == pytest.approx(losses(expected), rel=1e-4)
    if script == "train_bi_encoder":
        assert losses(found) == losses(ran[f"{script} long, resumed"])
    for line, other in zip(found["metrics"], expected["metrics"], strict=True):
        names = set(line) - RATES - {"padding_fraction"}
        assert {name: line[name] for name in names} == pytest.approx({name: other[name] for name in names}, rel=1e-3)


HALF = ["flash", "fp16", "bf16, 2 processes", "long, resumed in fp16"]
QUICK = [("train_bi_encoder", "fp16"), ("train_cross_encoder", "bf16, 2 processes")]


@pytest.mark.parametrize("script, name", mark_slow([case for case in RAN if case[1] in HALF], QUICK))
def test_half_precision(ran, script, name):
    """Losses are near those of float32, norms not equal; no matrix product is computed outside of autocast."""
    result = ran[f"{script} {name}"]
    assert losses(result) == pytest.approx(losses(ran[f"{script} long"]), rel=0.02)
    assert norms(result) != norms(ran[f"{script} long"])
    assert not [place for place in result["reports"] if "outside autocast" in place]


@pytest.mark.parametrize("script", [*EACH_TRAINER, "eval_incremental"])
def test_flash_attention_in_float32_is_refused(ran, script):
    assert "FlashAttention only support fp16" in ran[f"{script} flash in float32"]["error"]


def test_a_step_is_skipped_and_the_scale_is_resumed(ran, folder):
    """The initial scale makes the first gradient overflow. A scaler restarted at its initial scale would skip another
    step after each resume."""
    script = "train_bi_encoder"
    for name in ("fp16", "fp16, resumed"):
        result = ran[f"{script} {name}"]
        assert losses(result)
        assert np.isfinite(norms(result)).tolist() == [False, True, True]
    checkpoint = folder / script / next(iter(LOSSES[script])) / "fp16/checkpoints/step_00000003"
    scaler = json.loads((checkpoint / "state.json").read_text())["progress"]["scaler"]
    assert (scaler["scale"], scaler["_growth_tracker"]) == (2.0**9, 0)


def test_memory_is_measured(ran):
    """Where four graphs of 16,384 tokens do not fit, a run without --micro_batch_tokens trains, with the same loss."""
    assert "out of memory" in ran["train_bi_encoder memory, 16384 tokens"]["error"]
    expected = losses(ran["train_bi_encoder memory, no limit"])
    assert losses(ran["train_bi_encoder memory, measured"]) == pytest.approx(expected, rel=1e-5)


def test_memory_is_measured_beside_a_frozen_encoder(ran):
    assert losses(ran["train_bi_encoder memory, measured of a frozen encoder"])


@pytest.mark.slow
def test_memory_is_measured_where_the_gradient_exceeds_a_graph(ran):
    assert losses(ran["train_bi_encoder memory, measured with a large vocabulary"])


WAITS = {"waits": 2, "waits, flash": 1, "waits, concatenated": 1}


@pytest.mark.parametrize("script, name", mark_slow(product(TRAINERS, WAITS), [*product(TRAINERS[:1], WAITS)]))
def test_number_of_waits_per_step(ran, script, name):
    """While the host waits, the device runs idle. A step has one wait for loss, norm and SIGTERM, and one in each
    forward pass with padding: transformers checks whether the mask masks anything. What is concatenated has no
    mask, and workers have prepared where their tokens stand. Queries and documents of a bi-encoder share one."""
    result = ran[f"{script} {name}"]
    assert losses(result) and np.diff(result["waits"]).tolist() == [WAITS[name]] * 2


@pytest.mark.parametrize("script", EACH_TRAINER)
def test_concatenated_inputs_have_the_losses_of_padded_ones(ran, script):
    """By torch's kernel and by a package's, also where only deterministic kernels may run."""
    expected = ran[f"{script} waits"]["metrics"][-1]
    assert expected["padding_fraction"] > 0
    for name in ("waits, concatenated", "waits, flash"):
        (found,) = ran[f"{script} {name}"]["metrics"]
        assert found["padding_fraction"] == 0 and found["loss"] == pytest.approx(expected["loss"], rel=2e-3)
    found = ran[f"{script} deterministic"]
    assert losses(found) == pytest.approx(losses(ran[f"{script} {next(iter(LOSSES[script]))} cpu"]), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("script", [script for script, name in RAN if name == "mobile"])
def test_a_model_that_differs_is_padded_and_the_checkpoint_says_why(ran, folder, script):
    """A resume pads, too."""
    assert losses(ran[f"{script} mobile"]) == losses(ran[f"{script} mobile, padded"])
    if script == "train_bi_encoder":
        assert losses(ran[f"{script} mobile, resumed"]) == losses(ran[f"{script} mobile"])
    output = folder / script / next(iter(LOSSES[script])) / "mobile"
    progress = json.loads((output / "checkpoints/step_00000002/state.json").read_text())["progress"]
    assert progress["padded"].startswith("MobileBertModel: concatenated, its last_hidden_state differs by ")


@pytest.mark.slow
def test_a_verdict_is_that_of_the_lengths_of_this_start(ran, folder):
    """A window of 24 tokens, which the kernel sees otherwise, matters with --max_length 64, but not with 20."""
    found = [ran[f"train_bi_encoder {name}"] for name in ("window", "window, resumed")]
    assert all(map(losses, found))
    assert found[0]["metrics"][-1]["padding_fraction"] == 0 < found[1]["metrics"][-1]["padding_fraction"]
    for step, verdict in (2, ""), (3, "MistralModel: concatenated, its last_hidden_state differs by "):
        path = folder / f"train_bi_encoder/infonce/window/checkpoints/step_{step:08}/state.json"
        padded = json.loads(path.read_text())["progress"]["padded"]
        assert padded.startswith(verdict) and bool(padded) == bool(verdict)


@pytest.mark.parametrize(
    "model, waits", mark_slow([("chat", 2)], [("modular", 1)])
)  # one in the pooling of last tokens
def test_pairs_are_not_padded_for_a_reranker_of_several_modules(ran, model, waits):
    """Under a package's flash attention, pairs are concatenated, too: a step does not wait for a mask."""
    result, expected = (ran[f"train_cross_encoder {model}, {kind}"] for kind in ("flash_attention_2", "sdpa"))
    assert losses(result) == pytest.approx(losses(expected), rel=0.02)
    assert np.diff(result["waits"]).tolist() == [waits] * 2
    assert not [place for place in result["reports"] if "outside autocast" in place]


@pytest.mark.parametrize("template", mark_slow(TEMPLATES.values(), ["templates/cross_encoder"]))
def test_templates_give_the_losses_of_the_cpu(ran, template):
    """Also on two processes in bf16."""
    expected = losses(ran[f"{template} cpu"])
    assert len(expected) == 3
    for name, tolerance in (("device", 1e-4), ("bf16", 0.02)):
        assert losses(ran[f"{template} {name}"]) == pytest.approx(expected, rel=tolerance)


@pytest.mark.slow
def test_the_evaluator_reranks_with_several_modules(ran):
    assert not ran["eval_incremental modular"]["error"]  # it compares its scores with those of predict


def test_evaluator_ranks_as_on_the_cpu(ran, folder):
    """Search and reranking give the scores of the CPU, without the cache and from it, and on a device that is no CUDA,
    for whose copies nothing waits."""
    found = {}
    for name in ("cpu", "device", "cached", "xpu"):
        assert not ran[f"eval_incremental {name}"]["error"]
        lines = [path.read_text().splitlines() for path in sorted((folder / "evaluated" / name).rglob("run.trec"))]
        found[name] = [[float(line.split()[4]) for line in run] for run in lines]
        assert len(found[name]) == 6 and sum(map(len, found[name])) == 3 * (200 + 100)
    for name in ("device", "cached", "xpu"):
        for scores, expected in zip(found[name], found["cpu"]):
            assert scores == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert not ran["eval_incremental export"]["error"]
    vectors = np.stack(pd.read_parquet(folder / "vectors")["vector"])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_device_is_late(ran, name):
    expected, found = PROGRAMS[name][0], ran["late device"][name]
    assert any(expected in report for report in found) if expected else not found


def test_the_simulated_device_refuses_what_cuda_refuses(ran):
    found = ran["simulated device"]
    expected = [*["mixed devices"] * 2, "indices should be", "mixed devices", "cannot pin", "more than one element",
                "FlashAttention only support fp16"]  # fmt: skip
    for message, part in zip(found["refused"], expected, strict=True):
        assert message.startswith("STRICT: ") and part in message
    kinds = [where.split()[1] for where in found["syncs"]]
    assert sorted(kinds) == ["_local_scalar_dense.default", "_to_copy.default", "index", "tolist"]
