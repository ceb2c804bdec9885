"""Functions, classes and sections shared by several scripts are the same text in each."""

import ast
import re

from conftest import ROOT

SCRIPTS = ["train_bi_encoder", "train_cross_encoder", "eval_incremental", "mine_negatives", "prepare_corpus"]
# Each script has its own version of these: the same purpose, for another kind of row, model or output.
OWN = {"main", "Args", "parse_args", "Batch", "make_batches", "make_micro_batches", "load_model", "make_loss",
       "margin_mse", "kl", "set_teacher_temperature", "report_entropies", "model_card", "encode", "forward_backward",
       "evaluate"}  # fmt: skip
HEADING = re.compile(r"^# -+ (.+?)(?: \(same in (.+)\))?$", re.M)


def read_scripts():
    """Return {file name: text} of the scripts."""
    return {f"{name}.py": (ROOT / f"{name}.py").read_text() for name in SCRIPTS}


def drifted(texts):
    """Return [(name, script, other script)] of top-level definitions that differ in `texts`, {script: source}."""
    seen, found = {}, []
    for script, text in texts.items():
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in OWN:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                source = lines[first - 1 : node.end_lineno]
                other, where = seen.setdefault(node.name, (source, script))
                if source != other:
                    found.append((node.name, where, script))
    return found


def missing_sections(texts):
    """Return [(heading, script, other script)] of sections that do not occur in the script they name."""
    found = []
    for script, text in texts.items():
        headings = list(HEADING.finditer(text))
        for heading, following in zip(headings, [*headings[1:], None]):
            body = text[heading.end() : following.start() if following else len(text)].strip()
            for other in (heading[2] or "").split(", "):
                if other in texts and body not in texts[other]:
                    found.append((heading[1], script, other))
    return found


def test_definitions_of_the_same_name_are_equal():
    assert drifted(read_scripts()) == []


def test_marked_sections_are_equal():
    scripts = read_scripts()
    assert missing_sections(scripts) == []
    assert "(same in train_cross_encoder.py)" in scripts["train_bi_encoder.py"]


def test_drift_is_detected():
    a, b = "def cut(x):\n    return x\n", "def cut(x):\n    return -x\n"
    assert drifted({"a.py": a, "b.py": a}) == []
    assert drifted({"a.py": a, "b.py": b}) == [("cut", "a.py", "b.py")]
    assert drifted({"a.py": "@cache\n" + a, "b.py": a}) == [("cut", "a.py", "b.py")]
    assert drifted({"a.py": a.replace("cut", "main"), "b.py": b.replace("cut", "main")}) == []
    head, tail = "# ----- data (same in b.py)\nX = 1\n\n\n" + a, "# ----- step\nY = 2\n"
    assert missing_sections({"a.py": head + tail, "b.py": "X = 1\n\n\n" + a + "Z = 3\n"}) == []
    assert missing_sections({"a.py": head + tail, "b.py": "X = 2\n\n\n" + a}) == [("data", "a.py", "b.py")]
    assert missing_sections({"a.py": head + tail, "c.py": ""}) == []  # b.py is not given
