"""Which type each tensor of a GGUF file gets: llama.cpp's choices, so that a file called Q4_K_M is one.

Values of attention and the second matrices of feed-forward layers lose most, so mixes give them more bits, in all
layers or in the first, the last and some between."""

import re
from dataclasses import dataclass

from quire.ops.tensors import GGUF_TYPES

# Method -> (number of `general.file_type`, type of most matrices).
FILE_TYPES = {
    "F32": (0, "F32"),
    "F16": (1, "F16"),
    "BF16": (32, "BF16"),
    "Q4_0": (2, "Q4_0"),
    "Q4_1": (3, "Q4_1"),
    "Q5_0": (8, "Q5_0"),
    "Q5_1": (9, "Q5_1"),
    "Q8_0": (7, "Q8_0"),
    "Q2_K": (10, "Q2_K"),
    "Q2_K_S": (21, "Q2_K"),
    "Q3_K_S": (11, "Q3_K"),
    "Q3_K_M": (12, "Q3_K"),
    "Q3_K_L": (13, "Q3_K"),
    "Q4_K_S": (14, "Q4_K"),
    "Q4_K_M": (15, "Q4_K"),
    "Q5_K_S": (16, "Q5_K"),
    "Q5_K_M": (17, "Q5_K"),
    "Q6_K": (18, "Q6_K"),
    "IQ1_S": (24, "IQ1_S"),
    "IQ1_M": (31, "IQ1_M"),
    "TQ1_0": (36, "TQ1_0"),
    "TQ2_0": (37, "TQ2_0"),
    "IQ2_XXS": (19, "IQ2_XXS"),
    "IQ2_XS": (20, "IQ2_XS"),
    "IQ2_S": (28, "IQ2_XS"),
    "IQ2_M": (29, "IQ2_S"),
    "IQ3_XXS": (23, "IQ3_XXS"),
    "IQ3_XS": (22, "IQ3_S"),
    "IQ3_S": (26, "IQ3_S"),
    "IQ3_M": (27, "IQ3_S"),
    "IQ4_XS": (30, "IQ4_XS"),
    "IQ4_NL": (25, "IQ4_NL"),
    "MXFP4_MOE": (38, "MXFP4"),
}
SHORT_NAMES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}  # as llama.cpp reads them

# Where a row is not whole blocks of 256.
FALLBACKS = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
FALLBACKS |= dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), "IQ4_NL")
FALLBACKS |= {"TQ1_0": "Q4_0", "TQ2_0": "Q4_0"}
TWO_BITS = {
    "IQ1_S": "Q2_K",
    "IQ1_M": "Q2_K",
    "IQ2_XXS": "Q2_K",
    "IQ2_XS": "Q2_K",
    "IQ2_S": "IQ3_S",
    "IQ2_M": "IQ3_S",
}  # and what tensors that lose more get
FIVE_BITS_OF_8_EXPERTS = (
    "Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M",
)  # fmt: skip
NOT_QUANTIZED = re.compile(
    r".*(_norm|ffn_gate_inp|ffn_gate_inp_shexp|exp_probs_b|attn_sinks|rope_freqs|position_embd|token_types"
    r"|rope_factors_(long|short))\.(weight|bias)|.*\.bias"
)


