"""Options that scale the positions of a model beyond what its checkpoint says: those of vLLM and of llama.cpp."""

import json
from collections.abc import Mapping
from typing import Any

from quire.core.errors import BadRequest

KEYS = ("rope_scaling", "rope_parameters", "rope_theta", "max_position_embeddings")
KINDS = ("none", "linear", "dynamic", "yarn")  # that `rope_scaling` may name, with `rope_scale` for the factor
EXAMPLE = """'{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'"""


def rope_overrides(
    hf_overrides: str | None, scaling: str | None, scale: float | None, theta: float | None, original: int | None
) -> dict[str, Any]:
    """Keys of config.json's `rope_parameters`, and `max_position_embeddings`; {}: as the checkpoint says."""
    given = _object("hf_overrides", hf_overrides, "'{\"rope_theta\": 1000000}'")
    for key in given:
        if key not in KEYS:
            hint = f"it may have {', '.join(KEYS)}: the rest is the checkpoint's own"
            raise BadRequest(f"hf_overrides has `{key}`", hint, param="hf_overrides")
    params = {**_section(given, "rope_scaling"), **_section(given, "rope_parameters")}
    params |= {key: given[key] for key in ("rope_theta", "max_position_embeddings") if key in given}
    params |= _scaling(scaling, scale)
    if theta is not None:
        params["rope_theta"] = theta
    if original is not None:
        params["original_max_position_embeddings"] = original
    if "type" in params:
        params.setdefault("rope_type", params.pop("type"))
    if params.get("rope_type") in ("linear", "dynamic", "yarn") and "factor" not in params:
        kind = params["rope_type"]
        raise BadRequest(f"the RoPE scaling `{kind}` has no factor", "give rope_scale, such as 4", param="rope_scale")
    if "original_max_position_embeddings" in params and "rope_type" not in params:
        raise BadRequest("yarn_orig_ctx is given, and no scaling", "give rope_scaling yarn", param="yarn_orig_ctx")
    return params


def _scaling(scaling: str | None, scale: float | None) -> dict[str, Any]:
    if scaling is not None and scaling.lstrip().startswith("{"):
        params = _object("rope_scaling", scaling, EXAMPLE)
        if scale is not None:
            raise BadRequest("rope_scaling has its factor, and rope_scale is given too", "give one", param="rope_scale")
        return params
    if scaling is not None and scaling not in KINDS:
        hint = f"choose from {', '.join(KINDS)}, or write JSON: {EXAMPLE}"
        raise BadRequest(f"rope_scaling is `{scaling}`", hint, param="rope_scaling")
    if scaling is None and scale is None:
        return {}
    if scaling == "none":
        return {"rope_type": "default"}
    return {"rope_type": scaling or "linear"} | ({} if scale is None else {"factor": scale})


def _section(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    section = given.get(key) or {}
    if not isinstance(section, dict):
        raise BadRequest(f"{key} of hf_overrides is {json.dumps(section)}", "write an object", param="hf_overrides")
    return section


def _object(name: str, text: str | None, example: str) -> dict[str, Any]:
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{name} is not JSON: {error}", f"write {example}", param=name) from None
    if not isinstance(values, dict):
        raise BadRequest(f"{name} is no JSON object", f"write {example}", param=name)
    return values
