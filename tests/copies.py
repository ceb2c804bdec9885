"""Copy what several scripts share from the first script that contains it into the others: `make copies`.

Both trainers have the same path of a batch and the same services. Functions and classes with equal names, and
constants of these two parts, are equal in all scripts, but for the exceptions below. Edit such a function in
train_bi_encoder.py, then run `make copies`, which refuses to overwrite an edit made in a copy.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAINERS = ["train_bi_encoder.py", "train_cross_encoder.py"]
SCRIPTS = [*TRAINERS, "eval_incremental.py", "report.py", "mine_negatives.py", "check_overlap.py", "prepare_corpus.py"]
MARK = re.compile(r"^# ==== (?:machinery|the path of a batch): from here to the end identical in (\w+\.py)\n", re.M)
# Each script has its own version of these: the same purpose, for another kind of row, model or output.
OWN = {"main", "Args", "check_flags", "forward_backward", "margin_mse", "kl", "make_loss", "Row", "read_row",
       "local_rows", "Batch", "make_batch", "make_micro_batches", "load_model", "resolve_args", "open_evaluators",
       "open_beir", "fit_micro_batches", "resolve_source_args", "parse_args", "FORMATS"}  # fmt: skip
# The scripts other than the trainers have a common version of these.
TOOLS = {"flag", "user_errors", "print_error", "make_parser"}


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
            if name is None or name in OWN or not is_shared:
                continue
            of_tools = name in TOOLS and script not in TRAINERS
            original = sources.setdefault((name, of_tools), source)
            text = text.replace(f"\n{source}\n", f"\n{original}\n")
        results[script] = text
    return results


def git(*words, given=""):
    """Return what git prints; "" if it fails, or there is none."""
    options = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
    try:
        return subprocess.run(["git", *words], input=given, **options).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def statements(script, text):
    """Return [(name, source)] of a script, and of its shared parts as a whole; without parts that have conflicts of a
    merge, which are settled in the source."""
    below = shared_parts(text)[2] if script in TRAINERS else ""
    if "\n<<<<<<< " in below:
        return definitions(text.removesuffix(below))
    return [*definitions(text), ("a shared part", below)]


def known_sources(texts):
    """Return the sources of statements of scripts, after the copies."""
    return {source for script, text in copy(texts).items() for _, source in statements(script, text)}


def committed_sources():
    """Return what was copied by the commits that changed the scripts last; nothing without git."""
    found = set()
    for commit in {git("log", "-1", "--format=%H", "--", script).strip() for script in SCRIPTS} - {""}:
        texts = {script: git("show", f"{commit}:./{script}") for script in SCRIPTS}
        found |= known_sources({script: text for script, text in texts.items() if text})
    return found


def edited_copies(texts, known):
    """Return a line for each script where a copy was edited: it is not in `known`, and no call has copied it."""
    lines = []
    for script, text in texts.items():
        for name, source in statements(script, text):
            if source not in known and not git("cat-file", "-t", git("hash-object", "--stdin", given=source).strip()):
                advice = f"move the edit into the script that it is copied from, or git checkout {script}"
                lines.append(f"{script}: {name} was edited in the copy: {advice}")
                break
    return lines


if __name__ == "__main__":
    scripts = read_scripts()
    if committed := committed_sources():
        current = known_sources(scripts)
        if edited := edited_copies(scripts, current | committed):
            sys.exit("\n".join(edited))
        for source in current - committed:  # a later call finds it in git
            git("hash-object", "-w", "--stdin", given=source)
    for script, text in copy(scripts).items():
        if text != scripts[script]:
            (ROOT / script).write_text(text)
            print(f"{script}: changed")
