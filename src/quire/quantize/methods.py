"""The methods that `--method` names: GGUF types and mixes, and formats of linear layers."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from quire.core.errors import QuireError
from quire.core.nearest import nearest
from quire.quantize import linear_formats, microscaling
from quire.quantize.file_types import FILE_TYPES, SHORT_NAMES
from quire.quantize.linear_formats import LinearFormat

PLAIN = ("F32", "F16", "BF16")  # in either layout
PACKED_AS = "compressed-tensors"  # the layout in which layers may have several formats
COPY = "COPY"  # of GGUF: every tensor as it is


class UnknownMethod(QuireError):
    """A method, or an option of one, that there is not."""

    status, code = 400, "unknown_method"


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """What the command line says about a format; None: the method's own."""

    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    act_order: bool = False
    double_quantization: bool = True


@dataclass(frozen=True, slots=True)
class QuantizeMethod:
    """A row of the table: bits that a weight takes, about, and what the method is."""

    bits: float
    about: str
    make: Callable[[FormatOptions], LinearFormat] | None = None  # None: GGUF
    options: tuple[str, ...] = ()  # fields of FormatOptions that it has
    algorithm: str = "nearest"


def _grid(options: FormatOptions, bits: int, group: int, symmetric: bool) -> tuple[int, int, bool]:
    size = group if options.group_size is None else max(options.group_size, 0)
    return options.bits or bits, size, symmetric if options.symmetric is None else options.symmetric


def _weights_only(bits: int, symmetric: bool = True, group: int = 128) -> Callable[[FormatOptions], LinearFormat]:
    return lambda o: linear_formats.packed_integers(*_grid(o, bits, group, symmetric), o.act_order)


def _gptq(second: bool) -> Callable[[FormatOptions], LinearFormat]:
    return lambda o: linear_formats.gptq(*_grid(o, 4, 128, True), second, o.act_order)


_INTEGER = ("group_size", "symmetric", "act_order")

