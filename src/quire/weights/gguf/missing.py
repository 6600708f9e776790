"""GGUF's architectures that are known and not read: what of each is missing here.

An architecture that has a row in names.py is never looked up here."""

from collections.abc import Mapping

RECURRENT = "recurrent layers of its own kind"
DIFFUSION = "generation in any order, from masked tokens"

MISSING_GGUF: Mapping[str, str] = {
    "arwkv7": RECURRENT,
    "chameleon": "tokens of images",
    "clip": "encoding of images",
    "cogvlm": "experts for tokens of images",
    "deepseek4": "compressed sparse attention and several residual streams",
    "dflash": "drafting for another model",
    "dream": DIFFUSION,
    "eagle3": "drafting for another model",
    "gemma4-assistant": "drafting for another model",
    "grok": "norms of its own around experts",
    "grovemoe": "experts that groups of experts share",
    "laguna": "a softplus gate of attention",
    "llada": DIFFUSION,
    "llada-moe": DIFFUSION,
    "neo-bert": "its own names of tensors",
    "openelm": "layers of different sizes",
    "plamo": "its own names of tensors",
    "plamo2": RECURRENT,
    "plm": "MLA without an absorbed query",
    "rnd1": DIFFUSION,
    "rwkv6": RECURRENT,
    "rwkv6qwen2": RECURRENT,
    "smallthinker": "experts that read the layer's input",
    "talkie": "its own names of tensors",
    "wavtokenizer-dec": "decoding of audio",
}
