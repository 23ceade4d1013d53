"""The `isobit` command: one file a command, three exit codes (0 kept, 1 broken, 2 could not run)."""
