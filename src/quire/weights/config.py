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

MAX_WHOLE: Final = 1 << 53  # the greatest integer up to which a float holds all exactly

# The largest sizes that are possible, well above those of any model, by the last word of a key: memory is allocated for
# these counts, and loops run over them, before tensors are compared with them.
_LAYERS, _HEADS, _EXPERTS, _WIDTH, _TOKENS = 1 << 13, 1 << 14, 1 << 14, 1 << 22, 1 << 28
MAX_SIZES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "block_count"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_nextn_predict_layers"), _LAYERS),
    **dict.fromkeys(("first_k_dense_replace", "leading_dense_block_count"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "head_count", "num_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv", "head_count_kv"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), _HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), _WIDTH),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _EXPERTS),
    **dict.fromkeys(("expert_count", "expert_used_count", "num_experts_per_tok", "moe_k"), _EXPERTS),
    **dict.fromkeys(("n_shared_experts", "expert_shared_count", "moe_num_shared_experts", "n_group"), _EXPERTS),
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "d_model", "dim", "embedding_length"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "ffn_hidden_size"), _WIDTH),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "feed_forward_length"), _WIDTH),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "shared_expert_intermediate_size"), _WIDTH),
    **dict.fromkeys(("head_dim", "d_kv", "key_length", "value_length", "dimension_count", "rotary_dim"), _WIDTH),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _WIDTH),
    **dict.fromkeys(("type_vocab_size", "relative_attention_num_buckets"), _WIDTH),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "max_seq_len"), _TOKENS),
    **dict.fromkeys(("seq_length", "context_length", "model_max_length", "max_trained_positions"), _TOKENS),
    **dict.fromkeys(("relative_attention_max_distance", "sliding_window", "local_attention"), _TOKENS),
}

# Names that published checkpoints give an architecture -> the one it is the same as.
ALIASES: Final[Mapping[str, str]] = {
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "AquilaModel": "LlamaForCausalLM",
    "AquilaForCausalLM": "LlamaForCausalLM",
    "XverseForCausalLM": "LlamaForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "TeleChat3ForCausalLM": "LlamaForCausalLM",
    "Emu3ForCausalLM": "LlamaForCausalLM",
    "GritLM": "MistralForCausalLM",
    "HCXVisionV2ForCausalLM": "HyperCLOVAXVisionV2ForConditionalGeneration",
    "MiniMaxM3SparseForCausalLM": "MiniMaxM3VLForCausalLM",
    "Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "BailingMoeV3ForCausalLM": "BailingHybridForCausalLM",
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
    "Gemma3TextModel": "Gemma3Model",
    "Gemma4UnifiedForCausalLM": "Gemma4ForCausalLM",
    "Gemma3TextForSequenceClassification": "Gemma3ForSequenceClassification",
    "RWForCausalLM": "FalconForCausalLM",
    "TelechatForCausalLM": "TeleChatForCausalLM",
    "Rwkv7ForCausalLM": "RWKV7ForCausalLM",
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

    def int(
        self, key: builtins.str, default: builtins.int | Required = REQUIRED, minimum: builtins.int | None = None
    ) -> builtins.int:
        value = self._typed(key, builtins.int, default)
        if minimum is not None and value < minimum:
            raise self._bad(key, f"is {value}, and at least {minimum} is possible")
        bound = MAX_SIZES.get(key.rpartition(".")[2])
        if bound is not None and value > bound:
            raise self._bad(key, f"is {value}, and at most {bound} is possible")
        return value

    def float(self, key: builtins.str, default: builtins.float | Required = REQUIRED) -> builtins.float:
        """Whole numbers count: config.json writes 10000 as well as 10000.0."""
        value = self._values.get(key)
        if type(value) is builtins.int:
            if abs(value) > MAX_WHOLE:
                raise self._bad(key, f"is {_short(value)}, too large for a number")
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
    def values(self) -> Mapping[builtins.str, Any]:
        """All keys, for those who write them again."""
        return self._values

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
