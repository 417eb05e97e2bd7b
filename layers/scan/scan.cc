#include "layers/scan/scan.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "layers/kernels/elementwise.h"
#include "layers/scan/scan_kernels.h"
#include "runtime/products.h"

namespace tessera {
namespace {

// Places in the list of scratch.
enum Scratch : std::size_t {
  kChunkStates,  // what each chunk adds to the state, then the states; in f32
  kDStates,      // gradients of the states, of the compute type
  kDecays,       // of a state over a chunk
  kRooms,        // each thread's own
  kQueryParts,
  kKeyParts,
  kValueParts,
  kSkipParts
};

// Heads of one piece of work at most: their states are read and written in one product, and a
// thread's memory grows with them.
constexpr std::int64_t kMostHeads = 4;
// Rows of a state that are carried over the chunks in one piece.
constexpr std::int64_t kCarriedRows = 16;
// Rows of a sum over heads that are made in one piece.
constexpr std::int64_t kAddedRows = 64;

std::int64_t largest_divisor(std::int64_t of, std::int64_t most) {
  std::int64_t divisor = std::max<std::int64_t>(1, std::min(of, most));
  while (of % divisor != 0) --divisor;
  return divisor;
}

// Rows of an array from an element on, as kernels take them.
struct Rows {
  Elements first;
  std::int64_t stride = 0;
  Rows at(std::int64_t row, std::int64_t column) const {
    return {first + (row * stride + column), stride};
  }
};

Rows rows_of(const Columns& columns) {
  const Shape& shape = columns.rows.shape();
  return {elements(columns.rows) + columns.first, shape[shape.rank() - 1]};
}

// A gradient of q, k or v: where pieces write theirs, and their sum over the heads that share one.
// With one part for each head pieces write the result itself.
class Parts {
 public:
  Parts(const Columns& to, std::int64_t parts, std::int64_t heads, std::int64_t width,
        BatchShape shape, const View& room)
      : to_(rows_of(to)), parts_(parts), heads_(heads), width_(width), rows_(shape.rows()) {
    if (parts == heads) return;
    room_ = shaped(room, DType::kF32, {rows_, parts, width}).as<float>();
  }
  Rows of(std::int64_t row, std::int64_t part) const {
    if (parts_ == heads_) return to_.at(row, part * width_);
    float* const at = room_ + (row * parts_ + part) * width_;
    return {{reinterpret_cast<std::byte*>(at), DType::kF32}, parts_ * width_};
  }
  void add_up(Queue& queue) const {
    if (parts_ == heads_) return;
    const std::int64_t each = parts_ / heads_;
    queue.parallel_for(pieces_of(rows_, kAddedRows), [&](std::int64_t piece, Worker&) {
      const std::int64_t row = piece * kAddedRows;
      for (std::int64_t head = 0; head < heads_; ++head) {
        const Rows to = to_.at(row, head * width_);
        scan::add_parts(room_ + (row * parts_ + head * each) * width_, parts_ * width_, each,
                        std::min(kAddedRows, rows_ - row), width_, to.first, to.stride);
      }
    });
  }

 private:
  Rows to_;
  std::int64_t parts_, heads_, width_, rows_;
  float* room_ = nullptr;
};

}  // namespace

// A thread's own memory for one piece: operands in the compute type, sums in f32.
struct Scan::Room {
  // base null: only measures.
  Room(const Scan& scan, std::byte* base) : base_(base), dtype_(scan.c_.compute) {
    const std::int64_t chunk = scan.c_.chunk, n = scan.c_.state_width;
    const std::int64_t width = scan.block_ * scan.c_.head_width;
    const std::int64_t tile = scan.tile_ * chunk, per_head = scan.block_ * chunk;
    q = operands(chunk * n * (scan.block_ / scan.run_));
    k = operands(chunk * n);
    v = operands(chunk * width);
    v_to_end = operands(chunk * width);
    d_out = operands(chunk * width);
    d_out_from_start = operands(chunk * width);
    mixed = operands(tile);
    d_scores_operand = operands(tile);
    scores = floats(tile);
    d_mixed = floats(tile);
    d_scores = floats(tile);
    sums = floats(chunk * width);
    d_q = floats(chunk * n);
    d_k = floats(chunk * n);
    for (float** const array :
         {&high, &low, &from_start, &to_end, &dt, &dt_to_end, &pairs.before, &pairs.columns,
          &pairs.row_before, &pairs.own_rows, &pairs.own_columns, &start_dots, &end_dots, &d_dt}) {
      *array = floats(per_head);
    }
    begin = reinterpret_cast<std::int64_t*>(take(chunk * size_of(DType::kI64)));
  }
  std::int64_t bytes() const { return bytes_; }
  scan::PairSums pairs_of(std::int64_t head, std::int64_t chunk) const {
    const std::int64_t at = head * chunk;
    return {pairs.before + at, pairs.columns + at, pairs.row_before + at, pairs.own_rows + at,
            pairs.own_columns + at};
  }

