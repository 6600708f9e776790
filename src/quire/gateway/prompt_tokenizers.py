"""The tokens of prompts, for routing by KV events: events name blocks by their tokens.

The gateway tokenizes itself. A question to a worker would take longer than the routing saves, and characters do not
tell where blocks end: a template adds to them, and a block holds tokens."""

import asyncio
import logging
from typing import TYPE_CHECKING

from quire.core.errors import QuireError
from quire.gateway.config import GatewayConfig

if TYPE_CHECKING:
    from quire.server.prompt_reader import PromptReader

log = logging.getLogger("quire.gateway")

LONG_BODY = 16 << 10  # bytes; a longer one is tokenized in a thread
MAX_BODY = 1 << 20  # bytes; a longer one is not tokenized


class PromptTokenizers:
    """Tokenizers by model, as the configuration names them. Until one is loaded, its model has none."""

    def __init__(self) -> None:
        self._readers: dict[str, PromptReader] = {}
        self._sources: dict[str, str] = {}  # model -> where its tokenizer is
        self._loading: set[asyncio.Task[None]] = set()

    def configure(self, config: GatewayConfig) -> None:
        sources = {name: route.tokenizer for name, route in config.models.items() if route.tokenizer}
        for model, source in sources.items():
            if self._sources.get(model) != source:
                task = asyncio.create_task(self._load(model, source))
                self._loading.add(task)
                task.add_done_callback(self._loading.discard)
        self._sources = sources
        self._readers = {name: reader for name, reader in self._readers.items() if name in sources}

    async def _load(self, model: str, source: str) -> None:
        try:
            reader = await asyncio.to_thread(_load_reader, source)
        except (QuireError, OSError) as error:
            log.error("the tokenizer %s of model `%s` cannot be loaded: %s", source, model, error)
            return
        if self._sources.get(model) == source:
            self._readers[model] = reader
            log.info("the tokenizer of model `%s` is loaded", model)

    def has(self, model: str | None) -> bool:
        return model in self._readers

    def read(self, model: str | None, path: str, body: bytes) -> list[int]:
        """Empty: they are not known."""
        reader = self._readers.get(model or "")
        if reader is None or len(body) > MAX_BODY:
            return []
        try:
            return reader.ids(path, body)
        except QuireError:
            return []  # the worker will say why
        except Exception:
            log.exception("a prompt could not be tokenized")
            return []

    def close(self) -> None:
        for task in self._loading:
            task.cancel()


def _load_reader(source: str) -> "PromptReader":
    from quire.server.prompt_reader import PromptReader

    return PromptReader.load(source)
