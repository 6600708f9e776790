"""Who may use the server, and how much: keys, quotas, and the context of one request."""
