"""Training speed against the trainers of sentence-transformers: same rows, model, batch, loss and threads, in turns.

    python benchmarks/train_speed.py MODEL_FOLDER SOURCE [--rows 256] [--rounds 2] [--cached 16] [--cached_tokens 1024]
    python benchmarks/train_speed.py MODEL_FOLDER SOURCE --cross_encoder [--rows 256] [--rounds 1]
    python benchmarks/train_speed.py MODEL_FOLDER SOURCE --model_type SparseEncoder [or MultiVectorEncoder]

Every side trains one epoch over the same rows in a process of its own. Bi-encoders: train_bi_encoder.py, and
SentenceTransformerTrainer with its plain loss and with its cached one, in mini-batches of so many texts or tokens.
--model_type: a SparseEncoder with FLOPS, or a MultiVectorEncoder, made of a dense model (new weights of words, or a
new projection), beside SparseEncoderTrainer or MultiVectorEncoderTrainer and their losses. --cross_encoder: binary
cross-entropy of labelled pairs, half of them with the document of another row, by train_cross_encoder.py, by
CrossEncoderTrainer, and by the latter with a batch accumulated from --accumulate smaller ones, which pad less. Rates
are rows over the seconds of all steps but the first, medians over the rounds; ratios are within a round. The mean
loss shows that all do the same work. Memory is the peak of each process, imports included. Writes train_speed.json.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(command, **options):
    """Run a command; return (standard output, peak of its resident memory in GB)."""
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, **options)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    return output, usage.ru_maxrss * 1024 / 1e9


def ours(args, rows, columns, folder):
    """Return (rows a second, mean loss, peak memory) of our trainer."""
    script = f"train_{'cross' if args.cross_encoder else 'bi'}_encoder.py"
    command = [sys.executable, ROOT / script, "--model_name_or_path", args.model, "--train_data", rows, "--columns",
               *columns, "--batch_size", args.batch_size, "--max_length", args.max_length, "--eval_rows", 0,
               "--logging_steps", 1, "--output_dir", folder, "--save_steps", 0]  # fmt: skip
    command += ["--label_column", "label"] if args.cross_encoder else []
    environment = {**os.environ, "ACCELERATE_MIXED_PRECISION": args.mixed_precision}  # as `accelerate launch` does
    _, memory = run(command, env=environment)
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(args.batch_size / line["rows_per_second"] for line in lines[1:])
    return (len(lines) - 1) * args.batch_size / seconds, statistics.mean(line["loss"] for line in lines), memory


def peer(args, rows, folder, options):
    """Return the same of the library's trainer; options: of its cached loss, or {"accumulate": batches}."""
    command = [sys.executable, __file__, args.model, rows, "--peer", json.dumps(options), "--output", folder,
               "--batch_size", args.batch_size, "--max_length", args.max_length, "--mixed_precision",
               args.mixed_precision, "--model_type", args.model_type,
               *["--cross_encoder"] * args.cross_encoder]  # fmt: skip
    output, memory = run(command)
    return *json.loads(output.splitlines()[-1]), memory


def train_peer(args):
    """In a process of its own: train one epoch and print [rows a second, mean loss]."""
    import sentence_transformers
    from datasets import load_dataset
    from sentence_transformers import cross_encoder, multi_vector_encoder, sentence_transformer, sparse_encoder
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        ends = []

        def on_step_end(self, *_, **__):
            self.ends.append(time.perf_counter())

    options = json.loads(args.peer)
    accumulate = options.pop("accumulate", 1)
    packages = {"SentenceTransformer": sentence_transformer, "SparseEncoder": sparse_encoder,
                "MultiVectorEncoder": multi_vector_encoder, "CrossEncoder": cross_encoder}  # fmt: skip
    prefix = "CrossEncoder" if args.cross_encoder else args.model_type
    package = packages[prefix]
    losses = importlib.import_module(f"{package.__name__}.losses")
    cached = "Cached" * bool(options)
    if args.cross_encoder:
        model = cross_encoder.CrossEncoder(args.model, device="cpu", num_labels=1)
        loss = losses.BinaryCrossEntropyLoss(model)
    else:
        model = getattr(sentence_transformers, prefix)(args.model, device="cpu")
        if prefix == "SparseEncoder":
            inner = losses.SparseMultipleNegativesRankingLoss(model)
            weights = {"query_regularizer_weight": 5e-5, "document_regularizer_weight": 3e-5}
            loss = getattr(losses, f"{cached}SpladeLoss")(model, inner, **weights, **options)
        else:
            name = "MultiVector" * (prefix == "MultiVectorEncoder") + "MultipleNegativesRankingLoss"
            loss = getattr(losses, cached + name)(model, **options)
    model.max_seq_length = args.max_length
    settings = getattr(package, f"{prefix}TrainingArguments")(
        args.output, num_train_epochs=1, per_device_train_batch_size=args.batch_size // accumulate, use_cpu=True,
        gradient_accumulation_steps=accumulate, report_to="none", learning_rate=2e-5, warmup_ratio=0.1,
        logging_steps=1, save_strategy="no", disable_tqdm=True, bf16=args.mixed_precision == "bf16",
    )  # fmt: skip
    rows = load_dataset("parquet", data_files=args.source, split="train", cache_dir=args.output)
    clock = Clock()
    trainer = getattr(package, f"{prefix}Trainer")(model, settings, train_dataset=rows, loss=loss, callbacks=[clock])
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    rate = (len(clock.ends) - 1) * args.batch_size / (clock.ends[-1] - clock.ends[0])
    print(json.dumps([rate, statistics.mean(losses)]))


