"""Engines of one configuration behind a router, made anew for each simulation."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from quire.core.draft_policy import ANY_METHOD, CPU_TOKEN_COST, GPU_TOKEN_COST, DraftMethod, DraftPolicy
from quire.core.errors import BadRequest, DoesNotFit
from quire.core.limits import SchedulerLimits
from quire.core.nearest import nearest
from quire.core.scheduler import Scheduler
from quire.planning.drafting import Draft
from quire.planning.hardware import Hardware
from quire.planning.memory import Load, plan_memory
from quire.planning.planned_model import PlannedModel
from quire.planning.replica import Replica
from quire.planning.routers import ROUTERS
from quire.planning.simulated_drafts import DraftingSteps, SimulatedDrafts
from quire.planning.simulator import Simulation, simulate
from quire.planning.step_times import ServingCosts, StepTimes
from quire.planning.workload import Arrival
from quire.runtime.kv import size_cache
from quire.runtime.spec import METHODS

MAX_CPU_CACHE = 4 << 30  # bytes, as an engine takes by default


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """Options of an engine that matter for its plans, by the names and with the defaults of `quire serve`."""

    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    long_prefill_token_threshold: int = 0
    target_itl_ms: int = 30
    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    swap_space: float = 0.0
    gpu_memory_utilization: float = 0.9
    scheduling_policy: str = "fcfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """All that an engine's scheduler is made with."""

    num_blocks: int
    num_host_blocks: int = 0
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    long_prefill_token_threshold: int = 0
    target_itl_ms: int = 30
    block_size: int = 16
    prefix_caching: bool = True
    policy: str = "fcfs"
    ahead: int = 0  # 1: the next step is planned while this one runs, as on a GPU
    window: int = 0
    has_states: bool = False
    num_slots: int = 0  # state slots
    num_pages: int = 0  # window pages
    page_window: int = 0
    num_speculative_tokens: int = 0  # drafts offered for a step
    acceptance: float = 0.0  # how likely a draft is accepted, if those before it were
    draft_method: str = ANY_METHOD  # or one of `runtime/spec` with weights, whose steps take time
    draft_cost: float = 0.0  # bytes of these weights, as a share of the model's

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 0:
            raise BadRequest(
                f"num_speculative_tokens is {self.num_speculative_tokens}", "it must be at least 0",
                param="num_speculative_tokens",
            )  # fmt: skip
        if not 0 <= self.acceptance <= 1:
            raise BadRequest(f"acceptance is {self.acceptance}", "it is a share: from 0 to 1", param="acceptance")

    def new_replica(
        self, index: int, times: StepTimes, costs: ServingCosts | None = None, draft_times: StepTimes | None = None
    ) -> Replica:
        """`draft_times`: of the model or head that drafts; None: proposing is free."""
        limits = SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_draft_tokens=self._max_draft_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            max_queued=sys.maxsize,  # the server limits the queue
            step_seconds=self.target_itl_ms / 1000,
            has_states=self.has_states,
        )
        scheduler = Scheduler(
            limits, self.num_blocks, num_host_blocks=self.num_host_blocks, policy=self.policy,
            prefix_caching=self.prefix_caching, ahead=self.ahead, window=self.window,
            drafts=self._draft_policy(), num_slots=self.num_slots, num_pages=self.num_pages,
            page_window=self.page_window,
        )  # fmt: skip
        drafts = self._drafts(index, draft_times) if self.num_speculative_tokens else None
        return Replica(index, scheduler, times, costs, ahead=self.ahead, drafts=drafts)

    def _drafts(self, index: int, times: StepTimes | None) -> SimulatedDrafts:
        steps = None
        if times is not None:
            is_head = METHODS[self.draft_method].has_head
            most = self.max_num_batched_tokens + self._max_draft_tokens
            steps = DraftingSteps(times, self.block_size, most, is_head)
        return SimulatedDrafts(self.num_speculative_tokens, self.acceptance, Random(index), self.draft_method, steps)

    @property
    def _max_draft_tokens(self) -> int:
        """Beside max_num_batched_tokens, as on a GPU."""
        return self.max_num_batched_tokens if self.ahead and self.num_speculative_tokens else 0

    def _draft_policy(self) -> DraftPolicy | None:
        """The policy of drafts as an engine has it: what it believes of a method until it has measured it."""
        if not self.num_speculative_tokens:
            return None
        method = DraftMethod(self.draft_method, self.num_speculative_tokens, cost=self.draft_cost)
        if self.draft_method in METHODS:
            method = replace(method, acceptance=METHODS[self.draft_method].acceptance)
        return DraftPolicy((method,), GPU_TOKEN_COST if self.ahead else CPU_TOKEN_COST)


