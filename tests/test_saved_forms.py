"""What is saved is what was trained: model/, loaded by sentence-transformers in a process that knows none of the
scripts, gives what the model in memory gave at the end, in training and in the last evaluation."""

import json

import pytest
import torch
from conftest import ROOT, launch, mark_slow, start_worker, write_jsonl
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from test_architectures import router_first
from test_decoders import CHAT, TEMPLATE, make_decoder, make_encoder, make_reranker
from test_fsdp2 import launch_sharded
from transformers import AutoModelForSequenceClassification

WORKER = ROOT / "tests/saved_forms_worker.py"
STEPS = 3
EXACT = 1e-5


def given(name):
    """A model of the fixtures."""
    return lambda folder, request: request.getfixturevalue(name)


def in_bfloat16(build):
    """Another model, with its weights in bfloat16."""

    def built(folder, request):
        model = SentenceTransformer(str(build(folder, request)), device="cpu").bfloat16()
        model.save_pretrained(str(folder / "half"))
        return folder / "half"

    return built


def decoder(name="Qwen3Model", **options):
    """A decoder whose weights do not magnify the rounding of adapters that are merged."""
    return lambda folder, request: make_decoder(folder / "decoder", name, scale=1.5, **options)


def decoder_with_head(folder, request):
    base = make_decoder(folder / "decoder", "LlamaModel", padding=None)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model.save_pretrained(base)
    return base


def both_ways(name, **options):
    """A decoder in whose configuration attention is not causal."""

    def build(folder, request):
        base = make_decoder(folder / "decoder", name, scale=1.5, **options)
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"is_causal": False}))
        return base

    return build


def modular(folder, request):
    return make_reranker(request.getfixturevalue("bert"), folder / "modular")


def router(folder, request):
    modules = router_first(folder, request.getfixturevalue("bert"))
    model = SentenceTransformer(modules=modules, device="cpu", prompts={"query": "find: ", "document": "code: "})
    model.save_pretrained(str(folder / "router"))
    return folder / "router"


def dot_product(folder, request):
    model = SentenceTransformer(str(request.getfixturevalue("bert")), device="cpu", similarity_fn_name="dot")
    model.save_pretrained(str(folder / "dot"))
    return folder / "dot"


def roberta(folder, request):
    return make_encoder(folder / "roberta", "XLMRobertaModel", request.getfixturevalue("bert"))


