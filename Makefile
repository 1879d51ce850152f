# Two commands do everything, on a machine with Python 3.11 and make: `make demo` and `make test`.
# Each environment is a folder .envs/NAME, installed from pyproject.toml as constraints/NAME.txt says,
# and built again only when one of the two has changed.

PYTHON ?= python3
TORCH := torch==2.13.0
RUN := .envs/newest/bin/python

# What each environment has.
newest := .[dev]
tensorflow := .[test] tensorflow-cpu
oldest := .[demo,test] tensorflow-cpu tensorflow-io
BENCH := gather loader ingest gil startup segments views threads epochs window shuffle memory dataloader workers device

# Nothing of the shell's own Python may reach the environments.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-newest test-tensorflow test-oldest bench lint format freeze clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train on a cache that grows, and print what happened each epoch"
	@echo "make test    run the tests              (ARGS=... goes to pytest; test-newest, test-tensorflow"
	@echo "             and test-oldest are its parts, one an environment)"
	@echo "make bench   run the benchmarks         (BENCH=gather for one)"
	@echo "make lint    ruff and mypy --strict"
	@echo "make format  ruff's formatter and its safe fixes"
	@echo "make freeze  install the newest versions and write them to constraints/newest.txt"
	@echo "make clean   remove environments and everything else that was built"

demo: .envs/newest/.stamp
	$(RUN) -m arrowcache.demo $(ARGS)

test: test-newest test-tensorflow test-oldest

test-newest: .envs/newest/.stamp
	$(RUN) -m pytest $(ARGS)

# tensorflow-io has no release for a newer TensorFlow than 2.16, and that none for NumPy 2.
test-tensorflow test-oldest: test-%: .envs/%/.stamp
	.envs/$*/bin/python -m pytest tests/adapters/test_tensorflow*.py $(ARGS)

bench: .envs/newest/.stamp
	set -e; for benchmark in $(BENCH); do echo "== $$benchmark"; $(RUN) -m benchmarks.$$benchmark; done

lint: .envs/newest/.stamp
	$(RUN) -m ruff check .
	$(RUN) -m mypy arrowcache $(wildcard tests/typing)

format: .envs/newest/.stamp
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# hatchling comes first, so that the build runs with the pinned one and not with whatever is newest.
.envs/%/.stamp: pyproject.toml constraints/%.txt
	$(PYTHON) -m venv --clear .envs/$*
	.envs/$*/bin/python -m pip install --quiet --constraint constraints/$*.txt hatchling editables
	.envs/$*/bin/python -m pip install --quiet --constraint constraints/$*.txt --no-build-isolation --editable $($*)
	touch $@

freeze:
	$(PYTHON) -m venv --clear .envs/freeze
	.envs/freeze/bin/python -m pip install --quiet $(TORCH) hatchling editables
	.envs/freeze/bin/python -m pip install --quiet $(TORCH) --no-build-isolation --editable '$(newest)'
	sed -n '/^#/p' constraints/newest.txt > constraints/newest.tmp
	.envs/freeze/bin/python -m pip freeze --exclude-editable | sed 's/^torch==.*/$(TORCH)/' >> constraints/newest.tmp
	mv constraints/newest.tmp constraints/newest.txt
	rm -rf .envs/freeze

clean:
	rm -rf .envs build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis benchmarks/results
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