LINEAR_METHODS: dict[str, QuantizeMethod] = {
    "W4A16": QuantizeMethod(4.13, "compressed-tensors: 4-bit integers in groups of 128", _weights_only(4), _INTEGER),
    "W4A16_ASYM": QuantizeMethod(4.16, "the same with zero points", _weights_only(4, symmetric=False), _INTEGER),
    "W2A16": QuantizeMethod(2.25, "2-bit integers in groups of 64", _weights_only(2, group=64), _INTEGER),
    "W3A16": QuantizeMethod(3.13, "3-bit integers", _weights_only(3), _INTEGER),
    "W5A16": QuantizeMethod(5.13, "5-bit integers", _weights_only(5), _INTEGER),
    "W6A16": QuantizeMethod(6.13, "6-bit integers", _weights_only(6), _INTEGER),
    "W7A16": QuantizeMethod(7.13, "7-bit integers", _weights_only(7), _INTEGER),
    "W8A16": QuantizeMethod(8.13, "8-bit integers in groups of 128", _weights_only(8), _INTEGER),
    "W8A8": QuantizeMethod(
        8.02, "8-bit integers for weights and activations", lambda o: linear_formats.whole_bytes(8, 0)
    ),
    "W4A8": QuantizeMethod(
        8.13,
        "4-bit integers, a byte each, in groups of 128; activations of 8 bits",
        lambda o: linear_formats.whole_bytes(*_grid(o, 4, 128, True)[:2]),
        ("group_size",),
    ),
    "W4AFP8": QuantizeMethod(
        4.13,
        "4-bit integers in groups of 128; fp8 activations",
        lambda o: linear_formats.packed_integers(*_grid(o, 4, 128, True), False, linear_formats.FP8_TOKENS),
        ("group_size",),
    ),
    "FP8": QuantizeMethod(8.0, "fp8, a scale for each tensor", lambda o: linear_formats.fp8("tensor")),
    "FP8_DYNAMIC": QuantizeMethod(8.02, "fp8, a scale for each output", lambda o: linear_formats.fp8("channel")),
    "FP8_STATIC": QuantizeMethod(
        8.0,
        "fp8, a scale for each tensor, and one for its inputs from the calibration",
        lambda o: linear_formats.fp8("tensor", static_inputs=True),
    ),
    "FP8_BLOCK": QuantizeMethod(8.0, "fp8, a scale for 128 x 128 weights", lambda o: linear_formats.fp8("block")),
    "MXFP4A16": QuantizeMethod(4.25, "4-bit floats in groups of 32", lambda o: microscaling.mxfp4()),
    "MXFP4": QuantizeMethod(4.25, "the same, activations too", lambda o: microscaling.mxfp4(quantizes_inputs=True)),
    "MXFP8A16": QuantizeMethod(8.25, "fp8 in groups of 32", lambda o: microscaling.mxfp8(quantizes_inputs=False)),
    "MXFP8": QuantizeMethod(8.25, "the same, activations too", lambda o: microscaling.mxfp8(quantizes_inputs=True)),
    "NVFP4A16": QuantizeMethod(
        4.5, "4-bit floats in groups of 16 with fp8 scales", lambda o: microscaling.nvfp4(quantizes_inputs=False)
    ),
    "NVFP4": QuantizeMethod(
        4.5,
        "the same, activations too, with a scale from the calibration",
        lambda o: microscaling.nvfp4(quantizes_inputs=True),
    ),
    "GPTQ": QuantizeMethod(4.13, "GPTQ's layout, version 1", _gptq(False), ("bits", *_INTEGER), "gptq"),
    "GPTQ_V2": QuantizeMethod(4.13, "GPTQ's layout, version 2", _gptq(True), ("bits", *_INTEGER), "gptq"),
    "AWQ": QuantizeMethod(
        4.16,
        "AutoAWQ's layout: 4-bit integers with zero points",
        lambda o: linear_formats.awq(_grid(o, 4, 128, False)[1]),
        ("group_size",),
        "awq",
    ),
    "NF4": QuantizeMethod(
        4.13,
        "bitsandbytes: quantiles of a normal distribution",
        lambda o: linear_formats.four_bit_floats("nf4", o.double_quantization),
        ("double_quantization",),
    ),
    "FP4": QuantizeMethod(
        4.13,
        "bitsandbytes: floats of 4 bits",
        lambda o: linear_formats.four_bit_floats("fp4", o.double_quantization),
        ("double_quantization",),
    ),
    "LLM_INT8": QuantizeMethod(8.02, "bitsandbytes: 8-bit integers", lambda o: linear_formats.llm_int8()),
}
OTHER_NAMES = {"INT8": "W8A8", "W8A8_INT8": "W8A8", "W8A8_FP8": "FP8_DYNAMIC", "FLOAT16": "F16", "BFLOAT16": "BF16"}
OTHER_NAMES |= SHORT_NAMES | {"LLM.INT8": "LLM_INT8", "GPTQ_V1": "GPTQ", "INT4": "W4A16", "FP16": "F16", "FP32": "F32"}
IN_FILES = {"MXFP4": "MXFP4_MOE"}  # names that mean something else in a folder
BY_NUMBER = {str(number): name for name, (number, _) in FILE_TYPES.items()}  # llama-quantize takes them, too
# What other tools and guides say, and what is nearest to it here.
ELSEWHERE = {
    "SMOOTHQUANT": "smoothquant is an algorithm: `--method W8A8 --algorithm smoothquant`",
    "NEAREST": "nearest is an algorithm: `--method W4A16 --algorithm nearest`",
    "RTN": "that is `--method W4A16 --algorithm nearest`",
    "UNQUANTIZED": "that is BF16, F16 or F32",
    **dict.fromkeys(("MXFP6A16", "MXFP6A8"), "MXFP4A16 and MXFP8A16 are the floats of 4 and 8 bits"),
    "MXFP4XFP8": "MXFP4A16 has the same weights; W4AFP8 has fp8 activations",
    **dict.fromkeys(("W2A4", "W3A4", "W4A4"), "W4A8 has 8-bit activations; MXFP4 and NVFP4 have floats of 4 bits"),
    **{f"W{bits}A8": f"W4A8 and W8A8 have 8-bit activations; W{bits}A16 has these weights" for bits in (2, 3, 5, 6, 7)},
    "Q1_0": "the fewest bits of a GGUF file are those of IQ1_S, and TQ1_0's for ternary weights",
    **dict.fromkeys(("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8"), "Q4_0: llama.cpp repacks it as it loads"),
    **dict.fromkeys(("AUTOROUND", "AUTO_ROUND"), "`--method GPTQ` writes the same layout"),
    **dict.fromkeys(("BNB", "BITSANDBYTES"), "its formats are NF4, FP4 and LLM_INT8"),
    **dict.fromkeys(("COMPRESSED_TENSORS", "LLMCOMPRESSOR"), "its schemes are W4A16, W8A8, FP8_DYNAMIC and others"),
    **dict.fromkeys(("GGUF", "Q4", "4BIT", "4_BIT"), "the usual 4 bits are Q4_K_M in a GGUF file, W4A16 in a folder"),
    **dict.fromkeys(("Q8", "8BIT", "8_BIT"), "the usual 8 bits are Q8_0 in a GGUF file, FP8_DYNAMIC in a folder"),
}


