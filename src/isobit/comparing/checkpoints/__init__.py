"""Checkpoints of every common format, read tensor by tensor and compared bit for bit.

The command is `isobit compare checkpoints`. Start with `compare.py`; `readers.py` finds the format of a path.
"""
