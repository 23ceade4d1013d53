// The gated delta rule of linear attention, forward with a carried state, and backward.
//
// The order is that of [Note: the order of the delta rule] in ops/delta_rule/portable.py: chunks of
// 64 rows at a sample's own positions, and chains of fused multiply-adds. One task is one head of
// one sample. Loops run across independent outputs, never across the terms of one sum.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <vector>

#include "attestation.h"
#include "exponential.h"
#include "rows.h"
#include "samples.h"
#include "scratch.h"

namespace isobit {

namespace {

constexpr int64_t chunk_rows = 64;

struct Sizes {
  int64_t key_heads, heads, key, value;  // Hk, H, Dk, Dv
  int64_t matrix() const { return key * value; }
  // A sample's packed state: S [H][Dk][Dv], then the open chunk's k [Hk][64][Dk], new [H][64][Dv]
  // and g [H][64].
  int64_t keys_at() const { return heads * matrix(); }
  int64_t new_at() const { return keys_at() + key_heads * chunk_rows * key; }
  int64_t logs_at() const { return new_at() + heads * chunk_rows * value; }
  int64_t packed() const { return logs_at() + heads * chunk_rows; }
};

// out[i] = a · x[i] + out[i], each rounded once. All are [n].
ISOBIT_INLINE void add_scaled(float a, const float* __restrict x, int64_t n,
                              float* __restrict out) {
  for (int64_t i = 0; i < n; i++) out[i] = __builtin_fmaf(a, x[i], out[i]);
}

// sum = a · x + sum, sixteen lanes from x, each rounded once. With `four` the processor has
// AVX-512.
template <bool four>
ISOBIT_INLINE void fuse(float a, const float* x, Floats& sum) {
#ifdef ISOBIT_AVX512
  if constexpr (four) {
    const Floats factor = Floats{} + a;
    asm("vfmadd231ps %2, %1, %0"
        : "+v"(sum)
        : "v"(factor), "m"(*reinterpret_cast<const Floats*>(x)));
    return;
  }
#endif
  for (int64_t i = 0; i < lane_count; i++) sum[i] = __builtin_fmaf(a, x[i], sum[i]);
}

// out_r[i] += Σ_d left_r[d] · right[d][i]: chains over d, for R rows that share `right`.
//   left   R times [depth]
//   right  [depth][width]
//   out    R times [width]
template <bool four, int R>
ISOBIT_INLINE void continue_rows(const float* const (&left)[R], int64_t depth, const float* right,
                                 int64_t width, float* const (&out)[R]) {
  constexpr int64_t vectors = 4, block = vectors * lane_count;
  int64_t at = 0;
  for (; four && at + block <= width; at += block) {
    Floats sums[R][vectors];
#pragma GCC unroll 2
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int64_t i = 0; i < vectors; i++) load(out[r] + at + i * lane_count, sums[r][i]);
    for (int64_t d = 0; d < depth; d++) {
      const float* row = right + d * width + at;
#pragma GCC unroll 2
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int64_t i = 0; i < vectors; i++)
          fuse<four>(left[r][d], row + i * lane_count, sums[r][i]);
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int64_t i = 0; i < vectors; i++)
        *reinterpret_cast<Floats*>(out[r] + at + i * lane_count) = sums[r][i];
  }
  for (int r = 0; at < width && r < R; r++)
    for (int64_t d = 0; d < depth; d++)
      add_scaled(left[r][d], right + d * width + at, width - at, out[r] + at);
}

template <bool four>
ISOBIT_INLINE void continue_row(const float* left, int64_t depth, const float* right, int64_t width,
                                float* out) {
  const float* const from[1] = {left};
  float* const to[1] = {out};
  continue_rows<four>(from, depth, right, width, to);
}

// Two rows times one matrix, from zero: both are [depth], both outputs [width].
template <bool four>
ISOBIT_INLINE void multiply_pair(const float* a, const float* b, int64_t depth, const float* right,
                                 int64_t width, float* out_a, float* out_b) {
  std::fill(out_a, out_a + width, 0.0f);
  std::fill(out_b, out_b + width, 0.0f);
  const float* const from[2] = {a, b};
  float* const to[2] = {out_a, out_b};
  continue_rows<four>(from, depth, right, width, to);
}

