"""The embedding cache of eval_incremental.py against MTEB's CachedEmbeddingWrapper, both sides in turns.

    pip install --no-deps --target MTEB_FOLDER mteb==2.26.24 polars==2.1.0 polars-runtime-32==2.1.0
    python benchmarks/cache_peer.py MODEL_FOLDER BEIR_FOLDER --mteb MTEB_FOLDER [--rounds 1] [--limit 500]

Each side is a command that returns the vectors of a corpus (ours: --export_vectors). For each step the table has the
seconds of the whole command, the texts it encoded (after a kill: those of the second start), and how many vectors
differ by more than 1e-4 from those of SentenceTransformer.encode. A kill is a SIGKILL at the mean processor time of a
first and a second pass. Retraining is noise on the matrices of the model in its folder. Titles are part of the texts,
but for the step in which they have a column, as in MTEB's corpora. Writes cache_peer.json.
"""

import argparse
import functools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[1]
OURS, PEER = "eval_incremental.py", "CachedEmbeddingWrapper"


def encode_peer(args):
    """In a process of its own: write the vectors of a corpus by CachedEmbeddingWrapper, print the texts encoded."""
    from datasets import Dataset
    from mteb import TaskMetadata
    from mteb._create_dataloaders import create_dataloader
    from mteb.models import CachedEmbeddingWrapper, SentenceTransformerEncoderWrapper
    from mteb.models.cache_wrappers.cache_backends import FaissCache, NumpyCache
    from mteb.types import PromptType
    from sentence_transformers import SentenceTransformer

    class CountingEncoder(SentenceTransformerEncoderWrapper):
        encoded = 0

        def encode(self, inputs, **options):
            self.encoded += len(inputs.dataset)
            return super().encode(inputs, **options)

    task = TaskMetadata(name="Local", description="", type="Retrieval", category="t2t", eval_langs=["eng-Latn"],
                        main_score="ndcg_at_10", dataset={"path": "local", "revision": "1"})  # fmt: skip
    options = {"task_metadata": task, "prompt_type": PromptType.document}
    model = SentenceTransformer(args.model, device="cpu")
    model.max_seq_length = args.max_length
    encoder = CountingEncoder(model)
    wrapper = CachedEmbeddingWrapper(encoder, args.cache, cache_backend=FaissCache if args.faiss else NumpyCache)
    rows = [{"id": row["_id"]} | row for row in read_rows(args.beir)]
    inputs = create_dataloader(Dataset.from_list(rows), **options)  # as MTEB's search does
    vectors = wrapper.encode(inputs, hf_split="test", hf_subset="default", show_progress_bar=False, **options)
    wrapper.close()
    Path(args.out).mkdir()
    pq.write_table(pa.table({"vector": list(vectors)}), f"{args.out}/vectors.parquet")
    print(encoder.encoded, "texts encoded")


def read_rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(side, args, model, corpus, cache, out, faiss):
    """Return the command of a side that writes the vectors of a corpus to a new folder `out`."""
    common = ["--max_length", args.max_length]
    if side == OURS:
        names = [name for name in ("_id", "title", "text") if name in read_rows(corpus)[0]]
        return [ROOT / OURS, "--model_name_or_path", model, "--corpus", corpus, "--corpus_columns", *names, *common,
                "--cache_dir", cache, "--cache_dtype", "float32", "--export_vectors", out,
                "--corpus_chunk_size", args.corpus_chunk_size]  # fmt: skip
    return [Path(__file__).resolve(), model, corpus, *common, "--cache", cache, "--out", out, *["--faiss"] * faiss]


def run(words, mteb, seconds=resource.RLIM_INFINITY):
    """Run a command, killed after so many seconds of processor time; return (seconds, seconds of processor time, texts
    encoded or the error)."""

    def processor_time():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    started, used = time.perf_counter(), processor_time()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": mteb}
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_CPU, (seconds, seconds))  # then SIGKILL
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, cwd=ROOT,
                          env=environment, preexec_fn=limit)  # fmt: skip
    result = int(done.stdout.split()[0].replace(",", "")) if done.returncode == 0 else done.stderr[-300:]
    assert (done.returncode == -9) == (seconds != resource.RLIM_INFINITY), (done.returncode, result)
    return time.perf_counter() - started, processor_time() - used, result


