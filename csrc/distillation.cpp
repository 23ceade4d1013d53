// The divergence of a student's and a teacher's distributions over words, and its gradient.
//
// See [Note: a divergence without cancellation] in isobit/ops/distillation/portable.py for the
// functions. The logits of both models are computed for one chunk of the vocabulary at a time:
// twice in the forward, first for the sums of exponentials and then for the terms, and once in the
// backward.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <memory>

#include "attestation.h"
#include "log_sum_exp.h"
#include "samples.h"
#include "vocabulary.h"

namespace isobit {

namespace {

constexpr int64_t stat_count = 8;  // per token; see STATS in portable.py
constexpr float far = 128.0f;
constexpr float rise0 = 0x1.000000p-1f, rise1 = -0x1.555552p-3f, rise2 = 0x1.55548cp-5f,
                rise3 = -0x1.10fdeap-7f, rise4 = 0x1.6a58aap-10f, rise5 = -0x1.8af216p-13f,
                rise6 = 0x1.1c01c0p-16f;

enum class Direction { forward, reverse, jsd };

// P(a) for 0 <= a < 1.
ISOBIT_INLINE void polynomial(const Floats& a, Floats& p) {
  p = (((((rise6 * a + rise5) * a + rise4) * a + rise3) * a + rise2) * a + rise1) * a + rise0;
}

// e^-a, for a >= 0.
ISOBIT_INLINE void exp_minus(const Floats& a, Floats& e) {
  e = -a;
  exp_nonpositive(e);
}

// a - (1 - e^-a)
ISOBIT_INLINE void rise(const Floats& a, Floats& out) {
  Floats p, e;
  polynomial(a, p);
  exp_minus(a, e);
  out = a < 1.0f ? (a * a) * p : a - (1.0f - e);
}

// 1 - (1 + a) e^-a
ISOBIT_INLINE void bend(const Floats& a, Floats& out) {
  Floats p, e, near = a;
  polynomial(a, p);
  exp_minus(a, e);
  set_where_greater(a, far, far, near);
  out = a < 1.0f ? (a * a) * (1.0f - (a + 1.0f) * p) : 1.0f - e * (near + 1.0f);
}

// 1 - e^-a
ISOBIT_INLINE void fall(const Floats& a, Floats& out) {
  Floats p, e;
  polynomial(a, p);
  exp_minus(a, e);
  out = a < 1.0f ? a * (1.0f - a * p) : 1.0f - e;
}

// One token and one chunk.
struct Row {
  const float* student;  // [n] logits
  const float* teacher;  // [n] logits; log-probabilities, or +inf, if it knows some words only
  int64_t n;
  float inverse_temperature, beta;
  const float* stats;  // [stat_count]
};

// What a word's term and gradient are made of.
struct Words {
  Floats ratio, distance;  // log p - log q, and its magnitude
  Floats student, larger;  // probabilities
};

template <bool partly>
ISOBIT_INLINE void load_words(const Row& row, int64_t at, int64_t count, Words& words) {
  Floats student, teacher;
  load_lanes(row.student + at, count, -infinity, student);
  load_lanes(row.teacher + at, count, -infinity, teacher);
  student = (student * row.inverse_temperature - row.stats[0]) - row.stats[1];
  if constexpr (!partly)
    teacher = (teacher * row.inverse_temperature - row.stats[2]) - row.stats[3];
  words.ratio = teacher == student ? Floats{} : teacher - student;
  if constexpr (partly) {
    const Floats rest = Floats{} + row.stats[7];
    Floats spread = student + rest;
    set_where_greater(spread, 0.0f, 0.0f, spread);
    words.ratio = teacher == infinity ? rest : words.ratio;
    teacher = teacher == infinity ? spread : teacher;
  }
  words.larger = teacher < student ? student : teacher;
  exp_nonpositive(words.larger);
  words.student = student;
  exp_nonpositive(words.student);
  absolute(words.ratio, words.distance);
}

// The weight of the smaller probability, the mixture over the larger one, and the logs of
// larger / mixture and of mixture / smaller.
struct Mixture {
  Floats weight, middle, above, below;
};

ISOBIT_INLINE void mix(const Words& words, float beta, Mixture& mixture) {
  Floats part;
  fall(words.distance, part);
  mixture.weight = words.ratio < 0.0f ? Floats{} + beta : Floats{} + (1.0f - beta);
  part = mixture.weight * part;
  mixture.middle = 1.0f - part;
  Floats log = mixture.middle;
  log_positive(log);
  mixture.above = mixture.middle == 1.0f ? part : -log * (part / (1.0f - mixture.middle));
  const Floats below = words.distance - mixture.above;
  mixture.below = below > 0.0f ? below : Floats{};
}

ISOBIT_INLINE void weigh(const Words& words, Floats& value) {
  value = words.larger == 0.0f ? Floats{} : words.larger * value;
}

// The terms of a row's divergence, and of what the gradient subtracts where that is another sum.
template <Direction direction, bool partly>
struct Terms {
  Row row;
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats (&values)[2]) const {
    Words words;
    load_words<partly>(row, at, count, words);
    if constexpr (direction == Direction::jsd) {
      Mixture mixture;
      mix(words, row.beta, mixture);
      Floats larger, smaller;
      rise(mixture.above, larger);
      bend(mixture.below, smaller);
      smaller = mixture.middle * smaller;
      values[0] = (1.0f - mixture.weight) * larger + mixture.weight * smaller;
      values[1] = words.ratio < 0.0f ? larger : smaller;
      weigh(words, values[1]);
    } else {
      Floats up, down;
      rise(words.distance, up);
      bend(words.distance, down);
      if constexpr (direction == Direction::forward)
        values[0] = words.ratio < 0.0f ? down : up;
      else
        values[0] = words.ratio > 0.0f ? down : up;
      values[1] = Floats{};
    }
    weigh(words, values[0]);
  }
};

// Merges the sums of segments from left to right, as MaxSumTree does.
class SumTree {
 public:
  template <class Term>
  ISOBIT_INLINE void add(const Schedule& schedule, const Term& term) {
    for (const Leaf& leaf : schedule.leaves) {
      sum_leaf_into(leaf.start, leaf.length, term, stack_[top_++]);
      for (int64_t done = ++segments_; done % 2 == 0; done /= 2, top_--)
        for (int64_t i = 0; i < 2; i++)
          stack_[top_ - 2][i] = stack_[top_ - 2][i] + stack_[top_ - 1][i];
    }
  }
  float total(int64_t i) const { return stack_[0][i]; }

