#!/usr/bin/env bash
# vLLM for GPUs from the package index into an environment of its own, on top of the torch that PYTHON has.
#
#     PYTHON=.venv-dev/bin/python benchmarks/peers/install_vllm_gpu.sh .venv-vllm-gpu [0.26.0]
#
# Its compiled parts fit one torch only: so it is installed by itself, the newest for that torch unless a version is
# named, and then what else it imports, with torch and Triton held as they are.
set -euo pipefail
venv=$1 base=${PYTHON:-python3} here=$(dirname "$0")
version_of() { "$base" -c "from importlib.metadata import version; print(version('$1'))"; }

torch=$(version_of torch) triton=$(version_of triton)
version=${2:-$("$base" "$here/vllm_for_torch.py" "$torch")}
echo "installing vLLM $version on torch $torch into $venv (minutes)" >&2
[ -x "$venv/bin/python" ] || "$base" -m venv "$venv"
"$base" -c 'import site; [print(f"import site; site.addsitedir({each!r})") for each in site.getsitepackages()]' \
    >"$(echo "$venv"/lib/python*/site-packages)/base.pth"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

pip install --no-deps "vllm==$version"
pip install packaging
"$venv/bin/python" "$here/vllm_requirements.py" vllm >"$venv/requirements.txt"
printf '%s\n' "torch==$torch" "triton==$triton" >"$venv/constraints.txt"
pip install --requirement "$venv/requirements.txt" --constraint "$venv/constraints.txt"
