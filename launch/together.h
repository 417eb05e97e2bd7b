// What all ranks do or fail together: no rank may go on, or hang, while another has given up.
#pragma once

#include <new>
#include <string>
#include <string_view>

#include "parallel/communicator.h"
#include "runtime/error.h"

namespace tessera {

// An error that every rank has: the job ends in order, rank 0 prints it, no one is aborted.
class AgreedError : public Error {
 public:
  using Error::Error;
};

// Collective. Runs `action` here; if it threw an Error on any rank, throws the first rank's on all.
template <class Action>
void together(Communicator& communicator, std::string_view what, const Action& action) {
  std::string message;
  ExitCode code = ExitCode::kDone;
  try {
    action();
  } catch (const Error& error) {
    message = error.what();
    code = error.code();
  } catch (const std::bad_alloc&) {
    message = "not enough memory to " + std::string(what);
    code = ExitCode::kUsage;
  }
  try {
    communicator.agree(what, code, message);
  } catch (const Error& error) {
    throw AgreedError(error.code(), error.what());
  }
}

// For collective operations that throw the same error on all ranks by themselves.
template <class Action>
void agreed(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    throw AgreedError(error.code(), error.what());
  }
}

}  // namespace tessera
