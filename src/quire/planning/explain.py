"""The formulas of a plan, with their numbers filled in."""

from math import ceil

from quire.ops.kv_spec import StateSpec
from quire.planning.plan import Plan
from quire.planning.roofline import all_reduce_bytes
from quire.planning.step_counter import expected_experts
from quire.planning.words import counted
from quire.runtime.kv import OWN_SLOTS, SLOTS_A_SEQUENCE

_GIB = 1 << 30


def explain(plan: Plan) -> str:
    sections = [_memory(plan), _roofline(plan), _parallel(plan), _cost(plan), _speculation(plan)]
    return "\n".join(line for section in sections for line in section)


def _memory(plan: Plan) -> list[str]:
    config, kv, load, memory = plan.model.config, plan.kv, plan.load, plan.memory
    per_token = kv.block_bytes / kv.block_size
    if config.latent:
        keys = f"({config.latent} latent + {config.head_dim - config.latent} rope) columns"
    else:
        keys = f"2 x {config.kv_heads} heads x {config.head_dim} columns"
    kv_bytes = kv.kv_bytes / kv.block_size
    width = kv_bytes / max(config.kv_layers, 1) / (config.head_dim * (1 if config.latent else 2 * config.kv_heads))
    states = f" + {kv.conv.state_bytes:,} bytes of states / {kv.block_size} tokens" if kv.conv else ""
    slots = _slots(kv.states) if kv.states else ""
    windows = ", less what is behind windows" if plan.behind_windows else ""
    bits = 8 * plan.model.weight_bytes / plan.model.num_parameters
    parts = [f"{size / _GIB:.3f}" for size in _parts(memory)]
    return [
        f"weights        = {plan.model.num_parameters / 1e9:.4g} B parameters x {bits:.2f} bits / 8 = "
        f"{plan.model.weight_bytes / _GIB:.3f} GiB",
        f"KV of a token  = {config.kv_layers} layers x {keys} x {width:g} bytes{states} = {per_token:,.0f} bytes = "
        f"{per_token / 1024:,.1f} KiB",
        f"KV of a user   = whole blocks of {kv.block_size} tokens for {load.context:,} tokens{slots}{windows} = "
        f"{memory.kv_cache / load.users / _GIB:.3f} GiB",
        f"memory         = {' + '.join(parts)} = {memory.total / _GIB:.3f} GiB",
    ]


def _slots(states: StateSpec) -> str:
    own, checkpoints = OWN_SLOTS, SLOTS_A_SEQUENCE - OWN_SLOTS
    if states.checkpoint_dtype == "float32":
        return f" + {SLOTS_A_SEQUENCE} x {states.slot_bytes:,} bytes of states"
    return (
        f" + {own} x {states.slot_bytes:,} bytes of states + {checkpoints} x {states.checkpoint_bytes:,} bytes of "
        f"checkpoints in {states.checkpoint_dtype}"
    )


def _parts(memory: object) -> list[int]:
    names = ("weights", "kv_cache", "activations", "adapters", "draft", "process", "tables", "loading")
    return [size for name in names if (size := getattr(memory, name))]


def _roofline(plan: Plan) -> list[str]:
    load, hardware, decode = plan.load, plan.hardware, plan.at_load
    flops = hardware.flops_8bit if plan.setup.eight_bit and hardware.flops_8bit else hardware.flops
    devices = f" x {plan.setup.tp}" if plan.setup.tp > 1 else ""
    users = counted(load.users, "user")
    sent = f" + {1e3 * decode.link_seconds:.3g} ms of all-reduces" if decode.link_seconds else ""
    return [
        _prefill(plan),
        f"TTFT           = {plan.prefill.count.flops / 1e12:.3g} TFLOP / ({flops / 1e12:.4g} TFLOP/s{devices}) = "
        f"{1e3 * plan.prefill.compute_seconds:.2f} ms, or {plan.prefill.count.nbytes / 1e9:.3g} GB of memory: "
        f"{1e3 * plan.prefill.memory_seconds:.2f} ms; the larger",
        f"decode step    = weights {decode.count.weight_bytes / 1e9:.3g} GB + KV of {users} "
        f"{decode.count.kv_bytes / 1e9:.3g} GB = {decode.count.nbytes / 1e9:.3g} GB",
        *_experts(plan),
        f"intensity      = {decode.count.flops / 1e9:,.4g} GFLOP / {decode.count.nbytes / 1e9:.3g} GB = "
        f"{decode.intensity:.1f} operations a byte; the ridge is {hardware.flops / 1e12:.4g} TFLOP/s / "
        f"{hardware.bandwidth / 1e12:.4g} TB/s = {hardware.ridge:.0f}",
        f"TPOT           = max({decode.count.nbytes / 1e9:.3g} GB / ({hardware.bandwidth / 1e9:,.0f} GB/s{devices}), "
        f"{decode.count.flops / 1e9:,.4g} GFLOP / ({flops / 1e12:.4g} TFLOP/s{devices})){sent} = "
        f"{1e3 * decode.seconds:.2f} ms",
        f"tokens/s       = {load.output} / ({load.output} x {1e3 * decode.seconds:.2f} ms / {users} + "
        f"{1e3 * plan.prefill.seconds:.2f} ms of prefill) = {plan.tokens_per_second:,.0f}",
    ]


