"""Pipeline parallel: several processes compute the layers of a model one after the other.

leader.py     PipelineExecutor: the last stage, in the engine's process, which starts the others and tells them steps
follower.py   the process of another stage
stage.py      StageExecutor: what all stages do: load their layers, allocate their part of the KV cache
stage_ranks.py  StageRanks: the other ranks of a stage that several compute; rank_follower.py: the process of one
processes.py  the other stages' processes, and what connects neighbours
links.py      hidden states on their way from a stage to the next
step_queue.py what the last stage is to compute, in order, while the stages before it compute later steps
"""
