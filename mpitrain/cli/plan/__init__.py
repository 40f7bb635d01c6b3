"""`mpitrain plan`: simulates pipelines and prints collectives step by step."""
