"""Kill and resume: train_bi_encoder.py against SentenceTransformerTrainer, mapped and streaming through a buffer.

    python benchmarks/resume_peer.py [--rows 3000] [--kills 12]

Each side trains a static model for one epoch, undisturbed, and again while it is killed by SIGKILL: in turn at any
moment and while a checkpoint is being written. After each kill it resumes from its newest checkpoint; where that
fails, the checkpoint is removed, as a user would, and the failure is counted. Rows are compared by the last execution
of each step. Writes resume_peer.json.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
BATCH, SAVE_EVERY = 32, 4


def train_ours(args, folder):
    """In a process of its own: the script, with a line of its rows, as hashes of their anchors, for each batch."""
    sys.path.insert(0, str(ROOT))
    import train_bi_encoder as script

    forward_backward = script.forward_backward

    def logged(model, batch, *rest):
        with open(f"{folder}/rows", "a") as file:
            file.write(json.dumps([batch.index, batch.hashes[:, 0].tolist()]) + "\n")
        return forward_backward(model, batch, *rest)

    script.forward_backward = logged
    flags = ["--model_name_or_path", args.model, "--train_data", args.source, "--columns", "question", "answer",
             "--batch_size", BATCH, "--max_steps", args.rows // BATCH, "--save_steps", SAVE_EVERY, "--eval_rows", 0,
             "--shuffle_buffer", 500, "--learning_rate", 0.01, "--output_dir", f"{folder}/run", "--resume",
             *["--streaming"] * ("streaming" in args.side)]  # fmt: skip
    script.main(script.parse_args(list(map(str, flags))))


def train_peer(args, folder):
    """The same by SentenceTransformerTrainer; the row's number is its label, which the loss does not look at."""
    from datasets import load_dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    class Trainer(SentenceTransformerTrainer):
        def compute_loss(self, model, inputs, *rest, **options):
            with open(f"{folder}/rows", "a") as file:
                file.write(json.dumps([self.state.global_step, inputs["label"].tolist()]) + "\n")
            return super().compute_loss(model, inputs, *rest, **options)

    streaming = "streaming" in args.side
    data = load_dataset("parquet", data_files=args.source, split="train", cache_dir=f"{folder}/cache",
                        streaming=streaming)  # fmt: skip
    if streaming:
        data = data.shuffle(seed=0, buffer_size=500)
    model = SentenceTransformer(args.model, device="cpu")
    settings = SentenceTransformerTrainingArguments(
        f"{folder}/run", max_steps=args.rows // BATCH, per_device_train_batch_size=BATCH, use_cpu=True, seed=0,
        report_to="none", learning_rate=0.01, save_steps=SAVE_EVERY, save_total_limit=2, disable_tqdm=True,
        accelerator_config={"dispatch_batches": False},  # else a static model on a stream fails
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=data, loss=MultipleNegativesRankingLoss(model))
    found = list(Path(folder).glob("run/checkpoint-*"))
    trainer.train(resume_from_checkpoint=True if found else None)
    model.save_pretrained(f"{folder}/run/model")


def checkpoints(folder):
    """Folders of the checkpoints of either side, those being written among them."""
    return {*folder.glob("run/checkpoints/*"), *folder.glob("run/checkpoints/.*"), *folder.glob("run/checkpoint-*")}


def run(args, side, folder, kills, dice):
    """Seconds of each start until its first step, kills, and starts that failed, of one training to its end."""
    folder.mkdir()
    done, failed, waits = 0, 0, []
    while True:
        log = folder / "rows"
        before = log.stat().st_size if log.exists() else 0
        known = checkpoints(folder)
        command = [sys.executable, __file__, "--side", side, "--model", args.model, "--source", args.source, "--rows",
                   args.rows, "--folder", folder]  # fmt: skip
        started, first = time.perf_counter(), None
        with open(folder / "log", "w") as said:
            process = subprocess.Popen(list(map(str, command)), stdout=said, stderr=said)
        steps = before + dice.randint(200, 4000)  # bytes of the log
        while process.poll() is None:
            size = log.stat().st_size if log.exists() else 0
            if first is None and size > before:
                first = time.perf_counter() - started
            at_checkpoint = done % 2 and size > before and checkpoints(folder) - known
            if done < kills and (at_checkpoint or (not done % 2 and size > steps)):
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.0005)
        waits += [first] if first else []
        status = process.wait()
        if status == -signal.SIGKILL:
            done += 1
        elif status == 0:
            return waits, done, failed
        else:
            failed += 1
            print(f"{side}: {(folder / 'log').read_text().strip().splitlines()[-1][:200]}", file=sys.stderr)
            if not checkpoints(folder):
                sys.exit("it fails without a checkpoint, too")
            shutil.rmtree(max(checkpoints(folder), key=lambda path: path.stat().st_mtime))


def outcome(folder):
    """(rows of each step by its last doing, hash of the final weights)."""
    steps = dict(json.loads(line) for line in (folder / "rows").read_text().splitlines())
    (weights,) = folder.glob("run/model/**/model.safetensors")
    return steps, hashlib.sha256(weights.read_bytes()).hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--output", default="resume_peer.json")
    for name in ("side", "model", "source", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.side:
        return (train_ours if "evenstep" in args.side else train_peer)(args, args.folder)

    import pyarrow as pa
    import pyarrow.parquet as pq
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    table = []
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        rows = [{"question": f"how to compute item {n}", "answer": f"def item_{n}(x): return x[{n * 7919 % 1009}]",
                 "label": n} for n in range(args.rows)]  # fmt: skip
        args.source, args.model = str(work / "rows.parquet"), str(work / "model")
        pq.write_table(pa.Table.from_pylist(rows), args.source)
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["[UNK]"], show_progress=False)
        tokenizer.train_from_iterator((row["answer"] for row in rows), trainer)
        static = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=64)], device="cpu")
        static.save_pretrained(args.model)
        for side in ("evenstep, mapped", "trainer, mapped", "evenstep, streaming", "trainer, streaming"):
            dice, kind = random.Random(0), side.replace(", ", "-")
            run(args, side, work / f"{kind}-whole", 0, dice)
            waits, kills, failed = run(args, side, work / f"{kind}-killed", args.kills, dice)
            (whole, weights), (killed, again) = outcome(work / f"{kind}-whole"), outcome(work / f"{kind}-killed")
            seen = Counter(row for rows in killed.values() for row in rows)
            lost = len({row for rows in whole.values() for row in rows} - set(seen))
            twice = sum(count - 1 for count in seen.values())
            moved = sum(rows != killed.get(step) for step, rows in whole.items())
            table.append([side, kills, failed, lost, twice, moved, weights == again, statistics.median(waits)])
            print(f"{table[-1]}", file=sys.stderr)
    print("| side | kills | resumes that failed | rows lost | rows twice | steps on other rows | same weights "
          "| seconds from start to first step |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for side, kills, failed, lost, twice, moved, same, wait in table:
        print(f"| {side} | {kills} | {failed} | {lost} | {twice} | {moved} | {'yes' if same else 'no'} | {wait:.1f} |")
    Path(args.output).write_text(json.dumps({"table": table}, indent=1))


if __name__ == "__main__":
    main()
