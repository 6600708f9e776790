"""KV blocks from the engine that computes a prompt to the one that answers it."""
