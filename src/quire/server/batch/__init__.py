"""Many requests from a file, answers to another: OpenAI's batch format, without HTTP."""
