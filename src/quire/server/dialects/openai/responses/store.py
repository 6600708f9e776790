"""Stored responses, in memory, with limits on their number, size and age for each tenant."""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from quire.core.errors import QuireError
from quire.server.dialects.openai.responses.items import InputItem
from quire.server.dialects.openai.responses.journal import EventJournal, TenantJournals
from quire.server.dialects.openai.responses.shapes import OutputItem, ResponseObject

MAX_RESPONSES = 1000
MAX_BYTES = 16 << 20
TIME_TO_LIVE_SECONDS = 24 * 3600.0


class UnknownResponse(QuireError):
    status, code = 404, "not_found"


@dataclass(slots=True)
class StoredResponse:
    response: ResponseObject
    input: list[InputItem]  # of its own request
    messages: list[dict[str, Any]]  # the conversation before its output, without instructions
    size: int  # bytes of its request and of all previous ones
    task: asyncio.Task[None] | None = None  # while it runs in the background
    journal: EventJournal | None = None  # if it is streamed in the background
    expires: float = field(default_factory=lambda: time.monotonic() + TIME_TO_LIVE_SECONDS)


class ResponseStore:
    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._tenants: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._journals: dict[str, TenantJournals] = {}

    def journal(self, tenant: str) -> EventJournal:
        return self._journals.setdefault(tenant, TenantJournals()).new()

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Store it. The oldest are dropped to make room."""
        kept = self._tenants.setdefault(tenant, OrderedDict())
        kept.pop(stored.response.id, None)
        kept[stored.response.id] = stored
        now, size = time.monotonic(), sum(each.size for each in kept.values())
        for name, oldest in list(kept.items()):
            if len(kept) <= self._max_responses and size <= self._max_bytes and oldest.expires > now:
                break
            size -= oldest.size
            self._drop(tenant, name)

    def get(self, tenant: str, name: str, param: str | None = None) -> StoredResponse:
        kept = self._tenants.get(tenant)
        stored = kept.get(name) if kept is not None else None
        if stored is None or stored.expires < time.monotonic():
            raise UnknownResponse(f"no response `{name}`", "it was not stored, or is gone", param=param)
        return stored

    def items(self, tenant: str) -> dict[str, InputItem | OutputItem]:
        """The items of all its responses, by id."""
        kept = self._tenants.get(tenant)
        return {
            item.id: item
            for stored in (kept.values() if kept else ())
            for item in (*stored.input, *stored.response.output)
            if item.id
        }

    def delete(self, tenant: str, name: str) -> StoredResponse:
        self.get(tenant, name)
        return self._drop(tenant, name)

    def _drop(self, tenant: str, name: str) -> StoredResponse:
        stored = self._tenants[tenant].pop(name)
        if stored.journal is not None:
            self._journals[tenant].forget(stored.journal)
        return stored
