"""A folder in Hugging Face's layout: linear layers in a quantized format, the other tensors as they are."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quire.ops.opset import Keep
from quire.quantize.eager_model import linear_layers
from quire.quantize.floats import read_floats
from quire.quantize.gguf_plan import READ_WEIGHTS, encode_rows
from quire.quantize.huggingface_files import small_files
from quire.quantize.linear_formats import LinearFormat, encoded_bytes
from quire.quantize.output import PlannedTensor
from quire.quantize.plan import Importance, QuantizeError, QuantizeOptions, Task, WritePlan, count
from quire.quantize.safetensors_files import planned, safetensors_layouts
from quire.weights.checkpoint import Checkpoint

FLOATS = ("F32", "F16", "BF16")
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def plan_huggingface(
    checkpoint: Checkpoint,
    out: Path,
    options: QuantizeOptions,
    form: LinearFormat | None,
    importance: Importance,
) -> WritePlan:
    """`form`: None for a plain conversion, to the dtype that is the method."""
    dtype = options.method if form is None else options.dtype or _dtype(checkpoint)
    linears = {} if form is None else linear_layers(checkpoint)
    chosen = {} if form is None else _chosen(checkpoint, linears, form, options)
    if form is not None and not chosen:
        raise QuantizeError(
            f"no linear layer of {checkpoint.path} can be quantized as {options.method}",
            "their inputs are no multiple of the group size, or --ignore names all",
        )
    tasks = []
    for name in checkpoint.names():
        if form is not None and name in chosen:
            tasks.append(_linear_task(checkpoint, name, chosen[name], form, options.method, importance))
        else:
            tasks.append(_plain_task(checkpoint, name, dtype, convert=form is None))
    layouts, index = safetensors_layouts([output for task in tasks for output in task.outputs])
    ignored = ["lm_head", *(_module(name) for name in linears if name not in chosen and _module(name) != "lm_head")]
    ignored = [name for name in ignored if "embed" not in name]
    small = small_files(checkpoint, None if form is None else form.config(ignored), dtype) | index
    notes = []
    if left := [name for name, use in linears.items() if name not in chosen and use.keep is Keep.NOTHING]:
        notes.append(f"{len(left)} of {len(linears)} linear layers stay as they are, such as {_module(left[0])}")
    return WritePlan(out, layouts, tasks, small, notes)


def _chosen(
    checkpoint: Checkpoint, linears: Mapping[str, Any], form: LinearFormat, options: QuantizeOptions
) -> dict[str, tuple[int, int]]:
    """Those to quantize, with their shapes. A layer that is stored otherwise than [outputs, inputs] stays."""
    stored = set(checkpoint.names())
    return {
        name: use.shape
        for name, use in linears.items()
        if use.keep is Keep.NOTHING
        and name in stored
        and name.endswith(".weight")
        and checkpoint.shape(name) == use.shape
        and form.fits(*use.shape)
        and not any(re.search(pattern, name) for pattern in options.ignore)
    }


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _dtype(checkpoint: Checkpoint) -> str:
    given = checkpoint.config.get("torch_dtype", checkpoint.config.get("dtype"))
    return DTYPES.get(str(given), "F16")


def _linear_task(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], form: LinearFormat, method: str, importance: Importance
) -> Task:
    module = _module(name)
    outputs = tuple(planned(f"{module}.{part}", dtype, *size) for part, (dtype, size) in form.shapes(*shape).items())

    def pieces() -> Iterator[tuple[str, int, Any]]:
        encoded = form.encode(read_floats(checkpoint.tensor(name)), importance.of(name))
        yield from linear_pieces(module, encoded)

    return Task(outputs, count(shape), pieces, method, (name,), checkpoint.drop_pages)


def linear_pieces(module: str, encoded: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    for part, array in encoded.items():
        yield f"{module}.{part}", 0, encoded_bytes(np.asarray(array))


def _plain_task(checkpoint: Checkpoint, name: str, dtype: str, convert: bool) -> Task:
    shape, stored = checkpoint.shape(name), checkpoint.tensor(name).type.name
    kind = stored if stored in FLOATS and not convert else dtype
    output = planned(name, kind, *shape)
    return Task((output,), count(shape), partial(_plain, checkpoint, output), kind, (name,), checkpoint.drop_pages)


def _plain(checkpoint: Checkpoint, output: PlannedTensor) -> Iterator[tuple[str, int, Any]]:
    tensor = checkpoint.tensor(output.name)
    if tensor.type.name == output.type and tensor.row_order is None:
        yield output.name, 0, np.ascontiguousarray(tensor.data).reshape(-1)
        return
    first = 0
    rows = max(READ_WEIGHTS // tensor.num_columns, 1) if len(tensor.shape) == 2 else tensor.shape[0]
    for cut in range(0, tensor.shape[0], rows):
        values = read_floats(tensor.part(cut, min(rows, tensor.shape[0] - cut)))
        data = encode_rows(output.type, None, values)
        yield output.name, first, data
        first += data.nbytes