 private:
  float stack_[feature_tree_depth][2] = {};
  int64_t top_ = 0, segments_ = 0;
};

// What the gradient of a token's loss is scaled by.
struct TokenGrad {
  float by_divergence, by_target;
  int64_t target;  // the column of the target, if in [0, n)
};

// The gradients of a row's logits.
template <Direction direction, bool partly, class T>
ISOBIT_INLINE void grad_of_row(const Row& row, const TokenGrad& grad, T* out) {
  for (int64_t at = 0; at < row.n; at += lane_count) {
    const int64_t count = std::min(lane_count, row.n - at);
    Words words;
    load_words<partly>(row, at, count, words);
    Floats spread;
    if constexpr (direction == Direction::forward) {
      Floats by;
      fall(words.distance, by);
      spread = words.larger * (words.ratio < 0.0f ? by : -by);
    } else if constexpr (direction == Direction::reverse) {
      spread = words.student * ((0.0f - words.ratio) - row.stats[6]);
      spread = words.student == 0.0f ? Floats{} : spread;
    } else {
      Mixture mixture;
      mix(words, row.beta, mixture);
      const Floats log = words.ratio < 0.0f ? mixture.above : 0.0f - mixture.below;
      spread = ((1.0f - row.beta) * words.student) * (log - row.stats[6]);
      spread = words.student == 0.0f ? Floats{} : spread;
    }
    Floats toward;
    load_lanes(row.student + at, count, 0.0f, toward);
    toward = (toward - row.stats[4]) - row.stats[5];
    exp_nonpositive(toward);
    toward = Floats{} - toward;
    if (grad.target >= at && grad.target < at + count)
      toward[grad.target - at] = 1.0f + toward[grad.target - at];
    store_lanes(spread * grad.by_divergence + toward * grad.by_target, count, out + at);
  }
}

#define ISOBIT_DIVERGENCE(name, direction, partly)                                         \
  ISOBIT_CLONES void add_##name(const Schedule& schedule, const Row& row, SumTree& tree) { \
    tree.add(schedule, Terms<direction, partly>{row});                                     \
  }                                                                                        \
  ISOBIT_CLONES void grad_##name(const Row& row, const TokenGrad& grad, float* out) {      \
    grad_of_row<direction, partly>(row, grad, out);                                        \
  }                                                                                        \
  ISOBIT_CLONES void grad_##name(const Row& row, const TokenGrad& grad, BFloat16* out) {   \
    grad_of_row<direction, partly>(row, grad, out);                                        \
  }
