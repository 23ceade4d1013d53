"""Commands about contracts that judge nothing new."""
