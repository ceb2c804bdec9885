"""On one GPU in bfloat16, in eight minutes and one process: trainers and evaluator beside sentence-transformers.

    python prepare_corpus.py
    PYTHONPATH=. HF_HUB_OFFLINE=1 python benchmarks/gpu.py 'data/python_code/train/*.parquet' [--seconds 440]

Models have the shapes of all-MiniLM-L6 (22M) and BERT-base (110M), random weights and a tokenizer made for the source:
no download. First what must be right (gpu_check.py), then rates, those that decide most first; a side that would not
fit into --seconds is skipped and named. "Same kernel": sentence-transformers concatenates texts where flash attention
is installed; here transformers gets torch's own kernel in place of that package, as the trainers use it. cuDNN's
attention, which plans for each shape anew, is off on all sides.

A rate excludes the first steps. Tokens are without padding. FLOPs of a token: 6 per weight, 12 x layers x width x
length for attention (Chowdhery et al. 2022, appendix B); what is computed twice counts once. "passes" are forward
passes of a step; "kept" those that were not run twice; "of bare": tokens/s as a share of those of a bare pass. Each
side is written to --output (JSON Lines) as it ends, the table at the end, also on SIGTERM. Without a GPU, --tiny tries
the benchmark itself: attention text by text stands in.
"""

import argparse
import gc
import io
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from unittest import mock

import datasets
import gpu_check
import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from gpu_check import CUDA, DEVICE, LOGGED, TRAINERS, check_kernel, compare, train, wait_for_resume, words_of
from sentence_transformers import SentenceTransformer, cross_encoder, sentence_transformer

import eval_incremental
import train_bi_encoder

WARM_STEPS = 4
# ---- sides: each returns its part of a line of the table


def rates(args, model, rows, tokens, seconds, passes=3):
    """Return rates; passes: 3 forward and backward, 1 forward alone."""
    width, layers, _ = args.shapes[model]
    lengths = args.lengths["code"]
    flops = 24 * width**2 * layers + 4 * layers * width * (lengths**2.0).sum() / lengths.sum()
    speed = {"rows_per_second": rows / seconds} if rows else {}
    mfu = passes * flops * tokens / seconds / args.peak_tflops / 1e12
    return speed | {"tokens_per_second": tokens / seconds, "mfu": mfu}


def ours(args, model, rows, flags=(), kind="bi", gigabytes=None):
    """The rates of a trainer: defaults but for `flags`; gigabytes: of a smaller GPU."""

    def is_enough(ends):
        return len(ends) > 1 and ends[-1] - ends[0] > args.side_seconds

    total_memory = TRAINERS[kind].total_memory
    if CUDA and gigabytes:
        total = torch.cuda.get_device_properties(0).total_memory
        limit = int(min(gigabytes * 1e9, total))
        torch.cuda.set_per_process_memory_fraction(limit / total)
        total_memory = lambda _: limit  # noqa: E731
    with mock.patch.object(TRAINERS[kind], "total_memory", total_memory):
        name = "reranker" if kind == "cross" else model
        records, ends, passes, printed = train(args, kind, name, rows, flags, is_enough)
    records, elapsed = records[1:], ends[-1] - ends[0]
    seconds = np.array([rows * LOGGED / line["rows_per_second"] for line in records])
    tokens = sum(seconds * [line["tokens_per_second"] for line in records])
    found, kept = np.mean(passes[LOGGED:], axis=0)
    return rates(args, model, rows * LOGGED * len(records), tokens, elapsed) | {
        "waiting": sum(seconds * [line["data_wait_fraction"] for line in records]) / elapsed,
        "padding": np.mean([line["padding_fraction"] for line in records]),
        "passes": found,
        "kept": kept,
        "micro_batch": re.search(r"passes of ([\d,]+) tokens", printed)[1],
        "loss": records[-1]["loss"],
    }


class Clock(transformers.TrainerCallback):
    """Count the seconds of a Trainer's steps after the first ones; waits for the device at both ends alone."""

    def __init__(self, limit):
        self.limit = limit
        self.started = self.seconds = None

    def on_step_end(self, args, state, control, **_):
        self.steps = state.global_step - WARM_STEPS
        control.should_training_stop = self.steps > 1 and time.perf_counter() - self.started > self.limit
        if self.steps == 0 or control.should_training_stop:
            if CUDA:
                torch.cuda.synchronize()
            self.started = self.started or time.perf_counter()
            self.seconds = time.perf_counter() - self.started


