"""Tensor parallel: several processes of one machine compute a model together.

leader.py     RanksExecutor: rank 0, in the engine's process, which starts the others and tells them what to compute
leader_ops.py LeaderOps: its caches and programs, and those of the others
follower.py   the process of another rank
encoder.py    RanksEncoder, RankEncoder: the same for models that encode texts
rank.py       RankExecutor: what all ranks do: load their part of a model, allocate their part of the KV cache
processes.py  the other ranks' processes, watched: one that dies or hangs is noticed
messages.py   what rank 0 says to the others, and what they answer
shapes.py     a checkpoint known by its shapes, to find out what its matrices are for
"""
