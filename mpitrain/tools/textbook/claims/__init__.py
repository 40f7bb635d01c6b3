"""Claims: sentences of textbooks, and the experiments that show in which settings each is true."""