ISOBIT_DIVERGENCE(forward, Direction::forward, false)
ISOBIT_DIVERGENCE(reverse, Direction::reverse, false)
ISOBIT_DIVERGENCE(jsd, Direction::jsd, false)
ISOBIT_DIVERGENCE(forward_partly, Direction::forward, true)
ISOBIT_DIVERGENCE(reverse_partly, Direction::reverse, true)
ISOBIT_DIVERGENCE(jsd_partly, Direction::jsd, true)

void add_terms(Direction direction, bool partly, const Schedule& schedule, const Row& row,
               SumTree& tree) {
  if (direction == Direction::forward)
    return partly ? add_forward_partly(schedule, row, tree) : add_forward(schedule, row, tree);
  if (direction == Direction::reverse)
    return partly ? add_reverse_partly(schedule, row, tree) : add_reverse(schedule, row, tree);
  return partly ? add_jsd_partly(schedule, row, tree) : add_jsd(schedule, row, tree);
}

template <class T>
void write_grads(Direction direction, bool partly, const Row& row, const TokenGrad& grad, T* out) {
  if (direction == Direction::forward)
    return partly ? grad_forward_partly(row, grad, out) : grad_forward(row, grad, out);
  if (direction == Direction::reverse)
    return partly ? grad_reverse_partly(row, grad, out) : grad_reverse(row, grad, out);
  return partly ? grad_jsd_partly(row, grad, out) : grad_jsd(row, grad, out);
}

// Adds a chunk of logits, scaled in place. `values` is [n].
ISOBIT_CLONES void add_scaled(float* values, const VocabularyChunk& chunk, float scale,
                              MaxSumTree& tree) {
  if (scale != 1.0f)
    for (int64_t i = 0; i < chunk.columns(); i++) values[i] = values[i] * scale;
  tree.add(chunk.schedule, values);
}

Tensor in_engine_dtype(const Tensor& rows) {
  return rows.to(engine_dtype(rows.scalar_type())).contiguous();
}

// The student, and what is the same in forward and backward.
struct Inputs {
  Tensor hidden;                // [T, K], in the engine's dtype
  Tensor weight;                // [V, K]
  Tensor targets;               // [T]
  Tensor teacher;               // [T, J], [T, V], or [T, n]
  std::optional<Tensor> head;   // [V, J], or none
  std::optional<Tensor> known;  // int64 [T, n], ascending, -1 for none; or none
  float inverse_temperature, beta;
  Direction direction;

  bool partly() const { return known.has_value(); }
  // [columns, K], in the engine's dtype.
  Tensor weight_of(const VocabularyChunk& chunk) const {
    return weight.narrow(0, chunk.begin, chunk.columns()).to(hidden.scalar_type());
  }
};

