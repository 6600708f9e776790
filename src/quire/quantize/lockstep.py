"""Forward passes of several batches that meet at every matmul: each matrix is read, and quantized, once, when the
inputs of all batches have been observed. Beside each may run one of the same batch with the stored weights, so that a
hook sees how far the inputs of a matmul are from those of the original model.

Every pass has a thread of its own. Between two matmuls some of them run at once, and observe in the order of batches:
what is summed does not depend on which is faster."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.ops.tensors import StoredTensor
from quire.quantize.eager_ops import MatmulHook
from quire.quantize.input_sources import InputSource
from quire.quantize.threads import cores, divided_among

Forward = Callable[[MatmulHook], object]
Observe = Callable[..., None]  # `observe` of a hook
Read = Callable[[StoredTensor], Any]
Met = Callable[[Sequence[StoredTensor]], None]


class ComparingHook(MatmulHook, Protocol):
    def compare(self, parts: Sequence[StoredTensor], x: Any, stream: Any, original: Any, original_stream: Any) -> None:
        """In place of `observe`: x and the stream, and what they are in the original model. Inputs of experts are of
        other tokens there."""


class _Stopped(BaseException):
    """Another pass failed: this one ends too."""


class _Pass:
    """One forward pass, which is also the hook that it sees. `slots`: of the passes that run at once; `before`: the
    pass that observes before this one."""

    def __init__(
        self, forward: Forward, observe: Observe, slots: threading.Semaphore, num_threads: int, before: "_Pass | None"
    ) -> None:
        self._forward, self._observe, self._slots, self._num_threads = forward, observe, slots, num_threads
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

    def observe(
        self, parts: Sequence[StoredTensor], x: Any, source: InputSource | None = None, stream: Any = None
    ) -> None:
        if self._before is not None:
            self._before._observed.acquire()
        with divided_among(cores()):  # which others that wait leave free
            self._observe(parts, x, source, stream)
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


class _Pair:
    """What two passes of a batch observe. The original one is ahead of the other, by a matmul at most."""

    def __init__(self, hook: ComparingHook) -> None:
        self._hook = hook
        self._original: tuple[Any, Any] = (None, None)

    def keep(
        self, parts: Sequence[StoredTensor], x: Any, source: InputSource | None = None, stream: Any = None
    ) -> None:
        self._original = (x, stream)

    def compare(
        self, parts: Sequence[StoredTensor], x: Any, source: InputSource | None = None, stream: Any = None
    ) -> None:
        self._hook.compare(parts, x, stream, *self._original)
        self._original = (None, None)


def run_in_lockstep(forwards: Sequence[Forward], hook: MatmulHook, met: Met | None = None, at_once: int = 1) -> None:
    """`met`: called after each matmul that all have passed. `at_once`: passes that run at the same time."""
    _run([], _side_by_side([(forward, hook.observe) for forward in forwards], at_once), hook, None, met)


def run_beside_originals(
    forwards: Sequence[Forward],
    others: Sequence[Forward],
    hook: ComparingHook,
    read: Read,
    met: Met | None = None,
    at_once: int = 1,
) -> None:
    """`forwards`: each beside one with the weights that `read` gives; `others` are not compared."""
    pairs = [(forward, _Pair(hook)) for forward in forwards]
    originals = _side_by_side([(forward, pair.keep) for forward, pair in pairs], at_once)
    compared = [(forward, pair.compare) for forward, pair in pairs]
    passes = _side_by_side([*compared, *((forward, hook.observe) for forward in others)], at_once)
    _run(originals, passes, hook, read, met)


def _side_by_side(observed: Sequence[tuple[Forward, Observe]], at_once: int) -> list[_Pass]:
    at_once = min(at_once, len(observed))
    slots = threading.Semaphore(at_once)
    passes: list[_Pass] = []
    for forward, observe in observed:
        passes.append(_Pass(forward, observe, slots, -(-cores() // at_once), passes[-1] if passes else None))
    return passes


def _run(
    originals: Sequence[_Pass], passes: Sequence[_Pass], hook: MatmulHook, read: Read | None, met: Met | None
) -> None:
    """`originals` get their weights from `read`, and go to the next matmul before `passes` do."""
    try:
        _resume_all(originals, ())
        _resume_all(passes, ())
        while (parts := passes[0].parts) is not None:
            names = [part.name for part in parts]
            for each in (*originals, *passes):
                assert each.parts is not None and [part.name for part in each.parts] == names, (
                    "batches take other paths"
                )
            if read is not None:
                _resume_all(originals, [read(part) for part in parts])
            _resume_all(passes, hook.weights(parts))
            if met is not None:
                met(parts)
    finally:
        for each in (*originals, *passes):
            each.stop()


def _resume_all(passes: Sequence[_Pass], matrices: Sequence[Any]) -> None:
    for each in passes:  # in this order: each waits until those before it have observed
        each.resume(matrices)
    for each in passes:
        each.wait()
