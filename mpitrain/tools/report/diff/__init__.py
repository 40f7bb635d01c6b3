"""The comparison of two runs: the first step at which they differ, and the tensors that do."""
