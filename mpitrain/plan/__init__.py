"""What would happen, told without doing it: charts of schedules, steps of collectives."""
