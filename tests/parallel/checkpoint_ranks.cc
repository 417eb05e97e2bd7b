#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <set>

#include "parallel/checkpoint.h"
#include "tests/parallel/checkpoint_fixture.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int kRanks[] = {1, 2, 3, 4, 5, 8};

std::string folder_of(const SharedFolder& folder, int ranks) {
  return folder.inner("by" + std::to_string(ranks));
}

// Collective over `communicator`. The message, which has to be the same on all ranks; "" if none.
template <class Work>
std::string error_of(Communicator& communicator, const Work& work) {
  std::string message;
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kCheckpoint);
    message = error.what();
  }
  for (const std::string& other : communicator.all_gather_strings("test", message)) {
    EXPECT_EQ(other, message);
  }
  EXPECT_EQ(message.find('\n'), std::string::npos);
  return message;
}

std::string read_error(Communicator& communicator, const std::string& path) {
  ShardedState state(communicator, false);
  return error_of(communicator, [&] { read_checkpoint(communicator, path, state.arrays()); });
}

TEST(Checkpoint, SameBytesWhateverTheNumberOfRanks) {
  const SharedFolder folder;
  for (const int ranks : kRanks) {
    with_ranks(ranks, [&](Communicator& communicator) {
      ShardedState state(communicator, true);
      CheckpointOptions options;
      // Some layouts also cut their transfers.
      if (ranks % 2 == 1) options.transfer_bytes = 1000000;
      const std::string path = write_checkpoint(communicator, folder_of(folder, ranks),
                                                checkpoint_meta(100), state.arrays(), options);
      EXPECT_EQ(path, folder_of(folder, ranks) + "/step-00000100.h5");
      EXPECT_FALSE(fs::exists(path + ".partial"));
      EXPECT_TRUE(state.right()) << "writing leaves the state alone";
    });
  }
  const std::string expected = file_bytes(folder_of(folder, 1) + "/step-00000100.h5");
  EXPECT_GT(expected.size(), std::size_t{4} * 2111 * 2003);
  for (const int ranks : kRanks) {
    EXPECT_TRUE(file_bytes(folder_of(folder, ranks) + "/step-00000100.h5") == expected)
        << ranks << " ranks";
  }
  // Nothing of where stands in it.
  EXPECT_EQ(expected.find(folder.path()), std::string::npos);
}

TEST(Checkpoint, B13_AnyNumberOfRanksReadsWhatAnyWrote) {
  const SharedFolder folder;
  for (const int writers : {1, 4, 5}) {
    with_ranks(writers, [&](Communicator& communicator) {
      ShardedState state(communicator, true);
      write_checkpoint(communicator, folder_of(folder, writers), checkpoint_meta(7),
                       state.arrays());
    });
    const std::string path = folder_of(folder, writers) + "/step-00000007.h5";
    for (const int readers : kRanks) {
      with_ranks(readers, [&](Communicator& communicator) {
        ShardedState state(communicator, false);
        EXPECT_FALSE(state.right() && communicator.size() == 1);
        read_checkpoint(communicator, path, state.arrays());
        EXPECT_TRUE(state.right()) << writers << " to " << readers;
      });
    }
    EXPECT_EQ(read_checkpoint_meta(path), checkpoint_meta(7));
    EXPECT_THAT(verify_checkpoint(path), IsEmpty());
  }
}

// What decides the next step is read alone, before any array.
TEST(Checkpoint, ADamagedNumberOfTheStateIsRefused) {
  SharedFolder folder;
  with_ranks(1, [&](Communicator& communicator) {
    ShardedState state(communicator, true);
    CheckpointMeta meta = checkpoint_meta(7);
    constexpr std::int64_t kSteps = 0x0123456789ABCDEF;
    meta.state["adam_step"] = kSteps;
    const std::string path = write_checkpoint(communicator, folder.path(), meta, state.arrays());
    EXPECT_EQ(read_checkpoint_meta(path), meta);
    std::string bytes = file_bytes(path);
    const std::size_t at =
        bytes.find(std::string(reinterpret_cast<const char*>(&kSteps), sizeof(kSteps)));
    ASSERT_NE(at, std::string::npos);
    bytes[at + 1] ^= 0x10;
    write_bytes(path, bytes);
    const std::string fault =
        "checkpoint " + path + ": array state/adam_step is damaged: its checksum differs";
    EXPECT_THAT([&] { read_checkpoint_meta(path); },
                testing::ThrowsMessage<Error>(testing::StrEq(fault)));
    EXPECT_THAT(verify_checkpoint(path), ElementsAre(fault));
    EXPECT_EQ(list_checkpoints(folder.path())[0].fault, fault);
  });
}

