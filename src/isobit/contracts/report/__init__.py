"""Contracts and their evidence as pages, graphs, JUnit and SARIF; without torch."""
