"""Commands, flags, links and dependency headers are valid."""

import argparse
import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SCRIPTS = ["train_bi_encoder", "train_cross_encoder", "eval_incremental", "report", "mine_negatives", "check_overlap",
           "prepare_corpus"]  # fmt: skip
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "accelerate_configs/README.md",
         ROOT / "benchmarks/README.md"]  # fmt: skip
# Those of docs/recipes are run by tests/test_recipes.py, as most of them require the diff of their page.
SOURCES = [*(page for page in PAGES if page.parent.name != "recipes"), *ROOT.glob("*.py"),
           *(ROOT / "benchmarks").glob("*.py")]  # fmt: skip
# What args.yaml contains, where a command names one.
FLAG_FILES = {
    "train_bi_encoder": {"train_data": ["pairs.csv"], "columns": ["a", "b"], "model_name_or_path": "model"},
    "train_cross_encoder": {"train_data": ["pairs.csv"], "columns": ["a", "b"], "model_name_or_path": "model"},
    "eval_incremental": {"beir": ["scifact"], "model_name_or_path": ["model"]},
}


def read_parser(name):
    """Return the ArgumentParser of a script."""
    script, found = importlib.import_module(name), []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(argparse.ArgumentParser, "print_help", lambda parser, file=None: found.append(parser))
        script.parse_args(["--help"])
    return found[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_links_are_valid(page):
    """Each flag of a command belongs to its script, and each linked or named file exists."""
    text = re.sub(r"\\\n *", "", page.read_text())
    flags = {name: {word for action in read_parser(name)._actions for word in action.option_strings}
             for name in SCRIPTS}  # fmt: skip
    for name, rest in re.findall(r"^\s*(?:python|accelerate launch|torchrun).*?(\w+)\.py\b(.*)$", text, re.M):
        for word in re.findall(r"(?<![\w-])--[a-z_0-9]+", rest):
            added = re.search(rf"^\+ +{word[2:]}: ", text, re.M)  # added by the diff of a recipe
            assert name not in flags or word in flags[name] or added, (name, word)
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"\b(?:tests|accelerate_configs|benchmarks|docs)/[\w/]+\.\w+", text):
        assert (ROOT / path).exists(), path


