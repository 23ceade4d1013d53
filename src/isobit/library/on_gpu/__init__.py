"""isobit's own contracts, judged on the Triton executors: what applies, on which cases, against which wrong kernels."""