// The teacher's logits of a chunk, some tokens at a time.
class TeacherLogits {
 public:
  virtual ~TeacherLogits() = default;
  virtual void begin(const VocabularyChunk& chunk) { chunk_ = &chunk; }
  virtual void end() {}
  // Writes [rows][columns] of tokens [first, first + rows) to the front of `room`.
  virtual void write(int64_t first, int64_t rows, Tensor& room) = 0;

 protected:
  const VocabularyChunk* chunk_ = nullptr;
};

template <class T>
class LiveTeacher : public TeacherLogits {
 public:
  explicit LiveTeacher(const Inputs& in)
      : hidden_(in.teacher), head_(*in.head), schedule_(product_schedule(hidden_.size(1))) {}
  void begin(const VocabularyChunk& chunk) override {
    TeacherLogits::begin(chunk);
    weight_ = in_engine_dtype(head_.narrow(0, chunk.begin, chunk.columns()));
  }
  void end() override { weight_ = Tensor(); }
  void write(int64_t first, int64_t rows, Tensor& room) override {
    const int64_t columns = chunk_->columns();
    const Tensor tokens = in_engine_dtype(hidden_.narrow(0, first, rows));
    float* out = room.mutable_data_ptr<float>();  // [rows][columns]
    Product<T, float>(schedule_, matrix_view<T>(weight_, 0, 1),
                      {matrix_view<T>(tokens, 0, 1), nullptr},
                      Output<float>{out, columns, 0, nullptr, true}, columns, rows)
        .run();
  }

 private:
  const Tensor &hidden_, &head_;
  Schedule schedule_;
  Tensor weight_;  // [columns, J]
};

class StoredTeacher : public TeacherLogits {
 public:
  explicit StoredTeacher(const Inputs& in) : logits_(in.teacher) {}
  void write(int64_t first, int64_t rows, Tensor& room) override {
    const int64_t n = chunk_->columns();
    room.narrow(0, 0, rows * n)
        .view({rows, n})
        .copy_(logits_.narrow(0, first, rows).narrow(1, chunk_->begin, n));
  }

 private:
  const Tensor& logits_;
};

class PartlyKnownTeacher : public TeacherLogits {
 public:
  explicit PartlyKnownTeacher(const Inputs& in)
      : known_(in.known->size(1)),
        ids_(in.known->const_data_ptr<int64_t>()),
        values_(in.teacher.const_data_ptr<float>()) {}
  void write(int64_t first, int64_t rows, Tensor& room) override {
    const int64_t n = chunk_->columns();
    float* out = room.mutable_data_ptr<float>();  // [rows][n]
    std::fill_n(out, rows * n, infinity);
    for (int64_t row = 0; row < rows; row++) {
      const int64_t* begin = ids_ + (first + row) * known_;
      const int64_t* end = begin + known_;
      const float* values = values_ + (first + row) * known_;  // [known]
      for (const int64_t* id = std::lower_bound(begin, end, chunk_->begin);
           id != end && *id < chunk_->end; id++)
        out[row * n + *id - chunk_->begin] = values[id - begin];
    }
  }

 private:
  int64_t known_;
  const int64_t* ids_;   // [T][known]
  const float* values_;  // [T][known]
};

std::unique_ptr<TeacherLogits> make_teacher(const Inputs& in) {
  if (in.partly()) return std::make_unique<PartlyKnownTeacher>(in);
  if (!in.head) return std::make_unique<StoredTeacher>(in);
  std::unique_ptr<TeacherLogits> made;
  dispatch_engine_dtype(engine_dtype(in.teacher.scalar_type()), [&](auto tag) {
    made = std::make_unique<LiveTeacher<typename decltype(tag)::type>>(in);
  });
  return made;
}

