"""Draft heads (EAGLE-3, Medusa) that a model is taught with its own answers."""