def _prefill(plan: Plan) -> str:
    """Of the parameters, those that a token is multiplied by: few of a model's experts, and no embedding table. The
    head computes the last token only."""
    ops = {name: count.flops for name, count in plan.model.step(plan.prefill.shape, plan.kv).count.ops.items()}
    layers = ops.pop("linear", 0.0) + ops.pop("experts", 0.0)
    others = "".join(f" + {flops / 1e12:.3g} of {name}" for name, flops in sorted(ops.items()) if flops)
    each = layers / 2 / plan.load.prompt / 1e9
    return (
        f"prefill        = 2 x {each:.3g} B parameters in layers x {plan.load.prompt:,} tokens = {layers / 1e12:.3g}"
        f"{others} = {plan.prefill.count.flops / 1e12:.3g} TFLOP"
    )


def _experts(plan: Plan) -> list[str]:
    if plan.experts is None:
        return []
    (count, chosen), users = plan.experts, plan.load.users
    read = expected_experts(count, chosen, users)
    return [
        f"experts read   = {count} x (1 - (1 - {chosen} / {count}) ^ {counted(users, 'user')}) = {read:.1f} of each "
        "layer: a token chooses its own"
    ]


def _parallel(plan: Plan) -> list[str]:
    config, tp, pp = plan.model.config, plan.setup.tp, plan.setup.pp
    lines = []
    if tp > 1:
        each = all_reduce_bytes(plan.model, 1, tp) / config.layers
        lines.append(
            f"all-reduce     = 2 a layer x 2 x ({tp} - 1) / {tp} x {config.hidden} columns x 2 bytes = {each:,.0f} "
            "bytes a layer and token"
        )
    if pp > 1:
        chunks = ceil(plan.load.prompt / plan.setup.limits.max_num_batched_tokens)
        lines.append(f"bubble         = ({pp} - 1) / ({chunks} chunks + {pp} - 1) = {plan.bubble:.1%}")
    return lines


def _cost(plan: Plan) -> list[str]:
    cost = plan.cost
    if not cost.price:
        return []
    weighted = cost.prompt_tokens_per_second + cost.output_weight * cost.output_tokens_per_second
    return [
        f"$/M prompt     = ${cost.per_hour:.2f} an hour / 3600 / ({cost.prompt_tokens_per_second:,.0f} prompt tokens/s "
        f"+ {cost.output_weight:g} x {cost.output_tokens_per_second:,.0f} output tokens/s = {weighted:,.0f}) x 1e6 = "
        f"${cost.per_million_prompt:.3f}; an output token costs {cost.output_weight:g} times that",
    ]


def _speculation(plan: Plan) -> list[str]:
    table = plan.speculation
    by = plan.draft.name if plan.draft else "prompt lookup"
    return [
        f"speculation    = (1 - a^(k+1)) / (1 - a) tokens a step / (cost of verifying k + k x {table.draft_cost:.3f}), "
        f"drafts by {by}",
        *table.lines(),
        *([f"  1.00x: no more than {table.missed:.2g} draft tokens are expected to be accepted, "
           "and a GPU's next step is planned meanwhile"] if table.missed else []),
    ]  # fmt: skip
