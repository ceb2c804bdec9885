"""The scripts import where modules of Unix are absent."""

from conftest import ROOT, launch

# tests/preload.py has imported the libraries, but not those of Unix that only a script would import.
DRIVER = """
import importlib, sys
sys.path.insert(0, {root!r})
names = ["train_bi_encoder", "train_cross_encoder", "eval_incremental", "report", "mine_negatives",
         "check_overlap", "prepare_corpus"]
sys.modules |= dict.fromkeys(["resource", "fcntl", "grp", "pwd", "termios"])  # to import them raises ImportError
for name in names:
    sys.modules.pop(name, None)
    importlib.import_module(name)
    print(name)
"""


def test_scripts_import_without_modules_of_unix(tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(root=str(ROOT)))
    assert len(launch(driver).stdout.splitlines()) == 7
