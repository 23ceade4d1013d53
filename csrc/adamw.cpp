// AdamW's step, and the scaling of gradients, in place: functions of one element, for all tensors
// in one parallel region.
//
// A value has the same result in the vector body and in the tail of a loop, so neither the number
// of threads nor the place of an element matters. The definition is in ops/adamw/portable.py.
#include <ATen/ops/clone.h>
#include <torch/library.h>
#include <algorithm>
#include <array>
#include <bit>
#include <utility>
#include <vector>

#include "attestation.h"
#include "dtypes.h"
#include "fp_environment.h"
#include "half.h"
#include "lanes.h"
#include "pieces.h"

namespace isobit {

namespace {

constexpr int64_t piece = 16384;  // elements per call of a kernel, at most

// The numbers of a step; their meaning is in ops/adamw/portable.py, in this order.
struct Numbers {
  float decay, keep_mean, add_mean, keep_square, add_square, spread, eps, rate;
};
constexpr int64_t number_count = sizeof(Numbers) / sizeof(float);

// Correctly rounded square roots.
ISOBIT_INLINE void square_root(const Floats& x, Floats& root) {
  float values[lane_count];
  *reinterpret_cast<Floats*>(values) = x;
  for (int64_t i = 0; i < lane_count; i++) values[i] = __builtin_sqrtf(values[i]);
  root = *reinterpret_cast<Floats*>(values);
}

// Rounds to T and widens again. A NaN stays NaN.
template <class T>
ISOBIT_INLINE void round_and_widen(Floats& values) {
  if constexpr (std::is_same_v<T, BFloat16>) {  // in registers
    const Uint32s bits = reinterpret_cast<Uint32s>(values);
    const Uint32s rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    values = values != values ? values : reinterpret_cast<Floats>(rounded);
  } else if constexpr (!std::is_same_v<T, float>) {
    T rounded[lane_count];
    round_to(values, rounded);
    load(rounded, values);
  }
}

// Elements [at, at + count), count <= 16, of a parameter, its gradient and its moments. If
// `scaled`, the gradient is multiplied by a factor first.
template <bool scaled, class T>
ISOBIT_INLINE void step_lanes(T* p, const T* grad, T* first, T* second, int64_t at, int64_t count,
                              const Numbers& n, float factor) {
  Floats value, g, mean, square, root;
  load_lanes(p + at, count, 0.0f, value);
  load_lanes(grad + at, count, 0.0f, g);
  if (scaled) {  // as scale_elements does in memory
    g = g * factor;
    round_and_widen<T>(g);
  }
  load_lanes(first + at, count, 0.0f, mean);
  load_lanes(second + at, count, 0.0f, square);
  mean = mean * n.keep_mean + g * n.add_mean;
  square = square * n.keep_square + g * n.add_square * g;
  square_root(square, root);
  value = value * n.decay - mean * n.rate / (root * n.spread + n.eps);
  store_lanes(value, count, p + at);
  store_lanes(mean, count, first + at);
  store_lanes(square, count, second + at);
}

template <bool scaled, class T>
ISOBIT_INLINE void step_elements(T* p, const T* grad, T* first, T* second, int64_t count,
                                 const Numbers& numbers, float factor) {
  const Numbers n = numbers;  // a copy: a store could change what the reference refers to
  int64_t at = 0;
  for (; at + lane_count <= count; at += lane_count)
    step_lanes<scaled>(p, grad, first, second, at, lane_count, n, factor);
  if (at < count) step_lanes<scaled>(p, grad, first, second, at, count - at, n, factor);
}

template <class T>
ISOBIT_INLINE void scale_elements(T* x, int64_t count, float factor) {
  Floats values;
  for (int64_t at = 0; at < count; at += lane_count) {
    const int64_t lanes = std::min(lane_count, count - at);
    load_lanes(x + at, lanes, 0.0f, values);
    values = values * factor;
    store_lanes(values, lanes, x + at);
  }
}

#define ISOBIT_STEPS(versions, T)                                             \
  versions void step(T* p, const T* grad, T* first, T* second, int64_t count, \
                     const Numbers& numbers, float factor) {                  \
    if (factor == 1.0f)                                                       \
      step_elements<false>(p, grad, first, second, count, numbers, factor);   \
    else                                                                      \
      step_elements<true>(p, grad, first, second, count, numbers, factor);    \
  }                                                                           \
  versions void scale(T* x, int64_t count, float factor) { scale_elements(x, count, factor); }
ISOBIT_STEPS(ISOBIT_CLONES, float)
ISOBIT_STEPS(ISOBIT_CLONES, BFloat16)
ISOBIT_STEPS(ISOBIT_CLONES, Half)
#ifdef ISOBIT_AVX512
ISOBIT_STEPS(ISOBIT_AVX512, HardwareHalf)
#endif

// A parameter, its gradient, its mean and its mean of squares: one shape and one dtype.
using Group = std::array<Tensor, 4>;

// Whether memory of two of the tensors may overlap: what one thread writes, another might read.
bool may_overlap(const std::vector<Tensor>& tensors) {
  std::vector<std::pair<const char*, const char*>> spans;  // [begin, end) of each tensor
  for (const Tensor& t : tensors) {
    if (t.numel() == 0) continue;
    int64_t elements = 1;
    for (int64_t i = 0; i < t.dim(); i++) elements += (t.size(i) - 1) * t.stride(i);
    const char* begin = static_cast<const char*>(t.const_data_ptr());
    spans.emplace_back(begin, begin + elements * t.element_size());
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); i++)
    if (spans[i].first < spans[i - 1].second) return true;
  return false;
}

bool is_flat(const Group& group) {
  if (!group[0].is_non_overlapping_and_dense()) return false;
  for (const Tensor& t : group)
    if (t.strides() != group[0].strides()) return false;
  return true;
}

// Where a group's elements are. Taken before a parallel region: asking for the memory of a
// copy-on-write storage, as frozen weights have, moves it, which torch forbids inside one.
struct Addresses {
  void* p;
  const void* grad;
  void *first, *second;

