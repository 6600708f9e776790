"""Architecture -> model file. Entries are module names, so that a file is imported only when it is needed.

The families of llama.py and moe.py are rows of llama_families.py and moe_families.py."""

import re
from importlib import import_module
from typing import Literal, Protocol, cast

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.config import ModelConfig
from quire.models.loading import LoadedModel
from quire.models.missing import MISSING
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "quire.models.llama",
    "MistralForCausalLM": "quire.models.llama",
    "Qwen2ForCausalLM": "quire.models.llama",
    "MiMoForCausalLM": "quire.models.llama",
    "Qwen3ForCausalLM": "quire.models.llama",
    "SmolLM3ForCausalLM": "quire.models.llama",
    "Ernie4_5ForCausalLM": "quire.models.llama",
    "SeedOssForCausalLM": "quire.models.llama",
    "Ministral3ForCausalLM": "quire.models.llama",
    "MinistralForCausalLM": "quire.models.llama",
    "HunYuanDenseV1ForCausalLM": "quire.models.llama",
    "HeliumForCausalLM": "quire.models.llama",
    "CwmForCausalLM": "quire.models.llama",
    "ArceeForCausalLM": "quire.models.llama",
    "ExaoneForCausalLM": "quire.models.llama",
    "NanbeigeForCausalLM": "quire.models.llama",
    "OuroForCausalLM": "quire.models.llama",
    "Phi3ForCausalLM": "quire.models.llama",
    "GraniteForCausalLM": "quire.models.llama",
    "GraniteSWAForCausalLM": "quire.models.llama",
    "HyperCLOVAXForCausalLM": "quire.models.llama",
    "TeleFLMForCausalLM": "quire.models.llama",
    "PanguEmbeddedForCausalLM": "quire.models.llama",
    "MiniCPMForCausalLM": "quire.models.llama",
    "Olmo2ForCausalLM": "quire.models.llama",
    "Olmo3ForCausalLM": "quire.models.llama",
    "Exaone4ForCausalLM": "quire.models.llama",
    "InternLM2ForCausalLM": "quire.models.llama",
    "InternLM3ForCausalLM": "quire.models.llama",
    "GlmForCausalLM": "quire.models.llama",
    "Glm4ForCausalLM": "quire.models.llama",
    "GemmaForCausalLM": "quire.models.llama",
    "Gemma2ForCausalLM": "quire.models.llama",
    "VaultGemmaForCausalLM": "quire.models.llama",
    "Gemma3ForCausalLM": "quire.models.llama",
    "QWenLMHeadModel": "quire.models.llama",
    "ChatGLMModel": "quire.models.llama",
    "ChatGLMForConditionalGeneration": "quire.models.llama",
    "InternLMForCausalLM": "quire.models.llama",
    "OrionForCausalLM": "quire.models.llama",
    "BitNetForCausalLM": "quire.models.llama",
    "TeleChatForCausalLM": "quire.models.llama",
    "TeleChat2ForCausalLM": "quire.models.llama",
    "GPTRefactForCausalLM": "quire.models.llama",
    "CodeShellForCausalLM": "quire.models.llama",
    "Plamo3ForCausalLM": "quire.models.llama",
    "MaincoderForCausalLM": "quire.models.llama",
    "MllamaForCausalLM": "quire.models.mllama",
    "ApertusForCausalLM": "quire.models.apertus",
    "NanoChatForCausalLM": "quire.models.nanochat",
    "DiffLlamaForCausalLM": "quire.models.diffllama",
    "DogeForCausalLM": "quire.models.doge",
    "ModernBertDecoderForCausalLM": "quire.models.modernbert_decoder",
    "BaichuanForCausalLM": "quire.models.baichuan",
    "BaiChuanForCausalLM": "quire.models.baichuan",  # as 7B spells it
    "DeepseekV2ForCausalLM": "quire.models.deepseek",
    "DeepseekV3ForCausalLM": "quire.models.deepseek",
    "DeepseekV32ForCausalLM": "quire.models.deepseek",
    "GlmMoeDsaForCausalLM": "quire.models.deepseek",
    "AXK1ForCausalLM": "quire.models.deepseek",
    "Mistral4ForCausalLM": "quire.models.deepseek",
    "Glm4MoeLiteForCausalLM": "quire.models.deepseek",
    "SarvamMLAForCausalLM": "quire.models.deepseek",
    "YoutuForCausalLM": "quire.models.deepseek",
    "MiniCPM3ForCausalLM": "quire.models.deepseek",
    "DeepseekV4ForCausalLM": "quire.models.deepseek_v4",
    "LongcatFlashForCausalLM": "quire.models.longcat",
    "Step3p5ForCausalLM": "quire.models.step3p5",
    "LagunaForCausalLM": "quire.models.laguna",
    "MixtralForCausalLM": "quire.models.moe",
    "Qwen2MoeForCausalLM": "quire.models.moe",
    "Qwen3MoeForCausalLM": "quire.models.moe",
    "Glm4MoeForCausalLM": "quire.models.moe",
    "OlmoeForCausalLM": "quire.models.moe",
    "MiniMaxM2ForCausalLM": "quire.models.moe",
    "DeepseekForCausalLM": "quire.models.moe",
    "PhimoeForCausalLM": "quire.models.moe",
    "PhiMoEForCausalLM": "quire.models.moe",  # as its authors spell it
    "Dots1ForCausalLM": "quire.models.moe",
    "SolarOpenForCausalLM": "quire.models.moe",
    "Ernie4_5_MoeForCausalLM": "quire.models.moe",
    "GraniteMoeForCausalLM": "quire.models.moe",
    "GraniteMoeSharedForCausalLM": "quire.models.moe",
    "GraniteMoeSWAForCausalLM": "quire.models.moe",
    "FlexOlmoForCausalLM": "quire.models.moe",
    "HunYuanMoEV1ForCausalLM": "quire.models.moe",
    "HYV3ForCausalLM": "quire.models.moe",
    "ExaoneMoeForCausalLM": "quire.models.moe",
    "AfmoeForCausalLM": "quire.models.moe",
    "FlintForCausalLM": "quire.models.moe",
    "MellumForCausalLM": "quire.models.moe",
    "AriaTextForCausalLM": "quire.models.moe",
    "BailingMoeForCausalLM": "quire.models.moe",
    "BailingMoeV2ForCausalLM": "quire.models.moe",
    "SarvamMoEForCausalLM": "quire.models.moe",
    "Param2MoEForCausalLM": "quire.models.moe",
    "MiniMaxM3VLForCausalLM": "quire.models.moe",
    "JetMoeForCausalLM": "quire.models.jetmoe",
    "SmallThinkerForCausalLM": "quire.models.smallthinker",
    "Llama4ForCausalLM": "quire.models.llama4",
    "MiMoV2FlashForCausalLM": "quire.models.mimo_v2",
    "MiMoV2ForCausalLM": "quire.models.mimo_v2",
    "DeciLMForCausalLM": "quire.models.decilm",
    "Gemma3nForCausalLM": "quire.models.gemma3n",
    "Gemma4ForCausalLM": "quire.models.gemma4",
    "GptOssForCausalLM": "quire.models.gpt_oss",
    "DbrxForCausalLM": "quire.models.dbrx",
    "ArcticForCausalLM": "quire.models.arctic",
    "CohereForCausalLM": "quire.models.cohere",
    "Cohere2ForCausalLM": "quire.models.cohere",
    "Cohere2MoeForCausalLM": "quire.models.cohere2_moe",
    "GPT2LMHeadModel": "quire.models.gpt2",
    "GPTBigCodeForCausalLM": "quire.models.gpt2",
    "JAISLMHeadModel": "quire.models.gpt2",
    "GPTJForCausalLM": "quire.models.gptj",
    "CodeGenForCausalLM": "quire.models.gptj",
    "GPTNeoForCausalLM": "quire.models.gpt_neo",
    "OpenAIGPTLMHeadModel": "quire.models.openai_gpt",
    "GPTNeoXForCausalLM": "quire.models.gpt_neox",
    "OPTForCausalLM": "quire.models.opt",
    "XGLMForCausalLM": "quire.models.xglm",
    "BioGptForCausalLM": "quire.models.xglm",
    "MptForCausalLM": "quire.models.mpt",
    "MPTForCausalLM": "quire.models.mpt",  # as its authors spell it
    "BloomForCausalLM": "quire.models.bloom",
    "FalconForCausalLM": "quire.models.falcon",
    "Starcoder2ForCausalLM": "quire.models.starcoder2",
    "NemotronForCausalLM": "quire.models.nemotron",
    "Jais2ForCausalLM": "quire.models.nemotron",
    "PersimmonForCausalLM": "quire.models.persimmon",
    "PhiForCausalLM": "quire.models.phi",
    "Lfm2ForCausalLM": "quire.models.lfm2",
    "Lfm2MoeForCausalLM": "quire.models.lfm2_moe",
    "Lfm3ForCausalLM": "quire.models.lfm3",
    "Qwen3NextForCausalLM": "quire.models.qwen3_next",
    "Qwen3_5ForCausalLM": "quire.models.qwen3_5",
    "Qwen3_5MoeForCausalLM": "quire.models.qwen3_5",
    "KimiLinearForCausalLM": "quire.models.kimi_linear",
    "BailingHybridForCausalLM": "quire.models.bailing_hybrid",
    "OlmoHybridForCausalLM": "quire.models.olmo_hybrid",
    "MiniMaxForCausalLM": "quire.models.minimax",
    "MiniMaxText01ForCausalLM": "quire.models.minimax",  # as its authors spell it
    "MiniMaxM1ForCausalLM": "quire.models.minimax",
    "MambaForCausalLM": "quire.models.mamba",
    "FalconMambaForCausalLM": "quire.models.mamba",
    "Mamba2ForCausalLM": "quire.models.mamba2",
    "BambaForCausalLM": "quire.models.bamba",
    "GraniteMoeHybridForCausalLM": "quire.models.granite_hybrid",
    "FalconH1ForCausalLM": "quire.models.falcon_h1",
    "NemotronHForCausalLM": "quire.models.nemotron_h",
    "ZambaForCausalLM": "quire.models.zamba",
    "Zamba2ForCausalLM": "quire.models.zamba2",
    "JambaForCausalLM": "quire.models.jamba",
    "RWKV7ForCausalLM": "quire.models.rwkv7",
    "StableLmForCausalLM": "quire.models.stablelm",
    "OlmoForCausalLM": "quire.models.olmo",
    "OpenELMForCausalLM": "quire.models.openelm",
}

