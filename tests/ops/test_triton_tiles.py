"""Recurrences in tiles of tokens against plain torch: interpreted where there is no GPU, else compiled."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ops.recurrences import DEVICE, KINDS, Attention, Segments, assert_close, on_device
from quire.ops.gpu.states.linear_attention import attend_tokens
from quire.ops.gpu.states.tiles import attend_tiles, takes_tiles

ON_GPU = DEVICE == "cuda"
TOGETHER: Segments = [
    (1, 3, 3),  # a sequence that decodes
    (70, -1, 0),  # a prompt that leaves a checkpoint,
    (138, 0, 1),
    (186, 0, 2),  # and one that continues it in the same step
    (187, 4, 4),  # drafts: a state after each token, the first where it came from
    (188, 4, 5),
    (220, 7, 6),  # half a tile
]
SHAPES: dict[str, Any] = {kind: (kind, (1, 2, 16, 20), torch.float16) for kind in KINDS}  # as in `Attention`
if ON_GPU:
    SHAPES |= {
        **{f"{kind}-bf16": (kind, (2, 4, 128, 128), torch.bfloat16) for kind in KINDS},
        "gated-96": ("gated", (4, 4, 64, 96), torch.bfloat16),
        "gated-48": ("gated", (1, 2, 48, 64), torch.bfloat16),
        "mamba2-64": ("mamba2", (1, 3, 128, 64), torch.bfloat16),
    }


def in_16_bits(kind: str, shape: Any, num_tokens: int, dtype: torch.dtype = torch.float16) -> Attention:
    attention = Attention(kind, shape, num_tokens)
    for name in ("q", "k", "v"):
        setattr(attention, name, getattr(attention, name).to(dtype))
    return attention


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu().double() - expected).norm() / expected.norm())


def check_tiles(attention: Attention, segments: Segments, bound: float) -> None:
    """A sum of 16-bit products, each rounded, is as near as a few roundings are."""
    assert takes_tiles(attention.q, attention.k, attention.v, attention.slots.shape[2], on_device(segments))
    slots = attention.slots.cpu().double()
    expected = attention.expected(slots, segments)
    assert error(attention.run(attend_tiles, segments), expected) <= bound
    targets = sorted({target for _, _, target in segments})
    for target in targets:
        assert error(attention.slots[target], slots[target]) <= bound
    others = [slot for slot in range(len(slots)) if slot not in targets]
    assert torch.equal(attention.slots[others].cpu().double(), slots[others])


@pytest.mark.parametrize("case", SHAPES)
def test_tiles_give_the_sums_of_single_tokens(case: str) -> None:
    kind, shape, dtype = SHAPES[case]
    check_tiles(in_16_bits(kind, shape, 220, dtype), TOGETHER, 1e-2 if dtype == torch.bfloat16 else 2e-3)


def test_tiles_take_key_heads_in_turn() -> None:
    attention = in_16_bits("gated", (2, 4, 16, 20), 70)
    segments, slots = on_device([(70, 3, 1)]), attention.slots.clone()
    given = attention.q, attention.k, attention.v, attention.gates
    expected = attend_tokens(*given, attention.slots, segments, tiled=True)
    assert error(attend_tiles(*given, slots, segments, tiled=True), expected.cpu().double()) <= 2e-3


def test_tiles_are_exact_where_a_key_repeats() -> None:
    """Products of powers of the matrix would be lost in their differences."""
    attention = in_16_bits("gated", (1, 1, 16, 16), 64)
    attention.k[:], attention.beta[:], attention.raw[:] = attention.k[0], 1.0, -20.0
    check_tiles(attention, [(64, 3, 1)], 5e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_decays_that_forget_everything_are_taken(kind: str) -> None:
    """Of 64 of them, neither the product nor its inverse is a number that fp32 has."""
    attention = in_16_bits(kind, (1, 1, 16, 16), 100)
    attention.raw[3::5] = 60.0
    attention.rates[:] = 60.0
    check_tiles(attention, [(100, 3, 1)], 2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_in_its_sequence(kind: str) -> None:
    attention, poisoned = (in_16_bits(kind, (1, 1, 16, 16), 150) for _ in range(2))
    segments: Segments = [(40, -1, 0), (150, 3, 1)]
    expected = attention.run(attend_tiles, segments)
    for value in (poisoned.k, poisoned.v, poisoned.raw, poisoned.beta):
        value[5] = float("nan")
    found = poisoned.run(attend_tiles, segments)
    assert found[5:40].isnan().all()
    assert torch.equal(found[40:], expected[40:]) and torch.equal(attention.slots[1], poisoned.slots[1])


def test_company_changes_nothing() -> None:
    """Tiles begin where segments do."""
    attention = in_16_bits("gated", (1, 1, 16, 16), 150)
    (alone, slots) = attention.run(attend_tiles, [(70, 3, 1)]), attention.slots.clone()
    together = attention.run(attend_tiles, [(70, 3, 2), (150, -1, 1)])
    assert torch.equal(together[:70], alone) and torch.equal(attention.slots[2], slots[1])


def test_fp32_short_chains_and_keys_that_are_not_copied_take_no_tiles() -> None:
    attention, segments = in_16_bits("gated", (1, 1, 16, 16), 70), on_device([(70, 3, 1)])
    q, k, v = attention.q, attention.k, attention.v
    assert takes_tiles(q, k, v, 16, segments) and not takes_tiles(q.float(), k.float(), v.float(), 16, segments)
    assert not takes_tiles(q, k, v, 16, on_device([(31, 3, 1), (62, 2, 2)]))
    assert not takes_tiles(q, k, v, 12, segments) and not takes_tiles(q, k, v, 256, segments)
    assert not takes_tiles(q[:, 4:], k, v, 16, segments), "begins between two copies"
    assert_close(
        attention.run(attend_tiles, [(70, 3, 1)]).float(), attention.run(attend_tokens, [(70, 3, 1)]).float(), 1
    )
