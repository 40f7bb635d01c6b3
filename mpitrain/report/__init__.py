"""What the traces of a run say: where its time went, in words and pictures, and what each rank did last."""
