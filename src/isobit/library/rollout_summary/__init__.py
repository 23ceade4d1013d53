"""The contract rollout-summary-v1: metrics of a rollout from summaries that workers merge."""
