"""The `isobit` command: one module per command, three exit codes (0 kept, 1 broken, 2 could not run)."""
