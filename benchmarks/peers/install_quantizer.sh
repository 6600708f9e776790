#!/usr/bin/env bash
# A quantizer from the package index into an environment of its own, on top of the torch of another one.
#
#     benchmarks/peers/install_quantizer.sh .venv-llmcompressor .venv-dev llmcompressor==0.14.0
#
# What it wants in other versions than the other environment has (transformers, above all) is installed here.
set -euo pipefail
venv=$1 base=$2
shift 2

[ -x "$venv/bin/python" ] || "$base/bin/python" -m venv "$venv"
"$base/bin/python" -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
    >"$(echo "$venv"/lib/python*/site-packages)/base.pth"
"$venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-compile "$@"
