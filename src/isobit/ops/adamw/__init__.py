"""The step of AdamW, and the scaling of gradients by a number."""
