#!/usr/bin/env bash
# A quantizer from the package index into an environment of its own: these tools hold transformers and torch back.
#
#     PYTHON=python3 benchmarks/peers/install_quantizer.sh .venv-llmcompressor torch==2.11.0 llmcompressor==0.14.0
#
# Packages are installed one after the other: some are built with what stands before them.
set -euo pipefail
venv=$1
shift

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
for package in "$@"; do
    "$venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-compile "$package"
done
