"""Least absolute deviations with unknowns above bounds: a linear program, solved by the simplex method.

Barrodale and Roberts, SIAM J. Numer. Anal. 10(5), 1973: a residual is split in its two signed
parts, over and under. Their columns are opposite, so the tableau has only one of them.
"""

import numpy as np

ZERO = 1e-9
"""Costs and pivots closer to 0 are rounding errors; all columns have norm 1."""
RAISED = 1e-10
"""Upper bound of the raise of a target."""


def least_absolute(matrix: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Return the x >= least that minimises the sum of |matrix @ x - 1|.

    Absolute instead of squared distances let outliers count little.

    matrix  (rows, terms)
    """
    rows, terms = matrix.shape
    # The unknowns are x - least >= 0. A basis of residuals alone needs targets >= 0.
    targets = 1 - matrix @ least
    signs = np.where(targets < 0, -1, 1)
    matrix, targets = signs[:, None] * matrix, abs(targets)
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    matrix = matrix / scale
    basis = _optimal_basis(matrix, targets)
    chosen = [index for index in basis if index < terms]
    # Rows whose residual is not in the basis are met exactly. They determine x without the rounding
    # errors of the pivots.
    missed = {(index - terms) % rows for index in basis if index >= terms}
    met = [row for row in range(rows) if row not in missed]
    unknowns = np.zeros(terms)
    unknowns[chosen] = np.linalg.lstsq(matrix[np.ix_(met, chosen)], targets[met])[0]
    return least + unknowns.clip(0) / scale


def _optimal_basis(matrix: np.ndarray, targets: np.ndarray) -> list[int]:
    """Return the basic variables: unknowns 0.., then residuals below the targets, then above.

    The first basis has all residuals below: x = 0. Each target is raised a little, each by another
    amount, because pivots among equal targets can cycle.
    """
    rows, terms = matrix.shape
    basis = list(range(terms, terms + rows))
    raised = targets[:, None] + RAISED * np.random.default_rng(0).random((rows, 1))
    # The last row has reduced costs, the last column values.
    tableau = np.block([[matrix, np.eye(rows), raised], [-matrix.sum(0), np.zeros(rows + 1)]])
    while True:
        costs = np.concatenate([tableau[-1, :-1], 2 - tableau[-1, terms:-1]])
        entering = int(costs.argmin())
        if costs[entering] > -ZERO:
            return basis
        column = (
            tableau[:-1, entering] if entering < terms + rows else -tableau[:-1, entering - rows]
        )
        able = np.flatnonzero(column > ZERO)
        leaving = able[(tableau[able, -1] / column[able]).argmin()]
        tableau[leaving] /= column[leaving]
        factors = np.append(column, costs[entering])
        factors[leaving] = 0
        tableau -= np.outer(factors, tableau[leaving])
        basis[leaving] = entering
