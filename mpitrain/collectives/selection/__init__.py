"""Selection: the table of algorithms, the cost model, tuning files and the choice "auto"."""
