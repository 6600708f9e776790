"""LoRA adapters of several engines of one model."""

import asyncio
from collections.abc import Sequence

from quire.client.engine_client import EngineClient
from quire.client.prefill_engine import PrefillEngine


class GroupAdapters:
    """Implements `AdapterRegistry`: every engine of a group has the same adapters, under the same keys."""

    def __init__(self, decode: Sequence[EngineClient], prefill: Sequence[PrefillEngine]) -> None:
        self._decode, self._prefill = decode, prefill

    def names(self) -> list[str]:
        return self._decode[0].adapters.names()

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        """Load an adapter in all engines at the same time, also where one fails: each counts its keys."""
        loads = [client.adapters.load(name, path, in_place) for client in self._decode]
        results = await asyncio.gather(*loads, return_exceptions=True)
        errors = [result for result in results if result is not None]
        if errors:
            loaded = [client for client, result in zip(self._decode, results, strict=True) if result is None]
            await asyncio.gather(*(client.adapters.unload(name) for client in loaded))
        self._tell_prefill_engines()
        if errors:
            raise errors[0]

    async def unload(self, name: str) -> None:
        for client in self._decode:
            await client.adapters.unload(name)
        self._tell_prefill_engines()

    def _tell_prefill_engines(self) -> None:
        for engine in self._prefill:
            engine.set_adapters(self._decode[0].adapters.named)
