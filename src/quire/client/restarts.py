"""How long an engine that has died waits for its successor, and when there is none."""

MAX_RESTARTS = 5  # in a row, none of which got as far as being ready, or was killed from outside
NUM_QUICK_RESTARTS = 3  # in a row without any output; then each waits longer than the one before
MAX_RESTART_DELAY = 5.0  # seconds
MAX_DELAY_AFTER_KILL = 0.5  # seconds: it is nothing that the engine does wrong


class Restarts:
    """Counts the engines that have died in a row."""

    def __init__(self) -> None:
        self._num_failed = 0  # since one was ready
        self._num_fruitless = 0  # since one had any output
        self._was_killed = False

    def ready(self) -> None:
        self._num_failed = 0

    def gained_output(self) -> None:
        self._num_fruitless = 0

    def died(self, was_killed: bool) -> None:
        """`was_killed`: from outside."""
        self._num_failed += not was_killed
        self._num_fruitless += 1
        self._was_killed = was_killed

    @property
    def are_too_many(self) -> bool:
        return self._num_failed > MAX_RESTARTS

    @property
    def delay(self) -> float:
        """Seconds before the next."""
        num_waits = max(self._num_failed, self._num_fruitless - NUM_QUICK_RESTARTS + 1)
        max_delay = MAX_DELAY_AFTER_KILL if self._was_killed else MAX_RESTART_DELAY
        return min(0.1 * 2 ** min(num_waits, 9), max_delay) if num_waits > 1 else 0
