// A checkpoint that was damaged. The input is a list of changes to a sound one, five bytes each: a
// place (24 bits, modulo the file's size), what to do there, and with what. What the checks let
// pass must be the sound one's content.
#include "parallel/checkpoint.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>

#include "parallel/communicator.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;  // NOLINT(google-build-using-namespace)

namespace {

constexpr const char* kSound = "sound/step-00000007.h5";
constexpr const char* kDamaged = "damaged/step-00000007.h5";

void write_sound_checkpoint(Communicator& communicator) {
  CheckpointMeta meta;
  meta.step = 7;
  meta.numbers = {{"tokens", 4096}, {"next_sample", 56}, {"seed", 1234}};
  meta.texts = {{"config", "model.width=64\nmodel.vocabulary=131\n"}, {"empty", ""}};
  meta.state = {{"adam_steps", 6}, {"bad_steps_in_a_row", 1}};
  std::vector<float> values(std::size_t{5} * 7 * 3);
  std::iota(values.begin(), values.end(), 0.5F);
  std::vector<CheckpointArray> arrays;
  for (const char* group : {"params", "adamw/m", "adamw/v"}) {
    for (const Shape& shape : {Shape{37}, Shape{5, 7, 3}}) {
      arrays.push_back({std::string(group) + "/model.layers." + std::to_string(shape.rank()),
                        shape,
                        {{0, shape.count(), values.data()}}});
    }
  }
  arrays.push_back({"state/selection_bias/layers.0", Shape{25}, {{0, 25, values.data()}}});
  write_checkpoint(communicator, "sound", meta, arrays);
}

// Made by another process, so that MPI stays out of this one.
std::string make_sound_checkpoint() {
  const pid_t child = ::fork();
  fuzz::require(child >= 0, "no process can be started");
  if (child == 0) {
    int argc = 0;
    char** argv = nullptr;
    const MpiSession session(&argc, &argv);
    Communicator communicator(MPI_COMM_WORLD);
    write_sound_checkpoint(communicator);
    ::_exit(0);
  }
  int status = 0;
  pid_t ended = -1;
  do {
    ended = ::waitpid(child, &status, 0);
  } while (ended < 0 && errno == EINTR);  // libFuzzer's alarm
  fuzz::require(ended == child && status == 0, "there is no checkpoint");
  fuzz::require(verify_checkpoint(kSound).empty(), "the sound checkpoint isn't");
  std::filesystem::create_directories("damaged");
  std::ifstream file(kSound, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The changes of the input, made in turn.
std::string damaged(std::string bytes, std::string_view input) {
  for (; input.size() >= 5 && !bytes.empty(); input.remove_prefix(5)) {
    const auto* const data = reinterpret_cast<const unsigned char*>(input.data());
    const std::size_t place = (data[0] << 16 | data[1] << 8 | data[2]) % bytes.size();
    const std::size_t room = bytes.size() - place;
    const unsigned char value = data[4];
    switch (data[3] % 7) {
      case 0:  // a bit
        bytes[place] = static_cast<char>(bytes[place] ^ (1 << value % 8));
        break;
      case 1:  // a byte
        bytes[place] = static_cast<char>(value);
        break;
      case 2:  // eight bytes, as a number or an address
        for (std::size_t i = 0; i < std::min<std::size_t>(room, 8); ++i) {
          bytes[place + i] = static_cast<char>(i == 0 ? value : value < 128 ? 0 : 0xFF);
        }
        break;
      case 3:  // a stretch of zeros, as of a hole
        std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(place),
                    std::min<std::size_t>(room, std::size_t{value} * 16), '\0');
        break;
      case 4: {  // a stretch of another place
        const std::size_t from = (place + std::size_t{value} * 64) % bytes.size();
        const std::size_t count = std::min({room, bytes.size() - from, std::size_t{64}});
        std::copy_n(std::string(bytes, from, count).begin(), count,
                    bytes.begin() + static_cast<std::ptrdiff_t>(place));
        break;
      }
      case 5:  // the end
        bytes.resize(place);
        break;
      default:  // bytes too many
        bytes.append(value, static_cast<char>(value));
    }
  }
  return bytes;
}

}  // namespace

void fuzz::take(std::string_view input) {
  static const std::string sound = make_sound_checkpoint();
  static const CheckpointMeta sound_meta = read_checkpoint_meta(kSound);
  fuzz::write_file(kDamaged, damaged(sound, input));
  CheckpointMeta meta;
  const bool taken =
      fuzz::accepts({ExitCode::kCheckpoint}, [&] { meta = read_checkpoint_meta(kDamaged); });
  fuzz::require(!taken || meta == sound_meta, "what the checkpoint says is another");
  const std::vector<std::string> faults = verify_checkpoint(kDamaged);
  for (const std::string& fault : faults) {
    fuzz::check_error({ExitCode::kCheckpoint, fault}, {ExitCode::kCheckpoint});
  }
  const std::vector<CheckpointEntry> entries = list_checkpoints("damaged");
  fuzz::require(entries.size() == 1 && entries[0].step == 7, "the checkpoint isn't listed");
  if (!entries[0].fault.empty()) {
    fuzz::check_error({ExitCode::kCheckpoint, entries[0].fault}, {ExitCode::kCheckpoint});
    fuzz::require(!faults.empty(), "the list knows a fault that verify doesn't");
  }
  fuzz::accepts({ExitCode::kCheckpoint}, [] { checkpoint_parameters(kDamaged); });
  fuzz::accepts({ExitCode::kCheckpoint}, [&] {
    const bool equal = !diff_checkpoints(kSound, kDamaged);
    fuzz::require(equal || !faults.empty(), "what verify let pass differs");
  });
}
