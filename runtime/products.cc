#include "runtime/products.h"

#include <dnnl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>

#include "runtime/amx.h"
#include "runtime/memory.h"
#include "runtime/products_cache.h"

namespace tessera {
namespace {

void require(dnnl_status_t status, const char* call) {
  if (status != dnnl_success) {
    throw Error(ExitCode::kInternal, std::string("oneDNN: ") + call + " failed with status " +
                                         std::to_string(static_cast<int>(status)));
  }
}

dnnl_engine_t engine() {
  static dnnl_engine_t the_engine = [] {
    dnnl_engine_t made = nullptr;
    require(dnnl_engine_create(&made, dnnl_cpu, 0), "dnnl_engine_create");
    return made;
  }();
  return the_engine;
}

// A row-major matrix as the library sees it: its transpose is only a swap of strides.
dnnl_memory_desc_t describe(DType dtype, std::int64_t rows, std::int64_t columns,
                            std::int64_t stride, bool transpose) {
  dnnl_memory_desc_t description;
  dnnl_dims_t extents = {rows, columns};
  dnnl_dims_t strides = {transpose ? 1 : stride, transpose ? stride : 1};
  require(dnnl_memory_desc_init_by_strides(&description, 2, extents,
                                           dtype == DType::kBF16 ? dnnl_bf16 : dnnl_f32, strides),
          "dnnl_memory_desc_init_by_strides");
  return description;
}

}  // namespace

// One primitive of static shape with its memory objects; the scratchpad is its own.
struct PreparedProduct {
  explicit PreparedProduct(const ProductKey& key) {
    const dnnl_memory_desc_t a =
        describe(key.operands, key.m, key.k, key.stride_a, key.transpose_a);
    const dnnl_memory_desc_t b =
        describe(key.operands, key.k, key.n, key.stride_b, key.transpose_b);
    const dnnl_memory_desc_t c = describe(key.result, key.m, key.n, key.stride_c, false);
    dnnl_matmul_desc_t operation;
    require(dnnl_matmul_desc_init(&operation, &a, &b, nullptr, &c), "dnnl_matmul_desc_init");
    dnnl_primitive_attr_t attributes = nullptr;
    require(dnnl_primitive_attr_create(&attributes), "dnnl_primitive_attr_create");
    require(dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user),
            "dnnl_primitive_attr_set_scratchpad_mode");
    if (key.accumulate) {
      dnnl_post_ops_t sum = nullptr;
      require(dnnl_post_ops_create(&sum), "dnnl_post_ops_create");
      require(dnnl_post_ops_append_sum(sum, 1.0F), "dnnl_post_ops_append_sum");
      require(dnnl_primitive_attr_set_post_ops(attributes, sum),
              "dnnl_primitive_attr_set_post_ops");
      dnnl_post_ops_destroy(sum);
    }
    dnnl_primitive_desc_t description = nullptr;
    require(dnnl_primitive_desc_create(&description, &operation, attributes, engine(), nullptr),
            "dnnl_primitive_desc_create");
    require(dnnl_primitive_create(&primitive, description), "dnnl_primitive_create");
    const dnnl_memory_desc_t* scratch_description =
        dnnl_primitive_desc_query_md(description, dnnl_query_scratchpad_md, 0);
    require(dnnl_memory_create(&scratch, scratch_description, engine(), DNNL_MEMORY_ALLOCATE),
            "dnnl_memory_create");
    require(dnnl_memory_create(&memory_a, &a, engine(), DNNL_MEMORY_NONE), "dnnl_memory_create");
    require(dnnl_memory_create(&memory_b, &b, engine(), DNNL_MEMORY_NONE), "dnnl_memory_create");
    require(dnnl_memory_create(&memory_c, &c, engine(), DNNL_MEMORY_NONE), "dnnl_memory_create");
    require(dnnl_stream_create(&stream, engine(), dnnl_stream_default_flags), "dnnl_stream_create");
    dnnl_primitive_desc_destroy(description);
    dnnl_primitive_attr_destroy(attributes);
  }
  ~PreparedProduct() {
    dnnl_stream_destroy(stream);
    for (dnnl_memory_t memory : {memory_a, memory_b, memory_c, scratch})
      dnnl_memory_destroy(memory);
    dnnl_primitive_destroy(primitive);
  }
  PreparedProduct(const PreparedProduct&) = delete;
  PreparedProduct& operator=(const PreparedProduct&) = delete;

