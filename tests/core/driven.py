"""A scheduler that a test drives step by step. Blocks have 4 slots, and token 0 is EOS, unless a test sets others."""

from typing import Any

from fake_peers import FakeDecodeEngines, FakePrefillEngines
from fake_tiers import FakeStore
from fakes import FakeExecutor, draft_policy
from quire.core.draft_policy import DraftPolicy
from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.plan import StepPlan
from quire.core.request import Request, SequenceEvent
from quire.core.scheduler import Scheduler

LONG = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]  # two full blocks and a half


class Engine:
    """A scheduler with a fake executor, and all plans and events so far."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        num_host_blocks: int = 0,
        num_slots: int = 0,
        num_host_slots: int = 0,
        num_checkpoint_slots: int = 0,
        small_host_slots: bool = False,
        num_pages: int = 0,
        page_window: int = 0,
        vocab_size: int = 64,
        num_drafts: int = 0,
        accuracy: float = 1.0,
        trees: bool = False,
        unknown_trees: bool = False,
        store: FakeStore | None = None,
        offload: bool = False,
        prefill_engines: FakePrefillEngines | None = None,
        decode_engines: FakeDecodeEngines | None = None,
        policy_of_drafts: DraftPolicy | None = None,
        **options: Any,
    ) -> None:
        names = ("policy", "prefix_caching", "write_through")
        limits: dict[str, Any] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 128,
            "block_size": 4,
            "has_states": num_slots > 0,
        }
        limits |= {name: value for name, value in options.items() if name not in names}
        self.scheduler = Scheduler(
            SchedulerLimits(**limits),
            num_blocks,
            num_host_blocks=num_host_blocks,
            num_slots=num_slots,
            num_host_slots=num_host_slots,
            num_checkpoint_slots=num_checkpoint_slots,
            small_host_slots=small_host_slots,
            num_pages=num_pages,
            page_window=page_window,
            drafts=policy_of_drafts or draft_policy(num_drafts),
            store=store,
            offload=offload,
            prefill_engines=prefill_engines,
            block_sender=decode_engines,
            **{name: options[name] for name in names if name in options},
        )
        self.executor = FakeExecutor(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            num_slots=num_slots,
            num_host_slots=num_host_slots,
            num_checkpoint_slots=num_checkpoint_slots,
            num_pages=num_pages,
            page_window=page_window,
            block_size=limits["block_size"],
            vocab_size=vocab_size,
            num_drafts=num_drafts,
            accuracy=accuracy,
            trees=trees,
            unknown_trees=unknown_trees,
            store=store,
            peers=prefill_engines or decode_engines,
        )
        self.prefill_engines, self.decode_engines = prefill_engines, decode_engines
        self.plans: list[StepPlan] = []
        self.events: list[SequenceEvent] = []

    def add(
        self,
        name: str,
        prompt: list[int],
        *,
        tenant: str = "",
        salt: str = "",
        priority: int = 0,
        resumed: list[int] | None = None,
        **params: Any,
    ) -> None:
        params = {"seed": 1, "max_tokens": 8, "ignore_eos": True} | params
        self.scheduler.add(
            Request(
                id=name,
                prompt_ids=prompt,
                params=SamplingParams(**params),
                eos_ids=[0],
                tenant=tenant,
                salt=salt,
                priority=priority,
                resumed=[resumed] if resumed else [],
            ),
            0.0,
        )

    def fetch_first(self) -> StepPlan | None:
        """Begin the fetches of the next step, and wait until they are read."""
        assert self.executor.store
        plan = self.scheduler.plan_fetches()
        if plan is not None:
            self.plans.append(plan)
            self.events += self.scheduler.update(self.executor.run(plan))
            self.scheduler.check()
            while self.scheduler.tiers and self.scheduler.tiers.has_waiting:
                self.executor.store.advance(self.scheduler, self.executor.host)
        return plan

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        self.events += self.scheduler.update(self.executor.run(plan))
        self.scheduler.check()
        if self.executor.store:
            self.executor.store.advance(self.scheduler, self.executor.host)
        if self.prefill_engines:
            self.prefill_engines.advance(self.scheduler, self.executor.host)
        if self.decode_engines:
            self.decode_engines.advance(self.scheduler)
        return plan

    def finish(self) -> "Engine":
        others = [each for each in (self.executor.store, self.prefill_engines, self.decode_engines) if each]
        while self.scheduler.has_work or not all(each.is_idle for each in others):
            self.step()
        assert self.scheduler.stats().held_blocks == 0
        return self

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [token for e in self.events if (e.request_id, e.index) == (name, index) for token in e.tokens]

    def reasons(self, name: str) -> dict[int, str]:
        return {e.index: e.finish_reason for e in self.events if e.request_id == name and e.finish_reason}
