"""Scheduler and runner together: a request's tokens do not depend on what else happens to it or beside it."""

from collections import deque
from functools import cache
from typing import Any

import pytest

from fakes import make_drafts_free
from quire.core.draft_policy import ANY_METHOD, DraftPolicy
from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.sliding_window import SlidingWindow
from runtime.oracle import oracle, tree_oracle
from runtime.tiny_model import (
    BACKENDS,
    BLOCK_SIZE,
    HYBRIDS,
    MAX_LEN,
    MIXED_WINDOWS,
    MODELS,
    NATIVE,
    SLOTTED,
    SPARSE,
    WINDOWS,
    make_runner,
)

pytestmark = pytest.mark.slow

SHARED = [7, 3, 90, 14, 55, 2, 2, 81, 30]
PROMPTS = [[*SHARED, 4], [*SHARED, 5, 6], [60], [33 + i for i in range(20)], SHARED]
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 24},
    {"temperature": 1.0, "max_tokens": 20, "n": 3},
    {"temperature": 0.7, "max_tokens": 30, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 1.0, "max_tokens": 12, "top_k": 20, "top_p": 0.9, "logprobs": 1},
    {"max_tokens": 8, "beam_width": 2, "n": 2},
]


def requests(searches: bool = True) -> list[Request]:
    return [
        Request(id=str(i), prompt_ids=prompt, params=SamplingParams(seed=i, **wishes))
        for i, (prompt, wishes) in enumerate(zip(PROMPTS, WISHES, strict=True))
        if searches or "beam_width" not in wishes
    ]


def texts(answers: dict[tuple[str, int], list[int]]) -> list[list[int]]:
    """What requests were answered, but for searches."""
    prompts = {request.id: request.prompt_ids for request in requests() if not request.params.beam_width}
    return [[*prompts[name], *tokens] for (name, _), tokens in answers.items() if name in prompts]


def serve(
    backend: str,
    model: str = "llama",
    *,
    num_blocks: int = 200,
    host: int = 0,
    budget: int = MAX_LEN,
    rows: int = 16,
    alone: bool = False,
    ahead: int = 0,
    told: dict[tuple[str, int], list[int]] | None = None,
    trees: bool = False,
    num_slots: int = 50,
) -> tuple[dict[tuple[str, int], list[int]], int, int]:
    """-> the tokens of every sample, and how many preemptions and swapped blocks there were."""
    has_states = model in HYBRIDS | SLOTTED
    limits = SchedulerLimits(
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=MAX_LEN,
        block_size=BLOCK_SIZE,
        has_states=has_states,
    )
    page_window = SlidingWindow(MIXED_WINDOWS[0], BLOCK_SIZE, max_chunk=budget, ahead=ahead)
    num_pages = page_window.num_needed(rows, budget) if model == "gemma" and not alone else 0
    runner = make_runner(backend, num_blocks, host, rows, model, num_slots, num_pages)
    runner.proposer = (tree_oracle if trees else oracle)(texts(told), 97, ANY_METHOD) if told else None
    window = max(WINDOWS) if model == "mistral" and not alone else 0
    scheduler = Scheduler(
        limits,
        num_blocks,
        num_host_blocks=host,
        prefix_caching=not alone,
        ahead=ahead,
        window=window,
        drafts=DraftPolicy() if told else None,
        num_slots=num_slots if model in SLOTTED else 0,
        num_pages=num_pages,
        page_window=page_window.size,
    )
    if told:
        make_drafts_free(scheduler.speculation)
    tokens: dict[tuple[str, int], list[int]] = {}
    ended = num_swapped = 0
    launched: deque[int] = deque()
    wanted = requests(searches=not has_states)
    for batch in [[request] for request in wanted] if alone else [wanted]:
        for request in batch:
            scheduler.add(request, now=0.0)
        while scheduler.has_work:
            plan = scheduler.schedule()
            num_swapped += len(plan.swap_in)
            runner.submit(plan)
            launched.append(plan.step)
            while len(launched) > (ahead if plan.runs else 0):
                output = runner.collect()
                assert output.step == launched.popleft()
                for event in scheduler.update(output):
                    tokens.setdefault((event.request_id, event.index), []).extend(event.tokens)
                    assert event.finish_reason in (None, "length")
                    ended += event.finish_reason is not None
    assert ended == len(tokens) == sum(request.params.n for request in wanted)
    if scheduler.speculation:
        assert 10 < scheduler.speculation.num_accepted < scheduler.speculation.num_draft_tokens
    return tokens, scheduler.stats().preemptions, num_swapped


