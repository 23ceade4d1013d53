"""What a simulated program uses of Python: time, threads, locks, events, environment variables, folder, script."""
