"""The recorder's attention: over pages of the KV cache, or over the tokens of a step."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.ops.native.compressed_recorder import CompressedRecorder
from quire.ops.native.liveness import Use
from quire.ops.native.scan_recorder import RecordedColumns, new_value
from quire.ops.opset import Float32


class AttentionRecorder(CompressedRecorder):
    """`OpSet` describes the ops."""

    def write_kv(self, k: RecordedColumns, v: RecordedColumns, batch: Any, layer: int) -> None:
        width = self._spec.num_kv_heads * self._spec.head_dim
        assert not self._spec.latent, "latent pages have no keys and values"
        assert k.columns == v.columns == width, f"{k.columns} columns of k and {v.columns} of v in pages of {width}"
        assert 0 <= layer < self._spec.num_layers, f"layer {layer} of {self._spec.num_layers}"
        windowed, number = self._spec.place(layer)
        self._append(
            Use([k.storage, v.storage], None, barrier=False),
            lambda tape, view: tape.write_kv(view(k), view(v), number, windowed),
        )

    def paged_attention(
        self,
        q: RecordedColumns,
        batch: Any,
        layer: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        slopes: Float32 | None = None,
        sinks: Float32 | None = None,
        biases: Float32 | None = None,
        group: int = 0,
        skipped: int = 0,
    ) -> RecordedColumns:
        assert not self._spec.latent, "latent pages have no keys and values"
        assert head_dim == self._spec.head_dim, f"heads of {head_dim} columns and pages of {self._spec.head_dim}"
        self._check_heads(q.columns, group, skipped)
        assert 0 <= layer < self._spec.num_layers and softcap >= 0
        windowed, number = self._spec.place(layer)
        if windowed:
            assert self._spec.windows and 0 < abs(window) <= self._spec.windows.size, f"layer {layer} sees {window}"
        sharing = {"group": group, "skipped": skipped, "windowed": windowed}
        for vector in (slopes, sinks):
            assert vector is None or vector.shape == (q.columns // head_dim,), (
                f"{vector.shape} for {q.columns} columns of q"
            )
        bias = _bias_argument(biases, q.columns // head_dim)
        out = new_value(q.columns)
        return self._record(
            (q,),
            out,
            lambda tape, view: tape.attention(
                view(q), number, scale, window, softcap, slopes, sinks, view(out), **bias, **sharing
            ),
            barrier=True,
            any_rows=True,
        )

    def _check_heads(self, columns: int, group: int, skipped: int) -> None:
        """Query heads are shared evenly by the KV heads, or `group` by each but the first and the last."""
        num_kv, heads = self._spec.num_kv_heads, columns // self._spec.head_dim
        assert columns % self._spec.head_dim == 0, f"{columns} columns of q"
        if not group:
            assert heads % num_kv == 0, f"{heads} heads and {num_kv} KV heads"
            return
        assert 0 <= skipped < group and (num_kv - 1) * group < skipped + heads <= num_kv * group, (
            f"{heads} heads after {skipped}, and {num_kv} KV heads for {group} each"
        )

    def cross_attention(
        self, q: RecordedColumns, batch: Any, layer: int, head_dim: int, scale: float, group: int = 0, skipped: int = 0
    ) -> RecordedColumns:
        assert not self._spec.latent and head_dim == self._spec.head_dim
        self._check_heads(q.columns, group, skipped)
        assert 0 <= layer < self._spec.num_layers, f"layer {layer} of {self._spec.num_layers}"
        out = new_value(q.columns)
        return self._record(
            (q,),
            out,
            lambda tape, view: tape.cross_attention(view(q), layer, scale, view(out), group, skipped),
            barrier=True,
            any_rows=True,
        )

    def write_latent(self, latent: RecordedColumns, k_rope: RecordedColumns, batch: Any, layer: int) -> None:
        spec = self._spec
        sizes = latent.columns, k_rope.columns
        assert spec.latent and sizes == (spec.latent, spec.head_dim - spec.latent), f"{sizes} columns in pages {spec}"
        assert 0 <= layer < spec.num_layers, f"layer {layer} of {spec.num_layers}"
        self._append(
            Use([latent.storage, k_rope.storage], None, barrier=False),
            lambda tape, view: tape.write_latent(view(latent), view(k_rope), layer),
        )

    def mla_attention(
        self,
        q_latent: RecordedColumns,
        q_rope: RecordedColumns,
        batch: Any,
        layer: int,
        scale: float,
        chosen: RecordedColumns | None = None,
    ) -> RecordedColumns:
        spec, heads = self._spec, q_latent.columns // max(self._spec.latent, 1)
        assert spec.latent and q_latent.columns == heads * spec.latent, f"{q_latent.columns} columns in pages {spec}"
        assert q_rope.columns == heads * (spec.head_dim - spec.latent), f"{q_rope.columns} columns of {heads} heads"
        assert 0 <= layer < spec.num_layers, f"layer {layer} of {spec.num_layers}"
        out = new_value(q_latent.columns)
        if chosen is not None:
            return self._record(
                (q_latent, q_rope, chosen),
                out,
                lambda tape, view: tape.sparse_mla(*map(view, (q_latent, q_rope, chosen)), layer, scale, view(out)),
                barrier=True,
                any_rows=True,
            )
        return self._record(
            (q_latent, q_rope),
            out,
            lambda tape, view: tape.mla_attention(view(q_latent), view(q_rope), layer, scale, view(out)),
            barrier=True,
            any_rows=True,
        )

    def write_index_key(self, k: RecordedColumns, batch: Any, layer: int) -> None:
        index = self._spec.index
        assert index is not None and k.columns == index.columns, f"{k.columns} columns in pages of {index}"
        assert 0 <= layer < self._spec.num_layers, f"layer {layer} of {self._spec.num_layers}"
        self._append(Use([k.storage], None, barrier=False), lambda tape, view: tape.write_index_key(view(k), layer))

    def top_positions(self, q: RecordedColumns, weights: RecordedColumns, batch: Any, layer: int) -> RecordedColumns:
        index = self._spec.index
        assert index is not None and q.columns == weights.columns * index.columns, (
            f"{q.columns} columns of {weights.columns} heads in pages of {index}"
        )
        assert 0 <= layer < self._spec.num_layers, f"layer {layer} of {self._spec.num_layers}"
        out = new_value(index.top_k)
        return self._record(
            (q, weights),
            out,
            lambda tape, view: tape.top_positions(view(q), view(weights), layer, view(out)),
            barrier=True,
            any_rows=True,
        )

    def attention(
        self,
        q: RecordedColumns,
        k: RecordedColumns,
        v: RecordedColumns,
        batch: Any,
        head_dim: int,
        scale: float,
        causal: bool = False,
        window: int = 0,
        biases: Float32 | None = None,
    ) -> RecordedColumns:
        assert k.columns == v.columns and k.columns % head_dim == 0 == q.columns % k.columns and window >= 0
        bias = _bias_argument(biases, q.columns // head_dim)
        kv_heads, out = k.columns // head_dim, new_value(q.columns)
        self._append(
            Use([k.storage, v.storage], None, barrier=False),
            lambda tape, view: tape.keep_kv(view(k), view(v), head_dim),
        )
        return self._record(
            (q,),
            out,
            lambda tape, view: tape.self_attention(
                view(q), kv_heads, head_dim, scale, causal, window, view(out), **bias
            ),
            barrier=True,
            any_rows=True,
        )

    def disentangled_attention(
        self,
        q: RecordedColumns,
        k: RecordedColumns,
        v: RecordedColumns,
        by_query: RecordedColumns,
        by_key: RecordedColumns,
        rows: NDArray[np.int32],
        batch: Any,
        head_dim: int,
        scale: float,
    ) -> RecordedColumns:
        heads, out = q.columns // head_dim, new_value(q.columns)
        assert q.columns == k.columns == v.columns and q.columns % head_dim == 0, f"{q.columns} columns of q"
        assert by_query.columns == by_key.columns and by_query.columns % heads == 0 and len(rows) % 2 == 1
        assert rows.min() >= 0 and rows.max() < by_query.columns // heads, f"row {rows.max()} of {by_query.columns}"
        table = np.ascontiguousarray(rows, np.int32)
        self._append(
            Use([k.storage, v.storage, by_key.storage], None, barrier=False),  # which are read at all tokens
            lambda tape, view: tape.keep_kv(view(k), view(v), head_dim),
        )
        return self._record(
            (q, by_query, by_key),
            out,
            lambda tape, view: tape.disentangled_attention(
                view(q), view(by_query), view(by_key), table, head_dim, scale, view(out)
            ),
            barrier=True,
            any_rows=True,
        )


def _bias_argument(biases: Float32 | None, heads: int) -> dict[str, Float32]:
    assert biases is None or (biases.shape[0] == heads and biases.shape[1] % 2 == 1 < biases.shape[1]), (
        f"biases {biases.shape} for {heads} heads"
    )
    return {} if biases is None else {"biases": biases}
