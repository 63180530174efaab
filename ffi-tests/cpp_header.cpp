// The header from C++: linkage, enum types, and a handle in a unique_ptr.
#include <cinch.h>

#include "harness.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

static_assert(std::is_enum<cinch_dtype_t>::value, "an int must not pass for a dtype");
static_assert(sizeof(cinch_result_t) == 4 && sizeof(cinch_op_t) == 4, "as in C");
static_assert(std::is_trivially_copyable<cinch_config_t>::value, "a struct of C");
static_assert(sizeof(cinch_unique_id_t) == 128, "128 bytes");

namespace {

void check(cinch_result_t code) {
    if (code != CINCH_SUCCESS)
        throw std::runtime_error(std::string(cinch_error_string(code)) + ": " + cinch_last_error());
}

struct Leave {
    void operator()(cinch_comm_t *comm) const { cinch_comm_destroy(comm); }
};

} // namespace

int main(int argc, char **argv) {
    try {
        check(cinch_comm_destroy(nullptr));
        FAIL("a null communicator was destroyed");
    } catch (const std::runtime_error &error) {
        CHECK(std::string(error.what()).find("comm is NULL") != std::string::npos);
    }
    if (argc == 1) return 0;

    std::unique_ptr<cinch_comm_t, Leave> comm(harness_join(argc, argv));
    std::vector<double> data(1000, harness_rank + 1.0);
    check(cinch_all_reduce(data.data(), data.data(), data.size(), CINCH_F64, CINCH_SUM, comm.get(), nullptr));
    for (double value : data) CHECK(value == harness_nranks * (harness_nranks + 1) / 2.0);

    cinch_op_t half;
    const double factor = 0.5;
    check(cinch_op_create_premulsum(comm.get(), &factor, CINCH_F64, &half));
    check(cinch_all_reduce(data.data(), data.data(), data.size(), CINCH_F64, half, comm.get(), nullptr));
    check(cinch_op_destroy(comm.get(), half));

    cinch_call_t call;
    cinch_report_t report;
    check(cinch_call_default(&call));
    check(cinch_report_default(&report));
    call.comm = comm.get();
    call.collective = CINCH_ALL_REDUCE;
    call.sendbuf = call.recvbuf = data.data();
    call.count = data.size();
    call.dtype = CINCH_F64;
    check(cinch_call(&call, &report));
    CHECK(std::string(report.codec) == "raw");
    check(cinch_comm_finalize(comm.get()));
    return 0;
}
