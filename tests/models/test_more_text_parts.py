"""Language models of further checkpoints that also take images or audio, against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import (
    AriaConfig,
    AudioFlamingo3Config,
    DeepseekOcr2Config,
    DeepseekVLConfig,
    Emu3Config,
    Exaone4_5_Config,
    FuyuConfig,
    Gemma4UnifiedConfig,
    Glm4vConfig,
    Glm4vMoeConfig,
    Glm46VConfig,
    GlmOcrConfig,
    GotOcr2Config,
    HunYuanVLConfig,
    HyperCLOVAXVisionV2Config,
    Idefics2Config,
    LightOnOcrConfig,
    LlavaNextVideoConfig,
    MllamaConfig,
    MllamaForConditionalGeneration,
    Ovis2Config,
    PaddleOCRVLConfig,
    Phi4MultimodalConfig,
    Qwen2AudioConfig,
    Qwen3ASRConfig,
    VideoLlavaConfig,
    VipLlavaConfig,
    VoxtralConfig,
)
from transformers.models.gemma4_unified import Gemma4UnifiedTextConfig
from transformers.models.qwen2_5_omni import Qwen2_5OmniThinkerConfig
from transformers.models.qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

from models.checking import (
    TINY,
    Cases,
    Theirs,
    ask_transformers,
    check_against_transformers,
    checkpoints_of,
    randomized,
    rewritten,
)
from models.test_newer_families import FACTORS, HALF_WINDOWS
from models.test_text_parts import EXPERTS, GEMMA_4, MROPE, QWEN_VISION, SIGLIP, TEXT, UNTIED, VISION

LLAMA, QWEN2 = TINY | {"model_type": "llama"}, TINY | {"model_type": "qwen2"}
QWEN3 = TINY | {"model_type": "qwen3", "head_dim": 24}
LLAVA = {"text_config": LLAMA, "vision_config": SIGLIP} | UNTIED
GLM = TINY | {"rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 2, 4]}}
SAM = VISION | {"image_size": 32, "patch_size": 8, "mlp_dim": 16, "output_channels": 8, "global_attn_indexes": [0]}
AUDIO = VISION | {"num_mel_bins": 8, "max_source_positions": 16}
OLDER_AUDIO = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "num_mel_bins": 8,
    "max_source_positions": 16,
}  # fmt: skip
OMNI_AUDIO = OLDER_AUDIO | {"output_dim": 128, "downsample_hidden_size": 8}
TOKENS = {"vision_start_token_id": 90, "vision_end_token_id": 91}
RESAMPLER = {
    "resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8,
    "num_key_value_heads": 1, "hidden_size": 128,
}  # fmt: skip
VQ = {
    "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "embed_dim": 8, "latent_channels": 8,
    "codebook_size": 16, "hidden_size": 32, "num_attention_heads": 1,
}  # fmt: skip
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 96}  # which no vocabulary has
MLLAMA_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2,
    "image_size": 16, "patch_size": 8, "vision_output_dim": 32, "intermediate_layers_indices": [0],
}  # fmt: skip
MLLAMA = {
    "text_config": TINY | {"num_hidden_layers": 4, "cross_attention_layers": [1, 2]} | IDS,
    "vision_config": MLLAMA_VISION,
}
PHI_VISION = SIGLIP | {"num_hidden_layers": 2, "feature_layer": -1}
PHI_AUDIO = {
    "hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2, "input_size": 8,
    "nemo_conv_channels": 8, "ext_pw_out_channel": 16,
}  # fmt: skip
DEEPSEEK = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
CASES: Cases = {
    "idefics2": (
        Idefics2Config,
        {"text_config": TINY | {"model_type": "mistral", "sliding_window": 5}, "vision_config": SIGLIP,
         "perceiver_config": RESAMPLER} | UNTIED,
    ),
    "llava-next-video": (LlavaNextVideoConfig, LLAVA),
    "video-llava": (VideoLlavaConfig, LLAVA),
    "vip-llava": (VipLlavaConfig, LLAVA),
    "deepseek-vl": (DeepseekVLConfig, LLAVA),
    "llama-3.2-vision": (MllamaConfig, MLLAMA),  # of which transformers makes the language model alone
    "phi-4-multimodal": (Phi4MultimodalConfig, TINY | {"vision_config": PHI_VISION, "audio_config": PHI_AUDIO} | IDS),
    "gemma-4-unified-text": (
        Gemma4UnifiedTextConfig,
        {key: value for key, value in GEMMA_4.items() if "per_layer" not in key},
    ),
    "aria": (
        AriaConfig,
        {"text_config": TINY | {"moe_num_experts": 6, "moe_topk": 3, "pad_token_id": 0},
         "vision_config": SIGLIP | {"model_type": "idefics3_vision"}} | UNTIED,
    ),
    "ovis2": (
        Ovis2Config,
        {"text_config": QWEN2, "vision_config": SIGLIP | {"vocab_size": 32}, "hidden_size": 128, "vocab_size": 96},
    ),
    "got-ocr2": (GotOcr2Config, {"text_config": QWEN2, "vision_config": SAM}),
    "paddleocr": (
        PaddleOCRVLConfig,
        {"text_config": TINY | {"head_dim": 32, "rope_parameters": MROPE}, "vision_config": SIGLIP},
    ),
    "glm-ocr": (GlmOcrConfig, {"text_config": TEXT | {"head_dim": 32}, "vision_config": QWEN_VISION} | UNTIED),
    "glm4v": (Glm4vConfig, {"text_config": GLM, "vision_config": QWEN_VISION} | UNTIED),
    "glm-4.6v": (
        Glm46VConfig,
        {"text_config": GLM | {"model_type": "glm4v_text"},
         "vision_config": QWEN_VISION | {"model_type": "glm4v_vision"}} | UNTIED,
    ),
    "glm4v-moe": (
        Glm4vMoeConfig,
        {"text_config": GLM | {"head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2,
                               "moe_intermediate_size": 48, "topk_group": 1, "first_k_dense_replace": 1},
         "vision_config": QWEN_VISION} | UNTIED,
    ),
    "hunyuan-vl": (
        HunYuanVLConfig,
        {"text_config": TINY | {"head_dim": 32, "rope_parameters": MROPE | {"mrope_section": [4, 4, 4, 4]}},
         "vision_config": SIGLIP | {"out_hidden_size": 128}},
    ),
    "hyperclova-vision": (
        HyperCLOVAXVisionV2Config,
        {"text_config": TINY | FACTORS | {"model_type": "hyperclovax"},
         "vision_config": QWEN_VISION | {"model_type": "qwen2_5_vl_vision"}} | UNTIED,
    ),
    "exaone-4.5": (
        Exaone4_5_Config,
        {"text_config": TINY | HALF_WINDOWS | {"model_type": "exaone4"}, "vision_config": QWEN_VISION} | UNTIED,
    ),
    "gemma-4-unified": (
        Gemma4UnifiedConfig,
        {"text_config": {key: value for key, value in GEMMA_4.items() if "per_layer" not in key},
         "vision_config": None, "audio_config": None},
    ),
    "fuyu": (
        FuyuConfig,
        {"text_config": TINY | {"model_type": "persimmon", "num_key_value_heads": 4, "hidden_act": "relu2"},
         "vocab_size": 96, "hidden_size": 128, "patch_size": 4} | UNTIED,
    ),
    "emu3": (
        Emu3Config,
        {"text_config": TINY | IDS, "vq_config": VQ,
         "vocabulary_map": {"<image>": 1, "<|extra_200|>": 2}} | UNTIED,
    ),
    "deepseek-ocr2": (
        DeepseekOcr2Config,
        {"text_config": TINY | DEEPSEEK,
         "vision_config": {"sam_config": SAM | {"downsample_channels": [8, 8]},
                           "encoder_config": VISION | {"num_key_value_heads": 2}}} | UNTIED,
    ),
    "qwen2-audio": (Qwen2AudioConfig, {"text_config": QWEN2, "audio_config": OLDER_AUDIO}),
    "qwen2.5-omni": (
        Qwen2_5OmniThinkerConfig,
        {"text_config": TEXT, "vision_config": QWEN_VISION, "audio_config": OMNI_AUDIO} | TOKENS | UNTIED,
    ),
    "qwen3-omni": (
        Qwen3OmniMoeThinkerConfig,
        {"text_config": TEXT | EXPERTS | {"head_dim": 32, "norm_topk_prob": True}, "audio_config": OMNI_AUDIO,
         "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]}} | TOKENS | UNTIED,
    ),
    "qwen3-asr": (Qwen3ASRConfig, {"text_config": QWEN3, "audio_config": OMNI_AUDIO}),
    "lighton-ocr": (
        LightOnOcrConfig,
        {"text_config": QWEN3, "vision_config": SIGLIP | {"model_type": "pixtral", "head_dim": 8}},
    ),
    "voxtral": (VoxtralConfig, {"text_config": LLAMA, "audio_config": AUDIO}),
    "audio-flamingo-3": (AudioFlamingo3Config, {"text_config": QWEN2, "audio_config": AUDIO}),
}  # fmt: skip
checkpoints = checkpoints_of(CASES, tiny={})


@pytest.mark.verifies("safetensors", backend="torch")
@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(checkpoints: Callable[[str], Theirs], name: Any) -> None:
    check_against_transformers("torch", checkpoints(name))


@pytest.mark.verifies("safetensors", backend="torch", architecture="MllamaForConditionalGeneration")
def test_layers_that_attend_to_images_are_left_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = randomized(MllamaForConditionalGeneration(MllamaConfig(**MLLAMA)).eval())
    check_against_transformers("torch", ask_transformers(model, tmp_path))


@pytest.mark.verifies("safetensors", backend="torch", architecture="Phi4MMForCausalLM")
def test_adapters_for_images_and_audio_are_not_read(checkpoints: Callable[[str], Theirs], tmp_path: Path) -> None:
    theirs = checkpoints("phi-4-multimodal")
    tensors = {}
    for name, data in load_file(theirs.path / "model.safetensors").items():
        layer, _, weight = name.rpartition("_proj.weight")
        if not name.startswith("model.layers.") or weight or not layer:
            tensors[name] = data
            continue
        tensors[f"{layer}_proj.base_layer.weight"] = data
        tensors |= {f"{layer}_proj.lora_{part}.speech.weight": np.ones((2, 2), np.float32) for part in "AB"}
    values = {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"}
    check_against_transformers("torch", rewritten(theirs, tmp_path, values, tensors, ()))
