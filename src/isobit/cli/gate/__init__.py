"""Commands that compare raw bits of a whole model or training run in every layout."""
