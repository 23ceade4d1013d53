"""Contracts: files of executable claims about any kernel, and the code that judges them."""