// `count` rows times one matrix, from zero: left [count][depth], out [count][width].
template <bool four>
ISOBIT_INLINE void multiply_rows(const float* left, int64_t count, int64_t depth,
                                 const float* right, int64_t width, float* out) {
  int64_t t = 0;
  for (; t + 2 <= count; t += 2)
    multiply_pair<four>(left + t * depth, left + (t + 1) * depth, depth, right, width,
                        out + t * width, out + (t + 1) * width);
  if (t == count) return;
  std::fill(out + t * width, out + (t + 1) * width, 0.0f);
  continue_row<four>(left + t * depth, depth, right, width, out + t * width);
}

// Σ_d left[d] · right[d], one chain. Both are [n].
ISOBIT_INLINE float dot(const float* left, const float* right, int64_t n) {
  float total = 0.0f;
  for (int64_t d = 0; d < n; d++) total = __builtin_fmaf(left[d], right[d], total);
  return total;
}

// out [columns][width] = the transpose of rows [count][columns]; columns behind `count` are zeros.
ISOBIT_INLINE void transpose(const float* rows, int64_t count, int64_t columns, int64_t width,
                             float* out) {
  for (int64_t d = 0; d < columns; d++) {
    for (int64_t t = 0; t < count; t++) out[d * width + t] = rows[t * columns + d];
    for (int64_t t = count; t < width; t++) out[d * width + t] = 0.0f;
  }
}

// values [64] = e^values; all are at most 0.
ISOBIT_INLINE void exp_row(float* values) {
  for (int64_t at = 0; at < chunk_rows; at += lane_count) {
    Floats lanes;
    load(values + at, lanes);
    exp_nonpositive(lanes);
    *reinterpret_cast<Floats*>(values + at) = lanes;
  }
}

// e^(now − c[j]) for j < count, out [64]; the rest is 1.
ISOBIT_INLINE void decays_to(double now, const double* c, int64_t count, float* out) {
  for (int64_t j = 0; j < chunk_rows; j++)
    out[j] = j < count ? static_cast<float>(now - c[j]) : 0.0f;
  exp_row(out);
}

ISOBIT_INLINE float exp_one(double sum) {
  Floats lanes = Floats{} + static_cast<float>(sum);
  exp_nonpositive(lanes);
  return lanes[0];
}

// One head of a chunk: its rows, and the state at its start.
struct Chunk {
  float* state;   // [Dk][Dv]
  float* keys;    // [64][Dk]
  float* keys_t;  // [Dk][64]
  float* fresh;   // [64][Dv], the values that are written
  float* logs;    // [64], g
  double* c;      // [64]
  int64_t filled;
};

// Where a row of the call begins, by head.
struct Inputs {
  const float *q, *k, *v, *g, *beta;
  Sizes sizes;
  int64_t key_head, head;
  const float* q_row(int64_t row) const {
    return q + (row * sizes.key_heads + key_head) * sizes.key;
  }
  const float* k_row(int64_t row) const {
    return k + (row * sizes.key_heads + key_head) * sizes.key;
  }
  const float* v_row(int64_t row) const { return v + (row * sizes.heads + head) * sizes.value; }
  float g_of(int64_t row) const { return g[row * sizes.heads + head]; }
  float beta_of(int64_t row) const { return beta[row * sizes.heads + head]; }
};

// Adds one row to a chunk. out [Dv] is o of the row, or null.
//   work  [4 · 64 + 2 · Dv]
template <bool four>
ISOBIT_INLINE void add_row(const Inputs& in, int64_t row, Chunk& chunk, float* work, float* out) {
  const int64_t t = chunk.filled, key = in.sizes.key, value = in.sizes.value;
  float *along = work, *across = along + chunk_rows, *between = across + chunk_rows;
  float *reads = between + chunk_rows, *asks = reads + value;
  const float *q = in.q_row(row), *k = in.k_row(row), *v = in.v_row(row);
  const float beta = in.beta_of(row);
  chunk.logs[t] = in.g_of(row);
  chunk.c[t] = (t ? chunk.c[t - 1] : 0.0) + static_cast<double>(chunk.logs[t]);
  if (t == 0) chunk.c[0] = static_cast<double>(chunk.logs[0]);
  for (int64_t d = 0; d < key; d++)
    chunk.keys[t * key + d] = chunk.keys_t[d * chunk_rows + t] = k[d];
  multiply_pair<four>(k, q, key, chunk.keys_t, chunk_rows, along, across);
  multiply_pair<four>(k, q, key, chunk.state, value, reads, asks);
  decays_to(chunk.c[t], chunk.c, t + 1, between);
  const float decay = exp_one(chunk.c[t]);
  float* fresh = chunk.fresh + t * value;  // [Dv]
  for (int64_t i = 0; i < value; i++) fresh[i] = beta * (v[i] - decay * reads[i]);
  for (int64_t j = 0; j < t; j++) along[j] = -(beta * along[j] * between[j]);
  continue_row<four>(along, t, chunk.fresh, value, fresh);
  if (out) {
    for (int64_t i = 0; i < value; i++) out[i] = decay * asks[i];
    for (int64_t j = 0; j <= t; j++) across[j] = across[j] * between[j];
    continue_row<four>(across, t + 1, chunk.fresh, value, out);
  }
  chunk.filled = t + 1;
}

