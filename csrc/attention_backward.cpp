// Attention backward: dQ folds blocks of keys left; dK and dV fold blocks of queries left, head by
// head of the group.
//
// The weights are computed again from the scores and the forward's log-sum-exp, block by block,
// keys down and queries across, so that what is summed over queries is contiguous; memory is linear
// in the sequence.
#include "attention.h"

#include <torch/library.h>

#include "attested.h"
#include "exponential.h"

namespace isobit {

namespace {

constexpr int64_t square = attention_block * attention_block;

// Scores [keys][queries] to weights, and dP to dS = weight · (dP − d) · scale; unseen pairs are +0.
template <class T>
ISOBIT_INLINE void weigh_block(const float* scores, const float* grads, const float* lse,
                               const float* dots, const float* begin, const float* end, float scale,
                               T* weights, T* score_grads) {
  for (int64_t key = 0; key < attention_block; key++)
    for (int64_t i = 0; i < attention_block; i += lane_count) {
      const int64_t at = key * attention_block + i;
      const auto& low = *reinterpret_cast<const Floats*>(begin + i);
      const auto& high = *reinterpret_cast<const Floats*>(end + i);
      const Floats place = Floats{} + static_cast<float>(key);
      const Lanes seen = reinterpret_cast<Lanes>((place >= low) & (place < high));
      Floats weight = *reinterpret_cast<const Floats*>(scores + at) * scale -
                      *reinterpret_cast<const Floats*>(lse + i);
      exp_nonpositive(weight);
      weight = seen ? weight : Floats{};
      const Floats spread =
          *reinterpret_cast<const Floats*>(grads + at) - *reinterpret_cast<const Floats*>(dots + i);
      const Floats grad = (weight * spread) * scale;
      round_to(weight, weights + at);
      round_to(seen ? grad : Floats{}, score_grads + at);
    }
}

// The folded sums, with one zero.
template <class T>
ISOBIT_INLINE void round_row(const float* folded, int64_t depth, T* out) {
  for (int64_t d = 0; d < depth; d += lane_count)
    round_to(*reinterpret_cast<const Floats*>(folded + d) + 0.0f, out + d);
}

#define ISOBIT_ATTENTION_BACKWARD(T)                                                             \
  ISOBIT_CLONES void weigh(const float* scores, const float* grads, const float* lse,            \
                           const float* dots, const float* begin, const float* end, float scale, \
                           T* weights, T* score_grads) {                                         \
    weigh_block(scores, grads, lse, dots, begin, end, scale, weights, score_grads);              \
  }                                                                                              \
  ISOBIT_CLONES float dot(const Schedule& schedule, const T* grad, const T* out) {               \
    return sum_row(schedule, ProductTerms<T>{grad, out}); /* over the depth, a feature axis */   \
  }                                                                                              \
  ISOBIT_CLONES void round_sums(const float* folded, int64_t depth, T* out) {                    \
    round_row(folded, depth, out);                                                               \
  }
ISOBIT_ATTENTION_BACKWARD(float)
ISOBIT_ATTENTION_BACKWARD(BFloat16)

inline void transpose_square(const float* from, float* to) {
  transpose32(words(from), attention_block, words(to), attention_block, attention_block,
              attention_block);
}
inline void transpose_square(const BFloat16* from, BFloat16* to) {
  for (int64_t r = 0; r < attention_block; r++)
    for (int64_t c = 0; c < attention_block; c++)
      to[c * attention_block + r] = from[r * attention_block + c];
}

template <class T>
struct Given {
  HeadRows<const T> q, k, v, grad, out;
  const float* lse;
};

template <class T>
struct Asked {
  HeadRows<T> q, k, v;
};

// One sample and one key head.
template <class T>
class Unfold {
 public:
  Unfold(const Heads& heads, const Mask& mask, float scale, Scratch& scratch, int64_t keys)
      : heads_(heads),
        mask_(mask),
        scale_(scale),
        count_(keys),
        blocks_((keys + attention_block - 1) / attention_block),
        schedule_(schedule_of(heads.depth)),
        room_(scratch,
              (5 * blocks_ + 6) * attention_block * (heads.depth + 16) + 8 * square + 4096) {
    const int64_t size = blocks_ * attention_block * heads.depth,
                  block = attention_block * heads.depth;
    keys_ = room_.template take<T>(size);
    key_terms_ = room_.template take<T>(size);
    values_ = room_.template take<T>(size);
    key_grads_ = room_.take(size);
    value_grads_ = room_.take(size);
    for (T** part : {&query_columns_, &query_terms_, &grad_columns_, &grad_terms_})
      *part = room_.template take<T>(block);
    query_grads_ = room_.take(block);
    for (float** part : {&scores_, &grads_}) *part = room_.take(square);
    for (T** part : {&weights_, &score_grads_, &turned_}) *part = room_.template take<T>(square);
    for (float** part : {&lse_, &dots_, &begin_, &end_}) *part = room_.take(attention_block);
    std::fill(key_grads_, key_grads_ + size, 0.0f);
    std::fill(value_grads_, value_grads_ + size, 0.0f);
  }

