"""What degrees of tensor parallel would cost and gain: predicted from data sheets and link speeds, for several GPUs.

Ranks gather columns where others add up partial results (decision 013), so that results have the bits of one device.
What is gathered is not a formula: the forward pass is recorded as a rank's, and the values that ranks have in common
are counted."""

from dataclasses import dataclass
from typing import Any

from quire.models.registry import family
from quire.ops.native.rank_recorder import RankRecorder
from quire.ops.native.recorder import RecordedLogits, SymbolicBatch
from quire.ops.ranks.cuts import RankIndex, head_ranges
from quire.ops.ranks.forward import RankForward
from quire.ops.ranks.opset import RankOps
from quire.ops.ranks.roles import RoleOps
from quire.planning.hardware import usable_memory
from quire.planning.other_engines import choose_another
from quire.planning.plan import Plan
from quire.planning.planned_model import PlannedModel
from quire.planning.roofline import StepCeiling, all_reduce_bytes
from quire.planning.words import counted

NUMBER_BYTES = 2  # of a hidden value on a GPU


@dataclass(frozen=True, slots=True)
class RanksPlan:
    """One number of devices."""

    plan: Plan
    gathered_bytes: float  # that one device sends in a decode step
    reduced_bytes: float  # the same, if partial results were added up

    @property
    def tp(self) -> int:
        return self.plan.setup.tp

    @property
    def device_bytes(self) -> int:
        """Memory of one device."""
        return self.plan.memory.total // self.tp

    @property
    def fits(self) -> bool:
        return self.device_bytes <= usable_memory(self.plan.hardware)

    def decode_seconds(self, sent_bytes: float) -> float:
        step = self.plan.at_load
        return _without_links(step) + (sent_bytes / self.plan.hardware.link if sent_bytes else 0.0)

    @property
    def seconds(self) -> float:
        """The time of a decode step, with gathers."""
        return self.decode_seconds(self.gathered_bytes)

    @property
    def seconds_with_sums(self) -> float:
        return self.decode_seconds(self.reduced_bytes)


def scaling(plans: list[Plan]) -> list[RanksPlan]:
    """Plans that differ in their number of devices, with what these gain and what they exchange."""
    model, kv = plans[0].model, plans[0].kv
    columns = gathered_columns(model, max(plan.setup.tp for plan in plans), kv.block_size, kv.dtype)
    degrees = []
    for plan in plans:
        tp, tokens = plan.setup.tp, plan.load.users
        share = (tp - 1) / tp
        gathered = share * columns * NUMBER_BYTES * tokens
        degrees.append(RanksPlan(plan, gathered, all_reduce_bytes(model, tokens, tp) if tp > 1 else 0.0))
    return degrees


def gathered_columns(model: PlannedModel, tp: int, block_size: int, kv_dtype: str) -> int:
    """Columns that ranks gather of each token, in all layers and of the logits."""
    from quire.executors.ranks.shapes import trace_roles
    from quire.weights.shapes import shapes_of

    if tp < 2:
        return 0
    config, spec = model.config, model.kv_spec(kv_dtype, block_size)
    module = family(model.checkpoint.config.architecture)

    roles = trace_roles(module, model.checkpoint, config, spec, config.max_position)
    index = RankIndex(0, min(tp, config.heads))
    ops: Any = RankOps(RoleOps(roles.group), index).for_model(roles)
    loaded = module.load(ops, shapes_of(model.checkpoint), config, config.max_position)
    recorder = RankRecorder(ops.own_spec(spec))
    ranked: Any = RankForward(recorder, index, spec, roles.group)
    logits: RecordedLogits = loaded.forward(ranked, SymbolicBatch())
    return sum(storage.columns for storage in recorder.shared.storages) + logits.vocab_size


def _without_links(step: StepCeiling) -> float:
    return max(step.memory_seconds, step.compute_seconds)


def as_text(degrees: list[RanksPlan]) -> str:
    first = degrees[0]
    plan = first.plan
    users, link = f"{counted(plan.load.users, 'user')} of {plan.load.context:,} tokens", plan.hardware.link / 1e9
    lines = [
        f"{plan.model.name} on {plan.hardware.name}, tensor parallel: predicted from data sheets, not measured",
        f"  {users}; links of {link:,.0f} GB/s a device",
        f"  {'':>7}{'':>20}{'columns gathered':>26}{'partial results added up':>26}",
        f"  {'devices':>7}{'GiB each':>10}{'':>10}" + 2 * f"{'TPOT ms':>9}{'gain':>8}{'MB sent':>9}",
    ]
    for degree in degrees:
        line = f"  {degree.tp:>7}{degree.device_bytes / 2**30:>10.1f}{'' if degree.fits else ' too large':<10}"
        for seconds, sent in (
            (degree.seconds, degree.gathered_bytes),
            (degree.seconds_with_sums, degree.reduced_bytes),
        ):
            line += f"{1e3 * seconds:>9.2f}{first.seconds / seconds:>7.2f}x{sent / 1e6:>9.2f}"
        lines.append(line)
    return "\n".join([*lines, *_notes(degrees)])


def _notes(degrees: list[RanksPlan]) -> list[str]:
    lines = [
        "  gathered columns keep the bits of one device, sums of partial results do not",
        "  the latency of exchanges is not counted: small batches gain less",
    ]
    plan = degrees[0].plan
    heads, kv_heads = plan.model.config.heads, plan.model.config.kv_heads
    for tp in (degree.tp for degree in degrees):
        if tp > heads:
            lines.append(f"  {tp} devices are more than the {heads} heads, which are not divided")
        elif not plan.kv.latent and (held := sum(one.num_kv for one in head_ranges(heads, kv_heads, tp))) > kv_heads:
            lines.append(f"  {tp} devices keep {held} KV heads for {kv_heads}: the cache takes {held / kv_heads:.2g}x")
    return [*lines, *(f"  {sentence}" for sentence in choose_another(degrees[-1].plan))]


def as_json(degrees: list[RanksPlan]) -> list[dict[str, Any]]:
    return [
        {
            "tp": degree.tp,
            "predicted": True,
            "bytes_per_device": degree.device_bytes,
            "fits": degree.fits,
            "tpot_seconds": degree.seconds,
            "gain": degrees[0].seconds / degree.seconds,
            "gathered_bytes": degree.gathered_bytes,
            "tpot_seconds_with_sums": degree.seconds_with_sums,
            "all_reduced_bytes": degree.reduced_bytes,
        }
        for degree in degrees
    ]
