"""Taps: a wrapper around the op set lets every family's forward pass keep hidden states on the way to its logits."""

from collections.abc import Callable
from typing import Any

from quire.models.draft_head import DraftHead
from quire.ops.opset import OpSet, Value


class TappedOps:
    """An op set, except that the hidden states a head wants are taken, fused and kept before logits."""

    def __init__(self, ops: Any, head: DraftHead) -> None:
        self._ops, self._head = ops, head
        self._taken: dict[int, Value] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def tap(self, x: Value, index: int) -> None:
        if index in self._head.taps:
            self._taken[index] = x

    def logits(self, x: Value, head: Any, batch: Any, *options: Any) -> Value:
        self._ops.keep(self._head.fuse(self._ops, [self._taken[index] for index in self._head.taps]), batch)
        return self._ops.logits(x, head, batch, *options)


def with_taps(forward: Callable[[Any, Any], Value], head: DraftHead) -> Callable[[Any, Any], Value]:
    def tapped(ops: OpSet, batch: Any) -> Value:
        return forward(TappedOps(ops, head), batch)

    return tapped
