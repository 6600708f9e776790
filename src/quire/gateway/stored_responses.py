"""Which worker has which stored response: it is asked for there, by the tenant that made it."""

import re
from collections import OrderedDict

from quire.gateway.exchange_record import ExchangeRecord
from quire.gateway.routes import stored_id
from quire.gateway.worker import Worker
from quire.server.errors import UnknownPath

MAX_STORED = 10_000  # responses whose worker is remembered

_RESPONSE_ID = re.compile(rb'"id":\s*"(resp_[\w-]{1,120})"')


class StoredResponses:
    """`workers` is the list that the fleet keeps."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._known: OrderedDict[str, tuple[str, Worker]] = OrderedDict()  # tenant and worker, by id

    def pin(self, record: ExchangeRecord) -> None:
        """Send a request that names a stored response to its worker. Where that is not known, after a restart or with
        several gateways, workers are asked one after the other. Raises UnknownPath for one of another tenant."""
        record.stored = stored_id(record.request.path) or record.facts.previous
        if not record.stored:
            return
        tenant, worker = self._known.get(record.stored, (record.tenant.name, None))
        if tenant != record.tenant.name:
            raise UnknownPath(f"there is no response `{record.stored}`")
        record.pinned = worker if worker in self._workers else None

    def remember(self, record: ExchangeRecord, data: bytes) -> bool:
        """`data`: of its response, whole or the beginning of a stream. -> whether it has the id"""
        match = _RESPONSE_ID.search(data)
        if match is None or record.worker is None:
            return False
        self._known[match[1].decode()] = (record.tenant.name, record.worker)
        while len(self._known) > MAX_STORED:
            self._known.popitem(last=False)
        return True
