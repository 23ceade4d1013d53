// The linear operator's four sums: y over K, dX over N, dW and db over the samples.
#include "linear.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/cat.h>

#include "product.h"

namespace isobit {

namespace {

using c10::BFloat16;

Tensor rows_of(const Tensor& t, at::ScalarType type) {
  int64_t rows = 1;
  for (int64_t axis = 0; axis + 1 < t.dim(); axis++) rows *= t.size(axis);
  return t.reshape({rows, t.size(-1)}).to(type);
}

int64_t count_roots(int64_t first, int64_t segments) {
  int64_t roots = 0, end = first + segments;
  while (first < end) {
    int64_t step = first ? first & -first : int64_t(1) << 40;
    while (first + step > end) step /= 2;
    first += step;
    roots++;
  }
  return roots;
}

Schedule features(const Share& share, int64_t length) {
  const int64_t segments = count_segments(share.extent, feature_unit, feature_cap);
  const int64_t size = std::max<int64_t>(share.extent / segments, 1);
  return feature_schedule(share.extent, share.first / size,
                          share.extent == length ? segments : length / size);
}

Schedule samples(const Share& share, const Tensor& spans) {
  return sample_schedule(spans.const_data_ptr<int64_t>(), spans.size(0), share.first, share.extent);
}

template <class T>
View<T> view(const Tensor& t, int kept, int summed) {
  return {t.const_data_ptr<T>(), t.stride(kept), t.stride(summed)};
}

struct Request {
  const Schedule& schedule;
  int64_t rows, cols;
  at::ScalarType type;
  bool roots, swap = false;
  const float* bias = nullptr;
  const void* packed = nullptr;
};

// left is indexed (row, k) by its strides, right (column, k).
template <class T>
Tensor multiply(const Operand<T>& left, const Operand<T>& right, const Request& ask) {
  const int64_t segments = ask.schedule.segment_end.size();
  std::vector<int64_t> shape{ask.rows, ask.cols};
  if (ask.roots) shape.insert(shape.begin(), count_roots(ask.schedule.first, segments));
  Tensor out = empty_tensor(shape, ask.type);
  if (segments == 0) return out.zero_();  // no sample at all
  auto go = [&](auto* data) {
    using Out = std::remove_pointer_t<decltype(data)>;
    Target<Out> target{data, ask.cols, ask.rows * ask.cols, ask.bias, ask.swap};
    const T* packed = static_cast<const T*>(ask.packed);
    if (ask.swap)
      Product<T, Out>(ask.schedule, right, {left, nullptr}, target, ask.cols, ask.rows).run();
    else
      Product<T, Out>(ask.schedule, left, {right, packed}, target, ask.rows, ask.cols).run();
  };
  if (ask.type == at::kFloat)
    go(out.mutable_data_ptr<float>());
  else if (ask.type == at::kBFloat16)
    go(out.mutable_data_ptr<BFloat16>());
  else
    go(out.mutable_data_ptr<c10::Half>());
  return out;
}

// Both are 2-d tensors of the engine's type; the axes named are summed.
Tensor multiply(const Tensor& left, int left_sum, const Tensor& right, int right_sum,
                const Request& ask) {
  if (left.scalar_type() == at::kFloat)
    return multiply<float>(view<float>(left, 1 - left_sum, left_sum),
                           view<float>(right, 1 - right_sum, right_sum), ask);
  return multiply<BFloat16>(view<BFloat16>(left, 1 - left_sum, left_sum),
                            view<BFloat16>(right, 1 - right_sum, right_sum), ask);
}

std::vector<int64_t> shaped(const Tensor& like, int64_t last, const Tensor& out, bool roots) {
  std::vector<int64_t> shape = like.sizes().vec();
  shape.back() = last;
  if (roots) shape.insert(shape.begin(), out.size(0));
  return shape;
}

// Whether a weight packed beforehand is the faster of two ways to the same bits, by measurement.
bool packed_is_faster(int64_t rows, at::ScalarType type) {
  return type == at::kBFloat16 ? rows > 64 : rows <= 32;
}

// Columns [begin, end) of the sum over tokens, into fp32 roots.
template <class T>
void sum_tokens(const Tensor& grad, const Schedule& schedule, int64_t begin, int64_t end,
                float* out, int64_t stride) {
  constexpr int64_t block = 256;
  for (int64_t at = begin; at < end; at += block) {
    const int64_t n = std::min(block, end - at);
    ColumnSum sum(schedule, n);
    sum.run(grad.const_data_ptr<T>() + at, grad.stride(0), out + at, stride);
  }
}

}  // namespace

bool tile_engine_pairs_bf16() {
  static const bool pairs = engine::could_pack(at::kBFloat16);
  return pairs;
}

at::ScalarType engine_type(at::ScalarType type) {
  return type == at::kBFloat16 && tile_engine_pairs_bf16() ? at::kBFloat16 : at::kFloat;
}

Tensor pack_weight(const Tensor& weight) {
  const Tensor w = weight.to(engine_type(weight.scalar_type()));
  const Schedule schedule = features({w.size(1), 0, false}, w.size(1));
  const int64_t panels = (w.size(0) + panel_width - 1) / panel_width;
  auto go = [&](auto zero) {
    using T = decltype(zero);
    const Packing<T> packing(schedule);
    Tensor out = empty_tensor({panels, packing.length, panel_width}, w.scalar_type());
    T* data = out.mutable_data_ptr<T>();
    at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
      pack_panels(Operand<T>(view<T>(w, 0, 1)), schedule, packing, begin, end, panel_width,
                  w.size(0), data + begin * packing.length * panel_width);
    });
    return out;
  };
  return w.scalar_type() == at::kFloat ? go(float()) : go(BFloat16());
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& packed, Share share) {
  const at::ScalarType type = engine_type(x.scalar_type());
  const Tensor left = rows_of(x, type);
  const int64_t rows = left.size(0), cols = weight.size(0);
  const Tensor shift = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  const Schedule schedule = features(share, left.size(1));
  Request ask{schedule, rows, cols, share.roots ? at::kFloat : x.scalar_type(), share.roots};
  // Without a packed weight the smaller operand is packed; the leaf is symmetric, so the roles may
  // be swapped.
  const bool use_packed = packed && packed_is_faster(rows, type);
  ask.swap = !use_packed && rows < cols;
  ask.bias = bias ? shift.const_data_ptr<float>() : nullptr;
  ask.packed = use_packed ? packed->const_data_ptr() : nullptr;
  const Tensor right = use_packed ? left : weight.to(type);  // a packed weight needs no other
  const Tensor out = multiply(left, 1, right, 1, ask);
  return out.view(shaped(x, cols, out, share.roots));
}

