// Exact sums of values, or of their squares: the state, and the kernel that adds a run of values.
//
// Values become fp64, where the square of an fp32 value is exact. They are added to an accumulator
// that stays in the binade of 2^k, which rounds each value to a multiple of u = 2^(k - 52). Two
// subtractions give exactly what this rounding dropped. The dropped parts are added at the next,
// finer level, until nothing is left. The bits of an accumulator then are an integer number of u,
// and integers are added without rounding.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "half.h"
#include "lanes.h"

namespace isobit::exact {

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

// The fp32 bits of the largest magnitude of x [block], and of the smallest that is not zero, which
// is UINT32_MAX + 1 = 0 if all are zero.
struct Magnitudes {
  uint32_t largest, smallest;
};
template <class T>
ISOBIT_INLINE Magnitudes magnitudes_of_block(const T* x) {
  Uint32s lane_max{}, lane_min = Uint32s{} - 1u;  // lane_min: less one, so that zero is the largest
  for (int64_t at = 0; at < block; at += lane_count) {
    Floats lanes;
    load(x + at, lanes);
    const Uint32s magnitude = reinterpret_cast<Uint32s>(lanes) & 0x7fffffffu, less = magnitude - 1u;
    lane_max = magnitude > lane_max ? magnitude : lane_max;
    lane_min = less < lane_min ? less : lane_min;
  }
  uint32_t largest = 0, smallest = UINT32_MAX;
  for (int64_t i = 0; i < lane_count; i++) {
    largest = std::max(largest, lane_max[i]);
    smallest = std::min(smallest, lane_min[i]);
  }
  return {largest, smallest + 1};
}

// Every |value|, or square, is below 2^bound if `largest` has the bits of the largest value.
ISOBIT_INLINE int bound_of(uint32_t largest, bool squared) {
  const int bound = std::min(static_cast<int>(largest >> 23), 254) - 126;
  return squared ? 2 * bound : bound;
}

// The exponent of u at the first level, and after a level with u = 2^bound.
ISOBIT_INLINE int exponent_below(int bound) {
  return std::max(bound + headroom - 52, lowest_exponent);
}

// Every value, or square, is a multiple of 2^exponent, where `smallest` has the bits of the
// smallest value that is not zero.
template <class T>
ISOBIT_INLINE int exponent_of_last_bit(uint32_t smallest, bool squared) {
  constexpr int fraction = std::is_same_v<T, float> ? 23 : std::is_same_v<T, BFloat16> ? 7 : 10;
  const int last = std::max(static_cast<int>(smallest >> 23), 1) - 127 - fraction;
  return squared ? 2 * last : last;
}

// The number of u = 2^exponent in the chains, which began at `base`.
ISOBIT_INLINE int64_t count_steps(const Doubles (&sum)[chains], const Doubles& base) {
  Int64s steps{};
  for (const Doubles& chain : sum)
    steps += reinterpret_cast<Int64s>(chain) - reinterpret_cast<Int64s>(base);
  int64_t integer = 0;
  for (int64_t i = 0; i < width; i++) integer += steps[i];
  return integer;
}

// Adds x [block] in registers, at one level or at two. The caller knows that the last level, with
// u = 2^exponents[levels - 1], leaves no remainder.
template <bool squared, int levels, class T>
ISOBIT_INLINE void add_levels(const T* x, const int (&exponents)[2], State& state) {
  Doubles base[levels], sum[levels][chains];
  for (int level = 0; level < levels; level++) {
    base[level] = Doubles{} + std::ldexp(1.5, exponents[level] + 52);
    for (Doubles& chain : sum[level]) chain = base[level];
  }
  for (int64_t at = 0; at < block; at += chains * width) {
    for (int64_t i = 0; i < chains * width; i += 64 / sizeof(T))
      __builtin_prefetch(x + block + at + i);
    for (int64_t half = 0; half < chains / 2; half++) {
      Floats lanes;
      load(x + at + half * lane_count, lanes);
      Doubles values[2] = {
          __builtin_convertvector(__builtin_shufflevector(lanes, lanes, 0, 1, 2, 3, 4, 5, 6, 7),
                                  Doubles),
          __builtin_convertvector(
              __builtin_shufflevector(lanes, lanes, 8, 9, 10, 11, 12, 13, 14, 15), Doubles)};
      for (int64_t i = 0; i < 2; i++) {
        Doubles value = squared ? values[i] * values[i] : values[i];
        Doubles& first = sum[0][2 * half + i];
        const Doubles rounded = first + value;
        // Order: none. Every addition is exact, up to the remainder.
        if constexpr (levels == 2) {
          value = value - (rounded - first);
          Doubles& second = sum[1][2 * half + i];
          second = second + value;
        }
        first = rounded;
      }
    }
  }
  for (int level = 0; level < levels; level++)
    state.add(count_steps(sum[level], base[level]), exponents[level]);
}

// Adds x [block] if its values are finite and at most two levels hold all their bits: those of
// values within a factor of 2^20 of each other, or 2^14 at one level. Returns whether it did.
template <bool squared, class T>
ISOBIT_INLINE bool add_whole_block(const T* x, State& state) {
  const auto [largest, smallest] = magnitudes_of_block(x);
  if (largest == 0) return true;
  if (largest >= 0x7f800000u) return false;
  const int first = exponent_below(bound_of(largest, squared));
  const int exponents[2] = {first, exponent_below(first)};
  const int last = exponent_of_last_bit<T>(smallest, squared);
  if (last < exponents[1]) return false;
  if (last >= first)
    add_levels<squared, 1>(x, exponents, state);
  else
    add_levels<squared, 2>(x, exponents, state);
  return true;
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
inline void count_nonfinite(double* values, int64_t count, State& state) {
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
    if (at / block % (1 << 20) == 0) state.carry();
    if (size == block && add_whole_block<squared>(x + at, state)) continue;
    const uint32_t largest = widen_block<squared>(x + at, size, values);
    if (largest == 0) continue;
    if (largest >= 0x7f800000u) count_nonfinite(values, size, state);
    int bound = bound_of(largest, squared);
    for (bool any_left = true; any_left;) {
      const int exponent = exponent_below(bound);
      int64_t integer;
      any_left = extract_level(values, padded, exponent, x + at + block, integer);
      state.add(integer, exponent);
      bound = exponent;  // a remainder is at most u / 2
    }
  }
  state.carry();
}

}  // namespace isobit::exact
