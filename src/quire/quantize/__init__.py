"""Writers of quantized checkpoints: the twins of the readers in weights/."""
