// The embedding: rows of a table gathered by id, and the gradient of the table over the samples.
//
// The gradient is dense by definition: every row of the table sums over all tokens, and tokens of
// other ids add +0. It is computed sparsely, which does not change bits: a leaf starts from +0, and
// in rounding to nearest a sum of two numbers is −0 only if both are. So no partial sum is ever −0,
// and adding +0 to any other value keeps its bits.
#include <ATen/Parallel.h>
#include <torch/library.h>
#include <bit>
#include <cstring>

#include "attestation.h"
#include "rows.h"
#include "samples.h"

namespace isobit {

namespace {

using OptionalTensor = std::optional<Tensor>;

// One token of the batch, and its place in the schedule of the samples.
struct Token {
  int64_t id, row, leaf, segment;
};

// All tokens of the samples, by id, and in the order of the samples within an id. Omits those of
// `padding_id`. `ids` is [rows].
std::vector<Token> tokens_by_id(const int64_t* ids, const Tensor& spans, int64_t global_samples,
                                int64_t padding_id) {
  const Schedule schedule = sample_schedule(spans, 0, global_samples);
  std::vector<Token> tokens;
  int64_t segment = 0;
  for (int64_t leaf = 0; leaf < schedule.leaf_count(); leaf++) {
    while (leaf >= schedule.segment_end[segment]) segment++;
    const auto [start, length, fold] = schedule.leaves[leaf];
    for (int64_t row = start; row < start + length; row++)
      if (ids[row] != padding_id) tokens.push_back({ids[row], row, leaf, segment});
  }
  std::stable_sort(tokens.begin(), tokens.end(),
                   [](const Token& a, const Token& b) { return a.id < b.id; });
  return tokens;
}

// The index of the first token of each id, and the number of tokens.
std::vector<int64_t> id_boundaries(const std::vector<Token>& tokens) {
  std::vector<int64_t> boundaries;
  for (size_t i = 0; i < tokens.size(); i++)
    if (i == 0 || tokens[i].id != tokens[i - 1].id) boundaries.push_back(i);
  boundaries.push_back(tokens.size());
  return boundaries;
}

// sum = sum + grad; both are [n].
// Order: one token of a leaf of the sample schedule, in ascending order (no lanes).
template <class T>
ISOBIT_INLINE void add_token(const T* grad, int64_t n, float* sum) {
  for (int64_t at = 0; at < n; at += lane_count) {
    const int64_t count = std::min(lane_count, n - at);
    Floats values, total;
    load_lanes(grad + at, count, 0.0f, values);
    load_lanes(sum + at, count, 0.0f, total);
    total += values;
    store_lanes(total, count, sum + at);
  }
}
#define ISOBIT_EMBEDDING(T) \
  ISOBIT_CLONES void add_grad(const T* grad, int64_t n, float* sum) { add_token(grad, n, sum); }
ISOBIT_EMBEDDING(float)
ISOBIT_EMBEDDING(BFloat16)
ISOBIT_EMBEDDING(Half)

// The gradient of one row of the table. Of the segments that contain the id, those whose lowest
// common node is deepest are merged first: the balanced tree without its empty branches.
class TableRowSum {
 public:
  // `memory` is [floats(n)], not owned.
  TableRowSum(float* memory, int64_t n) : memory_(memory), n_(n) {}
  static int64_t floats(int64_t n) { return (depth_ + 1) * n; }

  // The tokens [token, stop) of one id. grad is [rows][n]. Returns [n], valid until the next call.
  template <class T>
  const float* run(const Token* token, const Token* stop, RowMajor<const T> grad) {
    int64_t segments[depth_], top = 0;
    while (token < stop) {
      const int64_t segment = token->segment;
      while (top > 1 && std::bit_width(uint64_t(segments[top - 2] ^ segments[top - 1])) <
                            std::bit_width(uint64_t(segments[top - 1] ^ segment)))
        merge_last(top--);
      float* sum = slot(top);  // [n]
      for (bool fold = false; token < stop && token->segment == segment; fold = true) {
        float* leaf_sum = fold ? slot(depth_) : sum;  // [n]
        token = sum_leaf(token, stop, grad, leaf_sum);
        if (fold) merge2(sum, leaf_sum, n_);
      }
      segments[top++] = segment;
    }
    while (top > 1) merge_last(top--);
    return slot(0);
  }

 private:
  static constexpr int64_t depth_ = 12;  // of a tree of at most 1024 segments
  static_assert(sample_cap == 1 << (depth_ - 2));

  float* slot(int64_t i) { return memory_ + i * n_; }  // [n]
  void merge_last(int64_t top) { merge2(slot(top - 2), slot(top - 1), n_); }

