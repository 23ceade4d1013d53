"""What the Triton executors of operators share; import a module of this package to get its kernels.

[Note: rules for kernels]
The order of a kernel must be visible in its source, and the compiler must keep it:

- Floats are added only by elementwise `+` and by `tl.dot(a, b, accumulator)`. Trees are built by `reshape` and `split`
  (sums.py). `tl.sum`, `tl.reduce`, scans and atomics on floats are not used, because their order depends on the launch.
  Maxima have no order, and neither have sums of integers.
- Kernels are compiled with `enable_fp_fusion=False`. A fused multiply-add is written as `tl.math.fma`.
- Division is `tl.div_rn` and the square root `tl.sqrt_rn`; `tl.exp` and `tl.log` are approximations, so elementary.py
  has isobit's own.
- `-x` is 0 − x, which is +0 for +0; where the sign of a zero counts, it is written `x * -1.0`.
- Extents and row strides are `tl.constexpr`. With an extent at run time, loads are scalar and registers run out.
  The number of rows is not, and Triton does not specialise on it: one compiled kernel serves every batch.
- A name in upper case is `tl.constexpr`; what is known only at run time has small letters.
- The result of a `tl.dot` that starts from zero is never added to another tile directly: Triton would start the dot
  from that tile instead, which is another sum. sums.py has `fresh_dot` for it.
"""
