"""Pipelines as data: what each stage computes and in which order, proven by simulation before anything runs."""
