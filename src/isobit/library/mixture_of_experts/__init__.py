"""The contract mixture-of-experts-v1 with its claims and planted wrong mixtures."""
