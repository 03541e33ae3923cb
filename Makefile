# Everything runs in a virtual environment of its own, .venv, made on first use.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
# llama.cpp without its multimodal library: a shorter compile. CMAKE_ARGS reaches llama.cpp's build.
CMAKE_ARGS ?= -DLLAVA_BUILD=OFF
export CMAKE_ARGS
# Whose llama.cpp make demo installs: prebuilt, in seconds; or source, which is compiled for this machine.
LLAMA_CPP ?= prebuilt
EXTRA_prebuilt = prebuilt
EXTRA_source = llama-cpp-python
EXTRA_docs = docs
# Extras of pyproject.toml that some tests need: EXTRAS="torch compilers". Tests that lack theirs are counted as not run.
EXTRAS ?=
WHOLE = $(VENV)/with-torch $(VENV)/with-compilers $(VENV)/with-docs

# One test a core, and one more: tests wait for processes. Neighbours stay together, for what a file's tests share.
CORES = $(shell getconf _NPROCESSORS_ONLN)
PYTEST = -m pytest -n $(shell expr $(CORES) + 1) --maxprocesses 8 --dist worksteal --durations 10
# A quick test that is not through in ten minutes hangs: its process says where, and ends.
QUICK = -m "not slow" -o faulthandler_timeout=600
# What a slice and the core owe each other.
CONTRACTS = tests/house tests/cli/test_slices.py
export OMP_WAIT_POLICY = passive
PIP = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off

# llama.cpp as other x86 machines have it, all of the oldest release that is taken, to be comparable. pip keeps one wheel
# of a source whatever CMAKE_ARGS says: each has its own.
BUILDS = native avx2 plain
OFF = -DGGML_NATIVE=OFF -DGGML_AVX512=OFF
FLAGS_avx2 = $(OFF) -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON
FLAGS_plain = $(OFF) -DGGML_SSE42=OFF -DGGML_AVX=OFF -DGGML_AVX2=OFF -DGGML_FMA=OFF -DGGML_F16C=OFF -DGGML_BMI2=OFF
OLDEST = $(shell sed -n 's/.*"\(llama-cpp-python\)>=\([^"]*\)".*/\1==\2/p' pyproject.toml)

.PHONY: help install develop demo test test-all mutants builds without matrix today backends fuzz lint capture bench profile zoo docs site model clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1\t\2/p' Makefile | expand -t 12

install: $(VENV)/installed-$(LLAMA_CPP)  ## the tool and a llama.cpp, and no more; LLAMA_CPP=source compiles that

develop: $(VENV)/developing $(EXTRAS:%=$(VENV)/with-%)  ## what its quick tests need besides, and EXTRAS

KERNELS = llamadiff/numerics/compiled/kernels.c llamadiff/numerics/compiled/variant.h

$(VENV)/installed-source $(VENV)/developing: COMPILES = " llama.cpp is compiled on the way, once: that takes minutes."

$(VENV)/installed-%: pyproject.toml $(KERNELS)
	@echo "Installing into $(VENV)."$(COMPILES)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[$(EXTRA_$*)]'
	@touch $@

$(VENV)/developing: pyproject.toml $(KERNELS)
	@echo "Installing what the quick tests need."$(COMPILES)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/with-%: $(VENV)/developing
	@echo "Installing the extra $*, which some tests need."
	$(PIP) --editable '.[$*]'
	@touch $@

demo: install  ## the main job on the shipped model, right and then with a bug in it
	$(BIN)/llamadiff demo
	@echo "llamadiff is $(BIN)/llamadiff; after \". $(BIN)/activate\" it is a command of this shell"

test: develop  ## the quick tests, and the captures; with EXTRAS="torch compilers" all of them; with SLICE=port that one's
	$(BIN)/python $(PYTEST) $(QUICK) $(SLICE:%=$(CONTRACTS) tests/ext/%)
	$(if $(SLICE),,$(BIN)/llamadiff check captures)

test-all: $(WHOLE)  ## every test, the slow ones too; with PART=3/24 one part of them
	$(if $(PART),LLAMADIFF_TESTS=$(PART)) $(BIN)/python $(PYTEST)
	$(BIN)/llamadiff check captures

