"""One address in front of many engines: routing, admission, faults."""
