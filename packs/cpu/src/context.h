// An open context of the CPU pack: instruction level, thread pool, counters.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "../../host/error.h"
#include "../../pack.h"
#include "part.h"
#include "pool.h"

namespace pk {

// What a machine was proved to run. Each level contains those below. Sources named *_avx2.cpp, *_avx512.cpp and
// *_amx.cpp are compiled for that level (CMakeLists.txt has the flags); all others for plain x86-64, so they must call
// level code through function pointers or a switch on Context::isa. A level source must define nothing with external
// linkage outside a namespace of its own and instantiate no std:: templates (the linker would merge them with others').
enum class Isa : int32_t {
    kAvx2 = 1,    // AVX2, FMA, F16C, BMI2
    kAvx512 = 2,  // F, BW, VL, DQ, CD, VNNI
    kAmx = 3,     // + AVX512-BF16, VBMI, AMX tile, int8, bf16
};

}  // namespace pk

struct pk_ctx {
    explicit pk_ctx(int32_t n_threads) : pool(n_threads) {}
    pk::Pool pool;
    pk::Isa isa = pk::Isa::kAvx2;
    bool is_invariant = false;  // a row's numbers depend on the row alone
    int32_t n_parted = 0;             // threads that pk_part took
    std::unique_ptr<pk::Part> part;  // of a context that pk_part made: who runs its steps
    std::mutex busy;  // one step, repack or run at a time
    std::atomic<int64_t> n_allocations{0}, allocated_bytes{0}, n_steps{0}, n_repacked_bytes{0}, n_copies{0};
};

namespace pk {
using Context = pk_ctx;
}
