"""Whatever goes wrong with the data of one process, all stop at the same step, save what is done, and say why once."""

import importlib
import os
import subprocess
import sys
import time

import pyarrow as pa
import pytest
import yaml
from conftest import CHAOS, ROOT, TRAINERS, few_or_all, launch, metrics, train, write_jsonl
from forked import Forked, launcher_environment

# The last process cannot look up texts after its eighth time. Accelerate shards only on GPUs, as in fsdp2_worker.py.
DRIVER = """
import os, sys
sys.path.insert(0, {root!r})
import {name} as script
from accelerate import PartialState
from accelerate.utils import DistributedType

calls = []
is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)

def hashes(lookup, ids, real=script.TextLookup.hashes):
    calls.append(lookup)
    if is_last and len(calls) > 8:
        raise OSError("Stale file handle")
    return real(lookup, ids)

def sync_step(losses, norm, batches, signals, accelerator, real=script.sync_step):
    found = real(losses, norm, batches, signals, accelerator)
    if found[-1]:
        print(f"stopped after {{batches[0].step}} steps {{accelerator.distributed_type.name}}\\n", end="", flush=True)
    return found

def failing(loss):
    def fail(inputs, whole, **options):
        if is_last and whole.step > 4:
            raise script.UserError("a loss that refuses")
        return loss(inputs, whole, **options)

    return fail

if "FAILING_LOSS" in os.environ:
    script.LOSSES |= {{name: failing(loss) for name, loss in script.LOSSES.items()}}
script.TextLookup.hashes, script.sync_step = hashes, sync_step
if {sharded}:
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
try:
    script.main(script.parse_args(sys.argv[1:]))
    status = 0
except Exception as error:
    status = script.print_error(error)
os._exit(status)
"""


def bad_row(folder, rows, last):
    """One process owns the row."""
    write_jsonl(folder / "rows.jsonl", [{**row, "code": ""} if i == 80 else row for i, row in enumerate(rows)])
    return ["--train_data", folder / "rows.jsonl"], [[]] * (last + 1), f"{folder}/rows.jsonl: 'code' has no text in"


