"""SiLU and its gradient."""
