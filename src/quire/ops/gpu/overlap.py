# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""A kernel that starts while the one before it ends: programmatic dependent launch, on Hopper and later.

Between two kernels of a graph the memory stands still for about a microsecond, while the first one's last programs end
and the second one's begin. With `overlap`, programs start as soon as there is room. Until `wait_for_inputs` returns,
they may touch only what no kernel writes, which is weights: they load the first of them into registers, or `prefetch`
brings them into the second-level cache. It returns when everything before this kernel is done and visible, so that
kernels with and without overlap can follow each other.

A kernel lets the next one start before it waits itself, so weights two or three kernels ahead are on their way while
small kernels follow each other. That is safe because every program of every kernel waits: when a kernel is done, so are
all before it."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def overlap_options(overlap: bool) -> dict[str, bool]:
    """How the kernel is to be launched."""
    return {"launch_pdl": True} if overlap else {}


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(places):
    """places: pointers, one a line of 128 bytes"""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )
