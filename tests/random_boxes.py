"""Boxes for property tests: a hypothesis strategy."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp


@st.composite
def box_sets(draw, most=40):
    """Boxes on a quarter-pixel lattice, so overlaps, equal boxes, touching and empty ones occur."""
    n = draw(st.integers(0, most))
    reach = draw(st.sampled_from([8, 60, 4000]))
    corner = draw(hnp.arrays(np.int64, (n, 2), elements=st.integers(-reach, reach)))
    longest = draw(st.sampled_from([3, 40, 3000]))
    side = draw(hnp.arrays(np.int64, (n, 2), elements=st.integers(0, longest)))
    scores = draw(hnp.arrays(np.float32, n, elements=st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.9])))
    labels = draw(hnp.arrays(np.int64, n, elements=st.integers(0, 2)))
    first = draw(hnp.arrays(np.bool_, n))
    return np.hstack([corner, corner + side]).astype(np.float32) / 4, scores, labels, first
