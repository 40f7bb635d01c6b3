"""Scores of a trained model on multiple-choice tasks."""