TEST(Checkpoint, DamagedFilesAreRefusedByArrayOnAllRanks) {
  SharedFolder folder;
  with_ranks(3, [&](Communicator& communicator) {
    ShardedState state(communicator, true);
    write_checkpoint(communicator, folder.path(), checkpoint_meta(7), state.arrays());
  });
  const std::string path = folder.inner("step-00000007.h5");
  const std::string good = file_bytes(path);
  folder.world().barrier("read");
  const auto damage = [&](const std::string& bytes) {
    folder.world().barrier("damage");
    if (folder.world().rank() == 0) write_bytes(path, bytes);
    folder.world().barrier("damage");
  };
  const auto expect = [&](const auto& matcher) {
    for (const int ranks : {1, 3}) {
      with_ranks(ranks, [&](Communicator& communicator) {
        EXPECT_THAT(read_error(communicator, path), AllOf(HasSubstr(path), matcher));
      });
    }
  };

  // One bit, in the second checksum piece of the large array and in a moment.
  for (const auto& [array, element] :
       {std::pair<std::string, std::int64_t>{"params/model.layers.0.feed_forward.up_proj.weight",
                                             4200003},
        {"adamw/v/model.norm.weight", 5}}) {
    std::string pattern(16, '\0');
    for (std::size_t i = 0; i < 4; ++i) {
      const float value = checkpoint_value(array, element + static_cast<std::int64_t>(i));
      std::memcpy(pattern.data() + 4 * i, &value, 4);
    }
    const std::size_t at = good.find(pattern);
    ASSERT_NE(at, std::string::npos);
    ASSERT_EQ(good.find(pattern, at + 1), std::string::npos);
    std::string bad = good;
    bad[at + 2] = static_cast<char>(bad[at + 2] ^ 0x10);
    damage(bad);
    expect(AllOf(HasSubstr(array), HasSubstr("checksum")));
    EXPECT_THAT(verify_checkpoint(path), ElementsAre(AllOf(HasSubstr(array), HasSubstr(path))));
  }

  damage(good.substr(0, good.size() - 1));
  expect(HasSubstr("is truncated: only " + std::to_string(good.size() - 1) + " of its " +
                   std::to_string(good.size()) + " bytes are left"));
  damage(good + "more");
  expect(HasSubstr("has 4 bytes behind its end"));
  damage(good.substr(0, good.size() / 2));
  expect(HasSubstr("truncated"));
  EXPECT_THAT(verify_checkpoint(path), ElementsAre(HasSubstr("truncated")));
  damage(good.substr(0, 20));
  expect(HasSubstr("is truncated: only 20 bytes are left"));
  damage("");
  expect(HasSubstr("is empty"));
  damage(std::string(100000, 'x'));
  expect(HasSubstr("isn't an HDF5 file"));
  // The format that h5py writes has no checksums.
  for (const char version : {'\0', '\1', '\2', '\4'}) {
    std::string older = good;
    older[8] = version;
    damage(older);
    expect(HasSubstr("is an HDF5 file of another format than checkpoints have"));
  }
  folder.world().barrier("removal");
  if (folder.world().rank() == 0) fs::remove(path);
  folder.world().barrier("removal");
  expect(HasSubstr("o such file"));
}

