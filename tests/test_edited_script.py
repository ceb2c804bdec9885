"""What an edited script may rely on: weights that only some texts need, tensors of one's own in checkpoints, the step,
and the traceback of one's own errors."""

import importlib
import re
import shutil

import pytest
import torch
from conftest import RATES, ROOT, TRAINERS, few_or_all, launch, metrics, train, weights, write_jsonl
from safetensors.torch import load_file

FLAGS = ["--batch_size", 8, "--max_length", 32, "--dropout", 0, "--eval_rows", 0, "--logging_steps", 1,
         "--learning_rate", 1e-3, "--micro_batch_tokens", 200]  # fmt: skip
EDITS = {
    # A head that no text needs, and a second encoder of texts with [MASK].
    "    return apply_training_flags(model, args)\n": """
    model[0].head = torch.nn.Linear(32, 32)
    model[0].rare = torch.nn.Linear(32, 32)
    return apply_training_flags(model, args)
""",
    '        return model(features, task=role)["sentence_embedding"].float()\n': """
        found = model(features, task=role)["sentence_embedding"].float()
        marked = (features["input_ids"] == model.tokenizer.mask_token_id).any(1)
        return torch.where(marked[:, None], model[0].rare(found), found) if marked.any() else found
""",
    # A queue of the last four losses, and a count.
    "    extra = {}": """
    extra = {"queue": torch.zeros(4, 2, device=device), "count": torch.zeros((), dtype=torch.int64)}
""",
    "        meter.add(": """
        extra["queue"] = torch.cat([extra["queue"][1:], extra["queue"].new_full((1, 2), losses[0])])
        extra["count"] += 1
        if os.environ.get("STOP_AT") == str(progress.step) and is_main:
            os.kill(os.getpid(), signal.SIGTERM)
        meter.add(""",
    "    # ---- save\n": """
    torch.save(extra, f"{args.output_dir}/extra.{accelerator.process_index}.pt")
""",
}


def tensors(output, step, name):
    return load_file(output / f"checkpoints/step_{step:08}/{name}.safetensors")


@pytest.fixture(scope="module")
def edited(tmp_path_factory, rows, bert):
    """(edited script, flags): of six batches the fourth alone has a text with [MASK], in its longest row, which the
    first process reads."""
    folder = tmp_path_factory.mktemp("edited")
    text = (ROOT / "train_bi_encoder.py").read_text()
    for old, new in EDITS.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "edited.py").write_text(text)
    short = [{name: text[:60] for name, text in row.items()} for row in rows[:48]]
    short[27] = {"docstring": rows[27]["docstring"], "code": "[MASK] " + "a long text " * 20}
    write_jsonl(folder / "rows.jsonl", short)
    flags = ["--train_data", folder / "rows.jsonl", "--model_name_or_path", bert, "--shuffle_buffer", 0, *FLAGS]
    return folder / "edited.py", [*flags, "--max_steps", 6, "--save_steps", 0]


def state(output, processes):
    """Return all that a resumed run must reproduce to the bit: metrics, and {name: tensor} of all files."""
    lines = [{name: value for name, value in line.items() if name not in RATES} for line in metrics(output)]
    found = {name: tensors(output, 6, name) for name in ("model", "optimizer", "extra")}
    found |= {rank: torch.load(output / f"extra.{rank}.pt") for rank in range(processes)}
    return lines, {(file, name): tensor for file, part in found.items() for name, tensor in part.items()}


@pytest.fixture(scope="module")
def whole(edited, tmp_path_factory):
    """{processes: output folder} of runs that were not stopped."""
    folder = tmp_path_factory.mktemp("whole")
    for processes in (1, 2):
        launch(edited[0], *edited[1], "--output_dir", folder / f"{processes}", processes=processes)
    return {processes: folder / f"{processes}" for processes in (1, 2)}


def test_weights_of_some_texts_are_trained_alike_on_two_processes(whole):
    """A weight without a gradient is not changed, not even by weight decay, and the optimizer has no state of it."""
    one, two = ([line[name] for line in metrics(whole[number]) for name in ("loss", "grad_norm")] for number in (1, 2))
    assert two == pytest.approx(one, rel=1e-5) and len(one) == 12
    files = [tensors(whole[number], 6, "model") for number in (1, 2)]
    found, expected = (torch.cat([part[name].flatten() for name in sorted(part)]) for part in files)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    for number in (1, 2):
        kept = {name.rpartition(".")[0] for name in tensors(whole[number], 6, "optimizer")}
        assert {"0.rare.weight", "0.rare.bias"} < kept
        missing = tensors(whole[number], 6, "model").keys() - kept
        assert missing == {"0.head.weight", "0.head.bias", "0.model.pooler.dense.weight", "0.model.pooler.dense.bias"}


