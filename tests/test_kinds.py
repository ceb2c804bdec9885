"""Sparse and multi-vector encoders train as the library's losses do in one pass, on any number of processes."""

import json
import re
import signal
import string
from itertools import islice
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, launch, lines_of, make_colbert, make_splade, mark_slow, metrics, train
from forked import Forked
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.multi_vector_encoder import evaluation as multi_vector
from sentence_transformers.multi_vector_encoder import losses as multi_vector_losses
from sentence_transformers.multi_vector_encoder import scoring
from sentence_transformers.sparse_encoder import callbacks, evaluation, losses
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BertModel,
    LlamaConfig,
    LlamaModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertModel,
)

import train_bi_encoder as script

MULTI_VECTOR = {
    "colbert": {"query_length": 8},
    "mean": {"query_length": 8, "similarity": "meanmaxsim"},
    "fixed": {"query_expansion": {"strategy": "fixed", "length": 16}},
    "min": {"query_expansion": {"strategy": "min", "length": 12, "attend": True}},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory, bert):
    """Folder of models: SPLADE, one with a static encoder of queries, and multi-vector ones that differ by role."""
    folder = tmp_path_factory.mktemp("models")
    config, tokenizer = (kind.from_pretrained(bert) for kind in (AutoConfig, AutoTokenizer))
    sparse = SparseEncoder(str(make_splade(bert, folder / "splade")), device="cpu")
    SparseEncoder(modules=[*sparse], device="cpu", similarity_fn_name="cosine").save_pretrained(str(folder / "cosine"))
    static = SparseStaticEmbedding(tokenizer=tokenizer, weight=torch.rand(len(tokenizer)) + 0.5)
    for name in ("router", "frozen"):
        router = Router.for_query_document(query_modules=[static], document_modules=list(sparse))
        SparseEncoder(modules=[router], device="cpu", similarity_fn_name="dot").save_pretrained(str(folder / name))
        static.frozen = True
    tokens = {"pad_token_id": 0, "unk_token_id": 1, "cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3}
    modern = ModernBertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=128, local_attention=16, global_attn_every_n_layers=2, eos_token_id=3, **tokens,
    )  # fmt: skip
    ModernBertForMaskedLM(modern).save_pretrained(folder / "modern")
    tokenizer.save_pretrained(folder / "modern")
    write_pylate(folder / "pylate", ModernBertModel(modern), tokenizer)
    write_stanford(folder / "stanford", BertModel(config), tokenizer)
    for name, options in MULTI_VECTOR.items():
        make_colbert(bert, folder / name, **options)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    LlamaModel(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(folder / "decoder")
    AutoTokenizer.from_pretrained(bert, padding_side="left").save_pretrained(folder / "decoder")
    make_colbert(folder / "decoder", folder / "left", query_expansion={"strategy": "min", "length": 12})
    return folder


def write_pylate(folder, body, tokenizer):
    """Write a model as PyLate does: GTE-ModernColBERT has this form. Its queries are expanded to 12 tokens."""
    body.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "1_Dense").mkdir()
    dense = {"in_features": 32, "out_features": 16, "bias": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    save_file({"linear.weight": torch.randn(16, 32) / 4}, folder / "1_Dense/model.safetensors")
    types = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(types.items())]
    options = {"model_type": "ColBERT", "similarity_fn_name": "MaxSim", "prompts": {}, "default_prompt_name": None}
    options |= {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 12, "document_length": 40}
    options |= {"attend_to_expansion_tokens": False, "skiplist_words": list(string.punctuation)}
    for name, value in {
        "1_Dense/config": dense,
        "sentence_bert_config": {"max_seq_length": 63, "do_lower_case": False},
        "modules": listed,
        "config_sentence_transformers": options,
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def write_stanford(folder, body, tokenizer):
    """Write a model as Stanford's ColBERT does: the projection beside the weights of BERT, options in a file."""
    body.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    weights = {f"bert.{name}": weight.clone() for name, weight in body.state_dict().items()}
    weights["linear.weight"] = torch.randn(16, 32) / 4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    lengths = {"doc_maxlen": 40, "query_maxlen": 12}
    (folder / "artifact.metadata").write_text(json.dumps(lengths | {"mask_punctuation": True}))


@pytest.fixture(scope="module")
def source(tmp_path_factory, rows):
    """A file of rows without equal texts, which the losses of the library do not mask."""
    kept = list({row["code"][:100]: row for row in rows}.values())
    rows = [{name: text[:100] for name, text in row.items()} for row in kept]
    codes = [row["code"] for row in rows]
    more = [{"label": i % 7 / 7, "wrong": codes[i - 1], "worse": codes[i - 5],
             "lists": codes[max(0, i - i % 5) : i], "scores": [0.9, 0.5, len(code) % 5 / 9]}
            for i, code in enumerate(codes)]  # fmt: skip
    path = tmp_path_factory.mktemp("source") / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row | other for row, other in zip(rows, more)]), path)
    return path


