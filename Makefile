# Two commands do everything, on a machine with Python 3.11 and make: `make demo` and `make test`.
# Each environment is a folder .envs/NAME with what its list below asks for. uv or pip resolves that (constraints/install.py), so
# that it brings what this platform's builds need, and is held to the versions of constraints/NAME.txt and
# constraints/common.txt. An environment is built again only when one of these or pyproject.toml has changed.

PYTHON ?= python3
RUN := .envs/newest/bin/python

# What each environment asks for; in constraints/NAME.txt is what it gets, and `make freeze NAME=...` writes that anew.
NAME := newest
test := .[torch,explore,sources,test] ipykernel nbclient
demo := .[demo]
newest := .[dev]
tensorflow := .[test] tensorflow-cpu ipykernel nbclient typer
jax := .[test] jax
oldest := .[demo,test] tensorflow-cpu tensorflow-io
wheels := hatchling ziglang auditwheel
docs := mkdocs-material mkdocstrings-python ruff
mutants := .[sources,test] cosmic-ray pillow torch
core-3.10 := .[test]
core-3.11 := .[test]
core-3.12 := .[test]
core-3.13 := .[test]
spark := .[test] pyspark
# pyspark, and a requirement of cosmic-ray, are archives of source, which wheel builds.
BUILDS_spark := wheel
BUILDS_mutants := wheel
uv := uv
# Those that `make peers` makes when it needs them; arrowcache is not installed there. Hatchling is not needed, either.
PEERS := peers streaming reverb
peers := array_record datasets grain litdata monai numpy pylance spdl tensordict torch torchdata torchrl webdataset
streaming := mosaicml-streaming torch
reverb := dm-reverb[tensorflow] portpicker

# The tests of an environment are shared out among processes, one more than there are processors, since many wait;
# threads of OpenMP that spin while they wait would take the processors from the others. ARGS=-n0: no sharing.
TESTS := -m pytest --numprocesses $(shell expr $$(nproc) + 1) --dist worksteal
check test test-%: export OMP_WAIT_POLICY := passive
# Of cases that are many a commit has some, which its hash draws, and `make nightly` all: see tests/quick.py. It also
# draws the order of tests, by pytest-randomly; ARGS=--randomly-seed=N: another.
export TESTS_SEED := $(shell git rev-parse --short=6 HEAD 2>/dev/null || echo 0)
# Of the tests beyond `make test`, one in SHARE runs, which that hash draws, too: CI asks for fewer than all.
SHARE ?= 1

BENCH := cached gather loader ingest gil startup segments views threads epochs window shuffle memory dataloader workers tokens \
	device packed reads selection tensorflow explore durable engines sources soak pace beyond_memory
# Where each of these runs; that of TensorFlow with tensorflow-io, and in the newest.
BENCH_IN_NEWEST = $(filter-out tensorflow,$(BENCH))
BENCH_TENSORFLOW_IN = $(if $(filter tensorflow,$(BENCH)),oldest tensorflow)

# Nothing of the shell's own Python may reach the environments; processes that tests start find everything compiled.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help environments demo check test test-all test-rest nightly test-pythons test-newest test-ray test-tensorflow test-jax test-oldest test-spark \
	test-install coverage test-extras fuzz mutants bench peers device-proof pictures wheels docs lint format freeze clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train on a cache that grows, and print what happened each epoch"
	@echo "make check   run the quickest tests, after each change   (ARGS=... goes to pytest, here and below)"
	@echo "make test    run the quick tests, and one case of each slow kind, in one environment"
	@echo "make nightly     all that, every case of it, with longer storms, each Python, and Spark"
	@echo "make test-pythons    run the core's quick tests in each Python of 3.10 to 3.13 that is found, or test-python-3.10"
	@echo "make test-all    run all tests, in all environments: test, test-newest, test-ray, test-tensorflow,"
	@echo "             test-jax, test-oldest, test-install"
	@echo "make test-extras    install the wheel with each extra by itself, and use it: gigabytes come down"
	@echo "make fuzz    give the engine random jobs for FUZZ_SECONDS=600; needs clang or AFL++"
	@echo "make mutants    break the code in MUTANTS=200 places drawn by SEED=0, in files with ONLY=reading/order.py,"
	@echo "             and tell which breaks the unit tests do not notice; hours for thousands"
	@echo "make environments   install what tests need, with -j4 all at once"
	@echo "make bench   run the benchmarks         (BENCH=gather for one, ARGS=--small to see that it runs)"
	@echo "make peers   measure arrowcache beside its peers, and write the tables and plots of that"
	@echo "make device-proof   prove the way to the GPU of this machine, in 8 minutes"
	@echo "make pictures   take README's pictures anew, of a notebook in JupyterLab; needs chromium"
	@echo "make wheels  compile wheels of all platforms into dist/, with no compiler but the one that pip brings"
	@echo "make docs    build the site of README, guides and reference into site/, and check its links"
	@echo "make lint    ruff, codespell and mypy --strict"
	@echo "make format  ruff's formatter and its safe fixes"
	@echo "make freeze  install the newest versions and write them to constraints/newest.txt (or NAME=...)"
	@echo "make clean   remove environments and everything else that was built"

