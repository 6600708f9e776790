"""`EngineArgs` and `AsyncEngineArgs`, as scripts written for vLLM call the engine's options."""

from pathlib import Path
from typing import Any

from quire.engine.options import EngineOptions
from quire.hub.aliases import DEFAULT_MODEL


def engine_args(model: str | Path = DEFAULT_MODEL, **options: Any) -> EngineOptions:
    """Options of other engines are taken as in `LLM`: under our names, without effect, or refused with a reason."""
    return EngineOptions.of({"model": str(model), **options})
