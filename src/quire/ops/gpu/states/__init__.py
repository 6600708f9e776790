"""Recurrent and convolution states on a GPU: where segments start and end, and the kernels that scan them."""