def anchors_of(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    texts = (re.sub(r"\[(.+?)\]\(.+?\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in texts}


def test_links_lead_to_headings():
    """Those of the pages, and of the scripts' errors and comments."""
    missing = []
    for page in PAGES:
        for name, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            target = page.parent / name if name else page
            missing += [(page.name, name, anchor)] * (not target.exists() or anchor not in anchors_of(target))
    named = re.compile(r"\b((?:docs|accelerate_configs)/[\w/]+\.md)(?:#([\w-]+))?")
    for script in (*ROOT.glob("*.py"), *(ROOT / "templates").glob("*.py")):
        for name, anchor in named.findall(script.read_text()):
            exists = (ROOT / name).exists() and (not anchor or anchor in anchors_of(ROOT / name))
            missing += [(script.name, name, anchor)] * (not exists)
    assert missing == []


def find_commands(path):
    """Return [(script, words after it)] of the documented commands of a page or docstring, in lines or in backticks,
    as bash expands them in an empty folder; variables have the values that the page assigns."""
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text))
    text = text.replace("\\\n", "")
    launchers = r"(?:python|accelerate launch|torchrun|sbatch)\s"
    found = re.findall(rf"^ *({launchers}.*)$", text, re.M)
    found += [code.replace("\n", " ") for code in re.findall(rf"`({launchers}[^`]*)`", text)]
    assignments = "\n".join(re.findall(r"^\w+=.*$", text, re.M))
    commands = []
    for command in found:
        if re.search(rf"({'|'.join(SCRIPTS)})\.py", command):
            shell = f"{assignments}\nprintf '%s\\0' {command}"
            words = subprocess.run(["bash", "-c", shell], stdout=subprocess.PIPE, check=True, text=True).stdout
            words = words.split("\0")[:-1]
            place = next(index for index, word in enumerate(words) if Path(word).stem in SCRIPTS)
            commands.append((Path(words[place]).stem, words[place + 1 :]))
    return commands


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_parsed(path, tmp_path, monkeypatch, capsys):
    """parse_args of its script accepts each documented command; the files of flags that it names exist."""
    monkeypatch.chdir(tmp_path)
    errors = []
    for name, words in find_commands(path):
        if words and words[0].endswith(".yaml"):
            Path(words[0]).parent.mkdir(parents=True, exist_ok=True)
            Path(words[0]).write_text(yaml.safe_dump(FLAG_FILES[name]))
        try:
            importlib.import_module(name).parse_args(words)
        except (SystemExit, ValueError):
            errors.append((name, words, capsys.readouterr().err.splitlines()[-1]))
    assert errors == []


def test_commands_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = [command for path in SOURCES for command in find_commands(path)]
    assert len(commands) >= 50 and {name for name, _ in commands} == set(SCRIPTS)


def test_readme_is_short_and_complete():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert len(re.findall(r"^(?:python|accelerate launch)", text, re.M)) >= 7
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_files_of_a_public_project():
    """The workflow, the hooks, the citation and the picture say what the Makefile, the versions and README say."""
    readme, makefile = ((ROOT / name).read_text() for name in ("README.md", "Makefile"))
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = [command[5:] for command in commands if command.startswith("make ")]
    assert targets and all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    checks = [command for command in commands if command.startswith("ruff ")]
    assert checks == re.findall(r"^\t\$\(BIN\)/(ruff .+)$", makefile, re.M)
    oldest, newest = jobs["tests"]["strategy"]["matrix"]["python"]
    assert f"Python {oldest} to {newest}" in readme and f">={oldest}" in (ROOT / "train_bi_encoder.py").read_text()
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    installed = {package for hook in hooks["hooks"] for package in hook["additional_dependencies"]}
    assert installed == set(re.findall("^ruff==.+$", (ROOT / "constraints.txt").read_text(), re.M))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert readme.startswith(f"# {citation['title']}\n") and f"{citation['license'].replace('-', ' ')}." in readme
    (picture,) = re.findall(r"^!\[.{40,}\]\((.+)\)$", readme[: readme.index("\n## ")], re.M)
    assert (ROOT / picture).stat().st_size <= 150_000


@pytest.mark.parametrize("name", SCRIPTS)
def test_dependency_header(name):
    """The header for `uv run` lists every package that the script imports, bounded as in requirements.txt."""
    text = (ROOT / f"{name}.py").read_text()
    (header,) = re.findall(r"^# /// script\n((?:# .*\n)+?)# ///$", text, re.M)
    stated = tomllib.loads(re.sub(r"^# ?", "", header, flags=re.M))
    lines = (line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    required = {re.match(r"[\w-]+", line)[0].lower(): line for line in lines if line}
    assert stated["requires-python"] == ">=3.11"
    assert all(line in required.values() for line in stated["dependencies"])
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else alias.name for node in nodes for alias in node.names}
    modules = {module.partition(".")[0] for module in names} - {"peft", "bm25s", "ir_datasets"}  # optional
    packages = packages_distributions()
    needed = {packages[module][0].lower().replace("_", "-") for module in modules - set(sys.stdlib_module_names)}
    listed = {re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for line in stated["dependencies"]}
    assert needed <= listed and listed - needed <= {"backports", "fsspec"}  # `datasets` needs them for .zst and URLs


def test_header_of_the_check():
    """It starts trainers with its own Python: `uv run` must install what they require."""
    headers = [re.findall(r'"(.+?)"', (ROOT / name).read_text().partition("# ///\n\n")[0].partition("dependencies")[2])
               for name in ("check_promises.py", "train_bi_encoder.py")]  # fmt: skip
    assert {"torch>=2.9,<3", "pyyaml>=6.0.1,<7"} < set(headers[0]) < set(headers[1])


def test_constraints():
    """Each requirement has one lowest version, which `make test-lowest` installs, and a pin in its range."""
    lines = [line for name in ("requirements", "requirements-dev") for line in (ROOT / f"{name}.txt").open()]
    required = [Requirement(line.partition("#")[0].strip()) for line in lines if line[0].isalpha()]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()[1:])
    assert [requirement.name for requirement in required] == list(pins)
    for requirement in required:
        (lowest,) = (part.version for part in requirement.specifier if part.operator == ">=")
        assert pins[requirement.name] in requirement.specifier and lowest in requirement.specifier, requirement