  explicit Addresses(const Group& group)
      : p(group[0].mutable_data_ptr()),
        grad(group[1].const_data_ptr()),
        first(group[2].mutable_data_ptr()),
        second(group[3].mutable_data_ptr()) {}
};

// Steps groups whose elements lie in one order in memory.
void step_flat(const std::vector<Group>& groups, const std::vector<Numbers>& numbers,
               float factor) {
  std::vector<int64_t> counts;
  std::vector<Addresses> addresses;
  for (const Group& group : groups) {
    counts.push_back(group[0].numel());
    addresses.emplace_back(group);
  }
  parallel_pieces(counts, piece, [&](const auto& visit) {
    FixedFpEnvironment fp_environment;
    visit([&](size_t i, int64_t begin, int64_t end) {
      dispatch_hardware_dtype("optim.AdamW", groups[i][0].scalar_type(), [&](auto tag) {
        using T = typename decltype(tag)::type;
        const Addresses& at = addresses[i];
        step(static_cast<T*>(at.p) + begin, static_cast<const T*>(at.grad) + begin,
             static_cast<T*>(at.first) + begin, static_cast<T*>(at.second) + begin, end - begin,
             numbers[i], factor);
      });
    });
  });
}

Group copy_group(const Group& group) {
  Group copies;
  for (size_t i = 0; i < group.size(); i++)
    copies[i] = at::clone(group[i], at::MemoryFormat::Contiguous);
  return copies;
}

void write_back(const Group& copies, const Group& group) {
  for (size_t i : {0, 2, 3}) at::Tensor(group[i]).copy_(copies[i]);
}

std::vector<Group> groups_of(at::TensorList p, at::TensorList grads, at::TensorList first,
                             at::TensorList second) {
  ISOBIT_CHECK(p.size() == grads.size() && p.size() == first.size() && p.size() == second.size(),
               "optim.AdamW", "a gradient and two moments for each parameter",
               c10::str(p.size(), ", ", grads.size(), ", ", first.size(), " and ", second.size()),
               "call isobit.optim.AdamW.step");
  std::vector<Group> groups;
  for (size_t i = 0; i < p.size(); i++) {
    groups.push_back({p[i], grads[i], first[i], second[i]});
    for (const Tensor& t : groups.back())
      ISOBIT_CHECK(t.sizes() == p[i].sizes() && t.scalar_type() == p[i].scalar_type() &&
                       t.device().is_cpu() && t.layout() == at::kStrided,
                   "optim.AdamW", c10::str("tensors like the parameter, ", describe(p[i])),
                   describe(t), "call isobit.optim.AdamW.step");
    dispatch_dtype("optim.AdamW", p[i].scalar_type(), [](auto) {});
  }
  return groups;
}

// Moves frozen weights to memory of their own, so that nothing is written if that fails.
void make_writable(at::TensorList tensors) {
  for (const Tensor& t : tensors) t.mutable_data_ptr();
}

// Changes the tensors' versions when the writing has ended, also by an error: autograd learns that
// a value it saved has changed, and a thread that packed a frozen weight meanwhile packs it again.
class WrittenVersions {
 public:
  explicit WrittenVersions(std::vector<at::TensorList> written) : written_(std::move(written)) {}
  ~WrittenVersions() {
    for (const at::TensorList& tensors : written_)
      for (const Tensor& t : tensors)
        if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  }

