"""The names and the order of the samplers that a request may choose from. Names are llama.cpp's."""

from collections.abc import Sequence

from quire.core.errors import BadRequest

EDITS = ("penalties", "dry")  # they change logits, and come before what drops tokens
FILTERS = ("top_n_sigma", "temperature", "top_k", "top_p", "min_p", "typical_p", "xtc")  # in the default order
SAMPLERS = (*EDITS, *FILTERS)

_SPELLINGS = {"typ_p": "typical_p", "typical": "typical_p", "typ": "typical_p", "temp": "temperature"}
_SPELLINGS |= {"nucleus": "top_p", "top_nsigma": "top_n_sigma"}
_LETTERS = {"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typical_p", "p": "top_p"}
_LETTERS |= {"m": "min_p", "x": "xtc", "t": "temperature"}


def sampler_order(names: Sequence[str]) -> list[str]:
    """The samplers named, as they are spelled in SAMPLERS. A string has a letter for each, as llama.cpp's."""
    if isinstance(names, str):
        names = [_LETTERS.get(letter, letter) for letter in names]
    order: list[str] = []
    for given in names:
        name = given.replace("-", "_").lower()
        name = _SPELLINGS.get(name, name)
        if name not in SAMPLERS:
            raise BadRequest(f"samplers has `{given[:40]}`", f"there are {', '.join(SAMPLERS)}", param="samplers")
        if name in order:
            raise BadRequest(f"samplers has `{name}` twice", "name each once", param="samplers")
        if name in EDITS and any(filter in order for filter in FILTERS):
            raise BadRequest(
                f"samplers has `{name}` behind `{order[-1]}`",
                "penalties and dry come before the samplers that drop tokens",
                param="samplers",
            )
        order.append(name)
    return order
