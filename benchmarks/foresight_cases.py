"""The workloads that predictions are held against: twelve on a CPU, six on a GPU."""

from dataclasses import dataclass, field
from typing import Any

CLOSE_TO_CAPACITY = 0.85  # a share: from here on what waits grows with every small error of step times


@dataclass(frozen=True, slots=True)
class Case:
    """`load`: requests a second as a share of what the engine can serve; 0: all at once."""

    name: str
    load: float
    spec: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    model: str = "smollm2"


_CHAT = {"prompt": 128, "output": 64, "spread": 0.5}
CPU = (
    Case("light", 0.3, _CHAT),
    Case("busy", 0.6, _CHAT),
    Case("bursts", 0.5, {"prompt": 96, "output": 48, "spread": 0.3, "burst": 8}),
    Case("shared prefixes", 0.4, {"prompt": 32, "output": 48, "spread": 0.5, "shared_prefix": 512, "num_prefixes": 4}),
    Case("conversations", 0.5, {"prompt": 48, "output": 48, "spread": 0.5, "turns": 4, "think_seconds": 2.0}),
    Case("long prompts", 0.5, {"prompt": 1500, "output": 32, "spread": 0.3}),
    Case("short", 0.5, {"prompt": 16, "output": 16, "spread": 0.5}),
    Case("spread", 0.5, {"prompt": 256, "output": 96, "spread": 1.0}),
    Case("small cache", 0.75, {"prompt": 96, "output": 128, "spread": 0.3},
         {"kv_cache_memory_bytes": 30 << 20, "max_model_len": 512}),
    Case("full", 0.9, _CHAT),
    Case("priorities", 0.9, {**_CHAT, "priorities": 3}, {"scheduling_policy": "priority"}),
    Case("at once", 0.0, {"prompt": 128, "output": 64, "spread": 0.3}),
)  # fmt: skip
_LONG_CHAT = {"prompt": 1024, "output": 256, "spread": 0.5}
# The cases of most worth first: they may not all fit into the time that there is on a rented GPU.
GPU = (
    Case("8b light", 0.3, _LONG_CHAT, model="8b"),
    Case("8b busy", 0.7, _LONG_CHAT, model="8b"),
    Case("8b shared prefixes", 0.6, {"prompt": 128, "output": 128, "spread": 0.5, "shared_prefix": 2048,
         "num_prefixes": 8}, model="8b"),
    Case("8b at once", 0.0, _LONG_CHAT, model="8b"),
    Case("135m busy", 0.5, {"prompt": 256, "output": 128, "spread": 0.5}),
    Case("135m conversations", 0.3, {"prompt": 128, "output": 96, "spread": 0.5, "turns": 4, "think_seconds": 1.0}),
)  # fmt: skip
