"""Words of MXFP4's values: every value in every plane, by torch and by a GPU's instructions."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ops.gluon_on_cpu import Values, on_cpu
from ops.ptx import execute, run
from quire.ops.gpu.linear import wide_planes
from quire.ops.gpu.linear.e2m1 import (
    E2M1,
    nibbles_of,
    place,
    plane_pairs,
    rows_in_order,
    stack_words,
    take_rows,
    unpack_e2m1,
)
from quire.ops.gpu.linear.exponents import EXPONENT, LEAST_EXPONENT
from quire.ops.gpu.linear.grouped_layout import pack_codebook4, pack_int4
from quire.ops.gpu.linear.wide_unpack import operands, unpack_pieces
from quire.ops.gpu.moe.few_formats import few_format

BF16 = torch.bfloat16


def random_words(count: int = 4096) -> Tensor:
    """Words of eight nibbles [1, 1, count]"""
    values = torch.randint(-(2**31), 2**31, (1, 1, count), generator=torch.Generator().manual_seed(1))
    return values.int()


def values_of(words: Tensor) -> Tensor:
    """[8, count]"""
    nibbles = torch.stack([words[0, 0] >> 4 * plane & 15 for plane in range(8)])
    return torch.tensor(E2M1)[nibbles.long()]


def placed(words: Tensor) -> Tensor:
    """[count]"""
    return rows_in_order(place(words))[0, 0]


def pairs_of(words: Tensor) -> list[Tensor]:
    """The first and the second words of pairs, as the instructions' operands."""
    return [placed(words)[i::2].long() & 0xFFFFFFFF for i in (0, 1)]


def test_words_become_nibbles_again() -> None:
    words = random_words(11 * 3 * 16).view(11, 3, 16)
    stored = place(words)
    assert stored.shape == (16, 3, 16) and stored.dtype == torch.int32
    assert torch.equal(nibbles_of(stored)[:11], words) and not nibbles_of(stored)[11:].any()
    assert torch.equal(stored.view(2, 3, 8, 16)[1, 2, 1], rows_in_order(stored)[9, 2])
    order = torch.tensor([9, 0, 10, 3])
    assert torch.equal(take_rows(stored, order), place(words[order]))
    assert torch.equal(stack_words([stored, place(words[:8])], [11, 8]), place(torch.cat([words, words[:8]])))
    assert torch.equal(stack_words([place(words[:8])] * 2, [8, 8]), place(torch.cat([words[:8], words[:8]])))


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_the_instructions_make_every_value_of_every_plane(dtype: torch.dtype) -> None:
    words = random_words()
    truth, operands = values_of(words).to(dtype), pairs_of(words)
    pairs = torch.stack(execute(unpack_e2m1(dtype, in_pairs=True), operands, 8, dtype))
    assert torch.equal(pairs.flatten(1), truth)
    singles = torch.stack(run(unpack_e2m1(dtype, in_pairs=False), operands, 16)).to(torch.uint16).view(dtype)
    assert torch.equal(torch.stack([singles[:8], singles[8:]], dim=-1).flatten(1), truth)


def test_planes_are_made_by_eight_instructions() -> None:
    assert len(plane_pairs("w", ["a", "b", "c", "d"])) == 8


def test_wide_tiles_make_the_same_planes() -> None:
    words, code = random_words(64), on_cpu(wide_planes)
    halves = code.halves_of(Values(placed(words)[None]), True)
    one = Values(torch.full((1, 64), 2.0**126, dtype=BF16))
    for piece, asm in enumerate(unpack_pieces(4, 0, 0, "exponents")):
        planes = code.gl.inline_asm_elementwise(
            asm, operands(0, "exponents"), [halves[piece // 2], one, one], (BF16, BF16), pack=2
        )
        both = torch.cat([plane.data for plane in planes])
        assert torch.equal(both * 2, values_of(words)[2 * piece : 2 * piece + 2].to(BF16))


@pytest.mark.parametrize("width", [16, 32])
def test_few_routes_multiply_the_same_planes_by_powers_of_two(width: int) -> None:
    words, groups = random_words(), width // 4
    exponents = torch.tensor([EXPONENT - 5, 0, EXPONENT + 3, LEAST_EXPONENT, EXPONENT, EXPONENT - 9, 254, 1 + EXPONENT])
    weight = replace(pack_codebook4(torch.zeros(1, 512, dtype=torch.uint8), torch.ones(1, 16), E2M1), words=words)
    form = few_format(replace(weight, words=words.view(1, -1, width)))
    assert form is not None
    four = placed(words).view(-1, 4).long() & 0xFFFFFFFF
    packed = [sum(int(byte) << 8 * i for i, byte in enumerate(exponents[n : n + 4])) for n in range(0, groups, 4)]
    operands = [*four.T, *(torch.tensor(word) for word in packed for _ in range(4))]
    planes = torch.stack(execute(form.unpack[0], operands, 16, BF16)).view(8, 2, -1, 2).transpose(1, 2).flatten(1)
    powers = torch.ldexp(torch.ones(8).double(), exponents - EXPONENT - 64).where(exponents > 0, 0.0)
    by_plane = powers[:groups].repeat_interleave(8 // groups)[:, None]
    assert torch.equal(planes.double(), values_of(words).double() * by_plane)


def test_only_values_of_mxfp4_lie_in_pairs() -> None:
    q, scales = torch.arange(512, dtype=torch.uint8).view(2, 256) % 16, torch.ones(2, 8)
    as_nibbles = pack_int4(q, scales.half()).words
    assert torch.equal(pack_codebook4(q, scales, E2M1).words, place(as_nibbles))
    assert torch.equal(pack_codebook4(q, scales, [*E2M1[:15], 1.0]).words, as_nibbles)
