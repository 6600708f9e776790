"""Hyper-connections: several residual streams, and the weights by which they are mixed."""

import torch
from torch import Tensor


def stream_weights(x: Tensor, scale: Tensor, base: Tensor, streams: int, eps: float, iterations: int) -> Tensor:
    """x [T, (2 + streams) * streams], or [T, streams] -> the same columns, see `OpSet.stream_weights`"""
    if x.shape[1] == streams:
        return torch.sigmoid(x * scale[0] + base) + eps
    pre, post, mixing = x.split([streams, streams, streams * streams], dim=1)
    pre_base, post_base, mixing_base = base.split([streams, streams, streams * streams])
    pre = torch.sigmoid(pre * scale[0] + pre_base) + eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    mixing = (mixing * scale[2] + mixing_base).unflatten(1, (streams, streams)).softmax(dim=2) + eps
    mixing = mixing / (mixing.sum(dim=1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mixing = mixing / (mixing.sum(dim=2, keepdim=True) + eps)
        mixing = mixing / (mixing.sum(dim=1, keepdim=True) + eps)
    return torch.cat([pre, post, mixing.flatten(1)], dim=1)


def merge_streams(x: Tensor, weights: Tensor) -> Tensor:
    """x [T, streams * n], weights [T, streams] -> [T, n]"""
    return (x.unflatten(1, (weights.shape[1], -1)) * weights[:, :, None]).sum(dim=1)


def update_streams(x: Tensor, y: Tensor, post: Tensor, mixing: Tensor) -> Tensor:
    """x [T, streams * n], y [T, n], post [T, streams], mixing [T, streams * streams] -> [T, streams * n]"""
    streams = post.shape[1]
    mixed = mixing.unflatten(1, (streams, streams)).transpose(1, 2) @ x.unflatten(1, (streams, -1))
    return (mixed + post[:, :, None] * y[:, None]).flatten(1)
