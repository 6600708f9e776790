"""Which options of the prefix cache and its tiers go together."""

from dataclasses import fields
from typing import Any

from quire.core.errors import BadRequest

_OF_PREFIXES = {
    "kv_events_config": "publishes",
    "kv_disk_path": "keeps",
    "kv_offloading_size": "keeps",
}
_OF_THE_DISK = {"kv_disk_size": "GiB", "kv_disk_write_policy": ""}


def check_tiers(options: Any) -> None:
    """Refuse options of what is not there. `options`: an `EngineOptions`, whose file needs this one."""
    for name, does in _OF_PREFIXES.items():
        if getattr(options, name) and not options.enable_prefix_caching:
            raise BadRequest(
                f"{name} {does} the prefix cache, and enable_prefix_caching is off", "leave one of them out", param=name
            )
    defaults = {spec.name: spec.default for spec in fields(options)}
    for name, unit in _OF_THE_DISK.items():
        value = getattr(options, name)
        if options.kv_disk_path is None and value != defaults[name]:
            raise BadRequest(
                f"{name} is {f'{value} {unit}'.strip()}, and kv_disk_path is not given",
                "give a directory for prefixes as kv_disk_path",
                param=name,
            )
