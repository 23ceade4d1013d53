"""Mixture of experts: routes of tokens, dispatched rows, products of all experts, and their combination."""
