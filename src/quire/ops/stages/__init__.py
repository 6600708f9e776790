"""The op set of one of several stages, which compute a model one after the other: pipeline parallel, over any backend.

trace.py    what each layer of a model has: a forward pass traced without a number
parts.py    how layers are divided, and what belongs to a stage
opset.py    StageOps: a backend's op set that packs the weights of one stage
forward.py  StageForward: the ops of a forward pass, of which those of other stages compute nothing
"""