  void run(std::byte* a, std::byte* b, std::byte* c) {
    require(dnnl_memory_set_data_handle(memory_a, a), "dnnl_memory_set_data_handle");
    require(dnnl_memory_set_data_handle(memory_b, b), "dnnl_memory_set_data_handle");
    require(dnnl_memory_set_data_handle(memory_c, c), "dnnl_memory_set_data_handle");
    const std::array<dnnl_exec_arg_t, 4> arguments = {{{DNNL_ARG_SRC, memory_a},
                                                       {DNNL_ARG_WEIGHTS, memory_b},
                                                       {DNNL_ARG_DST, memory_c},
                                                       {DNNL_ARG_SCRATCHPAD, scratch}}};
    require(dnnl_primitive_execute(primitive, stream, static_cast<int>(arguments.size()),
                                   arguments.data()),
            "dnnl_primitive_execute");
  }

  dnnl_primitive_t primitive = nullptr;
  dnnl_memory_t memory_a = nullptr, memory_b = nullptr, memory_c = nullptr, scratch = nullptr;
  dnnl_stream_t stream = nullptr;
};

namespace {

std::size_t hash_of(const ProductKey& key) {
  std::uint64_t hash = 0;
  for (const std::int64_t word : {key.m, key.n, key.k, key.stride_a, key.stride_b, key.stride_c,
                                  static_cast<std::int64_t>(key.transpose_a) |
                                      static_cast<std::int64_t>(key.transpose_b) << 1 |
                                      static_cast<std::int64_t>(key.accumulate) << 2 |
                                      static_cast<std::int64_t>(key.operands) << 3 |
                                      static_cast<std::int64_t>(key.result) << 8}) {
    hash = (hash ^ static_cast<std::uint64_t>(word)) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 29;
  }
  return hash;
}

}  // namespace

ProductCache::ProductCache() : slots_(64) {}
ProductCache::~ProductCache() {
  for (const Room& room : scratch_) {
    if (room.memory != nullptr) unmap_memory(room.memory, room.bytes);
  }
}

PreparedProduct& ProductCache::find_or_prepare(const ProductKey& key) {
  std::size_t slot = hash_of(key) & (slots_.size() - 1);
  while (slots_[slot].product) {
    if (slots_[slot].key == key) return *slots_[slot].product;
    slot = (slot + 1) & (slots_.size() - 1);
  }
  if (2 * (used_ + 1) > slots_.size()) {
    grow();
    return find_or_prepare(key);
  }
  slots_[slot] = {key, std::make_unique<PreparedProduct>(key)};
  ++used_;
  return *slots_[slot].product;
}

std::byte* ProductCache::scratch(std::size_t which, std::int64_t bytes) {
  Room& room = scratch_[which];
  if (room.bytes < bytes) {
    constexpr std::int64_t kHugePage = std::int64_t{2} << 20;
    const std::int64_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    std::byte* const memory = map_memory(size);
    if (room.memory != nullptr) unmap_memory(room.memory, room.bytes);
    room = {memory, size};
  }
  return room.memory;
}

void ProductCache::grow() {
  std::vector<Slot> old(2 * slots_.size());
  old.swap(slots_);
  for (Slot& entry : old) {
    if (!entry.product) continue;
    std::size_t slot = hash_of(entry.key) & (slots_.size() - 1);
    while (slots_[slot].product) slot = (slot + 1) & (slots_.size() - 1);
    slots_[slot] = std::move(entry);
  }
}

namespace {

// Whether the library has products of bf16; without them operands are widened, which is exact.
bool library_has_bf16() {
  static const bool has = __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return has;
}

}  // namespace

std::string products_library() {
  const dnnl_version_t* version = dnnl_version();
  return "oneDNN " + std::to_string(version->major) + "." + std::to_string(version->minor) + "." +
         std::to_string(version->patch) +
         (amx_granted()        ? ", bf16 on AMX tiles"
          : library_has_bf16() ? ""
                               : ", bf16 widened to f32");
}

Matrix matrix(const View& view) {
  const Shape& shape = view.shape();
  TESSERA_CHECK(shape.rank() >= 1);
  const std::int64_t columns = shape[shape.rank() - 1];
  TESSERA_CHECK(view.dtype() == DType::kF32 || view.dtype() == DType::kBF16);
  return {view.dtype(), view.raw(), columns == 0 ? 0 : view.count() / columns, columns, columns};
}

