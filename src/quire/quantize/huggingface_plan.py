"""A folder in Hugging Face's layout: linear layers in a quantized format, the other tensors as they are."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from quire.models.llama import ROPE_FACTORS
from quire.ops.opset import Keep
from quire.quantize import float8
from quire.quantize.device import Device
from quire.quantize.eager_model import linear_layers
from quire.quantize.floats import Floats, read_floats
from quire.quantize.gguf_plan import READ_WEIGHTS, encode_rows
from quire.quantize.huggingface_files import small_files
from quire.quantize.linear_formats import KV_SCHEME, encoded_bytes
from quire.quantize.methods import LinearFormats
from quire.quantize.output import PlannedTensor
from quire.quantize.plan import Importance, QuantizeError, QuantizeOptions, Task, WritePlan, count
from quire.quantize.safetensors_files import MAX_SHARD_BYTES, planned, safetensors_layouts
from quire.quantize.smoothing import read_weights
from quire.weights.checkpoint import Checkpoint

FLOATS = ("F32", "F16", "BF16")
ALMOST_ALL = 0.9  # of the weights that any size of groups divides
STACKED = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
)  # fmt: skip
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def plan_huggingface(
    checkpoint: Checkpoint,
    out: Path,
    options: QuantizeOptions,
    forms: LinearFormats | None,
    importance: Importance,
    device: Device,
) -> WritePlan:
    """`forms`: None for a plain conversion, to the dtype that is the method."""
    dtype = options.method if forms is None else options.dtype or _dtype(checkpoint)
    linears = {} if forms is None else linear_layers(checkpoint)
    chosen = {} if forms is None else quantized_layers(checkpoint, linears, forms, options)
    if forms is not None and not chosen:
        raise QuantizeError(
            f"no linear layer of {checkpoint.path} can be quantized as {options.method}",
            "their inputs are no multiple of the group size, or --ignore names all",
        )
    tasks = []
    for name in checkpoint.names():
        if name == ROPE_FACTORS:
            continue  # config.json says it
        if forms is not None and name in chosen:
            tasks.append(_linear_task(checkpoint, name, chosen[name], forms, importance, device))
        else:
            tasks.append(_plain_task(checkpoint, name, dtype, convert=forms is None))
    if options.kv_scales:
        tasks.append(_kv_task(linears, importance))
    outputs = [output for task in tasks for output in task.outputs]
    layouts, index = safetensors_layouts(outputs, options.split_bytes or MAX_SHARD_BYTES)
    ignored = ["lm_head", *(_module(name) for name in linears if name not in chosen and _module(name) != "lm_head")]
    ignored = [name for name in ignored if "embed" not in name]
    quantization = None if forms is None else forms.config(chosen, ignored)
    if options.kv_scales:
        quantization = _with_kv_scheme(quantization, options.method)
    small = small_files(checkpoint, quantization, dtype) | index
    notes = []
    if left := [name for name, use in linears.items() if name not in chosen and use.keep is Keep.NOTHING]:
        said = f"{len(left)} of {len(linears)} linear layers stay as they are, such as {_module(left[0])}"
        notes.append(said + _group_hint([linears[name].shape[1] for name in left], forms))
    return WritePlan(out, layouts, tasks, small, notes)


def quantized_layers(
    checkpoint: Checkpoint, linears: Mapping[str, Any], forms: LinearFormats, options: QuantizeOptions
) -> dict[str, tuple[int, int]]:
    """The layers to quantize, with their shapes. A layer that is stored otherwise than [outputs, inputs] stays."""
    stored = set(checkpoint.names())
    return {
        name: use.shape
        for name, use in linears.items()
        if use.keep is Keep.NOTHING
        and name in stored
        and name.endswith(".weight")
        and checkpoint.shape(name) == use.shape
        and forms.of(name).fits(*use.shape)
        and not any(re.search(pattern, name) for pattern in options.ignore)
    }


def fitting_group(checkpoint: Checkpoint, forms: LinearFormats, options: QuantizeOptions) -> int | None:
    """The size of groups, at most the method's, that divides the inputs of almost all layers; None: the method's."""
    grid = forms.usual.grid
    if grid is None or not grid.group:
        return None
    uses = [
        use for name, use in linear_layers(checkpoint).items()
        if use.keep is Keep.NOTHING and not any(re.search(pattern, name) for pattern in options.ignore)
    ]  # fmt: skip
    sizes = [size for size in (grid.group, 64, 32) if size <= grid.group]
    fitting = [sum(count(use.shape) for use in uses if use.shape[1] % size == 0) for size in sizes]
    size = next(size for size, weights in zip(sizes, fitting, strict=True) if weights >= ALMOST_ALL * fitting[-1])
    return None if size == grid.group else size


def _group_hint(inputs: list[int], forms: LinearFormats | None) -> str:
    """Which size of groups divides the inputs of layers that the method's does not."""
    grid = None if forms is None else forms.usual.grid
    if grid is None or not grid.group or not (uneven := [count for count in inputs if count % grid.group]):
        return ""
    said = f": {uneven[0]} inputs are no multiple of {grid.group}"
    common = gcd(grid.group, *uneven)
    return said if common % 32 else f"{said}; `--group-size {common}` fits"


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def half_precision(checkpoint: Checkpoint) -> str:
    """The floats of 16 bits that the weights have, or BF16, which holds the range of others."""
    return "F16" if _dtype(checkpoint) == "F16" else "BF16"


