// TensorBoard event files: TFRecord frames (length, masked CRC-32C of it, data, masked CRC-32C)
// around protobuf events.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "launch/appended_file.h"
#include "launch/metrics.h"

namespace tessera {
namespace tensorboard {
class Event;
}

// CRC-32C (Castagnoli), and TFRecord's mask over it: rotated right by 15 bits plus 0xa282ead8.
std::uint32_t crc32c(std::string_view bytes);
std::uint32_t masked_crc32c(std::string_view bytes);

// One event file of one start of a run. Not thread-safe. Rank 0 alone has one.
class TensorBoardWriter {
 public:
  // Makes the folder and a new event file in it, numbered after those that are there. It begins
  // with a session start, which makes TensorBoard drop what earlier files say of
  // `next_step`, the first that this start runs, and of later steps. Throws Error(kCheckpoint)
  // naming the file, here and where something can't be written, unless it waits for room.
  TensorBoardWriter(const std::string& folder, std::int64_t next_step,
                    NoRoom no_room = NoRoom::kFail);
  ~TensorBoardWriter();
  // Scalars loss, learning_rate, grad_norm, tokens_per_second, mfu where it is known, and
  // with experts aux_loss and z_loss.
  void write(const StepMetrics& metrics);
  // Scalars validation/NAME.
  void write(const ValidationMetrics& metrics);
  // Throws unless all events are on the disk.
  void sync() { file_->sync(); }

 private:
  void write_scalar(const std::string& tag, std::int64_t step, double value);
  // The event to fill in, kept from one to the next, with time and step set.
  tensorboard::Event& start_event(std::int64_t step);
  void add_event();
  void flush();

  std::optional<AppendedFile> file_;
  std::unique_ptr<tensorboard::Event> event_;
  std::string data_, frames_;  // of one event; of those that aren't written yet
};

}  // namespace tessera
