"""Architectures that are known and not supported: what of each is missing here.

An architecture that has a model file is never looked up here."""

from collections.abc import Mapping

RECURRENT = "recurrent layers of its own kind"

# Hugging Face's name -> what is missing.
MISSING: Mapping[str, str] = {
    "ArcticLSTMSpeculatorPreTrainedModel": "drafting for another model",
    "BailingHybridForCausalLM": "linear attention",
    "BailingMoeV2_5ForCausalLM": "linear attention",
    "BltForCausalLM": "patches of bytes instead of tokens",
    "DeepseekV4ForCausalLM": "compressed sparse attention and several residual streams",
    "Fairseq2LlamaForCausalLM": "tensors as fairseq2 stores them",
    "Grok1ForCausalLM": "norms of its own around experts",
    "Grok1ModelForCausalLM": "norms of its own around experts",
    "HCXVisionForCausalLM": "its own names of tensors",
    "HYV4ForCausalLM": "sparse attention",
    "IQuestLoopCoderForCausalLM": "layers that run twice",
    "InternLM2VEForCausalLM": "experts for tokens of images",
    "Kolibri1ForCausalLM": "experts chosen by corrected logits",
    "LagunaForCausalLM": "a softplus gate of attention",
    "MistralLarge3ForCausalLM": "tensors as Mistral stores them; Hugging Face's layout is another architecture",
    "NemotronHPuzzleForCausalLM": RECURRENT,
    "OuroForCausalLM": "layers that run several times",
    "PanguProMoEV2ForCausalLM": "norms of its own around experts",
    "PanguUltraMoEForCausalLM": "norms of its own around MLA",
    "Phi4FlashForCausalLM": RECURRENT,
    "Plamo2ForCausalLM": RECURRENT,
    "RecurrentGemmaForCausalLM": RECURRENT,
    "RwkvForCausalLM": RECURRENT,
    "SolarForCausalLM": "connections that skip blocks of layers",
    "Step3TextForCausalLM": "factored queries",
    "ZayaForCausalLM": "convolutions in attention",
    "xLSTMForCausalLM": RECURRENT,
}
