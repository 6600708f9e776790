"""LoRA adapters as clients know them: names, loaded and unloaded while an engine runs.

The engine knows an adapter by a key that is never used twice, so that a name can be given to another adapter while
requests of the first one are still in flight, and KV computed with one is never taken for the other's."""

import asyncio
from collections.abc import Callable
from itertools import count

from quire.core.errors import BadCheckpoint, BadRequest, QuireError, Unavailable, UnknownModel, Unsupported
from quire.core.nearest import nearest
from quire.engine.messages import AdapterLoaded, AdapterUnloaded, LoadAdapter, ToEngine, UnloadAdapter
from quire.engine.option import named_values
from quire.engine.options import EngineOptions
from quire.hub.adapters import resolve_adapter


class ClientAdapters:
    """The adapters of one engine, by name. Implements `AdapterRegistry`."""

    def __init__(self, options: EngineOptions, send: Callable[[ToEngine], None]) -> None:
        self._enabled = options.num_loras > 0
        self._given = named_values(options.lora_modules, "lora_modules", "PATH")
        self._send = send
        self._keys: dict[str, str] = {}  # name -> key
        self._paths: dict[str, str] = {}  # key -> files, of all that the engine holds
        self._leaving: set[str] = set()  # keys that have lost their name, until no request uses them
        self._loading: dict[str, asyncio.Future[None]] = {}  # by key
        self._reserved: set[str] = set()  # names that are being loaded
        self._numbers = count(1)

    async def find_given(self) -> None:
        """Find the files of the adapters in `lora_modules`: the engine starts with them."""
        for name, path in self._given.items():
            if name in self._keys:
                continue  # the adapter's files were found before
            files = await asyncio.to_thread(resolve_adapter, path)
            self._keys[name] = key = self._new_key(name)
            self._paths[key] = str(files)

    @property
    def held(self) -> dict[str, str]:
        """Key -> files: what a new engine has to load."""
        return dict(self._paths)

    @property
    def named(self) -> dict[str, str]:
        """Key -> files: what requests can ask for."""
        return {key: self._paths[key] for key in self._keys.values()}

    def names(self) -> list[str]:
        return list(self._keys)

    def key(self, name: str) -> str:
        """The engine's key of an adapter; "" is no adapter."""
        if name and name not in self._keys:
            near = nearest(name, self._keys)
            raise UnknownModel(f"no adapter `{name}`", f"did you mean `{near[0]}`?" if near else "", param="model")
        return self._keys[name] if name else ""

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        """Returns when requests can ask for it. Raises if there is no such adapter, or it is not one of this model.
        `in_place`: one that has the name already gives it up, and only then."""
        if not self._enabled:
            raise BadRequest("adapters are not enabled", "start the server with --enable-lora")
        if not name:
            raise BadRequest("an adapter has no name", param="lora_name")
        if (name in self._keys and not in_place) or name in self._reserved:
            raise BadRequest(f"an adapter is called `{name}` already", "unload it first", param="lora_name")
        key = self._new_key(name)
        self._reserved.add(name)
        try:
            files = await asyncio.to_thread(resolve_adapter, path)
            self._loading[key] = asyncio.get_running_loop().create_future()
            self._send(LoadAdapter(key, str(files)))
            await self._loading[key]
        except (BadCheckpoint, Unsupported) as error:
            raise BadRequest(error.message, error.hint, param="lora_path") from error
        finally:
            self._reserved.discard(name)
            self._loading.pop(key, None)
        if name in self._keys:
            await self.unload(name)
        self._keys[name] = key
        self._paths[key] = str(files)

    async def unload(self, name: str) -> None:
        """No later request can name it. Requests in flight go on with it, and the last of them frees it."""
        key = self.key(name)
        del self._keys[name]
        self._leaving.add(key)
        self._send(UnloadAdapter(key))

    def engine_ready(self) -> None:
        """Call when a new engine has all requests in flight."""
        for key in self._leaving:
            self._send(UnloadAdapter(key))

    def engine_died(self, error: QuireError) -> None:
        for loading in self._loading.values():
            if not loading.done():
                loading.set_exception(Unavailable(f"{error.message} while the adapter was loaded", "try again"))

    def receive(self, message: AdapterLoaded | AdapterUnloaded) -> None:
        if isinstance(message, AdapterUnloaded):
            self._leaving.discard(message.key)
            self._paths.pop(message.key, None)
            self._keys = {name: key for name, key in self._keys.items() if key != message.key}
        elif (loading := self._loading.get(message.key)) and not loading.done():
            loading.set_exception(message.error.exception()) if message.error else loading.set_result(None)

    def _new_key(self, name: str) -> str:
        return f"{name}#{next(self._numbers)}"
