"""Data parallelism: bucketed all-reduce, ZeRO stages 1 to 3, and weight stashing."""
