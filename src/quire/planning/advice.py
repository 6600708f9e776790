"""What to try, in order, each with the gain that the ceilings predict."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.planning.speculation import best_num_drafts

if TYPE_CHECKING:
    from quire.planning.plan import Plan

NGRAM_ACCEPTANCE = 0.4  # of prompt lookup on text that repeats itself, as code edits and summaries do


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do. `gain`: how many times as many output tokens a second; 1: it is not about speed."""

    what: str
    flags: str
    why: str
    gain: float = 1.0


def advise(plan: "Plan") -> list[Advice]:
    found = [*_fit(plan), *_weights(plan), *_kv(plan), *_batch(plan), *_speculation(plan)]
    return sorted(found, key=lambda advice: -advice.gain)


def _fit(plan: "Plan") -> list[Advice]:
    if plan.fits:
        return []
    short = plan.memory.total - plan.room
    needed = -(-plan.memory.total // (plan.room // plan.tp))
    why = f"{short / 2**30:.1f} GiB are missing for {plan.load.users} users of {plan.load.context} tokens"
    if plan.hardware.is_gpu:
        return [Advice(f"use {needed} devices, or fewer users", f"--tp {needed}", why, float("inf"))]
    return [Advice("shorten the context, or quantize more", "--max-model-len", why, float("inf"))]


def _weights(plan: "Plan") -> list[Advice]:
    """Decode is bound by the bytes of weights: fewer bits are faster."""
    step = plan.at_load
    bits = 8 * plan.model.weight_bytes / plan.model.num_parameters
    if step.bound != "memory" or bits < 6:
        return []
    saved = step.count.weight_bytes * (1 - 4.8 / bits) / plan.tp / plan.hardware.bandwidth
    gain = step.seconds / (step.seconds - saved)
    return [
        Advice(
            "4-bit weights", "a Q4_K_M, AWQ or GPTQ file, or --quantization int4",
            f"{bits:.1f} bits a weight now, and a decode step is bound by memory", gain,
        )
    ] if gain > 1.05 else []  # fmt: skip


def _kv(plan: "Plan") -> list[Advice]:
    step = plan.at_load
    share = step.count.kv_bytes / step.count.nbytes
    if share < 0.2 or plan.kv.dtype in ("int8", "fp8") or plan.kv.latent:
        return []
    kind = "fp8" if plan.hardware.is_gpu else "int8"
    gain = 1 / (1 - share / 2) if step.bound == "memory" else 1.0
    why = f"{share:.0%} of what a decode step reads is the KV cache; half the bytes also fit twice the users"
    return [Advice("an 8-bit KV cache", f"--kv-cache-dtype {kind}", why, gain)]


def _batch(plan: "Plan") -> list[Advice]:
    """More users at once read the same weights."""
    now = plan.at_load
    larger = [step for step in plan.decode if step.shape.num_seqs > now.shape.num_seqs]
    if not larger or now.bound != "memory":
        return []
    best = larger[-1]
    gain = (best.shape.num_seqs / best.seconds) / (now.shape.num_seqs / now.seconds)
    why = (
        f"{now.shape.num_seqs} users use {now.intensity:.0f} operations a byte of the {plan.hardware.ridge:.0f} at "
        f"which the device computes as fast as it reads"
    )
    return [Advice(f"serve more at once ({best.shape.num_seqs})", f"--max-num-seqs {best.shape.num_seqs}", why, gain)]


def _speculation(plan: "Plan") -> list[Advice]:
    step = plan.at_load
    if step.bound != "memory" or step.memory_seconds < 2 * step.compute_seconds:
        return []
    k, gain = best_num_drafts(NGRAM_ACCEPTANCE, draft_cost=0.0, most=4)
    why = f"where {NGRAM_ACCEPTANCE:.0%} of draft tokens are accepted, as in text that repeats; drafts are free here"
    return [Advice("speculative decoding by prompt lookup", f"--spec-method ngram --spec-tokens {k}", why, gain)]