PROMPTS = ["--query_prompt", "find: ", "--document_prompt", "code: ", "--max_length", 30]
PAIR = ["--query_prompt", "find: ", "--max_length", 40]
LABEL = ["--label_column", "label"]  # else negatives of other rows, and listwise_ce
LAST = ["--pooling", "lasttoken", *PROMPTS]
LORA = ["--lora_rank", 4]
TEMPLATED = ["--template", TEMPLATE, "--max_length", 64]
BEST = ["--metric_for_best_model", "own", "--save_total_limit", 1]
BI, CROSS = "train_bi_encoder", "train_cross_encoder"
FORMS = {  # {name: (trainer, model, flags, launch)}
    "static": (BI, given("static"), PROMPTS, "no"),
    "BERT": (BI, given("bert"), [*PROMPTS, "--pooling", "cls"], "no"),
    "BERT, dot product": (BI, dot_product, PROMPTS, "no"),
    "BERT, file in bf16": (BI, in_bfloat16(given("bert")), PROMPTS, "no"),
    "BERT, best checkpoint": (BI, given("bert"), [*PROMPTS, *BEST], "no"),
    "BERT, FSDP2": (BI, given("bert"), PROMPTS, "fsdp"),
    "two encoders": (BI, router, ["--max_length", 30], "no"),
    "decoder": (BI, decoder(side="left"), LAST, "no"),
    "decoder, LoRA, FSDP2": (BI, decoder(), [*LAST, *LORA], "fsdp"),
    "decoder in bf16, LoRA, launch in bf16": (BI, in_bfloat16(decoder()), [*LAST, *LORA], "bf16"),
    "Qwen3 both ways, LoRA": (BI, both_ways("Qwen3Model"), [*LAST, *LORA], "no"),
    "Llama both ways, LoRA": (BI, both_ways("LlamaModel"), [*PROMPTS, *LORA, "--pooling", "mean"], "no"),
    "cross-encoder, bce": (CROSS, given("reranker"), [*PAIR, *LABEL, "--loss", "bce"], "no"),
    "cross-encoder, list": (CROSS, given("reranker"), PAIR, "no"),
    "cross-encoder of RoBERTa": (CROSS, roberta, PAIR, "no"),
    "cross-encoder, template": (CROSS, given("reranker"), [*PAIR, "--template", "{query} ? {document} [SEP]"], "no"),
    "cross-encoder, FSDP2": (CROSS, given("reranker"), [*PAIR, *LABEL, "--loss", "mse"], "fsdp"),
    "cross-encoder in bf16, LoRA": (CROSS, in_bfloat16(given("bert")), [*PAIR, *LORA], "bf16"),
    "cross-encoder, LoRA, best": (CROSS, given("bert"), [*PAIR, *LORA, *BEST, *LABEL, "--loss", "bce"], "no"),
    "modular reranker": (CROSS, modular, [*PAIR, *LABEL, "--loss", "mse"], "no"),
    "modular reranker, LoRA": (CROSS, modular, [*PAIR, *LORA], "no"),
    "decoder with a head": (CROSS, decoder_with_head, PAIR, "no"),
    "yes/no, template": (CROSS, decoder("Qwen3ForCausalLM", ending=None), [*PAIR, *TEMPLATED], "no"),
    "yes/no, chat, LoRA": (CROSS, decoder("Qwen3ForCausalLM", ending=None, chat=CHAT), [*PAIR, *LORA], "no"),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """load(folder) returns what the model of a run gives in another process, for what the run has measured."""

    def ask(folder):
        print(folder, file=process.stdin, flush=True)
        assert process.stdout.readline() == "loaded\n"
        return torch.load(folder / "loaded.pt")

    with start_worker(tmp_path_factory.mktemp("load"), WORKER.name, "load") as process:
        yield ask


def largest_difference(found, expected):
    """Return it, relative to the mean norm of outputs if that is above 1."""
    keys = [key for key in expected if key in found]
    assert len(keys) >= 8 and {key[0] for key in keys} == {key[0] for key in expected}
    differences = [(found[key] - expected[key]).norm() for key in keys]
    size = torch.stack([expected[key].norm() for key in keys]).mean()
    return (max(differences) / size.clamp(min=1)).item()


QUICK = ["BERT, best checkpoint", "decoder, LoRA, FSDP2", "cross-encoder, LoRA, best", "modular reranker"]


@pytest.mark.parametrize("name", mark_slow(FORMS, QUICK))
def test_what_is_saved_is_what_was_trained(name, rows, load, tmp_path, request, report):
    script, build, flags, precision = FORMS[name]
    cut = enumerate(rows[:60])
    texts = [{"docstring": row["docstring"][:90], "code": row["code"][: 20 + 2 * n]} for n, row in cut]
    write_jsonl(tmp_path / "rows.jsonl", [{**row, "label": number % 4 / 3} for number, row in enumerate(texts)])
    flags = ["--train_data", tmp_path / "rows.jsonl", "--columns", "docstring", "code", "--model_name_or_path",
             build(tmp_path, request), "--max_steps", STEPS, "--batch_size", 16, "--eval_rows", 8, "--eval_steps", 1,
             "--save_steps", 0, "--learning_rate", 1e-3, "--lr_scheduler_type", "constant", "--warmup_ratio", 0,
             "--micro_batch_tokens", 300, "--output_dir", tmp_path / "run", *flags]  # fmt: skip
    if precision == "fsdp":
        launch_sharded(tmp_path, "train", script, *flags, worker=WORKER)
    else:
        launch(WORKER, "train", script, *flags, environment={"ACCELERATE_MIXED_PRECISION": precision})
    evaluations = torch.load(tmp_path / "run/outputs.pt")
    assert len(evaluations) == 1 + STEPS
    expected = evaluations[2 if "best" in name else STEPS]
    found = load(tmp_path / "run")
    differences = {what: largest_difference(found[what], expected[what]) for what in ("trained", "measured")}
    for evaluation in evaluations:  # that of other steps differs: the test sees which one was saved
        if evaluation is not expected:
            assert largest_difference(evaluation["trained"], expected["trained"]) > 20 * EXACT
    print(f"\n{name}: {differences}")
    report(name, 1, f"{max(differences.values()):.1e}")
    assert max(differences.values()) < EXACT
    for path in (tmp_path / "run/model").rglob("*.safetensors"):
        assert {tensor.dtype for tensor in load_file(path).values()} <= {torch.float32, torch.int64}
