// A small state in shards, for tests of checkpoints: sizes are primes and products of primes, so no
// number of ranks divides them.
#pragma once

#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "parallel/checkpoint.h"
#include "parallel/communicator.h"
#include "parallel/sharding.h"

namespace tessera {

inline std::vector<UnitLayout> checkpoint_units() {
  return {
      {"embedding", {{"model.embed_tokens.weight", DType::kF32, Shape{131, 37}}}},
      {"layers.0",
       {{"model.layers.0.input_norm.weight", DType::kF32, Shape{61}},
        {"model.layers.0.mixer.q_proj.weight", DType::kF32, Shape{97, 53}},
        // Four axes, with slices that begin and end inside of the inner ones.
        {"model.layers.0.mixer.conv.weight", DType::kF32, Shape{7, 11, 13, 17}},
        // More than one piece of a checksum.
        {"model.layers.0.feed_forward.up_proj.weight", DType::kF32, Shape{2111, 2003}}}},
      {"head",
       {{"model.norm.weight", DType::kF32, Shape{37}},
        {"lm_head.weight", DType::kF32, Shape{131, 37}}}},
  };
}

// The value of an element of an array of the checkpoint; never the same in two places.
inline float checkpoint_value(const std::string& array, std::int64_t element) {
  const auto seed = static_cast<double>(std::hash<std::string>{}(array) % 1000);
  const std::int64_t turn = element / 100003;
  return static_cast<float>(std::sin(seed + 0.37 * static_cast<double>(element % 100003)) +
                            static_cast<double>(turn));
}

// One rank's shards of parameters and both moments.
class ShardedState {
 public:
  // Filled with checkpoint_value, or with NaN when something is to be read into it.
  ShardedState(const Communicator& communicator, bool filled) {
    for (const std::string group : {"params/", "adamw/m/", "adamw/v/"}) {
      for (const UnitLayout& layout : layouts_) {
        // One large array is enough.
        const Slice slice = layout.slice(communicator.rank(), communicator.size());
        std::vector<float>& shard = shards_.emplace_back(slice.count(), 0.0F);
        std::vector<CheckpointArray> arrays;
        for (std::size_t p = 0; p < layout.size(); ++p) {
          arrays.push_back({group + layout.parameter(p).name, layout.parameter(p).shape, {}});
        }
        for (const Piece& piece : layout.pieces(slice)) {
          float* data = shard.data() + piece.offset;
          for (std::int64_t i = 0; i < piece.count(); ++i) {
            data[i] = filled ? checkpoint_value(arrays[piece.parameter].name, piece.begin + i)
                             : std::nanf("");
          }
          arrays[piece.parameter].parts.push_back({piece.begin, piece.end, data});
        }
        for (CheckpointArray& array : arrays) {
          if (group != "params/" && array.name.ends_with("up_proj.weight")) continue;
          arrays_.push_back(std::move(array));
        }
      }
    }
    // An array of the run's state, the last rank's alone.
    CheckpointArray bias = {"state/selection_bias/layers.0", Shape{25}, {}};
    if (communicator.rank() == communicator.size() - 1) {
      std::vector<float>& values = shards_.emplace_back(25);
      for (std::int64_t i = 0; i < 25; ++i) {
        values[static_cast<std::size_t>(i)] =
            filled ? checkpoint_value(bias.name, i) : std::nanf("");
      }
      bias.parts.push_back({0, 25, values.data()});
    }
    arrays_.push_back(std::move(bias));
  }
  std::vector<CheckpointArray>& arrays() { return arrays_; }
  // Every element is the one that was saved, bit for bit.
  bool right() const {
    for (const CheckpointArray& array : arrays_) {
      for (const CheckpointArray::Part& part : array.parts) {
        for (std::int64_t i = part.begin; i < part.end; ++i) {
          if (part.data[i - part.begin] != checkpoint_value(array.name, i)) return false;
        }
      }
    }
    return true;
  }

 private:
  std::vector<UnitLayout> layouts_ = checkpoint_units();
  std::vector<std::vector<float>> shards_;
  std::vector<CheckpointArray> arrays_;
};

inline CheckpointMeta checkpoint_meta(std::int64_t step) {
  CheckpointMeta meta;
  meta.step = step;
  meta.numbers = {{"tokens", step * 4096}, {"next_sample", step * 8}, {"seed", 1234}};
  meta.texts = {{"config", "model.width: 64\nmodel.vocabulary: 131\n"},
                {"recipe_digest", std::string(64, 'a')},
                {"program_version", "0.1.0"},
                {"empty", ""}};
  meta.state = {{"adam_step", step - 1}, {"bad_steps", 1}};
  return meta;
}

inline std::string file_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// A folder that all ranks of the world see, removed at the end.
class SharedFolder {
 public:
  SharedFolder() : world_(MPI_COMM_WORLD) {
    path_ = (std::filesystem::temp_directory_path() /
             ("tessera-checkpoints-" + std::to_string(::getpid())))
                .string();
    world_.broadcast("folder", path_, 0);
    if (world_.rank() == 0) std::filesystem::create_directories(path_);
    world_.barrier("folder");
  }
  ~SharedFolder() {
    world_.barrier("folder");
    if (world_.rank() == 0) std::filesystem::remove_all(path_);
  }
  SharedFolder(const SharedFolder&) = delete;
  SharedFolder& operator=(const SharedFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string inner(const std::string& name) const { return path_ + "/" + name; }
  Communicator& world() { return world_; }

 private:
  Communicator world_;
  std::string path_;
};

// Runs `work` on the first `ranks` ranks of the world, by a communicator of their own.
inline void with_ranks(int ranks, const std::function<void(Communicator&)>& work) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank < ranks ? 0 : MPI_UNDEFINED, rank, &part);
  if (part != MPI_COMM_NULL) {
    {
      Communicator communicator(part);
      work(communicator);
    }
    MPI_Comm_free(&part);
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace tessera
