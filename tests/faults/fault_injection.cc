// Preloaded into a rank: makes it die, or fail, at a chosen MPI call. The program under test is the
// one that users run.
//   TESSERA_FAULT_RANK  which rank
//   TESSERA_FAULT_CALL  at its how-many-th call, from 1
//   TESSERA_FAULT_IN    of what; by default of MPI_Allreduce, MPI_Isend and MPI_Irecv
//     transfer            MPI_Test: in the midst of transfers
//     exchange            MPI_Isend and MPI_Irecv of the rows of experts
//     save                pwrite to a checkpoint
//   TESSERA_FAULT_KIND  throw | exit | exit0 | abort | kill | stop | error
#include <dlfcn.h>
#include <mpi.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace {

// MPI_SUCCESS, or the error that the call shall return.
int fault(const char* in) {
  static int calls = 0;
  const char* rank_wanted = std::getenv("TESSERA_FAULT_RANK");
  const char* call_wanted = std::getenv("TESSERA_FAULT_CALL");
  const char* in_wanted = std::getenv("TESSERA_FAULT_IN");
  const char* kind = std::getenv("TESSERA_FAULT_KIND");
  if (rank_wanted == nullptr || call_wanted == nullptr || kind == nullptr) return MPI_SUCCESS;
  if (std::strcmp(in, in_wanted == nullptr ? "call" : in_wanted) != 0) return MPI_SUCCESS;
  int rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != std::atoi(rank_wanted) || ++calls != std::atoi(call_wanted)) return MPI_SUCCESS;
  std::fprintf(stderr, "fault injected: %s\n", kind);
  if (std::strcmp(kind, "throw") == 0) throw std::runtime_error("injected fault");
  if (std::strcmp(kind, "exit") == 0) std::exit(9);
  if (std::strcmp(kind, "exit0") == 0) std::exit(0);
  if (std::strcmp(kind, "abort") == 0) std::abort();
  if (std::strcmp(kind, "kill") == 0) std::raise(SIGKILL);
  if (std::strcmp(kind, "stop") == 0) std::raise(SIGSTOP);
  return std::strcmp(kind, "error") == 0 ? MPI_ERR_OTHER : MPI_SUCCESS;
}

// Of a group of experts: the first communicator that is split off.
MPI_Comm expert_group = MPI_COMM_NULL;

int fault_of_message(MPI_Comm communicator) {
  const int error = communicator == expert_group ? fault("exchange") : MPI_SUCCESS;
  return error != MPI_SUCCESS ? error : fault("call");
}

}  // namespace

extern "C" {

int MPI_Comm_split(MPI_Comm parent, int color, int key, MPI_Comm* made) {
  const int error = PMPI_Comm_split(parent, color, key, made);
  if (expert_group == MPI_COMM_NULL) expert_group = *made;
  return error;
}

int MPI_Allreduce(const void* send, void* receive, int count, MPI_Datatype type, MPI_Op operation,
                  MPI_Comm communicator) {
  const int error = fault("call");
  return error != MPI_SUCCESS ? error
                              : PMPI_Allreduce(send, receive, count, type, operation, communicator);
}

int MPI_Isend(const void* data, int count, MPI_Datatype type, int peer, int tag,
              MPI_Comm communicator, MPI_Request* request) {
  const int error = fault_of_message(communicator);
  return error != MPI_SUCCESS ? error
                              : PMPI_Isend(data, count, type, peer, tag, communicator, request);
}

int MPI_Irecv(void* data, int count, MPI_Datatype type, int peer, int tag, MPI_Comm communicator,
              MPI_Request* request) {
  const int error = fault_of_message(communicator);
  return error != MPI_SUCCESS ? error
                              : PMPI_Irecv(data, count, type, peer, tag, communicator, request);
}

ssize_t pwrite(int file, const void* data, size_t bytes, off_t at) {
  const std::string link = "/proc/self/fd/" + std::to_string(file);
  std::array<char, 4096> path{};
  if (readlink(link.c_str(), path.data(), path.size() - 1) > 0 &&
      std::strstr(path.data(), ".h5.partial") != nullptr) {
    fault("save");
  }
  static const auto kNext = reinterpret_cast<decltype(&pwrite)>(dlsym(RTLD_NEXT, "pwrite"));
  return kNext(file, data, bytes, at);
}

// How often a barrier is asked for depends on the time alone: it doesn't count.
static MPI_Request* barrier = nullptr;
int MPI_Ibarrier(MPI_Comm communicator, MPI_Request* request) {
  barrier = request;
  return PMPI_Ibarrier(communicator, request);
}

int MPI_Test(MPI_Request* request, int* done, MPI_Status* status) {
  const int error = request == barrier ? MPI_SUCCESS : fault("transfer");
  return error != MPI_SUCCESS ? error : PMPI_Test(request, done, status);
}

}  // extern "C"
