"""SwiGLU, silu(gate) times up with one rounding, forward and backward."""
