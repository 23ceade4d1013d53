"""What a simulated program sees of Python: time, threads, locks, environment, files."""
