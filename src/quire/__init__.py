"""Quire: an inference engine and server for language models whose memory is made of pages.

    from quire import LLM, SamplingParams

    llm = LLM("smollm2")
    print(llm.generate("A quire is", SamplingParams(max_tokens=32))[0].outputs[0].text)

Names are looked up when they are first used, so that `import quire` costs nothing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.api.async_engine import AsyncEngine as AsyncEngine
    from quire.api.embedder import Embedder as Embedder
    from quire.api.llm import LLM as LLM
    from quire.api.llm import BeamSearchParams as BeamSearchParams
    from quire.api.outputs import CompletionOutput as CompletionOutput
    from quire.api.outputs import RequestOutput as RequestOutput
    from quire.api.pooling import PoolingParams as PoolingParams
    from quire.client.generate_request import LoRARequest as LoRARequest
    from quire.core.params import SamplingParams as SamplingParams
    from quire.engine.options import EngineOptions as EngineOptions

__version__ = "0.1.0"

_HOMES = {
    "LLM": ("quire.api.llm", "LLM"),
    "Embedder": ("quire.api.embedder", "Embedder"),
    "BeamSearchParams": ("quire.api.llm", "BeamSearchParams"),
    "PoolingParams": ("quire.api.pooling", "PoolingParams"),
    "SamplingParams": ("quire.core.params", "SamplingParams"),
    "LoRARequest": ("quire.client.generate_request", "LoRARequest"),
    "AsyncEngine": ("quire.api.async_engine", "AsyncEngine"),
    "EngineOptions": ("quire.engine.options", "EngineOptions"),
    "RequestOutput": ("quire.api.outputs", "RequestOutput"),
    "CompletionOutput": ("quire.api.outputs", "CompletionOutput"),
    # as scripts written for vLLM call them
    "StructuredOutputsParams": ("quire.api.structured", "structured_outputs"),
    "GuidedDecodingParams": ("quire.api.structured", "structured_outputs"),
    "AsyncLLMEngine": ("quire.api.async_engine", "AsyncEngine"),
    "AsyncEngineArgs": ("quire.api.engine_args", "engine_args"),
    "EngineArgs": ("quire.api.engine_args", "engine_args"),
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module, attribute = _HOMES[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
