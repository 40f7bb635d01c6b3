"""Model averaging: local SGD, DiLoCo and gossip."""
