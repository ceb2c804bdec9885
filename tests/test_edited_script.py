"""What an edited script may rely on: weights that few texts need, tensors of its own, the step, and tracebacks."""

import importlib
import shutil

import pytest
import torch
from conftest import EACH_TRAINER, ROOT, few_or_all, launch, lines_of, metrics, quick_first, train, write_jsonl
from safetensors.torch import load_file

FLAGS = ["--columns", "docstring", "code", "--batch_size", 8, "--max_length", 32, "--dropout", 0, "--eval_rows", 0,
         "--logging_steps", 1, "--learning_rate", 1e-3, "--micro_batch_tokens", 200]  # fmt: skip
SCRIPT = (ROOT / "train_bi_encoder.py").read_text()
EDITS = {
    # A head that no text needs, and a second encoder of texts with [MASK].
    "    return apply_training_flags(model, args)\n": """
    model[0].head = torch.nn.Linear(32, 32)
    model[0].rare = torch.nn.Linear(32, 32)
    return apply_training_flags(model, args)
""",
    "        return embeddings_of(model(features, task=role))\n": """
        found = embeddings_of(model(features, task=role))
        marked = (features["input_ids"] == model.tokenizer.mask_token_id).any(1)
        return torch.where(marked[:, None], model[0].rare(found), found) if marked.any() else found
""",
    # A queue of the last four losses, and a count.
    "    extra = {}": """
    extra = {"queue": torch.zeros(4, 2, device=accelerator.device), "count": torch.zeros((), dtype=torch.int64)}
""",
    "            progress.advance(": """
            extra["queue"] = torch.cat([extra["queue"][1:], extra["queue"].new_full((1, 2), losses[0])])
            extra["count"] += 1
            if os.environ.get("STOP_AT") == str(progress.step + 1) and is_main:
                os.kill(os.getpid(), signal.SIGTERM)
            progress.advance(""",
    "    # ---- end\n": """
    torch.save(extra, f"{args.output_dir}/extra.{accelerator.process_index}.pt")
""",
}


def edit_script(edits, path):
    """Write the bi-encoder's trainer with {old text: new text}, each of which occurs once."""
    text = SCRIPT
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    return path


def tensors(output, step, name):
    return load_file(output / f"checkpoints/step_{step:08}/{name}.safetensors")


@pytest.fixture(scope="module")
def edited(tmp_path_factory, rows, bert):
    """(edited script, flags): of six batches the fourth has a text with [MASK], which the first process gets."""
    folder = tmp_path_factory.mktemp("edited")
    short = [{name: text[:60] for name, text in row.items()} for row in rows[:48]]
    short[27] = {"docstring": rows[27]["docstring"], "code": "[MASK] " + "a long text " * 20}
    write_jsonl(folder / "rows.jsonl", short)
    flags = ["--train_data", folder / "rows.jsonl", "--model_name_or_path", bert, "--shuffle_buffer", 0, *FLAGS]
    return edit_script(EDITS, folder / "edited.py"), [*flags, "--max_steps", 6, "--save_steps", 0]


def state(output):
    """Return all that a resumed run must reproduce to the bit: metrics, and {name: tensor} of all files."""
    found = {name: tensors(output, 6, name) for name in ("model", "optimizer", "extra")}
    found |= {rank: torch.load(output / f"extra.{rank}.pt") for rank in range(2)}
    found["saved"] = load_file(output / "model/model.safetensors")
    return lines_of(output), {(file, name): tensor for file, part in found.items() for name, tensor in part.items()}


