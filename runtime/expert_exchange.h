// Rows of tokens on their way to the ranks of their experts and back: layers use it, parallel
// implements it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera {

// The experts of a layer over a group of ranks: rank k of E holds [k*N div E, (k+1)*N div E) of its
// N experts, so that E needn't divide N. A rank may hold none.
struct ExpertPlacement {
  int ranks = 1;  // E
  int rank = 0;   // k
  std::int64_t begin(std::int64_t experts, int of) const { return of * experts / ranks; }
  std::int64_t begin(std::int64_t experts) const { return begin(experts, rank); }
  std::int64_t end(std::int64_t experts) const { return begin(experts, rank + 1); }
  std::int64_t count(std::int64_t experts) const { return end(experts) - begin(experts); }
  // The most that one rank holds.
  std::int64_t largest(std::int64_t experts) const { return (experts + ranks - 1) / ranks; }
};

// An exchange between the ranks of one group, which all make the same calls in the same order with
// other sizes. Both sides of a message know its size; between two ranks messages match in order;
// one to the caller itself is copied; an empty one isn't sent. Memory is the caller's, and is left
// alone from start() to finish(). Allocates nothing once it has seen the most messages.
class ExpertExchange {
 public:
  virtual ~ExpertExchange() = default;
  virtual int ranks() const = 0;
  virtual int rank() const = 0;
  // The messages of the exchange to come.
  virtual void send(int peer, std::byte* data, std::int64_t bytes) = 0;
  virtual void receive(int peer, std::byte* data, std::int64_t bytes) = 0;
  // Collective in the group. `phase` names the transfer in errors and for the watchdog.
  virtual void start(std::string_view phase) = 0;
  // Waits until everything has been sent and has come.
  virtual void finish() = 0;
};

}  // namespace tessera
