"""Collective operations built from point-to-point messages, bound once per buffer."""
