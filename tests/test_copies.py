"""What several scripts share is the same text in each: the machinery of the trainers, and functions of equal name."""

import ast
import re

from conftest import ROOT, TRAINERS

SCRIPTS = [*TRAINERS, "eval_incremental", "mine_negatives", "prepare_corpus"]
MARK = re.compile(r"^# ==== machinery: from here to the end identical in (\w+\.py)$", re.M)
# Each trainer has its own version of these: the same purpose, for another kind of row, model or output.
OWN = {"main", "Args", "check_flags", "forward_backward", "report_entropies", "margin_mse", "kl",
       "set_teacher_temperature", "make_loss", "read_row", "Batch", "make_batch", "make_micro_batches", "load_model",
       "own_prompts", "add_prompts", "open_eval_sets", "held_out_set", "evaluate", "pair_measures",
       "model_card"}  # fmt: skip
# The other scripts have their own versions of these as well.
OWN_OF_OTHERS = OWN | {"flag", "parse_args", "encode", "score", "pad_micro_batches", "prefetch", "Run"}  # fmt: skip
HEADING = re.compile(r"^# -+ (.+?)(?: \(same in (.+)\))?$", re.M)


def read_scripts():
    """Return {file name: text} of the scripts."""
    return {f"{name}.py": (ROOT / f"{name}.py").read_text() for name in SCRIPTS}


def definitions(text):
    """Return [(name or None, source)] of the top-level statements of a script, with their decorators."""
    lines, found = text.splitlines(), []
    for node in ast.parse(text).body:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        name = node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
        found.append((name, "\n".join(lines[first - 1 : node.end_lineno])))
    return found


def drifted(texts):
    """Return [(name, script, other script)] of top-level definitions that differ in `texts`, {script: source}."""
    seen, found = {}, []
    for script, text in texts.items():
        own = OWN if script.startswith("train_") else OWN_OF_OTHERS
        for name, source in definitions(text):
            if name and name not in own:
                other, where = seen.setdefault(name, (source, script))
                if source != other:
                    found.append((name, where, script))
    return found


def missing_sections(texts):
    """Return [(heading, script, other script)] of sections of which a statement does not occur in the script they
    name."""
    found = []
    for script, text in texts.items():
        headings = list(HEADING.finditer(text))
        for heading, following in zip(headings, [*headings[1:], None]):
            body = text[heading.end() : following.start() if following else len(text)]
            for other in (heading[2] or "").split(", "):
                if other in texts and any(source not in texts[other] for _, source in definitions(body)):
                    found.append((heading[1], script, other))
    return found


def machinery(text):
    """Return (the other trainer that a trainer names at its mark, the text from there to its end)."""
    (mark,) = MARK.finditer(text)
    return mark[1], text[mark.end() :]


def test_the_machinery_of_the_trainers_is_equal():
    first, second = (machinery((ROOT / f"{name}.py").read_text()) for name in TRAINERS)
    assert first[1] == second[1] and [first[0], second[0]] == [f"{name}.py" for name in TRAINERS[::-1]]
    assert len(first[1].splitlines()) > 1000 and "\nclass Run:" in first[1] and "__main__" in first[1]


def test_definitions_of_the_same_name_are_equal():
    assert drifted(read_scripts()) == []


def test_each_version_of_ones_own_is_needed():
    """A name leaves OWN once its versions are equal, or only one is left."""
    versions = {}
    for script, text in read_scripts().items():
        for name, source in definitions(text):
            versions.setdefault(name, {})[script] = source
    for name in OWN_OF_OTHERS:
        found = {script: text for script, text in versions[name].items() if name not in OWN or "train_" in script}
        assert len(set(found.values())) > 1, name


def test_marked_sections_are_equal():
    scripts = read_scripts()
    assert missing_sections(scripts) == []
    assert "(same in train_bi_encoder.py)" in scripts["eval_incremental.py"]


def test_drift_is_detected():
    a, b = "def cut(x):\n    return x\n", "def cut(x):\n    return -x\n"
    assert drifted({"a.py": a, "b.py": a}) == []
    assert drifted({"a.py": a, "b.py": b}) == [("cut", "a.py", "b.py")]
    assert drifted({"a.py": "@cache\n" + a, "b.py": a}) == [("cut", "a.py", "b.py")]
    assert drifted({"a.py": a.replace("cut", "main"), "b.py": b.replace("cut", "main")}) == []
    flags = {name: text.replace("cut", "flag") for name, text in {"train_x.py": a, "train_y.py": b, "z.py": b}.items()}
    assert drifted(flags) == [("flag", "train_x.py", "train_y.py")]
    head, tail = "# ----- data (same in b.py)\nX = 1\n\n\n" + a, "# ----- step\nY = 2\n"
    assert missing_sections({"a.py": head + tail, "b.py": "X = 1\n\n\n" + a + "Z = 3\n"}) == []
    assert missing_sections({"a.py": head + tail, "b.py": a + "\n\nX = 1\n"}) == []  # in another order
    assert missing_sections({"a.py": head + tail, "b.py": "X = 2\n\n\n" + a}) == [("data", "a.py", "b.py")]
    assert missing_sections({"a.py": head + tail, "b.py": "X = 1\n\n\n" + b}) == [("data", "a.py", "b.py")]
    assert missing_sections({"a.py": head + tail, "c.py": ""}) == []  # b.py is not given
