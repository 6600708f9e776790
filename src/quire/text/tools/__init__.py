"""Tool calls in the text of a model."""
