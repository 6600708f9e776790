"""Kernels on a GPU beside what the device could do at best."""
