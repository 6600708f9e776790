"""What to try, in order, each with the gain that the ceilings predict."""

import json
from math import ceil

from quire.planning.hardware import usable_memory
from quire.planning.plan import Advice, Plan
from quire.planning.words import counted

NGRAM_ACCEPTANCE = 0.4  # of prompt lookup on text that repeats itself, as code edits and summaries do
DRAFT_ACCEPTANCE = 0.7  # of a draft model of the same family
FOUR_BITS = 4.8  # bits a weight of a Q4_K_M, AWQ or GPTQ model, its 16-bit tables included
MAX_TP = 8  # devices of a server


def advise(plan: Plan) -> list[Advice]:
    found = [*_fit(plan), *_replicas(plan), *_weights(plan), *_kv(plan), *_batch(plan), *_speculation(plan)]
    return sorted(found, key=lambda advice: -advice.gain)


def _fit(plan: Plan) -> list[Advice]:
    if plan.fits:
        return []
    short = plan.memory.total - plan.room
    why = f"{short / 2**30:.1f} GiB are missing for {counted(plan.load.users, 'user')} of {plan.load.context:,} tokens"
    if not plan.hardware.is_gpu or not plan.hardware.link:
        return [Advice("shorten the context, or quantize more", "--max-model-len", why, float("inf"))]
    needed = tp_that_fits(plan)
    if needed is None and plan.memory.kv_cache > plan.memory.weights:
        users = f"{counted(plan.max_users, 'user')} fit: --users {plan.max_users}" if plan.max_users else "--context"
        return [Advice("serve fewer users at once, or shorter contexts", users, why, float("inf"))]
    if needed is None:
        return [Advice("take larger devices, or fewer bits", "--format awq", why, float("inf"))]
    return [Advice(f"use {needed} devices, or fewer users", f"--tp {needed}", why, float("inf"))]


def tp_that_fits(plan: Plan) -> int | None:
    """The smallest power of two of devices that holds the plan; None: no server has as many."""
    memory, now = plan.memory, plan.setup.num_devices
    of_device = (memory.process + memory.activations) // now
    shared = memory.total - memory.process - memory.activations
    sizes = (2**power for power in range(MAX_TP.bit_length()))
    return next((n for n in sizes if shared + n * of_device <= usable_memory(plan.hardware, n)), None)


def _replicas(plan: Plan) -> list[Advice]:
    """Advice to run as many engines as the rate needs, at 70 % of the ceiling: queues grow without bound before it is
    reached."""
    if plan.setup.rate is None:
        return []
    wanted = plan.setup.rate * plan.load.output
    count = ceil(wanted / (0.7 * plan.tokens_per_second))
    if count < 2:
        return []
    why = f"{wanted:,.0f} output tokens/s are asked for, and one engine gives {plan.tokens_per_second:,.0f} at best"
    return [Advice(f"run {count} replicas", f"{count} x quire serve behind a router", why, float(count))]


def _weights(plan: Plan) -> list[Advice]:
    """Decode is bound by the bytes of weights: fewer bits are faster."""
    step = plan.at_load
    bits = 8 * plan.model.weight_bytes / plan.model.num_parameters
    if step.bound != "memory" or bits < 6 or plan.model.layer_bits < 6:
        return []
    saved = step.count.weight_bytes * (1 - FOUR_BITS / bits) / plan.setup.tp / plan.hardware.bandwidth
    gain = step.seconds / (step.seconds - saved)
    return [
        Advice(
            "4-bit weights", "a Q4_K_M, AWQ or GPTQ file, or --quantization int4",
            f"{bits:.1f} bits a weight now, and a decode step is bound by memory", gain,
        )
    ] if gain > 1.05 else []  # fmt: skip


def _kv(plan: Plan) -> list[Advice]:
    step = plan.at_load
    share = step.count.kv_bytes / step.count.nbytes
    if share < 0.2 or plan.kv.dtype in ("int8", "fp8") or plan.kv.latent:
        return []
    kind = "fp8" if plan.hardware.is_gpu else "int8"
    gain = 1 / (1 - share / 2) if step.bound == "memory" else 1.0
    why = f"{share:.0%} of what a decode step reads is the KV cache; half the bytes also fit twice the users"
    return [Advice("an 8-bit KV cache", f"--kv-cache-dtype {kind}", why, gain)]


def _batch(plan: Plan) -> list[Advice]:
    """More users at once read the same weights."""
    now = plan.at_load
    larger = [step for step in plan.decode if now.shape.num_seqs < step.shape.num_seqs <= plan.max_users]
    if not larger or now.bound != "memory":
        return []
    best = larger[-1]
    gain = (best.shape.num_seqs / best.seconds) / (now.shape.num_seqs / now.seconds)
    why = (
        f"a step of {counted(now.shape.num_seqs, 'user')} has {now.intensity:.0f} operations a byte of the "
        f"{plan.hardware.ridge:.0f} at which the device computes as fast as it reads"
    )
    return [Advice(f"serve more at once ({best.shape.num_seqs})", f"--max-num-seqs {best.shape.num_seqs}", why, gain)]


def _speculation(plan: Plan) -> list[Advice]:
    """The best number of draft tokens at a usual acceptance rate, by the ceilings of both models."""
    acceptance = NGRAM_ACCEPTANCE if plan.draft is None else DRAFT_ACCEPTANCE
    k, gain = plan.speculation.best(acceptance)
    if gain < 1.05:
        return []
    if plan.draft is None:
        why = f"where {acceptance:.0%} of draft tokens are accepted, as in text that repeats; proposing them is free"
        return [Advice("speculative decoding by prompt lookup", f"--spec-method ngram --spec-tokens {k}", why, gain)]
    cost = plan.speculation.draft_cost
    why = f"at an acceptance rate of {acceptance:.0%}; a draft token costs {cost:.0%} of a step of the model"
    config = {"method": plan.draft.method, "model": "HEAD" if plan.draft.is_head else plan.draft.name}
    flags = f"--speculative-config '{json.dumps({**config, 'num_speculative_tokens': k})}'"
    return [Advice(f"speculative decoding with {plan.draft.name}", flags, why, gain)]
