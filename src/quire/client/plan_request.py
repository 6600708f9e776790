"""What a plan is made of, on its way to the process that makes it."""

from msgspec import Struct


class PlanRequest(Struct, kw_only=True, frozen=True):
    """A shape, or a model that is served and the path of its files."""

    name: str
    path: str = ""
    shape: str | None = None
    format: str | None = None  # of a shape
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    hardware: str | None = None  # None: this machine
    on_gpu: bool = False  # of this machine
    machine_memory: int = 0  # bytes that a model may take on this machine
    tp: int = 1
    users: int = 1
    context: int = 4096
    prompt: int = 1024
    output: int = 256
    loras: int = 0
    rank: int = 16
    price: float | None = None  # None: a typical one
