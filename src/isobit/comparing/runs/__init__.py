"""A training script, run twice: the step, tensor and operator of the first difference, and its cause.

The command is `isobit compare runs`. `observed_run.py` is the program of each run, `compare.py` reads both records, and
`run.py` finds out why they differ, by running the script again with one suspect fixed.
"""
