# `make demo` and `make test` need Python 3.11 or newer, make and a package index, nothing else.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test clean

demo: .venv/installed
	test -f data/python_code/corpus.json || $(BIN)/python prepare_corpus.py
	$(BIN)/python train_bi_encoder.py --output_dir runs/demo --resume
	$(BIN)/python search_demo.py runs/demo/model "read a gzip file" "remove duplicates but keep the order" "parse command line arguments"

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -r requirements.txt
	touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(BIN)/pip install --quiet -r requirements-dev.txt
	touch $@

clean:
	rm -rf .venv data runs