// The logits of both models of tokens [first, first + rows), one chunk of the vocabulary at a time.
// The student's are kept for all of these tokens, the teacher's for `teacher_rows` of them. Where a
// weight is converted to the engine's dtype, one model's is in memory at a time.
template <class T>
class BothLogits {
 public:
  BothLogits(const Inputs& in, int64_t first, int64_t rows, int64_t most)
      : in_(in),
        first_(first),
        rows_(rows),
        student_(in.hidden.narrow(0, first, rows), most),
        teacher_(make_teacher(in)),
        room_(empty_tensor({std::min(rows, teacher_rows) * most}, at::kFloat)) {}

  // Calls work(row, student, teacher) for each token, with logits [n] that it may change. Returns
  // the student's logits, [rows][n], valid until the next call.
  template <class Work>
  float* run(const VocabularyChunk& chunk, const Work& work) {
    const int64_t n = chunk.columns();
    float* ours = student_.run(in_.weight_of(chunk));  // [rows][n]
    float* theirs = room_.mutable_data_ptr<float>();   // [teacher_rows][n]
    teacher_->begin(chunk);
    for (int64_t at = 0; at < rows_; at += teacher_rows) {
      const int64_t count = std::min(teacher_rows, rows_ - at);
      teacher_->write(first_ + at, count, room_);
      at::parallel_for(0, count, row_grain(n), [&](int64_t begin, int64_t end) {
        FixedFpEnvironment fp_environment;
        for (int64_t row = begin; row < end; row++)
          work(at + row, ours + (at + row) * n, theirs + row * n);
      });
    }
    teacher_->end();
    return ours;
  }

 private:
  static constexpr int64_t teacher_rows = panel_width;  // not part of the order
  const Inputs& in_;
  int64_t first_, rows_;
  ChunkLogits<T> student_;
  std::unique_ptr<TeacherLogits> teacher_;
  Tensor room_;
};

// The sums of exponentials of one token.
struct TokenSums {
  MaxSumTree plain, scaled, teacher;  // the teacher's, or of the words that it does not know
};

void write_stats(const MaxSumTree& tree, float* stats) {
  stats[0] = tree.total().max;
  stats[1] = log_positive_scalar(canonical_nan(tree.total().sum));
}

// log(teacher's rest / student's rest), from the log of the teacher's and the sums of the student.
float ratio_of_rest(const MaxSumTree& tree, const float* whole, float teacher) {
  float rest[2];
  write_stats(tree, rest);
  const float student = ((rest[0] - whole[0]) + rest[1]) - whole[1];
  return teacher == student ? 0.0f : teacher - student;
}

