"""Claims and planted wrong kernels that silu-, gelu- and swiglu-kernel-v1 share."""
