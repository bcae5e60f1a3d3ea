# For a fresh machine with Python >= 3.11: `make quick` measures, `make test` tests. Both make .venv first; `.ci/venv` says how.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PYTHON
# Python keeps what it has compiled, also where the environment says otherwise: a third of every start of the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quick test check lint format types mutation docs wheel installed installed-test audit clean

quick: installed
	$(BIN)/caraml run quick

READ = $(BIN)/python -m pytest --collect-only --quiet >/dev/null 2>&1

# While one core checks types the other reads the tests, and then both do, so that each worker finds them compiled. Then three tests at a time,
# one of which is of those that wait, with one thread each: the cores are busy anyway. Then those that measure this machine, with nothing beside
# them that computes.
test: installed-test
	@$(READ) & reading=$$!; $(MAKE) --no-print-directory lint || { code=$$?; kill $$reading; exit $$code; }; $(READ) $(wildcard tests/[s-z]*); wait
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "not exclusive"
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m exclusive

# Before every commit, in less than a minute: linters, types, and the tests that start no process.
check: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 -m "not processes and not exclusive and not slow"

lint: format types

format: installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: installed-test
	$(BIN)/mypy

# The documentation site, in site/.
docs: installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

wheel: installed-test
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

# Faults are planted in copies of the package, one at a time; the tests must notice each.
mutation: installed-test
	$(BIN)/python tests/mutation/run.py

installed:
	@.ci/venv

installed-test:
	@.ci/venv test

# Before a release: code that security rules object to (a part of `make lint` as well), a bill of materials, and known vulnerabilities of every
# pinned version (these need a network).
audit: installed-test
	$(BIN)/ruff check --select S --ignore S101 .
	test -x .audit/bin/python || $(PYTHON) -m venv .audit
	.audit/bin/pip install --quiet --disable-pip-version-check cyclonedx-bom pip-audit
	.audit/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file sbom.json $(BIN)/python
	.audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

clean:
	rm -rf $(VENV) .audit sbom.json