  void run(const Given<T>& given, const Asked<T>& asked, int64_t row, int64_t head) {
    const int64_t depth = heads_.depth;
    for (int64_t b = 0; b < blocks_; b++) {
      const int64_t at = row + b * attention_block, count = rows_of_block(b),
                    to = b * attention_block * depth;
      pack_block_rows(given.k.at(at, head), given.k.row, count, depth, key_terms_ + to);
      copy_rows(given.k.at(at, head), given.k.row, count, keys_ + to);
      copy_rows(given.v.at(at, head), given.v.row, count, values_ + to);
    }
    for (int64_t h = head * heads_.group(); h < (head + 1) * heads_.group(); h++)
      for (int64_t b = 0; b < blocks_; b++) query_block(given, asked, row, h, b);
    for (int64_t r = 0; r < count_; r++) {
      round_sums(key_grads_ + r * depth, depth, asked.k.at(row + r, head));
      round_sums(value_grads_ + r * depth, depth, asked.v.at(row + r, head));
    }
  }

 private:
  int64_t rows_of_block(int64_t b) const {
    return std::min(attention_block, count_ - b * attention_block);
  }

  void copy_rows(const T* rows, int64_t stride, int64_t count, T* out) const {
    for (int64_t r = 0; r < count; r++)
      std::copy_n(rows + r * stride, heads_.depth, out + r * heads_.depth);
    std::fill(out + count * heads_.depth, out + attention_block * heads_.depth, T(0.0f));
  }

  void query_block(const Given<T>& given, const Asked<T>& asked, int64_t row, int64_t head,
                   int64_t block) {
    const int64_t depth = heads_.depth, start = block * attention_block,
                  count = rows_of_block(block);
    const T *q = given.q.at(row + start, head), *grad = given.grad.at(row + start, head);
    pack_block_columns(q, given.q.row, count, depth, query_columns_);
    pack_block_rows(q, given.q.row, count, depth, query_terms_);
    pack_block_columns(grad, given.grad.row, count, depth, grad_columns_);
    pack_block_rows(grad, given.grad.row, count, depth, grad_terms_);
    for (int64_t r = 0; r < attention_block; r++) {
      lse_[r] = r < count ? given.lse[(row + start + r) * heads_.queries + head] : infinity;
      dots_[r] =
          r < count ? dot(schedule_, grad + r * given.grad.row, given.out.at(row + start + r, head))
                    : 0.0f;
    }
    std::fill(query_grads_, query_grads_ + attention_block * depth, 0.0f);
    const Visible first(mask_, start, count_), last(mask_, start + count - 1, count_);
    for (int64_t b = first.begin / attention_block; b * attention_block < last.end; b++)
      pair_of_blocks(start, count, b);
    for (int64_t r = 0; r < count; r++)
      round_sums(query_grads_ + r * depth, depth, asked.q.at(row + start + r, head));
  }

