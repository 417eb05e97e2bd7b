#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/experts/experts.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include <algorithm>
#include <cmath>
#include <limits>

#include "layers/experts/experts.h"
#include "layers/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

// The logits of a token become probabilities; NaN stays NaN. Returns their logsumexp; `entropy` is
// that of the probabilities, H = log S - sum e_i (l_i - max) / S with e_i = exp(l_i - max).
float softmax_row(float* row, std::int64_t n, double* entropy) {
  const Floats d;
  const float lowest = -std::numeric_limits<float>::infinity();
  FloatVector most = hn::Set(d, lowest);
  for_vectors(n, [&](std::int64_t i, std::int64_t count)
                     HWY_ATTR { most = hn::Max(most, load(row + i, count, lowest)); });
  const float largest = max_of(most);
  const FloatVector shift = hn::Set(d, largest), floor = hn::Set(d, -100.0F);
  DoubleSum sum, weighted;
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    FloatVector below = hn::Sub(load(row + i, count, lowest), shift);
    below = hn::IfThenElse(hn::Lt(below, floor), floor, below);  // e^-100 is 0 here
    const FloatVector e = exponential_below_88(below);
    sum.add(e);
    weighted.add_product(e, below);
    store(e, row + i, count);
  });
  const double total = sum.total();
  *entropy = std::log(total) - weighted.total() / total;
  divide_row(row, static_cast<float>(total), {reinterpret_cast<std::byte*>(row), DType::kF32}, n);
  return static_cast<float>(static_cast<double>(largest) + std::log(total));
}

// The k of the largest p_i + bias_i (bias null: none), of equal ones the first, in ascending order.
// Where there are NaNs they are some k different ones all the same.
void choose_row(const float* p, const float* bias, std::int64_t n, std::int64_t k,
                std::int32_t* chosen) {
  const auto score = [&](std::int64_t i) { return bias == nullptr ? p[i] : p[i] + bias[i]; };
  std::int64_t found = 0;  // in descending order until the end
  const auto offer = [&](std::int64_t i) {
    if (found == k && !(score(i) > score(chosen[k - 1]))) return;
    std::int64_t place = found == k ? k - 1 : found++;
    for (; place > 0 && score(i) > score(chosen[place - 1]); --place) {
      chosen[place] = chosen[place - 1];
    }
    chosen[place] = static_cast<std::int32_t>(i);
  };
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    if (found == k) {
      FloatVector scores = load(p + i, count);
      if (bias != nullptr) scores = hn::Add(scores, load(bias + i, count));
      const FloatVector least = hn::Set(Floats(), score(chosen[k - 1]));
      // A missing lane may pass for a large one: then the elements are looked at in vain.
      if (hn::AllFalse(Floats(), hn::Gt(scores, least))) return;
    }
    for (std::int64_t j = i; j < i + count; ++j) offer(j);
  });
  std::sort(chosen, chosen + k);
}

double dot_row(Elements a, Elements b, std::int64_t n) { return dot(a, b, n); }

// The slots' rows, those at places that aren't negative, each times its weight (null: 1), summed in
// order; added to `to` or written.
void sum_rows(Elements rows, const std::int64_t* places, const float* weights, std::int64_t slots,
              Elements to, bool accumulate, std::int64_t n) {
  const Floats d;
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    FloatVector sum = hn::Zero(d);
    for (std::int64_t slot = 0; slot < slots; ++slot) {
      if (places[slot] < 0) continue;
      const FloatVector weight = hn::Set(d, weights == nullptr ? 1.0F : weights[slot]);
      sum = hn::MulAdd(weight, load(rows + (places[slot] * n + i), count), sum);
    }
    if (accumulate) sum = hn::Add(load(to + i, count), sum);
    store(sum, to + i, count);
  });
}

void gate_elements(Elements gate, Elements up, Elements hidden, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector g = load(gate + i, count);
    store(hn::Mul(hn::Mul(g, sigmoid(g)), load(up + i, count)), hidden + i, count);
  });
}

// d_hidden holds what the gradient of h is but for the row's weight w, q. Returns q . h, the
// weight's gradient; hidden becomes w h, and with s = sigmoid(g): d_up = w q g s,
// d_gate = w q up s (1 + g (1 - s)), which takes d_hidden's place.
float gate_backward_row(Elements gate, Elements up, float row_weight, Elements d_hidden,
                        Elements d_up, Elements hidden, std::int64_t n) {
  const FloatVector one = hn::Set(Floats(), 1.0F), weight = hn::Set(Floats(), row_weight);
  DoubleSum sum;
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector g = load(gate + i, count), u = load(up + i, count);
    const FloatVector q = load(d_hidden + i, count);
    const FloatVector s = sigmoid(g), silu = hn::Mul(g, s), h = hn::Mul(silu, u);
    const FloatVector dh = hn::Mul(weight, q);
    const FloatVector slope = hn::Mul(s, hn::MulAdd(g, hn::Sub(one, s), one));
    sum.add_product(q, h);
    store(hn::Mul(weight, h), hidden + i, count);
    store(hn::Mul(dh, silu), d_up + i, count);
    store(hn::Mul(hn::Mul(dh, u), slope), d_hidden + i, count);
  });
  return static_cast<float>(sum.total());
}

void round_elements(const float* from, Elements to, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, std::int64_t count)
                     HWY_ATTR { store(load(from + i, count), to + i, count); });
}

