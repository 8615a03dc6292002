"""What a Hugging Face folder holds: a router without experts, and slices of experts."""
