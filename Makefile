# make serve   build Quire, fetch the default model, serve it        make test    all tests
# make check   format, lint, types, import rules                     make bench   Quire beside its peers
#
# .venv        what a user gets: no torch, no compiler needed to run
# .venv-dev    tests, linters and the libraries that results are compared with
# .venv-clients  on top of it, clients that hold back what the tests need
# .venv-llama  llama.cpp, for make bench
# .venv-vllm   vLLM, for make bench

PYTHON ?= python3
MODEL ?=
HOST ?= 127.0.0.1
PORT ?= 8000

SERVING := .venv/.installed
DEVELOPING := .venv-dev/.installed
CLIENTS := .venv-clients/.installed

# What make bench compares with: installed into .venv-llama and .venv-vllm unless other places are named.
LLAMA_VERSION := 0.3.36
VLLM_VERSION := 0.32.0
LLAMA_PYTHON ?= .venv-llama/bin/python
LLAMA_SERVER ?= .venv-llama/bin/llama-server
VLLM_PYTHON ?= .venv-vllm/bin/python
LLAMA := .venv-llama/.installed-$(LLAMA_VERSION)
VLLM := .venv-vllm/.installed-$(VLLM_VERSION)
PEERS := $(if $(filter .venv-llama/%,$(LLAMA_PYTHON) $(LLAMA_SERVER)),$(LLAMA)) \
	$(if $(filter .venv-vllm/%,$(VLLM_PYTHON)),$(VLLM))

NATIVE := $(shell find native -type f) CMakeLists.txt pyproject.toml
PACKAGE := $(shell find src -type f -name '*.py')

.PHONY: serve test check format bench bench-parts clean

serve: $(SERVING)
	@.venv/bin/quire serve $(MODEL) --host $(HOST) --port $(PORT)

test: $(SERVING) $(DEVELOPING) $(CLIENTS)
	@.venv-dev/bin/quire pull
	.venv/bin/python tools/check_install.py
	build/dev/quire_tests
	.venv-dev/bin/python -m pytest -q $(or $(ARGS),-n logical --dist loadfile)
	$(if $(ARGS),,.venv-clients/bin/python -m pytest -q tests/clients/apart)

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

bench: $(DEVELOPING) $(PEERS)
	@.venv-dev/bin/quire pull
	.venv-dev/bin/python -m benchmarks --llama-python $(LLAMA_PYTHON) --llama-server $(LLAMA_SERVER) \
		--vllm-python $(VLLM_PYTHON) $(ARGS)

bench-parts: $(DEVELOPING)
	@.venv-dev/bin/quire pull
	.venv-dev/bin/python -m benchmarks.parts --llama-python $(LLAMA_PYTHON)

$(SERVING): $(NATIVE) $(PACKAGE)
	@$(PYTHON) tools/check_build.py
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@echo "building quire into .venv (some minutes the first time)" >&2
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

$(CLIENTS): $(DEVELOPING) tests/clients/apart/requirements.txt
	@test -x .venv-clients/bin/python || .venv-dev/bin/python -m venv .venv-clients
	@echo "installing clients into .venv-clients (a minute)" >&2
	@.venv-dev/bin/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
		>$$(echo .venv-clients/lib/python*/site-packages)/dev.pth
	@.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
		--requirement tests/clients/apart/requirements.txt
	@touch $@

$(LLAMA):
	@echo "building llama.cpp into .venv-llama, to compare with (a quarter of an hour on two cores)" >&2
	@PYTHON=$(PYTHON) benchmarks/peers/install_llama.sh .venv-llama $(LLAMA_VERSION)
	@touch $@

$(VLLM):
	@echo "installing vLLM into .venv-vllm, to compare with (2 GB)" >&2
	@PYTHON=$(PYTHON) benchmarks/peers/install_vllm.sh .venv-vllm $(VLLM_VERSION) 2.13.0
	@touch $@

clean:
	rm -rf build .venv .venv-dev .venv-clients .venv-llama .venv-vllm
