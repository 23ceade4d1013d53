"""All-reduce, reduce-scatter and all-gather with a fixed order of addition."""
