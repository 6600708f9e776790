"""The server's side of an engine: supervision, requests in flight, prompts, several models."""