# The engine, where its source is newer than what an environment compiled when it was made.
compile = .envs/$1/bin/python arrowcache/native/build.py

demo: .envs/demo/.stamp
	$(call compile,demo)
	.envs/demo/bin/python -m arrowcache.demo $(ARGS)

environments: .envs/test/.stamp .envs/newest/.stamp .envs/tensorflow/.stamp .envs/jax/.stamp .envs/oldest/.stamp

# The quick tests but for the functions that take most of the time: see tests/quick.py. Each process first imports what
# the tests need, so that there are no more than processors.
check: .envs/test/.stamp
	$(call compile,test)
	.envs/test/bin/python -m pytest --numprocesses $$(nproc) --dist worksteal $(NOT_BESIDE) -m 'not slow' --quickest $(ARGS)

# The quick tests and one case of each slow kind: it can fail for each promise of the README.
test: .envs/test/.stamp
	$(call compile,test)
	.envs/test/bin/python $(TESTS) $(NOT_BESIDE) -m 'not slow or smoke' $(ARGS)

# All others, in all environments.
test-all: test test-rest
test-rest: test-newest test-ray test-tensorflow test-jax test-oldest test-install

# All that commits have a part of, longer storms, each Python, and Spark: it goes on behind a failure. It writes what it
# was run on, and which quick tests took most of the time, for the commits to come.
nightly:
	failed=; \
	$(MAKE) --keep-going test-all STORM_SECONDS=600 ARGS='--nightly $(ARGS)' || failed=1; \
	$(MAKE) --keep-going test-pythons test-spark || failed=1; \
	test -z "$$failed" && $(RUN) tests/quick.py

# The quick tests of the core, without any extra, in each Python that is found: on the path, or by pyenv, whose names on
# the path may lead nowhere.
PYTHONS := 3.10 3.11 3.12 3.13
CORE := tests/unit tests/refusals tests/architecture/test_environments.py tests/architecture/test_import.py
test-pythons: $(PYTHONS:%=test-python-%)
test-python-%:
	@for found in python$* $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$**/bin/python; do \
		if ! $$found -c '' 2>/dev/null; then continue; fi; \
		$(MAKE) .envs/core-$*/.stamp PYTHON=$$found && $(call compile,core-$*) && \
			exec .envs/core-$*/bin/python $(TESTS) $(CORE) -m 'not slow' --share $(SHARE) $(ARGS); \
		exit; done; \
	echo "SKIPPED: there is no Python $* here"

# How long the storms of tests/storm last.
STORM_SECONDS := 15
export STORM_SECONDS

# A Ray cluster is processes enough: one, and one test after another. Its servers end whom they do not hear for a while.
# tests/install has pip fetch packages.
RAY_NOTEBOOK := tests/notebooks/test_notebooks.py::test_a_notebook_runs_and_leaves_nothing_behind[05-many-machines]
NOT_BESIDE := --ignore tests/adapters/test_ray.py --deselect '$(RAY_NOTEBOOK)' --ignore tests/install

# What no version of NumPy, pyarrow or TensorFlow changes: the source text and its layers; the engine's C; which of our
# own file calls fails, or is the last before the power does; the peers' figures; what is refused, and in which words.
NOT_IN_OLDEST := --ignore tests/architecture --ignore tests/benchmarks --ignore tests/gpu --ignore tests/native --ignore tests/cli \
	--ignore tests/refusals --ignore tests/stateful \
	--ignore tests/crash/test_disk.py --ignore tests/crash/test_faults.py --ignore tests/crash/test_power.py

