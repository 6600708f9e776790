"""The speed that a machine had at each moment, by the steps that an engine wrote down (quire/cli/step_log.py)."""

from bisect import bisect_right
from itertools import accumulate

from quire.planning.replica import Replica
from quire.planning.step_log import LoggedStep
from quire.planning.step_times import ServingCosts, StepTimes, StepWork

NEIGHBOURS = 4  # steps before and after one that tell how fast the machine was


class WithLoop:
    """Times of a GPU whose engine's loop may take longer than the device."""

    def __init__(self, device: StepTimes, costs: ServingCosts) -> None:
        self._device, self._costs = device, costs

    def seconds(self, work: StepWork) -> float:
        costs = self._costs
        loop = costs.step + costs.row * work.num_rows + (costs.prompts if work.num_chunks else 0.0)
        return max(self._device.seconds(work), loop)


class ObservedTimes:
    """Times of a model, times what steps of a real run took longer than it says at the same moment."""

    def __init__(self, model: StepTimes, steps: list[LoggedStep], begin: float) -> None:
        """`begin`: the run's second 0, as time.perf_counter()."""
        self.replica: Replica | None = None  # whose clock it is
        self._model = model
        self._moments = [step.began - begin for step in steps]
        real = [0.0, *accumulate(step.seconds for step in steps)]
        said = [0.0, *accumulate(model.seconds(step.work) for step in steps)]
        bounds = [(max(0, i - NEIGHBOURS), min(len(steps), i + NEIGHBOURS + 1)) for i in range(len(steps))]
        self._factors = [(real[end] - real[start]) / (said[end] - said[start]) for start, end in bounds]

    def seconds(self, work: StepWork) -> float:
        assert self.replica is not None
        index = bisect_right(self._moments, self.replica.clock) - 1
        return self._factors[max(index, 0)] * self._model.seconds(work)