# Models that also take images or audio, of which the language model is served.
TEXT_PARTS = dict.fromkeys(
    (
        "Mistral3ForConditionalGeneration",
        "Gemma3ForConditionalGeneration",
        "Gemma3nForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        "AyaVisionForConditionalGeneration",
        "Cohere2VisionForConditionalGeneration",
        "Lfm2VlForConditionalGeneration",
        "Lfm3VlForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "MiniMaxM3SparseForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Step3p7ForConditionalGeneration",
        "Idefics2ForConditionalGeneration",
        "LlavaNextVideoForConditionalGeneration",
        "VideoLlavaForConditionalGeneration",
        "VipLlavaForConditionalGeneration",
        "VideoLlama3ForConditionalGeneration",
        "Ovis2ForConditionalGeneration",
        "FastVlmForConditionalGeneration",
        "PerceptionLMForConditionalGeneration",
        "DeepseekVLForConditionalGeneration",
        "DeepseekVLHybridForConditionalGeneration",
        "JanusForConditionalGeneration",
        "GotOcr2ForConditionalGeneration",
        "LightOnOcrForConditionalGeneration",
        "Qwen3ASRForConditionalGeneration",
        "PaddleOCRVLForConditionalGeneration",
        "GlmOcrForConditionalGeneration",
        "Glm4vForConditionalGeneration",
        "Glm46VForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "Granite4VisionForConditionalGeneration",
        "GraniteDoclingForConditionalGeneration",
        "HunYuanVLForConditionalGeneration",
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        "Exaone4_5_ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "FuyuForCausalLM",
        "Phi4MultimodalForCausalLM",
        "Phi4MMForCausalLM",  # as its authors spell it
        "AriaForConditionalGeneration",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2_5OmniForConditionalGeneration",
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "Qwen3OmniMoeForConditionalGeneration",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "AudioFlamingo3ForConditionalGeneration",
        "VoxtralForConditionalGeneration",
        "GraniteSpeechForConditionalGeneration",
        "DeepseekOcr2ForConditionalGeneration",
    ),
    "quire.models.text_part",
) | {"MllamaForConditionalGeneration": "quire.models.mllama"}