// Whatever byte of a file's structure is wrong, what we say of it is plain, and nothing crashes.
TEST(Checkpoint, DamagedStructureIsToldInPlainWords) {
  SharedFolder folder;
  with_ranks(1, [&](Communicator& communicator) {
    std::vector<float> values{1.0F, 2.0F, 3.0F};
    // More arrays, and attributes, than HDF5 would put into a group's header of itself.
    std::vector<CheckpointArray> arrays;
    for (char name = 'a'; name <= 'm'; ++name) {
      arrays.push_back({std::string("params/") + name, Shape{3}, {{0, 3, values.data()}}});
    }
    CheckpointMeta meta = checkpoint_meta(1);
    for (int i = 0; i < 12; ++i) meta.numbers["number" + std::to_string(i)] = i;
    const std::string path = write_checkpoint(communicator, folder.path(), meta, arrays);
    const std::string good = file_bytes(path);
    const std::string copy = folder.inner("damaged.h5");
    std::set<std::string> told;
    for (std::size_t at = 0; at < good.size(); at += 11) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 0x55);
      write_bytes(copy, bad);
      const std::vector<std::string> faults = verify_checkpoint(copy);
      if (faults.empty()) {  // a byte that says nothing
        ASSERT_EQ(read_checkpoint_meta(copy), meta) << at;
        ASSERT_FALSE(diff_checkpoints(copy, path)) << at;
      }
      for (const std::string& fault : faults) {
        ASSERT_THAT(fault, testing::StartsWith("checkpoint " + copy + ": ")) << at;
        told.insert(fault.substr(copy.size() + std::strlen("checkpoint : ")));
      }
    }
    for (const std::string& fault : told) {
      for (const char* raw : {"nable", "addr", "eof", "object header", "metadata", "H5F", "H5D"}) {
        EXPECT_THAT(fault, testing::Not(HasSubstr(raw)));
      }
      EXPECT_EQ(fault.find('\n'), std::string::npos);
    }
    EXPECT_THAT(told,
                testing::IsSupersetOf(
                    {"/params is damaged: its arrays can't be listed",
                     "array params/a at element 0 or in the 16 MiB from there is damaged: its "
                     "checksum differs",
                     "is damaged: its header can't be read",
                     "isn't an HDF5 file: damaged at its very start, or never a checkpoint"}));
  });
}

// As of a large model: more links in a group than HDF5 likes in its header, a config longer than a
// header's message can be.
TEST(Checkpoint, ManyArraysAndLongTexts) {
  SharedFolder folder;
  with_ranks(1, [&](Communicator& communicator) {
    std::vector<float> values{1.0F, 2.0F, 3.0F};
    std::vector<CheckpointArray> arrays;
    for (int i = 0; i < 700; ++i) {
      const std::string name = "params/model.layers." + std::to_string(i) + ".mixer.q_proj.weight";
      arrays.push_back({name, Shape{3}, {{0, 3, values.data()}}});
    }
    CheckpointMeta meta = checkpoint_meta(1);
    meta.texts["config"] = std::string(200000, 'x');
    const std::string path = write_checkpoint(communicator, folder.path(), meta, arrays);
    EXPECT_EQ(read_checkpoint_meta(path), meta);
    EXPECT_THAT(verify_checkpoint(path), IsEmpty());
  });
}

TEST(Checkpoint, MissingArraysAndOtherShapesAreRefused) {
  const SharedFolder folder;
  with_ranks(4, [&](Communicator& communicator) {
    ShardedState state(communicator, true);
    const std::string path =
        write_checkpoint(communicator, folder.path(), checkpoint_meta(7), state.arrays());
    ShardedState other(communicator, false);
    other.arrays()[0].name = "params/model.other.weight";
    EXPECT_THAT(
        error_of(communicator, [&] { read_checkpoint(communicator, path, other.arrays()); }),
        AllOf(HasSubstr(path), HasSubstr("has no array params/model.other.weight")));
    ShardedState turned(communicator, false);
    turned.arrays()[0].shape = Shape{37, 131};
    EXPECT_THAT(
        error_of(communicator, [&] { read_checkpoint(communicator, path, turned.arrays()); }),
        AllOf(HasSubstr(turned.arrays()[0].name), HasSubstr("[131, 37]"), HasSubstr("[37, 131]")));
  });
}

// One rank alone has the trouble; all hear of it.
TEST(Checkpoint, TroubleOfOneRankIsTheErrorOfAll) {
  const SharedFolder folder;
  with_ranks(4, [&](Communicator& communicator) {
    ShardedState state(communicator, true);
    const std::string path =
        write_checkpoint(communicator, folder.path(), checkpoint_meta(7), state.arrays());
    const std::string seen = communicator.rank() == 2 ? path + ".elsewhere" : path;
    ShardedState other(communicator, false);
    EXPECT_THAT(
        error_of(communicator, [&] { read_checkpoint(communicator, seen, other.arrays()); }),
        HasSubstr(".elsewhere"));
  });
}

