"""Values and reasons that the tables share."""

from quire.engine.peers.kinds import NoEffect, Only

OFF = ("false", "none")
ON = {"true": True, "false": False}
NEGATED = {"true": False, "false": True}
AUTOMATIC = {"0": None, "-1": None, "auto": None}
KV_TYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "q8_0": "int8"}

ONE_MACHINE = NoEffect("the engine starts its ranks itself, and tells them how to meet")
CHUNKS = NoEffect("prompts are always computed in chunks of max_num_batched_tokens beside the answers", switch=True)
KERNELS = NoEffect("kernels are chosen by what the machine has")
GRAPHS = NoEffect("sizes of CUDA graphs are chosen by measuring them")
GRAMMARS = NoEffect("structured output has one backend")
TEXT_ONLY = NoEffect("models are served for text")
LOGS = NoEffect("prompts are never logged, and requests with --access-log only", switch=True)
FILES = Only(OFF, "models are kept in the Hugging Face cache: set HF_HOME, or QUIRE_CACHE for the default model")
YARN = Only(("-1", "-1.0"), """write them into rope_scaling: '{"rope_type": "yarn", "factor": 4.0, "beta_fast": 32}'""")
STATES = Only(
    ("auto", "float32"),
    "states of running sequences are float32; those of prefixes are set with state_checkpoint_dtype",
)
CODE = Only(OFF, "no code is loaded from outside")
LOADING = NoEffect("weights are mapped while they are packed")
PINNED = Only((), "threads use the CPUs that the process may use: start it under taskset or numactl")
PRIORITY = NoEffect("threads have the priority of the process, and decide by themselves how to wait")
EXPERTS_ON_CPU = Only(
    ("0", *OFF), "whole layers can be on the CPU (cpu_layers), and weights in host memory (offload_weights)"
)
METRICS = NoEffect("/metrics has all there is", switch=True)
IMAGES = Only(OFF, "models are served for text")
CONTROL_VECTORS = Only((), "control vectors are not applied")
OWN_LORA = Only(
    (),
    "give an adapter a name with lora_modules NAME=PATH, and ask for the model NAME: none is applied to every request",
)
OWN_CONFIG = Only((), "the configuration is the checkpoint's own")
REQUESTS_SAY = Only((), "requests say it")