@pytest.mark.parametrize("stops", quick_first([[5], [3, 5]]))
def test_stopped_and_resumed_on_two_processes(edited, tmp_path, monkeypatch, stops):
    """Weights that have no state yet, or not any more a gradient, and tensors of one's own, are those of a run that
    was not stopped, to the bit. That gradients do not depend on processes: tests/test_equalities.py."""
    launch(edited[0], *edited[1], "--output_dir", tmp_path / "whole", processes=2)
    output = tmp_path / "stopped"
    for stop in stops:
        monkeypatch.setenv("STOP_AT", str(stop))
        stopped = launch(edited[0], *edited[1], "--output_dir", output, "--resume", processes=2, check=False)
        assert f"stopped after step {stop} of 6" in stopped.stdout and stopped.returncode == 143
        losses = torch.tensor([line["loss"] for line in metrics(output)])
        extra = tensors(output, stop, "extra")
        assert extra["count"] == stop and torch.equal(extra["queue"][4 - min(stop, 4) :, 1], losses[-4:])
        assert ("0.rare.weight.exp_avg" in tensors(output, stop, "optimizer")) == (stop == 5)
    monkeypatch.delenv("STOP_AT")
    launch(edited[0], *edited[1], "--output_dir", output, "--resume", processes=2)
    (lines, found), (expected_lines, expected) = state(output), state(tmp_path / "whole")
    assert lines == expected_lines and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    # A weight without a gradient is not changed, not even by weight decay, and the optimizer has no state of it.
    with_state = {name.rpartition(".")[0] for name in tensors(output, 6, "optimizer")}
    missing = tensors(output, 6, "model").keys() - with_state
    assert missing == {"0.head.weight", "0.head.bias", "0.model.pooler.dense.weight", "0.model.pooler.dense.bias"}


def test_a_resume_by_an_edited_script_says_so(corpus, static, tmp_path):
    """One line names the functions and constants, one of metrics.jsonl has them; it goes on. Comments do not count."""
    flags = ["--train_data", f"{corpus}/*", "--model_name_or_path", static, *FLAGS, "--eval_rows", 20, "--resume",
             "--logging_steps", 2, "--metric_for_best_model", "held_out_cosine_ndcg@10"]  # fmt: skip
    output = tmp_path / "out"
    loss = "    return loss / count_rows(whole)\n"
    comment = {"    ranks = torch.searchsorted(doc": "    # ranks\n    ranks = torch.searchsorted(doc"}
    new = "".join(f"def {name}():\n    pass\n\n\n" for name in ("one", "two", "three", "four", "five", "six"))
    added = {"LOSSES = {": new + "LOSSES = {"}
    constant = {"EVAL_ROWS = 1000": "EVAL_ROWS = 2000"}
    edits = [{}, comment, comment | {loss: loss.replace("loss /", "100 * loss /")}, added, added | constant]
    said = ["", "", "the script, in infonce (1 in all)\n", "the script, in five, four, infonce, one, six (7 in all)\n",
            "the script, in EVAL_ROWS (1 in all)\n"]  # fmt: skip
    for number, edit in enumerate(edits):
        script = edit_script(edit, tmp_path / "mine.py")
        done = launch(script, *flags, "--max_steps", 2 * number + 2, "--accept_changes", "--output_dir", output)
        assert ("the script, in" in done.stdout) == bool(said[number]) and said[number] in done.stdout
    marks = {line["step"]: line["edited"] for line in metrics(output) if "edited" in line}
    assert marks == {4: ["infonce"], 6: ["five", "four", "infonce", "one", "six", "three", "two"], 8: ["EVAL_ROWS"]}


