# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""8-bit K and V, two neighbouring columns at a time.

Tensor cores multiply fp16, and the path from shared memory to them moves 16 bits. So pages are read as 16-bit words of
two values. A tile of words becomes two fp16 tiles, one of the even columns and one of the odd ones, and each is
multiplied on its own. Moving single bytes would take longer than reading memory does."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))

# A register holds two words, a and b, of two values each, as bytes a0 a1 b0 b1. -> (a0, b0) and (a1, b1) in fp16.
FROM_FP8 = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, $2, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
# 0x6400 | n is the fp16 1024 + n; flipping the sign bit of q makes n = q + 128.
FROM_INT8 = tl.constexpr("""{
    .reg .b32 shifted, bias;
    xor.b32 shifted, $2, 0x80808080;
    mov.b32 bias, 0x64806480;
    prmt.b32 $0, shifted, 0x64646464, 0x4240;
    prmt.b32 $1, shifted, 0x64646464, 0x4341;
    sub.rn.f16x2 $0, $0, bias;
    sub.rn.f16x2 $1, $1, bias;
}""")


def as_words(pages: Tensor) -> Tensor:
    """View two neighbouring 8-bit columns as one int16; wider types stay as they are."""
    if pages.dtype.itemsize > 1:
        return pages
    assert pages.shape[-1] % 2 == 0, f"heads of {pages.shape[-1]} 8-bit values: an odd number"
    return pages.view(torch.int16)


@triton.jit
def unpack_words(words, FP8: tl.constexpr):
    """int16 words -> the values of even columns and those of odd columns, in fp16."""
    if INTERPRETED:
        even = (words & 0xFF).to(tl.int8)
        odd = (words >> 8).to(tl.int8)
        if FP8:
            even = even.to(tl.float8e4nv, bitcast=True)
            odd = odd.to(tl.float8e4nv, bitcast=True)
        return even.to(tl.float16), odd.to(tl.float16)
    return tl.inline_asm_elementwise(
        FROM_FP8 if FP8 else FROM_INT8,
        "=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def split_even_odd(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] -> its even columns and its odd ones."""
    return tl.split(tl.reshape(x, [ROWS, COLUMNS // 2, 2]))


@triton.jit
def interleave(even, odd, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The inverse of `split_even_odd`."""
    return tl.reshape(tl.join(even, odd), [ROWS, COLUMNS])
