"""The embedding, and the gradient of its table, with one order of addition."""
