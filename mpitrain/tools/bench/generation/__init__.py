"""Measurements of text generation, in turns with whole windows and with a peer."""
