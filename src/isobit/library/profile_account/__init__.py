"""The contract profile-account-v1 with its claims and planted wrong accountants."""
