"""What requests are charged to their tenants: limits are checked and cost is reserved when they begin, and what they
took is settled when they end."""

from typing import TYPE_CHECKING

from quire.core.errors import QuireError
from quire.gateway.exchange_record import ExchangeRecord
from quire.gateway.ledger import cost
from quire.gateway.router import Router
from quire.gateway.routes import RouteKind
from quire.gateway.usage import TokenUsage

if TYPE_CHECKING:
    from quire.gateway.shared_limits import SharedLimits

METERED = (RouteKind.GENERATE, RouteKind.ENCODE)
DEFAULT_CONTEXT = 8192  # tokens, of a model whose workers do not tell it


class Charges:
    """`shared`: limits that several gateways keep together, None for one gateway alone."""

    def __init__(self, router: Router, shared: "SharedLimits | None") -> None:
        self._router, self._shared = router, shared

    def is_asked_of_redis(self, record: ExchangeRecord) -> bool:
        return self._shared is not None and record.kind in METERED and record.tenant.has_limits

    def enter(self, record: ExchangeRecord) -> None:
        """Charge the request to its key and the group of that, or raise why it may not begin."""
        if record.kind not in METERED:
            return
        num, amount, accounts = record.facts.n, self._most_cost(record), record.tenant.accounts
        for place, account in enumerate(accounts):
            try:
                account.enter(num, amount)
            except QuireError:
                for entered in accounts[:place]:
                    entered.leave(num, amount, 0, 0)
                raise
        record.num_counted, record.reserved = num, amount

    async def enter_shared(self, record: ExchangeRecord) -> bool:
        """Enter a request, with limits that other gateways share. -> whether its client is still there"""
        assert self._shared is not None
        num, amount, entered = record.facts.n, self._most_cost(record), list[bool]()
        try:
            for account in record.tenant.accounts:
                entered.append(await self._shared.enter(account, num, amount))
        except QuireError:
            self._leave_shared(record, entered, amount)
            raise
        if record.has_ended:
            self._leave_shared(record, entered, amount)
            return False
        record.num_counted, record.reserved, record.shared = num, amount, entered
        return True

    def _leave_shared(self, record: ExchangeRecord, entered: list[bool], amount: int) -> None:
        assert self._shared is not None
        for account, in_redis in zip(record.tenant.accounts, entered, strict=False):
            self._shared.settle(account, record.facts.n, amount, 0, 0, in_redis)

    def settle(self, record: ExchangeRecord, usage: TokenUsage) -> int:
        """The request has ended. -> what it cost, in billionths"""
        num, reserved, tokens = record.num_counted, record.reserved, usage.prompt + usage.output
        spent = self._cost(record, record.model, usage)
        if not num:
            return spent
        if self._shared is not None and record.shared is not None:
            for account, in_redis in zip(record.tenant.accounts, record.shared, strict=True):
                self._shared.settle(account, num, reserved, spent, tokens, in_redis)
        else:
            for account in record.tenant.accounts:
                account.leave(num, reserved, spent, tokens)
        return spent

    def _most_cost(self, record: ExchangeRecord) -> int:
        """What it can cost, as far as the gateway can know: a budget that is passed by one request only bears that."""
        if not record.tenant.has_budget:
            return 0
        contexts = [self._context(model) for model in record.targets]
        usage = record.facts.at_most(max(contexts), len(record.request.body))
        if record.kind is not RouteKind.GENERATE:
            usage.output = 0
        return max(self._cost(record, model, usage) for model in record.targets)

    def _context(self, model: str | None) -> int:
        """Tokens of prompt and output, as workers tell them."""
        cards = [worker.cards[model] for worker in self._router.serving(model)] if model is not None else []
        told = [card.get("max_model_len") for card in cards]
        return max((length for length in told if isinstance(length, int)), default=DEFAULT_CONTEXT)

    def _cost(self, record: ExchangeRecord, model: str | None, usage: TokenUsage) -> int:
        models = self._router.config.models
        for name in (model, record.facts.model, record.targets[0]):
            if name is not None and (route := models.get(name)) is not None and route.price is not None:
                return cost(usage, route.price)
        return 0