  Elements q, k;                     // [runs, chunk, n], [chunk, n]
  Elements v, v_to_end;              // dt v [chunk, width], and decayed to the end
  Elements d_out, d_out_from_start;  // [chunk, width], and decayed from the start
  Elements mixed, d_scores_operand;  // [tile, chunk]
  float *scores = nullptr, *d_mixed = nullptr, *d_scores = nullptr;  // [tile, chunk]
  float *sums = nullptr, *d_q = nullptr, *d_k = nullptr;  // [chunk, width], [chunk, n] twice
  float *high = nullptr, *low = nullptr, *from_start = nullptr,
        *to_end = nullptr;                    // [heads of the block, chunk], as all below
  float *dt = nullptr, *dt_to_end = nullptr;  // dt, dt * to_end
  scan::PairSums pairs = {};
  float *start_dots = nullptr, *end_dots = nullptr, *d_dt = nullptr;
  std::int64_t* begin = nullptr;  // [chunk]: the first position of the chunk that each one sees

 private:
  std::byte* take(std::int64_t bytes) {
    std::byte* const at = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ += aligned(bytes);
    return at;
  }
  Elements operands(std::int64_t count) { return {take(count * size_of(dtype_)), dtype_}; }
  float* floats(std::int64_t count) {
    return reinterpret_cast<float*>(take(count * size_of(DType::kF32)));
  }
  std::byte* base_;
  DType dtype_;
  std::int64_t bytes_ = 0;
};

// One chunk of one sequence for one block of heads.
struct Scan::Piece {
  // Pieces are numbered block by block, then chunk by chunk from `first_chunk` of `chunks`.
  Piece(const Scan& scan, const Batch& batch, std::int64_t piece, std::int64_t chunks,
        std::int64_t first_chunk)
      : c(scan.c_),
        block(piece % scan.blocks()),
        chunk(piece / scan.blocks() % chunks + first_chunk),
        sequence(piece / scan.blocks() / chunks),
        first_head(block * scan.block_),
        heads(scan.block_),
        width(heads * c.head_width),
        position(chunk * c.chunk),
        row(sequence * batch.shape.length + position),
        rows(std::min(c.chunk, batch.shape.length - position)),
        last(position + rows == batch.shape.length) {}

  // Where the state that this chunk begins or ends with lies among those of all chunks.
  std::int64_t state(const Scan& scan, const Batch& batch, bool at_end) const {
    const std::int64_t index = at_end ? chunk : chunk - 1;
    const std::int64_t kept = scan.chunks(batch.shape.length) - 1;
    return ((sequence * kept + index) * scan.blocks() + block) * c.state_width * width;
  }
  std::int64_t decay(const Scan& scan, const Batch& batch, std::int64_t index) const {
    return (sequence * (scan.chunks(batch.shape.length) - 1) + index) * c.heads + first_head;
  }
  std::int64_t query_head(std::int64_t head) const {
    return (first_head + head) / (c.heads / c.query_heads);
  }
  std::int64_t key_head() const { return first_head / (c.heads / c.key_heads); }
  std::int64_t value_head(std::int64_t head) const {
    return (first_head + head) / (c.heads / c.value_heads);
  }

