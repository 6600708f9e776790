"""The op set in C++, for CPUs: a forward pass is recorded once and replayed by one native call a step.

opset.py      NativeOps: what a model loader and a runner hold
recorder.py   the ops as a forward pass sees them; nothing is computed
liveness.py   which values of a recording may share memory
program.py    the recording as a tape, run once a step
cache.py      the pages
cpus.py       how many threads there should be
"""

from quire.ops.compiled import available_isas, isa, use_isa
from quire.ops.native.cpus import available_cpus
from quire.ops.native.opset import NativeOps

__all__ = ["NativeOps", "available_cpus", "available_isas", "isa", "use_isa"]
