"""`mpitrain learn`: topics, claims and exercises that run the package's own code on small examples."""

from mpitrain.tools.textbook import learn as learn
