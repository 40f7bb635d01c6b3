"""Comparisons with the packages transformers and peft of HuggingFace."""
