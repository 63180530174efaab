// Compares cinch's libnccl.so.2 with results computed on the host and, given as many GPUs as ranks, with
// another libnccl. Covers every collective, type and operation at 40 sizes, in and out of place; messages;
// groups; one thread for all ranks; graphs.
//
// compare --ours PATH [--reference PATH] [--ranks 1,2,3,4,8] [--seed N] [--types NAME,...] [--host 1]
//
// With --host 1 and CINCH_DEVICE=host everything except graphs runs on host memory and needs no GPU.
//
// Integers, maxima and minima must have equal bits; other floats must lie within the error of any order of
// rounding. With fewer GPUs than ranks, ranks of cinch share GPUs. Prints a line for each failure, and the
// counts. scripts/test-nccl compiles and runs this program.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "compare/collectives.h"
#include "compare/patterns.h"

using namespace compare;

namespace {

struct Options {
    std::string ours, reference, types;
    std::vector<int> ranks = {1, 2, 3, 4, 8};
    uint64_t seed = 20260101;
    bool host = false;
};

struct Counts {
    int passed = 0, failed = 0, skipped = 0;

    void pass() { passed++; }
    void fail(const std::string &what, const std::string &why) {
        failed++;
        std::printf("FAIL %s: %s\n", what.c_str(), why.c_str());
        std::fflush(stdout);
    }
    void skip(const std::string &what, const std::string &why) {
        skipped++;
        std::printf("skip %s: %s\n", what.c_str(), why.c_str());
    }
    // Prints the progress, so that the log of a run that is killed shows how far it came.
    void tell(const std::string &behind) const {
        std::printf("behind %s: %d passed, %d failed so far\n", behind.c_str(), passed, failed);
        std::fflush(stdout);
    }
};

bool wanted(const Options &options, const Type &type) {
    if (options.types.empty()) return true;
    std::stringstream list(options.types);
    for (std::string one; std::getline(list, one, ',');)
        if (one == type.name) return true;
    return false;
}

// Fails on an unknown type name, which would select no check and let the run pass.
void check_types(const std::string &names) {
    std::stringstream list(names);
    size_t found = 0;
    for (std::string one; std::getline(list, one, ','); found++) {
        std::string known;
        for (const Type &type : kTypes) known += (known.empty() ? "" : ", ") + std::string(type.name);
        if ((", " + known + ", ").find(", " + one + ", ") == std::string::npos)
            throw Failure("no type is called " + one + "; there are: " + known);
    }
    if (found == 0) throw Failure("--types names no type");
}

bool exists(const Library &library, Kind kind) {
    switch (kind) {
        case Kind::AlltoAll: return library.AlltoAll != nullptr;
        case Kind::Gather: return library.Gather != nullptr;
        case Kind::Scatter: return library.Scatter != nullptr;
        default: return true;
    }
}

// Returns why the reference cannot run a case; empty if it can.
std::string unsuited(const Library &reference, const Cuda &cuda, const Case &c) {
    if (!exists(reference, c.kind)) return "has none";
    if (c.kind == Kind::AlltoAll && c.in_place) return "has none in place";
    const bool eight_bits = c.type->is_float && c.type->bytes == 1;
    if (eight_bits && reference.version() < 22400) return "has no such type";
    if (eight_bits && reduces(c.kind) && cuda.compute_major(0) < 9) return "needs a newer GPU";
    return "";
}

std::string show(const Case &c) {
    std::string text = std::string(name(c.kind)) + " of " + std::to_string(c.count) + " " + c.type->name;
    if (reduces(c.kind)) text += std::string(", ") + name(c.op);
    return text + (c.in_place ? ", in place" : "");
}

// Checks one combination of collective, type and operation at all sizes, and counts it as one
// check.
void check_sizes(World &ours, Checker &checker, World *reference, Checker *other, Kind kind, const Type &type,
                 Op op, Counts &counts) {
    const int n = ours.size();
    std::string what = std::to_string(n) + " ranks, ";
    try {
        for (size_t index = 0; index < sizeof kSizes / sizeof *kSizes; index++) {
            const bool blocks = kind != Kind::AllReduce && kind != Kind::Reduce && kind != Kind::Broadcast &&
                                kind != Kind::Bcast;
            const size_t most = blocks ? kLargest / static_cast<size_t>(n) : kLargest;
            for (bool in_place : {false, true}) {
                const Case c = {kind,
                                &type,
                                op,
                                std::min(kSizes[index], most),
                                in_place,
                                static_cast<int>(index) % n,
                                index % 3 == 1 ? size_t{1} : size_t{0}};
                what = std::to_string(n) + " ranks, " + show(c);
                const auto found = checker.run(c);
                if (!other || !unsuited(reference->library(), reference->cuda(), c).empty()) continue;
                const bool exact = !reduces(kind) || !type.is_float || op == Op::Max || op == Op::Min;
                auto theirs = found;
                try {
                    theirs = other->run(c);
                } catch (const Failure &failure) {
                    // Cinch's result was right, so a wrong result of the reference is printed but
                    // fails nothing.
                    std::printf("note %s: the reference: %s\n", what.c_str(), failure.what());
                }
                if (exact && theirs != found) throw Failure("the two libraries differ");
            }
        }
        counts.pass();
    } catch (const Failure &failure) {
        counts.fail(what, failure.what());
        // The failure may have broken the communicators, so the caller creates new ones.
        throw;
    }
}

void check_collectives(const Options &options, const Cuda &cuda, const Library &ours, const Library *reference,
                       int ranks, Counts &counts) {
    const size_t bytes = kLargest * 8;
    std::unique_ptr<World> world, other;
    std::unique_ptr<Checker> checker, beside;
    for (const Type &type : kTypes) {
        if (!wanted(options, type)) continue;
        for (Op op : kOps) {
            bool prepared = false;
            for (Kind kind : kKinds) {
                if (!reduces(kind) && op != Op::Sum) continue;
                if (!exists(ours, kind)) {
                    counts.fail(name(kind), "cinch's library has none");
                    continue;
                }
                try {
                    if (!world) {
                        world = std::make_unique<World>(cuda, ours, ranks, bytes, false);
                        checker = std::make_unique<Checker>(*world, options.seed);
                        if (reference) {
                            other = std::make_unique<World>(cuda, *reference, ranks, bytes, false);
                            beside = std::make_unique<Checker>(*other, options.seed);
                        }
                        prepared = false;
                    }
                    if (!prepared) {
                        checker->prepare(type, op);
                        if (beside) beside->prepare(type, op);
                        prepared = true;
                    }
                } catch (const Failure &failure) {
                    counts.fail(std::to_string(ranks) + " ranks, joining", failure.what());
                    return;
                }
                try {
                    check_sizes(*world, *checker, other.get(), beside.get(), kind, type, op, counts);
                } catch (const Failure &) {
                    checker.reset(), beside.reset(), world.reset(), other.reset();
                }
            }
        }
        counts.tell(std::to_string(ranks) + " ranks, " + type.name);
    }
    try {
        if (world) world->finish();
        if (other) other->finish();
        counts.pass();
    } catch (const Failure &failure) {
        counts.fail(std::to_string(ranks) + " ranks, leaving", failure.what());
    }
}

void check_patterns(const Options &options, const Cuda &cuda, const Library &library, int ranks, Counts &counts) {
    const size_t bytes = size_t{64} << 20;
    const auto check = [&](const char *what, bool one_thread, const std::function<void(World &)> &body) {
        const std::string full = std::to_string(ranks) + " ranks, " + what + (library.is_ours() ? "" : " (reference)");
        try {
            World world(cuda, library, ranks, bytes, one_thread);
            body(world);
            world.finish();
            counts.pass();
        } catch (const Failure &failure) {
            counts.fail(full, failure.what());
        }
    };
    const auto messages = [&](const char *what, std::vector<Message> (*pattern)(int, size_t)) {
        check(what, false, [&](World &world) {
            for (size_t count : {size_t{0}, size_t{1}, size_t{1023}, size_t{65537}, size_t{300007}})
                run_messages(world, pattern(ranks, count), options.seed);
        });
    };
    messages("messages around a ring", ring);
    messages("uneven messages of all to all and oneself", uneven);
    messages("messages of one to all", one_to_all);
    messages("several messages of a pair in order", several_in_order);
    check("nested groups", false, run_groups);
    check("one thread for all ranks", true, run_from_one_thread);
    if (cuda.is_host()) counts.skip(std::to_string(ranks) + " ranks, a graph, replayed", "host memory has none");
    else check("a graph, replayed", false, run_graph);
}

Options parse(int argc, char **argv) {
    Options options;
    for (int at = 1; at < argc; at++) {
        const std::string option = argv[at];
        if (at + 1 == argc) throw Failure(option + " needs a value");
        const std::string value = argv[++at];
        if (option == "--ours") options.ours = value;
        else if (option == "--reference") options.reference = value;
        else if (option == "--types") check_types(options.types = value);
        else if (option == "--host") options.host = value == "1";
        else if (option == "--seed") options.seed = std::strtoull(value.c_str(), nullptr, 10);
        else if (option == "--ranks") {
            options.ranks.clear();
            std::stringstream list(value);
            for (std::string one; std::getline(list, one, ',');) {
                const int ranks = std::atoi(one.c_str());
                if (ranks < 1 || ranks > 32) throw Failure("--ranks takes numbers from 1 to 32");
                options.ranks.push_back(ranks);
            }
            if (options.ranks.empty()) throw Failure("--ranks has no number");
        } else throw Failure("no option is called " + option);
    }
    if (options.ours.empty()) throw Failure("--ours PATH is needed");
    const char *device = std::getenv("CINCH_DEVICE");
    if (options.host && (!device || std::string(device) != "host"))
        throw Failure("--host 1 goes with CINCH_DEVICE=host");
    if (options.host && !options.reference.empty()) throw Failure("--reference needs GPUs");
    return options;
}

}  // namespace

