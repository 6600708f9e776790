"""Engines of one configuration behind a router, made anew for each simulation."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from quire.core.draft_policy import CPU_TOKEN_COST, GPU_TOKEN_COST, DraftMethod, DraftPolicy
from quire.core.errors import BadRequest, DoesNotFit
from quire.core.limits import SchedulerLimits
from quire.core.nearest import nearest
from quire.core.scheduler import Scheduler
from quire.planning.hardware import Hardware
from quire.planning.memory import Load, plan_memory
from quire.planning.planned_model import PlannedModel
from quire.planning.replica import Replica, SimulatedDrafts
from quire.planning.routers import ROUTERS
from quire.planning.simulator import Simulation, simulate
from quire.planning.step_times import ServingCosts, StepTimes
from quire.planning.workload import Arrival
from quire.runtime.kv import size_cache

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

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 0:
            raise BadRequest(
                f"num_speculative_tokens is {self.num_speculative_tokens}", "it must be at least 0",
                param="num_speculative_tokens",
            )  # fmt: skip
        if not 0 <= self.acceptance <= 1:
            raise BadRequest(f"acceptance is {self.acceptance}", "it is a share: from 0 to 1", param="acceptance")

    def new_replica(self, index: int, times: StepTimes, costs: ServingCosts | None = None) -> Replica:
        limits = SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
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
        drafts = None
        if self.num_speculative_tokens:
            drafts = SimulatedDrafts(self.num_speculative_tokens, self.acceptance, Random(index))
        return Replica(index, scheduler, times, costs, ahead=self.ahead, drafts=drafts)

    def _draft_policy(self) -> DraftPolicy | None:
        if not self.num_speculative_tokens:
            return None
        token_cost = GPU_TOKEN_COST if self.ahead else CPU_TOKEN_COST
        return DraftPolicy((DraftMethod(max_tokens=self.num_speculative_tokens),), token_cost)


@dataclass(frozen=True, slots=True)
class Fleet:
    engine: SimulatedEngine
    times: StepTimes
    costs: ServingCosts | None = None
    num_replicas: int = 1
    router: str = "least-busy"

    def serve(self, arrivals: Sequence[Arrival], advance: Callable[[], object] = lambda: None) -> Simulation:
        if self.router not in ROUTERS:
            near = nearest(self.router, ROUTERS)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(ROUTERS)}"
            raise BadRequest(f"no router is called `{self.router}`", hint, param="router")
        replicas = [self.engine.new_replica(index, self.times, self.costs) for index in range(self.num_replicas)]
        return simulate(arrivals, replicas, ROUTERS[self.router], advance)


def plan_engine(
    model: PlannedModel, hardware: Hardware, flags: EngineFlags, *, tp: int = 1, num_speculative_tokens: int = 0,
    acceptance: float = 0.0,
) -> SimulatedEngine:  # fmt: skip
    """What an engine with these flags would have on this hardware."""
    kv = model.kv_spec(flags.kv_cache_dtype, flags.block_size)
    ahead = 1 if hardware.is_gpu else 0
    size = size_cache(
        model.config, kv, max_model_len=flags.max_model_len, max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens, cache_bytes=flags.kv_cache_memory_bytes,
        max_bytes=_cache_room(model, hardware, flags, tp), swap_bytes=int(flags.swap_space * 2**30), ahead=ahead,
        window_pages=not hardware.is_gpu,
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
    )


def _cache_room(model: PlannedModel, hardware: Hardware, flags: EngineFlags, tp: int) -> int:
    """Bytes that an engine would have for its KV cache: what the weights leave of the memory."""
    if not hardware.is_gpu:
        return max(0, min(int(hardware.memory - model.weight_bytes) // 2, MAX_CPU_CACHE))
    kv = model.kv_spec(flags.kv_cache_dtype, flags.block_size)
    memory = plan_memory(model, kv, Load(), on_gpu=hardware.is_gpu, max_num_batched_tokens=flags.max_num_batched_tokens)
    taken, room = memory.total - memory.kv_cache, int(tp * hardware.memory * flags.gpu_memory_utilization)
    if taken >= room:
        raise DoesNotFit(
            f"weights and activations take {taken / 2**30:.1f} GiB of {room / 2**30:.1f} GiB",
            "use more devices (--tp) or fewer bits (--format)",
        )
    return room - taken
