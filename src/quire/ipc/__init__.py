"""How processes of one machine talk."""
