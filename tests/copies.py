"""Copy what several scripts share from the first script that contains it into the others: `make copies`.

Both trainers have the same path of a batch and the same services. Functions and classes with equal names, and
constants of these two parts, are equal in all scripts, but for the exceptions below. Edit such a function in
train_bi_encoder.py, then run `make copies`; an edit made in a copy is overwritten.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAINERS = ["train_bi_encoder.py", "train_cross_encoder.py"]
SCRIPTS = [*TRAINERS, "eval_incremental.py", "report.py", "mine_negatives.py", "check_overlap.py", "prepare_corpus.py"]
MARK = re.compile(r"^# ==== (?:machinery|the path of a batch): from here to the end identical in (\w+\.py)\n", re.M)
# Each script has its own version of these: the same purpose, for another kind of row, model or output.
OWN = {"Args", "check_flags", "forward_backward", "margin_mse", "kl", "make_loss", "Row", "read_row",
       "local_rows", "Batch", "make_batch", "make_micro_batches", "load_model", "resolve_args",
       "open_evaluators", "fit_micro_batches", "resolve_source_args", "parse_args",
       "FORMATS"}  # fmt: skip
# The scripts other than the trainers have a common version of these.
TOOLS = {"user_errors", "print_error"}
# What both trainers share above the mark, while other scripts have their own.
OF_TRAINERS = {"main"}


def read_scripts():
    """Return {file name: text} of the scripts."""
    return {name: (ROOT / name).read_text() for name in SCRIPTS}


def definitions(text):
    """Return [(name or None, source)] of the top-level statements of a script, with their decorators."""
    lines = text.splitlines()
    found = []
    for node in ast.parse(text).body:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        name = getattr(node, "name", None)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        found.append((name, "\n".join(lines[first - 1 : node.end_lineno])))
    return found


def shared_parts(text):
    """Return (the other trainer that a trainer names at its mark, what is above the mark, what is below)."""
    (mark,) = MARK.finditer(text)
    return mark[1], text[: mark.start()], text[mark.end() :]


def copy(texts):
    """Return {script: text} after the copies; the first script of `texts` is a trainer."""
    first, *_ = texts
    below = shared_parts(texts[first])[2]
    constants = {name for name, _ in definitions(below) if name}
    sources = {}
    results = {}
    for script, text in texts.items():
        if script in TRAINERS:
            text = text.removesuffix(shared_parts(text)[2]) + below
        for name, source in definitions(text):
            is_shared = source.startswith(("def ", "class ", "@")) or name in constants
            is_own = name in OWN or (name in OF_TRAINERS and script not in TRAINERS)
            if name is None or is_own or not is_shared:
                continue
            of_tools = name in TOOLS and script not in TRAINERS
            original = sources.setdefault((name, of_tools), source)
            text = text.replace(f"\n{source}\n", f"\n{original}\n")
        results[script] = text
    return results


if __name__ == "__main__":
    scripts = read_scripts()
    for script, text in copy(scripts).items():
        if text != scripts[script]:
            (ROOT / script).write_text(text)
            print(f"{script}: changed")
