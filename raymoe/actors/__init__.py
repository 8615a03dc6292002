"""Thin Ray shells: ingress, router, expert group, controller."""
