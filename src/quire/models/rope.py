"""Rotary frequencies: how far each pair of columns turns from one position to the next.

A checkpoint names a scaling and its numbers; `frequencies` turns them into inv_freq [rotary_dim / 2] and one factor for
cos and sin. Both are fixed for the life of a server: keys stay in the cache, so a scaling that depends on the length of
the context (dynamic, longrope) is taken at the served length and every token of every request is rotated alike."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint, Unsupported

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class Keys(Protocol):
    """The configuration of a checkpoint, or a part of it."""

    def get(self, key: str, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotary part of a checkpoint's configuration."""

    type: str
    theta: float
    rotary_dim: int  # columns of a head that turn; the rest stay
    max_position: int  # the checkpoint's max_position_embeddings
    numbers: Mapping[str, Any]  # what the scaling type reads: factor, low_freq_factor, ...

    def number(self, key: str, default: float | None = None) -> float:
        value = self.numbers.get(key)
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
        return int(self.number("original_max_position_embeddings", self.max_position))

    @property
    def stretch(self) -> float:
        """How many times longer than at first the context has become: said by a factor, or by the two lengths."""
        return self.number("factor", self.max_position / self.original_max)

    @property
    def default_length(self) -> int:
        """Tokens to serve unless told otherwise. Configurations with yarn often keep the length before stretching."""
        return (
            max(self.max_position, int(self.original_max * self.stretch)) if self.type == "yarn" else self.max_position
        )

    @property
    def longest(self) -> int:
        """Tokens that may be asked for: dynamic scaling stretches on demand."""
        return int(self.max_position * self.number("factor")) if self.type == "dynamic" else self.default_length


def read_rope(config: Keys, head_dim: int, max_position: int, default_theta: float = 10_000.0) -> RopeSpec:
    """From the keys of config.json: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    numbers = {"rope_theta": config.get("rope_theta"), "partial_rotary_factor": config.get("partial_rotary_factor")}
    if (original := config.get("original_max_position_embeddings")) is not None:
        numbers["original_max_position_embeddings"] = original
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key) or {}
        if not isinstance(given, Mapping):
            raise BadCheckpoint(f"`{key}` is {given!r} and not an object")
        numbers |= {name: value for name, value in given.items() if value is not None}
    kind = str(numbers.get("rope_type") or numbers.get("type") or "default")
    kind = {"su": "longrope"}.get(kind, kind)  # Phi-3 was first published under that name
    if kind not in SCALINGS:
        raise Unsupported(f"rope scaling `{kind}` is not supported", f"supported are {', '.join(SCALINGS)}")
    part = float(numbers.get("partial_rotary_factor") or 1.0)
    rotary_dim = int(config.get("rotary_dim") or head_dim * part)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise BadCheckpoint(f"{rotary_dim} of {head_dim} columns of a head turn, and columns turn in pairs")
    return RopeSpec(kind, float(numbers.get("rope_theta") or default_theta), rotary_dim, max_position, numbers)


def frequencies(spec: RopeSpec, max_model_len: int, factors: Float32 | None = None) -> tuple[Float32, float]:
    """-> inv_freq [rotary_dim / 2], and what cos and sin are multiplied by.

    `factors` [rotary_dim / 2] divide the frequencies last: a GGUF file carries a scaling as the tensor `rope_freqs`."""
    inv_freq, scale = SCALINGS[spec.type](spec, max_model_len)
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


def _linear(spec: RopeSpec, max_model_len: int) -> tuple[Float64, float]:
    return 1.0 / _powers(spec) / spec.number("factor"), 1.0


def _dynamic(spec: RopeSpec, max_model_len: int) -> tuple[Float64, float]:
    """NTK-aware: a larger theta, so that the slowest pair turns over the served length as over the trained one."""
    factor = spec.number("factor")
    stretch = factor * max(max_model_len, spec.max_position) / spec.max_position - (factor - 1)
    return 1.0 / _powers(spec, spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2))), 1.0


def _yarn(spec: RopeSpec, max_model_len: int) -> tuple[Float64, float]:
    """Fast pairs keep their frequency, slow ones are divided by the factor, those between are blended by a ramp."""
    factor = spec.stretch

    def pair_turning(turns: float) -> float:
        """Which pair makes that many turns over the trained context (a fraction of a pair is possible)."""
        return spec.rotary_dim * math.log(spec.original_max / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_turning(spec.number("beta_fast", 32)), pair_turning(spec.number("beta_slow", 1))
    if spec.numbers.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low or 0.001  # a ramp of no width is a step
    ramp = np.clip((np.arange(spec.rotary_dim // 2, dtype=np.float64) - low) / width, 0, 1)
    inv_freq = 1.0 / _powers(spec)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), _yarn_scale(spec, factor)


def yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    """What queries and keys are multiplied by where a context has become `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_scale(spec: RopeSpec, factor: float) -> float:
    if spec.numbers.get("attention_factor") is not None:
        return spec.number("attention_factor")
    if spec.numbers.get("mscale") and spec.numbers.get("mscale_all_dim"):
        return yarn_temperature(factor, spec.number("mscale")) / yarn_temperature(factor, spec.number("mscale_all_dim"))
    return yarn_temperature(factor)


def _llama3(spec: RopeSpec, max_model_len: int) -> tuple[Float64, float]:
    """As yarn, with the ramp over turns in the trained context instead of over pairs."""
    low, high = spec.number("low_freq_factor"), spec.number("high_freq_factor")
    inv_freq = 1.0 / _powers(spec)
    turns = spec.original_max * inv_freq / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return inv_freq * keep + inv_freq / spec.number("factor") * (1 - keep), 1.0


def _longrope(spec: RopeSpec, max_model_len: int) -> tuple[Float64, float]:
    """A factor for each pair, from one of two lists: for contexts as first trained, and for longer ones."""
    key = "long_factor" if max_model_len > spec.original_max else "short_factor"
    factors = np.asarray(spec.numbers.get(key) or (), dtype=np.float64)
    if factors.shape != (spec.rotary_dim // 2,):
        raise BadCheckpoint(f"`{key}` has {factors.size} numbers, and there are {spec.rotary_dim // 2} frequencies")
    scale = spec.numbers.get("attention_factor") or spec.numbers.get(key.replace("factor", "mscale"))  # Phi-3.5-MoE's
    if scale is None:
        scale = 1.0 if spec.stretch <= 1 else math.sqrt(1 + math.log(spec.stretch) / math.log(spec.original_max))
    return 1.0 / (factors * _powers(spec)), float(scale)


SCALINGS: dict[str, Callable[[RopeSpec, int], tuple[Float64, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
