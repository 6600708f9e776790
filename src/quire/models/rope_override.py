"""Another scaling of positions than the checkpoint's, as its configuration would say it."""

from collections.abc import Mapping
from typing import Any

from quire.core.errors import Unsupported
from quire.models.registry import family, read_model_config
from quire.models.text_part import SECTIONS
from quire.weights.config import CheckpointConfig

_KEPT = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")  # where the scaling is replaced


def with_rope(config: CheckpointConfig, params: Mapping[str, Any]) -> CheckpointConfig:
    """`params`: keys of `rope_parameters`, and `max_position_embeddings`. Raises where they change nothing."""
    changed = config.with_values(_changed(config.values, params))
    model = family(config.architecture)
    if read_model_config(model, changed) == read_model_config(model, config):
        raise Unsupported(
            f"the RoPE options change nothing for this `{config.architecture}`",
            "leave out rope_scaling, rope_scale, rope_theta, yarn_orig_ctx and hf_overrides",
        )
    return changed


def _changed(values: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one section that differ, and of the language model's section inside it."""
    if section := next((name for name in SECTIONS if isinstance(values.get(name), dict)), None):
        return {section: {**values[section], **_changed(values[section], params)}}
    old = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    if any(isinstance(value, dict) for value in old.values()):
        raise Unsupported(
            "this model has RoPE settings for each kind of its layers", "leave out the options that scale positions"
        )
    rope = {name: value for name, value in params.items() if name != "max_position_embeddings"}
    if "rope_type" in rope:
        old = {name: value for name, value in old.items() if name in _KEPT}
    changed: dict[str, Any] = {"rope_scaling": None, "rope_parameters": {**old, **rope}}
    if "rope_theta" in rope:
        changed["rope_theta"] = rope["rope_theta"]
    length = params.get("max_position_embeddings", values.get("max_position_embeddings"))
    if rope.get("rope_type") == "linear" and "max_position_embeddings" not in params and length is not None:
        length = int(length * rope["factor"])
    if length is not None:
        changed["max_position_embeddings"] = length
    return changed
