// Starts a communicator in an MPI program: rank 0 creates the unique id, MPI_Bcast distributes it.
// Checks an all_reduce of cinch against MPI_Allreduce.
//
//   cargo build --release --workspace
//   mpicxx -I include -o mpi_start examples/cpp/mpi_start.cpp target/release/libcinch.a -pthread -lm
//   mpirun -n 4 ./mpi_start
#include <cinch.h>
#include <mpi.h>

#include <cstdio>
#include <vector>

// Ends all ranks if `code` is an error. MPI's own errors do so by default.
static void check(cinch_result_t code, const char *call) {
    if (code == CINCH_SUCCESS) return;
    std::fprintf(stderr, "%s: %s\n", call, cinch_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}
#define CHECK(call) check((call), #call)

int main(int argc, char **argv) {
    int rank, nranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);

    // The id holds the job's secret: any process that has its bytes can join.
    cinch_unique_id_t id = {};
    if (rank == 0) CHECK(cinch_unique_id_create(&id));
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);

    cinch_comm_t *comm = nullptr;
    CHECK(cinch_comm_init(&id, rank, nranks, nullptr, &comm));

    // Sums of these integers are exact in a double, in any order.
    std::vector<double> input(100000), output(input.size()), expected(input.size());
    for (std::size_t i = 0; i < input.size(); i++) input[i] = double((rank + 1) * i);
    CHECK(cinch_all_reduce(input.data(), output.data(), input.size(), CINCH_F64, CINCH_SUM, comm,
                           nullptr));
    MPI_Allreduce(input.data(), expected.data(), int(input.size()), MPI_DOUBLE, MPI_SUM,
                  MPI_COMM_WORLD);
    bool same = output == expected;
    std::printf("rank %d of %d: the sums of cinch and MPI are %s\n", rank, nranks,
                same ? "equal" : "different");

    CHECK(cinch_comm_finalize(comm));
    CHECK(cinch_comm_destroy(comm));
    MPI_Finalize();
    return same ? 0 : 1;
}
