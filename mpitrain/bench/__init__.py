"""Measurements: what the machine's network, memory and processors can do."""
