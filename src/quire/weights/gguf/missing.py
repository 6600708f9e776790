"""GGUF's architectures that are known and not read: what of each is missing here.

An architecture that has a row in names.py is never looked up here."""

from collections.abc import Mapping

RECURRENT = "recurrent layers"
DIFFUSION = "generation in any order, from masked tokens"
BIDIRECTIONAL = "attention to the tokens after a token"
IN_GGUF = "its names in GGUF; the checkpoint in Hugging Face's layout is read"

MISSING_GGUF: Mapping[str, str] = {
    "arctic": "a feed-forward layer beside the experts that reads the layer's input",
    "arwkv7": RECURRENT,
    "chameleon": "tokens of images",
    "clip": "encoding of images",
    "codeshell": "its own names of tensors",
    "cogvlm": "experts for tokens of images",
    "cohere2moe": IN_GGUF,
    "deepseek2-ocr": "its experts beside attention of Llama's kind",
    "deepseek4": "compressed sparse attention and several residual streams",
    "dflash": "drafting for another model",
    "dream": DIFFUSION,
    "eagle3": "drafting for another model",
    "falcon-h1": RECURRENT,
    "gemma4-assistant": "drafting for another model",
    "grok": "norms of its own around experts",
    "grovemoe": "experts that groups of experts share",
    "hunyuan_vl": "positions of images",
    "hy_v3": IN_GGUF,
    "jais": "ALiBi and a gate in GPT-2",
    "jamba": RECURRENT,
    "kimi-linear": RECURRENT,
    "laguna": "a softplus gate of attention",
    "llada": DIFFUSION,
    "llada-moe": DIFFUSION,
    "llama-embed": BIDIRECTIONAL,
    "maincoder": "its own names of tensors",
    "mamba": RECURRENT,
    "mellum": IN_GGUF,
    "nemotron_h": RECURRENT,
    "nemotron_h_moe": RECURRENT,
    "neo-bert": "its own names of tensors",
    "openelm": "layers of different sizes",
    "paddleocr": "positions of images",
    "plamo": "its own names of tensors",
    "plamo2": RECURRENT,
    "plamo3": "its own names of tensors",
    "plm": "MLA without an absorbed query",
    "refact": "ALiBi in Llama",
    "rnd1": DIFFUSION,
    "rwkv6": RECURRENT,
    "rwkv6qwen2": RECURRENT,
    "rwkv7": RECURRENT,
    "smallthinker": "experts that read the layer's input",
    "step35": "experts whose activations are clamped",
    "t5": IN_GGUF,
    "t5encoder": "an encoder without its decoder",
    "talkie": "its own names of tensors",
    "wavtokenizer-dec": "decoding of audio",
}
