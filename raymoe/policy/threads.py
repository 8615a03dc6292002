"""How many threads a process of the data plane gets, and how they wait."""

from __future__ import annotations

SPIN_COUNT = 3000
"""Turns that an idle OpenMP thread waits for its next piece of work before it sleeps.

The router's threads and the expert groups compute in turns on the same cores. GNU OpenMP's own default spins for
milliseconds after each operator, on a core that a group needs by then; none at all makes each operator pay for a
wake-up. See docs/decisions.md for the figures.
"""


def thread_environment(threads: int) -> dict[str, str]:
    """Environment of a process that computes with `threads` threads; read when torch is loaded."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": str(SPIN_COUNT),
    }