@pytest.mark.parametrize("processes, stop", few_or_all([(1, 3), (2, 5)], [1, 2], [3, 5]))
def test_sigterm_and_resume_are_bit_identical(edited, whole, tmp_path, monkeypatch, processes, stop):
    """Weights that have no state yet, or not any more a gradient, and tensors of one's own, on all processes."""
    monkeypatch.setenv("STOP_AT", str(stop))
    stopped = launch(edited[0], *edited[1], "--output_dir", tmp_path, processes=processes, check=False)
    assert f"stopped after step {stop} of 6" in stopped.stdout and stopped.returncode == 143
    losses = torch.tensor([line["loss"] for line in metrics(tmp_path)])
    extra = tensors(tmp_path, stop, "extra")
    assert extra["count"] == stop and torch.equal(extra["queue"][4 - min(stop, 4) :, 1], losses[-4:])
    assert ("0.rare.weight.exp_avg" in tensors(tmp_path, stop, "optimizer")) == (stop == 5)
    monkeypatch.delenv("STOP_AT")
    launch(edited[0], *edited[1], "--output_dir", tmp_path, "--resume", processes=processes)
    lines, found = state(tmp_path, processes)
    expected_lines, expected = state(whole[processes], processes)
    assert lines == expected_lines and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert torch.equal(weights(tmp_path / "model"), weights(whole[processes] / "model"))


@pytest.mark.parametrize("name", TRAINERS)
def test_documents_with_a_title(name, rows, bert, tmp_path):
    """The line of docs/training.md reads tevatron's rows; without it they are refused."""
    pattern = re.compile(r"^        groups\.append\(\[read_text.*$", re.M)
    line = pattern.search((ROOT / "docs/training.md").read_text())[0]
    text, count = pattern.subn(lambda _: line, (ROOT / f"{name}.py").read_text())
    assert count == 1
    (tmp_path / "edited.py").write_text(text)

    def passage(row, title):
        return {"docid": row["code"][:5], "title": title, "text": row["code"]}

    passages = [
        {"query_id": str(i), "query": row["docstring"], "positive_passages": [passage(row, "a title")],
         "negative_passages": [passage(rows[i - 1], ""), passage(rows[i - 2], "t")]}
        for i, row in enumerate(rows[:48])
    ]  # fmt: skip
    write_jsonl(tmp_path / "rows.jsonl", passages)
    flags = ["--train_data", tmp_path / "rows.jsonl", "--model_name_or_path", bert, *FLAGS, "--num_negatives", 1,
             "--columns", "query", "positive_passages", "negative_passages", "--max_steps", 4]  # fmt: skip
    launch(tmp_path / "edited.py", *flags, "--output_dir", tmp_path / "out")
    assert metrics(tmp_path / "out")[-1]["step"] == 4
    refused = "'positive_passages' holds dict, not texts: choose other columns, or edit read_row"
    with pytest.raises(importlib.import_module(name).UserError, match=refused):
        train(name, *flags, "--output_dir", tmp_path / "x")


# ---- the step