  // What each position sees, its step and its cumulative log-decay from the chunk's or its
  // document's start, in double and then in two parts: differences are exact wherever they matter.
  void prepare(const Batch& batch, const ScanInput& in, const Room& room) const {
    const std::int32_t* const segments = batch.segments.as<std::int32_t>() + row;
    for (std::int64_t i = 0; i < c.chunk; ++i) {
      room.begin[i] = i < rows ? std::max<std::int64_t>(segments[i] - position, 0) : i + 1;
    }
    const std::int64_t last_begin = room.begin[rows - 1];
    constexpr float kNever = -std::numeric_limits<float>::infinity();
    for (std::int64_t h = 0; h < heads; ++h) {
      const float* const decays = in.log_decay.as<float>() + row * c.heads + first_head + h;
      const float* const steps = in.dt.as<float>() + row * c.heads + first_head + h;
      const std::int64_t at = h * c.chunk;
      double sum = 0.0;
      for (std::int64_t i = 0; i < c.chunk; ++i) {
        if (i >= rows) {
          room.high[at + i] = room.low[at + i] = room.dt[at + i] = 0.0F;
          room.from_start[at + i] = kNever;
          continue;
        }
        // A document's start forgets what was before.
        const bool start = segments[i] == position + i;
        sum = start ? 0.0 : sum + static_cast<double>(decays[i * c.heads]);
        room.high[at + i] = static_cast<float>(sum);
        room.low[at + i] = static_cast<float>(sum - static_cast<double>(room.high[at + i]));
        room.from_start[at + i] = segments[i] < position ? static_cast<float>(sum) : kNever;
        room.dt[at + i] = steps[i * c.heads];
      }
      for (std::int64_t i = 0; i < c.chunk; ++i) {
        const double here =
            static_cast<double>(room.high[at + i]) + static_cast<double>(room.low[at + i]);
        room.to_end[at + i] =
            i >= last_begin && i < rows ? static_cast<float>(std::min(sum - here, 0.0)) : kNever;
      }
    }
    scan::exponentials(room.from_start, heads * c.chunk);
    scan::exponentials(room.to_end, heads * c.chunk);
    for (std::int64_t i = 0; i < heads * c.chunk; ++i)
      room.dt_to_end[i] = room.dt[i] * room.to_end[i];
  }

  // This chunk's rows of columns of an array, times factors by row where given, zero from the
  // sequence's end on.
  void gather(const Rows& from, std::int64_t column, std::int64_t columns, const float* factors,
              Elements to, std::int64_t to_stride) const {
    const Rows source = from.at(row, column);
    scan::pack(source.first, source.stride, factors, rows, columns, to, to_stride);
    for (std::int64_t i = rows; i < c.chunk; ++i) {
      std::memset((to + i * to_stride).data, 0,
                  static_cast<std::size_t>(columns * size_of(to.dtype)));
    }
  }
  void gather_queries(const Scan& scan, const Rows& q, const Room& room) const {
    for (std::int64_t run = 0; run < heads / scan.run_; ++run) {
      gather(q, query_head(run * scan.run_) * c.state_width, c.state_width, nullptr,
             room.q + run * c.chunk * c.state_width, c.state_width);
    }
  }
  void gather_keys(const Rows& k, const Room& room) const {
    gather(k, key_head() * c.state_width, c.state_width, nullptr, room.k, c.state_width);
  }
  // Each head's values times its own factors.
  void gather_values(const Rows& v, const float* factors, Elements to) const {
    for (std::int64_t h = 0; h < heads; ++h) {
      gather(v, value_head(h) * c.head_width, c.head_width, factors + h * c.chunk,
             to + h * c.head_width, width);
    }
  }
  // d_out has a column block for each head.
  void gather_outputs(const Rows& d_out, const float* factors, Elements to) const {
    for (std::int64_t h = 0; h < heads; ++h) {
      gather(d_out, (first_head + h) * c.head_width, c.head_width,
             factors == nullptr ? nullptr : factors + h * c.chunk, to + h * c.head_width, width);
    }
  }

  // Matrices of a room: all rows of the chunk, or `count` of them from `begin` on.
  Matrix queries(const Room& room, std::int64_t run, std::int64_t begin, std::int64_t count) const {
    return {c.compute, (room.q + (run * c.chunk + begin) * c.state_width).data, count,
            c.state_width, c.state_width};
  }
  Matrix keys(const Room& room, std::int64_t count) const {
    return {c.compute, room.k.data, count, c.state_width, c.state_width};
  }
  Matrix by_head(Elements of, std::int64_t begin, std::int64_t count, std::int64_t head,
                 std::int64_t head_count) const {
    return {of.dtype, (of + (begin * width + head * c.head_width)).data, count,
            head_count * c.head_width, width};
  }
  Matrix state_of(Elements states, std::int64_t head, std::int64_t head_count) const {
    return {states.dtype, (states + head * c.head_width).data, c.state_width,
            head_count * c.head_width, width};
  }

