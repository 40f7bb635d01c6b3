"""The acceptance test of a machine: measurements of every node, and a verdict on each."""