TEST(Checkpoint, ShardsThatDontTileAreRefusedBeforeAnythingIsWritten) {
  const SharedFolder folder;
  with_ranks(3, [&](Communicator& communicator) {
    const auto attempt = [&](const std::function<void(std::vector<CheckpointArray>&)>& spoil) {
      ShardedState state(communicator, true);
      if (communicator.rank() == 1) spoil(state.arrays());
      return error_of(communicator, [&] {
        write_checkpoint(communicator, folder.inner("none"), checkpoint_meta(7), state.arrays());
      });
    };
    const auto large = [](std::vector<CheckpointArray>& arrays) -> CheckpointArray& {
      for (CheckpointArray& array : arrays) {
        if (array.name.ends_with("up_proj.weight")) return array;
      }
      throw std::logic_error("no such array");
    };
    EXPECT_THAT(attempt([&](auto& arrays) { --large(arrays).parts[0].end; }),
                AllOf(HasSubstr("up_proj.weight"), HasSubstr("held by no rank")));
    EXPECT_THAT(
        attempt([&](auto& arrays) { large(arrays).parts.push_back(large(arrays).parts[0]); }),
        AllOf(HasSubstr("up_proj.weight"), HasSubstr("more than one rank")));
    EXPECT_THAT(attempt([&](auto& arrays) { large(arrays).parts.clear(); }),
                HasSubstr("held by no rank"));
  });
  EXPECT_FALSE(fs::exists(folder.inner("none")));
}

// Saves once, runs out of space, makes room, saves again.
void run_out_of_space(SharedFolder& folder, const std::function<void()>& take_space,
                      const std::function<void()>& give_space) {
  with_ranks(4, [&](Communicator& communicator) {
    ShardedState state(communicator, true);
    const auto save = [&](std::int64_t step) {
      write_checkpoint(communicator, folder.inner("c"), checkpoint_meta(step), state.arrays());
    };
    save(1);
    if (communicator.rank() == 0) take_space();
    communicator.barrier("test");
    EXPECT_THAT(error_of(communicator, [&] { save(2); }),
                AllOf(HasSubstr("step-00000002.h5"), HasSubstr("bytes")));
    // The folder is as it was.
    EXPECT_THAT(list_checkpoints(folder.inner("c")), testing::SizeIs(1));
    EXPECT_THAT(verify_checkpoint(folder.inner("c/step-00000001.h5")), IsEmpty());
    communicator.barrier("test");
    if (communicator.rank() == 0) give_space();
    communicator.barrier("test");
    save(2);
    EXPECT_THAT(verify_checkpoint(folder.inner("c/step-00000002.h5")), IsEmpty());
    // Nothing stays reserved: both files take the same space.
    struct stat one = {}, two = {};
    stat(folder.inner("c/step-00000001.h5").c_str(), &one);
    stat(folder.inner("c/step-00000002.h5").c_str(), &two);
    EXPECT_LE(two.st_blocks * 512, two.st_size + (1 << 16));
    EXPECT_EQ(one.st_size, two.st_size);
  });
}

TEST(Checkpoint, FileSizeLimitIsFoundBeforeAnythingIsWritten) {
  SharedFolder folder;
  rlimit before = {};
  getrlimit(RLIMIT_FSIZE, &before);
  run_out_of_space(
      folder,
      [&] {
        const rlimit small = {1 << 20, before.rlim_max};
        setrlimit(RLIMIT_FSIZE, &small);
      },
      [&] { setrlimit(RLIMIT_FSIZE, &before); });
}

