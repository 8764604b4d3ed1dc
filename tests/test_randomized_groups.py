"""Randomized response: the matrix, its inverse, and training with corrected prices."""

import math

import numpy as np
import pytest

from fedgft.errors import FedgftError
from fedgft.metrics.randomized_response import correction_matrix, response_matrix


@pytest.mark.parametrize("k", [2, 3, 7])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.0, 8.0])
def test_the_matrix_is_randomized_response_and_its_inverse_is_exact(k, epsilon):
    matrix = response_matrix(k, epsilon)
    keep = math.exp(epsilon) / (math.exp(epsilon) + k - 1)
    expected = [[keep if h == g else (1 - keep) / (k - 1) for g in range(k)] for h in range(k)]
    np.testing.assert_allclose(matrix, expected, rtol=1e-12)
    np.testing.assert_allclose(matrix.sum(0), 1, rtol=1e-12)
    np.testing.assert_allclose(correction_matrix(k, epsilon), np.linalg.inv(matrix), rtol=1e-9)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 1e-6, 51.0, math.inf, math.nan])
def test_an_epsilon_that_is_no_use_is_named(epsilon):
    with pytest.raises(FedgftError) as caught:
        response_matrix(2, epsilon)
    assert caught.value.field == "randomized_groups"
