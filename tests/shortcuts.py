"""What takes most of a short run is done once, or not at all: imported by the tests and by the server of forked.py.

Runs by a launcher or as subprocesses do all of it.
"""

import ast
import functools
import re
import runpy
import ssl
from pathlib import Path

import jinja2
import pandas as pd
import torch
from matplotlib.figure import Figure

torch.set_num_threads(1)  # as in forked processes, also in one that has imported torch before OMP_NUM_THREADS was set
# Once: the template of the model's card, the syntax tree of a trainer, which each run hashes at its start, the code of
# a script, and the certificates of the Hub's client, which no run asks.
jinja2.Environment.compile = functools.cache(jinja2.Environment.compile)
ast.parse = functools.cache(ast.parse)
ast.unparse = functools.cache(ast.unparse)
runpy.compile = functools.cache(compile)
ssl.create_default_context = functools.cache(ssl.create_default_context)
re._MAXCACHE = 5000  # patterns, more than transformers compiles for names of weights
# Not at all: seeds of devices, each of which keeps its stack as text, and the plot.
torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None
subplots = Figure.subplots
Figure.subplots = lambda figure, *size: None if size else subplots(figure)  # none for plot_metrics
draw = Figure.savefig  # for a test of what is drawn
Figure.savefig = lambda figure, path, **_: Path(path).touch()
pd.DataFrame.plot = lambda *_, **__: None  # of plot_metrics
