"""What a user looks with: measurements, predictions, judgements and lessons. The engine imports none of it."""
