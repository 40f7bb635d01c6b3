"""Exercises: functions that a student completes, and laws by which they are checked in a child process."""
