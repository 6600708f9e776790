"""Kernels are compiled several at a time before a forward pass needs them, instead of one after the other when it does.

A rehearsal calls a forward pass whose launches do nothing but compile: torch's own ops run, on memory that no kernel
has written, so nothing may look at values on the host, or index by what a kernel computes. Triton keeps what it has
compiled on disk, by the kernel's source, its constants and its own version; then a rehearsal loads them. The compiler
does most of its work without the GIL."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton
from triton.runtime.jit import JITFunction

log = logging.getLogger("quire.gpu")

MAX_THREADS = 16
_rehearsal: ContextVar["Rehearsal | None"] = ContextVar("rehearsal", default=None)


class PendingKernel:
    """Takes the place of a kernel until it is compiled: a launch from another thread waits for it."""

    def __init__(self, future: "Future[Any]") -> None:
        self.future = future

    def result(self) -> Any:
        return self.future.result()


class Rehearsal:
    """The kernels that are being compiled."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._pending: list[tuple[dict[Any, Any], Any, PendingKernel]] = []

    @property
    def num_kernels(self) -> int:
        return len(self._pending)

    def submit(
        self, function: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attrs: Any
    ) -> Any:
        kernels, _, target, _, _ = function.device_caches[device]

        def compile_and_load() -> Any:
            triton.runtime.driver.active.set_current_device(device)  # a thread has one of its own
            source = function.ASTSource(function, signature, constants, attrs)
            kernel = function.compile(source, target=target, options=options.__dict__)
            kernel._init_handles()
            return kernel

        kernels[key] = PendingKernel(self._pool.submit(compile_and_load))
        self._pending.append((kernels, key, kernels[key]))
        return kernels[key]

    def finish(self) -> None:
        """A kernel that does not compile is left to its first launch, which says why."""
        for kernels, key, pending in self._pending:
            try:
                kernels[key] = pending.result()
            except Exception:
                del kernels[key]


def compile_ahead(passes: Iterable[Callable[[], object]]) -> int:
    """Rehearse the passes, and compile what they launch. -> the number of kernels that were compiled or loaded"""
    if triton.knobs.runtime.interpret or not hasattr(JITFunction, "_do_compile"):
        return 0
    began = time.monotonic()
    threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool, _launches_rehearsed():
        rehearsal = Rehearsal(pool)
        token = _rehearsal.set(rehearsal)
        try:
            for rehearsed in passes:
                rehearsed()
        except Exception as error:  # a Triton of another shape, or what the pass itself will say
            log.info("not all kernels are compiled ahead: %s", error)
        finally:
            _rehearsal.reset(token)
            rehearsed_in = time.monotonic() - began
            rehearsal.finish()
    if rehearsal.num_kernels:
        log.info(
            "%d kernels compiled or loaded in %.1f s, %d at a time (%.1f s to find out which)",
            rehearsal.num_kernels, time.monotonic() - began, threads, rehearsed_in,
        )  # fmt: skip
    return rehearsal.num_kernels


@contextmanager
def _launches_rehearsed() -> Iterator[None]:
    """Launches of the thread that rehearses compile only; those of other threads are as ever."""
    run, do_compile = JITFunction.run, JITFunction._do_compile

    def run_or_rehearse(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or _rehearsal.get() is not None, **kwargs)

    def compile_or_submit(
        self: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: bool
    ) -> Any:
        if (rehearsal := _rehearsal.get()) is not None:
            return rehearsal.submit(self, key, signature, device, constexprs, options, attrs)
        return do_compile(self, key, signature, device, constexprs, options, attrs, warmup)

    JITFunction.run, JITFunction._do_compile = run_or_rehearse, compile_or_submit
    try:
        yield
    finally:
        JITFunction.run, JITFunction._do_compile = run, do_compile
