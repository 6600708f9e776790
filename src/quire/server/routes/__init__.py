"""Routes that belong to no dialect."""