// The state that a full chunk leaves, in the place of that at its start.
template <bool four>
ISOBIT_INLINE void close_chunk(const Sizes& sizes, Chunk& chunk, float* work) {
  const double last = chunk.c[chunk_rows - 1];
  float* between = work;  // [64]
  decays_to(last, chunk.c, chunk_rows, between);
  const float decay = exp_one(last);
  for (int64_t d = 0; d < sizes.key; d++) {
    float* row = chunk.state + d * sizes.value;  // [Dv]
    for (int64_t i = 0; i < sizes.value; i++) row[i] = row[i] * decay;
    float* left = between + chunk_rows;  // [64]
    for (int64_t j = 0; j < chunk_rows; j++)
      left[j] = chunk.keys_t[d * chunk_rows + j] * between[j];
    continue_row<four>(left, chunk_rows, chunk.fresh, sizes.value, row);
  }
  chunk.filled = 0;
}

// All rows of a sample, for one head. o is [rows][H][Dv].
template <bool four>
ISOBIT_INLINE void forward_rows(const Inputs& in, int64_t start, int64_t length, Chunk& chunk,
                                float* work, float* o) {
  const Sizes& sizes = in.sizes;
  for (int64_t row = start; row < start + length; row++) {
    add_row<four>(in, row, chunk, work, o + (row * sizes.heads + in.head) * sizes.value);
    if (chunk.filled == chunk_rows) close_chunk<four>(sizes, chunk, work);
  }
}

#define ISOBIT_DELTA_FORWARD(versions, four, T)                                        \
  versions void run_forward(std::bool_constant<four>, const Inputs& in, int64_t start, \
                            int64_t length, Chunk& chunk, T* work, T* o) {             \
    forward_rows<four>(in, start, length, chunk, work, o);                             \
  }
ISOBIT_VERSIONS(ISOBIT_DELTA_FORWARD, float)

// Room of one task: a chunk, and what add_row needs.
struct Room {
  BumpAllocator memory;
  Chunk chunk;
  float* work;
  Room(Scratch& scratch, const Sizes& s, int64_t more = 0)
      : memory(scratch, s.matrix() + 2 * chunk_rows * s.key + chunk_rows * s.value + 1024 +
                            2 * s.value + more) {
    chunk.state = memory.allocate(s.matrix());
    chunk.keys = memory.allocate(chunk_rows * s.key);
    chunk.keys_t = memory.allocate(chunk_rows * s.key);
    chunk.fresh = memory.allocate(chunk_rows * s.value);
    chunk.logs = memory.allocate(chunk_rows);
    chunk.c = memory.allocate<double>(chunk_rows);
    work = memory.allocate(4 * chunk_rows + 2 * s.value);
    begin(s);
  }
  void begin(const Sizes& s) {
    std::fill(chunk.state, chunk.state + s.matrix(), 0.0f);
    std::fill(chunk.keys_t, chunk.keys_t + chunk_rows * s.key, 0.0f);
    chunk.filled = 0;
  }
};

void settle(float* values, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (values[i] != values[i]) values[i] = __builtin_nanf("");
}

Tensor zeros(at::IntArrayRef sizes) {
  Tensor out = empty_tensor(sizes, at::kFloat);
  float* values = out.mutable_data_ptr<float>();  // [numel]
  std::fill(values, values + out.numel(), 0.0f);
  return out;
}

Tensor widened(const Tensor& t) { return t.to(at::kFloat).contiguous(); }

