"""A plan as text, and as JSON."""

from dataclasses import asdict
from math import isfinite
from typing import Any

from quire.planning.degrees import degrees
from quire.planning.hardware import PRICE_SOURCE
from quire.planning.other_engines import choose_another
from quire.planning.plan import Plan
from quire.planning.roofline import StepCeiling, all_reduce_bytes
from quire.planning.speculation import ACCEPTANCES
from quire.planning.words import counted, figure

_GIB = 1 << 30


def as_json(plan: Plan) -> dict[str, Any]:
    model, memory, load = plan.model, plan.memory, plan.load
    return {
        "model": {
            "name": model.name,
            "architecture": model.config.architecture,
            "parameters": model.num_parameters,
            "layers": model.config.layers,
            "context": model.config.max_length,
        },
        "hardware": {"name": plan.hardware.name, "devices": plan.setup.num_devices, "memory_bytes": plan.room},
        "load": {"users": load.users, "context": load.context, "prompt": load.prompt, "output": load.output},
        "memory": {**asdict(memory), "total": memory.total, "fits": plan.fits},
        "kv": {
            "dtype": plan.kv.dtype,
            "bytes_per_token": plan.kv.block_bytes / plan.kv.block_size,
            "behind_windows": plan.behind_windows,
            "users_by_context": dict(plan.users_by_context),
            "variants": {variant.name: variant.bytes_per_token for variant in plan.variants},
        },
        "prefill": _step_json(plan.prefill),
        "decode": [_step_json(step) for step in plan.decode],
        "ttft_seconds": plan.prefill.seconds,
        "tpot_seconds": plan.at_load.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "cost": _cost_json(plan),
        "speculation": {
            "draft_cost": plan.speculation.draft_cost,
            "speedup": {
                str(acceptance): {
                    str(k): plan.speculation.speedup(acceptance, k) for k in plan.speculation.verify_costs
                }
                for acceptance in ACCEPTANCES
            },
        },
        "parallel": {
            "tp": plan.setup.tp,
            "pp": plan.setup.pp,
            "all_reduce_bytes_per_layer_and_token": _all_reduce(plan),
            "pipeline_bubble": plan.bubble,
        },
        "degrees": [asdict(degree) for degree in degrees(plan)],
        "other_engines": choose_another(plan),
        "advice": [
            {
                "what": advice.what,
                "flags": advice.flags,
                "why": advice.why,
                "gain": advice.gain if isfinite(advice.gain) else None,
            }
            for advice in plan.advice
        ],
    }


def _cost_json(plan: Plan) -> dict[str, float | None]:
    """In dollars; null where no price is known: that is not a price of 0."""
    cost = plan.cost
    found = {
        "per_hour": cost.per_hour,
        "per_day": cost.per_day,
        "per_million_prompt_tokens": cost.per_million_prompt,
        "per_million_output_tokens": cost.per_million_output,
    }
    return {**found} if cost.price or plan.setup.price is not None else dict.fromkeys(found)


def _step_json(step: StepCeiling) -> dict[str, Any]:
    return {
        "sequences": step.shape.num_seqs,
        "new_tokens": step.shape.new_tokens,
        "context": step.shape.context,
        "flops": step.count.flops,
        "weight_bytes": step.count.weight_bytes,
        "kv_bytes": step.count.kv_bytes,
        "intensity": step.intensity,
        "bound": step.bound,
        "seconds": step.seconds,
        "tokens_per_second": step.shape.num_tokens / step.seconds,
    }


