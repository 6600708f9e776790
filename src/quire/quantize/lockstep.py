"""Forward passes of several batches that meet at every matmul: each matrix is read, and quantized, once, when the
inputs of all batches have been observed.

Every pass has a thread of its own, and one thread runs at a time: the threads only keep the passes' places."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from quire.ops.tensors import StoredTensor
from quire.quantize.eager_ops import MatmulHook
from quire.quantize.input_sources import InputSource

Forward = Callable[[MatmulHook], object]


class _Stopped(BaseException):
    """Another pass failed: this one ends too."""


class _Pass:
    """One forward pass, which is also the hook that it sees."""

    def __init__(self, forward: Forward, hook: MatmulHook) -> None:
        self._forward, self._hook = forward, hook
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

    def observe(self, parts: Sequence[StoredTensor], x: Any, source: InputSource | None = None) -> None:
        self._hook.observe(parts, x, source)

    def weights(self, parts: Sequence[StoredTensor]) -> Sequence[Any]:
        self.parts = parts
        self._paused.release()
        self._run.acquire()
        if self._stopping:
            raise _Stopped
        given, self._given = self._given, None
        assert given is not None
        return given


def run_in_lockstep(
    forwards: Sequence[Forward], hook: MatmulHook, met: Callable[[Sequence[StoredTensor]], None] | None = None
) -> None:
    """`met`: called after each matmul that all have passed."""
    passes = [_Pass(forward, hook) for forward in forwards]
    try:
        for each in passes:
            each.start()
        while (parts := passes[0].parts) is not None:
            names = [part.name for part in parts]
            for each in passes[1:]:
                assert each.parts is not None and [part.name for part in each.parts] == names, (
                    "batches take other paths"
                )
            matrices = hook.weights(parts)
            for each in passes:
                each.resume(matrices)
            del matrices
            if met is not None:
                met(parts)
    finally:
        for each in passes:
            each.stop()