def peer(args, model, rows, attention="flash_attention_2", tokens=None, kind="bi"):
    """The rates of sentence-transformers' trainer; tokens: of the mini-batches of its cached loss."""
    cross = kind == "cross"
    package, prefix = (cross_encoder, "CrossEncoder") if cross else (sentence_transformer, "SentenceTransformer")
    folder = args.models["reranker" if cross else model]
    made = getattr(package, prefix)(folder, model_kwargs={"attn_implementation": attention}, device=DEVICE)
    made.max_seq_length = args.max_length
    data = datasets.Dataset.from_dict(args.texts)
    both = sum(args.lengths.values())  # tokens of a row
    if cross:
        loss = package.losses.BinaryCrossEntropyLoss(made)
        data = data.add_column("label", [float(number % 2) for number in range(len(data))])
        both = np.minimum(both - 1, args.max_length)
    elif tokens:
        loss = package.losses.CachedMultipleNegativesRankingLoss(made, mini_batch_num_tokens=tokens)
    else:
        loss = package.losses.MultipleNegativesRankingLoss(made)
    settings = getattr(package, f"{prefix}TrainingArguments")(
        tempfile.mkdtemp(dir=args.folder), max_steps=100_000, per_device_train_batch_size=rows, bf16=True,
        report_to="none", learning_rate=2e-5, logging_steps=100_000, save_strategy="no", disable_tqdm=True,
        dataloader_num_workers=8 if CUDA else 0, use_cpu=not CUDA,
    )  # fmt: skip
    clock, passes = Clock(args.side_seconds), []
    body = next(part for part in made.modules() if isinstance(part, transformers.PreTrainedModel))
    body.get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    trainer = getattr(package, f"{prefix}Trainer")(made, settings, train_dataset=data, loss=loss, callbacks=[clock])
    with redirect_stdout(io.StringIO()):
        trainer.train()
    count = rows * clock.steps
    more = {"passes": len(passes) / (clock.steps + WARM_STEPS), "micro_batch": tokens and f"{tokens:,}"}
    return rates(args, model, count, count * both.mean(), clock.seconds) | more