Sizes sizes_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
               const Tensor& beta) {
  const char* remedy = "call isobit.delta_rule";
  ISOBIT_CHECK(q.dim() >= 3 && v.dim() == q.dim() && k.sizes() == q.sizes() &&
                   g.dim() == v.dim() - 1 && g.sizes() == v.sizes().slice(0, g.dim()) &&
                   beta.sizes() == g.sizes() &&
                   v.sizes().slice(0, v.dim() - 2) == q.sizes().slice(0, q.dim() - 2),
               "delta_rule", "q, k [..., Hk, Dk], v [..., H, Dv], g, beta [..., H]",
               c10::str(describe(q), ", ", describe(k), ", ", describe(v), ", ", describe(g), ", ",
                        describe(beta)),
               remedy);
  const Sizes sizes{q.size(-2), v.size(-2), q.size(-1), v.size(-1)};
  ISOBIT_CHECK(sizes.key_heads > 0 && sizes.heads % sizes.key_heads == 0, "delta_rule",
               "heads of v that are a multiple of those of q", describe(v), remedy);
  return sizes;
}

std::tuple<Tensor, Tensor> delta_rule(const Tensor& q, const Tensor& k, const Tensor& v,
                                      const Tensor& g, const Tensor& beta,
                                      const std::optional<Tensor>& spans,
                                      const std::optional<Tensor>& state, at::IntArrayRef counts) {
  check_attested();
  const Sizes sizes = sizes_of(q, k, v, g, beta);
  const Tensor places = spans_or_default("delta_rule", spans, v.sizes().slice(0, v.dim() - 2));
  const int64_t samples = places.size(0);
  ISOBIT_CHECK(!state || (state->dim() == 2 && state->size(0) == samples &&
                          state->size(1) == sizes.packed() && state->scalar_type() == at::kFloat &&
                          static_cast<int64_t>(counts.size()) == samples),
               "delta_rule", c10::str("a float32 state [", samples, ", ", sizes.packed(), "]"),
               state ? describe(*state) : "none", "pass an isobit.DeltaState");
  const Tensor inputs[] = {widened(q), widened(k), widened(v), widened(g), widened(beta)};
  Tensor o = zeros(v.sizes());
  Tensor after = state ? state->clone(at::MemoryFormat::Contiguous)
                       : empty_tensor({0, sizes.packed()}, at::kFloat);
  const int64_t* span = places.const_data_ptr<int64_t>();  // [samples][2]
  float* out = o.mutable_data_ptr<float>();                // [rows][H][Dv]
  float* packed = after.mutable_data_ptr<float>();         // [samples][packed]
  const int64_t repeats = sizes.heads / sizes.key_heads;
  at::parallel_for(0, samples * sizes.heads, 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    FixedFpEnvironment fp_environment;
    Room room(scratch, sizes);
    Chunk& chunk = room.chunk;
    for (int64_t task = begin; task < end; task++) {
      const int64_t sample = task / sizes.heads, head = task % sizes.heads, from = head / repeats;
      const Inputs in{inputs[0].const_data_ptr<float>(),
                      inputs[1].const_data_ptr<float>(),
                      inputs[2].const_data_ptr<float>(),
                      inputs[3].const_data_ptr<float>(),
                      inputs[4].const_data_ptr<float>(),
                      sizes,
                      from,
                      head};
      room.begin(sizes);
      float* own = packed + sample * sizes.packed();
      float *matrix = own + head * sizes.matrix(),
            *keys = own + sizes.keys_at() + from * chunk_rows * sizes.key,
            *fresh = own + sizes.new_at() + head * chunk_rows * sizes.value,
            *logs = own + sizes.logs_at() + head * chunk_rows;
      if (state) {
        // Keys of a head of q and k are written by one of its tasks only, and read from the call's
        // argument: another task may write them now.
        const float* before = state->const_data_ptr<float>() + (keys - packed);
        chunk.filled = counts[sample] % chunk_rows;
        std::copy(matrix, matrix + sizes.matrix(), chunk.state);
        std::copy(fresh, fresh + chunk.filled * sizes.value, chunk.fresh);
        std::copy(logs, logs + chunk.filled, chunk.logs);
        std::copy(before, before + chunk.filled * sizes.key, chunk.keys);
        for (int64_t t = 0; t < chunk.filled; t++) {
          chunk.c[t] = static_cast<double>(chunk.logs[t]);
          if (t) chunk.c[t] = chunk.c[t - 1] + chunk.c[t];
          for (int64_t d = 0; d < sizes.key; d++)
            chunk.keys_t[d * chunk_rows + t] = chunk.keys[t * sizes.key + d];
        }
      }
      call_version([&](auto four) {
        run_forward(four, in, span[2 * sample], span[2 * sample + 1], chunk, room.work, out);
      });
      if (!state) continue;
      std::copy(chunk.state, chunk.state + sizes.matrix(), matrix);
      std::fill(fresh, fresh + chunk_rows * sizes.value, 0.0f);
      std::copy(chunk.fresh, chunk.fresh + chunk.filled * sizes.value, fresh);
      std::fill(logs, logs + chunk_rows, 0.0f);
      std::copy(chunk.logs, chunk.logs + chunk.filled, logs);
      if (head % repeats == 0) {
        std::fill(keys, keys + chunk_rows * sizes.key, 0.0f);
        std::copy(chunk.keys, chunk.keys + chunk.filled * sizes.key, keys);
      }
    }
  });
  settle(out, o.numel());
  settle(packed, after.numel());
  return {round_tensor("delta_rule", o, v.scalar_type()), after};
}