  // The gradients of one head's steps and log-decays. A log-decay at r is part of every decay from
  // a j < r to an i >= r of the same document: those between positions of the chunk, from its start
  // to i, from j to its end, and through all of it.
  void decay_gradients(const Batch& batch, const Room& room, std::int64_t head, double through,
                       float* d_dt, float* d_log_decay) const {
    const std::int32_t* const segments = batch.segments.as<std::int32_t>() + row;
    const std::int64_t at = head * c.chunk, to = row * c.heads + first_head + head;
    const auto starts = [&](std::int64_t r) { return segments[r] == position + r; };
    const auto term = [&](const float* of, std::int64_t r) {
      return static_cast<double>(of[at + r]);
    };
    const scan::PairSums& pairs = room.pairs;
    const std::int64_t lanes = scan::vector_lanes();
    double from_start = 0.0, own = 0.0;
    for (std::int64_t r = rows - 1; r >= 0; --r) {
      // From here on to the end of the vector, or of the document.
      if ((r + 1) % lanes == 0 || (r + 1 < rows && starts(r + 1))) own = 0.0;
      if (r + 1 < rows && starts(r + 1)) from_start = 0.0;
      from_start += term(room.start_dots, r);
      own += term(pairs.row_before, r) + (term(pairs.own_rows, r) - term(pairs.own_columns, r));
      d_log_decay[to + r * c.heads] = static_cast<float>(own + from_start);
      d_dt[to + r * c.heads] = room.d_dt[at + r];
    }
    double to_end = through, before = 0.0;
    for (std::int64_t r = 0; r < rows; ++r) {
      if (r % lanes == 0) {
        before = 0.0;
        for (std::int64_t i = r; i < std::min(r + lanes, c.chunk); ++i)
          before += term(pairs.before, i);
      }
      float& gradient = d_log_decay[to + r * c.heads];
      // A document's start has nothing to decay.
      const double sum =
          static_cast<double>(gradient) + before + (r >= room.begin[rows - 1] ? to_end : 0.0);
      gradient = starts(r) ? 0.0F : static_cast<float>(sum);
      before += term(pairs.columns, r);
      to_end += term(room.end_dots, r);
    }
  }

