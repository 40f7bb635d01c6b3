"""`mpitrain learn`: topics, claims and exercises that run the package's own code on small examples."""
