"""The language model of a checkpoint that also takes images or audio: served for text, as the decoder that it is.

Requests with images are refused by the server. Tensors of the other parts are not read."""

from collections.abc import Mapping

from quire.core.errors import Unsupported
from quire.models import registry
from quire.models.config import ModelConfig
from quire.models.loading import LoadedModel
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

# `model_type` of the language model (or of the whole, where config.json is flat) -> the decoder that it is.
DECODERS: Mapping[str, str] = {
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
}
DEFAULTS: Mapping[str, str] = {  # where the language model has no `model_type`
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Mistral3ForConditionalGeneration": "mistral",
}
SECTIONS = ("text_config", "llm_config", "language_config")

# Prefixes of the tensor names of a language model -> the model file's.
PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
# Of checkpoints that call their language model `model`, too: prefixes of the other parts.
OTHERS = (
    "visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "vit_large_projector.", "audio_tower.",
    "mlp1.",
)  # fmt: skip


def config(hf: CheckpointConfig) -> ModelConfig:
    text = text_config(hf)
    return registry.family(text.architecture).config(text)


def text_config(hf: CheckpointConfig) -> CheckpointConfig:
    """The configuration of the language model, under the name of the decoder that it is."""
    section = next((name for name in SECTIONS if name in hf), None)
    text = hf if section is None else hf.section(section)
    kind = text.get("model_type", DEFAULTS.get(hf.architecture))
    if kind not in DECODERS:
        raise Unsupported(
            f"the language model of `{hf.architecture}` is of the type {kind!r}",
            f"supported are {', '.join(sorted(DECODERS))}",
        )
    values = {"architectures": [DECODERS[kind]]}
    if "tie_word_embeddings" in hf:
        values["tie_word_embeddings"] = hf.get("tie_word_embeddings")
    return _without_mrope(text.with_values(values))


def _without_mrope(text: CheckpointConfig) -> CheckpointConfig:
    """The sections of a rope over time, height and width see the same position in a text."""
    scaling = text.dict("rope_scaling", default={})
    if scaling.get("rope_type", scaling.get("type")) not in ("mrope", "default"):
        return text
    return text.with_values({"rope_scaling": None})


def load(ops: OpSet, checkpoint: Checkpoint, config: ModelConfig, max_model_len: int) -> LoadedModel:
    return registry.family(config.architecture).load(ops, text_tensors(checkpoint), config, max_model_len)


def text_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """The tensors of the language model."""
    names = {
        new + name.removeprefix(prefix): name
        for name in checkpoint.names()
        for prefix, new in PREFIXES.items()
        if name.startswith(prefix)
    }
    if not any(name.startswith("model.") for name in names):
        names = {name: name for name in checkpoint.names() if not name.startswith(OTHERS)}
    return RenamedCheckpoint(checkpoint, names)
