"""What requests are charged to their tenants: limits are checked and cost is reserved when they begin, and what they
took is settled when they end."""

from typing import TYPE_CHECKING

from quire.core.errors import QuireError
from quire.gateway.ledger import cost
from quire.gateway.routes import RouteKind
from quire.gateway.usage import TokenUsage

if TYPE_CHECKING:
    from quire.gateway.exchange import Exchange
    from quire.gateway.gateway import Gateway
    from quire.gateway.shared_limits import SharedLimits

METERED = (RouteKind.GENERATE, RouteKind.ENCODE)
DEFAULT_CONTEXT = 8192  # tokens, of a model whose workers do not tell it


class Charges:
    """`shared`: limits that several gateways keep together, None for one gateway alone."""

    def __init__(self, gateway: "Gateway", shared: "SharedLimits | None") -> None:
        self._gateway, self._shared = gateway, shared

    def is_asked_of_redis(self, exchange: "Exchange") -> bool:
        return self._shared is not None and exchange.kind in METERED and exchange.tenant.is_limited

    def enter(self, exchange: "Exchange") -> None:
        """Charge the request to its tenant, or raise why it may not begin."""
        if exchange.kind not in METERED:
            return
        quota, num = exchange.tenant.quota, exchange.facts.n
        quota.check_concurrency(num, num)
        quota.enter()
        exchange.num_counted = num
        quota.running += num - 1
        exchange.reserved = self._most_cost(exchange)
        try:
            exchange.tenant.budget.reserve(exchange.reserved)
        except QuireError:
            quota.running -= num
            exchange.num_counted = 0
            raise

    async def enter_shared(self, exchange: "Exchange") -> bool:
        """The same, with limits that other gateways share. -> whether its client is still there"""
        assert self._shared is not None
        num, amount = exchange.facts.n, self._most_cost(exchange)
        is_shared = await self._shared.enter(exchange.tenant, num, amount)
        if exchange not in self._gateway.in_flight:
            self._shared.settle(exchange.tenant, num, amount, 0, 0, is_shared)
            return False
        exchange.num_counted, exchange.reserved, exchange.is_shared = num, amount, is_shared
        return True

    def settle(self, exchange: "Exchange", usage: TokenUsage) -> int:
        """The exchange has ended. -> what it cost, in billionths"""
        tenant, tokens = exchange.tenant, usage.prompt + usage.output
        spent = self._cost(exchange, exchange.model, usage)
        if not exchange.num_counted:
            return spent
        if self._shared is not None and exchange.is_shared is not None:
            in_redis = exchange.is_shared
            self._shared.settle(tenant, exchange.num_counted, exchange.reserved, spent, tokens, in_redis)
        else:
            tenant.quota.running -= exchange.num_counted
            tenant.quota.charge(tokens)
            tenant.budget.settle(exchange.reserved, spent)
        return spent

    def _most_cost(self, exchange: "Exchange") -> int:
        """What it can cost, as far as the gateway can know: a budget that is passed by one request only bears that."""
        if exchange.tenant.budget.limit is None:
            return 0
        contexts = [self._context(model) for model in exchange.targets]
        usage = exchange.facts.at_most(max(contexts), len(exchange.request.body))
        if exchange.kind is not RouteKind.GENERATE:
            usage.output = 0
        return max(self._cost(exchange, model, usage) for model in exchange.targets)

    def _context(self, model: str | None) -> int:
        """Tokens of prompt and output, as workers tell them."""
        cards = [worker.cards[model] for worker in self._gateway.router.serving(model)] if model is not None else []
        told = [card.get("max_model_len") for card in cards]
        return max((length for length in told if isinstance(length, int)), default=DEFAULT_CONTEXT)

    def _cost(self, exchange: "Exchange", model: str | None, usage: TokenUsage) -> int:
        models = self._gateway.config.models
        for name in (model, exchange.facts.model, exchange.targets[0]):
            if name is not None and (route := models.get(name)) is not None and route.price is not None:
                return cost(usage, route.price)
        return 0