ENCODER_DECODERS = {
    "T5ForConditionalGeneration": "quire.models.t5",
    "MT5ForConditionalGeneration": "quire.models.t5",
    "UMT5ForConditionalGeneration": "quire.models.t5",
    "BartForConditionalGeneration": "quire.models.bart",
    "PLBartForConditionalGeneration": "quire.models.bart",
    "MBartForConditionalGeneration": "quire.models.bart",
    "M2M100ForConditionalGeneration": "quire.models.bart",
    "MarianMTModel": "quire.models.bart",
    "PegasusForConditionalGeneration": "quire.models.bart",
}

EMBEDDERS = {  # they embed texts. Decoders can embed too: see runtime/headless.py
    "BertModel": "quire.models.bert",
    "BertForMaskedLM": "quire.models.bert",
    "RobertaModel": "quire.models.bert",
    "RobertaForMaskedLM": "quire.models.bert",
    "XLMRobertaModel": "quire.models.bert",
    "XLMRobertaForMaskedLM": "quire.models.bert",
    "CamembertModel": "quire.models.bert",
    "CamembertForMaskedLM": "quire.models.bert",
    "DistilBertModel": "quire.models.bert",
    "DistilBertForMaskedLM": "quire.models.bert",
    "MPNetModel": "quire.models.bert",
    "MPNetForMaskedLM": "quire.models.bert",
    "Data2VecTextModel": "quire.models.bert",
    "Data2VecTextForMaskedLM": "quire.models.bert",
    "ErnieModel": "quire.models.bert",
    "ErnieForMaskedLM": "quire.models.bert",
    "ElectraModel": "quire.models.bert",
    "ElectraForPreTraining": "quire.models.bert",
    "ElectraForMaskedLM": "quire.models.bert",
    "AlbertModel": "quire.models.bert",
    "AlbertForMaskedLM": "quire.models.bert",
    "DebertaV2Model": "quire.models.deberta",
    "DebertaV2ForMaskedLM": "quire.models.deberta",
    "ModernBertModel": "quire.models.modernbert",
    "ModernBertForMaskedLM": "quire.models.modernbert",
    "T5EncoderModel": "quire.models.t5_encoder",
    "MT5EncoderModel": "quire.models.t5_encoder",
    "UMT5EncoderModel": "quire.models.t5_encoder",
    "NomicBertModel": "quire.models.rope_bert",
    "GteModel": "quire.models.rope_bert",
    "GteForMaskedLM": "quire.models.rope_bert",
    "NewModel": "quire.models.rope_bert",  # GTE as its authors spell it
    "NewForMaskedLM": "quire.models.rope_bert",
    "JinaEmbeddingsV3Model": "quire.models.rope_bert",
    "JinaEmbeddingsV3ForMaskedLM": "quire.models.rope_bert",
    "JinaBertModel": "quire.models.rope_bert",
    "JinaBertForMaskedLM": "quire.models.rope_bert",
    "EuroBertModel": "quire.models.llama",
    "EuroBertForMaskedLM": "quire.models.llama",
    "LlamaBidirectionalModel": "quire.models.llama",
}

