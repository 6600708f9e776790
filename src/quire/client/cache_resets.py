"""Questions to the engine to forget cached prefixes, until they are answered."""

import asyncio
from collections import deque
from collections.abc import Callable

from quire.engine.messages import PrefixCacheReset, ResetPrefixCache, ToEngine


class CacheResets:
    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._asked: deque[asyncio.Future[bool]] = deque()  # answers come in this order

    async def ask(self, tenant: str) -> bool:
        """-> whether the tenant has no prefix in the cache any more"""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._send(ResetPrefixCache(tenant))
        return await answer

    def receive(self, message: PrefixCacheReset) -> None:
        self._answer(message.empty)

    def engine_died(self) -> None:
        """With the engine, its cache is gone."""
        while self._asked:
            self._answer(True)

    def _answer(self, empty: bool) -> None:
        if not (answer := self._asked.popleft()).done():  # who asked may have left
            answer.set_result(empty)
