"""bitsandbytes' tensors: NF4 and FP4, with scales quantized once more or not, and LLM.int8()."""

import json
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.ops.dequantize import FP4_VALUES, NF4_VALUES
from quire.quantize.gguf_types import nearest_entry
from quire.quantize.search import Floats, inverse
from quire.quantize.threads import CHUNK_WEIGHTS, in_threads

CODEBOOKS = {"nf4": NF4_VALUES, "fp4": FP4_VALUES}
BLOCK, NESTED_BLOCK = 64, 256
STATE_BYTES = 256  # the JSON text, filled up with spaces: its length is then known before the numbers in it


@cache
def dynamic_codebook() -> NDArray[np.float32]:
    """256 numbers from -1 to 1: seven powers of ten, the larger ones with more steps between."""
    values = [0.0, 1.0]
    for power in range(7):
        edges = np.linspace(0.1, 1, 2**power + 1, dtype=np.float32)
        middles = 10.0 ** (power - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [*middles.tolist(), *(-middles).tolist()]
    return np.sort(np.array(values, np.float32))


def four_bits(w: Floats, kind: str, nested: bool) -> dict[str, NDArray[Any]]:
    codebook = CODEBOOKS[kind]
    flat = np.pad(w.reshape(-1), (0, -w.size % BLOCK)).reshape(-1, BLOCK)
    absmax = np.maximum(flat.max(1), -flat.min(1))
    q = _nearest(flat, absmax, codebook)[: w.size + w.size % 2]
    state: dict[str, Any] = {"quant_type": kind, "blocksize": BLOCK, "dtype": "float16", "shape": [*w.shape]}
    tensors: dict[str, NDArray[Any]] = {
        "weight": (q[::2] << 4 | q[1::2])[:, None],
        "weight.quant_map": codebook,
        "weight.absmax": absmax,
    }
    if nested:
        offset = np.float32(absmax.mean())
        rest = np.pad(absmax - offset, (0, -len(absmax) % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
        largest = np.abs(rest).max(1)
        indices = nearest_entry(rest * inverse(largest[:, None]), dynamic_codebook())
        tensors["weight.absmax"] = indices.reshape(-1)[: len(absmax)]
        tensors["weight.nested_absmax"] = largest
        tensors["weight.nested_quant_map"] = dynamic_codebook()
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(offset)}
    text = json.dumps(state).encode()
    assert len(text) <= STATE_BYTES
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(text.ljust(STATE_BYTES), np.uint8)
    return tensors


def _nearest(flat: Floats, absmax: Floats, codebook: Floats) -> NDArray[np.uint8]:
    step = CHUNK_WEIGHTS // BLOCK
    spans = [slice(first, first + step) for first in range(0, len(flat), step)]
    parts = in_threads(lambda span: nearest_entry(flat[span] * inverse(absmax[span, None]), codebook), spans)
    return np.concatenate(parts).reshape(-1)


def four_bit_shapes(outputs: int, inputs: int, kind: str, nested: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    size = outputs * inputs
    blocks = -(-size // BLOCK)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "weight": ("U8", (-(-size // 2), 1)),
        "weight.quant_map": ("F32", (16,)),
        "weight.absmax": ("U8" if nested else "F32", (blocks,)),
        f"weight.quant_state.bitsandbytes__{kind}": ("U8", (STATE_BYTES,)),
    }
    if nested:
        shapes["weight.nested_absmax"] = ("F32", (-(-blocks // NESTED_BLOCK),))
        shapes["weight.nested_quant_map"] = ("F32", (256,))
    return shapes


def eight_bits(w: Floats) -> dict[str, NDArray[Any]]:
    largest = np.abs(w).max(1)
    q = np.rint(w * (np.float32(127) * inverse(largest))[:, None]).astype(np.int8)
    return {"weight": q, "SCB": largest, "weight_format": np.zeros((), np.uint8)}
