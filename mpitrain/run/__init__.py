"""One run: resolved, built, trained, kept in its directory."""
