"""Speculative methods by name. To add one: a file here with a `Proposer`, and a line in METHODS.

A method is imported when it is used: the server's process checks names and keys, and computes nothing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.core.errors import BadRequest

if TYPE_CHECKING:
    from quire.runtime.spec.proposer import Proposer, ProposerContext

NUM_TOKENS = "num_speculative_tokens"
OPTION = "speculative_config"


@dataclass(frozen=True, slots=True)
class Method:
    module: str
    name: str  # of the class, which is called with a ProposerContext, the number of draft tokens, and the keys
    num_tokens: int = 5  # draft tokens a step, at most, where nothing is said
    has_model: bool = False  # a key `model` names one
    has_head: bool = False  # it reads the target's hidden states; what `model` names is no whole model
    keys: Mapping[str, "MethodKey"] = field(default_factory=dict)  # its own


@dataclass(frozen=True, slots=True)
class MethodKey:
    """A number; a whole one if its default is."""

    default: float
    least: float = 1
    most: float = float("inf")

    def problem(self, value: Any) -> str:
        """What it must be, if the value is not."""
        whole = isinstance(self.default, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            return f"it must be a {'whole ' if whole else ''}number of at least {self.least:g}"
        if not self.least <= value <= self.most:
            return f"it must be at least {self.least:g}" + (f" and at most {self.most:g}" if value > self.most else "")
        return ""


ONE_RANK = {"draft_tensor_parallel_size": MethodKey(1, 1, 1)}
METHODS = {
    "ngram": Method(
        "quire.runtime.spec.ngram", "Ngram", keys={"prompt_lookup_min": MethodKey(2), "prompt_lookup_max": MethodKey(5)}
    ),
    "suffix": Method(
        "quire.runtime.spec.suffix",
        "Suffix",
        num_tokens=24,
        keys={
            "suffix_decoding_max_tree_depth": MethodKey(24, 2),
            "suffix_decoding_max_cached_requests": MethodKey(10_000, 0),
            "suffix_decoding_max_spec_factor": MethodKey(1.0, 0.1),
            "suffix_decoding_min_token_prob": MethodKey(0.1, 0.0, 1.0),
        },
    ),
    "draft_model": Method(
        "quire.runtime.spec.draft_model",
        "DraftModel",
        num_tokens=3,
        has_model=True,
        keys=ONE_RANK,
    ),
    "eagle": Method("quire.runtime.spec.chained_head", "ChainedHead", 3, has_model=True, has_head=True, keys=ONE_RANK),
    "eagle3": Method("quire.runtime.spec.chained_head", "ChainedHead", 3, has_model=True, has_head=True, keys=ONE_RANK),
    "medusa": Method("quire.runtime.spec.medusa", "Medusa", 3, has_model=True, has_head=True, keys=ONE_RANK),
    "mtp": Method("quire.runtime.spec.chained_head", "ChainedHead", 1, has_head=True, keys=ONE_RANK),
}


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """What was asked for, checked."""

    method: str
    num_tokens: int  # draft tokens a step, at most
    keys: Mapping[str, float]
    model: str = ""  # to draft with, where the method has one: a name, then a path

    @property
    def has_head(self) -> bool:
        return METHODS[self.method].has_head

    def proposer(self, context: "ProposerContext") -> "Proposer":
        method = METHODS[self.method]
        new_proposer = getattr(import_module(method.module), method.name)
        proposer: Proposer = new_proposer(context, self.num_tokens, **self.keys)
        return proposer


def read_config(text: str | None, method: str | None = None, num_tokens: int | None = None) -> SpecConfig | None:
    """From the JSON object of `speculative_config`, and from `spec_method` and `spec_tokens`, which say the same in
    short. None: no speculation."""
    given = _read(text)
    for name, key, value in (("spec_method", "method", method), ("spec_tokens", NUM_TOKENS, num_tokens)):
        if value is not None and given.setdefault(key, value) != value:
            raise BadRequest(f"{name} is {value}, and {OPTION} says {given[key]}", "say it once", param=name)
    if not given:
        return None
    model = given.pop("model", "")
    if model and "method" not in given:
        given["method"] = "draft_model"
    if "method" not in given:
        raise BadRequest("speculation has no method", f"choose from {', '.join(METHODS)}", param=OPTION)
    chosen = given.pop("method")
    if chosen not in METHODS:
        raise BadRequest(f"the speculative method is `{chosen}`", f"choose from {', '.join(METHODS)}", param=OPTION)
    if METHODS[chosen].has_model != bool(model) or not isinstance(model, str):
        example = "./head" if METHODS[chosen].has_head else "qwen2.5-0.5b"
        wanted = f'name one: "model": "{example}"' if METHODS[chosen].has_model else "leave it out"
        raise BadRequest(
            f"{chosen} {'drafts with' if METHODS[chosen].has_model else 'has no'} `model`", wanted, param=OPTION
        )
    known = {NUM_TOKENS: MethodKey(METHODS[chosen].num_tokens), **METHODS[chosen].keys}
    for key, value in given.items():
        if key not in known:
            raise BadRequest(
                f"{OPTION} has `{key}`", f"the keys of {chosen} are method, {', '.join(known)}", param=OPTION
            )
        if problem := known[key].problem(value):
            raise BadRequest(f"{key} is {json.dumps(value)}", problem, param=OPTION)
    values: dict[str, float] = {**{key: one.default for key, one in known.items()}, **given}
    return SpecConfig(chosen, int(values.pop(NUM_TOKENS)), _ordered(values, given), model)


def _read(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except ValueError as failure:
        raise BadRequest(f"{OPTION} is not JSON: {failure}", 'write {"method": "ngram"}', param=OPTION) from None
    if not isinstance(config, dict):
        raise BadRequest(f"{OPTION} is {text}", "write a JSON object", param=OPTION)
    return config


def _ordered(values: dict[str, float], given: Mapping[str, Any]) -> dict[str, float]:
    """A `_min` is at most its `_max`: the one that was not given follows the other."""
    for low in [key for key in values if key.endswith("_min")]:
        high = low.removesuffix("_min") + "_max"
        if values[low] > values[high]:
            if low in given and high in given:
                raise BadRequest(
                    f"{low} is {values[low]} and {high} is {values[high]}", "let the first be the smaller", param=OPTION
                )
            values[high if low in given else low] = values[low if low in given else high]
    return values