@dataclass(frozen=True, slots=True)
class Fleet:
    engine: SimulatedEngine
    times: StepTimes
    costs: ServingCosts | None = None
    num_replicas: int = 1
    router: str = "least-busy"
    draft_times: StepTimes | None = None
    max_concurrency: int | None = None  # requests in flight at most; None: no limit

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            near = nearest(self.router, ROUTERS)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(ROUTERS)}"
            raise BadRequest(f"no router is called `{self.router}`", hint, param="router")

    def serve(self, arrivals: Sequence[Arrival], advance: Callable[[], object] = lambda: None) -> Simulation:
        given = self.times, self.costs, self.draft_times
        replicas = [self.engine.new_replica(index, *given) for index in range(self.num_replicas)]
        return simulate(arrivals, replicas, ROUTERS[self.router], advance, self.max_concurrency)


def plan_engine(
    model: PlannedModel, hardware: Hardware, flags: EngineFlags, *, tp: int = 1, num_speculative_tokens: int = 0,
    acceptance: float = 0.0, draft: Draft | None = None,
) -> SimulatedEngine:  # fmt: skip
    """What an engine with these flags would have on this hardware. `draft`: what proposes draft tokens; None: that is
    free."""
    kv = model.kv_spec(flags.kv_cache_dtype, flags.block_size, drafts=num_speculative_tokens > 0)
    ahead = 1 if hardware.is_gpu else 0
    step_tokens = flags.max_num_batched_tokens * (2 if ahead and num_speculative_tokens else 1)
    size = size_cache(
        model.config, kv, max_model_len=flags.max_model_len, max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=step_tokens, cache_bytes=flags.kv_cache_memory_bytes,
        max_bytes=_cache_room(model, hardware, flags, tp, draft.weight_bytes if draft else 0),
        swap_bytes=int(flags.swap_space * 2**30), ahead=ahead, window_pages=True,
        draft_block_bytes=draft.block_bytes(kv) if draft else 0,
    )  # fmt: skip
    return SimulatedEngine(
        num_blocks=size.num_blocks,
        num_host_blocks=size.num_host_blocks,
        max_model_len=size.max_model_len,
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        long_prefill_token_threshold=flags.long_prefill_token_threshold,
        target_itl_ms=flags.target_itl_ms,
        block_size=flags.block_size,
        prefix_caching=flags.enable_prefix_caching,
        policy=flags.scheduling_policy,
        ahead=ahead,
        window=model.config.window,
        has_states=model.config.has_states,
        num_slots=size.num_slots,
        num_pages=size.num_pages,
        page_window=size.spec.windows.size if size.spec.windows else 0,
        num_speculative_tokens=num_speculative_tokens,
        acceptance=acceptance,
        draft_method=draft.method if draft else ANY_METHOD,
        draft_cost=draft.weight_bytes / model.weight_bytes if draft else 0.0,
    )


def _cache_room(model: PlannedModel, hardware: Hardware, flags: EngineFlags, tp: int, draft_bytes: int) -> int:
    """Bytes that an engine would have for its KV cache: what the weights leave of the memory. `draft_bytes`: weights of
    what drafts."""
    if not hardware.is_gpu:
        return max(0, min(int(hardware.memory - model.weight_bytes - draft_bytes) // 2, MAX_CPU_CACHE))
    kv = model.kv_spec(flags.kv_cache_dtype, flags.block_size)
    memory = plan_memory(model, kv, Load(), on_gpu=hardware.is_gpu, max_num_batched_tokens=flags.max_num_batched_tokens)
    taken, room = memory.total - memory.kv_cache + draft_bytes, int(tp * hardware.memory * flags.gpu_memory_utilization)
    if taken >= room:
        raise DoesNotFit(
            f"weights and activations take {taken / 2**30:.1f} GiB of {room / 2**30:.1f} GiB",
            "use more devices (--tp) or fewer bits (--format)",
        )
    return room - taken
