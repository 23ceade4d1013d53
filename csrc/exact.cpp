// Exact sums of values, or of their squares, correctly rounded: they do not depend on any order.
// How they are added is in exact_sum.h.
#include <torch/library.h>
#include <mutex>
#include <vector>

#include "attestation.h"
#include "exact_sum.h"
#include "pieces.h"
#include "rows.h"

namespace isobit {

namespace {

using namespace exact;

#define ISOBIT_EXACT(versions, T)                                                     \
  versions void add_values(const T* x, int64_t count, bool squared, State& state) {   \
    squared ? add_blocks<true>(x, count, state) : add_blocks<false>(x, count, state); \
  }
ISOBIT_EXACT(ISOBIT_CLONES, float)
ISOBIT_EXACT(ISOBIT_CLONES, BFloat16)
ISOBIT_EXACT(ISOBIT_CLONES, Half)
#ifdef ISOBIT_AVX512
ISOBIT_EXACT(ISOBIT_AVX512, HardwareHalf)
#endif

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
      dispatch_hardware_dtype("exact_sum", dense[i].scalar_type(), [&](auto tag) {
        using T = typename decltype(tag)::type;
        add_values(elements<T>(dense[i]) + begin, end - begin, squared, task_state);
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
