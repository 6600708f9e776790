"""Triton kernels and the op set that launches them, on an NVIDIA GPU."""
