"""A certificate as text, HTML and JSON; from records only, without torch."""
