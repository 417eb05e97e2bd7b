// Preloaded into every rank: delays the calls that ranks must make in the same order by random
// times, and records them. At MPI_Finalize rank N's go to FOLDER/N, a line each:
//   "member COMMUNICATOR RANK SIZE"   a communicator begins
//   "all COMMUNICATOR CALL BYTES"     of all its ranks together
//   "send COMMUNICATOR PEER BYTES TAG", "receive ..."
// A communicator's name says how it was made, the same on all its ranks: "w.2" is the second from
// the world, "w.1.1:3" the first from w.1, of colour 3.
//   TESSERA_CALLS_FOLDER  FOLDER
//   TESSERA_CALLS_DELAY   the longest delay, in microseconds
//   TESSERA_CALLS_SEED    of the delays
#include <mpi.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>

namespace {

std::string record;

int world_rank() {
  int rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

unsigned long number_of(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? 0 : std::strtoul(value, nullptr, 10);
}

void delay() {
  static const unsigned long longest = number_of("TESSERA_CALLS_DELAY");
  static std::minstd_rand random(
      static_cast<unsigned>(1000 * number_of("TESSERA_CALLS_SEED") + world_rank() + 1));
  if (longest > 0) usleep(static_cast<useconds_t>(random() % (longest + 1)));
}

std::map<MPI_Comm, std::string>& names() {
  static std::map<MPI_Comm, std::string> names = {{MPI_COMM_WORLD, "w"}};
  return names;
}

void name(MPI_Comm parent, MPI_Comm made, const std::string& color) {
  static std::map<std::string, int> children;
  const std::string of_parent = names()[parent];
  const std::string name = of_parent + "." + std::to_string(++children[of_parent]) + color;
  names()[made] = name;
  int rank = 0, size = 0;
  PMPI_Comm_rank(made, &rank);
  PMPI_Comm_size(made, &size);
  record += "member " + name + " " + std::to_string(rank) + " " + std::to_string(size) + "\n";
}

long long bytes(int count, MPI_Datatype type) {
  int size = 0;
  PMPI_Type_size(type, &size);
  return static_cast<long long>(count) * size;
}

void of_all(MPI_Comm communicator, const char* call, long long bytes) {
  delay();
  record += "all " + names()[communicator] + " " + call + " " + std::to_string(bytes) + "\n";
}

void message(const char* way, MPI_Comm communicator, int peer, long long bytes, int tag) {
  delay();
  record += std::string(way) + " " + names()[communicator] + " " + std::to_string(peer) + " " +
            std::to_string(bytes) + " " + std::to_string(tag) + "\n";
}

}  // namespace

extern "C" {

int MPI_Comm_dup(MPI_Comm parent, MPI_Comm* made) {
  of_all(parent, "dup", 0);
  const int error = PMPI_Comm_dup(parent, made);
  name(parent, *made, "");
  return error;
}

int MPI_Comm_split(MPI_Comm parent, int color, int key, MPI_Comm* made) {
  of_all(parent, "split", 0);
  const int error = PMPI_Comm_split(parent, color, key, made);
  name(parent, *made, ":" + std::to_string(color));
  return error;
}

int MPI_Allreduce(const void* send, void* receive, int count, MPI_Datatype type, MPI_Op operation,
                  MPI_Comm communicator) {
  of_all(communicator, "allreduce", bytes(count, type));
  return PMPI_Allreduce(send, receive, count, type, operation, communicator);
}

int MPI_Allgather(const void* send, int send_count, MPI_Datatype send_type, void* receive,
                  int receive_count, MPI_Datatype receive_type, MPI_Comm communicator) {
  of_all(communicator, "allgather", bytes(receive_count, receive_type));
  return PMPI_Allgather(send, send_count, send_type, receive, receive_count, receive_type,
                        communicator);
}

int MPI_Bcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm communicator) {
  of_all(communicator, "bcast", bytes(count, type));
  return PMPI_Bcast(data, count, type, root, communicator);
}

int MPI_Barrier(MPI_Comm communicator) {
  of_all(communicator, "barrier", 0);
  return PMPI_Barrier(communicator);
}

int MPI_Ibarrier(MPI_Comm communicator, MPI_Request* request) {
  of_all(communicator, "ibarrier", 0);
  return PMPI_Ibarrier(communicator, request);
}

int MPI_Isend(const void* data, int count, MPI_Datatype type, int peer, int tag,
              MPI_Comm communicator, MPI_Request* request) {
  message("send", communicator, peer, bytes(count, type), tag);
  return PMPI_Isend(data, count, type, peer, tag, communicator, request);
}

int MPI_Irecv(void* data, int count, MPI_Datatype type, int peer, int tag, MPI_Comm communicator,
              MPI_Request* request) {
  message("receive", communicator, peer, bytes(count, type), tag);
  return PMPI_Irecv(data, count, type, peer, tag, communicator, request);
}

int MPI_Finalize() {
  if (const char* folder = std::getenv("TESSERA_CALLS_FOLDER")) {
    const std::string path = std::string(folder) + "/" + std::to_string(world_rank());
    if (std::FILE* file = std::fopen(path.c_str(), "w")) {
      std::fputs(record.c_str(), file);
      std::fclose(file);
    }
  }
  return PMPI_Finalize();
}

}  // extern "C"