SCORERS = {  # they score pairs of texts
    "BertForSequenceClassification": "quire.models.bert",
    "RobertaForSequenceClassification": "quire.models.bert",
    "XLMRobertaForSequenceClassification": "quire.models.bert",
    "CamembertForSequenceClassification": "quire.models.bert",
    "DistilBertForSequenceClassification": "quire.models.bert",
    "MPNetForSequenceClassification": "quire.models.bert",
    "Data2VecTextForSequenceClassification": "quire.models.bert",
    "ErnieForSequenceClassification": "quire.models.bert",
    "ElectraForSequenceClassification": "quire.models.bert",
    "AlbertForSequenceClassification": "quire.models.bert",
    "DebertaV2ForSequenceClassification": "quire.models.deberta",
    "ModernBertForSequenceClassification": "quire.models.modernbert",
    "GteForSequenceClassification": "quire.models.rope_bert",
    "NewForSequenceClassification": "quire.models.rope_bert",
    "JinaEmbeddingsV3ForSequenceClassification": "quire.models.rope_bert",
    "JinaBertForSequenceClassification": "quire.models.rope_bert",
}

# Encoders that are computed as a decoder without its head: rows of bidirectional_families.py.
BIDIRECTIONAL = ("EuroBertModel", "EuroBertForMaskedLM", "LlamaBidirectionalModel")
CLASSIFIER = "ForSequenceClassification"

