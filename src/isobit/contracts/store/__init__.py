"""The contracts of a folder, their digests, their evidence, and the ladder L0 to L4."""
