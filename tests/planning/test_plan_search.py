"""The cheapest configuration that keeps limits on latency is found, and why others are not."""

import json

import pytest

from quire.cli.main import main
from quire.cli.plan import users_rate
from quire.core.errors import BadRequest
from quire.planning.hardware import find_hardware
from quire.planning.memory import Load
from quire.planning.packed_bytes import GpuFormat
from quire.planning.planned_model import PlannedModel, plan_model
from quire.planning.queueing import SATURATED, estimate
from quire.planning.search import Demand, search
from quire.planning.shape_checkpoint import shape_checkpoint
from quire.planning.shapes import shape_config
from quire.planning.slo import Slo, read_slo
from quire.planning.step_times import StepWork


class FixedTimes:
    """A millisecond a step, and a tenth for each token."""

    def seconds(self, work: StepWork) -> float:
        return 0.001 + 0.0001 * work.num_tokens


def counted(shape: str) -> PlannedModel:
    return plan_model(shape, shape_checkpoint(shape_config(shape), "bfloat16"), GpuFormat())


def test_limits_are_read_with_their_units() -> None:
    assert read_slo("ttft=500ms, tpot=40ms,e2e=2m") == Slo({"ttft": 0.5, "tpot": 0.04, "e2e": 120.0})
    assert Slo({"ttft": 1.0}).misses({"ttft": 2.0}) == ["ttft p99 2 s > 1 s"]
    for wrong, hint in (
        ("tfft=1s", "did you mean ttft"),
        ("ttft=-1s", "above 0"),
        ("ttft=0ms", "above 0"),
        ("", "ttft"),
    ):
        with pytest.raises(BadRequest) as refusal:
            read_slo(wrong)
        assert hint in str(refusal.value.hint)


def test_an_engine_is_saturated_where_requests_come_faster_than_it_serves() -> None:
    light = estimate(FixedTimes(), 0.1, 100, 10, 64, 512)
    heavy = estimate(FixedTimes(), 20, 100, 10, 64, 512)
    assert light.ttft < heavy.ttft < 1 and light.num_seqs <= heavy.num_seqs
    assert light.tpot == pytest.approx(0.0011, rel=0.05)
    assert estimate(FixedTimes(), 1000, 100, 10, 64, 512) is SATURATED


def test_the_cheapest_hardware_that_serves_is_found_and_the_rest_explained() -> None:
    model = counted("llama-3.2-1b")
    demand = Demand(rate=4, prompt=256, output=32, slo=read_slo("ttft=300ms,tpot=20ms"))
    machines = [find_hardware(name) for name in ("h100", "l4", "raspberry-pi-5")]
    found = search(demand, machines, lambda hardware, name: model, formats=["bfloat16"], num_results=2)
    best = found.feasible[0]
    assert best.hardware.name == "l4" and best.replicas == best.tp == 1 and best.per_hour == 0.8
    assert best.summary is not None and best.summary.ttft[99] <= 0.3 and best.summary.tpot[99] <= 0.02
    assert best.per_million(demand) == pytest.approx(0.8 / 3600 / (4 * 288) * 1e6)
    assert [one.hardware.name for one in found.near_misses] == ["raspberry-pi-5"]
    assert "ttft p99" in found.near_misses[0].why_not


def test_a_higher_rate_takes_more_replicas() -> None:
    model = counted("llama-3.1-8b")
    slo = read_slo("tpot=150ms")
    replicas = [
        search(
            Demand(rate=rate, prompt=128, output=16, slo=slo), [find_hardware("l4")], lambda hardware, name: model,
            formats=["bfloat16"], kv_dtype="bfloat16", tp=1, num_results=1,
        ).feasible[0].replicas
        for rate in (2, 400)
    ]  # fmt: skip
    assert replicas[0] == 1 and replicas[1] > 4


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--shape", "llama-3.2-1b", "--hardware", "l4,raspberry-pi-5", "--prompt", "128", "--output", "16"]
    assert main([*flags, "--format", "q8_0", "--slo", "ttft=1s,tpot=50ms", "--users", "4"]) == 0
    said = capsys.readouterr().out
    assert "99 of 100 within ttft 1000 ms" in said and "l4" in said and "what fails, and why" in said
    assert main([*flags, "--format", "q8_0", "--slo", "tpot=1ms", "--rate", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["feasible"] == [] and {one["hardware"] for one in found["near_misses"]} == {"l4", "raspberry-pi-5"}


def test_users_whose_answers_have_no_limit_read_twenty_tokens_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    load = Load(users=200, context=1280, prompt=1024, output=256)
    assert users_rate(load, read_slo("ttft=500ms,tpot=40ms")) == pytest.approx(200 / (0.5 + 256 * 0.04))
    assert not capsys.readouterr().err
    assert users_rate(load, read_slo("ttft=500ms")) == pytest.approx(200 / (0.5 + 256 * 0.05))
    assert "at 20 tokens a second" in capsys.readouterr().err
