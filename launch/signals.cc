#include "launch/signals.h"

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <initializer_list>

namespace tessera {
namespace {

volatile std::sig_atomic_t stop_seen = 0;
const char* acknowledgement = nullptr;  // set before the handlers

void handle(int signal) {
  if (stop_seen != 0 && signal != SIGUSR1) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
    return;
  }
  stop_seen = 1;
  if (acknowledgement != nullptr) {
    const int file = open(acknowledgement, O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
    if (file >= 0) close(file);
  }
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

bool stop_signal_seen() { return stop_seen != 0; }

}  // namespace tessera
