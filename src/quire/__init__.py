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
    from quire.engine.embed import Embedder as Embedder
    from quire.engine.generate import LoRARequest as LoRARequest
    from quire.engine.llm import LLM as LLM
    from quire.engine.llm import BeamSearchParams as BeamSearchParams
    from quire.engine.options import EngineOptions as EngineOptions
    from quire.engine.outputs import CompletionOutput as CompletionOutput
    from quire.engine.outputs import RequestOutput as RequestOutput

__version__ = "0.1.0"

_HOMES = {
    "LLM": ("quire.engine.llm", "LLM"),
    "Embedder": ("quire.engine.embed", "Embedder"),
    "BeamSearchParams": ("quire.engine.llm", "BeamSearchParams"),
    "SamplingParams": ("quire.core.params", "SamplingParams"),
    "LoRARequest": ("quire.engine.generate", "LoRARequest"),
    "AsyncEngine": ("quire.engine.async_engine", "AsyncEngine"),
    "EngineOptions": ("quire.engine.options", "EngineOptions"),
    "RequestOutput": ("quire.engine.outputs", "RequestOutput"),
    "CompletionOutput": ("quire.engine.outputs", "CompletionOutput"),
    # as scripts written for vLLM call them
    "AsyncLLMEngine": ("quire.engine.async_engine", "AsyncEngine"),
    "AsyncEngineArgs": ("quire.engine.options", "EngineOptions"),
    "EngineArgs": ("quire.engine.options", "EngineOptions"),
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module, attribute = _HOMES[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
