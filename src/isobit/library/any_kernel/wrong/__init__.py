"""Wrong kernels, each with one mistake that kernels have had; contracts of any kernel must notice every one."""
