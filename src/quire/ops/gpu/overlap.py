# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Programmatic dependent launch (Hopper and later): a kernel starts while the one before it ends.

Between two kernels of a graph memory idles for about a microsecond, while the last programs of the first end and those
of the second begin. With `overlap`, programs start as soon as there is room. Until `wait_for_inputs` returns, they may
touch only what no kernel writes, which is weights: they load the first of them into registers, or `prefetch` them into
the L2 cache. `wait_for_inputs` returns when everything before this kernel is done and visible, so kernels with and
without overlap can follow each other.

A kernel lets the next one start before it waits itself, so weights of two or three kernels further are in flight while
small kernels follow each other. That is safe because every program of every kernel waits: when a kernel is done, so are
all before it."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def overlap_options(overlap: bool) -> dict[str, bool]:
    """Launch options."""
    return {"launch_pdl": True} if overlap else {}


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_then_launch(OVERLAP: tl.constexpr):
    """As `wait_for_inputs`, but the next kernel starts later: when all that came before this one is done and visible.
    So it may read that, too, before it waits itself."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """One pointer a cache line of 128 bytes."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
