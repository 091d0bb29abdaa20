# Two jobs, each sets itself up: `make figures` (the main one) and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: figures test browser docs results lint lock bench clean

figures: $(STAMP)
	$(BIN)/python run_all.py --profile quick

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore=tests/browser
	$(BIN)/python -m pytest --nbval-lax --nbval-current-env notebooks   # on the shipped results: nothing is trained

browser: $(STAMP)
	$(BIN)/python -m pytest -rs tests/browser   # the report and the notebooks in Chromium; skipped where there is none

lint: $(STAMP)
	$(BIN)/ruff check .

bench: $(STAMP)
	$(BIN)/dpngd bench

# After new results were exported: figures/cpu, the notebooks' outputs, docs/claims.md and the README follow them.
results: $(STAMP)
	$(BIN)/python run_all.py --profile cpu
	$(BIN)/dpngd report --notebooks
	$(BIN)/python -m dpngd.suite.pages

docs: $(STAMP)
	$(BIN)/python -m dpngd.suite.pages

lock: $(STAMP)
	$(BIN)/python -m dpngd.suite.lock

# The stamp is written last, so that an interrupted installation is taken up again.
$(STAMP): requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dpngd needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	# As a path entry, not as an import hook: a script in the folder beside the clone would else import the clone's folder.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . --config-settings editable_mode=compat
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis dpngd.egg-info