// Writes that fail though the space was there: on one rank, which all ranks learn; none waits.
TEST(Checkpoint, AWriteThatFailsOnOneRankIsTheErrorOfAll) {
  SharedFolder folder;
  for (const int ranks : {2, 3, 8}) {
    with_ranks(ranks, [&](Communicator& communicator) {
      ShardedState state(communicator, true);
      const std::string to = folder_of(folder, ranks);
      const auto save = [&](std::int64_t step) {
        write_checkpoint(communicator, to, checkpoint_meta(step), state.arrays());
      };
      save(1);
      rlimit before = {};
      getrlimit(RLIMIT_FSIZE, &before);
      const bool fails = communicator.rank() == ranks - 1;
      const auto limit = [&](rlim_t bytes) {
        const rlimit changed = {bytes, before.rlim_max};
        if (fails) setrlimit(RLIMIT_FSIZE, &changed);
      };
      const sighandler_t handler = std::signal(SIGXFSZ, SIG_IGN);  // so that writing fails
      limit(100000);
      const std::string error = error_of(communicator, [&] { save(2); });
      limit(before.rlim_cur);
      std::signal(SIGXFSZ, handler);
      EXPECT_THAT(error, AllOf(HasSubstr("step-00000002.h5.partial: can't be written at array "),
                               HasSubstr(" by rank " + std::to_string(ranks - 1) + " on "),
                               HasSubstr("File too large; raise the limit")));
      EXPECT_THAT(list_checkpoints(to), testing::SizeIs(1));
      save(3);
      EXPECT_THAT(verify_checkpoint(to + "/step-00000003.h5"), IsEmpty());
    });
  }
}

TEST(Checkpoint, FullDiskIsFoundBeforeAnythingIsWritten) {
  SharedFolder folder;
  std::string mounted = "no";
  if (folder.world().rank() == 0) {
    fs::create_directories(folder.inner("c"));
    if (mount("tessera", folder.inner("c").c_str(), "tmpfs", 0, "size=60m") == 0) mounted = "yes";
  }
  folder.world().broadcast("mount", mounted, 0);
  if (mounted == "no") GTEST_SKIP() << "a tmpfs can't be mounted here";
  const std::string filler = folder.inner("c/filler");
  run_out_of_space(
      folder, [&] { write_bytes(filler, std::string(std::size_t{35} << 20, 'x')); },
      [&] { fs::remove(filler); });
  if (folder.world().rank() == 0) {
    EXPECT_EQ(umount(folder.inner("c").c_str()), 0);
  }
}

TEST(Checkpoint, NewestCompleteOneWinsAndTheOthersSayWhy) {
  SharedFolder folder;
  with_ranks(2, [&](Communicator& communicator) {
    ShardedState state(communicator, true);
    for (const std::int64_t step : {10, 20, 30, 40}) {
      write_checkpoint(communicator, folder.path(), checkpoint_meta(step), state.arrays());
    }
  });
  if (folder.world().rank() == 0) {
    fs::resize_file(folder.inner("step-00000040.h5"), 100000);
    write_bytes(folder.inner("step-00000050.h5"), "not a checkpoint");
    fs::copy_file(folder.inner("step-00000010.h5"), folder.inner("step-00000060.h5"));
    write_bytes(folder.inner("step-00000070.h5.partial"), "half");
    write_bytes(folder.inner("notes.txt"), "");
    write_bytes(folder.inner("step-x.h5"), "");
    const std::vector<CheckpointEntry> entries = list_checkpoints(folder.path());
    std::vector<std::int64_t> steps, usable;
    for (const CheckpointEntry& entry : entries) {
      steps.push_back(entry.step);
      if (entry.fault.empty()) usable.push_back(entry.step);
    }
    EXPECT_THAT(steps, ElementsAre(70, 60, 50, 40, 30, 20, 10));
    EXPECT_THAT(usable, ElementsAre(30, 20, 10));
    EXPECT_THAT(entries[0].fault, HasSubstr("cut short"));
    EXPECT_THAT(entries[1].fault, HasSubstr("step is 10"));
    EXPECT_THAT(entries[2].fault, HasSubstr("isn't an HDF5 file"));
    EXPECT_THAT(entries[3].fault, HasSubstr("truncated"));
    EXPECT_EQ(entries[4].tokens, 30 * 4096);
    EXPECT_EQ(entries[4].bytes, static_cast<std::int64_t>(fs::file_size(entries[4].path)));
    EXPECT_THAT(list_checkpoints(folder.inner("nowhere")), IsEmpty());
  }
}

