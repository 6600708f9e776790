"""Which tests compare which architecture with its reference, and the table of them in docs/models.md.

A test that compares a model says so, with the container its weights come from:

    @pytest.mark.verifies("safetensors")                    # or "gguf"
    @pytest.mark.parametrize("name", CASES)                 # of its file: the class tells the architecture
    @pytest.mark.parametrize("backend", BACKENDS)           # without it: verifies("gguf", backend="torch")

One without cases names its model: `verifies("safetensors", backend="gpu", architecture="LlamaForCausalLM")`. One of a
quantized format, `verifies("quantized", backend=...)`, has the names of `FORMATS` in tests/weights/quantized_files.py,
or names it: `subject="mxfp4"`.

    python -m tests.models.verified         runs these tests, and writes the table of those that passed

tests/models/test_verified.py fails where the table is not that of the tests and the registry that are there."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire.models.registry import ARCHITECTURES, EMBEDDERS, ENCODER_DECODERS, SCORERS, TEXT_PARTS
from quire.weights.config import ALIASES
from quire.weights.formats import FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- made by tests/models/verified.py -->\n", "<!-- end of what is made -->\n"
TABLES = {
    "Decoders": ARCHITECTURES,
    "Models that also take images or audio: their text": TEXT_PARTS,
    "Encoder-decoders": ENCODER_DECODERS,
    "Encoders that embed": EMBEDDERS,
    "Encoders that score": SCORERS,
}
BACKENDS = {"torch": "torch", "native": "CPU", "gpu": "GPU"}  # in the order of the table
KNOWN_AS = {
    "LlamaForCausalLM": "Llama 1 to 3.3, SmolLM, SmolLM2, Yi, TinyLlama, DeepSeek LLM, ...",
    "MistralForCausalLM": "Mistral, Nemo, Small",
    "Mistral3ForConditionalGeneration": "Mistral Small 3.1 and 3.2, Ministral 3, Mistral Small 4",
    "Ernie4_5ForCausalLM": "ERNIE 4.5 0.3B",
    "Ernie4_5_MoeForCausalLM": "ERNIE 4.5 21B-A3B, 300B-A47B",
    "ApertusForCausalLM": "8B, 70B",
    "Ministral3ForCausalLM": "3B, 8B, 14B",
    "MinistralForCausalLM": "Ministral 8B 2410",
    "HunYuanDenseV1ForCausalLM": "0.5B to 7B",
    "HeliumForCausalLM": "Kyutai's 2B",
    "CwmForCausalLM": "Code World Model",
    "ArceeForCausalLM": "AFM 4.5B",
    "BaichuanForCausalLM": "13B, Baichuan 2",
    "BaiChuanForCausalLM": "7B",
    "ExaoneForCausalLM": "EXAONE 3.0, 3.5, Deep",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
    "YoutuForCausalLM": "Youtu-LLM 2B",
    "MiniMaxM2ForCausalLM": "MiniMax-M2, M2.1",
    "Dots1ForCausalLM": "dots.llm1",
    "SolarOpenForCausalLM": "Solar Open 100B",
    "GraniteMoeHybridForCausalLM": "Granite 4.0, with Mamba and without",
    "Mamba2ForCausalLM": "Mamba 2, Mamba-Codestral",
    "BambaForCausalLM": "Bamba 9B",
    "FalconH1ForCausalLM": "0.5B to 34B",
    "NemotronHForCausalLM": "8B, 47B, 56B, Nemotron Nano 2, Nemotron 3 Nano",
    "Zamba2ForCausalLM": "1.2B, 2.7B, 7B",
    "JambaForCausalLM": "Jamba 1.5, 1.6, 1.7, Jamba 3B",
    "MiniCPMForCausalLM": "MiniCPM 1B, 2B, MiniCPM4",
    "NemotronForCausalLM": "Nemotron-4, Minitron",
    "Jais2ForCausalLM": "Jais 2 8B, 70B",
    "SeedOssForCausalLM": "Seed-OSS 36B",
    "Glm4MoeForCausalLM": "GLM-4.5, 4.6, 4.7",
    "Exaone4ForCausalLM": "EXAONE 4.0",
    "GlmForCausalLM": "GLM-4-9B, Edge",
    "Glm4ForCausalLM": "GLM-4-0414, Z1",
    "CohereForCausalLM": "Command R, R+, Aya",
    "Cohere2ForCausalLM": "Command R7B, A",
    "GptOssForCausalLM": "20B, 120B",
    "Qwen2ForCausalLM": "Qwen1.5, Qwen2, Qwen2.5",
    "Qwen2MoeForCausalLM": "also Qwen1.5-MoE",
    "Phi3ForCausalLM": "Phi-3, Phi-3.5 mini, Phi-4, Phi-4 mini",
    "PhiForCausalLM": "Phi-1, 1.5, 2",
    "PhimoeForCausalLM": "Phi-3.5-MoE",
    "Lfm2ForCausalLM": "LFM2 350M to 2.6B",
    "Lfm2MoeForCausalLM": "LFM2 8B-A1B",
    "Lfm3ForCausalLM": "LFM3 1.7B",
    "Lfm3VlForConditionalGeneration": "LFM3-VL 2B",
    "GraniteDoclingForConditionalGeneration": "Granite for Docling 500M, 2B",
    "Qwen3NextForCausalLM": "80B-A3B",
    "Qwen3_5ForCausalLM": "0.8B to 27B",
    "Qwen3_5ForConditionalGeneration": "its text",
    "Qwen3_5MoeForCausalLM": "35B-A3B to 397B-A17B",
    "Qwen3_5MoeForConditionalGeneration": "its text",
    "KimiLinearForCausalLM": "48B-A3B",
    "OlmoHybridForCausalLM": "OLMo Hybrid 7B",
    "MiniMaxForCausalLM": "MiniMax-Text-01",
    "MiniMaxText01ForCausalLM": "MiniMax-Text-01 as its authors spell it",
    "MiniMaxM1ForCausalLM": "MiniMax-M1",
    "PhiMoEForCausalLM": "Phi-3.5-MoE as its authors spell it",
    "DeepseekV2ForCausalLM": "V2, V2.5, V2-Lite",
    "DeepseekV3ForCausalLM": "V3, R1",
    "Llama4ForCausalLM": "Scout, Maverick",
    "Gemma3nForCausalLM": "E2B, E4B",
    "Gemma4ForCausalLM": "E2B, E4B, 26B-A4B, 31B",
    "DeepseekV32ForCausalLM": "V3.2",
    "DeepseekV4ForCausalLM": "V4 Flash, V4 Pro; on CPUs",
    "GlmMoeDsaForCausalLM": "GLM-5",
    "LongcatFlashForCausalLM": "LongCat-Flash",
    "Step3p5ForCausalLM": "Step 3.5 Flash",
    "Step3p7ForConditionalGeneration": "the text of Step 3.7 Flash",
    "DebertaV2Model": "DeBERTa v2, v3",
    "AXK1ForCausalLM": "A.X-K1",
    "Mistral4ForCausalLM": "Mistral Small 4",
    "MiniMaxM3VLForCausalLM": "MiniMax-M3, up to 2,048 tokens",
    "MiMoForCausalLM": "MiMo 7B",
    "MiMoV2FlashForCausalLM": "MiMo-V2-Flash",
    "MiMoV2ForCausalLM": "MiMo-V2.5, V2.5-Pro",
    "LagunaForCausalLM": "Laguna XS.2, S.2, M.1",
    "BailingHybridForCausalLM": "Ling 3.0 tiny, Flash",
    "NanbeigeForCausalLM": "Nanbeige 4.2 3B",
    "OuroForCausalLM": "Ouro 1.4B, 2.6B",
    "HunYuanMoEV1ForCausalLM": "Hunyuan-A13B",
    "HYV3ForCausalLM": "Hy3",
    "ExaoneMoeForCausalLM": "K-EXAONE",
    "AfmoeForCausalLM": "Trinity",
    "MellumForCausalLM": "Mellum 2",
    "BailingMoeForCausalLM": "Ling, Ring",
    "BailingMoeV2ForCausalLM": "Ling 2.0, Ring 2.0",
    "SarvamMoEForCausalLM": "Sarvam 30B",
    "SarvamMLAForCausalLM": "Sarvam 105B",
    "Param2MoEForCausalLM": "Param2 17B",
    "GraniteMoeSharedForCausalLM": "Granite with a shared expert",
    "GraniteSWAForCausalLM": "Granite with windows and sinks",
    "GraniteMoeSWAForCausalLM": "the same with experts",
    "HyperCLOVAXForCausalLM": "SEED-Think 14B",
    "TeleFLMForCausalLM": "52B",
    "PanguEmbeddedForCausalLM": "openPangu Embedded 1B, 7B",
    "DeciLMForCausalLM": "DeciLM, Llama-Nemotron Super and Ultra",
    "Cohere2MoeForCausalLM": "Command A with experts",
    "KimiK25ForConditionalGeneration": "Kimi K2.5",
    "Glm4vForConditionalGeneration": "GLM-4.1V",
    "Glm4vMoeForConditionalGeneration": "GLM-4.5V",
    "Glm46VForConditionalGeneration": "GLM-4.6V",
    "JetMoeForCausalLM": "JetMoE 8B",
    "SmallThinkerForCausalLM": "SmallThinker 4B, 21B",
    "ModernBertDecoderForCausalLM": "Ettin 17M to 1B",
    "MllamaForCausalLM": "the text of Llama 3.2 Vision",
    "MllamaForConditionalGeneration": "Llama 3.2 Vision 11B, 90B",
    "NanoChatForCausalLM": "nanochat",
    "Phi4MultimodalForCausalLM": "Phi-4 multimodal",
    "Phi4MMForCausalLM": "Phi-4 multimodal as its authors spell it",
    "ZambaForCausalLM": "Zamba 7B v1",
    "GPTBigCodeForCausalLM": "StarCoder",
    "GPTNeoXForCausalLM": "Pythia",
    "MPTForCausalLM": "MPT as its authors spell it",
    "FalconForCausalLM": "7B, 40B, 11B, RW",
    "StableLmForCausalLM": "3B, 2-1.6B, 2-12B",
    "OlmoForCausalLM": "the first",
    "OpenELMForCausalLM": "270M to 3B",
    "T5ForConditionalGeneration": "also T5 1.1, FLAN-T5, UL2",
    "MarianMTModel": "Opus-MT",
    "M2M100ForConditionalGeneration": "also NLLB-200",
    "BertModel": "MiniLM, BGE, E5, ...",
    "MPNetForMaskedLM": "all-mpnet-base-v2",
    "NomicBertModel": "nomic-embed-text",
    "QWenLMHeadModel": "Qwen 1",
    "ChatGLMModel": "ChatGLM 2 and 3, GLM-4 as its authors spell it",
    "InternLMForCausalLM": "the first",
    "BitNetForCausalLM": "b1.58 2B",
    "DeepseekForCausalLM": "DeepSeek-MoE 16B",
    "OpenAIGPTLMHeadModel": "the first GPT",
    "UMT5ForConditionalGeneration": "umT5",
    "GteModel": "gte-multilingual, gte-en-v1.5, Arctic Embed M 2",
    "NewModel": "GTE as its authors spell it",
    "JinaEmbeddingsV3Model": "jina-embeddings-v3",
    "JinaBertModel": "jina-embeddings-v2",
    "LlamaBidirectionalModel": "NVIDIA's retrievers",
    "RWKV7ForCausalLM": "RWKV-7 World, Goose",
    "ArcticForCausalLM": "Snowflake Arctic",
    "JAISLMHeadModel": "JAIS 13B, 30B and the JAIS family",
    "TeleChatForCausalLM": "7B, 12B",
    "TeleChat2ForCausalLM": "3B to 115B",
    "Plamo3ForCausalLM": "PLaMo 3",
    "GPTRefactForCausalLM": "Refact 1.6B",
    "CodeShellForCausalLM": "CodeShell 7B",
    "MaincoderForCausalLM": "Maincoder 1B",
    "T5EncoderModel": "Sentence-T5, GTR",
}


@dataclass(frozen=True, slots=True)
class Proof:
    """One case of one test."""

    subject: str  # an architecture, or how a quantized format is called in config.json
    container: str
    backend: str
    case: str


def proofs_of(items: Iterable[pytest.Item]) -> dict[str, Proof]:
    """By the id of the test."""
    found = {}
    for item in items:
        if (mark := item.get_closest_marker("verifies")) is None:
            continue
        (container,) = mark.args
        params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
        case = params.get("name", "")
        backend = mark.kwargs.get("backend") or params["backend"]
        subject = (
            mark.kwargs.get("architecture") or mark.kwargs.get("subject") or _subject(container, item.module, case)
        )  # type: ignore[attr-defined]
        found[item.nodeid] = Proof(subject, container, backend, case)
    return found


def _subject(container: str, module: Any, case: str) -> str:
    if container == "quantized":
        return str(module.FORMATS[case].config["quant_method"])
    return _architecture(module.CASES[case][0])


def _architecture(made_with: type) -> str:
    """Of a case: the model's class, or its configuration's."""
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    if issubclass(made_with, PreTrainedModel):
        return made_with.__name__
    names = {
        **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    name = str(names[made_with.model_type])  # type: ignore[attr-defined]
    return ALIASES.get(name, name)


def table(proofs: Iterable[Proof]) -> str:
    """What stands in the page between BEGIN and END."""
    by_subject: dict[str, list[Proof]] = {}
    for proof in proofs:
        by_subject.setdefault(proof.subject, []).append(proof)
    parts = []
    for title, architectures in TABLES.items():
        rows = [_family(name, module, by_subject.get(name, [])) for name, module in architectures.items()]
        parts.append(_lines(title, ["architecture", "file", "cases", "on", "GGUF"], rows))
    rows = [_format(method, module, by_subject.get(method, [])) for method, module in FORMATS.items()]
    parts.append(_lines("Quantized formats", ["quant_method", "file", "cases", "quantized on a GPU"], rows))
    return "\n\n".join(parts) + "\n"


def _family(architecture: str, module: str, proofs: list[Proof]) -> list[str]:
    known = f" ({KNOWN_AS[architecture]})" if architecture in KNOWN_AS else ""
    backends = [title for name, title in BACKENDS.items() if any(proof.backend == name for proof in proofs)]
    return [
        f"`{architecture}`{known}",
        _file(module),
        _cases(proof for proof in proofs if proof.container == "safetensors"),
        ", ".join(backends),
        str(len({proof.case for proof in proofs if proof.container == "gguf"}) or ""),
    ]


def _format(method: str, module: str, proofs: list[Proof]) -> list[str]:
    on_cpu = _cases(proof for proof in proofs if proof.backend == "native")
    return [f"`{method}`", _file(module), on_cpu, _cases(proof for proof in proofs if proof.backend == "gpu")]


def _file(module: str) -> str:
    return f"`{module.rpartition('.')[2]}.py`"


def _cases(proofs: Iterable[Proof]) -> str:
    names = sorted({proof.case for proof in proofs} - {""})
    return f"{len(names)}: {', '.join(names)}" if names else "none of its own"


def _lines(title: str, columns: list[str], rows: list[list[str]]) -> str:
    lines = [f"### {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join(lines + [f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in row)}|" for row in rows])


def page_with(made: str) -> str:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    assert rest and after is not None, f"{PAGE} lacks the two lines that the table stands between"
    return before + BEGIN + made + END + after


class Passed:
    """Keeps the proofs of tests that pass."""

    def __init__(self) -> None:
        self.proofs: list[Proof] = []
        self._planned: dict[str, Proof] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._planned = proofs_of(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed and report.nodeid in self._planned:
            self.proofs.append(self._planned[report.nodeid])


def main() -> int:
    passed = Passed()
    status = pytest.main(["-q", "-m", "verifies", str(Path(__file__).parent)], plugins=[passed])
    if status == 0:
        PAGE.write_text(page_with(table(passed.proofs)))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
