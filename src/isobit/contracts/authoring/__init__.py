"""Tools for people who write contracts: scaffold a file, lint it, explain it in words."""
