"""The op set in C++, for CPUs: a forward pass is recorded once as a tape, which one native call per step runs.

opset.py      NativeOps: packs weights, makes caches, compiles forward passes
recorder.py   records the ops of a forward pass
rank_recorder.py  the same, for one of several ranks
liveness.py   memory of the values of a recording
shared_values.py  the values that ranks have in common
program.py    the tape, run once a step
cache.py      the KV cache
lora.py       LoRA adapter slots
sampler.py    the sampler
cpus.py       the number of threads
"""

from quire.ops.compiled import available_isas, isa, use_isa
from quire.ops.native.cpus import available_cpus
from quire.ops.native.opset import NativeOps

__all__ = ["NativeOps", "available_cpus", "available_isas", "isa", "use_isa"]