# What `make test` has not run: what is slow, and what needs a package that .envs/test has not.
MORE := accelerate|boto3|datasets|distributed|jedi|jupyterlab|lightning|loky|moto|mypy|obstore|polars|prometheus_client|psutil|selenium|tensordict|torchdata|transformers
NEEDING_MORE := $(shell grep --recursive --files-with-matches --extended-regexp 'importorskip..($(MORE))' --include='test_*.py' tests)
test-newest: .envs/newest/.stamp
	$(call compile,newest)
	$(RUN) $(TESTS) $(NOT_BESIDE) $(NEEDING_MORE:%=--ignore %) -m 'slow and not smoke' --share $(SHARE) $(ARGS)
	$(RUN) $(TESTS) $(NEEDING_MORE) --share $(SHARE) $(ARGS)

# How many branches these tests reach in their own process, the modules with the fewest first: no part of `make test`,
# as it takes them twice the processor. CPython 3.11 may have a traced thread spin after Ctrl-C, and keep the GIL.
COVERED := tests/unit tests/adapters tests/explore tests/cli
coverage: .envs/newest/.stamp
	$(call compile,newest)
	$(RUN) $(TESTS) $(NOT_BESIDE) $(COVERED) -m 'not no_cover' --cov --cov-report=term $(ARGS)

# tensorflow-io has no release for a newer TensorFlow than 2.16, and that none for NumPy 2. What old versions change,
# the quick tests find: those that are slow start the same processes with any.
WITH_TENSORFLOW := $(wildcard tests/adapters/test_tensorflow*.py) tests/refusals/test_every_argument.py tests/how_to/test_pages.py
test-oldest: .envs/oldest/.stamp
	$(call compile,oldest)
	.envs/oldest/bin/python $(TESTS) $(NOT_BESIDE) $(NOT_IN_OLDEST) $(WITH_TENSORFLOW:%=--ignore %) -m 'not slow' \
		--share $(SHARE) $(ARGS)
	.envs/oldest/bin/python $(TESTS) $(WITH_TENSORFLOW) --share $(SHARE) $(ARGS)

test-ray: .envs/newest/.stamp
	$(call compile,newest)
	$(RUN) -m pytest tests/adapters/test_ray.py '$(RAY_NOTEBOOK)' --share $(SHARE) $(ARGS)

# What is in no other environment: the newest TensorFlow.
test-tensorflow: .envs/tensorflow/.stamp
	$(call compile,tensorflow)
	.envs/tensorflow/bin/python $(TESTS) $(WITH_TENSORFLOW) tests/notebooks -k 'not notebook or tensorflow' \
		tests/architecture/test_environments.py --share $(SHARE) $(ARGS)

WITH_JAX := tests/adapters/test_jax.py tests/refusals/test_jax_arguments.py tests/refusals/test_every_argument.py tests/how_to/test_pages.py
test-jax: .envs/jax/.stamp
	$(call compile,jax)
	.envs/jax/bin/python $(TESTS) $(WITH_JAX) tests/architecture/test_environments.py --share $(SHARE) $(ARGS)

test-spark: .envs/spark/.stamp
	$(call compile,spark)
	.envs/spark/bin/python -m pytest tests/adapters/test_spark.py tests/architecture/test_environments.py $(ARGS)

# The wheel, the sdist and the repository, each in an environment of its own; the second with all extras, too.
test-install: .envs/newest/.stamp
	$(RUN) $(TESTS) tests/install -m 'not slow' -o faulthandler_timeout=0 $(ARGS)
test-extras: .envs/newest/.stamp
	$(RUN) -m pytest tests/install -o faulthandler_timeout=0 --timeout 3600 $(ARGS)

# What does harm is kept in fuzz-found/engine; any Python will do.
FUZZ_SECONDS := 600
fuzz:
	PYTHONPATH=tests $(PYTHON) -m native --seconds $(FUZZ_SECONDS)

# Each mutant is made in a copy: nothing here changes.
MUTANTS := 200
SEED := 0
mutants: .envs/mutants/.stamp
	$(call compile,mutants)
	PYTHONPATH=tests nice .envs/mutants/bin/python -m mutants --count $(MUTANTS) --seed $(SEED) --only '$(ONLY)' $(ARGS)