namespace {

void copy_rows(Matrix to, Matrix from) {
  for (std::int64_t row = 0; row < from.rows; ++row) {
    std::memcpy(to.at(row, 0), from.at(row, 0),
                static_cast<std::size_t>(from.columns * size_of(from.dtype)));
  }
}

void clear_rows(Matrix matrix, std::int64_t first) {
  for (std::int64_t row = first; row < matrix.rows; ++row) {
    std::memset(matrix.at(row, 0), 0,
                static_cast<std::size_t>(matrix.columns * size_of(matrix.dtype)));
  }
}

// bf16 goes over the CPU's own tiles where it has them: measured against the library in
// docs/benchmarks.md. There a row's bits depend on nothing but the row.
bool on_tiles(DType dtype) { return dtype == DType::kBF16 && amx_granted(); }

AmxOperand tile_operand(const Matrix& of, bool transpose) {
  return {reinterpret_cast<const BFloat16*>(of.data), transpose ? 1 : of.stride,
          transpose ? of.stride : 1};
}
AmxResult tile_result(const Matrix& c) { return {c.data, c.stride, c.dtype}; }

// In the worker's own scratch.
Matrix widened(Worker& worker, std::size_t which, const Matrix& from) {
  std::byte* const room = worker.products().scratch(which, from.rows * from.columns * 4);
  const Matrix to(DType::kF32, room, from.rows, from.columns, from.columns);
  for (std::int64_t row = 0; row < from.rows; ++row) {
    const auto* source = reinterpret_cast<const BFloat16*>(from.at(row, 0));
    std::transform(source, source + from.columns, reinterpret_cast<float*>(to.at(row, 0)),
                   &to_float);
  }
  return to;
}

void product_widened(Worker& worker, const Matrix& a, Transpose transpose_a, const Matrix& b,
                     Transpose transpose_b, const Matrix& c, bool accumulate) {
  const Matrix wide_a = widened(worker, 3, a), wide_b = widened(worker, 4, b);
  if (c.dtype == DType::kF32) {
    product(worker, wide_a, transpose_a, wide_b, transpose_b, c, accumulate);
    return;
  }
  std::byte* const room = worker.products().scratch(5, c.rows * c.columns * 4);
  const Matrix sums(DType::kF32, room, c.rows, c.columns, c.columns);
  product(worker, wide_a, transpose_a, wide_b, transpose_b, sums, false);
  for (std::int64_t row = 0; row < c.rows; ++row) {
    const auto* source = reinterpret_cast<const float*>(sums.at(row, 0));
    std::transform(source, source + c.columns, reinterpret_cast<BFloat16*>(c.at(row, 0)),
                   &to_bfloat16);
  }
}

}  // namespace

void product(Worker& worker, Matrix a, Transpose transpose_a, Matrix b, Transpose transpose_b,
             Matrix c, bool accumulate) {
  const bool ta = transpose_a == Transpose::kYes;
  const bool tb = transpose_b == Transpose::kYes;
  const std::int64_t m = ta ? a.columns : a.rows;
  const std::int64_t k = ta ? a.rows : a.columns;
  const std::int64_t n = tb ? b.rows : b.columns;
  TESSERA_CHECK(k == (tb ? b.columns : b.rows) && m == c.rows && n == c.columns);
  TESSERA_CHECK(a.dtype == b.dtype && (c.dtype == a.dtype || c.dtype == DType::kF32));
  TESSERA_CHECK(!accumulate || c.dtype == DType::kF32);
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (!accumulate) clear_rows(c, 0);
    return;
  }
  if (on_tiles(a.dtype)) {
    const std::int64_t a_bytes = factor_bytes(m, k);
    std::byte* const room = worker.products().scratch(0, a_bytes + factor_bytes(n, k));
    product(worker, Factor::left(a, transpose_a, room),
            Factor::right(b, transpose_b, room + a_bytes), c, accumulate);
    return;
  }
  if (a.dtype == DType::kBF16 && !library_has_bf16()) {
    product_widened(worker, a, transpose_a, b, transpose_b, c, accumulate);
    return;
  }
  worker.products()
      .find_or_prepare(
          {m, n, k, a.stride, b.stride, c.stride, ta, tb, accumulate, a.dtype, c.dtype})
      .run(a.data, b.data, c.data);
}

static_assert(kFactorGroup == kAmxGroup);

bool packs_factors(DType dtype) { return on_tiles(dtype); }

namespace {

// Each of the two begins a chunk.
std::int64_t paired_terms(std::int64_t inner) {
  return 2 * ((inner + kFactorChunk - 1) / kFactorChunk * kFactorChunk);
}

}  // namespace

