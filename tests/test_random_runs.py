"""Trainers by random settings: two runs that must agree do.

Either the layout of the second one differs (processes, workers, passes), without dropout: the first two steps have the
same losses and gradient norms to 1e-5. Or it is killed and resumed: the same bytes. A dozen seeds; hundreds under
`make chaos`. A failed one prints the command that repeats it.
"""

import json
import os
import random
import signal
import time

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import CHAOS, ROOT, TRAINERS, launch, lines_of, mark_slow
from forked import Forked

SEEDS = range(*map(int, os.environ.get("SEEDS", f"0:{CHAOS * 6 or 12}").split(":")))
QUICK = [0, 4, 5, 6]  # both trainers in two layouts, or killed
STEPS = 3  # of a run that is killed


@pytest.fixture(scope="module")
def files(tmp_path_factory, rows):
    """Three sources of a few dozen rows: a file, a compressed file, and shards of a table; some rows are bad."""
    folder = tmp_path_factory.mktemp("sources")
    texts = [(row["docstring"][:60], row["code"][:90]) for row in rows[:120]]
    table = [
        {"query": query, "positive": code if i % 17 else "", "negative": texts[i - 1][1], "score": i % 3 / 2,
         "drawn": [texts[i - n][1][: 20 * n] for n in range(2, 5)]}
        for i, (query, code) in enumerate(texts)
    ]  # fmt: skip
    for name, part in (("a.jsonl", table[:50]), ("b.jsonl.gz", table[50:80])):
        with fsspec.open(f"{folder}/{name}", "wt", compression="infer") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in part)
    for shard in range(2):
        pq.write_table(pa.Table.from_pylist(table[80 + shard :: 2]), folder / f"c-{shard}.parquet", row_group_size=8)
    return [f"{folder}/{name}" for name in ("a.jsonl", "b.jsonl.gz", "c-*.parquet")]


def draw_sources(rng, files):
    """Return the words of --train_data and of what belongs to it."""
    chosen = rng.sample(files, rng.choice([1, 2, 2, 3]))
    by_batch = rng.random() < 0.5
    if by_batch and rng.random() < 0.5:
        chosen[0] = json.dumps({"path": chosen[0], "query_prompt": "find:", "columns": ["query", "negative"]})
    words = ["--train_data", *chosen, "--mix_by", "batch" if by_batch else "row"]
    if rng.random() < 0.5:
        words += ["--mixing_weights", *[rng.choice([1, 2, 5]) for _ in chosen]]
    if rng.random() < 0.5:
        words += ["--streaming"]
    return words


def draw_settings(rng, name, model, static):
    """Return the words of what both runs share."""
    columns = rng.choice(["", " negative", *[" drawn --num_negatives 2"] * 2])
    losses = {
        "train_bi_encoder": [
            f"positive{columns}",
            f'positive{columns} --loss_kwargs {{"symmetric":true}}',
            f"positive{columns} --matryoshka_dims 32 8",
            "positive --label_column score --loss CosineSimilarityLoss",
        ],
        "train_cross_encoder": [
            f"positive{columns or ' --num_negatives 3'}",
            f"positive{columns or ' --num_negatives 3'} --loss lambdaloss",
            "positive --label_column score",
        ],
    }
    is_static = name == "train_bi_encoder" and rng.random() < 0.3
    return [
        *["--model_name_or_path", static if is_static else model],
        *["--columns", "query", *rng.choice(losses[name]).split(), "--on_bad_row", "skip"],
        *f"--batch_size {rng.choice([5, 8, 13])} --gradient_accumulation_steps {rng.choice([1, 1, 2])}".split(),
        *f"--shuffle_buffer {rng.choice([0, 7, 60])} --length_window {rng.choice([1, 3])}".split(),
        *f"--eval_rows {rng.choice([0, 4, 6])} --eval_steps {rng.choice([1, 2])} --seed {rng.choice([0, 1])}".split(),
        *["--rows_per_epoch", rng.choice([0, 30]), "--lora_rank", 0 if is_static else rng.choice([0, 0, 2])],
        *["--stopping_strategy", rng.choice(["first_exhausted", "all_exhausted"])],
        *["--logging_steps", 1, "--learning_rate", 1e-3, "--max_length", 32],
    ]