def timed(function):
    """Return the seconds that a function takes, the device included."""
    started = time.perf_counter()
    function()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def encode(args, model, batch_size=None):
    """The rates of encoding 20,000 codes: of the evaluator, and again from its cache; with a batch size, of
    SentenceTransformer.encode in bfloat16 with the same kernel."""
    count = 500 if args.tiny else 20_000
    texts, more = args.texts["code"][:count], {}
    warm = [text[::-1] for text in texts[: count // 5]]
    if batch_size:
        options = {"attn_implementation": "flash_attention_2", "dtype": torch.bfloat16}
        made = SentenceTransformer(args.models[model], model_kwargs=options, device=DEVICE)
        made.max_seq_length = args.max_length
        run = partial(made.encode, batch_size=batch_size, show_progress_bar=False)
        run(warm)
        seconds = timed(partial(run, texts))
    else:
        settings = eval_incremental.Args(max_length=args.max_length, cache_dir=tempfile.mkdtemp(dir=args.folder))
        encoder = eval_incremental.CachedEncoder(args.models[model], settings, Accelerator(cpu=not CUDA))
        encoder.encode(warm, "document")
        run = partial(encoder.encode, texts, "document")
        seconds = timed(run)
        more = {"note": f"from the cache {count / timed(run):,.0f} rows/s"}
        encoder.close()
    return rates(args, model, count, args.lengths["code"][:count].sum(), seconds, passes=1) | more


def bare(args, model, tokens):
    """Tokens a second of one pass of concatenated texts, forward and backward, without a trainer."""
    script, accelerator = train_bi_encoder, Accelerator(cpu=not CUDA)
    settings = script.parse_args(words_of(args, model, 64, "--micro_batch_tokens", tokens))
    made = script.load_model(settings).to(accelerator.device).train()
    for module in script.transformers_of(made):
        script.concatenate_inside(module)
    count = int(1.2 * tokens / sum(args.lengths.values()).mean()) + 1
    texts = [("text", "", text) for column in args.texts.values() for text in column[:count]]
    features = script.convert_arrays(script.make_micro_batches(made, texts, settings, accelerator)[0][-1])
    features = transformers.BatchEncoding(features).to(accelerator.device).data

    def run(count):
        for _ in range(count):
            script.encode(made, "text", features, accelerator).square().sum().backward()

    run(3)
    count = max(2, int(args.side_seconds / 2 / timed(partial(run, 1))))
    size = len(features["places"])
    return rates(args, model, None, size * count, timed(partial(run, count))) | {"micro_batch": f"{size:,}"}


# ---- all sides

PADDED = ["--attn_implementation", "sdpa"]
PAIRS = ["--num_negatives", 1, "--loss", "listwise_ce"]
CROSS = {"model": "110M", "rows": 256, "kind": "cross", "flags": PAIRS}
WORKERS = {count: ["--dataloader_num_workers", count] for count in (0, 4)}
SIDES = [  # (what, side, its options), those that decide most first
    ("kernel", check_kernel, {}),
    ("concatenated and padded", compare, {"model": "22M", "rows": 256}),
    ("concatenated and padded", compare, {"model": "110M", "rows": 256}),
    ("concatenated and padded", compare, {"model": "ModernBERT", "rows": 128}),
    ("concatenated and padded", compare, {"model": "Qwen3", "rows": 128, "flags": ["--pooling", "lasttoken"]}),
    ("killed and resumed", wait_for_resume, {}),
    ("evenstep", ours, {"model": "110M", "rows": 256}),
    ("peer, plain loss, same kernel", peer, {"model": "110M", "rows": 256}),
    ("evenstep, padded", ours, {"model": "110M", "rows": 256, "flags": PADDED}),
    ("evenstep", ours, {"model": "22M", "rows": 1024}),
    ("peer, plain loss, same kernel", peer, {"model": "22M", "rows": 1024}),
    ("evenstep", ours, {"model": "110M", "rows": 1024}),
    ("peer, cached loss, same kernel", peer, {"model": "110M", "rows": 1024, "tokens": 65_536}),
    ("peer, cached loss, same kernel", peer, {"model": "110M", "rows": 1024, "tokens": 16_384}),
    ("peer, plain loss, same kernel", peer, {"model": "110M", "rows": 1024}),  # may not fit
    ("evenstep", ours, {"model": "22M", "rows": 256}),
    ("peer, plain loss, same kernel", peer, {"model": "22M", "rows": 256}),
    ("bare pass", bare, {"model": "110M", "tokens": 65_536}),
    ("bare pass", bare, {"model": "22M", "tokens": 65_536}),
    ("evaluator", encode, {"model": "110M"}),
    ("encode(), same kernel, batches of 32", encode, {"model": "110M", "batch_size": 32}),
    ("encode(), same kernel, batches of 256", encode, {"model": "110M", "batch_size": 256}),
    ("evaluator", encode, {"model": "22M"}),
    ("encode(), same kernel, batches of 256", encode, {"model": "22M", "batch_size": 256}),
    ("cross-encoder: evenstep, two pairs a row", ours, CROSS),
    ("cross-encoder: evenstep, padded, two pairs a row", ours, CROSS | {"flags": [*PAIRS, *PADDED]}),
    ("cross-encoder: peer, padded", peer, {"model": "110M", "rows": 512, "kind": "cross", "attention": "sdpa"}),
    ("cross-encoder: peer, same kernel", peer, {"model": "110M", "rows": 512, "kind": "cross"}),
    *((f"evenstep, {size} GB", ours, {"model": "110M", "rows": 256, "gigabytes": size}) for size in (16, 24, 40, 80)),
    *((f"evenstep, {n} workers", ours, {"model": "22M", "rows": 1024, "flags": WORKERS[n]}) for n in WORKERS),
    ("evenstep, --grad_cache true", ours, {"model": "110M", "rows": 1024, "flags": ["--grad_cache", "true"]}),
    ("peer, plain loss, padded", peer, {"model": "110M", "rows": 256, "attention": "sdpa"}),
    ("peer, plain loss, same kernel, again", peer, {"model": "110M", "rows": 256}),
    ("evenstep, again", ours, {"model": "110M", "rows": 256}),
    ("evenstep, 24 GB", ours, {"model": "110M", "rows": 1024, "gigabytes": 24}),
]


def run_side(args, side, options):
    """Return what a side measures, or what went wrong; leave the device as it was."""
    started = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, 60 + 3 * args.side_seconds)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    try:
        line = side(args, **options)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(str(error).split())[:200]
        line = {"problem": f"{type(error).__name__}: {message} ({Path(place.filename).name}:{place.lineno})"}
    signal.setitimer(signal.ITIMER_REAL, 0)
    gc.collect()
    if CUDA:
        line["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return line | {"seconds": time.perf_counter() - started}


FORMS = {"model": "", "rows": ",", "side": "", "rows_per_second": ",.0f", "tokens_per_second": ",.0f", "mfu": ".1%",
         "of_bare": ".0%", "waiting": ".1%", "padding": ".1%", "passes": ".1f", "kept": ".1f", "micro_batch": "",
         "peak_gb": ".1f", "loss": ".3f", "seconds": ".0f"}  # fmt: skip


def print_table(lines):
    """Print the lines as Markdown."""
    bare_passes = [line for line in lines if line["side"] == "bare pass" and "mfu" in line]
    speeds = {line["model"]: line["tokens_per_second"] for line in bare_passes}
    print(f"\n| {' | '.join(FORMS)} |\n{'|---' * len(FORMS)}|")
    for line in lines:
        line["side"] = ": ".join(filter(None, (line["side"], line.get("problem") or line.get("note"))))
        if "passes" in line and line["model"] in speeds:
            line["of_bare"] = line["tokens_per_second"] / speeds[line["model"]]
        cells = ("" if line.get(name) is None else format(line[name], form) for name, form in FORMS.items())
        print(f"| {' | '.join(cells)} |")


def raise_timeout(*_):
    raise TimeoutError("the side took too long")


def main():
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="Parquet file or glob with columns docstring and code")
    parser.add_argument("--seconds", type=float, default=440, help="of all sides")
    parser.add_argument("--side_seconds", type=float, default=6, help="that a side measures")
    parser.add_argument("--only", nargs="+", default=[""], help="run only sides whose model or title contains one")
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--peak_tflops", type=float, default=989, help="of the GPU, dense bfloat16 (H100, H200: 989)")
    parser.add_argument("--tiny", action="store_true", help="small models and batches, to try the benchmark itself")
    parser.add_argument("--output", default="gpu.jsonl")
    args = parser.parse_args()
    os.environ |= {"ACCELERATE_MIXED_PRECISION": "bf16", "TQDM_DISABLE": "1"}
    signal.signal(signal.SIGALRM, raise_timeout)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    gpu_check.install_attention()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        datasets.config.HF_DATASETS_CACHE = args.folder / "datasets"
        args.models = gpu_check.write_models(args)
        args.resumed = None
        args.resuming = threading.Thread(target=gpu_check.check_resume, args=[args], daemon=True)
        if any(word in " killed and resumed" for word in args.only):
            args.resuming.start()
        name = torch.cuda.get_device_name() if CUDA else "CPU"
        versions = f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"
        print(f"{versions}, {len(os.sched_getaffinity(0))} cores", flush=True)
        try:
            for what, side, options in SIDES:
                line = {"model": options.get("model", ""), "rows": options.get("rows"), "side": what}
                if not any(word in f"{line['model']} {what}" for word in args.only):
                    continue
                left = args.seconds - (time.perf_counter() - started)
                small = {name: options[name] // 32 for name in ("rows", "tokens") if args.tiny and name in options}
                if left < 2 * args.side_seconds:
                    lines.append(line | {"problem": f"skipped, {left:.0f} s left"})
                else:
                    lines.append(line | run_side(args, side, options | small))
                print(json.dumps(lines[-1]), flush=True)
                with open(args.output, "a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
        finally:
            print_table(lines)


if __name__ == "__main__":
    main()