mutants: $(WHOLE)  ## which test finds which mutant, and the quick tests anew: hours
	$(PIP) coverage
	$(BIN)/python tests/tools/mutants.py follow -n $(CORES) --dist worksteal
	$(BIN)/python tests/tools/mutants.py kill
	$(BIN)/python tests/tools/mutants.py choose

builds: $(BUILDS:%=build/%/tested)  ## llama.cpp built three times, and the quick tests on each

build/%/tested: build/%/installed FORCE
	build/$*/bin/python $(PYTEST) $(QUICK)
	build/$*/bin/llamadiff check captures
	build/$*/bin/python tests/tools/kernels.py > $@
	@cat $@

build/%/installed: pyproject.toml $(KERNELS)
	$(PYTHON) -m venv build/$*
	ls build/$*/wheel/*.whl || CMAKE_ARGS="$(CMAKE_ARGS) $(FLAGS_$*)" build/$*/bin/python -m pip wheel --no-deps \
		$(if $(FLAGS_$*),--no-cache-dir) --wheel-dir build/$*/wheel $(OLDEST)
	build/$*/bin/python -m pip install --disable-pip-version-check build/$*/wheel/*.whl
	build/$*/bin/python -m pip install --disable-pip-version-check --editable '.[dev,torch,compilers]'
	@touch $@

.PRECIOUS: build/%/installed $(VENV)/installed-% $(VENV)/with-%

FORCE:

without: develop  ## the core's tests with a slice deleted: all slices in turn, or TURN=N for one
	$(BIN)/python tests/tools/without.py $(if $(TURN),--turn $(TURN),--all)

matrix: develop  ## the quick tests as on other machines, a fifth of them in each corner: forty minutes
	$(BIN)/python tests/tools/matrix.py $(if $(TURN),--turn $(TURN))

today: develop  ## the newest prebuilt llama.cpp of every package, asked and judged; WITH="--cpus" each CPU's kernels
	$(BIN)/python tests/tools/today.py $(if $(TURN),--turn $(TURN)) $(WITH)

backends: $(WHOLE)  ## every node on other builds, devices, CPUs (PARTS=arm), releases (PARTS=old); wrong graphs (PARTS=port)
	$(BIN)/python tests/tools/backends.py $(PARTS)
	PARTS="$(PARTS)" $(BIN)/python $(PYTEST) -rs -m backends tests/llamacpp tests/ext; code=$$?; \
		$(BIN)/python tests/tools/backends.py --table && exit $$code

fuzz: develop  ## 10,000 hostile files for every reader: half an hour
	$(BIN)/python tests/proof/fuzz/run.py --cases 10000

lint: develop  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	for system in linux darwin win32; do $(BIN)/mypy --platform $$system || exit 1; done

capture: develop  ## record captures/ anew
	$(BIN)/python tests/tools/recapture.py

bench: develop  ## seconds and memory, beside llama.cpp's own decode
	$(BIN)/python tests/tools/benchmarks/bench.py

profile: install  ## where the time goes: a summary of the main case in profile.txt
	$(BIN)/python tests/tools/benchmarks/profiled.py --save profile.txt

zoo: develop  ## a tiny model of every architecture of llama.cpp, every node checked: minutes
	$(BIN)/python tests/tools/zoo/zoo.py

docs: develop  ## the tables in docs/ and the picture in README.md, from the code
	$(BIN)/python tests/tools/tables.py
	$(BIN)/python tests/tools/pictures.py

site: $(VENV)/installed-docs  ## docs/ as a site, in build/site; a link that leads nowhere is an error
	$(BIN)/python -m sphinx -W --keep-going -q -d build/site-trees docs build/site
	@echo "Open build/site/index.html"

model: $(VENV)/with-torch  ## train the shipped model anew
	$(BIN)/python tests/tools/training/train.py

clean:  ## remove .venv, build/ and what tools keep
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache $(addprefix llamadiff/numerics/compiled/*.,so pyd)
