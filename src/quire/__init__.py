"""Quire: an inference engine and server for language models whose memory is made of pages.

    from quire import LLM, SamplingParams

    llm = LLM("smollm2")
    print(llm.generate("A quire is", SamplingParams(max_tokens=32))[0].outputs[0].text)

Names are looked up when they are first used, so that `import quire` costs nothing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.core.params import SamplingParams as SamplingParams
    from quire.engine.async_engine import AsyncEngine as AsyncEngine
    from quire.engine.llm import LLM as LLM

__version__ = "0.1.0"

_HOMES = {
    "LLM": "quire.engine.llm",
    "AsyncEngine": "quire.engine.async_engine",
    "SamplingParams": "quire.core.params",
}

__all__ = ["LLM", "AsyncEngine", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name):
        return getattr(import_module(home), name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
