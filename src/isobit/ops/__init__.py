"""Operators that keep one order of addition."""
