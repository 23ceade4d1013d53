"""A profile in words and as an HTML report; from records only, without torch."""