// ---- backward -----------------------------------------------------------------------------------

// Where gradients of one head are written: those of q and k per head of v.
struct Outputs {
  float *dq, *dk;     // [rows][H][Dk]
  float* dv;          // [rows][H][Dv]
  float *dg, *dbeta;  // [rows][H]
};

// Buffers of the backward pass of one chunk.
struct Buffers {
  float *q, *k;                                   // [64][Dk]
  float *grad, *dnew;                             // [64][Dv]
  float *reads, *asks, *taken;                    // [64][Dv]
  float *back_grad, *back_new, *kept;             // [64][Dk]
  float* transposed;                              // [max(Dk, Dv)][max(Dk, Dv, 64)]
  float *along, *across, *between;                // [64][64]
  float *by_q, *by_k, *pairs, *both;              // [64][64]
  float* corrections;                             // [64][64]
  float *decay, *remaining, *left, *start, *sum;  // [64]
  float *sent, *wrong;                            // [Dv]
  explicit Buffers(BumpAllocator& m, const Sizes& s) {
    const int64_t key = chunk_rows * s.key, value = chunk_rows * s.value,
                  square = chunk_rows * chunk_rows;
    for (float** p : {&q, &k, &back_grad, &back_new, &kept}) *p = m.allocate(key);
    for (float** p : {&grad, &dnew, &reads, &asks, &taken}) *p = m.allocate(value);
    transposed = m.allocate(transposed_size(s));
    for (float** p : {&along, &across, &between, &by_q, &by_k, &pairs, &both, &corrections})
      *p = m.allocate(square);
    for (float** p : {&decay, &remaining, &left, &start, &sum}) *p = m.allocate(chunk_rows);
    for (float** p : {&sent, &wrong}) *p = m.allocate(s.value);
  }
  static int64_t transposed_size(const Sizes& s) {
    return std::max(s.key, s.value) * std::max({s.key, s.value, chunk_rows});
  }
  static int64_t count(const Sizes& s) {
    return 5 * chunk_rows * (s.key + s.value) + transposed_size(s) + 8 * chunk_rows * chunk_rows +
           5 * chunk_rows + 2 * s.value + 64 * 16;
  }
};