bench: $(patsubst %,.envs/%/.stamp,$(if $(BENCH_IN_NEWEST),newest) $(BENCH_TENSORFLOW_IN))
	$(call compile,newest)
	failed=; for benchmark in $(BENCH_IN_NEWEST); do \
		echo "== $$benchmark"; $(RUN) -m benchmarks $$benchmark $(ARGS) || failed="$$failed $$benchmark"; done; \
	for environment in $(BENCH_TENSORFLOW_IN); do echo "== tensorflow, in $$environment"; \
		.envs/$$environment/bin/python -m benchmarks tensorflow $(ARGS) || failed="$$failed tensorflow"; done; \
	if [ "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

# Each peer in the environment that constraints/ has for it; ARGS="--peers litdata,arrowcache --again" for some.
peers: .envs/newest/.stamp
	$(call compile,newest)
	$(RUN) -m benchmarks peers $(ARGS)

# Whether the way to a GPU holds on this one. Without one it proves nothing, and says so.
device-proof: .envs/newest/.stamp
	$(call compile,newest)
	PYTHONPATH=tests $(RUN) -m gpu $(ARGS)

# What starts JupyterLab and the browser is shared with the tests.
pictures: .envs/newest/.stamp
	PYTHONPATH=tests $(RUN) notebooks/pictures.py

# One wheel a platform serves every version of Python. glibc 2.28 is that of 2018.
DIST := dist
PLATFORMS := x86_64 aarch64
wheels: .envs/wheels/.stamp
	for machine in $(PLATFORMS); do \
		CC="$(abspath .envs/wheels/bin/python) -m ziglang cc -target $$machine-linux-gnu.2.28" \
		ARROWCACHE_WHEEL_PLATFORM=manylinux_2_28_$$machine \
		.envs/wheels/bin/python -m hatchling build --target wheel --directory $(DIST) || exit; done
	for wheel in $(DIST)/*-manylinux_2_28_*.whl; do .envs/wheels/bin/python -m auditwheel show $$wheel || exit; done

# It reads the source and imports none of it. Open site/index.html: it needs neither a server nor the network.
docs: export NO_MKDOCS_2_WARNING := 1
docs: .envs/docs/.stamp
	.envs/docs/bin/python -m mkdocs build --strict --config-file docs/mkdocs.yml

lint: .envs/newest/.stamp
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	@git ls-files | xargs $(RUN) -m codespell_lib
	$(RUN) -m mypy arrowcache $(wildcard tests/typing)

format: .envs/newest/.stamp
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# $(call install,INTO,NAME,FLAGS): what NAME asks for, into .envs/INTO. arrowcache is installed as it lies here, with a
# build backend that is there before and is pinned like all else; pip would make an environment for whichever is newest.
# Where no C compiler is found, pip brings one, for the engine.
# Modules are compiled when they are first imported: most never are.
HAS_COMPILER = $(or $(CC_GIVEN),$(shell command -v cc || command -v gcc || command -v clang))
CC_GIVEN := $(if $(filter environment%,$(origin CC)),$(CC))
define install
$(PYTHON) -m venv --clear .envs/$1
$(if $(filter .%,$($2)),$(call into,$1,$3) hatchling $(BUILDS_$2) $(if $(HAS_COMPILER),,ziglang))
$(call into,$1,$3) --no-build-isolation $(foreach wish,$($2),$(if $(filter .%,$(wish)),--editable )'$(wish)')
.envs/$1/bin/python -m pip check
endef
into = $(PYTHON) constraints/install.py .envs/$1 --constraint constraints/common.txt $2

.envs/%/.stamp: pyproject.toml constraints/%.txt constraints/common.txt
	$(call install,$*,$*,--constraint constraints/$*.txt)
	touch $@

# A build of CUDA brings packages that no other build has, and that torch pins, or constraints/common.txt.
freeze:
	$(call install,freeze,$(NAME))
	sed -n '/^#/p' constraints/$(NAME).txt > constraints/$(NAME).tmp
	.envs/freeze/bin/python -m pip freeze --all --exclude pip --exclude-editable | grep -v -E '^(torch|triton|(cuda|nvidia)-.*)==' >> constraints/$(NAME).tmp
	mv constraints/$(NAME).tmp constraints/$(NAME).txt
	rm -rf .envs/freeze

clean:
	rm -rf .envs build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis benchmarks/results
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
