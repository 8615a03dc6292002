"""What runs inside the model's forward: packed cache, attention, step context, sampler."""