def _dtype(checkpoint: Checkpoint) -> str:
    given = checkpoint.config.get("torch_dtype", checkpoint.config.get("dtype"))
    return DTYPES.get(str(given), "F16")


def _linear_task(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], forms: LinearFormats, importance: Importance,
    device: Device,
) -> Task:  # fmt: skip
    module, form = _module(name), forms.of(name)
    outputs = tuple(planned(f"{module}.{part}", dtype, *size) for part, (dtype, size) in form.shapes(*shape).items())

    def pieces() -> Iterator[tuple[str, int, Any]]:
        w = read_weights(checkpoint, name, device)
        if form.encode_stacked is not None:
            largest = _largest_stacked(checkpoint, name, device)
            encoded = form.encode_stacked(device.numpy(w), importance.of(name), largest)
        else:
            encoded = device.encode(form, w, importance.of(name))
        if form.input_scale is not None:
            largest = importance.largest.get(name, 0.0)  # 0: no input was seen
            scale = form.input_scale.of(largest) if largest > 0 else 1.0
            encoded = {**encoded, form.input_scale.name: np.array([scale], np.float32)}
        yield from linear_pieces(module, encoded)

    return Task(outputs, count(shape), pieces, forms.method(name), (name,), checkpoint.drop_pages)


def _largest_stacked(checkpoint: Checkpoint, name: str, device: Device) -> float:
    """The largest weight of all layers that readers stack with this one."""
    *outer, layer, kind = name.split(".")
    stack = next((stack for stack in STACKED if layer in stack), (layer,))
    stored = set(checkpoint.names())
    names = [each for other in stack if (each := ".".join((*outer, other, kind))) in stored]
    return max(float(abs(read_weights(checkpoint, each, device)).max()) for each in names)


def _fp8_scale(largest: float) -> Floats:
    """1 where nothing was seen."""
    return np.array([largest / float8.LARGEST if largest > 0 else 1.0], np.float32)


def _with_kv_scheme(quantization: dict[str, Any] | None, method: str) -> dict[str, Any]:
    if quantization is None or "kv_cache_scheme" not in quantization:
        raise QuantizeError(
            f"--kv-cache-scales are part of compressed-tensors, and {method} is not", "use FP8_DYNAMIC or W4A16, say"
        )
    return {**quantization, "kv_cache_scheme": KV_SCHEME}


def _kv_task(linears: Mapping[str, Any], importance: Importance) -> Task:
    """k_scale and v_scale of every layer: the largest magnitude becomes the largest number of e4m3."""
    modules = {
        int(match[2]): match[1]
        for name in linears
        if (match := re.fullmatch(r"(.*\.layers\.(\d+)\.\w+)\.k_proj.*", name))
    }
    values = {
        f"{modules.get(layer, f'model.layers.{layer}.self_attn')}.{part}_scale": _fp8_scale(largest)
        for layer, pair in sorted(importance.kv_largest.items())
        for part, largest in zip("kv", pair, strict=True)
    }
    outputs = tuple(planned(name, "F32", 1) for name in values)
    return Task(outputs, 0, lambda: ((name, 0, encoded_bytes(value)) for name, value in values.items()), "F32")


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
