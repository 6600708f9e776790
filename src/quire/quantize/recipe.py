"""Recipes of llm-compressor, in YAML or JSON: which layers get which scheme, and how they are rounded.

    quant_stage:
      quant_modifiers:
        GPTQModifier:
          ignore: [lm_head]
          scheme: {W4A16: ["Linear"], W8A8: ["re:.*down_proj"]}

What a recipe asks for and Quire does not do is refused by name."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.quantize.methods import LINEAR_METHODS, FormatOptions, linear_format, method_name
from quire.quantize.plan import QuantizeError

ALGORITHMS = {"QuantizationModifier": "nearest", "GPTQModifier": "gptq"}
SMOOTHING = {"AWQModifier": "awq", "SmoothQuantModifier": "smoothquant"}
ORDERS = {None: None, "static": "group", "group": "activation", "weight": "group", "dynamic": "activation"}
KNOWN = ("targets", "scheme", "ignore", "config_groups", "kv_cache_scheme")
# What says how others compute, and changes nothing here.
WITHOUT_EFFECT = (
    "block_size",
    "sequential_update",
    "sequential_targets",
    "offload_hessians",
    "offload_device",
    "mappings",
)
OF_GPTQ = ("dampening_frac", "actorder")
COMPARED = ("num_bits", "type", "symmetric", "strategy")
EVERYTHING = ("Linear", ["Linear"])


@dataclass(frozen=True, slots=True)
class Recipe:
    """`patterns`: regex -> the method of layers that it finds."""

    method: str
    algorithm: str
    patterns: tuple[tuple[str, str], ...] = ()
    ignore: tuple[str, ...] = ()
    group_size: int | None = None
    damping: float | None = None
    act_order: str | None = None
    kv_scales: bool = False
    smoothing_strength: float | None = None


def read_recipe(path: Path) -> Recipe:
    import yaml  # type: ignore[import-untyped]  # a dependency of huggingface-hub; JSON is YAML

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise QuantizeError(f"--recipe {path} cannot be read: {error.strerror}", "name a YAML or JSON file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise QuantizeError(f"--recipe {path} is neither YAML nor JSON: {error}", "see docs/quantize.md") from error
    modifiers = {name: settings or {} for name, settings in _modifiers(content)}
    quantizing = [name for name, settings in modifiers.items() if name in ALGORITHMS or _has_scheme(settings)]
    smoothing = [name for name in modifiers if name in SMOOTHING]
    if len(quantizing) != 1 or len(smoothing) > 1:
        raise QuantizeError(
            f"{path} has {' and '.join(modifiers) or 'no modifiers'}",
            "a recipe here has QuantizationModifier, alone or with AWQModifier or SmoothQuantModifier, or GPTQModifier",
        )
    if smoothing and quantizing[0] == "GPTQModifier":
        raise QuantizeError(
            f"{path} has {smoothing[0]} and GPTQModifier, which are not combined here", "leave out one of them"
        )
    algorithm = SMOOTHING[smoothing[0]] if smoothing else ALGORITHMS[quantizing[0]]
    recipe = _recipe(quantizing[0], algorithm, modifiers[quantizing[0]], path)
    if not smoothing or smoothing[0] in quantizing:
        return recipe
    settings = modifiers[smoothing[0]]
    known = ("mappings", *(("smoothing_strength",) if algorithm == "smoothquant" else ()))
    _check_known(smoothing[0], settings, known, path)
    return replace(recipe, smoothing_strength=settings.get("smoothing_strength"))


def _has_scheme(settings: Mapping[str, Any]) -> bool:
    return "scheme" in settings or "config_groups" in settings


def _modifiers(content: Any) -> Iterator[tuple[str, Any]]:
    """At any depth: recipes have stages, and lists of them."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            if str(name).endswith("Modifier"):
                if name not in ALGORITHMS and name not in SMOOTHING:
                    known = ", ".join((*ALGORITHMS, *SMOOTHING))
                    raise QuantizeError(f"the recipe has a {name}, which there is not here", f"there are {known}")
                if not isinstance(value, Mapping | None):
                    raise QuantizeError(
                        f"the recipe's {name} is {value!r}", "give its settings, such as `scheme: W4A16`"
                    )
                yield str(name), value
            else:
                yield from _modifiers(value)
    elif isinstance(content, list):
        for value in content:
            yield from _modifiers(value)


