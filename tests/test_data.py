"""Reading, order and resume of the data; shares, micro-batches, loss and schedule, each against a plain loop."""

import csv
import gzip
import json
import math
from collections import Counter
from itertools import combinations, islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from accelerate import Accelerator
from sentence_transformers.sentence_transformer import losses

import train_bi_encoder as script


@pytest.fixture(autouse=True)
def small_units(monkeypatch, tmp_path):
    """Record batches of 50 rows and blocks of 4, so that a few hundred rows meet every boundary."""
    monkeypatch.setattr(script, "READ_ROWS", 50)
    monkeypatch.setattr(script, "BLOCK", 4)
    monkeypatch.chdir(tmp_path)


def options(**changed):
    args = script.parse_args(["--train_data", "unused", "--data_cache", "cache", "--columns", "a", "b"])
    for name, value in changed.items():
        setattr(args, name, value)
    return args


def table(count, first=0):
    """Rows of text that is hard on text formats: quotes, tabs, line ends, accents, an empty-looking start."""
    return [
        {"a": f'row {i}: "quoted", ça\nand\r\nmore', "b": f" positive {i}\ttab\u2028{'x' * (i % 17)}"}
        for i in range(first, first + count)
    ]


def write(path, rows, rows_per_batch=37):
    """Write rows in the format of the suffix, and return the path as str."""
    name = str(path)
    if ".parquet" in name:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=rows_per_batch)
    elif ".arrow" in name:
        arrow = pa.Table.from_pylist(rows)
        with pa.OSFile(name, "wb") as sink, pa.ipc.new_file(sink, arrow.schema) as writer:
            writer.write_table(arrow, max_chunksize=rows_per_batch)
    else:
        opener = gzip.open if name.endswith(".gz") else zstandard.open if name.endswith(".zst") else open
        with opener(path, "wt", encoding="utf-8", newline="") as file:
            if "json" in name:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            elif ".txt" in name:
                file.writelines(row["text"] + "\n" for row in rows)
            else:
                writer = csv.DictWriter(file, rows[0].keys(), delimiter="\t" if ".tsv" in name else ",")
                writer.writeheader()
                writer.writerows(rows)
    return name


@pytest.fixture
def shards(tmp_path):
    """Three shards of 197 rows in all, as Parquet."""
    sizes, files, first = (101, 57, 39), [], 0
    for number, size in enumerate(sizes):
        files.append(write(tmp_path / f"{number}.parquet", table(size, first)))
        first += size
    return files


KINDS = [script.MappedSource, script.StreamSource]


def take(source, count, position=None):
    return list(islice(source.rows(position), count))


def number_of(row):
    """The running number that `table` wrote into the row."""
    return int(row[0][0].split(":")[0].removeprefix("row "))


def numbers(source, count, position=None):
    return [number_of(row) for row, _ in take(source, count, position)]


# -------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "suffix",
    [
        "parquet",
        "arrow",
        "json",
        "jsonl",
        "jsonl.gz",
        "jsonl.zst",
        "ndjson",
        "csv",
        "csv.gz",
        "csv.zst",
        "tsv",
        "tsv.gz",
    ],
)
def test_every_format_gives_the_same_rows(tmp_path, kind, suffix):
    rows = table(130)
    file = write(tmp_path / f"part.{suffix}", rows)
    source = kind(0, script.list_files(file), options(shuffle_buffer=0))
    found = [row for row, _ in take(source, 130)]
    assert [row[0] for row in found] == [[row["a"], row["b"]] for row in rows]
    assert [row[2:] for row in found] == [(file, i) for i in range(130)]


