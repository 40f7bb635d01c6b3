"""A mixture of experts has no kernels yet, so devices refuse its operations."""
