"""Numbers of Criteo's Kaggle data: what the built-in click stream imitates.

Categorical: cardinality of the whole Kaggle file (45.8 million rows); s and q of the Zipf-Mandelbrot law
p(rank) ~ (rank + q)**-s, rank = 1, 2, ..., fitted to the first 10,000 rows; share of missing values, which count as
one value of their column. Dense: of the same rows, mean and standard deviation of log(1 + x), share of missing.
"""

from __future__ import annotations

from typing import NamedTuple


class Categorical(NamedTuple):
    """Statistics of a column of ids: cardinality and skew."""

    cardinality: int
    s: float
    q: float
    missing: float


class Numeric(NamedTuple):
    """A dense column, as log(1 + x)."""

    mean: float
    std: float
    missing: float


CATEGORICAL = (  # C1 to C26
    Categorical(1460, 1.95, 0.27, 0.0),
    Categorical(583, 1.65, 5.28, 0.0),
    Categorical(10131227, 1.05, 0.73, 0.0357),
    Categorical(2202608, 1.1, 0.73, 0.0357),
    Categorical(305, 2.6, 0.38, 0.0),
    Categorical(24, 3.0, 0.0, 0.1332),
    Categorical(12517, 1.15, 27.54, 0.0),
    Categorical(633, 2.3, 0.38, 0.0),
    Categorical(3, 3.0, 0.0, 0.0),
    Categorical(93145, 1.1, 0.0, 0.0),
    Categorical(5683, 1.25, 19.79, 0.0),
    Categorical(8351593, 1.05, 0.73, 0.0357),
    Categorical(3194, 1.2, 14.22, 0.0),
    Categorical(27, 3.0, 1.01, 0.0),
    Categorical(14992, 1.4, 27.54, 0.0),
    Categorical(5461306, 1.1, 1.41, 0.0357),
    Categorical(10, 1.75, 0.73, 0.0),
    Categorical(5652, 1.55, 14.22, 0.0),
    Categorical(2173, 1.5, 0.0, 0.4496),
    Categorical(4, 0.95, 0.14, 0.4496),
    Categorical(7046547, 1.1, 1.41, 0.0357),
    Categorical(18, 3.0, 0.0, 0.8182),
    Categorical(15, 2.8, 1.96, 0.0),
    Categorical(286181, 1.25, 1.96, 0.0357),
    Categorical(105, 3.0, 1.41, 0.4496),
    Categorical(142572, 1.25, 0.0, 0.4496),
)

NUMERIC = (  # I1 to I13
    Numeric(0.80, 0.98, 0.4481),
    Numeric(2.12, 2.13, 0.0),
    Numeric(2.25, 1.28, 0.2037),
    Numeric(1.73, 0.96, 0.1978),
    Numeric(7.24, 2.90, 0.0494),
    Numeric(3.58, 1.81, 0.2511),
    Numeric(1.54, 1.36, 0.0492),
    Numeric(2.06, 1.18, 0.0010),
    Numeric(3.61, 1.69, 0.0492),
    Numeric(0.38, 0.39, 0.4481),
    Numeric(0.85, 0.74, 0.0492),
    Numeric(0.30, 0.61, 0.7735),
    Numeric(1.88, 1.06, 0.1978),
)
