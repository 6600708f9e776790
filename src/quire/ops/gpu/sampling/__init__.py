"""The sampler whose rows live on the device."""
