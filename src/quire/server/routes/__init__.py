"""Routes that belong to no dialect, and the one handler that all dialects share."""
