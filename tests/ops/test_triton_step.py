"""The kernel for steps of one token a sequence beside the two that it stands for: `kv_write`, then `decode`."""

from functools import partial

import pytest
import torch

from ops.test_triton_attention import BOUNDS, DEVICE, MIN_LENGTH, WORKERS, Case, some_angles
from quire.ops.gpu.attention.decode import decode
from quire.ops.gpu.attention.decode_step import can_write_quantized, decode_step
from quire.ops.gpu.attention.kv_write import kv_write
from quire.ops.gpu.attention.pages import Pages, Runs, Scoring
from quire.ops.gpu.attention.plan import plan_decode
from quire.ops.gpu.linear.quantize_rows import Target, quantize_rows

HALF = torch.float16
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)
LENGTHS = [(1, 1), (64, 1), (65, 1), (150, 1), (0, 1), (128, 1)]  # the new token alone, last in a unit, first in one


def copied(pages: Pages) -> Pages:
    k, v, *super_scales = (None if x is None else x.clone() for x in (pages.k, pages.v, pages.k_scales, pages.v_scales))
    return Pages(k, v, *super_scales, k_fp8_scale=pages.k_fp8_scale, v_fp8_scale=pages.v_fp8_scale)


def slots_of(case: Case) -> torch.Tensor:
    """Where each sequence's last position lies; -1 for padding."""
    size, tables = case.block_size, case.runs.block_tables.tolist()
    places = [
        tables[seq][(context - 1) // size] * size + (context - 1) % size if context else -1
        for seq, (context, _) in enumerate(case.lengths)
    ]
    return torch.tensor(places, device=DEVICE).int()


CASES = [
    Case(LENGTHS),
    Case(LENGTHS, dtype=HALF, kept=HALF, heads=3, kv_heads=1, head_dim=80, scoring=Scoring(0.1, window=40)),
    Case(LENGTHS, dtype=HALF, kept=HALF, heads=3, kv_heads=1, scoring=Scoring(0.1, window=-33)),
    Case(LENGTHS, dtype=HALF, kept=HALF, scoring=Scoring(0.2, soft_cap=5.0, slopes=SLOPES)),
    Case(LENGTHS, kept=torch.int8, scoring=Scoring(0.2, sinks=8 * SLOPES - 1)),
    Case(LENGTHS, dtype=HALF, kept=torch.float8_e4m3fn, k_fp8_scale=0.5, v_fp8_scale=0.25),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_a_step_is_writing_and_then_attending(case, normed):
    noise = torch.Generator().manual_seed(5)
    sizes = [n * case.head_dim for n in (case.heads, case.kv_heads, case.kv_heads)]
    qkv = torch.randn(len(LENGTHS), sum(sizes), generator=noise).to(case.dtype).to(DEVICE)
    norms = {}
    if normed:
        q_norm, k_norm = (torch.randn(case.head_dim, generator=noise).to(DEVICE) for _ in range(2))
        norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-3}
    angles = None if normed else some_angles(len(LENGTHS), case.head_dim)
    heads = *qkv.split(sizes, dim=1), angles, slots_of(case)
    plan = plan_decode(case.runs, WORKERS, window=case.scoring.window, min_length=MIN_LENGTH)

    apart, together = copied(case.pages), copied(case.pages)
    expected = decode(kv_write(*heads, apart, **norms), apart, case.runs, plan, case.scoring)
    actual = decode_step(*heads, together, case.runs, plan, case.scoring, **norms)
    error = (actual - expected).float().square().mean().sqrt() / expected.float().square().mean().sqrt()
    assert error < BOUNDS[case.dtype]
    assert not actual[LENGTHS.index((0, 1))].any()
    for ours, theirs in ((together.k, apart.k), (together.v, apart.v)):  # rounded once or twice on the way
        least = 1.0 if ours.dtype == torch.int8 else 1e-3
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.13, atol=least, equal_nan=True)


def test_a_row_does_not_depend_on_the_batch():
    case = Case([(150, 1), (3, 1), (65, 1)])
    sizes = [n * case.head_dim for n in (case.heads, case.kv_heads, case.kv_heads)]
    rows = torch.randn(3, sum(sizes), generator=torch.Generator().manual_seed(6)).to(DEVICE).split(sizes, dim=1)
    slots = slots_of(case)
    plan = plan_decode(case.runs, WORKERS, split_contexts=False)
    whole = decode_step(*rows, None, slots, copied(case.pages), case.runs, plan, case.scoring)
    for seq in range(3):
        own = case.runs.context_lens[seq : seq + 1], case.runs.block_tables[seq : seq + 1]
        alone = Runs(torch.tensor([0, 1], device=DEVICE).int(), *own)
        plan = plan_decode(alone, WORKERS, split_contexts=False)
        row = [x[seq : seq + 1] for x in rows]
        actual = decode_step(*row, None, slots[seq : seq + 1], copied(case.pages), alone, plan, case.scoring)
        assert torch.equal(actual, whole[seq : seq + 1])


@pytest.mark.parametrize("context", [40, 150])  # whole, and in parts
def test_codes_of_heads_are_those_of_the_row(context):
    case = Case([(context, 1)], heads=4, kv_heads=2, head_dim=64)
    sizes = [n * case.head_dim for n in (case.heads, case.kv_heads, case.kv_heads)]
    rows = torch.randn(1, sum(sizes), generator=torch.Generator().manual_seed(7)).to(DEVICE).split(sizes, dim=1)
    plan = plan_decode(case.runs, WORKERS, min_length=MIN_LENGTH)
    step = partial(decode_step, *rows, None, slots_of(case), case.pages, case.runs, plan, case.scoring)
    assert can_write_quantized(1, 4, 64, torch.int16, 64)
    target = Target.quantized(rows[0], 256, torch.int16, 64)
    expected = quantize_rows(step().flatten(1), torch.int16, 64)
    step(target=target)
    torch.testing.assert_close(target.result.scales, expected.scales)
    torch.testing.assert_close(target.result.q, expected.q, rtol=0, atol=1)