  // Sums the tokens of one leaf to dst [n]; returns the token after them.
  template <class T>
  const Token* sum_leaf(const Token* token, const Token* stop, RowMajor<const T> grad, float* dst) {
    std::fill_n(dst, n_, 0.0f);
    for (const int64_t leaf = token->leaf; token < stop && token->leaf == leaf; token++)
      add_grad(grad.row(token->row), n_, dst);
    return token;
  }

  float* memory_;  // [depth + 1][n]: subtrees that wait for their sibling, and one leaf
  int64_t n_;
};

Tensor checked_ids(const Tensor& ids, int64_t vocabulary) {
  check_attested();
  ISOBIT_CHECK(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, "embedding",
               "int64 or int32 ids", describe(ids), "call isobit.embedding");
  const Tensor checked = ids.to(at::kLong).contiguous();
  const int64_t* id = checked.const_data_ptr<int64_t>();  // [numel]
  for (int64_t i = 0; i < checked.numel(); i++)
    ISOBIT_CHECK_INDEX(id[i] >= 0 && id[i] < vocabulary, "embedding",
                       c10::str("ids from 0 to ", vocabulary - 1), id[i],
                       "pass ids of this table's rows");
  return checked;
}

// `spans`, `padding` and `of` are not used here: autograd passes them to the gradient.
Tensor embedding(const Tensor& ids, const Tensor& weight, const OptionalTensor& /*spans*/,
                 int64_t /*padding*/, int64_t /*of*/) {
  ISOBIT_CHECK(weight.dim() == 2, "embedding", "a table [V, H]", describe(weight),
               "call isobit.embedding");
  const Tensor checked = checked_ids(ids, weight.size(0));
  std::vector<int64_t> shape = ids.sizes().vec();
  const int64_t n = weight.size(1);
  shape.push_back(n);
  Tensor out = empty_tensor(shape, weight.scalar_type());
  if (out.numel() == 0) return out;
  const Tensor table = as_rows(weight);
  const size_t bytes = n * table.element_size(), stride = table.stride(0) * table.element_size();
  const char* src = static_cast<const char*>(table.const_data_ptr());  // [V][bytes], row stride
  char* dst = static_cast<char*>(out.mutable_data_ptr());              // [tokens][bytes]
  const int64_t* id = checked.const_data_ptr<int64_t>();               // [tokens]
  at::parallel_for(0, checked.numel(), row_grain(n), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) std::memcpy(dst + i * bytes, src + id[i] * stride, bytes);
  });
  return out;
}

Tensor embedding_weight_grad(const Tensor& grad, const Tensor& ids, const OptionalTensor& spans,
                             int64_t vocabulary, int64_t padding, int64_t of) {
  const Tensor checked = checked_ids(ids, vocabulary);
  const Tensor known_spans = spans_or_default("embedding", spans, ids.sizes());
  const GlobalBatch batch = global_batch("embedding", known_spans, of);
  ISOBIT_CHECK(grad.dim() == ids.dim() + 1 && grad.sizes().slice(0, ids.dim()) == ids.sizes(),
               "embedding", c10::str("a gradient [..., H] of ids ", ids.sizes()), describe(grad),
               "call isobit.embedding, and let autograd call this");
  const int64_t n = grad.size(-1);
  Tensor out = empty_tensor({vocabulary, n}, batch.grad_dtype(grad.scalar_type())).zero_();
  if (grad.numel() == 0) return out;
  const Tensor rows = as_rows(grad);
  const std::vector<Token> tokens =
      tokens_by_id(checked.const_data_ptr<int64_t>(), known_spans, batch.global_samples, padding);
  const std::vector<int64_t> boundaries = id_boundaries(tokens);
  auto sum_ids = [&](auto src, auto* dst) {  // src [rows][n], dst [V][n]
    at::parallel_for(0, boundaries.size() - 1, row_grain(n), [&](int64_t begin, int64_t end) {
      thread_local Scratch scratch;
      FixedFpEnvironment fp_environment;
      TableRowSum sum(scratch.floats(TableRowSum::floats(n)), n);
      for (int64_t i = begin; i < end; i++) {
        const Token* first = tokens.data() + boundaries[i];
        const float* total = sum.run(first, tokens.data() + boundaries[i + 1], src);  // [n]
        round_sums(total, n, dst + first->id * n);
      }
    });
  };
  dispatch_dtype("embedding", rows.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (batch.is_share())
      sum_ids(row_data<T>(rows), out.mutable_data_ptr<float>());
    else
      sum_ids(row_data<T>(rows), out.mutable_data_ptr<T>());
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def("embedding(Tensor ids, Tensor weight, Tensor? spans, int padding, int of=0) -> Tensor");
  m.def(
      "embedding_weight_grad(Tensor grad, Tensor ids, Tensor? spans, int vocabulary, int padding, "
      "int of=0) -> Tensor");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("embedding", &embedding);
  m.impl("embedding_weight_grad", &embedding_weight_grad);
}

}  // namespace isobit
