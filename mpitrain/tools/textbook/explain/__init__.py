"""Explanations of topics: frames recorded from real plans, layers and schedules."""
