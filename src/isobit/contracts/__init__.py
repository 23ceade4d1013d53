"""Promises as data: subjects, transforms that must not matter, relations that judge, sabotage that must be caught."""
