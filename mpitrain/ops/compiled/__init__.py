"""Fused passes of the host over float32, in C++ that g++ compiles at the first start on a machine."""
