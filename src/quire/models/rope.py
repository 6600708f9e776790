"""Rotary position embedding (RoPE): the frequency of each pair of columns, in radians a position.

A checkpoint names a scaling and its parameters. `frequencies` computes inv_freq [rotary_dim / 2] from them, and one
factor for cos and sin. Both are fixed for the life of a server, because rotated keys stay in the cache: a scaling that
depends on the length of the context (dynamic, longrope) is taken at the served length."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint, Unsupported

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class ConfigValues(Protocol):
    """The configuration of a checkpoint, or a section of it."""

    def get(self, key: str, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The RoPE settings of a checkpoint."""

    type: str
    theta: float
    rotary_dim: int  # leading columns of a head that are rotated
    max_position: int  # the checkpoint's max_position_embeddings
    params: Mapping[str, Any]  # of the scaling: factor, low_freq_factor, ...

    def param(self, key: str, default: float | None = None) -> float:
        value = self.params.get(key)
        if value is None:
            value = default
        if value is None:
            raise BadCheckpoint(f"rope scaling `{self.type}` needs `{key}`, and the configuration has none")
        if not isinstance(value, int | float):
            raise BadCheckpoint(f"`{key}` of rope scaling `{self.type}` is {value!r} and not a number")
        return float(value)

    @property
    def original_max(self) -> int:
        """The context the model was first trained with."""
        return int(self.param("original_max_position_embeddings", self.max_position))

    @property
    def factor(self) -> float:
        """By how much the context was extended: `factor`, or the ratio of the two lengths."""
        return self.param("factor", self.max_position / self.original_max)

    @property
    def default_length(self) -> int:
        """Tokens to serve by default. Configurations with yarn often give the length before the extension."""
        return (
            max(self.max_position, int(self.original_max * self.factor)) if self.type == "yarn" else self.max_position
        )

    @property
    def max_length(self) -> int:
        """The most tokens that can be served: dynamic scaling extends on demand."""
        return int(self.max_position * self.param("factor")) if self.type == "dynamic" else self.default_length


