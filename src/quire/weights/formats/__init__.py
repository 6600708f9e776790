"""Quantized checkpoints in Hugging Face's layout: which reader understands which `quant_method`.

A reader is a module with

    read(quantization: CheckpointConfig, raw: RawTensors) -> dict[str, DerivedTensor]

which finds the tensors that belong together, checks their shapes, and says how each weight is derived from them.
Nothing is read until a weight is asked for. Other tensors are weights as they are."""

from importlib import import_module
from pathlib import Path

from quire.core.errors import Unsupported
from quire.weights.config import CheckpointConfig
from quire.weights.formats.derived_tensor import DerivedTensor
from quire.weights.huggingface import read_json
from quire.weights.raw import RawTensors

FORMATS = {
    "gptq": "quire.weights.formats.gptq",
    "awq": "quire.weights.formats.awq",
    "bitsandbytes": "quire.weights.formats.bitsandbytes",
    "compressed-tensors": "quire.weights.formats.compressed_tensors",
    "fp8": "quire.weights.formats.fp8",
    "fbgemm_fp8": "quire.weights.formats.fp8",
    "eetq": "quire.weights.formats.eetq",
    "hqq": "quire.weights.formats.hqq",
    "mxfp4": "quire.weights.formats.mxfp4",
    "bitnet": "quire.weights.formats.bitnet",
}

# Static scales of activations, which are computed at run time, and of keys and values, which are no weights.
NOT_WEIGHTS = (".k_scale", ".v_scale", ".q_scale", ".output_scale", ".kv_scale")

# Older exports have quantization_config in a file of its own.
OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def read_quantized(config: CheckpointConfig, raw: RawTensors) -> dict[str, DerivedTensor]:
    """Name -> weight derived from several tensors; {} where the checkpoint is not quantized."""
    quantization = _quantization(config, raw.path)
    if quantization is None:
        return {}
    derived: dict[str, DerivedTensor] = import_module(FORMATS[_method(quantization)]).read(quantization, raw)
    return derived


def quantization_section(config: CheckpointConfig, directory: Path) -> CheckpointConfig | None:
    """With its `quant_method`, one of FORMATS. None where the checkpoint is not quantized."""
    quantization = _quantization(config, directory)
    if quantization is not None:
        _method(quantization)
    return quantization


def check_method(config: CheckpointConfig) -> None:
    """Raises Unsupported where config.json names a quant_method that is not read."""
    if (quantization := _in_config(config)) is not None:
        _method(quantization)


def _method(quantization: CheckpointConfig) -> str:
    method = quantization.str("quant_method")
    if method not in FORMATS:
        raise Unsupported(
            f"{quantization.source}: quantization_config.quant_method is {method!r}",
            f"{', '.join(FORMATS)} are read; a plain checkpoint can be quantized with `--quantization`",
        )
    return method


def stored_format(config: CheckpointConfig, path: Path) -> str:
    """What the checkpoint at `path` is quantized as: a key of FORMATS, gguf, or "" where it is plain."""
    if not path.is_dir():
        return "gguf"
    quantization = _quantization(config, path)
    return "" if quantization is None else quantization.str("quant_method")


def _quantization(config: CheckpointConfig, directory: Path) -> CheckpointConfig | None:
    if (quantization := _in_config(config)) is not None:
        return quantization
    for file, method in OLDER_FILES.items():
        if values := read_json(directory / file):
            return CheckpointConfig(directory / file, {"quant_method": method, **values})
    return None


def _in_config(config: CheckpointConfig) -> CheckpointConfig | None:
    for key in ("quantization_config", "compression_config"):
        if key in config:
            section = config.section(key)
            if "quant_method" in section:
                return section
            # The first checkpoints of bitsandbytes, and compressed-tensors' own key, have no quant_method.
            return section.with_values(
                {"quant_method": "bitsandbytes" if "load_in_8bit" in section else "compressed-tensors"}
            )
    return None
