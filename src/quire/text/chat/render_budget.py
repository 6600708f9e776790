"""What rendering a chat template may take: it is a program, and can loop for hours or double a text 40 times."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from quire.core.errors import BadRequest

MAX_SECONDS = 2.0  # of CPU time; a conversation of a megabyte takes a hundredth of that
MAX_CHARACTERS = 1 << 26  # made by all operations together
STEPS_PER_LOOK = 64  # at the clock


class RenderTooLong(BadRequest):
    """The template takes more than its budget."""


class RenderBudget:
    """The rest of what one rendering may take."""

    def __init__(self, seconds: float = MAX_SECONDS, characters: int = MAX_CHARACTERS) -> None:
        self._seconds, self._end = seconds, time.thread_time() + seconds
        self._max_characters = self._characters = characters
        self._steps = 0

    def step(self) -> None:
        """A loop, a macro or a call goes on."""
        self._steps += 1
        if self._steps % STEPS_PER_LOOK == 0 and time.thread_time() > self._end:
            raise RenderTooLong(f"the chat template takes more than {self._seconds:g} s", "send less", param="messages")

    def spend(self, num_characters: int) -> None:
        """Call it before so many are made. An element of a list counts as several."""
        self.step()
        self._characters -= num_characters
        if self._characters < 0:
            raise RenderTooLong(
                f"the chat template makes more than {self._max_characters} characters", "send less", param="messages"
            )


_current: ContextVar[RenderBudget | None] = ContextVar("render_budget", default=None)


@contextmanager
def render_budget(budget: RenderBudget) -> Iterator[None]:
    """Templates that are rendered inside have this budget together."""
    token = _current.set(budget)
    try:
        yield
    finally:
        _current.reset(token)


def current_budget() -> RenderBudget | None:
    return _current.get()
