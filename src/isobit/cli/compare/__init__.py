"""Commands that compare two things that should be equal."""
