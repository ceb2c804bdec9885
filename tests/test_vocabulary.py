"""A template grows into its trainer: functions of the same name take the same arguments."""

import ast

import pytest
from conftest import ROOT

SHARED = {"main", "open_source", "read_row", "load_model", "make_optimizer", "cut", "make_micro_batches"}
SHARED |= {"forward_backward", "evaluate", "fold"}
KINDS = {"bi_encoder": SHARED | {"encode", "gather", "infonce"}, "cross_encoder": SHARED | {"score"}}


def signatures(text):
    """Return {function: names of its parameters} of the top level of a script."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            given = node.args
            names = [parameter.arg for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            found[node.name] = names + ["*" + more.arg for more in (given.vararg, given.kwarg) if more]
    return found


def compare(template, trainer):
    """Return (functions that both scripts have, those of them that begin with other parameters in the trainer)."""
    ours, theirs = signatures(template), signatures(trainer)
    shared = ours.keys() & theirs.keys()
    return shared, {name for name in shared if theirs[name][: len(ours[name])] != ours[name]}


def texts_of(kind):
    return (ROOT / f"templates/{kind}.py").read_text(), (ROOT / f"train_{kind}.py").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_a_template_are_those_of_the_trainer(kind):
    """The trainer's may have more parameters at the end. None of the listed ones is renamed."""
    shared, different = compare(*texts_of(kind))
    assert not different
    assert shared >= KINDS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_texts_are_the_same_ones(kind):
    """By a function that stands in both, byte for byte."""
    template, trainer = (text.partition("\ndef fold(")[2].partition("\n\n\n")[0] for text in texts_of(kind))
    assert template == trainer != ""
