"""Replicas of one configuration behind a router, made anew for each simulation."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.errors import BadRequest, DoesNotFit
from quire.core.limits import SchedulerLimits
from quire.core.scheduler import Scheduler
from quire.planning.hardware import Hardware
from quire.planning.memory import Load, plan_memory
from quire.planning.planned_model import PlannedModel
from quire.planning.replica import Replica
from quire.planning.routers import ROUTERS
from quire.planning.simulator import Simulation, simulate
from quire.planning.step_times import StepTimes
from quire.planning.workload import Arrival
from quire.runtime.kv import size_cache

MAX_CPU_CACHE = 4 << 30  # bytes, as an engine takes by default
PACE = 0.03  # seconds: servers' target for steps in which sequences decode beside prompts


@dataclass(frozen=True, slots=True)
class Fleet:
    model: PlannedModel
    hardware: Hardware
    times: StepTimes
    tp: int = 1
    num_replicas: int = 1
    router: str = "least-busy"
    kv_dtype: str = "auto"
    policy: str = "fcfs"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    block_size: int = 16

    def serve(self, arrivals: Sequence[Arrival]) -> Simulation:
        if self.router not in ROUTERS:
            raise BadRequest(
                f"no router is called `{self.router}`", f"choose from {', '.join(ROUTERS)}", param="router"
            )
        longest = max(len(arrival.prompt_ids) + arrival.output for arrival in arrivals)
        num_blocks = self._num_blocks(longest)
        limits = SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=max(longest, 2),
            block_size=self.block_size,
            max_queued=len(arrivals),
            step_seconds=PACE,
        )
        ahead = 1 if self.hardware.is_gpu else 0
        replicas = [
            Replica(
                index,
                Scheduler(limits, num_blocks, policy=self.policy, ahead=ahead, window=self.model.config.window),
                self.times,
                ahead=ahead,
            )
            for index in range(self.num_replicas)
        ]
        return simulate(arrivals, replicas, ROUTERS[self.router])

    def _num_blocks(self, longest: int) -> int:
        """As an engine sizes its cache: what the weights leave of the memory."""
        if longest > self.model.config.max_length:
            raise BadRequest(
                f"a request has {longest} tokens, and the model was made for {self.model.config.max_length}",
                "shorten the prompts or outputs",
            )
        kv = self.model.kv_spec(self.kv_dtype, self.block_size)
        memory = plan_memory(
            self.model, kv, Load(), on_gpu=self.hardware.is_gpu, max_num_batched_tokens=self.max_num_batched_tokens
        )
        room = self.tp * self.hardware.memory * (0.9 if self.hardware.is_gpu else 0.5)
        free = int(room) - (memory.total - memory.kv_cache)
        if free <= 0:
            raise DoesNotFit(
                f"weights and activations take {(memory.total - memory.kv_cache) / 2**30:.1f} GiB of "
                f"{room / 2**30:.1f} GiB",
                "use more devices (--tp) or fewer bits (--format)",
            )
        size = size_cache(
            self.model.config, kv, max_model_len=longest, max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens, cache_bytes=None,
            max_bytes=free if self.hardware.is_gpu else min(free, MAX_CPU_CACHE),
        )  # fmt: skip
        return size.num_blocks
