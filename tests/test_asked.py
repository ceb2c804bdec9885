"""What was asked is what is trained and measured: else a run is refused, with a line that says why."""

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import TRAINERS, metrics, train, write_jsonl
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)

import train_bi_encoder
import train_cross_encoder

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
ROWS = [{"q": f"query {i}", "d": f"document {i}", "n": f"negative {i}", "label": i % 3 / 2} for i in range(40)]


@pytest.fixture
def flags(static):
    write_jsonl(Path("rows.jsonl"), ROWS)
    return ["--train_data", "rows.jsonl", "--model_name_or_path", static, "--columns", "q", "d", "--batch_size", 4,
            "--max_steps", 2, "--eval_rows", 0, "--output_dir", "out"]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize("loss", [[], ["--loss", "infonce"]])
def test_infonce_refuses_labels(flags, capsys, loss):
    """It takes the first document for the positive, whatever its label."""
    with pytest.raises(SystemExit, match="2"):
        train("train_bi_encoder", *flags, *loss, "--label_column", "label")
    line = capsys.readouterr().err.splitlines()[-1]
    assert "--label_column: infonce reads no labels" in line and "kl, margin_mse" in line and "CoSENTLoss" in line


def test_a_loss_that_returns_several_terms(flags):
    """They are summed, as the library's trainer does."""
    train("train_bi_encoder", *flags, "--loss", "GlobalOrthogonalRegularizationLoss", "--logging_steps", 1)
    assert all(np.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in metrics("out"))


COSINES = "from -1 to 1 (divide them, or use CoSENTLoss)"
LABELS = {  # {loss: (what is required, labels that it takes, labels of which one is wrong)}
    "CosineSimilarityLoss": (COSINES, [-1, 0.5, 1], [0, 1, 2.5]),
    "ContrastiveLoss": ("0 or 1", [0, 1], [0, 1, 0.5]),
    "OnlineContrastiveLoss": ("0 or 1", [0, 1], [1, -1]),
}


@pytest.mark.parametrize("loss", LABELS)
def test_labels_outside_of_the_range_of_a_loss(flags, loss):
    """They are refused before the first step; those within are trained on."""
    required, valid, wrong = LABELS[loss]
    flags = [*flags, "--loss", loss, "--label_column", "label", "--batch_size", 20, "--max_steps", 1]
    write_jsonl(Path("rows.jsonl"), [{**row, "label": wrong[i % len(wrong)]} for i, row in enumerate(ROWS)])
    with pytest.raises(
        train_bi_encoder.UserError, match=re.escape(f"--loss {loss} requires labels that are {required}")
    ):
        train("train_bi_encoder", *flags)
    assert not Path("out/checkpoints").exists()
    write_jsonl(Path("rows.jsonl"), [{**row, "label": valid[i % len(valid)]} for i, row in enumerate(ROWS)])
    train("train_bi_encoder", *flags, "--output_dir", "trained")
    assert metrics("trained")[-1]["step"] == 1


NOTHING_TO_LEARN = ["--batch_size 1 --gradient_accumulation_steps 4", "--train_data one.jsonl",
                    '--loss_kwargs {"in_batch":false}', "--loss MultipleNegativesRankingLoss --batch_size 1",
                    "--loss CoSENTLoss --label_column label --batch_size 1"]  # fmt: skip


@pytest.mark.parametrize("words", NOTHING_TO_LEARN)
def test_rows_without_anything_to_learn(flags, words):
    """The run ends before the first step."""
    write_jsonl(Path("one.jsonl"), ROWS[:1])
    with pytest.raises(train_bi_encoder.UserError, match="^loss and gradient of the first step are 0: .*--batch_size"):
        train("train_bi_encoder", *flags, *words.split())
    assert not Path("out/checkpoints").exists() and not Path("out/model").exists()


def test_one_row_a_batch_with_negatives(flags):
    train(
        "train_bi_encoder",
        *flags,
        "--batch_size",
        1,
        "--columns",
        "q",
        "d",
        "n",
        "--loss_kwargs",
        '{"in_batch":false}',
    )
    assert Path("out/model").exists()


@pytest.mark.parametrize("batch, accumulated, line", [
    (40, 1, ""), (22, 2, ""), (32, 1, "2 full steps of 32 rows are 1.6 epochs: "),
    (20, 4, "1 full steps of 80 rows are 2.0 epochs: "),
])  # fmt: skip
def test_steps_beyond_the_epochs(flags, capfd, batch, accumulated, line):
    """The last batch is filled up with rows of the next epoch: said from a tenth more on."""
    train(
        "train_bi_encoder",
        *flags,
        "--max_steps",
        0,
        "--batch_size",
        batch,
        "--gradient_accumulation_steps",
        accumulated,
    )
    printed = capfd.readouterr().out
    assert line in printed and ("full steps of" in printed) == bool(line)


