"""The gated delta rule of linear attention, with a state that is carried from call to call, and its gradients."""