// Tokens [first, first + rows).
//   rest     [rows], or null: the log of the probability of the words that a teacher does not know
//   found    [rows]: divergences; chosen [rows]: log-probabilities; stats [rows][stat_count]
template <class T>
void forward_tokens(const Inputs& in, const std::vector<VocabularyChunk>& chunks, int64_t first,
                    int64_t rows, const float* rest, float* found, float* chosen, float* stats) {
  const int64_t* targets = in.targets.const_data_ptr<int64_t>() + first;  // [rows]
  BothLogits<T> logits(in, first, rows, most_columns(chunks));
  std::vector<TokenSums> sums(rows);
  std::fill_n(stats, rows * stat_count, 0.0f);
  std::fill_n(chosen, rows, 0.0f);
  const auto for_chunks = [&](const auto& work) {  // work(chunk, row, student, teacher)
    for (const VocabularyChunk& chunk : chunks)
      logits.run(chunk,
                 [&](int64_t row, float* ours, float* theirs) { work(chunk, row, ours, theirs); });
  };
  for_chunks([&](const VocabularyChunk& chunk, int64_t row, float* ours, float* theirs) {
    const int64_t n = chunk.columns(), target = targets[row] - chunk.begin;
    if (target >= 0 && target < n) chosen[row] = ours[target];
    add_scaled(ours, chunk, 1.0f, sums[row].plain);
    if (in.inverse_temperature != 1.0f)
      add_scaled(ours, chunk, in.inverse_temperature, sums[row].scaled);
    if (!in.partly()) return add_scaled(theirs, chunk, in.inverse_temperature, sums[row].teacher);
    for (int64_t i = 0; i < n; i++)
      if (theirs[i] != infinity) ours[i] = -infinity;
    add_scaled(ours, chunk, 1.0f, sums[row].teacher);
  });
  {
    FixedFpEnvironment fp_environment;
    for (int64_t row = 0; row < rows; row++) {
      float* stat = stats + row * stat_count;
      write_stats(sums[row].plain, stat + 4);
      write_stats(in.inverse_temperature == 1.0f ? sums[row].plain : sums[row].scaled, stat);
      if (in.partly())
        stat[7] = ratio_of_rest(sums[row].teacher, stat, rest[row]);
      else
        write_stats(sums[row].teacher, stat + 2);
    }
  }
  std::vector<SumTree> trees(rows);
  for_chunks([&](const VocabularyChunk& chunk, int64_t row, float* ours, float* theirs) {
    const Row given{
        ours, theirs, chunk.columns(), in.inverse_temperature, in.beta, stats + row * stat_count};
    add_terms(in.direction, in.partly(), chunk.schedule, given, trees[row]);
  });
  FixedFpEnvironment fp_environment;
  for (int64_t row = 0; row < rows; row++) {
    float* stat = stats + row * stat_count;
    const bool counts = targets[row] >= 0;
    found[row] = counts ? canonical_nan(trees[row].total(0)) : 0.0f;
    chosen[row] = counts ? canonical_nan((chosen[row] - stat[4]) - stat[5]) : 0.0f;
    if (in.direction == Direction::reverse) stat[6] = found[row];
    if (in.direction == Direction::jsd) stat[6] = trees[row].total(1);
    for (int64_t i = 0; i < stat_count; i++) stat[i] = canonical_nan(stat[i]);
  }
}

Direction direction_of(std::string_view name) {
  ISOBIT_CHECK(name == "forward" || name == "reverse" || name == "jsd", "distillation_loss",
               "a direction of forward, reverse, jsd", std::string(name),
               "call isobit.distillation_loss");
  return name == "forward"   ? Direction::forward
         : name == "reverse" ? Direction::reverse
                             : Direction::jsd;
}

void check_teacher(const Tensor& hidden, const Tensor& weight, const Tensor& teacher,
                   const std::optional<Tensor>& head, const std::optional<Tensor>& known) {
  const int64_t tokens = hidden.size(0);
  bool fits = teacher.dim() == 2 && teacher.size(0) == tokens;
  if (fits && known)
    fits = !head && known->sizes() == teacher.sizes() && known->scalar_type() == at::kLong &&
           known->is_contiguous() && teacher.is_contiguous() && teacher.scalar_type() == at::kFloat;
  else if (fits && head)
    fits = head->dim() == 2 && head->size(0) == weight.size(0) &&
           head->size(1) == teacher.size(1) && head->scalar_type() == teacher.scalar_type();
  else if (fits)
    fits = teacher.size(1) == weight.size(0);
  ISOBIT_CHECK(fits, "distillation_loss", "a teacher of the student's tokens and words",
               describe(teacher), "call isobit.distillation_loss");
}

// Checks what both directions are given.
Inputs read_inputs(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                   const Tensor& teacher, const std::optional<Tensor>& head,
                   const std::optional<Tensor>& known, double temperature,
                   std::string_view direction, double beta) {
  check_engine();
  check_logprob(hidden, weight, targets);
  check_teacher(hidden, weight, teacher, head, known);
  return {in_engine_dtype(hidden),
          weight,
          targets,
          teacher,
          head,
          known,
          1.0f / static_cast<float>(temperature),
          static_cast<float>(beta),
          direction_of(direction)};
}

