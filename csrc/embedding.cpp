// The embedding: rows gathered by id, and the gradient of the table over the samples, id by id.
//
// The gradient's meaning is dense: every row of the table sums over all tokens, those of other ids
// adding +0. It is computed sparsely, which changes no bit: a leaf starts from +0, and in rounding
// to nearest a sum of two numbers is −0 only if both are, so no partial sum ever is −0, and adding
// +0 to anything else leaves its bits.
#include <ATen/Parallel.h>
#include <torch/library.h>
#include <bit>
#include <cstring>

#include "attested.h"
#include "rows.h"
#include "samples.h"

namespace isobit {

namespace {

using Optional = std::optional<Tensor>;

// One token of the batch, where it stands in the order.
struct Token {
  int64_t id, row, leaf, segment;
};

// All tokens of samples, in the order of the samples, then sorted by id.
std::vector<Token> tokens_by_id(const int64_t* ids, const Tensor& spans, int64_t of,
                                int64_t skipped) {
  const Schedule schedule = sample_schedule(spans.const_data_ptr<int64_t>(), spans.size(0), 0, of);
  std::vector<Token> tokens;
  int64_t segment = 0;
  for (int64_t leaf = 0; leaf < static_cast<int64_t>(schedule.leaves.size()); leaf++) {
    while (leaf >= schedule.segment_end[segment]) segment++;
    const auto [start, length, fold] = schedule.leaves[leaf];
    for (int64_t row = start; row < start + length; row++)
      if (ids[row] != skipped) tokens.push_back({ids[row], row, leaf, segment});
  }
  std::stable_sort(tokens.begin(), tokens.end(),
                   [](const Token& a, const Token& b) { return a.id < b.id; });
  return tokens;
}

template <class T>
ISOBIT_INLINE void add_gradient(const T* grad, int64_t n, float* sum) {
  for (int64_t at = 0; at < n; at += lane_count) {
    const int64_t count = std::min(lane_count, n - at);
    Floats values, before;
    widen_some(grad + at, count, 0.0f, values);
    widen_some(sum + at, count, 0.0f, before);
    before = before + values;
    round_some(before, count, sum + at);
  }
}
#define ISOBIT_ADD(T)                                                   \
  ISOBIT_CLONES void add_row_of(const T* grad, int64_t n, float* sum) { \
    add_gradient(grad, n, sum);                                         \
  }
ISOBIT_ADD(float)
ISOBIT_ADD(BFloat16)
ISOBIT_ADD(Half)

// The sum of one id. Of two segments that hold it, those whose common node is lowest are merged
// first: the balanced tree, without its empty branches.
class IdSum {
 public:
  IdSum(float* room, int64_t n) : room_(room), n_(n) {}
  static int64_t floats(int64_t n) { return (depth_ + 1) * n; }

  template <class T>
  const float* run(const Token* token, const Token* stop, const T* grad, int64_t stride) {
    int64_t segments[depth_], top = 0;
    while (token < stop) {
      const int64_t segment = token->segment;
      while (top > 1 && std::bit_width(uint64_t(segments[top - 2] ^ segments[top - 1])) <
                            std::bit_width(uint64_t(segments[top - 1] ^ segment)))
        merge_last(top--);
      float* sum = slot(top);
      for (bool fold = false; token < stop && token->segment == segment; fold = true) {
        float* run = fold ? slot(depth_) : sum;
        token = sum_leaf(token, stop, grad, stride, run);
        if (fold) merge2(sum, run, n_);
      }
      segments[top++] = segment;
    }
    while (top > 1) merge_last(top--);
    return slot(0);
  }

 private:
  static constexpr int64_t depth_ = 12;  // of at most 1024 segments
  static_assert(sample_cap == 1 << (depth_ - 2));

  float* slot(int64_t i) { return room_ + i * n_; }
  void merge_last(int64_t top) { merge2(slot(top - 2), slot(top - 1), n_); }

  template <class T>
  const Token* sum_leaf(const Token* token, const Token* stop, const T* grad, int64_t stride,
                        float* to) {
    std::fill_n(to, n_, 0.0f);
    for (const int64_t leaf = token->leaf; token < stop && token->leaf == leaf; token++)
      add_row_of(grad + token->row * stride, n_, to);
    return token;
  }

