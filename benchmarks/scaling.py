"""What a second core brings, and what share of bare passes is left: one process of one thread, and two, in turns.

    python benchmarks/scaling.py MODEL_FOLDER SOURCE [--columns docstring code] [--steps 5] [--rounds 3]
    python benchmarks/scaling.py MODEL_FOLDER SOURCE --only loss

Trainers do the same batches on both sides (rates over all steps but the first, losses beside them), the evaluator
encodes the same texts. "bare": forward and backward passes of the model over texts of --length tokens, 2,048 in a
pass, in one process and in two independent ones: the limit of the machine; "of bare" is a trainer's share of it in one
process. Each command has as many cores as processes. Ratios are within a round, medians over the rounds. Then "loss":
InfoNCE of 16,384 random embeddings in parts by rows, as P processes compute it: seconds of the slowest part on one
thread, and the error of the summed gradient. Writes scaling.json.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIDES = ["train_bi_encoder.py", "train_cross_encoder.py", "eval_incremental.py", "bare", "loss"]


def cores(count):
    """Return what keeps a command, its threads for reading and tokenizing included, on the first `count` cores."""
    return functools.partial(os.sched_setaffinity, 0, sorted(os.sched_getaffinity(0))[:count])


def launch(script, flags, processes):
    """Run a script on so many processes of one thread each, on as many cores."""
    config = ROOT / "accelerate_configs" / ("cpu.yaml" if processes == 1 else "multi_cpu.yaml")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", 0,
               "--config_file", config, "--num_processes", processes, ROOT / script, *flags]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = list(map(str, command))
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, preexec_fn=cores(processes))


def train(script, flags, processes, folder):
    """Return (tokens a second, mean loss) of a trainer."""
    launch(script, [*flags, "--output_dir", folder], processes)
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()][1:]
    seconds = [1 / line["rows_per_second"] for line in lines]  # of a row; all steps have as many
    tokens = sum(line["tokens_per_second"] * second for line, second in zip(lines, seconds))
    return tokens / sum(seconds), statistics.mean(line["loss"] for line in lines)


def encode(flags, processes, folder):
    """Return (texts a second, nDCG@10) of the evaluator with an empty cache."""
    launch("eval_incremental.py", [*flags, "--cache_dir", f"{folder}/cache", "--output_dir", folder], processes)
    (seen,) = json.loads((Path(folder) / "metrics.json").read_text())["results"]
    return seen["texts"]["encoded"] / seen["seconds"], seen["metrics"]["nDCG@10"]["mean"]


def bare_loop(args):
    """In a process of its own: print the tokens a second of --seconds of bare passes."""
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(args.model, device="cpu").float().train()
    texts = max(1, 2048 // args.length)
    done = -1
    started = 0.0
    while done < 0 or time.perf_counter() - started < args.seconds:
        ids = torch.randint(1000, 20_000, (texts, args.length))
        model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"].sum().backward()
        done += 1
        started = started if done else time.perf_counter()  # the first pass has warmed up
    print(texts * args.length * done / (time.perf_counter() - started))


def bare(args, processes):
    """Return (tokens a second, 0) of so many processes at once that share nothing."""
    command = [sys.executable, __file__, args.model, "", "--bare"]
    command += ["--length", str(args.length), "--seconds", str(args.seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pinned = {"env": environment, "preexec_fn": cores(processes)}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, **pinned) for _ in range(processes)]
    return sum(float(process.communicate()[0]) for process in both), 0.0


def split_loss(rows):
    """Print what a process computes of InfoNCE of `rows` rows among P."""
    import torch
    import torch.nn.functional as F

    sys.path.insert(0, str(ROOT))
    import train_bi_encoder as script

    torch.set_num_threads(1)
    torch.manual_seed(0)
    embeddings = torch.randn(2, rows, 384)
    embeddings = F.normalize(embeddings[:1] + embeddings, dim=-1).requires_grad_()  # positives resemble their anchors
    hashes = torch.arange(2 * rows).view(2, -1)
    whole = None
    print(f"| processes | seconds of a process, {rows:,} rows | error of the summed gradient |\n|---|---|---|")
    for processes in (1, 2, 4, 8):
        embeddings.grad = None
        seconds = []
        for own in torch.arange(rows).chunk(processes):
            started = time.perf_counter()
            batch = script.WholeBatch(hashes, labels=None, own_rows=own, step=0)
            script.infonce(list(embeddings), batch, temperature=0.05).backward()
            seconds.append(time.perf_counter() - started)
        whole = embeddings.grad if whole is None else whole
        error = ((embeddings.grad - whole).norm() / whole.norm()).item()
        print(f"| {processes} | {max(seconds):.2f} | {error:.1e} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("source", help="Parquet file")
    parser.add_argument("--columns", nargs="+", default=["docstring", "code"])
    parser.add_argument("--only", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--texts", type=int, default=1000, help="pairs that the evaluator encodes")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument(
        "--length", type=int, default=176, help="of bare passes; 176: what a token of the demo attends to"
    )
    parser.add_argument("--seconds", type=float, default=15, help="of bare passes")
    parser.add_argument("--loss_rows", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="scaling.json")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        return bare_loop(args)

    import pyarrow.parquet as pq

    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        pairs = f"{folder}/pairs.parquet"
        pq.write_table(pq.read_table(args.source, columns=args.columns).slice(0, args.texts), pairs)
        common = ["--model_name_or_path", args.model, "--columns", *args.columns, "--max_length", args.max_length]
        steps = ["--train_data", args.source, "--eval_rows", 0, "--save_steps", 0, "--logging_steps", 1, "--max_steps",
                 args.steps, *common]  # fmt: skip
        bi = [*steps, "--batch_size", 64]
        cross = [*steps, "--batch_size", 24, "--num_negatives", 1]
        texts = ["--pairs", pairs, "--corpus_chunk_size", 32, *common]
        sides = {
            "train_bi_encoder.py": lambda n, out: train("train_bi_encoder.py", bi, n, out),
            "train_cross_encoder.py": lambda n, out: train("train_cross_encoder.py", cross, n, out),
            "eval_incremental.py": lambda n, out: encode(texts, n, out),
            "bare": lambda n, out: bare(args, n),
        }
        runs = {name: [] for name in sides if name in args.only}
        for turn in range(args.rounds):
            for number, name in enumerate(runs):
                runs[name].append([sides[name](n, f"{folder}/{turn}-{number}-{n}") for n in (1, 2)])
                one, two = runs[name][-1]
                print(f"round {turn + 1}, {name}: {one[0]:.2f}, {two[0]:.2f} a second", file=sys.stderr)
    print("| | tokens (evaluator: texts) a second, 1 process | 2 processes | ratio | of bare | loss, or nDCG@10 |")
    print("|---|---|---|---|---|---|")
    for name, measured in runs.items():
        one, two = (statistics.median(pair[side][0] for pair in measured) for side in (0, 1))
        ratio = statistics.median(pair[1][0] / pair[0][0] for pair in measured)
        shares = [pair[0][0] / limit[0][0] for pair, limit in zip(measured, runs.get("bare", []))]
        share = f"{statistics.median(shares):.1%}" if shares and "train" in name else ""
        print(f"| {name} | {one:,.1f} | {two:,.1f} | {ratio:.2f} | {share} "
              f"| {measured[0][0][1]:.5f}, {measured[0][1][1]:.5f} |")  # fmt: skip
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "runs": runs}, indent=1))
    if "loss" in args.only:
        split_loss(args.loss_rows)


if __name__ == "__main__":
    main()
