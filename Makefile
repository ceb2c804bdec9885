# `make demo` and `make test` require only Python 3.11 or newer, make and a package index.
PYTHON ?= python3
BIN := .venv/bin
DEMO := data/python_code
PYTEST := python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
EVALUATE := $(BIN)/python eval_incremental.py --model_name_or_path runs/demo/model --cache_dir runs/demo/cache

.PHONY: demo test test-all test-lowest chaos copies clean

demo: .venv/installed
	$(BIN)/python prepare_corpus.py
	$(BIN)/python train_bi_encoder.py --model_name_or_path $(DEMO)/bi_encoder --columns docstring code \
		--train_data '$(DEMO)/train/stdlib-*.parquet' '$(DEMO)/train/packages-*.parquet' \
		--eval_data '$(DEMO)/heldout/*.parquet' --batch_size 2048 --learning_rate 0.005 --num_train_epochs 4 \
		--output_dir runs/demo --resume
	$(EVALUATE) --pairs '$(DEMO)/heldout/*.parquet' --columns docstring code --output_dir runs/demo/eval
	$(EVALUATE) --pairs '$(DEMO)/heldout/*.parquet' --columns docstring code --output_dir runs/demo/eval
	$(EVALUATE) --pairs '$(DEMO)/*/*.parquet' --columns docstring code --top_k 3 --query "read a gzip file" "remove duplicates but keep the order" "parse command line arguments"

# Each promise and each script once, in at most five minutes on two cores.
test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/$(PYTEST) -m "not slow"

# Then each promise in its further settings.
test-all: test
	$(BIN)/$(PYTEST) -m slow

# All tests with the lowest versions of the ranges, torch excepted.
test-lowest: .venv-lowest/installed
	.venv-lowest/bin/$(PYTEST)

# The long form of tests/chaos and of some other tests, of which `make test` runs a short form; prints a table.
chaos: .venv/installed-dev
	CHAOS=52 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal tests/chaos \
		tests/test_bad_input.py::test_files_that_cannot_grow tests/test_best_model.py::test_stopped_and_resumed \
		tests/test_resume.py::test_resumed_on_another_process_count tests/test_eval_incremental.py::test_no_pickle_is_loaded \
		tests/test_one_way_to_stop.py tests/test_edited_script.py tests/test_check_promises.py \
		tests/test_fsdp2.py::test_fsdp2_with_adapters_and_a_head_in_bfloat16 tests/test_what_is_measured.py \
		tests/test_model_options.py::test_what_is_trained_beside_adapters_is_float32 tests/test_strict_device.py \
		tests/test_templates.py::test_losses_and_norms_equal_the_trainers \
		tests/test_views.py::test_processes_streams_and_dtypes_of_the_cache \
		tests/test_random_runs.py tests/test_random_states.py \
		tests/test_eval_incremental.py::test_full_or_read_only_disk tests/test_export_vectors.py::test_full_or_read_only_disk

.venv/installed: requirements.txt constraints.txt
	$(PYTHON) -m venv .venv
	@echo "installing packages (2 GB); this takes some minutes"
	$(BIN)/pip install --quiet -r requirements.txt -c constraints.txt
	touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(BIN)/pip install --quiet -r requirements-dev.txt -c constraints.txt
	touch $@

.venv-lowest/installed: requirements.txt requirements-dev.txt constraints.txt
	$(PYTHON) -m venv .venv-lowest
	grep '^torch=' constraints.txt > .venv-lowest/lowest.txt
	sed -nE '/^torch>/d; s/^([^#>]+)>=([^,# ]+).*/\1==\2/p' requirements.txt requirements-dev.txt >> .venv-lowest/lowest.txt
	.venv-lowest/bin/pip install --quiet -r .venv-lowest/lowest.txt
	touch $@

# Write the machinery, and functions of equal name, from train_bi_encoder.py into the other scripts.
copies:
	$(PYTHON) tests/copies.py

clean:
	rm -rf .venv .venv-lowest data runs
