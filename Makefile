# Two commands do everything, on a machine with Python 3.11 and make: `make demo` and `make test`.
# Each environment is a folder .envs/NAME with exactly the packages that constraints/NAME.txt lists, all of which
# are pinned, so that pip has nothing to resolve; it is built again only when that list or pyproject.toml has changed.

PYTHON ?= python3
TORCH := torch==2.13.0
RUN := .envs/newest/bin/python

# What each list was made from, and `make freeze NAME=...` makes it from again.
NAME := newest
newest := .[dev]
tensorflow := .[test] tensorflow-cpu ipykernel nbclient typer
oldest := .[demo,test] tensorflow-cpu tensorflow-io

# The tests of an environment are shared out among processes, one more than there are processors, since many wait;
# threads of OpenMP that spin while they wait would take the processors from the others. ARGS=-n0: no sharing.
TESTS := -m pytest --numprocesses $(shell expr $$(nproc) + 1) --dist worksteal
test-%: export OMP_WAIT_POLICY := passive

BENCH := ceiling gather loader ingest gil startup segments views threads epochs window shuffle memory dataloader workers \
	device tensorflow explore durable engines sources soak pace slow_source
# Where each of these runs; that of TensorFlow with tensorflow-io, and in the newest.
BENCH_IN_NEWEST = $(filter-out tensorflow,$(BENCH))
BENCH_TENSORFLOW_IN = $(if $(filter tensorflow,$(BENCH)),oldest tensorflow)

# Those that `make peers` makes when it needs them; arrowcache is not installed there.
PEERS := peers streaming reverb

# Nothing of the shell's own Python may reach the environments; processes that tests start find everything compiled.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help environments demo test test-newest test-ray test-tensorflow test-oldest bench peers pictures lint format freeze clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train on a cache that grows, and print what happened each epoch"
	@echo "make test    run the tests              (ARGS=... goes to pytest; test-newest, test-tensorflow"
	@echo "             and test-oldest are its parts, one an environment, and test-ray)"
	@echo "make environments   install what they need, with -j3 all at once"
	@echo "make bench   run the benchmarks         (BENCH=gather for one)"
	@echo "make peers   measure arrowcache beside its peers, and write the tables and plots of that"
	@echo "make pictures   take README's pictures anew, of a notebook in JupyterLab; needs chromium"
	@echo "make lint    ruff and mypy --strict"
	@echo "make format  ruff's formatter and its safe fixes"
	@echo "make freeze  install the newest versions and write them to constraints/newest.txt (or NAME=...)"
	@echo "make clean   remove environments and everything else that was built"

demo: .envs/newest/.stamp
	$(RUN) -m arrowcache.demo $(ARGS)

environments: .envs/newest/.stamp .envs/tensorflow/.stamp .envs/oldest/.stamp

test: test-newest test-ray test-tensorflow test-oldest

# How long the storms of tests/storm last in each environment.
test-newest: export STORM_SECONDS := 42
test-oldest: export STORM_SECONDS := 8

# A Ray cluster is processes enough: one, and one test after another. Its servers end whom they do not hear for a while.
RAY_NOTEBOOK := tests/notebooks/test_notebooks.py::test_a_notebook_runs_and_leaves_nothing_behind[05-many-machines]

# tensorflow-io has no release for a newer TensorFlow than 2.16, and that none for NumPy 2.
test-newest test-oldest: test-%: .envs/%/.stamp
	.envs/$*/bin/python $(TESTS) --ignore tests/adapters/test_ray.py --deselect '$(RAY_NOTEBOOK)' $(ARGS)

test-ray: .envs/newest/.stamp
	$(RUN) -m pytest tests/adapters/test_ray.py '$(RAY_NOTEBOOK)' $(ARGS)

# What is in no other environment: the newest TensorFlow.
test-tensorflow: .envs/tensorflow/.stamp
	.envs/tensorflow/bin/python $(TESTS) tests/adapters/test_tensorflow*.py tests/notebooks $(ARGS)

bench: $(patsubst %,.envs/%/.stamp,$(if $(BENCH_IN_NEWEST),newest) $(BENCH_TENSORFLOW_IN))
	failed=; for benchmark in $(BENCH_IN_NEWEST); do \
		echo "== $$benchmark"; $(RUN) -m benchmarks.$$benchmark || failed="$$failed $$benchmark"; done; \
	for environment in $(BENCH_TENSORFLOW_IN); do echo "== tensorflow, in $$environment"; \
		.envs/$$environment/bin/python -m benchmarks.tensorflow || failed="$$failed tensorflow"; done; \
	if [ "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

# Each peer in the environment that constraints/ has for it; ARGS="--peers litdata,arrowcache --again" for some.
peers: .envs/newest/.stamp
	$(RUN) -m benchmarks.peers $(ARGS)

# What starts JupyterLab and the browser is shared with the tests.
pictures: .envs/newest/.stamp
	PYTHONPATH=tests $(RUN) notebooks/pictures.py

lint: .envs/newest/.stamp
	$(RUN) -m ruff check .
	$(RUN) -m mypy arrowcache $(wildcard tests/typing)

format: .envs/newest/.stamp
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# hatchling is among the pinned, and not whatever is newest.
.envs/%/.stamp: pyproject.toml constraints/%.txt
	$(PYTHON) -m venv --clear .envs/$*
	.envs/$*/bin/python -m pip install --quiet --no-deps --requirement constraints/$*.txt
	.envs/$*/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	.envs/$*/bin/python -m pip check
	touch $@

$(PEERS:%=.envs/%/.stamp): .envs/%/.stamp: constraints/%.txt
	$(PYTHON) -m venv --clear .envs/$*
	.envs/$*/bin/python -m pip install --quiet --no-deps --requirement constraints/$*.txt
	touch $@

freeze:
	$(PYTHON) -m venv --clear .envs/freeze
	.envs/freeze/bin/python -m pip install --quiet $(TORCH) hatchling editables
	.envs/freeze/bin/python -m pip install --quiet $(TORCH) --no-build-isolation --editable '$($(NAME))'
	sed -n '/^#/p' constraints/$(NAME).txt > constraints/$(NAME).tmp
	.envs/freeze/bin/python -m pip freeze --all --exclude pip --exclude-editable | sed 's/^torch==.*/$(TORCH)/' >> constraints/$(NAME).tmp
	mv constraints/$(NAME).tmp constraints/$(NAME).txt
	rm -rf .envs/freeze

clean:
	rm -rf .envs build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis benchmarks/results
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
