"""Sequences whose next token depends on a mask, and so on the token before."""

from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.plan import SampledRow, StepOutput, StepPlan
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.structured import Structured

EOS = 2


def scheduler(ahead: int) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, block_size=4, max_model_len=64, max_queued=9)
    return Scheduler(limits, 40, ahead=ahead)


def request(name: str, structured: Structured | None, **params: object) -> Request:
    asked = SamplingParams(max_tokens=8, seed=0, structured=structured, **params)  # type: ignore[arg-type]
    return Request(id=name, prompt_ids=[5, 6, 7], params=asked, eos_ids=[EOS])


def rows(plan: StepPlan) -> list[int]:
    return [run.row for run in plan.runs]


def output(plan: StepPlan, token: int) -> StepOutput:
    return StepOutput(plan.step, [SampledRow(row, [token]) for row in rows(plan)])


def test_where_plans_run_ahead_a_guided_sequence_waits_for_its_token() -> None:
    """Its mask cannot be made before that is known. Others go on."""
    deciding = scheduler(ahead=1)
    deciding.add(request("free", None), 0.0)
    deciding.add(request("guided", Structured("regex", "a*")), 0.0)
    first, second = deciding.schedule(), deciding.schedule()
    assert (rows(first), rows(second)) == ([0, 1], [0])
    deciding.update(output(first, 9))
    third = deciding.schedule()
    assert rows(third) == [0, 1]
    assert [run.start for run in third.runs] == [4, 3]


def test_the_end_of_a_language_ends_an_answer_however_short() -> None:
    for wishes in ({}, {"ignore_eos": True}, {"min_tokens": 5}):
        deciding = scheduler(ahead=0)
        deciding.add(request("guided", Structured("regex", "a"), **wishes), 0.0)
        (event,) = deciding.update(output(deciding.schedule(), EOS))
        assert (event.finish_reason, event.stop_token, deciding.has_work) == ("stop", EOS, False)
    deciding.add(request("free", None, min_tokens=5), 0.0)
    (event,) = deciding.update(output(deciding.schedule(), EOS))
    assert event.finish_reason is None