  float* room_;
  int64_t n_;
};

std::vector<int64_t> starts_of(const std::vector<Token>& tokens) {
  std::vector<int64_t> starts;
  for (size_t i = 0; i < tokens.size(); i++)
    if (i == 0 || tokens[i].id != tokens[i - 1].id) starts.push_back(i);
  starts.push_back(tokens.size());
  return starts;
}

Tensor checked_ids(const Tensor& ids, int64_t vocabulary) {
  check_attested();
  TORCH_CHECK(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt,
              "isobit: expected int64 or int32 ids, received ", ids.scalar_type(),
              "; remedy: call isobit.embedding");
  const Tensor found = ids.to(at::kLong).contiguous();
  const int64_t* id = found.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < found.numel(); i++)
    TORCH_CHECK_INDEX(id[i] >= 0 && id[i] < vocabulary, "isobit: expected ids from 0 to ",
                      vocabulary - 1, ", received ", id[i],
                      "; remedy: pass ids of this table's rows");
  return found;
}

// `spans`, `padding` and `of` are for the gradient.
Tensor embedding(const Tensor& ids, const Tensor& weight, const Optional&, int64_t, int64_t) {
  TORCH_CHECK(weight.dim() == 2, "isobit: expected a table [V, H], received ", weight.sizes(),
              "; remedy: call isobit.embedding");
  const Tensor found = checked_ids(ids, weight.size(0));
  std::vector<int64_t> shape = ids.sizes().vec();
  const int64_t n = weight.size(1);
  shape.push_back(n);
  Tensor out = empty_tensor(shape, weight.scalar_type());
  if (out.numel() == 0) return out;
  const Tensor table = rows_of(weight);
  const size_t bytes = n * table.element_size(), step = table.stride(0) * table.element_size();
  const char* from = static_cast<const char*>(table.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t* id = found.const_data_ptr<int64_t>();
  at::parallel_for(0, found.numel(), std::max<int64_t>(grain / n, 1),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; i++)
                       std::memcpy(to + i * bytes, from + id[i] * step, bytes);
                   });
  return out;
}

Tensor embedding_weight_grad(const Tensor& grad, const Tensor& ids, const Optional& spans,
                             int64_t vocabulary, int64_t padding, int64_t of) {
  const Tensor found = checked_ids(ids, vocabulary), described = spans_of(spans, ids.sizes());
  const Batch batch = batch_of(described, of);
  TORCH_CHECK(grad.dim() == ids.dim() + 1 && grad.sizes().slice(0, ids.dim()) == ids.sizes(),
              "isobit: expected a gradient [..., H] of ids, received ", grad.sizes(), " and ",
              ids.sizes(), "; remedy: call isobit.embedding, and let autograd call this");
  const int64_t n = grad.size(-1);
  Tensor out = empty_tensor({vocabulary, n}, batch.type(grad.scalar_type())).zero_();
  if (grad.numel() == 0) return out;
  const Tensor rows = rows_of(grad);
  const std::vector<Token> tokens =
      tokens_by_id(found.const_data_ptr<int64_t>(), described, batch.of, padding);
  const std::vector<int64_t> starts = starts_of(tokens);
  auto sum_ids = [&](const auto* from, auto* to) {
    at::parallel_for(
        0, starts.size() - 1, std::max<int64_t>(grain / n, 1), [&](int64_t begin, int64_t end) {
          thread_local Scratch scratch;
          PlainArithmetic plain;
          IdSum sum(scratch.floats(IdSum::floats(n)), n);
          for (int64_t i = begin; i < end; i++) {
            const Token* first = tokens.data() + starts[i];
            const float* total =
                sum.run(first, tokens.data() + starts[i + 1], from, rows.stride(0));
            finish(total, nullptr, nullptr, nullptr, n, nullptr, 1, n, to + first->id * n, n);
          }
        });
  };
  by_type(rows, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = rows.const_data_ptr<T>();
    if (batch.is_share())
      sum_ids(from, out.mutable_data_ptr<float>());
    else
      sum_ids(from, out.mutable_data_ptr<T>());
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def("embedding(Tensor ids, Tensor weight, Tensor? spans, int padding, int of=0) -> Tensor");
  m.def(
      "embedding_weight_grad(Tensor grad, Tensor ids, Tensor? spans, int vocabulary, int padding, "
      "int of=0) -> "
      "Tensor");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("embedding", &embedding);
  m.impl("embedding_weight_grad", &embedding_weight_grad);
}

}  // namespace isobit