def method_name(given: str, *, to_gguf: bool = True) -> str:
    """The name of the table, in capitals. `to_gguf`: the output is a file."""
    written = given.upper().replace("-", "_")
    name = (OTHER_NAMES | IN_FILES if to_gguf else OTHER_NAMES).get(written, BY_NUMBER.get(written, written))
    if name in FILE_TYPES or name in LINEAR_METHODS or name == COPY:
        return name
    near = nearest(name, [*FILE_TYPES, *LINEAR_METHODS], n=3)
    guess = f"did you mean {' or '.join(near)}?" if near else "`quire quantize --list` prints the methods"
    raise UnknownMethod(f"there is no method `{given}`", ELSEWHERE.get(written, guess))


class LinearFormats:
    """The formats of linear layers: the method's, and in a mix those of layers by name."""

    def __init__(
        self,
        method: str,
        options: FormatOptions,
        types: Sequence[tuple[str, str]] = (),
        patterns: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._method, self._types, self._patterns = method, dict(types), patterns
        self._formats = {method: linear_format(method, options)}
        for name in dict.fromkeys((*self._types.values(), *(name for _, name in patterns))):
            self._formats[name] = linear_format(name, _options_of(name, options))
        written = {name: form.config([])["quant_method"] for name, form in self._formats.items()}
        if len(self._formats) > 1 and (other := next((n for n in written if written[n] != PACKED_AS), None)):
            raise UnknownMethod(
                f"{other} is written as {written[other]}, which has one format for all layers",
                f"mix those of {PACKED_AS}, such as W4A16, W8A8 and FP8_DYNAMIC",
            )

    @property
    def usual(self) -> LinearFormat:
        return self._formats[self._method]

    @property
    def needs_inputs(self) -> bool:
        """Whether a format has a scale of a layer's inputs, which a calibration finds."""
        return any(form.input_scale is not None for form in self._formats.values())

    def method(self, name: str) -> str:
        pattern = next((kind for pattern, kind in self._patterns if re.search(pattern, name)), self._method)
        return self._types.get(name, pattern)

    def of(self, name: str) -> LinearFormat:
        """`name`: of the stored weight."""
        return self._formats[self.method(name)]

    def config(self, names: Iterable[str], ignored: list[str]) -> dict[str, Any]:
        """quantization_config of config.json; a mix of compressed-tensors has a group for each format."""
        layers: dict[str, list[str]] = {}
        for name in names:
            layers.setdefault(self.method(name), []).append(name.removesuffix(".weight"))
        if len(layers) < 2:
            return self._formats[next(iter(layers), self._method)].config(ignored)
        groups, layouts = {}, set()
        for index, method in enumerate(sorted(layers)):
            config = self._formats[method].config(ignored)
            layouts.add(config["format"])
            group = {**config["config_groups"]["group_0"], "targets": layers[method], "format": config["format"]}
            groups[f"group_{index}"] = group
        layout = layouts.pop() if len(layouts) == 1 else "mixed-precision"
        return {**self.usual.config(ignored), "format": layout, "config_groups": groups}


def _options_of(name: str, options: FormatOptions) -> FormatOptions:
    """The options that a format beside the method has."""
    return replace(FormatOptions(), **{field: getattr(options, field) for field in LINEAR_METHODS[name].options})


def check_no_options(name: str, options: FormatOptions) -> None:
    """Raises where flags of linear formats are given for a method that has none."""
    for field in fields(options):
        if getattr(options, field.name) != field.default:
            raise UnknownMethod(
                f"{name} has no --{field.name.replace('_', '-')}", "methods of folders do: see `quire quantize --list`"
            )


def linear_format(name: str, options: FormatOptions) -> LinearFormat:
    method = LINEAR_METHODS[name]
    defaults = FormatOptions()
    for field in ("bits", "group_size", "symmetric", "act_order", "double_quantization"):
        if getattr(options, field) != getattr(defaults, field) and field not in method.options:
            flags = ", ".join(f"--{option.replace('_', '-')}" for option in method.options) or "no such flags"
            raise UnknownMethod(f"{name} has no --{field.replace('_', '-')}", f"it has {flags}")
    if options.bits is not None and options.bits not in (2, 3, 4, 8):
        raise UnknownMethod(f"--bits is {options.bits}", "GPTQ has 2, 3, 4 and 8")
    if options.group_size is not None and options.group_size > 0 and options.group_size % 32:
        raise UnknownMethod(
            f"--group-size is {options.group_size}", "give a multiple of 32, or -1 for one group of a whole row"
        )
    assert method.make is not None
    return method.make(options)
