"""The op set of one of several ranks, which compute a model together: tensor parallel, over any backend.

cuts.py      which columns of a value a rank has
roles.py     what the outputs of each matrix are used for: a forward pass traced on shapes
opset.py     RankOps: a backend's op set that keeps this rank's rows of every matrix
forward.py   RankForward: the ops of a forward pass; values are gathered where an op needs all columns
lora.py      this rank's part of LoRA adapters
group.py     the memory that ranks have in common
"""