def flags_of(models, name, source, output, *more):
    common = ["--model_name_or_path", models / name, "--train_data", source, "--columns", "docstring", "code"]
    common += ["--dropout", 0, "--batch_size", 16, "--eval_rows", 40, "--max_steps", 3, "--logging_steps", 1]
    common += ["--learning_rate", 1e-3, "--lr_scheduler_type", "constant", "--warmup_ratio", 0, "--save_steps", 1]
    return [*map(str, [*common, "--output_dir", output, *more])]


CASES = {
    "few": ["splade lists", "colbert kl", "mean"],
    "others": ["splade", "splade margin_mse", "cosine SparseCoSENTLoss", "router", "colbert", "colbert symmetric",
               "colbert lists", "colbert margin_mse", "fixed", "min"],
}  # fmt: skip


@pytest.mark.parametrize("which", mark_slow(CASES, ["few"]))
def test_gradients_equal_those_of_one_process_and_one_pass(models, source, tmp_path, which):
    found = {}
    for processes in (1, 2):
        output = tmp_path / str(processes)
        launch(ROOT / "tests/kinds_worker.py", models, source, output, *CASES[which], processes=processes)
        for process in range(processes):
            for key, value in torch.load(f"{output}.{process}.pt").items():
                found[processes, process, *key] = value
    for key, (gradient, loss) in found.items():
        expected = found[1, 0, key[2], 10**6, False, 2**26]
        assert expected[0].norm() > 0
        # Two tokens that are equally near to rounding may take turns as the largest, so not all are within 1e-5.
        assert (gradient - expected[0]).norm() / expected[0].norm() < 1e-4, key
        assert loss == pytest.approx(expected[1], rel=1e-5), key


def library_losses(name, model):
    """Return loss(step, queries, documents) of the library, in one pass."""
    if isinstance(model, SparseEncoder):
        inner = losses.SparseMultipleNegativesRankingLoss(model)
        loss = losses.SpladeLoss(model, inner, document_regularizer_weight=0.02, query_regularizer_weight=0.01)
        schedule = callbacks.SpladeRegularizerWeightSchedulerCallback(loss, warmup_ratio=0.7)
        schedule.on_train_begin(None, SimpleNamespace(max_steps=3), None)
    elif name == "mean":
        kwargs = {"scale": 20, "similarity_fct": scoring.mean_colbert_scores}
        loss = multi_vector_losses.MultiVectorMultipleNegativesRankingLoss(model, **kwargs)
    else:
        loss = multi_vector_losses.MultiVectorMultipleNegativesRankingLoss(model)

    def compute(step, queries, documents):
        if isinstance(model, SparseEncoder):
            schedule.on_step_begin(None, SimpleNamespace(global_step=step), None)
        columns = (queries, "query"), (documents, "document")
        value = loss(
            [model.preprocess(texts, model.prompts[task], task=task) | {"task": task} for texts, task in columns]
        )
        return sum(value.values()) if isinstance(value, dict) else value

    return compute


FORMS = ["splade"]
MORE_FORMS = ["fixed", "router", "pylate", "modern", "frozen", "colbert", "mean", "min", "stanford"]


