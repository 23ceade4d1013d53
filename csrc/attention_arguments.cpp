// Checks of attention's arguments.
#include "attention.h"

namespace isobit {

namespace {

constexpr const char* function = "attention";
constexpr const char* remedy = "call isobit.attention, which describes the samples";

void check_heads(const Tensor& q, const Tensor& k, const Tensor& v) {
  ISOBIT_CHECK(q.dim() == 3 || q.dim() == 4, function,
               "q [rows, heads, depth] or [batch, rows, heads, depth]", describe(q), remedy);
  ISOBIT_CHECK(k.dim() == 3 || k.dim() == 4, function,
               "k [rows, key heads, depth] or [batch, rows, key heads, depth]", describe(k),
               remedy);
  ISOBIT_CHECK(v.sizes() == k.sizes(), function, c10::str("v ", k.sizes(), ", as k"), describe(v),
               remedy);
  ISOBIT_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), function,
               c10::str("k and v of ", dtype_name(q.scalar_type()), ", as q"),
               c10::str("k ", describe(k), " and v ", describe(v)), remedy);
  ISOBIT_CHECK(q.size(-1) > 0 && q.size(-1) % lane_count == 0 && k.size(-1) == q.size(-1), function,
               c10::str("q and k of one depth, a multiple of ", lane_count),
               c10::str("q ", q.sizes(), " and k ", k.sizes()), remedy);
  ISOBIT_CHECK(k.size(-2) > 0 && q.size(-2) % k.size(-2) == 0, function,
               "query heads that are a multiple of the key heads",
               c10::str(q.size(-2), " query heads and ", k.size(-2), " key heads"), remedy);
}

void check_table(const char* name, const Tensor& t, int64_t dims, const char* shape) {
  ISOBIT_CHECK(t.dim() == dims && t.scalar_type() == at::kLong && t.is_contiguous(), function,
               c10::str(name, " as contiguous int64 ", shape), describe(t), remedy);
}

// The keys of one sample; `starts` is [blocks]: the row at which each block begins.
void check_blocks(const Tensor& k, int64_t sample, int64_t keys, const int64_t* starts) {
  const int64_t batch_rows = std::max<int64_t>(k.size(-3), 1);
  for (int64_t b = 0; b * attention_block < keys; b++) {
    const int64_t start = starts[b];
    const int64_t last = start + std::min(attention_block, keys - b * attention_block) - 1;
    // Inside one batch entry the rows of a block are evenly spaced.
    ISOBIT_CHECK(
        start >= 0 && last < count_rows(k) && start / batch_rows == last / batch_rows, function,
        c10::str("blocks of keys inside ", count_rows(k), " rows, each in one batch entry of ",
                 batch_rows),
        c10::str("block ", b, " of sample ", sample, ", rows ", start, " to ", last), remedy);
  }
}

}  // namespace

void check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& spans,
                     const Tensor& blocks, const Tensor& lengths) {
  check_heads(q, k, v);
  check_table("spans", spans, 2, "[samples, 2]");
  check_table("blocks", blocks, 2, "[samples, blocks]");
  check_table("lengths", lengths, 1, "[samples]");
  const int64_t samples = spans.size(0);
  ISOBIT_CHECK(spans.size(1) == 2 && blocks.size(0) == samples && lengths.size(0) == samples,
               function, "spans [samples, 2], blocks [samples, blocks] and lengths [samples]",
               c10::str(spans.sizes(), ", ", blocks.sizes(), " and ", lengths.sizes()), remedy);
  for (int64_t s = 0; s < samples; s++) {
    const int64_t* span = spans.const_data_ptr<int64_t>() + 2 * s;  // [2]: first row, rows
    const int64_t keys = lengths.const_data_ptr<int64_t>()[s];
    ISOBIT_CHECK(span[0] >= 0 && span[1] >= 0 && span[0] + span[1] <= count_rows(q), function,
                 c10::str("every sample inside ", count_rows(q), " rows of q"),
                 c10::str("sample ", s, " of ", span[1], " rows from row ", span[0]), remedy);
    ISOBIT_CHECK(
        keys >= span[1] && (keys + attention_block - 1) / attention_block <= blocks.size(1),
        function,
        c10::str("at least as many keys as queries, in at most ", blocks.size(1), " blocks of ",
                 attention_block),
        c10::str("sample ", s, " of ", span[1], " queries and ", keys, " keys"), remedy);
    check_blocks(k, s, keys, blocks.const_data_ptr<int64_t>() + s * blocks.size(1));
  }
}

}  // namespace isobit
