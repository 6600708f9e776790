"""How a quantized checkpoint stores each matrix, by its config.json alone: what the readers of weights/formats make of
`quantization_config`, and which layers it leaves in floats."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.errors import BadCheckpoint
from quire.models.text_part import PREFIXES
from quire.ops.tensors import (
    BF16,
    F16,
    F32,
    FP4,
    FP8,
    MXFP4,
    NF4,
    Q4_0,
    Q4_F,
    Q4_Z,
    Q8_0,
    Q8_F,
    Q8_M,
    TQ2_0,
    StorageType,
)
from quire.planning.formats import TypeOf
from quire.weights.blocks import BLOCK_SIZE
from quire.weights.config import CheckpointConfig
from quire.weights.formats import quantization_section
from quire.weights.formats.compressed_tensors import FORMATS as COMPRESSED_FORMATS
from quire.weights.formats.fp8 import block_size
from quire.weights.formats.gptq import BITS as GPTQ_BITS
from quire.weights.formats.hqq import BITS as HQQ_BITS

LinearType = Callable[[str], StorageType | None]  # a linear layer -> how it is stored; None: in floats

_FLOATS = {"float32": F32, "float16": F16, "bfloat16": BF16}
# No quantizer takes what is no linear layer. The head and routers are linear, and most methods leave them.
_NO_LINEAR_LAYER = re.compile(r"embed|wte|wpe|norm|conv|A_log|\bshared$")
_LEFT = re.compile(r"lm_head|embed_out|router|gate$")
_NUMBERED_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """`words`: what it is. `unknown`: what config.json does not tell, and what is counted for it; empty: nothing."""

    type_of: TypeOf
    words: str
    unknown: str = ""


def stored_floats_type(config: CheckpointConfig) -> StorageType:
    """The type of matrices that are not quantized, as `dtype` says, or `torch_dtype`; without these, bfloat16."""
    sections = [config, *(config.section(name) for name in ("text_config", "llm_config") if name in config)]
    given = next((part.get(key) for part in sections for key in ("dtype", "torch_dtype") if key in part), None)
    return _FLOATS.get(str(given).removeprefix("torch."), BF16)


def config_format(config: CheckpointConfig, directory: Path) -> StoredFormat | None:
    """None where the checkpoint is not quantized. `directory`: for older exports, whose settings are a file there."""
    if (quantization := quantization_section(config, directory)) is None:
        return None
    method, floats = quantization.str("quant_method"), stored_floats_type(config)
    linear_type, words, unknown = METHODS[method](quantization, floats)

    def type_of(name: str, num_layers: int) -> StorageType:
        layer = first_expert(short_name(name.removesuffix(".weight")))
        return floats if _NO_LINEAR_LAYER.search(layer) else linear_type(layer) or floats

    return StoredFormat(type_of, f"{method}, {words}", unknown)


def first_expert(name: str) -> str:
    """The name of the same tensor of the first expert: those of all experts are alike."""
    return _NUMBERED_EXPERT.sub(".experts.0.", name)


def short_name(name: str) -> str:
    """The name that a decoder by itself has for a tensor, where the checkpoint takes images too."""
    for prefix, short in PREFIXES.items():
        if f"{name}.".startswith(prefix):
            return (short + f"{name}.".removeprefix(prefix)).removesuffix(".")
    return name


# -- which layers ------------------------------------------------------------------------------------------------------


def _all_but(kind: StorageType, kept: Iterable[Any] | None) -> LinearType:
    """Names of `kept` are whole words of a layer's: "visual", "mlp.gate", "model.layers.0.self_attn.q_proj"."""
    names = [short_name(str(name).strip(".")) for name in kept or ()]

    def linear_type(layer: str) -> StorageType | None:
        if _LEFT.search(layer) or any(_is_part(name, layer) for name in names):
            return None
        return kind

    return linear_type


def _is_part(name: str, layer: str) -> bool:
    if name.startswith("re:"):
        return _matches(name.removeprefix("re:"), layer)
    return f".{name}." in f".{layer}." or ("*" in name and _matches(name, layer))


