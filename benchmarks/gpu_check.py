"""What benchmarks/gpu.py needs before it measures: models, one attention kernel for all sides, and checks.

Torch's kernel, as the trainers call it, against attention text by text in float32, and its dropout; losses of
concatenated texts against padded ones; and whether a run that is killed and resumed repeats a whole one.
"""

import glob
import io
import json
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout, suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
import transformers
from sentence_transformers import CrossEncoder
from tokenizers import BertWordPieceTokenizer
from transformers import modeling_flash_attention_utils as flash_utils

import train_bi_encoder
import train_cross_encoder

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
COLUMNS = ["docstring", "code"]
LOGGED = 5  # steps of a line of metrics.jsonl, each of which waits for the device; by default 10
TRAINERS = {"bi": train_bi_encoder, "cross": train_cross_encoder}


def attention_of_texts(query, key, value, bounds, longest, dropout, scale, window):
    """Return (tokens, heads, D), attention within each text, one after the other, on any device."""
    parts = []
    for text in zip(*(part.split(bounds.diff().tolist()) for part in (query, key, value))):
        heads = [part.transpose(0, 1)[None] for part in text]
        distance = torch.arange(len(text[0]))[:, None] - torch.arange(len(text[0]))
        before, after = (len(distance) if side < 0 else side for side in window)
        options = {"attn_mask": (distance <= before) & (distance >= -after), "dropout_p": dropout, "scale": scale}
        found = F.scaled_dot_product_attention(*heads, enable_gqa=heads[0].shape != heads[1].shape, **options)
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)


def attention_of_trainers(query, key, value, bounds, longest, dropout, scale, window):
    """The same by the trainers' function, called as transformers does."""
    parts = [part.transpose(0, 1)[None] for part in (query, key, value)]
    options = {"scaling": scale, "dropout": dropout, "cu_seq_lens_q": bounds, "max_length_q": longest}
    options |= {"is_causal": window[1] == 0, "sliding_window": window[0] + 1 if window[0] >= 0 else None}
    return train_bi_encoder.concatenated_attention(None, *parts, None, **options)[0][0]


def stand_in(query, key, value, bounds, _, longest, __, dropout, is_causal, *, scale, **options):
    """torch.ops.aten._flash_attention_forward, where there is no GPU."""
    window = options["window_size_left"], options["window_size_right"]
    return [attention_of_texts(query, key, value, bounds, longest, dropout, scale, window)]


def flash_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                 causal=False, window_size=(-1, -1)):  # fmt: skip
    """The function of the package flash_attn that transformers calls, by torch's own kernel."""
    left, right = (window_size[0], 0) if causal else window_size
    if not CUDA:
        return attention_of_texts(q, k, v, cu_seqlens_q, max_seqlen_q, dropout_p, softmax_scale, (left, right))
    options = {"scale": softmax_scale, "window_size_left": left, "window_size_right": right}
    lengths = [cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k]
    return torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, dropout_p, causal and left < 0, return_debug_mask=False, **options
    )[0]


def flash(q, k, v, **options):
    """The same for texts of equal length: (texts, tokens, heads, D)."""
    texts, length = q.shape[:2]
    bounds = torch.arange(0, (texts + 1) * length, length, dtype=torch.int32, device=q.device)
    flat = (part.flatten(0, 1) for part in (q, k, v))
    return flash_varlen(*flat, bounds, bounds, length, length, **options).unflatten(0, (texts, length))


def concatenate(model, *_):
    """Do as concatenate_texts of the trainers does on a GPU."""
    for module in train_bi_encoder.transformers_of(model):
        train_bi_encoder.concatenate_inside(module)
    return ""


def install_attention():
    """Let `flash_attention_2` of transformers be torch's kernel; without a GPU let the trainers have the stand-in."""
    flash_utils._flash_fn, flash_utils._flash_varlen_fn = flash, flash_varlen
    flash_utils._pad_fn, flash_utils._unpad_fn = flash_utils._pad_input, flash_utils._unpad_input
    flash_utils._process_flash_kwargs_fn = flash_utils._lazy_define_process_function(flash_varlen)
    flash_utils._process_with_kvcache_kwargs_fn = dict
    flash_utils._loaded_implementation = "flash_attention_2"
    transformers.PreTrainedModel._flash_attn_can_dispatch = lambda *_, **__: True
    torch.backends.cuda.enable_cudnn_sdp(False)
    if not CUDA:
        torch.ops.aten._flash_attention_forward = stand_in
        torch.get_autocast_dtype = lambda _: torch.bfloat16
        train_bi_encoder.concatenate_texts = concatenate


