"""What was asked is what is trained and measured: else a run is refused, with a line that says why."""

import importlib
import json
import re
from pathlib import Path

import pytest
from conftest import TRAINERS, metrics, train, write_jsonl

import train_bi_encoder
import train_cross_encoder

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
ROWS = [{"q": f"query {i}", "d": f"document {i}", "n": f"negative {i}", "label": i % 3 / 2} for i in range(40)]


@pytest.fixture
def flags(static):
    write_jsonl(Path("rows.jsonl"), ROWS)
    return ["--train_data", "rows.jsonl", "--model_name_or_path", static, "--columns", "q", "d", "--batch_size", 4,
            "--max_steps", 2, "--eval_rows", 0, "--output_dir", "out"]  # fmt: skip


LABELS = {  # {loss: (what is required, labels that it takes, labels of which one is wrong)}
    "CosineSimilarityLoss": ("from -1 to 1 (divide them, or use CoSENTLoss)", [-1, 0.5, 1], [0, 1, 2.5]),
    "ContrastiveLoss": ("0 or 1", [0, 1], [0, 1, 0.5]),
    "OnlineContrastiveLoss": ("0 or 1", [0, 1], [1, -1]),
}


@pytest.mark.parametrize("loss", LABELS)
def test_labels_outside_of_the_range_of_a_loss(flags, loss):
    """They are refused before the first step; those within are trained on."""
    required, valid, wrong = LABELS[loss]
    flags = [*flags, "--loss", loss, "--label_column", "label", "--batch_size", 20, "--max_steps", 1]
    write_jsonl(Path("rows.jsonl"), [{**row, "label": wrong[i % len(wrong)]} for i, row in enumerate(ROWS)])
    said = re.escape(f"--loss {loss} requires labels that are {required}")
    with pytest.raises(train_bi_encoder.UserError, match=said):
        train("train_bi_encoder", *flags)
    assert not Path("out/checkpoints").exists()
    write_jsonl(Path("rows.jsonl"), [{**row, "label": valid[i % len(valid)]} for i, row in enumerate(ROWS)])
    train("train_bi_encoder", *flags, "--output_dir", "trained")
    assert metrics("trained")[-1]["step"] == 1


@pytest.mark.parametrize("prompt, room", [("", 1), ("read a file ", 4)])
@pytest.mark.parametrize("name", TRAINERS)
def test_a_length_without_room_for_a_text(name, prompt, room, bert, reranker):
    """Of a pair, for a text each: special tokens and the prompt are not all that is left."""
    script = importlib.import_module(name)
    folder, special = (bert, 2) if name == "train_bi_encoder" else (reranker, 4)
    flags = ["--train_data", "x", "--columns", "q", "d", "--model_name_or_path", str(folder), "--query_prompt", prompt]
    fits = str(special + room)
    script.load_model(script.parse_args([*flags, "--max_length", fits]))
    for length in {str(special + room - 1), "1", "2"}:
        said = f"^{length} tokens: no room for a text beside .*raise --max_length"
        with pytest.raises(script.UserError, match=said):
            script.load_model(script.parse_args([*flags, "--max_length", length]))


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("where", ["--train_data", "--eval_data"])
def test_a_prompt_of_a_source_that_leaves_no_room(where, name, bert, reranker):
    """All texts of the source would be the same; so are queries that a ColBERT expands to a fixed length."""
    write_jsonl(Path("rows.jsonl"), ROWS)
    entry = json.dumps({"path": "rows.jsonl", "query_prompt": "read a file " * 5})
    files = {"--train_data": "rows.jsonl", "--eval_data": "rows.jsonl"} | {where: entry}
    folder = bert if name == "train_bi_encoder" else reranker
    flags = [*sum(files.items(), ()), "--columns", "q", "d", "--model_name_or_path", folder, "--max_length", 16]
    script = importlib.import_module(name)
    with pytest.raises(script.UserError, match="^(--[a-z_]+: )?rows.jsonl: 16 tokens: no room for a text"):
        train(name, *flags, "--max_steps", 1, "--output_dir", "out")


def test_a_prompt_that_fills_an_expanded_query(colbert):
    flags = ["--train_data", "x", "--columns", "q", "d", "--model_name_or_path", str(colbert), "--query_prompt"]
    script = importlib.import_module("train_bi_encoder")
    script.load_model(script.parse_args([*flags, "read a file "]))
    with pytest.raises(script.UserError, match="^12 tokens: no room for a text beside prompt.*: shorten the prompt"):
        script.load_model(script.parse_args([*flags, "read a file " * 4]))