TEST(Checkpoint, RetentionKeepsWhatTheRulesSay) {
  SharedFolder folder;
  with_ranks(1, [&](Communicator& communicator) {
    std::vector<float> values{1.0F, 2.0F, 3.0F};
    const std::vector<CheckpointArray> arrays{{"params/a", Shape{3}, {{0, 3, values.data()}}}};
    for (std::int64_t step = 1; step <= 12; ++step) {
      write_checkpoint(communicator, folder.path(), checkpoint_meta(step), arrays);
    }
    // The newest is damaged: it doesn't count, and it isn't hidden.
    fs::resize_file(folder.inner("step-00000012.h5"), 10);
    write_bytes(folder.inner("step-00000011.h5.partial"), "half");
    write_bytes(folder.inner("step-00000011.h5.partial.locktest.0"), "");
    Retention retention;
    retention.keep_last = 2;
    retention.keep_every = 5;
    retention.archive_steps = {3, 4, 99};
    const Retired retired = apply_retention(folder.path(), retention);
    std::vector<std::int64_t> left;
    for (const CheckpointEntry& entry : list_checkpoints(folder.path())) {
      left.push_back(entry.step);
    }
    EXPECT_THAT(left, ElementsAre(12, 11, 11, 11, 10, 5, 4, 3));
    EXPECT_EQ(retired.deleted.size(), 6U);
    EXPECT_THAT(retired.faults, IsEmpty());
    EXPECT_THAT(apply_retention(folder.path(), retention).deleted, IsEmpty());
    // The next save makes room for itself first.
    write_checkpoint(communicator, folder.path(), checkpoint_meta(13), arrays);
    EXPECT_FALSE(fs::exists(folder.inner("step-00000011.h5.partial")));
    EXPECT_FALSE(fs::exists(folder.inner("step-00000011.h5.partial.locktest.0")));
  });
}

// Writing a step again, as a run that resumed from an older one does, replaces the file.
TEST(Checkpoint, SameStepAgainReplacesTheFile) {
  SharedFolder folder;
  with_ranks(3, [&](Communicator& communicator) {
    ShardedState state(communicator, true);
    write_checkpoint(communicator, folder.path(), checkpoint_meta(1), state.arrays());
    CheckpointMeta meta = checkpoint_meta(1);
    meta.state["bad_steps"] = 0;
    write_checkpoint(communicator, folder.path(), meta, state.arrays());
    EXPECT_EQ(read_checkpoint_meta(folder.inner("step-00000001.h5")), meta);
  });
}

TEST(Checkpoint, DifferencesAreNamed) {
  SharedFolder folder;
  with_ranks(2, [&](Communicator& communicator) {
    const std::string a = write_checkpoint(communicator, folder.inner("a"), checkpoint_meta(1),
                                           ShardedState(communicator, true).arrays());
    const auto other = [&](const std::string& name, const CheckpointMeta& meta,
                           const std::function<void(std::vector<CheckpointArray>&)>& change) {
      ShardedState state(communicator, true);
      change(state.arrays());
      return write_checkpoint(communicator, folder.inner(name), meta, state.arrays());
    };
    const auto change_element = [](std::vector<CheckpointArray>& arrays, const std::string& name,
                                   std::int64_t element) {
      for (CheckpointArray& array : arrays) {
        for (CheckpointArray::Part& part : array.parts) {
          if (array.name != name || element < part.begin || element >= part.end) continue;
          float& value = part.data[element - part.begin];
          value = std::nextafter(value, 10.0F);
        }
      }
    };
    EXPECT_FALSE(diff_checkpoints(a, a));

    const std::string large = "params/model.layers.0.feed_forward.up_proj.weight";
    auto difference = diff_checkpoints(a, other("b", checkpoint_meta(1), [&](auto& arrays) {
                                         change_element(arrays, large, 4200004);
                                         change_element(arrays, large, 4200003);
                                         change_element(arrays, "adamw/v/lm_head.weight", 0);
                                       }));
    ASSERT_TRUE(difference);
    EXPECT_EQ(difference->array, large);
    EXPECT_THAT(difference->index, ElementsAre(4200003 / 2003, 4200003 % 2003));
    EXPECT_THAT(difference->what, HasSubstr(" against "));

    difference = diff_checkpoints(a, other("c", checkpoint_meta(1), [&](auto& arrays) {
                                    change_element(arrays, "adamw/v/model.norm.weight", 36);
                                  }));
    ASSERT_TRUE(difference);
    EXPECT_EQ(difference->array, "adamw/v/model.norm.weight");
    EXPECT_THAT(difference->index, ElementsAre(36));

    CheckpointMeta meta = checkpoint_meta(1);
    meta.state["bad_steps"] = 2;
    difference = diff_checkpoints(a, other("d", meta, [](auto&) {}));
    ASSERT_TRUE(difference);
    EXPECT_EQ(difference->array, "state/bad_steps");
    EXPECT_EQ(difference->what, "1 against 2");

    difference = diff_checkpoints(
        a, other("e", checkpoint_meta(1), [](auto& arrays) { arrays.erase(arrays.begin()); }));
    ASSERT_TRUE(difference);
    EXPECT_EQ(difference->array, "params/model.embed_tokens.weight");
    EXPECT_THAT(difference->what, HasSubstr("missing in"));
  });
}

