"""`mpitrain certify`: probes the nodes from outside MPI, then measures them on all ranks."""
