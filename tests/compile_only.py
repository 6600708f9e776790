"""A pytest plugin: kernels are translated to Triton's IR for a GPU that need not be there, instead of being launched.

The interpreter runs kernels as Python, and does not see what the compiler refuses. What a test computes is wrong then,
and whether it passes does not matter; the last line of the output is JSON, with what was refused."""

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import CompilationError
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
MOST = 3  # variants of a kernel that are translated: others refuse little that these do not

translated: Counter[str] = Counter()
refused: dict[str, str] = {}


def translate(
    self: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: bool
) -> None:
    cache, _, target, backend, _ = self.device_caches[device]
    name = f"{self.fn.__module__}.{self.fn.__name__}"
    translated[name] += 1
    cache[key] = SimpleNamespace(launch_metadata=lambda *args: None, run=lambda *args: None, function=None,
                                 packed_metadata=None)  # fmt: skip
    if translated[name] > MOST:
        return
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = self.ASTSource(self, signature, constexprs, attrs)
    try:
        source.make_ir(
            target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
        )  # fmt: skip
    except CompilationError as error:
        while isinstance(error.__cause__, CompilationError):
            error = error.__cause__
        refused.setdefault(name, str(error)[-800:])


def multiply_shapes(a: Tensor, b: Tensor) -> Tensor:
    """Zeros in place of a plain GEMM: what it is to be compared with was not computed either."""
    return torch.zeros(torch.matmul(a.to("meta"), b.to("meta")).shape, dtype=a.dtype)


def pytest_configure() -> None:
    Tensor.__matmul__ = multiply_shapes  # type: ignore[method-assign, assignment]
    torch.set_flush_denormal(True)  # what no kernel has written is anything
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: TARGET
        )
    )
    JITFunction._do_compile = translate


def pytest_unconfigure() -> None:
    print(json.dumps({"translated": translated, "refused": refused}))