 private:
  std::vector<at::TensorList> written_;  // not owned
};

// numbers: number_count for each parameter. Gradients are read as if multiplied by a factor, which
// is used as fp32, and rounded; they are not changed.
void adamw(at::TensorList p, at::TensorList grads, at::TensorList first, at::TensorList second,
           c10::ArrayRef<double> numbers, double factor) {
  check_attested();
  const std::vector<Group> groups = groups_of(p, grads, first, second);
  ISOBIT_CHECK(numbers.size() == number_count * p.size(), "optim.AdamW",
               c10::str(number_count, " numbers for each parameter"), numbers.size(),
               "call isobit.optim.AdamW.step");
  for (at::TensorList written : {p, first, second}) make_writable(written);
  const WrittenVersions versions({p, first, second});
  std::vector<Tensor> all;
  for (const Group& group : groups) all.insert(all.end(), group.begin(), group.end());
  FixedFpEnvironment fp_environment;  // of the conversions to fp32 too
  const float factor32 = static_cast<float>(factor);
  std::vector<Numbers> own;  // per group
  for (size_t i = 0; i < groups.size(); i++) {
    std::array<float, number_count> given;
    std::copy_n(numbers.begin() + number_count * i, number_count, given.begin());
    own.push_back(std::bit_cast<Numbers>(given));
  }
  if (may_overlap(all)) {  // one group after another
    for (size_t i = 0; i < groups.size(); i++) {
      const Group copies = copy_group(groups[i]);
      step_flat({copies}, {own[i]}, factor32);
      write_back(copies, groups[i]);
    }
    return;
  }
  std::vector<Group> stepped;  // the groups, or copies: made before anything is written
  for (const Group& group : groups) stepped.push_back(is_flat(group) ? group : copy_group(group));
  step_flat(stepped, own, factor32);
  for (size_t i = 0; i < groups.size(); i++)
    if (!is_flat(groups[i])) write_back(stepped[i], groups[i]);
}

// Multiplies tensors whose elements lie without gaps in memory.
void scale_flat(const std::vector<Tensor>& tensors, float factor) {
  std::vector<int64_t> counts;
  std::vector<void*> addresses;  // taken before the parallel region, as Addresses are
  for (const Tensor& t : tensors) {
    counts.push_back(t.numel());
    addresses.push_back(t.mutable_data_ptr());
  }
  parallel_pieces(counts, piece, [&](const auto& visit) {
    FixedFpEnvironment fp_environment;
    visit([&](size_t i, int64_t begin, int64_t end) {
      dispatch_hardware_dtype("optim.clip_grad_norm_", tensors[i].scalar_type(), [&](auto tag) {
        using T = typename decltype(tag)::type;
        scale(static_cast<T*>(addresses[i]) + begin, end - begin, factor);
      });
    });
  });
}

// Multiplies tensors by a factor, which is used as fp32; each product is rounded once.
void scale_all(at::TensorList tensors, double factor) {
  check_attested();
  for (const Tensor& t : tensors) {
    ISOBIT_CHECK(t.device().is_cpu() && t.layout() == at::kStrided, "optim.clip_grad_norm_",
                 "strided tensors on the CPU", describe(t), "call isobit.optim.clip_grad_norm_");
    dispatch_dtype("optim.clip_grad_norm_", t.scalar_type(), [](auto) {});
  }
  make_writable(tensors);
  const WrittenVersions versions({tensors});
  const bool one_by_one = may_overlap(tensors.vec());
  FixedFpEnvironment fp_environment;  // of the conversion to fp32 too
  const float factor32 = static_cast<float>(factor);
  std::vector<Tensor> flat;
  for (const Tensor& t : tensors) {
    if (!one_by_one && t.is_non_overlapping_and_dense()) {
      flat.push_back(t);
      continue;
    }
    const Tensor copy = at::clone(t, at::MemoryFormat::Contiguous);
    scale_flat({copy}, factor32);
    at::Tensor(t).copy_(copy);
  }
  scale_flat(flat, factor32);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def(
      "adamw_(Tensor(a!)[] p, Tensor[] grad, Tensor(b!)[] first, Tensor(c!)[] second, "
      "float[] numbers, float factor=1.0) -> ()");
  m.def("scale_(Tensor(a!)[] x, float factor) -> ()");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("adamw_", &adamw);
  m.impl("scale_", &scale_all);
}

}  // namespace isobit
