// Exact sums of values, or of their squares, correctly rounded: they do not depend on any order.
//
// Values become fp64, where the square of an fp32 value is exact. They are added to an accumulator
// that stays in the binade of 2^k, which rounds each value to a multiple of u = 2^(k - 52). Two
// subtractions give exactly what this rounding dropped. The dropped parts are added at the next,
// finer level, until nothing is left. The bits of an accumulator then are an integer number of u,
// and integers are added without rounding.
#include <torch/library.h>
#include <bit>
#include <cmath>
#include <mutex>
#include <vector>

#include "attestation.h"
#include "pieces.h"
#include "rows.h"

namespace isobit {

namespace {

// Eight lanes each.
typedef double Doubles __attribute__((vector_size(64), aligned(8), may_alias));
typedef int64_t Int64s __attribute__((vector_size(64), aligned(8), may_alias));

constexpr int64_t block = 2048;           // elements that are reduced to integers together
constexpr int64_t piece = 16 * block;     // elements per call of a kernel, at most
constexpr int64_t chains = 4, width = 8;  // several chains hide the latency of an addition
constexpr int64_t per_lane = block / (chains * width);  // additions to one accumulator
// |sum| < 2^(k - 1) if |values| < 2^(k - headroom).
constexpr int headroom = std::bit_width(uint64_t(per_lane)) + 1;
// The weight of digit i is 2^(32 i + lowest_exponent): from below the smallest square to above 2^40
// of the largest.
constexpr int64_t digits = 20;
constexpr int lowest_exponent = -320;

constexpr int64_t round_up(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// An exact number, as ranks exchange it: states are merged by adding them entry by entry.
struct State {
  int64_t digit[digits] = {};
  int64_t nans = 0, plus = 0, minus = 0;  // counts of NaN, +inf and -inf

  // Adds integer · 2^exponent.
  void add(int64_t integer, int exponent) {
    const int at = exponent - lowest_exponent;
    const __int128 shifted = static_cast<__int128>(integer) << at % 32;
    int64_t* first = digit + at / 32;  // [3]
    first[0] += static_cast<int64_t>(shifted & 0xffffffff);
    first[1] += static_cast<int64_t>(shifted >> 32 & 0xffffffff);
    first[2] += static_cast<int64_t>(shifted >> 64);
  }

  // Brings all digits but the last into [0, 2^32), which makes the form of a number unique.
  void carry() {
    for (int64_t i = 0; i + 1 < digits; i++) {
      digit[i + 1] += digit[i] >> 32;
      digit[i] &= 0xffffffff;
    }
  }

  void merge(const State& other) {
    for (int64_t i = 0; i < digits; i++) digit[i] += other.digit[i];
    nans += other.nans;
    plus += other.plus;
    minus += other.minus;
    carry();
  }
};
constexpr int64_t state_size = sizeof(State) / sizeof(int64_t);

// Writes x [count] as fp64, or its squares, to values [block], with zeros up to whole rounds of the
// chains. Returns the fp32 bits of the largest magnitude.
template <bool squared, class T>
ISOBIT_INLINE uint32_t widen_block(const T* x, int64_t count, double* values) {
  Uint32s lane_max{};
  for (int64_t at = 0; at < count; at += lane_count) {
    Floats lanes;
    load_lanes(x + at, std::min(lane_count, count - at), 0.0f, lanes);
    const Uint32s magnitude = reinterpret_cast<Uint32s>(lanes) & 0x7fffffffu;
    lane_max = magnitude > lane_max ? magnitude : lane_max;
    Doubles low = __builtin_convertvector(
        __builtin_shufflevector(lanes, lanes, 0, 1, 2, 3, 4, 5, 6, 7), Doubles);
    Doubles high = __builtin_convertvector(
        __builtin_shufflevector(lanes, lanes, 8, 9, 10, 11, 12, 13, 14, 15), Doubles);
    *reinterpret_cast<Doubles*>(values + at) = squared ? low * low : low;
    *reinterpret_cast<Doubles*>(values + at + width) = squared ? high * high : high;
  }
  std::fill(values + round_up(count, lane_count), values + round_up(count, chains * width), 0.0);
  uint32_t largest = 0;
  for (int64_t i = 0; i < lane_count; i++) largest = std::max(largest, lane_max[i]);
  return largest;
}

// One level, with u = 2^exponent: sets `integer` to the number of u in the sum of values [count],
// and replaces each value by its remainder. Returns whether any remainder is not zero. Prefetches
// the next block, `next` [count], so that memory does not wait for arithmetic.
template <class T>
ISOBIT_INLINE bool extract_level(double* values, int64_t count, int exponent, const T* next,
                                 int64_t& integer) {
  const Doubles base = Doubles{} + std::ldexp(1.5, exponent + 52);
  Doubles sum[chains];
  for (Doubles& chain : sum) chain = base;
  Int64s remainder_bits{}, steps{};
  for (int64_t at = 0; at < count; at += chains * width) {
    for (int64_t i = 0; i < chains * width; i += 64 / sizeof(T)) __builtin_prefetch(next + at + i);
    for (int64_t c = 0; c < chains; c++) {
      Doubles& value = *reinterpret_cast<Doubles*>(values + at + c * width);
      // Order: none. Every addition to a chain is exact, up to the remainder.
      const Doubles rounded = sum[c] + value, remainder = value - (rounded - sum[c]);
      sum[c] = rounded;
      value = remainder;
      remainder_bits |= reinterpret_cast<Int64s>(remainder);
    }
  }
  for (const Doubles& chain : sum)
    steps += reinterpret_cast<Int64s>(chain) - reinterpret_cast<Int64s>(base);
  int64_t any = 0;
  integer = 0;
  for (int64_t i = 0; i < width; i++) {
    integer += steps[i];
    any |= remainder_bits[i];
  }
  return any & INT64_MAX;  // without the sign of -0
}

// Counts NaN and infinities of values [count], and replaces them by zero.
void count_nonfinite(double* values, int64_t count, State& state) {
  for (int64_t i = 0; i < count; i++) {
    if (std::isfinite(values[i])) continue;
    ++(values[i] != values[i] ? state.nans : values[i] > 0 ? state.plus : state.minus);
    values[i] = 0.0;
  }
}

// Adds x [count].
template <bool squared, class T>
ISOBIT_INLINE void add_blocks(const T* x, int64_t count, State& state) {
  double values[block];
  for (int64_t at = 0; at < count; at += block) {
    const int64_t size = std::min(block, count - at), padded = round_up(size, chains * width);
    const uint32_t largest = widen_block<squared>(x + at, size, values);
    if (largest == 0) continue;
    if (largest >= 0x7f800000u) count_nonfinite(values, size, state);
    // Every |value| is below 2^bound.
    int bound = std::min(static_cast<int>(largest >> 23), 254) - 126;
    if (squared) bound *= 2;
    for (bool any_left = true; any_left;) {
      const int exponent = std::max(bound + headroom - 52, lowest_exponent);
      int64_t integer;
      any_left = extract_level(values, padded, exponent, x + at + block, integer);
      state.add(integer, exponent);
      bound = exponent;  // a remainder is at most u / 2
    }
    if (at / block % (1 << 20) == 0) state.carry();
  }
  state.carry();
}

#define ISOBIT_EXACT(T)                                                                  \
  ISOBIT_CLONES void add_values(const T* x, int64_t count, bool squared, State& state) { \
    squared ? add_blocks<true>(x, count, state) : add_blocks<false>(x, count, state);    \
  }
ISOBIT_EXACT(float)
ISOBIT_EXACT(BFloat16)
ISOBIT_EXACT(Half)

void add_tensors(at::TensorList tensors, bool squared, State& state) {
  std::vector<Tensor> dense;  // elements in memory order: a sum does not depend on it
  std::vector<int64_t> counts;
  for (const Tensor& t : tensors) {
    dispatch_dtype("exact_sum", t.scalar_type(), [](auto) {});
    dense.push_back(t.is_non_overlapping_and_dense() ? t : t.contiguous());
    counts.push_back(t.numel());
  }
  std::mutex merging;
  parallel_pieces(counts, piece, [&](const auto& visit) {
    FixedFpEnvironment fp_environment;
    State task_state;
    visit([&](size_t i, int64_t begin, int64_t end) {
      dispatch_dtype("exact_sum", dense[i].scalar_type(), [&](auto tag) {
        using T = typename decltype(tag)::type;
        add_values(dense[i].template const_data_ptr<T>() + begin, end - begin, squared, task_state);
      });
    });
    const std::lock_guard<std::mutex> lock(merging);
    state.merge(task_state);
  });
}

// The bits of a number that is not negative.
struct Magnitude {
  const int64_t* digit;  // [digits], not owned
  bool bit(int64_t at) const {
    return at >= 0 && at < 32 * digits && (digit[at / 32] >> at % 32 & 1);
  }
  bool any_below(int64_t end) const {
    for (int64_t at = 0; at < end; at++)
      if (bit(at)) return true;
    return false;
  }
};

// Rounds to nearest, ties to even, to `precision` bits and none below 2^least_exponent.
double round_state(State state, int precision, int least_exponent) {
  if (state.nans || (state.plus && state.minus)) return std::nan("");
  if (state.plus || state.minus) return state.plus ? HUGE_VAL : -HUGE_VAL;
  state.carry();
  const bool negative = state.digit[digits - 1] < 0;
  if (negative) {
    for (int64_t& d : state.digit) d = -d;
    state.carry();
  }
  const Magnitude sum{state.digit};
  int64_t top = 32 * digits - 1;
  while (top >= 0 && !sum.bit(top)) top--;
  const int64_t last =
      std::max<int64_t>({top - precision + 1, least_exponent - lowest_exponent, 0});
  uint64_t mantissa = 0;
  for (int64_t at = top; at >= last; at--) mantissa = 2 * mantissa + sum.bit(at);
  if (sum.bit(last - 1) && (mantissa % 2 || sum.any_below(last - 1))) mantissa++;
  const double magnitude =
      std::ldexp(static_cast<double>(mantissa), static_cast<int>(last) + lowest_exponent);
  return negative && mantissa ? -magnitude : magnitude;
}

Tensor exact_state(at::TensorList tensors, bool squared) {
  check_attested();
  State state;
  add_tensors(tensors, squared, state);
  Tensor out = empty_tensor({state_size}, at::kLong);
  std::memcpy(out.mutable_data_ptr<int64_t>(), &state, sizeof(State));
  return out;
}

Tensor exact_round(const Tensor& state_tensor, at::ScalarType dtype) {
  check_attested();
  ISOBIT_CHECK(state_tensor.dim() == 1 && state_tensor.numel() == state_size &&
                   state_tensor.scalar_type() == at::kLong,
               "exact_sum", c10::str("a state, int64 [", state_size, "]"), describe(state_tensor),
               "pass what torch.ops.isobit.exact_state returned");
  ISOBIT_CHECK(dtype == at::kFloat || dtype == at::kDouble, "exact_sum",
               "float32 or float64 as the dtype of the result", dtype_name(dtype),
               "round to one of them first");
  State state;
  std::memcpy(static_cast<void*>(&state), state_tensor.contiguous().const_data_ptr<int64_t>(),
              sizeof(State));
  FixedFpEnvironment fp_environment;
  const bool is_fp32 = dtype == at::kFloat;
  const double value = round_state(state, is_fp32 ? 24 : 53, is_fp32 ? -149 : -1074);
  Tensor out = empty_tensor({}, dtype);
  if (is_fp32)
    *out.mutable_data_ptr<float>() = static_cast<float>(value);  // exact, or beyond the largest
  else
    *out.mutable_data_ptr<double>() = value;
  return out;
}

Tensor exact_sum(const Tensor& x) {
  return exact_round(exact_state(at::TensorList(&x, 1), false), at::kFloat);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def("exact_state(Tensor[] tensors, bool squared) -> Tensor");
  m.def("exact_round(Tensor state, ScalarType dtype) -> Tensor");
  m.def("exact_sum(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("exact_state", &exact_state);
  m.impl("exact_round", &exact_round);
  m.impl("exact_sum", &exact_sum);
}

}  // namespace isobit
