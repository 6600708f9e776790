"""Recorded values, and the ops that keep states of a sequence: causal convolutions and recurrences.

A value is columns of a storage with one row per token. The number of rows is known only when the tape runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.ops.kv_spec import ConvSpec, KVSpec, StateSpec
from quire.ops.native.liveness import Storage, Use
from quire.ops.opset import Float32, Mamba2Weights, MambaWeights, Wkv7Weights

ViewOf = Callable[["RecordedColumns"], Any]  # the native View of a value
Emit = Callable[[Any, ViewOf], None]  # adds one op to a native Tape


@dataclass(frozen=True, slots=True)
class RecordedColumns:
    """A recorded value: columns [first, first + columns) of a storage."""

    storage: Storage
    first: int
    columns: int


def new_value(columns: int) -> RecordedColumns:
    return RecordedColumns(Storage(columns), 0, columns)


class ScanRecorder:
    """`OpSet` describes the ops."""

    def __init__(self, spec: KVSpec) -> None:
        self.uses: list[Use] = []
        self.emits: list[Emit] = []
        self._spec = spec

    def causal_conv(
        self, x: RecordedColumns, weight: Float32, bias: Float32 | None, batch: Any, layer: int, first: int = 0
    ) -> RecordedColumns:
        conv, states, columns = self._spec.conv, self._spec.states, x.columns
        if states is not None:
            conv = ConvSpec(states.num_layers, states.conv_channels, states.conv_taps)
        assert conv is not None and 0 <= layer < conv.num_layers, f"convolution {layer} of {conv}"
        assert first + columns <= conv.channels and (states or columns == conv.channels), f"{columns} columns, {conv}"
        assert weight.shape == (conv.taps, columns), f"{weight.shape} in {conv}"
        assert bias is None or bias.shape == (columns,)
        total, out = conv.channels, new_value(columns)
        return self._record(
            (x,),
            out,
            lambda tape, view: tape.causal_conv(view(x), weight, bias, layer, first, total, view(out)),
            barrier=True,
        )

    def mamba2_scan(
        self,
        x: RecordedColumns,
        dt: RecordedColumns,
        b: RecordedColumns,
        c: RecordedColumns,
        weights: Mamba2Weights,
        batch: Any,
        layer: int,
    ) -> RecordedColumns:
        spec, w = self._states(layer), weights
        heads, columns, head_dim = spec.shape
        assert x.columns == heads * head_dim and dt.columns == heads == len(w.a) == len(w.dt_bias) == len(w.skip), (
            f"{x.columns} columns of x and {dt.columns} of dt in {spec}"
        )
        assert b.columns == c.columns == w.groups * columns and heads % w.groups == 0, (
            f"{b.columns} columns of b in {w.groups} groups of {spec}"
        )
        out = new_value(x.columns)
        return self._record(
            (x, dt, b, c),
            out,
            lambda tape, view: tape.mamba2_scan(
                *map(view, (x, dt, b, c)), w.a, w.dt_bias, w.skip, *w.dt_limit, w.groups, layer, view(out)
            ),
            barrier=True,
        )

    def mamba_scan(
        self,
        x: RecordedColumns,
        dt: RecordedColumns,
        b: RecordedColumns,
        c: RecordedColumns,
        weights: MambaWeights,
        batch: Any,
        layer: int,
    ) -> RecordedColumns:
        spec, w = self._states(layer), weights
        columns, channels = spec.shape
        assert x.columns == dt.columns == channels and b.columns == c.columns == columns, f"{x.columns} columns, {spec}"
        assert w.a.shape == spec.shape and w.skip.shape == (channels,), f"{w.a.shape} in {spec}"
        out = new_value(x.columns)
        return self._record(
            (x, dt, b, c),
            out,
            lambda tape, view: tape.mamba_scan(*map(view, (x, dt, b, c)), w.a, w.skip, layer, view(out)),
            barrier=True,
        )

    def decay(self, x: RecordedColumns, bias: Float32, rate: Float32) -> RecordedColumns:
        assert bias.shape == rate.shape == (x.columns,), f"{bias.shape} and {rate.shape} for {x.columns} columns"
        out = new_value(x.columns)
        return self._record(
            (x,), out, lambda tape, view: tape.decay(view(x), bias, rate, view(out)), in_place=(x,), any_rows=True
        )

    def delta_rule(
        self,
        q: RecordedColumns,
        k: RecordedColumns,
        v: RecordedColumns,
        decay: RecordedColumns,
        beta: RecordedColumns,
        batch: Any,
        layer: int,
        key_dim: int,
        tiled: bool = False,
    ) -> RecordedColumns:
        heads = beta.columns
        self._check_heads_of_states(q, k, v, heads, layer, key_dim)
        assert decay.columns in (heads, heads * key_dim), f"{decay.columns} columns of decay for {heads} heads"
        out = new_value(v.columns)
        return self._record(
            (q, k, v, decay, beta),
            out,
            lambda tape, view: tape.delta_rule(
                *map(view, (q, k, v, decay)), None, view(beta), heads, key_dim, tiled, layer, view(out)
            ),
            barrier=True,
        )

    def linear_attention(
        self,
        q: RecordedColumns,
        k: RecordedColumns,
        v: RecordedColumns,
        decay: Float32,
        batch: Any,
        layer: int,
        key_dim: int,
    ) -> RecordedColumns:
        heads = len(decay)
        self._check_heads_of_states(q, k, v, heads, layer, key_dim)
        out = new_value(v.columns)
        return self._record(
            (q, k, v),
            out,
            lambda tape, view: tape.delta_rule(
                *map(view, (q, k, v)), None, decay, None, heads, key_dim, False, layer, view(out)
            ),
            barrier=True,
        )

    def wkv7(
        self,
        r: RecordedColumns,
        w: RecordedColumns,
        k: RecordedColumns,
        v: RecordedColumns,
        a: RecordedColumns,
        weights: Wkv7Weights,
        batch: Any,
        layer: int,
    ) -> RecordedColumns:
        spec, inputs = self._states(layer), (r, w, k, v, a)
        columns, size = r.columns, r.columns // weights.heads
        assert spec.shape == (weights.heads, size, size), f"{columns} columns of {weights.heads} heads in {spec}"
        vectors = (weights.remove_scale, weights.learn_scale, weights.bonus, weights.norm, weights.norm_bias)
        assert all(x.columns == columns for x in inputs) and all(x.shape == (columns,) for x in vectors)
        out = new_value(columns)
        return self._record(
            inputs,
            out,
            lambda tape, view: tape.wkv7(*map(view, inputs), *vectors, weights.heads, weights.eps, layer, view(out)),
            barrier=True,
        )

    def _check_heads_of_states(
        self, q: RecordedColumns, k: RecordedColumns, v: RecordedColumns, heads: int, layer: int, key_dim: int
    ) -> None:
        spec = self._states(layer)
        key_heads = q.columns // key_dim
        assert q.columns == k.columns == key_heads * key_dim and heads % key_heads == 0, f"{q.columns} columns of q"
        assert spec.shape == (heads, key_dim, v.columns // heads), f"{v.columns} columns of {heads} heads in {spec}"

    def _states(self, layer: int) -> StateSpec:
        spec = self._spec.states
        assert spec is not None and 0 <= layer < spec.num_layers, f"layer {layer} of {spec}"
        return spec

    def _record(
        self,
        inputs: Sequence[RecordedColumns],
        output: RecordedColumns,
        emit: Emit,
        *,
        barrier: bool = False,
        in_place: Sequence[RecordedColumns] = (),
        any_rows: bool = False,
    ) -> RecordedColumns:
        whole = [x.storage for x in in_place if x.columns == x.storage.columns]
        self._append(Use([x.storage for x in inputs], output.storage, barrier, whole, any_rows), emit)
        return output

    def _append(self, use: Use, emit: Emit) -> None:
        self.uses.append(use)
        self.emits.append(emit)