@pytest.mark.parametrize("name", TRAINERS)
def test_rows_batches_and_losses_get_their_step(name, corpus, bert, tmp_path, monkeypatch):
    """Though they are prepared ahead; with two batches a step, and after a resume. Held-out rows have step 0."""
    script = importlib.import_module(name)
    read_row, local_rows, make_loss = script.read_row, script.local_rows, script.make_loss
    forward_backward = script.forward_backward
    read, of_batch, seen, of_loss = {}, {}, [], []

    def recorded_row(cells, step, args, random=None):
        read.setdefault((cells[script.SOURCE], cells[script.NUMBER]), step)  # a cross-encoder reads negatives again
        return read_row(cells, step, args, random)

    def recorded_rows(table, local, step, *args):
        rows, skipped = local_rows(table, local, step, *args)
        of_batch.setdefault(step, set()).update(
            read[row.cells[script.SOURCE], row.cells[script.NUMBER]] for row in rows
        )
        return rows, skipped

    def recorded_step(model, batch, *args):
        seen.append({batch.step} | of_batch[batch.step])
        return forward_backward(model, batch, *args)

    def recorded_loss(*args):
        loss = make_loss(*args)
        return lambda outputs, whole: of_loss.append(whole.step) or loss(outputs, whole)

    monkeypatch.setattr(script, "read_row", recorded_row)
    monkeypatch.setattr(script, "local_rows", recorded_rows)
    monkeypatch.setattr(script, "forward_backward", recorded_step)
    monkeypatch.setattr(script, "make_loss", recorded_loss)
    flags = ["--train_data", corpus, "--model_name_or_path", bert, *FLAGS, "--gradient_accumulation_steps", 2,
             "--max_steps", 5, "--save_steps", 3, "--output_dir", tmp_path, "--eval_rows", 5]  # fmt: skip
    if name == "train_cross_encoder":
        flags += ["--num_negatives", 1]
    train(name, *flags)
    assert list(read.values())[:5] == [0] * 5 and max(read.values()) >= 4
    expected = [number // 2 for number in range(10)]
    assert seen == [{step} for step in expected] and of_loss == expected
    shutil.rmtree(tmp_path / "checkpoints/step_00000005")
    train(name, *flags, "--resume")
    assert seen[10:] == [{step} for step in expected[6:]] and of_loss[10:] == expected[6:]


# ---- bugs


def test_errors_of_code_keep_their_type():
    """An error of a file, or of the types that are named, becomes a UserError; one of code does not."""
    script = importlib.import_module("train_bi_encoder")
    for kind in (KeyError, IndexError, TypeError, AttributeError, NameError):
        with pytest.raises(kind, match="^'?attention_mask'?$") as raised, script.user_errors("--flag"):
            raise kind("attention_mask")
        assert not isinstance(raised.value, script.UserError)
        with (
            pytest.raises(script.UserError, match="^--flag: (there is no ')?attention_mask"),
            script.user_errors("--flag", kind),
        ):
            raise kind("attention_mask")
    for kind in (ValueError, OSError, RuntimeError):
        with pytest.raises(script.UserError, match="^--flag: no such file"), script.user_errors("--flag"):
            raise kind("no such file")


PLACES = {"train_bi_encoder": ["read_row", "open_source", "apply_training_flags", "encode", "make_batch"],
          "train_cross_encoder": ["read_row", "open_source", "apply_training_flags", "make_batch"]}  # fmt: skip


@pytest.mark.parametrize("name, place", [(name, place) for name, places in PLACES.items() for place in places])
def test_bugs_of_edited_functions_are_raised(name, place, corpus, bert, tmp_path, monkeypatch):
    def broken(*_, **__):
        return {}["attention_mask"]

    monkeypatch.setattr(importlib.import_module(name), place, broken)
    script = importlib.import_module(name)
    flags = ["--train_data", corpus, "--model_name_or_path", bert, *FLAGS, "--output_dir", tmp_path / "x"]
    agreed = (script.AgreedError, "Traceback.*in broken.*KeyError: 'attention_mask'")
    kind, message = agreed if place == "read_row" else (KeyError, "attention_mask")
    with pytest.raises(kind, match=f"(?s){message}"):
        train(name, *flags, "--max_steps", 2)


FEW = [("train_bi_encoder", 2, "streamed"), ("train_cross_encoder", 1, "mapped")]


@pytest.mark.parametrize("name, processes, way", few_or_all(FEW, TRAINERS, [1, 2], ["mapped", "streamed"]))
def test_whatever_a_batch_raises_the_checkpoint_is_saved_first(name, processes, way, corpus, bert, tmp_path):
    """A bug that one process meets at step 5 of 10 ends all after four steps, and prints its traceback once. When it
    is mended, the run resumes from there."""
    text = (ROOT / f"{name}.py").read_text()
    old = "    query = read_text(cells[query_column], query_column, args.queries)\n"
    assert text.count(old) == 1
    new = '    if step == 4 and os.environ.get("RANK", "0") == "0":\n        cells["no such column"]\n'
    (tmp_path / "edited.py").write_text(text.replace(old, new + old))
    flags = ["--train_data", corpus, "--model_name_or_path", bert, *FLAGS, "--max_steps", 10, "--save_steps", 0,
             "--columns", "docstring", "code", "--output_dir", tmp_path / "x"]  # fmt: skip
    flags += ["--num_negatives", 1] * ("cross" in name) + ["--streaming"] * (way == "streamed")
    done = launch(tmp_path / "edited.py", *flags, processes=processes, check=False, timeout=60)
    assert done.returncode == 1 and done.stderr.count("error: a batch could not be prepared\nTraceback") == 1
    assert done.stderr.count("KeyError: 'no such column'") == 1 and "in read_row" in done.stderr
    assert [path.name for path in (tmp_path / "x/checkpoints").iterdir()] == ["step_00000004"]
    assert metrics(tmp_path / "x")[-1]["step"] == 4
    launch(ROOT / f"{name}.py", *flags, "--resume", processes=processes)
    assert [line["step"] for line in metrics(tmp_path / "x")] == list(range(1, 11))


def test_a_bug_in_the_step_prints_its_traceback(corpus, bert, tmp_path):
    text = (ROOT / "train_bi_encoder.py").read_text()
    old = "    loss = loss_fn(embeddings.unbind(1), whole)\n"
    assert text.count(old) == 1
    (tmp_path / "edited.py").write_text(text.replace(old, '    whole["no such column"]\n' + old))
    flags = ["--train_data", corpus, "--model_name_or_path", bert, *FLAGS, "--output_dir", tmp_path / "x"]
    done = launch(tmp_path / "edited.py", *flags, "--max_steps", 9, check=False, timeout=60)
    assert done.returncode == 1 and "TypeError: " in done.stderr and "in forward_backward" in done.stderr
