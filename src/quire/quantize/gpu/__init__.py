"""Quantizing with torch on a GPU. Nothing else of this floor imports torch."""
