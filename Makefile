# Everything needs only `make` and a Python >= 3.11; the rest is installed into a folder of its own beside this file.
#
#   PYTHON=python3.12   another interpreter
#   TORCH=2.11.0        another torch; `newest`: the newest that pip offers; `system`: nothing is installed and
#                       $(PYTHON) runs everything with the torch and the packages that it has, without a network
#
# Without them the folder is .venv; another interpreter or torch gets one of its own, .venv-python3.12-torch2.11.0.
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
PYTHON ?= python3
TORCH ?= $(PINNED)
# Processes pytest runs side by side; each uses one thread.
JOBS ?= 2
# More arguments for the demo, e.g. make demo DEMO="--steps 200 --compare"
DEMO ?=
# More arguments for pytest, e.g. make test-fast TESTS="tests/core/test_spec.py -x"
TESTS ?=
# Which random programs, e.g. make fuzz FUZZ="--programs 2000 --mesh 2x3", FUZZ="--gloo --mesh 2 4", FUZZ="--seed 7 --programs 1 --show"
FUZZ ?=
# More arguments for the sweep, e.g. make sweep JOBS=8 SWEEP="--json found.json"
SWEEP ?=
# More arguments for the tests and benchmarks on GPUs, e.g. make test-gpu GPU="--worlds 1,2", make bench-gpu GPU="--device cpu"
GPU ?=

other = $(if $(filter-out $2,$1),-$(if $3,$3)$(subst /,-,$1))
VENV := .venv$(call other,$(PYTHON),python3)$(call other,$(TORCH),$(PINNED),torch)
ifeq ($(TORCH),system)
STAMP :=
PY := $(PYTHON)
export PYTHONPATH := $(CURDIR)
else
STAMP := $(VENV)/.installed
PY := $(VENV)/bin/python
endif
BIN := $(VENV)/bin
export OMP_NUM_THREADS := 1

# Programs of other people on this engine, in an environment of their own that sees the packages of .venv: torch is not
# installed again. RECORD=1 writes their numbers anew.
CLIENTS := .venv-clients/.installed
APART := $(wildcard tests/clients/apart/*.txt)

.PHONY: demo test suite test-fast test-gpu gpu-check lint lint-workflows golden tables fuzz sweep bench bench-gpu clients clean

# torch first and by its exact version: an open range may fetch another build of several GB. The other pins hold for every
# torch, but for setuptools, of which each torch wants another.
$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	grep -v $(if $(filter $(PINNED),$(TORCH)),'^#',-e '^torch==' -e '^setuptools==') constraints.txt > $(VENV)/constraints.txt
	$(PY) -m pip install --quiet "torch$(if $(filter newest,$(TORCH)),>=$(PINNED),==$(TORCH))" -c $(VENV)/constraints.txt
	$(PY) -m pip install --quiet -c $(VENV)/constraints.txt -e '.[dev,plot]'
	touch $(STAMP)

.venv: $(STAMP)

demo: $(STAMP)
	$(PY) examples/train_tp.py $(DEMO)

lint: $(STAMP) lint-workflows
	$(PY) -m ruff check .
	$(PY) -m mypy

# The form of the workflows, and what strangers could do through them. Half a second, without a network.
lint-workflows: $(STAMP)
	$(PY) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet --no-progress .github/workflows

test: lint suite

suite: $(STAMP)
	$(PY) -m pytest -n $(JOBS) --dist worksteal $(TESTS)

test-fast: $(STAMP)
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m "not slow and not processes" $(TESTS)

# One process for each GPU; without GPUs it says what it skips and why.
test-gpu: $(STAMP)
	$(PY) tests/gpu/run.py $(GPU)

# Both on one GPU in eight minutes, with the torch that PYTHON has: nothing is installed.
gpu-check:
	PYTHON=$(PYTHON) tests/gpu/one_gpu.sh $(GPU)

# All rules as one text file, which a test compares: run this after a change of rules and read the diff.
golden: $(STAMP)
	$(PY) -m dtensor.propagation_rules list > docs/rules.txt

# The tables of docs/styles and docs/loss.md, as simulated ranks measure them: run this after a change of what is sent.
tables: $(STAMP)
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(PY) tests/docs/test_styles_docs.py
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(PY) tests/docs/test_loss_docs.py

# Random programs on DTensors and on plain tensors side by side; what is wrong is made small and printed.
fuzz: $(STAMP)
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(PY) -W ignore -m fuzz $(FUZZ)

# Every rule against numbers on the calls that torch's database of operators leads to.
sweep: $(STAMP)
	$(PY) -m dtensor.propagation_rules check --all --keys --jobs $(JOBS) --missing-to docs/missing.md $(SWEEP)

bench: $(STAMP)
	$(PY) benchmarks/run.py

bench-gpu: $(STAMP)
	$(PY) benchmarks/gpu.py $(GPU)

$(CLIENTS): $(STAMP) tests/clients/requirements.txt $(APART)
	$(BIN)/python -m venv --without-pip .venv-clients
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$(.venv-clients/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	.venv-clients/bin/python -m pip install --quiet --no-deps -r tests/clients/requirements.txt
	for list in $(APART); do \
		.venv-clients/bin/python -m pip install --quiet --no-deps --upgrade \
			--target .venv-clients/apart/$$(basename $$list .txt) -r $$list || exit 1; \
	done
	touch $(CLIENTS)

clients: $(CLIENTS)
	$(if $(RECORD),RECORD=1) .venv-clients/bin/python -m pytest tests/clients -n 0 -o faulthandler_timeout=1800 $(TESTS)

clean:
	rm -rf .venv .venv-* build *.egg-info .mypy_cache .ruff_cache
