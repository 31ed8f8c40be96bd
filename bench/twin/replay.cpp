// The engine's loop without Python: the same steps, in the same order, with the same run-ahead, on the same pack.
//
// The Python engine records the input block of every step (bench/twin.py); this gives them to the pack again, reads every result and keeps
// times. What the two take differs by what deciding in Python costs and nothing else.
//
// build: make twin (c++ -O2 -shared -fPIC); bound by ctypes.
#include <chrono>
#include <cstdint>
#include <cstring>

#include "../../packs/pack.h"

namespace {

using Clock = std::chrono::steady_clock;

int64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

}  // namespace

extern "C" {

typedef int32_t (*StepFunction)(pk_program *, const pk_step_head *);
typedef int32_t (*WaitFunction)(pk_program *, uint64_t, int64_t);

struct Replay {
    uint64_t step;            // pk_step, pk_wait of the pack
    uint64_t wait;
    uint64_t program;
    uint64_t results;         // pk_result [n_results, max_step_rows]
    uint64_t done;            // volatile u64
    uint64_t blocks;          // input blocks, one after the other, 8-byte aligned
    uint64_t offsets;         // i64 [n_steps]
    uint64_t ahead;           // i32 [n_steps]: steps that were in flight when this one was given
    uint64_t arrivals;        // i32 [n_steps]: results, per step
    uint64_t launched_ns;     // i64 [n_steps], written
    uint64_t read_ns;         // i64 [n_steps], written
    uint64_t tokens;          // i32 [n_slots, 1 << 20 / n_slots]: the answers, as the engine keeps them
    int64_t n_steps;
    int64_t n_results;
    int64_t max_step_rows;
    uint64_t first_seq;       // added to every step's number
    int64_t n_drawn;          // written: tokens that came out
};

// Takes in the results of a step, as the engine does: rows with a token are kept, flags are looked at.
static void read_step(Replay &r, int64_t i, int32_t *last) {
    const auto *head = reinterpret_cast<const pk_step_head *>(r.blocks + reinterpret_cast<const int64_t *>(r.offsets)[i]);
    const auto *rows = reinterpret_cast<const pk_result *>(r.results) + static_cast<int64_t>(head->seq % r.n_results) * r.max_step_rows;
    int32_t n = reinterpret_cast<const int32_t *>(r.arrivals)[i];
    for (int32_t k = 0; k < n; ++k) {
        if (rows[k].token < 0) continue;
        last[rows[k].slot] = rows[k].token;
        ++r.n_drawn;
    }
    reinterpret_cast<int64_t *>(r.read_ns)[i] = now_ns();
}

// Runs every step. 0, or the pack's status.
int32_t replay(Replay *given) {
    Replay &r = *given;
    auto step = reinterpret_cast<StepFunction>(r.step);
    auto wait = reinterpret_cast<WaitFunction>(r.wait);
    auto *program = reinterpret_cast<pk_program *>(r.program);
    auto *done = reinterpret_cast<volatile uint64_t *>(r.done);
    auto *ahead = reinterpret_cast<const int32_t *>(r.ahead);
    auto *last = reinterpret_cast<int32_t *>(r.tokens);
    int64_t read = 0;
    r.n_drawn = 0;
    for (int64_t i = 0; i < r.n_steps; ++i) {
        // As many may be in flight as were when the engine gave this step.
        while (read < i && (i - read > ahead[i] || *done >= r.first_seq + read + 1)) {
            if (int32_t status = wait(program, r.first_seq + read + 1, 60'000'000)) return status;
            read_step(r, read++, last);
        }
        auto *head = reinterpret_cast<pk_step_head *>(r.blocks + reinterpret_cast<const int64_t *>(r.offsets)[i]);
        reinterpret_cast<int64_t *>(r.launched_ns)[i] = now_ns();
        if (int32_t status = step(program, head)) return status;
    }
    while (read < r.n_steps) {
        if (int32_t status = wait(program, r.first_seq + read + 1, 60'000'000)) return status;
        read_step(r, read++, last);
    }
    return PK_OK;
}

}  // extern "C"
