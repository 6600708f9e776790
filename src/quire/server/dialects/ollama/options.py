"""The `options` of a request. Names and defaults are Ollama's. Unknown options are ignored with a warning, as there."""

import logging
from collections.abc import Mapping
from itertools import islice
from typing import Any

from quire.core.errors import MAX_MESSAGE, BadRequest, shortened
from quire.core.params import SamplingParams

log = logging.getLogger("quire.server")

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "integer": ((int, float), "integer"),
    "number": ((int, float), "float32"),
    "boolean": ((bool,), "boolean"),
    "texts": ((list,), "array"),
}

_OPTIONS = {
    "seed": "integer",
    "num_ctx": "integer",
    "num_predict": "integer",
    "top_k": "integer",
    "top_p": "number",
    "min_p": "number",
    "typical_p": "number",
    "temperature": "number",
    "repeat_last_n": "integer",
    "repeat_penalty": "number",
    "presence_penalty": "number",
    "frequency_penalty": "number",
    "mirostat": "integer",
    "mirostat_tau": "number",
    "mirostat_eta": "number",
    "stop": "texts",
}

# Options of loading a model. They have no effect: the server's own options decide.
_LOADING_OPTIONS = {
    **dict.fromkeys(("num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread"), "integer"),
    **dict.fromkeys(("draft_num_predict",), "integer"),
    **dict.fromkeys(("use_mmap", "use_mlock", "low_vram", "numa"), "boolean"),
}

MIN_CONTEXT = 4  # tokens
NUM_LOGGED = 8  # unknown options of a request
_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.0}


def known_options(options: dict[str, Any] | None) -> dict[str, Any]:
    known, unknown = {}, [*islice((options or {}).keys() - _OPTIONS.keys() - _LOADING_OPTIONS.keys(), NUM_LOGGED)]
    if unknown:
        log.warning("invalid option provided: %s", shortened(", ".join(sorted(unknown)), MAX_MESSAGE))
    for name, value in (options or {}).items():
        kind = _OPTIONS.get(name) or _LOADING_OPTIONS.get(name)
        if kind is not None and value is not None:
            known[name] = _checked(name, value, kind)
    return known


def window(known: dict[str, Any], max_model_len: int) -> int:
    """Tokens that prompt and output may have together."""
    asked = known.get("num_ctx", 0)
    if asked > max_model_len:
        log.warning("num_ctx is %s, and the context holds %s tokens", asked, max_model_len)
    return min(max(asked, MIN_CONTEXT), max_model_len) if asked > 0 else max_model_len


def sampling_params(known: dict[str, Any], advised: Mapping[str, Any], **given: Any) -> SamplingParams:
    """`advised`: the model's defaults, which win over Ollama's. `given`: parameters that are not in the options."""
    defaults = {**_DEFAULTS, **advised}
    last_n = known.get("repeat_last_n", -1)
    if last_n not in (-1, 0):
        raise BadRequest(
            f"repeat_last_n is {last_n}",
            "the penalty looks at all tokens: send -1, or 0 for no penalty",
            param="options.repeat_last_n",
        )
    seed, num_predict = known.get("seed", -1), known.get("num_predict", -1)
    return SamplingParams(
        temperature=known.get("temperature", defaults["temperature"]),
        top_k=max(known.get("top_k", defaults["top_k"]), 0),
        top_p=known.get("top_p", defaults["top_p"]),
        min_p=known.get("min_p", defaults["min_p"]),
        typical_p=known.get("typical_p", 1.0),
        repetition_penalty=known.get("repeat_penalty", defaults["repetition_penalty"]) if last_n else 1.0,
        presence_penalty=known.get("presence_penalty", 0.0),
        frequency_penalty=known.get("frequency_penalty", 0.0),
        mirostat=known.get("mirostat", 0),
        mirostat_tau=known.get("mirostat_tau", 5.0),
        mirostat_eta=known.get("mirostat_eta", 0.1),
        seed=None if seed == -1 else seed,
        max_tokens=num_predict if num_predict > 0 else None,
        stop=known.get("stop", []),
        **given,
    )


def _checked(name: str, value: Any, kind: str) -> Any:
    types, called = _KINDS[kind]
    right = isinstance(value, types) and (kind == "boolean" or not isinstance(value, bool))
    if kind == "integer" and isinstance(value, float):
        right = value.is_integer()
    if kind == "texts":
        right = right and all(isinstance(text, str) for text in value)
    if not right:
        raise BadRequest(f'option "{name}" must be of type {called}', param=f"options.{name}")
    return int(value) if kind == "integer" else value
