// main of every test that runs under mpirun: a failure on any rank fails the program on all.
#include <gtest/gtest.h>
#include <mpi.h>

#include "runtime/device.h"

int main(int argc, char** argv) {
  tessera::keep_large_allocations();
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  testing::InitGoogleTest(&argc, argv);
  if (rank != 0) {
    // One voice is enough for what passes; failures are printed by every rank.
    delete testing::UnitTest::GetInstance()->listeners().Release(
        testing::UnitTest::GetInstance()->listeners().default_result_printer());
    class Failures : public testing::EmptyTestEventListener {
      void OnTestPartResult(const testing::TestPartResult& result) override {
        if (result.failed()) {
          int rank = 0;
          MPI_Comm_rank(MPI_COMM_WORLD, &rank);
          fprintf(stderr, "rank %d: %s:%d: %s\n", rank,
                  result.file_name() ? result.file_name() : "?", result.line_number(),
                  result.message());
        }
      }
    };
    testing::UnitTest::GetInstance()->listeners().Append(new Failures);
  }
  int failed = RUN_ALL_TESTS();
  int failed_anywhere = 0;
  MPI_Allreduce(&failed, &failed_anywhere, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return failed_anywhere;
}
