"""Options of the commands that load torch, readable without it."""