// Returns ([T] divergences, [T] log-probabilities of targets, [T, 8] stats). `spans` and `of` are
// not used here: autograd passes them to the gradient.
std::tuple<Tensor, Tensor, Tensor> distillation_loss(
    const Tensor& hidden, const Tensor& weight, const Tensor& targets, const Tensor& teacher,
    const std::optional<Tensor>& head, const std::optional<Tensor>& known,
    const std::optional<Tensor>& rest, double temperature, std::string_view direction, double beta,
    const std::optional<Tensor>& /*spans*/, int64_t /*of*/) {
  const Inputs inputs =
      read_inputs(hidden, weight, targets, teacher, head, known, temperature, direction, beta);
  const int64_t tokens = hidden.size(0);
  ISOBIT_CHECK(!known || (rest && rest->numel() == tokens && rest->is_contiguous() &&
                          rest->scalar_type() == at::kFloat),
               "distillation_loss", "the rest of each row", "none",
               "call isobit.distillation_loss");
  Tensor found = empty_tensor({tokens}, at::kFloat), chosen = empty_tensor({tokens}, at::kFloat);
  Tensor stats = empty_tensor({tokens, stat_count}, at::kFloat);
  const std::vector<VocabularyChunk> chunks = cut_vocabulary(weight.size(0), weight.size(0));
  const float* rests = known ? rest->const_data_ptr<float>() : nullptr;  // [T]
  float *a = found.mutable_data_ptr<float>(), *b = chosen.mutable_data_ptr<float>(),
        *c = stats.mutable_data_ptr<float>();
  dispatch_engine_dtype(inputs.hidden.scalar_type(), [&](auto tag) {
    const int64_t step = forward_rows(most_columns(chunks));
    for (int64_t at = 0; at < tokens; at += step)
      forward_tokens<typename decltype(tag)::type>(inputs, chunks, at, std::min(step, tokens - at),
                                                   rests ? rests + at : nullptr, a + at, b + at,
                                                   c + at * stat_count);
  });
  return {found, chosen, stats};
}

struct BackwardInputs {
  const Tensor& divergence;  // fp32 [T]: gradients of divergences
  const Tensor& logprob;     // fp32 [T]: gradients of log-probabilities
  const Tensor& stats;       // fp32 [T, stat_count], from the forward
  const Tensor& spans;       // [samples, 2]
  int64_t global_samples;
  bool wants_hidden, wants_weight;
};

template <class T>
void backward(const Inputs& in, const BackwardInputs& back, SubtreeCounter& hidden_grad,
              Tensor& weight_grad) {
  const int64_t words = in.weight.size(0), rows = in.hidden.size(0);
  const std::vector<VocabularyChunk> chunks = cut_vocabulary(words, words);
  const int64_t most = most_columns(chunks);
  BothLogits<T> logits(in, 0, rows, most);
  // fp32 gradients overwrite the logits.
  Tensor narrow_grads = paired<T> ? empty_tensor({rows * most}, in.hidden.scalar_type()) : Tensor();
  const Schedule samples = sample_schedule(back.spans, 0, back.global_samples);
  const int64_t* targets = in.targets.const_data_ptr<int64_t>();      // [T]
  const float* divergence = back.divergence.const_data_ptr<float>();  // [T]
  const float* logprob = back.logprob.const_data_ptr<float>();        // [T]
  const float* stats = back.stats.const_data_ptr<float>();            // [T][stat_count]
  for (const VocabularyChunk& chunk : chunks) {
    const int64_t n = chunk.columns();
    T* grads = paired<T> ? narrow_grads.mutable_data_ptr<T>() : nullptr;  // [T][n]
    float* ours = logits.run(chunk, [&](int64_t row, float* student, float* theirs) {
      const bool counts = targets[row] >= 0;
      const TokenGrad grad{counts ? divergence[row] * in.inverse_temperature : 0.0f,
                           counts ? logprob[row] : 0.0f, targets[row] - chunk.begin};
      const Row given{
          student, theirs, n, in.inverse_temperature, in.beta, stats + row * stat_count};
      T* out = paired<T> ? grads + row * n : reinterpret_cast<T*>(student);  // [n]
      write_grads(in.direction, in.partly(), given, grad, out);
    });
    if constexpr (!paired<T>) grads = ours;
    if (back.wants_hidden) add_hidden_grad(words, chunk, in.weight_of(chunk), grads, hidden_grad);
    if (back.wants_weight && back.spans.size(0) > 0)
      write_weight_grad(in.hidden, chunk, samples, grads, weight_grad);
  }
}

