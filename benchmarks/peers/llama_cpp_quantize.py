"""A GGUF file in another of llama.cpp's formats, run by an interpreter that has llama-cpp-python.

    python -m benchmarks.peers.llama_cpp_quantize MODEL.gguf Q8_0 MODEL.Q8_0.gguf

Weights that are quantized already are taken apart first: the file is for comparing speeds, not for its answers."""

import argparse
import sys

import llama_cpp as lc  # type: ignore[import-not-found]

from benchmarks.peers.llama_cpp import silence

FORMATS = {
    "F16": lc.LLAMA_FTYPE_MOSTLY_F16,
    "Q4_0": lc.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": lc.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q8_0": lc.LLAMA_FTYPE_MOSTLY_Q8_0,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("target")
    args = parser.parse_args()
    silence()
    params = lc.llama_model_quantize_default_params()
    params.ftype = FORMATS[args.format]
    params.allow_requantize = True
    sys.exit(lc.llama_model_quantize(args.source.encode(), args.target.encode(), params))
