"""Robust non-negative least squares: the solver of every fit of a cost model.

Large residuals count less (Huber, "Robust Estimation of a Location Parameter", 1964, by reweighting): a busy machine
makes steps long, never short. All coefficients are >= 0 (Lawson and Hanson, "Solving Least Squares Problems", 1974,
ch. 23): a model that gets cheaper with work is wrong off its data, however well it fits.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

_ROUNDS = 6  # of reweighting
_HUBER = 2.0  # residuals beyond that many robust standard deviations count less


def solve(
    rows: np.ndarray,
    target: np.ndarray,
    weights: np.ndarray,
    extra: np.ndarray | None = None,
    extra_target: np.ndarray | None = None,
) -> np.ndarray:
    """x >= 0 that makes |rows x - target| / weights small, robustly, beside |extra x - extra_target|.

    Args:
        rows: [N, K]; target, weights: [N].
        extra: [M, K], each row counted as often as there are rows; extra_target: [M], zeros when None.

    Returns:
        [K].
    """
    rows, target = rows / weights[:, None], target / weights
    if extra is None or not len(extra):
        extra, extra_target = np.zeros((0, rows.shape[1])), np.zeros(0)
    elif extra_target is None:
        extra_target = np.zeros(len(extra))
    scale = np.abs(np.concatenate((rows, extra))).max(axis=0)
    scale[scale == 0] = 1.0
    counts = np.ones(len(rows))
    solution = np.zeros(rows.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(counts)
        stacked = np.concatenate((rows * root[:, None], extra * np.sqrt(len(rows)))) / scale
        solution, _ = nnls(stacked, np.concatenate((target * root, extra_target * np.sqrt(len(rows)))))
        residuals = np.abs(rows / scale @ solution - target)
        limit = _HUBER * 1.4826 * float(np.median(residuals))
        if limit < 1e-9:
            break
        counts = np.minimum(1.0, limit / np.maximum(residuals, 1e-300))
    return solution / scale
