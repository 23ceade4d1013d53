"""The contract file format: parse and check contract files."""