// The backward pass of one chunk of one head; see backward_of_chunk of the portable executor.
//   first    the chunk's first row of the call
//   state    [Dk][Dv], at its start
//   fresh    [count][Dv]
//   c        [count]
//   later    [Dk][Dv], the gradient of the state that it leaves, or null
//   earlier  [Dk][Dv], the gradient of the state at its start
template <bool four>
ISOBIT_INLINE void backward_of_chunk(const Inputs& in, const Outputs& out, const float* upstream,
                                     int64_t first, int64_t count, const float* state,
                                     const float* fresh, const double* c, const float* later,
                                     float* earlier, Buffers& b) {
  const Sizes& s = in.sizes;
  const int64_t key = s.key, value = s.value, side = chunk_rows;
  float betas[chunk_rows];
  for (int64_t t = 0; t < count; t++) {
    const int64_t row = first + t;
    std::copy(in.q_row(row), in.q_row(row) + key, b.q + t * key);
    std::copy(in.k_row(row), in.k_row(row) + key, b.k + t * key);
    const float* g = upstream + (row * s.heads + in.head) * value;  // [Dv]
    std::copy(g, g + value, b.grad + t * value);
    betas[t] = in.beta_of(row);
    b.decay[t] = exp_one(c[t]);
    decays_to(c[t], c, t + 1, b.between + t * side);
  }
  transpose(b.k, count, key, side, b.transposed);
  multiply_rows<four>(b.k, count, key, b.transposed, side, b.along);
  multiply_rows<four>(b.q, count, key, b.transposed, side, b.across);
  multiply_rows<four>(b.k, count, key, state, value, b.reads);
  multiply_rows<four>(b.q, count, key, state, value, b.asks);

  std::fill(b.dnew, b.dnew + count * value, 0.0f);
  if (later) {
    decays_to(c[count - 1], c, count, b.remaining);
    multiply_rows<four>(b.k, count, key, later, value, b.taken);
    for (int64_t t = 0; t < count; t++) {
      for (int64_t i = 0; i < value; i++)
        b.dnew[t * value + i] = b.remaining[t] * b.taken[t * value + i];
      b.left[t] = b.remaining[t] * dot(b.taken + t * value, fresh + t * value, value);
    }
  }
  for (int64_t t = count - 1; t >= 0; t--) {
    const float *along = b.along + t * side, *across = b.across + t * side,
                *between = b.between + t * side;
    for (int64_t j = 0; j <= t; j++)
      add_scaled(across[j] * between[j], b.grad + t * value, value, b.dnew + j * value);
    for (int64_t j = 0; j < t; j++)
      add_scaled(-(betas[t] * along[j] * between[j]), b.dnew + t * value, value,
                 b.dnew + j * value);
  }

  transpose(fresh, count, value, side, b.transposed);
  multiply_rows<four>(b.dnew, count, value, b.transposed, side, b.corrections);
  multiply_rows<four>(b.grad, count, value, b.transposed, side, b.by_q);
  for (int64_t t = 0; t < count; t++)
    for (int64_t j = 0; j < side; j++) {
      const int64_t at = t * side + j;
      b.by_q[at] = j <= t ? b.by_q[at] * b.between[at] : 0.0f;
      b.by_k[at] = j < t ? b.corrections[at] * betas[t] * b.between[at] : 0.0f;
      b.pairs[at] = j < t ? b.by_q[at] * b.across[at] - b.by_k[at] * b.along[at] : 0.0f;
    }
  for (int64_t t = 0; t < count; t++)
    for (int64_t j = 0; j < count; j++)
      b.both[t * side + j] = b.by_k[t * side + j] + b.by_k[j * side + t];

  transpose(state, key, value, key, b.transposed);  // [Dv][Dk]
  multiply_rows<four>(b.grad, count, value, b.transposed, key, b.back_grad);
  multiply_rows<four>(b.dnew, count, value, b.transposed, key, b.back_new);
  if (later) {
    transpose(later, key, value, key, b.transposed);
    multiply_rows<four>(fresh, count, value, b.transposed, key, b.kept);
  }
  for (int64_t t = 0; t < count; t++) {
    const int64_t row = first + t, at = row * s.heads + in.head;
    const float beta = betas[t], decay = b.decay[t], scale = -(beta * decay);
    const float *v = in.v_row(row), *dnew = b.dnew + t * value, *reads = b.reads + t * value;
    float *dv = out.dv + at * value, *dq = out.dq + at * key, *dk = out.dk + at * key;
    for (int64_t i = 0; i < value; i++) dv[i] = beta * dnew[i];
    for (int64_t i = 0; i < value; i++) b.sent[i] = v[i] - decay * reads[i];
    float dbeta = dot(dnew, b.sent, value);
    for (int64_t j = 0; j < t; j++)
      dbeta = dbeta - b.corrections[t * side + j] * b.along[t * side + j] * b.between[t * side + j];
    out.dbeta[at] = dbeta;
    b.start[t] = decay * (dot(b.grad + t * value, b.asks + t * value, value) -
                          beta * dot(dnew, reads, value));
    for (int64_t d = 0; d < key; d++) {
      dq[d] = decay * b.back_grad[t * key + d];
      dk[d] = later ? b.remaining[t] * b.kept[t * key + d] : 0.0f;
      dk[d] = __builtin_fmaf(scale, b.back_new[t * key + d], dk[d]);
    }
    float left[chunk_rows];
    continue_row<four>(b.by_q + t * side, t + 1, b.k, key, dq);
    for (int64_t j = 0; j < count; j++) left[j] = -b.both[t * side + j];
    continue_row<four>(left, count, b.k, key, dk);
    for (int64_t j = t; j < count; j++) left[j - t] = b.by_q[j * side + t];
    continue_row<four>(left, count - t, b.q + t * key, key, dk);
  }

  // g_t is in c_s for s >= t, and in c_s − c_j for s >= t > j.
  for (int64_t t = 0; t < count; t++) b.sum[t] = 0.0f;
  for (int64_t row = count - 1; row >= 0; row--) {
    float since = 0.0f;
    for (int64_t t = 0; t <= row; t++) {
      if (t) since = since + b.pairs[row * side + t - 1];
      b.sum[t] = b.sum[t] + since;
    }
  }
  float whole = 0.0f, total = 0.0f, suffix = 0.0f;
  if (later) {
    for (int64_t d = 0; d < key; d++)
      whole = whole + dot(later + d * value, state + d * value, value);
    whole = b.decay[count - 1] * whole;
  }
  for (int64_t t = count - 1; t >= 0; t--) {
    suffix = t == count - 1 ? b.start[t] : b.start[t] + suffix;
    out.dg[(first + t) * s.heads + in.head] = suffix + b.sum[t];
  }
  for (int64_t t = 0; later && t < count; t++) {
    float& dg = out.dg[(first + t) * s.heads + in.head];
    dg = dg + (total + whole);
    total = total + b.left[t];
  }

  for (int64_t i = 0; i < s.matrix(); i++)
    earlier[i] = later ? b.decay[count - 1] * later[i] : 0.0f;
  for (int64_t t = 0; t < count; t++) {
    const float scale = -(betas[t] * b.decay[t]);
    for (int64_t i = 0; i < value; i++) {
      b.sent[i] = b.decay[t] * b.grad[t * value + i];
      b.wrong[i] = scale * b.dnew[t * value + i];
    }
    for (int64_t d = 0; d < key; d++) {
      add_scaled(b.q[t * key + d], b.sent, value, earlier + d * value);
      add_scaled(b.k[t * key + d], b.wrong, value, earlier + d * value);
    }
  }
}

