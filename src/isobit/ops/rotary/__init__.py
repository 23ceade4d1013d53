"""Rotary position embedding, forward and backward: a token has its bits wherever it stands in the batch."""
