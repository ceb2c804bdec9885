# `make demo` and `make test` require only Python 3.11 or newer, make and a package index.
PYTHON ?= python3
BIN := .venv/bin
EVALUATE := $(BIN)/python eval_incremental.py --model_name_or_path runs/demo/model --cache_dir runs/demo/cache

.PHONY: demo test chaos clean

demo: .venv/installed
	$(BIN)/python prepare_corpus.py
	$(BIN)/python train_bi_encoder.py --batch_size 2048 --learning_rate 0.005 --num_train_epochs 4 \
		--output_dir runs/demo --resume
	$(EVALUATE) --output_dir runs/demo/eval
	$(EVALUATE) --output_dir runs/demo/eval
	$(EVALUATE) --top_k 3 --query "read a gzip file" "remove duplicates but keep the order" "parse command line arguments"

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# The long form of tests/chaos and of some other tests, of which `make test` runs a short form; prints a table.
chaos: .venv/installed-dev
	CHAOS=52 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal tests/chaos \
		tests/test_bad_input.py::test_full_disk_during_a_checkpoint tests/test_best_model.py::test_stopped_and_resumed \
		tests/test_resume.py::test_resumed_on_another_process_count tests/test_eval_incremental.py::test_no_pickle_is_loaded \
		tests/test_eval_incremental.py::test_full_or_read_only_disk tests/test_export_vectors.py::test_full_or_read_only_disk

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	@echo "installing packages (2 GB); this takes some minutes"
	$(BIN)/pip install --quiet -r requirements.txt
	touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(BIN)/pip install --quiet -r requirements-dev.txt
	touch $@

clean:
	rm -rf .venv data runs
