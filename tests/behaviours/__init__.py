"""What PyTorch's tests of AOTAutograd claim, as behaviours of ours; what has no meaning in JAX stands in a list."""
