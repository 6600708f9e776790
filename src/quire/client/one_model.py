"""One model behind its name, and its adapters behind theirs."""

from collections.abc import AsyncGenerator, Sequence

from quire.client.service import AdapterRegistry, Models, PullProgress, ResolvedModel, ServedModel, Service, State
from quire.core.errors import BadRequest, Unavailable, UnknownModel, shortened
from quire.core.nearest import nearest

MAX_QUOTED = 200  # characters of a wrong name


class OneModel:
    """Implements `Models` with one service that lives as long as the server."""

    def __init__(self, service: Service, adapters: AdapterRegistry | None = None) -> None:
        """`adapters` are those of the service, where it has any."""
        self._service = service
        self._adapters = adapters

    @property
    def state(self) -> State:
        return self._service.state

    def offers(self) -> list[ServedModel]:
        info = self._service.info
        return [
            ServedModel(info.name, info),
            *(ServedModel(name, info, adapter_of=info.name) for name in self._names()),
        ]

    def _names(self) -> list[str]:
        return self._adapters.names() if self._adapters else []

    async def find(self, name: str | None) -> ResolvedModel:
        if name in self._names():
            return ResolvedModel(self._service, name)
        if name is not None and name != self._service.info.name:
            raise unknown_model(name, [offer.name for offer in self.offers()])
        return ResolvedModel(self._service)

    async def load_adapter(self, name: str, path: str, in_place: bool = False, base: str | None = None) -> None:
        if self._adapters is None:
            raise BadRequest("this server has no adapters", "start it with --enable-lora")
        if name == self._service.info.name:
            raise BadRequest(f"`{name}` is the model's own name", "call the adapter something else", param="lora_name")
        await self._adapters.load(name, path, in_place)

    async def unload_adapter(self, name: str) -> None:
        if name not in self._names() or self._adapters is None:
            raise unknown_model(name, self._names(), "adapter")
        await self._adapters.unload(name)

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        if name not in (offer.name for offer in self.offers()):
            raise BadRequest("this server has one model", "start it with --allow-pull", param="model")
        yield PullProgress()

    async def sleep(self) -> None:
        raise no_sleep()

    async def wake_up(self) -> None:
        raise no_sleep()

    async def drain(self) -> None:
        await self._service.drain()


async def find_loaded(models: Models, name: str | None) -> ResolvedModel:
    """`models.find` for callers that only look at a model: it is not loaded for them."""
    served = {model.name: model for model in models.offers()}
    if name is not None and name not in served:
        raise unknown_model(name, list(served))
    if name is not None and served[name].info is None:
        raise Unavailable(f"`{name}` is not loaded", "ask it something first")
    return await models.find(name)


def no_sleep() -> BadRequest:
    return BadRequest("this server does not sleep", "start it with --enable-sleep-mode")


def unknown_model(name: str, names: Sequence[str], kind: str = "model") -> UnknownModel:
    name = shortened(name, MAX_QUOTED)
    near = nearest(name, names, cutoff=0.3)
    served = ", ".join(f"`{known}`" for known in names) or "none"
    hint = f"did you mean `{near[0]}`?" if near else f"{served} {'are' if len(names) > 1 else 'is'} served here"
    return UnknownModel(f"no {kind} `{name}`", hint, param="model")