@pytest.mark.parametrize("name", EACH_TRAINER)
def test_rows_batches_and_losses_get_their_step(name, corpus, bert, tmp_path, monkeypatch):
    """Though they are prepared ahead; with two batches a step, and after a resume. Held-out rows have step 0."""
    script = importlib.import_module(name)
    of_row, of_rows, of_batch, of_loss = [], [], [], []  # steps

    def recorded_row(cells, step, *args, real=script.read_row):
        of_row.append(step)
        return real(cells, step, *args)

    def recorded_rows(table, local, step, *args, real=script.local_rows):
        before = len(of_row)
        found = real(table, local, step, *args)
        of_rows.append({step, *of_row[before:]})
        return found

    def recorded_step(model, batch, *args, real=script.forward_backward):
        of_batch.append(batch.step)
        return real(model, batch, *args)

    def recorded_loss(*args, real=script.make_loss):
        loss = real(*args)
        return lambda outputs, whole: of_loss.append(whole.step) or loss(outputs, whole)

    monkeypatch.setattr(script, "read_row", recorded_row)
    monkeypatch.setattr(script, "local_rows", recorded_rows)
    monkeypatch.setattr(script, "forward_backward", recorded_step)
    monkeypatch.setattr(script, "make_loss", recorded_loss)
    flags = ["--train_data", f"{corpus}/*", "--model_name_or_path", bert, *FLAGS, "--gradient_accumulation_steps", 2,
             "--max_steps", 5, "--save_steps", 3, "--output_dir", tmp_path, "--eval_rows", 5,
             *["--num_negatives", 1] * (name == "train_cross_encoder")]  # fmt: skip
    train(name, *flags)
    assert of_row[:5] == [0] * 5 and len(of_rows) >= 10
    expected = [number // 2 for number in range(10)]
    assert of_batch == of_loss == expected and of_rows[:10] == [{step} for step in expected]
    shutil.rmtree(tmp_path / "checkpoints/step_00000005")
    of_rows.clear()
    train(name, *flags, "--resume")
    assert of_batch[10:] == of_loss[10:] == expected[6:] and of_rows[:4] == [{step} for step in expected[6:]]


@pytest.mark.parametrize("place", ["read_row", "open_source", "apply_training_flags", "encode", "make_batch"])
def test_bugs_of_edited_functions_are_raised(place, corpus, bert, tmp_path, monkeypatch, capsys):
    """With a traceback, by whatever of the two parts below a script calls them."""
    script = importlib.import_module("train_bi_encoder")

    def broken(*_, **__):
        return {}["attention_mask"]

    monkeypatch.setattr(script, place, broken)
    flags = ["--train_data", f"{corpus}/*", "--model_name_or_path", bert, *FLAGS, "--output_dir", tmp_path / "x"]
    with pytest.raises(script.AgreedError if place == "read_row" else KeyError, match="attention_mask") as raised:
        train("train_bi_encoder", *flags, "--max_steps", 2)
    assert script.print_error(raised.value) == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed and "in broken" in printed and "KeyError: 'attention_mask'" in printed


FEW = [(2, "streamed")]


@pytest.mark.parametrize("processes, way", few_or_all(FEW, [1, 2], ["mapped", "streamed"]))
def test_whatever_a_batch_raises_the_checkpoint_is_saved_first(processes, way, corpus, bert, tmp_path):
    """A bug that one process meets at step 5 of 10 ends all after four steps, and prints its traceback once. When it
    is mended, the run resumes from there."""
    old = "    query = read_text(cells[query_column], query_column, args.queries)\n"
    new = '    if step == 4 and os.environ.get("RANK", "0") == "0":\n        cells["no such column"]\n'
    script = edit_script({old: new + old}, tmp_path / "edited.py")
    flags = ["--train_data", f"{corpus}/*", "--model_name_or_path", bert, *FLAGS, "--max_steps", 10, "--save_steps", 0,
             *["--streaming"] * (way == "streamed"), "--output_dir", tmp_path / "x"]  # fmt: skip
    done = launch(script, *flags, processes=processes, check=False, timeout=60)
    assert done.returncode == 1 and done.stderr.count("error: a batch could not be prepared\nTraceback") == 1
    assert done.stderr.count("KeyError: 'no such column'") == 1 and "in read_row" in done.stderr
    assert [path.name for path in (tmp_path / "x/checkpoints").iterdir()] == ["step_00000004"]
    assert metrics(tmp_path / "x")[-1]["step"] == 4
    train("train_bi_encoder", *flags, "--resume")
    assert [line["step"] for line in metrics(tmp_path / "x") if "loss" in line] == list(range(1, 11))
