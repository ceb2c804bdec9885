"""What a new user meets: mistyped flags, the folder of a run, too large a batch, the end of a run, the card."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TRAINERS, metrics, train, write_jsonl
from sentence_transformers import SentenceTransformer

import train_bi_encoder as script


@pytest.mark.parametrize("name", [*TRAINERS, "eval_incremental"])
def test_a_mistyped_flag(name, capsys):
    """A short usage, and the nearest flag if one is near."""
    parse = importlib.import_module(name).parse_args
    for flag, advice in (("model_namee_or_path", ": did you mean --model_name_or_path?"), ("xyzzy", "")):
        with pytest.raises(SystemExit) as ended:
            parse([f"--{flag}=7"])
        usage, error = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and usage.endswith("--FLAG VALUE ...; --help lists them")
        assert error.endswith(f"error: unrecognized arguments: --{flag}=7{advice}")


@pytest.fixture(scope="module")
def run(static, rows, tmp_path_factory):
    """(its folder, what it printed) of a run at a rate that destroys the model."""
    folder = tmp_path_factory.mktemp("run")
    write_jsonl(folder / "few.jsonl", rows[:40])
    flags = ["--model_name_or_path", static, "--train_data", folder / "few.jsonl", "--columns", "docstring", "code",
             "--batch_size", 72, "--max_steps", 2, "--learning_rate", 1e4, "--logging_steps", 1, "--eval_rows", 10,
             "--warmup_ratio", 0, "--query_prompt", "find: ", "--output_dir", folder / "out"]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
        patch.setattr(script.tqdm, "write", lines.append)
        patch.setattr(sys, "argv", ["train_bi_encoder.py"])
        train("train_bi_encoder", *flags)
    return folder / "out", "\n".join(lines)


def test_what_a_run_prints(run):
    """That a batch repeats its rows; the losses, as there is no bar; what fell; what may go."""
    output, printed = run
    assert "few.jsonl: in a batch each row 2.4 times: lower --batch_size\n" in printed
    lines = metrics(output)
    assert f"step 1: {{'loss': {lines[1]['loss']:.4f}" in printed.replace("0}", "}")
    name = "held_out_cosine_ndcg@10"
    assert f"{name} fell from {round(lines[0][name], 4)} to {round(lines[-1][name], 4)}: see docs" in printed
    assert f" MB: if you will not, rm -r {output}/checkpoints" in printed


def test_the_folder_of_a_run_is_no_model(run):
    output, _ = run
    for name, error in ((str(output), f"is the folder of a run: use {output}/model"), (f"{output}/model", None)):
        found = None
        try:
            script.check_exists(name)
        except script.UserError as raised:
            found = str(raised)
        assert found == error


def test_the_card(run, static):
    """Source, rows, columns, loss, measures before and after, similarity, prompts, base model, command."""
    output, _ = run
    card = (output / "model/README.md").read_text()
    source = "30 rows of 1 file(s) (query: docstring; positive, negatives: code), loss infonce"
    assert f"\nTrained on {output.parent / 'few.jsonl'}: {source}.\n" in card
    (first, last) = re.findall(r"^\| ([02]) +\| (0\.\d+) +\|", card, re.M)
    name = "held_out_cosine_ndcg@10"
    measures = [round(line[name], 4) for line in metrics(output) if name in line]
    assert [float(first[1]), float(last[1])] == [measures[0], measures[-1]]
    assert "**Similarity Function:** Cosine" in card
    assert (
        f'\n# SentenceTransformer\n\nBase model: `{static}`; prompts: `{{"query": "find: ", "document": ""}}`.\n'
        in card
    )
    assert "\nTrained for 2 steps by `train_bi_encoder.py args.yaml`.\n" in card
    assert SentenceTransformer(str(output / "model"), device="cpu").prompts["query"] == "find: "


@pytest.mark.parametrize("kind", ["static", "splade", "colbert", "reranker"])
def test_a_card_begins_with_how_the_model_is_used(kind, request, rows, tmp_path, monkeypatch):
    """By lines that run, before the library's example; it has no empty block."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "x.jsonl", rows[:12])
    flags = ["--model_name_or_path", request.getfixturevalue(kind), "--train_data", "x.jsonl", "--max_steps", 1,
             "--columns", "docstring", "code", "--eval_rows", 0, "--batch_size", 4, "--output_dir", "out"]  # fmt: skip
    train(TRAINERS[kind == "reranker"], *flags)
    card = Path("out/model/README.md").read_text()
    lines, example = re.findall("```python\n(.*?)```", card, re.S)
    names = {}
    exec(lines, names)
    assert names["scores"].shape == ((1,) if kind == "reranker" else (1, 1))
    assert "model_id" in example and "<!--" not in card and not re.search("\n#.*\n+#+ (?=.*\n*$|Cit)|\n\n\n", card)


def test_without_a_terminal_a_line_a_minute_has_the_time_left(capsys):
    progress = script.Progress(step=3)
    args = script.Args(max_steps=250)
    bar = script.make_bar(progress, args, SimpleNamespace(is_main_process=True))
    for seconds, said in ((61, True), (1, False), (59, True)):
        for name in ("start_t", "last_print_t"):  # of the clock of tqdm
            setattr(bar, name, getattr(bar, name) - seconds)
        bar.set_postfix_str("loss 0.1", refresh=False)
        bar.update()
        out, err = capsys.readouterr()
        assert err == "" and bool(re.fullmatch(rf"step {bar.n} of 250, [\d:]+ left, loss 0.1\n", out)) == said
    script.make_bar(progress, args, SimpleNamespace(is_main_process=False)).close()
    script.make_bar(progress, args, SimpleNamespace(is_main_process=True)).close()
    assert capsys.readouterr() == ("", "")
