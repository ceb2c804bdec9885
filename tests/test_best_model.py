"""--metric_for_best_model and --early_stopping_patience: uninterrupted and stopped runs, adapters, refused flags."""

import importlib
import math
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
from conftest import EACH_TRAINER, ROOT, TRAINERS, few_or_all, launch, lines_of, metrics, train, weights, write_jsonl
from forked import Forked
from sentence_transformers import CrossEncoder, SentenceTransformer
from test_resume import signal_when

STEPS = 16
MEASURES = {"train_bi_encoder": "held_out_cosine_ndcg@10", "train_cross_encoder": "held_out_ndcg@10"}
ALL_MEASURES = {"train_cross_encoder": {"held_out_ndcg@10", "held_out_mrr@10", "held_out_map"}}
OF_SEARCH = ("ndcg@10", "mrr@10", "map@10", "precision@10", "recall@10", "accuracy@1")
ALL_MEASURES["train_bi_encoder"] = {f"held_out_cosine_{name}" for name in OF_SEARCH}


def saved_weights(folder):
    return (folder / "model.safetensors").read_bytes()


def final_state(output):
    """Return what a resumed run must reproduce: metrics, final weights and the checkpoints that are left."""
    return lines_of(output), saved_weights(output / "model"), kept_steps(output)


def naive_best(found, name):
    """Return (step of the best evaluation, steps of all evaluations)."""
    measure = MEASURES[name]
    values = {line["step"]: line[measure] for line in found if line["step"] and measure in line}
    return next(step for step, value in values.items() if value == max(values.values())), list(values)


