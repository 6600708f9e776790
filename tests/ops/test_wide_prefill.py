"""Prefill attention of warps with different tasks, on Hopper: beside plain torch, and whom it is for."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

from ops.test_triton_attention import BOUNDS, DEVICE, Case
from quire.ops.gpu.attention.pages import Runs, Scoring
from quire.ops.gpu.attention.plan import plan_prefill
from quire.ops.gpu.attention.prefill_wide_config import ROWS, can_copy, can_prefill_wide
from quire.ops.gpu.compile_ahead import compile_ahead
from quire.ops.gpu.linear.wide_config import has_wide_kernel

pytestmark = pytest.mark.slow
HOPPER = torch.cuda.is_available() and has_wide_kernel(torch.device("cuda", 0))
TRANSLATED = not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "0"  # compile_only.py
needs_hopper = pytest.mark.skipif(not HOPPER and not TRANSLATED, reason="a Hopper GPU's instructions")
BF16, HALF = torch.bfloat16, torch.float16
LENGTHS = [(300, 300), (1000, 17), (128, 128), (5, 2), (0, 0), (129, 3), (257, 200)]  # context and queries
CASES = {
    "8 queries a key": Case(LENGTHS, 32, 4, 128, 16, BF16, BF16),
    "pages of 32": Case(LENGTHS, 8, 2, 128, 32, BF16, BF16),
    "7 queries a key": Case(LENGTHS, 14, 2, 128, 128, HALF, HALF),
    "one query a key": Case(LENGTHS, 2, 2, 128, 64, BF16, BF16),
}


def prefill(case: Case) -> torch.Tensor:
    from quire.ops.gpu.attention.prefill_wide import wide_prefill

    plan = plan_prefill(case.runs, len(case.q), ROWS // (case.heads // case.kv_heads))
    return wide_prefill(case.q, case.pages, case.runs, plan, case.scoring, torch.full_like(case.q, torch.nan))


@needs_hopper
def test_prompts_in_pages_with_rubbish_past_their_ends() -> None:
    """Tiles that end at, before and behind a prompt's end, and rubbish that is not finite."""
    sinks = torch.randn(32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    cases = {**CASES, "sinks": replace(CASES["8 queries a key"], scoring=Scoring(0.1, sinks=sinks))}
    if HOPPER:  # several at a time
        compile_ahead(partial(prefill, case) for case in cases.values())
    for name, case in cases.items():
        out = prefill(case)
        assert out.isfinite().all(), name
        assert case.error(out) < BOUNDS[case.dtype], name


@needs_hopper
def test_chunks_give_the_bits_of_the_whole() -> None:
    case = Case([(3, 3), (400, 400)], 16, 2, 128, 16, BF16, BF16)
    whole = prefill(case)[3:]
    tables, q, done = case.runs.block_tables[1:], case.q[3:], 0
    for chunk in (19, 131, 250):
        case.q = q[done : done + chunk]
        done += chunk
        starts = torch.tensor([0, chunk], device=DEVICE).int()
        case.runs = Runs(starts, torch.tensor([done], device=DEVICE).int(), tables)
        assert torch.equal(prefill(case), whole[done - chunk : done])


def test_scores_that_are_not_plain_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.ops.gpu.attention.prefill_wide_config.has_wide_kernel", lambda device: True)
    case = Case([(256, 256)], 4, 2, 128, 16, BF16, BF16)
    assert can_prefill_wide(case.q, case.pages, Scoring(0.1))
    assert not can_prefill_wide(case.q.float(), case.pages, Scoring(0.1))
    assert not can_prefill_wide(case.q[1:], case.pages, Scoring(0.1))  # too few
    for scoring in (Scoring(0.1, window=8), Scoring(0.1, soft_cap=2.0), Scoring(0.1, slopes=torch.ones(4))):
        assert not can_prefill_wide(case.q, case.pages, scoring)
    for other in (Case([(256, 256)], 4, 2, 64, 16, BF16, BF16), Case([(256, 256)], 4, 2, 128, 8, BF16, BF16)):
        assert not can_prefill_wide(other.q, other.pages, Scoring(0.1))
    assert can_copy(case.pages.k) and not can_copy(case.pages.k[:, :, :1])
