"""The choice of experts in Triton against plain torch: interpreted where there is no GPU, else compiled."""

import numpy as np
import pytest
import torch

from quire.ops.gpu.moe.routing import route
from quire.ops.opset import Routing
from quire.ops.reference.routing import choose_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "one of 3": (3, Routing(1)),
    "2 of 8": (8, Routing(2, renormalize=True)),
    "8 of 60": (60, Routing(8, scale=2.5)),
    "sigmoid": (20, Routing(4, scoring="sigmoid", renormalize=True)),
    "groups": (20, Routing(3, num_groups=5, top_groups=2)),
    "best two": (24, Routing(6, scoring="sigmoid", num_groups=3, top_groups=2, group_score="best two")),
    "all": (5, Routing(5)),
    "near": (16, Routing(2, sparsemixer_threshold=0.7)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("corrected", [False, True])
def test_the_choice_is_that_of_plain_torch(name: str, dtype: torch.dtype, corrected: bool) -> None:
    num_experts, routing = CASES[name]
    noise = torch.Generator().manual_seed(5)
    logits = torch.randn(7, num_experts, generator=noise).to(dtype).to(DEVICE)
    logits[1] = 0.0  # a tie of all
    logits[2, ::2] = logits[2, 1]  # and of half
    correction = torch.randn(num_experts, generator=noise).to(DEVICE) * 0.1 if corrected else None
    ids, weights = route(logits, routing, correction)
    expected_ids, expected_weights = choose_experts(logits, routing, correction)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


def test_broken_logits_choose_experts_that_are_there() -> None:
    logits = torch.full((2, 6), torch.nan, device=DEVICE)
    logits[1, 4] = 1.0
    with np.errstate(invalid="ignore"):  # the interpreter's
        ids, weights = route(logits, Routing(3, num_groups=2, top_groups=1))
    assert all(len(set(row)) == 3 and all(0 <= expert < 6 for expert in row) for row in ids.tolist())
    assert weights.isnan().all()