def write_model(args, folder):
    """Write the model of args.model_type that begins with the weights of args.model; return its folder."""
    import torch
    from sentence_transformers import MultiVectorEncoder, SparseEncoder
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    torch.manual_seed(0)
    if args.model_type == "SparseEncoder":
        AutoModelForMaskedLM.from_pretrained(args.model).save_pretrained(folder)
        AutoTokenizer.from_pretrained(args.model).save_pretrained(folder)
        SparseEncoder(folder, device="cpu").save_pretrained(folder)
    else:
        MultiVectorEncoder(args.model, device="cpu").save_pretrained(folder)
    return folder


def write_rows(args, path):
    """Write the first rows of the source, labelled for a cross-encoder; return the columns of their texts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(args.source, columns=args.columns).slice(0, args.rows)
    if args.cross_encoder:
        queries, documents = table.to_pydict().values()
        labels = [float(i % 2) for i in range(len(queries))]
        documents = [documents[i] if label else documents[i - 2] for i, label in enumerate(labels)]
        table = pa.table({"query": queries, "document": documents, "label": labels})
    pq.write_table(table, path)
    return table.column_names[:2] if args.cross_encoder else table.column_names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("source", help="Parquet file")
    parser.add_argument("--cross_encoder", action="store_true")
    parser.add_argument("--model_type", default="SentenceTransformer")
    parser.add_argument("--columns", nargs="+", default=["docstring", "code"])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--cached", type=int, nargs="*", default=[16], help="mini-batch sizes of the cached loss")
    parser.add_argument("--cached_tokens", type=int, nargs="*", default=[1024], help="the same, in tokens")
    parser.add_argument("--accumulate", type=int, nargs="*", default=[8], help="batches of a cross-encoder's step")
    parser.add_argument("--mixed_precision", default="no", choices=["no", "bf16"], help="of all sides")
    parser.add_argument("--output", default="train_speed.json")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer is not None:
        return train_peer(args)

    os.environ["HF_HUB_OFFLINE"] = "1"
    options = [{"accumulate": count} for count in args.accumulate]
    if not args.cross_encoder:
        options = [{"mini_batch_size": size} for size in args.cached]
        options += [{"mini_batch_num_tokens": tokens} for tokens in args.cached_tokens]
    with tempfile.TemporaryDirectory() as folder:
        if args.model_type != "SentenceTransformer":
            args.model = write_model(args, f"{folder}/model")
        rows = f"{folder}/rows.parquet"
        columns = write_rows(args, rows)
        sides = {"evenstep": lambda out: ours(args, rows, columns, out)}
        for chosen in [{}, *options]:
            name = f"the library's trainer, {json.dumps(chosen) if chosen else 'plain'}"
            sides[name] = lambda out, chosen=chosen: peer(args, rows, out, chosen)
        measured = {name: [] for name in sides}
        for turn in range(args.rounds):
            for number, (name, run) in enumerate(sides.items()):
                measured[name].append(run(f"{folder}/{turn}-{number}"))
                print(f"round {turn + 1}, {name}: {measured[name][-1][0]:.2f} rows/s", file=sys.stderr)
    print("| side | rows/s | Evenstep, times as fast | mean loss | GB |\n|---|---|---|---|---|")
    for name, runs in measured.items():
        rate, _, memory = map(statistics.median, zip(*runs))
        ratios = [mine[0] / run[0] for mine, run in zip(measured["evenstep"], runs)]
        faster = f"{statistics.median(ratios):.2f}x ({', '.join(f'{ratio:.2f}' for ratio in ratios)})"
        print(f"| {name} | {rate:.2f} | {'' if name == 'evenstep' else faster} | {runs[0][1]:.3f} | {memory:.2f} |")
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "runs": measured}, indent=1))


if __name__ == "__main__":
    main()
