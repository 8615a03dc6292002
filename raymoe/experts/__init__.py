"""What an expert group does: slots, kernels, its serve loop."""