std::int64_t factor_bytes(std::int64_t extent, std::int64_t inner) {
  return amx_packed_bytes(extent, inner);
}

Factor Factor::left(Matrix a, Transpose transpose, std::byte* room) {
  const bool turned = transpose == Transpose::kYes;
  const std::int64_t rows = turned ? a.columns : a.rows, inner = turned ? a.rows : a.columns;
  if (!on_tiles(a.dtype)) return {a, transpose, nullptr, rows, inner};
  amx_pack_rows(tile_operand(a, turned), rows, inner, room);
  return {a, transpose, room, rows, inner};
}

Factor Factor::right(Matrix b, Transpose transpose, std::byte* room) {
  const bool turned = transpose == Transpose::kYes;
  const std::int64_t columns = turned ? b.rows : b.columns, inner = turned ? b.columns : b.rows;
  if (!on_tiles(b.dtype)) return {b, transpose, nullptr, columns, inner};
  amx_pack_columns(tile_operand(b, turned), columns, inner, room);
  return {b, transpose, room, columns, inner};
}

Factor Factor::left_pair(Matrix a, Matrix also, std::byte* room) {
  TESSERA_CHECK(on_tiles(a.dtype) && a.rows == also.rows && a.columns == also.columns);
  std::byte* to = room;
  for (std::int64_t row = 0; row < a.rows; row += kFactorGroup) {
    const std::int64_t rows = std::min(kFactorGroup, a.rows - row);
    for (Matrix part : {a, also}) {
      part.data = part.at(row, 0);
      amx_pack_rows(tile_operand(part, false), rows, part.columns, to);
      to += factor_bytes(kFactorGroup, part.columns);
    }
  }
  return {a, Transpose::kNo, room, a.rows, paired_terms(a.columns)};
}

Factor Factor::right_pair(Matrix b, Matrix also, std::byte* room) {
  TESSERA_CHECK(on_tiles(b.dtype) && b.rows == also.rows && b.columns == also.columns);
  std::byte* to = room;
  for (std::int64_t column = 0; column < b.columns; column += kFactorGroup) {
    const std::int64_t columns = std::min(kFactorGroup, b.columns - column);
    for (Matrix part : {b, also}) {
      part.data = part.at(0, column);
      amx_pack_columns(tile_operand(part, false), columns, part.rows, to);
      to += factor_bytes(kFactorGroup, part.rows);
    }
  }
  return {b, Transpose::kNo, room, b.columns, paired_terms(b.rows)};
}

Factor Factor::to_be_written(Matrix a, std::byte* room) {
  TESSERA_CHECK(a.columns % kFactorChunk == 0);
  return {a, Transpose::kNo, on_tiles(a.dtype) ? room : nullptr, a.rows, a.columns};
}

FactorRows Factor::rows() const {
  TESSERA_CHECK(transpose_ == Transpose::kNo);
  const std::int64_t element = size_of(plain_.dtype), row = plain_.stride * element;
  if (packed_ == nullptr) return {plain_.data, row, kFactorGroup * row, kFactorChunk * element};
  return {packed_, kFactorChunk * element, factor_bytes(kFactorGroup, inner_),
          kFactorGroup * kFactorChunk * element};
}

Factor Factor::transposed(std::byte* room) const {
  if (packed_ == nullptr) {
    const bool turned = transpose_ == Transpose::kYes;
    return {plain_, turned ? Transpose::kNo : Transpose::kYes, nullptr, inner_, extent_};
  }
  amx_turn_rows(packed_, extent_, inner_, room);
  return {plain_, transpose_, room, inner_, extent_};
}

Factor Factor::from_row(std::int64_t row, std::int64_t rows) const {
  TESSERA_CHECK(transpose_ == Transpose::kNo && row % kFactorGroup == 0 && row + rows <= extent_);
  const Matrix part = {plain_.dtype, plain_.at(row, 0), rows, plain_.columns, plain_.stride};
  std::byte* const packed = packed_ == nullptr ? nullptr : packed_ + factor_bytes(row, inner_);
  return {part, transpose_, packed, rows, inner_};
}

