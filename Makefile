# Every Byte. `make help` lists the targets; each is safe to run twice.

PYTHON ?= python3
PORT ?= 8000
JOBS ?= 2
PYTEST_ARGS ?=
VERSIONS ?= 2.11.0 2.12.0 2.14.1
ANSWERS ?= yes

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TESTABLE := $(VENV)/.testable
PRESS := $(BIN)/python book/press.py
RENDER_ARGS := $(if $(filter no,$(ANSWERS)),--without-answers)
PYTEST := $(BIN)/python -m pytest

# The kernel is the one in .venv, never a python3 kernel from the reader's home folder.
export JUPYTER_PREFER_ENV_PATH := 1
unexport JUPYTER_PATH
export PYDEVD_DISABLE_FILE_VALIDATION := 1
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.PHONY: help setup book html test test-versions refresh train recordings benchmarks sweeps screenshots serve clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12 chooses the interpreter that .venv is made from; PORT=8080 where 'serve' listens,"
	@echo "  JOBS=4 how many notebooks or tests run at a time, ANSWERS=no leaves the answers to the exercises out of the pages."

setup: $(INSTALLED)  ## make .venv and install the pinned requirements and the project
	@mkdir -p _build

$(INSTALLED): requirements.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "No Python found as '$(PYTHON)'. Install Python 3.11 or later, or name yours: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "This project needs Python 3.11 or later, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' cannot make virtual environments: its venv module is missing (on Debian and Ubuntu: apt install python3-venv)."; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) -V): about 150 packages, pinned in requirements.txt."
	@echo "With the CPU build of PyTorch that is about 420 MB to download and 2.0 GB on disk, a few minutes;"
	@echo "with its CUDA build (what pip picks on Linux unless told otherwise) several GB. The README says how to choose."
	@$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(TESTABLE): requirements-test.txt $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements-test.txt -c requirements.txt
	@touch $@

book: $(INSTALLED)  ## execute every notebook into _build/run, then render _build/html from there
	@$(PRESS) execute --jobs $(JOBS)
	@$(PRESS) render --executed $(RENDER_ARGS)

html: $(INSTALLED)  ## render _build/html from the stored outputs, executing nothing
	@$(PRESS) render $(RENDER_ARGS)

test: export EVERYBYTE_DEVICE = cpu
test: $(TESTABLE)  ## what CI runs: lint, tests, every notebook, a clean build
	@echo "1/3  ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --quiet --check src tests benchmarks book/*.py
	@echo "2/3  pytest, $(JOBS) at a time: the library, the notebooks (nbval, papermill) and the rendered pages"
	@OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not alone" --nbval --nbval-current-env \
		--nbval-cell-timeout 300 $(PYTEST_ARGS) tests notebooks
	@echo "3/3  pytest: every notebook from start to end, timed"
	@$(PYTEST) -m alone $(PYTEST_ARGS) tests/book

test-versions:  ## the library's tests under other versions of PyTorch, an environment of several GB each in _build: VERSIONS="2.11.0 2.14.1"
	@set -e; for version in $(VERSIONS); do \
		there=_build/torch-$$version; \
		if ! test -f $$there/.installed; then \
			$(PYTHON) -m venv $$there; \
			sed -e "s/^torch==[^ ]*/torch==$$version/" -e '/^setuptools==/d' -e '/^wheel==/d' \
				requirements.txt requirements-test.txt > $$there/requirements.txt; \
			$$there/bin/python -m pip install --disable-pip-version-check -r $$there/requirements.txt; \
			touch $$there/.installed; \
		fi; \
		echo "PyTorch $$version"; \
		EVERYBYTE_DEVICE=cpu PYTHONPATH=src OMP_NUM_THREADS=1 $$there/bin/python -m pytest -n $(JOBS) --dist loadfile \
			-m "not alone" --ignore tests/book $(PYTEST_ARGS) tests; \
	done

refresh: $(INSTALLED)  ## re-execute the notebooks and store their outputs and the pages of claims and formulas: the only target that writes notebooks
	@$(PRESS) refresh
	@$(BIN)/python book/claims_page.py
	@$(BIN)/python book/formulas_page.py

train: export OMP_NUM_THREADS = 1
train: $(INSTALLED)  ## train the narrow model, trace which cards hold the full one (long), and store the results
	@$(BIN)/python -m everybyte.training
	@$(BIN)/python -m everybyte.cards

recordings: $(INSTALLED)  ## compare the public recordings in EVERYBYTE_SNAPSHOTS anew and store the outcome
	@$(BIN)/python -m everybyte.recorded $${EVERYBYTE_SNAPSHOTS:?names no folder with the six files; the chapter Against real GPUs says where they are}

SWEEP := $(BIN)/everybyte sweep notebooks/24_one_step.ipynb --append --out _build/sweeps

BENCHMARKS := _build/benchmarks

benchmarks: export JUPYTER_PREFER_ENV_PATH = 1
benchmarks:  ## time and compare with the other tools, in an environment of 3 GB in _build, and store the table (a quarter of an hour)
	@if ! test -f $(BENCHMARKS)/.installed; then \
		$(PYTHON) -m venv $(BENCHMARKS) && \
		$(BENCHMARKS)/bin/python -m pip install --disable-pip-version-check \
			-c requirements.txt -c benchmarks/requirements.txt torch -e '.[benchmarks,sweep]' && \
		$(BENCHMARKS)/bin/python -m pip install --disable-pip-version-check --no-deps llm-analysis==0.2.2 && \
		touch $(BENCHMARKS)/.installed; \
	fi
	@$(BENCHMARKS)/bin/python benchmarks/run.py

sweeps: $(INSTALLED)  ## sweep one step of each model over batch and sequence (minutes) and store the table
	@$(SWEEP) -p model=decoder -p batch_size=1,4,16 -p sequence=256,512,1024,1536,2048,4096
	@$(SWEEP) -p model=tft -p batch_size=1,4,16 -p sequence=50:250:50
	@cp _build/sweeps/results.parquet notebooks/data/sweep.parquet

screenshots: $(TESTABLE)  ## take the README's pictures from _build/html by a headless Chromium, rendering it first if it is missing
	@test -f _build/html/index.html || $(PRESS) render
	@$(BIN)/python book/screenshots.py

serve: $(INSTALLED)  ## serve _build/html on this machine, rendering it first if it is missing
	@test -f _build/html/index.html || $(PRESS) render
	@echo "The book is at http://127.0.0.1:$(PORT)/ ; stop with Ctrl-C."
	@$(BIN)/python -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

clean:  ## remove what the other targets built, .venv excepted
	rm -rf _build .pytest_cache .ruff_cache .hypothesis