// Whoever has h5py reads a checkpoint with no help from us.
TEST(Checkpoint, H5pyReadsIt) {
  SharedFolder folder;
  with_ranks(4, [&](Communicator& communicator) {
    ShardedState state(communicator, true);
    write_checkpoint(communicator, folder.path(), checkpoint_meta(7), state.arrays());
  });
  if (folder.world().rank() != 0) return;
  if (std::system("/usr/bin/python3 -c 'import h5py' 2>/dev/null") != 0) {
    FAIL() << "/usr/bin/python3 has no h5py; ./launch/setup --tests installs it";
  }
  const std::string script = folder.inner("read.py");
  write_bytes(script,
              "import h5py, sys, zlib, numpy\n"
              "f = h5py.File(sys.argv[1], 'r')\n"
              "m = f['meta'].attrs\n"
              "text = lambda v: v.decode() if isinstance(v, bytes) else v\n"
              "print(m['format_version'], m['step'], m['tokens'], text(m['recipe_digest'])[:3])\n"
              "print(text(m['config']).count('\\n'), f['state/adam_step'][()])\n"
              "w = f['params/model.layers.0.feed_forward.up_proj.weight']\n"
              "print(w.shape, w.dtype, float(w[2, 3]).hex())\n"
              "b = w[...].tobytes()\n"
              "sums = [zlib.crc32(b[i:i + (16 << 20)]) for i in range(0, len(b), 16 << 20)]\n"
              "print(sums == list(f['meta/checksums/params/'\n"
              "                    'model.layers.0.feed_forward.up_proj.weight']))\n"
              "print(sorted(f['adamw/m'])[0])\n");
  FILE* pipe = popen(
      ("/usr/bin/python3 " + script + " " + folder.inner("step-00000007.h5") + " 2>&1").c_str(),
      "r");
  ASSERT_NE(pipe, nullptr);
  std::string output;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) output += static_cast<char>(c);
  pclose(pipe);
  char value[48];
  std::snprintf(value, sizeof(value), "%a",
                static_cast<double>(checkpoint_value(
                    "params/model.layers.0.feed_forward.up_proj.weight", 2 * 2003 + 3)));
  EXPECT_THAT(output, HasSubstr("1 7 28672 aaa\n2 6\n(2111, 2003) float32 "));
  EXPECT_THAT(output, HasSubstr("True\nlm_head.weight\n"));
  // Python writes all 13 digits.
  EXPECT_THAT(output, HasSubstr(std::string(value).substr(0, 6)));

  // What somebody takes out of the file is missed.
  const std::string less = folder.inner("less.h5");
  for (const std::string array : {"params/lm_head.weight", "adamw", "state/adam_step"}) {
    fs::copy_file(folder.inner("step-00000007.h5"), less, fs::copy_options::overwrite_existing);
    ASSERT_EQ(std::system(("/usr/bin/python3 -c 'import h5py; del h5py.File(\"" + less +
                           "\", \"r+\")[\"" + array + "\"]'")
                              .c_str()),
              0);
    EXPECT_THAT(verify_checkpoint(less), ElementsAre(HasSubstr("has no array " + array)));
  }
}

}  // namespace
}  // namespace tessera
