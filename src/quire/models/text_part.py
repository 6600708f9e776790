"""The language model of a checkpoint that also takes images or audio: served for text, as the decoder that it is.

Requests with images are refused by the server. Tensors of the other parts are not read."""

from collections.abc import Mapping
from typing import Any

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
    "aria_text": "AriaTextForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_ocr2_text": "DeepseekForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "emu3_text_model": "LlamaForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "glm_ocr_text": "Glm4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite4_vision_text": "GraniteForCausalLM",
    "granite_docling_text": "GraniteForCausalLM",
    "hunyuan_vl_text": "HunYuanDenseV1ForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "paddleocr_vl_text": "LlamaForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phi4_multimodal": "Phi3ForCausalLM",
    "phi4mm": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_omni_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
}
DEFAULTS: Mapping[str, str] = {  # where the language model has no `model_type`
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Mistral3ForConditionalGeneration": "mistral",
}
# `model_type` -> what holds for its language model where config.json does not say it.
VALUES: Mapping[str, Mapping[str, Any]] = {
    "glm4v_text": {"qkv_bias": True, "partial_rotary_factor": 1.0},
    "glm_ocr_text": {"partial_rotary_factor": 1.0},
}
SECTIONS = ("thinker_config", "text_config", "llm_config", "language_config")

# Prefixes of the tensor names of a language model -> the model file's. The first that fits counts.
PREFIXES = {
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
    "model.language_model.model.": "model.",
    "model.language_model.lm_head.": "lm_head.",
    "language_model.model.model.": "model.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
# Of checkpoints that call their language model `model`, too: prefixes of the other parts.
OTHERS = (
    "visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "vit_large_projector.", "audio_tower.",
    "mlp1.", "mlp_AR.", "vit.", "audio_projector.", "model.projector.", "model.qwen2_model.", "model.sam_model.",
    "model.vision_model.", "model.view_seperator", "model.image_newline", "model.embed_tokens_extend.",
)  # fmt: skip


def config(hf: CheckpointConfig) -> ModelConfig:
    text = text_config(hf)
    return registry.family(text.architecture).config(text)


def text_config(hf: CheckpointConfig) -> CheckpointConfig:
    """The configuration of the language model, under the name of the decoder that it is."""
    text = hf
    while section := next((name for name in SECTIONS if name in text), None):
        text = text.section(section)
    kind = text.get("model_type", DEFAULTS.get(hf.architecture))
    if kind not in DECODERS:
        raise Unsupported(
            f"the language model of `{hf.architecture}` is of the type {kind!r}",
            f"supported are {', '.join(sorted(DECODERS))}",
        )
    values: dict[str, Any] = {"architectures": [DECODERS[kind]]}
    values |= {key: value for key, value in VALUES.get(kind, {}).items() if key not in text}
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
    """The tensors of the language model. (Without names it is a DummyCheckpoint, which has every tensor.)"""
    if not checkpoint.names():
        return checkpoint
    names = {}
    for name in checkpoint.names():
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is not None:
            names[PREFIXES[prefix] + name.removeprefix(prefix)] = name
    if not any(name.startswith("model.") for name in names):
        names = {name: name for name in checkpoint.names() if not name.startswith(OTHERS)}
    # Linear layers with adapters for images and audio (Phi-4): without them, they are those of the language model.
    names = {new.replace(".base_layer.", "."): name for new, name in names.items() if ".lora_" not in name}
    return RenamedCheckpoint(checkpoint, names)