def reference(model, corpus, max_length):
    """Return the (n, D) vectors of SentenceTransformer.encode."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(model), device="cpu")
    model.max_seq_length = max_length
    return model.encode([f"{row.get('title', '')} {row['text']}".strip() for row in read_rows(corpus)])


def wrong_vectors(out, expected):
    """Return how many vectors of the Parquet files in a folder differ by more than 1e-4 from the expected ones."""
    found = pq.read_table(out)["vector"].combine_chunks().flatten().to_numpy().reshape(expected.shape)
    return int((abs(found - expected).max(1) > 1e-4).sum())


def retrain(model):
    """Add noise to the matrices of the model in a folder."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() > 1 and weight.is_floating_point():
            weights[name] = weight + 0.3 * weight.std() * torch.randn_like(weight)
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("beir")
    parser.add_argument("--mteb", help="folder that contains the package mteb")
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit", type=int, help="documents; none: all")
    parser.add_argument("--corpus_chunk_size", type=int, default=512, help="of ours: what a kill costs at most")
    for name in ("cache", "out"):  # of the process of the peer
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--faiss", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cache:
        return encode_peer(args)
    results = {}  # {step: {side: [[seconds, of processor time, encoded or error, wrong]]}}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        titled = read_rows(f"{args.beir}/corpus.jsonl")[: args.limit]
        rows = [{"_id": row["_id"], "text": f"{row.get('title', '')} {row['text']}".strip()} for row in titled]
        changed = [row | {"text": f"Changed: {row['text']}"} if n % 100 == 0 else row for n, row in enumerate(rows)]
        corpus, changed = write_rows(folder / "corpus.jsonl", rows), write_rows(folder / "changed.jsonl", changed)
        titled = write_rows(folder / "titled.jsonl", [row | {"title": row.get("title", "")} for row in titled[:200]])
        repeated = write_rows(folder / "repeated.jsonl", [rows[0] | {"_id": "copy"}, *rows[:200]])
        model = folder / "model"
        steps = {  # {name: (corpus, cache, FAISS backend)}
            "first pass": (corpus, "cache", False),
            "second pass": (corpus, "cache", False),
            "1 % of the documents changed": (changed, "cache", False),
            "killed in the middle, started again": (corpus, "killed", False),
            "titles in a column of their own, 200 documents": (titled, "titled", False),
            "one of 200 documents twice, FAISS backend": (repeated, "repeated", True),
            "the same, second pass": (repeated, "repeated", True),
            "model retrained in its folder": (corpus, "cache", False),
        }
        expected = {}
        for turn in range(args.rounds):
            shutil.copytree(args.model, model, dirs_exist_ok=True)
            for number, (step, (source, cache, faiss)) in enumerate(steps.items()):
                if "retrained" in step:
                    retrain(model)
                if step not in expected:
                    expected[step] = reference(model, source, args.max_length)
                for side in (OURS, PEER):
                    out = folder / f"{turn}-{number}-{side}"
                    words = command(side, args, model, source, folder / f"{turn}-{side}-{cache}", out, faiss)
                    if "killed" in step:
                        used = [results[name][side][-1][1] for name in ("first pass", "second pass")]
                        run(words, args.mteb, int(sum(used) / 2))
                    measured = run(words, args.mteb)
                    wrong = wrong_vectors(out, expected[step]) if out.is_dir() else None
                    results.setdefault(step, {}).setdefault(side, []).append([*measured, wrong])
                    print(f"round {turn + 1}, {step}, {side}: {results[step][side][-1]}", file=sys.stderr)
    print(f"| step | {OURS}: seconds, texts encoded, wrong vectors | {PEER} |\n|---|---|---|")
    for step, sides in results.items():
        cells = [f"{statistics.median(run[0] for run in found):.1f}, {found[-1][2]}, {found[-1][3]}"
                 for found in sides.values()]  # fmt: skip
        print(f"| {step} |", " | ".join(cells), "|")
    Path("cache_peer.json").write_text(json.dumps({"arguments": vars(args), "results": results}, indent=1))


if __name__ == "__main__":
    main()
