#include "runtime/products.h"

#include <dnnl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>

#include "runtime/amx.h"
#include "runtime/memory.h"
#include "runtime/packed.h"
#include "runtime/products_cache.h"
#include "runtime/vector_products.h"

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

// The library serves CPUs with AVX-512. Elsewhere it has no products of bf16, and those of f32 take
// longer than our own: both measured in docs/benchmarks.md, as is what AMX's tiles gain.
bool library_serves() {
#if defined(__x86_64__)
  static const bool serves = __builtin_cpu_supports("avx512bw") != 0 &&
                             __builtin_cpu_supports("avx512vl") != 0 &&
                             __builtin_cpu_supports("avx512dq") != 0;
  return serves;
#else
  return false;
#endif
}

// This CPU's own kernels, if it has any.
const PackedKernels* own_kernels() {
  static const PackedKernels* const kernels = amx_granted()       ? &amx_kernels()
                                              : !library_serves() ? &vector_kernels()
                                                                  : nullptr;
  return kernels;
}

// Those that multiply this type: the library where there are none. Vectors widen bf16.
const PackedKernels* kernels_of(DType dtype) {
  const PackedKernels* const own = own_kernels();
  return own != nullptr && (own->element == dtype || own->element == DType::kF32) ? own : nullptr;
}

}  // namespace

