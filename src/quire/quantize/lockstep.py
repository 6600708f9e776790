"""Forward passes of several batches that meet at every matmul: each matrix is read, and quantized, once, when the
inputs of all batches have been observed.

Every pass has a thread of its own. Between two matmuls some of them run at once, and observe in the order of batches:
what is summed does not depend on which is faster."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from quire.ops.tensors import StoredTensor
from quire.quantize.eager_ops import MatmulHook
from quire.quantize.input_sources import InputSource
from quire.quantize.threads import cores, divided_among

Forward = Callable[[MatmulHook], object]


class _Stopped(BaseException):
    """Another pass failed: this one ends too."""


class _Pass:
    """One forward pass, which is also the hook that it sees. `slots`: of the passes that run at once; `before`: the
    pass that observes before this one."""

    def __init__(
        self, forward: Forward, hook: MatmulHook, slots: threading.Semaphore, num_threads: int, before: "_Pass | None"
    ) -> None:
        self._forward, self._hook, self._slots, self._num_threads = forward, hook, slots, num_threads
        self._before, self._observed = before, threading.Semaphore(0)
        self._run, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._body, daemon=True)
        self._given: Sequence[Any] | None = None
        self._error: BaseException | None = None
        self._stopping = False
        self.parts: Sequence[StoredTensor] | None = None  # whose matrices it waits for; None: it is done

    def resume(self, matrices: Sequence[Any]) -> None:
        """Until the next matmul, or the end; from the start, if it has not begun."""
        self._given = matrices
        self._slots.acquire()
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._run.release()

    def wait(self) -> None:
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """At the next matmul, wherever the pass is: after Ctrl-C it may be between two."""
        if self._thread.is_alive():
            self._stopping = True
            self._run.release()
            self._thread.join()

    def _body(self) -> None:
        try:
            with divided_among(self._num_threads):
                self._forward(self)
        except _Stopped:
            return
        except BaseException as error:  # raised again by the thread that waits
            self._error = error
            self._observed.release()
        self.parts = None
        self._pause()

    def _pause(self) -> None:
        self._slots.release()
        self._paused.release()

    def observe(self, parts: Sequence[StoredTensor], x: Any, source: InputSource | None = None) -> None:
        if self._before is not None:
            self._before._observed.acquire()
        with divided_among(cores()):  # which others that wait leave free
            self._hook.observe(parts, x, source)
        self._observed.release()

    def weights(self, parts: Sequence[StoredTensor]) -> Sequence[Any]:
        self.parts = parts
        self._pause()
        self._run.acquire()
        if self._stopping:
            raise _Stopped
        given, self._given = self._given, None
        assert given is not None
        return given


def run_in_lockstep(
    forwards: Sequence[Forward],
    hook: MatmulHook,
    met: Callable[[Sequence[StoredTensor]], None] | None = None,
    at_once: int = 1,
) -> None:
    """`met`: called after each matmul that all have passed. `at_once`: passes that run at the same time."""
    at_once = min(at_once, len(forwards))
    slots = threading.Semaphore(at_once)
    passes: list[_Pass] = []
    for forward in forwards:
        passes.append(_Pass(forward, hook, slots, -(-cores() // at_once), passes[-1] if passes else None))
    try:
        _resume_all(passes, ())
        while (parts := passes[0].parts) is not None:
            names = [part.name for part in parts]
            for each in passes[1:]:
                assert each.parts is not None and [part.name for part in each.parts] == names, (
                    "batches take other paths"
                )
            _resume_all(passes, hook.weights(parts))
            if met is not None:
                met(parts)
    finally:
        for each in passes:
            each.stop()


def _resume_all(passes: Sequence[_Pass], matrices: Sequence[Any]) -> None:
    for each in passes:  # in this order: each waits until those before it have observed
        each.resume(matrices)
    for each in passes:
        each.wait()