// Returns (dhidden, dweight); dweight is fp32 if the spans are a share of the global batch.
std::tuple<Tensor, Tensor> distillation_loss_backward(
    const Tensor& divergence, const Tensor& logprob, const Tensor& hidden, const Tensor& weight,
    const Tensor& targets, const Tensor& teacher, const std::optional<Tensor>& head,
    const std::optional<Tensor>& known, const Tensor& stats, const Tensor& spans,
    double temperature, std::string_view direction, double beta, bool want_hidden, bool want_weight,
    int64_t of) {
  const Inputs inputs =
      read_inputs(hidden, weight, targets, teacher, head, known, temperature, direction, beta);
  check_spans("distillation_loss", spans, hidden.size(0));
  const GlobalBatch batch = global_batch("distillation_loss", spans, want_weight ? of : 0);
  const int64_t tokens = hidden.size(0);
  ISOBIT_CHECK(divergence.sizes() == targets.sizes() && logprob.sizes() == targets.sizes() &&
                   divergence.scalar_type() == at::kFloat && logprob.scalar_type() == at::kFloat &&
                   stats.is_contiguous() && stats.numel() == stat_count * tokens &&
                   stats.scalar_type() == at::kFloat,
               "distillation_loss", "gradients float32 of each token, and contiguous stats",
               c10::str("gradient ", describe(divergence), " and stats ", describe(stats)),
               "call isobit.distillation_loss, and let autograd call this");
  const Tensor by_divergence = divergence.contiguous(), by_target = logprob.contiguous();
  SubtreeCounter hidden_grad(tokens, hidden.size(1));
  Tensor weight_grad = empty_tensor(want_weight ? weight.sizes() : at::IntArrayRef{0},
                                    batch.grad_dtype(weight.scalar_type()));
  if (want_weight && spans.size(0) == 0) weight_grad.zero_();
  const bool wants_hidden = want_hidden && tokens > 0;
  const BackwardInputs back{by_divergence,        by_target,    stats,      spans,
                            batch.global_samples, wants_hidden, want_weight};
  dispatch_engine_dtype(inputs.hidden.scalar_type(), [&](auto tag) {
    backward<typename decltype(tag)::type>(inputs, back, hidden_grad, weight_grad);
  });
  if (!wants_hidden) return {empty_tensor({0, hidden.size(1)}, hidden.scalar_type()), weight_grad};
  Tensor out = empty_tensor(hidden.sizes(), hidden.scalar_type());
  dispatch_dtype("distillation_loss", hidden.scalar_type(), [&](auto tag) {
    round_sums(hidden_grad.total().const_data_ptr<float>(), hidden.numel(),
               out.mutable_data_ptr<typename decltype(tag)::type>());
  });
  return {out, weight_grad};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def(
      "distillation_loss(Tensor hidden, Tensor weight, Tensor targets, Tensor teacher, "
      "Tensor? teacher_weight, Tensor? teacher_ids, Tensor? teacher_rest, float temperature, "
      "str direction, float beta, Tensor? spans, int of=0) -> (Tensor, Tensor, Tensor)");
  m.def(
      "distillation_loss_backward(Tensor divergence, Tensor logprob, Tensor hidden, "
      "Tensor weight, Tensor targets, Tensor teacher, Tensor? teacher_weight, "
      "Tensor? teacher_ids, Tensor stats, Tensor spans, float temperature, str direction, "
      "float beta, bool want_hidden, bool want_weight, int of=0) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("distillation_loss", &distillation_loss);
  m.impl("distillation_loss_backward", &distillation_loss_backward);
}

}  // namespace isobit
