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
    "deepseek4": "names of its own; safetensors of it are loaded",
    "dflash": "drafting for another model",
    "dots3note": "a gate of sparse attention",
    "dream": DIFFUSION,
    "eagle3": "drafting for another model",
    "gemma4-assistant": "drafting for another model",
    "graniteswitch": "adapters that a router chooses",
    "grok": "norms of its own around experts",
    "grovemoe": "experts that groups of experts share",
    "kimi-k3": "attention over residuals of layers, and experts in a latent space",
    "llada": DIFFUSION,
    "llada-moe": DIFFUSION,
    "minimax-01": "names that differ from layer to layer; safetensors of it are loaded",
    "muse-glimmer": "norms of embeddings, and scales of queries of its own",
    "neo-bert": "its own names of tensors",
    "plamo": "its own names of tensors",
    "plamo2": RECURRENT,
    "plm": "MLA without an absorbed query",
    "pockettts": "decoding of audio",
    "qwen3tts": "decoding of audio",
    "rnd1": DIFFUSION,
    "rwkv6": RECURRENT,
    "rwkv6qwen2": RECURRENT,
    "talkie": "its own names of tensors",
    "wavtokenizer-dec": "decoding of audio",
}
