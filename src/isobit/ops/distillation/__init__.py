"""The loss of knowledge distillation from hidden states: a divergence that is a sum of terms, none of them negative."""