def draw_kind(seed, flags, others):
    """Return flags with another kind of model for a third of the bi-encoders of transformers; others: such models."""
    rng = random.Random(f"kind {seed}")
    model = rng.choice([None, None, None, None, *others])
    if model is None:
        return flags
    flags = [*flags, "--model_name_or_path", model]
    for name, instead in ("--matryoshka_dims", []), ("--loss", ["--loss_kwargs", '{"in_batch":false}']):
        if name in flags:  # these are of dense models
            first = flags.index(name)
            last = next(index for index in range(first + 1, len(flags)) if str(flags[index]).startswith("--"))
            flags[first:last] = instead
    if "--label_column" in flags:
        first = flags.index("--label_column")
        flags[first : first + 2] = []
    return flags


def draw_layout(rng, is_static):
    """Return (words, processes): how a run computes what another layout must compute too."""
    words = f"--micro_batch_tokens {rng.choice([100, 300, 2000])} --dataloader_num_workers {rng.choice([0, 0, 1, 2])}"
    words += rng.choice(["", " --grad_cache true", " --grad_cache false"])
    words += "" if is_static else rng.choice(["", "", " --gradient_checkpointing"])
    return words.split(), rng.choice([1, 1, 2])


def data_state(output):
    last = max((output / "checkpoints").iterdir())
    state = json.loads((last / "state.json").read_text())["progress"]["data_state"]
    for position in state["sources"].values():
        position.pop("stream")  # a position in a stream has several forms
    return state


def kill(process, output, step):
    """Kill a run that has saved a step, if it still runs; return whether it did."""
    while process.poll() is None and not (output / f"checkpoints/step_{step:08}").exists():
        time.sleep(0.002)
    process.send(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("seed", mark_slow(SEEDS, [seed for seed in SEEDS if seed in QUICK]))
def test_two_runs_agree(files, bert, reranker, static, splade, colbert, tmp_path, report, seed):
    rng = random.Random(f"draw1956 {seed}")  # its first dozen: most pairs, kills of two batches a step
    name = rng.choice(TRAINERS)
    model = bert if name == "train_bi_encoder" else reranker  # with fresh weights, gradients cancel
    script, one, two = ROOT / f"{name}.py", tmp_path / "one", tmp_path / "two"
    flags = [*draw_sources(rng, files), *draw_settings(rng, name, model, static)]
    is_static = static in flags
    if bert in flags:
        flags = draw_kind(seed, flags, [splade, colbert])
    layout, processes = draw_layout(rng, is_static)
    print(f"again: SEEDS={seed}:{seed + 1} .venv/bin/python -m pytest {__file__}")
    print(name, *flags)
    if rng.random() < 0.5:
        other, others = draw_layout(rng, is_static)
        print("layouts:", *layout, processes, "and", *other, others)
        flags += ["--max_steps", 2, "--save_steps", 0, *([] if is_static else ["--dropout", 0])]
        launch(script, *flags, *layout, "--output_dir", one, processes=processes)
        launch(script, *flags, *other, "--output_dir", two, processes=others)
        for line, expected in zip(lines_of(two), lines_of(one), strict=True):
            assert line.keys() == expected.keys()
            names = {"loss", "grad_norm"} & set(line) if line["step"] else set(line)  # of step 0: what is held out
            wanted = {name: expected[name] for name in names}
            assert {name: line[name] for name in names} == pytest.approx(wanted, rel=1e-5, nan_ok=True)
        assert data_state(two) == data_state(one)
        report(f"random settings: `{name}.py` in two layouts", 1, "the same losses and gradients, to 1e-5")
        return
    flags += ["--max_steps", STEPS, "--save_steps", 1]
    workers = ["--dataloader_num_workers", rng.choice([0, 1])]  # these may differ
    print("killed:", *layout, processes, *workers)
    launch(script, *flags, *layout, "--output_dir", one, processes=processes)
    killed = Forked(script, [*flags, *layout, *workers, "--output_dir", two], processes)
    kill(killed, two, rng.randrange(1, STEPS))
    launch(script, *flags, *layout, "--output_dir", two, "--resume", processes=processes)
    assert repr(lines_of(two)) == repr(lines_of(one)) and data_state(two) == data_state(one)  # NaN is NaN
    one, two = ((folder / "model/model.safetensors").read_bytes() for folder in (one, two))
    assert one == two
    report(f"random settings: `{name}.py` killed and resumed", 1, "the same bytes")
