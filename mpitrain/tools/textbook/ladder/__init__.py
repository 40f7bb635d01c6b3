"""A ladder of matrix products: the same product by five kernels, each with less global traffic."""