int main(int argc, char **argv) {
    Counts counts;
    try {
        const Options options = parse(argc, argv);
        const Library ours(options.ours, true);
        std::unique_ptr<Library> reference;
        if (!options.reference.empty()) reference = std::make_unique<Library>(options.reference, false);
        std::printf("ours %s answers as %d; seed %llu\n", ours.path().c_str(), ours.version(),
                    static_cast<unsigned long long>(options.seed));
        Cuda cuda(options.host);
        if (!cuda.open()) {
            counts.skip("everything", "no driver or no GPU");
            std::printf("%d passed, %d failed, %d skipped\n", counts.passed, counts.failed, counts.skipped);
            return 0;
        }
        std::printf("%d GPUs; reference: %s\n", cuda.gpus(),
                    reference ? (reference->path() + ", " + std::to_string(reference->version())).c_str() : "none");
        for (int ranks : options.ranks) {
            const Library *beside = reference.get();
            if (beside && ranks > cuda.gpus()) {
                counts.skip(std::to_string(ranks) + " ranks beside the reference",
                            "it takes a GPU for each, and there are " + std::to_string(cuda.gpus()));
                beside = nullptr;
            }
            check_collectives(options, cuda, ours, beside, ranks, counts);
            check_patterns(options, cuda, ours, ranks, counts);
            if (beside) check_patterns(options, cuda, *beside, ranks, counts);
            counts.tell(std::to_string(ranks) + " ranks, patterns");
        }
    } catch (const Failure &failure) {
        counts.fail("compare", failure.what());
    }
    std::printf("%d passed, %d failed, %d skipped\n", counts.passed, counts.failed, counts.skipped);
    // _exit ends the process even if threads still wait for a GPU.
    std::fflush(stdout);
    std::_Exit(counts.failed == 0 ? 0 : 1);
}