def unreadable_file(folder, rows, last):
    """The file of the last process is cut."""
    for name in ("whole", "cut"):
        with pa.ipc.new_stream(str(folder / f"{name}.arrow"), pa.Table.from_pylist(rows[:1]).schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows), max_chunksize=16)
    os.truncate(folder / "cut.arrow", (folder / "cut.arrow").stat().st_size // 2)
    names = ["whole"] * last + ["cut"]
    files = [["--train_data", folder / f"{name}.arrow"] for name in names]
    return ["--streaming", "--shuffle_buffer", 16], files, f"{folder}/cut.arrow: "


def failing_lookup(folder, rows, last):
    """See DRIVER."""
    write_jsonl(folder / "texts.jsonl", [{"_id": f"d{i}", "text": row["code"]} for i, row in enumerate(rows)])
    ids = [{"docstring": row["docstring"], "code": f"d{i}"} for i, row in enumerate(rows)]
    write_jsonl(folder / "rows.jsonl", ids)
    flags = ["--train_data", folder / "rows.jsonl", "--corpus", folder / "texts.jsonl"]
    flags += ["--corpus_columns", "_id", "text"]
    return flags, [[]] * (last + 1), f"{folder}/texts.jsonl: text: Stale file handle"


def failing_loss(folder, rows, last):
    """See DRIVER."""
    write_jsonl(folder / "rows.jsonl", rows)
    return ["--train_data", folder / "rows.jsonl"], [[]] * (last + 1), "a loss that refuses"


def assert_one_error(stderr, message):
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {message}")


CAUSES = [bad_row, unreadable_file, failing_lookup, failing_loss]
FEW = [("train_bi_encoder", bad_row, 2, "fsdp2"), ("train_cross_encoder", failing_loss, 2, "ddp"),
       ("train_bi_encoder", failing_lookup, 2, "ddp"), ("train_bi_encoder", failing_loss, 2, "fsdp2"),
       ("train_cross_encoder", unreadable_file, 2, "ddp")]  # fmt: skip


@pytest.mark.parametrize(
    "name, cause, processes, kind",
    few_or_all(FEW, TRAINERS, CAUSES, [2, 4], ["ddp", "fsdp2"], quick=2),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_all_processes_stop_together(rows, bert, tmp_path, report, monkeypatch, name, cause, processes, kind):
    if cause is failing_loss:
        monkeypatch.setenv("FAILING_LOSS", "1")
    given, per_rank, message = cause(tmp_path, rows, processes - 1)
    output, driver, environment = tmp_path / "out", tmp_path / "driver.py", {}
    driver.write_text(DRIVER.format(root=str(ROOT), name=name, sharded=kind == "fsdp2"))
    if kind == "fsdp2":
        config = yaml.safe_load((ROOT / "accelerate_configs/fsdp2.yaml").read_text())
        config |= {"use_cpu": True, "num_processes": processes, "mixed_precision": "no", "main_process_port": 0}
        (tmp_path / "fsdp2.yaml").write_text(yaml.safe_dump(config))
        environment = launcher_environment("--config_file", tmp_path / "fsdp2.yaml")
    flags = ["--model_name_or_path", bert, "--columns", "docstring", "code", "--batch_size", 16, "--eval_rows", 8,
             "--max_steps", 30, "--max_length", 32, "--shuffle_buffer", 0, "--logging_steps", 1, "--save_steps", 0,
             "--eval_steps", 100, "--output_dir", output]  # fmt: skip
    flags += ["--num_negatives", 2] * ("cross" in name)
    run = Forked(driver, [*flags, *given], processes, environment=environment, per_rank=per_rank)
    run.processes[0].join(120)
    (line,) = {line for line in run.read("stderr").splitlines() if line.startswith("error: ")}
    assert line.startswith(f"error: {message}") and run.processes[0].exitcode == 1
    seconds = time.time() - (output / "metrics.jsonl").stat().st_mtime  # since the last step
    assert seconds < 30
    for process in run.processes[1:]:  # no launcher ends them: they wait 5 s for it, and report the error themselves
        process.join(30)
        assert process.exitcode == 1
    assert run.wait() == 1
    (stopped,) = {line for line in run.read("stdout").splitlines() if line.startswith("stopped after ")}
    assert run.read("stdout").count(stopped) == processes
    step = int(stopped.split()[2])
    assert ("FSDP" in stopped) == (kind == "fsdp2")
    assert 2 <= step < 29 and metrics(output)[-1]["step"] == step
    assert [path.name for path in (output / "checkpoints").iterdir()] == [f"step_{step:08}"]
    assert "Traceback" not in run.read("stderr") and not (output / "model").exists()
    report(f"{cause.__name__.replace('_', ' ')} of one of {processes} processes of `{name}.py`, {kind}", 1,
           f"all stopped after step {step}, saved as step_{step:08}, in {seconds:.1f} s: {message}")  # fmt: skip


@pytest.fixture
def busy():
    """Under `make chaos`, load the machine by two processes for each of its cores."""
    count = 2 * os.cpu_count() if CHAOS else 0
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.parametrize("loss", ["infonce", "CoSENTLoss"] if CHAOS else ["CoSENTLoss"])
def test_what_all_processes_find_is_printed_once(rows, bert, tmp_path, busy, loss):
    """A bad row, on which all agree, or a loss that each finds to be unusable. Once a process has ended, the others
    are ended: under `make chaos` by the launcher, by a SIGTERM that a training process takes for a wish to stop."""
    given, _, message = bad_row(tmp_path, rows, 0)
    message = "--loss CoSENTLoss, these columns and labels: " if loss == "CoSENTLoss" else message
    flags = ["--model_name_or_path", bert, "--columns", "docstring", "code", "--batch_size", 16, "--eval_rows", 0,
             "--max_steps", 30, "--max_length", 32, "--shuffle_buffer", 0, "--loss", loss]  # fmt: skip
    flags += ["--output_dir", tmp_path / "out", *given]
    done = launch(ROOT / "train_bi_encoder.py", *flags, processes=2, use_launcher=CHAOS > 0, check=False)
    assert done.returncode
    assert_one_error(done.stderr, message)


@pytest.mark.slow
def test_the_error_of_one_process_is_printed_by_it(corpus, bert, tmp_path):
    flags = ["--model_name_or_path", bert, "--columns", "docstring", "code", "--max_steps", 1]
    flags += ["--output_dir", tmp_path / "out"]
    sources = [["--train_data", f"{corpus}/*.parquet"], ["--train_data", tmp_path / "absent.jsonl"]]
    run = Forked(ROOT / "train_bi_encoder.py", flags, 2, per_rank=sources)
    assert run.wait() == 1
    assert f"error: --train_data: {tmp_path}/absent.jsonl: " in run.read("stderr")


@pytest.mark.slow
def test_all_stop_at_a_weight_that_is_not_finite(corpus, bert, tmp_path):
    """Only the main process has the weights that it saves; nothing is saved, and no other process waits for it."""
    flags = ["--train_data", f"{corpus}/*.parquet", "--columns", "docstring", "code", "--model_name_or_path", bert,
             "--batch_size", 16, "--eval_rows", 0, "--max_length", 32, "--max_steps", 2, "--save_steps", 1,
             "--warmup_ratio", 0, "--learning_rate", 1e38, "--weight_decay", 1e3]  # fmt: skip
    flags += ["--output_dir", tmp_path / "out"]
    run = Forked(ROOT / "train_bi_encoder.py", flags, 2)
    for process in run.processes:
        process.join(60)
        assert process.exitcode == 1
    assert_one_error(run.read("stderr"), "step 1: a weight is not finite: lower --learning_rate")
    assert "Traceback" not in run.read("stderr") and not (tmp_path / "out/checkpoints").exists()


@pytest.mark.parametrize("name, loss", [("train_bi_encoder", "infonce"), ("train_cross_encoder", "bce")])
def test_a_bug_in_a_loss_keeps_its_traceback(rows, bert, tmp_path, monkeypatch, name, loss):
    """And the steps before it; `bce` is computed in each pass."""
    script = importlib.import_module(name)

    def broken(inputs, whole, real=script.LOSSES[loss], **options):
        return real(inputs, {}["no such key"] if whole.step == 3 else whole, **options)

    monkeypatch.setitem(script.LOSSES, loss, broken)
    write_jsonl(tmp_path / "rows.jsonl", rows[:64])
    flags = ["--model_name_or_path", bert, "--columns", "docstring", "code", "--batch_size", 8, "--eval_rows", 0,
             "--max_length", 32, "--loss", loss, "--train_data", tmp_path / "rows.jsonl", "--logging_steps", 1,
             "--gradient_accumulation_steps", 2, "--output_dir", tmp_path / "out"]  # fmt: skip
    message = "(?s)^the loss failed\nTraceback.*broken.*KeyError: 'no such key' .step 4.$"
    with pytest.raises(script.AgreedError, match=message):
        train(name, *flags)
    assert [path.name for path in (tmp_path / "out/checkpoints").iterdir()] == ["step_00000003"]
    assert metrics(tmp_path / "out")[-1]["step"] == 3


def test_a_row_that_a_loss_cannot_take_ends_the_run(rows, bert, tmp_path):
    """One without its negative: the steps before it are saved."""
    short = [{"q": row["docstring"], "d": row["code"], "n": row["code"][::-1]} for row in rows[:64]]
    short[40]["n"] = None
    write_jsonl(tmp_path / "rows.jsonl", short)
    flags = ["--model_name_or_path", bert, "--columns", *"qdn", "--batch_size", 8, "--eval_rows", 0, "--max_length",
             32, "--loss", "MultipleNegativesRankingLoss", "--train_data", tmp_path / "rows.jsonl",
             "--shuffle_buffer", 0, "--output_dir", tmp_path / "out"]  # fmt: skip
    with pytest.raises(ValueError, match=r"equally many documents and labels in all rows \(step 6\)$"):
        train("train_bi_encoder", *flags)
    assert [path.name for path in (tmp_path / "out/checkpoints").iterdir()] == ["step_00000005"]