@cache
def answers_alone(backend: str, model: str = "llama") -> dict[tuple[str, int], list[int]]:
    return serve(backend, model, alone=True)[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", [*MODELS, *SPARSE, *HYBRIDS, *SLOTTED])
def test_company_cache_chunks_and_preemption_change_nothing(backend: str, model: str) -> None:
    alone = answers_alone(backend, model)
    assert serve(backend, model) == (alone, 0, 0)
    assert serve(backend, model, budget=16) == (alone, 0, 0)  # prompts in chunks
    num_blocks = 16 if model == "mistral" else 22  # blocks behind a window are freed
    recomputed, num_preemptions, _ = serve(backend, model, num_blocks=num_blocks)
    assert num_preemptions > 0
    assert recomputed == alone
    if model in SLOTTED:  # which are not swapped
        for num_slots in (3, 7, 20):
            assert serve(backend, model, num_slots=num_slots) == (alone, 0, 0)
        return
    swapped, _, num_swapped = serve(backend, model, num_blocks=num_blocks, host=40)
    assert num_swapped > 0
    assert swapped == alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_rejected_drafts_leave_no_trace_in_states(backend: str) -> None:
    alone = answers_alone(backend, "bamba")
    assert serve(backend, "bamba", told=alone) == (alone, 0, 0)
    assert serve(backend, "bamba", told=alone, budget=16, num_slots=30) == (alone, 0, 0)
    recomputed, num_preemptions, _ = serve(backend, "bamba", told=alone, num_blocks=22)
    assert num_preemptions > 0
    assert recomputed == alone


@pytest.mark.parametrize("ahead", [1, 2])
def test_steps_that_are_planned_ahead_change_no_state(ahead: int) -> None:
    alone = answers_alone("torch", "bamba")
    for num_blocks in (200, 22):
        for told in (None, alone):
            tokens, _, _ = serve("torch", "bamba", ahead=ahead, num_blocks=num_blocks, told=told)
            assert tokens == alone


@pytest.mark.parametrize(("model", "ahead"), [("llama", 1), ("llama", 2), ("gemma", 1)])
def test_steps_that_are_planned_ahead_change_nothing(model: str, ahead: int) -> None:
    alone = answers_alone("torch", model)
    assert serve("torch", model, ahead=ahead) == (alone, 0, 0)
    assert serve("torch", model, ahead=ahead, budget=16) == (alone, 0, 0)
    recomputed, num_preemptions, _ = serve("torch", model, ahead=ahead, num_blocks=22)
    assert num_preemptions > 0
    assert recomputed == alone
    swapped, _, num_swapped = serve("torch", model, ahead=ahead, num_blocks=22, host=40)
    assert num_swapped > 0
    assert swapped == alone


@pytest.mark.parametrize(
    ("backend", "model"), [*((backend, model) for backend in BACKENDS for model in MODELS), (NATIVE, "sparse")]
)
def test_drafts_change_nothing(backend: str, model: str) -> None:
    alone = answers_alone(backend, model)
    assert serve(backend, model, told=alone) == (alone, 0, 0)
    assert serve(backend, model, told=alone, budget=16) == (alone, 0, 0)
    num_blocks = 14 if model == "mistral" else 22
    recomputed, num_preemptions, _ = serve(backend, model, told=alone, num_blocks=num_blocks)
    assert num_preemptions > 0
    assert recomputed == alone
    swapped, _, num_swapped = serve(backend, model, told=alone, num_blocks=num_blocks, host=40)
    assert num_swapped > 0
    assert swapped == alone


@pytest.mark.parametrize("ahead", [1, 2])
def test_drafts_between_steps_that_are_planned_ahead_change_nothing(ahead: int) -> None:
    alone = answers_alone("torch")
    for host in (0, 40):
        for num_blocks in (200, 22):
            tokens, _, _ = serve("torch", ahead=ahead, num_blocks=num_blocks, host=host, told=alone)
            assert tokens == alone


@pytest.mark.parametrize("model", MODELS)
def test_trees_of_drafts_change_nothing(model: str) -> None:
    alone = answers_alone(NATIVE, model)
    assert serve(NATIVE, model, told=alone, trees=True) == (alone, 0, 0)
    num_blocks = 14 if model == "mistral" else 22
    for host in (0, 40):
        tokens, num_preemptions, num_swapped = serve(
            NATIVE, model, told=alone, trees=True, num_blocks=num_blocks, host=host, budget=24
        )
        assert tokens == alone
        assert num_preemptions > 0 and (model == "mistral" or (num_swapped > 0) == (host > 0))


def test_trees_between_steps_that_are_planned_ahead_change_nothing() -> None:
    """A sequence may lose its row while its tree is verified: what was not moved is computed again."""
    alone = answers_alone("torch")
    for host in (0, 40):
        tokens, _, _ = serve("torch", ahead=1, num_blocks=22, host=host, told=alone, trees=True)
        assert tokens == alone