@pytest.mark.parametrize("name", mark_slow(FORMS + MORE_FORMS, FORMS))
def test_three_steps_equal_those_of_the_library(name, models, source, tmp_path):
    """Losses on one process and on two, weights, the saved model, and its measures by the library's evaluator."""
    more = ["--loss_kwargs", '{"query_flops": 0.01, "document_flops": 0.02, "flops_ramp": 0.7}']
    kind = SparseEncoder if name in ("splade", "modern", "router", "frozen") else MultiVectorEncoder
    more *= kind is SparseEncoder
    more += ["--model_type", "SparseEncoder"] if name == "modern" else []
    flags = flags_of(models, name, source, tmp_path / "one", *more)
    train("train_bi_encoder", *flags)
    small = ["--micro_batch_tokens", 300, "--grad_cache", "true", "--output_dir", tmp_path / "two"]
    launch(ROOT / "train_bi_encoder.py", *flags, *small, processes=2)
    model = kind(str(models / name), device="cpu").train()
    script.set_dropout(model, 0)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    args = script.parse_args([*flags, "--query_prompt", "", "--document_prompt", ""])
    data = script.open_data(args)
    compute = library_losses(name, model)
    optimizer = script.make_optimizer(model, args)
    expected = []
    for step, (table, _) in enumerate(islice(script.row_batches(data.sources, data.weights, args), 3)):
        rows, _ = script.read_rows(table, data.sources, data.lookups, 0)
        loss = compute(step, [row.query for row in rows], [row.documents[0] for row in rows])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for output in ("one", "two"):
        found = [line["loss"] for line in metrics(tmp_path / output) if "loss" in line]
        assert found == pytest.approx(expected, rel=1e-5)
        saved = load_file(tmp_path / output / "checkpoints/step_00000003/model.safetensors")
        weights = model.state_dict()
        for key, found in saved.items():  # without what is frozen
            if not key.endswith("key.bias"):  # which has no gradient but rounding
                assert (found - weights[key]).norm() <= 1e-3 * weights[key].norm(), key
    trained = kind(str(tmp_path / "one/model"), device="cpu")
    ((_, rows),) = data.held_out
    package, prefix = (evaluation, "Sparse") if kind is SparseEncoder else (multi_vector, "MultiVector")
    queries = {f"q{i}": row.query for i, row in enumerate(rows)}
    documents = {f"d{i}": row.documents[0] for i, row in enumerate(rows)}
    relevant = {f"q{i}": {f"d{i}"} for i in range(len(rows))}
    evaluator = getattr(package, f"{prefix}InformationRetrievalEvaluator")
    measures = evaluator(queries, documents, relevant, name="held_out", write_csv=False)(trained)
    line = metrics(tmp_path / "one")[-1]
    common = measures.keys() & line.keys()
    assert len(common) > 4 and all(line[key] == pytest.approx(measures[key], abs=1e-5) for key in common)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["splade", "colbert"])
def test_two_layouts_of_a_mixture(name, models, source, tmp_path):
    """Mapped on one process, in large passes; streamed on two, with workers, in small passes that are run twice."""
    teacher = {"columns": ["docstring", "code", "wrong", "worse"], "label_column": ["scores"], "loss": "margin_mse"}
    teacher["loss_kwargs"] = {"teacher_temperature": 0.5}
    other = tmp_path / "other.parquet"
    pq.write_table(pq.read_table(source).slice(100), other)
    sources = ["--train_data", source, json.dumps({"path": str(other), **teacher}), "--mix_by", "batch"]
    flags = flags_of(models, name, source, tmp_path / "one", "--shuffle_buffer", 0, "--eval_rows", 0)
    flags += [*sources, "--max_steps", 3, "--gradient_accumulation_steps", 2, "--save_steps", 0]
    train("train_bi_encoder", *flags)
    more = ["--streaming", "--mixing_weights", *(pq.read_metadata(file).num_rows for file in (source, other))]
    more += ["--dataloader_num_workers", "2", "--micro_batch_tokens", "200", "--grad_cache", "true", "--output_dir"]
    launch(ROOT / "train_bi_encoder.py", *flags, *more, tmp_path / "two", processes=2)
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        names = [key for key in one if key.startswith("loss")] + ["grad_norm"]
        assert [two[key] for key in names] == pytest.approx([one[key] for key in names], rel=2e-5)


def test_padding_is_never_the_best_token():
    """Where a token has only similarities below 0, that of padding, 0, would be the largest."""
    queries = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    documents = torch.tensor([[[-1.0, 0.0], [0.0, 0.0]], [[-0.5, 0.0], [-0.25, 0.0]]])
    assert script.similarities(queries, documents).tolist() == [[-1.0, -0.25]]


