"""`speculative_config`: its keys, which are vLLM's, checked and made one value."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.core.draft_policy import CPU_TOKEN_COST, GPU_TOKEN_COST, DraftMethod, DraftPolicy
from quire.core.draft_tree import MAX_TREE_NODES
from quire.core.errors import BadRequest
from quire.runtime.spec import METHODS, MethodKey, method_called, method_of

if TYPE_CHECKING:
    from quire.runtime.spec.proposer import ProposerContext
    from quire.runtime.spec.proposers import Proposers

NUM_TOKENS = "num_speculative_tokens"
PER_BATCH_SIZE = "num_speculative_tokens_per_batch_size"
SYNTHETIC = ("rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length")
SHARED_KEYS = ("method", "model", NUM_TOKENS, PER_BATCH_SIZE, *SYNTHETIC)
OPTION = "speculative_config"

# Keys of vLLM that have no use here: the values that ask for nothing, and why another is refused.
_NO_USE: dict[str, tuple[tuple[Any, ...], str]] = {
    "quantization": ((None,), "the draft model is quantized as its checkpoint is, or by the option quantization"),
    "revision": ((None,), "pull the draft model at that revision, and name its path"),
    "code_revision": ((None,), "no code is loaded with a model"),
    "draft_load_config": ((None,), "the draft model is loaded as the model is"),
    "enforce_eager": ((None, False), "set the option enforce_eager, for both models"),
    "parallel_drafting": ((None, False), "each draft token follows from the one before"),
    "draft_sample_method": ((None, "probabilistic"), "drafts are drawn as the request draws its tokens"),
    "use_heterogeneous_vocab": ((None, False), "a draft model must have the vocabulary of the model"),
    "disable_padded_drafter_batch": ((None, False, True), ""),
    "use_local_argmax_reduction": ((None, False), "the draft model runs on one device"),
    "enable_adaptive_verification": ((None, False, True), ""),
    "disable_by_batch_size": ((None,), f"drafts that do not pay are not verified; to fix it, set {PER_BATCH_SIZE}"),
    "speculative_token_tree": ((None,), "set tree_nodes: a tree has the likeliest nodes, and no fixed shape"),
    "attention_backend": ((None,), "attention is computed as for the model"),
    "moe_backend": ((None, "auto"), "experts are computed as for the model"),
    "kv_cache_dtype": ((None, "auto"), "set the option kv_cache_dtype, for both models"),
    "tensor_parallel_size": ((None,), "write draft_tensor_parallel_size"),
    "index_share_for_mtp_iteration": ((None, False), "each draft token chooses the keys that it attends to"),
    "disable_eagle_block_drop": ((None, False, True), ""),
    "dspark_draft_topk": ((None,), "there is no method dspark"),
    "disable_logprobs": ((None, False), "a request that asks for logprobs gets them"),
    "disable_log_stats": ((None, False, True), ""),
    "acceptance_method": ((None, "rejection_sampler"), "tokens are drawn as without drafts"),
}


@dataclass(frozen=True, slots=True)
class MethodConfig:
    name: str
    num_tokens: int  # draft tokens a step, at most; of a tree: its depth
    keys: Mapping[str, float]

    @property
    def tree_nodes(self) -> int:
        """0: it proposes chains."""
        return int(self.keys.get("tree_nodes", 0))

    @property
    def tree_steps(self) -> tuple[int, ...]:
        """What its own steps compute for one tree, in tokens: level by level."""
        top_k = int(self.keys.get("tree_top_k", 0)) if METHODS[self.name].computes_nodes else 1
        return (1, *[top_k] * (self.num_tokens - 1))


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """What was asked for, checked."""

    methods: tuple[MethodConfig, ...]
    model: str = ""  # to draft with, where a method has one: a name, then a path
    per_batch_size: tuple[tuple[int, int, int], ...] = ()  # (from, to, draft tokens) sequences of a step
    synthetic_rates: tuple[float, ...] = ()  # by position, how likely the drafts up to it are accepted; (): really

    @property
    def method(self) -> str:
        return ",".join(method.name for method in self.methods)

    @property
    def head(self) -> str:
        """The method that drafts with a head; "": none does."""
        return next((method.name for method in self.methods if METHODS[method.name].has_head), "")

    @property
    def num_tokens(self) -> int:
        return max(method.num_tokens for method in self.methods)

    def check_fits(self, max_model_len: int) -> None:
        """A text has a token before its drafts, and one behind them."""
        if self.num_tokens > (most := max_model_len - 2):
            raise _refusal(
                f"{self.num_tokens:,} draft tokens a step do not fit texts of {max_model_len:,} tokens (max_model_len)",
                f"let {NUM_TOKENS} be at most {most:,}" if most > 0 else "leave speculation out",
            )

    def proposers(self, context: "ProposerContext") -> "Proposers":
        from quire.runtime.spec.proposers import Proposers  # with what computes

        made = []
        most = max(max(method.num_tokens, method.tree_nodes) for method in self.methods)
        context = replace(context, max_drafts=most) if context else context
        for method in self.methods:
            table = METHODS[method.name]
            new_proposer = getattr(import_module(table.module), table.name)
            made.append((method.name, new_proposer(context, method.num_tokens, **method.keys)))
        free = {method.name: method.num_tokens for method in self.methods if METHODS[method.name].cost == 0}
        return Proposers(made, free, self.synthetic_rates, most)

    def policy(self, *, on_gpu: bool, model_cost: float | None = None) -> DraftPolicy:
        """For the scheduler. `model_cost`: the size of the model that drafts, in sizes of the target."""
        methods = []
        for method in self.methods:
            table = METHODS[method.name]
            cost = model_cost if (table.has_model or table.has_head) and model_cost else table.cost
            told = method.name, method.num_tokens, table.acceptance, cost
            steps = method.tree_steps if method.tree_nodes else ()
            methods.append(DraftMethod(*told, method.tree_nodes, steps, table.reads_along))
        token_cost = GPU_TOKEN_COST if on_gpu else CPU_TOKEN_COST
        return DraftPolicy(tuple(methods), token_cost, self.per_batch_size, bool(self.synthetic_rates))


def read_config(
    text: str | None, method: str | None = None, num_tokens: int | None = None, model: str | None = None
) -> SpecConfig | None:
    """From the JSON object of `speculative_config`, and from `spec_method`, `spec_tokens` and `spec_model`, which say
    the same in short. None: no speculation."""
    given = _read(text)
    short = (("spec_method", "method", method), ("spec_tokens", NUM_TOKENS, num_tokens), ("spec_model", "model", model))
    for name, key, value in short:
        if value is not None and given.setdefault(key, value) != value:
            raise BadRequest(f"{name} is {value}, and {OPTION} says {given[key]}", "say it once", param=name)
    if not given:
        return None
    drafting = given.pop("model", None) or ""
    names = _names(given.pop("method", None), drafting)
    if names == ["ngram"] and drafting in ("ngram", "[ngram]"):  # vLLM's older way to say it
        drafting = ""
    _check_model(names, drafting)
    per_batch_size = _per_batch_size(given.pop(PER_BATCH_SIZE, None))
    synthetic = {key: given.pop(key) for key in SYNTHETIC if key in given}
    methods = _methods(names, given)
    most = max(method.num_tokens for method in methods)
    return SpecConfig(methods, drafting, per_batch_size, _synthetic_rates(synthetic, most))


def _read(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise _refusal(f"{OPTION} is not JSON: {failure}", 'write {"method": "ngram"}') from None
    if not isinstance(config, dict):
        raise _refusal(f"{OPTION} is {text}", "write a JSON object")
    for key, (values, why) in _NO_USE.items():
        if key in config and (value := config.pop(key)) not in values:
            raise _refusal(f"{OPTION} has `{key}`: {json.dumps(value)}", why or f"it may be {json.dumps(values[-1])}")
    known = {*SHARED_KEYS, *(key for method in METHODS.values() for key in method.keys)}
    return {key: value for key, value in config.items() if value is not None or key not in known}


def _names(method: Any, model: Any) -> list[str]:
    """Of the methods: a name, several with commas, or a list."""
    choices = f"choose from {', '.join(METHODS)}, or several: suffix,draft_model"
    if method is None:
        if not model:
            raise _refusal("speculation has no method", choices)
        return [method_of(model)] if isinstance(model, str) else ["draft_model"]
    names = method.split(",") if isinstance(method, str) else method
    if not isinstance(names, list) or not names:
        raise _refusal(f"method is {json.dumps(method)}", choices)
    names = [method_called(name) if isinstance(name, str) else name for name in names]
    for name in names:
        if name not in METHODS:
            near = difflib.get_close_matches(str(name), METHODS, 1)
            raise _refusal(f"the speculative method is `{name}`", f"did you mean {near[0]}?" if near else choices)
    if len(set(names)) < len(names):
        raise _refusal(f"method is {json.dumps(method)}", "name each once")
    return names


def _check_model(names: list[str], model: Any) -> None:
    drafting = [name for name in names if METHODS[name].has_model]
    if not isinstance(model, str):
        raise _refusal(f"model is {json.dumps(model)}", "it is the name or the path of a model")
    if model and not drafting:
        both = f'"method": "{",".join(names)},draft_model"'
        raise _refusal(
            f"{','.join(names)} has no `model`", "leave it out" if "mtp" in names else f"leave it out, or say {both}"
        )
    if drafting and not model:
        example = "./head" if METHODS[drafting[0]].has_head else "qwen2.5-0.5b"
        raise _refusal(f"{drafting[0]} drafts with `model`", f'name one: "model": "{example}"')
    loaded = [name for name in names if METHODS[name].has_model or METHODS[name].has_head]
    if len(loaded) > 1:
        raise _refusal(f"{' and '.join(loaded)} both draft with weights of their own", "choose one of them")


def _methods(names: list[str], given: Mapping[str, Any]) -> tuple[MethodConfig, ...]:
    known = {key: one for name in names for key, one in METHODS[name].keys.items()}
    known[NUM_TOKENS] = MethodKey(5)
    for key, value in given.items():
        if key not in known:
            _refuse_key(key, names, known)
        if problem := known[key].problem(value):
            raise _refusal(f"{key} is {json.dumps(value)}", problem)
    made = []
    for name in names:
        method = METHODS[name]
        values = {key: given.get(key, one.default) for key, one in method.keys.items()}
        made.append(MethodConfig(name, int(given.get(NUM_TOKENS, method.num_tokens)), _ordered(values, given)))
        _check_tree(made[-1], given)
    return tuple(made)


def _check_tree(method: MethodConfig, given: Mapping[str, Any]) -> None:
    """A tree is larger than a chain, and what a head computes of it is a tree as well."""
    if not method.tree_nodes:
        if "tree_top_k" in given and "tree_top_k" in method.keys:
            raise _refusal(f"{OPTION} has `tree_top_k`, and no tree", 'say how large: "tree_nodes": 16')
        return
    if method.tree_nodes <= method.num_tokens:
        raise _refusal(
            f"tree_nodes is {method.tree_nodes}, and a chain of {method.name} has {method.num_tokens} draft tokens",
            f"let it be {method.num_tokens + 1} to {MAX_TREE_NODES}, or {NUM_TOKENS} less",
        )
    if (computed := sum(method.tree_steps[1:])) > MAX_TREE_NODES:
        raise _refusal(
            f"tree_top_k is {method.keys['tree_top_k']} and {NUM_TOKENS} is {method.num_tokens}: {method.name} would "
            f"compute {computed} nodes",
            f"at most {MAX_TREE_NODES} are possible: let one of them be less",
        )


def _refuse_key(key: str, names: list[str], known: Mapping[str, Any]) -> None:
    owners = [name for name, method in METHODS.items() if key in method.keys]
    if owners:
        raise _refusal(f"{OPTION} has `{key}`, which is of {owners[0]}", f"the method is {','.join(names)}")
    keys = [*SHARED_KEYS, *(one for one in known if one not in SHARED_KEYS)]
    near = difflib.get_close_matches(key, keys, 1)
    raise _refusal(
        f"{OPTION} has `{key}`",
        f"did you mean {near[0]}?" if near else f"the keys of {','.join(names)} are {', '.join(keys)}",
    )


def _per_batch_size(given: Any) -> tuple[tuple[int, int, int], ...]:
    """[[from, to, draft tokens], ...], by the number of sequences in a step."""
    hint = "write ranges that follow each other: [[1, 4, 5], [5, 32, 2], [33, 256, 0]]"
    ranges: list[tuple[int, int, int]] = []
    for entry in given if isinstance(given, list) else [given] if given is not None else []:
        numbers = isinstance(entry, list) and len(entry) == 3 and all(type(number) is int for number in entry)
        if not numbers or not 1 <= entry[0] <= entry[1] or entry[2] < 0 or (ranges and entry[0] <= ranges[-1][1]):
            raise _refusal(f"{PER_BATCH_SIZE} has {json.dumps(entry)}", hint)
        ranges.append((entry[0], entry[1], entry[2]))
    return tuple(ranges)


def _synthetic_rates(given: Mapping[str, Any], num_tokens: int) -> tuple[float, ...]:
    """How likely the drafts up to each position are accepted; (): as it comes."""
    how, rates, length = (given.get(key) for key in SYNTHETIC)
    if how not in (None, "standard", "strict", "synthetic"):
        raise _refusal(
            f"rejection_sample_method is {json.dumps(how)}",
            "tokens are drawn as without drafts, which is `standard`; `synthetic` is for benchmarks",
        )
    if how != "synthetic":
        for key in SYNTHETIC[1:]:
            if given.get(key) is not None:
                raise _refusal(f"{OPTION} has `{key}`", 'it is for "rejection_sample_method": "synthetic"')
        return ()
    if (rates is None) == (length is None):
        raise _refusal("synthetic acceptance needs rates, or a length", f"give one of {' and '.join(SYNTHETIC[1:])}")
    if rates is not None:
        return _checked_rates(rates, num_tokens)
    if isinstance(length, bool) or not isinstance(length, int | float) or not 1 <= length <= num_tokens + 1:
        raise _refusal(
            f"synthetic_acceptance_length is {json.dumps(length)}",
            f"it is the mean of the tokens of a step: 1 to {num_tokens + 1}",
        )
    return tuple(min(max(length - 1 - position, 0.0), 1.0) for position in range(num_tokens))


def _checked_rates(rates: Any, num_tokens: int) -> tuple[float, ...]:
    numbers = isinstance(rates, list) and all(type(rate) in (int, float) and 0 <= rate <= 1 for rate in rates)
    if not numbers or len(rates) != num_tokens or sorted(rates, reverse=True) != rates:
        raise _refusal(
            f"synthetic_acceptance_rates is {json.dumps(rates)}",
            f"write {num_tokens} numbers from 0 to 1 that do not rise: how likely all drafts up to each are accepted",
        )
    return tuple(map(float, rates))


def _ordered(values: dict[str, float], given: Mapping[str, Any]) -> dict[str, float]:
    """A `_min` is at most its `_max`: the one that was not given follows the other."""
    for low in [key for key in values if key.endswith("_min")]:
        high = low.removesuffix("_min") + "_max"
        if values[low] > values[high]:
            if low in given and high in given:
                raise _refusal(f"{low} is {values[low]} and {high} is {values[high]}", "let the first be the smaller")
            values[high if low in given else low] = values[low if low in given else high]
    return values


def _refusal(message: str, hint: str) -> BadRequest:
    return BadRequest(message, hint, param=OPTION)