def _recipe(modifier: str, algorithm: str, settings: Mapping[str, Any], path: Path) -> Recipe:
    known = (*KNOWN, *WITHOUT_EFFECT, *(OF_GPTQ if modifier == "GPTQModifier" else ()))
    _check_known(modifier, settings, known, path)
    ignored = tuple(_pattern(name) for name in _listed(settings.get("ignore", [])))
    groups = _groups(settings, path)
    whole = [name for name, targets, _ in groups if targets in EVERYTHING]
    if len(whole) > 1:
        raise QuantizeError(f"{path} gives all linear layers {' and '.join(whole)}", "name the layers of one of them")
    patterns = tuple((_pattern(t), name) for name, targets, _ in groups if targets not in EVERYTHING for t in targets)
    rest = whole[0] if whole else groups[0][0]
    if not whole:  # what no target finds stays as it is
        ignored += (f"^(?!.*({'|'.join(f'(?:{pattern})' for pattern, _ in patterns)}))",)
    sizes = {size for _, _, size in groups if size is not None}
    if len(sizes) > 1:
        raise QuantizeError(f"{path} has groups of {' and '.join(map(str, sorted(sizes)))}", "use one size for all")
    order = settings.get("actorder")
    if order not in ORDERS:
        raise QuantizeError(f"{path}: actorder is {order!r}", f"it is one of {', '.join(filter(None, ORDERS))}")
    kv_scheme = settings.get("kv_cache_scheme")
    return Recipe(
        rest, algorithm, patterns, ignored, sizes.pop() if sizes else None,
        settings.get("dampening_frac"), ORDERS[order], kv_scheme is not None,
    )  # fmt: skip


def _check_known(modifier: str, settings: Mapping[str, Any], known: Collection[str], path: Path) -> None:
    if unknown := [key for key in settings if key not in known]:
        raise QuantizeError(f"{path}: {modifier} has `{unknown[0]}`, which is not read", f"it has {', '.join(known)}")


def _groups(settings: Mapping[str, Any], path: Path) -> list[tuple[str, Any, int | None]]:
    """Method, targets, and the size of groups where the recipe says one."""
    scheme, groups, targets = settings.get("scheme"), settings.get("config_groups"), settings.get("targets", "Linear")
    if isinstance(scheme, str):
        return [(_linear(scheme), targets if targets in EVERYTHING else _listed(targets), None)]
    if isinstance(scheme, Mapping):
        return [(_linear(name), each if each in EVERYTHING else _listed(each), None) for name, each in scheme.items()]
    if isinstance(groups, Mapping) and groups:
        return [_of_group(group, path) for group in groups.values()]
    raise QuantizeError(f"{path} names no scheme", "add `scheme: W4A16`, say, or config_groups")


def _of_group(group: Mapping[str, Any], path: Path) -> tuple[str, Any, int | None]:
    """The method whose numbers are those of the group."""
    weights, inputs = dict(group.get("weights") or {}), group.get("input_activations")
    weights.setdefault("strategy", "group" if weights.get("group_size") else "channel")
    wanted = (_numbers(weights), _numbers(inputs or {}) if inputs else None)
    for name, row in LINEAR_METHODS.items():
        config = linear_format(name, FormatOptions()).config([]) if row.make else {}
        scheme = config.get("config_groups", {}).get("group_0")
        if scheme is not None:
            theirs = scheme["input_activations"]
            if (_numbers(scheme["weights"]), _numbers(theirs) if theirs else None) == wanted:
                size = weights.get("group_size")
                fixed = "group_size" not in row.options
                targets = group.get("targets", "Linear")
                return name, targets if targets in EVERYTHING else _listed(targets), None if fixed else size
    raise QuantizeError(
        f"{path}: no method has weights {weights}" + (f" and activations {dict(inputs)}" if inputs else ""),
        "`quire quantize --list` prints the methods",
    )


def _numbers(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    defaults = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": None}
    small = arguments.get("group_size") if arguments.get("type") == "float" else None
    return (*(arguments.get(key, defaults[key]) for key in COMPARED), small, bool(arguments.get("dynamic")))


def _linear(scheme: str) -> str:
    name = method_name(scheme, to_gguf=False)
    if name not in LINEAR_METHODS:
        raise QuantizeError(f"the recipe's scheme {scheme} is no method of a folder", "`quire quantize --list`")
    return name


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else [*map(str, names)]


def _pattern(target: str) -> str:
    """The pattern of the name of a stored weight: "re:..." is matched from the beginning, others are a module's whole
    name."""
    if target.startswith("re:"):
        body = target[3:]
        body = rf"{body[:-1]}\.weight$" if body.endswith("$") else body
        try:
            re.compile(body)
        except re.error as error:
            raise QuantizeError(
                f"the recipe has {target}, which is no regex: {error}", "`re:.*down_proj` is"
            ) from error
        return f"^(?:{body})"
    return rf"(^|\.){re.escape(target)}\.weight$"
