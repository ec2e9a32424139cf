# Everything needs only `make` and a Python >= 3.11 (PYTHON=... to choose one); the rest is installed into .venv.
PYTHON ?= python3
# Processes pytest runs side by side; each uses one thread.
JOBS ?= 2
# More arguments for the demo, e.g. make demo DEMO="--steps 200 --compare"
DEMO ?=
# More arguments for pytest, e.g. make test-fast TESTS="tests/test_spec.py -x"
TESTS ?=
# More arguments for the sweep, e.g. make sweep JOBS=8 SWEEP="--json found.json"
SWEEP ?=

BIN := .venv/bin
STAMP := .venv/.installed
export OMP_NUM_THREADS := 1

# Programs of other people on this engine, in an environment of their own that sees the packages of .venv: torch is not
# installed again. RECORD=1 writes their numbers anew.
CLIENTS := .venv-clients/.installed

.PHONY: demo test test-fast lint golden sweep bench clients clean

# torch first and by its exact version: an open range may fetch another build of several GB.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,plot]'
	touch $(STAMP)

.venv: $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/train_tp.py $(DEMO)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n $(JOBS) --dist worksteal $(TESTS)

test-fast: $(STAMP)
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "not slow and not processes" $(TESTS)

# All rules as one text file, which a test compares: run this after a change of rules and read the diff.
golden: $(STAMP)
	$(BIN)/python -m propagation_rules list > docs/rules.txt

# Every rule against numbers on the calls that torch's database of operators leads to.
sweep: $(STAMP)
	$(BIN)/python -m propagation_rules check --all --keys --jobs $(JOBS) --missing-to docs/missing.md $(SWEEP)

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

$(CLIENTS): $(STAMP) tests/clients/requirements.txt
	$(BIN)/python -m venv --without-pip .venv-clients
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$(.venv-clients/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	.venv-clients/bin/python -m pip install --quiet --no-deps -r tests/clients/requirements.txt
	touch $(CLIENTS)

clients: $(CLIENTS)
	$(if $(RECORD),RECORD=1) .venv-clients/bin/python -m pytest tests/clients -n 0 $(TESTS)

clean:
	rm -rf .venv .venv-clients build *.egg-info .mypy_cache .ruff_cache
