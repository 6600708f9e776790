"""Every family of the registry by several ranks against one process: the same bits.

By default, one case of each model file that test_families.py and test_experts.py leave out, by two, three or four ranks
in turn; `make trials` takes all cases of all families, and all sizes."""

from pathlib import Path

import numpy as np
import pytest
from transformers.models.auto import modeling_auto

from models import (
    test_bailing_hybrid,
    test_deepseek,
    test_deepseek_v4,
    test_delta_nets,
    test_gemma,
    test_gpt,
    test_gpt_oss,
    test_laguna,
    test_latest_families,
    test_lfm2,
    test_llama,
    test_llama_families,
    test_mamba,
    test_newer_families,
    test_older_families,
    test_other_families,
)
from models import test_moe as moe_cases
from models.checking import PROMPT, TINY, random_model
from quire.models.registry import ARCHITECTURES
from ranks.rank_threads import InRanks, OneProcess, steps
from ranks.test_experts import CASES as EXPERTS
from ranks.test_families import CASES as FAMILIES
from trials import LENGTH

FILES = (
    test_llama, test_llama_families, test_older_families, test_newer_families, test_gemma, test_gpt, test_gpt_oss,
    test_lfm2, moe_cases, test_mamba, test_delta_nets, test_other_families,
    test_bailing_hybrid, test_laguna,
)  # fmt: skip
CASES = {name: case for file in FILES for name, case in file.CASES.items()}
NAMES_BY_TYPE = dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
NAMES_BY_TYPE |= dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
for file in (test_deepseek, test_deepseek_v4):
    CASES |= {name: (kind, file.SIZES | given) for name, (kind, given) in file.CASES.items()}
CASES["step"] = test_latest_families.CASES["step"]

# Architectures that transformers does not have, or not under this name: they are one of the others with its tensors
# under other names or in another order.
NAMED_OTHERWISE = {
    "BaiChuanForCausalLM", "BaichuanForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM",
    "ChatGLMForConditionalGeneration", "ChatGLMModel", "DeciLMForCausalLM", "DeepseekForCausalLM", "ExaoneForCausalLM",
    "InternLM2ForCausalLM", "InternLM3ForCausalLM", "InternLMForCausalLM", "MiMoForCausalLM", "MiniCPMForCausalLM",
    "MiniMaxM1ForCausalLM", "MiniMaxM3VLForCausalLM", "MiniMaxText01ForCausalLM", "MllamaForCausalLM", "MPTForCausalLM",
    "OrionForCausalLM", "PanguEmbeddedForCausalLM", "PhiMoEForCausalLM",
    "QWenLMHeadModel", "TeleFLMForCausalLM",
    "ArcticForCausalLM", "CodeShellForCausalLM", "GPTRefactForCausalLM", "JAISLMHeadModel", "MaincoderForCausalLM",
    "Plamo3ForCausalLM", "RWKV7ForCausalLM", "TeleChat2ForCausalLM", "TeleChatForCausalLM",
    "Step3p5ForCausalLM", "NanbeigeForCausalLM", "OuroForCausalLM",
    "MiMoV2ForCausalLM", "Param2MoEForCausalLM", "SarvamMLAForCausalLM", "SarvamMoEForCausalLM",
    "OpenELMForCausalLM", "SmallThinkerForCausalLM",
}  # fmt: skip
WHOLE_EXPERTS = {"LongcatFlashForCausalLM"}  # divided as test_experts.py does, and in no other way


pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # in GPTBigCode


def architecture(name: str) -> str:
    return str(NAMES_BY_TYPE[CASES[name][0].model_type])


FIRST = {architecture(name): name for name in reversed(CASES)}  # the first case of each architecture
ELSEWHERE = {ARCHITECTURES[str(NAMES_BY_TYPE[kind.model_type])] for kind, _ in (*FAMILIES.values(), *EXPERTS.values())}
BY_FILE = {file: FIRST[name] for name, file in ARCHITECTURES.items() if name in FIRST and file not in ELSEWHERE}
NAMES = list(CASES) if LENGTH > 1 else sorted(BY_FILE.values())


def test_all_families_are_here() -> None:
    assert set(ARCHITECTURES) - set(FIRST) == NAMED_OTHERWISE | WHOLE_EXPERTS


@pytest.mark.trial
@pytest.mark.parametrize("name", NAMES)
def test_kernels_give_the_bits_of_one_process(tmp_path: Path, name: str) -> None:
    kind, options = CASES[name]
    config = kind(**{**TINY, **options})
    random_model(config, seed=len(name)).save_pretrained(tmp_path)
    alone = steps(OneProcess("native", tmp_path).logits, PROMPT)
    text = config.get_text_config()
    heads = getattr(text, "o_groups", None) or getattr(text, "num_attention_heads", None) or 4
    for size in (2, 3, 4) if LENGTH > 1 else (2 + NAMES.index(name) % 3,):
        ranks = InRanks("native", tmp_path, min(size, heads))
        for ours, theirs in zip(steps(ranks.logits, PROMPT), alone, strict=True):
            np.testing.assert_array_equal(ours, theirs)
