"""Contracts: files of executable claims about any kernel, and the engine that judges them."""