def _matches(pattern: str, layer: str) -> bool:
    try:
        return re.match(pattern, layer) is not None
    except re.error as error:
        raise BadCheckpoint(f"quantization_config has {pattern!r}, which is no regex: {error}") from error


# -- methods -----------------------------------------------------------------------------------------------------------

_Found = tuple[LinearType, str, str]


def _integers(bits: int, symmetric: bool, group: int = -1) -> StorageType:
    """The type of grouped integers, as weights/formats/grouped.py makes it."""
    if group > 0 and group % BLOCK_SIZE:
        return F32
    if bits > 4:
        return Q8_0 if symmetric else Q8_M
    return Q4_0 if symmetric or bits < 4 else Q4_Z


def _gptq(quantization: CheckpointConfig, floats: StorageType) -> _Found:
    bits, group = quantization.expect("bits", *GPTQ_BITS), quantization.int("group_size", -1)
    symmetric = quantization.bool("sym", False)
    rules = quantization.dict("dynamic", {})
    chosen = [name for names in quantization.list("modules_in_block_to_quantize", []) for name in _as_list(names)]
    head = quantization.bool("lm_head", False)

    def linear_type(layer: str) -> StorageType | None:
        for pattern, values in rules.items():
            if _matches(pattern.removeprefix("+:").removeprefix("-:"), layer):
                if pattern.startswith("-:"):
                    return None
                of_layer = quantization.with_values(values)
                return _integers(
                    of_layer.expect("bits", *GPTQ_BITS), of_layer.bool("sym", False), of_layer.int("group_size", -1)
                )
        if _LEFT.search(layer) and not (head and layer == "lm_head"):
            return None
        if chosen and layer != "lm_head" and not any(layer.endswith(f".{name}") for name in chosen):
            return None
        return _integers(bits, symmetric, group)

    unknown = "" if "sym" in quantization or bits < 4 else "`sym` is missing: counted with zero points"
    return linear_type, f"{bits} bits{_groups(group)}", unknown