def kept_steps(output):
    return sorted(int(path.name.removeprefix("step_")) for path in (output / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def settings(tmp_path_factory, rows, bert):
    """{trainer: flags} of runs whose best step is in the middle. The bi-encoder trains four steps on the held-out
    pairs, then twelve on wrong ones; the cross-encoder six on the held-out lists, then ten on reversed ones."""
    folder, texts = tmp_path_factory.mktemp("rows"), rows[:32]
    wrong = [{**row, "code": texts[i // 16 * 16 + (i + 1) % 16]["code"]} for i, row in enumerate(texts)]
    write_jsonl(folder / "held_out.jsonl", texts)
    write_jsonl(folder / "train_bi_encoder.jsonl", texts * 2 + wrong * 6)
    lists = [{"q": row["docstring"], "d": [other["code"] for other in rows[i + 1 : i + 5]]}
             for i, row in enumerate(rows[:16])]  # fmt: skip
    turned = [{**row, "d": row["d"][::-1]} for row in lists]
    for row in (*lists, *turned):
        row["d"], row["n"] = row["d"][0], row["d"][1:]
    write_jsonl(folder / "lists.jsonl", lists)
    write_jsonl(folder / "train_cross_encoder.jsonl", lists * 3 + turned * 5)
    common = ["--model_name_or_path", bert, "--max_steps", STEPS, "--shuffle_buffer", 0, "--logging_steps", 1,
              "--max_length", 32, "--micro_batch_tokens", 600, "--lr_scheduler_type", "constant", "--warmup_ratio", 0,
              "--save_steps", 5, "--save_total_limit", 1, "--eval_steps", 2]  # fmt: skip
    own = {
        "train_bi_encoder": ["--columns", "docstring", "code", "--batch_size", 16, "--learning_rate", 0.005,
                             "--eval_data", folder / "held_out.jsonl", "--eval_rows", 32],
        "train_cross_encoder": ["--columns", "q", "d", "n", "--batch_size", 8, "--learning_rate", 2e-3, "--dropout", 0,
                                "--eval_data", folder / "lists.jsonl", "--eval_rows", 16],
    }  # fmt: skip
    for name, flags in own.items():
        flags += [*common, "--train_data", folder / f"{name}.jsonl", "--metric_for_best_model", MEASURES[name]]
    return own


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, settings):
    """undisturbed(trainer, processes) returns the output folder of a run that was not stopped."""
    folder, done = tmp_path_factory.mktemp("undisturbed"), {}

    def run(name, processes=1):
        if (name, processes) not in done:
            done[name, processes] = folder / f"{name}{processes}"
            flags = [*settings[name], "--output_dir", done[name, processes]]
            train(name, *flags) if processes == 1 else launch(ROOT / f"{name}.py", *flags, processes=processes)
        return done[name, processes]

    return run


@pytest.mark.parametrize("name", EACH_TRAINER)
def test_the_saved_model_is_that_of_the_best_evaluation(undisturbed, name):
    output = undisturbed(name)
    found = lines_of(output)
    best, _ = naive_best(found, name)
    assert found[0]["step"] == 0 and 2 < best < STEPS - 6
    assert kept_steps(output) == [best, STEPS]
    saved = weights(output / "model")  # names in a checkpoint begin with that of the module
    assert saved.equal(weights(output / f"checkpoints/step_{best:08}"))
    assert not saved.equal(weights(output / f"checkpoints/step_{STEPS:08}"))
    assert found[0].keys() == {"step"} | ALL_MEASURES[name]
    assert f"\nTrained for {best} steps by `" in (output / "model/README.md").read_text()


STOPPED = [("train_cross_encoder", 1, signal.SIGKILL, 10), ("train_bi_encoder", 2, signal.SIGTERM, 5)]
STOPPED = few_or_all(STOPPED, TRAINERS, [1, 2], [signal.SIGKILL, signal.SIGTERM], [5, 11])


@pytest.mark.parametrize("name, processes, number, step", STOPPED)
def test_stopped_and_resumed(undisturbed, settings, tmp_path, name, processes, number, step):
    """Stopped before or after the best step, whose checkpoint outlives later ones."""
    script, flags = ROOT / f"{name}.py", [*settings[name], "--output_dir", tmp_path]
    process = Forked(script, flags, processes)
    assert signal_when(process, tmp_path, step, number) == (143 if number == signal.SIGTERM else -number)
    assert not (tmp_path / "model").exists() and step <= metrics(tmp_path)[-1]["step"] < STEPS
    launch(script, *flags, "--resume", processes=processes)
    assert final_state(tmp_path) == final_state(undisturbed(name, processes))


def test_patience(undisturbed, settings, tmp_path):
    """The run equals the undisturbed one up to three evaluations after the best; its resume takes no step."""
    name = "train_bi_encoder"
    flags = [*settings[name], "--output_dir", tmp_path, "--early_stopping_patience", 3]
    train(name, *flags)
    whole = lines_of(undisturbed(name))
    best, measured = naive_best(whole, name)
    last = measured[measured.index(best) + 3]
    found = final_state(tmp_path)
    expected = saved_weights(undisturbed(name) / "model")
    assert last < STEPS and found == ([line for line in whole if line["step"] <= last], expected, [best, last])
    shutil.rmtree(tmp_path / "model")
    train(name, *flags, "--resume")
    assert final_state(tmp_path) == found


DIFFERENT_MEASURES = """
import os, sys
sys.path.insert(0, {0!r})
import {1} as script
measured = iter([[0, 1, 2, 3, 1], [0, 3, 1, 1, 1]][int(os.environ["RANK"])])
script.evaluate = lambda *_: {{{2!r}: next(measured)}}
script.main(script.parse_args(sys.argv[1:]))
os._exit(0)
"""


@pytest.mark.slow
def test_processes_that_measure_differently_stop_together(settings, tmp_path):
    """The main process decides; by the measures of the second, the run would end after step 2."""
    name = "train_bi_encoder"
    (tmp_path / "driver.py").write_text(DIFFERENT_MEASURES.format(str(ROOT), name, MEASURES[name]))
    flags = [*settings[name], "--output_dir", tmp_path / "out", "--eval_steps", 1, "--early_stopping_patience", 1]
    done = launch(tmp_path / "driver.py", *flags, processes=2, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert kept_steps(tmp_path / "out") == [3, 4] and (tmp_path / "out/model").exists()


@pytest.mark.parametrize("name", TRAINERS)
def test_unknown_measures(settings, tmp_path, monkeypatch, name):
    """Refused before anything is evaluated, with the main measures; neither the step nor the loss is one."""
    monkeypatch.setattr(importlib.import_module(name), "evaluate", lambda *_: pytest.fail("evaluated"))
    for measure in ("loss", "step", MEASURES[name].replace("@10", ""), f"held_out_x_{MEASURES[name]}"):
        flags = [*settings[name], "--metric_for_best_model", measure, "--output_dir", tmp_path / "out"]
        with pytest.raises(
            ValueError, match=f"^--metric_for_best_model {measure} is not measured: main .* are {MEASURES[name]}$"
        ):
            train(name, *flags)
    with pytest.raises(ValueError, match="is not measured: main measures are none, as no row is held out"):
        train(name, *flags, "--eval_rows", 0)
    assert not (tmp_path / "out/args.yaml").exists()


@pytest.mark.parametrize("name", TRAINERS)
def test_no_measure_that_there_is_is_refused(undisturbed, static, reranker, name):
    """Before the first evaluation: of what the library measures, or of a function, which gives names of its own. What
    this lets pass is refused after it."""
    script = importlib.import_module(name)
    assert lines_of(undisturbed(name))[0].keys() - {"step"} == ALL_MEASURES[name]
    rows = [SimpleNamespace(query=f"a {i}", documents=[f"b {i * i}"], labels=[i]) for i in range(4)]
    if name == "train_bi_encoder":
        model = SentenceTransformer(str(static), device="cpu")
        evaluators = dict([script.held_out_evaluator("held_out_map", rows, None, model)])
    else:
        model = CrossEncoder(str(reranker), device="cpu")
        evaluators = script.held_out_evaluators("held_out_map", rows, None, None)
    ((main, evaluator),) = evaluators.items()
    for measure in (*ALL_MEASURES[name], *evaluator(model), "held_out_mean", None):
        script.check_measure(measure, {MEASURES[name]: (None, {}), main: (evaluator, {})})
    script.check_measure("mine_too", {MEASURES[name]: (None, {}), "mine": (lambda model: {}, {})})
    with pytest.raises(script.UserError, match="step is not measured: choose one of loss"):
        args = script.Args(metric_for_best_model="step")
        script.Log(args, SimpleNamespace(is_main_process=True), [{"step": 0, "loss": 1}], []).find_best()


def test_a_best_checkpoint_that_cannot_be_read(undisturbed, settings, tmp_path):
    """Reported in one line; model/ is not written. What the line says writes that of the last step."""
    name, output = "train_bi_encoder", tmp_path / "out"
    shutil.copytree(undisturbed(name), output)
    best, _ = naive_best(lines_of(output), name)
    path = output / f"checkpoints/step_{best:08}"
    (path / "model.safetensors").write_bytes(saved_weights(path)[:-1] + b"x")
    shutil.rmtree(output / "model")
    flags = [*settings[name], "--output_dir", output, "--resume"]
    with pytest.raises(ValueError, match=f"^{path}: damaged or gone; model/ is not written: --resume --acc") as error:
        train(name, *flags)
    assert "\n" not in str(error.value) and not (output / "model").exists()
    place = flags.index("--metric_for_best_model")
    train(name, *flags[:place], *flags[place + 2 :], "--accept_changes")
    assert weights(output / "model").equal(weights(output / f"checkpoints/step_{STEPS:08}"))


def test_best_evaluation():
    """Step 0 and records without the measure are ignored; of equal values the first is best; NaN is worst."""
    script = importlib.import_module("train_bi_encoder")

    def best(*values, measure="loss", patience=1):
        args = script.Args(metric_for_best_model=measure, early_stopping_patience=patience)
        records = [{"step": step, "loss": value} for step, value in enumerate(values)]
        records = [{"step": record["step"], "other": 9.0} if record["loss"] is None else record for record in records]
        return script.Log(args, SimpleNamespace(is_main_process=True), records, []).find_best()

    assert best(9.0, 1.0, 3.0, 2.0) == (2, True)  # more is better, whatever the name
    assert best(9.0, 1.0, 3.0, 2.0, patience=2) == best(9.0, 1.0, 3.0, 2.0, patience=0) == (2, False)
    assert best(0.0, 1.0, 3.0, 3.0) == best(0.0, math.nan, 3.0, math.nan) == (2, True)
    assert best(0.0, 3.0, None, 2.0) == (1, True)
    assert best(0.0, 3.0, None) == best(0.0, math.nan) == (1, False)
    assert best(9.0) == best(1.0, 2.0, measure=None) == (0, False)


def test_evaluations_of_other_rows_do_not_compete(rows, static, tmp_path):
    """Those before a resume that evaluates other rows are neither the best, nor in the card."""
    for name, length in (("easy", 60), ("hard", 9)):
        texts = [{"docstring": row["code"][:length], "code": row["code"]} for row in rows[:40]]
        write_jsonl(tmp_path / f"{name}.jsonl", texts)
    write_jsonl(tmp_path / "train.jsonl", rows[100:])
    flags = [
        "--model_name_or_path",
        static,
        "--train_data",
        tmp_path / "train.jsonl",
        "--columns",
        "docstring",
        "code",
    ]
    flags += ["--batch_size", 32, "--eval_steps", 1, "--metric_for_best_model", MEASURES["train_bi_encoder"]]
    flags += ["--output_dir", tmp_path / "out", "--learning_rate", 1e-3]
    train("train_bi_encoder", *flags, "--eval_data", tmp_path / "easy.jsonl", "--max_steps", 2)
    more = ["--max_steps", 4, "--resume", "--accept_changes"]
    train("train_bi_encoder", *flags, "--eval_data", tmp_path / "hard.jsonl", *more)
    values = [line[MEASURES["train_bi_encoder"]] for line in metrics(tmp_path / "out") if len(line) > 2]
    assert min(values[:3]) > max(values[-2:])
    card = (tmp_path / "out/model/README.md").read_text()
    assert re.search("^Trained for [34] steps", card, re.M) and "evaluated" in str(metrics(tmp_path / "out"))
    assert not re.search(r"^\| *0 +\|", card, re.M)
