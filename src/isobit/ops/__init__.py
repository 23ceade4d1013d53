"""Operators with one order of addition, one folder each."""
