"""From the model that a client names to the worker that answers: rules, aliases, canaries, fallbacks, policies."""

import random
from collections.abc import Collection, Iterator

from quire.core.errors import QuireError, UnknownModel
from quire.core.nearest import nearest
from quire.gateway.config import CacheAware, GatewayConfig, ModelRoute, PolicyName, RouteRule
from quire.gateway.errors import NoWorker
from quire.gateway.kv_index import KVIndex
from quire.gateway.policies import CacheAwarePolicy, PickContext, Policy, make_policy
from quire.gateway.request_facts import RequestFacts
from quire.gateway.wire import ClientRequest
from quire.gateway.worker import Worker

MAX_HOPS = 8  # from a name to a model that workers serve


class Router:
    """`workers` is the list that the fleet keeps."""

    def __init__(
        self,
        config: GatewayConfig,
        workers: list[Worker],
        rng: random.Random | None = None,
        index: KVIndex | None = None,
    ) -> None:
        self.config, self._workers, self._index = config, workers, index
        self._rng = rng or random.Random()
        self._policies: dict[str, Policy] = {}  # by model: each has a turn and an index of its own

    def reconfigure(self, config: GatewayConfig) -> None:
        """Policies whose settings are the same keep what they know."""
        old, self.config = self.config, config
        for model in list(self._policies):
            if self._settings(old, model) != self._settings(config, model):
                del self._policies[model]

    def targets(self, facts: RequestFacts, request: ClientRequest) -> list[str | None]:
        """Models to ask, the first choice first. None: any model, for requests that name none.

        Raises UnknownModel for a name that leads nowhere."""
        name = facts.model or self.config.default_model
        if name is None:
            return [None]
        if name not in self.config.models and self.serving(name):
            return [name]
        chosen = list(dict.fromkeys(self._resolve(name, facts, request)))
        if not any(self.serving(model) for model in chosen) and not any(model in self.names() for model in chosen):
            near = nearest(name, self.names())
            hint = (
                f"did you mean `{near[0]}`?" if near else f"the models are {', '.join(self.names()) or 'not known yet'}"
            )
            raise UnknownModel(f"there is no model `{name}`", hint, param="model")
        return list(chosen)

    def _resolve(self, name: str, facts: RequestFacts, request: ClientRequest, hops: int = 0) -> Iterator[str]:
        route = self.config.models.get(name)
        if route is None or hops == MAX_HOPS:
            yield name
            return
        for model in (self._first_choice(name, route, facts, request), *route.fallbacks):
            if model == name:
                yield name
            else:
                yield from self._resolve(model, facts, request, hops + 1)

    def _first_choice(self, name: str, route: ModelRoute, facts: RequestFacts, request: ClientRequest) -> str:
        for rule in route.rules:
            if _fits(rule, facts, request):
                return rule.model
        if not route.targets:
            return name
        weights = [target.weight for target in route.targets]
        return self._rng.choices(route.targets, weights)[0].model

    def names(self) -> list[str]:
        """Every name that clients may ask for."""
        return sorted({*self.config.models, *(model for worker in self._workers for model in worker.cards)})

    def serving(self, model: str | None) -> list[Worker]:
        """Workers that serve it, whatever their state."""
        return [worker for worker in self._workers if model is None or model in worker.cards]

    def pick(self, model: str | None, context: PickContext, tried: Collection[Worker]) -> Worker | None:
        """The worker for a request; None: none that takes requests has room for one more."""
        open_workers = [
            worker
            for worker in self._workers
            if (model is None or model in worker.cards)
            and worker.takes_requests
            and worker.has_room
            and worker not in tried
        ]
        return self.policy(model).pick(open_workers, context) if open_workers else None

    def pick_to_go_on(self, model: str | None, tried: Collection[Worker]) -> Worker | None:
        """For a stream that its worker broke off, often one of many at the same moment: what each costs until its next
        token is the computing of its tokens so far, more than many others that decode. So they are spread evenly,
        instead of all going to the least busy worker, such as one that has just come back."""
        open_workers = [
            worker
            for worker in self.serving(model)
            if worker.resumes and worker.takes_requests and worker.has_room and worker not in tried
        ]
        return min(open_workers, key=_catching_up, default=None)

    def can_take(self, model: str | None, tried: Collection[Worker] = ()) -> bool:
        """Whether a worker of the model takes requests, with room or without."""
        return any(worker.takes_requests and worker not in tried for worker in self.serving(model))

    def unavailable(self, targets: list[str | None]) -> QuireError:
        states = [f"{worker.name} is {_shown_state(worker)}" for model in targets for worker in self.serving(model)]
        what = f"`{targets[0]}`" if targets[0] else "any model"
        why = ", ".join(dict.fromkeys(states)) or "no worker serves it"
        return NoWorker(f"no worker can take a request for {what}: {why}", "try again in a moment")

    def policy(self, model: str | None) -> Policy:
        name = model or ""
        if name not in self._policies:
            self._policies[name] = make_policy(*self._settings(self.config, name), self._index)
        return self._policies[name]

    def forget(self, worker: Worker) -> None:
        """Forget what a worker had cached: its caches are empty."""
        for policy in self._policies.values():
            if isinstance(policy, CacheAwarePolicy):
                policy.forget(worker)

    @staticmethod
    def _settings(config: GatewayConfig, model: str) -> tuple[PolicyName, CacheAware]:
        route = config.models.get(model)
        return (route and route.policy) or config.policy, config.cache_aware


def _catching_up(worker: Worker) -> tuple[float, float]:
    return worker.num_catching_up / worker.entry.weight, worker.load


def _shown_state(worker: Worker) -> str:
    if worker.state == "ready" and not worker.breaker.allows:
        return f"ready, but its breaker is {worker.breaker.state}"
    return worker.state


def _fits(rule: RouteRule, facts: RequestFacts, request: ClientRequest) -> bool:
    tokens = facts.prompt_tokens
    return (
        (rule.min_prompt_tokens is None or tokens >= rule.min_prompt_tokens)
        and (rule.max_prompt_tokens is None or tokens <= rule.max_prompt_tokens)
        and (rule.tools is None or facts.has_tools == rule.tools)
        and (rule.schema is None or facts.has_schema == rule.schema)
        and all(request.header(name.lower().encode()) == value for name, value in (rule.header or {}).items())
    )
