"""isobit in other people's programs."""
