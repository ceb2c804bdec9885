"""Gradients and batches are the same on 1, 2 and 4 processes."""

import functools
import json
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, launch, quick_first

PROCESSES = pytest.mark.parametrize("processes", quick_first([1, 2, 4], 2))
LOSSES = ["infonce", "symmetric", "negatives", "matryoshka", "lists", "margin_mse", "kl", "CoSENTLoss", "TripletLoss"]


@pytest.fixture(scope="module")
def launched(tmp_path_factory, rows, bert):
    """launched(processes) returns, for each of them, {setting: (gradient, loss, micro-batches, bad rows)} and the rows
    of 40 batches."""
    folder = tmp_path_factory.mktemp("gradients")
    rows = [{name: text[:100] for name, text in row.items()} for row in rows]
    codes = [row["code"] for row in rows]
    more = [{"label": i % 7 / 7, "wrong": codes[i - 1], "worse": codes[i - 5],
             "lists": codes[max(0, i - i % 5) : i], "scores": [0.9, 0.5, len(code) % 5 / 9]}
            for i, code in enumerate(codes)]  # fmt: skip
    rows = [row | other for row, other in zip(rows, more)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")

    @functools.cache
    def run(processes):
        output = folder / str(processes)
        launch(ROOT / "tests/gradient_worker.py", bert, folder / "rows.parquet", output, processes=processes)
        outputs = [f"{output}.{process}" for process in range(processes)]
        return [(torch.load(f"{path}.pt"), json.loads(Path(f"{path}.json").read_text())) for path in outputs]

    return run


def assert_close(found, expected):
    """Compare gradient and loss, to a relative error of 1e-5."""
    assert expected[0].norm() > 0
    assert ((found[0] - expected[0]).norm() / expected[0].norm()).item() < 1e-5
    assert found[1] == pytest.approx(expected[1], rel=1e-5)


@PROCESSES
@pytest.mark.parametrize("loss", [*LOSSES, "mixture"])
def test_gradients_equal_those_of_one_process_and_one_pass(launched, processes, loss):
    expected = launched(1)[0][0][loss, 10**6, False]
    assert expected[2] < 10  # forward passes: few, for little padding
    for gradients, _ in launched(processes):
        found = [gradients[key] for key in product([loss], (128, 10**6), (False, True)) if key in gradients]
        assert len(found) in (2, 4)
        for gradient in found:
            assert_close(gradient, expected)


@PROCESSES
@pytest.mark.parametrize("loss, which, count", [
    *((loss, "two rows", 2) for loss in LOSSES),
    *((loss, "all rows of a process", 10) for loss in ("negatives", "kl", "CoSENTLoss")),
])  # fmt: skip
def test_a_batch_with_skipped_rows_equals_the_batch_without_them(launched, processes, loss, which, count):
    """Skipped rows are counted, and have no part in loss and gradient, even if a process is left without rows."""
    single = launched(1)[0][0]
    expected, whole = single[loss, which, "leave_out"], single[loss, 10**6, False]
    assert (expected[0] - whole[0]).norm() > 0.01 * whole[0].norm()
    for gradients, _ in launched(processes):
        found = gradients[loss, which, "make_bad"]
        assert found[3] == count
        assert_close(found, expected)


@PROCESSES
@pytest.mark.parametrize("case", ["marked", "frozen"])
def test_weights_without_a_gradient_on_some_processes(launched, processes, case):
    """A second encoder, whose only text is on the first process, and which has no gradient on the others; a head that
    no text uses; a layer that is frozen after some steps. They have no gradient on all processes, or on none."""
    expected = launched(1)[0][0][case, False]
    pooler = {"0.model.pooler.dense.weight", "0.model.pooler.dense.bias"}
    layer = {name for name in expected[4] if "encoder.layer.1." in name}
    assert set(expected[4]) == pooler | layer | {"0.head.weight", "0.head.bias"}
    assert len(layer) == (16 if case == "frozen" else 0)
    for gradients, _ in launched(processes):
        for cache in (False, True):
            assert gradients[case, cache][4] == expected[4]
            assert_close(gradients[case, cache], expected)
    unmarked = launched(1)[0][0]["infonce", 10**6, False]
    assert abs(expected[1] - unmarked[1]) > 1e-3  # the second encoder was used


def test_processes_ran_different_numbers_of_passes(launched):
    """Without this, the test above would prove little: only unequal numbers can desynchronize the collectives."""
    settings = [(loss, 128, False) for loss in LOSSES]
    (first, _), (second, _) = launched(2)
    assert any(first[name][2] != second[name][2] for name in settings)


@PROCESSES
def test_accumulated_batches_equal_one_batch_for_a_mean_over_rows(launched, processes):
    for gradients, _ in launched(processes):
        found, *_ = gradients["four batches of 16"]
        expected, *_ = launched(1)[0][0]["one batch of 64"]
        assert ((found - expected).norm() / expected.norm()).item() < 1e-5


@PROCESSES
def test_batches_are_the_same_on_any_number_of_processes(launched, processes):
    first = launched(1)[0][1]
    assert len({row["docstring"] for batch in first for row in batch}) > 300
    for _, rows in launched(processes):
        assert rows == first