def test_symmetric_loss_of_tokens(models, source):
    """It is the mean of two cross-entropies of one matrix of the library's MaxSim, and of its transpose."""
    model = MultiVectorEncoder(str(models / "colbert"), device="cpu")
    rows = pq.read_table(source).slice(0, 6).to_pylist()
    parts = [
        model.encode_query([row["docstring"] for row in rows]),
        model.encode_document([row["code"] for row in rows]),
    ]
    scores = model.similarity(*parts)
    targets = torch.arange(6)
    expected = (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2
    padded = torch.nn.utils.rnn.pad_sequence([*parts[0], *parts[1]], batch_first=True).view(2, 6, -1, 128).unbind()
    whole = script.WholeBatch(torch.arange(12).view(2, 6), torch.zeros(6, 1), torch.arange(6), 0)
    args = script.parse_args(flags_of(models, "colbert", source, "none", "--loss_kwargs", '{"symmetric": true}'))
    assert script.make_loss(args, model)(list(padded), whole).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("name", mark_slow(["splade", "fixed"], ["splade"]))
def test_a_killed_run_resumes_to_the_bit(name, models, source, tmp_path):
    measure = "held_out_maxsim_ndcg@10" if name == "fixed" else "held_out_dot_ndcg@10"
    more = ["--dropout", 0.1, "--max_steps", 6, "--save_steps", 2, "--metric_for_best_model", measure]
    flags = flags_of(models, name, source, tmp_path / "whole", *more)
    train("train_bi_encoder", *flags)
    flags += ["--output_dir", tmp_path / "killed", "--resume"]
    process = Forked(ROOT / "train_bi_encoder.py", flags)
    while not (tmp_path / "killed/checkpoints/step_00000002").exists():
        assert process.poll() is None
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    train("train_bi_encoder", *flags)
    whole, killed = (sorted((tmp_path / run / "model").rglob("*.safetensors")) for run in ("whole", "killed"))
    assert [path.read_bytes() for path in whole] == [path.read_bytes() for path in killed]
    assert lines_of(tmp_path / "whole") == lines_of(tmp_path / "killed")


REFUSED = [
    ("splade", "--matryoshka_dims 8", "--matryoshka_dims: the embeddings of a SparseEncoder cannot be cut"),
    ("colbert", "--loss TripletLoss", "--loss TripletLoss: not one of infonce, margin_mse, kl"),
    ("splade", "--loss SpladeLoss", "--loss SpladeLoss: not one of"),
    ("splade", "--model_type MultiVectorEncoder", "is a SparseEncoder, not a MultiVectorEncoder"),
    ("reranker", "", "is a CrossEncoder, not a SentenceTransformer or a SparseEncoder or a MultiVectorEncoder"),
    ("plain", "--model_type SparseEncoder", "has no head of a masked language model"),
    ("left", "", "query_expansion 'min' depends on other texts"),
    ("splade", '--lora_rank 2 --lora_kwargs {"target_modules":["query","word_embeddings"]}', "its weight in common"),
    ("splade", "--label_column label --loss SparseCoSENTLoss", "save the model with similarity_fn_name='cosine'"),
]


@pytest.mark.parametrize("name, flags, message", REFUSED)
def test_what_is_refused(name, flags, message, models, source, bert, tmp_path):
    if name == "reranker":
        CrossEncoder(str(bert), device="cpu", num_labels=1).save_pretrained(str(models / name))
    more = ["--model_name_or_path", str(bert)] if name == "plain" else []
    with pytest.raises(script.UserError, match=re.escape(message)):
        train("train_bi_encoder", *flags_of(models, name, source, tmp_path, *more, *flags.split()))


@pytest.mark.parametrize("kind", mark_slow(["SparseEncoder", "MultiVectorEncoder"], ["MultiVectorEncoder"]))
def test_a_plain_transformer_becomes_what_the_flag_says(kind, models, source, tmp_path):
    train("train_bi_encoder", *flags_of(models, "modern", source, tmp_path / "run", "--model_type", kind))
    config = json.loads((tmp_path / "run/model/config_sentence_transformers.json").read_text())
    assert config["model_type"] == kind