  void pair_of_blocks(int64_t start, int64_t count, int64_t b) {
    const int64_t depth = heads_.depth, to = b * attention_block * depth, n = attention_block;
    for (int64_t r = 0; r < n; r++) {
      const Visible keys(mask_, start + r, count_);
      begin_[r] = keys.begin - b * n;
      end_[r] = r < count ? std::min(keys.end, count_) - b * n : 0;
    }
    multiply_leaf<T>(n, n, depth, keys_ + to, depth, query_columns_, n, scores_, n, false);
    multiply_leaf<T>(n, n, depth, values_ + to, depth, grad_columns_, n, grads_, n, false);
    weigh(scores_, grads_, lse_, dots_, begin_, end_, scale_, weights_, score_grads_);
    multiply_leaf<T>(n, depth, n, weights_, n, grad_terms_, depth, value_grads_ + to, depth, true);
    multiply_leaf<T>(n, depth, n, score_grads_, n, query_terms_, depth, key_grads_ + to, depth,
                     true);
    transpose_square(score_grads_, turned_);
    multiply_leaf<T>(n, depth, n, turned_, n, key_terms_ + to, depth, query_grads_, depth, true);
  }

  Heads heads_;
  Mask mask_;
  float scale_;
  int64_t count_, blocks_;
  Schedule schedule_;
  Carved room_;
  T *keys_, *key_terms_, *values_, *query_columns_, *query_terms_, *grad_columns_, *grad_terms_,
      *weights_, *score_grads_, *turned_;
  float *key_grads_, *value_grads_, *query_grads_, *scores_, *grads_, *lse_, *dots_, *begin_, *end_;
};

std::tuple<Tensor, Tensor, Tensor> attention_backward_op(const Tensor& grad, const Tensor& q,
                                                         const Tensor& k, const Tensor& v,
                                                         const Tensor& out, const Tensor& lse,
                                                         const Tensor& spans, const Tensor& blocks,
                                                         const Tensor& lengths, double scale,
                                                         bool causal, int64_t window) {
  check_engine();
  check_attention(q, k, v, spans, blocks, lengths);
  const at::ScalarType type = engine_type(q.scalar_type());
  Tensor inputs[5];
  int64_t filled = 0;
  for (const Tensor& t : {q, k, v, grad, out}) inputs[filled++] = with_neighbours(t, type);
  TORCH_CHECK(
      inputs[3].sizes() == q.sizes() && inputs[4].sizes() == q.sizes() && lse.is_contiguous(),
      "isobit: expected a gradient like the output; remedy: call isobit.attention, and let "
      "autograd call this");
  Tensor grads[3] = {empty_tensor(q.sizes(), type).zero_(), empty_tensor(k.sizes(), type).zero_(),
                     empty_tensor(v.sizes(), type).zero_()};
  const Heads heads{q.size(-2), k.size(-2), q.size(-1)};
  auto go = [&](auto zero) {
    using T = decltype(zero);
    const Given<T> given{head_rows<T>(inputs[0]), head_rows<T>(inputs[1]),
                         head_rows<T>(inputs[2]), head_rows<T>(inputs[3]),
                         head_rows<T>(inputs[4]), lse.const_data_ptr<float>()};
    const Asked<T> asked{head_rows(grads[0], grads[0].mutable_data_ptr<T>()),
                         head_rows(grads[1], grads[1].mutable_data_ptr<T>()),
                         head_rows(grads[2], grads[2].mutable_data_ptr<T>())};
    at::parallel_for(0, spans.size(0) * heads.keys, 1, [&](int64_t begin, int64_t end) {
      thread_local Scratch scratch;
      PlainArithmetic plain;
      for (int64_t task = begin; task < end; task++) {
        const int64_t* span = spans.const_data_ptr<int64_t>() + task / heads.keys * 2;
        if (span[1] == 0) continue;
        Unfold<T>(heads, Mask{causal, window}, scale, scratch, span[1])
            .run(given, asked, span[0], task % heads.keys);
      }
      engine::brgemm_release(paired<T>);
    });
  };
  if (type == at::kFloat)
    go(float());
  else
    go(BFloat16());
  const at::ScalarType asked = q.scalar_type();
  return {round_all(grads[0], asked), round_all(grads[1], asked), round_all(grads[2], asked)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def(
      "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor spans, "
      "Tensor blocks, Tensor lengths, float scale, bool causal, int window) -> (Tensor, Tensor, "
      "Tensor)");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) { m.impl("attention_backward", &attention_backward_op); }

}  // namespace isobit
