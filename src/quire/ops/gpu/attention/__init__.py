"""Attention over KV pages: plans, kernels, and writing K and V."""
