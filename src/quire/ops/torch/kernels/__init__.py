"""Triton kernels: one file a family, each with the python function that launches it."""