def read_rope(config: ConfigValues, head_dim: int, max_position: int, default_theta: float = 10_000.0) -> RopeSpec:
    """From the keys of config.json: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    params = {"rope_theta": config.get("rope_theta"), "partial_rotary_factor": config.get("partial_rotary_factor")}
    if (original := config.get("original_max_position_embeddings")) is not None:
        params["original_max_position_embeddings"] = original
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key) or {}
        if not isinstance(given, Mapping):
            raise BadCheckpoint(f"`{key}` is {given!r} and not an object")
        params |= {name: value for name, value in given.items() if value is not None}
    kind = str(params.get("rope_type") or params.get("type") or "default")
    kind = {"su": "longrope", "deepseek_yarn": "yarn"}.get(kind, kind)  # as Phi-3 and Sarvam were published
    if kind not in SCALINGS:
        raise Unsupported(f"rope scaling `{kind}` is not supported", f"supported are {', '.join(SCALINGS)}")
    fraction = float(params.get("partial_rotary_factor") or 1.0)
    fraction = 1.0 if kind == "proportional" else fraction  # which says itself how many pairs rotate
    rotary_dim = int(config.get("rotary_dim") or head_dim * fraction)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise BadCheckpoint(f"{rotary_dim} of {head_dim} columns of a head are rotated, and they rotate in pairs")
    return RopeSpec(kind, float(params.get("rope_theta") or default_theta), rotary_dim, max_position, params)


def frequencies(spec: RopeSpec, max_model_len: int, factors: Float32 | None = None) -> tuple[Float32, float]:
    """-> inv_freq [rotary_dim / 2], and the factor of cos and sin.

    `factors` [rotary_dim / 2] divide the frequencies last: a GGUF file carries a scaling as the tensor `rope_freqs`."""
    try:
        with np.errstate(all="ignore"):
            inv_freq, scale = SCALINGS[spec.type](spec, max_model_len)
    except (ArithmeticError, ValueError) as error:
        raise BadCheckpoint(f"rope scaling `{spec.type}` of {dict(spec.params)} cannot be computed: {error}") from error
    if not (np.isfinite(inv_freq).all() and math.isfinite(scale)):
        raise BadCheckpoint(f"rope scaling `{spec.type}` of {dict(spec.params)} gives frequencies that are not finite")
    if factors is not None:
        if factors.shape != inv_freq.shape:
            raise BadCheckpoint(f"rope_freqs has {factors.size} factors, and there are {inv_freq.size} frequencies")
        inv_freq = inv_freq / factors
    return inv_freq.astype(np.float32), scale


def _powers(spec: RopeSpec, theta: float | None = None) -> Float64:
    """theta ** (2i / rotary_dim): the wavelength of pair i, divided by 2 pi."""
    exponents = np.arange(0, spec.rotary_dim, 2, dtype=np.float64) / spec.rotary_dim
    powers: Float64 = (theta or spec.theta) ** exponents
    return powers


def _default(spec: RopeSpec, max_model_len: int) -> tuple[Float64, float]:
    return 1.0 / _powers(spec), 1.0


def _proportional(spec: RopeSpec, max_model_len: int) -> tuple[Float64, float]:
    """The slower pairs, `1 - partial_rotary_factor` of all, do not rotate."""
    inv_freq = 1.0 / _powers(spec) / spec.param("factor", 1.0)
    inv_freq[int(spec.param("partial_rotary_factor", 1.0) * spec.rotary_dim // 2) :] = 0.0
    return inv_freq, 1.0


def _linear(spec: RopeSpec, max_model_len: int) -> tuple[Float64, float]:
    return 1.0 / _powers(spec) / spec.param("factor"), 1.0


def _dynamic(spec: RopeSpec, max_model_len: int) -> tuple[Float64, float]:
    """NTK-aware: a larger theta, so that the slowest pair rotates as far over the served length as over the trained."""
    factor = spec.param("factor")
    stretch = factor * max(max_model_len, spec.max_position) / spec.max_position - (factor - 1)
    return 1.0 / _powers(spec, spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2))), 1.0


def _yarn(spec: RopeSpec, max_model_len: int) -> tuple[Float64, float]:
    """Fast pairs keep their frequency, slow ones are divided by the factor, and a ramp blends between the two."""
    factor = spec.factor

    def pair_with(rotations: float) -> float:
        """The (fractional) index of the pair that makes that many rotations over the trained context."""
        return spec.rotary_dim * math.log(spec.original_max / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_with(spec.param("beta_fast", 32)), pair_with(spec.param("beta_slow", 1))
    if spec.params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low or 0.001  # a ramp of no width is a step
    ramp = np.clip((np.arange(spec.rotary_dim // 2, dtype=np.float64) - low) / width, 0, 1)
    inv_freq = 1.0 / _powers(spec)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), _yarn_scale(spec, factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """The factor of queries and keys after an extension of the context by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_scale(spec: RopeSpec, factor: float) -> float:
    if spec.params.get("attention_factor") is not None:
        return spec.param("attention_factor")
    if spec.params.get("mscale") and spec.params.get("mscale_all_dim"):
        return yarn_mscale(factor, spec.param("mscale")) / yarn_mscale(factor, spec.param("mscale_all_dim"))
    return yarn_mscale(factor)


def _llama3(spec: RopeSpec, max_model_len: int) -> tuple[Float64, float]:
    """Llama 3's scaling: as yarn, with the ramp over rotations in the trained context instead of over pairs."""
    low, high = spec.param("low_freq_factor"), spec.param("high_freq_factor")
    inv_freq = 1.0 / _powers(spec)
    rotations = spec.original_max * inv_freq / (2 * math.pi)
    keep = np.clip((rotations - low) / (high - low), 0, 1)
    return inv_freq * keep + inv_freq / spec.param("factor") * (1 - keep), 1.0


def _longrope(spec: RopeSpec, max_model_len: int) -> tuple[Float64, float]:
    """A factor for each pair, from one of two lists: for contexts as first trained, and for longer ones."""
    key = "long_factor" if max_model_len > spec.original_max else "short_factor"
    factors = np.asarray(spec.params.get(key) or (), dtype=np.float64)
    if factors.shape != (spec.rotary_dim // 2,):
        raise BadCheckpoint(f"`{key}` has {factors.size} factors, and there are {spec.rotary_dim // 2} frequencies")
    scale = spec.params.get("attention_factor") or spec.params.get(key.replace("factor", "mscale"))  # Phi-3.5-MoE's
    if scale is None:
        scale = 1.0 if spec.factor <= 1 else math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max))
    return 1.0 / (factors * _powers(spec)), float(scale)


SCALINGS: dict[str, Callable[[RopeSpec, int], tuple[Float64, float]]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
