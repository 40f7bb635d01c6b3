"""`mpitrain certify`: the acceptance test of a machine. It measures every node, and passes or fails it."""
