"""Plans of configurations that are worked out by hand, or published."""

import time

import pytest

from quire.planning.cost import Cost
from quire.planning.drafting import Draft
from quire.planning.hardware import HARDWARE, find_hardware
from quire.planning.memory import EngineLimits, Load, cache_bytes, sequence_bytes, users_that_fit
from quire.planning.packed_bytes import GpuFormat
from quire.planning.plan import Plan, Setup
from quire.planning.planned_model import PlannedModel, plan_model
from quire.planning.planner import make_plan
from quire.planning.roofline import all_reduce_bytes, pipeline_bubble, step_ceiling
from quire.planning.scaling import gathered_columns, scaling
from quire.planning.shape_checkpoint import shape_checkpoint
from quire.planning.shapes import shape_config
from quire.planning.speculation import SpeculationTable, expected_tokens
from quire.planning.step_counter import StepShape

GIB = 1 << 30


def planned(shape: str, format_name: str = "bfloat16") -> PlannedModel:
    return plan_model(shape, shape_checkpoint(shape_config(shape), format_name), GpuFormat())


def plan_of(
    shape: str, format_name: str = "bfloat16", hardware: str = "h100", draft: str = "", users: int = 8, **setup: int
) -> Plan:
    model = planned(shape, format_name)
    small = planned(draft) if draft else None
    of_draft = Draft(small, small.kv_spec("bfloat16"), 4) if small else None
    load = Load(users=users, context=4096, prompt=1024, output=256)
    return make_plan(model, model.kv_spec("bfloat16"), load, Setup(hardware=find_hardware(hardware), **setup), of_draft)


@pytest.mark.parametrize(
    ("shape", "dtype", "per_token"),
    [
        ("llama-3.1-70b", "float16", 80 * 2 * 8 * 128 * 2),  # 320 KiB: 1.25 GiB for 4,096 tokens
        ("llama-2-7b", "float16", 32 * 2 * 32 * 128 * 2),  # MHA: 512 KiB
        ("llama-3.1-8b", "fp8", 32 * 2 * 8 * 128),
        ("llama-3.1-8b", "int8", 32 * 2 * 8 * (128 + 4)),  # an fp32 scale a head
        ("deepseek-v3", "bfloat16", 61 * 576 * 2),  # MLA: 70,272 bytes
    ],
)
def test_a_token_takes_the_cache_that_is_worked_out_by_hand(shape: str, dtype: str, per_token: int) -> None:
    model = planned(shape)
    kv = model.kv_spec(dtype)
    assert kv.block_bytes == 16 * per_token
    assert sequence_bytes(model, kv, 4096) == 4096 * per_token


def test_layers_with_a_window_keep_what_it_reaches() -> None:
    model = planned("gpt-oss-20b")
    kv, users, context = model.kv_spec("float16"), 4, 32768
    layer = 2 * 8 * 64 * 2 * 16  # bytes of 16 tokens
    pages = 2 * users * 10 + 512 // 16  # twice 127 tokens and a block, and a step
    room = cache_bytes(model, kv, users, context)
    assert room == users * context // 16 * 12 * layer + pages * 12 * layer
    two_steps = room + 512 // 16 * 12 * layer  # in flight, on a GPU
    assert cache_bytes(model, kv, users, context, ahead=1) == two_steps
    assert users_that_fit(model, kv, context, room) == users
    assert users_that_fit(model, kv, context, room - 1) == users - 1
    assert room // sequence_bytes(model, kv, context) == 2  # if all layers kept everything


def test_a_decode_step_reads_every_weight_once_and_does_two_operations_with_it() -> None:
    model = planned("llama-2-7b")
    count = model.step(StepShape(1, 1, 1), model.kv_spec("float16")).count
    read = model.num_parameters - 32000 * 4096 - 65 * 4096  # not the table of embeddings, and no norms
    assert count.total.weight_bytes == 2 * read
    assert count.ops["linear"].flops + count.ops["head"].flops == 2 * read


def test_ridge_points_are_those_of_the_data_sheets() -> None:
    assert find_hardware("h100").ridge == pytest.approx(989e12 / 3.35e12)
    assert find_hardware("a100-80gb").ridge == pytest.approx(312e12 / 2.039e12)
    assert all(row.ridge > 1 for row in HARDWARE.values())


def test_decode_of_a_70b_on_two_h100_is_bound_by_reading_its_weights() -> None:
    step = plan_of("llama-3.1-70b", "fp8", tp=2).decode[0]
    assert step.bound == "memory"
    moved = step.count.weight_bytes + step.count.kv_bytes
    assert step.memory_seconds == pytest.approx(moved / (2 * 3.35e12))


def test_an_all_reduce_sends_twice_the_hidden_states_less_a_share() -> None:
    model = planned("llama-3.1-8b")
    assert all_reduce_bytes(model, 1, 4) == 32 * 2 * (2 * 3 / 4) * 4096 * 2
    alone = step_ceiling(model, model.kv_spec("auto"), find_hardware("h100"), StepShape(8, 1, 100))
    assert alone.link_seconds == 0


def test_gathers_are_the_values_of_a_layer_that_ranks_have_in_common() -> None:
    """Attention's outputs, theirs, the activated hidden values and theirs; embeddings and logits once."""
    model = planned("llama-3.1-8b")
    columns = gathered_columns(model, 2, 16, "bfloat16")
    assert columns == 32 * (4096 + 4096 + 14336 + 4096) + 4096 + 128256
    plans = [plan_of("llama-3.1-8b", tp=tp) for tp in (1, 2, 4)]
    alone, two, four = scaling(plans)
    assert alone.gathered_bytes == 0 and four.gathered_bytes == 0.75 * 2 * 8 * columns
    assert four.seconds == pytest.approx(four.plan.at_load.memory_seconds + four.gathered_bytes / 450e9)
    assert alone.seconds > two.seconds > four.seconds and two.gathered_bytes > two.reduced_bytes


