"""Rates, and what they are of a machine's ceilings."""

import time
from pathlib import Path

import pytest
from benchmarks.cases import CASES, MAX_LENGTH, Case
from benchmarks.ceilings import Ceilings, Work, work_of
from benchmarks.peers.worker import measure
from benchmarks.speed import share_per_token
from benchmarks.workloads import WORKLOADS


class Scripted:
    """One prompt a step, then one token of everyone; every step takes a millisecond on a clock of its own."""

    vocab_size = 1000

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def submit(self, prompts: list[list[int]], num_output: int) -> None:
        assert all(100 <= token < 900 for prompt in prompts for token in prompt)
        self.waiting, self.running = len(prompts), len(prompts)

    def step(self) -> int:
        self.now += 0.001
        if self.waiting:
            self.waiting -= 1
            return 1
        return self.running


@pytest.mark.parametrize(("counts", "rate"), [("prompt", 8 / 0.004), ("decode", 16 / 0.004), ("whole", 20 / 0.008)])
def test_rates(monkeypatch: pytest.MonkeyPatch, counts: str, rate: float) -> None:
    case = Case("four of two tokens", 4, 2, 5, counts)  # type: ignore[arg-type]
    assert measure(Scripted(monkeypatch), case, seed=1) == pytest.approx(rate)


def test_who_decodes_beside_prompts_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes in a prompt, in 10 ms, until all are there; then a step takes 1 ms, and who began first ends."""
    engine = Scripted(monkeypatch)
    gains = iter([(1, 10), (2, 10), (3, 10), (4, 10), (4, 1), (3, 1), (2, 1), (1, 1)])

    def step() -> int:
        gained, milliseconds = next(gains)
        engine.now += milliseconds / 1000
        return gained

    monkeypatch.setattr(engine, "step", step)
    assert measure(engine, Case("", 4, 2, 5, "decode"), seed=1) == pytest.approx(4 / 0.001)


def test_every_case_fits() -> None:
    assert all(case.num_prompt + case.num_output <= MAX_LENGTH for case in CASES)


def test_shares_of_the_ceilings() -> None:
    work = Work(weight_bytes=100, layer_macs=80, head_macs=20, kv_bytes=1)
    ceilings = Ceilings(gigabytes=1e-9 * 1000, int8_gigamacs=1e-9 * 1000, instruction="none")
    assert share_per_token(Case("", 1, 16, 65, "decode"), work, ceilings) == pytest.approx((100 + 48.5) / 1000)
    assert share_per_token(Case("", 32, 16, 17, "decode"), work, ceilings) == pytest.approx(0.1)
    assert share_per_token(Case("", 1, 20, 1, "prompt"), work, ceilings) == pytest.approx(0.081)
    assert share_per_token(Case("", 32, 128, 128, "whole"), work, ceilings) is None


def test_the_default_models_work(default_model: Path) -> None:
    work = work_of(default_model)
    assert work.layer_macs == pytest.approx(106.2e6, rel=1e-3)
    assert work.head_macs == 49152 * 576
    assert work.kv_bytes == 30 * 2 * 3 * 64 * 2
    assert work.weight_bytes == pytest.approx(106.2e6 * 20 / 32 + 49152 * 576 * 34 / 32, rel=1e-3)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_workloads_share_what_they_say_and_nothing_else(workload: object) -> None:
    assert isinstance(workload, type(WORKLOADS[0]))
    prose = list(range(100_000))
    asks = workload.asks(prose, seed=1)
    assert len(asks) == workload.num_requests
    assert len({tuple(ask.prompt[: workload.num_shared]) for ask in asks}) == 1
    assert len({tuple(ask.prompt[workload.num_shared :][:1]) for ask in asks}) == len(asks)
    assert {len(ask.prompt) for ask in asks} == {workload.num_shared + workload.num_prompt}
    assert asks != workload.asks(prose, seed=2)
    assert asks == workload.asks(prose, seed=1)
