# Everything runs in .venv, beside a real SGLang; gpu-test and upstream-suites run in PYTHON itself.
# A second run of a target sets nothing up again.
PYTHON ?= python3
SGLANG ?= sglang==0.5.23
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
FORK_WORKFLOW := python/inkling_sconv/fork_ci/inkling-sconv.yml

.PHONY: demo test lint format releases picture designs evidence gpu-test upstream-suites

demo: releases ## what each release's draft-extend capture does, without us and with us
	@$(BIN)/python test/demo.py

test: lint releases ## every test that needs no GPU
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy .github/scripts
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/zizmor --offline --quiet --persona=auditor --min-severity=low .github $(FORK_WORKFLOW)
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml $(FORK_WORKFLOW)

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

picture: $(VENV)/ready ## docs/batch.svg
	$(BIN)/python docs/draw_batch.py

designs: releases ## docs/designs.md
	$(BIN)/python test/designs.py

evidence: $(VENV)/ready ## docs/evidence.md, from docs/evidence/
	$(BIN)/python benchmark/write_evidence.py

gpu-test: ## what needs a GPU, in PYTHON, which has SGLang; ARGS='-k TestInstalled' goes to pytest
	@$(PYTHON) test/gpu_test.py $(ARGS)

upstream-suites: ## SGLang's own Inkling suites, from SGLANG_DIR=your checkout, with the plugin
	@$(PYTHON) test/suites.py '$(SGLANG_DIR)'

releases: $(VENV)/ready
	@$(BIN)/python test/releases.py

$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("make: Python 3.11 or newer is needed; set PYTHON=...") if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing $(SGLANG) and the test tools into $(VENV): 11 GB, about 4 minutes the first time."
	$(BIN)/python -m pip install --progress-bar on "$(SGLANG)" -e '.[test]'
	touch $@
