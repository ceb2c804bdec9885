"""What several scripts share is the same text in each: two parts of the trainers, and functions of equal name."""

import re
import shutil
import subprocess
import sys

import copies
import pytest
from copies import OWN, SCRIPTS, TOOLS, TRAINERS, copy, definitions, read_scripts, shared_parts

HEADING = re.compile(r"^# -+ (.+?)(?: \(same in (.+)\))?$", re.M)
TEXT = """X = 1


# ==== the path of a batch: from here to the end identical in {}
FORMATS = 1
LIMIT = 2


def cut(x):
    return x
"""


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


@pytest.mark.parametrize("script", SCRIPTS)
def test_copies_are_equal(script):
    scripts = read_scripts()
    assert copy(scripts)[script] == scripts[script], "run `make copies`"


def test_the_trainers_name_each_other():
    scripts = read_scripts()
    parts = [shared_parts(scripts[name]) for name in TRAINERS]
    assert [part[0] for part in parts] == TRAINERS[::-1]
    assert parts[0][2] == parts[1][2] and "\nclass Checkpoints:" in parts[0][2] and "__main__" in parts[0][2]


# What is edited, although it is the same in both trainers.
PLACES_TO_EDIT = {"flag", "json_object", "source_entry", "Parser", "make_parser", "args_of_source", "main",
                  "find_files", "open_source", "make_optimizer"}  # fmt: skip


def test_what_is_equal_and_not_edited_stands_below_the_mark():
    bi, cross = (dict(definitions(shared_parts(read_scripts()[name])[1])) for name in TRAINERS)
    equal = {name for name, source in bi.items() if name and source == cross.get(name)}
    assert {name for name in equal if bi[name].startswith(("def ", "class ", "@"))} == PLACES_TO_EDIT


def test_each_exception_is_needed():
    """A name leaves OWN or TOOLS once its versions are equal, or only one is left."""
    versions = {}
    for script, text in read_scripts().items():
        for name, source in definitions(text):
            versions.setdefault(name, {})[script] = source
    for name in OWN | TOOLS:
        assert len(set(versions[name].values())) > 1, name
    for name in TOOLS:
        assert len({source for script, source in versions[name].items() if script in TRAINERS}) == 1, name


def test_marked_sections_are_equal():
    scripts = read_scripts()
    assert missing_sections(scripts) == []
    assert "(same in train_bi_encoder.py)" in scripts["eval_incremental.py"]


def test_differences_are_copied():
    first = TEXT.format(TRAINERS[1])
    second = TEXT.format(TRAINERS[0]).replace("return x", "return -x").replace("X = 1", "X = 3")
    tool = "FORMATS = 5\nLIMIT = 3\nX = 4\n\n\n@cache\ndef cut(x):\n    return 0\n\n\ndef score(x):\n    return 1\n"
    texts = {TRAINERS[0]: first, TRAINERS[1]: second, "tool.py": tool}
    texts["other.py"] = tool.replace("return 1", "return 2")
    found = copy(texts)
    assert found[TRAINERS[0]] == first
    assert found[TRAINERS[1]] == second.replace("return -x", "return x")  # X stays
    expected = tool.replace("@cache\ndef cut(x):\n    return 0", "def cut(x):\n    return x")
    expected = expected.replace("LIMIT = 3", "LIMIT = 2")
    assert found["tool.py"] == found["other.py"] == expected
    assert copy(found) == found
    head, tail = "# ----- data (same in b.py)\nX = 1\n\n\n", "# ----- step\nY = 2\n"
    assert missing_sections({"a.py": head + tail, "b.py": "X = 1\nZ = 3\n"}) == []
    assert missing_sections({"a.py": head + tail, "b.py": "X = 2\n"}) == [("data", "a.py", "b.py")]
    assert missing_sections({"a.py": head + tail, "c.py": ""}) == []  # b.py is not given


def test_make_copies_writes_them(tmp_path):
    """From the bi-encoder, whatever stands in the copies."""
    (tmp_path / "tests").mkdir()
    shutil.copy(copies.__file__, tmp_path / "tests")
    for script, text in read_scripts().items():
        (tmp_path / script).write_text(text)
    source = (tmp_path / SCRIPTS[0]).read_text()
    assert source.count("def is_plain(kind):") == 1
    (tmp_path / SCRIPTS[0]).write_text(source.replace("def is_plain(kind):", "def is_plain(kind, more=None):"))
    command = [sys.executable, "tests/copies.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"{SCRIPTS[1]}: changed\n" in done.stdout
    changed = {path.name: path.read_text() for path in tmp_path.glob("*.py")}
    assert "def is_plain(kind, more=None):" in changed[SCRIPTS[1]]
    assert copy({n: changed[n] for n in SCRIPTS}) == changed
