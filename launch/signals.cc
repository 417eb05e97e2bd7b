#include "launch/signals.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>

namespace tessera {
namespace {

constexpr std::array kStopSignals = {SIGTERM, SIGINT, SIGUSR1};

// Set by any thread's handler, read by the main thread; so no volatile sig_atomic_t.
std::atomic<int> seen{0};  // the first signal
static_assert(std::atomic<int>::is_always_lock_free);
const char* acknowledgement = nullptr;  // set before the handlers

// Calls only what a handler may call (POSIX.1, 2.4.3), and leaves errno to what it interrupts.
void handle(int signal) {
  const int kept = errno;
  int none = 0;
  if (!seen.compare_exchange_strong(none, signal) && signal != SIGUSR1) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  } else if (acknowledgement != nullptr) {
    const int file = open(acknowledgement, O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
    if (file >= 0) close(file);
  }
  errno = kept;
}

}  // namespace

void install_stop_signals() {
  acknowledgement = std::getenv("TESSERA_SIGNAL_ACK");
  struct sigaction action = {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int signal : kStopSignals) sigaction(signal, &action, nullptr);
}

bool stop_signal_seen() { return seen != 0; }

void give_back_stop_signals() {
  for (const int signal : kStopSignals) std::signal(signal, SIG_DFL);
  if (seen != 0) std::raise(seen);
}

}  // namespace tessera