Purpose = Literal["generate", "embed", "score"]

PURPOSES: dict[Purpose, dict[str, str]] = {
    "generate": ARCHITECTURES | TEXT_PARTS | ENCODER_DECODERS,
    "embed": EMBEDDERS,
    "score": SCORERS,
}

_USES = {
    "generate": ("generates text", "use `quire run`, `chat` or `serve`, or LLM"),
    "embed": ("embeds texts", "use `quire embed`, or Embedder"),
    "score": ("scores pairs of texts", "use `quire embed --score`, or Embedder.score"),
}


class Family(Protocol):
    """What a model file defines."""

    def config(self, hf: CheckpointConfig) -> ModelConfig:
        """Read config.json; a value that is not supported fails here, by name."""

    def load(self, ops: OpSet, checkpoint: Checkpoint, config: ModelConfig, max_model_len: int) -> LoadedModel:
        """Pack the weights and bind them to the forward pass."""


def family(architecture: str, *purposes: Purpose) -> Family:
    """The model file of an architecture that serves one of `purposes` (default: generate)."""
    purposes = purposes or ("generate",)
    actual = purpose(architecture)
    if actual not in purposes:
        does, hint = _USES[actual]
        raise Unsupported(f"a `{architecture}` {does}, and does not {' or '.join(purposes)}", hint)
    return cast(Family, import_module(PURPOSES[actual][architecture]))


def read_model_config(family: Family, hf: CheckpointConfig) -> ModelConfig:
    """The configuration, or BadCheckpoint where its numbers cannot be computed with."""
    try:
        return family.config(hf)
    except (ArithmeticError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise BadCheckpoint(f"{hf.source}: its values do not fit together: {error}") from error


def decoder_of(architecture: str) -> str | None:
    """The decoder of an architecture, with or without its head, or with a classifier instead: `MistralModel` and
    `MistralForSequenceClassification` are a `MistralForCausalLM`."""
    if architecture in BIDIRECTIONAL:
        return architecture
    names = (architecture, *(architecture.removesuffix(end) + "ForCausalLM" for end in ("Model", CLASSIFIER)))
    return next((name for name in names if name in ARCHITECTURES), None)


def purpose(architecture: str) -> Purpose:
    """What an architecture is for: to generate, to embed or to score."""
    for purpose, architectures in PURPOSES.items():
        if architecture in architectures:
            return purpose
    if decoder_of(architecture):
        return "score" if architecture.endswith(CLASSIFIER) else "embed"
    what = f"; what is missing: {MISSING[architecture]}" if architecture in MISSING else ""
    raise Unsupported(f"the architecture `{architecture}` is not supported{what}", _similar(architecture))


def _similar(architecture: str) -> str:
    """The same family for another purpose, or where all are listed. Names that only look alike are other models."""
    known = [name for architectures in PURPOSES.values() for name in architectures]
    family = _family_name(architecture)
    if same := [name for name in known if _family_name(name).lower() == family.lower()]:
        return f"of {family}, {', '.join(same)} {'is' if len(same) == 1 else 'are'} supported"
    families = {_family_name(name).lower() for name in known}  # some have two spellings
    return f"docs/models.md lists the {len(families)} families that are supported"


def _family_name(architecture: str) -> str:
    return re.sub(r"For[A-Z]\w*$|LMHead|(MT)?Model$", "", architecture)
