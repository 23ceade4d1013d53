"""Logs of training runs: readers, and the rules that `isobit runlog` judges. Does not import torch."""
