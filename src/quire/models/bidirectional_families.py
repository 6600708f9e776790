"""Rows as in llama_families.py for encoders with Llama's layers: every token sees all others of its text."""

from collections.abc import Mapping

from quire.models.llama_families import LlamaFamily

EUROBERT = LlamaFamily(defaults={"rms_norm_eps": 1e-5}, bidirectional=True)

BIDIRECTIONAL_FAMILIES: Mapping[str, LlamaFamily] = {
    "EuroBertModel": EUROBERT,
    "EuroBertForMaskedLM": EUROBERT,
    "LlamaBidirectionalModel": LlamaFamily(bidirectional=True),  # of NVIDIA's retrievers
}
