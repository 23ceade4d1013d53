"""Compare the names of all configurations, and say where two expressions differ."""
