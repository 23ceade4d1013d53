"""What the portable executors share: rounding, sums, elementary functions and samples, in plain torch operations."""
