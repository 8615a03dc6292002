"""Tensor channels between one router and one expert group."""
