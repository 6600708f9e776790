"""What sentence-transformers writes beside a model, and GGUF files have as a key: how hidden states of tokens become
one embedding.

modules.json lists modules, each with a folder of its own config.json: Transformer, Pooling, Dense, Normalize; of a
decoder that scores by the logits of tokens, LogitScore."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.core.errors import BadCheckpoint, Unsupported
from quire.weights.config import CheckpointConfig
from quire.weights.gguf.container import GGUFFile
from quire.weights.huggingface import read_json

POOLINGS = {  # name in sentence-transformers, old or new -> ours
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
}
GGUF_RANKS = 4  # scores of pairs
GGUF_POOLINGS = {0: None, 1: "mean", 2: "cls", 3: "last", GGUF_RANKS: None}  # 0: not given
ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh"}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer after pooling: `linear.weight` and `linear.bias` in `folder`."""

    folder: Path
    num_inputs: int
    num_outputs: int
    bias: bool
    activation: str  # identity or tanh


@dataclass(frozen=True, slots=True)
class SentenceModules:
    pooling: str | None = None  # cls, mean or last; None: not given
    steps: tuple[DenseLayer | None, ...] = ()  # after pooling, in order: a linear layer, or None: normalize to length 1
    max_tokens: int | None = None  # of a text, special tokens included
    lower: bool = False  # texts are converted to lower case
    prompts: Mapping[str, str] = field(default_factory=dict)  # name -> prefix of texts
    default_prompt: str | None = None  # name of the prompt that is used by default
    score_tokens: tuple[int, int | None] | None = None  # of a score: the token whose logit it is, less that of another
    asks: bool = False  # a score is what the model makes of a question about the two texts
    score_activation: str | None = None  # what a score goes through, as torch names it; None: not given


def read_sentence_modules(path: Path) -> SentenceModules:
    """How a checkpoint says that texts are embedded; defaults where it says nothing."""
    return _of_directory(path) if path.is_dir() else _of_gguf(path)


def _of_gguf(path: Path) -> SentenceModules:
    """The metadata has the pooling. Embeddings have length 1, as llama.cpp gives them."""
    metadata = CheckpointConfig(path, GGUFFile(path).metadata)
    architecture = metadata.str("general.architecture")
    key = f"{architecture}.pooling_type"
    if key not in metadata:
        return SentenceModules(steps=(None,))
    pooling = metadata.expect(key, *GGUF_POOLINGS)
    asks = pooling == GGUF_RANKS and architecture == "qwen3"  # Qwen3-Reranker
    return SentenceModules(pooling=GGUF_POOLINGS[pooling], steps=(None,), asks=asks)


def _of_directory(directory: Path) -> SentenceModules:
    texts = _text_settings(directory)
    prompts = CheckpointConfig(
        directory / "config_sentence_transformers.json", read_json(directory / "config_sentence_transformers.json")
    )
    pooling, steps, score_tokens = _modules(directory)
    return SentenceModules(
        pooling=pooling,
        steps=steps,
        max_tokens=texts.int("max_seq_length") if "max_seq_length" in texts else None,
        lower=texts.bool("do_lower_case", False),
        prompts={name: text for name, text in prompts.dict("prompts", {}).items() if isinstance(text, str)},
        default_prompt=prompts.get("default_prompt_name"),
        score_tokens=score_tokens,
        asks=score_tokens is not None,
        score_activation=prompts.get("activation_fn"),
    )


def _text_settings(directory: Path) -> CheckpointConfig:
    """sentence_bert_config.json, or the same with another family in its name."""
    files = sorted(directory.glob("sentence_*_config.json"))
    return CheckpointConfig(files[0], read_json(files[0])) if files else CheckpointConfig(directory, {})


def _modules(
    directory: Path,
) -> tuple[str | None, tuple[DenseLayer | None, ...], tuple[int, int | None] | None]:
    """-> pooling, steps and score tokens."""
    path = directory / "modules.json"
    if not path.exists():
        return None, (), None
    try:
        listed = json.loads(path.read_bytes())
        modules = [(str(entry["type"]).rpartition(".")[2], directory / str(entry["path"])) for entry in listed]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is not a list of modules, each with a type and a path") from error
    pooling: str | None = None
    steps: list[DenseLayer | None] = []
    score_tokens: tuple[int, int | None] | None = None
    for kind, folder in modules:
        config = CheckpointConfig(folder / "config.json", read_json(folder / "config.json"))
        match kind:
            case "Transformer":
                continue
            case "Pooling":
                pooling = _pooling(config)
            case "Dense":
                steps.append(_dense(config, folder))
            case "Normalize":
                steps.append(None)
            case "LogitScore":
                no = config.int("false_token_id") if "false_token_id" in config else None
                score_tokens = config.int("true_token_id"), no
            case _:
                supported = "Transformer, Pooling, Dense, Normalize, LogitScore"
                raise Unsupported(f"{path} has a module {kind}", f"supported: {supported}")
    return pooling, tuple(steps), score_tokens


def _pooling(config: CheckpointConfig) -> str:
    config.expect("include_prompt", True, None)
    if "pooling_mode" in config:
        return POOLINGS[config.expect("pooling_mode", *POOLINGS)]
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    given = [mode for mode in modes if config.bool(f"pooling_mode_{mode}", False)]
    if len(given) != 1 or given[0] not in POOLINGS:
        raise Unsupported(
            f"{config.source} pools by {' and '.join(given) or 'nothing'}",
            "one of cls_token, mean_tokens and lasttoken is supported; say pooling= to choose another",
        )
    return POOLINGS[given[0]]


def _dense(config: CheckpointConfig, folder: Path) -> DenseLayer:
    function: Any = config.str("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if function not in ACTIVATIONS:
        raise Unsupported(f"{config.source}: activation_function is {function}", "supported: Identity, Tanh")
    return DenseLayer(
        folder=folder,
        num_inputs=config.int("in_features"),
        num_outputs=config.int("out_features"),
        bias=config.bool("bias", True),
        activation=ACTIVATIONS[function],
    )
