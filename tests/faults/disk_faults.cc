// Preloaded into the real program: makes calls on files fail, fall short, take long or stand still.
//   TESSERA_DISK_FAULTS  rules, separated by ';': CALL PATH RANK FIRST LAST ACTION
//     CALL    open | stat | read | write | fsync | rename | close | unlink | truncate | fallocate |
//     mpi PATH    a word in the path (of MPI: in the function's name), its end if a '$' follows, *
//     for
//             any; after a '#' a word in what is written
//     RANK    of the job, * for any
//     FIRST, LAST  which of the calls that match, from 1; LAST 0: all that follow
//     ACTION  ENOSPC or another error; short: half of the bytes are written; delay=MILLISECONDS;
//             hold=FILE: makes FILE.held and waits until there is FILE
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <sstream>
#include <string>
#include <string_view>

namespace {

struct Rule {
  std::string call, path, text, rank, action;
  long first = 1, last = 0;
  std::atomic<long> seen{0};
};

std::deque<Rule>& rules() {
  static auto* const kRules = [] {
    auto* list = new std::deque<Rule>;
    const char* given = std::getenv("TESSERA_DISK_FAULTS");
    std::istringstream all(given == nullptr ? "" : given);
    for (std::string one; std::getline(all, one, ';');) {
      std::istringstream words(one);
      Rule& rule = list->emplace_back();
      words >> rule.call >> rule.path >> rule.rank >> rule.first >> rule.last >> rule.action;
      const std::size_t mark = rule.path.find('#');
      if (mark != std::string::npos) {
        rule.text = rule.path.substr(mark + 1);
        rule.path.resize(mark);
      }
    }
    return list;
  }();
  return *kRules;
}

int error_of(const std::string& name) {
  struct Named {
    const char* name;
    int code;
  };
  static constexpr Named kErrors[] = {
      {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT},         {"EIO", EIO},       {"EROFS", EROFS},
      {"EINTR", EINTR},   {"EOPNOTSUPP", EOPNOTSUPP}, {"EACCES", EACCES}, {"EINVAL", EINVAL}};
  for (const Named& error : kErrors) {
    if (name == error.name) return error.code;
  }
  std::fprintf(stderr, "disk faults: unknown action %s\n", name.c_str());
  std::abort();
}

void wait_milliseconds(long milliseconds) {
  timespec left = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  while (nanosleep(&left, &left) != 0) {
  }
}

void hold(const std::string& file) {
  const std::string held = file + ".held";
  close(static_cast<int>(syscall(SYS_openat, AT_FDCWD, held.c_str(), O_CREAT | O_WRONLY, 0644)));
  while (access(file.c_str(), F_OK) != 0) wait_milliseconds(1);
}

bool matches(std::string_view path, std::string_view wanted) {
  if (wanted == "*") return true;
  if (!wanted.ends_with('$')) return path.find(wanted) != std::string_view::npos;
  wanted.remove_suffix(1);
  return path.ends_with(wanted);
}

struct Verdict {
  int error = 0;
  bool cut = false;
};

Verdict judge(const char* call, const char* path, std::string_view bytes = {}) {
  Verdict verdict;
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  const int kept = errno;
  for (Rule& rule : rules()) {
    if (rule.call != call) continue;
    if (!matches(path, rule.path)) continue;
    if (rule.rank != "*" && rule.rank != (rank == nullptr ? "0" : rank)) continue;
    if (!rule.text.empty() && bytes.find(rule.text) == std::string_view::npos) continue;
    const long number = ++rule.seen;
    if (number < rule.first || (rule.last > 0 && number > rule.last)) continue;
    if (rule.action == "short") {
      verdict.cut = true;
    } else if (rule.action.rfind("delay=", 0) == 0) {
      wait_milliseconds(std::atol(rule.action.c_str() + 6));
    } else if (rule.action.rfind("hold=", 0) == 0) {
      hold(rule.action.substr(5));
    } else {
      verdict.error = error_of(rule.action);
    }
  }
  errno = verdict.error != 0 ? verdict.error : kept;
  return verdict;
}

// Of a file that a call of this name is about; allocates nothing, since a signal's handler may call
// it.
Verdict judge(const char* call, int file, std::string_view bytes = {}) {
  bool any = false;
  for (const Rule& rule : rules()) any = any || rule.call == call;
  if (!any) return {};
  const int kept = errno;
  std::array<char, 4096> path{};
  std::array<char, 32> link{};
  std::snprintf(link.data(), link.size(), "/proc/self/fd/%d", file);
  if (readlink(link.data(), path.data(), path.size() - 1) < 0) path[0] = '\0';
  errno = kept;
  return judge(call, path.data(), bytes);
}

template <class Function>
Function* next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

std::size_t shortened(const Verdict& verdict, std::size_t bytes) {
  return verdict.cut ? (bytes + 1) / 2 : bytes;
}

mode_t mode_of(int flags, va_list arguments) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
}

}  // namespace

