"""What a search found, as text and as JSON."""

from typing import Any

from quire.planning.hardware import PRICE_SOURCE
from quire.planning.other_engines import NOT_CUDA
from quire.planning.search import Configuration, Demand, SearchResult
from quire.planning.words import counted


def as_text(demand: Demand, result: SearchResult) -> str:
    limits = ", ".join(f"{name} {1e3 * limit:g} ms" for name, limit in demand.slo.limits.items())
    lines = [
        f"{counted(demand.rate, 'request')} a second of {demand.prompt:,} + {demand.output:,} tokens; "
        f"99 of 100 within {limits}",
        "",
    ]
    if result.feasible:
        lines.append(
            f"  {'hardware':<28}{'format':<10}{'KV':<10}{'tp':>3}{'repl.':>7}{'$/hour':>9}{'$/M tokens':>12}"
            f"{'TTFT p50':>10}{'p99':>7}{'TPOT p50':>10}{'p99':>7}  ms"
        )
        lines += [_row(demand, one) for one in result.feasible]
        if others := [one for one in result.feasible if not _is_ours(one)]:
            names = ", ".join(dict.fromkeys(f"{one.tp} x {one.hardware.name}" for one in others))
            lines.append(f"  Quire has only been run on one CPU or NVIDIA GPU; for {names} choose vLLM or SGLang")
        if any(one.per_hour and one.price == one.hardware.price for one in result.feasible):
            lines.append(f"  ({PRICE_SOURCE})")
    else:
        lines.append("  no configuration keeps the limits")
    if result.near_misses:
        lines += ["", "what fails, and why"]
        lines += [f"  {_name(one)}: {one.why_not}" for one in result.near_misses]
    return "\n".join(lines)


def _is_ours(one: Configuration) -> bool:
    return one.tp == 1 and one.hardware.name not in NOT_CUDA


def _name(one: Configuration) -> str:
    stored = f" {one.format}," if one.format else ""
    return f"{counted(one.replicas, 'replica')} of {one.tp} x {one.hardware.name},{stored} KV {one.kv_dtype}"


def _row(demand: Demand, one: Configuration) -> str:
    assert one.summary is not None
    ttft, tpot = one.summary.ttft, one.summary.tpot
    times = f"{1e3 * ttft[50]:>10,.0f}{1e3 * ttft[99]:>7,.0f}{1e3 * tpot[50]:>10,.1f}{1e3 * tpot[99]:>7,.1f}"
    price = f"{one.per_hour:>9,.2f}{one.per_million(demand):>12,.3f}" if one.per_hour else f"{'-':>9}{'-':>12}"
    what = f"  {one.hardware.name:<28}{one.format or 'own':<10}{one.kv_dtype:<10}{one.tp:>3}{one.replicas:>7}"
    return what + price + times


def as_json(demand: Demand, result: SearchResult) -> dict[str, Any]:
    return {
        "rate": demand.rate,
        "prompt": demand.prompt,
        "output": demand.output,
        "slo_seconds": dict(demand.slo.limits),
        "feasible": [_configuration(demand, one) for one in result.feasible],
        "near_misses": [{**_configuration(demand, one), "why_not": one.why_not} for one in result.near_misses],
    }


def _configuration(demand: Demand, one: Configuration) -> dict[str, Any]:
    return {
        "hardware": one.hardware.name,
        "format": one.format or None,
        "kv_cache_dtype": one.kv_dtype,
        "tp": one.tp,
        "replicas": one.replicas,
        "per_hour": one.per_hour,
        "per_million_tokens": one.per_million(demand),
        "engine": "quire" if _is_ours(one) else "vllm or sglang",
        "simulated": one.summary.as_json() if one.summary else None,
    }
