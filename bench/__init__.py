"""Benchmarks, named by `python -m bench list`. Figures are ratios against a peer or a limit of the same run."""