def _as_list(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _groups(size: int) -> str:
    return f" in groups of {size}" if size > 0 else ""


def _awq(quantization: CheckpointConfig, floats: StorageType) -> _Found:
    old = {"bits": quantization.get("w_bit"), "group_size": quantization.get("q_group_size")}
    quantization = quantization.with_values({key: value for key, value in old.items() if value is not None})
    quantization.expect("bits", 4)
    group = quantization.int("group_size")
    kept = quantization.list("modules_to_not_convert", [])
    return _all_but(_integers(4, False, group), kept), f"4 bits{_groups(group)}", ""


def _bitsandbytes(quantization: CheckpointConfig, floats: StorageType) -> _Found:
    kept = quantization.list("llm_int8_skip_modules", [])
    if quantization.get("load_in_8bit") or quantization.get("_load_in_8bit"):
        return _all_but(Q8_F, kept), "LLM.int8()", ""
    if not (quantization.get("load_in_4bit") or quantization.get("_load_in_4bit")):
        raise BadCheckpoint(
            f"{quantization.source}: quantization_config has neither load_in_4bit nor load_in_8bit",
            "name the folder with its weights, or say how they are stored: --format nf4",
        )
    kind = quantization.expect("bnb_4bit_quant_type", "nf4", "fp4", None) or "fp4"
    return _all_but({"nf4": NF4, "fp4": FP4}[kind], kept), kind, ""


def _fp8(quantization: CheckpointConfig, floats: StorageType) -> _Found:
    _, columns = block_size(quantization, "weight_block_size")
    blocks = "weight_block_size" in quantization
    keys = ("modules_to_not_convert", "ignored_layers", "ignore")
    kept = [name for key in keys for name in quantization.list(key, [])]
    kind = F32 if blocks and columns % BLOCK_SIZE else FP8
    return _all_but(kind, kept), "e4m3", ""


def _eetq(quantization: CheckpointConfig, floats: StorageType) -> _Found:
    quantization.expect("weights", None, "int8")
    return _all_but(Q8_0, quantization.list("modules_to_not_convert", [])), "8 bits", ""


def _hqq(quantization: CheckpointConfig, floats: StorageType) -> _Found:
    """`quant_config` has settings for all layers, or for each name of layers (`self_attn.q_proj`)."""
    given = quantization.section("quant_config")
    kept = _all_but(F16, quantization.list("skip_modules", []))
    if not given.values:
        raise BadCheckpoint(
            f"{quantization.source}: quantization_config.quant_config is missing", "name the folder with its weights"
        )
    if "weight_quant_params" in given:
        kind, bits = _hqq_type(given)
        return (lambda layer: kind if kept(layer) else None), f"{bits} bits", ""
    of_names = {name: _hqq_type(given.section(name))[0] for name in given.values}

    def linear_type(layer: str) -> StorageType | None:
        return next((kind for name, kind in of_names.items() if kept(layer) and layer.endswith(f".{name}")), None)

    return linear_type, "by layer", ""


def _hqq_type(settings: CheckpointConfig) -> tuple[StorageType, int]:
    values = settings.section("weight_quant_params")
    bits, group = values.expect("nbits", *HQQ_BITS), values.int("group_size", -1)
    if values.expect("axis", 0, 1, None) == 0:
        return F16, bits
    return _integers(max(bits, 4), False, group), bits


def _mxfp4(quantization: CheckpointConfig, floats: StorageType) -> _Found:
    """gpt-oss: its experts."""
    return (lambda layer: MXFP4 if ".experts." in layer else None), "experts", ""


def _bitnet(quantization: CheckpointConfig, floats: StorageType) -> _Found:
    """A scale that is divided by is rarely one that fp16 holds."""
    online = quantization.expect("quantization_mode", "offline", "online", None) == "online"
    divides = quantization.expect("linear_class", "bitlinear", "autobitlinear", None) != "autobitlinear"
    kind = TQ2_0 if online or not divides else Q4_F
    kept = quantization.list("modules_to_not_convert", [])
    return _all_but(kind, kept), "ternary", ""


def _compressed_tensors(quantization: CheckpointConfig, floats: StorageType) -> _Found:
    """The first group that names a layer, then one whose regex fits, then one of all linear layers."""
    quantization.expect("format", *COMPRESSED_FORMATS)
    groups, section = [], quantization.section("config_groups")
    for name in section.values:
        group = section.section(name)
        if "weights" in group:
            kind = _scheme_type(group.section("weights"), floats)
            groups.append(([str(target) for target in group.list("targets")], kind))
    ignored = [str(name) for name in quantization.list("ignore", [])]

    def linear_type(layer: str) -> StorageType | None:
        if any(_is_called(name, layer) for name in ignored):
            return None
        ranks = ((min(_rank(target, layer) for target in targets), kind) for targets, kind in groups if targets)
        best = min(ranks, key=lambda found: found[0], default=None)
        return None if best is None or best[0] == _NO_MATCH else best[1]

    return linear_type, quantization.str("format"), ""


_NO_MATCH = 3


def _rank(target: str, layer: str) -> int:
    if _is_called(target, layer):
        return 1 if target.startswith("re:") else 0
    return 2 if target in ("Linear", "LinearBase") else _NO_MATCH


def _is_called(name: str, layer: str) -> bool:
    return _matches(name.removeprefix("re:"), layer) if name.startswith("re:") else short_name(name) == layer


def _scheme_type(weights: CheckpointConfig, floats: StorageType) -> StorageType:
    bits, group = weights.int("num_bits", 8), weights.int("group_size", -1)
    if weights.str("type", "int") == "float":
        if bits == 4:
            return F16 if group == 16 else MXFP4  # products of NVFP4 are kept
        _, columns = block_size(weights, "block_structure")
        return F32 if "block_structure" in weights and columns % BLOCK_SIZE else FP8
    kind = _integers(bits, weights.bool("symmetric", True), group)
    wide = {Q4_0: Q4_F, Q4_Z: Q4_F, Q8_0: Q8_F} if floats is F32 and bits >= 4 else {}  # scales of 24 bits
    return wide.get(kind, kind)


METHODS: dict[str, Callable[[CheckpointConfig, StorageType], _Found]] = {
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "eetq": _eetq,
    "hqq": _hqq,
    "mxfp4": _mxfp4,
    "bitnet": _bitnet,
}
