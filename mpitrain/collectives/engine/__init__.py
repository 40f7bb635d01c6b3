"""Engine: runs plans, composes reductions and drives their progress."""
