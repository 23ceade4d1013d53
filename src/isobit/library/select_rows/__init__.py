"""The contract select-rows-v1 with its claims and planted wrong selections."""
