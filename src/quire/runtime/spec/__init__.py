"""Speculative methods by name. To add one: a file here with a `Proposer`, and a line in METHODS.

A method is imported when it is used: the server's process checks names and keys, and computes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.core.draft_tree import MAX_TREE_NODES


@dataclass(frozen=True, slots=True)
class Method:
    module: str
    name: str  # of the class, which is called with a ProposerContext, the number of draft tokens, and the keys
    num_tokens: int = 5  # draft tokens a step, at most, where nothing is said
    has_model: bool = False  # a key `model` names one
    has_head: bool = False  # it reads the target's hidden states; what `model` names is no whole model
    acceptance: float = 0.5  # of a draft token, until it is measured
    cost: float = 0.0  # of a draft token, in steps of the target, until it is measured; 0: free, and always proposed
    computes_nodes: bool = False  # its own steps compute the nodes of a tree, level by level
    reads_along: bool = False  # it has a cache, which it fills with hidden states while the target computes them
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


CHAINED = "quire.runtime.spec.chained_head"
ONE_RANK = {"draft_tensor_parallel_size": MethodKey(1, 1, 1)}
TREE_NODES = {"tree_nodes": MethodKey(0, 2, MAX_TREE_NODES)}
TREE = TREE_NODES | {"tree_top_k": MethodKey(4, 2, MAX_TREE_NODES)}
EAGLE = Method(
    CHAINED,
    "ChainedHead",
    num_tokens=3,
    has_model=True,
    has_head=True,
    acceptance=0.6,
    cost=0.1,
    computes_nodes=True,
    reads_along=True,
    keys=ONE_RANK | TREE,
)
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
            **TREE_NODES,
        },
    ),
    "draft_model": Method(
        "quire.runtime.spec.draft_model",
        "DraftModel",
        num_tokens=3,
        has_model=True,
        acceptance=0.7,
        cost=0.3,
        keys=ONE_RANK | {"max_model_len": MethodKey(0, 16)},
    ),
    "eagle": EAGLE,
    "eagle3": EAGLE,
    "medusa": Method(
        "quire.runtime.spec.medusa", "Medusa", 3, has_model=True, has_head=True, cost=0.05, keys=ONE_RANK | TREE
    ),
    "mtp": Method(CHAINED, "ChainedHead", 1, has_head=True, acceptance=0.7, cost=0.1, reads_along=True, keys=ONE_RANK),
}

# Names that other engines give a method, in small letters.
SYNONYMS = {
    "ngram_gpu": "ngram",  # vLLM
    "standalone": "draft_model",  # SGLang
    "nextn": "mtp",
    "draft-simple": "draft_model",  # llama.cpp
    "draft-eagle3": "eagle3",
    "draft-mtp": "mtp",
    "ngram-simple": "ngram",
    "ngram-map-k": "ngram",
    "ngram-map-k4v": "suffix",
    "ngram-mod": "suffix",
    "ngram-cache": "suffix",
}


def method_called(name: str) -> str:
    """Its name here."""
    small = name.strip().lower()
    if small.endswith("_mtp"):  # vLLM's names of it, by the model: deepseek_mtp
        return "mtp"
    return small if small in METHODS else SYNONYMS.get(small, name.strip())


def method_of(model: str) -> str:
    """What drafts with it, where only `model` is given: heads are told by their names, as vLLM tells them."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    if name in ("ngram", "[ngram]"):
        return "ngram"
    return next((method for method in ("eagle3", "eagle", "medusa") if method in name), "draft_model")