// All chunks of one head of a sample: forward for the states, then backward.
//   states   [chunks][Dk][Dv], scratch
//   fresh    [length][Dv], scratch
//   c        [length], scratch
//   earlier  [2][Dk][Dv], scratch
template <bool four>
ISOBIT_INLINE void backward_rows(const Inputs& in, const Outputs& out, const float* upstream,
                                 int64_t start, int64_t length, Chunk& chunk, float* work,
                                 float* states, float* fresh, double* c, float* earlier,
                                 Buffers& buffers) {
  const Sizes& s = in.sizes;
  for (int64_t at = 0; at < length; at++) {
    const int64_t number = at / chunk_rows;
    if (chunk.filled == 0)
      std::copy(chunk.state, chunk.state + s.matrix(), states + number * s.matrix());
    add_row<four>(in, start + at, chunk, work, nullptr);
    const float* row = chunk.fresh + (chunk.filled - 1) * s.value;
    std::copy(row, row + s.value, fresh + at * s.value);
    c[at] = chunk.c[chunk.filled - 1];
    if (chunk.filled == chunk_rows) close_chunk<four>(s, chunk, work);
  }
  const float* later = nullptr;
  const int64_t chunks = (length + chunk_rows - 1) / chunk_rows;
  for (int64_t number = chunks - 1; number >= 0; number--) {
    const int64_t at = number * chunk_rows, count = std::min(chunk_rows, length - at);
    float* into = earlier + number % 2 * s.matrix();
    backward_of_chunk<four>(in, out, upstream, start + at, count, states + number * s.matrix(),
                            fresh + at * s.value, c + at, later, into, buffers);
    later = into;
  }
}

#define ISOBIT_DELTA_BACKWARD(versions, four, T)                                                  \
  versions void run_backward(std::bool_constant<four>, const Inputs& in, const Outputs& out,      \
                             const T* upstream, int64_t start, int64_t length, Chunk& chunk,      \
                             T* work, T* states, T* fresh, double* c, T* earlier, Buffers& b) {   \
    backward_rows<four>(in, out, upstream, start, length, chunk, work, states, fresh, c, earlier, \
                        b);                                                                       \
  }
ISOBIT_VERSIONS(ISOBIT_DELTA_BACKWARD, float)

