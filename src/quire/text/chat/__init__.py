"""From messages to one prompt."""
