"""Names that Quire has in a Ray cluster."""

NAMESPACE = "quire"
WORKER = "worker "  # before the address of a server: the name of an actor that lives as long as the server