def test_equal_texts_of_held_out_rows_are_one(static, evaluate, rows):
    """Documents of several queries, and queries with several positives, are measured as by eval_incremental.py."""
    rows = [{"q": rows[i % 60]["docstring"], "d": rows[i % 83]["code"]} for i in range(500)]
    write_jsonl(Path("rows.jsonl"), rows)
    train("train_bi_encoder", "--train_data", "rows.jsonl", "--eval_data", "rows.jsonl", "--eval_rows", 500,
          "--columns", "q", "d", "--model_name_or_path", static, "--batch_size", 4, "--max_steps", 1,
          "--output_dir", "out")  # fmt: skip
    names = {"nDCG@10": "ndcg@10", "RR@10": "mrr@10", "Success@1": "accuracy@1", "R@10": "recall@10"}
    first = metrics("out")[0]
    flags = ["--pairs", "rows.jsonl", "--columns", "q", "d", "--model_name_or_path", static, "--metrics", *names]
    found = evaluate(*flags)["metrics"]
    assert first["step"] == 0
    for name, measure in names.items():
        assert first[f"held_out_cosine_{measure}"] == pytest.approx(found[name]["mean"], abs=1e-4), name


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


def test_labels_of_ones_own_stay():
    """Those of other positives: tests/test_same_text.py."""
    args = ["--train_data", "x", "--model_name_or_path", "y", "--columns", "q", "d", "--label_column", "y"]
    cells = {"q": "q", "d": ["p", "n", "p"], "y": [1, 0, 0.5]}
    listwise = train_cross_encoder.parse_args([*args, "--loss", "listwise_ce"])
    row = train_cross_encoder.read_row(cells, 0, listwise, None)
    assert row.documents == ["p", "n", "p"] and row.labels == [1.0, 0.0, 0.5]


# What changes a text without changing its tokens.
SAME = {"blank": lambda text: f"{text} ", "line": lambda text: text.replace(" ", "\n"), "capitals": str.title}


def test_held_out_queries_that_are_trained_on_but_for_white_space_or_case(flags, capsys):
    rows = [{**row, "q": same(row["q"])} for row, same in zip(ROWS, [*SAME.values()] * 2)]
    write_jsonl(Path("held.jsonl"), [*rows, {**ROWS[0], "q": "new"}])
    train("train_bi_encoder", *flags, "--eval_data", "held.jsonl", "--eval_rows", 7, "--max_steps", 1)
    assert "6 held-out queries, such as 'query 0', are also in rows that are trained on" in capsys.readouterr().out


ABSENT = {  # {kind: (cells of documents and their scores, flags)}
    "columns": ({"d": "p", "n": None, "m": "c", "s": 3.0, "t": None, "u": 1.0}, "q d n m --label_column s t u"),
    "score there": ({"d": "p", "n": "", "m": "c", "s": 3.0, "t": 2.0, "u": 1.0}, "q d n m --label_column s t u"),
    "list": ({"d": ["p", None, "c"], "s": [3.0, None, 1.0]}, "q d --label_column s"),
    "scores there": ({"d": ["p", "", "c"], "s": [3.0, 2.0, 1.0]}, "q d --label_column s"),
    "shorter list": ({"d": ["p", None, "c"], "s": [3.0, 1.0]}, "q d --label_column s"),
    "list of negatives": ({"d": ["p"], "n": [" \n", "c"], "s": [3.0, None, 1.0]}, "q d n --label_column s"),
}


@pytest.mark.parametrize("script", [train_bi_encoder, train_cross_encoder], ids=["bi", "cross"])
@pytest.mark.parametrize("kind", ABSENT)
def test_an_absent_negative_leaves_with_its_score(kind, script):
    """Be that a number or absent."""
    cells, columns = ABSENT[kind]
    write_jsonl(Path("rows.jsonl"), [{"q": f"query {i}"} | cells for i in range(3)])
    words = f"--train_data rows.jsonl --model_name_or_path y --columns {columns} --loss kl --shuffle_buffer 0".split()
    args = script.parse_args([*words, "--loss_kwargs", '{"teacher_temperature": 1}'])
    source = script.Source("rows.jsonl", 0, args)
    found, skipped = script.read_rows(source.take(3), [source], [None, None], 0)
    assert [(row.documents, row.labels) for row in found] == [(["p", "c"], [3, 1])] * 3 and not skipped


@pytest.mark.parametrize("name", TRAINERS)
def test_roles_of_columns_are_printed(name, flags, reranker, capsys):
    """As they are given by position: an id would be the query. So is the loss that a reranker's rows decide."""
    given = [*flags, "--model_name_or_path", flags[3] if name == "train_bi_encoder" else reranker]
    train(name, *given, "--columns", "q", "d", "n")
    found = "infonce" if name == "train_bi_encoder" else "listwise_ce"
    said = f"40 rows of 1 file(s) (query: q; positive, negatives: d, n), loss {found}, 100% of all rows\n"
    assert said in capsys.readouterr().out
    loss = ["--loss", "CoSENTLoss"] if name == "train_bi_encoder" else []
    train(name, *given, "--label_column", "label", *loss, "--output_dir", "labels")
    found = found.replace("infonce", "CoSENTLoss").replace("listwise_ce", "bce")
    assert f"(query: q; documents: d), loss {found}, 100% of all rows\n" in capsys.readouterr().out
