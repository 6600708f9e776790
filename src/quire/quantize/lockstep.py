"""Forward passes of several batches that meet at every matmul: each matrix is read, and quantized, once, when the
inputs of all batches have been observed. Beside each may run one of the same batch with the stored weights, so that a
hook sees how far the inputs of a matmul are from those of the original model.

Every pass has a thread of its own, and one thread runs at a time: the threads only keep the passes' places."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.ops.tensors import StoredTensor
from quire.quantize.eager_ops import MatmulHook
from quire.quantize.input_sources import InputSource

Forward = Callable[[MatmulHook], object]
Observe = Callable[..., None]  # `observe` of a hook
Read = Callable[[StoredTensor], Any]


class ComparingHook(MatmulHook, Protocol):
    def compare(self, parts: Sequence[StoredTensor], x: Any, stream: Any, original: Any, original_stream: Any) -> None:
        """In place of `observe`: x and the stream, and what they are in the original model. Inputs of experts are of
        other tokens there."""


class _Stopped(BaseException):
    """Another pass failed: this one ends too."""


class _Pass:
    """One forward pass, which is also the hook that it sees. `original`: with weights as they are stored."""

    def __init__(self, forward: Forward, observe: Observe, *, original: bool = False) -> None:
        self._forward, self.observe, self.original = forward, observe, original
        self._run, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._body, daemon=True)
        self._given: Sequence[Any] | None = None
        self._error: BaseException | None = None
        self._stopping = False
        self.parts: Sequence[StoredTensor] | None = None  # whose matrices it waits for; None: it is done

    def start(self) -> None:
        self._thread.start()
        self._wait()

    def resume(self, matrices: Sequence[Any]) -> None:
        """Until the next matmul, or the end."""
        self._given = matrices
        self._run.release()
        self._wait()

    def stop(self) -> None:
        """At the next matmul, wherever the pass is: after Ctrl-C it may be between two."""
        if self._thread.is_alive():
            self._stopping = True
            self._run.release()
            self._thread.join()

    def _wait(self) -> None:
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def _body(self) -> None:
        try:
            self._forward(self)
        except _Stopped:
            return
        except BaseException as error:  # raised again by the thread that waits
            self._error = error
        self.parts = None
        self._paused.release()

    def weights(self, parts: Sequence[StoredTensor]) -> Sequence[Any]:
        self.parts = parts
        self._paused.release()
        self._run.acquire()
        if self._stopping:
            raise _Stopped
        given, self._given = self._given, None
        assert given is not None
        return given


class _Pair:
    """Two passes of a batch. The original one is ahead of the other, by a matmul at most."""

    def __init__(self, forward: Forward, hook: ComparingHook) -> None:
        self._hook = hook
        self._original: tuple[Any, Any] = (None, None)
        self.passes = [_Pass(forward, self._keep, original=True), _Pass(forward, self._compare)]

    def _keep(
        self, parts: Sequence[StoredTensor], x: Any, source: InputSource | None = None, stream: Any = None
    ) -> None:
        self._original = (x, stream)

    def _compare(
        self, parts: Sequence[StoredTensor], x: Any, source: InputSource | None = None, stream: Any = None
    ) -> None:
        self._hook.compare(parts, x, stream, *self._original)
        self._original = (None, None)


def run_in_lockstep(
    forwards: Sequence[Forward], hook: MatmulHook, met: Callable[[Sequence[StoredTensor]], None] | None = None
) -> None:
    """`met`: called after each matmul that all have passed."""
    _run([_Pass(forward, hook.observe) for forward in forwards], hook, None, met)


def run_beside_originals(
    forwards: Sequence[Forward],
    others: Sequence[Forward],
    hook: ComparingHook,
    read: Read,
    met: Callable[[Sequence[StoredTensor]], None] | None = None,
) -> None:
    """`forwards`: each beside one with the weights that `read` gives; `others` are not compared."""
    pairs = [each for forward in forwards for each in _Pair(forward, hook).passes]
    _run([*pairs, *(_Pass(forward, hook.observe) for forward in others)], hook, read, met)


def _resume(passes: Sequence[_Pass], matrices: Sequence[Any]) -> None:
    for each in passes:
        each.resume(matrices)


def _run(
    passes: Sequence[_Pass],
    hook: MatmulHook,
    read: Read | None,
    met: Callable[[Sequence[StoredTensor]], None] | None,
) -> None:
    try:
        for each in passes:
            each.start()
        while (parts := passes[0].parts) is not None:
            names = [part.name for part in parts]
            for each in passes[1:]:
                assert each.parts is not None and [part.name for part in each.parts] == names, (
                    "batches take other paths"
                )
            if read is not None:
                _resume([each for each in passes if each.original], [read(part) for part in parts])
            _resume([each for each in passes if not each.original], hook.weights(parts))
            if met is not None:
                met(parts)
    finally:
        for each in passes:
            each.stop()
