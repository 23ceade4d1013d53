"""Operators as they were called: recorded, called again on one sample's rows, substituted."""
