# Everything runs in a virtual environment of its own, .venv, made on first use.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
# llama.cpp without its multimodal library: a shorter compile. CMAKE_ARGS reaches llama.cpp's build.
CMAKE_ARGS ?= -DLLAVA_BUILD=OFF
export CMAKE_ARGS

PIP = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off

.PHONY: install develop demo test test-all lint capture bench profile zoo readme model clean

install: $(VENV)/installed  ## what the tool needs, and no more

develop: $(VENV)/developing  ## what its tests need besides: torch and transformers among it

$(VENV)/installed: pyproject.toml
	@echo "Installing into $(VENV). llama.cpp is compiled on the way, once: that takes minutes (about 6 on 2 cores)."
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/developing: $(VENV)/installed
	@echo "Installing what the tests need: torch and transformers among it, more than 1 GB."
	$(PIP) --editable '.[dev]'
	@touch $@

demo: install  ## the main job on the shipped model, right and then with a bug in it
	$(BIN)/llamadiff demo

test: develop  ## the quick tests, and the recorded traces against the engine
	$(BIN)/python -m pytest -m "not slow"
	$(BIN)/llamadiff check captures

test-all: develop  ## every test, the slow ones too
	$(BIN)/python -m pytest
	$(BIN)/llamadiff check captures

lint: develop  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

capture: install  ## record captures/ anew
	$(BIN)/python tests/recapture.py

bench: develop  ## seconds and memory, beside llama.cpp's own decode
	$(BIN)/python tests/benchmarks/bench.py

profile: install  ## where the time goes: a summary of the main case in profile.txt
	$(BIN)/python tests/benchmarks/profiled.py --save profile.txt

zoo: install  ## a tiny model of every architecture of llama.cpp, every node checked: minutes
	$(BIN)/python tests/zoo/zoo.py

readme: install  ## the pictures in README.md
	$(BIN)/python tests/pictures.py

model: install  ## train the shipped model anew
	$(PIP) --editable '.[train]'
	$(BIN)/python -m llamadiff.shipped.train

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache
