// Exact sums of values, or of their squares: integers in the end, so that they have no order at
// all.
//
// Values become fp64, where the square of an fp32 value is exact. Added to an accumulator that
// stays in the binade of 2^k, a value is rounded to a multiple of u = 2^(k - 52); what that drops
// is had exactly by two subtractions, and goes to the next, finer level, until nothing is left. An
// accumulator's bits then hold a whole number of u.
#include <ATen/Parallel.h>
#include <torch/library.h>
#include <bit>
#include <cmath>
#include <mutex>

#include "attested.h"
#include "rows.h"

namespace isobit {

namespace {

typedef double Doubles __attribute__((vector_size(64), aligned(8), may_alias));
typedef int64_t Wholes __attribute__((vector_size(64), aligned(8), may_alias));

constexpr int64_t block = 2048, chains = 4, width = 8;  // chains hide the latency of an addition
constexpr int64_t per_lane = block / (chains * width);  // additions to one accumulator
constexpr int room =
    std::bit_width(uint64_t(per_lane)) + 1;  // |sum| < 2^(k - 1) if |values| < 2^(k - room)
constexpr int64_t digits = 20;
constexpr int lowest = -320;  // the weight of digit i is 2^(32 i + lowest): below the least square,
                              // above 2^40 of the largest

constexpr int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// What is exchanged and merged: states are added, entry by entry, and carried.
struct State {
  int64_t digit[digits] = {};
  int64_t nans = 0, plus = 0, minus = 0;

  // whole · 2^exponent
  void add(int64_t whole, int exponent) {
    const int at = exponent - lowest;
    const __int128 wide = static_cast<__int128>(whole) << at % 32;
    int64_t* to = digit + at / 32;
    to[0] = to[0] + static_cast<int64_t>(wide & 0xffffffff);
    to[1] = to[1] + static_cast<int64_t>(wide >> 32 & 0xffffffff);
    to[2] = to[2] + static_cast<int64_t>(wide >> 64);
  }

  // All digits but the last in [0, 2^32): the one form of a number.
  void carry() {
    for (int64_t i = 0; i + 1 < digits; i++) {
      digit[i + 1] = digit[i + 1] + (digit[i] >> 32);
      digit[i] = digit[i] & 0xffffffff;
    }
  }

  void merge(const State& other) {
    for (int64_t i = 0; i < digits; i++) digit[i] = digit[i] + other.digit[i];
    nans += other.nans, plus += other.plus, minus += other.minus;
    carry();
  }
};
constexpr int64_t state_size = sizeof(State) / sizeof(int64_t);

// `count` elements as fp64, zeros up to whole rounds of the chains; the largest magnitude's fp32
// bits.
template <bool squared, class T>
ISOBIT_INLINE uint32_t widen_block(const T* x, int64_t count, double* values) {
  Lanes most{};
  for (int64_t at = 0; at < count; at += lane_count) {
    Floats some;
    widen_some(x + at, std::min(lane_count, count - at), 0.0f, some);
    const Lanes size = reinterpret_cast<Lanes>(some) & 0x7fffffffu;
    most = size > most ? size : most;
    Doubles low = __builtin_convertvector(
        __builtin_shufflevector(some, some, 0, 1, 2, 3, 4, 5, 6, 7), Doubles);
    Doubles high = __builtin_convertvector(
        __builtin_shufflevector(some, some, 8, 9, 10, 11, 12, 13, 14, 15), Doubles);
    *reinterpret_cast<Doubles*>(values + at) = squared ? low * low : low;
    *reinterpret_cast<Doubles*>(values + at + width) = squared ? high * high : high;
  }
  std::fill(values + round_up(count, lane_count), values + round_up(count, chains * width), 0.0);
  uint32_t found = 0;
  for (int64_t i = 0; i < lane_count; i++) found = std::max(found, most[i]);
  return found;
}

// One level: how many u the values hold; each keeps what it holds beyond. Says whether any does.
// Meanwhile the next block is fetched, or memory would wait for arithmetic.
template <class T>
ISOBIT_INLINE bool take_level(double* values, int64_t count, int exponent, const T* next,
                              int64_t& whole) {
  const Doubles base = Doubles{} + std::ldexp(1.5, exponent + 52);
  Doubles sum[chains];
  for (Doubles& chain : sum) chain = base;
  Wholes left{}, steps{};
  for (int64_t at = 0; at < count; at += chains * width) {
    for (int64_t i = 0; i < chains * width; i += 64 / sizeof(T)) __builtin_prefetch(next + at + i);
    for (int64_t c = 0; c < chains; c++) {
      Doubles& value = *reinterpret_cast<Doubles*>(values + at + c * width);
      const Doubles next = sum[c] + value, rest = value - (next - sum[c]);
      sum[c] = next, value = rest;
      left = left | reinterpret_cast<Wholes>(rest);
    }
  }
  for (const Doubles& chain : sum)
    steps = steps + (reinterpret_cast<Wholes>(chain) - reinterpret_cast<Wholes>(base));
  int64_t any = 0;
  whole = 0;
  for (int64_t i = 0; i < width; i++) whole += steps[i], any |= left[i];
  return any & INT64_MAX;  // without the sign of -0
}

void take_nonfinite(double* values, int64_t count, State& state) {
  for (int64_t i = 0; i < count; i++) {
    if (std::isfinite(values[i])) continue;
    ++(values[i] != values[i] ? state.nans : values[i] > 0 ? state.plus : state.minus);
    values[i] = 0.0;
  }
}

template <bool squared, class T>
ISOBIT_INLINE void add_all(const T* x, int64_t count, State& state) {
  double values[block];
  for (int64_t at = 0; at < count; at += block) {
    const int64_t size = std::min(block, count - at), padded = round_up(size, chains * width);
    const uint32_t most = widen_block<squared>(x + at, size, values);
    if (most == 0) continue;
    if (most >= 0x7f800000u) take_nonfinite(values, size, state);
    int above = std::min(static_cast<int>(most >> 23), 254) - 126;  // every |x| is below 2^above
    if (squared) above *= 2;
    for (bool left = true; left;) {
      const int exponent = std::max(above + room - 52, lowest);
      int64_t whole;
      left = take_level(values, padded, exponent, x + at + block, whole);
      state.add(whole, exponent);
      above = exponent;  // what is left is at most half a u
    }
    if (at / block % (1 << 20) == 0) state.carry();
  }
  state.carry();
}

#define ISOBIT_EXACT(T)                                                                  \
  ISOBIT_CLONES void add_values(const T* x, int64_t count, bool squared, State& state) { \
    squared ? add_all<true>(x, count, state) : add_all<false>(x, count, state);          \
  }
ISOBIT_EXACT(float)
ISOBIT_EXACT(BFloat16)
ISOBIT_EXACT(Half)

void add_tensor(const Tensor& given, bool squared, State& state) {
  const Tensor x = given.is_non_overlapping_and_dense() ? given : given.contiguous();
  std::mutex merging;
  by_type(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* data = x.const_data_ptr<T>();
    const int64_t count = x.numel(), blocks = (count + block - 1) / block;
    at::parallel_for(0, blocks, 16, [&](int64_t begin, int64_t end) {
      PlainArithmetic plain;
      State own;
      add_values(data + begin * block, std::min(end * block, count) - begin * block, squared, own);
      const std::lock_guard<std::mutex> held(merging);
      state.merge(own);
    });
  });
}

// ---- the one rounding
// ----------------------------------------------------------------------------------

struct Magnitude {
  const int64_t* digit;
  bool bit(int64_t at) const {
    return at >= 0 && at < 32 * digits && (digit[at / 32] >> at % 32 & 1);
  }
  bool any_below(int64_t end) const {
    for (int64_t at = 0; at < end; at++)
      if (bit(at)) return true;
    return false;
  }
};

// To nearest, ties to even: `precision` bits, none below 2^least.
double round_state(State state, int precision, int least) {
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
  const int64_t last = std::max<int64_t>({top - precision + 1, least - lowest, 0});
  uint64_t mantissa = 0;
  for (int64_t at = top; at >= last; at--) mantissa = 2 * mantissa + sum.bit(at);
  if (sum.bit(last - 1) && (mantissa % 2 || sum.any_below(last - 1))) mantissa++;
  const double size = std::ldexp(static_cast<double>(mantissa), static_cast<int>(last) + lowest);
  return negative && mantissa ? -size : size;
}

Tensor exact_state(at::TensorList tensors, bool squared) {
  check_attested();
  State state;
  for (const Tensor& x : tensors) add_tensor(x, squared, state);
  Tensor out = empty_tensor({state_size}, at::kLong);
  std::memcpy(out.mutable_data_ptr<int64_t>(), &state, sizeof(State));
  return out;
}

Tensor exact_round(const Tensor& given, at::ScalarType type) {
  check_attested();
  TORCH_CHECK(given.dim() == 1 && given.numel() == state_size && given.scalar_type() == at::kLong &&
                  (type == at::kFloat || type == at::kDouble),
              "isobit: expected a state of ", state_size, " int64 and fp32 or fp64, received ",
              given.sizes(), " ", given.scalar_type(), " and ", type,
              "; remedy: take it from isobit::exact_state");
  State state;
  std::memcpy(static_cast<void*>(&state), given.contiguous().const_data_ptr<int64_t>(),
              sizeof(State));
  PlainArithmetic plain;
  const bool narrow = type == at::kFloat;
  const double value = round_state(state, narrow ? 24 : 53, narrow ? -149 : -1074);
  Tensor out = empty_tensor({}, type);
  if (narrow)
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