@pytest.mark.parametrize("prompt, room", [("", 1), ("read a file ", 4)])
@pytest.mark.parametrize("name", TRAINERS)
def test_a_length_without_room_for_a_text(name, prompt, room, bert, reranker):
    """Of a pair, for a text each: special tokens and the prompt are not all that is left."""
    script = importlib.import_module(name)
    folder, special = (bert, 2) if name == "train_bi_encoder" else (reranker, 4)
    flags = ["--train_data", "x", "--model_name_or_path", str(folder), "--query_prompt", prompt]
    fits = str(special + room)
    script.load_model(script.parse_args([*flags, "--max_length", fits]))
    for length in {str(special + room - 1), "1", "2"}:
        with pytest.raises(
            script.UserError, match=f"^{length} tokens: no room for a text beside .*raise --max_length"
        ):
            script.load_model(script.parse_args([*flags, "--max_length", length]))


WRONG_OPTIONS = """\
--warmup_ratio 1.1
--dropout 1.1
--length_window 2 --corpus x.jsonl
--loss_kwargs {"pos_weight":"5"}
--loss_kwargs {"sigma":0}
--loss_kwargs {"k":true}
--loss_kwargs {"temperature":-1}
--loss_kwargs {"teacher_temperature":NaN}"""


@pytest.mark.parametrize("words", WRONG_OPTIONS.splitlines())
def test_values_that_a_cross_encoder_cannot_use(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_cross_encoder.parse_args(["--train_data", "x", "--model_name_or_path", "y", *words.split()])
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"error: {words.split()[0]}" in line


# ------------------------------------------------------------------------------------------------- held-out rows


def test_equal_texts_of_held_out_rows_are_one(static, evaluate, rows):
    """Documents of several queries, and queries with several positives, are measured as by eval_incremental.py."""
    rows = [{"q": rows[i % 60]["docstring"], "d": rows[i % 83]["code"]} for i in range(500)]
    write_jsonl(Path("rows.jsonl"), rows)
    train("train_bi_encoder", "--train_data", "rows.jsonl", "--columns", "q", "d", "--eval_data", "rows.jsonl",
          "--eval_rows", 500, "--model_name_or_path", static, "--batch_size", 4, "--max_steps", 1,
          "--output_dir", "out")  # fmt: skip
    names = {"nDCG@10": "ndcg@10", "RR@10": "mrr@10", "Success@1": "accuracy@1", "R@10": "recall@10"}
    first = metrics("out")[0]
    found = evaluate(
        "--pairs", "rows.jsonl", "--columns", "q", "d", "--model_name_or_path", static, "--metrics", *names
    )["metrics"]
    assert first["step"] == 0
    for name, measure in names.items():
        assert first[f"held_out_cosine_{measure}"] == pytest.approx(found[name]["mean"], abs=1e-4), name


def held_out_evaluator(rows, *more):
    """Return the evaluator of held-out rows."""
    required = ["--train_data", "x", "--model_name_or_path", "y", "--columns", "q", "d"]
    args = train_bi_encoder.parse_args([*required, *more])
    data = SimpleNamespace(held_out=[(SimpleNamespace(args=args, label="x"), rows)])
    model = SimpleNamespace(similarity_fn_name="cosine")
    ((found, _),) = train_bi_encoder.open_evaluators(data, model, args).values()
    return found


def test_rows_with_one_document_to_rank(reranker):
    """Among rows with several: there is nothing to rank, so they are left out."""
    rows = [{"q": f"query {i}", "d": [f"document {i}", "another"][: 1 + i // 2 % 2], "y": [1, 0][: 1 + i // 2 % 2]}
            for i in range(20)]  # fmt: skip
    write_jsonl(Path("rows.jsonl"), rows)
    train("train_cross_encoder", "--train_data", "rows.jsonl", "--eval_rows", 10, "--model_name_or_path", reranker,
          "--columns", "q", "d", "--label_column", "y", "--loss", "mse", "--batch_size", 4, "--max_steps", 1,
          "--output_dir", "out")  # fmt: skip
    first = metrics("out")[0]
    assert 0.5 < first["held_out_ndcg@10"] <= 1 and 0.5 <= first["held_out_map"] <= 1


@pytest.mark.parametrize("equal", ["q", "d"])
def test_positives_that_are_found_count(equal):
    """Each query has the words of its documents, which are all relevant to it."""
    rows = [{"q": f"word{i // 5}", "d": f"word{i // 5} x{i}"} for i in range(30)]
    if equal == "d":
        rows = [{"q": row["d"], "d": row["q"]} for row in rows]
    rows = [train_bi_encoder.Row(row["q"], [row["d"]], [], {"<source>": 0}) for row in rows]
    found = held_out_evaluator(rows)
    sizes = (6, 30) if equal == "q" else (30, 6)
    assert isinstance(found, InformationRetrievalEvaluator) and (len(found.queries), len(found.corpus)) == sizes
    assert sum(map(len, found.relevant_docs.values())) == 30


def test_pairs_with_labels_stay_pairs():
    rows = [train_bi_encoder.Row("q", ["d"], [label], {"<source>": 0}) for label in (0.0, 0.5, 1.0)]
    found = held_out_evaluator(rows, "--loss", "CoSENTLoss", "--label_column", "label")
    assert isinstance(found, EmbeddingSimilarityEvaluator)
    assert len(found.sentences1) == len(found.sentences2) == 3 and found.scores == [0.0, 0.5, 1.0]


# --------------------------------------------------------------------------------------------------- negatives


def read(script, cells, columns, random=None, *more):
    args = script.parse_args(["--train_data", "x", "--model_name_or_path", "y", "--columns", *columns, *more])
    args.loss = args.loss or "listwise_ce"
    return script.read_row(cells, 0, args, random)


def test_a_positive_is_no_negative_of_its_row():
    """Else a pair would have the labels 1 and 0. Of lists, none of the positives is."""
    from random import Random

    cells = {"q": "q", "d": "p", "n": "p", "m": "n"}
    assert read(train_cross_encoder, cells, ["q", "d", "n", "m"]).documents == ["p", "n"]
    lists = {"q": "q", "d": ["p 0", "p 1"], "n": ["p 0", "n", "p 1"]}
    for number in range(9):
        row = read(train_cross_encoder, lists, ["q", "d", "n"], Random(number))
        assert row.documents[1:] == ["n"] and row.labels == [1.0, 0.0]
    with pytest.raises(train_cross_encoder.UserError, match="'d' holds lists, of which positives and"):
        read(train_cross_encoder, {"q": "q", "d": ["p", "n", "p"]}, ["q", "d"])
    given = {"q": "q", "d": ["p", "n", "p"], "y": [1, 0, 0.5]}  # labels of one's own stay
    row = read(train_cross_encoder, given, ["q", "d"], None, "--label_column", "y")
    assert row.documents == ["p", "n", "p"] and row.labels == [1.0, 0.0, 0.5]


# ------------------------------------------------------------------------------------------------ before the run


@pytest.mark.parametrize("name", TRAINERS)
def test_a_measure_that_is_not_a_number(name, flags, reranker):
    """The first evaluation would be the best, and no later one could be better."""
    model = flags[3] if name == "train_bi_encoder" else reranker
    loss = "CoSENTLoss" if name == "train_bi_encoder" else "bce"
    given = [*flags, "--model_name_or_path", model, "--label_column", "label", "--loss", loss, "--eval_rows", 5]
    write_jsonl(Path("equal.jsonl"), [row | {"label": 1} for row in ROWS])
    script = importlib.import_module(name)
    measure = "held_out_spearman_cosine" if name == "train_bi_encoder" else "held_out_spearman"
    with pytest.raises(script.UserError, match=f"^--metric_for_best_model {measure} is not a number: all labels, or"):
        train(name, *given, "--eval_data", "equal.jsonl", "--metric_for_best_model", measure)
    assert [line["step"] for line in metrics("out")] == [0]
    train(name, *given, "--eval_rows", 10, "--metric_for_best_model", measure, "--output_dir", "other")


@pytest.mark.parametrize("name", TRAINERS)
def test_roles_of_columns_are_printed(name, flags, reranker, capsys):
    """As they are found by position: an id would be the query. So is the loss that a reranker's rows decide."""
    write_jsonl(
        Path("ids.jsonl"), [{"id": f"row-{i}", "query": row["q"], "doc": row["d"]} for i, row in enumerate(ROWS)]
    )
    model = flags[3] if name == "train_bi_encoder" else reranker
    given = [word for word in flags if word not in ("--columns", "q", "d")]
    train(name, *given, "--model_name_or_path", model, "--train_data", "ids.jsonl")
    found = "" if name == "train_bi_encoder" else ', {"loss": "listwise_ce"}'
    assert f"40 rows (query: id, positive: query, negative: doc){found}\n" in capsys.readouterr().out
    loss = ["--loss", "CoSENTLoss"] if name == "train_bi_encoder" else []
    train(name, *flags, "--model_name_or_path", model, "--label_column", "label", *loss, "--output_dir", "labels")
    found = found.replace("listwise_ce", "bce")
    assert f"(query: q, document: d){found}\n" in capsys.readouterr().out


def test_a_tracker_that_is_not_installed(flags, monkeypatch):
    from accelerate import tracking

    missing = [
        name for name in ("wandb", "clearml", "comet_ml", "aim") if name not in tracking.get_available_trackers()
    ]
    for name in missing[:1]:
        with pytest.raises(train_bi_encoder.UserError, match=f"^--report_to {name}: its package is not installed$"):
            train("train_bi_encoder", *flags, "--report_to", name)
    assert missing and not Path("out/args.yaml").exists()


def test_tensorboard_has_each_step_once_after_a_resume(flags):
    """Though steps after the checkpoint were logged before the run was killed."""
    pytest.importorskip("tensorboard")
    import shutil

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    given = [*flags, "--report_to", "tensorboard", "--logging_steps", 1, "--save_steps", 2, "--max_steps", 6]
    train("train_bi_encoder", *given)
    for folder in ("out/model", "out/checkpoints/step_00000006"):
        shutil.rmtree(folder)
    train("train_bi_encoder", *given, "--resume")
    events = EventAccumulator("out/evenstep").Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    expected = [line["loss"] for line in metrics("out")]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(expected)
    assert json.loads(Path("out/metrics.jsonl").read_text().splitlines()[-1])["step"] == 6
