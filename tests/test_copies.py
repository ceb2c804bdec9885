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
    texts = {
        TRAINERS[0]: first,
        TRAINERS[1]: second,
        "tool.py": tool,
        "other.py": tool.replace("return 1", "return 2"),
    }
    found = copy(texts)
    assert found[TRAINERS[0]] == first
    assert found[TRAINERS[1]] == second.replace("return -x", "return x")  # X stays
    expected = tool.replace("LIMIT = 3", "LIMIT = 2").replace(
        "@cache\ndef cut(x):\n    return 0", "def cut(x):\n    return x"
    )
    assert found["tool.py"] == found["other.py"] == expected
    assert copy(found) == found
    head, tail = "# ----- data (same in b.py)\nX = 1\n\n\n", "# ----- step\nY = 2\n"
    assert missing_sections({"a.py": head + tail, "b.py": "X = 1\nZ = 3\n"}) == []
    assert missing_sections({"a.py": head + tail, "b.py": "X = 2\n"}) == [("data", "a.py", "b.py")]
    assert missing_sections({"a.py": head + tail, "c.py": ""}) == []  # b.py is not given


FIRST, SECOND, TOOL = SCRIPTS[:3]


@pytest.fixture
def make_copies(tmp_path):
    """Return a function that replaces text in a script of a small repository, and returns what copies.py prints."""
    (tmp_path / "tests").mkdir()
    shutil.copy(copies.__file__, tmp_path / "tests")
    for script in SCRIPTS:
        (tmp_path / script).write_text(
            TEXT.replace("# ==== the path of a batch: from here to the end identical in {}\n", "")
        )
    (tmp_path / FIRST).write_text(TEXT.format(SECOND))
    (tmp_path / SECOND).write_text(TEXT.format(FIRST))

    def run(script, old, new):
        text = (tmp_path / script).read_text()
        assert old in text
        (tmp_path / script).write_text(text.replace(old, new))
        done = subprocess.run([sys.executable, "tests/copies.py"], cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture
def commit(make_copies, tmp_path):
    """Commit the scripts of make_copies; return a function that does so again."""
    if not shutil.which("git"):
        pytest.skip("needs git")

    def run(*commands):
        for words in (*commands, "add .", "-c user.name=a -c user.email=a@b commit -qm message"):
            subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)

    run("init -q")
    return run


@pytest.mark.usefixtures("commit")
@pytest.mark.parametrize(
    "script, name, old, new",
    [
        (SECOND, "cut", "return x", "return -x"),
        (SECOND, "added", "\ndef cut", "\ndef added():\n    pass\n\n\ndef cut"),
        (SECOND, "a shared part", "LIMIT = 2", "LIMIT = 2\n# a comment"),
        (SECOND, "a shared part", "LIMIT = 2\n", ""),
        (TOOL, "cut", "return x", "return -x"),
        (TOOL, "LIMIT", "LIMIT = 2", "LIMIT = 3"),
    ],
)
def test_an_edit_in_a_copy_is_not_overwritten(make_copies, tmp_path, script, name, old, new):
    """Nor where the source was edited, too; the edit can be moved, or taken back."""
    for value in (1, 5):
        before = (tmp_path / script).read_text()
        status, printed = make_copies(script, old, new)
        assert status == 1 and printed.startswith(f"{script}: {name} was edited in the copy: move the edit into ")
        assert len(printed.splitlines()) == 1 and (tmp_path / script).read_text() == before.replace(old, new)
        status, printed = make_copies(FIRST, "return x", f"return x + {value}")
        assert status == 1 and f"{script}: {name} was edited" in printed
        (tmp_path / script).write_text(before)
        assert make_copies(FIRST, f"return x + {value}", "return x") == (0, "")
    (tmp_path / script).write_text(before.replace(old, new))
    assert make_copies(FIRST, old, new)[0] == 0


def test_edits_of_the_source_are_copied_again_and_again(make_copies, commit, tmp_path):
    """Before they are committed or after, and over the conflicts of a merge."""
    for number in range(3):
        status, printed = make_copies(FIRST, f"return x{' + 1' * number}", f"return x{' + 1' * (number + 1)}")
        assert status == 0 and printed.count(": changed") == 6, printed
    commit()
    source = (tmp_path / FIRST).read_text()
    (tmp_path / FIRST).write_text(source.replace("LIMIT = 2", "LIMIT = 4"))
    commit()
    assert make_copies(FIRST, "LIMIT = 4", "LIMIT = 5")[0] == 0
    conflict = "<<<<<<< ours\n    return 1\n=======\n    return 2\n>>>>>>> theirs"
    assert make_copies(SECOND, "    return x + 1 + 1 + 1", conflict) == (0, f"{SECOND}: changed\n")
    assert shared_parts((tmp_path / SECOND).read_text())[2] == shared_parts((tmp_path / FIRST).read_text())[2]


def test_an_edit_that_was_committed_in_a_copy(make_copies, commit, tmp_path):
    (tmp_path / SECOND).write_text((tmp_path / SECOND).read_text().replace("return x", "return -x"))
    commit()
    assert make_copies(FIRST, "X = 1", "X = 2")[0] == 1


def test_copies_without_git(make_copies):
    """What a copy was is unknown there: it is overwritten."""
    assert make_copies(SECOND, "return x", "return -x") == (0, f"{SECOND}: changed\n")
