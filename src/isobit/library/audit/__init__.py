"""The contract audit-v1 with its claims, planted operators, clean models and planted wrong auditors."""
