"""The sentences that tests expect of the package, one file for each of its rooms."""
