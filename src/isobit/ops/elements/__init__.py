"""What silu, gelu, swiglu and rotary share."""
