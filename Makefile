# The only developer entry. Needs Python 3.11+, a C++ compiler and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup check test pack pack-cuda abi bench twin docs size clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml CMakeLists.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[test,dev]'
	touch $@

pack:
	$(BIN)/python -m pip install --quiet --no-deps -e .

pack-cuda:
	$(BIN)/python packs/cuda/build.py $(ARCH)

abi:
	$(BIN)/python packs/bindgen.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python packs/bindgen.py --check
	$(BIN)/python -m pytest tests/house

test: setup
	$(BIN)/python -m pytest

bench: setup
	$(BIN)/python -m bench.kernels
	$(BIN)/python -m bench.control

twin:
	mkdir -p build && $(CXX) -std=c++20 -O2 -shared -fPIC -o build/twin.so bench/twin/replay.cpp

docs: setup
	$(BIN)/python packs/bindgen.py

size:
	@for d in runner manager packs/cpu packs/cuda packs/host; do printf '%-12s ' $$d; find $$d -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | grep -v abi.py | xargs cat 2>/dev/null | wc -l; done

clean:
	rm -rf build $(VENV) dist
