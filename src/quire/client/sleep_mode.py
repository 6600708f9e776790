"""vLLM's sleep mode: what may be asked of it."""

from collections.abc import Collection

from quire.core.errors import BadRequest

TAGS = {"weights", "kv_cache"}


def check_level(level: int | str) -> None:
    """Both levels end the engine: weights are read again from their files."""
    if str(level) not in ("1", "2"):
        raise BadRequest(f"level is {level}", "it may be 1 or 2, which are the same here", param="level")


def check_tags(tags: Collection[str] | None) -> None:
    if tags and set(tags) != TAGS:
        what = f"tags are {', '.join(sorted(tags))}"
        raise BadRequest(what, "weights and kv_cache wake up together: leave tags out", param="tags")
