"""Exercises: skeletons that a student completes, and laws that check them in a child."""
