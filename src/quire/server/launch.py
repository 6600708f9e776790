"""Starts engines and the HTTP server in front of them, and runs until the last request."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

from quire.client.engine_client import EngineClient
from quire.client.engine_process import EngineProcess
from quire.client.one_model import OneModel
from quire.client.service import Models
from quire.core.errors import BadRequest
from quire.engine.option import named_values
from quire.engine.options import EngineOptions
from quire.hub import model_name
from quire.server import heap
from quire.server.http.listen import open_listener
from quire.server.http.tcp_socket import allow_open_files
from quire.server.observe.metrics import Metrics
from quire.server.options import ServerOptions, named_models


def launch(
    engine: EngineOptions,
    server: ServerOptions,
    *,
    on_ready: Callable[[str], None] | None = None,
    spawned: EngineProcess | None = None,
) -> None:
    """Returns after SIGTERM or SIGINT, once the requests in flight have ended.

    `on_ready` gets the address; `spawned` is an engine process that was started early."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the server tokenizes in threads of its own
    allow_open_files()
    heap.share()
    _run(_main(engine, server, on_ready, spawned))


async def _main(
    engine: EngineOptions, server: ServerOptions, on_ready: Callable[[str], None] | None, spawned: EngineProcess | None
) -> None:
    metrics, listener = Metrics(), open_listener(server)
    importing = asyncio.create_task(asyncio.to_thread(import_module, "quire.server.serve"))  # while a model loads
    try:
        async with _models(engine, server, metrics, spawned) as models:
            await importing
            from quire.server.serve import serve

            await serve(models, server, metrics=metrics, listener=listener, on_ready=on_ready)
    finally:
        listener.close()  # also where no model could be loaded


@asynccontextmanager
async def _models(
    engine: EngineOptions, server: ServerOptions, metrics: Metrics, spawned: EngineProcess | None
) -> AsyncIterator[Models]:
    if server.loads_on_demand or engine.enable_sleep_mode:
        from quire.client.many_models import ManyModels

        options_of_one = {
            "prefill_engines": server.prefill_engines > 0,
            "kv_transfer_config": engine.kv_transfer_config is not None,
            "data_parallel_size": engine.data_parallel_size > 1,
            "distributed_executor_backend": engine.distributed_executor_backend != "mp",
        }
        for name in (name for name, given in options_of_one.items() if given):
            raise BadRequest(
                f"{name} is for one model that stays, and models, allow_pull, sleep_idle_seconds and enable_sleep_mode "
                "load on demand",
                "serve one model, and let it stay",
                param=name,
            )

        options = {engine.served_model_name or model_name(engine.model): engine}
        if server.models:
            options = engine_options_per_model(engine, named_models(server.models))
        idle_seconds = server.sleep_idle_seconds if server.sleep_idle_seconds >= 0 else None
        count, may_sleep = server.max_loaded_models, engine.enable_sleep_mode
        async with ManyModels(options, count, metrics.of, idle_seconds, may_sleep) as models:
            yield models
    elif server.prefill_engines or engine.is_group:
        from quire.client.engine_group import EngineGroup

        num_decode = server.decode_engines if server.prefill_engines else None
        async with EngineGroup(engine, server.prefill_engines, num_decode) as group:
            observer = metrics.of(group.info.name)
            group.observe(observer.engine)
            observer.loaded()
            observer.num_ready = lambda: group.engine_states.count("ready")
            yield OneModel(group, group.adapters)
    else:
        async with EngineClient(engine, process=spawned) as client:
            client.observer = observer = metrics.of(client.info.name)
            observer.loaded()
            observer.num_ready = lambda: int(client.state == "ready")
            yield OneModel(client, client.adapters)


def engine_options_per_model(engine: EngineOptions, models: Mapping[str, str]) -> dict[str, EngineOptions]:
    """Each model gets the adapters that are called MODEL:NAME."""
    adapters: dict[str, list[str]] = {name: [] for name in models}
    names = set(models)
    for given, path in named_values(engine.lora_modules, "lora_modules", "PATH").items():
        model, _, name = given.partition(":")
        if not name or model not in models:
            hint = f"with --models, write MODEL:NAME=PATH, where MODEL is one of {', '.join(models)}"
            raise BadRequest(f"lora_modules has `{given}`", hint, param="lora_modules")
        if name in names:
            raise BadRequest(f"two models or adapters are called `{name}`", "rename one", param="lora_modules")
        names.add(name)
        adapters[model].append(f"{name}={path}")
    return {
        name: replace(engine, model=model, served_model_name=name, lora_modules=tuple(adapters[name]))
        for name, model in models.items()
    }


def _run(main: Coroutine[Any, Any, None]) -> None:
    if sys.platform == "win32":
        asyncio.run(main)
    else:
        import uvloop

        uvloop.run(main)
