#include "launch/tensorboard.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>

#include "data/publish.h"
#include "launch/tensorboard.pb.h"
#include "runtime/disk_error.h"

namespace tessera {
namespace {

constexpr std::string_view kPrefix = "events.out.tfevents.";

constexpr std::array<std::uint32_t, 256> crc_table() {
  constexpr std::uint32_t kReversedPolynomial = 0x82f63b78;  // RFC 3720, appendix B.4
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value >> 1) ^ ((value & 1) != 0 ? kReversedPolynomial : 0);
    }
    table[i] = value;
  }
  return table;
}

// Little-endian bytes of an integer.
template <class T>
void append_integer(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    out.push_back(static_cast<char>((value >> (8 * i)) & 0xff));
  }
}

// TensorBoard reads a folder's files by order of name: a new one must come last.
std::string next_file(const std::string& folder) {
  std::int64_t last = 0;
  std::error_code error;
  for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end;
       at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (name.starts_with(kPrefix)) {
      last = std::max<std::int64_t>(last, std::atoll(name.c_str() + kPrefix.size()));
    }
  }
  if (error) throw disk_error(folder, "listed", error.value());
  std::array<char, 32> number{};
  std::snprintf(number.data(), number.size(), "%010lld", static_cast<long long>(last) + 1);
  return folder + "/" + std::string(kPrefix) + number.data() + ".tessera";
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  static constexpr std::array<std::uint32_t, 256> kTable = crc_table();
  std::uint32_t crc = 0xffffffff;
  for (const char byte : bytes) {
    crc = kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff] ^ (crc >> 8);
  }
  return crc ^ 0xffffffff;
}

std::uint32_t masked_crc32c(std::string_view bytes) {
  const std::uint32_t crc = crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8;
}

TensorBoardWriter::TensorBoardWriter(const std::string& folder, std::int64_t next_step,
                                     NoRoom no_room)
    : event_(std::make_unique<tensorboard::Event>()) {
  make_folders(folder, "--run-dir");
  file_.emplace(next_file(folder), no_room);
  start_event(next_step).set_file_version("brain.Event:2");
  add_event();
  start_event(next_step).mutable_session_log()->set_status(tensorboard::SessionLog::START);
  add_event();
  flush();
}

TensorBoardWriter::~TensorBoardWriter() = default;

void TensorBoardWriter::write(const StepMetrics& metrics) {
  write_scalar("loss", metrics.step, metrics.loss);
  write_scalar("learning_rate", metrics.step, metrics.learning_rate);
  write_scalar("grad_norm", metrics.step, metrics.grad_norm);
  write_scalar("tokens_per_second", metrics.step, metrics.tokens_per_second);
  if (metrics.mfu) {
    write_scalar("mfu", metrics.step, *metrics.mfu);
  }
  if (metrics.routers != nullptr) {
    write_scalar("aux_loss", metrics.step, metrics.routers->auxiliary);
    write_scalar("z_loss", metrics.step, metrics.routers->z);
  }
  flush();
}

void TensorBoardWriter::write(const ValidationMetrics& metrics) {
  for (const auto& [name, loss] : metrics.validation_loss) {
    write_scalar("validation/" + name, metrics.step, loss);
  }
  flush();
}

void TensorBoardWriter::write_scalar(const std::string& tag, std::int64_t step, double value) {
  tensorboard::Summary::Value& scalar = *start_event(step).mutable_summary()->add_value();
  scalar.set_tag(tag);
  scalar.set_simple_value(static_cast<float>(value));
  add_event();
}

tensorboard::Event& TensorBoardWriter::start_event(std::int64_t step) {
  const std::chrono::duration<double> since_1970 =
      std::chrono::system_clock::now().time_since_epoch();
  event_->Clear();
  event_->set_wall_time(since_1970.count());
  event_->set_step(step);
  return *event_;
}

void TensorBoardWriter::add_event() {
  event_->SerializeToString(&data_);
  const std::size_t begin = frames_.size();
  append_integer(frames_, static_cast<std::uint64_t>(data_.size()));
  append_integer(frames_, masked_crc32c(std::string_view(frames_).substr(begin)));
  frames_ += data_;
  append_integer(frames_, masked_crc32c(data_));
}

void TensorBoardWriter::flush() {
  file_->append(frames_);
  frames_.clear();
}

}  // namespace tessera
