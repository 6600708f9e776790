"""docs/architectures.md: which architectures of vLLM, llama.cpp and transformers are loaded, and what the others lack.

    python -m tests.models.architectures         writes the page

tests/models/test_architectures.py fails where the page is not that of the registries that are there. The lists below
are `_TEXT_GENERATION_MODELS` of the model registry of vLLM 0.33, with names that it had before, and `LLM_ARCH_NAMES` of
llama.cpp in August 2026. Those of transformers are what its installed release has."""

import sys
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.models.missing import MISSING
from quire.models.registry import PURPOSES
from quire.weights.config import ALIASES
from quire.weights.gguf.missing import MISSING_GGUF
from quire.weights.gguf.names import ARCHITECTURES as GGUF_ARCHITECTURES


def words(text: str) -> list[str]:
    return text.split()


PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"

VLLM = words("""
AXK1ForCausalLM AfmoeForCausalLM AliceAIForCausalLM ApertusForCausalLM AquilaForCausalLM AquilaModel ArceeForCausalLM
ArcticForCausalLM BaiChuanForCausalLM BaichuanForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM
BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM BambaForCausalLM BeamForCausalLM BloomForCausalLM
ChatGLMForConditionalGeneration ChatGLMModel Cohere2ForCausalLM Cohere2MoeForCausalLM CohereForCausalLM CwmForCausalLM
DbrxForCausalLM DeciLMForCausalLM DeepseekForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM
DeepseekV4ForCausalLM DomynEdgeForCausalLM DoryForCausalLM Dots1ForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM
Exaone4ForCausalLM ExaoneForCausalLM ExaoneMoEForCausalLM ExaoneMoeForCausalLM Fairseq2LlamaForCausalLM
FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM FlexOlmoForCausalLM FlintForCausalLM GPT2LMHeadModel
GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3nForCausalLM
Gemma4ForCausalLM GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM Glm5NextForCausalLM
GlmForCausalLM GlmMoeDsaForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM GritLM
Grok1ForCausalLM Grok1ModelForCausalLM HCXVisionForCausalLM HCXVisionV2ForCausalLM HYV3ForCausalLM HYV4ForCausalLM
HrmTextForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM IQuestCoderForCausalLM
IQuestLoopCoderForCausalLM InklingForCausalLM InternLM2ForCausalLM InternLM2VEForCausalLM InternLM3ForCausalLM
InternLMForCausalLM JAISLMHeadModel Jais2ForCausalLM JambaForCausalLM K2HorizonForCausalLM KimiLinearForCausalLM
LLaMAForCausalLM LagunaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Llama4ForCausalLM LlamaForCausalLM
LongcatFlashForCausalLM LongcatFlashNgramForCausalLM MPTForCausalLM Mamba2ForCausalLM MambaForCausalLM MellumForCausalLM
MiMoForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiniCPM3ForCausalLM MiniCPMForCausalLM MiniMaxForCausalLM
MiniMaxM1ForCausalLM MiniMaxM2ForCausalLM MiniMaxM3SparseForCausalLM MiniMaxText01ForCausalLM Ministral3ForCausalLM
MistralForCausalLM MistralLarge3ForCausalLM MixtralForCausalLM MptForCausalLM MuseGlimmerForCausalLM NemotronForCausalLM
NemotronHForCausalLM NemotronHPuzzleForCausalLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM
OlmoHybridForCausalLM OlmoeForCausalLM OrionForCausalLM OuroForCausalLM PanguEmbeddedForCausalLM
PanguProMoEV2ForCausalLM PanguUltraMoEForCausalLM Param2MoEForCausalLM PersimmonForCausalLM Phi3ForCausalLM
PhiForCausalLM PhiMoEForCausalLM Plamo2ForCausalLM Plamo3ForCausalLM QWenLMHeadModel Qwen2ForCausalLM
Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM
Qwen4ExpForCausalLM RWForCausalLM Rnj1ForCausalLM SarvamMLAForCausalLM SarvamMoEForCausalLM SeedOssForCausalLM
SolarForCausalLM SolarOpenForCausalLM StableLMEpochForCausalLM StableLmForCausalLM Starcoder2ForCausalLM
Step1ForCausalLM Step3TextForCausalLM Step3p5ForCausalLM Step5ForCausalLM TeleChat2ForCausalLM TeleChat3ForCausalLM
TeleChatForCausalLM TeleFLMForCausalLM XverseForCausalLM Zamba2ForCausalLM
""")