def write_models(args):
    """Set args.texts, their lengths and the shapes of models, and write these; return {name: folder}. The reranker has
    the shape of the larger BERT."""
    args.shapes = {"22M": (384, 6, 12), "110M": (768, 12, 12)}  # width, layers, heads
    if args.tiny:
        args.shapes = {"22M": (32, 2, 2), "110M": (64, 2, 2)}
    tables = [pq.read_table(file, columns=COLUMNS) for file in sorted(glob.glob(args.source))]
    args.texts = {name: [text for table in tables for text in table[name].to_pylist()][:40_000] for name in COLUMNS}
    wordpieces = BertWordPieceTokenizer()
    sample = [text for texts in args.texts.values() for text in texts[:4000]]
    wordpieces.train_from_iterator(sample, vocab_size=30_522, show_progress=False)
    tokenizer = transformers.BertTokenizerFast(tokenizer_object=wordpieces._tokenizer, model_max_length=512)
    args.lengths = {}
    for name, texts in args.texts.items():
        ids = tokenizer(texts, truncation=True, max_length=args.max_length)["input_ids"]
        args.lengths[name] = np.array([*map(len, ids)])

    def shape(width, layers, heads, **more):
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        return dict(zip(names, (width, layers, heads, 4 * width)), vocab_size=30_522, pad_token_id=0, **more)

    tiny = args.shapes["22M"] if args.tiny else None
    configs = {name: transformers.BertConfig(**shape(*shape_of)) for name, shape_of in args.shapes.items()}
    more = {"local_attention": 8 if tiny else 128, "bos_token_id": 2, "eos_token_id": 3}
    more |= {"cls_token_id": 2, "sep_token_id": 3}
    configs["ModernBERT"] = transformers.ModernBertConfig(**shape(*(tiny or (768, 12, 12)), **more))
    grouped = {"num_key_value_heads": 1, "head_dim": 16} if tiny else {"num_key_value_heads": 8, "head_dim": 128}
    configs["Qwen3"] = transformers.Qwen3Config(**shape(*(tiny or (1024, 8, 16)), **grouped))
    torch.manual_seed(0)
    for name, config in configs.items():
        transformers.AutoModel.from_config(config).save_pretrained(args.folder / name)
        tokenizer.save_pretrained(args.folder / name)
    CrossEncoder(f"{args.folder}/110M", num_labels=1, device="cpu").save_pretrained(f"{args.folder}/reranker")
    return {name: f"{args.folder}/{name}" for name in (*configs, "reranker")}