@pytest.mark.parametrize("kind", KINDS)
def test_arrow_stream_as_datasets_writes(tmp_path, kind):
    import datasets

    rows = table(130)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "saved/data-00000-of-00001.arrow", tmp_path / "saved/*.arrow", tmp_path / "saved"):
        source = kind(0, script.list_files(str(path)), options(shuffle_buffer=0))
        assert [row[0] for row, _ in take(source, 130)] == [[row["a"], row["b"]] for row in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", ["txt", "txt.gz", "txt.zst"])
def test_text_lines_with_the_column_named_twice(tmp_path, kind, suffix):
    lines = [{"text": f"line {i}, é"} for i in range(70)]
    file = write(tmp_path / f"lines.{suffix}", lines)
    source = kind(0, [file], options(shuffle_buffer=0, columns=["text", "text"]))
    assert [row[0] for row, _ in take(source, 70)] == [[line["text"]] * 2 for line in lines]


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst"])
def test_several_compressed_frames_in_one_file(tmp_path, suffix):
    """Logs are appended to frame by frame (cat a.gz b.gz); reading only the first frame would lose rows in silence."""
    parts = [write(tmp_path / f"{i}.{suffix}", table(60, 60 * i)) for i in range(3)]
    (tmp_path / f"all.{suffix}").write_bytes(b"".join(Path(part).read_bytes() for part in parts))
    source = script.StreamSource(0, [str(tmp_path / f"all.{suffix}")], options(shuffle_buffer=0))
    assert numbers(source, 181) == [*range(180), 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl", "csv"])
def test_labels(tmp_path, kind, suffix):
    rows = [{"score": i / 8, **row} for i, row in enumerate(table(60))]
    args = options(shuffle_buffer=0, label_column="score")
    source = kind(0, [write(tmp_path / f"part.{suffix}", rows)], args)
    found = [script.checked(row, args) for row, _ in take(source, 60)]
    assert [row[1] for row in found] == [i / 8 for i in range(60)]
    assert [row[0] for row in found] == [[row["a"], row["b"]] for row in rows]


def test_lists_of_labels(tmp_path):
    rows = [{"scores": [i / 8, 1.0], **row} for i, row in enumerate(table(5))]
    args = options(shuffle_buffer=0, label_column="scores")
    for suffix in ("parquet", "jsonl"):
        source = script.MappedSource(0, [write(tmp_path / f"part.{suffix}", rows)], args)
        assert [script.checked(row, args)[1] for row, _ in take(source, 5)] == [[i / 8, 1.0] for i in range(5)]


def test_a_changed_file_is_not_read_from_its_old_copy(tmp_path):
    for first in (0, 100):
        file = write(tmp_path / "part.jsonl", table(20, first))
        assert numbers(script.MappedSource(0, [file], options(shuffle_buffer=0)), 20) == list(range(first, first + 20))


# ---------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buffer", [1, 3, 60, 64, 196, 197, 198, 10_000])
def test_each_pass_holds_every_row_once_in_another_order(shards, kind, buffer):
    order = numbers(kind(0, shards, options(shuffle_buffer=buffer)), 3 * 197)
    passes = [order[i : i + 197] for i in range(0, len(order), 197)]
    assert all(sorted(one) == list(range(197)) for one in passes)
    if kind is script.MappedSource or buffer > 1:  # a stream with a buffer of one row shuffles its shards alone
        assert all(one != other for one, other in combinations([list(range(197)), *passes], 2))


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_decided_by_seed_and_place_in_the_mix(shards, kind):
    def order(index, **changed):
        return numbers(kind(index, shards, options(shuffle_buffer=60, **changed)), 197)

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != order(0, seed=1)


def test_without_a_shuffle_buffer_mapped_and_streamed_rows_keep_the_order_of_the_files(shards):
    for kind in KINDS:
        assert numbers(kind(0, shards, options(shuffle_buffer=0)), 400) == [i % 197 for i in range(400)]


def test_rows_of_a_mapped_batch_come_from_far_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(script, "BLOCK", 100)
    file = write(tmp_path / "large.parquet", table(10_000), 1000)
    order = numbers(script.MappedSource(0, [file], options(shuffle_buffer=2000)), 10_000)
    for first in range(0, 9_984, 64):
        batch = sorted(order[first : first + 64])
        assert batch[-1] - batch[0] > 3_000
        assert len({row // 100 for row in batch}) >= 10  # of the 20 blocks of a window
        assert np.median(np.diff(batch)) > 3  # neighbours in the file are no neighbours in a batch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buffer", [0, 7, 60, 10_000])
def test_resume_at_every_row_gives_the_rest(shards, kind, buffer):
    """Starts, middles and ends of windows, shards and passes: whatever row was last, the next ones follow."""
    args = options(shuffle_buffer=buffer)
    whole = take(kind(0, shards, args), 2 * 197 + 90)
    for done in range(1, 2 * 197 + 10, 1 if kind is script.MappedSource else 5):
        position = json.loads(json.dumps(whole[done - 1][1]))
        assert take(kind(0, shards, args), 80, position) == whole[done : done + 80], done
    for done in (60, 101, 158, 196, 197, 198, 394):
        assert take(kind(0, shards, args), len(whole) - done, whole[done - 1][1]) == whole[done:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", [1, 30, 101, 120, 196])
def test_held_out_rows_are_never_trained_on(shards, kind, held):
    source = kind(0, shards, options(shuffle_buffer=60))
    assert sorted(map(number_of, source.hold_out(held))) == list(range(held))
    for one in np.array_split(numbers(source, 3 * (197 - held)), 3):
        assert sorted(one.tolist()) == list(range(held, 197))
    whole = take(source, 2 * (197 - held))
    for row, position in whole[:: max(1, len(whole) // 20)]:
        fresh = kind(0, shards, options(shuffle_buffer=60))
        fresh.hold_out(held)
        place = whole.index((row, position)) + 1
        assert take(fresh, len(whole) - place, position) == whole[place:]


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_rows_of_several_sources_in_proportion(tmp_path, shards, kind):
    args = options(shuffle_buffer=60)
    other = write(tmp_path / "other.jsonl", table(100, 1000))
    sources = [kind(0, shards, args), kind(1, [other], args)]
    held = Counter(number_of(row) >= 1000 for row in script.hold_out(sources, [3, 1], 40))
    assert held == {False: 30, True: 10}
    batches = islice(script.row_batches(sources, [3, 1], args, None), 10)
    trained = {number_of(row) for rows, _ in batches for row in rows}
    assert not trained & {*range(30), *range(1000, 1010)}


# --------------------------------------------------------------------------------------------------------- batches


def mixed(tmp_path, kind, args, broken=()):
    """Two sources: 150 rows in two shards, and 90 rows (numbered from 1000) in one; rows in `broken` lack a text."""
    rows = [{**row, "a": "" if i in broken else row["a"]} for i, row in enumerate(table(150))]
    files = [write(tmp_path / "x0.jsonl", rows[:80]), write(tmp_path / "x1.jsonl", rows[80:])]
    return [kind(0, files, args), kind(1, [write(tmp_path / "y.jsonl.gz", table(90, 1000))], args)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mix_by", ["row", "batch"])
@pytest.mark.parametrize("length_window", [1, 3])
def test_batches_resume_at_every_batch(tmp_path, kind, mix_by, length_window):
    """Three and more passes over each source, with rows to skip; positions go through JSON as in a checkpoint."""
    args = options(mix_by=mix_by, length_window=length_window, batch_size=8, shuffle_buffer=40, on_bad_row="skip")

    def batches(count, position=None):
        sources = mixed(tmp_path, kind, args, broken={0, 77, 78, 149})
        return list(islice(script.row_batches(sources, [2, 1], args, position), count))

    whole = batches(90)
    assert all(len(rows) == 8 for rows, _ in whole)
    assert whole[-1][1]["skipped"] >= 8
    for done in (1, 2, 3, 4, 5, 6, 10, 17, 18, 29, 45, 61, 89):
        position = json.loads(json.dumps(whole[done - 1][1]))
        assert batches(90 - done, position) == whole[done:], done


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length_window", [1, 4])
def test_batches_of_one_source(tmp_path, kind, length_window):
    args = options(mix_by="batch", length_window=length_window, batch_size=8, shuffle_buffer=40)
    batches = islice(script.row_batches(mixed(tmp_path, kind, args), [2, 1], args, None), 60)
    origins = [{number_of(row) >= 1000 for row in rows} for rows, _ in batches]
    assert all(len(origin) == 1 for origin in origins)
    assert sum(origin == {True} for origin in origins) == 20


@pytest.mark.parametrize("weights", [[1], [2, 1], [0.3, 0.7], [5, 3, 2], [1, 1, 1], [10, 1, 1, 1, 1, 1]])
def test_mixing_is_within_a_row_of_the_weights_at_any_time(weights):
    picks = [0] * len(weights)
    for total in range(1, 300):
        picks[script.due(picks, weights)] += 1
        for count, weight in zip(picks, weights):
            assert abs(count - total * weight / sum(weights)) < 1 + 1e-9, (total, picks)


def test_length_window_groups_rows_by_length_and_loses_none(tmp_path):
    """The same rows as without it, in batches less unlike in length, and long batches not always first."""
    rows = [{"a": f"row {i}: " + "word " * (i * 7919 % 97), "b": "positive"} for i in range(240)]
    file = write(tmp_path / "lengths.jsonl", rows)

    def batches(window):
        args = options(length_window=window, batch_size=8, shuffle_buffer=40)
        found = islice(script.row_batches([script.MappedSource(0, [file], args)], [1], args, None), 30)
        return [rows for rows, _ in found]

    def spread(batch):
        lengths = [len(row[0][0]) for row in batch]
        return max(lengths) - min(lengths)

    plain, grouped = batches(1), batches(10)
    assert sorted(number_of(row) for batch in grouped for row in batch) == list(range(240))
    assert np.mean(list(map(spread, grouped))) < 0.3 * np.mean(list(map(spread, plain)))
    longest = [max(range(10), key=lambda i: len(grouped[start + i][0][0][0])) for start in (0, 10, 20)]
    assert len(set(longest)) > 1


def test_rows_per_epoch_is_a_fresh_sample_each_epoch(shards):
    args = options(train_data=shards, rows_per_epoch=96, batch_size=32, eval_rows=5, shuffle_buffer=60)
    sources, weights, held, _, rows, _, _ = script.open_data(args, Accelerator(cpu=True))
    assert (rows, len(held)) == (96, 5)
    batches = list(islice(script.row_batches(sources, weights, args, None), 6))
    epochs = [{(row[2], row[3]) for rows, _ in batches[i : i + 3] for row in rows} for i in (0, 3)]
    assert [len(epoch) for epoch in epochs] == [96, 96]
    assert not epochs[0] & epochs[1]


@pytest.mark.parametrize("strategy,rows", [("first_exhausted", 394), ("all_exhausted", 400)])
def test_rows_of_an_epoch_of_mixed_sources(tmp_path, shards, strategy, rows):
    """Half from 197 rows and half from 200: 394 rows of the mix read the one to its end, 400 the other too."""
    other = write(tmp_path / "other.jsonl", table(200, 1000))
    args = options(mixing_weights=[1, 1], stopping_strategy=strategy, eval_rows=0)
    args.train_data = [str(tmp_path / "*.parquet"), other]
    assert script.open_data(args, Accelerator(cpu=True))[4] == rows


# ------------------------------------------------------------------------------------------ shares and micro-batches


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_deal_is_a_balanced_permutation(processes):
    lengths = np.random.default_rng(0).pareto(1.5, 257).astype(int) + 1
    shares = script.deal(list(lengths), processes)
    assert sorted(sum(shares, [])) == list(range(257))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    totals = [lengths[share].sum() for share in shares]
    assert max(totals) - min(totals) <= lengths.max()
    snake = script.deal(list(range(32 * processes)), processes)  # what one turn gives more, the next takes back
    assert len({sum(share) for share in snake}) == 1


def test_micro_batches_keep_the_budget_and_put_a_long_text_alone():
    lengths = list(np.random.default_rng(0).integers(0, 90, 200)) + [500, 0, 0]
    cuts = script.cut_micro_batches(lengths, 256)
    assert sorted(sum(cuts, [])) == list(range(203))
    assert cuts[0] == [200]  # 500 tokens, above the budget
    assert all(len(cut) * max(lengths[i] for i in cut) <= 256 for cut in cuts[1:])
    assert [lengths[i] for cut in cuts for i in cut] == sorted(lengths, reverse=True)
    assert script.cut_micro_batches([], 256) == []


def test_micro_batches_are_no_smaller_than_they_must_be():
    lengths = [10] * 100
    assert list(map(len, script.cut_micro_batches(lengths, 256))) == [25] * 4


# -------------------------------------------------------------------------------------------- loss and learning rate


def embeddings(count, columns, dimensions=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, dimensions, generator=generator, dtype=torch.float64) for _ in range(columns)]


def naive_infonce(columns, ids, temperature, symmetric):
    """-log of a softmax for each row, one score at a time; what equals the row's own texts is no negative."""
    cosine = torch.nn.functional.cosine_similarity
    rows, total = len(columns[0]), 0.0
    for i in range(rows):
        scores = []
        for column in range(1, len(columns)):
            for j in range(rows):
                own = (column, j) == (1, i)
                same_anchor = column == 1 and ids[0][j] == ids[0][i]
                if own or not (same_anchor or ids[column][j] == ids[1][i]):
                    scores.append(cosine(columns[0][i], columns[column][j], dim=0).item() / temperature)
        total -= cosine(columns[0][i], columns[1][i], dim=0).item() / temperature
        total += math.log(sum(map(math.exp, scores)))
    if symmetric:
        return (total / rows + naive_infonce([columns[1], columns[0]], [ids[1], ids[0]], temperature, False)) / 2
    return total / rows


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("duplicates", [False, True])
def test_infonce_is_the_naive_loop(symmetric, columns, duplicates):
    ids = torch.arange(columns * 7).view(columns, 7)
    if duplicates:
        ids[0, 3] = ids[0, 1]  # an anchor twice
        ids[1, 5] = ids[1, 2]  # a positive twice
        ids[-1, 4] = ids[1, 6]  # with 4 columns, another row's positive as hard negative
    given = embeddings(7, columns)
    loss = script.infonce(given, ids, temperature=0.1, symmetric=symmetric)
    assert loss.item() == pytest.approx(naive_infonce(given, ids.tolist(), 0.1, symmetric), abs=1e-6)


def test_duplicates_change_the_loss():
    """Guards the test above: the mask has to matter."""
    ids = torch.arange(14).view(2, 7)
    plain = script.infonce(embeddings(7, 2), ids)
    ids[1, 5] = ids[1, 2]
    assert abs(plain - script.infonce(embeddings(7, 2), ids)) > 1e-3


@pytest.mark.parametrize("columns", [2, 3])
def test_infonce_is_that_of_sentence_transformers(columns):
    given = embeddings(9, columns)
    reference = losses.MultipleNegativesRankingLoss(None, scale=20.0).compute_loss_from_embeddings(given, None)
    ids = torch.arange(columns * 9).view(columns, 9)
    assert script.infonce(given, ids).item() == pytest.approx(reference.item(), abs=1e-6)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("scores", [1, 20, 60])
def test_chunks_of_scores_change_neither_loss_nor_gradient(monkeypatch, symmetric, scores):
    ids = torch.arange(21).view(3, 7)
    ids[1, 5], ids[0, 3] = ids[1, 2], ids[0, 1]
    results = []
    for limit in (script.MAX_SCORES, scores):
        monkeypatch.setattr(script, "MAX_SCORES", limit)
        given = [column.requires_grad_() for column in embeddings(7, 3)]
        loss = script.infonce(given, ids, symmetric=symmetric)
        loss.backward()
        results.append([loss.detach(), *(column.grad for column in given)])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_matryoshka_is_the_sum_over_cut_embeddings():
    """Of the loss on the first so many dimensions; the whole embedding is among them when it is named."""
    model = SimpleNamespace(similarity_fn_name="cosine")
    ids, given = torch.arange(14).view(2, 7), embeddings(7, 2)
    loss = script.make_loss(options(matryoshka_dims=[8, 3]), model)(given, ids, None)
    parts = [script.infonce([column[:, :d] for column in given], ids) for d in (8, 3)]
    assert loss.item() == pytest.approx(sum(parts).item(), abs=1e-9)


def test_schedule():
    args = options(learning_rate=2.0, warmup_ratio=0.1)
    linear = [script.schedule(step, 100, args) for step in range(100)]
    assert linear[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert linear[10] == pytest.approx(2.0)
    assert linear[55] == pytest.approx(1.0)
    assert linear[99] == pytest.approx(2 / 90)
    args.lr_schedule = "cosine"
    assert script.schedule(10, 100, args) == pytest.approx(2.0)
    assert script.schedule(55, 100, args) == pytest.approx(1.0)
    assert script.schedule(100, 100, args) == pytest.approx(0.0)
    args.warmup_ratio = 0.0
    assert script.schedule(0, 100, args) == pytest.approx(2.0)
    assert script.schedule(0, 1, args) == pytest.approx(2.0)