LLAMA_CPP = words("""
afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bert bitnet bloom chameleon chatglm clip
codeshell cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 dflash
dots1 dots3note dream eagle3 ernie4_5 ernie4_5-moe eurobert exaone exaone-moe exaone4 falcon falcon-h1 gemma
gemma-embedding gemma2 gemma3 gemma3n gemma4 gemma4-assistant glm-dsa glm4 glm4moe gpt-oss gpt2 gptj gptneox granite
granite_swa granitehybrid granitemoe graniteswitch grok grovemoe hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 internlm2
jais jais2 jamba jina-bert-v2 jina-bert-v3 kimi-k3 kimi-linear laguna lfm2 lfm2moe llada llada-moe llama llama-embed
llama4 maincoder mamba mamba2 mellum mimo2 minicpm minicpm3 minimax-01 minimax-m2 minimax-m3 mistral3 mistral4
modern-bert mpt muse-glimmer nanbeige nemotron nemotron_h nemotron_h_moe neo-bert nomic-bert nomic-bert-moe olmo olmo2
olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 plm pockettts qwen qwen2 qwen2moe
qwen2vl qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen3tts qwen3vl qwen3vlmoe refact rnd1 rwkv6 rwkv6qwen2 rwkv7
seed_oss smallthinker smollm3 stablelm starcoder starcoder2 step35 t5 t5encoder talkie wavtokenizer-dec xverse
""")

TRANSFORMERS = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))

HEAD = """# Architectures

Which architectures of [vLLM](https://github.com/vllm-project/vllm),
[llama.cpp](https://github.com/ggml-org/llama.cpp) and [transformers](https://github.com/huggingface/transformers) are
loaded here, by their names, and what of the others is missing. This page is made by `python -m
tests.models.architectures`, and CI fails where it is stale; [models.md](models.md) says how each family is verified,
and lists more families that none of them has.

"""


def loaded(architecture: str) -> str | None:
    """What an architecture is loaded as, or None."""
    name = ALIASES.get(architecture, architecture)
    files = {key: file for table in PURPOSES.values() for key, file in table.items()}
    return None if name not in files else f"`{files[name].rpartition('.')[2]}.py`"


def read(name: str) -> str | None:
    """What a GGUF architecture is read as, or None."""
    return f"`{GGUF_ARCHITECTURES[name].name}`" if name in GGUF_ARCHITECTURES else None


def page() -> str:
    vllm = {name: loaded(name) for name in VLLM}
    gguf = {name: read(name) for name in LLAMA_CPP}
    text = HEAD + _section("vLLM's architectures that generate text", vllm, "in", MISSING)
    text += "\n" + _section("llama.cpp's architectures, from GGUF files", gguf, "read as", MISSING_GGUF)
    causal = {name: loaded(name) for name in TRANSFORMERS}
    return text + "\n" + _section("transformers' causal language models", causal, "in", MISSING)


def _section(title: str, names: dict[str, str | None], column: str, missing: dict[str, str]) -> str:
    there = [name for name, file in names.items() if file]
    lines = [
        f"## {title}",
        "",
        f"{len(there)} of {len(names)}.",
        "",
        f"| name | {column} | what is missing |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {file or ''} | {'' if file else missing.get(name, '?')} |" for name, file in names.items()]
    return "\n".join(lines).replace("|  |", "| |") + "\n"


def main() -> int:
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