// d_logits_i = p_i (a_i + shift)
void scale_probabilities(const float* p, const float* a, float shift, float* d_logits,
                         std::int64_t n) {
  const FloatVector by = hn::Set(Floats(), shift);
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    store(hn::Mul(load(p + i, count), hn::Add(load(a + i, count), by)), d_logits + i, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <array>
#include <charconv>
#include <cstring>
#include <string>
#include <utility>

#include "layers/configuration.h"
#include "layers/kernels/elementwise.h"
#include "layers/rms_norm/rms_norm.h"
#include "runtime/products.h"

namespace tessera {
namespace {
HWY_EXPORT(softmax_row);
HWY_EXPORT(choose_row);
HWY_EXPORT(dot_row);
HWY_EXPORT(sum_rows);
HWY_EXPORT(gate_elements);
HWY_EXPORT(gate_backward_row);
HWY_EXPORT(round_elements);
HWY_EXPORT(scale_probabilities);

constexpr double kNormEpsilon = 1e-6;
constexpr std::int64_t kMaxExperts = std::int64_t{1} << 16;
// Experts whose packed matrices lie side by side: as many as fit, so that threads share the work of
// several, and at least one.
constexpr std::int64_t kPackedBytes = std::int64_t{64} << 20;
constexpr std::int64_t kPackedExperts = 64;
// Rows that one piece of the experts' products takes where the matrices are packed. Elsewhere it
// takes kExpertRows: one static shape, so that a row's bits don't depend on the number of rows.
constexpr std::int64_t kPackedRows = 256;
// Rows of an expert's run that its gradients take at a time where factors are packed.
constexpr std::int64_t kWindow = 2048;

// Places in the lists that the layer declares. Parameters of a latent space stand between the
// router's and the shared expert's.
constexpr std::size_t kRouter = 0, kLatentDown = 1;
enum Saved : std::size_t {
  kProbabilities,
  kLogSum,
  kChoices,
  kWeights,
  kPlaces,
  kLoads,
  kSequenceLoads,
  kCounts,
  kStarts,
  kReceived,
  kReceivedStarts,
  kDropped,
  kStatistics,
  kRows,
  kGate,
  kUp,
  kSum,
  kInverseRms,
  kSavedCount
};
enum Statistic : std::size_t { kAuxiliary, kSquare, kEntropy, kStatisticCount };
enum Scratch : std::size_t {
  kWideIn,
  kLatent,
  kTokenSums,
  kDLogits,
  kBalance,
  kSorted,
  kSortedWeights,
  kRowWeights,
  kDWeights,
  kResults,
  kDRows,
  kHidden,
  kDHidden,
  kDUp,
  kUpOut,
  kPartialNorm,
  kRooms,
  kPacked,
  kPieces,
  kScratchCount
};
enum Matrices : std::size_t { kGateMatrix, kUpMatrix, kDownMatrix, kMatrices };

constexpr std::int64_t padded(std::int64_t rows) {
  return (rows + kExpertRows - 1) / kExpertRows * kExpertRows;
}

// Rows [row, row + rows) of what a rank received, of its `expert`-th.
struct Piece {
  std::int64_t row, rows, expert;
};

// Sizes that shapes alone decide.
struct Sizes {
  // `tokens` of a quantum.
  Sizes(const ExpertsShape& shape, DType dtype, ExpertPlacement placement, std::int64_t tokens)
      : width(shape.row_width()), inner(shape.inner), local(placement.count(shape.experts)) {
    constexpr auto kCount = static_cast<std::int64_t>(kMatrices);
    if (dtype != DType::kF32 && !packs_factors(dtype)) sum_bytes = kExpertRows * width * 4;
    if (!packs_factors(dtype)) return;
    piece_rows = kPackedRows;
    matrix_bytes = factor_bytes(inner, width);
    row_bytes = factor_bytes(piece_rows, width);
    hidden_bytes = factor_bytes(piece_rows, inner);
    window = std::min(kWindow, padded(tokens));
    together = std::clamp<std::int64_t>(kPackedBytes / (kCount * matrix_bytes), 1, kPackedExperts);
    packed_bytes =
        std::max(std::min(local, together) * kCount * matrix_bytes,
                 std::min(local * run_bytes(window), std::max(kPackedBytes, run_bytes(window))));
  }
  // Of a run's rows and hidden rows as right factors of its expert's gradients.
  std::int64_t run_bytes(std::int64_t rows) const {
    return factor_bytes(width, rows) + factor_bytes(inner, rows);
  }
  // Of one thread: a piece's rows and hidden rows, packed, and its sums in f32; or some rows of a
  // gradient's left factor.
  std::int64_t room_bytes() const {
    return std::max(row_bytes + 2 * hidden_bytes + sum_bytes,
                    window == 0 ? 0 : factor_bytes(kPackedRows, window));
  }

  std::int64_t width, inner;
  std::int64_t local;                      // experts of this rank
  std::int64_t piece_rows = kExpertRows;   // at most
  std::int64_t together = kPackedExperts;  // experts whose matrices are packed at one time
  std::int64_t packed_bytes = 0;           // of the room that they, or runs, share
  std::int64_t window = 0;                 // rows of a run that are packed at one time
  std::int64_t matrix_bytes = 0, row_bytes = 0, hidden_bytes = 0, sum_bytes = 0;
};

// Rows that a rank's own tokens take, and those that it may receive.
std::int64_t sorted_rows(const ExpertsShape& shape, BatchShape batch) {
  return padded(batch.rows() * shape.active) + kExpertRows * shape.experts;
}
std::int64_t received_rows(const ExpertsShape& shape, BatchShape batch) {
  const std::int64_t local = batch.experts.count(shape.experts);
  return batch.experts.ranks *
         (padded(batch.rows() * std::min(shape.active, local)) + kExpertRows * local);
}

// ceil(factor * slots / experts), but at most `most`, with the factor that the shortest decimal
// says: in binary 1.1 * 10 would be more than 11.
std::int64_t capacity(double factor, std::int64_t slots, std::int64_t experts, std::int64_t most) {
  __extension__ using Wide = unsigned __int128;
  std::array<char, 64> text{};
  const char* const end =
      std::to_chars(text.data(), text.data() + text.size(), factor, std::chars_format::scientific)
          .ptr;
  Wide digits = 0;
  int exponent = 0;
  const char* at = text.data();
  bool fraction = false;
  for (; at != end && *at != 'e'; ++at) {
    if (*at == '.') {
      fraction = true;
      continue;
    }
    digits = digits * 10 + static_cast<Wide>(*at - '0');
    if (fraction) --exponent;
  }
  int power = 0;
  if (at != end) std::from_chars(at[1] == '+' ? at + 2 : at + 1, end, power);
  exponent += power;
  Wide above = digits * static_cast<Wide>(slots), below = static_cast<Wide>(experts);
  for (; exponent > 0 && above < below * static_cast<Wide>(most); --exponent) above *= 10;
  for (; exponent < 0 && below < above; ++exponent) below *= 10;
  const Wide result = (above + below - 1) / below;
  return result < static_cast<Wide>(most) ? static_cast<std::int64_t>(result) : most;
}

// Calls body(row) for all rows, shared out over the threads.
template <class Body>
void for_rows(Queue& queue, std::int64_t rows, const Body& body) {
  queue.parallel_for(pieces_of(rows, kRowsPerPiece), [&](std::int64_t piece, Worker&) {
    const std::int64_t end = std::min(rows, (piece + 1) * kRowsPerPiece);
    for (std::int64_t row = piece * kRowsPerPiece; row < end; ++row) body(row);
  });
}

// One forward or backward, and what its phases share.
class Call {
 public:
  Call(const ExpertsShape& shape, DType dtype, Queue& queue, const Batch& batch,
       const LayerMemory& memory)
      : shape_(shape),
        dtype_(dtype),
        queue_(queue),
        batch_(batch),
        memory_(memory),
        placement_(memory.exchange == nullptr
                       ? ExpertPlacement{}
                       : ExpertPlacement{memory.exchange->ranks(), memory.exchange->rank()}),
        sizes_(shape, dtype, placement_, memory.saved[kLogSum].extent(0)),
        tokens_(batch.shape.rows()),
        counts_(memory.saved[kCounts].as<std::int64_t>()),
        starts_(memory.saved[kStarts].as<std::int64_t>()),
        received_(memory.saved[kReceived].as<std::int64_t>()),
        received_starts_(memory.saved[kReceivedStarts].as<std::int64_t>()) {
    TESSERA_CHECK(static_cast<std::int64_t>(memory.experts.size()) ==
                  sizes_.local * static_cast<std::int64_t>(kMatrices));
  }

  std::int64_t tokens() const { return tokens_; }
  bool exchanges() const { return placement_.ranks > 1; }
  // The first run of a source, and the one behind its last.
  std::int64_t first_run(int source) const { return source * sizes_.local; }
  std::int64_t run_start(std::int64_t run) const { return received_starts_[run]; }
  std::int64_t run_rows(std::int64_t run) const { return padded(received_[run]); }
  // Those that products are formed of: where factors are packed, none of the padding.
  std::int64_t multiplied_rows(std::int64_t run) const {
    return packs_factors(dtype_) ? received_[run] : run_rows(run);
  }

  View scratch(Scratch which, DType dtype, Shape shape) const {
    return shaped(memory_.scratch[which], dtype, shape);
  }
  // The rows that tokens send, in the order of experts, and what comes back for them; where nothing
  // is exchanged those that the experts work on themselves.
  View sent(const View& arranged) const {
    return exchanges() ? scratch(kSorted, dtype_, {starts_[shape_.experts], sizes_.width})
                       : arranged;
  }
  // [rows, width] of the compute type, of all rows that this rank's experts have.
  View arranged(const View& room) const {
    return shaped(room, dtype_, {received_starts_[runs()], sizes_.width});
  }
  View hidden(const View& room) const {
    return shaped(room, dtype_, {received_starts_[runs()], sizes_.inner});
  }
  View results() const { return arranged(memory_.scratch[kResults]); }
  View d_rows() const { return arranged(memory_.scratch[kDRows]); }

  View wide_input(const View& in) const {
    return converted(
        queue_, in, DType::kF32,
        dtype_ == DType::kF32 ? in : scratch(kWideIn, DType::kF32, {tokens_, shape_.width}));
  }

  // Probabilities, choices, weights and the tokens' places; counts of what each rank gets.
  void route(const View& in) const;
  // Copies each token's row of `from` to its places.
  void scatter(const View& from, const View& to) const;
  void clear_padding(const View& rows) const;
  void start_rows(bool back, const View& sorted, const View& arranged, const View& sorted_scalars,
                  const View& arranged_scalars, std::string_view phase) const;
  void finish() const {
    if (exchanges()) memory_.exchange->finish();
  }
  void experts_forward() const;
  // From the rows' gradients, `d_rows`, and weights to what expert_gradient needs and the gradients
  // of the rows that came, and of the weights.
  void experts_backward(const View& row_weights, const View& d_weights) const;
  // Of one source's runs, all overwritten.
  void expert_gradients(int source, std::span<const View> d_experts) const;
  // to = (to +) the sum over a token's slots.
  void combine(const View& rows, bool weighted, const View& to, bool accumulate) const;
  void weights_of_rows(const View& to) const;
  void logit_gradients(const View& d_weights, const View& d_logits) const;

 private:
  std::int64_t runs() const { return placement_.ranks * sizes_.local; }
  void count() const;
  void exchange_counts() const;
  void sum_statistics() const;
  template <class Pack, class Body>
  void for_pieces(const Pack& pack, const Body& body) const;
  // One of this rank's experts' matrices.
  Matrix expert_matrix(std::size_t which, std::int64_t expert) const {
    return matrix(memory_.experts[which * static_cast<std::size_t>(sizes_.local) +
                                  static_cast<std::size_t>(expert)]);
  }
  template <class T>
  T* saved(Saved which) const {
    return memory_.saved[which].as<T>();
  }

  const ExpertsShape& shape_;
  DType dtype_;
  Queue& queue_;
  const Batch& batch_;
  const LayerMemory& memory_;
  ExpertPlacement placement_;
  Sizes sizes_;
  std::int64_t tokens_;
  // Rows of each run, without padding, and where it starts, with one more for the end: by expert of
  // what is sent; by source and this rank's experts of what is received.
  std::int64_t *counts_, *starts_, *received_, *received_starts_;
};

void set_starts(const std::int64_t* counts, std::int64_t runs, std::int64_t* starts) {
  std::int64_t next = 0;
  for (std::int64_t run = 0; run < runs; ++run) {
    starts[run] = next;
    next += padded(counts[run]);
  }
  starts[runs] = next;
}

void Call::route(const View& in) const {
  const std::int64_t n = shape_.experts, k = shape_.active;
  float* const p = saved<float>(kProbabilities);
  float* const log_sum = saved<float>(kLogSum);
  auto* const choices = saved<std::int32_t>(kChoices);
  float* const weights = saved<float>(kWeights);
  if (tokens_ > 0) {
    const View logits(p, {tokens_, n});
    linear_forward(queue_, matrix(wide_input(in)), matrix(memory_.parameters[kRouter]),
                   matrix(logits));
  }
  const float* bias = nullptr;
  if (!memory_.selection_bias.empty()) bias = memory_.selection_bias.as<float>();
  auto* const sums = scratch(kTokenSums, DType::kF64, {tokens_, kStatisticCount}).as<double>();
  for_rows(queue_, tokens_, [&](std::int64_t token) {
    float* const row = p + token * n;
    double* const sum = sums + token * static_cast<std::int64_t>(kStatisticCount);
    log_sum[token] = HWY_DYNAMIC_DISPATCH(softmax_row)(row, n, &sum[kEntropy]);
    sum[kSquare] = static_cast<double>(log_sum[token]) * static_cast<double>(log_sum[token]);
    std::int32_t* const chosen = choices + token * k;
    HWY_DYNAMIC_DISPATCH(choose_row)(row, bias, n, k, chosen);
    float divisor = 0.0F;
    for (std::int64_t slot = 0; slot < k; ++slot) divisor += row[chosen[slot]];
    // A bias may choose experts whose probabilities are all 0: so are their weights.
    if (!shape_.renormalise || divisor == 0.0F) divisor = 1.0F;
    for (std::int64_t slot = 0; slot < k; ++slot) {
      weights[token * k + slot] = row[chosen[slot]] / divisor;
    }
  });
  count();
  sum_statistics();
  exchange_counts();
}

// In order of position: a token's place among an expert's rows is the number of those before it.
void Call::count() const {
  const std::int64_t n = shape_.experts, k = shape_.active, length = batch_.shape.length;
  const auto* const choices = saved<std::int32_t>(kChoices);
  auto* const places = saved<std::int64_t>(kPlaces);
  auto* const loads = saved<std::int64_t>(kLoads);
  auto* const sequence_loads = saved<std::int64_t>(kSequenceLoads);
  auto* const dropped = saved<std::int64_t>(kDropped);
  const std::int64_t most = shape_.capacity_factor > 0.0
                                ? capacity(shape_.capacity_factor, length * k, n, length)
                                : length;
  std::fill_n(counts_, n, 0);
  std::fill_n(loads, n, 0);
  *dropped = 0;
  for (std::int64_t sequence = 0; sequence < batch_.shape.batch; ++sequence) {
    std::int64_t* const own_loads = sequence_loads + sequence * n;
    std::fill_n(own_loads, n, 0);
    for (std::int64_t slot = sequence * length * k; slot < (sequence + 1) * length * k; ++slot) {
      const std::int32_t expert = choices[slot];
      if (own_loads[expert]++ < most) {
        places[slot] = counts_[expert]++;
      } else {
        places[slot] = -1;
        ++*dropped;
      }
    }
    for (std::int64_t expert = 0; expert < n; ++expert) loads[expert] += own_loads[expert];
  }
  set_starts(counts_, n, starts_);
  for_rows(queue_, tokens_, [&](std::int64_t token) {
    for (std::int64_t slot = token * k; slot < (token + 1) * k; ++slot) {
      if (places[slot] >= 0) places[slot] += starts_[choices[slot]];
    }
  });
}

void Call::sum_statistics() const {
  const std::int64_t n = shape_.experts, length = batch_.shape.length;
  const float* const p = saved<float>(kProbabilities);
  const auto* const sequence_loads = saved<std::int64_t>(kSequenceLoads);
  auto* const sums = scratch(kTokenSums, DType::kF64, {tokens_, kStatisticCount}).as<double>();
  const View balance = scratch(kBalance, DType::kF32, {batch_.shape.batch, n});
  float* const shares = balance.as<float>();
  for (std::int64_t i = 0; i < balance.count(); ++i) {
    shares[i] = static_cast<float>(sequence_loads[i]);  // exact: lengths are below 2^24
  }
  const View probabilities(const_cast<float*>(p), {tokens_, n});
  for_rows(queue_, tokens_, [&](std::int64_t token) {
    sums[token * static_cast<std::int64_t>(kStatisticCount) + kAuxiliary] = HWY_DYNAMIC_DISPATCH(
        dot_row)(elements(probabilities) + token * n, elements(balance) + token / length * n, n);
  });
  auto* const statistics = saved<double>(kStatistics);
  std::fill_n(statistics, kStatisticCount, 0.0);
  for (std::int64_t token = 0; token < tokens_; ++token) {
    for (std::size_t i = 0; i < kStatisticCount; ++i) {
      statistics[i] +=
          sums[token * static_cast<std::int64_t>(kStatisticCount) + static_cast<std::int64_t>(i)];
    }
  }
  const auto positions = static_cast<double>(std::max<std::int64_t>(length, 1));
  statistics[kAuxiliary] *=
      static_cast<double>(n) / (static_cast<double>(shape_.active) * positions * positions);
}

void Call::exchange_counts() const {
  if (exchanges()) {
    ExpertExchange& exchange = *memory_.exchange;
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(std::int64_t));
    for (int peer = 0; peer < placement_.ranks; ++peer) {
      const std::int64_t begin = placement_.begin(shape_.experts, peer);
      const std::int64_t end = placement_.begin(shape_.experts, peer + 1);
      if (end > begin) {
        exchange.send(peer, reinterpret_cast<std::byte*>(counts_ + begin), (end - begin) * kBytes);
      }
      if (sizes_.local > 0) {
        exchange.receive(peer, reinterpret_cast<std::byte*>(received_ + first_run(peer)),
                         sizes_.local * kBytes);
      }
    }
    exchange.start("expert counts");
    exchange.finish();
  } else {
    std::copy_n(counts_, runs(), received_);
  }
  set_starts(received_, runs(), received_starts_);
  TESSERA_CHECK(received_starts_[runs()] <= memory_.saved[kRows].extent(0));
}

void Call::scatter(const View& from, const View& to) const {
  const std::int64_t k = shape_.active;
  const auto* const places = saved<std::int64_t>(kPlaces);
  const std::int64_t bytes = sizes_.width * size_of(dtype_);
  for_rows(queue_, tokens_, [&](std::int64_t token) {
    for (std::int64_t slot = token * k; slot < (token + 1) * k; ++slot) {
      if (places[slot] < 0) continue;
      std::memcpy(to.raw() + places[slot] * bytes, from.raw() + token * bytes,
                  static_cast<std::size_t>(bytes));
    }
  });
}

// Zeros behind each run of what this rank's experts work on, where products are formed of them.
void Call::clear_padding(const View& rows) const {
  if (packs_factors(dtype_)) return;
  const std::int64_t bytes = sizes_.width * size_of(dtype_);
  queue_.parallel_for(runs(), [&](std::int64_t run, Worker&) {
    std::memset(rows.raw() + (received_starts_[run] + received_[run]) * bytes, 0,
                static_cast<std::size_t>((run_rows(run) - received_[run]) * bytes));
  });
}

// Each run's rows, exactly, and a number for each row (where `sorted_scalars` isn't empty), padding
// included; from the tokens' ranks to the experts', or `back`.
void Call::start_rows(bool back, const View& sorted, const View& arranged,
                      const View& sorted_scalars, const View& arranged_scalars,
                      std::string_view phase) const {
  if (!exchanges()) return;
  ExpertExchange& exchange = *memory_.exchange;
  const auto part = [&](bool sends, int peer, const View& view, std::int64_t row, std::int64_t rows,
                        std::int64_t columns) {
    if (rows == 0) return;
    const std::int64_t bytes = columns * size_of(view.dtype());
    std::byte* const data = view.raw() + row * bytes;
    sends ? exchange.send(peer, data, rows * bytes) : exchange.receive(peer, data, rows * bytes);
  };
  for (int peer = 0; peer < placement_.ranks; ++peer) {
    const std::int64_t begin = placement_.begin(shape_.experts, peer);
    const std::int64_t end = placement_.begin(shape_.experts, peer + 1);
    for (std::int64_t expert = begin; expert < end; ++expert) {
      part(!back, peer, sorted, starts_[expert], counts_[expert], sizes_.width);
    }
    const std::int64_t first = first_run(peer), last = first_run(peer + 1);
    for (std::int64_t run = first; run < last; ++run) {
      part(back, peer, arranged, received_starts_[run], received_[run], sizes_.width);
    }
    if (sorted_scalars.empty()) continue;
    part(!back, peer, sorted_scalars, starts_[begin], starts_[end] - starts_[begin], 1);
    part(back, peer, arranged_scalars, received_starts_[first],
         received_starts_[last] - received_starts_[first], 1);
  }
  exchange.start(phase);
}

// Calls body(worker, piece, the factors of its expert) for all rows that this rank's experts have;
// factors come from pack(matrix, expert, room).
template <class Pack, class Body>
void Call::for_pieces(const Pack& pack, const Body& body) const {
  std::array<std::array<Factor, kMatrices>, kPackedExperts> factors;
  std::array<std::int64_t, kPackedExperts> experts{};
  const View packed = scratch(kPacked, DType::kF32, {sizes_.packed_bytes / 4});
  const std::int64_t capacity_of_list = memory_.saved[kRows].extent(0) / kExpertRows;
  auto* const pieces =
      reinterpret_cast<Piece*>(scratch(kPieces, DType::kI64, {capacity_of_list * 3}).raw());
  for (std::int64_t expert = 0; expert < sizes_.local;) {
    std::int64_t together = 0, count = 0;
    for (; expert < sizes_.local && together < sizes_.together; ++expert) {
      const std::int64_t before = count;
      for (int source = 0; source < placement_.ranks; ++source) {
        const std::int64_t run = first_run(source) + expert;
        // In parts as even as blocks of kExpertRows allow.
        std::int64_t row = run_start(run), blocks = run_rows(run) / kExpertRows;
        const std::int64_t end = row + multiplied_rows(run);
        for (std::int64_t parts = pieces_of(run_rows(run), sizes_.piece_rows); parts > 0; --parts) {
          const std::int64_t some = pieces_of(blocks, parts);
          pieces[count++] = {row, std::min(some * kExpertRows, end - row), together};
          row += some * kExpertRows;
          blocks -= some;
        }
      }
      if (count > before) experts[static_cast<std::size_t>(together++)] = expert;
    }
    constexpr auto kCount = static_cast<std::int64_t>(kMatrices);
    queue_.parallel_for(together * kCount, [&](std::int64_t i, Worker&) {
      const auto of = static_cast<std::size_t>(i / kCount),
                 which = static_cast<std::size_t>(i % kCount);
      factors[of][which] = pack(which, experts[of], packed.raw() + i * sizes_.matrix_bytes);
    });
    queue_.parallel_for(count, [&](std::int64_t i, Worker& worker) {
      body(worker, pieces[i], factors[static_cast<std::size_t>(pieces[i].expert)]);
    });
  }
}

Matrix rows_of(const View& view, const Piece& piece) {
  Matrix all = matrix(view);
  return {all.dtype, all.at(piece.row, 0), piece.rows, all.columns, all.stride};
}

void Call::experts_forward() const {
  const View rows = arranged(memory_.saved[kRows]), result = results();
  const View gate = hidden(memory_.saved[kGate]), up = hidden(memory_.saved[kUp]);
  const View inner = hidden(memory_.scratch[kHidden]);
  const View rooms = scratch(kRooms, DType::kF32, {queue_.threads(), sizes_.room_bytes() / 4});
  for_pieces(
      [&](std::size_t which, std::int64_t expert, std::byte* room) {
        return Factor::right(expert_matrix(which, expert), Transpose::kYes, room);
      },
      [&](Worker& worker, const Piece& piece, const std::array<Factor, kMatrices>& factors) {
        std::byte* const room = rooms.raw() + worker.index() * sizes_.room_bytes();
        const Factor x = Factor::left(rows_of(rows, piece), Transpose::kNo, room);
        product(worker, x, factors[kGateMatrix], rows_of(gate, piece), false);
        product(worker, x, factors[kUpMatrix], rows_of(up, piece), false);
        const std::int64_t at = piece.row * sizes_.inner;
        HWY_DYNAMIC_DISPATCH(gate_elements)
        (elements(gate) + at, elements(up) + at, elements(inner) + at, piece.rows * sizes_.inner);
        const Factor h =
            Factor::left(rows_of(inner, piece), Transpose::kNo, room + sizes_.row_bytes);
        product(worker, h, factors[kDownMatrix], rows_of(result, piece), false);
      });
}

void Call::experts_backward(const View& row_weights, const View& d_weights) const {
  const View d_out = d_rows(), d_in = results();
  const View gate = hidden(memory_.saved[kGate]), up = hidden(memory_.saved[kUp]);
  const View inner = hidden(memory_.scratch[kHidden]), d_up = hidden(memory_.scratch[kDUp]);
  const View d_inner = hidden(memory_.scratch[kDHidden]);
  const View rooms = scratch(kRooms, DType::kF32, {queue_.threads(), sizes_.room_bytes() / 4});
  const float* const weights = row_weights.as<float>();
  float* const weight_gradients = d_weights.as<float>();
  const bool paired = packs_factors(dtype_);  // gate and up
  for_pieces(
      [&](std::size_t which, std::int64_t expert, std::byte* room) {
        if (!paired || which == kDownMatrix) {
          return Factor::right(expert_matrix(which, expert), Transpose::kNo, room);
        }
        if (which == kUpMatrix) return Factor();  // its room is the pair's
        return Factor::right_pair(expert_matrix(kGateMatrix, expert),
                                  expert_matrix(kUpMatrix, expert), room);
      },
      [&](Worker& worker, const Piece& piece, const std::array<Factor, kMatrices>& factors) {
        std::byte* const room = rooms.raw() + worker.index() * sizes_.room_bytes();
        std::byte* const hidden_room = room + sizes_.row_bytes;
        std::byte* const up_room = hidden_room + sizes_.hidden_bytes;
        const Factor dy = Factor::left(rows_of(d_out, piece), Transpose::kNo, room);
        product(worker, dy, factors[kDownMatrix], rows_of(d_inner, piece), false);
        for (std::int64_t row = piece.row; row < piece.row + piece.rows; ++row) {
          const std::int64_t at = row * sizes_.inner;
          weight_gradients[row] = HWY_DYNAMIC_DISPATCH(gate_backward_row)(
              elements(gate) + at, elements(up) + at, weights[row], elements(d_inner) + at,
              elements(d_up) + at, elements(inner) + at, sizes_.inner);
        }
        if (paired) {
          const Factor both =
              Factor::left_pair(rows_of(d_inner, piece), rows_of(d_up, piece), hidden_room);
          product(worker, both, factors[kGateMatrix], rows_of(d_in, piece), false);
          return;
        }
        Matrix sum = rows_of(d_in, piece);
        if (dtype_ != DType::kF32) {
          sum = Matrix(reinterpret_cast<float*>(up_room + sizes_.hidden_bytes), piece.rows,
                       sizes_.width, sizes_.width);
        }
        product(worker, Factor::left(rows_of(d_inner, piece), Transpose::kNo, hidden_room),
                factors[kGateMatrix], sum, false);
        product(worker, Factor::left(rows_of(d_up, piece), Transpose::kNo, up_room),
                factors[kUpMatrix], sum, true);
        if (dtype_ != DType::kF32) {
          HWY_DYNAMIC_DISPATCH(round_elements)
          (reinterpret_cast<const float*>(sum.data), elements(d_in) + piece.row * sizes_.width,
           piece.rows * sizes_.width);
        }
      });
}

void Call::expert_gradients(int source, std::span<const View> d_experts) const {
  const std::int64_t local = sizes_.local;
  const auto gradient = [&](std::size_t which, std::int64_t expert) {
    return d_experts[which * static_cast<std::size_t>(local) + static_cast<std::size_t>(expert)];
  };
  // By matrix: what the left factor is, turned, and the right one.
  const View rows = arranged(memory_.saved[kRows]), inner = hidden(memory_.scratch[kHidden]);
  const std::array<View, kMatrices> left = {hidden(memory_.scratch[kDHidden]),
                                            hidden(memory_.scratch[kDUp]), d_rows()};
  const std::array<View, kMatrices> right = {rows, rows, inner};
  const auto piece_of = [&](std::int64_t expert) -> Piece {
    const std::int64_t run = first_run(source) + expert;
    return {run_start(run), multiplied_rows(run), expert};
  };
  std::int64_t longest = 0;
  for (std::int64_t expert = 0; expert < local; ++expert) {
    const Piece run = piece_of(expert);
    longest = std::max(longest, run.rows);
    for (std::size_t which = 0; which < kMatrices; ++which) {
      if (run.rows == 0) {
        queue_.fill_zero(gradient(which, expert));
      } else if (!packs_factors(dtype_)) {
        linear_backward_weight(queue_, rows_of(left[which], run), rows_of(right[which], run),
                               matrix(gradient(which, expert)), false);
      }
    }
  }
  if (!packs_factors(dtype_)) return;

  // Right factors of several runs are packed, each for all rows of its gradients; then pieces are
  // some rows of a gradient, whose left factor they pack.
  const View packed = scratch(kPacked, DType::kF32, {sizes_.packed_bytes / 4});
  const View rooms = scratch(kRooms, DType::kF32, {queue_.threads(), sizes_.room_bytes() / 4});
  const std::int64_t of_inner = pieces_of(sizes_.inner, kPackedRows);
  const std::int64_t of_width = pieces_of(sizes_.width, kPackedRows);
  struct Run {
    Piece piece;
    std::byte* room;
    Factor rows, hidden;
  };
  std::array<Run, kPackedExperts> runs;
  for (std::int64_t first = 0; first < longest; first += sizes_.window) {
    for (std::int64_t expert = 0; expert < local;) {
      std::int64_t count = 0, used = 0;
      for (; expert < local && count < kPackedExperts; ++expert) {
        Piece piece = piece_of(expert);
        piece.row += first;
        piece.rows = std::min(piece.rows - first, sizes_.window);
        if (piece.rows <= 0) continue;
        const std::int64_t bytes = sizes_.run_bytes(piece.rows);
        if (used + bytes > packed.bytes()) break;
        Run& run = runs[static_cast<std::size_t>(count++)];
        run.piece = piece;
        run.room = packed.raw() + used;
        used += bytes;
      }
      queue_.parallel_for(2 * count, [&](std::int64_t i, Worker&) {
        Run& run = runs[static_cast<std::size_t>(i / 2)];
        if (i % 2 == 0) {
          run.rows = Factor::right(rows_of(rows, run.piece), Transpose::kNo, run.room);
        } else {
          run.hidden = Factor::right(rows_of(inner, run.piece), Transpose::kNo,
                                     run.room + factor_bytes(sizes_.width, run.piece.rows));
        }
      });
      const std::int64_t of_run = 2 * of_inner + of_width;
      queue_.parallel_for(count * of_run, [&](std::int64_t i, Worker& worker) {
        const Run& run = runs[static_cast<std::size_t>(i / of_run)];
        std::int64_t part = i % of_run;
        std::size_t which = kGateMatrix;
        while (which < kDownMatrix && part >= of_inner) {
          part -= of_inner;
          ++which;
        }
        const Matrix to = matrix(gradient(which, run.piece.expert));
        const std::int64_t row = part * kPackedRows, some = std::min(kPackedRows, to.rows - row);
        Matrix terms = rows_of(left[which], run.piece);
        terms = {terms.dtype, terms.at(0, row), terms.rows, some, terms.stride};
        const Factor factor = Factor::left(terms, Transpose::kYes,
                                           rooms.raw() + worker.index() * sizes_.room_bytes());
        product(worker, factor, which == kDownMatrix ? run.hidden : run.rows,
                {to.dtype, to.at(row, 0), some, to.columns, to.stride}, first > 0);
      });
    }
  }
}

void Call::combine(const View& rows, bool weighted, const View& to, bool accumulate) const {
  const std::int64_t k = shape_.active;
  const auto* const places = saved<std::int64_t>(kPlaces);
  const float* const weights = weighted ? saved<float>(kWeights) : nullptr;
  for_rows(queue_, tokens_, [&](std::int64_t token) {
    HWY_DYNAMIC_DISPATCH(sum_rows)
    (elements(rows), places + token * k, weighted ? weights + token * k : nullptr, k,
     elements(to) + token * sizes_.width, accumulate, sizes_.width);
  });
}

// The weight of each sent row, 0 of padding.
void Call::weights_of_rows(const View& to) const {
  const auto* const places = saved<std::int64_t>(kPlaces);
  const float* const weights = saved<float>(kWeights);
  queue_.fill_zero(to);
  float* const of_rows = to.as<float>();
  for (std::int64_t slot = 0; slot < tokens_ * shape_.active; ++slot) {
    if (places[slot] >= 0) of_rows[places[slot]] = weights[slot];
  }
}

// With g_i the gradient of a chosen expert's weight (0 where it was dropped), a the auxiliary
// loss's of a probability and b the z-loss's of the logsumexp:
//   d_logits_j = p_j (a_j - sum_i p_i a_i + b)  + w_j (g_j - sum over the chosen of w_i g_i)
// of which the last term is all experts' and has p in place of w where nothing is renormalised.
void Call::logit_gradients(const View& d_weights, const View& d_logits) const {
  const std::int64_t n = shape_.experts, k = shape_.active, length = batch_.shape.length;
  const float* const p = saved<float>(kProbabilities);
  const float* const log_sum = saved<float>(kLogSum);
  const float* const weights = saved<float>(kWeights);
  const auto* const choices = saved<std::int32_t>(kChoices);
  const auto* const places = saved<std::int64_t>(kPlaces);
  const auto* const loads = saved<std::int64_t>(kSequenceLoads);
  const float* const gradients = d_weights.as<float>();
  float* const out = d_logits.as<float>();
  // Of a token in the whole step.
  const double share =
      batch_.step_sequences > 0
          ? 1.0 / (static_cast<double>(batch_.step_sequences) * static_cast<double>(length))
          : 0.0;
  const View balance = scratch(kBalance, DType::kF32, {batch_.shape.batch, n});
  float* const of_loads = balance.as<float>();
  for (std::int64_t i = 0; i < balance.count(); ++i) {
    of_loads[i] =
        static_cast<float>(shape_.auxiliary_coefficient * share * static_cast<double>(n) *
                           static_cast<double>(loads[i]) / static_cast<double>(k * length));
  }
  const View probabilities = memory_.saved[kProbabilities];
  for_rows(queue_, tokens_, [&](std::int64_t token) {
    const std::int64_t row = token * n, sequence = token / length * n;
    const auto gradient_of = [&](std::int64_t slot) {
      return places[slot] < 0 ? 0.0 : static_cast<double>(gradients[places[slot]]);
    };
    double mean = 0.0;  // of the chosen experts' gradients
    for (std::int64_t slot = token * k; slot < (token + 1) * k; ++slot) {
      mean += static_cast<double>(weights[slot]) * gradient_of(slot);
    }
    double shift = 2.0 * shape_.z_coefficient * share * static_cast<double>(log_sum[token]) -
                   HWY_DYNAMIC_DISPATCH(dot_row)(elements(probabilities) + row,
                                                 elements(balance) + sequence, n);
    if (!shape_.renormalise) shift -= std::exchange(mean, 0.0);
    HWY_DYNAMIC_DISPATCH(scale_probabilities)
    (p + row, of_loads + sequence, static_cast<float>(shift), out + row, n);
    for (std::int64_t slot = token * k; slot < (token + 1) * k; ++slot) {
      out[row + choices[slot]] +=
          static_cast<float>(static_cast<double>(weights[slot]) * (gradient_of(slot) - mean));
    }
  });
}

void append(std::vector<BufferSpec>& list, std::vector<BufferSpec> more) {
  for (BufferSpec& buffer : more) {
    buffer.name = "shared_expert." + buffer.name;
    list.push_back(std::move(buffer));
  }
}

}  // namespace

ExpertsShape experts_shape(const ExpertsConfig& given, std::int64_t width,
                           const std::string& path) {
  ExpertsConfig config = given;
  complete(config);
  ExpertsShape shape;
  shape.width = width;
  shape.experts = require_range(path + ".experts", config.experts(), 1, kMaxExperts);
  shape.active = require_range(path + ".active", config.active(), 1, shape.experts);
  shape.inner = require_range(path + ".width", config.width(), 1, kMaxFeedForwardWidth);
  shape.shared =
      require_range(path + ".shared_width", config.shared_width(), 0, kMaxFeedForwardWidth);
  if (config.has_latent()) {
    shape.latent = require_range(path + ".latent.width", config.latent().width(), 1, kMaxWidth);
    shape.latent_norm = config.latent().norm();
  }
  shape.renormalise = config.renormalise();
  shape.selection_bias = config.selection_bias();
  shape.auxiliary_coefficient =
      require_at_least_zero(path + ".auxiliary_coefficient", config.auxiliary_coefficient());
  shape.z_coefficient = require_at_least_zero(path + ".z_coefficient", config.z_coefficient());
  shape.capacity_factor =
      require_at_least_zero(path + ".capacity_factor", config.capacity_factor());
  return shape;
}

std::vector<View> expert_matrices(std::span<const View> stacked) {
  std::vector<View> matrices;
  for (const View& parameter : stacked) {
    const Shape shape = {parameter.extent(1), parameter.extent(2)};
    for (std::int64_t expert = 0; expert < parameter.extent(0); ++expert) {
      matrices.push_back(parameter.slice(expert, expert + 1).reshaped(shape));
    }
  }
  return matrices;
}

MixtureOfExperts::MixtureOfExperts(const ExpertsShape& shape, double deviation,
                                   double output_deviation, DType compute)
    : shape_(shape),
      deviation_(deviation),
      output_deviation_(output_deviation),
      dtype_(compute),
      shared_(shape.width, shape.shared, deviation, output_deviation, compute) {}

std::vector<ParameterSpec> MixtureOfExperts::parameters() const {
  const std::int64_t d = shape_.width, l = shape_.latent;
  const Init normal = {Init::Kind::kNormal, deviation_};
  std::vector<ParameterSpec> list = {{"router.weight", {shape_.experts, d}, normal, true, true}};
  if (l > 0) {
    list.push_back({"latent_down.weight", {l, d}, normal, true});
    if (shape_.latent_norm) {
      list.push_back({"latent_norm.weight", {l}, {Init::Kind::kConstant, 1.0}, false});
    }
    list.push_back({"latent_up.weight", {d, l}, {Init::Kind::kNormal, output_deviation_}, true});
  }
  if (shape_.shared > 0) {
    for (ParameterSpec& parameter : shared_.parameters()) {
      parameter.name = "shared_expert." + parameter.name;
      list.push_back(std::move(parameter));
    }
  }
  return list;
}

std::vector<ParameterSpec> MixtureOfExperts::expert_parameters() const {
  const std::int64_t n = shape_.experts, m = shape_.inner, l = shape_.row_width();
  const Init normal = {Init::Kind::kNormal, deviation_};
  return {{"experts.gate_proj.weight", {n, m, l}, normal, true},
          {"experts.up_proj.weight", {n, m, l}, normal, true},
          {"experts.down_proj.weight", {n, l, m}, {Init::Kind::kNormal, output_deviation_}, true}};
}

std::vector<BufferSpec> MixtureOfExperts::saved(BatchShape shape) const {
  const std::int64_t tokens = shape.rows(), n = shape_.experts, k = shape_.active;
  const std::int64_t l = shape_.row_width(), m = shape_.inner;
  const std::int64_t rows = received_rows(shape_, shape);
  const std::int64_t runs = shape.experts.ranks * shape.experts.count(n);
  std::vector<BufferSpec> list = {
      {"probabilities", DType::kF32, {tokens, n}},
      {"log_sum", DType::kF32, {tokens}},
      {"choices", DType::kI32, {tokens, k}},
      {"weights", DType::kF32, {tokens, k}},
      {"places", DType::kI64, {tokens, k}},
      {"loads", DType::kI64, {n}},
      {"sequence_loads", DType::kI64, {shape.batch, n}},
      {"counts", DType::kI64, {n}},
      {"starts", DType::kI64, {n + 1}},
      {"received", DType::kI64, {runs}},
      {"received_starts", DType::kI64, {runs + 1}},
      {"dropped", DType::kI64, {1}},
      {"statistics", DType::kF64, {static_cast<std::int64_t>(kStatisticCount)}},
      {"rows", dtype_, {rows, l}},
      {"gate", dtype_, {rows, m}},
      {"up", dtype_, {rows, m}},
      {"sum", dtype_, {shape_.latent > 0 ? tokens : 0, l}},
      {"inverse_rms", DType::kF32, {shape_.latent_norm ? tokens : 0}}};
  TESSERA_CHECK(list.size() == kSavedCount);
  if (shape_.shared > 0) append(list, shared_.saved(shape));
  return list;
}

std::vector<BufferSpec> MixtureOfExperts::scratch(BatchShape shape) const {
  const std::int64_t tokens = shape.rows(), n = shape_.experts, d = shape_.width;
  const std::int64_t l = shape_.row_width(), m = shape_.inner;
  const bool exchanges = shape.experts.ranks > 1, latent = shape_.latent > 0;
  const std::int64_t rows = received_rows(shape_, shape);
  const std::int64_t sorted = exchanges ? sorted_rows(shape_, shape) : 0;
  const Sizes sizes(shape_, dtype_, shape.experts, tokens);
  std::vector<BufferSpec> list = {
      {"wide_in", DType::kF32, {dtype_ == DType::kF32 ? 0 : tokens, d}},
      {"latent", dtype_, {latent ? tokens : 0, l}},
      {"token_sums", DType::kF64, {tokens, static_cast<std::int64_t>(kStatisticCount)}},
      {"d_logits", DType::kF32, {tokens, n}},
      {"balance", DType::kF32, {shape.batch, n}},
      {"sorted", dtype_, {sorted, l}},
      {"sorted_weights", DType::kF32, {sorted}},
      {"row_weights", DType::kF32, {rows}},
      {"d_weights", DType::kF32, {rows}},
      {"results", dtype_, {rows, l}},
      {"d_rows", dtype_, {rows, l}},
      {"hidden", dtype_, {rows, m}},
      {"d_hidden", dtype_, {rows, m}},
      {"d_up", dtype_, {rows, m}},
      {"up_out", DType::kF32, {latent && shape_.shared > 0 ? tokens : 0, d}},
      {"partial_norm", DType::kF32, {shape_.latent_norm ? rms_norm_blocks(tokens) : 0, l}},
      {"rooms", DType::kF32, {shape.threads, sizes.room_bytes() / 4}},
      {"packed", DType::kF32, {sizes.packed_bytes / 4}},
      {"pieces", DType::kI64, {rows / kExpertRows, 3}}};
  TESSERA_CHECK(list.size() == kScratchCount);
  if (shape_.shared > 0) append(list, shared_.scratch(shape));
  return list;
}

MixtureOfExperts::RowBytes MixtureOfExperts::row_bytes(BatchShape shape) const {
  const auto sum = [&](const std::vector<BufferSpec>& buffers) {
    std::int64_t bytes = 0;
    for (const BufferSpec& buffer : buffers) {
      if (buffer.shape[0] == received_rows(shape_, shape)) bytes += buffer.bytes();
    }
    return bytes;
  };
  return {sum(saved(shape)), sum(scratch(shape))};
}

double MixtureOfExperts::flops_per_token(std::int64_t length) const {
  const auto d = static_cast<double>(shape_.width), l = static_cast<double>(shape_.row_width());
  double flops = 2.0 * d * static_cast<double>(shape_.experts) +
                 6.0 * l * static_cast<double>(shape_.inner * shape_.active);
  if (shape_.latent > 0) flops += 4.0 * d * l;
  if (shape_.shared > 0) flops += shared_.flops_per_token(length);
  return flops;
}

std::int64_t MixtureOfExperts::dispatched_bytes_per_token() const {
  return shape_.active * shape_.row_width() * size_of(dtype_);
}

RouterStatistics MixtureOfExperts::statistics(const LayerMemory& memory) const {
  const auto* const sums = memory.saved[kStatistics].as<double>();
  return {{memory.saved[kLoads].as<std::int64_t>(), static_cast<std::size_t>(shape_.experts)},
          *memory.saved[kDropped].as<std::int64_t>(),
          sums[kAuxiliary],
          sums[kSquare],
          sums[kEntropy]};
}

namespace {

// Where the maps of a latent space and the shared expert's parameters stand.
struct Places {
  explicit Places(const ExpertsShape& shape)
      : norm(kLatentDown + 1),
        up(norm + (shape.latent_norm ? 1 : 0)),
        shared(shape.latent > 0 ? up + 1 : kLatentDown) {}
  std::size_t norm, up, shared;
};

LayerMemory of_shared(const LayerMemory& memory, const Places& places) {
  return {memory.parameters.subspan(places.shared), memory.saved.subspan(kSavedCount),
          memory.scratch.subspan(kScratchCount)};
}

}  // namespace

void MixtureOfExperts::forward(Queue& queue, const Batch& batch, const View& in, const View& out,
                               const LayerMemory& memory) const {
  const Call call(shape_, dtype_, queue, batch, memory);
  const Places places(shape_);
  const std::span<const View> p = memory.parameters;
  const std::int64_t tokens = call.tokens();
  const bool latent = shape_.latent > 0 && tokens > 0, shared = shape_.shared > 0 && tokens > 0;

  call.route(in);
  View z = in;
  if (latent) {
    z = call.scratch(kLatent, dtype_, {tokens, shape_.latent});
    linear_forward(queue, matrix(in), matrix(p[kLatentDown]), matrix(z));
  }
  const View rows = call.arranged(memory.saved[kRows]);
  call.scatter(z, call.sent(rows));
  call.start_rows(false, call.sent(rows), rows, {}, {}, "experts' rows");
  if (shared) shared_.forward(queue, batch, in, out, of_shared(memory, places));
  call.finish();
  call.clear_padding(rows);
  call.experts_forward();
  const View results = call.results();
  call.start_rows(true, call.sent(results), results, {}, {}, "experts' results");
  call.finish();

  if (!latent) {
    call.combine(call.sent(results), true, out, shared);
    return;
  }
  const View sum = shaped(memory.saved[kSum], dtype_, {tokens, shape_.latent});
  call.combine(call.sent(results), true, sum, false);
  View normed = sum;
  if (shape_.latent_norm) {
    normed = z;
    rms_norm(queue, sum, p[places.norm], kNormEpsilon, normed, memory.saved[kInverseRms]);
  }
  const View up_out = shared ? call.scratch(kUpOut, DType::kF32, {tokens, shape_.width}) : out;
  linear_forward(queue, matrix(normed), matrix(p[places.up]), matrix(up_out));
  if (shared) add(queue, out, up_out);
}

void MixtureOfExperts::backward(Queue& queue, const Batch& batch, const View& in, const View& d_out,
                                const View& d_in, std::span<const View> d_parameters,
                                const LayerMemory& memory) const {
  const Call call(shape_, dtype_, queue, batch, memory);
  const Places places(shape_);
  const std::span<const View> p = memory.parameters;
  const std::int64_t tokens = call.tokens();
  const bool latent = shape_.latent > 0 && tokens > 0, shared = shape_.shared > 0 && tokens > 0;

  View d_sum = d_out;
  if (latent) {
    const View sum = shaped(memory.saved[kSum], dtype_, {tokens, shape_.latent});
    d_sum = call.scratch(kLatent, dtype_, {tokens, shape_.latent});
    View normed = sum;
    if (shape_.latent_norm) {
      normed = d_sum;  // until the gradient takes its place
      rms_norm_again(queue, sum, p[places.norm], memory.saved[kInverseRms], normed);
    }
    linear_backward_weight(queue, matrix(d_out), matrix(normed), matrix(d_parameters[places.up]),
                           false);
    linear_backward_input(queue, matrix(d_out), matrix(p[places.up]), matrix(d_sum), false);
    if (shape_.latent_norm) {
      const View partial =
          call.scratch(kPartialNorm, DType::kF32, {rms_norm_blocks(tokens), shape_.latent});
      rms_norm_backward(queue, sum, p[places.norm], memory.saved[kInverseRms], d_sum, d_sum, false,
                        partial);
      rms_norm_weight_gradient(queue, partial, d_parameters[places.norm]);
    }
  }

  const View d_rows = call.d_rows(), results = call.results();
  const Shape arranged = {d_rows.extent(0)}, sorted = {call.sent(d_rows).extent(0)};
  const View row_weights = call.scratch(kRowWeights, DType::kF32, arranged);
  const View d_weights = call.scratch(kDWeights, DType::kF32, arranged);
  const View sorted_weights =
      call.exchanges() ? call.scratch(kSortedWeights, DType::kF32, sorted) : row_weights;
  call.scatter(d_sum, call.sent(d_rows));
  call.weights_of_rows(sorted_weights);
  call.start_rows(false, call.sent(d_rows), d_rows, sorted_weights, row_weights,
                  "gradients of results");
  if (shared) {
    shared_.backward(queue, batch, in, d_out, d_in, d_parameters.subspan(places.shared),
                     of_shared(memory, places));
  }
  call.finish();
  call.clear_padding(d_rows);
  call.experts_backward(row_weights, d_weights);
  call.start_rows(true, call.sent(results), results, sorted_weights, d_weights,
                  "gradients of rows");
  call.finish();
  if (tokens == 0) return;

  if (latent) {
    call.combine(call.sent(results), false, d_sum, false);
    linear_backward_weight(queue, matrix(d_sum), matrix(in), matrix(d_parameters[kLatentDown]),
                           false);
    linear_backward_input(queue, matrix(d_sum), matrix(p[kLatentDown]), matrix(d_in), shared);
  } else {
    call.combine(call.sent(results), false, d_in, shared);
  }
  const View d_logits = call.scratch(kDLogits, DType::kF32, {tokens, shape_.experts});
  call.logit_gradients(call.exchanges() ? sorted_weights : d_weights, d_logits);
  linear_backward_weight(queue, matrix(d_logits), matrix(call.wide_input(in)),
                         matrix(d_parameters[kRouter]), false);
  linear_backward_input(queue, matrix(d_logits), matrix(p[kRouter]), matrix(d_in), true);
}

void MixtureOfExperts::expert_gradient(Queue& queue, const Batch& batch, int source,
                                       std::span<const View> d_experts,
                                       const LayerMemory& memory) const {
  const Call call(shape_, dtype_, queue, batch, memory);
  TESSERA_CHECK(d_experts.size() == memory.experts.size());
  call.expert_gradients(source, d_experts);
}

}  // namespace tessera
#endif
