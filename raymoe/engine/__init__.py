"""Sequences, the scheduler and the step loop of one router."""
