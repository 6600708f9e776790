"""Kernels on a GPU, beside what the device can do at most."""
