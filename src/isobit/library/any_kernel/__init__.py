"""Contracts that any good kernel can keep: no claim asks for isobit's order, bits or error classes."""
