"""What the contracts of isobit's own operators claim beyond the library, how it is proved, and what is planted."""