def check_kernel(args):
    """The kernel against attention text by text in float32; its dropout: repeatable, right in the mean."""
    torch.manual_seed(0)
    sizes = [5, 64, 17, 200, 1]
    bounds = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32, device=DEVICE)
    attention = attention_of_trainers
    worst = np.zeros(4)  # of the output, and of the gradients of query, key and value
    for heads, grouped, dim in ((12, 12, 32), (12, 12, 64), (16, 8, 128), (3, 1, 256)):
        for window in ((-1, -1), (-1, 0), (7, 7), (7, 0)):
            shapes = [(sum(sizes), number, dim) for number in (heads, grouped, grouped)]
            given = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
            options = [max(sizes), 0.0, dim**-0.5, window]
            with torch.autocast(DEVICE, torch.bfloat16):
                found = attention(*given, bounds, *options).float().cpu()
            expected = attention_of_texts(*(part.cpu() for part in given), bounds.cpu(), *options)
            weight = torch.randn_like(expected)
            own, other = ([out, *torch.autograd.grad((out * weight).sum(), given)] for out in (found, expected))
            worst = np.maximum(worst, [((a - b).norm() / b.norm()).item() for a, b in zip(own, other)])

    def run(dropout, seed):
        torch.manual_seed(seed)
        return attention(q, q, q, bounds, max(sizes), dropout, 0.125, (-1, -1))

    q = torch.randn(sum(sizes), 12, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        drawn = [run(0.1, seed) for seed in (1, 1, 2)]
        gradients = [torch.autograd.grad(part.float().square().sum(), q)[0] for part in drawn]
        mean = sum(run(0.1, seed).float() for seed in range(200)) / 200
        without = run(0.0, 0).float()
    repeats = torch.equal(drawn[0], drawn[1]) and torch.equal(gradients[0], gradients[1])
    differs = not torch.equal(drawn[0], drawn[2])
    error = ((mean - without).norm() / without.norm()).item()
    dropout = f"repeats {repeats}, another seed differs {differs}, mean of 200 against none {error:.3f}"
    return {"note": f"outputs {worst[0]:.1e}, gradients {worst[1:].max():.1e}; dropout: {dropout}"}


class Enough(Exception):
    """Ends a run that was measured."""


def train(args, kind, model, rows, flags, is_enough):
    """Train by a script until is_enough(seconds at which each step ended). Return the records of the steps, these
    seconds, (passes, those with a graph kept) of each step, and what the script printed."""
    script = TRAINERS[kind]
    records, ends, passes, printed = [], [], [], io.StringIO()
    run_forward = script.run_forward

    def count_passes(*given):
        outputs, kept = run_forward(*given)
        passes.append((len(outputs), kept))
        return outputs, kept

    def write(_, step, record):
        records.append(record)
        ends.append(time.perf_counter())
        if is_enough(ends):
            raise Enough

    flags = [*flags, "--max_steps", 100_000, "--save_steps", 0, "--output_dir", tempfile.mkdtemp(dir=args.folder)]
    words = words_of(args, model, rows, *flags)
    patches = mock.patch.object(script, "run_forward", count_passes), mock.patch.object(script.Log, "write", write)
    with patches[0], patches[1], suppress(Enough), redirect_stdout(printed):
        script.main(script.parse_args(words))
    return records, ends, passes, printed.getvalue()


def words_of(args, model, rows, *flags):
    """Return the command line of a trainer."""
    words = ["--model_name_or_path", args.models[model], "--train_data", args.source, "--columns", *COLUMNS]
    words += [
        "--batch_size",
        rows,
        "--max_length",
        args.max_length,
        "--eval_rows",
        0,
        "--logging_steps",
        LOGGED,
        *flags,
    ]
    return [*map(str, words)]


def compare(args, model, rows, flags=()):
    """Losses and gradient norms of concatenated texts against padded ones, without dropout."""
    found = []
    for attention in ([], ["--attn_implementation", "sdpa"]):
        given = [*flags, "--dropout", 0, "--warmup_ratio", 0, "--logging_steps", 1, *attention]
        records, *_, printed = train(args, "bi", model, rows, given, lambda ends: len(ends) == 6)
        found.append(np.array([[line["loss"], line["grad_norm"]] for line in records]))
        assert ("without padding" in printed) != bool(attention), "texts are padded"
    loss, norm = abs(found[0] / found[1] - 1).max(0)
    fall = f"losses of 6 steps, {found[0][0, 0]:.4f} to {found[0][-1, 0]:.4f}"
    return {"note": f"{fall}, differ by at most {loss:.1e}, norms by {norm:.1e}"}


def check_resume(args):
    """Fill args.resumed with whether a run under --full_determinism that is killed and resumed repeats a whole one."""

    def launch(name, *more):
        flags = ["--max_steps", 40, "--save_steps", 10, "--logging_steps", 1, "--full_determinism", "true"]
        words = words_of(args, "22M", 8 if args.tiny else 256, *flags, "--output_dir", f"{args.folder}/{name}", *more)
        with open(f"{args.folder}/{name}.log", "w") as log:
            return subprocess.Popen([sys.executable, train_bi_encoder.__file__, *words], stdout=log, stderr=log)

    def read(name):
        return [json.loads(line) for line in Path(f"{args.folder}/{name}/metrics.jsonl").read_text().splitlines()]

    whole, killed = launch("whole"), launch("killed")
    while killed.poll() is None and not glob.glob(f"{args.folder}/killed/checkpoints/step_*[0-9]"):
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    steps = read("killed")[-1]["step"]
    codes = [whole.wait(), launch("killed", "--resume").wait()]
    losses = [[(line["step"], line["loss"], line["grad_norm"]) for line in read(name)] for name in ("whole", "killed")]
    weights = [Path(f"{args.folder}/{name}/model/model.safetensors").read_bytes() for name in ("whole", "killed")]
    equal = f"losses and norms equal {losses[0] == losses[1]}, weights equal {weights[0] == weights[1]}"
    args.resumed = f"killed after step {steps} of 40, exit codes {codes}, {equal}"


def wait_for_resume(args):
    """What check_resume found, which runs beside the other checks."""
    args.resuming.join(60)
    logs = [Path(f"{args.folder}/{name}.log").read_text().strip()[-300:] for name in ("whole", "killed")]
    return {"note": args.resumed or f"failed: {logs}"}