// The program's own calls and its libraries'.
#define NEXT(name) next(static_cast<decltype(&::name)>(&::name), #name)

extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return judge("open", path).error != 0 ? -1 : NEXT(open)(path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return judge("open", path).error != 0 ? -1 : NEXT(open64)(path, flags, mode);
}

int stat(const char* path, struct stat* status) noexcept {
  judge("stat", path);
  return NEXT(stat)(path, status);
}

ssize_t pread(int file, void* data, size_t bytes, off_t at) {
  return judge("read", file).error != 0 ? -1 : NEXT(pread)(file, data, bytes, at);
}

ssize_t pread64(int file, void* data, size_t bytes, off64_t at) {
  return judge("read", file).error != 0 ? -1 : NEXT(pread64)(file, data, bytes, at);
}

ssize_t write(int file, const void* data, size_t bytes) {
  const Verdict verdict = judge("write", file, {static_cast<const char*>(data), bytes});
  return verdict.error != 0 ? -1 : NEXT(write)(file, data, shortened(verdict, bytes));
}

ssize_t pwrite(int file, const void* data, size_t bytes, off_t at) {
  const Verdict verdict = judge("write", file, {static_cast<const char*>(data), bytes});
  return verdict.error != 0 ? -1 : NEXT(pwrite)(file, data, shortened(verdict, bytes), at);
}

ssize_t pwrite64(int file, const void* data, size_t bytes, off64_t at) {
  const Verdict verdict = judge("write", file, {static_cast<const char*>(data), bytes});
  return verdict.error != 0 ? -1 : NEXT(pwrite64)(file, data, shortened(verdict, bytes), at);
}

ssize_t writev(int file, const iovec* parts, int count) {
  const Verdict verdict = judge("write", file);
  if (verdict.error != 0) return -1;
  if (verdict.cut) {
    return NEXT(write)(file, parts[0].iov_base, shortened(verdict, parts[0].iov_len));
  }
  return NEXT(writev)(file, parts, count);
}

ssize_t pwritev(int file, const iovec* parts, int count, off_t at) {
  const Verdict verdict = judge("write", file);
  if (verdict.error != 0) return -1;
  if (verdict.cut) {
    return NEXT(pwrite)(file, parts[0].iov_base, shortened(verdict, parts[0].iov_len), at);
  }
  return NEXT(pwritev)(file, parts, count, at);
}

int fsync(int file) { return judge("fsync", file).error != 0 ? -1 : NEXT(fsync)(file); }

int rename(const char* from, const char* to) noexcept {
  return judge("rename", from).error != 0 ? -1 : NEXT(rename)(from, to);
}

int unlink(const char* path) noexcept {
  return judge("unlink", path).error != 0 ? -1 : NEXT(unlink)(path);
}

int remove(const char* path) noexcept {
  return judge("unlink", path).error != 0 ? -1 : NEXT(remove)(path);
}

int truncate(const char* path, off_t size) noexcept {
  return judge("truncate", path).error != 0 ? -1 : NEXT(truncate)(path, size);
}

int ftruncate(int file, off_t size) noexcept {
  return judge("truncate", file).error != 0 ? -1 : NEXT(ftruncate)(file, size);
}

int ftruncate64(int file, off64_t size) noexcept {
  return judge("truncate", file).error != 0 ? -1 : NEXT(ftruncate64)(file, size);
}

int fallocate(int file, int mode, off_t at, off_t bytes) {
  return judge("fallocate", file).error != 0 ? -1 : NEXT(fallocate)(file, mode, at, bytes);
}

// The file is closed all the same, as Linux does it.
int close(int file) {
  const Verdict verdict = judge("close", file);
  const int result = NEXT(close)(file);
  if (verdict.error == 0) return result;
  errno = verdict.error;
  return -1;
}

int MPI_Init_thread(int* count, char*** arguments, int wanted, int* granted) {
  judge("mpi", "MPI_Init_thread");
  return NEXT(MPI_Init_thread)(count, arguments, wanted, granted);
}

int MPI_Ibarrier(void* communicator, void** request) {
  judge("mpi", "MPI_Ibarrier");
  return NEXT(MPI_Ibarrier)(communicator, request);
}

int MPI_Isend(const void* data, int count, void* type, int peer, int tag, void* communicator,
              void** request) {
  judge("mpi", "MPI_Isend");
  return NEXT(MPI_Isend)(data, count, type, peer, tag, communicator, request);
}

int MPI_Finalize() {
  judge("mpi", "MPI_Finalize");
  return NEXT(MPI_Finalize)();
}

}  // extern "C"
