"""Pages of layers with a window: given back behind it, kept where prompts start from, computed again where evicted."""

import pytest

from fakes import FakeExecutor
from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.sliding_window import SlidingWindow

BLOCK, WINDOW, BUDGET = 4, 10, 8
NEEDED = SlidingWindow(WINDOW, BLOCK, max_chunk=BUDGET).num_needed(2, BUDGET)


class Served:
    """A scheduler of which each step is checked, and how many pages were held before each output."""

    def __init__(self, num_pages: int = NEEDED, num_blocks: int = 64, num_host_blocks: int = 0) -> None:
        limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=BUDGET, max_model_len=400, block_size=BLOCK)
        windows = {"num_pages": num_pages, "page_window": WINDOW}
        self.executor = FakeExecutor(
            num_blocks=num_blocks, num_host_blocks=num_host_blocks, block_size=BLOCK, **windows
        )
        self.scheduler = Scheduler(limits, num_blocks, num_host_blocks=num_host_blocks, **windows)
        self.held: list[int] = []
        self.num_cached: dict[str, int] = {}
        self.answers: dict[str, list[int]] = {}  # of the first completion

    def serve(self, *prompts: list[int], max_tokens: int = 1, n: int = 1) -> list[int]:
        """-> for each prompt, how many of its tokens came from the cache"""
        assert self.scheduler.pages is not None
        self.answers = {}
        for name, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True, n=n)
            self.scheduler.add(Request(id=str(name), prompt_ids=prompt, params=params), 0.0)
        while self.scheduler.has_work:
            output = self.executor.run(self.scheduler.schedule())
            self.held.append(self.scheduler.pages.pool.num_held)
            for event in self.scheduler.update(output):
                self.num_cached[event.request_id] = event.num_cached
                if event.index == 0:
                    self.answers.setdefault(event.request_id, []).extend(event.tokens)
            self.scheduler.check()
        return [self.num_cached[str(name)] for name in range(len(prompts))]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * i + seed * i * i) % 61 + 1 for i in range(length)]


def test_a_sequence_holds_its_window_however_long_it_becomes() -> None:
    served = Served(num_blocks=100)
    served.serve(prompt(90), max_tokens=300)
    chunk = SlidingWindow(WINDOW, BLOCK, max_chunk=BUDGET).max_blocks(390)
    assert max(served.held) == chunk == 5 and max(served.held[20:]) == 4
    assert served.scheduler.stats().preemptions == 0


def test_the_same_prompt_starts_behind_its_last_full_block() -> None:
    served = Served()
    assert served.serve(prompt(50), max_tokens=9) == [0]
    assert served.serve(prompt(50), max_tokens=9) == [48]


def test_a_conversation_goes_on_behind_the_last_answer() -> None:
    served, ids, num_before = Served(), prompt(30), 0
    for _ in range(4):
        assert served.serve(ids, max_tokens=21) == [num_before // BLOCK * BLOCK]
        num_before = len(ids) + 20  # the last token of an answer is not computed
        ids += [*served.answers["0"], 5, 6, 7]


def test_a_prefix_whose_pages_are_gone_is_computed_again_in_the_same_blocks() -> None:
    served = Served(num_pages=NEEDED)
    shared = prompt(40)
    served.serve(shared + prompt(20, 1))
    for seed in (5, 6, 7):
        served.serve(prompt(40, seed))  # the window before token 40 was passed, and is evicted
    assert served.serve(shared + prompt(20, 2)) == [0]
    assert served.scheduler.kv_blocks.pool.num_cached == 15 + 5 + 3 * 10  # the shared ten blocks are there once
    assert served.serve(shared + prompt(20, 3)) == [40]  # the second prompt has shown where prompts branch


def test_a_long_prompt_does_not_evict_the_windows_of_others() -> None:
    served = Served(num_pages=NEEDED + 8, num_blocks=200)
    served.serve(prompt(50))
    served.serve(prompt(380, 1))
    assert served.serve(prompt(50)) == [48]


def test_sequences_that_compute_the_same_tokens_again_share_pages() -> None:
    served = Served(num_blocks=100)
    shared = prompt(40)
    served.serve(shared + prompt(20, 1))
    for seed in (5, 6, 7):
        served.serve(prompt(40, seed))
    before = served.executor.num_computed
    assert served.serve(shared + prompt(9, 2), shared + prompt(9, 3), max_tokens=5)[0] == 0
    assert served.executor.num_computed - before < 2 * 49  # the second goes on behind the first


def test_completions_copy_the_page_of_a_partial_block() -> None:
    for num_prompt in (29, 32, 33):
        served = Served()
        served.serve(prompt(num_prompt), max_tokens=20, n=3)
        assert len(served.answers) == 1


@pytest.mark.parametrize("num_host_blocks", [0, 12, 40])
def test_preempted_sequences_get_their_windows_back(num_host_blocks: int) -> None:
    served = Served(num_blocks=24, num_host_blocks=num_host_blocks)
    served.serve(prompt(30), prompt(30, 1), prompt(30), prompt(30, 1), max_tokens=40)
    assert served.scheduler.stats().preemptions > 0


def test_pages_of_a_tenant_are_forgotten_with_its_blocks() -> None:
    served = Served()
    served.serve(prompt(50))
    assert served.scheduler.pages is not None and served.scheduler.pages.pool.num_cached > 0
    served.scheduler.reset_prefix_cache("")
    served.scheduler.check()
    assert served.scheduler.pages.pool.num_cached == 0
    assert served.serve(prompt(50)) == [0]


def test_fewer_pages_than_running_sequences_need_are_a_bug() -> None:
    with pytest.raises(AssertionError, match=f"running sequences need {NEEDED}"):
        Served(num_pages=NEEDED - 1)
