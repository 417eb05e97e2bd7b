// Checkpoints: one HDF5 file each, checkpoints/step-00000100.h5, written by all ranks into logical
// arrays. The same state gives the same bytes, whatever the number of ranks. All errors are
// Error(kCheckpoint), the same on all ranks, naming the file and the array.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "runtime/view.h"

namespace tessera {

// One f32 array of a checkpoint and the part of it that this rank holds.
struct CheckpointArray {
  struct Part {
    std::int64_t begin = 0;  // elements [begin, end), flat and row-major
    std::int64_t end = 0;
    float* data = nullptr;  // element `begin`; the caller's; read by write, filled by read
  };
  std::string name;  // "params/model.norm.weight", "adamw/m/...", "adamw/v/...", "state/..."
  Shape shape;
  std::vector<Part> parts;
};

// What a checkpoint says besides its arrays.
struct CheckpointMeta {
  std::int64_t step = 0;
  std::map<std::string, std::int64_t> numbers;  // attributes of /meta: "tokens", "next_sample", ...
  std::map<std::string, std::string> texts;     // attributes of /meta: "config", ...
  std::map<std::string, std::int64_t> state;    // /state/<name>: what decides the next step
  bool operator==(const CheckpointMeta&) const = default;
};
constexpr std::int64_t kCheckpointFormat = 1;

struct CheckpointOptions {
  // Largest transfer of a rank at once: the watchdog sees them.
  std::int64_t transfer_bytes = std::int64_t{1} << 24;
  // Waited between the phases of a save, so that a test can kill the job there.
  std::chrono::milliseconds pause{0};
};

// Collective. Writes folder/step-N.h5 (folder is made; the same string on all ranks): proves that
// the ranks' parts tile every array, deletes leftovers of saves cut short, reserves the space,
// writes to .partial, syncs, renames, syncs the folder. Rank 0 alone makes the file with HDF5,
// which says where each array's bytes belong; then each rank writes its own there. Returns the
// path. Whatever fails throws on all ranks, and the run may go on: the folder is as it was, or has
// the new file where only its own syncing failed.
std::string write_checkpoint(Communicator& communicator, const std::string& folder,
                             const CheckpointMeta& meta, std::span<const CheckpointArray> arrays,
                             const CheckpointOptions& options = {});

// Collective. Fills the parts of the arrays, which must tile them over all ranks, from a file
// written by any number of ranks, and verifies the checksums of all that was read.
void read_checkpoint(Communicator& communicator, const std::string& path,
                     std::span<const CheckpointArray> arrays);

// Serial (HDF5 is not thread-safe): needs no MPI.
CheckpointMeta read_checkpoint_meta(const std::string& path);
// Serial. Names of the arrays that the model computes with: "params/model.norm.weight",
// "state/selection_bias/layers.3".
std::vector<std::string> checkpoint_parameters(const std::string& path);
std::string checkpoint_name(std::int64_t step);  // "step-00000100.h5"

struct CheckpointEntry {
  std::string path;
  std::int64_t step = 0;
  std::int64_t bytes = 0;
  std::int64_t tokens = 0;
  std::string fault;  // why it can't be resumed from (damaged, a leftover of a save); "": usable
};
// Serial. The step-*.h5 and step-*.h5.partial of a folder, newest first; none when there is no such
// folder. Checks structure and size; the arrays' bytes are verified when they are read. A folder
// that can't be listed throws.
std::vector<CheckpointEntry> list_checkpoints(const std::string& folder);

struct Retention {
  std::int64_t keep_last = 3;               // >= 1
  std::int64_t keep_every = 0;              // every Nth step; 0: none
  std::vector<std::int64_t> archive_steps;  // kept for ever
};
struct Retired {
  std::vector<std::string> deleted;  // paths
  std::vector<std::string> faults;   // a line for each that couldn't be deleted
};
// Serial, by one rank after a successful write: deletes usable checkpoints that no rule keeps;
// damaged ones are left and don't count.
Retired apply_retention(const std::string& folder, const Retention& retention);

// Serial. Reads everything; one line for each fault, naming the array; empty: the file is whole.
std::vector<std::string> verify_checkpoint(const std::string& path);

struct CheckpointDifference {
  std::string array;                // "params/model.norm.weight"
  std::vector<std::int64_t> index;  // of the first element that differs
  std::string what;                 // "0x1.8p+0 against 0x1.9p+0", "missing in B", shapes
};
// Serial. The first difference in name order between the parameters, the optimiser's and the run's
// state; none when all bits are equal.
std::optional<CheckpointDifference> diff_checkpoints(const std::string& a, const std::string& b);

}  // namespace tessera
