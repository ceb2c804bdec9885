"""A function that stands in several scripts is the same text in each."""

import ast

from conftest import ROOT

OWN = {"main", "Args", "parse_args"}  # each script has its own


def drifted(texts):
    """[(name, script, script)] of definitions at the top of several `texts` ({script: source}) that differ."""
    seen, found = {}, []
    for script, text in texts.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in OWN:
                source = ast.get_source_segment(text, node)
                first, where = seen.setdefault(node.name, (source, script))
                if source != first:
                    found.append((node.name, where, script))
    return found


def test_same_name_same_text():
    scripts = {path.name: path.read_text() for path in sorted(ROOT.glob("*.py"))}
    assert len(scripts) >= 3
    assert drifted(scripts) == []


def test_drift_is_seen():
    a, b = "def cut(x):\n    return x\n", "def cut(x):\n    return -x\n"
    assert drifted({"a.py": a, "b.py": a}) == []
    assert drifted({"a.py": a, "b.py": b}) == [("cut", "a.py", "b.py")]


def test_every_copy_says_where_the_others_are():
    scripts = {path.name: path.read_text() for path in ROOT.glob("*.py")}
    places = {}
    for script, text in scripts.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in OWN:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                places.setdefault(node.name, {})[script] = text.splitlines()[first - 2]
    for name, marks in places.items():
        for script, mark in marks.items():
            others = set(marks) - {script}
            said = set(mark.removeprefix("# same in ").split(", ")) if mark.startswith("# same in ") else set()
            assert said == others, (name, script)