  const ScanConfig& c;
  std::int64_t block, chunk, sequence, first_head, heads;
  std::int64_t width;     // of the block's heads together
  std::int64_t position;  // the chunk's first, in its sequence
  std::int64_t row;       // the same among all rows
  std::int64_t rows;      // of the chunk that the sequence has
  bool last;
};

Scan::Scan(const ScanConfig& config) : c_(config), tile_(std::min(config.chunk, kScanTile)) {
  TESSERA_CHECK(c_.chunk > 0 && c_.chunk % 16 == 0 && c_.chunk % tile_ == 0);
  const std::int64_t pairs = std::max(c_.query_heads, c_.key_heads);
  TESSERA_CHECK(pairs % c_.query_heads == 0 && pairs % c_.key_heads == 0 && c_.heads % pairs == 0);
  TESSERA_CHECK(c_.value_heads == c_.heads || c_.value_heads == c_.key_heads);
  run_ = largest_divisor(c_.heads / pairs, kMostHeads);
  const std::int64_t runs = run_ == c_.heads / pairs ? pairs / c_.key_heads : 1;
  block_ = run_ * largest_divisor(runs, kMostHeads / run_);
}

std::int64_t Scan::value_parts() const {
  return c_.value_heads == c_.heads ? c_.heads : key_parts();
}

std::int64_t Scan::room_bytes() const { return Room(*this, nullptr).bytes(); }

std::vector<BufferSpec> Scan::saved(BatchShape shape) const {
  const std::int64_t kept = shape.batch * (chunks(shape.length) - 1);
  return {{"states", c_.compute, {kept, c_.heads, c_.state_width, c_.head_width}}};
}

std::vector<BufferSpec> Scan::scratch(BatchShape shape) const {
  const std::int64_t all = chunks(shape.length);
  const std::int64_t kept = shape.batch * (all - 1);
  const auto parts = [&](std::int64_t count, std::int64_t heads, std::int64_t width) {
    return Shape{count == heads ? 0 : shape.rows(), count, width};
  };
  return {{"chunk_states", DType::kF32, {kept, c_.heads, c_.state_width, c_.head_width}},
          {"d_states", c_.compute, {kept, c_.heads, c_.state_width, c_.head_width}},
          {"decays", DType::kF32, {kept, c_.heads}},
          {"rooms", DType::kF32, {shape.threads, room_bytes() / size_of(DType::kF32)}},
          {"query_parts", DType::kF32, parts(query_parts(), c_.query_heads, c_.state_width)},
          {"key_parts", DType::kF32, parts(key_parts(), c_.key_heads, c_.state_width)},
          {"value_parts", DType::kF32, parts(value_parts(), c_.value_heads, c_.head_width)},
          {"skip_parts", DType::kF32, {shape.batch * all, c_.heads}}};
}

double Scan::flops_per_token(std::int64_t length) const {
  const std::int64_t full = length / c_.chunk, rest = length % c_.chunk;
  const auto positions = static_cast<double>(length);
  const double visible =
      static_cast<double>(full * c_.chunk * (c_.chunk + 1) + rest * (rest + 1)) / (2 * positions);
  const auto n = static_cast<double>(c_.state_width), p = static_cast<double>(c_.head_width);
  const auto heads = static_cast<double>(c_.heads);
  const auto pairs = static_cast<double>(std::max(c_.query_heads, c_.key_heads));
  // The last chunk's state isn't made, the first chunk reads none.
  const std::int64_t last = length - (chunks(length) - 1) * c_.chunk;
  const double making = (positions - static_cast<double>(last)) / positions;
  const double reading = (positions - static_cast<double>(std::min(length, c_.chunk))) / positions;
  return 2 * visible * (pairs * n + heads * p) + 2 * heads * n * p * (making + reading);
}

std::vector<LayerSize> Scan::sizes() const {
  std::vector<LayerSize> list = {{"chunk", c_.chunk}};
  if (tile_ < c_.chunk) list.push_back({"tile", tile_});
  return list;
}

// Calls body(sequence, block, first row, rows) for slices of the states' rows: chunks follow one
// another, but rows of a state are on their own.
template <class Body>
void Scan::for_states(Queue& queue, const Batch& batch, const Body& body) const {
  if (batch.shape.length <= c_.chunk) return;
  const std::int64_t slices = pieces_of(c_.state_width, kCarriedRows);
  queue.parallel_for(batch.shape.batch * blocks() * slices, [&](std::int64_t piece, Worker&) {
    const std::int64_t first = piece % slices * kCarriedRows;
    body(piece / slices / blocks(), piece / slices % blocks(), first,
         std::min(kCarriedRows, c_.state_width - first));
  });
}

void Scan::forward(Queue& queue, const Batch& batch, const ScanInput& in, const View& out,
                   std::span<const View> saved, std::span<const View> scratch) const {
  const std::int64_t n = c_.state_width, p = c_.head_width;
  const std::int64_t all = chunks(batch.shape.length), sequences = batch.shape.batch;
  const std::int64_t width = block_ * p;
  const Shape states_shape = {sequences * (all - 1), c_.heads, n, p};
  float* const sums = shaped(scratch[kChunkStates], DType::kF32, states_shape).as<float>();
  float* const decays =
      shaped(scratch[kDecays], DType::kF32, {sequences * (all - 1), c_.heads}).as<float>();
  const Elements states = elements(shaped(saved[0], c_.compute, states_shape));
  const Rows q = rows_of(in.q), k = rows_of(in.k), v = rows_of(in.v), result = rows_of({out});
  std::byte* const rooms = scratch[kRooms].raw();
  const std::int64_t room_size = room_bytes();
  TESSERA_CHECK(queue.threads() <= batch.shape.threads);

  // What each chunk adds to the state: sum over j of e^(log-decay from j to the end) k_j dt_j v_j'.
  queue.parallel_for(sequences * (all - 1) * blocks(), [&](std::int64_t number, Worker& worker) {
    const Room room(*this, rooms + worker.index() * room_size);
    const Piece piece(*this, batch, number, all - 1, 0);
    piece.prepare(batch, in, room);
    piece.gather_keys(k, room);
    piece.gather_values(v, room.dt_to_end, room.v_to_end);
    const Elements added = {reinterpret_cast<std::byte*>(sums + piece.state(*this, batch, true)),
                            DType::kF32};
    product(worker, piece.keys(room, c_.chunk), Transpose::kYes,
            piece.by_head(room.v_to_end, 0, c_.chunk, 0, block_), Transpose::kNo,
            piece.state_of(added, 0, block_), false);
    for (std::int64_t h = 0; h < block_; ++h) {
      decays[piece.decay(*this, batch, piece.chunk) + h] =
          room.from_start[h * c_.chunk + c_.chunk - 1];
    }
  });

  // The scan: a chunk's state is what it adds and what is left of the one before.
  for_states(queue, batch,
             [&](std::int64_t sequence, std::int64_t block, std::int64_t first, std::int64_t rows) {
               for (std::int64_t chunk = 0; chunk < all - 1; ++chunk) {
                 const std::int64_t index = sequence * (all - 1) + chunk;
                 const std::int64_t at = ((index * blocks() + block) * n + first) * width;
                 scan::carry(sums + at, chunk == 0 ? nullptr : sums + at - c_.heads * n * p,
                             decays + index * c_.heads + block * block_, rows, block_, p,
                             states + at);
               }
             });

  queue.parallel_for(sequences * all * blocks(), [&](std::int64_t number, Worker& worker) {
    const Room room(*this, rooms + worker.index() * room_size);
    const Piece piece(*this, batch, number, all, 0);
    piece.prepare(batch, in, room);
    piece.gather_queries(*this, q, room);
    piece.gather_keys(k, room);
    piece.gather_values(v, room.dt, room.v);
    const Elements found = {reinterpret_cast<std::byte*>(room.sums), DType::kF32};
    // What the chunks before left: e^(log-decay from the start to i) S' q_i.
    const bool carried = piece.chunk > 0;
    for (std::int64_t head = 0; carried && head < block_; head += run_) {
      product(worker, piece.queries(room, head / run_, 0, c_.chunk), Transpose::kNo,
              piece.state_of(states + piece.state(*this, batch, false), head, run_), Transpose::kNo,
              piece.by_head(found, 0, c_.chunk, head, run_), false);
    }
    for (std::int64_t h = 0; carried && h < block_; ++h) {
      scan::scale_and_dot(room.sums + h * p, width, room.from_start + h * c_.chunk, c_.chunk, p, {},
                          0, nullptr, nullptr);
    }
    for (std::int64_t run = 0; run < block_; run += run_) {
      for (std::int64_t row = 0; row < piece.rows; row += tile_) {
        const std::int64_t columns = row + tile_;
        product(worker, piece.queries(room, run / run_, row, tile_), Transpose::kNo,
                piece.keys(room, columns), Transpose::kYes, {room.scores, tile_, columns, c_.chunk},
                false);
        for (std::int64_t h = run; h < run + run_; ++h) {
          scan::mix(c_.compute, room.scores, room.mixed.data, c_.chunk, row, tile_, columns,
                    room.begin, room.high + h * c_.chunk, room.low + h * c_.chunk);
          product(worker, {c_.compute, room.mixed.data, tile_, columns, c_.chunk}, Transpose::kNo,
                  piece.by_head(room.v, 0, columns, h, 1), Transpose::kNo,
                  piece.by_head(found, row, tile_, h, 1), carried);
        }
      }
    }
    for (std::int64_t h = 0; h < block_; ++h) {
      const Rows to = result.at(piece.row, (piece.first_head + h) * p);
      const Rows from = v.at(piece.row, piece.value_head(h) * p);
      const float skip = in.skip.empty() ? 0.0F : in.skip.as<float>()[piece.first_head + h];
      scan::finish(room.sums + h * p, width, from.first, from.stride, skip, piece.rows, p, to.first,
                   to.stride);
    }
  });
}

void Scan::backward(Queue& queue, const Batch& batch, const ScanInput& in, const View& d_out,
                    const ScanGradient& gradient, std::span<const View> saved,
                    std::span<const View> scratch) const {
  const std::int64_t n = c_.state_width, p = c_.head_width, length = c_.chunk;
  const std::int64_t all = chunks(batch.shape.length), sequences = batch.shape.batch;
  const std::int64_t width = block_ * p;
  const Shape states_shape = {sequences * (all - 1), c_.heads, n, p};
  float* const d_sums = shaped(scratch[kChunkStates], DType::kF32, states_shape).as<float>();
  const Elements d_states = elements(shaped(scratch[kDStates], c_.compute, states_shape));
  float* const decays =
      shaped(scratch[kDecays], DType::kF32, {sequences * (all - 1), c_.heads}).as<float>();
  float* const skip_parts =
      shaped(scratch[kSkipParts], DType::kF32, {sequences * all, c_.heads}).as<float>();
  const Elements states = elements(shaped(saved[0], c_.compute, states_shape));
  const Rows q = rows_of(in.q), k = rows_of(in.k), v = rows_of(in.v), d_result = rows_of({d_out});
  const Parts d_q(gradient.q, query_parts(), c_.query_heads, n, batch.shape, scratch[kQueryParts]);
  const Parts d_k(gradient.k, key_parts(), c_.key_heads, n, batch.shape, scratch[kKeyParts]);
  const Parts d_v(gradient.v, value_parts(), c_.value_heads, p, batch.shape, scratch[kValueParts]);
  float* const d_dt = gradient.dt.as<float>();
  float* const d_log_decay = gradient.log_decay.as<float>();
  std::byte* const rooms = scratch[kRooms].raw();
  const std::int64_t room_size = room_bytes();
  TESSERA_CHECK(queue.threads() <= batch.shape.threads);

  // What each chunk's outputs add to the gradient of the state that it begins with: sum over i of
  // e^(log-decay from the start to i) q_i d_o_i'.
  queue.parallel_for(sequences * (all - 1) * blocks(), [&](std::int64_t number, Worker& worker) {
    const Room room(*this, rooms + worker.index() * room_size);
    const Piece piece(*this, batch, number, all - 1, 1);
    piece.prepare(batch, in, room);
    piece.gather_queries(*this, q, room);
    piece.gather_outputs(d_result, room.from_start, room.d_out_from_start);
    const Elements added = {reinterpret_cast<std::byte*>(d_sums + piece.state(*this, batch, false)),
                            DType::kF32};
    for (std::int64_t head = 0; head < block_; head += run_) {
      product(worker, piece.queries(room, head / run_, 0, length), Transpose::kYes,
              piece.by_head(room.d_out_from_start, 0, length, head, run_), Transpose::kNo,
              piece.state_of(added, head, run_), false);
    }
    for (std::int64_t h = 0; h < block_; ++h) {
      decays[piece.decay(*this, batch, piece.chunk - 1) + h] =
          room.from_start[h * length + length - 1];
    }
  });

  // The scan backwards: the gradient of the state after a chunk is what the next one adds and what
  // passes through it.
  for_states(queue, batch,
             [&](std::int64_t sequence, std::int64_t block, std::int64_t first, std::int64_t rows) {
               for (std::int64_t chunk = all - 2; chunk >= 0; --chunk) {
                 const std::int64_t index = sequence * (all - 1) + chunk;
                 const std::int64_t at = ((index * blocks() + block) * n + first) * width;
                 scan::carry(
                     d_sums + at, chunk == all - 2 ? nullptr : d_sums + at + c_.heads * n * p,
                     decays + index * c_.heads + block * block_, rows, block_, p, d_states + at);
               }
             });

  queue.parallel_for(sequences * all * blocks(), [&](std::int64_t number, Worker& worker) {
    const Room room(*this, rooms + worker.index() * room_size);
    const Piece piece(*this, batch, number, all, 0);
    const bool carried = piece.chunk > 0;
    piece.prepare(batch, in, room);
    piece.gather_queries(*this, q, room);
    piece.gather_keys(k, room);
    piece.gather_values(v, room.dt, room.v);
    piece.gather_outputs(d_result, nullptr, room.d_out);
    const Elements found = {reinterpret_cast<std::byte*>(room.sums), DType::kF32};
    const Elements begin_states = carried ? states + piece.state(*this, batch, false) : states;
    const Elements d_end_states =
        piece.last ? d_states : d_states + piece.state(*this, batch, true);
    for (float* const sums :
         {room.pairs.before, room.pairs.columns, room.pairs.row_before, room.pairs.own_rows,
          room.pairs.own_columns, room.start_dots, room.end_dots}) {
      std::fill_n(sums, block_ * length, 0.0F);
    }

    // Gradients of the decays from the start: d_o_i . (what chunks before gave).
    if (carried) {
      piece.gather_outputs(d_result, room.from_start, room.d_out_from_start);
      for (std::int64_t head = 0; head < block_; head += run_) {
        product(worker, piece.queries(room, head / run_, 0, length), Transpose::kNo,
                piece.state_of(begin_states, head, run_), Transpose::kNo,
                piece.by_head(found, 0, length, head, run_), false);
      }
      for (std::int64_t h = 0; h < block_; ++h) {
        scan::scale_and_dot(room.sums + h * p, width, room.from_start + h * length, length, p,
                            room.d_out + h * p, width, nullptr, room.start_dots + h * length);
      }
    }
    // What the state after the chunk gives: to dt v, to k, and to the decays to the end.
    if (piece.last) {
      std::fill_n(room.sums, length * width, 0.0F);
      std::fill_n(room.d_k, length * n, 0.0F);
    } else {
      product(worker, piece.keys(room, length), Transpose::kNo,
              piece.state_of(d_end_states, 0, block_), Transpose::kNo,
              piece.by_head(found, 0, length, 0, block_), false);
      for (std::int64_t h = 0; h < block_; ++h) {
        const Rows values = v.at(piece.row, piece.value_head(h) * p);
        scan::scale_and_dot(room.sums + h * p, width, room.to_end + h * length, length, p,
                            values.first, values.stride, room.dt + h * length,
                            room.end_dots + h * length);
      }
      piece.gather_values(v, room.dt_to_end, room.v_to_end);
      product(worker, piece.by_head(room.v_to_end, 0, length, 0, block_), Transpose::kNo,
              piece.state_of(d_end_states, 0, block_), Transpose::kYes, {room.d_k, length, n, n},
              false);
    }

    for (std::int64_t run = 0; run < block_; run += run_) {
      if (carried) {
        product(worker, piece.by_head(room.d_out_from_start, 0, length, run, run_), Transpose::kNo,
                piece.state_of(begin_states, run, run_), Transpose::kYes, {room.d_q, length, n, n},
                false);
      } else {
        std::fill_n(room.d_q, length * n, 0.0F);
      }
      for (std::int64_t row = 0; row < piece.rows; row += tile_) {
        const std::int64_t columns = row + tile_;
        const Matrix queries = piece.queries(room, run / run_, row, tile_);
        product(worker, queries, Transpose::kNo, piece.keys(room, columns), Transpose::kYes,
                {room.scores, tile_, columns, length}, false);
        for (std::int64_t h = run; h < run + run_; ++h) {
          const Matrix d_rows = piece.by_head(room.d_out, row, tile_, h, 1);
          product(worker, d_rows, Transpose::kNo, piece.by_head(room.v, 0, columns, h, 1),
                  Transpose::kYes, {room.d_mixed, tile_, columns, length}, false);
          scan::mix_backward(c_.compute, room.scores, room.d_mixed, room.mixed.data, room.d_scores,
                             h == run, length, row, tile_, columns, room.begin,
                             room.high + h * length, room.low + h * length,
                             room.pairs_of(h, length));
          product(worker, {c_.compute, room.mixed.data, tile_, columns, length}, Transpose::kYes,
                  d_rows, Transpose::kNo, piece.by_head(found, 0, columns, h, 1), true);
        }
        scan::pack({reinterpret_cast<std::byte*>(room.d_scores), DType::kF32}, length, nullptr,
                   tile_, columns, room.d_scores_operand, length);
        const Matrix d_scores = {c_.compute, room.d_scores_operand.data, tile_, columns, length};
        product(worker, d_scores, Transpose::kNo, piece.keys(room, columns), Transpose::kNo,
                {room.d_q + row * n, tile_, n, n}, true);
        product(worker, d_scores, Transpose::kYes, queries, Transpose::kNo,
                {room.d_k, columns, n, n}, true);
      }
      const Rows to = d_q.of(piece.row, (piece.first_head + run) / run_);
      scan::pack({reinterpret_cast<std::byte*>(room.d_q), DType::kF32}, n, nullptr, piece.rows, n,
                 to.first, to.stride);
    }
    const Rows to_k = d_k.of(piece.row, piece.block);
    scan::pack({reinterpret_cast<std::byte*>(room.d_k), DType::kF32}, n, nullptr, piece.rows, n,
               to_k.first, to_k.stride);

    for (std::int64_t h = 0; h < block_; ++h) {
      const std::int64_t head = piece.first_head + h;
      const Rows values = v.at(piece.row, piece.value_head(h) * p);
      const float skip = in.skip.empty() ? 0.0F : in.skip.as<float>()[head];
      skip_parts[(piece.sequence * all + piece.chunk) * c_.heads + head] =
          static_cast<float>(scan::finish_backward(
              room.sums + h * p, width, values.first, values.stride, room.d_out + h * p, width,
              room.dt + h * length, skip, piece.rows, p, room.d_dt + h * length));
      // Through the whole chunk from the state before to the one after.
      double through = 0.0;
      if (carried && !piece.last) {
        through = static_cast<double>(room.from_start[h * length + length - 1]) *
                  scan::dot_rows(begin_states + h * p, d_end_states + h * p, width, n, p);
      }
      piece.decay_gradients(batch, room, h, through, d_dt, d_log_decay);
    }
    const std::int64_t share = c_.heads / value_parts();
    for (std::int64_t h = 0; h < block_; h += share) {
      const Rows to = d_v.of(piece.row, (piece.first_head + h) / share);
      scan::add_parts(room.sums + h * p, width, share, piece.rows, p, to.first, to.stride);
    }
  });

  d_q.add_up(queue);
  d_k.add_up(queue);
  d_v.add_up(queue);
  for (std::int64_t head = 0; !in.skip.empty() && head < c_.heads; ++head) {
    double sum = 0.0;
    for (std::int64_t i = 0; i < sequences * all; ++i) {
      sum += static_cast<double>(skip_parts[i * c_.heads + head]);
    }
    gradient.skip.as<float>()[head] = static_cast<float>(sum);
  }
}

}  // namespace tessera
