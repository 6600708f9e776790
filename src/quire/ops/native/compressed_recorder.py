"""The recorder's compressed attention, and its residual streams."""

from typing import Any

from quire.ops.kv_spec import CompressedLayer
from quire.ops.native.liveness import Use
from quire.ops.native.scan_recorder import RecordedColumns, ScanRecorder, new_value
from quire.ops.opset import Float32


class CompressedRecorder(ScanRecorder):
    """`OpSet` describes the ops."""

    def _compressed(self, layer: int) -> CompressedLayer:
        spec = self._spec.compressed
        assert spec is not None and 0 <= layer < len(spec.layers), f"layer {layer} of {spec}"
        return spec.layers[layer]

    def write_tokens(self, x: RecordedColumns, batch: Any, layer: int, first: int = 0) -> None:
        kept = self._compressed(layer)
        assert first >= 0 and first + x.columns <= kept.columns, f"{x.columns} columns from {first} on in {kept}"
        self._append(Use([x.storage], None, barrier=False), lambda tape, view: tape.write_tokens(view(x), layer, first))

    def pool_group(
        self, batch: Any, layer: int, first: int, columns: int, bias: Float32, overlap: bool
    ) -> RecordedColumns:
        kept, stored, out = self._compressed(layer), (2 if overlap else 1) * columns, new_value(columns)
        assert kept.group and first >= 0 and first + 2 * stored <= kept.columns, f"{columns} columns from {first} on"
        assert bias.shape == (kept.group, stored), f"{bias.shape} for {kept} and {stored} columns"
        return self._record(
            (), out, lambda tape, view: tape.pool_group(layer, first, bias, overlap, view(out)), barrier=True
        )

    def write_entry(self, x: RecordedColumns, batch: Any, layer: int, part: int) -> None:
        kept = self._compressed(layer)
        assert 0 <= part < len(kept.parts) and x.columns == kept.parts[part], f"{x.columns} of part {part} in {kept}"
        self._append(Use([x.storage], None, barrier=False), lambda tape, view: tape.write_entry(view(x), layer, part))

    def top_entries(
        self, q: RecordedColumns, weights: RecordedColumns, batch: Any, layer: int, top_k: int
    ) -> RecordedColumns:
        kept, out = self._compressed(layer), new_value(top_k)
        assert len(kept.parts) == 2 and q.columns == weights.columns * kept.parts[1], f"{q.columns} columns in {kept}"
        return self._record(
            (q, weights),
            out,
            lambda tape, view: tape.top_entries(view(q), view(weights), layer, view(out)),
            barrier=True,
            any_rows=True,
        )

    def compressed_attention(
        self,
        q: RecordedColumns,
        batch: Any,
        layer: int,
        scale: float,
        window: int,
        sinks: Float32,
        chosen: RecordedColumns | None = None,
    ) -> RecordedColumns:
        spec, out = self._spec, new_value(q.columns)
        assert spec.compressed is not None and 0 < window <= spec.compressed.reach, f"a window of {window} in {spec}"
        assert sinks.shape == (q.columns // spec.head_dim,), f"{sinks.shape} for {q.columns} columns"
        assert 0 <= layer < spec.num_layers, f"layer {layer} of {spec.num_layers}"
        return self._record(
            (q,) if chosen is None else (q, chosen),
            out,
            lambda tape, view: tape.compressed_attention(
                view(q), None if chosen is None else view(chosen), layer, scale, window, sinks, view(out)
            ),
            barrier=True,
            any_rows=True,
        )

    def stream_weights(
        self, x: RecordedColumns, scale: Float32, base: Float32, streams: int, eps: float, iterations: int
    ) -> RecordedColumns:
        parts = 1 if x.columns == streams else 3
        assert x.columns == len(base) == (1 if parts == 1 else 2 + streams) * streams, f"{x.columns} columns"
        assert len(scale) == parts, f"{len(scale)} scales of {parts} parts"
        out = new_value(x.columns)
        return self._record(
            (x,),
            out,
            lambda tape, view: tape.stream_weights(view(x), scale, base, streams, eps, iterations, view(out)),
            any_rows=True,
        )

    def merge_streams(self, x: RecordedColumns, weights: RecordedColumns) -> RecordedColumns:
        assert x.columns % weights.columns == 0, f"{x.columns} columns of {weights.columns} streams"
        out = new_value(x.columns // weights.columns)
        return self._record(
            (x, weights), out, lambda tape, view: tape.merge_streams(*map(view, (x, weights, out))), any_rows=True
        )

    def update_streams(
        self, x: RecordedColumns, y: RecordedColumns, post: RecordedColumns, mixing: RecordedColumns
    ) -> RecordedColumns:
        streams, out = post.columns, new_value(x.columns)
        assert x.columns == streams * y.columns and mixing.columns == streams**2, f"{x.columns} columns"
        return self._record(
            (x, y, post, mixing),
            out,
            lambda tape, view: tape.update_streams(*map(view, (x, y, post, mixing, out))),
            any_rows=True,
        )