// [rows][Hk][D] = the sums over the heads that read one head of keys, from the first.
Tensor sum_groups(const Tensor& grads, const Tensor& like) {
  Tensor out = empty_tensor(like.sizes(), at::kFloat);
  const int64_t n = like.size(-1), heads = grads.size(-2), key_heads = like.size(-2),
                repeats = heads / key_heads, rows = like.numel() / (n * key_heads);
  const float* src = grads.const_data_ptr<float>();  // [rows][H][D]
  float* dst = out.mutable_data_ptr<float>();        // [rows][Hk][D]
  for (int64_t row = 0; row < rows * key_heads; row++)
    for (int64_t i = 0; i < n; i++) {
      float total = src[row * repeats * n + i];
      for (int64_t head = 1; head < repeats; head++)
        total = total + src[(row * repeats + head) * n + i];
      dst[row * n + i] = total;
    }
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> delta_rule_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
    const Tensor& beta, const std::optional<Tensor>& spans) {
  check_attested();
  const Sizes sizes = sizes_of(q, k, v, g, beta);
  ISOBIT_CHECK(grad.sizes() == v.sizes(), "delta_rule", "a gradient like the output",
               describe(grad), "call isobit.delta_rule, and let autograd call this");
  const Tensor places = spans_or_default("delta_rule", spans, v.sizes().slice(0, v.dim() - 2));
  const Tensor inputs[] = {widened(q), widened(k), widened(v), widened(g), widened(beta)};
  const Tensor upstream = widened(grad);
  std::vector<int64_t> per_head(v.sizes().begin(), v.sizes().end());
  per_head.back() = sizes.key;
  Tensor dq = zeros(per_head), dk = zeros(per_head);
  Tensor dv = zeros(v.sizes());
  Tensor dg = zeros(g.sizes()), dbeta = zeros(g.sizes());
  const Outputs out{dq.mutable_data_ptr<float>(), dk.mutable_data_ptr<float>(),
                    dv.mutable_data_ptr<float>(), dg.mutable_data_ptr<float>(),
                    dbeta.mutable_data_ptr<float>()};
  const int64_t* span = places.const_data_ptr<int64_t>();  // [samples][2]
  const int64_t repeats = sizes.heads / sizes.key_heads;
  at::parallel_for(0, places.size(0) * sizes.heads, 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    FixedFpEnvironment fp_environment;
    for (int64_t task = begin; task < end; task++) {
      const int64_t sample = task / sizes.heads, head = task % sizes.heads;
      const int64_t length = span[2 * sample + 1];
      if (!length) continue;
      const int64_t chunks = (length + chunk_rows - 1) / chunk_rows;
      Room room(
          scratch, sizes,
          Buffers::count(sizes) + (chunks + 2) * sizes.matrix() + length * (sizes.value + 2) + 256);
      Buffers buffers(room.memory, sizes);
      float* states = room.memory.allocate(chunks * sizes.matrix());
      float* fresh = room.memory.allocate(length * sizes.value);
      double* c = room.memory.allocate<double>(length);
      float* earlier = room.memory.allocate(2 * sizes.matrix());
      const Inputs in{inputs[0].const_data_ptr<float>(),
                      inputs[1].const_data_ptr<float>(),
                      inputs[2].const_data_ptr<float>(),
                      inputs[3].const_data_ptr<float>(),
                      inputs[4].const_data_ptr<float>(),
                      sizes,
                      head / repeats,
                      head};
      call_version([&](auto four) {
        run_backward(four, in, out, upstream.const_data_ptr<float>(), span[2 * sample], length,
                     room.chunk, room.work, states, fresh, c, earlier, buffers);
      });
    }
  });
  Tensor found[] = {sum_groups(dq, q), sum_groups(dk, k), dv, dg, dbeta};
  const Tensor* like[] = {&q, &k, &v, &g, &beta};
  for (int64_t i = 0; i < 5; i++) {
    settle(found[i].mutable_data_ptr<float>(), found[i].numel());
    found[i] = round_tensor("delta_rule", found[i], like[i]->scalar_type());
  }
  return {found[0], found[1], found[2], found[3], found[4]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def(
      "delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? spans, Tensor? "
      "state, int[] counts) -> (Tensor, Tensor)");
  m.def(
      "delta_rule_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
      "Tensor? spans) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("delta_rule", &delta_rule);
  m.impl("delta_rule_backward", &delta_rule_backward);
}

}  // namespace isobit
