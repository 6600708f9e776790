"""What an autoscaler needs to know: requests that wait and run, and what workers there are for them."""

from typing import TYPE_CHECKING

from quire.core.errors import BadRequest, UnknownModel

if TYPE_CHECKING:
    from quire.gateway.gateway import Gateway


def scaling_view(gateway: "Gateway", model: str | None) -> dict[str, int]:
    """Numbers that an autoscaler divides by what one worker can do: of the workers of one model, or of all.

    Raises for a name that no worker can serve: zero would mean that no worker is needed."""
    if model is not None:
        _check(gateway, model)
    workers = gateway.router.serving(model)
    lanes = gateway.queue.lanes()
    waiting = sum(count for (_, _, asked), count in lanes.items() if model in (None, asked))
    in_flight = sum(worker.num_in_flight for worker in workers)
    return {
        "requests": waiting + in_flight,
        "requests_waiting": waiting,
        "requests_in_flight": in_flight,
        "tokens_in_flight": sum(worker.tokens_in_flight for worker in workers),
        "capacity": sum(worker.entry.max_in_flight for worker in workers if worker.takes_requests),
        "workers": len(workers),
        "workers_ready": sum(worker.takes_requests for worker in workers),
    }


def _check(gateway: "Gateway", model: str) -> None:
    names, route = gateway.router.names(), gateway.config.models.get(model)
    if model not in names:
        raise UnknownModel(f"there is no model `{model}`", f"the models are {', '.join(names)}", param="model")
    if route is not None and route.leads_to and not gateway.router.serving(model):
        others = ", ".join(f"`{name}`" for name in dict.fromkeys(route.leads_to))
        raise BadRequest(
            f"`{model}` is no model of workers: it leads to {others}", "ask for one of these", param="model"
        )


def served_models(gateway: "Gateway") -> list[str]:
    """Models of the workers, without aliases."""
    return sorted({model for worker in gateway.fleet.workers for model in worker.cards})
