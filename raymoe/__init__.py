"""raymoe serves Mixture-of-Experts language models on Ray, one actor per expert group."""

__version__ = "0.1.0"
