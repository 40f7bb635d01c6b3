"""Fused passes of the host over float32, in C++, compiled at the first start on a machine."""