def test_the_bubble_of_a_pipeline_shrinks_with_microbatches() -> None:
    assert pipeline_bubble(4, 1) == 0.75
    assert pipeline_bubble(4, 13) == 3 / 16
    assert plan_of("llama-3.1-8b", pp=2).bubble == pytest.approx(1 / 3)  # 1,024 tokens in two chunks of 512
    assert pipeline_bubble(1, 8) == 0


def test_a_million_tokens_cost_what_an_hour_of_them_costs() -> None:
    cost = Cost(price=3.6, num_devices=2, prompt_tokens_per_second=600, output_tokens_per_second=100)
    assert cost.per_day == pytest.approx(172.8)
    assert cost.per_million_prompt == pytest.approx(7.2 / 3600 / 1000 * 1e6)  # 600 + 4 x 100 weighted tokens a second
    assert cost.per_million_output == pytest.approx(4 * cost.per_million_prompt)


def test_speculation_pays_by_tokens_over_costs() -> None:
    assert expected_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)
    assert expected_tokens(1.0, 3) == 4
    table = SpeculationTable(draft_cost=0.1, verify_costs={1: 1.0, 4: 1.2})
    assert table.speedup(0.5, 1) == pytest.approx(1.5 / 1.1)
    assert table.speedup(0.5, 4) == pytest.approx((1 - 0.5**5) / 0.5 / 1.6)
    assert table.best(0.5)[0] == 1 and table.best(0.9)[0] == 4
    assert SpeculationTable(0.9, {2: 1.5}).best(0.3) == (0, 1.0)
    assert len(table.lines()) == 7


def test_a_draft_model_takes_memory_and_costs_what_it_reads() -> None:
    plan = plan_of("llama-3.1-8b", draft="llama-3.2-1b", users=1)
    assert plan.draft is not None
    weights, kv = plan.draft.model.weight_bytes, 4096 * 16 * 2 * 8 * 64 * 2
    assert plan.memory.draft == weights + kv
    small, large = plan.draft.model, plan.model
    assert plan.speculation.draft_cost == pytest.approx(small.weight_bytes / large.weight_bytes, rel=0.3)
    assert any("llama-3.2-1b" in advice.what for advice in plan.advice)
    many = plan_of("llama-3.1-8b", draft="llama-3.2-1b").speculation
    assert many.draft_cost == pytest.approx(plan.speculation.draft_cost, rel=0.1), "one step verifies the drafts of all"
    assert many.speedup(0.05, 3) == 1 < many.speedup(0.5, 3) < many.speedup(0.95, 4)
    lookup = plan_of("llama-3.1-8b").speculation
    assert lookup.speedup(0.5, 3) == 1 < lookup.speedup(0.6, 3), "each sequence misses a step of its own"


def test_a_head_has_one_layer_and_the_logits_of_the_model() -> None:
    model = planned("llama-3.1-8b")
    head = Draft(model, model.kv_spec("bfloat16"), 3, is_head=True)
    layer = 2 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    assert head.weight_bytes == pytest.approx(layer, rel=1e-3)
    assert head.cache_bytes(2, 1600) == 2 * 1600 * 2 * 8 * 128 * 2
    times = head.times(find_hardware("h100"), eight_bit=False)
    assert times.weight_bytes == pytest.approx(layer + 2 * 4096 * 128256, rel=1e-3)


def test_replicas_and_devices_are_advised() -> None:
    model = planned("llama-3.1-70b")
    setup = Setup(hardware=find_hardware("h100"), rate=100)
    plan = make_plan(model, model.kv_spec("bfloat16"), Load(users=32, context=2048), setup)
    flags = [advice.flags for advice in plan.advice]
    assert "--tp 4" in flags  # 131 GiB of weights and 20 GiB of cache: two H100 have 143 GiB
    assert any("replicas" in advice.what for advice in plan.advice)


def test_the_slowest_shapes_are_planned_in_about_two_seconds() -> None:
    for shape, format_name in (("deepseek-v3", "q4_k_m"), ("gpt-oss-120b", "mxfp4")):
        began = time.process_time()
        planned(shape, format_name)
        assert time.process_time() - began < 4, shape  # twice what it takes on a busy machine


def test_limits_are_checked() -> None:
    from quire.core.errors import BadRequest

    for wrong in ({"max_num_batched_tokens": 0}, {"num_loras": -1}, {"num_drafts": -2}):
        with pytest.raises(BadRequest, match="must be at least"):
            EngineLimits(**wrong)
    for name, value in (("tp", 0), ("pp", 0), ("rate", -1.0)):
        with pytest.raises(BadRequest, match=name):
            Setup(hardware=find_hardware("h100"), **{name: value})


def test_mistral_has_no_window_since_its_second_version() -> None:
    """The shape had v0.3's vocabulary and v0.1's window of 4,096 tokens, and an eighth of its KV cache."""
    model = planned("mistral-7b")
    kv = model.kv_spec("bfloat16")
    assert not any(model.config.windows)
    assert cache_bytes(model, kv, 1, 32768) == 4 * GIB, "32 layers x 2 x 8 heads x 128 columns x 2 bytes x 32,768"
