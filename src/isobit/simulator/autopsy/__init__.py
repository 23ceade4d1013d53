"""A hang that already happened: read the dumps of torch's flight recorder and find the ranks that did not join.

`examine(folder)` in `examine.py` reads the files, lines up the calls of all ranks and names the cause in the words of
the simulator (`isobit.simulator.checkers`).
"""
