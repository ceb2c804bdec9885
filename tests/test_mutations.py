"""The patches of tests/mutations/ apply, and the tests that they name fail with them."""

import shutil

import pytest
from conftest import ROOT, mark_slow
from mutations import PATCHES, TESTS, apply, run

needs_git = pytest.mark.skipif(not shutil.which("git"), reason="needs git")


@needs_git
def test_all_apply():
    assert len(PATCHES) > 25
    for name in PATCHES:
        apply(name, ROOT, "--check")


@needs_git
@pytest.mark.parametrize("name", mark_slow(TESTS, ["resume_skips_a_row"]))
def test_is_seen(name, tmp_path):
    is_red, printed = run(name, tmp_path / "copy")
    assert is_red, printed
