"""Linear layers: 16-bit, grouped 4- to 8-bit and scaled 8-bit weights, and LoRA."""
