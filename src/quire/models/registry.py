"""Which file knows an architecture. Entries are names, so that nothing is imported before it is needed."""

from difflib import get_close_matches
from importlib import import_module
from typing import Protocol, cast

from quire.core.errors import Unsupported
from quire.models.config import ModelConfig
from quire.models.loading import Model
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "quire.models.llama",
    "MistralForCausalLM": "quire.models.llama",
    "Qwen2ForCausalLM": "quire.models.llama",
    "Qwen3ForCausalLM": "quire.models.llama",
    "SmolLM3ForCausalLM": "quire.models.llama",
    "Phi3ForCausalLM": "quire.models.phi3",
    "DeepseekV2ForCausalLM": "quire.models.deepseek",
    "DeepseekV3ForCausalLM": "quire.models.deepseek",
    "MixtralForCausalLM": "quire.models.mixture",
    "Qwen2MoeForCausalLM": "quire.models.mixture",
    "Qwen3MoeForCausalLM": "quire.models.mixture",
    "OlmoeForCausalLM": "quire.models.mixture",
    "GraniteForCausalLM": "quire.models.granite",
    "GraniteMoeForCausalLM": "quire.models.granite",
    "Olmo2ForCausalLM": "quire.models.olmo2",
    "GemmaForCausalLM": "quire.models.gemma",
    "Gemma2ForCausalLM": "quire.models.gemma",
    "Gemma3ForCausalLM": "quire.models.gemma",
    "Gemma3ForConditionalGeneration": "quire.models.gemma",
    "GPT2LMHeadModel": "quire.models.gpt2",
    "GPTBigCodeForCausalLM": "quire.models.gpt2",
    "GPTJForCausalLM": "quire.models.gptj",
    "GPTNeoXForCausalLM": "quire.models.gpt_neox",
    "OPTForCausalLM": "quire.models.opt",
    "MptForCausalLM": "quire.models.mpt",
    "MPTForCausalLM": "quire.models.mpt",  # as its authors spell it
    "BloomForCausalLM": "quire.models.bloom",
    "FalconForCausalLM": "quire.models.falcon",
    "Starcoder2ForCausalLM": "quire.models.starcoder2",
    "PhiForCausalLM": "quire.models.phi",
    "StableLmForCausalLM": "quire.models.stablelm",
    "OlmoForCausalLM": "quire.models.olmo",
}


class Family(Protocol):
    """What a model file gives."""

    def config(self, hf: CheckpointConfig) -> ModelConfig:
        """Read the numbers; a value nobody wrote code for fails here, by name."""

    def load(self, ops: OpSet, checkpoint: Checkpoint, config: ModelConfig, max_model_len: int) -> Model:
        """Pack the weights, and bind them to the forward pass."""


def family(architecture: str) -> Family:
    if module := ARCHITECTURES.get(architecture):
        return cast(Family, import_module(module))
    near = get_close_matches(architecture, ARCHITECTURES, n=3, cutoff=0.5)
    hint = f"the nearest supported ones are {', '.join(near)}" if near else f"supported are {', '.join(ARCHITECTURES)}"
    raise Unsupported(f"the architecture `{architecture}` is not supported", hint)
