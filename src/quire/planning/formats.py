"""The formats that a plan may assume for a model that is known by its config.json alone: which tensor is stored how."""

import re
from collections.abc import Callable
from difflib import get_close_matches

from quire.core.errors import Unsupported
from quire.ops.tensors import (
    BF16,
    F16,
    F32,
    FP8,
    MXFP4,
    NF4,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q4_Z,
    Q5_0,
    Q5_K,
    Q6_K,
    Q8_0,
    Q8_F,
    StorageType,
)

TypeOf = Callable[[str, int], StorageType]  # (name of a matrix, number of layers) -> how it is stored


def _floats(kind: StorageType) -> TypeOf:
    return lambda name, num_layers: kind


def _linear_layers(kind: StorageType) -> TypeOf:
    """Quantizers of Hugging Face checkpoints leave embeddings and heads in 16 bits, and routers too."""
    return lambda name, num_layers: BF16 if re.search(r"embed|lm_head|wte|router|gate\.weight$", name) else kind


def _gguf(kind: StorageType, **better: StorageType) -> TypeOf:
    """llama.cpp's mixtures: heads in Q6_K, and some layers' values and down projections in more bits. `better`: those
    of `values` (v_proj) and `down` in the layers that are favoured, `head`, and `embed`."""

    def type_of(name: str, num_layers: int) -> StorageType:
        if re.search(r"lm_head|embed_out", name):
            return better.get("head", Q6_K)
        if re.search(r"embed|wte", name):
            return better.get("embed", kind)
        if re.search(r"v_proj|query_key_value|qkv|c_attn", name) and _is_favoured(name, num_layers):
            return better.get("values", kind)
        if re.search(r"down_proj|\.w2\.|fc2|c_proj|dense_4h", name) and _is_favoured(name, num_layers):
            return better.get("down", kind)
        return kind

    return type_of


def _is_favoured(name: str, num_layers: int) -> bool:
    """The first and last eighth of the layers, and every third between them."""
    found = re.search(r"\.(\d+)\.", name)
    layer, eighth = int(found[1]) if found else 0, num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


FORMATS: dict[str, TypeOf] = {
    "float32": _floats(F32),
    "float16": _floats(F16),
    "bfloat16": _floats(BF16),
    "fp8": _linear_layers(FP8),
    "w8a8": _linear_layers(Q8_F),
    "gptq": _linear_layers(Q4_Z),
    "awq": _linear_layers(Q4_Z),
    "nf4": _linear_layers(NF4),
    "mxfp4": _linear_layers(MXFP4),
    "q8_0": _gguf(Q8_0, head=Q8_0),
    "q6_k": _gguf(Q6_K),
    "q5_k_m": _gguf(Q5_K, values=Q6_K, down=Q6_K),
    "q5_k_s": _gguf(Q5_K),
    "q5_0": _gguf(Q5_0),
    "q4_k_m": _gguf(Q4_K, values=Q6_K, down=Q6_K),
    "q4_k_s": _gguf(Q4_K, values=Q5_K, down=Q5_K),
    "q4_0": _gguf(Q4_0),
    "q4_1": _gguf(Q4_1),
    "q3_k_m": _gguf(Q3_K, values=Q5_K, down=Q4_K),
    "q2_k": _gguf(Q2_K, values=Q4_K, down=Q3_K),
}


def find_format(name: str) -> TypeOf:
    key = {"fp16": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32"}.get(
        name.lower(), name.lower()
    )
    if key not in FORMATS:
        near = get_close_matches(key, FORMATS, 3, 0.5)
        hint = f"near it: {', '.join(near)}" if near else f"choose from {', '.join(FORMATS)}"
        raise Unsupported(f"the format `{name}` is not known", hint)
    return FORMATS[key]
