# Two commands for a fresh machine with Python >= 3.11: `make quick` measures, `make test` tests. Both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: quick test lint audit clean

quick: $(VENV)/.installed
	$(BIN)/caraml run quick

# Rooms whose tests stand other work beside them run two files at a time; the others have the machine to themselves.
CALM := $(addprefix tests/,analysis data engine hostile models mutation reference report results suite test_stats_coverage.py)

test: $(VENV)/.installed-test lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(CALM)
	$(BIN)/python -m pytest $(addprefix --ignore=,$(CALM))

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch first and by itself: every later requirement is then met by this build, whichever it is.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("CARAML needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --editable '.[test]'
	touch $@

# Before a release: a bill of materials, and known vulnerabilities of every pinned version (needs a network).
audit: $(VENV)/.installed
	test -x .audit/bin/python || $(PYTHON) -m venv .audit
	.audit/bin/pip install --quiet --disable-pip-version-check cyclonedx-bom pip-audit
	.audit/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file sbom.json $(BIN)/python
	.audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

clean:
	rm -rf $(VENV) .audit sbom.json