@dataclass(frozen=True, slots=True)
class FileTypeContext:
    """What the choice of a tensor's type depends on, of the model and the command line."""

    num_layers: int
    heads_a_kv_head: int = 1
    num_experts: int = 0
    has_head: bool = True  # else the embedding table is the head
    has_importance: bool = False
    pure: bool = False  # all matrices get the type of most
    head_type: str | None = None
    table_type: str | None = None


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the tensor is one that is quantized."""
    return len(shape) > 1 and not NOT_QUANTIZED.fullmatch(name)


def tensor_type(method: str, name: str, shape: tuple[int, ...], context: FileTypeContext) -> str:
    """F32 for tensors that are not quantized."""
    if not is_matrix(name, shape):
        return "F32"
    chosen = _chosen(method, name, shape, context)
    if shape[-1] % GGUF_TYPES[chosen].block:
        chosen = FALLBACKS.get(chosen, "F16")
    return chosen if shape[-1] % GGUF_TYPES[chosen].block == 0 else "F16"


def _chosen(method: str, name: str, shape: tuple[int, ...], context: FileTypeContext) -> str:
    most = FILE_TYPES[method][1]
    if name == "output.weight" or (name == "token_embd.weight" and not context.has_head):
        if context.head_type or most in ("F32", "F16", "BF16", "Q8_0") or context.pure:
            return context.head_type or most
        if method == "MXFP4_MOE" or shape[-1] % GGUF_TYPES[most].block:
            return "Q8_0"
        return "Q5_K" if method in TWO_BITS or method == "IQ3_XXS" else "Q6_K"
    if name == "token_embd.weight":
        chosen = {"IQ3_XXS": "IQ3_S", "TQ1_0": "Q4_K", "TQ2_0": "Q4_K"}.get(method, TWO_BITS.get(method, most))
        return context.table_type or (most if context.pure else chosen)
    if method == "MXFP4_MOE":
        return "MXFP4" if len(shape) > 2 else "Q8_0"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or context.pure or most in ("F32", "F16", "BF16"):
        return most
    layer, part = int(match[1]), match[2].removesuffix("_exps").removesuffix("_shexp")
    return _BY_PART[part](method, most, layer, context) if part in _BY_PART else most


def _more_bits(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _values(method: str, most: str, layer: int, context: FileTypeContext) -> str:
    if context.num_experts == 8:
        return "Q8_0"
    shared, more = context.heads_a_kv_head >= 4, _more_bits(layer, context.num_layers)
    if method in TWO_BITS:
        return "Q4_K" if shared or context.num_experts >= 4 else TWO_BITS[method]
    choices = {
        "IQ3_XXS": "Q4_K" if shared else most if context.has_importance else "IQ3_S",
        "IQ3_XS": "Q4_K" if shared else most,
        "IQ3_S": "Q4_K" if shared else most,
        "IQ3_M": "Q4_K",
        "IQ4_XS": "Q5_K" if shared else most,
        "Q2_K": "Q4_K" if shared else "Q3_K",
        "Q2_K_S": "Q4_K" if shared else most,
        "Q3_K_M": "Q5_K" if layer < 2 else "Q4_K",
        "Q3_K_L": "Q5_K",
        "IQ4_NL": "Q5_K" if shared else most,
        "Q4_K_S": "Q5_K" if layer < 4 else most,
        "Q4_K_M": "Q6_K" if more else most,
        "Q5_K_M": "Q6_K" if more else most,
    }
    chosen = choices.get(method, most)
    if context.num_layers == 80 and shared and chosen in ("Q3_K", "Q4_K"):
        return "Q5_K"  # 70B: 8 heads share these, so they are small
    return chosen


def _keys(method: str, most: str, layer: int, context: FileTypeContext) -> str:
    if context.num_experts == 8:
        return "Q4_K" if method in TWO_BITS else "Q8_0"
    return _queries(method, most, layer, context)


def _queries(method: str, most: str, layer: int, context: FileTypeContext) -> str:
    return {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}.get(method, most)


def _gate_and_up(method: str, most: str, layer: int, context: FileTypeContext) -> str:
    eighth, last = context.num_layers // 8, 7 * context.num_layers // 8
    return "IQ3_XXS" if method == "IQ3_XS" and eighth <= layer < last else most


def _down(method: str, most: str, layer: int, context: FileTypeContext) -> str:
    first, more = layer < context.num_layers // 8, _more_bits(layer, context.num_layers)
    importance = context.has_importance
    if method in TWO_BITS:
        return TWO_BITS[method] if first else most
    choices = {
        "IQ3_XXS": most if importance else "Q4_K" if first else "Q3_K",
        "IQ3_M": "Q4_K" if first or (context.num_experts == 8 and more) else most,
        "IQ4_XS": "Q5_K" if first and not importance else most,
        "Q2_K": "Q3_K",
        "Q2_K_S": "Q4_K" if first else most,
        "Q3_K_M": "Q5_K" if layer < context.num_layers // 16 else "Q4_K",
        "Q3_K_L": "Q5_K",
        "Q4_K_M": "Q6_K" if more else most,
        "Q5_K_M": "Q6_K" if more else most,
        "Q4_K_S": "Q5_K" if first else most,
        "IQ4_NL": "Q5_K" if first and not importance else most,
        "Q4_0": "Q4_1" if first and importance else most,
        "Q5_0": "Q5_1" if first and importance else most,
    }
    return choices.get(method, most)


def _output(method: str, most: str, layer: int, context: FileTypeContext) -> str:
    if context.num_experts == 8:
        return "Q5_K" if method in FIVE_BITS_OF_8_EXPERTS or method in TWO_BITS else most
    choices = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_XXS": "IQ3_S", "IQ3_M": "Q4_K"}
    choices |= {"IQ1_S": "IQ2_XXS", "IQ1_M": "IQ2_XXS"}
    return choices.get(method, "IQ3_S" if method in ("IQ2_S", "IQ2_M") else most)


def _stacked_qkv(method: str, most: str, layer: int, context: FileTypeContext) -> str:
    choices = {"Q3_K_M": "Q4_K", "Q3_K_L": "Q4_K", "IQ3_M": "Q4_K", "Q4_K_M": "Q5_K", "Q5_K_M": "Q6_K"}
    return choices.get(method, most)


_BY_PART = {
    "attn_v": _values,
    "attn_k": _keys,
    "attn_q": _queries,
    "ffn_gate": _gate_and_up,
    "ffn_up": _gate_and_up,
    "ffn_down": _down,
    "attn_output": _output,
    "attn_qkv": _stacked_qkv,
}
