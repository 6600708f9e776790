"""How long a step takes, from what its plan computes: by the roofline of some hardware, or fitted to measured steps."""

from dataclasses import dataclass
from math import hypot
from typing import Protocol

from quire.core.plan import StepPlan
from quire.planning.hardware import Hardware
from quire.planning.planned_model import PlannedModel
from quire.planning.step_counter import StepShape


@dataclass(slots=True)
class StepWork:
    """What the duration of a step depends on."""

    num_tokens: int = 0
    num_rows: int = 0  # lines of logits: one of each sequence that samples, and one of each draft token
    num_read: int = 0  # cached tokens that are read, of all sequences
    num_pairs: int = 0  # of a query and a key
    num_chunks: int = 0  # runs of several prompt tokens; 0: all sequences decode
    num_shared: int = 0  # of the cached tokens that are read: those that another sequence reads too
    num_chunk_read: int = 0  # of the cached tokens that are read: those that runs of several tokens read
    longest: int = 0  # of these: what the run with the longest context reads
    recent: int = 0  # tokens a second that the device computed just before, as `RecentRate` has them

    @classmethod
    def of(cls, plan: StepPlan, num_sampling: int) -> "StepWork":
        """`num_sampling`: sequences that sample in it."""
        work, num_alone, read_alone = cls(num_rows=num_sampling), 0, 0
        for run in plan.runs:
            if run.count == 1:
                num_alone += 1
                read_alone += run.start
            else:
                work.add(run.start, run.count, num_drafts := len(run.drafts))
                work.num_rows += num_drafts
        read_alone += num_alone
        work.num_tokens += num_alone
        work.num_read += read_alone
        work.num_pairs += read_alone
        return work

    def add(self, start: int, count: int, num_drafts: int = 0, num_runs: int = 1) -> None:
        """A run of `count` tokens from `start` on, the last of which are drafts; or several that are alike."""
        self.num_tokens += num_runs * count
        self.num_read += num_runs * (start + count)
        self.num_chunk_read += num_runs * (start + count)
        self.longest = max(self.longest, start + count)
        self.num_pairs += num_runs * (count * start + count * (count + 1) // 2)
        self.num_chunks += num_runs * (count > 1 + num_drafts)


class StepTimes(Protocol):
    def seconds(self, work: StepWork) -> float: ...


# Of what a server takes for a request: for its connection, for its bytes, and until the engine has it. Each is done in
# a turn of the server's loop. The rest comes later.
SHARES = (0.15, 0.15, 0.45)


@dataclass(frozen=True, slots=True)
class ServingCosts:
    """Seconds that serving takes beside the steps: the loop of the engine process, streams, HTTP. On a GPU the loop
    works beside the device, which waits for it where it takes longer than a step."""

    step: float = 0.0  # between two steps
    row: float = 0.0  # of each token that is sent: where threads compute, the step is longer by it
    request: float = 0.0  # from a client to the engine, and of the first token back
    arrival: float = 0.0  # of a request that comes while a step runs: on a CPU the step is longer by it
    prompts: float = 0.0  # of a step with prompts, on a GPU
    # The server of a GPU's engine does one thing after the other; `request` has these of a request that is alone.
    taken: float = 0.0  # of a request
    prompt_token: float = 0.0  # and of each token of its prompt
    message: float = 0.0  # of what a step sampled
    stream: float = 0.0  # of each token
    write: float = 0.0  # to a client, of all its tokens that are there
    swapped_block: float = 0.0  # moved to main memory, or back

    @property
    def way(self) -> float:
        """Of a request, beside what its server does before the client has the first token."""
        return max(0.0, self.request - sum(SHARES) * self.taken - self.message - self.stream - self.write)


@dataclass(frozen=True, slots=True)
class RooflineTimes:
    """What memory and what compute take, of the shares of both that kernels reach. On a GPU one hides behind the
    other; on a CPU they do so in part, which the root of the sum of their squares is near to."""

    weight_bytes: float  # without experts
    kv_bytes: float  # of a cached token
    flops_token: float  # of linear layers
    flops_row: float  # of the head
    flops_pair: float  # of attention
    bandwidth: float
    flops: float
    attention_flops: float  # a second
    overhead: float  # seconds of a step beside its kernels
    hides: bool  # the lesser of both behind the greater
    expert_bytes: float = 0.0  # of all experts
    expert_share: float = 0.0  # of the experts, those that a token chooses

    def seconds(self, work: StepWork) -> float:
        read = work.num_read if self.hides else work.num_read - work.num_shared  # a CPU reads a shared prefix once
        moved = self.weight_bytes + self.kv_bytes * read
        if self.expert_bytes:
            moved += self.expert_bytes * (1 - (1 - self.expert_share) ** work.num_tokens)
        matmuls = self.flops_token * work.num_tokens + self.flops_row * work.num_rows
        computed = matmuls / self.flops + self.flops_pair * work.num_pairs / self.attention_flops
        loaded = moved / self.bandwidth
        return self.overhead + (max(loaded, computed) if self.hides else hypot(loaded, computed))


GPU_SHARES = (0.8, 0.55)  # of bandwidth and peak that kernels reach, where nothing was measured
# This machine's rates are the best of its kernels, in large matrices. Steps of a model on two Cascade Lake cores, whose
# speed changes meanwhile, reach these shares in the mean.
MEASURED_SHARES = (0.9, 0.7)
STEP_OVERHEAD = 0.0004  # seconds
SWAP_BANDWIDTH = 20e9  # bytes a second between a GPU and main memory, or within it; not measured


def default_costs(hardware: Hardware) -> ServingCosts:
    """Where nothing was measured: rough ones. `--calibrate` measures those of a machine."""
    if hardware.is_gpu:
        return ServingCosts(step=0.0003, row=3e-5, request=0.004)
    return ServingCosts(step=0.0007, row=1e-4, request=0.0036, arrival=0.0018)


def roofline_times(
    model: PlannedModel, kv_dtype: str, hardware: Hardware, *, tp: int = 1, eight_bit: bool = False,
    is_head: bool = False,
) -> RooflineTimes:  # fmt: skip
    """`is_head`: of a head that has one layer like the model's, and the matrix of its logits."""
    kv = model.kv_spec(kv_dtype)
    one, two = (model.step(StepShape(1, 1, context), kv).count.ops for context in (1, 2))
    layers = model.config.layers if is_head else 1
    experts = one["experts"].weight_bytes if "experts" in one else 0.0
    share = 0.0
    if experts:  # two tokens read share x (2 - share) of them
        share = 2 - model.step(StepShape(2, 1, 1), kv).count.ops["experts"].weight_bytes / experts
    logits, linear = one["head"], sum(one[op].flops for op in ("linear", "experts") if op in one)
    weights = sum(count.weight_bytes for count in one.values()) - experts - logits.weight_bytes
    bandwidth_share, flops_share = MEASURED_SHARES if hardware.measured else GPU_SHARES
    flops = hardware.flops_8bit if eight_bit and hardware.flops_8bit else hardware.flops
    return RooflineTimes(
        weight_bytes=weights / layers + logits.weight_bytes,
        kv_bytes=kv.block_bytes / kv.block_size / layers,
        flops_token=linear / layers,
        flops_row=logits.flops,
        flops_pair=(two["attention"].flops - one["attention"].flops) / layers,
        bandwidth=hardware.bandwidth * bandwidth_share * tp,
        flops=flops * flops_share * tp,
        attention_flops=hardware.flops * flops_share * tp,
        hides=hardware.is_gpu,
        overhead=STEP_OVERHEAD,
        expert_bytes=experts / share / layers if share else 0.0,
        expert_share=share,
    )
