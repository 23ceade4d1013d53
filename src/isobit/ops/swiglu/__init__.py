"""SwiGLU and its gradient."""
