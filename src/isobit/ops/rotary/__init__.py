"""Rotary position embedding and its gradient."""
