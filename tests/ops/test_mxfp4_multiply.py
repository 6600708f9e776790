"""What the streamed kernel of MXFP4 experts makes of a chunk's words, by a GPU's instructions carried out on a CPU."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from ops.ptx import execute
from quire.ops.gpu.linear.e2m1 import E2M1, place, rows_in_order
from quire.ops.gpu.moe.mxfp4_multiply import unpack_half

ROWS, WIDTH = 64, 16


@pytest.mark.parametrize("half", [0, 1])
def test_half_a_chunk_becomes_scaled_weights(half: int) -> None:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31, (ROWS, 1, WIDTH), generator=generator).int()
    exponents = torch.randint(121, 255, (ROWS, 4), generator=generator)  # of four groups
    placed = rows_in_order(place(words))[:, 0].long() & 0xFFFFFFFF
    lines = sum(exponents[:, i] << 8 * i for i in range(4))[:, None].expand(ROWS, WIDTH // 2)
    planes = execute(unpack_half(half), [placed[:, 0::2], placed[:, 1::2], lines, lines], 4, torch.bfloat16)
    for number, plane in enumerate(planes, start=4 * half):
        values = torch.tensor(E2M1, dtype=torch.float64)[(words[:, 0] >> 4 * number & 15).long()]
        scales = 2.0 ** (exponents[:, number // 2].double() - 127 - 126)
        assert torch.equal(plane.double().flatten(1), values / 2 * scales[:, None])