Tensor input_grad(const Tensor& grad, const Tensor& weight, Share share) {
  const at::ScalarType type = engine_type(grad.scalar_type());
  const Tensor left = rows_of(grad, type), right = weight.to(type);
  const Schedule schedule = features(share, left.size(1));
  Request ask{schedule, left.size(0), right.size(1), share.roots ? at::kFloat : grad.scalar_type(),
              share.roots};
  const Tensor out = multiply(left, 1, right, 0, ask);
  return out.view(shaped(grad, right.size(1), out, share.roots));
}

// The axis runs group by group: the first of `groups` equal parts of each weight's rows, then the
// second of each. Where every leaf lies inside one part nothing is copied; else the parts are
// joined first.
Tensor group_input_grad(at::TensorList grads, at::TensorList weights, int64_t groups, Share share) {
  const at::ScalarType type = engine_type(grads[0].scalar_type());
  std::vector<Tensor> left, right;
  int64_t length = 0;
  for (size_t i = 0; i < grads.size(); i++) {
    left.push_back(rows_of(grads[i], type)), right.push_back(weights[i].to(type));
    length += grads[i].size(-1);
  }
  const Schedule schedule = features(share, length);
  std::vector<std::pair<Tensor, Tensor>> parts;  // of the gradients' columns and the weights' rows
  for (int64_t g = 0; g < groups; g++)
    for (size_t i = 0; i < left.size(); i++) {
      const int64_t rows = right[i].size(0) / groups;
      parts.emplace_back(left[i].narrow(1, g * rows, rows), right[i].narrow(0, g * rows, rows));
    }
  const Request ask{schedule, left[0].size(0), right[0].size(1),
                    share.roots ? at::kFloat : grads[0].scalar_type(), share.roots};
  auto go = [&](auto zero) {
    using T = decltype(zero);
    std::vector<View<T>> a, b;
    int64_t part = 0, begin = 0;
    for (const Leaf& leaf : schedule.leaves) {
      while (leaf.start >= begin + parts[part].second.size(0))
        begin += parts[part++].second.size(0);
      if (leaf.start + leaf.length > begin + parts[part].second.size(0)) break;
      a.push_back(view<T>(parts[part].first, 0, 1).shift(0, leaf.start - begin));
      b.push_back(view<T>(parts[part].second, 1, 0).shift(0, leaf.start - begin));
    }
    if (a.size() == schedule.leaves.size()) return multiply<T>(Operand<T>(a), Operand<T>(b), ask);
    std::vector<Tensor> columns, rows;
    for (const auto& [gradient, weight] : parts)
      columns.push_back(gradient), rows.push_back(weight);
    return multiply(at::cat(columns, 1), 1, at::cat(rows, 0), 0, ask);
  };
  const Tensor out = type == at::kFloat ? go(float()) : go(BFloat16());
  return out.view(shaped(grads[0], right[0].size(1), out, share.roots));
}