void product(Worker& worker, const Factor& a, const Factor& b, Matrix c, bool accumulate) {
  if (a.packed_ == nullptr) {
    product(worker, a.plain_, a.transpose_, b.plain_, b.transpose_, c, accumulate);
    return;
  }
  TESSERA_CHECK(b.packed_ != nullptr && a.inner_ == b.inner_);
  TESSERA_CHECK(c.rows == a.extent_ && c.columns == b.extent_);
  amx_multiply(c.rows, c.columns, a.inner_, {a.packed_, a.inner_}, {b.packed_, b.inner_},
               tile_result(c), accumulate,
               worker.products().scratch(1, amx_room(c.rows, c.columns)));
}

void product_of_rows(Worker& worker, std::int64_t tile_rows, Matrix a, Matrix b,
                     Transpose transpose_b, Matrix c, bool accumulate) {
  if (a.rows == tile_rows || on_tiles(a.dtype)) {
    product(worker, a, Transpose::kNo, b, transpose_b, c, accumulate);
    return;
  }
  TESSERA_CHECK(a.rows < tile_rows && a.rows == c.rows);
  // The scratch has the operands' own strides, so that the prepared product is the very same.
  const auto padded = [&](std::size_t which, const Matrix& like) {
    const std::int64_t bytes = tile_rows * like.stride * size_of(like.dtype);
    return Matrix(like.dtype, worker.products().scratch(which, bytes), tile_rows, like.columns,
                  like.stride);
  };
  Matrix padded_a = padded(0, a);
  Matrix padded_c = padded(1, c);
  clear_rows(padded_a, a.rows);
  clear_rows(padded_c, c.rows);
  copy_rows(padded_a, a);
  if (accumulate) copy_rows(padded_c, c);
  product(worker, padded_a, Transpose::kNo, b, transpose_b, padded_c, accumulate);
  padded_c.rows = c.rows;
  copy_rows(c, padded_c);
}

namespace {

// Pieces of a product's output: the cut depends on the shape and the instruction set alone. Of 128
// rows the library's AVX2 kernels round some by their place among them, of 64 none.
std::int64_t piece_rows() {
  static const std::int64_t rows = __builtin_cpu_supports("avx512f") ? 128 : 64;
  return rows;
}
constexpr std::int64_t kPieceColumns = 512;
constexpr std::int64_t kTilePiece = 128;    // on tiles, of the larger extent; twice for long sums
constexpr std::int64_t kTileWindow = 2048;  // terms that are packed at a time

std::int64_t pieces_of(std::int64_t extent, std::int64_t size) {
  return (extent + size - 1) / size;
}

Matrix block(Matrix from, std::int64_t row, std::int64_t rows, std::int64_t column,
             std::int64_t columns) {
  return {from.dtype, from.at(row, column), rows, columns, from.stride};
}

// Calls body(worker, row, rows, column, columns) for each piece of an output of this size.
template <class Body>
void for_each_piece(Queue& queue, const Matrix& output, const Body& body) {
  const std::int64_t across = pieces_of(output.columns, kPieceColumns);
  const std::int64_t rows = piece_rows();
  const std::int64_t down = pieces_of(output.rows, rows);
  queue.parallel_for(down * across, [&](std::int64_t piece, Worker& worker) {
    const std::int64_t row = piece / across * rows;
    const std::int64_t column = piece % across * kPieceColumns;
    body(worker, row, std::min(rows, output.rows - row), column,
         std::min(kPieceColumns, output.columns - column));
  });
}

// C = op(A) op(B) on all threads, or added, each operand packed once: the smaller one for all
// pieces, the larger one by the pieces, which are cut along it.
void tile_product(Queue& queue, Matrix a, bool transpose_a, Matrix b, bool transpose_b, Matrix c,
                  bool accumulate) {
  const std::int64_t k = transpose_a ? a.rows : a.columns;
  if (c.rows == 0 || c.columns == 0) return;
  if (k == 0) {
    if (!accumulate) clear_rows(c, 0);
    return;
  }
  const AmxOperand left = tile_operand(a, transpose_a), right = tile_operand(b, transpose_b);
  const bool shares_right = c.columns <= c.rows;
  // Terms [first, first + depth) of rows of a, or columns of b, [from, from + extent).
  const auto pack = [&](bool is_right, std::int64_t from, std::int64_t extent, std::int64_t first,
                        std::int64_t depth, std::byte* to) {
    AmxOperand part = is_right ? right : left;
    if (is_right) {
      part.data += first * part.row_stride + from * part.column_stride;
      amx_pack_columns(part, extent, depth, to);
    } else {
      part.data += from * part.row_stride + first * part.column_stride;
      amx_pack_rows(part, extent, depth, to);
    }
  };
  const std::int64_t shared_extent = std::min(c.rows, c.columns);
  const std::int64_t extent = std::max(c.rows, c.columns);
  const std::int64_t size = k > kAmxDepth && extent > kTilePiece ? 2 * kTilePiece : kTilePiece;
  // Sums in f32 go on from where they were, so that a part of the terms at a time is packed.
  const bool in_parts = c.dtype == DType::kF32;
  const std::int64_t window = in_parts ? std::min(k, kTileWindow) : k;
  const std::int64_t step = in_parts && shared_extent <= kAmxDepth ? kAmxDepth : window;
  std::byte* const shared =
      queue.worker(0).products().scratch(2, amx_packed_bytes(shared_extent, window));
  for (std::int64_t start = 0; start < k; start += window) {
    const std::int64_t terms = std::min(window, k - start);
    queue.parallel_for(pieces_of(shared_extent, kTilePiece), [&](std::int64_t piece, Worker&) {
      const std::int64_t from = piece * kTilePiece;
      pack(shares_right, from, std::min(kTilePiece, shared_extent - from), start, terms,
           shared + amx_packed_bytes(from, terms));
    });
    queue.parallel_for(pieces_of(extent, size), [&](std::int64_t piece, Worker& worker) {
      const std::int64_t from = piece * size;
      const std::int64_t own_extent = std::min(size, extent - from);
      std::byte* const own = worker.products().scratch(0, amx_packed_bytes(own_extent, step));
      const Matrix part = shares_right ? block(c, from, own_extent, 0, c.columns)
                                       : block(c, 0, c.rows, from, own_extent);
      std::byte* const room = worker.products().scratch(1, amx_room(part.rows, part.columns));
      for (std::int64_t first = 0; first < terms; first += step) {
        const std::int64_t depth = std::min(step, terms - first);
        pack(!shares_right, from, own_extent, start + first, depth, own);
        const AmxPacked of_all = AmxPacked{shared, terms}.from(first), of_piece = {own, depth};
        amx_multiply(part.rows, part.columns, depth, shares_right ? of_piece : of_all,
                     shares_right ? of_all : of_piece, tile_result(part),
                     accumulate || start + first > 0, room);
      }
    });
  }
}

}  // namespace

