"""The compiled module `quire._native`, and which of its instruction sets is used."""

from typing import Any

from quire.core.errors import QuireError, Unsupported

try:
    from quire import _native
except ModuleNotFoundError as error:
    raise QuireError(
        "the CPU kernels (quire._native) are not built",
        "install quire with pip, or run `make build` in the source tree",
    ) from error

__all__ = ["available_isas", "isa", "native", "use_isa"]

native: Any = _native


def isa() -> str:
    """The instruction set whose kernels run: `plain`, `dotprod`, `avx2`, `avxvnni` or `avx512`."""
    return str(native.isa())


def available_isas() -> list[str]:
    """The instruction sets this CPU can run, best first. The best one is used unless another is chosen."""
    return list(native.available_isas())


def use_isa(name: str) -> None:
    """Choose the kernels, for every program of this process; not while one runs."""
    if not native.use_isa(name):
        raise Unsupported(
            f"this CPU or build cannot run `{name}` kernels", f"choose one of {', '.join(available_isas())}"
        )
