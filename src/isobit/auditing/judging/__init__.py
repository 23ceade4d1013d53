"""Which operators are guilty, how accurate they are, and what each does to the output."""
