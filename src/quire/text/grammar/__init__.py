"""Structured output: from a schema, a regex or a grammar to token masks."""
