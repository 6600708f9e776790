#!/usr/bin/env bash
# llama.cpp from the package index into an environment of its own: llama-cpp-python and, from the same source and in the
# same build, llama-server and llama-quantize (which the package leaves out), so that all are the same code compiled once.
#
#     PYTHON=python3 benchmarks/peers/install_llama.sh .venv-llama 0.3.36
#
# Compiled for this machine's own cores (GGML_NATIVE), as the package does by itself. What is done already is not done again.
set -euo pipefail
venv=$1 version=$2

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
venv=$(cd "$venv" && pwd)
source=$venv/source/llama_cpp_python-$version
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

pip install cmake ninja numpy
if [ ! -d "$source" ]; then
    pip download --no-deps --no-binary llama-cpp-python --dest "$venv/source" "llama-cpp-python==$version"
    tar --extract --directory "$venv/source" --file "$source.tar.gz"
fi
export PATH=$venv/bin:$PATH
cmake -S "$source/vendor/llama.cpp" -B "$venv/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
    -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF >"$venv/build.log"
cmake --build "$venv/build" --target llama-server llama-quantize >>"$venv/build.log" || { tail -n 40 "$venv/build.log" >&2; exit 1; }
ln -sf "$venv/build/bin/llama-server" "$venv/build/bin/llama-quantize" "$venv/bin/"

CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install "$source[server]"
package=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/llama_cpp
rm -rf "$package/lib"
ln -s "$venv/build/bin" "$package/lib"
"$venv/bin/python" -c 'import llama_cpp; llama_cpp.llama_backend_init()'
