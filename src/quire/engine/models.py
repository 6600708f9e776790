"""Names of models, and the services they lead to."""

from collections.abc import Sequence
from difflib import get_close_matches

from quire.core.errors import UnknownModel
from quire.engine.service import Found, Offer, Service, State


class OneModel:
    """Implements `Models` with a service that is there as long as the server is."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def state(self) -> State:
        return self._service.state

    def offers(self) -> list[Offer]:
        return [Offer(self._service.info.name, self._service.info)]

    async def find(self, name: str | None) -> Found:
        if name is not None and name != self._service.info.name:
            raise unknown_model(name, [offer.name for offer in self.offers()])
        return Found(self._service)

    async def drain(self) -> None:
        await self._service.drain()


def unknown_model(name: str, names: Sequence[str]) -> UnknownModel:
    near = get_close_matches(name, names, n=1, cutoff=0.3)
    served = ", ".join(f"`{known}`" for known in names)
    hint = f"did you mean `{near[0]}`?" if near else f"{served} {'are' if len(names) > 1 else 'is'} served here"
    return UnknownModel(f"no model `{name}`", hint, param="model")