std::string products_library() {
  if (!library_serves()) return "products in vectors, bf16 widened to f32";
  const dnnl_version_t* version = dnnl_version();
  return "oneDNN " + std::to_string(version->major) + "." + std::to_string(version->minor) + "." +
         std::to_string(version->patch) + (amx_granted() ? ", bf16 on AMX tiles" : "");
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

PackOperand operand(const Matrix& of, bool transpose) {
  return {of.data, transpose ? 1 : of.stride, transpose ? of.stride : 1, of.dtype};
}
PackedResult result(const Matrix& c) { return {c.data, c.stride, c.dtype}; }

FactorRows plain_rows(PackOperand a) {
  const std::int64_t element = size_of(a.dtype), row = a.row_stride * element;
  return {const_cast<std::byte*>(a.data), row, kPackGroup * row, kPackChunk * element};
}

// Of a left operand, packed into the room unless it serves as it lies.
FactorRows rows_of(const PackedKernels& own, PackOperand a, std::int64_t rows, std::int64_t inner,
                   std::byte* room) {
  if (own.takes_rows(a)) return plain_rows(a);
  own.pack_rows(a, rows, inner, room);
  return packed_rows(room, inner, own.element_bytes());
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
  if (const PackedKernels* const own = kernels_of(a.dtype)) {
    const std::int64_t b_bytes = factor_bytes(n, k);
    std::byte* const room = worker.products().scratch(0, b_bytes + factor_bytes(m, k));
    own->pack_columns(operand(b, tb), n, k, room);
    own->multiply(m, n, k, rows_of(*own, operand(a, ta), m, k, room + b_bytes), {room, k},
                  result(c), accumulate, worker.products().scratch(1, packed_room(m, n)));
    return;
  }
  worker.products()
      .find_or_prepare(
          {m, n, k, a.stride, b.stride, c.stride, ta, tb, accumulate, a.dtype, c.dtype})
      .run(a.data, b.data, c.data);
}

bool packs_factors(DType dtype) {
  return own_kernels() != nullptr && own_kernels()->element == dtype;
}

namespace {

// Each of the two begins a chunk.
std::int64_t paired_terms(std::int64_t inner) { return 2 * rounded_up(inner, kFactorChunk); }

}  // namespace

std::int64_t factor_bytes(std::int64_t extent, std::int64_t inner) {
  const PackedKernels* const own = own_kernels();
  return packed_bytes(extent, inner, own == nullptr ? 0 : own->element_bytes());
}

Factor Factor::left(Matrix a, Transpose transpose, std::byte* room) {
  const bool turned = transpose == Transpose::kYes;
  const std::int64_t rows = turned ? a.columns : a.rows, inner = turned ? a.rows : a.columns;
  if (!packs_factors(a.dtype) || own_kernels()->takes_rows(operand(a, turned))) {
    return {a, transpose, nullptr, rows, inner};
  }
  own_kernels()->pack_rows(operand(a, turned), rows, inner, room);
  return {a, transpose, room, rows, inner};
}

Factor Factor::right(Matrix b, Transpose transpose, std::byte* room) {
  const bool turned = transpose == Transpose::kYes;
  const std::int64_t columns = turned ? b.rows : b.columns, inner = turned ? b.columns : b.rows;
  if (!packs_factors(b.dtype)) return {b, transpose, nullptr, columns, inner};
  own_kernels()->pack_columns(operand(b, turned), columns, inner, room);
  return {b, transpose, room, columns, inner};
}

Factor Factor::left_pair(Matrix a, Matrix also, std::byte* room) {
  TESSERA_CHECK(packs_factors(a.dtype) && a.rows == also.rows && a.columns == also.columns);
  std::byte* to = room;
  for (std::int64_t row = 0; row < a.rows; row += kFactorGroup) {
    const std::int64_t rows = std::min(kFactorGroup, a.rows - row);
    for (Matrix part : {a, also}) {
      part.data = part.at(row, 0);
      own_kernels()->pack_rows(operand(part, false), rows, part.columns, to);
      to += factor_bytes(kFactorGroup, part.columns);
    }
  }
  return {a, Transpose::kNo, room, a.rows, paired_terms(a.columns)};
}

Factor Factor::right_pair(Matrix b, Matrix also, std::byte* room) {
  TESSERA_CHECK(packs_factors(b.dtype) && b.rows == also.rows && b.columns == also.columns);
  std::byte* to = room;
  for (std::int64_t column = 0; column < b.columns; column += kFactorGroup) {
    const std::int64_t columns = std::min(kFactorGroup, b.columns - column);
    for (Matrix part : {b, also}) {
      part.data = part.at(0, column);
      own_kernels()->pack_columns(operand(part, false), columns, part.rows, to);
      to += factor_bytes(kFactorGroup, part.rows);
    }
  }
  return {b, Transpose::kNo, room, b.columns, paired_terms(b.rows)};
}

Factor Factor::to_be_written(Matrix a, std::byte* room) {
  TESSERA_CHECK(a.columns % kFactorChunk == 0);
  return {a, Transpose::kNo, packs_factors(a.dtype) ? room : nullptr, a.rows, a.columns};
}

FactorRows Factor::rows() const {
  if (packed_ != nullptr) return packed_rows(packed_, inner_, own_kernels()->element_bytes());
  const PackOperand plain = operand(plain_, transpose_ == Transpose::kYes);
  TESSERA_CHECK(plain.column_stride == 1);
  return plain_rows(plain);
}

Factor Factor::transposed(std::byte* room) const {
  if (packed_ == nullptr) {
    return left(plain_, transpose_ == Transpose::kYes ? Transpose::kNo : Transpose::kYes, room);
  }
  own_kernels()->turn_rows(packed_, extent_, inner_, room);
  return {plain_, transpose_, room, inner_, extent_};
}

Factor Factor::from_row(std::int64_t row, std::int64_t rows) const {
  TESSERA_CHECK(transpose_ == Transpose::kNo && row % kFactorGroup == 0 && row + rows <= extent_);
  const Matrix part = {plain_.dtype, plain_.at(row, 0), rows, plain_.columns, plain_.stride};
  std::byte* const packed = packed_ == nullptr ? nullptr : packed_ + factor_bytes(row, inner_);
  return {part, transpose_, packed, rows, inner_};
}

void product(Worker& worker, const Factor& a, const Factor& b, Matrix c, bool accumulate) {
  if (b.packed_ == nullptr) {
    product(worker, a.plain_, a.transpose_, b.plain_, b.transpose_, c, accumulate);
    return;
  }
  TESSERA_CHECK(a.inner_ == b.inner_ && c.rows == a.extent_ && c.columns == b.extent_);
  if (c.rows == 0 || c.columns == 0) return;
  if (a.inner_ == 0) {
    if (!accumulate) clear_rows(c, 0);
    return;
  }
  own_kernels()->multiply(c.rows, c.columns, a.inner_, a.rows(), {b.packed_, b.inner_}, result(c),
                          accumulate, worker.products().scratch(1, packed_room(c.rows, c.columns)));
}

void product_of_rows(Worker& worker, std::int64_t tile_rows, Matrix a, Matrix b,
                     Transpose transpose_b, Matrix c, bool accumulate) {
  if (a.rows == tile_rows || kernels_of(a.dtype) != nullptr) {
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

// Pieces of a product's output: the cut depends on the shape alone.
constexpr std::int64_t kPieceRows = 128;
constexpr std::int64_t kPieceColumns = 512;
constexpr std::int64_t kPackedPiece = 128;    // of the larger extent
constexpr std::int64_t kPackedWindow = 2048;  // terms that are packed at a time

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
  const std::int64_t down = pieces_of(output.rows, kPieceRows);
  queue.parallel_for(down * across, [&](std::int64_t piece, Worker& worker) {
    const std::int64_t row = piece / across * kPieceRows;
    const std::int64_t column = piece % across * kPieceColumns;
    body(worker, row, std::min(kPieceRows, output.rows - row), column,
         std::min(kPieceColumns, output.columns - column));
  });
}

// C = op(A) op(B) on all threads, or added, each operand packed once (unless it serves as it lies):
// the smaller one for all pieces, the larger one by the pieces, which are cut along it.
void packed_product(Queue& queue, const PackedKernels& own, Matrix a, bool transpose_a, Matrix b,
                    bool transpose_b, Matrix c, bool accumulate) {
  const std::int64_t k = transpose_a ? a.rows : a.columns;
  if (c.rows == 0 || c.columns == 0) return;
  if (k == 0) {
    if (!accumulate) clear_rows(c, 0);
    return;
  }
  const bool shares_right = c.columns <= c.rows;
  // Terms [first, first + ...) of rows of a, or columns of b, from `from` on.
  const auto part_of_a = [&](std::int64_t from, std::int64_t first) {
    PackOperand part = operand(a, transpose_a);
    part.data += (from * part.row_stride + first * part.column_stride) * size_of(part.dtype);
    return part;
  };
  const auto part_of_b = [&](std::int64_t from, std::int64_t first) {
    PackOperand part = operand(b, transpose_b);
    part.data += (first * part.row_stride + from * part.column_stride) * size_of(part.dtype);
    return part;
  };
  const std::int64_t shared_extent = std::min(c.rows, c.columns);
  const std::int64_t extent = std::max(c.rows, c.columns);
  // On tiles a piece of long sums is worth more rows.
  const bool doubled = own.element == DType::kBF16 && k > kPackedDepth && extent > kPackedPiece;
  const std::int64_t size = doubled ? 2 * kPackedPiece : kPackedPiece;
  // Sums in f32 go on from where they were, so that a part of the terms at a time is packed.
  const bool in_parts = c.dtype == DType::kF32;
  const std::int64_t window = in_parts ? std::min(k, kPackedWindow) : k;
  const std::int64_t step = in_parts && shared_extent <= kPackedDepth ? kPackedDepth : window;
  const bool plain_a = own.takes_rows(part_of_a(0, 0));
  std::byte* const shared =
      queue.worker(0).products().scratch(2, factor_bytes(shared_extent, window));
  for (std::int64_t start = 0; start < k; start += window) {
    const std::int64_t terms = std::min(window, k - start);
    if (shares_right || !plain_a) {
      queue.parallel_for(pieces_of(shared_extent, kPackedPiece), [&](std::int64_t piece, Worker&) {
        const std::int64_t from = piece * kPackedPiece;
        const std::int64_t some = std::min(kPackedPiece, shared_extent - from);
        std::byte* const to = shared + factor_bytes(from, terms);
        shares_right ? own.pack_columns(part_of_b(from, start), some, terms, to)
                     : own.pack_rows(part_of_a(from, start), some, terms, to);
      });
    }
    queue.parallel_for(pieces_of(extent, size), [&](std::int64_t piece, Worker& worker) {
      const std::int64_t from = piece * size;
      const std::int64_t some = std::min(size, extent - from);
      std::byte* const packed = worker.products().scratch(0, factor_bytes(some, step));
      const Matrix part =
          shares_right ? block(c, from, some, 0, c.columns) : block(c, 0, c.rows, from, some);
      std::byte* const room = worker.products().scratch(1, packed_room(part.rows, part.columns));
      for (std::int64_t first = 0; first < terms; first += step) {
        const std::int64_t depth = std::min(step, terms - first), at = start + first;
        std::byte* const of_all = shared + factor_bytes(kPackGroup, first);
        FactorRows rows = packed_rows(of_all, terms, own.element_bytes());
        PackedColumns columns = {of_all, terms};
        if (shares_right) {
          rows = rows_of(own, part_of_a(from, at), some, depth, packed);
        } else {
          own.pack_columns(part_of_b(from, at), some, depth, packed);
          columns = {packed, depth};
          if (plain_a) rows = plain_rows(part_of_a(0, at));
        }
        own.multiply(part.rows, part.columns, depth, rows, columns, result(part),
                     accumulate || at > 0, room);
      }
    });
  }
}

}  // namespace

void linear_forward(Queue& queue, Matrix x, Matrix w, Matrix y) {
  TESSERA_CHECK(x.rows == y.rows && x.columns == w.columns && w.rows == y.columns);
  if (const PackedKernels* const own = kernels_of(x.dtype)) {
    packed_product(queue, *own, x, false, w, true, y, false);
    return;
  }
  for_each_piece(
      queue, y,
      [&](Worker& worker, std::int64_t row, std::int64_t m, std::int64_t column, std::int64_t n) {
        product_of_rows(worker, kPieceRows, block(x, row, m, 0, x.columns),
                        block(w, column, n, 0, w.columns), Transpose::kYes,
                        block(y, row, m, column, n), false);
      });
}

void linear_backward_input(Queue& queue, Matrix d_y, Matrix w, Matrix d_x, bool accumulate) {
  TESSERA_CHECK(d_y.rows == d_x.rows && d_y.columns == w.rows && w.columns == d_x.columns);
  if (const PackedKernels* const own = kernels_of(d_y.dtype)) {
    packed_product(queue, *own, d_y, false, w, false, d_x, accumulate);
    return;
  }
  for_each_piece(
      queue, d_x,
      [&](Worker& worker, std::int64_t row, std::int64_t m, std::int64_t column, std::int64_t n) {
        product_of_rows(worker, kPieceRows, block(d_y, row, m, 0, d_y.columns),
                        block(w, 0, w.rows, column, n), Transpose::kNo,
                        block(d_x, row, m, column, n), accumulate);
      });
}

void linear_backward_weight(Queue& queue, Matrix d_y, Matrix x, Matrix d_w, bool accumulate) {
  TESSERA_CHECK(d_y.rows == x.rows && d_y.columns == d_w.rows && x.columns == d_w.columns);
  if (const PackedKernels* const own = kernels_of(d_y.dtype)) {
    packed_product(queue, *own, d_y, true, x, false, d_w, accumulate);
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
