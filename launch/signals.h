// Signals that ask a run to stop: SIGTERM, SIGINT, SIGUSR1.
#pragma once

namespace tessera {

// The first signal sets a flag. A second SIGTERM or SIGINT ends the process at once; SIGUSR1 may
// come any number of times, since the launcher repeats it until it is acknowledged. The file named
// by the environment's TESSERA_SIGNAL_ACK, if any, is made when a signal is seen.
void install_stop_signals();
bool stop_signal_seen();
// For what has nothing to save: signals end the process from now on, as one that came before does.
void give_back_stop_signals();

}  // namespace tessera
