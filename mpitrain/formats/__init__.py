"""Folders of other projects, and the safetensors files in them."""
