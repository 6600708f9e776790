"""Attention whose layers differ in the number or the width of heads, in a cache that is the same for all layers.

Heads narrower than those of the cache are padded with zeros, which add nothing to scores and are cut off the output;
where a layer has fewer key heads than the cache, each is written several times, for its share of the query heads."""

from quire.ops.opset import OpSet, Value


def widened(ops: OpSet, x: Value, heads: int, width: int, cached: int, times: int = 1) -> Value:
    """x [T, heads * width] -> [T, heads * times * cached]: every head padded to `cached` columns, `times` times."""
    if width == cached and times == 1:
        return x
    parts = ops.split(x, (width,) * heads)
    padding = []
    if pad := cached - width:
        zeros = ops.scale(parts[0], 0.0)
        padding = [zeros] * (pad // width) + (
            [ops.split(zeros, (pad % width, width - pad % width))[0]] if pad % width else []
        )
    return ops.concat([piece for part in parts for _ in range(times) for piece in (part, *padding)])


def with_zero_heads(ops: OpSet, x: Value, heads: int, width: int, wanted: int) -> Value:
    """x [T, heads * width] -> [T, wanted * width]: further heads of zeros behind the last."""
    if heads == wanted:
        return x
    first = x if heads == 1 else ops.split(x, (width, (heads - 1) * width))[0]
    return ops.concat([x, *[ops.scale(first, 0.0)] * (wanted - heads)])


def narrowed(ops: OpSet, x: Value, heads: int, width: int, cached: int) -> Value:
    """x [T, heads * cached] -> [T, heads * width]: the first `width` columns of every head."""
    if width == cached:
        return x
    return ops.concat(ops.split(x, (width, cached - width) * heads)[::2])
