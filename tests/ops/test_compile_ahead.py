"""Kernels compiled ahead: what a pass launches is compiled and not run. Without a GPU, nothing is loaded either."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, threading, time
from types import SimpleNamespace
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from quire.ops.gpu.compile_ahead import PendingKernel, compile_ahead

launched = []
if not torch.cuda.is_available():
    driver.set_active(SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0,
                                      set_current_device=lambda device: None,
                                      get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    CompiledKernel._init_handles = lambda self: setattr(self, "_run", lambda *args: launched.append(self.name))

@triton.jit
def add(x_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) + 1.0)

@triton.jit
def broken(x_ptr):
    tl.store(x_ptr, undefined)

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.zeros(256, device=device)

def forward(block):
    for layer in range(3):
        add[(1,)](x, BLOCK=block)

first = compile_ahead([lambda: forward(64), lambda: forward(256), lambda: broken[(1,)](x)])
untouched = bool((x == 0).all()) and not launched
again = compile_ahead([lambda: forward(64)])
forward(64)
refused = ""
try:
    broken[(1,)](x)
except Exception as error:
    refused = str(error)
kernels = add.device_caches[0][0].values()
print(json.dumps({
    "first": first, "again": again, "untouched": untouched, "refused": "undefined" in refused,
    "ran": len(launched) if device == "cpu" else float(x[0]),
    "left": sum(isinstance(kernel, PendingKernel) for kernel in kernels), "kept": len(kernels),
}))
"""


def test_kernels_are_compiled_once_and_not_launched(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = f"{ROOT / 'src'}:{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "first": 3, "again": 0, "untouched": True, "refused": True, "ran": 3, "left": 0, "kept": 2,
    }  # fmt: skip
