"""Operators with one order of addition, one folder each; read reference.py, then portable.py, then op.py."""
