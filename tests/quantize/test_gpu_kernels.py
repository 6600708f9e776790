"""The kernel that rounds a block of inputs, against plain torch: interpreted where there is no GPU, else compiled."""

import pytest
import torch

from quire.quantize.gpu.round_block import round_block, round_block_compiled, round_block_plain

NAME = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("size", [32, 128])
def test_the_kernel_rounds_a_block_as_plain_torch_does(size: int) -> None:
    w = torch.randn(37, size + 8, generator=torch.Generator().manual_seed(0)).to(NAME)[:, 4 : size + 4]
    scale, zero = w.abs().amax(1) / 8, torch.full((37,), 8.0, device=NAME)
    factor = torch.randn(size, size, generator=torch.Generator().manual_seed(1)).to(NAME).triu() * 0.05
    factor += torch.eye(size, device=NAME)
    q = [torch.zeros(37, size, dtype=torch.uint8, device=NAME) for _ in range(2)]
    plain = round_block_plain(w, scale, zero, factor, q[0], 15)
    compiled = round_block_compiled(w, scale, zero, factor, q[1], 15)
    same = q[0] == q[1]
    assert same.float().mean() > 0.99  # a tie may fall to the other side, and what follows makes up for it
    rows = same.all(1)
    torch.testing.assert_close(compiled[rows], plain[rows], rtol=1e-3, atol=1e-4)
    assert len(round_block(w, scale, zero, factor, q[0], 15)) == 37
