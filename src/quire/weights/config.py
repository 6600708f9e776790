"""The configuration of a checkpoint: typed reads, each of which fails by name.

Keys are those of Hugging Face's config.json; readers of other formats translate to them. A null counts as missing."""

import builtins
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from quire.core.errors import BadCheckpoint, Unsupported

T = TypeVar("T")


class Required:
    """The default of a key that has none."""


REQUIRED: Final = Required()

# Names that published checkpoints give an architecture -> the one it is the same as.
ALIASES: Final[Mapping[str, str]] = {
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "AquilaModel": "LlamaForCausalLM",
    "AquilaForCausalLM": "LlamaForCausalLM",
    "XverseForCausalLM": "LlamaForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "TeleChat3ForCausalLM": "LlamaForCausalLM",
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
    "Gemma3TextModel": "Gemma3Model",
    "RWForCausalLM": "FalconForCausalLM",
    "StableLMEpochForCausalLM": "StableLmForCausalLM",
    "BertForPreTraining": "BertForMaskedLM",
}


class CheckpointConfig:
    """The methods are named after the types they return; annotations inside say `builtins.int` and the like."""

    def __init__(
        self,
        source: Path,
        values: Mapping[builtins.str, Any],
        generation: Mapping[builtins.str, Any] | None = None,
        prefix: builtins.str = "",
    ) -> None:
        self.source = source  # the file that errors name
        self._values = values
        self._generation = generation or {}
        self._prefix = prefix  # of keys in errors: "rope_scaling."

    def __contains__(self, key: builtins.str) -> builtins.bool:
        return self._values.get(key) is not None

    def is_given(self, key: builtins.str) -> builtins.bool:
        """Whether the key is there at all: a null may mean something else than a missing key."""
        return key in self._values

    def get(self, key: builtins.str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def int(self, key: builtins.str, default: builtins.int | Required = REQUIRED) -> builtins.int:
        return self._typed(key, builtins.int, default)

    def float(self, key: builtins.str, default: builtins.float | Required = REQUIRED) -> builtins.float:
        """Whole numbers count: config.json writes 10000 as well as 10000.0."""
        value = self._values.get(key)
        if type(value) is builtins.int:
            return builtins.float(value)
        number = self._typed(key, builtins.float, default)
        if not math.isfinite(number):
            raise self._bad(key, f"is {number}")
        return number

    def str(self, key: builtins.str, default: builtins.str | Required = REQUIRED) -> builtins.str:
        return self._typed(key, builtins.str, default)

    def bool(self, key: builtins.str, default: builtins.bool | Required = REQUIRED) -> builtins.bool:
        return self._typed(key, builtins.bool, default)

    def dict(
        self, key: builtins.str, default: builtins.dict[builtins.str, Any] | Required = REQUIRED
    ) -> builtins.dict[builtins.str, Any]:
        """A nested object. `section` reads one with the same typed getters."""
        return self._typed(key, builtins.dict, default)

    def list(self, key: builtins.str, default: builtins.list[Any] | Required = REQUIRED) -> builtins.list[Any]:
        return self._typed(key, builtins.list, default)

    def section(self, key: builtins.str) -> "CheckpointConfig":
        """The nested object at `key`, empty where it is missing; errors name its keys `key.inner`."""
        return CheckpointConfig(self.source, self.dict(key, default={}), prefix=f"{self._prefix}{key}.")

    def with_values(self, values: Mapping[builtins.str, Any]) -> "CheckpointConfig":
        """The same configuration with these values added or replaced."""
        return CheckpointConfig(self.source, {**self._values, **values}, self._generation, self._prefix)

    def expect(self, key: builtins.str, *allowed: Any) -> Any:
        """The value, which must be one of `allowed`. With None among them the key may be missing."""
        value = self._values.get(key)
        if value is None and None not in allowed:
            raise self._bad(key, "is missing")
        if value not in allowed:
            choices = ", ".join(repr(choice) for choice in allowed if choice is not None)
            hint = f"supported: {choices}" if choices else "it is supported only where that is left out"
            raise Unsupported(f"{self.source}: {self._prefix}{key} is {value!r}", hint)
        return value

    @property
    def architecture(self) -> builtins.str:
        """Such as "LlamaForCausalLM", under the name it has in the tables of models."""
        names = self._values.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], builtins.str):
            raise self._bad("architectures", "is missing" if names is None else f"is {names!r}, not a list of names")
        return ALIASES.get(names[0], names[0])

    def generation(self, key: builtins.str, default: Any = None) -> Any:
        """A value of generation_config.json; older exports keep it in config.json."""
        value = self._generation.get(key)
        return self.get(key, default) if value is None else value

    @property
    def eos_ids(self) -> builtins.list[builtins.int]:
        """Tokens that end a text; those of the generation config come first."""
        ids: builtins.list[builtins.int] = []
        for values in (self._generation, self._values):
            given = values.get("eos_token_id")
            for token in given if isinstance(given, builtins.list) else [given]:
                if token is None or token in ids:
                    continue
                if type(token) is not builtins.int or token < 0:
                    raise self._bad("eos_token_id", f"is {given!r}, not a token id or a list of them")
                ids.append(token)
        return ids

    def _typed(self, key: builtins.str, kind: type[T], default: T | Required) -> T:
        value = self._values.get(key)
        if value is None:
            if isinstance(default, Required):
                raise self._bad(key, "is missing")
            return default
        if type(value) is not kind:  # not isinstance: True is no int here
            raise self._bad(key, f"is {_short(value)}, not {_ARTICLED[kind]}")
        return value

    def _bad(self, key: builtins.str, problem: builtins.str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.source}: {self._prefix}{key} {problem}")


_ARTICLED: Mapping[type, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
