# All that a visitor or a developer runs. It needs Python 3.11 or later, pip and make; the rest goes into .venv.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check
FOLDERS := partition wrappers aot
SUITE ?= bench
CHECK ?= --check

.DEFAULT_GOAL := help
.PHONY: help demo bench golden notebooks docs test test-all lint format env clean

help: ## List these targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: $(VENV)/.has-demo ## Train a small GPT with and without jointcut; print a table, write a picture.
	$(PY) -m benchmarks.demo

bench: $(VENV)/.has-bench ## Measure programs x methods; PROGRAMS="resnet lstm" picks, SUITE=budgets or targets weighs more.
	$(PY) -m benchmarks.$(SUITE) $(PROGRAMS) $(if $(TARGETS),--targets $(TARGETS)) $(ARGS)

notebooks: $(VENV)/.has-notebooks ## Run all notebooks and compare with what is committed; NOTEBOOKS=NAME CHECK= writes one anew.
	$(PY) notebooks/make.py $(CHECK) $(NOTEBOOKS)

docs: $(VENV)/.has-docs ## Build the documentation into site/; open site/index.html.
	$(PY) docs/build.py site

test: lint ## What must hold before a commit: style, layout, types, each law once. ARGS="-k scan" goes to pytest.
	$(PY) -m pytest --numprocesses=auto --dist=worksteal -m "not rest" $(ARGS)

test-all: $(VENV)/.has-dev ## The rest of the tests, after `make test`: CONTRIBUTING.md says which they are.
	$(PY) -m pytest --numprocesses=auto --dist=worksteal -m rest $(ARGS)

golden: $(VENV)/.has-dev ## Make the digests of all programs anew, and print what changed; PROGRAMS="gpt" prints alone.
	PYTHONPATH=tests:. $(PY) -m golden $(PROGRAMS)

lint: $(VENV)/.has-dev .pyright/jointcut ## Check style, layout and types, count lines by room; change nothing.
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)
	$(PY) -m benchmarks.census --by-room

format: $(VENV)/.has-dev ## Put the sources into shape.
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

env: $(VENV)/.has-dev ## Make the developer's environment and stop.

clean: ## Remove what the other targets made, environments too.
	rm -rf .venv* .pyright .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each set of extras: pip runs again only when pyproject.toml has changed.
$(VENV)/.has-demo: pyproject.toml | $(PY)
	$(PIP) install --editable '.[demo]'
	@touch $@

$(VENV)/.has-bench: pyproject.toml | $(PY)
	$(PIP) install --editable '.[bench,recipes]'
	@touch $@ $(VENV)/.has-demo

$(VENV)/.has-notebooks: pyproject.toml | $(PY)
	$(PIP) install --editable '.[notebooks]'
	@touch $@ $(VENV)/.has-demo

$(VENV)/.has-docs: pyproject.toml | $(PY)
	$(PIP) install --editable '.[docs]'
	@touch $@

$(VENV)/.has-dev: pyproject.toml | $(PY)
	$(PIP) install --editable '.[dev]'
	@$(PY) tests/compilers.py || echo "XLA's compilers for GPUs and TPUs are not there: their tests are skipped"
	@touch $@ $(VENV)/.has-demo $(VENV)/.has-bench $(VENV)/.has-notebooks $(VENV)/.has-docs $(VENV)/.has-laws

$(VENV)/.has-laws: pyproject.toml | $(PY)
	$(PIP) install --editable '.[laws]'
	@touch $@

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit("jointcut needs Python 3.11 or later; name one with PYTHON=python3.x" if sys.version_info < (3, 11) else 0)'
	@echo "Making $(VENV) with $$($(PYTHON) --version); JAX and its company take a minute or two, once."
	@$(PYTHON) -m venv $(VENV)

# pyright does not follow setuptools' map from aot/ to jointcut.aot; five symlinks say the same.
.pyright/jointcut:
	@mkdir -p $@
	@for folder in $(FOLDERS); do ln -sfn ../../$$folder $@/$$folder; done
	@ln -sfn ../../aot/package/__init__.py $@/__init__.py
	@ln -sfn ../../aot/ratchet/plugin $@/ratchet
