"""The experiments of claims, one file for each subject."""
