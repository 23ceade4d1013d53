"""What is known about contracts: their digests, the evidence, and the ladder L0 to L4."""