void linear_forward(Queue& queue, Matrix x, Matrix w, Matrix y) {
  TESSERA_CHECK(x.rows == y.rows && x.columns == w.columns && w.rows == y.columns);
  if (on_tiles(x.dtype)) {
    tile_product(queue, x, false, w, true, y, false);
    return;
  }
  for_each_piece(
      queue, y,
      [&](Worker& worker, std::int64_t row, std::int64_t m, std::int64_t column, std::int64_t n) {
        product_of_rows(worker, piece_rows(), block(x, row, m, 0, x.columns),
                        block(w, column, n, 0, w.columns), Transpose::kYes,
                        block(y, row, m, column, n), false);
      });
}

void linear_backward_input(Queue& queue, Matrix d_y, Matrix w, Matrix d_x, bool accumulate) {
  TESSERA_CHECK(d_y.rows == d_x.rows && d_y.columns == w.rows && w.columns == d_x.columns);
  if (on_tiles(d_y.dtype)) {
    tile_product(queue, d_y, false, w, false, d_x, accumulate);
    return;
  }
  for_each_piece(
      queue, d_x,
      [&](Worker& worker, std::int64_t row, std::int64_t m, std::int64_t column, std::int64_t n) {
        product_of_rows(worker, piece_rows(), block(d_y, row, m, 0, d_y.columns),
                        block(w, 0, w.rows, column, n), Transpose::kNo,
                        block(d_x, row, m, column, n), accumulate);
      });
}

void linear_backward_weight(Queue& queue, Matrix d_y, Matrix x, Matrix d_w, bool accumulate) {
  TESSERA_CHECK(d_y.rows == x.rows && d_y.columns == d_w.rows && x.columns == d_w.columns);
  if (on_tiles(d_y.dtype)) {
    tile_product(queue, d_y, true, x, false, d_w, accumulate);
    return;
  }
  for_each_piece(
      queue, d_w,
      [&](Worker& worker, std::int64_t row, std::int64_t m, std::int64_t column, std::int64_t n) {
        product(worker, block(d_y, 0, d_y.rows, row, m), Transpose::kYes,
                block(x, 0, x.rows, column, n), Transpose::kNo, block(d_w, row, m, column, n),
                accumulate);
      });
}

}  // namespace tessera
