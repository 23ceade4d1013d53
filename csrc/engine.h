// The tile engine: oneDNN's brgemm micro-kernel, as libtorch exports it.
#pragma once

#include <ATen/native/CPUBlas.h>

#include "packing.h"

namespace isobit {

namespace engine = at::native::cpublas;

// Whether the engine takes elements of type T in pairs along the summed axis (bf16 on AMX).
template <class T>
constexpr bool paired = sizeof(T) == 2;

// The paired engine adds blocks of this many elements: the sum of the even ones, plus that of the
// odd ones.
constexpr int64_t engine_block = 32;

// Whether this machine's engine takes bf16 in pairs (AMX).
bool engine_pairs_bf16();

// The dtype in which tensors of a dtype enter the engine: bf16 where it takes pairs, else fp32.
at::ScalarType engine_dtype(at::ScalarType dtype);

struct LeafShape {
  int64_t rows, cols, length;  // length of the summed axis
};

// sum = left · right, or sum + left · right if `accumulate`. Each output is one chain.
//   left   [rows][length]
//   right  [length][cols], as packed by pack_columns with width = right.stride
//   sum    [rows][cols]
// If 32 does not divide the length, the paired engine uses blocks of the largest even divisor of
// the length, and so another order (docs/decisions/0006). The defined order is that of whole blocks
// first, then the rest accumulated onto them.
template <class T>
void multiply_leaf(const LeafShape& shape, RowMajor<const T> left, RowMajor<const T> right,
                   RowMajor<float> sum, bool accumulate) {
  const int64_t whole = paired<T> ? shape.length / engine_block * engine_block : 0;
  if (whole > 0)
    engine::brgemm(shape.rows, shape.cols, whole, left.stride, right.stride, sum.stride, accumulate,
                   left.data, right.data, sum.data, paired<T>);
  if (whole < shape.length)
    engine::brgemm(shape.rows, shape.cols, shape.length - whole, left.stride, right.stride,
                   sum.stride, accumulate || whole > 0, left.data + whole,
                   right.data + whole * right.stride, sum.data, paired<T>);
}

}  // namespace isobit