def as_text(plan: Plan) -> str:
    sections = [
        _model(plan),
        _memory(plan),
        _kv(plan),
        _speed(plan),
        _parallel(plan),
        _degrees(plan),
        _cost(plan),
        _advice(plan),
        choose_another(plan),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _model(plan: Plan) -> list[str]:
    config = plan.model.config
    size = plan.model.num_parameters / 1e9
    bits = 8 * plan.model.weight_bytes / plan.model.num_parameters
    active = f", {plan.active_parameters / 1e9:.3g} B of them for a token" if plan.experts else ""
    heads = "MLA" if config.latent else f"{config.heads} heads, {config.kv_heads} KV heads"
    heads = "compressed attention" if config.compressed else heads
    return [
        f"{plan.model.name}: {size:.3g} B parameters{active}, {bits:.2f} bits each in memory",
        f"{config.layers} layers of {config.hidden}, {heads}, context {config.max_length:,}, {config.architecture}",
        f"on {f'{plan.setup.num_devices} x ' if plan.setup.num_devices > 1 else ''}{plan.hardware.name}",
    ]


def _memory(plan: Plan) -> list[str]:
    memory, load = plan.memory, plan.load
    windows = ", less what is behind windows" if plan.behind_windows else ""
    rows = [
        ("weights", memory.weights, ""),
        ("KV cache", memory.kv_cache, f"{load.users} x {load.context:,} tokens in {plan.kv.dtype}{windows}"),
        ("activations", memory.activations, ""),
        ("LoRA adapters", memory.adapters, f"{plan.setup.limits.num_loras} of rank {plan.setup.limits.lora_rank}"),
        ("draft model", memory.draft, plan.draft.name if plan.draft else ""),
        ("process", memory.process, "interpreter, libraries" + (", CUDA" if plan.hardware.is_gpu else "")),
        ("mapped tables", memory.tables, "embeddings in the file: the system may drop these pages"),
        ("loading", memory.loading, "for a moment, while weights are packed"),
        ("total", memory.total, f"of {plan.room / _GIB:.1f} GiB: {'it fits' if plan.fits else 'it does NOT fit'}"),
    ]
    return ["memory, GiB", *(f"  {name:<14}{size / _GIB:>9.2f}  {note}".rstrip() for name, size, note in rows if size)]


def _kv(plan: Plan) -> list[str]:
    per_token = plan.kv.block_bytes / plan.kv.block_size
    variants = ", ".join(f"{v.name} {v.bytes_per_token / 1024:,.1f}" for v in plan.variants)
    users = "".join(f"  {context:>8,}" for context, _ in plan.users_by_context)
    fits = "".join(f"  {count:>8,}" for _, count in plan.users_by_context)
    bounded = [window for window in plan.model.config.windows if window]
    kept = f"  {len(bounded)} of {plan.model.config.layers} layers keep the last {{:,}} tokens of it"
    return [
        f"KV cache: {per_token / 1024:,.1f} KiB a token ({variants} for the same layers)",
        *([kept.format(max(bounded))] if bounded else []),
        f"  context     {users}",
        f"  users fit   {fits}",
    ]


def _speed(plan: Plan) -> list[str]:
    lines = [
        f"ceilings (memory {plan.hardware.bandwidth / 1e9:,.0f} GB/s, {plan.hardware.flops / 1e12:,.4g} TFLOP/s, "
        f"ridge {plan.hardware.ridge:,.0f} operations a byte)",
        f"  {'step':<26}{'GFLOP':>9}{'GB':>9}{'op/byte':>9}  {'bound by':<9}{'ms':>9}{'tokens/s':>11}",
    ]
    for step in (plan.prefill, *plan.decode):
        shape = step.shape
        name = f"prefill of {shape.new_tokens:,}" if shape.new_tokens > 1 else f"decode of {shape.num_seqs}"
        lines.append(
            f"  {name + f' at {shape.context:,}':<26}{figure(step.count.flops / 1e9):>9}"
            f"{figure(step.count.nbytes / 1e9, 3):>9}"
            f"{step.intensity:>9,.0f}  {step.bound:<9}{1e3 * step.seconds:>9,.2f}"
            f"{shape.num_tokens / step.seconds:>11,.0f}"
        )
    lines.append(
        f"  {counted(plan.load.users, 'user')}: TTFT {1e3 * plan.prefill.seconds:,.0f} ms alone, TPOT "
        f"{1e3 * plan.at_load.seconds:,.1f} ms, {plan.tokens_per_second:,.0f} output tokens/s at best"
    )
    return lines


def _all_reduce(plan: Plan) -> float:
    return all_reduce_bytes(plan.model, 1, plan.setup.tp) / plan.model.config.layers


def _parallel(plan: Plan) -> list[str]:
    lines = []
    if plan.setup.tp > 1:
        total = all_reduce_bytes(plan.model, plan.load.users, plan.setup.tp)
        lines.append(
            f"tensor parallel over {plan.setup.tp}: all-reduces of {_all_reduce(plan) / 1024:.1f} KiB a layer and "
            f"token, {total / 1e6:,.2f} MB a decode step and device"
        )
    if plan.setup.pp > 1:
        lines.append(
            f"pipeline of {plan.setup.pp} stages: while a prompt is computed, {plan.bubble:.0%} of the time is a bubble"
        )
    return lines


def _degrees(plan: Plan) -> list[str]:
    rows = degrees(plan)
    if not rows:
        return []
    names = {"tp": "share every matrix", "dp": "have all weights each"}
    lines = [f"several of them: {'':<18}{'GiB each':>10}{'TTFT ms':>10}{'TPOT ms':>10}{'tokens/s':>11}{'of each':>9}"]
    for row in rows:
        name = f"{row.kind} {row.devices}: {row.devices} {names[row.kind]}"
        fits = "" if row.fits else "  it does NOT fit"
        lines.append(
            f"  {name:<33}{row.bytes_per_device / _GIB:>10,.1f}{1e3 * row.ttft:>10,.0f}{1e3 * row.tpot:>10,.1f}"
            f"{row.tokens_per_second:>11,.0f}{row.gain:>9.0%}{fits}"
        )
    return lines


def _cost(plan: Plan) -> list[str]:
    cost = plan.cost
    if not cost.price:
        return []
    return [
        f"cost at ${cost.price:.2f} an hour and device: ${cost.per_day:,.2f} a day; with "
        f"{counted(plan.load.users, 'user')} always served "
        f"${cost.per_million_prompt:.3f} per million prompt tokens, ${cost.per_million_output:.3f} per million output "
        "tokens",
        *([f"  ({PRICE_SOURCE})"] if cost.price == plan.hardware.price else []),
    ]


def _advice(plan: Plan) -> list[str]:
    if not plan.advice:
        return []
    lines = ["worth trying, best first"]
    for advice in plan.advice:
        gain = "needed" if advice.gain == float("inf") else f"{advice.gain:.2f}x" if advice.gain > 1 else ""
        lines += [f"  {gain:>7}  {advice.what}: {advice.flags}", f"           {advice.why}"]
    return lines
