"""What Python users import: `LLM`, `AsyncEngine`, `Embedder`, and what they return."""