Tensor weight_grad(const Tensor& grad, const Tensor& x, const Tensor& spans, Share share) {
  const at::ScalarType type = engine_type(x.scalar_type());
  const Tensor left = rows_of(grad, type), right = rows_of(x, type);
  const Schedule schedule = samples(share, spans);
  Request ask{schedule, left.size(1), right.size(1), share.roots ? at::kFloat : x.scalar_type(),
              share.roots};
  ask.swap =
      right.size(1) < left.size(1);  // the rows' operand is copied whole: let it be the smaller one
  return multiply(left, 0, right, 0, ask);
}

Tensor bias_grad(const Tensor& grad, const Tensor& spans, Share share) {
  Tensor rows = rows_of(grad, grad.scalar_type());
  if (rows.stride(1) != 1) rows = rows.contiguous();
  const Schedule schedule = samples(share, spans);
  const int64_t cols = rows.size(1),
                roots = count_roots(schedule.first, schedule.segment_end.size());
  Tensor out = empty_tensor({roots, cols}, at::kFloat);
  float* data = out.mutable_data_ptr<float>();
  at::parallel_for(0, cols, 256, [&](int64_t begin, int64_t end) {
    PlainArithmetic plain;
    if (rows.scalar_type() == at::kFloat)
      sum_tokens<float>(rows, schedule, begin, end, data, cols);
    else if (rows.scalar_type() == at::kBFloat16)
      sum_tokens<BFloat16>(rows, schedule, begin, end, data, cols);
    else
      sum_tokens<c10::Half>(rows, schedule, begin, end, data, cols);
  });
  if (share.roots) return out;
  if (roots == 0) return empty_tensor({cols}, grad.scalar_type()).zero_();
  Tensor rounded = empty_tensor({cols}, grad.scalar_type());
  auto go = [&](auto* to) {
    finish(data, nullptr, nullptr, nullptr, cols, nullptr, 1, cols, to, cols);
  };
  if (grad.scalar_type() == at::kFloat)
    go(rounded.mutable_data_ptr<float>());
  else if (grad.scalar_type() == at::kBFloat16)
    go(rounded.mutable_data_ptr<BFloat16>());
  else
    go(rounded.mutable_data_ptr<c10::Half>());
  return rounded;
}

}  // namespace isobit
