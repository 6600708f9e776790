# make serve   build Quire, fetch the default model, serve it        make test    all tests
# make check   format, lint, types, import rules                     make bench   speed of this machine
#
# .venv        what a user gets: no torch, no compiler needed to run
# .venv-dev    tests, linters and the libraries that results are compared with
# .venv-llama  llama.cpp, for make bench

PYTHON ?= python3
MODEL ?=
HOST ?= 127.0.0.1
PORT ?= 8000

SERVING := .venv/.installed
DEVELOPING := .venv-dev/.installed
LLAMA := .venv-llama/.installed
NATIVE := $(shell find native -type f) CMakeLists.txt pyproject.toml
PACKAGE := $(shell find src -type f -name '*.py')

.PHONY: serve test check format bench clean

serve: $(SERVING)
	@.venv/bin/quire serve $(MODEL) --host $(HOST) --port $(PORT)

test: $(SERVING) $(DEVELOPING)
	@.venv-dev/bin/quire pull
	.venv/bin/python tools/check_install.py
	build/dev/quire_tests
	.venv-dev/bin/python -m pytest -q $(ARGS)

check: $(DEVELOPING)
	.venv-dev/bin/ruff format --check .
	.venv-dev/bin/ruff check .
	.venv-dev/bin/clang-format --dry-run --Werror $(shell find native -name '*.cpp' -o -name '*.h')
	.venv-dev/bin/mypy
	.venv-dev/bin/python -m pytest -q tests/test_house.py

format: $(DEVELOPING)
	.venv-dev/bin/ruff format .
	.venv-dev/bin/ruff check --fix .
	.venv-dev/bin/clang-format -i $(shell find native -name '*.cpp' -o -name '*.h')

bench: $(DEVELOPING) $(LLAMA)
	@.venv-dev/bin/quire pull
	.venv-dev/bin/python -m benchmarks --llama-python .venv-llama/bin/python

$(SERVING): $(NATIVE) $(PACKAGE)
	@$(PYTHON) tools/check_build.py
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@echo "building quire into .venv (a minute the first time)" >&2
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check .
	@touch $@

$(DEVELOPING): $(NATIVE)
	@$(PYTHON) tools/check_build.py
	@test -x .venv-dev/bin/python || $(PYTHON) -m venv .venv-dev
	@echo "building quire into .venv-dev (several minutes the first time: torch and transformers are compared with)" >&2
	@.venv-dev/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 scikit-build-core nanobind cmake ninja
	@.venv-dev/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		--config-settings=build-dir=build/dev --config-settings=cmake.define.QUIRE_TESTS=ON --editable '.[dev]'
	@touch $@

$(LLAMA):
	@test -x .venv-llama/bin/python || $(PYTHON) -m venv .venv-llama
	@echo "building llama.cpp into .venv-llama, to compare with (a quarter of an hour on two cores)" >&2
	@.venv-llama/bin/python -m pip install --quiet --disable-pip-version-check llama-cpp-python numpy
	@touch $@

clean:
	rm -rf build .venv .venv-dev .venv-llama
