"""Recurrences on a GPU beside those of flash-linear-attention, where it is installed.

They need its wheels only: `pip install --no-deps fla-core flash-linear-attention einops`."""

import pytest
import torch
from torch import Tensor

from ops.recurrences import DEVICE, NUM_SLOTS, Attention, randn
from quire.ops.gpu.states.linear_attention import Decays, attend_tokens
from quire.ops.gpu.states.tiles import attend_tiles

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="flash-linear-attention is for GPUs")
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 64, 128
TOKENS = 300  # four tiles and a part


def theirs(given: Attention, state: Tensor) -> tuple[Tensor, Tensor]:
    """-> outputs [tokens, heads * value_dim], and the state after them"""
    ops = pytest.importorskip("fla.ops")
    q, k = (x.unflatten(1, (KEY_HEADS, KEY_DIM)).repeat_interleave(HEADS // KEY_HEADS, 1) for x in (given.q, given.k))
    v, gates = given.v.unflatten(1, (HEADS, VALUE_DIM)), given.gates
    q, k, v = (x[None].contiguous() for x in (q, k, v))
    options = {"scale": 1.0, "initial_state": state[None].clone(), "output_final_state": True}
    if gates.kind == Decays.HEAD:
        decay = gates.decay.float().log().expand(1, TOKENS, HEADS).contiguous()
        out, after = ops.simple_gla.chunk_simple_gla(q, k, v, decay, **options)
    else:
        assert gates.beta is not None
        if gates.kind == Decays.ROW:
            decay = gates.decay.unflatten(1, (HEADS, KEY_DIM))[None]
            out, after = ops.kda.chunk_kda(q, k, v, decay, gates.beta[None], **options)
        else:
            out, after = ops.gated_delta_rule.chunk_gated_delta_rule(
                q, k, v, gates.decay[None], gates.beta[None], **options
            )
    return out[0].flatten(1), after[0]


@pytest.mark.parametrize("attend", [attend_tokens, attend_tiles])
@pytest.mark.parametrize("kind", ["gated", "kimi", "lightning"])
def test_outputs_and_states_are_those_of_flash_linear_attention(kind: str, attend: object) -> None:
    given = Attention(kind, (KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM), TOKENS)
    given.q, given.k, given.v = (x.to(torch.bfloat16).contiguous() for x in (given.q, given.k, given.v))
    before = randn(NUM_SLOTS, HEADS, KEY_DIM, VALUE_DIM, seed=8)
    expected, expected_state = theirs(given, before[3])
    slots = before.clone()
    found = given.run(attend, [(TOKENS, 3, 1)], slots=slots)
    for ours, other in ((found, expected), (slots[1], expected_state)):
        error = (ours.double() - other.double()).norm() / other.double().norm()
        assert error < 0.01, f"{kind}: {error:.4f}"  # both round to 16 bits inside
