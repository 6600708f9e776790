"""Options of transformers."""

from quire.engine.peers.devices import TRANSFORMERS as DEVICES
from quire.engine.peers.drafts import TRANSFORMERS as SPECULATION
from quire.engine.peers.kinds import NoEffect, Only, PeerOption, Renamed
from quire.engine.peers.reasons import FILES, KERNELS, OFF

TRANSFORMERS: dict[str, PeerOption] = {
    **SPECULATION,
    **DEVICES,
    "attn_implementation": KERNELS,
    "cache_dir": FILES,
    "load_in_4bit": Renamed("quantization", {"true": "nf4", "false": None}, switch=True),
    "load_in_8bit": Renamed("quantization", {"true": "int8", "false": None}, switch=True),
    "local_files_only": Only(OFF, "set HF_HUB_OFFLINE=1", switch=True),
    "low_cpu_mem_usage": NoEffect("weights are mapped while they are packed", switch=True),
    "quantization_config": Only(OFF, "set quantization to int8, int4, nf4 or fp8"),
    "torch_dtype": Renamed("dtype"),
    "use_auth_token": Only(("true", *OFF), "set HF_TOKEN"),
    "use_safetensors": NoEffect("safetensors are read where there are any", switch=True),
}
