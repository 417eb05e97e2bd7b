#include "launch/signals.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <initializer_list>

namespace tessera {
namespace {

// The handler may run on any thread, the step's reads it.
std::atomic<bool> stop_seen{false};
static_assert(std::atomic<bool>::is_always_lock_free, "or a handler couldn't use it");
const char* acknowledgement = nullptr;  // set before the handlers

void handle(int signal) {
  if (stop_seen && signal != SIGUSR1) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
    return;
  }
  const int error = errno;  // of whatever was interrupted
  stop_seen = true;
  if (acknowledgement != nullptr) {
    const int file = open(acknowledgement, O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
    if (file >= 0) close(file);
  }
  errno = error;
}

}  // namespace

void install_stop_signals() {
  acknowledgement = std::getenv("TESSERA_SIGNAL_ACK");
  struct sigaction action = {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaction(signal, &action, nullptr);
}

bool stop_signal_seen() { return stop_seen; }

}  // namespace tessera
