// Preloaded into a rank: makes it die, or fail, at a chosen MPI reduction. The program under test
// is the one that users run.
//   TESSERA_FAULT_RANK  which rank
//   TESSERA_FAULT_CALL  at its how-many-th MPI_Allreduce, from 1
//   TESSERA_FAULT_KIND  throw | exit | exit0 | abort | kill | stop | error | sleep
#include <mpi.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

extern "C" int MPI_Allreduce(const void* send, void* receive, int count, MPI_Datatype type,
                             MPI_Op operation, MPI_Comm communicator) {
  static int calls = 0;
  const char* rank_wanted = std::getenv("TESSERA_FAULT_RANK");
  const char* call_wanted = std::getenv("TESSERA_FAULT_CALL");
  const char* kind = std::getenv("TESSERA_FAULT_KIND");
  int rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank_wanted && call_wanted && kind && rank == std::atoi(rank_wanted) &&
      ++calls == std::atoi(call_wanted)) {
    std::fprintf(stderr, "fault injected: %s\n", kind);
    if (std::strcmp(kind, "throw") == 0) throw std::runtime_error("injected fault");
    if (std::strcmp(kind, "exit") == 0) std::exit(9);
    if (std::strcmp(kind, "exit0") == 0) std::exit(0);
    if (std::strcmp(kind, "abort") == 0) std::abort();
    if (std::strcmp(kind, "kill") == 0) std::raise(SIGKILL);
    if (std::strcmp(kind, "stop") == 0) std::raise(SIGSTOP);
    if (std::strcmp(kind, "error") == 0) return MPI_ERR_OTHER;
    if (std::strcmp(kind, "sleep") == 0) sleep(3600);
  }
  return PMPI_Allreduce(send, receive, count, type, operation, communicator);
}
